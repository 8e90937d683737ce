"""Random histories of a service beside a plain model: crashes, zombies, lost replies, changes."""

from __future__ import annotations

import contextlib
import json
import os
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from celery_dtimer import consistency, planning
from celery_dtimer.errors import FencedError
from celery_dtimer.model import Definition, TimerState, new_trigger_id, schedule_part
from celery_dtimer.policy import PLAIN, Policy
from celery_dtimer.store import (
    BATCH,
    PUSH_REFUSED,
    Committed,
    DueTimer,
    Link,
    Message,
    Reading,
    Settlement,
    Turn,
    UnlinkedError,
)
from tests.conftest import delete_prefix
from tests.integration.conftest import SECOND, Service
from tests.servers import RedisServer

TRUST_MS = 27 * SECOND
ALIVE_AT_MOST = 4

NAMES = st.sampled_from("xxyz")
OUTCOMES = st.sampled_from(["sent", "sent", "sent", "sent", "refused", "broken"])
CHANGES = st.sampled_from(
    ["pause", "stop", "pause and resume", "edit", "reschedule", "delete", "create anew"]
)
FAULTS = st.sampled_from(["registration", "death", "false death"])
POLICIES = st.sampled_from(
    [
        *(PLAIN, PLAIN, PLAIN),
        *(Policy(coalesce=False), Policy(coalesce=False, max_catch_up=1)),
        *(Policy(grace_ms=1500), Policy(grace_ms=3000, coalesce=False)),
        *(Policy(jitter_ms=90), Policy(max_runs=2)),
    ]
)

RunKey = tuple[str, str, str]  # timer or trigger, its creation, scheduled_at


@dataclass
class Process:
    """What one beat process believes and holds."""

    id: str
    epoch: int | None = None
    heartbeat_ms: int = 0
    loop_epoch: int | None = None  #: of the registration under which it has read
    read: list[DueTimer] = field(default_factory=list)
    read_at_ms: int = 0
    read_after: int = 0  #: commits, of whomever
    unsettled: list[Settlement] = field(default_factory=list)
    sent: list[RunKey] = field(default_factory=list)
    sequence: int = 0
    is_alive: bool = True

    def trusts(self, now_ms: int) -> bool:
        """Say whether it believes that it may send."""
        return self.is_alive and self.epoch is not None and now_ms < self.heartbeat_ms + TRUST_MS


@dataclass
class Publication:
    """A message that reached the broker, and which commit's script has recorded that."""

    process: Process
    recorded_by: int | None = None


@dataclass
class Account:
    """From where the slots of an interval timer are counted: each must be a run or skipped."""

    created_ms: int
    revision: str
    first_due_ms: int
    counted: int
    out: int = 0  #: runs that were published before, and may be counted yet


