"""A broadcast run is several messages, which go out as a whole, on every way to the broker."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from itertools import chain, repeat
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery, Task, group, signals
from celery.beat import BeatLazyFunc
from celery.canvas import Signature
from celery.contrib.testing.worker import start_worker
from kombu import Queue

from celery_dtimer import DistributedTimer
from celery_dtimer.canvas import parts_of
from celery_dtimer.model import Definition, Run, new_requeued_id, requeued_task_id
from celery_dtimer.policy import Policy
from celery_dtimer.publisher import BrokerDownError, Publisher, RefusedError, UnsendableError
from celery_dtimer.schedules import Interval
from celery_dtimer.store import Message
from celery_dtimer.worker import CallbackTimer
from tests.conftest import MakeApp
from tests.integration.conftest import START_MS
from tests.integration.test_publisher import (
    ALWAYS,
    MakePublisher,
    Queues,
    a_task,
    make_publisher,
    queues,
    run_of,
)
from tests.servers import RabbitMQ, RedisServer
from tests.waiting import wait_until

__all__ = ["make_publisher", "queues"]


def shards_of(number: int = 1, shards: int = 3, **fields: Any) -> Run:
    """Return a run of so many messages."""
    return run_of(number, policy=Policy(shards=shards), **fields)


def numbers(messages: list[dict[str, Any]]) -> list[tuple[int, int]]:
    headers = [message["headers"]["dtimer"] for message in messages]
    return [(header["shard_index"], header["shard_total"]) for header in headers]


MESSAGES: dict[str, dict[str, Any]] = {
    "from a template": {},
    "from Celery": {"options": {"expires": 60}},
    "with a lazy argument": {"args": [BeatLazyFunc(lambda: 1)], "stored": False},
}


@pytest.mark.parametrize("kind", MESSAGES)
def test_one_message_of_a_run_can_be_sent_again(
    make_app: MakeApp, make_publisher: MakePublisher, queues: Queues, prefix: str, kind: str
) -> None:
    publisher = make_publisher(make_app())
    runs = [shards_of(number, **MESSAGES[kind]) for number in (1, 2, 3)]
    assert publisher(runs, ALWAYS) == [None] * 3
    queues.take(f"{prefix}queue")
    id = new_requeued_id(1)
    again = runs[-1]._replace(identity=id, known_id=requeued_task_id(id))
    assert publisher([again, runs[0]], ALWAYS) == [None] * 2
    messages = queues.take(f"{prefix}queue")
    assert numbers(messages) == [(1, 3), (0, 3), (1, 3), (2, 3)]
    assert messages[0]["headers"]["id"] == requeued_task_id(id)
    (built,) = publisher.build([again])
    assert isinstance(built, Message)
    assert len(built.targets) == len(built.values) == 1


@pytest.mark.parametrize("shards", [2, 3, 1000])
@pytest.mark.parametrize("kind", MESSAGES)
def test_a_run_is_one_message_for_each_shard(
    make_app: MakeApp,
    make_publisher: MakePublisher,
    queues: Queues,
    prefix: str,
    kind: str,
    shards: int,
) -> None:
    publisher = make_publisher(make_app())
    for number in (1, 2, 3):  # Celery's first, then the template's
        run = shards_of(number, shards, **MESSAGES[kind])
        assert publisher([run], ALWAYS) == [None]
        messages = queues.take(f"{prefix}queue")
        assert numbers(messages) == [(index, shards) for index in range(shards)]
        ids = [message["headers"]["id"] for message in messages]
        assert ids == [
            run._replace(shard_index=index, shard_total=shards).task_id for index in range(shards)
        ]
        assert len({*ids, run.task_id}) == shards + 1
        tags = {message["properties"]["delivery_tag"] for message in messages}
        assert len(tags) == shards
    assert bool(publisher._templates) == (kind == "from a template")


def test_a_run_is_built_as_one_message_with_all_pushes(
    make_app: MakeApp, make_publisher: MakePublisher, prefix: str
) -> None:
    publisher = make_publisher(make_app())
    for number in (1, 2):
        plain, run = run_of(10 + number), shards_of(number, 5)
        first, message = publisher.build([plain, run])
        assert isinstance(first, Message)
        assert isinstance(message, Message)
        assert message.targets == (("LPUSH", f"{prefix}queue"),) * 5
        assert len(message.values) == 5
        assert len(first.values) == 1


def test_a_template_says_of_shards_what_celery_says(
    make_app: MakeApp, make_publisher: MakePublisher
) -> None:
    app = make_app()
    publisher, full = make_publisher(app), make_publisher(app)
    full._uses_templates = lambda: False  # type: ignore[method-assign]
    publisher.build([run_of(1), run_of(2)])
    run = shards_of(3, 4)
    texts = []
    for each in (publisher, full):
        (message,) = each.build([run])
        assert isinstance(message, Message)
        contents = [Queues.read(value) for value in message.values]
        for content in contents:
            content["properties"].pop("delivery_tag")
        texts.append(repr(contents))
    assert texts[0] == texts[1]
    assert run.definition in publisher._templates


def test_a_shard_that_can_not_be_built_breaks_its_run(
    make_app: MakeApp, make_publisher: MakePublisher, queues: Queues, prefix: str
) -> None:
    app = make_app()

    def strict(number: int) -> None: ...

    a_task(app, "strict", strict)
    outcomes = make_publisher(app)([shards_of(1, task="strict"), shards_of(2)], ALWAYS)
    assert [type(each) for each in outcomes] == [UnsendableError, type(None)]
    assert len(queues.take(f"{prefix}queue")) == 3


def test_what_is_announced_is_announced_for_each_shard(
    make_app: MakeApp, make_publisher: MakePublisher
) -> None:
    seen: list[str] = []

    def after(sender: str, headers: dict[str, Any], **_: Any) -> None:
        seen.append(headers["id"])

    publisher, run = make_publisher(make_app()), shards_of()
    signals.after_task_publish.connect(after)
    try:
        (message,) = publisher.build([run])
        assert isinstance(message, Message)
        assert seen == []
        assert message.published is not None
        message.published()
    finally:
        signals.after_task_publish.disconnect(after)
    assert seen == [run._replace(shard_index=i, shard_total=3).task_id for i in range(3)]


def test_a_canvas_is_sent_whole_for_each_shard(
    make_app: MakeApp, make_publisher: MakePublisher, queues: Queues, prefix: str
) -> None:
    app = make_app()
    parts = parts_of(group(Signature("a"), Signature("b")), app)
    fields = dict(zip(("task", "args", "kwargs", "options"), parts, strict=True))
    run = shards_of(shards=2, **fields)
    assert make_publisher(app)([run], ALWAYS) == [None]
    messages = queues.take(f"{prefix}queue")
    assert [
        (m["headers"]["task"], *n) for m, n in zip(messages, numbers(messages), strict=True)
    ] == [
        *(("a", 0, 2), ("b", 0, 2)),
        *(("a", 1, 2), ("b", 1, 2)),
    ]
    assert len({message["headers"]["id"] for message in messages}) == 4
    assert len({message["headers"]["group"] for message in messages}) == 2


def test_runs_of_many_messages_are_not_all_built_before_the_first_is_sent(
    make_app: MakeApp, make_publisher: MakePublisher, queues: Queues, prefix: str
) -> None:
    """At each pipeline it is asked whether sending is allowed, and never within a run."""
    publisher = make_publisher(make_app())
    answers = iter([True, True, False])
    runs = [shards_of(number, 1000) for number in range(9)]
    outcomes = publisher(runs, lambda: next(answers))
    assert outcomes == [None] * 4
    assert len(queues.take(f"{prefix}queue")) == 4 * 1000


# ------------------------------------------------------------------ each message by itself


@pytest.fixture
def one_by_one(make_app: MakeApp) -> Celery:
    """An app on a broker that answers for each message."""
    return make_app(broker_url="memory://", task_default_queue=uuid.uuid4().hex)


def taken(app: Celery) -> list[tuple[str, int]]:
    """Return the timer and the shard of what is in an app's queue, and take it out."""
    found = []
    with app.connection_for_read() as connection:
        queue = connection.SimpleQueue(app.conf.task_default_queue)
        while True:
            try:
                message = queue.get(block=False)
            except queue.Empty:
                break
            message.ack()
            header = message.headers["dtimer"]
            found.append((header["name"], header.get("shard_index", 0)))
        queue.close()
    return found


