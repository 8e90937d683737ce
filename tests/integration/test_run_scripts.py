"""The scripts of runs that are out, and of dead letters, each by itself like `test_scripts`.

A run that is out is a line in ``running`` and has a lease in ``run_leases``; its timer, if that
holds its runs, has it in ``open_runs`` too. Moments are told in seconds after the start.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from celery_dtimer import runs
from celery_dtimer.errors import FencedError, InvalidTimerError
from celery_dtimer.model import (
    Definition,
    Run,
    decode_definition,
    new_requeued_id,
    new_trigger_id,
    resent_id,
    timer_id,
)
from celery_dtimer.planning import Skip
from celery_dtimer.policy import Policy
from celery_dtimer.runs import LostRuns, requeued
from celery_dtimer.store import (
    BATCH,
    REVOKED,
    DueTimer,
    HeldRun,
    OutRun,
    Settlement,
    encode_name,
)
from tests.integration.conftest import SECOND, START_MS, Beat, Broker, MakeService, Service
from tests.integration.test_scripts import woken_by

OVER = 1  # an epoch that nobody holds
RUN_LEASE = 60  # seconds, of a run that was started,
QUEUED_LEASE = 3600  # and of one that was noted
MOST_LETTERS = 10_000


def run_of(timer: Definition, task_id: str = "task", **fields: Any) -> OutRun:
    """Return a run of a timer as its message tells a worker."""
    told = {"scheduled_ms": START_MS, "number": 1, "message": "m1", "worker": "w1"} | fields
    return OutRun(task_id, timer.id, **told)


def start(service: Service, run: OutRun, *, limit: float = 0, is_redelivered: bool = False) -> int:
    """Let a worker start a run; its limit is in seconds."""
    lease_ms, limit_ms = RUN_LEASE * SECOND, round(limit * SECOND)
    return service.store.run_started(
        run, lease_ms=lease_ms, limit_ms=limit_ms, redelivered=is_redelivered
    )


def end(service: Service, run: OutRun, state: str = runs.SUCCEEDED, **fields: Any) -> bool:
    """Let a worker say what became of a run."""
    return service.store.run_ended(run, state, **fields)


def renew(service: Service, *pairs: tuple[str, str]) -> int:
    """Let a worker renew the leases of runs, given as task id and message."""
    return service.store.renew_runs(pairs, RUN_LEASE * SECOND)


def held(timer: Definition, *task_ids: str, **fields: Any) -> HeldRun:
    """Return a run of a timer that holds its runs."""
    told = {"scheduled_ms": START_MS, "number": 1, "overlap": "skip", "resent": 0} | fields
    return HeldRun(timer.id, task_ids=task_ids or ("task",), **told)


def note(service: Service, *held_runs: HeldRun) -> list[str]:
    """Let instance `a` note runs that it is about to send; return the answers."""
    return service.store.open_runs("a", service.epoch("a"), held_runs)


def line(service: Service, task_id: str = "task") -> str | None:
    """Return what is stored of a run without the id of its timer, None when it is not out."""
    found: Any = service.redis.hget(service.keys("running"), task_id)
    return None if found is None else found.partition(" ")[2]


def seconds(moment_ms: float) -> float:
    """Return a moment in seconds after the start."""
    return (moment_ms - START_MS) / SECOND


def leases(service: Service) -> dict[str, float]:
    """Return when the leases of runs end."""
    return {id: seconds(at) for id, at in service.store.scores("run_leases").items()}


def open_runs(service: Service, timer: Definition) -> dict[str, float]:
    """Return when the leases of a timer's runs end, if that holds them."""
    return {id: seconds(at) for id, at in service.store.scores("open_runs", timer.id).items()}


def noted(service: Service) -> list[Mapping[str, str]]:
    """Return what was noted of runs, oldest first."""
    return list(service.store.run_history())[::-1]


def states(service: Service) -> list[str]:
    """Return the states that were noted, oldest first."""
    return [entry["state"] for entry in noted(service)]


def letters(service: Service) -> dict[str, Mapping[str, str]]:
    """Return the dead letters."""
    return dict(service.store.dead_letters())


def spoil(service: Service, *keys: str) -> None:
    """Edit keys into something that they are not."""
    for key in keys:
        service.redis.delete(key)
        service.redis.set(key, "nonsense")


@pytest.fixture
def epoch(service: Service) -> int:
    """The epoch of the instance `a`."""
    return service.join("a")


@pytest.fixture
def timer(service: Service, epoch: int) -> Definition:
    """A timer of `a` that is due in an hour."""
    return service.add("timer", every=3600)


EDITED = ["", "nonsense", "a 1 2 3 4 5 6", "a 1 2 3 4 5 6 m1 more", "a b c d e f g -", "é 1 -2"]


def edit(service: Service, text: str, task_id: str = "task") -> None:
    """Edit by hand what is stored of a run."""
    service.redis.hset(service.keys("running"), task_id, text)


# ------------------------------------------------------------------ run_started


def test_run_started_notes_the_run_and_gives_it_a_lease(
    service: Service, timer: Definition
) -> None:
    run = run_of(timer, number=3, shard=2, retries=1, resent=4)
    assert start(service, run)
    assert line(service) == f"{START_MS} 3 2 1 4 0 m1"
    assert service.store.lost_runs() == []
    assert leases(service) == {"task": RUN_LEASE}
    (entry,) = noted(service)
    assert entry == {
        "at": str(START_MS),
        "task_id": "task",
        "timer": timer.id,
        "due": str(START_MS),
        "number": "3",
        "shard": "2",
        "retries": "1",
        "state": "started",
        "worker": "w1",
    }


@pytest.mark.parametrize(("limit", "expiry"), [(20, 20), (60, 60), (100, 60)])
def test_run_started_caps_the_lease_at_the_limit(
    service: Service, timer: Definition, limit: int, expiry: int
) -> None:
    start(service, run_of(timer), limit=limit)
    assert leases(service) == {"task": expiry}
    assert line(service) == f"{START_MS} 1 0 0 0 {START_MS + limit * SECOND} m1"


def test_run_started_by_a_duplicate_leaves_the_lease_to_the_first(
    service: Service, timer: Definition
) -> None:
    start(service, run_of(timer))
    before = line(service)
    service.clock.advance(RUN_LEASE - 0.001)
    assert not start(service, run_of(timer, message="m2"))
    assert (line(service), leases(service)) == (before, {"task": RUN_LEASE})
    assert states(service) == ["started", "started"]


def test_run_started_again_by_the_same_message_renews_the_lease(
    service: Service, timer: Definition
) -> None:
    start(service, run_of(timer))
    service.clock.advance(10)
    assert start(service, run_of(timer, retries=1))
    assert (line(service), leases(service)) == (f"{START_MS} 1 0 1 0 0 m1", {"task": 70})


def test_run_started_by_a_message_that_is_delivered_again_takes_it_over(
    service: Service, timer: Definition
) -> None:
    start(service, run_of(timer), limit=100)
    service.clock.advance(10)
    assert start(service, run_of(timer, message="m2"), limit=100, is_redelivered=True)
    deadline = START_MS + 110 * SECOND
    assert line(service) == f"{START_MS} 1 0 0 0 {deadline} m2"
    assert leases(service) == {"task": 70}
    assert not end(service, run_of(timer))
    assert end(service, run_of(timer, message="m2"))


def test_run_started_after_the_lease_has_ended_takes_the_run_over(
    service: Service, timer: Definition
) -> None:
    start(service, run_of(timer))
    service.clock.advance(RUN_LEASE)
    assert start(service, run_of(timer, message="m2"))
    assert line(service) == f"{START_MS} 1 0 0 0 0 m2"


def test_run_started_of_a_noted_run_keeps_it_open(service: Service, timer: Definition) -> None:
    note(service, held(timer))
    service.clock.advance(5)
    assert start(service, run_of(timer))
    assert leases(service) == open_runs(service, timer) == {"task": 5 + RUN_LEASE}
    assert line(service) == f"{START_MS} 1 0 0 0 0 m1"


def test_run_started_holds_up_no_timer_that_does_not_hold_its_runs(
    service: Service, timer: Definition
) -> None:
    start(service, run_of(timer))
    assert open_runs(service, timer) == {}


@pytest.mark.parametrize("text", EDITED)
def test_run_started_over_an_entry_edited_by_hand_is_noted(
    service: Service, timer: Definition, text: str
) -> None:
    start(service, run_of(timer))
    edit(service, text)
    assert start(service, run_of(timer, message="m2"))
    assert line(service) == f"{START_MS} 1 0 0 0 0 m2"


def test_run_started_of_a_worker_with_any_name_is_noted(
    service: Service, timer: Definition
) -> None:
    assert start(service, run_of(timer, worker="a b\n\udc80 é"))
    assert noted(service)[0]["worker"] == "a b\n\\udc80 é"


# ------------------------------------------------------------------ run_ended


