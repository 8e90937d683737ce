"""Cron expressions: their language, and the rule that they make."""

from __future__ import annotations

import calendar
import datetime as dt
import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

from celery import schedules

from celery_dtimer import zones
from celery_dtimer.errors import InvalidTimerError, invalid
from celery_dtimer.rules import ClockRule

_EPOCH_ORDINAL = zones.EPOCH.toordinal()
_MAX_YEARS = 40  # 29 February falls on a given weekday every 28 years, 40 across a year like 2100
_LEAP_YEAR = 2000  # has the longest February
_LAST_DAY = 32  # how L is kept: behind every day that has a number

_CRON = (
    "'minute hour day_of_month month_of_year day_of_week', for example '0 3 * * mon-fri', the same "
    "with seconds before it, or one of @hourly, @daily, @midnight, @weekly, @monthly, @yearly, "
    "@annually"
)
_NICKNAMES = {
    "@hourly": "0 * * * *",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@weekly": "0 0 * * 0",
    "@monthly": "0 0 1 * *",
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
}


class Field(NamedTuple):
    """One field of a cron expression: Celery's name for it and what it may hold."""

    name: str
    first: int
    size: int
    also: str = ""

    @property
    def accepted(self) -> str:
        """What to write in the field, in words."""
        last = self.first + self.size - 1
        return f"{self.first}-{last}{self.also}, written 'a', 'a-b', 'a-b/n', '*', '*/n' or 'a,b'"


_SECONDS = Field("second", 0, 60)
_DAYS = Field("day_of_month", 1, 31, " or L (the month's last day)")
#: The five fields that Celery knows.
FIELDS = (
    Field("minute", 0, 60),
    Field("hour", 0, 24),
    _DAYS,
    Field("month_of_year", 1, 12, " or jan-dec"),
    Field("day_of_week", 0, 7, " (7 is Sunday too) or sun-sat"),
)
# Celery's parser ignores what follows the part that it understands, so the form is checked first.
_PART = re.compile(r"\*(?:/[0-9]+)?|([0-9a-z]+)(?:-([0-9a-z]+)(?:/[0-9]+)?)?", re.IGNORECASE)


@lru_cache(maxsize=4096)
def _expand(kind: Field, text: str) -> tuple[int, ...]:
    """Return the sorted numbers that a cron field stands for."""
    try:
        values = {value for part in text.split(",") for value in _expand_part(kind, part)}
    except (schedules.ParseException, ValueError):
        raise invalid(kind.name, text, kind.accepted) from None
    return tuple(sorted(values))


def _expand_part(kind: Field, part: str) -> set[int]:
    if part == "L" and kind is _DAYS:
        return {_LAST_DAY}
    form = _PART.fullmatch(part)
    if form is None:
        raise ValueError(part)
    if kind.size == 7 and "7" in form.groups():
        # Cron's other Sunday asks for a week that is one day longer.
        return {day % 7 for day in schedules.crontab_parser(8).parse(part)}
    return schedules.crontab_parser(kind.size, kind.first).parse(part)


def _read(expression: object) -> tuple[str, list[tuple[int, ...]]]:
    """Return an expression in its one form, and the numbers of its six fields.

    Raises:
        InvalidTimerError: It names every field that is wrong, with its value and what is accepted.
    """
    text = expression.strip() if isinstance(expression, str) else ""
    texts = _NICKNAMES.get(text.lower(), text).split()
    if len(texts) == len(FIELDS):
        texts.insert(0, "0")
    if len(texts) != 1 + len(FIELDS):
        raise invalid("schedule", expression, _CRON)
    texts[3] = texts[3].upper() if "l" in texts[3].lower().split(",") else texts[3]
    numbers = _expand_all(texts)
    if numbers[0] == (0,):
        del texts[0]  # the full minute: equal rules have one form
    days, months = numbers[3], numbers[4]
    longest = max(calendar.monthrange(_LEAP_YEAR, month)[1] for month in months)
    if days[0] > longest and _LAST_DAY not in days:
        raise InvalidTimerError(
            f"Invalid crontab: day_of_month {texts[-3]!r} never occurs in "
            f"month_of_year {texts[-2]!r}."
        )
    return " ".join(texts), numbers


def _expand_all(texts: Sequence[str]) -> list[tuple[int, ...]]:
    numbers, errors = [], []
    for kind, text in zip((_SECONDS, *FIELDS), texts, strict=True):
        try:
            numbers.append(_expand(kind, text))
        except InvalidTimerError as exc:
            errors.append(str(exc))
    if errors:
        raise InvalidTimerError("; ".join(errors))
    return numbers