def test_one_by_one_a_run_is_sent_when_all_shards_are(
    one_by_one: Celery, make_publisher: MakePublisher
) -> None:
    runs = [shards_of(1), run_of(2), shards_of(3, 2)]
    assert make_publisher(one_by_one)(runs, ALWAYS) == [None] * 3
    sent = [("n1", 0), ("n1", 1), ("n1", 2), ("n2", 0), ("n3", 0), ("n3", 1)]
    assert taken(one_by_one) == sent


def let_time_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the time of a batch be over after the publisher has looked at its first run."""
    clock = chain([0.0, 0.0], repeat(1000.0))
    fake = SimpleNamespace(monotonic=lambda: next(clock))
    monkeypatch.setattr("celery_dtimer.publisher.time", fake)


def test_one_by_one_the_time_limit_ends_a_batch_between_runs(
    one_by_one: Celery, make_publisher: MakePublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher = make_publisher(one_by_one)
    let_time_pass(monkeypatch)
    assert publisher([shards_of(1, 1000), shards_of(2, 1000)], ALWAYS) == [None]
    assert len(taken(one_by_one)) == 1000


@pytest.mark.parametrize("allowed", range(5))
def test_one_by_one_a_run_cut_off_is_not_answered_for(
    one_by_one: Celery, make_publisher: MakePublisher, allowed: int
) -> None:
    answers = iter([True] * allowed + [False])
    outcomes = make_publisher(one_by_one)([shards_of(1), shards_of(2)], lambda: next(answers))
    assert outcomes == [None] * (allowed // 3)
    assert len(taken(one_by_one)) == allowed


def test_one_by_one_a_refused_shard_makes_the_run_refused(
    one_by_one: Celery, make_publisher: MakePublisher
) -> None:
    failing = iter([False, False, True])

    def sometimes() -> int:
        if next(failing, False):
            raise RuntimeError("the argument's own")
        return 1

    run = shards_of(1, args=[BeatLazyFunc(sometimes)], stored=False)
    publisher = make_publisher(one_by_one)
    outcomes = publisher([run, shards_of(2, 2)], ALWAYS)
    assert [type(each) for each in outcomes] == [RefusedError, type(None)]
    assert taken(one_by_one) == [("n1", 0), ("n1", 1), ("n2", 0), ("n2", 1)]
    assert publisher([run], ALWAYS) == [None]
    assert taken(one_by_one) == [("n1", 0), ("n1", 1), ("n1", 2)]


def test_one_by_one_a_broker_that_goes_down_ends_the_batch(
    one_by_one: Celery, make_publisher: MakePublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher = make_publisher(one_by_one)
    send, down = publisher._send, BrokerDownError("gone")
    monkeypatch.setattr(publisher, "_send", lambda run: down if run.shard_index == 1 else send(run))
    assert publisher([run_of(1), shards_of(2), shards_of(3)], ALWAYS) == [None, down]


# ------------------------------------------------------------------ RabbitMQ

MakeRabbit = Callable[..., tuple[Celery, Publisher]]


@pytest.fixture
def rabbit(
    make_app: MakeApp,
    make_publisher: MakePublisher,
    shared_rabbitmq: RabbitMQ,
    redis_server: RedisServer,
    prefix: str,
) -> Iterator[MakeRabbit]:
    """Make an app on RabbitMQ whose default queue takes so many messages, and its publisher."""
    apps: list[Celery] = []

    def make(room: int = 10_000) -> tuple[Celery, Publisher]:
        arguments = {"x-max-length": room, "x-overflow": "reject-publish"}
        app = make_app(
            broker_url=shared_rabbitmq.url,
            dtimer_redis_url=redis_server.url,
            task_queues=[Queue(f"{prefix}queue", queue_arguments=arguments)],
        )
        apps.append(app)
        return app, make_publisher(app)

    yield make
    for app in apps:
        with app.connection_for_write() as connection:
            connection.channel().queue_delete(f"{prefix}queue")


def waiting(app: Celery) -> int:
    """Return how many messages are in an app's queue."""
    with app.connection_for_write() as connection:
        channel = connection.channel()
        name = app.conf.task_default_queue
        return int(channel.queue_declare(name, passive=True).message_count)


