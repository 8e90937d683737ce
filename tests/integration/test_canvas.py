"""Canvases as callbacks: what one run of them sends, and what workers make of it."""

from __future__ import annotations

import base64
import gc
import json
import pickle
import re
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import celery
import pytest
from celery import Celery, Task, chain, chord, group, signals
from celery.canvas import Signature
from celery.contrib.testing.worker import start_worker
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kombu import Queue

from celery_dtimer.canvas import is_canvas, parts_of
from celery_dtimer.errors import InvalidTimerError
from celery_dtimer.model import Definition, Run, check_storable, decode_definition
from celery_dtimer.publisher import RefusedError, UnsendableError
from celery_dtimer.schedules import Interval
from celery_dtimer.store import Message
from celery_dtimer.worker import CallbackTimer, callback_body
from tests.conftest import MakeApp
from tests.integration.conftest import START_MS, StartTimers
from tests.integration.test_publisher import (
    ALWAYS,
    MakePublisher,
    Queues,
    a_task,
    make_publisher,
    queues,
)
from tests.servers import RabbitMQ, RedisServer
from tests.waiting import wait_until

__all__ = ["make_publisher", "queues"]

# Celery's result backend calls what redis-py has deprecated, and leaves its connections open.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Call to deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


class Work:
    """Callbacks that add numbers up, on an app, and what they were called with."""

    def __init__(self, app: Celery) -> None:
        self.app = app
        self.seen: list[tuple[str, CallbackTimer | None, Any]] = []
        self.add = self._task("add", lambda *numbers, n=0: sum(numbers) + n)
        self.total = self._task("total", sum)
        self.fail = self._task("fail", self._fail)
        self.told = self._task("told", lambda *_: "told")
        self.ended: list[bool] = []

        def last() -> None:
            self.ended.append(True)

        self.last = a_task(app, "last", last)

    def _fail(self, *_: Any) -> None:
        raise LookupError("on purpose")

    def _task(self, name: str, function: Callable[..., Any]) -> Task[..., Any]:
        def callback(timer: CallbackTimer | None, *args: Any, **kwargs: Any) -> Any:
            result = None
            try:
                result = function(*args, **kwargs)
            finally:
                self.seen.append((task.request.id, timer, result))
            return result

        task = a_task(self.app, name, callback_body(callback), bind=True)
        return task

    @property
    def results(self) -> list[Any]:
        """What the tasks have returned, in order."""
        return [result for _, _, result in self.seen]

    def wait_for(self, count: int) -> None:
        """Wait for so many tasks, and until no message is left: there is one worker."""
        wait_until(lambda: len(self.seen) >= count, f"{count} tasks", 6)
        self.last.apply_async()
        wait_until(lambda: self.ended, "the last message", 6)


def definition_of(app: Celery, signature: Mapping[str, Any], **fields: Any) -> Definition:
    """Return the definition of a canvas as it is read from the store."""
    task, args, kwargs, options = parts_of(signature, app)
    given = {"args": args, "kwargs": kwargs, "options": {**options, **fields.pop("options", {})}}
    for name, value in given.items():
        check_storable(name, value)
    name = uuid.uuid4().hex  # results of other tests are in the same backend
    definition = Definition(name, task, Interval(10_000), **{**given, **fields})
    return decode_definition(definition.blob)


def run_of(definition: Definition, number: int = 1) -> Run:
    id = definition.id
    return Run("orders", "host:1:a", id, id, START_MS, START_MS + number, number, definition)


def linked(signature: Any, work: Work) -> Any:
    """Return a signature that leads to another."""
    signature.link(work.add.s(100))
    return signature


