"""The stored values: ids, definitions and their revisions, states, runs."""

from __future__ import annotations

import base64
import hashlib
import math
import os
import uuid
from dataclasses import replace
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kombu.utils import json

from celery_dtimer import model
from celery_dtimer.errors import InvalidTimerError
from celery_dtimer.model import (
    MAX_DEFINITION_BYTES,
    MAX_DEPTH,
    MAX_DESCRIPTION_BYTES,
    MAX_NAME_BYTES,
    MAX_OPTIONS,
    MAX_OPTIONS_BYTES,
    MAX_TASK_BYTES,
    UNASSIGNED,
    Definition,
    Lease,
    Run,
    Timer,
    TimerState,
    _is_plain,
    check_size,
    check_storable,
    decode_definition,
    is_timer_id,
    new_instance_id,
    new_trigger_id,
    process_instance_id,
    schedule_part,
    timer_id,
    to_datetime,
    to_ms,
)
from celery_dtimer.options import check_options
from celery_dtimer.schedules import Interval
from tests.naming import named

NOW_MS = 1_750_000_000_000
EVERY_10_S = Interval(10_000)


def define(**fields: Any) -> Definition:
    return Definition(**{"name": "n", "task": "t", "schedule": EVERY_10_S, **fields})


def a_state(**fields: Any) -> TimerState:
    known = {"id": timer_id("n"), "status": "active", "revision": "r", "created_ms": NOW_MS}
    return TimerState(**{**known, **fields})


# ------------------------------------------------------------------ moments and ids


@given(st.integers(-62_000_000_000_000, 250_000_000_000_000))
def test_a_moment_keeps_its_milliseconds(moment_ms: int) -> None:
    moment = to_datetime(moment_ms)
    assert moment.tzinfo is timezone.utc
    assert to_ms(moment) == moment_ms


@given(st.text(st.characters(exclude_categories=[])))
def test_any_name_has_an_id_that_is_safe_in_a_key(name: str) -> None:
    assert is_timer_id(timer_id(name))
    assert timer_id(name) == timer_id(name)


@given(st.text(st.characters(exclude_categories=[])))
def test_an_id_is_a_digest_in_base_32(name: str) -> None:
    digest = hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=16).digest()
    assert timer_id(name) == base64.b32encode(digest).decode().rstrip("=").lower()


def test_names_that_look_alike_have_ids_of_their_own() -> None:
    names = ["a", "A", "a ", "", "caf\u00e9", "cafe\u0301", "\ud800", "\ud801", timer_id("a")]
    assert len({timer_id(name) for name in names}) == len(names)


@pytest.mark.parametrize("text", ["", "a" * 25, "a" * 27, "A" * 26, "1" * 26, "a" * 25 + "\n"])
def test_other_texts_are_no_ids(text: str) -> None:
    assert not is_timer_id(text)


def test_triggers_and_instances_get_new_ids_each_time() -> None:
    assert new_trigger_id() != new_trigger_id()
    assert is_timer_id(new_trigger_id())
    assert new_instance_id() != new_instance_id()


def test_an_instance_id_tells_host_and_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "a host:{1}")
    host, pid, nonce = new_instance_id().split(":")
    assert (host, int(pid), len(nonce)) == ("a-host--1-", os.getpid(), 8)


def test_a_process_has_one_instance_id_and_a_fork_its_own() -> None:
    mine = process_instance_id()
    assert process_instance_id() == mine
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.write(writing, process_instance_id().encode())
        os._exit(0)
    os.waitpid(child, 0)
    theirs = os.read(reading, 200).decode()
    os.close(reading)
    os.close(writing)
    assert theirs.split(":")[1] == str(child)
    assert theirs.rsplit(":", 1) != mine.rsplit(":", 1)


# ------------------------------------------------------------------ definitions

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=[]))
    | st.binary()
    | st.uuids()
    | st.decimals(allow_nan=False)
    | st.dates()
    | st.datetimes().map(lambda moment: moment.replace(fold=0)),  # no message carries a fold
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=6,
)


@settings(max_examples=30)
@given(st.lists(VALUES, max_size=4), st.dictionaries(st.text(), VALUES, max_size=3))
def test_what_is_storable_comes_back_with_its_types(
    args: list[Any], kwargs: dict[str, Any]
) -> None:
    definition = define(args=args, kwargs=kwargs)
    try:
        check_storable("args", args)
        check_storable("kwargs", kwargs)
    except InvalidTimerError:  # a dict that looks like one of Celery's typed values
        return
    read = decode_definition(definition.blob)
    assert (read.args, read.kwargs) == (args, kwargs)
    assert repr(read.args) == repr(args)
    assert read.revision == definition.revision
    assert definition.blob.isascii()