def test_run_ended_ends_the_lease_and_notes_what_became_of_the_run(
    service: Service, timer: Definition
) -> None:
    run = run_of(timer, number=3, shard=2, retries=1)
    note(service, held(timer))
    start(service, run)
    service.clock.advance(7)
    assert end(service, run, runs.FAILED, took_ms=7000, error="an\nerror")
    assert (line(service), leases(service), open_runs(service, timer)) == (None, {}, {})
    assert noted(service)[-1] == {
        "at": str(START_MS + 7000),
        "task_id": "task",
        "timer": timer.id,
        "due": str(START_MS),
        "number": "3",
        "shard": "2",
        "retries": "1",
        "state": "failed",
        "worker": "w1",
        "took": "7000",
        "error": "an\nerror",
    }
    assert letters(service) == {}


def test_run_ended_of_a_run_that_did_not_run_says_no_time_and_no_error(
    service: Service, timer: Definition
) -> None:
    assert end(service, run_of(timer), runs.EXPIRED)
    (entry,) = noted(service)
    assert not entry.keys() & {"took", "error"}


def test_run_ended_by_a_duplicate_leaves_the_lease_to_the_first(
    service: Service, timer: Definition
) -> None:
    note(service, held(timer))
    start(service, run_of(timer))
    before = line(service)
    assert not end(service, run_of(timer, message="m2"), runs.IGNORED)
    assert not end(service, run_of(timer, message="m2"), runs.RETRIED, keep_ms=5)
    assert line(service) == before
    assert leases(service) == open_runs(service, timer) == {"task": RUN_LEASE}
    assert states(service) == ["started", "ignored", "retried"]


def test_run_ended_of_a_run_that_no_worker_has_started_ends_its_lease(
    service: Service, timer: Definition
) -> None:
    note(service, held(timer))
    assert end(service, run_of(timer), runs.REVOKED)
    assert (line(service), leases(service), open_runs(service, timer)) == (None, {}, {})


def test_run_ended_by_who_does_not_know_the_timer_goes_by_what_is_stored(
    service: Service, timer: Definition
) -> None:
    start(service, run_of(timer, number=3, shard=2, retries=1))
    letter = {"reason": "failed", "task": "tasks.record"}
    run = OutRun("task", worker="parent")
    assert end(service, run, runs.FAILED, error="it died", letter=letter)
    assert leases(service) == {}
    entry = noted(service)[-1]
    assert (entry["timer"], entry["due"], entry["worker"]) == (timer.id, str(START_MS), "parent")
    assert (entry["number"], entry["shard"], entry["retries"]) == ("3", "2", "1")
    kept = letters(service)["task"]
    assert (kept["timer"], kept["number"], kept["reason"]) == (timer.id, "3", "failed")


@pytest.mark.parametrize("text", [None, *EDITED])
def test_run_ended_of_a_run_that_is_not_known_writes_nothing(
    service: Service, timer: Definition, text: str | None
) -> None:
    """The task that died was no timer's, or was sent by a timer of another service."""
    if text is not None:
        edit(service, text)
    assert not end(service, OutRun("task"), runs.FAILED, letter={"reason": "failed"})
    assert (noted(service), letters(service)) == ([], {})


def test_run_ended_by_a_retry_keeps_the_lease_and_frees_the_message(
    service: Service, timer: Definition
) -> None:
    note(service, held(timer, resent=2))
    start(service, run_of(timer, resent=2), limit=30)
    service.clock.advance(5)
    assert end(service, run_of(timer), runs.RETRIED, keep_ms=600 * SECOND)
    assert line(service) == f"{START_MS} 1 0 1 2 0 -"
    assert leases(service) == open_runs(service, timer) == {"task": 605}
    assert note(service, held(timer, "next")) == ["busy"]
    assert not start(service, run_of(timer, message="a duplicate of the first try"))
    assert not end(service, run_of(timer, message="a duplicate of the first try"), runs.IGNORED)
    assert leases(service) == open_runs(service, timer) == {"task": 605}
    assert start(service, run_of(timer, message="m2", retries=1))
    assert line(service) == f"{START_MS} 1 0 1 0 0 m2"


def test_run_ended_by_a_retry_of_a_run_that_is_not_out_gives_it_no_lease(
    service: Service, timer: Definition
) -> None:
    assert end(service, run_of(timer), runs.RETRIED, keep_ms=5)
    assert (line(service), leases(service)) == (None, {})


def test_run_ended_for_good_leaves_a_dead_letter(service: Service, timer: Definition) -> None:
    start(service, run_of(timer, number=3, retries=1))
    service.clock.advance(7)
    letter = {"reason": "failed", "task": "tasks.record", "call": '[["\udc80"],{}]', "name": "ä"}
    run = run_of(timer, number=3, retries=1)
    assert end(service, run, runs.FAILED, error="E: é\n", letter=letter)
    assert letters(service) == {
        "task": {
            "timer": timer.id,
            "due": str(START_MS),
            "number": "3",
            "shard": "0",
            "task_id": "task",
            "retries": "1",
            "where": "w1",
            "error": "E: é\n",
            "reason": "failed",
            "name": "ä",
            "task": "tasks.record",
            "call": '[["\\udc80"],{}]',
            "at": str(START_MS + 7000),
        }
    }


def test_run_ended_for_good_once_more_leaves_the_last_letter_only(
    service: Service, timer: Definition
) -> None:
    end(service, run_of(timer), runs.FAILED, letter={"reason": "failed", "call": "x"})
    service.clock.advance(7)
    end(service, run_of(timer), runs.FAILED, letter={"reason": "rejected"})
    (letter,) = letters(service).values()
    assert (letter["reason"], letter["at"]) == ("rejected", str(START_MS + 7000))
    assert "call" not in letter


def test_run_ended_for_good_keeps_the_newest_letters(service: Service, timer: Definition) -> None:
    dead = service.keys("dead_timers")
    service.redis.zadd(dead, {f"letter{i}": START_MS - 1 - i for i in range(MOST_LETTERS + 1)})
    for i in range(MOST_LETTERS - 3, MOST_LETTERS + 1):
        service.redis.hset(service.keys("dead_timer", f"letter{i}"), "reason", "failed")
    end(service, run_of(timer), runs.FAILED, letter={"reason": "failed"})
    assert service.redis.zcard(dead) == MOST_LETTERS
    assert service.store.dead_letter("task") is not None
    kept = [service.store.dead_letter(f"letter{MOST_LETTERS - i}") is not None for i in range(4)]
    assert kept == [False, False, True, True]
    stored = service.redis.exists(
        *(service.keys("dead_timer", f"letter{MOST_LETTERS - i}") for i in (0, 1))
    )
    assert stored == 0


def test_run_ended_over_streams_and_counters_edited_by_hand_ends_the_lease(
    service: Service, timer: Definition
) -> None:
    start(service, run_of(timer))
    spoil(service, *map(service.keys, ("runs", "counters", "history")))
    assert end(service, run_of(timer))
    assert leases(service) == {}


def test_run_ended_and_all_others_write_no_stream_when_no_history_is_kept(
    make_service: MakeService,
) -> None:
    service = make_service(history=0)
    epoch = service.join("a")
    timer = service.add("timer", every=3600)
    start(service, run_of(timer))
    end(service, run_of(timer), runs.FAILED, letter={"reason": "failed"})
    start(service, run_of(timer, "lost"))
    service.clock.advance(RUN_LEASE)
    assert lose(service, epoch) == 1
    assert service.redis.exists(service.keys("runs")) == 0
    assert letters(service).keys() == {"task", "lost"}


# ------------------------------------------------------------------ those that wait


def let_wait(service: Service, epoch: int, timer: Definition, *own: str) -> DueTimer:
    """Let a due timer of `a`, or its trigger, wait for the end of the runs that are out."""
    due = service.due_one("a", epoch)
    assert timer.id in (due.id, due.parent)
    assert service.commit("a", epoch, Settlement(due, "waits", reason=" ".join(own))) == [1]
    return due


@pytest.fixture
def waiting(service: Service, epoch: int) -> Definition:
    """A timer of `a` that waits for the end of the run "task", which worker `w1` is running."""
    timer = service.add("timer", every=10)
    service.clock.advance(10)
    note(service, held(timer))
    start(service, run_of(timer))
    let_wait(service, epoch, timer, "next")
    return timer


def end_it(service: Service, timer: Definition) -> None:
    end(service, run_of(timer))


def lose_it(service: Service, timer: Definition) -> None:
    (found,) = service.store.lost_runs()
    epoch = service.epoch("a")
    assert service.store.lose("a", epoch, found, resent_id="", why="why", name="timer") == 1


def close_it(service: Service, timer: Definition) -> None:
    edit(service, f"{timer.id} {START_MS} 1 0 0 0 0 -a")
    service.store.close_runs("a", [held(timer)])


ENDS = {"run_ended": end_it, "lose": lose_it, "close_runs": close_it}


def is_at_once(service: Service, id: str) -> bool:
    """Say whether a timer of `a` is looked at now, by its hash and both queues."""
    now, state = service.clock.now_ms, service.state(id)
    scores = [
        service.store.scores(*key)[id] for key in (("timer_queue",), ("instance_timers", "a"))
    ]
    return [state.at_ms, *scores] == [now, now, now]


