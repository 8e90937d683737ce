"""Time zones: their names, what their clocks show at a moment, and the moment of what they show.

Local time is computed from the periods between two changes of a zone's clocks (`_periods`), so
that all arithmetic is on whole seconds and the zone data is read once per zone and year.

Two words: a *moment* is seconds since 1970, a *wall* is what a clock shows, in seconds since it
would have shown 1970. `next_moment` turns a rule about walls into moments, `count_moments` says
how many they are; what both do where clocks change is a policy (`POLICIES`). Put forward, clocks
leave walls out (a gap); put back, they show walls a second time (a fold).
"""

from __future__ import annotations

import datetime as dt
import os
import re
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import lru_cache
from typing import Any, NamedTuple, Protocol
from zoneinfo import ZoneInfo

from celery.utils.time import LocalTimezone
from dateutil import tz

from celery_dtimer.errors import InvalidTimerError, invalid

DAY = 86_400
UTC = dt.timezone.utc
EPOCH = dt.datetime(1970, 1, 1, tzinfo=UTC)
_SECOND = dt.timedelta(seconds=1)
#: Moments from here to there can be shown in every zone.
FIRST = (dt.datetime(2, 1, 1, tzinfo=UTC) - EPOCH) // _SECOND
LAST = (dt.datetime(9999, 1, 1, tzinfo=UTC) - EPOCH) // _SECOND

# No offset reaches a day, so clocks never differ by more, nor are changed by more.
_NEAR = 2 * DAY
_FARTHEST = 80 * 366 * DAY  # no further is a rule looked for whose every match clocks leave out
_NAMED = (
    "a zone that can be named: set Celery's timezone, or the environment variable TZ, to an IANA "
    "name such as 'Europe/Paris'"
)
_ZONE = "an IANA name such as 'Europe/Paris', 'UTC', an offset such as '+05:30', or such a tzinfo"

NextWall = Callable[[int], "int | None"]


class Walls(Protocol):
    """A rule about what clocks show."""

    def next_wall(self, wall: int, /) -> int | None:
        """Return the first matching wall that is not before one, ``None`` if there is none."""

    def count_walls(self, low: int, high: int, /) -> int:
        """Return how many walls match in ``[low, high)``."""


# --- names ----------------------------------------------------------------------------------


@lru_cache(maxsize=1024)
def zone_of(name: str) -> dt.tzinfo:
    """Return the zone of a stored name.

    Raises:
        InvalidTimerError: If no zone is known by it.
    """
    if name == "UTC":
        return UTC
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
        name = _name_of(zone)
    if not isinstance(name, str):
        raise invalid("timezone", zone, _ZONE)
    zone_of(name)
    return "UTC" if name in ("+00:00", "-00:00") else name


def _name_of(zone: dt.tzinfo) -> object:
    if isinstance(zone, tz.tzutc):
        return "UTC"
    if isinstance(zone, LocalTimezone):
        return _name_of_local(zone)
    if isinstance(zone, tz.tzfile):  # of dateutil, which knows only where it has read the zone
        return str(getattr(zone, "_filename", "")).rpartition("zoneinfo/")[2]
    return getattr(zone, "key", None) or getattr(zone, "zone", None)  # zoneinfo's, pytz's


def _name_of_local(zone: Any) -> str:
    """Return the name of the machine's zone, of which Celery's object knows only offsets.

    Raises:
        InvalidTimerError: If it has none that is known, and its clocks change.
    """
    place = os.environ.get("TZ")  # goes before what the machine is set to, in the process's clock
    place = (_configured_zone() if place is None else place).lstrip(":")
    if os.path.isabs(place):
        place = os.path.realpath(place).rpartition("zoneinfo/")[2]
    with suppress(InvalidTimerError):  # TZ may hold a rule instead of a name
        zone_of(place)
        return place
    if zone.STDOFFSET != zone.DSTOFFSET:
        raise invalid("timezone", zone, _NAMED)
    return zone_name(dt.timezone(zone.STDOFFSET))


def _configured_zone() -> str:
    """Return the zone that the machine is set to, by name or as the file that describes it."""
    # Not all versions of Celery bring tzlocal; a KeyError is that the machine names two zones.
    with suppress(ImportError, KeyError):
        import tzlocal

        return tzlocal.get_localzone_name() or "/etc/localtime"
    return "/etc/localtime"


