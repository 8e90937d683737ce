"""The static schedules of several instances, each reconciled when the membership has changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from celery_dtimer.declarations import Declaration, StaticSchedule
from celery_dtimer.model import Lease, broken_blob, timer_id
from celery_dtimer.store import Settlement
from tests.integration.conftest import START_MS, Service

MakeCode = Callable[..., "Code"]

BROKEN = {"odd": (broken_blob("odd", "task"), "no schedule")}  # what code declares wrongly


class Code:
    """One instance that runs some code, with the static timers that the code declares."""

    def __init__(self, service: Service, instance: str, **timers: Any) -> None:
        self.service, self.instance = service, instance
        definitions = {name: service.define(name, args=(args,)) for name, args in timers.items()}
        broken = {name: entry for name, entry in BROKEN.items() if name in timers}
        definitions = {name: each for name, each in definitions.items() if name not in broken}
        declaration = Declaration("app", definitions, broken=broken)
        self.static = StaticSchedule(service.store, declaration, clock=self._seconds)
        self.epoch = service.join(instance)
        self.seen = -1

    def _seconds(self) -> float:
        return self.service.clock.now_ms / 1000

    def look(self) -> None:
        """Do what the loop does in each turn, once the time between two checks has passed."""
        self.service.clock.advance(10)
        self.static.step(Lease(self.instance, self.epoch, 1e9, members=self.seen))

    def reconcile(self) -> bool:
        """Do what the loop does after a heartbeat; return whether there was anything to do."""
        members = self.service.members()
        if members == self.seen:
            return False
        self.static.reconcile(Lease(self.instance, self.epoch, 1e9, members=members))
        self.seen = members
        return True


def settle(*codes: Code) -> None:
    """Let all instances reconcile until none has anything left to do."""
    for _ in range(5):
        if not sum(code.reconcile() for code in codes):
            return
    raise AssertionError("they never come to rest")


def stored(service: Service) -> dict[str, Any]:
    """Return the argument of each timer by name."""
    return {timer.name: timer.args[0] for timer in service.store.timers(service.store.timer_ids())}


def test_instances_of_one_code_write_each_timer_once(service: Service) -> None:
    a, b = Code(service, "a", x=1, y=2), Code(service, "b", x=1, y=2)
    settle(a, b)
    created = [service.state(id).created_ms for id in service.store.timer_ids()]
    service.clock.advance(5)
    settle(a, b, Code(service, "c", x=1, y=2))
    assert stored(service) == {"x": 1, "y": 2}
    assert [service.state(id).created_ms for id in service.store.timer_ids()] == created


def test_the_newest_code_counts_and_its_timers_alone_stay_once_the_older_is_gone(
    service: Service,
) -> None:
    old = Code(service, "old", x=1, y=1)
    settle(old)
    new = Code(service, "new", x=2)
    settle(old, new)
    assert stored(service) == {"x": 2, "y": 1}
    service.store.leave("old", old.epoch)
    settle(new)
    assert stored(service) == {"x": 2}


def test_older_code_that_starts_again_changes_nothing_while_the_newer_lives(
    service: Service,
) -> None:
    old = Code(service, "old", x=1, y=1)
    settle(old)
    new = Code(service, "new", x=2)
    settle(old, new)
    service.store.leave("old", old.epoch)
    settle(new)
    again = Code(service, "again", x=1, y=1)
    settle(new, again)
    assert stored(service) == {"x": 2}


@pytest.mark.parametrize("order", ["new first", "old first"])
def test_older_code_counts_again_once_the_newer_is_gone(service: Service, order: str) -> None:
    old = Code(service, "old", x=1)
    settle(old)
    new = Code(service, "new", x=2)
    settle(*([new, old] if order == "new first" else [old, new]))
    assert stored(service) == {"x": 2}
    service.store.leave("new", new.epoch)
    settle(old)
    assert stored(service) == {"x": 1}


def test_a_timer_that_nobody_declares_goes_whatever_the_order_of_the_starts(
    service: Service,
) -> None:
    """The newest code could not delete while another had not said what it declares."""
    first = Code(service, "first", x=1, gone=1)
    second = Code(service, "second", x=1)
    third = Code(service, "third", x=2)
    settle(first, second, third)
    service.store.leave("first", first.epoch)
    service.store.leave("second", second.epoch)
    restarted = Code(service, "restarted", x=1)
    settle(third, restarted)
    assert stored(service) == {"x": 2}


def test_timers_created_at_run_time_are_never_touched(service: Service) -> None:
    service.add("dynamic", args=(0,))
    code = Code(service, "a", x=1)
    settle(code)
    service.store.leave("a", code.epoch)
    settle(Code(service, "b"))
    assert stored(service) == {"dynamic": 0}


def test_with_nobody_of_the_source_alive_nothing_is_deleted(service: Service) -> None:
    code = Code(service, "a", x=1)
    settle(code)
    service.store.leave("a", code.epoch)
    service.join("of another source")
    assert stored(service) == {"x": 1}


@pytest.mark.parametrize("damage", ["deleted", "of another type", "without status"])
@pytest.mark.parametrize("found_by", ["dispatch", "scrub", "failover"])
def test_a_static_timer_damaged_by_hand_comes_back(
    service: Service, damage: str, found_by: str
) -> None:
    code = Code(service, "a", x=1, y=1)
    settle(code)
    x = service.define("x").id
    name = service.keys("timer", x)
    if damage == "without status":
        service.redis.hdel(name, "status")
    else:
        service.redis.delete(name)
    if damage == "of another type":
        service.redis.set(name, "nonsense")
    if found_by == "dispatch":
        service.clock.advance(10)
        missing = [due for due in service.due("a", code.epoch) if due.id == x]
        service.commit("a", code.epoch, *(Settlement(due, "missing") for due in missing))
    elif found_by == "scrub":
        service.store.scrub("a", code.epoch)
    else:
        old, code = code, Code(service, "b", x=1, y=1)
        service.store.leave("a", old.epoch)
    settle(code)
    assert stored(service) == {"x": 1, "y": 1}
    assert service.state(x).owner == code.instance


VANISHED: dict[str, Callable[[Service, str], Any]] = {
    "its state": lambda service, x: service.redis.delete(service.keys("timer", x)),
    "its definition": lambda service, x: service.redis.delete(service.keys("timer_definition", x)),
    "its state and its definition": lambda service, x: service.redis.delete(
        service.keys("timer", x), service.keys("timer_definition", x)
    ),
    "all of it": lambda service, x: (
        service.store.delete([x]),
        service.redis.delete(service.keys("static_timers", "app")),
    ),
    "its definition, edited": lambda service, x: service.redis.set(
        service.keys("timer_definition", x), '{"name": "x"}'
    ),
    "its state, a list": lambda service, x: (
        service.redis.delete(service.keys("timer", x)),
        service.redis.rpush(service.keys("timer", x), "nonsense"),
    ),
    "its revision": lambda service, x: service.redis.hdel(service.keys("timer", x), "revision"),
}


@pytest.mark.parametrize("damage", VANISHED.values(), ids=VANISHED.keys())
@pytest.mark.parametrize("repaired_first", [True, False])
def test_a_static_timer_that_vanished_is_written_again_with_the_next_look(
    service: Service, damage: Callable[[Service, str], Any], repaired_first: bool
) -> None:
    code = Code(service, "a", x=1, y=1)
    settle(code)
    x = service.define("x").id
    damage(service, x)
    if repaired_first:  # whichever comes first
        service.store.scrub("a", code.epoch)
    code.look()
    assert stored(service) == {"x": 1, "y": 1}
    assert service.state(x).status == "active"
    service.store.scrub("a", code.epoch)
    service.store.reap("a", code.epoch)
    code.look()
    settle(code)
    assert stored(service) == {"x": 1, "y": 1}
    assert service.state(x).status == "active"


def test_a_static_timer_broken_by_hand_is_written_again_and_one_broken_by_its_code_is_not(
    service: Service,
) -> None:
    code = Code(service, "a", x=1, y=1)
    settle(code)
    service.clock.advance(10)
    by_id = {due.id: due for due in service.due("a", code.epoch)}
    x, y = service.define("x").id, service.define("y").id
    reasons = {x: "damaged: its definition is gone", y: "unknown serializer"}
    for id, reason in reasons.items():
        service.commit("a", code.epoch, Settlement(by_id[id], "broken", reason=reason))
    code.look()
    assert service.state(x).status == "active"
    assert service.state(y).reason == "unknown serializer"


def test_an_entry_that_cannot_be_read_is_listed_again_when_it_has_vanished(
    service: Service,
) -> None:
    code = Code(service, "a", x=1, odd=1)
    settle(code)
    odd = timer_id("odd")
    service.store.delete([odd])
    code.look()
    assert service.state(odd).reason == "no schedule"
    revision = service.state(odd).revision
    code.look()
    assert service.state(odd).revision == revision


def test_nobody_looks_for_what_only_an_older_declaration_has(service: Service) -> None:
    old, new = Code(service, "old", x=1), Code(service, "new", y=1)
    settle(old)
    settle(old, new)
    service.store.delete([service.define("x").id])
    old.look()
    new.look()
    assert stored(service) == {"y": 1}


def test_a_large_declaration_is_looked_through_a_part_at_a_time(service: Service) -> None:
    code = Code(service, "a", **{f"t{i}": i for i in range(600)})
    settle(code)
    last = service.define("t599").id
    service.store.delete([last])
    code.look()
    assert not service.exists(last)
    code.look()
    assert service.exists(last)


def test_all_comes_back_after_redis_has_lost_its_data(service: Service) -> None:
    code = Code(service, "a", x=1)
    settle(code)
    for key in service.redis.scan_iter(f"{service.settings.key_prefix}*"):
        service.redis.delete(key)
    code.epoch, code.seen = service.join("a"), -1
    assert code.epoch > START_MS - 1
    settle(code)
    assert stored(service) == {"x": 1}


def test_a_static_timer_edited_by_hand_does_not_stop_the_others(service: Service) -> None:
    settle(Code(service, "a", x=1, y=1))
    for field in ("created", "due", "at", "runs", "last_run", "last_sent", "skipped"):
        service.set_field(service.define("x").id, field, "nonsense")
    settle(Code(service, "b", x=2, y=2))
    assert stored(service) == {"x": 2, "y": 2}
