"""Timers from one Redis to another: exported with their state, and imported.

An export is a header and a row for each timer, and for each call that waits (`portable`). An import
checks all rows before it stores the first, and may be repeated: what is here already, and at least
as far on, stays as it is. A timer goes on in its phase, with its next run of the export; what it
has missed since is treated as if its beats had been down meanwhile.

What runs once does not come a second time: an import remembers it, and one into the very service of
the export brings back no call, and no single run, that may have been sent there meanwhile.

Static timers are carried with their source, which is code: it has the last word about what they
are, the export about how far they have come. Not carried: histories, records of runs, dead letters,
triggers that are pending, and which runs are out.
"""

from __future__ import annotations

import fnmatch
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Literal, get_args

from celery import Celery

from celery_dtimer import keywords, planning
from celery_dtimer.allowed import AllowedTasks
from celery_dtimer.declarations import declaration_of, declared
from celery_dtimer.errors import ConflictError, InvalidTimerError, invalid, shown
from celery_dtimer.model import TimerState, is_countdown_id, revision_matches
from celery_dtimer.portable import (
    Portable,
    SkippedRow,
    call_row,
    check_header,
    dumps_row,
    header_of,
    loads_row,
    read_row,
    row_of,
)
from celery_dtimer.sharding import Shards
from celery_dtimer.store import HAS_BEEN, PUBLISHING, WRITTEN, Incoming, attempts

__all__ = [
    "ImportResult",
    "OnConflict",
    "Row",
    "SkippedRow",
    "dumps_row",
    "export_timers",
    "import_timers",
    "loads_row",
]

#: A row as `import_timers` takes it: what `export_timers` yields, or a line of a file.
Row = Mapping[str, Any] | str

#: What becomes of a timer whose definition is another one here.
OnConflict = Literal["replace", "keep", "fail"]

_PAGE = 500  # timers that are read at once
_BATCH = 64  # timers that are written at once
_READS = 3  # of a timer that is changed meanwhile


@dataclass(frozen=True, slots=True)
class ImportResult:
    """What an import has done; calls that wait are counted as timers."""

    created: int
    updated: int
    unchanged: int
    skipped: tuple[SkippedRow, ...]  #: rows that were not imported, and why


# ------------------------------------------------------------------ exporting


def export_timers(
    store: Shards, name: str | None = None, *, include_pending: bool = True
) -> Iterator[dict[str, Any]]:
    """Yield the header, then the row of each timer, and of each call that waits.

    Args:
        store: of the service.
        name: only timers whose name matches, ``*`` and ``?`` standing for any text and character;
            then no calls.
        include_pending: calls that wait are exported too.

    Raises:
        StoreError: Redis did not answer, or refused.
    """
    pattern = None if name is None else name.replace("[", "[[]")
    takes_calls = include_pending and pattern is None
    origin = store.base.origin(secrets.token_hex(16))
    yield header_of(store.settings.service, origin, store.now_ms())
    ids = list(dict.fromkeys([*store.departing(), *store.timer_ids()]))
    for start in range(0, len(ids), _PAGE):
        page = [id for id in ids[start : start + _PAGE] if takes_calls or not is_countdown_id(id)]
        for state, blob in _read(store, page):
            row = _exported(state, blob)
            if row is not None and (pattern is None or _matches(row, pattern)):
                yield row


def _exported(state: TimerState, blob: str | None) -> dict[str, Any] | None:
    if state.parent:
        return None
    if is_countdown_id(state.id):
        return None if blob is None else call_row(state, blob)
    return row_of(state, blob)


def _matches(row: Mapping[str, Any], pattern: str) -> bool:
    name = (row["timer"] or {}).get("name")
    return isinstance(name, str) and fnmatch.fnmatchcase(name, pattern)


def _read(store: Shards, ids: Sequence[str]) -> list[tuple[TimerState, str | None]]:
    """Return states with the definitions of their revisions, as far as these hold still."""
    found: dict[str, tuple[TimerState, str | None]] = {}
    waiting = list(ids)
    for _ in range(_READS):
        states = {state.id: state for state in store.states(waiting) if state is not None}
        blobs = dict(zip(states, store.definitions(list(states)), strict=True))
        found |= {id: (state, blobs[id]) for id, state in states.items()}
        waiting = [
            id
            for id, state in states.items()
            if not revision_matches(state.revision, blobs[id] or "")
        ]
        if not waiting:
            break
    return [found[id] for id in ids if id in found]


# ------------------------------------------------------------------ importing


