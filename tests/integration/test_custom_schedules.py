"""Schedules that are code: stored by name, asked by whichever instance owns the timer."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

import pytest
from celery import Celery
from celery.schedules import BaseSchedule, schedstate, schedule

from celery_dtimer import DistributedTimer, InvalidTimerError
from celery_dtimer.declarations import StaticSchedule, declaration_of
from celery_dtimer.model import timer_id, to_datetime
from tests.conftest import MakeApp
from tests.integration.conftest import START_MS, Beat, Broker, Service, StartTimers
from tests.waiting import wait_until

ID = timer_id("custom")


class OfficeHours(schedule):
    """Every so many seconds, but only while the office is open."""

    def __init__(self, seconds: float, is_open: Callable[[datetime], bool], **kwargs: Any) -> None:
        super().__init__(timedelta(seconds=seconds), **kwargs)
        self.is_open = is_open

    def is_due(self, last_run_at: datetime) -> Any:
        state = super().is_due(last_run_at)
        if state.is_due and not self.is_open(self.now()):
            return schedstate(False, 5)
        return state


class Failing(BaseSchedule):
    """Fails, or answers nonsense."""

    def __init__(self, answer: Any, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.answer = answer

    def is_due(self, last_run_at: datetime) -> Any:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def remaining_estimate(self, last_run_at: datetime) -> timedelta:
        return timedelta(0)


def declare(app: Celery, beat: Beat, rule: BaseSchedule, **fields: Any) -> StaticSchedule:
    """Let a beat's code declare a timer with the rule."""
    entries = {"custom": {"task": "t", "schedule": rule, **fields}}
    declaration = declaration_of(app, "orders", entries)
    beat.bound.update(declaration.bound)
    static = StaticSchedule(beat.service.store, declaration)
    static.reconcile(beat.lease)
    return static


def go_on(beat: Beat, seconds: int) -> None:
    for _ in range(seconds):
        beat.service.clock.advance(1)
        heard = {beat.instance: beat.service.clock()}
        beat.service.redis.zadd(beat.service.keys("service_instances"), heard)
        beat.step()


def always(moment: datetime) -> bool:
    return True


def test_it_runs_when_its_code_says_so(
    make_app: MakeApp, service: Service, beat: Beat, broker: Broker
) -> None:
    closed = (to_datetime(START_MS + 15_000), to_datetime(START_MS + 42_000))

    def is_open(moment: datetime) -> bool:
        return not closed[0] <= moment < closed[1]

    declare(make_app(), beat, OfficeHours(10, is_open))
    go_on(beat, 70)
    # Asked again every 5 s while it is closed; then it counts from its last run.
    assert broker.slots("custom") == [10, 45, 55, 65]
    state = service.state(ID)
    assert (state.runs, state.skips) == (4, {})


def test_the_servers_time_counts(make_app: MakeApp, beat: Beat) -> None:
    asked: list[datetime] = []

    def is_open(moment: datetime) -> bool:
        asked.append(moment)
        return True

    declare(make_app(timezone="Asia/Tokyo"), beat, OfficeHours(10, is_open))
    go_on(beat, 10)
    assert asked == [to_datetime(START_MS + 10_000)]
    assert asked[0].utcoffset() == timedelta(hours=9)


def test_what_it_remembers_stays(make_app: MakeApp, beat: Beat, broker: Broker) -> None:
    class Every2nd(OfficeHours):
        asked = 0

        def is_due(self, last_run_at: datetime) -> Any:
            self.asked += 1
            return schedstate(self.asked % 2 == 0, 10)

    rule = Every2nd(10, always)
    declare(make_app(), beat, rule)
    before = rule.asked
    go_on(beat, 60)
    assert rule.asked == before + 6
    assert len(broker.sent) == 3


def test_its_bounds_are_kept(
    make_app: MakeApp, service: Service, beat: Beat, broker: Broker
) -> None:
    declare(make_app(), beat, OfficeHours(10, always), max_runs=2)
    go_on(beat, 50)
    assert broker.slots("custom") == [10, 20]
    assert service.state(ID).is_finished


def test_it_survives_its_owner_where_the_code_is(
    make_app: MakeApp, service: Service, beat: Beat, broker: Broker
) -> None:
    app = make_app()
    declare(app, beat, OfficeHours(10, always))
    other = Beat(service, broker, "b")
    go_on(beat, 12)
    while service.store.leave("a", beat.lease.epoch).more:
        pass
    go_on(other, 10)
    assert service.state(ID).status == "active"
    assert broker.slots("custom") == [10]
    declare(app, other, OfficeHours(10, always))
    go_on(other, 20)
    assert broker.slots("custom")[1:2] != []
    assert {run.instance for run in broker.sent[1:]} == {"b"}
    other.store.close()


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (ZeroDivisionError("in the user's code"), "in the user's code"),
        ("soon", "is_due()"),
        ((True, "soon"), "is_due()"),
        (None, "is_due()"),
    ],
    ids=repr,
)
def test_code_that_fails_breaks_its_own_timer_only(
    make_app: MakeApp, service: Service, beat: Beat, broker: Broker, answer: Any, said: str
) -> None:
    rule = Failing((False, 5))
    declare(make_app(), beat, rule)
    service.add("other", every=10)
    rule.answer = answer
    go_on(beat, 20)
    state = service.state(ID)
    assert state.status == "broken"
    assert said in state.reason
    assert broker.slots("other") == [10, 20]


