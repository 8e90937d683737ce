"""Each script by itself: state in, call, state out, and every answer that its header names."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import redis

from celery_dtimer.errors import DamagedError, FencedError, TooManyTimersError
from celery_dtimer.model import (
    LAST_MS,
    ONCE,
    UNASSIGNED,
    Definition,
    decode_definition,
    new_trigger_id,
)
from celery_dtimer.planning import Plan, Skip
from celery_dtimer.policy import Policy
from celery_dtimer.runs import read_letters, requeued
from celery_dtimer.store import (
    IN_FLIGHT,
    Drained,
    DueTimer,
    Heartbeat,
    Link,
    Message,
    Moved,
    Reading,
    Settlement,
    Store,
    UnlinkedError,
    encode_name,
    is_forbidden,
    prelude,
    scripts,
)
from tests.conftest import delete_prefix
from tests.integration.conftest import SECOND, START_MS, MakeService, Service
from tests.waiting import wait_until

OVER = 1  # an epoch that nobody holds
KEEP_MS = 7 * 86_400 * SECOND


# ------------------------------------------------------------------ the files


def test_every_file_is_a_script_of_the_store() -> None:
    folder = resources.files("celery_dtimer") / "lua"
    files = {path.name.removesuffix(".lua") for path in folder.iterdir()}
    assert files == {*scripts(), "prelude"}


@pytest.mark.parametrize("name", scripts())
def test_a_script_says_its_keys_arguments_answer_and_cost(name: str) -> None:
    text = (resources.files("celery_dtimer") / "lua" / f"{name}.lua").read_text()
    header = text[: text.index("\n\n")]
    assert all(line.startswith("--") for line in header.splitlines())
    assert "-- KEYS[1] meta   KEYS[2] never\n" in header
    assert '-- ARGV[1] now or ""' in header
    assert "\n-- Returns " in header
    assert "\n-- Worst case: O(" in header
    named = {int(number) for number in re.findall(r"ARGV\[(\d+)", header)}
    used = {int(number) for number in re.findall(r"ARGV\[(\d+)\]", text[len(header) :])}
    assert used <= named


@pytest.mark.parametrize("name", scripts())
def test_a_script_has_a_test(name: str) -> None:
    names = ("test_scripts.py", "test_run_scripts.py", "test_scrub_scripts.py", "test_sharding.py")
    modules = [Path(__file__).with_name(name) for name in names]
    assert any(f"\ndef test_{name}_" in module.read_text() for module in modules)


# ------------------------------------------------------------------ register


def test_register_answers_an_epoch_the_time_and_the_changes_of_membership(service: Service) -> None:
    answer = service.store.register("a", {"host": "h", "port": 7})
    assert (answer.epoch, answer.now_ms, answer.members) == (START_MS, START_MS, 1)
    (instance,) = service.store.instances()
    assert (instance.id, instance.host, instance.port, instance.status) == ("a", "h", 7, "active")
    assert instance.epoch == answer.epoch


def test_register_grows_the_epoch_even_when_the_clock_goes_back(service: Service) -> None:
    first = service.join("a")
    service.clock.advance(-3600)
    assert service.join("a") == first + 1
    assert service.join("b") == first + 2


def test_register_anew_ends_the_epoch_before_and_keeps_the_timers(service: Service) -> None:
    old = service.join()
    timer = service.add()
    new = service.join()
    assert new > old
    assert service.state(timer.id).owner == "a"
    with pytest.raises(FencedError):
        service.store.due("a", old, Reading(10))
    assert service.store.due("a", new, Reading(10)).timers == []


def test_register_after_silence_gives_the_others_time_to_be_heard(service: Service) -> None:
    service.join("a")
    service.add()
    service.clock.advance(100)
    epoch = service.join("b")
    assert service.store.reap("b", epoch).count == 0
    service.let_pass(10, b=epoch)
    assert service.store.reap("b", epoch).count == 0
    service.let_pass(1, b=epoch)
    assert service.store.reap("b", epoch).reaped == ("a",)


# ------------------------------------------------------------------ heartbeat


def test_heartbeat_answers_the_time_the_members_and_the_next_death(service: Service) -> None:
    a, _ = service.join("a"), service.join("b")
    service.clock.advance(5)
    assert service.store.heartbeat("a", a) == Heartbeat(START_MS + 5000, 2, START_MS + 30_000)


def test_heartbeat_alone_knows_of_no_death(service: Service) -> None:
    assert service.store.heartbeat("a", service.join()).next_expiry_ms is None


def test_heartbeat_says_at_once_that_timers_wait_for_an_owner(service: Service) -> None:
    service.add()
    assert service.store.heartbeat("a", service.join()).next_expiry_ms == 0


@pytest.mark.parametrize("epoch", [OVER, START_MS + 1])
def test_heartbeat_of_another_epoch_is_fenced(service: Service, epoch: int) -> None:
    service.join()
    with pytest.raises(FencedError):
        service.store.heartbeat("a", epoch)


def test_heartbeat_without_the_registration_is_fenced(service: Service) -> None:
    epoch = service.join()
    service.redis.zrem(service.keys("service_instances"), "a")
    with pytest.raises(FencedError):
        service.store.heartbeat("a", epoch)


@pytest.mark.parametrize("seconds", [11, 3600, -11, -3600])
def test_heartbeat_after_silence_of_everybody_reaps_nobody_for_two_intervals(
    service: Service, seconds: float
) -> None:
    a, b = service.join("a"), service.join("b")
    service.clock.advance(seconds)
    service.store.heartbeat("a", a)
    assert service.store.reap("a", a).reaped == ()
    service.let_pass(10, a=a)
    assert service.store.reap("a", a).reaped == ()
    service.store.heartbeat("b", b)
    service.let_pass(30, a=a, b=b)
    assert service.store.reap("a", a).reaped == ()


@pytest.mark.parametrize("seconds", [11, 29, 31, 3600])
def test_heartbeat_after_silence_ends_nobodys_lease_early(service: Service, seconds: float) -> None:
    a, _ = service.join("a"), service.join("b")
    service.clock.advance(seconds)
    expiry_ms = service.store.heartbeat("a", a).next_expiry_ms
    assert expiry_ms == max(START_MS + 30_000, service.clock.now_ms + 10_000)


def test_heartbeat_after_silence_revives_nobody_who_leaves(service: Service) -> None:
    a = service.join("a")
    service.add_many(3)
    service.store.leave("a", a, limit=1)
    service.clock.advance(60)
    b = service.join("b")
    assert service.store.reap("b", b).reaped == ("a",)
    assert service.loads() == {"b": 3}


# ------------------------------------------------------------------ report


def _say(service: Service, **brokers: str) -> None:
    """Let instances say of their broker that it is up or down, or that it is not known."""
    for instance, broker in brokers.items():
        service.store.report(instance, service.epoch(instance), {"broker": broker})


def test_report_writes_the_fields_that_are_given(service: Service) -> None:
    epoch = service.join()
    fields = {"dispatch": "atomic", "dispatch_reason": "one server", "broker": "up"}
    assert service.store._call("report", "a", epoch, "broker", "down") == 1
    service.store.report("a", epoch, fields)
    service.store.report("a", epoch, {"broker": "down"})
    (instance,) = service.store.instances()
    said = (instance.dispatch, instance.dispatch_reason, instance.broker)
    assert said == ("atomic", "one server", "down")
    assert (instance.host, instance.epoch) == ("h", epoch)


def test_report_of_another_epoch_is_fenced(service: Service) -> None:
    service.join()
    with pytest.raises(FencedError):
        service.store.report("a", OVER, {"broker": "up"})
    assert service.store.instances()[0].broker == ""


# ------------------------------------------------------------------ leave


def test_leave_goes_in_batches_soonest_due_first(service: Service) -> None:
    a = service.join("a")
    timers = service.add_many(5)
    service.join("b")
    assert service.store.leave("a", a, limit=2) == Moved(2, more=True)
    assert service.store.owned_ids("b") == [timer.id for timer in timers[:2]]
    assert service.loads() == {"a": 3, "b": 2}
    assert service.store.leave("a", a, limit=3) == Moved(3, more=False)
    assert service.loads() == {"b": 5}


def test_leave_ends_the_registration_and_changes_the_members(service: Service) -> None:
    a = service.join("a")
    before = service.members()
    assert service.store.leave("a", a) == Moved(0, more=False)
    assert service.store.instances() == []
    assert service.members() == before + 1
    with pytest.raises(FencedError):
        service.store.leave("a", a)


def test_leave_of_the_last_leaves_its_timers_to_nobody(service: Service) -> None:
    a = service.join("a")
    timer = service.add()
    service.store.leave("a", a)
    assert service.state(timer.id).owner == UNASSIGNED
    b = service.join("b")
    assert service.store.reap("b", b).count == 1
    assert service.state(timer.id).owner == "b"


def test_leave_that_is_not_finished_is_a_death_at_once(service: Service) -> None:
    a = service.join("a")
    service.add_many(5)
    b = service.join("b")
    service.store.leave("a", a, limit=2)
    assert (service.store.heartbeat("b", b).next_expiry_ms or 0) <= service.clock.now_ms
    assert service.store.reap("b", b).reaped == ("a",)
    assert service.loads() == {"b": 5}


def test_leave_of_another_epoch_is_fenced(service: Service) -> None:
    service.join()
    with pytest.raises(FencedError):
        service.store.leave("a", OVER)
    assert service.store.instances()[0].status == "active"


# ------------------------------------------------------------------ placement


def test_a_new_timer_goes_to_the_instance_with_the_fewest(service: Service) -> None:
    service.join("a")
    service.add_many(2, "first")
    service.join("b")
    service.add_many(4, "then")
    assert service.loads() == {"a": 3, "b": 3}


def test_a_new_timer_goes_to_one_heard_lately_else_to_any_that_lives(service: Service) -> None:
    a, _ = service.join("a"), service.join("b")
    service.let_pass(11, a=a)
    assert service.state(service.add("fresh").id).owner == "a"
    assert service.state(service.add("fresh too").id).owner == "a"
    service.clock.advance(11)
    assert service.state(service.add("late").id).owner == "b"


def test_a_new_timer_waits_when_nobody_lives(service: Service) -> None:
    service.join("a")
    service.clock.advance(31)
    assert service.state(service.add().id).owner == UNASSIGNED


def test_a_new_timer_is_not_given_to_one_who_leaves(service: Service) -> None:
    a = service.join("a")
    service.add_many(2)
    service.store.leave("a", a, limit=1)
    assert service.state(service.add("late").id).owner == UNASSIGNED


def test_a_new_timer_is_not_given_to_one_whose_broker_is_down(service: Service) -> None:
    service.join("a")
    service.add_many(3)
    service.join("b")
    _say(service, a="", b="down")
    service.add_many(2, "then")
    assert service.loads() == {"a": 5, "b": 0}


def test_a_new_timer_goes_to_one_without_a_broker_when_nobody_has_one(service: Service) -> None:
    service.join("a")
    service.add_many(3)
    service.join("b")
    _say(service, a="down", b="down")
    service.add_many(3, "then")
    assert service.loads() == {"a": 3, "b": 3}


def test_a_new_timer_goes_to_one_with_a_broker_though_its_heartbeat_is_late(
    service: Service,
) -> None:
    service.join("a")
    b = service.join("b")
    _say(service, a="up", b="down")
    service.let_pass(11, b=b)
    assert service.state(service.add("one").id).owner == "a"
    service.let_pass(20, b=b)
    assert service.state(service.add("two").id).owner == "b"


@pytest.mark.parametrize("how", ["resume", "trigger", "leave", "reap"])
def test_no_timer_moves_to_one_whose_broker_is_down(service: Service, how: str) -> None:
    a = service.join("a")
    timers = service.add_many(4, every=3600)
    b, c = service.join("b"), service.join("c")
    _say(service, a="up", b="down", c="")
    if how == "resume":
        service.store.pause(timers[0].id)
        service.resume(timers[0], START_MS)
        expected = {"a": 3, "b": 0, "c": 1}
    elif how == "trigger":
        service.trigger(timers[0])
        expected = {"a": 4, "b": 0, "c": 1}
    elif how == "leave":
        service.store.leave("a", a)
        expected = {"b": 0, "c": 4}
    else:
        service.let_pass(31, b=b, c=c)
        service.store.reap("b", b)
        expected = {"b": 0, "c": 4}
    assert service.loads() == expected


# ------------------------------------------------------------------ reap


def test_reap_moves_the_timers_of_the_dead_soonest_due_first_in_batches(service: Service) -> None:
    a = service.join("a")
    timers = [timer.id for timer in service.add_many(5)]
    b = service.join("b")
    service.let_pass(31, b=b)
    moved = service.store.reap("b", b, limit=2)
    assert (moved.count, moved.more, moved.reaped) == (2, True, ())
    assert service.store.owned_ids("b") == timers[:2]
    moved = service.store.reap("b", b, limit=3)
    assert (moved.count, moved.more, moved.reaped) == (3, False, ("a",))
    assert moved.silent_ms == (31_000,), "since its last heartbeat"
    assert moved.next_expiry_ms is None
    with pytest.raises(FencedError):
        service.store.heartbeat("a", a)


def test_reap_spreads_over_all_who_live(service: Service) -> None:
    service.join("a")
    service.add_many(9)
    b, c = service.join("b"), service.join("c")
    service.let_pass(31, b=b, c=c)
    service.store.reap("b", b)
    assert sorted(service.loads().values()) == [4, 5]


def test_reap_forgets_the_dead_who_own_nothing(service: Service) -> None:
    service.join("a")
    b = service.join("b")
    service.let_pass(31, b=b)
    assert service.store.reap("b", b) == Moved(reaped=("a",), silent_ms=(31_000,))
    assert service.redis.exists(service.keys("instance", "a")) == 0


def test_reap_spares_who_was_heard_within_the_timeout(service: Service) -> None:
    service.join("a")
    service.add()
    b = service.join("b")
    service.let_pass(30, b=b)
    assert service.store.reap("b", b) == Moved(next_expiry_ms=START_MS + 30_000)


def test_reap_goes_by_each_instances_own_timeout(
    service: Service, make_service: type[Service]
) -> None:
    quick = make_service(heartbeat_interval=1, check_interval=1, instance_timeout=3)
    quick.clock = quick.store._clock = service.clock
    quick.join("quick")
    b = service.join("b")
    service.let_pass(4, b=b)
    assert service.store.reap("b", b).reaped == ("quick",)


def test_reap_never_reaps_its_caller(service: Service) -> None:
    a = service.join("a")
    service.add()
    b = service.join("b")
    service.let_pass(31, b=b)
    assert service.store.reap("a", a).reaped == ()


def test_reap_of_another_epoch_is_fenced(service: Service) -> None:
    service.join()
    with pytest.raises(FencedError):
        service.store.reap("a", OVER)


def test_reap_by_a_second_mover_is_busy_for_a_second(service: Service) -> None:
    service.join("a")
    service.add_many(3)
    b, c = service.join("b"), service.join("c")
    service.let_pass(31, b=b, c=c)
    assert service.store.reap("b", b, limit=1).more
    assert service.store.reap("c", c).busy
    assert service.store.rebalance("c", c).busy
    assert not service.store.reap("b", b, limit=1).busy
    service.clock.advance(1)
    assert service.store.reap("c", c).reaped == ("a",)


def test_reap_frees_the_mover_when_it_is_done(service: Service) -> None:
    service.join("a")
    service.add_many(3)
    b, c = service.join("b"), service.join("c")
    service.let_pass(31, b=b, c=c)
    assert service.store.reap("b", b, limit=1).more
    assert not service.store.reap("b", b).more
    assert not service.store.reap("c", c).busy


def test_reap_waits_for_no_mover_of_a_time_to_come(service: Service) -> None:
    """The clock went back while a mover held the lock: a dead one's would last for an hour."""
    service.join("a")
    service.add_many(2)
    b, c = service.join("b"), service.join("c")
    service.let_pass(31, b=b, c=c)
    assert service.store.reap("b", b, limit=1).more
    service.clock.advance(-3600)
    assert not service.store.reap("c", c).busy


def test_reap_drops_what_is_no_timer(service: Service) -> None:
    service.join("a")
    timers = service.add_many(3)
    service.redis.delete(service.keys("timer", timers[0].id))
    service.redis.set(service.keys("timer", timers[1].id), "nonsense")
    b = service.join("b")
    service.let_pass(31, b=b)
    service.store.reap("b", b)
    assert service.store.owned_ids("b") == [timers[2].id]
    assert set(service.store.scores("timer_queue")) == {timers[2].id}
    assert not service.exists(timers[0].id)
    assert service.state(timers[1].id).reason == "damaged: its state was a string"


