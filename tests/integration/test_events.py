"""What Celery's event stream says of timers: Celery's own events, and those of beats."""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import datetime, timezone
from typing import Any

import pytest
from celery import Celery
from celery.contrib.testing.worker import start_worker
from celery.events.dumper import Dumper
from celery.events.state import State

from celery_dtimer import CallbackTimer, DistributedTimer, events, signals
from celery_dtimer.settings import Settings
from tests.conftest import FreshRedis, MakeApp, ReadQueue
from tests.integration.conftest import StartTimers
from tests.receiving import receiving
from tests.waiting import wait_until

MODES = ("atomic", "confirmed")
Capture = Callable[[Celery], list[dict[str, Any]]]


@pytest.fixture
def capture() -> Iterator[Capture]:
    """Receive an app's events into a list, until the test ends."""
    with ExitStack() as stack:
        yield lambda app: stack.enter_context(receiving(app))


def of(found: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    """Return the events of a type."""
    return [event for event in found if event["type"] == kind]


def events_app(make_app: MakeApp, prefix: str, **conf: Any) -> Celery:
    """Return an app whose event exchange no other test uses."""
    return make_app(event_exchange=f"{prefix}events", worker_hijack_root_logger=False, **conf)


# ------------------------------------------------------------------ Celery's own


@pytest.mark.parametrize("mode", MODES)
def test_timers_tasks_are_sent_as_celery_says_it(
    make_app: MakeApp, prefix: str, read_queue: ReadQueue, capture: Capture, mode: str
) -> None:
    app = events_app(make_app, prefix, task_send_sent_event=True, dtimer_dispatch=mode)
    found, reader = capture(app), read_queue(app)
    timers = DistributedTimer(app)
    for number in range(20):
        timers.create_timer(f"timer-{number}", 0.2, "tasks.record", args=[number])
    timers.start()
    wait_until(lambda: len(reader.messages) > 100, "runs, enough for templates", 10)
    timers.stop()

    def told() -> set[str]:
        return {event["uuid"] for event in of(found, "task-sent")}

    def queued() -> set[str]:
        return {message["headers"]["id"] for message in reader.messages}

    wait_until(lambda: told() == queued(), "an event for each message, and no other", 5)
    sent = {event["uuid"]: event for event in of(found, "task-sent")}
    assert {event["name"] for event in sent.values()} == {"tasks.record"}
    assert {event["queue"] for event in sent.values()} == {app.conf.task_default_queue}
    assert len({event["args"] for event in sent.values()}) == 20
    state = State()
    for event in found:
        state.event(event)
    assert {task.state for _, task in state.tasks_by_time()} == {"PENDING"}
    assert len(state.tasks) == len(sent)


# ------------------------------------------------------------------ our own


def test_instances_that_join_and_leave(
    make_app: MakeApp, prefix: str, capture: Capture, start_timers: StartTimers
) -> None:
    app = events_app(make_app, prefix, dtimer_send_events=True)
    found = capture(app)
    before = time.time()
    timers = start_timers(app)
    (joined,) = wait_until(lambda: of(found, "dtimer-instance-joined"), "the event", 10)
    (instance,) = timers.get_service_instances()
    timers.stop()
    (left,) = wait_until(lambda: of(found, "dtimer-instance-left"), "the last one", 5)
    assert (joined["service"], joined["instance"]) == ("orders", instance.id)
    assert joined["epoch"] == instance.epoch
    assert joined["hostname"].startswith("celerybeat@")
    assert before <= joined["timestamp"] <= left["timestamp"] <= time.time()
    assert (left["service"], left["instance"], left["is_dead"]) == ("orders", instance.id, False)


def test_runs_that_are_skipped_or_fail(
    make_app: MakeApp, prefix: str, capture: Capture, start_timers: StartTimers
) -> None:
    app = events_app(make_app, prefix, dtimer_send_events=True)
    found = capture(app)
    timers = DistributedTimer(app)
    settings = timers.store.settings
    events.stream_of(app).connect(settings, "celerybeat@test")
    moment = datetime(2030, 1, 1, tzinfo=timezone.utc)
    signals.timer_skipped.send(
        sender="orders",
        timer_id="an-id",
        name="nightly",
        reason="late",
        runs=3,
        first_at=moment,
        until_at=moment,
        instance="a",
    )
    signals.failover.send(sender="orders", instance="a", dead=("b",), timers=7)
    signals.failover.send(sender="another", instance="a", dead=("b",), timers=7)
    (skipped,) = wait_until(lambda: of(found, "dtimer-runs-skipped"), "the event", 5)
    wait_until(lambda: of(found, "dtimer-failover"), "the other", 5)
    events.stream_of(app).close("orders", 1)
    assert {name: skipped[name] for name in ("timer_id", "timer", "reason", "runs")} == {
        "timer_id": "an-id",
        "timer": "nightly",
        "reason": "late",
        "runs": 3,
    }
    assert skipped["first_at"] == skipped["until_at"] == "2030-01-01T00:00:00.000+00:00"
    (moved,) = of(found, "dtimer-failover")
    assert (moved["service"], moved["dead"], moved["timers"]) == ("orders", ["b"], 7)


def test_a_worker_tells_what_fails_in_it(
    make_app: MakeApp, prefix: str, capture: Capture, start_timers: StartTimers
) -> None:
    """The beat's own listener is the same one here, since both are in one process."""
    app = events_app(make_app, prefix, dtimer_send_events=True)
    found = capture(app)
    timers = DistributedTimer(app)

    @timers.callback(shared=False)
    def fail(timer: CallbackTimer, password: str) -> None:
        raise ValueError(password)

    id = timers.create_timer("failing", datetime.now(timezone.utc), "fail", args=["a secret"])
    with start_worker(app, perform_ping_check=False, loglevel="CRITICAL"):
        beat = start_timers(app)
        (failed,) = wait_until(lambda: of(found, "dtimer-run-failed"), "the event", 15)
        beat.stop()
    assert (failed["timer_id"], failed["timer"], failed["task"]) == (id, "failing", fail.name)
    assert failed["reason"] == "failed"
    assert failed["run"] == 1
    (letter,) = timers.get_dead_letters()
    assert (failed["letter"], failed["task_id"]) == (letter.id, letter.task_id)
    assert "a secret" not in str(of(found, "dtimer-run-failed"))


def test_monitors_bear_events_that_they_do_not_know(
    make_app: MakeApp, prefix: str, capture: Capture, start_timers: StartTimers
) -> None:
    app = events_app(make_app, prefix, dtimer_send_events=True)
    found = capture(app)
    beat = start_timers(app)
    wait_until(lambda: of(found, "dtimer-instance-joined"), "an event", 10)
    beat.stop()
    wait_until(lambda: of(found, "dtimer-instance-left"), "another", 10)
    state, out = State(), io.StringIO()
    for event in found:
        state.event(dict(event))
        Dumper(out).on_event(dict(event))
    assert not state.workers
    assert not state.tasks
    assert "dtimer instance joined" in out.getvalue()


def test_nothing_is_told_by_default(
    make_app: MakeApp, prefix: str, capture: Capture, start_timers: StartTimers
) -> None:
    app = events_app(make_app, prefix)
    found = capture(app)
    beat = start_timers(app)
    wait_until(beat.get_service_instances, "the beat", 10)
    beat.stop()
    with app.events.default_dispatcher() as dispatcher:
        dispatcher.send("dtimer-last")
    wait_until(lambda: of(found, "dtimer-last"), "what comes last", 5)
    assert {event["type"] for event in found} == {"dtimer-last"}
    assert not any(thread.name == "dtimer-events" for thread in threading.enumerate())


# ------------------------------------------------------------------ a broker that is away


def test_what_happens_while_the_broker_is_frozen_is_told_later_and_bounded(
    make_app: MakeApp, prefix: str, fresh_redis: FreshRedis, capture: Capture
) -> None:
    broker = fresh_redis()
    app = events_app(make_app, prefix, broker_url=broker.url, dtimer_send_events=True)
    found = capture(app)
    stream = events.stream_of(app)
    stream.connect(
        Settings("orders", broker.url, instance_timeout=2.0, heartbeat_interval=0.5), "n"
    )
    stream.add("dtimer-first", {})
    wait_until(lambda: of(found, "dtimer-first"), "a connection", 5)
    broker.freeze()
    started = time.monotonic()
    for number in range(events.MOST_WAITING + 100):
        stream.add("dtimer-test", {"number": number})
    assert time.monotonic() - started < 1, "nobody waits"
    assert len(stream._waiting) <= events.MOST_WAITING
    broker.thaw()
    last = events.MOST_WAITING + 99
    wait_until(
        lambda: [event["number"] for event in of(found, "dtimer-test")][-1:] == [last], "all", 15
    )
    stream.close("orders", 1)
    numbers = [event["number"] for event in of(found, "dtimer-test")]
    assert numbers[-900:] == list(range(last - 899, last + 1)), "the last ones are kept, in order"


def test_to_close_takes_no_longer_than_it_may(
    make_app: MakeApp, prefix: str, fresh_redis: FreshRedis
) -> None:
    broker = fresh_redis()
    app = events_app(make_app, prefix, broker_url=broker.url, dtimer_send_events=True)
    stream = events.stream_of(app)
    stream.connect(Settings("orders", broker.url), "n")
    broker.freeze()
    stream.add("dtimer-test", {})
    started = time.monotonic()
    stream.close("orders", 0.2)
    assert time.monotonic() - started < 0.5
    broker.thaw()


def test_an_event_that_has_no_encoding_stops_no_other(
    make_app: MakeApp, prefix: str, capture: Capture, caplog: pytest.LogCaptureFixture
) -> None:
    app = events_app(make_app, prefix)
    found = capture(app)
    stream = events.stream_of(app)
    stream.connect(Settings("orders", app.conf.broker_url), "n")
    stream.add("dtimer-bad", {"what": object()})
    stream.add("dtimer-good", {})
    wait_until(lambda: of(found, "dtimer-good"), "the good one", 5)
    stream.close("orders", 1)
    assert "dtimer-bad can not be sent" in caplog.text
