"""What became of runs once they were sent: their records, dead letters, and runs that are lost.

Workers note what happens to a run into the stream of runs (see `celery_dtimer.tracking`); what was
sent is in the service's history. Put together they are `RunRecord` values.

A run that a worker has started has a lease, which its worker renews. The run of a timer that holds
its runs (``overlap``, ``resend_lost``) has one from the moment it is sent. When a lease ends, the
run is *lost*: its worker died, or its time limit is over, or no worker has started it in time. It
is sent again if its timer asks for that, under the same task id, else it becomes a dead letter.

Not promised: that a lost run has not been executed, or is not being executed still. A worker that
was frozen, or cut off from Redis, for longer than a lease goes on with it afterwards.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from itertools import takewhile
from typing import Any

from kombu.utils import json

from celery_dtimer import history
from celery_dtimer.errors import InvalidTimerError, shown
from celery_dtimer.masking import masked
from celery_dtimer.model import (
    LAST_MS,
    ONCE,
    Definition,
    Lease,
    Run,
    decode_definition,
    resent_id,
    resent_of,
    to_datetime,
    to_ms,
)
from celery_dtimer.options import CANVAS_KINDS
from celery_dtimer.policy import PLAIN
from celery_dtimer.sharding import Shards
from celery_dtimer.signals import tell, timer_failed
from celery_dtimer.store import OutRun, Store, maybe_whole, out_run

logger = logging.getLogger(__name__)

QUEUED = "queued"  #: it was sent, and no worker has noted anything of it
STARTED = "started"
SUCCEEDED = "succeeded"
FAILED = "failed"
RETRIED = "retried"  #: it failed, and its task has sent it again itself
REVOKED = "revoked"
EXPIRED = "expired"  #: the worker got it after its ``expires``
REJECTED = "rejected"
IGNORED = "ignored"  #: the task has asked for no result, or the message was a duplicate
LOST = "lost"  #: it did not come back
STATES = (QUEUED, STARTED, SUCCEEDED, FAILED, RETRIED, REVOKED, EXPIRED, REJECTED, IGNORED, LOST)

_LONGEST_ERROR = 1000  # characters


@dataclass(frozen=True, slots=True)
class RunRecord:
    """What became of one message of a run; its times are in UTC."""

    timer_id: str
    scheduled_at: datetime
    state: str  #: one of `STATES`
    number: int | None  #: counts the timer's runs from 1; None when somebody has asked for it
    task_id: str | None = None  #: None when it can not be told
    name: str = ""  #: of the timer, as it is now; "" when that is gone
    instance: str | None = None  #: the one that sent it, as far as the history reaches back
    sent_at: datetime | None = None
    started_at: datetime | None = None  #: the last time
    ended_at: datetime | None = None
    took: float | None = None  #: seconds that its last execution took
    worker: str | None = None
    error: str | None = None
    retries: int = 0
    shard: int = 0  #: which of the messages of its run


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A run that has failed for good, with what is needed to send it once more."""

    id: str
    timer_id: str
    reason: str  #: "failed", "rejected" or "lost", or "broken" or "refused": it was not sent
    error: str
    at: datetime  #: when it was written, in UTC
    name: str = ""  #: of the timer
    scheduled_at: datetime | None = None
    number: int | None = None
    shard: int | None = None  #: which of the messages of its run; None when none was sent
    task_id: str | None = None
    task: str = ""
    #: None when they are the timer's, or can not be told; not shown, since they may hold secrets
    args: list[Any] | None = field(default=None, repr=False)
    kwargs: dict[str, Any] | None = field(default=None, repr=False)
    retries: int = 0
    where: str = ""  #: the worker, or the instance that could not send it

    @classmethod
    def from_stored(cls, id: str, row: Mapping[str, str], name: str = "") -> DeadLetter:
        """Return the letter of a stored row; what was edited into nonsense is left out."""
        call = _call_of(row.get("call", ""))
        own = _decoded(row.get("definition"))  # of a timer that is hidden, or has no run left
        is_call = own is not None and own.message is not None
        return cls(
            id=id,
            timer_id=row.get("timer", ""),
            reason=row.get("reason", ""),
            error=row.get("error", ""),
            at=to_datetime(maybe_whole(row.get("at", "")) or 0),
            name=row.get("name", "") or name or (own.name if own is not None else ""),
            scheduled_at=_moment(row.get("due", "")),
            number=maybe_whole(row.get("number", "")),
            shard=maybe_whole(row.get("shard", "")),
            task_id=own.name if own is not None and is_call else row.get("task_id"),
            task=row.get("task", "") or (own.task if own is not None else ""),
            args=None if call is None else call[0],
            kwargs=None if call is None else call[1],
            retries=maybe_whole(row.get("retries", "")) or 0,
            where=row.get("where", ""),
        )


