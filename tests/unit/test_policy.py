"""Arming, advancing and resuming, decided without a server."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_dtimer import policy
from celery_dtimer.model import FINISHED, Definition, Status, TimerState
from celery_dtimer.policy import Arming, Plan
from celery_dtimer.schedules import Crontab, Interval, OneShot, Schedule

NOW = 1_750_000_000_000
EVERY = 10_000
RULE = Interval(EVERY)
LATER, PAST = OneShot(NOW + 5_000), OneShot(NOW - 5_000)


def define(schedule: Schedule = RULE, **fields: Any) -> Definition:
    return Definition("n", "t", schedule, **fields)


def stored(
    definition: Definition, status: Status = "active", due_ms: int | None = NOW + 1, **fields: Any
) -> TimerState:
    return TimerState(
        definition.id, status, definition.revision, NOW - 60_000, due_ms=due_ms, **fields
    )


# ------------------------------------------------------------------ arming


@pytest.mark.parametrize(
    ("schedule", "arming"),
    [
        (RULE, Arming("active", delay_ms=EVERY)),
        (Interval(EVERY, relative=True), Arming("active", 1_750_000_010_000)),
        (Crontab("0 0 * * *"), Arming("active", 1_750_032_000_000)),
        (LATER, Arming("active", NOW + 5_000)),
        (PAST, Arming("active", NOW - 5_000)),
    ],
    ids=repr,
)
def test_a_new_timer_is_armed_for_its_first_run(schedule: Schedule, arming: Arming) -> None:
    assert policy.arm(define(schedule), None, NOW) == arming


@pytest.mark.parametrize(
    "schedule", [RULE, Interval(EVERY, relative=True), Crontab("0 0 * * *"), LATER, PAST], ids=repr
)
def test_what_needs_no_time_is_armed_alike_at_any_time(schedule: Schedule) -> None:
    timer = define(schedule)
    armings = {policy.arm(timer, None, now_ms) for now_ms in (0, NOW)}
    assert policy.needs_time(timer) is (len(armings) == 2)


def test_a_new_timer_that_ran_elsewhere_goes_on_from_there() -> None:
    last_run_ms = NOW - 4_000
    arming = policy.arm(define(), None, NOW, last_run_ms=last_run_ms)
    assert arming == Arming("active", last_run_ms + EVERY)


def test_a_one_shot_that_ran_elsewhere_is_over() -> None:
    assert policy.arm(define(PAST), None, NOW, last_run_ms=NOW) == Arming("stopped", None)


STATUSES: tuple[Status, ...] = ("active", "paused", "stopped", "broken")


@pytest.mark.parametrize("status", STATUSES)
def test_the_same_definition_changes_nothing(status: Status) -> None:
    assert policy.arm(define(), stored(define(), status), NOW) is None


@pytest.mark.parametrize("status", STATUSES)
def test_a_new_source_is_written_without_another_phase(status: Status) -> None:
    arming = policy.arm(define(), stored(define(), status), NOW, adopt=True)
    assert arming == Arming(status, keeps_due=True)


def finished(definition: Definition) -> TimerState:
    return stored(definition, "stopped", None, reason=FINISHED, last_run_ms=NOW - 5_000)


@pytest.mark.parametrize("args", [(), (1,)])
@pytest.mark.parametrize("adopt", [False, True])
def test_a_one_shot_that_has_run_is_not_armed_again(args: tuple[int, ...], adopt: bool) -> None:
    assert policy.arm(define(PAST, args=args), finished(define(PAST)), NOW, adopt=adopt) is None


def test_a_one_shot_with_another_moment_runs_again() -> None:
    assert policy.arm(define(LATER), finished(define(PAST)), NOW) == Arming("active", NOW + 5_000)


@pytest.mark.parametrize("status", ["active", "paused", "stopped"])
def test_new_arguments_keep_status_and_phase(status: Status) -> None:
    arming = policy.arm(define(args=[1]), stored(define(), status), NOW)
    assert arming == Arming(status, keeps_due=True)


def test_new_arguments_mend_a_broken_timer() -> None:
    arming = policy.arm(define(args=[1]), stored(define(), "broken"), NOW)
    assert arming == Arming("active", delay_ms=EVERY)


@pytest.mark.parametrize(
    ("status", "expected"),
    [("active", "active"), ("paused", "paused"), ("stopped", "active"), ("broken", "active")],
)
def test_a_new_schedule_starts_anew(status: Status, expected: Status) -> None:
    arming = policy.arm(define(Interval(3_000)), stored(define(), status), NOW)
    assert arming == Arming(expected, delay_ms=3_000)


@pytest.mark.parametrize("status", ["active", "paused"])
def test_a_new_schedule_without_a_run_leaves_a_timer_stopped_unless_paused(status: Status) -> None:
    never = Crontab("0 0 * * *")
    arming = policy.arm(define(never), stored(define(), status), 253_370_764_800_000)
    assert arming == Arming("stopped" if status == "active" else "paused", None)


# ------------------------------------------------------------------ advancing


@pytest.mark.parametrize(
    ("late_ms", "next_in_ms", "skipped"),
    [
        (0, EVERY, 0),
        (1, EVERY, 0),
        (EVERY - 1, EVERY, 0),
        (EVERY, 2 * EVERY, 1),
        (3 * EVERY + 1, 4 * EVERY, 3),
        (-5, EVERY, 0),
    ],
)
def test_one_run_stands_for_all_that_were_missed(
    late_ms: int, next_in_ms: int, skipped: int
) -> None:
    assert policy.plan(define(), NOW, NOW + late_ms) == Plan(NOW + next_in_ms, skipped)


def test_a_one_shot_has_no_next_run() -> None:
    assert policy.plan(define(LATER), NOW + 5_000, NOW + 90_000) == Plan(None, 0)


@given(st.integers(100, 10_000_000), st.lists(st.integers(0, 10_000_000), max_size=20))
def test_an_interval_never_leaves_its_cadence(every_ms: int, delays: list[int]) -> None:
    due_ms, slots = NOW, 0
    for delay_ms in delays:
        now_ms = due_ms + delay_ms
        plan = policy.plan(define(Interval(every_ms)), due_ms, now_ms)
        assert plan.next_due_ms is not None
        assert now_ms < plan.next_due_ms <= now_ms + every_ms
        slots += 1 + plan.skipped
        assert plan.next_due_ms == NOW + slots * every_ms
        due_ms = plan.next_due_ms


def test_a_late_crontab_goes_on_with_its_next_time() -> None:
    quarter = 15 * 60_000
    due_ms = NOW // quarter * quarter
    plan = policy.plan(define(Crontab("*/15 * * * *")), due_ms, due_ms + 3 * quarter + 5)
    assert plan == Plan(due_ms + 4 * quarter, 3)


# ------------------------------------------------------------------ resuming


@pytest.mark.parametrize(
    ("due_ms", "expected"),
    [
        (NOW + 3_000, Plan(NOW + 3_000, 0)),
        (NOW, Plan(NOW + EVERY, 1)),
        (NOW - 1, Plan(NOW - 1 + EVERY, 1)),
        (NOW - 3 * EVERY - 1, Plan(NOW + EVERY - 1, 4)),
        (None, Plan(NOW + EVERY, 0)),
    ],
)
def test_a_resumed_timer_goes_on_in_its_rhythm_and_counts_what_passed(
    due_ms: int | None, expected: Plan
) -> None:
    assert policy.resume(define(), stored(define(), "paused", due_ms), NOW) == expected


def test_a_one_shot_whose_moment_passed_in_the_pause_runs_at_once() -> None:
    state = stored(define(PAST), "paused", PAST.at_ms)
    assert policy.resume(define(PAST), state, NOW) == Plan(PAST.at_ms, 0)
    state = stored(define(LATER), "paused", LATER.at_ms)
    assert policy.resume(define(LATER), state, NOW) == Plan(LATER.at_ms, 0)


# ------------------------------------------------------------------ trying again


@given(st.integers(0, 1_000_000))
def test_waits_grow_to_five_seconds(attempts: int) -> None:
    delay = policy.retry_delay(attempts)
    longest = min(policy.LAST_RETRY, policy.FIRST_RETRY * 2 ** min(attempts, 10))
    assert longest / 2 <= delay <= longest
