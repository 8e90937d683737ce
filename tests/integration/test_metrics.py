"""Metrics by HTTP: of embedded schedulers that send runs, die, meet outages and share a process."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
from typing import Any

import pytest
from celery import Celery

from celery_dtimer import DistributedScheduler, DistributedTimer, SettingsError, metrics
from celery_dtimer.errors import StoreUnavailableError
from celery_dtimer.metrics import FAMILIES
from celery_dtimer.model import UNASSIGNED
from celery_dtimer.settings import Settings
from celery_dtimer.sharding import Shards
from celery_dtimer.store import Store
from tests.conftest import FreshRedis, MakeApp
from tests.integration.conftest import Service, StartTimers
from tests.scraping import Scraped, scrape
from tests.servers import RedisServer, free_port
from tests.waiting import wait_until


def served(app: Celery, service: str | None = None) -> int:
    """Return the port on which this process serves an app's metrics, once it does."""
    settings = Settings.from_app(app, service)
    return wait_until(lambda: metrics.port_of(settings), "metrics to be served")


def scraped(app: Celery) -> Scraped:
    return scrape(served(app))


def create(timers: DistributedTimer, count: int, every: float = 0.1) -> None:
    timers.create_timers(
        {"name": f"timer-{i}", "schedule": every, "callback": "record"} for i in range(count)
    )


def threads() -> list[str]:
    return [each.name for each in threading.enumerate() if "metrics" in each.name]


# ------------------------------------------------------------------ what is told


def test_what_an_instance_does_is_told(make_app: MakeApp, start_timers: StartTimers) -> None:
    app = make_app(dtimer_metrics_port=0, result_expires=None)
    timers = start_timers(app)
    create(timers, 5)
    wait_until(lambda: timers.get_counts().sent >= 20, "runs")
    timers.pause_timer("timer-0")
    found = scraped(app)
    own = {"service": "orders", "instance_id": timers.get_service_instances()[0].id}
    assert found.of("dtimer_redis_up", **own) == [1]
    assert found.of("dtimer_instance_has_lease", **own) == [1]
    assert found.of("dtimer_instance_broker_up", **own) == [1]
    assert found.of("dtimer_instance_info", dispatch="atomic", **own) == [1]
    assert found.sum("dtimer_instance_timers", **own) == 4
    assert 0 <= found.sum("dtimer_instance_heartbeat_age_seconds", **own) < 1.5
    sent = found.sum("dtimer_instance_sent_total", **own)
    assert sent >= 20
    assert found.sum("dtimer_instance_lag_seconds_count", **own) == sent
    assert 0 < found.sum("dtimer_instance_lag_seconds_sum", **own) < sent
    calls = found.sum("dtimer_instance_script_seconds_count", script="commit", **own)
    assert 0 < calls <= sent + 1
    assert found.sum("process_resident_memory_bytes") > 1_000_000
    assert found.has_one_sample_each()


def test_what_a_service_has_is_told(make_app: MakeApp, start_timers: StartTimers) -> None:
    app = make_app(dtimer_metrics_port=0, result_expires=None)
    timers = start_timers(app)
    create(timers, 6, every=3600)
    timers.pause_timer("timer-0")
    timers.stop_timer("timer-1")
    timers.stop_timer("timer-2")
    wait_until(
        lambda: timers.get_service_instances() and not timers.pending_count(UNASSIGNED),
        "the instance to have them",
    )
    found = scraped(app)
    statuses = {"active": 3, "paused": 1, "stopped": 2, "broken": 0, "finished": 0}
    for status, count in statuses.items():
        assert found.of("dtimer_service_timers", service="orders", status=status) == [count]
    assert found.of("dtimer_service_instances", state="live") == [1]
    assert found.of("dtimer_service_instances", state="silent") == [0]
    for name in ("timers_due", "timers_overdue", "timers_unassigned", "dead_letters"):
        assert found.of(f"dtimer_service_{name}") == [0]


def test_every_family_is_told_as_it_is_described(
    make_app: MakeApp, start_timers: StartTimers
) -> None:
    app = make_app(dtimer_metrics_port=0)
    timers = start_timers(app)
    create(timers, 1)
    wait_until(lambda: timers.get_counts().sent, "a run")
    found = scraped(app)
    ours = [each for each in found.families.values() if each.name.startswith("dtimer_")]
    told = {
        (
            f"{each.name}_total" if each.type == "counter" else each.name,
            each.type,
            frozenset(each.samples[0].labels) - {"le"},
        )
        for each in ours
        if each.samples
    }
    assert told == {(each.name, each.kind, frozenset(each.labels)) for each in FAMILIES}