def test_reap_takes_an_instance_whose_hash_is_gone_for_one_with_default_times(
    service: Service,
) -> None:
    service.join("a")
    service.add()
    b = service.join("b")
    service.redis.delete(service.keys("instance", "a"))
    service.let_pass(31, b=b)
    assert service.store.reap("b", b).reaped == ("a",)
    assert service.loads() == {"b": 1}


# ------------------------------------------------------------------ rebalance


def _rebalance(service: Service, instance: str, epoch: int, limit: int = 200) -> int:
    moved_in_all = 0
    while (moved := service.store.rebalance(instance, epoch, 0, limit)).count:
        moved_in_all += moved.count
    assert moved == Moved()
    return moved_in_all


@pytest.mark.parametrize(("timers", "instances"), [(10, 2), (10, 3), (11, 4), (3, 5), (0, 3)])
@pytest.mark.parametrize("limit", [1, 3, 200])
def test_rebalance_ends_within_one_and_moves_only_the_surplus(
    service: Service, timers: int, instances: int, limit: int
) -> None:
    epoch = service.join("i0")
    service.add_many(timers)
    for i in range(1, instances):
        service.join(f"i{i}")
    before = service.loads()
    moved = _rebalance(service, "i0", epoch, limit=limit)
    loads = service.loads()
    assert max(loads.values()) - min(loads.values()) <= 1
    assert moved == sum(max(0, before[id] - loads[id]) for id in loads)
    assert moved == before["i0"] - loads["i0"]
    assert loads["i0"] == -(-timers // instances)
    assert _rebalance(service, "i0", epoch) == 0


def test_rebalance_takes_the_latest_due_first(service: Service) -> None:
    a = service.join("a")
    timers = service.add_many(4)
    service.join("b")
    assert service.store.rebalance("a", a) == Moved(2)
    assert service.store.owned_ids("b") == [timer.id for timer in timers[2:]]


def test_rebalance_says_that_more_is_to_be_done_and_holds_the_mover(service: Service) -> None:
    a = service.join("a")
    service.add_many(10)
    b = service.join("b")
    assert service.store.rebalance("a", a, 0, 2) == Moved(2, more=True)
    assert service.store.rebalance("b", b).busy
    assert service.store.rebalance("a", a) == Moved(3)
    assert service.store.rebalance("b", b) == Moved()


def test_rebalance_leaves_what_is_imminent_for_the_next_pass(service: Service) -> None:
    a = service.join("a")
    service.add_many(2, every=10)
    b = service.join("b")
    service.clock.advance(9.99)
    service.store.heartbeat("b", b)
    service.store.heartbeat("a", a)
    assert service.store.rebalance("a", a) == Moved(0, more=True)
    service.clock.advance(-0.5)
    assert service.store.rebalance("a", a) == Moved(1)


def test_rebalance_gives_nothing_to_an_instance_that_lags(service: Service) -> None:
    """It may be frozen: what was taken over from it would come back and be late again."""
    b = service.join("b")
    soon = service.add("soon", every=3)
    a = service.join("a")
    service.add_many(8, every=30)
    service.store.delete([id for id in service.store.owned_ids("b") if id != soon.id])
    before = service.loads()
    assert before["b"] == 1 < before["a"] - 1
    service.clock.advance(5.001)
    assert service.store.rebalance("a", a) == Moved()
    assert service.loads() == before
    service.commit("b", b, service.ran(service.due_one("b", b)))
    assert service.store.rebalance("a", a).count > 0


def test_rebalance_leaves_drift_alone_up_to_its_share(service: Service) -> None:
    a = service.join("a")
    service.add_many(22)
    service.join("b")
    _rebalance(service, "a", a)
    service.store.delete(service.store.owned_ids("b")[:1])
    assert service.loads() == {"a": 11, "b": 10}
    assert service.store.rebalance("a", a, 10) == Moved()
    service.store.delete(service.store.owned_ids("b")[:1])
    assert service.loads() == {"a": 11, "b": 9}
    assert service.store.rebalance("a", a, 10) == Moved(1)


def test_rebalance_of_one_alone_moves_nothing(service: Service) -> None:
    a = service.join("a")
    service.add_many(3)
    assert service.store.rebalance("a", a) == Moved()


def test_rebalance_of_another_epoch_is_fenced(service: Service) -> None:
    service.join()
    with pytest.raises(FencedError):
        service.store.rebalance("a", OVER)


def test_rebalance_counts_only_those_whose_broker_is_not_down(service: Service) -> None:
    a = service.join("a")
    service.add_many(8)
    service.join("b")
    assert _rebalance(service, "a", a) == 4
    service.join("c")
    _say(service, a="up", b="down", c="up")
    assert _rebalance(service, "a", a) == 2
    assert service.loads() == {"a": 2, "b": 4, "c": 2}
    _say(service, a="up", b="up", c="up")
    service.add_many(4, "more")
    _rebalance(service, "a", a)
    assert service.loads() == {"a": 4, "b": 4, "c": 4}


# ------------------------------------------------------------------ give_up


def _share(service: Service, timers: int, *instances: str) -> list[int]:
    """Register instances that own the same number of timers; return their epochs."""
    epochs = [service.join(instance) for instance in instances]
    service.add_many(timers, every=3600)
    return epochs


def test_give_up_goes_in_batches_soonest_due_first(service: Service) -> None:
    a, _ = _share(service, 10, "a", "b")
    _say(service, a="down", b="up")
    owned = service.store.owned_ids("a")
    assert service.store.give_up("a", a, limit=2) == Moved(2, more=True)
    assert service.store.owned_ids("a") == owned[2:]
    assert service.loads() == {"a": 3, "b": 7}
    assert service.store.give_up("a", a) == Moved(3)
    assert service.loads() == {"a": 0, "b": 10}
    assert service.store.give_up("a", a) == Moved()


def test_give_up_spreads_over_those_whose_broker_works(service: Service) -> None:
    a, *_ = _share(service, 20, "a", "b", "c", "d", "e")
    _say(service, a="down", b="up", c="down", d="", e="up")
    assert service.store.give_up("a", a) == Moved(4)
    assert service.loads() == {"a": 0, "b": 6, "c": 4, "d": 4, "e": 6}


def test_give_up_gives_nothing_back_to_the_caller(service: Service) -> None:
    a, _ = _share(service, 4, "a", "b")
    _say(service, a="up", b="up")
    assert service.store.give_up("a", a) == Moved(2)
    assert service.loads() == {"a": 0, "b": 4}


@pytest.mark.parametrize("broker", ["down", ""])
def test_give_up_moves_nothing_while_no_other_broker_works(service: Service, broker: str) -> None:
    a, _ = _share(service, 4, "a", "b")
    _say(service, a="down", b=broker)
    assert service.store.give_up("a", a) == Moved()
    assert service.loads() == {"a": 2, "b": 2}


@pytest.mark.parametrize("state", ["dead", "leaving", "gone"])
def test_give_up_moves_nothing_to_one_who_is_not_there(service: Service, state: str) -> None:
    a, b = _share(service, 4, "a", "b")
    _say(service, a="down", b="up")
    if state == "dead":
        service.let_pass(31, a=a)
    else:
        service.store.leave("b", b, limit=1 if state == "leaving" else 2)
    before = service.loads()
    assert service.store.give_up("a", a) == Moved()
    assert service.loads() == before


def test_give_up_keeps_the_registration(service: Service) -> None:
    a, _ = _share(service, 4, "a", "b")
    _say(service, a="down", b="up")
    service.store.give_up("a", a)
    assert service.store.heartbeat("a", a).now_ms == START_MS
    assert service.epoch("a") == a


def test_give_up_by_a_second_mover_is_busy_until_the_first_is_done(service: Service) -> None:
    a, b, _ = _share(service, 9, "a", "b", "c")
    _say(service, a="down", b="down", c="up")
    assert service.store.give_up("a", a, limit=1).more
    assert service.store.give_up("b", b) == Moved(busy=True)
    assert service.store.reap("b", b).busy
    assert service.store.give_up("a", a) == Moved(2)
    assert service.store.give_up("b", b) == Moved(3)


def test_give_up_drops_what_is_no_timer(service: Service) -> None:
    a, _ = _share(service, 4, "a", "b")
    _say(service, a="down", b="up")
    gone, kept = service.store.owned_ids("a")
    service.redis.delete(service.keys("timer", gone))
    assert service.store.give_up("a", a) == Moved(2)
    assert kept in service.store.owned_ids("b")
    assert not service.exists(gone)


def test_give_up_of_another_epoch_is_fenced(service: Service) -> None:
    service.join()
    with pytest.raises(FencedError):
        service.store.give_up("a", OVER)


# ------------------------------------------------------------------ drain, undrain


def test_drain_goes_in_batches_soonest_due_first(service: Service) -> None:
    _share(service, 10, "a", "b")
    owned = service.store.owned_ids("a")
    assert service.store.drain("a", limit=2) == Drained(2, 3)
    assert service.store.owned_ids("a") == owned[2:]
    assert service.store.drain("a") == Drained(3, 0)
    assert service.loads() == {"a": 0, "b": 10}
    assert service.store.drain("a") == Drained()


def test_drain_keeps_the_registration_and_says_so(service: Service) -> None:
    a, _ = _share(service, 4, "a", "b")
    service.store.drain("a")
    assert service.store.heartbeat("a", a).now_ms == START_MS
    (status,) = [each.status for each in service.store.instances() if each.id == "a"]
    assert status == "draining"


def test_drain_of_nobody_says_so(service: Service) -> None:
    service.join("b")
    assert service.store.drain("a") == Drained(is_unknown=True)
    assert not service.redis.exists(service.keys("instance", "a"))


@pytest.mark.parametrize("state", ["alone", "down", "dead", "leaving", "draining"])
def test_drain_without_one_to_take_the_timers_changes_nothing(service: Service, state: str) -> None:
    a = service.join("a")
    if state != "alone":
        b = service.join("b")
    if state == "draining":
        service.store.drain("b")
    service.add_many(4, every=3600)
    if state == "down":
        _say(service, a="up", b="down")
    elif state == "dead":
        service.let_pass(31, a=a)
    elif state == "leaving":
        service.store.leave("b", b, limit=1)
    before = service.loads(), service.redis.hgetall(service.keys("instance", "a"))
    assert service.store.drain("a") == Drained(is_alone=True)
    assert (service.loads(), service.redis.hgetall(service.keys("instance", "a"))) == before


def test_drain_leaves_what_is_in_flight_until_its_owner_is_done(service: Service) -> None:
    _share(service, 6, "a", "b")
    first, *_ = service.store.owned_ids("a")
    _in_flight(service, "a", first)
    assert service.store.drain("a") == Drained(2, 1)
    assert service.store.owned_ids("a") == [first]
    assert service.store.drain("a") == Drained(0, 1)
    _in_flight(service, "a")
    assert service.store.drain("a") == Drained(1, 0)


def test_drain_takes_what_a_dead_instance_had_in_flight(service: Service) -> None:
    _, b = _share(service, 6, "a", "b")
    _in_flight(service, "a", *service.store.owned_ids("a"))
    service.let_pass(31, b=b)
    assert service.store.drain("a") == Drained(3, 0)


def test_drain_waits_for_a_mover_and_holds_it(service: Service) -> None:
    a, b, c = _share(service, 9, "a", "b", "c")
    _say(service, a="down", b="up", c="up")
    assert service.store.give_up("a", a, limit=1).more
    assert service.store.drain("b") == Drained(0, 1)
    service.store.give_up("a", a)
    assert service.store.drain("b", limit=1).count == 1
    assert service.store.rebalance("c", c).busy
    assert service.store.drain("b").left == 0
    assert not service.store.rebalance("c", c).busy
    assert b


def test_drain_leaves_a_leaving_instance_leaving(service: Service) -> None:
    a, _ = _share(service, 6, "a", "b")
    service.store.leave("a", a, limit=1)
    assert service.store.drain("a") == Drained(2, 0)
    assert service.redis.hget(service.keys("instance", "a"), "status") == "leaving"


@pytest.mark.parametrize(
    "how", ["create", "resume", "trigger", "hold", "reap", "rebalance", "leave", "give_up", "lacks"]
)
def test_drain_keeps_timers_from_being_given_to_the_instance(service: Service, how: str) -> None:
    paused = service.add("paused")
    service.store.pause(paused.id)
    a, b, c = (service.join(each) for each in ("a", "b", "c"))
    assert service.store.drain("a").left == 0
    service.add_many(6, every=3600)
    if how == "create":
        service.add_many(6, "more")
    elif how == "resume":
        assert service.resume(paused, START_MS + 10_000) == 1
    elif how == "trigger":
        service.trigger(paused)
    elif how == "hold":
        definition = service.define("call", message={"args": []})
        service.store.hold(definition, delay_ms=1000)
    elif how == "reap":
        service.let_pass(31, a=a, b=b)
        service.store.reap("a", a)
    elif how == "rebalance":
        service.store.rebalance("a", a)
    elif how == "leave":
        service.store.leave("c", c)
    elif how == "give_up":
        _say(service, a="up", b="up", c="down")
        assert service.store.give_up("c", c).count == 3
    else:
        service.clock.advance(3601)
        service.let_pass(1, a=a, b=b, c=c)
        (timer, *_) = service.due("b", b)
        lacking = Settlement(timer, "lacking", delay_ms=10)
        assert service.commit("b", b, lacking) == [1]
    assert service.loads()["a"] == 0


def test_drain_ends_with_the_next_registration(service: Service) -> None:
    _share(service, 4, "a", "b")
    service.store.drain("a")
    service.join("a")
    service.add_many(2, "more")
    assert service.loads() == {"a": 2, "b": 4}


def test_drain_has_the_last_one_alive_get_timers_rather_than_nobody(service: Service) -> None:
    a, _ = _share(service, 4, "a", "b")
    service.store.drain("a")
    service.let_pass(31, a=a)
    service.add("new")
    assert service.store.reap("a", a).count == 4
    assert service.loads() == {"a": 5}
    c = service.join("c")
    assert service.store.rebalance("c", c, 10) == Moved(5)
    assert service.loads() == {"a": 0, "c": 5}


def test_drain_lets_the_instance_help_nobody(service: Service) -> None:
    b, _ = _fall_behind(service, 5)
    service.store.heartbeat("b", b)
    service.join("c")
    assert service.store.drain("b").left == 0
    assert service.store.steal("b", b, LAG_MS) == Moved()


def test_drain_keeps_the_declaration_of_the_instance_in_force(service: Service) -> None:
    a, b = service.join("a"), service.join("b")
    assert service.store.declare("b", b, "app", "old", [])
    service.clock.advance(1)
    assert service.store.declare("a", a, "app", "new", [])
    service.store.drain("a")
    assert not service.store.declare("b", b, "app", "old", [])


def test_undrain_lets_an_instance_have_its_share_again(service: Service) -> None:
    _, b = _share(service, 4, "a", "b")
    service.store.drain("a")
    assert service.store.undrain("a") == 1
    assert service.store.rebalance("b", b, 10) == Moved(2)
    assert service.loads() == {"a": 2, "b": 2}


def test_undrain_of_who_is_not_drained_or_not_there_changes_nothing(service: Service) -> None:
    a, _ = _share(service, 4, "a", "b")
    assert service.store.undrain("a") == 2
    assert service.store.undrain("c") == 0
    service.store.leave("a", a, limit=1)
    assert service.store.undrain("a") == 2
    assert service.redis.hget(service.keys("instance", "a"), "status") == "leaving"


def test_rebalance_spreads_what_drained_instances_have_over_the_others(service: Service) -> None:
    a, b, _ = _share(service, 9, "a", "b", "c")
    service.redis.hset(service.keys("instance", "a"), "status", "draining")
    assert service.store.rebalance("b", b, 10) == Moved(3)
    assert sorted(service.loads().values()) == [0, 4, 5]
    assert a


def test_rebalance_leaves_timers_with_a_drained_one_while_no_other_broker_works(
    service: Service,
) -> None:
    _, b = _share(service, 4, "a", "b")
    service.redis.hset(service.keys("instance", "a"), "status", "draining")
    _say(service, a="up", b="down")
    assert service.store.rebalance("b", b, 10) == Moved()


# ------------------------------------------------------------------ steal

LAG_MS = 500


def _fall_behind(service: Service, timers: int, seconds: float = 20.0) -> tuple[int, list[str]]:
    """Let `a` own so many timers that were due, a millisecond apart, and `b` be idle.

    Returns:
        The epoch of `b`, and the ids of the timers, soonest due first.
    """
    service.join("a")
    ids = [timer.id for timer in service.add_many(timers)]
    b = service.join("b")
    service.clock.advance(seconds)
    return b, ids


def _in_flight(service: Service, instance: str, *ids: str) -> None:
    service.redis.hset(service.keys("instance", instance), "in_flight", " ".join(ids))


def test_steal_takes_half_of_what_is_overdue_soonest_due_first(service: Service) -> None:
    b, ids = _fall_behind(service, 5)
    assert service.store.steal("b", b, LAG_MS) == Moved(3, more=True)
    assert service.store.owned_ids("b") == ids[:3]
    assert [service.state(id).owner for id in ids] == ["b"] * 3 + ["a"] * 2
    assert service.store.steal("b", b, LAG_MS) == Moved(1, more=True)
    assert service.store.steal("b", b, LAG_MS) == Moved(1)
    assert service.store.steal("b", b, LAG_MS) == Moved()
    assert service.loads() == {"a": 0, "b": 5}


def test_steal_takes_at_most_its_limit(service: Service) -> None:
    b, ids = _fall_behind(service, 9)
    assert service.store.steal("b", b, LAG_MS, 2) == Moved(2, more=True)
    assert service.store.owned_ids("b") == ids[:2]


def test_steal_leaves_what_is_late_by_less(service: Service) -> None:
    """The timers are due at 10,000 ms and each millisecond after it."""
    b, ids = _fall_behind(service, 10, seconds=10 + LAG_MS / SECOND - 0.001)
    assert service.store.steal("b", b, LAG_MS) == Moved()
    service.clock.advance(0.001)
    assert service.store.steal("b", b, LAG_MS) == Moved(1)
    service.clock.advance(0.003)
    assert service.store.steal("b", b, LAG_MS) == Moved(2, more=True)
    assert service.store.owned_ids("b") == ids[:3]


def test_steal_of_nothing_that_lags_moves_nothing(service: Service) -> None:
    b, _ = _fall_behind(service, 5, seconds=0)
    assert service.store.steal("b", b, LAG_MS) == Moved()
    service.clock.advance(20)
    a = service.epoch("a")
    assert service.store.steal("a", a, LAG_MS) == Moved(), "nobody else has any"


def test_steal_helps_the_most_overdue_and_says_that_others_lag_too(service: Service) -> None:
    service.join("a")
    service.add("of a", every=11)
    service.join("b")
    service.add("of b", every=10)
    c = service.join("c")
    service.clock.advance(20)
    assert service.store.steal("c", c, LAG_MS) == Moved(1, more=True)
    assert service.loads() == {"a": 1, "b": 0, "c": 1}
    assert service.store.steal("c", c, LAG_MS) == Moved(1)


def test_steal_says_nothing_of_others_that_are_on_time(service: Service) -> None:
    service.join("a")
    service.add("of a", every=10)
    service.join("b")
    service.add("of b", every=20)
    c = service.join("c")
    service.clock.advance(20)
    assert service.store.steal("c", c, LAG_MS) == Moved(1)


def test_steal_leaves_what_is_in_flight(service: Service) -> None:
    b, ids = _fall_behind(service, 6)
    _in_flight(service, "a", *ids[:2])
    assert service.store.steal("b", b, LAG_MS) == Moved(3, more=True)
    assert service.store.owned_ids("b") == ids[2:5]
    assert service.store.steal("b", b, LAG_MS) == Moved(1)
    assert service.store.steal("b", b, LAG_MS) == Moved()
    assert service.store.owned_ids("a") == ids[:2]
    _in_flight(service, "a")
    assert service.store.steal("b", b, LAG_MS) == Moved(1, more=True)


def test_steal_helps_the_next_where_all_is_in_flight(service: Service) -> None:
    service.join("a")
    first = service.add("of a", every=10)
    service.join("b")
    second = service.add("of b", every=11)
    c = service.join("c")
    service.clock.advance(20)
    _in_flight(service, "a", first.id)
    assert service.store.steal("c", c, LAG_MS) == Moved(1)
    assert service.store.owned_ids("c") == [second.id]
    assert service.store.steal("c", c, LAG_MS) == Moved()


def test_steal_takes_nothing_of_nobody(service: Service) -> None:
    service.add()
    b = service.join("b")
    service.clock.advance(20)
    assert service.store.steal("b", b, LAG_MS) == Moved()
    assert service.store.reap("b", b).count == 1


def test_steal_for_one_whose_broker_is_down_takes_nothing(service: Service) -> None:
    b, _ = _fall_behind(service, 4)
    _say(service, b="down")
    assert service.store.steal("b", b, LAG_MS) == Moved()
    _say(service, a="down", b="up")
    assert service.store.steal("b", b, LAG_MS) == Moved(2, more=True)


def test_steal_for_one_who_leaves_takes_nothing(service: Service) -> None:
    b, _ = _fall_behind(service, 4)
    service.add_many(6, "far", every=3600)
    service.store.heartbeat("b", b)
    service.store.leave("b", b, limit=1)
    before = service.loads()
    assert service.store.steal("b", b, LAG_MS) == Moved()
    assert service.loads() == before


def test_steal_waits_for_a_mover_and_holds_none(service: Service) -> None:
    b, _ = _fall_behind(service, 8)
    mover = {"mover": "c", "mover_until": service.clock.now_ms + 1000}
    service.redis.hset(service.keys("meta"), mapping=mover)
    assert service.store.steal("b", b, LAG_MS) == Moved(busy=True)
    service.clock.advance(1)
    c = service.join("c")
    assert service.store.steal("b", b, LAG_MS).more
    assert service.store.steal("c", c, LAG_MS) == Moved(2, more=True)


def test_steal_drops_what_is_no_timer_and_what_is_not_active(service: Service) -> None:
    b, ids = _fall_behind(service, 6)
    service.redis.delete(service.keys("timer", ids[0]))
    service.store.pause(ids[1])
    for key in (service.keys("timer_queue"), service.keys("instance_timers", "a")):
        service.redis.zadd(key, {ids[1]: START_MS + 10_001})
    assert service.store.steal("b", b, LAG_MS) == Moved(3, more=True)
    assert service.store.owned_ids("b") == [ids[2]]
    assert service.state(ids[1]).status == "paused"
    assert not service.exists(ids[0])


def test_steal_settles_whose_a_timer_is(service: Service) -> None:
    b, ids = _fall_behind(service, 1)
    service.set_field(ids[0], "owner", "nobody")
    assert service.store.steal("b", b, LAG_MS) == Moved(1)
    assert service.state(ids[0]).owner == "b"


def test_steal_lets_the_owner_before_commit_nothing(service: Service) -> None:
    b, ids = _fall_behind(service, 1)
    a = service.epoch("a")
    due = service.due_one("a", a)
    assert service.store.steal("b", b, LAG_MS) == Moved(1)
    assert service.commit("a", a, service.ran(due)) == [0]
    again = service.due_one("b", b)
    assert (again.id, again.due) == (ids[0], due.due)


def _most_lagging(service: Service, instance: str) -> object:
    keys = (service.keys("meta"), service.keys("never"))
    text = f"{prelude()}\nreturn most_lagging(ARGV[2]) or 'nobody'"
    return service.redis.eval(text, 2, *keys, "", instance)


def test_steal_is_worth_a_call_when_the_first_timer_of_another_is_late(service: Service) -> None:
    service.add("of nobody", every=1)
    for instance, every in (("a", 12), ("b", 11), ("c", 10)):
        service.join(instance)
        service.add(f"of {instance}", every=every)
    assert _most_lagging(service, "a") == START_MS + 10_000
    assert _most_lagging(service, "c") == START_MS + 11_000
    service.store.delete([service.define(f"of {name}").id for name in "ab"])
    assert _most_lagging(service, "c") == "nobody"


def test_steal_of_another_epoch_is_fenced(service: Service) -> None:
    service.join()
    with pytest.raises(FencedError):
        service.store.steal("a", OVER, LAG_MS)


# ------------------------------------------------------------------ rezoned


def test_rezoned_notes_the_zone_of_a_source(service: Service) -> None:
    epoch = service.join()
    assert service.store.timezone_of("a.b") is None
    service.store.note_timezone("a", epoch, "a.b", "Asia/Tokyo")
    service.store.note_timezone("a", epoch, "other", "UTC")
    assert service.store.timezone_of("a.b") == "Asia/Tokyo"


def test_rezoned_of_another_epoch_is_fenced(service: Service) -> None:
    service.join()
    with pytest.raises(FencedError):
        service.store.note_timezone("a", OVER, "orders", "Asia/Tokyo")
    assert service.store.timezone_of("orders") is None


# ------------------------------------------------------------------ upsert


Row = tuple[str, str, str, str, str, object, str, str]


KEPT = "60000 100 -"  # ms of a timer that has ended, entries of the history, most timers


def _upsert_all(
    service: Service,
    *rows: Row,
    source: str = "",
    jitter: int = 0,
    anew: int = 0,
    given_up: str = "-",
) -> list[Any]:
    """Write timers as they are to be after how they were read; return what the script answers."""
    arguments = []
    for id, read_revision, read_status, revision, status, due, reason, blob in rows:
        arguments.append(f"{id} {revision} {status} {due} {jitter} {anew} {given_up} {reason}")
        arguments.append(f"{read_revision} {read_status}" if read_revision else "")
        arguments.append(blob)
    return list(service.store._call("upsert", source, KEPT, *arguments))


def _upsert(service: Service, *row: Any) -> list[Any]:
    return _upsert_all(service, row)


WRITTEN = [START_MS]


def test_upsert_creates_an_active_timer(service: Service) -> None:
    service.join()
    timer = service.add()
    state = service.state(timer.id)
    assert (state.status, state.revision, state.owner) == ("active", timer.revision, "a")
    assert state.created_ms == START_MS
    assert state.due_ms == state.at_ms == START_MS + 10_000
    assert service.store.definitions([timer.id]) == [timer.blob]


def _fill(service: Service, most: int, *names: str) -> Any:
    """Return what the script answers to new timers of these names, so many in all at most."""
    arguments = []
    for name in names:
        timer = service.define(name)
        arguments += [f"{timer.id} {timer.revision} active +1000 0 0 - ", "", timer.blob]
    return service.store._call("upsert", "", f"60000 100 {most}", *arguments)


def test_upsert_notes_in_which_trace_a_timer_was_written(service: Service) -> None:
    timer, tracer = service.define(), "00-" + "a" * 32 + "-" + "b" * 16 + "-01"

    def upsert(read: str, revision: str, trace: str) -> Any:
        arguments = (f"{timer.id} {revision} active +1000 0 0 - ", read, timer.blob)
        return service.store._call("upsert", "", f"60000 100 - {trace}", *arguments)

    assert service.store.traceparents([timer.id]) == [""]
    assert upsert("", timer.revision, tracer) == WRITTEN
    assert service.store.traceparents([timer.id, "gone"]) == [tracer, ""]
    upsert("", timer.revision, tracer.replace("a", "c"))
    assert service.store.traceparents([timer.id]) == [tracer], "it was not written"
    assert upsert(f"{timer.revision} active", "another", "") == WRITTEN
    assert service.store.traceparents([timer.id]) == [tracer], "its creator stays"
    assert upsert("another active", timer.revision, tracer.replace("a", "c")) == WRITTEN
    assert service.store.traceparents([timer.id]) == [tracer.replace("a", "c")]


def test_upsert_writes_nothing_when_there_would_be_too_many(service: Service) -> None:
    service.join()
    paused, _ = service.add("paused"), service.add("active")
    service.store.pause(paused.id)
    assert _fill(service, 3, "a", "b") == -4
    assert not service.exists(service.define("a").id)
    assert _fill(service, 3, "a") == WRITTEN
    assert _fill(service, 3, "b") == -4
    service.store.delete([paused.id])
    assert _fill(service, 3, "b") == WRITTEN


def test_upsert_changes_what_is_there_however_many_there_are(make_service: MakeService) -> None:
    service = make_service(max_timers=1)
    service.join()
    timer = service.add()
    assert service.store.save([replace(timer, args=["changed"])]) == 1
    with pytest.raises(TooManyTimersError, match="dtimer_max_timers=1"):
        service.store.save([replace(timer, args=["again"]), service.define("another")])
    assert decode_definition(service.store.definitions([timer.id])[0] or "").args == ["changed"]


def test_upsert_answers_the_time_and_keeps_the_creation(service: Service) -> None:
    timer = service.define()
    row = (timer.revision, "active", START_MS + 99, "", timer.blob)
    assert _upsert(service, timer.id, "", "", *row) == [START_MS]
    service.clock.advance(5)
    assert _upsert(service, timer.id, timer.revision, "active", *row) == [START_MS + 5_000]
    assert service.state(timer.id).created_ms == START_MS
    assert service.state(timer.id).due_ms == START_MS + 99


def test_upsert_counts_a_delay_from_the_servers_time(service: Service) -> None:
    timer = service.define()
    row = (timer.revision, "active", "+1500", "", timer.blob)
    assert _upsert(service, timer.id, "", "", *row) == WRITTEN
    state = service.state(timer.id)
    assert (state.due_ms, state.at_ms) == (START_MS + 1500, START_MS + 1500)


@pytest.mark.parametrize(
    ("revision", "status"), [("", ""), ("another", "active"), ("right", "paused")]
)
def test_upsert_of_a_timer_that_is_not_as_it_was_read_writes_nothing(
    service: Service, revision: str, status: str
) -> None:
    timer = service.add()
    before = service.state(timer.id)
    read = timer.revision if revision == "right" else revision
    row = ("new", "active", START_MS, "", "{}")
    now_ms, place, found = _upsert(service, timer.id, read, status, *row)
    assert (now_ms, place) == (START_MS, 0)
    assert dict(zip(found[::2], found[1::2], strict=True)) == service.redis.hgetall(
        service.keys("timer", timer.id)
    )
    assert service.state(timer.id) == before
    assert service.store.definitions([timer.id]) == [timer.blob]


def test_upsert_of_a_timer_that_was_deleted_writes_nothing(service: Service) -> None:
    timer = service.define()
    row = (timer.id, "revision", "active", "new", "active", START_MS, "", "{}")
    assert _upsert(service, *row) == [START_MS, 0, []]
    assert not service.exists(timer.id)


def test_upsert_of_one_timer_in_conflict_writes_the_others(service: Service) -> None:
    one, two = service.add("one"), service.define("two")
    before = service.state(one.id)
    now_ms, *refused = _upsert_all(
        service,
        (two.id, "", "", two.revision, "active", START_MS, "", two.blob),
        (one.id, "", "", "new", "active", START_MS, "", "{}"),
    )
    assert (now_ms, refused[::2]) == (START_MS, [1])
    assert service.state(one.id) == before
    assert service.state(two.id).due_ms == START_MS
    assert service.store.definitions([one.id, two.id]) == [one.blob, two.blob]


@pytest.mark.parametrize("fields", [{"every": 10}, {"at_ms": START_MS}])
def test_an_interval_or_a_one_shot_is_saved_without_asking_for_the_time(
    service: Service, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]
) -> None:
    monkeypatch.setattr(service.store, "now_ms", None)
    monkeypatch.setattr(service.store, "states", None)
    assert service.store.save([service.define(**fields)]) == 1
    assert service.store.save([service.define(**fields)]) == 0
    assert service.store.save([service.define(**fields, args=(1,))]) == 1


