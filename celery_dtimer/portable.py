"""Timers as rows that a file can hold: a definition with its state, as JSON.

The first row is a header with the number of the format. What a definition holds beyond plain JSON
(UUIDs, datetimes, bytes, ...) stands in a row as Celery's JSON writes it, and is turned back only
where the row becomes a timer again. Whatever is in a row is data: nothing of it is trusted, and
nothing is ever unpickled.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NoReturn

from celery_dtimer.errors import InvalidTimerError, NewerError, invalid, shown
from celery_dtimer.messages import KeptMessage
from celery_dtimer.model import (
    LAST_MS,
    Definition,
    TimerState,
    check_size,
    decode_definition,
    to_datetime,
    to_ms,
)
from celery_dtimer.planning import REASONS, jitter_of
from celery_dtimer.schedules import OneShot
from celery_dtimer.store import decode_name, encode_name

#: What a header says that a file is, and the newest format that is read.
FORMAT, VERSION = "celery-dtimer timers", 1

_MOST_RUNS = 2**53
_LONGEST_TEXT = 64 * 1024
_STATUSES = ("active", "paused", "stopped", "broken")
_MOMENTS = {
    "created_at": "created_ms",
    "due_at": "due_ms",
    "last_run_at": "last_run_ms",
    "last_sent_at": "last_sent_ms",
    "changed_at": "changed_ms",
    "armed_at": "armed_ms",
}
_OF_TIMERS = frozenset(
    {"timer", "id", "status", "reason", "revision", "runs", "skips", "source", *_MOMENTS}
)
_OF_CALLS = frozenset({"call", "due_at", "created_at"})


def dumps_row(row: Mapping[str, Any]) -> str:
    """Return a row as a line of a file: JSON in ASCII, without a line break."""
    return json.dumps(row, separators=(",", ":"))


def loads_row(line: str) -> dict[str, Any]:
    """Return the row in a line of a file.

    Raises:
        InvalidTimerError: there is none.
    """
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as exc:
        raise InvalidTimerError(f"it is not JSON: {exc}") from exc
    if not isinstance(row, dict):
        raise invalid("the row", row, "an object")
    return row


@dataclass(frozen=True, slots=True)
class SkippedRow:
    """A row that was not imported."""

    line: int  #: its number, from 1
    name: str  #: of its timer, or the task id of its call
    reason: str


@dataclass(frozen=True, slots=True)
class Portable:
    """A timer as a row tells it."""

    line: int
    definition: Definition
    blob: str
    state: TimerState

    @property
    def is_call(self) -> bool:
        """Say whether it is a call that waits for its time."""
        return self.definition.message is not None

    @property
    def only_ms(self) -> int | None:
        """The only moment that it runs at, None when there are more, or none is left."""
        is_single = self.is_call or isinstance(self.definition.schedule, OneShot)
        return self.state.due_ms if is_single and self.state.status == "active" else None


# ------------------------------------------------------------------ writing


def header_of(service: str, origin: str, now_ms: int) -> dict[str, Any]:
    """Return the first row."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "service": service,
        "origin": origin,
        "exported_at": _text(now_ms),
    }


def row_of(state: TimerState, blob: str | None) -> dict[str, Any]:
    """Return the row of a timer."""
    content = _content(blob)
    head: dict[str, Any] = {"timer": content, "status": state.status, "revision": state.revision}
    if content is None:
        head["id"] = state.id
    if state.status not in _STATUSES:
        head["status"] = "broken"
    rest = {
        "reason": state.reason,
        "runs": state.runs,
        "skips": {reason: count for reason, count in state.skips.items() if reason in REASONS},
        "source": decode_name(state.source),
    }
    return {**head, **{name: value for name, value in rest.items() if value}, **_moments_of(state)}


def call_row(state: TimerState, blob: str) -> dict[str, Any] | None:
    """Return the row of a call that waits, None when it can not be read."""
    content = _content(blob)
    if content is None or state.due_ms is None:
        return None
    return {
        "call": content,
        "due_at": _text(state.due_ms),
        "created_at": _text(state.created_ms),
    }


