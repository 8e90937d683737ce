"""Several beats, workers or embedded schedulers share one service, and each run is sent once."""

from __future__ import annotations

import json
import math

import pytest

from tests.failover.deployment import SECONDS, TAKEOVER, Deploy, Deployment, stop_all

CALM = {"dtimer_heartbeat_interval": 1, "dtimer_instance_timeout": 8, "dtimer_check_interval": 1}


@pytest.mark.timeout(SECONDS + 90)
def test_three_beats_send_every_run_of_200_timers_once(deploy: Deploy) -> None:
    deployment = deploy(**CALM)
    deployment.start_beats(3)
    ledger = deployment.read()

    names = deployment.create(200)
    deployment.wait_firing(names)
    begun_ms = deployment.now_ms()
    end_ms = deployment.pass_time(SECONDS)
    deployment.wait_sent(names, end_ms - 999)

    ledger.assert_every_run_once(names, 1000, end_ms)
    ledger.assert_doubles_are_recognizable()
    shares = ledger.senders(begun_ms).values()
    assert len(shares) == 3
    even = sum(shares) / 3
    assert all(abs(share - even) <= 0.1 * even for share in shares), shares
    assert deployment.spread() <= 1


def test_beats_that_join_take_their_share_and_nothing_is_lost_or_doubled(deploy: Deploy) -> None:
    deployment = deploy(**CALM)
    beats = deployment.start_beats(1)
    names = deployment.create(100)
    deployment.wait_firing(names)

    beats += [deployment.start_beat() for _ in range(2)]
    deployment.wait_registered(beats)
    deployment.wait_balanced()
    end_ms = deployment.pass_time(3)
    deployment.wait_sent(names, end_ms - 999)

    assert max(deployment.owned().values()) == math.ceil(100 / 3)
    assert set(deployment.ledger.senders(end_ms - 1000)) == {beat.pid for beat in beats}
    deployment.ledger.assert_every_run_once(names, 1000, end_ms)


def test_beats_that_leave_and_join_all_the_time_lose_and_double_nothing(deploy: Deploy) -> None:
    deployment = deploy(**CALM)
    beats = deployment.start_beats(2)
    names = deployment.create(50)
    deployment.wait_firing(names)

    for _ in range(3):
        beats.append(deployment.start_beat())
        deployment.wait_registered(beats)
        stop_all([beats.pop(0)])
    end_ms = deployment.pass_time(1)
    deployment.wait_sent(names, end_ms - 999)

    deployment.ledger.assert_every_run_once(names, 1000, end_ms)


def test_one_static_schedule_of_several_beats_makes_one_timer_each(deploy: Deploy) -> None:
    schedule = {f"static-{n}": {"task": "record", "schedule": 1.0} for n in range(10)}
    deployment = deploy(
        beat_schedule=schedule, periodic_tasks={"added": 1.0, "minutely": "*"}, **CALM
    )
    beats = [deployment.start_beat() for _ in range(3)]
    deployment.wait_registered(beats)
    names = [*schedule, "added"]
    deployment.wait_firing(names)
    end_ms = deployment.pass_time(3)
    deployment.wait_sent(names, end_ms - 999)

    assert deployment.names() == sorted([*names, "minutely"])
    deployment.ledger.assert_every_run_once(names, 1000, end_ms)


def test_workers_with_an_embedded_beat_send_each_run_once(deploy: Deploy) -> None:
    schedule = {f"static-{n}": {"task": "record", "schedule": 1.0} for n in range(10)}
    deployment = deploy(
        beat_schedule=schedule, beat_scheduler="celery_dtimer:DistributedScheduler", **CALM
    )
    for _ in range(3):
        deployment.start_worker("-B", "-c", "1")
    joined_ms = deployment.now_ms()
    deployment.wait_ran(schedule, joined_ms + 3000)
    end_ms = deployment.now_ms()
    deployment.wait_ran(schedule, end_ms - 999)

    ran = deployment.ran()
    ran.assert_every_run_once(schedule, 1000, end_ms - 1000)
    assert len(ran.senders(joined_ms + 1000)) == 3


def test_embedded_schedulers_in_plain_processes_share_the_timers(deploy: Deploy) -> None:
    deployment = deploy(**CALM)
    processes = [deployment.start_embedded() for _ in range(2)]
    deployment.wait_registered(processes)
    names = deployment.create(20)
    deployment.wait_firing(names)
    stopping_ms = deployment.pass_time(2)
    took = stop_all(processes[:1])
    deployment.wait_sent(names, stopping_ms + 1000, TAKEOVER)
    end_ms = deployment.now_ms() - 1000

    assert took[0] < 2
    assert processes[0].exit_code == 0
    assert set(deployment.owned()) == {processes[1].pid}
    deployment.ledger.assert_every_run_once(names, 1000, end_ms)


def test_workers_run_what_beats_send_with_its_timer(deployment: Deployment) -> None:
    """A callback gets its timer, then the timer's arguments; one that fails stops nothing."""
    deployment.start_worker()
    deployment.start_beats(2)
    deployment.timers.create_timer("failing", 1, "tests.failover.app.fail")
    deployment.timers.create_timer(
        "reporting", 1, "tests.failover.app.record_timer", args=["pdf", 2]
    )
    deployment.wait_ran(["reporting"], deployment.now_ms() + 2000)

    entries = deployment.entries_ran()
    assert {json.dumps(entry["args"]) for entry in entries} == {'["pdf", 2]'}
    ran = deployment.ran()
    ran.assert_on_the_grid(1000)
    assert [run.number for run in ran.runs] == list(range(1, len(ran) + 1))
    failing = deployment.timers.get_timer("failing")
    assert failing.status == "active"
    assert failing.total_run_count >= 2