def test_upsert_shares_new_timers_between_the_instances(service: Service) -> None:
    service.join("a")
    service.join("b")
    service.add_many(5)
    assert sorted(service.loads().values()) == [2, 3]


def test_upsert_keeps_the_due_time_that_is_stored_by_then(service: Service) -> None:
    epoch = service.join()
    timer = service.add()
    service.clock.advance(10)
    service.commit("a", epoch, service.ran(service.due_one("a", epoch)))
    row = ("new", "active", "keep", "", "{}")
    assert _upsert(service, timer.id, timer.revision, "active", *row) == [service.clock()]
    assert service.state(timer.id).due_ms == START_MS + 20_000


def test_upsert_keeps_the_back_off_of_a_refused_run(service: Service) -> None:
    epoch = service.join()
    timer = service.add()
    service.clock.advance(10)
    service.commit("a", epoch, Settlement(service.due_one("a", epoch), "refused", delay_ms=700))
    service.add(args=(1,))
    state = service.state(timer.id)
    assert (state.due_ms, state.at_ms) == (START_MS + 10_000, START_MS + 10_700)


@pytest.mark.parametrize("field", ["last_run", "last_sent"])
@pytest.mark.parametrize("due", [START_MS + 10, "+10"])
def test_upsert_never_sets_a_due_time_that_was_sent(
    service: Service, field: str, due: object
) -> None:
    timer = service.add()
    service.set_field(timer.id, field, str(START_MS + 50_000))
    row = ("new", "active", due, "", "{}")
    assert _upsert(service, timer.id, timer.revision, "active", *row) == WRITTEN
    assert service.state(timer.id).due_ms == START_MS + 50_001


