"""A beat that hangs, or that works on for longer than its lease: who may send, and who knows."""

from __future__ import annotations

import pytest
from celery import beat as celery_beat

from tests.conftest import FreshRedis
from tests.failover.deployment import IS_LONG, TAKEOVER, TIMEOUT, Deploy
from tests.failover.test_stopping_states import MakeProxy
from tests.waiting import wait_until

needs_remote_control = pytest.mark.skipif(
    not hasattr(celery_beat, "BeatPidbox"), reason="remote control of beats came with Celery 5.7"
)


@needs_remote_control
def test_a_beat_whose_loop_hangs_loses_its_timers_and_answers_no_ping(deploy: Deploy) -> None:
    """One that waits for its broker, or for Redis, is another matter: its loop goes on."""
    deployment = deploy(
        beat_enable_remote_control=True, beat_remote_control_max_tick_age=1.5, timezone="UTC"
    )
    hang = deployment.folder / "hang"
    hanging = deployment.start_beat("-n", "hanging@test", hang=hang)
    other = deployment.start_beat("-n", "other@test")
    deployment.wait_registered([hanging, other])
    names = deployment.create(20, 0.5)
    deployment.wait_firing(names)

    def answering() -> set[str]:
        nodes = ["hanging@test", "other@test"]
        return {
            name
            for reply in deployment.app.control.ping(destination=nodes, timeout=0.5)
            for name in reply
        }

    wait_until(lambda: answering() == {"hanging@test", "other@test"}, "both to answer", 10)
    epochs = deployment.epochs()
    hung_ms = deployment.now_ms()
    hang.touch()
    wait_until(lambda: deployment.owned_by(hanging) == 0, "its timers to go", 2 * TAKEOVER)
    deployment.wait_sent(names, hung_ms + 500, TAKEOVER)
    wait_until(lambda: answering() == {"other@test"}, "it to fall silent", 5)
    assert hanging.log_text().count("the dispatch loop makes no progress") == 1

    hang.unlink()
    wait_until(lambda: deployment.owned_by(hanging) >= 9, "it to get its share again", 5)
    wait_until(lambda: answering() == {"hanging@test", "other@test"}, "both to answer", 5)
    end_ms = deployment.now_ms()
    deployment.wait_sent(names, end_ms)
    assert deployment.epochs()[hanging.pid] != epochs[hanging.pid]
    assert deployment.epochs()[other.pid] == epochs[other.pid]
    deployment.ledger.assert_nothing_doubled()
    deployment.assert_accounted(names, 500)


def test_a_beat_whose_loop_hangs_ends_in_time_and_hands_over(deploy: Deploy) -> None:
    deployment = deploy(dtimer_heartbeat_interval=5, dtimer_instance_timeout=30)
    hang = deployment.folder / "hang"
    hanging = deployment.start_beat(hang=hang)
    other = deployment.start_beat()
    deployment.wait_registered([hanging, other])
    names = deployment.create(20, 0.5)
    deployment.wait_firing(names)
    hang.touch()
    deployment.pass_time(1)
    asked_ms = deployment.now_ms()
    assert hanging.stop() < 2
    deployment.wait_sent(names, asked_ms, 3)
    assert set(deployment.registered()) == {other.pid}
    deployment.ledger.assert_nothing_doubled()


@needs_remote_control
def test_a_beat_that_waits_for_its_redis_answers_pings(
    deploy: Deploy, tcp_proxy: MakeProxy
) -> None:
    """Whoever restarts what does not answer would only make it worse."""
    deployment = deploy(beat_enable_remote_control=True, beat_remote_control_max_tick_age=1)
    proxy = tcp_proxy(deployment.store)
    beat = deployment.start_beat("-n", "waiting@test", dtimer_redis_url=proxy.url)
    deployment.wait_registered([beat])
    proxy.black_hole = True
    deployment.pass_time(TIMEOUT + 1.5)
    wait_until(
        lambda: deployment.app.control.ping(destination=["waiting@test"], timeout=0.5),
        "an answer",
        5,
    )
    deployment.pass_time(1)
    assert deployment.app.control.ping(destination=["waiting@test"], timeout=1)


MANY = 10_000 if IS_LONG else 3_000


def test_a_batch_that_takes_longer_than_the_lease(
    deploy: Deploy, fresh_redis: FreshRedis, tcp_proxy: MakeProxy
) -> None:
    """Heartbeats come from another thread: who works keeps its lease, however slow its broker."""
    deployment = deploy(broker=fresh_redis(), dtimer_batch_size=50)
    proxy = tcp_proxy(deployment.broker)
    slow = deployment.start_beat(broker_url=proxy.url, dtimer_lag_limit=60)
    deployment.wait_registered([slow])
    deployment.create_once(MANY, 1.5)
    epochs = deployment.epochs()
    proxy.latency = 0.03
    wait_until(deployment.queued, "the first batch", 10)
    first_ms = deployment.now_ms()
    wait_until(lambda: deployment.queued() >= MANY, "all to be sent", 40)
    took_ms = deployment.now_ms() - first_ms
    assert took_ms > TIMEOUT * 1000, "it has outlasted the lease"
    assert deployment.epochs() == epochs
    ledger = deployment.read_at_once()
    ledger.assert_nothing_doubled()
    assert len(ledger.names()) == MANY
    assert set(ledger.senders()) == {slow.pid}


def test_a_worker_goes_on_when_its_embedded_beat_loses_what_it_owned(deploy: Deploy) -> None:
    """Keys deleted, and all of it suspended for longer than the timeout, beside another beat."""
    deployment = deploy(beat_scheduler="celery_dtimer:DistributedScheduler")
    names = deployment.create(20, 0.5)
    worker = deployment.start_worker("-B", "-c", "1")
    other = deployment.start_beat()
    wait_until(lambda: len(deployment.registered()) == 2, "both beats", 20)
    (embedded,) = set(deployment.registered()) - {other.pid}
    instance = deployment.registered()[embedded]
    for what in ("instance", "instance_timers"):
        deployment.store.client.delete(f"{deployment.key(what)}:{instance}")
    deployment.store.client.delete(deployment.key("service_instances"))
    wait_until(
        lambda: deployment.owned().get(embedded, 0) >= 9, "the embedded beat to have its share", 15
    )
    worker.freeze()
    wait_until(lambda: embedded not in deployment.registered(), "the failover", TAKEOVER + 2)
    worker.thaw()
    wait_until(lambda: deployment.owned().get(embedded, 0) >= 9, "its share again", 8)
    back_ms = deployment.now_ms()
    deployment.wait_ran(names, back_ms)
    assert worker.is_running()
    assert set(deployment.registered()) == {embedded, other.pid}, "the same processes"
    assert "Traceback" not in worker.log_text()
    deployment.ran().assert_nothing_doubled()
