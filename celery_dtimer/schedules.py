"""Every kind of schedule, as a frozen rule that answers when it runs.

A rule is a value: it holds no state, compares by what it says, and can be stored as JSON
(`Schedule.encode`, `decode`). Moments are ``int`` milliseconds since the epoch. `parse` makes a
rule from what users write.

The rules that go by a clock have modules of their own, `crontabs` and `recurrences`; `zones` turns
what clocks show into moments for both. `customs` has those that live in users' code.
"""

from __future__ import annotations

import datetime as dt
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from celery import schedules

from celery_dtimer import recurrences, zones
from celery_dtimer.crontabs import Crontab, expression_of, looks_like_crontab
from celery_dtimer.customs import Custom, custom_of
from celery_dtimer.errors import InvalidTimerError, invalid, missing_extra
from celery_dtimer.recurrences import Recurrence
from celery_dtimer.rules import ClockRule, Schedule
from celery_dtimer.zones import UTC, zone_name

__all__ = [
    "Crontab",
    "Custom",
    "Interval",
    "OneShot",
    "Recurrence",
    "Schedule",
    "Solar",
    "decode",
    "has_clock",
    "is_text",
    "moment_ms",
    "names_zone",
    "parse",
    "zone",
    "zone_name",
]

_SECOND, _MINUTE, _HOUR, _DAY = 1000, 60_000, 3_600_000, 86_400_000  # in milliseconds
_MILLISECOND = dt.timedelta(milliseconds=1)
_FIRST_MS, _LAST_MS = zones.FIRST * _SECOND, zones.LAST * _SECOND

_MIN_EVERY = 100  # a beat keeps no shorter rhythm than 0.1 s
_MAX_EVERY = 1000 * 365 * _DAY  # so that each due time is a moment that can be shown
_MAX_SEARCH_DAYS = 366  # an event of the sun that has not come in a year never does

_SOLAR_EVENTS = (
    *("dawn_astronomical", "dawn_nautical", "dawn_civil", "sunrise", "solar_noon"),
    *("sunset", "dusk_civil", "dusk_nautical", "dusk_astronomical"),
)
_LENGTH = "at least 0.1 s and at most 1000 years"
_ONCE = "a moment from 1970 to 9998"  # a timer's state has no moment before 1970
_SCHEDULE = (
    "seconds, a timedelta, a datetime, a cron expression, an iCalendar rule or dateutil's rrule, "
    "or Celery's own schedule, crontab or solar"
)
_SUBCLASS = (
    "Celery's own schedule, crontab or solar: a subclass lives in code, so that only the static "
    "schedule, which is code too, can have it"
)
_NOWFUN = (
    "a function that returns a datetime of a named zone, for only the zone can be stored; "
    "name it with timezone= instead"
)


