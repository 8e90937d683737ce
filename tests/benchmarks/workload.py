"""What a measurement schedules: one list of entries that every peer creates.

A workload travels to the child processes (the beats, the one that creates the entries) in their
environment, so that each peer schedules exactly the same.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

TASK = "bench.noop"
ENVIRONMENT = "BENCH_WORKLOAD"


@dataclass(frozen=True, slots=True)
class Entry:
    """One periodic task; ``every`` 0 stands for a crontab of once a year."""

    index: int
    every: float
    first_due: float | None = None

    @property
    def name(self) -> str:
        """Return the name that the entry has with every peer."""
        return f"timer-{self.index}"

    @property
    def args(self) -> list[Any]:
        """Return typical positional arguments; the first tells the entry in a message."""
        return [self.index, "daily-summary"]

    @property
    def kwargs(self) -> dict[str, Any]:
        """Return typical keyword arguments."""
        return {"tenant": "acme", "notify": True}


@dataclass(frozen=True, slots=True)
class Workload:
    """A number of like entries.

    Attributes:
        count: How many entries.
        every: Their interval in seconds; 0 for a crontab that is due once a year.
        start: The moment from which their due times are spread evenly over one interval; without
            it all are due one interval after their creation.
        far: How many entries that are due once a year lie beside them.
    """

    count: int
    every: float = 0
    start: float | None = None
    far: int = 0

    def entries(self) -> Iterator[Entry]:
        """Return the entries in the order of their due times."""
        for index in range(self.count):
            yield Entry(index, self.every, self._first_due(index))
        for index in range(self.count, self.count + self.far):
            yield Entry(index, 0)

    @property
    def total(self) -> int:
        """Return how many entries there are in all."""
        return self.count + self.far

    def _first_due(self, index: int) -> float | None:
        if self.start is None:
            return None
        return self.start + self.every * index / self.count

    def environment(self) -> dict[str, str]:
        """Return the variables that carry the workload into a child process."""
        return {ENVIRONMENT: json.dumps(asdict(self))}

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Workload:
        """Return the workload that the parent process asked for; none means no entries."""
        return cls(**json.loads(environment.get(ENVIRONMENT, '{"count": 0}')))