@pytest.mark.parametrize("how", ENDS.values(), ids=ENDS.keys())
def test_run_ended_lost_or_closed_lets_a_timer_that_waits_be_looked_at_and_wakes_its_owner(
    service: Service, waiting: Definition, how: Callable[[Service, Definition], None]
) -> None:
    due_ms = service.state(waiting.id).due_ms
    service.clock.advance(RUN_LEASE if how is lose_it else 5)
    assert "a" in woken_by(service, lambda: how(service, waiting))
    assert is_at_once(service, waiting.id)
    due = service.due_one("a", service.epoch("a"))
    assert (due.id, due.due_ms, due.has_waited) == (waiting.id, due_ms, True)


@pytest.fixture
def waiting_trigger(service: Service, epoch: int, timer: Definition) -> str:
    """A trigger that waits for the end of a run of its timer."""
    note(service, held(timer))
    trigger = service.trigger(timer)
    let_wait(service, epoch, timer, "next")
    assert service.state(trigger).at_ms == START_MS + QUEUED_LEASE * SECOND
    return trigger


def test_run_ended_lets_triggers_that_wait_be_looked_at(
    service: Service, timer: Definition, waiting_trigger: str
) -> None:
    service.clock.advance(5)
    assert "a" in woken_by(service, lambda: end(service, run_of(timer)))
    assert is_at_once(service, waiting_trigger)
    assert service.state(timer.id).at_ms == START_MS + 3600 * SECOND, "it did not wait"


@pytest.mark.parametrize("key", [("timer_queue",), ("instance_timers", "a")])
def test_run_ended_lets_a_timer_be_looked_at_once_a_list_of_another_type_is_put_right(
    service: Service, epoch: int, waiting: Definition, key: tuple[str, ...]
) -> None:
    """Half of it would be as good as nothing: this end of the run is told once."""
    service.clock.advance(5)
    service.redis.set(service.keys(*key), "no sorted set")
    assert end(service, run_of(waiting))
    assert service.store.mend()
    service.store.scrub("a", epoch)
    service.store.reap("a", epoch)  # what is at no owner goes to nobody first
    assert is_at_once(service, waiting.id)


@pytest.mark.parametrize("status", ["paused", "stopped"])
def test_run_ended_leaves_a_timer_that_does_not_wait_any_more(
    service: Service, waiting: Definition, status: str
) -> None:
    {"paused": service.store.pause, "stopped": service.store.stop}[status](waiting.id)
    before = service.state(waiting.id)
    service.clock.advance(5)
    assert woken_by(service, lambda: end(service, run_of(waiting))) == set()
    assert service.state(waiting.id) == before
    assert service.store.owned_ids("a") == []


def test_run_ended_by_a_retry_or_of_a_run_that_is_not_held_wakes_nobody(
    service: Service, waiting: Definition
) -> None:
    at_ms = service.state(waiting.id).at_ms
    start(service, run_of(waiting, "another"))
    service.clock.advance(5)

    def end_both() -> None:
        end(service, run_of(waiting, "another"))
        end(service, run_of(waiting), runs.RETRIED, keep_ms=SECOND)

    assert woken_by(service, end_both) == set()
    assert service.state(waiting.id).at_ms == at_ms


# ------------------------------------------------------------------ renew_runs


def test_renew_runs_keeps_what_is_running(service: Service, timer: Definition) -> None:
    note(service, held(timer))
    start(service, run_of(timer))
    start(service, run_of(timer, "other", message="m2"))
    before = line(service)
    service.clock.advance(50)
    assert renew(service, ("task", "m1"), ("other", "m2")) == 2
    assert leases(service) == {"task": 110, "other": 110}
    assert open_runs(service, timer) == {"task": 110}
    assert line(service) == before


def test_renew_runs_leaves_what_another_message_runs_until_its_lease_has_ended(
    service: Service, timer: Definition
) -> None:
    start(service, run_of(timer))
    service.clock.advance(RUN_LEASE - 0.001)
    assert renew(service, ("task", "m2")) == 0
    assert leases(service) == {"task": RUN_LEASE}
    service.clock.advance(0.001)
    assert renew(service, ("task", "m2")) == 1
    assert leases(service) == {"task": 2 * RUN_LEASE}
    assert line(service) == f"{START_MS} 1 0 0 0 0 m2"
    assert renew(service, ("task", "m1")) == 0


def test_renew_runs_of_a_run_whose_lease_has_ended_keeps_it(
    service: Service, timer: Definition
) -> None:
    """The worker was frozen, and nobody has marked the run as lost yet."""
    start(service, run_of(timer))
    service.clock.advance(RUN_LEASE + 5)
    found = service.store.lost_runs()
    assert renew(service, ("task", "m1")) == 1
    assert lose(service, service.epoch("a"), found[0]) == 0


def test_renew_runs_keeps_no_run_beyond_its_limit(service: Service, timer: Definition) -> None:
    start(service, run_of(timer), limit=100)
    service.clock.advance(50)
    assert renew(service, ("task", "m1")) == 1
    assert leases(service) == {"task": 100}
    service.clock.advance(50)
    assert renew(service, ("task", "m1")) == 0
    assert leases(service) == {"task": 100}


def test_renew_runs_leaves_a_run_that_waits_for_its_retry(
    service: Service, timer: Definition
) -> None:
    start(service, run_of(timer))
    end(service, run_of(timer), runs.RETRIED, keep_ms=5000 * SECOND)
    assert renew(service, ("task", "m1")) == 0
    assert leases(service) == {"task": 5000}


@pytest.mark.parametrize("text", [None, *EDITED])
def test_renew_runs_of_what_is_not_out_renews_the_others(
    service: Service, timer: Definition, text: str | None
) -> None:
    start(service, run_of(timer))
    if text is not None:
        edit(service, text, "other")
    assert renew(service, ("other", "m1"), ("task", "m1")) == 1
    assert leases(service) == {"task": RUN_LEASE}


def test_renew_runs_renews_more_than_one_call_takes(service: Service, timer: Definition) -> None:
    ids = [f"task{i}" for i in range(2 * BATCH + 1)]
    for id in ids:
        start(service, run_of(timer, id))
    service.clock.advance(10)
    assert renew(service, *((id, "m1") for id in ids)) == len(ids)
    assert set(leases(service).values()) == {70}


# ------------------------------------------------------------------ open_runs


def test_open_runs_notes_each_message_of_a_run_that_may_go(
    service: Service, timer: Definition
) -> None:
    assert note(service, held(timer, "x", "y", number=7, resent=2)) == ["open"]
    assert line(service, "x") == f"{START_MS} 7 0 0 2 0 -a"
    assert line(service, "y") == f"{START_MS} 7 1 0 2 0 -a"
    assert leases(service) == {"x": QUEUED_LEASE, "y": QUEUED_LEASE}
    assert open_runs(service, timer) == leases(service)


@pytest.mark.parametrize("overlap", ["skip", "buffer_one"])
@pytest.mark.parametrize("is_started", [False, True])
def test_open_runs_of_a_timer_with_another_run_that_is_out_is_busy(
    service: Service, timer: Definition, overlap: str, is_started: bool
) -> None:
    note(service, held(timer))
    if is_started:
        start(service, run_of(timer))
    before = leases(service)
    assert note(service, held(timer, "next", overlap=overlap)) == ["busy"]
    assert leases(service) == open_runs(service, timer) == before
    assert line(service, "next") is None


def test_open_runs_that_cancel_others_names_them(service: Service, timer: Definition) -> None:
    note(service, held(timer, "x", "y"))
    start(service, run_of(timer, "y"))
    assert note(service, held(timer, "next", overlap="cancel_other")) == ["cancel y x"]
    assert open_runs(service, timer).keys() == {"x", "y", "next"}
    again = note(service, held(timer, "next", overlap="cancel_other"))
    assert again == ["cancel y x"], "until they have ended"
    end(service, run_of(timer, "x"))
    end(service, run_of(timer, "y"))
    assert note(service, held(timer, "next", overlap="cancel_other")) == ["open"]


def test_open_runs_of_a_timer_whose_runs_may_overlap_are_open(
    service: Service, timer: Definition
) -> None:
    note(service, held(timer, overlap="allow"))
    assert note(service, held(timer, "next", overlap="allow")) == ["open"]
    assert open_runs(service, timer).keys() == {"task", "next"}


def test_open_runs_of_a_run_that_is_noted_counts_its_time_anew(
    service: Service, timer: Definition
) -> None:
    """It could not be sent before, or it was, and the commit's answer was lost."""
    note(service, held(timer))
    service.clock.advance(100)
    assert note(service, held(timer)) == ["open"]
    assert leases(service) == open_runs(service, timer) == {"task": QUEUED_LEASE + 100}


def test_open_runs_of_a_run_that_a_worker_has_started_leaves_its_lease(
    service: Service, timer: Definition
) -> None:
    note(service, held(timer))
    start(service, run_of(timer))
    before = line(service)
    assert note(service, held(timer)) == ["open"]
    assert line(service) == before
    assert leases(service) == open_runs(service, timer) == {"task": RUN_LEASE}


def test_open_runs_is_held_up_by_a_run_until_its_lease_has_ended(
    service: Service, timer: Definition
) -> None:
    note(service, held(timer))
    start(service, run_of(timer))
    service.clock.advance(RUN_LEASE - 0.001)
    assert note(service, held(timer, "next")) == ["busy"]
    service.clock.advance(0.001)
    assert note(service, held(timer, "next")) == ["open"]
    assert open_runs(service, timer).keys() == {"next"}


