"""What the demo shows: a live picture on a terminal, plain lines anywhere else."""

from __future__ import annotations

import io
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from example_project.demo.verdict import SeenRun, Tally
from example_project.demo.watch import Beat, View

if TYPE_CHECKING:
    from typing_extensions import Self

_PLAIN_WIDTH = 100
_FEWEST_RUNS, _MOST_RUNS = 3, 12  # that the live picture shows
_ROWS_OF_OTHERS = 24  # lines above and around them
_STATE_STYLES = {"running": "green", "killed": "bold red", "starting": "yellow"}


class PlainScreen:
    """Lines of text without any control characters."""

    pause = 1.0  #: seconds between two calls of `show`

    def __init__(self, console: Console) -> None:
        """Write to a console; the clock of the lines starts now."""
        self.console = console
        self._started = time.monotonic()
        self._shown_runs = 0

    def __enter__(self) -> Self:
        """Begin to show."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Leave the screen as it is to stay."""

    def say(self, text: str) -> None:
        """Show what happens, or why."""
        self._line(text)

    def show(self, view: View) -> None:
        """Show which runs have ended since then, by the beats that sent them."""
        new_runs = view.runs[self._shown_runs :]
        self._shown_runs = len(view.runs)
        for beat in view.beats:
            if runs := [_short_run(run) for run in new_runs if _is_from(run, beat)]:
                self._line(f"  {beat.name} sent: {', '.join(runs)}")

    def show_owners(self, view: View) -> None:
        """Show who owns which timers, and which runs have ended."""
        self.show(view)
        for beat in view.beats:
            self._line(f"  {beat.name} ({beat.state}, pid {beat.pid}) {_owned(beat)}")
        if view.unowned:
            self._line(f"  nobody owns: {_names(view.unowned)}")

    def finish(self, tallies: Iterable[Tally]) -> None:
        """Show what should have run and what did."""
        self.console.print(_verdict_table(tallies))

    def _line(self, text: str) -> None:
        clock = f"{time.monotonic() - self._started:5.1f} s  "
        inner = text.lstrip()
        indent = " " * (len(clock) + len(text) - len(inner))
        lines = textwrap.fill(
            inner,
            _PLAIN_WIDTH,
            initial_indent=clock + indent[len(clock) :],
            subsequent_indent=indent + "  ",
            break_on_hyphens=False,
        )
        self.console.print(lines, markup=False, highlight=False, soft_wrap=True)


class LiveScreen(PlainScreen):
    """A picture that follows the service, below the lines that say what happens."""

    pause = 0.2

    def __init__(self, console: Console) -> None:
        """Draw on a console."""
        super().__init__(console)
        self._live = Live(console=console, auto_refresh=False, transient=True)

    def __enter__(self) -> Self:
        """Begin to draw."""
        self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Take the picture away; the lines stay."""
        self._live.stop()

    def say(self, text: str) -> None:
        """Add a line above the picture."""
        clock = f"[dim]{time.monotonic() - self._started:5.1f} s[/]  "
        table = Table.grid()
        table.add_row(clock, f"[bold]{escape(text)}[/]")
        self.console.print(table)

    def show(self, view: View) -> None:
        """Draw the picture anew."""
        rows = min(max(self.console.height - _ROWS_OF_OTHERS, _FEWEST_RUNS), _MOST_RUNS)
        beats, runs = _beat_table(view), _run_table(view.runs[-rows:], view.beats)
        note = "[dim]Ctrl-C ends the demo and all of its processes.[/]"
        self._live.update(Group(beats, runs, note), refresh=True)

    def show_owners(self, view: View) -> None:
        """Draw the picture anew: it says so already."""
        self.show(view)

    def finish(self, tallies: Iterable[Tally]) -> None:
        """Take the picture away, and show what should have run and what did."""
        self._live.stop()
        super().finish(tallies)


def open_screen() -> PlainScreen:
    """Return the screen that fits standard output."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # whatever a timer is called
    console = Console()
    if sys.stdout.isatty() and not console.is_dumb_terminal:
        return LiveScreen(console)
    return PlainScreen(Console(force_terminal=False, no_color=True, width=_PLAIN_WIDTH))


