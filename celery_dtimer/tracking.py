"""Tracks the runs of timers in the workers of an app, through Celery's own signals.

One round trip when a task starts, and one when it has ended; tasks that no timer has sent cost a
look at an attribute. What a worker notes, and what becomes of a run that nobody reports on, is told
in `celery_dtimer.runs`.

The child that runs a task notes both. The parent of a worker's processes renews the leases of all
runs in them, with one call for each service, and notes what a child can not: that its task was
revoked, or expired, or that the child itself is gone.

A report that can not be made is made later, from a thread, while the process lives. A start is not:
by then it is of no use. While Redis does not answer, tasks run as ever.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime, timezone
from typing import Any

from celery import Celery, signals, states
from celery.app.task import Context
from celery.exceptions import Reject, Retry, TimeLimitExceeded, WorkerLostError
from kombu.utils import json

from celery_dtimer import runs
from celery_dtimer.errors import DistributedTimerError, StoreUnavailableError
from celery_dtimer.messages import moment_of
from celery_dtimer.model import to_ms
from celery_dtimer.options import RETRY_HEADER
from celery_dtimer.runs import DeadLetter, error_text, read_letter
from celery_dtimer.settings import Settings
from celery_dtimer.sharding import Shards
from celery_dtimer.signals import tell, timer_failed
from celery_dtimer.store import REVOKED, OutRun, encode_name
from celery_dtimer.stores import ProcessStores
from celery_dtimer.worker import LONGEST_WAIT, REVOKED_MARK, CallbackTimer, read_header, timer_of

logger = logging.getLogger(__name__)

_STATES = {
    states.SUCCESS: runs.SUCCEEDED,
    states.FAILURE: runs.FAILED,
    states.RETRY: runs.RETRIED,
    states.REVOKED: runs.REVOKED,
    states.REJECTED: runs.REJECTED,
    states.IGNORED: runs.IGNORED,
}
_STARTED = "dtimer_started"  # the attribute of a request that says when it started
_REPORT_MS = 5000  # that a worker has, after a task's time limit, to say so
_RENEWALS = 3  # of a lease, within its time
_RENEW_AGAIN = 1.0  # seconds until leases that could not be renewed are tried again
_UNTIL_KNOWN = 0.3  # seconds between two looks for runs, until the first has shown its lease
_MOST_UNREPORTED = 1000
_LONGEST_CALL = 64 * 1024  # bytes of arguments, or of options, that a dead letter keeps
_LAST_PAUSE = 5.0  # seconds between two tries to report
_PAUSE = 5.0  # seconds without a start being noted, once Redis did not answer


class RunTracker:
    """Notes what becomes of the runs that an app's workers execute."""

    def __init__(self, app: Celery) -> None:
        """Prepare; `install` connects it."""
        self._app = app
        self._stores = ProcessStores(app, longest_wait=LONGEST_WAIT)
        self._outages = _Outages()
        self._backlog = _Backlog(self._outages)
        self._renewals: LeaseRenewals | None = None
        self.services: set[str] = set()  #: those that the app's code has named

    def install(self) -> None:
        """Hear Celery's signals for as long as this object lives."""
        signal_id = f"{__name__}.{id(self)}"  # else Celery 5.5 takes all objects' methods for one
        for signal, receiver in (
            (signals.task_prerun, self._on_start),
            (signals.task_postrun, self._on_end),
            (signals.task_failure, self._on_failure),
            (signals.task_revoked, self._on_revoked),
            (signals.task_unknown, self._on_unknown),
            (signals.worker_ready, self._on_worker_ready),
            (signals.worker_shutdown, self._on_worker_shutdown),
        ):
            signal.connect(receiver, dispatch_uid=signal_id)

    # -- in the process that runs the task

    def _on_start(self, task: Any = None, **_: Any) -> None:
        request = task.request
        timer = self._tracked(task, request)
        if timer is None:
            return
        setattr(request, _STARTED, time.monotonic())
        store = self._store(timer.service)
        if store is None or self._outages.is_paused:
            return
        limit = _time_limit(request, task)
        delivery = request.delivery_info or {}
        try:
            code = store.run_started(
                _out_run(request, timer),
                lease_ms=round(store.settings.run_lease * 1000),
                limit_ms=0 if limit is None else round(limit * 1000) + _REPORT_MS,
                redelivered=bool(delivery.get("redelivered")),
            )
        except DistributedTimerError as exc:
            self._outages.note(exc)
        else:
            self._outages.end()
            if code == REVOKED:  # a callback looks at it; nothing here can stop another task
                setattr(request, REVOKED_MARK, True)

    def _on_end(
        self, task: Any = None, retval: Any = None, state: str | None = None, **_: Any
    ) -> None:
        request = task.request
        timer = self._tracked(task, request)
        started = getattr(request, _STARTED, None)
        if timer is None or started is None or state not in _STATES:  # without one: it is killed
            return
        took_ms = round((time.monotonic() - started) * 1000)
        kind, keep_ms, error = _STATES[state], None, ""
        store = self._store(timer.service)
        queued_ms = 0 if store is None else round(store.settings.queued_lease * 1000)
        if isinstance(retval, Retry):
            keep_ms = _until_retry(self._app, retval) + queued_ms
            error = error_text(retval.exc or retval)
        elif isinstance(retval, Reject):
            reason, requeue = retval.args
            keep_ms = queued_ms if requeue else None
            error = error_text(reason or retval)
        elif kind == runs.FAILED:
            error = error_text(retval)
        elif kind == runs.IGNORED and getattr(request, REVOKED_MARK, None) is True:
            kind, error = runs.REVOKED, error_text(retval)
        letter = None
        if kind == runs.FAILED or (kind == runs.REJECTED and keep_ms is None):
            call = _call(request.args, request.kwargs)
            letter = _letter(request, task.name, timer, kind, error, call)
        if store is not None:
            self._end(store, _out_run(request, timer), kind, took_ms, error, keep_ms, letter)
        if letter is not None:
            self._tell(timer.service, letter)

    # -- in the process that is told by others

    def _on_failure(
        self,
        sender: Any = None,
        task_id: str = "",
        exception: Any = None,
        args: Any = None,
        kwargs: Any = None,
        **_: Any,
    ) -> None:
        """Note that the process of a run is gone; whatever else fails is noted by itself."""
        if not isinstance(exception, (WorkerLostError, TimeLimitExceeded)):
            return
        if getattr(sender, "app", None) is not self._app:
            return
        error = error_text(exception)
        request = sender.request if sender.request.id == task_id else None
        timer = None if request is None else timer_of(request)
        letter = _letter(request, sender.name, timer, runs.FAILED, error, _call(args, kwargs))
        if timer is None:  # Celery does not say whose it is: only what is stored of the run does
            self._fail_unknown(OutRun(task_id, worker=self._hostname), error, letter)
            return
        store = self._store(timer.service)
        if store is not None and self._is_sent_again(store, timer.id, timer.resent):
            self._end(store, _out_run(request, timer), runs.FAILED, None, error, 0, None)
            return
        if store is not None:
            self._end(store, _out_run(request, timer), runs.FAILED, None, error, None, letter)
        self._tell_soon(timer.service, letter)

    def _is_sent_again(self, store: Shards, timer_id: str, resent: int) -> bool:
        """Say whether a run whose process is gone is left to the look for lost runs."""
        try:
            return runs.is_sent_again(store, timer_id, resent)
        except DistributedTimerError as exc:
            self._outages.note(exc)
            return False

    def _fail_unknown(self, run: OutRun, error: str, letter: Mapping[str, str]) -> None:
        try:
            for service in self._stores.services() or {Settings.from_app(self._app).service}:
                store = self._store(service)
                if store is None:
                    continue
                known = store.out_run(run.task_id)
                if known is not None and runs.is_sent_again(store, known.timer_id, known.resent):
                    self._end(store, run, runs.FAILED, None, error, 0, None)
                elif known is not None:
                    self._end(store, run, runs.FAILED, None, error, None, letter)
                    found = read_letter(store, run.task_id)
                    if found is not None:
                        tell(timer_failed, service, letter=found)
        except DistributedTimerError as exc:
            self._outages.note(exc)

    def _on_revoked(
        self, sender: Any = None, request: Any = None, expired: bool = False, **_: Any
    ) -> None:
        timer = self._tracked(sender, request)
        store = None if timer is None else self._store(timer.service)
        if timer is not None and store is not None:
            kind = runs.EXPIRED if expired else runs.REVOKED
            self._end(store, _out_run(request, timer), kind, None, "", None, None)

    def _on_unknown(
        self, sender: Any = None, message: Any = None, name: str = "", id: str = "", **_: Any
    ) -> None:
        """Note that the worker does not know the task of a run: it has thrown the message away."""
        headers = getattr(message, "headers", None) or {}
        if "dtimer" not in headers or getattr(sender, "app", None) is not self._app:
            return
        fields = {
            "properties": message.properties or {},
            "delivery_info": message.delivery_info or {},
            "hostname": sender.hostname,
            "id": id,
        }
        request = Context({**headers})
        request.update(fields)
        timer = timer_of(request)
        store = None if timer is None else self._store(timer.service)
        if timer is not None and store is not None:
            error = f"the worker knows no task {name!r}"
            letter = _letter(request, name, timer, runs.REJECTED, error, _call_in(message))
            self._end(store, _out_run(request, timer), runs.REJECTED, None, error, None, letter)
            self._tell_soon(timer.service, letter)

    def _on_worker_ready(self, sender: Any = None, **_: Any) -> None:
        if getattr(sender, "app", None) is self._app and self._renewals is None:
            self._hear_of_revoked_runs()
            self._renewals = LeaseRenewals(self._store)
            self._renewals.start()

    def _hear_of_revoked_runs(self) -> None:
        """Have a worker that starts drop the messages of runs that were revoked meanwhile."""
        from celery.worker import state as worker_state  # only workers are to load it

        for service in self.services or {Settings.from_app(self._app).service}:
            try:
                worker_state.revoked.update(self._stores.of(service).revoked_runs())
            except DistributedTimerError as exc:
                self._outages.note(exc)

    def _on_worker_shutdown(self, sender: Any = None, **_: Any) -> None:
        if getattr(sender, "app", None) is self._app and self._renewals is not None:
            self._renewals.stop()
            self._renewals = None

    # -- inside

    def _tracked(self, task: Any, request: Any) -> CallbackTimer | None:
        """Return the timer that has sent a task, if it is to be tracked here."""
        if getattr(request, "dtimer", None) is None or task.app is not self._app:
            return None
        return None if request.is_eager else timer_of(request)

    def _store(self, service: str) -> Shards | None:
        """Return the store of a service, None when its runs are not tracked."""
        try:
            store = self._stores.of(service)
        except DistributedTimerError as exc:
            self._outages.note(exc)
            return None
        return store if store.settings.track_runs else None

    @property
    def _hostname(self) -> str:
        return "" if self._renewals is None else self._renewals.hostname

    def _end(
        self,
        store: Shards,
        run: OutRun,
        kind: str,
        took_ms: int | None,
        error: str,
        keep_ms: int | None,
        letter: Mapping[str, str] | None,
    ) -> None:
        """Note what became of a run, now or as soon as Redis answers."""

        def report() -> bool:
            return store.run_ended(
                run, kind, took_ms=took_ms, error=error, keep_ms=keep_ms, letter=letter
            )

        if self._backlog.is_waiting or self._outages.is_paused:
            self._backlog.add(report)  # in their order; and a task is not to wait a second time
            return
        try:
            report()
        except StoreUnavailableError as exc:
            self._outages.note(exc)
            self._backlog.add(report)
        except DistributedTimerError as exc:
            self._outages.note(exc)
        else:
            self._outages.end()

    def _tell(self, service: str, letter: Mapping[str, str]) -> None:
        timer_failed.send(sender=service, letter=_dead_letter(letter))

    def _tell_soon(self, service: str, letter: Mapping[str, str]) -> None:
        """Tell from another thread: this one serves the whole worker."""
        tell(timer_failed, service, letter=_dead_letter(letter))


