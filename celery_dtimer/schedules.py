"""Every kind of schedule, as a frozen rule that answers when it runs.

A rule is a value: it holds no state, compares by what it says, and can be stored as JSON
(`Schedule.encode`, `decode`). Moments are ``int`` milliseconds since the epoch. `parse` makes a
rule from what users write.

Local time is computed from the periods between two changes of a zone's clocks (`_periods`), so
that all arithmetic is on whole seconds and the zone data is read once per zone and year.
"""

from __future__ import annotations

import calendar
import datetime as dt
import re
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple
from zoneinfo import ZoneInfo

from celery import schedules

from celery_dtimer.errors import InvalidTimerError, invalid

_SECOND, _MINUTE, _HOUR, _DAY = 1000, 60_000, 3_600_000, 86_400_000  # in milliseconds
_DAY_S, _TWO_DAYS_S = 86_400, 172_800  # in seconds
_MILLISECOND = dt.timedelta(milliseconds=1)
_UTC = dt.timezone.utc
_EPOCH = dt.datetime(1970, 1, 1, tzinfo=_UTC)
_EPOCH_ORDINAL = _EPOCH.toordinal()
# Moments from here to there can be shown in every zone.
_FIRST_MS = (dt.datetime(2, 1, 1, tzinfo=_UTC) - _EPOCH) // _MILLISECOND
_LAST_MS = (dt.datetime(9999, 1, 1, tzinfo=_UTC) - _EPOCH) // _MILLISECOND

_MIN_EVERY = 100  # a beat keeps no shorter rhythm than 0.1 s
_MAX_EVERY = 1000 * 365 * _DAY  # so that each due time is a moment that can be shown
_MAX_COUNT = 100_000  # slots that are counted one by one: half a second's work, 69 days of minutes
_MAX_YEARS = 40  # 29 February falls on a given weekday every 28 years, 40 across a year like 2100
_MAX_SEARCH_DAYS = 366  # an event of the sun that has not come in a year never does
_LEAP_YEAR = 2000  # has the longest February

_SOLAR_EVENTS = (
    *("dawn_astronomical", "dawn_nautical", "dawn_civil", "sunrise", "solar_noon"),
    *("sunset", "dusk_civil", "dusk_nautical", "dusk_astronomical"),
)
_LENGTH = "at least 0.1 s and at most 1000 years"
_ZONE = "an IANA name such as 'Europe/Paris', 'UTC', an offset such as '+05:30', or such a tzinfo"
_CRON = "'minute hour day_of_month month_of_year day_of_week', for example '0 3 * * mon-fri'"
_SCHEDULE = (
    "seconds, a timedelta, a datetime, a cron expression, or Celery's own schedule, crontab or "
    "solar (a subclass's rule cannot be stored)"
)
_NOWFUN = (
    "a function that returns a datetime of a named zone, for only the zone can be stored; "
    "name it with timezone= instead"
)


class Schedule(ABC):
    """When a timer runs."""

    __slots__ = ()

    def first_run(self, now_ms: int) -> int | None:
        """Return when a timer that is created now is first due."""
        return self.next_run_after(now_ms, now_ms)

    @property
    def first_delay_ms(self) -> int | None:
        """How long after its creation a timer is first due, ``None`` unless that is always so."""
        return None

    @abstractmethod
    def next_run_after(self, moment_ms: int, anchor_ms: int) -> int | None:
        """Return the first slot after a moment, ``None`` if there is none.

        Args:
            moment_ms: The answer is later than this.
            anchor_ms: A slot of the timer, from which intervals count.
        """

    def count_between(self, after_ms: int, until_ms: int, anchor_ms: int) -> int:
        """Return how many slots lie in ``(after_ms, until_ms]``, 100,000 if there are more."""
        count = 0
        slot = self.next_run_after(after_ms, anchor_ms)
        while slot is not None and slot <= until_ms and count < _MAX_COUNT:
            count += 1
            slot = self.next_run_after(slot, anchor_ms)
        return count

    @abstractmethod
    def describe(self) -> str:
        """Return the rule in a few words."""

    @abstractmethod
    def encode(self) -> dict[str, Any]:
        """Return the rule as JSON data, without default values, for `decode`."""


# --- time zones -----------------------------------------------------------------------------


class _Period(NamedTuple):
    """A time in which a zone's offset stays the same, in seconds; it does not contain its end."""

    start: int
    end: int
    offset: int


