"""Durable countdowns on a real Redis: what is kept, what is sent, and what is left afterwards."""

from __future__ import annotations

import ast
import base64
import contextlib
import gc
import json
import multiprocessing
import pickle
import re
import threading
import zlib
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
import redis
from celery import Celery, chain, chord, group, signals
from celery.app.control import Control
from celery.canvas import StampingVisitor
from kombu import Connection, Exchange, Queue
from kombu.exceptions import EncodeError, OperationalError
from kombu.serialization import register
from kombu.utils import json as kombu_json

from celery_dtimer import (
    DistributedTimer,
    InvalidTimerError,
    PendingTask,
    SettingsError,
    TimerNotFoundError,
)
from celery_dtimer.countdowns import pending
from celery_dtimer.model import (
    ONCE,
    Definition,
    Run,
    countdown_id,
    decode_definition,
    is_countdown_id,
)
from celery_dtimer.publisher import Publisher, UnsendableError
from celery_dtimer.store import Message, OutRun, Reading, Settlement, Store
from tests.conftest import FreshRedis, MakeApp
from tests.integration.conftest import StartTimers
from tests.servers import RabbitMQ, RedisServer
from tests.waiting import wait_until

HOUR = 3600
UUID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
SERIALIZERS = ["json", "pickle", "repr"]
register("repr", repr, ast.literal_eval, "application/x-repr", "utf-8")