@dataclass(frozen=True, slots=True)
class OneShot(Schedule):
    """Once, at a moment; a timer that is created after it runs at once."""

    at_ms: int

    def __post_init__(self) -> None:
        if not _is_int(self.at_ms) or not 0 <= self.at_ms < _LAST_MS:
            raise invalid("at", self.at_ms, f"milliseconds since 1970, of {_ONCE}")

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

    def last_runs_begin(
        self, after_ms: int, until_ms: int, anchor_ms: int, count: int
    ) -> int | None:
        """Return the slot with which the last ones begin; arithmetic unless by a clock."""
        unit = self._unit
        if unit >= _HOUR:
            return Schedule.last_runs_begin(self, after_ms, until_ms, anchor_ms, count)
        step = self.every_ms // unit * unit
        slot = _last_slot(until_ms, anchor_ms // unit * unit, step) - (count - 1) * step
        return slot if count > 0 and slot > after_ms else None

    def _local_ms(self, moment_ms: int) -> int:
        return moment_ms + zones.offset_at(self.timezone, moment_ms // _SECOND) * _SECOND

    def _midnight_after(self, moment_ms: int, local_ms: int, step: int) -> int | None:
        """Return the first midnight after a moment, of a local time's day or steps after it."""
        while True:
            midnight = zones.moment_of(self.timezone, local_ms // _DAY * zones.DAY)
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
                return _to_ms(found.datetime().replace(tzinfo=UTC))
            start = observer.cal.next_antitransit(sun, start=start)
        return None

    def _observer(self) -> tuple[Any, Any]:
        """Return ``ephem`` and an observer, made anew: a search changes it, a thread owns it."""
        try:
            import ephem
        except ImportError:
            needed = missing_extra(f"the schedule {self.describe()!r}", "solar")
            raise InvalidTimerError(needed) from None
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
    return zones.EPOCH + moment_ms * _MILLISECOND


def _to_ms(moment: dt.datetime) -> int:
    """Return a moment's milliseconds, rounded up so that nothing runs early."""
    return -((zones.EPOCH - moment) // _MILLISECOND)


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
    dst = known.get("dst", zones.DEFAULT_POLICY)
    match known:
        case {"every": every, **rest} if rest.keys() <= {"relative", "tz"}:
            return Interval(every, relative, tz)
        case {"cron": expression, **rest} if rest.keys() <= {"tz", "dst"}:
            return Crontab(expression, tz, dst)
        case {"rrule": text, **rest} if rest.keys() <= {"tz", "dst"}:
            return Recurrence(text, tz, dst)
        case {"solar": [event, lat, lon], **rest} if not rest:
            return Solar(event, lat, lon)
        case {"at": at_ms, **rest} if not rest:
            return OneShot(at_ms)
        case {"custom": name, **rest} if rest.keys() <= {"repr"}:
            return Custom(name, rest.get("repr", ""))
    raise invalid(
        "schedule", data, "a stored schedule with one of: every, cron, rrule, solar, at, custom"
    )


def parse(
    value: Any,
    *,
    timezone: dt.tzinfo | str | None,
    default_timezone: dt.tzinfo | str,
    relative: bool = False,
    dst: str | None = None,
    start_ms: int | None = None,
    bound: bool = False,
) -> Schedule:
    """Return the rule for a schedule as users write it.

    Args:
        value: Seconds, ``timedelta``, ``datetime``, a cron expression, an iCalendar rule or
            dateutil's ``rrule``, Celery's ``schedule``, ``crontab`` or ``solar``, or a rule.
        timezone: The timer's own zone, if it has one.
        default_timezone: The zone of a timer without one, which is the Celery app's.
        relative: Whether an interval is rounded to its unit.
        dst: What a rule of fixed times does where clocks change; ``None`` for the default.
        start_ms: The moment at which an iCalendar rule without DTSTART begins.
        bound: Whether the rule may be one that lives in this process's code.

    Raises:
        InvalidTimerError: If the value is anything else, cannot be stored, or is not of a kind
            that ``relative`` or ``dst`` is for.
    """
    explicit = None if timezone is None else zone_name(timezone)
    if dst is not None:
        zones.check_policy(dst)
    if isinstance(value, Schedule):
        rule = _in_zone(value, explicit)
    else:
        rule = _rule(
            *(value, explicit, default_timezone), relative=relative, start_ms=start_ms, bound=bound
        )
    return _with_options(rule, explicit or default_timezone, relative=relative, dst=dst)


def is_text(text: str) -> bool:
    """Say whether a text is meant as a schedule, right or wrong, and not as a name."""
    if "FREQ=" in text.upper() or text.strip().startswith("@") or "*" in text.split():
        return True
    if looks_like_crontab(text):
        return True
    try:
        Crontab(text)
    except InvalidTimerError:
        return False
    return True


def has_clock(rule: Schedule) -> bool:
    """Say whether it matters to a rule in which time zone it goes."""
    return isinstance(rule, ClockRule) or (isinstance(rule, Interval) and rule.relative)


def names_zone(value: Any) -> bool:
    """Say whether a schedule, as users write it, says itself in which zone it is.

    Raises:
        InvalidTimerError: If that cannot be told, since it is none.
    """
    if isinstance(value, Schedule):
        return hasattr(value, "timezone")
    kind: Any = type(value)
    if kind in (schedules.schedule, schedules.crontab):
        return _own_zone(value) is not None
    if recurrences.is_dateutil(value) or (isinstance(value, str) and recurrences.is_text(value)):
        return recurrences.names_zone(value)
    return isinstance(value, dt.datetime) and value.utcoffset() is not None


def zone(zone: dt.tzinfo | str) -> dt.tzinfo:
    """Return the time zone of a name, or of another tzinfo that means it.

    Raises:
        InvalidTimerError: If no zone is known by the name, or the tzinfo has none.
    """
    return zones.zone_of(zone_name(zone))


def _rule(
    value: Any,
    zone: str | None,
    default: dt.tzinfo | str,
    *,
    relative: bool,
    start_ms: int | None,
    bound: bool,
) -> Schedule:
    kind: Any = type(value)  # a subclass may mean something else
    if kind in (schedules.schedule, schedules.crontab) and zone is None:
        zone = _own_zone(value)

    def zone_in_force() -> str:
        return zone or zone_name(default)

    if kind is schedules.solar:
        return Solar(value.event, value.lat, value.lon)
    if kind is schedules.schedule:
        value, relative = value.run_every, relative or bool(value.relative)
    if kind is schedules.crontab:
        return _crontab(expression_of(value), zone_in_force())
    if isinstance(value, schedules.BaseSchedule):
        if not bound:
            raise invalid("schedule", value, _SUBCLASS)
        if zone is not None:
            raise invalid("timezone", zone, "none: a subclass's own code says in which it goes")
        return custom_of(value)
    if recurrences.is_dateutil(value) or (isinstance(value, str) and recurrences.is_text(value)):
        return recurrences.recurrence_of(value, zone, lambda: zone_name(default), start_ms)
    if isinstance(value, str):
        return _crontab(value, zone_in_force())
    if isinstance(value, dt.datetime):
        at_ms = moment_ms("schedule", value, zone or default)
        if at_ms < 0:
            raise invalid("schedule", value, _ONCE)
        return OneShot(at_ms)
    return _interval(value, zone_in_force() if relative else None)


def _with_options(
    rule: Schedule, zone: dt.tzinfo | str, *, relative: bool, dst: str | None
) -> Schedule:
    """Return a rule with what was asked for beside it."""
    if not isinstance(relative, bool) or (relative and not isinstance(rule, Interval)):
        raise invalid("relative", relative, "True only with an interval")
    if relative and isinstance(rule, Interval) and not rule.relative:
        rule = replace(rule, relative=True, timezone=zone_name(zone))
    if dst is None:
        return rule
    if not isinstance(rule, ClockRule):
        raise invalid("dst", dst, "it only with a crontab or an rrule")
    return _with_dst(rule, dst)


def _in_zone(rule: Schedule, zone: str | None) -> Schedule:
    """Return a rule by the clocks of a zone."""
    if zone is None:
        return rule
    if isinstance(rule, Crontab | Recurrence | Interval):
        return replace(rule, timezone=zone)
    raise invalid("timezone", zone, f"none, for the clocks of no zone change {rule.describe()!r}")


# Many timers have the same rule: it is made once.
_crontab = lru_cache(maxsize=1024)(Crontab)
_every = lru_cache(maxsize=1024)(Interval)


@lru_cache(maxsize=1024)
def _with_dst(rule: Any, dst: str) -> Schedule:
    changed: Schedule = replace(rule, dst=dst)
    return changed


def _interval(value: Any, relative_zone: str | None) -> Schedule:
    """Return the interval of a number of seconds or a ``timedelta``, rounded in a zone if any."""
    if not isinstance(value, dt.timedelta) and not _is_number(value):
        raise invalid("schedule", value, _SCHEDULE)
    every_ms = _every_ms(value)
    if relative_zone is None:
        return _every(every_ms)
    return _every(every_ms, True, relative_zone)


def _every_ms(value: Any) -> int:
    seconds = value.total_seconds() if isinstance(value, dt.timedelta) else value
    if not _MIN_EVERY / _SECOND <= seconds <= _MAX_EVERY / _SECOND:
        raise invalid("schedule", value, _LENGTH)
    return round(seconds * _SECOND)


def moment_ms(field: str, value: object, zone: dt.tzinfo | str) -> int:
    """Return the milliseconds of a datetime, rounded up so that nothing runs early.

    Args:
        field: What the value is for; the error names it.
        value: An aware datetime, or a naive one, which is what the clocks of the zone show. A time
            that they leave out is the end of the gap, one that they show twice the first.
        zone: The zone of a naive one; it may be one that cannot be named if there is no need.

    Raises:
        InvalidTimerError: If the value is no datetime, or one that not every zone can show.
    """
    if not isinstance(value, dt.datetime):
        raise invalid(field, value, "a datetime")
    try:
        is_naive = value.utcoffset() is None
    except NotImplementedError:
        raise invalid(field, value, "a datetime whose tzinfo tells its offset") from None
    if is_naive:
        value = value.replace(tzinfo=zones.zone_of(zone_name(zone)))
    try:
        moment = value.astimezone(UTC)
        shown = moment.astimezone(value.tzinfo)
    except OverflowError:
        raise invalid(field, value, "a moment within the years 2 to 9998") from None
    at_ms = _to_ms(moment)
    # A tzinfo of pytz has one offset, which arithmetic leaves as it was: then it is what counts.
    has_clocks = not hasattr(value.tzinfo, "localize")
    if has_clocks and shown.replace(tzinfo=None) != value.replace(tzinfo=None):
        at_ms = _gap_end_ms(value) or at_ms
    if not _FIRST_MS <= at_ms < _LAST_MS:
        raise invalid(field, value, "a moment within the years 2 to 9998")
    return at_ms


def _gap_end_ms(value: dt.datetime) -> int | None:
    """Return when the clocks of a datetime's own zone have passed over it."""
    wall = (value.replace(tzinfo=UTC) - zones.EPOCH) // dt.timedelta(seconds=1)
    with suppress(InvalidTimerError):  # nothing is known of the clocks of a nameless zone
        gap_end = zones.moment_of(zone_name(value.tzinfo), wall)
        return None if gap_end is None else gap_end * _SECOND
    return None


def _own_zone(rule: Any) -> str | None:
    """Return the zone that Celery's crontab or schedule carries itself, in its tz or nowfun."""
    own = set()
    # A plain interval has no use for a zone, and its tz is only what it once looked up.
    if vars(rule).get("tz") is not None and getattr(rule, "relative", True):
        own.add(zone_name(rule.tz))
    if rule.nowfun is not None:
        own.add(_zone_of_nowfun(rule.nowfun))
    if len(own) > 1:
        raise invalid("schedule", rule, "one time zone, but its tz and its nowfun name two")
    return next(iter(own), None)


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
