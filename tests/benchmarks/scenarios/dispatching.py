"""How many runs a second beats send when more are due than they can send."""

from __future__ import annotations

from contextlib import ExitStack

from tests.benchmarks.measure import Figures, saturated, wait_until, warm_up
from tests.benchmarks.peer import Peer
from tests.benchmarks.processes import Server
from tests.benchmarks.rabbitmq import running_rabbitmq
from tests.benchmarks.scenarios.ownership import owned_timers
from tests.benchmarks.scenarios.scenario import Size
from tests.benchmarks.workload import Workload

EVERY = 0.1
MANY = 10
FEW = 10
REGISTERED_SECONDS = 60.0


def dispatch(peer: Peer, server: Server, size: Size) -> Figures:
    """Return the rate of one beat, and its CPU per run."""
    return one_beat(peer, server, size, Workload(size.timers, every=EVERY))


def one_beat(peer: Peer, server: Server, size: Size, workload: Workload) -> Figures:
    """Return the rate of one beat with a workload, once it is steady."""
    peer.create(server, workload)
    with peer.reading(server, size.reader) as counter, peer.beat(server, workload) as beat:
        limit = size.warm_up_limit(workload.count)
        seconds = warm_up(counter, beat, workload.count, limit)
        return {**saturated([beat], server, counter, size.seconds), "warm_up_s": seconds}


def dispatch_many(peer: Peer, server: Server, size: Size) -> Figures:
    """Return the rate with few timers and with many, and the memory that many take."""
    few = dispatch(peer, server, size)
    server.client().flushdb()
    many = one_beat(peer, server, size, Workload(MANY * size.timers, every=EVERY))
    return {
        **many,
        "few_runs_per_s": few["runs_per_s"],
        "share_of_few": many["runs_per_s"] / few["runs_per_s"],
    }


def two_beats(peer: Peer, server: Server, size: Size) -> Figures:
    """Return the rate of two beats beside that of one, and what else uses the CPUs."""
    one = _beats(peer, server, size, 1)
    server.client().flushdb()
    two = _beats(peer, server, size, 2)
    return {
        "two_vs_one": two["runs_per_s"] / one["runs_per_s"],
        **{f"one_{name}": value for name, value in one.items()},
        **{f"two_{name}": value for name, value in two.items()},
    }


def _beats(peer: Peer, server: Server, size: Size, number: int) -> Figures:
    """Return the rate of some beats that were there before their timers, which they so share."""
    workload, client = Workload(2 * size.timers, every=EVERY), server.client()
    with ExitStack() as stack:
        counter = stack.enter_context(peer.reading(server, size.reader))
        beats = [stack.enter_context(peer.beat(server, workload)) for _ in range(number)]
        wait_until(lambda: len(owned_timers(client)) == number, "the beats", REGISTERED_SECONDS)
        peer.create(server, workload)
        warm_up(counter, beats[0], workload.count, size.warm_up_limit(workload.count))
        figures = saturated(beats, server, counter, size.seconds)
        return {**figures, "smaller_share": min(owned_timers(client)) / workload.count}


def rabbitmq(peer: Peer, server: Server, size: Size) -> Figures:
    """Return the rate on RabbitMQ, with all timers and with a tenth of them."""
    with running_rabbitmq(server.directory / "rabbitmq") as url:
        figures = _on_rabbitmq(peer, server, size, size.timers, url)
        server.client().flushdb()
        few = _on_rabbitmq(peer, server, size, size.timers // FEW, url)
    return {**figures, **{f"few_{name}": value for name, value in few.items()}}


def _on_rabbitmq(peer: Peer, server: Server, size: Size, timers: int, url: str) -> Figures:
    workload = Workload(timers, every=EVERY)
    settings = {
        "broker_url": url,
        **({"dtimer_redis_url": server.url} if peer.name == "dtimer" else {}),
    }
    peer.create(server, workload, **settings)
    with (
        peer.reading(server, size.reader, url) as counter,
        peer.beat(server, workload, **settings) as beat,
    ):
        warm_up(counter, beat, timers, size.warm_up_limit(timers))
        return saturated([beat], server, counter, size.seconds)
