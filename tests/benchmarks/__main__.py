"""Measure celery_dtimer beside Celery beat, celery-redbeat and BullMQ, all in the same run.

Rounds alternate between the peers, so that a machine that slows down slows all of them; the table
shows medians. "vs" is how many times better celery_dtimer is. "limit" is what the machine can do at
most: a ready message pushed by a minimal script. Every measurement has a Redis server of its own,
started here on a free port; no worker runs.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tests.benchmarks import chart
from tests.benchmarks.measure import Figures
from tests.benchmarks.peers import DEFAULT_PEERS, PEERS
from tests.benchmarks.processes import log_tail, running_server, server_binary, terminating
from tests.benchmarks.report import Result, document, goals, rows, table
from tests.benchmarks.scenarios import SCENARIOS
from tests.benchmarks.scenarios.scenario import Size

QUICK = {"rounds": 1, "timers": 2_500, "seconds": 2.0, "lag_interval": 2, "tries": 20}
FULL = {"rounds": 3, "timers": 10_000, "seconds": 10.0, "lag_interval": 10, "tries": 100}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the options; what is not given comes from the full or the quick run."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    add = parser.add_argument
    add("--peers", nargs="+", choices=PEERS, default=list(DEFAULT_PEERS))
    add("--only", nargs="+", choices=SCENARIOS, metavar="SCENARIO", help=", ".join(SCENARIOS))
    add("--large", action="store_true", help="also what takes many minutes: 100 times the timers")
    add("--rounds", type=int, help=f"rounds of each scenario ({FULL['rounds']})")
    add("--timers", type=int, help=f"timers ({FULL['timers']})")
    add("--seconds", type=float, help=f"of one measurement ({FULL['seconds']:g})")
    add("--lag-interval", type=int, help=f"seconds, of timers with a lag ({FULL['lag_interval']})")
    add("--tries", type=int, help=f"of what is measured one by one ({FULL['tries']})")
    add("--pop", action="store_true", help="fetch messages that are counted, instead of dropping")
    add("--quick", action="store_true", help="a short run, to see that it works")
    add("--json", type=Path, metavar="FILE", help="write the figures to FILE too")
    add("--chart", type=Path, metavar="FILE", help="draw the figures into FILE, an SVG")
    options = parser.parse_args(arguments)
    for name, value in (QUICK if options.quick else FULL).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    if options.only is None:
        large = {name for name, each in SCENARIOS.items() if each.is_large}
        options.only = [name for name in SCENARIOS if options.large or name not in large]
    if options.chart and find_spec("matplotlib") is None:
        parser.error("--chart needs matplotlib")
    return options


def leave_out(options: argparse.Namespace) -> None:
    """Take out of the options what cannot be measured here, saying why."""
    wanted = {name for scenario in options.only for name in SCENARIOS[scenario].peers}
    for names, found in (
        (
            options.peers,
            {name: PEERS[name].unavailable() for name in options.peers if name in wanted},
        ),
        (options.only, {name: SCENARIOS[name].unavailable() for name in options.only}),
    ):
        for name, reason in found.items():
            if reason is not None:
                print(f"{name} is left out: {reason}", file=sys.stderr)
                names.remove(name)


def plan(options: argparse.Namespace) -> Iterator[tuple[str, int, str]]:
    """Return (scenario, round, peer) in the order in which they run."""
    for scenario in options.only:
        for number in range(1, options.rounds + 1):
            for peer in options.peers:
                if peer in SCENARIOS[scenario].peers:
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
    reader = "pop" if options.pop else "drop"
    size = Size(options.timers, options.seconds, options.lag_interval, options.tries, reader)
    for scenario, number, peer in plan(options):
        load = os.getloadavg()[0]
        result = Result(scenario, peer, number, load, run(scenario, peer, size))
        shown = ", ".join(f"{name} {value:.4g}" for name, value in result.figures.items())
        where = f"{scenario} {number}/{options.rounds} {peer} (load {load:.1f})"
        print(f"{where}: {shown}", file=sys.stderr, flush=True)
        yield result


def described(options: argparse.Namespace) -> dict[str, Any]:
    """Return the options as the JSON report repeats them."""
    chosen = {name: value for name, value in vars(options).items() if name not in ("json", "chart")}
    return {**chosen, "server": Path(server_binary()).name}


def main() -> None:
    """Run what the command line asks for."""
    options = parse()
    leave_out(options)
    with terminating():
        measured = list(results(options))
    found = rows(measured)
    print(table(found, options.peers, options.timers), goals(found, options.timers), sep="\n\n")
    if options.json:
        report = document(measured, found, described(options))
        options.json.write_text(json.dumps(report, indent=2) + "\n")
    if options.chart:
        chart.draw(found, options.timers, options.chart)


if __name__ == "__main__":
    main()
