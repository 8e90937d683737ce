"""The audit: every run that a schedule has is sent, skipped for a reason, pending, or lost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from itertools import count
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from celery_dtimer import InvalidTimerError, TimerAudit, TimerNotFoundError
from celery_dtimer.auditing import audit_store
from celery_dtimer.model import (
    UNASSIGNED,
    Definition,
    countdown_id,
    new_trigger_id,
    to_datetime,
)
from celery_dtimer.planning import resume
from celery_dtimer.policy import Policy
from celery_dtimer.publisher import RefusedError
from celery_dtimer.schedules import Crontab, Custom, Interval, OneShot, Schedule
from celery_dtimer.store import HeldRun
from tests.conftest import MakeApp
from tests.integration.conftest import START_MS, Beat, Broker, MakeService, Service
from tests.integration.test_policies import pass_until
from tests.integration.test_timers import Timers

NEW_YORK = ZoneInfo("America/New_York")


def audit(service: Service, timer: Definition, since_ms: int = 0, **until: int) -> TimerAudit:
    """Return the audit of one timer, whose sum must be right."""
    (found,) = audit_store(service.store, since_ms, until.get("until_ms"), [timer.id])
    if found.expected is not None:
        settled = found.sent + sum(found.skipped.values()) + found.pending + (found.lost or 0)
        assert found.expected == settled, found
    assert found.name in (timer.name, "")
    return found


def figures(found: TimerAudit) -> tuple[int | None, int, dict[str, int], int, int | None]:
    return found.expected, found.sent, found.skipped, found.pending, found.lost


def live(beat: Beat, seconds: float) -> None:
    """Let the beat dispatch what is due for so long."""
    pass_until(beat, beat.service.clock.now_ms + round(seconds * 1000))


# ------------------------------------------------------------------ what is sent


def test_every_run_of_an_interval_is_sent(service: Service, beat: Beat) -> None:
    timer = service.add()
    live(beat, 65)
    found = audit(service, timer)
    assert figures(found) == (6, 6, {}, 0, 0)
    assert found.ok
    assert (found.timer_id, found.name) == (timer.id, "timer")
    assert (found.since, found.until) == (to_datetime(START_MS), to_datetime(START_MS + 65_000))
    assert found.note == "only since then: the timer was created then"


def test_a_time_is_cut_out(service: Service, beat: Beat) -> None:
    timer = service.add()
    live(beat, 65)
    found = audit(service, timer, START_MS + 20_000, until_ms=START_MS + 40_000)
    assert (figures(found), found.note) == ((3, 3, {}, 0, 0), "")
    found = audit(service, timer, START_MS + 20_001, until_ms=START_MS + 39_999)
    assert figures(found) == (1, 1, {}, 0, 0)
    assert figures(audit(service, timer, until_ms=START_MS + 10**9)) == (6, 6, {}, 0, 0)
    assert figures(audit(service, timer, until_ms=START_MS - 5)) == (0, 0, {}, 0, 0)


def test_what_is_due_and_not_sent_is_pending(service: Service, beat: Beat) -> None:
    timer = service.add()
    live(beat, 15)
    service.clock.advance(30)
    assert figures(audit(service, timer)) == (4, 1, {}, 3, 0)


SCHEDULES: dict[str, Schedule] = {
    "interval": Interval(7_000),
    "relative minutes": Interval(120_000, relative=True, timezone="UTC"),
    "relative hours": Interval(2 * 3_600_000, relative=True, timezone="America/New_York"),
    "relative days": Interval(86_400_000, relative=True, timezone="America/New_York"),
    "every quarter of an hour": Crontab("*/15 * * * *", timezone="America/New_York"),
    "at half past one and two": Crontab("30 1,2 * * *", timezone="America/New_York"),
    "both times": Crontab("30 1 * * *", timezone="America/New_York", dst="both"),
    "left out": Crontab("30 2 * * *", timezone="America/New_York", dst="skip"),
}


@pytest.mark.parametrize(
    "day", [datetime(2026, 3, 7, tzinfo=NEW_YORK), datetime(2026, 10, 31, tzinfo=NEW_YORK)]
)
@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES.keys())
def test_nothing_is_lost_where_clocks_change(
    service: Service, broker: Broker, beat: Beat, schedule: Schedule, day: datetime
) -> None:
    service.clock.now_ms = round(day.timestamp() * 1000) + 12_345
    beat.register()
    timer = service.add(schedule=schedule)
    span = 900 if schedule == Interval(7_000) else 3 * 86_400
    live(beat, span)
    found = audit(service, timer)
    assert figures(found) == (len(broker.sent), len(broker.sent), {}, 0, 0)
    assert found.sent >= (2 if span > 900 else 100)


def test_triggers_and_runs_that_are_sent_again_do_not_count(
    service: Service, broker: Broker, beat: Beat
) -> None:
    timer = service.add(policy=Policy(resend_lost=1))
    live(beat, 15)
    service.trigger(timer)
    service.trigger(timer)
    held = HeldRun(timer.id, START_MS + 10_000, 1, "allow", 0, (broker.sent[0].task_id,))
    service.store.open_runs("a", beat.lease.epoch, [held])
    live(beat, 1)
    assert len(broker.sent) == 3
    assert figures(audit(service, timer)) == (1, 1, {}, 0, 0)
    assert len(audit_store(service.store, 0, None)) == 1


def test_calls_that_wait_are_no_timers(service: Service) -> None:
    message = Definition("task-id", "task", OneShot(0), message={"x": 1})
    service.store.hold(message, delay_ms=1)
    assert service.exists(countdown_id("task-id"))
    assert audit_store(service.store, 0, None) == []


# ------------------------------------------------------------------ what is not


def test_what_one_run_stands_for_is_skipped(service: Service, beat: Beat) -> None:
    timer = service.add()
    service.clock.advance(55)
    live(beat, 10)
    assert figures(audit(service, timer)) == (6, 2, {"coalesced": 4}, 0, 0)
    cut = audit(service, timer, START_MS + 35_000)
    assert figures(cut) == (3, 1, {"coalesced": 2}, 0, 0)


def test_what_is_made_up_is_sent_or_too_old(service: Service, beat: Beat) -> None:
    timer = service.add(policy=Policy(coalesce=False, max_catch_up=3))
    service.clock.advance(105)
    beat.step()
    found = audit(service, timer)
    assert (found.expected, found.pending + found.sent, found.lost) == (10, 3, 0)
    live(beat, 1)
    assert figures(audit(service, timer)) == (10, 3, {"backlog": 7}, 0, 0)


def test_what_is_too_late_is_skipped(service: Service, beat: Beat) -> None:
    timer = service.add(policy=Policy(grace_ms=5_000))
    service.clock.advance(38)
    live(beat, 5)
    assert figures(audit(service, timer)) == (4, 1, {"misfire": 3}, 0, 0)


def test_what_is_refused_for_good_is_skipped(make_service: MakeService, broker: Broker) -> None:
    service = make_service(max_refusals=1)
    beat = Beat(service, broker)
    timer = service.add()
    broker.answers["timer"] = RefusedError("no")
    live(beat, 18)
    broker.answers.clear()
    live(beat, 7)
    assert figures(audit(service, timer)) == (2, 1, {"refused": 1}, 0, 0)
    beat.store.close()


@pytest.mark.parametrize("status", ["paused", "stopped"])
def test_pauses_are_skipped_while_they_last_and_afterwards(
    service: Service, beat: Beat, status: str
) -> None:
    timer = service.add()
    live(beat, 25)
    (service.store.pause if status == "paused" else service.store.stop)(timer.id)
    service.clock.advance(30)
    found = audit(service, timer)
    assert figures(found) == (5, 2, {"paused": 3}, 0, 0)
    assert f"it is {status}: 3 runs are skipped" in found.note
    state = service.state(timer.id)
    assert service.store.resume(state, resume(timer, state, service.clock.now_ms)) == 1
    assert service.state(timer.id).owner in ("a", UNASSIGNED)
    live(beat, 10)
    found = audit(service, timer)
    assert figures(found) == (6, 3, {"paused": 3}, 0, 0)


def test_jitter_moves_no_run(service: Service, beat: Beat) -> None:
    timer = service.add(policy=Policy(jitter_ms=9_000))
    live(beat, 109)
    assert figures(audit(service, timer)) in ((10, 10, {}, 0, 0), (10, 9, {}, 1, 0))


# ------------------------------------------------------------------ where a timer ends


def test_a_single_run_is_one(service: Service, beat: Beat) -> None:
    timer = service.add(at_ms=START_MS + 10_000, args=["x"])
    assert figures(audit(service, timer)) == (0, 0, {}, 0, 0)
    service.clock.advance(11)
    assert figures(audit(service, timer)) == (1, 0, {}, 1, 0)
    live(beat, 1)
    assert figures(audit(service, timer)) == (1, 1, {}, 0, 0)
    live(beat, 100)
    assert figures(audit(service, timer)) == (1, 1, {}, 0, 0)
    assert figures(audit(service, timer, START_MS + 10_001)) == (0, 0, {}, 0, 0)


def test_a_timer_ends_after_its_runs(service: Service, beat: Beat) -> None:
    timer = service.add(policy=Policy(max_runs=3))
    live(beat, 15)
    service.clock.advance(100)
    assert figures(audit(service, timer)) == (3, 1, {}, 2, 0)
    live(beat, 50)
    found = audit(service, timer)
    assert (found.sent, found.pending, found.lost) == (3, 0, 0)


def test_a_timer_ends_at_its_end(service: Service, beat: Beat) -> None:
    timer = service.add(policy=Policy(start_ms=START_MS + 20_000, end_ms=START_MS + 45_000))
    live(beat, 25)
    assert figures(audit(service, timer)) == (1, 1, {}, 0, 0)
    live(beat, 100)
    assert figures(audit(service, timer)) == (3, 3, {}, 0, 0)


def test_what_has_expired_is_skipped(service: Service, beat: Beat) -> None:
    expires = to_datetime(START_MS + 45_000)
    timer = service.add(options={"expires": expires})
    live(beat, 25)
    service.clock.advance(60)
    live(beat, 1)
    assert figures(audit(service, timer)) == (4, 2, {"ended": 2}, 0, 0)


def test_a_timer_that_is_over_and_cut_is_audited_by_what_is_left(
    service: Service, beat: Beat
) -> None:
    """Its bounds are not stored any more."""
    policy = Policy(start_ms=START_MS + 20_000, max_runs=4, grace_ms=5_000)
    timer = service.add(policy=policy, args=["x"])
    live(beat, 35)
    service.clock.advance(20)
    live(beat, 100)
    service.redis.set(service.keys("timer_definition", timer.id), timer.summary)
    found = audit(service, timer)
    assert figures(found) == (5, 4, {"misfire": 1}, 0, 0)


def test_a_timer_that_had_ended_and_goes_on_begins_anew(service: Service, beat: Beat) -> None:
    ending = service.add(policy=Policy(end_ms=START_MS + 25_000))
    live(beat, 100)
    going = replace(ending, policy=Policy(end_ms=START_MS + 500_000))
    service.store.save([going])
    live(beat, 35)
    found = audit(service, going)
    assert figures(found) == (3, 3, {}, 0, 0)
    assert found.since == to_datetime(START_MS + 100_000)


# ------------------------------------------------------------------ what can not be known


def test_a_timer_is_looked_at_since_its_last_change(service: Service, beat: Beat) -> None:
    service.add()
    live(beat, 25)
    timer = service.add(every=20)
    live(beat, 45)
    found = audit(service, timer)
    assert figures(found) == (2, 2, {}, 0, 0)
    assert found.since == to_datetime(START_MS + 25_000)
    assert "the timer was changed then" in found.note or "began anew" in found.note


def test_a_change_of_arguments_keeps_the_phase(service: Service, beat: Beat) -> None:
    service.add()
    live(beat, 25)
    timer = service.add(args=["new"])
    live(beat, 40)
    assert figures(audit(service, timer)) == (4, 4, {}, 0, 0)


def test_the_history_may_begin_later(make_service: MakeService, broker: Broker) -> None:
    service = make_service(history=10)
    beat = Beat(service, broker)
    timer = service.add(every=1)
    live(beat, 600)
    found = audit(service, timer)
    assert "the history does not reach back farther" in found.note
    assert found.since > to_datetime(START_MS + 100_000)
    assert found.lost == 0
    assert 0 < found.sent < 590
    beat.store.close()


def test_without_a_history_nothing_is_known(make_service: MakeService, broker: Broker) -> None:
    service = make_service(history=0)
    beat = Beat(service, broker)
    timer = service.add()
    live(beat, 100)
    found = audit(service, timer)
    assert figures(found) == (0, 0, {}, 0, 0)
    assert "the history does not reach back farther" in found.note
    beat.store.close()


def test_lines_that_are_missing_are_lost_runs(service: Service, beat: Beat) -> None:
    timer = service.add()
    live(beat, 105)
    ids = [id for id, _ in service.redis.xrange(service.keys("history"))]
    assert len(ids) == 10
    service.redis.xdel(service.keys("history"), *ids[4:6])
    found = audit(service, timer)
    if found.since > to_datetime(START_MS):  # since Redis 7 it is told that some were deleted
        assert found.since == to_datetime(START_MS + 10_000)
        assert figures(found) == (9, 7, {}, 0, 2)
    else:
        assert figures(found) == (10, 8, {}, 0, 2)
    assert not found.ok
    assert "2 runs were counted that the history does not name" in found.note


def test_a_run_that_was_passed_over_is_lost(service: Service, beat: Beat) -> None:
    timer = service.add()
    live(beat, 25)
    for what, id in (("timer_queue", None), ("instance_timers", "a")):
        service.redis.zadd(service.keys(what, id), {timer.id: START_MS + 60_000})
    for name in ("due", "at"):
        service.set_field(timer.id, name, str(START_MS + 60_000))
    live(beat, 50)
    assert figures(audit(service, timer)) == (7, 4, {}, 0, 3)


def test_code_is_not_foretold(service: Service, beat: Beat) -> None:
    timer = service.add()
    live(beat, 25)
    definition = replace(timer, schedule=Custom("module:Rule", "r"), code_bound=True)
    service.redis.set(service.keys("timer_definition", timer.id), definition.blob)
    service.set_field(timer.id, "revision", definition.revision)
    found = audit(service, definition)
    assert figures(found) == (None, 2, {}, 0, None)
    assert found.ok
    assert "code of its beats" in found.note


@pytest.mark.parametrize("damage", ["gone", "nonsense"])
def test_a_definition_that_can_not_be_read_is_said_to_be_so(
    service: Service, beat: Beat, damage: str
) -> None:
    timer = service.add()
    live(beat, 25)
    service.redis.delete(service.keys("timer_definition", timer.id))
    if damage == "nonsense":
        service.redis.set(service.keys("timer_definition", timer.id), "{")
    found = audit(service, timer)
    assert figures(found) == (None, 2, {}, 0, None)
    assert found.note.startswith("not checked: ")


def test_a_timer_that_is_changed_again_and_again_is_not_guessed(service: Service) -> None:
    timer = service.add()
    service.set_field(timer.id, "revision", "of another one")
    assert "changed again and again" in audit(service, timer).note


# ------------------------------------------------------------------ whatever happens

NAMES = count()
EVENTS = st.one_of(
    st.tuples(st.just("live"), st.integers(1, 40)),
    st.tuples(st.just("miss"), st.integers(1, 40)),
    *(st.tuples(st.just(what), st.just(0)) for what in ("pause", "resume", "stop", "trigger")),
    *(st.tuples(st.just(what), st.just(0)) for what in ("refuse", "take", "register")),
    st.tuples(st.just("args"), st.integers(0, 3)),
    st.tuples(st.just("every"), st.integers(1, 9)),
)
POLICIES = st.builds(
    Policy,
    coalesce=st.sampled_from([None, True, False]),
    grace_ms=st.sampled_from([None, 1_000, 12_000]),
    max_catch_up=st.sampled_from([None, 0, 2]),
    jitter_ms=st.sampled_from([0, 900]),
    max_runs=st.sampled_from([None, None, 4]),
)


class User:
    """Does to a timer what users, beats and brokers do."""

    def __init__(self, service: Service, broker: Broker, beat: Beat, policy: Policy) -> None:
        self.service, self.broker, self.beat = service, broker, beat
        self.timer = service.define(f"t{next(NAMES)}", every=3, policy=policy)
        service.store.save([self.timer])

    def do(self, what: str, value: int) -> None:
        service, timer = self.service, self.timer
        if what == "live":
            live(self.beat, value)
        elif what == "miss":
            service.clock.advance(value)
        elif what == "pause":
            service.store.pause(timer.id)
        elif what == "stop":
            service.store.stop(timer.id)
        elif what == "resume":
            self._resume()
        elif what == "trigger":
            service.store.trigger(timer.id, new_trigger_id())  # unless it has had its last run
        elif what == "refuse":
            self.broker.answers["*"] = RefusedError("no")
        elif what == "take":
            self.broker.answers.clear()
        elif what == "register":
            self.beat.register()
        elif what == "args":
            self._save(replace(timer, args=(value,)))
        else:
            self._save(replace(timer, schedule=Interval(value * 1000)))

    def _resume(self) -> None:
        state = self.service.state(self.timer.id)
        plan = resume(self.timer, state, self.service.clock.now_ms)
        if state.status != "active" and plan.next_due_ms is not None:
            self.service.store.resume(state, plan)

    def _save(self, definition: Definition) -> None:
        self.timer = definition
        self.service.store.save([definition])

    def check(self) -> None:
        """Compare the audit with what reached the broker."""
        found = audit(self.service, self.timer)
        assert found.lost == 0, found
        assert found.expected is not None
        assert "accounted for" not in found.note
        assert "does not have" not in found.note
        since, until = found.since, found.until
        sent = {
            run.scheduled_ms
            for run in self.broker.sent
            if run.identity == self.timer.id and since < to_datetime(run.scheduled_ms) <= until
        }
        assert found.sent == len(sent), found


@pytest.fixture
def users(make_service: MakeService, broker: Broker) -> Iterator[Any]:
    """Make users of one service; its clock goes on from example to example."""
    service = make_service(max_refusals=3)
    beat = Beat(service, broker)

    def make(policy: Policy) -> User:
        broker.answers.clear()
        beat.register()
        for id in service.store.timer_ids():
            service.store.delete([id])
        return User(service, broker, beat, policy)

    yield make
    beat.store.close()


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(policy=POLICIES, events=st.lists(EVENTS, min_size=1, max_size=12))
def test_whatever_happens_no_run_is_lost_and_each_is_accounted_for(
    users: Any, policy: Policy, events: list[tuple[str, int]]
) -> None:
    user = users(policy)
    for what, value in events:
        user.do(what, value)
        user.check()
    user.do("take", 0)
    user.do("live", 20)
    user.check()


# ------------------------------------------------------------------ the API


def test_the_api_audits_one_timer_or_all(make_app: MakeApp) -> None:
    timers = Timers(make_app())
    start = to_datetime(START_MS)
    timers.create_timers([{"name": n, "schedule": 10, "callback": "record"} for n in "ab"])
    timers.clock.advance(10)
    timers.fire()
    timers.clock.advance(5)
    assert [found.sent for found in timers.audit(start)] == [1, 1]
    (found,) = timers.audit(start, timer="b")
    assert (found.name, found.ok) == ("b", True)
    assert [found.sent for found in timers.audit(start, start + timedelta(seconds=9))] == [0, 0]
    naive = start.astimezone(timezone.utc).replace(tzinfo=None)
    assert timers.audit(naive, timer="b") == [found]
    with pytest.raises(TimerNotFoundError):
        timers.audit(start, timer="c")
    with pytest.raises(InvalidTimerError, match="until"):
        timers.audit(start, start - timedelta(seconds=1))
    wrong: Any = "yesterday"
    with pytest.raises(InvalidTimerError, match="since"):
        timers.audit(wrong)
    timers.store.close()