_NAMES = """
    jan feb mar apr may jun jul aug sep oct nov dec january february march april june july august
    september october november december
    sun mon tue wed thu fri sat sunday monday tuesday wednesday thursday friday saturday
"""
_VALUE = "(?:[0-9]+|L|" + "|".join(_NAMES.split()) + ")"
_ALIKE = rf"(?:\*|{_VALUE}(?:-{_VALUE})?)(?:/[0-9]+)?"
_FIELD_ALIKE = re.compile(rf"{_ALIKE}(?:,{_ALIKE})*", re.IGNORECASE)


def looks_like_crontab(text: str) -> bool:
    """Say whether a text has the form of a cron expression, whatever its values."""
    words = text.split()
    return len(words) in (len(FIELDS), 1 + len(FIELDS)) and all(map(_FIELD_ALIKE.fullmatch, words))


def expression_of(crontab: Any) -> str:
    """Return the cron expression of Celery's crontab, as it was written where that is text.

    Raises:
        InvalidTimerError: If a field holds what no expression can say.
    """
    texts = []
    for kind in FIELDS:
        written, numbers = getattr(crontab, f"_orig_{kind.name}"), getattr(crontab, kind.name)
        if isinstance(written, str):
            texts.append("".join(written.split()))
        elif numbers and all(type(number) is int for number in numbers):
            texts.append(",".join(map(str, sorted(numbers))))
        else:
            raise invalid(kind.name, written, kind.accepted)
    return " ".join(texts)


# --- the rule -------------------------------------------------------------------------------

_EVERY_DAY = frozenset(range(1, 32))
_LENGTHS = (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)


@lru_cache(maxsize=16_384)
def _matching_days(days: int, weekdays: int, length: int, first: int) -> tuple[int, ...]:
    """Return the days of a month that match.

    Args:
        days: The days of the month, as a set of bits.
        weekdays: The days of the week, likewise.
        length: How many days the month has.
        first: The weekday of its first day.
    """
    if days >> _LAST_DAY & 1:
        days |= 1 << length
    return tuple(
        day
        for day in range(1, length + 1)
        if days >> day & 1 and weekdays >> (first + day - 1) % 7 & 1
    )


@lru_cache(maxsize=2048)
def _days_of_year(
    days: int, weekdays: int, months: tuple[int, ...], is_leap: bool, first: int
) -> tuple[int, ...]:
    """Return the days of a year that match, New Year being 0.

    Args:
        days: The days of the month, as a set of bits.
        weekdays: The days of the week, likewise.
        months: The months.
        is_leap: Whether the year has 29 February.
        first: The weekday of New Year.
    """
    found: list[int] = []
    before = 0
    for month in range(1, 13):
        length = 29 if month == 2 and is_leap else _LENGTHS[month - 1]
        if month in months:
            matching = _matching_days(days, weekdays, length, (first + before) % 7)
            found += [before + day - 1 for day in matching]
        before += length
    return tuple(found)


def _bits(numbers: Sequence[int]) -> int:
    return sum(1 << number for number in numbers)


