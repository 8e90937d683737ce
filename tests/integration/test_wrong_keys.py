"""Keys of wrong types, and services beside each other: what stays apart, and what is repaired."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import redis

from celery_dtimer import DistributedTimer, TimerNotFoundError
from celery_dtimer.model import timer_id
from tests.conftest import MakeApp, ReadQueue
from tests.integration.conftest import StartTimers
from tests.servers import RedisServer
from tests.waiting import wait_until

EVERY = 0.4  # seconds

#: What somebody may have put into a key's place.
WRONG: dict[str, Callable[[redis.Redis, str], Any]] = {
    "string": lambda client, key: client.set(key, "nonsense"),
    "list": lambda client, key: client.rpush(key, "nonsense"),
    "set": lambda client, key: client.sadd(key, "nonsense"),
    "zset": lambda client, key: client.zadd(key, {"nonsense": 1}),
    "hash": lambda client, key: client.hset(key, "nonsense", "nonsense"),
    "stream": lambda client, key: client.xadd(key, {"nonsense": "nonsense"}),
}
#: The keys of one timer.
KEYS = ("timer", "timer_definition", "triggers", "open_runs")


def put_wrong(client: redis.Redis, key: str, kind: str) -> None:
    """Put something else into a key's place."""
    client.delete(key)
    WRONG[kind](client, key)


def status(timers: DistributedTimer, name: str) -> str | None:
    """Return a timer's status, None when there is none."""
    try:
        return timers.get_timer(name).status
    except TimerNotFoundError:
        return None


def test_a_wrong_type_at_any_key_of_a_timer_stops_no_other(
    make_app: MakeApp,
    redis_server: RedisServer,
    read_queue: ReadQueue,
    start_timers: StartTimers,
    prefix: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    app, client = make_app(), redis_server.client
    reader = read_queue(app)
    names = {f"{key} is a {kind}": (key, kind) for key in KEYS for kind in WRONG}
    user = DistributedTimer(app)
    fields = {"schedule": EVERY, "callback": "record", "overlap": "skip"}
    user.create_timers([{"name": name, **fields} for name in names])
    user.create_timer("good", EVERY, "record")
    for name, (key, kind) in names.items():
        if key == "triggers":
            user.trigger_timer(name)
        put_wrong(client, f"{prefix}{key}:{{orders}}:{timer_id(name)}", kind)
    with caplog.at_level(logging.ERROR):
        timers = start_timers(app)
        wait_until(lambda: len(reader.ledger.slots("good")) >= 5, "the good one to run on", 15)
        wait_until(lambda: not timers.check_consistency(), "the repair", 15)
    ours = [record for record in caplog.records if record.name.startswith("celery_dtimer")]
    assert not [record for record in ours if record.exc_info], caplog.text
    for name, (key, _) in names.items():
        state = status(timers, name)
        expected = {"timer": "broken", "timer_definition": "broken"}
        assert state == expected.get(key, "active"), name
        if key == "timer_definition":
            assert timer_id(name) in caplog.text, f"{name}, and it is said"
        if key not in expected:
            assert reader.ledger.slots(name), f"{name}, and it runs"
    for name in names:  # whatever it is now, it can be had again
        timers.create_timer(name, EVERY, "record")
    created_ms = redis_server.now_ms()
    wait_until(
        lambda: {run.name for run in reader.ledger.since(created_ms)} >= names.keys(),
        "all to run again",
        10,
    )
    wait_until(lambda: not timers.check_consistency(), "the invariants to hold", 10)


@pytest.mark.parametrize("what", ["timer", "timer_queue", "instance_timers"])
def test_a_static_timer_of_which_a_part_was_deleted_runs_again_without_a_restart(
    make_app: MakeApp,
    redis_server: RedisServer,
    read_queue: ReadQueue,
    start_timers: StartTimers,
    prefix: str,
    what: str,
) -> None:
    app, client = make_app(), redis_server.client
    app.conf.beat_schedule = {"static": {"task": "record", "schedule": EVERY}}
    reader = read_queue(app)
    timers = start_timers(app)
    wait_until(lambda: reader.ledger.names() == {"static"}, "a run")
    id = timer_id("static")
    instance = timers.get_timer(id).instance
    if what == "timer":
        client.delete(f"{prefix}timer:{{orders}}:{id}")
    elif what == "timer_queue":
        client.zrem(f"{prefix}timer_queue:{{orders}}", id)
    else:
        client.zrem(f"{prefix}instance_timers:{{orders}}:{instance}", id)
    deleted_ms = redis_server.now_ms()
    wait_until(lambda: reader.ledger.since(deleted_ms + 500), "runs to come again", 10)
    wait_until(lambda: not timers.check_consistency(), "the repair", 10)


# ------------------------------------------------------------------ services beside each other


def test_apps_with_prefixes_of_their_own_do_not_meet(
    make_app: MakeApp,
    redis_server: RedisServer,
    read_queue: ReadQueue,
    start_timers: StartTimers,
    prefix: str,
) -> None:
    """One database, one service name, the same timer; one has kombu's prefix too."""
    client = redis_server.client
    before = set(client.scan_iter(count=1000))
    apps: dict[str, Any] = {}
    for name, kombus in {"one": "", "two": f"{prefix}kombu:"}.items():
        apps[name] = make_app(
            dtimer_key_prefix=f"{prefix}{name}:",
            task_default_queue=f"{prefix}{name}:queue",
            result_expires=None,  # else Celery adds its clean-up of results
            broker_transport_options={"global_keyprefix": kombus} if kombus else {},
        )
    timers = {name: start_timers(app) for name, app in apps.items()}
    for name, each in timers.items():
        each.create_timer("shared", EVERY, "record", args=[name])
    queues = {"one": f"{prefix}one:queue", "two": f"{prefix}kombu:{prefix}two:queue"}
    for queue in queues.values():
        wait_until(lambda queue=queue: client.llen(queue) >= 3, f"runs in {queue}", 10)
    assert {len(each.get_service_instances()) for each in timers.values()} == {1}
    assert timers["one"].get_timer("shared").instance != timers["two"].get_timer("shared").instance
    assert {each.get_service_instances()[0].dispatch for each in timers.values()} == {"atomic"}
    timers["two"].delete_timer("shared")
    length = client.llen(queues["one"])
    wait_until(lambda: client.llen(queues["one"]) > length + 2, "the other to run on")
    assert [timer.name for timer in timers["one"].get_timers()] == ["shared"]
    found = set(client.scan_iter(count=1000)) - before
    foreign = {key for key in found if not key.startswith((prefix, "_kombu.binding"))}
    assert not foreign, "every key is under a prefix"
    for each in timers.values():
        each.stop()
    for queue in queues.values():
        client.delete(queue)
