"""Much at once, for long, and in order: bursts, backlogs, priorities, and memory."""

from __future__ import annotations

import statistics
import sys
import threading
import time
from collections.abc import Callable
from datetime import datetime, timezone

import psutil
import pytest

from tests.conftest import FreshRedis
from tests.failover.deployment import IS_LONG, SECONDS, TIMEOUT, Deploy, Deployment
from tests.failover.test_exactly_once import MODES, PATIENT
from tests.processes import Process
from tests.waiting import wait_until

BACKLOG = 100_000 if IS_LONG else 5_000
BATCH = 50

#: How long memory is looked at, in seconds: an hour shows a slope, a few seconds show a flood.
SOAK = SECONDS if SECONDS >= 600 else 8.0
GROWTH = 4 * 1024  # KiB that a process may grow after it is warm


@pytest.mark.parametrize("mode", MODES)
def test_ten_thousand_timers_that_are_due_at_once(deploy: Deploy, mode: str) -> None:
    deployment = deploy(dtimer_dispatch=mode)
    beats = deployment.start_beats(2)
    deployment.create_once(10_000, 4)
    epochs = deployment.epochs()
    wait_until(lambda: deployment.queued() >= 10_000, "all to be sent", 30)

    assert deployment.epochs() == epochs, "heartbeats went on"
    ledger = deployment.read_at_once()
    ledger.assert_nothing_doubled()
    assert len(ledger.names()) == 10_000
    assert set(ledger.senders()) == {beat.pid for beat in beats}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("mode", MODES)
def test_a_backlog_is_drained_by_all_and_holds_up_nobody(deploy: Deploy, mode: str) -> None:
    """What came due last is among the first that each beat sends."""
    conf = {**PATIENT, "dtimer_instance_timeout": 120, "dtimer_batch_size": BATCH}
    deployment = deploy(dtimer_dispatch=mode, **conf)
    beats = deployment.start_beats(3)
    for beat in beats:
        beat.freeze()
    deployment.create_once(BACKLOG, 0)
    deployment.pass_time(0.1)
    for number in range(9):
        deployment.timers.create_timer(f"fresh-{number}", datetime.now(timezone.utc), "record")
    for beat in beats:
        beat.thaw()
    wait_until(lambda: deployment.queued() >= BACKLOG + 9, "all to be sent", BACKLOG / 500 + 20)

    ledger = deployment.read_at_once()
    ledger.assert_nothing_doubled()
    assert len(ledger.names()) == BACKLOG + 9
    assert set(ledger.senders()) == {beat.pid for beat in beats}
    for beat in beats:
        sent = [run.name for run in ledger.runs if run.pid == beat.pid]
        fresh = [place for place, name in enumerate(sent) if name.startswith("fresh-")]
        assert all(place < 2 * BATCH for place in fresh), f"of {len(sent)}, fresh ones at {fresh}"


def test_the_most_urgent_priority_is_taken_first(deployment: Deployment) -> None:
    """On Redis that is 0; each priority step has a list of its own, and one worker takes them."""
    moment = datetime.now(timezone.utc)
    for priority in (9, 3, 0, 6):
        deployment.timers.create_timer(
            f"priority-{priority}", moment, "record", priority=priority, args=[priority]
        )
    deployment.start_beats(1)
    deployment.wait_firing([f"priority-{priority}" for priority in (9, 3, 0, 6)])
    sent = [message["properties"]["priority"] for message in deployment.messages]
    assert sorted(sent) == [0, 3, 6, 9]

    deployment.start_worker("-c", "1", "--prefetch-multiplier", "1")
    wait_until(lambda: len(deployment.entries_ran()) == 4, "all to run", 10)
    assert [entry["args"][0] for entry in deployment.entries_ran()] == [0, 3, 6, 9]


class Resident:
    """A thread that notes the KiB of memory that each process takes, and when."""

    def __init__(self, processes: list[Process]) -> None:
        self._watched = [psutil.Process(process.pid) for process in processes]
        self._stopped = threading.Event()
        self.seconds: list[float] = []
        self.kib: list[list[int]] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stopped.wait(max(0.1, SOAK / 400)):
            self.note()

    def note(self) -> list[int]:
        """Return what each takes now."""
        found = [process.memory_info().rss // 1024 for process in self._watched]
        self.seconds.append(time.monotonic())
        self.kib.append(found)
        return found

    def close(self) -> None:
        """Take no more notes."""
        self._stopped.set()
        self._thread.join()

    def slopes(self, since: float) -> list[float]:
        """Return by how many KiB an hour each process grows, from a moment on."""
        notes = [pair for pair in zip(self.seconds, self.kib, strict=True) if pair[0] >= since]
        hours = [seconds / 3600 for seconds, _ in notes]
        columns = zip(*(kib for _, kib in notes), strict=True)
        return [statistics.linear_regression(hours, column).slope for column in columns]


@pytest.mark.timeout(SOAK * 2 + 120)
@pytest.mark.parametrize("mode", MODES)
def test_memory_stays_flat_through_outages_of_the_broker(
    deploy: Deploy,
    fresh_redis: FreshRedis,
    mode: str,
    record_property: Callable[[str, object], None],
) -> None:
    """200 messages a second; with atomic dispatch the broker goes with the timers, for seconds."""
    broker = fresh_redis()
    deployment = deploy(broker=broker, **({"store": broker} if mode == "atomic" else {}))
    deployment.create(50, 0.25)
    beats = deployment.start_beats(2)
    watch = Resident(beats)
    outages = 10 if SOAK >= 600 else 3
    before, warm = [0], 0.0
    for number in range(outages + 1):
        deployment.pass_time(SOAK / (outages + 1))
        broker.client.delete(deployment.queue)
        if number == 0:
            before, warm = watch.note(), time.monotonic()
        broker.freeze() if mode == "atomic" or number % 2 else broker.kill()
        deployment.pass_time(min(SOAK / 20, TIMEOUT / 2 if mode == "atomic" else 10))
        broker.thaw() if mode == "atomic" or number % 2 else broker.start()
        wait_until(deployment.queued, "messages again", 8)
    after = watch.note()
    watch.close()
    slopes = [round(slope) for slope in watch.slopes(warm)]
    sent = deployment.timers.get_counts().sent

    record_property("resident_kib", (before, after))
    sys.stdout.write(
        f"\n{mode}, {SOAK:g} s, {sent} sent, {outages + 1} outages: "
        f"{before} to {after} KiB, {slopes} KiB an hour\n"
    )
    assert deployment.modes() == {mode}
    assert all(late - early < GROWTH for early, late in zip(before, after, strict=True)), (
        f"grew from {before} to {after} KiB"
    )
