"""Durable countdowns: calls with ``countdown`` or ``eta`` that wait in Redis, not in a worker.

`install` puts itself before an app's ``send_task``, through which every call goes: those of tasks,
signatures and canvas steps, retries, and calls by name. A call that is to wait longer than
``dtimer_eta_threshold`` says becomes a hidden one-shot timer. Celery builds its message as ever, in
the caller's process, with its signals and its ``task-sent`` event; only the last step, the publish,
stores it. When it is due a beat publishes that very message, without ``eta``.

The timer's id comes from the task id: a call with the id of one that is pending replaces it, and a
call that is repeated because Redis did not answer is one timer. Nothing of it is left once it was
sent or cancelled.

Revoking goes the same way: an app's control cancels what is pending, then tells the workers.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from functools import partial
from numbers import Real
from typing import TYPE_CHECKING, Any

from celery import Celery, signals
from celery.utils.imports import symbol_by_name
from celery.utils.time import maybe_make_aware
from kombu.exceptions import OperationalError
from kombu.utils.functional import maybe_list, retry_over_time

from celery_dtimer.allowed import AllowedTasks
from celery_dtimer.background import Background
from celery_dtimer.errors import InvalidTimerError, StoreError, StoreUnavailableError, shown
from celery_dtimer.masking import masked
from celery_dtimer.messages import KeptMessage, keep, moment_of, to_ms_up
from celery_dtimer.model import (
    LAST_MS,
    Definition,
    countdown_id,
    decode_definition,
    is_countdown_id,
    to_datetime,
)
from celery_dtimer.settings import allowed_tasks, eta_threshold
from celery_dtimer.sharding import Shards
from celery_dtimer.store import IN_FLIGHT, Cancelled
from celery_dtimer.stores import ProcessStores

if TYPE_CHECKING:
    from typing_extensions import Self

logger = logging.getLogger(__name__)

# Writes what no dispatch loop may wait for: result backends have no time limit.
_background = Background("dtimer-results", "the results of cancelled tasks stay as they are")

_INSTALLED = "dtimer_countdowns"  # the attribute of an app that holds what `install` has made
_MOST_TOLD = 1000  # tasks of which it is said that their calls are not kept
_REASON = "revoked"  # as Celery's workers say it


def install(app: Celery) -> Countdowns:
    """Make an app's calls durable as its settings say; return what does it, the same each time.

    Nothing is read or contacted before the first call that is to wait.
    """
    known: Countdowns | None = app.__dict__.get(_INSTALLED)
    if known is None:
        known = app.__dict__[_INSTALLED] = Countdowns(app)
        app.send_task = known.send_task  # type: ignore[method-assign]
        control = app.__dict__.get("control")
        if control is None:
            app.control_cls = _ControlMaker(app.control_cls)  # type: ignore[assignment]
        else:
            _cancel_first(control)
    return known


def revoke(app: Celery, task_ids: Sequence[str], connection: Any) -> None:
    """Revoke tasks, and terminate those that run, without waiting for a result backend.

    Args:
        app: whose tasks.
        task_ids: of the tasks.
        connection: to the broker, by which the workers are told.

    Raises:
        StoreError: Redis could not be reached, or refused.
        Exception: the workers can not be told; whatever the broker's client raises.
    """
    known: Countdowns | None = app.__dict__.get(_INSTALLED)
    if known is not None and known.is_on:
        known.cancel_unmarked(task_ids)
    arguments = {"task_id": list(task_ids), "terminate": True}
    _broadcast(app, arguments, connection=connection)


def _broadcast(app: Celery, arguments: Mapping[str, Any], **how: Any) -> None:
    """Have workers revoke tasks; nothing pending is cancelled."""
    type(app.control).broadcast(app.control, "revoke", arguments=arguments, **how)


@dataclass(frozen=True, slots=True)
class PendingTask:
    """A call that waits for its time in Redis."""

    task_id: str
    task: str  #: its name
    eta: datetime  #: when it is sent, in UTC
    # Arguments and headers are not shown, since they may hold secrets.
    #: None when its body is not JSON, or has values known elsewhere only
    args: list[Any] | None = field(repr=False)
    kwargs: dict[str, Any] | None = field(repr=False)  #: likewise
    argsrepr: str = field(repr=False)  #: its arguments as a text, whatever its body is
    kwargsrepr: str = field(repr=False)
    queue: str  #: where it is sent; its routing key when no queue was named
    retries: int  #: how often the task was retried already
    root_id: str | None
    parent_id: str | None
    headers: dict[str, Any] = field(repr=False)  #: of its message

    @classmethod
    def from_stored(cls, definition: Definition, due_ms: int) -> PendingTask:
        """Return the call that is stored as a definition.

        Raises:
            InvalidTimerError: its message can not be read.
        """
        kept = KeptMessage(definition)
        content = kept.content
        about = {**(content or {}), **kept.headers}  # with protocol 1 it is all in the body
        return cls(
            task_id=kept.task_id,
            task=kept.task,
            eta=to_datetime(due_ms),
            args=None if content is None else list(content["args"]),
            kwargs=None if content is None else dict(content["kwargs"]),
            argsrepr=str(about.get("argsrepr", about.get("args", ""))),
            kwargsrepr=str(about.get("kwargsrepr", about.get("kwargs", ""))),
            queue=kept.queue,
            retries=about.get("retries") or 0,
            root_id=about.get("root_id"),
            parent_id=about.get("parent_id"),
            headers=kept.headers,
        )


class Countdowns:
    """An app's durable countdowns.

    Raises (every method that contacts Redis):
        SettingsError: a setting cannot be used.
    """

    def __init__(self, app: Celery) -> None:
        """Prepare for an app's calls."""
        self._app = app
        self._send: Callable[..., Any] = app.send_task
        self._stores = ProcessStores(app)
        self._not_kept: set[str] = set()  # tasks of which that was said

    # -- sending

    def send_task(
        self,
        name: str,
        args: Any = None,
        kwargs: Any = None,
        countdown: Any = None,
        eta: Any = None,
        task_id: str | None = None,
        producer: Any = None,
        connection: Any = None,
        *others: Any,
        **options: Any,
    ) -> Any:
        """Send a task as ``Celery.send_task`` does, or keep its message until it is due.

        Raises:
            kombu.exceptions.OperationalError: Redis could not be reached, or refused, as often as
                the call's retry policy tries.
            InvalidTimerError: the message can not be stored.
        """
        wait = None
        if (countdown or eta) and not getattr(producer, "sends_now", False):
            wait = self._wait(countdown, eta)
        allowed = AllowedTasks(None if wait is None else allowed_tasks(self._app))
        if wait is not None and not allowed.allows(name):
            self._say_why_not_kept(name)
            wait = None
        if wait is None:
            return self._send(
                name,
                args,
                kwargs,
                countdown,
                eta,
                task_id,
                producer,
                connection,
                *others,
                **options,
            )
        if self._app.conf.task_protocol == 2:  # where signals look for it; it is not kept
            options["headers"] = {**(options.get("headers") or {}), "eta": wait.text}

        def hold(definition: Definition, wait: _Wait, how: Mapping[str, Any]) -> bool:
            try:
                allowed.check(definition)
            except InvalidTimerError as exc:
                self._say_why_not_kept(name, str(exc))
                return False
            self._hold(definition, wait, how)
            return True

        with _Recorder(self._app, name, wait, hold, producer, connection) as recorder:
            return self._send(
                name, args, kwargs, None, None, task_id, recorder, None, *others, **options
            )

    def _say_why_not_kept(self, task: str, why: str = "it is not in dtimer_allowed_tasks") -> None:
        """Log once for each task that its calls wait in workers: the beats would not send them."""
        if task not in self._not_kept and len(self._not_kept) < _MOST_TOLD:
            self._not_kept.add(task)
            logger.warning("Calls of %s wait in a worker, and not in Redis: %s", shown(task), why)

    def _wait(self, countdown: Any, eta: Any) -> _Wait | None:
        """Return how long a call waits in Redis, None when it does not.

        What is no time at all is left to Celery, which says so.
        """
        threshold = eta_threshold(self._app)
        if threshold is None:
            return None
        now = datetime.now(timezone.utc)
        try:
            wait = _counted(self._app, countdown) if countdown else _stated(self._app, eta, now)
        except (ValueError, TypeError, AttributeError, OverflowError):
            return None
        if wait is None or not wait.seconds > threshold:
            return None
        return wait if wait.seconds < (LAST_MS - 1) / 1000 - now.timestamp() else None

    def _hold(self, definition: Definition, wait: _Wait, how: Mapping[str, Any]) -> None:
        """Store a message; try again as the call says that its publish is tried again.

        Raises:
            OperationalError: Redis could not be reached, or refused.
        """
        started = time.monotonic()

        def hold() -> None:
            store = self._stores.of()
            if wait.due_ms is not None:
                store.hold(definition, due_ms=wait.due_ms)
            else:
                left = wait.seconds - (time.monotonic() - started)
                store.hold(definition, delay_ms=max(0, math.ceil(left * 1000)))

        policy = how["retry_policy"] or {}
        try:
            if not how["retry"]:
                hold()
            else:
                retry_over_time(
                    hold,
                    StoreUnavailableError,
                    max_retries=policy.get("max_retries"),
                    interval_start=policy.get("interval_start", 0),
                    interval_step=policy.get("interval_step", 0.2),
                    interval_max=policy.get("interval_max", 0.2),
                )
        except StoreError as exc:
            raise OperationalError(str(exc)) from exc

    # -- cancelling

    @property
    def store(self) -> Shards:
        """The store of the app's calls."""
        return self._stores.of()

    @property
    def is_on(self) -> bool:
        """Say whether the app has durable countdowns."""
        return eta_threshold(self._app) is not None

    def cancel(self, task_ids: Sequence[str], store: Shards | None = None) -> list[bool]:
        """Cancel pending calls; return for each whether there was one.

        Their results become REVOKED. Workers are told to drop what a beat was about to send.

        Args:
            task_ids: of the calls.
            store: where they are; by default the app's own.

        Raises:
            StoreError: Redis could not be reached, or refused.
        """
        found = self._cancel(task_ids, store)
        out = [task_id for task_id, each in found.items() if each.code == IN_FLIGHT]
        if out:
            self._tell_workers(out)
        self._mark(found)
        return [bool(found[task_id].code) for task_id in task_ids]

    def cancel_unmarked(self, task_ids: Sequence[str]) -> None:
        """Cancel pending calls; their results become REVOKED soon, from another thread.

        Raises:
            StoreError: Redis could not be reached, or refused.
        """
        _background.do(partial(self._mark, self._cancel(task_ids)))

    def _cancel(
        self, task_ids: Sequence[str], store: Shards | None = None
    ) -> Mapping[str, Cancelled]:
        store = store or self._stores.of()
        found = store.cancel([countdown_id(task_id) for task_id in task_ids])
        return dict(zip(task_ids, found, strict=True))

    def _mark(self, found: Mapping[str, Cancelled]) -> None:
        """Store the results of what is cancelled, and raise the first failure of a backend."""
        failure: Exception | None = None
        for task_id, each in found.items():
            if each.code:
                try:
                    self._mark_as_revoked(task_id, each.blob)
                except Exception as exc:  # of the result backend: the others are to be told of
                    logger.error(
                        "Task %s is cancelled, but its result is not: %s", task_id, masked(exc)
                    )
                    failure = failure or exc
        if failure is not None:
            raise failure

    def cancel_stamped(self, headers: Mapping[str, Any]) -> list[str]:
        """Cancel pending calls with one of these stamps; return their task ids.

        Raises:
            StoreError: Redis could not be reached, or refused.
        """
        stamped = [
            each.task_id
            for each in pending(self._stores.of())
            if _is_stamped(each.headers, headers)
        ]
        done = self.cancel(stamped)
        return [task_id for task_id, is_done in zip(stamped, done, strict=True) if is_done]

    def _tell_workers(self, task_ids: list[str]) -> None:
        """Have workers drop messages that a beat may have sent just now."""
        try:
            _broadcast(self._app, {"task_id": task_ids})
        except OperationalError as exc:
            logger.warning("Tasks %s may have been sent, and no worker knows: %s", task_ids, exc)

    def _mark_as_revoked(self, task_id: str, blob: str) -> None:
        """Store the result of a call that never runs, and tell the chord that it is part of."""
        try:
            definition = decode_definition(blob)
            AllowedTasks(allowed_tasks(self._app)).check(definition)  # a chord of it may be told
            kept = KeptMessage(definition)
            request: Any = kept.request
            task = self._app.tasks.get(kept.task)
        except InvalidTimerError as exc:
            logger.warning("Task %s is cancelled, its message could not be read: %s", task_id, exc)
            request = task = None
        if request is not None:  # as its worker does: what tracks the run of a timer hears of it
            signals.task_revoked.send(
                sender=task or _UnknownTask(self._app, kept.task),
                request=request,
                terminated=False,
                signum=None,
                expired=False,
            )
        backend = self._app.backend if task is None else task.backend
        backend.mark_as_revoked(
            task_id, _REASON, request=request, store_result=_stores_errors(task, request)
        )