_BLOCK = 400 * _DAY_S  # the periods of one zone are found this far at a time
_FIRST_BLOCK = _FIRST_MS // _SECOND // _BLOCK + 1  # whole blocks within what can be shown
_LAST_BLOCK = _LAST_MS // _SECOND // _BLOCK - 1


@lru_cache(maxsize=1024)
def _zone(name: str) -> dt.tzinfo:
    """Return the zone of a stored name."""
    if name == "UTC":
        return _UTC
    if offset := re.fullmatch(r"([+-])([01]\d|2[0-3]):([0-5]\d)", name, re.ASCII):
        sign, hours, minutes = offset.groups()
        ahead = dt.timedelta(hours=int(hours), minutes=int(minutes))
        return dt.timezone(ahead if sign == "+" else -ahead)
    try:
        return ZoneInfo(name)
    except (KeyError, ValueError, OSError):  # unknown; malformed; a directory of the zone data
        raise invalid("timezone", name, _ZONE) from None


def zone_name(zone: object) -> str:
    """Return the name under which a time zone is stored.

    Raises:
        InvalidTimerError: If it has none, or no zone is known by it.
    """
    name = zone
    if isinstance(zone, dt.timezone):
        minutes, rest = divmod(zone.utcoffset(None), dt.timedelta(minutes=1))
        if rest:
            raise invalid("timezone", zone, "an offset of whole minutes")
        hours, minutes_left = divmod(abs(minutes), 60)
        name = f"{'-' if minutes < 0 else '+'}{hours:02}:{minutes_left:02}"
    elif isinstance(zone, dt.tzinfo):
        name = getattr(zone, "key", None) or getattr(zone, "zone", None)  # zoneinfo's, pytz's
    if not isinstance(name, str):
        raise invalid("timezone", zone, _ZONE)
    _zone(name)
    return "UTC" if name in ("+00:00", "-00:00") else name


@lru_cache(maxsize=1024)
def _periods(timezone: str, block: int) -> tuple[_Period, ...]:
    """Return the periods of a zone that make up a block of time."""
    zone = _zone(timezone)

    def offset_at(second: int) -> int:
        offset = (_EPOCH + dt.timedelta(seconds=second)).astimezone(zone).utcoffset()
        return 0 if offset is None else offset // dt.timedelta(seconds=1)

    def changed_in(day: int) -> int:
        return bisect_left(range(day, day + _DAY_S), True, key=lambda s: offset_at(s) != offset)

    found = []
    start, end = block * _BLOCK, (block + 1) * _BLOCK
    offset = offset_at(start)
    for day in range(start, end, _DAY_S):
        if offset_at(day + _DAY_S) != offset:
            change = day + changed_in(day)
            found.append(_Period(start, change, offset))
            start, offset = change, offset_at(change)
    if start < end:
        found.append(_Period(start, end, offset))
    return tuple(found)


