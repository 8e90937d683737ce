"""The schedulers that are measured, each a real ``celery beat`` process with its own settings."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.benchmarks.processes import Server, child_environment, python_module, start, stop
from tests.benchmarks.workload import Workload

APP = "tests.benchmarks.celeryapp"
IN_CODE = "conf"  # creates entries by its configuration, when it starts


@dataclass(frozen=True)
class Peer:
    """One scheduler.

    Attributes:
        name: What the command line and the report call it.
        scheduler: What ``celery beat -S`` takes.
        creator: How its entries come to be; a key of the app module's ``CREATORS``, or ``conf``.
        settings: Celery settings that differ from the defaults.
        has_header: Whether a message says its run's due time in the ``dtimer`` header.
    """

    name: str
    scheduler: str
    creator: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    has_header: bool = False

    @property
    def is_stored(self) -> bool:
        """Say whether entries are created at run time and kept in Redis."""
        return self.creator != IN_CODE

    def create(self, server: Server, workload: Workload) -> float:
        """Create the entries in a child process; return the seconds spent in the API."""
        if not self.is_stored:
            return 0.0
        with (server.directory / "create.log").open("ab") as log:
            done = subprocess.run(
                python_module(APP),
                env=child_environment(self._environment(server, workload)),
                stdout=subprocess.PIPE,
                stderr=log,
                check=True,
            )
        return float(done.stdout)

    @contextmanager
    def beat(
        self, server: Server, workload: Workload, **settings: Any
    ) -> Iterator[subprocess.Popen[bytes]]:
        """Run one beat for the duration of a block; one that ends by itself is an error."""
        process = self.start_beat(server, workload, **settings)
        try:
            yield process
            if process.poll() is not None:
                raise RuntimeError(f"the beat of {self.name} ended with {process.returncode}")
        finally:
            stop(process)

    def start_beat(
        self, server: Server, workload: Workload, **settings: Any
    ) -> subprocess.Popen[bytes]:
        """Start one beat, which the caller stops."""
        shelf = str(server.directory / "beat-schedule")
        return start(
            python_module(
                "celery", "-A", APP, "beat", "-S", self.scheduler, "-s", shelf, "--pidfile="
            ),
            log=server.directory / "beat.log",
            environment=self._environment(server, workload, **settings),
        )

    def _environment(self, server: Server, workload: Workload, **settings: Any) -> dict[str, str]:
        return {
            "BENCH_REDIS_URL": server.url,
            "BENCH_CREATOR": self.creator,
            "BENCH_SETTINGS": json.dumps({**self.settings, **settings}),
            **workload.environment(),
        }


SUBJECT = "dtimer"
PEERS = {
    peer.name: peer
    for peer in (
        Peer(SUBJECT, "celery_dtimer:DistributedScheduler", "dtimer", has_header=True),
        Peer("celery_beat", "celery.beat:PersistentScheduler", IN_CODE),
        Peer("redbeat", "redbeat.RedBeatScheduler", "redbeat"),
        Peer(
            "redbeat_50ms",
            "redbeat.RedBeatScheduler",
            "redbeat",
            # its lock would last five loops, less than one tick may take
            settings={"beat_max_loop_interval": 0.05, "redbeat_lock_timeout": 30},
        ),
    )
}
DEFAULT_PEERS = (SUBJECT, "celery_beat", "redbeat")
