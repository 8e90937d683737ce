"""When a recurrence rule comes true, by what a clock shows.

The days that a rule's parts let through are found once per year (`_days_of_year`); its interval
is arithmetic on the distance from the start. So a rule that began long ago answers at once, and
one that never comes true is known by looking through 40 years.
"""

from __future__ import annotations

import calendar
import datetime as dt
import itertools
import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from celery_dtimer import zones
from celery_dtimer.icalendar import (
    DAILY,
    HOURLY,
    MINUTELY,
    MONTHLY,
    SECONDLY,
    WEEKLY,
    YEARLY,
    Parts,
)

MAX_YEARS = 40  # what has not come in so many years never does
_CHUNK = 16  # runs of a rule with COUNT that are found, and kept, at first; then twice as many
_STEPS = {WEEKLY: 7 * zones.DAY, DAILY: zones.DAY, HOURLY: 3600, MINUTELY: 60, SECONDLY: 1}
_EPOCH_ORDINAL = zones.EPOCH.toordinal()


# --- days -----------------------------------------------------------------------------------


class _Days(NamedTuple):
    """The parts of a rule that choose days."""

    months: tuple[int, ...] = ()
    month_days: tuple[int, ...] = ()
    year_days: tuple[int, ...] = ()
    weeks: tuple[int, ...] = ()
    weekdays: tuple[tuple[int, int], ...] = ()
    easter: tuple[int, ...] = ()
    wkst: int = 0
    in_year: bool = False  # numbers of weekdays count in the year, not in the month


@lru_cache(maxsize=4096)
def _days_of_year(days: _Days, year: int) -> tuple[int, ...]:
    """Return the matching days of a year, in days since 1970."""
    found = []
    tests = _tests(days, year)
    for month in days.months or range(1, 13):
        first = dt.date(year, month, 1).toordinal()
        length = calendar.monthrange(year, month)[1]
        found += [
            first + day - 1 - _EPOCH_ORDINAL
            for day in range(1, length + 1)
            if all(test(first + day - 1, day, length) for test in tests)
        ]
    return tuple(found)


_Test = Callable[[int, int, int], bool]