def test_upsert_of_a_new_creation_forgets_the_runs_before(service: Service) -> None:
    epoch = service.join()
    timer = service.add(at_ms=START_MS)
    service.commit("a", epoch, Settlement(service.due_one("a", epoch), "run", summary="{}"))
    assert service.state(timer.id).is_finished
    service.clock.advance(60)
    again = service.add(at_ms=START_MS + 90_000)
    state = service.state(timer.id)
    assert (state.status, state.runs, state.last_run_ms) == ("active", 0, None)
    assert (state.created_ms, state.due_ms) == (START_MS + 60_000, START_MS + 90_000)
    assert state.revision == again.revision


def test_upsert_looks_at_a_run_after_its_jitter(service: Service) -> None:
    service.join()
    timer = service.define()
    row = (timer.id, "", "", timer.revision, "active", "+1500", "", timer.blob)
    assert _upsert_all(service, row, jitter=70) == WRITTEN
    state = service.state(timer.id)
    assert (state.due_ms, state.at_ms) == (START_MS + 1500, START_MS + 1570)
    assert service.store.scores("timer_queue") == {timer.id: START_MS + 1570}


@pytest.mark.parametrize(
    ("stored", "jitter_ms", "at_ms"),
    [(10_000, 70, 10_070), (9_999, 70, 10_000), (10_000, 0, 10_000)],
)
def test_upsert_keeps_a_due_time_with_another_jitter_if_it_is_the_one_that_was_read(
    service: Service, stored: int, jitter_ms: int, at_ms: int
) -> None:
    service.join()
    timer = service.add()
    row = (
        timer.id,
        timer.revision,
        "active",
        "new",
        "active",
        f"keep:{START_MS + stored}",
        "",
        "{}",
    )
    assert _upsert_all(service, row, jitter=jitter_ms) == WRITTEN
    state = service.state(timer.id)
    assert (state.due_ms, state.at_ms) == (START_MS + 10_000, START_MS + at_ms)


def _give_up(
    service: Service, timer: Definition, due_ms: int, runs: int = 3, **fields: Any
) -> None:
    row = (timer.id, timer.revision, "active", "new", "active", START_MS + 99_000, "", "{}")
    second = "-" if runs == 1 else due_ms + 10_000
    given_up = f"superseded:{runs}:{due_ms}:{due_ms + (runs - 1) * 10_000}:{second}"
    assert _upsert_all(service, row, given_up=given_up, **fields) == [service.clock()]


def test_upsert_counts_the_runs_that_it_gives_up(service: Service) -> None:
    service.join()
    timer = service.add()
    service.clock.advance(35)
    _give_up(service, timer, START_MS + 10_000)
    assert service.state(timer.id).skips == {"superseded": 3}
    (entry,) = service.store.history(0)
    assert entry["skipped"] == f"{timer.id} superseded 3 {START_MS + 10_000} {START_MS + 30_000}"


def test_upsert_counts_runs_behind_one_that_may_be_out(service: Service) -> None:
    epoch = service.join()
    timer = service.add()
    service.clock.advance(35)
    service.store.due("a", epoch, Reading(10, marks=True))
    _give_up(service, timer, START_MS + 20_000)
    assert service.state(timer.id).skips == {"superseded": 3}


@pytest.mark.parametrize(("why", "skips"), [("another due time", {}), ("sent", {"superseded": 2})])
def test_upsert_counts_no_run_that_is_out(
    service: Service, why: str, skips: dict[str, int]
) -> None:
    service.join()
    timer = service.add()
    service.clock.advance(35)
    if why == "sent":
        service.set_field(timer.id, "last_sent", str(START_MS + 10_000))
    _give_up(service, timer, START_MS + (9_000 if why == "another due time" else 10_000))
    assert service.state(timer.id).skips == skips


def _leave_in_doubt(service: Service, runs: int = 3) -> tuple[Definition, DueTimer, int]:
    """Give another schedule to a timer whose owner has read its run, and may be publishing it."""
    epoch = service.join()
    timer = service.add()
    service.clock.advance(35)
    (due,) = service.store.due("a", epoch, Reading(10, marks=True)).timers
    _give_up(service, timer, due.due_ms, runs=runs)
    return timer, due, epoch


@pytest.mark.parametrize("runs", [1, 3])
def test_upsert_leaves_a_run_in_doubt_that_its_owner_may_be_publishing(
    service: Service, runs: int
) -> None:
    timer, due, _ = _leave_in_doubt(service, runs)
    skips = {"superseded": runs - 1} if runs > 1 else {}
    assert service.state(timer.id).skips == skips, "those behind it are not sent"
    assert service.get_field(timer.id, "in_doubt") == due.due
    behind = [entry["skipped"] for entry in service.store.history(0)]
    first_ms, last_ms = due.due_ms + 10_000, due.due_ms + (runs - 1) * 10_000
    expected = f"{timer.id} superseded {runs - 1} {first_ms} {last_ms}"
    assert behind == ([expected] if runs > 1 else [])


def test_upsert_counts_a_run_in_doubt_when_another_one_is(service: Service) -> None:
    timer, due, epoch = _leave_in_doubt(service)
    service.clock.advance(100)
    (second,) = service.store.due("a", epoch, Reading(10, marks=True)).timers
    row = (timer.id, "new", "active", "newer", "active", START_MS + 999_000, "", "{}")
    given_up = f"superseded:1:{second.due}:{second.due}:-"
    assert _upsert_all(service, row, given_up=given_up) == [service.clock()]
    assert service.state(timer.id).skips == {"superseded": 3}
    assert service.get_field(timer.id, "in_doubt") == second.due != due.due


@pytest.mark.parametrize("done", ["run", "skip"])
def test_commit_counts_a_run_in_doubt_that_nobody_has_sent(service: Service, done: str) -> None:
    timer, _, epoch = _leave_in_doubt(service)
    service.clock.advance(100)
    later = service.due_one("a", epoch)
    settlement = Settlement(later, done, next_due_ms=later.due_ms + 10_000)
    assert service.commit("a", epoch, settlement) == [1]
    state = service.state(timer.id)
    assert (state.skips, state.runs) == ({"superseded": 3}, int(done == "run"))
    assert service.get_field(timer.id, "in_doubt") is None
    assert f"{timer.id} superseded 1 {START_MS + 10_000} {START_MS + 10_000}" in [
        line for entry in service.store.history(0) for line in entry.get("skipped", "").split("\n")
    ]


@pytest.mark.parametrize("is_fenced", [False, True])
def test_commit_of_a_run_in_doubt_says_that_it_is_out(service: Service, is_fenced: bool) -> None:
    timer, due, epoch = _leave_in_doubt(service)
    if is_fenced:
        service.join()
        with pytest.raises(FencedError):
            service.commit("a", epoch, service.ran(due))
    else:
        assert service.commit("a", epoch, service.ran(due)) == [-2]
    state = service.state(timer.id)
    assert (state.skips, state.runs, state.last_run_ms) == ({"superseded": 2}, 1, due.due_ms)
    service.clock.advance(100)
    later = service.due_one("a", service.epoch("a"))
    assert service.commit("a", service.epoch("a"), service.ran(later)) == [1]
    state = service.state(timer.id)
    assert (state.skips, state.runs) == ({"superseded": 2}, 2)


def test_upsert_of_a_timer_that_has_ended_keeps_it_for_a_time(service: Service) -> None:
    timer = service.define()
    _upsert(service, timer.id, "", "", timer.revision, "stopped", "-", "ended", timer.blob)
    assert service.store.scores("inactive_timers") == {timer.id: START_MS + 60_000}
    assert service.store.purge() == 0
    service.clock.advance(60)
    assert service.store.purge() == 1
    assert not service.exists(timer.id)


def test_upsert_keeps_the_owner_that_is_still_there(service: Service) -> None:
    service.join("a")
    timer = service.add()
    service.join("b")
    service.add(args=(1,))
    assert service.state(timer.id).owner == "a"


def test_upsert_of_a_timer_whose_owner_is_gone_places_it(service: Service) -> None:
    service.join("a")
    timer = service.add()
    service.redis.zrem(service.keys("service_instances"), "a")
    service.join("b")
    service.add(args=(1,))
    assert service.state(timer.id).owner == "b"
    service.redis.delete(service.keys("instance_timers", "a"))


@pytest.mark.parametrize("status", ["paused", "stopped", "broken"])
def test_upsert_puts_a_timer_aside(service: Service, status: str) -> None:
    service.join()
    timer = service.add()
    row = ("new", status, "-", "a reason\nin two lines", "{}")
    assert _upsert(service, timer.id, timer.revision, "active", *row) == WRITTEN
    state = service.state(timer.id)
    assert (state.status, state.reason) == (status, "a reason\nin two lines")
    assert (state.due_ms, state.at_ms) == (None, None)
    assert service.store.scores("inactive_timers") == {timer.id: float("inf")}
    assert service.store.pending_count() == 0


def test_upsert_over_a_key_of_another_type_replaces_it(service: Service) -> None:
    timer = service.define()
    service.redis.lpush(service.keys("timer", timer.id), "nonsense")
    service.add()
    assert service.state(timer.id).status == "active"


@pytest.mark.parametrize(
    "field", ["created", "due", "at", "last_run", "last_sent", "runs", "attempts"]
)
@pytest.mark.parametrize("source", ["", "app"])
def test_upsert_over_a_field_edited_by_hand_stops_no_other_timer(
    service: Service, field: str, source: str
) -> None:
    service.join()
    definitions = [service.define(name) for name in ("before", "edited", "after")]
    service.store.save(definitions)
    service.set_field(definitions[1].id, field, "nonsense")
    changed = [service.define(name, args=(1,)) for name in ("before", "edited", "after")]
    service.store.save(changed, source=source)
    states = [service.state(definition.id) for definition in changed]
    assert [state.revision for state in states] == [each.revision for each in changed]


def test_upsert_moves_a_static_timer_between_sources(service: Service) -> None:
    timer = service.add(source="one")
    assert service.store.static_timers("one") == {timer.id}
    service.add(source="two.py")
    assert service.store.static_timers("one") == set()
    assert service.store.static_timers("two.py") == {timer.id}
    assert service.state(timer.id).source == encode_name("two.py")
    row = ("new", "active", "keep", "", "{}")
    assert _upsert(service, timer.id, timer.revision, "active", *row) == WRITTEN
    assert service.store.static_timers("two.py") == set()
    assert service.state(timer.id).source == ""


def test_upsert_of_an_active_timer_that_has_lost_its_due_time_makes_it_due(
    service: Service,
) -> None:
    service.join()
    timer = service.add()
    service.redis.hdel(service.keys("timer", timer.id), "due", "at")
    service.add(source="app")
    state = service.state(timer.id)
    assert (state.due_ms, state.at_ms, state.source) == (START_MS, START_MS, "app")


@pytest.mark.parametrize("stored", ["{", "", "[" * 1000, b"\xff{", None])
def test_upsert_of_the_same_timer_writes_its_definition_again(
    service: Service, stored: Any
) -> None:
    timer = service.add()
    before = service.state(timer.id)
    key = service.keys("timer_definition", timer.id)
    service.redis.delete(key)
    if stored is not None:
        service.redis.set(key, stored)
    else:
        service.redis.lpush(key, "x")
    assert service.store.save([timer]) == 0
    assert service.redis.get(key) == timer.blob
    assert service.state(timer.id) == before


def test_upsert_of_the_same_timer_leaves_the_summary_of_one_that_is_over(service: Service) -> None:
    epoch = service.join()
    timer = service.add(at_ms=START_MS + 1, args=("long",))
    service.clock.advance(1)
    assert service.commit("a", epoch, Settlement(service.due_one("a", epoch), "run")) == [1]
    key = service.keys("timer_definition", timer.id)
    service.redis.set(key, timer.summary)
    assert service.store.save([timer]) == 0
    assert service.redis.get(key) == timer.summary


def test_upsert_over_a_revision_that_is_no_text_replaces_it(service: Service) -> None:
    timer = service.add()
    service.redis.hset(service.keys("timer", timer.id), "revision", b"\xff")
    assert service.store.save([timer]) == 1
    assert service.state(timer.id).revision == timer.revision


@pytest.mark.parametrize("field", ["revision", "status"])
def test_upsert_over_a_mark_edited_by_hand_replaces_it(service: Service, field: str) -> None:
    service.join()
    timer = service.add()
    service.set_field(timer.id, field, "some words \n+1")
    service.add(args=(1,))
    state = service.state(timer.id)
    assert state.revision == service.define(args=(1,)).revision


# ------------------------------------------------------------------ delete


def test_delete_removes_all_that_is_stored(service: Service) -> None:
    service.join()
    timer = service.add(source="app")
    trigger = service.trigger(timer)
    other = service.add("other")
    assert service.store.delete([timer.id, "no such timer"]) == [True, False]
    assert not service.exists(timer.id)
    assert not service.exists(trigger)
    assert service.store.static_timers("app") == set()
    assert service.store.owned_ids("a") == [other.id]


@pytest.mark.parametrize("status", ["paused", "stopped"])
def test_delete_removes_a_timer_that_is_aside(service: Service, status: str) -> None:
    timer = service.add()
    {"paused": service.store.pause, "stopped": service.store.stop}[status](timer.id)
    assert service.store.delete([timer.id]) == [True]
    assert not service.exists(timer.id)


def test_delete_forgets_triggers_that_were_deleted_by_hand(service: Service) -> None:
    timer = service.add()
    trigger = service.trigger(timer)
    service.redis.delete(service.keys("timer", trigger))
    service.store.delete([timer.id])
    assert service.redis.exists(service.keys("triggers", timer.id)) == 0
    assert not service.exists(trigger)


# ------------------------------------------------------------------ pause, stop, resume


def test_pause_keeps_the_due_time_and_drops_the_owner(service: Service) -> None:
    service.join()
    timer = service.add()
    assert service.store.pause(timer.id) == 1
    state = service.state(timer.id)
    assert (state.status, state.due_ms, state.owner) == ("paused", START_MS + 10_000, UNASSIGNED)
    assert service.store.owned_ids("a") == []


def test_pause_answers_what_it_found(service: Service) -> None:
    timer = service.add()
    assert [service.store.pause(timer.id) for _ in range(2)] == [1, 2]
    service.store.stop(timer.id)
    assert service.store.pause(timer.id) == -3
    assert service.store.pause("no such timer") == 0


def test_pause_of_a_broken_timer_is_refused(service: Service) -> None:
    service.store.save_broken({"timer": ("{}", "a reason")}, source="app")
    assert service.store.pause(service.define().id) == -3


def test_stop_answers_what_it_found(service: Service) -> None:
    timer = service.add()
    assert [service.store.stop(timer.id) for _ in range(2)] == [1, 2]
    assert service.store.stop("no such timer") == 0
    state = service.state(timer.id)
    assert (state.status, state.reason) == ("stopped", "")
    assert service.store.definitions([timer.id]) == [timer.blob]


def test_stop_of_a_timer_that_has_ended_holds(service: Service) -> None:
    timer = service.define()
    _upsert(service, timer.id, "", "", timer.revision, "stopped", "-", "ended", timer.blob)
    assert service.store.stop(timer.id) == 1
    assert service.state(timer.id).reason == ""
    assert service.store.scores("inactive_timers") == {timer.id: float("inf")}
    assert service.store.stop(timer.id) == 2


def test_stop_of_a_paused_timer_stops_it(service: Service) -> None:
    timer = service.add()
    service.store.pause(timer.id)
    assert service.store.stop(timer.id) == 1
    assert service.state(timer.id).status == "stopped"


def test_resume_makes_active_places_and_counts_what_passed(service: Service) -> None:
    service.join()
    timer = service.add()
    service.store.pause(timer.id)
    due_ms = START_MS + 50_000
    assert service.resume(timer, due_ms, 4) == 1
    state = service.state(timer.id)
    assert (state.status, state.owner, state.skipped) == ("active", "a", 4)
    assert state.due_ms == state.at_ms == due_ms
    assert service.store.scores("inactive_timers") == {}


