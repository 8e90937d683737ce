"""The measurements: each runs one peer on a server of its own and returns figures by name."""

from __future__ import annotations

import base64
import json
import math
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime

import redis

from tests.benchmarks.measure import (
    Arrival,
    Reader,
    ScriptTimes,
    cpu_seconds,
    percentile,
    requests_during,
    used_memory,
)
from tests.benchmarks.peers import SUBJECT, Peer
from tests.benchmarks.processes import Server, stop
from tests.benchmarks.workload import Workload

Figures = dict[str, float]


@dataclass(frozen=True, slots=True)
class Size:
    """How much is measured: the number of timers and the seconds of one measurement."""

    timers: int = 10_000
    seconds: float = 10.0


WARM_UP_SECONDS = 1.0
SETTLE_SECONDS = 6.0
SETTLED_TIMERS_PER_SECOND = 2_500  # so slowly that every peer has loaded its timers


def dispatch(peer: Peer, server: Server, size: Size) -> Figures:
    """Return the rate of one beat with more runs due than it can send, and its CPU per run.

    The rate cannot exceed the load offered, one run a second of each timer.
    """
    workload = Workload(size.timers, every=1)
    peer.create(server, workload)
    with Reader(server) as reader, peer.beat(server, workload) as beat:
        reader.wait_first()
        time.sleep(WARM_UP_SECONDS)
        cpu, start = cpu_seconds(beat.pid), time.time()
        time.sleep(size.seconds)
        cpu, end = cpu_seconds(beat.pid) - cpu, time.time()
    sent = sum(start <= arrived < end for arrived, _ in reader.arrivals)
    return {"runs_per_s": sent / (end - start), "cpu_us_per_run": 1e6 * cpu / max(1, sent)}


LAG_INTERVAL = 10
LAG_CYCLES = 2
LAG_LEAD = LAG_INTERVAL + 3.0  # an entry is created one interval ahead, by a process that starts
LAG_BEAT_AHEAD = 6.0


