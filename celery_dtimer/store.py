"""Where the timers live: keys, scripts and replies.

`Keys` names every key, the files in ``lua/`` are the transitions, and `Store` calls them and turns
their answers into values and errors. Every call is one round trip, has a time limit, and is never
repeated here: redis-py's own retries are off, since a lost reply does not say whether the script
ran.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cache
from importlib import resources
from typing import Any, NamedTuple, NoReturn, TypeAlias, TypeVar
from urllib.parse import quote, unquote

from redis.exceptions import (
    BusyLoadingError,
    ClusterDownError,
    MasterDownError,
    NoPermissionError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TryAgainError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from celery_dtimer import connections, planning, tracing, urls
from celery_dtimer.errors import (
    ConflictError,
    DamagedError,
    FencedError,
    InvalidTimerError,
    SchemaError,
    StoreError,
    StoreUnavailableError,
    TooManyTimersError,
    shown,
)
from celery_dtimer.masking import masked, secrets_in
from celery_dtimer.model import (
    LAST_MS,
    MAX_DEFINITION_BYTES,
    SCHEMA,
    UNASSIGNED,
    Definition,
    Instance,
    Timer,
    TimerState,
    decode_definition,
    is_countdown_id,
    timer_id,
    to_datetime,
)
from celery_dtimer.planning import Plan, Skip
from celery_dtimer.settings import MOST_SHARDS, Settings
from celery_dtimer.version import __version__

#: Timers that one call of a script takes, so that it stays under 5 ms.
BATCH = 50
_UPSERTS = 64  # timers that one call writes, for the same reason,
_HANDED = 100  # and that one call gives to others
_BATCH_BYTES = MAX_DEFINITION_BYTES
_CONFLICTS = 50  # pauses of a write that is computed anew because others write the same timer
_PAGE = 1000  # timers of the queue that are read at once
_HISTORY_PAGE = 500  # entries that are read at once
_WAIT_SHORT_MS = 10  # that a commit waits for replicas while the one before had too few
_LONGEST_PAUSE = 0.05  # seconds between two of them
_SCRUBBED = 100  # timers, or runs, that are looked at with one call
_SCANNED = 100  # keys that are passed with one call

_SCRIPTS = (
    *("register", "heartbeat", "leave", "reap", "rebalance", "declare", "undeclare"),
    *("report", "give_up", "steal", "rezoned", "drain", "undrain"),
    *("upsert", "delete", "pause", "resume", "stop", "trigger"),
    *("hold", "cancel"),
    *("due", "commit", "linked", "purge"),
    *("mend", "scrub", "scrub_runs", "vanished", "restore"),
    *("run_started", "run_ended", "renew_runs", "open_runs", "close_runs", "lose"),
    "revoke_runs",
    *("requeue", "purge_dead"),
    *("layout", "begin_resharding", "end_resharding", "mark_layout"),
    *("depart", "arrive", "moved", "arrive_runs", "drop_runs", "arrive_letters", "drop_letters"),
    *("import", "origin"),
)
# Those that are to reach the shard where a timer belongs.
_PLACED = {
    *("upsert", "delete", "pause", "resume", "stop", "trigger", "hold", "cancel", "requeue"),
    *("declare", "undeclare", "run_started", "run_ended", "renew_runs", "import"),
    *("depart", "arrive", "moved", "arrive_runs", "drop_runs", "arrive_letters", "drop_letters"),
}
_FENCED, _BUSY, _UNLINKED, _FULL, _ELSEWHERE = -1, -2, -3, -4, -9
_NO_TAKER = -3  # of ``drain.lua``
_OUT_FIELDS = 8  # what ``running`` says of a run
_WAITS = "waits"  # in the place of the number of refusals
_SKIPPED = "skipped_"  # the fields that count runs which did not happen, followed by why

# What a server answers that will serve later, or that is no longer the right one.
_PASSING_IN_SCRIPT = re.compile(  # Redis before 7 wraps what a script ran into
    r"(^|-)(BUSY|READONLY|OOM|LOADING|MASTERDOWN|CLUSTERDOWN|TRYAGAIN|NOREPLICAS|MISCONF) "
)
_NEWER_SCHEMA = re.compile(r"(?:^|-|\s)SCHEMA (\d+)")
_WRONG_TYPE = re.compile(r"(^|-|\s)WRONGTYPE ")  # likewise
_FORBIDDEN_IN_SCRIPT = re.compile(  # as Redis 6, 7.0 and 7.2 say it
    r"(^|-)NOPERM |ACL failure in script|The user executing the script can't"
)
_PASSING = (
    BusyLoadingError,
    ClusterDownError,
    MasterDownError,
    OutOfMemoryError,
    ReadOnlyError,
    TryAgainError,
)


def is_passing(error: str | Exception) -> bool:
    """Say whether a server that answers so will serve later, or is no longer the right one."""
    if isinstance(error, _PASSING):
        return True
    error = str(error)
    return _PASSING_IN_SCRIPT.search(error) is not None


def is_forbidden(error: str) -> bool:
    """Say whether a server answers so because of what its user may do."""
    return _FORBIDDEN_IN_SCRIPT.search(error) is not None


def storable(text: str) -> str:
    """Return a text that can be sent to Redis, whatever an error or a user has put into it."""
    return text.encode("utf-8", "backslashreplace").decode()


def _sendable(argument: Any) -> Any:
    return storable(argument) if isinstance(argument, str) else argument


def encode_name(name: str) -> str:
    """Return a name as it stands in keys: percent-encoded but for letters, digits and ``-_~``."""
    return quote(name, safe="", errors="surrogatepass").replace(".", "%2E")


def decode_name(text: str) -> str:
    """Return the name that `encode_name` was given."""
    return unquote(text, errors="surrogatepass")


_GLOB = re.compile(r"[][*?\\^]")


def _literally(text: str) -> str:
    """Return a text as a pattern of SCAN that stands for itself."""
    return _GLOB.sub(lambda found: "\\" + found[0], text)


@dataclass(frozen=True, slots=True)
class Keys:
    """Every key of one service, all in one hash slot.

    ============================  =======  =================================================
    ``timer:{s}:<id>``            hash     a timer's state
    ``timer_definition:{s}:<id>`` string   its definition, JSON
    ``timer_queue:{s}``           zset     active timers by ``at`` in ms: the truth about when
    ``inactive_timers:{s}``       zset     the other ones by when they are purged
    ``triggers:{s}:<id>``         set      the pending hidden one-shots of a timer
    ``instance:{s}:<i>``          hash     one instance
    ``service_instances:{s}``     zset     registered instances by last heartbeat in ms
    ``instance_timers:{s}:<i>``   zset     what an instance owns by ``at``: the truth about who
    ``static_timers:{s}:<source>``   set   the static timers of a source
    ``declaration:{s}:<digest>``  set      the static timers that some code declares
    ``declarations:{s}:<source>`` zset     declarations by when they were first seen
    ``run_claim:{s}:<task_id>``   string   which message of a run has started; expires
    ``running:{s}``               hash     runs that are out, by task id
    ``run_leases:{s}``            zset     the same by when they count as lost, in ms
    ``open_runs:{s}:<id>``        zset     of a timer that holds its runs: those that are out
    ``revoked_runs:{s}``          zset     runs revoked for later ones, by when
    ``dead_timers:{s}``           zset     dead letters by when they were written
    ``dead_timer:{s}:<letter>``   hash     one dead letter
    ``history:{s}``               stream   what was sent, and what was not and why
    ``runs:{s}``                  stream   what became of runs in the workers
    ``counters:{s}``              hash     how many runs were sent, and not, by reason
    ``meta:{s}``                  hash     last epoch, schema, membership changes, mover, zones;
                                           shards and layout
    ``departing:{s}``             set      timers that are on their way to other shards
    ``arrivals:{s}``              zset     what has come from other shards, and when that was over
    ``never:{s}``                 --       never exists (see ``prelude.lua``)
    ``wake:{s}:<i>``              channel  wakes an instance
    ============================  =======  =================================================

    The tag of a service that has several shards is ``{s.0}``, ``{s.1}`` and so on. What the
    ``meta`` of ``{s}`` says of shards holds for all of them.
    """

    service: str
    prefix: str = ""
    shard: str = ""  #: its number, "" for the only one

    def __call__(self, what: str, id: str | None = None) -> str:
        """Return the key for ``what`` of the service, or of one id in it."""
        key = f"{self.prefix}{what}:{{{self.tag}}}"
        return key if id is None else f"{key}:{id if id.isascii() else storable(id)}"

    @property
    def tag(self) -> str:
        """What stands between the braces of every key, and decides its slot."""
        shard = f".{self.shard}" if self.shard else ""
        return encode_name(self.service) + shard


@cache
def script_source(name: str, schema: int = SCHEMA) -> str:
    """Return the text of a script with the prelude in front, as a schema's version has it."""
    return f"{prelude(schema)}\n{_lua(name)}"


def prelude(schema: int = SCHEMA) -> str:
    """Return what stands in front of every script."""
    return f"local SCHEMA, MOST_SHARDS = {schema}, {MOST_SHARDS}\n{_lua('prelude')}"


def _lua(name: str) -> str:
    return (resources.files("celery_dtimer") / "lua" / f"{name}.lua").read_text("utf-8")


@cache
def scripts(schema: int = SCHEMA) -> Mapping[str, str]:
    """Return every script's name with the SHA-1 that Redis knows it by."""
    sources = {name: script_source(name, schema) for name in _SCRIPTS}
    return {name: hashlib.sha1(text.encode()).hexdigest() for name, text in sources.items()}  # noqa: S324


# ------------------------------------------------------------------ answers


@dataclass(frozen=True, slots=True)
class Registration:
    """The answer to a registration."""

    epoch: int
    now_ms: int
    members: int
    last_epoch: int = 0  #: that the server knew before; 0 when it knows nothing of the service


