"""One pass of firing: read what is due, decide, publish, commit.

Each timer is committed only if it is still as it was read. With *atomic* dispatch its message is
pushed by the commit itself: a run is enqueued exactly once, whoever dies when.

With *confirmed* dispatch a run is published before it is committed, so that it is late rather than
lost. A commit that is refused although the message is out leaves ``last_sent`` behind, and whoever
owns the timer then advances it without sending. Only a death or a lost lease between publish and
commit, or a broker whose answer is lost, sends a run again, with the same task id.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import NamedTuple, Protocol

from celery_dtimer import planning
from celery_dtimer.allowed import AllowedTasks
from celery_dtimer.announcer import Announcer
from celery_dtimer.atomic import ATOMIC, CONFIRMED
from celery_dtimer.definitions import Definitions, LackingError
from celery_dtimer.errors import (
    FencedError,
    InvalidTimerError,
    NewerError,
    StoreUnavailableError,
    shown,
)
from celery_dtimer.faults import point
from celery_dtimer.journeys import Journeys
from celery_dtimer.metering import UNMETERED, CommitMeter
from celery_dtimer.meters import Meters
from celery_dtimer.model import (
    Definition,
    Lease,
    Run,
    is_countdown_id,
    is_one_message,
    is_requeued,
    requeued_task_id,
    resent_of,
)
from celery_dtimer.overlaps import Overlaps
from celery_dtimer.policy import Defaults
from celery_dtimer.publisher import (
    BrokerDownError,
    Failure,
    Outcome,
    RefusedError,
    UnsendableError,
)
from celery_dtimer.schedules import Custom
from celery_dtimer.store import (
    COMMIT_REFUSALS,
    COMMITTED,
    PUSH_REFUSED,
    Committed,
    DueTimer,
    Link,
    Message,
    Reading,
    Settlement,
    Store,
    Turn,
    UnlinkedError,
    is_forbidden,
    is_passing,
    refused,
)

logger = logging.getLogger(__name__)

_LACKING_MS = 1000  # until another instance looks at a timer whose code this one lacks
_COMMIT_TRIES = 2  # the second is for a reply that was lost
_LONGEST_PASS = 0.25  # seconds after which a pass that finds more and more ends
_COMMIT_BYTES = 1024 * 1024  # of messages that one commit pushes, so that its script stays short,
_COMMIT_PUSHES = 1000  # and how many of them
_FORESEEN = 100  # timers that are looked at before they come due, at once,
_FORESEEING = 0.0003  # each in so many seconds, generously
_AHEAD = 8  # timers that are told before they come due, and so go out without being read first
_STOLEN = 100  # timers that are taken over at once from an instance that lags
_SAY_EVERY = 5.0  # seconds between two lines of the log that say the same


class StaleServerError(StoreUnavailableError):
    """A server answers that lacks what was confirmed: after a failover, or while one goes on."""


class Broker(Protocol):
    """What the dispatcher needs of a publisher."""

    def urgency(self, definition: Definition) -> int:
        """Say how early in a batch a timer's runs go out: smaller is earlier."""

    def __call__(self, runs: Sequence[Run], may_send: Callable[[], bool]) -> list[Outcome]:
        """Send runs; the answer is shorter when sending was not allowed, or the broker is down."""

    def build(self, runs: Sequence[Run]) -> list[Message | Failure]:
        """Return each run's message; the answer is shorter when the broker is down."""

    def expect(self, runs: Sequence[Run]) -> None:
        """Get ready for such runs; nothing is sent."""

    def revoke(self, task_ids: Sequence[str]) -> None:
        """Revoke and terminate tasks; raise when the workers can not be told."""


class Mode(Protocol):
    """Says for each batch whether its commit may push the messages."""

    def link(self) -> Link | None:
        """Return the proof that a commit takes; None when messages are to be published first."""

    def is_known(self) -> bool:
        """Say whether messages are to be published first when there is no link, and not to wait."""

    def doubt(self) -> None:
        """Check anew before the next batch."""

    def refuse(self, reason: str) -> None:
        """Publish first from now on."""


