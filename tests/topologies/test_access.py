"""Users with the documented rights alone, sockets, odd passwords, idle connections; case 26."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import redis
from celery import Celery

from celery_dtimer import DistributedTimer, metrics
from celery_dtimer.errors import ConflictError, StoreUnavailableError
from tests.conftest import QUICK, FreshRedis
from tests.failover.deployment import Deployment
from tests.processes import Process
from tests.scraping import scrape
from tests.servers import RedisServer, free_port
from tests.tcp_proxy import TcpProxy
from tests.topologies.access import OPTIONAL, commands_of, documented
from tests.topologies.conftest import DeployOn, MakeStore
from tests.waiting import wait_until

PREFIX = "dtimer:"
APP = "tests.failover.app"


class Access:
    """A server as one of its users reaches it; what a test looks at is the server itself."""

    def __init__(self, server: RedisServer, user: str, database: int = 0) -> None:
        self.client = redis.Redis(port=server.port, db=database, decode_responses=True)
        self.url = f"redis://{user}:secret@127.0.0.1:{server.port}/{database}"


class Guarded:
    """A server with the documented users, and one of the broker's."""

    def __init__(self, server: RedisServer) -> None:
        self.server = server
        for name, rules in {
            **documented(),
            "broker": ["on", ">secret", "~*", "&*", "+@all"],
        }.items():
            server.client.execute_command("ACL", "SETUSER", name, *rules)
        self.beat = Access(server, "dtimer-beat")
        self.worker = Access(server, "dtimer-worker")
        self.api = Access(server, "dtimer-api")
        self.broker = Access(server, "broker", database=1)

    def denied(self) -> set[str]:
        """Return what was asked for and not allowed, in scripts too."""
        log: Any = self.server.client.acl_log(128)
        return {f"{entry['username']}: {entry['object']}" for entry in log}

    def never_called(self) -> set[str]:
        """Return the documented commands that nobody has called."""
        stats: Any = self.server.client.info("commandstats")
        called = {name.removeprefix("cmdstat_") for name in stats}
        return set().union(*map(commands_of, documented().values())) - called


@pytest.fixture
def guarded(fresh_redis: FreshRedis) -> Guarded:
    """A server with the documented users."""
    return Guarded(fresh_redis())


STATIC = {"static": {"task": "record", "schedule": 1.0}}


def test_the_documented_rights_are_enough_and_none_too_many(
    guarded: Guarded, deploy_on: DeployOn
) -> None:
    deployment = deploy_on(
        guarded.api,
        broker=guarded.broker,
        prefix=PREFIX,
        dtimer_batch_size=4,
        dtimer_run_lease=1,
        dtimer_wait_replicas=1,
    )
    timers = deployment.timers
    port = free_port()
    as_beat = {"dtimer_redis_url": guarded.beat.url, "beat_schedule": STATIC}
    as_worker = {"dtimer_redis_url": guarded.worker.url}
    beats = deployment.start_beats(2, **as_beat, dtimer_metrics_port=port)
    worker = deployment.start_worker(**as_worker)
    names = deployment.create(12)
    callbacks = (
        {"name": "callback", "schedule": 1, "callback": f"{APP}.record_timer", "overlap": "skip"},
        {"name": "once", "schedule": 60, "callback": f"{APP}.record_once", "args": ("m", 0)},
        {"name": "parts", "schedule": 60, "callback": "record", "shards": 2},
        {"name": "fails", "schedule": 60, "callback": f"{APP}.fail"},
        {"name": "over", "schedule": 1, "callback": "record", "overlap": "cancel_other"},
    )
    timers.create_timers(list(callbacks))
    for name in ("once", "parts", "fails"):
        timers.trigger_timer(name)
    wait_until(timers.get_dead_letters, "a run to fail", 10)
    expected = {*names, "static", "callback", "parts", "m"}
    wait_until(lambda: expected <= _ran(deployment), "each of them to run", 15)
    assert deployment.modes() == {"atomic"}
    assert scrape(port).of("dtimer_redis_up") == [1]
    _use_the_api(deployment)
    _lose_a_run(deployment, worker, lambda: deployment.start_worker(**as_worker))
    _break_a_timer(deployment, guarded.server)
    _change_beats(deployment, beats, as_beat)
    wait_until(lambda: any(each.unreplicated for each in timers.get_service_instances()), "WAIT")
    assert timers.reshard(2)

    told = {entry.partition(": ")[2] for entry in guarded.denied()}
    assert told <= OPTIONAL, guarded.denied()
    assert guarded.never_called() == set()
    for process in deployment.processes:
        assert "NOPERM" not in process.log_text()
        assert ":secret@" not in process.log_text()