def import_timers(
    app: Celery,
    store: Shards,
    rows: Iterable[Row],
    *,
    on_conflict: OnConflict = "replace",
    on_progress: Callable[[int], None] = lambda done: None,
) -> ImportResult:
    """Store exported timers; all rows are checked before the first is stored.

    Args:
        app: whose code declares static timers, and knows tasks.
        store: of the service.
        rows: read twice; an iterator is kept in memory for that.
        on_conflict: what becomes of a timer that has another definition here.
        on_progress: called after each batch with how many rows are done.

    Raises:
        InvalidTimerError: a row cannot be used; its line is in the message, and nothing was stored.
        ConflictError: a timer has another definition and that is to fail; nothing was stored. Or
            others kept changing one.
        TooManyTimersError: the service has ``dtimer_max_timers``; some batches may have been
            stored.
    """
    if on_conflict not in get_args(OnConflict):
        raise invalid("on_conflict", on_conflict, "one of " + ", ".join(get_args(OnConflict)))
    if not isinstance(rows, Iterable) or isinstance(rows, (str, bytes, Mapping)):
        raise invalid("rows", rows, "the rows of an export, or the lines of its file")
    again = list(rows) if isinstance(rows, Iterator) else rows
    checks = _Checks(app, store, on_conflict)
    origin = checks.run(again)
    is_origin = origin != "" and origin == store.base.origin()
    transfer = _Import(store, on_conflict, checks.left_out, is_origin=is_origin)
    for batch in _batches(_timers(again, is_checked=True)):
        transfer.write(batch)
        on_progress(transfer.done)
    return transfer.result