def _periods_from(timezone: str, second: int) -> Iterator[_Period]:
    """Yield a zone's periods in order, beginning with the one that holds a moment."""
    for block in range(max(second // _BLOCK, _FIRST_BLOCK), _LAST_BLOCK + 1):
        for period in _periods(timezone, block):
            if period.end > second:
                yield period


def _offset_at(timezone: str, second: int) -> int:
    """Return how far clocks are ahead of UTC at a moment, in seconds."""
    period = next(_periods_from(timezone, second), None)
    return 0 if period is None else period.offset


def _moment_of(timezone: str, wall: int) -> int | None:
    """Return the first moment at which clocks show a time or a later one.

    So a time that comes twice is its first occurrence, one that is left out the end of the gap.
    """
    for period in _periods_from(timezone, wall - _TWO_DAYS_S):  # no offset reaches a day
        if wall < period.end + period.offset:
            return max(period.start, wall - period.offset)
    return None


# --- the rules ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OneShot(Schedule):
    """Once, at a moment; a timer that is created after it runs at once."""

    at_ms: int

    def __post_init__(self) -> None:
        if not _is_int(self.at_ms) or not _FIRST_MS <= self.at_ms < _LAST_MS:
            raise invalid("at", self.at_ms, "milliseconds since 1970, within the years 2 to 9998")

    def first_run(self, now_ms: int) -> int | None:
        """Return the moment, also when it has passed."""
        return self.at_ms

    def next_run_after(self, moment_ms: int, anchor_ms: int) -> int | None:
        """Return the moment if it is still to come."""
        return self.at_ms if self.at_ms > moment_ms else None

    def describe(self) -> str:
        """Return for example "once at 2027-01-01T00:00:00+00:00"."""
        precision = "milliseconds" if self.at_ms % _SECOND else "seconds"
        return f"once at {_datetime(self.at_ms).isoformat(timespec=precision)}"

    def encode(self) -> dict[str, Any]:
        """Return ``{"at": ms}``."""
        return {"at": self.at_ms}


@dataclass(frozen=True, slots=True)
class Interval(Schedule):
    """Every so many milliseconds, counted from a slot of the timer, so that nothing drifts.

    With ``relative``, slots are rounded down to the interval's own unit, as in Celery: from a day
    on to midnights of the zone, from an hour on to full hours of its clocks (a repeated hour
    counts), below to full minutes or seconds.
    """

    every_ms: int
    relative: bool = False
    timezone: str = "UTC"  # stays UTC unless relative: only then it matters

    def __post_init__(self) -> None:
        if not _is_int(self.every_ms) or not _MIN_EVERY <= self.every_ms <= _MAX_EVERY:
            raise invalid("every", self.every_ms, f"milliseconds of {_LENGTH}")
        if not isinstance(self.relative, bool):
            raise invalid("relative", self.relative, "True or False")
        zone = zone_name(self.timezone)
        object.__setattr__(self, "timezone", zone if self.relative else "UTC")

    @property
    def _unit(self) -> int:
        """What slots are multiples of, in milliseconds."""
        units = (_DAY, _HOUR, _MINUTE, _SECOND) if self.relative else ()
        return next((unit for unit in units if self.every_ms >= unit), 1)

    @property
    def first_delay_ms(self) -> int | None:
        """The interval, unless it is rounded."""
        return None if self.relative else self.every_ms

    def first_run(self, now_ms: int) -> int | None:
        """Return the moment one interval from now, rounded as all slots are."""
        unit = self._unit
        if unit == _DAY:
            return self._midnight_after(now_ms, self._local_ms(now_ms) + self.every_ms, _DAY)
        if unit == _HOUR:
            return _full_hours(self.timezone).next_run_after(now_ms + self.every_ms - unit, 0)
        return (now_ms + self.every_ms) // unit * unit

    def next_run_after(self, moment_ms: int, anchor_ms: int) -> int | None:
        """Return the first slot after a moment; the anchor's cadence goes on."""
        unit = self._unit
        step = self.every_ms // unit * unit
        if unit == _DAY:
            reached = _last_slot(self._local_ms(moment_ms), self._local_ms(anchor_ms), step)
            return self._midnight_after(moment_ms, reached, step)
        if unit == _HOUR:
            slot: int | None = _last_slot(moment_ms, anchor_ms, step)
            while slot is not None and slot <= moment_ms:
                slot = _full_hours(self.timezone).next_run_after(slot + step - unit, 0)
            return slot
        return _last_slot(moment_ms, anchor_ms // unit * unit, step) + step

    def count_between(self, after_ms: int, until_ms: int, anchor_ms: int) -> int:
        """Return how many slots lie in ``(after_ms, until_ms]``; arithmetic unless by a clock."""
        unit = self._unit
        if unit >= _HOUR:
            return Schedule.count_between(self, after_ms, until_ms, anchor_ms)
        anchor, step = anchor_ms // unit * unit, self.every_ms // unit * unit
        return max(0, (until_ms - anchor) // step - (after_ms - anchor) // step)

    def _local_ms(self, moment_ms: int) -> int:
        return moment_ms + _offset_at(self.timezone, moment_ms // _SECOND) * _SECOND

    def _midnight_after(self, moment_ms: int, local_ms: int, step: int) -> int | None:
        """Return the first midnight after a moment, of a local time's day or steps after it."""
        while True:
            midnight = _moment_of(self.timezone, local_ms // _DAY * _DAY_S)
            if midnight is None or midnight * _SECOND > moment_ms:
                return None if midnight is None else midnight * _SECOND
            local_ms += step

    def describe(self) -> str:
        """Return for example "every 10 s"."""
        units = ((_DAY, "d"), (_HOUR, "h"), (_MINUTE, "min"))
        size, unit = next((u for u in units if self.every_ms % u[0] == 0), (_SECOND, "s"))
        words = f"every {self.every_ms / size:.15g} {unit}"
        return f"{words}, rounded ({self.timezone})" if self.relative else words

    def encode(self) -> dict[str, Any]:
        """Return ``{"every": ms}``, with "relative" and "tz" if it is relative."""
        relative = {"relative": True} if self.relative else {}
        return {"every": self.every_ms} | relative | _encode_zone(self.timezone)


class _Field(NamedTuple):
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


_FIELDS = (
    _Field("minute", 0, 60),
    _Field("hour", 0, 24),
    _Field("day_of_month", 1, 31),
    _Field("month_of_year", 1, 12, " or jan-dec"),
    _Field("day_of_week", 0, 7, " (7 is Sunday too) or sun-sat"),
)
# Celery's parser ignores what follows the part that it understands, so the form is checked first.
_PART = re.compile(r"\*(?:/[0-9]+)?|([0-9a-z]+)(?:-([0-9a-z]+)(?:/[0-9]+)?)?", re.IGNORECASE)


@lru_cache(maxsize=4096)
def _expand(kind: _Field, text: str) -> tuple[int, ...]:
    """Return the sorted numbers that a cron field stands for."""
    try:
        values = {value for part in text.split(",") for value in _expand_part(kind, part)}
    except (schedules.ParseException, ValueError):
        raise invalid(kind.name, text, kind.accepted) from None
    return tuple(sorted(values))


def _expand_part(kind: _Field, part: str) -> set[int]:
    form = _PART.fullmatch(part)
    if form is None:
        raise ValueError(part)
    if kind.size == 7 and "7" in form.groups():
        # Cron's other Sunday asks for a week that is one day longer.
        return {day % 7 for day in schedules.crontab_parser(8).parse(part)}
    return schedules.crontab_parser(kind.size, kind.first).parse(part)


@dataclass(frozen=True, slots=True)
class Crontab(Schedule):
    """At the times of a cron expression, by the clocks of a time zone.

    The expression has cron's five fields, each in Celery's language. A day must match both
    day_of_month and day_of_week, as in Celery (in cron one is enough). Where clocks change:

    - An hour field without ``*`` lists fixed times of the day. Each comes once a day: one that
      clocks leave out runs when the gap ends (several are then one run), one that they show
      twice runs the first time.
    - An hour field with ``*`` follows elapsed time: the rule runs whenever clocks really show a
      matching time. So ``*/15 * * * *`` runs every quarter of an hour across the gap and through
      the repeated hour, and ``0 */2 * * *`` in each real hour with an even number: not in one
      that is left out, and in both that are shown twice, as with Debian's cron.
    """

    expression: str
    timezone: str = "UTC"
    _elapsed: bool = field(init=False, repr=False, compare=False)
    _minutes: tuple[int, ...] = field(init=False, repr=False, compare=False)
    _hours: tuple[int, ...] = field(init=False, repr=False, compare=False)
    _days: tuple[int, ...] = field(init=False, repr=False, compare=False)
    _months: tuple[int, ...] = field(init=False, repr=False, compare=False)
    _weekdays: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        texts = self.expression.split() if isinstance(self.expression, str) else []
        if len(texts) != len(_FIELDS):
            raise invalid("schedule", self.expression, _CRON)
        numbers = [_expand(kind, text) for kind, text in zip(_FIELDS, texts, strict=True)]
        days, months = numbers[2], numbers[3]
        if days[0] > max(calendar.monthrange(_LEAP_YEAR, month)[1] for month in months):
            raise InvalidTimerError(
                f"Invalid crontab: day_of_month {texts[2]!r} never occurs in "
                f"month_of_year {texts[3]!r}."
            )
        values = (" ".join(texts), zone_name(self.timezone), "*" in texts[1], *numbers)
        for name, value in zip(self.__slots__, values, strict=True):
            object.__setattr__(self, name, value)

    def next_run_after(self, moment_ms: int, anchor_ms: int) -> int | None:
        """Return the first slot after a moment."""
        if moment_ms >= _LAST_MS:
            return None
        after = max(moment_ms, _FIRST_MS) // _SECOND + 1
        found = self._next_elapsed(after) if self._elapsed else self._next_fixed(after)
        return None if found is None else found * _SECOND

    def _next_elapsed(self, after: int) -> int | None:
        begin, wall = 0, -1
        for start, end, offset in _periods_from(self.timezone, after):
            last_begin, begin = begin, max(start, after) + offset
            if not last_begin <= begin <= wall:  # else the time found before is still the first
                found = self._next_wall(begin)
                if found is None:
                    return None
                wall = found
            if wall < end + offset:
                return wall - offset
        return None

    def _next_fixed(self, after: int) -> int | None:
        # A time has had its run once clocks have shown it or a later one, also before they were
        # put back.
        shown, wall = after - _TWO_DAYS_S, None
        for start, end, offset in _periods_from(self.timezone, after - _TWO_DAYS_S):
            if start < after:
                shown = max(shown, min(end, after) + offset)
            if end <= after:
                continue
            if wall is None:
                wall = self._next_wall(shown)
            if wall is None or wall < end + offset:
                return None if wall is None else max(start, wall - offset)
        return None

    def _next_wall(self, wall: int) -> int | None:
        """Return the first matching time that a clock shows, from a time on."""
        day, minute = divmod(-(-wall // 60), _DAY_S // 60)
        found = self._next_day(day)
        if found == day:
            time = self._next_time(*divmod(minute, 60))
            if time is not None:
                return day * _DAY_S + time * 60
            found = self._next_day(day + 1)
        if found is None:
            return None
        return found * _DAY_S + (self._hours[0] * 60 + self._minutes[0]) * 60

    def _next_time(self, hour: int, minute: int) -> int | None:
        """Return the first matching minute of a day, from an hour and minute on."""
        hours, minutes = self._hours, self._minutes
        index = bisect_left(hours, hour)
        if index < len(hours) and hours[index] == hour:
            if minute <= minutes[-1]:
                return hour * 60 + minutes[bisect_left(minutes, minute)]
            index += 1
        return hours[index] * 60 + minutes[0] if index < len(hours) else None

    def _next_day(self, day: int) -> int | None:
        """Return the first matching day, from a day on, in days since 1970."""
        if len(self._days) == 31 and len(self._months) == 12 and len(self._weekdays) == 7:
            return day
        date = dt.date.fromordinal(day + _EPOCH_ORDINAL)
        year, month, from_day = date.year, date.month, date.day
        while year <= min(date.year + _MAX_YEARS, dt.MAXYEAR):
            found = self._day_of_month(year, month, from_day) if month in self._months else None
            if found is not None:
                return found
            year, month, from_day = year + month // 12, month % 12 + 1, 1
        return None

    def _day_of_month(self, year: int, month: int, from_day: int) -> int | None:
        before = dt.date(year, month, 1).toordinal() - 1
        length = calendar.monthrange(year, month)[1]
        for day in self._days[bisect_left(self._days, from_day) :]:
            # Ordinal 1 was a Monday, so the remainder numbers weekdays as cron does.
            if day <= length and (before + day) % 7 in self._weekdays:
                return before + day - _EPOCH_ORDINAL
        return None

    def describe(self) -> str:
        """Return for example "0 3 * * * (Europe/Paris)"."""
        return f"{self.expression} ({self.timezone})"

    def encode(self) -> dict[str, Any]:
        """Return ``{"cron": expression}``, with "tz" if it is not UTC."""
        return {"cron": self.expression} | _encode_zone(self.timezone)


@lru_cache(maxsize=256)
def _full_hours(timezone: str) -> Crontab:
    return Crontab("0 * * * *", timezone)


@dataclass(frozen=True, slots=True)
class Solar(Schedule):
    """At an event of the sun, such as sunset, as Celery's ``solar`` computes it.

    Beyond the polar circles an event may not happen for months: the next is looked for up to a
    year ahead. At the poles themselves there is none.
    """

    event: str
    lat: float
    lon: float

    def __post_init__(self) -> None:
        if self.event not in _SOLAR_EVENTS:
            raise invalid("event", self.event, "one of " + ", ".join(_SOLAR_EVENTS))
        for name, limit in (("lat", 90), ("lon", 180)):
            value = getattr(self, name)
            if not _is_number(value) or not -limit <= value <= limit:
                raise invalid(name, value, f"degrees from -{limit} to {limit}")
            object.__setattr__(self, name, float(value) + 0.0)  # no -0.0: it equals 0.0

    def next_run_after(self, moment_ms: int, anchor_ms: int) -> int | None:
        """Return the first event after a moment.

        Raises:
            InvalidTimerError: If ``ephem`` is not installed.
        """
        if not _FIRST_MS <= moment_ms < _LAST_MS:
            return None
        found = self._event_after(moment_ms - _MINUTE)
        if found is not None and found <= moment_ms:
            found = self._event_after(moment_ms + _HOUR)
        return found

    def _event_after(self, moment_ms: int) -> int | None:
        """Return the first event after a moment, the same for each moment before it.

        What ``ephem`` answers depends by some 30 ms on where its search begins, so the first
        answer only says at which full hour to begin.
        """
        near = self._search(moment_ms)
        return None if near is None else self._search((near // _HOUR - 1) * _HOUR)

    def _search(self, from_ms: int) -> int | None:
        ephem, observer = self._observer()
        sun, start = ephem.Sun(), ephem.Date(_datetime(from_ms))
        options = {"use_center": True} if observer.use_center else {}
        for _ in range(_MAX_SEARCH_DAYS):
            with suppress(ephem.CircumpolarError):
                found = getattr(observer.cal, observer.method)(sun, start=start, **options)
                return _to_ms(found.datetime().replace(tzinfo=_UTC))
            start = observer.cal.next_antitransit(sun, start=start)
        return None

    def _observer(self) -> tuple[Any, Any]:
        """Return ``ephem`` and an observer, made anew: a search changes it, a thread owns it."""
        try:
            import ephem
        except ImportError:
            raise InvalidTimerError(
                f"The schedule {self.describe()!r} needs ephem; "
                'install it with: pip install "celery-dtimer[solar]"'
            ) from None
        observer: Any = schedules.solar
        return ephem, observer(self.event, self.lat, self.lon)

    def describe(self) -> str:
        """Return for example "sunset at 48.8, 2.3"."""
        return f"{self.event} at {self.lat:.15g}, {self.lon:.15g}"

    def encode(self) -> dict[str, Any]:
        """Return ``{"solar": [event, lat, lon]}``."""
        return {"solar": [self.event, self.lat, self.lon]}


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _datetime(moment_ms: int) -> dt.datetime:
    return _EPOCH + moment_ms * _MILLISECOND


def _to_ms(moment: dt.datetime) -> int:
    """Return a moment's milliseconds, rounded up so that nothing runs early."""
    return -((_EPOCH - moment) // _MILLISECOND)


def _last_slot(moment_ms: int, anchor_ms: int, step: int) -> int:
    """Return the latest of ``anchor_ms + k * step`` that is not after a moment."""
    return moment_ms - (moment_ms - anchor_ms) % step


# --- reading rules --------------------------------------------------------------------------


def _encode_zone(timezone: str) -> dict[str, Any]:
    return {} if timezone == "UTC" else {"tz": timezone}


def decode(data: Any) -> Schedule:
    """Return the rule that `Schedule.encode` has written; equal ones are mostly one object.

    Raises:
        InvalidTimerError: If the data is anything else.
    """
    try:
        return _decoded(**data)
    except TypeError:  # no object; or with a list in it, which no cache takes
        return _decode(data)


@lru_cache(maxsize=4096, typed=True)  # 1.0 is no interval, though it equals 1
def _decoded(**data: Any) -> Schedule:
    return _decode(data)


def _decode(data: Any) -> Schedule:
    known = data if isinstance(data, dict) else {}
    relative, tz = known.get("relative", False), known.get("tz", "UTC")
    match known:
        case {"every": every, **rest} if rest.keys() <= {"relative", "tz"}:
            return Interval(every, relative, tz)
        case {"cron": expression, **rest} if rest.keys() <= {"tz"}:
            return Crontab(expression, tz)
        case {"solar": [event, lat, lon], **rest} if not rest:
            return Solar(event, lat, lon)
        case {"at": at_ms, **rest} if not rest:
            return OneShot(at_ms)
    raise invalid("schedule", data, "a stored schedule with one of: every, cron, solar, at")


def parse(
    value: Any,
    *,
    timezone: dt.tzinfo | str | None,
    default_timezone: dt.tzinfo | str,
    relative: bool = False,
) -> Schedule:
    """Return the rule for a schedule as users write it.

    Args:
        value: Seconds, ``timedelta``, ``datetime``, a cron expression, Celery's ``schedule``,
            ``crontab`` or ``solar``, or a rule, which is returned as it is.
        timezone: The timer's own zone, if it has one.
        default_timezone: The zone of a timer without one, which is the Celery app's.
        relative: Whether an interval is rounded to its unit.

    Raises:
        InvalidTimerError: If the value is anything else, or cannot be stored.
    """
    explicit = None if timezone is None else zone_name(timezone)
    if isinstance(value, Schedule):
        return value
    kind: Any = type(value)  # a subclass may mean something else
    if kind is schedules.solar:
        return Solar(value.event, value.lat, value.lon)
    if kind in (schedules.schedule, schedules.crontab) and explicit is None:
        explicit = _own_zone(value)

    def zone() -> str:
        return explicit or zone_name(default_timezone)

    if kind is schedules.schedule:
        value, relative = value.run_every, relative or bool(value.relative)
    if kind is schedules.crontab:
        return _crontab(_expression(value), zone())
    if isinstance(value, str):
        return _crontab(value, zone())
    if isinstance(value, dt.datetime):
        return OneShot(_instant_ms(value, zone))
    if isinstance(value, dt.timedelta) or _is_number(value):
        return _interval(_every_ms(value), relative, zone() if relative else "UTC")
    raise invalid("schedule", value, _SCHEDULE)


# Many timers have the same rule: it is made once.
_crontab = lru_cache(maxsize=1024)(Crontab)
_interval = lru_cache(maxsize=1024)(Interval)


def _every_ms(value: Any) -> int:
    seconds = value.total_seconds() if isinstance(value, dt.timedelta) else value
    if not _MIN_EVERY / _SECOND <= seconds <= _MAX_EVERY / _SECOND:
        raise invalid("schedule", value, _LENGTH)
    return round(seconds * _SECOND)


def _instant_ms(value: dt.datetime, zone: Callable[[], str]) -> int:
    """Return a datetime's moment; a time that clocks leave out is the end of the gap."""
    if value.utcoffset() is None:
        value = value.replace(tzinfo=_zone(zone()))
    try:
        moment = value.astimezone(_UTC)
        shown = moment.astimezone(value.tzinfo)
    except OverflowError:
        raise invalid("schedule", value, "a moment within the years 2 to 9998") from None
    if isinstance(value.tzinfo, ZoneInfo) and shown.replace(tzinfo=None) != value.replace(
        tzinfo=None
    ):
        wall = (value.replace(tzinfo=_UTC) - _EPOCH) // dt.timedelta(seconds=1)
        gap_end = _moment_of(zone_name(value.tzinfo), wall)
        if gap_end is not None:
            return gap_end * _SECOND
    return _to_ms(moment)


def _expression(crontab: Any) -> str:
    """Return the cron expression of Celery's crontab, as it was written where that is text."""
    texts = []
    for kind in _FIELDS:
        written, numbers = getattr(crontab, f"_orig_{kind.name}"), getattr(crontab, kind.name)
        if isinstance(written, str):
            texts.append("".join(written.split()))
        elif numbers and all(_is_int(number) for number in numbers):
            texts.append(",".join(map(str, sorted(numbers))))
        else:
            raise invalid(kind.name, written, kind.accepted)
    return " ".join(texts)


def _own_zone(rule: Any) -> str | None:
    """Return the zone that Celery's crontab or schedule carries itself, in its tz or nowfun."""
    zones = set()
    # A plain interval has no use for a zone, and its tz is only what it once looked up.
    if vars(rule).get("tz") is not None and getattr(rule, "relative", True):
        zones.add(zone_name(rule.tz))
    if rule.nowfun is not None:
        zones.add(_zone_of_nowfun(rule.nowfun))
    if len(zones) > 1:
        raise invalid("schedule", rule, "one time zone, but its tz and its nowfun name two")
    return next(iter(zones), None)


def _zone_of_nowfun(nowfun: Any) -> str:
    """Return the zone in which a nowfun tells the time: all that can be stored of it."""
    try:
        zone = nowfun().tzinfo
    except Exception as exc:
        raise invalid("nowfun", nowfun, _NOWFUN) from exc
    # An offset alone may be what a zone's clocks show today, and other than tomorrow's.
    if zone is None or (isinstance(zone, dt.timezone) and zone.utcoffset(None)):
        raise invalid("nowfun", nowfun, _NOWFUN)
    return zone_name(zone)
