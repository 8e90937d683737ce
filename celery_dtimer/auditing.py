"""The audit: were a timer's runs sent, or not and why, as its schedule says they should have been?

Each commit notes in the history what it has sent and what it has skipped. The audit works out from
a timer's definition which runs were scheduled in a time, and looks for each: it was *sent*,
*skipped* with a reason, is still *pending*, or it is *lost*, which must not be. Triggers, and runs
that are sent again, are none of the schedule's and do not count.

A timer's state says which run is due: what is scheduled before must be in the history, what is
scheduled from then on can not be. It is read before the history is, so that commits in between
change nothing. What can not be known is not guessed: the audit begins with the timer's creation,
with its last change, or where the history begins, whichever comes last, and says so.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from celery_dtimer import planning
from celery_dtimer.errors import InvalidTimerError
from celery_dtimer.history import Sent, Skipped, all_records
from celery_dtimer.model import (
    Definition,
    TimerState,
    decode_definition,
    is_countdown_id,
    revision_of,
    to_datetime,
)
from celery_dtimer.schedules import Custom, Interval, OneShot
from celery_dtimer.sharding import Shards
from celery_dtimer.store import Store

_PAGE = 500  # timers that are read at once
_READS = 3  # of a timer that is changed meanwhile
_MOST = 100_000  # runs of a timer that can only be counted one by one


@dataclass(frozen=True, slots=True)
class TimerAudit:
    """What became of the runs that a timer was to have in a time; its times are in UTC.

    ``expected`` is the sum of ``sent``, ``skipped``, ``pending`` and ``lost``.
    """

    timer_id: str
    name: str
    since: datetime  #: runs that were scheduled after this moment were looked for,
    until: datetime  #: until this one
    expected: int | None  #: None when it can not be worked out
    sent: int
    skipped: dict[str, int] = field(default_factory=dict)  #: by reason
    pending: int = 0  #: due, and not sent yet
    lost: int | None = 0  #: neither; None when it can not be worked out
    note: str = ""  #: what is to be known beside

    @property
    def ok(self) -> bool:
        """Say whether no run is known to be lost."""
        return not self.lost


@dataclass
class _Ledger:
    """What the history says of a timer."""

    sent: dict[int, int] = field(default_factory=dict)  #: scheduled moment to number
    skipped: list[Skipped] = field(default_factory=list)


def audit_store(
    store: Store | Shards, since_ms: int, until_ms: int | None, ids: Sequence[str] | None = None
) -> list[TimerAudit]:
    """Return what became of the runs of a store's timers.

    Args:
        store: of the service, or of one of its shards.
        since_ms: of runs that were scheduled then or later,
        until_ms: until then; None for now.
        ids: of the timers; None for all.
    """
    timers = [
        timer
        for each in (store.stores if isinstance(store, Shards) else [store])
        for timer in _timers(each, each.timer_ids() if ids is None else ids)
    ]
    kept_since_ms = store.history_begin()
    ledgers = _ledgers(all_records(store.history(max(0, since_ms))))
    keeps = store.settings.history > 0
    return [
        audit_timer(
            definition,
            state,
            ledgers.get(state.id, _Ledger()),
            since_ms,
            now_ms if until_ms is None else min(until_ms, now_ms),
            kept_since_ms if keeps else now_ms,
        )
        for now_ms, state, definition in timers
    ]


def _timers(
    store: Store, ids: Sequence[str]
) -> Iterator[tuple[int, TimerState, Definition | InvalidTimerError]]:
    """Yield when each timer was read, and its state and definition as they belong together."""
    for start in range(0, len(ids), _PAGE):
        left = [id for id in ids[start : start + _PAGE] if not is_countdown_id(id)]
        for read in range(_READS):
            now_ms, states = store.states(left)
            again: list[str] = []
            for state, blob in zip(states, store.definitions(left), strict=True):
                if state is None or state.parent:
                    continue
                definition = _decoded(state, blob)
                if definition is not None:
                    yield now_ms, state, definition
                elif read < _READS - 1:
                    again.append(state.id)
                else:
                    yield now_ms, state, InvalidTimerError("it is changed again and again")
            left = again
            if not left:
                break


def _decoded(state: TimerState, blob: str | None) -> Definition | InvalidTimerError | None:
    """Return a state's definition, why it can not be read, or None: it is that of another state."""
    if blob is None:
        return InvalidTimerError("its definition is gone")
    try:
        definition = decode_definition(blob)
    except InvalidTimerError as exc:
        return exc
    is_its = definition.is_cut or revision_of(definition, blob) == state.revision
    return definition if is_its else None


