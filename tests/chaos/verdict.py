"""The account of an episode: for each timer, expected = sent + skipped with a reason + pending.

What is expected comes from `oracle` and from what the workload asked for, what was sent from
`ledger`. A run that is neither sent, nor skipped, nor pending is *lost*. Where Redis itself lost
what it had acknowledged, the runs that went with it are counted by themselves.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tests.chaos.history import SkipNote
from tests.chaos.ledger import Book, Gap
from tests.chaos.oracle import Every, Once, Rule
from tests.chaos.workload import Change, Planned, Request
from tests.ledger import SentRun

#: So long before the end of a timer its last runs may have been waiting for a fault to be mended,
#: if that was not going on for longer.
UNSENT_MS = 10_000

_UNSEEN_MS = 1000  # by which a message that nobody could see may have been late

_REASONS = {"paused", "coalesced", "misfire", "backlog", "superseded"}


class Stored(NamedTuple):
    """What is stored of a timer at the end."""

    status: str
    due_ms: int | None


class Window(NamedTuple):
    """A time in which a fault may have had an effect."""

    name: str
    from_ms: int
    until_ms: int

    def has(self, moment_ms: int) -> bool:
        """Say whether a moment lies in it."""
        return self.from_ms <= moment_ms <= self.until_ms


@dataclass
class Evidence:
    """All that an episode has left behind.

    Attributes:
        windows: of the faults, in order.
        doubling: times in which confirmed dispatch may send a run again.
        replays: times whose writes Redis lost although it had acknowledged them.
        ended_ms: when the state at the end was read.
        settled_ms: everything that was due at this moment is to be done by then.
    """

    book: Book
    planned: Mapping[str, Planned]
    skips: Mapping[str, Sequence[SkipNote]]
    stored: Mapping[str, Stored]
    is_atomic: bool
    triggers: Sequence[Request] = ()
    calls: Sequence[Request] = ()
    windows: Sequence[Window] = ()
    doubling: Sequence[Window] = ()
    replays: Sequence[Window] = ()
    ended_ms: int = 0
    settled_ms: int = 0

    def fault_at(self, moment_ms: int) -> str:
        """Return the fault that began last before a moment."""
        found = "none yet"
        for window in self.windows:
            if window.from_ms > moment_ms:
                break
            found = window.name
        return found


@dataclass
class Tally:
    """What became of the runs of one row of the table."""

    expected: int = 0
    sent: int = 0
    skipped: int = 0
    pending: int = 0
    lost: int = 0
    lost_by_redis: int = 0
    doubled: int = 0
    replayed: int = 0
    late_ms: list[int] = field(default_factory=list)

    def add(self, other: Tally) -> None:
        """Add what another tally has."""
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


@dataclass
class Verdict:
    """What came of it: the tallies by fault, and all that is wrong."""

    tallies: dict[str, Tally] = field(default_factory=lambda: defaultdict(Tally))
    reasons: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    doubtful: set[str] = field(default_factory=set)  #: timers with which something is wrong

    @property
    def total(self) -> Tally:
        """All rows together."""
        total = Tally()
        for tally in self.tallies.values():
            total.add(tally)
        return total


@dataclass(frozen=True, slots=True)
class Span:
    """A time in which a timer went by one rule, from a change to another one."""

    rule: Rule
    begin: Change
    end: Change | None


def judge(evidence: Evidence) -> Verdict:
    """Return the account of an episode."""
    verdict = Verdict()
    runs: dict[str, list[SentRun]] = defaultdict(list)
    for run in evidence.book.runs:
        runs[run.name].append(run)
    for name in sorted(runs.keys() - evidence.planned.keys()):
        verdict.problems.append(f"{len(runs[name])} runs of {name!r}, which nobody has created")
    on_demand = {request.key for request in evidence.triggers}
    for name, timer in evidence.planned.items():
        if name in on_demand:
            requests = [request for request in evidence.triggers if request.key == name]
            _judge_requests(evidence, verdict, name, requests, runs[name])
        else:
            _TimerJudge(evidence, verdict, timer, runs[name]).judge()
    _judge_calls(evidence, verdict)
    verdict.problems += [
        f"a message that can not be read: {text}" for text in evidence.book.strange
    ]
    _judge_task_ids(evidence, verdict)
    return verdict


def _is_of_before(note: SkipNote, begin: Change) -> bool:
    """Say whether a skipped run is one of the rule before: it tells nothing of the new one."""
    is_superseded = begin.what == "rescheduled" and note.reason == "superseded"
    return is_superseded and note.first_ms <= begin.until_ms


class _TimerJudge:
    """Judges the runs of one timer."""

    def __init__(
        self, evidence: Evidence, verdict: Verdict, timer: Planned, runs: Sequence[SentRun]
    ) -> None:
        self.evidence, self.verdict, self.timer, self.runs = evidence, verdict, timer, runs
        self.skips = evidence.skips.get(timer.id, ())
        self.sent: dict[int, list[SentRun]] = defaultdict(list)
        for run in runs:
            self.sent[run.scheduled_ms].append(run)
        self.spans = list(self._spans())
        self.in_doubt: set[Span] = set()  # those of whose last run nobody knows

    def problem(self, text: str, moment_ms: int) -> None:
        """Note something that is wrong."""
        fault = self.evidence.fault_at(moment_ms)
        self.verdict.problems.append(f"{self.timer.name} ({fault}): {text}")
        self.verdict.doubtful.add(self.timer.name)

    def tally(self, moment_ms: int) -> Tally:
        """Return the row to which a moment belongs."""
        return self.verdict.tallies[self.evidence.fault_at(moment_ms)]

    # What is expected

    def _spans(self) -> Iterator[Span]:
        begin: Change | None = None
        for change in self.timer.changes:
            if change.what not in ("created", "rescheduled", "deleted", "lost"):
                continue
            if begin is not None:
                yield self._span(begin, change)
            begin = change if change.rule is not None else None
        if begin is not None:
            yield self._span(begin, None)

    def _span(self, begin: Change, end: Change | None) -> Span:
        rule = begin.rule
        assert rule is not None
        if isinstance(rule, Every) and rule.anchor_ms is None:
            until_ms = end.until_ms if end else self.evidence.ended_ms
            skips = {note.first_ms for note in self.skips if not _is_of_before(note, begin)}
            for moment_ms in sorted({*self.sent, *skips}):
                if begin.from_ms < moment_ms <= until_ms and rule.may_start(
                    moment_ms, begin.from_ms, begin.until_ms
                ):
                    return Span(rule.anchored(moment_ms), begin, end)
        return Span(rule, begin, end)

    def _moments(self, span: Span) -> tuple[list[int], set[int]]:
        """Return the runs of a span, and those of them that there may be or not."""
        begin, end = span.begin, span.end
        if isinstance(span.rule, Once):
            return [span.rule.at_ms], set()
        until_ms = end.until_ms if end else self.evidence.ended_ms
        moments = span.rule.moments(begin.from_ms, until_ms)
        return moments, {
            moment
            for moment in moments
            if moment <= begin.until_ms or (end is not None and moment > end.from_ms)
        }

    # What came of it

    def judge(self) -> None:
        """Compare what was expected with what there is."""
        skipped = self._skipped()
        known: set[int] = set()
        for span in self.spans:
            known |= self._judge_span(span, skipped)
        for moment_ms in sorted(self.sent.keys() - known):
            self.problem(f"a run for {moment_ms}, at which none was due", moment_ms)
        for moment_ms, runs in self.sent.items():
            self._judge_copies(moment_ms, runs)
        self._judge_paused()
        if self.evidence.is_atomic:
            self._judge_numbers()

    def _judge_span(self, span: Span, skipped: set[int]) -> set[int]:
        moments, optional = self._moments(span)
        pending_from_ms = self._pending_from(span, moments, skipped)
        for moment_ms in moments:
            tally = self.tally(moment_ms)
            if moment_ms in self.sent:
                tally.expected += 1
                tally.sent += 1
                started_ms = max(moment_ms, span.begin.from_ms)
                tally.late_ms.append(max(0, self.sent[moment_ms][0].seen_ms - started_ms))
                if moment_ms in skipped and not self._may_be_told_twice(moment_ms):
                    self.problem(
                        f"the run for {moment_ms} was sent, and counted as skipped", moment_ms
                    )
            elif moment_ms in skipped:
                tally.expected += 1
                tally.skipped += 1
            elif moment_ms not in optional:
                self._judge_missing(span, moment_ms, pending_from_ms)
        return set(moments)

    def _judge_missing(self, span: Span, moment_ms: int, pending_from_ms: int) -> None:
        tally = self.tally(moment_ms)
        tally.expected += 1
        if moment_ms >= pending_from_ms:
            if span.end is not None and span.end.what == "lost":
                tally.lost_by_redis += 1
            else:
                tally.pending += 1
        elif _lies_in(self.evidence.book.gaps, moment_ms):
            tally.lost_by_redis += 1
        elif span not in self.in_doubt and self._is_in_doubt(span):
            self.in_doubt.add(span)
            tally.pending += 1
        else:
            tally.lost += 1
            self.problem(f"the run for {moment_ms} was neither sent nor skipped", moment_ms)

    def _is_in_doubt(self, span: Span) -> bool:
        """Say whether nobody knows yet if the last run of a span is out.

        Its owner may have been publishing it when the timer got another schedule; the next commit
        of the timer counts it, unless the timer is deleted before.
        """
        change = span.end
        if self.evidence.is_atomic or change is None or change.what != "rescheduled":
            return False
        ends = (c.from_ms for c in self.timer.changes if c.what in ("deleted", "lost"))
        until_ms = min((moment for moment in ends if moment > change.until_ms), default=None)
        until_ms = self.evidence.ended_ms if until_ms is None else until_ms
        return not any(change.until_ms < run.seen_ms <= until_ms for run in self.runs)

    def _pending_from(self, span: Span, moments: list[int], skipped: set[int]) -> int:
        """Return the moment from which on the runs of a span were still to come when it ended."""
        if span.end is not None and span.end.what == "rescheduled":
            return span.end.until_ms + 1  # what was due by then is skipped as superseded
        if span.end is not None:
            done = [moment for moment in moments if moment in self.sent or moment in skipped]
            waiting_ms = min(self._waiting_from(span.end.from_ms), self._paused_from(span.end))
            return max(max(done, default=0) + 1, waiting_ms)
        return self._pending_now(span, moments)

    def _paused_from(self, end: Change) -> int:
        """Return when a timer was paused that was so when it ended: until then, nothing tells."""
        before = [change for change in self.timer.changes if change.until_ms <= end.from_ms]
        is_paused = bool(before) and before[-1].what == "paused"
        return self._waiting_from(before[-1].from_ms) if is_paused else end.from_ms

    def _waiting_from(self, moment_ms: int) -> int:
        """Return since when runs may have been waiting for a fault to be mended."""
        open_ms = [each.from_ms for each in self.evidence.windows if each.has(moment_ms)]
        return min([moment_ms - UNSENT_MS, *open_ms])

    def _pending_now(self, span: Span, moments: list[int]) -> int:
        stored, evidence = self.evidence.stored.get(self.timer.name), self.evidence
        if stored is None:
            self.problem("is not stored any more", evidence.ended_ms)
            return evidence.ended_ms
        expected = "paused" if self.timer.status == "paused" else "active"
        if isinstance(span.rule, Once):
            expected = "stopped" if span.rule.at_ms <= evidence.settled_ms else stored.status
        if stored.status != expected:
            self.problem(f"is {stored.status}; it was left {expected}", evidence.ended_ms)
        due_ms = evidence.ended_ms if stored.due_ms is None else stored.due_ms
        if stored.status == "active" and due_ms < evidence.settled_ms and moments:
            late = evidence.ended_ms - due_ms
            self.problem(f"is {late} ms overdue at the end", due_ms)
        return due_ms

    def _skipped(self) -> set[int]:
        """Return the moments that the product counts as skipped, each compared with the rule."""
        skipped: set[int] = set()
        for note in self.skips:
            span = self._span_of(note)
            if span is None:
                self.problem(
                    f"skipped runs from {note.first_ms} on, where none was due", note.at_ms
                )
                continue
            moments = span.rule.moments(note.first_ms - 1, note.until_ms)
            if len(moments) != note.runs:
                text = f"{note.runs} runs from {note.first_ms} to {note.until_ms} were skipped"
                self.problem(f"{text} ({note.reason}); there were {len(moments)}", note.at_ms)
            skipped.update(moments)
            self.verdict.reasons[note.reason] += note.runs
            if not self._fits(note):
                self.problem(f"skipped as {note.reason}, which can not be", note.at_ms)
        return skipped

    def _span_of(self, note: SkipNote) -> Span | None:
        for span in self.spans:
            end_ms = span.end.until_ms if span.end else self.evidence.ended_ms
            is_run = bool(span.rule.moments(note.first_ms - 1, note.first_ms))
            if span.begin.from_ms - UNSENT_MS <= note.first_ms <= end_ms and is_run:
                return span
        return None

    def _fits(self, note: SkipNote) -> bool:
        """Say whether a reason can be, by what was asked of the timer."""
        policy, changes = self.timer.policy, self.timer.changes
        near = [
            c.what for c in changes if c.from_ms <= note.at_ms + 1 and c.until_ms >= note.first_ms
        ]
        return {
            "coalesced": policy.get("coalesce", True),
            "backlog": not policy.get("coalesce", True),
            "misfire": "misfire_grace_time" in policy,
            "paused": "resumed" in near or ("rescheduled" in near and self._is_ever("paused")),
            "superseded": "rescheduled" in near,
        }.get(note.reason, False)

    def _is_ever(self, what: str) -> bool:
        return any(change.what == what for change in self.timer.changes)

    def _may_be_told_twice(self, moment_ms: int) -> bool:
        """Say whether a run may be sent and skipped: it was out when its commit was lost."""
        excuses = [
            *self.evidence.replays,
            *(() if self.evidence.is_atomic else self.evidence.doubling),
        ]
        sent = self.sent[moment_ms]
        return any(_within(excuses, run.seen_ms) for run in sent)

    def _judge_copies(self, moment_ms: int, runs: Sequence[SentRun]) -> None:
        early = [run for run in runs if run.lag_ms < 0]
        if early:
            self.problem(f"the run for {moment_ms} came {-early[0].lag_ms} ms early", moment_ms)
        if len(runs) == 1:
            return
        if len({run.task_id for run in runs}) > 1:
            self.problem(f"the run for {moment_ms} came with several task ids", moment_ms)
        tally = self.tally(moment_ms)
        if any(_within(self.evidence.replays, run.seen_ms) for run in runs):
            tally.replayed += len(runs) - 1
            return
        tally.doubled += len(runs) - 1
        is_excused = any(_within(self.evidence.doubling, run.seen_ms) for run in runs)
        if self.evidence.is_atomic or not is_excused:
            seen = ", ".join(f"{run.seen_ms} by {run.instance}" for run in runs)
            self.problem(f"the run for {moment_ms} came {len(runs)} times: {seen}", moment_ms)

    def _judge_paused(self) -> None:
        """Find runs for moments at which the timer was paused."""
        paused: Change | None = None
        for change in self.timer.changes:
            if paused is not None:
                for moment_ms in self.sent:
                    if paused.until_ms < moment_ms < change.from_ms:
                        self.problem(f"a run for {moment_ms}, while it was paused", moment_ms)
            paused = change if change.what == "paused" else None

    def _judge_numbers(self) -> None:
        """Find messages of a former owner: the numbers of what reached the broker grow by one."""
        ends = [change for change in self.timer.changes if change.what in ("lost", "deleted")]
        last = 0
        for run in self.runs:
            begins_anew = run.number == 1 and any(change.from_ms <= run.seen_ms for change in ends)
            was_replayed = _within(self.evidence.replays, run.seen_ms)
            if run.number != last + 1 and not begins_anew and not was_replayed:
                self.problem(
                    f"run {run.number} of {run.instance} came after run {last}", run.scheduled_ms
                )
            last = run.number


def _judge_requests(
    evidence: Evidence,
    verdict: Verdict,
    name: str,
    requests: Sequence[Request],
    runs: Sequence[SentRun],
) -> None:
    """Compare triggers with what was sent: one message each, or one for each try that may count."""
    unused = list(runs)
    for request in requests:
        tally = verdict.tallies[evidence.fault_at(request.from_ms)]
        found = [run for run in unused if request.from_ms <= run.scheduled_ms <= request.until_ms]
        copies = len(found) - len({run.scheduled_ms for run in found})
        unused = [run for run in unused if run not in found]
        tally.expected += 1
        tally.sent += bool(found)
        tally.late_ms += [max(0, run.lag_ms) for run in found]
        if copies and _within(evidence.replays, found[0].seen_ms):
            tally.replayed += copies
        elif copies:
            tally.doubled += copies
            if evidence.is_atomic or not any(
                _within(evidence.doubling, run.seen_ms) for run in found
            ):
                verdict.problems.append(f"{name}: a trigger of {request.from_ms} was sent twice")
        if len(found) - copies > request.tries:
            verdict.problems.append(f"{name}: {len(found)} runs of a trigger of {request.from_ms}")
        if not found:
            _judge_unsent(evidence, verdict, tally, request, f"{name}: a trigger")
    verdict.problems += [f"{name}: a run for {run.scheduled_ms}, not asked for" for run in unused]


def _judge_calls(evidence: Evidence, verdict: Verdict) -> None:
    """Compare countdowns with what was sent: one message for each call."""
    seen: dict[str, list[int]] = defaultdict(list)
    for call in evidence.book.calls:
        seen[call.task_id].append(call.seen_ms)
    for request in evidence.calls:
        tally = verdict.tallies[evidence.fault_at(request.due_ms)]
        found = seen.pop(request.key, [])
        tally.expected += 1
        tally.sent += bool(found)
        tally.late_ms += [
            max(0, moment - request.until_ms - (request.due_ms - request.from_ms))
            for moment in found[:1]
        ]
        if found and found[0] < request.due_ms:
            verdict.problems.append(
                f"the call {request.key} came {request.due_ms - found[0]} ms early"
            )
        if len(found) > 1 and any(_within(evidence.replays, moment) for moment in found):
            tally.replayed += len(found) - 1
        elif len(found) > 1:
            tally.doubled += len(found) - 1
            excused = not evidence.is_atomic and any(_within(evidence.doubling, at) for at in found)
            # A try whose answer was lost, and that was sent before the next, is a call of its own.
            if len(found) > request.tries and not excused:
                verdict.problems.append(f"the call {request.key} came {len(found)} times")
        if not found:
            _judge_unsent(evidence, verdict, tally, request, f"the call {request.key}")
    verdict.problems += [f"a call {key} that nobody has made" for key in seen]


def _judge_unsent(
    evidence: Evidence, verdict: Verdict, tally: Tally, request: Request, what: str
) -> None:
    if request.may_be_lost:
        tally.lost_by_redis += 1
    elif request.until_ms + (request.due_ms - request.from_ms) > evidence.settled_ms:
        tally.pending += 1
    elif _lies_in(evidence.book.gaps, request.due_ms):
        tally.lost_by_redis += 1
    else:
        tally.lost += 1
        verdict.problems.append(f"{what} of {request.from_ms} was never sent")


def story_of(evidence: Evidence, name: str) -> str:
    """Return all that is known of a timer, in the order in which it came."""
    timer = evidence.planned[name]
    told = [
        (change.from_ms, f"{change.what} until {change.until_ms}: {change.rule}")
        for change in timer.changes
    ]
    told += [(note.at_ms, f"skipped: {note}") for note in evidence.skips.get(timer.id, ())]
    for run in evidence.book.runs:
        if run.name == name:
            text = f"sent: run {run.number} for {run.scheduled_ms} by {run.instance}, {run.task_id}"
            told.append((run.seen_ms, text))
    told += [
        (window.from_ms, f"-- {window.name} until {window.until_ms}") for window in evidence.windows
    ]
    lines = [f"{moment_ms} {text}" for moment_ms, text in sorted(told)]
    head = f"== {name}, id {timer.id}, {timer.policy}, stored {evidence.stored.get(name)}"
    return "\n".join([head, *lines, f"{evidence.ended_ms} the end", ""])


def _judge_task_ids(evidence: Evidence, verdict: Verdict) -> None:
    """Find task ids that stand for two runs."""
    run_of: dict[str, tuple[str, int]] = {}
    for run in evidence.book.runs:
        if run_of.setdefault(run.task_id, run.slot) != run.slot:
            verdict.problems.append(f"{run.slot} and {run_of[run.task_id]} have one task id")


def _within(windows: Iterable[Window], moment_ms: int) -> bool:
    return any(window.has(moment_ms) for window in windows)


def _lies_in(gaps: Iterable[Gap], moment_ms: int) -> bool:
    """Say whether a message for a moment may have come when nobody could see it."""
    return any(gap.from_ms - _UNSEEN_MS <= moment_ms <= gap.until_ms for gap in gaps)
