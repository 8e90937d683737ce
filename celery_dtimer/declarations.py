"""The static schedule: what the code declares, and how it gets into the store.

Every instance says which static timers its code declares. Of several declarations of one source the
one *first seen last* counts: its instances write their timers. A static timer is deleted once no
live instance of its source declares it; with no instance of the source alive nothing is deleted,
and timers created at run time are never touched.

An entry that cannot be read is stored as broken, with the reason; it never stops the others.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, tzinfo
from typing import Any

from celery import Celery
from celery.beat import ScheduleEntry
from celery.schedules import BaseSchedule, crontab, solar
from celery.utils.time import maybe_make_aware

from celery_dtimer import schedules
from celery_dtimer.canvas import is_canvas, parts_of
from celery_dtimer.errors import InvalidTimerError, TooManyTimersError, invalid
from celery_dtimer.keywords import KEYWORDS, TIMING, define
from celery_dtimer.model import (
    DAMAGED,
    Definition,
    Lease,
    broken_blob,
    check_size,
    check_storable,
    shard_of,
    timer_id,
    to_ms,
)
from celery_dtimer.rezoning import Rezoning
from celery_dtimer.store import BATCH, BROKEN, GONE, UNDEFINED, Store

logger = logging.getLogger(__name__)

_LOOKED_AT = 500  # static timers that are looked for at once

_FIELDS = KEYWORDS | {
    *("task", "schedule", "args", "kwargs", "options", "last_run_at", "total_run_count")
}


_DECLARED = "dtimer_declared"  # the attribute of an app that holds what `declare` was given


def declare(app: Celery, name: str, entry: Mapping[str, Any]) -> None:
    """Add an entry to an app's static schedule, beside its ``beat_schedule`` setting."""
    app.__dict__.setdefault(_DECLARED, {})[name] = entry


def declared(app: Celery) -> dict[str, Any]:
    """Return an app's static schedule: its ``beat_schedule``, and what was added by `declare`."""
    return {**app.conf.beat_schedule, **app.__dict__.get(_DECLARED, {})}


@dataclass(frozen=True)
class Declaration:
    """The static timers of one source, by name."""

    source: str
    definitions: Mapping[str, Definition] = field(default_factory=dict)
    last_runs_ms: Mapping[str, int] = field(default_factory=dict)
    broken: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    timezone: str = "UTC"  #: of timers that name none

    @property
    def ids(self) -> list[str]:
        """The ids of all of its timers."""
        return [timer_id(name) for name in [*self.definitions, *self.broken]]

    @property
    def bound(self) -> dict[str, Definition]:
        """The definitions whose arguments only the code has."""
        return {name: found for name, found in self.definitions.items() if found.code_bound}

    def part(self, shard: str, shards: int) -> Declaration:
        """Return what of it belongs to one of so many shards."""
        if shards == 1:
            return self

        def is_here(name: str) -> bool:
            return shard_of(timer_id(name), shards) == shard

        return replace(
            self,
            definitions={name: each for name, each in self.definitions.items() if is_here(name)},
            broken={name: each for name, each in self.broken.items() if is_here(name)},
        )

    @property
    def digest(self) -> str:
        """A digest of all that is declared."""
        lines = [
            f"{definition.id} {definition.revision}" for definition in self.definitions.values()
        ]
        lines += [f"{timer_id(name)} {entry}" for name, entry in self.broken.items()]
        lines.append(f"timezone {self.timezone}")
        return hashlib.blake2b(
            "\n".join(sorted(lines)).encode("utf-8", "surrogatepass"), digest_size=16
        ).hexdigest()


def declaration_of(app: Celery, source: str, entries: Mapping[str, Any]) -> Declaration:
    """Return what a beat schedule declares; unusable entries are among the broken ones."""
    definitions, last_runs_ms, broken = {}, {}, {}
    for name, entry in entries.items():
        try:
            definitions[name] = definition_of(app, name, entry)
            last_run_ms = _last_run_ms(app, entry)
            if last_run_ms is not None:
                last_runs_ms[name] = last_run_ms
        except InvalidTimerError as exc:
            logger.error("Entry %r of the beat schedule is broken and does not run: %s", name, exc)
            task = entry.get("task") if isinstance(entry, Mapping) else None
            broken[str(name)] = (broken_blob(str(name), task), str(exc))
    timezone = schedules.zone_name(app.timezone)
    return Declaration(source, definitions, last_runs_ms, broken, timezone)