class _Outages:
    """Says once for each outage that runs are not tracked, and spares tasks from waiting for it."""

    def __init__(self) -> None:
        self._is_down = False
        self._until = 0.0

    @property
    def is_paused(self) -> bool:
        return self._is_down and time.monotonic() < self._until

    def note(self, exc: Exception) -> None:
        if not self._is_down:
            logger.warning("What becomes of timers' runs can not be noted now: %s", exc)
        self._is_down, self._until = True, time.monotonic() + _PAUSE

    def end(self) -> None:
        self._is_down = False


class _Backlog:
    """Reports that are still to be made, and the thread that makes them."""

    def __init__(self, outages: _Outages) -> None:
        self._outages = outages
        self._renew()

    def _renew(self) -> None:
        self._pid = os.getpid()
        self._reports: deque[Callable[[], Any]] = deque(maxlen=_MOST_UNREPORTED)
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    @property
    def is_waiting(self) -> bool:
        if self._pid != os.getpid():  # a fork: these are its parent's, and a lock may be held
            self._renew()
        return bool(self._reports)

    def add(self, report: Callable[[], Any]) -> None:
        with self._lock:
            if len(self._reports) == _MOST_UNREPORTED:
                logger.error("What became of a run is forgotten: too much is still to be noted")
            self._reports.append(report)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="dtimer-reports", daemon=True
                )
                self._thread.start()

    def _run(self) -> None:
        pause = 0.1
        while True:
            with self._lock:
                if not self._reports:
                    self._thread = None
                    return
                report = self._reports[0]
            try:
                report()
            except StoreUnavailableError:
                time.sleep(pause)
                pause = min(_LAST_PAUSE, 2 * pause)
                continue
            except DistributedTimerError as exc:
                self._outages.note(exc)
            except Exception:
                logger.exception("What became of a run can not be noted")
            else:
                self._outages.end()
            with self._lock:
                if self._reports and self._reports[0] is report:
                    self._reports.popleft()