# --- periods --------------------------------------------------------------------------------


class Period(NamedTuple):
    """A time in which a zone's offset stays the same; it does not contain its end."""

    start: int
    end: int
    offset: int


_BLOCK = 400 * DAY  # the periods of one zone are found this far at a time
_FIRST_BLOCK = FIRST // _BLOCK + 1  # whole blocks within what can be shown
_LAST_BLOCK = LAST // _BLOCK - 1


@lru_cache(maxsize=16_384)  # every zone for a quarter of a century
def _periods(timezone: str, block: int) -> tuple[Period, ...]:
    """Return the periods of a zone that make up a block of time; its ends cut periods."""
    zone = zone_of(timezone)

    def offset_at(second: int) -> int:
        offset = (EPOCH + dt.timedelta(seconds=second)).astimezone(zone).utcoffset()
        return 0 if offset is None else offset // _SECOND

    def changed_in(day: int) -> int:
        return bisect_left(range(day, day + DAY), True, key=lambda s: offset_at(s) != offset)

    found = []
    start, end = block * _BLOCK, (block + 1) * _BLOCK
    offset = offset_at(start)
    for day in range(start, end, DAY):
        if offset_at(day + DAY) != offset:
            change = day + changed_in(day)
            found.append(Period(start, change, offset))
            start, offset = change, offset_at(change)
    if start < end:
        found.append(Period(start, end, offset))
    return tuple(found)


def _period_at(timezone: str, moment: int) -> Period | None:
    """Return the period that holds a moment, ``None`` where no calendar shows it."""
    block = moment // _BLOCK
    if _FIRST_BLOCK <= block <= _LAST_BLOCK:
        for period in _periods(timezone, block):
            if moment < period.end:
                return period
    return None


