"""How commands print: tables for people, lines for pipes, one JSON document for programs."""

from __future__ import annotations

import os
import re
import shutil
import sys
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta, timezone, tzinfo
from typing import Any

import click
from kombu.utils import json

_GAP = "  "
_NARROWEST = 8  # what a column keeps when the terminal is too small
_COLORS = {
    **dict.fromkeys(("active", "ok", "up", "succeeded", "sent", "live"), "green"),
    **dict.fromkeys(("paused", "warning", "leaving", "draining", "retried", "pending"), "yellow"),
    **dict.fromkeys(("broken", "error", "down", "failed", "lost", "silent"), "red"),
}
_UNITS = (("d", 86_400), ("h", 3600), ("min", 60))
_MOMENT = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(\+00:00|Z)")
_ENDLESS = 1_000_000  # columns of what is no terminal


class UnwritableError(Exception):
    """Stdout takes no more: its disk is full, say."""


class Output:
    """Where a command prints: results go to stdout, all else to stderr.

    Nothing that is stored reaches a terminal as it is: what would be obeyed there, is escaped.
    """

    def __init__(
        self, *, as_json: bool, has_color: bool = False, zone: tzinfo = timezone.utc
    ) -> None:
        """Prepare to print.

        Args:
            as_json: as one JSON document.
            has_color: whether colors may be used on a terminal.
            zone: by whose clocks people are told moments.
        """
        self.as_json = as_json
        self.is_terminal = sys.stdout is not None and sys.stdout.isatty()
        self._has_color = has_color and self.is_terminal and not os.environ.get("NO_COLOR")
        self._zone = zone

    def document(self, content: Any) -> None:
        """Print a JSON document: the only one of a command."""
        self.row(json.dumps(content, indent=2, ensure_ascii=True))

    def result(self, document: Any, text: str) -> None:
        """Print a result: a document for programs, a line for people."""
        if self.as_json:
            self.document(document)
        else:
            self.line(text)

    def note(self, text: str) -> None:
        """Tell people something beside the result."""
        click.echo(visible(text), err=True)

    def line(self, text: str, *, lead: str = "") -> None:
        """Print a line of a result for people, behind a word in its color."""
        self.row(self.colored(lead, lead.strip()) + visible(text))

    def table(
        self,
        heading: Sequence[str],
        rows: Iterable[Sequence[Any]],
        *,
        optional: Sequence[str] = (),
        whole: Sequence[str] = (),
    ) -> None:
        """Print rows: aligned under a heading on a terminal, else with tabs in between.

        Args:
            heading: the columns' titles.
            rows: of so many values each.
            optional: columns that are left out where the terminal is too narrow, in this order.
            whole: columns that are never cut.
        """
        if self.is_terminal:
            lines = self.aligned(heading, rows, optional=optional, whole=whole)
            for line in lines or ["none"]:
                self.row(line)
            return
        for row in rows:
            self.row("\t".join(map(visible, row)))

    def aligned(
        self,
        heading: Sequence[str],
        rows: Iterable[Sequence[Any]],
        *,
        optional: Sequence[str] = (),
        whole: Sequence[str] = (),
    ) -> list[str]:
        """Return the lines of a table that fits the terminal; none without rows."""
        cells = [[visible(cell) for cell in row] for row in rows]
        if not cells:
            return []
        columns = {
            title: [title.upper(), *column]
            for title, column in zip(heading, zip(*cells, strict=True), strict=True)
        }
        widths = {title: max(map(width, column)) for title, column in columns.items()}
        room = shutil.get_terminal_size().columns if self.is_terminal else _ENDLESS
        fitted = _fitted(widths, room, optional, whole)
        table = zip(*(columns[title] for title in fitted), strict=True)
        sizes = list(fitted.values())
        return [self._aligned(row, sizes, is_heading=not place) for place, row in enumerate(table)]

    def _aligned(self, row: Sequence[str], widths: Sequence[int], *, is_heading: bool) -> str:
        texts = [_padded(cell, size) for cell, size in zip(row, widths, strict=True)]
        if is_heading:
            line = _GAP.join(texts).rstrip()
            return click.style(line, bold=True) if self._has_color else line
        return _GAP.join(map(self.colored, texts, row)).rstrip()

    def fields(self, rows: Iterable[tuple[str, Any]]) -> None:
        """Print names with values, one a line; what is not there is left out."""
        told = [(visible(name), visible(value)) for name, value in rows if value not in (None, "")]
        longest = max((len(name) for name, _ in told), default=0)
        for name, value in told:
            title = f"{name}:".ljust(longest + 1) if self.is_terminal else name
            gap = " " if self.is_terminal else "\t"
            self.row(f"{title}{gap}{self.colored(value)}")

    def colored(self, text: str, word: str | None = None) -> str:
        """Return a text in the color of a word, by default its own."""
        color = _COLORS.get(text if word is None else word)
        return click.style(text, fg=color) if color and self._has_color else text

    def moment(self, moment: datetime | None) -> str | None:
        """Return a moment by the clocks of the zone for people, else as ISO 8601 in UTC."""
        return local(moment, self._zone) if self.is_terminal else iso(moment)

    def sentence(self, text: str) -> str:
        """Return a text whose moments, in UTC, are by the clocks of the zone for people."""
        if not self.is_terminal:
            return text

        def by_clock(found: re.Match[str]) -> str:
            moment = datetime.fromisoformat(found[0].replace("Z", "+00:00"))
            return local(moment, self._zone) or ""

        return _MOMENT.sub(by_clock, text)

    def row(self, text: str) -> None:
        """Print a line that is escaped already."""
        try:
            click.echo(text)
        except BrokenPipeError:
            raise
        except OSError as exc:
            raise UnwritableError(f"stdout can not be written: {exc.strerror}") from exc