class Replay(NamedTuple):
    """What a server lacks of what was confirmed: what was sent in that time may be sent again."""

    times: int = 0  #: how often that has happened in this registration
    from_ms: int = 0
    until_ms: int = 0


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The answer to a heartbeat."""

    now_ms: int
    members: int
    next_expiry_ms: (
        int | None
    )  #: when another instance is dead, unless it is heard; 0: timers wait for an owner
    replay: Replay = field(default_factory=Replay)  #: the last one


@dataclass(frozen=True, slots=True)
class Moved:
    """The answer to a script that moves timers; ``busy`` when another instance is moving some."""

    count: int = 0
    more: bool = False
    busy: bool = False
    next_expiry_ms: int | None = None
    reaped: tuple[str, ...] = ()  #: the dead whose last timer has moved,
    silent_ms: tuple[int, ...] = ()  #: and how long each had not been heard by then


@dataclass(frozen=True, slots=True)
class Drained:
    """The answer to a batch of what an instance is to hand over."""

    count: int = 0
    left: int = 0  #: timers that it owns still, and that may move a little later
    is_unknown: bool = False  #: it is not registered
    is_alone: bool = False  #: nobody else could take them: nothing was done


class Repair(NamedTuple):
    """Something that was put right."""

    what: str  #: a timer, or another part of the name of its key
    id: str
    wrong: str  #: what was wrong, and what was done


class Vanished(NamedTuple):
    """A static timer that is not there as it was written."""

    id: str
    code: int  #: of ``vanished.lua``


class Standing(NamedTuple):
    """How many a shard has of what, at a moment."""

    active: int  #: timers that have a next time: triggers, and calls that wait, too
    due: int  #: of them those that are due,
    overdue: int  #: and for longer than was asked for
    most_overdue_ms: int  #: how long the first of them is due
    unassigned: int  #: those that no instance owns
    finished: int  #: timers that have no run left, and are remembered for a time
    dead_letters: int
    runs_out: int  #: runs that workers have, or are to get


#: The codes of ``vanished.lua``.
GONE, UNDEFINED, BROKEN = 1, 2, 3


class DueTimer(NamedTuple):
    """One due timer as it was read, in the text that a commit compares; "" is not there."""

    id: str
    status: str  #: "" when its hash is gone or is something else
    revision: str = ""
    created: str = ""
    due: str = ""
    runs: str = ""
    last_sent: str = ""
    attempts: str = ""
    parent: str = ""
    at: str = ""  #: when it is to be looked at

    @property
    def due_ms(self) -> int:
        """The scheduled moment of its run."""
        return int(self.due)

    @property
    def run_number(self) -> int:
        """The number of its run, counting from 1."""
        return _number(self.runs) + 1

    @property
    def refusals(self) -> int:
        """How often this run was refused by the broker."""
        return _number(self.attempts)

    @property
    def has_waited(self) -> bool:
        """Say whether this run had to wait for the end of another."""
        return self.attempts == _WAITS

    @property
    def is_sent(self) -> bool:
        """Say whether an earlier owner has published this run, and its commit was refused."""
        return self.last_sent != "" and self.last_sent == self.due

    @property
    def is_readable(self) -> bool:
        """Say whether the state is whole."""
        return bool(
            self.status == "active"
            and self.revision
            and _is_whole(self.due)
            and _is_whole(self.created)
        )


class Turn(NamedTuple):
    """What one read of the due timers answers."""

    now_ms: int
    micros: int  #: microseconds since ``now_ms``
    heartbeat_ms: int
    more: bool  #: more timers may be due already
    next_ms: int | None  #: when the first timer behind these is to be looked at
    elsewhere_ms: int | None  #: when the first timer of any other instance is, if that was asked
    timers: list[DueTimer]
    ahead: list[DueTimer]  #: the first of those that come due within a second


class Reading(NamedTuple):
    """How due timers are read."""

    limit: int  #: so many at most; if more are due, a quarter of them are those that came due last
    ahead: int = 0  #: so many more are told that come due within a second
    marks: bool = False  #: note them as in flight: they are published before they are committed
    looks_elsewhere: bool = False  #: say how other instances get on when nothing is due
    skip: int = 0  #: so many are left out, which were read before and are not committed yet

    def __str__(self) -> str:
        """Return it as the scripts take it."""
        limit, ahead, marks, looks, skip = self
        return f"{limit} {ahead} {marks:d} {looks:d} {skip}"


class Layout(NamedTuple):
    """How a service is split into shards."""

    shards: int
    wanted: int  #: how many it is being given; 0 when it stays as it is
    number: int  #: of the layout: every change has a larger one
    seen: tuple[int, ...]  #: what `shards` has been over time

    @property
    def is_moving(self) -> bool:
        """Say whether timers are moved from shard to shard."""
        return self.wanted != 0

    def __str__(self) -> str:
        """Return it as shards are told of it."""
        return " ".join(map(str, (self.shards, self.wanted, self.number, *self.seen)))


#: Where a message goes: a command (``LPUSH``, ``PUBLISH``, ``PEXPIRE``) and its key.
Target = tuple[str, str]


class Message(NamedTuple):
    """A message as the commands that put it into the broker's lists."""

    targets: tuple[Target, ...]
    values: tuple[Any, ...]  #: one for each target
    published: Callable[[], None] | None = None  #: called once it has arrived


class Settlement(NamedTuple):
    """What was done with a due timer, for its commit."""

    timer: DueTimer
    done: str  #: run, skip, dead, refused, waits, lacking, broken, unreadable or missing
    next_due_ms: int | None = None
    skip: Skip | None = None  #: runs that do not happen
    summary: str = ""  #: what is kept of a timer that has no run left, "" for all
    delay_ms: int = 0
    reason: str = ""
    schema: int = 0  #: that an instance has to know which it goes to
    at_ms: int | None = None  #: when it is looked at next; None: when it is due
    message: Message | None = None  #: pushed by the commit; None when it was published before

    @property
    def detail(self) -> str:
        """The text that ``commit.lua`` takes with ``done``."""
        if self.done == "lacking":
            return f"{self.delay_ms} {self.schema}"
        if self.done not in ("run", "skip", "dead"):
            return storable(self.reason) or str(self.delay_ms)
        due_ms, at_ms, skip = self.next_due_ms, self.at_ms, self.skip
        if due_ms is not None and at_ms is None and skip is None:
            return str(due_ms)
        due = "-" if due_ms is None else str(due_ms)
        at = due if at_ms is None else str(at_ms)
        skipped = "- 0 0 0" if skip is None else " ".join(map(str, skip))
        problem = f"\n{storable(self.reason)}" if self.done == "dead" else ""
        return f"{due} {at} {skipped} {self.summary}{problem}"

    def pushing(self, message: Message) -> Settlement:
        """Return it with the message that its commit pushes."""
        return Settlement(*self[:-1], message)


def refused(timer: DueTimer) -> Settlement:
    """Return how a timer is settled whose run was refused: it is tried again later and later."""
    return Settlement(timer, "refused", delay_ms=round(planning.retry_delay(timer.refusals) * 1000))


class OutRun(NamedTuple):
    """A run that is out, as its message tells the worker."""

    task_id: str
    timer_id: str = ""
    scheduled_ms: int = 0
    number: int = 0
    shard: int = 0
    retries: int = 0
    resent: int = 0  #: how often it was lost before, and sent again
    message: str = "?"  #: tells a message of the run from others, without blanks; "-…" for none
    worker: str = ""

    @property
    def is_started(self) -> bool:
        """Say whether a message of it is being run."""
        return not self.message.startswith("-")


def out_run(task_id: str, text: str) -> OutRun | None:
    """Return a run that is out, of what ``running`` says of it; None when that is nonsense."""
    fields = text.split(" ")
    if len(fields) != _OUT_FIELDS or not all(map(_is_whole, fields[1:-1])):
        return None
    timer_id, *numbers, message = fields
    scheduled_ms, number, shard, retries, resent, _ = map(int, numbers)
    return OutRun(task_id, timer_id, scheduled_ms, number, shard, retries, resent, message)


class HeldRun(NamedTuple):
    """A run of a timer that holds its runs, for ``open_runs.lua``."""

    timer_id: str
    scheduled_ms: int
    number: int
    overlap: str
    resent: int
    task_ids: tuple[str, ...]


class Link(NamedTuple):
    """The proof that a server is the broker's: a key in the broker's database and its value."""

    database: int
    key: str
    proof: str
    prefix: str = ""  #: of every key that the broker's clients write, this one too


class Committed(NamedTuple):
    """The answer to a commit."""

    codes: list[int]
    errors: list[str]  #: of the refused pushes, in order
    turn: Turn | None
    is_short: bool = False  #: it has reached fewer replicas than it was to


class Incoming(NamedTuple):
    """A timer that is to be written with its state, as an export has told it."""

    state: TimerState
    blob: str  #: its definition, "" to leave the one that is there
    read: TimerState | None = None  #: as it was read here
    only_ms: int | None = None  #: the only moment that it runs at

    @property
    def arguments(self) -> list[Any]:
        """What ``import.lua`` takes of it."""
        id, only = self.state.id, "-" if self.only_ms is None else self.only_ms
        flat = [part for pair in _hash_of(self.state).items() for part in pair]
        head = f"{id} {only} {int(is_countdown_id(id))}"
        return [head, _told_of(self.read), self.blob, len(flat), *flat]


def _hash_of(state: TimerState) -> dict[str, str | int]:
    """Return a timer's hash, without its owner and what refused messages have left."""
    moments = {
        "due": state.due_ms,
        "at": state.at_ms,
        "last_run": state.last_run_ms,
        "last_sent": state.last_sent_ms,
        "changed": state.changed_ms,
        "armed": state.armed_ms,
    }
    texts = {"reason": storable(state.reason), "source": state.source}
    return {
        "status": state.status,
        "revision": state.revision,
        "created": state.created_ms,
        **({"runs": state.runs} if state.runs else {}),
        **{name: moment for name, moment in moments.items() if moment is not None},
        **{name: text for name, text in texts.items() if text},
        **{f"{_SKIPPED}{reason}": count for reason, count in state.skips.items()},
    }


def _told_of(state: TimerState | None) -> str:
    if state is None:
        return ""
    moments = (state.created_ms, state.due_ms, state.last_run_ms, state.last_sent_ms)
    texts = ("-" if each is None else str(each) for each in moments)
    return " ".join((state.revision, state.status, *texts))


#: The codes of ``import.lua``.
WRITTEN, PUBLISHING, HAS_BEEN = 1, 2, 3


class Cancelled(NamedTuple):
    """What became of a durable countdown that was to be cancelled."""

    code: int  #: of ``cancel.lua``
    blob: str  #: its definition, "" when there was none


#: The code of ``run_started.lua`` for a run that was revoked for a later one.
REVOKED = 2
#: The code of ``cancel.lua`` for what is out, or may be.
IN_FLIGHT = 2


class LayoutChangedError(StoreError):
    """The service has been given other shards than the caller goes by: nothing was written."""


class UnlinkedError(StoreError):
    """The server that holds the timers is not the broker's: nothing was written."""