def test_open_runs_of_a_run_that_is_renewed_stays_busy(service: Service, timer: Definition) -> None:
    note(service, held(timer))
    start(service, run_of(timer))
    for _ in range(5):
        service.clock.advance(RUN_LEASE / 2)
        renew(service, ("task", "m1"))
    assert note(service, held(timer, "next")) == ["busy"]


def test_open_runs_answers_for_each_run_in_its_place(service: Service, timer: Definition) -> None:
    other = service.add("other", every=3600)
    note(service, held(other))
    answers = note(
        service,
        held(other, "next"),
        held(timer, "one"),
        held(timer, "two"),
        held(timer, "three", overlap="cancel_other"),
    )
    assert answers == ["busy", "open", "busy", "cancel one"]


@pytest.mark.parametrize("text", EDITED)
def test_open_runs_of_an_entry_edited_by_hand_notes_it_anew(
    service: Service, timer: Definition, text: str
) -> None:
    edit(service, text)
    assert note(service, held(timer)) == ["open"]
    assert line(service) == f"{START_MS} 1 0 0 0 0 -a"


def test_open_runs_of_another_epoch_is_fenced(service: Service, timer: Definition) -> None:
    with pytest.raises(FencedError):
        service.store.open_runs("a", OVER, [held(timer)])
    assert (line(service), leases(service)) == (None, {})


# ------------------------------------------------------------------ close_runs


def close(service: Service, *held_runs: HeldRun) -> int:
    """Forget runs; return how many were forgotten."""
    pairs = [part for run in held_runs for id in run.task_ids for part in (run.timer_id, id)]
    return int(service.store._call("close_runs", "a", *pairs))


def test_close_runs_spares_what_another_instance_has_noted_since(
    service: Service, timer: Definition
) -> None:
    note(service, held(timer))
    other = service.join("b")
    assert service.store.open_runs("b", other, [held(timer)]) == ["open"]
    assert close(service, held(timer)) == 0
    assert leases(service) == {"task": QUEUED_LEASE}


def test_close_runs_forgets_what_was_noted(service: Service, timer: Definition) -> None:
    run = held(timer, "x", "y")
    note(service, run)
    assert close(service, run) == 2
    assert (line(service, "x"), line(service, "y")) == (None, None)
    assert leases(service) == open_runs(service, timer) == {}
    assert note(service, held(timer, "next")) == ["open"]


def test_close_runs_spares_what_a_worker_has_started(service: Service, timer: Definition) -> None:
    run = held(timer, "x", "y")
    note(service, run)
    start(service, run_of(timer, "y"))
    assert close(service, run) == 1
    assert leases(service) == open_runs(service, timer) == {"y": RUN_LEASE}


@pytest.mark.parametrize("text", [None, *EDITED])
def test_close_runs_of_what_is_not_out_forgets_the_others(
    service: Service, timer: Definition, text: str | None
) -> None:
    note(service, held(timer))
    if text is not None:
        edit(service, text, "other")
    assert close(service, held(timer, "other", "task")) == 1
    assert leases(service) == {}


def test_close_runs_forgets_more_than_one_call_takes(service: Service, timer: Definition) -> None:
    run = held(timer, *(f"task{i}" for i in range(2 * BATCH + 1)))
    note(service, run)
    service.store.close_runs("a", [run])
    assert leases(service) == {}


# ------------------------------------------------------------------ lose


def lose(
    service: Service, epoch: int, found: tuple[str, str] | None = None, resent_id: str = ""
) -> int:
    """Mark a run as lost, by default the only one; return the code."""
    if found is None:
        (found,) = service.store.lost_runs()
    return service.store.lose("a", epoch, found, resent_id=resent_id, why="why", name="näme")


@pytest.fixture
def lost(service: Service, epoch: int, timer: Definition) -> tuple[str, str]:
    """The run "task", number 3 of the timer, whose lease has just ended."""
    start(service, run_of(timer, number=3, retries=1))
    service.clock.advance(RUN_LEASE)
    service.store.heartbeat("a", epoch)
    (found,) = service.store.lost_runs()
    return found


def test_lose_puts_the_run_among_the_dead_letters(
    service: Service, epoch: int, timer: Definition, lost: tuple[str, str]
) -> None:
    assert lost == ("task", f"{timer.id} {START_MS} 3 0 1 0 0 m1")
    assert lose(service, epoch, lost) == 1
    assert (line(service), leases(service), service.store.lost_runs()) == (None, {}, [])
    assert noted(service)[-1] == {
        "at": str(START_MS + 60_000),
        "task_id": "task",
        "timer": timer.id,
        "number": "3",
        "due": str(START_MS),
        "shard": "0",
        "retries": "1",
        "state": "lost",
        "error": "why",
    }
    assert letters(service) == {
        "task": {
            "timer": timer.id,
            "name": "näme",
            "due": str(START_MS),
            "number": "3",
            "shard": "0",
            "task_id": "task",
            "retries": "1",
            "reason": "lost",
            "error": "why",
            "where": "",
            "revision": timer.revision,
            "at": str(START_MS + 60_000),
        }
    }
    assert service.store.counters()["lost"] == 1


def test_lose_sends_the_run_again_at_once_in_its_place(
    service: Service, epoch: int, timer: Definition, lost: tuple[str, str]
) -> None:
    assert service.store.claim_run("task", "m1", 3600 * SECOND) is None
    codes: list[int] = []
    woken = woken_by(service, lambda: codes.append(lose(service, epoch, lost, "run1-task")))
    assert (codes, woken) == ([2], {"a"})
    due = service.due_one("a", epoch)
    assert (due.id, due.parent, due.revision) == ("run1-task", timer.id, timer.revision)
    assert (due.due_ms, due.run_number) == (START_MS, 3)
    assert is_at_once(service, due.id)
    assert service.store.definitions([due.id]) == [timer.blob]
    claim = service.keys("run_claim", encode_name("task"))
    assert service.redis.exists(claim) == 0, "else a worker takes it for a duplicate"
    assert (states(service)[-1], letters(service), leases(service)) == ("lost", {}, {})
    assert service.store.counters()["lost"] == 1
    assert service.commit("a", epoch, Settlement(due, "run")) == [1]
    assert not service.exists(due.id)
    (entry,) = (each for each in service.store.history(0) if "sent" in each)
    assert entry["sent"] == f"{timer.id} {START_MS} resent"


def test_lose_deletes_the_claim_of_any_task_id(
    service: Service, epoch: int, timer: Definition
) -> None:
    task = "a b/{c}.é"
    start(service, run_of(timer, task))
    service.store.claim_run(task, "m1", 3600 * SECOND)
    service.clock.advance(RUN_LEASE)
    assert lose(service, epoch, resent_id="run1-x") == 2
    assert service.store.claim_run(task, "m2", 3600 * SECOND) is None


def test_lose_of_a_run_whose_timer_is_gone_keeps_a_letter(
    service: Service, epoch: int, timer: Definition, lost: tuple[str, str]
) -> None:
    service.store.delete([timer.id])
    assert lose(service, epoch, lost, "run1-task") == 1
    assert letters(service)["task"]["timer"] == timer.id
    assert not service.exists("run1-task")


@pytest.mark.parametrize("damage", ["no definition", "no revision", "spoilt"])
def test_lose_of_a_run_of_a_timer_edited_by_hand_keeps_a_letter(
    service: Service, epoch: int, timer: Definition, lost: tuple[str, str], damage: str
) -> None:
    service.is_damaged = True
    definition = service.keys("timer_definition", timer.id)
    if damage == "no definition":
        service.redis.delete(definition)
    elif damage == "no revision":
        service.redis.hdel(service.keys("timer", timer.id), "revision")
    else:
        service.redis.delete(definition)
        service.redis.hset(definition, "a", "b")
    assert lose(service, epoch, lost, "run1-task") == 1
    assert letters(service).keys() == {"task"}


def test_lose_spares_a_run_whose_lease_has_not_ended(
    service: Service, epoch: int, timer: Definition
) -> None:
    start(service, run_of(timer))
    service.clock.advance(RUN_LEASE - 0.001)
    assert service.store.lost_runs() == []
    text = service.redis.hget(service.keys("running"), "task")
    assert lose(service, epoch, ("task", str(text))) == 0
    assert leases(service) == {"task": RUN_LEASE}
    service.clock.advance(0.001)
    assert lose(service, epoch) == 1


@pytest.mark.parametrize("change", ["taken over", "ended", "renewed", "lost by another"])
def test_lose_spares_a_run_that_has_changed_since_it_was_read(
    service: Service, epoch: int, timer: Definition, lost: tuple[str, str], change: str
) -> None:
    if change == "taken over":
        start(service, run_of(timer, message="m2", retries=1))
        service.clock.advance(RUN_LEASE)
    elif change == "ended":
        end(service, run_of(timer, retries=1))
    elif change == "renewed":
        renew(service, ("task", "m1"))
    else:
        lose(service, epoch, lost)
    before = letters(service), noted(service), line(service)
    assert lose(service, epoch, lost) == 0
    assert (letters(service), noted(service), line(service)) == before


def test_lose_of_another_epoch_is_fenced(service: Service, lost: tuple[str, str]) -> None:
    with pytest.raises(FencedError):
        lose(service, OVER, lost)
    assert service.store.lost_runs() == [lost]


