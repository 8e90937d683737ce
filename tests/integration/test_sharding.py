"""A service that is split into shards: what belongs where, and how it is given other shards."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from celery_dtimer import DistributedTimer, resharding
from celery_dtimer.errors import (
    ConflictError,
    SettingsError,
    StoreUnavailableError,
    TooManyTimersError,
)
from celery_dtimer.model import Definition, TimerState, shard_of, timer_id
from celery_dtimer.moving import move, move_all
from celery_dtimer.planning import Plan
from celery_dtimer.resharding import reshard
from celery_dtimer.schedules import OneShot
from celery_dtimer.sharding import Shards, shards_of
from celery_dtimer.store import (
    HAS_BEEN,
    PUBLISHING,
    WRITTEN,
    HeldRun,
    Incoming,
    Keys,
    Layout,
    LayoutChangedError,
    OutRun,
    Reading,
    Settlement,
    Store,
)
from tests.conftest import MakeApp, ReadQueue
from tests.integration.conftest import SECOND, START_MS, MakeService, Service, StartTimers
from tests.waiting import wait_until

#: A layout that calls by the first one are refused by.
NEWER = Layout(1, 0, 2, (1,))
NAMES = [f"timer-{number}" for number in range(30)]


def name_in(shard: str, shards: int, start: str = "timer") -> str:
    """Return a timer's name that belongs to a shard."""
    names = (f"{start}-{number}" for number in range(1000))
    return next(name for name in names if shard_of(timer_id(name), shards) == shard)


def states(shards: Shards, names: list[str]) -> list[TimerState | None]:
    return shards.states([timer_id(name) for name in names])


def where(shards: Shards) -> dict[str, set[str]]:
    """Return the timers that each shard lists."""
    return {store.keys.shard: set(store.timer_ids()) for store in shards.stores}


# ------------------------------------------------------------------ where a timer belongs


def test_the_shard_is_fnv_1a_of_the_id() -> None:
    """Compared with the values that the authors of the algorithm publish."""
    assert shard_of("", 2**31) == str(0x811C9DC5 % 2**31)
    assert shard_of("a", 2**31) == str(0xE40C292C % 2**31)
    assert shard_of("foobar", 2**31) == str(0xBF9CF968 % 2**31)
    assert shard_of("anything", 1) == ""


def test_timers_are_spread_evenly() -> None:
    counts = [0] * 8
    for number in range(8000):
        counts[int(shard_of(timer_id(f"t{number}"), 8))] += 1
    assert max(counts) - min(counts) < 200


def test_the_shards_of_a_service_are_in_order() -> None:
    assert shards_of(1) == [""]
    assert shards_of(1, 3) == ["", "0", "1", "2"]
    assert shards_of(12)[-1] == "11"


def test_the_keys_of_a_shard_have_its_own_hash_tag(service: Service) -> None:
    store = service.shards.store("2")
    assert store.keys("timer", "x").endswith(":{orders.2}:x")
    assert store.keys("meta") != service.shards.base.keys("meta")


def test_a_service_with_a_dot_in_its_name_is_no_shard() -> None:
    assert Keys("orders", shard="2")("meta") == "meta:{orders.2}"
    assert Keys("orders.2")("meta") == "meta:{orders%2E2}"


# ------------------------------------------------------------------ layout


def test_layout_of_a_new_service_is_what_the_first_who_asks_has_set(service: Service) -> None:
    assert service.store.read_layout(3) == Layout(3, 0, 0, (3,))
    assert service.store.read_layout(5) == Layout(3, 0, 0, (3,))


def test_layout_of_a_service_that_has_timers_and_no_word_of_shards_is_one(
    service: Service,
) -> None:
    service.add()
    assert service.store.read_layout(3) == Layout(1, 0, 0, (1,))


def test_layout_of_a_service_that_has_an_instance_is_one_too(service: Service) -> None:
    service.join()
    assert service.store.read_layout(3).shards == 1


WRONG = ("0", "-1", "65", "1e9", "nan", "inf", "2.5", "many", "")


@pytest.mark.parametrize("wrong", WRONG)
def test_layout_that_was_edited_into_none_is_what_is_set(service: Service, wrong: str) -> None:
    service.store.read_layout(3)
    service.store.begin_resharding(5)
    service.store.end_resharding(service.store.layout_number())
    service.add()
    for field in ("shards", "shards_wanted", "layout"):
        service.redis.hset(service.keys("meta"), field, wrong)
    layout = service.store.read_layout(5)
    assert (layout.shards, layout.wanted, layout.seen) == (5, 0, (3, 5))
    assert service.store.begin_resharding(2)[:2] == (5, 2)
    assert service.store.end_resharding(service.store.layout_number())[:2] == (2, 0)
    service.redis.hset(service.keys("meta"), "shards_seen", f"3 {wrong}")
    assert set(service.store.read_layout(2).seen) <= {2, 3}