def visible(value: Any) -> str:
    """Return a value as one line: what could not be seen, or would break it, is escaped."""
    if value is None:
        return "-"
    text = value if isinstance(value, str) else str(value)
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode() for each in text
    )


def named(name: str, otherwise: str = '""') -> str:
    """Return a name for a table, in which an empty one would not be seen."""
    return name or otherwise


def width(text: str) -> int:
    """Return how many columns of a terminal a text takes."""
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(each) else 2 if unicodedata.east_asian_width(each) in "WF" else 1
        for each in text
    )


def _padded(text: str, size: int) -> str:
    """Return a text that takes so many columns."""
    if width(text) > size:
        while width(text) >= size:
            text = text[:-1]
        text += "…"
    return text + " " * (size - width(text))


def _fitted(
    widths: Mapping[str, int], room: int, optional: Sequence[str], whole: Sequence[str]
) -> dict[str, int]:
    """Return the columns that are shown, with widths that fit: the widest give most."""
    left = dict(widths)
    for title in optional:
        if _taken(left) <= room:
            break
        left.pop(title, None)
    while (over := _taken(left) - room) > 0:
        cut = {title: size for title, size in left.items() if title not in whole}
        widest = max(cut, key=lambda title: cut[title], default=None)
        if widest is None or cut[widest] <= _NARROWEST:
            break
        others = [size for title, size in cut.items() if title != widest]
        next_widest = max(others, default=0)
        step = max(1, min(over, cut[widest] - max(next_widest, _NARROWEST)))
        left[widest] = cut[widest] - step
    return left


def _taken(widths: Mapping[str, int]) -> int:
    return sum(widths.values()) + len(_GAP) * (len(widths) - 1)


def iso(moment: datetime | None) -> str | None:
    """Return a moment in UTC as ISO 8601, for programs."""
    if moment is None:
        return None
    return moment.astimezone(timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def local(moment: datetime | None, zone: tzinfo) -> str | None:
    """Return a moment by the clocks of a zone, for people."""
    if moment is None:
        return None
    precision = "milliseconds" if moment.microsecond else "seconds"
    own = moment.astimezone(zone)
    return f"{own.replace(tzinfo=None).isoformat(' ', precision)} {own.tzname()}"


def span(length: float | timedelta) -> str:
    """Return a length of time in words, for example "2 h 5 min"."""
    seconds = length.total_seconds() if isinstance(length, timedelta) else length
    if abs(seconds) < 60:
        return f"{seconds:.3g} s"
    rest, words = round(abs(seconds)), []
    for unit, size in _UNITS:
        count, rest = divmod(rest, size)
        if count:
            words.append(f"{count} {unit}")
    if rest and len(words) < 2:
        words.append(f"{rest} s")
    return ("-" if seconds < 0 else "") + " ".join(words[:2])


def from_now(moment: datetime | None, now: datetime) -> str | None:
    """Return how far a moment is from now, for example "in 5 min" or "3 s ago"."""
    if moment is None:
        return None
    away = moment.astimezone(timezone.utc) - now.astimezone(timezone.utc)  # by no clocks on walls
    return f"in {span(away)}" if away >= timedelta(0) else f"{span(-away)} ago"