@pytest.mark.parametrize("text", EDITED)
def test_lose_drops_an_entry_edited_by_hand(
    service: Service, epoch: int, lost: tuple[str, str], text: str
) -> None:
    edit(service, text)
    (found,) = service.store.lost_runs()
    assert lose(service, epoch, found) == 0
    assert (line(service), leases(service)) == (None, {})
    assert letters(service) == {}


def test_lose_drops_a_lease_of_which_nothing_is_known(
    service: Service, epoch: int, lost: tuple[str, str]
) -> None:
    """Else enough of them hide all that is lost after them."""
    service.redis.hdel(service.keys("running"), "task")
    (found,) = service.store.lost_runs()
    assert lose(service, epoch, found) == 0
    assert leases(service) == {}


def test_lose_is_offered_what_ended_first_and_no_more_than_asked_for(
    service: Service, timer: Definition
) -> None:
    for i in range(5):
        start(service, run_of(timer, f"task{i}"))
        service.clock.advance(1)
    service.clock.advance(RUN_LEASE - 2)
    assert [id for id, _ in service.store.lost_runs()] == ["task0", "task1", "task2", "task3"]
    assert [id for id, _ in service.store.lost_runs(limit=2)] == ["task0", "task1"]


def _resending(service: Service, times: int = 1) -> Definition:
    return service.add("timer", every=10, policy=Policy(resend_lost=times))


@pytest.mark.parametrize("is_triggered", [False, True])
def test_lose_sends_a_run_again_as_the_same_task(
    service: Service, beat: Beat, broker: Broker, is_triggered: bool
) -> None:
    timer = _resending(service, times=2)
    if is_triggered:
        service.trigger(timer)
    else:
        service.clock.advance(10)
    beat.step()
    (first,) = broker.sent
    service.store.pause(timer.id)
    for times in (1, 2):
        service.clock.advance(QUEUED_LEASE)
        beat.register()
        assert LostRuns(service.store).step(beat.lease) == 1
        beat.step()
        again = broker.sent[times]
        assert (again.task_id, again.resent) == (first.task_id, times)
        assert (again.scheduled_ms, again.number) == (first.scheduled_ms, first.number)
        assert again.header == {**first.header, "resent": times}
        assert line(service, first.task_id) == f"{first.scheduled_ms} 1 0 0 {times} 0 -a"
    service.clock.advance(QUEUED_LEASE)
    beat.register()
    assert LostRuns(service.store).step(beat.lease) == 1
    assert letters(service).keys() == {first.task_id}
    assert service.store.pending_count() == 0


def test_lose_of_a_run_while_the_next_is_out_sends_it_again_or_keeps_a_letter(
    service: Service, beat: Beat, broker: Broker
) -> None:
    timer = service.add("timer", every=10, policy=Policy(resend_lost=1, overlap="skip"))
    service.clock.advance(10)
    beat.step()
    (first,) = broker.sent
    start(service, run_of(timer, first.task_id, scheduled_ms=first.scheduled_ms))
    service.clock.advance(RUN_LEASE)
    beat.register()
    beat.step()
    assert len(broker.sent) == 2, "nobody has looked for lost runs yet"
    assert LostRuns(service.store).step(beat.lease) == 1
    beat.step()
    is_sent = first.task_id in [run.task_id for run in broker.sent[2:]]
    is_waiting = service.exists(resent_id(1, first.task_id))
    assert is_sent or is_waiting or letters(service)


def test_lose_knows_how_often_a_run_was_lost_from_the_worker_too(
    service: Service, beat: Beat
) -> None:
    timer = _resending(service)
    start(service, run_of(timer, resent=1))
    service.clock.advance(RUN_LEASE)
    beat.register()
    assert LostRuns(service.store).step(beat.lease) == 1
    assert letters(service).keys() == {"task"}


def test_lose_looks_after_every_lost_run_whatever_was_edited(service: Service, beat: Beat) -> None:
    timer = _resending(service)
    for i, text in enumerate(EDITED):
        start(service, run_of(timer, f"edited{i}"))
        edit(service, text, f"edited{i}")
    task = "12345678-1234-1234-1234-123456789abc"
    start(service, run_of(timer, task))
    service.clock.advance(RUN_LEASE)
    beat.register()
    assert LostRuns(service.store).step(beat.lease) == 1
    assert leases(service) == {}
    assert service.state(resent_id(1, task)).parent == timer.id


# ------------------------------------------------------------------ requeue


def bury(service: Service, timer: Definition, task_id: str = "task") -> None:
    """Leave the dead letter of a run."""
    end(service, run_of(timer, task_id), runs.FAILED, letter={"reason": "failed"})


def requeue(service: Service, timer: Definition, letter: str = "task") -> tuple[bool, str]:
    """Send what a letter holds once more; return the answer, and the id of the one-shot."""
    id = new_trigger_id()
    sent = service.store.requeue(letter, id, timer.id, timer.revision, timer.blob)
    return sent, id


def test_requeue_sends_what_the_letter_holds_at_once_in_its_place(
    service: Service, epoch: int, timer: Definition
) -> None:
    bury(service, timer)
    bury(service, timer, "other")
    service.clock.advance(5)
    answers: list[tuple[bool, str]] = []
    assert "a" in woken_by(service, lambda: answers.append(requeue(service, timer)))
    ((sent, id),) = answers
    assert sent
    assert letters(service).keys() == {"other"}
    assert service.redis.exists(service.keys("dead_timer", "task")) == 0
    due = service.due_one("a", epoch)
    assert (due.id, due.parent, due.revision) == (id, timer.id, timer.revision)
    assert (due.due_ms, due.run_number) == (service.clock.now_ms, 1)
    assert service.store.definitions([id]) == [timer.blob]
    assert service.commit("a", epoch, Settlement(due, "run")) == [1]
    assert not service.exists(id)


def test_requeue_of_no_letter_sends_nothing(service: Service, timer: Definition) -> None:
    bury(service, timer)
    assert requeue(service, timer)[0]
    sent, id = requeue(service, timer)
    assert (sent, service.exists(id)) == (False, False)


def test_requeue_of_a_timer_that_is_gone_leaves_nothing_once_it_is_sent(
    service: Service, epoch: int, timer: Definition
) -> None:
    bury(service, timer)
    service.store.delete([timer.id])
    _, id = requeue(service, timer)
    assert service.commit("a", epoch, Settlement(service.due_one("a", epoch), "run")) == [1]
    assert not service.exists(id)
    assert service.redis.exists(service.keys("triggers", timer.id)) == 0


def test_requeue_goes_with_the_timer_that_it_belongs_to(
    service: Service, timer: Definition
) -> None:
    bury(service, timer)
    _, id = requeue(service, timer)
    service.store.delete([timer.id])
    assert not service.exists(id)


# ------------------------------------------------------------------ the last run of a timer


def finish(service: Service, epoch: int, **fields: Any) -> Definition:
    """Let a timer's only run be sent; return its definition."""
    timer = service.add("once", at_ms=START_MS, **fields)
    due = service.due_one("a", epoch)
    settlement = Settlement(due, "run", summary=timer.summary)
    assert service.commit("a", epoch, settlement) == [1]
    return timer


def definition_of(service: Service, timer: Definition) -> str | None:
    """Return what is stored of a timer's definition."""
    return service.store.definitions([timer.id])[0]


def test_run_ended_of_the_last_run_cuts_the_definition(service: Service, epoch: int) -> None:
    timer = finish(service, epoch, args=("secret",))
    start(service, run_of(timer))
    assert definition_of(service, timer) == timer.blob
    end(service, run_of(timer), runs.RETRIED, keep_ms=5000)
    end(service, run_of(timer, "other", scheduled_ms=START_MS - 1))
    assert definition_of(service, timer) == timer.blob
    end(service, run_of(timer, retries=1))
    assert definition_of(service, timer) == timer.summary
    assert decode_definition(timer.summary).is_cut
    assert service.field(timer.id, "summary") is None


def test_run_ended_of_the_last_run_leaves_the_definition_of_a_timer_that_goes_on(
    service: Service, epoch: int
) -> None:
    timer = finish(service, epoch, args=(1,))
    again = service.add("once", at_ms=START_MS + 5000, args=(2,))
    end(service, run_of(timer))
    assert definition_of(service, timer) == again.blob
    service.clock.advance(5)
    assert service.commit("a", epoch, Settlement(service.due_one("a", epoch), "run")) == [1]


@pytest.mark.parametrize("size", [10, 100_000])
def test_the_letter_of_the_last_run_holds_the_definition_or_the_timer_does(
    service: Service, epoch: int, size: int
) -> None:
    timer = finish(service, epoch, args=("x" * size,), options={"queue": "q"})
    end(service, run_of(timer), runs.FAILED, letter={"reason": "failed"})
    (row,) = letters(service).values()
    assert ("definition" in row) is (size < 65536)
    assert requeued(service.shards, row) == (timer_like(timer), None)


