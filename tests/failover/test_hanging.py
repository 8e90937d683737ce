"""A beat that hangs, or that works on for longer than its lease: who may send, and who knows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from celery import beat as celery_beat
from kombu.exceptions import OperationalError
from redis.exceptions import RedisError

from tests.conftest import FreshRedis
from tests.failover.deployment import IS_LONG, TAKEOVER, TIMEOUT, Deploy, Deployment
from tests.failover.test_stopping_states import MakeProxy
from tests.waiting import wait_until

needs_remote_control = pytest.mark.skipif(
    not hasattr(celery_beat, "BeatPidbox"), reason="remote control of beats came with Celery 5.7"
)


@needs_remote_control
def test_a_beat_whose_loop_hangs_loses_its_timers_and_answers_no_ping(deploy: Deploy) -> None:
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


Answers = Callable[[], bool]


def pinging(deployment: Deployment, *nodes: str) -> Answers:
    """Return what says whether this node, or none at all, answers a ping."""

    def all_answer() -> bool:
        replies = deployment.app.control.ping(timeout=1.5, limit=1)
        return {name for reply in replies for name in reply} == set(nodes)

    return all_answer


@needs_remote_control
@pytest.mark.parametrize("shards", [1, 3])
def test_a_beat_answers_no_ping_while_its_redis_is_frozen(
    deploy: Deploy, fresh_redis: FreshRedis, shards: int
) -> None:
    """It dispatches nothing, though its loop goes on; and it does so by itself afterwards."""
    deployment = deploy(
        store=fresh_redis(),
        beat_enable_remote_control=True,
        beat_remote_control_max_tick_age=1.5,
        dtimer_shards=shards,
    )
    beat = deployment.start_beat("-n", "waiting@test")
    is_there, is_silent = pinging(deployment, "waiting@test"), pinging(deployment)
    wait_until(is_there, "an answer", 10)
    deployment.store.freeze()
    wait_until(is_silent, "silence", TIMEOUT + 5)
    deployment.pass_time(1)
    assert is_silent(), "it stays so"
    deployment.store.thaw()
    wait_until(is_there, "an answer again", 8)
    names = deployment.create(5, 0.5)
    deployment.wait_firing(names)
    assert "Traceback" not in beat.log_text()


@needs_remote_control
def test_a_beat_that_was_never_registered_answers_no_ping(
    deploy: Deploy, fresh_redis: FreshRedis
) -> None:
    deployment = deploy(
        store=fresh_redis(),
        beat_enable_remote_control=True,
        beat_remote_control_max_tick_age=1.5,
    )
    deployment.store.freeze()
    beat = deployment.start_beat("-n", "early@test")
    wait_until(lambda: "beat pidbox: Connected" in beat.log_text(), "remote control", 10)
    wait_until(pinging(deployment), "silence", 5)
    deployment.pass_time(1)
    assert pinging(deployment)(), "it stays so"
    deployment.store.thaw()
    wait_until(pinging(deployment, "early@test"), "an answer", 8)


@needs_remote_control
def test_a_beat_whose_broker_was_frozen_answers_pings_again(
    deploy: Deploy, fresh_redis: FreshRedis
) -> None:
    """Pings come by the broker: while it is frozen there is no answer, whatever beats say."""
    deployment = deploy(
        broker=fresh_redis(),
        beat_enable_remote_control=True,
        beat_remote_control_max_tick_age=1.5,
        broker_transport_options={"socket_timeout": 1, "socket_connect_timeout": 1},
    )
    deployment.start_beat("-n", "patient@test")
    is_there = pinging(deployment, "patient@test")
    wait_until(is_there, "an answer", 10)
    deployment.broker.freeze()
    deployment.pass_time(TIMEOUT + 1)
    with pytest.raises((OperationalError, RedisError)):
        deployment.app.control.ping(timeout=0.5)
    deployment.broker.thaw()
    wait_until(is_there, "an answer again", 12)


@needs_remote_control
def test_a_beat_with_shards_answers_no_ping_while_one_of_its_loops_hangs(deploy: Deploy) -> None:
    deployment = deploy(
        beat_enable_remote_control=True, beat_remote_control_max_tick_age=1.5, dtimer_shards=3
    )
    hang = deployment.folder / "hang"
    deployment.start_beat("-n", "hanging@test", hang=hang)
    is_there = pinging(deployment, "hanging@test")
    wait_until(is_there, "an answer", 10)
    (name,) = deployment.create(1, 0.5)  # in one of the shards
    deployment.wait_firing([name])
    hang.touch()
    wait_until(pinging(deployment), "silence", TIMEOUT + 5)
    hang.unlink()
    wait_until(is_there, "an answer again", 8)
    deployment.wait_sent([name], deployment.now_ms())


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
