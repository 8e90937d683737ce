"""The figures as a chart, the peers side by side.

``python -m tests.benchmarks.chart REPORT.json CHART.svg`` draws it from what ``--json`` wrote.
The same figures give the same file, and its colours suit light and dark pages.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.benchmarks.measures import measure_of, number
from tests.benchmarks.peers import PEERS
from tests.benchmarks.report import Row, title

TEXT = "#7d8590"  # readable on white and on black
COLOURS = {
    "dtimer": "#2f81f7",
    "celery_beat": "#57ab5a",
    "redbeat": "#e5534b",
    "redbeat_50ms": "#f0883e",
    "bullmq": "#b083f0",
    "limit": "#909dab",
}
LABELS = {"dtimer": "celery-dtimer", "celery_beat": "Celery beat", "bullmq": "BullMQ"}
PANELS = (
    ("dispatch", "runs_per_s"),
    ("dispatch", "cpu_us_per_run"),
    ("rabbitmq", "runs_per_s"),
    ("lag", "p99_ms"),
    ("creation", "single_per_s"),
    ("memory", "bytes_per_timer"),
)
COLUMNS = 2
PANEL_WIDTH, BAR_HEIGHT, TITLE_HEIGHT = 5.2, 0.27, 0.75  # inches
STYLE: Any = {
    "svg.hashsalt": "benchmarks",  # the same ids in every run
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 9,
    "text.color": TEXT,
    "xtick.color": TEXT,
    "ytick.color": TEXT,
}


def draw(found: Sequence[Row], timers: int, path: Path) -> None:
    """Write the chart of the measures that were taken."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    rows = [row for panel in PANELS for row in found if (row.scenario, row.figure) == panel]
    if not rows:
        return
    lines = -(-len(rows) // COLUMNS)
    bars = max(len(row.medians) for row in rows)
    size = (PANEL_WIDTH * COLUMNS, lines * (bars * BAR_HEIGHT + TITLE_HEIGHT))
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=size, layout="constrained")
        panels = figure.subplots(lines, COLUMNS, squeeze=False).flat
        for axes, row in zip(panels, rows, strict=False):
            _panel(axes, row, timers)
            axes.set_ylim(bars - 0.5, -0.5)  # bars of the same height in every panel
        for axes in list(panels)[len(rows) :]:
            axes.set_axis_off()
        figure.savefig(path, format="svg", transparent=True, metadata={"Date": None})


def _panel(axes: Any, row: Row, timers: int) -> None:
    peers = [peer for peer in PEERS if peer in row.medians]
    values = [row.medians[peer] for peer in peers]
    bars = axes.barh(
        [LABELS.get(peer, peer) for peer in peers], values, color=[COLOURS[peer] for peer in peers]
    )
    axes.bar_label(bars, [number(value) for value in values], padding=4)
    axes.set_title(_title(row, timers), loc="left", fontsize=10, fontweight="bold")
    axes.margins(x=0.15)
    axes.xaxis.set_visible(False)
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)


def _title(row: Row, timers: int) -> str:
    measure = measure_of(row.scenario, row.figure)
    is_more_better = measure is not None and measure.more_is_better
    return f"{title(row, timers)} ({'more' if is_more_better else 'less'} is better)"


def main(report: str, chart: str) -> None:
    """Draw the chart of a report."""
    document = json.loads(Path(report).read_text())
    found = [Row(**row) for row in document["medians"]]
    draw(found, document["options"]["timers"], Path(chart))


if __name__ == "__main__":
    main(*sys.argv[1:3])
