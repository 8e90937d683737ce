"""Policies with real beats that die: what is made up, what is skipped, and that each is told."""

from __future__ import annotations

from datetime import datetime, timezone

import pytest

from tests.failover.deployment import OUTAGE, Deployment
from tests.ledger import SentRun
from tests.waiting import wait_until

TIMERS = 20
SECOND = 1000


def by_name(deployment: Deployment) -> dict[str, list[SentRun]]:
    """Return each timer's runs."""
    found: dict[str, list[SentRun]] = {}
    for run in deployment.ledger.runs:
        found.setdefault(run.name, []).append(run)
    return found


def stand_still(deployment: Deployment, seconds: float) -> tuple[int, int]:
    """Kill all beats, and start two others after a time; return when it was."""
    killed_ms = deployment.now_ms()
    for process in deployment.processes:
        process.kill()
    ended_ms = deployment.pass_time(seconds)
    for _ in range(2):
        deployment.start_beat()
    return killed_ms, ended_ms


def test_without_coalescing_no_run_is_left_out(deployment: Deployment) -> None:
    deployment.start_beats(2)
    names = deployment.create(TIMERS, coalesce=False)
    deployment.wait_firing(names)
    _, ended_ms = stand_still(deployment, OUTAGE)
    deployment.wait_sent(names, ended_ms + SECOND, 15)
    deployment.ledger.assert_nothing_doubled()
    gaps = deployment.assert_accounted(names, SECOND)
    assert not any(gaps.values()), gaps
    deployment.assert_consistent()


def test_what_is_later_than_its_grace_is_skipped_and_told(deployment: Deployment) -> None:
    deployment.start_beats(2)
    names = deployment.create(TIMERS, misfire_grace_time=2, coalesce=False)
    deployment.wait_firing(names)
    killed_ms, ended_ms = stand_still(deployment, OUTAGE)
    deployment.wait_sent(names, ended_ms + SECOND, 15)
    deployment.ledger.assert_nothing_doubled()
    gaps = deployment.assert_accounted(names, SECOND)
    for name in names:
        assert gaps[name], "runs of the standstill are too late"
        assert all(killed_ms - SECOND <= slot <= ended_ms + 3 * SECOND for slot in gaps[name])
        skips = deployment.timers.get_timer(name).skips
        assert skips == {"misfire": len(gaps[name])}
        moment = datetime.fromtimestamp(gaps[name][0] / SECOND, timezone.utc)
        assert "misfire_grace_time" in deployment.timers.why(name, moment)
        sent = by_name(deployment)[name][0]
        moment = datetime.fromtimestamp(sent.scheduled_ms / SECOND, timezone.utc)
        assert "was sent at" in deployment.timers.why(name, moment)


def test_runs_that_wait_for_their_jitter_are_taken_over(deployment: Deployment) -> None:
    beats = deployment.start_beats(2)
    names = deployment.create(TIMERS, 2.0, jitter=1.5)
    deployment.wait_firing(names)
    killed_ms = deployment.now_ms()
    beats[0].kill()
    deployment.wait_sent(names, killed_ms + 4 * SECOND, 15)
    deployment.ledger.assert_nothing_doubled()
    runs = by_name(deployment)
    lags = [run.seen_ms - run.scheduled_ms for name in names for run in runs[name]]
    assert min(lags) >= 0
    assert max(lags) > 500
    gaps = deployment.assert_accounted(names, 2 * SECOND)
    assert all(killed_ms - 2 * SECOND <= slot for slots in gaps.values() for slot in slots)
    deployment.assert_consistent()


@pytest.mark.parametrize("mode", ["atomic", "confirmed"])
def test_a_timer_with_a_last_run_ends_with_it_whoever_dies(
    deployment: Deployment, mode: str
) -> None:
    beats = [deployment.start_beat(dtimer_dispatch=mode) for _ in range(2)]
    deployment.wait_registered(beats)
    names = deployment.create(TIMERS, max_runs=5, coalesce=False)
    deployment.wait_firing(names)
    beats[0].kill()
    wait_until(
        lambda: all(timer.status == "stopped" for timer in deployment.timers.get_timers(name="t*")),
        "all timers to have finished",
        20,
    )
    slots = deployment.ledger.slots
    wait_until(lambda: all(len(set(slots(name))) >= 5 for name in names), "the last messages")
    deployment.ledger.assert_doubles_are_recognizable()
    for name in names:
        timer = deployment.timers.get_timer(name)
        assert (timer.reason, timer.total_run_count, timer.skips) == ("finished", 5, {})
        assert len(set(slots(name))) == 5
    assert deployment.timers.pending_count() <= 1  # Celery's own