def test_layout_that_is_asked_for_is_not_decided(service: Service) -> None:
    assert service.store.stored_layout() is None
    assert not service.redis.exists(service.keys("meta"))


@pytest.mark.parametrize("wanted", [0, 4])
def test_layout_that_is_forgotten_is_what_a_shard_was_told(service: Service, wanted: int) -> None:
    told = Layout(2, wanted, 7, (1, 2, 4))
    assert service.store.read_layout(3, told=str(told)) == told
    assert service.store.read_layout(3) == told


@pytest.mark.parametrize("told", ["", "nonsense", "0 0 7 2", "65 0 7 2", "2 0 7"])
def test_layout_by_a_word_that_can_not_be_read_is_what_is_set(service: Service, told: str) -> None:
    assert service.store.read_layout(3, told=told) == Layout(3, 0, 0, (3,))


def test_layout_has_the_number_that_shards_have_heard_of(service: Service) -> None:
    service.store.read_layout(3)
    assert service.store.read_layout(3, least=9) == Layout(3, 0, 9, (3,))
    assert service.store.read_layout(3, least=8) == Layout(3, 0, 9, (3,))


@pytest.mark.parametrize("configured", [1, 2])
def test_a_service_that_forgets_its_layout_is_told_by_a_shard(
    make_service: MakeService, configured: int
) -> None:
    service = make_service()
    service.add()
    reshard(service.shards, 2)
    layout = service.shards.layout
    service.redis.delete(service.keys("meta"))
    fresh = make_service(shards=configured).shards
    if configured == 1:
        with pytest.raises(SettingsError, match="has: 2"):
            fresh.timer_ids()
    else:
        assert len(fresh.timer_ids()) == 1
    assert service.shards.read_layout() == layout


def test_a_number_that_was_edited_in_a_shard_is_the_layouts(service: Service) -> None:
    reshard(service.shards, 2)
    timer = service.define()
    for shard in ("0", "1"):
        service.redis.hset(service.shards.store(shard).keys("meta"), "layout_here", "99")
    service.shards.save([timer])
    assert service.shards.layout.number == 99


@pytest.mark.parametrize("configured", [1, 2, 4])
def test_a_setting_that_differs_from_the_layout_is_refused(
    make_service: MakeService, configured: int
) -> None:
    make_service(shards=3).shards.read_layout()
    other = make_service(shards=configured).shards
    with pytest.raises(SettingsError, match=rf"dtimer_shards={configured} differs.*has: 3\."):
        other.states(["x"])


def test_while_it_is_given_others_both_settings_are_accepted(make_service: MakeService) -> None:
    make_service(shards=2).store.read_layout(2)
    make_service().store.begin_resharding(3)
    for configured in (2, 3):
        assert make_service(shards=configured).shards.layout.wanted == 3
    with pytest.raises(SettingsError, match="has: 3"):
        make_service(shards=1).shards.read_layout()


# ------------------------------------------------------------------ begin and end of a resharding


def test_begin_resharding_notes_what_is_wanted(service: Service) -> None:
    service.store.read_layout(1)
    assert service.store.begin_resharding(3) == Layout(1, 3, 1, (1, 3))


def test_begin_resharding_to_what_it_has_changes_nothing(service: Service) -> None:
    before = service.store.read_layout(3)
    assert service.store.begin_resharding(3) == before


def test_begin_resharding_while_another_goes_on_tells_of_that_one(service: Service) -> None:
    service.store.begin_resharding(3)
    assert service.store.begin_resharding(5) == Layout(1, 3, 1, (1, 3))
    with pytest.raises(ConflictError, match=r"being given 3 shards.*by reshard\(3\)"):
        reshard(service.shards, 5)


def test_end_resharding_lets_the_new_layout_hold(service: Service) -> None:
    service.store.begin_resharding(3)
    assert service.store.end_resharding(service.store.layout_number()) == Layout(3, 0, 2, (1, 3))


def test_end_resharding_of_nothing_changes_nothing(service: Service) -> None:
    before = service.store.read_layout(3)
    assert service.store.end_resharding(service.store.layout_number()) == before


# ------------------------------------------------------------------ mark_layout


def test_mark_layout_is_done_once(service: Service) -> None:
    before = service.members()
    assert service.store.mark_layout(NEWER)
    assert service.members() == before + 1, "instances are told"
    assert not service.store.mark_layout(NEWER)
    assert not service.store.mark_layout(NEWER._replace(number=1))
    assert service.members() == before + 1


