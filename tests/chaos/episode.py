"""One episode: start everything, break things until its time is over, mend, and judge."""

from __future__ import annotations

import json
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import redis

from tests.chaos import faults
from tests.chaos.deployment import Deployment, wait_registered
from tests.chaos.edits import FAULTS
from tests.chaos.history import HistoryReader
from tests.chaos.ledger import now_ms
from tests.chaos.monitor import slope
from tests.chaos.plan import Deck, Episode
from tests.chaos.scene import Injection, Scene
from tests.chaos.verdict import Evidence, Stored, Verdict, Window, judge, story_of
from tests.chaos.workload import Workload

WORKERS, BEATS = 2, 3
_BEFORE_MS, _AFTER_MS = 500, 1500  # of a fault, within which confirmed dispatch may repeat a run
_MOST_GROWTH = 16 * 1024 * 1024  # bytes of a beat that lives through an episode, once warm
_AT_THE_END, _LAST_TASKS = 20.0, 3.0  # seconds for what waits for workers, for what they have


@dataclass
class Outcome:
    """What came of an episode."""

    deployment: str
    seconds: float
    verdict: Verdict
    injected: Counter[str] = field(default_factory=Counter)
    takeovers: list[tuple[str, float]] = field(default_factory=list)
    slopes: list[float] = field(
        default_factory=list
    )  #: bytes an hour of beats that lived through it
    memory: list[tuple[int, int]] = field(
        default_factory=list
    )  #: bytes of them, when warm and last
    most_lines: int = 0
    ran: int = 0
    seen_again: int = 0
    refusals: int = 0


def run(
    episode: Episode,
    deck: Deck,
    folder: Path,
    program: str,
    *,
    scale: float,
    say: Callable[[str], None],
    only: frozenset[str] = frozenset(),
) -> Outcome:
    """Run one episode and return what came of it; its logs stay in the folder."""
    deployment = Deployment(episode.deployment, folder, program)
    history = HistoryReader(deployment.connect, deployment.key("history"))
    workload = Workload(deployment, episode.random("workload"), scale)
    scene = Scene(deployment, workload, history, episode.random("faults"))
    try:
        outcome = _Run(episode, deck, scene, say, only).run()
    finally:
        workload.finish()
        scene.close()
        deployment.close()
    return outcome


