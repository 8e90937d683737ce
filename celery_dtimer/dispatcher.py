"""One pass of firing: read what is due, decide, publish, commit.

A run is published before it is committed, so that it is late rather than lost. Each timer is
committed only if it is still as it was read; a commit that is refused although the message is out
leaves ``last_sent`` behind, and whoever owns the timer then advances it without sending. Only a
death or a lost lease between publish and commit, or a broker whose answer is lost, sends a run
again, with the same task id.

Not promised here: that a message is sent once. That needs the broker's write in the commit's
script.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from celery_dtimer import policy
from celery_dtimer.errors import FencedError, InvalidTimerError, StoreUnavailableError, shown
from celery_dtimer.model import Definition, Lease, Run, decode_definition
from celery_dtimer.publisher import BrokerDownError, Outcome, RefusedError, UnsendableError
from celery_dtimer.store import BATCH, COMMIT_REFUSALS, COMMITTED, DueTimer, Settlement, Store

logger = logging.getLogger(__name__)

_CACHED_DEFINITIONS = 20_000
_CACHED_BYTES = 32 * 1024 * 1024  # of definitions as they are stored
_LACKING_MS = 1000  # until another instance looks at a timer whose code this one lacks
_COMMIT_TRIES = 2  # the second is for a reply that was lost


class LackingError(InvalidTimerError):
    """A timer needs code that this instance does not have: it goes to another."""


#: Sends runs to the broker and answers for each; the second argument is asked before each send. The
#: answer is shorter than the runs when it was no, or when time ran out: the rest was not sent.
Publish = Callable[[Sequence[Run], Callable[[], bool]], list[Outcome]]


@dataclass(frozen=True, slots=True)
class Pass:
    """What one pass has done."""

    sent: int = 0
    set_aside: int = 0
    postponed: int = 0
    more: bool = False  #: more timers are due already
    next_in: float | None = None  #: seconds until the next timer is to be looked at
    broker_down: bool = False


class Dispatcher:
    """Fires the timers of one instance; `step` is one pass."""

    def __init__(
        self,
        store: Store,
        publish: Publish,
        *,
        bound: Mapping[str, Definition],
        may_send: Callable[[Lease], bool],
        on_progress: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare a dispatcher.

        Args:
            store: on a connection of its own.
            publish: sends a batch of runs.
            bound: by name, the definitions whose arguments only the code has.
            may_send: says whether a lease still holds; asked before every batch.
            on_progress: called after every batch and commit.
            clock: monotonic seconds.
        """
        self._store = store
        self._publish = publish
        self._bound = bound
        self._may_send = may_send
        self._on_progress = on_progress
        self._clock = clock
        self._definitions: OrderedDict[str, tuple[str, Definition, int]] = OrderedDict()
        self._cached_bytes = 0
        self._sequence = 0
        self._unsettled: list[Settlement] = []

    def step(self, lease: Lease) -> Pass:
        """Dispatch up to a batch of due timers.

        Raises:
            FencedError: the lease's epoch is over; what was sent and not committed is remembered in
                its timers.
            StoreError: Redis did not answer, or refused; what was sent is committed by the next
                pass.
        """
        self.settle(lease)
        started = self._clock()
        turn = self._store.due(lease.instance, lease.epoch, self._store.settings.batch_size)
        if turn.heartbeat_ms < lease.heartbeat_ms:
            self._store.close()
            raise StoreUnavailableError(
                "Redis knows an older heartbeat than was confirmed: another server answers"
            )
        counts: Counter[str] = Counter()
        looks_ms, untried = [turn.next_ms], len(turn.timers)
        broker_down = False
        for start in range(0, len(turn.timers), BATCH):
            batch = turn.timers[start : start + BATCH]
            settlements, broker_down = self._dispatch(lease, turn.now_ms, batch)
            counts.update(settlement.done for settlement in settlements)
            untried -= len(settlements)
            looks_ms += [_next_look_ms(settlement, turn.now_ms) for settlement in settlements]
            if broker_down or not self._may_send(lease):
                break
        next_ms = min((ms for ms in looks_ms if ms is not None), default=None)
        next_in = None
        if next_ms is not None:
            next_in = (next_ms - turn.now_ms) / 1000 - (self._clock() - started)
        return Pass(
            sent=counts["run"],
            set_aside=counts["broken"] + counts["unreadable"] + counts["missing"],
            postponed=counts["refused"] + counts["lacking"],
            more=untried > 0 or len(turn.timers) >= self._store.settings.batch_size,
            next_in=next_in,
            broker_down=broker_down,
        )

    def settle(self, lease: Lease) -> None:
        """Commit what was published and not committed yet."""
        if not self._unsettled:
            return
        waiting = self._unsettled
        for tries_left in reversed(range(_COMMIT_TRIES)):
            try:
                codes = self._store.commit(lease.instance, lease.epoch, self._sequence, waiting)
                break
            except FencedError:
                self._unsettled = []
                raise
            except StoreUnavailableError:
                if not tries_left:
                    raise
        self._unsettled = []
        self._sequence += 1
        self._on_progress()
        for settlement, code in zip(waiting, codes, strict=True):
            if code != COMMITTED:
                logger.info(
                    "Timer %s: %s was not committed: %s",
                    settlement.timer.id,
                    settlement.done,
                    COMMIT_REFUSALS[code],
                )

    # -- one batch

    def _dispatch(
        self, lease: Lease, now_ms: int, timers: Sequence[DueTimer]
    ) -> tuple[list[Settlement], bool]:
        """Publish and commit a batch; return what was done, and whether the broker is down."""
        definitions = self._definitions_of(timers)
        settled: list[Settlement] = []
        runs: list[tuple[Settlement, Run]] = []
        for timer in timers:
            definition = definitions[timer.id]
            settlement = _decide(timer, definition, now_ms)
            if settlement.done == "run" and not timer.is_sent:
                assert isinstance(definition, Definition)  # noqa: S101 - else it would not run
                runs.append((settlement, self._run(lease, timer, definition)))
            else:
                settled.append(settlement)
        if not self._may_send(lease):
            return [], False
        outcomes: list[Outcome] = []
        if runs:
            outcomes = self._publish([run for _, run in runs], lambda: self._may_send(lease))
        for (settlement, run), outcome in zip(runs, outcomes, strict=False):
            settled.extend(_settle(settlement, run, outcome))
        _warn_of_refusals([run for _, run in runs], outcomes)
        self._unsettled = settled
        self._on_progress()
        self.settle(lease)
        return settled, any(isinstance(outcome, BrokerDownError) for outcome in outcomes)

    def _run(self, lease: Lease, timer: DueTimer, definition: Definition) -> Run:
        return Run(
            service=self._store.settings.service,
            instance=lease.instance,
            timer_id=timer.parent or timer.id,
            identity=timer.id,
            created_ms=int(timer.created),
            scheduled_ms=timer.due_ms,
            number=timer.runs + 1,
            definition=definition,
        )

    # -- definitions

    def _definitions_of(
        self, timers: Sequence[DueTimer]
    ) -> dict[str, Definition | InvalidTimerError | None]:
        """Return each timer's definition, why it has no usable one, or None when it is gone."""
        found: dict[str, Definition | InvalidTimerError | None] = {}
        unknown: list[DueTimer] = []
        for timer in timers:
            cached = self._definitions.get(timer.id)
            if timer.is_readable and cached is not None and cached[0] == timer.revision:
                found[timer.id] = cached[1]
                self._definitions.move_to_end(timer.id)
            else:
                unknown.append(timer)
        readable = [timer for timer in unknown if timer.is_readable]
        blobs = self._store.definitions([timer.id for timer in readable])
        read = {
            timer.id: self._read(timer, blob) for timer, blob in zip(readable, blobs, strict=True)
        }
        for timer in unknown:
            found[timer.id] = read.get(timer.id, _unreadable(timer))
        return found

    def _read(self, timer: DueTimer, blob: str | None) -> Definition | InvalidTimerError:
        if blob is None:
            return InvalidTimerError("its definition is gone")
        try:
            definition = decode_definition(blob)
        except InvalidTimerError as exc:
            return exc
        if definition.code_bound:
            return self._bound.get(definition.name) or LackingError(
                "its arguments are in code that this instance lacks"
            )
        if not timer.parent:
            self._cache(timer, definition, len(blob))
        return definition

    def _cache(self, timer: DueTimer, definition: Definition, size: int) -> None:
        replaced = self._definitions.pop(timer.id, None)
        self._definitions[timer.id] = (timer.revision, definition, size)
        self._cached_bytes += size - (replaced[2] if replaced else 0)
        while len(self._definitions) > _CACHED_DEFINITIONS or self._cached_bytes > _CACHED_BYTES:
            _, (_, _, dropped) = self._definitions.popitem(last=False)
            self._cached_bytes -= dropped


