"""The public API: timers of one service, from any process."""

from __future__ import annotations

import fnmatch
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta, tzinfo
from functools import partial
from typing import Any, TypeAlias, overload

from celery import Celery, Task
from celery.canvas import Signature
from celery.schedules import BaseSchedule

from celery_dtimer import consistency, policy, schedules
from celery_dtimer.declarations import declare
from celery_dtimer.errors import (
    DistributedTimerError,
    InvalidTimerError,
    TimerNotFoundError,
    invalid,
    shown,
)
from celery_dtimer.model import (
    Definition,
    Instance,
    Status,
    Timer,
    TimerState,
    check_size,
    check_storable,
    decode_definition,
    is_timer_id,
    new_trigger_id,
    timer_id,
)
from celery_dtimer.options import check_options
from celery_dtimer.scheduler import DistributedScheduler
from celery_dtimer.settings import Settings
from celery_dtimer.store import Store, attempts
from celery_dtimer.worker import RunClaims, callback_body, remembered_ms

#: What a schedule may be given as.
ScheduleLike = float | timedelta | datetime | str | BaseSchedule | schedules.Schedule
#: What a callback may be given as: a task, its name, the short name of a callback, or a signature.
CallbackLike: TypeAlias = "Task[..., Any] | Signature[Any] | str"  # Celery 5.5's are no generics