STORABLE: list[Any] = [
    uuid.UUID(int=7),
    Decimal("1.10"),
    Decimal("Infinity"),
    b"\x00\xff",
    datetime(2026, 3, 1, 12, 30, 0, 123456),  # noqa: DTZ001 naive on purpose
    datetime(2026, 3, 1, 12, 30, tzinfo=timezone(timedelta(hours=5, minutes=45))),
    date(2026, 3, 1),
    time(12, 30),
    2**70,
    math.nan,
    -math.inf,
    "\x00 🎉 \ud800",
    "x" * 1_000_000,
    {"__type__": "interval"},
    {"__kombu__": 1},
    (1, (2, (3,))),
]
REFUSED: list[Any] = [
    timedelta(1),
    {1, 2},
    {1: "int key"},
    object(),
    print,
    Decimal("sNaN"),
    {"__type__": "uuid", "__value__": "hello"},
    {"__type__": "uuid", "__value__": str(uuid.UUID(int=1))},
    1j,
    "\ud83d\ude00",  # two halves come back as one character
    10**5000,
]


@pytest.mark.parametrize("value", STORABLE, ids=named)
def test_what_celery_carries_is_storable(value: Any) -> None:
    check_storable("args", [value])


@pytest.mark.parametrize("value", REFUSED, ids=named)
def test_what_celery_changes_is_refused_by_the_fields_name(value: Any) -> None:
    with pytest.raises(InvalidTimerError, match=r"^args=.*expected what Celery's JSON carries"):
        check_storable("args", [value])


def test_what_contains_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(InvalidTimerError, match=r"^args="):
        check_storable("args", loop)


@pytest.mark.parametrize("field", ["args", "kwargs"])
@pytest.mark.parametrize("value", [*STORABLE, *REFUSED, "a", 1, True, None, 0.5], ids=named)
def test_what_passes_at_a_glance_comes_back_as_it_went_in(field: str, value: Any) -> None:
    given: Any = [value] if field == "args" else {"key": value}
    if _is_plain(given):
        read = decode_definition(define(**{field: given}).blob)
        assert repr(getattr(read, field)) == repr(given)


def test_the_stored_form_of_a_definition_does_not_change() -> None:
    timer = define(args=(1, "\u00e9"), kwargs={"a": None}, options={"queue": "q"}, description="d")
    assert timer.blob == (
        '{"name":"n","task":"t","schedule":{"every":10000},"args":[1,"\\u00e9"],'
        '"kwargs":{"a":null},"options":{"queue":"q"},"description":"d"}'
    )
    assert timer.revision == "tWrDGuV_wuKyySAV"


def test_what_has_its_default_is_not_stored() -> None:
    assert json.loads(define().blob) == {"name": "n", "task": "t", "schedule": {"every": 10_000}}
    full = define(args=[1], kwargs={"a": 1}, options={"queue": "q"}, description="d")
    assert {"args", "kwargs", "options", "description"} <= json.loads(full.blob).keys()
    bound = define(args=[print], code_bound=True)
    assert json.loads(bound.blob).keys() == {"name", "task", "schedule", "code_bound"}


def test_a_revision_tells_a_new_schedule_from_new_arguments() -> None:
    first = define()
    assert define().revision == first.revision
    other_args = define(args=[1])
    assert other_args.revision != first.revision
    assert schedule_part(other_args.revision) == schedule_part(first.revision)
    other_schedule = define(schedule=Interval(20_000))
    assert schedule_part(other_schedule.revision) != schedule_part(first.revision)


def test_other_arguments_make_another_revision() -> None:
    assert define().revision != define(args=[1]).revision


@pytest.mark.parametrize(
    ("blob", "said"),
    [
        ("", "not JSON"),
        ("{", "not JSON"),
        ("[1]", "not an object"),
        ('"text"', "not an object"),
        ("{}", "schedule"),
        ('{"name":"n","schedule":{"every":1000}}', "lacks 'task'"),
        ('{"name":1,"task":"t","schedule":{"every":1000}}', "name is 1, not a str"),
        ('{"name":"n","task":"t","schedule":{"every":1000},"args":{}}', "args is {}, not a list"),
        ('{"name":"n","task":"t","schedule":{"every":1000},"options":1}', "options is 1"),
        ('{"name":"n","task":"t","schedule":{"every":0}}', "every=0"),
        ('{"name":"n","task":"t","schedule":{"cron":"0 0 31 4 *"}}', "never occurs"),
        ('{"name":"n","task":"t","schedule":{"every":1000},"args":[{"__type__":"uuid",'
         '"__value__":"x"}]}', "not JSON"),
    ],
)  # fmt: skip
def test_a_blob_that_is_no_definition_says_why(blob: str, said: str) -> None:
    with pytest.raises(InvalidTimerError) as caught:
        decode_definition(blob)
    assert said in str(caught.value)


