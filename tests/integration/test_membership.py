"""One instance's lease, and what it does for the timers of others; every clock is the test's."""

from __future__ import annotations

import json
import logging
import time
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from celery_dtimer.errors import FencedError, StoreError, StoreUnavailableError
from celery_dtimer.membership import MembershipThread, leave
from celery_dtimer.store import Reading, Settlement, Store
from tests.integration.conftest import START_MS, MakeMember, MakeService, Member, Service
from tests.waiting import wait_until

TRUSTED = 27.0  # seconds: nine tenths of the timeout
KEPT = 7 * 86_400  # seconds that a timer without a run left is kept


# ------------------------------------------------------------------ the lease


def test_nothing_is_registered_before_the_first_step(make_member: MakeMember) -> None:
    member = make_member("a")
    assert member.membership.lease is None
    assert member.service.store.instances() == []


def test_the_first_step_registers(make_member: MakeMember) -> None:
    member = make_member("a")
    assert 0 < member.step() <= 5
    (instance,) = member.service.store.instances()
    assert (instance.id, instance.service, instance.host) == ("a", "orders", "host")
    assert (instance.version, instance.dispatch) == ("1.0", "confirmed")
    lease = member.lease
    assert (lease.instance, lease.epoch, lease.heartbeat_ms) == ("a", instance.epoch, START_MS)
    assert member.news == 1


def test_a_lease_counts_from_the_start_of_its_request(
    make_member: MakeMember, monkeypatch: pytest.MonkeyPatch
) -> None:
    member = make_member("a")
    started = member.seconds()
    answer = Store.heartbeat

    def slow(*args: Any, **known: Any) -> Any:
        member.service.clock.advance(4)
        return answer(*args, **known)

    monkeypatch.setattr(Store, "heartbeat", slow)
    member.step()
    assert member.lease.trusted_until == started + TRUSTED
    member.service.clock.advance(TRUSTED - 4 - 0.001)
    assert member.membership.lease is not None
    member.service.clock.advance(0.001)
    assert member.membership.lease is None


def test_a_lease_ends_before_the_server_takes_the_timers(make_member: MakeMember) -> None:
    a, b = make_member("a"), make_member("b")
    a.step()
    a.service.add()
    while a.membership.lease is not None:
        b.step()
        a.service.clock.advance(1)
        assert a.service.state(a.service.define().id).owner == "a"


def test_every_step_renews_the_lease(make_member: MakeMember) -> None:
    member = make_member("a")
    member.step()
    first = member.lease
    member.service.clock.advance(5)
    member.step()
    assert member.lease.epoch == first.epoch
    assert member.lease.trusted_until == first.trusted_until + 5
    assert member.lease.heartbeat_ms == START_MS + 5000
    assert member.news == 1


def test_an_unreachable_redis_lets_the_lease_run_out(
    make_member: MakeMember, monkeypatch: pytest.MonkeyPatch
) -> None:
    member = make_member("a")
    member.step()
    lease = member.lease

    def fail(*_: Any, **__: Any) -> Any:
        raise StoreUnavailableError("down")

    monkeypatch.setattr(Store, "heartbeat", fail)
    member.service.clock.advance(5)
    with pytest.raises(StoreUnavailableError):
        member.step()
    assert member.lease == lease
    member.service.clock.advance(TRUSTED)
    assert member.membership.lease is None


def test_a_loop_without_progress_ends_the_lease_and_the_heartbeats(
    make_member: MakeMember,
) -> None:
    member = make_member("a")
    member.step()
    member.service.clock.advance(10.001)
    assert 0 < member.step(progress=False) <= 5
    assert member.membership.lease is None
    assert member.service.store.scores("service_instances") == {"a": START_MS}


def test_a_loop_may_be_silent_for_as_long_as_it_said(make_member: MakeMember) -> None:
    member = make_member("a")
    member.membership.report_progress(wait=3)
    member.service.clock.advance(13)
    member.step(progress=False)
    assert member.lease
    member.service.clock.advance(0.001)
    member.step(progress=False)
    assert member.membership.lease is None


