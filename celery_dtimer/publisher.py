"""Sends runs to the broker through Celery: a run counts as sent once the broker has it.

The messages are Celery's own, built by ``apply_async`` with the task's options, routes and signals.
The connection is the publisher's own, with time limits, so that a frozen broker blocks neither for
ever nor anybody else. On Redis the commands of a batch are captured and travel in one pipeline,
whose replies say for each message whether it arrived; on other brokers each message is confirmed by
itself.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from celery import Celery
from celery.app.routes import MapRoute
from celery.beat import BeatLazyFunc
from celery.exceptions import QueueNotFound
from kombu.exceptions import OperationalError

from celery_dtimer.capture import CapturingChannel, Command, capture
from celery_dtimer.errors import DistributedTimerError
from celery_dtimer.model import Definition, Run

logger = logging.getLogger(__name__)

_LONGEST_PUSH = 1024 * 1024  # bytes that one LPUSH of many messages takes
_LONGEST_REASON = 500  # characters of an error that are kept
_LONGEST_BATCH = 0.5  # seconds after which what is confirmed is to be committed
_TIME_LIMITS = {
    "redis": ("socket_timeout", "socket_connect_timeout"),
    "amqp": ("read_timeout", "write_timeout"),
}


class BrokerDownError(DistributedTimerError):
    """The broker could not be reached: this run and the rest of the batch were not sent."""


class RefusedError(DistributedTimerError):
    """The broker refused one message, which is tried again later."""


class UnsendableError(DistributedTimerError):
    """A message can not be built: its timer is set aside as broken."""


#: What is said of a run: None when the broker has it, else why not.
Outcome = RefusedError | UnsendableError | BrokerDownError | None


class Publisher:
    """Sends batches of runs on a broker connection of its own."""

    def __init__(
        self, app: Celery, *, timeout: float, on_progress: Callable[[], None] = lambda: None
    ) -> None:
        """Prepare a publisher; nothing is contacted before the first run.

        Args:
            app: whose broker, tasks and routes are used.
            timeout: seconds that one call to the broker may take, unless the app's transport
                options say otherwise.
            on_progress: called after each message or batch that was confirmed or refused.
        """
        self._app = app
        self._timeout = timeout
        self._on_progress = on_progress
        self._connection: Any = None
        self._producer: Any = None
        self._calls: WeakKeyDictionary[Definition, _Call] = WeakKeyDictionary()
        self._declared: set[tuple[Any, ...]] = set()  # whose queues this connection has declared
        self._failures: tuple[type[BaseException], ...] = (OperationalError, OSError)

    def __call__(self, runs: Sequence[Run], may_send: Callable[[], bool]) -> list[Outcome]:
        """Send runs in order.

        Args:
            runs: what is to be sent.
            may_send: asked before each send; no more is sent once it says no.

        Returns:
            an outcome for each run that was tried; fewer than runs when sending was not allowed any
            more, took too long, or the broker is down.
        """
        down = self._connect()
        if down is not None:
            return [down]
        self._app.set_current()  # result backends and canvas look for it in this thread
        if isinstance(self._producer.channel, CapturingChannel):
            return self._send_together(runs, may_send)
        return self._send_each(runs, may_send)

    def close(self) -> None:
        """End the connection; the next run opens a new one."""
        connection = self._take_connection()
        if connection is not None:
            with contextlib.suppress(Exception):  # whatever state it is in, it is given up
                connection.release()

    def _drop(self) -> None:
        """Give the connection up without a word to a broker that may not answer."""
        connection = self._take_connection()
        if connection is not None:
            with contextlib.suppress(Exception):
                connection.collect()
        self._on_progress()

    def _take_connection(self) -> Any:
        connection, self._connection, self._producer = self._connection, None, None
        self._declared.clear()
        return connection

    # -- connection

    def _connect(self) -> BrokerDownError | None:
        if self._producer is not None:
            return None
        connection = self._connection = self._app.connection_for_write()
        transport = connection.transport
        self._failures = _failures_of(transport)
        limits = dict.fromkeys(_TIME_LIMITS.get(transport.driver_type, ()), self._timeout)
        if transport.driver_type == "amqp":
            limits["confirm_publish"] = True
        connection.transport_options = {**limits, **(connection.transport_options or {})}
        connection.connect_timeout = min(connection.connect_timeout or self._timeout, self._timeout)
        capture(transport)
        try:
            # Each host once: connect() itself would try again two seconds later.
            hosts = len(connection.alt or ()) or 1
            connection.ensure_connection(max_retries=hosts - 1, interval_start=0)
            producer = self._app.amqp.Producer(connection, auto_declare=False)
            producer.channel  # noqa: B018 - opens it now, so that an unreachable broker shows here
        except self._failures as exc:
            return self._down(exc)
        self._producer = producer
        self._on_progress()
        return None

    def _down(self, exc: BaseException) -> BrokerDownError:
        self._drop()
        return BrokerDownError(f"{type(exc).__name__}: {exc}")

    # -- Redis: one pipeline

    def _send_together(self, runs: Sequence[Run], may_send: Callable[[], bool]) -> list[Outcome]:
        channel = self._producer.channel
        channel.take()
        outcomes: list[Outcome] = []
        batch = _Batch()
        for run in runs:
            try:
                self._apply(run)
                outcomes.append(None)
            except self._failures:
                self._drop()  # it was a declaration or a look-up: nothing is on its way yet
                return self._send_each(runs, may_send)
            except _UserCodeError as exc:
                outcomes.append(_refused(exc))
            except Exception as exc:
                channel.take()
                outcomes.append(_unsendable(exc))
            batch.add(channel.take())
        if not may_send():
            return []
        try:
            with channel.conn_or_acquire() as client:
                errors = batch.send(client)
        except self._failures as exc:
            return [self._down(exc)]
        self._on_progress()
        if any(errors):
            self._drop()  # the broker's name may lead to another server by now
        return [
            _refused(error) if error else outcome
            for outcome, error in zip(outcomes, errors, strict=True)
        ]

    # -- any broker: each message by itself

    def _send_each(self, runs: Sequence[Run], may_send: Callable[[], bool]) -> list[Outcome]:
        outcomes: list[Outcome] = []
        deadline = time.monotonic() + _LONGEST_BATCH
        for run in runs:
            if not may_send() or time.monotonic() > deadline:
                break
            outcomes.append(self._send(run))
            if isinstance(outcomes[-1], BrokerDownError):
                break
            self._on_progress()
        return outcomes

    def _send(self, run: Run) -> Outcome:
        """Send one run; what fails on a fresh connection too is the message's own fault."""
        failure: BaseException
        for _ in range(2):
            down = self._connect()
            if down is not None:
                return down
            try:
                self._apply(run)
                self._flush()
            except self._failures as exc:
                failure = exc
                self._drop()
            except _UserCodeError as exc:
                return _refused(exc)
            except Exception as exc:
                return _unsendable(exc)
            else:
                return None
        return _refused(failure)

    def _flush(self) -> None:
        """Send what one run left in a capturing channel."""
        channel = self._producer.channel
        if isinstance(channel, CapturingChannel):
            batch = _Batch()
            batch.add(channel.take())
            with channel.conn_or_acquire() as client:
                error = batch.send(client)[0]
            if error is not None:
                raise error

    # -- Celery

    def _apply(self, run: Run) -> None:
        call = self._calls.get(run.definition)
        if call is None:
            call = self._calls[run.definition] = _Call(self._app, run.definition)
        args, kwargs = call.arguments()
        headers = {**call.headers, "celery_beat_task": True, "dtimer": run.header}
        options = {**call.options, "headers": headers, "task_id": run.task_id}
        if call.destination in self._declared:
            options["declare"] = []
        with self._eager_failures():
            call.send(args, kwargs, producer=self._producer, **options)
        if call.destination is not None:
            self._declared.add(call.destination)

    @contextlib.contextmanager
    def _eager_failures(self) -> Iterator[None]:
        """With ``task_always_eager`` the task runs here, and its failure is its own."""
        try:
            yield
        except Exception:
            if not self._app.conf.task_always_eager:
                raise
            logger.exception("A task that ran eagerly has failed")


