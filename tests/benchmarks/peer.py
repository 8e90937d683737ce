"""What a measurement asks of a scheduler."""

from __future__ import annotations

import json
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

from tests.benchmarks.measure import Counter, reading
from tests.benchmarks.processes import Server, child_environment, start, stop
from tests.benchmarks.workload import Workload

Lags = Iterator[tuple[float, float]]


@dataclass(frozen=True)
class Peer(ABC):
    """One scheduler, run as a process of its own.

    Attributes:
        name: What the command line and the report call it.
    """

    name: str

    def unavailable(self) -> str | None:
        """Return why it cannot be measured here; None when it can."""
        return None

    @abstractmethod
    def create(self, server: Server, workload: Workload, how: str = "", **settings: Any) -> float:
        """Create the entries in a child process; return the seconds spent in the API."""

    @abstractmethod
    def command(self, server: Server) -> list[str]:
        """Return the command line of one beat."""

    def environment(self, server: Server, workload: Workload, **settings: Any) -> dict[str, str]:
        """Return the variables that a child process gets."""
        return {
            "BENCH_REDIS_URL": server.url,
            "BENCH_SETTINGS": json.dumps(settings),
            **workload.environment(),
        }

    def start_beat(
        self, server: Server, workload: Workload, **settings: Any
    ) -> subprocess.Popen[bytes]:
        """Start one beat, which the caller stops."""
        return start(
            self.command(server),
            log=server.directory / "beat.log",
            environment=self.environment(server, workload, **settings),
        )

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

    def reading(
        self, server: Server, mode: str, broker_url: str | None = None
    ) -> AbstractContextManager[Counter]:
        """Take the messages for the duration of a block."""
        return reading(server, mode, broker_url)

    @abstractmethod
    def lags(self, counter: Counter, workload: Workload) -> Lags:
        """Return each kept message's arrival and the due time that it stands for."""


def created(command: list[str], server: Server, environment: Mapping[str, str]) -> float:
    """Run a program that creates entries; return the seconds that it prints."""
    with (server.directory / "create.log").open("ab") as log:
        done = subprocess.run(
            command,
            env=child_environment(environment),
            stdout=subprocess.PIPE,
            stderr=log,
            check=True,
        )
    return float(done.stdout)
