"""One bad entry, or a key that somebody edited, stops no other timer."""

from __future__ import annotations

import logging
import uuid
from datetime import datetime, timezone
from typing import Any

import pytest

from celery_dtimer import DistributedTimer
from tests.conftest import MakeApp, ReadQueue
from tests.integration.conftest import StartTimers
from tests.servers import RedisServer
from tests.waiting import wait_until

GOOD = {"task": "record", "schedule": 0.3}

BAD_ENTRIES: dict[str, Any] = {
    "no schedule": {"task": "record"},
    "schedule is None": {"task": "record", "schedule": None},
    "unknown schedule": {"task": "record", "schedule": object()},
    "unknown key": {**GOOD, "colour": "red"},
    "no task": {"schedule": 0.3},
    "bad interval": {"task": "record", "schedule": -1},
}


@pytest.mark.parametrize("entry", BAD_ENTRIES.values(), ids=BAD_ENTRIES.keys())
def test_a_bad_entry_is_logged_by_name_and_the_others_run(
    make_app: MakeApp,
    read_queue: ReadQueue,
    start_timers: StartTimers,
    caplog: pytest.LogCaptureFixture,
    entry: Any,
) -> None:
    app = make_app(beat_schedule={"good": GOOD, "rotten": entry, "fine": GOOD})
    reader = read_queue(app)
    with caplog.at_level(logging.WARNING):
        start_timers(app)
        wait_until(lambda: reader.ledger.names() >= {"good", "fine"}, "the good ones to run")
    assert "rotten" in caplog.text


@pytest.mark.parametrize(
    "entry",
    [
        {**GOOD, "args": None, "kwargs": None, "options": None},
        {**GOOD, "args": (uuid.UUID(int=1),), "kwargs": {"a": b"\xff"}},
        {**GOOD, "task": "no.such.task"},
        {**GOOD, "options": {"expires": 30}},
    ],
)
def test_an_unusual_entry_runs(
    make_app: MakeApp, read_queue: ReadQueue, start_timers: StartTimers, entry: Any
) -> None:
    app = make_app(beat_schedule={"unusual": entry})
    reader = read_queue(app)
    start_timers(app)
    wait_until(lambda: reader.ledger.names() == {"unusual"}, "the entry to run")


@pytest.mark.parametrize(
    "damage",
    [
        *("not json", "wrong json", "gone", "wrong type", "no schedule", "bad option"),
        *("bad priority", "deep option"),
    ],
)
def test_a_damaged_definition_stops_only_its_timer(
    make_app: MakeApp,
    redis_server: RedisServer,
    read_queue: ReadQueue,
    start_timers: StartTimers,
    prefix: str,
    damage: str,
) -> None:
    app, client = make_app(), redis_server.client
    reader = read_queue(app)
    victim, _ = DistributedTimer(app).create_timers(
        [
            {"name": "victim", "schedule": 0.5, "callback": "record"},
            {"name": "good", "schedule": 0.5, "callback": "record"},
        ]
    )
    definition = f"{prefix}timer_definition:{{orders}}:{victim}"
    good = client.get(definition)
    assert good
    if damage in ("gone", "wrong type"):
        client.delete(definition)
    if damage == "wrong type":
        client.lpush(definition, "x")
    deep, digits = "[" * 250 + "]" * 250, "9" * 5000  # JSON reads them, but not all that follows
    texts = {
        "not json": "{",
        "wrong json": "[1]",
        "no schedule": '{"name":"victim","task":"t"}',
        "bad option": good[:-1] + ',"options":{"timeout":"soon"}}',
        "bad priority": good[:-1] + f',"options":{{"priority":"{digits}"}}}}',
        "deep option": good[:-1] + f',"options":{{"headers":{deep}}}}}',
    }
    if damage in texts:
        client.set(definition, texts[damage])
    timers = start_timers(app)

    wait_until(lambda: len(reader.ledger.slots("good")) >= 3, "the other timer to run on")
    assert "victim" not in reader.ledger.names()
    assert timers.get_timer(victim).status == "broken"
    timers.create_timer("victim", 0.5, "record")
    wait_until(lambda: "victim" in reader.ledger.names(), "the timer that is created again to run")