class LeaseRenewals(threading.Thread):
    """Renews the leases of the runs that a worker is running; `step` is one round."""

    def __init__(self, store_of: Callable[[str], Shards | None]) -> None:
        """Prepare the thread; `start` runs it.

        Args:
            store_of: returns the store of a service, None when its runs are not tracked.
        """
        super().__init__(name="dtimer-leases", daemon=True)
        self._store_of = store_of
        self._stopped = threading.Event()
        self._pause = _UNTIL_KNOWN
        self.hostname = ""

    def run(self) -> None:
        """Renew until stopped."""
        while not self._stopped.wait(self._pause):
            try:
                self.step()
            except DistributedTimerError as exc:  # a round that comes soon makes up for it
                logger.debug("Leases of runs were not renewed: %s", exc)
                self._pause = min(self._pause, _RENEW_AGAIN)
            except Exception:  # a header that was tampered with, say: the others go on
                logger.exception("Leases of runs were not renewed")

    def step(self) -> int:
        """Renew what is running; return how many leases.

        Raises:
            StoreError: Redis did not answer, or refused.
        """
        by_service: dict[str, list[tuple[str, str, str]]] = defaultdict(list)
        for request in _active_requests():
            header = request.request_dict.get("dtimer")
            self.hostname = request.hostname
            timer = read_header(header) if header else None
            if timer is not None:
                properties = request.request_dict.get("properties")
                message = _message(request.hostname, properties)
                by_service[timer.service].append((request.id, message, timer.id))
        renewed = 0
        for service, running in by_service.items():
            store = self._store_of(service)
            if store is not None:
                lease = store.settings.run_lease  # the same for all services of the app
                self._pause = lease / _RENEWALS
                renewed += store.renew_runs(running, round(lease * 1000))
        return renewed

    def stop(self) -> None:
        """End the thread after the round that it is in."""
        self._stopped.set()


