"""What stored timers cost: to create, in memory, while none is due, and when a beat starts."""

from __future__ import annotations

import time

from tests.benchmarks.measure import (
    Figures,
    cpu_seconds,
    requests_during,
    resident_mib,
    saturated,
    used_memory,
    warm_up,
)
from tests.benchmarks.peer import Peer
from tests.benchmarks.processes import Server
from tests.benchmarks.scenarios.dispatching import EVERY, one_beat
from tests.benchmarks.scenarios.ownership import owned_timers, wait_until_owned
from tests.benchmarks.scenarios.scenario import Size
from tests.benchmarks.workload import Workload

START_SECONDS = 3.0
SETTLE_SHARE = 0.3  # of the seconds of a measurement
SETTLED_TIMERS_PER_SECOND = 2_500  # so slowly that every peer has loaded its timers
SINGLY = 5
MANY = 10
VERY_MANY = 100
ALL_DUE_EVERY = 10


def creation(peer: Peer, server: Server, size: Size) -> Figures:
    """Return how many timers a second are created one by one and, where there is a way, in bulk."""
    count = size.timers // SINGLY
    peer.create(server, Workload(1), "" if peer.name == "redbeat" else "one_by_one")
    server.client().flushdb()
    how = "" if peer.name == "redbeat" else "one_by_one"
    figures = {"single_per_s": count / peer.create(server, Workload(count, every=60), how)}
    if peer.name == "dtimer":
        server.client().flushdb()
        seconds = peer.create(server, Workload(size.timers, every=60))
        figures["bulk_per_s"] = size.timers / seconds
    return figures


def memory(peer: Peer, server: Server, size: Size) -> Figures:
    """Return the Redis memory of a stored timer."""
    peer.create(server, Workload(1))  # loads the scripts
    before = _settled_memory(server)
    peer.create(server, Workload(size.timers))
    return {"bytes_per_timer": (_settled_memory(server) - before) / (size.timers - 1)}


def _settled_memory(server: Server) -> int:
    time.sleep(0.5)  # until the buffers of the connections that closed are gone
    return used_memory(server)


def idle(peer: Peer, server: Server, size: Size) -> Figures:
    """Return what a beat costs while none of its timers is due, over twice the seconds."""
    workload = Workload(size.timers)
    peer.create(server, workload)
    with peer.beat(server, workload) as beat:
        time.sleep(settling(size) + size.timers / SETTLED_TIMERS_PER_SECOND)
        cpu, start = cpu_seconds(beat.pid), time.monotonic()
        requests = requests_during(server, 2 * size.seconds)
        elapsed = time.monotonic() - start
        cpu = cpu_seconds(beat.pid) - cpu
    return {
        "requests_per_s": requests.total() / elapsed,
        "cpu_pct": 100 * cpu / elapsed,
        **{f"requests {name}": count / elapsed for name, count in sorted(requests.items())},
    }


def startup(peer: Peer, server: Server, size: Size) -> Figures:
    """Return the seconds from a beat's start to its first message, with far timers beside."""
    return started(peer, server, Workload(1, every=1, far=size.timers))


def startup_many(peer: Peer, server: Server, size: Size) -> Figures:
    """Return the same with ten times as many and with none, when it owns all, and its memory."""
    empty = started(peer, server, Workload(1, every=1))
    server.client().flushdb()
    many = started(peer, server, Workload(1, every=1, far=MANY * size.timers), settling(size))
    return {**many, **{f"empty_{name}": value for name, value in empty.items()}}


def settling(size: Size) -> float:
    """Return the seconds after which a beat that has started does only what it always does."""
    return START_SECONDS + SETTLE_SHARE * size.seconds


def started(
    peer: Peer, server: Server, workload: Workload, settled: float | None = None
) -> Figures:
    """Return the seconds from a beat's start to what shows that it works, and its memory.

    With ``settled`` also the seconds until it owns all timers; the memory is that of so much later.
    """
    peer.create(server, workload)
    time.sleep(workload.every)  # until what is not far is due
    with peer.reading(server, "pop") as counter:
        start = time.time()
        with peer.beat(server, workload) as beat:
            figures = {"first_message_s": counter.wait_first(beat) - start}
            if settled is not None:
                wait_until_owned(server.client(), workload.total)
                figures["owning_s"] = time.time() - start
                time.sleep(settled)
            return {**figures, "rss_mib": resident_mib(beat.pid)}


def stored_large(peer: Peer, server: Server, size: Size) -> Figures:
    """Return start-up, memory and rate with a hundred times the timers, of which one part is due.

    The rate is that of as many timers at 0.1 s as are measured alone before.
    """
    alone = one_beat(peer, server, size, Workload(size.timers, every=EVERY))
    server.client().flushdb()
    before = _settled_memory(server)
    workload = Workload(size.timers, every=EVERY, far=(VERY_MANY - 1) * size.timers)
    seconds = peer.create(server, workload)
    stored = _settled_memory(server) - before
    with peer.reading(server, size.reader) as counter:
        start = time.time()
        with peer.beat(server, workload) as beat:
            first = counter.wait_first(beat) - start
            warm_up(counter, beat, workload.count, size.warm_up_limit(workload.count))
            among = saturated([beat], server, counter, size.seconds)
            owned = max(owned_timers(server.client()))
            resident = resident_mib(beat.pid)
    return {
        "first_message_s": first,
        "owned_share": owned / workload.total,
        "rss_mib": resident,
        "alone_runs_per_s": alone["runs_per_s"],
        "share_of_alone": among["runs_per_s"] / alone["runs_per_s"],
        "bytes_per_timer": stored / workload.total,
        "created_per_s": workload.total / seconds,
        **{f"among_{name}": value for name, value in among.items()},
    }


def all_due_large(peer: Peer, server: Server, size: Size) -> Figures:
    """Return the rate with a hundred times the timers, all of them overdue in turn."""
    workload = Workload(VERY_MANY * size.timers, every=ALL_DUE_EVERY)
    return one_beat(peer, server, size, workload)