def _content(blob: str | None) -> dict[str, Any] | None:
    """Return a stored definition as plain JSON: typed values stay as they are written."""
    try:
        content = json.loads(blob or "null")
    except (ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def _moments_of(state: TimerState) -> dict[str, str]:
    found = ((name, getattr(state, field)) for name, field in _MOMENTS.items())
    return {name: _text(moment_ms) for name, moment_ms in found if moment_ms is not None}


def _text(moment_ms: int) -> str:
    return to_datetime(moment_ms).isoformat(timespec="milliseconds")


# ------------------------------------------------------------------ reading


def check_header(row: Mapping[str, Any]) -> None:
    """Refuse a first row that is no header, or one of a newer format.

    Raises:
        InvalidTimerError: it is none, or one that is not read here.
    """
    if row.get("format") != FORMAT:
        raise invalid("format", row.get("format"), f"{FORMAT!r}: the first row is the header")
    version = row.get("version")
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise invalid("version", version, "the number of a format")
    if version > VERSION:
        raise NewerError(
            f"version={version} is a newer format of exports than this version of celery_dtimer "
            f"reads, which is {VERSION}",
            version,
        )
    if not isinstance(row.get("origin", ""), str):
        raise invalid("origin", row["origin"], "a text")


def read_row(
    row: Mapping[str, Any], line: int, *, is_checked: bool = False
) -> Portable | SkippedRow:
    """Return the timer of a row, or why it can not be carried.

    Args:
        row: as it was exported.
        line: its number.
        is_checked: it was read before: its sizes, and what a message consists of, are known.

    Raises:
        InvalidTimerError: a field can not be used.
    """
    kind = "call" if "call" in row else "timer"
    unknown = row.keys() - (_OF_CALLS if kind == "call" else _OF_TIMERS)
    if unknown:
        raise invalid("field", min(unknown, key=str), "one that this version knows")
    if kind not in row:
        raise InvalidTimerError("timer is missing")
    content = row[kind]
    if content is None:
        return SkippedRow(line, str(row.get("id", "")), "its definition was gone")
    if not isinstance(content, Mapping):
        raise invalid(kind, content, "an object")
    try:
        blob = dumps_row(content)
        definition = decode_definition(blob)
    except NewerError:
        raise
    except InvalidTimerError as exc:
        if row.get("status") != "broken":
            raise
        return SkippedRow(line, str(content.get("name")), f"it is broken: {exc}")
    except (TypeError, ValueError, RecursionError) as exc:
        raise InvalidTimerError(f"{kind} is not what JSON carries: {exc}") from exc
    if (definition.message is not None) != (kind == "call"):
        raise invalid(kind, sorted(content), "the definition of one")
    if not is_checked:
        check_size(definition)
    if kind == "call":
        if not is_checked:
            KeptMessage(definition)
        return Portable(line, definition, definition.blob, _state_of_call(row, definition))
    state = _state_of(row, definition)
    if definition.code_bound and not state.source:
        reason = "its arguments, or its schedule, are code, and no code declares it"
        return SkippedRow(line, definition.name, reason)
    return Portable(line, definition, blob if definition.is_cut else definition.blob, state)


def _state_of_call(row: Mapping[str, Any], definition: Definition) -> TimerState:
    due_ms, created_ms = _moment(row, "due_at"), _moment(row, "created_at")
    if due_ms is None or created_ms is None:
        _missing("due_at" if due_ms is None else "created_at")
    return TimerState(
        definition.id, "active", definition.revision, created_ms, due_ms=due_ms, at_ms=due_ms
    )


def _state_of(row: Mapping[str, Any], definition: Definition) -> TimerState:
    status: Any = row.get("status")
    if status not in _STATUSES:
        raise invalid("status", status, "one of " + ", ".join(_STATUSES))
    moments: dict[str, Any] = {field: _moment(row, name) for name, field in _MOMENTS.items()}
    created_ms, due_ms = moments.pop("created_ms"), moments["due_ms"]
    if created_ms is None:
        _missing("created_at")
    if due_ms is None and status == "active":
        _missing("due_at")
    _check_order(row, due_ms, moments["last_run_ms"])
    reason = _str(row, "reason")
    if definition.is_cut and (status, reason) != ("stopped", "finished"):
        raise invalid("timer['cut']", True, "nothing, unless it is stopped and has finished")
    return TimerState(
        id=definition.id,
        status=status,
        revision=_revision(row) if definition.is_cut else definition.revision,
        created_ms=created_ms,
        at_ms=None if due_ms is None else due_ms + jitter_of(definition, due_ms),
        runs=_count("runs", row.get("runs", 0)),
        skips=_skips(row),
        source=encode_name(_str(row, "source")),
        reason=reason,
        **moments,
    )


def _check_order(row: Mapping[str, Any], due_ms: int | None, last_run_ms: int | None) -> None:
    if due_ms is not None and last_run_ms is not None and due_ms <= last_run_ms:
        raise invalid("due_at", row["due_at"], "a moment after last_run_at")


def _missing(name: str) -> NoReturn:
    raise InvalidTimerError(f"{name} is missing")


def _moment(row: Mapping[str, Any], name: str) -> int | None:
    text = row.get(name)
    if text is None:
        return None
    try:
        moment = datetime.fromisoformat(text)
        moment_ms = to_ms(moment)
    except (TypeError, ValueError, OverflowError):
        moment_ms = -1
    if not 0 <= moment_ms <= LAST_MS:
        raise invalid(name, text, "an ISO 8601 text with an offset, such as " + _text(0))
    return moment_ms


def _str(row: Mapping[str, Any], name: str) -> str:
    text = row.get(name, "")
    if not isinstance(text, str) or len(text) > _LONGEST_TEXT:
        raise invalid(name, text, f"a text of at most {_LONGEST_TEXT} characters")
    return text


def _revision(row: Mapping[str, Any]) -> str:
    revision = row.get("revision")
    is_one = isinstance(revision, str) and len(revision) in (16, 24)
    if not is_one or not str(revision).replace("-", "").replace("_", "").isalnum():
        raise invalid("revision", revision, "the digest of a definition")
    return str(revision)


def _skips(row: Mapping[str, Any]) -> dict[str, int]:
    skips = row.get("skips", {})
    if not isinstance(skips, Mapping) or not skips.keys() <= set(REASONS):
        raise invalid("skips", skips, "counts by reason: " + ", ".join(REASONS))
    return {reason: _count(f"skips[{shown(reason)}]", each) for reason, each in skips.items()}


def _count(name: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _MOST_RUNS:
        raise invalid(name, value, "a whole number, 0 or more")
    return value