def _active_requests() -> Iterable[Any]:
    """Return what the worker of this process runs, whatever another thread does to the set."""
    from celery.worker import state as worker_state  # only workers are to load them

    while True:
        try:
            return list(worker_state.active_requests)
        except RuntimeError:  # it has changed meanwhile
            continue


def _message(hostname: str | None, properties: Mapping[str, Any] | None) -> str:
    """Return what tells the message that a worker runs from another one of the same run."""
    tag = (properties or {}).get("delivery_tag", "")
    return encode_name(f"{hostname} {tag}")


def _out_run(request: Any, timer: CallbackTimer) -> OutRun:
    return OutRun(
        task_id=request.id,
        timer_id=timer.id,
        scheduled_ms=to_ms(timer.scheduled_at),
        number=timer.run,
        shard=timer.shard_index,
        retries=request.retries or 0,
        resent=timer.resent,
        message=_message(request.hostname, request.properties),
        worker=request.hostname or "",
    )


def _time_limit(request: Any, task: Any) -> float | None:
    """Return the seconds after which a worker ends a task, None when it never does."""
    hard: float | None = (request.timelimit or (None, None))[0] or task.time_limit
    return hard


def _until_retry(app: Celery, retry: Retry) -> int:
    """Return the ms until a task that asks for a retry is to be run."""
    when: Any = retry.when
    if isinstance(when, datetime):
        left = moment_of(app, when) - datetime.now(timezone.utc)
        return max(0, round(left.total_seconds() * 1000))
    return round(float(when) * 1000) if isinstance(when, (int, float)) else 0


