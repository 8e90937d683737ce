"""What becomes of runs under each policy, from the definition to the broker and the history."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from celery_dtimer import history
from celery_dtimer.model import Definition, to_datetime
from celery_dtimer.planning import jitter_of
from celery_dtimer.policy import Defaults, Policy
from celery_dtimer.schedules import Crontab
from tests.integration.conftest import SECOND, START_MS, Beat, Broker, MakeService, Service

UTC = timezone.utc


def at(hour: int, minute: int, second: float = 0) -> int:
    """Return a moment of a day as ms."""
    moment = datetime(2026, 1, 5, hour, minute, tzinfo=UTC) + timedelta(seconds=second)
    return round(moment.timestamp() * SECOND)


def clock_times(broker: Broker, name: str = "timer") -> list[str]:
    """Return the times of day for which runs of a timer were sent."""
    return [
        to_datetime(run.scheduled_ms).strftime("%H:%M")
        for run in broker.sent
        if run.definition.name == name
    ]


def found(service: Service, timer: Definition) -> list[history.Sent | history.Skipped]:
    """Return what the history says of a timer."""
    return list(history.records(service.store.history(0), timer.id))


def pass_until(beat: Beat, moment_ms: int) -> None:
    """Dispatch all that is due until a moment, when it is due."""
    clock = beat.service.clock
    while clock.now_ms < moment_ms:
        done = beat.step()
        wait = 0 if done.more else round((done.next_in or 1) * SECOND)
        clock.now_ms = min(moment_ms, clock.now_ms + max(wait, 0))
        beat.service.redis.zadd(beat.service.keys("service_instances"), {beat.instance: clock()})
    while beat.step().more:
        pass


# ------------------------------------------------------------------ after a standstill


@pytest.fixture
def stood_still(beat: Beat) -> Beat:
    """A beat at 9:39:30; it is to stand still until 9:52:10."""
    beat.service.clock.now_ms = at(9, 39, 30)
    beat.register()
    return beat


def after_standstill(beat: Beat, **policy: Any) -> Definition:
    """Let a timer of every minute miss from 9:40 to 9:52, and the beat go on until 9:54."""
    timer = beat.service.add(schedule=Crontab("* * * * *"), policy=Policy(**policy))
    beat.service.clock.now_ms = at(9, 52, 10)
    pass_until(beat, at(9, 54))
    return timer


def test_by_default_one_run_stands_for_all_that_were_missed(
    stood_still: Beat, broker: Broker
) -> None:
    timer = after_standstill(stood_still)
    assert clock_times(broker) == ["09:40", "09:53", "09:54"]
    assert stood_still.service.state(timer.id).skips == {"coalesced": 12}


def test_with_a_grace_it_is_the_oldest_within(stood_still: Beat, broker: Broker) -> None:
    timer = after_standstill(stood_still, grace_ms=180_000)
    assert clock_times(broker) == ["09:50", "09:53", "09:54"]
    assert stood_still.service.state(timer.id).skips == {"misfire": 10, "coalesced": 2}


def test_without_coalescing_each_runs(stood_still: Beat, broker: Broker) -> None:
    timer = after_standstill(stood_still, coalesce=False)
    assert clock_times(broker) == [f"09:{minute}" for minute in range(40, 55)]
    assert stood_still.service.state(timer.id).skips == {}


def test_without_coalescing_the_latest_run_up_to_a_bound(stood_still: Beat, broker: Broker) -> None:
    timer = after_standstill(stood_still, coalesce=False, max_catch_up=3)
    assert clock_times(broker) == ["09:50", "09:51", "09:52", "09:53", "09:54"]
    assert stood_still.service.state(timer.id).skips == {"backlog": 10}


@pytest.mark.parametrize("expression", ["* * * * *", "* * * * * *", "*/7 1-23 * * *"])
def test_however_long_it_stood_still_each_missed_run_is_counted(
    beat: Beat, broker: Broker, expression: str
) -> None:
    service = beat.service
    rule = Crontab(expression, "America/New_York")
    timers = [service.define(f"t{n}", schedule=rule) for n in range(100)]
    service.store.save(timers)
    first_ms = rule.next_run_after(START_MS, START_MS)
    assert first_ms is not None
    service.clock.advance(30 * 86_400)
    while beat.step().more:
        pass
    assert len(broker.sent) == 100
    passed = rule.count_between(first_ms, service.clock(), first_ms)
    assert {service.state(timer.id).skips["coalesced"] for timer in timers} == {passed}


def test_runs_that_are_made_up_stand_behind_what_is_due(beat: Beat, broker: Broker) -> None:
    service = beat.service
    service.add("behind", every=1, policy=Policy(coalesce=False))
    service.clock.advance(30)
    service.add("due", at_ms=service.clock())
    beat.step()
    names = [run.definition.name for run in broker.sent[:2]]
    assert sorted(names) == ["behind", "due"]


@pytest.mark.parametrize(
    ("deadline", "sent"), [(None, ["09:00"]), (1, []), (300, []), (1800, ["10:00"])]
)
def test_celerys_deadline_for_crontabs_is_honoured(
    make_service: MakeService, broker: Broker, deadline: int | None, sent: list[str]
) -> None:
    grace_ms = None if deadline is None else deadline * SECOND
    service = make_service(defaults=Defaults(cron_grace_ms=grace_ms))
    service.clock.now_ms = at(8, 45)
    beat = Beat(service, broker)
    service.add(schedule=Crontab("0,45 * * * *"))
    service.clock.now_ms = at(10, 20)
    beat.step()
    beat.step()
    assert clock_times(broker) == sent
    pass_until(beat, at(10, 45))
    assert clock_times(broker) == [*sent, "10:45"]
    beat.store.close()


@pytest.mark.parametrize(
    ("defaults", "sent"),
    [
        (Defaults(), ["09:40"]),
        (Defaults(coalesce=False, max_catch_up=1), ["09:52"]),
        (Defaults(grace_ms=60_000), ["09:52"]),
    ],
)
def test_the_service_decides_what_a_timer_leaves_open(
    make_service: MakeService, broker: Broker, defaults: Defaults, sent: list[str]
) -> None:
    service = make_service(defaults=defaults)
    service.clock.now_ms = at(9, 39, 30)
    beat = Beat(service, broker)
    after_standstill(beat)
    assert clock_times(broker)[: len(sent)] == sent
    assert clock_times(broker)[len(sent) :] == ["09:53", "09:54"]
    beat.store.close()


# ------------------------------------------------------------------ bounds


def test_a_timer_finishes_with_its_last_run(beat: Beat, broker: Broker) -> None:
    timer = beat.service.add(every=10, policy=Policy(max_runs=3), args=(1,))
    pass_until(beat, START_MS + 60_000)
    assert broker.slots() == [10, 20, 30]
    state = beat.service.state(timer.id)
    assert (state.is_finished, state.runs, state.skips) == (True, 3, {})
    beat.service.add(every=10, policy=Policy(max_runs=3), args=(1,))
    pass_until(beat, START_MS + 90_000)
    assert broker.slots() == [10, 20, 30]
    beat.service.add(every=10, policy=Policy(max_runs=4), args=(1,))
    pass_until(beat, START_MS + 150_000)
    assert broker.slots() == [10, 20, 30, 100]
    assert [run.number for run in broker.sent] == [1, 2, 3, 4]


def test_what_has_finished_is_purged_like_a_one_shot(make_service: MakeService) -> None:
    service = make_service(keep_finished=60)
    beat = Beat(service, Broker())
    timer = service.add(every=10, policy=Policy(end_ms=START_MS + 15_000))
    pass_until(beat, START_MS + 30_000)
    assert service.state(timer.id).is_finished
    service.clock.advance(60)
    assert service.store.purge() == 1
    assert not service.exists(timer.id)
    beat.store.close()


def test_a_timer_runs_between_its_start_and_its_end(beat: Beat, broker: Broker) -> None:
    window = Policy(start_ms=START_MS + 25_000, end_ms=START_MS + 45_000)
    beat.service.add(every=10, policy=window)
    pass_until(beat, START_MS + 90_000)
    assert broker.slots() == [25, 35, 45]


def test_an_absolute_expiry_ends_the_timer(beat: Beat, broker: Broker) -> None:
    options = {"expires": to_datetime(START_MS + 25_000)}
    timer = beat.service.add(every=10, options=options)
    late = beat.service.add("late", every=10, options=options)
    beat.may_send = True
    pass_until(beat, START_MS + 12_000)
    beat.service.clock.now_ms = START_MS + 26_000
    beat.step()
    assert broker.slots("timer") == [10]
    assert broker.slots("late") == [10]
    for definition in (timer, late):
        state = beat.service.state(definition.id)
        assert (state.is_finished, state.runs, state.skips) == (True, 1, {"ended": 1})


def test_a_one_shot_whose_moment_has_come_runs_at_once_unless_its_grace_forbids_it(
    beat: Beat, broker: Broker
) -> None:
    beat.service.add("free", at_ms=START_MS - 90_000)
    strict = beat.service.add("strict", at_ms=START_MS - 90_000, policy=Policy(grace_ms=60_000))
    beat.step()
    assert [run.definition.name for run in broker.sent] == ["free"]
    state = beat.service.state(strict.id)
    assert (state.is_finished, state.runs, state.skips) == (True, 0, {"misfire": 1})


def test_jitter_delays_each_run_and_moves_no_slot(beat: Beat, broker: Broker) -> None:
    timer = beat.service.add(every=10, policy=Policy(jitter_ms=9_000))
    clock = beat.service.clock
    for number in range(1, 6):
        due_ms = START_MS + number * 10_000
        clock.now_ms = due_ms + jitter_of(timer, due_ms) - 1
        assert beat.step().sent == 0
        clock.advance(0.001)
        assert beat.step().sent == 1
    assert broker.slots() == [10, 20, 30, 40, 50]
    assert beat.service.state(timer.id).skips == {}


def test_a_change_of_arguments_keeps_the_jitter(beat: Beat) -> None:
    policy = Policy(jitter_ms=9_000)
    timer = beat.service.add(every=10, policy=policy)
    before = beat.service.state(timer.id)
    beat.service.clock.advance(3)
    beat.service.add(every=10, policy=policy, args=(1,))
    after = beat.service.state(timer.id)
    assert (after.due_ms, after.at_ms) == (before.due_ms, before.at_ms)


# ------------------------------------------------------------------ priorities


def test_the_most_urgent_of_a_batch_goes_first(beat: Beat, broker: Broker) -> None:
    for name, priority in (("none", None), ("low", 1), ("high", 9), ("middle", 5), ("plain", None)):
        options = {} if priority is None else {"priority": priority}
        beat.service.add(name, every=10, options=options)
    beat.service.clock.advance(10)
    beat.step()
    names = [run.definition.name for run in broker.sent]
    assert names[:3] == ["high", "middle", "low"]
    assert sorted(names[3:]) == ["none", "plain"]


# ------------------------------------------------------------------ history


def test_each_run_is_in_the_history(beat: Beat) -> None:
    timer = beat.service.add(every=10)
    pass_until(beat, START_MS + 20_000)
    trigger_ms = beat.service.clock.now_ms
    beat.service.trigger(timer)
    beat.step()
    assert found(beat.service, timer) == [
        history.Sent(START_MS + 10_000, "a", START_MS + 10_000, "1"),
        history.Sent(START_MS + 20_000, "a", START_MS + 20_000, "2"),
        history.Sent(trigger_ms, "a", trigger_ms, "trigger"),
    ]
    assert beat.service.store.counters() == {"sent": 3}


def test_each_run_that_did_not_happen_is_in_the_history_with_its_reason(beat: Beat) -> None:
    service = beat.service
    timer = service.add(every=10, policy=Policy(grace_ms=15_000))
    service.clock.advance(40)
    beat.step()  # 10 and 20 are too late; 30 stands for 40
    beat.step()
    service.store.pause(timer.id)
    service.clock.advance(25)
    service.resume(timer, START_MS + 70_000, 2)
    service.clock.advance(10)
    service.add(every=20)
    reasons = [
        (each.reason, each.runs)
        for each in found(service, timer)
        if isinstance(each, history.Skipped)
    ]
    assert reasons == [("misfire", 2), ("coalesced", 1), ("paused", 2), ("superseded", 1)]
    skips = {"misfire": 2, "coalesced": 1, "paused": 2, "superseded": 1}
    assert service.state(timer.id).skips == skips
    counters = service.store.counters()
    assert counters == {"sent": 1, **{f"skipped_{reason}": n for reason, n in skips.items()}}


def test_the_history_is_capped(make_service: MakeService) -> None:
    service = make_service(history=10)
    beat = Beat(service, Broker())
    service.add(every=1)
    for _ in range(400):
        service.clock.advance(1)
        beat.step()
    # Redis trims whole nodes of 100 entries.
    assert 10 <= len(list(service.store.history(0))) <= 200
    beat.store.close()


def test_without_a_history_runs_are_only_counted(make_service: MakeService) -> None:
    service = make_service(history=0)
    beat = Beat(service, Broker())
    service.add(every=1)
    pass_until(beat, START_MS + 5_000)
    assert list(service.store.history(0)) == []
    assert service.store.counters() == {"sent": 5}
    assert not service.redis.exists(service.keys("history"))
    beat.store.close()


@pytest.mark.parametrize("what", ["history", "counters"])
def test_a_history_or_counters_edited_by_hand_hold_nothing_up(
    beat: Beat, broker: Broker, what: str
) -> None:
    beat.service.redis.set(beat.service.keys(what), "nonsense")
    beat.service.add(every=10)
    pass_until(beat, START_MS + 30_000)
    assert broker.slots() == [10, 20, 30]


def test_a_long_batch_is_noted_in_entries_of_twenty(beat: Beat) -> None:
    timers = beat.service.add_many(45)
    beat.service.clock.advance(11)
    beat.step()
    entries = list(beat.service.store.history(0))
    assert [entry["sent"].count("\n") + 1 for entry in entries] == [20, 20, 5]
    assert sum(len(found(beat.service, timer)) for timer in timers) == 45


def test_a_history_longer_than_a_page_is_read_whole(beat: Beat) -> None:
    timer = beat.service.add(every=1)
    for number in range(1100):
        entry = {"instance": "a", "sent": f"{timer.id} {START_MS + number} {number}"}
        beat.service.redis.xadd(beat.service.keys("history"), entry, id=f"{START_MS + number}-1")
    assert len(found(beat.service, timer)) == 1100
    assert len(list(beat.service.store.history(START_MS + 1000))) == 100


# ------------------------------------------------------------------ superseded


@pytest.mark.parametrize(
    ("status", "late", "counted"), [("active", 5, 1), ("active", -5, 0), ("paused", 5, 0)]
)
def test_a_run_that_is_given_up_for_another_schedule_is_superseded(
    beat: Beat, status: str, late: int, counted: int
) -> None:
    timer = beat.service.add(every=10)
    if status == "paused":
        beat.service.store.pause(timer.id)
    beat.service.clock.advance(10 + late)
    beat.service.add(every=20)
    assert beat.service.state(timer.id).skips.get("superseded", 0) == counted


@pytest.mark.parametrize("sent", [False, True])
def test_what_lies_behind_an_earlier_end_is_superseded(
    beat: Beat, broker: Broker, sent: bool
) -> None:
    policy = Policy(coalesce=False)
    timer = beat.service.add(every=10, policy=policy)
    beat.service.clock.advance(45)
    if sent:
        beat.service.set_field(timer.id, "last_sent", str(START_MS + 10_000))
    beat.service.add(every=10, policy=replace(policy, end_ms=START_MS + 25_000))
    assert beat.service.state(timer.id).skips == {"superseded": 2}
    while beat.step().more:
        pass
    assert len(broker.sent) == (1 if sent else 2)
    state = beat.service.state(timer.id)
    assert (state.status, state.runs, state.skips) == ("stopped", 2, {"superseded": 2})


@pytest.mark.parametrize(("late", "skips"), [(5, {}), (25, {"superseded": 2})])
def test_a_run_that_was_sent_is_not_superseded_those_behind_it_are(
    beat: Beat, late: int, skips: dict[str, int]
) -> None:
    timer = beat.service.add(every=10)
    beat.service.set_field(timer.id, "last_sent", str(START_MS + 10_000))
    beat.service.clock.advance(10 + late)
    beat.service.add(every=20)
    assert beat.service.state(timer.id).skips == skips
