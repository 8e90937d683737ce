"""The messages are those of Celery's own beat, and each one's fate is told."""

from __future__ import annotations

import base64
import time
from collections.abc import Callable, Iterator
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any
from uuid import UUID

import pytest
import redis
from celery import Celery, Task, signals
from celery.beat import BeatLazyFunc, ScheduleEntry, Scheduler
from celery.canvas import Signature
from celery.schedules import schedule
from kombu.utils import json

from celery_dtimer.model import Definition, Run, decode_definition
from celery_dtimer.options import check_options
from celery_dtimer.publisher import BrokerDownError, Publisher, RefusedError, UnsendableError
from celery_dtimer.schedules import Interval
from celery_dtimer.store import Settlement
from tests.conftest import MakeApp
from tests.integration.conftest import START_MS, Service
from tests.servers import RedisServer

UTC = timezone.utc
ALWAYS = lambda: True  # noqa: E731


def run_of(number: int = 1, *, stored: bool = True, **fields: Any) -> Run:
    """Return a run whose definition has been stored and read, unless only code can hold it."""
    given = {"name": f"n{number}", "task": "record", "schedule": Interval(10_000), **fields}
    given["options"] = check_options(given.get("options", {}))
    definition = Definition(**given)
    if stored:
        definition = decode_definition(definition.blob)
    due_ms = START_MS + number
    return Run(
        "orders", "host:1:a", definition.id, definition.id, START_MS, due_ms, number, definition
    )


def a_task(app: Celery, name: str, function: Any = None, **options: Any) -> Task[..., Any]:
    """Return a task of the test's own app: a shared one would be in every later app too."""

    def anything(*args: Any, **kwargs: Any) -> None: ...

    task: Task[..., Any] = app.task(name=name, shared=False, **options)(function or anything)
    return task


@pytest.fixture
def make_publisher() -> Iterator[Callable[[Celery], Publisher]]:
    made: list[Publisher] = []

    def make(app: Celery) -> Publisher:
        made.append(Publisher(app, timeout=5))
        return made[-1]

    yield make
    for publisher in made:
        publisher.close()


MakePublisher = Callable[[Celery], Publisher]


class Queues:
    """What lies in the broker's lists."""

    def __init__(self, client: redis.Redis) -> None:
        self._client = client

    def take(self, queue: str) -> list[dict[str, Any]]:
        """Return the messages of a list, oldest first, and empty it."""
        texts: Any = self._client.lrange(queue, 0, -1)
        self._client.delete(queue)
        return [json.loads(text) for text in reversed(texts)]

    @staticmethod
    def read(text: str) -> dict[str, Any]:
        """Return a message with its body decoded."""
        message: dict[str, Any] = json.loads(text)
        return {**message, "body": json.loads(base64.b64decode(message["body"]))}


@pytest.fixture
def queues(redis_server: RedisServer) -> Queues:
    return Queues(redis_server.client)


# ------------------------------------------------------------------ what Celery's beat sends