class _Batch:
    """The captured commands of many messages, for one pipeline.

    What goes to the same list in a row becomes one LPUSH: it takes many values, in the same order.
    """

    def __init__(self) -> None:
        self._commands: list[tuple[str, list[Any]]] = []
        self._room = 0  # bytes that the last command still takes
        self._messages: list[list[int]] = []  # for each message, the places of its commands

    def add(self, commands: Sequence[Command]) -> None:
        """Add the commands of one message; there are none when it was not built."""
        places = []
        for name, args in commands:
            if not (name == "lpush" and self._joins(*args)):
                self._commands.append((name, list(args)))
                self._room = _LONGEST_PUSH
            places.append(len(self._commands) - 1)
        self._messages.append(places)

    def _joins(self, key: str, message: str) -> bool:
        """Add a message to the last command, if that pushes to the same list and has room."""
        name, args = self._commands[-1] if self._commands else ("", [""])
        self._room -= len(message)
        if name != "lpush" or args[0] != key or self._room < 0:
            return False
        args.append(message)
        return True

    def send(self, client: Any) -> list[Exception | None]:
        """Send all; return for each message what the server said against it."""
        with client.pipeline(transaction=False) as pipe:
            for name, args in self._commands:
                getattr(pipe, name)(*args)
            replies = pipe.execute(raise_on_error=False)
        return [
            next((replies[i] for i in places if isinstance(replies[i], Exception)), None)
            for places in self._messages
        ]


