"""What reaches the broker is what Celery's own beat would send, and the ``dtimer`` header."""

from __future__ import annotations

import re
from typing import Any

import pytest
from celery import Celery, signals

from tests.conftest import MakeApp, ReadQueue
from tests.integration.conftest import StartTimers
from tests.ledger import QueueReader
from tests.servers import RedisServer
from tests.waiting import wait_until

TASK_ID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-5[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}")


def do_nothing(*_: Any, **__: Any) -> None:
    """Be a task."""


def fire(
    start_timers: StartTimers, app: Celery, reader: QueueReader, **timer: Any
) -> dict[str, Any]:
    """Return the message of one run of a timer with these options."""
    timers = start_timers(app)
    timers.create_timer("one", 3600, timer.pop("callback", "record"), **timer)
    timers.trigger_timer("one")
    wait_until(lambda: reader.messages, "the message")
    return reader.messages[0]


def test_the_header_tells_the_run(
    make_app: MakeApp, read_queue: ReadQueue, start_timers: StartTimers
) -> None:
    app = make_app()
    timers, reader = start_timers(app), read_queue(app)
    timer_id = timers.create_timer("regular", 0.2, "record", args=[1], kwargs={"a": 2})
    wait_until(lambda: len(reader.messages) >= 3, "three runs")
    (instance,) = timers.get_service_instances()

    for number, message in enumerate(reader.messages[:3], start=1):
        header = message["headers"]["dtimer"]
        assert set(header) == {"id", "name", "service", "instance", "scheduled_at", "run"}
        assert header["id"] == timer_id
        assert (header["name"], header["service"]) == ("regular", "orders")
        assert header["instance"] == instance.id
        assert header["run"] == number
        assert re.fullmatch(
            r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}(\+00:00|Z)", header["scheduled_at"]
        )
        assert message["headers"]["celery_beat_task"] is True
        assert message["headers"]["task"] == "record"
        assert TASK_ID.fullmatch(message["headers"]["id"])
        assert message["headers"]["id"] == message["properties"]["correlation_id"]


def test_options_reach_the_broker(
    make_app: MakeApp, read_queue: ReadQueue, start_timers: StartTimers
) -> None:
    app = make_app()
    message = fire(
        start_timers,
        app,
        read_queue(app),
        priority=3,
        time_limit=30,
        soft_time_limit=20,
        ignore_result=True,
        shadow="shown",
        serializer="json",
        compression="zlib",
        headers={"tenant": "acme"},
        expires=60,
    )
    headers = message["headers"]
    assert message["properties"]["priority"] == 3
    assert headers["timelimit"] == [30, 20]
    assert headers["ignore_result"] is True
    assert headers["shadow"] == "shown"
    assert headers["compression"] == "application/x-gzip"
    assert headers["tenant"] == "acme"
    assert headers["expires"] is not None


def test_the_users_headers_are_not_written_to(make_app: MakeApp, start_timers: StartTimers) -> None:
    headers = {"tenant": "acme"}
    app = make_app()
    timers = start_timers(app)
    timers.create_timer("one", 3600, "record", headers=headers)
    timers.trigger_timer("one")
    wait_until(lambda: app.conf.broker_url, "a turn of the loop")
    assert headers == {"tenant": "acme"}


@pytest.mark.parametrize("priority", [0, 3, 6, 9])
def test_priorities_go_to_kombus_lists(
    make_app: MakeApp,
    redis_server: RedisServer,
    start_timers: StartTimers,
    prefix: str,
    priority: int,
) -> None:
    app = make_app()
    timers = start_timers(app)
    timers.create_timer("one", 3600, "record", priority=priority)
    timers.trigger_timer("one")
    key = f"{prefix}queue" + (f"\x06\x16{priority}" if priority else "")
    wait_until(lambda: redis_server.client.llen(key), f"a message in {key!r}")


@pytest.mark.filterwarnings("ignore:[\\s\\S]*'queue' task attribute is deprecated")
def test_routes_and_queues_are_celerys_own(
    make_app: MakeApp, redis_server: RedisServer, start_timers: StartTimers, prefix: str
) -> None:
    routed, asked, decorated = f"{prefix}routed", f"{prefix}asked", f"{prefix}decorated"
    app = make_app(task_routes={"routed.task": {"queue": routed}})
    app.task(name="decorated.task", queue=decorated, shared=False)(do_nothing)
    timers = start_timers(app)
    timers.create_timer("routed", 3600, "routed.task")
    timers.create_timer("asked", 3600, "other.task", queue=asked)
    timers.create_timer("decorated", 3600, "decorated.task")
    for name in ("routed", "asked", "decorated"):
        timers.trigger_timer(name)
    for queue in (routed, asked, decorated):
        wait_until(lambda queue=queue: redis_server.client.llen(queue) == 1, f"one in {queue}")


def test_a_signature_brings_its_arguments_and_options(
    make_app: MakeApp, read_queue: ReadQueue, start_timers: StartTimers
) -> None:
    app = make_app()
    task = app.task(name="signed.task", shared=False)(do_nothing)
    message = fire(
        start_timers, app, read_queue(app), callback=task.s("pdf", pages=2).set(priority=6)
    )
    assert message["headers"]["task"] == "signed.task"
    assert message["properties"]["priority"] == 6
    assert message["headers"]["argsrepr"] == "('pdf',)"
    assert message["headers"]["kwargsrepr"] == "{'pages': 2}"


def test_publish_signals_are_sent(
    make_app: MakeApp, read_queue: ReadQueue, start_timers: StartTimers
) -> None:
    seen = []

    def before(sender: str, headers: dict[str, Any], **_: Any) -> None:
        headers["stamped_by"] = "a receiver"
        seen.append(sender)

    signals.before_task_publish.connect(before, weak=False)
    try:
        app = make_app()
        message = fire(start_timers, app, read_queue(app))
    finally:
        signals.before_task_publish.disconnect(before)
    assert seen == ["record"]
    assert message["headers"]["stamped_by"] == "a receiver"
