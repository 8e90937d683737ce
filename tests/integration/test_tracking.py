"""What a worker notes of runs, task by task, without a worker around it."""

from __future__ import annotations

import itertools
import json
import logging
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery, signals
from celery.app.task import Context
from celery.app.trace import build_tracer
from celery.exceptions import Ignore, Reject, TimeLimitExceeded, WorkerLostError
from celery.worker import state as worker_state

from celery_dtimer import (
    CallbackTimer,
    DeadLetter,
    DistributedTimer,
    InvalidTimerError,
    RunRecord,
)
from celery_dtimer.store import Store
from celery_dtimer.tracking import LeaseRenewals, RunTracker
from tests.conftest import FreshRedis, MakeApp
from tests.waiting import wait_until

WORKER = "worker1@host"
_numbers = itertools.count()


def plain() -> None:
    """Do nothing, as a task."""


def pass_by(timer: CallbackTimer) -> None:
    """Do nothing, as a callback."""


class Starting:
    """Stands for a worker that starts, or ends, as the sender of a signal."""

    hostname = WORKER

    def __init__(self, app: Celery) -> None:
        self.app = app


class Bench:
    """Runs tasks as a worker's process does, and tells what was noted of them."""

    def __init__(self, app: Celery) -> None:
        self.app = app
        self.timers = DistributedTimer(app)
        self.timer_id = self.timers.create_timer("nightly", 3600, "some.task", args=[1])
        self.tracker: RunTracker = app.__dict__["dtimer_tracking"]

    def header(self, run: int = 1) -> dict[str, Any]:
        return {
            "id": self.timer_id,
            "name": "nightly",
            "service": "orders",
            "instance": "h:1:a",
            "scheduled_at": f"2026-01-01T03:00:00.{run:03}+00:00",
            "run": run,
        }

    def callback(self, function: Callable[..., Any]) -> Any:
        """Return a callback with the function as its body."""
        return self.timers.callback(f"c{next(_numbers)}", shared=False)(function)

    def run(self, task: Any, *args: Any, id: str = "run-1", tag: str = "t1", **fields: Any) -> None:
        """Run a task from a message; without a header of ours if ``dtimer`` is None."""
        request: dict[str, Any] = {
            "id": id,
            "dtimer": self.header(),
            "hostname": WORKER,
            "delivery_info": {"redelivered": False},
            "properties": {"delivery_tag": tag},
            "is_eager": False,
            "retries": 0,
            **fields,
        }
        if request["dtimer"] is None:
            del request["dtimer"]
        name = f"{task.name}.{next(_numbers)}"
        build_tracer(name, task, app=self.app)(id, args, {}, request)

    def records(self) -> list[RunRecord]:
        return self.timers.get_runs()

    def record(self) -> RunRecord:
        (record,) = self.records()
        return record

    def letters(self) -> list[DeadLetter]:
        return self.timers.get_dead_letters()

    def requeued(self) -> dict[str, Any]:
        """Requeue the newest letter; return what is sent for it, without name and schedule."""
        store = self.timers.store
        self.timers.requeue_dead_letter(self.letters()[0])
        (id,) = [id for id in store.timer_ids() if id.startswith("again-")]
        found: dict[str, Any] = json.loads(store.definitions([id])[0] or "{}")
        assert found.pop("name") == "nightly"
        found.pop("schedule")
        return found

    def out(self) -> int:
        """Return how many runs are out."""
        store = self.timers.store.base
        return int(store.client.hlen(store.keys("running")))


@pytest.fixture
def bench(make_app: MakeApp) -> Bench:
    return Bench(make_app())


