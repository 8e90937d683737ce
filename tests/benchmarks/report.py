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

from tests.benchmarks.measure import Figures
from tests.benchmarks.measures import measure_of, number
from tests.benchmarks.peers import SUBJECT

PACKAGES = ("celery", "kombu", "redis", "hiredis", "celery-redbeat")


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
    """One measure.

    Attributes:
        medians: By peer.
        ratios: How many times better the subject is, by peer.
        goals: What the subject must reach, and whether it does; None when that was not measured.
    """

    scenario: str
    figure: str
    medians: dict[str, float]
    ratios: dict[str, float]
    goals: dict[str, bool | None]


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
        return Row(scenario, name, medians, {}, {})
    more = measure.more_is_better
    reached = {
        goal.text(more_is_better=more): goal.is_reached(medians, more_is_better=more)
        for goal in measure.goals
    }
    compared = ratios(medians, more_is_better=more) if measure.is_compared else {}
    return Row(scenario, name, medians, compared, reached)


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


def table(found: Iterable[Row], peers: Sequence[str], timers: int) -> str:
    """Return the rows that are shown as an aligned table."""
    shown = [row for row in found if measure_of(row.scenario, row.figure)]
    peers = [peer for peer in peers if any(peer in row.medians for row in shown)]
    others = [peer for peer in peers if any(peer in row.ratios for row in shown)]
    lines = [["", *peers, *(f"vs {peer}" for peer in others)]]
    lines += [
        [
            title(row, timers),
            *(number(row.medians.get(peer)) for peer in peers),
            *(_ratio(row.ratios.get(peer)) for peer in others),
        ]
        for row in shown
    ]
    return "\n".join(_aligned(lines))


def goals(found: Iterable[Row], timers: int) -> str:
    """Return what must be reached, and whether it is, as an aligned table."""
    words = {True: "reached", False: "MISSED", None: "not measured"}
    lines = [
        [title(row, timers), number(row.medians.get(SUBJECT)), goal, words[reached]]
        for row in found
        for goal, reached in row.goals.items()
    ]
    return "\n".join(_aligned([["", SUBJECT, "goal", ""], *lines]))


def title(row: Row, timers: int) -> str:
    """Return what a row is called."""
    measure = measure_of(row.scenario, row.figure)
    return f"{row.scenario} {row.figure}" if measure is None else measure.title_for(timers)


def _ratio(value: float | None) -> str:
    return "–" if value is None else f"{number(value)} ×"


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