WRITES: dict[str, Callable[[Store, Definition], Any]] = {
    "upsert": lambda store, timer: store.save([timer]),
    "delete": lambda store, timer: store.delete([timer.id]),
    "pause": lambda store, timer: store.pause(timer.id),
    "resume": lambda store, timer: store.resume(
        TimerState(timer.id, "paused", timer.revision, START_MS), Plan(START_MS + 5)
    ),
    "stop": lambda store, timer: store.stop(timer.id),
    "trigger": lambda store, timer: store.trigger(timer.id, "t" * 26),
    "hold": lambda store, timer: store.hold(timer, delay_ms=5),
    "cancel": lambda store, timer: store.cancel([timer.id]),
    "requeue": lambda store, timer: store.requeue("letter", "again", timer.id, "r", timer.blob),
    "declare": lambda store, timer: store.declare("a", 1, "app", "digest", [timer.id]),
    "run_started": lambda store, timer: store.run_started(
        OutRun("run", timer.id, message="m"), lease_ms=9, limit_ms=0, redelivered=False
    ),
    "run_ended": lambda store, timer: store.run_ended(OutRun("run", timer.id), "succeeded"),
    "renew_runs": lambda store, _: store.renew_runs([("run", "m")], 9),
    "undeclare": lambda store, timer: store.undeclare("a", 1, "app", [timer.id]),
}


@pytest.mark.parametrize("write", WRITES)
def test_mark_layout_has_writes_by_an_older_one_refused(service: Service, write: str) -> None:
    service.store.mark_layout(NEWER)
    timer = service.define()
    keys = set(service.redis.scan_iter(service.keys("*") + "*"))
    with pytest.raises(LayoutChangedError):
        WRITES[write](Store(service.settings, layout=1), timer)
    assert set(service.redis.scan_iter(service.keys("*") + "*")) == keys
    if write not in ("declare", "undeclare"):  # those are for instances
        WRITES[write](Store(service.settings, layout=2), timer)


# ------------------------------------------------------------------ depart


def test_depart_takes_a_timer_out_and_tells_all_of_it(service: Service) -> None:
    timer = service.add(every=10)
    ((code, blob, until, fields, out),) = service.store.depart([timer.id])
    assert (code, blob, until, out) == (1, timer.blob, "", [])
    told = dict(zip(fields[::2], fields[1::2], strict=True))
    assert told["status"] == "active"
    assert told["due"] == told["at"] == str(START_MS + 10 * SECOND)
    assert service.store.timer_ids() == []
    assert service.store.departing() == [timer.id]


def test_depart_again_is_answered_the_same(service: Service) -> None:
    timer = service.add()
    service.store.pause(timer.id)
    first = service.store.depart([timer.id])
    assert service.store.depart([timer.id]) == first
    assert first[0][2] == "inf"


def test_depart_of_what_is_not_there_says_so(service: Service) -> None:
    assert service.store.depart(["nothing"]) == [[0]]


def test_depart_waits_for_a_run_that_is_being_published(service: Service) -> None:
    epoch = service.join()
    timer = service.add(every=1)
    service.let_pass(1, a=epoch)
    service.redis.hset(service.keys("instance", "a"), "in_flight", timer.id)
    assert service.store.depart([timer.id]) == [[2]]
    assert service.store.timer_ids() == [timer.id]
    service.clock.advance(31)  # nobody is at work any more
    assert service.store.depart([timer.id])[0][0] == 1


def test_depart_has_triggers_go_first(service: Service) -> None:
    timer = service.add()
    trigger = service.trigger(timer)
    assert service.store.depart([timer.id]) == [[3, trigger]]
    target = service.shards.store("1")
    assert move(service.store, target, [timer.id]) == []
    assert set(target.timer_ids()) == {timer.id, trigger}
    assert target.delete([timer.id]) == [True]
    assert target.timer_ids() == [], "the trigger went with its timer"


def test_depart_leaves_nothing_to_commit(service: Service) -> None:
    epoch = service.join()
    timer = service.add(every=1)
    service.let_pass(1, a=epoch)
    due = service.due_one("a", epoch)
    service.store.depart([timer.id])
    assert service.commit("a", epoch, service.ran(due)) == [-4]


def test_depart_with_a_key_of_another_type_writes_nothing(service: Service) -> None:
    timer = service.add()
    service.redis.set(service.keys("departing"), "edited")
    with pytest.raises(Exception, match="WRONGTYPE"):
        service.store.depart([timer.id])
    assert service.state(timer.id).status == "active"


# ------------------------------------------------------------------ arrive, moved


def departed(service: Service, *ids: str) -> dict[str, Any]:
    return dict(zip(ids, service.store.depart(ids), strict=True))


