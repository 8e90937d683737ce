"""What really reached the broker, or ran in a worker, counted without asking the product.

A run is known by its timer's name and its ``scheduled_at``, both read from the message's ``dtimer``
header. The runs that ought to exist are worked out here from the interval alone.
"""

from __future__ import annotations

import json
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import Any

import redis

_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_PRIORITY_STEPS = ("", "\x06\x163", "\x06\x166", "\x06\x169")  # kombu's lists of one queue
_LOOK_EVERY = 0.005  # seconds
_AT_ONCE = 500  # messages


@dataclass(frozen=True, slots=True)
class SentRun:
    """One message, or one execution, of one run of a timer."""

    timer_id: str
    name: str
    scheduled_ms: int
    task_id: str
    instance: str
    number: int
    seen_ms: int

    @property
    def slot(self) -> tuple[str, int]:
        """The run's identity: its timer and the time it stands for."""
        return self.name, self.scheduled_ms

    @property
    def pid(self) -> int:
        """The process that sent it, from the instance id ``host:pid:nonce``."""
        return int(self.instance.rsplit(":", 2)[1])

    @property
    def lag_ms(self) -> int:
        """How long after its scheduled time it was seen."""
        return self.seen_ms - self.scheduled_ms


def milliseconds(iso: str) -> int:
    """Return an ISO 8601 moment as milliseconds since the epoch."""
    return (datetime.fromisoformat(iso) - _EPOCH) // timedelta(milliseconds=1)


def read_run(header: Mapping[str, Any], task_id: str, seen_ms: int) -> SentRun:
    """Return the run that a ``dtimer`` header describes."""
    return SentRun(
        timer_id=header["id"],
        name=header["name"],
        scheduled_ms=milliseconds(header["scheduled_at"]),
        task_id=task_id,
        instance=header["instance"],
        number=header["run"],
        seen_ms=seen_ms,
    )


def expected_slots(first_ms: int, interval_ms: int, until_ms: int) -> list[int]:
    """Return the times at which an interval is due, from the first one up to ``until_ms``."""
    return list(range(first_ms, until_ms + 1, interval_ms))


