"""What users do meanwhile: timers of all kinds are created, changed, paused and deleted.

For each timer the workload keeps what it asked for and when: between which two moments a call was
made that succeeded in the end. That, and the schedules, is all that the verdict goes by.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from typing import Any, Literal, TypeVar

from kombu.exceptions import OperationalError

from celery_dtimer import DistributedTimer, DistributedTimerError, TimerNotFoundError
from tests.chaos.deployment import STATIC, Deployment
from tests.chaos.ledger import now_ms
from tests.chaos.oracle import Cron, Every, Once, Rule

T = TypeVar("T")
What = Literal["created", "paused", "resumed", "rescheduled", "deleted", "lost"]

_PAUSE = 0.12  # seconds between two things that users do
_RETRY = 0.1
_FASTEST_MS = 200


@dataclass(frozen=True, slots=True)
class Change:
    """Something that was done to a timer between two moments."""

    what: What
    from_ms: int
    until_ms: int
    rule: Rule | None = None


@dataclass
class Planned:
    """One timer, and what was done to it."""

    name: str
    id: str = ""
    rule: Rule = field(default_factory=lambda: Every(0))
    policy: dict[str, Any] = field(default_factory=dict)  #: coalesce, misfire_grace_time, …
    is_static: bool = False
    is_steady: bool = False  #: nothing is done to it
    changes: list[Change] = field(default_factory=list)

    @property
    def status(self) -> What:
        """What was done to it last."""
        return self.changes[-1].what if self.changes else "deleted"

    @property
    def is_active(self) -> bool:
        """Say whether it is to run now."""
        return self.status in ("created", "resumed", "rescheduled")

    @property
    def exists(self) -> bool:
        """Say whether it is stored."""
        return self.status not in ("deleted", "lost")


@dataclass
class Request:
    """Something that is to be sent once: a trigger, or a call with a countdown."""

    key: str  #: the timer's name, or the task id
    from_ms: int
    until_ms: int
    tries: int
    due_ms: int  #: not before this
    may_be_lost: bool = False  #: Redis lost it, or may have


class Workload:
    """The timers of an episode, and a thread that goes on changing them.

    Attributes:
        planned: every timer by its name.
        triggers: the triggers that were asked for.
        calls: the durable countdowns.
        refusals: how many calls failed and were made again.
    """

    def __init__(self, deployment: Deployment, choices: random.Random, scale: float) -> None:
        self.planned: dict[str, Planned] = {}
        self.triggers: list[Request] = []
        self.calls: list[Request] = []
        self.refusals = 0
        self.surprises: list[str] = []
        self._timers: DistributedTimer = deployment.timers
        self._app = deployment.app
        self._random = choices
        self._scale = scale
        self._serial = 0
        self._changing = threading.RLock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="workload", daemon=True)

    # The timers there are from the start

    def begin(self) -> None:
        """Create the timers that are there from the start, and begin to change some of them."""
        self._expect_static()
        self._create(list(self._population()))
        self._thread.start()

    def _expect_static(self) -> None:
        """Note the timers that the beats have written, or are about to write."""
        started_ms = now_ms()
        rules: dict[str, Rule] = {
            name: Every(round(seconds * 1000)) for name, seconds in STATIC.items()
        }
        rules["static-cron"] = Cron("* * * * *")
        ids: dict[str, str] = {}
        while rules.keys() - ids.keys():
            _, _, stored = self._ask(self._timers.get_timers)
            ids = {timer.name: timer.id for timer in stored}
        for name, rule in rules.items():
            timer = Planned(name, ids[name], rule, is_static=True, is_steady=True)
            timer.changes.append(Change("created", started_ms - _UNSENT_MS, now_ms(), rule))
            self.planned[name] = timer

    def _population(self) -> Iterator[Planned]:
        def count(number: int) -> int:
            return max(1, round(number * self._scale))

        anchor_ms = now_ms() // 1000 * 1000
        for number in range(count(24)):
            rule = Every(200, anchor_ms + 7 * number)
            yield Planned(f"fast-{number}", rule=rule, policy={"coalesce": True}, is_steady=True)
        for number in range(count(10)):
            policy = {"coalesce": False, **({"max_catch_up": 5} if number % 3 == 0 else {})}
            yield Planned(f"each-{number}", rule=Every(250), policy=policy, is_steady=True)
        for number in range(count(8)):
            yield Planned(
                f"half-{number}", rule=Every(500), policy={"coalesce": True}, is_steady=True
            )
        for number in range(count(6)):
            yield Planned(
                f"grace-{number}",
                rule=Every(500, anchor_ms + 31 * number),
                policy={"misfire_grace_time": 1, "coalesce": number % 2 == 0},
                is_steady=True,
            )
        for number in range(count(5)):
            text = ("* * * * * *", "*/2 * * * * *", "*/5 * * * * *")[number % 3]
            zone = ("UTC", "Asia/Kathmandu")[number % 2]
            yield Planned(f"cron-{number}", rule=Cron(text, zone), is_steady=True)
        for number in range(count(12)):
            yield Planned(f"changing-{number}", rule=self._interval(), policy={"coalesce": True})
        for number in range(2):
            yield Planned(f"demand-{number}", rule=Every(3_600_000), is_steady=True)

    def _interval(self) -> Every:
        return Every(self._random.choice((_FASTEST_MS, 300, 400, 700, 1000)))

    def _create(self, timers: Sequence[Planned]) -> None:
        """Create timers in bulk, or create them again."""
        from_ms, until_ms, ids = self._ask(
            lambda: self._timers.create_timers([_keywords(timer) for timer in timers])
        )
        for timer, id in zip(timers, ids, strict=True):
            timer.id = id
            timer.changes.append(Change("created", from_ms, until_ms, timer.rule))
            self.planned[timer.name] = timer

    def _ask(self, call: Callable[[], T]) -> tuple[int, int, T]:
        """Make a call until it succeeds; return when it began to be made, when it had ended."""
        from_ms = now_ms()
        while True:
            try:
                answer = call()
            except TimerNotFoundError:
                raise
            except (
                DistributedTimerError,
                OperationalError,
            ):  # an outage: that is what goes on here
                self.refusals += 1
                if self._stop.wait(_RETRY):
                    raise
            else:
                return from_ms, now_ms(), answer

    # What goes on

    def _run(self) -> None:
        while not self._stop.wait(self._random.uniform(0, 2 * _PAUSE)):
            with self._changing:
                try:
                    self._random.choices(list(_DEEDS.values()), list(_WEIGHTS))[0](self)
                except DistributedTimerError as exc:
                    if not self._stop.is_set():
                        self.surprises.append(f"{type(exc).__name__}: {exc}")

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Change nothing for a while: what is done meanwhile is not an accident of timing."""
        with self._changing:
            yield

    def _changing_timers(self, *, active: bool) -> list[Planned]:
        return [
            timer
            for timer in self.planned.values()
            if not timer.is_steady
            and isinstance(timer.rule, Every)
            and (timer.is_active if active else timer.status == "paused")
        ]

    def _pick(self, *, active: bool = True) -> Planned | None:
        found = self._changing_timers(active=active)
        return self._random.choice(found) if found else None

    def create_once(self) -> None:
        """Create a timer that runs once, soon or at once."""
        self._serial += 1
        at_ms = now_ms() + self._random.choice((-500, 0, 300, 900, 2500))
        self._create([Planned(f"once-{self._serial}", rule=Once(at_ms), policy={"coalesce": True})])

    def create_other(self) -> None:
        """Create a timer that repeats."""
        self._serial += 1
        if len(self._changing_timers(active=True)) < 30 * self._scale:
            self._create(
                [Planned(f"other-{self._serial}", rule=self._interval(), policy={"coalesce": True})]
            )

    def pause(self) -> None:
        """Pause a timer."""
        if timer := self._pick():
            from_ms, until_ms, _ = self._ask(lambda: self._timers.pause_timer(timer.id))
            timer.changes.append(Change("paused", from_ms, until_ms))

    def resume(self) -> None:
        """Resume a paused timer."""
        if timer := self._pick(active=False):
            from_ms, until_ms, _ = self._ask(lambda: self._timers.resume_timer(timer.id))
            timer.changes.append(Change("resumed", from_ms, until_ms))

    def describe(self) -> None:
        """Change something of a timer that leaves its schedule alone."""
        if timer := self._pick():
            text = f"changed at {now_ms()}"
            self._ask(lambda: self._timers.update_timer(timer.id, description=text, args=[text]))

    def reschedule(self) -> None:
        """Give a timer another interval."""
        if timer := self._pick():
            rule = self._interval()
            if isinstance(timer.rule, Every) and rule.interval_ms != timer.rule.interval_ms:
                seconds = rule.interval_ms / 1000
                from_ms, until_ms, _ = self._ask(
                    lambda: self._timers.update_timer(timer.id, schedule=seconds)
                )
                timer.rule = rule
                timer.changes.append(Change("rescheduled", from_ms, until_ms, rule))

    def delete(self) -> None:
        """Delete a timer, unless few are left."""
        timer = self._pick()
        if timer and len(self._changing_timers(active=True)) > 8 * self._scale:
            from_ms = now_ms()
            try:
                from_ms, until_ms, _ = self._ask(lambda: self._timers.delete_timer(timer.id))
            except TimerNotFoundError:  # an earlier try had deleted it, and its answer was lost
                until_ms = now_ms()
            timer.changes.append(Change("deleted", from_ms, until_ms))

    def trigger(self) -> None:
        """Run a timer now whose own time does not come."""
        name, tries = f"demand-{self._random.randrange(2)}", 0

        def call() -> None:
            nonlocal tries
            tries += 1
            self._timers.trigger_timer(name)

        from_ms, until_ms, _ = self._ask(call)
        self.triggers.append(Request(name, from_ms, until_ms, tries, from_ms))

    def call_later(self) -> None:
        """Call a task with a countdown."""
        seconds = self._random.choice((0.3, 0.8, 2.0))
        task_id, tries = f"call-{self._serial}-{self._random.getrandbits(64):016x}", 0

        def call() -> None:
            nonlocal tries
            tries += 1
            self._app.send_task("note", task_id=task_id, countdown=seconds)

        from_ms, until_ms, _ = self._ask(call)
        self.calls.append(
            Request(task_id, from_ms, until_ms, tries, from_ms + round(seconds * 1000))
        )

    # What Redis loses

    def lose_all(self, from_ms: int, until_ms: int) -> None:
        """Note that Redis lost its data between two moments, and create everything again."""
        for timer in list(self.planned.values()):
            self._lose(timer, from_ms, until_ms)
        for request in [*self.triggers, *self.calls]:
            request.may_be_lost |= request.due_ms >= from_ms - _UNSENT_MS
        self.create_again([timer for timer in self.planned.values() if timer.status == "lost"])

    def lose(self, timer: Planned, from_ms: int, until_ms: int) -> None:
        """Note that one timer was lost, and create it again."""
        self._lose(timer, from_ms, until_ms)
        self.create_again([timer])

    def _lose(self, timer: Planned, from_ms: int, until_ms: int) -> None:
        if timer.exists:
            timer.changes.append(Change("lost", from_ms, until_ms))
        if timer.is_static:  # the beats write it again, nobody else does
            timer.changes.append(Change("created", until_ms, until_ms + _UNSENT_MS, timer.rule))

    def create_again(self, timers: Sequence[Planned]) -> None:
        """Create timers again that were lost, but for single runs."""
        again = [
            timer for timer in timers if not timer.is_static and not isinstance(timer.rule, Once)
        ]
        if again:
            self._create(again)

    def finish(self) -> None:
        """Stop changing things."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(30)


_UNSENT_MS = 10_000  # so long what is due may wait for a fault to be mended

_DEEDS: dict[str, Callable[[Workload], None]] = {
    "once": Workload.create_once,
    "other": Workload.create_other,
    "pause": Workload.pause,
    "resume": Workload.resume,
    "describe": Workload.describe,
    "reschedule": Workload.reschedule,
    "delete": Workload.delete,
    "trigger": Workload.trigger,
    "call_later": Workload.call_later,
}
_WEIGHTS = (3, 2, 2, 3, 1, 1, 1, 2, 3)


def _keywords(timer: Planned) -> dict[str, Any]:
    """Return what `create_timers` is told of a timer."""
    keywords: dict[str, Any] = {"name": timer.name, "callback": "record", **timer.policy}
    rule = timer.rule
    if isinstance(rule, Once):
        keywords["schedule"] = _moment(rule.at_ms)
    elif isinstance(rule, Cron):
        keywords |= {"schedule": rule.text, "timezone": rule.zone}
    else:
        keywords["schedule"] = rule.interval_ms / 1000
        if rule.anchor_ms is not None:
            keywords["start_at"] = _moment(rule.anchor_ms)
    if timer.name.startswith("each-"):
        keywords["callback"] = "tests.chaos.app.record_timer"
    return keywords


def _moment(moment_ms: int) -> datetime:
    return datetime(1970, 1, 1, tzinfo=timezone.utc) + timedelta(milliseconds=moment_ms)