@pytest.mark.parametrize("change", ["", "pause", "stop"])
def test_arrive_leaves_a_timer_as_it_was(service: Service, change: str) -> None:
    epoch = service.join()
    timer = service.add(every=1, source="app")
    service.let_pass(1, a=epoch)
    assert service.commit("a", epoch, service.ran(service.due_one("a", epoch), 1)) == [1]
    if change:
        getattr(service.store, change)(timer.id)
    before = service.state(timer.id)
    target = service.shards.store("1")
    target_epoch = target.register("a", {}).epoch
    assert move(service.store, target, [timer.id]) == []
    ((after,),) = (target.states([timer.id])[1],)
    assert after == before
    assert target.definitions([timer.id]) == [timer.blob]
    assert target.static_timers("app") == {timer.id}
    assert service.store.static_timers("app") == set()
    assert not service.exists(timer.id)
    assert service.store.departing() == []
    if not change:
        service.clock.advance(1)
        (due,) = target.due("a", target_epoch, Reading(10)).timers
        assert (due.id, due.run_number) == (timer.id, 2)


def test_arrive_without_an_instance_leaves_it_to_the_first(service: Service) -> None:
    timer = service.add()
    target = service.shards.store("1")
    move(service.store, target, [timer.id])
    assert target.owned_ids("unassigned") == [timer.id]


def test_arrive_twice_is_once_also_when_it_was_deleted_since(service: Service) -> None:
    timer = service.add()
    leaving = departed(service, timer.id)
    target = service.shards.store("1")
    assert target.arrive(leaving) == 1
    assert target.arrive(leaving) == 0
    target.delete([timer.id])
    service.store.moved([timer.id])
    target.moved([timer.id])
    assert target.arrive(leaving) == 0, "somebody was slow"
    assert target.timer_ids() == []


def test_arrive_where_it_was_before_is_no_arrival_of_then(service: Service) -> None:
    """There and back, and there again, within the time that arrivals are remembered."""
    timer, here, there = service.add(), service.store, service.shards.store("1")
    for layout, (source, target) in enumerate(((here, there), (there, here), (here, there))):
        here.layout = there.layout = layout
        assert move(source, target, [timer.id]) == []
        assert (source.timer_ids(), target.timer_ids()) == ([], [timer.id])


def test_a_timer_that_was_deleted_and_created_anew_moves_as_any(service: Service) -> None:
    service.add("again")
    reshard(service.shards, 2)
    service.shards.delete(timer_id("again"))
    reshard(service.shards, 1)
    service.shards.save([service.define("again")])
    for count in (2, 1, 2):
        assert reshard(service.shards, count) == 1
        assert service.shards.timer_ids() == [timer_id("again")]


def test_dead_letters_and_leases_move_there_and_back_and_there_again(service: Service) -> None:
    letter = letter_of(service)
    timer = service.add("running")
    run = OutRun("run-1", timer.id, START_MS, 1, message="m")
    service.store.run_started(run, lease_ms=600 * SECOND, limit_ms=0, redelivered=False)
    for count in (2, 1, 2, 1):
        reshard(service.shards, count)
        assert service.shards.dead_letters() == [letter]
        assert service.shards.out_run("run-1") is not None


