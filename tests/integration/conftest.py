"""A service on the run's server whose clock a test sets, and embedded schedulers beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any

import pytest
import redis
from celery import Celery

from celery_dtimer import DistributedTimer, consistency
from celery_dtimer.dispatcher import Dispatcher, Pass
from celery_dtimer.membership import Identity, Membership
from celery_dtimer.meters import Meters
from celery_dtimer.model import Definition, Lease, Run, TimerState, new_trigger_id
from celery_dtimer.planning import Plan, Skip
from celery_dtimer.publisher import BrokerDownError, Outcome
from celery_dtimer.schedules import Interval, OneShot, Schedule
from celery_dtimer.settings import Settings
from celery_dtimer.sharding import Shards
from celery_dtimer.store import DueTimer, Reading, Settlement, Store
from tests.servers import RedisServer

StartTimers = Callable[[Celery], DistributedTimer]
MakeService = Callable[..., "Service"]
MakeMember = Callable[..., "Member"]

START_MS = 1_750_000_000_000
SECOND = 1000


@pytest.fixture
def start_timers() -> Iterator[StartTimers]:
    """Start embedded schedulers; they stop with the test, and leave consistent keys."""
    started: list[DistributedTimer] = []

    def start(app: Celery) -> DistributedTimer:
        timers = DistributedTimer(app)
        timers.start()
        started.append(timers)
        return timers

    yield start
    violations = [problem for timers in started for problem in timers.check_consistency()]
    for timers in started:
        timers.stop()
    assert not violations


class Clock:
    """The server's time, in ms, as the test says."""

    def __init__(self, now_ms: int = START_MS) -> None:
        self.now_ms = now_ms

    def __call__(self) -> int:
        return self.now_ms

    def advance(self, seconds: float) -> int:
        """Let time go by; return the new time."""
        self.now_ms += round(seconds * SECOND)
        return self.now_ms


