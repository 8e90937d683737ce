"""Measure celery_dtimer beside Celery beat and celery-redbeat, all in the same run.

Rounds alternate between the peers, so that a machine that slows down slows all of them; the table
shows medians. "vs" is how many times better celery_dtimer is. Every measurement has a Redis server
of its own, started here on a free port; no worker runs.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.benchmarks.peers import DEFAULT_PEERS, PEERS
from tests.benchmarks.processes import log_tail, running_server, server_binary, terminating
from tests.benchmarks.report import Result, document, rows, table
from tests.benchmarks.scenarios import SCENARIOS, Figures, Size

QUICK = {"rounds": 1, "timers": 2_000, "seconds": 3.0}
FULL = {"rounds": 3, "timers": 10_000, "seconds": 10.0}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the options; what is not given comes from the full or the quick run."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(DEFAULT_PEERS))
    parser.add_argument(
        "--only",
        nargs="+",
        choices=SCENARIOS,
        metavar="SCENARIO",
        default=list(SCENARIOS),
        help=", ".join(SCENARIOS),
    )
    parser.add_argument("--rounds", type=int, help=f"rounds of each scenario ({FULL['rounds']})")
    parser.add_argument("--timers", type=int, help=f"timers ({FULL['timers']})")
    parser.add_argument("--seconds", type=float, help=f"of one dispatch ({FULL['seconds']:g})")
    parser.add_argument("--quick", action="store_true", help="a short run, to see that it works")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE too")
    options = parser.parse_args(arguments)
    for name, value in (QUICK if options.quick else FULL).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    return options


def plan(options: argparse.Namespace) -> Iterator[tuple[str, int, str]]:
    """Return (scenario, round, peer) in the order in which they run."""
    for scenario in options.only:
        for number in range(1, options.rounds + 1):
            for peer in options.peers:
                if SCENARIOS[scenario].applies_to(PEERS[peer]):
                    yield scenario, number, peer


def run(scenario: str, peer: str, size: Size) -> Figures:
    """Return the figures of one measurement; one that fails says what its processes logged."""
    with tempfile.TemporaryDirectory(prefix="dtimer-bench-") as name:
        directory = Path(name)
        try:
            with running_server(directory) as server:
                return SCENARIOS[scenario].run(PEERS[peer], server, size)
        except Exception:
            print(log_tail(directory), file=sys.stderr)
            raise


def results(options: argparse.Namespace) -> Iterator[Result]:
    """Return the figures of every measurement, saying each as it comes."""
    size = Size(options.timers, options.seconds)
    for scenario, number, peer in plan(options):
        load = os.getloadavg()[0]
        result = Result(scenario, peer, number, load, run(scenario, peer, size))
        shown = ", ".join(f"{name} {value:.4g}" for name, value in result.figures.items())
        where = f"{scenario} {number}/{options.rounds} {peer} (load {load:.1f})"
        print(f"{where}: {shown}", file=sys.stderr, flush=True)
        yield result


def described(options: argparse.Namespace) -> dict[str, Any]:
    """Return the options as the JSON report repeats them."""
    chosen = {name: value for name, value in vars(options).items() if name != "json"}
    return {**chosen, "server": Path(server_binary()).name}


def main() -> None:
    """Run what the command line asks for."""
    options = parse()
    with terminating():
        measured = list(results(options))
    found = rows(measured)
    print(table(found, options.peers))
    if options.json:
        report = document(measured, found, described(options))
        options.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
