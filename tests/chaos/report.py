"""The table of a run, or of several: as text, as Markdown, and as lines of JSON that add up."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from tests.chaos.episode import Outcome
from tests.chaos.verdict import Tally

_HEADINGS = (
    "fault",
    "injected",
    "expected",
    "sent",
    "skipped",
    "late p50",
    "p99",
    "max",
    "lost",
    "doubled",
    "lost with data",
    "replayed",
)
_MIB = 1024 * 1024
_COUNTERS = ("injected", "deployments", "expected", "lost", "doubled", "reasons")


@dataclass
class Report:
    """All that is shown of a run, or of several runs together."""

    command: str
    date: str
    seconds: float = 0.0
    rows: dict[str, Tally] = field(default_factory=lambda: defaultdict(Tally))
    injected: Counter[str] = field(default_factory=Counter)
    deployments: Counter[str] = field(default_factory=Counter)
    expected: Counter[str] = field(default_factory=Counter)  #: runs, by deployment
    lost: Counter[str] = field(default_factory=Counter)
    doubled: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    takeovers: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    slopes: list[float] = field(default_factory=list)
    memory: list[tuple[int, int]] = field(default_factory=list)
    most_lines: int = 0
    ran: int = 0
    problems: list[str] = field(default_factory=list)

    def add(self, outcome: Outcome) -> None:
        """Add an episode."""
        self.seconds += outcome.seconds
        self.deployments[outcome.deployment] += 1
        total = outcome.verdict.total
        self.expected[outcome.deployment] += total.expected
        self.lost[outcome.deployment] += total.lost
        self.doubled[outcome.deployment] += total.doubled
        for name, tally in outcome.verdict.tallies.items():
            self.rows[name].add(tally)
        self.injected.update(outcome.injected)
        self.reasons.update(outcome.verdict.reasons)
        for kind, seconds in outcome.takeovers:
            self.takeovers[kind].append(seconds)
        self.slopes += outcome.slopes
        self.memory += outcome.memory
        self.most_lines = max(self.most_lines, outcome.most_lines)
        self.ran += outcome.ran
        self.problems += [f"{outcome.deployment}: {text}" for text in outcome.verdict.problems]

    def merge(self, other: Report) -> None:
        """Add another run."""
        self.seconds += other.seconds
        for name, tally in other.rows.items():
            self.rows[name].add(tally)
        self.injected.update(other.injected)
        for name in _COUNTERS[1:-1]:
            getattr(self, name).update(getattr(other, name))
        self.reasons.update(other.reasons)
        for kind, seconds in other.takeovers.items():
            self.takeovers[kind] += seconds
        self.slopes += other.slopes
        self.memory += other.memory
        self.most_lines = max(self.most_lines, other.most_lines)
        self.ran += other.ran
        self.problems += other.problems

    @property
    def total(self) -> Tally:
        """All rows together."""
        total = Tally()
        for tally in self.rows.values():
            total.add(tally)
        return total

    # As JSON

    def line(self) -> str:
        """Return the report as one line of JSON, from which `read` makes it again."""
        return json.dumps(
            {**vars(self), "rows": {name: vars(row) for name, row in self.rows.items()}}
        )

    @classmethod
    def of_line(cls, line: str) -> Report:
        """Return the report that a line holds."""
        values: dict[str, Any] = json.loads(line)
        rows = {name: Tally(**row) for name, row in values.pop("rows").items()}
        report = cls(values.pop("command"), values.pop("date"))
        report.rows.update(rows)
        report.takeovers.update(values.pop("takeovers"))
        for name in _COUNTERS:
            getattr(report, name).update(values.pop(name))
        for name, value in values.items():
            setattr(report, name, value)
        return report


def read(paths: Iterable[Path]) -> list[Report]:
    """Return the reports that files hold, a line each."""
    return [
        Report.of_line(line)
        for path in paths
        for line in path.read_text().splitlines()
        if line.strip()
    ]


def merged(reports: Sequence[Report]) -> Report:
    """Return several runs as one."""
    first, *others = reports
    for other in others:
        first.merge(other)
    return first


# ------------------------------------------------------------------ as tables


def _cells(name: str, injected: str, tally: Tally) -> list[str]:
    late = sorted(tally.late_ms)
    return [
        name,
        injected,
        f"{tally.expected:,}",
        f"{tally.sent:,}",
        f"{tally.skipped:,}",
        _milliseconds(_percentile(late, 0.5)),
        _milliseconds(_percentile(late, 0.99)),
        _milliseconds(late[-1] if late else None),
        f"{tally.lost:,}",
        f"{tally.doubled:,}",
        f"{tally.lost_by_redis:,}",
        f"{tally.replayed:,}",
    ]


def _percentile(values: Sequence[int], share: float) -> int | None:
    return values[min(len(values) - 1, int(len(values) * share))] if values else None


def _milliseconds(value: int | None) -> str:
    if value is None:
        return "–"
    return f"{value} ms" if value < 1000 else f"{value / 1000:.1f} s"


def _table(report: Report) -> list[list[str]]:
    rows = [list(_HEADINGS)]
    for name in sorted(report.rows, key=lambda name: (name != "none yet", name)):
        shown = "no fault yet" if name == "none yet" else name
        count = f"{report.injected[name]:,}" if name in report.injected else ""
        rows.append(_cells(shown, count, report.rows[name]))
    return [*rows, _cells("all", f"{report.injected.total():,}", report.total)]


def as_text(report: Report) -> str:
    """Return the report for a terminal."""
    table = _table(report)
    widths = [max(len(row[column]) for row in table) for column in range(len(_HEADINGS))]
    lines = [
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in table
    ]
    lines.insert(1, "-" * len(lines[0]))
    lines.insert(-1, lines[1])
    return "\n".join([*lines, "", *(f"{name}: {text}" for name, text in facts(report))])


def as_markdown(report: Report) -> str:
    """Return the report for ``docs/reliability.md``."""
    head, *rows = _table(report)
    lines = [_line(head), _line(["---", *["--:"] * (len(head) - 1)]), *map(_line, rows)]
    return "\n".join([*lines, "", "| | |", "|---|---|", *(_line(fact) for fact in facts(report))])


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def facts(report: Report) -> list[tuple[str, str]]:
    """Return what the table does not tell."""
    total = report.total
    found = [
        (
            "deployments",
            ", ".join(f"{name} {count}" for name, count in sorted(report.deployments.items())),
        ),
        ("time under faults", f"{report.seconds / 60:.1f} min"),
        (
            "expected = sent + skipped + pending + lost",
            f"{total.expected:,} = {total.sent:,} + {total.skipped:,} + {total.pending:,} + "
            f"{total.lost + total.lost_by_redis:,}",
        ),
        (
            "skipped, by reason",
            ", ".join(f"{reason} {count:,}" for reason, count in sorted(report.reasons.items())),
        ),
        *(
            (
                f"{name}: expected / lost / doubled",
                f"{count:,} / {report.lost[name]:,} / {report.doubled[name]:,}",
            )
            for name, count in sorted(report.expected.items())
        ),
        ("run by workers", f"{report.ran:,}"),
    ]
    for kind, seconds in sorted(report.takeovers.items()):
        least, most = min(seconds), max(seconds)
        text = f"{least:.2f} / {median(seconds):.2f} / {most:.2f} s ({len(seconds)} times)"
        found.append((f"takeover after {kind}, min / median / max", text))
    if report.slopes:
        first = median(first for first, _ in report.memory) / _MIB
        last = median(last for _, last in report.memory) / _MIB
        found.append(
            (
                "memory of beats that lived through an episode",
                f"{first:.1f} MiB when warm, {last:.1f} MiB at the end; slope by least squares "
                f"{median(report.slopes) / _MIB:+.2f} MiB/h (median of {len(report.slopes)})",
            )
        )
    found.append(("lines in a beat's log about one fault, at most", str(report.most_lines)))
    return found
