"""Timers that other processes create, change and delete while the beats sleep."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from datetime import datetime, timezone

import pytest

from tests.failover.deployment import Deploy, Deployment
from tests.waiting import wait_until

#: No poll may be what notices a change: the safety check is as rare as it can be.
SLEEPY = {
    "dtimer_heartbeat_interval": 5,
    "dtimer_check_interval": 10,
    "dtimer_failure_check_interval": 10,
    "dtimer_instance_timeout": 30,
    "beat_max_loop_interval": 300,
}


@pytest.fixture
def sleeping(deploy: Deploy) -> Deployment:
    """Two beats with nothing to do for an hour."""
    deployment = deploy(**SLEEPY)
    deployment.start_beats(2)
    deployment.timers.create_timer("hourly", 3600, "record")
    channels = [f"{deployment.key('wake')}:{each}" for each in deployment.registered().values()]
    wait_until(
        lambda: all(count for _, count in deployment.store.client.pubsub_numsub(*channels)),
        "the beats to listen",
    )
    return deployment


def test_a_timer_created_while_the_beats_sleep_fires_at_once(
    sleeping: Deployment, record_property: Callable[[str, object], None]
) -> None:
    lags = []
    for number in range(11):
        sleeping.timers.create_timer(f"now-{number}", datetime.now(timezone.utc), "record")
        sleeping.wait_firing([f"now-{number}"], 3)
        lags.append(sleeping.ledger.runs[-1].lag_ms)
    record_property("lag_ms", sorted(lags))
    sys.stdout.write(f"lag of timers created while the beats slept, in ms: {sorted(lags)}\n")
    assert statistics.median(lags) < 200, "the loop polls every second: a wake-up is what is fast"


def test_what_is_sooner_than_all_else_is_not_slept_past(sleeping: Deployment) -> None:
    sleeping.timers.create_timer("now", datetime.now(timezone.utc), "record")
    sleeping.wait_firing(["now"], 2)
    sleeping.timers.create_timer("in-a-second", 1, "record")
    sleeping.wait_firing(["in-a-second"], 3)
    sleeping.timers.update_timer("hourly", schedule=0.5)
    sleeping.wait_firing(["hourly"], 3)
    assert max(run.lag_ms for run in sleeping.ledger.runs) < 1000


def test_a_trigger_fires_at_once_and_moves_nothing(sleeping: Deployment) -> None:
    before = sleeping.timers.get_timer("hourly")
    sleeping.timers.trigger_timer("hourly")
    wait_until(lambda: len(sleeping.ledger), "the triggered run", 2)
    after = sleeping.timers.get_timer("hourly")
    assert after.next_run_at == before.next_run_at
    assert after.total_run_count == before.total_run_count


def test_pause_resume_stop_and_delete_take_effect_at_once(deployment: Deployment) -> None:
    deployment.start_beats(2)
    names = deployment.create(4, interval=0.5)
    deployment.wait_firing(names)
    deployment.timers.pause_timer(names[0])
    deployment.timers.stop_timer(names[1])
    deployment.timers.delete_timer(names[2])
    changed_ms = deployment.pass_time(0.2)
    deployment.pass_time(1.2)
    assert {run.name for run in deployment.ledger.since(changed_ms)} == {names[3]}

    deployment.timers.resume_timer(names[0])
    resumed_ms = deployment.now_ms()
    deployment.wait_sent([names[0]], resumed_ms, 2)
    deployment.ledger.assert_nothing_doubled()


def test_a_timer_deleted_and_created_again_at_once_has_one_chain_of_runs(
    deployment: Deployment,
) -> None:
    deployment.start_beats(2)
    for _ in range(10):
        deployment.timers.create_timer("phoenix", 1, "record")
        deployment.pass_time(0.1)
        deployment.timers.delete_timer("phoenix")
    deployment.timers.create_timer("phoenix", 1, "record")
    created_ms = deployment.now_ms()
    deployment.wait_firing(["phoenix"])
    end_ms = deployment.pass_time(2)
    deployment.wait_sent(["phoenix"], end_ms - 999)
    assert abs(deployment.ledger.slots("phoenix")[0] - created_ms - 1000) < 500
    deployment.ledger.assert_every_run_once(["phoenix"], 1000, end_ms)


UPSERTS = """
import sys
from tests.failover.app import timers
for number in range(100):
    timers.create_timer("contended", 1, "record", args=[sys.argv[1], number])
"""


def test_concurrent_upserts_of_one_timer_keep_one_chain_of_runs(deployment: Deployment) -> None:
    deployment.start_beats(2)
    deployment.timers.create_timer("contended", 1, "record")
    deployment.wait_firing(["contended"])
    writers = [deployment.start_script(UPSERTS, str(number)) for number in range(4)]
    for writer in writers:
        writer.wait(30)
    end_ms = deployment.pass_time(2)
    deployment.wait_sent(["contended"], end_ms - 999)

    assert [writer.exit_code for writer in writers] == [0, 0, 0, 0]
    assert deployment.names() == ["contended"]
    assert list(deployment.timers.get_timer("contended").args)[1] == 99
    deployment.ledger.assert_every_run_once(["contended"], 1000, end_ms)


def test_short_intervals_hold_their_cadence(deployment: Deployment) -> None:
    deployment.start_beats(2)
    deployment.timers.create_timer("quick", 0.1, "record")
    deployment.wait_firing(["quick"])
    begun_ms = deployment.ledger.slots("quick")[0]
    deployment.pass_time(5)
    deployment.timers.pause_timer("quick")
    deployment.pass_time(0.2)
    deployment.ledger.assert_on_the_grid(100)
    deployment.ledger.assert_nothing_doubled()
    deployment.ledger.assert_never_early()
    gaps = deployment.assert_accounted(["quick"], 100)
    due = (deployment.ledger.latest()["quick"] - begun_ms) // 100 + 1
    assert due >= 45
    assert len(gaps["quick"]) <= due // 10


def test_services_on_one_server_do_not_meet(deploy: Deploy, prefix: str) -> None:
    ours = deploy()
    others = deploy(dtimer_service="invoices", task_default_queue=f"{prefix}invoices")
    ours.start_beats(1)
    others.start_beats(1)
    ours.timers.create_timer("shared-name", 1, "record", args=["ours"])
    others.timers.create_timer("shared-name", 1, "record", args=["others"])
    ours.wait_firing(["shared-name"])
    others.wait_firing(["shared-name"])
    others.timers.delete_timer("shared-name")
    ours.wait_sent(["shared-name"], ours.now_ms())

    assert not set(ours.ledger.senders()) & set(others.ledger.senders())
    assert ours.names() == ["shared-name"]
    assert others.names() == []
