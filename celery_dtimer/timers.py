"""The public API: timers of one service, from any process."""

from __future__ import annotations

import difflib
import fnmatch
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timedelta, tzinfo
from functools import partial
from itertools import islice
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar, overload

from celery import Celery, Task
from celery.canvas import Signature
from celery.schedules import BaseSchedule

from celery_dtimer import (
    consistency,
    countdowns,
    doctor,
    draining,
    events,
    history,
    planning,
    schedules,
    transfer,
)
from celery_dtimer.allowed import AllowedTasks
from celery_dtimer.auditing import TimerAudit, audit_store
from celery_dtimer.canvas import is_canvas, parts_of
from celery_dtimer.countdowns import PendingTask
from celery_dtimer.declarations import declare
from celery_dtimer.doctor import Finding
from celery_dtimer.errors import (
    ConflictError,
    DistributedTimerError,
    InvalidTimerError,
    TimerNotFoundError,
    invalid,
    is_number,
    shown,
)
from celery_dtimer.keywords import KEYWORDS, TIMING, define
from celery_dtimer.masking import mask_report
from celery_dtimer.model import (
    Definition,
    Instance,
    Status,
    Timer,
    TimerState,
    check_size,
    check_storable,
    decode_definition,
    is_countdown_id,
    is_one_message,
    is_timer_id,
    new_requeued_id,
    new_trigger_id,
    requeued_task_id,
    timer_id,
    to_datetime,
)
from celery_dtimer.options import CALLBACK_MARK, with_time_limits
from celery_dtimer.policy import Defaults, check_policy, parse_policy
from celery_dtimer.resharding import reshard
from celery_dtimer.runs import (
    STATES,
    DeadLetter,
    RunRecord,
    read_letters,
    read_runs,
    requeued,
    told,
)
from celery_dtimer.scheduler import DistributedScheduler
from celery_dtimer.services import ServiceSummary, find_services
from celery_dtimer.settings import Settings, check_shards
from celery_dtimer.sharding import Shards
from celery_dtimer.signals import timer_failed
from celery_dtimer.store import attempts
from celery_dtimer.tracking import RunTracker
from celery_dtimer.transfer import ImportResult, OnConflict
from celery_dtimer.worker import RunClaims, callback_body, remembered_ms, take_retries
from celery_dtimer.zones import zone_name, zone_of

#: What a schedule may be given as.
ScheduleLike = float | timedelta | datetime | str | BaseSchedule | schedules.Schedule
#: What a callback may be given as: a task, its name, the short name of a callback, or a signature.
CallbackLike: TypeAlias = "Task[..., Any] | Signature[Any] | str"  # Celery 5.5's are no generics

#: What becomes of a run while an earlier one has not ended: see `DistributedTimer.create_timer`.
Overlap = Literal["allow", "skip", "buffer_one", "cancel_other"]

#: A function that is told of a run that has failed for good.
OnFailure = TypeVar("OnFailure", bound=Callable[["DeadLetter"], Any])

#: What becomes of fixed times where clocks change: see `DistributedTimer.create_timer`.
Dst = Literal["cron", "skip", "shift", "both"]

_BEATS_SERVICE = "dtimer_beats_service"  # the attribute of an app that holds the first one named
_KNOWN = "dtimer_timers"  # the attribute of an app that holds its objects of this class, weakly
_TRACKING = "dtimer_tracking"  # the attribute of an app that holds what tracks its runs
_MOST_PREVIEWED = 10_000
_MOST_PAGED = 2**53
_LONGEST_ASKED = 60  # seconds that workers may take to answer
_PAGE = 1000  # timers that are read at once
_STATUSES = ("active", "paused", "stopped", "broken")


class Counts(NamedTuple):
    """What has become of the runs of a service, since it began to count."""

    sent: int
    skips: dict[str, int]  #: runs that did not happen, by reason
    repaired: int = 0  #: how often something was put right that was damaged


