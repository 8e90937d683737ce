"""Names and arguments of any kind survive storage and reach the broker unchanged."""

from __future__ import annotations

import base64
import math
import uuid
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from typing import Any

import pytest
from kombu.utils import json

from celery_dtimer import DistributedTimer
from celery_dtimer.errors import DistributedTimerError, InvalidTimerError, TimerNotFoundError
from tests.conftest import KeyLeaks, MakeApp, ReadQueue
from tests.integration.conftest import StartTimers
from tests.naming import named
from tests.waiting import wait_until

NAMES = [
    "",
    "plain",
    "a:b",
    "a b",
    "{x}",
    "}{",
    "*?[]",
    "^$\\",
    "new\nline",
    "tab\tand\r",
    "\x00zero",
    "caf\u00e9",  # NFC
    "cafe\u0301",  # NFD: another name
    "Case",
    "case",
    ":schedule",
    ":lock",
    "timer_queue:{orders}",
    "unassigned",
    "None",
    "0",
    "日本語 🎉",
    "n" * 5000,
]

ARGUMENTS: list[Any] = [
    uuid.UUID(int=7),
    Decimal("1.10"),
    b"\x00\xff",
    datetime(2026, 3, 1, 12, 30, 0, 123456),  # noqa: DTZ001 naive on purpose
    datetime(2026, 3, 1, 12, 30, tzinfo=timezone.utc),
    datetime(2026, 3, 1, 12, 30, tzinfo=timezone(timedelta(hours=5, minutes=45))),
    date(2026, 3, 1),
    time(12, 30),
    2**70,
    -0.5,
    True,
    None,
    "\x00 🎉 \ud800",
    [[], {}, [[1]]],
    {"key": {"nested": [None]}},
    {"__type__": "interval"},
    {"__kombu__": 1},
    "x" * 200_000,
]

REFUSED: list[Any] = [
    timedelta(seconds=1),
    {1, 2},
    {1: "int key"},
    object(),
    print,
    {"__type__": "uuid", "__value__": "hello"},
]


def arguments_of(message: dict[str, Any]) -> Any:
    """Return what a worker would decode from a message's body."""
    return json.loads(base64.b64decode(message["body"]))


@pytest.fixture
def timers(make_app: MakeApp) -> DistributedTimer:
    return DistributedTimer(make_app())


def test_any_name_is_created_found_changed_fired_and_deleted(
    make_app: MakeApp, read_queue: ReadQueue, start_timers: StartTimers
) -> None:
    app = make_app()
    timers, reader = start_timers(app), read_queue(app)
    ids = {name: timers.create_timer(name, 3600, "record", args=[name]) for name in NAMES}

    assert len(set(ids.values())) == len(NAMES)
    assert {timer.name for timer in timers.get_timers(task="record")} == set(NAMES)
    for name in NAMES:
        assert timers.get_timer(name).id == ids[name]
        timers.update_timer(name, args=[name, "changed"])
        timers.trigger_timer(name)
    wait_until(lambda: len(reader.ledger) == len(NAMES), "all names to fire", 10)
    assert {arguments_of(message)[0][0] for message in reader.messages} == set(NAMES)
    assert reader.ledger.names() == set(NAMES)

    for name in NAMES:
        timers.delete_timer(name)
    assert timers.get_timers(task="record") == []


@pytest.mark.parametrize("name", [None, 7, b"bytes"])
def test_a_name_that_is_none_is_refused(timers: DistributedTimer, name: Any) -> None:
    with pytest.raises(InvalidTimerError, match="name"):
        timers.create_timer(name, 10, "record")


def test_arguments_come_back_and_arrive_as_they_went_in(
    make_app: MakeApp, read_queue: ReadQueue, start_timers: StartTimers
) -> None:
    app = make_app()
    timers, reader = start_timers(app), read_queue(app)
    timers.create_timer("typed", 3600, "record", args=ARGUMENTS, kwargs={"all": ARGUMENTS})
    stored = timers.get_timer("typed")
    timers.trigger_timer("typed")
    wait_until(lambda: reader.messages, "the message")
    args, kwargs, _ = arguments_of(reader.messages[0])

    for arrived in (list(stored.args), stored.kwargs["all"], args, kwargs["all"]):
        assert arrived == ARGUMENTS
        assert [type(value) for value in arrived] == [type(value) for value in ARGUMENTS]


def test_nan_arrives_as_nan(timers: DistributedTimer) -> None:
    timers.create_timer("nan", 3600, "record", args=[math.nan])
    (value,) = timers.get_timer("nan").args
    assert math.isnan(value)


@pytest.mark.parametrize("value", REFUSED, ids=named)
@pytest.mark.parametrize("place", ["args", "kwargs"])
def test_what_cannot_be_stored_is_refused_and_leaves_nothing(
    timers: DistributedTimer, key_leaks: KeyLeaks, prefix: str, place: str, value: Any
) -> None:
    arguments = {"args": [value]} if place == "args" else {"kwargs": {"key": value}}
    with pytest.raises(InvalidTimerError, match=place):
        timers.create_timer("refused", 3600, "record", **arguments)
    with pytest.raises(TimerNotFoundError):
        timers.get_timer("refused")
    assert not [key for key in key_leaks.found() if key.startswith(f"{prefix}timer")]


BAD_SCHEDULES: list[Any] = [
    0,
    -1,
    True,
    math.nan,
    math.inf,
    timedelta(0),
    "60 * * * *",
    "* * * * 8",
    "* * * *",
    "* * * * * * *",
    "@sometimes",
    "0 0 31 4 *",
    "1/5 * * * *",
    "",
    None,
    object(),
]


@pytest.mark.parametrize("schedule", BAD_SCHEDULES, ids=named)
def test_a_wrong_schedule_is_refused_by_name_and_leaves_nothing(
    timers: DistributedTimer, key_leaks: KeyLeaks, prefix: str, schedule: Any
) -> None:
    with pytest.raises(InvalidTimerError, match=r"schedule|minute|day_of"):
        timers.create_timer("refused", schedule, "record")
    assert not [key for key in key_leaks.found() if key.startswith(f"{prefix}timer")]


def test_one_bad_timer_in_bulk_creates_none_of_them(timers: DistributedTimer) -> None:
    good = {"name": "good", "schedule": 10, "callback": "record"}
    with pytest.raises(DistributedTimerError, match="bad"):
        timers.create_timers([good, {**good, "name": "bad", "schedule": -1}])
    assert list(timers.get_timers()) == []
