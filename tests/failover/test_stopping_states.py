"""A beat ends within two seconds of a signal in every state, though a call may take longer."""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
from celery.beat import EmbeddedService

from celery_dtimer import DistributedTimer
from celery_dtimer.settings import defaults
from tests.conftest import MakeApp
from tests.failover.deployment import Deploy, Deployment
from tests.processes import Process
from tests.servers import RedisServer, free_port
from tests.tcp_proxy import TcpProxy
from tests.waiting import wait_until

MakeProxy = Callable[[RedisServer], TcpProxy]

LIMIT = 2.0
#: As users have them: a call to Redis may take ten seconds, one to the broker four.
AS_SHIPPED = {
    name: value for name, value in defaults().items() if name.endswith(("_interval", "_timeout"))
}


def refuse(proxy: TcpProxy) -> None:
    """Reset what is open, and whatever comes."""
    proxy.refuse = True
    proxy.cut()


def swallow(proxy: TcpProxy) -> None:
    """Keep connections open, and deliver nothing."""
    proxy.black_hole = True


def slow_down(proxy: TcpProxy) -> None:
    """Take half a second for each round trip."""
    proxy.latency = 0.25


def slow_down_much(proxy: TcpProxy) -> None:
    """Take two seconds for each round trip."""
    proxy.latency = 1.0


def trickle(proxy: TcpProxy) -> None:
    """Deliver a byte of an answer each second."""
    proxy.trickle = 1.0


FAULTS = (refuse, swallow, slow_down, slow_down_much, trickle)


def assert_all_end(beats: Mapping[str, Process], signum: int, *, again: bool = False) -> None:
    """Fail unless all processes end in time; ``again`` sends the signal several times."""
    asked = time.monotonic()
    for _ in range(4 if again else 1):
        for beat in beats.values():
            beat.send(signum)
        time.sleep(0.03 if again else 0)  # as somebody who hits Ctrl-C again
    took = {name: beat.wait(20) - asked for name, beat in beats.items()}
    assert all(seconds < LIMIT for seconds in took.values()), took
    assert {beat.exit_code for beat in beats.values()} == {0}
    for name, beat in beats.items():
        assert "/celery_dtimer/" not in beat.log_text(), f"{name}: a traceback of ours"


# ------------------------------------------------------------------ while it runs


@pytest.mark.parametrize(
    ("spoilt", "signum", "again"),
    [
        ({"dtimer_redis_url", "broker_url"}, signal.SIGTERM, False),
        ({"dtimer_redis_url"}, signal.SIGINT, True),
        ({"broker_url"}, signal.SIGTERM, True),
    ],
    ids=["both", "Redis", "the broker"],
)
def test_whatever_the_connections_do(
    deploy: Deploy, tcp_proxy: MakeProxy, spoilt: set[str], signum: int, again: bool
) -> None:
    """Celery's remote control has a connection to the broker too, and a thread that ends later."""
    deployment = deploy(**AS_SHIPPED, beat_enable_remote_control=True)
    deployment.create(60, 0.5)
    proxies = {fault: tcp_proxy(deployment.store) for fault in FAULTS}
    beats = {
        fault.__name__: deployment.start_beat(**dict.fromkeys(spoilt, proxy.url))
        for fault, proxy in proxies.items()
    }
    deployment.wait_registered(beats.values())
    wait_until(
        lambda: set(deployment.ledger.senders()) == {beat.pid for beat in beats.values()},
        "all to send",
        10,
    )
    for fault, proxy in proxies.items():
        fault(proxy)
    deployment.pass_time(1)  # each is in the middle of a call by then
    assert_all_end(beats, signum, again=again)


def test_a_beat_whose_terminal_goes_hands_over(deployment: Deployment) -> None:
    beats = deployment.start_beats(2)
    names = deployment.create(20)
    deployment.wait_firing(names)
    asked_ms = deployment.now_ms()
    assert_all_end({"hung up": beats[0]}, signal.SIGHUP)
    assert set(deployment.registered()) == {beats[1].pid}
    deployment.wait_sent(names, asked_ms + 1000, 3)
    assert max(run.lag_ms for run in deployment.ledger.since(asked_ms)) < 1000
    deployment.ledger.assert_nothing_doubled()