def _ledgers(records: Iterable[tuple[str, Sent | Skipped]]) -> Mapping[str, _Ledger]:
    found: dict[str, _Ledger] = defaultdict(_Ledger)
    for id, record in records:
        if isinstance(record, Skipped):
            found[id].skipped.append(record)
        elif record.number.isdigit():  # neither a trigger nor sent again
            found[id].sent[record.scheduled_ms] = int(record.number)
    return found


def audit_timer(
    definition: Definition | InvalidTimerError,
    state: TimerState,
    ledger: _Ledger,
    since_ms: int,
    until_ms: int,
    kept_since_ms: int | None,
) -> TimerAudit:
    """Return what became of a timer's runs.

    Args:
        definition: the timer's, or why it can not be read.
        state: as it was before the history was read.
        ledger: what the history says of the timer.
        since_ms: of runs that were scheduled then or later,
        until_ms: until then, which is not later than when the state was read.
        kept_since_ms: what was written into the history before is not in it; None: it is all there.
    """
    after_ms, begin = _begin(state, since_ms, kept_since_ms)
    if isinstance(definition, InvalidTimerError):
        return _unknown(state, ledger, "", after_ms, until_ms, f"not checked: {definition}")
    if isinstance(definition.schedule, Custom):
        why = "not checked: code of its beats says when it runs"
        return _unknown(state, ledger, definition.name, after_ms, until_ms, why)
    return _Audit(definition, state, ledger, after_ms, max(after_ms, until_ms)).result(begin)


def _begin(state: TimerState, since_ms: int, kept_since_ms: int | None) -> tuple[int, str]:
    """Return after which moment runs can be looked for, and why not from the one asked for on."""
    begins = {
        "": since_ms - 1,
        "the timer was created then": state.created_ms,
        "the timer was changed then": state.changed_ms or 0,
        "the timer began anew then": state.armed_ms or 0,
        "the history does not reach back farther": -1 if kept_since_ms is None else kept_since_ms,
    }
    why = max(begins, key=lambda each: begins[each])
    return begins[why], why


def _unknown(
    state: TimerState, ledger: _Ledger, name: str, after_ms: int, until_ms: int, why: str
) -> TimerAudit:
    """Return what is known of a timer whose schedule can not be worked out."""
    skipped: dict[str, int] = defaultdict(int)
    for record in ledger.skipped:
        if after_ms < record.first_ms <= until_ms:
            skipped[record.reason] += record.runs
    return TimerAudit(
        timer_id=state.id,
        name=name,
        since=to_datetime(after_ms),
        until=to_datetime(max(after_ms, until_ms)),
        expected=None,
        sent=sum(after_ms < moment_ms <= until_ms for moment_ms in ledger.sent),
        skipped=dict(skipped),
        lost=None,
        note=why,
    )