def definition_of(app: Celery, name: object, entry: object) -> Definition:
    """Return the definition of one entry of a beat schedule, as Celery documents them.

    Raises:
        InvalidTimerError: the entry cannot be used; the message names the field, the value and what
            is accepted.
    """
    if not isinstance(name, str):
        raise invalid("name", name, "a str")
    entry = _entry_fields(entry)
    unknown = sorted(set(entry) - _FIELDS, key=str)
    if unknown:
        raise invalid("field", unknown[0], "one of " + ", ".join(sorted(_FIELDS)))
    task = entry.get("task")
    if not isinstance(task, str) or not task:
        raise invalid("task", task, "the name of a Celery task")
    args, kwargs = entry.get("args") or (), entry.get("kwargs") or {}
    options = entry.get("options") or {}
    if not isinstance(args, (list, tuple)):
        raise invalid("args", args, "a list or tuple")
    for key, value in (("kwargs", kwargs), ("options", options)):
        if not isinstance(value, Mapping):
            raise invalid(key, value, "a dict")
    # What add_periodic_task is given beside the schedule is among the options.
    keywords = {key: value for key, value in options.items() if key in TIMING}
    options = {key: value for key, value in options.items() if key not in TIMING}
    if is_canvas(task):
        canvas = {"task": task, "args": args, "kwargs": kwargs, "options": options}
        task, args, kwargs, options = parts_of(canvas, app)
    keywords |= {key: value for key, value in entry.items() if value is not None}
    keywords["description"] = entry.get("description") or ""
    schedule = entry.get("schedule")
    if isinstance(schedule, (crontab, solar)):
        keywords.pop("relative", None)  # Celery looks at it for intervals alone
    elif isinstance(schedule, BaseSchedule):
        schedule.app = app  # as Celery's beat does, whose time zone and clock it then has
    definition = define(
        app,
        name,
        schedule=schedule,
        task=task,
        args=tuple(args),
        kwargs=dict(kwargs),
        options=options,
        keywords=keywords,
        is_code=True,
    )
    _check_works(definition.schedule)
    is_bound = isinstance(definition.schedule, schedules.Custom)
    if is_bound or not _is_storable(args, kwargs, definition.options):
        definition = replace(definition, code_bound=True)
    return check_size(definition)


def _check_works(schedule: schedules.Schedule) -> None:
    """Refuse a schedule that cannot be worked out in this process."""
    now_ms = time.time_ns() // 1_000_000
    if not isinstance(schedule, schedules.Custom):
        schedule.first_run(now_ms)
        return
    try:
        schedule.ask(now_ms, now_ms)
    except InvalidTimerError:
        raise
    except Exception as exc:  # the user's code: it must not stop the other entries
        raise InvalidTimerError(f"the schedule {schedule.describe()} fails: {exc!r}") from exc


def _entry_fields(entry: object) -> Mapping[str, Any]:
    if isinstance(entry, ScheduleEntry):
        return {
            "task": entry.task,
            "schedule": entry.schedule,
            "args": entry.args,
            "kwargs": entry.kwargs,
            "options": entry.options,
        }
    if not isinstance(entry, Mapping):
        raise invalid("entry", entry, "a dict with task, schedule, args, kwargs, options")
    return entry


def _is_storable(*values: Any) -> bool:
    try:
        for value in values:
            check_storable("value", value)
    except InvalidTimerError:
        return False
    return True


def _last_run_ms(app: Celery, entry: Any) -> int | None:
    last_run_at = entry.get("last_run_at") if isinstance(entry, Mapping) else None
    if last_run_at is None:
        return None
    if not isinstance(last_run_at, datetime):
        raise invalid("last_run_at", last_run_at, "a datetime")
    zone: tzinfo = app.timezone
    return max(0, to_ms(maybe_make_aware(last_run_at, zone)))


