"""`dtimer_allowed_tasks`: refused at the call, and by a beat whatever was written into Redis."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Callable
from typing import Any

import pytest
from celery import group

from celery_dtimer import DistributedTimer
from celery_dtimer.errors import InvalidTimerError
from celery_dtimer.messages import keep
from celery_dtimer.model import Definition
from tests.conftest import MakeApp, ReadQueue
from tests.integration.conftest import StartTimers
from tests.servers import RedisServer
from tests.waiting import wait_until

ALLOWED = ["shop.good", "reports.*"]
REFUSED = r"'shop\.evil' is not allowed: dtimer_allowed_tasks"


@pytest.fixture
def app(make_app: MakeApp) -> Any:
    made = make_app(
        dtimer_allowed_tasks=ALLOWED,
        dtimer_eta_threshold=1,
        beat_schedule={"static": {"task": "shop.static", "schedule": 0.3}},
    )

    def nothing(*args: Any) -> None:
        """Do nothing."""

    for name in ("shop.good", "shop.evil", "shop.static"):
        made.task(name=name, shared=False)(nothing)
    return made


@pytest.fixture
def timers(app: Any) -> DistributedTimer:
    return DistributedTimer(app)


def queued(app: Any, redis_server: RedisServer) -> list[dict[str, Any]]:
    """Return the messages that wait for a worker."""
    return list(map(json.loads, redis_server.client.lrange(app.conf.task_default_queue, 0, -1)))


def body_of(message: dict[str, Any]) -> dict[str, Any]:
    """Return the body of a message of protocol 1."""
    body = base64.b64decode(message["body"])
    is_packed = message["headers"].get("compression")
    content: dict[str, Any] = json.loads(zlib.decompress(body) if is_packed else body)
    return content


def sent(messages: list[dict[str, Any]]) -> set[str]:
    """Return the names of the tasks in messages, wherever they stand."""
    return {
        name for name in ("shop.good", "shop.evil", "shop.static") if name in json.dumps(messages)
    }


# ------------------------------------------------------------------ at the call


def test_a_timer_is_created_for_what_is_allowed_alone(app: Any, timers: DistributedTimer) -> None:
    good, evil = app.tasks["shop.good"], app.tasks["shop.evil"]
    timers.create_timer("good", 10, good)
    timers.create_timer("report", 10, "reports.daily")
    timers.create_timer("chain", 10, good.si() | good.si())
    calls: list[Callable[[], Any]] = [
        lambda: timers.create_timer("bad", 10, evil),
        lambda: timers.create_timer("bad", 10, "shop.evil"),
        lambda: timers.create_timer("bad", 10, good.si() | evil.si()),
        lambda: timers.create_timer("bad", 10, group(good.si(), evil.si())),
        lambda: timers.create_timer("bad", 10, good, link=evil.si()),
        lambda: timers.create_timer("bad", 10, good, headers={"task": "shop.evil"}),
        lambda: timers.create_timers(
            [
                {"name": f"bad{i}", "schedule": 10, "callback": task}
                for i, task in enumerate((good, evil))
            ]
        ),
        lambda: timers.update_timer("good", callback="shop.evil"),
        lambda: timers.update_timer("good", link_error=evil.si()),
    ]
    for call in calls:
        with pytest.raises(InvalidTimerError, match=REFUSED):
            call()
    assert {timer.name for timer in timers.get_timers()} == {"good", "report", "chain"}
    assert timers.get_timer("good").task == "shop.good"


# ------------------------------------------------------------------ in a beat


def test_a_beat_sends_no_other_task_whatever_is_stored(
    app: Any,
    timers: DistributedTimer,
    redis_server: RedisServer,
    read_queue: ReadQueue,
    start_timers: StartTimers,
) -> None:
    keys, client = timers.store.base.keys, redis_server.client
    good = app.tasks["shop.good"]
    links = {"options": {"link": [dict(app.tasks["shop.evil"].s())]}}
    forged: dict[str, dict[str, Any]] = {
        "task": {"task": "shop.evil"},
        "link": links,
        "header": {"options": {"headers": {"task": "shop.evil"}}},
        "canvas": {"task": "celery.chain", "kwargs": {"tasks": [{"task": "shop.evil"}]}},
        "called static": {"task": "shop.evil"},
    }
    for name, change in forged.items():
        id = timers.create_timer(name, 0.3, good)
        blob = json.loads(client.get(keys("timer_definition", id)) or "")
        client.set(keys("timer_definition", id), json.dumps({**blob, **change}))
    timers.create_timer("good", 0.3, good)
    client.hset(keys("timer", timers.get_timer("called static").id), "source", "elsewhere")

    reader = read_queue(app)
    start_timers(app)
    wait_until(lambda: len(reader.ledger.slots("good")) >= 4, "the good one to run")
    for name in ("task", "link", "header", "canvas"):
        timer = timers.get_timer(name)
        assert timer.status == "broken", name
        assert "'shop.evil' is not allowed" in (timer.reason or "")
    assert sent(reader.messages) == {"shop.good", "shop.static"}  # as the code declares it


def test_a_static_entry_runs_as_the_code_declares_it(
    app: Any, read_queue: ReadQueue, start_timers: StartTimers
) -> None:
    reader = read_queue(app)
    timers = start_timers(app)
    wait_until(lambda: len(reader.ledger.slots("static")) >= 2, "the static one to run")
    assert timers.get_timer("static").status == "active"


def test_a_static_entry_of_other_code_goes_to_who_knows_it(
    app: Any, make_app: MakeApp, read_queue: ReadQueue, start_timers: StartTimers
) -> None:
    """Two versions of an app side by side: the older one sets nothing of the newer aside."""
    newer = make_app(
        dtimer_allowed_tasks=ALLOWED,
        beat_schedule={
            "static": {"task": "shop.static", "schedule": 0.3},
            "newer": {"task": "shop.newer", "schedule": 0.3},
        },
    )
    reader = read_queue(app)
    start_timers(app)
    timers = start_timers(newer)
    wait_until(lambda: len(reader.ledger.slots("newer")) >= 3, "the newer one to run", 20)
    assert timers.get_timer("newer").status == "active"


def test_a_forged_call_goes_to_the_dead_letters_and_not_to_a_worker(
    app: Any,
    timers: DistributedTimer,
    redis_server: RedisServer,
    start_timers: StartTimers,
) -> None:
    message = app.amqp.as_task_v2(
        "id", "shop.good", (), {}, callbacks=[dict(app.tasks["shop.evil"].s())]
    )
    how = {
        "serializer": "json",
        "compression": None,
        "headers": message.headers,
        "exchange": "",
        "routing_key": app.conf.task_default_queue,
        "delivery_mode": None,
        "declare": [],
    }
    embed = {"callbacks": None, "errbacks": None, "chain": None, "chord": None}
    definitions: list[Definition] = [
        keep("id", "shop.good", message.body, {**how, **message.properties}),
        keep("id2", "shop.evil", ([], {}, embed), how),
        keep("id3", "shop.good", ([], {}, embed), {**how, "serializer": "pickle"}),
    ]
    for definition in definitions:
        timers.store.hold(definition, delay_ms=0)
    app.conf.beat_schedule = {}
    start_timers(app)
    app.tasks["shop.good"].apply_async(countdown=1.5)
    wait_until(lambda: queued(app, redis_server), "the good call")
    assert timers.get_pending() == []
    assert sent(queued(app, redis_server)) == {"shop.good"}
    errors = sorted(letter.error for letter in timers.get_dead_letters())
    assert len(errors) == 3
    assert "no task can be seen" in errors[0]
    assert all("'shop.evil' is not allowed" in error for error in errors[1:])


# ------------------------------------------------------------------ calls that wait


@pytest.mark.parametrize("protocol", [1, 2])
def test_a_call_that_no_beat_would_send_waits_in_a_worker(
    app: Any,
    timers: DistributedTimer,
    redis_server: RedisServer,
    caplog: pytest.LogCaptureFixture,
    protocol: int,
) -> None:
    app.conf.task_protocol = protocol
    good, evil = app.tasks["shop.good"], app.tasks["shop.evil"]
    evil.apply_async(countdown=1000, task_id="by name")
    evil.apply_async(countdown=1000, task_id="by name again")
    good.apply_async(countdown=1000, link=evil.si(), task_id="by link")
    good.apply_async(countdown=1000, compression="zlib", task_id="by body")
    good.apply_async(countdown=1000, task_id="kept")
    assert [call.task_id for call in timers.get_pending()] == ["kept"]
    assert caplog.text.count("wait in a worker, and not in Redis") == 2
    etas = {}
    for message in queued(app, redis_server):
        told = message["headers"] if protocol == 2 else body_of(message)
        etas[told["id"]] = told["eta"]
    assert etas.keys() == {"by name", "by name again", "by link", "by body"}
    assert all(etas.values())