@pytest.mark.parametrize(
    "kind", ["timer", "timer_queue member", "timer of a wrong type", "timer_queue", "owner"]
)
def test_half_deleted_timers_are_repaired(
    make_app: MakeApp,
    redis_server: RedisServer,
    read_queue: ReadQueue,
    start_timers: StartTimers,
    prefix: str,
    kind: str,
) -> None:
    app, client = make_app(beat_schedule={"static": GOOD}), redis_server.client
    reader = read_queue(app)
    timers = start_timers(app)
    timers.create_timer("victim", 0.3, "record")
    wait_until(lambda: reader.ledger.names() == {"static", "victim"}, "both to run")
    victim = timers.get_timer("victim").id
    instance = timers.get_service_instances()[0].id
    if kind == "timer_queue member":
        client.zrem(f"{prefix}timer_queue:{{orders}}", victim)
    elif kind in ("timer_queue", "owner"):
        key = kind if kind == "timer_queue" else "instance_timers"
        key = f"{prefix}{key}:{{orders}}" + (f":{instance}" if kind == "owner" else "")
        client.delete(key)
        client.set(key, "nonsense")
    else:
        client.delete(f"{prefix}timer:{{orders}}:{victim}")
    if kind == "timer of a wrong type":
        client.set(f"{prefix}timer:{{orders}}:{victim}", "nonsense")

    sent = len(reader.ledger.slots("static"))
    wait_until(lambda: len(reader.ledger.slots("static")) > sent + 2, "the other to run on")
    wait_until(lambda: not timers.check_consistency(), "the repair", 10)


def test_a_static_timer_deleted_by_hand_comes_back(
    make_app: MakeApp,
    redis_server: RedisServer,
    read_queue: ReadQueue,
    start_timers: StartTimers,
    prefix: str,
) -> None:
    app = make_app(beat_schedule={"static": GOOD})
    reader = read_queue(app)
    timers = start_timers(app)
    wait_until(lambda: reader.ledger.names() == {"static"}, "a run")
    redis_server.client.delete(f"{prefix}timer:{{orders}}:{timers.get_timer('static').id}")
    deleted_ms = redis_server.now_ms()
    wait_until(lambda: reader.ledger.since(deleted_ms + 500), "runs to come again", 10)
    wait_until(lambda: not timers.check_consistency(), "the repair", 10)


@pytest.mark.parametrize(
    "key",
    [
        *("meta", "timer_queue", "inactive_timers", "service_instances", "history", "counters"),
        *("running", "run_leases", "dead_timers", "runs"),
    ],
)
@pytest.mark.parametrize("kind", ["gone", "a string"])
def test_no_key_of_the_service_is_needed_for_long(
    make_app: MakeApp,
    redis_server: RedisServer,
    read_queue: ReadQueue,
    start_timers: StartTimers,
    prefix: str,
    key: str,
    kind: str,
) -> None:
    app, client = make_app(beat_schedule={"static": GOOD}), redis_server.client
    reader = read_queue(app)
    timers = start_timers(app)
    timers.create_timer("dynamic", 0.3, "record")
    timers.create_timer("paused", 0.3, "record")
    timers.pause_timer("paused")
    wait_until(lambda: reader.ledger.names() >= {"static", "dynamic"}, "both to run")
    name = f"{prefix}{key}:{{orders}}"
    client.delete(name)
    if kind == "a string":
        client.set(name, "nonsense")
    damaged_ms = redis_server.now_ms()
    wait_until(
        lambda: (
            {run.name for run in reader.ledger.since(damaged_ms + 500)} >= {"static", "dynamic"}
        ),
        "both to run on",
        10,
    )
    wait_until(lambda: not timers.check_consistency(), "the repair", 10)
    assert timers.get_timer("paused").status == "paused"
    wait_until(lambda: "paused" in {each.name for each in timers.get_timers()}, "its list", 10)


def test_a_history_whose_entries_are_of_the_far_future_is_told(
    make_app: MakeApp, redis_server: RedisServer
) -> None:
    timers = DistributedTimer(make_app())
    id = timers.create_timer("t", 60, "record")
    due_ms = redis_server.now_ms()
    far = f"{2**63}-1"
    redis_server.client.xadd(
        timers.store.base.keys("history"), {"instance": "a", "sent": f"{id} {due_ms} 1"}, id=far
    )
    redis_server.client.xadd(
        timers.store.base.keys("runs"),
        {"task_id": "x", "timer": id, "due": due_ms, "state": "odd"},
        id=far,
    )
    due = datetime.fromtimestamp(due_ms / 1000, timezone.utc)
    assert "was sent at 9999" in timers.why("t", due)
    assert [run.state for run in timers.get_runs("t")] == ["odd"]