CANVASES: dict[str, tuple[Callable[[Work], Any], list[list[Any]]]] = {
    "chain": (
        lambda w: chain(w.add.s(1, 2), w.add.s(3), w.add.s(4)),
        [[3], [6], [10]],
    ),
    "immutable": (lambda w: chain(w.add.s(1), w.add.si(7), w.add.s(1)), [[1], [7], [8]]),
    "group": (lambda w: group(w.add.s(1, 2), w.add.s(3, 4)), [[3, 7]]),
    "chord": (lambda w: chord([w.add.s(1, 2), w.add.s(3, 4)], w.total.s()), [[3, 7], [10]]),
    "chord_of_one": (lambda w: chord([w.add.s(1, 2)], w.total.s()), [[3], [3]]),
    "group_then_task": (
        lambda w: chain(group(w.add.s(1), w.add.s(2)), w.total.s()),
        [[1, 2], [3]],
    ),
    "groups_in_a_chain": (
        lambda w: chain(
            *(w.add.s(1), group(w.add.s(1), w.add.s(2)), w.total.s()),
            *(group(w.add.s(1), w.add.s(2)), w.total.s(), w.add.s(100)),
        ),
        [[1], [2, 3], [5], [6, 7], [13], [113]],
    ),
    "group_of_chains": (
        lambda w: group(chain(w.add.s(1), w.add.s(1)), chain(w.add.s(10), w.add.s(1))),
        [[1, 10], [2, 11]],
    ),
    "group_of_one_in_a_chain": (
        lambda w: Signature.from_dict(
            {
                "task": "celery.chain",
                "args": [],
                "kwargs": {"tasks": [w.add.s(1), group([w.add.s(2)]), w.add.s(3)]},
                "options": {},
                "subtask_type": "chain",
            }
        ),
        [[1], [3], [6]],
    ),
    "linked_chain_in_a_chain": (
        lambda w: Signature.from_dict(
            {
                "task": "celery.chain",
                "args": [],
                "kwargs": {"tasks": [linked(chain(w.add.s(1), w.add.s(1)), w), w.add.s(2)]},
                "options": {},
                "subtask_type": "chain",
            }
        ),
        [[1], [2], [4, 102]],
    ),
    "group_in_group": (
        lambda w: chord([group(w.add.s(1), group(w.add.s(2), w.add.s(3)))], w.total.s()),
        [[1, 2, 3], [6]],
    ),
    "nested_chords": (
        lambda w: chord([chord([w.add.s(1), w.add.s(2)], w.total.s()), w.add.s(4)], w.total.s()),
        [[1, 2, 4], [3], [7]],
    ),
    "chord_after_chord": (
        lambda w: chain(
            chord([w.add.s(1), w.add.s(2)], chain(w.total.s(), group(w.add.s(1), w.add.s(2)))),
            chord([w.add.si(4), w.add.si(5)], w.total.s()),
        ),
        [[1, 2], [3], [4, 5], [4, 5], [9]],
    ),
    "chunks": (lambda w: w.add.chunks([(1, 1), (2, 2), (3, 3)], 2), [[2, 4, 6]]),
    "chunks_then_task": (
        lambda w: chain(w.add.chunks([(1, 1), (2, 2), (3, 3)], 2), w.add.si(9)),
        [[2, 4, 6], [9]],
    ),
    "map": (lambda w: w.total.map([[1, 2], [3]]), [[3], [3]]),
    "map_in_a_chain": (
        lambda w: chain(w.add.s(1), w.total.map([[1, 2], [3]]), w.total.s()),
        [[1], [3, 3], [6]],
    ),
    "starmap": (lambda w: w.add.starmap([(1, 2), (4, 4)]), [[3], [8]]),
    "links": (
        lambda w: chain(w.add.s(1).set(link=w.add.s(10)), w.add.s(2)),
        [[3, 11], [1]],
    ),
}
UNORDERED = {"links"}  # nobody says which of two tasks that one leads to comes first
CHORDS = {
    name
    for name in CANVASES
    if name.endswith(("chord", "chords", "_then_task"))
    or name in ("chord_of_one", "group_in_group")
} | {"groups_in_a_chain"}
BACKENDS = ["redis", "memory", "file"]


@pytest.fixture
def backends(redis_server: RedisServer, tmp_path: Path) -> dict[str, str]:
    """One that joins chords by itself, one that counts, and one that has to poll."""
    urls = [redis_server.url, "cache+memory://", f"file://{tmp_path}"]
    return dict(zip(BACKENDS, urls, strict=True))


MakeWork = Callable[..., Work]


