"""The definitions of an instance's timers, kept while there is room for them.

They are read a batch at a time when timers come due. In the time that an instance has to spare,
those of timers that come due soon are read too, so that the burst of a full hour finds them here.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from celery_dtimer.allowed import AllowedTasks
from celery_dtimer.errors import InvalidTimerError
from celery_dtimer.model import DAMAGED, Definition, decode_definition, revision_of
from celery_dtimer.store import DueTimer, Store

_MOST = 150_000
_MOST_BYTES = 64 * 1024 * 1024  # of definitions as they are stored
_SOON_MS = 30_000  # how long before they come due timers are looked at, when there is time
_MOST_SOON = _MOST // 3  # of them, so that they do not drive out what is needed now
_AGAIN_MS = 3000  # until it is looked again, when all that may be looked at has been
_PAGE = 1000  # timers that are looked at with one request


class LackingError(InvalidTimerError):
    """A timer needs code that this instance does not have: it goes to another."""


class _Kept(NamedTuple):
    revision: str
    definition: Definition
    size: int


class _Requested(NamedTuple):
    """Definitions that have been asked for."""

    timers: Sequence[DueTimer]
    answer: Callable[[], list[str | None]]


class Definitions:
    """What the timers of one instance send, by their ids and revisions."""

    def __init__(
        self, store: Store, bound: Mapping[str, Definition], allowed: AllowedTasks | None = None
    ) -> None:
        """Prepare for reading.

        Args:
            store: on a connection of its own.
            bound: by name, the definitions whose arguments only the code has.
            allowed: says which of the others may be sent; by default all.
        """
        self._store = store
        self._allowed = allowed or AllowedTasks(None)
        self._bound = bound
        self._kept: OrderedDict[str, _Kept] = OrderedDict()
        self._bytes = 0
        self._requested: _Requested | None = None
        self._coming: deque[str] = deque()  # timers that were looked at, and are to be read
        self._seen_ms = 0  # timers that come due before have been looked at,
        self._seen_there = 0  # and so many of those that do at that moment
        self._look_at_ms = 0

    def of(self, timers: Sequence[DueTimer]) -> dict[str, Definition | InvalidTimerError | None]:
        """Return each timer's definition, why it has no usable one, or None when it is gone."""
        self.receive()
        found: dict[str, Definition | InvalidTimerError | None] = {}
        unknown: list[DueTimer] = []
        for timer in timers:
            if not timer.is_readable:
                found[timer.id] = _unreadable(timer)
            elif (known := self._known(timer)) is not None:
                found[timer.id] = known
                self._kept.move_to_end(timer.id)
            else:
                unknown.append(timer)
        blobs = self._store.definitions([timer.id for timer in unknown])
        for timer, blob in zip(unknown, blobs, strict=True):
            found[timer.id] = self._decoded(timer, blob)
        return found

    def forget(self, id: str) -> None:
        """Drop the definition of a timer that is over, or broken, and may be read anew."""
        dropped = self._kept.pop(id, None)
        if dropped is not None:
            self._bytes -= dropped.size

    def request(self, timers: Sequence[DueTimer]) -> None:
        """Ask for what is not known of a batch, before the server is busy with something else."""
        self.receive()
        unknown = [each for each in timers if self._known(each) is None and each.is_readable]
        if unknown:
            answer = self._store.begin_definitions([timer.id for timer in unknown])
            self._requested = _Requested(unknown, answer)

    def receive(self) -> None:
        """Keep what has been asked for."""
        requested, self._requested = self._requested, None
        if requested is not None:
            for timer, blob in zip(requested.timers, requested.answer(), strict=True):
                self._decoded(timer, blob)

    def look_ahead(self, instance: str, now_ms: int, limit: int) -> list[Definition] | None:
        """Read definitions of timers that come due soon, in their order.

        Args:
            instance: owns the timers.
            now_ms: the server's time.
            limit: how many are read at most.

        Returns:
            those read now; None when all have been looked at for the time being.
        """
        if not self._coming and not self._look_at_more(instance, now_ms):
            return None
        ids = [self._coming.popleft() for _ in range(min(limit, len(self._coming)))]
        blobs = self._store.begin_definitions(ids)() if ids else []
        return [
            definition
            for id, blob in zip(ids, blobs, strict=True)
            if blob is not None and (definition := self._foreseen(id, blob)) is not None
        ]

    def _look_at_more(self, instance: str, now_ms: int) -> bool:
        """Note which of the next timers are not known; return False when it is not time for it."""
        until_ms = now_ms + _SOON_MS
        is_back = self._seen_ms > until_ms  # the server's clock is
        if now_ms < self._look_at_ms and not is_back:
            return False
        if self._seen_ms < now_ms or is_back:
            self._seen_ms, self._seen_there, self._look_at_ms = now_ms, 0, 0
        before, page = self._store.coming(
            instance, self._seen_ms, until_ms, self._seen_there, _PAGE
        )
        if before > _MOST_SOON:
            self._look_at_ms = now_ms + _AGAIN_MS
            return False
        if page:
            last = page[-1][1]
            there = sum(at == last for _, at in page)
            self._seen_there = there + (self._seen_there if last == self._seen_ms else 0)
            self._seen_ms = last
        if len(page) < _PAGE:  # for now: others may be taken over
            self._look_at_ms = now_ms + _AGAIN_MS
        self._coming += (id for id, _ in page if id not in self._kept)
        return True

    def _foreseen(self, id: str, blob: str) -> Definition | None:
        """Keep a definition if it will serve; what is wrong with it is said when it is due."""
        try:
            definition = decode_definition(blob)
            self._allowed.check(definition)
        except InvalidTimerError:
            return None
        if definition.code_bound or definition.id != id:  # a trigger's is its parent's
            return None
        self._keep(id, revision_of(definition, blob), definition, len(blob))
        return definition

    def _known(self, timer: DueTimer) -> Definition | None:
        kept = self._kept.get(timer.id)
        return None if kept is None or kept.revision != timer.revision else kept.definition

    def _decoded(self, timer: DueTimer, blob: str | None) -> Definition | InvalidTimerError:
        if blob is None:
            return InvalidTimerError(f"{DAMAGED}its definition is gone")
        try:
            definition = decode_definition(blob)
        except InvalidTimerError as exc:
            return exc
        if definition.code_bound:
            return self._bound.get(definition.name) or LackingError(
                "its arguments are in code that this instance lacks"
            )
        try:
            self._allowed.check(definition)
        except InvalidTimerError as exc:
            return self._refused(timer, exc)
        if not timer.parent:
            self._keep(timer.id, timer.revision, definition, len(blob))
        return definition

    def _refused(self, timer: DueTimer, why: InvalidTimerError) -> InvalidTimerError:
        """Return what becomes of a timer with a task that is not allowed here.

        A static one may be declared by other code, or by another version of this one: it goes on to
        instances that know it. Nothing is sent of it here, whoever says that it is static.
        """
        state = self._store.states([timer.parent or timer.id])[1][0]
        return LackingError(str(why)) if state is not None and state.source else why

    def _keep(self, id: str, revision: str, definition: Definition, size: int) -> None:
        replaced = self._kept.pop(id, None)
        self._kept[id] = _Kept(revision, definition, size)
        self._bytes += size - (replaced.size if replaced else 0)
        while len(self._kept) > _MOST or self._bytes > _MOST_BYTES:
            _, dropped = self._kept.popitem(last=False)
            self._bytes -= dropped.size


def _unreadable(timer: DueTimer) -> InvalidTimerError | None:
    return (
        InvalidTimerError(f"{DAMAGED}its stored state can not be read")
        if timer.status == "active"
        else None
    )