@pytest.mark.parametrize("size", [10, 100_000])
def test_the_letter_of_a_last_run_that_was_lost_holds_the_definition_or_the_timer_does(
    service: Service, epoch: int, size: int
) -> None:
    timer = finish(service, epoch, args=("x" * size,), options={"queue": "q"})
    start(service, run_of(timer))
    service.clock.advance(RUN_LEASE)
    service.store.heartbeat("a", epoch)
    assert lose(service, epoch) == 1
    (row,) = letters(service).values()
    assert ("definition" in row) is (size < 65536)
    assert requeued(service.shards, row) == (timer_like(timer), None)


class timer_like:  # noqa: N801 - stands for a value
    """Equals every definition that is stored as the one it was made of."""

    def __init__(self, definition: Definition) -> None:
        self._blob = definition.blob

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Definition) and other.blob == self._blob

    __hash__ = object.__hash__


def test_the_letter_of_the_last_run_that_is_given_up_holds_the_definition(
    service: Service, epoch: int
) -> None:
    timer = service.add("once", at_ms=START_MS, args=(1,))
    due = service.due_one("a", epoch)
    assert service.commit("a", epoch, given_up(due, None, timer.summary)) == [1]
    (row,) = letters(service).values()
    assert row["definition"] == timer.blob


def test_a_letter_that_does_not_tell_what_to_send_is_kept(service: Service, epoch: int) -> None:
    timer = finish(service, epoch, args=(1,))
    end(service, run_of(timer))
    end(service, run_of(timer), runs.FAILED, letter={"reason": "failed", "name": "once"})
    (row,) = letters(service).values()
    with pytest.raises(InvalidTimerError, match=r"'once' .* has had its last run, and is over"):
        requeued(service.shards, row)
    again = service.add("once", at_ms=START_MS + 5000, args=(2,))
    assert requeued(service.shards, row) == (timer_like(again), None)


def test_what_is_cut_is_what_the_timer_was_when_it_finished_last(
    service: Service, epoch: int
) -> None:
    finish(service, epoch, args=(1,))
    timer = service.add("once", at_ms=START_MS + 5000)
    service.clock.advance(5)
    settlement = Settlement(service.due_one("a", epoch), "run", summary=timer.summary)
    assert service.commit("a", epoch, settlement) == [1]
    end(service, run_of(timer, scheduled_ms=START_MS + 5000))
    assert definition_of(service, timer) == timer.blob


def test_run_ended_of_a_lost_run_that_has_succeeded_takes_its_letter_back(
    service: Service, epoch: int, timer: Definition, lost: tuple[str, str]
) -> None:
    assert lose(service, epoch, lost) == 1
    end(service, run_of(timer, "other", retries=1), letter={"reason": "failed"}, state=runs.FAILED)
    end(service, run_of(timer, number=3, retries=1))
    assert letters(service).keys() == {"other"}


@pytest.mark.parametrize("damage", ["unreadable", "gone"])
def test_a_letter_that_tells_all_needs_no_timer(
    service: Service, timer: Definition, damage: str
) -> None:
    whole = {"name": "näme", "task": "t", "call": "[[1],{}]", "options": "{}", "reason": "failed"}
    end(service, run_of(timer), runs.FAILED, letter=whole)
    if damage == "gone":
        service.store.delete([timer.id])
    else:
        service.redis.set(service.keys("timer_definition", timer.id), "nonsense")
    (row,) = letters(service).values()
    definition, _ = requeued(service.shards, row)
    assert (definition.name, definition.task, definition.args) == ("näme", "t", [1])
    with pytest.raises(InvalidTimerError, match="is gone, or can not be read"):
        requeued(service.shards, {**row, "call": "nonsense"})


# ------------------------------------------------------------------ what was sent, and is no more


def lost_after(service: Service, epoch: int, act: Callable[[], object], **fields: Any) -> None:
    """Let a run of a timer be lost, after something else has happened."""
    timer = service.add("timer", every=10, args=(1,), **fields)
    service.clock.advance(10)
    service.store.heartbeat("a", epoch)
    due = service.due_one("a", epoch)
    service.commit("a", epoch, Settlement(due, "run", next_due_ms=due.due_ms + 10_000_000))
    start(service, run_of(timer, scheduled_ms=due.due_ms))
    service.clock.advance(1)
    act()
    service.clock.advance(RUN_LEASE)
    service.store.heartbeat("a", epoch)


@pytest.mark.parametrize("change", ["update", "create again", "delete", "nothing", "the same"])
def test_lose_sends_again_what_was_sent_or_nothing(
    service: Service, epoch: int, change: str
) -> None:
    def act() -> None:
        if change == "update":
            service.add("timer", every=10, args=(2,))
        elif change == "the same":
            service.add("timer", every=10, args=(1,))
        elif change != "nothing":
            service.store.delete([timer_id("timer")])
        if change == "create again":
            service.add("timer", every=10, args=(1,))

    lost_after(service, epoch, act)
    is_known = change in ("nothing", "the same")
    assert lose(service, epoch, resent_id="run1-task") == (2 if is_known else 1)
    assert service.exists("run1-task") is is_known


@pytest.mark.parametrize("is_late", [False, True])
def test_the_letter_of_a_lost_run_is_sent_by_what_sent_it_or_not_at_all(
    service: Service, epoch: int, is_late: bool
) -> None:
    def change() -> None:
        service.add("timer", every=10, args=(2,))

    lost_after(service, epoch, (lambda: None) if is_late else change)
    assert lose(service, epoch) == 1
    if is_late:
        change()
    (row,) = letters(service).values()
    with pytest.raises(InvalidTimerError, match="was changed after the run was sent"):
        requeued(service.shards, row)
    if is_late:  # and back
        timer = service.add("timer", every=10, args=(1,))
        assert requeued(service.shards, row) == (timer_like(timer), None)


def test_a_one_shot_whose_moment_had_come_is_known_when_it_is_lost(
    service: Service, epoch: int
) -> None:
    timer = service.add("once", at_ms=START_MS - 5000, args=(1,))
    due = service.due_one("a", epoch)
    service.commit("a", epoch, Settlement(due, "run", summary=timer.summary))
    start(service, run_of(timer, scheduled_ms=due.due_ms))
    service.clock.advance(RUN_LEASE)
    service.store.heartbeat("a", epoch)
    assert lose(service, epoch, resent_id="run1-task") == 2


def test_what_was_requeued_is_kept_for_a_letter_of_its_own(
    service: Service, epoch: int, timer: Definition
) -> None:
    """Also when its timer is gone, or has been changed."""
    bury(service, timer)
    other = service.define("timer", every=3600, args=("as it was",))
    id, task_id = new_requeued_id(), "0" * 36
    kept = service.store.requeue("task", id, timer.id, other.revision, other.blob, task_id=task_id)
    assert kept
    assert letters(service) == {}
    due = service.due_one("a", epoch)
    assert service.commit("a", epoch, Settlement(due, "run")) == [1]
    service.store.delete([timer.id])
    run = run_of(timer, task_id, scheduled_ms=due.due_ms)
    start(service, run)
    service.clock.advance(RUN_LEASE)
    service.store.heartbeat("a", epoch)
    assert lose(service, epoch) == 1
    ((letter, row),) = letters(service).items()
    assert letter == task_id
    assert requeued(service.shards, row) == (timer_like(other), None)
    assert service.redis.ttl(service.keys("dead_timer", task_id)) == -1, "as all letters"


def test_what_was_requeued_is_not_kept_for_ever(service: Service, timer: Definition) -> None:
    bury(service, timer)
    service.store.requeue("task", "again-x", timer.id, "r", timer.blob, task_id="other")
    assert 0 < service.redis.ttl(service.keys("dead_timer", "other")) <= 7 * 86_400
    assert service.store.dead_letter("other") is None


# ------------------------------------------------------------------ what a letter tells


SHARDED = {"policy": Policy(shards=4), "every": 3600}


@pytest.mark.parametrize("is_told", [True, False])
def test_of_a_run_with_several_messages_only_one_is_sent_again(
    service: Service, epoch: int, is_told: bool
) -> None:
    timer = service.add("sharded", **SHARDED)
    letter = {"reason": "failed", **({"shards": "4"} if is_told else {})}
    end(service, run_of(timer, shard=2), runs.FAILED, letter=letter)
    (row,) = letters(service).values()
    assert requeued(service.shards, row) == (timer_like(timer), 2)
    id = new_requeued_id(2)
    run = Run("s", "a", timer.id, id, 1, START_MS, 1, timer)
    assert [(part.shard_index, part.shard_total) for part in run.parts] == [(2, 4)]
    every = run._replace(identity=new_requeued_id())
    assert len(every.parts) == len({part.task_id for part in every.parts}) == 4


@pytest.mark.parametrize(("then", "told"), [(2, None), (8, 4), (1, None)])
def test_a_message_of_a_run_is_not_sent_as_one_of_another_number(
    service: Service, epoch: int, then: int, told: int | None
) -> None:
    timer = service.add("sharded", every=3600, policy=Policy(shards=then))
    letter = {"reason": "failed"} | ({} if told is None else {"shards": str(told)})
    end(service, run_of(timer, shard=2), runs.FAILED, letter=letter)
    (row,) = letters(service).values()
    with pytest.raises(InvalidTimerError, match=f"has {then} shards by now"):
        requeued(service.shards, row)


