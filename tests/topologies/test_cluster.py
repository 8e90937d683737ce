"""A service on a cluster, whose slot moves and whose node dies while beats fire; case 25."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from celery import Celery

from celery_dtimer import DistributedScheduler, DistributedTimer
from celery_dtimer.errors import SettingsError, StoreError, StoreUnavailableError
from celery_dtimer.model import Definition
from celery_dtimer.schedules import Interval
from celery_dtimer.services import find_services
from celery_dtimer.store import Store
from tests.conftest import FreshRedis
from tests.failover.deployment import TAKEOVER
from tests.topologies.access import OPTIONAL, documented
from tests.topologies.conftest import DeployOn, MakeCluster, MakeStore
from tests.topologies.servers import Cluster
from tests.waiting import wait_until

BROKER = "memory://"


@pytest.fixture(scope="module")
def cluster(server_program: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two masters; tests leave the slot whole, on either."""
    cluster = Cluster(server_program, tmp_path_factory.mktemp("cluster"))
    try:
        yield cluster.start()
    finally:
        cluster.close()


@pytest.fixture
def store(cluster: Cluster, make_store: MakeStore) -> Store:
    """A service on it, with an instance and timers."""
    store = make_store(BROKER, dtimer_redis_url=cluster.url, dtimer_instance_timeout=3)
    store.register("a", {})
    store.save([Definition(f"timer-{n}", "task", Interval(1000)) for n in range(20)])
    return store


def read_all(store: Store) -> tuple[int, int, int, int]:
    """Read the service in every way that a store has: singly, piped, scanned, by script."""
    now_ms, states = store.states(store.timer_ids())
    (instance,) = store.instances()
    assert abs(now_ms - store.now_ms()) < 5000
    there = [state for state in states if state is not None]
    return (
        len(there),
        len(store.timers([state.id for state in there])),
        instance.timers,
        len(store.scores("timer_queue")),
    )


def test_a_store_follows_its_slot(cluster: Cluster, store: Store) -> None:
    assert read_all(store) == (20, 20, 20, 20)
    move = cluster.move()
    move.end()
    assert read_all(store) == (20, 20, 20, 20)
    (epoch,) = [each.epoch for each in store.instances()]
    assert store.heartbeat("a", epoch).members == 1
    node = store.client.connection_pool.connection_kwargs["port"]
    assert node == move.target.port == cluster.owner.port


def test_single_keys_are_read_where_they_are_and_scripts_wait_for_the_whole_slot(
    cluster: Cluster, store: Store
) -> None:
    (epoch,) = [each.epoch for each in store.instances()]
    move = cluster.move()
    move.carry(30)
    states = store.states([Definition(f"timer-{n}", "task", Interval(1000)).id for n in range(20)])[
        1
    ]
    assert all(states)
    with pytest.raises(StoreUnavailableError, match="can not serve now"):
        store.heartbeat("a", epoch)

    ending = threading.Timer(0.2, move.end)
    ending.start()
    assert store.heartbeat("a", epoch).members == 1  # it has waited
    ending.join()
    assert read_all(store) == (20, 20, 20, 20)


def test_the_time_is_that_of_the_node_which_has_the_slot(cluster: Cluster, store: Store) -> None:
    store.now_ms()
    move = cluster.move()
    move.end()
    for server in (move.source, move.target):
        server.client.config_resetstat()
    store.now_ms()
    store.states(["nobody"])
    calls = [
        server.client.info("commandstats").get("cmdstat_time", {}).get("calls", 0)  # type: ignore[union-attr]
        for server in (move.source, move.target)
    ]
    assert calls == [0, 2]


def test_wake_ups_are_heard_wherever_the_slot_is(
    cluster: Cluster, store: Store, make_store: MakeStore
) -> None:
    woken, stopped = threading.Event(), threading.Event()
    listener = Store(store.settings)
    thread = threading.Thread(target=listener.listen, args=("a", woken.set, stopped))
    thread.start()
    try:
        wait_until(woken.is_set, "the subscription")
        cluster.move().end()
        woken.clear()
        store.save([Definition("soon", "task", Interval(100))])
        wait_until(woken.is_set, "a wake-up from the slot's new node")
    finally:
        stopped.set()
        thread.join()
        listener.close()


def test_a_slot_that_moves_under_beats_costs_no_run(
    cluster: Cluster, deploy_on: DeployOn, fresh_redis: FreshRedis
) -> None:
    deployment = deploy_on(cluster, broker=fresh_redis())
    beats = deployment.start_beats(2)
    names = deployment.create(20)
    deployment.wait_firing(names)
    assert deployment.modes() == {"confirmed"}
    epochs = deployment.epochs()
    for _ in range(2):
        move = cluster.move()
        while move.carry(10):
            deployment.pass_time(0.02)
        move.end()
        deployment.wait_sent(names, deployment.now_ms())
    assert all(beat.is_running() for beat in beats)
    assert deployment.epochs() == epochs
    deployment.ledger.assert_nothing_doubled()
    deployment.ledger.assert_on_the_grid(1000)
    deployment.assert_accounted(names, 1000)