def _ran(deployment: Deployment) -> set[str]:
    """Return the names of the timers that have run, and what the callback with run_once says."""
    entries = deployment.entries_ran()
    return {each.get("message") or each.get("dtimer", each)["name"] for each in entries}


def _use_the_api(deployment: Deployment) -> None:
    """Call what the API has."""
    timers = deployment.timers
    timers.pause_timer("timer-000")
    timers.resume_timer("timer-000")
    timers.stop_timer("timer-001")
    timers.resume_timer("timer-001")
    timers.update_timer("timer-002", schedule=2)
    timers.create_timer("goes", datetime.now(timezone.utc) + timedelta(hours=1), "record")
    timers.delete_timer("goes")
    (letter, *_) = timers.get_dead_letters()
    timers.requeue_dead_letter(letter.id)
    timers.purge_dead_letters()
    assert timers.get_timers()
    assert timers.get_instance_timers(timers.get_service_instances()[0].id)
    assert timers.pending_count()
    assert timers.get_counts().sent
    assert timers.get_runs("callback")
    assert timers.why("timer-003", datetime.now(timezone.utc))
    assert timers.doctor(worker_timeout=0)
    assert "dtimer_service_timers" in metrics.exposition(deployment.app)
    assert all(each.ok for each in timers.audit(datetime.now(timezone.utc) - timedelta(hours=1)))
    instance, *_ = timers.get_service_instances()
    with contextlib.suppress(ConflictError):  # it may be alone
        timers.drain_instance(instance.id)
    timers.undrain_instance(instance.id)
    timers.rebalance()
    assert timers.import_timers(timers.export_timers()).unchanged
    deployment.assert_consistent()
    deployment.app.conf.dtimer_eta_threshold = 0
    waiting = deployment.app.send_task("record", countdown=60)
    assert [each.task_id for each in timers.get_pending()] == [waiting.id]
    assert timers.cancel(waiting.id)


def _lose_a_run(deployment: Deployment, worker: Process, start: Callable[[], Process]) -> None:
    """Kill a worker that runs something; another one runs it again."""
    deployment.timers.create_timer("lost", 3600, f"{APP}.work", resend_lost=True)
    deployment.timers.trigger_timer("lost")

    def begun() -> int:
        return sum(each.get("name") == "lost" for each in deployment.entries_ran())

    wait_until(begun, "the run to begin", 10)
    worker.kill()
    start()
    wait_until(lambda: begun() == 2, "the run to begin again", 20)
    deployment.broker.client.rpush(f"{deployment.queue}.go.lost", "go", "go")


def _break_a_timer(deployment: Deployment, server: RedisServer) -> None:
    """Spoil a definition by hand; its timer is set aside."""
    id = deployment.timers.create_timer("broken", 1, "record")
    server.client.set(f"{deployment.key('timer_definition')}:{id}", "nonsense")
    server.client.hset(f"{deployment.key('timer')}:{id}", "revision", "other")
    wait_until(lambda: deployment.timers.get_timer(id).status == "broken", "it to be broken", 10)


def _change_beats(deployment: Deployment, beats: list[Process], as_beat: dict[str, Any]) -> None:
    """Kill a beat, start another with other code, and stop those that are left in turn."""
    beats[0].kill()
    deployment.wait_registered(beats[1:], 10)
    new = deployment.start_beat(**{**as_beat, "beat_schedule": {}})
    deployment.wait_registered([beats[1], new])
    deployment.wait_balanced()
    beats[1].stop(signal.SIGTERM)
    deployment.wait_registered([new])
    wait_until(lambda: "static" not in deployment.names(), "the static timer to go", 10)


