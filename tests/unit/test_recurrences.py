"""Recurrence rules: what they mean beside dateutil's own iteration, and what is kept of them."""

from __future__ import annotations

import calendar
import copy
import json
import pickle
import random
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from itertools import islice
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from dateutil import easter, rrule, tz
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from celery_dtimer import occurrences
from celery_dtimer import rules as schedule_rules
from celery_dtimer.errors import InvalidTimerError
from celery_dtimer.schedules import Interval, Recurrence, Schedule, decode, parse

UTC = timezone.utc
PARIS, NEW_YORK = ZoneInfo("Europe/Paris"), ZoneInfo("America/New_York")
EPOCH = datetime(1970, 1, 1)  # noqa: DTZ001
START = datetime(2027, 1, 4, 9, 30)  # noqa: DTZ001 - a Monday
D = "DTSTART:20270104T093000\n"


def ms(moment: datetime | str) -> int:
    if isinstance(moment, str):
        moment = datetime.fromisoformat(moment)
    aware = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    return round(aware.timestamp() * 1000)


def parsed(value: Any, timezone: Any = None, **options: Any) -> Schedule:
    return parse(value, timezone=timezone, default_timezone=UTC, **options)


def runs(rule: Schedule, after: datetime, count: int) -> list[datetime]:
    """The first slots after a time of UTC, naive."""
    found: list[datetime] = []
    slot = rule.next_run_after(ms(after), 0)
    while slot is not None and len(found) < count:
        found.append(EPOCH + timedelta(milliseconds=slot))
        slot = rule.next_run_after(slot, 0)
    return found


def slots(rule: Schedule, after: int, until: int) -> Iterator[int]:
    """Yield the slots in ``(after, until]``, each from the one before, as a scheduler does."""
    slot = rule.next_run_after(after, after)
    while slot is not None and slot <= until:
        yield slot
        slot = rule.next_run_after(slot, slot)


# --- beside dateutil ----------------------------------------------------------------------------


def some(draw: st.DrawFn, least: int, most: int, *, negative: bool = False) -> list[int]:
    values = draw(st.lists(st.integers(least, most), min_size=1, max_size=5))
    return [value * draw(st.sampled_from([1, 1, -1])) for value in values] if negative else values


@st.composite
def rules(draw: st.DrawFn) -> rrule.rrule:
    """Rules that come true within a few years, so that dateutil finds their runs in time."""
    freq = draw(st.integers(rrule.YEARLY, rrule.SECONDLY))
    fields: dict[str, Any] = {"interval": draw(st.sampled_from([1, 1, 1, 2, 3, 5]))}
    has = st.sampled_from([True, False, False])
    if draw(has):
        fields["wkst"] = draw(st.integers(0, 6))
    if draw(has):
        fields["count"] = draw(st.integers(1, 60))
    may_choose_days = freq < rrule.SECONDLY  # in which dateutil looks for them second by second
    if may_choose_days and draw(has):
        fields["bymonth"] = some(draw, 1, 12)
    if draw(has):
        fields["byhour"] = some(draw, 0, 23)
    if draw(has):
        fields["byminute"] = some(draw, 0, 59)
    if draw(has):
        fields["bysecond"] = some(draw, 0, 59)
    days = draw(st.sampled_from(["", "", "monthday", "weekday", "nth", "yearday", "weekno"]))
    days = days if may_choose_days else ""
    if days == "monthday":
        fields["bymonthday"] = some(draw, 1, 28, negative=True)
    elif days == "weekday":
        fields["byweekday"] = some(draw, 0, 6)
    elif days == "nth" and freq <= rrule.MONTHLY:
        fields["byweekday"] = [
            rrule.weekday(d, draw(st.sampled_from([1, 2, 4, -1, -2]))) for d in some(draw, 0, 6)
        ]
    elif days == "yearday":
        fields["byyearday"] = some(draw, 1, 365, negative=True)
    elif days == "weekno" and freq == rrule.YEARLY:
        fields["byweekno"] = some(draw, 2, 51)  # about the others dateutil errs in some years
    elif days == "" and draw(has) and freq == rrule.YEARLY:
        fields["byeaster"] = some(draw, 0, 60, negative=True)
    if draw(has):
        fields["bysetpos"] = draw(st.lists(st.sampled_from([1, 2, -1]), min_size=1, max_size=2))
    start = datetime(2020, 1, 1) + timedelta(seconds=draw(st.integers(0, 4 * 365 * 86_400)))  # noqa: DTZ001
    try:
        return rrule.rrule(freq, dtstart=start, **fields)
    except ValueError:  # no time of its interval is listed
        assume(False)
        raise


