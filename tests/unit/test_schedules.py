"""Schedules: when each kind runs, what is refused, and what is stored of it."""

from __future__ import annotations

import copy
import json
import os
import pickle
import sys
import time
import types
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import date, datetime, timedelta, timezone, tzinfo
from functools import lru_cache
from itertools import islice, pairwise
from typing import Any
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import pytest
import pytz
from celery import schedules as celery_schedules
from celery.schedules import crontab, schedule, solar
from celery.utils.time import LocalTimezone
from dateutil import tz
from hypothesis import given, settings
from hypothesis import strategies as st

from celery_dtimer import zones
from celery_dtimer.errors import InvalidTimerError
from celery_dtimer.schedules import (
    Crontab,
    Custom,
    Interval,
    OneShot,
    Recurrence,
    Schedule,
    Solar,
    decode,
    has_clock,
    is_text,
    moment_ms,
    names_zone,
    parse,
    zone_name,
)
from celery_dtimer.schedules import zone as zone_of

UTC = timezone.utc
MINUTE = timedelta(minutes=1)
HOUR = 3_600_000
DAY = 24 * HOUR
NEW_YORK = "America/New_York"
LORD_HOWE = "Australia/Lord_Howe"
# A zone and a day on which its clocks change.
CHANGES = [
    (NEW_YORK, date(2026, 3, 8)),
    (NEW_YORK, date(2026, 11, 1)),
    ("Europe/Paris", date(2026, 3, 29)),
    ("Europe/Paris", date(2026, 10, 25)),
    (LORD_HOWE, date(2026, 4, 5)),
    (LORD_HOWE, date(2026, 10, 4)),
    ("America/St_Johns", date(2026, 3, 8)),
    ("America/St_Johns", date(2010, 11, 7)),  # one minute past midnight, back to the day before
    ("America/Sao_Paulo", date(2018, 2, 18)),  # at midnight, back to the day before
    ("America/Sao_Paulo", date(2018, 11, 4)),  # at midnight, forward
    ("America/Nuuk", date(2026, 3, 29)),  # forward across midnight
    ("Pacific/Apia", date(2011, 12, 30)),  # a day that was left out
    ("Asia/Kathmandu", date(1986, 1, 1)),  # forward by a quarter of an hour
    ("Africa/Casablanca", date(2026, 2, 15)),
]


def ms(moment: datetime | str) -> int:
    """Read an ISO time, of UTC unless it says otherwise, as milliseconds."""
    if isinstance(moment, str):
        moment = datetime.fromisoformat(moment)
    aware = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    return round(aware.timestamp() * 1000)


def slots(rule: Schedule, after: int, until: int, anchor: int | None = None) -> Iterator[int]:
    """Yield the slots in ``(after, until]``, each from the one before, as a scheduler does."""
    slot = rule.next_run_after(after, after if anchor is None else anchor)
    while slot is not None and slot <= until:
        yield slot
        slot = rule.next_run_after(slot, slot)


def local(moment_ms: int, zone: str) -> str:
    return datetime.fromtimestamp(moment_ms / 1000, ZoneInfo(zone)).strftime("%d %H:%M %z")


def runs(rule: Schedule, zone: str, after: str, count: int) -> list[str]:
    """The first slots after a moment of UTC, in the zone's own time."""
    found = slots(rule, ms(after), ms("2100-01-01"))
    return [local(slot, zone) for slot in islice(found, count)]


def parsed(value: Any, timezone: Any = None, default: tzinfo = UTC, **options: Any) -> Schedule:
    return parse(value, timezone=timezone, default_timezone=default, **options)


# --- crontab against an oracle ----------------------------------------------------------------


@lru_cache(maxsize=64)
def clock(zone: str, day: date) -> list[tuple[int, datetime]]:
    """What the zone's clocks show at each minute of three days, with the minute's moment."""
    info = ZoneInfo(zone)
    start = datetime(day.year, day.month, day.day, tzinfo=UTC) - timedelta(days=1)
    moments = [start + timedelta(minutes=minute) for minute in range(3 * 1440)]
    return [(ms(m), m.astimezone(info).replace(tzinfo=None, fold=0)) for m in moments]


