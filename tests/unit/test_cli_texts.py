"""What is written on the command line, and how values are shown."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from zoneinfo import ZoneInfo

import click
import pytest

from celery_dtimer.cli.output import Output, from_now, iso, local, named, span, visible, width
from celery_dtimer.cli.parameters import ASSIGNMENT, DURATION, JSON_LIST, moment_in, seconds_in

PARIS = ZoneInfo("Europe/Paris")
NOW = datetime(2026, 12, 3, 8, 30, tzinfo=PARIS)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 90),
        ("0.5", 0.5),
        ("90s", 90),
        ("500ms", 0.5),
        ("15m", 900),
        ("15 min", 900),
        ("1h30m", 5400),
        ("1h 30m", 5400),
        ("2D", 172_800),
        ("1w", 604_800),
    ],
)
def test_a_length_of_time(text: str, seconds: float) -> None:
    assert seconds_in(text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "text", ["", " ", "x", "5 x", "1h30", "30 1h", "-5", "nan", "inf", "1e3", "1.h"]
)
def test_what_is_no_length_of_time(text: str) -> None:
    assert seconds_in(text) is None
    with pytest.raises(click.BadParameter, match="no length of time"):
        DURATION.convert(text, None, None)


def test_a_length_of_time_has_an_end() -> None:
    with pytest.raises(click.BadParameter, match="no length of time"):
        DURATION.convert("9" * 30, None, None)


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("now", NOW),
        ("2h ago", NOW - timedelta(hours=2)),
        ("in 30m", NOW + timedelta(minutes=30)),
        ("in 1h30m", NOW + timedelta(minutes=90)),
        ("23:59", datetime(2026, 12, 3, 23, 59, tzinfo=PARIS)),
        ("9:05:07", datetime(2026, 12, 3, 9, 5, 7, tzinfo=PARIS)),
        ("2026-12-31", datetime(2026, 12, 31)),  # noqa: DTZ001 - the app's zone
        ("2026-12-31T23:59", datetime(2026, 12, 31, 23, 59)),  # noqa: DTZ001
        ("2026-12-31 23:59:01", datetime(2026, 12, 31, 23, 59, 1)),  # noqa: DTZ001
        ("2026-12-31T23:59Z", datetime(2026, 12, 31, 23, 59, tzinfo=timezone.utc)),
        ("2026-12-31T22:59:00.250+01:00", datetime(2026, 12, 31, 22, 59, 0, 250_000, tzinfo=PARIS)),
    ],
)
def test_a_moment(text: str, moment: datetime) -> None:
    assert moment_in(text, NOW) == moment


@pytest.mark.parametrize(
    "text",
    [
        "",
        "soon",
        "2026",
        "20261231",
        "2026-13-01",
        "24:00:01",
        "25:00",
        "99:99",
        "ago",
        "in",
        "in x",
        "-1",
        "-5m",
        "0001-01-01",
        "9999-12-31",
    ],
)
def test_what_is_no_moment(text: str) -> None:
    assert moment_in(text, NOW) is None


def test_json_of_the_wrong_type_is_refused_with_the_value() -> None:
    assert JSON_LIST.convert("[1]", None, None) == [1]
    for text in ('{"a": 1}', "[1", '[{"__type__": "uuid", "__value__": 5}]'):
        with pytest.raises(click.BadParameter, match="is no JSON"):
            JSON_LIST.convert(text, None, None)


def test_an_option_is_json_or_a_text() -> None:
    assert ASSIGNMENT.convert("priority=5", None, None) == ("priority", 5)
    assert ASSIGNMENT.convert("queue=a=b", None, None) == ("queue", "a=b")
    with pytest.raises(click.BadParameter, match="NAME=VALUE"):
        ASSIGNMENT.convert("priority", None, None)


def test_a_value_is_one_line() -> None:
    assert visible("a\nb\tc\x1b[31m") == "a\\nb\\tc\\x1b[31m"
    assert visible("\udc80") == "\\udc80"
    assert visible("héllo 😀") == "héllo 😀"
    assert visible(None) == "-"
    assert named("") == '""'


def test_columns_are_counted_as_a_terminal_does() -> None:
    assert width("abc") == 3
    assert width("日本") == 4
    assert width("e\u0301") == 1


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.25, "0.25 s"),
        (59, "59 s"),
        (61, "1 min 1 s"),
        (3600, "1 h"),
        (90_061, "1 d 1 h"),
        (-120, "-2 min"),
    ],
)
def test_a_span_in_words(seconds: float, words: str) -> None:
    assert span(seconds) == words


def test_moments_for_programs_and_for_people() -> None:
    moment = datetime(2026, 10, 25, 0, 30, tzinfo=timezone.utc)
    assert iso(moment) == "2026-10-25T00:30:00.000Z"
    assert local(moment, PARIS) == "2026-10-25 02:30:00 CEST"
    assert from_now(moment, moment - timedelta(seconds=5)) == "in 5 s"
    assert from_now(moment, moment + timedelta(minutes=2)) == "2 min ago"


def terminal() -> Output:
    output = Output(as_json=False, zone=PARIS)
    output.is_terminal = True
    return output


def test_people_are_told_by_the_clocks_of_their_zone() -> None:
    text = "sent at 2026-12-03T07:30:00.250+00:00, or 2026-07-01T00:00:00Z"
    assert terminal().sentence(text) == (
        "sent at 2026-12-03 08:30:00.250 CET, or 2026-07-01 02:00:00 CEST"
    )
    assert Output(as_json=False, zone=PARIS).sentence(text) == text


def test_the_time_until_a_moment_goes_by_no_clock_on_a_wall() -> None:
    now = datetime(2027, 3, 27, 12, tzinfo=PARIS)
    assert from_now(datetime(2027, 3, 28, 12, tzinfo=PARIS), now) == "in 23 h"


def test_a_narrow_terminal_lacks_what_is_least_worth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    rows = [("n" * 12, "active", "12345678901234", "zzzzzzzz")]
    heading = ["name", "status", "runs", "task"]
    how = {"optional": ("runs", "task"), "whole": ("status",)}
    lines = terminal().aligned(heading, rows, **how)
    assert lines == ["NAME          STATUS  TASK", "nnnnnnnnnnnn  active  zzzzzzzz"]
    monkeypatch.setenv("COLUMNS", "16")
    assert terminal().aligned(heading, rows, **how)[1] == "nnnnnnn…  active"
    assert "12345678901234" in Output(as_json=False).aligned(heading, rows, **how)[1]


@pytest.mark.parametrize("columns", [20, 60, 200])
def test_a_table_fits_the_terminal(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    rows = [("a" * 50, "short", "日本" * 30), ("b", "", "c")]
    lines = terminal().aligned(["first", "second", "third"], rows)
    assert len(lines) == 3
    assert max(map(width, lines)) <= max(columns, 3 * 8 + 4)
    assert lines[2].startswith("b")
