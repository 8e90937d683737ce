"""The values that the parts hand to each other, and how they are stored.

A timer is stored in two pieces: its *definition* (what to send and when, as JSON, opaque to the
scripts) and its *state* (a small hash that the scripts move). A definition's *revision* is a digest
of it: equal definitions have equal revisions. Its first part covers the schedule alone, and the
last one, which most have not, how far the timer goes: so a change of arguments can be told from a
change of schedule, and that from a change of the end.

Inside the core, moments are integer milliseconds since the epoch of the server's clock; datetimes
are aware.
"""

from __future__ import annotations

import base64
import hashlib
import math
import os
import re
import secrets
import socket
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from functools import cached_property, lru_cache
from typing import Any, Literal, NamedTuple

from kombu.utils import json

from celery_dtimer import schedules
from celery_dtimer.errors import InvalidTimerError, NewerError, invalid, shown
from celery_dtimer.options import CANVAS_KINDS
from celery_dtimer.policy import PLAIN, Policy, decode_policy
from celery_dtimer.tracing import Journey

Status = Literal["active", "paused", "stopped", "broken"]

#: The newest schema that this version reads and writes: the number of what is stored's format.
#: Raise it with a change that a version before would take for something else, or for damage, and
#: have the definitions that need it say so in their ``schema``: see the design.
SCHEMA = 1

#: The owner of the timers that nobody owns.
UNASSIGNED = "unassigned"

#: The most that one definition may take; the size of one batch of a script.
MAX_DEFINITION_BYTES = 1024 * 1024

#: The most that the names of a timer and of a task, and a description, may take.
MAX_NAME_BYTES = 1_000_000
MAX_TASK_BYTES = 16 * 1024
MAX_DESCRIPTION_BYTES = 64 * 1024

#: How many options a timer may have, and the most that they may take as JSON.
MAX_OPTIONS = 100
MAX_OPTIONS_BYTES = 256 * 1024

#: How deep the lists and dicts of a definition may be in each other: no reader runs out of stack.
MAX_DEPTH = 200

_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_RUNS = uuid.UUID("5a6f0f6e-6d0d-5c55-9d7a-0d1f7c1d2b1e").bytes  # the namespace of task ids
_BASE_32 = "abcdefghijklmnopqrstuvwxyz234567"
_PAIRS = [one + two for one in _BASE_32 for two in _BASE_32]
_TIMER_ID = re.compile(r"[a-z2-7]{26}")
#: The last moment that can be shown, in the year 9999.
LAST_MS = 253_402_300_799_999
_CUT = "cut"  # the mark of a summary
_COUNTDOWN = "eta-"  # the scripts know them by it
_PART = 8  # characters of each part of a revision, in base 64


def to_datetime(moment_ms: int) -> datetime:
    """Return a moment as an aware datetime in UTC."""
    return _EPOCH + timedelta(milliseconds=moment_ms)


def to_ms(moment: datetime) -> int:
    """Return an aware datetime as milliseconds since the epoch."""
    return (moment - _EPOCH) // timedelta(milliseconds=1)


def timer_id(name: str) -> str:
    """Return the id of the timer with this name: 26 characters that are safe in any key."""
    digest = hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=16).digest()
    number = int.from_bytes(digest, "big") << 2  # base 32, a good deal faster than by base64
    return "".join([_PAIRS[number >> shift & 1023] for shift in range(120, -1, -10)])


def countdown_id(task_id: str) -> str:
    """Return the id of the hidden one-shot that a durable countdown is; no named timer has it."""
    return _COUNTDOWN + timer_id(task_id)


def is_countdown_id(id: str) -> bool:
    """Say whether an id is that of a durable countdown."""
    return id.startswith(_COUNTDOWN)


def is_timer_id(text: str) -> bool:
    """Say whether the text has the form of a timer's id."""
    return _TIMER_ID.fullmatch(text) is not None


def shard_of(id: str, shards: int) -> str:
    """Return which shard a timer belongs to, as it stands in keys: "" when there is only one.

    It is FNV-1a, 32 bits, of the id, modulo the number of shards.
    """
    if shards == 1:
        return ""
    digest = 0x811C9DC5
    for byte in id.encode("utf-8", "surrogatepass"):
        digest = (digest ^ byte) * 0x01000193 & 0xFFFFFFFF
    return str(digest % shards)


