"""Beats that are killed, told to stop, or frozen: the others go on with their timers."""

from __future__ import annotations

import signal
import time

import pytest

from tests.failover.deployment import TAKEOVER, Deploy, Deployment
from tests.ledger import SentRun
from tests.processes import Process
from tests.waiting import wait_until

TIMERS = 30

both_modes = pytest.mark.parametrize("mode", ["atomic", "confirmed"])


def assert_doubled_only(deployment: Deployment, mode: str, frozen_ms: int) -> None:
    """Fail when a run came twice that was not published and uncommitted when a beat froze."""
    deployment.ledger.assert_doubles_are_recognizable()
    if mode == "atomic":
        deployment.ledger.assert_nothing_doubled()
    doubled = deployment.ledger.doubled()
    assert all(abs(scheduled - frozen_ms) <= 1000 for _, scheduled in doubled), doubled


def firing_beats(deployment: Deployment, count: int = 3) -> tuple[list[Process], list[str]]:
    """Start three beats, or another number, that fire timers of one second."""
    beats = deployment.start_beats(count)
    names = deployment.create(TIMERS)
    deployment.wait_firing(names)
    return beats, names


def names_sent_by(deployment: Deployment, beat: Process) -> set[str]:
    """Return the timers whose last run came from this beat."""
    last: dict[str, SentRun] = {run.name: run for run in deployment.ledger.runs}
    return {name for name, run in last.items() if run.pid == beat.pid}


def first_runs_after(deployment: Deployment, names: set[str], moment_ms: int) -> dict[str, SentRun]:
    """Return each timer's first run that was seen since a moment."""
    first: dict[str, SentRun] = {}
    for run in deployment.ledger.since(moment_ms):
        if run.name in names:
            first.setdefault(run.name, run)
    return first


def test_a_killed_beats_timers_are_taken_over_in_time(deployment: Deployment) -> None:
    beats, names = firing_beats(deployment)
    orphans = names_sent_by(deployment, beats[0])

    killed_ms = deployment.now_ms()
    beats[0].kill()
    deployment.wait_sent(orphans, killed_ms + 1, TAKEOVER + 1)
    end_ms = deployment.pass_time(2)
    deployment.wait_sent(names, end_ms - 999)

    first = first_runs_after(deployment, orphans, killed_ms + 1)
    latest_ms = max(run.seen_ms for run in first.values())
    assert latest_ms - killed_ms <= TAKEOVER * 1000 + 1000  # the last second: until a run is due
    assert max(run.lag_ms for run in first.values()) <= TAKEOVER * 1000
    assert set(deployment.registered()) == {beat.pid for beat in beats[1:]}
    deployment.ledger.assert_nothing_doubled()
    gaps = deployment.assert_accounted(names, 1000)
    gap = range(killed_ms - 1000, killed_ms + int(TAKEOVER * 1000) + 1)
    assert all(slot in gap for slots in gaps.values() for slot in slots), gaps
    assert not any(gaps[name] for name in set(names) - orphans)
    deployment.wait_balanced()


def test_a_beat_that_is_told_to_stop_hands_over_within_a_second(deployment: Deployment) -> None:
    beats, names = firing_beats(deployment)
    for signum in (signal.SIGTERM, signal.SIGINT):
        leaving = beats.pop(0)
        orphans = names_sent_by(deployment, leaving)
        asked_ms = deployment.now_ms()
        took = leaving.stop(signum)
        deployment.wait_sent(orphans, asked_ms + 1, 2.5)

        assert took < 2
        assert leaving.exit_code == 0
        assert "Traceback" not in leaving.log_text()
        assert set(deployment.registered()) == {beat.pid for beat in beats}
        assert max(run.lag_ms for run in deployment.ledger.since(asked_ms)) < 1000
    end_ms = deployment.pass_time(1)
    deployment.wait_sent(names, end_ms - 999)
    deployment.ledger.assert_every_run_once(names, 1000, end_ms)


def test_a_second_signal_while_stopping_does_no_harm(deployment: Deployment) -> None:
    beats, names = firing_beats(deployment, 2)
    asked_ms, asked = deployment.now_ms(), time.monotonic()
    for _ in range(4):
        beats[0].send(signal.SIGTERM)
        deployment.pass_time(0.02)
    assert beats[0].wait() - asked < 2
    assert set(deployment.registered()) == {beats[1].pid}
    end_ms = deployment.pass_time(1)
    deployment.wait_sent(names, end_ms - 999)

    assert max(run.lag_ms for run in deployment.ledger.since(asked_ms)) < 1000
    deployment.ledger.assert_every_run_once(names, 1000, end_ms)


@both_modes
def test_a_beat_that_was_frozen_sends_nothing_it_no_longer_owns_and_rejoins(
    deploy: Deploy, mode: str
) -> None:
    deployment = deploy(dtimer_dispatch=mode)
    beats, names = firing_beats(deployment)
    zombie = beats[0]

    zombie.freeze()
    frozen_ms = deployment.now_ms()
    wait_until(lambda: zombie.pid not in deployment.registered(), "the failover", TAKEOVER + 1)
    deployment.wait_sent(names, frozen_ms + 1500)
    thawed_ms = deployment.now_ms()
    zombie.thaw()
    wait_until(lambda: deployment.owned_by(zombie) >= TIMERS // 3, "the zombie to rejoin", 5)
    end_ms = deployment.pass_time(2)
    deployment.wait_sent(names, end_ms - 999)

    assert zombie.is_running()
    assert any(run.pid == zombie.pid for run in deployment.ledger.since(end_ms - 1500))
    stale = [
        run
        for run in deployment.ledger.since(thawed_ms)
        if run.pid == zombie.pid and run.scheduled_ms < thawed_ms - 1000
    ]
    assert not stale, "sent what others had sent while it was frozen"
    assert_doubled_only(deployment, mode, frozen_ms)
    deployment.assert_accounted(names, 1000)


@both_modes
def test_all_beats_frozen_at_once_go_on_where_they_were(deploy: Deploy, mode: str) -> None:
    """A suspended machine: nobody saw anybody die, and each slot is sent or counted."""
    deployment = deploy(dtimer_dispatch=mode)
    beats, names = firing_beats(deployment, 2)
    for beat in beats:
        beat.freeze()
    frozen_ms = deployment.now_ms()
    end_ms = deployment.pass_time(3)
    for beat in beats:
        beat.thaw()
    deployment.wait_sent(names, end_ms, TAKEOVER + 2)
    deployment.wait_registered(beats)

    assert all(beat.is_running() for beat in beats)
    assert_doubled_only(deployment, mode, frozen_ms)
    deployment.assert_accounted(names, 1000)


def test_the_last_beats_timers_wait_for_the_next_one(deployment: Deployment) -> None:
    """With nobody alive, timers become overdue; whoever comes first sends each once and goes on."""
    (beat,) = deployment.start_beats(1)
    names = deployment.create(20)
    deployment.wait_firing(names)
    beat.kill()
    end_ms = deployment.pass_time(2)
    successors = [deployment.start_beat() for _ in range(2)]
    deployment.wait_sent(names, end_ms, 15)

    deployment.wait_registered(successors)
    deployment.ledger.assert_nothing_doubled()
    deployment.ledger.assert_on_the_grid(1000)
    deployment.assert_accounted(names, 1000)