class Histories(RuleBasedStateMachine):
    """One service, up to four processes at a time, and users who change timers meanwhile."""

    def __init__(self, service: Service) -> None:
        super().__init__()
        self.service, self.store, self.clock = service, service.store, service.clock
        self.processes: list[Process] = []
        self.started = self.commits = 0
        self.definitions: dict[str, Definition] = {}  # by revision
        self.latest: dict[str, Definition] = {}  # by id: what is stored
        self.captured: TimerState | None = None
        self.published: defaultdict[RunKey, list[Publication]] = defaultdict(list)
        self.slots: defaultdict[tuple[str, str], set[int]] = defaultdict(set)
        self.accounts: dict[str, Account] = {}
        self.last_runs: dict[tuple[str, int], int] = {}
        self.triggers: dict[str, str] = {}  # trigger to parent
        self.set_aside: set[str] = set()  # triggers that could not be sent

    def teardown(self) -> None:
        """Whatever has happened: one live instance brings everything back in order."""
        self._start("last")
        process = self.processes[-1]
        assert process.epoch is not None
        for _ in range(4):
            self.service.let_pass(10, last=process.epoch)
            while self.store.reap("last", process.epoch).more:
                pass
        process.heartbeat_ms = self.clock()
        assert {state.owner for state in self._states() if state.status == "active"} <= {"last"}
        while self._read(process):
            self._publish(process, 1000, "sent")
            self._commit(process)
        now_ms = self.clock()
        for state in self._states():
            assert state.status != "active" or (state.at_ms or 0) > now_ms
            assert not state.parent
        assert all(self._was_sent(trigger) for trigger in self.triggers)
        self.nothing_is_inconsistent()
        self.no_run_is_lost()

    def _was_sent(self, trigger: str) -> bool:
        """Say whether a trigger was sent, or set aside for its own fault."""
        return trigger in self.set_aside or any(key[0] == trigger for key in self.published)

    # -- looks

    def _states(self) -> list[TimerState]:
        states = self.store.states(self.store.timer_ids())[1]
        return [state for state in states if state is not None]

    def _process(self, i: int) -> Process:
        return self.processes[i % len(self.processes)]

    # -- processes

    def _start(self, id: str) -> None:
        process = Process(id)
        self.processes.append(process)
        self._register(process)

    def _register(self, process: Process) -> None:
        process.epoch = self.service.join(process.id)
        process.heartbeat_ms = self.clock()

    @initialize()
    def begin(self) -> None:
        self.start()
        self.save_interval("x", 1, ())

    @precondition(lambda self: len(self.processes) < ALIVE_AT_MOST)
    @rule()
    def start(self) -> None:
        self.started += 1
        self._start(f"p{self.started}")

    @precondition(lambda self: self.processes)
    @rule(i=st.integers(0, 3))
    def heartbeat(self, i: int) -> None:
        process = self._process(i)
        if process.epoch is None:
            self._register(process)
            return
        try:
            self.store.heartbeat(process.id, process.epoch)
        except FencedError:
            self._register(process)
        process.heartbeat_ms = self.clock()

    @precondition(lambda self: self.processes)
    @rule(i=st.integers(0, 3))
    def kill(self, i: int) -> None:
        process = self._process(i)
        process.is_alive = False
        self.processes.remove(process)

    @precondition(lambda self: self.processes)
    @rule(i=st.integers(0, 3), limit=st.sampled_from([1, BATCH]))
    def leave(self, i: int, limit: int) -> None:
        process = self._process(i)
        self._commit(process)
        self.kill(self.processes.index(process))
        if process.epoch is not None:
            with contextlib.suppress(FencedError):
                self.store.leave(process.id, process.epoch, limit)

    @precondition(lambda self: self.processes)
    @rule(i=st.integers(0, 3), limit=st.sampled_from([1, 2, BATCH]))
    def reap(self, i: int, limit: int) -> None:
        process = self._process(i)
        self._as(process, lambda epoch: self.store.reap(process.id, epoch, limit))

    @precondition(lambda self: self.processes)
    @rule(i=st.integers(0, 3), limit=st.sampled_from([1, 2, BATCH]))
    def rebalance(self, i: int, limit: int) -> None:
        process = self._process(i)
        before = self.service.loads()
        moved = self._as(process, lambda epoch: self.store.rebalance(process.id, epoch, 0, limit))
        after = self.service.loads()
        if moved:
            surplus = sum(max(0, load - after[id]) for id, load in before.items())
            assert moved.count == surplus, "no timer moves twice, or in vain"

    @precondition(lambda self: self.processes)
    @rule(i=st.integers(0, 3), lag_ms=st.sampled_from([0, 2000]), limit=st.sampled_from([1, BATCH]))
    def steal(self, i: int, lag_ms: int, limit: int) -> None:
        process = self._process(i)
        self._as(process, lambda epoch: self.store.steal(process.id, epoch, lag_ms, limit))

    @precondition(lambda self: self.processes)
    @rule(i=st.integers(0, 3), broker=st.sampled_from(["up", "up", "down"]))
    def report(self, i: int, broker: str) -> None:
        process = self._process(i)
        fields = {"broker": broker}
        self._as(process, lambda epoch: self.store.report(process.id, epoch, fields))

    @precondition(lambda self: self.processes)
    @rule(i=st.integers(0, 3), limit=st.sampled_from([1, BATCH]))
    def give_up(self, i: int, limit: int) -> None:
        process = self._process(i)
        self._give_up(process, limit)

    def _give_up(self, process: Process, limit: int) -> None:
        if not process.sent:  # its broker is down: nothing of it is on the way
            process.read = []
            self._as(process, lambda epoch: self.store.give_up(process.id, epoch, limit))

    def _as(self, process: Process, call: Callable[[int], object]) -> object:
        if process.epoch is None:
            return None
        try:
            return call(process.epoch)
        except FencedError:
            process.epoch = None
            return None

    @rule(ms=st.sampled_from([1, 19, 500, 1000, 4000, 9000, 11_000, 27_000, 31_000]))
    def time_passes(self, ms: int) -> None:
        self.clock.now_ms += ms

    @rule(seconds=st.integers(1, 35))
    def time_passes_for_the_living(self, seconds: int) -> None:
        """All but the first process are heard meanwhile: it becomes a zombie in time."""
        for second in range(seconds):
            self.clock.now_ms += SECOND
            if second % 4 == 3 or second == seconds - 1:
                for i in range(1, len(self.processes)):
                    self.heartbeat(i)

    @rule()
    def scripts_are_flushed(self) -> None:
        self.service.redis.script_flush()

    # -- firing

    @precondition(lambda self: self.processes)
    @rule(i=st.integers(0, 3), limit=st.sampled_from([1, 3, 100]))
    def read(self, i: int, limit: int) -> None:
        self._read(self._process(i), limit)

    def _read(self, process: Process, limit: int = 100) -> list[DueTimer]:
        if process.unsettled or not process.trusts(self.clock()):
            return []
        turn = self._as(process, lambda epoch: self._due(process, epoch, limit))
        process.loop_epoch = process.epoch
        self._has_read(process, [] if turn is None else turn.timers)  # type: ignore[attr-defined]
        return process.read

    def _due(self, process: Process, epoch: int, limit: int) -> Turn:
        return self.store.due(process.id, epoch, Reading(limit, marks=True))

    def _has_read(self, process: Process, timers: list[DueTimer]) -> None:
        process.read, process.read_at_ms = timers, self.clock()
        process.read_after = self.commits

    @precondition(lambda self: self.processes)
    @rule(
        i=st.integers(0, 3),
        count=st.integers(1, 3),
        outcome=OUTCOMES,
    )
    def publish(self, i: int, count: int, outcome: str) -> None:
        process = self._process(i)
        if process.trusts(self.clock()):
            self._publish(process, count, outcome)

    def _publish(self, process: Process, count: int, outcome: str) -> None:
        batch, process.read = process.read[:count], process.read[count:]
        for timer in batch:
            assert timer.is_readable
            skipping = self._skipping(process, timer)
            if skipping is not None:
                process.unsettled.append(skipping)
                continue
            if outcome == "sent" and not timer.is_sent:
                self._send(process, timer)
            if outcome == "sent" or timer.is_sent:
                process.unsettled.append(self._ran(process, timer))
            elif outcome == "refused":
                delay_ms = round(planning.retry_delay(timer.refusals) * SECOND)
                process.unsettled.append(Settlement(timer, "refused", delay_ms=delay_ms))
            else:
                process.unsettled.append(Settlement(timer, "broken", reason="a reason"))

    def _send(self, process: Process, timer: DueTimer) -> None:
        now_ms, key = self.clock(), (timer.id, timer.created, timer.due)
        assert timer.due_ms <= now_ms, "sent early"
        for before in self.published[key]:
            if before.recorded_by is None:
                assert not before.process.trusts(now_ms), f"{key} is being sent by another"
            else:  # the other had lost the timer by then
                assert before.recorded_by > process.read_after, f"{key} is sent again"
        self.published[key].append(Publication(process))
        self.slots[timer.id, timer.created].add(timer.due_ms)
        process.sent.append(key)

    def _plan(self, process: Process, timer: DueTimer) -> planning.Plan:
        return planning.plan(
            self.definitions[timer.revision],
            timer.due_ms,
            process.read_at_ms,
            number=timer.run_number,
            is_sent=timer.is_sent,
        )

    def _skipping(self, process: Process, timer: DueTimer) -> Settlement | None:
        """Return what is done with a run that is not to be sent, None when it is."""
        plan = None if timer.parent else self._plan(process, timer)
        return None if plan is None or plan.sends else self._settlement(timer, "skip", plan)

    def _ran(self, process: Process, timer: DueTimer) -> Settlement:
        if timer.parent:
            return Settlement(timer, "run")
        return self._settlement(timer, "run", self._plan(process, timer))

    def _settlement(self, timer: DueTimer, done: str, plan: planning.Plan) -> Settlement:
        summary = self.definitions[timer.revision].summary
        return Settlement(timer, done, plan.next_due_ms, plan.skip, summary, at_ms=plan.at_ms)

    @precondition(lambda self: self.processes)
    @rule(i=st.integers(0, 3), reply_is_lost=st.booleans())
    def commit(self, i: int, reply_is_lost: bool) -> None:
        self._commit(self._process(i), reply_is_lost=reply_is_lost)

    def _commit(self, process: Process, *, reply_is_lost: bool = False) -> None:
        if process.loop_epoch is None or not process.unsettled:
            return
        epoch, committed = process.loop_epoch, Committed([], [], None)
        try:
            committed = self._settle(process, epoch, 0 if process.read else 3)
        except FencedError:
            reply_is_lost = False
            if process.epoch == epoch:
                process.epoch = None
        for settlement, code in zip(process.unsettled, committed.codes, strict=False):
            if settlement.timer.parent and settlement.done == "broken" and code == 1:
                self.set_aside.add(settlement.timer.id)
        self.commits += 1
        for key in process.sent:
            for publication in self.published[key]:
                if publication.process is process and publication.recorded_by is None:
                    publication.recorded_by = self.commits
        if reply_is_lost:
            process.loop_epoch = process.epoch  # it asks again, for the lease that it has by then
        else:
            process.sequence += 1
            process.unsettled, process.sent = [], []
            if committed.turn is not None:
                self._has_read(process, committed.turn.timers)

    def _settle(self, process: Process, epoch: int, limit: int) -> Committed:
        number, unsettled = process.sequence, process.unsettled
        return self.store.commit(
            process.id, epoch, number, unsettled, reading=Reading(limit, marks=True)
        )

    @precondition(lambda self: self.processes)
    @rule(i=st.integers(0, 3), outcome=OUTCOMES)
    def turn(self, i: int, outcome: str) -> None:
        self._turn(i, outcome, "nothing", "x")

    @precondition(lambda self: self.processes)
    @rule(i=st.integers(0, 3), name=NAMES, change=CHANGES, resume=st.booleans())
    def turn_while_a_user_acts(self, i: int, name: str, change: str, resume: bool) -> None:
        self._turn(i, "sent", change, name)
        if resume:
            self.resume(name)

    @precondition(lambda self: self.processes)
    @rule(i=st.integers(0, 3), fault=FAULTS)
    def turn_with_a_fault(self, i: int, fault: str) -> None:
        self._turn(i, "sent", fault, "x")

    def _turn(self, i: int, outcome: str, meanwhile: str, name: str) -> None:
        """Do what a loop does, with something that happens between publish and commit."""
        process = self._process(i)
        self._commit(process)
        self.clock.now_ms += SECOND
        self.heartbeat(i)
        self._read(process)
        self._publish(process, 100, outcome)
        self._happens(meanwhile, process, name)
        self._commit(process)

    def _happens(self, what: str, process: Process, name: str) -> None:
        if what in ("pause", "stop"):
            self.pause_or_stop(name, what == "stop")
        elif what == "pause and resume":
            self.pause_or_stop(name, is_stop=False)
            self.clock.now_ms += 3 * SECOND
            self.resume(name)
        elif what == "edit" and self.service.define(name).id in self.latest:
            self._save(replace(self.latest[self.service.define(name).id], args=(self.clock(),)))
        elif what == "reschedule":
            self.save_interval(name, 2.5, ())
        elif what in ("delete", "create anew"):
            self.delete(name)
            if what == "create anew":
                self.save_interval(name, 1, ())
        elif what == "registration":
            self._register(process)
        elif what == "death" and len(self.processes) > 1:
            self.kill(self.processes.index(process))
            process.unsettled = []
        elif what == "false death" and len(self.processes) > 1:
            self.processes.remove(process)
            self.processes.insert(0, process)
            self.time_passes_for_the_living(31)
            self.reap(1, BATCH)
            self._read(self.processes[1])

    # -- users

    @rule(
        name=NAMES,
        every=st.sampled_from([0.1, 1, 7]),
        args=st.sampled_from([(), (1,)]),
        policy=POLICIES,
    )
    def save_interval(
        self, name: str, every: float, args: tuple[int, ...], policy: Policy = PLAIN
    ) -> None:
        self._save(self.service.define(name, every=every, args=args, policy=policy))

    @rule(name=NAMES, seconds=st.sampled_from([-1, 0, 5, 40]), new=st.booleans())
    def save_one_shot(self, name: str, seconds: int, new: bool) -> None:
        at_ms = self.clock() + seconds * SECOND
        before = self.latest.get(self.service.define(name).id)
        if before is not None and not new:
            self._save(replace(before, args=(at_ms,)))
        else:
            self._save(self.service.define(name, at_ms=at_ms))

    def _save(self, definition: Definition) -> None:
        self.clock.now_ms += 1
        self.definitions[definition.revision] = definition
        before = self.store.states([definition.id])[1][0]
        self.store.save([definition])
        self._has_changed(definition, before)

    def _has_changed(self, definition: Definition, before: TimerState | None) -> None:
        self.latest[definition.id] = definition
        state = self.service.state(definition.id)
        account = self.accounts.get(definition.id)
        if (
            account is None
            or before is None
            or before.status == "broken"  # it starts anew, as with a new schedule
            or before.is_finished
            or before.due_ms is None  # it had ended
            or account.created_ms != state.created_ms
            or schedule_part(account.revision) != schedule_part(state.revision)
        ):
            counted = state.runs + state.skipped
            out = len(self.slots[definition.id, str(state.created_ms)]) - state.runs
            self.accounts[definition.id] = Account(
                state.created_ms, state.revision, state.due_ms or 0, counted, out
            )

    @precondition(lambda self: self.latest)
    @rule(name=NAMES)
    def capture(self, name: str) -> None:
        self.captured = self.store.states([self.service.define(name).id])[1][0]

    @precondition(lambda self: self.captured is not None)
    @rule(every=st.sampled_from([0.1, 1, 7]))
    def replace_what_was_captured(self, every: float) -> None:
        """A user's update that was slow: it must not overwrite what came between."""
        state, self.captured = self.captured, None
        assert state is not None
        before = self.latest.get(state.id)
        if before is None or state.is_finished:
            return
        definition = self.service.define(before.name, every=every, args=(2,))
        if definition.revision == state.revision:
            return  # there is nothing to write
        self.definitions[definition.revision] = definition
        current = self.store.states([state.id])[1][0]
        if self.store.replace(state, before, definition) and current is not None:
            assert (current.revision, current.status) == (state.revision, state.status)
            self._has_changed(definition, current)

    @rule(name=NAMES)
    def delete(self, name: str) -> None:
        id = self.service.define(name).id
        assert self.store.delete([id]) == [id in self.latest]
        self.latest.pop(id, None)
        self.accounts.pop(id, None)
        self.triggers = {key: parent for key, parent in self.triggers.items() if parent != id}

    @rule(name=NAMES, is_stop=st.booleans())
    def pause_or_stop(self, name: str, is_stop: bool) -> None:
        id = self.service.define(name).id
        code = self.store.stop(id) if is_stop else self.store.pause(id)
        assert (code == 0) == (id not in self.latest)

    @rule(name=NAMES)
    def resume(self, name: str) -> None:
        id = self.service.define(name).id
        state = self.store.states([id])[1][0]
        if state is None or state.status == "active" or state.is_finished:
            return
        plan = planning.resume(self.definitions[state.revision], state, self.clock())
        if plan.next_due_ms is None:
            return  # it has had its last run
        code = self.store.resume(state, plan)
        assert code == 1

    @rule(name=NAMES)
    def trigger(self, name: str) -> None:
        parent, trigger = self.service.define(name).id, new_trigger_id()
        if self.store.trigger(parent, trigger) == 1:
            self.triggers[trigger] = parent

    @rule()
    def purge(self) -> None:
        assert self.store.purge() == 0, "nothing is kept long enough in these histories"

    # -- what must always hold

    @invariant()
    def nothing_is_inconsistent(self) -> None:
        assert consistency.check(self.store) == []

    @invariant()
    def no_run_is_lost(self) -> None:
        states = {state.id: state for state in self._states() if not state.parent}
        assert states.keys() == self.latest.keys()
        for id, state in states.items():
            sent = self.slots[id, str(state.created_ms)]
            assert state.runs <= len(sent), "a run was counted that was not sent"
            account, definition = self.accounts[id], self.definitions[state.revision]
            if state.is_finished:
                assert state.runs >= 1
            elif state.reason == planning.ENDED:
                assert state.due_ms is None
            elif "every" in definition.schedule.encode():
                assert state.due_ms is not None
                every_ms = definition.schedule.encode()["every"]
                slots = (state.due_ms - account.first_due_ms) // every_ms
                late = state.runs + state.skipped - account.counted - slots
                assert 0 <= late <= account.out

    @invariant()
    def the_history_tells_all_that_is_counted(self) -> None:
        told: Counter[str] = Counter()
        for entry in self.store.history(0):
            told["sent"] += len(entry.get("sent", "").splitlines())
            for line in entry.get("skipped", "").splitlines():
                _, reason, count, first, until = line.split()
                assert int(first) <= int(until)
                told[f"skipped_{reason}"] += int(count)
        assert +told == Counter(self.store.counters())

    @invariant()
    def due_times_only_grow(self) -> None:
        for state in self._states():
            last = state.last_run_ms
            if last is None:
                continue
            assert state.due_ms is None or state.due_ms > last
            assert last >= self.last_runs.get((state.id, state.created_ms), 0)
            self.last_runs[state.id, state.created_ms] = last