@settings(max_examples=200, deadline=None)
@given(rule=rules())
def test_a_rule_runs_when_dateutil_says(rule: rrule.rrule) -> None:
    try:
        ours = parsed(rule)
    except InvalidTimerError as exc:
        assert "never occurs" in str(exc)  # noqa: PT017 - dateutil would look until the year 9999
        return
    found = runs(ours, rule._dtstart - timedelta(seconds=1), 20)
    listed = list(islice(rule, len(found)))
    assert found == listed
    if len(found) < 20 and rule._count is not None:
        assert len(found) == rule._count


@settings(max_examples=80, deadline=None)
@given(rule=rules(), which=st.integers(0, 1000), fraction=st.floats(0, 0.999))
def test_it_answers_the_same_from_any_moment(
    rule: rrule.rrule, which: int, fraction: float
) -> None:
    try:
        ours = parsed(rule)
    except InvalidTimerError as exc:
        assert "never occurs" in str(exc)  # noqa: PT017
        return
    listed = runs(ours, rule._dtstart - timedelta(seconds=1), 200)
    before, *later = listed[which % len(listed) :][:2]
    assert runs(ours, before - timedelta(milliseconds=1), 1) == [before]
    if later:
        assert runs(ours, before + (later[0] - before) * fraction, 1) == later


def random_rule(random_: random.Random) -> rrule.rrule:
    """Any rule at all, likely one that never comes true."""

    def numbers(least: int, most: int) -> Any:
        values = [random_.randint(least, most) for _ in range(random_.randint(1, 4))]
        values = [value for value in values if value or least == 0] or [most]
        return values[0] if random_.random() < 0.3 else values

    weekdays = [rrule.MO, rrule.TU, rrule.SU, 3, 4]
    nth = [rrule.FR(1), rrule.MO(-1), rrule.WE(2)]
    choices: dict[str, Any] = {
        "interval": lambda: random_.choice([1, 2, 7, 61]),
        "wkst": lambda: random_.choice([0, 1, 6, rrule.SU]),
        "bysetpos": lambda: numbers(-9, 9),
        "bymonth": lambda: numbers(1, 12),
        "bymonthday": lambda: numbers(-31, 31),
        "byyearday": lambda: numbers(-366, 366),
        "byeaster": lambda: numbers(0, 50),
        "byweekno": lambda: numbers(1, 53),
        "byweekday": lambda: random_.choice([weekdays, nth, rrule.FR(2), 5, rrule.SA]),
        "byhour": lambda: numbers(0, 23),
        "byminute": lambda: numbers(0, 59),
        "bysecond": lambda: numbers(0, 59),
    }
    fields = {name: make() for name, make in choices.items() if random_.random() < 0.25}
    if random_.random() < 0.3:
        end = random_.choice(["count", "until"])
        fields[end] = 5 if end == "count" else START + timedelta(days=999, microseconds=5)
    return rrule.rrule(random_.randrange(7), dtstart=START, **fields)


def test_the_text_of_a_rule_loses_nothing() -> None:
    """Every attribute of several hundred rules, after a way through our text."""
    random_, compared = random.Random(7), 0
    while compared < 400:
        try:
            rule = random_rule(random_)
            ours = parsed(rule)
        except ValueError:  # a rule that never runs, to one of the two
            continue
        assert isinstance(ours, Recurrence)
        read = rrule.rrulestr(ours.text)
        for name, value in vars(rule).items():
            if name not in ("_original_rule", "_cache_lock", "_until", "_bysetpos"):
                assert getattr(read, name) == value, (name, ours.text)
        assert read._until == (rule._until and rule._until.replace(microsecond=0))
        assert set(read._bysetpos or ()) == set(rule._bysetpos or ())
        assert parsed(ours.text) == ours, "its own text is its one form"
        compared += 1