def test_in_flight_a_run_is_sent_when_all_shards_are_confirmed(rabbit: MakeRabbit) -> None:
    app, publisher = rabbit()
    runs = [shards_of(1, 1000), run_of(2), shards_of(3, 2)]
    assert publisher(runs[:1], ALWAYS) == [None]
    assert waiting(app) == 1000
    assert publisher(runs[1:], ALWAYS) == [None, None]
    assert waiting(app) == 1003


def test_in_flight_one_refusal_makes_the_run_refused(rabbit: MakeRabbit) -> None:
    app, publisher = rabbit(room=4)
    outcomes = publisher([shards_of(1), shards_of(2), shards_of(3)], ALWAYS)
    assert [type(each) for each in outcomes] == [type(None), RefusedError, RefusedError]
    assert waiting(app) == 4


@pytest.mark.parametrize("allowed", range(1, 5))
def test_in_flight_a_run_cut_off_is_not_answered_for(rabbit: MakeRabbit, allowed: int) -> None:
    app, publisher = rabbit()
    answers = iter([True] * allowed + [False])
    outcomes = publisher([shards_of(1), shards_of(2)], lambda: next(answers))
    assert outcomes == [None] * (allowed // 3)
    assert waiting(app) == allowed


def test_in_flight_the_time_limit_ends_a_batch_between_runs(
    rabbit: MakeRabbit, monkeypatch: pytest.MonkeyPatch
) -> None:
    app, publisher = rabbit()
    let_time_pass(monkeypatch)
    assert publisher([shards_of(1, 300), shards_of(2, 300)], ALWAYS) == [None]
    assert waiting(app) == 300


def test_in_flight_what_a_lost_channel_left_unknown_is_sent_again(rabbit: MakeRabbit) -> None:
    app, publisher = rabbit()
    assert publisher([run_of(1)], ALWAYS) == [None]
    asked = iter(range(100))

    def may_send() -> bool:
        if next(asked) == 3:
            publisher._producer.connection.transport.close_connection(
                publisher._producer.connection.connection
            )
        return True

    assert publisher([shards_of(2), shards_of(3)], may_send) == [None, None]
    assert waiting(app) >= 1 + 3 + 3


def test_in_flight_a_task_that_fails_like_a_broker_has_its_run_refused(rabbit: MakeRabbit) -> None:
    """It was never published, and must not count as sent."""

    class Failing(Task):  # type: ignore[type-arg]
        abstract = True

        def apply_async(self, args: Any = None, *rest: Any, **options: Any) -> Any:
            if args == (3,):
                raise ConnectionError("the task's own")
            return super().apply_async(args, *rest, **options)

    app, publisher = rabbit()
    a_task(app, "failing", base=Failing)
    assert publisher([run_of(1, task="failing")], ALWAYS) == [None]
    runs = [shards_of(number, task="failing", args=[number]) for number in (2, 3, 4)]
    outcomes = publisher(runs, ALWAYS)
    assert [type(each) for each in outcomes] == [type(None), RefusedError, type(None)]
    assert waiting(app) == 1 + 3 + 3


# ------------------------------------------------------------------ in a worker


def test_a_callback_sees_its_shard_and_runs_once_for_each(
    make_app: MakeApp, make_publisher: MakePublisher, redis_server: RedisServer
) -> None:
    timers = DistributedTimer(make_app(worker_hijack_root_logger=False))
    seen: list[Any] = []

    @timers.callback("shard", shared=False, run_once=True)
    def shard(timer: CallbackTimer) -> None:
        seen.append((timer.shard_index, timer.shard_total, timer.run))

    @timers.callback("last", shared=False)
    def last(timer: CallbackTimer) -> None:
        seen.append((timer.shard_index, timer.shard_total))

    run = shards_of(1, 4, task=shard.name)
    publisher = make_publisher(timers.app)
    with start_worker(timers.app, perform_ping_check=False, loglevel="CRITICAL"):
        for each in (run, run, run_of(2, task=last.name)):  # the second time nothing runs
            assert publisher([each], ALWAYS) == [None]
        wait_until(lambda: (0, 1) in seen, "the last message", 10)
    timers.store.close()
    assert sorted(seen) == [(0, 1), *((index, 4, 1) for index in range(4))]


def test_links_of_a_timer_run(make_app: MakeApp, make_publisher: MakePublisher) -> None:
    app = make_app(worker_hijack_root_logger=False, result_backend="cache+memory://")
    seen: list[Any] = []

    def works() -> int:
        return 7

    def fails() -> None:
        raise LookupError("on purpose")

    def record(*args: Any) -> None:
        seen.append(args[-1])

    tasks = {task.__name__: a_task(app, task.__name__, task) for task in (works, fails, record)}
    link = tasks["record"].s("a").set(immutable=True)
    options = {"link": [tasks["record"].s(), link], "link_error": tasks["record"].si("failed")}
    runs = [run_of(1, task="works", options=options), run_of(2, task="fails", options=options)]
    with start_worker(app, perform_ping_check=False, loglevel="CRITICAL"):
        assert make_publisher(app)(runs, ALWAYS) == [None, None]
        wait_until(lambda: len(seen) == 3, "the links", 10)
    assert sorted(seen, key=str) == [7, "a", "failed"]


def test_a_definition_without_shards_is_one_message(
    make_app: MakeApp, make_publisher: MakePublisher, queues: Queues, prefix: str
) -> None:
    definition = Definition("one", "record", Interval(10_000), policy=Policy(shards=1))
    run = Run("orders", "i", definition.id, definition.id, START_MS, START_MS, 1, definition)
    assert make_publisher(make_app())([run], ALWAYS) == [None]
    (message,) = queues.take(f"{prefix}queue")
    assert message["headers"]["id"] == run.task_id
    assert "shard_total" not in message["headers"]["dtimer"]