def _decoded(blob: str | None) -> Definition | None:
    """Return a stored definition, None when there is none that can be read."""
    with contextlib.suppress(InvalidTimerError):
        return decode_definition(blob) if blob else None
    return None


def error_text(exc: object) -> str:
    """Return an exception as a text fit to be kept."""
    try:
        text = f"{type(exc).__name__}: {exc}" if isinstance(exc, BaseException) else str(exc)
    except Exception:  # a user's class may fail
        text = type(exc).__name__
    return masked(text)[:_LONGEST_ERROR]


def _call_of(text: str) -> tuple[list[Any], dict[str, Any]] | None:
    """Return the args and kwargs that a letter holds, None when it holds none."""
    if not text:
        return None
    try:
        args, kwargs = json.loads(text)
    except Exception as exc:  # Celery's typed values raise whatever their constructors raise
        logger.warning("A dead letter holds arguments that can not be read: %s", exc)
        return None
    return (args, kwargs) if isinstance(args, list) and isinstance(kwargs, dict) else None


def _options_of(text: str) -> dict[str, Any] | None:
    """Return the options that a letter holds, None when it holds none."""
    if not text:
        return None
    try:
        options = json.loads(text)
    except Exception as exc:  # Celery's typed values raise whatever their constructors raise
        logger.warning("A dead letter holds options that can not be read: %s", exc)
        return None
    return options if isinstance(options, dict) else None


def _moment(text: str) -> datetime | None:
    moment_ms = maybe_whole(text)
    return None if moment_ms is None else to_datetime(moment_ms)


# ------------------------------------------------------------------ records


def read_runs(
    store: Shards, timer_id: str | None = None, since_ms: int | None = None
) -> list[RunRecord]:
    """Return the runs that the histories know of, newest first by their scheduled moment.

    Args:
        store: of the service.
        timer_id: only those of this timer.
        since_ms: only what was written since that moment is read.
    """
    entries = _since(store.run_history(), since_ms)
    noted = _noted(reversed(entries), timer_id)
    sent = _sent(store, timer_id, since_ms)
    if len(entries) >= store.kept_entries:  # of what was sent before, it has been forgotten
        oldest = _moment(entries[-1]["at"])
        sent = {key: row for key, row in sent.items() if oldest is None or row[0] >= oldest}
    found = [_with_sending(record, sent) for record in noted]
    known = {(record.timer_id, record.scheduled_at) for record in noted}
    found += _queued(store, {key: row for key, row in sent.items() if key not in known})
    names = _names(store, {record.timer_id for record in found})
    found = [replace(record, name=names.get(record.timer_id, "")) for record in found]
    return sorted(found, key=lambda record: (record.scheduled_at, record.shard), reverse=True)


def _since(entries: Iterable[Mapping[str, str]], since_ms: int | None) -> list[Mapping[str, str]]:
    """Return entries, which come newest first, up to a moment."""
    if since_ms is None:
        return list(entries)
    return list(takewhile(lambda entry: int(entry["at"]) >= since_ms, entries))


def _with_sending(record: RunRecord, sent: Mapping[tuple[str, datetime], _Sent]) -> RunRecord:
    """Return a record with what the service's history knows of its sending."""
    known = sent.get((record.timer_id, record.scheduled_at))
    if known is None:
        return record
    at, instance, number = known
    counted = None if number == "trigger" else record.number
    return replace(record, sent_at=at, instance=instance, number=counted)


def _noted(entries: Iterable[Mapping[str, str]], timer_id: str | None) -> list[RunRecord]:
    """Return what workers have noted, from entries in their order."""
    records: dict[str, RunRecord] = {}
    before: dict[str, RunRecord] = {}  # they started, by another message say
    for entry in entries:
        id, timer = entry.get("task_id", ""), entry.get("timer", "")
        due = _moment(entry.get("due", ""))
        state = entry.get("state", "")
        if due is None or (timer_id is not None and timer != timer_id):
            continue
        known = records.get(id)
        record = known or RunRecord(timer, due, state, maybe_whole(entry.get("number", "")), id)
        at, retries = _moment(entry["at"]), maybe_whole(entry.get("retries", "")) or 0
        if known is not None and retries < known.retries:
            continue  # the report of an earlier try, which the next one has overtaken
        if state == STARTED:
            if known is not None:
                before[id] = known
            record = replace(record, started_at=at, ended_at=None, took=None, error=None)
        elif state == IGNORED and id in before:
            records[id] = before.pop(id)  # it was a duplicate
            continue
        else:
            took = maybe_whole(entry.get("took", ""))
            record = replace(record, ended_at=at, took=None if took is None else took / 1000)
        records[id] = replace(
            record,
            state=state,
            worker=entry.get("worker") or record.worker,
            error=entry.get("error"),
            retries=retries,
            shard=maybe_whole(entry.get("shard", "")) or 0,
        )
    return list(records.values())


