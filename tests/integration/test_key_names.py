"""No name and no id makes a key of another service, or of another kind: whatever is in it."""

from __future__ import annotations

import re
from typing import Any

import pytest
import redis
from hypothesis import HealthCheck, given
from hypothesis import settings as profile
from hypothesis import strategies as st

from celery_dtimer import DistributedTimer
from celery_dtimer.consistency import check
from celery_dtimer.errors import DistributedTimerError
from celery_dtimer.model import Definition
from celery_dtimer.schedules import Interval
from celery_dtimer.settings import Settings
from celery_dtimer.store import Keys, OutRun, Store, encode_name
from tests.conftest import MakeApp, delete_prefix
from tests.servers import RedisServer

ODD = [
    *(
        "",
        "orders",
        "orders.0",
        "orders.1",
        "orders%2E0",
        "{orders}",
        "}{",
        "a}:b{",
        ":",
        "a:b",
        "*?[]",
    ),
    *(
        "timer:{orders}:x",
        "meta:{orders}",
        "unassigned",
        "\n",
        "a b",
        "\x00",
        "\ud800",
        "é",
        "e\u0301",
    ),
    *("dead_", "open_", "x" * 3000, "%", "%7B", "nan", "日本語"),
]
names = st.sampled_from(ODD) | st.text(max_size=12)

#: What stands before the braces: the kinds that `Keys` lists, and the proof of a link.
KINDS = {
    line.split()[0].strip("`").partition(":")[0]
    for line in (Keys.__doc__ or "").splitlines()
    if line.strip().startswith("``")
} | {"broker_link"}


def written_by(
    client: redis.Redis, url: str, prefix: str, service: str, odd: list[str]
) -> set[str]:
    """Let a service write whatever takes a name or an id from outside; return its keys."""
    before = set(client.scan_iter(f"{re.escape(prefix)}*", count=1000))
    store = Store(Settings(service, url, key_prefix=prefix))
    name, source, task_id, timer_id, worker = odd
    try:
        epoch = store.register("h:1:x", {"service": service}).epoch
        definition = Definition(name, "tasks.record", Interval(10_000))
        store.save([definition], source=source)
        store.declare("h:1:x", epoch, source, "digest", [definition.id])
        store.note_timezone("h:1:x", epoch, source, "UTC")
        store.hold(Definition(task_id, "t", Interval(1000), message={"h": {}}), delay_ms=10**6)
        store.claim_run(task_id, "token", 10**6)
        run = OutRun(task_id, timer_id, 1, 1, message=encode_name(worker), worker=worker)
        store.run_started(run, lease_ms=10**6, limit_ms=0, redelivered=False)
        store.run_ended(run, "failed", letter={"reason": "failed", "task": name})
        store.trigger(definition.id, "trigger")
        store.revoke_runs([task_id], name)
        for call in (store.dead_letter, store.owned_ids, store.out_run):
            call(task_id)
        assert not check(store)
    finally:
        store.close()
    return set(client.scan_iter(f"{re.escape(prefix)}*", count=1000)) - before


@given(services=st.tuples(names, names), odd=st.lists(names, min_size=5, max_size=5))
@profile(max_examples=60, deadline=None, database=None, suppress_health_check=list(HealthCheck))
def test_two_services_share_no_key(
    redis_server: RedisServer, prefix: str, services: tuple[str, str], odd: list[str]
) -> None:
    client, url = redis_server.client, redis_server.url
    delete_prefix(client, prefix)
    one, other = services
    keys_of_one = written_by(client, url, prefix, one, odd)
    for key in keys_of_one:
        kind, _, rest = key.removeprefix(prefix).partition(":")
        assert kind in KINDS, key
        assert rest.startswith(f"{{{encode_name(one)}}}"), key
    if one != other:
        assert not keys_of_one & written_by(client, url, prefix, other, odd)
        assert all(f"{{{encode_name(one)}}}" in key for key in keys_of_one)


@given(one=names, other=names)
def test_an_encoded_name_tells_names_apart_and_breaks_nothing(one: str, other: str) -> None:
    assert re.fullmatch(r"[A-Za-z0-9_~%-]*", encode_name(one))
    assert (encode_name(one) == encode_name(other)) == (one == other)


@given(service=names, shard=st.integers(0, 99), other=names)
def test_no_service_has_the_keys_of_a_group_of_another(
    service: str, shard: int, other: str
) -> None:
    """A group of keys is ``{service.k}``: the dot of a name is encoded, so that it is none."""
    assert f"{{{encode_name(service)}.{shard}}}" not in Keys(other)("meta")


@pytest.mark.parametrize("id", ODD)
def test_any_task_id_can_be_given_to_a_call_that_waits(
    make_app: MakeApp, redis_server: RedisServer, id: str
) -> None:
    app = make_app(dtimer_eta_threshold=1)
    timers = DistributedTimer(app)
    if not id:  # Celery makes one
        return
    try:
        app.send_task("tasks.record", countdown=1000, task_id=id)
    except DistributedTimerError as exc:
        pytest.fail(f"{id!r}: {exc}")
    (call,) = timers.get_pending()
    assert call.task_id == id
    keys = list(redis_server.client.scan_iter(f"{app.conf.dtimer_key_prefix}*", count=1000))
    assert all("{orders}" in key and key.count("{") == 1 for key in keys), keys
    assert timers.cancel(id)
    assert timers.get_pending() == []


@pytest.mark.parametrize("host", ["web 1", "web:1", "{web}", "wéb\n", "x" * 300, ""])
def test_an_instance_id_is_fit_for_keys_whatever_its_host_is_called(
    host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from celery_dtimer import model

    monkeypatch.setattr(model.socket, "gethostname", lambda: host)
    found: Any = model.new_instance_id()
    assert re.fullmatch(r"[A-Za-z0-9.-]{1,40}:\d+:[0-9a-f]{8}", found)