pytestmark = [
    # Celery's result backend with a redis-py that wants it done otherwise,
    pytest.mark.filterwarnings("ignore:Call to deprecated setex"),
    # and its results, which connect once more as they are forgotten.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


class Shop:
    """An app with tasks, and its durable countdowns if they are on."""

    def __init__(self, app: Celery, client: redis.Redis) -> None:
        self.app, self.redis = app, client
        self.timers = DistributedTimer(app)

        @app.task(name="shop.add", shared=False)
        def add(*args: Any, **kwargs: Any) -> None:
            """Do nothing."""

        @app.task(name="shop.quiet", shared=False, ignore_result=True)
        def quiet() -> None:
            """Do nothing."""

        self.add: Any = add
        self.quiet: Any = quiet

    @property
    def store(self) -> Store:
        return self.timers.store.base

    @property
    def queue(self) -> str:
        return str(self.app.conf.task_default_queue)

    def queued(self, *queues: str) -> list[dict[str, Any]]:
        """Take what is in queues, oldest first."""
        found: list[str] = []
        for queue in queues or (self.queue,):
            for step in ("", "\x06\x163", "\x06\x166", "\x06\x169"):
                found += reversed(self.redis.lrange(queue + step, 0, -1))  # type: ignore[arg-type]
                self.redis.delete(queue + step)
        return [json.loads(text) for text in found]

    def definitions(self) -> list[Definition]:
        """Return what is stored of pending calls, in their order."""
        ids = [id for page in self.store.queued() for id, _ in page if is_countdown_id(id)]
        return [decode_definition(blob) for blob in self.store.definitions(ids) if blob]

    def fire(self) -> list[dict[str, Any]]:
        """Return the messages that a beat would send of all that is pending."""
        publisher = Publisher(self.app, timeout=5)
        messages: list[dict[str, Any]] = []
        for each in self.definitions():
            run = Run("orders", "a", each.id, each.id, 1, now_ms(), 1, each)
            assert publisher.connect() is None
            (built,) = publisher.build([run])
            assert isinstance(built, Message), built
            messages.append(json.loads(built.values[0]))
        publisher.close()
        return messages

    def close(self) -> None:
        """Drop the connections."""
        if self.app.conf.result_backend:
            backend: Any = self.app.backend
            backend.result_consumer.stop()
            backend.client.connection_pool.disconnect()
        if self.timers._shards is not None:
            self.timers.store.close()

    def clear(self) -> None:
        """Cancel all that is pending."""
        self.store.cancel([each.id for each in self.definitions()])


def now_ms() -> int:
    return round(datetime.now(timezone.utc).timestamp() * 1000)


@pytest.fixture
def make_shop(make_app: MakeApp, redis_server: RedisServer) -> Iterator[Callable[..., Shop]]:
    shops: list[Shop] = []

    def make(threshold: Any = 1, *, results: bool = False, **conf: Any) -> Shop:
        app = make_app(
            result_backend=redis_server.url if results else None,
            dtimer_eta_threshold=threshold,
            accept_content=SERIALIZERS,
            **conf,
        )
        shops.append(Shop(app, redis_server.client))
        return shops[-1]

    yield make
    if any(shop.app.conf.result_backend for shop in shops):
        gc.collect()  # results ask their backend to forget them: while it is there
    for shop in shops:
        shop.close()


@pytest.fixture
def shop(make_shop: Callable[..., Shop]) -> Shop:
    """An app whose calls are durable from one second on."""
    return make_shop()


@pytest.fixture
def results_shop(make_shop: Callable[..., Shop]) -> Shop:
    """The same, with a result backend."""
    return make_shop(results=True)


# ------------------------------------------------------------------ the message is Celery's


class Stamps(StampingVisitor):
    def on_signature(self, sig: Any, **headers: Any) -> dict[str, Any]:
        return {"tenant": "acme", "stamped_headers": ["tenant"]}


Call = Callable[[Shop, dict[str, Any]], Any]


def stamped(shop: Shop, when: dict[str, Any]) -> None:
    sig = shop.add.s(1)
    sig.stamp(Stamps())
    sig.apply_async(**when)


def retried(shop: Shop, when: dict[str, Any]) -> None:
    request = {
        "id": "the-task",
        "args": [1],
        "kwargs": {"two": 2},
        "retries": 2,
        "root_id": "the-root",
        "parent_id": "the-parent",
        "delivery_info": {"exchange": "", "routing_key": shop.queue, "priority": 3},
        "called_directly": False,
        "is_eager": False,
        "headers": {"trace": "abc"},
        "expires": "2030-01-01T00:00:00+00:00",
        "timelimit": [10, 5],
        "group": "the-group",
        "group_index": 4,
    }
    shop.add.push_request(**request)
    try:
        # A retry waits three minutes unless it says otherwise: "now" is what Celery sends at once.
        shop.add.retry(throw=False, max_retries=9, **(when or {"countdown": 0}))
    finally:
        shop.add.pop_request()


CALLS: dict[str, Call] = {
    "plain": lambda shop, when: shop.add.apply_async(
        (1, "zwei"), {"drei": [3, {"x": None}]}, **when
    ),
    "no arguments": lambda shop, when: shop.add.apply_async(**when),
    "by name": lambda shop, when: shop.app.send_task("else.where", [1], {"a": "it's"}, **when),
    "typed arguments": lambda shop, when: shop.add.apply_async(
        (datetime(2030, 1, 1, tzinfo=timezone.utc), b"\0\xff"), **when
    ),
    "what looks typed": lambda shop, when: shop.add.apply_async(
        ({"__type__": "of nobody", "__value__": 1},), **when
    ),
    "unicode": lambda shop, when: shop.add.apply_async(("ü\N{SNOWMAN}\ud800", 1e300, -0.0), **when),
    "custom id": lambda shop, when: shop.add.apply_async((1,), task_id="order 7 {x}:*", **when),
    "headers": lambda shop, when: shop.add.apply_async(
        (1,),
        headers={"trace": "a:b", "n": 1, "at": datetime(2030, 1, 1, tzinfo=timezone.utc)},
        **when,
    ),
    "stamps": stamped,
    "priority": lambda shop, when: shop.add.apply_async((1,), priority=6, **when),
    "the task's options": lambda shop, when: shop.quiet.apply_async(**when),
    "queue": lambda shop, when: shop.add.apply_async((1,), queue=shop.queue + "6", **when),
    "exchange": lambda shop, when: shop.add.apply_async(
        (1,), exchange=shop.queue, routing_key=shop.queue, **when
    ),
    "delivery mode": lambda shop, when: shop.add.apply_async((1,), delivery_mode=1, **when),
    "link": lambda shop, when: shop.add.apply_async(
        (1,), link=shop.add.s(2), link_error=[shop.add.s(3), shop.quiet.s()], **when
    ),
    "shadow and limits": lambda shop, when: shop.add.apply_async(
        (1,), shadow="total", time_limit=9, soft_time_limit=5, **when
    ),
    "ignore_result": lambda shop, when: shop.add.apply_async((1,), ignore_result=True, **when),
    "reply_to": lambda shop, when: shop.add.apply_async((1,), reply_to="me", **when),
    "representations": lambda shop, when: shop.add.apply_async(
        (1,), argsrepr="(secret)", kwargsrepr="{secret}", **when
    ),
    "another origin": lambda shop, when: shop.add.apply_async((1,), origin="me@here", **when),
    "pickle": lambda shop, when: shop.add.apply_async(({1, 2},), serializer="pickle", **when),
    "another text": lambda shop, when: shop.add.apply_async((["ü"],), serializer="repr", **when),
    "zlib": lambda shop, when: shop.add.apply_async(("x" * 99,), compression="zlib", **when),
    "zlib and pickle": lambda shop, when: shop.add.apply_async(
        (1,), compression="zlib", serializer="pickle", **when
    ),
    "absolute expires": lambda shop, when: shop.add.apply_async(
        (1,), expires=datetime(2100, 1, 1, tzinfo=timezone.utc), **when
    ),
    "chain": lambda shop, when: (
        chain(shop.add.s(1), shop.add.s(2).set(countdown=9), shop.quiet.si())
        .set(**when)
        .apply_async()
    ),
    "group": lambda shop, when: group(shop.add.s(n).set(**when) for n in range(3)).apply_async(),
    "chord": lambda shop, when: chord(
        [shop.add.s(n).set(**when) for n in range(2)], shop.add.s(9).set(countdown=7)
    ).apply_async(),
    "retry": retried,
}


def comparable(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages with their ids numbered in order, so that those of two calls are equal."""
    for message in messages:
        body = base64.b64decode(message["body"])
        if message["headers"].get("compression"):
            body = zlib.decompress(body)
        if message["content-type"] == "application/x-python-serialize":
            body = repr(pickle.loads(body)).encode()  # noqa: S301 - the test's own
        message["body"] = body.decode()
        del message["properties"]["delivery_tag"]
        # It tells the time to live from the call, and from the moment at which it is due.
        message["properties"].pop("expiration", None)
    messages.sort(key=lambda message: str(message["body"]))  # those of one moment have no order
    numbers: dict[str, str] = {}
    text = json.dumps(messages, sort_keys=True)
    text = UUID.sub(lambda found: numbers.setdefault(found[0], f"id-{len(numbers)}"), text)
    found: list[dict[str, Any]] = json.loads(text)
    return found


@pytest.mark.parametrize("name", CALLS)
def test_the_message_is_the_one_of_the_same_call_without_a_time(
    make_shop: Callable[..., Shop], name: str
) -> None:
    call, results = CALLS[name], name == "chord"
    shop, stock = make_shop(results=results), make_shop(None, results=results)
    queues = (stock.queue, stock.queue + "6")
    call(stock, {})
    expected = stock.queued(*queues)
    call(shop, {"countdown": HOUR})
    assert shop.queued(*queues) == []
    sent = shop.fire()
    assert expected
    assert comparable(sent) == comparable(expected)
    shop.clear()


def test_eta_and_countdown_are_stripped(shop: Shop) -> None:
    shop.add.apply_async((1,), eta=datetime.now(timezone.utc) + timedelta(hours=1))
    shop.add.apply_async((1,), countdown=HOUR)
    assert [message["headers"]["eta"] for message in shop.fire()] == [None, None]
    shop.clear()


def test_task_protocol_1_is_kept_too(make_shop: Callable[..., Shop], make_app: MakeApp) -> None:
    old = make_shop(task_protocol=1)
    stock_app = make_app(task_protocol=1)
    stock = Shop(stock_app, old.redis)
    stock.add.apply_async((1,), {"a": 2}, task_id="one")
    expected = stock.queued()
    old.add.apply_async((1,), {"a": 2}, task_id="one", countdown=HOUR)
    (call,) = old.timers.get_pending()
    assert (call.args, call.kwargs, call.retries) == ([1], {"a": 2}, 0)
    assert comparable(old.fire()) == comparable(expected)
    old.clear()


def test_a_relative_expires_counts_from_the_call_and_its_time_to_live_from_the_sending(
    shop: Shop,
) -> None:
    shop.add.apply_async((1,), countdown=HOUR, expires=2 * HOUR)
    before = datetime.now(timezone.utc)
    (message,) = shop.fire()
    expires = datetime.fromisoformat(message["headers"]["expires"])
    assert abs(expires - before - timedelta(hours=2)) < timedelta(seconds=5)
    assert abs(int(message["properties"]["expiration"]) - 2 * HOUR * 1000) < 5000
    (definition,) = shop.definitions()
    late = Run("orders", "a", "x", "x", 1, now_ms() + 3 * HOUR * 1000, 1, definition)
    publisher = Publisher(shop.app, timeout=5)
    assert publisher.connect() is None
    (built,) = publisher.build([late])
    publisher.close()
    assert isinstance(built, Message)
    assert "expiration" not in json.loads(built.values[0])["properties"]  # its worker says so
    shop.clear()


def test_a_broker_without_the_queue_takes_the_message_all_the_same(
    make_shop: Callable[..., Shop],
) -> None:
    """A queue of another process's own making is not declared as something else."""
    caller = make_shop()
    own = Queue("t-odd", Exchange("t-topic", type="topic"), routing_key="a.b")
    caller.add.apply_async((1,), queue=own, countdown=HOUR)
    (definition,) = caller.definitions()
    assert definition.message is not None
    assert definition.message["exchange"] == "t-topic"
    beat = make_shop()
    assert beat.app.amqp.queues.get("t-odd") is None
    publisher = Publisher(beat.app, timeout=5)
    assert publisher.connect() is None
    publisher.build([Run("orders", "a", "x", "x", 1, now_ms(), 1, definition)])
    assert beat.app.amqp.queues.get("t-odd") is None
    publisher.close()
    caller.clear()


# ------------------------------------------------------------------ which calls


@pytest.mark.parametrize(
    "when",
    [
        {},
        {"countdown": 0},
        {"countdown": 1},
        {"countdown": -5},
        {"countdown": float("nan")},
        {"eta": "soon"},
        {"eta": "2000-01-01T00:00:00"},
        {"eta": "no time at all"},
    ],
    ids=str,
)
def test_what_waits_no_longer_than_the_threshold_is_celerys(
    shop: Shop, when: dict[str, Any]
) -> None:
    if when.get("eta") == "soon":
        when = {"eta": datetime.now(timezone.utc) + timedelta(seconds=0.5)}
    try:
        shop.add.apply_async((1,), **when)
    except ValueError:
        assert "countdown" in when  # not a number: Celery says so
    else:
        assert len(shop.queued()) == 1
    assert shop.timers.get_pending() == []


def test_without_the_setting_nothing_of_it_is_used(make_shop: Callable[..., Shop]) -> None:
    shop = make_shop(threshold=None)
    shop.add.apply_async((1,), countdown=HOUR)
    (message,) = shop.queued()
    assert message["headers"]["eta"]
    assert shop.timers.get_pending() == []


@pytest.mark.parametrize("value", ["soon", -1, float("nan"), True])
def test_a_threshold_that_is_none_is_refused_at_the_call(
    make_shop: Callable[..., Shop], value: Any
) -> None:
    shop = make_shop(threshold=value)
    with pytest.raises(SettingsError, match="dtimer_eta_threshold="):
        shop.add.apply_async((1,), countdown=HOUR)


def test_an_app_is_set_up_once_and_its_settings_are_read_at_the_call(make_app: MakeApp) -> None:
    app = Celery("orders", set_as_current=False)
    app.config_from_object("no.such.module")
    DistributedTimer(app)
    first = app.send_task
    DistributedTimer(app)
    assert app.send_task == first
    with pytest.raises(ImportError):
        _ = app.conf.timezone


def test_a_timers_own_countdown_is_no_second_delay(shop: Shop, start_timers: StartTimers) -> None:
    """What a beat sends is sent: its message has Celery's eta, as ever."""
    shop.timers.create_timer("t", datetime.now(timezone.utc), shop.add, countdown=HOUR)
    start_timers(shop.app)
    wait_until(lambda: shop.redis.llen(shop.queue) == 1, "the timer's message")
    assert shop.queued()[0]["headers"]["eta"]
    assert shop.timers.get_pending() == []


# ------------------------------------------------------------------ the moment


def test_a_countdown_goes_by_the_servers_clock_and_an_eta_is_a_moment(shop: Shop) -> None:
    before = shop.store.now_ms()
    shop.add.apply_async((1,), countdown=HOUR)
    after = shop.store.now_ms()
    moment = datetime(2030, 1, 1, 12, 0, 0, 1, tzinfo=timezone(timedelta(hours=2)))
    shop.add.apply_async((2,), eta=moment)
    first, second = shop.timers.get_pending()
    due_ms = round(first.eta.timestamp() * 1000)
    assert before + HOUR * 1000 <= due_ms <= after + HOUR * 1000
    assert second.eta == datetime(2030, 1, 1, 10, 0, 0, 1000, tzinfo=timezone.utc)  # never early
    shop.clear()


def test_thirty_days_are_pending_and_sent_when_they_are_over(shop: Shop) -> None:
    """The clock is passed in: the server's own does not go that fast."""
    shop.add.apply_async((1,), countdown=30 * 86_400, task_id="in a month")
    (call,) = shop.timers.get_pending()
    due_ms = round(call.eta.timestamp() * 1000)
    assert abs(due_ms - now_ms() - 30 * 86_400_000) < 5000
    moment = [due_ms - 1]
    store = Store(shop.store.settings, clock=lambda: moment[0])
    epoch = store.register("a", {"service": "orders"}).epoch
    store.reap("a", epoch)
    assert store.due("a", epoch, Reading(10)).timers == []
    moment[0] = due_ms
    (timer,) = store.due("a", epoch, Reading(10)).timers
    assert timer.id == countdown_id("in a month")
    store.close()
    shop.clear()


# ------------------------------------------------------------------ who made it, and from where


def listeners(shop: Shop) -> int:
    return sum(int(client["psub"]) for client in shop.redis.client_list())


def test_the_caller_has_its_result_and_signals_and_events_tell_the_moment(
    make_shop: Callable[..., Shop],
) -> None:
    shop = make_shop(task_send_sent_event=True)
    seen: list[tuple[str, Any]] = []

    def before(headers: Any, **_: Any) -> None:
        seen.append(("before", headers["eta"]))

    def after(headers: Any, **_: Any) -> None:
        seen.append(("after", headers["eta"]))

    events: list[dict[str, Any]] = []
    eta = datetime(2030, 1, 1, tzinfo=timezone.utc)
    signals.before_task_publish.connect(before)
    signals.after_task_publish.connect(after)
    try:
        with shop.app.connection_for_read() as connection:
            receiver = shop.app.events.Receiver(connection, handlers={"task-sent": events.append})
            heard = listeners(shop)
            listener = threading.Thread(target=receiver.capture)
            listener.start()
            wait_until(lambda: listeners(shop) > heard, "the receiver to listen")
            result = shop.add.apply_async((1,), eta=eta)
            wait_until(lambda: events, "the event")
            receiver.should_stop = True
            listener.join(10)
    finally:
        signals.before_task_publish.disconnect(before)
        signals.after_task_publish.disconnect(after)
    assert seen == [("before", eta.isoformat()), ("after", eta.isoformat())]
    assert [(event["uuid"], event["eta"]) for event in events] == [(result.id, eta.isoformat())]
    (call,) = shop.timers.get_pending()
    assert call.task_id == result.id
    assert shop.fire()[0]["headers"]["eta"] is None
    shop.clear()


def test_a_call_with_a_connection_or_a_producer_of_its_own_is_kept(shop: Shop) -> None:
    with shop.app.connection_for_write() as connection:
        shop.add.apply_async((1,), connection=connection, countdown=HOUR)
        with shop.app.producer_pool.acquire(block=True) as producer:
            shop.add.apply_async((2,), producer=producer, countdown=HOUR)
            shop.app.send_task("x", (3,), publisher=producer, countdown=HOUR)
    found = sorted(call.argsrepr for call in shop.timers.get_pending())
    assert found == ["(1,)", "(2,)", "(3,)"]
    assert shop.queued() == []
    shop.clear()


def call_from_child(shop: Shop) -> None:
    shop.add.apply_async(("child",), countdown=HOUR)


def test_a_forked_child_has_a_connection_of_its_own(shop: Shop) -> None:
    shop.add.apply_async(("parent",), countdown=HOUR)
    child = multiprocessing.get_context("fork").Process(target=call_from_child, args=(shop,))
    child.start()
    shop.add.apply_async(("parent",), countdown=2 * HOUR)
    child.join(10)
    assert child.exitcode == 0
    found = sorted(str(call.args) for call in shop.timers.get_pending())
    assert found == ["['child']", "['parent']", "['parent']"]
    shop.clear()


def test_the_same_id_again_replaces_what_is_pending(shop: Shop) -> None:
    for number in (1, 2):
        shop.add.apply_async((number,), task_id="same", countdown=number * HOUR)
    (call,) = shop.timers.get_pending()
    assert call.args == [2]
    assert call.eta > datetime.now(timezone.utc) + timedelta(hours=1.5)
    shop.clear()


# ------------------------------------------------------------------ what cannot be kept


def test_redis_down_at_the_call_is_an_operational_error(
    make_shop: Callable[..., Shop], fresh_redis: FreshRedis
) -> None:
    server = fresh_redis()
    shop = make_shop(dtimer_redis_url=server.url, dtimer_key_prefix="")
    shop.add.apply_async((1,), countdown=HOUR)
    server.kill()
    policy = {"max_retries": 2, "interval_start": 0, "interval_step": 0, "interval_max": 0}
    with pytest.raises(OperationalError, match="does not answer"):
        shop.add.apply_async((1,), countdown=HOUR, retry_policy=policy)
    with pytest.raises(OperationalError, match="does not answer"):
        shop.add.apply_async((1,), countdown=HOUR, retry=False)
    server.restart(keep_data=False)
    shop.add.apply_async((1,), countdown=HOUR)
    assert len(shop.timers.get_pending()) == 1


def test_what_cannot_be_stored_is_refused_and_says_why(shop: Shop) -> None:
    with pytest.raises(InvalidTimerError, match=r"headers .* can not be stored"):
        shop.add.apply_async((1,), headers={"x": object()}, countdown=HOUR)
    with pytest.raises(EncodeError):
        shop.add.apply_async((object(),), countdown=HOUR)
    with pytest.raises(InvalidTimerError, match="expected at most 1048576"):
        shop.add.apply_async(("x" * 1_100_000,), countdown=HOUR)
    assert shop.timers.get_pending() == []


def test_a_message_that_was_damaged_is_set_aside_and_never_decoded(shop: Shop) -> None:
    definition = Definition("x", "shop.add", ONCE, message={"data": "%"})
    publisher = Publisher(shop.app, timeout=5)
    assert publisher.connect() is None
    (outcome,) = publisher.build([Run("orders", "a", "x", "x", 1, now_ms(), 1, definition)])
    assert isinstance(outcome, UnsendableError)
    assert publisher.urgency(definition) == 0
    publisher.close()


# ------------------------------------------------------------------ looking


def test_pending_calls_are_found_by_task_arguments_queue_and_time(shop: Shop) -> None:
    shop.add.apply_async((1,), {"user": 7, "x": [1]}, countdown=3 * HOUR, queue="mail")
    shop.quiet.apply_async(countdown=HOUR)
    shop.add.apply_async((2,), countdown=2 * HOUR, serializer="pickle")
    shop.timers.create_timer("named", 60, "shop.add")
    shop.timers.register_callback("short", shop.quiet)
    find = shop.timers.get_pending
    now = datetime.now(timezone.utc)
    names = [(call.task, call.argsrepr, call.queue) for call in find()]
    assert names == [
        ("shop.quiet", "()", shop.queue),
        ("shop.add", "(2,)", shop.queue),
        ("shop.add", "(1,)", "mail"),
    ]
    assert [call.args for call in find(task="shop.add")] == [None, [1]]
    assert [call.task for call in find(task="short")] == ["shop.quiet"]
    assert [call.args for call in find(args=(1,))] == [[1]]
    assert [call.args for call in find(kwargs={"user": 7})] == [[1]]
    assert find(kwargs={"user": 8}) == []
    assert [call.queue for call in find(queue="mail")] == ["mail"]
    assert len(find(after=now + timedelta(hours=1.5))) == 2
    assert len(find(before=now + timedelta(hours=2.5))) == 2
    assert [call.argsrepr for call in find(offset=1, limit=1)] == ["(2,)"]
    for wrong in ({"args": "x"}, {"kwargs": 1}, {"queue": 1}, {"limit": -1}, {"after": "x"}):
        with pytest.raises(InvalidTimerError):
            find(**wrong)
    shop.clear()


def test_many_pending_calls_of_one_moment_are_each_found_once(shop: Shop) -> None:
    eta = datetime(2030, 1, 1, tzinfo=timezone.utc)
    for number in range(25):
        shop.add.apply_async((number,), eta=eta)
    pages = list(shop.store.queued())
    assert sum(map(len, pages)) == 25
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("celery_dtimer.store._PAGE", 10)
        assert len(list(pending(shop.store))) == 25
    shop.clear()


def test_pending_calls_are_no_timers(shop: Shop) -> None:
    timers = shop.timers
    result = shop.add.apply_async((1,), countdown=HOUR)
    assert timers.get_timers() == timers.get_timers(limit=5) == []
    assert timers.get_instance_timers("unassigned") == []
    for name in (result.id, countdown_id(result.id)):
        with pytest.raises(LookupError):
            timers.get_timer(name)
    timers.create_timer("named", 60, "shop.add")
    assert [timer.name for timer in timers.get_timers(limit=1)] == ["named"]
    assert timers.pending_count() == 2
    assert timers.check_consistency() == []
    shop.clear()


# ------------------------------------------------------------------ sent, and cancelled


def left(shop: Shop) -> list[str]:
    """Return the keys and members that name a countdown."""
    keys = [str(key) for key in shop.redis.scan_iter("*", count=1000)]
    found = [key for key in keys if key.startswith(shop.store.keys.prefix) and ":eta-" in key]
    for what in ("timer_queue", "inactive_timers"):
        found += [id for id in shop.store.scores(what) if is_countdown_id(id)]
    found += [line for entry in shop.store.history(0) for line in entry.values() if "eta-" in line]
    return found


def test_nothing_is_left_of_a_call_that_was_sent_or_cancelled(
    shop: Shop, start_timers: StartTimers
) -> None:
    gone = shop.add.apply_async((1,), countdown=HOUR)
    start_timers(shop.app)
    sent = shop.add.apply_async((2,), countdown=1.2)
    assert shop.timers.cancel(gone.id) is True
    wait_until(lambda: shop.redis.llen(shop.queue) == 1, "the message")
    wait_until(lambda: not shop.timers.get_pending(), "the commit")
    assert [message["headers"]["id"] for message in shop.queued()] == [sent.id]
    assert left(shop) == []
    assert shop.timers.get_counts().sent == 1
    assert shop.timers.cancel(sent.id) is False


@pytest.mark.parametrize("conf", [{"dtimer_dispatch": "confirmed"}, {}])
def test_it_comes_once_with_its_own_id_in_both_modes(
    make_shop: Callable[..., Shop], start_timers: StartTimers, conf: dict[str, Any]
) -> None:
    shop = make_shop(**conf)
    start_timers(shop.app)
    ids = {shop.add.apply_async((n,), countdown=1.05).id for n in range(20)}
    wait_until(lambda: shop.redis.llen(shop.queue) >= 20, "the messages")
    wait_until(lambda: not shop.timers.get_pending(), "the commits")
    messages = shop.queued()
    assert len(messages) == 20
    assert {message["headers"]["id"] for message in messages} == ids
    assert left(shop) == []


def test_a_cancelled_call_is_revoked_for_whoever_waits_for_it(results_shop: Shop) -> None:
    shop = results_shop
    result = shop.add.apply_async((1,), countdown=HOUR)
    assert shop.timers.cancel(result.id) is True
    assert shop.timers.cancel(result.id) is False
    assert result.state == "REVOKED"
    quiet = shop.quiet.apply_async(countdown=HOUR)
    assert shop.timers.cancel(quiet.id) is True
    assert shop.app.AsyncResult(quiet.id).state == "PENDING"  # nobody asks for its results
    for wrong in ("", 7):
        with pytest.raises(InvalidTimerError, match="task_id="):
            shop.timers.cancel(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("serializer", ["json", "pickle"])
def test_the_chord_of_a_cancelled_part_fails(results_shop: Shop, serializer: str) -> None:
    """As it does when a worker revokes one of its parts."""
    shop = results_shop
    parts = [shop.add.s(n).set(countdown=HOUR, serializer=serializer) for n in range(2)]
    body = chord(parts, shop.add.s(9)).apply_async()
    for call in shop.timers.get_pending():
        assert shop.timers.cancel(call.task_id) is True
    assert shop.app.AsyncResult(body.id).state == "FAILURE"


def test_a_beat_waits_for_no_result_backend_when_it_revokes(
    results_shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop = results_shop
    answers = threading.Event()
    marked: list[str] = []

    def mark(_: Any, task_id: str, *__: Any, **___: Any) -> None:
        answers.wait(20)
        marked.append(task_id)

    monkeypatch.setattr(type(shop.add.backend), "mark_as_revoked", mark)
    result = shop.add.apply_async((1,), countdown=HOUR)
    publisher = Publisher(shop.app, timeout=5)
    publisher.revoke([result.id, "another"])
    assert (shop.timers.get_pending(), marked) == ([], [])
    answers.set()
    wait_until(lambda: marked == [result.id], "the result to be written")
    publisher.close()


def test_cancelling_the_retry_of_a_run_ends_it_wherever_it_is_done(
    make_shop: Callable[..., Shop],
) -> None:
    """Also in a process that does not know its task."""
    shop, other = make_shop(results=True), make_shop(results=True)
    timer_id = shop.timers.create_timer("nightly", HOUR, "shop.add", overlap="skip")
    header = {
        "id": timer_id,
        "name": "nightly",
        "service": "orders",
        "instance": "a",
        "scheduled_at": "2026-01-01T03:00:00.000+00:00",
        "run": 1,
    }
    shop.add.apply_async(
        (1,), task_id="run-1", countdown=HOUR, retries=1, headers={"dtimer": header}
    )
    run = OutRun("run-1", timer_id, 1_767_236_400_000, 1)
    shop.store.run_started(run, lease_ms=60_000, limit_ms=0, redelivered=False)
    shop.store.run_ended(run, "retried", keep_ms=HOUR * 1000)
    other.app.tasks.pop("shop.add")
    assert other.timers.cancel("run-1") is True
    assert other.app.AsyncResult("run-1").state == "REVOKED"
    assert shop.store.out_run("run-1") is None
    (record,) = shop.timers.get_runs()
    assert record.state == "revoked"


def test_what_a_pending_call_carries_is_not_shown(shop: Shop) -> None:
    shop.add.apply_async(("secret",), {"key": "secret"}, countdown=HOUR, headers={"a": "secret"})
    (call,) = shop.timers.get_pending()
    assert call.args == ["secret"]
    assert "secret" not in repr(call)
    shop.clear()


def test_pages_that_can_not_be_are_refused(shop: Shop) -> None:
    for wrong in (-1, 10**400, 1.5, True, "1"):
        for name in ("offset", "limit"):
            with pytest.raises(InvalidTimerError, match=f"{name}="):
                shop.timers.get_pending(**{name: wrong})  # type: ignore[arg-type]
    assert shop.timers.get_pending(offset=2**53, limit=2**53) == []


def test_a_call_that_was_given_up_is_pending_again_when_it_is_requeued(shop: Shop) -> None:
    shop.add.apply_async((1,), task_id="the-task", countdown=HOUR)
    definition = shop.definitions()[0]
    epoch = shop.store.register("a", {"service": "orders"}).epoch
    shop.store.hold(definition, delay_ms=0)
    shop.store.reap("a", epoch)
    (due,) = shop.store.due("a", epoch, Reading(5)).timers
    shop.store.commit("a", epoch, 1, [Settlement(due, "broken", reason="why")])
    (letter,) = shop.timers.get_dead_letters()
    assert (letter.task_id, letter.task) == ("the-task", "shop.add")
    shop.timers.requeue_dead_letter(letter)
    assert [each.task_id for each in shop.timers.get_pending()] == ["the-task"]
    assert (shop.timers.get_dead_letters(), shop.timers.get_runs()) == ([], [])
    shop.clear()
    shop.store.leave("a", epoch)


def test_a_letter_that_is_requeued_at_the_same_time_is_gone(shop: Shop) -> None:
    key = shop.store.keys("dead_timers")
    shop.redis.zadd(key, {"going": 1})  # its hash went between two looks
    with pytest.raises(TimerNotFoundError, match="no dead letter has the id"):
        shop.timers.requeue_dead_letter("going")
    shop.redis.delete(key)


def test_no_letter_has_an_odd_id(shop: Shop) -> None:
    for id in ("", "gone", "\udc80", 7):
        with pytest.raises(TimerNotFoundError, match="no dead letter has the id"):
            shop.timers.requeue_dead_letter(id)  # type: ignore[arg-type]


@pytest.mark.parametrize("is_broker_up", [True, False])
def test_workers_are_told_of_what_a_beat_may_be_sending(
    shop: Shop,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    is_broker_up: bool,
) -> None:
    told: list[Any] = []

    def broadcast(_: Any, command: str, arguments: Any = None, **__: Any) -> None:
        if not is_broker_up:
            raise OperationalError("down")
        told.append((command, arguments))

    monkeypatch.setattr(Control, "broadcast", broadcast)
    shop.add.apply_async((1,), task_id="the-task", countdown=HOUR)
    epoch = shop.store.register("a", {"service": "orders"}).epoch
    shop.store.reap("a", epoch)
    shop.redis.hset(shop.store.keys("instance", "a"), "in_flight", countdown_id("the-task"))
    assert shop.timers.cancel("the-task") is True
    assert told == ([("revoke", {"task_id": ["the-task"]})] if is_broker_up else [])
    assert ("no worker knows" in caplog.text) is not is_broker_up
    shop.store.leave("a", epoch)


REVOKES: dict[str, Callable[[Shop, Any], Any]] = {
    "result": lambda shop, results: [result.revoke() for result in results],
    "control": lambda shop, results: [shop.app.control.revoke(result.id) for result in results],
    "list": lambda shop, results: shop.app.control.revoke([result.id for result in results]),
    "terminate": lambda shop, results: [shop.app.control.terminate(each.id) for each in results],
    "command": lambda shop, results: shop.app.control.broadcast(
        "revoke", arguments={"task_id": [each.id for each in results]}, reply=True, timeout=0.1
    ),
    "stamps": lambda shop, results: shop.app.control.revoke_by_stamped_headers(
        {"tenant": ["other", "acme"]}
    ),
    "stamps on the command line": lambda shop, results: shop.app.control.broadcast(
        "revoke_by_stamped_headers", arguments={"headers": ["tenant=acme"]}
    ),
}


@pytest.mark.parametrize("name", REVOKES)
@pytest.mark.parametrize("is_used", [False, True])
def test_revoking_cancels_what_is_pending(results_shop: Shop, name: str, is_used: bool) -> None:
    shop = results_shop
    if is_used:
        shop.app.control.purge()
    results = []
    for number in range(2):
        sig = shop.add.s(number)
        sig.stamp(Stamps())
        results.append(sig.apply_async(countdown=HOUR))
    other = shop.add.apply_async(("other",), countdown=HOUR)
    REVOKES[name](shop, results)
    REVOKES[name](shop, results)
    assert [call.task_id for call in shop.timers.get_pending()] == [other.id]
    assert [result.state for result in results] == ["REVOKED"] * 2
    shop.clear()


def test_a_control_that_was_there_before_cancels_too(make_app: MakeApp, shop: Shop) -> None:
    app = make_app(dtimer_eta_threshold=1)
    control = app.control
    other = Shop(app, shop.redis)
    result = other.add.apply_async((1,), countdown=HOUR)
    control.revoke(result.id)
    assert other.timers.get_pending() == []
    other.close()


def test_a_control_class_of_the_users_own_is_kept(make_app: MakeApp) -> None:
    app = make_app(dtimer_eta_threshold=1)
    app.control_cls = "tests.integration.test_countdowns:OwnControl"
    DistributedTimer(app)
    assert type(app.control).__name__ == "OwnControl"
    restored = pickle.loads(pickle.dumps(app))  # noqa: S301 - as processes that are spawned do
    assert restored.main == app.main


def test_without_the_setting_revoking_is_celerys_alone(
    make_shop: Callable[..., Shop], fresh_redis: FreshRedis
) -> None:
    down = fresh_redis(running=False)
    shop = make_shop(threshold=None, dtimer_redis_url=down.url)
    shop.app.control.revoke("some-id")
    on = make_shop(dtimer_redis_url=down.url)
    with pytest.raises(OperationalError, match="were not cancelled"):
        on.app.control.revoke("some-id")


def test_on_rabbitmq_it_is_published_with_confirms(
    make_app: MakeApp,
    start_timers: StartTimers,
    shared_rabbitmq: RabbitMQ,
    redis_server: RedisServer,
) -> None:
    app = make_app(
        broker_url=shared_rabbitmq.url, dtimer_redis_url=redis_server.url, dtimer_eta_threshold=1
    )
    timers = DistributedTimer(app)
    sent = {
        app.send_task(
            "some.task", (n,), {"a": 1}, countdown=1.1, priority=n, expires=60, ignore_result=True
        ).id
        for n in range(3)
    }
    timers = start_timers(app)
    found: dict[str, Any] = {}
    with Connection(shared_rabbitmq.url) as connection:
        queue = connection.SimpleQueue(Queue(app.conf.task_default_queue))

        def read() -> bool:
            with contextlib.suppress(queue.Empty):
                message = queue.get(block=False)
                found[message.headers["id"]] = message
                message.ack()
            return found.keys() == sent and not timers.get_pending()

        wait_until(read, "the messages", 20)
        queue.queue.delete()
        queue.close()
    for message in found.values():
        (number,), kwargs, _ = message.payload
        assert (kwargs, message.properties["priority"]) == ({"a": 1}, number)
        assert message.headers["eta"] is None
        assert 50_000 < int(message.properties["expiration"]) <= 60_000
    timers.store.close()


# ------------------------------------------------------------------ size


def test_a_pending_call_takes_less_than_a_kilobyte(
    make_shop: Callable[..., Shop], fresh_redis: FreshRedis
) -> None:
    server = fresh_redis()
    shop = make_shop(dtimer_redis_url=server.url, dtimer_key_prefix="")
    shop.quiet.apply_async(countdown=HOUR)
    before = server.client.info("memory")["used_memory"]  # type: ignore[index]
    for number in range(2000):
        shop.add.apply_async((number, f"customer-{number}"), countdown=HOUR + number)
    after = server.client.info("memory")["used_memory"]  # type: ignore[index]
    assert (after - before) / 2000 < 1000


def test_what_is_listed_says_all_that_it_is_asked(shop: Shop) -> None:
    shop.add.apply_async(
        (datetime(2030, 1, 1, tzinfo=timezone.utc),),
        headers={"trace": 1},
        root_id="r",
        parent_id="p",
        retries=2,
        countdown=HOUR,
        task_id="t",
    )
    (call,) = shop.timers.get_pending()
    assert isinstance(call, PendingTask)
    assert (call.task_id, call.root_id, call.parent_id, call.retries) == ("t", "r", "p", 2)
    assert call.args == kombu_json.loads(
        kombu_json.dumps([datetime(2030, 1, 1, tzinfo=timezone.utc)])
    )
    assert call.headers["trace"] == 1
    shop.clear()


class OwnControl(Control):
    """A control of the user's own."""
