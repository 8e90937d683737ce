"""No call waits for ever: whatever a server does, each ends within its limit, and says why."""

from __future__ import annotations

import gc
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timezone
from typing import Any

import pytest
from celery import Celery
from kombu.exceptions import OperationalError

from celery_dtimer import DistributedTimer
from celery_dtimer.errors import StoreUnavailableError
from celery_dtimer.model import Lease
from celery_dtimer.publisher import BrokerDownError, Publisher
from celery_dtimer.settings import Settings, defaults
from celery_dtimer.store import OutRun, Reading, Store
from celery_dtimer.timelimits import LimitedSocket
from tests.conftest import FreshRedis, MakeApp, app_settings
from tests.servers import RabbitMQ, RedisServer
from tests.tcp_proxy import TcpProxy
from tests.waiting import wait_until

LIMIT = 0.4  # seconds that a call may take in these tests
SLACK = 0.4  # seconds that a busy machine adds

MakeProxy = Callable[[RedisServer], TcpProxy]


def assert_limited(act: Callable[[], Any], limit: float, *errors: type[BaseException]) -> None:
    """Fail unless an act ends in time, with one of these errors."""
    began = time.monotonic()
    with pytest.raises(errors):
        act()
    took = time.monotonic() - began
    assert took < limit + SLACK, f"it took {took:.1f} s"


def swallow(proxy: TcpProxy) -> None:
    proxy.black_hole = True


def trickle(proxy: TcpProxy) -> None:
    proxy.trickle = LIMIT / 2


def pause(proxy: TcpProxy) -> None:
    """Be far slower than the limit."""
    proxy.latency = 3 * LIMIT


FAULTS = (swallow, trickle, pause)


@pytest.fixture
def settings(redis_server: RedisServer, prefix: str) -> Settings:
    return Settings("orders", redis_server.url, key_prefix=prefix)


def limited_store(proxy: TcpProxy, prefix: str) -> Store:
    return Store(Settings("orders", proxy.url, key_prefix=prefix), timeout=LIMIT)


# ------------------------------------------------------------------ each call of the store

RUN = OutRun("task", "timer", 1, 1, message="m")

