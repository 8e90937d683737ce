"""The services of a Redis are found by their keys."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timezone
from typing import Any

import pytest
import redis

from celery_dtimer import DistributedTimer, ServiceSummary, StoreError
from celery_dtimer.services import find_services
from celery_dtimer.settings import Settings
from celery_dtimer.sharding import Shards
from celery_dtimer.store import Store, decode_name, encode_name
from tests.conftest import MakeApp
from tests.integration.conftest import Service, StartTimers
from tests.waiting import wait_until

NAMES = ("a.b", "a:b", "{x}", "*?[]", "x\n\ny", "😀", "\ud800", "50%", "a.0", "^\\")


def use(settings: Settings, name: str, **fields: Any) -> None:
    """Let there be a service of a name, with an instance that was heard just now."""
    shards = Shards(replace(settings, service=name, **fields))
    for store in shards.stores:
        store.register("a", {})
    shards.close()


def test_a_name_comes_back_from_its_keys() -> None:
    for name in NAMES:
        assert decode_name(encode_name(name)) == name


def test_a_server_without_services_has_none(service: Service) -> None:
    assert find_services(service.settings) == []


def test_services_with_any_name_are_found_once(service: Service) -> None:
    for name in NAMES:
        use(service.settings, name)
    found = find_services(service.settings)
    assert [each.name for each in found] == sorted(NAMES)
    assert {each.instances for each in found} == {1}


def test_shards_are_no_services(service: Service) -> None:
    use(service.settings, "split", shards=4)
    use(service.settings, "whole")
    assert [(each.name, each.shards) for each in find_services(service.settings)] == [
        ("split", 4),
        ("whole", 1),
    ]


def test_a_service_that_has_forgotten_its_shards_is_one_all_the_same(service: Service) -> None:
    use(service.settings, "split", shards=3)
    base = Store(replace(service.settings, service="split"))
    service.redis.delete(base.keys("meta"))
    (found,) = find_services(service.settings)
    assert (found.name, found.shards) == ("split", 3)
    assert not service.redis.exists(base.keys("never"))


def test_a_summary_counts(service: Service, make_app: MakeApp) -> None:
    a = service.join("a")
    service.add_many(3)
    service.store.pause(service.add("paused").id)
    service.clock.advance(20)
    service.join("b")
    service.commit("a", a, *(service.ran(timer) for timer in service.due("a", a)))
    service.store.leave("a", a, limit=1)
    summary = ServiceSummary("orders", 1, instances=0, active=3, inactive=1, sent=3)
    assert find_services(service.settings) == [summary]  # by the server's clock all are long dead
    assert DistributedTimer(make_app()).get_services() == [summary]


def test_instances_count_by_their_own_timeouts(service: Service) -> None:
    store = Store(service.settings)
    store.register("a", {"settings": '{"dtimer_instance_timeout": 3600}'})
    store.register("b", {"settings": "nonsense"})
    store.register("c", {"settings": '{"dtimer_instance_timeout": 1}'})
    ago_ms = int(datetime.now(timezone.utc).timestamp() * 1000) - 600_000
    for instance in "abc":
        service.redis.hset(service.keys("instance", instance), "heartbeat_at", ago_ms)
    (found,) = find_services(service.settings)
    assert found.instances == 1
    store.close()


def test_keys_of_another_prefix_or_type_are_left_alone(service: Service, prefix: str) -> None:
    odd = replace(service.settings, key_prefix=f"{prefix}[a*]?:")
    use(odd, "inside")
    use(replace(service.settings, key_prefix=f"{prefix}ab:"), "outside")
    service.redis.set(f"{prefix}[a*]?:meta:{{text}}", "text")
    service.redis.hset(f"{prefix}[a*]?:meta:{{a}}b", "a", "b")
    assert [each.name for each in find_services(odd)] == ["inside"]


def test_many_other_keys_are_passed(service: Service, prefix: str) -> None:
    use(service.settings, "one")
    pipe = service.redis.pipeline()
    for number in range(5000):
        pipe.set(f"{prefix}other-{number}", "")
    pipe.execute()
    assert [each.name for each in find_services(service.settings)] == ["one"]


def test_nothing_is_written_by_looking(service: Service, prefix: str) -> None:
    use(service.settings, "split", shards=2)
    service.join()

    def everything() -> dict[str, Any]:
        return {key: service.redis.dump(key) for key in service.redis.scan_iter(f"{prefix}*")}

    before = everything()
    find_services(service.settings)
    assert everything() == before


def test_an_embedded_scheduler_is_counted(make_app: MakeApp, start_timers: StartTimers) -> None:
    timers = start_timers(make_app(dtimer_shards=2))
    wait_until(
        lambda: [(each.shards, each.instances) for each in timers.get_services()] == [(2, 1)],
        "the scheduler to be seen",
    )


@pytest.fixture
def limited(service: Service, redis_server: Any) -> Iterator[Settings]:
    """Settings of a user who may do anything but SCAN."""
    user = f"limited-{service.settings.key_prefix[:-1]}"
    client: redis.Redis = service.redis
    client.acl_setuser(
        user, enabled=True, passwords=["+secret"], keys=["*"], commands=["+@all", "-scan"]
    )
    rest = service.settings.redis_url.partition("://")[2]
    yield replace(service.settings, redis_url=f"redis://{user}:secret@{rest}")
    client.acl_deluser(user)


def test_a_user_who_may_not_scan_is_told_so(limited: Settings) -> None:
    with pytest.raises(StoreError, match=r"by SCAN, which the user .* may not use") as raised:
        find_services(limited)
    assert "secret" not in str(raised.value)
