"""How each figure is shown, and what it must reach.

The numbers of timers in the titles are those of the run; see `TITLE_NUMBERS`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from tests.benchmarks.peers import SUBJECT


def number(value: float | None) -> str:
    """Return a figure as it is shown."""
    if value is None or math.isnan(value):
        return "–"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


@dataclass(frozen=True, slots=True)
class Goal:
    """What the subject must reach: a limit, or a multiple of another peer's figure."""

    limit: float
    peer: str | None = None

    def is_reached(self, medians: dict[str, float], *, more_is_better: bool) -> bool | None:
        """Say whether the subject reaches it; None when that was not measured."""
        own = medians.get(SUBJECT)
        if own is None or (self.peer and self.peer not in medians):
            return None
        limit = self.limit * medians[self.peer] if self.peer else self.limit
        return own >= limit if more_is_better else own <= limit

    def text(self, *, more_is_better: bool) -> str:
        """Return it as the report says it."""
        times = f" × {self.peer}" if self.peer else ""
        return f"{'≥' if more_is_better else '≤'} {number(self.limit)}{times}"


@dataclass(frozen=True, slots=True)
class Measure:
    """How a figure is shown, and when it is good.

    Attributes:
        is_compared: Whether it makes sense to say how many times better one peer is.
    """

    title: str
    more_is_better: bool = False
    goals: tuple[Goal, ...] = ()
    is_compared: bool = True

    def title_for(self, timers: int) -> str:
        """Return the title of a run with so many timers."""
        return self.title.format(**{name: times(timers) for name, times in TITLE_NUMBERS.items()})


TITLE_NUMBERS: dict[str, Callable[[int], str]] = {
    "twentieth": lambda timers: f"{timers // 20:,}",
    "tenth": lambda timers: f"{timers // 10:,}",
    "half": lambda timers: f"{timers // 2:,}",
    "n": lambda timers: f"{timers:,}",
    "twofold": lambda timers: f"{timers * 2:,}",
    "tenfold": lambda timers: f"{timers * 10:,}",
    "hundredfold": lambda timers: f"{timers * 100:,}",
}


def _rate(title: str, *goals: Goal) -> Measure:
    return Measure(title, more_is_better=True, goals=goals)


def _beside(title: str) -> Measure:
    return Measure(title, is_compared=False)


def _at_most(title: str, limit: float) -> Measure:
    return Measure(title, goals=(Goal(limit),))


