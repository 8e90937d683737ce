"""Arming, advancing and resuming, decided without a server."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_dtimer import planning
from celery_dtimer.model import FINISHED, Definition, Status, TimerState, to_datetime
from celery_dtimer.planning import Arming, Plan, Skip
from celery_dtimer.policy import Defaults, Policy
from celery_dtimer.schedules import Crontab, Interval, OneShot, Schedule

NOW = 1_750_000_000_000
EVERY = 10_000
RULE = Interval(EVERY)
ENDED = Arming("stopped", reason="ended")
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
    assert planning.arm(define(schedule), None, NOW) == arming


@pytest.mark.parametrize(
    "schedule", [RULE, Interval(EVERY, relative=True), Crontab("0 0 * * *"), LATER, PAST], ids=repr
)
def test_what_needs_no_time_is_armed_alike_at_any_time(schedule: Schedule) -> None:
    timer = define(schedule)
    armings = {planning.arm(timer, None, now_ms) for now_ms in (0, NOW)}
    assert planning.needs_time(timer) is (len(armings) == 2)


def test_a_new_timer_that_ran_elsewhere_goes_on_from_there() -> None:
    last_run_ms = NOW - 4_000
    arming = planning.arm(define(), None, NOW, last_run_ms=last_run_ms)
    assert arming == Arming("active", last_run_ms + EVERY)


@pytest.mark.parametrize("schedule", [RULE, Crontab("* * * * *")], ids=repr)
def test_a_new_timer_never_runs_for_what_is_past_elsewhere(schedule: Schedule) -> None:
    last_run_ms = NOW - 3_600_000 - 4_000
    arming = planning.arm(define(schedule), None, NOW, last_run_ms=last_run_ms)
    assert arming is not None
    assert arming.due_ms == schedule.next_run_after(NOW, last_run_ms)


def test_a_one_shot_that_ran_elsewhere_is_over() -> None:
    assert planning.arm(define(PAST), None, NOW, last_run_ms=NOW) == ENDED


@pytest.mark.parametrize("status", ["active", "paused", "stopped"])
def test_the_same_definition_changes_nothing(status: Status) -> None:
    assert planning.arm(define(), stored(define(), status), NOW) is None


def test_the_same_definition_changes_nothing_where_a_broken_timer_is_not_to_wake() -> None:
    assert planning.arm(define(), stored(define(), "broken"), NOW, wakes=False) is None


@pytest.mark.parametrize("status", ["active", "paused", "stopped"])
def test_a_new_source_is_written_without_another_phase(status: Status) -> None:
    existing = stored(define(), status, at_ms=NOW + 1, reason="a reason")
    arming = planning.arm(define(), existing, NOW, adopt=True)
    assert arming == Arming(status, keeps_due=True, reason="a reason")


@pytest.mark.parametrize(
    ("status", "kept"), [("active", False), ("paused", False), ("stopped", True), ("broken", True)]
)
def test_a_timer_that_does_not_run_is_not_woken_by_a_schedule_that_may_not(
    status: Status, kept: bool
) -> None:
    existing = stored(define(), status, at_ms=NOW + 1, reason="a reason")
    arming = planning.arm(define(Interval(3_000)), existing, NOW, wakes=False)
    reason = "a reason" if kept else ""
    assert arming == Arming(status, delay_ms=3_000, reason=reason)


def finished(definition: Definition) -> TimerState:
    return stored(definition, "stopped", None, reason=FINISHED, last_run_ms=NOW - 5_000)


@pytest.mark.parametrize("args", [(), (1,)])
@pytest.mark.parametrize("adopt", [False, True])
def test_a_one_shot_that_has_run_is_not_armed_again(args: tuple[int, ...], adopt: bool) -> None:
    assert planning.arm(define(PAST, args=args), finished(define(PAST)), NOW, adopt=adopt) is None


def test_a_one_shot_with_another_moment_runs_again() -> None:
    assert planning.arm(define(LATER), finished(define(PAST)), NOW) == Arming("active", NOW + 5_000)


@pytest.mark.parametrize("status", ["active", "paused", "stopped"])
def test_new_arguments_keep_status_and_phase(status: Status) -> None:
    arming = planning.arm(define(args=[1]), stored(define(), status), NOW)
    assert arming == Arming(status, keeps_due=True)


@pytest.mark.parametrize("args", [[], [1]])
@pytest.mark.parametrize("due_ms", [None, NOW - 1])
def test_a_broken_timer_that_is_created_again_runs_again(
    args: list[int], due_ms: int | None
) -> None:
    arming = planning.arm(define(args=args), stored(define(), "broken", due_ms), NOW)
    assert arming == Arming("active", delay_ms=EVERY)


@pytest.mark.parametrize(
    ("status", "expected"),
    [("active", "active"), ("paused", "paused"), ("stopped", "active"), ("broken", "active")],
)
def test_a_new_schedule_starts_anew(status: Status, expected: Status) -> None:
    arming = planning.arm(define(Interval(3_000)), stored(define(), status), NOW)
    assert arming == Arming(expected, delay_ms=3_000)


@pytest.mark.parametrize("status", ["active", "paused"])
def test_a_new_schedule_without_a_run_leaves_a_timer_stopped_unless_paused(status: Status) -> None:
    never = Crontab("0 0 * * *")
    arming = planning.arm(define(never), stored(define(), status), 253_370_764_800_000)
    assert arming == ENDED._replace(status="stopped" if status == "active" else "paused")


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
    skip = Skip("coalesced", skipped, NOW + EVERY, NOW + late_ms) if skipped else None
    assert planning.plan(define(), NOW, NOW + late_ms) == Plan(NOW + next_in_ms, skip)


def test_a_one_shot_has_no_next_run() -> None:
    assert planning.plan(define(LATER), NOW + 5_000, NOW + 90_000) == Plan(None)


@given(st.integers(100, 10_000_000), st.lists(st.integers(0, 10_000_000), max_size=20))
def test_an_interval_never_leaves_its_cadence(every_ms: int, delays: list[int]) -> None:
    due_ms, slots = NOW, 0
    for delay_ms in delays:
        now_ms = due_ms + delay_ms
        plan = planning.plan(define(Interval(every_ms)), due_ms, now_ms)
        assert plan.next_due_ms is not None
        assert now_ms < plan.next_due_ms <= now_ms + every_ms
        slots += 1 + plan.skipped
        assert plan.next_due_ms == NOW + slots * every_ms
        due_ms = plan.next_due_ms


def test_a_late_crontab_goes_on_with_its_next_time() -> None:
    quarter = 15 * 60_000
    due_ms = NOW // quarter * quarter
    plan = planning.plan(define(Crontab("*/15 * * * *")), due_ms, due_ms + 3 * quarter + 5)
    assert (plan.next_due_ms, plan.skipped) == (due_ms + 4 * quarter, 3)


# ------------------------------------------------------------------ bounds

HOUR = 3_600_000
HOURLY = Crontab("0 * * * *")
FULL = NOW // HOUR * HOUR  # the full hour before now


def bounded(schedule: Schedule = RULE, expires_ms: int | None = None, **policy: Any) -> Definition:
    options = {} if expires_ms is None else {"expires": to_datetime(expires_ms)}
    return define(schedule, policy=Policy(**policy), options=options)


@pytest.mark.parametrize(
    ("schedule", "start_ms", "first_ms"),
    [
        (RULE, NOW + 7, NOW + 7),
        (RULE, NOW, NOW + EVERY),
        (RULE, NOW - 25_000, NOW + 5_000),
        (HOURLY, FULL + 2 * HOUR, FULL + 2 * HOUR),
        (HOURLY, FULL + 2 * HOUR + 1, FULL + 3 * HOUR),
        (HOURLY, FULL - 9 * HOUR, FULL + HOUR),
    ],
    ids=repr,
)
def test_no_run_is_scheduled_before_the_start_from_which_intervals_count(
    schedule: Schedule, start_ms: int, first_ms: int
) -> None:
    arming = planning.arm(bounded(schedule, start_ms=start_ms), None, NOW)
    assert arming == Arming("active", first_ms)


@pytest.mark.parametrize("how", ["end_ms", "expires_ms"])
@pytest.mark.parametrize(("end_ms", "next_ms"), [(0, NOW + EVERY), (-1, None)])
def test_no_run_is_scheduled_after_the_end(how: str, end_ms: int, next_ms: int | None) -> None:
    timer = bounded(**{how: NOW + EVERY + end_ms})
    assert planning.plan(timer, NOW, NOW).next_due_ms == next_ms


@pytest.mark.parametrize("how", ["end_ms", "expires_ms"])
@pytest.mark.parametrize("schedule", [RULE, HOURLY, LATER], ids=repr)
def test_a_timer_whose_end_has_passed_is_stopped_from_the_start(
    how: str, schedule: Schedule
) -> None:
    assert planning.arm(bounded(schedule, **{how: NOW - 1}), None, NOW) == ENDED


def test_a_run_that_is_late_is_sent_though_the_end_has_passed() -> None:
    plan = planning.plan(bounded(end_ms=NOW + 5), NOW, NOW + 60_000)
    assert (plan.sends, plan.next_due_ms, plan.skipped) == (True, None, 0)


def test_nothing_is_sent_once_it_would_be_expired() -> None:
    timer = bounded(expires_ms=NOW + 5 * EVERY + 5)
    plan = planning.plan(timer, NOW, NOW + 9 * EVERY)
    assert plan == Plan(None, Skip("ended", 6, NOW, NOW + 9 * EVERY), sends=False)
    assert planning.plan(timer, NOW, NOW + 9 * EVERY, is_sent=True).sends


def test_missed_runs_beyond_the_end_are_none() -> None:
    plan = planning.plan(bounded(end_ms=NOW + 3 * EVERY), NOW, NOW + 9 * EVERY)
    assert (plan.next_due_ms, plan.skipped) == (None, 3)


@pytest.mark.parametrize(("number", "next_ms"), [(1, NOW + EVERY), (2, NOW + EVERY), (3, None)])
def test_a_timer_has_finished_after_its_runs(number: int, next_ms: int | None) -> None:
    plan = planning.plan(bounded(max_runs=3), NOW, NOW, number=number)
    assert (plan.sends, plan.next_due_ms) == (True, next_ms)


def test_a_timer_with_fewer_runs_than_it_has_had_ends_without_another() -> None:
    plan = planning.plan(bounded(max_runs=3), NOW, NOW, number=4)
    assert (plan.sends, plan.next_due_ms, plan.skip) == (False, None, Skip("ended", 1, NOW, NOW))


@pytest.mark.parametrize("bounds", [{"end_ms": NOW + HOUR}, {"max_runs": 9}])
@pytest.mark.parametrize("status", ["active", "paused", "stopped"])
def test_other_bounds_keep_the_phase(bounds: dict[str, int], status: Status) -> None:
    arming = planning.arm(bounded(**bounds), stored(bounded(max_runs=5), status), NOW)
    assert arming == Arming(status, keeps_due=True)


@pytest.mark.parametrize("runs", [3, 4])
def test_a_timer_with_no_more_runs_than_it_has_had_ends_at_once(runs: int) -> None:
    existing = stored(bounded(max_runs=9), runs=runs)
    assert planning.arm(bounded(max_runs=3), existing, NOW) == ENDED
    over = finished(bounded(max_runs=runs))
    spent = replace(over, runs=runs)
    assert planning.arm(bounded(max_runs=3, end_ms=NOW + HOUR), spent, NOW) is None


def test_a_paused_timer_stays_paused_though_its_end_comes_and_goes() -> None:
    existing = stored(define(), "paused", NOW + 1)
    over = planning.arm(bounded(end_ms=NOW - 1), existing, NOW)
    assert over == Arming("paused", reason="ended")
    existing = stored(bounded(end_ms=NOW - 1), "paused", None, reason="ended")
    arming = planning.arm(bounded(end_ms=NOW + HOUR), existing, NOW)
    assert arming == Arming("paused", NOW + EVERY)
    assert planning.arm(bounded(end_ms=NOW - 1, shards=2), existing, NOW) == over


@pytest.mark.parametrize(("start_ms", "keeps"), [(NOW - 29_999, True), (NOW - 29_998, False)])
def test_a_start_keeps_the_cadence_that_it_gives(start_ms: int, keeps: bool) -> None:
    existing = stored(define(), due_ms=NOW + 1, at_ms=NOW + 1)
    arming = planning.arm(bounded(start_ms=start_ms), existing, NOW)
    assert arming == (Arming("active", keeps_due=True) if keeps else Arming("active", NOW + 2))


@pytest.mark.parametrize("before", [{"end_ms": NOW + HOUR}, {"max_runs": 9}])
def test_bounds_that_are_gone_leave_the_phase(before: dict[str, int]) -> None:
    existing = stored(bounded(**before), due_ms=NOW + 1, at_ms=NOW + 1)
    assert planning.arm(define(), existing, NOW) == Arming("active", keeps_due=True)
    gone = stored(bounded(start_ms=NOW + HOUR), due_ms=NOW + HOUR, at_ms=NOW + HOUR)
    assert planning.arm(define(), gone, NOW) == Arming("active", delay_ms=EVERY)


def test_a_run_that_is_owed_comes_before_an_end_that_is_near() -> None:
    existing = stored(define(), due_ms=NOW - 5, at_ms=NOW - 5)
    arming = planning.arm(bounded(end_ms=NOW - 1), existing, NOW)
    assert arming == Arming("active", keeps_due=True)


def test_a_later_start_moves_the_next_run() -> None:
    arming = planning.arm(bounded(start_ms=NOW + HOUR), stored(define()), NOW)
    assert arming == Arming("active", NOW + HOUR)


def test_an_earlier_start_moves_the_next_run() -> None:
    existing = stored(bounded(start_ms=NOW + HOUR), due_ms=NOW + HOUR)
    arming = planning.arm(bounded(start_ms=NOW + 5), existing, NOW)
    assert arming == Arming("active", NOW + 5)


def test_a_timer_that_may_go_further_goes_on() -> None:
    assert planning.arm(bounded(max_runs=9), finished(bounded(max_runs=5)), NOW) == Arming(
        "active", NOW + EVERY
    )


def test_a_timer_that_had_ended_from_the_start_goes_on_with_a_later_end() -> None:
    existing = stored(bounded(end_ms=NOW - 1), "stopped", None, reason="ended")
    assert planning.arm(bounded(end_ms=NOW + HOUR), existing, NOW) == Arming("active", NOW + EVERY)
    assert planning.arm(bounded(end_ms=NOW - 2), existing, NOW) == ENDED
    by_hand = stored(bounded(end_ms=NOW + EVERY), "stopped", NOW + 1)
    arming = planning.arm(bounded(end_ms=NOW + HOUR), by_hand, NOW)
    assert arming == Arming("stopped", keeps_due=True)


def test_a_one_shot_that_has_run_does_not_run_again_for_a_later_end() -> None:
    existing = finished(bounded(PAST, end_ms=NOW))
    assert planning.arm(bounded(PAST, end_ms=NOW + HOUR), existing, NOW) is None


@given(st.integers(0, 5_000), st.lists(st.integers(0, 100_000), min_size=1, max_size=30))
def test_jitter_delays_a_run_by_no_more_and_always_by_as_much(
    longest: int, slots: list[int]
) -> None:
    timer = bounded(jitter_ms=longest)
    found = [planning.jitter_of(timer, NOW + slot) for slot in slots]
    assert all(0 <= jitter <= longest for jitter in found)
    assert found == [planning.jitter_of(timer, NOW + slot) for slot in slots]


def test_jitter_differs_from_run_to_run_and_from_timer_to_timer() -> None:
    policy = Policy(jitter_ms=5_000)
    timers = [Definition(name, "t", RULE, policy=policy) for name in "ab"]
    found = {planning.jitter_of(timer, NOW + n) for timer in timers for n in range(100)}
    assert len(found) > 150


def test_another_jitter_holds_for_the_run_that_waits() -> None:
    before, after = bounded(jitter_ms=5_000), bounded(jitter_ms=3_000)
    due_ms = NOW + 7
    existing = stored(before, due_ms=due_ms, at_ms=due_ms + planning.jitter_of(before, due_ms))
    jitter_ms = planning.jitter_of(after, due_ms)
    expected = Arming("active", due_ms, keeps_due=True, jitter_ms=jitter_ms)
    assert planning.arm(after, existing, NOW) == expected
    assert planning.arm(define(), existing, NOW) == expected._replace(jitter_ms=0)
    same = bounded(jitter_ms=5_000, shards=2)
    assert planning.arm(same, existing, NOW) == Arming("active", keeps_due=True)
    refused = replace(existing, attempts=1)
    assert planning.arm(after, refused, NOW) == Arming("active", keeps_due=True)


@given(st.integers(0, 9_999), st.integers(0, 200_000), st.sampled_from([None, 1_000, 25_000]))
def test_no_run_is_missed_before_it_was_to_be_sent(
    jitter_ms: int, late_ms: int, grace_ms: int | None
) -> None:
    timer = bounded(jitter_ms=jitter_ms, grace_ms=grace_ms)
    now_ms = NOW + planning.jitter_of(timer, NOW) + late_ms
    plan = planning.plan(timer, NOW, now_ms)
    assert plan.next_due_ms is not None
    sent_at = {
        due_ms: due_ms + planning.jitter_of(timer, due_ms)
        for due_ms in range(NOW, plan.next_due_ms + 1, EVERY)
    }
    assert plan.skipped + plan.sends == len(sent_at) - 1
    last_ms = sent_at.pop(plan.next_due_ms)
    limit_ms = now_ms if plan.sends else now_ms - (grace_ms or 0)
    assert all(sent_ms <= limit_ms for sent_ms in sent_at.values())
    assert last_ms >= limit_ms


def test_a_run_is_looked_at_after_its_jitter() -> None:
    timer = bounded(jitter_ms=5_000)
    arming = planning.arm(timer, None, NOW)
    jitter_ms = planning.jitter_of(timer, NOW + EVERY)
    assert arming == Arming("active", NOW + EVERY, jitter_ms=jitter_ms)
    plan = planning.plan(timer, NOW, NOW)
    assert (plan.next_due_ms, plan.at_ms) == (NOW + EVERY, NOW + EVERY + jitter_ms)


# ------------------------------------------------------------------ late runs


@pytest.mark.parametrize(("late_ms", "runs"), [(0, True), (60_000, True), (60_001, False)])
def test_a_run_that_is_later_than_its_grace_is_skipped(late_ms: int, runs: bool) -> None:
    timer = bounded(HOURLY, grace_ms=60_000)
    plan = planning.plan(timer, FULL, FULL + late_ms)
    skip = None if runs else Skip("misfire", 1, FULL, FULL + late_ms)
    assert plan == Plan(FULL + HOUR, skip, sends=runs)


def test_of_missed_runs_the_oldest_within_the_grace_is_next() -> None:
    plan = planning.plan(bounded(grace_ms=25_000), NOW, NOW + 10 * EVERY)
    next_ms = NOW + 8 * EVERY
    assert plan == Plan(next_ms, Skip("misfire", 8, NOW, next_ms - 1), sends=False)
    assert planning.plan(bounded(grace_ms=25_000), next_ms, NOW + 10 * EVERY).sends


def test_a_one_shot_that_is_later_than_its_grace_never_runs() -> None:
    plan = planning.plan(bounded(PAST, grace_ms=1_000), PAST.at_ms, NOW)
    assert (plan.sends, plan.next_due_ms, plan.skipped) == (False, None, 1)


def test_jitter_makes_no_run_late() -> None:
    timer = bounded(HOURLY, grace_ms=1_000, jitter_ms=HOUR)
    jitter_ms = planning.jitter_of(timer, FULL)
    assert planning.plan(timer, FULL, FULL + jitter_ms + 1_000).sends
    assert not planning.plan(timer, FULL, FULL + jitter_ms + 1_001).sends


@pytest.mark.parametrize(
    ("schedule", "own", "runs"), [(RULE, None, True), (HOURLY, None, False), (HOURLY, HOUR, True)]
)
def test_celerys_deadline_holds_for_crontabs_that_have_no_grace_of_their_own(
    schedule: Schedule, own: int | None, runs: bool
) -> None:
    defaults = Defaults(grace_ms=HOUR, cron_grace_ms=1_000)
    timer = bounded(schedule, grace_ms=own)
    assert planning.plan(timer, FULL, FULL + 60_000, defaults=defaults).sends is runs


MISSED = 5


@pytest.mark.parametrize("most", [MISSED + 1, 100, None])
def test_without_coalescing_each_missed_run_is_made_up(most: int | None) -> None:
    timer = bounded(coalesce=False, max_catch_up=most)
    due_ms, now_ms, sent = NOW, NOW + MISSED * EVERY + 7, []
    while due_ms <= now_ms:
        plan = planning.plan(timer, due_ms, now_ms)
        assert plan.sends
        assert plan.skip is None
        sent.append(due_ms)
        assert plan.next_due_ms is not None
        # What is made up stands behind what is due now.
        assert (plan.at_ms or plan.next_due_ms) == max(now_ms, plan.next_due_ms)
        due_ms = plan.next_due_ms
    assert sent == [NOW + n * EVERY for n in range(MISSED + 1)]


@pytest.mark.parametrize("schedule", [Interval(60_000), Crontab("* * * * *")], ids=repr)
@pytest.mark.parametrize("most", [0, 1, 3])
@pytest.mark.parametrize("end", [None, 25])
@pytest.mark.parametrize("is_sent", [False, True])
def test_the_oldest_of_too_many_missed_runs_are_skipped(
    schedule: Schedule, most: int, end: int | None, is_sent: bool
) -> None:
    minute = 60_000
    end_ms = None if end is None else FULL + end * minute + 1
    timer = bounded(schedule, coalesce=False, max_catch_up=most, end_ms=end_ms)
    plan = planning.plan(timer, FULL, FULL + 30 * minute + 7, is_sent=is_sent)
    last = end or 30
    next_ms = FULL + (last - most + 1) * minute
    assert plan.next_due_ms == (None if end and not most else next_ms)
    assert plan.sends is is_sent
    assert plan.skip is not None
    first = 1 if is_sent else 0
    assert plan.skip[:3] == ("backlog", last - most + 1 - first, FULL + first * minute)


@pytest.mark.parametrize("most", [0, 1])
def test_a_run_that_is_on_time_is_no_missed_one(most: int) -> None:
    plan = planning.plan(bounded(coalesce=False, max_catch_up=most), NOW, NOW + 50)
    assert plan == Plan(NOW + EVERY)


@pytest.mark.parametrize("schedule", [Interval(100), Crontab("* * * * * *")], ids=repr)
def test_a_timer_that_missed_millions_of_runs_is_planned_at_once(schedule: Schedule) -> None:
    every_ms = 100 if isinstance(schedule, Interval) else 1_000
    due_ms, passed_ms = FULL, 30 * 10**9
    timer = bounded(schedule, coalesce=False, max_catch_up=10)
    plan = planning.plan(timer, due_ms, due_ms + passed_ms)
    assert plan.next_due_ms == due_ms + passed_ms - 9 * every_ms
    assert plan.skipped == passed_ms // every_ms + 1 - 10
    plan = planning.plan(bounded(schedule, coalesce=True), due_ms, due_ms + passed_ms)
    assert plan.skipped == passed_ms // every_ms


# ------------------------------------------------------------------ looking ahead


def ahead(definition: Definition, state: TimerState | None, after_ms: int = NOW) -> list[int]:
    return list(islice(planning.upcoming(definition, state, after_ms, NOW), 3))


def test_the_next_runs_of_a_schedule_are_those_of_a_new_timer() -> None:
    assert ahead(define(), None) == [NOW + EVERY, NOW + 2 * EVERY, NOW + 3 * EVERY]
    assert ahead(bounded(start_ms=NOW + 5), None) == [NOW + 5, NOW + 5 + EVERY, NOW + 5 + 2 * EVERY]
    assert ahead(define(LATER), None) == [NOW + 5_000]
    assert ahead(bounded(max_runs=1), None) == [NOW + EVERY]
    assert ahead(bounded(end_ms=NOW + 2 * EVERY), None) == [NOW + EVERY, NOW + 2 * EVERY]


def test_the_next_runs_of_a_timer_begin_with_the_one_that_is_stored() -> None:
    state = stored(define(), due_ms=NOW + 3)
    assert ahead(define(), state) == [NOW + 3, NOW + 3 + EVERY, NOW + 3 + 2 * EVERY]
    assert ahead(define(), state, NOW + EVERY)[0] == NOW + 3 + EVERY
    assert ahead(bounded(max_runs=4), stored(bounded(max_runs=4), runs=3)) == [NOW + 1]


def test_what_a_timer_owes_comes_as_its_policy_has_it() -> None:
    due_ms = NOW - 3 * EVERY
    state = stored(define(), due_ms=due_ms)
    assert ahead(define(), state, due_ms - 1) == [due_ms, NOW + EVERY, NOW + 2 * EVERY]
    timer = bounded(coalesce=False)
    assert ahead(timer, stored(timer, due_ms=due_ms), due_ms - 1) == [
        due_ms + n * EVERY for n in range(3)
    ]
    timer = bounded(grace_ms=2 * EVERY)
    assert ahead(timer, stored(timer, due_ms=due_ms), due_ms - 1)[0] == due_ms + EVERY


@pytest.mark.parametrize("schedule", [Interval(1_000), Crontab("* * * * * *")], ids=repr)
def test_a_far_moment_is_looked_at_at_once(schedule: Schedule) -> None:
    after_ms = FULL + 10**12
    timer = bounded(schedule, max_runs=10**9 + 5)
    state = stored(timer, due_ms=FULL + HOUR, runs=0)
    assert ahead(timer, state, after_ms) == [after_ms + n * 1_000 for n in (1, 2, 3)]
    assert ahead(bounded(schedule, max_runs=10), state, after_ms) == []


def test_the_number_of_a_run_to_come_counts_those_before_it() -> None:
    state = stored(define(), due_ms=NOW, runs=4)
    assert planning.number_of(define(), state, NOW) == 5
    assert planning.number_of(define(), state, NOW + 3 * EVERY) == 8


def test_a_paused_timer_is_looked_at_as_if_it_were_resumed_and_a_stopped_one_has_no_runs() -> None:
    assert ahead(define(), stored(define(), "paused", NOW - 3))[0] == NOW - 3 + EVERY
    assert ahead(define(), stored(define(), "stopped")) == []


# ------------------------------------------------------------------ resuming


@pytest.mark.parametrize(
    ("due_ms", "expected"),
    [
        (NOW + 3_000, (NOW + 3_000, 0)),
        (NOW, (NOW + EVERY, 1)),
        (NOW - 1, (NOW - 1 + EVERY, 1)),
        (NOW - 3 * EVERY - 1, (NOW + EVERY - 1, 4)),
        (None, (NOW + EVERY, 0)),
    ],
)
def test_a_resumed_timer_goes_on_in_its_rhythm_and_counts_what_passed(
    due_ms: int | None, expected: tuple[int, int]
) -> None:
    plan = planning.resume(define(), stored(define(), "paused", due_ms), NOW)
    assert (plan.next_due_ms, plan.skipped) == expected
    if plan.skip is not None:
        assert plan.skip == Skip("paused", plan.skipped, due_ms or 0, NOW)


@pytest.mark.parametrize(
    ("policy", "sent_ms", "expected"),
    [
        (Policy(), NOW - 5_000, Plan(NOW - 5_000)),
        (
            Policy(),
            NOW - 3 * EVERY - 1,
            Plan(NOW + EVERY - 1, Skip("paused", 3, NOW - 2 * EVERY - 1, NOW)),
        ),
        (
            Policy(coalesce=False),
            NOW - 3 * EVERY - 1,
            Plan(NOW + EVERY - 1, Skip("paused", 3, NOW - 2 * EVERY - 1, NOW)),
        ),
        (Policy(max_runs=4), NOW - 3 * EVERY - 1, Plan(NOW - 3 * EVERY - 1)),
        (Policy(end_ms=NOW - 1), NOW - 3 * EVERY - 1, Plan(NOW - 3 * EVERY - 1)),
    ],
)
def test_what_passed_in_a_pause_behind_a_run_that_was_out_is_not_made_up_for(
    policy: Policy, sent_ms: int, expected: Plan
) -> None:
    definition = define(policy=policy)
    state = stored(definition, "paused", sent_ms, last_sent_ms=sent_ms, runs=3)
    assert planning.resume(definition, state, NOW) == expected


def test_a_one_shot_whose_moment_passed_in_the_pause_runs_at_once() -> None:
    state = stored(define(PAST), "paused", PAST.at_ms)
    assert planning.resume(define(PAST), state, NOW) == Plan(PAST.at_ms)
    state = stored(define(LATER), "paused", LATER.at_ms)
    assert planning.resume(define(LATER), state, NOW) == Plan(LATER.at_ms)


@pytest.mark.parametrize(
    ("status", "due_ms", "reason"),
    [
        ("active", NOW - 25_000, "superseded"),
        ("paused", NOW - 25_000, "paused"),
        ("active", NOW + 1, None),
        ("active", None, None),
        ("stopped", NOW - 25_000, "paused"),
        ("broken", NOW - 25_000, "paused"),
        ("stopped", None, None),
    ],
)
def test_what_has_come_is_given_up_for_another_schedule(
    status: Status, due_ms: int | None, reason: str | None
) -> None:
    found = planning.given_up(define(), stored(define(), status, due_ms), NOW)
    assert found == (None if reason is None else Skip(reason, 3, NOW - 25_000, NOW))


@pytest.mark.parametrize("status", ["active", "paused"])
@pytest.mark.parametrize(
    ("bounds", "runs", "first_ms"),
    [
        ({"end_ms": NOW - 16_000}, 2, NOW - 15_000),
        ({"end_ms": NOW - 15_000}, 1, NOW - 5_000),
        ({"end_ms": NOW}, 0, NOW),
        ({"max_runs": 4}, 2, NOW - 15_000),
        ({"max_runs": 5}, 0, NOW),
    ],
)
def test_what_lies_behind_an_earlier_end_is_given_up(
    status: Status, bounds: dict[str, int], runs: int, first_ms: int
) -> None:
    state = stored(define(), status, NOW - 25_000, runs=3)
    found = planning.given_up(define(), state, NOW, define(policy=Policy(**bounds)))
    reason = "superseded" if status == "active" else "paused"
    assert found == (Skip(reason, runs, first_ms, NOW) if runs else None)


def test_a_run_that_is_out_is_not_given_up() -> None:
    state = stored(define(), due_ms=NOW - 5, last_sent_ms=NOW - 5)
    assert planning.given_up(define(), state, NOW) is None


# ------------------------------------------------------------------ trying again


@given(st.integers(0, 1_000_000))
def test_waits_grow_to_five_seconds(attempts: int) -> None:
    delay = planning.retry_delay(attempts)
    longest = min(planning.LAST_RETRY, planning.FIRST_RETRY * 2 ** min(attempts, 10))
    assert longest / 2 <= delay <= longest
