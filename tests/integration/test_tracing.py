"""Traces from who creates a timer, over the beat, to the task: with a real provider and worker."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from celery.contrib.testing.worker import start_worker
from opentelemetry import trace
from opentelemetry.instrumentation.celery import CeleryInstrumentor
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import StatusCode

from celery_dtimer import CallbackTimer, DistributedTimer
from celery_dtimer.store import Keys
from tests.conftest import MakeApp, ReadQueue
from tests.servers import RabbitMQ, RedisServer
from tests.tracers import exporter, finished, identity, links_of, parent_of
from tests.waiting import wait_until

MODES = ("atomic", "confirmed")


@pytest.fixture
def spans() -> Iterator[None]:
    """A provider, without spans of other tests."""
    exporter().clear()
    yield
    exporter().clear()


@pytest.fixture
def instrumented(spans: None, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Celery is instrumented in this process, which logs no failure of OpenTelemetry."""
    CeleryInstrumentor().instrument()
    yield
    CeleryInstrumentor().uninstrument()
    errors = [each for each in caplog.records if each.name.startswith("opentelemetry")]
    assert [each.getMessage() for each in errors if each.levelno >= logging.WARNING] == []


@pytest.fixture
def timers(make_app: MakeApp) -> Iterator[DistributedTimer]:
    made = DistributedTimer(make_app(worker_hijack_root_logger=False))
    yield made
    made.stop()


def with_callback(timers: DistributedTimer) -> str:
    """Give the app a callback that makes a span of its own; return its task's name."""

    @timers.callback(shared=False)
    def work(timer: CallbackTimer) -> None:
        with trace.get_tracer("tests").start_as_current_span("work"):
            pass

    return str(work.name)


def creating() -> Any:
    """Return a span that is current, as that of a web request."""
    return trace.get_tracer("tests").start_as_current_span("request")


def run_all(timers: DistributedTimer, task: str, count: int = 1, **options: Any) -> str:
    """Dispatch and run what is due, until so many spans of tasks have ended; return by whom."""
    with start_worker(timers.app, perform_ping_check=False, loglevel="CRITICAL", **options):
        instance = timers.start()
        wait_until(lambda: len(finished(f"run/{task}")) >= count, "the tasks' spans", 15)
        wait_until(lambda: len(finished(f"dtimer.dispatch/{task}")) >= count, "the beat's", 5)
        timers.stop()
    return instance


def chains(task: str) -> list[tuple[ReadableSpan, ReadableSpan, ReadableSpan]]:
    """Return the spans of beat, producer and task that follow from each other."""
    beats = {identity(span): span for span in finished(f"dtimer.dispatch/{task}")}
    senders = {identity(span): span for span in finished(f"apply_async/{task}")}
    found = []
    for ran in finished(f"run/{task}"):
        sender = senders[parent_of(ran)]
        found.append((beats[parent_of(sender)], sender, ran))
    return found


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.usefixtures("instrumented")
def test_a_run_is_traced_from_its_creator_to_its_task(timers: DistributedTimer, mode: str) -> None:
    timers.app.conf.dtimer_dispatch = mode
    task = with_callback(timers)
    moment = datetime.now(timezone.utc).replace(microsecond=0)
    with creating() as request:
        id = timers.create_timer("traced", moment, "work")
    instance = run_all(timers, task)

    ((beat, sender, ran),) = chains(task)
    assert links_of(beat) == [identity(request)]
    assert beat.parent is None
    assert beat.status.status_code is StatusCode.UNSET
    attributes = dict(beat.attributes or {})
    assert 0 <= attributes.pop("dtimer.lag") < 30
    assert attributes.pop("dtimer.instance") == instance
    at = moment.isoformat(timespec="milliseconds")
    assert attributes == {
        "dtimer.service": "orders",
        "dtimer.timer.id": id,
        "dtimer.timer.name": "traced",
        "dtimer.scheduled_at": at,
        "dtimer.run": 1,
        "dtimer.dispatch": mode,
        "celery.task_name": task,
        "messaging.message.id": sender.attributes["messaging.message.id"],
    }
    (inside,) = finished("work")
    assert parent_of(inside) == identity(ran)
    assert {identity(span)[0] for span in (beat, sender, ran, inside)} == {identity(beat)[0]}