def new_trigger_id() -> str:
    """Return the id of a new hidden one-shot: a timer that has no name."""
    return timer_id(secrets.token_hex(16))


_RESENT_ID = re.compile(r"run(\d+)-([0-9a-f-]{36})")


def resent_id(times: int, task_id: str) -> str:
    """Return the id of the hidden one-shot that sends a run that was lost so many times."""
    return f"run{times}-{task_id}"


def resent_of(id: str) -> tuple[int, str]:
    """Return how often a timer's run was lost before, and its task id: 0 and "" for most."""
    found = _RESENT_ID.fullmatch(id)
    return (int(found[1]), found[2]) if found else (0, "")


_REQUEUED = "again-"
_REQUEUED_SHARD = re.compile(r"again-[0-9a-f]{32}-(\d+)")


def new_requeued_id(shard: int | None = None) -> str:
    """Return the id of a new hidden one-shot that sends what a dead letter holds.

    Args:
        shard: the only one of the run's messages that is sent; None for all.
    """
    return _REQUEUED + secrets.token_hex(16) + ("" if shard is None else f"-{shard}")


def is_requeued(id: str) -> bool:
    """Say whether a timer sends what a dead letter held."""
    return id.startswith(_REQUEUED)


def requeued_task_id(id: str) -> str:
    """Return the task id of the one message that a dead letter is sent again as."""
    return uuid_text(id.removeprefix(_REQUEUED), 4)


def is_one_message(id: str, definition: Definition) -> bool:
    """Say whether a hidden one-shot sends a single message of a definition."""
    is_whole = definition.policy.shards == 1 or requeued_shard(id) is not None
    return is_whole and definition.task not in CANVAS_KINDS


def requeued_shard(id: str) -> int | None:
    """Return the only message of its run that a hidden one-shot sends, None when it sends all."""
    found = _REQUEUED_SHARD.fullmatch(id)
    return None if found is None else int(found[1])


def new_instance_id() -> str:
    """Return an id that no other instance has: host, pid and a nonce."""
    host = re.sub(r"[^A-Za-z0-9.-]", "-", socket.gethostname())[:40] or "localhost"
    return f"{host}:{os.getpid()}:{secrets.token_hex(4)}"


@lru_cache(maxsize=1)
def _instance_id_of(pid: int) -> str:
    return new_instance_id()


def process_instance_id() -> str:
    """Return the instance id of this process: made once; a forked child makes its own."""
    return _instance_id_of(os.getpid())


# ------------------------------------------------------------------ definitions


