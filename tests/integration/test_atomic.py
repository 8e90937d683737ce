"""Atomic dispatch: when it is given, what it pushes, and that it pushes each run once."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from typing import Any, NoReturn

import pytest
import redis
from celery import Celery, signals
from kombu import Exchange, Queue
from kombu.transport.redis import Channel, Transport

from celery_dtimer import DistributedScheduler
from celery_dtimer.atomic import Atomic, obstacle
from celery_dtimer.dispatcher import Dispatcher, Pass
from celery_dtimer.errors import FencedError, SettingsError, StoreUnavailableError
from celery_dtimer.model import Definition, Lease, Run
from celery_dtimer.options import check_options
from celery_dtimer.publisher import BrokerDownError, Publisher
from celery_dtimer.store import Store
from tests.conftest import FreshRedis, MakeApp, delete_prefix
from tests.integration.conftest import START_MS, MakeService, Service
from tests.integration.test_dispatcher import losing
from tests.servers import RedisServer
from tests.tcp_proxy import TcpProxy
from tests.waiting import wait_until

MakeProxy = Callable[[RedisServer], TcpProxy]
MakeBeat = Callable[..., "Beat"]
HERE = ("atomic", "the broker holds the timers too")
ELSEWHERE = ("confirmed", "the broker is not on the server that holds the timers")


class Beat:
    """A dispatcher with the real publisher and mode; the test says what happens before a commit."""

    def __init__(self, app: Celery, service: Service, instance: str = "a", **options: Any) -> None:
        self.app, self.service, self.instance = app, service, instance
        self.store = service.another_store()
        self.seconds = 0.0
        self.modes: list[tuple[str, str]] = []
        self.brokers: list[bool] = []
        self.publisher = Publisher(app, timeout=5)
        self._build = self.publisher.build
        self.publisher.build = self._built  # type: ignore[method-assign]
        self.before_commit: Callable[[], object] = lambda: None
        self.mode = Atomic(
            app,
            self.store,
            self.publisher,
            instance=instance,
            on_mode=lambda *said: self.modes.append(said),
            on_broker=self.brokers.append,
            clock=lambda: self.seconds,
        )
        self.dispatcher = Dispatcher(
            self.store,
            self.publisher,
            bound={},
            may_send=lambda _: True,
            mode=self.mode,
            **options,
        )
        self.register()

    def _built(self, runs: Sequence[Any]) -> list[Any]:
        messages = self._build(runs)
        act, self.before_commit = self.before_commit, lambda: None
        act()
        return messages

    def register(self) -> None:
        """Get a newer epoch."""
        epoch = self.service.join(self.instance)
        self.lease = Lease(self.instance, epoch, 1e9, heartbeat_ms=self.service.clock.now_ms)
        self.service.store.reap(self.instance, epoch)

    def step(self) -> Pass:
        """Dispatch once."""
        return self.dispatcher.step(self.lease)

    def steps(self, count: int = 4) -> int:
        """Dispatch some times, whatever fails; return how many runs were sent."""
        sent = 0
        for _ in range(count):
            try:
                sent += self.step().sent
            except StoreUnavailableError:
                continue
        return sent

    def close(self) -> None:
        """End its connections."""
        self.publisher.close()
        self.store.close()


@pytest.fixture
def make_beat() -> Iterator[MakeBeat]:
    """Make dispatchers, which are closed with the test."""
    made: list[Beat] = []

    def make(app: Celery, service: Service, instance: str = "a", **options: Any) -> Beat:
        made.append(Beat(app, service, instance, **options))
        return made[-1]

    yield make
    for beat in made:
        beat.close()


@pytest.fixture
def beat(make_app: MakeApp, service: Service, make_beat: MakeBeat) -> Beat:
    """A dispatcher whose broker is in the database of the timers."""
    return make_beat(make_app(), service)


@pytest.fixture
def elsewhere(redis_server: RedisServer, prefix: str) -> Iterator[Any]:
    """Another database of the run's server; what the test leaves there is deleted."""
    client: Any = redis.Redis(port=redis_server.port, db=9, decode_responses=True)
    yield client
    delete_prefix(client, prefix)
    client.close()


def taken(client: Any, queue: str) -> list[dict[str, Any]]:
    """Return the messages of a list, oldest first, and empty it."""
    texts = client.lrange(queue, 0, -1)
    client.delete(queue)
    return [json.loads(text) for text in reversed(texts)]


def names(beat: Beat, queue: str = "queue") -> list[str]:
    """Return the names of the timers whose runs are in a queue, and empty it."""
    found = taken(beat.service.redis, beat.service.settings.key_prefix + queue)
    return [message["headers"]["dtimer"]["name"] for message in found]


# ------------------------------------------------------------------ whether it is given


