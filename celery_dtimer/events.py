"""What happens to timers and instances, in Celery's event stream: for Flower and ``celery events``.

``dtimer_send_events`` turns it on. The events follow the signals of the same process, and their
types begin with ``dtimer-``, a group of their own that Celery's monitors pass on or leave alone:

=========================== ========================================================================
type                        fields
=========================== ========================================================================
``dtimer-instance-joined``  ``instance``, ``epoch``
``dtimer-instance-left``    ``instance``, ``is_dead``
``dtimer-failover``         ``instance``, ``dead`` (ids), ``timers`` (how many have moved)
``dtimer-runs-skipped``     ``instance``, ``timer_id``, ``timer`` (its name), ``reason``, ``runs``
                            (how many), ``first_at``, ``until_at``
``dtimer-run-failed``       ``timer_id``, ``timer``, ``task``, ``task_id``, ``run``,
                            ``scheduled_at``, ``reason``, ``where`` (worker or instance), ``letter``
=========================== ========================================================================

All have ``service`` too, and Celery's ``hostname`` and ``timestamp``, which is when it happened; no
arguments and no texts of exceptions. A run that is sent is Celery's own ``task-sent``.

A thread sends them, on a connection of its own with time limits. Whoever tells waits for nothing.
While the broker is away the last `MOST_WAITING` are kept; what is left when the process ends is not
sent.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

from celery import Celery, signals
from kombu import Producer

from celery_dtimer import planning
from celery_dtimer.errors import DistributedTimerError
from celery_dtimer.publisher import failures_of, open_limited
from celery_dtimer.runs import DeadLetter
from celery_dtimer.settings import Settings
from celery_dtimer.signals import (
    failover,
    instance_joined,
    instance_left,
    timer_failed,
    timer_skipped,
)

logger = logging.getLogger(__name__)

#: Events that are kept while the broker does not take them; older ones are given up.
MOST_WAITING = 1000

_IDLE = 10.0  # seconds without an event after which the connection is closed
_EVENTS = "dtimer_events"  # the attribute of an app that holds its stream


def stream_of(app: Celery) -> EventStream:
    """Return the event stream of an app, the same each time."""
    found: EventStream | None = app.__dict__.get(_EVENTS)
    if found is None:
        found = app.__dict__[_EVENTS] = EventStream(app)
    return found


def install(app: Celery) -> None:
    """Have the app's workers send events, if its settings say so when they start."""
    signals.worker_init.connect(stream_of(app).on_worker, dispatch_uid=f"{__name__}.{id(app)}")