@dataclass(frozen=True)
class Definition:
    """What a timer sends, and when: all that its creator decides."""

    name: str
    task: str
    schedule: schedules.Schedule
    # Arguments and options are not shown, since they may hold secrets.
    args: Sequence[Any] = field(default=(), repr=False)
    kwargs: Mapping[str, Any] = field(default_factory=dict, repr=False)
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    description: str = ""
    policy: Policy = PLAIN
    #: The arguments, or the schedule, can not be stored: they are taken from the code of the
    #: instance that owns the timer.
    code_bound: bool = False
    #: The app by whose time zone the schedule goes, since it names none of its own.
    zone_of: str = ""
    #: The whole message of a durable countdown, as `messages.keep` makes it: its name is the task
    #: id, and its state alone says when it is due.
    message: Mapping[str, Any] | None = field(default=None, repr=False)
    #: It is but a summary of one whose timer has no run left: what it would send is not known.
    is_cut: bool = False

    __hash__ = object.__hash__  # by identity: what is cached for a definition goes with it

    @cached_property
    def id(self) -> str:
        """The timer's id."""
        return timer_id(self.name) if self.message is None else countdown_id(self.name)

    @cached_property
    def blob(self) -> str:
        """The definition as it is stored: JSON in ASCII, without what has its default."""
        if self.message is not None:
            content = {"name": self.name, "task": self.task, "message": self.message}
            return _dumps(content)
        rest: dict[str, Any] = {}
        if self.code_bound:
            rest["code_bound"] = True
        else:
            for key, kind in (("args", list), ("kwargs", dict), ("options", dict)):
                if value := getattr(self, key):
                    rest[key] = kind(value)
        if self.description:
            rest["description"] = self.description
        if self.zone_of:
            rest["zone_of"] = self.zone_of
        rest |= self.policy.encode()
        return f"{self._head},{_dumps(rest)[1:]}" if rest else self._head + "}"

    @cached_property
    def revision(self) -> str:
        """The digest of the definition; the first part is the schedule's."""
        return revision_of(self, self.blob)

    @property
    def expires_ms(self) -> int | None:
        """The moment after which nothing is sent any more: that of an absolute ``expires``."""
        expires = self.options.get("expires") if self.options else None
        if not isinstance(expires, datetime):
            return None
        return to_ms(expires if expires.tzinfo else expires.replace(tzinfo=timezone.utc))

    @property
    def last_ms(self) -> int | None:
        """The moment after which no run is scheduled."""
        end_ms, expires_ms = self.policy.end_ms, self.expires_ms
        if end_ms is None or expires_ms is None:
            return expires_ms if end_ms is None else end_ms
        return min(end_ms, expires_ms)

    @property
    def window(self) -> str:
        """How far the timer goes, as a text; "" when it has no bounds."""
        expires = "" if self.expires_ms is None else f" expires {self.expires_ms}"
        return self.policy.window + expires

    @property
    def summary(self) -> str:
        """What is kept of it once nothing is to be sent any more: enough to list the timer.

        "" when that is all of it, or its last run may need it for longer than for one message: it
        has several, or is sent again if it is lost.
        """
        if self.policy.resend_lost or self.policy.shards > 1 or self.task in CANVAS_KINDS:
            return ""
        head = self._head + "}"
        return "" if head == self.blob else f'{head[:-1]},"{_CUT}":true}}'

    @property
    def _head(self) -> str:
        return f'{{"name":{_dumps(self.name)},{_encoded(self.task, self.schedule)[0]}'


def revision_of(definition: Definition, blob: str) -> str:
    """Return the revision of a definition that is stored as a blob."""
    if definition.message is not None:
        return _digest(blob)
    window = definition.window
    parts = _encoded(definition.task, definition.schedule)[1] + _digest(blob)
    return parts + _digest(window) if window else parts


def revision_matches(revision: str, blob: str) -> bool:
    """Say whether a revision may be that of a definition that is stored as a blob."""
    return _digest(blob) in (revision, revision[_PART : 2 * _PART])


@lru_cache(maxsize=1024)
def _encoded(task: str, schedule: schedules.Schedule) -> tuple[str, str]:
    """Return what many timers share: its JSON, and the schedule's part of a revision."""
    rule = _dumps(schedule.encode())
    return f'"task":{_dumps(task)},"schedule":{rule}', _digest(rule)


def decode_definition(blob: str) -> Definition:
    """Return the definition stored in a blob.

    Raises:
        NewerError: it was written by a newer version.
        InvalidTimerError: the blob is not a definition: it was edited by hand.
    """
    try:
        content = _loads(blob)
    except Exception as exc:  # Celery's typed values raise whatever their constructors raise
        raise InvalidTimerError(f"the stored definition is not JSON: {exc}") from exc
    if not isinstance(content, dict):
        raise InvalidTimerError(f"the stored definition is {shown(content)}, not an object")
    _check_schema(content)
    if _may_be_deep(blob) and not _is_shallow(content):
        raise InvalidTimerError(f"the stored definition is nested deeper than {MAX_DEPTH} levels")
    if "message" in content:
        return _decoded_countdown(content)
    schedule = schedules.decode(content.get("schedule"))
    try:
        found = Definition(
            name=_stored(content, "name", str),
            task=_stored(content, "task", str),
            schedule=schedule,
            args=_stored(content, "args", list, []),
            kwargs=_stored(content, "kwargs", dict, {}),
            options=_stored(content, "options", dict, {}),
            description=_stored(content, "description", str, ""),
            policy=decode_policy(content),
            code_bound=_stored(content, "code_bound", bool, False),
            zone_of=_stored(content, "zone_of", str, ""),
            is_cut=_stored(content, _CUT, bool, False),
        )
    except KeyError as exc:
        raise InvalidTimerError(f"the stored definition lacks {exc}") from exc
    if isinstance(schedule, schedules.Custom) and not (found.code_bound or found.is_cut):
        raise InvalidTimerError(
            f"the stored schedule {shown(schedule.describe())} is code, and the definition is not "
            "bound to any"
        )
    return found