def _next_look_ms(settlement: Settlement, now_ms: int) -> int | None:
    """Return when a timer that was settled now is to be looked at again."""
    return now_ms + settlement.delay_ms if settlement.delay_ms else settlement.next_due_ms


def _unreadable(timer: DueTimer) -> InvalidTimerError | None:
    return (
        InvalidTimerError("its stored state can not be read") if timer.status == "active" else None
    )


def _decide(
    timer: DueTimer, definition: Definition | InvalidTimerError | None, now_ms: int
) -> Settlement:
    """Return what is to be done with a due timer: ``run`` when it is to be sent."""
    if not isinstance(definition, Definition):
        return _set_aside(timer, definition)
    if timer.parent:
        return Settlement(timer, "run")
    try:
        plan = policy.plan(definition, timer.due_ms, now_ms)
    except Exception as exc:  # its schedule fails: that must not stop the others
        return _set_aside(timer, InvalidTimerError(f"its schedule fails: {exc!r}"))
    summary = definition.summary if plan.next_due_ms is None else ""
    return Settlement(timer, "run", plan.next_due_ms, plan.skipped, summary)


def _set_aside(timer: DueTimer, why: InvalidTimerError | None) -> Settlement:
    if why is None:
        state = timer.status or "gone"
        logger.error("Timer %s is not an active one (%s): out of the queue", timer.id, state)
        return Settlement(timer, "missing")
    if isinstance(why, LackingError):
        logger.warning("Timer %s goes to another instance: %s", timer.id, why)
        return Settlement(timer, "lacking", delay_ms=_LACKING_MS)
    logger.error("Timer %s is broken and set aside: %s", timer.id, why)
    return Settlement(timer, "broken" if timer.is_readable else "unreadable", reason=str(why))


