"""Timers that move between instances because somebody asks for it: drained, and evened out."""

from __future__ import annotations

from typing import Any

import pytest

from celery_dtimer import (
    ConflictError,
    DistributedTimer,
    InstanceNotFoundError,
    InvalidTimerError,
    StoreUnavailableError,
    draining,
)
from celery_dtimer.draining import drain, even_out, undrain
from celery_dtimer.resharding import reshard
from celery_dtimer.sharding import Shards
from celery_dtimer.store import Store
from tests.conftest import MakeApp, ReadQueue
from tests.integration.conftest import MakeService, Service, StartTimers
from tests.ledger import QueueReader
from tests.waiting import wait_until

NAMES = [f"timer-{number}" for number in range(60)]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Be patient for no longer than a test is."""
    monkeypatch.setattr(draining, "_PATIENCE", 0.01)


def statuses(shards: Shards) -> dict[str, str]:
    return {each.id: each.status for each in shards.instances()}


def loads(shards: Shards) -> dict[str, int]:
    return {each.id: each.timers for each in shards.instances()}


def join_all(shards: Shards, *instances: str) -> None:
    """Register instances in every shard that they are not in yet."""
    for store in shards.stores:
        known = {each.id for each in store.instances()}
        for instance in sorted(set(instances) - known):
            store.register(instance, {"service": "orders", "host": "h", "port": 1})


def test_a_drained_instance_has_nothing_and_the_count_is_told(service: Service) -> None:
    join_all(service.shards, "a", "b", "c")
    service.add_many(300, every=3600)
    told: list[int] = []
    assert drain(service.shards, "a", told.append) == 100
    assert told == [100]
    assert loads(service.shards) == {"a": 0, "b": 150, "c": 150}
    assert drain(service.shards, "a") == 0


def test_draining_who_is_not_there_names_who_is(service: Service) -> None:
    join_all(service.shards, "host-1:77:aa", "host-2:78:bb")
    with pytest.raises(InstanceNotFoundError, match="host-1:77:ab'; there are: host-1:77:aa"):
        drain(service.shards, "host-1:77:ab")
    with pytest.raises(InstanceNotFoundError, match="there are: host-1:77:aa, host-2:78:bb"):
        undrain(service.shards, "Ω")


def test_draining_where_nobody_is_says_so(service: Service) -> None:
    with pytest.raises(InstanceNotFoundError, match="none is registered"):
        drain(service.shards, "a")


def test_the_last_one_is_not_drained(service: Service) -> None:
    join_all(service.shards, "a", "b")
    service.add_many(4)
    drain(service.shards, "a")
    with pytest.raises(ConflictError, match="no other live instance"):
        drain(service.shards, "b")
    assert statuses(service.shards) == {"a": "draining", "b": "active"}
    assert loads(service.shards) == {"a": 0, "b": 4}


def test_who_is_drained_in_no_shard_when_one_of_them_has_nobody_else(
    make_service: MakeService,
) -> None:
    service = make_service(shards=3)
    join_all(service.shards, "a")
    first, *_ = service.shards.stores
    first.register("b", {"service": "orders", "host": "h", "port": 1})
    with pytest.raises(ConflictError):
        drain(service.shards, "a")
    assert statuses(service.shards) == {"a": "active", "b": "active"}


def test_all_shards_are_drained_and_evened_out(make_service: MakeService) -> None:
    service = make_service(shards=3)
    shards = service.shards
    join_all(shards, "a", "b")
    shards.save([service.define(name, every=3600) for name in NAMES])
    owned = loads(shards)["a"]
    assert drain(shards, "a") == owned > 0
    assert loads(shards) == {"a": 0, "b": 60}
    assert even_out(shards) == 0
    assert undrain(shards, "a")
    assert not undrain(shards, "a")
    even_out(shards)
    assert max(loads(shards).values()) - min(loads(shards).values()) <= 3


def test_what_is_drained_stays_so_while_the_service_is_given_other_shards(
    service: Service, make_service: MakeService
) -> None:
    shards = service.shards
    join_all(shards, "a", "b")
    shards.save([service.define(name, every=3600) for name in NAMES])
    drain(shards, "a")
    layout = shards.base.begin_resharding(3)
    shards.take(layout)
    join_all(make_service(shards=3).shards, "a", "b")
    reshard(shards, 3)
    assert statuses(shards)["a"] == "draining"
    assert loads(shards) == {"a": 0, "b": 60}


def test_an_instance_is_drained_while_the_service_is_given_other_shards(
    service: Service, make_service: MakeService
) -> None:
    shards = service.shards
    join_all(shards, "a", "b")
    shards.save([service.define(name, every=3600) for name in NAMES])
    shards.take(shards.base.begin_resharding(3))
    join_all(make_service(shards=3).shards, "a", "b")
    drain(shards, "a")
    assert loads(shards) == {"a": 0, "b": 60}
    reshard(shards, 3)
    assert loads(shards) == {"a": 0, "b": 60}


@pytest.mark.usefixtures("quick")
def test_what_is_being_published_is_waited_for_and_then_told(service: Service) -> None:
    join_all(service.shards, "a", "b")
    service.add_many(4)
    first, _ = service.store.owned_ids("a")
    service.redis.hset(service.keys("instance", "a"), "in_flight", first)
    with pytest.raises(StoreUnavailableError, match="1 timers of instance a can not be moved"):
        drain(service.shards, "a")
    assert loads(service.shards) == {"a": 1, "b": 3}
    service.redis.hdel(service.keys("instance", "a"), "in_flight")
    assert drain(service.shards, "a") == 1


def test_another_mover_is_waited_for(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    join_all(service.shards, "a", "b", "c")
    service.add_many(6)
    meta, now = service.keys("meta"), service.clock.now_ms
    service.redis.hset(meta, mapping={"mover": "c", "mover_until": now + 500})
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        service.clock.advance(0.3)

    monkeypatch.setattr("celery_dtimer.draining.time.sleep", sleep)
    assert drain(service.shards, "a") == 2
    assert slept


# ------------------------------------------------------------------ evening out


def test_evening_out_ends_when_nobody_is_there(service: Service) -> None:
    service.add_many(4)
    assert even_out(service.shards) == 0


def test_evening_out_leaves_no_drift(service: Service) -> None:
    a = service.join("a")
    service.add_many(210, every=3600)
    b = service.join("b")
    while service.store.rebalance("a", a).count:
        pass
    service.store.delete(service.store.owned_ids("b")[:10])
    assert service.store.rebalance("b", b, 10).count == 0
    assert even_out(service.shards) == 5
    assert loads(service.shards) == {"a": 100, "b": 100}
    assert even_out(service.shards) == 0


def test_evening_out_goes_on_with_another_when_one_is_gone_meanwhile(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    service.join("a")
    service.add_many(4, every=3600)
    service.join("b")
    instances = Store.instances

    def outdated(store: Store) -> list[Any]:
        found = instances(store)
        service.join("a")
        return found

    monkeypatch.setattr(Store, "instances", outdated)
    assert even_out(service.shards) == 2


@pytest.mark.usefixtures("quick")
def test_evening_out_does_not_wait_for_ever(service: Service) -> None:
    service.join("a")
    service.add_many(6)
    service.join("b")
    service.clock.advance(9.99)  # all are imminent
    assert even_out(service.shards) == 0
    service.redis.hset(
        service.keys("meta"), mapping={"mover": "c", "mover_until": service.clock.now_ms + 1000}
    )
    assert even_out(service.shards) == 0


# ------------------------------------------------------------------ with schedulers


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("dispatch", ["atomic", "confirmed"])
def test_three_schedulers_fire_every_run_once_while_they_are_drained_in_turn(
    make_app: MakeApp,
    start_timers: StartTimers,
    read_queue: ReadQueue,
    dispatch: str,
    shards: int,
) -> None:
    app = make_app(dtimer_dispatch=dispatch, dtimer_shards=shards, dtimer_coalesce=False)
    reader = read_queue(app)
    first, second, third = (start_timers(app) for _ in range(3))
    wait_until(lambda: len(first.get_service_instances()) == 3, "all are registered")
    first.create_timers(
        {"name": name, "schedule": 0.5, "callback": "tasks.record"} for name in NAMES
    )
    wait_until(lambda: set(NAMES) <= reader.ledger.names(), "every timer to be sent", 15)
    for instance in (first.start(), second.start(), third.start()):
        first.drain_instance(instance)
        assert loads(first.store)[instance] == 0
        drained_ms = first.store.now_ms()
        wait_for_all(reader, drained_ms)
        assert loads(first.store)[instance] == 0
        assert first.undrain_instance(instance)
    first.rebalance()
    wait_for_all(reader, first.store.now_ms())
    until = min(reader.ledger.latest()[name] for name in NAMES)
    reader.ledger.assert_every_run_once(NAMES, 500, until)


def wait_for_all(reader: QueueReader, moment_ms: int) -> None:
    """Wait until every timer was sent for a run after a moment."""
    wait_until(
        lambda: all(reader.ledger.latest()[name] > moment_ms for name in NAMES),
        "every timer to be sent after it",
        15,
    )


def test_the_methods_refuse_what_is_no_id(make_app: MakeApp) -> None:
    timers = DistributedTimer(make_app())
    for wrong in (None, 3, ""):
        for method in (timers.drain_instance, timers.undrain_instance):
            with pytest.raises(InvalidTimerError, match="instance="):
                method(wrong)  # type: ignore[arg-type]
    assert timers.rebalance() == 0
    with pytest.raises(InstanceNotFoundError):
        timers.drain_instance("x")


def test_a_drained_scheduler_that_is_the_last_one_goes_on_firing(
    make_app: MakeApp, start_timers: StartTimers, read_queue: ReadQueue
) -> None:
    app = make_app()
    first, second = start_timers(app), start_timers(app)
    wait_until(lambda: len(first.get_service_instances()) == 2, "both are registered")
    first.drain_instance(first.start())
    first.create_timer("each", 0.2, "tasks.record")
    assert first.get_instance_timers() == []
    second.stop()
    reader = read_queue(app)
    wait_until(lambda: "each" in reader.ledger.names(), "the drained one to fire", 15)
    assert [timer.name for timer in first.get_timers(instance=first.start(), name="each")]
