"""Garbage in the keys of a service stops no instance, and no timer but its own."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_dtimer import DistributedTimer
from celery_dtimer.atomic import Atomic
from celery_dtimer.declarations import StaticSchedule, declaration_of
from celery_dtimer.dispatcher import Dispatcher
from celery_dtimer.errors import DistributedTimerError
from celery_dtimer.membership import Identity, Membership
from celery_dtimer.model import countdown_id, timer_id
from celery_dtimer.publisher import Publisher
from celery_dtimer.scheduler import Loop
from celery_dtimer.settings import Settings
from celery_dtimer.store import Keys, Store
from tests.conftest import MakeApp, delete_prefix
from tests.fuzz.amount import TRIED, share
from tests.fuzz.garbage import spoilt, texts
from tests.fuzz.records import BLOBS
from tests.servers import RedisServer

OTHERS = ["victim", "another", "run1-x y", "eta-x", "again-1", "a b", "a\nb", "", "{x}"]
OWN = "h:1:own"

ids = st.sampled_from([timer_id("victim"), countdown_id("call"), *OTHERS]) | texts
scores = st.sampled_from(
    [0.0, -1.0, 1.0, 1e15, 1e18, 1.5, float("inf"), float("-inf")]
) | st.floats(allow_nan=False)
words = (
    texts
    | st.integers(-1, 2**53).map(str)
    | st.sampled_from(["active", "waits", OWN, "unassigned"])
)
lines = st.lists(words, max_size=9).map(" ".join)

STATE = (
    *("status", "revision", "created", "due", "at", "last_run", "last_sent", "runs", "attempts"),
    *("owner", "source", "parent", "reason", "summary"),
)
INSTANCE = (
    *("id", "status", "epoch", "heartbeat_interval", "instance_timeout", "broker", "source"),
    *("declaration", "in_flight", "started_at"),
)
LETTER = (
    *("timer", "name", "due", "number", "shard", "task_id", "reason", "call", "options"),
    *("definition", "task", "revision"),
)


def hashes(*names: str) -> st.SearchStrategy[dict[str, str]]:
    """Return hashes with some of these fields."""
    return st.dictionaries(st.sampled_from(names) | texts, words | lines, min_size=1, max_size=6)


# A write: the method of redis-py, the key's name and id, and what is written.
Write = tuple[str, str, str | None, Any]


def _write(command: str, what: str, id: Any, value: Any) -> st.SearchStrategy[Write]:
    return st.tuples(st.just(command), st.just(what), id, value)


_members = st.dictionaries(ids, scores, min_size=1, max_size=4)
no_id = st.none()
#: What belongs to other timers, runs, instances and letters: the good timer is to run on.
of_others: st.SearchStrategy[Write] = st.one_of(
    _write("hset", "timer", ids, hashes(*STATE)),
    _write(
        "hset",
        "timer",
        ids,
        hashes(*STATE).map(
            lambda some: {
                "status": "active",
                "owner": OWN,
                "revision": "r",
                "created": "1",
                "due": "1",
                "at": "1",
                **some,
            }
        ),
    ),
    _write("set", "timer", ids, texts),
    _write("set", "timer_definition", ids, spoilt(BLOBS)),
    _write("lpush", "timer_definition", ids, texts),
    _write("zadd", "timer_queue", no_id, _members),
    _write("zadd", "inactive_timers", no_id, _members),
    _write("zadd", "instance_timers", st.sampled_from([OWN, "unassigned", "other"]), _members),
    _write("hset", "instance", ids, hashes(*INSTANCE)),
    _write("zadd", "service_instances", no_id, _members),
    _write("set", "triggers", ids, texts),
    _write("sadd", "triggers", ids, ids),
    _write("hset", "running", no_id, st.dictionaries(texts, lines, min_size=1, max_size=3)),
    _write("zadd", "run_leases", no_id, _members),
    _write("zadd", "open_runs", ids, _members),
    _write("set", "open_runs", ids, texts),
    _write("zadd", "revoked_runs", no_id, _members),
    _write("zadd", "dead_timers", no_id, _members),
    _write("hset", "dead_timer", ids, hashes(*LETTER)),
    _write("set", "dead_timer", ids, texts),
    _write("sadd", "static_timers", st.just("orders"), ids),
    _write("sadd", "declaration", ids, ids),
    _write("zadd", "declarations", st.just("orders"), _members),
    _write(
        "hset",
        "counters",
        no_id,
        st.dictionaries(st.sampled_from(["sent", "skipped_paused", "x"]), words, min_size=1),
    ),
    _write(
        "hset",
        "meta",
        no_id,
        st.dictionaries(
            st.sampled_from(["mover", "mover_until", "timezone:orders", "x"]), words, min_size=1
        ),
    ),
    _write(
        "xadd",
        "history",
        no_id,
        st.dictionaries(st.sampled_from(["sent", "skipped", "instance"]), lines, min_size=1),
    ),
    _write(
        "xadd",
        "runs",
        no_id,
        st.dictionaries(
            st.sampled_from(["task_id", "timer", "due", "state", "took", "retries"]),
            words,
            min_size=1,
        ),
    ),
)
_SHARED = (
    *("timer_queue", "inactive_timers", "service_instances", "running", "run_leases", "meta"),
    *("revoked_runs", "dead_timers", "history", "runs", "counters"),
)
#: What the whole service needs, made into something else.
of_all: st.SearchStrategy[Write] = st.one_of(
    _write("wrong type", st.sampled_from(_SHARED), no_id, texts),
    _write("wrong type", st.just("instance_timers"), st.sampled_from([OWN, "unassigned"]), texts),
    _write("wrong type", st.sampled_from(["instance"]), st.just(OWN), texts),
    _write(
        "wrong type", st.sampled_from(["static_timers", "declarations"]), st.just("orders"), texts
    ),
    _write("hset", "instance", st.just(OWN), hashes(*INSTANCE, "commit_sequence", "commit_answer")),
    _write("hset", "meta", no_id, hashes("epoch", "last", "members", "mover")),
    _write("zadd", "service_instances", no_id, st.dictionaries(st.just(OWN), scores, min_size=1)),
)


class Service:
    """A service with one instance, whose steps are taken by the test."""

    def __init__(self, app: Any, client: Any, prefix: str) -> None:
        self.app, self.redis, self.prefix = app, client, prefix
        self.keys = Keys("orders", prefix)
        self.timers = DistributedTimer(app)
        settings = Settings.from_app(app)
        self.store, self.members_store = Store(settings), Store(settings)
        self.publisher = Publisher(app, timeout=5)

    def begin(self) -> None:
        """Empty it, join with an instance, and create timers."""
        delete_prefix(self.redis, self.prefix)
        self.publisher.close()
        self.membership = Membership(self.members_store, Identity(OWN, "h", 1, "0"))
        dispatcher = Dispatcher(
            self.store,
            self.publisher,
            bound={},
            may_send=self.membership.may_act,
            mode=Atomic(self.app, self.store, self.publisher, instance=OWN),
        )
        entries = {"static": {"task": "tasks.record", "schedule": 0.1}}
        static = StaticSchedule(self.store, declaration_of(self.app, "orders", entries))
        self.loop = Loop(dispatcher, self.membership, static, longest_wait=1.0)
        self.membership.step()
        self.timers.create_timers(
            [
                {"name": name, "schedule": 0.1, "callback": "tasks.record"}
                for name in ("good", "victim")
            ]
        )
        self.step()

    def plant(self, write: Write) -> None:
        """Write garbage; what is of another type already is replaced."""
        command, what, id, value = write
        key = self.keys(
            what, None if id is None else id.encode("utf-8", "backslashreplace").decode()
        )
        value = _sendable(value)
        if command == "wrong type":
            self.redis.delete(key)
            self.redis.set(key, value)
            return
        kind = {
            "hset": "hash",
            "zadd": "zset",
            "sadd": "set",
            "set": "string",
            "lpush": "list",
            "xadd": "stream",
        }
        if self.redis.type(key) not in ("none", kind[command]):
            self.redis.delete(key)
        if command == "hset":
            self.redis.hset(key, mapping=value)
        else:
            getattr(self.redis, command)(key, value)

    def step(self) -> None:
        """Let the instance take one turn of everything; only declared errors may come out."""
        self.loop._not_before = self.loop._reconcile_after = 0.0
        self.membership._next_check = self.membership._look_for_lost_after = 0.0
        with suppress(DistributedTimerError):
            self.membership.step()
        self.membership.report_progress(100.0)
        self.loop.step()
        with suppress(DistributedTimerError):
            lease = self.membership.lease
            if lease is not None:
                self.loop.look_ahead(1.0)

    def sent(self, name: str) -> int:
        """Return how many runs of a timer were sent."""
        found = self.redis.hget(self.keys("timer", timer_id(name)), "runs")
        return int(found or 0)

    def runs_on(self, name: str) -> bool:
        """Say whether a timer is sent within a second."""
        before, until = self.sent(name), time.monotonic() + 3
        while self.sent(name) <= before:
            if time.monotonic() > until:
                return False
            self.step()
        return True

    def read_all(self) -> None:
        """Call whatever only reads: each answers or raises what is declared."""
        for call in (
            self.timers.get_timers,
            self.timers.get_service_instances,
            self.timers.get_runs,
            self.timers.get_dead_letters,
            self.timers.get_pending,
            self.timers.get_counts,
            self.timers.check_consistency,
            self.timers.get_instance_timers,
            lambda: self.timers.get_timer("victim"),
            lambda: self.timers.preview("victim", 3),
        ):
            with suppress(DistributedTimerError):
                call()


def _sendable(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {_sendable(key): _sendable(each) for key, each in value.items()}
    return value


@pytest.fixture
def service(make_app: MakeApp, redis_server: RedisServer, prefix: str) -> Iterator[Service]:
    app = make_app(dtimer_instance_timeout=30, dtimer_heartbeat_interval=5, dtimer_run_lease=1)
    made = Service(app, redis_server.client, prefix)
    yield made
    made.publisher.close()
    for store in (made.store, made.members_store, made.timers.store):
        store.close()


@given(writes=st.lists(of_others, min_size=1, max_size=6))
@share(0.03)
def test_garbage_in_what_belongs_to_others_stops_no_other_timer(
    service: Service, writes: list[Write]
) -> None:
    TRIED["garbage in keys of others"] += len(writes)
    service.begin()
    for write in writes:
        service.plant(write)
    service.step()
    service.read_all()
    assert service.runs_on("good")


@given(writes=st.lists(of_all | of_others, min_size=1, max_size=4))
@share(0.02)
def test_garbage_in_what_all_need_ends_no_loop(service: Service, writes: list[Write]) -> None:
    TRIED["garbage in keys of the service"] += len(writes)
    service.begin()
    for write in writes:
        service.plant(write)
    for _ in range(2):
        service.step()
    service.read_all()
    for what in _SHARED:
        service.redis.delete(service.keys(what))
    for key in service.redis.scan_iter(f"{service.prefix}*", count=1000):
        service.redis.delete(key)
    service.timers.create_timer("good", 0.1, "tasks.record")
    assert service.runs_on("good")