PASSWORD = "p#%@:/[]?+ &é"


@pytest.fixture
def odd(fresh_redis: FreshRedis, tmp_path: Path) -> RedisServer:
    """A server on a port and on a socket, whose user has an odd password."""
    server = fresh_redis("--unixsocket", str(tmp_path / "redis.sock"))
    rules = ("on", f">{PASSWORD}", "~*", "&*", "+@all", "-@dangerous", "-@admin")
    server.client.execute_command("ACL", "SETUSER", "us@er", *rules)
    return server


@pytest.mark.parametrize("kind", ["redis", "redis+socket", "unix"])
def test_any_password_any_database_and_any_way_in(
    odd: RedisServer, make_store: MakeStore, tmp_path: Path, kind: str
) -> None:
    secret = f"us%40er:{quote(PASSWORD, safe='')}@"
    url = {
        "redis": f"redis://{secret}127.0.0.1:{odd.port}/15?timeout=3&health_check_interval=1",
        "redis+socket": f"redis+socket://{secret}{tmp_path}/redis.sock?virtual_host=15",
        "unix": f"unix://{secret}{tmp_path}/redis.sock?db=15",
    }[kind]
    store = make_store("memory://", dtimer_redis_url=url)
    assert store.register("a", {}).epoch
    assert store.configuration(["maxmemory"]) == {}
    with redis.Redis(port=odd.port, db=15) as client:
        assert client.exists(store.keys("meta"))


@pytest.mark.parametrize(
    "part", ["us%40er:wrong-pa55word@", "nob0dy:wrong-pa55word@", ":wrong-pa55word@"]
)
def test_a_wrong_password_is_one_line_that_does_not_tell_it(
    fresh_redis: FreshRedis, make_store: MakeStore, part: str
) -> None:
    server = fresh_redis("--requirepass", "right", running=False)
    server.client = redis.Redis(port=server.port, password="right", decode_responses=True)
    server.start()
    store = make_store("memory://", dtimer_redis_url=f"redis://{part}127.0.0.1:{server.port}/0")
    with pytest.raises(StoreUnavailableError, match="does not answer") as caught:
        store.now_ms()
    assert "\n" not in str(caught.value)
    assert "pa55word" not in str(caught.value) + repr(store.settings) + repr(store.client)


def test_idle_connections_that_a_proxy_cuts_cost_no_run_and_no_storm_of_lines(
    fresh_redis: FreshRedis, tcp_proxy: Callable[[RedisServer], TcpProxy], deploy_on: DeployOn
) -> None:
    server = fresh_redis()
    proxy = tcp_proxy(server)

    class Behind:
        url, client = proxy.url, server.client

    deployment = deploy_on(Behind, broker=server, dtimer_heartbeat_interval=0.6)
    beats = deployment.start_beats(2)
    names = deployment.create(10)
    deployment.wait_firing(names)
    epochs = deployment.epochs()
    for _ in range(4):
        deployment.pass_time(0.45)  # between two runs
        proxy.cut()
    deployment.wait_sent(names, deployment.now_ms())
    assert deployment.epochs() == epochs
    deployment.ledger.assert_nothing_doubled()
    deployment.assert_accounted(names, 1000)
    for beat in beats:
        lines = [line for line in beat.log_text().splitlines() if "does not answer" in line]
        assert len(lines) <= 8, lines  # what was in the middle of a call


def test_the_brokers_key_prefix_leaves_the_timers_keys_alone(fresh_redis: FreshRedis) -> None:
    server = fresh_redis()
    app = Celery("orders", broker=server.url, set_as_current=False)
    app.conf.update(broker_transport_options={"global_keyprefix": "kombu:"}, **QUICK)
    timers = DistributedTimer(app)

    @app.task(name="task")
    def task() -> None:
        """Do nothing."""

    timers.create_timer("soon", 0.1, "task")
    timers.start()
    try:
        wait_until(lambda: timers.get_timer("soon").total_run_count, "a run")
        assert {each.dispatch for each in timers.get_service_instances()} == {"atomic"}
        assert server.client.llen("kombu:celery")
        assert server.client.exists("meta:{orders}")
    finally:
        timers.stop()
        app.close()
