"""Confirmed dispatch on RabbitMQ: runs wait for a broker that dies; a refused queue waits alone."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from kombu import Connection, Queue

from celery_dtimer import DistributedTimer
from tests.conftest import MakeApp
from tests.servers import free_port
from tests.waiting import wait_until

pytestmark = pytest.mark.failover

SERVER = "/usr/lib/rabbitmq/bin/rabbitmq-server"  # Debian's; the one on the PATH wants its own user


class RabbitMQ:
    """A private RabbitMQ node on loopback, with a port mapper of its own."""

    def __init__(self, folder: Path) -> None:
        self.port, distribution, self.mapper = free_port(), free_port(), free_port()
        self.url = f"amqp://guest:guest@127.0.0.1:{self.port}//"
        (folder / "plugins").write_text("[].\n")
        (folder / "rabbitmq.conf").write_text(
            f"listeners.tcp.1 = 127.0.0.1:{self.port}\nlog.console = true\nlog.file = false\n"
            "disk_free_limit.absolute = 50MB\n"
        )
        self._folder = folder
        self._environment = {
            **os.environ,
            "HOME": str(folder),
            "RABBITMQ_NODENAME": f"n{self.port}@localhost",
            "RABBITMQ_DIST_PORT": str(distribution),
            "ERL_EPMD_PORT": str(self.mapper),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "RABBITMQ_MNESIA_BASE": str(folder / "mnesia"),
            "RABBITMQ_LOG_BASE": str(folder / "log"),
            "RABBITMQ_CONFIG_FILE": str(folder / "rabbitmq"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(folder / "plugins"),
            "RABBITMQ_GENERATED_CONFIG_DIR": str(folder / "generated"),
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "+S 1:1 +sbwt none "
            "-kernel inet_dist_use_interface {127,0,0,1}",
        }
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with (self._folder / "out").open("ab") as out:
            self._process = subprocess.Popen(
                [SERVER],
                env=self._environment,
                cwd=self._folder,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        wait_until(self._answers, "RabbitMQ to answer", 90)

    def _answers(self) -> bool:
        try:
            with Connection(self.url, connect_timeout=1) as connection:
                connection.ensure_connection(max_retries=0, interval_start=0)
        except Exception:
            return False
        return True

    def kill(self) -> None:
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def close(self) -> None:
        self.kill()
        for entry in Path("/proc").glob("[0-9]*/environ"):  # the port mapper leaves the group
            try:
                is_ours = f"ERL_EPMD_PORT={self.mapper}\0".encode() in entry.read_bytes()
            except OSError:
                continue
            if is_ours and int(entry.parent.name) != os.getpid():
                os.kill(int(entry.parent.name), signal.SIGKILL)


@pytest.fixture
def rabbitmq(tmp_path: Path) -> Iterator[RabbitMQ]:
    if not Path(SERVER).exists():
        if os.environ.get("CI"):
            pytest.fail("RabbitMQ is missing: the tests need Debian's rabbitmq-server")
        pytest.skip("RabbitMQ is not installed")
    folder = tmp_path / "rabbitmq"
    folder.mkdir()
    server = RabbitMQ(folder)
    try:
        server.start()
        yield server
    finally:
        server.close()


@pytest.fixture
def app(make_app: MakeApp, redis_server: Any, rabbitmq: RabbitMQ) -> Celery:
    return make_app(
        broker_url=rabbitmq.url, dtimer_redis_url=redis_server.url, dtimer_instance_timeout=3
    )


@pytest.fixture
def timers(app: Celery) -> Iterator[DistributedTimer]:
    timers = DistributedTimer(app)
    timers.start()
    yield timers
    timers.stop()


def _reader(url: str, queue: str) -> Callable[[], list[dict[str, Any]]]:
    """Return a function that answers all headers read from a queue so far."""
    seen: list[dict[str, Any]] = []

    def read() -> list[dict[str, Any]]:
        with Connection(url, connect_timeout=1) as connection:
            simple = connection.SimpleQueue(Queue(queue))
            while True:
                try:
                    message = simple.get(block=False)
                except simple.Empty:
                    return seen
                seen.append(message.headers)
                message.ack()

    return read


def test_runs_wait_for_a_broker_that_dies(
    app: Celery, timers: DistributedTimer, rabbitmq: RabbitMQ
) -> None:
    queue = app.conf.task_default_queue
    read = _reader(rabbitmq.url, queue)
    timers.create_timer("every", 0.5, "some.task")
    wait_until(lambda: len(read()) >= 3, "three runs", 20)
    instance = timers.get_service_instances()[0]
    rabbitmq.kill()
    timers.create_timer("once", _soon(), "some.task")
    wait_until(lambda: timers.get_timer("every").next_run_at < _soon(-2), "a run to be late", 20)
    rabbitmq.start()
    wait_until(lambda: timers.get_timer("once").total_run_count == 1, "the late run", 20)
    wait_until(lambda: "once" in [each["dtimer"]["name"] for each in read()], "its message", 20)
    runs = [each["dtimer"]["run"] for each in read() if each["dtimer"]["name"] == "every"]
    assert set(runs) == set(range(1, max(runs) + 1)), "a run was committed and not sent"
    assert timers.get_service_instances()[0].epoch == instance.epoch, "the lease was lost"
    assert timers.check_consistency() == []


def test_a_queue_that_is_refused_delays_only_its_own_timer(
    app: Celery, timers: DistributedTimer, rabbitmq: RabbitMQ
) -> None:
    with Connection(rabbitmq.url) as connection:  # declared otherwise than Celery would
        Queue("refused", durable=False, auto_delete=True).bind(connection.channel()).declare()
        timers.create_timer("bad", 0.3, "some.task", queue="refused")
        timers.create_timer("good", 0.3, "some.task")
        wait_until(lambda: timers.get_timer("good").total_run_count >= 8, "good runs", 20)
        bad = timers.get_timer("bad")
    assert (bad.status, bad.total_run_count) == ("active", 0)


def _soon(seconds: float = 0.0) -> datetime:
    return datetime.now(timezone.utc) + timedelta(seconds=seconds)