def told(records: Iterable[RunRecord]) -> str:
    """Return in a sentence what workers have made of a run, "" when they have noted nothing."""
    parts = []
    for record in records:
        if record.state == QUEUED:
            continue
        took = "" if record.took is None else f" after {record.took:g} s"
        tries = f", after {record.retries} retries" if record.retries else ""
        error = f" ({record.error})" if record.error else ""
        parts.append(f"{record.worker or 'no worker'}: {record.state}{took}{tries}{error}")
    return "; ".join(parts)


_Sent = tuple[datetime, str, str]  # when, by whom, number


def _sent(
    store: Shards, timer_id: str | None, since_ms: int | None
) -> dict[tuple[str, datetime], _Sent]:
    found: dict[tuple[str, datetime], _Sent] = {}
    for entry in _since(store.history_backwards(), since_ms):
        for timer, run in history.sent_in(entry, timer_id):
            if max(run.scheduled_ms, run.at_ms) <= LAST_MS:  # else it was edited by hand
                due, at = to_datetime(run.scheduled_ms), to_datetime(run.at_ms)
                found.setdefault((timer, due), (at, run.instance, run.number))
    return found


def _queued(store: Shards, sent: Mapping[tuple[str, datetime], _Sent]) -> list[RunRecord]:
    """Return the records of runs of which no worker has noted anything."""
    ids = sorted({timer for timer, _ in sent})
    states = dict(zip(ids, store.states(ids), strict=True))
    records = []
    for (timer, due), (at, instance, number) in sent.items():
        state, task_id = states[timer], None
        due_ms = to_ms(due)
        counted = maybe_whole(number)
        if state is not None and counted is not None and state.created_ms <= due_ms:
            service = store.settings.service
            nothing: Any = None
            run = Run(service, "", timer, timer, state.created_ms, due_ms, counted, nothing)
            task_id = run.id_of("")
        records.append(
            RunRecord(timer, due, QUEUED, counted, task_id, instance=instance, sent_at=at)
        )
    return records


def _names(store: Store | Shards, ids: Iterable[str]) -> dict[str, str]:
    known = sorted(ids)
    found: dict[str, str] = {}
    for id, blob in zip(known, store.definitions(known), strict=True):
        with contextlib.suppress(InvalidTimerError):
            if blob is not None:
                found[id] = decode_definition(blob).name
    return found


# ------------------------------------------------------------------ dead letters


def read_letters(store: Shards, offset: int = 0, limit: int | None = None) -> list[DeadLetter]:
    """Return dead letters, newest first."""
    rows = store.dead_letters(offset, limit)
    nameless = {row.get("timer", "") for _, row in rows if not row.get("name")}
    names = _names(store, nameless)
    return [
        DeadLetter.from_stored(id, row, names.get(row.get("timer", ""), "")) for id, row in rows
    ]


def read_letter(store: Store | Shards, id: str) -> DeadLetter | None:
    """Return a dead letter, None when there is none."""
    row = store.dead_letter(id)
    if row is None:
        return None
    timer = row.get("timer", "")
    return DeadLetter.from_stored(id, row, row.get("name") or _names(store, [timer]).get(timer, ""))


def requeued(store: Shards, row: Mapping[str, str]) -> tuple[Definition, int | None]:
    """Return what is sent for a dead letter, and which of its messages: None for all of them.

    It is what was sent, as far as the letter tells that; else what the timer sends, if that is the
    same by all that is known. A run that was not sent goes out as its timer is by now.

    Raises:
        InvalidTimerError: neither the letter nor the timer tells.
    """
    own, known, revision = _definitions_for(store, row)
    shard, shards = maybe_whole(row.get("shard", "")), maybe_whole(row.get("shards", ""))
    task, call = row.get("task", ""), _call_of(row.get("call", ""))
    options = _options_of(row.get("options", ""))
    if task and call is not None and options is not None:
        # How the message was sent is known: of the timer only whether its runs are held apart.
        now = known or own
        definition = Definition(
            name=row.get("name", "") or (now.name if now is not None else row.get("timer", "")),
            task=task,
            schedule=ONCE if now is None else now.schedule,
            args=call[0],
            kwargs=call[1],
            options=options,
            policy=replace(PLAIN if now is None else now.policy, shards=shards or 1),
        )
        return definition, shard if definition.policy.shards > 1 else None
    definition = _timers_own(row, own, known, revision)
    total = definition.policy.shards
    if shard is not None and total != (shards or max(total, shard + 1)):
        raise _untold(row, f"has {total} shards by now")
    only = shard if total > 1 else None
    if not task and row.get("reason") == LOST and definition.task in CANVAS_KINDS:
        raise _untold(row, "is a canvas, of which some task was lost")
    if task not in ("", definition.task):
        raise _untold(row, f"has sent {shown(task)}, and the letter does not hold all of that")
    if call is not None and task:
        definition = replace(definition, args=call[0], kwargs=call[1], code_bound=False)
    return definition, only


