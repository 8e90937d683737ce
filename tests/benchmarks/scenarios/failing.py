"""What happens to a beat's timers when it dies and when it is stopped."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack

from tests.benchmarks.celerypeer import dtimer_header
from tests.benchmarks.measure import Arrival, Figures
from tests.benchmarks.peer import Peer
from tests.benchmarks.processes import Server, stop
from tests.benchmarks.scenarios.ownership import QUICK_FAILOVER, TIMEOUT, wait_until_owned
from tests.benchmarks.scenarios.scenario import Size
from tests.benchmarks.workload import Workload

EVERY = 0.1
TIMERS_OF_ONE = 100
BEFORE_SECONDS = 2.0
AFTER_SECONDS = 2.0


def failover(peer: Peer, server: Server, size: Size) -> Figures:
    """Return the longest gap in the messages of a timer whose beat is killed, and is stopped."""
    workload, client = Workload(size.timers // TIMERS_OF_ONE, every=EVERY), server.client()
    half = (workload.count + 1) // 2
    peer.create(server, workload)
    with ExitStack() as stack, peer.reading(server, "keep") as counter:

        def add_beat() -> subprocess.Popen[bytes]:
            beat = peer.start_beat(server, workload, **QUICK_FAILOVER)
            stack.callback(stop, beat)
            return beat

        first = add_beat()
        wait_until_owned(client, workload.count)
        second = add_beat()
        wait_until_owned(client, half)
        killed = _end(first, signal.SIGKILL, TIMEOUT)
        wait_until_owned(client, workload.count)
        add_beat()
        wait_until_owned(client, half)
        stopped = _end(second, signal.SIGTERM, 0)
    kill_gaps = gaps(counter.arrivals(), first.pid, killed)
    stop_gaps = gaps(counter.arrivals(), second.pid, stopped)
    return {
        "killed_gap_s": max(kill_gaps.values()),
        "killed_beyond_timeout_s": max(kill_gaps.values()) - TIMEOUT,
        "killed_timers": len(kill_gaps),
        "handover_gap_s": max(stop_gaps.values()),
        "handover_timers": len(stop_gaps),
    }


def _end(beat: subprocess.Popen[bytes], number: signal.Signals, takes: float) -> float:
    """End a beat in the middle of its work; return when, once others have had time to go on."""
    time.sleep(BEFORE_SECONDS)
    moment = time.time()
    stop(beat, number)
    time.sleep(takes + AFTER_SECONDS)
    return moment


def gaps(arrivals: list[Arrival], pid: int, moment: float) -> Mapping[str, float]:
    """Return how long each timer was silent that a beat sent until a moment, and another after."""
    last: dict[str, tuple[float, int]] = {}
    found: dict[str, float] = {}
    for arrived, name, sender in _messages(arrivals):
        before, last_sender = last.get(name, (arrived, sender))
        if arrived > moment and last_sender == pid != sender:
            found.setdefault(name, arrived - before)
        last[name] = (arrived, sender)
    return found


def _messages(arrivals: list[Arrival]) -> Iterator[tuple[float, str, int]]:
    """Return (arrival, timer's name, pid of the beat) of each message."""
    for arrived, payload in arrivals:
        header = dtimer_header(payload)
        yield arrived, str(header["name"]), int(str(header["instance"]).split(":")[-2])
