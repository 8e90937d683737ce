"""How long Redis is held up by each script."""

from __future__ import annotations

import math
import signal
import time
from contextlib import ExitStack

import redis

from tests.benchmarks.measure import Figures, ScriptTimes, percentile
from tests.benchmarks.peer import Peer
from tests.benchmarks.processes import Server, stop
from tests.benchmarks.scenarios.dispatching import EVERY
from tests.benchmarks.scenarios.ownership import QUICK_FAILOVER, wait_until_owned
from tests.benchmarks.scenarios.scenario import Size
from tests.benchmarks.workload import Workload

OWNERSHIP_INTERVAL = 60


def scripts(peer: Peer, server: Server, size: Size) -> Figures:
    """Return the longest time of each script at its default batch size.

    One beat dispatches at its limit; then timers move: to a second beat that joins, away from the
    first as it is killed, and out of the service as the second leaves.
    """
    from celery_dtimer import store  # the other scenarios need not have it

    client = server.client()
    names = {sha: name for name, sha in store.scripts().items()}
    with ScriptTimes(server, names) as times:
        workload = Workload(size.timers, every=EVERY)
        peer.create(server, workload)
        with peer.reading(server, size.reader) as counter, peer.beat(server, workload) as beat:
            counter.wait_first(beat)
            time.sleep(size.seconds)
        client.flushdb()
        takeover = _move_timers(peer, server, client, size)
    figures = {"takeover_s": takeover}
    for name, durations in sorted(times.by_script.items()):
        figures[f"{name} longest_ms"] = max(durations)
        figures[f"{name} p50_ms"] = percentile(durations, 0.5)
        figures[f"{name} p99_ms"] = percentile(durations, 0.99)
        figures[f"{name} calls"] = len(durations)
    return figures


def _move_timers(peer: Peer, server: Server, client: redis.Redis, size: Size) -> float:
    """Move all timers about; return the seconds from a kill until the other beat owns them all."""
    workload = Workload(size.timers, every=OWNERSHIP_INTERVAL)
    peer.create(server, workload)
    with ExitStack() as stack:
        first = peer.start_beat(server, workload, **QUICK_FAILOVER)
        stack.callback(stop, first)
        wait_until_owned(client, size.timers)
        stack.enter_context(peer.beat(server, workload, **QUICK_FAILOVER))
        wait_until_owned(client, math.ceil(size.timers / 2))
        killed = time.monotonic()
        stop(first, signal.SIGKILL)
        wait_until_owned(client, size.timers)
        return time.monotonic() - killed
