"""When timers ought to run, worked out from what was asked for and nothing else.

Nothing here is shared with the package: an interval is arithmetic, a cron text is compared with
every second that passes. Moments are ms since the epoch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone
from typing import TypeAlias
from zoneinfo import ZoneInfo

_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_FIELDS = (
    (0, 59),
    (0, 59),
    (0, 23),
    (1, 31),
    (1, 12),
    (0, 6),
)  # second, minute, hour, day, month, weekday


@dataclass(frozen=True, slots=True)
class Every:
    """An interval; the anchor is any of its runs, None while no run of it is known."""

    interval_ms: int
    anchor_ms: int | None = None

    def moments(self, after_ms: int, until_ms: int) -> list[int]:
        """Return the runs in ``(after_ms, until_ms]``; none while the anchor is not known."""
        if self.anchor_ms is None:
            return []
        passed = (after_ms - self.anchor_ms) // self.interval_ms + 1
        return list(
            range(self.anchor_ms + passed * self.interval_ms, until_ms + 1, self.interval_ms)
        )

    def anchored(self, moment_ms: int) -> Every:
        """Return the interval of which this is a run, unless its runs are known."""
        return self if self.anchor_ms is not None else replace(self, anchor_ms=moment_ms)

    def may_start(self, moment_ms: int, from_ms: int, until_ms: int) -> bool:
        """Say whether a run at a moment fits an interval that began between two others."""
        most = (moment_ms - from_ms) // self.interval_ms  # intervals since its beginning
        return most > max(0, (moment_ms - until_ms - 1) // self.interval_ms)


@dataclass(frozen=True, slots=True)
class Cron:
    """A cron text of five or six fields (with seconds in front), in a time zone."""

    text: str
    zone: str = "UTC"

    def moments(self, after_ms: int, until_ms: int) -> list[int]:
        """Return the runs in ``(after_ms, until_ms]``, looking at every second of them."""
        texts = self.text.split()
        fields = [
            _values(text, *bounds)
            for text, bounds in zip(["0"] * (6 - len(texts)) + texts, _FIELDS, strict=True)
        ]
        zone = ZoneInfo(self.zone)
        seconds = range(after_ms // 1000 + 1, until_ms // 1000 + 1)
        return [second * 1000 for second in seconds if _matches(fields, second, zone)]


@dataclass(frozen=True, slots=True)
class Once:
    """A single run."""

    at_ms: int

    def moments(self, after_ms: int, until_ms: int) -> list[int]:
        """Return the run if it lies in ``(after_ms, until_ms]``."""
        return [self.at_ms] if after_ms < self.at_ms <= until_ms else []


Rule: TypeAlias = Every | Cron | Once


def _values(text: str, least: int, most: int) -> set[int]:
    """Return what a field of a cron text allows: ``*``, ``*/n``, and numbers with commas."""
    if text == "*":
        return set(range(least, most + 1))
    if text.startswith("*/"):
        return set(range(least, most + 1, int(text[2:])))
    return {int(part) for part in text.split(",")}


def _matches(fields: Sequence[set[int]], second: int, zone: ZoneInfo) -> bool:
    if zone.key == "UTC" and second % 60 not in fields[0]:  # most seconds need no calendar
        return False
    local = (_EPOCH + timedelta(seconds=second)).astimezone(zone)
    parts = (local.second, local.minute, local.hour, local.day, local.month, local.isoweekday() % 7)
    return all(part in allowed for part, allowed in zip(parts, fields, strict=True))
