"""One pass of firing, with a broker that does what the test says."""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Callable
from typing import Any, NoReturn

import pytest

from celery_dtimer import consistency, planning, schedules
from celery_dtimer.dispatcher import Pass
from celery_dtimer.errors import FencedError, StoreError, StoreUnavailableError
from celery_dtimer.model import ONCE, Definition, Lease, Run
from celery_dtimer.policy import Defaults
from celery_dtimer.publisher import (
    BrokerDownError,
    RefusedError,
    UnsendableError,
)
from celery_dtimer.store import OutRun, Store
from tests.conftest import FreshRedis
from tests.integration.conftest import START_MS, Beat, Broker, MakeService, Service

DOWN = BrokerDownError("down")
REFUSED = RefusedError("full")
UNSENDABLE = UnsendableError("its message can not be built")


# ------------------------------------------------------------------ the usual


def test_nothing_is_due(beat: Beat, broker: Broker) -> None:
    assert beat.step() == Pass()
    beat.service.add(every=7)
    beat.service.clock.advance(3)
    assert beat.step() == Pass(next_in=4)
    assert broker.sent == []


def test_a_due_run_is_sent_and_committed(beat: Beat, broker: Broker) -> None:
    timer = beat.service.add(args=(1,), every=10)
    beat.service.clock.advance(10.003)
    assert beat.step() == Pass(sent=1, next_in=9.997)
    (run,) = broker.sent
    assert (run.service, run.instance, run.timer_id) == ("orders", "a", timer.id)
    assert (run.scheduled_ms, run.number, run.created_ms) == (START_MS + 10_000, 1, START_MS)
    assert (run.definition.revision, run.identity) == (timer.revision, timer.id)
    assert beat.service.state(timer.id).due_ms == START_MS + 20_000
    assert beat.step().sent == 0


def test_a_short_interval_is_looked_at_in_time(beat: Beat, broker: Broker) -> None:
    beat.service.add(every=0.1)
    for _ in range(5):
        done = beat.step()
        assert done.next_in is not None
        beat.service.clock.advance(done.next_in)
    assert broker.slots() == [0.1, 0.2, 0.3, 0.4]


def test_runs_keep_their_cadence_and_count(beat: Beat, broker: Broker) -> None:
    timer = beat.service.add(every=10)
    for _ in range(6):
        beat.service.clock.advance(7)
        beat.step()
    assert broker.slots() == [10, 20, 30, 40]
    assert [run.number for run in broker.sent] == [1, 2, 3, 4]
    assert len({run.task_id for run in broker.sent}) == 4
    assert beat.service.state(timer.id).runs == 4


def test_missed_runs_become_one_and_the_others_count_as_skipped(beat: Beat, broker: Broker) -> None:
    timer = beat.service.add(every=10)
    beat.service.clock.advance(45)
    beat.step()
    beat.service.clock.advance(5)
    beat.step()
    assert broker.slots() == [10, 50]
    assert beat.service.state(timer.id).skipped == 3


def test_a_one_shot_runs_once_and_is_kept_without_its_arguments(beat: Beat, broker: Broker) -> None:
    timer = beat.service.add(at_ms=START_MS + 50, args=("secret",))
    beat.service.clock.advance(1)
    assert beat.step() == Pass(sent=1)
    assert broker.sent[0].definition.args == ["secret"]
    assert beat.service.state(timer.id).is_finished
    assert beat.service.store.definitions([timer.id]) == [timer.blob], "it may be lost"
    run = broker.sent[0]
    out = OutRun(run.task_id, timer.id, run.scheduled_ms, run.number)
    assert beat.service.store.run_ended(out, "succeeded")
    assert "secret" not in str(beat.service.store.definitions([timer.id]))
    beat.service.add(at_ms=START_MS + 50, args=("secret",))
    assert beat.step() == Pass()


def test_a_pass_goes_on_until_nothing_is_due(make_service: MakeService, broker: Broker) -> None:
    service = make_service(batch_size=3)
    beat = Beat(service, broker)
    service.add_many(7)
    service.clock.advance(11)
    done = beat.step()
    assert (done.sent, done.more) == (7, False)
    assert len(broker.sent) == 7
    beat.store.close()