@pytest.fixture
def make_work(make_app: MakeApp) -> Iterator[MakeWork]:
    def make(backend: str = "cache+memory://", **conf: Any) -> Work:
        quick = {"worker_hijack_root_logger": False, "result_chord_retry_interval": 0.05}
        return Work(make_app(result_backend=backend, **quick, **conf))

    yield make
    gc.collect()  # here, where what it says of connections is ignored


@pytest.fixture
def work(make_work: MakeWork) -> Work:
    return make_work()


def worker(app: Celery) -> Any:
    return start_worker(app, perform_ping_check=False, loglevel="CRITICAL")


def texts(message: Any) -> list[str]:
    """Return what a run sends, but for what is new with each message or in time."""
    assert isinstance(message, Message), message
    found = []
    for value in message.values:
        content = Queues.read(value)
        content["properties"].pop("delivery_tag")
        content["headers"].pop("eta")
        found.append(repr((content["headers"], content["properties"], content["body"])))
    return found


# ------------------------------------------------------------------ in a worker


@pytest.mark.parametrize(
    ("backend", "name"),
    [
        (backend, name)
        for backend in BACKENDS
        for name in CANVASES
        if backend == "redis" or name in CHORDS
    ],
)
def test_every_task_of_a_canvas_runs_once_in_order_with_its_timer(
    make_work: MakeWork,
    make_publisher: MakePublisher,
    backends: dict[str, str],
    backend: str,
    name: str,
) -> None:
    if backend == "file" and celery.VERSION < (5, 7):
        pytest.skip("the second worker of a process does not run what has a countdown")
    work = make_work(backends[backend])
    make, stages = CANVASES[name]
    run = run_of(definition_of(work.app, make(work)))
    expected = sorted(result for stage in stages for result in stage)
    with worker(work.app):
        assert make_publisher(work.app)([run], ALWAYS) == [None]
        work.wait_for(len(expected))
        assert sorted(work.results) == expected
        seen = iter(work.results)
        for stage in stages if name not in UNORDERED else ():
            assert sorted(next(seen) for _ in stage) == sorted(stage)
        timer = CallbackTimer.from_header(run.header)
        assert [found for _, found, _ in work.seen] == [timer] * len(expected)
        mapped = "map" in name or "chunks" in name  # several calls of one task
        for id, _, result in work.seen if not mapped else ():
            found = work.app.AsyncResult(id)
            wait_until(found.ready, "a result", 10)
            assert found.result == result
        assert mapped or len({id for id, _, _ in work.seen}) == len(expected)


@pytest.mark.parametrize("dispatch", ["atomic", "confirmed"])
def test_a_canvas_is_a_timers_callback_by_its_schedule_and_by_a_trigger(
    make_work: MakeWork, start_timers: StartTimers, dispatch: str
) -> None:
    work = make_work(dtimer_dispatch=dispatch)
    timers = start_timers(work.app)
    signature = chain(group(work.add.s(1), work.add.s(2)), work.total.s(), work.add.s(10))
    soon = datetime.now(timezone.utc) + timedelta(seconds=0.2)
    with worker(work.app):
        id = timers.create_timer("once", soon, signature, priority=3)
        timers.create_timer("triggered", 3600, signature)
        timers.trigger_timer("triggered")
        work.wait_for(8)
    found = {
        name: [result for _, timer, result in work.seen if timer is not None and timer.name == name]
        for name in ("once", "triggered")
    }
    assert found == {"once": [1, 2, 3, 13], "triggered": [1, 2, 3, 13]}
    assert timers.get_timer(id).total_run_count == 1


def test_the_first_task_has_the_runs_id(
    work: Work, make_publisher: MakePublisher, queues: Queues, prefix: str
) -> None:
    for name, (make, _) in CANVASES.items():
        run = run_of(definition_of(work.app, make(work)))
        assert make_publisher(work.app)([run], ALWAYS) == [None], name
        ids = [message["headers"]["id"] for message in queues.take(f"{prefix}queue")]
        assert ids[0] == run.task_id, name
        assert len(set(ids)) == len(ids), name


