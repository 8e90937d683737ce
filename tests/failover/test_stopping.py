"""A beat ends within two seconds of SIGTERM, whatever it was doing."""

from __future__ import annotations

import signal

import pytest

from tests.conftest import FreshRedis
from tests.failover.deployment import Deploy, Deployment
from tests.waiting import wait_until


def test_an_idle_beat(deployment: Deployment) -> None:
    (beat,) = deployment.start_beats(1)
    assert beat.stop() < 2
    assert beat.exit_code == 0
    assert deployment.registered() == {}


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_beat_in_the_middle_of_a_large_batch(deployment: Deployment, signum: int) -> None:
    names = deployment.create(5000, interval=0.5)
    (beat,) = deployment.start_beats(1)
    wait_until(lambda: len(deployment.ledger) > 200, "the beat to send", 10)
    took = beat.stop(signum)

    assert took < 2
    assert deployment.registered() == {}
    ledger = deployment.ledger
    sent = sum(timer.total_run_count for timer in deployment.timers.get_timers())
    wait_until(lambda: len(ledger) == sent, f"{sent} committed runs to have been sent")
    ledger.assert_nothing_doubled()
    assert len(names) == 5000


def test_a_beat_that_waits_for_redis_at_its_start(deploy: Deploy, fresh_redis: FreshRedis) -> None:
    store = fresh_redis(running=False)
    deployment = deploy(store=store, broker=fresh_redis())
    beat = deployment.start_beat()
    wait_until(lambda: str(store.port) in beat.log_text(), "the beat to try", 15)
    assert beat.stop() < 2
    store.start()


def test_a_beat_that_comes_before_redis_begins_when_redis_is_there(
    deploy: Deploy, fresh_redis: FreshRedis
) -> None:
    store = fresh_redis(running=False)
    schedule = {"early": {"task": "record", "schedule": 1.0}}
    deployment = deploy(store=store, broker=fresh_redis(), beat_schedule=schedule)
    beat = deployment.start_beat()
    wait_until(lambda: str(store.port) in beat.log_text(), "the beat to try", 15)
    store.start()
    deployment.wait_registered([beat], 6)
    deployment.wait_firing(schedule)


@pytest.mark.parametrize("fault", ["dead", "frozen"])
def test_a_beat_whose_redis_is_gone(deploy: Deploy, fresh_redis: FreshRedis, fault: str) -> None:
    store = fresh_redis(appendonly=True)
    deployment = deploy(store=store)
    (beat,) = deployment.start_beats(1)
    names = deployment.create(20)
    deployment.wait_firing(names)
    store.kill() if fault == "dead" else store.freeze()
    try:
        assert beat.stop() < 2
    finally:
        store.start() if fault == "dead" else store.thaw()


@pytest.mark.parametrize("fault", ["dead", "frozen"])
def test_a_beat_whose_broker_is_gone(deploy: Deploy, fresh_redis: FreshRedis, fault: str) -> None:
    broker = fresh_redis(appendonly=True)
    deployment = deploy(broker=broker)
    (beat,) = deployment.start_beats(1)
    names = deployment.create(20)
    deployment.wait_firing(names)
    broker.kill() if fault == "dead" else broker.freeze()
    try:
        deployment.pass_time(1.5)
        assert beat.stop() < 2
    finally:
        broker.start() if fault == "dead" else broker.thaw()
    assert deployment.registered() == {}


def test_a_worker_with_an_embedded_beat(deployment: Deployment) -> None:
    worker = deployment.start_worker(
        "-B", "-c", "1", beat_scheduler="celery_dtimer:DistributedScheduler"
    )
    wait_until(deployment.registered, "the embedded beat to register", 10)
    worker.stop()
    wait_until(lambda: not deployment.registered(), "the embedded beat to leave", 1)