def test_a_hang_up_that_is_ignored_stays_ignored(deployment: Deployment) -> None:
    """As ``nohup`` has it."""
    beat = deployment.start_script(
        "import signal, sys\n"
        "signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
        "from celery.__main__ import main\n"
        "sys.argv = ['celery', '-A', 'tests.failover.app', 'beat', '-S', 'dtimer', '-l', 'INFO']\n"
        "main()\n"
    )
    deployment.wait_registered([beat])
    beat.send(signal.SIGHUP)
    deployment.timers.create_timer("after", 0.3, "record")
    deployment.wait_firing(["after"])
    assert beat.stop() < LIMIT


# ------------------------------------------------------------------ before it runs


@contextlib.contextmanager
def deaf_port() -> Iterator[int]:
    """A port on which connections are made, and nobody ever reads or answers."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", free_port()))
        listener.listen(50)
        yield listener.getsockname()[1]


def test_while_it_waits_for_redis_at_its_start(deploy: Deploy, tcp_proxy: MakeProxy) -> None:
    deployment = deploy(**AS_SHIPPED)
    trickling = tcp_proxy(deployment.store)
    trickle(trickling)
    signals = ((signal.SIGTERM, False), (signal.SIGINT, True), (signal.SIGHUP, False))
    with deaf_port() as deaf:
        places = {
            "refuses": f"127.0.0.1:{free_port()}",
            "does not answer": f"127.0.0.1:{deaf}",
            "has no address": "no-such-host.invalid:6379",
            "trickles": f"127.0.0.1:{trickling.port}",
        }
        waiting: list[dict[str, Process]] = []
        for _ in signals:
            urls = {name: f"redis://{place}/0" for name, place in places.items()}
            waiting.append(
                {
                    name: deployment.start_beat(dtimer_redis_url=url, broker_url=url)
                    for name, url in urls.items()
                }
            )
        for beats in waiting:
            for beat in beats.values():
                wait_until(lambda beat=beat: "beat: Starting" in beat.log_text(), "the start", 20)
        deployment.pass_time(0.5)
        for beats, (signum, again) in zip(waiting, signals, strict=True):
            assert_all_end(beats, signum, again=again)
    assert deployment.registered() == {}


# ------------------------------------------------------------------ in the middle of long work


LATENCY = 0.05  # seconds each way: long work takes seconds

MANY = 2500


def many() -> dict[str, Any]:
    """Return a large static schedule that does not fire."""
    rule = {"task": "record", "schedule": 3600.0}
    return {f"static-{number}": rule for number in range(MANY)}


def create_many(deployment: Deployment, **fields: Any) -> None:
    """Create many timers that do not fire."""
    rule = {"schedule": 3600, "callback": "record", **fields}
    deployment.timers.create_timers([{"name": f"many-{n}", **rule} for n in range(MANY)])


def test_while_it_writes_the_static_schedule(deploy: Deploy, tcp_proxy: MakeProxy) -> None:
    deployment = deploy(**AS_SHIPPED)
    proxy = tcp_proxy(deployment.store)
    proxy.latency = LATENCY
    beat = deployment.start_beat(dtimer_redis_url=proxy.url, beat_schedule=many())
    wait_until(deployment.timers.pending_count, "the writing", 20)
    assert_all_end({"writes": beat}, signal.SIGTERM)
    assert deployment.timers.pending_count() < MANY, "it was in the middle of it"


def test_while_timers_move_to_it(deploy: Deploy, tcp_proxy: MakeProxy) -> None:
    """From a beat that is alive; then from one that has died."""
    deployment = deploy()
    create_many(deployment)
    (full,) = deployment.start_beats(1)
    wait_until(lambda: deployment.owned_by(full) >= MANY, "it to own all", 10)
    for is_dead in (False, True):
        proxy = tcp_proxy(deployment.store)
        proxy.latency = LATENCY
        if is_dead:
            full.kill()
        other = deployment.start_beat(dtimer_redis_url=proxy.url, broker_url=proxy.url)
        wait_until(lambda other=other: deployment.owned_by(other) > 100, "them to move", 20)
        assert deployment.owned_by(other) < MANY // (1 if is_dead else 2), "in the middle of it"
        assert_all_end({f"dead: {is_dead}": other}, signal.SIGTERM)


def test_while_timers_follow_another_time_zone(deploy: Deploy, tcp_proxy: MakeProxy) -> None:
    deployment = deploy(**AS_SHIPPED)
    create_many(deployment, schedule="0 3 * * *")
    (first,) = deployment.start_beats(1)
    wait_until(lambda: "Dispatch is" in first.log_text(), "it to run")
    first.stop()
    proxy = tcp_proxy(deployment.store)
    proxy.latency = LATENCY
    (before,) = deployment.timers.preview("many-0", 1)
    beat = deployment.start_beat(dtimer_redis_url=proxy.url, timezone="Asia/Tokyo")

    def left() -> int:
        moment_ms = round(before.timestamp() * 1000)
        return int(
            deployment.store.client.zcount(deployment.key("timer_queue"), moment_ms, moment_ms)
        )

    assert left() == MANY
    wait_until(lambda: left() < MANY, "the first to have another time", 20)
    assert_all_end({"rezones": beat}, signal.SIGTERM)
    assert 0 < left() < MANY, "it was in the middle of it"


# ------------------------------------------------------------------ in other processes


def test_a_worker_whose_embedded_beat_can_not_reach_redis(
    deploy: Deploy, tcp_proxy: MakeProxy
) -> None:
    deployment = deploy(**AS_SHIPPED, beat_scheduler="celery_dtimer:DistributedScheduler")
    deployment.create(20, 0.5)
    proxy = tcp_proxy(deployment.store)
    worker = deployment.start_worker(
        *("-B", "-c", "1"), dtimer_redis_url=proxy.url, dtimer_track_runs=False
    )
    wait_until(lambda: len(deployment.entries_ran()) > 5, "runs", 10)
    swallow(proxy)
    deployment.pass_time(1)
    assert worker.stop() < LIMIT + 1  # Celery's pool is ended first, then the beat is waited for
    assert "Traceback" not in worker.log_text()


def test_schedulers_inside_other_programs(
    make_app: MakeApp, redis_server: RedisServer, tcp_proxy: MakeProxy
) -> None:
    """``timers.stop()``, and Celery's own embedded beat in a thread, in every state at once."""
    stops: dict[str, Callable[[], None]] = {}
    faults = {fault: tcp_proxy(redis_server) for fault in (refuse, swallow, slow_down_much)}
    watching = DistributedTimer(make_app())
    for fault, proxy in faults.items():
        app = make_app(
            **AS_SHIPPED,
            broker_url=proxy.url,
            dtimer_redis_url=proxy.url,
            beat_scheduler="celery_dtimer:DistributedScheduler",
            result_expires=None,
        )
        timers = DistributedTimer(app)
        timers.start()
        stops[f"stop(): {fault.__name__}"] = timers.stop
    beat = EmbeddedService(app, thread=True, scheduler_cls=app.conf.beat_scheduler)
    beat.start()
    stops[f"in a thread: {fault.__name__}"] = beat.stop
    wait_until(lambda: len(watching.get_service_instances()) == len(stops), "all to register", 10)
    watching.create_timers(
        [{"name": f"t{n}", "schedule": 0.2, "callback": "record"} for n in range(30)]
    )
    wait_until(lambda: watching.get_counts().sent > 60, "runs", 10)
    for fault, proxy in faults.items():
        fault(proxy)
    took: dict[str, float] = {}

    def stop(name: str) -> None:
        asked = time.monotonic()
        stops[name]()
        took[name] = time.monotonic() - asked

    threads = [threading.Thread(target=stop, args=(name,)) for name in stops]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert took.keys() == stops.keys()
    assert max(took.values()) < LIMIT + 0.5, took  # and the turn of Celery's own loop
