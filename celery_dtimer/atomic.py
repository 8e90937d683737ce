"""Whether messages travel in the commit's own script: the dispatch mode in force, and why.

That needs the broker's Redis to be the server that holds the timers. It is found out by writing a
random key through the broker's connection and reading it through that of the timers. The key
expires, is written anew while it is used and after every reconnect, and every commit that pushes
looks at it again: whichever server a name leads to by then, nothing is pushed into the wrong one.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable

from celery import Celery

from celery_dtimer.errors import SettingsError, StoreUnavailableError
from celery_dtimer.publisher import BrokerDownError, Publisher, RefusedError
from celery_dtimer.store import Link, Store

logger = logging.getLogger(__name__)

_TTL = 60.0  # seconds that a proof lasts on the broker's server
_CHECKED_EVERY = 20.0  # seconds

ATOMIC, CONFIRMED = "atomic", "confirmed"
#: Why dispatch is confirmed where the timers are on a cluster.
ON_A_CLUSTER = "the timers are on a Redis Cluster, which Celery has no broker for"


def obstacle(app: Celery) -> str | None:
    """Return what in an app's configuration stands against atomic dispatch, None if nothing does.

    Nothing is contacted.
    """
    transport = app.connection_for_write().get_transport_cls()
    if transport.driver_type != "redis":
        return f"the broker is {transport.driver_type}, not Redis"
    from kombu.transport import redis

    channel = getattr(transport, "Channel", None)
    if channel not in (redis.Channel, redis.SentinelChannel):
        return f"the broker's transport has a channel class of its own, {channel!r}"
    if app.conf.task_protocol != 2:
        return f"task_protocol is {app.conf.task_protocol}, not 2"
    if app.conf.task_always_eager:
        return "task_always_eager runs the tasks here"
    return None


class Atomic:
    """Says for each batch whether its commit may push the messages."""

    def __init__(
        self,
        app: Celery,
        store: Store,
        publisher: Publisher,
        *,
        instance: str,
        on_mode: Callable[[str, str], None] = lambda mode, reason: None,
        on_broker: Callable[[bool], None] = lambda is_up: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare the check; nothing is contacted before the first `link`.

        Args:
            app: whose ``dtimer_dispatch`` and broker are used.
            store: the one that commits.
            publisher: has the broker's connection.
            instance: names the key.
            on_mode: is told the mode in force and its reason when it changes.
            on_broker: is told whether the broker could be reached, when that was tried.
            clock: monotonic seconds.
        """
        self._app = app
        self._store = store
        self._publisher = publisher
        self._on_mode = on_mode
        self._on_broker = on_broker
        self._clock = clock
        self._key = store.keys("broker_link", instance)
        self._is_required = store.settings.dispatch == ATOMIC
        self._was_atomic = False
        self._never = "dtimer_dispatch says so" if store.settings.dispatch == CONFIRMED else None
        if store.settings.is_cluster:
            self._never = ON_A_CLUSTER
        self._mode = ""
        self._link: Link | None = None
        self._connects: tuple[int, int] | None = None
        self._check_at = 0.0
        self._is_known = False

    def link(self) -> Link | None:
        """Return the proof that a commit takes; None when messages are to be published first.

        Raises:
            SettingsError: ``dtimer_dispatch`` is ``"atomic"``, which can not be given here.
            StoreUnavailableError: it could be given, but not now.
        """
        is_new = self._link is not None and self._publisher.connects != self._connects
        if is_new or self._clock() >= self._check_at:
            self._check()
        return self._link

    def is_known(self) -> bool:
        """Say whether the last check could tell; else nothing is to be published first either."""
        return self._is_known

    def doubt(self) -> None:
        """Check anew before the next batch: a commit found that the link does not hold."""
        self._check_at = 0.0

    def refuse(self, reason: str) -> None:
        """Dispatch confirmed from now on: the server does not let the commit push."""
        self._never, self._check_at = reason, 0.0

    def _check(self) -> None:
        self._link, self._check_at, self._is_known = None, 0.0, False
        self._never = self._never or obstacle(self._app)
        down = self._publisher.connect()
        self._on_broker(down is None)
        try:
            reason = self._never or self._connect(down)
        except BrokerDownError as exc:
            logger.debug("Whether dispatch can be atomic is not known yet: %s", exc)
            return
        self._was_atomic = self._was_atomic or not reason
        if reason and self._is_required:
            raise self._missing(reason)
        self._check_at = float("inf") if self._never else self._clock() + _CHECKED_EVERY
        self._is_known = True
        self._report(CONFIRMED if reason else ATOMIC, reason or "the broker holds the timers too")

    def _connect(self, down: BrokerDownError | None) -> str | None:
        """Make a new link; return why there is none."""
        if down is not None:
            raise down
        try:
            if not self._prove() and self._was_atomic:
                self._publisher.close()  # its server may have been replaced while it lives
                self._prove()
        except RefusedError as exc:
            return f"the broker's user may not write the key that proves it: {exc}"
        if self._link is None:
            return "the broker is not on the server that holds the timers"
        return None

    def _prove(self) -> bool:
        """Write a key through the broker's connection, and keep the link if the timers see it."""
        proof = secrets.token_hex(16)
        database, prefix = self._write(proof)
        link = Link(database, self._key, proof, prefix)
        self._connects = self._publisher.connects
        self._link = link if self._store.is_linked(link) else None
        return self._link is not None

    def _write(self, proof: str) -> tuple[int, str]:
        try:
            return self._publisher.write(self._key, proof, _TTL)
        except BrokerDownError:  # it was connected: that connection may be an old one
            return self._publisher.write(self._key, proof, _TTL)

    def _report(self, mode: str, reason: str) -> None:
        if mode != self._mode:
            logger.info("Dispatch is %s: %s", mode, reason)
            self._on_mode(mode, reason)
        self._mode = mode

    def _missing(self, reason: str) -> SettingsError | StoreUnavailableError:
        if self._was_atomic:
            return StoreUnavailableError(f"dispatch can not be atomic now: {reason}")
        return refusal(reason)


def refusal(reason: str) -> SettingsError:
    """Return the error of a beat that was told to be atomic and cannot be."""
    return SettingsError(f'dtimer_dispatch="atomic" can not be given: {reason}')