def test_a_long_pass_ends_and_says_that_more_is_due(
    make_service: MakeService, broker: Broker
) -> None:
    service = make_service(batch_size=3)
    beat = Beat(service, broker, seconds=itertools.count(0, 0.05).__next__)
    service.add_many(7)
    service.clock.advance(11)
    steps = [beat.step()]
    while steps[-1].more:
        steps.append(beat.step())
    assert sum(done.sent for done in steps) == 7
    assert len(steps) > 2
    beat.store.close()


def test_a_batch_that_takes_long_to_decide_is_dispatched_in_parts(
    service: Service, broker: Broker
) -> None:
    beat = Beat(service, broker, seconds=itertools.count().__next__)
    service.add_many(4)
    service.clock.advance(11)
    assert [beat.step().sent for _ in range(4)] == [1, 1, 1, 1]
    assert beat.progress > 4
    beat.store.close()


def test_a_redis_that_answers_slowly_does_not_make_batches_smaller(
    service: Service, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = [0.0]
    beat = Beat(service, broker, seconds=lambda: seconds[0])

    def slow(call: Any) -> Any:
        def answer(*args: Any, **kwargs: Any) -> Any:
            seconds[0] += 1
            return call(*args, **kwargs)

        return answer

    for name in ("due", "begin_commit", "definitions"):
        monkeypatch.setattr(beat.store, name, slow(getattr(beat.store, name)))
    service.add_many(4)
    service.clock.advance(11)
    assert beat.step().sent == 4
    beat.store.close()


def test_batches_of_one_pass_are_committed_one_by_one(beat: Beat, broker: Broker) -> None:
    size = beat.service.settings.batch_size
    count = 2 * size + 10
    beat.service.add_many(count)
    beat.service.clock.advance(11)
    assert beat.step().sent == count
    assert beat.progress == 2 * 3
    assert len(broker.sent) == count


def test_a_changed_definition_is_read_anew(beat: Beat, broker: Broker) -> None:
    for argument in (1, 1, 2):
        beat.service.add(args=(argument,))
        beat.service.clock.advance(10)
        beat.step()
    assert [run.definition.args[0] for run in broker.sent] == [1, 1, 2]


# ------------------------------------------------------------------ triggers


def test_a_trigger_sends_what_its_parent_would_and_moves_nothing(
    beat: Beat, broker: Broker
) -> None:
    timer = beat.service.add(args=(1,))
    before = beat.service.state(timer.id)
    trigger = beat.service.trigger(timer)
    assert beat.step().sent == 1
    (run,) = broker.sent
    assert (run.timer_id, run.identity) == (timer.id, trigger)
    assert run.definition.revision == timer.revision
    assert beat.service.state(timer.id) == before
    assert not beat.service.exists(trigger)


@pytest.mark.parametrize("keep", [0, 3600])
def test_a_trigger_outlives_the_run_of_its_one_shot(
    make_service: MakeService, broker: Broker, keep: float
) -> None:
    """Its arguments are still there, though the one-shot's own are gone."""
    service = make_service(keep_finished=keep, batch_size=1)
    beat = Beat(service, broker)
    timer = service.add(at_ms=START_MS, args=("argument",))
    service.clock.advance(1)
    trigger = service.trigger(timer)
    assert beat.step().sent == 2
    assert [run.identity for run in broker.sent] == [timer.id, trigger]
    assert [run.definition.args for run in broker.sent] == [["argument"]] * 2
    beat.store.close()


def test_a_trigger_of_a_paused_timer_runs(beat: Beat, broker: Broker) -> None:
    timer = beat.service.add()
    beat.service.store.pause(timer.id)
    beat.service.trigger(timer)
    beat.step()
    assert [run.timer_id for run in broker.sent] == [timer.id]
    assert beat.service.state(timer.id).status == "paused"


# ------------------------------------------------------------------ the broker


def test_a_refused_run_waits_longer_each_time_and_later_timers_go_on(
    beat: Beat, broker: Broker
) -> None:
    timer = beat.service.add("timer", every=10)
    beat.service.add("later", every=10.001)
    broker.answers["timer"] = REFUSED
    beat.service.clock.advance(10.001)
    assert beat.step().postponed == 1
    assert broker.slots("later") == [10.001]
    delays = []
    for _ in range(8):
        at_ms = beat.service.state(timer.id).at_ms
        assert at_ms is not None
        delays.append((at_ms - beat.service.clock.now_ms) / 1000)
        beat.service.clock.now_ms = at_ms
        assert beat.step().postponed == 1
    longest = [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5, 5]
    assert all(most / 2 <= delay <= most for delay, most in zip(delays, longest, strict=True)), (
        delays
    )
    broker.answers.clear()
    beat.service.clock.advance(5)
    beat.step()
    assert broker.slots() == [10]
    assert beat.service.state(timer.id).attempts == 0


def test_what_is_refused_again_and_again_is_logged_now_and_then_with_the_sum(
    service: Service, broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    seconds = 100.0
    beat = Beat(service, broker, seconds=lambda: seconds)
    service.add_many(3, "timer")
    broker.answers["*"] = REFUSED

    def told() -> list[str]:
        return [line for line in caplog.messages if "not sent" in line]

    with caplog.at_level(logging.WARNING, "celery_dtimer"):
        for _ in range(4):
            service.clock.advance(20)
            assert beat.step().postponed == 3
        assert [line.split(" ")[0] for line in told()] == ["3"]
        seconds += 5
        service.clock.advance(20)
        assert beat.step().postponed == 3
    assert [line.split(" ")[0] for line in told()] == ["3", "12"]


def test_the_next_look_is_at_what_was_postponed(beat: Beat, broker: Broker) -> None:
    beat.service.add()
    broker.answers["*"] = REFUSED
    beat.service.clock.advance(10)
    next_in = beat.step().next_in
    assert next_in is not None
    assert 0.05 <= next_in <= 0.1


def test_refused_timers_stay_not_at_the_head(make_service: MakeService, broker: Broker) -> None:
    service = make_service(batch_size=5)
    beat = Beat(service, broker)
    service.add_many(5, "refused")
    service.add("good", every=10.5)
    broker.answers.update({f"refused{i}": REFUSED for i in range(5)})
    service.clock.advance(10.5)
    beat.step()
    beat.step()
    assert broker.slots("good") == [10.5]
    beat.store.close()


def test_nothing_advances_while_the_broker_is_down(beat: Beat, broker: Broker) -> None:
    timer = beat.service.add()
    beat.service.clock.advance(10)
    broker.answers["*"] = DOWN
    before = beat.service.state(timer.id)
    for _ in range(3):
        assert beat.step().broker_down
        beat.service.clock.advance(1)
    assert beat.service.state(timer.id) == before
    broker.answers.clear()
    assert not beat.step().broker_down
    assert broker.slots() == [10]


def test_what_was_sent_before_the_broker_went_down_is_committed(beat: Beat, broker: Broker) -> None:
    first, second, third = beat.service.add_many(3)
    beat.service.clock.advance(11)
    broker.answers[second.name] = DOWN
    done = beat.step()
    assert (done.sent, done.broker_down) == (1, True)
    assert [beat.service.state(each.id).runs for each in (first, second, third)] == [1, 0, 0]
    broker.answers.clear()
    assert beat.step().sent == 2
    assert Counter(run.identity for run in broker.sent) == Counter(
        each.id for each in (first, second, third)
    )


def test_a_run_that_can_not_be_sent_breaks_its_timer_alone(
    beat: Beat, broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    timer, other = beat.service.add_many(2)
    beat.service.clock.advance(11)
    broker.answers[timer.name] = UNSENDABLE
    with caplog.at_level(logging.ERROR, "celery_dtimer"):
        done = beat.step()
    assert (done.sent, done.set_aside) == (1, 1)
    state = beat.service.state(timer.id)
    assert (state.status, state.reason) == ("broken", str(UNSENDABLE))
    assert beat.service.state(other.id).runs == 1
    assert timer.name in caplog.text


# ------------------------------------------------------------------ the lease


def test_without_the_lease_nothing_is_sent(beat: Beat, broker: Broker) -> None:
    beat.service.add()
    beat.service.clock.advance(10)
    beat.may_send = False
    beat.step()
    assert broker.sent == []


def test_a_lease_lost_in_a_batch_ends_the_sending_and_keeps_what_was_sent(
    beat: Beat, broker: Broker
) -> None:
    beat.service.add_many(5)
    beat.service.clock.advance(11)

    def lose(run: Run) -> None:
        beat.may_send = len(broker.sent) < 2

    broker.on_send = lose
    assert beat.step().sent == 2
    assert beat.step().sent == 0
    broker.on_send = lambda run: None
    beat.may_send = True
    assert beat.step().sent == 3
    assert max(Counter(run.task_id for run in broker.sent).values()) == 1


def test_an_instance_reaped_in_a_batch_doubles_nothing(
    service: Service, beat: Beat, broker: Broker
) -> None:
    service.add_many(3)
    service.clock.advance(11)
    other = Beat(service, broker, "b")
    service.store.reap("b", other.lease.epoch)

    def reap(run: Run) -> None:
        if len(broker.sent) == 2:
            service.let_pass(31, b=other.lease.epoch)
            service.store.reap("b", other.lease.epoch)
            beat.may_send = False

    broker.on_send = reap
    with pytest.raises(FencedError):
        beat.step()
    assert other.step().sent == 3
    assert len(broker.sent) == 3
    assert {service.state(id).runs for id in service.store.timer_ids()} == {1}
    other.store.close()


def test_a_fenced_pass_drops_what_it_held(beat: Beat, broker: Broker) -> None:
    timer = beat.service.add()
    beat.service.clock.advance(10)
    broker.on_send = lambda run: beat.service.join("a") and None
    with pytest.raises(FencedError):
        beat.step()
    broker.on_send = lambda run: None
    assert beat.service.state(timer.id).last_sent_ms == START_MS + 10_000
    beat.register()
    assert beat.step().sent == 1
    assert broker.slots() == [10]
    assert beat.service.state(timer.id).runs == 1


def test_a_heartbeat_older_than_the_lease_shows_another_server(beat: Beat, broker: Broker) -> None:
    beat.service.add()
    beat.service.clock.advance(10)
    epoch = beat.lease.epoch
    beat.lease = Lease("a", epoch, 1e9, heartbeat_ms=beat.lease.heartbeat_ms + 1)
    with pytest.raises(StoreUnavailableError, match="another server"):
        beat.step()
    assert broker.sent == []
    beat.service.store.heartbeat("a", epoch)
    assert beat.step().sent == 1


def test_silence_of_everybody_is_no_other_server(
    service: Service, beat: Beat, broker: Broker
) -> None:
    other = Beat(service, broker, "b")
    service.add(every=15)
    service.clock.advance(15)
    service.store.heartbeat("b", other.lease.epoch)
    assert beat.step().sent + other.step().sent == 1
    other.store.close()


# ------------------------------------------------------------------ changes between


def _move(service: Service) -> None:
    """Give what "a" owns to "b"; a goes, and comes again."""
    service.join("b")
    service.store.leave("a", service.epoch("a"))


def _resume(service: Service, timer: Definition) -> None:
    state = service.state(timer.id)
    plan = planning.resume(timer, state, service.clock.now_ms)
    assert plan.next_due_ms is not None
    assert service.store.resume(state, plan) == 1


@pytest.mark.parametrize("change", ["edited", "moved", "paused and resumed"])
@pytest.mark.parametrize("kind", ["interval", "one-shot"])
def test_a_change_between_publish_and_commit_doubles_nothing(
    service: Service, beat: Beat, broker: Broker, change: str, kind: str
) -> None:
    at_ms = START_MS + 10_000 if kind == "one-shot" else None
    timer = service.add(at_ms=at_ms)
    service.clock.advance(10)

    def interfere(run: Run) -> None:
        broker.on_send = lambda run: None
        if change == "edited":
            service.add(at_ms=at_ms, args=(2,))
        elif change == "moved":
            _move(service)
        else:
            service.store.pause(timer.id)

    broker.on_send = interfere
    if change == "moved":
        with pytest.raises(FencedError):
            beat.step()
        beat.lease = Lease("b", service.epoch("b"), 1e9)
    else:
        beat.step()
    if change == "paused and resumed":
        service.clock.advance(4)
        _resume(service, timer)
    for _ in range(2):
        beat.step()
    state = service.state(timer.id)
    assert broker.slots() == [10]
    assert (state.runs, state.skipped, state.last_run_ms) == (1, 0, START_MS + 10_000)
    assert state.is_finished if at_ms else state.due_ms == START_MS + 20_000


def test_a_timer_deleted_between_publish_and_commit_stays_deleted(
    service: Service, beat: Beat, broker: Broker
) -> None:
    timer = service.add()
    service.clock.advance(10)
    broker.on_send = lambda run: service.store.delete([timer.id]) and None
    beat.step()
    assert not service.exists(timer.id)
    assert broker.slots() == [10]


def test_a_timer_created_anew_between_publish_and_commit_runs_in_its_own_right(
    service: Service, beat: Beat, broker: Broker
) -> None:
    timer = service.add()
    service.clock.advance(10)

    def again(run: Run) -> None:
        broker.on_send = lambda run: None
        service.store.delete([timer.id])
        service.add()

    broker.on_send = again
    beat.step()
    service.clock.advance(10)
    beat.step()
    assert broker.slots() == [10, 20]
    assert [run.number for run in broker.sent] == [1, 1]


# ------------------------------------------------------------------ Redis


def losing(monkeypatch: pytest.MonkeyPatch, name: str, losses: list[str]) -> None:
    """Lose the next calls of a store's method: the request, or the reply."""
    method = getattr(Store, name)

    def call(store: Store, *args: Any, **kwargs: Any) -> Any:
        loss = losses.pop(0) if losses else None
        if loss == "request":
            raise StoreUnavailableError("the request was lost")
        answer = method(store, *args, **kwargs)
        if loss != "reply":
            return answer
        if name == "begin_commit":
            return lambda: _lost(answer)
        return _lost(lambda: answer)

    monkeypatch.setattr(Store, name, call)


def _lost(answer: Callable[[], object]) -> NoReturn:
    answer()
    raise StoreUnavailableError("the reply was lost")


@pytest.mark.parametrize(
    "losses", [["request"], ["reply"], ["reply"] * 2, ["request"] * 2, ["reply"] * 3]
)
def test_a_lost_commit_is_repeated_and_settles_once(
    beat: Beat, broker: Broker, monkeypatch: pytest.MonkeyPatch, losses: list[str]
) -> None:
    timer = beat.service.add()
    beat.service.clock.advance(10)
    losing(monkeypatch, "begin_commit", losses)
    for _ in range(3):
        try:
            beat.step()
        except StoreUnavailableError:
            continue
    assert losses == []
    assert broker.slots() == [10]
    state = beat.service.state(timer.id)
    assert (state.runs, state.due_ms, state.last_sent_ms) == (1, START_MS + 20_000, None)


def test_a_commit_lost_until_the_registration_was_another_doubles_nothing(
    beat: Beat, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    timer = beat.service.add()
    beat.service.clock.advance(10)
    losing(monkeypatch, "begin_commit", ["reply"] * 2)
    with pytest.raises(StoreUnavailableError):
        beat.step()
    beat.register()
    beat.step()
    beat.service.clock.advance(10)
    beat.step()
    assert broker.slots() == [10, 20]
    assert beat.service.state(timer.id).runs == 2


@pytest.mark.parametrize("name", ["due", "definitions"])
def test_an_outage_before_sending_sends_nothing(
    beat: Beat, broker: Broker, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    beat.service.add()
    beat.service.clock.advance(10)
    losing(monkeypatch, name, ["reply"])
    with pytest.raises(StoreUnavailableError):
        beat.step()
    assert broker.sent == []
    assert beat.step().sent == 1


def test_a_definition_that_redis_does_not_show_is_not_gone(
    fresh_redis: FreshRedis, broker: Broker
) -> None:
    """Redis refuses to read (busy, a stale replica, no permission): no reason to break timers."""
    server = fresh_redis()
    service = Service(server.client, server.url, "")
    beat = Beat(service, broker)
    timer = service.add()
    service.clock.advance(10)
    server.client.acl_setuser("default", commands=["-mget"], reset=False, enabled=True)
    with pytest.raises(StoreError):
        beat.step()
    server.client.acl_setuser("default", commands=["+mget"], reset=False, enabled=True)
    assert service.state(timer.id).status == "active"
    assert beat.step().sent == 1
    assert consistency.check(service.store) == []
    beat.store.close()
    service.store.close()


# ------------------------------------------------------------------ damage

BROKEN_BLOBS = {
    "not JSON": "{",
    "no object": "[1]",
    "no schedule": '{"name": "timer", "task": "t"}',
    "no task": '{"name": "timer", "schedule": {"every": 1000}}',
    "wrong type": '{"name": "timer", "task": "t", "schedule": {"every": 1000}, "args": 5}',
    "unknown schedule": '{"name": "timer", "task": "t", "schedule": {"moon": 1}}',
    "a bad typed value": '{"name": "timer", "task": {"__type__": "datetime", "__value__": 5}}',
    "endless": "[" * 100_000,
}


@pytest.mark.parametrize("blob", BROKEN_BLOBS.values(), ids=BROKEN_BLOBS.keys())
@pytest.mark.parametrize("known", [True, False])
def test_a_definition_edited_by_hand_breaks_its_timer_alone(
    beat: Beat, broker: Broker, blob: str, known: bool
) -> None:
    timer = beat.service.add("timer")
    other = beat.service.add("other")
    if known:
        beat.service.clock.advance(10)
        beat.step()
    beat.service.redis.set(beat.service.keys("timer_definition", timer.id), blob)
    beat.service.set_field(timer.id, "revision", "edited")
    beat.service.clock.advance(10)
    done = beat.step()
    assert (done.sent, done.set_aside) == (1, 1)
    assert beat.service.state(timer.id).status == "broken"
    assert beat.service.state(timer.id).reason
    assert broker.sent[-1].identity == other.id


@pytest.mark.parametrize("field", ["due", "created", "runs", "attempts", "last_sent", "revision"])
@pytest.mark.parametrize("text", ["nonsense", "", "²", "9" * 15, "9" * 5000, "1 2"])
@pytest.mark.parametrize("known", [True, False])
def test_a_field_edited_by_hand_stops_no_other_timer(
    beat: Beat, broker: Broker, field: str, text: str, known: bool
) -> None:
    beat.service.is_damaged = True
    timer = beat.service.add("timer")
    beat.service.add("other")
    if known:
        beat.service.clock.advance(10)
        beat.step()
    beat.service.set_field(timer.id, field, text)
    before = len(broker.slots("other"))
    for _ in range(3):
        beat.service.clock.advance(10)
        beat.step()
    assert len(broker.slots("other")) == before + 3


@pytest.mark.parametrize("status", ["paused", "nonsense", "", "broken"])
@pytest.mark.parametrize("known", [True, False])
def test_a_status_edited_by_hand_is_believed(
    beat: Beat, broker: Broker, status: str, known: bool
) -> None:
    timer = beat.service.add()
    if known:
        beat.service.clock.advance(10)
        beat.step()
    beat.service.set_field(timer.id, "status", status)
    beat.service.clock.advance(10)
    before = len(broker.sent)
    assert beat.step().set_aside == 1
    assert beat.step() == Pass()
    assert len(broker.sent) == before


def test_a_timer_without_its_hash_is_taken_out(
    beat: Beat, broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    timer = beat.service.add()
    beat.service.redis.delete(beat.service.keys("timer", timer.id))
    beat.service.clock.advance(10)
    with caplog.at_level(logging.ERROR, "celery_dtimer"):
        assert beat.step() == Pass(set_aside=1)
    assert not beat.service.exists(timer.id)
    assert timer.id in caplog.text


def test_a_timer_at_two_owners_is_sent_by_the_one_that_its_hash_names(
    service: Service, beat: Beat, broker: Broker
) -> None:
    other = Beat(service, broker, "b")
    timer = service.add()
    assert service.state(timer.id).owner == "a"
    service.redis.zadd(service.keys("instance_timers", "b"), {timer.id: START_MS + 10_000})
    service.clock.advance(10)
    for each in (other, beat, other):
        each.step()
    assert [run.instance for run in broker.sent] == ["a"]
    other.store.close()


# ------------------------------------------------------------------ code


def test_a_timer_bound_to_code_takes_its_arguments_from_there(beat: Beat, broker: Broker) -> None:
    bound = beat.service.define(args=(object(),), code_bound=True)
    beat.bound[bound.name] = bound
    beat.service.store.save([bound])
    beat.service.clock.advance(10)
    beat.step()
    assert broker.sent[0].definition is bound


def test_a_timer_bound_to_other_code_goes_to_another(
    service: Service, beat: Beat, broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    bound = service.define(args=(object(),), code_bound=True)
    service.store.save([bound])
    other = Beat(service, broker, "b")
    other.bound[bound.name] = bound
    service.clock.advance(10)
    with caplog.at_level(logging.WARNING, "celery_dtimer"):
        done = beat.step()
    assert (done.sent, done.postponed) == (0, 0), "it tells nothing of the broker"
    service.clock.advance(1)
    assert other.step().sent == 1
    assert "is left to another" in caplog.text
    other.store.close()


def test_a_schedule_that_fails_breaks_its_timer_before_it_is_sent(
    beat: Beat, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    timer = beat.service.add("timer")
    beat.service.add("other", at_ms=START_MS + 1)
    beat.service.clock.advance(10)

    def fail(*_: Any) -> None:
        raise RuntimeError("no ephemeris")

    monkeypatch.setattr(schedules.Interval, "next_run_after", fail)
    done = beat.step()
    assert (done.sent, done.set_aside) == (1, 1)
    assert broker.slots("timer") == []
    assert "no ephemeris" in beat.service.state(timer.id).reason


def test_one_line_is_logged_of_each_run_at_debug(
    beat: Beat, caplog: pytest.LogCaptureFixture
) -> None:
    timer = beat.service.add()
    beat.service.clock.advance(10)
    with caplog.at_level(logging.DEBUG, "celery_dtimer"):
        beat.step()
    (line,) = [line for line in caplog.messages if line.startswith("Sent")]
    assert timer.name in line


# ------------------------------------------------------------------ time to spare


def test_spare_time_is_for_what_comes_due_soon(
    beat: Beat, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    beat.service.add_many(3)
    assert not beat.dispatcher.look_ahead(beat.lease, 1.0)  # before the first turn
    beat.step()
    assert not beat.dispatcher.look_ahead(beat.lease, 0.0001)  # that is no time to spare
    assert beat.dispatcher.look_ahead(beat.lease, 1.0)
    assert not beat.dispatcher.look_ahead(beat.lease, 1.0)  # nothing is left
    assert broker.expected == []  # what is published first comes from no template
    losing(monkeypatch, "begin_definitions", ["request"])
    beat.service.clock.advance(11)
    assert beat.step().sent == 3


def test_an_outage_in_spare_time_is_told(beat: Beat, monkeypatch: pytest.MonkeyPatch) -> None:
    beat.service.add()
    beat.step()
    losing(monkeypatch, "coming", ["reply"])
    with pytest.raises(StoreUnavailableError):
        beat.dispatcher.look_ahead(beat.lease, 1.0)


def test_what_a_countdown_has_sent_is_not_remembered(
    service: Service, broker: Broker, beat: Beat
) -> None:
    """Its definition would fill the place of those that are needed again."""
    for number in range(3):
        message = {"args": [number]}
        service.store.hold(Definition(f"task {number}", "t", ONCE, message=message), delay_ms=5000)
    assert beat.step().sent == 0
    beat.dispatcher.look_ahead(beat.lease, 1.0)
    beat.dispatcher.look_ahead(beat.lease, 1.0)
    service.clock.advance(5)
    assert beat.step().sent == 3
    assert [run.task_id for run in broker.sent] == [run.definition.name for run in broker.sent]
    assert not beat.dispatcher._definitions._kept
    assert beat.dispatcher._definitions._bytes == 0


def test_a_countdown_is_sent_however_late_it_is(make_service: MakeService, broker: Broker) -> None:
    """Policies are for timers: a call that is not sent would be lost."""
    service = make_service(defaults=Defaults(grace_ms=1000))
    beat = Beat(service, broker)
    service.store.hold(Definition("task", "t", ONCE, message={}), delay_ms=0)
    service.clock.advance(25)
    assert beat.step().sent == 1
    beat.store.close()
