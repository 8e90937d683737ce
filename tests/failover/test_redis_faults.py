"""The timers' Redis restarts, freezes, refuses writes, or loses its data, scripts or keys."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.conftest import FreshRedis
from tests.failover.deployment import TAKEOVER, TIMEOUT, Deploy, Deployment
from tests.servers import RedisServer

SCHEDULE = {f"static-{n:02}": {"task": "record", "schedule": 1.0} for n in range(12)}

#: Everybody fell silent: two heartbeat intervals of grace, then reconnecting with back-off.
RECOVERY = TAKEOVER + 2


def test_a_restart_with_its_data_loses_and_doubles_nothing(
    deploy: Deploy, fresh_redis: FreshRedis
) -> None:
    deployment = deploy(store=fresh_redis(appendonly=True))
    beats = deployment.start_beats(2)
    names = deployment.create(20)
    deployment.wait_firing(names)

    deployment.store.kill()
    deployment.pass_time(2)
    deployment.store.start()
    back_ms = deployment.now_ms()
    deployment.wait_sent(names, back_ms, RECOVERY)

    deployment.wait_registered(beats)
    assert all(beat.is_running() for beat in beats)
    deployment.ledger.assert_doubles_are_recognizable()
    assert not deployment.ledger.doubled()
    deployment.assert_accounted(names, 1000)


def test_lost_data_bring_the_static_schedule_back_without_a_restart(
    deploy: Deploy, fresh_redis: FreshRedis
) -> None:
    deployment = deploy(store=fresh_redis(), beat_schedule=SCHEDULE)
    beats = deployment.start_beats(2)
    deployment.wait_firing(SCHEDULE)

    for lose in (
        lambda: deployment.store.restart(keep_data=False),
        deployment.store.client.flushall,
    ):
        lose()
        lost_ms = deployment.now_ms()
        deployment.wait_sent(SCHEDULE, lost_ms, RECOVERY)
        deployment.wait_registered(beats)
        deployment.wait_balanced()
        back_ms = deployment.now_ms()
        end_ms = deployment.pass_time(2)
        deployment.wait_sent(SCHEDULE, end_ms - 999)

        assert all(beat.is_running() for beat in beats)
        later = [run.slot for run in deployment.ledger.since(back_ms)]
        assert len(later) == len(set(later))
        deployment.assert_consistent()


def test_lost_scripts_under_load_lose_and_double_nothing(deployment: Deployment) -> None:
    deployment.start_beats(2)
    names = deployment.create(60)
    deployment.wait_firing(names)
    for _ in range(20):
        deployment.store.client.script_flush()
        deployment.pass_time(0.15)
    end_ms = deployment.now_ms()
    deployment.wait_sent(names, end_ms - 999)
    deployment.ledger.assert_every_run_once(names, 1000, end_ms)


def test_killed_connections_lose_and_double_nothing(
    deploy: Deploy, fresh_redis: FreshRedis
) -> None:
    deployment = deploy(store=fresh_redis())
    beats = deployment.start_beats(2)
    names = deployment.create(20)
    deployment.wait_firing(names)
    for _ in range(8):
        deployment.store.client.client_kill_filter(_type="normal", skipme=True)
        deployment.pass_time(0.3)
    end_ms = deployment.now_ms()
    deployment.wait_sent(names, end_ms, RECOVERY)

    deployment.wait_registered(beats)
    deployment.ledger.assert_nothing_doubled()
    deployment.assert_accounted(names, 1000)


FREEZES: dict[str, Callable[[RedisServer, float], None]] = {
    "SIGSTOP": lambda server, _: server.freeze(),
    "CLIENT PAUSE": lambda server, seconds: server.client.client_pause(round(seconds * 1000)),
}


@pytest.mark.parametrize("freeze", FREEZES.values(), ids=FREEZES.keys())
@pytest.mark.parametrize("is_shared", [False, True], ids=["alone", "with the broker"])
def test_a_frozen_redis_is_nobodys_death(
    deploy: Deploy,
    fresh_redis: FreshRedis,
    freeze: Callable[[RedisServer, float], None],
    is_shared: bool,
) -> None:
    server = fresh_redis()
    deployment = deploy(store=server, **({"broker": server} if is_shared else {}))
    beats = deployment.start_beats(3)
    names = deployment.create(30)
    deployment.wait_firing(names)
    epochs = deployment.epochs()

    for seconds in (TIMEOUT / 2, TIMEOUT + 1) if is_shared else (TIMEOUT + 1,):
        freeze(server, seconds)
        deployment.pass_time(seconds)
        server.thaw()
        thawed_ms = deployment.now_ms()
        deployment.wait_sent(names, thawed_ms, RECOVERY)

        assert all(beat.is_running() for beat in beats)
        assert deployment.epochs() == epochs, "nobody was declared dead"
        deployment.ledger.assert_nothing_doubled()
        deployment.assert_accounted(names, 1000)
    assert deployment.modes() == {"atomic" if is_shared else "confirmed"}


def test_a_redis_that_refuses_writes_is_waited_out(deploy: Deploy, fresh_redis: FreshRedis) -> None:
    """A replica in the master's place answers READONLY to every write."""
    deployment = deploy(store=fresh_redis())
    beats = deployment.start_beats(2)
    names = deployment.create(20)
    deployment.wait_firing(names)

    deployment.store.client.execute_command("REPLICAOF", "127.0.0.1", "1")
    deployment.pass_time(3)
    deployment.store.client.execute_command("REPLICAOF", "NO", "ONE")
    back_ms = deployment.now_ms()
    deployment.wait_sent(names, back_ms, RECOVERY)

    assert all(beat.is_running() for beat in beats)
    deployment.ledger.assert_doubles_are_recognizable()
    deployment.assert_accounted(names, 1000)
    deployment.ledger.assert_nothing_doubled()


def test_deleted_ownership_keys_stop_no_beat_and_no_timer(deployment: Deployment) -> None:
    beats = deployment.start_beats(3)
    names = deployment.create(30)
    deployment.wait_firing(names)

    victim = deployment.registered()[beats[0].pid]
    for key in (
        f"{deployment.key('instance')}:{victim}",
        f"{deployment.key('instance_timers')}:{victim}",
        deployment.key("service_instances"),
    ):
        assert deployment.store.client.delete(key) == 1
        deleted_ms = deployment.now_ms()
        deployment.wait_sent(names, deleted_ms + 1, RECOVERY + 2)
        deployment.wait_registered(beats)
        end_ms = deployment.pass_time(1)
        deployment.wait_sent(names, end_ms - 999)

        assert all(beat.is_running() for beat in beats)
        deployment.assert_consistent(within=3)
        deployment.ledger.assert_nothing_doubled()