def test_the_counters_of_a_service_are_those_of_its_instances(
    make_app: MakeApp, start_timers: StartTimers
) -> None:
    """Two instances of one process: a port, one service, and sums that fit."""
    apps = [make_app(dtimer_metrics_port=0) for _ in range(2)]
    timers = [start_timers(app) for app in apps]
    wait_until(lambda: len(timers[0].get_service_instances()) == 2, "both")
    create(timers[0], 10)
    wait_until(
        lambda: all(each.sent > 5 for each in timers[0].get_service_instances()), "runs of both"
    )
    for i in range(10):
        timers[0].pause_timer(f"timer-{i}")
    assert served(apps[0]) == served(apps[1])

    def is_equal() -> bool:
        found = scraped(apps[0])
        assert len(found.of("dtimer_service_sent_total")) == 1
        assert len(found.of("dtimer_instance_sent_total")) == 2
        assert found.has_one_sample_each()
        return found.sum("dtimer_instance_sent_total") == found.sum("dtimer_service_sent_total")

    wait_until(is_equal, "the sums to be equal")
    assert scraped(apps[0]).of("dtimer_service_instances", state="live") == [2]


def test_two_services_of_a_process_are_told_apart(
    make_app: MakeApp, start_timers: StartTimers
) -> None:
    conf = {"dtimer_metrics_port": 0, "result_expires": None}
    apps = [make_app(dtimer_service=name, **conf) for name in ("one", "two")]
    for count, app in enumerate(apps, 1):
        create(start_timers(app), count, every=3600)
    found = scraped(apps[0])
    active = {"status": "active"}
    assert found.of("dtimer_service_timers", service="one", **active) == [1]
    assert found.of("dtimer_service_timers", service="two", **active) == [2]


def test_shards_are_added_up(make_app: MakeApp, start_timers: StartTimers) -> None:
    app = make_app(dtimer_metrics_port=0, dtimer_shards=4, result_expires=None)
    timers = start_timers(app)
    create(timers, 20)
    wait_until(lambda: timers.get_counts().sent >= 40, "runs")
    for i in range(20):
        timers.pause_timer(f"timer-{i}")

    def is_whole() -> bool:
        found = scraped(app)
        assert found.of("dtimer_instance_has_lease") == [1]
        assert found.of("dtimer_service_instances", state="live") == [1]
        return found.sum("dtimer_instance_sent_total") == found.sum("dtimer_service_sent_total")

    wait_until(is_whole, "the sums to be equal")
    assert scraped(app).sum("dtimer_service_timers") >= 20


def test_the_timers_of_the_dead_are_a_failover(
    make_app: MakeApp, start_timers: StartTimers
) -> None:
    app = make_app(dtimer_metrics_port=0, result_expires=None)
    dead = Store(Settings.from_app(app))
    dead.register("dead", {"service": "orders"})
    timers = DistributedTimer(app)
    create(timers, 4, every=3600)
    start_timers(app)
    found = wait_until(
        lambda: (it := scraped(app)).sum("dtimer_instance_failover_seconds_count") and it,
        "the failover",
    )
    assert found.of("dtimer_instance_failover_seconds_count") == [1]
    assert 1.5 <= found.sum("dtimer_instance_failover_seconds_sum") < 4
    assert 0 < found.sum("dtimer_instance_failover_timers_total") <= 4
    assert found.of("dtimer_service_instances", state="live") == [1]
    dead.close()


def test_a_silent_instance_is_seen_before_it_is_dead(service: Service) -> None:
    app = Celery("orders", set_as_current=False)
    app.conf.update(
        broker_url=service.settings.redis_url,
        dtimer_redis_url=service.settings.redis_url,
        dtimer_key_prefix=service.settings.key_prefix,
    )
    service.clock.now_ms = service.redis.time()[0] * 1000 - 60_000
    service.join("silent")
    service.clock.advance(60)
    service.join("live")
    found = Scraped(metrics.exposition(app))
    assert found.of("dtimer_service_instances", state="silent") == [1]
    assert found.of("dtimer_service_instances", state="live") == [1]


def test_the_service_is_told_without_an_instance(make_app: MakeApp) -> None:
    app = make_app()
    create(DistributedTimer(app), 3, every=3600)
    found = Scraped(metrics.exposition(app))
    assert found.of("dtimer_service_timers", status="active") == [3]
    assert found.of("dtimer_service_timers_unassigned") == [3]
    assert found.of("dtimer_service_instances", state="live") == [0]
    assert all(name.startswith("dtimer_service_") for name in found.families)


def test_the_service_of_a_redis_that_is_down_is_an_error(make_app: MakeApp) -> None:
    app = make_app(dtimer_redis_url="redis://:pa55word@127.0.0.1:1/0")
    with pytest.raises(StoreUnavailableError) as caught:
        metrics.exposition(app)
    assert "pa55word" not in str(caught.value)


# ------------------------------------------------------------------ what it costs


