"""The consistency check finds each violation, and nothing where all is well."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from celery_dtimer import consistency
from celery_dtimer.consistency import Violation, check
from celery_dtimer.model import UNASSIGNED, Definition
from celery_dtimer.store import Settlement
from tests.integration.conftest import START_MS, Service

Damage = Callable[[Service, Definition], Any]

DAMAGE: dict[str, tuple[Damage, str]] = {
    "active, not queued": (
        lambda service, timer: service.redis.zrem(service.keys("timer_queue"), timer.id),
        f"is in the queue at None, its hash says {START_MS + 10_000}",
    ),
    "queued at another time": (
        lambda service, timer: service.redis.zadd(service.keys("timer_queue"), {timer.id: 5}),
        f"is in the queue at 5.0, its hash says {START_MS + 10_000}",
    ),
    "paused, but queued": (
        lambda service, timer: service.set_field(timer.id, "status", "paused"),
        "is paused, but still in the queue or owned",
    ),
    "stopped, but owned": (
        lambda service, timer: (
            service.store.stop(timer.id),
            service.redis.zadd(service.keys("instance_timers", "a"), {timer.id: 5}),
        ),
        "is stopped, but still in the queue or owned",
    ),
    "paused, not listed": (
        lambda service, timer: (
            service.set_field(timer.id, "status", "paused"),
            service.redis.zrem(service.keys("timer_queue"), timer.id),
        ),
        "is paused, but not listed as inactive",
    ),
    "active, but listed as inactive": (
        lambda service, timer: service.redis.zadd(service.keys("inactive_timers"), {timer.id: 5}),
        "is active, but listed as inactive",
    ),
    "owned by nobody": (
        lambda service, timer: service.redis.zrem(service.keys("instance_timers", "a"), timer.id),
        "is owned by [], its hash says a",
    ),
    "owned twice": (
        lambda service, timer: service.redis.zadd(
            service.keys("instance_timers", UNASSIGNED), {timer.id: START_MS + 10_000}
        ),
        f"is owned by ['a', '{UNASSIGNED}'], its hash says a",
    ),
    "owned by another than its hash says": (
        lambda service, timer: service.set_field(timer.id, "owner", "b"),
        "is owned by ['a'], its hash says b",
    ),
    "another time at its owner": (
        lambda service, timer: service.redis.zadd(
            service.keys("instance_timers", "a"), {timer.id: 5}
        ),
        "has another time at its owner than in its hash",
    ),
    "no hash": (
        lambda service, timer: service.redis.delete(service.keys("timer", timer.id)),
        "is listed, but there is no such timer",
    ),
    "another type": (
        lambda service, timer: (
            service.redis.delete(service.keys("timer", timer.id)),
            service.redis.set(service.keys("timer", timer.id), "nonsense"),
        ),
        "is listed, but there is no such timer",
    ),
}


@pytest.mark.parametrize(("damage", "problem"), DAMAGE.values(), ids=DAMAGE.keys())
def test_a_violation_is_found(service: Service, damage: Damage, problem: str) -> None:
    service.is_damaged = True
    service.join("a")
    timer = service.add()
    service.add_many(3, "good")
    damage(service, timer)
    assert Violation(timer.id, problem) in check(service.store)
    assert {found.id for found in check(service.store)} == {timer.id}


def test_timers_of_an_instance_that_is_not_registered_are_found(service: Service) -> None:
    service.is_damaged = True
    service.join("a")
    timer = service.add()
    service.redis.zrem(service.keys("service_instances"), "a")
    assert check(service.store) == [
        Violation("a", "owns timers, but is not registered"),
        Violation(timer.id, "is owned by [], its hash says a"),
    ]


def test_nothing_is_found_where_all_is_well(service: Service) -> None:
    assert check(service.store) == []
    service.add("nobody's")
    epoch = service.join("a")
    service.store.reap("a", epoch)
    active, paused, stopped, once, broken = (
        service.add(name, at_ms=START_MS) for name in ("active", "paused", "stopped", "once", "b")
    )
    service.store.pause(paused.id)
    service.store.stop(stopped.id)
    service.trigger(active)
    for due in service.due("a", epoch):
        if due.id == once.id:
            service.commit("a", epoch, Settlement(due, "run", summary=once.summary))
        if due.id == broken.id:
            service.commit("a", epoch, Settlement(due, "broken", reason="a reason"))
    service.join("b")
    service.store.rebalance("a", epoch)
    assert check(service.store) == []


def test_what_is_right_when_it_is_read_again_is_no_violation(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A timer that moved between two reads looked wrong once."""
    looks = iter([[Violation("x", "moved"), Violation("y", "wrong")], [Violation("y", "wrong")]])
    monkeypatch.setattr(consistency, "_read", lambda store: next(looks, [Violation("y", "wrong")]))
    assert check(service.store) == [Violation("y", "wrong")]


def test_a_violation_reads_as_a_line() -> None:
    assert str(Violation("x", "is wrong")) == "x: is wrong"