class _Run:
    def __init__(
        self,
        episode: Episode,
        deck: Deck,
        scene: Scene,
        say: Callable[[str], None],
        only: frozenset[str],
    ) -> None:
        self.episode, self.deck, self.scene, self.say = episode, deck, scene, say
        deployment = scene.deployment
        self.allowed = [
            name
            for name, fault in FAULTS.items()
            if fault.fits(deployment) and (not only or name in only)
        ]

    def run(self) -> Outcome:
        self._start()
        end = time.monotonic() + self.episode.seconds
        while time.monotonic() < end:
            self._inject(self.deck.draw(self.allowed))
        outcome = self._judge(*self._stop())
        total, problems = outcome.verdict.total, outcome.verdict.problems
        self.say(
            f"    {total.expected:,} runs expected, {total.sent:,} sent, "
            f"{outcome.ran:,} run by workers, {len(problems)} problems"
        )
        return outcome

    def _start(self) -> None:
        scene = self.scene
        for _ in range(WORKERS):
            scene.deployment.start_worker()
        for _ in range(BEATS):
            scene.join()
        wait_registered(scene.deployment, scene.beats, 30)
        scene.workload.begin()
        started_ms = now_ms()
        scene.settle(started_ms)

    def _inject(self, name: str) -> None:
        scene = self.scene
        scene.top_up()
        injection = Injection(name, now_ms())
        scene.injections.append(injection)
        with scene.watching_logs():
            try:
                FAULTS[name].inject(scene)
            except (redis.RedisError, OSError, AssertionError, LookupError) as exc:
                scene.problem(f"the fault itself failed: {type(exc).__name__}: {exc}")
            faults.mend(scene)
            scene.top_up()
            injection.healed_ms = now_ms()
            scene.settle(injection.healed_ms)
        injection.settled_ms = now_ms()
        scene.note_failovers(injection)
        took = (injection.healed_ms - injection.from_ms) / 1000
        again = (injection.settled_ms - injection.healed_ms) / 1000
        takeover = "".join(
            f", {kind} taken over in {late:.2f} s" for kind, late in injection.took.items()
        )
        self.say(f"    {name}: {took:.1f} s, on time again after {again:.1f} s{takeover}")

    def _stop(self) -> tuple[int, int]:
        """End the beats; return when that began, and when it was done."""
        scene = self.scene
        scene.workload.finish()
        settled_ms = now_ms()
        scene.settle(settled_ms)
        live = scene.live()
        self.slopes, self.memory = self._memory()
        for beat in live:
            beat.process.send(signal.SIGTERM)
        for beat in live:
            beat.process.wait(20)
            if beat.process.exit_code:
                scene.problem(f"a beat that was asked to end answered {beat.process.exit_code}")
        ended_ms = now_ms()
        self.counts = scene.deployment.timers.get_counts()
        self._wait_for_workers()
        scene.history.close()
        scene.deployment.taker.close()
        scene.wait(scene.is_consistent, "the stored state to be consistent at the end", 5)
        return settled_ms, ended_ms

    def _memory(self) -> tuple[list[float], list[tuple[int, int]]]:
        samples = self.scene.monitor.memory.get(self.scene.beats[0].pid, [])
        found = slope(samples) if samples else None
        if found is None:
            return [], []
        warm = [sample.bytes for sample in samples if sample.at >= samples[0].at + 10]
        if warm[-1] - warm[0] > _MOST_GROWTH:
            self.scene.problem(f"a beat grew from {warm[0]} to {warm[-1]} bytes")
        return [found], [(warm[0], warm[-1])]

    def _wait_for_workers(self) -> None:
        """Wait until the workers have done what was handed on, as far as they can be asked."""
        scene, taker = self.scene, self.scene.deployment.taker
        if scene.wait(lambda: taker.waiting() == 0, "the workers to catch up", _AT_THE_END):
            given = len(scene.book.handed_on)
            started = time.monotonic()
            while len(self._ran()) < given and time.monotonic() < started + _LAST_TASKS:
                time.sleep(0.1)  # what they have taken and not done yet

    def _ran(self) -> list[list[object]]:
        file = self.scene.deployment.ran
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def _judge(self, settled_ms: int, ended_ms: int) -> Outcome:
        scene = self.scene
        windows = [Window(i.name, i.from_ms, i.settled_ms) for i in scene.injections]
        doubling = [Window(w.name, w.from_ms - _BEFORE_MS, w.until_ms + _AFTER_MS) for w in windows]
        evidence = Evidence(
            book=scene.book,
            planned=scene.workload.planned,
            skips=scene.history.skips,
            stored=self._stored(),
            is_atomic=scene.deployment.is_atomic,
            triggers=scene.workload.triggers,
            calls=scene.workload.calls,
            windows=windows,
            doubling=doubling,
            replays=scene.replays,
            ended_ms=ended_ms,
            settled_ms=settled_ms,
        )
        verdict = judge(evidence)
        stories = [story_of(evidence, name) for name in sorted(verdict.doubtful)]
        (scene.deployment.folder / "stories.txt").write_text("\n".join(stories))
        verdict.problems += scene.problems
        verdict.problems += [f"the workload met {text}" for text in scene.workload.surprises]
        self._judge_counts(verdict)
        ran = self._ran()
        self._judge_workers(verdict, Counter(str(entry[0]) for entry in ran))
        return Outcome(
            deployment=self.episode.deployment,
            seconds=self.episode.seconds,
            verdict=verdict,
            injected=Counter(injection.name for injection in scene.injections),
            takeovers=scene.takeovers,
            slopes=self.slopes,
            memory=self.memory,
            most_lines=scene.most_lines,
            ran=len(ran),
            seen_again=scene.book.seen_again,
            refusals=scene.workload.refusals,
        )

    def _judge_counts(self, verdict: Verdict) -> None:
        """Compare what the service has counted with the history and the ledger."""
        scene = self.scene
        if scene.replays or {injection.name for injection in scene.injections} & _LOSING_COUNTS:
            return
        if Counter(self.counts.skips) != verdict.reasons:
            told, counted = dict(verdict.reasons), self.counts.skips
            verdict.problems.append(f"the history tells of skips {told}, get_counts() of {counted}")
        sent = len(scene.book.runs) + len(scene.book.calls)
        if scene.deployment.is_atomic and self.counts.sent != sent:
            verdict.problems.append(f"{sent} messages came, get_counts() says {self.counts.sent}")

    def _stored(self) -> dict[str, Stored]:
        deployment = self.scene.deployment
        ids = {timer.name: timer.id for timer in self.scene.workload.planned.values()}
        for stored in deployment.timers.get_timers():
            ids[stored.name] = stored.id
        with deployment.connect() as client, client.pipeline(transaction=True) as pipe:
            for name in ids:
                pipe.hmget(deployment.key("timer", ids[name]), "status", "due")
            answers = pipe.execute()
        return {
            name: Stored(status, int(due) if due else None)
            for name, (status, due) in zip(ids, answers, strict=True)
            if status
        }

    def _judge_workers(self, verdict: Verdict, ran: Counter[str]) -> None:
        """Compare what ran with what was handed on: all of it once, where nothing came between."""
        book = self.scene.book
        unknown = sum(task not in book.handed_on for task in ran)
        if unknown:
            verdict.problems.append(f"{unknown} tasks ran that were not handed on to workers")
        sent: Counter[str] = Counter(run.task_id for run in book.runs)
        sent.update(call.task_id for call in book.calls)
        names = {injection.name for injection in self.scene.injections}
        if names & _DISTURBING_WORKERS:
            return
        twice = [task for task, times in ran.items() if times > sent[task]]
        if twice:
            verdict.problems.append(f"{len(twice)} tasks ran more often than they were sent")
        missing = book.handed_on - ran.keys()
        if missing:
            verdict.problems.append(
                f"{len(missing)} tasks were handed on to workers and did not run"
            )


#: Faults that take what the service has counted with them.
_LOSING_COUNTS = {"FLUSHALL", "Redis restarted without its data"}

#: Faults after which a worker's message may be delivered again, or be gone with its worker.
_DISTURBING_WORKERS = {
    name
    for name in FAULTS
    if name.startswith(("worker", "Redis", "CLIENT", "FLUSHALL", "broker", "Sentinel"))
}