@lru_cache(maxsize=128)
def expected(expression: str, zone: str, day: date) -> list[int]:
    """Slots found by looking at each minute: no arithmetic is shared with the code."""
    minute, hour, day_of_month, month, day_of_week = expression.split()
    fields = crontab(minute, hour, day_of_week, day_of_month, month)

    def matches(wall: datetime) -> bool:
        return (
            wall.minute in fields.minute
            and wall.hour in fields.hour
            and wall.day in fields.day_of_month
            and wall.month in fields.month_of_year
            and wall.isoweekday() % 7 in fields.day_of_week
        )

    found = []
    latest = clock(zone, day)[0][1]
    for moment, wall in clock(zone, day)[1:]:
        if "*" in hour:
            new = [wall]
        else:  # what clocks show for the first time, or have just passed over
            new = [latest + timedelta(minutes=m + 1) for m in range((wall - latest) // MINUTE)]
            latest = max(latest, wall)
        if any(map(matches, new)):
            found.append(moment)
    return found


MINUTES = st.sampled_from(["*", "*/15", "*/20", "0", "1", "30", "45", "0,30", "59", "5-10"])
HOURS = st.sampled_from(["*", "*/2", "*/3", "0", "1", "2", "3", "0-3", "23", "22,23,0", "1-5/2"])
DAYS = st.sampled_from(["*", "*", "1-15", "29-31", "*/2"])
MONTHS = st.sampled_from(["*", "*", "1-6", "3,4,10,11,12,1,2"])
WEEKDAYS = st.sampled_from(["*", "*", "sun", "mon-fri", "0,6", "fri-mon"])
EXPRESSIONS = st.tuples(MINUTES, HOURS, DAYS, MONTHS, WEEKDAYS).map(" ".join)


@settings(max_examples=60, deadline=None)
@given(expression=EXPRESSIONS, change=st.sampled_from(CHANGES))
def test_crontab_runs_when_a_look_at_each_minute_says(
    expression: str, change: tuple[str, date]
) -> None:
    zone, day = change
    first, last = clock(zone, day)[0][0], clock(zone, day)[-1][0]
    # The oracle knows nothing of what clocks showed before it began to look.
    assert list(slots(Crontab(expression, zone), first, last)) == expected(expression, zone, day)


@pytest.mark.parametrize(("zone", "day"), CHANGES)
@pytest.mark.parametrize("expression", ["30 2 * * *", "0 0 * * *", "*/15 * * * *", "0 */2 * * *"])
def test_crontab_across_each_change(expression: str, zone: str, day: date) -> None:
    first, last = clock(zone, day)[0][0], clock(zone, day)[-1][0]
    assert list(slots(Crontab(expression, zone), first, last)) == expected(expression, zone, day)


@pytest.mark.parametrize(("zone", "day"), CHANGES)
@pytest.mark.parametrize(
    "expression",
    ["30 1 * * *", "30 2 * * *", "*/20 0-3,22-23 * * *", "*/20 * * * *", "5 */2 * * *"],
)
def test_crontab_answers_the_same_from_any_moment(expression: str, zone: str, day: date) -> None:
    """Also from within a gap's end and a repeated hour, where no slot may have led."""
    rule, found = Crontab(expression, zone), expected(expression, zone, day)
    for moment in moments_near_the_change(zone, day):
        later = bisect_right(found, moment)
        if later < len(found):
            assert rule.next_run_after(moment, 0) == found[later]


def moments_near_the_change(zone: str, day: date) -> list[int]:
    moments = clock(zone, day)
    jumps = [
        then
        for (_, wall), (then, next_wall) in pairwise(moments)
        if next_wall - wall != timedelta(minutes=1)
    ]
    assert jumps
    return [
        m + extra
        for m in range(jumps[0] - 2 * HOUR, jumps[0] + 3 * HOUR, 60_000)
        for extra in (-1, 0, 1)
    ]


@pytest.mark.parametrize(
    "zone",
    [
        *("UTC", "+05:30", NEW_YORK, "Europe/Paris", "Europe/Dublin", LORD_HOWE, "Asia/Kathmandu"),
        *("America/St_Johns", "Pacific/Apia", "Africa/Casablanca", "Asia/Gaza", "America/Santiago"),
        *("Antarctica/Troll", "Africa/Cairo", "Asia/Kolkata", "Pacific/Chatham"),
    ],
)
@pytest.mark.parametrize("expression", ["30 2 * * *", "0 0 * * *"])
def test_a_daily_time_comes_once_on_each_day(expression: str, zone: str) -> None:
    rule = Crontab(expression, zone)
    info = parse_zone(zone)
    start = datetime(2024, 1, 1, tzinfo=info)
    found = slots(rule, ms(start) - 1, ms(datetime(2030, 12, 31, tzinfo=info)) - 1)
    days = [datetime.fromtimestamp(slot / 1000, info).date() for slot in found]
    assert days == [date(2024, 1, 1) + timedelta(days=n) for n in range(2556)]


def parse_zone(zone: str) -> tzinfo:
    return timezone(timedelta(hours=5, minutes=30)) if zone == "+05:30" else ZoneInfo(zone)


@settings(max_examples=100, deadline=None)
@given(
    expression=EXPRESSIONS,
    zone=st.sampled_from([zone for zone, _ in CHANGES]),
    start=st.integers(ms("1975-01-01"), ms("2060-01-01")),
)
def test_slots_grow_and_show_a_listed_time_or_the_end_of_a_gap(
    expression: str, zone: str, start: int
) -> None:
    rule = Crontab(expression, zone)
    fields = expression.split()
    listed = crontab(fields[0], fields[1])
    found = list(islice(slots(rule, start, ms("2110-01-01")), 8))
    assert len(found) == 8
    assert all(earlier < later for earlier, later in pairwise([start, *found]))
    for slot in found:
        wall = datetime.fromtimestamp(slot / 1000, ZoneInfo(zone))
        before = datetime.fromtimestamp(slot / 1000 - 1, ZoneInfo(zone))
        gap_ends = wall.utcoffset() > before.utcoffset()
        assert gap_ends or (wall.hour in listed.hour and wall.minute in listed.minute)


# --- crontab, the values that were reported -----------------------------------------------------


@pytest.mark.parametrize(
    ("expression", "zone", "after", "until", "count"),
    [
        ("*/15 * * * *", NEW_YORK, "2026-11-01T03:59", "2026-11-02T04:59", 100),
        ("*/15 * * * *", NEW_YORK, "2026-11-01T05:50", "2026-11-01T08:20", 10),
        ("*/15 * * * *", NEW_YORK, "2026-03-08T04:59", "2026-03-09T03:59", 92),
        ("* * * * *", "Europe/Paris", "2026-10-25T00:30", "2026-10-25T02:30", 120),
        ("0 * * * *", "Europe/Paris", "2026-10-24T21:59", "2026-10-25T22:59", 25),
        ("* * * * *", LORD_HOWE, "2026-04-04T13:00", "2026-04-04T17:00", 240),
        ("30 1 * * *", NEW_YORK, "2026-11-01T03:59", "2026-11-02T04:59", 1),
        ("30 2 * * *", NEW_YORK, "2026-03-08T04:59", "2026-03-09T03:59", 1),
    ],
)
def test_counts_across_a_change_of_clocks(
    expression: str, zone: str, after: str, until: str, count: int
) -> None:
    assert Crontab(expression, zone).count_between(ms(after), ms(until), 0) == count


@pytest.mark.parametrize(
    ("expression", "zone", "after", "first"),
    [
        ("30 1 * * *", NEW_YORK, "2026-11-01T00:00", ["01 01:30 -0400", "02 01:30 -0500"]),
        ("30 2 * * *", NEW_YORK, "2026-03-08T05:00", ["08 03:00 -0400", "09 02:30 -0400"]),
        # Two that fall on the gap's end, and one at it, are one run.
        ("15,45 2 * * *", NEW_YORK, "2026-03-08T05:00", ["08 03:00 -0400", "09 02:15 -0400"]),
        ("0 2,3 * * *", NEW_YORK, "2026-03-08T05:00", ["08 03:00 -0400", "09 02:00 -0400"]),
        ("0 12 * * mon", "Europe/Berlin", "2013-10-27T12:00", ["28 12:00 +0100"]),
        ("4 16 * * *", NEW_YORK, "2026-03-07T22:00", ["08 16:04 -0400"]),
        ("0 9 * * *", NEW_YORK, "2026-10-31T13:00", ["01 09:00 -0500"]),
        ("0 9 * * *", NEW_YORK, "2026-10-31T12:59", ["31 09:00 -0400"]),
        ("0 3 * * *", "Pacific/Apia", "2011-12-29T13:00", ["31 00:00 +1400", "31 03:00 +1400"]),
        (
            "30 * * * *",
            LORD_HOWE,
            "2026-04-04T14:00",
            ["05 01:30 +1100", "05 01:30 +1030", "05 02:30 +1030"],
        ),
        (
            "0 */2 * * *",
            "Europe/Paris",
            "2026-10-24T22:00",
            ["25 02:00 +0200", "25 02:00 +0100", "25 04:00 +0100"],
        ),
        ("0 */2 * * *", NEW_YORK, "2026-03-08T04:59", ["08 00:00 -0500", "08 04:00 -0400"]),
        # Day of month and day of week must both match: the first Saturday.
        ("0 22 1-7 * sat", "UTC", "2026-01-01T00:00", ["03 22:00 +0000", "07 22:00 +0000"]),
        ("0 0 * * 5-7", "UTC", "2026-01-01T00:00", ["02 00:00 +0000", "03 00:00 +0000"]),
    ],
)
def test_first_runs(expression: str, zone: str, after: str, first: list[str]) -> None:
    assert runs(Crontab(expression, zone), zone, after, len(first)) == first


@pytest.mark.parametrize(
    ("after", "leap_monday"), [("2028-03-01", "2044-02-29"), ("2072-03-01", "2112-02-29")]
)
def test_the_rarest_date_is_found(after: str, leap_monday: str) -> None:
    for expression in ("0 0 29 2 mon", "* * 29 2 mon"):
        assert Crontab(expression).next_run_after(ms(after), 0) == ms(leap_monday)


@pytest.mark.parametrize(
    "rule", [Crontab("0 3 * * *", NEW_YORK), Crontab("* * * * *", "Asia/Tokyo")]
)
@pytest.mark.parametrize("moment", [-(10**20), ms("0001-01-05"), ms("9998-12-31"), 10**20])
def test_moments_that_no_calendar_shows_are_no_error(rule: Schedule, moment: int) -> None:
    relative = Interval(3 * HOUR, relative=True, timezone=NEW_YORK)
    daily = Interval(2 * DAY, relative=True, timezone=NEW_YORK)
    for each in (rule, relative, daily, Solar("sunset", 48.8, 2.3)):
        slot = each.next_run_after(moment, moment)
        assert slot is None or slot > moment
        each.first_run(moment)
    if moment < 0:
        assert rule.next_run_after(moment, 0) is not None, "the first that a calendar shows"


# --- seconds, the last day, and policies ------------------------------------------------------


@pytest.mark.parametrize(
    ("expression", "after", "first"),
    [
        ("*/20 * * * * *", "2026-01-01T00:00", ["00:00:20", "00:00:40", "00:01:00"]),
        ("*/20 * * * * *", "2026-01-01T00:00:19.999", ["00:00:20", "00:00:40", "00:01:00"]),
        ("5,50 59 23 * * *", "2026-01-01T12:00", ["23:59:05", "23:59:50", "23:59:05"]),
        ("7 */30 1,3 * * *", "2026-01-01T01:00:07", ["01:30:07", "03:00:07", "03:30:07"]),
        ("59-1 0 0 * * *", "2026-01-01T12:00", ["00:00:00", "00:00:01", "00:00:59"]),
    ],
)
def test_six_fields_begin_with_seconds(expression: str, after: str, first: list[str]) -> None:
    found = islice(slots(Crontab(expression), ms(after), ms("2030-01-01")), len(first))
    assert [
        datetime.fromtimestamp(slot / 1000, UTC).strftime("%H:%M:%S") for slot in found
    ] == first


@pytest.mark.parametrize(
    ("days", "found"),
    [
        ("L", ["01-31", "02-28", "03-31", "04-30", "05-31"]),
        ("15,L", ["01-15", "01-31", "02-15", "02-28", "03-15"]),
        ("30,L", ["01-30", "01-31", "02-28", "03-30", "03-31"]),
        ("31,L", ["01-31", "02-28", "03-31", "04-30", "05-31"]),
    ],
)
def test_l_is_the_last_day_of_the_month(days: str, found: list[str]) -> None:
    rule = Crontab(f"0 0 {days} * *")
    first = islice(slots(rule, ms("2026-01-01"), ms("2030-01-01")), 5)
    assert [datetime.fromtimestamp(slot / 1000, UTC).strftime("%m-%d") for slot in first] == found


def test_the_last_day_is_always_possible() -> None:
    assert Crontab("0 0 31,L 4 *").next_run_after(ms("2026-01-01"), 0) == ms("2026-04-30")
    assert Crontab("0 0 30,L feb *").next_run_after(ms("2028-01-01"), 0) == ms("2028-02-29")
    assert Crontab("0 0 L * fri").next_run_after(ms("2026-01-01"), 0) == ms("2026-07-31")


@pytest.mark.parametrize("days", ["*", "*,L", "1-31", "1-30,L", "1-30,31"])
def test_every_day_in_any_words(days: str) -> None:
    rule = Crontab(f"0 0 {days} * *")
    assert rule.count_between(ms("2026-12-31T12:00"), ms("2027-12-31T12:00"), 0) == 365


def test_some_days_and_the_last_are_not_every_day() -> None:
    rule = Crontab("0 0 1-4,6-31,L * *")  # as many words as a month has days
    assert rule.count_between(ms("2026-12-31T12:00"), ms("2027-12-31T12:00"), 0) == 365 - 12


def test_celery_itself_refuses_what_only_our_text_can_say() -> None:
    with pytest.raises((ValueError, celery_schedules.ParseException)):
        crontab(day_of_month="L")


GAP, FOLD = "2026-03-08T05:00", "2026-11-01T04:00"  # midnights in New York


@pytest.mark.parametrize(
    ("dst", "in_gap", "in_fold"),
    [
        ("cron", "08 03:00 -0400", ["01 01:30 -0400", "02 01:30 -0500"]),
        ("skip", "09 02:30 -0400", ["01 01:30 -0400", "02 01:30 -0500"]),
        ("shift", "08 03:30 -0400", ["01 01:30 -0400", "02 01:30 -0500"]),
        ("both", "08 03:00 -0400", ["01 01:30 -0400", "01 01:30 -0500"]),
    ],
)
def test_policies_for_fixed_times(dst: str, in_gap: str, in_fold: list[str]) -> None:
    assert runs(Crontab("30 2 * * *", NEW_YORK, dst), NEW_YORK, GAP, 1) == [in_gap]
    assert runs(Crontab("30 1 * * *", NEW_YORK, dst), NEW_YORK, FOLD, 2) == in_fold


@pytest.mark.parametrize("dst", ["skip", "shift", "both"])
def test_policies_do_not_concern_elapsed_time(dst: str) -> None:
    for moment in (GAP, FOLD):
        hourly = Crontab("30 */2 * * *", NEW_YORK)
        assert runs(replace(hourly, dst=dst), NEW_YORK, moment, 8) == runs(
            hourly, NEW_YORK, moment, 8
        )


@pytest.mark.parametrize(
    ("dst", "first"),
    [
        ("cron", ["29 03:00 -1000", "31 00:00 +1400", "31 03:00 +1400"]),
        ("skip", ["29 03:00 -1000", "31 03:00 +1400"]),
        ("shift", ["29 03:00 -1000", "31 03:00 +1400", "01 03:00 +1400"]),
    ],
)
def test_a_day_that_is_left_out(dst: str, first: list[str]) -> None:
    rule = Crontab("0 3 * * *", "Pacific/Apia", dst)
    assert runs(rule, "Pacific/Apia", "2011-12-29T12:00", len(first)) == first


# --- intervals ----------------------------------------------------------------------------------


@given(
    every=st.integers(100, 10**9),
    moment=st.integers(-(10**13), 10**13),
    anchor=st.integers(-(10**13), 10**13),
    span=st.integers(-(10**9), 10**10),
)
def test_interval_keeps_the_anchors_cadence(
    every: int, moment: int, anchor: int, span: int
) -> None:
    rule = Interval(every)
    slot = rule.next_run_after(moment, anchor)
    assert slot is not None
    assert moment < slot <= moment + every
    assert (slot - anchor) % every == 0
    until = moment + span
    counted = rule.count_between(moment, until, anchor)
    begin = rule.last_runs_begin(moment, until, anchor, counted)
    assert begin == (slot if counted else None)
    assert rule.last_runs_begin(moment, until, anchor, counted + 1) is None
    if counted > 1:
        assert rule.last_runs_begin(moment, until, anchor, counted - 1) == slot + every
    assert counted == (0 if slot > until else (until - slot) // every + 1)


def test_interval_first_runs_one_interval_after_its_creation() -> None:
    assert Interval(10_000).first_run(1234) == 11_234


DAYS_RELATIVE = Interval(DAY, relative=True, timezone=NEW_YORK)
HOURS_RELATIVE = Interval(HOUR, relative=True, timezone=NEW_YORK)


@pytest.mark.parametrize(
    ("rule", "after", "first"),
    [
        (DAYS_RELATIVE, "2026-03-07T17:00", ["08 00:00 -0500", "09 00:00 -0400", "10 00:00 -0400"]),
        (DAYS_RELATIVE, "2026-10-31T17:00", ["01 00:00 -0400", "02 00:00 -0500", "03 00:00 -0500"]),
        (HOURS_RELATIVE, "2026-03-08T06:20", ["08 03:00 -0400", "08 04:00 -0400"]),
        (
            HOURS_RELATIVE,
            "2026-11-01T04:20",
            ["01 01:00 -0400", "01 01:00 -0500", "01 02:00 -0500"],
        ),
    ],
)
def test_relative_intervals_across_a_change(rule: Interval, after: str, first: list[str]) -> None:
    assert runs(rule, NEW_YORK, after, len(first)) == first
    assert local(rule.first_run(ms(after)) or 0, NEW_YORK) == first[0]


@pytest.mark.parametrize(
    ("every", "zone", "created", "first", "second"),
    [
        (1, "UTC", "2026-01-01T10:20:30.500", "2026-01-01T10:20:31", "2026-01-01T10:20:32"),
        (90, "UTC", "2026-01-01T10:20:40", "2026-01-01T10:22:00", "2026-01-01T10:23:00"),
        (3600, "Asia/Kolkata", "2026-01-01T10:20", "2026-01-01T10:30", "2026-01-01T11:30"),
        (7200, "UTC", "2026-01-01T10:20", "2026-01-01T12:00", "2026-01-01T14:00"),
        (2 * 86400, "UTC", "2026-01-01T10:20", "2026-01-03", "2026-01-05"),
        (2 * 86400, "Asia/Tokyo", "2026-01-01T20:00", "2026-01-03T15:00", "2026-01-05T15:00"),
        (
            0.5,
            "UTC",
            "2026-01-01T10:20:30.100",
            "2026-01-01T10:20:30.600",
            "2026-01-01T10:20:31.100",
        ),
    ],
)
def test_relative_intervals_are_rounded_to_their_unit(
    every: float, zone: str, created: str, first: str, second: str
) -> None:
    rule = Interval(round(every * 1000), relative=True, timezone=zone)
    due = rule.first_run(ms(created))
    assert due == ms(first)
    assert rule.next_run_after(due, due) == ms(second)


@settings(max_examples=150, deadline=None)
@given(
    every=st.sampled_from([1, 7, 60, 90, 3600, 5400, 7200, 10_800, 86_400, 100_000, 259_200]),
    change=st.sampled_from(CHANGES),
    minute=st.integers(0, 3 * 1440 - 1),
    anchor_steps=st.integers(-50, 50),
)
def test_relative_slots_grow_and_count(
    every: int, change: tuple[str, date], minute: int, anchor_steps: int
) -> None:
    zone, day = change
    rule = Interval(every * 1000, relative=True, timezone=zone)
    moment = clock(zone, day)[minute][0]
    anchor = rule.first_run(moment + anchor_steps * every * 1000)
    assert anchor is not None
    found: list[int] = []
    slot: int | None = moment
    while slot is not None and len(found) < 20:
        slot = rule.next_run_after(slot, anchor)
        assert slot is not None
        found.append(slot)
    assert all(earlier < later for earlier, later in pairwise([moment, *found]))
    assert rule.count_between(moment, found[-1], anchor) == 20
    for count in (1, 2, 19, 20):
        assert rule.last_runs_begin(moment, found[-1], anchor, count) == found[-count]
    for count in (-1, 0, 21):
        assert rule.last_runs_begin(moment, found[-1], anchor, count) is None
    first = rule.first_run(moment)
    assert first is not None
    assert first > moment


# --- one-shots and the sun ----------------------------------------------------------------------


def test_one_shot_runs_once_even_if_its_moment_has_passed() -> None:
    rule = OneShot(5000)
    assert rule.first_run(9000) == 5000
    assert rule.next_run_after(4999, 0) == 5000
    assert rule.next_run_after(5000, 5000) is None
    assert rule.count_between(0, 9000, 0) == 1
    assert rule.last_runs_begin(0, 9000, 0, 1) == 5000
    assert rule.last_runs_begin(0, 9000, 0, 2) is None
    assert rule.last_runs_begin(5000, 9000, 0, 1) is None


def test_one_shots_begin_with_1970() -> None:
    assert OneShot(0).describe() == "once at 1970-01-01T00:00:00+00:00"
    assert parsed(datetime(1970, 1, 1, tzinfo=UTC)) == OneShot(0)
    with pytest.raises(InvalidTimerError, match=r"at=-1 .*from 1970 to 9998"):
        OneShot(-1)
    with pytest.raises(InvalidTimerError, match=r"schedule=1969-12-31.*1970 to 9998"):
        parsed(datetime(1969, 12, 31, 23, 59, 59, tzinfo=UTC))
    with pytest.raises(InvalidTimerError, match="from 1970 to 9998"):
        parsed(datetime(1970, 1, 1), "Asia/Tokyo")  # noqa: DTZ001 - it was 1969 in UTC
    with pytest.raises(InvalidTimerError, match="from 1970 to 9998"):
        decode({"at": -1})


def test_sunset_comes_each_day() -> None:
    found = list(slots(Solar("sunset", 48.8, 2.3), ms("2026-01-01"), ms("2026-02-01")))
    assert len(found) == 31
    rule = Solar("sunset", 48.8, 2.3)
    assert rule.last_runs_begin(ms("2026-01-01"), ms("2026-02-01"), 0, 10) == found[-10]
    assert all(DAY - 1000 < later - earlier < DAY + 200_000 for earlier, later in pairwise(found))
    assert abs(found[0] - ms("2026-01-01T16:05")) < 120_000


def test_sunset_in_svalbard_waits_for_the_end_of_the_polar_day() -> None:
    slot = Solar("sunset", 78.2, 15.6).next_run_after(ms("2026-06-01"), 0)
    assert slot is not None
    assert 80 * DAY < slot - ms("2026-06-01") < 90 * DAY


def test_the_poles_have_no_sunset() -> None:
    assert Solar("sunset", 90, 0).first_run(ms("2026-06-01")) is None


@settings(max_examples=60, deadline=None)
@given(
    event=st.sampled_from(["sunrise", "solar_noon", "dusk_civil", "dawn_astronomical"]),
    lat=st.floats(-80, 80),
    lon=st.floats(-180, 180),
    start=st.integers(ms("2020-01-01"), ms("2040-01-01")),
    near=st.integers(-100, 100),
)
def test_an_event_of_the_sun_is_one_moment(
    event: str, lat: float, lon: float, start: int, near: int
) -> None:
    """Its time does not depend on the moment from which it is looked for."""
    rule = Solar(event, lat, lon)
    slot = rule.next_run_after(start, start)
    assert slot is not None
    assert slot > start
    assert rule.next_run_after(slot - 1, 0) == slot
    assert (rule.next_run_after(slot + near, 0) == slot) == (near < 0)


def test_solar_without_ephem_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ephem", None)
    rule = decode({"solar": ["sunset", 48.8, 2.3]})
    assert rule.describe() == "sunset at 48.8, 2.3"
    with pytest.raises(InvalidTimerError, match=r'pip install "celery-dtimer\[solar\]"'):
        rule.first_run(0)


# --- storing ------------------------------------------------------------------------------------

ZONES = st.sampled_from(["UTC", "Europe/Paris", "-03:30", "+05:30", LORD_HOWE])
RULES = st.one_of(
    st.builds(Interval, st.integers(100, 10**12), st.booleans(), ZONES),
    st.builds(Crontab, EXPRESSIONS, ZONES, st.sampled_from(["cron", "skip", "shift", "both"])),
    st.builds(OneShot, st.integers(0, 10**14)),
    st.builds(Solar, st.just("sunset"), st.floats(-90, 90), st.floats(-180, 180)),
)


@given(rule=RULES)
def test_a_rule_survives_storage(rule: Schedule) -> None:
    restored = decode(json.loads(json.dumps(rule.encode())))
    assert restored == rule
    assert hash(restored) == hash(rule)
    assert pickle.loads(pickle.dumps(rule)) == rule  # noqa: S301
    assert copy.deepcopy(rule) == rule
    assert restored.describe() == rule.describe()


@pytest.mark.parametrize(
    ("rule", "data", "words"),
    [
        (Interval(10_000), {"every": 10_000}, "every 10 s"),
        (Interval(100, timezone=NEW_YORK), {"every": 100}, "every 0.1 s"),
        (Interval(DAY), {"every": DAY}, "every 1 d"),
        (
            Interval(HOUR, relative=True, timezone="Europe/Paris"),
            {"every": HOUR, "relative": True, "tz": "Europe/Paris"},
            "every 1 h, rounded (Europe/Paris)",
        ),
        (
            Crontab(" 0  3 * * *", "Europe/Paris"),
            {"cron": "0 3 * * *", "tz": "Europe/Paris"},
            "0 3 * * * (Europe/Paris)",
        ),
        (Crontab("0 3 * * *"), {"cron": "0 3 * * *"}, "0 3 * * * (UTC)"),
        (Crontab("0 3 * * *", dst="cron"), {"cron": "0 3 * * *"}, "0 3 * * * (UTC)"),
        (
            Crontab("0 3 * * *", "Europe/Paris", "skip"),
            {"cron": "0 3 * * *", "tz": "Europe/Paris", "dst": "skip"},
            "0 3 * * * (Europe/Paris, dst skip)",
        ),
        (Crontab("@daily"), {"cron": "0 0 * * *"}, "0 0 * * * (UTC)"),
        (Crontab("0-0 0 0 * * *"), {"cron": "0 0 * * *"}, "0 0 * * * (UTC)"),
        (Crontab("5 0 0 l * *"), {"cron": "5 0 0 L * *"}, "5 0 0 L * * (UTC)"),
        (Solar("sunset", 48.8, 2.3), {"solar": ["sunset", 48.8, 2.3]}, "sunset at 48.8, 2.3"),
        (
            OneShot(ms("2027-01-01")),
            {"at": ms("2027-01-01")},
            "once at 2027-01-01T00:00:00+00:00",
        ),
    ],
)
def test_what_is_stored_and_said(rule: Schedule, data: dict[str, Any], words: str) -> None:
    assert rule.encode() == data
    assert rule.describe() == words


@pytest.mark.parametrize(
    "data",
    [
        *(None, 1, "0 3 * * *", [], {}, {"every": "10"}, {"every": True}, {"every": 10.5}),
        *({"every": 99}, {"every": 10**30}, {"every": None}, {"every": 1000, "relative": 1}),
        *({"every": 1000, "cron": "* * * * *"}, {"every": 1000, "tz": 5}, {"every": 1000, "x": 1}),
        *({"cron": "* * * * *", "dst": "no"}, {"cron": "* * * * *", "dst": ["skip"]}),
        *({"every": 1000, "dst": "cron"}, {"at": 1, "dst": "cron"}),
        *({"cron": 5}, {"cron": "* * * *"}, {"cron": "0 0 31 4 *"}, {"cron": "0 0 30 2 *"}),
        *({"cron": "* * * * *", "tz": "Mars/Olympus"}, {"cron": "* * * * *", "tz": None}),
        *({"cron": "* * * * *", "tz": "America"}, {"cron": "* * * * *", "tz": "../etc/passwd"}),
        *({"cron": "* * * * *", "tz": ""}, {"cron": "* * * * *", "tz": "a\0b"}),
        *({"cron": "* * * * *", "tz": "x" * 5000}, {"cron": "* * * * *", "tz": "+25:00"}),
        *({"cron": "\ud800 * * * *"}, {"cron": "* * * * *", "tz": "\ud800"}),
        *({"solar": []}, {"solar": ["noon", 1, 2]}, {"solar": ["sunset", 91, 0]}),
        *({"solar": ["sunset", float("nan"), 0]}, {"solar": ["sunset", True, 0]}),
        *({"solar": ["sunset", 10**400, 0]}, {"solar": [["sunset"], 1, 2]}, {"solar": "sunset"}),
        *({"at": "2027-01-01"}, {"at": 10**30}, {"at": 1.5}, {"at": 1, "tz": "UTC"}),
    ],
)
def test_stored_data_that_means_nothing_is_refused(data: object) -> None:
    with pytest.raises(InvalidTimerError):
        decode(data)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
KEYS = st.sampled_from(
    ["every", "cron", "rrule", "solar", "at", "custom", "repr", "relative", "tz", "dst"]
)


@settings(max_examples=60, deadline=None)
@given(data=JSON | st.dictionaries(KEYS, JSON, max_size=3))
def test_decoding_anything_gives_a_rule_or_an_invalid_timer(data: object) -> None:
    try:
        rule = decode(data)
    except InvalidTimerError:
        return
    assert decode(rule.encode()) == rule


# --- what users give ----------------------------------------------------------------------------


class Daily(crontab):
    """A rule of somebody's own."""


def tokyo_now() -> datetime:
    return datetime.now(ZoneInfo("Asia/Tokyo"))


def with_tz(rule: crontab, zone: str) -> crontab:
    rule.tz = ZoneInfo(zone)
    return rule


@pytest.mark.parametrize(
    ("value", "rule"),
    [
        (10, Interval(10_000)),
        (0.1, Interval(100)),
        (1.2345, Interval(1234)),
        (timedelta(minutes=5), Interval(300_000)),
        (schedule(30), Interval(30_000)),
        (schedule(HOUR / 1000, relative=True), Interval(HOUR, relative=True)),
        (schedule(30, nowfun=tokyo_now), Interval(30_000)),
        ("0 3 * * *", Crontab("0 3 * * *")),
        ("  0\t3 *  * mon-fri ", Crontab("0 3 * * mon-fri")),
        ("0 0 * * 7", Crontab("0 0 * * 7")),
        ("0  0 * *  *", Crontab("0 0 * * *")),
        ("@hourly", Crontab("0 * * * *")),
        ("@daily", Crontab("0 0 * * *")),
        (" @Midnight", Crontab("0 0 * * *")),
        ("@WEEKLY", Crontab("0 0 * * 0")),
        ("@monthly", Crontab("0 0 1 * *")),
        ("@yearly", Crontab("0 0 1 1 *")),
        ("@annually", Crontab("0 0 1 1 *")),
        ("0 3 15,l * *", Crontab("0 3 15,L * *")),
        ("*/10 * * * * *", Crontab("*/10 * * * * *")),
        ("0 30 3 * * mon", Crontab("30 3 * * mon")),
        (crontab(minute="*/15"), Crontab("*/15 * * * *")),
        (crontab(16, 4), Crontab("16 4 * * *")),
        (crontab(minute={30, 0, 15}, hour=[8, 9]), Crontab("0,15,30 8,9 * * *")),
        (crontab(minute=(m for m in (5, 1))), Crontab("1,5 * * * *")),
        (crontab(minute=" 0, 15 "), Crontab("0,15 * * * *")),
        (crontab(0, 22, day_of_month="1-7", day_of_week="sat"), Crontab("0 22 1-7 * sat")),
        (crontab(minute="*/100"), Crontab("*/100 * * * *")),
        (crontab(day_of_week="fri-mon"), Crontab("* * * * fri-mon")),
        (crontab(0, 9, nowfun=tokyo_now), Crontab("0 9 * * *", "Asia/Tokyo")),
        (with_tz(crontab(0, 9), "Asia/Tokyo"), Crontab("0 9 * * *", "Asia/Tokyo")),
        (solar("sunset", 48.8, 2.3), Solar("sunset", 48.8, 2.3)),
        (datetime(2027, 1, 1, tzinfo=UTC), OneShot(ms("2027-01-01"))),
        (datetime(2027, 1, 1, tzinfo=ZoneInfo("Europe/Paris")), OneShot(ms("2026-12-31T23:00"))),
        (datetime(2027, 1, 1, 0, 0, 0, 1, UTC), OneShot(ms("2027-01-01") + 1)),  # never early
        (OneShot(5), OneShot(5)),
    ],
)
def test_what_is_accepted(value: object, rule: Schedule) -> None:
    assert parsed(value) == rule


@pytest.mark.parametrize(
    ("value", "at"),
    [
        (datetime(2026, 7, 1, 9), "2026-07-01T13:00"),  # noqa: DTZ001
        (datetime(2026, 11, 1, 1, 30), "2026-11-01T05:30"),  # noqa: DTZ001
        (datetime(2026, 3, 8, 2, 30), "2026-03-08T07:00"),  # noqa: DTZ001
        (datetime(2026, 3, 8, 2, 30, tzinfo=ZoneInfo(NEW_YORK)), "2026-03-08T07:00"),
        (datetime(2026, 11, 1, 1, 30, fold=1, tzinfo=ZoneInfo(NEW_YORK)), "2026-11-01T06:30"),
    ],
)
def test_datetimes_are_read_by_the_clocks_of_the_timers_zone(value: datetime, at: str) -> None:
    assert parsed(value, NEW_YORK) == OneShot(ms(at))
    assert parsed(value, default=ZoneInfo(NEW_YORK)) == OneShot(ms(at))


def test_the_zone_of_a_crontab_is_the_first_that_is_named() -> None:
    own = crontab(0, 9, nowfun=tokyo_now)
    paris, kolkata = ZoneInfo("Europe/Paris"), ZoneInfo("Asia/Kolkata")
    assert parsed(own, "Asia/Kolkata", paris) == Crontab("0 9 * * *", "Asia/Kolkata")
    assert parsed(own, None, paris) == Crontab("0 9 * * *", "Asia/Tokyo")
    assert parsed(crontab(0, 9), None, paris) == Crontab("0 9 * * *", "Europe/Paris")
    assert parsed("0 9 * * *", kolkata, paris) == Crontab("0 9 * * *", "Asia/Kolkata")
    assert parsed(3600, None, paris, relative=True) == Interval(HOUR, True, "Europe/Paris")


@pytest.mark.parametrize(
    ("zone", "name"),
    [
        ("UTC", "UTC"),
        (UTC, "UTC"),
        (ZoneInfo("UTC"), "UTC"),
        ("+00:00", "UTC"),
        (ZoneInfo("Asia/Kathmandu"), "Asia/Kathmandu"),
        (timezone(timedelta(hours=5, minutes=30)), "+05:30"),
        (timezone(-timedelta(hours=3, minutes=30)), "-03:30"),
        (tz.UTC, "UTC"),
        (tz.gettz("Asia/Kathmandu"), "Asia/Kathmandu"),
    ],
)
def test_names_of_zones(zone: tzinfo | str, name: str) -> None:
    assert zone_name(zone) == name
    assert parsed("0 3 * * *", zone) == Crontab("0 3 * * *", name)


@pytest.fixture
def set_tz(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str | None], None]]:
    """Let the process's clock be that of a zone."""

    def tell(text: str | None) -> None:
        monkeypatch.delenv("TZ", raising=False)
        if text is not None:
            monkeypatch.setenv("TZ", text)
        time.tzset()

    yield tell
    monkeypatch.undo()
    time.tzset()


@pytest.mark.parametrize(
    ("text", "name"),
    [
        *(("Asia/Kolkata", "Asia/Kolkata"), (":America/New_York", NEW_YORK), ("UTC", "UTC")),
        *(("/usr/share/zoneinfo/Europe/Paris", "Europe/Paris"), ("", "UTC"), ("UTC0", "UTC")),
        *(("<+0530>-5:30", "+05:30"), ("XYZ3:30", "-03:30")),
    ],
)
def test_celerys_local_zone_is_that_of_the_environment(
    text: str, name: str, set_tz: Callable[[str | None], None]
) -> None:
    set_tz(text)
    assert zone_name(LocalTimezone()) == name
    assert parsed("0 3 * * *", default=LocalTimezone()) == Crontab("0 3 * * *", name)


@pytest.mark.parametrize("configured", ["Asia/Tokyo", "/usr/share/zoneinfo/Asia/Tokyo"])
def test_celerys_local_zone_is_that_of_the_machine(
    configured: str, set_tz: Callable[[str | None], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    set_tz(None)
    monkeypatch.setattr(zones, "_configured_zone", lambda: configured)
    assert zone_name(LocalTimezone()) == "Asia/Tokyo"
    set_tz("Asia/Kolkata")
    assert zone_name(LocalTimezone()) == "Asia/Kolkata"


@pytest.mark.parametrize("tzlocal", ["not installed", "knows of none", "knows of two"])
def test_the_machines_zone_is_the_one_that_its_time_file_links_to(
    tzlocal: str, set_tz: Callable[[str | None], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def name() -> None:
        if tzlocal == "knows of two":
            raise ZoneInfoNotFoundError

    module = types.SimpleNamespace(get_localzone_name=name)
    monkeypatch.setitem(sys.modules, "tzlocal", None if tzlocal == "not installed" else module)
    link = "/usr/share/zoneinfo/Asia/Tokyo"
    monkeypatch.setattr(os.path, "realpath", {"/etc/localtime": link}.__getitem__)
    set_tz(None)
    assert zone_name(LocalTimezone()) == "Asia/Tokyo"


def test_tzlocal_is_asked_if_it_is_installed(
    set_tz: Callable[[str | None], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = types.SimpleNamespace(get_localzone_name=lambda: "Asia/Tokyo")
    monkeypatch.setitem(sys.modules, "tzlocal", module)
    set_tz(None)
    assert zone_name(LocalTimezone()) == "Asia/Tokyo"


def test_a_local_zone_without_a_name_is_refused_if_its_clocks_change(
    set_tz: Callable[[str | None], None],
) -> None:
    set_tz("EST5EDT,M3.2.0,M11.1.0")
    with pytest.raises(InvalidTimerError, match=r"timezone=<LocalTimezone.*Celery's timezone.*TZ"):
        zone_name(LocalTimezone())


def test_the_zone_of_a_name() -> None:
    assert zone_of("Asia/Kathmandu") == ZoneInfo("Asia/Kathmandu")
    assert zone_of(tz.gettz("Asia/Kathmandu")) == ZoneInfo("Asia/Kathmandu")
    assert zone_of("+05:30") == timezone(timedelta(hours=5, minutes=30))
    with pytest.raises(InvalidTimerError, match="timezone="):
        zone_of("Mars/Olympus")


@pytest.mark.parametrize(
    ("text", "is_schedule"),
    [
        *(("0 3 * * *", True), ("0 3 1 1 mon", True), ("61 * * * *", True), ("@daily", True)),
        *(("@never", True), ("RRULE:FREQ=DAILY", True), ("DTSTART:20270101\nfreq=DAILY", True)),
        *(("daily", False), ("orders:daily", False), ("a=b", False), ("", False)),
        *(("send mail to all users", False), ("5 big reports for bob", False)),
        *(("0 25 1 1 1", True), ("61 25 32 13 8", True), ("0 0 1-40 L,99 MONDAY-fri", True)),
        *(("1/5 2 3 4 5", True), ("*/90 1 2 3 4", True), ("61 0 0 1 feb sun", True)),
        *(("send me all the reports", False), ("0 25 1 1", False), ("0 25 1 1 1 1 1", False)),
        *(("0 25 1 1 bob", False), ("1,,2 3 4 5 6", False), ("1.5 2 3 4 5", False)),
        *(("monthly sunday lunch march plan", False), ("2026-12-02 1 2 3 99", False)),
    ],
)
def test_a_text_is_a_schedule_or_a_name(text: str, is_schedule: bool) -> None:
    assert is_text(text) == is_schedule


@pytest.mark.parametrize(
    ("value", "named"),
    [
        *((10, False), ("0 3 * * *", False), (crontab(0, 3), False), (schedule(10), False)),
        *((crontab(0, 9, nowfun=tokyo_now), True), (Crontab("0 3 * * *"), True)),
        *((OneShot(5), False), (datetime(2027, 1, 1, tzinfo=UTC), True)),
        *(("FREQ=DAILY", False), ("DTSTART:20270101T000000Z\nFREQ=DAILY", True)),
        *((Daily(0, 9), False), (solar("sunset", 48.8, 2.3), False)),
    ],
)
def test_a_schedule_may_name_its_zone_itself(value: object, named: bool) -> None:
    assert names_zone(value) == named


@pytest.mark.parametrize(
    ("rule", "has"),
    [
        *((Crontab("* * * * *"), True), (Recurrence("DTSTART:20270101\nFREQ=HOURLY"), True)),
        *((Interval(1000, relative=True), True), (Interval(1000), False)),
        *((OneShot(5), False), (Solar("sunset", 48.8, 2.3), False), (Custom("a.B"), False)),
    ],
)
def test_a_time_zone_matters_to_rules_by_a_clock(rule: Schedule, has: bool) -> None:
    assert has_clock(rule) == has


class Nameless(tzinfo):
    """A zone that no other process could find."""

    def utcoffset(self, _moment: datetime | None) -> timedelta:
        return timedelta(hours=1)


def naive_now() -> datetime:
    return datetime(2026, 1, 1)  # noqa: DTZ001


def offset_now() -> datetime:
    return datetime(2026, 1, 1, tzinfo=timezone(timedelta(hours=2)))


def failing_now() -> datetime:
    raise RuntimeError("no clock")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (0, "schedule=0 "),
        (-5, "schedule=-5 "),
        (0.0999, "schedule=0.0999 .*at least 0.1 s"),
        (float("nan"), "schedule=nan"),
        (float("inf"), "schedule=inf"),
        (10**300, "schedule=1000"),
        (timedelta(0), r"schedule=datetime.timedelta\(0\)"),
        (True, "schedule=True"),
        (None, "schedule=None"),
        ([10], r"schedule=\[10\]"),
        (date(2026, 1, 1), "schedule=datetime.date"),
        (datetime.max.replace(tzinfo=timezone(-timedelta(hours=5))), "schedule=.*years"),
        ("", "schedule=''"),
        ("daily", "schedule='daily'.*minute hour day_of_month"),
        ("@reboot", "schedule='@reboot'.*seconds before it, or one of @hourly"),
        ("* * * *", r"schedule='\* \* \* \*'"),
        ("0 0 0 * * * *", "schedule='0 0 0 .*'.*minute hour day_of_month"),
        ("60 0 0 * * *", "second='60'.*0-59"),
        ("L 0 0 * * *", "second='L'"),
        ("0 L * * *", "hour='L'"),
        ("0 0 1-L * *", "day_of_month='1-L'.*1-31 or L"),
        ("0 0 L/2 * *", "day_of_month='L/2'"),
        ("61 25 * * *", "minute='61' .*0-59.*; hour='25' .*0-23"),
        ("x x x x x x", "second='x'.*minute='x'.*hour='x'.*_month='x'.*of_year='x'.*week='x'"),
        ("1/5 * * * *", "minute='1/5'.*0-59"),
        ("60 * * * *", "minute='60'"),
        ("*/0 * * * *", r"minute='\*/0'"),
        ("*/5-3 * * * *", r"minute='\*/5-3'"),
        ("1-5/2/2 * * * *", "minute='1-5/2/2'"),
        ("1,,2 * * * *", "minute='1,,2'"),
        ("-1 * * * *", "minute='-1'"),
        ("0 24 * * *", "hour='24'"),
        ("0 0 0 * *", "day_of_month='0'"),
        ("0 0 1 13 *", "month_of_year='13'"),
        ("0 0 * * 8", "day_of_week='8'.*7 is Sunday"),
        ("0 0 * * tag", "day_of_week='tag'"),
        ("0 0 31 4 *", "day_of_month '31' never occurs in month_of_year '4'"),
        ("0 0 30,31 feb *", "day_of_month '30,31' never occurs"),
        (crontab(minute=True), "minute=True"),
        (crontab(minute=[]), r"minute=\[\]"),
        (crontab(minute=[1.5]), r"minute=\[1.5\]"),
        (crontab(0, 9, nowfun=naive_now), "nowfun=.*named zone"),
        (crontab(0, 9, nowfun=offset_now), "nowfun=.*named zone"),
        (crontab(0, 9, nowfun=failing_now), "nowfun=.*named zone"),
        (with_tz(crontab(0, 9, nowfun=tokyo_now), "Asia/Kolkata"), "two"),
        (schedule(0), "at least 0.1 s"),
        (schedule(None), "schedule=None"),
        (Daily(0, 9), "subclass"),
        (celery_schedules.BaseSchedule(), "subclass"),
        (datetime(1, 1, 1, tzinfo=UTC), "schedule=.*years 2 to 9998"),
    ],
)
def test_what_is_refused_names_the_field_and_the_value(value: object, message: str) -> None:
    with pytest.raises(InvalidTimerError, match=message):
        parsed(value)


@pytest.mark.parametrize("zone", ["", "Mars/Olympus", "America", Nameless(), 5, "+24:00"])
def test_unknown_zones_are_refused(zone: Any) -> None:
    for value in (10, "0 3 * * *", datetime(2026, 1, 1, tzinfo=UTC)):
        with pytest.raises(InvalidTimerError, match="timezone="):
            parsed(value, zone)


@pytest.mark.parametrize("dst", ["", "Cron", "utc", True, 5, ["skip"]])
def test_unknown_policies_are_refused(dst: Any) -> None:
    for make in (lambda: parsed("0 3 * * *", dst=dst), lambda: Crontab("0 3 * * *", dst=dst)):
        with pytest.raises(InvalidTimerError, match=r"dst=.*'cron', 'skip', 'shift', 'both'"):
            make()


@pytest.mark.parametrize(
    "value",
    [
        *(10, timedelta(days=1), schedule(30), solar("sunset", 48.8, 2.3)),
        *(datetime(2027, 1, 1, tzinfo=UTC), Interval(1000), OneShot(5), Solar("sunset", 0, 0)),
    ],
)
def test_a_policy_is_for_rules_by_a_clock(value: Any) -> None:
    with pytest.raises(InvalidTimerError, match=r"dst='cron'.* only with a crontab or an rrule"):
        parsed(value, dst="cron")


@pytest.mark.parametrize(
    "value",
    [
        *("0 3 * * *", crontab(0, 3), solar("sunset", 48.8, 2.3), datetime(2027, 1, 1, tzinfo=UTC)),
        *(Crontab("0 3 * * *"), OneShot(5), "DTSTART:20270101\nFREQ=DAILY"),
    ],
)
def test_relative_is_for_intervals(value: Any) -> None:
    assert parsed(value, relative=False)
    with pytest.raises(InvalidTimerError, match=r"relative=True .* only with an interval"):
        parsed(value, relative=True)


@pytest.mark.parametrize(
    ("value", "options", "rule"),
    [
        ("0 3 * * *", {"dst": "skip"}, Crontab("0 3 * * *", dst="skip")),
        (crontab(0, 3), {"dst": "both"}, Crontab("0 3 * * *", dst="both")),
        (crontab(0, 3), {"dst": "cron"}, Crontab("0 3 * * *")),
        (Crontab("0 3 * * *"), {"dst": "skip"}, Crontab("0 3 * * *", dst="skip")),
        (Crontab("0 3 * * *", dst="skip"), {}, Crontab("0 3 * * *", dst="skip")),
        (Crontab("0 3 * * *"), {"timezone": NEW_YORK}, Crontab("0 3 * * *", NEW_YORK)),
        (
            Recurrence("DTSTART:20270101\nFREQ=DAILY"),
            {"timezone": NEW_YORK, "dst": "shift"},
            Recurrence("DTSTART:20270101\nFREQ=DAILY", NEW_YORK, "shift"),
        ),
        (Interval(DAY), {"relative": True}, Interval(DAY, relative=True)),
        (
            Interval(DAY),
            {"relative": True, "default": ZoneInfo(NEW_YORK)},
            Interval(DAY, relative=True, timezone=NEW_YORK),
        ),
        (
            Interval(DAY, relative=True, timezone="Europe/Paris"),
            {"relative": True, "default": ZoneInfo(NEW_YORK)},
            Interval(DAY, relative=True, timezone="Europe/Paris"),
        ),
        (
            Interval(DAY, relative=True),
            {"timezone": NEW_YORK},
            Interval(DAY, relative=True, timezone=NEW_YORK),
        ),
        (Interval(DAY), {"timezone": NEW_YORK}, Interval(DAY)),
        (
            schedule(3600, nowfun=tokyo_now),
            {"relative": True},
            Interval(HOUR, relative=True, timezone="Asia/Tokyo"),
        ),
    ],
)
def test_what_is_given_beside_a_schedule_is_applied(
    value: Any, options: dict[str, Any], rule: Schedule
) -> None:
    assert parsed(value, **options) == rule


@pytest.mark.parametrize("rule", [OneShot(5), Solar("sunset", 48.8, 2.3)])
def test_no_zone_changes_a_moment(rule: Schedule) -> None:
    with pytest.raises(InvalidTimerError, match=r"timezone='UTC'.*no zone"):
        parsed(rule, "UTC")


@pytest.mark.parametrize(
    ("value", "zone", "moment"),
    [
        (datetime(2026, 7, 1, 9, tzinfo=ZoneInfo("Europe/Paris")), NEW_YORK, "2026-07-01T07:00"),
        (datetime(2026, 7, 1, 9), NEW_YORK, "2026-07-01T13:00"),  # noqa: DTZ001
        (datetime(2026, 7, 1, 9), ZoneInfo(NEW_YORK), "2026-07-01T13:00"),  # noqa: DTZ001
        (datetime(2026, 3, 8, 2, 30), NEW_YORK, "2026-03-08T07:00"),  # noqa: DTZ001
        (datetime(2026, 3, 8, 2, 30, tzinfo=tz.gettz(NEW_YORK)), "UTC", "2026-03-08T07:00"),
        (datetime(2026, 11, 1, 1, 30), NEW_YORK, "2026-11-01T05:30"),  # noqa: DTZ001
        (datetime(2011, 12, 30, 9), "Pacific/Apia", "2011-12-30T10:00"),  # noqa: DTZ001
        (datetime(2027, 1, 1, 0, 0, 0, 1), "UTC", "2027-01-01T00:00:00.001"),  # noqa: DTZ001
        (datetime(2027, 1, 1, tzinfo=UTC), Nameless(), "2027-01-01"),
    ],
)
def test_the_moment_of_a_datetime(value: datetime, zone: Any, moment: str) -> None:
    assert moment_ms("end_at", value, zone) == ms(moment)


@pytest.mark.parametrize("zone", [NEW_YORK, "Europe/Paris"])
def test_the_offset_of_a_datetime_of_pytz_counts_whatever_its_zone_has_then(zone: str) -> None:
    winter = pytz.timezone(zone).localize(datetime(2026, 1, 1, 12))  # noqa: DTZ001
    summer = winter + timedelta(days=181)
    assert moment_ms("end_at", summer, "UTC") == ms(summer.astimezone(UTC).isoformat()[:19])


class Offsetless(tzinfo):
    """A time zone that says nothing."""


def test_a_datetime_whose_zone_tells_no_offset_is_refused() -> None:
    with pytest.raises(InvalidTimerError, match=r"start_at=.*tzinfo"):
        moment_ms("start_at", datetime(2026, 1, 1, tzinfo=Offsetless()), "UTC")


LAST_TIME = datetime.max  # noqa: DTZ901


@pytest.mark.parametrize(
    "value", [None, 5, "2027-01-01", date(2027, 1, 1), LAST_TIME, datetime(1, 1, 1, tzinfo=UTC)]
)
def test_what_is_no_moment_is_refused_by_the_name_of_its_field(value: Any) -> None:
    with pytest.raises(InvalidTimerError, match=r"^end_at=.*(a datetime|years 2 to 9998)"):
        moment_ms("end_at", value, "UTC")


def test_a_default_zone_without_a_name_matters_only_where_it_is_used() -> None:
    assert parsed(10, default=Nameless()) == Interval(10_000)
    with pytest.raises(InvalidTimerError, match="timezone="):
        parsed("0 3 * * *", default=Nameless())


def test_a_date_that_never_comes_is_refused_whatever_celery_lets_through() -> None:
    rule = crontab(0, 0)
    rule._orig_day_of_month, rule._orig_month_of_year = "31", "4"
    with pytest.raises(InvalidTimerError, match="never occurs"):
        parsed(rule)


@pytest.mark.parametrize("days", ["7", "0", "sun", "7-7"])
def test_seven_is_sunday_too(days: str) -> None:
    found = Crontab(f"0 0 * * {days}").next_run_after(ms("2026-01-01"), 0)
    assert found == ms("2026-01-04")


@pytest.mark.parametrize(("days", "count"), [("0-7", 7), ("5-7", 3), ("7-2", 3), ("*/7", 1)])
def test_ranges_may_end_or_begin_with_seven(days: str, count: int) -> None:
    rule = Crontab(f"0 0 * * {days}")
    assert rule.count_between(ms("2026-01-01"), ms("2026-01-08"), 0) == count


def test_fractions_and_relative_are_part_of_the_value() -> None:
    assert Interval(HOUR) != Interval(HOUR, relative=True)
    assert Interval(HOUR, timezone=NEW_YORK) == Interval(HOUR)
    assert Crontab("0 3 * * *") != Crontab("0 3 * * *", "Europe/Paris")
    assert Crontab("0 0-23 * * *") != Crontab("0 * * * *")  # only one follows elapsed time


# --- one rhythm in every zone -------------------------------------------------------------------


@pytest.mark.parametrize(
    "zone",
    ["UTC", "Asia/Kolkata", "America/St_Johns", "Pacific/Apia", "Asia/Kathmandu", NEW_YORK],
)
@pytest.mark.parametrize("host", ["UTC", "Asia/Tokyo", "America/Los_Angeles"])
def test_schedules_go_by_their_zone_and_not_by_the_hosts(
    zone: str, host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = ZoneInfo(zone)
    monkeypatch.setenv("TZ", host)
    time.tzset()
    try:
        now = ms(datetime(2026, 5, 4, 9, 59, 59, tzinfo=info))
        at = ms(datetime(2026, 5, 4, 10, 0, tzinfo=info))
        assert parsed(20, default=info).first_run(now) == now + 20_000
        assert parsed(20, default=info).next_run_after(now + 30_000, now) == now + 40_000
        assert parsed(crontab(0, 10), default=info).first_run(now) == at
        assert parsed(datetime(2026, 5, 4, 10), default=info).first_run(now) == at  # noqa: DTZ001
    finally:
        monkeypatch.undo()
        time.tzset()


def test_a_timer_never_runs_for_a_slot_before_it_existed() -> None:
    """However long ago the rule matched last."""
    rule = parsed(crontab(minute=0, hour=5, day_of_month=1))
    assert rule.first_run(ms("2026-05-17T16:00")) == ms("2026-06-01T05:00")
    assert parsed(crontab(minute="0,45")).next_run_after(
        ms("2026-05-17T10:20"), ms("2026-05-17T08:45")
    ) == ms("2026-05-17T10:45")