def test_what_is_linked_to_a_canvas_runs(work: Work, make_publisher: MakePublisher) -> None:
    """Beside a canvas, the timer's link follows its end, and link_error any failure."""
    links = {"link": work.add.s(100), "link_error": [work.told.si()]}
    signatures = [
        chain(work.add.s(1), work.add.s(1)),
        chord([work.add.s(1), work.add.s(2)], work.total.s()),
        chain(work.add.s(1), work.fail.s(), work.add.s(1)),
        chord([work.add.s(5), work.fail.s()], work.total.s()),
    ]
    expected: list[list[Any]] = [[1, 2, 102], [1, 2, 3, 103], [1, "told"], [5, "told"]]
    with worker(work.app):
        for number, signature in enumerate(signatures):
            definition = definition_of(work.app, signature, options=links)
            work.seen.clear()
            work.ended.clear()
            assert make_publisher(work.app)([run_of(definition, number)], ALWAYS) == [None]
            count = len(expected[number]) + (number >= 2)  # one that fails, too
            work.wait_for(count)
            found = [result for result in work.results if result is not None]
            assert found == expected[number]
            assert all(timer is not None for _, timer, _ in work.seen)


def test_a_map_by_hand_has_no_timer_and_a_plain_call_in_one_is_a_plain_call(
    make_work: MakeWork,
) -> None:
    work = make_work()
    calls: list[Any] = []

    def caller(timer: Any, number: int) -> None:
        calls.append((timer, number, work.told("direct")))

    task = a_task(work.app, "caller", callback_body(caller), bind=True)
    with worker(work.app):
        task.map([1, 2]).apply_async()
        wait_until(lambda: len(calls) == 2, "the calls", 10)
    assert calls == [(None, 1, "told"), (None, 2, "told")]
    assert [timer for _, timer, _ in work.seen] == ["direct", "direct"]


def test_a_run_is_claimed_once_for_all_items_of_a_map(
    work: Work, make_publisher: MakePublisher
) -> None:
    claimed: list[Any] = []
    seen: list[int] = []

    def callback(timer: CallbackTimer, number: int) -> None:
        seen.append(number)

    def admit(request: Any, timer: CallbackTimer) -> None:
        claimed.append((request.id, timer.run))

    task = a_task(work.app, "claimed", callback_body(callback, admit), bind=True)
    runs = [run_of(definition_of(work.app, task.map([1, 2, 3])), number) for number in (1, 2)]
    with worker(work.app):
        assert make_publisher(work.app)(runs, ALWAYS) == [None, None]
        wait_until(lambda: len(seen) == 6, "the calls", 10)
    assert claimed == [(run.task_id, run.number) for run in runs]


# ------------------------------------------------------------------ what is sent


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CANVASES)
def test_a_run_that_is_built_twice_has_the_same_ids(
    make_work: MakeWork,
    make_publisher: MakePublisher,
    backends: dict[str, str],
    backend: str,
    name: str,
) -> None:
    """In headers, bodies, chains and chords: all but the times of chord_unlock is the same."""
    work = make_work(backends[backend])
    signature = CANVASES[name][0](work)
    before = repr(signature)
    definition = definition_of(work.app, signature)
    blob = definition.blob
    first, second = (make_publisher(work.app).build([run_of(definition)])[0] for _ in range(2))
    assert texts(first) == texts(second)
    other = make_publisher(work.app).build([run_of(definition, 2)])[0]
    assert set(texts(other)).isdisjoint(texts(first))
    del definition.__dict__["blob"]
    assert (definition.blob, repr(signature)) == (blob, before)


def raw(task: str, /, **kwargs: Any) -> dict[str, Any]:
    """Return a canvas as a dict, which no constructor of Celery's has put into another form."""
    return {"task": task, "args": [], "kwargs": kwargs, "options": {}}