def _numbered(rows: Iterable[Row]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yield rows with their lines, from 1; empty lines are passed."""
    for line, row in enumerate(rows, 1):
        if isinstance(row, str):
            if row.strip():
                with_line = _at(line, loads_row, row)
                yield line, with_line
        elif isinstance(row, Mapping):
            yield line, row
        else:
            raise invalid(f"line {line}", row, "a row of an export, or a line of its file")


def _at(line: int, call: Callable[..., Any], *arguments: Any) -> Any:
    """Return what a call answers; its refusal names the line."""
    try:
        return call(*arguments)
    except InvalidTimerError as exc:
        raise InvalidTimerError(f"line {line}: {exc}") from exc


def _timers(rows: Iterable[Row], *, is_checked: bool = False) -> Iterator[Portable | SkippedRow]:
    """Yield what the rows behind the header tell."""
    numbered = _numbered(rows)
    next(numbered, None)
    read = partial(read_row, is_checked=is_checked)
    for line, row in numbered:
        yield _at(line, read, row, line)


def _batches(
    found: Iterator[Portable | SkippedRow],
) -> Iterator[list[Portable | SkippedRow]]:
    batch: list[Portable | SkippedRow] = []
    for each in found:
        batch.append(each)
        if len(batch) == _BATCH:
            yield batch
            batch = []
    if batch:
        yield batch


class _Checks:
    """Looks at all rows before one is stored."""

    def __init__(self, app: Celery, store: Shards, on_conflict: OnConflict) -> None:
        self._app = app
        self._store = store
        self._on_conflict = on_conflict
        self._lines: dict[str, int] = {}
        self.left_out: dict[int, SkippedRow] = {}  #: broken timers that can not be used, by line
        self._allowed = AllowedTasks(store.settings.allowed_tasks)

    @cached_property
    def _allowed_to_code(self) -> AllowedTasks:
        """What static timers may send: what this app's code declares too."""
        definitions = declaration_of(self._app, "", declared(self._app)).definitions
        return AllowedTasks(self._store.settings.allowed_tasks, definitions.values())

    def run(self, rows: Iterable[Row]) -> str:
        """Check all rows; return the origin that the header names."""
        line, header = next(_numbered(rows), (1, {}))
        _at(line, check_header, header)
        for batch in _batches(_timers(rows)):
            timers = [each for each in batch if isinstance(each, Portable)]
            for each in timers:
                self._look_at(each)
            if self._on_conflict == "fail":
                self._check_conflicts(timers)
        return str(header.get("origin", ""))

    def _look_at(self, timer: Portable) -> None:
        try:
            _at(timer.line, self._check, timer)
        except InvalidTimerError as exc:
            if timer.state.status != "broken":
                raise
            reason = f"it is broken: {exc}"
            self.left_out[timer.line] = SkippedRow(timer.line, timer.definition.name, reason)

    def _check(self, timer: Portable) -> None:
        definition = timer.definition
        before = self._lines.setdefault(definition.id, timer.line)
        if before != timer.line:
            raise InvalidTimerError(
                f"the name {shown(definition.name)} is in line {before} already"
            )
        if not (timer.is_call or definition.is_cut):
            keywords.check(self._app, definition)
        if not definition.is_cut:
            is_code = timer.state.source and self._store.settings.allowed_tasks is not None
            (self._allowed_to_code if is_code else self._allowed).check(definition)

    def _check_conflicts(self, timers: Sequence[Portable]) -> None:
        states = self._store.states([each.definition.id for each in timers])
        for timer, state in zip(timers, states, strict=True):
            if state is not None and _differs(timer, state):
                raise _conflict(timer)


def _differs(timer: Portable, here: TimerState) -> bool:
    """Say whether a timer has another definition here, other than by its code."""
    return not (timer.is_call or here.source) and here.revision != timer.state.revision


def _conflict(timer: Portable) -> ConflictError:
    name = shown(timer.definition.name)
    return ConflictError(f"line {timer.line}: timer {name} has another definition here")


class _Import:
    """Writes timers, and counts what became of them."""

    def __init__(
        self,
        store: Shards,
        on_conflict: OnConflict,
        left_out: Mapping[int, SkippedRow],
        *,
        is_origin: bool,
    ) -> None:
        self._store = store
        self._left_out = left_out
        self._on_conflict = on_conflict
        self._is_origin = is_origin
        self._created = self._updated = self._unchanged = 0
        self._skipped: list[SkippedRow] = []

    @property
    def result(self) -> ImportResult:
        """What was done so far."""
        return ImportResult(self._created, self._updated, self._unchanged, tuple(self._skipped))

    @property
    def done(self) -> int:
        """How many rows are done."""
        return self._created + self._updated + self._unchanged + len(self._skipped)

    def write(self, batch: Sequence[Portable | SkippedRow]) -> None:
        """Write a batch: each as new first, as most are; what is here decides about the others."""
        found = [self._left_out.get(each.line, each) for each in batch]
        self._skipped += [each for each in found if isinstance(each, SkippedRow)]
        waiting = [_Waiting(each) for each in found if isinstance(each, Portable)]
        if not waiting:
            return
        for _ in attempts(waiting[0].timer.definition.name):
            rows = [each.incoming for each in waiting]
            answers = self._store.bring(rows, is_origin=self._is_origin)
            told = zip(waiting, answers, strict=True)
            waiting = [left for each, answer in told if (left := self._heard(each, answer))]
            if not waiting:
                return

    def _heard(self, tried: _Waiting, answer: int | TimerState | None) -> _Waiting | None:
        """Note what became of a timer; return how it is to be tried again, if it is."""
        timer = tried.timer
        if answer == WRITTEN:
            self._created += tried.here is None
            self._updated += tried.here is not None
        elif answer == HAS_BEEN:
            reason = "it came before, or was there, and has been sent or removed since"
            self._skipped.append(SkippedRow(timer.line, timer.definition.name, reason))
        elif answer == PUBLISHING:
            return tried
        elif not isinstance(answer, TimerState) or answer.status not in _SETTLED:
            return _Waiting(timer)
        elif not self._takes(timer, answer):
            self._unchanged += 1
        else:
            return _Waiting(timer, answer)
        return None

    def _takes(self, timer: Portable, here: TimerState) -> bool:
        """Say whether a timer that is here takes what its row tells."""
        if timer.is_call:
            return False
        if not _differs(timer, here):
            is_other = planning.is_rescheduled(here, timer.state.revision)
            return not is_other and not _is_further(here, timer.state)
        if self._on_conflict == "fail":
            raise _conflict(timer)
        return self._on_conflict == "replace"


_SETTLED = ("active", "paused", "stopped", "broken")


def _is_further(here: TimerState, there: TimerState) -> bool:
    """Say whether a timer has come at least as far here as its row tells."""
    if here.status == "broken" and there.status != "broken":
        return False
    runs = [max(each.last_run_ms or -1, each.last_sent_ms or -1) for each in (here, there)]
    if runs[0] != runs[1]:
        return runs[0] > runs[1]
    if here.created_ms != there.created_ms:  # another one, which has begun here by itself
        return False
    if here.due_ms is None or there.due_ms is None:
        return here.due_ms is None
    return here.due_ms >= there.due_ms


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A timer that is to be written."""

    timer: Portable
    here: TimerState | None = field(default=None)  #: as it was read here

    @property
    def incoming(self) -> Incoming:
        """How it is written."""
        timer, here = self.timer, self.here
        state, blob = timer.state, timer.blob
        if here is not None:
            state = _beyond(timer, here)
            if here.source and here.revision != state.revision:  # its code says what it is
                state, blob = replace(state, revision=here.revision), ""
        return Incoming(state, blob, here, timer.only_ms)


def _beyond(timer: Portable, here: TimerState) -> TimerState:
    """Return the state that a timer gets which is here: it does not run again what has run."""
    state, definition = timer.state, timer.definition
    state = replace(state, source=state.source or here.source)
    last_ms, anchor_ms = max(here.last_run_ms or -1, here.last_sent_ms or -1), state.due_ms
    if anchor_ms is None or anchor_ms > last_ms:
        return state
    state = replace(state, last_run_ms=last_ms, last_sent_ms=None)
    due_ms = planning.run_after(definition, last_ms, anchor_ms)
    if due_ms is not None:
        at_ms = due_ms + planning.jitter_of(definition, due_ms)
        return replace(state, due_ms=due_ms, at_ms=at_ms)
    status = "stopped" if state.status == "active" else state.status
    return replace(state, status=status, reason=planning.ENDED, due_ms=None, at_ms=None)