class DistributedTimer:
    """The timers of one service: create, look at, change and delete them, from any process.

    Neither Redis nor the broker is contacted before a method needs it. Every method that takes a
    timer takes its id or its name.

    Raises (every method that contacts Redis):
        StoreUnavailableError: Redis could not be reached in time.
        StoreError: Redis refused, for lack of a permission say.
        EmbeddedServerError: the embedded server could not be started.
        SettingsError: a setting cannot be used.
    """

    def __init__(self, app: Celery, service: str | None = None) -> None:
        """Bind to a Celery app.

        Args:
            app: the Celery app whose settings, tasks and broker are used.
            service: the service to look at. The first one that is named for an app is that of its
                beats too, unless ``dtimer_service`` is set.
        """
        self.app = app
        self._service = service
        self._callbacks: dict[str, Task[..., Any] | str] = {}
        self._failure_receivers: list[Callable[..., None]] = []  # signals hold them weakly
        self._claims = RunClaims(app)
        _track(app, service)
        events.install(app)
        self._countdowns = countdowns.install(app)
        app.__dict__.setdefault(_KNOWN, weakref.WeakSet()).add(self)
        mask_report(app)
        self._lock = threading.Lock()
        self._shards: Shards | None = None
        self._scheduler: DistributedScheduler | None = None
        self._started_in = 0  # the process
        if service is not None and app.__dict__.setdefault(_BEATS_SERVICE, service) == service:
            app.add_defaults(lambda: {"dtimer_service": service})

    def __repr__(self) -> str:
        """Return the app's name and the service's."""
        return f"<DistributedTimer app={self.app.main!r} service={self._service!r}>"

    @property
    def store(self) -> Shards:
        """The shards behind this object."""
        with self._lock:
            if self._shards is None:
                self._shards = Shards(Settings.from_app(self.app, self._service))
            return self._shards

    # ------------------------------------------------------------ callbacks

    @overload
    def callback(self, function: Callable[..., Any], /) -> Task[..., Any]: ...

    @overload
    def callback(
        self,
        name: str | None = None,
        *,
        schedule: ScheduleLike | None = None,
        run_once: bool | float | timedelta = False,
        **options: Any,
    ) -> Callable[[Callable[..., Any]], Task[..., Any]]: ...

    def callback(
        self,
        name: Any = None,
        *,
        schedule: ScheduleLike | None = None,
        run_once: bool | float | timedelta = False,
        **options: Any,
    ) -> Any:
        """Turn a function into a Celery task that receives its timer first.

        ``@timers.callback``, ``@timers.callback("name")`` or ``@timers.callback(schedule=60)``. The
        function gets a `CallbackTimer` (id, name, service, instance, scheduled_at, run), built from
        the message, and then the timer's own arguments. The task's name is Celery's own,
        ``module.function``.

        Args:
            name: the callback's short name; by default the function's.
            schedule: declares a static timer of that name, which every beat of the app creates
                once.
            run_once: drop the second message of a run, which there is when a beat ends between
                sending a run and remembering that it has. A retry still runs, and so does a message
                that is delivered again because its worker died. Seconds or a timedelta: how long a
                run is remembered, in Redis, from its start; True is one day.
            **options: further options of the Celery task; with a schedule, ``args``, ``kwargs``,
                ``timezone``, ``dst``, ``description`` and all of a timer's policies (see
                `create_timer`) are the timer's.

        Raises:
            InvalidTimerError: another callback has the short name, the function takes no timer, or
                ``run_once`` is no time.
        """
        keep_ms = remembered_ms(run_once)
        if callable(name):
            return self._callback(name, None, None, None, {})
        return lambda function: self._callback(function, name, schedule, keep_ms, options)

    def _callback(
        self,
        function: Callable[..., Any],
        name: str | None,
        schedule: ScheduleLike | None,
        keep_ms: int | None,
        options: dict[str, Any],
    ) -> Task[..., Any]:
        short_name = name or function.__name__
        timer_fields: dict[str, Any] = {
            key: options.pop(key) for key in sorted(_FIELDS - _REQUIRED_FIELDS) if key in options
        }
        for field, value in timer_fields.items():
            if schedule is None:
                raise invalid(field, value, "a schedule beside it: it belongs to the static timer")
        for option in options if schedule is not None else ():
            close = difflib.get_close_matches(option, _FIELDS, 1, 0.8)
            if close and not hasattr(Task, option):
                raise invalid("option", option, f"{close[0]!r}, which has nearly this name")
        options.setdefault("name", self.app.gen_task_name(function.__name__, function.__module__))
        options = {**with_time_limits(options), CALLBACK_MARK: True}
        claim = None if keep_ms is None else partial(self._claims.claim, keep_ms=keep_ms)
        body = callback_body(function, claim, take_retries(options))
        decorator: Any = self.app.task(bind=True, **options)
        task: Task[..., Any] = decorator(body)
        self._register(short_name, task)  # unread: a task is made when Celery's app is complete
        if schedule is not None:
            entry: dict[str, Any] = {"task": options["name"], "schedule": schedule, **timer_fields}
            _check_timing(schedule, timer_fields)  # a bad one shows here
            declare(self.app, short_name, entry)
        return task

    def on_failure(self, function: OnFailure) -> OnFailure:
        """Call a function with the `DeadLetter` of each run that has failed for good.

        Usable as a decorator. It is called in the process that finds the run failed: the worker
        that executed it, or the beat that could not send it, or that missed it. The signal behind
        it is `celery_dtimer.signals.timer_failed`.

        Args:
            function: takes one positional argument. What it raises is logged.
        """
        if not callable(function):
            raise invalid("function", function, "a function that takes a DeadLetter")

        def receive(sender: str, letter: DeadLetter, **_: Any) -> None:
            if self._is_own(sender):
                function(letter)

        self._failure_receivers.append(receive)
        timer_failed.connect(receive, dispatch_uid=f"{__name__}.{id(receive)}")
        return function

    @property
    def service(self) -> str:
        """The name of the service."""
        return Settings.from_app(self.app, self._service).service

    def _is_own(self, service: str) -> bool:
        try:
            return self.service == service
        except DistributedTimerError:
            return False

    def register_callback(self, name: str, task: Task[..., Any] | str) -> None:
        """Give a Celery task a short name that timers can use.

        Raises:
            InvalidTimerError: another task has the name already.
        """
        if not _names_a_task(task):
            raise invalid("task", task, "a Celery task or its name")
        self._register(name, task)

    @property
    def callbacks(self) -> dict[str, str]:
        """The names of the tasks that callbacks are, by their short names."""
        return {name: _task_name(task) for name, task in self._callbacks.items()}

    def _register(self, name: str, task: Task[..., Any] | str) -> None:
        if not isinstance(name, str) or not name:
            raise invalid("name", name, "a str that is not empty")
        known = self._callbacks.get(name)
        if known is not None and _task_name(known) != _task_name(task):
            raise InvalidTimerError(
                f"the callback name {name!r} is taken by {_task_name(known)}; "
                f"give {_task_name(task)} another"
            )
        self._callbacks[name] = task

    # ------------------------------------------------------------ creating

    def create_timer(
        self,
        name: str,
        schedule: ScheduleLike,
        callback: CallbackLike,
        *,
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        timezone: tzinfo | str | None = None,
        dst: Dst | None = None,
        relative: bool = False,
        start_at: datetime | None = None,
        end_at: datetime | None = None,
        max_runs: int | None = None,
        jitter: float | timedelta | None = None,
        coalesce: bool | None = None,
        misfire_grace_time: float | timedelta | None = None,
        max_catch_up: int | None = None,
        shards: int | None = None,
        overlap: Overlap | None = None,
        resend_lost: bool | int = False,
        description: str = "",
        **options: Any,
    ) -> str:
        """Create a timer, or update the one of that name; return its id.

        A new interval timer runs first one interval after its creation, or at its ``start_at``.
        Creating the same again changes nothing, but that a broken timer is tried again; another
        schedule starts the timer anew; whatever else is changed keeps its phase. No timer runs for
        a moment before it was created, resumed or given its schedule, but for a single run whose
        moment has come: that runs at once.

        Args:
            name: any text; it identifies the timer.
            schedule: seconds, a timedelta, a crontab, a solar event, a cron text, a dateutil rrule
                or its text, or a datetime for a single run.
            callback: a task, its name, the short name of a callback, or a signature: of a task
                (``task.s(...)``), or a chain, group or chord.
            args: positional arguments, in place of those of a signature; a callback gets its timer
                before them.
            kwargs: keyword arguments, beside those of a signature.
            timezone: by whose clocks the schedule goes, and the zone of datetimes that name none;
                by default the app's. A timer without one follows the app's when that changes.
            dst: what becomes of a fixed time of a crontab or rrule that clocks leave out or show
                twice. "cron": it runs when the gap ends, and the first time; "skip": not at all,
                and the first time; "shift": later by the length of the gap, and the first time;
                "both": when the gap ends, and both times.
            relative: whether an interval is rounded to its unit, as in Celery.
            start_at: no run is scheduled before; an interval counts from it.
            end_at: no run is scheduled after.
            max_runs: after so many runs the timer has finished.
            jitter: seconds or a timedelta by which each run is delayed at most, by chance.
            coalesce: whether one run stands for all that were missed. Otherwise each is made up.
                By default `dtimer_coalesce`.
            misfire_grace_time: seconds or a timedelta, from 1 s: a run that would be later is
                skipped. By default `dtimer_misfire_grace_time`, for crontabs Celery's
                `beat_cron_starting_deadline` where that is set.
            max_catch_up: how many missed runs are made up at most without ``coalesce``; older ones
                are skipped. By default `dtimer_max_catch_up`.
            shards: each run is sent as so many messages; ``timer.shard_index`` tells them apart.
            overlap: what becomes of a run that is due while an earlier one has not ended. "allow":
                it is sent; "skip": it does not happen; "buffer_one": it waits for that end, and
                those that come due meanwhile do not happen; "cancel_other": the earlier one is
                revoked and terminated. Ends are known from the workers' tracking: without it a run
                counts as out for `dtimer_queued_lease`.
            resend_lost: how often a run that did not come back (its worker died, its time limit is
                over, or its message was lost) is sent again, under the same task id; True is once.
            description: shown to people.
            **options: what ``apply_async`` takes: queue, priority, headers, link, ... ``expires``
                counts from the sending if it is seconds or a timedelta; a datetime ends the timer.
                ``timeout``, in seconds or a timedelta, stands for a ``soft_time_limit``, and a
                ``time_limit`` 5 s later. Of callbacks also ``autoretry_for`` (exceptions or their
                full names; by default all), ``dont_autoretry_for``, ``max_retries``,
                ``retry_backoff``, ``retry_backoff_max`` and ``retry_jitter``, as Celery's tasks
                have them, in place of those of the callback: any of these makes a run that fails
                be retried.

        Raises:
            InvalidTimerError: something cannot be used, or ``dtimer_allowed_tasks`` does not allow
                a task that it would send; nothing was stored.
            TooManyTimersError: the service has ``dtimer_max_timers``; nothing was stored.
            ConflictError: others kept changing the timer.
        """
        definition = self._definition(
            {
                "name": name,
                "schedule": schedule,
                "callback": callback,
                "args": args,
                "kwargs": kwargs,
                "timezone": timezone,
                "dst": dst,
                "relative": relative,
                "start_at": start_at,
                "end_at": end_at,
                "max_runs": max_runs,
                "jitter": jitter,
                "coalesce": coalesce,
                "misfire_grace_time": misfire_grace_time,
                "max_catch_up": max_catch_up,
                "shards": shards,
                "overlap": overlap,
                "resend_lost": resend_lost,
                "description": description,
                **options,
            }
        )
        self.store.save([definition])
        return definition.id

    def create_timers(self, timers: Iterable[Mapping[str, Any]]) -> list[str]:
        """Create or update many timers; return their ids in order.

        All are checked before the first is stored. They are stored in batches: should Redis fail in
        between, or ``dtimer_max_timers`` be reached, calling again with the same timers completes
        the work.

        Args:
            timers: the keywords of `create_timer`, a dict for each timer.

        Raises:
            InvalidTimerError: one cannot be used (its place and name are in the message); nothing
                was stored.
            TooManyTimersError: the service has ``dtimer_max_timers``; some batches, of up to 64
                timers, may have been stored.
        """
        if not isinstance(timers, Iterable):
            raise invalid("timers", timers, "dicts with the keywords of create_timer")
        definitions: dict[str, Definition] = {}
        for place, keywords in enumerate(timers):
            definition = self._definition_at(place, keywords)
            if definition.name in definitions:
                raise InvalidTimerError(
                    f"timers[{place}]: the name {shown(definition.name)} occurs twice"
                )
            definitions[definition.name] = definition
        self.store.save(list(definitions.values()))
        return [definition.id for definition in definitions.values()]

    def _definition_at(self, place: int, keywords: Mapping[str, Any]) -> Definition:
        if not isinstance(keywords, Mapping):
            raise invalid(f"timers[{place}]", keywords, "a dict with the keywords of create_timer")
        missing = _REQUIRED_FIELDS - keywords.keys()
        if missing:
            raise InvalidTimerError(f"timers[{place}]: {', '.join(sorted(missing))} is missing")
        try:
            return self._definition(keywords)
        except InvalidTimerError as exc:
            raise InvalidTimerError(
                f"timers[{place}] ({shown(keywords.get('name'))}): {exc}"
            ) from exc

    def _definition(
        self, keywords: Mapping[str, Any], current: Definition | None = None
    ) -> Definition:
        """Return what the keywords of `create_timer` describe, checked.

        Args:
            keywords: of `create_timer`; those of `update_timer` with a ``current`` definition.
            current: what stays of the timer is taken from it.
        """
        task, args, kwargs, options = self._call(
            keywords["callback"],
            keywords.get("args"),
            keywords.get("kwargs"),
            {key: value for key, value in keywords.items() if key not in _FIELDS},
        )
        definition = define(
            self.app,
            keywords["name"],
            schedule=keywords["schedule"],
            task=task,
            args=args,
            kwargs=kwargs,
            options=options,
            keywords=keywords,
            current=current,
        )
        for field in ("args", "kwargs", "options"):
            value = getattr(definition, field)
            if value:
                check_storable(field, value)
        AllowedTasks(self.store.settings.allowed_tasks).check(definition)
        return check_size(definition)

    def _call(
        self,
        callback: CallbackLike,
        args: Sequence[Any] | None,
        kwargs: Mapping[str, Any] | None,
        options: dict[str, Any],
    ) -> tuple[str, tuple[Any, ...], dict[str, Any], dict[str, Any]]:
        """Return task name, arguments and options, with a signature's own taken in."""
        _check_arguments(args, kwargs)
        given = (tuple(args or ()), dict(kwargs or {}), options)
        if not isinstance(callback, Signature):
            return self._task_name_of(callback), *given
        if callback.subtask_type:
            for field, value in (("args", args), ("kwargs", kwargs)):
                if value:
                    raise invalid(field, value, "nothing: the tasks of a canvas have their own")
            task, own_args, own_kwargs, own_options = parts_of(callback, self.app)
            return task, tuple(own_args), own_kwargs, {**own_options, **options}
        return (
            str(callback.task),
            given[0] or tuple(callback.args),
            {**callback.kwargs, **given[1]},
            {
                **{key: value for key, value in callback.options.items() if key != "task_id"},
                **options,
            },
        )

    def _task_name_of(self, callback: object) -> str:
        if isinstance(callback, str) and callback:
            return _task_name(self._callbacks.get(callback, callback))
        if _names_a_task(callback):
            return _task_name(callback)
        raise invalid(
            "callback", callback, "a Celery task, its name, a callback's short name, or a signature"
        )

    # ------------------------------------------------------------ looking

    def get_timer(self, timer: str) -> Timer:
        """Return a timer by its id or name.

        Raises:
            TimerNotFoundError: there is none.
        """
        return self._timer_of(timer, self._resolve(timer).id)

    def _timer_of(self, timer: str, id: str) -> Timer:
        found = self.store.timers([id])
        if not found:
            raise _not_found(timer)
        return found[0]

    def get_timers(
        self,
        *,
        status: Status | None = None,
        name: str | None = None,
        task: str | None = None,
        instance: str | None = None,
        offset: int = 0,
        limit: int | None = None,
    ) -> list[Timer]:
        """Return timers: active ones by their next run, then paused, stopped and broken ones.

        Args:
            status: only those with this status.
            name: only those whose name matches, ``*`` and ``?`` standing for any text and any
                character.
            task: only those with this task, or callback's short name.
            instance: only those that this instance owns.
            offset: how many to leave out at the front.
            limit: how many to return at most; None for all.

        Raises:
            InvalidTimerError: a filter cannot be used.
        """
        if status is not None and not (isinstance(status, str) and status in _STATUSES):
            raise invalid("status", status, "one of " + ", ".join(_STATUSES))
        for key, text in (("name", name), ("instance", instance)):
            if text is not None and not isinstance(text, str):
                raise invalid(key, text, "a str")
        _check_page(offset, limit)
        pattern = None if name is None else name.replace("[", "[[]")  # only * and ? are special
        wanted_task = None if task is None else self._task_name_of(task)

        def matches(timer: Timer) -> bool:
            return (
                (status is None or timer.status == status)
                and (pattern is None or fnmatch.fnmatchcase(timer.name, pattern))
                and (wanted_task is None or timer.task == wanted_task)
            )

        end = None if limit is None else offset + limit
        if status is name is task is None and end is not None and end <= _PAGE:
            ids = self._ids(instance, end)
            found = self._found(ids, matches, end)
            if len(found) == end or len(ids) < end:
                return found[offset:]
        return self._found(self._ids(instance), matches, end)[offset:end]

    def _ids(self, instance: str | None, limit: int | None = None) -> list[str]:
        if instance is None:
            return self.store.timer_ids(limit)
        return self.store.owned_ids(instance, limit)

    def _found(
        self, ids: Sequence[str], matches: Callable[[Timer], bool], end: int | None
    ) -> list[Timer]:
        """Return the timers that match, at least so many if there are."""
        found: list[Timer] = []
        for start in range(0, len(ids), _PAGE):
            page = [id for id in ids[start : start + _PAGE] if not is_countdown_id(id)]
            found += filter(matches, self.store.timers(page))
            if end is not None and len(found) >= end:
                break
        return found

    def get_instance_timers(self, instance: str | None = None) -> list[Timer]:
        """Return the timers that an instance owns, by their next run.

        Args:
            instance: its id; by default the instance that `start` runs in this process, or, without
                one, every instance of the service (`Timer.instance` tells whose a timer is).
        """
        own = self._own_scheduler()
        if instance is None and own is not None:
            instance = own.instance
        if instance is not None:
            return self.get_timers(instance=instance)
        return [
            timer
            for each in self.get_service_instances()
            for timer in self.get_timers(instance=each.id)
        ]

    def get_service_instances(self) -> list[Instance]:
        """Return the service's registered instances, oldest first."""
        return self.store.instances()

    def get_services(self) -> list[ServiceSummary]:
        """Return the services that this Redis has under ``dtimer_key_prefix``, by their names.

        They are found by SCAN, on a cluster on all of its masters.

        Raises:
            StoreError: Redis refused: its user may not use SCAN, say.
        """
        return find_services(self.store.settings)

    def pending_count(self, instance: str | None = None) -> int:
        """Return how many timers wait for their next run, in the service or at one instance."""
        if instance is not None:
            _instance_id(instance)
        return self.store.pending_count(instance)

    def check_consistency(self) -> list[consistency.Violation]:
        """Return what does not hold between the service's structures: nothing when all is well."""
        return sorted(found for store in self.store.stores for found in consistency.check(store))

    def reshard(self, shards: int, on_progress: Callable[[int], None] = lambda moved: None) -> int:
        """Split the service into another number of shards, while its instances go on.

        Each shard has keys, and on Redis Cluster a slot, of its own. Timers move some at a time; no
        run is lost. Should it end before its time, call it again: it goes on. Then set
        ``dtimer_shards`` to the new number; processes that run go by it at once. All processes
        that have to do with the service must know shards: this version or a newer one.

        Args:
            shards: how many it is to have, from 1 to 64.
            on_progress: called now and then with how many timers have moved.

        Returns:
            how many timers have moved.

        Raises:
            SettingsError: it is no such number.
            ConflictError: the service is being given another number of shards.
            StoreUnavailableError: some timers can not be moved now, because their runs are being
                published by a broker that does not answer say; or Redis could not be reached.
        """
        return reshard(self.store, check_shards("shards", shards), on_progress)

    def drain_instance(
        self, instance: str, on_progress: Callable[[int], None] = lambda moved: None
    ) -> int:
        """Hand an instance's timers over to the others, before its host is maintained, say.

        It stays registered and alive, as ``draining``, and is given no more timers until it is
        restarted, or by `undrain_instance`; only while no other instance is alive timers go to it
        rather than to nobody. No run is lost or sent twice.

        Args:
            instance: its id, as `get_service_instances` tells it.
            on_progress: called now and then with how many timers have moved.

        Returns:
            how many timers have moved.

        Raises:
            InstanceNotFoundError: no such instance is registered.
            ConflictError: no other live instance could take its timers; nothing was changed.
            StoreUnavailableError: some timers can not be moved now, because their runs are being
                published by a broker that does not answer say; the instance is given no more, and
                another call goes on. Or Redis could not be reached.
        """
        return draining.drain(self.store, _instance_id(instance), on_progress)

    def undrain_instance(self, instance: str) -> bool:
        """Let an instance that was drained be given timers again.

        It gets its share with the next check of any instance, or by `rebalance`.

        Args:
            instance: its id.

        Returns:
            False if it was not drained: then nothing has changed.

        Raises:
            InstanceNotFoundError: no such instance is registered.
        """
        return draining.undrain(self.store, _instance_id(instance))

    def rebalance(self) -> int:
        """Give every live instance its share of the timers now; return how many moved.

        Instances do so by themselves when one joins, and leave up to 10 % alone later. What is due
        this very moment stays where it is. Without a live instance nothing moves.
        """
        return draining.even_out(self.store)

    def export_timers(
        self, name: str | None = None, *, include_pending: bool = True
    ) -> Iterator[dict[str, Any]]:
        """Yield the service's timers with their state, to be kept or imported elsewhere.

        The first row is a header, each other one a timer, or a call that waits for its time. Write
        them as lines with `celery_dtimer.transfer.dumps_row`. They hold arguments, and so whatever
        secrets are in these. Histories, dead letters and pending triggers are not among them.

        Args:
            name: only timers whose name matches, ``*`` and ``?`` standing for any text and any
                character; then no calls.
            include_pending: export calls with ``countdown`` or ``eta`` that wait in Redis too.

        Raises:
            InvalidTimerError: ``name`` is no text.
        """
        if name is not None and not isinstance(name, str):
            raise invalid("name", name, "a str")
        return transfer.export_timers(self.store, name, include_pending=include_pending)

    def import_timers(
        self,
        rows: Iterable[Mapping[str, Any] | str],
        *,
        on_conflict: OnConflict = "replace",
        on_progress: Callable[[int], None] = lambda done: None,
    ) -> ImportResult:
        """Store exported timers, which go on with their next runs of the export.

        All rows are checked as `create_timer` checks before the first is stored. Importing them
        again changes nothing. A timer that is here with the same definition keeps its own state if
        that is at least as far on. What was missed since the export is treated as if the beats had
        been down meanwhile.

        Args:
            rows: as `export_timers` yields them, or the lines of a file. They are read twice; an
                iterator is kept in memory for that.
            on_conflict: what becomes of a timer that has another definition here. "replace": it
                takes the row's; "keep": it stays; "fail": nothing is imported. A static timer here
                always keeps the one that its code declares.
            on_progress: called now and then with how many rows are done.

        Returns:
            how many timers were created, updated and left unchanged, and which rows were skipped,
            with the reasons.

        Raises:
            InvalidTimerError: a row cannot be used; its line and the field are in the message, and
                nothing was stored.
            ConflictError: a timer has another definition, and ``on_conflict`` is "fail"; nothing
                was stored. Or others kept changing a timer.
            TooManyTimersError: the service has ``dtimer_max_timers``; some batches may have been
                stored: importing again goes on.
        """
        return transfer.import_timers(
            self.app, self.store, rows, on_conflict=on_conflict, on_progress=on_progress
        )

    def doctor(self, *, worker_timeout: float = 1.0) -> list[Finding]:
        """Return what is so in the service, what is wrong, and what to do about it.

        All timers are read; nothing is changed. A server or a broker that does not answer is a
        finding, too.

        Args:
            worker_timeout: seconds that workers have to say which tasks they know; 0 to ask none.
        """
        if not is_number(worker_timeout) or not 0 <= worker_timeout <= _LONGEST_ASKED:
            accepted = f"seconds from 0 to {_LONGEST_ASKED}"
            raise invalid("worker_timeout", worker_timeout, accepted)
        return doctor.examine(self.store, self.app, seconds=worker_timeout)

    def audit(
        self, since: datetime, until: datetime | None = None, timer: str | None = None
    ) -> list[TimerAudit]:
        """Return for each timer whether its runs were sent, or not and why.

        Which runs it should have had is worked out from its schedule; what became of them tells the
        service's history, as far as it reaches back (``dtimer_history``). A timer that was changed
        meanwhile is looked at from then on.

        Args:
            since: of runs that were scheduled then or later; the app's time zone holds for a
                datetime without one.
            until: until then, likewise; by default until now.
            timer: only this one, by its id or name.

        Raises:
            TimerNotFoundError: there is no such timer.
            InvalidTimerError: a moment is no datetime, or the second one is before the first.
        """
        since_ms = schedules.moment_ms("since", since, self.app.timezone)
        until_ms = None
        if until is not None:
            until_ms = schedules.moment_ms("until", until, self.app.timezone)
            if until_ms < since_ms:
                raise invalid("until", until, "a moment that is not before since")
        ids = None if timer is None else [self._resolve(timer).id]
        return audit_store(self.store, since_ms, until_ms, ids)

    def get_counts(self) -> Counts:
        """Return how many runs the service has sent, and how many did not happen, by reason."""
        found = self.store.counters()
        skips = {
            reason: found[f"skipped_{reason}"]
            for reason in planning.REASONS
            if f"skipped_{reason}" in found
        }
        return Counts(found.get("sent", 0), skips, found.get("repaired", 0))

    # ------------------------------------------------------------ runs

    def get_runs(
        self,
        timer: str | None = None,
        *,
        state: str | None = None,
        offset: int = 0,
        limit: int | None = 100,
    ) -> list[RunRecord]:
        """Return what became of runs, newest first, as far as the histories reach back.

        Workers note it unless `dtimer_track_runs` is off; of what they have not noted it is known
        that it was sent.

        Args:
            timer: a timer's id or name: only its runs; None for those of all.
            state: only those in this state, one of `celery_dtimer.runs.STATES`.
            offset: how many to leave out at the front.
            limit: how many to return at most; None for all.

        Raises:
            TimerNotFoundError: there is no such timer.
            InvalidTimerError: something cannot be used.
        """
        if state is not None and not (isinstance(state, str) and state in STATES):
            raise invalid("state", state, "one of " + ", ".join(STATES))
        _check_page(offset, limit)
        id = None if timer is None else self._resolve(timer).id
        found = read_runs(self.store, id)
        chosen = [record for record in found if state in (None, record.state)]
        return chosen[offset : None if limit is None else offset + limit]

    def dead_letter_count(self) -> int:
        """Return how many dead letters there are."""
        return sum(store.dead_count() for store in self.store.stores)

    def get_dead_letters(self, *, offset: int = 0, limit: int | None = 100) -> list[DeadLetter]:
        """Return the runs that have failed for good, newest first; 10,000 are kept.

        Args:
            offset: how many to leave out at the front.
            limit: how many to return at most; None for all.
        """
        _check_page(offset, limit)
        return read_letters(self.store, offset, limit)

    def requeue_dead_letter(self, letter: str | DeadLetter) -> None:
        """Send what a dead letter holds once more, at once and in its place, as a new run.

        Args:
            letter: it, or its id.

        Raises:
            TimerNotFoundError: there is no such letter.
            InvalidTimerError: the letter does not tell all that is to be sent, and its timer is
                gone, over, or was changed; the letter is kept.
        """
        id = letter.id if isinstance(letter, DeadLetter) else letter
        row = self.store.dead_letter(id) if isinstance(id, str) else None
        if row is None:
            raise TimerNotFoundError(f"no dead letter has the id {shown(id)}")
        definition, shard = requeued(self.store, row)
        check_size(definition)
        requeued_id, parent, task_id = definition.id, "", ""
        if definition.message is None:
            requeued_id, parent = new_requeued_id(shard), row.get("timer") or definition.id
            if is_one_message(requeued_id, definition):
                task_id = requeued_task_id(requeued_id)
        revision, blob = definition.revision, definition.blob
        timer = row.get("timer") or requeued_id
        if not self.store.requeue(id, timer, requeued_id, parent, revision, blob, task_id=task_id):
            raise TimerNotFoundError(f"no dead letter has the id {shown(id)} any more")

    def purge_dead_letters(self, before: datetime | None = None) -> int:
        """Remove dead letters; return how many.

        Args:
            before: only those that were written up to this moment; the app's time zone holds for a
                datetime without one. None for all.
        """
        until_ms = None
        if before is not None:
            until_ms = schedules.moment_ms("before", before, self.app.timezone)
        removed = 0
        while count := self.store.purge_dead(until_ms):
            removed += count
        return removed

    def why(self, timer: str, moment: datetime) -> str:
        """Say in a sentence what became of a timer's run at a moment, or why there was none.

        The service's history tells what was sent and what was skipped as far as it reaches back
        (``dtimer_history``); for the rest the timer's state does. What workers have noted follows.

        Args:
            timer: its id or name.
            moment: when the run was scheduled, give or take a second; the app's time zone holds for
                a datetime without one.

        Raises:
            TimerNotFoundError: there is no such timer.
            InvalidTimerError: the moment is no datetime.
        """
        moment_ms = schedules.moment_ms("moment", moment, self.app.timezone)
        state = self._resolve(timer)
        try:
            blob = self.store.definitions([state.id])[0]
            definition = decode_definition(blob) if blob else None
        except InvalidTimerError:
            definition = None
        found = history.records(self.store.history(moment_ms - history.NEAR_MS), state.id)
        answer = history.explain(definition, state, moment_ms, self.store.now_ms(state.id), found)
        near = timedelta(milliseconds=history.NEAR_MS)
        noted = told(
            record
            for record in read_runs(self.store, state.id, moment_ms - history.NEAR_MS)
            if abs(record.scheduled_at - to_datetime(moment_ms)) <= near
        )
        return f"{answer}; {noted}" if noted else answer

    def preview(
        self,
        timer_or_schedule: str | Timer | ScheduleLike,
        n: int = 10,
        *,
        after: datetime | None = None,
        timezone: tzinfo | str | None = None,
        **timing: Any,
    ) -> list[datetime]:
        """Return the next moments at which a timer, or a timer with such a schedule, runs.

        They are the scheduled moments, without jitter. A schedule is worked out without Redis.

        Args:
            timer_or_schedule: a timer's id or name, a `Timer`, or a schedule as `create_timer`
                takes it. A text that reads as a cron or rrule text is taken as a schedule.
            n: how many moments are returned at most.
            after: they come after this moment, by default after now. Of an active timer that is
                overdue the run that it owes comes first.
            timezone: of the datetimes that are returned, and of a schedule that names none; by
                default the schedule's own, or the app's.
            **timing: ``dst``, ``relative``, ``start_at``, ``end_at`` and ``max_runs`` beside a
                schedule, as `create_timer` takes them.

        Raises:
            TimerNotFoundError: there is no such timer.
            InvalidTimerError: the schedule, or something else, cannot be used.
        """
        if not isinstance(n, int) or isinstance(n, bool) or not 1 <= n <= _MOST_PREVIEWED:
            raise invalid("n", n, f"a whole number from 1 to {_MOST_PREVIEWED}")
        after_ms = None
        if after is not None:
            after_ms = schedules.moment_ms("after", after, timezone or self.app.timezone)
        definition, state = self._previewed(timer_or_schedule, timezone, timing)
        now_ms = time.time_ns() // 1_000_000 if state is None else self.store.now_ms(state.id)
        if after_ms is None:
            after_ms = now_ms
            if state is not None and state.status == "active" and state.due_ms is not None:
                after_ms = min(after_ms, state.due_ms - 1)
        clock = definition.schedule
        own_zone = getattr(clock, "timezone", None) if schedules.has_clock(clock) else None
        zone = zone_of(zone_name(timezone or own_zone or self.app.timezone))
        # They matter to what a timer has missed.
        defaults = Defaults() if state is None else self.store.settings.defaults
        runs = planning.upcoming(definition, state, after_ms, now_ms, defaults)
        return [to_datetime(moment_ms).astimezone(zone) for moment_ms in islice(runs, n)]

    def _previewed(
        self,
        timer_or_schedule: Any,
        timezone: tzinfo | str | None,
        timing: Mapping[str, Any],
    ) -> tuple[Definition, TimerState | None]:
        """Return the definition to look at, and the state of the timer if it is one's."""
        unknown = timing.keys() - TIMING
        if unknown:
            name = min(unknown)
            raise invalid(name, timing[name], "no such keyword: " + ", ".join(sorted(TIMING)))
        name = timer_or_schedule
        if isinstance(name, Timer):
            name = name.id
        if isinstance(name, str) and not schedules.is_text(name):
            for keyword, value in timing.items():
                raise invalid(keyword, value, "nothing: a timer has its own")
            state = self._resolve(name)
            blob = self.store.definitions([state.id])[0]
            if blob is None:
                raise InvalidTimerError(f"the definition of timer {shown(name)} is gone")
            definition = decode_definition(blob)
            if isinstance(definition.schedule, schedules.Custom):
                rule = definition.schedule.describe()
                raise InvalidTimerError(f"timer {shown(name)} goes by code of its beats: {rule}")
            return definition, state
        return define(
            self.app,
            "preview",
            schedule=timer_or_schedule,
            task="preview",
            args=(),
            kwargs={},
            options={},
            keywords={**timing, "timezone": timezone},
        ), None

    # ------------------------------------------------------------ changing

    def update_timer(
        self, timer: str, *, expected_revision: str | None = None, **changes: Any
    ) -> Timer:
        """Change a timer; what is not named stays. Return it as it is then.

        Args:
            timer: its id or name.
            expected_revision: the `Timer.revision` on which the change is based: with another one
                stored nothing is changed.
            **changes: what `create_timer` takes; None stands for the default, and removes an
                option. A signature as callback brings its arguments with it.

        Raises:
            TimerNotFoundError: there is none.
            InvalidTimerError: something cannot be used, or there is nothing left to change; nothing
                was stored.
            ConflictError: its revision is not the expected one, which the error carries; or others
                kept changing it.
        """
        if "name" in changes:
            raise invalid("name", changes["name"], "nothing: a name identifies its timer and stays")
        if expected_revision is not None and not isinstance(expected_revision, str):
            raise invalid("expected_revision", expected_revision, "the revision of a timer")
        for _ in attempts(timer):
            state = self._resolve(timer)
            if expected_revision not in (None, state.revision):
                raise ConflictError(
                    f"timer {shown(timer)} has the revision {state.revision}, not "
                    f"{expected_revision}: somebody has changed it",
                    state.revision,
                )
            definition = self._definition_of(timer, state)
            if definition.code_bound:
                raise InvalidTimerError(
                    f"timer {shown(timer)} is taken from its beat's code: change it there"
                )
            changed = self._changed(definition, changes)
            if self.store.replace(state, definition, changed):
                break
        return self._timer_of(timer, state.id)

    def _changed(self, definition: Definition, changes: dict[str, Any]) -> Definition:
        callback = changes.get("callback", definition.task)
        options = {key: value for key, value in changes.items() if key not in _FIELDS}
        args, kwargs, stored = definition.args, definition.kwargs, definition.options
        if isinstance(callback, Signature):  # brings its own in place of the stored ones
            args, kwargs = (), {}
            stored = {key: value for key, value in stored.items() if key not in callback.options}
        elif "callback" in changes and is_canvas(definition.task):
            args, kwargs = (), {}  # they are what the canvas consisted of
        merged = {**stored, **options}
        return self._definition(
            {
                "args": args,
                "kwargs": kwargs,
                "schedule": definition.schedule,
                **{key: value for key, value in changes.items() if key in _FIELDS},
                "name": definition.name,
                "callback": callback,
                **{key: value for key, value in merged.items() if value is not None},
            },
            definition,
        )

    def pause_timer(self, timer: str) -> None:
        """Pause a timer: it keeps its phase, and what falls due meanwhile is skipped.

        Raises:
            TimerNotFoundError: there is none.
            InvalidTimerError: it is stopped or broken.
        """
        code = self.store.pause(self._resolve(timer).id)
        _check(code, timer, "is stopped or broken; only an active one can be paused")

    def stop_timer(self, timer: str) -> None:
        """Stop a timer: it stays, ``stopped``, until it is resumed, rescheduled or deleted.

        Raises:
            TimerNotFoundError: there is none.
        """
        _check(self.store.stop(self._resolve(timer).id), timer, "can not be stopped")

    def resume_timer(self, timer: str) -> None:
        """Go on with a paused, stopped or broken timer at its next run; missed ones are skipped.

        Raises:
            TimerNotFoundError: there is none.
            InvalidTimerError: it has nothing left to run.
            ConflictError: others kept changing it.
        """
        for _ in attempts(timer):
            state = self._resolve(timer)
            if state.status == "active":
                return
            definition = self._definition_of(timer, state)
            plan = planning.resume(definition, state, self.store.now_ms(state.id))
            if plan.next_due_ms is None:
                raise InvalidTimerError(
                    f"timer {shown(timer)} has no run left: {definition.schedule.describe()}"
                )
            if self.store.resume(state, plan) == 1:
                return

    def trigger_timer(self, timer: str) -> None:
        """Run a timer now, also a paused one, without moving its schedule or its count.

        Raises:
            TimerNotFoundError: there is none.
            InvalidTimerError: it has nothing to send: it is broken, or a one-shot that has run, or
                its ``expires`` has come, so that no worker would run it.
        """
        id = self._resolve(timer).id
        self._check_unexpired(timer, id)
        code = self.store.trigger(id, new_trigger_id())
        _check(code, timer, "has nothing to send: it is broken, or has run and is over")

    def _check_unexpired(self, timer: str, id: str) -> None:
        blob = self.store.definitions([id])[0]
        expires_ms = None
        if blob is not None:
            with suppress(InvalidTimerError):  # the store refuses what cannot be read
                expires_ms = decode_definition(blob).expires_ms
        if expires_ms is not None and expires_ms <= self.store.now_ms(id):
            raise InvalidTimerError(f"timer {shown(timer)} has nothing to send: it has expired")

    def delete_timer(self, timer: str) -> None:
        """Delete a timer, with its pending triggers.

        A static timer is written again by the beats that declare it: stop it instead.

        Raises:
            TimerNotFoundError: there is none.
        """
        if not self.store.delete(self._resolve(timer).id):
            raise _not_found(timer)

    # ------------------------------------------------------------ durable countdowns

    def get_pending(
        self,
        *,
        task: str | None = None,
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        queue: str | None = None,
        after: datetime | None = None,
        before: datetime | None = None,
        offset: int = 0,
        limit: int | None = None,
    ) -> list[PendingTask]:
        """Return the calls with ``countdown`` or ``eta`` that wait in Redis, by their time.

        Args:
            task: only those of this task, or callback's short name.
            args: only those with these positional arguments, as they come back from JSON.
            kwargs: only those that have these among their keyword arguments.
            queue: only those that go to this queue.
            after: only those that are due then or later; the app's time zone holds for a datetime
                without one.
            before: only those that are due before, likewise.
            offset: how many to leave out at the front.
            limit: how many to return at most; None for all.

        Raises:
            InvalidTimerError: a filter cannot be used.
        """
        _check_page(offset, limit)
        _check_arguments(args, kwargs)
        if queue is not None and not isinstance(queue, str):
            raise invalid("queue", queue, "the name of a queue")
        wanted_task = None if task is None else self._task_name_of(task)
        wanted_args = None if args is None else list(args)
        wanted_kwargs = dict(kwargs or {})

        def matches(call: PendingTask) -> bool:
            has = call.kwargs
            return (
                (wanted_task is None or call.task == wanted_task)
                and (wanted_args is None or call.args == wanted_args)
                and (not wanted_kwargs or (has is not None and {**has, **wanted_kwargs} == has))
                and (queue is None or call.queue == queue)
            )

        after_ms, before_ms = (
            None if moment is None else schedules.moment_ms(name, moment, self.app.timezone)
            for name, moment in (("after", after), ("before", before))
        )
        calls = filter(matches, countdowns.pending(self._countdowns.store, after_ms, before_ms))
        return list(islice(calls, offset, None if limit is None else offset + limit))

    def cancel(self, task_id: str) -> bool:
        """Cancel a call with ``countdown`` or ``eta`` that waits in Redis.

        Its result becomes REVOKED, as by ``app.control.revoke``, which cancels too.

        Args:
            task_id: the call's, as `celery.result.AsyncResult` has it.

        Returns:
            True if it was pending: it never runs. Should a beat be publishing it at that very
            moment (with confirmed dispatch), workers that run are told to drop it. False if
            nothing was: it was sent, cancelled before, or never there.

        Raises:
            InvalidTimerError: ``task_id`` is no text.
        """
        if not isinstance(task_id, str) or not task_id:
            raise invalid("task_id", task_id, "the id of a task")
        return self._countdowns.cancel([task_id])[0]

    # ------------------------------------------------------------ running

    def start(self) -> str:
        """Run the scheduler in this process, beside whatever it does; return the instance's id.

        The app's static schedule is part of it. Starting again while it runs changes nothing.
        """
        with self._lock:
            scheduler = self._own_scheduler()
            if scheduler is not None and not scheduler.is_running:  # it has failed
                scheduler.close()
                scheduler = None
            if scheduler is None:
                scheduler = DistributedScheduler(self.app, embedded=True, service=self._service)
                scheduler.start()
                self._scheduler, self._started_in = scheduler, os.getpid()
            return scheduler.instance

    def stop(self) -> None:
        """Hand this process's timers over to other instances and end its scheduler."""
        with self._lock:
            scheduler, self._scheduler = self._own_scheduler(), None
        if scheduler is not None:
            scheduler.close()

    # ------------------------------------------------------------ inside

    def _own_scheduler(self) -> DistributedScheduler | None:
        """Return the scheduler of this process; a forked child has none of its parent's threads."""
        return self._scheduler if self._started_in == os.getpid() else None

    def _resolve(self, timer: str) -> TimerState:
        """Return the state of a timer: a name is looked for first, then an id."""
        if not isinstance(timer, str):
            raise invalid("timer", timer, "the id or the name of a timer")
        ids = [timer_id(timer), *([timer] if is_timer_id(timer) else [])]
        for state in self.store.states(ids):
            if state is not None and not state.parent:
                return state
        raise _not_found(timer)

    def _definition_of(self, timer: str, state: TimerState) -> Definition:
        """Return a timer's definition.

        Raises:
            InvalidTimerError: its definition is gone or cannot be read.
        """
        blob = self.store.definitions([state.id])[0]
        if state.is_finished or blob is None:
            why = "has had its last run and is over" if state.is_finished else "has no definition"
            raise InvalidTimerError(f"timer {shown(timer)} {why}; create it again")
        return decode_definition(blob)


