"""How long timers of a beat that goes are without an owner: ``python -m tests.failover.takeovers``.

Two beats share timers. One is killed, frozen, told to stop or cut off from the network; measured is
the time until the other has sent a run of each of its timers. It prints a table.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import statistics
import tempfile
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from celery_dtimer.settings import defaults
from tests.conftest import QUICK, delete_prefix
from tests.failover.deployment import Deployment
from tests.processes import Process
from tests.servers import RedisServer, find_server
from tests.tcp_proxy import TcpProxy
from tests.waiting import wait_until

INTERVAL = 0.1  # seconds: so soon a run is due after a takeover, at the latest
TIMERS = 20
SPARE = 5.0  # seconds of patience


@dataclass(frozen=True)
class Leaving:
    """A way in which a beat goes."""

    title: str
    leave: Callable[[Process, TcpProxy], None]
    is_clean: bool = False


def _cut_off(_: Process, proxy: TcpProxy) -> None:
    proxy.black_hole = True


KINDS = {
    "kill": Leaving("`kill -9`", lambda beat, _: beat.kill()),
    "freeze": Leaving("frozen (SIGSTOP)", lambda beat, _: beat.freeze()),
    "stop": Leaving("SIGTERM", lambda beat, _: beat.send(15), is_clean=True),
    "cut": Leaving("network cut", _cut_off),
}


def bound(kind: str, conf: dict[str, Any]) -> float:
    """Return the seconds that a takeover may take, as the README states it."""
    return 1.0 if KINDS[kind].is_clean else float(conf["dtimer_instance_timeout"]) + 1.0


def measure(deployment: Deployment, kind: str, conf: dict[str, Any]) -> float:
    """Return the seconds from a beat's end to another's run of the last of its timers."""
    proxy = TcpProxy(deployment.store.port)
    with contextlib.closing(proxy):
        leaving = deployment.start_beat(broker_url=proxy.url, dtimer_redis_url=proxy.url, **conf)
        beats = [leaving, *(beat for beat in deployment.processes[:1] if beat.is_running())]
        deployment.wait_registered(beats, bound(kind, conf) + 20)
        wait_until(lambda: deployment.owned_by(leaving) >= TIMERS // 2, "its share", 20)
        names = {
            timer.name
            for timer in deployment.timers.get_instance_timers(deployment.registered()[leaving.pid])
            if not timer.name.startswith("celery.")
        }
        since_ms = deployment.now_ms()
        KINDS[kind].leave(leaving, proxy)
        taken: dict[str, int] = {}

        def is_over() -> bool:
            for run in deployment.ledger.since(since_ms):
                if run.name in names and run.pid != leaving.pid:
                    taken.setdefault(run.name, run.seen_ms)
            return taken.keys() == names

        wait_until(is_over, "all to be taken over", bound(kind, conf) + SPARE)
        leaving.thaw()
        leaving.kill()
    return (max(taken.values()) - since_ms) / 1000


@contextlib.contextmanager
def served(folder: Path) -> Iterator[RedisServer]:
    """Run a server of the measurement's own."""
    program = find_server()
    assert program is not None, "no Redis server is installed"
    server = RedisServer(program, folder).start()
    try:
        yield server
    finally:
        server.close()


def takeovers(server: RedisServer, folder: Path, conf: dict[str, Any]) -> Deployment:
    """Return a deployment of one beat that stays, with timers that it fires."""
    prefix = f"t{uuid.uuid4().hex[:10]}:"
    deployment = Deployment(folder, prefix, broker=server, store=server, **conf)
    deployment.create(TIMERS, INTERVAL)
    deployment.start_beats(1)
    deployment.read()
    return deployment


def conf_of(as_shipped: bool) -> dict[str, Any]:
    """Return the times that beats are measured with."""
    names = [name for name in defaults() if name.endswith(("_interval", "_timeout", "_limit"))]
    times = {name: defaults()[name] for name in names} if as_shipped else dict(QUICK)
    # A lagging owner is helped by its peers much sooner: here a takeover is to be measured.
    return {**times, "dtimer_lag_limit": 3600}


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=30)
    parser.add_argument("--kinds", nargs="*", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--as-shipped", action="store_true", help="with the default settings")
    chosen = parser.parse_args()
    conf = conf_of(chosen.as_shipped)
    folder = Path(tempfile.mkdtemp(prefix="takeovers-"))
    print(
        f"dtimer_instance_timeout {conf['dtimer_instance_timeout']} s, "
        f"dtimer_heartbeat_interval {conf['dtimer_heartbeat_interval']} s, "
        f"{chosen.repetitions} times each, in seconds\n\n"
        "| a beat is | min | median | max | bound |\n|---|---|---|---|---|"
    )
    try:
        with served(folder) as server:
            for kind in chosen.kinds:
                deployment = takeovers(server, folder, conf)
                try:
                    found = [measure(deployment, kind, conf) for _ in range(chosen.repetitions)]
                finally:
                    deployment.close()
                    delete_prefix(server.client, deployment.prefix)
                low, middle, high = min(found), statistics.median(found), max(found)
                print(
                    f"| {KINDS[kind].title} | {low:.2f} | {middle:.2f} | {high:.2f} "
                    f"| {bound(kind, conf):g} |",
                    flush=True,
                )
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
