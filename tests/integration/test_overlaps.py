"""Runs that are held apart, refused too often or lost, and the signals of it, in a dispatcher."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from celery.utils.dispatch import Signal

from celery_dtimer import DistributedTimer, history, signals
from celery_dtimer.membership import Identity, Membership
from celery_dtimer.model import Run, new_requeued_id, resent_id, to_datetime
from celery_dtimer.overlaps import Overlaps
from celery_dtimer.policy import Policy
from celery_dtimer.publisher import BrokerDownError, RefusedError, UnsendableError
from celery_dtimer.runs import DeadLetter, LostRuns, read_letters, read_runs
from celery_dtimer.store import DueTimer, Message, OutRun, Settlement
from tests.conftest import MakeApp
from tests.integration.conftest import SECOND, START_MS, Beat, Broker, MakeService, Service
from tests.waiting import wait_until

SKIP = Policy(overlap="skip")


def start(service: Service, run: Run, message: str = "m") -> OutRun:
    """Let a worker start a run."""
    out = OutRun(run.task_id, run.timer_id, run.scheduled_ms, run.number, message=message)
    out = out._replace(resent=run.resent)
    lease_ms = round(service.settings.run_lease * 1000)
    assert service.store.run_started(out, lease_ms=lease_ms, limit_ms=0, redelivered=False)
    return out


def end(service: Service, run: Run, state: str = "succeeded", message: str = "m") -> None:
    """Let a worker report the end of a run."""
    out = OutRun(run.task_id, run.timer_id, run.scheduled_ms, run.number, message=message)
    assert service.store.run_ended(out, state, took_ms=5)


def step_at(beat: Beat, seconds: float) -> None:
    """Dispatch at a moment."""
    beat.service.clock.now_ms = START_MS + round(seconds * SECOND)
    beat.store.heartbeat(beat.instance, beat.lease.epoch)
    beat.step()


# ------------------------------------------------------------------ overlap


def test_allow_notes_nothing(beat: Beat, broker: Broker) -> None:
    beat.service.add(every=10)
    step_at(beat, 10)
    step_at(beat, 20)
    assert broker.slots() == [10, 20]
    assert not beat.service.redis.exists(beat.service.keys("running"))


def test_skip_counts_what_does_not_happen_until_the_run_has_ended(
    beat: Beat, broker: Broker
) -> None:
    timer = beat.service.add(every=10, policy=SKIP)
    step_at(beat, 10)
    start(beat.service, broker.sent[0])
    step_at(beat, 20)
    step_at(beat, 30)
    assert broker.slots() == [10]
    state = beat.service.state(timer.id)
    assert (state.skips, state.due_ms, state.runs) == ({"overlap": 2}, START_MS + 40_000, 1)
    end(beat.service, broker.sent[0])
    step_at(beat, 40)
    assert broker.slots() == [10, 40]


def test_a_run_that_no_worker_has_started_holds_for_the_stated_time(
    make_service: MakeService, broker: Broker
) -> None:
    beat = Beat(make_service(queued_lease=25), broker)
    beat.service.add(every=10, policy=SKIP)
    for seconds in (10, 20, 30, 40):
        step_at(beat, seconds)
    assert broker.slots() == [10, 40]
    beat.store.close()


def test_a_run_stands_for_what_it_was_to_stand_for(beat: Beat, broker: Broker) -> None:
    timer = beat.service.add(every=10, policy=SKIP)
    step_at(beat, 10)
    step_at(beat, 45)  # of the runs of 20, 30 and 40 one stands for all
    assert beat.service.state(timer.id).skips == {"overlap": 3}


@pytest.mark.parametrize("coalesce", [True, False])
def test_buffer_one_sends_one_as_soon_as_the_run_has_ended(
    beat: Beat, broker: Broker, coalesce: bool
) -> None:
    policy = Policy(overlap="buffer_one", coalesce=coalesce, grace_ms=1000)
    timer = beat.service.add(every=10, policy=policy)
    step_at(beat, 10)
    start(beat.service, broker.sent[0])
    step_at(beat, 20)
    step_at(beat, 45)
    assert broker.slots() == [10]
    end(beat.service, broker.sent[0])
    step_at(beat, 45.5)
    assert broker.slots() == [10, 20]
    state = beat.service.state(timer.id)
    assert (state.skips, state.due_ms) == ({"overlap": 2}, START_MS + 50_000)
    step_at(beat, 50)
    assert broker.slots() == [10, 20]
    state = beat.service.state(timer.id)
    assert (state.due_ms, state.waits) == (START_MS + 50_000, True)
    why = history.explain(timer, state, START_MS + 50_000, START_MS + 51_000, [])
    assert why == "the run is due, and waits for the end of an earlier one (overlap)"


def test_cancel_other_revokes_what_is_out(beat: Beat, broker: Broker) -> None:
    beat.service.add(every=10, policy=Policy(overlap="cancel_other"))
    step_at(beat, 10)
    start(beat.service, broker.sent[0])
    step_at(beat, 20)
    assert broker.slots() == [10, 20]
    assert broker.revoked == [broker.sent[0].task_id]
    end(beat.service, broker.sent[1])
    step_at(beat, 30)
    assert broker.revoked == [broker.sent[0].task_id]


def test_what_was_revoked_is_out_no_more_even_if_its_worker_is_dead(
    beat: Beat, broker: Broker
) -> None:
    beat.service.add(every=10, policy=Policy(overlap="cancel_other", resend_lost=3))
    step_at(beat, 10)
    start(beat.service, broker.sent[0])
    step_at(beat, 20)
    start(beat.service, broker.sent[1], "m2")
    beat.service.clock.advance(beat.service.settings.run_lease - 1)
    beat.service.store.renew_runs([(broker.sent[1].task_id, "m2")], 60_000)
    beat.service.clock.advance(2)
    beat.store.heartbeat(beat.instance, beat.lease.epoch)
    assert LostRuns(beat.service.store).step(beat.lease) == 0
    states = {record.number: record.state for record in read_runs(beat.service.shards)}
    assert states == {1: "revoked", 2: "started"}
    assert beat.service.store.revoked_runs() == [broker.sent[0].task_id]


def test_a_run_that_is_sent_again_cancels_no_newer_one(beat: Beat, broker: Broker) -> None:
    policy = Policy(overlap="cancel_other", resend_lost=1)
    timer = beat.service.add(every=10, policy=policy)
    step_at(beat, 10)
    start(beat.service, broker.sent[0])
    end(beat.service, broker.sent[0], "failed")
    lost = resent_id(1, broker.sent[0].task_id)
    parent = beat.service.store
    out = OutRun(broker.sent[0].task_id, timer.id, START_MS + 10_000, 1)
    parent.run_ended(out, "failed", letter={"reason": "failed"})
    step_at(beat, 20)
    start(beat.service, broker.sent[1])
    for id in (lost, new_requeued_id()):
        ((letter, _),) = parent.dead_letters()
        assert parent.requeue(letter, id, timer.id, timer.revision, timer.blob)
        parent.run_ended(out, "failed", letter={"reason": "failed"})
        beat.step()
    assert (broker.slots(), broker.revoked) == ([10, 20], [])
    end(beat.service, broker.sent[1])
    beat.step()
    assert len(broker.sent) == 3, "one after the other"
    assert broker.revoked == []


def test_what_can_not_be_revoked_is_revoked_later(
    beat: Beat, broker: Broker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(task_ids: Any) -> None:
        raise OSError("the broker is down")

    beat.service.add(every=10, policy=Policy(overlap="cancel_other"))
    step_at(beat, 10)
    overlaps, now = beat.dispatcher._overlaps, [0.0]
    monkeypatch.setattr(overlaps, "_clock", lambda: now[0])
    monkeypatch.setattr(overlaps, "_revoke", fail)
    step_at(beat, 20)
    now[0] += 60
    step_at(beat, 20.5)
    assert caplog.text.count("Runs can not be revoked") == 1
    assert (broker.slots(), beat.service.store.revoked_runs()) == ([10, 20], [])
    monkeypatch.setattr(overlaps, "_revoke", broker.revoke)
    step_at(beat, 21)
    assert broker.revoked == [], "it is not tried all the time"
    now[0] += 60
    step_at(beat, 22)
    assert broker.revoked == [broker.sent[0].task_id]
    assert beat.service.store.revoked_runs() == [broker.sent[0].task_id]


def test_a_refused_run_cancels_nothing(beat: Beat, broker: Broker) -> None:
    beat.service.add(every=10, policy=Policy(overlap="cancel_other"))
    step_at(beat, 10)
    start(beat.service, broker.sent[0])
    broker.answers["timer"] = RefusedError("no")
    step_at(beat, 20)
    assert (broker.slots(), broker.revoked) == ([10], [])
    broker.answers.clear()
    step_at(beat, 25)
    assert broker.revoked == [broker.sent[0].task_id]


@pytest.mark.parametrize("code", [1, -4])
def test_a_run_whose_commit_is_refused_cancels_nothing_if_that_was_to_send_it(
    beat: Beat, broker: Broker, code: int
) -> None:
    """Because its timer was paused just then, say."""
    timer = beat.service.add(every=10, policy=Policy(overlap="cancel_other"))
    step_at(beat, 10)
    start(beat.service, broker.sent[0])
    overlaps = Overlaps(beat.store, broker.revoke)
    run = broker.sent[0]._replace(scheduled_ms=START_MS + 20_000, number=2)
    due = DueTimer(timer.id, "active", due=str(run.scheduled_ms))
    (planned,), _, _ = overlaps.admit(beat.lease, [Settlement(due, "run")], [run])
    overlaps.settled(planned.pushing(Message((), ())), code, beat.instance)
    overlaps.revoke_others()
    out = beat.service.redis.hkeys(beat.service.keys("running"))
    first = broker.sent[0].task_id
    assert (broker.revoked, out) == (([first], [run.task_id]) if code == 1 else ([], [first]))


def test_a_trigger_is_held_like_a_run_of_its_timer(beat: Beat, broker: Broker) -> None:
    timer = beat.service.add(every=10, policy=SKIP)
    step_at(beat, 10)
    trigger = beat.service.trigger(timer)
    step_at(beat, 11)
    assert broker.slots() == [10]
    assert not beat.service.exists(trigger)


def test_all_messages_of_a_run_count(beat: Beat, broker: Broker) -> None:
    beat.service.add(every=10, policy=Policy(overlap="skip", shards=2))
    step_at(beat, 10)
    (run,) = broker.sent
    shards = [run._replace(shard_index=index, shard_total=2) for index in range(2)]
    end(beat.service, shards[0], message="-")
    step_at(beat, 20)
    assert broker.slots() == [10]
    end(beat.service, shards[1], message="-")
    step_at(beat, 30)
    assert broker.slots() == [10, 30]


@pytest.mark.parametrize("outcome", [RefusedError("full"), BrokerDownError("down")])
def test_a_run_that_could_not_be_sent_does_not_stand_in_its_own_way(
    beat: Beat, broker: Broker, outcome: Any
) -> None:
    beat.service.add(every=10, policy=SKIP)
    broker.answers["*"] = outcome
    step_at(beat, 10)
    broker.answers.clear()
    step_at(beat, 11)
    assert broker.slots() == [10]


def test_a_run_that_is_skipped_after_all_is_forgotten(beat: Beat, broker: Broker) -> None:
    policy = Policy(overlap="skip", grace_ms=5000)
    timer = beat.service.add(every=10, policy=policy)
    broker.answers["*"] = BrokerDownError("down")
    step_at(beat, 10)
    broker.answers.clear()
    step_at(beat, 17)
    assert beat.service.state(timer.id).skips == {"misfire": 1}
    step_at(beat, 20)
    assert broker.slots() == [20]


def test_what_was_requeued_waits_for_the_run_that_is_out(beat: Beat, broker: Broker) -> None:
    timer = beat.service.add("t", every=1000, policy=SKIP)
    step_at(beat, 1000)
    start(beat.service, broker.sent[0])
    letter = {"reason": "failed", "task": "tasks.record"}
    out = OutRun("old", timer.id, START_MS, 1, message="m0")
    beat.service.store.run_ended(out, "failed", letter=letter)
    ((id, _),) = beat.service.store.dead_letters()
    again = new_requeued_id()
    assert beat.service.store.requeue(id, again, timer.id, timer.revision, timer.blob)
    step_at(beat, 1001)
    assert len(broker.sent) == 1
    end(beat.service, broker.sent[0])
    step_at(beat, 1002)
    assert broker.sent[1].identity == again


def test_a_run_that_is_not_sent_after_all_is_forgotten(beat: Beat, broker: Broker) -> None:
    timer = beat.service.add(every=10, policy=SKIP)
    broker.answers["*"] = UnsendableError("no such serializer")
    step_at(beat, 10)
    assert beat.service.state(timer.id).status == "broken"
    assert not beat.service.redis.hlen(beat.service.keys("running"))
    assert not beat.service.redis.exists(beat.service.keys("open_runs", timer.id))


def test_of_a_trigger_no_number_is_known(beat: Beat, broker: Broker) -> None:
    timer = beat.service.add(every=1000)
    beat.service.trigger(timer)
    step_at(beat, 1)
    start(beat.service, broker.sent[0])
    (record,) = read_runs(beat.service.shards, timer.id)
    assert (record.number, record.instance, record.state) == (None, "a", "started")


# ------------------------------------------------------------------ refused for good


def test_a_run_that_is_refused_too_often_becomes_a_dead_letter(
    make_service: MakeService, broker: Broker
) -> None:
    beat = Beat(make_service(max_refusals=3), broker)
    timer = beat.service.add("stubborn", every=100)
    beat.service.add("other", every=100)
    broker.answers["stubborn"] = RefusedError("no such exchange")
    for seconds in range(100, 140, 6):
        step_at(beat, seconds)
    state = beat.service.state(timer.id)
    assert (state.skips, state.due_ms) == ({"refused": 1}, START_MS + 200_000)
    (letter,) = read_letters(beat.service.shards)
    assert (letter.reason, letter.error) == ("refused", "no such exchange")
    assert (letter.name, letter.number) == ("stubborn", 1)
    assert letter.scheduled_at == to_datetime(START_MS + 100_000)
    broker.answers.clear()
    step_at(beat, 200)
    assert broker.slots("stubborn") == [200]
    beat.store.close()


def test_a_trigger_that_can_not_be_built_is_kept_in_its_letter(beat: Beat, broker: Broker) -> None:
    timer = beat.service.add("t", every=100, args=(1, 2))
    broker.answers["t"] = UnsendableError("no")
    trigger = beat.service.trigger(timer)
    step_at(beat, 1)
    assert not beat.service.exists(trigger)
    ((id, row),) = beat.service.store.dead_letters()
    assert row["definition"] == timer.blob
    assert row["timer"] == timer.id
    assert id.startswith(trigger)


# ------------------------------------------------------------------ lost


def lose(beat: Beat) -> int:
    beat.store.heartbeat(beat.instance, beat.lease.epoch)
    return LostRuns(beat.store).step(beat.lease)


def test_a_run_without_a_lease_is_lost_once(beat: Beat, broker: Broker) -> None:
    timer = beat.service.add("t", every=1000)
    step_at(beat, 1000)
    start(beat.service, broker.sent[0])
    assert lose(beat) == 0
    beat.service.clock.advance(61)
    assert lose(beat) == 1
    assert lose(beat) == 0
    (record,) = read_runs(beat.service.shards, timer.id)
    assert (record.state, record.task_id) == ("lost", broker.sent[0].task_id)
    (letter,) = read_letters(beat.service.shards)
    assert (letter.reason, letter.name, letter.number) == ("lost", "t", 1)


@pytest.mark.parametrize("policy", [Policy(resend_lost=2), Policy(resend_lost=2, overlap="skip")])
@pytest.mark.parametrize("is_single", [True, False])
def test_it_is_sent_again_as_often_as_asked_as_the_same_run(
    beat: Beat, broker: Broker, policy: Policy, is_single: bool
) -> None:
    at: Any = {"at_ms": START_MS + SECOND} if is_single else {"every": 1000}
    beat.service.add(args=(7,), policy=policy, **at)
    step_at(beat, 1 if is_single else 1000)
    for times in (1, 2):
        start(beat.service, broker.sent[-1], f"m{times}")
        beat.service.clock.advance(61)
        assert lose(beat) == 1
        beat.step()
        first, again = broker.sent[0], broker.sent[-1]
        assert len(broker.sent) == times + 1
        assert again.task_id == first.task_id
        assert (again.timer_id, again.scheduled_ms) == (first.timer_id, first.scheduled_ms)
        assert again.number == first.number
        assert again.header == {**first.header, "resent": times}
        assert list(again.definition.args) == [7]
    out = OutRun(first.task_id, first.timer_id, first.scheduled_ms, 1, resent=2, message="m3")
    beat.service.store.run_started(out, lease_ms=1000, limit_ms=0, redelivered=False)
    beat.service.clock.advance(2)
    assert lose(beat) == 1
    beat.step()
    assert len(broker.sent) == 3
    assert [letter.reason for letter in read_letters(beat.service.shards)] == ["lost"]


def test_a_message_that_got_lost_is_sent_again(make_service: MakeService, broker: Broker) -> None:
    beat = Beat(make_service(queued_lease=30), broker)
    beat.service.add(every=1000, policy=Policy(resend_lost=1))
    step_at(beat, 1000)
    step_at(beat, 1031)
    assert lose(beat) == 1
    step_at(beat, 1031)
    assert len(broker.sent) == 2
    assert len({run.task_id for run in broker.sent}) == 1
    beat.store.close()


def test_a_run_whose_timer_is_gone_is_lost_all_the_same(beat: Beat, broker: Broker) -> None:
    timer = beat.service.add("t", every=1000, policy=Policy(resend_lost=1))
    step_at(beat, 1000)
    start(beat.service, broker.sent[0])
    beat.service.store.delete([timer.id])
    beat.service.clock.advance(61)
    assert lose(beat) == 1
    (letter,) = read_letters(beat.service.shards)
    assert (letter.timer_id, letter.name) == (timer.id, "")


# ------------------------------------------------------------------ signals


class Heard:
    """What receivers were told, by signal."""

    def __init__(self) -> None:
        self.told: list[tuple[str, dict[str, Any]]] = []
        self._receivers: list[Any] = []

    def listen(self, signal: Signal, name: str) -> None:
        def receive(signal: Any = None, **told: Any) -> None:
            self.told.append((name, told))

        self._receivers.append((signal, receive))
        signal.connect(receive, dispatch_uid=f"{id(receive)}")

    def of(self, name: str) -> list[dict[str, Any]]:
        return [told for each, told in self.told if each == name]

    def close(self) -> None:
        for signal, receive in self._receivers:
            signal.disconnect(dispatch_uid=f"{id(receive)}")


@pytest.fixture
def heard() -> Iterator[Heard]:
    """Listen to all signals."""
    heard = Heard()
    for name in vars(signals):
        signal = getattr(signals, name)
        if isinstance(signal, Signal):
            heard.listen(signal, name)
    yield heard
    heard.close()


def test_receivers_are_told_what_becomes_of_timers(
    beat: Beat, broker: Broker, heard: Heard
) -> None:
    timer = beat.service.add("t", every=10)
    step_at(beat, 35)
    (due,), (sent,), (skipped,) = map(heard.of, ("timer_due", "timer_sent", "timer_skipped"))
    scheduled_at = to_datetime(START_MS + 10_000)
    assert (
        due
        == sent
        == {
            "sender": "orders",
            "timer_id": timer.id,
            "name": "t",
            "scheduled_at": scheduled_at,
            "number": 1,
            "task_id": broker.sent[0].task_id,
            "instance": "a",
        }
    )
    assert skipped == {
        "sender": "orders",
        "timer_id": timer.id,
        "name": "t",
        "reason": "coalesced",
        "runs": 2,
        "first_at": scheduled_at + timedelta(seconds=10),
        "until_at": to_datetime(START_MS + 35_000),
        "instance": "a",
    }


def test_receivers_are_told_of_runs_that_can_not_be_sent(
    beat: Beat, broker: Broker, heard: Heard
) -> None:
    beat.service.add("t", every=10)
    broker.answers["t"] = UnsendableError("no such serializer")
    step_at(beat, 10)
    wait_until(lambda: heard.of("timer_failed"), "the letter")
    letter: DeadLetter = heard.of("timer_failed")[0]["letter"]
    assert (letter.name, letter.reason, letter.error) == ("t", "broken", "no such serializer")
    (stored,) = read_letters(beat.service.shards)
    assert (stored.id, stored.error) == (letter.id, letter.error)


def test_receivers_are_told_who_joins_and_who_is_gone(
    service: Service, heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    service.join("dead")
    service.add("t", every=1000)
    service.clock.advance(20)
    store = service.another_store()
    seconds = 0.0
    membership = Membership(store, Identity("a", "h", 1, "1"), clock=lambda: seconds)
    membership.step()
    wait_until(lambda: heard.of("instance_joined"), "that one has joined")
    (joined,) = heard.of("instance_joined")
    assert (joined["sender"], joined["instance"]) == ("orders", "a")
    assert joined["epoch"] == service.epoch("a")
    for _ in range(8):
        seconds += 5
        service.clock.advance(5)
        membership.report_progress(60)
        membership.step()
    wait_until(lambda: heard.of("failover"), "the failover")
    (left,) = heard.of("instance_left")
    assert (left["instance"], left["is_dead"]) == ("dead", True)
    moved = heard.of("failover")[-1]
    assert (moved["instance"], moved["dead"]) == ("a", ("dead",))
    assert sum(told["timers"] for told in heard.of("failover")) == 1
    store.close()


def test_receivers_are_told_of_a_beat_that_leaves(make_app: MakeApp, heard: Heard) -> None:
    timers = DistributedTimer(make_app())
    instance = timers.start()
    wait_until(lambda: heard.of("instance_joined"), "that it has joined")
    timers.stop()
    (left,) = heard.of("instance_left")
    assert (left["instance"], left["is_dead"]) == (instance, False)


def test_what_a_receiver_raises_stops_nothing(
    beat: Beat, broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(**_: Any) -> None:
        raise ValueError("a receiver of a user")

    signals.timer_due.connect(fail, dispatch_uid="fail")
    try:
        beat.service.add(every=10)
        step_at(beat, 10)
    finally:
        signals.timer_due.disconnect(dispatch_uid="fail")
    assert broker.slots() == [10]
    assert "a receiver of a user" in caplog.text
