"""One life of an instance: real parts on a clock of the test's own, until it dies or is told to.

The clock is a number in Redis, so that it goes on where a process was killed. Nothing here imports
pytest: the processes that die are many.
"""

from __future__ import annotations

import random
import secrets
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from celery import Celery

from celery_dtimer import faults
from celery_dtimer.atomic import Atomic
from celery_dtimer.dispatcher import Dispatcher
from celery_dtimer.errors import FencedError, StoreUnavailableError
from celery_dtimer.membership import Identity, Membership
from celery_dtimer.publisher import Publisher
from celery_dtimer.settings import Settings
from celery_dtimer.store import Store

#: A death that comes from outside, and asks for no label.
ANY_MOMENT = "any_moment"

_MOST_TURNS = 2000


@dataclass(frozen=True)
class World:
    """Where a service is: the settings of its app, and the key that holds its time in ms."""

    settings: Mapping[str, Any]
    clock_key: str

    def app(self) -> Celery:
        """Return a new app."""
        app = Celery("orders", set_as_current=False)
        app.conf.update(self.settings)
        return app


class Life:
    """One instance, from its registration on."""

    def __init__(self, world: World, **settings: Any) -> None:
        self.app = world.app()
        self.app.conf.update(settings)
        own = Settings.from_app(self.app)
        self._store, self._members = (Store(own, clock=self._clock) for _ in range(2))
        self._timekeeper = Store(Settings.from_app(world.app()))
        self._clock_key = world.clock_key
        self.now_ms = 0
        self.pass_time(0)
        instance = f"h:1:{secrets.token_hex(4)}"
        self.membership = Membership(
            self._members, Identity(instance, "h", 1, "0"), clock=lambda: self.now_ms / 1000
        )
        self._publisher = Publisher(self.app, timeout=5)
        self.dispatcher = Dispatcher(
            self._store,
            self._publisher,
            bound={},
            may_send=self.membership.may_act,
            mode=Atomic(self.app, self._store, self._publisher, instance=instance),
        )
        self._heartbeat_at = 0.0
        self.outages = 0

    def _clock(self) -> int:
        return self.now_ms

    def pass_time(self, seconds: float) -> int:
        """Let time go by for everybody; return the new time."""
        self.now_ms = self._timekeeper.client.incrby(self._clock_key, round(seconds * 1000))
        return self.now_ms

    def turn(self) -> int:
        """Do what the two threads of an instance do at this moment; return the runs it sent."""
        self.membership.report_progress()
        try:
            if self.now_ms >= self._heartbeat_at:
                self._heartbeat_at = self.now_ms + self.membership.step() * 1000
            lease = self.membership.lease
            return 0 if lease is None else self.dispatcher.step(lease).sent
        except FencedError:
            lease = self.membership.lease
            self.membership.report_fenced(lease.epoch if lease else 0)
        except StoreUnavailableError:
            self.outages += 1
        self._heartbeat_at = 0.0
        return 0

    def live(self, seconds: float) -> None:
        """Take turns for so long."""
        until_ms = self.now_ms + round(seconds * 1000)
        while self.now_ms < until_ms:
            self.turn()
            self.pass_time(random.uniform(0.05, 0.4))

    def close(self) -> None:
        """End without a word to the others."""
        self._publisher.close()
        for store in (self._store, self._members, self._timekeeper):
            store.close()
        self.app.close()


def live_and_die(world: World, label: str, passes: int) -> None:
    """Take turns until the process is killed at a labelled point, or at any moment.

    The moment is so many hundredths of a second after the registration.
    """
    life = Life(world)
    if label == ANY_MOMENT:
        life.turn()
        signal.setitimer(signal.ITIMER_REAL, random.uniform(0, passes * 0.01))
    else:
        faults.arm(label, passes)
    for _ in range(_MOST_TURNS):
        life.live(0.001)