def lag(peer: Peer, server: Server, size: Size) -> Figures:
    """Return how late messages arrive at a twentieth of the timers due a second, evenly spread."""
    workload = Workload(size.timers // 2, every=LAG_INTERVAL, start=time.time() + LAG_LEAD)
    assert workload.start is not None
    end = workload.start + LAG_INTERVAL * LAG_CYCLES
    with Reader(server) as reader, ThreadPoolExecutor(1) as background:
        creation = background.submit(peer.create, server, workload)
        _sleep_until(workload.start - LAG_BEAT_AHEAD)
        with peer.beat(server, workload):
            _sleep_until(end + 1)
        creation.result()
    due_of = due_by_header if peer.has_header else due_by_order
    lags = [at - due for at, due in due_of(reader.arrivals, workload) if due < end]
    return {
        "p50_ms": 1000 * percentile(lags, 0.5),
        "p99_ms": 1000 * percentile(lags, 0.99),
        "arrived_pct": 100 * len(lags) / (workload.count * LAG_CYCLES),
    }


def due_by_header(
    arrivals: Sequence[Arrival], _workload: Workload
) -> Iterator[tuple[float, float]]:
    """Return each message's arrival and the due time that its ``dtimer`` header says."""
    for arrived, payload in arrivals:
        header = json.loads(payload)["headers"]["dtimer"]
        yield arrived, datetime.fromisoformat(header["scheduled_at"]).timestamp()


def due_by_order(arrivals: Sequence[Arrival], workload: Workload) -> Iterator[tuple[float, float]]:
    """Return each message's arrival and the due time that it stands for.

    An entry's k-th message is compared with its k-th due time, so drift and backlog count as lag.
    """
    first_due = {entry.index: entry.first_due or 0.0 for entry in workload.entries()}
    seen: Counter[int] = Counter()
    for arrived, payload in arrivals:
        index = entry_index(payload)
        yield arrived, first_due[index] + workload.every * seen[index]
        seen[index] += 1


def entry_index(payload: bytes) -> int:
    """Return which entry a message comes from."""
    args, _, _ = json.loads(base64.b64decode(json.loads(payload)["body"]))
    return int(args[0])


def idle(peer: Peer, server: Server, size: Size) -> Figures:
    """Return what a beat costs while none of its timers is due, over twice the seconds."""
    workload = Workload(size.timers)
    peer.create(server, workload)
    with peer.beat(server, workload) as beat:
        time.sleep(SETTLE_SECONDS + size.timers / SETTLED_TIMERS_PER_SECOND)
        cpu, start = cpu_seconds(beat.pid), time.monotonic()
        requests = requests_during(server, 2 * size.seconds)
        elapsed = time.monotonic() - start
        cpu = cpu_seconds(beat.pid) - cpu
    return {
        "requests_per_s": requests.total() / elapsed,
        "cpu_pct": 100 * cpu / elapsed,
        **{f"requests {name}": count / elapsed for name, count in sorted(requests.items())},
    }


def memory(peer: Peer, server: Server, size: Size) -> Figures:
    """Return the Redis memory of a stored timer and how fast timers are created."""
    peer.create(server, Workload(1))  # loads the scripts
    before = _settled_memory(server)
    seconds = peer.create(server, Workload(size.timers))
    grown = _settled_memory(server) - before
    return {
        "bytes_per_timer": grown / (size.timers - 1),
        "created_per_s": size.timers / seconds,
    }


def _settled_memory(server: Server) -> int:
    time.sleep(0.5)  # until the buffers of the connections that closed are gone
    return used_memory(server)


def startup(peer: Peer, server: Server, size: Size) -> Figures:
    """Return the seconds from a beat's start to its first message, with far timers beside."""
    workload = Workload(size.timers, canary=True)
    peer.create(server, workload)
    time.sleep(1)  # until the every-second entry is due
    with Reader(server) as reader:
        start = time.monotonic()
        with peer.beat(server, workload):
            reader.wait_first()
            return {"first_message_s": time.monotonic() - start}


OWNERSHIP_INTERVAL = 60
OWNERSHIP_SECONDS = 60.0
QUICK_FAILOVER = {
    "dtimer_heartbeat_interval": 1,
    "dtimer_failure_check_interval": 1,
    "dtimer_instance_timeout": 4,
}


def scripts(peer: Peer, server: Server, size: Size) -> Figures:
    """Return the longest time of each script at its default batch size.

    One beat dispatches at its limit; then timers move: to a second beat that joins, away from the
    first as it is killed, and out of the service as the second leaves.
    """
    from celery_dtimer import store  # the other scenarios need not have it

    client = server.client()
    names = {sha: name for name, sha in store.scripts().items()}
    with ScriptTimes(server, names) as times:
        workload = Workload(size.timers, every=1)
        peer.create(server, workload)
        with Reader(server) as reader, peer.beat(server, workload):
            reader.wait_first()
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
        _wait_until_owned(client, size.timers)
        stack.enter_context(peer.beat(server, workload, **QUICK_FAILOVER))
        _wait_until_owned(client, math.ceil(size.timers / 2))
        killed = time.monotonic()
        stop(first, signal.SIGKILL)
        _wait_until_owned(client, size.timers)
        return time.monotonic() - killed


def _wait_until_owned(client: redis.Redis, largest: int) -> None:
    """Wait until the beats own timers and the one with the most has ``largest``."""
    deadline = time.monotonic() + OWNERSHIP_SECONDS
    while time.monotonic() < deadline:
        if max(owned_timers(client), default=0) == largest:
            return
        time.sleep(0.05)
    raise RuntimeError(f"no beat came to own {largest} timers; they own {owned_timers(client)}")


def owned_timers(client: redis.Redis) -> list[int]:
    """Return how many timers each instance owns."""
    keys = client.scan_iter("instance_timers:*", count=1000)
    return [client.zcard(key) for key in keys if not key.endswith(b":unassigned")]


def _sleep_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.time()))


@dataclass(frozen=True, slots=True)
class Scenario:
    """A measurement, and which peers it makes sense for."""

    run: Callable[[Peer, Server, Size], Figures]
    applies_to: Callable[[Peer], bool] = lambda _peer: True


SCENARIOS = {
    "dispatch": Scenario(dispatch),
    "lag": Scenario(lag),
    "memory": Scenario(memory, lambda peer: peer.is_stored),
    "idle": Scenario(idle),
    "startup": Scenario(startup),
    "scripts": Scenario(scripts, lambda peer: peer.name == SUBJECT),
}