def timers_of(app: Celery, service: str | None = None) -> DistributedTimer:
    """Return an app's own timers of a service, which know its callbacks by their short names.

    Args:
        app: the Celery app.
        service: None for the app's.
    """
    wanted = Settings.from_app(app, service).service
    for timers in list(app.__dict__.get(_KNOWN, ())):
        if timers.service == wanted:
            known: DistributedTimer = timers
            return known
    return DistributedTimer(app, service)


_REQUIRED_FIELDS = frozenset({"name", "schedule", "callback"})
_FIELDS = _REQUIRED_FIELDS | KEYWORDS | {"args", "kwargs"}  # all others are options of the message


def _check_timing(schedule: Any, keywords: Mapping[str, Any]) -> None:
    """Refuse what cannot be of a static timer; the app may not be configured yet.

    Raises:
        InvalidTimerError: with the field and what is accepted.
    """
    timezone = keywords.get("timezone")
    rules = parse_policy(keywords, timezone or "UTC")
    rule = schedules.parse(
        schedule,
        timezone=timezone,
        default_timezone="UTC",
        relative=bool(keywords.get("relative")),
        dst=keywords.get("dst"),
        start_ms=rules.start_ms,
        bound=True,
    )
    check_policy(rules, rule)


def _check_arguments(args: object, kwargs: object) -> None:
    if args is not None and (isinstance(args, (str, bytes)) or not isinstance(args, Sequence)):
        raise invalid("args", args, "a list or tuple")
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise invalid("kwargs", kwargs, "a dict")


