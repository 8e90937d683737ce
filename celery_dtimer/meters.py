"""What one instance counts of its own work, for whoever asks; it contacts nothing.

The threads of an instance add to one `Meters`, in all shards of its service: a batch at a time
where there are many. `Meters.reading` is a copy that no longer changes.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

#: What is counted, some of it by a label: a reason, or a code.
Counted = Literal[
    "sent",
    "skipped",
    "failed",
    "refused_messages",
    "broker_outages",
    "commit_conflicts",
    "fenced",
    "failover_timers",
    "unreplicated_commits",
    "replays",
]

# Upper bounds, in seconds.
LAG_BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
FAILOVER_BOUNDS = (1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 31.0, 32.0, 35.0, 40.0, 60.0, 120.0, 300.0)
CALL_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0, 10.0)


class Spread(NamedTuple):
    """How often values were seen that are at most as large as each bound, and what they sum up to.

    The last count is of all values.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float


class _Histogram:
    """Counts values by size; whoever calls it holds the lock."""

    __slots__ = ("_bounds", "_counts", "_total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def add(self, values: Sequence[float]) -> None:
        bounds, counts = self._bounds, self._counts
        first = bisect_left(bounds, min(values, default=0.0))
        if first == bisect_left(bounds, max(values, default=0.0)):  # as most of one batch
            counts[first] += len(values)
        else:
            for value in values:
                counts[bisect_left(bounds, value)] += 1
        self._total += sum(values)

    def spread(self) -> Spread:
        so_far, counts = 0, []
        for count in self._counts:
            so_far += count
            counts.append(so_far)
        return Spread(self._bounds, tuple(counts), self._total)


@dataclass(frozen=True, slots=True)
class Reading:
    """What an instance has counted so far."""

    counts: Mapping[tuple[Counted, str], int]  #: by what, and a label or ""
    lag: Spread  #: seconds from the scheduled moments of runs to their commits
    failover: Spread  #: seconds from the last heartbeats of the dead until their timers had moved
    calls: Mapping[str, Spread] = field(default_factory=dict)  #: seconds, by script

    def count(self, what: Counted, label: str = "") -> int:
        """Return how often something was counted."""
        return self.counts.get((what, label), 0)


class Meters:
    """Counts the work of one instance; safe to be used by many threads."""

    def __init__(self) -> None:
        """Start at zero."""
        self._lock = threading.Lock()
        self._counts: Counter[tuple[Counted, str]] = Counter()
        self._lag = _Histogram(LAG_BOUNDS)
        self._failover = _Histogram(FAILOVER_BOUNDS)
        self._calls: dict[str, _Histogram] = {}

    def count(self, what: Counted, by: int = 1, label: str = "") -> None:
        """Count something that has happened ``by`` times."""
        with self._lock:
            self._counts[what, label] += by

    def observe_sent(self, sent: int, lags: Sequence[float]) -> None:
        """Count runs that were sent, with the seconds by which they came after their moments."""
        with self._lock:
            self._counts["sent", ""] += sent
            self._lag.add(lags)

    def observe_failover(self, seconds: float) -> None:
        """Count a dead instance whose last timer has moved, so long after its last heartbeat."""
        with self._lock:
            self._failover.add((seconds,))

    def observe_call(self, script: str, seconds: float) -> None:
        """Count a call of a script, which took so long."""
        with self._lock:
            calls = self._calls.get(script)
            if calls is None:
                calls = self._calls[script] = _Histogram(CALL_BOUNDS)
            calls.add((seconds,))

    def reading(self) -> Reading:
        """Return what was counted so far."""
        with self._lock:
            return Reading(
                dict(self._counts),
                self._lag.spread(),
                self._failover.spread(),
                {script: calls.spread() for script, calls in self._calls.items()},
            )