class _Audit:
    """One timer's audit."""

    def __init__(
        self,
        definition: Definition,
        state: TimerState,
        ledger: _Ledger,
        after_ms: int,
        until_ms: int,
    ) -> None:
        self.definition, self.state, self.ledger = definition, state, ledger
        self.after_ms, self.until_ms = after_ms, until_ms
        self.notes: list[str] = []
        # Forward from what is known to be a slot is how the timer itself has gone on.
        known = [each for each in self._known() if each > after_ms]
        self.anchor_ms = min(known, default=state.due_ms or state.last_run_ms or state.created_ms)
        self.is_countable = True
        if definition.is_cut and not isinstance(definition.schedule, OneShot):
            # When it started is not known any more: it had when the first run is named.
            named = [*known, *(record.first_ms for record in ledger.skipped)]
            begun_ms = min((each for each in named if each > after_ms), default=after_ms + 1)
            self.after_ms = min(begun_ms - 1, self.until_ms)

    def _known(self) -> Iterator[int]:
        """Yield scheduled moments of the timer that its state or the history names."""
        yield from self.ledger.sent
        yield from (
            each for each in (self.state.due_ms, self.state.last_run_ms) if each is not None
        )

    def result(self, begin: str) -> TimerAudit:
        """Return what became of the runs; ``begin`` says why not all were looked for."""
        settled_ms = self._settled_until()
        sent = [each for each in self.ledger.sent if self.after_ms < each <= settled_ms]
        on_time = [each for each in sent if self._is_slot(each)]
        skipped = self._skipped(settled_ms)
        settled = self._count(self.after_ms, settled_ms)
        rest = self._rest(settled_ms)
        pending = rest if self.state.status == "active" else 0
        if rest and not pending:
            skipped[planning.PAUSED] = skipped.get(planning.PAUSED, 0) + rest
            self.notes.append(
                f"it is {self.state.status}: {rest} runs are skipped until it goes on"
            )
        lost = settled - len(on_time) - (sum(skipped.values()) - (rest - pending))
        if len(on_time) < len(sent):
            others = len(sent) - len(on_time)
            self.notes.append(
                f"{others} runs were sent for moments that the schedule does not have"
            )
        if lost < 0:
            self.notes.append(f"{-lost} more runs are accounted for than were scheduled")
            lost = 0
        elif lost:
            self._note_numbers(sent)
        if begin:
            self.notes.insert(0, f"only since then: {begin}")
        if not self.is_countable:
            self.notes.append(f"not checked: {_MOST} runs or more; ask for a shorter time")
        return TimerAudit(
            timer_id=self.state.id,
            name=self.definition.name,
            since=to_datetime(self.after_ms),
            until=to_datetime(self.until_ms),
            expected=settled + rest if self.is_countable else None,
            sent=len(on_time),
            skipped=skipped,
            pending=pending,
            lost=lost if self.is_countable else None,
            note="; ".join(self.notes),
        )

    def _settled_until(self) -> int:
        """Return until when everything that was scheduled must have been sent, or skipped."""
        due_ms = self.state.due_ms
        if due_ms is None:  # it has no run left: what it has done last was the end
            ends = [self.after_ms, self.state.last_run_ms or 0]
            ends += map(self._last_of, self.ledger.skipped)
            return min(self.until_ms, max(ends))
        return max(self.after_ms, min(self.until_ms, due_ms - 1))

    def _rest(self, settled_ms: int) -> int:
        """Return how many runs are due, and not settled."""
        due_ms = self.state.due_ms
        if due_ms is None or due_ms > self.until_ms:
            return 0
        rest = self._count(max(settled_ms, due_ms - 1), self.until_ms)
        max_runs = self.definition.policy.max_runs
        return rest if max_runs is None else min(rest, max(0, max_runs - self.state.runs))

    def _skipped(self, settled_ms: int) -> dict[str, int]:
        found: dict[str, int] = defaultdict(int)
        for record in self.ledger.skipped:
            first_ms = max(record.first_ms - 1, self.after_ms)
            runs = self._count(first_ms, min(self._last_of(record), settled_ms))
            if runs:
                found[record.reason] += runs
        return dict(found)

    def _last_of(self, record: Skipped) -> int:
        """Return until when skipped runs were scheduled."""
        if not self.definition.is_cut or record.runs >= _MOST:
            return record.until_ms
        last_ms, schedule = record.first_ms, self.definition.schedule
        for _ in range(record.runs - 1):  # where it ended is not known any more
            last_ms = schedule.next_run_after(last_ms, record.first_ms) or last_ms
        return min(last_ms, record.until_ms)

    def _count(self, after_ms: int, until_ms: int) -> int:
        """Return how many runs are scheduled after a moment until another."""
        if until_ms <= after_ms:
            return 0
        schedule = self.definition.schedule
        if isinstance(schedule, OneShot):
            return int(after_ms < self._single_ms(schedule) <= until_ms)
        start_ms = self.definition.policy.start_ms
        if start_ms is not None:
            after_ms = max(after_ms, start_ms - 1)
        count = planning.count(self.definition, after_ms, until_ms, self.anchor_ms)
        is_arithmetic = isinstance(schedule, Interval)
        self.is_countable = self.is_countable and (is_arithmetic or count < _MOST)
        return count

    def _single_ms(self, schedule: OneShot) -> int:
        """Return the scheduled moment of a single run."""
        state = self.state
        known = state.last_run_ms if state.due_ms is None else state.due_ms
        return schedule.at_ms if known is None else known

    def _is_slot(self, moment_ms: int) -> bool:
        return self._count(moment_ms - 1, moment_ms) == 1

    def _note_numbers(self, sent: Sequence[int]) -> None:
        """Note when the numbers of runs tell that lines of the history are missing."""
        numbers = [self.ledger.sent[each] for each in sent]
        missing = max(numbers) - min(numbers) + 1 - len(set(numbers)) if numbers else 0
        if missing > 0:
            self.notes.append(f"{missing} runs were counted that the history does not name")
