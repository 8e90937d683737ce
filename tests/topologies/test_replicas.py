"""Commits that wait for replicas (``dtimer_wait_replicas``)."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import pytest

from celery_dtimer.errors import StoreUnavailableError
from celery_dtimer.membership import Identity, Membership
from celery_dtimer.model import Definition
from celery_dtimer.schedules import Interval
from celery_dtimer.store import Committed, Reading, Settlement, Store
from tests.conftest import FreshRedis
from tests.servers import RedisServer
from tests.topologies.conftest import MakeStore
from tests.waiting import wait_until

TIMER = Definition("timer", "task", Interval(100))


@pytest.fixture
def master(fresh_redis: FreshRedis) -> RedisServer:
    """A server that replicas may follow."""
    return fresh_redis("--repl-diskless-sync-delay", "0")


@pytest.fixture
def replica(master: RedisServer, fresh_redis: FreshRedis) -> RedisServer:
    """One that follows."""
    replica = fresh_redis("--replicaof", "127.0.0.1", str(master.port))
    master.client.set("written", "before")  # what is written on a connection is waited for there
    wait_until(lambda: master.client.wait(1, 100) == 1, "the replica to follow", 10)
    return replica


Commit = Callable[[], Committed]


@pytest.fixture
def store(master: RedisServer, make_store: MakeStore) -> Store:
    """A service whose commits are to have one replica within a quarter of a second."""
    store = make_store(master.url, dtimer_wait_replicas=1)
    store.save([TIMER])
    return store


@pytest.fixture
def commit(store: Store) -> Commit:
    """Commit a run of the one timer, as its owner."""
    epoch = store.register("a", {}).epoch
    numbers = iter(range(1, 1000))
    store.reap("a", epoch)

    def act() -> Committed:
        timers = wait_until(lambda: store.due("a", epoch, Reading(1)).timers, "the timer to be due")
        ran = Settlement(timers[0], "run", timers[0].due_ms + 100)
        return store.commit("a", epoch, next(numbers), [ran])

    return act


def runs(store: Store) -> int:
    """Return how many runs of the timer count as sent."""
    (state,) = store.states([TIMER.id])[1]
    assert state is not None
    return state.runs


def test_a_commit_that_a_replica_has_is_not_short(
    replica: RedisServer, store: Store, commit: Commit
) -> None:
    for _ in range(3):
        committed = commit()
        assert (committed.codes, committed.is_short) == ([1], False)
    assert replica.client.hget(store.keys("timer", TIMER.id), "runs") == "3"


def test_a_commit_whose_script_was_unknown_waits_too(
    master: RedisServer, replica: RedisServer, store: Store, commit: Commit
) -> None:
    commit()
    master.client.script_flush()
    assert not commit().is_short
    assert replica.client.hget(store.keys("timer", TIMER.id), "runs") == "2"


def test_a_commit_that_no_replica_has_stays_and_the_next_ones_hardly_wait(
    replica: RedisServer, store: Store, commit: Commit
) -> None:
    limit = store.settings.replicas_timeout
    assert limit == store.settings.call_timeout / 2
    commit()
    replica.freeze()
    started = time.monotonic()
    committed = commit()
    took = time.monotonic() - started
    assert (committed.codes, committed.is_short, runs(store)) == ([1], True, 2)
    assert limit <= took < store.settings.call_timeout

    started = time.monotonic()
    assert commit().is_short
    assert time.monotonic() - started < limit
    replica.thaw()
    wait_until(lambda: not commit().is_short, "the replica to have a commit")
    assert runs(store) == int(str(replica.client.hget(store.keys("timer", TIMER.id), "runs")))


def test_nobody_waits_by_default(master: RedisServer, make_store: MakeStore) -> None:
    store = make_store(master.url)
    epoch = store.register("a", {}).epoch
    committed = store.commit("a", epoch, 1, [])
    assert not committed.is_short
    assert "cmdstat_wait" not in master.client.info("commandstats")  # type: ignore[operator]


def test_an_outage_of_replicas_is_logged_once_and_counted(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    membership = Membership(store, Identity("a", "host", 1, "1.0"))
    with caplog.at_level(logging.INFO):
        membership.step()
        for number, is_short in enumerate([False, True, True, False, True, False], 1):
            membership.report_commit(7, number, is_short)
        membership.report_progress()
        membership.step()
    told = [record.levelname for record in caplog.records if "replicas" in record.message]
    assert told == ["WARNING", "INFO", "WARNING", "INFO"]
    (instance,) = store.instances()
    assert instance.unreplicated == 3


def test_a_user_who_may_not_wait_has_short_commits(
    master: RedisServer, replica: RedisServer, make_store: MakeStore
) -> None:
    rules = ("on", ">secret", "~*", "&*", "+@all", "-wait")
    master.client.execute_command("ACL", "SETUSER", "u", *rules)
    store = make_store(f"redis://u:secret@127.0.0.1:{master.port}/0", dtimer_wait_replicas=1)
    epoch = store.register("a", {}).epoch
    assert replica.process.is_running()
    assert store.commit("a", epoch, 1, []).is_short


def test_a_master_that_refuses_to_write_without_replicas_will_serve_later(
    fresh_redis: FreshRedis, make_store: MakeStore
) -> None:
    store = make_store(fresh_redis("--min-replicas-to-write", "1").url)
    with pytest.raises(StoreUnavailableError, match=r"can not serve now: .*NOREPLICAS"):
        store.register("a", {})
