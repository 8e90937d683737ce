"""Rules by a clock, where clocks change: every zone, against a look at each real minute.

The oracle walks through real time with ``zoneinfo`` alone, and matches fields by membership in
sets; it shares no code and no arithmetic with what it checks. A sample of zones is checked here;
``DTIMER_TEST_ALL_ZONES=1`` (``make clock-changes``) checks them all.
"""

from __future__ import annotations

import logging
import os
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator
from datetime import date, datetime, timedelta, timezone
from functools import cache, lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple
from zoneinfo import TZPATH, ZoneInfo, available_timezones

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from celery_dtimer import zones
from celery_dtimer.schedules import Crontab, Recurrence, Schedule, parse

logger = logging.getLogger(__name__)

ALL_ZONES = os.environ.get("DTIMER_TEST_ALL_ZONES") == "1"
UTC = timezone.utc
MINUTE, HOUR, DAY = timedelta(minutes=1), timedelta(hours=1), timedelta(days=1)
SINCE, UNTIL = datetime(2020, 1, 1, tzinfo=UTC), datetime(2038, 1, 1, tzinfo=UTC)
A_FEW_YEARS = (date(2024, 1, 1), date(2029, 1, 1))
DST = ["cron", "skip", "shift", "both"]

# Half an hour, negative, two hours, by decree, across midnight, odd offsets, and a fixed sample.
STRANGE = """
    Australia/Lord_Howe Pacific/Apia Pacific/Kwajalein Africa/Casablanca Africa/El_Aaiun
    Europe/Dublin Antarctica/Troll Antarctica/McMurdo Antarctica/Casey Antarctica/Vostok
    Antarctica/Macquarie Pacific/Kiritimati Asia/Gaza America/Scoresbysund America/Nuuk
    Asia/Kathmandu Asia/Tehran Asia/Beirut Africa/Cairo Africa/Juba America/Santiago America/Havana
    America/Asuncion America/St_Johns America/Sao_Paulo America/Mexico_City Atlantic/Azores
    Pacific/Chatham Pacific/Norfolk Pacific/Easter Pacific/Fiji Asia/Amman Asia/Almaty UTC
    Asia/Kolkata Australia/Eucla
""".split()
SAMPLE = "America/New_York Europe/Paris Asia/Jerusalem Australia/Sydney Europe/Chisinau".split()
# A zone, and a day on which its clocks do what none does in the years that are checked.
OLD_CHANGES = [
    ("Pacific/Apia", date(2011, 12, 30)),  # a day that is left out
    ("Pacific/Kwajalein", date(1993, 8, 21)),  # likewise
    ("Pacific/Fakaofo", date(2011, 12, 30)),  # likewise
    ("Asia/Kathmandu", date(1986, 1, 1)),  # forward by a quarter of an hour
    ("Asia/Pyongyang", date(2018, 5, 5)),  # forward by half an hour, at half past eleven
    ("America/Caracas", date(2007, 12, 9)),  # back by half an hour
    ("America/St_Johns", date(2010, 11, 7)),  # one minute past midnight, back to the day before
    ("America/St_Johns", date(1988, 4, 3)),  # forward by two hours
    ("America/Sao_Paulo", date(2018, 2, 18)),  # at midnight, back to the day before
    ("America/Sao_Paulo", date(2018, 11, 4)),  # at midnight, forward
    ("Antarctica/Casey", date(2018, 3, 11)),  # back by three hours
    ("America/Juneau", date(1983, 10, 30)),  # back by two hours
]
RULES = [
    "30 2 * * *",
    "0 0 * * *",
    "30 23 * * *",
    "*/20 0-3,22,23 * * *",
    "5,45 1-3 * * *",
    "* 2 * * *",
    "30 0,1 * * sun",
    "15 3 29-31,L * *",
    "0 12 * 3,4,10,11 mon-fri",
    "*/15 * * * *",
    "0 */2 * * *",
    "10 */3 * * sat,sun",
]