def test_no_canvas_is_sent_for_a_task_in_it_of_which_too_little_is_known(
    service: Service, epoch: int
) -> None:
    timer = service.add("canvas", every=3600, task="celery.chain", args=(1,))
    for letter, why in (
        ({"reason": "lost"}, "is a canvas"),
        ({"reason": "failed", "task": "tasks.step"}, "has sent 'tasks.step'"),
        ({"reason": "failed", "task": "tasks.step", "call": "[[1],{}]"}, "has sent 'tasks.step'"),
    ):
        end(service, run_of(timer), runs.FAILED, letter=letter)
        (row,) = letters(service).values()
        with pytest.raises(InvalidTimerError, match=why):
            requeued(service.shards, row)
    whole = {
        "reason": "failed",
        "task": "tasks.step",
        "call": "[[1],{}]",
        "options": '{"queue":"q"}',
    }
    end(service, run_of(timer), runs.FAILED, letter=whole)
    (row,) = letters(service).values()
    definition, _ = requeued(service.shards, row)
    assert (definition.task, definition.args) == ("tasks.step", [1])
    assert (definition.options, definition.name) == ({"queue": "q"}, "canvas")


# ------------------------------------------------------------------ revoke_runs


def test_run_started_of_a_revoked_run_gives_it_no_lease(
    service: Service, timer: Definition
) -> None:
    service.store.revoke_runs(["task"], "")
    assert start(service, run_of(timer)) == REVOKED
    assert (line(service), leases(service)) == (None, {})
    assert states(service) == []
    assert start(service, run_of(timer, "other")) == 1


def test_revoke_runs_ends_their_leases_and_says_so(service: Service, timer: Definition) -> None:
    note(service, held(timer))
    start(service, run_of(timer))
    start(service, run_of(timer, "other"))
    service.store.revoke_runs(["task", "gone"], "why")
    assert (line(service), leases(service).keys(), open_runs(service, timer)) == (
        None,
        {"other"},
        {},
    )
    assert noted(service)[-1] | {"at": ""} == {
        "at": "",
        "task_id": "task",
        "timer": timer.id,
        "number": "1",
        "due": str(START_MS),
        "shard": "0",
        "retries": "0",
        "state": "revoked",
        "error": "why",
    }
    assert sorted(service.store.revoked_runs()) == ["gone", "task"]


def test_revoke_runs_lets_whoever_waits_for_them_be_looked_at(service: Service, epoch: int) -> None:
    timer = service.add("timer", every=10, policy=Policy(overlap="buffer_one"))
    note(service, held(timer, "task"))
    service.clock.advance(10)
    service.store.heartbeat("a", epoch)
    due = service.due_one("a", epoch)
    assert service.commit("a", epoch, Settlement(due, "waits", reason="next")) == [1]
    assert woken_by(service, lambda: service.store.revoke_runs(["task"], "")) == {"a"}
    assert service.due_one("a", epoch).id == timer.id


def test_revoke_runs_keeps_the_ids_for_a_day(service: Service, timer: Definition) -> None:
    service.store.revoke_runs([f"task-{n}" for n in range(BATCH + 1)], "")
    assert len(service.store.revoked_runs()) == BATCH + 1
    service.clock.advance(86_400)
    service.store.revoke_runs(["new"], "")
    assert service.store.revoked_runs() == ["new"]


def test_revoke_runs_keeps_the_newest_ids(service: Service, timer: Definition) -> None:
    key = service.keys("revoked_runs")
    service.redis.zadd(key, {f"task-{n:05}": START_MS - 50_000 + n for n in range(50_000)})
    service.store.revoke_runs(["new"], "")
    assert service.redis.zcard(key) == 50_000
    assert service.redis.zscore(key, "task-00000") is None
    assert service.redis.zscore(key, "task-00001") is not None


def test_revoke_runs_over_keys_edited_by_hand_ends_the_others(
    service: Service, timer: Definition
) -> None:
    start(service, run_of(timer))
    edit(service, "nonsense", "odd")
    spoil(service, service.keys("revoked_runs"), service.keys("runs"))
    service.store.revoke_runs(["odd", "task"], "")
    assert (line(service), leases(service)) == (None, {})
    service.redis.delete(service.keys("revoked_runs"), service.keys("runs"))


# ------------------------------------------------------------------ purge_dead


def test_purge_dead_removes_letters_up_to_a_moment_the_oldest_first(
    service: Service, timer: Definition
) -> None:
    for i in range(5):
        bury(service, timer, f"task{i}")
        service.clock.advance(1)
    until_ms = START_MS + 3 * SECOND
    assert service.store.purge_dead(until_ms, limit=3) == 3
    assert list(letters(service)) == ["task4", "task3"]
    assert service.store.purge_dead(until_ms) == 1
    assert service.store.purge_dead(until_ms) == 0
    assert list(letters(service)) == ["task4"]
    stored = service.redis.keys(service.keys("dead_timer", "*"))
    assert stored == [service.keys("dead_timer", "task4")]


def test_purge_dead_without_a_moment_removes_all(service: Service, timer: Definition) -> None:
    for i in range(BATCH + 1):
        bury(service, timer, f"task{i}")
    assert service.store.purge_dead(None) == BATCH
    assert service.store.purge_dead(None) == 1
    assert service.redis.keys(service.keys("dead_timer*")[:-1]) == []
    assert service.store.purge_dead(None) == 0


def test_purge_dead_removes_letters_edited_by_hand(service: Service, timer: Definition) -> None:
    for id in ("gone", "spoilt"):
        bury(service, timer, id)
    service.redis.delete(service.keys("dead_timer", "gone"))
    spoil(service, service.keys("dead_timer", "spoilt"))
    assert letters(service) == {"gone": {"at": str(START_MS)}}
    assert service.store.purge_dead(None) == 2
    assert service.store.dead_letters() == []


# ------------------------------------------------------------------ commit: dead


@pytest.fixture
def due(service: Service, epoch: int) -> DueTimer:
    """A timer of `a` that is due."""
    service.add("timer", every=10, args=(1,))
    service.clock.advance(10)
    return service.due_one("a", epoch)


def given_up(due: DueTimer, next_due_ms: int | None, summary: str = "") -> Settlement:
    """Return what is committed for a run that the broker has refused for good."""
    skip = Skip("refused", 1, due.due_ms, due.due_ms)
    return Settlement(due, "dead", next_due_ms, skip, summary, reason='no "q"\n é')


def letter_id(due: DueTimer) -> str:
    """Return the id of the letter of a run that was not sent."""
    return f"{due.id}:{due.created}:{due.due}"


def test_commit_of_a_run_that_is_given_up_keeps_a_letter_and_moves_on(
    service: Service, epoch: int, due: DueTimer
) -> None:
    service.set_field(due.id, "attempts", "100")
    service.set_field(due.id, "runs", "4")
    due = service.due_one("a", epoch)
    assert service.commit("a", epoch, given_up(due, due.due_ms + 10_000)) == [1]
    state = service.state(due.id)
    assert state.due_ms == state.at_ms == due.due_ms + 10_000
    assert (state.runs, state.last_run_ms, state.attempts) == (4, None, 0)
    assert state.skips == {"refused": 1}
    assert letters(service) == {
        letter_id(due): {
            "timer": due.id,
            "due": due.due,
            "number": "5",
            "reason": "refused",
            "where": "a",
            "error": 'no "q"\n é',
            "at": str(service.clock.now_ms),
        }
    }
    assert [entry.get("skipped") for entry in service.store.history(0)] == [
        f"{due.id} refused 1 {due.due} {due.due}"
    ]


def test_commit_of_the_last_run_that_is_given_up_finishes_the_timer(
    service: Service, epoch: int, due: DueTimer
) -> None:
    assert service.commit("a", epoch, given_up(due, None, '{"name":"timer"}')) == [1]
    state = service.state(due.id)
    assert (state.is_finished, state.runs, state.skips) == (True, 0, {"refused": 1})
    assert service.store.definitions([due.id]) == ['{"name":"timer"}']
    assert letters(service)[letter_id(due)]["error"] == 'no "q"\n é'


def test_commit_of_a_trigger_that_is_given_up_keeps_its_definition_in_the_letter(
    service: Service, epoch: int, timer: Definition
) -> None:
    trigger = service.trigger(timer)
    due = service.due_one("a", epoch)
    assert service.commit("a", epoch, given_up(due, None)) == [1]
    assert not service.exists(trigger)
    letter = letters(service)[letter_id(due)]
    assert (letter["timer"], letter["definition"]) == (timer.id, timer.blob)


def test_commit_of_a_run_that_is_given_up_settles_the_others(
    service: Service, epoch: int, due: DueTimer
) -> None:
    for name in ("one", "two"):
        service.add(name, at_ms=service.clock.now_ms)
    one, two = (each for each in service.due("a", epoch) if each.id != due.id)
    settled = Settlement(one, "run"), given_up(due, due.due_ms + 10_000), Settlement(two, "run")
    assert service.commit("a", epoch, *settled) == [1, 1, 1]
    assert service.due("a", epoch) == []
    assert service.state(one.id).is_finished
    assert service.state(two.id).is_finished