def assert_traced_apart(timers: DistributedTimer, count: int) -> None:
    """Fail unless each of so many runs has a trace of its own, linked to its own creator."""
    task = with_callback(timers)
    moment = datetime.now(timezone.utc)
    requests = {}
    for number in range(count):
        with creating() as request:
            timers.create_timer(f"timer-{number}", moment, "work")
            requests[f"timer-{number}"] = identity(request)
    # An idle worker on RabbitMQ would not see that it is to end, without its heartbeat.
    run_all(timers, task, count, without_heartbeat=False)
    found = {beat.attributes["dtimer.timer.name"]: beat for beat, _, _ in chains(task)}
    assert {name: links_of(beat) for name, beat in found.items()} == {
        name: [request] for name, request in requests.items()
    }
    assert len({identity(beat)[0] for beat in found.values()}) == count


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.usefixtures("instrumented")
def test_many_runs_of_a_batch_have_traces_of_their_own(timers: DistributedTimer, mode: str) -> None:
    timers.app.conf.dtimer_dispatch = mode
    assert_traced_apart(timers, 30)


@pytest.mark.usefixtures("instrumented")
def test_runs_in_flight_to_rabbitmq_have_traces_of_their_own(
    make_app: MakeApp, redis_server: RedisServer, shared_rabbitmq: RabbitMQ
) -> None:
    app = make_app(
        broker_url=shared_rabbitmq.url,
        dtimer_redis_url=redis_server.url,
        worker_hijack_root_logger=False,
    )
    timers = DistributedTimer(app)
    assert_traced_apart(timers, 30)
    timers.stop()
    with app.connection_for_write() as connection:
        connection.default_channel.queue_delete(app.conf.task_default_queue)


@pytest.mark.usefixtures("instrumented")
def test_each_message_of_a_run_follows_from_its_span(timers: DistributedTimer) -> None:
    task = with_callback(timers)
    timers.create_timer("many", datetime.now(timezone.utc), "work", shards=3)
    with start_worker(timers.app, perform_ping_check=False, loglevel="CRITICAL"):
        timers.start()
        wait_until(lambda: len(finished(f"run/{task}")) >= 3, "the tasks", 15)
        wait_until(lambda: finished(f"dtimer.dispatch/{task}"), "the beat's span", 5)
        timers.stop()
    beats = {identity(beat) for beat, _, _ in chains(task)}
    assert len(chains(task)) == 3
    assert len(beats) == 1
    (beat,) = finished(f"dtimer.dispatch/{task}")
    assert "messaging.message.id" not in beat.attributes
    assert links_of(beat) == []


@pytest.mark.usefixtures("instrumented")
def test_a_trigger_is_linked_to_who_asked_for_it_and_to_the_timers_creator(
    timers: DistributedTimer,
) -> None:
    task = with_callback(timers)
    with creating() as created:
        timers.create_timer("hourly", 3600, "work")
    with creating() as asked:
        timers.trigger_timer("hourly")
    run_all(timers, task)
    ((beat, _, _),) = chains(task)
    assert links_of(beat) == [identity(asked), identity(created)]


@pytest.mark.usefixtures("instrumented")
def test_a_countdown_stays_in_the_trace_of_its_call(timers: DistributedTimer) -> None:
    timers.app.conf.dtimer_eta_threshold = 0
    task = with_callback(timers)
    with creating() as request:
        timers.app.tasks[task].apply_async(countdown=0.2)
    run_all(timers, task)
    (beat,) = finished(f"dtimer.dispatch/{task}")
    (call,) = finished(f"apply_async/{task}")
    (ran,) = finished(f"run/{task}")
    assert parent_of(call) == identity(request)
    assert parent_of(beat) == parent_of(ran) == identity(call)
    assert links_of(beat) == [identity(call)]


@pytest.mark.usefixtures("instrumented")
def test_a_run_that_is_refused_has_a_span_that_says_so(
    timers: DistributedTimer, redis_server: RedisServer
) -> None:
    task = with_callback(timers)
    redis_server.client.set(timers.app.conf.task_default_queue, "no list", ex=60)
    timers.create_timer("refused", datetime.now(timezone.utc), "work")
    timers.start()
    (span, *_) = wait_until(lambda: finished(f"dtimer.dispatch/{task}"), "the span", 5)
    assert span.status.status_code is StatusCode.ERROR
    assert "WRONGTYPE" in span.status.description
    wait_until(lambda: len(finished(f"dtimer.dispatch/{task}")) > 2, "further tries", 10)
    timers.stop()
    tries = finished(f"dtimer.dispatch/{task}")
    senders = {parent_of(each) for each in finished(f"apply_async/{task}")}
    assert senders == set(map(identity, tries)), "each try has a trace of its own"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.usefixtures("instrumented")