def test_resume_notes_what_passed_and_looks_after_the_jitter(service: Service) -> None:
    service.join()
    timer = service.add()
    service.store.pause(timer.id)
    assert service.resume(timer, START_MS + 50_000, 4, at_ms=START_MS + 50_900) == 1
    state = service.state(timer.id)
    assert (state.at_ms, state.skips) == (START_MS + 50_900, {"paused": 4})
    (entry,) = service.store.history(0)
    assert entry["skipped"] == f"{timer.id} paused 4 {START_MS + 49_996} {START_MS + 49_999}"


@pytest.mark.parametrize(("revision", "status"), [("other", "paused"), ("right", "stopped")])
def test_resume_of_a_timer_that_is_not_as_it_was_read_is_refused(
    service: Service, revision: str, status: str
) -> None:
    timer = service.add()
    service.store.pause(timer.id)
    read = timer.revision if revision == "right" else revision
    assert service.resume(timer, START_MS, revision=read, status=status) == -4
    assert service.state(timer.id).status == "paused"


def test_resume_of_an_active_timer_is_refused(service: Service) -> None:
    timer = service.add()
    assert service.resume(timer, START_MS, status="active") == -4


def test_resume_of_no_timer_answers_so(service: Service) -> None:
    assert service.resume(service.define("no such timer"), START_MS) == 0


def test_resume_is_later_than_the_last_run(service: Service) -> None:
    timer = service.add()
    service.store.pause(timer.id)
    service.set_field(timer.id, "last_run", str(START_MS + 50_000))
    service.resume(timer, START_MS)
    assert service.state(timer.id).due_ms == START_MS + 50_001


def test_resume_may_go_on_with_the_run_that_is_out(service: Service) -> None:
    """Its owner advances it without sending, as after every refused commit."""
    timer = service.add()
    service.store.pause(timer.id)
    service.set_field(timer.id, "last_sent", str(START_MS + 10_000))
    service.resume(timer, START_MS + 10_000)
    assert service.state(timer.id).due_ms == START_MS + 10_000


@pytest.mark.parametrize("sent", ["due", "before"])
def test_resume_behind_the_run_that_is_out_counts_it(service: Service, sent: str) -> None:
    """Nobody comes upon it any more; the one before was counted by its own commit."""
    timer = service.add()
    service.store.pause(timer.id)
    last_ms = START_MS + (10_000 if sent == "due" else 5_000)
    service.set_field(timer.id, "last_sent", str(last_ms))
    service.resume(timer, START_MS + 40_000, 2)
    state = service.state(timer.id)
    assert (state.due_ms, state.skips) == (START_MS + 40_000, {"paused": 2})
    if sent == "due":
        assert (state.runs, state.last_run_ms, state.last_sent_ms) == (1, last_ms, None)
        assert service.store.counters()["sent"] == 1
        told = [entry["sent"] for entry in service.store.history(0) if "sent" in entry]
        assert told == [f"{timer.id} {last_ms} 1"]
    else:
        assert (state.runs, state.last_run_ms, state.last_sent_ms) == (0, None, last_ms)


@pytest.mark.parametrize("field", ["last_run", "last_sent", "skipped_paused"])
def test_resume_over_a_field_edited_by_hand_resumes(service: Service, field: str) -> None:
    timer = service.add()
    service.store.pause(timer.id)
    service.set_field(timer.id, field, "nonsense")
    assert service.resume(timer, START_MS + 99, 3) == 1
    assert service.state(timer.id).due_ms == START_MS + 99


# ------------------------------------------------------------------ trigger


def test_trigger_makes_a_hidden_one_shot_that_is_due(service: Service) -> None:
    epoch = service.join()
    timer = service.add()
    service.clock.advance(1)
    id = service.trigger(timer)
    due = service.due_one("a", epoch)
    assert (due.id, due.parent, due.revision) == (id, timer.id, timer.revision)
    assert due.due_ms == START_MS + 1000
    assert [each.id for each in service.store.timers(service.store.timer_ids())] == [timer.id]


def test_trigger_notes_in_which_trace_it_was_asked_for(service: Service) -> None:
    service.join()
    timer, tracer = service.add(), "00-" + "a" * 32 + "-" + "b" * 16 + "-01"
    ids = [new_trigger_id() for _ in range(2)]
    assert service.store._call("trigger", timer.id, ids[0], tracer) == 1
    assert service.store._call("trigger", timer.id, ids[1], "") == 1
    assert service.store.traceparents(ids) == [tracer, ""]


def test_trigger_goes_with_its_commit_and_leaves_its_parent_alone(service: Service) -> None:
    epoch = service.join()
    timer = service.add()
    before = service.state(timer.id)
    id = service.trigger(timer)
    assert service.commit("a", epoch, Settlement(service.due_one("a", epoch), "run")) == [1]
    assert not service.exists(id)
    assert service.redis.exists(service.keys("triggers", timer.id)) == 0
    assert service.state(timer.id) == before


def test_trigger_answers_what_it_found(service: Service) -> None:
    epoch = service.join()
    timer = service.add()
    trigger = service.trigger(timer)
    service.store.pause(timer.id)
    service.trigger(timer)
    service.store.stop(timer.id)
    service.trigger(timer)
    assert service.store.trigger("no such timer", new_trigger_id()) == 0
    assert service.store.trigger(trigger, new_trigger_id()) == 0
    once = service.add("once", at_ms=START_MS)
    finished = next(due for due in service.due("a", epoch) if due.id == once.id)
    service.commit("a", epoch, Settlement(finished, "run", summary="{}"))
    assert service.store.trigger(once.id, new_trigger_id()) == -3
    service.store.save_broken({"broken": ("{}", "a reason")}, source="app")
    assert service.store.trigger(service.define("broken").id, new_trigger_id()) == -3


def test_trigger_without_a_definition_has_nothing_to_send(service: Service) -> None:
    timer = service.add()
    service.redis.delete(service.keys("timer_definition", timer.id))
    assert service.store.trigger(timer.id, new_trigger_id()) == -3


def test_trigger_that_can_not_be_sent_goes_too(service: Service) -> None:
    epoch = service.join()
    timer = service.add()
    id = service.trigger(timer)
    broken = Settlement(service.due_one("a", epoch), "broken", reason="a reason")
    assert service.commit("a", epoch, broken) == [1]
    assert not service.exists(id)


# ------------------------------------------------------------------ due


def test_due_answers_what_has_come_soonest_first_and_the_time_of_the_next(service: Service) -> None:
    epoch = service.join()
    timers = service.add_many(5)
    service.clock.advance(10.002)
    turn = service.store.due("a", epoch, Reading(10))
    assert turn.now_ms == START_MS + 10_002
    assert turn.heartbeat_ms == START_MS
    assert [timer.id for timer in turn.timers] == [timer.id for timer in timers[:3]]
    assert turn.next_ms == START_MS + 10_003


def test_due_answers_at_most_its_limit(service: Service) -> None:
    epoch = service.join()
    service.add_many(3)
    service.clock.advance(20)
    turn = service.store.due("a", epoch, Reading(2))
    assert len(turn.timers) == 2
    assert (turn.more, turn.next_ms) == (True, None)


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (11, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]),
        (10, [9, 8, 0, 1, 2, 3, 4, 5, 6, 7]),
        (9, [9, 8, 0, 1, 2, 3, 4, 5, 6]),
        (8, [9, 8, 0, 1, 2, 3, 4, 5]),
        (4, [9, 0, 1, 2]),
        (3, [0, 1, 2]),
        (1, [0]),
    ],
)
def test_due_gives_a_quarter_of_a_full_read_to_what_came_due_last(
    service: Service, limit: int, expected: list[int]
) -> None:
    epoch = service.join()
    timers = service.add_many(10)
    service.clock.advance(20)
    read = [timer.id for timer in service.due("a", epoch, limit)]
    assert read == [timers[place].id for place in expected]


def test_due_leaves_out_what_was_read_before(service: Service) -> None:
    """Three quarters of those are the longest due; who asks leaves out the others."""
    epoch = service.join()
    timers = service.add_many(10)
    service.clock.advance(20)
    turn = service.store.due("a", epoch, Reading(4, skip=4))
    assert [timer.id for timer in turn.timers] == [timers[place].id for place in (9, 3, 4, 5)]
    turn = service.store.due("a", epoch, Reading(20, skip=4))
    assert [timer.id for timer in turn.timers] == [timer.id for timer in timers[3:]]


def test_due_tells_what_comes_due_within_a_second(service: Service) -> None:
    epoch = service.join()
    first, second, third, *_ = timers = service.add_many(5)
    service.add("later", every=12)
    service.clock.advance(10)
    turn = service.store.due("a", epoch, Reading(10, ahead=2))
    assert [timer.id for timer in turn.timers] == [first.id]
    assert [(timer.id, timer.at) for timer in turn.ahead] == [
        (timer.id, str(START_MS + 10_000 + i)) for i, timer in ((1, second), (2, third))
    ]
    assert turn.next_ms == START_MS + 10_001
    turn = service.store.due("a", epoch, Reading(10, ahead=10))
    assert [timer.id for timer in turn.ahead] == [timer.id for timer in timers[1:]]
    assert service.store.due("a", epoch, Reading(1, ahead=2)).ahead == []


@pytest.mark.parametrize("score", ["inf", "-inf", "1e300", "-1e300"])
def test_due_of_a_score_edited_by_hand_is_told_within_bounds(service: Service, score: str) -> None:
    service.is_damaged = True
    epoch = service.join()
    timer = service.add()
    for instance in ("a", "b"):
        service.redis.zadd(service.keys("instance_timers", instance), {timer.id: score})
    service.join("b")
    turn = service.store.due("a", epoch, Reading(10, ahead=2, looks_elsewhere=True))
    assert turn.next_ms is None or turn.next_ms >= 0


def test_due_of_nothing_has_no_next(service: Service) -> None:
    turn = service.store.due("a", service.join(), Reading(10))
    assert (turn.timers, turn.next_ms) == ([], None)


def test_due_is_never_early(service: Service) -> None:
    epoch = service.join()
    service.add()
    service.clock.advance(9.999)
    assert service.due("a", epoch) == []
    service.clock.advance(0.001)
    assert len(service.due("a", epoch)) == 1


def test_due_of_a_score_edited_by_hand_is_never_early(service: Service) -> None:
    epoch = service.join()
    timer = service.add()
    for key in (service.keys("timer_queue"), service.keys("instance_timers", "a")):
        service.redis.zadd(key, {timer.id: START_MS})
    assert service.due("a", epoch) == []
    service.clock.advance(9.999)
    assert service.due("a", epoch) == []
    service.clock.advance(0.001)
    assert len(service.due("a", epoch)) == 1


def test_due_tells_all_of_a_timer(service: Service) -> None:
    epoch = service.join()
    timer = service.add()
    for name, value in {"runs": "4", "last_sent": "5", "attempts": "6"}.items():
        service.set_field(timer.id, name, value)
    service.clock.advance(10)
    due = service.due_one("a", epoch)
    assert (due.status, due.revision, due.created) == ("active", timer.revision, str(START_MS))
    assert (due.due_ms, due.run_number, due.last_sent, due.refusals) == (
        START_MS + 10_000,
        5,
        "5",
        6,
    )
    assert due.parent == ""
    assert due.is_readable
    assert not due.is_sent


@pytest.mark.parametrize("damage", ["gone", "of another type"])
def test_due_of_a_timer_without_its_hash_says_so(service: Service, damage: str) -> None:
    epoch = service.join()
    timer = service.add()
    service.redis.delete(service.keys("timer", timer.id))
    if damage == "of another type":
        service.redis.set(service.keys("timer", timer.id), "nonsense")
    service.clock.advance(10)
    due = service.due_one("a", epoch)
    assert (due.id, due.status, due.is_readable) == (timer.id, "", False)
    assert service.commit("a", epoch, Settlement(due, "missing")) == [1]
    if damage == "gone":
        assert not service.exists(timer.id)
    else:
        assert service.state(timer.id).reason == "damaged: its state was a string"
    assert service.due("a", epoch) == []


NO_NUMBERS = ["", " ", "nonsense", "-1", "1.5", "²", "1 2", "1\n2", "-"]


@pytest.mark.parametrize(
    ("field", "text"),
    [
        *(("due", text) for text in NO_NUMBERS),
        *(("created", text) for text in NO_NUMBERS),
        *(("revision", text) for text in ("", " ", "1 2", "1\n2 3")),
    ],
)
def test_due_of_a_field_edited_by_hand_is_set_aside(
    service: Service, field: str, text: str
) -> None:
    epoch = service.join()
    timer = service.add()
    service.clock.advance(10)
    service.set_field(timer.id, field, text)
    due = service.due_one("a", epoch)
    assert due.id == timer.id
    assert not due.is_readable
    unreadable = Settlement(due, "unreadable", reason="a reason")
    assert service.commit("a", epoch, unreadable) == [1]
    assert service.field(timer.id, "status") == "broken"
    assert service.due("a", epoch) == []


def test_due_of_a_field_with_blanks_is_told_ahead_with_its_moment(service: Service) -> None:
    epoch = service.join()
    timer = service.add(every=0.5)
    service.set_field(timer.id, "revision", "1 2")
    (soon,) = service.store.due("a", epoch, Reading(10, ahead=5)).ahead
    assert (soon.id, soon.is_readable) == (timer.id, False)
    assert int(soon.at) == service.clock.now_ms + 500


@pytest.mark.parametrize("member", ["two words", "a\nb", "", "\u00e9", b"\xff"])
def test_due_drops_a_member_that_can_be_no_timers_id(service: Service, member: str | bytes) -> None:
    epoch = service.join()
    timer = service.add()
    for key in (service.keys("timer_queue"), service.keys("instance_timers", "a")):
        service.redis.zadd(key, {member: 1})
    service.clock.advance(10)
    assert [each.id for each in service.due("a", epoch)] == [timer.id]
    assert service.redis.zscore(service.keys("instance_timers", "a"), member) is None
    assert service.redis.zscore(service.keys("timer_queue"), member) is None
    service.commit("a", epoch, service.ran(service.due_one("a", epoch)))


@pytest.mark.parametrize("score", ["inf", "-inf", "1.5", "1e300"])
def test_due_of_a_heartbeat_edited_by_hand_is_a_moment(service: Service, score: str) -> None:
    epoch = service.join()
    service.redis.zadd(service.keys("service_instances"), {"a": score})
    turn = service.store.due("a", epoch, Reading(10))
    assert 0 <= turn.heartbeat_ms <= LAST_MS
    service.store.heartbeat("a", epoch)


@pytest.mark.parametrize("count", ["", "many", "9223372036854775807", "1.5"])
def test_register_counts_anew_when_the_count_was_edited_by_hand(
    service: Service, count: str
) -> None:
    service.redis.hset(service.keys("meta"), "members", count)
    service.store.register("a", {})
    assert service.members() == 1


@pytest.mark.parametrize("count", ["", "many", "1e300", "nan"])
def test_heartbeat_answers_no_count_when_that_was_edited_by_hand(
    service: Service, count: str
) -> None:
    epoch = service.join()
    service.redis.hset(service.keys("meta"), "members", count)
    assert service.store.heartbeat("a", epoch).members == 0


def test_due_of_another_epoch_is_fenced(service: Service) -> None:
    service.join()
    with pytest.raises(FencedError):
        service.due("a", OVER)


# ------------------------------------------------------------------ commit


@pytest.fixture
def epoch(service: Service) -> int:
    """The epoch of an instance that owns one timer, which is due."""
    epoch = service.join("a")
    service.add()
    service.clock.advance(10)
    return epoch


@pytest.fixture
def due(service: Service, epoch: int) -> DueTimer:
    """That timer, as it was read."""
    return service.due_one("a", epoch)


def test_commit_of_a_run_advances_the_timer(service: Service, epoch: int, due: DueTimer) -> None:
    skip = Skip("coalesced", 2, START_MS + 20_000, START_MS + 39_999)
    run = Settlement(due, "run", next_due_ms=START_MS + 40_000, skip=skip)
    assert service.commit("a", epoch, run) == [1]
    state = service.state(due.id)
    assert state.due_ms == state.at_ms == START_MS + 40_000
    assert (state.last_run_ms, state.runs, state.skipped) == (START_MS + 10_000, 1, 2)
    (instance,) = service.store.instances()
    assert (instance.sent, instance.skipped, instance.refused) == (1, 2, 0)


