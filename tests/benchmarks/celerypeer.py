"""The schedulers that are a ``celery beat`` each."""

from __future__ import annotations

import base64
import json
from collections import Counter as Tally
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from tests.benchmarks.measure import Arrival, Counter
from tests.benchmarks.peer import Lags, Peer, created
from tests.benchmarks.processes import Server, python_module
from tests.benchmarks.workload import Workload

APP = "tests.benchmarks.celeryapp"


def due_by_header(arrivals: Sequence[Arrival], _workload: Workload) -> Lags:
    """Return each message's arrival and the due time that its ``dtimer`` header says."""
    for arrived, payload in arrivals:
        header = dtimer_header(payload)
        yield arrived, datetime.fromisoformat(header["scheduled_at"]).timestamp()


def due_by_order(arrivals: Sequence[Arrival], workload: Workload) -> Lags:
    """Return each message's arrival and the due time that it stands for.

    An entry's k-th message is compared with its k-th due time, so drift and backlog count as lag.
    """
    first_due = {entry.index: entry.first_due or 0.0 for entry in workload.entries()}
    seen: Tally[int] = Tally()
    for arrived, payload in arrivals:
        index = int(arguments(payload)[0])
        yield arrived, first_due[index] + workload.every * seen[index]
        seen[index] += 1


def arguments(payload: bytes) -> list[Any]:
    """Return the positional arguments of a message."""
    args, _, _ = json.loads(base64.b64decode(json.loads(payload)["body"]))
    return list(args)


def dtimer_header(payload: bytes) -> dict[str, Any]:
    """Return what a message of celery_dtimer says about its run."""
    header: dict[str, Any] = json.loads(payload)["headers"]["dtimer"]
    return header


@dataclass(frozen=True)
class CeleryPeer(Peer):
    """One scheduler class of Celery.

    Attributes:
        scheduler: What ``celery beat -S`` takes.
        creator: How its entries come to be, a key of the app module's ``CREATORS``; empty when its
            configuration holds them.
        settings: Celery settings that differ from the defaults.
        due_of: How a message's due time is known.
    """

    scheduler: str = ""
    creator: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    due_of: Callable[[Sequence[Arrival], Workload], Lags] = due_by_order

    def create(self, server: Server, workload: Workload, how: str = "", **settings: Any) -> float:
        """Create the entries in a child process; return the seconds spent in the API."""
        if not self.creator:
            return 0.0
        command = python_module(APP, how or self.creator)
        return created(command, server, self.environment(server, workload, **settings))

    def command(self, server: Server) -> list[str]:
        """Return the command line of one beat."""
        shelf = str(server.directory / "beat-schedule")
        return python_module(
            "celery", "-A", APP, "beat", "-S", self.scheduler, "-s", shelf, "--pidfile="
        )

    def environment(self, server: Server, workload: Workload, **settings: Any) -> dict[str, str]:
        """Return the variables that a child process gets."""
        in_code = {} if self.creator else {"BENCH_IN_CODE": "1"}
        return {**super().environment(server, workload, **self.settings, **settings), **in_code}

    def lags(self, counter: Counter, workload: Workload) -> Lags:
        """Return each kept message's arrival and the due time that it stands for."""
        return self.due_of(counter.arrivals(), workload)
