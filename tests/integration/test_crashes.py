"""Instances die at each labelled point of a dispatch, again and again; the broker keeps the score.

Each life is a process with the real parts: membership, dispatcher, publisher, link. The next one
takes over from the dead. Time is the test's own, so that a heartbeat runs out at once. Afterwards
the broker's lists are read, and compared with the runs that ought to be there.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Iterator

import pytest
import redis

from celery_dtimer import consistency, faults
from celery_dtimer.model import Definition, TimerState
from celery_dtimer.schedules import Interval, OneShot, Schedule
from celery_dtimer.settings import Settings
from celery_dtimer.store import Store
from tests.conftest import app_settings
from tests.failover.warm import run_warm
from tests.integration.conftest import START_MS
from tests.integration.doomed import ANY_MOMENT, Life, World, live_and_die
from tests.ledger import Ledger
from tests.servers import RedisServer
from tests.tcp_proxy import TcpProxy

#: Seconds at full length are 60; a normal run is a quarter of it.
LIVES = max(12, round(float(os.environ.get("DTIMER_TEST_SECONDS", "0")) * 4 / 3))

#: By name, the seconds between two runs: alone, together, and several times a turn.
INTERVALS = {"quick": 0.1, "odd": 0.7, "slow": 3.0, **{f"second-{n}": 1.0 for n in range(8)}}
ONCE = [f"once-{n}" for n in range(10)]

#: Where a confirmed run may be out and not committed. A batch is built before any of it is out.
MAY_DOUBLE = ("between_publish_and_commit", ANY_MOMENT)


class Scene:
    """A service with timers, whose instances come and go."""

    def __init__(self, server: RedisServer, prefix: str, mode: str) -> None:
        self.client: redis.Redis = server.client
        settings = app_settings(
            server.url, prefix, dtimer_dispatch=mode, dtimer_batch_size=4, dtimer_lag_limit=0.5
        )
        self.world = World(settings, f"{prefix}clock")
        self.client.set(self.world.clock_key, START_MS)
        self.app = self.world.app()
        self.queue: str = self.app.conf.task_default_queue
        self.store = Store(Settings.from_app(self.app), clock=self.now_ms)
        self._create()

    def now_ms(self) -> int:
        """Return the service's time."""
        return int(self.client.get(self.world.clock_key) or 0)  # type: ignore[arg-type]

    def _create(self) -> None:
        rules: dict[str, Schedule] = {
            **{name: Interval(round(seconds * 1000)) for name, seconds in INTERVALS.items()},
            **{name: OneShot(START_MS + n * 1000) for n, name in enumerate(ONCE)},
        }
        self.ids = {}
        for name, rule in rules.items():
            definition = Definition(name, "tasks.record", rule)
            self.store.save([definition])
            self.ids[name] = definition.id

    def state(self, name: str) -> TimerState:
        """Return what is stored of a timer."""
        state = self.store.states([self.ids[name]])[1][0]
        assert state is not None
        return state

    def doom(self, label: str) -> None:
        """Let an instance live until it dies at a point, then let its heartbeat run out."""
        exit_code = run_warm(live_and_die, self.world, label, random.randint(1, 12))
        expected = signal.SIGALRM if label == ANY_MOMENT else signal.SIGKILL
        assert exit_code == -expected, f"ended with {exit_code} in place of dying"

    def ledger(self) -> Ledger:
        """Return what is in the broker's lists."""
        return Ledger.of_queue(self.client, self.queue)

    def settle(self) -> Ledger:
        """Let a last instance take over and send all that is due; return what was sent in all."""
        life = Life(self.world)
        life.live(10)
        while life.turn():
            pass
        life.close()
        return self.ledger()

    def assert_none_lost(self, ledger: Ledger) -> None:
        """Fail when a run is neither sent nor counted as skipped, or the store is inconsistent."""
        now_ms = self.now_ms()
        for name, seconds in INTERVALS.items():
            every_ms, timer = round(seconds * 1000), self.state(name)
            due = (now_ms - START_MS) // every_ms
            slots = ledger.slots(name)
            assert slots[0] == START_MS + every_ms
            assert all((slot - START_MS) % every_ms == 0 for slot in slots)
            assert len(slots) + timer.skipped == due, f"{name}: {due} were due"
            assert timer.runs == len(slots)
        for n, name in enumerate(ONCE):
            assert ledger.slots(name) == [START_MS + n * 1000]
        ledger.assert_doubles_are_recognizable()
        assert consistency.check(self.store) == []

    def close(self) -> None:
        """End the test's own look at the service."""
        self.store.close()
        self.app.close()


@pytest.fixture
def scene(redis_server: RedisServer, prefix: str, mode: str) -> Iterator[Scene]:
    """A service on the run's server."""
    scene = Scene(redis_server, prefix, mode)
    yield scene
    scene.close()


@pytest.mark.parametrize("mode", ["atomic", "confirmed"])
@pytest.mark.parametrize("label", [*faults.POINTS, ANY_MOMENT])
def test_runs_of_instances_that_die(scene: Scene, mode: str, label: str) -> None:
    for _ in range(LIVES):
        scene.doom(label)
    ledger = scene.settle()
    scene.assert_none_lost(ledger)
    if mode == "atomic" or label not in MAY_DOUBLE:
        ledger.assert_nothing_doubled()
    elif label in faults.POINTS:
        assert ledger.doubled(), "nobody died there with runs that were out"


@pytest.mark.parametrize("mode", ["atomic", "confirmed"])
@pytest.mark.parametrize("spoiled", ["dtimer_redis_url", "broker_url"])
def test_runs_whose_replies_are_lost(
    scene: Scene,
    mode: str,
    spoiled: str,
    redis_server: RedisServer,
    tcp_proxy: Callable[[RedisServer], TcpProxy],
) -> None:
    """The request arrives, and the connection is reset in place of its answer."""
    proxy = tcp_proxy(redis_server)
    urls = {"dtimer_redis_url": redis_server.url, spoiled: proxy.url}
    life = Life(scene.world, **urls)
    for _ in range(LIVES * 5):
        proxy.drop_replies = random.choice([0, 0, 1, 1, 2])
        life.live(0.3)
    proxy.drop_replies = 0
    life.live(10)
    life.close()
    ledger = scene.settle()
    scene.assert_none_lost(ledger)
    if mode == "atomic" or spoiled == "dtimer_redis_url":
        ledger.assert_nothing_doubled()