def test_what_is_set_aside_is_counted_in_parts(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 25 timers, a scrape that looks at eight knows how many are paused at the fourth time."""
    monkeypatch.setattr(metrics, "_PAGE", 3)
    monkeypatch.setattr(metrics, "_LOOKED_AT", 8)
    for timer in service.add_many(25):
        service.store.pause(timer.id)
    seconds = 1.0
    counting = metrics._SetAside(lambda: seconds)
    looked_at: list[int] = []
    look = Store.set_aside

    def and_count(store: Store, offset: int, limit: int) -> Any:
        looked_at.append(limit)
        return look(store, offset, limit)

    monkeypatch.setattr(Store, "set_aside", and_count)
    answers = []
    for _ in range(4):
        looked_at.clear()
        answers.append(counting.read([service.store]))
        assert sum(looked_at) <= 8 + 3
    assert answers == [None, None, None, {"paused": 25}]
    looked_at.clear()
    assert counting.read([service.store]) == {"paused": 25}
    assert not looked_at, "what was counted lately is not counted again"
    service.store.delete([timer.id for timer in service.store.timers(service.store.timer_ids(20))])
    seconds += metrics._COUNT_AGAIN
    assert counting.read([service.store]) == {"paused": 5}


def test_other_shards_do_not_disturb_the_count(service: Service) -> None:
    service.store.pause(service.add().id)
    seconds = 1.0
    counting = metrics._SetAside(lambda: seconds)
    assert counting.read([service.store, service.store]) == {"paused": 2}
    seconds += metrics._COUNT_AGAIN
    assert counting.read([service.store]) == {"paused": 1}


# ------------------------------------------------------------------ outages


def test_a_scrape_without_redis_tells_what_the_process_knows(
    make_app: MakeApp, fresh_redis: FreshRedis, caplog: pytest.LogCaptureFixture
) -> None:
    server = fresh_redis()
    app = make_app(broker_url=server.url, dtimer_metrics_port=0)
    timers = DistributedTimer(app)
    timers.start()
    create(timers, 3)
    wait_until(lambda: timers.get_counts().sent >= 6, "runs")
    port = served(app)
    before = scrape(port).sum("dtimer_instance_sent_total")
    server.kill()
    with caplog.at_level(logging.DEBUG, "celery_dtimer.metrics"):
        for _ in range(3):
            found = scrape(port)
            assert found.of("dtimer_redis_up") == [0]
            assert found.sum("dtimer_instance_sent_total") >= before
            assert not found.of("dtimer_service_sent_total")
    told = [each for each in caplog.records if "can not be read" in each.message]
    assert [each.levelno for each in told] == [logging.WARNING, logging.DEBUG, logging.DEBUG]
    wait_until(lambda: scrape(port).of("dtimer_instance_has_lease") == [0], "the lease to end")
    server.start()
    wait_until(lambda: scrape(port).of("dtimer_redis_up") == [1], "Redis to be back", 10)
    timers.stop()


def test_a_scrape_does_not_wait_long_for_a_frozen_redis(
    make_app: MakeApp, fresh_redis: FreshRedis
) -> None:
    server = fresh_redis()
    app = make_app(broker_url=server.url, dtimer_metrics_port=0)
    timers = DistributedTimer(app)
    timers.start()
    port = served(app)
    assert scrape(port).of("dtimer_redis_up") == [1]
    server.freeze()
    started = time.monotonic()
    assert scrape(port).of("dtimer_redis_up") == [0]
    assert time.monotonic() - started < metrics._SCRAPE + 1
    server.thaw()
    wait_until(lambda: scrape(port).of("dtimer_redis_up") == [1], "Redis to be back", 10)
    timers.stop()


def test_a_scrape_ends_though_what_it_waits_for_does_not(
    make_app: MakeApp, start_timers: StartTimers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look-up of a name, say, has no limit: one thread waits for it, however many scrapes."""
    monkeypatch.setattr(metrics, "_SCRAPE", 0.2)
    app = make_app(dtimer_metrics_port=0)
    start_timers(app)
    port = served(app)
    goes_on = threading.Event()
    counters = Shards.counters
    monkeypatch.setattr(Shards, "counters", lambda shards: goes_on.wait(20) and counters(shards))
    try:
        for _ in range(3):
            assert scrape(port).of("dtimer_redis_up") == [0]
        assert threads().count("dtimer-metrics-read") == 1
    finally:
        goes_on.set()
    wait_until(lambda: scrape(port).of("dtimer_redis_up") == [1], "the read to go on")


def test_a_mistake_in_metrics_stops_neither_the_scrape_nor_the_dispatch(
    make_app: MakeApp, start_timers: StartTimers, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: Shards) -> dict[str, int]:
        raise RuntimeError("a mistake")

    app = make_app(dtimer_metrics_port=0)
    timers = start_timers(app)
    create(timers, 2)
    before = wait_until(lambda: timers.get_counts().sent, "runs")
    with monkeypatch.context() as patch:
        patch.setattr(Shards, "counters", fail)
        found = scraped(app)
        assert found.of("dtimer_redis_up") == [0]
        assert found.sum("dtimer_instance_sent_total") > 0
    wait_until(lambda: timers.get_counts().sent > before + 4, "more runs")


# ------------------------------------------------------------------ the server


def test_nothing_is_served_unless_it_is_asked_for(
    make_app: MakeApp, start_timers: StartTimers
) -> None:
    app = make_app()
    start_timers(app)
    assert not threads()
    assert metrics.port_of(Settings.from_app(app)) is None


def test_it_ends_with_the_last_scheduler(make_app: MakeApp) -> None:
    app = make_app(dtimer_metrics_port=free_port())
    first, second = DistributedTimer(app), DistributedTimer(app)
    first.start()
    second.start()
    port = served(app)
    wait_until(lambda: len(scrape(port).of("dtimer_redis_up")) == 2, "both to be told of")
    first.stop()
    assert len(scrape(port).of("dtimer_redis_up")) == 1
    second.stop()
    assert not threads()
    with pytest.raises(urllib.error.URLError):
        scrape(port)
    first.start()  # and again
    assert served(app) == port
    assert scrape(port).of("dtimer_redis_up") == [1]
    first.stop()


def test_a_port_that_is_taken_is_one_error_and_is_had_later(
    make_app: MakeApp,
    start_timers: StartTimers,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(metrics, "_BIND_AGAIN", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        app = make_app(dtimer_metrics_port=port)
        timers = start_timers(app)
        create(timers, 2)
        wait_until(lambda: timers.get_counts().sent >= 10, "runs")
        errors = [each for each in caplog.records if "can not be served" in each.message]
        assert [each.levelno for each in errors] == [logging.ERROR]
        assert f"127.0.0.1:{port}" in errors[0].message
    assert served(app) == port
    assert scrape(port).of("dtimer_redis_up") == [1]


def test_a_scheduler_that_waits_for_its_port_ends_at_once(make_app: MakeApp) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        timers = DistributedTimer(make_app(dtimer_metrics_port=taken.getsockname()[1]))
        timers.start()
        wait_until(lambda: timers.get_service_instances(), "it to register")
        started = time.monotonic()
        timers.stop()
        assert time.monotonic() - started < 1.5
    assert not threads()


FORKS = """
import os, sys, time
from celery import Celery
from celery_dtimer import DistributedTimer, metrics
app = Celery("orders")
app.conf.update(broker_url=sys.argv[1], dtimer_key_prefix=sys.argv[2])
app.conf.dtimer_metrics_port = int(sys.argv[3])
timers = DistributedTimer(app)
timers.start()
while metrics.port_of(timers.store.settings) is None or not timers.get_service_instances():
    time.sleep(0.01)
child = os.fork()
if not child:
    time.sleep(60)
    os._exit(0)
timers.stop()
print(child, flush=True)
os._exit(0)
"""


def test_a_forked_child_does_not_keep_the_port(redis_server: RedisServer, prefix: str) -> None:
    port = free_port()
    command = [sys.executable, "-W", "ignore", "-c", FORKS, redis_server.url, prefix, str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
    try:
        with socket.create_server(("127.0.0.1", port)):
            os.kill(child, 0)  # it lives
    finally:
        os.kill(child, signal.SIGKILL)


def test_the_host_is_where_it_listens(make_app: MakeApp, start_timers: StartTimers) -> None:
    app = make_app(dtimer_metrics_port=0, dtimer_metrics_host="127.0.0.2")
    start_timers(app)
    port = served(app)
    assert scrape(port, "127.0.0.2").of("dtimer_redis_up") == [1]
    with pytest.raises(urllib.error.URLError):
        scrape(port)


def test_a_missing_package_is_refused_at_start(
    make_app: MakeApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(SettingsError, match=r'pip install "celery-dtimer\[metrics\]"') as caught:
        DistributedScheduler(make_app(dtimer_metrics_port=9810))
    assert str(caught.value).startswith("dtimer_metrics_port=9810 ")
    DistributedScheduler(make_app(), embedded=True).close()  # nobody else needs it


def test_nothing_secret_is_told(make_app: MakeApp, fresh_redis: FreshRedis) -> None:
    server = fresh_redis("--requirepass", "pa55word", running=False)
    server.process.start()
    url = f"redis://:pa55word@127.0.0.1:{server.port}/0"
    app = make_app(broker_url=url, dtimer_metrics_port=0)
    timers = DistributedTimer(app)
    timers.start()
    port = served(app)
    found = wait_until(lambda: (it := scrape(port)).of("dtimer_redis_up") == [1] and it, "Redis")
    assert "pa55word" not in found.text
    timers.stop()