@pytest.mark.parametrize("is_over", [False, True])
def test_commit_of_a_run_counts_it_though_its_timer_goes_by_another_schedule(
    service: Service, epoch: int, due: DueTimer, is_over: bool
) -> None:
    service.add(every=20)
    if is_over:
        service.join("a")
        with pytest.raises(FencedError):
            service.commit("a", epoch, service.ran(due))
    else:
        assert service.commit("a", epoch, service.ran(due)) == [-2]
    state = service.state(due.id)
    assert (state.runs, state.last_run_ms, state.last_sent_ms) == (1, due.due_ms, due.due_ms)
    assert state.due_ms == START_MS + 30_000
    assert service.store.counters()["sent"] == 1
    assert [entry["sent"] for entry in service.store.history(0) if "sent" in entry] == [
        f"{due.id} {due.due_ms} 1"
    ]


def test_commit_of_a_run_that_is_still_due_leaves_it_to_be_counted(
    service: Service, epoch: int, due: DueTimer
) -> None:
    service.add(args=(1,))
    assert service.commit("a", epoch, service.ran(due)) == [-2]
    state = service.state(due.id)
    assert (state.runs, state.last_run_ms, state.last_sent_ms) == (0, None, due.due_ms)


def test_commit_of_a_run_that_is_not_sent_moves_on_without_it(
    service: Service, epoch: int, due: DueTimer
) -> None:
    skip = Skip("misfire", 3, due.due_ms, due.due_ms + 20_000)
    next_ms = START_MS + 40_000
    settlement = Settlement(due, "skip", next_ms, skip, at_ms=next_ms + 7)
    assert service.commit("a", epoch, settlement) == [1]
    state = service.state(due.id)
    assert (state.due_ms, state.at_ms) == (next_ms, next_ms + 7)
    assert (state.last_run_ms, state.runs, state.skips) == (None, 0, {"misfire": 3})
    (instance,) = service.store.instances()
    assert (instance.sent, instance.skipped) == (0, 3)
    (entry,) = service.store.history(0)
    line = f"{due.id} misfire 3 {skip.first_ms} {skip.until_ms}"
    assert (entry["instance"], entry["skipped"]) == ("a", line)


def test_commit_of_nothing_but_a_move_counts_nothing(
    service: Service, epoch: int, due: DueTimer
) -> None:
    assert service.commit("a", epoch, Settlement(due, "skip", START_MS + 30_000)) == [1]
    state = service.state(due.id)
    assert (state.due_ms, state.runs, state.skips) == (START_MS + 30_000, 0, {})
    assert list(service.store.history(0)) == []


def test_commit_of_a_run_that_is_not_sent_and_was_the_last_finishes_the_timer(
    service: Service, epoch: int, due: DueTimer
) -> None:
    skip = Skip("ended", 1, due.due_ms, due.due_ms)
    settlement = Settlement(due, "skip", None, skip, summary='{"name":"timer"}')
    assert service.commit("a", epoch, settlement) == [1]
    state = service.state(due.id)
    assert (state.is_finished, state.runs, state.skips) == (True, 0, {"ended": 1})
    assert service.store.definitions([due.id]) == ['{"name":"timer"}']


def test_commit_of_a_skip_never_goes_back(service: Service, epoch: int, due: DueTimer) -> None:
    assert service.commit("a", epoch, Settlement(due, "skip", due.due_ms - 5)) == [1]
    state = service.state(due.id)
    assert state.due_ms == state.at_ms == due.due_ms + 1


def test_commit_of_a_skip_is_compared_and_remembers_no_sending(
    service: Service, epoch: int, due: DueTimer
) -> None:
    service.store.pause(due.id)
    assert service.commit("a", epoch, Settlement(due, "skip", START_MS + 40_000)) == [-4]
    assert service.state(due.id).last_sent_ms is None


def test_commit_never_goes_back(service: Service, epoch: int, due: DueTimer) -> None:
    service.commit("a", epoch, Settlement(due, "run", next_due_ms=START_MS))
    assert service.state(due.id).due_ms == due.due_ms + 1


@pytest.mark.parametrize("source", ["", "app"])
@pytest.mark.parametrize("is_tracked", [True, False])
def test_commit_of_the_last_run_keeps_a_one_shot_for_a_while(
    make_service: type[Service], source: str, is_tracked: bool
) -> None:
    service = make_service(track_runs=is_tracked)
    epoch = service.join()
    timer = service.add(at_ms=START_MS, source=source, args=(1,))
    due = service.due_one("a", epoch)
    assert service.commit("a", epoch, Settlement(due, "run", summary=timer.summary)) == [1]
    state = service.state(timer.id)
    assert state.is_finished
    assert (state.runs, state.last_run_ms, state.due_ms) == (1, START_MS, None)
    kept = timer.blob if is_tracked else timer.summary  # until its run has ended
    assert service.store.definitions([timer.id]) == [kept]
    until = float("inf") if source else START_MS + KEEP_MS
    assert service.store.scores("inactive_timers") == {timer.id: until}


@pytest.mark.parametrize(
    "fields",
    [
        {"policy": Policy(resend_lost=1), "args": (1,)},
        {"policy": Policy(shards=2), "args": (1,)},
        {"task": "celery.chain", "args": (1,)},
        {},
    ],
)
def test_commit_of_the_last_run_leaves_a_definition_that_may_be_sent_in_parts(
    service: Service, fields: dict[str, Any]
) -> None:
    epoch = service.join()
    timer = service.add(at_ms=START_MS, **fields)
    due = service.due_one("a", epoch)
    service.commit("a", epoch, Settlement(due, "run", summary=timer.summary))
    assert service.store.definitions([timer.id]) == [timer.blob]
    assert service.field(timer.id, "summary") is None


def test_commit_of_the_last_run_keeps_nothing_when_told_so(
    make_service: type[Service],
) -> None:
    service = make_service(keep_finished=0)
    epoch = service.join()
    timer = service.add(at_ms=START_MS)
    service.commit("a", epoch, Settlement(service.due_one("a", epoch), "run"))
    assert not service.exists(timer.id)


def test_commit_of_a_refused_run_postpones_it(service: Service, epoch: int, due: DueTimer) -> None:
    assert service.commit("a", epoch, Settlement(due, "refused", delay_ms=250)) == [1]
    state = service.state(due.id)
    assert (state.due_ms, state.at_ms) == (due.due_ms, service.clock.now_ms + 250)
    assert state.attempts == 1
    assert service.due("a", epoch) == []
    service.clock.advance(0.25)
    again = service.due_one("a", epoch)
    assert (again.due, again.refusals) == (due.due, 1)
    assert service.commit("a", epoch, service.ran(again)) == [1]
    assert service.state(due.id).attempts == 0
    assert service.store.instances()[0].refused == 1


def test_commit_of_a_broken_timer_sets_it_aside(
    service: Service, epoch: int, due: DueTimer
) -> None:
    reason = "its message can not be built:\n  100 %s - 'x' {é}"
    assert service.commit("a", epoch, Settlement(due, "broken", reason=reason)) == [1]
    state = service.state(due.id)
    assert (state.status, state.reason, state.due_ms) == ("broken", reason, due.due_ms)
    assert service.store.owned_ids("a") == []


def test_commit_of_a_timer_that_lacks_code_hands_it_over(
    service: Service, epoch: int, due: DueTimer
) -> None:
    b = service.join("b")
    assert service.commit("a", epoch, Settlement(due, "lacking", delay_ms=1000)) == [1]
    state = service.state(due.id)
    assert (state.owner, state.due_ms) == ("b", due.due_ms)
    assert state.at_ms == service.clock.now_ms + 1000
    service.clock.advance(1)
    assert service.due_one("b", b).due == due.due


def test_commit_of_a_timer_that_lacks_code_waits_when_nobody_else_lives(
    service: Service, epoch: int, due: DueTimer
) -> None:
    assert service.commit("a", epoch, Settlement(due, "lacking", delay_ms=1000)) == [1]
    state = service.state(due.id)
    assert (state.owner, state.at_ms) == ("a", service.clock.now_ms + 1000)


def test_commit_of_a_timer_that_is_no_timer_any_more(
    service: Service, epoch: int, due: DueTimer
) -> None:
    assert service.commit("a", epoch, Settlement(due, "missing")) == [-2]
    service.redis.delete(service.keys("timer", due.id))
    members = service.members()
    assert service.commit("a", epoch, Settlement(due, "missing")) == [1]
    assert not service.exists(due.id)
    assert service.store.owned_ids("a") == []
    assert service.members() > members, "the instances look at their static schedules again"


def test_commit_of_a_timer_that_is_in_the_queue_though_paused_takes_it_out(
    service: Service, epoch: int, due: DueTimer
) -> None:
    service.set_field(due.id, "status", "paused")
    assert service.commit("a", epoch, Settlement(due, "missing")) == [1]
    assert service.state(due.id).status == "paused"
    assert service.due("a", epoch) == []


REFUSALS = {
    "moved": 0,
    "edited": -2,
    "rescheduled": -2,
    "advanced": -2,
    "created anew": -2,
    "deleted": -3,
    "paused": -4,
    "stopped": -4,
}


def _change(service: Service, due: DueTimer, change: str) -> None:
    if change == "moved":
        service.let_pass(31, b=service.join("b"))
        service.store.reap("b", service.epoch("b"))
        service.join("a")
    elif change == "edited":
        service.add(args=(1,))
    elif change == "rescheduled":
        service.add(every=77)
    elif change == "advanced":
        epoch = service.epoch("a")
        assert service.commit("a", epoch, service.ran(due)) == [1]
    elif change in ("created anew", "deleted"):
        service.store.delete([due.id])
        if change == "created anew":
            service.add()
    else:
        {"paused": service.store.pause, "stopped": service.store.stop}[change](due.id)


@pytest.mark.parametrize(("change", "code"), REFUSALS.items())
@pytest.mark.parametrize("done", ["run", "refused", "broken", "lacking"])
def test_commit_of_a_timer_that_is_not_as_it_was_read_is_refused(
    service: Service, due: DueTimer, change: str, code: int, done: str
) -> None:
    _change(service, due, change)
    before = None if change == "deleted" else service.state(due.id)
    epoch = service.epoch("a")
    settlement = Settlement(due, done, next_due_ms=due.due_ms + 10_000, delay_ms=5, reason="r")
    assert service.commit("a", epoch, settlement) == [code]
    if before is None:
        assert not service.exists(due.id)
        return
    after = service.state(due.id)
    remembered = done == "run" and change != "created anew"
    assert after.last_sent_ms == (due.due_ms if remembered else None)
    assert (after.status, after.due_ms, after.at_ms) == (before.status, before.due_ms, before.at_ms)
    counted = before.runs + (done == "run" and change == "rescheduled")
    assert (after.owner, after.runs, after.attempts) == (before.owner, counted, 0)


def test_commit_that_is_fenced_remembers_what_was_sent(
    service: Service, epoch: int, due: DueTimer
) -> None:
    b = service.join("b")
    service.let_pass(31, b=b)
    service.store.reap("b", b)
    with pytest.raises(FencedError):
        service.commit("a", epoch, service.ran(due))
    theirs = service.due_one("b", b)
    assert theirs.is_sent
    assert service.commit("b", b, service.ran(theirs)) == [1]
    state = service.state(due.id)
    assert (state.runs, state.last_sent_ms, state.due_ms) == (1, None, due.due_ms + 10_000)


@pytest.mark.parametrize("done", ["refused", "broken", "lacking", "missing", "unreadable"])
def test_commit_that_is_fenced_changes_nothing(
    service: Service, epoch: int, due: DueTimer, done: str
) -> None:
    before = service.state(due.id)
    service.join("a")
    with pytest.raises(FencedError):
        service.commit("a", epoch, Settlement(due, done, delay_ms=5, reason="r"))
    assert service.state(due.id) == before


def test_commit_remembers_the_latest_that_was_sent(
    service: Service, epoch: int, due: DueTimer
) -> None:
    service.set_field(due.id, "last_sent", str(due.due_ms + 5))
    service.add(args=(1,))
    assert service.commit("a", epoch, service.ran(due)) == [-2]
    assert service.state(due.id).last_sent_ms == due.due_ms + 5


@pytest.mark.parametrize("change", ["edited", "moved", "paused"])
def test_commit_that_was_refused_doubles_nothing(
    service: Service, due: DueTimer, change: str
) -> None:
    _change(service, due, change)
    assert service.commit("a", service.epoch("a"), service.ran(due)) != [1]
    state = service.state(due.id)
    if change == "paused":
        service.store.resume(state, Plan(due.due_ms))
        state = service.state(due.id)
    owner_epoch = service.epoch(state.owner)
    assert service.due_one(state.owner, owner_epoch).is_sent


def test_commit_with_the_number_of_the_last_one_answers_the_same_and_changes_nothing(
    service: Service, epoch: int, due: DueTimer
) -> None:
    service.add("changed")
    service.clock.advance(10)
    due, other = service.due("a", epoch)
    service.add("changed", args=(1,))
    settlements = [service.ran(due), service.ran(other)]
    assert service.store.commit("a", epoch, 7, settlements).codes == [1, -2]
    after = service.state(due.id)
    assert service.store.commit("a", epoch, 7, settlements).codes == [1, -2]
    assert service.state(due.id) == after
    assert service.store.instances()[0].sent == 1
    assert service.store.commit("a", epoch, 8, settlements).codes == [-2, -2]


def test_commit_with_the_number_of_another_epoch_is_no_repetition(
    service: Service, epoch: int, due: DueTimer
) -> None:
    assert service.store.commit("a", epoch, 7, []).codes == []
    assert service.store.commit("a", service.join("a"), 7, [service.ran(due)]).codes == [1]


def test_commit_of_nothing_answers_nothing(service: Service, epoch: int) -> None:
    assert service.commit("a", epoch) == []


@pytest.mark.parametrize(
    "field", ["runs", "skipped_coalesced", "attempts", "last_sent", "last_run", "at"]
)
@pytest.mark.parametrize("done", ["run", "refused", "lacking", "broken"])
def test_commit_over_a_field_edited_by_hand_settles_all(
    service: Service, epoch: int, field: str, done: str
) -> None:
    service.add("other")
    service.clock.advance(10)
    edited, other = service.due("a", epoch)
    service.set_field(edited.id, field, "nonsense")
    skip = Skip("coalesced", 3, edited.due_ms + 1, edited.due_ms + 9)
    settlement = Settlement(edited, done, due_ms := edited.due_ms + 20_000, skip, delay_ms=900)
    assert service.commit("a", epoch, settlement, service.ran(other)) == [1, 1]
    assert service.state(other.id).runs == 1
    if done == "run":
        state = service.state(edited.id)
        assert (state.runs, state.skips.get("coalesced"), state.due_ms) == (1, 3, due_ms)


@pytest.mark.parametrize("kind", ["instance", "counters"])
def test_commit_over_a_count_edited_by_hand_counts_anew(
    service: Service, epoch: int, due: DueTimer, kind: str
) -> None:
    key = service.keys(kind, "a") if kind == "instance" else service.keys(kind)
    service.redis.hset(key, "sent", "nonsense")
    assert service.commit("a", epoch, service.ran(due)) == [1]
    assert service.redis.hget(key, "sent") == "1"


def test_commit_of_a_fenced_run_over_a_field_edited_by_hand_is_fenced(
    service: Service, epoch: int, due: DueTimer
) -> None:
    service.set_field(due.id, "last_sent", "nonsense")
    service.join("a")
    with pytest.raises(FencedError):
        service.commit("a", epoch, service.ran(due))
    assert service.state(due.id).last_sent_ms == due.due_ms


def test_commit_of_a_timer_that_another_owns_drops_it(service: Service, epoch: int) -> None:
    service.join("b")
    due = service.due_one("a", epoch)
    service.redis.zadd(service.keys("instance_timers", "b"), {due.id: due.due_ms})
    service.set_field(due.id, "owner", "b")
    assert service.commit("a", epoch, service.ran(due)) == [0]
    assert service.store.owned_ids("a") == []


def test_commit_over_a_set_edited_by_hand_settles_all(service: Service, epoch: int) -> None:
    """An error half way would leave timers advanced, and still in the queue as due."""
    parent = service.add("parent", every=1000)
    trigger = service.trigger(parent)
    service.add("first", at_ms=START_MS + 5000)
    edited = service.keys("triggers", parent.id)
    service.redis.delete(edited)
    service.redis.set(edited, "no set")
    read = service.due("a", epoch)
    runs = [Settlement(due, "run") if due.id == trigger else service.ran(due) for due in read]
    assert service.commit("a", epoch, *runs) == [1] * 3
    assert not service.exists(trigger)
    assert service.due("a", epoch) == []
    service.is_damaged = True