_KNOWN = frozenset(
    {
        *("name", "task", "schedule", "args", "kwargs", "options", "description", "code_bound"),
        *("zone_of", "message", "schema", _CUT),
        *Policy.__slots__,
    }
)


def _check_schema(content: Mapping[str, Any]) -> None:
    """Refuse what a newer version has written, before something is read into it.

    Raises:
        NewerError: it needs a newer schema, or has a field that nothing is known of.
        InvalidTimerError: its schema is no number.
    """
    schema = content.get("schema", SCHEMA)
    if not isinstance(schema, int) or isinstance(schema, bool):
        raise InvalidTimerError(f"the stored schema is {shown(schema)}, not an int")
    unknown = content.keys() - _KNOWN
    if schema > SCHEMA or unknown:
        needed = max(schema, SCHEMA + 1)
        what = f"it has the field {shown(min(unknown))}" if unknown else f"it is of schema {schema}"
        raise NewerError(
            f"the stored definition is of a newer version: {what}, and this one reads schemas up "
            f"to {SCHEMA}",
            needed,
        )


#: The schedule of what is due when its state says so.
ONCE = schedules.OneShot(0)


def _decoded_countdown(content: dict[str, Any]) -> Definition:
    try:
        name, task = _stored(content, "name", str), _stored(content, "task", str)
    except KeyError as exc:
        raise InvalidTimerError(f"the stored definition lacks {exc}") from exc
    return Definition(name, task, ONCE, message=_stored(content, "message", dict))


def _stored(content: dict[str, Any], key: str, kind: type, *default: Any) -> Any:
    value = content.get(key, *default) if default else content[key]
    if not isinstance(value, kind):
        raise InvalidTimerError(f"the stored {key} is {shown(value)}, not a {kind.__name__}")
    return value


def schedule_part(revision: str) -> str:
    """Return the part of a revision that covers the schedule."""
    return revision[:_PART]


def window_part(revision: str) -> str:
    """Return the part of a revision that covers how far the timer goes."""
    return revision[2 * _PART :]


# As kombu's `dumps`, which makes one for each text.
_ENCODER = json.JSONEncoder(separators=(",", ":"))


def _dumps(content: Any) -> str:
    return _ENCODER.encode(content)


def _loads(text: str) -> Any:
    """As kombu's `loads`, without its hook for every object where no typed value is stored."""
    return json.loads(text, object_hook=json.object_hook if '"__type__"' in text else None)


def _may_be_deep(text: str) -> bool:
    """Say whether a text has so many brackets that its content is to be looked at."""
    return text.count("[") + text.count("{") > MAX_DEPTH


def _is_shallow(value: Any) -> bool:
    """Say whether lists and dicts are in each other no deeper than is allowed."""
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        level = [
            inner
            for each in level
            for inner in (each.values() if isinstance(each, Mapping) else each)
            if isinstance(inner, (list, tuple, Mapping))
        ]
        if not level:
            return True
    return False


def _digest(text: str) -> str:
    digest = hashlib.blake2b(
        text.encode(errors="backslashreplace"), digest_size=_PART * 3 // 4
    ).digest()
    return base64.urlsafe_b64encode(digest).decode()


def check_storable(field_name: str, value: Any) -> None:
    """Refuse a value that would not come back from Celery's JSON as it went in.

    Lists stand for tuples, as in every Celery message.

    Raises:
        InvalidTimerError: with the field's name and the reason.
    """
    if _is_plain(value):
        return
    accepted = (
        "what Celery's JSON carries unchanged (str, numbers, bool, None, list, dict with str keys, "
        "bytes, UUID, Decimal, datetime, date, time)"
    )
    try:
        returned = json.loads(_dumps(value))
    except (TypeError, ValueError, OverflowError, RecursionError) as exc:
        raise InvalidTimerError(
            f"{field_name}={shown(value)} can not be stored ({exc}); expected {accepted}"
        ) from exc
    try:
        is_same = _same(value, returned)
    except ArithmeticError:  # a signalling NaN compares with nothing
        is_same = False
    if not is_same:
        raise invalid(field_name, value, accepted)