class _Call:
    """What ``apply_async`` is called with for every run of a definition."""

    def __init__(self, app: Celery, definition: Definition) -> None:
        task = app.tasks.get(definition.task)
        options = dict(definition.options)
        ignore_result = options.pop("ignore_result", None if task is None else task.ignore_result)
        # Nobody waits for the result here: with ignore_result Celery does not subscribe to it,
        # which would last as long as the process; the header tells the worker what the task says.
        self.headers = {"ignore_result": ignore_result, **(options.pop("headers", None) or {})}
        # The timer tries again, not the call.
        self.options = {"retry": False, "router": _Router(app), **options, "ignore_result": True}
        self.destination = _destination(app, definition.task, options)
        self.send: Callable[..., Any] = (
            partial(app.send_task, definition.task) if task is None else task.apply_async
        )
        self._args, self._kwargs = tuple(definition.args), dict(definition.kwargs)
        self._is_lazy = any(
            isinstance(value, BeatLazyFunc) for value in (*self._args, *self._kwargs.values())
        )

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of one run.

        Raises:
            _UserCodeError: a lazy argument failed.
        """
        if not self._is_lazy:
            return self._args, self._kwargs
        try:
            args = tuple(_evaluated(value) for value in self._args)
            return args, {key: _evaluated(value) for key, value in self._kwargs.items()}
        except Exception as exc:
            raise _UserCodeError(f"{type(exc).__name__}: {exc}") from exc


class _UserCodeError(Exception):
    """A router or a lazy argument failed: neither the broker nor the message is to blame."""


class _Router:
    """Celery's router, whose failures are told from the broker's."""

    def __init__(self, app: Celery) -> None:
        self._router = app.amqp.router

    def route(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self._router.route(*args, **kwargs)
        except QueueNotFound:
            raise
        except Exception as exc:
            raise _UserCodeError(f"{type(exc).__name__}: {exc}") from exc


def _destination(app: Celery, task: str, options: dict[str, Any]) -> tuple[Any, ...] | None:
    """Return what decides to which queue a message goes, None when that may change each time."""
    if "declare" in options or not all(isinstance(route, MapRoute) for route in app.amqp.routes):
        return None
    destination = (task, *(options.get(name) for name in ("queue", "exchange", "routing_key")))
    return destination if all(isinstance(part, str | None) for part in destination) else None


def _failures_of(transport: Any) -> tuple[type[BaseException], ...]:
    """Return what a transport raises for a broker's fault.

    Some list KeyError among their connection errors; here that is an unknown queue or serializer.
    """
    listed = (*transport.connection_errors, *transport.channel_errors)
    return (
        OperationalError,
        OSError,
        *(kind for kind in listed if not issubclass(kind, LookupError)),
    )


def _unsendable(exc: Exception) -> UnsendableError:
    text = f"its message can not be built: {type(exc).__name__}: {exc}"
    return UnsendableError(text[:_LONGEST_REASON])


def _refused(exc: BaseException) -> RefusedError:
    return RefusedError(f"{type(exc).__name__}: {exc}"[:_LONGEST_REASON])


def _evaluated(value: Any) -> Any:
    return value() if isinstance(value, BeatLazyFunc) else value