class EventStream:
    """Sends what signals tell in this process as events; a forked child does so by itself."""

    def __init__(self, app: Celery) -> None:
        """Prepare; nothing is heard before `connect`, nor sent before something happens."""
        self._app = app
        self._hostname = ""
        self._services: set[str] = set()
        self._timeout = 1.0
        self._renew()
        self._receivers = [  # signals hold them weakly
            (instance_joined, self._receiver("instance-joined", _named("instance", "epoch"))),
            (instance_left, self._receiver("instance-left", _named("instance", "is_dead"))),
            (failover, self._receiver("failover", _named("instance", "dead", "timers"))),
            (timer_skipped, self._receiver("runs-skipped", _skipped)),
            (timer_failed, self._receiver("run-failed", _failed)),
        ]

    def _renew(self) -> None:
        self._pid = os.getpid()
        self._waiting: deque[tuple[str, dict[str, Any]]] = deque(maxlen=MOST_WAITING)
        self._given_up = 0
        self._woken, self._stopped = threading.Event(), threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    # -- hearing

    def connect(self, settings: Settings, hostname: str) -> None:
        """Send what is told of a service from now on, in the name of a node."""
        self._services.add(settings.service)
        self._hostname, self._timeout = hostname, settings.broker_timeout
        for signal, receive in self._receivers:
            signal.connect(receive, dispatch_uid=f"{__name__}.{id(self)}")

    def on_worker(self, sender: Any = None, **_: Any) -> None:
        """Hear of what fails in a worker of the app that starts."""
        if getattr(sender, "app", None) is not self._app:
            return
        try:
            settings = Settings.from_app(self._app)
        except DistributedTimerError as exc:
            logger.debug("No events from this worker: %s", exc)
            return
        if settings.send_events:
            self.connect(settings, sender.hostname)

    def _receiver(
        self, kind: str, fields_of: Callable[[Mapping[str, Any]], dict[str, Any]]
    ) -> Callable[..., None]:
        def receive(sender: Any = None, **arguments: Any) -> None:
            if sender in self._services:
                self.add(f"dtimer-{kind}", {"service": sender, **fields_of(arguments)})

        return receive

    def add(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Have an event sent soon, with the time of now."""
        if self._pid != os.getpid():  # a fork has no threads, and locks that may be held for ever
            self._renew()
        self._given_up += len(self._waiting) == MOST_WAITING
        self._waiting.append((kind, {**fields, "timestamp": time.time()}))
        self._woken.set()
        with self._lock:
            if self._thread is None:
                line = _Line(self._app, self._hostname, self._timeout)
                self._thread = threading.Thread(
                    target=self._run, args=[line, self._stopped], name="dtimer-events", daemon=True
                )
                self._thread.start()

    def close(self, service: str, timeout: float) -> None:
        """Hear of a service no more.

        After the last one, what waits is sent if that takes no longer than ``timeout``.
        """
        self._services.discard(service)
        if self._services or self._pid != os.getpid():
            return
        for signal, receive in self._receivers:
            signal.disconnect(receive, dispatch_uid=f"{__name__}.{id(self)}")
        with self._lock:
            thread, self._thread = self._thread, None
            stopped, self._stopped = self._stopped, threading.Event()
        stopped.set()
        self._woken.set()
        if thread is not None:
            thread.join(timeout)

    # -- sending

    def _run(self, line: _Line, stopped: threading.Event) -> None:
        failures = 0
        while True:
            self._woken.clear()
            try:
                self._send_all(line)
                failures = 0
            except Exception as exc:
                failures += 1
                if failures == 1:
                    logger.warning("Events wait, the broker takes none: %s", type(exc).__name__)
            if stopped.is_set():
                break
            if failures:
                stopped.wait(planning.retry_delay(failures))
            elif not self._woken.wait(_IDLE):
                line.close()
                self._woken.wait()
        line.close()

    def _send_all(self, line: _Line) -> None:
        """Send what waits.

        Raises:
            Exception: the broker does not take it; what is not sent waits on.
        """
        while self._waiting:
            kind, fields = self._waiting.popleft()
            try:
                line.send(kind, fields)
            except _UnsendableError as exc:
                logger.warning("An event %s can not be sent: %s", kind, exc)
            except Exception:
                if len(self._waiting) < MOST_WAITING:
                    self._waiting.appendleft((kind, fields))
                raise
            given_up, self._given_up = self._given_up, 0
            if given_up:
                logger.warning("%s events were given up while the broker took none", given_up)


class _UnsendableError(Exception):
    """It is the event's own fault."""


class _Line:
    """A connection to the broker that is opened when it is needed; used by one thread."""

    def __init__(self, app: Celery, hostname: str, timeout: float) -> None:
        self._app, self._hostname, self._timeout = app, hostname, timeout
        self._connection: Any = None
        self._producer: Any = None
        self._dispatcher: Any = None

    def send(self, kind: str, fields: dict[str, Any]) -> None:
        """Publish an event.

        Raises:
            _UnsendableError: it can not be encoded, say.
            Exception: the broker can not be reached; whatever its client raises.
        """
        if self._connection is None:
            self._connection = open_limited(self._app, self._timeout)
            self._producer = Producer(self._connection, auto_declare=False)
            self._dispatcher = self._app.events.Dispatcher(
                hostname=self._hostname, enabled=False, buffer_while_offline=False
            )
        try:
            self._dispatcher.publish(kind, fields, self._producer, retry=False)
        except Exception as exc:
            is_down = isinstance(exc, failures_of(self._connection.transport))
            self.close()
            if is_down:
                raise
            raise _UnsendableError(type(exc).__name__) from exc

    def close(self) -> None:
        """Give the connection up, without a word to a broker that may not answer."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(Exception):  # whatever state it is in
                connection.collect()


def _named(*names: str) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    return lambda arguments: {name: arguments[name] for name in names}


def _skipped(arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **_named("instance", "timer_id", "reason", "runs")(arguments),
        "timer": arguments["name"],
        "first_at": _shown(arguments["first_at"]),
        "until_at": _shown(arguments["until_at"]),
    }


def _failed(arguments: Mapping[str, Any]) -> dict[str, Any]:
    letter: DeadLetter = arguments["letter"]
    return {
        "timer_id": letter.timer_id,
        "timer": letter.name,
        "task": letter.task,
        "task_id": letter.task_id,
        "run": letter.number,
        "scheduled_at": None if letter.scheduled_at is None else _shown(letter.scheduled_at),
        "reason": letter.reason,
        "where": letter.where,
        "letter": letter.id,
    }


def _shown(moment: datetime) -> str:
    return moment.isoformat(timespec="milliseconds")