def test_easter_is_when_it_is() -> None:
    for year in range(1900, 2200):
        assert occurrences._easter(year) == easter.easter(year).toordinal()


@pytest.mark.parametrize("wkst", range(7))
def test_weeks_are_numbered_as_iso_does_from_any_first_day(wkst: int) -> None:
    for ordinal in range(datetime(2015, 1, 1).toordinal(), datetime(2035, 1, 1).toordinal()):  # noqa: DTZ001
        number, last = occurrences._week_of(ordinal, wkst)
        assert 1 <= number <= last in (52, 53)
        if wkst == 0:
            assert number == datetime.fromordinal(ordinal).isocalendar()[1]


# --- what is given, and what is kept of it ------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (f"{D}RRULE:FREQ=DAILY", f"{D}RRULE:FREQ=DAILY"),
        (f"{D}freq=daily;interval=1", f"{D}RRULE:FREQ=DAILY"),
        (f"{D}RRULE:BYDAY=FR,MO;FREQ=WEEKLY;", f"{D}RRULE:FREQ=WEEKLY;BYDAY=MO,FR"),
        ("RRULE:FREQ=DAILY\r\nDTSTART:20270104T093000", f"{D}RRULE:FREQ=DAILY"),
        (f"{D}RRULE:FREQ=WEEKLY;BYDAY=MO,\r\n FR", f"{D}RRULE:FREQ=WEEKLY;BYDAY=MO,FR"),
        (f"{D}RRULE:FREQ=MONTHLY;BYDAY=-1FR", f"{D}RRULE:FREQ=MONTHLY;BYDAY=-1FR"),
        (f"{D}RRULE:FREQ=MONTHLY;BYDAY=FR(-1)", f"{D}RRULE:FREQ=MONTHLY;BYDAY=-1FR"),
        (f"{D}RRULE:FREQ=WEEKLY;WKST=MO;BYDAY=2MO", f"{D}RRULE:FREQ=WEEKLY;BYDAY=MO"),
        ("DTSTART;VALUE=DATE:20270104\nFREQ=DAILY", "DTSTART:20270104T000000\nRRULE:FREQ=DAILY"),
        (rrule.rrule(rrule.DAILY, dtstart=START), f"{D}RRULE:FREQ=DAILY"),
        (
            rrule.rrule(rrule.DAILY, dtstart=START.replace(microsecond=999_999), byeaster=0),
            f"{D}RRULE:FREQ=DAILY;BYEASTER=0",
        ),
        (
            rrule.rrule(rrule.YEARLY, dtstart=START, byweekday=rrule.MO(2), wkst=6, count=3),
            f"{D}RRULE:FREQ=YEARLY;WKST=SU;COUNT=3;BYDAY=+2MO",
        ),
    ],
)
def test_every_form_is_kept_in_one(value: Any, text: str) -> None:
    assert parsed(value, "Europe/Paris") == Recurrence(text, "Europe/Paris")


AWARE = START.replace(tzinfo=PARIS)


@pytest.mark.parametrize(
    ("value", "zone", "rule"),
    [
        (rrule.rrule(rrule.DAILY, dtstart=START), None, Recurrence(f"{D}FREQ=DAILY")),
        (
            rrule.rrule(rrule.DAILY, dtstart=AWARE),
            None,
            Recurrence(f"{D}FREQ=DAILY", "Europe/Paris"),
        ),
        (
            rrule.rrule(rrule.DAILY, dtstart=AWARE),
            "America/New_York",
            Recurrence("DTSTART:20270104T033000\nFREQ=DAILY", "America/New_York"),
        ),
        (
            rrule.rrule(rrule.DAILY, dtstart=AWARE, until=datetime(2027, 7, 1, tzinfo=UTC)),
            None,
            Recurrence(f"{D}FREQ=DAILY;UNTIL=20270701T020000", "Europe/Paris"),
        ),
        (
            rrule.rrule(rrule.DAILY, dtstart=START.replace(tzinfo=tz.gettz("Europe/Paris"))),
            None,
            Recurrence(f"{D}FREQ=DAILY", "Europe/Paris"),
        ),
        (
            rrule.rrule(rrule.DAILY, dtstart=START.replace(tzinfo=tz.UTC)),
            None,
            Recurrence(f"{D}FREQ=DAILY"),
        ),
        (
            "DTSTART;TZID=Europe/Paris:20270104T093000\nRRULE:FREQ=DAILY;UNTIL=20270701T000000Z",
            None,
            Recurrence(f"{D}FREQ=DAILY;UNTIL=20270701T020000", "Europe/Paris"),
        ),
        (
            "DTSTART:20270104T083000Z\nRRULE:FREQ=DAILY",
            "Europe/Paris",
            Recurrence(f"{D}FREQ=DAILY", "Europe/Paris"),
        ),
    ],
)
def test_the_zone_is_the_first_that_is_named(value: Any, zone: str | None, rule: Schedule) -> None:
    assert parsed(value, zone) == rule


