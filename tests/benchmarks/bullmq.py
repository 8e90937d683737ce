"""BullMQ as a peer: a Node process, its packages installed into a folder of the benchmark's own."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.benchmarks.measure import Counter
from tests.benchmarks.peer import Lags, Peer, created
from tests.benchmarks.processes import ROOT, Server
from tests.benchmarks.workload import Workload

SOURCES = Path(__file__).parent / "node"
INSTALLED = ROOT / ".bench" / "node"
INSTALL_SECONDS = 300.0


@dataclass(frozen=True)
class BullMQ(Peer):
    """Job schedulers with one worker, without which BullMQ schedules nothing.

    So its figures contain fetching and finishing each job, which does nothing, and the process
    counts what arrives itself.
    """

    def unavailable(self) -> str | None:
        """Return why it cannot be measured here; None once it is installed."""
        missing = [name for name in ("node", "npm") if shutil.which(name) is None]
        if missing:
            return f"{' and '.join(missing)} not found"
        return install()

    def create(self, server: Server, workload: Workload, how: str = "", **settings: Any) -> float:
        """Create the job schedulers in a child process; return the seconds spent in the API."""
        in_flight = {} if how == "one_by_one" else {"BENCH_IN_FLIGHT": "50"}
        environment = {**self.environment(server, workload), **in_flight}
        return created(["node", str(INSTALLED / "bullmq_peer.mjs"), "create"], server, environment)

    def command(self, server: Server) -> list[str]:
        """Return the command line of one worker."""
        return ["node", str(INSTALLED / "bullmq_peer.mjs"), "work", str(server.directory)]

    def environment(self, server: Server, workload: Workload, **settings: Any) -> dict[str, str]:
        """Return the variables that a child process gets; spread entries are for their lag."""
        kept = {} if workload.start is None else {"BENCH_KEEP": "1"}
        return {**super().environment(server, workload, **settings), **kept}

    @contextmanager
    def reading(
        self, server: Server, mode: str, broker_url: str | None = None
    ) -> Iterator[Counter]:
        """Return what the worker counts."""
        yield Counter(server.directory)

    def lags(self, counter: Counter, workload: Workload) -> Lags:
        """Return each job's arrival and the moment for which it was delayed."""
        for line in counter.lines():
            arrived, due = line.split()
            yield float(arrived), float(due)


def install() -> str | None:
    """Install the packages unless that was done before; return why it failed."""
    INSTALLED.mkdir(parents=True, exist_ok=True)
    shutil.copy(SOURCES / "bullmq_peer.mjs", INSTALLED)
    wanted = (SOURCES / "package.json").read_bytes()
    package = INSTALLED / "package.json"
    if package.exists() and package.read_bytes() == wanted and _version() is not None:
        return None
    package.write_bytes(wanted)
    command = ["npm", "install", "--no-audit", "--no-fund", "--ignore-scripts", "--silent"]
    try:
        subprocess.run(
            command, cwd=INSTALLED, check=True, timeout=INSTALL_SECONDS, capture_output=True
        )
    except (subprocess.SubprocessError, OSError) as exc:
        package.unlink()
        return f"npm could not install it ({exc})"
    return None


def _version() -> Path | None:
    installed = INSTALLED / "node_modules" / "bullmq" / "package.json"
    return installed if installed.exists() else None