class _Repeated:
    """Adds up what happens again and again, so that the log tells it in a line now and then."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._untold = 0
        self._say_after = clock()

    def add(self, count: int) -> int:
        """Add to what is to be told; return the sum if it is to be told now, else 0."""
        self._untold += count
        if not count or self._clock() < self._say_after:
            return 0
        told, self._untold, self._say_after = self._untold, 0, self._clock() + _SAY_EVERY
        return told


class Confirmed:
    """The mode in which messages are always published before the commit."""

    def link(self) -> None:
        """Return None."""

    def is_known(self) -> bool:
        """Return True."""
        return True

    def doubt(self) -> None:
        """Nothing is in doubt."""

    def refuse(self, reason: str) -> None:
        """It is so already."""


@dataclass(frozen=True, slots=True)
class Pass:
    """What one pass has done."""

    sent: int = 0
    set_aside: int = 0
    postponed: int = 0
    more: bool = False  #: more timers are due already
    next_in: float | None = None  #: seconds until the next timer is to be looked at
    broker_down: bool = False


@dataclass(slots=True)
class _Tally:
    """What a pass has done so far."""

    counts: Counter[str] = field(default_factory=Counter)
    broker_down: bool = False
    is_cut_short: bool = False  # due timers were left, or are to be read anew


class _Committing(NamedTuple):
    """A commit that has been started."""

    reading: Reading
    batch: list[Settlement]  #: what is in it
    answer: Callable[[], Committed] | None = None  #: waits for it; None when nothing is committed


class Dispatcher:
    """Fires the timers of one instance; `step` is one pass."""

    def __init__(
        self,
        store: Store,
        broker: Broker,
        *,
        bound: Mapping[str, Definition],
        may_send: Callable[[Lease], bool],
        mode: Mode | None = None,
        allowed: AllowedTasks | None = None,
        on_progress: Callable[[], None] = lambda: None,
        on_commit: Callable[[int, int, bool], None] = lambda epoch, sequence, is_short: None,
        meters: Meters | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare a dispatcher.

        Args:
            store: on a connection of its own.
            broker: builds and sends messages.
            bound: by name, the definitions whose arguments only the code has.
            may_send: says whether a lease still holds; asked before every batch.
            mode: says for each batch whether its commit pushes the messages; by default it never
                does.
            allowed: says which of the stored definitions may be sent; by default all.
            on_progress: called after every batch and commit.
            on_commit: is told the epoch and the number of each commit that is confirmed, and
                whether it has reached too few replicas.
            meters: count what is sent, and what is not; None when nobody reads them.
            clock: monotonic seconds.
        """
        self._store = store
        self._broker = broker
        self._may_send = may_send
        self._mode: Mode = mode or Confirmed()
        self._on_progress = on_progress
        self._on_commit = on_commit
        self._clock = clock
        self._limit = store.settings.batch_size
        self._defaults = store.settings.defaults
        self._bound = bound
        self._definitions = Definitions(store, bound, allowed)
        self._overlaps = Overlaps(store, broker.revoke, clock)
        self._announcer = Announcer(store.settings.service)
        self._commit_meter = UNMETERED if meters is None else CommitMeter(meters, clock)
        self._journeys = Journeys(store)
        self._max_refusals = store.settings.max_refusals
        self._epoch, self._sequence = 0, 1  # of the next commit
        self._unsettled: list[Settlement] = []
        self._link: Link | None = None  # of what is not settled
        self._committing: _Committing | None = None
        self._last: Turn | None = None  # what was told ahead, for the next pass
        self._answered = 0.0  # when, by the clock
        self._look_at_others = 0.0  # when to look again whether one lags
        self._has_looked = False
        self._stolen, self._not_committed, self._not_sent = (_Repeated(clock) for _ in range(3))

    def step(self, lease: Lease) -> Pass:
        """Dispatch what is due, for a quarter of a second at most.

        Raises:
            FencedError: the lease's epoch is over; what was sent and not committed is remembered in
                its timers.
            StoreError: Redis did not answer, or refused; what was sent is committed by the next
                pass.
        """
        tally = _Tally()
        last, self._last = self._last, None
        self._settle(lease, tally)
        self._announcer.forget()
        self._commit_meter.forget()
        self._journeys.forget()
        started = self._clock()
        link = self._mode.link()
        turn = self._told_ahead(last, link) or self._read(lease, link)
        try:
            following = self._dispatch(lease, turn, link, tally, started + _LONGEST_PASS)
        finally:
            with contextlib.suppress(StoreUnavailableError):  # whatever ended the pass matters more
                self._definitions.receive()
        has_helped = following is not None and self._help(lease, following)
        self._last = following
        if following is not None:
            self._definitions.of(following.ahead)  # read before they come due
        counts = tally.counts
        return Pass(
            sent=counts["run"],
            set_aside=counts["broken"] + counts["unreadable"] + counts["missing"],
            postponed=counts["refused"],
            more=following is None or has_helped,
            next_in=None if following is None else self._seconds_to_next(following),
            broker_down=tally.broker_down,
        )

    def look_ahead(self, lease: Lease, seconds: float) -> bool:
        """Use spare time for timers that come due soon; say whether more of them are left.

        Raises:
            StoreError: Redis did not answer, or refused.
        """
        limit = min(_FORESEEN, int(seconds / _FORESEEING))
        if self._last is None or self._last.next_ms is None or not limit:
            return False
        now_ms = int(self._now(self._last))
        found = self._definitions.look_ahead(lease.instance, now_ms, limit)
        if found and self._mode.link() is not None:
            service = self._store.settings.service
            self._broker.expect(
                [
                    Run(service, lease.instance, each.id, each.id, now_ms, now_ms, 1, each)
                    for each in found
                ]
            )
        return found is not None

    def settle(self, lease: Lease) -> None:
        """Commit what was published and not committed yet."""
        self._settle(lease, _Tally())

    def _read(self, lease: Lease, link: Link | None) -> Turn:
        point("before_due")
        reading = self._reading(link)
        if link is not None:  # the second half is taken up while the first is committed
            reading = reading._replace(limit=2 * self._limit)
        turn = self._store.due(lease.instance, lease.epoch, reading)
        self._answered = self._clock()
        self._commit_meter.hear(turn)
        return self._checked(lease, turn)

    def _reading(self, link: Link | None, skip: int = 0) -> Reading:
        """Return how to read what is due next: when it is pushed, what comes soon is told too."""
        ahead = 0 if link is None else _AHEAD
        self._has_looked = self._clock() >= self._look_at_others
        return Reading(self._limit, ahead, link is None, self._has_looked, skip)

    def _checked(self, lease: Lease, turn: Turn) -> Turn:
        """Return what was read, unless another server has answered."""
        if turn.heartbeat_ms < lease.heartbeat_ms:
            self._store.close()
            raise StaleServerError(
                "Redis knows an older heartbeat than was confirmed: another server answers"
            )
        return turn

    def _now(self, turn: Turn) -> float:
        """Return the server's time in ms now: never later than it is, since answers take time."""
        return turn.now_ms + turn.micros / 1000 + (self._clock() - self._answered) * 1000

    def _seconds_to_next(self, turn: Turn) -> float | None:
        """Return when the first timer behind a read is to be looked at."""
        return None if turn.next_ms is None else (turn.next_ms - self._now(turn)) / 1000

    def _told_ahead(self, last: Turn | None, link: Link | None) -> Turn | None:
        """Return what has come due of what the last pass was told, None when it is to be read.

        The commit that pushes it compares it once more, with the server's time too.
        """
        if last is None or link is None:
            return None
        now_ms = int(self._now(last))
        timers = [timer for timer in last.ahead if int(timer.at) <= now_ms]
        return last._replace(now_ms=now_ms, timers=timers) if timers else None

    def _help(self, lease: Lease, turn: Turn) -> bool:
        """Take over from an instance that lags, when nothing is due here; say whether it was so."""
        if turn.timers or not self._has_looked:
            return False
        settings = self._store.settings
        self._look_at_others = self._clock() + settings.check_interval / 2
        lag_ms = round(settings.lag_limit * 1000)
        if turn.elsewhere_ms is None or turn.now_ms - turn.elsewhere_ms <= lag_ms:
            return False
        moved = self._store.steal(lease.instance, lease.epoch, lag_ms, _STOLEN)
        if moved.count:
            if stolen := self._stolen.add(moved.count):
                logger.info("Took %s overdue timers over from an instance that lags", stolen)
            self._look_at_others = 0.0
        return moved.count > 0

    # -- batches

    def _dispatch(
        self, lease: Lease, turn: Turn, link: Link | None, tally: _Tally, until: float
    ) -> Turn | None:
        """Dispatch batch after batch; return the last read, None when more is due or may be.

        While a commit is on its way to the server and back, the next batch is prepared, if what
        is due is known already: the two work at the same time.
        """
        following: Turn | None = turn
        waiting = turn.timers
        while waiting and not tally.is_cut_short:
            batch, waiting = waiting[: self._limit], waiting[self._limit :]
            settled, is_whole = self._prepare(lease, batch, turn.now_ms, link, tally)
            if self._committing is not None:
                following = self._settle(lease, tally)
                if following is None:
                    break  # what was prepared is not pushed: it is read anew
                turn = following
                waiting += _without(turn.timers, (*batch, *waiting))
            self._definitions.request(waiting[: self._limit])
            self._begin(lease, settled, link, len(waiting))
            if not waiting or not is_whole:
                following = self._settle(lease, tally)
                if following is not None:
                    turn, waiting = following, following.timers
            if not is_whole or (waiting and not self._goes_on(link, until)):
                tally.is_cut_short = True
        if self._committing is not None:
            following = self._settle(lease, tally)
        return None if tally.is_cut_short else following

    def _goes_on(self, link: Link | None, until: float) -> bool:
        """Say whether the pass goes on: in time, and in the same mode as what has been read."""
        return self._clock() <= until and self._mode.link() == link

    def _prepare(
        self,
        lease: Lease,
        timers: Sequence[DueTimer],
        now_ms: int,
        link: Link | None,
        tally: _Tally,
    ) -> tuple[list[Settlement], bool]:
        """Decide on a batch, and publish its runs or build their messages.

        To decide may take long, for a timer whose schedule is code say: then some are left.

        Returns:
            what is to be committed, and whether that is all of the batch.
        """
        definitions = self._definitions.of(timers)
        # Few instances have a rule that is code: the others are not to pay for it.
        last_runs_ms = self._last_runs_ms(definitions) if self._bound else {}
        until = self._clock() + _LONGEST_PASS  # of this batch's own: a slow Redis is no slow rule
        settled: list[Settlement] = []
        planned: list[Settlement] = []
        for timer in timers:
            definition, last_run_ms = definitions[timer.id], last_runs_ms.get(timer.id)
            settlement = _decide(timer, definition, now_ms, self._defaults, last_run_ms)
            goes_out = settlement.done == "run" and not timer.is_sent
            (planned if goes_out else settled).append(settlement)
            if self._clock() > until:
                break
        is_whole = len(planned) + len(settled) == len(timers)
        if not is_whole:
            self._on_progress()
        self._sort(planned, definitions)
        runs = [self._run(lease, each.timer, definitions[each.timer.id]) for each in planned]
        planned, runs, put_off = self._overlaps.admit(lease, planned, runs)
        settled += put_off
        if self._announcer.is_heard:
            self._announcer.prepared(definitions, planned, runs)
        self._commit_meter.prepared(runs)
        runs = self._journeys.begin(planned, runs, now_ms, CONFIRMED if link is None else ATOMIC)
        point("between_due_and_publish")
        if not self._may_send(lease):
            return [], False
        outcomes = self._publish(lease, runs, link)
        for plan, run, outcome in zip(planned, runs, outcomes, strict=False):
            settled.extend(self._settlements(plan, run, outcome))
        if self._journeys.are_open:
            self._journeys.published(planned, outcomes)
        self._on_progress()
        self._say_refused(runs, outcomes)
        _log_sent(runs, outcomes)
        is_down = any(isinstance(outcome, BrokerDownError) for outcome in outcomes)
        tally.broker_down = tally.broker_down or is_down
        return settled, is_whole and len(outcomes) == len(runs) and not is_down

    def _last_runs_ms(
        self,
        definitions: Mapping[str, Definition | InvalidTimerError | None],
    ) -> dict[str, int]:
        """Return when timers ran last, or were created, whose schedules are code and ask for it."""
        asking = [
            id
            for id, each in definitions.items()
            if isinstance(each, Definition)
            and each.code_bound
            and isinstance(each.schedule, Custom)
        ]
        return {
            state.id: state.created_ms if state.last_run_ms is None else state.last_run_ms
            for state in (self._store.states(asking)[1] if asking else ())
            if state is not None
        }

    def _sort(
        self,
        planned: list[Settlement],
        definitions: Mapping[str, Definition | InvalidTimerError | None],
    ) -> None:
        """Put the most urgent runs of a batch first, and leave the others in their order."""
        found = [definitions[settlement.timer.id] for settlement in planned]
        due = [each for each in found if isinstance(each, Definition)]  # all are: else not sent
        if len({each.task for each in due}) == 1 and not any(map(_has_options, due)):
            return  # as most batches
        urgencies = map(self._broker.urgency, due)
        order = sorted(enumerate(urgencies), key=itemgetter(1))
        planned[:] = [planned[place] for place, _ in order]

    def _publish(
        self, lease: Lease, runs: Sequence[Run], link: Link | None
    ) -> Sequence[Outcome | Message]:
        """Hand runs to the broker, or return their messages for the commit to do so."""
        if not runs:
            return []
        if link is not None:
            return self._broker.build(runs)
        if not self._mode.is_known():
            return [BrokerDownError("whether the commit may push is not known yet")]
        return self._broker(runs, lambda: self._may_send(lease))

    def _run(
        self, lease: Lease, timer: DueTimer, definition: Definition | InvalidTimerError | None
    ) -> Run:
        assert isinstance(definition, Definition)  # noqa: S101 - else it would not be sent
        resent, known_id = resent_of(timer.id) if timer.parent else (0, "")
        if timer.parent and is_requeued(timer.id) and is_one_message(timer.id, definition):
            known_id = requeued_task_id(timer.id)
        return Run(
            self._store.settings.service,
            lease.instance,
            timer.parent or timer.id,
            timer.id,
            int(timer.created),
            timer.due_ms,
            timer.run_number,
            definition,
            resent=resent,
            known_id=known_id,  # sent again, a run stays the same
        )

    def _settlements(
        self, planned: Settlement, run: Run, outcome: Outcome | Message
    ) -> Iterator[Settlement]:
        """Yield what is to be committed for a run: nothing when the broker is down."""
        if isinstance(outcome, Message):
            yield planned.pushing(outcome) if outcome.targets else planned
        elif outcome is None:
            yield planned
        elif isinstance(outcome, RefusedError):
            yield self._refused(planned, str(outcome))
        elif isinstance(outcome, UnsendableError):
            name = shown(run.definition.name)
            logger.error("Timer %s is broken and set aside: %s", name, outcome)
            yield Settlement(planned.timer, "broken", reason=str(outcome))

    def _refused(self, planned: Settlement, why: str) -> Settlement:
        """Return what becomes of a run that the broker has refused: it is tried again, for long."""
        timer = planned.timer
        self._commit_meter.refused()
        if timer.refusals < self._max_refusals:
            return refused(timer)
        logger.error("Timer %s: a run was refused %s times: %s", timer.id, timer.refusals, why)
        skip = planning.refuse(planned.skip, timer.due_ms, planning.REFUSED)
        return planned._replace(done="dead", skip=skip, message=None, reason=why)

    # -- commit

    def _begin(self, lease: Lease, settled: list[Settlement], link: Link | None, skip: int) -> None:
        """Start to commit a batch and to read the next; `_settle` waits for it."""
        self._unsettled, self._link = settled, link
        point("between_publish_and_commit")
        reading = self._reading(link, skip)
        batch = _first_of(settled)
        answer = None
        if batch:
            is_last = len(batch) == len(settled)
            with contextlib.suppress(StoreUnavailableError):  # who waits for it tries once more
                answer = self._send(lease, batch, reading if is_last else None)
        self._committing = _Committing(reading, batch, answer)

    def _settle(self, lease: Lease, tally: _Tally) -> Turn | None:
        """Commit what is unsettled; return what is due after it, None when that was not read."""
        committing, self._committing = self._committing, None
        reading, batch, answer = committing or (None, [], None)
        following = None
        while self._unsettled:
            batch = batch or _first_of(self._unsettled)
            is_last = len(batch) == len(self._unsettled)
            committed = self._commit(lease, batch, reading if is_last else None, answer, tally)
            batch, settled, answer = [], batch, None
            self._answered = self._clock()
            del self._unsettled[: len(settled)]
            if committed is None:
                continue
            following = committed.turn
            self._on_commit(self._epoch, self._sequence, committed.is_short)
            self._commit_meter.committed(settled, committed)
            self._sequence += 1
            self._on_progress()
            put_off = self._look_at(lease, settled, committed, tally)
            if put_off:
                self._unsettled += put_off
                tally.is_cut_short = True
        point("after_commit")
        self._overlaps.revoke_others()
        if following is None or tally.is_cut_short:
            return None
        return self._checked(lease, following)

    def _send(
        self, lease: Lease, batch: Sequence[Settlement], reading: Reading | None
    ) -> Callable[[], Committed]:
        """Send a commit; return what waits for its answer."""
        if lease.epoch != self._epoch:
            self._epoch, self._sequence = lease.epoch, 1
        return self._store.begin_commit(
            lease.instance,
            lease.epoch,
            self._sequence,
            batch,
            reading=reading,
            link=self._link,
        )

    def _commit(
        self,
        lease: Lease,
        batch: Sequence[Settlement],
        reading: Reading | None,
        answer: Callable[[], Committed] | None,
        tally: _Tally,
    ) -> Committed | None:
        """Commit a batch, twice when the first reply is lost; return None when it may not push.

        The first try may have been sent before: then ``answer`` waits for it.
        """
        for _ in range(_COMMIT_TRIES):
            try:
                answer, waiting = None, answer or self._send(lease, batch, reading)
                return waiting()
            except FencedError:
                self._unsettled = []
                raise
            except UnlinkedError as exc:
                logger.warning("%s runs wait: %s", len(batch), exc)
                self._mode.doubt()
                tally.is_cut_short = True
                return None
            except StoreUnavailableError as exc:
                failure = exc
        raise failure

    def _look_at(
        self, lease: Lease, batch: Sequence[Settlement], committed: Committed, tally: _Tally
    ) -> list[Settlement]:
        """Count and announce what was committed; return what is to be put off."""
        errors = iter(committed.errors)
        is_heard, are_traced = self._announcer.is_heard, self._journeys.are_open
        put_off: list[Settlement] = []
        unsettled: list[str] = []
        for settlement, code in zip(batch, committed.codes, strict=True):
            message = settlement.message
            if are_traced:
                self._journeys.settled(settlement, code)
            if code == COMMITTED:
                if message is not None and message.published is not None:
                    message.published()
                if is_heard:
                    self._announcer.settled(settlement, lease.instance)
                if settlement.done == "broken" or is_countdown_id(settlement.timer.id):
                    self._definitions.forget(settlement.timer.id)
            elif code == PUSH_REFUSED:
                put_off.extend(self._refused_push(settlement, next(errors), tally))
                continue
            else:
                unsettled.append(f"{settlement.timer.id} ({COMMIT_REFUSALS[code]})")
            self._overlaps.settled(settlement, code, lease.instance)
            if code == COMMITTED or message is None:
                tally.counts[settlement.done] += 1
        if count := self._not_committed.add(len(unsettled)):
            logger.info("%s timers were not committed: %s ...", count, unsettled[0])
        return put_off

    def _say_refused(self, runs: Sequence[Run], outcomes: Sequence[Outcome | Message]) -> None:
        """Log refusals in one line, since they mostly have one reason, and it mostly lasts."""
        pairs = zip(runs, outcomes, strict=False)
        refused = [(run, outcome) for run, outcome in pairs if isinstance(outcome, RefusedError)]
        if count := self._not_sent.add(len(refused)):
            first, why = refused[0]
            name = shown(first.definition.name)
            logger.warning("%s messages not sent, tried again; %s: %s", count, name, why)

    def _refused_push(
        self, settlement: Settlement, error: str, tally: _Tally
    ) -> Iterator[Settlement]:
        """Yield what is to be committed for a timer whose message Redis did not take."""
        logger.debug("Timer %s: its message was refused: %s", settlement.timer.id, error)
        if is_passing(error):
            tally.broker_down = tally.is_cut_short = True
        elif is_forbidden(error):
            self._mode.refuse(f"the timers' Redis user may not push: {error}")
            tally.is_cut_short = True
        else:
            yield self._refused(settlement, error)