def _periods_from(timezone: str, moment: int) -> Iterator[Period]:
    """Yield a zone's periods in order, beginning with the one that holds a moment."""
    for block in range(max(moment // _BLOCK, _FIRST_BLOCK), _LAST_BLOCK + 1):
        for period in _periods(timezone, block):
            if period.end > moment:
                yield period


def offset_at(timezone: str, moment: int) -> int:
    """Return how far clocks are ahead of UTC at a moment."""
    period = next(_periods_from(timezone, moment), None)
    return 0 if period is None else period.offset


def moment_of(timezone: str, wall: int) -> int | None:
    """Return the first moment at which clocks show a time or a later one.

    So a time that comes twice is its first occurrence, one that is left out the end of the gap.
    """
    for period in _periods_from(timezone, wall - _NEAR):
        if wall < period.end + period.offset:
            return max(period.start, wall - period.offset)
    return None


# --- rules by a clock -----------------------------------------------------------------------


class _Policy(NamedTuple):
    """When a time runs that clocks leave out, and whether one that they show twice runs twice."""

    gap: str
    twice: bool


_LATER = "later by its length"
#: What a rule of fixed times may do where clocks change.
POLICIES = {
    "cron": _Policy("when it ends", twice=False),
    "skip": _Policy("never", twice=False),
    "shift": _Policy(_LATER, twice=False),
    "both": _Policy("when it ends", twice=True),
}
DEFAULT_POLICY = "cron"
_SHOWN = _Policy("never", twice=True)


def check_policy(dst: object) -> str:
    """Return the name of a policy.

    Raises:
        InvalidTimerError: If it is none.
    """
    if not isinstance(dst, str) or dst not in POLICIES:
        raise invalid("dst", dst, "one of " + ", ".join(map(repr, POLICIES)))
    return dst


def next_moment(timezone: str, after: int, next_wall: NextWall, dst: str | None) -> int | None:
    """Return the first moment, from one on, at which a rule about what clocks show runs.

    Args:
        timezone: Whose clocks they are.
        after: The answer is this moment or a later one.
        next_wall: Returns the first matching wall that is not before a wall, ``None`` if there
            is none.
        dst: The name of a policy for fixed times; ``None`` follows elapsed time instead: the rule
            runs whenever clocks really show a matching time, so in no gap, and twice in a fold.

    Returns:
        the moment; None when there is none, or no run within 80 years of walls that do match.
    """
    policy = _SHOWN if dst is None else POLICIES[dst]
    after = max(after, _FIRST_BLOCK * _BLOCK)
    limit = after + _FARTHEST
    while after < limit and (period := _period_at(timezone, after)) is not None:
        start, end, offset = period
        if after - start >= _NEAR:
            wall = next_wall(after + offset)
            if wall is not None and wall < end + offset:
                return wall - offset
            if end - after > _NEAR:
                if wall is None:
                    return None
                after = max(wall, end) - _NEAR  # nothing runs before, whatever clocks do
                continue
        found = _near_a_change(timezone, after, next_wall, policy)
        if found is not None:
            return found
        after += _NEAR
    return None


def _near_a_change(timezone: str, after: int, next_wall: NextWall, policy: _Policy) -> int | None:
    """Return the first run from a moment on; ``None`` says only that none is near.

    ``reached`` is what clocks have shown so far: they leave out what lies between it and a later
    begin of a period, and show again what lies between an earlier begin and it.
    """
    reached: int | None = None
    late: int | None = None  # a run that has been put off, maybe beyond others
    for start, end, offset in _periods_from(timezone, after - _NEAR):
        if late is not None and late < start:
            return late
        if start >= after + _NEAR:
            return None
        begin = start + offset
        if reached is None:
            reached = begin
        in_gap = _in_gap(start, after, reached, begin, next_wall, policy)
        shown = max(start, after) + offset
        wall = None
        if end > after:
            wall = next_wall(shown if policy.twice else max(shown, reached))
        at = wall - offset if wall is not None and wall < end + offset else None
        late = min((run for run in (late, in_gap) if run is not None), default=None)
        if at is not None:
            return at if late is None else min(at, late)
        reached = max(reached, end + offset)
    return late


def _in_gap(
    start: int, after: int, reached: int, begin: int, next_wall: NextWall, policy: _Policy
) -> int | None:
    """Return the first run, from a moment on, for the walls between ``reached`` and ``begin``."""
    if policy.gap == "never" or reached >= begin:
        return None
    if policy.gap == "when it ends":
        wall = next_wall(reached) if start >= after else None
        return None if wall is None or wall >= begin else start
    wall = next_wall(reached + max(0, after - start))
    return None if wall is None or wall >= begin else start + wall - reached


def count_moments(timezone: str, low: int, high: int, rule: Walls, dst: str | None) -> int:
    """Return how many moments there are in ``[low, high)`` at which a rule runs.

    Between two changes moments differ from walls by the offset. Where clocks are put back, walls
    count once only if they are beyond all that was shown before; what a gap has left out is one
    run at its end. Only what is put off by the length of a gap may meet what is on time, so it is
    gone through.
    """
    period = _period_at(timezone, low)
    if period is not None and low - period.start >= _NEAR and low <= high <= period.end:
        return rule.count_walls(low + period.offset, high + period.offset)
    policy = _SHOWN if dst is None else POLICIES[dst]
    count, settled = 0, low
    reached: int | None = None
    for start, end, offset in _periods_from(timezone, low - _NEAR):
        if start >= high:
            break
        begin = start + offset
        reached = begin if reached is None else reached
        if policy.gap == _LATER and reached < begin:
            settled = max(settled, start + begin - reached)
        first, last = max(start, low), min(end, high)
        if first < settled and first < last:
            count += _count_steps(timezone, first, min(last, settled), rule, dst)
            first = settled
        shown = first + offset
        from_wall = shown if policy.twice else max(shown, reached)
        if from_wall < last + offset:
            count += rule.count_walls(from_wall, last + offset)
        if policy.gap == "when it ends" and start >= low:
            count += _is_end_apart(reached, begin, rule)
        reached = max(reached, end + offset)
    return count


def _count_steps(timezone: str, low: int, high: int, rule: Walls, dst: str | None) -> int:
    count = 0
    moment = next_moment(timezone, low, rule.next_wall, dst)
    while moment is not None and moment < high:
        count += 1
        moment = next_moment(timezone, moment + 1, rule.next_wall, dst)
    return count


def _is_end_apart(reached: int, begin: int, rule: Walls) -> bool:
    """Say whether something that a gap has left out runs at its end, where nothing else does."""
    if reached >= begin:
        return False
    wall = rule.next_wall(reached)
    return wall is not None and wall < begin and rule.next_wall(begin) != begin