class Service:
    """One service's store with the test's clock, and short ways to what tests ask of it."""

    def __init__(self, client: redis.Redis, url: str, prefix: str, **settings: Any) -> None:
        self.redis, self.clock = client, Clock()
        self.settings = Settings("orders", url, key_prefix=prefix, **settings)
        self.store = Store(self.settings, clock=self.clock)
        self.keys = self.store.keys
        self.is_damaged = False  #: set by a test that leaves inconsistent keys on purpose
        self._sequences: dict[tuple[str, int], int] = {}  # of each epoch's last commit

    @cached_property
    def shards(self) -> Shards:
        """The service as the API sees it, on connections of its own."""
        return self.another_shards()

    def another_shards(self) -> Shards:
        """Return the service as the API sees it, on connections of its own."""
        return Shards(self.settings, clock=self.clock)

    def another_store(self) -> Store:
        """Return a store of the same service on a connection of its own."""
        return Store(self.settings, clock=self.clock)

    # -- instances

    def join(self, instance: str = "a") -> int:
        """Register an instance; return its epoch."""
        return self.store.register(instance, {"service": "orders", "host": "h", "port": 1}).epoch

    def epoch(self, instance: str) -> int:
        """Return the epoch that an instance is registered with, 0 for none."""
        epochs = {each.id: each.epoch for each in self.store.instances()}
        return epochs.get(instance, 0)

    def let_pass(self, seconds: float, **alive: int) -> None:
        """Let time go by, a second at a time, while the instances with these epochs are heard."""
        for _ in range(round(seconds)):
            self.clock.advance(1)
            for instance, epoch in alive.items():
                self.store.heartbeat(instance, epoch)

    def loads(self) -> dict[str, int]:
        """Return how many timers each registered instance owns."""
        return {instance.id: instance.timers for instance in self.store.instances()}

    def members(self) -> int:
        """Return the count of membership changes."""
        return int(self.redis.hget(self.keys("meta"), "members") or 0)  # type: ignore[arg-type]

    # -- timers

    def define(
        self,
        name: str = "timer",
        *,
        every: float = 10,
        at_ms: int | None = None,
        schedule: Schedule | None = None,
        **fields: Any,
    ) -> Definition:
        """Return a definition: an interval in seconds, or a one-shot."""
        rule = Interval(round(every * SECOND)) if at_ms is None else OneShot(at_ms)
        return Definition(name, fields.pop("task", "tasks.record"), schedule or rule, **fields)

    def add(self, name: str = "timer", **fields: Any) -> Definition:
        """Store a timer; return its definition."""
        source = fields.pop("source", "")
        definition = self.define(name, **fields)
        self.store.save([definition], source=source)
        return definition

    def add_many(self, count: int, prefix: str = "t", **fields: Any) -> list[Definition]:
        """Store so many timers, each due a millisecond after the one before."""
        every = fields.pop("every", 10)
        definitions = [
            self.define(f"{prefix}{i}", every=every + i / SECOND, **fields) for i in range(count)
        ]
        self.store.save(definitions)
        return definitions

    def trigger(self, timer: Definition) -> str:
        """Trigger a timer; return the id of its hidden one-shot."""
        id = new_trigger_id()
        assert self.store.trigger(timer.id, id) == 1
        return id

    def state(self, id: str) -> TimerState:
        """Return a timer's state, which must be there."""
        state = self.store.states([id])[1][0]
        assert state is not None
        return state

    def exists(self, id: str) -> bool:
        """Say whether anything is stored of a timer."""
        listed = [
            self.redis.zscore(self.keys(key), id) for key in ("timer_queue", "inactive_timers")
        ]
        stored = self.redis.exists(self.keys("timer", id), self.keys("timer_definition", id))
        return bool(stored) or listed != [None, None]

    def field(self, id: str, name: str) -> Any:
        """Return a field of a timer's hash."""
        return self.redis.hget(self.keys("timer", id), name)

    def set_field(self, id: str, name: str, value: str) -> None:
        """Edit a timer's hash by hand."""
        self.redis.hset(self.keys("timer", id), name, value)

    def get_field(self, id: str, name: str) -> str | None:
        """Return a field of a timer's hash."""
        return self.redis.hget(self.keys("timer", id), name)

    def resume(
        self,
        timer: Definition,
        due_ms: int,
        skipped: int = 0,
        *,
        at_ms: int | None = None,
        revision: str | None = None,
        status: Any = "paused",
    ) -> int:
        """Resume a timer that was read in a state; return the script's code."""
        read = timer.revision if revision is None else revision
        skip = Skip("paused", skipped, due_ms - skipped, due_ms - 1) if skipped else None
        state = TimerState(timer.id, status, read, START_MS)
        return self.store.resume(state, Plan(due_ms, skip, at_ms=at_ms))

    # -- firing

    def due(self, instance: str, epoch: int, limit: int = 100) -> list[DueTimer]:
        """Return what is due at an instance."""
        return self.store.due(instance, epoch, Reading(limit)).timers

    def due_one(self, instance: str, epoch: int) -> DueTimer:
        """Return the one timer that is due at an instance."""
        (timer,) = self.due(instance, epoch)
        return timer

    def commit(
        self, instance: str, epoch: int, *settlements: Settlement, at: int | None = None
    ) -> list[int]:
        """Commit under the next sequence number of the epoch, or another; return the codes."""
        sequence = at or self._sequences.get((instance, epoch), 0) + 1
        self._sequences[instance, epoch] = sequence
        return self.store.commit(instance, epoch, sequence, settlements).codes

    def ran(self, timer: DueTimer, every: float = 10) -> Settlement:
        """Return what is committed for a run of an interval timer."""
        return Settlement(timer, "run", next_due_ms=timer.due_ms + round(every * SECOND))


@pytest.fixture
def make_service(redis_server: RedisServer, prefix: str) -> Iterator[MakeService]:
    """Make services with settings of the test's own; afterwards their keys must be consistent."""
    made: list[Service] = []

    def make(**settings: Any) -> Service:
        made.append(Service(redis_server.client, redis_server.url, prefix, **settings))
        return made[-1]

    yield make
    violations = [
        found
        for service in made
        if not service.is_damaged
        for found in consistency.check(service.store)
    ]
    for service in made:
        service.store.close()
        service.shards.close()
    assert not violations


@pytest.fixture
def service(make_service: MakeService) -> Service:
    """A service with the default settings: heartbeat 5 s, timeout 30 s."""
    return make_service()


