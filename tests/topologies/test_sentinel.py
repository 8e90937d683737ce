"""A master that sentinels know fails over while beats fire; case 24 of real use."""

from __future__ import annotations

from datetime import datetime

import pytest
from celery import Celery

from celery_dtimer.atomic import Atomic
from celery_dtimer.errors import StoreUnavailableError
from celery_dtimer.publisher import Publisher
from tests.conftest import FreshRedis
from tests.failover.deployment import TAKEOVER, Deployment
from tests.ledger import Ledger
from tests.topologies.access import OPTIONAL
from tests.topologies.conftest import DeployOn, MakeSentinels, MakeStore
from tests.topologies.servers import Sentinels
from tests.waiting import wait_until

SECRETS = {"password": "d@ta", "sentinel_password": "watch"}

#: A replica is promoted, everybody has two heartbeat intervals to be heard, and back-off ends.
RECOVERY = TAKEOVER + 6


@pytest.fixture
def sentinels(make_sentinels: MakeSentinels) -> Sentinels:
    """A master and its replica, without passwords."""
    return make_sentinels()


def moments(deployment: Deployment) -> list[tuple[int, int]]:
    """Return the spans that instances say were lost, in ms."""

    def milliseconds(moment: datetime | None) -> int:
        assert moment is not None
        return round(moment.timestamp() * 1000)

    return [
        (milliseconds(each.replayed_from), milliseconds(each.replayed_until))
        for each in deployment.timers.get_service_instances()
        if each.replays
    ]


def told(deployment: Deployment, text: str) -> int:
    """Return how many lines of all logs have a text."""
    return sum(
        text in line for process in deployment.processes for line in process.log_text().splitlines()
    )


def wait_outage_seen_once(deployment: Deployment) -> None:
    """Fail when an outage was told more than once by a thread of a beat."""
    for process in deployment.processes:
        lines = [line for line in process.log_text().splitlines() if "does not answer" in line]
        assert len(lines) <= 2, lines  # the loop and the membership


def test_a_planned_failover_needs_no_restart_and_doubles_nothing(
    make_sentinels: MakeSentinels, deploy_on: DeployOn
) -> None:
    sentinels = make_sentinels(password="data", sentinel_password="watch")
    deployment = deploy_on(sentinels, broker_transport_options=sentinels.options)
    beats = deployment.start_beats(2)
    names = deployment.create(20)
    wait_until(lambda: deployment.modes() == {"atomic"}, "dispatch to be atomic", 10)
    epochs = deployment.epochs()

    master = sentinels.fail_over()
    promoted_ms = deployment.now_ms()
    ledger = deployment.read_from(sentinels.url_of(master))
    deployment.wait_sent(names, promoted_ms, RECOVERY)

    assert all(beat.is_running() for beat in beats)
    assert deployment.epochs() == epochs
    ledger.assert_nothing_doubled()
    ledger.assert_on_the_grid(1000)
    deployment.assert_accounted(names, 1000)
    wait_outage_seen_once(deployment)
    for secret in ("data", "watch"):
        assert not told(deployment, f":{secret}@")


def test_what_the_promoted_replica_lacks_is_replayed_and_the_span_is_told(
    sentinels: Sentinels, deploy_on: DeployOn
) -> None:
    deployment = deploy_on(sentinels, broker_transport_options=sentinels.options)
    beats = deployment.start_beats(2)
    names = deployment.create(20)
    old, (replica,) = sentinels.master, sentinels.servers[1:]
    before = deployment.read_from(sentinels.url_of(old))
    deployment.wait_sent(names, 1)

    replica.freeze()
    old.client.execute_command("CLIENT", "KILL", "TYPE", "replica")
    cut_ms = deployment.now_ms()
    deployment.wait_sent(names, cut_ms + 500)
    old.kill()
    replica.thaw()
    replica.client.ping()
    kept = {run.slot for run in Ledger.of_queue(replica.client, deployment.queue).runs}
    assert sentinels.wait_promoted(old) is replica
    promoted_ms = deployment.now_ms()
    after = deployment.read_from(sentinels.url_of(replica))
    deployment.wait_sent(names, promoted_ms, RECOVERY)

    assert all(beat.is_running() for beat in beats)
    wait_until(lambda: len(moments(deployment)) == 2, "both beats to tell the span", 5)
    after.assert_nothing_doubled()  # what the replica has is whole: messages and state
    deployment.assert_accounted(names, 1000)
    lost = [run for run in before.runs if run.slot not in kept]
    assert {run.name for run in lost} == set(names)
    Ledger([*before.runs, *after.runs]).assert_doubles_are_recognizable()
    spans = moments(deployment)
    for run in lost:
        assert min(spans)[0] <= run.seen_ms <= max(until for _, until in spans)
    assert told(deployment, "Redis has lost what it confirmed from") == 2
    entries = deployment.timers.store.history(0)
    noted = sorted(entry["replayed"] for entry in entries if "replayed" in entry)
    assert noted == sorted(f"{since} {until}" for since, until in spans)
    wait_outage_seen_once(deployment)