def test_a_loop_that_goes_on_registers_with_a_newer_epoch(make_member: MakeMember) -> None:
    member = make_member("a")
    member.step()
    old = member.lease.epoch
    member.service.clock.advance(11)
    member.step(progress=False)
    member.step()
    assert member.lease.epoch > old
    assert member.news == 2


def test_a_silent_loop_loses_its_timers(make_member: MakeMember) -> None:
    a, b = make_member("a"), make_member("b")
    a.step()
    timer = a.service.add()
    for _ in range(41):
        b.step()
        a.step(progress=False)
        a.service.clock.advance(1)
    b.step()
    assert a.service.state(timer.id).owner == "b"


@pytest.mark.parametrize("how", ["heartbeat", "reported by the loop"])
def test_a_fenced_instance_registers_with_a_newer_epoch(make_member: MakeMember, how: str) -> None:
    member = make_member("a")
    member.step()
    old = member.lease.epoch
    if how == "heartbeat":
        member.service.redis.delete(member.service.keys("service_instances"))
        assert member.step() == 0
        assert member.membership.lease is None
    else:
        member.membership.report_fenced(old)
        assert member.membership.attention.is_set()
    member.step()
    assert member.lease.epoch > old
    assert member.news == 2


def test_a_fenced_epoch_of_old_is_no_reason_to_register_anew(make_member: MakeMember) -> None:
    member = make_member("a")
    member.step()
    epoch = member.lease.epoch
    member.membership.report_fenced(epoch - 1)
    member.step()
    assert member.lease.epoch == epoch


def test_news_of_the_members_reaches_the_loop(make_member: MakeMember) -> None:
    a, b = make_member("a"), make_member("b")
    a.step()
    before = a.lease.members
    b.step()
    a.step()
    assert a.lease.members > before
    assert a.news == 2


# ------------------------------------------------------------------ the dead


def test_the_dead_are_found_as_soon_as_their_heartbeat_runs_out(make_member: MakeMember) -> None:
    a, b = make_member("a"), make_member("b")
    b.step()
    b.service.add()
    waited = 0.0
    wait = a.step()
    while "b" in a.service.loads():
        waited += wait
        assert waited < 40
        a.service.clock.advance(wait)
        wait = a.step()
    assert 30 < waited < 30.1
    assert a.service.loads() == {"a": 1}


def test_an_instance_reaped_by_others_comes_back_with_nothing(make_member: MakeMember) -> None:
    a, b = make_member("a"), make_member("b")
    a.step()
    timer = a.service.add()
    b.live(33)
    old = a.membership._lease
    assert old is not None
    assert a.service.state(timer.id).owner == "b"
    assert a.step() == 0
    a.step()
    assert a.lease.epoch > old.epoch
    with pytest.raises(FencedError):
        a.service.store.due("a", old.epoch, Reading(10))