def check_size(definition: Definition) -> Definition:
    """Return the definition, unless it, or a part of it, is too large to be stored.

    Raises:
        InvalidTimerError: with the part, its size and what is accepted.
    """
    for field_name, most in _MOST_BYTES.items():
        size = len(getattr(definition, field_name).encode("utf-8", "surrogatepass"))
        if size > most:
            raise _too_large(definition, f"has a {field_name} of {size} bytes", f"{most}")
    blob, options = definition.blob, definition.options
    if len(options) > MAX_OPTIONS:
        raise _too_large(definition, f"has {len(options)} options", f"{MAX_OPTIONS}")
    if len(blob) > MAX_OPTIONS_BYTES and not definition.code_bound:
        size = len(_dumps(dict(options)))
        if size > MAX_OPTIONS_BYTES:
            raise _too_large(definition, f"has options of {size} bytes", f"{MAX_OPTIONS_BYTES}")
    if len(blob) > MAX_DEFINITION_BYTES:
        raise _too_large(definition, f"takes {len(blob)} bytes as JSON", f"{MAX_DEFINITION_BYTES}")
    if _may_be_deep(blob):
        parts = (definition.args, definition.kwargs, definition.options, definition.message)
        if not definition.code_bound and not _is_shallow(parts):
            what = "has lists or dicts deep in each other"
            raise _too_large(definition, what, f"{MAX_DEPTH} levels")
    return definition


_MOST_BYTES = {
    "name": MAX_NAME_BYTES,
    "task": MAX_TASK_BYTES,
    "description": MAX_DESCRIPTION_BYTES,
}


def _too_large(definition: Definition, what: str, most: str) -> InvalidTimerError:
    return InvalidTimerError(f"timer {shown(definition.name)} {what}; expected at most {most}")


_PLAIN = frozenset({bool, float, type(None)})
_PLAIN_BITS = 2000  # Python may be told to refuse numbers of more than 640 digits as text


def _is_plain(value: Any) -> bool:
    """Say whether this is a list or dict of what JSON carries unchanged: most arguments are."""
    if isinstance(value, dict):
        return (
            all(map(_is_plain_scalar, value.values()))
            and all(type(key) is str and key.isascii() for key in value)
            and "__type__" not in value
        )
    return isinstance(value, (list, tuple)) and all(map(_is_plain_scalar, value))


def _is_plain_scalar(value: Any) -> bool:
    kind = type(value)  # a subclass comes back as what it derives from
    if kind is str:
        return bool(value.isascii())
    if kind is int:
        return bool(value.bit_length() < _PLAIN_BITS)
    return kind in _PLAIN


def _same(given: Any, returned: Any) -> bool:
    if isinstance(given, Mapping):
        return (
            isinstance(returned, dict)
            and given.keys() == returned.keys()
            and all(_same(value, returned[key]) for key, value in given.items())
        )
    if isinstance(given, (list, tuple)):
        return (
            isinstance(returned, list)
            and len(given) == len(returned)
            and all(map(_same, given, returned))
        )
    if isinstance(given, float) and math.isnan(given):
        return isinstance(returned, float) and math.isnan(returned)
    return bool(given == returned)


# ------------------------------------------------------------------ state


@dataclass(frozen=True, slots=True)
class TimerState:
    """A timer's state as it is stored: everything but its definition."""

    id: str
    status: Status
    revision: str
    created_ms: int
    due_ms: int | None = None  #: scheduled_at of the next run
    at_ms: int | None = None  #: when it is looked at next: due_ms unless a publish was refused
    last_run_ms: int | None = None  #: scheduled_at of the last run that was committed
    last_sent_ms: int | None = (
        None  #: scheduled_at of a run that was published, while its commit was refused
    )
    runs: int = 0
    skips: Mapping[str, int] = field(default_factory=dict)  #: runs that did not happen, by reason
    attempts: int = 0  #: publishes refused since the last run
    waits: bool = False  #: its run waits for the end of another
    owner: str = UNASSIGNED
    source: str = ""  #: where a static timer was declared
    parent: str = ""  #: the timer that a trigger belongs to
    reason: str = ""
    changed_ms: int | None = None  #: when it was given another definition
    armed_ms: int | None = None  #: when it began anew, in another phase, since its creation

    @property
    def skipped(self) -> int:
        """How many of its runs did not happen, for whatever reason."""
        return sum(self.skips.values())

    @property
    def is_finished(self) -> bool:
        """Say whether it has no run left, as a one-shot that has run: its arguments are gone."""
        return self.status == "stopped" and self.reason == FINISHED