TRANSITIONS: dict[str, Callable[[Service, Definition, DueTimer], object]] = {
    "commit": lambda service, _, due: service.commit("a", service.epoch("a"), service.ran(due)),
    "resume": lambda service, timer, _: service.resume(timer, START_MS + 50_000, 4),
    "upsert": lambda service, *_: service.add("other", every=99),
    "trigger": lambda service, timer, _: service.trigger(timer),
}


@pytest.mark.parametrize("owner", ["a", UNASSIGNED])
@pytest.mark.parametrize("transition", TRANSITIONS.values(), ids=TRANSITIONS.keys())
def test_a_transition_while_timers_of_an_owner_are_of_another_type_writes_nothing(
    service: Service, owner: str, transition: Callable[[Service, Definition, DueTimer], object]
) -> None:
    """An error half way would leave counts without their history, and nobody would write it."""
    service.add("other")
    service.join("a")
    paused = service.add("paused")
    service.add("due", at_ms=START_MS + 5000)
    service.store.pause(paused.id)
    service.clock.advance(5)
    due = service.due_one("a", service.epoch("a"))
    service.redis.set(service.keys("instance_timers", owner), "no sorted set")
    before = _stored(service)
    with pytest.raises(DamagedError, match="WRONGTYPE"):
        transition(service, paused, due)
    assert _stored(service) == before
    service.is_damaged = True


# ------------------------------------------------------------------ linked, and commits that push


class BrokerSide:
    """The broker's database on the server of the timers, and the proof that it is there."""

    def __init__(self, service: Service, database: int, prefix: str = "") -> None:
        self.prefix = service.settings.key_prefix + prefix
        self.link = Link(database, "link", "a proof", self.prefix)
        port = service.redis.connection_pool.connection_kwargs["port"]
        self.redis: Any = redis.Redis(port=port, db=database, decode_responses=True)
        self.redis.set(f"{self.prefix}link", "a proof", ex=60)

    def messages(self, name: str = "q") -> list[Any]:
        """Return what a worker would take from a list, in its order."""
        return list(reversed(self.redis.lrange(self.prefix + name, 0, -1)))

    def close(self) -> None:
        """Delete what the test has left."""
        delete_prefix(self.redis, self.prefix)
        self.redis.close()


@pytest.fixture(params=[0, 9], ids=["same database", "another database"])
def side(request: pytest.FixtureRequest, service: Service) -> Iterator[BrokerSide]:
    """The broker's side, in the timers' database and in another of their server."""
    side = BrokerSide(service, request.param)
    yield side
    side.close()


def _pushing(settlement: Settlement, *pushes: tuple[str, str, Any]) -> Settlement:
    targets = tuple((command, key) for command, key, _ in pushes)
    return settlement.pushing(Message(targets, tuple(value for *_, value in pushes)))


def _pushed(service: Service, due: DueTimer, text: Any = "m", key: str = "q") -> Settlement:
    """Return the run of an interval timer with its message."""
    return _pushing(service.ran(due), ("LPUSH", key, text))


def _stored(service: Service) -> dict[str, Any]:
    """Return all that is stored of the service."""
    keys = service.redis.keys(f"{service.settings.key_prefix}*{{orders}}*")
    return {key: service.redis.dump(key) for key in keys}


NO_PROOFS: dict[str, Callable[[BrokerSide], object]] = {
    "gone": lambda side: side.redis.delete(f"{side.prefix}link"),
    "another": lambda side: side.redis.set(f"{side.prefix}link", "another", ex=60),
    "of another type": lambda side: (
        side.redis.delete(f"{side.prefix}link"),
        side.redis.lpush(f"{side.prefix}link", "a proof"),
    ),
    "in no database": lambda side: setattr(side, "link", side.link._replace(database=9999)),
}
NO_PROOF = pytest.mark.parametrize("loss", NO_PROOFS.values(), ids=NO_PROOFS.keys())


def test_linked_when_the_brokers_database_holds_the_proof(
    service: Service, side: BrokerSide
) -> None:
    assert service.store.is_linked(side.link)
    before = _stored(service)
    service.add()
    assert _stored(service).keys() > before.keys(), "the timers' database is selected again"


@NO_PROOF
def test_linked_is_not_a_server_without_the_proof(
    service: Service, side: BrokerSide, loss: Callable[[BrokerSide], object]
) -> None:
    loss(side)
    assert not service.store.is_linked(side.link)


def test_commit_pushes_each_message_and_advances_its_timer(
    service: Service, epoch: int, side: BrokerSide
) -> None:
    timers = [service.add(name) for name in ("timer", "u", "v")]
    service.clock.advance(10)
    texts = ["first", "\x00 é 🎉 %s", "x" * (2 * 1024 * 1024)]
    runs = [
        _pushed(service, due, text)
        for due, text in zip(service.due("a", epoch), texts, strict=True)
    ]
    answer = service.store.commit("a", epoch, 1, runs, reading=Reading(10), link=side.link)
    assert (answer.codes, answer.errors) == ([1, 1, 1], [])
    assert answer.turn is not None
    assert side.messages() == texts
    assert [service.state(each.id).runs for each in timers] == [1, 1, 1]
    assert service.store.instances()[0].sent == 3


def test_commit_pushes_to_lists_topics_and_gives_queues_their_time(
    service: Service, epoch: int, due: DueTimer, side: BrokerSide
) -> None:
    with side.redis.pubsub(ignore_subscribe_messages=True) as pubsub:
        pubsub.subscribe(f"{side.prefix}topic")
        wait_until(lambda: side.redis.pubsub_numsub(f"{side.prefix}topic")[0][1], "the subscriber")
        run = _pushing(
            service.ran(due),
            ("LPUSH", "q", "m"),
            ("PEXPIRE", "q", 60_000),
            ("LPUSH", "q\x06\x163", "n"),
            ("PUBLISH", "topic", "event"),
        )
        assert service.store.commit("a", epoch, 1, [run], link=side.link).codes == [1]
        heard = wait_until(lambda: pubsub.get_message(timeout=0.1), "the event")
    assert heard["data"] == "event"
    assert (side.messages(), side.messages("q\x06\x163")) == (["m"], ["n"])
    assert 50_000 < side.redis.pttl(f"{side.prefix}q") <= 60_000


def test_commit_pushes_the_last_run_of_a_one_shot_and_a_trigger(
    service: Service, epoch: int, side: BrokerSide
) -> None:
    service.store.delete(service.store.timer_ids())
    once = service.add(at_ms=START_MS)
    trigger = service.trigger(once)
    service.clock.advance(1)
    runs = [
        _pushing(Settlement(due, "run", summary="{}"), ("LPUSH", "q", due.id))
        for due in service.due("a", epoch)
    ]
    assert service.store.commit("a", epoch, 1, runs, link=side.link).codes == [1, 1]
    assert sorted(side.messages()) == sorted([once.id, trigger])
    assert service.state(once.id).is_finished
    assert not service.exists(trigger)


@NO_PROOF
def test_commit_without_the_proof_writes_nothing(
    service: Service,
    epoch: int,
    due: DueTimer,
    side: BrokerSide,
    loss: Callable[[BrokerSide], object],
) -> None:
    loss(side)
    before = _stored(service)
    published = service.ran(due)
    with pytest.raises(UnlinkedError):
        service.store.commit(
            "a", epoch, 1, [published, _pushed(service, due)], reading=Reading(5), link=side.link
        )
    assert _stored(service) == before
    assert side.messages() == []


@pytest.mark.parametrize(("change", "code"), REFUSALS.items())
def test_commit_of_a_timer_that_is_not_as_it_was_read_pushes_nothing(
    service: Service, due: DueTimer, side: BrokerSide, change: str, code: int
) -> None:
    _change(service, due, change)
    before = None if change == "deleted" else service.state(due.id)
    run = _pushed(service, due)
    answer = service.store.commit("a", service.epoch("a"), 9, [run], link=side.link)
    assert (answer.codes, answer.errors) == ([code], [])
    assert side.messages() == []
    assert before is None or service.state(due.id) == before, "there is no last_sent either"


def test_commit_pushes_not_what_has_been_published_meanwhile(
    service: Service, epoch: int, due: DueTimer, side: BrokerSide
) -> None:
    service.set_field(due.id, "last_sent", due.due)
    before = service.state(due.id)
    run = _pushed(service, due)
    assert service.store.commit("a", epoch, 9, [run], link=side.link).codes == [-2]
    assert (side.messages(), service.state(due.id)) == ([], before)
    assert service.commit("a", epoch, service.ran(service.due_one("a", epoch))) == [1]


def test_commit_that_is_fenced_pushes_nothing(
    service: Service, epoch: int, due: DueTimer, side: BrokerSide
) -> None:
    before = service.state(due.id)
    service.join("a")
    with pytest.raises(FencedError):
        service.store.commit("a", epoch, 1, [_pushed(service, due)], link=side.link)
    assert (side.messages(), service.state(due.id)) == ([], before)


@pytest.mark.parametrize("loss", [lambda side: None, NO_PROOFS["gone"]], ids=["linked", "unlinked"])
def test_commit_with_the_number_of_the_last_one_pushes_nothing_again(
    service: Service,
    epoch: int,
    due: DueTimer,
    side: BrokerSide,
    loss: Callable[[BrokerSide], object],
) -> None:
    service.add("other", at_ms=START_MS)
    side.redis.set(f"{side.prefix}spoilt", "no list")
    first, second = service.due("a", epoch)
    runs = [_pushed(service, first, key="spoilt"), _pushed(service, second)]
    answer = service.store.commit("a", epoch, 1, runs, link=side.link)
    assert answer.codes == [-5, 1]
    loss(side)
    again = service.store.commit("a", epoch, 1, runs, reading=Reading(5), link=side.link)
    assert (again.codes, again.errors) == (answer.codes, answer.errors)
    assert again.turn is not None
    assert [timer.id for timer in again.turn.timers] == [first.id]
    assert side.messages() == ["m"]


PUSHES = {
    "its only list": [("LPUSH", "spoilt", "m")],
    "its first list": [("LPUSH", "spoilt", "m"), ("LPUSH", "q", "m"), ("PUBLISH", "topic", "m")],
    "its last list": [("LPUSH", "q", "m"), ("PEXPIRE", "q", 9), ("LPUSH", "spoilt", "m")],
}


@pytest.mark.parametrize("pushes", PUSHES.values(), ids=PUSHES.keys())
def test_commit_whose_push_is_refused_leaves_its_timer_and_pushes_the_others(
    service: Service, epoch: int, side: BrokerSide, pushes: list[tuple[str, str, Any]]
) -> None:
    service.add("before", every=5)
    after = service.add("other")
    service.clock.advance(10)
    side.redis.set(f"{side.prefix}spoilt", "no list")
    read = service.due("a", epoch)
    spoilt = next(due for due in read if due.id not in (service.define("before").id, after.id))
    state = service.state(spoilt.id)
    runs = [
        _pushing(service.ran(due), *pushes)
        if due is spoilt
        else _pushed(service, due, due.id, "good")
        for due in read
    ]
    answer = service.store.commit("a", epoch, 1, runs, link=side.link)
    assert answer.codes == [-5 if due is spoilt else 1 for due in read]
    (error,) = answer.errors
    assert error.startswith("WRONGTYPE")
    assert service.state(spoilt.id) == state
    assert side.messages() == []
    assert side.messages("good") == [due.id for due in read if due is not spoilt]


LIMITED = {
    "no LPUSH": (["-lpush"], "~*"),
    "no TYPE": (["-type"], "~*"),
    "no PEXPIRE": (["-pexpire"], "~*"),
    "no PUBLISH": (["-publish"], "~*"),
    "not this key": ([], "~*{orders}* ~*link"),
}


@pytest.mark.parametrize(("commands", "keys"), LIMITED.values(), ids=LIMITED.keys())
def test_commit_by_a_user_who_may_not_push_pushes_no_part_and_says_so(
    service: Service, epoch: int, due: DueTimer, commands: list[str], keys: str
) -> None:
    server: Any = service.redis
    if int(server.info("server")["redis_version"].split(".")[0]) < 7:
        pytest.skip("this server does not tell what its user may do")
    side, user = BrokerSide(service, 0), f"u{service.settings.key_prefix[:-1]}"
    rules = ["on", ">secret", *keys.split(), "&*", "+@all", *commands]
    server.execute_command("ACL", "SETUSER", user, *rules)
    port = server.connection_pool.connection_kwargs["port"]
    limited = replace(service.settings, redis_url=f"redis://{user}:secret@127.0.0.1:{port}/0")
    store = Store(limited, clock=service.clock)
    before = service.state(due.id)
    run = _pushing(
        service.ran(due),
        ("LPUSH", "q", "m"),
        ("PEXPIRE", "q", 60_000),
        ("PUBLISH", f"{side.prefix}topic", "m"),
    )
    try:
        answer = store.commit("a", epoch, 1, [run], link=side.link)
    finally:
        store.close()
        server.execute_command("ACL", "DELUSER", user)
    assert answer.codes == [-5]
    assert is_forbidden(answer.errors[0])
    assert (side.messages(), service.state(due.id)) == ([], before)
    side.close()


@pytest.mark.parametrize("linked", [True, False])
def test_commit_notes_what_it_reads_as_in_flight_when_that_is_published_first(
    service: Service, epoch: int, due: DueTimer, side: BrokerSide, linked: bool
) -> None:
    service.store.due("a", epoch, Reading(5, marks=True))
    assert service.redis.hget(service.keys("instance", "a"), "in_flight") == due.id
    link = side.link if linked else None
    reading = Reading(5, marks=not linked)
    service.store.commit("a", epoch, 1, [], reading=reading, link=link)
    noted = service.redis.hget(service.keys("instance", "a"), "in_flight")
    assert noted == (None if linked else due.id)


def test_commit_of_a_run_that_is_not_due_yet_pushes_nothing(
    service: Service, epoch: int, due: DueTimer, side: BrokerSide
) -> None:
    """It was told ahead, and the server's clock has gone back since."""
    service.clock.advance(-1)
    before = service.state(due.id)
    answer = service.store.commit("a", epoch, 1, [_pushed(service, due)], link=side.link)
    assert answer.codes == [-6]
    assert (side.messages(), service.state(due.id)) == ([], before)


# ------------------------------------------------------------------ hold and cancel


def held(task_id: str = "task", **message: Any) -> Definition:
    """Return what is stored of a durable countdown."""
    return Definition(task_id, "tasks.record", ONCE, message={"args": [1], **message})


def test_hold_counts_from_the_servers_clock_or_waits_for_a_moment(service: Service) -> None:
    service.join()
    first, second = held("one"), held("two")
    service.store.hold(first, delay_ms=5000)
    service.store.hold(second, due_ms=START_MS + 1)
    state = service.state(first.id)
    assert (state.status, state.due_ms, state.at_ms) == ("active", START_MS + 5000, START_MS + 5000)
    assert (state.owner, state.created_ms, state.revision) == ("a", START_MS, first.revision)
    assert service.state(second.id).due_ms == START_MS + 1
    assert service.store.definitions([first.id]) == [first.blob]


@pytest.mark.parametrize("status", ["active", "broken"])
def test_hold_again_replaces_what_is_there_and_leaves_it_with_its_owner(
    service: Service, status: str
) -> None:
    epoch = service.join("b")
    service.store.hold(held(), delay_ms=1000)
    if status == "broken":
        service.clock.advance(2)
        broken = Settlement(service.due_one("b", epoch), "broken", reason="because")
        assert service.commit("b", epoch, broken) == [1]
    service.join("a")
    service.clock.advance(1)
    again = held(args=[2])
    service.store.hold(again, delay_ms=9000)
    state = service.state(again.id)
    assert (state.status, state.revision, state.reason) == ("active", again.revision, "")
    assert (state.created_ms, state.due_ms) == (service.clock(), service.clock() + 9000)
    assert state.owner == "b"


def test_hold_wakes_an_owner_that_would_sleep_too_long(service: Service) -> None:
    service.join()
    woken: list[str] = []
    with service.another_store().client.pubsub(ignore_subscribe_messages=True) as pubsub:
        pubsub.subscribe(service.keys("wake", "a"))
        pubsub.get_message(timeout=1)
        for name, seconds in (("first", 5), ("later", 6), ("sooner", 4)):
            service.store.hold(held(name), delay_ms=seconds * SECOND)
            if pubsub.get_message(timeout=0.2) is not None:
                woken.append(name)
    assert woken == ["first", "sooner"]