#: The codes of ``commit.lua``.
COMMITTED = 1
COMMIT_REFUSALS = {
    0: "owned by another instance",
    -2: "changed meanwhile",
    -3: "deleted",
    -4: "not active",
    -5: "its message was refused",
    -6: "not due yet",
}
PUSH_REFUSED = -5


# ------------------------------------------------------------------ the store


class Store:
    """The timers of one service; every method is one transition or one read.

    Raises (every method):
        StoreUnavailableError: Redis could not be reached, or did not answer within the time limit.
        StoreError: Redis answered with an error.
        SchemaError: (methods that write) what is stored is of a newer version.
        FencedError: (methods that take an epoch) the instance is not registered with it any more.
    """

    schema = SCHEMA  #: the newest that it reads

    def __init__(
        self,
        settings: Settings,
        *,
        timeout: float | None = None,
        clock: Callable[[], int] | None = None,
        shard: str = "",
        layout: int | None = None,
        on_call: Callable[[str, float], None] = lambda script, seconds: None,
    ) -> None:
        """Prepare a store; nothing is contacted until it is used.

        Args:
            settings: the service, and where its Redis is.
            timeout: seconds that a call may take; by default a third of the instance timeout.
            clock: answers the time in ms in place of the server's clock, for tests.
            shard: which one of the service's it is, "" for the only one.
            layout: the number of the service's layout by which it is that one; None not to check.
            on_call: is told of each call of a script: its name, and the seconds until its answer
                was read, or did not come.
        """
        self.settings = settings
        self.keys = Keys(settings.service, settings.key_prefix, shard)
        self.layout = layout
        self._secrets = secrets_in(settings.redis_url, dict(settings.redis_options))
        self._timeout = timeout or settings.call_timeout
        self._clock = clock
        self._on_call = on_call
        self._client: Any = None
        self._lock = threading.Lock()
        self._is_short = False  # the last commit had too few replicas
        self._declared_keys = [self.keys("meta"), self.keys("never")]
        self._kept = f"{round(settings.keep_finished * 1000)} {settings.history}"
        most = "-" if settings.max_timers is None else settings.max_timers
        self._kept_by_upsert = f"{self._kept} {most}"
        self._kept_by_commit = f"{self._kept} {settings.track_runs:d}"

    # -- connection

    @property
    def client(self) -> Any:  # redis-py types its answers for its sync and async clients at once
        """The Redis client, connected on first use; whoever uses its parts holds on to it."""
        with self._lock:
            if self._client is None:
                self._client = connections.connect(self.settings, self._timeout, self.keys("meta"))
            return self._client

    def close(self) -> None:
        """Drop all connections; the next use opens a new one."""
        with self._lock:
            client, self._client = self._client, None
        if client is not None:
            with contextlib.suppress(RedisError, OSError):
                client.drop()

    def _reconnect(self) -> None:
        """Let the next call look the server up anew; other threads finish what they do."""
        if urls.is_embedded(self.settings.redis_url):
            with self._lock:
                self._client = None  # its server may have to be started
        elif self._client is not None:
            with contextlib.suppress(RedisError, OSError):
                self._client.look_up_anew()

    def _call(self, name: str, *arguments: Any) -> Any:
        return self._begin(name, *arguments)()

    def _begin(
        self, name: str, *arguments: Any, hear: Callable[[Any], None] | None = None
    ) -> Callable[[], Any]:
        """Send the call of a script; return what waits for its answer.

        With ``hear``, which is told the answer, replicas are waited for behind the script.
        """
        call = 2, *self._arguments(name, arguments)
        waiting = [] if hear is None else [self._wait_for_replicas()]
        started = time.monotonic()
        answers = self._send(("EVALSHA", scripts(self.schema)[name], *call), *waiting)

        def finish() -> Any:
            try:
                with self._errors():
                    found = answers()
                    if isinstance(found[0], NoScriptError):
                        source = script_source(name, self.schema)
                        found = self._send(("EVAL", source, *call), *waiting)()
                    value = _unless_error(found[0])
            finally:
                self._on_call(name, time.monotonic() - started)
            if hear is not None:
                hear(found[1])
            if value == _FENCED:  # a master that was replaced says so too
                self._reconnect()
            return _checked(name, value)

        return finish

    def _send(self, *commands: tuple[Any, ...]) -> Callable[[], list[Any]]:
        """Send commands; return what waits for their answers, which may be redis-py's errors."""
        with self._errors():
            answers: Callable[[], list[Any]]
            try:
                answers = self.client.begin(*commands)
            except UnicodeEncodeError:  # nothing was sent yet; few texts have surrogates
                answers = self.client.begin(*(map(_sendable, each) for each in commands))
        return answers

    def _wait_for_replicas(self) -> tuple[Any, ...]:
        """Return the command that waits for replicas: hardly, while too few are there."""
        longest_ms = round(self.settings.replicas_timeout * 1000)
        return "WAIT", self.settings.wait_replicas, _WAIT_SHORT_MS if self._is_short else longest_ms

    def _hear_replicas(self, answer: Any) -> None:
        """Note whether the last commit has reached its replicas; an error is no number of them."""
        self._is_short = not isinstance(answer, int) or answer < self.settings.wait_replicas

    def _arguments(self, name: str, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        now = "" if self._clock is None else str(self._clock())
        if self.layout is not None and name in _PLACED:
            now = f"{now}@{self.layout}"
        return (*self._declared_keys, now, *arguments)

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except (RedisConnectionError, RedisTimeoutError, OSError) as exc:
            self._reconnect()
            raise StoreUnavailableError(
                f"Redis at {self.settings.masked_url} does not answer: {self._told(exc)}"
            ) from exc
        except RedisError as exc:
            self._raise(exc)

    def _raise(self, exc: RedisError) -> NoReturn:
        is_elsewhere = connections.is_redirection(exc)  # of a cluster: its slot is on its way
        if is_passing(exc) or (is_elsewhere and self.settings.is_cluster):
            self._reconnect()  # the name may lead to another server by now
            raise StoreUnavailableError(
                f"Redis at {self.settings.masked_url} can not serve now: {self._told(exc)}"
            ) from exc
        if is_elsewhere:
            raise StoreError(
                f"Redis at {self.settings.masked_url} is a node of a cluster, and another one has "
                "this service: its URL begins with redis+cluster:// or rediss+cluster://"
            ) from exc
        newer = _NEWER_SCHEMA.search(str(exc))
        if newer is not None:
            raise SchemaError(
                f"service {self.settings.service} at {self.settings.masked_url} is kept in schema "
                f"{newer[1]}, and celery_dtimer {__version__} knows schemas up to {self.schema}: "
                "use a version as new as the newest that has written it"
            ) from exc
        if _WRONG_TYPE.search(str(exc)):
            raise DamagedError(
                f"Redis at {self.settings.masked_url} refused, since a key of service "
                f"{self.settings.service} was edited into something of another type; a beat that "
                f"runs repairs it: {exc}"
            ) from exc
        raise StoreError(f"Redis at {self.settings.masked_url} refused: {self._told(exc)}") from exc

    def _told(self, exc: Exception) -> str:
        """Return what an error of redis-py's says, without the passwords that it may repeat."""
        return masked(connections.described(exc), self._secrets)

    # -- membership

    def register(
        self, instance: str, fields: Mapping[str, str | int], *, former: int = 0
    ) -> Registration:
        """Register an instance and return its epoch; ``fields`` go to its hash.

        The epoch that it has had before, if any, tells whether the server has lost that.
        """
        settings = self.settings
        timings = (
            round(settings.heartbeat_interval * 1000),
            round(settings.instance_timeout * 1000),
        )
        flat = [value for pair in fields.items() for value in pair]
        known = (former or "", settings.history)
        answer = self._call("register", instance, *timings, *known, *flat)
        epoch, now_ms, members, last_epoch = answer
        return Registration(int(epoch), now_ms, members, int(last_epoch))

    def heartbeat(
        self,
        instance: str,
        epoch: int,
        *,
        heartbeat_ms: int | None = None,
        sequence: int | None = None,
    ) -> Heartbeat:
        """Renew an instance's lease.

        Args:
            instance: whose.
            epoch: of its registration.
            heartbeat_ms: of the last heartbeat that the server has confirmed,
            sequence: and the number of the last commit: does it still know them?
        """
        confirmed = ("" if known is None else known for known in (heartbeat_ms, sequence))
        answer = self._call("heartbeat", instance, epoch, *confirmed, self.settings.history)
        now_ms, members, expiry, *replay = answer
        return Heartbeat(now_ms, members, _expiry(expiry), Replay(*replay))

    def leave(self, instance: str, epoch: int, limit: int = _HANDED) -> Moved:
        """Hand over a batch of the instance's timers; the registration goes with the last."""
        moved, more = self._call("leave", instance, epoch, limit)
        return Moved(moved, bool(more))

    def reap(self, instance: str, epoch: int, limit: int = _HANDED) -> Moved:
        """Move a batch of the timers of dead instances, and of nobody, to the live ones."""
        answer = self._call("reap", instance, epoch, limit)
        if answer == _BUSY:
            return Moved(busy=True)
        moved, more, expiry, *reaped = answer
        ids, silent_ms = tuple(reaped[::2]), tuple(reaped[1::2])
        return Moved(moved, bool(more), False, _expiry(expiry), ids, silent_ms)

    def rebalance(self, instance: str, epoch: int, drift: int = 0, limit: int = BATCH) -> Moved:
        """Move a batch of timers to instances with less; ``drift`` percent are left alone."""
        lag_ms = round(self.settings.lag_limit * 1000)
        answer = self._call("rebalance", instance, epoch, drift, limit, lag_ms)
        return Moved(busy=True) if answer == _BUSY else Moved(answer[0], bool(answer[1]))

    def report(self, instance: str, epoch: int, fields: Mapping[str, str]) -> None:
        """Write fields of the instance's hash: what it says of its dispatch and its broker."""
        flat = [value for pair in fields.items() for value in pair]
        self._call("report", instance, epoch, *flat)

    def give_up(self, instance: str, epoch: int, limit: int = _HANDED) -> Moved:
        """Hand over a batch of the instance's timers to those whose broker works, if there are."""
        answer = self._call("give_up", instance, epoch, limit)
        return Moved(busy=True) if answer == _BUSY else Moved(answer[0], bool(answer[1]))

    def steal(self, instance: str, epoch: int, lag_ms: int, limit: int = BATCH) -> Moved:
        """Take a batch of the timers of an instance that lags by more than ``lag_ms``."""
        answer = self._call("steal", instance, epoch, lag_ms, limit)
        return Moved(busy=True) if answer == _BUSY else Moved(answer[0], bool(answer[1]))

    def drain(self, instance: str, limit: int = _HANDED) -> Drained:
        """Hand over a batch of an instance's timers, which from then on is given no more."""
        answer = self._call("drain", instance, limit)
        if answer == _BUSY:
            return Drained(left=1)
        if answer == _NO_TAKER:
            return Drained(is_alone=True)
        return Drained(*answer) if answer else Drained(is_unknown=True)

    def undrain(self, instance: str) -> int:
        """Let a drained instance be given timers again; return the code of ``undrain.lua``."""
        return int(self._call("undrain", instance))

    def declare(
        self, instance: str, epoch: int, source: str, digest: str, ids: Sequence[str]
    ) -> bool:
        """Say which static timers the code declares; return whether this declaration counts."""
        source = encode_name(source)
        for batch in _chunks(ids, 1000):
            self._call("declare", instance, epoch, source, digest, 0, *batch)
        return bool(self._call("declare", instance, epoch, source, digest, 1))

    def undeclare(self, instance: str, epoch: int, source: str, ids: Sequence[str]) -> list[str]:
        """Delete the static timers that no live instance of the source declares; return the ids."""
        answer = self._call("undeclare", instance, epoch, encode_name(source), *ids)
        return list(answer)

    def static_timers(self, source: str) -> set[str]:
        """Return the ids of a source's static timers."""
        with self._errors():
            members: set[str] = self.client.smembers(
                self.keys("static_timers", encode_name(source))
            )
        return members

    def timezone_of(self, source: str) -> str | None:
        """Return by which time zone a source's timers go that name none; None if never noted."""
        with self._errors():
            found: str | None = self.client.hget(
                self.keys("meta"), f"timezone:{encode_name(source)}"
            )
        return found

    def note_timezone(self, instance: str, epoch: int, source: str, timezone: str) -> None:
        """Note by which time zone a source's timers go that name none."""
        self._call("rezoned", instance, epoch, encode_name(source), timezone)

    def purge(self, limit: int = BATCH) -> int:
        """Remove one-shots that ran long enough ago; return how many."""
        return int(self._call("purge", limit))

    def mend(self) -> list[tuple[str, str, str]]:
        """Remove keys of a wrong type; return what each was, its id or "", and its type."""
        return _threes(self._call("mend"))

    def scrub(
        self,
        instance: str,
        epoch: int,
        position: str = "",
        limit: int = _SCRUBBED,
        keys: Sequence[tuple[str, str]] = (),
    ) -> tuple[str, list[Repair]]:
        """Put timers right; return where to go on, "" at the end, and what was repaired.

        Args:
            instance: whoever does it,
            epoch: of its registration.
            position: where to go on, "" at the beginning.
            limit: so many timers of the lists are looked at.
            keys: what `keys_from` has come upon, which is looked at too.
        """
        keep_ms = round(self.settings.keep_finished * 1000)
        flat = [part for pair in keys for part in pair]
        following, *found = self._call("scrub", instance, epoch, position, limit, keep_ms, *flat)
        return following, [Repair(*each) for each in _threes(found)]

    def scrub_runs(
        self, instance: str, epoch: int, position: str = "0", limit: int = _SCRUBBED
    ) -> tuple[str, list[Repair]]:
        """Put runs that are out right; return where to go on, "0" at the end, and the repairs."""
        lease_ms = round(self.settings.run_lease * 1000)
        following, *found = self._call("scrub_runs", instance, epoch, position, limit, lease_ms)
        pairs = zip(found[::2], found[1::2], strict=True)
        return following, [Repair("running", id, wrong) for id, wrong in pairs]

    def keys_from(self, cursor: int, limit: int = _SCANNED) -> tuple[int, list[tuple[str, str]]]:
        """Pass some keys of the server; return where to go on, 0 at the end, and what was found.

        That is, of the service's keys, what they are and the id in them. Of a cluster, whose nodes
        have keys of their own, nothing is told.
        """
        pattern = re.compile(f"{re.escape(self.settings.key_prefix)}([a-z_]+):{self._tag}:(.+)")
        with self._errors():
            found = self.client.scan(cursor, match=self._glob, count=limit)
        following, names = found
        if isinstance(following, dict):
            return 0, []
        matches = map(pattern.fullmatch, names)
        return int(following), [(match[1], match[2]) for match in matches if match]

    @property
    def _tag(self) -> str:
        return re.escape(f"{{{self.keys.tag}}}")

    @property
    def _glob(self) -> str:
        """The pattern of the service's keys that have an id, as SCAN takes it."""
        return f"{_literally(self.settings.key_prefix)}*:{{{_literally(self.keys.tag)}}}:*"

    def tags(self) -> Iterator[str]:
        """Yield what is in braces in the keys of all services that this one's prefix has.

        On a cluster all of its masters are asked.

        Raises:
            StoreError: the server's user may not use SCAN.
        """
        prefix = self.settings.key_prefix
        pattern = re.compile(f"{re.escape(prefix)}meta:{{([^{{}}]+)}}", re.DOTALL)
        seen: set[str] = set()
        with self._errors():
            try:
                for key in self.client.hashes_like(f"{_literally(prefix)}meta:{{*}}", _PAGE):
                    found = pattern.fullmatch(key)
                    if found and found[1] not in seen:
                        seen.add(found[1])
                        yield found[1]
            except NoPermissionError as exc:
                raise StoreError(
                    f"services are found by SCAN, which the user of Redis at "
                    f"{self.settings.masked_url} may not use: {self._told(exc)}"
                ) from exc

    def vanished(
        self, instance: str, epoch: int, timers: Iterable[tuple[str, str, int | None]]
    ) -> list[Vanished]:
        """Return those of some static timers that are not there as they were written.

        Args:
            instance: whoever asks,
            epoch: of its registration.
            timers: id, revision, and length of the definition; None for one that can not be read.
        """
        flat = [part for id, revision, size in timers for part in (id, revision, _text(size))]
        found = self._call("vanished", instance, epoch, *flat)
        return [Vanished(id, code) for id, code in zip(found[::2], found[1::2], strict=True)]

    def restore(self, instance: str, epoch: int, definitions: Sequence[Definition]) -> int:
        """Write definitions of timers again that are of their revision; return how many."""
        restored = 0
        for batch in _sized_chunks(definitions, _size_of, _BATCH_BYTES, _UPSERTS):
            flat = [part for each in batch for part in (each.id, each.revision, each.blob)]
            restored += sum(self._call("restore", instance, epoch, *flat))
        return restored

    def instances(self) -> list[Instance]:
        """Return the registered instances, oldest first."""
        with self._errors():
            scored = self.client.zrange(self.keys("service_instances"), 0, -1, withscores=True)
            client = self.client
            pipe = client.pipeline(transaction=False)
            for instance, _ in scored:
                pipe.hgetall(self.keys("instance", instance))
                pipe.zcard(self.keys("instance_timers", instance))
            answers = _readable(pipe.execute(raise_on_error=False))
        rows = zip(scored, answers[::2], answers[1::2], strict=True)
        found = [
            _instance(hash_, owned) for _, hash_, owned in rows if isinstance(hash_, dict) and hash_
        ]
        return sorted(found, key=lambda instance: (instance.started_at, instance.id))

    def information(self, *sections: str) -> dict[str, Any]:
        """Return what the server says of itself, {} when it does not."""
        return self._known_of_server(lambda pipe: [pipe.info(section) for section in sections])

    def inactive_count(self) -> int:
        """Return how many timers there are that are paused, stopped or broken."""
        with self._errors():
            return int(self.client.zcard(self.keys("inactive_timers")))

    def stored_schema(self) -> int:
        """Return the schema of what is stored, 0 when none was noted yet."""
        with self._errors():
            found = self.client.hget(self.keys("meta"), "schema")
        return _number(found or "")

    def standing(self, overdue_ms: int) -> Standing:
        """Return how many there are of what, without a look at any of them.

        Args:
            overdue_ms: how long a timer is due that counts as overdue.
        """
        now_ms, key = self.now_ms(), self.keys
        queue = key("timer_queue")
        with self._errors():
            pipe = self.client.pipeline(transaction=False)
            pipe.zrange(queue, 0, 0, withscores=True)
            pipe.zcard(queue)
            pipe.zcount(queue, "-inf", now_ms)
            pipe.zcount(queue, "-inf", f"({now_ms - overdue_ms}")
            pipe.zcard(key("instance_timers", UNASSIGNED))
            pipe.zcount(key("inactive_timers"), "-inf", "(+inf")
            pipe.zcard(key("dead_timers"))
            pipe.zcard(key("run_leases"))
            first, *answers = _readable(pipe.execute(raise_on_error=False))
        active, due, overdue, *others = (each if isinstance(each, int) else 0 for each in answers)
        first_ms = _moment_of(first[0][1]) if isinstance(first, list) and first else now_ms
        return Standing(active, due, overdue, max(0, now_ms - first_ms), *others)

    def set_aside(self, offset: int, limit: int) -> tuple[int, list[str]]:
        """Return the statuses of some timers that are paused, stopped or broken.

        Args:
            offset: so many are passed,
            limit: and so many are looked at.

        Returns:
            how many there were, and the statuses of those that are timers.
        """
        key = self.keys("inactive_timers")
        with self._errors():
            rows = self.client.zrevrange(key, offset, offset + limit - 1, withscores=True)
            ids = [id for id, score in rows if score == float("inf")]
            pipe = self.client.pipeline(transaction=False)
            for id in ids:
                pipe.hget(self.keys("timer", id), "status")
            answers = _readable(pipe.execute(raise_on_error=False)) if ids else []
        return len(ids), [each for each in answers if isinstance(each, str)]

    def dead_count(self) -> int:
        """Return how many dead letters there are."""
        with self._errors():
            return int(self.client.zcard(self.keys("dead_timers")))

    def configuration(self, names: Iterable[str]) -> dict[str, str]:
        """Return parameters of the server's configuration, without those that it does not tell."""
        found = self._known_of_server(lambda pipe: [pipe.config_get(name) for name in names])
        return {str(name): str(value) for name, value in found.items()}

    def _known_of_server(self, ask: Callable[[Any], object]) -> dict[str, Any]:
        """Return what the server answers to what is asked on a pipeline; refusals are left out."""
        found: dict[str, Any] = {}
        with self._errors():
            pipe = self.client.pipeline(transaction=False)
            ask(pipe)
            for answer in pipe.execute(raise_on_error=False):
                if isinstance(answer, RedisError) and is_passing(answer):
                    raise answer
                if isinstance(answer, dict):
                    found |= answer
        return found

    # -- firing

    def due(self, instance: str, epoch: int, reading: Reading) -> Turn:
        """Read the instance's due timers, soonest first."""
        return _turn(self._call("due", instance, epoch, str(reading)))

    def commit(self, *args: Any, **kwargs: Any) -> Committed:
        """Settle a batch of due timers, as `begin_commit` does, and wait for the answer."""
        return self.begin_commit(*args, **kwargs)()

    def begin_commit(
        self,
        instance: str,
        epoch: int,
        sequence: int,
        settlements: Sequence[Settlement],
        *,
        reading: Reading | None = None,
        link: Link | None = None,
    ) -> Callable[[], Committed]:
        """Send what settles a batch of due timers and reads the next.

        Args:
            instance: whose timers.
            epoch: of its registration.
            sequence: 1, 2, … in each epoch; the same number again returns the first answer and
                changes nothing.
            settlements: what was done; those with a message are pushed by this call.
            reading: how due timers are read afterwards; not at all without one.
            link: proves that this server is the broker's; without it nothing is pushed.

        Returns:
            what waits for the answer, with one code for each settlement. It raises
            `UnlinkedError` when the link does not hold.
        """
        numbers: dict[Target, int] = {}
        entries: list[Any] = []
        for settlement in settlements:
            timer, message = settlement.timer, settlement.message
            read = f"{timer.created} {timer.revision} {timer.due}"
            entries += (timer.id, read, settlement.done, settlement.detail)
            if message is None:
                entries.append("")
            else:
                to = [numbers.setdefault(each, len(numbers) + 1) for each in message.targets]
                entries.append(" ".join(map(str, to)))
                entries += message.values
        prefix = link.prefix if link else ""
        targets = [part for command, key in numbers for part in (command, prefix + key)]
        answer = self._begin(
            *("commit", instance, epoch, sequence, self._kept_by_commit),
            *(str(reading or ""), *self._proof(link), len(numbers), *targets, *entries),
            hear=self._hear_replicas if self.settings.wait_replicas else None,
        )
        return lambda: _committed(answer())._replace(is_short=self._is_short)

    def _proof(self, link: Link | None) -> tuple[Any, ...]:
        """Return the arguments of a script that pushes: the timers' database, and the link."""
        own = self.client.database
        if link is None:
            return own, "", "", ""
        return own, link.database, link.prefix + link.key, link.proof

    def is_linked(self, link: Link) -> bool:
        """Say whether the server that holds the timers is the one that a link was written to."""
        return bool(self._call("linked", *self._proof(link)))

    def definitions(self, ids: Sequence[str]) -> list[str | None]:
        """Return the stored definition of each id; None for one that is not there."""
        return [blob for batch in _chunks(ids, BATCH) for blob in self.begin_definitions(batch)()]

    def begin_definitions(self, ids: Sequence[str]) -> Callable[[], list[str | None]]:
        """Ask for the definitions of some ids; return what waits for them."""
        answers = self._send(("MGET", *(self.keys("timer_definition", id) for id in ids)))

        def finish() -> list[str | None]:
            with self._errors():
                found: list[str | None] = _unless_error(answers()[0])
            return found

        return finish

    def traceparents(self, ids: Sequence[str]) -> list[str]:
        """Return in which spans timers were created or triggered; "" for those in none."""
        answers = self._send(*(("HGET", self.keys("timer", id), "trace") for id in ids))
        with self._errors():
            return [_unless_error(answer) or "" for answer in answers()]

    def coming(
        self, instance: str, from_ms: int, until_ms: int, skip: int, limit: int
    ) -> tuple[int, list[tuple[str, int]]]:
        """Return ids of an instance's timers that come due in a time, with their moments.

        Args:
            instance: owns them.
            from_ms: the first moment.
            until_ms: the last moment.
            skip: so many of the first are left out.
            limit: how many to return at most.

        Returns:
            how many of its timers come due before that time, and those of it.
        """
        own = self.keys("instance_timers", instance)
        with self._errors():
            pipe = self.client.pipeline(transaction=False)
            pipe.zcount(own, "-inf", f"({from_ms}")
            pipe.zrangebyscore(own, from_ms, until_ms, skip, limit, withscores=True)
            before, found = pipe.execute()
        return before, [(id, _moment_of(at)) for id, at in found]

    # -- timers

    def now_ms(self) -> int:
        """Return the server's time."""
        if self._clock is not None:
            return self._clock()
        with self._errors():
            return _time_ms(self.client.time())

    def save(
        self,
        definitions: Sequence[Definition],
        *,
        source: str = "",
        last_runs_ms: Mapping[str, int] | None = None,
        on_batch: Callable[[], None] = lambda: None,
    ) -> int:
        """Create the timers, or update those that differ; return how many changed.

        A definition that is stored already changes nothing. Writing the same again is safe.

        Args:
            definitions: of different names.
            source: where static timers are declared.
            last_runs_ms: when a timer that is new here ran last, by name.
            on_batch: called after each batch.

        Raises:
            ConflictError: others kept changing one of the timers.
            TooManyTimersError: there would be more than is allowed. What is written with one call,
                up to 64 timers, is written as a whole or not at all; other calls may have been.
        """
        static_source = encode_name(source)
        last_runs_ms = last_runs_ms or {}

        def arm(
            definition: Definition, state: TimerState | None, now_ms: int
        ) -> planning.Arming | None:
            return planning.arm(
                definition,
                state,
                now_ms,
                last_run_ms=last_runs_ms.get(definition.name),
                adopt=bool(source and state and state.source != static_source),
            )

        changed = 0
        writing: deque[Callable[[], int]] = deque()

        def finish_first() -> int:
            written = writing.popleft()()
            on_batch()
            return written

        try:
            for batch in _sized_chunks(definitions, _size_of, _BATCH_BYTES, _UPSERTS):
                asks = bool(last_runs_ms) or any(map(planning.needs_time, batch))
                now_ms = self.now_ms() if asks else 0
                writing.append(self._begin_write(batch, arm, static_source, now_ms))
                if len(writing) > 1:  # the server works on one batch while the next is made
                    changed += finish_first()
        finally:
            while writing:
                changed += finish_first()
        return changed

    def save_broken(self, entries: Mapping[str, tuple[str, str]], *, source: str) -> None:
        """List entries that could not be read: name to what is known of it and the reason."""
        unread = [_BrokenEntry(name, *entry) for name, entry in entries.items()]
        for batch in _chunks(unread, _UPSERTS):
            self._begin_write(batch, _BrokenEntry.arm, encode_name(source))()

    def hold(
        self, definition: Definition, *, due_ms: int | None = None, delay_ms: int | None = None
    ) -> None:
        """Keep a durable countdown until it is due; it replaces one of the same task id.

        Args:
            definition: with its message.
            due_ms: when it is due,
            delay_ms: or how long from now, by the server's clock.
        """
        due = f"+{delay_ms}" if due_ms is None else due_ms
        self._call("hold", definition.id, definition.revision, due, definition.blob)

    def cancel(self, ids: Sequence[str]) -> list[Cancelled]:
        """Remove durable countdowns; return what became of each."""
        found: list[Cancelled] = []
        for batch in _chunks(ids, BATCH):
            answer = self._call("cancel", *batch)
            pairs = zip(answer[::2], answer[1::2], strict=True)
            found += [Cancelled(int(code), blob) for code, blob in pairs]
        return found

    def queued(
        self, from_ms: int | None = None, until_ms: int | None = None
    ) -> Iterator[list[tuple[str, int]]]:
        """Yield active timers by when they are looked at, with that moment, a page at a time.

        Args:
            from_ms: the first moment.
            until_ms: the last moment.
        """
        start, skip = "-inf" if from_ms is None else str(from_ms), 0
        end = "+inf" if until_ms is None else str(until_ms)
        while True:
            with self._errors():
                page = self.client.zrangebyscore(
                    self.keys("timer_queue"), start, end, skip, _PAGE, withscores=True
                )
            yield [(id, _moment_of(at)) for id, at in page]
            if len(page) < _PAGE:
                return
            last = repr(page[-1][1])  # as it is: it may have been edited by hand
            there = sum(at == page[-1][1] for _, at in page)
            start, skip = last, there + (skip if last == start else 0)

    def replace(
        self, state: TimerState, old: Definition, definition: Definition, *, wakes: bool = True
    ) -> bool:
        """Give a timer another definition; return False when it is not in this state any more.

        Args:
            state: as it was read.
            old: the definition that it has had.
            definition: the new one.
            wakes: a stopped or broken timer may become active.
        """
        now_ms = self.now_ms()
        arming = planning.arm(definition, state, now_ms, wakes=wakes)
        if arming is None:
            return True
        kept = definition if arming.keeps_due else None
        arming = planning.giving_up(arming, planning.given_up(old, state, now_ms, kept), old)
        return not self._begin_upsert([(definition, state, arming)], state.source)()[1]

    def _begin_write(
        self,
        batch: Sequence[_Stored],
        arm: Callable[[_Stored, TimerState | None, int], planning.Arming | None],
        source: str,
        now_ms: int = 0,
    ) -> Callable[[], int]:
        """Send a batch as ``arm`` says; return what waits for it, and says how many were written.

        Each is tried as new first: most are, and the answer tells what is stored of the others.
        """

        def armed(
            read: Iterable[tuple[_Stored, TimerState | None]], at_ms: int
        ) -> list[tuple[_Stored, TimerState | None, planning.Arming]]:
            return [
                (each, state, arming)
                for each, state in read
                if (arming := arm(each, state, at_ms)) is not None
            ]

        rows = armed(((each, None) for each in batch), now_ms)
        answer = self._begin_upsert(rows, source)

        def finish() -> int:
            at_ms, refused = answer()
            written, changed = rows, len(rows) - len(refused)
            tries = attempts(batch[0].name)
            while refused:
                next(tries)
                read = [(written[place][0], state) for place, state in refused.items()]
                written = self._with_skips(armed(read, at_ms), at_ms)
                if not written:
                    break
                at_ms, refused = self._begin_upsert(written, source)()
                changed += len(written) - len(refused)
            return changed

        return finish

    def _with_skips(
        self, rows: list[tuple[_Stored, TimerState | None, planning.Arming]], now_ms: int
    ) -> list[tuple[_Stored, TimerState | None, planning.Arming]]:
        """Return rows with the runs that are given up for what is new: the old ones tell."""
        overdue = {
            state.id: (state, each if arming.keeps_due and isinstance(each, Definition) else None)
            for each, state, arming in rows
            if state is not None and (state.due_ms or now_ms) < now_ms
        }
        olds: dict[str, Definition] = {}
        for id, blob in zip(overdue, self.definitions(list(overdue)), strict=True):
            with contextlib.suppress(InvalidTimerError):  # then nobody knows which they were
                if blob is not None:
                    olds[id] = decode_definition(blob)

        def giving_up(id: str, arming: planning.Arming) -> planning.Arming:
            if id not in olds:
                return arming
            state, kept = overdue[id]
            skip = planning.given_up(olds[id], state, now_ms, kept)
            return planning.giving_up(arming, skip, olds[id])

        return [(each, state, giving_up(each.id, arming)) for each, state, arming in rows]

    def _begin_upsert(
        self, rows: Sequence[_Row], source: str
    ) -> Callable[[], tuple[int, dict[int, TimerState | None]]]:
        """Send rows; return what waits for the answer.

        That is the server's time, and the state of each timer that is not as it was read.
        """
        arguments = [text for row in rows for text in _upsert_arguments(*row)]
        kept = f"{self._kept_by_upsert} {tracing.current()}"
        answer = self._begin("upsert", source, kept, *arguments)

        def finish() -> tuple[int, dict[int, TimerState | None]]:
            found = answer()
            if found == _FULL:
                raise self._full()
            now_ms, *refused = found
            hashes = zip(refused[::2], refused[1::2], strict=True)
            return now_ms, {
                place: _state(rows[place][0].id, _pairs(flat)) for place, flat in hashes
            }

        return finish

    def states(self, ids: Sequence[str]) -> tuple[int, list[TimerState | None]]:
        """Return the server's time and each timer's state; None for one that is not there."""
        if not ids:
            return self.now_ms(), []
        rows: list[object] = []
        for batch in _chunks(ids, 1000):
            with self._errors():
                client = self.client
                pipe = client.pipeline(transaction=False)
                for id in batch:
                    pipe.hgetall(self.keys("timer", id))
                pipe.time()
                *found, time_read = _readable(pipe.execute(raise_on_error=False))
                rows += found
        now_ms = self._clock() if self._clock is not None else _time_ms(time_read)
        return now_ms, [_state(id, row) for id, row in zip(ids, rows, strict=True)]

    def timers(self, ids: Sequence[str]) -> list[Timer]:
        """Return those of the timers that are there."""
        found: list[Timer] = []
        for batch in _chunks(ids, BATCH):
            _, states = self.states(batch)
            there = [state for state in states if state is not None and not state.parent]
            blobs = self.definitions([state.id for state in there])
            found += [
                Timer.from_stored(state, blob) for state, blob in zip(there, blobs, strict=True)
            ]
        return found

    def timer_ids(self, limit: int | None = None) -> list[str]:
        """Return every timer's id, triggers included: active ones by time, then the others.

        Args:
            limit: how many to return at most, few enough for one command; None for all.
        """
        active = self._ids_by_score("timer_queue", limit=limit)
        left = None if limit is None else limit - len(active)
        return [*active, *self._ids_by_score("inactive_timers", limit=left)]

    def owned_ids(self, instance: str, limit: int | None = None) -> list[str]:
        """Return the ids of the timers that an instance owns, by their next time."""
        return self._ids_by_score("instance_timers", instance, limit)

    def scores(self, what: str, id: str | None = None) -> dict[str, float]:
        """Return a sorted set's scores; what is there all along is not missed, however it moves."""
        with self._errors():
            return dict(self.client.zscan_iter(self.keys(what, id), count=1000))

    def by_score(
        self, what: str, id: str | None = None, limit: int | None = None
    ) -> list[tuple[str, float]]:
        """Return the members of a sorted set with their scores, in the order of these.

        Args:
            what: the name of the set,
            id: and of what it is.
            limit: how many to return at most, few enough for one command; None for all.
        """
        if limit is not None:
            with self._errors():
                key = self.keys(what, id)
                return list(self.client.zrange(key, 0, limit - 1, withscores=True)) if limit else []
        return sorted(self.scores(what, id).items(), key=lambda row: (row[1], row[0]))

    def _ids_by_score(
        self, what: str, id: str | None = None, limit: int | None = None
    ) -> list[str]:
        return [member for member, _ in self.by_score(what, id, limit)]

    def pending_count(self, instance: str | None = None) -> int:
        """Return how many active timers the service, or one instance, has."""
        key = (
            self.keys("timer_queue") if instance is None else self.keys("instance_timers", instance)
        )
        with self._errors():
            return int(self.client.zcard(key))

    def delete(self, ids: Sequence[str]) -> list[bool]:
        """Delete timers; return for each whether it was there."""
        return [
            bool(code) for batch in _chunks(ids, BATCH) for code in self._call("delete", *batch)
        ]

    def pause(self, id: str) -> int:
        """Pause a timer; return the code of ``pause.lua``."""
        return int(self._call("pause", id))

    def stop(self, id: str) -> int:
        """Stop a timer; return the code of ``stop.lua``."""
        return int(self._call("stop", id))

    def resume(self, state: TimerState, plan: Plan) -> int:
        """Go on with a timer as planned for its state; return the code of ``resume.lua``."""
        due_ms, at_ms = plan.next_due_ms, plan.at_ms
        assert due_ms is not None  # noqa: S101 - else there is nothing to go on with
        passed = (0, 0, 0) if plan.skip is None else plan.skip[1:]
        return int(
            self._call(
                *("resume", state.id, state.revision, state.status),
                *(due_ms, due_ms if at_ms is None else at_ms, *passed, self.settings.history),
            )
        )

    def trigger(self, id: str, trigger_id: str) -> int:
        """Run a timer now; return the code of ``trigger.lua``."""
        return int(self._call("trigger", id, trigger_id, tracing.current()))

    # -- runs

    @property
    def kept_entries(self) -> int:
        """How many entries a history keeps, about."""
        return self.settings.history

    def history(self, from_ms: int) -> Iterator[Mapping[str, str]]:
        """Yield the entries of the history that were written since a moment, oldest first."""
        start = str(from_ms)
        while True:
            with self._errors():
                page = self.client.xrange(self.keys("history"), start, "+", count=_HISTORY_PAGE)
            yield from (
                {**entry, "at": str(_moment_of(int(id.partition("-")[0])))} for id, entry in page
            )
            if len(page) < _HISTORY_PAGE:
                return
            start = f"({page[-1][0]}"

    def history_begin(self) -> int | None:
        """Return the moment before which the history says nothing; None when all of it is there."""
        with self._errors():
            client, key = self.client, self.keys("history")
            length, first = client.xlen(key), client.xrange(key, "-", "+", count=1)
            if not first:
                return None
            try:
                added = client.xinfo_stream(key).get("entries-added")  # since Redis 7
            except ResponseError:  # it is not allowed
                added = None
        is_whole = length < self.settings.history if added is None else length == added
        return None if is_whole else int(first[0][0].partition("-")[0])

    def counters(self) -> dict[str, int]:
        """Return how many runs the service has sent, and ``skipped_<reason>``."""
        with self._errors():
            found = self.client.hgetall(self.keys("counters"))
        return {name: _number(count) for name, count in found.items()}

    def run_started(self, run: OutRun, *, lease_ms: int, limit_ms: int, redelivered: bool) -> int:
        """Note that a worker has started a run; return the code of ``run_started.lua``.

        Args:
            run: as its message describes it.
            lease_ms: it is lost unless its lease is renewed within that time,
            limit_ms: or at the latest after this one; 0 for no limit.
            redelivered: the broker has delivered the message before.
        """
        answer = self._call(
            *("run_started", run.task_id, run.timer_id, run.scheduled_ms, run.number, run.shard),
            *(run.retries, run.resent, limit_ms, lease_ms, run.message, int(redelivered)),
            *(self.settings.history, storable(run.worker)),
        )
        return int(answer)

    def run_ended(
        self,
        run: OutRun,
        state: str,
        *,
        took_ms: int | None = None,
        error: str = "",
        keep_ms: int | None = None,
        letter: Mapping[str, str] | None = None,
    ) -> bool:
        """Note what became of a run; return False when it is not known, or another message runs.

        Args:
            run: as its message describes it; with an empty ``timer_id`` what is stored says it.
            state: one of `celery_dtimer.runs.STATES`.
            took_ms: how long it ran; None if it did not.
            error: why it failed.
            keep_ms: its lease goes on for so long; None ends it.
            letter: what a dead letter holds beside; None for no letter.
        """
        fields = [storable(part) for pair in (letter or {}).items() for part in pair]
        answer = self._call(
            *("run_ended", run.task_id, run.timer_id, run.scheduled_ms, run.number, run.shard),
            *(run.retries, state, run.message, "" if keep_ms is None else keep_ms),
            *(self.settings.history, storable(run.worker)),
            *("" if took_ms is None else took_ms, storable(error), *fields),
        )
        return bool(answer)

    def out_run(self, task_id: str) -> OutRun | None:
        """Return a run that is out, as far as that is stored; None when it is not out."""
        with self._errors():
            text = self.client.hget(self.keys("running"), storable(task_id))
        return out_run(task_id, text or "")

    def renew_runs(self, runs: Sequence[tuple[str, str]], lease_ms: int) -> int:
        """Renew the leases of runs, given as task id and message; return how many it were."""
        return sum(
            int(self._call("renew_runs", lease_ms, *(part for run in batch for part in run)))
            for batch in _chunks(runs, BATCH)
        )

    def drop_leases(self, task_ids: Sequence[str]) -> None:
        """Forget the leases of runs."""
        self._call("drop_runs", *task_ids)

    def open_runs(self, instance: str, epoch: int, runs: Sequence[HeldRun]) -> list[str]:
        """Note runs that are about to be sent; return the answers of ``open_runs.lua``."""
        lease_ms = round(self.settings.queued_lease * 1000)
        answers: list[str] = []
        for batch in _sized_chunks(runs, _messages_of, BATCH, BATCH):
            arguments = [part for run in batch for part in (*run[:-1], " ".join(run.task_ids))]
            answers += self._call("open_runs", instance, epoch, lease_ms, *arguments)
        return answers

    def close_runs(self, instance: str, runs: Iterable[HeldRun]) -> None:
        """Forget runs that an instance has noted and does not send."""
        pairs = [part for run in runs for id in run.task_ids for part in (run.timer_id, id)]
        for batch in _chunks(pairs, 2 * BATCH):
            self._call("close_runs", instance, *batch)

    def revoke_runs(self, task_ids: Sequence[str], why: str) -> None:
        """Note that runs are revoked for later ones of their timers."""
        for batch in _chunks(task_ids, BATCH):
            self._call("revoke_runs", self.settings.history, why, *batch)

    def revoked_runs(self) -> list[str]:
        """Return the task ids of the runs that were revoked of late."""
        return self._ids_by_score("revoked_runs")

    def lost_runs(self, limit: int = BATCH) -> list[tuple[str, str]]:
        """Return runs whose leases have ended: their task ids, and what is stored of them."""
        with self._errors():
            until = self.now_ms()
            ids = self.client.zrangebyscore(self.keys("run_leases"), "-inf", until, 0, limit)
            texts = self.client.hmget(self.keys("running"), ids) if ids else []
        return [(id, text or "") for id, text in zip(ids, texts, strict=True)]

    def lose(
        self,
        instance: str,
        epoch: int,
        lost: tuple[str, str],
        *,
        resent_id: str,
        why: str,
        name: str,
    ) -> int:
        """Mark a run as lost; return the code of ``lose.lua``."""
        task_id, text = lost
        return int(
            self._call(
                *("lose", instance, epoch, task_id, text, resent_id, encode_name(task_id)),
                *(self.settings.history, why, storable(name)),
            )
        )

    def run_history(self) -> Iterator[Mapping[str, str]]:
        """Yield what workers have noted of runs, newest first."""
        return self._backwards("runs")

    def history_backwards(self) -> Iterator[Mapping[str, str]]:
        """Yield the entries of the history, newest first."""
        return self._backwards("history")

    def _backwards(self, stream: str) -> Iterator[Mapping[str, str]]:
        end = "+"
        while True:
            with self._errors():
                page = self.client.xrevrange(self.keys(stream), end, "-", count=_HISTORY_PAGE)
            yield from (
                {**entry, "at": str(_moment_of(int(id.partition("-")[0])))} for id, entry in page
            )
            if len(page) < _HISTORY_PAGE:
                return
            end = f"({page[-1][0]}"

    def dead_letters(
        self, offset: int = 0, limit: int | None = None
    ) -> list[tuple[str, Mapping[str, str]]]:
        """Return dead letters, newest first: their ids, and their fields with ``at``."""
        end = -1 if limit is None else offset + limit - 1
        found: list[tuple[str, Mapping[str, str]]] = []
        if limit == 0:
            return found
        with self._errors():
            client, key = self.client, self.keys("dead_timers")
            rows = client.zrevrange(key, offset, end, withscores=True)
            for batch in _chunks(rows, 1000):
                pipe = client.pipeline(transaction=False)
                for id, _ in batch:
                    pipe.hgetall(self.keys("dead_timer", id))
                for (id, at), row in zip(batch, _readable(pipe.execute(False)), strict=True):
                    if isinstance(row, dict):
                        found.append((id, {**row, "at": str(_moment_of(at))}))
        return found

    def dead_letter(self, id: str) -> Mapping[str, str] | None:
        """Return the fields of a dead letter, None when there is none."""
        id = storable(id)
        with self._errors():
            at = self.client.zscore(self.keys("dead_timers"), id)
            row = {} if at is None else self.client.hgetall(self.keys("dead_timer", id))
        # Between the two it may have been requeued, or purged.
        return {**row, "at": str(_moment_of(at))} if at is not None and row else None

    def requeue(
        self, letter: str, id: str, parent: str, revision: str, blob: str, *, task_id: str = ""
    ) -> bool:
        """Send what a letter holds by a hidden one-shot; return False when the letter is gone."""
        return bool(self._call("requeue", letter, id, parent, revision, blob, task_id))

    def purge_dead(self, until_ms: int | None, limit: int = BATCH) -> int:
        """Remove a batch of dead letters up to a moment; return how many."""
        return int(self._call("purge_dead", "" if until_ms is None else until_ms, limit))

    def claim_run(self, task_id: str, token: str, keep_ms: int) -> str | None:
        """Claim a run for a message; return the token that has claimed it before, else None.

        Args:
            task_id: the run's.
            token: stands for the message.
            keep_ms: how long the claim is kept.
        """
        key = self.keys("run_claim", encode_name(task_id))
        with self._errors():
            if self.client.set(key, token, nx=True, px=keep_ms):
                return None
            holder: str | None = self.client.get(key)
        return holder

    def claim_of(self, task_id: str) -> str | None:
        """Return the token that has claimed a run, None when none has."""
        with self._errors():
            holder: str | None = self.client.get(self.keys("run_claim", encode_name(task_id)))
        return holder

    # -- shards

    def stored_layout(self) -> Layout | None:
        """Return the service's layout, None when it does not say; nothing is written."""
        answer = self._call("layout", 0, "ask", 0)
        return _layout(answer) if answer else None

    def read_layout(self, shards: int, told: str = "", least: int = 0) -> Layout:
        """Return the service's layout, which is decided if it does not say.

        Args:
            shards: that a new service gets.
            told: what a shard was told of the layout, if that is known.
            least: the number that the layout has at least.
        """
        return _layout(self._call("layout", shards, told, least))

    def heard_of_layout(self) -> tuple[int, str]:
        """Return the number of the layout that this shard goes by, and what it was told of it."""
        with self._errors():
            here, told = self.client.hmget(self.keys("meta"), "layout_here", "layout_told")
        return _number(here or ""), told or ""

    def layout_number(self) -> int:
        """Return the number of the service's layout, which only its own ``meta`` has."""
        with self._errors():
            return _number(self.client.hget(self.keys("meta"), "layout") or "")

    def begin_resharding(self, shards: int) -> Layout:
        """Begin to give the service so many shards; return the layout."""
        return _layout(self._call("begin_resharding", shards))

    def end_resharding(self, number: int) -> Layout:
        """Let the layout that was begun with this number hold; return what holds."""
        return _layout(self._call("end_resharding", number))

    def mark_layout(self, layout: Layout) -> bool:
        """Refuse calls by older layouts from now on; return False if it is so already."""
        return bool(self._call("mark_layout", layout.number, str(layout)))

    def departing(self) -> list[str]:
        """Return the ids of timers that have departed and not arrived, as far as is known here."""
        with self._errors():
            return sorted(self.client.smembers(self.keys("departing")))

    def depart(self, ids: Sequence[str]) -> list[list[Any]]:
        """Take timers out of this shard; return the answers of ``depart.lua``."""
        return list(self._call("depart", *ids))

    def arrive(self, timers: Mapping[str, Sequence[Any]]) -> int:
        """Put timers that have departed into this shard; return how many were new here."""
        rows = [
            (id, definition, until, len(fields), *fields, len(out), *out)
            for id, (_, definition, until, fields, out) in timers.items()
        ]
        batches = _sized_chunks(rows, lambda row: len(row[1]), _BATCH_BYTES, BATCH)
        return sum(
            int(self._call("arrive", *(part for row in batch for part in row))) for batch in batches
        )

    def moved(self, ids: Sequence[str]) -> int:
        """Forget what has departed and arrived; return how many timers were moving from here."""
        return sum(int(self._call("moved", *batch)) for batch in _chunks(ids, BATCH))

    def leases(self) -> Iterator[list[tuple[str, str]]]:
        """Yield the runs that are out, some at a time: task ids, and what is known of each."""
        with self._errors():
            known: dict[str, str] = dict(self.client.hscan_iter(self.keys("running"), count=1000))
        runs = list(known.items())
        yield from (runs[start : start + BATCH] for start in range(0, len(runs), BATCH))

    def move_leases(self, runs: Sequence[tuple[str, str]], target: Store) -> None:
        """Have another shard keep the leases of runs."""
        with self._errors():
            pipe = self.client.pipeline(transaction=False)
            for task_id, _ in runs:
                pipe.zscore(self.keys("run_leases"), task_id)
            ends = pipe.execute()
        there = [(*run, end) for run, end in zip(runs, ends, strict=True) if end is not None]
        if there:
            target._call(
                "arrive_runs",
                *(part for task_id, text, end in there for part in (task_id, int(end), text)),
            )
        self.drop_leases([task_id for task_id, _ in runs])
        target.moved([f"run:{task_id}" for task_id, _ in runs])

    def move_letters(self, letters: Sequence[tuple[str, Mapping[str, str]]], target: Store) -> None:
        """Have another shard keep dead letters, as `dead_letters` returns them."""
        rows = []
        for id, row in letters:
            fields = [part for name, value in row.items() if name != "at" for part in (name, value)]
            rows.append((id, row["at"], len(fields), *fields))
        target._call("arrive_letters", *(part for row in rows for part in row))
        self._call("drop_letters", *(id for id, _ in letters))
        target.moved([f"letter:{id}" for id, _ in letters])

    # -- exports and imports

    def origin(self, mark: str = "") -> str:
        """Return what marks the service's data, "" when nothing does; it gets ``mark`` then."""
        return str(self._call("origin", mark))

    def bring(
        self, rows: Sequence[Incoming], *, is_origin: bool = False
    ) -> list[int | TimerState | None]:
        """Write timers with their states; return for each what became of it.

        That is a code of ``import.lua``, or the state of one that is not as it was read.

        Args:
            rows: the timers.
            is_origin: they were exported from this very service.

        Raises:
            TooManyTimersError: there would be more than is allowed; some batches may be written.
        """
        settings = self.settings
        most = "-" if settings.max_timers is None else settings.max_timers
        how = f"{round(settings.keep_finished * 1000)} {most} {is_origin:d}"
        found: list[int | TimerState | None] = []
        for batch in _sized_chunks(rows, lambda row: len(row.blob), _BATCH_BYTES, _UPSERTS):
            answer = self._call("import", how, *(part for row in batch for part in row.arguments))
            if answer == _FULL:
                raise self._full()
            for row, each in zip(batch, answer, strict=True):
                is_code = isinstance(each, int)
                found.append(each if is_code else _state(row.state.id, _pairs(each)))
        return found

    def _full(self) -> TooManyTimersError:
        return TooManyTimersError(
            f"service {shown(self.settings.service)} would have more than its "
            f"dtimer_max_timers={self.settings.max_timers}: delete some, or allow more"
        )

    # -- wake-ups

    def listen(
        self, instance: str, on_wake_up: Callable[[], None], stopped: threading.Event
    ) -> None:
        """Call ``on_wake_up`` for every wake-up of the instance until ``stopped`` is set.

        It is called once at the start too, since what came before the subscription was not heard.

        After silence it subscribes again, which the server confirms if it is there: else nobody
        would ever know of a connection that a firewall has forgotten.
        """
        channel = self.keys("wake", instance)
        with self._errors():
            client = self.client
            pubsub = client.pubsub()
            try:
                pubsub.subscribe(channel)
                asked, heard = time.monotonic(), 0.0
                on_wake_up()
                while not stopped.is_set():
                    message = pubsub.get_message(timeout=self._timeout / 2)
                    now = time.monotonic()
                    if message is not None:
                        heard = now
                        if message["type"] == "message":
                            on_wake_up()
                    elif heard < asked <= now - self._timeout:
                        raise RedisTimeoutError("a subscription is not confirmed")
                    elif asked < heard <= now - self._timeout:
                        pubsub.subscribe(channel)
                        asked = now
            finally:
                pubsub.close()


def _unless_error(answer: Any) -> Any:
    if isinstance(answer, RedisError):
        raise answer
    return answer


def _checked(name: str, answer: Any) -> Any:
    if answer == _FENCED:
        raise FencedError(f"{name}: the epoch is over")
    if answer == _ELSEWHERE and name in _PLACED:
        raise LayoutChangedError(f"{name}: the service is being given other shards")
    return answer


def attempts(timer: str) -> Iterator[None]:
    """Yield once for each try to write a timer, with pauses that let one of the writers through.

    A try that is refused may tell what is stored: there is no pause before the next one, which goes
    by that, and one before the try after it, which learns what changed meanwhile.

    Raises:
        ConflictError: others changed it each time.
    """
    for attempt in range(_CONFLICTS):
        yield
        yield
        longest = min(_LONGEST_PAUSE, 0.001 * 2 ** min(attempt, 16))
        time.sleep(random.uniform(0, longest))  # noqa: S311 - spreads writers, keeps no secret
    raise ConflictError(f"timer {shown(timer)} was changed by others {2 * _CONFLICTS} times")


@dataclass(frozen=True, slots=True)
class _BrokenEntry:
    """What is stored of an entry that could not be read."""

    name: str
    blob: str
    reason: str

    @property
    def id(self) -> str:
        return timer_id(self.name)

    @property
    def revision(self) -> str:
        text = f"{self.blob}\n{self.reason}".encode(errors="backslashreplace")
        return hashlib.blake2b(text, digest_size=12).hexdigest()[:16]

    def arm(self, existing: TimerState | None, now_ms: int) -> planning.Arming | None:
        """Return how it leaves the timer, or None when it is stored already."""
        if existing is not None and existing.revision == self.revision:
            return None
        return planning.Arming("broken", reason=self.reason)


_Stored = TypeVar("_Stored", Definition, _BrokenEntry)
_Row: TypeAlias = "tuple[Definition | _BrokenEntry, TimerState | None, planning.Arming]"


def _upsert_arguments(
    stored: Definition | _BrokenEntry, state: TimerState | None, arming: planning.Arming
) -> tuple[str, str, str]:
    """Return the three texts that ``upsert.lua`` takes for a timer."""
    anew = int(
        state is not None and state.is_finished and planning.is_rescheduled(state, stored.revision)
    )
    given_up = "-"
    if arming.skip is not None:
        second = "-" if arming.second_ms is None else arming.second_ms
        given_up = ":".join(map(str, (*arming.skip, second)))
    head = (stored.id, stored.revision, arming.status, _due(arming), arming.jitter_ms, anew)
    return (
        f"{' '.join(map(str, head))} {given_up} {arming.reason}",
        _as_read(state),
        stored.blob,
    )


def _as_read(state: TimerState | None) -> str:
    if state is None:
        return ""
    if "\\" in state.revision:  # bytes that are no text were edited into it
        return "*"
    return f"{state.revision} {state.status}"


def _due(arming: planning.Arming) -> str:
    if arming.delay_ms is not None:
        return f"+{arming.delay_ms}"
    if arming.keeps_due:
        return "keep" if arming.due_ms is None else f"keep:{arming.due_ms}"
    return "-" if arming.due_ms is None else str(arming.due_ms)


def _time_ms(answer: tuple[int, int]) -> int:
    """Return what TIME answers, seconds and microseconds, in ms."""
    seconds, micros = answer
    return int(seconds) * 1000 + int(micros) // 1000


def _readable(answers: list[Any]) -> list[Any]:
    """Return the answers to reads: those to keys of another type stay errors, others are raised."""
    for answer in answers:
        if isinstance(answer, RedisError) and not str(answer).startswith("WRONGTYPE"):
            raise answer
    return answers


def _state(id: str, row: object) -> TimerState | None:
    if not isinstance(row, dict) or "revision" not in row:
        return None
    return TimerState(
        id=id,
        status=row.get("status", "broken"),
        revision=row["revision"],
        created_ms=_number(row.get("created", "")),
        due_ms=maybe_whole(row.get("due", "")),
        at_ms=maybe_whole(row.get("at", "")),
        last_run_ms=maybe_whole(row.get("last_run", "")),
        last_sent_ms=maybe_whole(row.get("last_sent", "")),
        runs=_number(row.get("runs", "")),
        skips={
            field.removeprefix(_SKIPPED): _number(count)
            for field, count in row.items()
            if field.startswith(_SKIPPED)
        },
        attempts=_number(row.get("attempts", "")),
        waits=row.get("attempts", "") == _WAITS,
        owner=row.get("owner", UNASSIGNED),
        source=row.get("source", ""),
        parent=row.get("parent", ""),
        reason=row.get("reason", ""),
        changed_ms=maybe_whole(row.get("changed", "")),
        armed_ms=maybe_whole(row.get("armed", "")),
    )


def _is_whole(text: str) -> bool:
    """Say whether a field is a number that a script could have written: up to the last moment."""
    return text.isascii() and text.isdigit() and len(text) <= 15 and int(text) <= LAST_MS


def _moment_of(score: float) -> int:
    """Return the moment of a score, the nearest that can be shown if it was edited by hand."""
    return int(min(max(score, 0), LAST_MS))


def maybe_whole(text: str) -> int | None:
    """Return the number in a field, None when no script could have written it."""
    return int(text) if _is_whole(text) else None


def _layout(answer: list[Any]) -> Layout:
    shards, wanted, number, texts = answer
    seen = (_number(text) for text in texts.split(" "))  # it may have been edited by hand
    return Layout(shards, wanted, number, tuple(each for each in seen if 0 < each <= MOST_SHARDS))


def _turn(answer: list[str]) -> Turn:
    head, *rows = answer
    now_ms, micros, heartbeat_ms, more, next_ms, elsewhere_ms, later = map(int, head.split(" "))
    timers = [_due_timer(row) for row in rows]
    due = len(timers) - later
    return Turn(
        now_ms,
        micros,
        heartbeat_ms,
        bool(more),
        _expiry(next_ms),
        _expiry(elsewhere_ms),
        timers[:due],
        timers[due:],
    )


def _committed(answer: Any) -> Committed:
    if answer == _UNLINKED:
        raise UnlinkedError("the broker is not on the server that holds the timers any more")
    codes, *errors = answer[0].split("\n")
    turn = _turn(answer[1]) if answer[1] else None
    return Committed([int(code) for code in codes.split()], errors, turn)


def _due_timer(text: str) -> DueTimer:
    values = text.split(" ")
    if len(values) != len(DueTimer._fields):  # edited by hand
        return DueTimer(values[0], "active")
    return DueTimer._make(values)


def _instance(row: Mapping[str, str], owned: object) -> Instance:
    return Instance(
        id=row.get("id", ""),
        service=row.get("service", ""),
        host=row.get("host", ""),
        port=_number(row.get("port", "")),
        status=row.get("status", ""),
        epoch=_number(row.get("epoch", "")),
        started_at=to_datetime(_number(row.get("started_at", ""))),
        heartbeat_at=to_datetime(_number(row.get("heartbeat_at", ""))),
        version=row.get("version", ""),
        schema=_number(row.get("schema", "")),
        clock_offset=_offset(row.get("clock_offset_ms", "")),
        settings=row.get("settings", ""),
        dispatch=row.get("dispatch", ""),
        dispatch_reason=row.get("dispatch_reason", ""),
        broker=row.get("broker", ""),
        timers=owned if isinstance(owned, int) else 0,
        sent=_number(row.get("sent", "")),
        skipped=_number(row.get("skipped", "")),
        refused=_number(row.get("refused", "")),
        replays=_number(row.get("replays", "")),
        replayed_from=_moment(row.get("replayed_from", "")),
        replayed_until=_moment(row.get("replayed_until", "")),
        unreplicated=_number(row.get("unreplicated", "")),
    )


def _moment(text: str) -> datetime | None:
    moment_ms = maybe_whole(text)
    return None if moment_ms is None else to_datetime(moment_ms)


def _pairs(flat: Sequence[str]) -> dict[str, str]:
    return dict(zip(flat[::2], flat[1::2], strict=True))


def _threes(flat: Sequence[str]) -> list[tuple[str, str, str]]:
    return list(zip(flat[::3], flat[1::3], flat[2::3], strict=True))


def _text(number: int | None) -> str:
    return "" if number is None else str(number)


def _offset(text: str) -> float | None:
    """Return a number of ms, with its sign, in seconds; None when it is none."""
    offset_ms = maybe_whole(text.removeprefix("-"))
    if offset_ms is None:
        return None
    return (-offset_ms if text.startswith("-") else offset_ms) / 1000


def _number(text: str) -> int:
    return int(text) if _is_whole(text) else 0


def _expiry(moment_ms: int) -> int | None:
    return None if moment_ms < 0 else moment_ms


def _chunks(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    return (items[start : start + size] for start in range(0, len(items), size))


def _size_of(definition: Definition) -> int:
    return len(definition.blob)


def _messages_of(run: HeldRun) -> int:
    return len(run.task_ids)


_Item = TypeVar("_Item")


def _sized_chunks(
    items: Iterable[_Item], size_of: Callable[[_Item], int], most: int, count: int
) -> Iterator[list[_Item]]:
    """Yield items in lists of so many, and of so much in all, at most; a larger one goes alone."""
    batch: list[_Item] = []
    total = 0
    for item in items:
        size = size_of(item)
        if batch and (len(batch) == count or total + size > most):
            yield batch
            batch, total = [], 0
        batch.append(item)
        total += size
    if batch:
        yield batch
