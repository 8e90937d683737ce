"""The figures of all rounds as medians, ratios and goals: a table to read, and JSON."""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from statistics import median
from typing import Any

from tests.benchmarks.peers import SUBJECT
from tests.benchmarks.scenarios import Figures

PACKAGES = ("celery", "kombu", "redis", "hiredis", "celery-redbeat")


@dataclass(frozen=True, slots=True)
class Goal:
    """What the subject must reach: a limit, or a multiple of another peer's figure."""

    limit: float
    peer: str | None = None

    def __str__(self) -> str:
        return f"≥ {self.limit:g} × {self.peer}" if self.peer else f"< {self.limit:g}"


@dataclass(frozen=True, slots=True)
class Measure:
    """How a figure is shown, and when it is good."""

    title: str
    more_is_better: bool = False
    goal: Goal | None = None


MEASURES = {
    ("dispatch", "runs_per_s"): Measure(
        "saturated beat, runs/s", more_is_better=True, goal=Goal(3, "redbeat")
    ),
    ("dispatch", "cpu_us_per_run"): Measure("its CPU, µs per run"),
    ("lag", "p50_ms"): Measure("lag, p50, ms"),
    ("lag", "p99_ms"): Measure("lag, p99, ms", goal=Goal(100)),
    ("lag", "arrived_pct"): Measure("runs that arrived, %", more_is_better=True),
    ("memory", "bytes_per_timer"): Measure("Redis bytes per timer", goal=Goal(1000)),
    ("memory", "created_per_s"): Measure("timers created a second", more_is_better=True),
    ("idle", "requests_per_s"): Measure("idle beat, requests/s", goal=Goal(5)),
    ("idle", "cpu_pct"): Measure("idle beat, CPU %", goal=Goal(1)),
    ("startup", "first_message_s"): Measure("start to first message, s"),
    ("scripts", "takeover_s"): Measure("takeover after kill -9 (timeout 4 s), s"),
}
SCRIPT_GOAL = Goal(5)


def measure_of(scenario: str, figure: str) -> Measure | None:
    """Return how a figure is shown; None for one that stands in the JSON only."""
    script, _, kind = figure.rpartition(" ")
    if scenario == "scripts" and kind == "longest_ms":
        return Measure(f"script {script}, longest, ms", goal=SCRIPT_GOAL)
    return MEASURES.get((scenario, figure))


@dataclass(frozen=True, slots=True)
class Result:
    """The figures of one peer in one round of a scenario.

    Attributes:
        load: The machine's load average before it; one above its CPUs makes the figures doubtful.
    """

    scenario: str
    peer: str
    round: int
    load: float
    figures: Figures


@dataclass(frozen=True, slots=True)
class Row:
    """One measure: the median of each peer, how much better the subject is, and its goal."""

    scenario: str
    figure: str
    medians: dict[str, float]
    ratios: dict[str, float]
    goal: str | None = None
    reached: bool | None = None


def rows(results: Sequence[Result]) -> list[Row]:
    """Return one row per figure, in the order in which the figures were measured."""
    names = dict.fromkeys((r.scenario, name) for r in results for name in r.figures)
    return [_row(results, scenario, name) for scenario, name in names]


def _row(results: Sequence[Result], scenario: str, name: str) -> Row:
    values: dict[str, list[float]] = {}
    for result in results:
        if result.scenario == scenario and name in result.figures:
            values.setdefault(result.peer, []).append(result.figures[name])
    medians = {peer: median(found) for peer, found in values.items()}
    measure = measure_of(scenario, name)
    if measure is None:
        return Row(scenario, name, medians, {})
    goal = measure.goal
    return Row(
        scenario,
        name,
        medians,
        ratios(medians, more_is_better=measure.more_is_better),
        str(goal) if goal else None,
        is_reached(goal, medians) if goal else None,
    )


def ratios(medians: dict[str, float], *, more_is_better: bool) -> dict[str, float]:
    """Return how many times better the subject is than each peer, where that can be said."""
    own = medians.get(SUBJECT)
    if not own or math.isnan(own):
        return {}
    return {
        peer: own / other if more_is_better else other / own
        for peer, other in medians.items()
        if peer != SUBJECT and other
    }


def is_reached(goal: Goal, medians: dict[str, float]) -> bool | None:
    """Say whether the subject reaches its goal; None when that was not measured."""
    own = medians.get(SUBJECT)
    if own is None or (goal.peer and goal.peer not in medians):
        return None
    if goal.peer:
        return own >= goal.limit * medians[goal.peer]
    return own < goal.limit


def table(found: Iterable[Row], peers: Sequence[str]) -> str:
    """Return the rows that are shown as an aligned table."""
    others = [peer for peer in peers if peer != SUBJECT] if SUBJECT in peers else []
    lines = [["", *peers, *(f"vs {peer}" for peer in others), "goal", ""]]
    for row in found:
        measure = measure_of(row.scenario, row.figure)
        if measure is not None:
            lines.append(
                [
                    measure.title,
                    *(_number(row.medians.get(peer)) for peer in peers),
                    *(_ratio(row.ratios.get(peer)) for peer in others),
                    row.goal or "",
                    {True: "reached", False: "MISSED", None: ""}[row.reached],
                ]
            )
    return "\n".join(_aligned(lines))


def _number(value: float | None) -> str:
    if value is None or math.isnan(value):
        return "–"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _ratio(value: float | None) -> str:
    return "–" if value is None else f"{_number(value)} ×"


def _aligned(lines: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for first, *rest in lines:
        cells = [cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True)]
        yield "  ".join([first.ljust(widths[0]), *cells]).rstrip()


def document(
    results: Sequence[Result], found: Sequence[Row], options: dict[str, Any]
) -> dict[str, Any]:
    """Return everything as JSON can carry it: where it ran, the medians and each round."""
    return {
        "environment": environment(),
        "options": options,
        "medians": [asdict(row) for row in found],
        "rounds": [asdict(result) for result in results],
    }


def environment() -> dict[str, Any]:
    """Return what the figures depend on."""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "packages": {name: _version(name) for name in PACKAGES},
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
