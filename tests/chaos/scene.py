"""What a fault has to work with: the servers, the beats, and a way to wait for recovery."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import redis

from celery_dtimer import DistributedTimerError
from tests.chaos.deployment import HEARTBEAT, TIMEOUT, Beat, Deployment, registered
from tests.chaos.history import HistoryReader
from tests.chaos.ledger import Book, Gap, now_ms
from tests.chaos.monitor import Monitor
from tests.chaos.oracle import Every
from tests.chaos.sentinel import SentinelSet
from tests.chaos.verdict import Window
from tests.chaos.workload import Planned, Workload
from tests.ledger import SentRun

#: Seconds after a fault is mended within which everything that was due before is settled.
SETTLE = 10.0
#: Seconds by which the first run of a timer may be late whose instance is gone: A6.
TAKEOVER = TIMEOUT + 1.0
HANDOVER = 1.0

_FEWEST, _MOST = 3, 5  # beats
_LONGEST_IDLE = 6.0  # seconds for which workers may do nothing of what they were given
_LOG_LINES = 40  # that one beat may write about one fault, beside what it has repaired


@dataclass
class Injection:
    """One fault: when it began, was mended and forgotten."""

    name: str
    from_ms: int
    healed_ms: int = 0
    settled_ms: int = 0
    took: dict[str, float] = field(default_factory=dict)  #: seconds of takeovers, by their kind


class _Worked(NamedTuple):
    """When workers were last seen to have done something."""

    done: int  #: bytes that they have written
    given: int  #: messages that they had been given by then
    at: float


class Scene:
    """An episode as faults see it."""

    def __init__(
        self,
        deployment: Deployment,
        workload: Workload,
        history: HistoryReader,
        choices: random.Random,
    ) -> None:
        self.deployment, self.workload, self.history = deployment, workload, history
        self.random = choices
        self.beats: list[Beat] = []
        self.injections: list[Injection] = []
        self.problems: list[str] = []
        self.replays: list[Window] = []
        self.takeovers: list[tuple[str, float]] = []
        self.most_moved = 0
        self.most_lines = 0
        self._ended: list[Beat] = []
        self._worked = _Worked(0, 0, time.monotonic())
        self._master = 0  # its port, where Sentinel chooses it
        self.monitor = Monitor(lambda: [beat.pid for beat in self.live()])

    @property
    def book(self) -> Book:
        """What was seen so far."""
        return self.deployment.taker.book

    # The fleet

    def live(self) -> list[Beat]:
        """Return the beats that run."""
        return [beat for beat in self.beats if beat.is_running()]

    def join(self, **options: object) -> Beat:
        """Start one more beat."""
        number = len(self.beats) + len(self._ended)
        beat = Beat(self.deployment, number, **options)  # type: ignore[arg-type]
        self.beats.append(beat)
        return beat

    def victims(self) -> list[Beat]:
        """Return the beats that may die: all but the first one, whose memory is looked at."""
        return [beat for beat in self.live() if beat is not self.beats[0]]

    def victim(self) -> Beat:
        """Return one of those that may die, and have sent something."""
        found = self.victims() or [self.join()]
        beat = self.random.choice(found)
        self.wait(lambda: self.sends(beat) or not beat.is_running(), f"{beat.pid} to send", 15)
        return beat

    def special(self, matches: Callable[[Beat], bool], **options: object) -> Beat:
        """Return a beat that was started in a certain way, or start one, once it sends."""
        for beat in self.victims():
            if matches(beat):
                return beat
        beat = self.join(**options)
        self.wait(lambda: self.sends(beat), f"{beat.pid} to send", 20)
        return beat

    def proxied(self) -> Beat:
        """Return a beat whose connections can be spoilt."""
        return self.special(lambda beat: bool(beat.proxies), proxied=True)

    def sends(self, beat: Beat) -> bool:
        """Say whether a beat has sent the last run of any timer."""
        return any(run.pid == beat.pid for run in list(self.book.latest.values()))

    def top_up(self) -> None:
        """Keep the fleet between its bounds, and forget those that have ended."""
        for beat in [beat for beat in self.beats if not beat.is_running()]:
            self.beats.remove(beat)
            self._ended.append(beat)
            beat.close()
        self._keep_workers()
        while len(self.live()) < _FEWEST:
            self.join(proxied=self.random.random() < 0.3 and self.deployment.kind != "sentinel")
        for beat in self.victims()[: max(0, len(self.live()) - _MOST)]:
            beat.process.stop()

    def _keep_workers(self) -> None:
        """Replace workers that have ended (as they do when Redis is full), or do nothing more."""
        workers, ran = self.deployment.workers, self.deployment.ran
        done, given = ran.stat().st_size if ran.exists() else 0, len(self.book.handed_on)
        if done != self._worked.done:
            self._worked = _Worked(done, given, time.monotonic())
        is_idle = time.monotonic() - self._worked.at > _LONGEST_IDLE
        is_stuck = is_idle and given > self._worked.given
        for worker in list(workers):
            if is_stuck or not worker.is_running():
                worker.kill()
                workers.remove(worker)
                self.deployment.start_worker()

    # Time

    def wait(self, condition: Callable[[], object], what: str, timeout: float) -> bool:
        """Wait for a condition; note a problem if it does not come true."""
        started = time.monotonic()
        while not condition():
            spent = time.monotonic() - started
            if spent > timeout + 2 * self.monitor.stall_since(started):
                self.problem(f"waited {spent:.1f} s for {what}")
                return False
            time.sleep(0.02)
        return True

    def hold(self, least: float, most: float) -> None:
        """Let a fault last for a time chosen at random."""
        time.sleep(self.random.uniform(least, most))

    def problem(self, text: str) -> None:
        """Note something that is wrong."""
        name = self.injections[-1].name if self.injections else "no fault"
        self.problems.append(f"{name}, at {now_ms()}: {text}")

    # Recovery

    def steady(self) -> list[Planned]:
        """Return the timers that run all the time, often."""
        return [
            timer
            for timer in list(self.workload.planned.values())
            if timer.is_steady and isinstance(timer.rule, Every) and timer.rule.interval_ms <= 1000
        ]

    def settle(self, since_ms: int) -> None:
        """Wait until all timers are on time again, all beats registered and all keys consistent."""

        def is_on_time() -> bool:
            latest = self.book.latest
            return all(
                timer.name in latest and latest[timer.name].scheduled_ms >= since_ms
                for timer in self.steady()
            )

        if not self.wait(is_on_time, "all timers to be on time again", SETTLE):
            latest = self.book.latest
            late = [
                timer.name
                for timer in self.steady()
                if timer.name not in latest or latest[timer.name].scheduled_ms < since_ms
            ]
            self.problem(f"{len(late)} timers are late, such as {late[:5]}")
        self.wait(self._are_registered, "the live beats to be registered, and no others", SETTLE)
        self.wait(self.is_consistent, "the stored state to be consistent", SETTLE)

    def _are_registered(self) -> bool:
        try:
            return set(registered(self.deployment)) == {beat.pid for beat in self.live()}
        except (redis.RedisError, OSError):
            return False

    def is_consistent(self) -> bool:
        """Say whether the package's own check finds nothing."""
        try:
            return not self.deployment.timers.check_consistency()
        except DistributedTimerError:
            return False

    # What is measured

    def sent_by(self, beat: Beat) -> set[str]:
        """Return the timers that run often, and whose last run a beat has sent."""
        often = {timer.name for timer in self.steady()}
        return {
            name
            for name, run in list(self.book.latest.items())
            if run.pid == beat.pid and name in often
        }

    @contextmanager
    def takeover(self, kind: str, beat: Beat, limit: float) -> Iterator[None]:
        """Measure how late the first runs of a beat's timers are once it is gone.

        What happens inside ends the beat, or cuts it off, and takes a moment.
        """
        orphans, started, since = self.sent_by(beat), time.monotonic(), len(self.book.runs)
        gone_ms = now_ms()
        yield
        first: dict[str, SentRun] = {}

        def are_taken_over() -> bool:
            for run in self.book.runs[since:]:
                if run.name in orphans and run.pid != beat.pid and run.seen_ms >= gone_ms:
                    first.setdefault(run.name, run)
            return len(first) == len(orphans)

        self.wait(are_taken_over, f"the timers of {beat.pid} to be taken over", limit + 2)
        if first:
            # A run that came due long before was held up by something else.
            late = (
                max(run.seen_ms - max(run.scheduled_ms, gone_ms) for run in first.values()) / 1000
            )
            self.takeovers.append((kind, late))
            self.injections[-1].took[kind] = late
            stall = self.monitor.stall_since(started)
            if late > limit + stall:
                self.problem(
                    f"timers of {beat.pid} were {late:.2f} s late after its {kind}; at most "
                    f"{limit:g} s are allowed, and {stall:.2f} s in which the machine stood still"
                )

    def owners(self) -> dict[str, str]:
        """Return who owns each of the steady timers."""
        timers = [timer for timer in self.steady() if timer.id]
        with self.deployment.connect() as client, client.pipeline(transaction=True) as pipe:
            for timer in timers:
                pipe.hget(self.deployment.key("timer", timer.id), "owner")
            answers = pipe.execute()
        return {timer.name: owner for timer, owner in zip(timers, answers, strict=True) if owner}

    def note_gap(self, from_ms: int, why: str) -> None:
        """Note that messages may have come and gone that nobody has seen."""
        self.book.gaps.append(Gap(from_ms, now_ms(), why))

    def note_failovers(self, injection: Injection) -> None:
        """Let what was replayed end with the recovery, and note a failover that nobody meant.

        A machine that stands still for long enough looks to Sentinel like a dead master.
        """
        if not isinstance(self.deployment.store, SentinelSet):
            return
        master, before = self.deployment.store.port, self._master
        self._master = master
        is_meant = self.replays and self.replays[-1].until_ms >= injection.from_ms
        if is_meant:
            begin_ms = self.replays.pop().from_ms
        elif before in (0, master):
            return
        else:
            begin_ms = injection.from_ms - round(SETTLE * 1000)
        self.replays.append(Window("Sentinel failover", begin_ms, now_ms()))

    @contextmanager
    def watching_logs(self) -> Iterator[None]:
        """Count what the first beat writes about a fault, but for what it sends and repairs."""
        process = self.beats[0].process
        before = len(process.log_text())
        yield
        lines = [
            line
            for line in process.log_text()[before:].splitlines()
            if " dispatched " not in line and ": repaired" not in line
        ]
        self.most_lines = max(self.most_lines, len(lines))
        if len(lines) > _LOG_LINES:
            self.problem(f"{len(lines)} lines in a log, such as {lines[:3]}")

    def close(self) -> None:
        """End all beats."""
        self.monitor.close()
        for beat in self.beats:
            beat.close()


__all__ = ["HANDOVER", "HEARTBEAT", "SETTLE", "TAKEOVER", "TIMEOUT", "Injection", "Scene"]