MEASURES = {
    ("dispatch", "runs_per_s"): _rate(
        "saturated beat, {n} timers of 0.1 s, runs/s",
        *(Goal(15, "redbeat"), Goal(20, "celery_beat"), Goal(2, "bullmq"), Goal(1 / 3, "limit")),
    ),
    ("dispatch", "cpu_us_per_run"): _at_most("CPU of the beat, µs per run", 60),
    ("dispatch", "rss_mib"): Measure("memory of the beat, MiB"),
    ("dispatch", "redis_cpu_pct"): _beside("Redis' CPU meanwhile, %"),
    ("dispatch", "reader_cpu_pct"): _beside("the reader's CPU meanwhile, %"),
    ("dispatch_many", "runs_per_s"): _rate("{tenfold} timers of 0.1 s, runs/s"),
    ("dispatch_many", "share_of_few"): _rate(
        "{tenfold} timers, share of the rate with {n}", Goal(0.8)
    ),
    ("dispatch_many", "rss_mib"): Measure("{tenfold} timers, memory of the beat, MiB"),
    ("two_beats", "one_runs_per_s"): _rate("{twofold} timers, one beat, runs/s"),
    ("two_beats", "two_runs_per_s"): _rate("{twofold} timers, two beats, runs/s"),
    ("two_beats", "two_vs_one"): _rate("two beats beside one", Goal(1.5)),
    ("two_beats", "two_beat_cpu_pct"): Measure("two beats, their CPU, %"),
    ("two_beats", "two_redis_cpu_pct"): Measure("two beats, Redis' CPU, %"),
    ("two_beats", "two_reader_cpu_pct"): Measure("two beats, the reader's CPU, %"),
    ("lag", "p50_ms"): _at_most("lag at {twentieth} due a second, p50, ms", 2),
    ("lag", "p99_ms"): _at_most("lag at {twentieth} due a second, p99, ms", 10),
    ("lag", "first_p99_ms"): Measure("the same, the first run of each timer, p99, ms"),
    ("lag", "arrived_pct"): _rate("runs that arrived at {twentieth} a second, %"),
    ("lag_busy", "p50_ms"): Measure("lag at {half} due a second, p50, ms"),
    ("lag_busy", "p99_ms"): _at_most("lag at {half} due a second, p99, ms", 50),
    ("lag_busy", "first_p99_ms"): Measure("the same, the first run of each timer, p99, ms"),
    ("lag_busy", "arrived_pct"): _rate("runs that arrived at {half} a second, %"),
    ("created_now", "p50_ms"): Measure("created elsewhere, due now, p50, ms"),
    ("created_now", "p99_ms"): _at_most("created elsewhere, due now, p99, ms", 20),
    ("rabbitmq", "runs_per_s"): _rate(
        "on RabbitMQ, {n} timers of 0.1 s, runs/s", Goal(4, "celery_beat")
    ),
    ("rabbitmq", "cpu_us_per_run"): Measure("on RabbitMQ, CPU, µs per run"),
    ("rabbitmq", "few_runs_per_s"): _rate(
        "on RabbitMQ, {tenth} timers of 0.1 s, runs/s", Goal(4, "celery_beat")
    ),
    ("creation", "single_per_s"): _rate("timers created a second, singly", Goal(1, "redbeat")),
    ("creation", "bulk_per_s"): _rate("timers created a second, in bulk", Goal(15_000)),
    ("memory", "bytes_per_timer"): _at_most("Redis bytes per timer", 1000),
    ("idle", "requests_per_s"): _at_most("idle beat, requests/s", 5),
    ("idle", "cpu_pct"): _at_most("idle beat, CPU, %", 1),
    ("startup", "first_message_s"): Measure("{n} stored, start to first message, s"),
    ("startup", "rss_mib"): Measure("{n} stored, memory of the beat, MiB"),
    ("startup_many", "first_message_s"): _at_most("{tenfold} stored, start to first message, s", 1),
    ("startup_many", "owning_s"): Measure("{tenfold} stored, start to owning them all, s"),
    ("startup_many", "empty_first_message_s"): Measure("none stored, start to first message, s"),
    ("startup_many", "rss_mib"): _at_most("{tenfold} stored, memory, MiB", 70),
    ("failover", "killed_gap_s"): Measure("gap after kill -9, timeout of 4 s, s"),
    ("failover", "killed_beyond_timeout_s"): _at_most(
        "gap after kill -9, beyond the timeout, s", 1
    ),
    ("failover", "handover_gap_s"): _at_most("gap at a graceful hand-over, s", 0.5),
    ("countdowns", "durable_per_s"): _rate("calls with a countdown, durable, calls/s"),
    ("countdowns", "stock_per_s"): _rate("calls with a countdown, Celery's own, calls/s"),
    ("countdowns", "share_of_stock"): _rate("durable beside Celery's own, in turns", Goal(1)),
    ("countdowns", "bytes_per_pending"): _at_most(
        "{tenfold} durable calls pending, Redis bytes each", 1000
    ),
    ("tracking", "more_us"): _at_most("a tracked task costs the worker more, µs", 500),
    ("tracking", "tracked_us"): Measure("task of a timer, tracked, µs"),
    ("tracking", "untracked_us"): Measure("task of a timer, not tracked, µs"),
    ("tracking", "other_us"): Measure("any other task, µs"),
    ("scripts", "takeover_s"): Measure("all timers taken over after kill -9, s"),
    ("stored_large", "first_message_s"): _at_most(
        "{hundredfold} stored, start to first message, s", 2
    ),
    ("stored_large", "rss_mib"): _at_most("{hundredfold} stored, memory, MiB", 100),
    ("stored_large", "among_runs_per_s"): _rate(
        "{hundredfold} stored, {n} of them of 0.1 s, runs/s"
    ),
    ("stored_large", "share_of_alone"): _rate(
        "{hundredfold} stored, share of the rate of {n} alone", Goal(0.75)
    ),
    ("stored_large", "bytes_per_timer"): _at_most(
        "{hundredfold} stored, Redis bytes per timer", 1000
    ),
    ("stored_large", "created_per_s"): _rate("{hundredfold} created in bulk, timers/s"),
    ("all_due_large", "runs_per_s"): _rate("{hundredfold} due in turn, runs/s"),
    ("all_due_large", "rss_mib"): Measure("{hundredfold} due in turn, memory, MiB"),
}
_SCRIPT_GOAL = Goal(5)


def measure_of(scenario: str, figure: str) -> Measure | None:
    """Return how a figure is shown; None for one that stands in the JSON only."""
    script, _, kind = figure.rpartition(" ")
    if scenario == "scripts" and kind == "longest_ms":
        return Measure(f"script {script}, longest, ms", goals=(_SCRIPT_GOAL,))
    return MEASURES.get((scenario, figure))