def test_a_chain_is_traced_to_its_first_task(timers: DistributedTimer, mode: str) -> None:
    timers.app.conf.dtimer_dispatch = mode
    task = with_callback(timers)
    signature = timers.app.tasks[task].si()
    timers.create_timer("chain", datetime.now(timezone.utc), signature | signature)
    with start_worker(timers.app, perform_ping_check=False, loglevel="CRITICAL"):
        timers.start()
        wait_until(lambda: len(finished(f"run/{task}")) >= 2, "both tasks", 15)
        (beat,) = wait_until(lambda: finished("dtimer.dispatch/celery.chain"), "the beat's", 5)
        timers.stop()
    traces = {identity(span)[0] for span in finished(f"run/{task}")}
    assert traces == {identity(beat)[0]}


# ------------------------------------------------------------------ what is stored


def key_of(timers: DistributedTimer, id: str) -> str:
    """Return the key of a timer's state."""
    return Keys("orders", timers.store.settings.key_prefix)("timer", id)


def stored_trace(timers: DistributedTimer, redis_server: RedisServer, id: str) -> Any:
    return redis_server.client.hget(key_of(timers, id), "trace")


@pytest.mark.usefixtures("spans")
def test_a_timer_keeps_the_trace_of_who_wrote_it_last(
    timers: DistributedTimer, redis_server: RedisServer
) -> None:
    def create(every: float) -> str:
        return timers.create_timer("kept", every, "tasks.record")

    with creating() as first:
        id = create(10)
    trace_id, span_id = identity(first)
    before = timers.get_timer("kept")
    stored = stored_trace(timers, redis_server, id)
    assert stored.startswith(f"00-{trace_id:032x}-{span_id:016x}-")
    with creating():
        create(10)
    assert timers.get_timer("kept") == before, "the same again changes nothing"
    assert stored_trace(timers, redis_server, id).split("-")[1] == f"{trace_id:032x}"
    with creating() as other:
        create(20)
    assert stored_trace(timers, redis_server, id).split("-")[1] == f"{identity(other)[0]:032x}"
    with creating() as last:
        timers.update_timer("kept", schedule=30)
    assert stored_trace(timers, redis_server, id).split("-")[1] == f"{identity(last)[0]:032x}"
    assert redis_server.client.object("ENCODING", key_of(timers, id)) in ("listpack", "ziplist")


@pytest.mark.usefixtures("spans")
def test_without_a_current_span_nothing_is_stored(
    timers: DistributedTimer, redis_server: RedisServer
) -> None:
    id = timers.create_timer("plain", 10, "tasks.record")
    assert stored_trace(timers, redis_server, id) is None


@pytest.mark.usefixtures("instrumented")
def test_a_trace_that_was_edited_by_hand_is_left_out(
    timers: DistributedTimer, redis_server: RedisServer
) -> None:
    task = with_callback(timers)
    id = timers.create_timer("edited", datetime.now(timezone.utc) + timedelta(seconds=1), "work")
    redis_server.client.hset(key_of(timers, id), "trace", "00-no-trace\n")
    run_all(timers, task)
    ((beat, _, _),) = chains(task)
    assert links_of(beat) == []


# ------------------------------------------------------------------ without it


@pytest.mark.usefixtures("spans")
def test_without_the_instrumentation_messages_are_as_ever(
    timers: DistributedTimer, read_queue: ReadQueue
) -> None:
    """A provider and creators with spans alone change neither messages nor their fast path."""
    with creating():
        timers.create_timer("plain", 0.1, "tasks.record")
    reader = read_queue(timers.app)
    timers.start()
    wait_until(lambda: len(reader.messages) >= 5, "some runs", 10)
    publisher = timers._scheduler._runtime._runtimes[""]._publisher
    assert publisher._templates, "they come from a template"
    timers.stop()
    assert all("traceparent" not in message["headers"] for message in reader.messages)
    assert [span.name for span in exporter().get_finished_spans()] == ["request"]


def test_nothing_is_imported() -> None:
    text = """
import sys, celery.beat, redis.cluster, redis.sentinel
before = set(sys.modules)
import celery_dtimer
from celery_dtimer import tracing
print(tracing.current() == "", tracing.is_on())
print([name for name in set(sys.modules) - before if name.startswith("opentelemetry")])
"""
    found = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    assert found.stdout.splitlines() == ["True False", "[]"]