def _warn_of_refusals(runs: Sequence[Run], outcomes: Sequence[Outcome]) -> None:
    """Log the refusals of a batch in one line, since they mostly have one reason."""
    pairs = zip(runs, outcomes, strict=False)
    refused = [(run, outcome) for run, outcome in pairs if isinstance(outcome, RefusedError)]
    if refused:
        run, outcome = refused[0]
        name = shown(run.definition.name)
        logger.warning("%s messages not sent, tried again; %s: %s", len(refused), name, outcome)


def _settle(planned: Settlement, run: Run, outcome: Outcome) -> Iterator[Settlement]:
    """Yield what is to be committed for a run: nothing when the broker is down."""
    timer, name = planned.timer, shown(run.definition.name)
    if outcome is None:
        logger.debug(
            "Sent %s (%s) scheduled at %s as task %s",
            name,
            run.definition.task,
            run.header["scheduled_at"],
            run.task_id,
        )
        yield planned
    elif isinstance(outcome, RefusedError):
        delay_ms = round(policy.retry_delay(timer.attempts) * 1000)
        logger.debug("Timer %s: not sent, next try in %s ms: %s", name, delay_ms, outcome)
        yield Settlement(timer, "refused", delay_ms=delay_ms)
    elif isinstance(outcome, UnsendableError):
        logger.error("Timer %s is broken and set aside: %s", name, outcome)
        yield Settlement(timer, "broken", reason=str(outcome))