def test_a_text_without_a_start_begins_when_the_timer_does() -> None:
    start_ms = ms(AWARE) + 999
    assert parsed("RRULE:FREQ=DAILY", "Europe/Paris", start_ms=start_ms) == Recurrence(
        f"{D}FREQ=DAILY", "Europe/Paris"
    )
    with pytest.raises(InvalidTimerError, match="DTSTART"):
        parsed("FREQ=DAILY")
    with pytest.raises(InvalidTimerError, match="DTSTART"):
        Recurrence("FREQ=DAILY")


def test_the_first_day_of_the_week_is_monday_whatever_the_process_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weekly = f"{D}RRULE:FREQ=WEEKLY;INTERVAL=2;BYDAY=SU,MO"
    before = runs(Recurrence(weekly), START, 6)
    monkeypatch.setattr(calendar, "firstweekday", lambda: calendar.SUNDAY)
    occurrences.pattern_of.cache_clear()
    assert runs(Recurrence(weekly), START, 6) == before
    object_ = rrule.rrule(rrule.WEEKLY, interval=2, byweekday=(rrule.SU, rrule.MO), dtstart=START)
    assert (
        parsed(object_).encode()["rrule"] == f"{D}RRULE:FREQ=WEEKLY;INTERVAL=2;WKST=SU;BYDAY=MO,SU"
    )


class Special(rrule.rrule):
    """A rule of somebody's own."""


def with_count_and_until() -> rrule.rrule:
    rule = rrule.rrule(rrule.DAILY, dtstart=START, count=3)
    rule._until = START
    return rule