class AtomicHistories(Histories):
    """Histories whose messages are pushed by the commits: what lies in the queue is the truth."""

    def __init__(self, service: Service) -> None:
        super().__init__(service)
        self.prefix = service.settings.key_prefix
        self.link = Link(0, "link", "a proof", self.prefix)
        self.is_spoilt = False
        service.redis.set(f"{self.prefix}link", "a proof")
        service.redis.set(f"{self.prefix}spoilt", "no list")

    def teardown(self) -> None:
        """Whatever has happened, the proof and the queue are as they should be by then."""
        self.is_spoilt = False
        super().teardown()

    @rule(is_spoilt=st.booleans())
    def queue_is_spoilt(self, is_spoilt: bool) -> None:
        """Redis refuses what goes to the queue, until it is mended."""
        self.is_spoilt = is_spoilt

    @precondition(lambda self: self.processes)
    @rule(i=st.integers(0, 3), reply_is_lost=st.booleans())
    def commit_without_proof(self, i: int, reply_is_lost: bool) -> None:
        self.service.redis.set(f"{self.prefix}link", "another server's")
        before = len(self.published)
        self._commit(self._process(i), reply_is_lost=reply_is_lost)
        assert len(self.published) == before
        self.service.redis.set(f"{self.prefix}link", "a proof")

    def _give_up(self, process: Process, limit: int) -> None:
        self._as(process, lambda epoch: self.store.give_up(process.id, epoch, limit))

    def _due(self, process: Process, epoch: int, limit: int) -> Turn:
        return self.store.due(process.id, epoch, Reading(limit))

    def _send(self, process: Process, timer: DueTimer) -> None:
        assert timer.due_ms <= self.clock(), "sent early"

    def _ran(self, process: Process, timer: DueTimer) -> Settlement:
        assert not timer.is_sent
        run = json.dumps([timer.id, timer.created, timer.due])
        queue = "spoilt" if self.is_spoilt else "queue"
        message = Message((("LPUSH", "events"), ("LPUSH", queue)), (run, run))
        return super()._ran(process, timer).pushing(message)

    def _settle(self, process: Process, epoch: int, limit: int) -> Committed:
        number, unsettled = process.sequence, process.unsettled
        try:
            committed = self.store.commit(
                process.id, epoch, number, unsettled, reading=Reading(limit), link=self.link
            )
        except UnlinkedError:
            process.unsettled = []
            return Committed([], [], None)
        finally:
            self._take(process)
        assert len(committed.errors) == committed.codes.count(PUSH_REFUSED)
        return committed

    def _take(self, process: Process) -> None:
        """Enter what has been pushed, as a worker that has all the time."""
        for run in self._taken("queue"):
            assert run not in self.published, f"{run} is enqueued again"
            self.published[run].append(Publication(process, self.commits + 1))
            self.slots[run[0], run[1]].add(int(run[2]))

    def _taken(self, queue: str) -> list[RunKey]:
        texts: list[str] = self.service.redis.rpop(f"{self.prefix}{queue}", 1000) or []  # type: ignore[assignment]
        return [tuple(json.loads(text)) for text in texts]

    @invariant()
    def a_run_is_counted_when_it_is_enqueued(self) -> None:
        for state in self._states():
            assert state.last_sent_ms is None
            assert state.runs == len(self.slots[state.id, str(state.created_ms)])
        assert set(self._taken("events")) <= self.published.keys(), "pushed in part"


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", [Histories, AtomicHistories])
def test_random_histories(redis_server: RedisServer, prefix: str, kind: type[Histories]) -> None:
    machines: list[Service] = []

    class OwnKeys(kind):  # type: ignore[misc, valid-type]
        """Histories whose keys are their own."""

        def __init__(self) -> None:
            own = f"{prefix}{len(machines)}:"
            machines.append(Service(redis_server.client, redis_server.url, own))
            super().__init__(machines[-1])

        def teardown(self) -> None:
            try:
                super().teardown()
            finally:
                self.store.close()
                delete_prefix(redis_server.client, self.service.settings.key_prefix)

    run_state_machine_as_test(
        OwnKeys,
        settings=settings(
            max_examples=int(os.environ.get("DTIMER_HISTORIES", "20")),
            stateful_step_count=40,
            deadline=None,
            derandomize="CI" in os.environ,
            print_blob=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