#: The reason of a timer that is stopped because it has no run left.
FINISHED = "finished"

#: What the reason of a timer begins with that is broken because of what was edited by hand.
DAMAGED = "damaged: "


@dataclass(frozen=True, slots=True)
class Timer:
    """A timer as its users see it; its times are in UTC."""

    id: str
    name: str
    description: str
    schedule: schedules.Schedule | None  #: None when it can not be read
    task: str
    args: list[Any] = field(repr=False)  # not shown, since they may hold secrets
    kwargs: dict[str, Any] = field(repr=False)
    options: dict[str, Any] = field(repr=False)
    status: Status
    instance: str | None  #: the id of the instance that owns it
    next_run_at: datetime | None  #: None unless it is active
    last_run_at: datetime | None  #: the scheduled moment of its last run
    total_run_count: int
    skips: dict[str, int]  #: runs that did not happen, by reason
    revision: str  #: equal definitions have equal ones
    created_at: datetime
    policy: Policy = PLAIN
    source: str | None = None  #: the app that declares it, when it is static
    reason: str | None = None  #: why it is broken, or "finished" when it has no run left

    @property
    def skipped(self) -> int:
        """How many of its runs did not happen, for whatever reason."""
        return sum(self.skips.values())

    @classmethod
    def from_stored(cls, state: TimerState, blob: str | None) -> Timer:
        """Return the timer of a state and a definition; one that cannot be read is broken."""
        try:
            definition = decode_definition(blob) if blob else None
            status, reason = state.status, state.reason
        except NewerError as exc:
            definition, status, reason = None, state.status, state.reason or str(exc)
        except InvalidTimerError as exc:
            definition, status, reason = None, "broken", state.reason or str(exc)
        owned = status == "active" and state.owner != UNASSIGNED
        return cls(
            id=state.id,
            name=definition.name if definition else _readable_name(blob),
            description=definition.description if definition else "",
            schedule=definition.schedule if definition else None,
            task=definition.task if definition else "",
            args=list(definition.args) if definition else [],
            kwargs=dict(definition.kwargs) if definition else {},
            options=dict(definition.options) if definition else {},
            status=status,
            instance=state.owner if owned else None,
            next_run_at=_maybe_datetime(state.due_ms) if status == "active" else None,
            last_run_at=_maybe_datetime(state.last_run_ms),
            total_run_count=state.runs,
            skips=dict(state.skips),
            revision=state.revision,
            created_at=to_datetime(state.created_ms),
            policy=definition.policy if definition else PLAIN,
            source=state.source or None,
            reason=reason or None,
        )


def _maybe_datetime(moment_ms: int | None) -> datetime | None:
    return None if moment_ms is None else to_datetime(moment_ms)


def broken_blob(name: str, task: object) -> str:
    """Return what is stored of an entry that could not be read: enough to list it."""
    return _dumps({"name": name, "task": task if isinstance(task, str) else ""})


def _readable_name(blob: str | None) -> str:
    try:
        name = _loads(blob or "{}")["name"]
    except Exception:  # whatever it is: there is no name in it
        return ""
    return name if isinstance(name, str) else ""


# ------------------------------------------------------------------ runs


