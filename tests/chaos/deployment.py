"""The servers of an episode, and how beats, workers and the suite itself reach them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

import redis
from celery import Celery

from celery_dtimer import DistributedTimer
from celery_dtimer.errors import SettingsError
from celery_dtimer.settings import Settings
from tests.chaos.ledger import INBOX, WORK, RabbitTaker, RedisTaker, Taker
from tests.chaos.sentinel import PROMPT, SentinelSet
from tests.failover.warm import CeleryProcess
from tests.processes import Process
from tests.servers import RABBITMQ, RabbitMQ, RedisServer
from tests.tcp_proxy import TcpProxy
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]
SERVICE = "chaos"
STATIC = {f"static-{number}": (0.5, 1.0)[number % 2] for number in range(8)}

#: Short, so that much happens in little time.
HEARTBEAT, TIMEOUT = 0.4, 2.0
SETTINGS: dict[str, Any] = {
    "dtimer_service": SERVICE,
    "dtimer_heartbeat_interval": HEARTBEAT,
    "dtimer_instance_timeout": TIMEOUT,
    "dtimer_check_interval": 0.2,
    "dtimer_failure_check_interval": 0.5,
    "dtimer_history": 1_000_000,
    "dtimer_eta_threshold": 0,
    "dtimer_max_refusals": 100_000,
    "task_default_queue": INBOX,
    "task_ignore_result": True,
    "broker_connection_retry_on_startup": True,
    "worker_prefetch_multiplier": 20,
    "timezone": "UTC",
}


class Server(Protocol):
    """What all servers can be made to do."""

    @property
    def url(self) -> str:
        """The address, as Celery reads it."""

    def kill(self) -> None:
        """End it without a chance to write anything more."""

    def start(self) -> Any:
        """Start it, and return once it answers."""

    def freeze(self) -> None:
        """Stop it: connections stay open, and nothing answers."""

    def thaw(self) -> None:
        """Let it go on."""

    def close(self) -> None:
        """End it for good."""


class Deployment:
    """The servers of one kind, the workers, and the suite's own connections.

    Attributes:
        store: the server that holds the timers.
        broker: the server that carries the messages; with atomic dispatch the same one.
        taker: takes every message.
        timers: the public API, as a user's program has it.
    """

    def __init__(self, kind: str, folder: Path, program: str) -> None:
        self.kind, self.folder, self._program = kind, folder, program
        self.store: Any = None
        self.broker: Any = None
        self.ran = folder / "ran.jsonl"
        self.workers: list[Process] = []
        self._start_servers()
        self.app = Celery(SERVICE, set_as_current=False)
        self.app.conf.update(self.settings())
        self.timers = DistributedTimer(self.app)
        self.taker: Taker = self._start_taker()

    # Servers

    def _start_servers(self) -> None:
        if self.kind == "sentinel":
            self.store = self.broker = SentinelSet(self._program, self._subfolder("sentinel"))
            self.store.start()
            return
        self.store = self._redis("store")
        if self.kind == "rabbitmq":
            self.broker = RabbitMQ(self._subfolder("rabbitmq")).start()
        else:
            self.broker = self.store if self.kind == "atomic" else self._redis("broker")

    def _redis(self, name: str) -> RedisServer:
        return RedisServer(self._program, self._subfolder(name), appendonly=True).start()

    def _subfolder(self, name: str) -> Path:
        folder = self.folder / name
        folder.mkdir(parents=True)
        return folder

    @property
    def is_atomic(self) -> bool:
        """Say whether dispatch is atomic here."""
        return self.store is self.broker

    @property
    def has_redis_broker(self) -> bool:
        """Say whether the broker is a Redis."""
        return self.kind != "rabbitmq"

    def connect(self) -> redis.Redis:
        """Return a client of the server that holds the timers now; answers are text."""
        if isinstance(self.store, SentinelSet):
            return self.store.connect(decode_responses=True)
        return redis.Redis(port=self.store.port, decode_responses=True, **PROMPT)

    def connect_broker(self) -> redis.Redis:
        """Return a client of the Redis that is the broker now; answers are bytes."""
        if isinstance(self.broker, SentinelSet):
            return self.broker.connect()
        return redis.Redis(port=self.broker.port, **PROMPT)

    def _start_taker(self) -> Taker:
        return (
            RedisTaker(self.connect_broker)
            if self.has_redis_broker
            else RabbitTaker(self.broker.url)
        )

    # Processes

    def settings(
        self, reach: Callable[[Server], str] = lambda server: server.url
    ) -> dict[str, Any]:
        """Return the Celery settings of a process; ``reach`` says by which address."""
        settings = {
            **SETTINGS,
            "broker_url": reach(self.broker),
            "dtimer_redis_url": reach(self.store),
        }
        if self.kind == "sentinel":
            settings["broker_transport_options"] = self.store.options
            settings["dtimer_redis_options"] = self.store.options
        return settings

    def environment(self, settings: dict[str, Any]) -> dict[str, str]:
        """Return what `tests.chaos.app` reads."""
        return {
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            "DTIMER_CHAOS_CONFIG": json.dumps({**settings, "static": STATIC}),
            "DTIMER_CHAOS_RAN": str(self.ran),
            "PYTHONUNBUFFERED": "1",
        }

    def start_worker(self) -> Process:
        """Start a worker, which takes what the ledger has handed on."""
        argv = ["-A", "tests.chaos.app", "worker", "-l", "WARNING", "-P", "solo", "-Q", WORK]
        argv += ["--without-mingle", "--without-gossip", "-n", f"worker{len(self.workers)}@%h"]
        log = self.folder / f"worker-{len(self.workers)}.log"
        environment = self.environment(self.settings())
        worker = CeleryProcess(argv, log=log, env=environment, cwd=self.folder).start()
        self.workers.append(worker)
        return worker

    def key(self, kind: str, id: str = "") -> str:
        """Return the name of one of the service's keys."""
        return f"{kind}:{{{SERVICE}}}" + (f":{id}" if id else "")

    def close(self) -> None:
        """End everything but the beats."""
        self.taker.close()
        for worker in self.workers:
            worker.thaw()
            worker.kill()
        self.app.close()
        for server in {id(server): server for server in (self.store, self.broker)}.values():
            server.close()