def test_all_batches_move_soonest_due_first(
    make_member: MakeMember, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = make_member("a"), make_member("b")
    a.step()
    timers = [timer.id for timer in a.service.add_many(10, every=3600)]
    b.step()
    assert a.service.store.owned_ids("a") == timers[:5]
    left: list[list[str]] = []
    answer = Store.reap

    def reap(store: Store, instance: str, epoch: int) -> Any:
        left.append(store.owned_ids("a"))
        return answer(store, instance, epoch, limit=2)

    monkeypatch.setattr(Store, "reap", reap)
    b.live(33)
    assert [ids for ids in left if ids != timers[:5]][:2] == [timers[2:5], timers[4:5]]
    assert a.service.loads() == {"b": 10}


def test_a_busy_mover_is_asked_again_soon(make_member: MakeMember) -> None:
    a, b, c = make_member("a"), make_member("b"), make_member("c")
    a.step()
    timer = a.service.add()
    b.live(29, c)
    assert a.service.store.reap("c", c.lease.epoch).count == 0
    meta = a.service.keys("meta")
    a.service.clock.advance(2)
    a.service.redis.hset(meta, mapping={"mover": "c", "mover_until": a.service.clock.now_ms + 1000})
    assert 0 < b.step() <= 5 / 4
    assert a.service.state(timer.id).owner == "a"
    a.service.clock.advance(1)
    b.step()
    assert a.service.state(timer.id).owner in ("b", "c")


def test_silence_of_everybody_is_no_death(make_member: MakeMember) -> None:
    a, b = make_member("a"), make_member("b")
    a.step()
    timer = a.service.add()
    b.step()
    epoch = a.lease.epoch
    a.service.clock.advance(120)
    b.step()
    a.step()
    assert a.lease.epoch == epoch
    assert a.service.state(timer.id).owner == "a"


def test_a_slow_redis_keeps_nobody_from_finding_the_dead(
    make_member: MakeMember, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long a step's calls take in all, heartbeats come in between."""
    a, b = make_member("a"), make_member("b")
    a.step()
    a.service.add()
    call, heard = Store._call, [b.service.clock.now_ms]

    def slow(store: Store, name: str, *arguments: Any) -> Any:
        b.service.clock.advance(1.5)
        if name == "heartbeat":
            heard.append(b.service.clock.now_ms)
        return call(store, name, *arguments)

    monkeypatch.setattr(Store, "_call", slow)
    b.live(60)
    assert a.service.epoch("a") == 0, "it is dead, and was found so"
    assert a.service.state(a.service.define().id).owner == "b"
    gaps = [late - early for early, late in pairwise(heard)]
    assert max(gaps) <= 2 * 5000


def test_timers_that_nobody_owns_are_adopted_at_once(
    service: Service, make_member: MakeMember
) -> None:
    service.add_many(3)
    make_member("a").step()
    assert service.loads() == {"a": 3}


# ------------------------------------------------------------------ evening out


def test_who_joins_gets_its_share_at_once(service: Service, make_member: MakeMember) -> None:
    a, b, c = make_member("a"), make_member("b"), make_member("c")
    a.step()
    service.add_many(10)
    b.step()
    assert service.loads() == {"a": 5, "b": 5}
    c.step()
    assert sorted(service.loads().values()) == [3, 3, 4]


def test_evening_out_goes_on_when_another_was_moving(
    service: Service, make_member: MakeMember
) -> None:
    a, b = make_member("a"), make_member("b")
    a.step()
    service.add_many(10)
    meta = service.keys("meta")
    service.redis.hset(meta, mapping={"mover": "a", "mover_until": START_MS + 1000})
    assert 0 < b.step() <= 5 / 4
    assert service.loads() == {"a": 10, "b": 0}
    service.clock.advance(5 / 4)
    b.step()
    assert service.loads() == {"a": 5, "b": 5}


def test_drift_is_evened_out_by_the_check_beyond_its_share_only(
    service: Service, make_member: MakeMember
) -> None:
    a, b = make_member("a"), make_member("b")
    a.step()
    service.add_many(40, every=3600)
    b.step()
    a.live(20, b)
    assert service.loads() == {"a": 20, "b": 20}
    owned = service.store.owned_ids("b")
    service.store.delete(owned[:1])
    a.live(20, b)
    assert service.loads() == {"a": 20, "b": 19}
    service.store.delete(owned[1:9])
    a.live(20, b)
    assert service.loads() == {"a": 16, "b": 15}


def test_nothing_moves_without_a_cause(service: Service, make_member: MakeMember) -> None:
    a, b = make_member("a"), make_member("b")
    a.step()
    service.add_many(11, every=3600)
    b.step()
    a.live(10, b)
    before = service.store.owned_ids("a")
    a.live(60, b)
    assert service.store.owned_ids("a") == before


# ------------------------------------------------------------------ what the loop reports


def _told(member: Member) -> tuple[str, str, str]:
    (instance,) = (each for each in member.service.store.instances() if each.id == member.instance)
    return instance.dispatch, instance.dispatch_reason, instance.broker


def test_nothing_is_known_before_the_loop_reports(service: Service) -> None:
    member = Member(service, "a", dispatch="")
    member.step()
    assert _told(member) == ("", "", "")
    member.store.close()


def test_what_the_loop_reports_is_told_by_the_next_step(make_member: MakeMember) -> None:
    member = make_member("a")
    member.step()
    member.membership.report_dispatch("atomic", "the broker holds the timers")
    member.membership.report_broker(True)
    assert _told(member) == ("confirmed", "", "")
    member.step()
    assert _told(member) == ("atomic", "the broker holds the timers", "up")


def test_a_step_is_due_when_the_report_has_changed(make_member: MakeMember) -> None:
    member = make_member("a")
    attention = member.membership.attention
    for _ in range(2):
        member.membership.report_broker(True)
        member.membership.report_dispatch("atomic", "why")
        assert attention.is_set()
        attention.clear()
        member.membership.report_broker(True)
        member.membership.report_dispatch("atomic", "why")
        assert not attention.is_set()
        member.membership.report_broker(False)
        member.membership.report_dispatch("confirmed", "why")


def test_only_what_has_changed_is_written(
    make_member: MakeMember, monkeypatch: pytest.MonkeyPatch
) -> None:
    member = make_member("a")
    member.membership.report_broker(True)
    written: list[Any] = []
    answer = Store.report

    def report(store: Store, instance: str, epoch: int, fields: Any) -> None:
        written.append(fields)
        answer(store, instance, epoch, fields)

    monkeypatch.setattr(Store, "report", report)
    member.step()
    assert _told(member) == ("confirmed", "", "up")
    assert written == [{"clock_offset_ms": "0"}]
    member.membership.report_broker(False)
    member.step()
    member.step()
    assert written[1:] == [{"broker": "down"}]


def test_a_report_that_was_not_written_is_written_later(
    make_member: MakeMember, monkeypatch: pytest.MonkeyPatch
) -> None:
    member = make_member("a")
    member.step()
    member.membership.report_broker(True)

    def fail(*_: Any) -> None:
        raise StoreUnavailableError("down")

    with monkeypatch.context() as patch:
        patch.setattr(Store, "report", fail)
        with pytest.raises(StoreUnavailableError):
            member.step()
    assert _told(member) == ("confirmed", "", "")
    member.step()
    assert _told(member) == ("confirmed", "", "up")


def test_a_new_registration_says_all_that_was_reported(make_member: MakeMember) -> None:
    member = make_member("a")
    member.step()
    member.membership.report_dispatch("atomic", "why")
    member.membership.report_broker(False)
    member.step()
    member.membership.report_fenced(member.lease.epoch)
    member.step()
    assert _told(member) == ("atomic", "why", "down")


def test_who_is_refused_again_and_again_registers_at_intervals(make_member: MakeMember) -> None:
    """The loop may speak to a master that was replaced, which knows no new epoch."""
    a = make_member("a")
    a.step()
    epochs = [a.lease.epoch]
    for _ in range(100):
        a.membership.report_fenced(epochs[-1])
        assert a.membership.lease is None, "nothing is sent by an epoch that was refused"
        a.step()
        if a.membership.lease is not None:
            epochs.append(a.lease.epoch)
        a.service.clock.advance(0.05)
    assert 2 <= len(epochs) <= 2 + 5 / 1.25


def test_a_report_of_an_epoch_that_is_over_waits_for_the_next_one(
    make_member: MakeMember, monkeypatch: pytest.MonkeyPatch
) -> None:
    member = make_member("a")
    member.step()
    old = member.lease.epoch
    answer = Store.heartbeat

    def and_registered_by_another(store: Store, *args: Any, **known: Any) -> Any:
        answered = answer(store, *args, **known)
        member.service.join("a")
        return answered

    member.membership.report_broker(True)
    with monkeypatch.context() as patch:
        patch.setattr(Store, "heartbeat", and_registered_by_another)
        with pytest.raises(FencedError):
            member.step()
    while member.step() == 0:
        pass
    assert member.lease.epoch > old + 1
    assert _told(member) == ("confirmed", "", "up")


# ------------------------------------------------------------------ a broker that is down

GIVE_UP_AFTER = 10.0  # seconds: a third of the timeout


def _with_brokers(up: Member, down: Member, timers: int = 10) -> None:
    """Let both own as many timers; then the broker of one is down, as its instance says."""
    up.step()
    up.service.add_many(timers, every=3600)
    down.step()
    up.service.clock.advance(3)  # so that nothing falls due with the failure check
    for member in (up, down):
        member.membership.report_broker(member is up)
        member.step()


def test_timers_are_kept_until_the_broker_is_down_for_the_stated_time(
    service: Service, make_member: MakeMember, caplog: pytest.LogCaptureFixture
) -> None:
    assert service.settings.give_up_after == GIVE_UP_AFTER
    a, b = make_member("a"), make_member("b")
    _with_brokers(a, b)
    service.clock.advance(GIVE_UP_AFTER - 0.001)
    a.step()
    assert 0 < b.step() <= 0.0011
    assert service.loads() == {"a": 5, "b": 5}
    service.clock.advance(0.002)
    b.step()
    assert service.loads() == {"a": 10, "b": 0}
    expected = "broker unreachable for 10 s here while other instances reach it: 5 timers given up"
    assert expected in caplog.text


def test_the_loop_that_says_again_that_the_broker_is_down_gets_no_more_time(
    service: Service, make_member: MakeMember
) -> None:
    a, b = make_member("a"), make_member("b")
    _with_brokers(a, b)
    for _ in range(11):
        service.clock.advance(1)
        b.membership.report_broker(False)
        a.step()
        b.step()
    assert service.loads() == {"a": 10, "b": 0}


def test_who_gave_its_timers_up_stays_and_gets_none_while_its_broker_is_down(
    service: Service, make_member: MakeMember, caplog: pytest.LogCaptureFixture
) -> None:
    a, b = make_member("a"), make_member("b")
    _with_brokers(a, b)
    epoch = b.lease.epoch
    b.live(60, a)
    service.add_many(5, "late", every=3600)
    b.live(30, a)
    assert service.loads() == {"a": 15, "b": 0}
    assert b.lease.epoch == epoch
    assert caplog.text.count("given up") == 1


def test_an_instance_gets_its_share_again_at_once_when_its_broker_is_back(
    service: Service, make_member: MakeMember
) -> None:
    a, b = make_member("a"), make_member("b")
    _with_brokers(a, b)
    b.live(30, a)
    b.step()
    assert service.loads() == {"a": 10, "b": 0}
    b.membership.report_broker(True)
    b.step()
    assert service.loads() == {"a": 5, "b": 5}
    b.live(30, a)
    assert service.loads() == {"a": 5, "b": 5}


@pytest.mark.parametrize("broker_of_a", [False, None])
def test_nothing_is_given_up_while_no_other_broker_works(
    service: Service,
    make_member: MakeMember,
    broker_of_a: bool | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    a, b = make_member("a"), make_member("b")
    a.step()
    service.add_many(10, every=3600)
    b.step()
    b.membership.report_broker(False)
    if broker_of_a is not None:
        a.membership.report_broker(broker_of_a)
    b.live(60, a)
    assert service.loads() == {"a": 5, "b": 5}
    a.membership.report_broker(True)
    b.live(6, a)
    assert service.loads() == {"a": 10, "b": 0}
    assert caplog.text.count("given up") == 1


def test_a_broker_that_is_back_in_time_costs_no_timers(
    service: Service, make_member: MakeMember
) -> None:
    a, b = make_member("a"), make_member("b")
    _with_brokers(a, b)
    for _ in range(5):
        b.live(6, a)
        b.membership.report_broker(True)
        b.live(1, a)
        b.membership.report_broker(False)
    assert service.loads() == {"a": 5, "b": 5}


def test_timers_are_given_up_in_batches_with_heartbeats_in_between(
    service: Service, make_member: MakeMember, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = make_member("a"), make_member("b")
    _with_brokers(a, b, timers=20)
    answer, heard = Store.give_up, []

    def give_up(store: Store, instance: str, epoch: int) -> Any:
        heard.append(service.store.scores("service_instances")["b"])
        service.clock.advance(3)
        return answer(store, instance, epoch, limit=2)

    b.live(GIVE_UP_AFTER - 1, a)
    monkeypatch.setattr(Store, "give_up", give_up)
    service.clock.advance(2)
    b.step()
    assert service.loads() == {"a": 20, "b": 0}
    assert len(heard) == 5
    assert len(set(heard)) > 1


def test_giving_up_ends_when_the_broker_is_back_meanwhile(
    service: Service, make_member: MakeMember, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = make_member("a"), make_member("b")
    _with_brokers(a, b)
    answer = Store.give_up

    def give_up(store: Store, instance: str, epoch: int) -> Any:
        moved = answer(store, instance, epoch, limit=2)
        b.membership.report_broker(True)
        return moved

    monkeypatch.setattr(Store, "give_up", give_up)
    service.clock.advance(GIVE_UP_AFTER + 1)
    b.step()
    assert service.loads() == {"a": 7, "b": 3}


def test_giving_up_waits_for_another_mover_and_is_tried_again_soon(
    service: Service, make_member: MakeMember
) -> None:
    a, b = make_member("a"), make_member("b")
    _with_brokers(a, b)
    b.live(GIVE_UP_AFTER - 1, a)
    service.clock.advance(2)
    mover = {"mover": "a", "mover_until": service.clock.now_ms + 1000}
    service.redis.hset(service.keys("meta"), mapping=mover)
    assert 0 < b.step() <= 5 / 4
    assert service.loads() == {"a": 5, "b": 5}
    service.clock.advance(5 / 4)
    b.step()
    assert service.loads() == {"a": 10, "b": 0}


# ------------------------------------------------------------------ what it says of itself


def test_an_instance_says_how_far_its_clock_is_ahead(
    service: Service, make_member: MakeMember, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = make_member("a"), make_member("b")
    a.ahead, b.ahead = 3600.0, -2.5
    a.step()
    b.step()
    assert [each.clock_offset for each in service.store.instances()] == [3600.0, -2.5]
    b.ahead = -2.4
    b.live(6, a)
    assert [each.clock_offset for each in service.store.instances()] == [3600.0, -2.5]
    b.ahead = 1.0
    b.live(6, a)
    assert [each.clock_offset for each in service.store.instances()] == [3600.0, 1.0]


def test_an_instance_says_what_settings_it_has_and_no_secret(
    service: Service, make_member: MakeMember
) -> None:
    make_member("a").step()
    (instance,) = service.store.instances()
    assert json.loads(instance.settings)["dtimer_instance_timeout"] == 30.0
    assert "redis" not in instance.settings


# ------------------------------------------------------------------ tidying


def test_the_check_repairs_and_purges(service: Service, make_member: MakeMember) -> None:
    a = make_member("a")
    a.step()
    timer = service.add("gone", every=3600)
    once = service.add("once", at_ms=START_MS)
    epoch = a.lease.epoch
    (due,) = service.due("a", epoch)
    service.commit("a", epoch, service.ran(due))
    service.redis.delete(service.keys("timer", timer.id))
    service.redis.zrem(service.keys("instance_timers", "a"), timer.id)
    a.live(11)
    assert not service.exists(timer.id)
    assert service.exists(once.id)


def _errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]


def test_damage_is_repaired_with_the_next_check_however_much_it_is(
    service: Service, make_member: MakeMember, caplog: pytest.LogCaptureFixture
) -> None:
    a = make_member("a")
    a.step()
    timers = service.add_many(450)
    service.redis.delete(service.keys("timer_queue"))
    a.live(11)
    assert service.store.pending_count() == 450
    assert service.store.owned_ids("a") == [timer.id for timer in timers]
    told = " ".join(_errors(caplog))
    assert len(_errors(caplog)) <= 5
    assert all(told.count(timer.id) == 1 for timer in timers), "each is told once"
    assert service.store.counters()["repaired"] == 450


@pytest.mark.parametrize(
    "what",
    ["meta", "timer_queue", "inactive_timers", "service_instances", "instance_timers", "instance"],
)
def test_a_key_of_another_type_stops_nothing_for_long(
    service: Service,
    make_member: MakeMember,
    caplog: pytest.LogCaptureFixture,
    what: str,
) -> None:
    a, b = make_member("a"), make_member("b")
    a.step()
    timers = service.add_many(20)
    b.step()
    b.live(1, a)
    paused = service.add("paused")
    service.store.pause(paused.id)
    id = "a" if what.startswith("instance") else None
    service.redis.delete(service.keys(what, id))
    service.redis.set(service.keys(what, id), "nonsense")
    a.live(15, b)
    assert a.lease.epoch == service.epoch("a")
    assert b.lease.epoch == service.epoch("b")
    assert sum(service.loads().values()) == len(timers)
    assert service.state(paused.id).status == "paused"
    told = [text for text in _errors(caplog) if "was a string: removed" in text]
    assert len(told) == (0 if what == "instance" else 1), "its owner registers anew"


def test_where_scan_is_forbidden_nothing_is_said_and_the_rest_is_repaired(
    service: Service, make_member: MakeMember, caplog: pytest.LogCaptureFixture
) -> None:
    user = f"user{service.settings.key_prefix.strip(':')}"
    service.redis.acl_setuser(
        user,
        enabled=True,
        passwords=["+secret"],
        keys=["*"],
        channels=["*"],
        commands=["+@all", "-scan"],
    )
    try:
        a = make_member("a")
        limited = f"redis://{user}:secret@{service.settings.redis_url.partition('://')[2]}"
        a.store.settings = replace(service.settings, redis_url=limited)
        a.step()
        timer = service.add()
        service.redis.zrem(service.keys("timer_queue"), timer.id)
        a.live(25)
        assert service.store.pending_count() == 1
        assert len(_errors(caplog)) == 1, "only the repair"
        a.store.close()
    finally:
        service.redis.acl_deluser(user)


def test_what_cannot_be_looked_through_is_told_once_and_holds_nothing_up(
    service: Service,
    make_member: MakeMember,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    a = make_member("a")
    once = service.add("once", at_ms=START_MS)
    a.step()
    service.commit("a", a.lease.epoch, Settlement(service.due_one("a", a.lease.epoch), "run"))

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise StoreError("NOPERM this user has no permissions")

    with monkeypatch.context() as patch:
        patch.setattr(Store, "scrub", refuse)
        service.clock.advance(KEPT)
        a.live(30)
        assert len(_errors(caplog)) == 1
        assert not service.exists(once.id), "it is purged all the same"
    a.live(11)
    monkeypatch.setattr(Store, "scrub", refuse)
    a.live(11)
    assert len(_errors(caplog)) == 2, "it has worked meanwhile"


# ------------------------------------------------------------------ leaving


def test_leaving_hands_everything_over(service: Service, make_member: MakeMember) -> None:
    a, b = make_member("a"), make_member("b")
    a.step()
    service.add_many(450)
    b.step()
    moved = leave(service.another_store(), a.lease, until=time.monotonic() + 60)
    assert moved == 225
    assert service.loads() == {"b": 450}


def test_leaving_stops_at_its_deadline_and_the_others_go_on(
    service: Service, make_member: MakeMember
) -> None:
    a, b = make_member("a"), make_member("b")
    a.step()
    service.add_many(3)
    assert leave(service.store, a.lease, until=time.monotonic() - 1) == 0
    assert service.loads() == {"a": 3}
    service.store.leave("a", a.lease.epoch, limit=1)
    b.step()
    assert service.loads() == {"b": 3}


def test_leaving_twice_is_fenced(service: Service, make_member: MakeMember) -> None:
    a = make_member("a")
    a.step()
    leave(service.store, a.lease, until=time.monotonic() + 60)
    with pytest.raises(FencedError):
        leave(service.store, a.lease, until=time.monotonic() + 60)


# ------------------------------------------------------------------ the thread


def test_the_thread_goes_on_after_failures_and_logs_an_outage_once(
    make_member: MakeMember, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    member = make_member("a")
    failures = iter([StoreUnavailableError("down"), StoreUnavailableError("down"), FencedError()])
    step = member.membership.step

    def failing() -> float:
        failure = next(failures, None)
        if failure is not None:
            raise failure
        return step()

    monkeypatch.setattr(member.membership, "step", failing)
    monkeypatch.setattr("celery_dtimer.membership._FIRST_RETRY", 0.001)
    thread = MembershipThread(member.membership)
    with caplog.at_level(logging.ERROR, "celery_dtimer"):
        thread.start()
        try:
            wait_until(lambda: member.membership.lease, "the lease")
        finally:
            thread.stop(5)
    assert not thread.is_alive()
    assert caplog.text.count("trying again until it answers") == 1


def test_settings_of_another_pace_are_kept(make_service: MakeService) -> None:
    service = make_service(heartbeat_interval=1, check_interval=1, instance_timeout=3)
    member = Member(service, "a")
    assert 0 < member.step() <= 1
    assert member.lease.trusted_until == pytest.approx(member.seconds() + 2.7)
    member.store.close()