class Ledger:
    """The runs seen so far, in the order in which they were seen."""

    def __init__(self, runs: Iterable[SentRun] = ()) -> None:
        self._runs = list(runs)

    @classmethod
    def of_queue(cls, client: redis.Redis, queue: str) -> Ledger:
        """Return the runs whose messages wait in a queue's lists, oldest first; they stay there."""
        ledger = cls()
        for step in _PRIORITY_STEPS:
            for text in reversed(client.lrange(queue + step, 0, -1)):  # type: ignore[arg-type]
                headers = json.loads(text)["headers"]
                ledger.add(read_run(headers["dtimer"], headers["id"], 0))
        return ledger

    def add(self, run: SentRun) -> None:
        """Write one more run down."""
        self._runs.append(run)

    def __len__(self) -> int:
        return len(self._runs)

    @property
    def runs(self) -> list[SentRun]:
        """A copy of all runs, as others may be added meanwhile."""
        return list(self._runs)

    def names(self) -> set[str]:
        """Return the names of the timers that were seen."""
        return {run.name for run in self.runs}

    def since(self, moment_ms: int) -> list[SentRun]:
        """Return the runs that were seen at this moment or later."""
        return [run for run in self.runs if run.seen_ms >= moment_ms]

    def slots(self, name: str) -> list[int]:
        """Return the scheduled times of one timer's runs, each once, in order."""
        return sorted({run.scheduled_ms for run in self.runs if run.name == name})

    def latest(self) -> dict[str, int]:
        """Return the last scheduled time of each timer."""
        latest: dict[str, int] = {}
        for run in self.runs:
            latest[run.name] = max(run.scheduled_ms, latest.get(run.name, 0))
        return latest

    def senders(self, since_ms: int = 0) -> dict[int, int]:
        """Return how many runs each process sent."""
        counts: dict[int, int] = defaultdict(int)
        for run in self.since(since_ms):
            counts[run.pid] += 1
        return dict(counts)

    def doubled(self) -> dict[tuple[str, int], list[SentRun]]:
        """Return the runs that were seen more than once."""
        seen: dict[tuple[str, int], list[SentRun]] = defaultdict(list)
        for run in self.runs:
            seen[run.slot].append(run)
        return {slot: runs for slot, runs in seen.items() if len(runs) > 1}

    def missing(self, name: str, interval_ms: int, until_ms: int) -> list[int]:
        """Return the times at which an interval timer was due and nothing was seen."""
        slots = self.slots(name)
        assert slots, f"nothing was seen of {name}"
        return sorted(set(expected_slots(slots[0], interval_ms, until_ms)) - set(slots))

    def assert_nothing_doubled(self) -> None:
        """Fail when any run was seen twice."""
        doubled = self.doubled()
        assert not doubled, f"{len(doubled)} runs came more than once: {_shown(doubled)}"

    def assert_doubles_are_recognizable(self) -> None:
        """Fail when one run came with two task ids, or two runs with one."""
        for slot, runs in self.doubled().items():
            assert len({run.task_id for run in runs}) == 1, f"{slot} has several task ids: {runs}"
        slots_of = defaultdict(set)
        for run in self.runs:
            slots_of[run.task_id].add(run.slot)
        shared = {task_id: slots for task_id, slots in slots_of.items() if len(slots) > 1}
        assert not shared, f"runs share a task id: {shared}"

    def assert_on_the_grid(self, interval_ms: int) -> None:
        """Fail when a timer's runs are not whole intervals apart from its first."""
        for name in self.names():
            slots = self.slots(name)
            drifted = [slot for slot in slots if (slot - slots[0]) % interval_ms]
            assert not drifted, f"{name} left its cadence of {slots[0]}: {drifted}"

    def assert_never_early(self) -> None:
        """Fail when a run was seen before its time."""
        early = [run for run in self.runs if run.lag_ms < 0]
        assert not early, f"sent before they were due: {early[:5]}"

    def assert_every_run_once(self, names: Iterable[str], interval_ms: int, until_ms: int) -> None:
        """Fail when a run of these interval timers is missing or came twice."""
        self.assert_nothing_doubled()
        self.assert_on_the_grid(interval_ms)
        self.assert_never_early()
        lost = {name: self.missing(name, interval_ms, until_ms) for name in names}
        lost = {name: slots for name, slots in lost.items() if slots}
        assert not lost, f"runs of {len(lost)} timers were lost: {dict(list(lost.items())[:5])}"


def _shown(doubled: Mapping[tuple[str, int], list[SentRun]]) -> str:
    return "; ".join(str(runs) for runs in list(doubled.values())[:5])


class QueueReader:
    """A thread that enters the messages of one queue in a ledger as they come.

    It looks at the lists and takes nothing from them, so that no fault of the broker's makes it
    lose a message that it was being given.
    """

    def __init__(self, url: str, queue: str) -> None:
        self.ledger = Ledger()
        self.foreign: list[dict[str, Any]] = []
        self.messages: list[dict[str, Any]] = []
        self._seen = {queue + step: 0 for step in _PRIORITY_STEPS}
        self._client: redis.Redis = redis.Redis.from_url(url, socket_timeout=2)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"reader-{queue}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                has_read = self._read()
            except redis.RedisError:  # the broker's absence is what some tests are about
                has_read = False
            self._stop.wait(0.0 if has_read else _LOOK_EVERY)

    def _read(self) -> bool:
        """Enter what has come to each list; one that is shorter than before has begun anew."""
        with self._client.pipeline(transaction=False) as pipe:
            for key, seen in self._seen.items():
                pipe.llen(key)
                pipe.lrange(key, -(seen + _AT_ONCE), -(seen + 1))
            answers = pipe.execute()
        for key, length, texts in zip(self._seen, answers[::2], answers[1::2], strict=True):
            for text in reversed(texts):
                self._enter(json.loads(text))
            self._seen[key] = self._seen[key] + len(texts) if length >= self._seen[key] else 0
        return any(answers[1::2])

    def _enter(self, message: dict[str, Any]) -> None:
        headers = message["headers"]
        if "dtimer" not in headers:
            self.foreign.append(message)
            return
        self.messages.append(message)
        self.ledger.add(read_run(headers["dtimer"], headers["id"], time.time_ns() // 1_000_000))

    def close(self) -> None:
        """Stop reading."""
        self._stop.set()
        self._thread.join(5)
        self._client.close()
