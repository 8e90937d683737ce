"""Callbacks in a real worker, sent by a real scheduler."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any

import pytest
from celery import Task, signals
from celery.contrib.testing.worker import start_worker
from celery.exceptions import Reject
from celery.utils.dispatch import Signal

from celery_dtimer import CallbackTimer, DistributedTimer
from celery_dtimer.store import Keys
from tests.conftest import FreshRedis, MakeApp
from tests.servers import RabbitMQ, RedisServer
from tests.waiting import wait_until


@pytest.fixture
def timers(make_app: MakeApp) -> Iterator[DistributedTimer]:
    made = DistributedTimer(make_app(worker_hijack_root_logger=False))
    yield made
    made.stop()


def test_a_callback_runs_with_its_timer_again_when_it_is_retried_and_after_it_failed(
    timers: DistributedTimer, redis_server: RedisServer
) -> None:
    seen: list[tuple[str, Any, int]] = []
    failed: list[int] = []

    @timers.callback(shared=False)
    def steady(timer: CallbackTimer, kind: str) -> None:
        seen.append((kind, timer, 0))

    @timers.callback("retried", shared=False, autoretry_for=(KeyError,), default_retry_delay=0)
    def once_more(timer: CallbackTimer) -> None:
        seen.append(("retried", timer, len(seen)))
        if [kind for kind, *_ in seen].count("retried") == 1:
            raise KeyError("the first time")

    @timers.callback(shared=False)
    def failing(timer: CallbackTimer) -> None:
        failed.append(timer.run)
        raise ValueError("every time")

    def kinds() -> set[str]:
        return {kind for kind, *_ in seen}

    with start_worker(timers.app, perform_ping_check=False, loglevel="CRITICAL"):
        instance = timers.start()
        id = timers.create_timer("steady", 0.2, steady.s("own argument"))
        timers.create_timer("retried", 3600, "retried")
        timers.create_timer("failing", 0.2, "failing")
        timers.trigger_timer("retried")
        steady.apply_async(["by hand"])
        wait_until(lambda: len(failed) >= 3, "runs after a failure", 15)
        wait_until(lambda: kinds() == {"own argument", "retried", "by hand"}, "all kinds", 15)
        wait_until(lambda: [kind for kind, *_ in seen].count("retried") == 2, "the retry", 15)
        timers.stop()

    assert failed[:3] == [1, 2, 3]
    (by_hand,) = [timer for kind, timer, _ in seen if kind == "by hand"]
    assert by_hand is None
    first, second = [timer for kind, timer, _ in seen if kind == "retried"]
    assert first == second
    assert first.name == "retried"
    timer = next(timer for kind, timer, _ in seen if kind == "own argument")
    assert (timer.id, timer.name, timer.service) == (id, "steady", "orders")
    assert (timer.instance, timer.run) == (instance, 1)
    assert isinstance(timer.scheduled_at, datetime)
    assert timer.scheduled_at.utcoffset() is not None


# ------------------------------------------------------------------ run once

RUN = "5f6f0a52-3c3f-5d7c-8f43-5a7d0f3d0b11"  # the task id of every message below


def header(instance: str) -> dict[str, Any]:
    return {
        "id": "x",
        "name": "nightly",
        "service": "orders",
        "instance": instance,
        "scheduled_at": "2026-01-01T03:00:00.000+00:00",
        "run": 4,
    }


def send(task: Task[..., Any], task_id: str = RUN, instance: str = "h:1:a", **options: Any) -> None:
    """Send a run as an instance does; each call is another message."""
    task.apply_async(task_id=task_id, headers={"dtimer": header(instance)}, **options)


class Runs:
    """The task ids of what ran, and a last message by which a test knows that all are through."""

    def __init__(self, timers: DistributedTimer) -> None:
        self.seen: list[str] = []

        def last() -> None:
            self.seen.append("last")

        self._last = timers.app.task(name="last", shared=False)(last)

    def wait_for_all(self, timeout: float = 15) -> list[str]:
        """Return what ran, once the messages sent so far are through: there is one worker."""
        self._last.apply_async()
        wait_until(lambda: "last" in self.seen, "the last message", timeout)
        return self.seen[:-1]


@pytest.fixture
def runs(timers: DistributedTimer) -> Runs:
    return Runs(timers)


def worker(timers: DistributedTimer, **options: Any) -> Any:
    return start_worker(timers.app, perform_ping_check=False, loglevel="CRITICAL", **options)


def test_the_second_message_of_a_run_is_dropped_and_leaves_the_result_alone(
    make_app: MakeApp,
    redis_server: RedisServer,
    prefix: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    app = make_app(
        worker_hijack_root_logger=False,
        result_backend="cache+memory://",
        task_track_started=True,
    )
    timers = DistributedTimer(app)
    runs = Runs(timers)

    @timers.callback(shared=False, run_once=60)
    def once(timer: CallbackTimer, value: int) -> int:
        runs.seen.append(once.request.id)
        return value

    @timers.callback(shared=False)
    def often(timer: CallbackTimer) -> None:
        runs.seen.append("often")

    with caplog.at_level(logging.INFO, "celery_dtimer.worker"), worker(timers):
        send(once, args=[1])
        send(once, args=[2])
        send(once, "another-run", args=[3])
        send(often, "one-more")
        send(often, "one-more")
        assert runs.wait_for_all() == [RUN, "another-run", "often", "often"]
        result = app.AsyncResult(RUN)
        assert (result.state, result.result) == ("SUCCESS", 1)

    (record,) = [record for record in caplog.records if record.name == "celery_dtimer.worker"]
    assert record.levelno == logging.INFO
    assert RUN in record.message
    key = Keys("orders", prefix)("run_claim", RUN)
    assert 0 < redis_server.client.pttl(key) <= 60_000


def test_a_message_that_is_delivered_again_runs_again(timers: DistributedTimer, runs: Runs) -> None:
    tags: list[str] = []

    @timers.callback(shared=False, run_once=True, acks_late=True)
    def once(timer: CallbackTimer) -> None:
        request = once.request
        runs.seen.append(request.id)
        tags.append(request.properties["delivery_tag"])
        if not request.delivery_info["redelivered"]:
            raise Reject("as if the worker had died", requeue=True)

    with worker(timers):
        send(once)
        wait_until(lambda: len(runs.seen) == 2, "the message to be delivered again", 15)
        send(once)
        assert runs.wait_for_all() == [RUN, RUN]
    assert len(set(tags)) == 1


def test_a_retry_runs_and_a_duplicate_of_it_does_not(timers: DistributedTimer, runs: Runs) -> None:
    @timers.callback(shared=False, run_once=True, autoretry_for=(KeyError,), default_retry_delay=0)
    def once(timer: CallbackTimer) -> None:
        runs.seen.append(f"{once.request.retries}")
        if not once.request.retries:
            raise KeyError("the first time")

    with worker(timers):
        send(once)
        wait_until(lambda: len(runs.seen) == 2, "the retry", 15)
        send(once)
        assert runs.wait_for_all() == ["0", "1"]


def test_a_run_is_forgotten_after_the_stated_time(
    timers: DistributedTimer, runs: Runs, redis_server: RedisServer
) -> None:
    @timers.callback(shared=False, run_once=timedelta(seconds=0.2))
    def once(timer: CallbackTimer) -> None:
        runs.seen.append(once.request.id)

    key = timers.store.base.keys("run_claim", RUN)
    with worker(timers):
        send(once)
        wait_until(lambda: runs.seen == [RUN], "the run", 15)
        wait_until(lambda: not redis_server.client.exists(key), "its claim to expire", 15)
        send(once)
        assert runs.wait_for_all() == [RUN, RUN]


def test_what_is_sent_by_hand_runs_as_often_as_it_is_sent(
    timers: DistributedTimer, runs: Runs
) -> None:
    @timers.callback(shared=False, run_once=True)
    def once(timer: CallbackTimer | None) -> None:
        runs.seen.append(f"{timer}")

    with worker(timers):
        for _ in range(2):
            once.apply_async(task_id=RUN)
        assert runs.wait_for_all() == ["None", "None"]


def test_without_redis_both_messages_run(
    make_app: MakeApp, fresh_redis: FreshRedis, caplog: pytest.LogCaptureFixture
) -> None:
    store = fresh_redis()
    timers = DistributedTimer(make_app(worker_hijack_root_logger=False, dtimer_redis_url=store.url))
    runs = Runs(timers)

    @timers.callback(shared=False, run_once=True)
    def once(timer: CallbackTimer) -> None:
        runs.seen.append(once.request.id)

    with caplog.at_level(logging.INFO, "celery_dtimer.worker"), worker(timers):
        send(once)
        wait_until(lambda: runs.seen == [RUN], "the first run", 15)
        store.kill()
        send(once)
        send(once)
        assert runs.wait_for_all() == [RUN] * 3
    warnings = [record for record in caplog.records if record.name == "celery_dtimer.worker"]
    assert [record.levelno for record in warnings] == [logging.WARNING]


@pytest.mark.parametrize("signal", [signals.worker_process_shutdown, signals.worker_shutdown])
def test_the_connections_end_with_the_worker_and_are_made_anew(
    timers: DistributedTimer, runs: Runs, signal: Signal
) -> None:
    @timers.callback(shared=False, run_once=True)
    def once(timer: CallbackTimer) -> None:
        runs.seen.append(once.request.id)

    with worker(timers):
        send(once)
        wait_until(lambda: runs.seen == [RUN], "the run", 15)
        (store,) = timers._claims._stores._stores.values()
        (connection,) = store.base.client.connection_pool._available_connections
        assert connection._sock is not None
        signal.send(sender=None)
        assert connection._sock is None
        send(once)
        send(once, "another-run")
        assert runs.wait_for_all() == [RUN, "another-run"]


def test_on_rabbitmq_a_duplicate_is_dropped_and_what_is_delivered_again_runs(
    make_app: MakeApp, redis_server: RedisServer, shared_rabbitmq: RabbitMQ
) -> None:
    """Its messages carry no tag of their own: it says itself whether it delivers one again."""
    timers = DistributedTimer(
        make_app(
            worker_hijack_root_logger=False,
            broker_url=shared_rabbitmq.url,
            dtimer_redis_url=redis_server.url,
        )
    )
    runs = Runs(timers)

    @timers.callback(shared=False, run_once=True, acks_late=True)
    def once(timer: CallbackTimer) -> None:
        runs.seen.append(timer.instance)
        if timer.instance == "dies" and not once.request.delivery_info["redelivered"]:
            raise Reject("as if the worker had died", requeue=True)

    with worker(timers, without_heartbeat=False):  # an idle one would not see that it is to end
        send(once, "first", "sends twice")
        send(once, "first", "sends twice")
        send(once, "first", "the next owner")
        assert runs.wait_for_all() == ["sends twice"]
        runs.seen.clear()
        send(once, "second", "dies")
        wait_until(lambda: len(runs.seen) == 2, "the message to be delivered again", 15)
        send(once, "second", "the next owner")
        assert runs.wait_for_all() == ["dies", "dies"]