def a_set() -> rrule.rruleset:
    both = rrule.rruleset()
    both.rrule(rrule.rrule(rrule.DAILY, dtstart=START))
    return both


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (a_set(), "sets of rules"),
        (Special(rrule.DAILY, dtstart=START), "subclasses"),
        (with_count_and_until(), "COUNT='3'.*not both"),
        (rrule.rrule(rrule.DAILY, dtstart=START, byhour=()), "without empty lists"),
        (rrule.rrule(rrule.YEARLY, dtstart=START, bymonth=()), "without empty lists"),
        (rrule.rrule(rrule.DAILY, dtstart=START, interval=0), "INTERVAL='0'.*1 to"),
        (rrule.rrule(rrule.DAILY, dtstart=START, count=0), "COUNT='0'"),
        (rrule.rrule(rrule.DAILY, dtstart=START, count=10_001), "COUNT='10001'.*max_runs"),
        (rrule.rrule(rrule.DAILY, dtstart=START, bymonth=13), "BYMONTH='13'.*1 to 12"),
        (
            rrule.rrule(rrule.MONTHLY, dtstart=START, byweekday=(rrule.MO, rrule.FR(1))),
            "BYDAY=.*before every weekday or before none",
        ),
        (f"{D}RRULE:FREQ=DAILY\nEXDATE:20270105T093000", "EXDATE.*cannot be stored"),
        (f"{D}RRULE:FREQ=DAILY\nRDATE:20270105T093000", "RDATE.*cannot be stored"),
        (f"{D}RRULE:FREQ=DAILY\nRRULE:FREQ=WEEKLY", "one RRULE"),
        (f"{D}{D}RRULE:FREQ=DAILY", "at most one DTSTART"),
        (D, "one RRULE"),
        ("BEGIN:VEVENT", "one RRULE"),
        ("DTSTART:tomorrow\nFREQ=DAILY", "DTSTART='tomorrow'"),
        ("DTSTART:20270230\nFREQ=DAILY", "DTSTART='20270230'"),
        ("DTSTART;TZID=Mars/Olympus:20270104T093000\nFREQ=DAILY", "timezone='Mars/Olympus'"),
        ("DTSTART;X=1:20270104T093000\nFREQ=DAILY", "DTSTART=.*TZID"),
        ("DTSTART:00010101T000000\nFREQ=DAILY", "DTSTART=.*years 2 to 9998"),
        (f"{D}FREQ=OFTEN", "FREQ='OFTEN'.*YEARLY"),
        (f"{D}RRULE:INTERVAL=2", "FREQ=None"),
        (f"{D}FREQ=DAILY;BYMOON=1", "BYMOON=1.*each of these at most once"),
        (f"{D}FREQ=DAILY;FREQ=DAILY", "at most once"),
        (f"{D}FREQ=DAILY;UNTIL=5", "UNTIL='5'"),
        (f"{D}FREQ=DAILY;UNTIL=20260101T000000", "never occurs"),
        (f"{D}FREQ=DAILY;COUNT=3;UNTIL=20280101T000000", "not both"),
        (f"{D}FREQ=DAILY;INTERVAL=-1", "INTERVAL='-1'"),
        (f"{D}FREQ=DAILY;BYHOUR=24", "BYHOUR='24'.*0 to 23"),
        (f"{D}FREQ=DAILY;BYHOUR=", "BYHOUR=''"),
        (f"{D}FREQ=DAILY;BYMONTHDAY=0", "BYMONTHDAY='0'.*-31 to -1"),
        (f"{D}FREQ=DAILY;BYDAY=XX", "BYDAY='XX'"),
        (f"{D}FREQ=MONTHLY;BYDAY=54MO", "BYDAY='54MO'"),
        (f"{D}FREQ=DAILY;WKST=1MO", "WKST='1MO'"),
    ],
)
def test_what_is_refused_names_the_part_and_the_value(value: Any, message: str) -> None:
    with pytest.raises(InvalidTimerError, match=message):
        parsed(value)


@pytest.mark.parametrize(
    "rule",
    [
        "FREQ=YEARLY;BYMONTH=2;BYMONTHDAY=30",
        "FREQ=DAILY;BYMONTH=2;BYMONTHDAY=30",
        "FREQ=MINUTELY;BYMONTH=2;BYMONTHDAY=30",
        "FREQ=SECONDLY;BYMONTH=2;BYMONTHDAY=30",
        "FREQ=SECONDLY;INTERVAL=2;BYSECOND=1,3,5",
        "FREQ=SECONDLY;INTERVAL=86399;BYHOUR=3;BYMINUTE=0;BYSECOND=0",
        "FREQ=HOURLY;INTERVAL=24;BYHOUR=10",
        "FREQ=SECONDLY;BYSETPOS=2",
        "FREQ=MONTHLY;BYDAY=+6MO",
        "FREQ=MONTHLY;BYDAY=MO;BYSETPOS=6",
        "FREQ=YEARLY;BYWEEKNO=1;BYMONTH=7",
    ],
)
def test_a_rule_that_never_comes_true_is_refused_at_once(rule: str) -> None:
    """The test's own timeout says what is not at once."""
    with pytest.raises(InvalidTimerError, match=f"{rule.split(';')[0]}.*never occurs"):
        parsed(D + rule)


def test_rules_that_began_long_ago_answer_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """No year before the one that is asked about is looked at."""
    years: list[int] = []
    find = occurrences._days_of_year.__wrapped__

    def look(days: occurrences._Days, year: int) -> tuple[int, ...]:
        years.append(year)
        return find(days, year)

    old = "DTSTART:19010101T000000\nRRULE:"
    for freq in ("MINUTELY", "DAILY", "WEEKLY", "MONTHLY", "YEARLY"):
        rule = Recurrence(f"{old}FREQ={freq};INTERVAL=3;BYMONTHDAY=1,2,3,4,5,6,7,8,9")
        monkeypatch.setattr(occurrences, "_days_of_year", look)
        assert rule.next_run_after(ms("2026-05-17"), 0) is not None
        monkeypatch.undo()
    assert set(years) <= set(range(2026, 2030))