@dataclass(frozen=True, slots=True)
class Crontab(ClockRule):
    """At the times of a cron expression, by the clocks of a time zone.

    The expression has cron's five fields, or seconds and these five, each in Celery's language;
    in day_of_month ``L`` is the last day. A day must match both day_of_month and day_of_week, as
    in Celery (in cron one is enough). Where clocks change:

    - An hour field without ``*`` lists fixed times of the day, for which ``dst`` says what
      happens. With "cron" each comes once a day: one that clocks leave out runs when the gap ends
      (several are then one run), one that they show twice runs the first time. With "skip" what
      is left out does not run; with "shift" it runs later by the length of the gap; with "both"
      what is shown twice runs twice.
    - An hour field with ``*`` follows elapsed time: the rule runs whenever clocks really show a
      matching time. So ``*/15 * * * *`` runs every quarter of an hour across the gap and through
      the repeated hour, and ``0 */2 * * *`` in each real hour with an even number: not in one
      that is left out, and in both that are shown twice, as with Debian's cron.
    """

    expression: str
    timezone: str = "UTC"
    dst: str = zones.DEFAULT_POLICY
    _elapsed: bool = field(init=False, repr=False, compare=False)
    _seconds: tuple[int, ...] = field(init=False, repr=False, compare=False)
    _minutes: tuple[int, ...] = field(init=False, repr=False, compare=False)
    _hours: tuple[int, ...] = field(init=False, repr=False, compare=False)
    _months: tuple[int, ...] = field(init=False, repr=False, compare=False)
    _days: int = field(init=False, repr=False, compare=False)
    _weekdays: int = field(init=False, repr=False, compare=False)
    _every_day: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        expression, numbers = _read(self.expression)
        seconds, minutes, hours, days, months, weekdays = numbers
        every_day = _EVERY_DAY.issubset(days) and len(months) == 12 and len(weekdays) == 7
        values = (
            *(expression, zones.zone_name(self.timezone), zones.check_policy(self.dst)),
            *("*" in expression.split()[-4], seconds, minutes, hours, months),
            *(_bits(days), _bits(weekdays), every_day),
        )
        for name, value in zip(self.__slots__, values, strict=True):
            object.__setattr__(self, name, value)

    @property
    def follows_elapsed_time(self) -> bool:
        """Whether the hour field has a ``*``."""
        return self._elapsed

    def next_wall(self, wall: int) -> int | None:
        """Return the first matching time that a clock shows, from a time on."""
        day, second = divmod(wall, zones.DAY)
        found = self._next_day(day)
        if found == day:
            time = self._next_time(second)
            if time is not None:
                return day * zones.DAY + time
            found = self._next_day(day + 1)
        if found is None:
            return None
        first = self._hours[0] * 3600 + self._minutes[0] * 60 + self._seconds[0]
        return found * zones.DAY + first

    def _next_time(self, time: int) -> int | None:
        """Return the first matching second of a day, from one on."""
        hours, minutes, seconds = self._hours, self._minutes, self._seconds
        hour, rest = divmod(time, 3600)
        minute, second = divmod(rest, 60)
        if second > seconds[-1]:
            minute, second = minute + 1, 0
        index = bisect_left(hours, hour)
        if index < len(hours) and hours[index] == hour:
            if minute <= minutes[-1]:
                found = minutes[bisect_left(minutes, minute)]
                from_second = second if found == minute else 0
                at = seconds[bisect_left(seconds, from_second)]
                return hour * 3600 + found * 60 + at
            index += 1
        if index == len(hours):
            return None
        return hours[index] * 3600 + minutes[0] * 60 + seconds[0]

    def _next_day(self, day: int) -> int | None:
        """Return the first matching day, from a day on, in days since 1970."""
        if self._every_day:
            return day
        date = dt.date.fromordinal(day + _EPOCH_ORDINAL)
        months, year, from_day = self._months, date.year, date.day
        index = bisect_left(months, date.month)
        if index == len(months) or months[index] != date.month:
            from_day = 1
        last_year = min(year + _MAX_YEARS, dt.MAXYEAR)
        while True:
            if index == len(months):
                year, index = year + 1, 0
                if year > last_year:
                    return None
            month = months[index]
            length = 29 if month == 2 and calendar.isleap(year) else _LENGTHS[month - 1]
            # Ordinal 1 was a Monday, so the remainder numbers weekdays as cron does.
            first = dt.date(year, month, 1).toordinal()
            days = _matching_days(self._days, self._weekdays, length, first % 7)
            for found in days:
                if found >= from_day:
                    return first + found - 1 - _EPOCH_ORDINAL
            index, from_day = index + 1, 1

    @property
    def is_countable(self) -> bool:
        """Always."""
        return True

    def count_walls(self, low: int, high: int) -> int:
        """Return how many matching times clocks show in ``[low, high)``."""
        first, from_second = divmod(low, zones.DAY)
        last, to_second = divmod(high, zones.DAY)
        whole = self._count_days(first, last) * self._times_before(zones.DAY)
        return whole - self._count_on(first, from_second) + self._count_on(last, to_second)

    def _count_on(self, day: int, second: int) -> int:
        """Return how many times match on a day before a second of it."""
        return self._times_before(second) if second and self._count_days(day, day + 1) else 0

    def _times_before(self, time: int) -> int:
        """Return how many times of a matching day are before a second of it."""
        hours, minutes, seconds = self._hours, self._minutes, self._seconds
        hour, rest = divmod(time, 3600)
        minute, second = divmod(rest, 60)
        index = bisect_left(hours, hour)
        found = index * len(minutes) * len(seconds)
        if rest and index < len(hours) and hours[index] == hour:
            index = bisect_left(minutes, minute)
            found += index * len(seconds)
            if index < len(minutes) and minutes[index] == minute:
                found += bisect_left(seconds, second)
        return found

    def _count_days(self, low: int, high: int) -> int:
        """Return how many days match in ``[low, high)``, in days since 1970."""
        if self._every_day:
            return high - low
        from_year = dt.date.fromordinal(low + _EPOCH_ORDINAL).year
        to_year = dt.date.fromordinal(high + _EPOCH_ORDINAL).year
        count = 0
        for year in range(from_year, to_year + 1):
            new_year = dt.date(year, 1, 1).toordinal()
            days = _days_of_year(
                *(self._days, self._weekdays, self._months, calendar.isleap(year), new_year % 7)
            )
            new_year -= _EPOCH_ORDINAL
            count += len(days) if year < to_year else bisect_left(days, high - new_year)
            if year == from_year:
                count -= bisect_left(days, low - new_year)
        return count

    def describe(self) -> str:
        """Return for example "0 3 * * * (Europe/Paris)"."""
        return f"{self.expression} ({self._where()})"

    def encode(self) -> dict[str, Any]:
        """Return ``{"cron": expression}``, with "tz" and "dst" where they are not the default."""
        return {"cron": self.expression} | self._encode_clock()