def ms(moment: datetime) -> int:
    return (moment - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(milliseconds=1)


def slots(rule: Schedule, after: int, until: int) -> Iterator[int]:
    """Yield the slots in ``(after, until]``, each from the one before, as a scheduler does."""
    slot = rule.next_run_after(after, after)
    while slot is not None and slot <= until:
        yield slot
        slot = rule.next_run_after(slot, slot)


# --- the oracle -------------------------------------------------------------------------------


class Change(NamedTuple):
    """The first minute with another offset, and how much clocks are put forward."""

    moment: datetime
    by: timedelta


@cache
def changes(zone: str) -> tuple[Change, ...]:
    """Find a zone's changes by a look at every sixth hour, then at each minute."""
    info, step = ZoneInfo(zone), 6 * HOUR
    found, moment = [], SINCE
    offset = moment.astimezone(info).utcoffset()
    while moment < UNTIL:
        later = moment + step
        if later.astimezone(info).utcoffset() != offset:
            minutes = [moment + n * MINUTE for n in range(step // MINUTE + 1)]
            first = next(m for m in minutes if m.astimezone(info).utcoffset() != offset)
            new = first.astimezone(info).utcoffset()
            assert new is not None
            assert offset is not None
            assert (first - timedelta(seconds=1)).astimezone(info).utcoffset() == offset
            found.append(Change(first, new - offset))
            offset, later = new, first
        moment = later
    return tuple(found)


def some(found: tuple[Change, ...]) -> tuple[Change, ...]:
    """Return all changes, or a sample of those forward and those back."""
    return found if ALL_ZONES else found[::5]


def alike(zone: str) -> tuple[object, ...]:
    """What two zones have in common if their clocks always show the same."""
    return (SINCE.astimezone(ZoneInfo(zone)).utcoffset(), *changes(zone))


def checked_zones() -> list[str]:
    """The zones to be checked; of those whose clocks show the same, the first by name."""
    if not ALL_ZONES:
        return sorted({*STRANGE, *SAMPLE})
    return sorted(
        {alike(zone): zone for zone in sorted(available_timezones(), reverse=True)}.values()
    )


ZONES = checked_zones()


class Walk(NamedTuple):
    """What clocks show at each minute of a time, after its first."""

    fresh: list[tuple[int, datetime]]  #: moments at which they show a time for the first time
    again: list[tuple[int, datetime]]  #: those at which they show one that they have shown before
    #: Times that they leave out: the end of the gap, and the moment by the offset before the gap.
    left_out: list[tuple[int, int, datetime]]


@lru_cache(maxsize=16)
def walk(zone: str, begin: datetime, hours: int) -> Walk:
    found, info = Walk([], [], []), ZoneInfo(zone)
    highest = begin.astimezone(info).replace(tzinfo=None, fold=0)
    for n in range(1, hours * 60):
        moment = begin + n * MINUTE
        wall = moment.astimezone(info).replace(tzinfo=None, fold=0)
        (found.fresh if wall > highest else found.again).append((ms(moment), wall))
        while highest + MINUTE < wall:
            highest += MINUTE
            # Python reads a time that does not exist by the offset before the gap.
            found.left_out.append((ms(moment), ms(highest.replace(tzinfo=info)), highest))
        highest = max(highest, wall)
    return found


NAMES = "jan feb mar apr may jun jul aug sep oct nov dec sun mon tue wed thu fri sat".split()


def number(text: str) -> int:
    return int(text) if text.isdigit() else (*range(1, 13), *range(7))[NAMES.index(text)]


def numbers(text: str, first: int, last: int) -> set[int]:
    """The numbers of a cron field, ``L`` being 99."""
    found: set[int] = set()
    for part in text.split(","):
        span, _, step = part.partition("/")
        begin, _, end = span.partition("-")
        if part == "L":
            found.add(99)
        elif span == "*":
            found.update(range(first, last + 1, int(step or 1)))
        else:
            found.update(range(number(begin), number(end or begin) + 1, int(step or 1)))
    return found


class Fields:
    """A cron expression as sets of numbers."""

    def __init__(self, expression: str) -> None:
        minute, self.hour_text, day, month, weekday = expression.split()
        self.minutes, self.hours = numbers(minute, 0, 59), numbers(self.hour_text, 0, 23)
        self.days, self.months = numbers(day, 1, 31), numbers(month, 1, 12)
        self.weekdays = numbers(weekday, 0, 6)

    def match(self, wall: datetime) -> bool:
        return (
            wall.hour in self.hours
            and wall.minute in self.minutes
            and (wall.day in self.days or (99 in self.days and (wall + DAY).day == 1))
            and wall.month in self.months
            and wall.isoweekday() % 7 in self.weekdays
        )


@lru_cache(maxsize=256)
def expected(expression: str, zone: str, dst: str, begin: datetime, hours: int) -> list[int]:
    """The slots after the first minute of a time, found by a look at each minute."""
    shown = walk(zone, begin, hours)
    fresh, again, left_out = matching(expression, zone, begin, hours)
    if "*" in expression.split()[1]:
        return sorted([*fresh, *again])
    found = {*fresh, *(again if dst == "both" else ())}
    if dst == "shift":
        found.update(put_off for _, put_off, _ in left_out)
    elif dst != "skip":
        found.update(gap_end for gap_end, _, _ in left_out)
    last = max(moment for moment, _ in [*shown.fresh[-1:], *shown.again[-1:]])
    return sorted(slot for slot in found if slot <= last)


@lru_cache(maxsize=16)
def matching(
    expression: str, zone: str, begin: datetime, hours: int
) -> tuple[list[int], list[int], list[tuple[int, int, datetime]]]:
    """What of a walk matches; of the times that are shown only the moments."""
    shown, match = walk(zone, begin, hours), Fields(expression).match
    return (
        [moment for moment, wall in shown.fresh if match(wall)],
        [moment for moment, wall in shown.again if match(wall)],
        [gap for gap in shown.left_out if match(gap[2])],
    )


# --- every change of every zone -----------------------------------------------------------------


@pytest.fixture(scope="module", autouse=True)
def checked() -> Iterator[Counter[str]]:
    """Count what is checked, and say so at the end."""
    counts: Counter[str] = Counter()
    yield counts
    logger.info("zones with clocks of their own: %s", len(ZONES))
    logger.info("zones in all: %s", len(available_timezones()))
    logger.info("zone data: %s", zone_data())
    for name, count in sorted(counts.items()):
        logger.info("%s: %s", name, f"{count:,}")


def zone_data() -> str:
    for folder in TZPATH:
        listed = Path(folder) / "tzdata.zi"
        if listed.exists():
            return listed.read_text().partition("\n")[0].strip("# ")
    return "of the package tzdata"


@pytest.mark.parametrize("zone", ZONES)
def test_rules_run_at_each_change_when_a_look_at_each_minute_says(
    zone: str, checked: Counter[str]
) -> None:
    for change in some(changes(zone)):
        begin = change.moment - 26 * HOUR
        for expression in RULES:
            policies = ["cron"] if "*" in expression.split()[1] else DST
            for dst in policies:
                rule = Crontab(expression, zone, dst)
                found = expected(expression, zone, dst, begin, 52)
                end = ms(begin) + 52 * 3_600_000 - 60_000
                assert list(slots(rule, ms(begin), end)) == found, (expression, dst, change)
                checked["rules, each at a change and with a policy"] += 1
                checked["runs compared with the oracle"] += len(found)
        checked["changes of clocks"] += 1
        checked["minutes looked at"] += 52 * 60


@pytest.mark.parametrize("zone", ZONES)
def test_any_moment_near_a_change_has_the_same_answer(zone: str, checked: Counter[str]) -> None:
    """Also from within a gap's end and a repeated hour, where no slot may have led."""
    for change in some(changes(zone)):
        begin = change.moment - 26 * HOUR
        moments = [ms(change.moment) + n * 420_000 + d for n in range(-25, 26) for d in (-1, 0)]
        for expression in ("30 2 * * *", "*/20 0-3,22,23 * * *", "0 */2 * * *"):
            for dst in DST:
                rule = Crontab(expression, zone, dst)
                found = expected(expression, zone, dst, begin, 52)
                for moment in moments:
                    later = bisect_right(found, moment)
                    if later < len(found):
                        assert rule.next_run_after(moment, 0) == found[later], (moment, dst)
                        checked["moments from which the next run was asked"] += 1


@pytest.mark.parametrize(("zone", "day"), OLD_CHANGES)
@pytest.mark.parametrize("dst", DST)
def test_days_that_are_left_out_and_other_old_changes(zone: str, day: date, dst: str) -> None:
    begin = datetime(day.year, day.month, day.day, tzinfo=UTC) - 2 * DAY
    end = ms(begin) + 96 * 3_600_000 - 60_000
    shown = walk(zone, begin, 96)
    assert shown.again or shown.left_out, "clocks change"
    for expression in RULES:
        found = expected(expression, zone, dst, begin, 96)
        assert list(slots(Crontab(expression, zone, dst), ms(begin), end)) == found, expression


# --- whole years --------------------------------------------------------------------------------


def exists(wall: datetime, info: ZoneInfo) -> bool:
    return wall.replace(tzinfo=info).astimezone(UTC).astimezone(info).replace(tzinfo=None) == wall


def comes_twice(wall: datetime, info: ZoneInfo) -> bool:
    first, second = (wall.replace(tzinfo=info, fold=fold).utcoffset() for fold in (0, 1))
    return first != second and exists(wall, info)


@pytest.mark.parametrize("zone", ZONES)
@pytest.mark.parametrize("time", [(0, 0), (2, 30), (12, 0)] if ALL_ZONES else [(0, 0), (2, 30)])
def test_a_daily_time_comes_once_on_each_day(
    zone: str, time: tuple[int, int], checked: Counter[str]
) -> None:
    info, hour, minute = ZoneInfo(zone), *time
    first, last = (date(2020, 1, 2), date(2037, 12, 31)) if ALL_ZONES else A_FEW_YEARS
    days = [first + n * DAY for n in range((last - first).days)]
    walls = [datetime(d.year, d.month, d.day, hour, minute) for d in days]  # noqa: DTZ001
    after, until = (ms(datetime(d.year, d.month, d.day, tzinfo=info)) - 1 for d in (first, last))
    existing = [wall.date() for wall in walls if exists(wall, info)]
    twice = [wall.date() for wall in walls if comes_twice(wall, info)]
    wanted = {"cron": days, "shift": days, "skip": existing, "both": sorted([*days, *twice])}
    for dst, listed in wanted.items():
        found = list(slots(Crontab(f"{minute} {hour} * * *", zone, dst), after, until))
        assert [datetime.fromtimestamp(slot / 1000, info).date() for slot in found] == listed, dst
        assert all(earlier < later for earlier, later in pairwise(found))
        checked["runs of daily times"] += len(found)


@pytest.mark.parametrize("zone", ZONES)
def test_wildcards_keep_their_rhythm_through_each_change(zone: str, checked: Counter[str]) -> None:
    """No hole and no double: a quarter of an hour stays one, in a gap and in a fold."""
    rule, quarter = Crontab("*/15 * * * *", zone, "skip"), 15 * 60_000
    for moment, by in some(changes(zone)):
        begin, end = ms(moment - 6 * HOUR), ms(moment + 6 * HOUR)
        found = list(slots(rule, begin, end))
        assert by % timedelta(minutes=15) == timedelta(0), "else the rhythm changes with the clock"
        assert {later - earlier for earlier, later in pairwise(found)} == {quarter}
        assert len(found) == 48
        checked["runs of quarters of an hour"] += len(found)


@pytest.mark.parametrize("zone", ZONES)
def test_recurrence_rules_run_when_the_same_crontab_does(zone: str, checked: Counter[str]) -> None:
    """They find their times in another way, and share what happens where clocks change."""
    pairs = [
        ("30 2 * * *", "FREQ=DAILY;BYHOUR=2;BYMINUTE=30;BYSECOND=0"),
        ("0,20,40 0-3 * * sat,sun", "FREQ=WEEKLY;BYDAY=SA,SU;BYHOUR=0,1,2,3;BYMINUTE=0,20,40"),
        ("*/15 * * * *", "FREQ=MINUTELY;INTERVAL=15"),
        ("0 */2 * * *", "FREQ=HOURLY;INTERVAL=2"),
    ]
    for change in some(changes(zone)):
        begin, end = ms(change.moment - 26 * HOUR), ms(change.moment + 26 * HOUR)
        for expression, text in pairs:
            for dst in DST if "DAILY" in text or "WEEKLY" in text else ["cron"]:
                recurrence = Recurrence(f"DTSTART:20190101T000000\nRRULE:{text}", zone, dst)
                found = list(slots(recurrence, begin, end))
                assert found == list(slots(Crontab(expression, zone, dst), begin, end)), text
                checked["runs of recurrence rules"] += len(found)


def zones_alike() -> list[tuple[str, list[str]]]:
    """Zones with clocks that show the same: the first by name, and the others."""
    if not ALL_ZONES:
        return [("America/New_York", ["US/Eastern"]), ("Europe/Dublin", ["Eire"])]
    found: dict[object, list[str]] = {}
    for zone in sorted(available_timezones()):
        found.setdefault(alike(zone), []).append(zone)
    return [(first, others) for first, *others in found.values() if others]


@pytest.mark.parametrize(("zone", "others"), zones_alike())
def test_zones_whose_clocks_show_the_same_run_alike(zone: str, others: list[str]) -> None:
    """By whatever name: the other tests take one of them."""
    near = [change.moment for change in some(changes(zone))] or [SINCE]
    for other in others:
        for expression in ("30 2 * * *", "*/20 0-3,22,23 * * *", "*/15 * * * *"):
            rule, same = Crontab(expression, zone), Crontab(expression, other)
            for moment in near:
                begin, end = ms(moment - 12 * HOUR), ms(moment + 12 * HOUR)
                assert list(slots(rule, begin, end)) == list(slots(same, begin, end)), other


# --- random rules -------------------------------------------------------------------------------

MINUTES = ["*", "*/15", "*/7", "0", "1", "30", "45", "0,30", "59", "5-10", "0-59/29"]
HOURS = ["*", "*/2", "*/3", "0", "1", "2", "3", "0-3", "23", "0,22,23", "1-5/2", "11,12"]
DAYS = ["*", "*", "*", "1-15", "29-31", "*/2", "L", "1,L"]
MONTHS = ["*", "*", "*", "1-6", "1,2,3,4,10,11,12", "mar-nov"]
WEEKDAYS = ["*", "*", "*", "sun", "mon-fri", "0,6", "sat"]
EXPRESSIONS = st.tuples(*map(st.sampled_from, (MINUTES, HOURS, DAYS, MONTHS, WEEKDAYS))).map(
    " ".join
)
CHANGING = sorted(zone for zone in {*STRANGE, *SAMPLE} if changes(zone))


@settings(max_examples=300 if ALL_ZONES else 120, deadline=None)
@given(
    expression=EXPRESSIONS,
    zone=st.sampled_from(CHANGING),
    which=st.integers(0, 1000),
    minutes=st.integers(-26 * 60, 20 * 60),
    milliseconds=st.integers(-1, 60_000),
    dst=st.sampled_from(DST),
)
def test_any_rule_from_any_moment(
    expression: str, zone: str, which: int, minutes: int, milliseconds: int, dst: str
) -> None:
    change = changes(zone)[which % len(changes(zone))]
    begin = change.moment - 30 * HOUR
    found = expected(expression, zone, dst, begin, 60)
    moment = ms(change.moment + minutes * MINUTE) + milliseconds
    slot = Crontab(expression, zone, dst).next_run_after(moment, 0)
    index = bisect_right(found, moment)
    if index < len(found):
        assert slot == found[index]
    else:
        assert slot is None or slot > ms(begin) + 60 * 3_600_000 - 60_000


@settings(max_examples=200 if ALL_ZONES else 40, deadline=None)
@given(
    expression=EXPRESSIONS,
    seconds=st.sampled_from(["*/20", "30", "0,59", "7-9"]),
    zone=st.sampled_from(CHANGING),
    which=st.integers(0, 1000),
    dst=st.sampled_from(DST),
)
def test_seconds_refine_each_minute_that_runs(
    expression: str, seconds: str, zone: str, which: int, dst: str
) -> None:
    """Apart from the end of a gap, which is one moment."""
    change = changes(zone)[which % len(changes(zone))]
    begin = change.moment - 4 * HOUR
    end = begin + 8 * HOUR
    listed = numbers(seconds, 0, 59)
    minutes = slots(Crontab(expression, zone, dst), ms(begin), ms(end) - 1)
    wanted = [minute + 1000 * second for minute in minutes for second in sorted(listed)]
    rule = Crontab(f"{seconds} {expression}", zone, dst)
    found = list(slots(rule, ms(begin) + 59_999, ms(end) - 1))
    gap_end = ms(change.moment)
    if change.by > timedelta(0) and dst in ("cron", "both"):
        inside = range(gap_end, gap_end + 60_000)
        found = [slot for slot in found if slot not in inside]
        wanted = [slot for slot in wanted if slot not in inside]
    assert found == [slot for slot in wanted if slot < ms(end)]


# --- counting -----------------------------------------------------------------------------------


def assert_counted(rule: Schedule, after: int, until: int, *, last: int = 1) -> None:
    """Compare what is counted with the slots, gone through one by one."""
    found = list(slots(rule, after, until))
    assert rule.count_between(after, until, 0) == len(found), (rule, after, until)
    begin = found[-last] if last <= len(found) else None
    assert rule.last_runs_begin(after, until, 0, last) == begin, (rule, after, until, last)


@settings(max_examples=600 if ALL_ZONES else 200, deadline=None)
@given(
    expression=EXPRESSIONS,
    seconds=st.sampled_from(["", "", "*/20 ", "30 ", "0,59 "]),
    zone=st.sampled_from(CHANGING),
    which=st.integers(0, 1000),
    seconds_after=st.integers(-2 * 86_400, 2 * 86_400) | st.integers(-7300, 7300),
    length=st.integers(-5, 86_400) | st.integers(0, 7300),
    milliseconds=st.sampled_from([-1, 0, 0, 1, 999]),
    last=st.integers(1, 100),
    dst=st.sampled_from(DST),
)
def test_any_rule_is_counted_as_it_runs(
    expression: str,
    seconds: str,
    zone: str,
    which: int,
    seconds_after: int,
    length: int,
    milliseconds: int,
    last: int,
    dst: str,
) -> None:
    change = ms(changes(zone)[which % len(changes(zone))].moment)
    after = change + 1000 * seconds_after + milliseconds
    rule = Crontab(seconds + expression, zone, dst)
    assert_counted(rule, after, after + 1000 * length, last=last)


@pytest.mark.parametrize(("zone", "day"), OLD_CHANGES)
@pytest.mark.parametrize("dst", DST)
def test_counts_where_days_are_left_out_and_at_other_old_changes(
    zone: str, day: date, dst: str
) -> None:
    begin = ms(datetime(day.year, day.month, day.day, tzinfo=UTC)) - 2 * 86_400_000
    for expression in RULES:
        rule = Crontab(expression, zone, dst)
        for hours in range(0, 96, 7):
            assert_counted(rule, begin, begin + hours * 3_600_000, last=3)
            assert_counted(rule, begin + hours * 3_600_000, begin + 96 * 3_600_000, last=50)


@pytest.mark.parametrize("zone", ZONES)
def test_whole_years_are_counted_as_they_run(zone: str) -> None:
    after, until = (ms(datetime(year, 3, 1, 11, 30, tzinfo=UTC)) for year in (2025, 2027))
    for expression in ("30 2 * * *", "0,40 0-3 * * sun", "15 3 29-31,L * *", "0 */12 29 2,8 *"):
        for dst in DST:
            assert_counted(Crontab(expression, zone, dst), after, until, last=365)


@pytest.mark.parametrize("zone", ZONES)
def test_decades_of_seconds_are_counted(zone: str) -> None:
    """Elapsed time has as many as a stopwatch shows, whatever clocks do."""
    after, until = ms(SINCE) - 1, ms(UNTIL) - 1
    seconds = (UNTIL - SINCE) // timedelta(seconds=1)
    assert Crontab("* * * * * *", zone).count_between(after, until, 0) == seconds
    assert Crontab("* * * * *", zone).count_between(after, until, 0) == seconds // 60
    for count in (1, 1000, seconds):
        begin = Crontab("* * * * * *", zone).last_runs_begin(after, until, 0, count)
        assert begin == ms(UNTIL) - 1000 * count
    assert Crontab("* * * * * *", zone).last_runs_begin(after, until, 0, seconds + 1) is None


@pytest.mark.parametrize("dst", DST)
def test_decades_of_days_are_counted(dst: str) -> None:
    """Where clocks are put forward at 02:00, 02:30 is left out; where back, 01:30 comes twice."""
    after, until = ms(datetime(2020, 1, 1, tzinfo=UTC)), ms(datetime(2038, 1, 1, tzinfo=UTC))
    days = (date(2038, 1, 1) - date(2020, 1, 1)).days
    in_gap = Crontab("30 2 * * *", "America/New_York", dst)
    in_fold = Crontab("30 1 * * *", "America/New_York", dst)
    assert in_gap.count_between(after, until, 0) == days - (18 if dst == "skip" else 0)
    assert in_fold.count_between(after, until, 0) == days + (18 if dst == "both" else 0)


@pytest.mark.parametrize("count", [0, -1])
@pytest.mark.parametrize("expression", ["* * * * *", "0 3 * * *"])
def test_no_runs_begin_nowhere(expression: str, count: int) -> None:
    rule = Crontab(expression, "Europe/Paris")
    assert rule.last_runs_begin(ms(SINCE), ms(UNTIL), 0, count) is None
    assert rule.last_runs_begin(ms(UNTIL), ms(SINCE), 0, 1) is None


def test_what_is_put_off_is_in_the_order_of_moments() -> None:
    """02:20 does not exist and runs at 02:50, behind 02:35."""
    rule = Crontab("20,35 2 * * *", "Australia/Lord_Howe", "shift")
    day = datetime(2026, 10, 4, tzinfo=ZoneInfo("Australia/Lord_Howe"))
    found = list(slots(rule, ms(day), ms(day + DAY)))
    shown = [datetime.fromtimestamp(slot / 1000, day.tzinfo).strftime("%H:%M") for slot in found]
    assert shown == ["02:35", "02:50"]


def test_what_is_put_off_and_what_is_on_time_may_be_one_run() -> None:
    """02:30 runs at 03:30, where there is a run already."""
    rule = Crontab("30 2,3 * * *", "America/New_York", "shift")
    day = datetime(2026, 3, 8, tzinfo=ZoneInfo("America/New_York"))
    assert len(list(slots(rule, ms(day), ms(day + DAY)))) == 1


def test_the_oracle_knows_of_changes() -> None:
    """It would check nothing else."""
    assert [by for _, by in changes("America/New_York")] == [HOUR, -HOUR] * 18
    assert {by for _, by in changes("Australia/Lord_Howe")} == {HOUR / 2, -HOUR / 2}
    assert not changes("UTC")
    moments = [moment for moment, _ in changes("Africa/Casablanca")]
    assert bisect_left(moments, datetime(2026, 2, 15, tzinfo=UTC)) > 0


@pytest.mark.parametrize(
    ("rule", "zone"),
    [
        ("30 2 25-31 3 0", "Europe/Paris"),
        ("30 2 8-14 3 0", "America/New_York"),
        ("DTSTART:20260101T023000\nRRULE:FREQ=YEARLY;BYMONTH=3;BYDAY=-1SU", "Europe/Rome"),
    ],
)
def test_a_rule_whose_every_time_is_left_out_never_runs(
    rule: str, zone: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not looked for until the end of time: that would hold up a beat for seconds."""
    looked: list[int] = []
    look = zones._period_at

    def counted(timezone: str, moment: int) -> Any:
        looked.append(moment)
        return look(timezone, moment)

    monkeypatch.setattr(zones, "_period_at", counted)
    found = parse(rule, timezone=zone, default_timezone="UTC", dst="skip")
    assert found.next_run_after(1_790_000_000_000, 1_790_000_000_000) is None
    assert len(looked) < 1000