def test_the_runs_of_a_rule_with_count_end() -> None:
    rule = Recurrence(f"{D}RRULE:FREQ=DAILY;COUNT=1000")
    assert rule.count_between(0, ms("2040-01-01"), 0) == 1000
    last = START + timedelta(days=999)
    assert runs(rule, last - timedelta(seconds=1), 5) == [last]
    assert rule.next_run_after(ms(last), 0) is None


@settings(max_examples=300, deadline=None)
@given(
    rule=rules(),
    zone=st.sampled_from(["UTC", "Europe/Paris", "Australia/Lord_Howe"]),
    dst=st.sampled_from(["cron", "skip", "shift", "both"]),
    day=st.integers(-1, 400),
    second=st.integers(0, 86_400),
    length=st.integers(0, 3600) | st.integers(0, 40 * 86_400),
    last=st.integers(1, 30),
)
def test_any_rule_is_counted_as_it_runs(
    rule: rrule.rrule, zone: str, dst: str, day: int, second: int, length: int, last: int
) -> None:
    after = ms(rule._dtstart + timedelta(days=day, seconds=second))
    try:
        ours = parsed(rule, zone, dst=dst)
    except InvalidTimerError as exc:
        assert "never occurs" in str(exc)  # noqa: PT017
        return
    found = list(islice(slots(ours, after, after + 1000 * length), 5000))
    until = after + 1000 * length if len(found) < 5000 else found[-1]
    assert ours.count_between(after, until, 0) == len(found)
    begin = found[-last] if last <= len(found) else None
    assert ours.last_runs_begin(after, until, 0, last) == begin


@pytest.mark.parametrize(
    ("text", "countable"),
    [
        *(("FREQ=DAILY;INTERVAL=3", True), ("FREQ=SECONDLY;INTERVAL=7", True)),
        *(("FREQ=MINUTELY;INTERVAL=15;BYHOUR=9,10;BYDAY=MO,TU", True), ("FREQ=YEARLY", True)),
        *(("FREQ=SECONDLY;BYMINUTE=0,30", True), ("FREQ=HOURLY;BYSETPOS=-1;BYMINUTE=5,6", True)),
        *(("FREQ=DAILY;BYSETPOS=1;BYHOUR=5,6", True), ("FREQ=MONTHLY;BYDAY=-1FR", True)),
        *(("FREQ=WEEKLY;INTERVAL=2;BYDAY=MO;COUNT=99", True), ("FREQ=YEARLY;INTERVAL=4", False)),
        *(("FREQ=MONTHLY;BYDAY=MO,TU,WE,TH,FR;BYSETPOS=-1", False),),
        *(("FREQ=YEARLY;BYEASTER=1", False), ("FREQ=MINUTELY;INTERVAL=7;BYHOUR=1,2", False)),
    ],
)
def test_whole_years_are_counted_as_they_run(text: str, countable: bool) -> None:
    rule = Recurrence(f"{D}RRULE:{text}", "Europe/Paris")
    assert rule.is_countable == countable
    for after, until in (
        ("2026-12-01", "2027-01-04T12:30"),
        ("2027-03-28", "2027-03-28T12:00"),
        ("2027-05-05", "2028-05-05" if "SECONDLY" in text else "2037-05-05"),
    ):
        number = sum(1 for _ in islice(slots(rule, ms(after), ms(until)), 50_000))
        counted = rule.count_between(ms(after), ms(until), 0)
        assert counted == number or counted > number == 50_000


def test_a_gap_of_decades_ends_a_rule_where_it_is_counted_too() -> None:
    """As nothing is looked for beyond it."""
    rule = Recurrence("DTSTART:20000229T000000\nRRULE:FREQ=YEARLY;INTERVAL=44")
    assert rule.count_between(ms("1999-01-01"), ms("2200-01-01"), 0) == 1


def test_what_is_gone_through_is_counted_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule_rules, "_MAX_COUNT", 50)
    gone_through = Recurrence(f"{D}RRULE:FREQ=MINUTELY;INTERVAL=7;BYHOUR=1,2,3")
    counted = Recurrence(f"{D}RRULE:FREQ=MINUTELY;INTERVAL=6;BYHOUR=1,2,3")
    after, until = ms("2027-02-01"), ms("2027-03-01")
    assert gone_through.count_between(after, until, 0) == 50
    assert counted.count_between(after, until, 0) == 28 * 30