_BEATS_SERVICE = "dtimer_beats_service"  # the attribute of an app that holds the first one named
_PAGE = 1000  # timers that are read at once
_STATUSES = ("active", "paused", "stopped", "broken")


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
        self._claims = RunClaims(app)
        self._lock = threading.Lock()
        self._store: Store | None = None
        self._scheduler: DistributedScheduler | None = None
        self._started_in = 0  # the process
        if service is not None and app.__dict__.setdefault(_BEATS_SERVICE, service) == service:
            app.add_defaults(lambda: {"dtimer_service": service})

    def __repr__(self) -> str:
        """Return the app's name and the service's."""
        return f"<DistributedTimer app={self.app.main!r} service={self._service!r}>"

    @property
    def store(self) -> Store:
        """The store behind this object."""
        with self._lock:
            if self._store is None:
                self._store = Store(Settings.from_app(self.app, self._service))
            return self._store

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
                ``timezone`` and ``description`` are the timer's.

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
            key: options.pop(key)
            for key in ("args", "kwargs", "timezone", "description")
            if key in options
        }
        if timer_fields and schedule is None:
            raise invalid(
                next(iter(timer_fields)),
                timer_fields,
                "a schedule beside it: it belongs to the static timer",
            )
        options.setdefault("name", self.app.gen_task_name(function.__name__, function.__module__))
        decorator: Any = self.app.task(bind=True, **options)
        once = [] if keep_ms is None else [partial(self._claims.claim, keep_ms=keep_ms)]
        task: Task[..., Any] = decorator(callback_body(function, *once))
        self._register(short_name, task)  # unread: a task is made when Celery's app is complete
        if schedule is not None:
            zone = timer_fields.get("timezone")
            schedules.parse(schedule, timezone=zone, default_timezone="UTC")  # bad ones show here
            entry: dict[str, Any] = {"task": options["name"], "schedule": schedule, **timer_fields}
            declare(self.app, short_name, entry)
        return task

    def register_callback(self, name: str, task: Task[..., Any] | str) -> None:
        """Give a Celery task a short name that timers can use.

        Raises:
            InvalidTimerError: another task has the name already.
        """
        if not _names_a_task(task):
            raise invalid("task", task, "a Celery task or its name")
        self._register(name, task)

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
        description: str = "",
        **options: Any,
    ) -> str:
        """Create a timer, or update the one of that name; return its id.

        A new interval timer runs first one interval after its creation. Creating the same again
        changes nothing; changing the arguments alone keeps the timer's phase; another schedule
        starts it anew.

        Args:
            name: any text; it identifies the timer.
            schedule: seconds, a timedelta, a crontab, a solar event, a five-field cron text, or a
                datetime for a single run.
            callback: a task, its name, the short name of a callback, or a signature
                (``task.s(...)``).
            args: positional arguments, before which a callback gets its timer.
            kwargs: keyword arguments.
            timezone: the zone of a crontab, by default the app's.
            description: shown to people.
            **options: what ``apply_async`` takes: queue, priority, expires (seconds from the
                sending), headers, ...

        Raises:
            InvalidTimerError: something cannot be used; nothing was stored.
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
                "description": description,
                **options,
            }
        )
        self.store.save([definition])
        return definition.id

    def create_timers(self, timers: Iterable[Mapping[str, Any]]) -> list[str]:
        """Create or update many timers; return their ids in order.

        All are checked before the first is stored. They are stored in batches: should Redis fail in
        between, calling again with the same timers completes the work.

        Args:
            timers: the keywords of `create_timer`, a dict for each timer.

        Raises:
            InvalidTimerError: one cannot be used (its place and name are in the message); nothing
                was stored.
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

    def _definition(self, keywords: Mapping[str, Any]) -> Definition:
        """Return what the keywords of `create_timer` describe, checked."""
        name, description = keywords["name"], keywords.get("description", "")
        if not isinstance(name, str):
            raise invalid("name", name, "a str")
        if not isinstance(description, str):
            raise invalid("description", description, "a str")
        task, args, kwargs, options = self._call(
            keywords["callback"],
            keywords.get("args"),
            keywords.get("kwargs"),
            {key: value for key, value in keywords.items() if key not in _DEFINITION_FIELDS},
        )
        definition = Definition(
            name=name,
            task=task,
            schedule=schedules.parse(
                keywords["schedule"],
                timezone=keywords.get("timezone"),
                default_timezone=self.app.timezone,
            ),
            args=args,
            kwargs=kwargs,
            options=check_options(options),
            description=description,
        )
        for field in ("args", "kwargs", "options"):
            value = getattr(definition, field)
            if value:
                check_storable(field, value)
        return check_size(definition)

    def _call(
        self,
        callback: CallbackLike,
        args: Sequence[Any] | None,
        kwargs: Mapping[str, Any] | None,
        options: dict[str, Any],
    ) -> tuple[str, tuple[Any, ...], dict[str, Any], dict[str, Any]]:
        """Return task name, arguments and options, with a signature's own taken in."""
        if args is not None and (isinstance(args, (str, bytes)) or not isinstance(args, Sequence)):
            raise invalid("args", args, "a list or tuple")
        if kwargs is not None and not isinstance(kwargs, Mapping):
            raise invalid("kwargs", kwargs, "a dict")
        given = (tuple(args or ()), dict(kwargs or {}), options)
        if not isinstance(callback, Signature):
            return self._task_name_of(callback), *given
        if callback.subtask_type:
            raise invalid(
                "callback",
                callback,
                "the signature of a single task; canvas is not supported as a callback",
            )
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
        if status is not None and status not in _STATUSES:
            raise invalid("status", status, "one of " + ", ".join(_STATUSES))
        for key, text in (("name", name), ("instance", instance)):
            if text is not None and not isinstance(text, str):
                raise invalid(key, text, "a str")
        for key, value in (("offset", offset), ("limit", 0 if limit is None else limit)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise invalid(key, value, "a whole number, 0 or more")
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
            found += filter(matches, self.store.timers(ids[start : start + _PAGE]))
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

    def pending_count(self, instance: str | None = None) -> int:
        """Return how many timers wait for their next run, in the service or at one instance."""
        if instance is not None and not isinstance(instance, str):
            raise invalid("instance", instance, "the id of an instance")
        return self.store.pending_count(instance)

    def check_consistency(self) -> list[consistency.Violation]:
        """Return what does not hold between the service's structures: nothing when all is well."""
        return consistency.check(self.store)

    # ------------------------------------------------------------ changing

    def update_timer(self, timer: str, **changes: Any) -> Timer:
        """Change a timer; what is not named stays. Return it as it is then.

        Args:
            timer: its id or name.
            **changes: schedule, callback, args, kwargs, timezone, description, and message options,
                as `create_timer` takes them; an option given as None is removed, and a signature
                as callback brings its arguments with it.

        Raises:
            TimerNotFoundError: there is none.
            InvalidTimerError: something cannot be used, or there is nothing left to change; nothing
                was stored.
            ConflictError: others kept changing it.
        """
        if "name" in changes:
            raise invalid("name", changes["name"], "nothing: a name identifies its timer and stays")
        for _ in attempts(timer):
            state = self._resolve(timer)
            changed = self._changed(self._definition_of(timer, state), changes)
            if self.store.replace(state, changed):
                break
        return self._timer_of(timer, state.id)

    def _changed(self, definition: Definition, changes: dict[str, Any]) -> Definition:
        callback = changes.get("callback", definition.task)
        options = {key: value for key, value in changes.items() if key not in _DEFINITION_FIELDS}
        args, kwargs, stored = definition.args, definition.kwargs, definition.options
        if isinstance(callback, Signature):  # brings its own in place of the stored ones
            args, kwargs = (), {}
            stored = {key: value for key, value in stored.items() if key not in callback.options}
        merged = {**stored, **options}
        return self._definition(
            {
                "name": definition.name,
                "schedule": self._changed_schedule(definition.schedule, changes),
                "callback": callback,
                "args": changes.get("args", args),
                "kwargs": changes.get("kwargs", kwargs),
                "description": changes.get("description", definition.description),
                **{key: value for key, value in merged.items() if value is not None},
            }
        )

    def _changed_schedule(
        self, current: schedules.Schedule, changes: dict[str, Any]
    ) -> schedules.Schedule:
        timezone = changes.get("timezone")
        if "schedule" not in changes:
            return _in_timezone(current, timezone)
        kept = current.timezone if isinstance(current, schedules.Crontab) else self.app.timezone
        return schedules.parse(changes["schedule"], timezone=timezone, default_timezone=kept)

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
            next_run = policy.resume(definition, state, self.store.now_ms())
            if next_run.next_due_ms is None:
                raise InvalidTimerError(
                    f"timer {shown(timer)} has no run left: {definition.schedule.describe()}"
                )
            code = self.store.resume(
                state.id, state.revision, state.status, next_run.next_due_ms, next_run.skipped
            )
            if code == 1:
                return

    def trigger_timer(self, timer: str) -> None:
        """Run a timer now, also a paused one, without moving its schedule or its count.

        Raises:
            TimerNotFoundError: there is none.
            InvalidTimerError: it has nothing to send: it is broken, or a one-shot that has run.
        """
        code = self.store.trigger(self._resolve(timer).id, new_trigger_id())
        _check(code, timer, "has nothing to send: it is broken, or has run and is over")

    def delete_timer(self, timer: str) -> None:
        """Delete a timer, with its pending triggers.

        Raises:
            TimerNotFoundError: there is none.
        """
        if not self.store.delete([self._resolve(timer).id])[0]:
            raise _not_found(timer)

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
        for state in self.store.states(ids)[1]:
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
            raise InvalidTimerError(
                f"timer {shown(timer)} has run and is over; create it again with another moment"
            )
        definition = decode_definition(blob)
        if definition.code_bound:
            raise InvalidTimerError(
                f"timer {shown(timer)} takes its arguments from its beat's code: change it there"
            )
        return definition


_REQUIRED_FIELDS = frozenset({"name", "schedule", "callback"})
_DEFINITION_FIELDS = _REQUIRED_FIELDS | {"args", "kwargs", "timezone", "description"}


def _in_timezone(schedule: schedules.Schedule, timezone: tzinfo | str | None) -> schedules.Schedule:
    """Return the schedule as another zone reads it; one that no zone changes as it is."""
    if not hasattr(schedule, "timezone") or timezone is None:
        return schedule
    return replace(schedule, timezone=schedules.zone_name(timezone))  # type: ignore[type-var]


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
