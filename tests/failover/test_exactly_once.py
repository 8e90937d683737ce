"""Beats that die, freeze and leave while they fire: each run once, or with one task id."""

from __future__ import annotations

import random

import pytest

from celery_dtimer import faults
from tests.conftest import FreshRedis
from tests.failover.deployment import IS_LONG, Deploy, Deployment
from tests.processes import Process
from tests.waiting import wait_until

MODES = ("atomic", "confirmed")
KILLS = 500 if IS_LONG else 8
INTERVAL = 0.25

PATIENT = {
    "dtimer_heartbeat_interval": 2,
    "dtimer_instance_timeout": 20,
    "dtimer_check_interval": 0.2,
    "dtimer_lag_limit": 0.5,
}


# ------------------------------------------------------------------ which mode


def test_dispatch_is_atomic_where_broker_and_timers_share_a_server(deploy: Deploy) -> None:
    deployment = deploy()
    beats = deployment.start_beats(2)
    wait_until(lambda: deployment.modes() == {"atomic"}, "the mode to be known")
    for beat in beats:
        assert beat.log_text().count("Dispatch is atomic: ") == 1


@pytest.mark.parametrize("why", ["another server", "the setting"])
def test_dispatch_is_confirmed_elsewhere_and_says_why(
    deploy: Deploy, fresh_redis: FreshRedis, why: str
) -> None:
    if why == "another server":
        deployment, reason = deploy(broker=fresh_redis()), "not on the server that holds the timers"
    else:
        deployment, reason = deploy(dtimer_dispatch="confirmed"), "dtimer_dispatch says so"
    (beat,) = deployment.start_beats(1)
    wait_until(lambda: deployment.modes() == {"confirmed"}, "the mode to be known")
    (instance,) = deployment.timers.get_service_instances()
    assert reason in instance.dispatch_reason
    assert beat.log_text().count("Dispatch is confirmed: ") == 1


# ------------------------------------------------------------------ kill -9


def crash_point() -> str:
    """Return a point of the dispatch, and after how many passes to die there."""
    return f"{random.choice(faults.POINTS)}:{random.randint(1, 6)}"


def wait_dead(deployment: Deployment, victim: Process, crashes: bool) -> None:
    """Kill a beat as soon as it has sent something, if it does not die by itself."""
    seen = len(deployment.ledger)

    def fires() -> bool:
        return any(run.pid == victim.pid for run in deployment.ledger.runs[seen:])

    wait_until(lambda: not victim.is_running() or (not crashes and fires()), "it to fire", 20)
    victim.kill()


@pytest.mark.timeout(KILLS * 5 + 120)
@pytest.mark.parametrize("mode", MODES)
def test_kills_at_the_moment_of_firing(deploy: Deploy, mode: str) -> None:
    """Every other beat dies at a labelled point of its dispatch, the others are shot."""
    deployment = deploy(dtimer_dispatch=mode, dtimer_batch_size=5)
    names = deployment.create(20, INTERVAL)
    beats = deployment.start_beats(2)
    deployment.wait_firing(names)
    is_armed = {beat.pid: False for beat in beats}
    for number in range(KILLS):
        beats.append(deployment.start_beat(crash_at=crash_point() if number % 2 else ""))
        is_armed[beats[-1].pid] = bool(number % 2)
        victim = beats.pop(0)
        wait_dead(deployment, victim, is_armed[victim.pid])
    beats.append(deployment.start_beat())
    for beat in beats:
        if is_armed.get(beat.pid):  # what it has published and not committed is for the others
            beat.kill()
    deployment.wait_sent(names, deployment.now_ms(), 15)
    for beat in beats:
        if not is_armed.get(beat.pid):
            beat.stop()

    deployment.assert_accounted(names, round(INTERVAL * 1000))
    deployment.ledger.assert_doubles_are_recognizable()
    deployment.ledger.assert_on_the_grid(round(INTERVAL * 1000))
    deployment.ledger.assert_never_early()
    if mode == "atomic":
        deployment.ledger.assert_nothing_doubled()


# ------------------------------------------------------------------ SIGSTOP


@pytest.mark.parametrize("mode", MODES)
def test_a_frozen_owners_timers_are_sent_by_its_peers_while_it_is_still_trusted(
    deploy: Deploy, mode: str
) -> None:
    """Its registration lasts far longer; its peer is never idle when it wakes, and looks still."""
    deployment = deploy(dtimer_dispatch=mode, **{**PATIENT, "dtimer_check_interval": 1})
    beats = deployment.start_beats(2)
    names = deployment.create(300)
    deployment.wait_firing(names)
    epochs, frozen = deployment.epochs(), beats[0]

    deployment.pass_time(0.3)  # what a beat has published and not committed nobody takes from it
    frozen.freeze()
    frozen_ms = deployment.now_ms()
    deployment.wait_sent(names, frozen_ms + 1500, 8)
    assert deployment.epochs() == epochs, "nobody was declared dead"
    lag_ms = max(run.lag_ms for run in deployment.ledger.since(frozen_ms))
    frozen.thaw()
    end_ms = deployment.pass_time(1.5)
    deployment.wait_sent(names, end_ms - 999)

    assert lag_ms < 500 + 1000 + 1000, "the lag limit, the check behind it, and what it takes"
    assert deployment.epochs() == epochs
    deployment.assert_accounted(names, 1000)
    deployment.ledger.assert_doubles_are_recognizable()
    doubled = deployment.ledger.doubled()
    if mode == "atomic":
        assert not doubled
    assert all(abs(scheduled - frozen_ms) <= 1000 for _, scheduled in doubled), doubled


# ------------------------------------------------------------------ SIGTERM


def test_rolling_restarts_under_load_lose_and_double_nothing(deploy: Deploy) -> None:
    deployment = deploy(**PATIENT)
    names = deployment.create(400, 0.5)
    beats = deployment.start_beats(2)
    deployment.wait_firing(names)
    for _ in range(3):
        beats.append(deployment.start_beat())
        deployment.wait_registered(beats)
        leaving = beats.pop(0)
        assert leaving.stop() < 2
        assert leaving.exit_code == 0
    deployment.wait_sent(names, deployment.now_ms())
    for beat in beats:
        beat.stop()

    deployment.assert_accounted(names, 500)
    deployment.ledger.assert_nothing_doubled()
    deployment.ledger.assert_on_the_grid(500)