class StaticSchedule:
    """Keeps a declaration in force for one instance."""

    def __init__(
        self,
        store: Store,
        declaration: Declaration,
        on_progress: Callable[[], None] = lambda: None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare it; `reconcile` does the work, and calls ``on_progress`` after each batch."""
        self._store = store
        self._on_progress = on_progress
        self._clock = clock
        self._look_after = 0.0
        self._looked_at = 0
        self._whole = declaration
        self._part: Declaration | None = declaration
        self._definitions = {each.id: each for each in declaration.definitions.values()}
        self._written_in_epoch: int | None = None
        self._rezoning = Rezoning(store, declaration.source, declaration.timezone)

    def take(self, part: tuple[str, int] | None) -> None:
        """Keep the part of a shard of so many in force; nothing while timers move between shards.

        A timer that was written, or deleted, while it has not arrived yet would lose its state.
        """
        taken = None if part is None else self._whole.part(*part)
        definitions = {} if taken is None else taken.definitions
        self._definitions = {each.id: each for each in definitions.values()}
        self._part, self._looked_at, self._written_in_epoch = taken, 0, None

    def reconcile(self, lease: Lease) -> None:
        """Declare the timers; if this counts, write what is new and delete what nobody declares.

        To be called when the lease is new, and whenever the membership of the service has changed.

        Raises:
            FencedError: the lease's epoch is over.
            StoreError: Redis did not answer, or refused.
            TooManyTimersError: not all of them could be stored.
        """
        declaration, store = self._part, self._store
        if declaration is None:
            self._rezoning.stop()
            return
        ids = declaration.ids
        if not store.declare(
            lease.instance, lease.epoch, declaration.source, declaration.digest, ids
        ):
            self._written_in_epoch = None
            self._rezoning.stop()
            return
        known = store.static_timers(declaration.source)
        full: TooManyTimersError | None = None
        if self._written_in_epoch != lease.epoch or not known.issuperset(ids):
            try:
                self._write(declaration)
                self._written_in_epoch = lease.epoch
            except TooManyTimersError as exc:  # what is not declared any more may make room
                full = exc
        self._delete(lease, sorted(known - set(ids)))
        if full is not None:
            raise full
        self._rezoning.begin(lease)

    def step(self, lease: Lease) -> bool:
        """Do a part of what takes long, if there is any; say whether there is more.

        Raises:
            FencedError: the lease's epoch is over.
            StoreError: Redis did not answer, or refused.
        """
        if self._written_in_epoch == lease.epoch and self._clock() >= self._look_after:
            self._look_after = self._clock() + self._store.settings.failure_check_interval
            self._look_for_vanished(lease)
        return self._rezoning.step(lease)

    def _look_for_vanished(self, lease: Lease) -> None:
        """Write again what was declared and is gone, a part of the declaration at a time."""
        declaration, store = self._part, self._store
        if declaration is None:
            return
        written = [(each.id, each.revision, len(each.blob)) for each in self._definitions.values()]
        broken = [(timer_id(name), "", None) for name in declaration.broken]
        all_of_it = [*written, *broken]
        part = all_of_it[self._looked_at : self._looked_at + _LOOKED_AT]
        self._looked_at += _LOOKED_AT
        if self._looked_at >= len(all_of_it):
            self._looked_at = 0
        found = store.vanished(lease.instance, lease.epoch, part) if part else []
        gone = {each.id for each in found if each.code == GONE}
        undefined = [self._definitions[each.id] for each in found if each.code == UNDEFINED]
        gone |= self._not_as_written([each.id for each in found if each.code == BROKEN])
        if undefined:
            restored = store.restore(lease.instance, lease.epoch, undefined)
            logger.error("Definitions of %s static timers were gone: written again", restored)
            gone |= {each.id for each in undefined} if restored < len(undefined) else set()
        if gone:
            logger.error("%s static timers were gone, or broken by hand: written again", len(gone))
            self._write(declaration, gone)

    def _not_as_written(self, ids: list[str]) -> set[str]:
        """Return those of some broken timers that are not broken because of what is declared."""
        states, blobs = self._store.states(ids)[1], self._store.definitions(ids)
        return {
            id
            for id, state, blob in zip(ids, states, blobs, strict=True)
            if blob != (declared := self._definitions[id]).blob
            or (state is not None and state.revision != declared.revision)
            or (state is not None and state.reason.startswith(DAMAGED))
        }

    def _write(self, declaration: Declaration, only: set[str] | None = None) -> None:
        """Write what is declared, or some of it."""
        changed = self._store.save(
            [each for id, each in self._definitions.items() if only is None or id in only],
            source=declaration.source,
            last_runs_ms=declaration.last_runs_ms,
            on_batch=self._on_progress,
        )
        broken = {
            name: entry
            for name, entry in declaration.broken.items()
            if only is None or timer_id(name) in only
        }
        self._store.save_broken(broken, source=declaration.source)
        if changed:
            logger.info(
                "Static schedule of %s: %s timers created or updated", declaration.source, changed
            )

    def _delete(self, lease: Lease, candidates: list[str]) -> None:
        for start in range(0, len(candidates), BATCH):
            batch = candidates[start : start + BATCH]
            self._on_progress()
            for id in self._store.undeclare(lease.instance, lease.epoch, self._whole.source, batch):
                logger.info("Timer %s is not declared any more: deleted", id)