def _has_options(definition: Definition) -> bool:
    return bool(definition.options) or definition.message is not None


def _without(timers: Sequence[DueTimer], known: Iterable[DueTimer]) -> list[DueTimer]:
    """Return each timer once, without the known: those were not committed when it was read."""
    ids = {timer.id for timer in known}
    found = {timer.id: timer for timer in timers if timer.id not in ids}
    return list(found.values())


def _first_of(settlements: list[Settlement]) -> list[Settlement]:
    """Return those that one commit takes: what is more than it takes goes alone."""
    size = pushes = 0
    for count, settlement in enumerate(settlements):
        if settlement.message is not None:
            pushes += len(settlement.message.values)
            size += sum(len(str(value)) for value in settlement.message.values)
            if count and (size > _COMMIT_BYTES or pushes > _COMMIT_PUSHES):
                return settlements[:count]
    return settlements[:]


def _decide(
    timer: DueTimer,
    definition: Definition | InvalidTimerError | None,
    now_ms: int,
    defaults: Defaults,
    last_run_ms: int | None,
) -> Settlement:
    """Return what is to be done with a due timer: ``run`` when it is to be sent."""
    if not isinstance(definition, Definition):
        return _set_aside(timer, definition)
    if timer.parent or definition.message is not None:
        return Settlement(timer, "run")
    due_ms, is_sent = timer.due_ms, timer.is_sent
    number = 1 if definition.policy.max_runs is None else timer.run_number
    try:
        if last_run_ms is not None and not is_sent:
            plan = planning.ask(definition, due_ms, now_ms, last_run_ms, number=number)
        else:
            plan = planning.plan(
                definition, due_ms, now_ms, number, is_sent, defaults, timer.has_waited
            )
    except Exception as exc:  # its schedule fails: that must not stop the others
        return _set_aside(timer, InvalidTimerError(f"its schedule fails: {exc!r}"))
    next_due_ms, skip, sends, at_ms = plan
    summary = definition.summary if next_due_ms is None else ""
    return Settlement(timer, "run" if sends else "skip", next_due_ms, skip, summary, at_ms=at_ms)


def _set_aside(timer: DueTimer, why: InvalidTimerError | None) -> Settlement:
    if why is None:
        state = timer.status or "gone"
        logger.error("Timer %s is not an active one (%s): out of the queue", timer.id, state)
        return Settlement(timer, "missing")
    if isinstance(why, (LackingError, NewerError)):
        level = logging.DEBUG if timer.refusals else logging.WARNING
        logger.log(level, "Timer %s is left to another instance: %s", timer.id, why)
        schema = why.schema if isinstance(why, NewerError) else 0
        return Settlement(timer, "lacking", delay_ms=_LACKING_MS, schema=schema)
    logger.error("Timer %s is broken and set aside: %s", timer.id, why)
    return Settlement(timer, "broken" if timer.is_readable else "unreadable", reason=str(why))


def _log_sent(runs: Sequence[Run], outcomes: Sequence[Outcome | Message]) -> None:
    if logger.isEnabledFor(logging.DEBUG):
        for run, outcome in zip(runs, outcomes, strict=False):
            if outcome is None or isinstance(outcome, Message):
                name, task = shown(run.definition.name), run.definition.task
                at, id = run.header["scheduled_at"], run.task_id
                logger.debug("Sent %s (%s) scheduled at %s as task %s", name, task, at, id)
