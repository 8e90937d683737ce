"""Recurrence rules, of iCalendar and of dateutil."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from dateutil import rrule

from celery_dtimer import zones
from celery_dtimer.errors import InvalidTimerError, invalid
from celery_dtimer.icalendar import (
    NAIVE_EPOCH,
    TEXT,
    WEEKDAYS,
    Lines,
    lines_of,
    parts_of,
    wall_of,
    words_of,
    written,
)
from celery_dtimer.occurrences import MAX_YEARS, Pattern, occurs, pattern_of
from celery_dtimer.rules import ClockRule


@dataclass(frozen=True, slots=True)
class Recurrence(ClockRule):
    """At the times of an iCalendar recurrence rule, by the clocks of a time zone.

    The text is DTSTART, as clocks show it, and one RRULE; it is kept in one form, so that equal
    rules are equal. Rules of days and longer list fixed times, for which ``dst`` says what happens
    where clocks change, as for `Crontab`; shorter ones follow elapsed time. COUNT counts the
    times that the rule lists, whether or not clocks show them. Unlike in iCalendar, DTSTART itself
    is a run only if the rule lists it, as with dateutil.
    """

    text: str
    timezone: str = "UTC"
    dst: str = zones.DEFAULT_POLICY
    _pattern: Pattern = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.text, str):
            raise invalid("schedule", self.text, TEXT)
        timezone, dst = zones.zone_name(self.timezone), zones.check_policy(self.dst)
        parts = parts_of(lines_of(self.text), timezone)
        pattern = pattern_of(parts)
        if not occurs(pattern):
            raise InvalidTimerError(
                f"The rule {parts.text().splitlines()[1]!r} never occurs: not in the "
                f"{MAX_YEARS} years after DTSTART, nor before it ends"
            )
        values = (parts.text(), timezone, dst, pattern)
        for name, value in zip(self.__slots__, values, strict=True):
            object.__setattr__(self, name, value)

    @property
    def follows_elapsed_time(self) -> bool:
        """Whether the rule is one of hours or shorter."""
        return self._pattern.grid is not None

    def next_wall(self, wall: int) -> int | None:
        """Return the first occurrence that is not before a time."""
        return self._pattern.next_wall(wall)

    @property
    def is_countable(self) -> bool:
        """Whether the rule is regular enough, as most are."""
        return self._pattern.is_countable

    def count_walls(self, low: int, high: int) -> int:
        """Return how many occurrences clocks show in ``[low, high)``."""
        return self._pattern.count_walls(low, high)

    def describe(self) -> str:
        """Return for example "FREQ=DAILY from 2027-01-01T09:00:00 (Europe/Paris)"."""
        start = NAIVE_EPOCH + dt.timedelta(seconds=self._pattern.parts.start)
        rule = self.text.partition("RRULE:")[2]
        return f"{rule} from {start.isoformat()} ({self._where()})"

    def encode(self) -> dict[str, Any]:
        """Return ``{"rrule": text}``, with "tz" and "dst" where they are not the default."""
        return {"rrule": self.text} | self._encode_clock()


# --- what users give ------------------------------------------------------------------------


def names_zone(value: Any) -> bool:
    """Say whether an iCalendar text, or dateutil's ``rrule``, names the zone of its start."""
    lines = lines_of(value) if isinstance(value, str) else _lines_of_object(value)
    return lines.start is not None and lines.start.utcoffset() is not None


def is_text(value: str) -> bool:
    """Say whether a text is meant as a recurrence rule, not as a cron expression."""
    return "=" in value or ":" in value


def is_dateutil(value: object) -> bool:
    """Say whether a value is a rule, or a set of rules, of dateutil."""
    return isinstance(value, rrule.rrulebase)


def recurrence_of(
    value: Any, zone: str | None, default_zone: Callable[[], str], start_ms: int | None
) -> Recurrence:
    """Return the rule of an iCalendar text or of dateutil's ``rrule``.

    Args:
        value: The text or the ``rrule``.
        zone: The zone that is given for it, if one is.
        default_zone: Returns the zone of a rule that names none itself.
        start_ms: The moment at which a text without DTSTART begins, if it may lack it.

    Raises:
        InvalidTimerError: If it is anything else, or says what cannot be stored.
    """
    lines = lines_of(value) if isinstance(value, str) else _lines_of_object(value)
    start = lines.start
    if zone is None:
        own = None if start is None or start.utcoffset() is None else start.tzinfo
        zone = default_zone() if own is None else zones.zone_name(own)
    if start is None and start_ms is not None:
        lines = lines._replace(start=zones.EPOCH + dt.timedelta(seconds=start_ms // 1000))
    return _recurrence(parts_of(lines, zone).text(), zone)


_recurrence = lru_cache(maxsize=1024)(Recurrence)  # many timers have the same rule


def _lines_of_object(rule: Any) -> Lines:
    """Return the parts of dateutil's ``rrule``, from the text that it has for itself.

    That text leaves out time zones, says nothing of a list that is empty, and takes the first day
    of the week from the process's calendar; so it is read back and compared.
    """
    if type(rule) is not rrule.rrule:
        raise invalid(
            "schedule", rule, "one rrule: sets of rules and dates, and subclasses, cannot be stored"
        )
    start, until = rule._dtstart, rule._until
    words = words_of(str(rule).partition("RRULE:")[2])
    words.setdefault("WKST", WEEKDAYS[rule._wkst])
    if not _is_complete(rule, words):
        raise invalid("schedule", rule, "an rrule without empty lists")
    if until is not None:
        aware = until.utcoffset() is not None
        naive = (until.astimezone(zones.UTC) if aware else until).replace(tzinfo=None)
        words["UNTIL"] = written(wall_of(naive)) + ("Z" if aware else "")
    return Lines(start, words)


def _is_complete(rule: Any, words: dict[str, str]) -> bool:
    """Say whether a rule means what its words mean."""
    text = ";".join(f"{name}={value}" for name, value in words.items() if name != "UNTIL")
    read: Any = rrule.rrulestr(text, dtstart=rule._dtstart)
    apart = {"_until", "_original_rule"}  # the one is compared by hand, the other how it was said
    return all(
        value == getattr(read, name)
        for name, value in vars(rule).items()
        if name not in apart and not name.startswith("_cache") and name != "_len"
    )