def test_a_definition_larger_than_a_batch_is_refused() -> None:
    room = MAX_DEFINITION_BYTES - len(define(args=[""]).blob)
    assert check_size(define(args=["x" * room]))
    with pytest.raises(InvalidTimerError, match=f"{MAX_DEFINITION_BYTES + 1} bytes"):
        check_size(define(args=["x" * (room + 1)]))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"name": "é" * (MAX_NAME_BYTES // 2 + 1)}, f"name of {MAX_NAME_BYTES + 2} bytes"),
        ({"task": "t" * (MAX_TASK_BYTES + 1)}, "task of"),
        ({"description": "d" * (MAX_DESCRIPTION_BYTES + 1)}, "description of"),
        ({"options": {f"o{i}": i for i in range(MAX_OPTIONS + 1)}}, f"{MAX_OPTIONS + 1} options"),
        ({"options": {"headers": {"x": "x" * MAX_OPTIONS_BYTES}}}, "options of"),
    ],
)
def test_a_part_that_is_too_large_is_refused_by_name(fields: dict[str, Any], said: str) -> None:
    definition = replace(define(), **fields)
    with pytest.raises(InvalidTimerError, match=said) as caught:
        check_size(definition)
    assert "expected at most" in str(caught.value)
    assert len(str(caught.value)) < 300


def test_parts_as_large_as_they_may_be_are_taken() -> None:
    options = {f"o{i}": i for i in range(MAX_OPTIONS)}
    assert check_size(replace(define(), name="n" * MAX_NAME_BYTES))
    assert check_size(replace(define(), description="d" * MAX_DESCRIPTION_BYTES, options=options))


def nested(depth: int) -> list[Any]:
    """Return lists in each other."""
    value: list[Any] = []
    for _ in range(depth - 1):
        value = [value]
    return value


def test_what_can_be_created_however_deep_can_be_read() -> None:
    deepest = check_size(define(args=nested(MAX_DEPTH - 1)))
    assert decode_definition(deepest.blob).args == deepest.args
    with pytest.raises(InvalidTimerError, match=f"expected at most {MAX_DEPTH} levels"):
        check_size(define(args=nested(MAX_DEPTH)))
    with pytest.raises(InvalidTimerError, match="nested deeper"):
        decode_definition(define(args=nested(MAX_DEPTH)).blob)
    flat = define(args=[[each] for each in range(1000)])
    assert decode_definition(check_size(flat).blob).args == flat.args


# ------------------------------------------------------------------ options

GOOD_OPTIONS: list[dict[str, Any]] = [
    {"queue": "q", "priority": 0, "headers": {"a": 1}, "serializer": "json"},
    *({"expires": value} for value in (1, 0.5, None, datetime(2030, 1, 1, tzinfo=timezone.utc))),
    {"time_limit": 3, "soft_time_limit": 2.5, "countdown": 1},
    {"MessageGroupId": "g"},  # of a broker's transport
    {"user_id": "u", "correlation_id": "c"},  # of the message
]


@pytest.mark.parametrize("options", GOOD_OPTIONS, ids=named)
def test_options_of_apply_async_and_the_transport_are_accepted(options: dict[str, Any]) -> None:
    assert check_options(options) == options


def test_expires_as_a_timedelta_counts_from_the_sending() -> None:
    assert check_options({"expires": timedelta(minutes=1)}) == {"expires": 60.0}


BAD_OPTIONS: list[tuple[str, Any]] = [
    *(("expires", value) for value in ("60", True, [], 0, -1)),
    *(("serializer", value) for value in ("jsn", 1, [])),
    *(("priority", value) for value in ("3", 1.5, True)),
    *(("headers", value) for value in ("a", [1])),
    *(("queue", value) for value in (5, ["q"], True)),
    *(("exchange", value) for value in (5, b"e")),
    *(("routing_key", value) for value in (5, b"e")),
    *(("time_limit", value) for value in ("5", True)),
    *(("soft_time_limit", value) for value in ("5", True)),
    *(("countdown", value) for value in ("5", True)),
    *((name, "x") for name in ("task_id", "producer", "connection", "options")),
    *((name, 1) for name in ("quue", "prioritiy", "expire", "timezon", "arg", "kwarg")),
]