def without_identity(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message without what names it, or says when it was sent."""
    headers = {**message["headers"]}
    properties = {**message["properties"]}
    for key in ("id", "root_id", "dtimer", "celery_beat_task"):  # Celery 5.5 lacks the last
        headers.pop(key, None)
    headers["ignore_result"] = bool(headers["ignore_result"])  # not said: False in 5.5, else None
    for key in ("correlation_id", "delivery_tag"):
        properties.pop(key)
    for key in ("expires", "eta"):
        if headers[key] and not headers[key].startswith("2099"):
            headers[key] = "counted from the sending"
    if "expiration" in properties:
        properties["expiration"] = "counted from the sending"
    headers["argsrepr"] = headers["argsrepr"].strip("()[]")  # theirs is a list, ours a tuple
    body = message["body"]
    if not headers.get("compression"):
        body = json.loads(base64.b64decode(body)) if "json" in message["content-type"] else "body"
    return {**message, "headers": headers, "properties": properties, "body": body}


def differences(ours: dict[str, Any], celerys: dict[str, Any]) -> dict[str, Any]:
    """Return what two messages say differently."""
    found = {}
    for part in ("headers", "properties"):
        first, second = ours[part], celerys[part]
        for key in sorted({*first, *second}):
            if (key in first, first.get(key)) != (key in second, second.get(key)):
                found[key] = (first.get(key, "nothing"), second.get(key, "nothing"))
    for key in ("body", "content-type", "content-encoding"):
        if ours[key] != celerys[key]:
            found[key] = (ours[key], celerys[key])
    return found


def sent_by_celery(app: Celery, queues: Queues, queue: str, entry: dict[str, Any]) -> Any:
    scheduler = Scheduler(app, lazy=True)
    scheduler.apply_async(
        ScheduleEntry("n1", schedule=schedule(10, app=app), app=app, **entry), advance=False
    )
    (message,) = queues.take(queue)
    return without_identity(message)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"priority": 6},
    {"headers": {"tenant": "acme"}},
    {"time_limit": 30, "soft_time_limit": 20},
    {"ignore_result": True},
    {"ignore_result": False},
    {"shadow": "shown"},
    {"serializer": "pickle"},
    {"compression": "zlib"},
    {"expires": 86_400 * 30},
    {"expires": 0.5},
    {"expires": datetime(2099, 1, 1, tzinfo=UTC)},
    {"countdown": 3600},
    {"eta": datetime(2099, 1, 1, tzinfo=UTC)},
    {"link": Signature("after", [1], queue="other")},
    {"link_error": [Signature("failed"), Signature("told", kwargs={"a": 1}, immutable=True)]},
    {"stamped_headers": ["tenant"], "tenant": "acme"},
    {"retry": False},
    {"reply_to": "someone"},
    {"MessageGroupId": "g"},
    {"user_id": "u", "delivery_mode": 1},
    {"argsrepr": "hidden", "kwargsrepr": "hidden"},
    {"group_id": "g", "root_id": "r", "parent_id": "p"},
]
TASKS = ["unregistered", "plain", "ignoring", "storing", "limited"]


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "+".join(options) or "none")
@pytest.mark.filterwarnings("ignore::celery.exceptions.CDeprecationWarning")
def test_a_message_is_what_celerys_beat_would_send(
    make_app: MakeApp,
    make_publisher: MakePublisher,
    queues: Queues,
    prefix: str,
    task: str,
    options: dict[str, Any],
) -> None:
    app = make_app(task_serializer="json")
    a_task(app, "plain")
    a_task(app, "ignoring", ignore_result=True)
    a_task(app, "storing", ignore_result=False)
    a_task(app, "limited", time_limit=5, soft_time_limit=4, priority=3, expires=86_400 * 40)
    queue = f"{prefix}queue"
    priorities = {"limited": 3}
    priority = options.get("priority", priorities.get(task))
    if priority:
        queue += f"\x06\x16{priority}"
    entry = {"task": task, "args": [1, "x"], "kwargs": {"k": None}}
    expected = sent_by_celery(app, queues, queue, {**entry, "options": {**options}})
    outcomes = make_publisher(app)([run_of(**entry, options=options)], ALWAYS)
    assert outcomes == [None]
    (message,) = queues.take(queue)
    assert message["headers"]["dtimer"]["name"] == "n1"
    assert message["headers"]["celery_beat_task"] is True
    assert differences(without_identity(message), expected) == {}


def test_the_task_id_is_the_runs(
    make_app: MakeApp, make_publisher: MakePublisher, queues: Queues, prefix: str
) -> None:
    run = run_of()
    make_publisher(make_app())([run, run], ALWAYS)
    for message in queues.take(f"{prefix}queue"):
        headers, properties = message["headers"], message["properties"]
        assert headers["id"] == headers["root_id"] == properties["correlation_id"] == run.task_id
        assert headers["dtimer"] == run.header


def test_relative_expiry_counts_from_the_sending(
    make_app: MakeApp, make_publisher: MakePublisher, queues: Queues, prefix: str
) -> None:
    given = [30, 0.5, 1, timedelta(seconds=60)]
    runs = [run_of(n, options={"expires": value}) for n, value in enumerate(given)]
    before = time.time()
    assert make_publisher(make_app())(runs, ALWAYS) == [None] * len(given)
    sent = [message["headers"]["expires"] for message in queues.take(f"{prefix}queue")]
    for value, text in zip([30, 0.5, 1, 60], sent, strict=True):
        assert -1 < datetime.fromisoformat(text).timestamp() - before - value < 5


def test_an_absolute_expiry_stays_as_it_is(
    make_app: MakeApp, make_publisher: MakePublisher, queues: Queues, prefix: str
) -> None:
    moment = datetime(2099, 5, 1, 12, tzinfo=timezone(timedelta(hours=2)))
    make_publisher(make_app())([run_of(options={"expires": moment})], ALWAYS)
    (message,) = queues.take(f"{prefix}queue")
    assert datetime.fromisoformat(message["headers"]["expires"]) == moment


# ------------------------------------------------------------------ arguments

ARGUMENTS: list[Any] = [
    UUID(int=7),
    Decimal("1.10"),
    b"\x00\xff",
    date(2026, 3, 1),
    datetime(2026, 3, 1, 12, 30, tzinfo=UTC),
    datetime(2026, 3, 1, 12, 30),  # noqa: DTZ001 naive on purpose
    2**70,
    "\x00 🎉 \ud800",
    [[], {}, [[1]]],
    {"__type__": "interval"},
    "x" * 500_000,
]


def test_arguments_arrive_as_they_were_given(
    make_app: MakeApp, make_publisher: MakePublisher, queues: Queues, prefix: str
) -> None:
    make_publisher(make_app())([run_of(args=ARGUMENTS, kwargs={"all": ARGUMENTS})], ALWAYS)
    (message,) = queues.take(f"{prefix}queue")
    args, kwargs, _ = json.loads(base64.b64decode(message["body"]))
    for arrived in (args, kwargs["all"]):
        assert arrived == ARGUMENTS
        assert [type(value) for value in arrived] == [type(value) for value in ARGUMENTS]


def test_lazy_arguments_are_evaluated_at_each_sending(
    make_app: MakeApp, make_publisher: MakePublisher, queues: Queues, prefix: str
) -> None:
    calls = iter(range(100))
    lazy = BeatLazyFunc(lambda: next(calls))
    run = run_of(args=[lazy], kwargs={"k": lazy}, stored=False)
    make_publisher(make_app())([run, run], ALWAYS)
    bodies = [json.loads(base64.b64decode(m["body"])) for m in queues.take(f"{prefix}queue")]
    assert [(args, kwargs) for args, kwargs, _ in bodies] == [([0], {"k": 1}), ([2], {"k": 3})]


def test_what_the_user_gave_is_not_written_to(
    make_app: MakeApp, make_publisher: MakePublisher
) -> None:
    headers, options = {"tenant": "acme"}, {"priority": 3}
    options["headers"] = headers  # type: ignore[assignment]
    run = run_of(options=options, stored=False)
    make_publisher(make_app())([run, run], ALWAYS)
    assert headers == {"tenant": "acme"}
    assert options == {"priority": 3, "headers": headers}


# ------------------------------------------------------------------ where messages go


@pytest.mark.parametrize("priority", [0, 1, 3, 5, 6, 9])
def test_priorities_go_to_the_lists_of_kombus_steps(
    make_app: MakeApp, make_publisher: MakePublisher, queues: Queues, prefix: str, priority: int
) -> None:
    make_publisher(make_app())([run_of(options={"priority": priority})], ALWAYS)
    step = max(step for step in (0, 3, 6, 9) if step <= priority)
    (message,) = queues.take(f"{prefix}queue" + (f"\x06\x16{step}" if step else ""))
    assert message["properties"]["priority"] == priority


def test_a_prefix_of_all_of_kombus_keys_is_the_lists_too(
    make_app: MakeApp, make_publisher: MakePublisher, queues: Queues, prefix: str
) -> None:
    app = make_app(broker_transport_options={"global_keyprefix": f"{prefix}all:"})
    runs = [run_of(1), run_of(2), run_of(3, options={"priority": 6})]
    assert make_publisher(app)(runs, ALWAYS) == [None] * 3
    names = {
        queue: [message["headers"]["dtimer"]["name"] for message in queues.take(queue)]
        for queue in (f"{prefix}all:{prefix}queue", f"{prefix}all:{prefix}queue\x06\x166")
    }
    assert list(names.values()) == [["n1", "n2"], ["n3"]]
    assert queues.take(f"{prefix}queue") == []


@pytest.mark.filterwarnings("ignore::celery.exceptions.CDeprecationWarning")
def test_routes_queues_and_exchanges_are_celerys_own(
    make_app: MakeApp, make_publisher: MakePublisher, queues: Queues, prefix: str
) -> None:
    def by_function(name: str, *_: Any, **__: Any) -> Any:
        return {"queue": f"{prefix}by-function"} if name == "functional" else None

    app = make_app(task_routes=(by_function, {"mapped": {"queue": f"{prefix}by-map"}}))
    a_task(app, "decorated", queue=f"{prefix}by-task")
    runs = [
        run_of(1, task="functional"),
        run_of(2, task="mapped"),
        run_of(3, task="decorated"),
        run_of(4, options={"queue": f"{prefix}asked"}),
        run_of(5, task="mapped", options={"queue": f"{prefix}asked"}),
        run_of(6),
    ]
    assert make_publisher(app)(runs, ALWAYS) == [None] * 6
    names = {
        queue: [message["headers"]["dtimer"]["name"] for message in queues.take(f"{prefix}{queue}")]
        for queue in ("by-function", "by-map", "by-task", "asked", "queue")
    }
    assert names == {
        "by-function": ["n1"],
        "by-map": ["n2"],
        "by-task": ["n3"],
        "asked": ["n4", "n5"],
        "queue": ["n6"],
    }


def test_a_router_that_chooses_anew_each_time_is_asked_each_time(
    make_app: MakeApp, make_publisher: MakePublisher, queues: Queues, prefix: str
) -> None:
    asked: list[str] = []

    def router(name: str, *_: Any, **__: Any) -> Any:
        asked.append(name)
        return {"queue": f"{prefix}{len(asked)}"}

    publisher, run = make_publisher(make_app(task_routes=(router,))), run_of()
    for _ in range(3):
        publisher([run], ALWAYS)
    assert [len(queues.take(f"{prefix}{number}")) for number in (1, 2, 3)] == [1, 1, 1]


def test_signals_are_sent_for_each_run(
    make_app: MakeApp, make_publisher: MakePublisher, queues: Queues, prefix: str
) -> None:
    seen: list[tuple[str, str]] = []

    def before(sender: str, headers: dict[str, Any], **_: Any) -> None:
        headers["stamped_by"] = "a receiver"
        seen.append(("before", headers["id"]))

    def after(sender: str, headers: dict[str, Any], **_: Any) -> None:
        seen.append(("after", headers["id"]))

    signals.before_task_publish.connect(before)
    signals.after_task_publish.connect(after)
    try:
        make_publisher(make_app())([run_of(1), run_of(2)], ALWAYS)
    finally:
        signals.before_task_publish.disconnect(before)
        signals.after_task_publish.disconnect(after)
    ids = [run_of(1).task_id, run_of(2).task_id]
    assert seen == [(when, id) for when in ("before", "after") for id in ids]
    assert all(m["headers"]["stamped_by"] == "a receiver" for m in queues.take(f"{prefix}queue"))


def test_signals_tell_of_messages_of_the_older_protocol_too(
    make_app: MakeApp, make_publisher: MakePublisher, queues: Queues, prefix: str
) -> None:
    seen: list[str] = []

    def after(sender: str, body: dict[str, Any], **_: Any) -> None:
        seen.append(body["id"])

    def sent(sender: str, task_id: str, **_: Any) -> None:
        seen.append(task_id)

    signals.after_task_publish.connect(after)
    signals.task_sent.connect(sent)
    try:
        app = make_app(task_protocol=1, task_send_sent_event=True)
        assert make_publisher(app)([run_of(1)], ALWAYS) == [None]
    finally:
        signals.after_task_publish.disconnect(after)
        signals.task_sent.disconnect(sent)
    assert seen == [run_of(1).task_id] * 2
    assert len(queues.take(f"{prefix}queue")) == 1


def test_a_result_backend_gets_no_subscription_and_the_worker_its_word(
    make_app: MakeApp, make_publisher: MakePublisher, queues: Queues, prefix: str,
    redis_server: RedisServer,
) -> None:  # fmt: skip
    app = make_app(result_backend=redis_server.url)
    a_task(app, "storing", ignore_result=False)
    before = len(redis_server.client.client_list(_type="pubsub"))
    make_publisher(app)([run_of(task="storing")], ALWAYS)
    assert len(redis_server.client.client_list(_type="pubsub")) == before
    (message,) = queues.take(f"{prefix}queue")
    assert message["headers"]["ignore_result"] is False


def test_an_eager_app_runs_the_task_here_with_its_timer(
    make_app: MakeApp, make_publisher: MakePublisher, queues: Queues, prefix: str
) -> None:
    app, seen = make_app(task_always_eager=True), []

    def callback(self: Any, *args: Any) -> None:
        seen.append((self.request.headers["dtimer"]["name"], args))

    a_task(app, "eager", callback, bind=True)
    assert make_publisher(app)([run_of(task="eager", args=[1])], ALWAYS) == [None]
    assert seen == [("n1", (1,))]
    assert queues.take(f"{prefix}queue") == []


# ------------------------------------------------------------------ what can go wrong


def kinds(outcomes: list[Any]) -> list[Any]:
    return [None if outcome is None else type(outcome) for outcome in outcomes]


BROKERS = ["redis", "memory"]


@pytest.fixture(params=BROKERS)
def app(request: pytest.FixtureRequest, make_app: MakeApp) -> Celery:
    """An app with each way of sending: in one pipeline, and each message by itself."""
    return make_app(**({"broker_url": "memory://"} if request.param == "memory" else {}))


def received(app: Celery) -> list[str]:
    """Return the names of the timers whose messages are in the app's queue, and take them."""
    names = []
    with app.connection_for_read() as connection:
        queue = connection.SimpleQueue(app.conf.task_default_queue)
        while True:
            try:
                message = queue.get(block=False)
            except queue.Empty:
                break
            message.ack()
            names.append(message.headers["dtimer"]["name"])
        queue.close()
    return names


def test_runs_are_sent_in_order_and_confirmed(app: Celery, make_publisher: MakePublisher) -> None:
    publisher = make_publisher(app)
    for _ in range(2):
        assert publisher([run_of(n) for n in range(50)], ALWAYS) == [None] * 50
        assert received(app) == [f"n{n}" for n in range(50)]
    assert publisher([], ALWAYS) == []


def test_a_message_that_cannot_be_built_spoils_no_other(
    app: Celery, make_publisher: MakePublisher
) -> None:
    def one_argument(x: int) -> None: ...

    a_task(app, "checked", one_argument)
    runs = [
        run_of(1),
        run_of(2, task="checked"),
        run_of(3, task="checked", args=[1], kwargs={"\ud800": 1}),
        run_of(4, args=[{1, 2}.__iter__()], stored=False),
        run_of(5, task="checked", args=[1]),
    ]
    outcomes = kinds(make_publisher(app)(runs, ALWAYS))
    assert outcomes == [None, UnsendableError, UnsendableError, UnsendableError, None]
    assert received(app) == ["n1", "n5"]


def test_a_receiver_that_fails_spoils_only_its_own_message(
    app: Celery, make_publisher: MakePublisher
) -> None:
    def router(name: str, *_: Any, **__: Any) -> None:
        if name == "spoilt":
            raise RuntimeError("the router's own")

    app.conf.task_routes = (router,)
    runs = [run_of(1), run_of(2, task="spoilt"), run_of(3)]
    outcomes = make_publisher(app)(runs, ALWAYS)
    assert kinds(outcomes) == [None, RefusedError, None]
    assert "the router's own" in str(outcomes[1])
    assert received(app) == ["n1", "n3"]


def test_nothing_is_sent_once_it_is_not_allowed(app: Celery, make_publisher: MakePublisher) -> None:
    assert make_publisher(app)([run_of(1), run_of(2)], lambda: False) == []
    assert received(app) == []


def test_each_message_is_asked_for_on_other_brokers(
    make_app: MakeApp, make_publisher: MakePublisher
) -> None:
    app = make_app(broker_url="memory://")
    answers = iter([True, True, False])
    assert make_publisher(app)([run_of(n) for n in range(5)], lambda: next(answers)) == [None] * 2
    assert received(app) == ["n0", "n1"]


def test_progress_is_reported(app: Celery) -> None:
    progress: list[int] = []
    publisher = Publisher(app, timeout=5, on_progress=lambda: progress.append(1))
    publisher([run_of(1), run_of(2)], ALWAYS)
    publisher.close()
    assert progress


def test_a_broker_that_is_down_is_told_at_once(
    make_app: MakeApp, make_publisher: MakePublisher
) -> None:
    app = make_app(
        broker_url="redis://127.0.0.1:1/0",
        dtimer_redis_url="redis://127.0.0.1:1/0",
        broker_transport_options={"max_retries": 0},
    )
    assert kinds(make_publisher(app)([run_of(1), run_of(2)], ALWAYS)) == [BrokerDownError]


def test_a_broker_that_comes_back_is_used_again(
    make_app: MakeApp, make_publisher: MakePublisher, redis_server: RedisServer
) -> None:
    app = make_app()
    publisher = make_publisher(app)
    assert publisher([run_of(1)], ALWAYS) == [None]
    for client in redis_server.client.client_list():
        if client["cmd"] in ("lpush", "pipeline") or client["name"] == "":
            redis_server.client.client_kill_filter(_id=client["id"], skipme=True)
    outcomes = [publisher([run_of(2)], ALWAYS) for _ in range(2)]
    assert outcomes[-1] == [None]
    assert received(app)[-1] == "n2"


def test_a_queue_that_is_something_else_refuses_its_own_messages_only(
    make_app: MakeApp, make_publisher: MakePublisher, redis_server: RedisServer, prefix: str
) -> None:
    app = make_app()
    redis_server.client.set(f"{prefix}spoilt", "no list")
    runs = [run_of(1), run_of(2, options={"queue": f"{prefix}spoilt"}), run_of(3)]
    publisher = make_publisher(app)
    assert kinds(publisher(runs, ALWAYS)) == [None, RefusedError, None]
    assert received(app) == ["n1", "n3"]
    redis_server.client.delete(f"{prefix}spoilt")
    assert publisher([runs[1]], ALWAYS) == [None]


def test_closing_twice_is_harmless(make_app: MakeApp) -> None:
    publisher = Publisher(make_app(), timeout=5)
    publisher.close()
    publisher([run_of(1)], ALWAYS)
    publisher.close()
    publisher.close()


def test_a_reason_with_any_characters_can_be_stored(service: Service) -> None:
    timer = service.add()
    epoch = service.join()
    service.store.reap("a", epoch)
    service.clock.advance(10)
    reason = "its message can not be built: '\ud800' 🎉 \x00\nsecond line"
    broken = Settlement(service.due_one("a", epoch), "broken", reason=reason)
    assert service.commit("a", epoch, broken) == [1]
    assert "second line" in service.state(timer.id).reason


def test_what_a_router_or_a_lazy_argument_raises_is_not_the_brokers_fault(
    app: Celery, make_publisher: MakePublisher
) -> None:
    """An OSError of the user's code neither drops the connection nor breaks the timer."""

    def router(name: str, *_: Any, **__: Any) -> None:
        if name == "spoilt":
            raise TimeoutError("the router's own")

    def fails() -> None:
        raise ConnectionError("the argument's own")

    app.conf.task_routes = (router,)
    publisher = make_publisher(app)
    assert publisher([run_of(1)], ALWAYS) == [None]
    producer = publisher._producer
    runs = [
        run_of(2, task="spoilt"),
        run_of(3, args=[BeatLazyFunc(fails)], stored=False),
        run_of(4),
    ]
    outcomes = publisher(runs, ALWAYS)
    assert kinds(outcomes) == [RefusedError, RefusedError, None]
    assert publisher._producer is producer
    assert received(app) == ["n1", "n4"]


@pytest.mark.parametrize("propagates", [True, False])
def test_a_task_that_fails_eagerly_does_not_break_its_timer(
    make_app: MakeApp, make_publisher: MakePublisher, propagates: bool
) -> None:
    app = make_app(task_always_eager=True, task_eager_propagates=propagates)

    def fails() -> None:
        raise RuntimeError("boom")

    a_task(app, "failing", fails)
    assert make_publisher(app)([run_of(task="failing")], ALWAYS) == [None]


# ------------------------------------------------------------------ what goes first


@pytest.mark.parametrize(
    ("url", "highest_first"),
    [
        ("redis://127.0.0.1:1/0", [0, None, 3, 9]),
        ("memory://", [0, None, 3, 9]),
        ("amqp://127.0.0.1:1//", [9, 3, 0, None]),
    ],
)
def test_urgency_goes_by_the_brokers_meaning_of_priority_and_asks_nobody(
    make_app: MakeApp, make_publisher: MakePublisher, url: str, highest_first: list[int | None]
) -> None:
    publisher = make_publisher(make_app(broker_url=url))
    given = [9, None, 0, 3]
    definitions = [
        run_of(n, options={"priority": value}).definition for n, value in enumerate(given)
    ]
    urgent = sorted(definitions, key=publisher.urgency)
    found = [definition.options["priority"] for definition in urgent]
    ranks = [value or 0 for value in highest_first]
    assert [value or 0 for value in found] == ranks
    assert publisher.urgency(definitions[1]) == publisher.urgency(definitions[2]) == 0
    assert publisher._connection is None


@pytest.mark.filterwarnings("ignore::celery.exceptions.CDeprecationWarning")
def test_urgency_follows_from_where_celery_takes_the_priority(
    make_app: MakeApp, make_publisher: MakePublisher, queues: Queues, prefix: str
) -> None:
    """The options, else the task, else a route, as the messages say; a task has the default."""
    app = make_app(
        task_routes={"routed": {"priority": 6}, "both": {"priority": 6}}, task_default_priority="9"
    )
    a_task(app, "own", priority=3)
    a_task(app, "both", priority=3)
    a_task(app, "default")
    cases: list[dict[str, Any]] = [
        {"task": "own"},
        {"task": "both"},
        {"task": "routed"},
        {"task": "neither"},
        {"task": "default"},
        {"task": "routed", "options": {"priority": 0}},
        {"task": "own", "options": {"priority": 9}},
    ]
    publisher = make_publisher(app)
    for number, case in enumerate(cases):
        run = run_of(number, **case)
        assert publisher([run], ALWAYS) == [None]
        (message,) = [
            message
            for step in ("", "\x06\x163", "\x06\x166", "\x06\x169")
            for message in queues.take(f"{prefix}queue{step}")
        ]
        assert publisher.urgency(run.definition) == int(message["properties"]["priority"])


def test_urgency_is_no_place_to_fail(
    make_app: MakeApp, make_publisher: MakePublisher, queues: Queues, prefix: str
) -> None:
    """A route that can not be used has its own messages refused, and no batch ended."""
    publisher = make_publisher(make_app(task_routes={"spoilt": 5}))
    runs = [run_of(1, task="spoilt"), run_of(2)]
    assert [publisher.urgency(run.definition) for run in runs] == [0, 0]
    assert kinds(publisher(runs, ALWAYS)) == [RefusedError, None]
    assert len(queues.take(f"{prefix}queue")) == 1


def test_urgency_does_not_call_a_router(make_app: MakeApp, make_publisher: MakePublisher) -> None:
    def router(*_: Any, **__: Any) -> Any:
        raise RuntimeError("is not asked")

    publisher = make_publisher(make_app(task_routes=(router,)))
    assert publisher.urgency(run_of(options={"priority": 4}).definition) == 4
