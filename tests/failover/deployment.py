"""One service under test: its servers, its beats and workers, and what they sent."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from celery import Celery

from celery_dtimer import DistributedTimer
from tests.commands import run_command
from tests.conftest import app_settings
from tests.failover.warm import CeleryProcess
from tests.ledger import Ledger, QueueReader, read_run
from tests.processes import Process
from tests.servers import RedisServer
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]
SERVICE = "orders"

# How long the long scenarios run, in seconds; 60 is the full length.
SECONDS = float(os.environ.get("DTIMER_TEST_SECONDS", "15"))
IS_LONG = SECONDS >= 60
OUTAGE = 22.0 if IS_LONG else 6.0
TIMEOUT = 1.5  # dtimer_instance_timeout of most scenarios
TAKEOVER = TIMEOUT + 1.0


class Deployment:
    """Beats and workers that share one service, and the test's own look at it.

    Attributes:
        store: the server that holds the timers.
        broker: the server that carries the messages; often the same.
        timers: the public API, used from the test's process.
        ledger: what reached the broker, while no worker takes it.
    """

    def __init__(
        self, folder: Path, prefix: str, *, broker: RedisServer, store: RedisServer, **conf: Any
    ) -> None:
        self.folder, self.prefix = folder, prefix
        self.service = conf.get("dtimer_service", SERVICE)
        self.broker, self.store = broker, store
        self.settings = app_settings(broker.url, prefix, dtimer_redis_url=store.url, **conf)
        own = {key: value for key, value in self.settings.items() if key != "periodic_tasks"}
        self.app = Celery(SERVICE, set_as_current=False)
        self.app.conf.update({**own, "beat_schedule": {}})
        self.timers = DistributedTimer(self.app)
        self.processes: list[Process] = []
        self.queue: str = self.app.conf.task_default_queue
        self._reader: QueueReader | None = None

    # What runs

    def start_beat(
        self,
        *args: str,
        crash_at: str = "",
        hosts: Path | None = None,
        hang: Path | None = None,
        **conf: Any,
    ) -> Process:
        """Start one ``celery beat``; ``conf`` differs from the others' settings.

        ``crash_at`` is a point of `celery_dtimer.faults` at which it dies, and after how many;
        ``hosts`` a file that names the hosts whose names it finds, and ``hang`` one that makes it
        hang while it is there.
        """
        argv = ["beat", "-S", "dtimer", "-l", "INFO", *args]
        environment = {
            "DTIMER_CRASH_AT": crash_at,
            "DTIMER_TEST_HOSTS": str(hosts or ""),
            "DTIMER_TEST_HANG": str(hang or ""),
        }
        return self._start("beat", argv, conf, environment)

    def start_beats(self, count: int, *args: str, **conf: Any) -> list[Process]:
        """Start several beats and return them once all are registered and evenly loaded."""
        beats = [self.start_beat(*args, **conf) for _ in range(count)]
        self.wait_registered(beats)
        return beats

    def start_worker(self, *args: str, **conf: Any) -> Process:
        """Start one ``celery worker`` and return it once it takes tasks."""
        argv = ["worker", "-l", "INFO", "--without-mingle", "--without-gossip", *args]
        argv += ["-n", f"worker{len(self.processes)}@%h"]
        worker = self._start("worker", argv if "-P" in args else [*argv, "-P", "solo"], conf)
        wait_until(lambda: " ready." in worker.log_text(), "the worker to be ready", 20)
        return worker

    def command(self, *args: str, timeout: float = 30.0) -> subprocess.CompletedProcess[str]:
        """Run a command of ``celery dtimer`` to its end, as a user does."""
        return subprocess.run(
            [sys.executable, "-m", "celery", "-A", "tests.failover.app", "dtimer", *args],
            cwd=self.folder,
            env={**os.environ, **self.environment},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    def told(self, *args: str) -> Any:
        """Return the JSON document of a command that succeeds, run in the test's process."""
        ran = run_command(self.app, args[0], "--json", *args[1:])
        assert ran.status == 0, ran
        return ran.document

    def start_embedded(self) -> Process:
        """Start a plain process that calls ``DistributedTimer.start()``."""
        argv = [sys.executable, "-m", "tests.failover.embedded"]
        return self._launch("embedded", argv, {})

    def start_script(self, text: str, *args: str) -> Process:
        """Start a piece of Python that uses ``tests.failover.app``."""
        return self._launch("script", [sys.executable, "-c", text, *args], {})

    def _start(
        self,
        kind: str,
        args: list[str],
        conf: dict[str, Any],
        environment: dict[str, str] | None = None,
    ) -> Process:
        argv = ["-A", "tests.failover.app", *args]
        return self._launch(kind, argv, conf, environment, program=CeleryProcess)

    def _launch(
        self,
        kind: str,
        argv: list[str],
        conf: dict[str, Any],
        environment: dict[str, str] | None = None,
        *,
        program: type[Process] = Process,
    ) -> Process:
        process = program(
            argv,
            log=self.folder / f"{kind}-{len(self.processes)}.log",
            env={**self._environment({**self.settings, **conf}), **(environment or {})},
            cwd=self.folder,
        )
        self.processes.append(process)
        return process.start()

    @property
    def environment(self) -> dict[str, str]:
        """What the service's processes find in their environment."""
        return self._environment(self.settings)

    def _environment(self, settings: dict[str, Any]) -> dict[str, str]:
        return {
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            "DTIMER_TEST_CONFIG": json.dumps(settings),
            "DTIMER_TEST_LEDGER": self.broker.url,
            "PYTHONUNBUFFERED": "1",
        }

    # What is stored

    def key(self, kind: str) -> str:
        """Return the name of one of the service's keys."""
        return f"{self.prefix}{kind}:{{{self.service}}}"

    def registered(self) -> dict[int, str]:
        """Return the registered instances: process id to instance id."""
        ids = map(str, self.store.client.zrange(self.key("service_instances"), 0, -1))
        return {int(instance.rsplit(":", 2)[1]): instance for instance in ids}

    def names(self) -> list[str]:
        """Return the names of all timers but the one that Celery itself adds."""
        names = [timer.name for timer in self.timers.get_timers()]
        return sorted(name for name in names if not name.startswith("celery."))

    def owned(self) -> dict[int, int]:
        """Return how many timers each registered process owns."""
        timers = self.key("instance_timers")
        return {
            pid: self.store.client.zcard(f"{timers}:{instance}")
            for pid, instance in self.registered().items()
        }

    def epochs(self) -> dict[int, str | None]:
        """Return each process's registration: another number means that it lost the one before."""
        hashes = self.key("instance")
        return {
            pid: self.store.client.hget(f"{hashes}:{instance}", "epoch")
            for pid, instance in self.registered().items()
        }

    def owned_by(self, beat: Process) -> int:
        """Return how many timers one beat owns, 0 when it is not registered."""
        return self.owned().get(beat.pid, 0)

    def modes(self) -> set[str]:
        """Return the modes of dispatch that the instances say are in force."""
        return {instance.dispatch for instance in self.timers.get_service_instances()}

    def spread(self) -> int:
        """Return the difference between the most and the fewest timers of an instance."""
        counts = self.owned().values()
        return max(counts) - min(counts)

    def wait_registered(self, beats: Iterable[Process], timeout: float = 20.0) -> None:
        """Wait until exactly these processes are registered."""
        pids = {beat.pid for beat in beats}
        wait_until(lambda: set(self.registered()) == pids, f"{pids} to be registered", timeout)

    def wait_balanced(self, timeout: float = 5.0) -> None:
        """Wait until no two instances differ by more than one timer."""
        wait_until(lambda: self.spread() <= 1, "the timers to be shared evenly", timeout)

    def assert_consistent(self, within: float = 1.0) -> None:
        """Fail when the stored state breaks an invariant of the package."""
        wait_until(
            lambda: not self.timers.check_consistency(),
            "the invariants to hold, which the package's own check says they do not",
            within,
        )

    # What was sent

    def read(self) -> Ledger:
        """Begin to watch the queue, and return the ledger that its messages are entered in."""
        if self._reader is None:
            self._reader = QueueReader(self.broker.url, self.queue)
        return self._reader.ledger

    def read_from(self, url: str) -> Ledger:
        """Watch the queue on another server from now on, and return a new ledger."""
        if self._reader is not None:
            self._reader.close()
        self._reader = QueueReader(url, self.queue)
        return self._reader.ledger

    @property
    def ledger(self) -> Ledger:
        """The runs that reached the broker."""
        return self.read()

    def queued(self) -> int:
        """Return how many messages wait in the queue's first list."""
        return self.broker.client.llen(self.queue)

    def read_at_once(self) -> Ledger:
        """Return what is in the queue now; for numbers that would keep a reader busy."""
        return Ledger.of_queue(self.broker.client, self.queue)

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The messages themselves."""
        self.read()
        return self._reader.messages if self._reader else []

    def ran(self) -> Ledger:
        """Return the runs that workers have executed."""
        return Ledger(
            read_run(entry["dtimer"], entry["task_id"], entry["ran_at_ms"])
            for entry in self.entries_ran()
        )

    def entries_ran(self) -> list[dict[str, Any]]:
        """Return what the tasks wrote down, as they wrote it."""
        entries = self.broker.client.lrange(f"{self.queue}.ran", 0, -1)
        return [json.loads(entry) for entry in entries]

    # What tests do

    def create(self, count: int, interval: float = 1.0, **options: Any) -> list[str]:
        """Create interval timers in bulk and return their names."""
        names = [f"timer-{number:03}" for number in range(count)]
        self.timers.create_timers(
            [
                {"name": name, "schedule": interval, "callback": "record", **options}
                for name in names
            ]
        )
        return names

    def create_once(self, count: int, seconds: float) -> list[str]:
        """Create timers that are due once, in so many seconds, and return their names."""
        moment = datetime.now(timezone.utc) + timedelta(seconds=seconds)
        names = [f"once-{number:03}" for number in range(count)]
        self.timers.create_timers(
            [{"name": name, "schedule": moment, "callback": "record"} for name in names]
        )
        return names

    @staticmethod
    def now_ms() -> int:
        """Return the time; servers and test are on one machine and have one clock."""
        return time.time_ns() // 1_000_000

    def pass_time(self, seconds: float) -> int:
        """Let time go by, where time itself is what the test is about, and return the moment."""
        end = time.monotonic() + seconds
        wait_until(lambda: time.monotonic() >= end, f"{seconds:g} s", seconds + 5)
        return self.now_ms()

    def wait_sent(self, names: Iterable[str], since_ms: int, timeout: float = 5.0) -> None:
        """Wait until each timer has sent a run that was scheduled at ``since_ms`` or later."""
        _wait_reached(self.read, names, since_ms, timeout)

    def wait_ran(self, names: Iterable[str], since_ms: int, timeout: float = 10.0) -> None:
        """Wait until workers have run one of each timer's runs of ``since_ms`` or later."""
        _wait_reached(self.ran, names, since_ms, timeout)

    def wait_firing(self, names: Iterable[str], timeout: float = 8.0) -> None:
        """Wait until each timer has sent something."""
        self.wait_sent(names, 1, timeout)

    def assert_accounted(self, names: Iterable[str], interval_ms: int) -> dict[str, list[int]]:
        """Return the runs that were not sent, each of which the product must have counted."""
        gaps: dict[str, list[int]] = {}
        for name in names:
            wait_until(
                lambda name=name: self._is_accounted(name, interval_ms, gaps),
                f"the runs of {name} to be those that were committed, and the others counted",
                3,
            )
        return gaps

    def _is_accounted(self, name: str, interval_ms: int, gaps: dict[str, list[int]]) -> bool:
        """Compare what is stored of a timer with its runs; the two are not read together."""
        timer, slots = self.timers.get_timer(name), self.ledger.slots(name)
        until_ms = slots[-1]
        if timer.next_run_at is not None:  # it is not paused
            until_ms = round(timer.next_run_at.timestamp() * 1000) - interval_ms
        gaps[name] = self.ledger.missing(name, interval_ms, until_ms)
        return len(gaps[name]) == timer.skipped and len(slots) == timer.total_run_count

    def attach_logs(self, node: pytest.Item) -> None:
        """Put the end of each log where pytest shows it when the test fails."""
        for process in self.processes:
            text = process.log_text()[-8000:]
            node.add_report_section("teardown", f"{process.log.name}, pid {process.pid}", text)

    def close(self) -> None:
        """End everything that was started."""
        for process in self.processes:
            process.thaw()
            process.kill()
        if self._reader is not None:
            self._reader.close()
        self.app.close()


Deploy = Callable[..., Deployment]


def _wait_reached(
    ledger: Callable[[], Ledger], names: Iterable[str], since_ms: int, timeout: float
) -> None:
    wanted = set(names)

    def reached() -> bool:
        latest = ledger().latest()
        return all(latest.get(name, 0) >= since_ms for name in wanted)

    wait_until(reached, f"{len(wanted)} timers to reach their runs of {since_ms}", timeout)


def stop_all(processes: Iterable[Process], signum: int = signal.SIGTERM) -> list[float]:
    """Ask processes to end at the same time, and return how many seconds each took."""
    running = list(processes)
    asked = time.monotonic()
    for process in running:
        process.send(signum)
    return [process.wait() - asked for process in running]