def _tests(days: _Days, year: int) -> list[_Test]:
    """Return what a day of a year must pass, given its ordinal, its number and its month's length.

    A negative number counts from the end, -1 being the last.
    """
    new_year = dt.date(year, 1, 1).toordinal()
    size = 366 if calendar.isleap(year) else 365
    month_days, year_days, weeks = set(days.month_days), set(days.year_days), set(days.weeks)
    weekdays, easter = set(days.weekdays), set(days.easter)
    plain = {day for day, number in weekdays if not number}

    def in_month(ordinal: int, day: int, length: int) -> bool:
        return day in month_days or day - length - 1 in month_days

    def in_year(ordinal: int, day: int, length: int) -> bool:
        number = ordinal - new_year + 1
        return number in year_days or number - size - 1 in year_days

    def in_week(ordinal: int, day: int, length: int) -> bool:
        number, last = _week_of(ordinal, days.wkst)
        return number in weeks or number - last - 1 in weeks

    def is_weekday(ordinal: int, day: int, length: int) -> bool:
        return (ordinal - 1) % 7 in plain

    def is_numbered(ordinal: int, day: int, length: int) -> bool:
        at, of = (ordinal - new_year, size) if days.in_year else (day - 1, length)
        weekday = (ordinal - 1) % 7
        return (weekday, at // 7 + 1) in weekdays or (weekday, (at - of) // 7) in weekdays

    def near_easter(ordinal: int, day: int, length: int) -> bool:
        return ordinal - _easter(year) in easter

    return [
        test
        for test, wanted in (
            (in_month, month_days),
            (in_year, year_days),
            (in_week, weeks),
            (is_weekday, plain),
            (is_numbered, weekdays if not plain else ()),
            (near_easter, easter),
        )
        if wanted
    ]


def _week_of(ordinal: int, wkst: int) -> tuple[int, int]:
    """Return the number of a day's week, and that of the last week of the year it counts in.

    The first week of a year is the first with at least four days in it.
    """
    middle = ordinal - (ordinal - 1 - wkst) % 7 + 3  # a week belongs to the year of its fourth day
    year = dt.date.fromordinal(middle).year
    first, after = dt.date(year, 1, 1).toordinal(), dt.date(year, 12, 31).toordinal() + 1
    begin = first + (wkst + 3 - (first - 1)) % 7  # the fourth day of the first week
    end = after + (wkst + 3 - (after - 1)) % 7
    return (middle - begin) // 7 + 1, (end - begin) // 7


def _easter(year: int) -> int:
    """Return the ordinal of Easter Sunday, by the method of Meeus, Jones and Butcher."""
    century, in_century = divmod(year, 100)
    golden = year % 19
    leaps, rest = divmod(century, 4)
    shift = (century - (century + 8) // 25 + 1) // 3
    moon = (19 * golden + century - leaps - shift + 15) % 30
    quarter, left = divmod(in_century, 4)
    weekday = (32 + 2 * rest + 2 * quarter - moon - left) % 7
    late = (golden + 11 * moon + 22 * weekday) // 451
    month, day = divmod(moon + weekday - 7 * late + 114, 31)
    return dt.date(year, month, day + 1).toordinal()


# --- occurrences ----------------------------------------------------------------------------


class _Grid(NamedTuple):
    """The units (hours, minutes or seconds) that a rule shorter than a day may choose.

    A day is cut into blocks of ``size`` units each: itself into hours, its hours into minutes or
    its minutes into seconds.
    """

    unit: int  # in seconds
    size: int
    blocks: tuple[int, ...]  # those of a day that are listed
    block_set: frozenset[int]  # the same
    listed: frozenset[int]  # the units of a block that are listed

    def units(self, day: int, low: int, first: int, interval: int) -> Iterator[int]:
        """Yield the units of a day that a rule chooses, from one on.

        Args:
            day: The day, counted since 1970.
            low: The unit of the day at which to begin.
            first: The unit since 1970 from which the interval counts.
            interval: How many units lie between two.
        """
        per_day = zones.DAY // self.unit
        to_first = first - day * per_day

        def on_grid(begin: int, end: int) -> range:
            return range(begin + (to_first - begin) % interval, end, interval)

        if per_day // interval < len(self.blocks):
            for unit in on_grid(low, per_day):
                if unit // self.size in self.block_set and unit % self.size in self.listed:
                    yield unit
            return
        for index in range(bisect_left(self.blocks, low // self.size), len(self.blocks)):
            begin = self.blocks[index] * self.size
            for unit in on_grid(max(low, begin), begin + self.size):
                if unit - begin in self.listed:
                    yield unit

    def count_in(self, block: int, before: int, first: int, interval: int) -> int:
        """Return how many units of a block a rule chooses, before one of them.

        The interval is such that it is all one on which day the block is.
        """
        begin = block * self.size - first
        return sum(unit < before and (begin + unit) % interval == 0 for unit in self.listed)

    def ever(self, first: int, interval: int) -> bool:
        """Say whether the interval ever reaches a unit that is listed, on any day at all."""
        per_day = zones.DAY // self.unit
        step = math.gcd(interval, per_day)
        return any(
            (block * self.size + unit - first) % step == 0
            for block in self.blocks
            for unit in self.listed
        )


class Pattern(NamedTuple):
    """A rule made ready to be evaluated."""

    parts: Parts
    days: _Days | None  # None: every day
    grid: _Grid | None  # None: a rule of days or longer
    times: tuple[int, ...]  # within a day, or a unit of the grid, in seconds
    step: int | None  # from one occurrence to the next, where that is always the same
    is_countable: bool  # whether `count_walls` can tell

    def next_wall(self, wall: int) -> int | None:
        """Return the first occurrence that is not before a time, ``None`` if there is none."""
        if self.step is not None:
            return self._next_step(wall, self.step)
        if self.parts.total is None:
            return next(self.walls_from(max(wall, self.parts.start)), None)
        number = 0
        while chunk := _chunk(self.parts, number):
            if chunk[-1] >= wall:
                return chunk[bisect_left(chunk, wall)]
            number += 1
        return None

    def _next_step(self, wall: int, step: int) -> int | None:
        start, until, total = self.parts.start, self.parts.until, self.parts.total
        steps = max(0, -((start - wall) // step))
        found = start + steps * step
        is_over = (until is not None and found > until) or (total is not None and steps >= total)
        return None if is_over else found

    def count_walls(self, low: int, high: int) -> int:
        """Return how many occurrences there are in ``[low, high)``, if the rule is countable."""
        if self.step is not None or self.parts.total is not None:
            return self._count_before(high) - self._count_before(low)
        until = self.parts.until
        low = max(low, self.parts.start)
        high = high if until is None else min(high, until + 1)
        if low >= high:
            return 0
        first, from_second = divmod(low, zones.DAY)
        last, to_second = divmod(high, zones.DAY)
        whole = self._count_days(first, last) * self._times_before(zones.DAY)
        return whole - self._count_on(first, from_second) + self._count_on(last, to_second)

    def _count_before(self, wall: int) -> int:
        """Return how many occurrences come before a time, of a rule whose count is known."""
        if self.step is not None:
            start, until, total = self.parts.start, self.parts.until, self.parts.total
            wall = wall if until is None else min(wall, until + 1)
            steps = max(0, -((start - wall) // self.step))
            return steps if total is None else min(steps, total)
        count, number = 0, 0
        while chunk := _chunk(self.parts, number):
            if chunk[-1] >= wall:
                return count + bisect_left(chunk, wall)
            count, number = count + len(chunk), number + 1
        return count

    def _count_on(self, day: int, second: int) -> int:
        """Return how many occurrences there are on a day before a second of it."""
        return self._times_before(second) if second and self._count_days(day, day + 1) else 0

    def _times_before(self, second: int) -> int:
        """Return how many times of a matching day are before a second of it."""
        grid = self.grid
        if grid is None:
            return bisect_left(self.times, second)
        unit, rest = divmod(second, grid.unit)
        block, at = divmod(unit, grid.size)
        count = _counts_before_blocks(self.parts)[bisect_left(grid.blocks, block)]
        to_unit = to_next = 0
        if block in grid.block_set:
            first, interval = self.parts.start // grid.unit, self.parts.interval
            to_unit = grid.count_in(block, at, first, interval)
            to_next = grid.count_in(block, at + 1, first, interval) if rest else to_unit
        last = bisect_left(self.times, rest) if to_next > to_unit else 0
        return (count + to_unit) * len(self.times) + last

    def _count_days(self, low: int, high: int) -> int:
        """Return how many days match in ``[low, high)``, in days since 1970."""
        if self.days is None:
            return high - low
        from_year = dt.date.fromordinal(low + _EPOCH_ORDINAL).year
        to_year = dt.date.fromordinal(high + _EPOCH_ORDINAL).year
        count = sum(len(_days_of_year(self.days, year)) for year in range(from_year, to_year))
        count -= bisect_left(_days_of_year(self.days, from_year), low)
        return count + bisect_left(_days_of_year(self.days, to_year), high)

    def walls_from(self, low: int) -> Iterator[int]:
        """Yield the occurrences from a time on, which is not before the start, for 40 years."""
        until = self.parts.until
        found = self._by_day(low) if self.grid is None else self._by_unit(low, self.grid)
        for wall in found:
            if until is not None and wall > until:
                return
            if wall >= low:
                yield wall

    def _by_day(self, low: int) -> Iterator[int]:
        positions = self.parts.listed("BYSETPOS")
        if not positions or self.parts.freq == DAILY:  # a day's positions are in its times
            first_day, rest = divmod(low, zones.DAY)
            for day in self._days_from(first_day):
                begin = bisect_left(self.times, rest) if day == first_day else 0
                for index in range(begin, len(self.times)):
                    yield day * zones.DAY + self.times[index]
            return
        for _, days in itertools.groupby(self._days_from(self._period_start(low)), self._period):
            yield from _at_positions(tuple(days), self.times, positions)

    def _by_unit(self, low: int, grid: _Grid) -> Iterator[int]:
        first_day, rest = divmod(low, zones.DAY)
        first = self.parts.start // grid.unit
        for day in self._days_from(first_day):
            low_unit = rest // grid.unit if day == first_day else 0
            for unit in grid.units(day, low_unit, first, self.parts.interval):
                for time in self.times:
                    yield day * zones.DAY + unit * grid.unit + time

    def _days_from(self, day: int) -> Iterator[int]:
        """Yield the matching days that the interval reaches."""
        freq, interval = self.parts.freq, self.parts.interval
        first = self._period(self.parts.start // zones.DAY)
        for found in self._listed_days(day):
            if freq > DAILY or (self._period(found) - first) % interval == 0:
                yield found

    def _listed_days(self, day: int) -> Iterator[int]:
        year = dt.date.fromordinal(day + _EPOCH_ORDINAL).year
        last_year = min(year + MAX_YEARS, dt.MAXYEAR - 1)
        if self.days is None:
            yield from range(day, dt.date(last_year, 12, 31).toordinal() - _EPOCH_ORDINAL)
            return
        first = self._period(self.parts.start // zones.DAY)
        for each in range(year, last_year + 1):
            if self.parts.freq == YEARLY and (each - first) % self.parts.interval:
                continue
            days = _days_of_year(self.days, each)
            yield from days[bisect_left(days, day) :] if each == year else days

    def _period(self, day: int) -> int:
        """Return the number of the year, month, week or day that a day is in."""
        freq = self.parts.freq
        if freq >= DAILY:
            return day
        if freq == WEEKLY:
            return (day + _EPOCH_ORDINAL - 1 - self.parts.wkst) // 7
        date = dt.date.fromordinal(day + _EPOCH_ORDINAL)
        return date.year if freq == YEARLY else date.year * 12 + date.month - 1

    def _period_start(self, low: int) -> int:
        """Return the first day of the period of a time; the first week begins with the rule."""
        day = low // zones.DAY
        if self.parts.freq == WEEKLY:
            begin = self._period(day) * 7 + self.parts.wkst + 1 - _EPOCH_ORDINAL
            return max(begin, self.parts.start // zones.DAY)
        date = dt.date.fromordinal(day + _EPOCH_ORDINAL)
        month = 1 if self.parts.freq == YEARLY else date.month
        return date.replace(month=month, day=1).toordinal() - _EPOCH_ORDINAL


@lru_cache(maxsize=256)
def _counts_before_blocks(parts: Parts) -> tuple[int, ...]:
    """Return how many units of a day a rule chooses before each listed block, and in all."""
    grid, counts = pattern_of(parts).grid, [0]
    if grid is None:  # a rule of days or longer
        return (0,)
    for block in grid.blocks:
        found = grid.count_in(block, grid.size, parts.start // grid.unit, parts.interval)
        counts.append(counts[-1] + found)
    return tuple(counts)


@lru_cache(maxsize=16_384)
def _chunk(parts: Parts, number: int) -> tuple[int, ...]:
    """Return some occurrences of a rule with COUNT, the numbered part of all of them."""
    low, size = parts.start, _CHUNK << number
    if number:
        before = _chunk(parts, number - 1)
        if not before:
            return ()
        low = before[-1] + 1
    wanted = min(size, (parts.total or 0) - (size - _CHUNK))
    found: list[int] = []
    while len(found) < wanted:
        more = list(itertools.islice(pattern_of(parts).walls_from(low), wanted - len(found)))
        if not more:
            break
        found += more
        low = more[-1] + 1
    return tuple(found)


def _at_positions(days: Sequence[int], times: Sequence[int], positions: Iterable[int]) -> list[int]:
    """Return what is at some positions of a period's occurrences; -1 is the last."""
    size = len(days) * len(times)
    found = {position - 1 if position > 0 else size + position for position in positions}
    return [
        days[index // len(times)] * zones.DAY + times[index % len(times)]
        for index in sorted(found)
        if 0 <= index < size
    ]


@lru_cache(maxsize=1024)
def pattern_of(parts: Parts) -> Pattern:
    """Return a rule ready to be evaluated; what it leaves open is as at its start."""
    freq, wall = parts.freq, parts.start
    date = dt.date.fromordinal(wall // zones.DAY + _EPOCH_ORDINAL)
    hour, minute, second = wall // 3600 % 24, wall // 60 % 60, wall % 60
    hours = parts.listed("BYHOUR") or ((hour,) if freq < HOURLY else tuple(range(24)))
    minutes = parts.listed("BYMINUTE") or ((minute,) if freq < MINUTELY else tuple(range(60)))
    seconds = parts.listed("BYSECOND") or ((second,) if freq < SECONDLY else tuple(range(60)))
    grid, times = None, [0]
    if freq == SECONDLY:
        minutes_of_day = tuple(60 * h + m for h in hours for m in minutes)
        grid = _grid(1, 60, minutes_of_day, seconds)
    elif freq == MINUTELY:
        grid, times = _grid(60, 60, hours, minutes), list(seconds)
    elif freq == HOURLY:
        grid = _grid(3600, 24, (0,), hours)
        times = [60 * m + s for m in minutes for s in seconds]
    else:
        times = [3600 * h + 60 * m + s for h in hours for m in minutes for s in seconds]
    positions = parts.listed("BYSETPOS")
    if positions and freq >= DAILY:
        times = _at_positions((0,), times, positions)
    step = parts.interval * _STEPS[freq] if freq in _STEPS and not parts.lists else None
    is_countable = step is not None or parts.total is not None or _is_regular(parts, grid)
    return Pattern(parts, _days_chosen(parts, date), grid, tuple(times), step, is_countable)


def _is_regular(parts: Parts, grid: _Grid | None) -> bool:
    """Say whether a rule has the same times on all its days, and each kind of year the same days.

    Else its occurrences may be further apart than `MAX_YEARS`, or differ from day to day.
    """
    if parts.listed("BYEASTER"):
        return False
    if grid is not None:
        return zones.DAY // grid.unit % parts.interval == 0
    return parts.interval == 1 and (parts.freq == DAILY or not parts.listed("BYSETPOS"))


def _grid(unit: int, size: int, blocks: tuple[int, ...], listed: Iterable[int]) -> _Grid:
    return _Grid(unit, size, blocks, frozenset(blocks), frozenset(listed))


def _days_chosen(parts: Parts, start: dt.date) -> _Days | None:
    """Return how a rule chooses days; what it leaves open is as on its first day."""
    chosen = _Days(
        months=parts.listed("BYMONTH"),
        month_days=parts.listed("BYMONTHDAY"),
        year_days=parts.listed("BYYEARDAY"),
        weeks=parts.listed("BYWEEKNO"),
        weekdays=parts.listed("BYDAY"),
        easter=parts.listed("BYEASTER"),
        wkst=parts.wkst,
        in_year=parts.freq == YEARLY and not parts.listed("BYMONTH"),
    )
    if not any(chosen[1:6]):
        if parts.freq == YEARLY and not chosen.months:
            chosen = chosen._replace(months=(start.month,))
        if parts.freq in (YEARLY, MONTHLY):
            chosen = chosen._replace(month_days=(start.day,))
        if parts.freq == WEEKLY:
            chosen = chosen._replace(weekdays=((start.weekday(), 0),))
    return chosen if any(chosen[:6]) else None


def occurs(pattern: Pattern) -> bool:
    """Say whether a rule ever comes true."""
    grid, parts = pattern.grid, pattern.parts
    if grid is not None and not grid.ever(parts.start // grid.unit, parts.interval):
        return False
    if not pattern.times:  # no day, or no unit of one, has as many as BYSETPOS asks for
        return False
    return pattern.next_wall(parts.start) is not None