class Run(NamedTuple):
    """One occurrence of a timer, ready to be published."""

    service: str
    instance: str
    timer_id: str  #: the timer that the callback sees; a trigger shows its parent
    identity: str  #: the timer or trigger that this run belongs to
    created_ms: int
    scheduled_ms: int
    number: int
    definition: Definition
    shard_index: int = 0
    shard_total: int = 1  #: so many messages make up the run
    resent: int = 0  #: how often it was lost, and is sent again
    known_id: str = ""  #: the task id that it has had then, or that was told beforehand
    journey: Journey | None = None  #: within which its messages are built, where it is traced

    @property
    def task_id(self) -> str:
        """The id of the run's task: the same for whoever sends it, however often.

        A UUIDv5, but for a durable countdown, which has got its id from who called the task.
        """
        if self.known_id:
            return self.known_id
        return self.id_of("") if self.definition.message is None else self.definition.name

    def id_of(self, part: str) -> str:
        """Return the id of a part of what the run sends, itself "" for a single task."""
        name = f"{self.service}/{self.identity}/{self.created_ms}/{self.scheduled_ms}"
        if self.shard_total > 1:
            name += f"/shard {self.shard_index}"
        if part:
            name += f"/{part}"
        return uuid_text(hashlib.sha1(_RUNS + name.encode()).hexdigest(), 5)  # noqa: S324 - RFC 9562

    @property
    def parts(self) -> Sequence[Run]:
        """The shards of the run, itself when it has but one: a message each."""
        total = self.definition.policy.shards
        if total == 1:
            return (self,)
        only = requeued_shard(self.identity)
        indexes = range(total) if only is None else (only,)
        return [self._replace(shard_index=index, shard_total=total) for index in indexes]

    @property
    def header(self) -> dict[str, Any]:
        """The ``dtimer`` header of the message."""
        header: dict[str, Any] = {
            "id": self.timer_id,
            "name": self.definition.name,
            "service": self.service,
            "instance": self.instance,
            "scheduled_at": to_datetime(self.scheduled_ms).isoformat(timespec="milliseconds"),
            "run": self.number,
        }
        if self.shard_total > 1:
            header |= {"shard_index": self.shard_index, "shard_total": self.shard_total}
        if self.resent:
            header["resent"] = self.resent
        return header


_VARIANTS = {digit: "89ab"[int(digit, 16) & 3] for digit in "0123456789abcdef"}


def uuid_text(digits: str, version: int) -> str:
    """Return the text of the UUID whose bits are these 32 or more hexadecimal digits."""
    return (
        f"{digits[:8]}-{digits[8:12]}-{version}{digits[13:16]}-"
        f"{_VARIANTS[digits[16]]}{digits[17:20]}-{digits[20:32]}"
    )


# ------------------------------------------------------------------ instances


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to dispatch, held by one instance for one epoch.

    ``trusted_until`` counts from the start of the request that renewed it and ends before the
    server's does; ``clock()`` of the membership is what it is compared with.
    """

    instance: str
    epoch: int
    trusted_until: float
    heartbeat_ms: int = 0  #: the server's time of the heartbeat that renewed it
    members: int = 0  #: counts the changes of membership

    def is_valid(self, now: float) -> bool:
        """Say whether the holder may still act; ``now`` is the clock that counts suspension."""
        return now < self.trusted_until


@dataclass(frozen=True, slots=True)
class Instance:
    """One running beat process, or embedded scheduler, of a service; its times are in UTC."""

    id: str
    service: str
    host: str
    port: int  #: its pid: it listens on none
    status: str  #: active, draining (it is given no more timers) or leaving
    epoch: int  #: the number of its registration
    started_at: datetime
    heartbeat_at: datetime
    version: str
    dispatch: str  #: the mode in force, "atomic" or "confirmed"; "" before it is known
    dispatch_reason: str  #: why this mode is in force
    broker: str  #: "up", "down" (it can not be reached from there), or "" before it is known
    timers: int  #: how many it owns
    sent: int  #: runs since it registered, as are the next two
    skipped: int
    refused: int  #: messages that were not sent and are tried again
    replays: int = 0  #: how often Redis has lost what it had confirmed: runs may have come again
    replayed_from: datetime | None = None  #: the last such span: sent in it, they may come again
    replayed_until: datetime | None = None
    unreplicated: int = 0  #: commits that reached too few replicas (``dtimer_wait_replicas``)
    schema: int = 0  #: the newest that it reads
    #: Seconds by which its host's clock is ahead of the server's; None before it is known.
    clock_offset: float | None = None
    settings: str = field(default="", repr=False)  #: what all should agree on, as JSON

    def silence_ms(self, now_ms: int) -> int:
        """Return the milliseconds since its last heartbeat, at a moment of the server's clock."""
        return now_ms - to_ms(self.heartbeat_at)

    @property
    def is_draining(self) -> bool:
        """Say whether it is given no more timers: see `DistributedTimer.drain_instance`."""
        return self.status == "draining"