@pytest.mark.parametrize("database", [0, 9])
@pytest.mark.parametrize("inner", ["", "all:"])
def test_the_brokers_database_on_the_server_of_the_timers_is_linked(
    make_app: MakeApp, service: Service, make_beat: MakeBeat, redis_server: RedisServer,
    prefix: str, elsewhere: Any, database: int, inner: str, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """It is said once, proved anew from time to time, and runs arrive where a worker looks."""
    client = elsewhere if database else service.redis
    app = make_app(
        broker_url=f"redis://127.0.0.1:{redis_server.port}/{database}",
        broker_transport_options={"global_keyprefix": prefix + inner} if inner else {},
    )
    beat = make_beat(app, service)
    with caplog.at_level(logging.INFO, "celery_dtimer"):
        links = []
        for beat.seconds in (0, 1, 19.9, 20, 39.9, 40):
            links.append(beat.mode.link())
    proofs = [link.proof for link in links if link]
    assert [proofs.index(proof) for proof in proofs] == [0, 0, 0, 3, 3, 5]
    assert (beat.modes, beat.brokers) == ([HERE], [True] * 3)
    assert [line for line in caplog.messages if "Dispatch is" in line] == [
        "Dispatch is atomic: the broker holds the timers too"
    ]
    link = links[-1]
    assert link is not None
    assert (link.database, link.prefix) == (database, prefix + inner if inner else "")
    assert 0 < client.ttl(link.prefix + link.key) <= 60
    service.add()
    service.clock.advance(10)
    assert beat.step().sent == 1
    assert len(taken(client, f"{prefix}{inner}{prefix}queue" if inner else f"{prefix}queue")) == 1


def test_a_broker_on_another_server_is_published_to_first(
    make_app: MakeApp, service: Service, make_beat: MakeBeat, fresh_redis: FreshRedis, prefix: str
) -> None:
    other = fresh_redis()
    beat = make_beat(make_app(broker_url=other.url), service)
    service.add()
    service.clock.advance(10)
    for beat.seconds in (0, 20, 40):
        beat.step()
    assert beat.modes == [ELSEWHERE]
    assert len(taken(other.client, f"{prefix}queue")) == 1


def test_a_server_with_fewer_databases_than_the_brokers_is_another(
    make_app: MakeApp, service: Service, make_beat: MakeBeat, fresh_redis: FreshRedis
) -> None:
    other = fresh_redis("--databases", "99")
    beat = make_beat(make_app(broker_url=f"redis://127.0.0.1:{other.port}/98"), service)
    assert beat.mode.link() is None
    assert beat.modes == [ELSEWHERE]


def test_confirmed_dispatch_that_is_asked_for_proves_nothing(
    make_app: MakeApp, make_service: MakeService, make_beat: MakeBeat
) -> None:
    service = make_service(dispatch="confirmed")
    beat = make_beat(make_app(), service)
    for beat.seconds in (0, 20, 1000):
        assert beat.mode.link() is None
    assert beat.modes == [("confirmed", "dtimer_dispatch says so")]
    assert service.redis.keys(f"{service.settings.key_prefix}broker_link*") == []
    service.add()
    service.clock.advance(10)
    assert beat.step().sent == 1
    assert names(beat) == ["timer"]


class OwnChannel(Channel):
    """Might put messages somewhere else."""


class OwnTransport(Transport):
    """Somebody's own."""

    Channel = OwnChannel


OBSTACLES = {
    "memory": ({"broker_url": "memory://"}, "the broker is memory"),
    "rabbitmq": ({"broker_url": "amqp://127.0.0.1:1"}, "the broker is amqp"),
    "protocol": ({"task_protocol": 1}, "task_protocol is 1"),
    "eager": ({"task_always_eager": True}, "task_always_eager"),
    "channel": ({"broker_transport": f"{__name__}:OwnTransport"}, "OwnChannel"),
}


@pytest.mark.parametrize(("conf", "reason"), OBSTACLES.values(), ids=OBSTACLES.keys())
def test_what_stands_against_it_is_said_at_start(
    make_app: MakeApp, redis_server: RedisServer, conf: dict[str, Any], reason: str
) -> None:
    app = make_app(dtimer_redis_url=redis_server.url, **conf)
    assert reason in (obstacle(app) or "")
    DistributedScheduler(app)
    app.conf.dtimer_dispatch = "atomic"
    with pytest.raises(SettingsError, match=rf'"atomic" can not be given: .*{reason}'):
        DistributedScheduler(app)


def test_nothing_stands_against_redis(make_app: MakeApp) -> None:
    app = make_app(dtimer_dispatch="atomic")
    assert obstacle(app) is None
    DistributedScheduler(app)


def test_where_it_must_be_atomic_a_broker_elsewhere_ends_the_beat(
    make_app: MakeApp, make_service: MakeService, make_beat: MakeBeat, fresh_redis: FreshRedis
) -> None:
    other = fresh_redis()
    beat = make_beat(make_app(broker_url=other.url), make_service(dispatch="atomic"))
    with pytest.raises(SettingsError, match="not on the server that holds the timers"):
        beat.step()
    assert beat.modes == []


# ------------------------------------------------------------------ while servers come and go


@pytest.fixture(params=["auto", "atomic"])
def asked(request: pytest.FixtureRequest, make_service: MakeService) -> Service:
    """A service for each setting that allows atomic dispatch, with a timer that is due."""
    service = make_service(dispatch=request.param)
    service.add(every=1000)
    service.clock.advance(1000)
    return service


@pytest.fixture
def broker_proxy(tcp_proxy: MakeProxy, redis_server: RedisServer) -> TcpProxy:
    """The broker's way to the run's server."""
    return tcp_proxy(redis_server)


@pytest.fixture
def far_beat(
    make_app: MakeApp, asked: Service, make_beat: MakeBeat, broker_proxy: TcpProxy
) -> Beat:
    """A dispatcher of that service, whose broker is behind the proxy."""
    return make_beat(make_app(broker_url=broker_proxy.url), asked)


def cut(proxy: TcpProxy) -> None:
    """Reset every open connection, and return once that has happened."""
    proxy.cut()
    wait_until(lambda: not proxy._open, "the connections to end")


def test_a_broker_that_is_down_at_first_is_waited_for(
    far_beat: Beat, broker_proxy: TcpProxy
) -> None:
    broker_proxy.refuse = True
    for _ in range(2):
        assert far_beat.step().broker_down
    assert not far_beat.mode.is_known()
    assert (far_beat.modes, set(far_beat.brokers)) == ([], {False})
    broker_proxy.refuse = False
    assert far_beat.step().sent == 1
    assert (far_beat.modes, names(far_beat)) == ([HERE], ["timer"])


def test_a_broker_that_is_down_at_a_check_is_not_published_to_first(
    far_beat: Beat, broker_proxy: TcpProxy
) -> None:
    """It may be back between two looks: what was atomic stays so, or waits."""
    assert far_beat.mode.link() is not None
    broker_proxy.refuse = True
    far_beat.publisher.close()
    far_beat.seconds = 20
    far_beat.mode._on_broker = lambda is_up: setattr(broker_proxy, "refuse", False)
    done = far_beat.step()
    assert (done.sent, done.broker_down, names(far_beat)) == (0, True, [])
    assert far_beat.step().sent == 1
    assert (far_beat.modes, names(far_beat)) == ([HERE], ["timer"])


def test_a_cut_connection_to_the_broker_is_made_anew_and_proved(
    far_beat: Beat, broker_proxy: TcpProxy
) -> None:
    first = far_beat.mode.link()
    cut(broker_proxy)
    with contextlib.suppress(BrokerDownError):  # or redis-py finds out by itself
        far_beat.publisher.write("probe", "", 0.001)
    link = far_beat.mode.link()
    assert first is not None
    assert link is not None
    assert link.proof != first.proof
    far_beat.seconds = 20
    cut(broker_proxy)
    assert far_beat.mode.link() is not None
    far_beat.seconds = 40
    broker_proxy.drop_replies = 1
    assert far_beat.step().sent == 1
    assert far_beat.brokers == [True] * 4
    assert (far_beat.modes, names(far_beat)) == ([HERE], ["timer"])


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_a_cut_connection_to_the_timers_doubles_nothing(
    make_app: MakeApp, asked: Service, make_beat: MakeBeat, redis_server: RedisServer,
    tcp_proxy: MakeProxy, when: str,
) -> None:  # fmt: skip
    proxy = tcp_proxy(redis_server)
    asked.settings = replace(asked.settings, redis_url=proxy.url)
    beat = make_beat(make_app(), asked)
    assert beat.mode.link() is not None
    if when == "before":
        cut(proxy)
    else:
        beat.before_commit = lambda: cut(proxy)
    assert beat.steps() == 1
    assert (beat.modes, names(beat)) == ([HERE], ["timer"])


def test_a_broker_that_moves_to_another_server_gets_nothing_by_a_commit(
    far_beat: Beat, broker_proxy: TcpProxy, fresh_redis: FreshRedis, prefix: str
) -> None:
    other, here = fresh_redis(), broker_proxy.upstream
    assert far_beat.mode.link() is not None
    broker_proxy.upstream = ("127.0.0.1", other.port)
    cut(broker_proxy)
    far_beat.seconds = 20
    if far_beat.service.settings.dispatch == "atomic":
        with pytest.raises(StoreUnavailableError, match="can not be atomic now"):
            far_beat.step()
        assert far_beat.modes == [HERE]
    else:
        assert far_beat.step().sent == 1
        assert far_beat.modes == [HERE, ELSEWHERE]
        assert len(taken(other.client, f"{prefix}queue")) == 1
    broker_proxy.upstream = here
    cut(broker_proxy)
    far_beat.seconds = 40
    far_beat.service.clock.advance(1000)
    assert far_beat.steps() == 1
    assert far_beat.modes[-1] == HERE
    assert names(far_beat) == ["timer"]


def test_a_proof_that_is_gone_at_the_commit_pushes_nothing(
    beat: Beat, caplog: pytest.LogCaptureFixture
) -> None:
    timer = beat.service.add()
    beat.service.clock.advance(10)
    before = beat.service.state(timer.id)
    key = beat.service.keys("broker_link", "a")
    beat.before_commit = lambda: beat.service.redis.delete(key)
    with caplog.at_level(logging.WARNING, "celery_dtimer"):
        done = beat.step()
    assert (done.sent, done.more, names(beat)) == (0, True, [])
    assert beat.service.state(timer.id) == before
    assert "1 runs wait" in caplog.text
    assert beat.step().sent == 1
    assert (beat.modes, names(beat)) == ([HERE], ["timer"])


def test_a_broker_database_that_is_emptied_gets_the_runs_after_that(
    make_app: MakeApp, make_beat: MakeBeat, fresh_redis: FreshRedis
) -> None:
    server = fresh_redis()
    service = Service(server.client, server.url, "")
    beat = make_beat(make_app(broker_url=f"redis://127.0.0.1:{server.port}/1"), service)
    queue, broker = beat.app.conf.task_default_queue, redis.Redis(port=server.port, db=1)
    service.add()
    service.clock.advance(10)
    beat.before_commit = broker.flushdb
    assert [beat.step().sent for _ in range(3)] == [0, 1, 0]
    assert len(taken(broker, queue)) == 1
    broker.close()
    service.store.close()


def test_a_server_without_memory_is_waited_for_and_each_run_is_pushed_once(
    make_app: MakeApp, make_beat: MakeBeat, fresh_redis: FreshRedis
) -> None:
    server = fresh_redis("--maxmemory-policy", "noeviction")
    service = Service(server.client, server.url, "")
    beat = make_beat(make_app(broker_url=server.url), service)
    service.add_many(3)
    service.clock.advance(11)
    assert beat.step().sent == 3, "its queue is declared"
    service.clock.advance(10)
    server.client.config_set("maxmemory", 1)
    for _ in range(2):
        with pytest.raises(StoreUnavailableError):
            beat.step()
    beat.seconds = 20
    beat.mode.link()
    assert not beat.mode.is_known(), "that is no reason to publish first"
    server.client.config_set("maxmemory", 0)
    assert beat.steps() == 3
    assert beat.modes == [HERE]
    assert len(taken(server.client, beat.app.conf.task_default_queue)) == 6
    service.store.close()


# ------------------------------------------------------------------ users of the server


@pytest.fixture
def make_user(redis_server: RedisServer, prefix: str) -> Iterator[Callable[..., str]]:
    """Make users of the run's server who may not do everything; return their URL."""
    server, made = redis_server.client, itertools.count()

    def make(*rules: str) -> str:
        name = f"{prefix[:-1]}-{next(made)}"
        server.execute_command("ACL", "SETUSER", name, "on", ">secret", "~*", "&*", "+@all", *rules)
        return f"redis://{name}:secret@127.0.0.1:{redis_server.port}/0"

    yield make
    for user in server.acl_users():
        if user.startswith(prefix[:-1]):
            server.acl_deluser(user)


MakeUser = Callable[..., str]


@pytest.mark.parametrize("rules", [["-set"], ["resetkeys", "~*queue*", "~_kombu*"]])
def test_a_broker_that_does_not_let_the_proof_be_written_is_published_to_first(
    make_app: MakeApp, service: Service, make_beat: MakeBeat, make_user: MakeUser, rules: list[str]
) -> None:
    beat = make_beat(make_app(broker_url=make_user(*rules)), service)
    service.add()
    service.clock.advance(10)
    for beat.seconds in (0, 20, 40):
        beat.step()
    ((mode, reason),) = beat.modes
    assert (mode, names(beat)) == ("confirmed", ["timer"])
    assert "may not write the key" in reason


@pytest.mark.parametrize("rules", [["-lpush"], ["resetkeys", "~*{orders}*"]])
@pytest.mark.parametrize("dispatch", ["auto", "atomic"])
def test_timers_whose_user_may_not_push_are_published_first(
    make_app: MakeApp, make_service: MakeService, make_beat: MakeBeat, make_user: MakeUser,
    rules: list[str], dispatch: str, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    service = make_service(dispatch=dispatch)
    service.add_many(3)
    service.clock.advance(11)
    service.settings = replace(service.settings, redis_url=make_user(*rules))
    beat = make_beat(make_app(), service)
    with caplog.at_level(logging.INFO, "celery_dtimer"):
        sent = beat.steps()
    if dispatch == "atomic":
        assert (sent, beat.modes, names(beat)) == (0, [HERE], [])
        return
    assert (sent, names(beat)) == (3, ["t0", "t1", "t2"])
    assert [mode for mode, _ in beat.modes] == ["atomic", "confirmed"]
    assert "may not push" in beat.modes[-1][1]
    assert caplog.text.count("Dispatch is confirmed") == 1


def test_a_mode_that_ends_in_a_pass_notes_what_is_published_first_as_in_flight(
    make_app: MakeApp, make_service: MakeService, make_beat: MakeBeat,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Else another instance could take over what is on its way."""
    service = make_service(batch_size=2)
    beat, noted, send = make_beat(make_app(), service), [], Publisher._send_together
    service.add_many(5)
    service.clock.advance(11)

    def sending(publisher: Publisher, runs: Sequence[Run], *args: Any) -> Any:
        in_flight = service.redis.hget(service.keys("instance", "a"), "in_flight")
        noted.append({run.identity for run in runs} == set(str(in_flight).split()))
        return send(publisher, runs, *args)

    monkeypatch.setattr(Publisher, "_send_together", sending)
    beat.before_commit = lambda: beat.mode.refuse("it may not push any more")
    assert beat.steps() == 5
    assert (noted, len(names(beat))) == ([True, True], 5)


# ------------------------------------------------------------------ the messages are Celery's

FANOUT = "fan"


def _queues(prefix: str) -> list[Queue]:
    topic = Exchange(f"{prefix}topic", type="topic")
    return [
        Queue(f"{prefix}queue"),
        Queue(f"{prefix}direct", Exchange(f"{prefix}direct"), routing_key=f"{prefix}key"),
        Queue(f"{prefix}topic1", topic, routing_key=f"{prefix}.*"),
        Queue(f"{prefix}topic2", topic, routing_key="#"),
        Queue(f"{prefix}short", queue_arguments={"x-expires": 60_000}),
        Queue(f"{prefix}fan", Exchange(f"{prefix}fan", type="fanout")),
    ]


def _wanted(prefix: str) -> dict[str, dict[str, Any]]:
    """Return options for timers of each kind."""
    return {
        "plain": {},
        "routed": {},
        **{f"priority{n}": {"priority": n} for n in (0, 2, 3, 6, 9)},
        "queue": {"queue": f"{prefix}asked"},
        "direct": {"queue": f"{prefix}direct"},
        "exchange": {"exchange": f"{prefix}direct", "routing_key": f"{prefix}key"},
        "topic": {"queue": f"{prefix}topic1", "routing_key": f"{prefix}.x"},
        "topic2": {"queue": f"{prefix}topic2", "routing_key": "elsewhere"},
        "short": {"queue": f"{prefix}short"},
        "short9": {"queue": f"{prefix}short", "priority": 9},
        "zlib": {"compression": "zlib"},
        "pickle": {"serializer": "pickle", "compression": "bzip2"},
        "headers": {"headers": {"tenant": "acme %s %% é", "stamps": {"s": ["1"]}}},
        "others": {
            "expires": datetime(2099, 5, 1, tzinfo=timezone.utc),
            "shadow": "another",
            "time_limit": 5,
        },
    }


def _lists(client: redis.Redis, prefix: str) -> dict[str, Any]:
    """Return what is in the queues, without what is drawn at random, and empty them."""
    found: dict[str, Any] = {}
    for key in client.scan_iter(f"{prefix}*", _type="list", count=1000):
        lifetime = client.pttl(key) > 0  # type: ignore[operator]
        messages = taken(client, key)
        for message in messages:
            message["properties"].pop("delivery_tag")
            message["properties"].pop("expiration", None)  # counted from the sending
        found[key] = (lifetime, messages)
    return found


def _dispatched(
    app: Celery, make_service: MakeService, make_beat: MakeBeat, dispatch: str, rounds: int = 4
) -> dict[str, Any]:
    """Return what a mode puts into the queues; later rounds may come from templates."""
    service = make_service(dispatch=dispatch)
    prefix = service.settings.key_prefix
    wanted = _wanted(prefix)
    timers = [
        service.define(
            name,
            task="tasks.routed" if name == "routed" else "tasks.record",
            options=check_options(options),
            args=(name, {"k": [1]}),
        )
        for name, options in wanted.items()
    ]
    service.store.save(timers)
    beat = make_beat(app, service)
    for number in range(1, rounds + 1):
        service.clock.advance(10)
        assert beat.step().sent == len(wanted)
        assert {service.state(timer.id).runs for timer in timers} == {number}
    assert [mode for mode, _ in beat.modes] == [dispatch]
    lists = _lists(service.redis, prefix)
    service.store.delete([timer.id for timer in timers])
    beat.close()
    return lists


@pytest.mark.filterwarnings("ignore::celery.exceptions.CDeprecationWarning")
@pytest.mark.parametrize("receivers", [False, True])
def test_a_commit_pushes_what_is_published_otherwise(
    make_app: MakeApp, make_service: MakeService, make_beat: MakeBeat, prefix: str,
    receivers: bool,
) -> None:  # fmt: skip
    app = make_app(
        task_queues=_queues(prefix),
        task_create_missing_queues=True,
        task_routes={"tasks.routed": {"queue": f"{prefix}routed", "priority": 3}},
    )
    with app.connection_for_write() as connection:
        for queue in _queues(prefix):
            queue(connection).declare()

    def before(headers: dict[str, Any], **_: Any) -> None:
        headers["seen"] = "by a receiver"

    if receivers:
        signals.before_task_publish.connect(before)
    try:
        confirmed, atomic = (
            _dispatched(app, make_service, make_beat, mode) for mode in ("confirmed", "atomic")
        )
    finally:
        signals.before_task_publish.disconnect(before)
    assert atomic == confirmed
    counts = {key.removeprefix(prefix): len(messages) for key, (_, messages) in atomic.items()}
    step = "\x06\x16"
    assert counts == {
        "queue": 4 * 7,
        f"queue{step}3": 4,
        f"queue{step}6": 4,
        f"queue{step}9": 4,
        "asked": 4,
        "direct": 8,
        "topic1": 4,
        "topic2": 8,
        "short": 4,
        f"short{step}9": 4,
        f"routed{step}3": 4,
    }
    if hasattr(Channel, "_get_queue_expire"):  # older ones know no expiry of queues
        assert atomic[f"{prefix}short"][0], "the queue expires"
    seen = {message["headers"].get("seen") for _, found in atomic.values() for message in found}
    assert seen == ({"by a receiver"} if receivers else {None})


@pytest.fixture
def events(service: Service) -> Iterator[Callable[[], list[Any]]]:
    """Hear what is published to topics: a function that answers what has come since."""
    prefix = service.settings.key_prefix
    with service.redis.pubsub(ignore_subscribe_messages=True) as pubsub:
        pubsub.psubscribe("/*")
        wait_until(lambda: service.redis.pubsub_numpat(), "the subscriber")

        def heard() -> list[Any]:
            service.redis.publish(f"/{prefix}", "end")
            found = []
            while True:
                message = wait_until(lambda: pubsub.get_message(timeout=0.1), "the end")
                if message["data"] == "end":
                    return found
                if "celeryev" in message["channel"] or prefix in message["channel"]:
                    found.append(json.loads(message["data"]))

        yield heard


def test_a_fanout_exchange_hears_each_run_once(
    make_app: MakeApp, service: Service, make_beat: MakeBeat, prefix: str,
    events: Callable[[], list[Any]],
) -> None:  # fmt: skip
    beat = make_beat(make_app(task_queues=_queues(prefix)), service)
    for name in ("paused", "timer"):
        service.add(name, options={"queue": f"{prefix}fan"})
    service.clock.advance(10)
    beat.before_commit = lambda: service.store.pause(service.define("paused").id)
    assert beat.step().sent == 1
    heard = [message["headers"]["dtimer"]["name"] for message in events()]
    assert heard == ["timer"]


class Receivers:
    """What Celery's signals have said, and how often its timers had run by then."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.said: list[tuple[str, str, int]] = []
        self.connected = {
            signals.before_task_publish: self.before,
            signals.after_task_publish: self.after,
            signals.task_sent: self.sent,
        }

    def _note(self, what: str, id: str, name: str) -> None:
        self.said.append((what, name, self.service.state(id).runs))

    def before(self, headers: dict[str, Any], **_: Any) -> None:
        """Change the message."""
        self._note("before", headers["dtimer"]["id"], headers["dtimer"]["name"])
        headers["tenant"] = "acme"

    def after(self, headers: dict[str, Any], **_: Any) -> None:
        """Fail, as receivers may."""
        self._note("after", headers["dtimer"]["id"], headers["dtimer"]["name"])
        raise RuntimeError("the receiver's own")

    def sent(self, args: Any, **_: Any) -> None:
        """Know the timer by its arguments."""
        self._note("sent", self.service.define(args[0]).id, args[0])


@pytest.fixture
def receivers(service: Service) -> Iterator[Receivers]:
    """Receivers of Celery's signals around a publish."""
    receivers = Receivers(service)
    for signal, receiver in receivers.connected.items():
        signal.connect(receiver)
    yield receivers
    for signal, receiver in receivers.connected.items():
        signal.disconnect(receiver)


@pytest.mark.filterwarnings("ignore::celery.exceptions.CDeprecationWarning")
def test_signals_and_events_follow_the_commit_and_only_one_that_has_pushed(
    make_app: MakeApp, service: Service, make_beat: MakeBeat, prefix: str, receivers: Receivers,
    events: Callable[[], list[Any]],
) -> None:  # fmt: skip
    beat = make_beat(make_app(task_send_sent_event=True), service)
    for name in ("timer", "paused"):
        service.add(name, args=(name,))
    service.clock.advance(10)
    beat.before_commit = lambda: service.store.pause(service.define("paused").id)
    assert beat.step().sent == 1
    assert sorted(receivers.said) == [
        ("after", "timer", 1),
        ("before", "paused", 0),
        ("before", "timer", 0),
        ("sent", "timer", 1),
    ]
    (message,) = taken(service.redis, f"{prefix}queue")
    assert message["headers"]["tenant"] == "acme"
    (event,) = (json.loads(base64.b64decode(event["body"])) for event in events())
    assert (event["type"], event["uuid"]) == ("task-sent", message["headers"]["id"])


@pytest.mark.parametrize("losses", [["reply"], ["reply"] * 2, ["request"] * 3])
def test_signals_are_sent_once_though_replies_were_lost(
    beat: Beat, receivers: Receivers, monkeypatch: pytest.MonkeyPatch, losses: list[str]
) -> None:
    beat.service.add(args=("timer",))
    beat.service.clock.advance(10)
    losing(monkeypatch, "begin_commit", losses)
    assert (beat.steps(), names(beat), losses) == (1, ["timer"], [])
    assert sorted(what for what, _, _ in receivers.said) == ["after", "before", "sent"]


@pytest.mark.parametrize("receives", [True, False])
def test_the_sent_event_is_pushed_with_the_run_or_not_at_all(
    make_app: MakeApp, service: Service, make_beat: MakeBeat, prefix: str,
    events: Callable[[], list[Any]], request: pytest.FixtureRequest, receives: bool,
) -> None:  # fmt: skip
    if receives:
        request.getfixturevalue("receivers")
    beat = make_beat(make_app(task_send_sent_event=True), service)
    service.add(args=("timer",), options={"queue": f"{prefix}spoilt"})
    service.clock.advance(10)
    assert (beat.step().sent, len(events()), names(beat, "spoilt")) == (1, 1, ["timer"])
    service.redis.set(f"{prefix}spoilt", "no list")
    service.clock.advance(10)
    assert (beat.step().postponed, events()) == (1, []), "its queue has been declared before"
    service.redis.delete(f"{prefix}spoilt")
    service.clock.advance(10)
    assert (beat.step().sent, len(events()), names(beat, "spoilt")) == (1, 1, ["timer"])


# ------------------------------------------------------------------ each run once


def runs_in_queue(beat: Beat) -> Counter[tuple[str, str]]:
    """Count the messages of each run in the queue: its task id is of timer, creation and moment."""
    found = taken(beat.service.redis, f"{beat.service.settings.key_prefix}queue")
    return Counter((m["headers"]["dtimer"]["scheduled_at"], m["headers"]["id"]) for m in found)


@pytest.mark.parametrize(
    "losses", [["request"], ["reply"], ["reply"] * 2, ["request"] * 2, ["reply"] * 3]
)
def test_a_commit_that_is_lost_pushes_once(
    beat: Beat, monkeypatch: pytest.MonkeyPatch, losses: list[str]
) -> None:
    timers = beat.service.add_many(3)
    beat.service.clock.advance(11)
    losing(monkeypatch, "begin_commit", losses)
    assert (beat.steps(), losses) == (3, [])
    assert names(beat) == ["t0", "t1", "t2"]
    assert {beat.service.state(timer.id).runs for timer in timers} == {1}


@pytest.mark.parametrize("replies", [1, 2, 3])
def test_a_reply_that_the_network_loses_pushes_once(
    make_app: MakeApp, service: Service, make_beat: MakeBeat, redis_server: RedisServer,
    tcp_proxy: MakeProxy, replies: int,
) -> None:  # fmt: skip
    proxy = tcp_proxy(redis_server)
    service.settings = replace(service.settings, redis_url=proxy.url)
    beat = make_beat(make_app(), service)
    service.add_many(3)
    service.clock.advance(11)
    assert beat.mode.link() is not None
    beat.before_commit = lambda: setattr(proxy, "drop_replies", replies)
    beat.steps(6)
    assert names(beat) == ["t0", "t1", "t2"]


def test_a_lost_commit_of_an_epoch_that_is_over_pushes_once(
    beat: Beat, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer of before is gone with the registration: the timers themselves tell."""
    beat.service.add()
    beat.service.clock.advance(10)
    losing(monkeypatch, "begin_commit", ["reply"] * 2)
    with pytest.raises(StoreUnavailableError):
        beat.step()
    beat.register()
    beat.steps()
    beat.service.clock.advance(10)
    beat.steps()
    assert list(runs_in_queue(beat).values()) == [1, 1]


def _reap_by(other: Beat, service: Service) -> None:
    service.let_pass(31, b=other.lease.epoch)
    service.store.reap("b", other.lease.epoch)


def test_a_zombie_pushes_nothing(make_app: MakeApp, service: Service, make_beat: MakeBeat) -> None:
    app = make_app()
    zombie = make_beat(app, service)
    service.add_many(3, every=1000)
    other = make_beat(app, service, "b")
    service.clock.advance(1001)
    zombie.before_commit = lambda: _reap_by(other, service)
    with pytest.raises(FencedError):
        zombie.step()
    assert names(zombie) == []
    assert other.steps() == 3
    zombie.register()
    assert zombie.steps() == 0
    assert names(other) == ["t0", "t1", "t2"]


def test_timers_that_move_between_build_and_commit_are_pushed_by_one(
    make_app: MakeApp, service: Service, make_beat: MakeBeat
) -> None:
    """The new owner pushes before the old one commits; then some come back."""
    app = make_app()
    first, second = make_beat(app, service), make_beat(app, service, "b")
    timers = service.add_many(6)
    service.clock.advance(11)

    def move() -> None:
        service.store.leave("b", second.lease.epoch)
        first.register()
        second.register()
        service.store.rebalance("b", second.lease.epoch)
        second.steps()

    first.before_commit = move
    with pytest.raises(FencedError):
        first.step()
    first.register()
    first.steps()
    second.steps()
    assert sorted(names(first)) == [timer.name for timer in timers]


CHANGES: dict[str, Callable[[Service, Definition], object]] = {
    "edited": lambda service, timer: service.add(args=(2,)),
    "rescheduled": lambda service, timer: service.add(every=15),
    "paused": lambda service, timer: service.store.pause(timer.id),
    "stopped": lambda service, timer: service.store.stop(timer.id),
    "deleted": lambda service, timer: service.store.delete([timer.id]),
    "created anew": lambda service, timer: (service.store.delete([timer.id]), service.add()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_timer_that_changes_between_build_and_commit_is_pushed_as_it_is_then(
    beat: Beat, change: str
) -> None:
    service, timer = beat.service, beat.service.add(args=(1,))
    service.clock.advance(10)
    beat.before_commit = lambda: CHANGES[change](service, timer)
    assert beat.step().sent == (1 if change == "edited" else 0)
    pushed = taken(service.redis, beat.app.conf.task_default_queue)
    if change == "edited":
        (message,) = pushed
        assert message["headers"]["argsrepr"] == "(2,)"
    else:
        assert pushed == []
    if change != "deleted":
        assert service.state(timer.id).last_sent_ms is None
    beat.steps()
    now = runs_in_queue(beat)
    service.clock.advance(15)
    beat.steps()
    later = runs_in_queue(beat)
    goes_on = change in ("edited", "rescheduled", "created anew")
    assert (now.total(), later.total()) == (0, 1 if goes_on else 0)


@pytest.mark.parametrize("is_declared", [True, False])
def test_a_queue_that_is_something_else_delays_its_timer_alone(
    beat: Beat, prefix: str, is_declared: bool
) -> None:
    """Whether the commit finds out, or Celery when it declares the queue."""
    service = beat.service
    if is_declared:
        service.add("first", at_ms=START_MS, options={"queue": f"{prefix}spoilt"})
        assert (beat.step().sent, names(beat, "spoilt")) == (1, ["first"])
    spoilt = service.add("spoilt", every=5, options={"queue": f"{prefix}spoilt"})
    service.add()
    service.redis.set(f"{prefix}spoilt", "no list")
    service.clock.advance(10)
    done = beat.step()
    assert (done.sent, done.postponed, names(beat)) == (1, 1, ["timer"])
    delays = []
    for _ in range(3):
        state = service.state(spoilt.id)
        delays.append((state.at_ms or 0) - service.clock.now_ms)
        service.clock.now_ms = state.at_ms or 0
        assert beat.step().postponed == 1
    assert delays == sorted(delays)
    assert (service.state(spoilt.id).runs, service.state(spoilt.id).due_ms) == (0, START_MS + 5000)
    service.redis.delete(f"{prefix}spoilt")
    service.clock.advance(0.9)
    assert (beat.step().sent, names(beat, "spoilt")) == (1, ["spoilt"])


@pytest.mark.parametrize(
    ("size", "commits"), [(300_000, [2, 2, 1]), (1_200_000, [1] * 5), (9, [5])]
)
def test_a_batch_of_large_messages_is_committed_in_parts(
    beat: Beat, monkeypatch: pytest.MonkeyPatch, size: int, commits: list[int]
) -> None:
    sizes, commit = [], Store.begin_commit

    def counted(store: Store, *args: Any, **kwargs: Any) -> Any:
        sizes.append(len(args[3]))
        return commit(store, *args, **kwargs)

    monkeypatch.setattr(Store, "begin_commit", counted)
    beat.service.add_many(5, args=("x" * size,))
    beat.service.clock.advance(11)
    assert beat.step().sent == 5
    assert sizes == commits
    assert names(beat) == [f"t{n}" for n in range(5)]


@pytest.mark.parametrize("loss", ["request", "reply"])
def test_a_batch_in_parts_of_which_one_is_lost_is_pushed_once(
    beat: Beat, monkeypatch: pytest.MonkeyPatch, loss: str
) -> None:
    beat.service.add_many(5, args=("x" * 1_000_000,))
    beat.service.clock.advance(11)
    losing(monkeypatch, "begin_commit", ["none", "none", loss, loss, loss])
    beat.steps()
    assert names(beat) == [f"t{n}" for n in range(5)]


def test_a_backlog_does_not_hold_up_what_comes_due_now(
    make_app: MakeApp, make_service: MakeService, make_beat: MakeBeat
) -> None:
    """With 2,000 overdue and batches of 100, it is in one of the next two; and nobody starves."""
    service = make_service(batch_size=100)
    progress: list[int] = []  # each batch and each commit takes a second: a pass is one batch
    beat = make_beat(
        make_app(),
        service,
        clock=lambda: float(len(progress)),
        on_progress=lambda: progress.append(1),
    )
    service.add_many(2000, every=3600)
    service.clock.advance(3610)
    service.store.heartbeat("a", beat.lease.epoch)
    batches = []
    for number in range(22):
        service.add(f"now{number}", at_ms=service.clock.now_ms)
        done = beat.step()
        batches.append(names(beat))
        assert number == 0 or any(f"now{number - 1}" in batch for batch in batches[-2:])
        assert len(batches[-1]) == done.sent <= 100
        service.clock.advance(0.01)
    sent = Counter(itertools.chain(*batches))
    assert (len(sent), set(sent.values())) == (2022, {1})
    assert batches[0][50:] == [f"t{n}" for n in range(50)], "the others go in their order"


def test_what_was_looked_at_before_is_neither_read_nor_built_anew(
    beat: Beat, monkeypatch: pytest.MonkeyPatch
) -> None:
    beat.service.add_many(5)
    beat.step()
    while beat.dispatcher.look_ahead(beat.lease, 1.0):
        pass
    assert names(beat) == []
    beat.service.clock.advance(11)
    monkeypatch.setattr(beat.publisher, "_apply", lambda *_: pytest.fail("Celery is asked"))
    monkeypatch.setattr(Store, "begin_definitions", lambda *_: pytest.fail("read again"))
    assert beat.step().sent == 5
    assert names(beat) == [f"t{number}" for number in range(5)]


@pytest.fixture
def two_batches(make_app: MakeApp, make_service: MakeService, make_beat: MakeBeat) -> Beat:
    """A dispatcher with two batches of two overdue timers, none of which it has seen."""
    beat = make_beat(make_app(), make_service(batch_size=2))
    beat.service.add_many(4)
    beat.service.clock.advance(11)
    return beat


def test_definitions_are_asked_for_before_the_commit_that_they_would_wait_for(
    two_batches: Beat, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    for name in ("begin_definitions", "begin_commit"):
        monkeypatch.setattr(Store, name, _noting(getattr(Store, name), calls))
    assert two_batches.step().sent == 4
    assert calls == ["begin_definitions", "begin_definitions", "begin_commit", "begin_commit"]


def test_a_pass_that_fails_leaves_no_request_behind(
    two_batches: Beat, monkeypatch: pytest.MonkeyPatch
) -> None:
    beat = two_batches

    def begin_commit(*args: Any, **kwargs: Any) -> NoReturn:
        raise FencedError("after the definitions of the next batch were asked for")

    with monkeypatch.context() as patch:
        patch.setattr(Store, "begin_commit", begin_commit)
        with pytest.raises(FencedError):
            beat.step()
    beat.register()
    assert beat.step().sent == 4
    assert len(names(beat)) == 4
    pool = beat.store.client.connection_pool
    assert not pool._in_use_connections


def _noting(method: Any, calls: list[str]) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        calls.append(method.__name__)
        return method(*args, **kwargs)

    return call
