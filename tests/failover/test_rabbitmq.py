"""Confirmed dispatch on RabbitMQ: runs wait for a broker that dies; a refused queue waits alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from celery import Celery
from kombu import Connection, Queue

from celery_dtimer import DistributedTimer
from tests.conftest import MakeApp
from tests.servers import RabbitMQ
from tests.waiting import wait_until

pytestmark = pytest.mark.failover


@pytest.fixture
def app(make_app: MakeApp, redis_server: Any, rabbitmq: RabbitMQ) -> Celery:
    return make_app(
        broker_url=rabbitmq.url, dtimer_redis_url=redis_server.url, dtimer_instance_timeout=3
    )


@pytest.fixture
def timers(app: Celery) -> Iterator[DistributedTimer]:
    timers = DistributedTimer(app)
    timers.start()
    yield timers
    timers.stop()


def _reader(url: str, queue: str) -> Callable[[], list[dict[str, Any]]]:
    """Return a function that answers all headers read from a queue so far."""
    seen: list[dict[str, Any]] = []

    def read() -> list[dict[str, Any]]:
        with Connection(url, connect_timeout=1) as connection:
            simple = connection.SimpleQueue(Queue(queue))
            while True:
                try:
                    message = simple.get(block=False)
                except simple.Empty:
                    return seen
                seen.append(message.headers)
                message.ack()

    return read


def test_runs_wait_for_a_broker_that_dies(
    app: Celery, timers: DistributedTimer, rabbitmq: RabbitMQ
) -> None:
    queue = app.conf.task_default_queue
    read = _reader(rabbitmq.url, queue)
    timers.create_timer("every", 0.5, "some.task")
    wait_until(lambda: len(read()) >= 3, "three runs", 20)
    instance = timers.get_service_instances()[0]
    rabbitmq.kill()
    timers.create_timer("once", _soon(), "some.task")
    wait_until(lambda: timers.get_timer("every").next_run_at < _soon(-2), "a run to be late", 20)
    rabbitmq.start()
    wait_until(lambda: timers.get_timer("once").total_run_count == 1, "the late run", 20)
    wait_until(lambda: "once" in [each["dtimer"]["name"] for each in read()], "its message", 20)
    runs = [each["dtimer"]["run"] for each in read() if each["dtimer"]["name"] == "every"]
    assert set(runs) == set(range(1, max(runs) + 1)), "a run was committed and not sent"
    assert timers.get_service_instances()[0].epoch == instance.epoch, "the lease was lost"
    assert timers.check_consistency() == []


def test_a_queue_that_is_refused_delays_only_its_own_timer(
    app: Celery, timers: DistributedTimer, rabbitmq: RabbitMQ
) -> None:
    with Connection(rabbitmq.url) as connection:  # declared otherwise than Celery would
        Queue("refused", durable=False, auto_delete=True).bind(connection.channel()).declare()
        timers.create_timer("bad", 0.3, "some.task", queue="refused")
        timers.create_timer("good", 0.3, "some.task")
        wait_until(lambda: timers.get_timer("good").total_run_count >= 8, "good runs", 20)
        bad = timers.get_timer("bad")
    assert (bad.status, bad.total_run_count) == ("active", 0)


def _soon(seconds: float = 0.0) -> datetime:
    return datetime.now(timezone.utc) + timedelta(seconds=seconds)