def test_a_node_that_dies_is_replaced_by_its_replica(
    make_cluster: MakeCluster, deploy_on: DeployOn, fresh_redis: FreshRedis
) -> None:
    cluster = make_cluster(masters=3, replicas=1)
    deployment = deploy_on(cluster, broker=fresh_redis())
    beats = deployment.start_beats(2)
    names = deployment.create(20)
    deployment.wait_firing(names)
    owner = cluster.owner
    owner.kill()
    wait_until(lambda: cluster.owner is not owner, "the replica to take over", 20)
    promoted_ms = deployment.now_ms()
    deployment.wait_sent(names, promoted_ms, TAKEOVER + 6)
    assert all(beat.is_running() for beat in beats)
    deployment.ledger.assert_doubles_are_recognizable()
    deployment.assert_accounted(names, 1000)
    for beat in beats:
        lines = [line for line in beat.log_text().splitlines() if "ERROR" in line]
        assert len(lines) <= 2, lines


def test_the_documented_rights_are_enough_on_a_cluster(
    cluster: Cluster, make_store: MakeStore
) -> None:
    rules = [*documented()["dtimer-beat"], "+cluster|slots", "+asking"]
    for server in cluster.servers:
        server.client.execute_command("ACL", "SETUSER", "limited", *rules)
        server.client.acl_log_reset()
    url = cluster.url.replace("://", "://limited:secret@")
    store = make_store(BROKER, dtimer_redis_url=url, dtimer_key_prefix="dtimer:")
    store.register("a", {})
    timers = [Definition(f"timer-{n}", "task", Interval(1000)) for n in range(20)]
    store.save(timers)
    move = cluster.move()
    move.carry(30)
    assert all(store.states([timer.id for timer in timers])[1])
    move.end()
    assert read_all(store) == (20, 20, 20, 20)
    for server in cluster.servers:
        log: Any = server.client.acl_log(128)
        assert {str(entry["object"]) for entry in log} <= OPTIONAL


def test_one_node_of_a_cluster_says_that_it_is_one(cluster: Cluster, make_store: MakeStore) -> None:
    other = make_store(cluster.other.url)
    with pytest.raises(StoreError, match=r"is a node of a cluster.* redis\+cluster://"):
        other.register("a", {})
    own = make_store(cluster.owner.url)
    assert own.register("a", {}).epoch  # it has the slot


def test_a_cluster_whose_nodes_are_gone_is_one_line(make_store: MakeStore) -> None:
    store = make_store(BROKER, dtimer_redis_url="redis+cluster://u:secret@127.0.0.1:1,127.0.0.1:2")
    with pytest.raises(StoreUnavailableError, match="does not answer") as caught:
        store.now_ms()
    assert "secret" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_atomic_dispatch_can_not_be_had_on_a_cluster() -> None:
    app = Celery("orders", broker="redis://localhost", set_as_current=False)
    app.conf.update(dtimer_redis_url="redis+cluster://localhost:1", dtimer_dispatch="atomic")
    with pytest.raises(SettingsError, match="the timers are on a Redis Cluster"):
        DistributedScheduler(app)


def test_the_public_api_works_on_a_cluster(cluster: Cluster, fresh_redis: FreshRedis) -> None:
    app = Celery("orders", broker=fresh_redis().url, set_as_current=False)
    app.conf.update(dtimer_redis_url=cluster.url, dtimer_eta_threshold=0)
    app.conf.dtimer_key_prefix = f"t{uuid.uuid4().hex[:10]}:"
    timers = DistributedTimer(app)

    @app.task(name="task")
    def task() -> None:
        """Do nothing."""

    timers.create_timers(
        [{"name": f"t{n}", "schedule": 60, "callback": "task"} for n in range(150)]
    )
    timers.pause_timer("t1")
    timers.resume_timer("t1")
    timers.trigger_timer("t2")
    timers.update_timer("t3", schedule=30)
    waiting = task.apply_async(countdown=60)
    assert [each.task_id for each in timers.get_pending()] == [waiting.id]
    assert timers.cancel(waiting.id)
    timers.delete_timer("t4")
    assert len(timers.get_timers()) == 149
    assert timers.check_consistency() == []
    assert timers.get_runs() == timers.get_dead_letters() == []
    app.close()


def test_services_are_found_on_all_masters_of_a_cluster(cluster: Cluster, store: Store) -> None:
    names = {f"service-{number}" for number in range(12)}
    for name in names:
        other = Store(replace(store.settings, service=name))
        other.register("a", {})
        other.close()
    found = find_services(store.settings)
    assert {each.name for each in found} == {*names, store.settings.service}
    assert {each.instances for each in found} == {1}