class Broker:
    """Takes runs, unless the test has said otherwise of a timer or of all."""

    def __init__(self) -> None:
        self.sent: list[Run] = []
        self.expected: list[Run] = []
        self.revoked: list[str] = []
        self.answers: dict[str, Outcome] = {}
        self.on_send: Callable[[Run], None] = lambda run: None

    def __call__(self, runs: Sequence[Run], may_send: Callable[[], bool]) -> list[Outcome]:
        """Send what may be sent."""
        outcomes: list[Outcome] = []
        for run in runs:
            if not may_send():
                break
            outcome = self.answers.get(run.definition.name, self.answers.get("*"))
            outcomes.append(outcome)
            if outcome is None:
                self.sent.append(run)
                self.on_send(run)
            elif isinstance(outcome, BrokerDownError):
                break
        return outcomes

    def urgency(self, definition: Definition) -> int:
        """Say that a larger priority goes first, as RabbitMQ does."""
        return -int(definition.options.get("priority", 0))

    def expect(self, runs: Sequence[Run]) -> None:
        """Remember what is expected."""
        self.expected += runs

    def revoke(self, task_ids: Sequence[str]) -> None:
        """Remember what is revoked."""
        self.revoked += task_ids

    def slots(self, name: str = "timer") -> list[float]:
        """Return when the runs of a timer were scheduled, in seconds after the start."""
        return [
            (run.scheduled_ms - START_MS) / 1000 for run in self.sent if run.definition.name == name
        ]


class Beat:
    """A dispatcher of one instance, whose lease is always of its last registration."""

    def __init__(
        self,
        service: Service,
        broker: Broker,
        instance: str = "a",
        seconds: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self.service, self.broker = service, broker
        self.store = service.another_store()
        self.bound: dict[str, Definition] = {}
        self.may_send = True
        self.progress = 0
        self.committed: list[tuple[int, int, bool]] = []
        self.meters = Meters()
        self.instance = instance
        self.dispatcher = Dispatcher(
            self.store,
            broker,
            bound=self.bound,
            may_send=lambda _: self.may_send,
            on_progress=self._count_progress,
            on_commit=lambda *told: self.committed.append(told),
            meters=self.meters,
            clock=seconds,
        )
        self.register()

    def _count_progress(self) -> None:
        self.progress += 1

    def register(self) -> None:
        """Get a newer epoch."""
        epoch = self.service.join(self.instance)
        self.lease = Lease(self.instance, epoch, 1e9, heartbeat_ms=self.service.clock.now_ms)

    def step(self) -> Pass:
        """Dispatch once."""
        return self.dispatcher.step(self.lease)


@pytest.fixture
def broker() -> Broker:
    """A broker that takes everything."""
    return Broker()


@pytest.fixture
def beat(service: Service, broker: Broker) -> Any:
    """An instance that is registered."""
    beat = Beat(service, broker)
    yield beat
    beat.store.close()


class Member:
    """A membership whose seconds pass with the service's clock, plus what is lost in its calls."""

    def __init__(self, service: Service, instance: str, dispatch: str = "confirmed") -> None:
        self.service, self.instance = service, instance
        self.store = service.another_store()
        self.news = 0
        self.meters = Meters()
        self.ahead = 0.0  #: seconds by which its host's clock is
        identity = Identity(instance, "host", 1, "1.0", dispatch)
        self.membership = Membership(
            self.store,
            identity,
            clock=self.seconds,
            wall_clock=lambda: service.clock.now_ms / 1000 + self.ahead,
            on_lease=self._count_news,
            meters=self.meters,
        )

    def seconds(self) -> float:
        """Return a monotonic clock's seconds."""
        return 500.0 + (self.service.clock.now_ms - START_MS) / 1000

    def _count_news(self) -> None:
        self.news += 1

    @property
    def lease(self) -> Lease:
        """The lease, which must be valid."""
        lease = self.membership.lease
        assert lease is not None
        return lease

    def step(self, *, progress: bool = True) -> float:
        """Step once, after a turn of the loop."""
        if progress:
            self.membership.report_progress()
        return self.membership.step()

    def live(self, seconds: float, *others: Member) -> None:
        """Step as often as asked for, for so long; others step along."""
        until = self.service.clock.now_ms + seconds * 1000
        while self.service.clock.now_ms < until:
            waits = [member.step() for member in (self, *others)]
            self.service.clock.advance(max(min(*waits, 5.0), 0.1))


@pytest.fixture
def make_member(service: Service) -> Any:
    """Make instances of the service."""
    made: list[Member] = []

    def make(instance: str) -> Member:
        made.append(Member(service, instance))
        return made[-1]

    yield make
    for member in made:
        member.store.close()