def _letter(
    request: Any,
    task: str,
    timer: CallbackTimer | None,
    reason: str,
    error: str,
    call: str,
) -> dict[str, str]:
    """Return what a dead letter holds of a run: enough to send it once more."""
    letter = {"reason": reason, "task": task, "call": call}
    if timer is not None:
        letter["options"] = _json(_sent_options(request))
        letter |= {
            "name": timer.name,
            "timer": timer.id,
            "due": str(to_ms(timer.scheduled_at)),
            "number": str(timer.run),
            "shard": str(timer.shard_index),
            "shards": str(timer.shard_total),
            "task_id": request.id,
            "retries": str(request.retries or 0),
            "where": request.hostname or "",
            "error": error,
        }
    return letter


def _dead_letter(letter: Mapping[str, str]) -> DeadLetter:
    now_ms = to_ms(datetime.now(timezone.utc))
    return DeadLetter.from_stored(letter["task_id"], {"at": str(now_ms), **letter})


def _sent_options(request: Any) -> dict[str, Any]:
    """Return the options that a run's message was sent with, as `create_timer` takes them.

    As Celery takes them for a retry; but not what belongs to that message alone: its ids, its
    place in a canvas, and its ``expires``.
    """
    told = request.as_execution_options()
    headers = dict(told["headers"] or {})
    for name in ("dtimer", "celery_beat_task"):
        headers.pop(name, None)
    options = {**(headers.pop(RETRY_HEADER, None) or {}), "headers": headers}
    for name in ("link", "link_error", "soft_time_limit", "time_limit", "shadow"):
        options[name] = told[name]
    for name in ("stamped_headers", *(told.get("stamped_headers") or ())):
        options[name] = told.get(name)
    options["ignore_result"] = vars(request).get("ignore_result")  # the class says False for none
    delivery = request.delivery_info or {}
    options["priority"] = delivery.get("priority")
    if delivery.get("exchange"):
        options |= {name: delivery.get(name) for name in ("exchange", "routing_key")}
    else:  # the default exchange: its routing keys are names of queues
        options["queue"] = delivery.get("routing_key")
    return {name: value for name, value in options.items() if value not in (None, {}, [])}


def _call_in(message: Any) -> str:
    """Return the arguments in a message that no task has taken, "" when they can not be read."""
    try:
        args, kwargs, _ = message.payload
    except Exception as exc:  # of any serializer
        logger.debug("The arguments of a message can not be kept: %s", exc)
        return ""
    return _call(args, kwargs)


def _call(args: Any, kwargs: Any) -> str:
    """Return arguments as JSON, "" when they can not be kept."""
    return _json([list(args or ()), dict(kwargs or {})])


def _json(value: Any) -> str:
    """Return a value as JSON, "" when it can not be kept."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError, OverflowError, RecursionError) as exc:
        logger.debug("A dead letter can not keep %s: %s", type(value).__name__, exc)
        return ""
    return text if len(text) <= _LONGEST_CALL else ""