def _verdict_table(tallies: Iterable[Tally]) -> Table:
    """Return the table of what should have run and what did."""
    table = Table(box=box.SIMPLE_HEAD, show_footer=True, title_justify="left")
    rows = sorted(tallies, key=lambda tally: tally.name)
    columns: dict[str, Callable[[Tally], int]] = {
        "slots": lambda tally: tally.slots,
        "ran": lambda tally: tally.ran,
        "skipped": lambda tally: tally.skipped,
        "lost": lambda tally: tally.lost,
        "doubled": lambda tally: tally.doubled,
        "stray": lambda tally: tally.stray,
    }
    table.add_column("timer", f"{len(rows)} timers")
    for title, count in columns.items():
        table.add_column(title, str(sum(map(count, rows))), justify="right")
    table.add_column("longest lag", justify="right")
    for tally in rows:
        counts = [str(count(tally) or "-") for count in columns.values()]
        style = None if tally.is_clean else "bold red"
        lag = _lag(tally.longest_lag) if tally.ran else ""
        table.add_row(escape(tally.name), *counts, lag, style=style)
    return table


def _beat_table(view: View) -> Table:
    table = Table(box=box.ROUNDED, expand=True)
    for title, ratio in (("beat", None), ("pid", None), ("state", None)):
        table.add_column(title, ratio=ratio, no_wrap=True)
    table.add_column("heartbeat", justify="right", no_wrap=True)
    table.add_column("sent", justify="right", no_wrap=True)
    table.add_column("owns", ratio=1)
    for beat in view.beats:
        style = _STATE_STYLES[beat.state]
        age = "" if beat.heartbeat_age is None else f"{_seconds(beat.heartbeat_age):.1f} s ago"
        state = f"[{style}]{beat.state}[/]"
        table.add_row(beat.name, str(beat.pid), state, age, str(beat.sent), escape(_owned(beat)))
    if view.unowned:
        table.add_row("nobody", "", "", "", "", escape(_names(view.unowned)))
    return table


def _run_table(runs: Sequence[SeenRun], beats: Sequence[Beat]) -> Table:
    table = Table(box=box.ROUNDED, expand=True)
    for title in ("scheduled at", "ended after"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("timer", ratio=1, no_wrap=True)
    table.add_column("run", justify="right", no_wrap=True)
    table.add_column("sent by", no_wrap=True)
    table.add_column("run by", no_wrap=True)
    for run in reversed(runs):
        moment = f"{run.scheduled_at:%H:%M:%S}.{run.scheduled_at.microsecond // 1000:03}"
        sender = next((beat.name for beat in beats if _is_from(run, beat)), "?")
        cells = (escape(run.name), str(run.number), sender, run.worker)
        table.add_row(moment, _lag(run.lag), *cells)
    return table


def _owned(beat: Beat) -> str:
    if not beat.timers:
        return "owns no timer"
    return f"owns {len(beat.timers)}: {_names(beat.timers)}"


def _names(timers: Iterable[str]) -> str:
    """Return names in few words: "rate of CHF" and "rate of JPY" are "rate of CHF/JPY"."""
    groups: dict[str, list[str]] = {}
    for timer in timers:
        stem, _, last = timer.rpartition(" ")
        groups.setdefault(stem, []).append(last)
    return ", ".join(f"{stem} {'/'.join(lasts)}".strip() for stem, lasts in groups.items())


def _is_from(run: SeenRun, beat: Beat) -> bool:
    return run.instance.split(":")[1] == str(beat.pid)


def _short_run(run: SeenRun) -> str:
    late = f" ({_lag(run.lag)} late)" if _seconds(run.lag) >= 1 else ""
    return f"{run.name} #{run.number}{late}"


def _lag(lag: timedelta) -> str:
    seconds = _seconds(lag)
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1000:.0f} ms"


def _seconds(span: timedelta) -> float:
    return max(span / timedelta(seconds=1), 0.0)