def test_until_is_the_last_run() -> None:
    rule = Recurrence(f"{D}RRULE:FREQ=DAILY;UNTIL=20270106T093000")
    assert runs(rule, START, 9) == [START + timedelta(days=1), START + timedelta(days=2)]


def test_a_fold_that_is_the_last_run_comes_twice_with_both() -> None:
    """No later time is listed, yet clocks show this one again."""
    text = "DTSTART:20261001T013000\nRRULE:FREQ=DAILY;UNTIL=20261101T013000"
    found = runs(Recurrence(text, "America/New_York", "both"), datetime(2026, 11, 1), 5)  # noqa: DTZ001
    assert [each.hour for each in found] == [5, 6]
    assert len(runs(Recurrence(text, "America/New_York"), datetime(2026, 11, 1), 5)) == 1  # noqa: DTZ001


@pytest.mark.parametrize(
    ("freq", "elapsed"),
    [
        ("DAILY", False),
        ("WEEKLY", False),
        ("MONTHLY", False),
        ("YEARLY", False),
        ("HOURLY", True),
        ("MINUTELY", True),
        ("SECONDLY", True),
    ],
)
def test_rules_shorter_than_a_day_follow_elapsed_time(freq: str, elapsed: bool) -> None:
    assert Recurrence(f"{D}RRULE:FREQ={freq}").follows_elapsed_time == elapsed


@pytest.mark.parametrize("moment", [-(10**20), ms("0002-01-05"), ms("9998-12-31"), 10**20])
def test_moments_that_no_calendar_shows_are_no_error(moment: int) -> None:
    for rule in ("FREQ=DAILY", "FREQ=SECONDLY", "FREQ=YEARLY;BYSETPOS=1", "FREQ=WEEKLY;COUNT=3"):
        slot = Recurrence(D + rule, "America/New_York").next_run_after(moment, 0)
        assert slot is None or slot > moment


# --- storing ------------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(
    rule=rules(),
    zone=st.sampled_from(["UTC", "Europe/Paris"]),
    dst=st.sampled_from(["cron", "skip"]),
)
def test_a_rule_survives_storage(rule: rrule.rrule, zone: str, dst: str) -> None:
    try:
        ours = parsed(rule, zone, dst=dst)
    except InvalidTimerError:
        assume(False)
        raise
    restored = decode(json.loads(json.dumps(ours.encode())))
    assert restored == ours
    assert hash(restored) == hash(ours)
    assert pickle.loads(pickle.dumps(ours)) == ours  # noqa: S301
    assert copy.deepcopy(ours) == ours
    assert restored.next_run_after(0, 0) == ours.next_run_after(0, 0)


def test_what_is_stored_and_said() -> None:
    plain = Recurrence(f"{D}RRULE:FREQ=DAILY")
    assert plain.encode() == {"rrule": f"{D}RRULE:FREQ=DAILY"}
    assert plain.describe() == "FREQ=DAILY from 2027-01-04T09:30:00 (UTC)"
    other = Recurrence(f"{D}RRULE:FREQ=DAILY", "Europe/Paris", "skip")
    assert other.encode() == {"rrule": plain.text, "tz": "Europe/Paris", "dst": "skip"}
    assert other.describe() == "FREQ=DAILY from 2027-01-04T09:30:00 (Europe/Paris, dst skip)"
    assert plain != Interval(86_400_000)


@pytest.mark.parametrize(
    "data",
    [
        *(
            {"rrule": 5},
            {"rrule": ""},
            {"rrule": "FREQ=DAILY"},
            {"rrule": f"{D}FREQ=DAILY", "x": 1},
        ),
        *({"rrule": f"{D}FREQ=DAILY", "tz": 5}, {"rrule": f"{D}FREQ=DAILY", "dst": "none"}),
        *({"rrule": f"{D}FREQ=DAILY", "dst": None}, {"rrule": f"{D}FREQ=DAILY;BYDAY=\ud800"}),
    ],
)
def test_stored_data_that_means_nothing_is_refused(data: object) -> None:
    with pytest.raises(InvalidTimerError):
        decode(data)