def test_cancel_answers_what_was_there_and_removes_it(service: Service) -> None:
    service.join()
    one = held("one")
    service.store.hold(one, delay_ms=1000)
    there, gone = service.store.cancel([one.id, held("never").id])
    assert there == (1, one.blob)
    assert gone == (0, "")
    assert not service.exists(one.id)
    assert service.store.cancel([one.id]) == [(0, "")]


def test_cancel_tells_what_its_owner_may_be_publishing(service: Service) -> None:
    epoch = service.join()
    service.store.hold(held(), delay_ms=0)
    (timer,) = service.store.due("a", epoch, Reading(10, marks=True)).timers
    assert service.store.cancel([timer.id]) == [(IN_FLIGHT, held().blob)]
    assert service.commit("a", epoch, Settlement(timer, "run")) == [-3]
    assert not service.exists(timer.id)


def test_cancel_leaves_alone_what_was_sent(service: Service) -> None:
    epoch = service.join()
    service.store.hold(held(), delay_ms=0)
    timer = service.due_one("a", epoch)
    service.set_field(timer.id, "last_sent", timer.due)
    assert service.store.cancel([timer.id]) == [(0, "")]
    assert service.exists(timer.id)


def test_commit_of_a_countdown_leaves_nothing_but_a_count(service: Service) -> None:
    epoch = service.join()
    service.store.hold(held(), delay_ms=0)
    timer = service.due_one("a", epoch)
    assert service.commit("a", epoch, Settlement(timer, "run")) == [1]
    assert not service.exists(timer.id)
    assert list(service.store.history(0)) == []
    assert service.store.counters() == {"sent": 1}


def test_commit_of_a_countdown_that_has_called_itself_again_leaves_the_new_one(
    service: Service,
) -> None:
    """The task ran, and asked for a retry, before the commit of its run has come."""
    epoch = service.join()
    service.store.hold(held(), delay_ms=0)
    timer = service.due_one("a", epoch)
    service.clock.advance(1)
    again = held(args=[2])
    service.store.hold(again, delay_ms=5000)
    assert service.commit("a", epoch, Settlement(timer, "run")) == [-2]
    state = service.state(again.id)
    assert (state.status, state.due_ms, state.last_sent_ms) == (
        "active",
        service.clock() + 5000,
        None,
    )
    assert service.store.counters() == {"sent": 1}
    assert list(service.store.history(0)) == []


def test_commit_of_a_lost_epoch_remembers_that_a_countdown_is_out(service: Service) -> None:
    epoch = service.join()
    service.store.hold(held(), delay_ms=0)
    timer = service.due_one("a", epoch)
    new = service.join()
    with pytest.raises(FencedError):
        service.commit("a", epoch, Settlement(timer, "run"))
    again = service.due_one("a", new)
    assert again.is_sent
    assert service.commit("a", new, Settlement(again, "run")) == [1]
    assert not service.exists(timer.id)
    assert service.store.counters() == {"sent": 1}


def test_commit_keeps_a_countdown_that_can_not_be_sent_as_a_dead_letter(service: Service) -> None:
    epoch = service.join()
    service.store.hold(held(), delay_ms=0)
    timer = service.due_one("a", epoch)
    assert service.commit("a", epoch, Settlement(timer, "broken", reason="why")) == [1]
    assert not service.exists(timer.id)
    (letter,) = read_letters(service.shards)
    assert (letter.reason, letter.error, letter.task_id) == ("broken", "why", held().name)
    assert letter.task == held().task
    ((id, row),) = service.store.dead_letters()
    found = requeued(service.shards, row)[0]
    assert found.blob == held().blob
    assert service.store.requeue(id, timer.id, "", found.revision, found.blob)
    again = service.due_one("a", epoch)
    assert (again.id, again.parent) == (timer.id, "")
    assert service.commit("a", epoch, Settlement(again, "run")) == [1]
    assert not service.exists(timer.id)
    assert [entry for entry in service.store.history(0) if "sent" in entry] == []


def test_a_countdown_fails_over_like_any_timer(service: Service) -> None:
    service.join("a")
    service.store.hold(held(), delay_ms=60_000)
    epoch = service.join("b")
    service.let_pass(31, b=epoch)
    assert service.store.reap("b", epoch).count == 1
    assert service.state(held().id).owner == "b"


# ------------------------------------------------------------------ wake-ups

Act = Callable[[], object]


def woken_by(service: Service, act: Act) -> set[str]:
    """Return the instances that something is published for while ``act`` runs."""
    channel, end, woken = service.keys("wake", ""), service.keys("wake", "end"), set()
    pubsub = service.redis.pubsub()
    pubsub.psubscribe(f"{channel}*")
    assert pubsub.get_message(timeout=5)
    act()
    service.redis.publish(end, "")
    while (message := pubsub.get_message(timeout=5)) and message["channel"] != end:
        woken.add(message["channel"].removeprefix(channel))
    pubsub.close()
    return woken


def upserting(service: Service) -> Act:
    service.join("b")
    return lambda: service.add()


def triggering(service: Service) -> Act:
    service.join("b")
    timer = service.add()
    return lambda: service.trigger(timer)


def resuming(service: Service) -> Act:
    timer = service.add()
    service.store.pause(timer.id)
    service.join("b")
    return lambda: service.resume(timer, START_MS)


def reaping(service: Service) -> Act:
    service.join("a")
    service.add()
    epoch = service.join("b")
    service.let_pass(31, b=epoch)
    return lambda: service.store.reap("b", epoch)


def rebalancing(service: Service) -> Act:
    epoch = service.join("a")
    service.add_many(2)
    service.join("b")
    return lambda: service.store.rebalance("a", epoch)


def giving_up(service: Service) -> Act:
    epoch = service.join("a")
    service.add()
    service.join("b")
    _say(service, b="up")
    return lambda: service.store.give_up("a", epoch)


def leaving_in_batches(service: Service) -> Act:
    epoch = service.join("a")
    service.add_many(2)
    service.join("b")
    return lambda: service.store.leave("a", epoch, 1)


def leaving_with_nothing(service: Service) -> Act:
    epoch = service.join("a")
    service.join("b")
    return lambda: service.store.leave("a", epoch)


def committing_without_the_code(service: Service) -> Act:
    epoch = service.join("a")
    service.add()
    service.clock.advance(10)
    lacking = Settlement(service.due_one("a", epoch), "lacking", delay_ms=1000)
    service.join("b")
    return lambda: service.commit("a", epoch, lacking)


@pytest.mark.parametrize(
    "prepare",
    [
        *(upserting, triggering, resuming, reaping, rebalancing, giving_up),
        *(leaving_in_batches, leaving_with_nothing, committing_without_the_code),
    ],
)
def test_whoever_is_given_work_is_woken(
    service: Service, prepare: Callable[[Service], Act]
) -> None:
    assert "b" in woken_by(service, prepare(service))


def test_listening_wakes_up_once_it_can_hear_and_for_every_wake_up(
    make_service: MakeService,
) -> None:
    service, stopped = make_service(heartbeat_interval=0.3, instance_timeout=2), threading.Event()
    channel = service.keys("wake", "a")
    listeners: list[int] = []

    def on_wake_up() -> None:
        listeners.append(service.redis.pubsub_numsub(channel)[0][1])

    thread = threading.Thread(target=service.store.listen, args=("a", on_wake_up, stopped))
    thread.start()
    try:
        wait_until(lambda: listeners == [1], "a wake-up for what came before")
        service.redis.publish(channel, "")
        wait_until(lambda: listeners == [1, 1], "the wake-up")
    finally:
        stopped.set()
        thread.join(5)
    assert not thread.is_alive()


# ------------------------------------------------------------------ declare, undeclare


def _declare(service: Service, instance: str, epoch: int, digest: str, *names: str) -> bool:
    ids = [service.define(name).id for name in names]
    return service.store.declare(instance, epoch, "app", digest, ids)


def _undeclare(service: Service, instance: str, epoch: int, *names: str) -> list[str]:
    ids = {service.define(name).id: name for name in names}
    return [ids[id] for id in service.store.undeclare(instance, epoch, "app", list(ids))]


def test_declare_that_is_the_first_counts(service: Service) -> None:
    a = service.join("a")
    assert _declare(service, "a", a, "one", "x")
    assert _declare(service, "a", a, "one", "x")


def test_declare_first_seen_last_wins(service: Service) -> None:
    a, b = service.join("a"), service.join("b")
    assert _declare(service, "a", a, "old", "x")
    assert _declare(service, "b", b, "new", "x", "y")
    assert not _declare(service, "a", a, "old", "x")


def test_declare_of_an_older_known_declaration_does_not_win_back(service: Service) -> None:
    a, b = service.join("a"), service.join("b")
    _declare(service, "a", a, "old", "x")
    _declare(service, "b", b, "new", "y")
    service.clock.advance(5)
    restarted = service.join("c")
    assert not _declare(service, "c", restarted, "old", "x")
    assert _declare(service, "b", b, "new", "y")


@pytest.mark.parametrize("gone", ["left", "dead"])
def test_declare_of_an_older_declaration_counts_once_the_newer_ones_are_gone(
    service: Service, gone: str
) -> None:
    a, b = service.join("a"), service.join("b")
    _declare(service, "a", a, "old", "x")
    _declare(service, "b", b, "new", "y")
    if gone == "left":
        service.store.leave("b", b)
    else:
        service.let_pass(31, a=a)
        service.store.reap("a", a)
    assert _declare(service, "a", a, "old", "x")


def test_declare_of_another_source_does_not_matter(service: Service) -> None:
    a, b = service.join("a"), service.join("b")
    _declare(service, "a", a, "old", "x")
    service.store.declare("b", b, "another", "new", [])
    assert _declare(service, "a", a, "old", "x")


def test_declare_of_another_epoch_is_fenced(service: Service) -> None:
    service.join()
    with pytest.raises(FencedError):
        _declare(service, "a", OVER, "one", "x")


def test_declare_that_is_new_is_a_change_of_membership(service: Service) -> None:
    """Who declared before looks again: it may be the one to delete, or to write once this goes."""
    a = service.join("a")
    before = service.members()
    _declare(service, "a", a, "one", "x")
    assert service.members() == before + 1
    _declare(service, "a", a, "one", "x")
    assert service.members() == before + 1


def test_declare_in_many_calls_is_whole(service: Service) -> None:
    a = service.join("a")
    ids = [f"id{i}" for i in range(2500)]
    assert service.store.declare("a", a, "app", "one", ids)
    assert service.redis.scard(service.keys("declaration", "one")) == 2500


def test_declare_is_not_cut_by_another_that_goes_meanwhile(service: Service) -> None:
    a, b, c = service.join("a"), service.join("b"), service.join("c")
    service.add("x", source="app")
    _declare(service, "a", a, "one", "x")
    ids = [service.define("x").id]
    assert service.store._call("declare", "b", b, "app", "one", 0, *ids) == 0
    service.store.leave("a", a)
    assert service.store._call("declare", "b", b, "app", "one", 1) == 1
    _declare(service, "c", c, "two")
    assert _undeclare(service, "c", c, "x") == []


def test_declare_anew_leaves_nothing_of_the_one_before_unless_others_have_it(
    service: Service,
) -> None:
    first, second = service.join("a"), service.join("b")
    for instance, epoch in (("a", first), ("b", second)):
        service.store.declare(instance, epoch, "app", "old", ["x"])
    service.store.declare("a", first, "app", "new", ["x"])
    assert service.redis.exists(service.keys("declaration", "old"))
    service.store.declare("b", second, "app", "new", ["x"])
    assert not service.redis.exists(service.keys("declaration", "old"))
    assert service.redis.exists(service.keys("declaration", "new"))


def test_declare_leaves_nothing_of_what_nobody_declares(service: Service) -> None:
    a, b = service.join("a"), service.join("b")
    _declare(service, "a", a, "one", "x")
    _declare(service, "b", b, "one", "x")
    service.store.leave("a", a)
    assert service.redis.exists(service.keys("declaration", "one"))
    service.store.leave("b", b)
    assert not service.redis.exists(service.keys("declaration", "one"))


def test_undeclare_deletes_what_no_live_instance_declares(service: Service) -> None:
    a, b = service.join("a"), service.join("b")
    for name in "xyz":
        service.add(name, source="app")
    _declare(service, "a", a, "old", "x", "y")
    _declare(service, "b", b, "new", "x")
    assert _undeclare(service, "b", b, "y", "z") == ["z"]
    service.store.leave("a", a)
    assert _undeclare(service, "b", b, "y") == ["y"]
    assert service.store.static_timers("app") == {service.define("x").id}
    assert not service.exists(service.define("y").id)


def test_undeclare_spares_what_is_not_static_any_more(service: Service) -> None:
    a = service.join("a")
    timer = service.add("x", source="app")
    _declare(service, "a", a, "one")
    state = service.state(timer.id)
    row = (timer.id, state.revision, "active", "new", "active", "keep", "", "{}")
    assert _upsert(service, *row) == WRITTEN
    assert _undeclare(service, "a", a, "x") == []
    assert service.exists(timer.id)


def test_undeclare_waits_until_everybody_has_declared(service: Service) -> None:
    a = service.join("a")
    service.add("x", source="app")
    _declare(service, "a", a, "one")
    b = service.join("b")
    assert _undeclare(service, "a", a, "x") == []
    _declare(service, "b", b, "one")
    assert _undeclare(service, "b", b, "x") == ["x"]


def test_undeclare_does_not_delete_for_another_source(service: Service) -> None:
    """With no instance of the source alive, nobody asks; one of another source has no say."""
    a = service.join("a")
    timer = service.add("x", source="another")
    service.store.declare("a", a, "app", "one", [])
    assert service.store.undeclare("a", a, "app", [timer.id]) == []
    assert service.exists(timer.id)


def test_undeclare_takes_the_pending_triggers_along(service: Service) -> None:
    a = service.join("a")
    trigger = service.trigger(service.add("x", source="app"))
    _declare(service, "a", a, "one")
    assert _undeclare(service, "a", a, "x") == ["x"]
    assert not service.exists(trigger)


def test_undeclare_of_another_epoch_is_fenced(service: Service) -> None:
    service.join()
    with pytest.raises(FencedError):
        _undeclare(service, "a", OVER, "x")


# ------------------------------------------------------------------ purge


def test_purge_removes_finished_one_shots_in_their_time(service: Service) -> None:
    epoch = service.join()
    timers = [service.add(f"once{i}", at_ms=START_MS) for i in range(3)]
    paused = service.add("paused")
    service.store.pause(paused.id)
    service.commit("a", epoch, *(Settlement(due, "run") for due in service.due("a", epoch)))
    service.clock.now_ms = START_MS + KEEP_MS - 1
    assert service.store.purge() == 0
    service.clock.advance(0.001)
    assert service.store.purge(limit=2) == 2
    assert service.store.purge() == 1
    assert not any(service.exists(timer.id) for timer in timers)
    assert service.exists(paused.id)


def test_purge_spares_what_was_armed_again(service: Service) -> None:
    epoch = service.join()
    timer = service.add(at_ms=START_MS)
    service.commit("a", epoch, Settlement(service.due_one("a", epoch), "run"))
    service.add(at_ms=START_MS + 2 * KEEP_MS)
    service.clock.now_ms = START_MS + KEEP_MS + 1
    assert service.store.purge() == 0
    assert service.state(timer.id).status == "active"


@pytest.mark.parametrize("status", ["paused", "stopped", "broken", "active"])
def test_purge_leaves_what_has_a_time_by_hand(service: Service, status: str) -> None:
    service.is_damaged = True
    service.join()
    timer = service.add()
    service.store.pause(timer.id)
    service.set_field(timer.id, "status", status)
    service.redis.zadd(service.keys("inactive_timers"), {timer.id: 5})
    assert service.store.purge() == 0
    assert service.state(timer.id).status == status
    assert service.store.scores("inactive_timers") == {timer.id: float("inf")}


@pytest.mark.parametrize("damage", ["hash", "triggers"])
def test_purge_removes_what_is_left_of_a_timer(service: Service, damage: str) -> None:
    epoch = service.join()
    timer = service.add(at_ms=START_MS)
    service.commit("a", epoch, Settlement(service.due_one("a", epoch), "run"))
    if damage == "hash":
        service.redis.delete(service.keys("timer", timer.id))
    else:
        service.redis.set(service.keys("triggers", timer.id), "nonsense")
    service.clock.advance(KEEP_MS / 1000)
    assert service.store.purge() == 1
    assert not service.exists(timer.id)