@dataclass(frozen=True)
class _UnknownTask:
    """Stands for a task that this process does not know, as the sender of a signal."""

    app: Celery
    name: str


def _stores_errors(task: Any, request: Any) -> bool:
    """Say whether the result of a task that does not run is stored, as its worker decides it."""
    ignores = None if request is None else request.ignore_result
    if task is None:
        return not ignores
    ignores = task.ignore_result if ignores is None else ignores
    return not ignores or bool(task.store_errors_even_if_ignored)


def _is_stamped(headers: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    """Say whether a message has one of the stamps, as a worker compares them."""
    stamps = headers.get("stamps") or {}
    return any(
        not set(map(str, maybe_list(stamps[name]))).isdisjoint(map(str, maybe_list(values)))
        for name, values in wanted.items()
        if name in (headers.get("stamped_headers") or ()) and stamps.get(name) is not None
    )


# ------------------------------------------------------------------ how long a call waits


@dataclass(frozen=True, slots=True)
class _Wait:
    """How long a call waits."""

    seconds: float
    text: str  #: the moment as Celery would write it into the message
    due_ms: int | None = None  #: the moment; None: counted by the server's clock


def _counted(app: Celery, countdown: Any) -> _Wait | None:
    if not isinstance(countdown, Real):
        return None
    seconds = float(countdown)
    eta = maybe_make_aware(app.now() + timedelta(seconds=seconds), app.timezone)
    return _Wait(seconds, eta.isoformat())


def _stated(app: Celery, eta: Any, now: datetime) -> _Wait:
    moment = moment_of(app, eta)
    text = eta if isinstance(eta, str) else eta.isoformat()
    return _Wait((moment - now).total_seconds(), text, to_ms_up(moment))


class _Recorder:
    """Stands in for the producer of a call: what is published with it first is stored instead.

    What else is asked of it, a real producer does, taken from the app's pool when it is needed.
    """

    def __init__(
        self,
        app: Celery,
        task: str,
        wait: _Wait,
        hold: Callable[[Definition, _Wait, Mapping[str, Any]], bool],
        producer: Any,
        connection: Any,
    ) -> None:
        self._app, self._task, self._wait, self._hold = app, task, wait, hold
        self._real, self._connection = producer, connection
        self._pooled: Any = None
        self._is_done = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pooled is not None:
            self._pooled.release()

    @property
    def connection(self) -> Any:
        """The connection that says which errors are the broker's; it is not opened for that."""
        if self._real is not None:
            return self._real.connection
        return self._connection or self._app.amqp.producer_pool.connections.connection

    @property
    def _producer(self) -> Any:
        if self._real is None and self._connection is not None:
            self._real = self._app.amqp.Producer(self._connection, auto_declare=False)
        elif self._real is None:
            self._real = self._pooled = self._app.amqp.producer_pool.acquire(block=True)
        return self._real

    def publish(self, body: Any, **how: Any) -> Any:
        """Store the call's message if that may be; publish whatever follows it."""
        if not self._is_done:
            kept = keep(_task_id(body, how), self._task, body, how)
            is_held = self._hold(kept, self._wait, how)
            self._is_done = True
            if is_held:
                return None
            if "id" not in how["headers"]:  # of protocol 1: the others have it in their headers
                body = {**body, "eta": self._wait.text}
            return self._producer.publish(body, **how)
        if isinstance(body, dict) and body.get("type") == "task-sent":
            body = {**body, "eta": self._wait.text}
        try:
            return self._producer.publish(body, **how)
        except Exception as exc:  # the call is stored: a caller that tried again would make two
            logger.warning("The event of a call that is pending could not be sent: %r", exc)
            return None

    def revive(self, channel: Any) -> None:
        """Nothing is to be revived before a real producer is in use."""
        if self._real is not None:
            self._real.revive(channel)

    def __getattr__(self, name: str) -> Any:
        """Answer as the real producer: result backends may ask for anything of it."""
        return getattr(self._producer, name)


def _task_id(body: Any, how: Mapping[str, Any]) -> str:
    """Return the id of a task from its message, of either protocol."""
    return str(how["headers"].get("id") or body["id"])


# ------------------------------------------------------------------ looking


def pending(
    store: Shards, after_ms: int | None = None, before_ms: int | None = None
) -> Iterator[PendingTask]:
    """Yield the calls that are pending in a store, by their time.

    Args:
        store: where they are.
        after_ms: only those that are due then or later.
        before_ms: only those that are due before.
    """
    until_ms = None if before_ms is None else before_ms - 1
    for page in store.queued(after_ms, until_ms):
        found = [(id, at) for id, at in page if is_countdown_id(id)]
        blobs = store.definitions([id for id, _ in found])
        for (id, at), blob in zip(found, blobs, strict=True):
            if blob is None:
                continue  # it was sent or cancelled just now
            try:
                yield PendingTask.from_stored(decode_definition(blob), at)
            except InvalidTimerError as exc:  # its beat sets it aside when it is due
                logger.warning("The pending task of timer %s can not be read: %s", id, exc)


# ------------------------------------------------------------------ an app's control


class _ControlMaker:
    """Makes an app's control, of the class that the app names: it cancels before it revokes."""

    def __init__(self, kind: Any) -> None:
        self._kind = kind

    def __call__(self, app: Celery) -> Any:
        control = symbol_by_name(self._kind)(app=app)
        _cancel_first(control)
        return control


def _cancel_first(control: Any) -> None:
    """Let an app's control cancel pending calls before it tells workers to revoke them."""
    tell = control.broadcast

    def broadcast(
        command: str, arguments: Mapping[str, Any] | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Broadcast a control command, as `celery.app.control.Control.broadcast` does.

        Raises:
            kombu.exceptions.OperationalError: Redis could not be reached, or refused; the workers
                were told all the same.
        """
        failure: Exception | None = None
        countdowns = install(control.app)
        if command in _REVOKING and countdowns.is_on:
            try:
                _REVOKING[command](countdowns, {**(arguments or {}), **kwargs})
            except Exception as exc:  # Redis', or the result backend's: the workers are told first
                failure = exc
        answer = tell(command, arguments, *args, **kwargs)
        if isinstance(failure, StoreError):
            raise OperationalError(f"pending tasks were not cancelled: {failure}") from failure
        if failure is not None:
            raise failure
        return answer

    control.broadcast = broadcast


def _revoke(countdowns: Countdowns, arguments: Mapping[str, Any]) -> None:
    task_ids = maybe_list(arguments.get("task_id")) or []
    countdowns.cancel([str(task_id) for task_id in task_ids])


def _revoke_stamped(countdowns: Countdowns, arguments: Mapping[str, Any]) -> None:
    headers = arguments.get("headers") or {}
    if not isinstance(headers, Mapping):  # as the command line gives them
        headers = dict(_pairs(headers))
    countdowns.cancel_stamped(headers)


def _pairs(texts: Iterable[str]) -> Iterator[tuple[str, str]]:
    for text in texts:
        name, _, value = text.partition("=")
        yield name, value


#: The control commands that revoke, and what they mean for pending calls.
_REVOKING: Mapping[str, Callable[[Countdowns, Mapping[str, Any]], None]] = {
    "revoke": _revoke,
    "terminate": _revoke,
    "revoke_by_stamped_headers": _revoke_stamped,
}