#: One of each way in which the store asks: a script, a pipeline, a command, a prepared command.
CALLS: dict[str, Callable[[Store], Any]] = {
    "a script": lambda store: store.heartbeat("a", 1),
    "a registration": lambda store: store.register("a", {"host": "h"}),
    "a commit": lambda store: store.commit("a", 1, 1, [], reading=Reading(10)),
    "a pipeline": lambda store: store.states(["a", "b"]),
    "two in flight": lambda store: [store.begin_definitions(["a"])() for _ in range(2)],
    "a command": lambda store: store.pending_count(),
    "a look at all": lambda store: store.timer_ids(),
    "the settings": lambda store: store.configuration(["maxmemory"]),
    "a claim": lambda store: store.claim_run("task", "token", 1000),
    "a report of a worker": lambda store: store.run_ended(RUN, "succeeded"),
    "a hand-over": lambda store: store.leave("a", 1),
    "the time": lambda store: store.now_ms(),
    "to listen": lambda store: store.listen("a", lambda: None, threading.Event()),
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_call_on_an_open_connection(
    redis_server: RedisServer, prefix: str, tcp_proxy: MakeProxy, fault: Any
) -> None:
    """All at once, since each mostly waits; every one has been connected before."""
    found: dict[str, float] = {}

    def measure(name: str, call: Callable[[Store], Any], proxy: TcpProxy) -> None:
        store = limited_store(proxy, prefix)
        store.client.ping()
        fault(proxy)
        began = time.monotonic()
        try:
            call(store)
        except StoreUnavailableError:
            found[name] = time.monotonic() - began
        finally:
            store.close()

    threads = [
        threading.Thread(target=measure, args=(name, call, tcp_proxy(redis_server)))
        for name, call in CALLS.items()
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(found) == len(threads), "each ends with an error"
    # With a connection of its own, to listen: to connect is a call, and to be greeted.
    late = {name: took for name, took in found.items() if took > 3 * LIMIT + SLACK}
    assert not late
    assert sorted(found.values())[len(found) // 2] < LIMIT + SLACK


def test_a_listener_finds_out_that_nobody_is_there_any_more(
    redis_server: RedisServer, prefix: str, tcp_proxy: MakeProxy
) -> None:
    """A firewall forgets a connection on which nothing has come for a while, and tells nobody."""
    proxy = tcp_proxy(redis_server)
    store = limited_store(proxy, prefix)
    wake_ups: list[float] = []
    stopped = threading.Event()
    failures: list[Exception] = []

    def listen() -> None:
        try:
            store.listen("a", lambda: wake_ups.append(time.monotonic()), stopped)
        except StoreUnavailableError as exc:
            failures.append(exc)

    thread = threading.Thread(target=listen)
    thread.start()
    channel = store.keys("wake", "a")

    def wake() -> bool:
        return bool(redis_server.client.publish(channel, "") and len(wake_ups) > 1)

    wait_until(wake, "the wake-up to be heard")
    thread.join(5 * LIMIT)  # longer than silence lasts: it asks, and goes on
    heard = len(wake_ups)
    assert redis_server.client.publish(channel, "") == 1
    wait_until(lambda: len(wake_ups) > heard, "another wake-up")
    assert not failures
    swallow(proxy)
    began = time.monotonic()
    thread.join(10 * LIMIT)
    assert len(failures) == 1
    assert time.monotonic() - began < 4 * LIMIT + SLACK
    store.close()


def test_an_answer_that_is_long_and_comes_in_pieces_is_read(
    settings: Settings, tcp_proxy: MakeProxy, redis_server: RedisServer, prefix: str
) -> None:
    """The limit does not cut off what takes several reads within it."""
    key = f"{prefix}long"
    redis_server.client.set(key, "x" * 3_000_000, ex=60)
    store = limited_store(tcp_proxy(redis_server), prefix)
    for _ in range(3):
        assert len(store.client.get(key)) == 3_000_000
    store.close()


def test_what_was_answered_while_the_process_was_suspended_is_read(
    redis_server: RedisServer, prefix: str
) -> None:
    """The limit counts from when the answer is waited for, not from the request."""
    store = Store(Settings("orders", redis_server.url, key_prefix=prefix), timeout=LIMIT)
    answer = store.begin_definitions(["a"])
    time.sleep(2 * LIMIT)  # longer than the limit: time itself is what this is about
    assert answer() == [None]
    assert store.begin_definitions(["a", "b"])() == [None, None]
    store.close()


@pytest.fixture
def pair() -> Iterator[tuple[LimitedSocket, socket.socket]]:
    """A limited socket, and the other end."""
    near, far = socket.socketpair()
    near.settimeout(LIMIT)
    with near, far:
        yield LimitedSocket(near), far


def test_a_limit_is_for_all_reads_after_a_request(
    pair: tuple[LimitedSocket, socket.socket],
) -> None:
    near, far = pair
    for _ in range(2):  # a request begins a new one
        near.sendall(b"?")
        far.sendall(b"ab")
        assert near.recv(1) == b"a"
        assert near.recv_into(bytearray(1)) == 1
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            near.recv(1)
        assert time.monotonic() - began < LIMIT + SLACK
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            near.recv(1)
        assert time.monotonic() - began < LIMIT / 2, "the time is over already"
        far.sendall(b"c")
        assert near.recv(1) == b"c", "what is there is read"


def test_a_wait_of_another_length_is_as_long_as_it_says(
    pair: tuple[LimitedSocket, socket.socket],
) -> None:
    """As redis-py does it for what may come at any time."""
    near, _ = pair
    near.sendall(b"?")
    for seconds in (2 * LIMIT, 0.01):
        near.settimeout(seconds)
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            near.recv(1)
        assert seconds <= time.monotonic() - began + 0.005 < seconds + SLACK
    near.settimeout(LIMIT)
    assert near.gettimeout() == LIMIT


# ------------------------------------------------------------------ Redis that hangs as a whole

FREEZES: dict[str, Callable[[RedisServer], None]] = {
    "SIGSTOP": RedisServer.freeze,
    "CLIENT PAUSE": lambda server: server.client.client_pause(60_000),
}


@pytest.fixture(params=FREEZES.values(), ids=FREEZES.keys())
def hanging(request: pytest.FixtureRequest, fresh_redis: FreshRedis) -> Iterator[RedisServer]:
    server = fresh_redis()
    request.param(server)
    yield server
    server.thaw()


#: What users call.
ACTS: dict[str, Callable[[DistributedTimer], Any]] = {
    "create_timer": lambda timers: timers.create_timer("n", 10, "task"),
    "get_timer": lambda timers: timers.get_timer("n"),
    "get_timers": lambda timers: timers.get_timers(),
    "get_runs": lambda timers: timers.get_runs(),
    "why": lambda timers: timers.why("n", datetime.now(timezone.utc)),
    "trigger_timer": lambda timers: timers.trigger_timer("n"),
    "cancel": lambda timers: timers.cancel("some task"),
    "check_consistency": lambda timers: timers.check_consistency(),
}


def test_the_api_answers_within_one_call(make_app: MakeApp, hanging: RedisServer) -> None:
    app = make_app(dtimer_redis_url=hanging.url, dtimer_instance_timeout=3 * LIMIT)
    timers = DistributedTimer(app)
    with ThreadPoolExecutor(len(ACTS)) as users:  # each mostly waits
        tries = [
            users.submit(
                assert_limited, lambda act=act: act(timers), 3 * LIMIT, StoreUnavailableError
            )
            for act in ACTS.values()
        ]
    for each in tries:
        each.result()
    assert_limited(lambda: timers.get_timer("n"), LIMIT, StoreUnavailableError)


def test_a_durable_countdown_answers_within_the_tries_of_its_policy(
    make_app: MakeApp, hanging: RedisServer
) -> None:
    app = make_app(
        dtimer_redis_url=hanging.url, dtimer_instance_timeout=3 * LIMIT, dtimer_eta_threshold=0
    )
    DistributedTimer(app)

    def call(**how: Any) -> Any:
        return app.send_task("task", countdown=60, **how)

    assert_limited(lambda: call(retry=False), LIMIT, OperationalError)
    policy = {"max_retries": 1, "interval_start": 0, "interval_step": 0, "interval_max": 0}
    assert_limited(lambda: call(retry_policy=policy), 2 * LIMIT, OperationalError)


# ------------------------------------------------------------------ the broker


def publisher_of(app: Celery) -> Publisher:
    return Publisher(app, timeout=LIMIT)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_broker_of_redis(
    redis_server: RedisServer, prefix: str, tcp_proxy: MakeProxy, fault: Any
) -> None:
    """On an open connection, and on a new one."""
    proxy = tcp_proxy(redis_server)
    app = Celery("orders", set_as_current=False)
    app.conf.update(app_settings(proxy.url, prefix))
    publisher = publisher_of(app)
    assert publisher.connect() is None
    key = f"{prefix}proof"
    publisher.write(key, "proof", 5)
    fault(proxy)
    assert_limited(lambda: publisher.write(key, "proof", 5), LIMIT, BrokerDownError)
    began = time.monotonic()
    assert isinstance(publisher.connect(), BrokerDownError)
    assert time.monotonic() - began < 2 * LIMIT + SLACK
    publisher.close()
    app.close()


@pytest.fixture
def garbage() -> Iterator[None]:
    """Collect what a test has left, while it is known whose it was."""
    yield
    gc.collect()


# py-amqp leaves the socket of a connection that is never answered to the garbage collector.
@pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.usefixtures("garbage")
def test_rabbitmq_that_is_frozen(
    shared_rabbitmq: RabbitMQ, make_app: MakeApp, request: pytest.FixtureRequest
) -> None:
    """To say good-bye takes two calls: for the channel, and for the connection."""
    request.addfinalizer(gc.collect)  # here, where the warning is expected
    as_shipped = {name: value for name, value in defaults().items() if name.endswith("_timeout")}
    app = make_app(broker_url=shared_rabbitmq.url, dtimer_redis_url=make_app().conf.broker_url)
    timers = DistributedTimer(make_app(**{**app.conf.changes, **as_shipped}))
    timers.start()
    timers.create_timer("often", 0.2, "task")
    wait_until(lambda: timers.get_counts().sent, "a run", 15)
    publisher = publisher_of(app)
    assert publisher.connect() is None
    shared_rabbitmq.freeze()
    try:
        began = time.monotonic()
        publisher.close()
        assert time.monotonic() - began < 2 * LIMIT + SLACK
        began = time.monotonic()
        assert isinstance(publisher.connect(), BrokerDownError)
        assert time.monotonic() - began < 2 * LIMIT + SLACK
        began = time.monotonic()
        timers.stop()
        assert time.monotonic() - began < 2, "whatever the broker does not say"
        assert timers.get_service_instances() == []
    finally:
        shared_rabbitmq.thaw()


def test_a_lease_is_not_trusted_longer_than_a_hanging_call_takes(settings: Settings) -> None:
    """A call is given up long before the timers of its instance may go to others."""
    assert settings.call_timeout == settings.instance_timeout / 3
    assert 2 * settings.broker_timeout < settings.call_timeout, "to connect takes two"
    assert Lease("a", 1, settings.instance_timeout * 0.9).is_valid(2 * settings.call_timeout)