def _definitions_for(
    store: Shards, row: Mapping[str, str]
) -> tuple[Definition | None, Definition | None, str]:
    """Return the definition in a letter, the one of its timer, and the revision of that."""
    id = row.get("timer", "")
    (blob,), (state,) = store.definitions([id]), store.states([id])
    revision = "" if state is None else state.revision
    return _decoded(row.get("definition")), _decoded(blob), revision


def _timers_own(
    row: Mapping[str, str], own: Definition | None, known: Definition | None, revision: str
) -> Definition:
    """Return the definition that a letter is sent by, when it does not hold its whole message."""
    if own is not None and not own.is_cut:
        return own
    if known is None:
        raise _untold(row, "is gone, or can not be read")
    if known.is_cut:
        raise _untold(row, "has had its last run, and is over")
    if row.get("revision", revision) != revision:
        raise _untold(row, "was changed after the run was sent; trigger it instead")
    return known


def _untold(row: Mapping[str, str], why: str) -> InvalidTimerError:
    name = shown(row.get("name") or row.get("timer", ""))
    return InvalidTimerError(
        f"the timer {name} of the dead letter {why}: nothing tells how its run is to be sent"
    )


# ------------------------------------------------------------------ lost runs


def is_sent_again(store: Shards, timer_id: str, resent: int) -> bool:
    """Say whether a timer has its run sent again that was lost so many times before, and now."""
    blob = store.definitions([timer_id])[0]
    with contextlib.suppress(InvalidTimerError):
        return blob is not None and resent < decode_definition(blob).policy.resend_lost
    return False


class LostRuns:
    """Finds the runs whose leases have ended; `step` is one look."""

    def __init__(self, store: Store, on_letter: Callable[[], None] = lambda: None) -> None:
        """Prepare to look at a service.

        Args:
            store: has the runs.
            on_letter: called for each run that becomes a dead letter.
        """
        self._store = store
        self._on_letter = on_letter

    def step(self, lease: Lease) -> int:
        """Mark what is lost, and send it again where that is asked; return how many it were.

        Raises:
            FencedError: the lease's epoch is over.
        """
        rows = self._store.lost_runs()
        ids = [text.partition(" ")[0] for _, text in rows]
        found = 0
        for row, blob in zip(rows, self._store.definitions(ids) if ids else [], strict=True):
            found += self._lose(lease, row, blob)
        return found

    def _lose(self, lease: Lease, row: tuple[str, str], blob: str | None) -> int:
        task_id, text = row
        run = out_run(task_id, text) or OutRun(task_id, message="-")  # the script drops nonsense
        definition = None
        with contextlib.suppress(InvalidTimerError):
            definition = decode_definition(blob) if blob else None
        times = run.resent + 1
        again = definition is not None and times <= definition.policy.resend_lost
        resent = resent_id(times, task_id) if again else ""
        if not any(resent_of(resent)):  # a forged message has had another id: no key is made of it
            resent = ""
        settings = self._store.settings
        if run.is_started:
            why = "its worker did not renew its lease, or its time limit is over"
        elif run.message == _BETWEEN_TRIES:
            why = "its process is gone, or no worker has started its next try in time"
        else:
            why = f"no worker has started it within {settings.queued_lease:g} s"
        name = "" if definition is None else definition.name
        code = self._store.lose(
            lease.instance, lease.epoch, row, resent_id=resent, why=why, name=name
        )
        if code:
            what = "it is sent again" if code == _SENT_AGAIN else "a dead letter is kept"
            logger.warning("Run %s of timer %s is lost (%s): %s", task_id, shown(name), why, what)
        if code == _LOST:
            self._on_letter()
            letter = read_letter(self._store, task_id)
            if letter is not None:
                tell(timer_failed, settings.service, letter=letter)
        return int(code > 0)


_LOST, _SENT_AGAIN = 1, 2
_BETWEEN_TRIES = "-"  # what stands for the message of a run whose last one is over