@pytest.mark.parametrize(
    ("answer", "said"), [("nonsense", "is_due()"), (ZeroDivisionError("by code"), "by code")]
)
def test_code_that_fails_when_it_is_declared_is_listed_as_broken(
    make_app: MakeApp,
    service: Service,
    beat: Beat,
    caplog: pytest.LogCaptureFixture,
    answer: Any,
    said: str,
) -> None:
    with caplog.at_level(logging.ERROR):
        declare(make_app(), beat, Failing(answer))
    assert service.state(ID).status == "broken"
    assert said in caplog.text


def test_code_that_fails_later_stops_no_other_entry(
    make_app: MakeApp, service: Service, beat: Beat, broker: Broker
) -> None:
    """Also when it fails while the static schedule is written."""
    rule = Failing((False, 5))
    declaration = declaration_of(
        make_app(),
        "orders",
        {"custom": {"task": "t", "schedule": rule}, "other": {"task": "t", "schedule": 10.0}},
    )
    beat.bound.update(declaration.bound)
    rule.answer = ZeroDivisionError("by code")
    StaticSchedule(service.store, declaration).reconcile(beat.lease)
    go_on(beat, 10)
    assert service.state(ID).status == "broken"
    assert broker.slots("other") == [10]


def test_other_code_is_another_schedule(make_app: MakeApp, service: Service, beat: Beat) -> None:
    app = make_app()
    declare(app, beat, OfficeHours(10, always))
    before = service.state(ID).revision
    declare(app, beat, OfficeHours(10, always)).reconcile(beat.lease)
    assert service.state(ID).revision == before
    service.clock.advance(3)
    declare(app, beat, OfficeHours(20, always))
    state = service.state(ID)
    assert state.revision != before
    assert state.due_ms == START_MS + 23_000


def test_from_outside_it_is_listed_and_not_previewed(
    make_app: MakeApp, service: Service, beat: Beat
) -> None:
    app = make_app()
    declare(app, beat, OfficeHours(10, always))
    timers = DistributedTimer(app)
    timers._shards = service.another_shards()
    timer = timers.get_timer("custom")
    assert timer.schedule is not None
    assert timer.next_run_at == to_datetime(START_MS + 10_000)
    with pytest.raises(InvalidTimerError, match="goes by code of its beats"):
        timers.preview("custom")
    with pytest.raises(InvalidTimerError, match="from its beat's code"):
        timers.update_timer("custom", args=[1])
    timers.store.close()


def test_it_is_paused_and_resumed(
    make_app: MakeApp, service: Service, beat: Beat, broker: Broker
) -> None:
    app = make_app()
    declare(app, beat, OfficeHours(10, always))
    timers = DistributedTimer(app)
    timers._shards = service.another_shards()
    go_on(beat, 12)
    timers.pause_timer("custom")
    go_on(beat, 30)
    assert broker.slots("custom") == [10]
    timers.resume_timer("custom")
    go_on(beat, 5)
    assert len(broker.sent) == 2  # it is asked at once, and its last run is long ago
    timers.trigger_timer("custom")
    beat.step()
    assert len(broker.sent) == 3
    timers.store.close()


def test_a_timer_that_is_made_at_run_time_cannot_have_one(make_app: MakeApp) -> None:
    timers = DistributedTimer(make_app())
    with pytest.raises(InvalidTimerError, match=r"^schedule=.*static schedule"):
        timers.create_timer("a", OfficeHours(10, always), "t")
    assert timers.get_timers() == []


def test_a_real_scheduler_asks_its_own_code(make_app: MakeApp, start_timers: StartTimers) -> None:
    app = make_app()
    asked: list[datetime] = []

    def is_open(moment: datetime) -> bool:
        asked.append(moment)
        return len(asked) > 1

    app.conf.beat_schedule = {"custom": {"task": "t", "schedule": OfficeHours(0.1, is_open)}}
    timers = start_timers(app)
    wait_until(
        lambda: any(timer.total_run_count for timer in timers.get_timers(name="custom")),
        "the custom timer has run",
        timeout=20,
    )
    assert len(asked) >= 2