@pytest.mark.parametrize(("name", "value"), BAD_OPTIONS, ids=named)
def test_an_option_that_cannot_work_is_refused_by_name_and_value(name: str, value: Any) -> None:
    with pytest.raises(InvalidTimerError) as caught:
        check_options({name: value})
    assert name in str(caught.value)
    assert "expected" in str(caught.value)


# ------------------------------------------------------------------ states and timers


def test_a_finished_one_shot_is_stopped_because_it_has_run() -> None:
    assert a_state(status="stopped", reason="finished").is_finished
    assert not a_state(status="stopped").is_finished
    assert not a_state(status="active", reason="finished").is_finished


def test_a_timer_shows_its_state_and_definition() -> None:
    state = a_state(
        due_ms=NOW_MS + 10_000, last_run_ms=NOW_MS, runs=3, skips={"paused": 1}, owner="i"
    )
    definition = define(args=[1], kwargs={"a": 2}, options={"queue": "q"}, description="d")
    timer = Timer.from_stored(state, definition.blob)
    assert (timer.name, timer.task, timer.description) == ("n", "t", "d")
    assert (timer.args, timer.kwargs, timer.options) == ([1], {"a": 2}, {"queue": "q"})
    assert (timer.status, timer.instance, timer.schedule) == ("active", "i", EVERY_10_S)
    assert timer.next_run_at == to_datetime(NOW_MS + 10_000)
    assert timer.last_run_at == timer.created_at == to_datetime(NOW_MS)
    assert (timer.total_run_count, timer.skipped) == (3, 1)
    assert (timer.source, timer.reason) == (None, None)


@pytest.mark.parametrize("status", ["paused", "stopped", "broken"])
def test_only_an_active_timer_has_a_next_run_and_an_owner(status: Any) -> None:
    timer = Timer.from_stored(a_state(status=status, due_ms=NOW_MS, owner="i"), define().blob)
    assert (timer.next_run_at, timer.instance) == (None, None)
    unowned = Timer.from_stored(a_state(owner=UNASSIGNED), define().blob)
    assert unowned.instance is None


@pytest.mark.parametrize(
    ("blob", "name"), [('{"name":"n"}', "n"), ('{"name":5}', ""), ("{", ""), ("[]", "")]
)
def test_a_definition_that_cannot_be_read_makes_a_broken_timer(blob: str, name: str) -> None:
    timer = Timer.from_stored(a_state(), blob)
    assert (timer.status, timer.name, timer.schedule) == ("broken", name, None)
    assert timer.reason


# ------------------------------------------------------------------ runs and leases

RUN = Run("orders", "host:1:a", timer_id("n"), timer_id("n"), NOW_MS, NOW_MS + 10_001, 7, define())


def test_a_task_id_is_the_runs_and_not_the_senders() -> None:
    assert uuid.UUID(RUN.task_id).version == 5
    assert RUN._replace(instance="host:2:b", number=8).task_id == RUN.task_id
    others = [
        RUN._replace(service="billing"),
        RUN._replace(identity=timer_id("m")),
        RUN._replace(created_ms=NOW_MS + 1),
        RUN._replace(scheduled_ms=NOW_MS),
    ]
    assert len({RUN.task_id, *(other.task_id for other in others)}) == 5


def test_the_header_tells_timer_and_run() -> None:
    assert RUN.header == {
        "id": timer_id("n"),
        "name": "n",
        "service": "orders",
        "instance": "host:1:a",
        "scheduled_at": "2025-06-15T15:06:50.001+00:00",
        "run": 7,
    }
    assert RUN._replace(scheduled_ms=0).header["scheduled_at"] == "1970-01-01T00:00:00.000+00:00"


def test_a_lease_ends_by_itself() -> None:
    lease = Lease("i", 1, trusted_until=5.0)
    assert lease.is_valid(4.9)
    assert not lease.is_valid(5.0)


def test_a_broken_entry_keeps_its_name_and_what_is_known_of_its_task() -> None:
    assert json.loads(model.broken_blob("n", "t")) == {"name": "n", "task": "t"}
    assert json.loads(model.broken_blob("n", 5)) == {"name": "n", "task": ""}