def _instance_id(instance: object) -> str:
    if not isinstance(instance, str) or not instance:
        raise invalid("instance", instance, "the id of an instance")
    return instance


def _check_page(offset: object, limit: object) -> None:
    for key, value in (("offset", offset), ("limit", 0 if limit is None else limit)):
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _MOST_PAGED:
            raise invalid(key, value, f"a whole number from 0 to {_MOST_PAGED}")


def _track(app: Celery, service: str | None) -> None:
    """Track the runs of an app in its workers: once, for all timers of the app."""
    tracker: RunTracker | None = app.__dict__.get(_TRACKING)
    if tracker is None:
        tracker = app.__dict__[_TRACKING] = RunTracker(app)
        tracker.install()
    if service is not None:
        tracker.services.add(service)


def _names_a_task(task: object) -> bool:
    if isinstance(task, str):
        return bool(task)
    return isinstance(getattr(task, "name", None), str) and hasattr(task, "apply_async")


def _task_name(task: Any) -> str:
    name: str = task if isinstance(task, str) else task.name
    return name


def _check(code: int, timer: str, refusal: str) -> None:
    """Raise what a script's code says against a timer, if it does."""
    if code == 0:
        raise _not_found(timer)
    if code < 0:
        raise InvalidTimerError(f"timer {shown(timer)} {refusal}")


def _not_found(timer: str) -> DistributedTimerError:
    return TimerNotFoundError(f"no timer has the id or the name {shown(timer)}")