def test_a_failover_of_the_timers_with_another_broker_loses_no_run(
    sentinels: Sentinels, deploy_on: DeployOn, fresh_redis: FreshRedis
) -> None:
    deployment = deploy_on(sentinels, broker=fresh_redis(), dtimer_redis_options=sentinels.options)
    beats = deployment.start_beats(2)
    names = deployment.create(20)
    deployment.wait_firing(names)
    assert deployment.modes() == {"confirmed"}

    old = sentinels.master
    old.kill()
    sentinels.wait_promoted(old)
    promoted_ms = deployment.now_ms()
    deployment.wait_sent(names, promoted_ms, RECOVERY)
    assert all(beat.is_running() for beat in beats)
    deployment.ledger.assert_doubles_are_recognizable()
    deployment.ledger.assert_on_the_grid(1000)
    deployment.assert_accounted(names, 1000)


def test_a_caller_goes_on_with_the_new_master(
    make_sentinels: MakeSentinels, make_store: MakeStore
) -> None:
    sentinels = make_sentinels(**SECRETS)
    store = make_store(sentinels.url, broker_transport_options=sentinels.options)
    store.register("a", {})
    before = sentinels.master
    sentinels.fail_over()  # the old one lives, and goes on to take writes for eight seconds

    def registered() -> bool:
        try:
            return bool(store.register("b", {}).epoch)
        except StoreUnavailableError as exc:
            assert "ta@" not in str(exc)  # noqa: PT017 - a secret is what it must not say
            return False

    wait_until(registered, "a write to reach the new master", 5)
    assert {each.id for each in store.instances()} == {"a", "b"}
    assert store.client.connection_pool.master_address[1] != before.port


def test_the_brokers_connection_follows_a_master_that_was_replaced_while_it_lives(
    sentinels: Sentinels, make_store: MakeStore
) -> None:
    store = make_store(sentinels.url, broker_transport_options=sentinels.options)
    app = Celery("orders", set_as_current=False)
    app.conf.update(broker_url=sentinels.url, broker_transport_options=sentinels.options)
    publisher = Publisher(app, timeout=2)
    modes: list[str] = []
    atomic = Atomic(
        app, store, publisher, instance="a", on_mode=lambda mode, reason: modes.append(mode)
    )
    assert atomic.link() is not None
    master = sentinels.fail_over()
    pool = store.client.connection_pool

    def follows() -> bool:
        store.register("a", {})
        return bool(pool.master_address[1] == master.port)

    wait_until(follows, "the timers' connection to lead to the new master", 5)
    atomic.doubt()
    try:
        wait_until(atomic.link, "the broker's new connection to lead to the new master", 5)
        assert modes == ["atomic"]
    finally:
        publisher.close()


def test_sentinels_are_asked_for_nothing_but_their_masters(
    make_sentinels: MakeSentinels, make_store: MakeStore
) -> None:
    sentinels = make_sentinels(replicas=0, sentinels=1)
    with sentinels.sentinel(sentinels.ports[0]) as client:
        rules = ("on", ">secret", "-@all", "+sentinel|masters")
        client.execute_command("ACL", "SETUSER", "watcher", *rules)
        user = {"username": "watcher", "password": "secret"}
        options = {**sentinels.options, "sentinel_kwargs": user}
        assert make_store(sentinels.url, broker_transport_options=options).now_ms() > 0
        log = client.acl_log(128)
    assert {str(entry["object"]) for entry in log} <= OPTIONAL


def test_an_error_of_sentinels_is_one_line_without_secrets(
    make_sentinels: MakeSentinels, make_store: MakeStore
) -> None:
    sentinels = make_sentinels(replicas=0, sentinels=1, **SECRETS)
    options = {**sentinels.options, "master_name": "nobody"}
    store = make_store(sentinels.url, broker_transport_options=options)
    with pytest.raises(StoreUnavailableError, match="No master found for 'nobody'") as caught:
        store.now_ms()
    wrong = {**sentinels.options, "sentinel_kwargs": {"password": "guess"}}
    other = make_store(sentinels.url, broker_transport_options=wrong)
    with pytest.raises(StoreUnavailableError, match="No master found") as refused:
        other.now_ms()
    for told_in_all in (str(caught.value), str(refused.value)):
        assert "\n" not in told_in_all
        assert not {word for word in ("ta@", "watch", "guess") if word in told_in_all}
