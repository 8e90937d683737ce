"""How late messages arrive while there is time enough for all."""

from __future__ import annotations

import math
import time
from concurrent.futures import ThreadPoolExecutor

from tests.benchmarks.celerypeer import CeleryPeer, arguments
from tests.benchmarks.measure import Figures, percentile, sleep_until, wait_until
from tests.benchmarks.peer import Peer
from tests.benchmarks.processes import Server
from tests.benchmarks.scenarios.scenario import Size
from tests.benchmarks.workload import Workload

CYCLES = 2
LEAD_SECONDS = 3.0  # an entry is created one interval ahead, by a process that starts
BEAT_AHEAD = 0.6  # of an interval: redbeat would sleep on if nothing were there yet
SLOWEST_CREATION = 1_000  # timers a second
CREATED_SECONDS = 120.0


def lag(peer: Peer, server: Server, size: Size) -> Figures:
    """Return how late messages are at a twentieth of the timers due a second, evenly spread."""
    return lag_at(peer, server, size, size.timers // 20)


def lag_busy(peer: Peer, server: Server, size: Size) -> Figures:
    """Return how late messages are at half of the timers due a second, evenly spread."""
    return lag_at(peer, server, size, size.timers // 2)


def lag_at(peer: Peer, server: Server, size: Size, due_per_s: int) -> Figures:
    """Return how late messages are at a rate of due times, once every timer has run and before."""
    count = due_per_s * size.lag_interval
    lead = size.lag_interval + LEAD_SECONDS + count / SLOWEST_CREATION
    workload = Workload(count, every=size.lag_interval, start=math.ceil(time.time() + lead))
    assert workload.start is not None
    end = workload.start + size.lag_interval * CYCLES
    with ThreadPoolExecutor(1) as background, peer.reading(server, "keep") as counter:
        creation = background.submit(peer.create, server, workload)
        sleep_until(workload.start - BEAT_AHEAD * size.lag_interval)
        with peer.beat(server, workload):
            sleep_until(end + 1)
        creation.result()
    lags = [(at - due, due) for at, due in peer.lags(counter, workload) if due < end]
    second = workload.start + size.lag_interval
    first = [lag for lag, due in lags if due < second]
    later = [lag for lag, due in lags if due >= second] or first
    return {
        "p50_ms": 1000 * percentile(later, 0.5),
        "p99_ms": 1000 * percentile(later, 0.99),
        "first_p99_ms": 1000 * percentile(first, 0.99),
        "arrived_pct": 100 * len(lags) / (count * CYCLES),
    }


def created_now(peer: Peer, server: Server, size: Size) -> Figures:
    """Return the time from creating a timer that is due now, elsewhere, to its message."""
    assert isinstance(peer, CeleryPeer)
    stored = Workload(0, far=size.timers)
    peer.create(server, stored)
    with peer.reading(server, "keep") as counter, peer.beat(server, stored):
        wait_until(lambda: _has_owner(server), "a beat", CREATED_SECONDS)
        peer.create(server, Workload(size.tries, every=1), "now")
        wait_until(lambda: counter.sample()[1] >= size.tries, "all messages", CREATED_SECONDS)
    lags = [at - arguments(payload)[1] for at, payload in counter.arrivals()]
    return {"p50_ms": 1000 * percentile(lags, 0.5), "p99_ms": 1000 * percentile(lags, 0.99)}


def _has_owner(server: Server) -> bool:
    return server.client().exists("service_instances:{bench}") > 0