def calls_of(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the list that every request to Redis will be written into."""
    calls: list[str] = []
    send = Store._send

    def count(self: Store, *commands: tuple[Any, ...]) -> Any:
        calls.extend(str(command[0]) for command in commands)
        return send(self, *commands)

    monkeypatch.setattr(Store, "_send", count)
    return calls


# ------------------------------------------------------------------ what it costs, what it notes


def test_a_run_costs_a_round_trip_at_its_start_and_one_at_its_end(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = bench.callback(pass_by)
    bench.run(task)  # loads the scripts
    calls = calls_of(monkeypatch)
    bench.run(task)
    assert calls == ["EVALSHA", "EVALSHA"]


def test_other_tasks_cost_none(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = calls_of(monkeypatch)
    bench.run(bench.app.task(shared=False)(plain), dtimer=None)
    assert calls == []


def test_tasks_of_another_app_are_left_to_it(bench: Bench, make_app: MakeApp) -> None:
    other = make_app("other")
    bench.run(other.task(shared=False)(plain))
    assert bench.records() == []


def test_plain_tasks_of_timers_are_tracked_too(bench: Bench) -> None:
    bench.run(bench.app.task(shared=False)(plain))
    assert bench.record().state == "succeeded"


@pytest.mark.parametrize(
    ("exc", "state", "error", "letters"),
    [
        (None, "succeeded", None, 0),
        (ValueError("no"), "failed", "ValueError: no", 1),
        (Ignore(), "ignored", None, 0),
        (Reject("bad", requeue=False), "rejected", "bad", 1),
        (Reject("later", requeue=True), "rejected", "later", 0),
    ],
    ids=["succeeds", "fails", "is ignored", "is rejected", "is put back"],
)
def test_an_end_is_noted_with_what_led_to_it(
    bench: Bench, exc: Exception | None, state: str, error: str | None, letters: int
) -> None:
    def callback(timer: CallbackTimer) -> None:
        if exc is not None:
            raise exc

    bench.run(bench.callback(callback))
    record = bench.record()
    assert (record.state, record.error, record.worker) == (state, error, WORKER)
    assert (record.task_id, record.number, record.name) == ("run-1", 1, "nightly")
    assert record.took is not None
    assert len(bench.letters()) == letters
    assert bench.out() == (1 if isinstance(exc, Reject) and exc.args[1] else 0)


def test_a_retry_keeps_its_run_out_until_it_has_ended(bench: Bench) -> None:
    def callback(timer: CallbackTimer) -> None:
        if not task.request.retries:
            raise task.retry(exc=KeyError("first"), countdown=60)

    task = bench.callback(callback)
    bench.run(task)
    record = bench.record()
    assert (record.state, record.error) == ("retried", "KeyError: 'first'")
    assert bench.out() == 1
    store = bench.timers.store.base
    expiry = store.client.zscore(store.keys("run_leases"), "run-1")
    assert 3600 + 55 < expiry / 1000 - store.now_ms() / 1000 < 3600 + 61
    bench.run(task, tag="t2", retries=1)
    record = bench.record()
    assert (record.state, record.retries, record.error) == ("succeeded", 1, None)
    assert bench.out() == 0


def test_a_retry_that_waits_in_redis_keeps_its_run_out_until_it_is_cancelled(
    make_app: MakeApp,
) -> None:
    bench = Bench(make_app(dtimer_eta_threshold=1))

    def callback(timer: CallbackTimer) -> None:
        raise task.retry(exc=KeyError("first"), countdown=60)

    task = bench.callback(callback)
    bench.run(task)
    (call,) = bench.timers.get_pending()
    assert (call.task_id, call.retries) == ("run-1", 1)
    assert call.headers["dtimer"] == bench.header()
    assert (bench.record().state, bench.out()) == ("retried", 1)
    assert bench.timers.cancel("run-1")
    assert (bench.record().state, bench.out()) == ("revoked", 0)


def test_a_duplicate_leaves_the_record_as_it_is(bench: Bench) -> None:
    seen: list[int] = []

    def callback(timer: CallbackTimer) -> None:
        seen.append(1)
        if len(seen) == 1:
            bench.run(ignoring, tag="t2")
            assert bench.out() == 1  # the lease is this message's

    def ignore(timer: CallbackTimer) -> None:
        raise Ignore("a duplicate")

    ignoring = bench.callback(ignore)
    bench.run(bench.callback(callback))
    assert bench.record().state == "succeeded"
    bench.run(ignoring, tag="t3")
    assert bench.record().state == "succeeded"
    assert bench.out() == 0


def test_arguments_are_kept_for_a_failed_run_if_they_can_be(bench: Bench) -> None:
    def fail(timer: CallbackTimer, *args: Any) -> None:
        raise ValueError("no")

    task = bench.callback(fail)
    bench.run(task, 1, "a")
    (letter,) = bench.letters()
    assert (letter.args, letter.kwargs, letter.task) == ([1, "a"], {}, task.name)
    bench.run(task, object())
    assert bench.letters()[0].args is None
    bench.run(task, "x" * 100_000)
    assert bench.letters()[0].args is None
    with pytest.raises(InvalidTimerError, match="the letter does not hold all of that"):
        bench.timers.requeue_dead_letter(bench.letters()[0])
    bench.timers.update_timer("nightly", callback=task)  # then the timer has them
    bench.timers.requeue_dead_letter(bench.letters()[0])
    assert bench.letters() == []


# ------------------------------------------------------------------ what others tell


def test_a_worker_that_starts_drops_what_was_revoked_meanwhile(bench: Bench) -> None:
    other = DistributedTimer(bench.app, "reports")
    bench.timers.store.base.revoke_runs(["run-1"], "")
    other.store.base.revoke_runs(["run-2"], "")
    bench.tracker.services.add("orders")
    worker = Starting(bench.app)
    signals.worker_ready.send(sender=worker)
    try:
        assert "run-1" in worker_state.revoked
        assert "run-2" in worker_state.revoked
    finally:
        signals.worker_shutdown.send(sender=worker)
        worker_state.revoked.clear()
        other.store.close()


def test_a_worker_starts_without_redis_too(
    make_app: MakeApp, fresh_redis: FreshRedis, caplog: pytest.LogCaptureFixture
) -> None:
    app = make_app(dtimer_redis_url=fresh_redis(running=False).url)
    DistributedTimer(app)
    worker = Starting(app)
    signals.worker_ready.send(sender=worker)
    signals.worker_shutdown.send(sender=worker)
    assert "can not be noted now" in caplog.text


def test_a_process_that_is_gone_is_a_failure(bench: Bench) -> None:
    told: list[DeadLetter] = []
    bench.timers.on_failure(told.append)
    task = bench.callback(pass_by)
    context = Context(
        {"id": "run-1", "dtimer": bench.header(), "hostname": WORKER, "args": [5], "kwargs": {}}
    )
    task.request_stack.push(context)
    try:
        signals.task_failure.send(
            sender=task, task_id="run-1", exception=WorkerLostError("gone"), args=[5], kwargs={}
        )
    finally:
        task.request_stack.pop()
    assert bench.record().error == "WorkerLostError: gone"
    wait_until(lambda: told, "the thread to tell of it")
    (letter,) = told
    assert (letter.error, letter.args) == ("WorkerLostError: gone", [5])


def test_of_a_time_limit_only_what_is_stored_tells_whose_run_it_was(bench: Bench) -> None:
    told: list[DeadLetter] = []
    bench.timers.on_failure(told.append)
    seen: list[Any] = []

    def callback(timer: CallbackTimer) -> None:
        task.request_stack.pop()  # as in the parent, which is told
        signals.task_failure.send(
            sender=task, task_id="run-1", exception=TimeLimitExceeded(5), args=[], kwargs={}
        )
        seen.append(bench.record())
        task.request_stack.push(Context({"id": "another"}))

    task = bench.callback(callback)
    bench.run(task)
    assert (seen[0].state, seen[0].error) == ("failed", "TimeLimitExceeded: TimeLimitExceeded(5,)")
    wait_until(lambda: told, "the thread to tell of it")
    assert [letter.name for letter in told] == ["nightly"]
    signals.task_failure.send(
        sender=task, task_id="unknown", exception=TimeLimitExceeded(5), args=[], kwargs={}
    )
    assert len(bench.records()) == 1


@pytest.mark.parametrize(("expired", "state"), [(True, "expired"), (False, "revoked")])
def test_a_run_that_never_starts_is_noted(bench: Bench, expired: bool, state: str) -> None:
    request = Context({"id": "run-1", "dtimer": bench.header(), "hostname": WORKER})
    signals.task_revoked.send(
        sender=bench.callback(pass_by),
        request=request,
        terminated=False,
        signum=None,
        expired=expired,
    )
    record = bench.record()
    assert (record.state, record.started_at, record.took) == (state, None, None)


def test_a_task_that_the_worker_does_not_know_is_a_dead_letter(bench: Bench) -> None:
    message = SimpleNamespace(
        headers={"dtimer": bench.header(), "tenant": "acme", "timelimit": [9, None]},
        properties={},
        delivery_info={"exchange": "", "routing_key": "q2", "priority": 3},
        payload=[[1], {"a": 2}, {}],
    )
    consumer = Hashed(SimpleNamespace(app=bench.app, hostname=WORKER))
    arguments = {"exc": KeyError("x"), "name": "no.such", "id": "run-1"}
    signals.task_unknown.send(sender=consumer, message=message, **arguments)
    assert bench.record().state == "rejected"
    (letter,) = bench.letters()
    assert letter.error == "the worker knows no task 'no.such'"
    assert (letter.args, letter.kwargs) == ([1], {"a": 2})
    assert bench.requeued() == {
        "task": "no.such",
        "args": [1],
        "kwargs": {"a": 2},
        "options": {"headers": {"tenant": "acme"}, "queue": "q2", "time_limit": 9, "priority": 3},
    }


def test_of_a_message_that_can_not_be_read_no_arguments_are_kept(bench: Bench) -> None:
    message = SimpleNamespace(headers={"dtimer": bench.header()}, properties={}, delivery_info={})
    consumer = Hashed(SimpleNamespace(app=bench.app, hostname=WORKER))
    signals.task_unknown.send(
        sender=consumer, message=message, exc=KeyError("x"), name="some.task", id="run-1"
    )
    (letter,) = bench.letters()
    assert letter.args is None
    assert bench.requeued()["args"] == [1], "its timer has them"


SENT_WITH: dict[str, Any] = {
    "queue": {"delivery_info": {"exchange": "", "routing_key": "q2"}},
    "exchange": {"delivery_info": {"exchange": "e", "routing_key": "r", "priority": 0}},
    "limits": {"timelimit": [20, 10]},
    "links": {"callbacks": [{"task": "a"}]},
    "stamps": {"stamped_headers": ["tenant"], "stamps": {"tenant": ["acme"]}},
    "retries": {"dtimer_retry": {"max_retries": 0, "autoretry_for": ["builtins.KeyError"]}},
    "headers": {"celery_beat_task": True, "tenant": "acme", "ignore_result": True},
    "of that message alone": {
        "expires": "2026-01-01T00:00:00+00:00",
        "root_id": "a",
        "group_index": 3,
        "reply_to": "b",
    },
}
OPTIONS: dict[str, Any] = {
    "queue": {"queue": "q2"},
    "exchange": {"exchange": "e", "routing_key": "r", "priority": 0},
    "limits": {"time_limit": 20, "soft_time_limit": 10},
    "links": {"link": [{"task": "a"}]},
    "stamps": {"stamped_headers": ["tenant"], "tenant": ["acme"]},
    "retries": {"max_retries": 0, "autoretry_for": ["builtins.KeyError"]},
    "headers": {"headers": {"tenant": "acme"}, "ignore_result": True},
    "of that message alone": {},
}


@pytest.mark.parametrize("kind", SENT_WITH)
def test_a_failed_run_is_sent_again_as_it_was(bench: Bench, kind: str) -> None:
    def fail(timer: CallbackTimer, *args: Any) -> None:
        raise ValueError("no")

    bench.run(bench.callback(fail), 7, **{"delivery_info": {}, **SENT_WITH[kind]})
    bench.timers.delete_timer("nightly")
    found = bench.requeued()
    assert found["args"] == [7]
    assert found.get("options", {}) == OPTIONS[kind]


def test_a_failed_run_is_held_as_its_timer_says_by_then(bench: Bench) -> None:
    def fail(timer: CallbackTimer) -> None:
        raise ValueError("no")

    bench.timers.update_timer("nightly", overlap="buffer_one", queue="other")
    bench.run(bench.callback(fail))
    found = bench.requeued()
    assert found["overlap"] == "buffer_one"
    assert "queue" not in found.get("options", {})


def test_a_callback_whose_run_was_revoked_meanwhile_is_not_called(bench: Bench) -> None:
    called: list[int] = []

    def act(timer: CallbackTimer) -> None:
        called.append(1)

    bench.timers.store.base.revoke_runs(["run-1"], "")
    task = bench.callback(act)
    bench.run(task)
    assert (called, bench.record().state, bench.out()) == ([], "revoked", 0)
    assert bench.record().error == "Ignore: it was revoked for a later run of its timer"
    bench.run(task, id="run-2", dtimer=bench.header(2))
    assert called == [1]


# ------------------------------------------------------------------ leases


def test_a_worker_renews_what_it_runs_with_one_call(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    renewals = LeaseRenewals(bench.tracker._store)
    leases: list[float] = []
    store = bench.timers.store.base

    def lease() -> float:
        return float(store.client.zscore(store.keys("run_leases"), "run-1"))

    def callback(timer: CallbackTimer) -> None:
        active = SimpleNamespace(
            id="run-1",
            hostname=WORKER,
            request_dict={"dtimer": bench.header(), "properties": {"delivery_tag": "t1"}},
        )
        others = [
            SimpleNamespace(id="x", hostname=WORKER, request_dict={"dtimer": header})
            for header in (None, "tampered", {"name": "no service"})
        ]
        requests = set(map(Hashed, [active, *others]))
        monkeypatch.setattr(worker_state, "active_requests", requests)
        renewals.step()  # loads the script
        store.client.zincrby(store.keys("run_leases"), -30_000, "run-1")
        leases.append(lease())
        calls = calls_of(monkeypatch)
        assert renewals.step() == 1
        assert calls == ["EVALSHA"]
        leases.append(lease())

    bench.run(bench.callback(callback))
    assert leases[1] - leases[0] >= 30_000


class Hashed:
    """Makes a namespace fit for a set."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


# ------------------------------------------------------------------ without Redis


def test_a_report_is_made_once_redis_answers_again(
    make_app: MakeApp, fresh_redis: FreshRedis, caplog: pytest.LogCaptureFixture
) -> None:
    server = fresh_redis(appendonly=True)
    bench = Bench(make_app(dtimer_redis_url=server.url))
    ran: list[int] = []

    def callback(timer: CallbackTimer) -> None:
        ran.append(1)
        if len(ran) == 1:
            server.kill()

    task = bench.callback(callback)
    with caplog.at_level(logging.WARNING, logger="celery_dtimer.tracking"):
        bench.run(task)
        bench.run(task, id="run-2", tag="t2")
    assert len(ran) == 2
    server.start()
    wait_until(lambda: len(bench.records()) == 2, "the reports", 15)
    states = {record.task_id: record.state for record in bench.records()}
    assert states == {"run-1": "succeeded", "run-2": "succeeded"}
    assert bench.out() == 0
    logged = [each for each in caplog.records if each.name == "celery_dtimer.tracking"]
    assert [each.levelname for each in logged] == ["WARNING"]
    bench.timers.store.close()


def test_tasks_wait_for_a_frozen_redis_once_and_not_for_each_report(
    make_app: MakeApp, fresh_redis: FreshRedis
) -> None:
    server = fresh_redis()
    limit = 0.5
    bench = Bench(make_app(dtimer_redis_url=server.url, dtimer_instance_timeout=3 * limit))
    task = bench.callback(pass_by)
    bench.run(task, id="run-0")
    server.freeze()
    began = time.monotonic()
    for number in range(1, 6):
        bench.run(task, id=f"run-{number}", tag=f"t{number}")
    took = time.monotonic() - began
    server.thaw()
    assert limit < took < 2 * limit
    wait_until(lambda: len(bench.records()) == 6, "the reports", 15)
    bench.timers.store.close()


# ------------------------------------------------------------------ callbacks of failures


def test_failures_of_one_service_are_told_to_its_own(
    bench: Bench, make_app: MakeApp, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[str] = []
    other = DistributedTimer(make_app("billing", dtimer_service="billing"))

    @bench.timers.on_failure
    def tell(letter: DeadLetter) -> None:
        told.append(f"orders {letter.task_id}")
        raise OSError("nobody listens")

    @other.on_failure
    def tell_others(letter: DeadLetter) -> None:
        told.append("billing")

    def fail(timer: CallbackTimer) -> None:
        raise ValueError("no")

    bench.run(bench.callback(fail))
    assert told == ["orders run-1"]
    assert "nobody listens" in caplog.text


def test_what_can_not_be_called_is_refused(bench: Bench) -> None:
    with pytest.raises(ValueError, match="function=5 is not accepted"):
        bench.timers.on_failure(5)  # type: ignore[type-var]
