"""The scripts that put right what was edited by hand, each answer of each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from celery_dtimer.errors import DamagedError, FencedError, StoreError
from celery_dtimer.model import LAST_MS, UNASSIGNED, Definition, countdown_id
from celery_dtimer.store import (
    BROKEN,
    GONE,
    UNDEFINED,
    HeldRun,
    Repair,
    Settlement,
    Vanished,
)
from tests.integration.conftest import START_MS, MakeService, Service

OVER = 1  # an epoch that is over
AT = START_MS + 10_000
KEEP_MS = 7 * 86_400_000
LEASE_MS = 60_000

Damage = Callable[[Service, Definition], Any]


def _scrub(service: Service, epoch: int, limit: int = 2) -> dict[str, str]:
    """Go through all lists, a few timers at a time; return what was wrong, by id."""
    found: dict[str, str] = {}
    position = ""
    for _ in range(100):
        position, repairs = service.store.scrub("a", epoch, position, limit)
        found.update({id: wrong for _, id, wrong in repairs})
        if not position:
            return found
    raise AssertionError("it never came to the end")


def _repaired(service: Service) -> int:
    return service.store.counters().get("repaired", 0)


# ------------------------------------------------------------------ scrub


def test_scrub_finds_nothing_where_all_is_well(service: Service) -> None:
    epoch = service.join()
    service.join("b")
    timers = service.add_many(5)
    service.store.reap("a", epoch)
    service.store.pause(timers[0].id)
    service.trigger(timers[1])
    service.store.reap("a", epoch)
    assert _scrub(service, epoch) == {}
    assert _scrub(service, epoch, 100) == {}
    assert _repaired(service) == 0


def test_scrub_goes_through_queue_inactive_ones_and_owners(service: Service) -> None:
    epoch = service.join()
    service.add_many(3)
    service.store.pause(service.add("paused").id)
    assert service.store.scrub("a", epoch, "", 2) == ("1:2", [])
    assert service.store.scrub("a", epoch, "1:2", 2) == ("2:1", [])
    assert service.store.scrub("a", epoch, "2:1", 2) == ("4:2", [])
    assert service.store.scrub("a", epoch, "4:2", 2) == ("", [])
    assert service.store.scrub("a", epoch, "1:99", 100) == ("", [])
    assert service.store.scrub("a", epoch, "99:0", 100) == ("", [])


def test_scrub_goes_on_behind_what_it_has_removed(service: Service) -> None:
    epoch = service.join()
    timers = service.add_many(4)
    service.redis.delete(service.keys("timer", timers[0].id))
    position, repairs = service.store.scrub("a", epoch, "", 2)
    assert position == "1:1"
    assert [repair.id for repair in repairs] == [timers[0].id]


def test_scrub_removes_what_is_no_timer(service: Service) -> None:
    epoch = service.join()
    timers = service.add_many(5)
    for timer in timers[::2]:
        service.redis.delete(service.keys("timer", timer.id))
    before = service.members()
    wrong = "there was no such timer: what was left of it is removed"
    assert _scrub(service, epoch) == {timer.id: wrong for timer in timers[::2]}
    assert not any(service.exists(timer.id) for timer in timers[::2])
    assert service.members() > before, "the instances look at their static schedules again"
    assert _repaired(service) == 3


@pytest.mark.parametrize("listed", ["active", "paused"])
@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        ("string", "damaged: its state was a string"),
        ("list", "damaged: its state was a list"),
        ("without status", "damaged: its state had no status"),
    ],
)
def test_scrub_sets_a_state_aside_that_can_not_be_read(
    service: Service, damage: str, reason: str, listed: str
) -> None:
    epoch = service.join()
    timer, other = service.add("victim"), service.add("other")
    name = service.keys("timer", timer.id)
    if listed == "paused":
        service.store.pause(timer.id)
    if damage == "without status":
        service.redis.hdel(name, "status")
    else:
        service.redis.delete(name)
    if damage == "string":
        service.redis.set(name, "nonsense")
    elif damage == "list":
        service.redis.rpush(name, "nonsense")
    assert _scrub(service, epoch) == {timer.id: "its state could not be read: set aside as broken"}
    (found,) = service.store.timers([timer.id])
    assert (found.status, found.reason, found.name) == ("broken", reason, "victim")
    assert service.state(other.id).status == "active"
    assert _scrub(service, epoch) == {}
    service.store.save([service.define("victim", every=20)])
    assert service.state(timer.id).status == "active", "it can be written again"


def test_scrub_removes_the_remains_of_what_is_hidden(service: Service) -> None:
    epoch = service.join()
    trigger = service.trigger(service.add())
    service.redis.hdel(service.keys("timer", trigger), "status")
    assert list(_scrub(service, epoch)) == [trigger]
    assert not service.exists(trigger)


@pytest.mark.parametrize("status", ["paused", "stopped", "broken"])
def test_scrub_takes_out_of_the_queue_what_is_not_active(service: Service, status: str) -> None:
    epoch = service.join()
    timer = service.add()
    service.set_field(timer.id, "status", status)
    assert list(_scrub(service, epoch)) == [timer.id]
    assert service.store.pending_count() == 0
    assert service.store.owned_ids("a") == []
    assert service.state(timer.id).status == status
    assert service.redis.zscore(service.keys("inactive_timers"), timer.id) == float("inf")


def test_scrub_sets_aside_what_has_another_word_for_its_status(service: Service) -> None:
    epoch = service.join()
    timer = service.add()
    service.set_field(timer.id, "status", "on holiday")
    assert _scrub(service, epoch) == {
        timer.id: "its status was none of a timer: set aside as broken"
    }
    state = service.state(timer.id)
    assert (state.status, state.reason) == ("broken", "damaged: its status was on holiday")


@pytest.mark.parametrize(
    ("field", "value"),
    [("due", "soon"), ("due", "-5"), ("due", "1e300"), ("due", "1.5"), ("created", "nan")],
)
def test_scrub_sets_aside_what_has_no_time(service: Service, field: str, value: str) -> None:
    epoch = service.join()
    timer = service.add()
    service.set_field(timer.id, field, value)
    assert list(_scrub(service, epoch)) == [timer.id]
    state = service.state(timer.id)
    assert (state.status, state.reason) == ("broken", "damaged: its stored state can not be read")
    assert _scrub(service, epoch) == {}


def test_scrub_removes_a_hidden_one_that_has_no_time(service: Service) -> None:
    epoch = service.join()
    trigger = service.trigger(service.add())
    service.set_field(trigger, "due", "soon")
    assert _scrub(service, epoch) == {trigger: "its state could not be read: removed"}
    assert not service.exists(trigger)


@pytest.mark.parametrize("kind", ["gone", "list"])
def test_scrub_sets_aside_what_has_no_definition(service: Service, kind: str) -> None:
    epoch = service.join()
    timer = service.add()
    name = service.keys("timer_definition", timer.id)
    service.redis.delete(name)
    if kind == "list":
        service.redis.rpush(name, "nonsense")
    assert _scrub(service, epoch) == {timer.id: "its definition was gone: set aside as broken"}
    assert service.state(timer.id).reason == "damaged: its definition is gone"


def test_scrub_leaves_hidden_ones_without_a_definition_to_the_dispatch(service: Service) -> None:
    """That writes a dead letter of their run."""
    epoch = service.join()
    trigger = service.trigger(service.add())
    service.redis.delete(service.keys("timer_definition", trigger))
    assert _scrub(service, epoch) == {}


@pytest.mark.parametrize("damage", ["owner unknown", "owner gone", "not at its owner", "later"])
def test_scrub_finds_an_owner_for_what_nobody_knows(service: Service, damage: str) -> None:
    epoch = service.join()
    timer = service.add()
    own = service.keys("instance_timers", "a")
    if damage == "owner unknown":
        service.redis.delete(own)
        service.set_field(timer.id, "owner", "nobody")
    elif damage == "owner gone":
        service.redis.delete(own)
        service.redis.hdel(service.keys("timer", timer.id), "owner")
    elif damage == "not at its owner":
        service.redis.delete(own)
    else:
        service.redis.zadd(own, {timer.id: START_MS + 99_000})
    assert list(_scrub(service, epoch)) == [timer.id]
    assert service.state(timer.id).owner == UNASSIGNED
    assert service.state(timer.id).at_ms == AT
    assert service.store.reap("a", epoch).count == 1
    assert service.store.owned_ids("a") == [timer.id]


SCORES: dict[str, Damage] = {
    "hash": lambda service, timer: service.set_field(timer.id, "at", str(AT + 9)),
    "hash, nonsense": lambda service, timer: service.set_field(timer.id, "at", "soon"),
    "hash, none": lambda service, timer: service.redis.hdel(service.keys("timer", timer.id), "at"),
    "queue": lambda service, timer: service.redis.zadd(
        service.keys("timer_queue"), {timer.id: AT + 9}
    ),
    "queue, never": lambda service, timer: service.redis.zadd(
        service.keys("timer_queue"), {timer.id: "inf"}
    ),
    "queue, none": lambda service, timer: service.redis.zrem(service.keys("timer_queue"), timer.id),
    "owner": lambda service, timer: service.redis.zadd(
        service.keys("instance_timers", "a"), {timer.id: 5}
    ),
    "owner, never": lambda service, timer: service.redis.zadd(
        service.keys("instance_timers", "a"), {timer.id: "-inf"}
    ),
}


@pytest.mark.parametrize("damage", SCORES.values(), ids=SCORES.keys())
def test_scrub_takes_the_time_that_two_agree_on(service: Service, damage: Damage) -> None:
    epoch = service.join()
    timer = service.add()
    damage(service, timer)
    assert set(_scrub(service, epoch)) == {timer.id}
    assert service.state(timer.id).at_ms == AT
    service.store.reap("a", epoch)


def test_scrub_takes_the_queues_time_when_none_agree_and_the_runs_when_none_is_one(
    service: Service,
) -> None:
    epoch = service.join()
    timer = service.add()
    service.redis.zadd(service.keys("timer_queue"), {timer.id: AT + 1})
    service.redis.zadd(service.keys("instance_timers", "a"), {timer.id: AT + 2})
    assert set(_scrub(service, epoch)) == {timer.id}
    assert service.state(timer.id).at_ms == AT + 1
    service.redis.zadd(service.keys("timer_queue"), {timer.id: "inf"})
    service.redis.zadd(service.keys("instance_timers", UNASSIGNED), {timer.id: "-inf"})
    service.set_field(timer.id, "at", "soon")
    assert set(_scrub(service, epoch)) == {timer.id}
    assert service.state(timer.id).at_ms == AT
    service.store.reap("a", epoch)


def test_scrub_leaves_with_its_owner_what_that_may_be_publishing(service: Service) -> None:
    epoch = service.join()
    timer = service.add()
    service.redis.hset(service.keys("instance", "a"), "in_flight", f"x {timer.id}")
    service.redis.zadd(service.keys("timer_queue"), {timer.id: 5})
    assert list(_scrub(service, epoch)) == [timer.id]
    assert service.state(timer.id).owner == "a"


def test_scrub_takes_what_is_active_out_of_the_inactive_ones(service: Service) -> None:
    epoch = service.join()
    timer = service.add()
    service.redis.zadd(service.keys("inactive_timers"), {timer.id: 5})
    assert service.store.purge() == 0, "it is not purged for that"
    assert _scrub(service, epoch) == {timer.id: "it was listed as inactive: taken out"}
    assert service.state(timer.id).owner == "a"


def test_scrub_schedules_an_active_timer_that_only_the_inactive_ones_name(
    service: Service,
) -> None:
    epoch = service.join()
    timer = service.add()
    service.redis.delete(service.keys("timer_queue"), service.keys("instance_timers", "a"))
    service.redis.zadd(service.keys("inactive_timers"), {timer.id: "inf"})
    assert set(_scrub(service, epoch)) == {timer.id}
    assert service.store.queued().__next__() == [(timer.id, AT)]
    service.store.reap("a", epoch)


def test_scrub_puts_the_queue_together_from_the_owners(service: Service) -> None:
    epoch = service.join()
    service.join("b")
    timers = service.add_many(9)
    service.store.reap("a", epoch)
    service.redis.delete(service.keys("timer_queue"))
    assert set(_scrub(service, epoch)) == {timer.id for timer in timers}
    assert service.store.pending_count() == 9
    while service.store.reap("a", epoch).more:
        pass


@pytest.mark.parametrize("owner", ["a", "b", UNASSIGNED])
def test_scrub_takes_from_an_owner_what_is_anothers(service: Service, owner: str) -> None:
    epoch = service.join()
    timer = service.add()
    service.join("b")
    if owner != "a":
        service.redis.zadd(service.keys("instance_timers", owner), {timer.id: AT})
    else:
        service.redis.zadd(service.keys("instance_timers", "b"), {timer.id: AT})
        service.set_field(timer.id, "owner", "b")
    assert list(_scrub(service, epoch)) == [timer.id]
    assert service.state(timer.id).owner == ("b" if owner == "a" else "a")
    service.store.reap("a", epoch)


def test_scrub_lists_a_stopped_timer_until_it_is_purged(service: Service) -> None:
    epoch = service.join()
    timer = service.add(at_ms=START_MS)
    service.commit("a", epoch, Settlement(service.due_one("a", epoch), "run"))
    static = service.add("static", at_ms=START_MS, source="code")
    service.commit("a", epoch, Settlement(service.due_one("a", epoch), "run"))
    service.redis.delete(service.keys("inactive_timers"))
    keys = [("timer", timer.id), ("timer_definition", static.id)]
    _, repairs = service.store.scrub("a", epoch, "", 0, keys)
    wrong = "it was stopped and not listed: listed"
    assert repairs == [Repair("timer", timer.id, wrong), Repair("timer", static.id, wrong)]
    scores = service.store.scores("inactive_timers")
    assert scores == {timer.id: START_MS + KEEP_MS, static.id: float("inf")}


def test_scrub_forgets_runs_that_a_timer_waits_for_and_nobody_knows(service: Service) -> None:
    epoch = service.join()
    timer = service.add()
    held = HeldRun(timer.id, START_MS, 1, "skip", 0, ("known",))
    service.store.open_runs("a", epoch, [held])
    service.redis.zadd(service.keys("open_runs", timer.id), {"unknown": LAST_MS})
    service.clock.advance(10)
    due = service.due_one("a", epoch)
    service.commit("a", epoch, Settlement(due, "waits", reason="own"))
    assert _scrub(service, epoch) == {
        timer.id: "it waited for runs that nothing is known of: forgotten"
    }
    assert service.store.scores("open_runs", timer.id).keys() == {"known"}
    assert service.state(timer.id).at_ms == service.clock.now_ms, "it is looked at now"


def test_scrub_of_keys_finds_timers_that_no_list_has(service: Service) -> None:
    epoch = service.join()
    active, paused, lost = service.add("active"), service.add("paused"), service.add("lost")
    service.store.pause(paused.id)
    for what in ("timer_queue", "inactive_timers"):
        service.redis.delete(service.keys(what))
    service.redis.delete(service.keys("instance_timers", "a"), service.keys("timer", lost.id))
    assert _scrub(service, epoch) == {}
    _, keys = service.store.keys_from(0, 10_000)
    _, repairs = service.store.scrub("a", epoch, "", 0, keys)
    assert {repair.id for repair in repairs} == {active.id, paused.id, lost.id}
    assert service.state(active.id).owner == UNASSIGNED
    assert not service.exists(lost.id)
    service.store.reap("a", epoch)


def test_scrub_of_keys_gives_back_what_an_unknown_instance_owns(service: Service) -> None:
    epoch = service.join("gone")
    timer = service.add()
    service.redis.zrem(service.keys("service_instances"), "gone")
    epoch = service.join("a")
    other = service.add("other")
    service.redis.zadd(service.keys("instance_timers", "gone"), {other.id: 5})
    keys = [("instance_timers", "gone"), ("instance", "gone")]
    _, repairs = service.store.scrub("a", epoch, "", 0, keys)
    assert {(what, id) for what, id, _ in repairs} == {
        ("timer", timer.id),
        ("timer", other.id),
        ("instance", "gone"),
    }
    assert service.redis.exists(*(service.keys(what, "gone") for what, _ in keys)) == 0
    assert service.state(timer.id).owner == UNASSIGNED
    assert service.state(other.id).owner == "a"
    service.store.reap("a", epoch)


@pytest.mark.parametrize(
    "what",
    ["instance_timers", "instance", "triggers", "open_runs", "declaration", "dead_timer"],
)
def test_scrub_of_keys_removes_what_is_of_another_type(service: Service, what: str) -> None:
    epoch = service.join()
    name = service.keys(what, "x")
    service.redis.set(name, "nonsense")
    _, repairs = service.store.scrub("a", epoch, "", 0, [(what, "x")])
    assert repairs == [Repair(what, "x", "it was a string: removed")]
    assert not service.redis.exists(name)


def test_scrub_of_keys_removes_what_belongs_to_nothing(service: Service) -> None:
    epoch = service.join()
    timer = service.add()
    trigger = service.trigger(timer)
    service.store.declare("a", epoch, "code", "known", ["x"])
    service.redis.sadd(service.keys("triggers", timer.id), "gone")
    service.redis.sadd(service.keys("declaration", "old"), "x")
    service.redis.hset(service.keys("dead_timer", "letter"), "timer", "x")
    service.redis.hset(service.keys("dead_timer", "kept"), "definition", "x")
    service.redis.pexpire(service.keys("dead_timer", "kept"), 100_000)
    _, keys = service.store.keys_from(0, 10_000)
    _, repairs = service.store.scrub("a", epoch, "", 0, keys)
    assert sorted(repairs) == [
        ("dead_timer", "letter", "it was not listed: removed"),
        ("declaration", "old", "no instance had it: removed"),
        ("triggers", timer.id, "it had triggers that are gone: removed"),
    ]
    assert service.redis.smembers(service.keys("triggers", timer.id)) == {trigger}
    assert service.redis.exists(service.keys("dead_timer", "kept"))
    _, repairs = service.store.scrub("a", epoch, "", 0, keys)
    assert repairs == []


def test_scrub_leaves_keys_alone_that_it_does_not_know(service: Service) -> None:
    epoch = service.join()
    service.redis.set(service.keys("run_claim", "x"), "token", px=10_000)
    keys = [("run_claim", "x"), ("whatever", "x"), ("timer", "gone meanwhile")]
    assert service.store.scrub("a", epoch, "", 0, keys) == ("", [])


def test_scrub_of_another_epoch_is_fenced(service: Service) -> None:
    service.join()
    with pytest.raises(FencedError):
        service.store.scrub("a", OVER)


def test_keys_are_found_whatever_their_prefix_and_service(make_service: MakeService) -> None:
    plain = make_service()
    odd = make_service()
    prefix = f"{plain.settings.key_prefix}x*[a]?\\:"
    for service in (plain, odd):
        service.is_damaged = True
    odd.settings = type(odd.settings)("or*ders.", odd.settings.redis_url, key_prefix=prefix)
    odd.store = odd.another_store()
    odd.keys = odd.store.keys
    timer = odd.add()
    plain.add("other")
    keys, cursor = set(), 0
    while True:
        cursor, found = odd.store.keys_from(cursor)
        keys.update(found)
        if not cursor:
            break
    assert keys == {
        ("timer", timer.id),
        ("timer_definition", timer.id),
        ("instance_timers", UNASSIGNED),
    }
    odd.store.close()


# ------------------------------------------------------------------ scrub_runs


def _out(service: Service, task_id: str, text: str = "timer 5 1 0 0 0 0 message") -> None:
    service.redis.hset(service.keys("running"), task_id, text)


def test_scrub_runs_gives_a_lease_to_a_run_that_has_none(service: Service) -> None:
    epoch = service.join()
    timer = service.add()
    held = HeldRun(timer.id, START_MS, 1, "skip", 0, ("known",))
    service.store.open_runs("a", epoch, [held])
    _out(service, "lost")
    assert service.store.scrub_runs("a", epoch) == (
        "0",
        [Repair("running", "lost", "it had no lease: it has one")],
    )
    assert service.store.scores("run_leases")["lost"] == START_MS + LEASE_MS
    assert service.store.scrub_runs("a", epoch) == ("0", [])


def test_scrub_runs_removes_nonsense(service: Service) -> None:
    epoch = service.join()
    _out(service, "odd", "nonsense")
    service.redis.zadd(service.keys("run_leases"), {"odd": START_MS + 5})
    _, repairs = service.store.scrub_runs("a", epoch)
    assert [repair.id for repair in repairs] == ["odd"]
    assert service.redis.exists(service.keys("running"), service.keys("run_leases")) == 0


def test_scrub_runs_ends_a_lease_that_has_no_end(service: Service) -> None:
    epoch = service.join()
    service.redis.zadd(service.keys("run_leases"), {"endless": "inf"})
    _, repairs = service.store.scrub_runs("a", epoch)
    assert [repair.id for repair in repairs] == ["endless"]
    assert service.store.scores("run_leases") == {"endless": START_MS + LEASE_MS}


def test_scrub_runs_goes_through_many_a_part_at_a_time(service: Service) -> None:
    epoch = service.join()
    for i in range(700):  # more than the server keeps together
        _out(service, f"task{i}")
    position, parts, found = "0", 0, set()
    while True:
        position, repairs = service.store.scrub_runs("a", epoch, position)
        found |= {repair.id for repair in repairs}
        parts += 1
        if position == "0":
            break
    assert len(found) == 700
    assert parts > 1


def test_scrub_runs_of_another_epoch_is_fenced(service: Service) -> None:
    service.join()
    with pytest.raises(FencedError):
        service.store.scrub_runs("a", OVER)


# ------------------------------------------------------------------ mend


def test_mend_leaves_everything_that_is_right(service: Service) -> None:
    epoch = service.join()
    timer = service.add(source="code")
    service.store.declare("a", epoch, "code", "digest", [timer.id])
    service.store.pause(service.add("paused").id)
    service.clock.advance(10)
    service.commit("a", epoch, service.ran(service.due_one("a", epoch)))
    before = sorted(service.redis.scan_iter(f"{service.settings.key_prefix}*", count=1000))
    members = service.members()
    assert service.store.mend() == []
    assert before == sorted(service.redis.scan_iter(f"{service.settings.key_prefix}*", count=1000))
    assert service.members() == members


MENDED = [
    *("timer_queue", "inactive_timers", "service_instances", "run_leases", "revoked_runs"),
    *("dead_timers", "meta", "running", "counters", "history", "runs", "never"),
]


@pytest.mark.parametrize("what", MENDED)
def test_mend_removes_a_key_of_another_type(service: Service, what: str) -> None:
    service.is_damaged = True
    service.join()
    service.add()
    service.redis.delete(service.keys(what))
    service.redis.rpush(service.keys(what), "nonsense")
    assert service.store.mend() == [(what, "", "list")]
    assert service.store.mend() == []
    assert _repaired(service) == 1


@pytest.mark.parametrize(
    ("what", "id"),
    [
        ("instance_timers", UNASSIGNED),
        ("instance_timers", "a"),
        ("instance", "a"),
        ("declaration", "digest"),
        ("static_timers", "code"),
        ("declarations", "code"),
    ],
)
def test_mend_removes_a_key_of_an_instance_or_a_source(
    service: Service, what: str, id: str
) -> None:
    service.is_damaged = True
    epoch = service.join()
    timer = service.add(source="code")
    service.store.declare("a", epoch, "code", "digest", [timer.id])
    service.redis.delete(service.keys(what, id))
    service.redis.set(service.keys(what, id), "nonsense")
    members = service.members()
    assert service.store.mend() == [(what, id, "string")]
    assert service.members() > members


def test_mend_lets_no_epoch_be_handed_out_twice(service: Service) -> None:
    service.clock.advance(1000)
    epoch = service.join()
    service.redis.delete(service.keys("meta"))
    service.redis.set(service.keys("meta"), "nonsense")
    service.clock.advance(-1000)
    service.store.mend()
    assert service.join("b") > epoch


@pytest.mark.parametrize("what", ["timer_queue", "inactive_timers"])
def test_no_script_writes_half_of_it_when_a_key_is_of_another_type(
    service: Service, what: str
) -> None:
    service.is_damaged = True
    epoch = service.join()
    timer, paused = service.add(), service.add("paused")
    service.store.pause(paused.id)
    trigger = service.trigger(timer)
    due = service.due_one("a", epoch)
    service.redis.delete(service.keys(what))
    service.redis.set(service.keys(what), "nonsense")

    def stored() -> dict[str, object]:
        names = service.redis.scan_iter(f"{service.settings.key_prefix}*", count=1000)
        return {name: service.redis.dump(name) for name in names}

    before = stored()
    store = service.store
    calls: list[Callable[[], object]] = [
        lambda: service.add("new"),
        lambda: store.delete([timer.id]),
        lambda: store.pause(timer.id),
        lambda: store.stop(timer.id),
        lambda: service.resume(paused, AT),
        lambda: service.trigger(timer),
        lambda: service.commit("a", epoch, Settlement(due, "run")),
        lambda: store.cancel([countdown_id("x")]),
        lambda: store.purge(),
        lambda: store.leave("a", epoch),
        lambda: store.reap("a", epoch),
        lambda: store.scrub("a", epoch),
    ]
    for call in calls:
        with pytest.raises(DamagedError, match="a beat that runs repairs it"):
            call()
    assert stored() == before
    assert trigger in store.owned_ids("a")


# ------------------------------------------------------------------ vanished, restore


def _look(service: Service, epoch: int, *timers: Definition) -> dict[str, int]:
    wanted = [(timer.id, timer.revision, len(timer.blob)) for timer in timers]
    return dict(service.store.vanished("a", epoch, wanted))


def test_vanished_finds_nothing_where_all_is_as_written(service: Service) -> None:
    epoch = service.join()
    timers = service.add_many(3)
    service.store.pause(timers[0].id)
    service.store.stop(timers[1].id)
    assert _look(service, epoch, *timers) == {}


@pytest.mark.parametrize("damage", ["gone", "string", "without status", "without revision"])
def test_vanished_tells_whose_state_is_gone(service: Service, damage: str) -> None:
    service.is_damaged = True
    epoch = service.join()
    timer, other = service.add(), service.add("other")
    name = service.keys("timer", timer.id)
    if damage in ("gone", "string"):
        service.redis.delete(name)
    if damage == "string":
        service.redis.set(name, "nonsense")
    if "without" in damage:
        service.redis.hdel(name, damage.removeprefix("without "))
    assert _look(service, epoch, timer, other) == {timer.id: GONE}
    assert service.store.vanished("a", epoch, [(timer.id, "", None)]) == [Vanished(timer.id, GONE)]


@pytest.mark.parametrize("damage", ["gone", "list", "another"])
def test_vanished_tells_whose_definition_is_gone(service: Service, damage: str) -> None:
    epoch = service.join()
    timer = service.add()
    name = service.keys("timer_definition", timer.id)
    service.redis.delete(name)
    if damage == "list":
        service.redis.rpush(name, "nonsense")
    elif damage == "another":
        service.redis.set(name, "{}")
    assert _look(service, epoch, timer) == {timer.id: UNDEFINED}
    assert service.store.restore("a", epoch, [timer]) == 1
    assert service.store.definitions([timer.id]) == [timer.blob]
    assert _look(service, epoch, timer) == {}
    assert _repaired(service) == 1


def test_vanished_tells_who_is_broken(service: Service) -> None:
    epoch = service.join()
    timer = service.add(at_ms=START_MS)
    due = service.due_one("a", epoch)
    service.commit("a", epoch, Settlement(due, "broken", reason="a reason"))
    assert _look(service, epoch, timer) == {timer.id: BROKEN}
    assert service.store.vanished("a", epoch, [(timer.id, "", None)]) == []


def test_vanished_leaves_what_has_run_and_what_was_changed(service: Service) -> None:
    epoch = service.join()
    once = service.add("once", at_ms=START_MS, args=["x"])
    due = service.due_one("a", epoch)
    service.commit("a", epoch, Settlement(due, "run", summary=once.summary))
    changed = service.define("timer", every=20)
    service.add("timer")
    assert _look(service, epoch, once, changed) == {}


def test_restore_writes_no_definition_of_another_revision(service: Service) -> None:
    epoch = service.join()
    stored = service.add("timer")
    others = [service.define("timer", every=20), service.define("unknown")]
    assert service.store.restore("a", epoch, others) == 0
    assert service.store.definitions([stored.id, others[1].id]) == [stored.blob, None]
    assert _repaired(service) == 0


def test_vanished_and_restore_of_another_epoch_are_fenced(service: Service) -> None:
    service.join()
    timer = service.add()
    with pytest.raises(FencedError):
        _look(service, OVER, timer)
    with pytest.raises(FencedError):
        service.store.restore("a", OVER, [timer])


def test_a_damaged_key_is_a_stores_error() -> None:
    """Whoever catches those catches it too."""
    assert issubclass(DamagedError, StoreError)