TASKS = st.builds(
    lambda task, immutable: {**Signature(task, immutable=immutable)},
    st.sampled_from(["add", "unknown"]),
    st.booleans(),
)
SEVERAL = [raw("celery.map", task=Signature("add"), it=[1, 2])]
SEVERAL += [raw("celery.chunks", task=Signature("add"), it=[[1], [2], [3]], n=2)]
TREES = st.recursive(
    TASKS | st.sampled_from(SEVERAL),
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=4).map(lambda t: raw("celery.chain", tasks=t)),
        st.lists(inner, min_size=1, max_size=3).map(lambda t: raw("celery.group", tasks=t)),
        st.tuples(st.lists(inner, min_size=1, max_size=3), inner).map(
            lambda t: raw("celery.chord", header=t[0], body=t[1])
        ),
    ),
    max_leaves=8,
).filter(lambda tree: is_canvas(tree["task"]))
ID = re.compile(r"\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b")


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(tree=TREES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_no_canvas_has_an_id_that_does_not_follow_from_its_run(
    make_work: MakeWork,
    make_publisher: MakePublisher,
    backends: dict[str, str],
    backend: str,
    tree: Any,
) -> None:
    work = make_work(backends[backend])
    run = run_of(definition_of(work.app, tree))
    publisher = make_publisher(work.app)
    first, second = (publisher.build([run])[0] for _ in range(2))
    publisher.close()
    assert texts(first) == texts(second)
    assert isinstance(first, Message)
    for value in first.values:
        content = Queues.read(value)
        content["properties"].pop("delivery_tag")
        oid = content["properties"]["reply_to"]  # of the process
        ids = set(ID.findall(repr(content))) - {oid}
        assert {id[14] for id in ids} == {"5"}
    assert run.task_id in repr(texts(first))


@pytest.mark.parametrize("name", CANVASES)
def test_nothing_is_sent_or_subscribed_to_while_messages_are_built(
    make_work: MakeWork,
    make_publisher: MakePublisher,
    redis_server: RedisServer,
    prefix: str,
    tmp_path: Path,
    name: str,
) -> None:
    for backend in (redis_server.url, f"file://{tmp_path}"):
        work = make_work(backend)
        run = run_of(definition_of(work.app, CANVASES[name][0](work)))
        before = len(redis_server.client.client_list(_type="pubsub"))
        publisher = make_publisher(work.app)
        assert publisher.connect() is None
        publisher.expect([run])
        (message,) = publisher.build([run])
        assert isinstance(message, Message)
        assert len(redis_server.client.client_list(_type="pubsub")) == before
        assert not redis_server.client.exists(f"{prefix}queue")


def test_a_backend_that_polls_has_its_unlock_task_sent_along(
    make_work: MakeWork, make_publisher: MakePublisher, tmp_path: Path
) -> None:
    work = make_work(f"file://{tmp_path}")
    definition = definition_of(work.app, CANVASES["nested_chords"][0](work))
    (message,) = make_publisher(work.app).build([run_of(definition)])
    assert isinstance(message, Message)
    tasks = [Queues.read(value)["headers"]["task"] for value in message.values]
    assert sorted(tasks) == ["add"] * 3 + ["celery.chord_unlock"] * 2


def test_a_pickled_canvas_is_celerys_own(
    make_work: MakeWork, make_publisher: MakePublisher, redis_server: RedisServer
) -> None:
    """A worker need not have this package."""
    work = make_work(redis_server.url, task_serializer="pickle")
    signature = chain(work.add.s(1), CANVASES["nested_chords"][0](work))
    run = run_of(definition_of(work.app, signature))
    (message,) = make_publisher(work.app).build([run])
    assert isinstance(message, Message)
    body = base64.b64decode(json.loads(message.values[0])["body"])
    assert b"celery.canvas" in body
    assert b"celery_dtimer" not in body
    _, _, embedded = pickle.loads(body)  # noqa: S301 - the test's own
    assert [type(step) for step in embedded["chain"]] == [type(chord([], None))]


def test_the_options_of_a_timer_are_those_of_apply_async(
    work: Work, make_publisher: MakePublisher, queues: Queues, prefix: str
) -> None:
    options = {
        "queue": f"{prefix}asked",
        "priority": 6,
        "headers": {"tenant": "acme"},
        "expires": 60,
        "countdown": 30,
    }
    signature = group(work.add.s(1), chain(work.add.s(2).set(priority=3), work.add.s(3)))
    run = run_of(definition_of(work.app, signature, options=options))
    assert make_publisher(work.app)([run], ALWAYS) == [None]
    messages = queues.take(f"{prefix}asked\x06\x166")
    assert len(messages) == 2
    for message in messages:
        headers = message["headers"]
        assert (headers["tenant"], headers["dtimer"]) == ("acme", run.header)
        assert headers["celery_beat_task"] is True
        assert headers["expires"]
        assert headers["eta"]


def test_arguments_beside_a_canvas_go_to_its_first_tasks(
    work: Work, make_publisher: MakePublisher
) -> None:
    cases = [
        (chain(work.add.s(1), work.add.s(2)), [102, 104]),
        (group(work.add.s(1), work.add.s(2)), [102, 103]),
        (chord([work.add.s(1), work.add.si(2)], work.total.s()), [102, 2, 104]),
    ]
    with worker(work.app):
        for number, (signature, expected) in enumerate(cases):
            definition = definition_of(work.app, signature, args=[100])
            kwargs = {**definition.kwargs, "n": 1}  # beside its parts: for the tasks
            definition = replace(definition, kwargs=kwargs)
            work.seen.clear()
            work.ended.clear()
            assert make_publisher(work.app)([run_of(definition, number)], ALWAYS) == [None]
            work.wait_for(len(expected))
            assert work.results == expected


def test_signals_are_sent_for_each_message_once_it_has_arrived(
    work: Work, make_publisher: MakePublisher
) -> None:
    seen: list[tuple[str, str]] = []

    def before(sender: str, headers: dict[str, Any], **_: Any) -> None:
        seen.append(("before", headers["id"]))

    def after(sender: str, headers: dict[str, Any], **_: Any) -> None:
        seen.append((sender, headers["id"]))

    run = run_of(definition_of(work.app, group(work.add.s(1), work.add.s(2), work.told.s())))
    signals.before_task_publish.connect(before)
    signals.after_task_publish.connect(after)
    try:
        assert make_publisher(work.app)([run], ALWAYS) == [None]
    finally:
        signals.before_task_publish.disconnect(before)
        signals.after_task_publish.disconnect(after)
    ids = [run.task_id, run.id_of("1"), run.id_of("2")]
    assert seen == [
        *(("before", id) for id in ids),
        *zip(("add", "add", "told"), ids, strict=True),
    ]


def test_a_canvas_of_unknown_tasks_is_sent_like_a_plain_one(
    work: Work, make_publisher: MakePublisher, queues: Queues, prefix: str
) -> None:
    signature = chord([Signature("elsewhere.a"), Signature("elsewhere.b")], Signature("c"))
    run = run_of(definition_of(work.app, signature))
    assert make_publisher(work.app)([run], ALWAYS) == [None]
    tasks = [message["headers"]["task"] for message in queues.take(f"{prefix}queue")]
    assert tasks == ["elsewhere.a", "elsewhere.b"]


def test_a_canvas_that_can_not_be_built_or_sent_spoils_no_other(
    work: Work, make_publisher: MakePublisher, queues: Queues, prefix: str,
    redis_server: RedisServer,
) -> None:  # fmt: skip
    spoilt = f"{prefix}spoilt"
    redis_server.client.set(spoilt, "no list")

    def strict(number: int) -> None: ...

    a_task(work.app, "strict", strict)
    signatures: list[Any] = [
        group(work.add.s(1), work.add.s(2)),
        group(work.add.s(1), Signature("strict")),
        group(work.add.s(1), work.add.s(2).set(queue=spoilt)),
        group(work.add.s(4), work.add.s(5)),
    ]
    runs = [run_of(definition_of(work.app, each), n) for n, each in enumerate(signatures)]
    outcomes = make_publisher(work.app)(runs, ALWAYS)
    assert [type(each) for each in outcomes] == [
        *(type(None), UnsendableError, RefusedError, type(None))
    ]
    redis_server.client.delete(spoilt)


def test_a_result_backend_that_fails_has_the_run_tried_again(
    make_work: MakeWork, make_publisher: MakePublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = make_work()
    definition = definition_of(work.app, CANVASES["chord"][0](work))

    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("the backend's own")

    with monkeypatch.context() as patch:
        patch.setattr(work.app.backend, "apply_chord", fails)
        (outcome,) = make_publisher(work.app)([run_of(definition)], ALWAYS)
    assert isinstance(outcome, RefusedError)
    assert "the backend's own" in str(outcome)
    assert make_publisher(work.app)([run_of(definition)], ALWAYS) == [None]


def test_an_eager_app_runs_a_canvas_here(
    make_work: MakeWork, make_publisher: MakePublisher
) -> None:
    work = make_work(task_always_eager=True)
    for name in ("chain", "group", "chord", "groups_in_a_chain"):
        make, stages = CANVASES[name]
        work.seen.clear()
        run = run_of(definition_of(work.app, make(work)))
        assert make_publisher(work.app)([run], ALWAYS) == [None]
        assert sorted(work.results) == sorted(result for stage in stages for result in stage)
        assert all(timer is not None for _, timer, _ in work.seen)


def test_on_rabbitmq_a_canvas_is_sent_when_all_its_messages_are_confirmed(
    make_work: MakeWork,
    make_publisher: MakePublisher,
    shared_rabbitmq: RabbitMQ,
    redis_server: RedisServer,
    prefix: str,
) -> None:
    one_message = {"x-max-length": 1, "x-overflow": "reject-publish"}
    names = [f"{prefix}queue", f"{prefix}full"]
    work = make_work(
        broker_url=shared_rabbitmq.url,
        dtimer_redis_url=redis_server.url,
        task_queues=[Queue(names[0]), Queue(names[1], queue_arguments=one_message)],
    )
    add, full = work.add, {"queue": names[1]}
    signatures = [
        chord([add.s(1), add.s(2)], work.total.s()),
        group(add.s(1), add.s(2).set(**full), add.s(3).set(**full)),
        group(add.s(4), add.s(5), add.s(6)),
    ]
    runs = [run_of(definition_of(work.app, each), n) for n, each in enumerate(signatures)]
    outcomes = make_publisher(work.app)(runs, ALWAYS)
    assert [type(each) for each in outcomes] == [type(None), RefusedError, type(None)]
    with work.app.connection_for_write() as connection:
        channel = connection.channel()
        counts = [channel.queue_declare(name, passive=True).message_count for name in names]
        for name in names:
            channel.queue_delete(name)
    assert counts == [2 + 1 + 3, 1]


# ------------------------------------------------------------------ what is stored


def without_ids(value: Any) -> Any:
    """Return a signature as JSON data, without ids."""
    if isinstance(value, Mapping):
        return {key: without_ids(each) for key, each in value.items() if key != "task_id"}
    return [without_ids(each) for each in value] if isinstance(value, (list, tuple)) else value


@pytest.mark.parametrize("name", CANVASES)
def test_a_canvas_comes_back_from_the_store_as_it_was(work: Work, name: str) -> None:
    signature = CANVASES[name][0](work)
    definition = definition_of(work.app, signature)
    stored = {
        "task": definition.task,
        "args": list(definition.args),
        "kwargs": definition.kwargs,
        "options": definition.options,
        "subtask_type": signature["subtask_type"],
        "immutable": signature["immutable"],
    }
    assert is_canvas(definition.task)
    assert without_ids(Signature.from_dict(stored)) == without_ids(signature)


def test_what_a_signature_says_of_itself_is_kept_and_its_ids_are_not(work: Work) -> None:
    first = work.add.s(1).set(
        task_id="mine", queue="q", expires=5, link=work.add.s(2).set(task_id="linked")
    )
    _, _, kwargs, options = parts_of(
        chain(first, work.add.si(1), task_id="chain", priority=3), work.app
    )
    stored, second = kwargs["tasks"]
    assert options == {"priority": 3}
    assert {key: stored["options"][key] for key in ("queue", "expires")} == {
        "queue": "q",
        "expires": 5,
    }
    assert "task_id" not in stored["options"]
    assert stored["options"]["link"]["options"] == {}
    assert (stored["immutable"], second["immutable"]) == (False, True)
    assert first.options["task_id"] == "mine"


def test_a_canvas_that_was_sent_before_can_be_stored(work: Work) -> None:
    signature = chord([work.add.s(1), work.add.s(2)], work.total.s())
    expected = parts_of(signature, work.app)
    signature.freeze()
    assert parts_of(signature, work.app) == expected
    parts = dict(zip(("task", "args", "kwargs", "options"), expected, strict=True))
    assert parts_of(parts, work.app) == expected


def test_a_generator_of_tasks_is_written_out(work: Work) -> None:
    signature = group(work.add.s(number) for number in range(3))
    assert [task["args"] for task in parts_of(signature, work.app)[2]["tasks"]] == [[0], [1], [2]]
    assert len(signature.tasks) == 3


BAD: dict[str, Callable[[Work], Any]] = {
    "a plain signature": lambda w: w.add.s(1),
    "no signature": lambda w: 5,
    "an empty chain": lambda w: chain(),
    "an empty group": lambda w: group([]),
    "an empty group in a group": lambda w: group(w.add.s(1), group([])),
    "an empty chord": lambda w: chord([], w.total.s()),
    "a chord without a body": lambda w: chord([w.add.s(1)]),
    "a text among tasks": lambda w: {"task": "celery.group", "kwargs": {"tasks": ["add"]}},
    "a number for tasks": lambda w: {"task": "celery.chain", "kwargs": {"tasks": 5}},
    "no tasks": lambda w: {"task": "celery.chain", "kwargs": {}},
    "a text as a link": lambda w: chain(w.add.s(1).set(link="add"), w.add.s(2)),
    "chunks of none": lambda w: w.add.chunks([], 2),
    "chunks of no size": lambda w: w.add.chunks([(1,)], 0),
    "a map over a text": lambda w: {
        "task": "celery.map",
        "kwargs": {"task": w.add.s(), "it": "abc"},
    },
    "a map of no task": lambda w: {"task": "celery.map", "kwargs": {"task": "add", "it": [1]}},
    "args that are a text": lambda w: {
        "task": "celery.group",
        "kwargs": {"tasks": [{"task": "add", "args": "abc"}]},
    },
}


@pytest.mark.parametrize("name", BAD)
def test_what_can_not_run_is_refused(work: Work, name: str) -> None:
    with pytest.raises(InvalidTimerError, match="callback="):
        parts_of(BAD[name](work), work.app)


@pytest.mark.parametrize("backend", ["disabled://", "rpc://"])
def test_a_chord_needs_a_result_backend_and_other_canvases_do_not(
    make_work: MakeWork, backend: str
) -> None:
    work = make_work(backend)
    for name, (make, _) in CANVASES.items():
        if name in CHORDS:
            with pytest.raises(InvalidTimerError, match="result_backend"):
                parts_of(make(work), work.app)
        else:
            assert is_canvas(parts_of(make(work), work.app)[0])


def test_what_add_periodic_task_keeps_of_a_canvas_is_a_canvas(
    work: Work, make_publisher: MakePublisher
) -> None:
    signature = chain(work.add.s(1), group(work.add.s(2), work.add.s(3)), work.total.s())
    work.app.add_periodic_task(60, signature, name="periodic", priority=3)
    entry = work.app.conf.beat_schedule["periodic"]
    assert is_canvas(entry["task"])
    parts = {key: entry[key] for key in ("task", "args", "kwargs", "options")}
    definition = definition_of(work.app, parts)
    assert definition.options == {"priority": 3}
    with worker(work.app):
        assert make_publisher(work.app)([run_of(definition)], ALWAYS) == [None]
        work.wait_for(4)
    assert work.results == [1, 3, 4, 7]


def test_a_canvas_of_the_beat_schedule_runs(make_work: MakeWork, start_timers: StartTimers) -> None:
    work = make_work()
    tasks = (work.add.s(number) for number in (1, 2))
    work.app.add_periodic_task(0.5, group(tasks), name="generated")
    work.app.add_periodic_task(0.5, chain(work.add.s(10), work.add.s(1)), name="chained")
    with worker(work.app):
        start_timers(work.app)
        wait_until(lambda: {1, 2, 10, 11} <= set(work.results), "all tasks", 10)
    assert all(timer is not None for _, timer, _ in work.seen)