def test_a_call_that_is_slower_than_another_one_ends_nothing_else(
    make_service: MakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, quick = make_service().shards, make_service().shards
    run = resharding._Move.run

    def run_slowly(mover: Any) -> None:
        monkeypatch.setattr(resharding._Move, "run", run)
        mover.run()
        reshard(quick, 2)
        quick.base.begin_resharding(5)

    monkeypatch.setattr(resharding._Move, "run", run_slowly)
    with pytest.raises(ConflictError, match="is being given 5 shards by another call"):
        reshard(slow, 2)
    assert quick.read_layout().wanted == 5


def test_a_call_that_finds_the_work_done_by_another_one_is_done(
    make_service: MakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = make_service()
    service.add()
    slow, quick = make_service().shards, make_service().shards
    run = resharding._Move.run

    def run_late(mover: Any) -> None:
        monkeypatch.setattr(resharding._Move, "run", run)
        reshard(quick, 2)
        mover.run()

    monkeypatch.setattr(resharding._Move, "run", run_late)
    assert reshard(slow, 2) == 0
    assert slow.layout == quick.layout


def test_a_move_by_an_older_layout_changes_nothing(service: Service) -> None:
    timer, source, target = service.add(), service.store, service.shards.store("1")
    source.layout = target.layout = 1
    leaving = departed(service, timer.id)
    source.mark_layout(NEWER)
    target.mark_layout(NEWER)
    steps: list[Callable[[], Any]] = [
        lambda: source.depart([timer.id]),
        lambda: target.arrive(leaving),
        lambda: source.moved([timer.id]),
        lambda: source.drop_leases(["run-1"]),
    ]
    for step in steps:
        with pytest.raises(LayoutChangedError):
            step()
    assert source.departing() == [timer.id]


def test_arrive_brings_the_runs_that_are_out(service: Service) -> None:
    timer = service.add()
    run = OutRun("run-1", timer.id, START_MS, 1, message="m")
    held = (timer.id, START_MS, 1, "skip", 0, ("run-1",))
    epoch = service.join()
    service.store.open_runs("a", epoch, [HeldRun(*held)])
    service.store.run_started(run, lease_ms=60 * SECOND, limit_ms=0, redelivered=False)
    target = service.shards.store("1")
    move(service.store, target, [timer.id])
    assert service.store.out_run("run-1") is None
    assert target.out_run("run-1") == run
    target_epoch = target.register("a", {}).epoch
    later = HeldRun(timer.id, START_MS + 1, 2, "skip", 0, ("run-2",))
    assert target.open_runs("a", target_epoch, [later]) == ["busy"]
    assert target.run_ended(run, "succeeded")
    assert target.open_runs("a", target_epoch, [later]) == ["open"]


def test_moved_forgets_only_what_is_moving(service: Service) -> None:
    timer, other = service.add("one"), service.add("two")
    service.store.depart([timer.id])
    assert service.store.moved([timer.id, other.id]) == 1
    assert service.store.timer_ids() == [other.id]


def test_moved_forgets_arrivals_after_a_while(service: Service) -> None:
    timer = service.add()
    target = service.shards.store("1")
    move(service.store, target, [timer.id])
    assert set(target.scores("arrivals")) == {f":{timer.id}"}
    service.clock.advance(601)
    target.moved(["another"])
    assert target.scores("arrivals") == {}


def test_what_is_being_published_is_waited_for_and_then_refused(service: Service) -> None:
    epoch = service.join()
    timer = service.add()
    service.redis.hset(service.keys("instance", "a"), "in_flight", timer.id)
    assert epoch
    with pytest.raises(StoreUnavailableError, match="its run is being published; try again"):
        move_all(service.store, service.shards.store("1"), [timer.id], 0.05)


def test_scrub_leaves_what_is_on_its_way_and_knows_it_again(service: Service) -> None:
    epoch = service.join()
    timer = service.add()
    service.store.depart([timer.id])
    keys = [("timer", timer.id)]
    assert service.store.scrub("a", epoch, keys=keys)[1] == []
    service.redis.delete(service.keys("departing"))
    ((_, id, wrong),) = service.store.scrub("a", epoch, keys=keys)[1]
    assert (id, wrong) == (timer.id, "it was on its way to another shard: it goes on")
    assert service.store.departing() == [timer.id]


# ------------------------------------------------------------------ leases and letters


def test_arrive_runs_puts_each_lease_once(service: Service) -> None:
    run = OutRun("run-1", "x" * 26, START_MS, 1, message="m")
    service.store.run_started(run, lease_ms=60 * SECOND, limit_ms=0, redelivered=False)
    target = service.shards.store("1")
    ((text,),) = [[text for _, text in page] for page in service.store.leases()]
    for _ in range(2):
        service.store.move_leases([("run-1", text)], target)
    assert target.out_run("run-1") == run
    assert service.store.out_run("run-1") is None
    assert target.scores("run_leases") == {"run-1": START_MS + 60 * SECOND}


def test_drop_runs_forgets_leases(service: Service) -> None:
    run = OutRun("run-1", "x" * 26, START_MS, 1, message="m")
    service.store.run_started(run, lease_ms=60 * SECOND, limit_ms=0, redelivered=False)
    service.store.drop_leases(["run-1", "run-2"])
    assert service.store.out_run("run-1") is None
    assert service.store.scores("run_leases") == {}


def letter_of(service: Service) -> tuple[str, Any]:
    epoch = service.join()
    timer = service.add(every=1)
    service.let_pass(1, a=epoch)
    settlement = Settlement(service.due_one("a", epoch), "broken", reason="why")
    service.commit("a", epoch, settlement)
    service.store.leave("a", epoch)  # else a resharding waits for it
    (letter,) = service.store.dead_letters()
    assert letter[1]["timer"] == timer.id
    return letter


def test_arrive_letters_puts_each_once_also_when_it_was_taken_since(service: Service) -> None:
    letter, target = letter_of(service), service.shards.store("1")
    for _ in range(2):
        service.store.move_letters([letter], target)
        assert target.dead_letters() == [letter]
    assert service.store.dead_letters() == []
    target.purge_dead(None)
    service.store.move_letters([letter], target)
    assert target.dead_letters() == []


def test_drop_letters_forgets_letters(service: Service) -> None:
    letter = letter_of(service)
    assert service.store._call("drop_letters", "nothing", letter[0]) == 1
    assert service.store.dead_letters() == []


# ------------------------------------------------------------------ all of it


def test_resharding_moves_each_timer_to_where_it_belongs(service: Service) -> None:
    shards = service.shards
    for name in NAMES:
        service.add(name)
    shards.pause(timer_id(NAMES[0]))
    trigger = "t" * 26
    shards.trigger(timer_id(NAMES[1]), trigger)
    before = states(shards, NAMES)
    for count in (3, 5, 2, 1):
        reshard(shards, count)
        assert states(shards, NAMES) == before
        expected = {shard: set() for shard in shards_of(count)}
        for name in NAMES:
            expected[shard_of(timer_id(name), count)].add(timer_id(name))
        expected[shard_of(timer_id(NAMES[1]), count)].add(trigger)
        assert where(shards) == expected
        assert len(shards.timer_ids()) == len(NAMES) + 1
    assert reshard(shards, 1) == 0


@pytest.mark.parametrize("failing", range(24))
def test_resharding_that_ends_anywhere_is_gone_on_with(
    make_service: MakeService, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    service = make_service()
    for name in NAMES[:8]:
        service.add(name)
    before = states(service.shards, NAMES[:8])
    begin, calls = Store._begin, []

    def lose(store: Store, name: str, *arguments: Any) -> Any:
        calls.append(name)
        answer = begin(store, name, *arguments)
        if len(calls) - 1 == failing:
            answer()  # it was done, and nobody hears of it
            raise StoreUnavailableError("gone")
        return answer

    with monkeypatch.context() as patch:
        patch.setattr(Store, "_begin", lose)
        try:
            reshard(service.shards, 3)
        except StoreUnavailableError:
            assert len(calls) == failing + 1
    other = make_service(shards=3).another_shards()
    assert states(other, NAMES[:8]) == before, "moved as they are asked for"
    reshard(other, 3)
    assert states(other, NAMES[:8]) == before
    assert len(other.timer_ids()) == 8
    assert all(not store.departing() for store in other.stores)
    other.close()


def test_who_goes_by_the_old_layout_follows(service: Service, make_service: MakeService) -> None:
    late = make_service().shards
    late.save([service.define("before")])
    reshard(service.shards, 3)
    names = [name_in(shard, 3) for shard in "012"]
    late.save([service.define(name) for name in names])
    assert late.layout.shards == 3
    assert [state is not None for state in states(late, [*names, "before"])] == [True] * 4
    assert sum(map(len, where(service.shards).values())) == len({*names, "before"})


def test_a_timer_that_is_changed_while_it_belongs_elsewhere_is_moved_first(
    service: Service,
) -> None:
    shards, name = service.shards, name_in("1", 2)
    timer = service.add(name, every=10)
    shards.base.begin_resharding(2)
    shards.read_layout()
    assert shards.pause(timer.id) == 1
    assert where(shards) == {"": set(), "0": set(), "1": {timer.id}}
    assert shards.delete(timer.id)
    assert shards.states([timer.id]) == [None]


def test_history_counts_letters_and_runs_are_found_after_it(service: Service) -> None:
    epoch = service.join()
    timer = service.add(name_in("1", 2), every=1)
    service.let_pass(1, a=epoch)
    service.commit("a", epoch, service.ran(service.due_one("a", epoch), 1))
    run = OutRun("run-1", timer.id, START_MS, 1, message="m")
    service.store.run_started(run, lease_ms=60 * SECOND, limit_ms=0, redelivered=False)
    shards = service.shards
    service.store.leave("a", epoch)
    reshard(shards, 2)
    assert shards.counters() == {"sent": 1}
    assert len(list(shards.history(0))) == len(list(shards.history_backwards())) == 1
    assert [entry["state"] for entry in shards.run_history()] == ["started"]
    assert shards.out_run("run-1") == run
    assert shards.renew_runs([("run-1", "m", timer.id)], 60 * SECOND) == 1
    assert shards.run_ended(run, "succeeded")
    assert shards.out_run("run-1") is None


def test_a_letter_follows_its_timer_and_is_requeued_there(service: Service) -> None:
    (id, row), shards = letter_of(service), service.shards
    timer = row["timer"]
    shards.base.begin_resharding(2)
    shards.read_layout()
    with pytest.raises(ConflictError, match="dead letters can be requeued when that is done"):
        shards.requeue(id, timer, "again", timer, "r", "{}")
    reshard(shards, 2)
    assert shards.dead_letters() == [(id, row)]
    assert shards.dead_letter(id) == row
    assert shards.requeue(id, timer, "again", timer, "r", "{}")
    assert shards.dead_letters() == []
    assert shards.home(timer).timer_ids()[0] == "again"
    shards.home(timer).delete([timer])


def test_a_run_that_was_claimed_before_is_claimed_after_it(service: Service) -> None:
    timer = timer_id(name_in("1", 2))
    assert service.shards.claim_run("run-1", "m1", 60 * SECOND, timer) is None
    reshard(service.shards, 2)
    assert service.shards.claim_run("run-1", "m2", 60 * SECOND, timer) == "m1"
    assert service.shards.claim_run("run-2", "m2", 60 * SECOND, timer) is None


@pytest.mark.parametrize("count", [0, -1, 65, 1.5, True, "2", None])
def test_a_number_that_is_none_is_refused(make_app: MakeApp, count: Any) -> None:
    with pytest.raises(SettingsError, match=r"shards=.*a whole number from 1 to 64"):
        DistributedTimer(make_app(dtimer_shards=count)).get_timers()
    with pytest.raises(SettingsError, match=r"shards=.*a whole number from 1 to 64"):
        DistributedTimer(make_app()).reshard(count)


# ------------------------------------------------------------------ import, origin


def told(service: Service, definition: Definition, **fields: Any) -> Incoming:
    """Return a timer as an export has told it."""
    moments = {"due_ms": START_MS + 1000, "at_ms": START_MS + 1000, **fields}
    state = TimerState(definition.id, "active", definition.revision, START_MS - 5000)
    only = moments["due_ms"] if definition.schedule == OneShot(START_MS + 1000) else None
    return Incoming(replace(state, **moments), definition.blob, None, only)


def test_import_writes_a_timer_with_its_state_to_an_owner(service: Service) -> None:
    service.join()
    timer = service.define()
    row = told(service, timer, runs=3, last_run_ms=START_MS - 1, source="app", skips={"misfire": 2})
    assert service.store.bring([row]) == [WRITTEN]
    assert service.state(timer.id) == replace(row.state, owner="a")
    assert service.store.definitions([timer.id]) == [timer.blob]
    assert service.store.owned_ids("a") == [timer.id]
    assert service.store.static_timers("app") == {timer.id}


def test_import_answers_the_state_of_what_is_here(service: Service) -> None:
    timer = service.add()
    row = told(service, timer)
    state = service.state(timer.id)
    assert service.store.bring([row]) == [state]
    assert service.state(timer.id) == state
    assert service.store.bring([row._replace(read=replace(state, due_ms=1))]) == [state]
    assert service.store.bring([row._replace(read=state)]) == [WRITTEN]
    assert service.state(timer.id) == replace(row.state, owner="unassigned")
    service.store.delete([timer.id])
    assert service.store.bring([row._replace(read=state)]) == [None]


def test_import_keeps_the_owner_and_the_definition_that_is_here(service: Service) -> None:
    service.join()
    timer = service.add()
    service.join("b")
    row = told(service, timer)._replace(read=service.state(timer.id), blob="")
    assert service.store.bring([row]) == [WRITTEN]
    assert service.state(timer.id).owner == "a"
    assert service.store.definitions([timer.id]) == [timer.blob]


def test_import_waits_for_a_run_that_is_being_published(service: Service) -> None:
    epoch = service.join()
    timer = service.add()
    service.clock.advance(10)
    service.store.due("a", epoch, Reading(10, marks=True))
    row = told(service, timer)._replace(read=service.state(timer.id))
    before = service.state(timer.id)
    assert service.store.bring([row]) == [PUBLISHING]
    assert service.state(timer.id) == before
    service.let_pass(31)
    assert service.store.bring([row]) == [WRITTEN]


@pytest.mark.parametrize("later", [0, 29 * 86400])
def test_import_of_what_runs_once_comes_once(service: Service, later: int) -> None:
    row = told(service, service.define(at_ms=START_MS + 1000))
    assert service.store.bring([row]) == [WRITTEN]
    service.store.delete([row.state.id])
    service.clock.advance(later)
    assert service.store.bring([row]) == [HAS_BEEN]
    service.clock.advance(32 * 86400)
    service.store.bring([])
    assert not service.exists(row.state.id)


def test_import_where_it_was_exported_brings_back_what_is_to_come(service: Service) -> None:
    row = told(service, service.define(at_ms=START_MS + 1000))
    service.clock.advance(2)
    assert service.store.bring([row], is_origin=True) == [HAS_BEEN]
    assert service.store.bring([told(service, service.define())], is_origin=True) == [WRITTEN]


@pytest.mark.parametrize(("status", "reason"), [("stopped", "finished"), ("paused", "")])
def test_import_lists_what_does_not_run(service: Service, status: Any, reason: str) -> None:
    row = told(service, service.define(), status=status, reason=reason)
    assert service.store.bring([row]) == [WRITTEN]
    score = service.redis.zscore(service.keys("inactive_timers"), row.state.id)
    kept = START_MS + 7 * 86400 * SECOND if reason else float("inf")
    assert score == kept


def test_import_writes_nothing_when_there_would_be_too_many(make_service: MakeService) -> None:
    service = make_service(max_timers=2)
    service.add("a")
    rows = [told(service, service.define(name)) for name in ("b", "c")]
    with pytest.raises(TooManyTimersError):
        service.store.bring(rows)
    assert service.store.pending_count() == 1
    assert service.store.bring(rows[:1]) == [WRITTEN]


def test_import_by_an_older_layout_writes_nothing(service: Service) -> None:
    service.shards.read_layout()
    store = service.shards.base
    service.store.mark_layout(NEWER)
    with pytest.raises(LayoutChangedError):
        store.bring([told(service, service.define())])
    assert service.store.pending_count() == 0


def test_origin_is_what_it_was_first(service: Service) -> None:
    assert service.store.origin() == ""
    assert service.store.origin("one") == "one"
    assert service.store.origin("two") == service.store.origin() == "one"


# ------------------------------------------------------------------ with real beats


def test_a_service_with_shards_fires_all_of_its_timers(
    make_app: MakeApp, start_timers: StartTimers, read_queue: ReadQueue
) -> None:
    schedule = {f"static-{number}": {"task": "record", "schedule": 0.5} for number in range(6)}
    app = make_app(dtimer_shards=3, beat_schedule=schedule)
    reader = read_queue(app)
    timers = start_timers(app)
    timers.create_timers(
        {"name": name, "schedule": 0.5, "callback": "record"} for name in NAMES[:12]
    )
    names = {*NAMES[:12], *schedule}
    wait_until(lambda: names <= reader.ledger.names(), "every timer to be sent", 15)
    (instance,) = timers.get_service_instances()
    assert instance.timers >= len(names)
    assert {store.keys.shard for store in timers.store.stores} == {"0", "1", "2"}
    assert names <= {timer.name for timer in timers.get_instance_timers()}
    assert [timer.next_run_at for timer in timers.get_timers()] == sorted(
        timer.next_run_at
        for timer in timers.get_timers()  # type: ignore[type-var]
    )


@pytest.mark.parametrize("mode", ["atomic", "confirmed"])
def test_a_service_is_given_other_shards_while_it_fires(
    make_app: MakeApp, start_timers: StartTimers, read_queue: ReadQueue, mode: str
) -> None:
    schedule = {f"static-{number}": {"task": "record", "schedule": 1.0} for number in range(5)}
    app = make_app(beat_schedule=schedule, dtimer_dispatch=mode)
    reader = read_queue(app)
    first, second = start_timers(app), start_timers(app)
    first.create_timers(
        {"name": name, "schedule": 1.0, "callback": "record", "coalesce": False} for name in NAMES
    )
    names = [*NAMES, *schedule]
    wait_until(lambda: set(names) <= reader.ledger.names(), "every timer to be sent", 15)
    # Another process creates timers all the while, by the layout that it knows.
    other = DistributedTimer(app)
    other.get_timers()
    created: list[str] = []
    ended = threading.Event()

    def create() -> None:
        while not ended.wait(0.01):
            created.append(f"late-{len(created)}")
            other.create_timer(created[-1], 3600, "record")

    creating = threading.Thread(target=create)
    creating.start()
    try:
        assert second.reshard(3) >= len(names)
        assert second.reshard(2) >= 1
    finally:
        ended.set()
        creating.join()
    resharded_ms = timers_now(first)
    wait_until(
        lambda: all(reader.ledger.latest()[name] > resharded_ms for name in names),
        "every timer to be sent after it",
        15,
    )
    assert {timer.name for timer in first.get_timers(name="late-*")} == set(created)
    assert len(first.get_service_instances()) == 2
    until = min(reader.ledger.latest()[name] for name in names)
    reader.ledger.assert_nothing_doubled()
    reader.ledger.assert_never_early()
    for name in NAMES:
        assert reader.ledger.missing(name, 1000, until) == []
    skips = {name: first.get_timer(name).skips for name in schedule}
    for name in schedule:
        missing = reader.ledger.missing(name, 1000, until)
        assert len(missing) <= sum(skips[name].values())


def timers_now(timers: DistributedTimer) -> int:
    return timers.store.now_ms()


def test_a_beat_whose_setting_differs_ends_and_says_so(
    make_app: MakeApp, start_timers: StartTimers
) -> None:
    start_timers(make_app(dtimer_shards=2))
    other = DistributedTimer(make_app(dtimer_shards=3))
    running = DistributedTimer(make_app(dtimer_shards=2))
    wait_until(lambda: running.get_service_instances(), "the first to be there")
    with pytest.raises(SettingsError, match="differs from what the service orders has: 2"):
        other.get_timers()
    other.start()
    try:
        scheduler = other._scheduler
        assert scheduler is not None
        wait_until(lambda: not scheduler.is_running, "it to end")
        with pytest.raises(SettingsError, match="differs from what the service orders has: 2"):
            scheduler.tick()
    finally:
        other.stop()