class Beat:
    """One ``celery beat``, perhaps with connections or a clock that can be spoilt."""

    def __init__(
        self,
        deployment: Deployment,
        number: int,
        *,
        crash_at: str = "",
        proxied: bool = False,
        clock: bool = False,
    ) -> None:
        self.number, self.crash_at = number, crash_at
        self.proxies: dict[str, TcpProxy] = {}
        self.clock: Path | None = None
        self._deployment = deployment
        settings = deployment.settings(
            self._through_proxy if proxied else lambda server: server.url
        )
        environment = {**deployment.environment(settings), "DTIMER_CRASH_AT": crash_at}
        argv = ["-A", "tests.chaos.app", "beat", "-S", "dtimer", "-l", "INFO", "--pidfile="]
        program: type[Process] = CeleryProcess
        if clock:
            self.clock = deployment.folder / f"clock-{number}"
            environment |= fake_clock(self.clock)
            argv, program = [sys.executable, "-m", "celery", *argv], Process
        log = deployment.folder / f"beat-{number}.log"
        self.process = program(argv, log=log, env=environment, cwd=deployment.folder).start()

    def _through_proxy(self, server: Server) -> str:
        name = "store" if server is self._deployment.store else "broker"
        parts = urlsplit(server.url)
        if name not in self.proxies:
            self.proxies[name] = TcpProxy(parts.port or 0)
        return server.url.replace(f":{parts.port}", f":{self.proxies[name].port}")

    @property
    def pid(self) -> int:
        """The id of the process."""
        return self.process.pid

    def set_clock(self, offset: str) -> None:
        """Move the process's clock by an offset such as ``+1h``, while it runs."""
        assert self.clock is not None, "this beat has the machine's clock"
        self.clock.write_text(offset)

    def is_running(self) -> bool:
        """Say whether the process has not ended."""
        return self.process.is_running()

    def close(self) -> None:
        """End the process, and what is between it and the servers."""
        self.process.thaw()
        self.process.kill()
        for proxy in self.proxies.values():
            proxy.close()


def fake_clock(file: Path, offset: str = "+0") -> dict[str, str]:
    """Return the environment of a process whose clock is what a file says, at any time."""
    file.write_text(offset)
    return {
        "LD_PRELOAD": str(clock_library()),
        "FAKETIME_TIMESTAMP_FILE": str(file),
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "FAKETIME_NO_CACHE": "1",
    }


@lru_cache
def can_fake_clocks() -> bool:
    """Say whether a process's clock can be moved here."""
    library = clock_library()
    if library is None:
        return False
    with tempfile.TemporaryDirectory() as folder:
        environment = fake_clock(Path(folder, "clock"), "+1d")
        command = [sys.executable, "-c", "import time; print(time.time())"]
        shown = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return float(shown.stdout) > time.time() + 3600


def clock_library() -> Path | None:
    """Return libfaketime's library, None where it is not installed."""
    try:
        import libfaketime
    except ImportError:
        return None
    found = sorted(Path(libfaketime.__file__).parent.glob("vendor/**/libfaketime*.so*"))
    return found[0] if found else None


def available() -> list[str]:
    """Return the kinds of deployment that this machine and this version can run, atomic first."""
    kinds = ["atomic", "confirmed"]
    if RABBITMQ.exists():
        kinds.append("rabbitmq")
    if _is_accepted("sentinel://127.0.0.1:1", SentinelSet.options):
        kinds.append("sentinel")
    return kinds


def _is_accepted(url: str, options: dict[str, Any]) -> bool:
    """Say whether the package takes such an address for its timers."""
    app = Celery(SERVICE, set_as_current=False)
    app.conf.update(dtimer_redis_url=url, dtimer_redis_options=options)
    try:
        Settings.from_app(app)
    except SettingsError:
        return False
    return True


def registered(deployment: Deployment) -> dict[int, str]:
    """Return the registered instances: process id to instance id."""
    with deployment.connect() as client:
        ids = client.zrange(deployment.key("service_instances"), 0, -1)
    return {int(instance.rsplit(":", 2)[1]): instance for instance in ids}


def wait_registered(deployment: Deployment, beats: list[Beat], timeout: float = 20.0) -> None:
    """Wait until exactly these beats are registered."""
    pids = {beat.pid for beat in beats}
    wait_until(lambda: set(registered(deployment)) == pids, f"{pids} to be registered", timeout)