@pytest.mark.parametrize("done", ["dead", "broken"])
def test_commit_of_a_timer_that_is_not_as_it_was_read_keeps_no_letter(
    service: Service, epoch: int, due: DueTimer, done: str
) -> None:
    service.add("timer", every=10, args=(2,))
    given = given_up(due, due.due_ms + 10_000)._replace(done=done)
    assert service.commit("a", epoch, given) == [-2]
    assert letters(service) == {}


# ------------------------------------------------------------------ commit: waits


def test_commit_of_a_timer_that_waits_is_looked_at_when_the_first_lease_ends(
    service: Service, epoch: int, due: DueTimer
) -> None:
    timer = service.define("timer", every=10)
    note(service, held(timer, "x", "y"))
    start(service, run_of(timer, "y"))
    let_wait(service, epoch, timer, "next")
    state = service.state(due.id)
    assert state.due_ms == due.due_ms
    assert seconds(state.at_ms or 0) == 10 + RUN_LEASE
    assert service.due("a", epoch) == []
    service.clock.advance(RUN_LEASE)
    again = service.due_one("a", epoch)
    assert (again.due, again.has_waited, again.refusals) == (due.due, True, 0)
    assert service.commit("a", epoch, service.ran(again)) == [1]
    assert service.field(due.id, "attempts") is None


@pytest.mark.parametrize("noted_runs", [(), ("next", "next too")])
def test_commit_of_a_timer_that_waits_for_what_has_ended_meanwhile_is_looked_at_now(
    service: Service, epoch: int, due: DueTimer, noted_runs: Sequence[str]
) -> None:
    """Its own messages, noted before say, are none that it waits for."""
    timer = service.define("timer", every=10)
    if noted_runs:
        note(service, held(timer, *noted_runs))
    let_wait(service, epoch, timer, "next", "next too")
    assert is_at_once(service, due.id)
    assert service.due_one("a", epoch).has_waited


def test_commit_of_a_timer_that_waits_for_a_lease_that_is_over_is_looked_at_now(
    service: Service, epoch: int, due: DueTimer
) -> None:
    timer = service.define("timer", every=10)
    note(service, held(timer))
    start(service, run_of(timer))
    service.clock.advance(RUN_LEASE + 5)
    let_wait(service, epoch, timer, "next")
    assert is_at_once(service, due.id)


def test_commit_of_a_trigger_that_waits_waits_for_its_timer(
    service: Service, timer: Definition, waiting_trigger: str
) -> None:
    assert service.state(waiting_trigger).at_ms == START_MS + QUEUED_LEASE * SECOND
    assert service.state(timer.id).at_ms == START_MS + 3600 * SECOND


def test_commit_of_a_timer_that_has_waited_counts_refusals_from_one(
    service: Service, epoch: int, waiting: Definition
) -> None:
    end(service, run_of(waiting))
    refused = Settlement(service.due_one("a", epoch), "refused", delay_ms=250)
    assert service.commit("a", epoch, refused) == [1]
    assert service.state(waiting.id).attempts == 1


# ------------------------------------------------------------------ commit: broken, unreadable


def test_commit_of_a_broken_timer_keeps_a_letter_of_its_run(
    service: Service, epoch: int, due: DueTimer
) -> None:
    broken = Settlement(due, "broken", reason="100 %s\n é")
    assert service.commit("a", epoch, broken) == [1]
    assert letters(service) == {
        letter_id(due): {
            "timer": due.id,
            "due": due.due,
            "number": "1",
            "reason": "broken",
            "where": "a",
            "error": "100 %s\n é",
            "at": str(service.clock.now_ms),
        }
    }
    assert service.state(due.id).status == "broken"


def test_commit_of_a_broken_trigger_keeps_its_definition_in_the_letter(
    service: Service, epoch: int, timer: Definition
) -> None:
    trigger = service.trigger(timer)
    due = service.due_one("a", epoch)
    assert service.commit("a", epoch, Settlement(due, "broken", reason="why")) == [1]
    letter = letters(service)[letter_id(due)]
    assert (letter["timer"], letter["definition"]) == (timer.id, timer.blob)
    assert not service.exists(trigger)


@pytest.mark.parametrize("field", ["due", "created", "revision", "runs"])
def test_commit_of_an_unreadable_timer_keeps_a_letter(
    service: Service, epoch: int, due: DueTimer, field: str
) -> None:
    service.set_field(due.id, field, "no\nsense {}")
    (read,) = service.due("a", epoch)
    assert service.commit("a", epoch, Settlement(read, "unreadable", reason="why")) == [1]
    (letter,) = letters(service).values()
    assert (letter["timer"], letter["reason"], letter["error"]) == (due.id, "broken", "why")
    assert (letter["due"], letter["number"]) == ("", "1")
    assert service.state(due.id).status == "broken"


# ------------------------------------------------------------------ delete


def test_delete_forgets_the_runs_that_no_worker_has_started(
    service: Service, timer: Definition
) -> None:
    note(service, held(timer, "x", "y"))
    start(service, run_of(timer, "y"))
    assert service.store.delete([timer.id]) == [True]
    assert (line(service, "x"), leases(service)) == (None, {"y": RUN_LEASE})
    assert service.redis.exists(service.keys("open_runs", timer.id)) == 0
    assert renew(service, ("y", "m1")) == 1
    assert end(service, run_of(timer, "y"))
    assert leases(service) == {}


def test_delete_of_a_trigger_with_its_commit_leaves_the_runs_of_its_timer(
    service: Service, epoch: int, timer: Definition
) -> None:
    note(service, held(timer))
    trigger = service.trigger(timer)
    assert service.commit("a", epoch, Settlement(service.due_one("a", epoch), "run")) == [1]
    assert not service.exists(trigger)
    assert leases(service) == open_runs(service, timer) == {"task": QUEUED_LEASE}


# ------------------------------------------------------------------ keys of other types

OURS = ("running", "run_leases", "open_runs", "dead_timers", "runs", "counters")


def spoil_ours(service: Service, timer: Definition, what: str) -> None:
    """Edit one of the keys of runs into something that it is not."""
    service.is_damaged = True
    note(service, held(timer, "x", "y"))
    spoil(service, service.keys(what, timer.id if what == "open_runs" else None))


@pytest.mark.parametrize("what", OURS)
def test_delete_over_keys_of_runs_edited_by_hand_removes_the_timer(
    service: Service, timer: Definition, what: str
) -> None:
    spoil_ours(service, timer, what)
    assert service.store.delete([timer.id]) == [True]
    assert not service.exists(timer.id)


def _settles_all(service: Service, epoch: int, due: DueTimer, what: str, done: str) -> None:
    other = service.add("other", at_ms=service.clock.now_ms)
    (last,) = (each for each in service.due("a", epoch) if each.id == other.id)
    spoil_ours(service, service.define("timer", every=10), what)
    skip = Skip("refused", 1, due.due_ms, due.due_ms)
    settled = Settlement(due, done, due.due_ms + 10_000, skip, reason="next")
    assert service.commit("a", epoch, settled, Settlement(last, "run")) == [1, 1]
    assert service.state(other.id).is_finished


@pytest.mark.parametrize("done", ["run", "skip"])
@pytest.mark.parametrize("what", OURS)
def test_commit_over_keys_of_runs_edited_by_hand_settles_all(
    service: Service, epoch: int, due: DueTimer, what: str, done: str
) -> None:
    _settles_all(service, epoch, due, what, done)


@pytest.mark.parametrize("done", ["dead", "broken", "unreadable"])
@pytest.mark.parametrize("what", OURS)
def test_commit_of_what_leaves_a_letter_over_keys_edited_by_hand_settles_all(
    service: Service, epoch: int, due: DueTimer, what: str, done: str
) -> None:
    """Else one broken timer stops all that are read with it, pass after pass."""
    _settles_all(service, epoch, due, what, done)


@pytest.mark.parametrize("what", OURS)
def test_commit_of_a_timer_that_waits_over_keys_edited_by_hand_settles_all(
    service: Service, epoch: int, due: DueTimer, what: str
) -> None:
    _settles_all(service, epoch, due, what, "waits")


@pytest.mark.parametrize("what", ["open_runs", "running", "run_leases"])
def test_open_runs_over_keys_edited_by_hand_stops_no_other_timer(
    service: Service, beat: Beat, broker: Broker, what: str
) -> None:
    service.is_damaged = True
    timer = service.add("timer", every=10, policy=Policy(overlap="skip"))
    service.add("other", every=10)
    spoil(service, service.keys(what, timer.id if what == "open_runs" else None))
    service.clock.advance(10)
    beat.step()
    assert broker.slots("other") == [10]


@pytest.mark.parametrize("how", ["lose", "run_ended", "requeue"])
def test_lose_over_a_set_of_triggers_edited_by_hand_loses_no_run(
    service: Service, epoch: int, timer: Definition, how: str
) -> None:
    service.is_damaged = True
    note(service, held(timer))
    start(service, run_of(timer))
    if how == "requeue":
        bury(service, timer)
    service.clock.advance(RUN_LEASE)
    spoil(service, service.keys("triggers", timer.id))
    if how == "lose":
        assert lose(service, epoch) == 1
        assert letters(service).keys() == {"task"}
    elif how == "run_ended":
        assert end(service, run_of(timer))
    else:
        sent, id = requeue(service, timer)
        assert sent
        assert service.exists(id)
