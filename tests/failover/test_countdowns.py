"""Durable countdowns with real beats and workers: once each, whatever waits and whoever dies."""

from __future__ import annotations

import gc
import json
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest
from celery import chain, chord, group

from tests.conftest import FreshRedis
from tests.failover.deployment import Deploy, Deployment
from tests.servers import RedisServer
from tests.waiting import wait_until

VISIBILITY_TIMEOUT = 4
SECONDS = {"command": 60}  # it takes its time to start
POOLS = ["prefork", "threads", "solo"]


Durable = Callable[..., Deployment]

pytestmark = [
    # Celery's result backend with a redis-py that wants it done otherwise,
    pytest.mark.filterwarnings("ignore:Call to deprecated setex"),
    # and its results, which connect once more as they are forgotten.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture
def durable(
    deploy: Deploy, fresh_redis: FreshRedis, redis_server: RedisServer
) -> Iterator[Durable]:
    """Set up a service whose calls are durable from one second on, on a server of its own.

    Its results are on the run's server: a result that is forgotten later still looks for it.
    """
    deployments: list[Deployment] = []

    def set_up(**conf: Any) -> Deployment:
        server = fresh_redis()
        deployment = deploy(
            broker=server,
            store=server,
            **{
                "dtimer_eta_threshold": 1,
                "result_backend": redis_server.url,
                "broker_transport_options": {"visibility_timeout": VISIBILITY_TIMEOUT},
                **conf,
            },
        )
        deployments.append(deployment)
        return deployment

    yield set_up
    gc.collect()  # results ask their backend to forget them: while it is there
    for deployment in deployments:
        backend: Any = deployment.app.backend
        backend.result_consumer.stop()
        backend.client.connection_pool.disconnect()


def runs(deployment: Deployment) -> Counter[tuple[str, int]]:
    """Return how often each call was run, by its name and the number of its retries."""
    return Counter((each["args"][0], each["retries"]) for each in deployment.entries_ran())


def test_everything_that_waits_runs_once_on_every_pool(durable: Durable) -> None:
    """Calls, chains, groups, chords and retries that wait longer than the visibility timeout.

    One of two beats is killed while they wait.
    """
    deployment = durable()
    beats = deployment.start_beats(2)
    for pool in POOLS:
        deployment.start_worker("-P", pool, "-c", "2")
    app = deployment.app
    expected: list[tuple[str, int]] = []

    def calls(name: str, retries: int = 0) -> Any:
        expected.append((name, retries))
        return app.signature("note", (name,), immutable=True)

    for number in range(12):
        calls(f"ten seconds {number}").apply_async(countdown=10)
    calls("twice the timeout").apply_async(countdown=2 * VISIBILITY_TIMEOUT)
    app.send_task("note", ["by name"], countdown=5)
    expected.append(("by name", 0))
    chain(calls("first"), calls("second").set(countdown=5), calls("third")).apply_async()
    group(calls(f"group {n}").set(countdown=5 + n) for n in range(3)).apply_async()
    parts = [calls(f"part {n}").set(countdown=5 + n) for n in range(2)]
    chord(parts, calls("body").set(countdown=5)).apply_async()
    for number in range(3):
        expected += [(f"retry {number}", 0), (f"retry {number}", 1), (f"from inside {number}", 0)]
        app.send_task("retry_later", [f"retry {number}", 5])
        app.send_task("call_later", [f"from inside {number}", 5])
    app.send_task("note", ["in a month"], task_id="in a month", countdown=30 * 86_400)

    wait_until(lambda: runs(deployment)["third", 0] == 0 and runs(deployment)["first", 0], "a step")
    beats[0].kill()
    wait_until(lambda: runs(deployment).keys() >= set(expected), "all of them to run", 30)
    deployment.pass_time(VISIBILITY_TIMEOUT + 1)  # what a worker held would come again by now
    assert runs(deployment) == Counter(expected)
    assert [call.task_id for call in deployment.timers.get_pending()] == ["in a month"]
    assert deployment.timers.cancel("in a month") is True
    assert [key for key in deployment.store.client.scan_iter("*") if ":eta-" in key] == []


def test_what_is_revoked_with_every_worker_down_never_runs(durable: Durable) -> None:
    deployment = durable()
    beat = deployment.start_beat()
    deployment.wait_registered([beat])
    app = deployment.app
    ways = ["result", "control", "cancel", "command"]
    results = {way: app.send_task("note", [way], countdown=SECONDS.get(way, 3)) for way in ways}
    last = app.send_task("note", ["kept"], countdown=4)
    results["result"].revoke()
    app.control.revoke([results["control"].id])
    assert deployment.timers.cancel(results["cancel"].id) is True
    command = deployment._start("control", ["control", "revoke", results["command"].id], {})
    wait_until(lambda: not command.is_running(), "the command", 20)

    assert [call.task_id for call in deployment.timers.get_pending()] == [last.id]
    deployment.start_worker()
    wait_until(lambda: runs(deployment)["kept", 0], "the one that was not revoked", 20)
    assert set(runs(deployment)) == {("kept", 0)}
    assert {way: result.state for way, result in results.items()} == dict.fromkeys(ways, "REVOKED")
    assert deployment.timers.cancel(last.id) is False


def test_a_worker_holds_nothing_of_what_waits(durable: Durable) -> None:
    deployment = durable()
    beat = deployment.start_beat()
    deployment.wait_registered([beat])
    worker = deployment.start_worker()
    deployment.app.send_task("note", ["before"])
    wait_until(lambda: runs(deployment)["before", 0], "the worker to work", 20)
    before = psutil.Process(worker.pid).memory_info().rss
    for number in range(2000):
        deployment.app.send_task("note", [number], countdown=3600)
    deployment.app.send_task("note", ["after"])
    wait_until(lambda: runs(deployment)["after", 0], "the worker to be up to date", 20)
    assert psutil.Process(worker.pid).memory_info().rss - before < 4 * 1024 * 1024
    unacked = deployment.broker.client.hlen
    wait_until(lambda: unacked("unacked") == 0, "the worker to hold nothing")
    assert deployment.timers.pending_count() >= 2000


@pytest.mark.parametrize("mode", ["atomic", "confirmed"])
def test_a_beat_that_dies_between_publish_and_commit_doubles_at_most_the_same_id(
    durable: Durable, mode: str
) -> None:
    deployment = durable(dtimer_dispatch=mode)
    doomed = deployment.start_beat(crash_at="between_publish_and_commit")
    deployment.wait_registered([doomed])
    result = deployment.app.send_task("note", ["once"], countdown=1.5)
    wait_until(lambda: not doomed.is_running(), "the beat to die", 10)
    heir = deployment.start_beat()
    wait_until(lambda: not deployment.timers.get_pending(), "the heir to send it", 10)
    texts = map(str, deployment.broker.client.lrange(deployment.queue, 0, -1))
    ids = [json.loads(text)["headers"]["id"] for text in texts]
    assert ids == [result.id] * (1 if mode == "atomic" else 2)
    assert heir.is_running()
