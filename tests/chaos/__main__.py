"""``python -m tests.chaos``: break things for a while, and account for every run."""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
import traceback
from collections import Counter
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path

from tests.chaos import episode as episodes
from tests.chaos.deployment import available
from tests.chaos.edits import FAULTS
from tests.chaos.plan import Deck
from tests.chaos.plan import episodes as planned
from tests.chaos.report import Report, as_markdown, as_text, merged, read
from tests.servers import find_server

_SHOWN, _SHOWN_OF_ONE = 60, 2  # problems, and those of one timer


def main() -> int:
    """Run what the arguments say; return 0 if everything held."""
    arguments = _arguments()
    if arguments.summary:
        print(as_markdown(merged(read(arguments.summary))))
        return 0
    program = find_server()
    if program is None:
        print("there is no redis-server, no valkey-server and no embedded extra", file=sys.stderr)
        return 2
    report = _run(arguments, program)
    print("\n" + as_text(report))
    if arguments.report:
        with arguments.report.open("a") as file:
            file.write(report.line() + "\n")
    return _conclude(report, arguments)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60, help="how long faults are injected")
    parser.add_argument("--seed", type=int, help="repeats a run's choices; without it: a new one")
    parser.add_argument("--deployment", action="append", choices=available(), help="only these")
    parser.add_argument("--fault", action="append", choices=sorted(FAULTS), help="only these")
    parser.add_argument(
        "--scale", type=float, default=1.0, help="how many timers, 1 for about 200 runs/s"
    )
    parser.add_argument(
        "--report", type=Path, metavar="FILE", help="append the result as a line of JSON"
    )
    parser.add_argument("--keep", action="store_true", help="keep the logs even if all held")
    parser.add_argument(
        "--summary", type=Path, nargs="+", metavar="FILE", help="print reports as one table"
    )
    return parser.parse_args()


def _run(arguments: argparse.Namespace, program: str) -> Report:
    if arguments.seed is None:
        arguments.seed = random.SystemRandom().randrange(1_000_000)
    report = Report(_command(arguments), f"{datetime.now(timezone.utc):%Y-%m-%d}")
    kinds = arguments.deployment or available()
    _say(f"seed {arguments.seed}; deployments: {', '.join(kinds)}; server: {program}")
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    deck = Deck(arguments.seed, FAULTS)
    only = frozenset(arguments.fault or ())
    for episode in planned(arguments.seed, arguments.seconds, kinds):
        _say(f"  episode {episode.number}: {episode.deployment}, {episode.seconds:.0f} s")
        place = folder / f"{episode.number}-{episode.deployment}"
        place.mkdir()
        before = len(report.problems)
        try:
            outcome = episodes.run(
                episode, deck, place, program, scale=arguments.scale, say=_say, only=only
            )
        except Exception as exc:  # the others are to tell what they can
            traceback.print_exc()
            report.problems.append(f"{episode.deployment}: episode {episode.number}: {exc!r}")
        else:
            report.add(outcome)
        if len(report.problems) > before or arguments.keep:
            _say(f"    logs are in {place}")
        else:
            shutil.rmtree(place)
    with suppress(OSError):  # there are logs in it
        folder.rmdir()
    return report


def _say(text: str) -> None:
    print(text, flush=True)


def _command(arguments: argparse.Namespace) -> str:
    command = f"make chaos CHAOS_SECONDS={arguments.seconds:g} CHAOS_SEED={arguments.seed}"
    options = [f"--deployment {name}" for name in arguments.deployment or ()]
    options += [f"--fault '{name}'" for name in arguments.fault or ()]
    options += [f"--scale {arguments.scale:g}"] * (arguments.scale != 1)
    return f'{command} ARGS="{" ".join(options)}"' if options else command


def _conclude(report: Report, arguments: argparse.Namespace) -> int:
    if not report.problems:
        print(f"\nAll held. Seed {arguments.seed}, {report.date}: {report.command}")
        return 0
    print(f"\n{len(report.problems)} things did not hold:")
    shown: Counter[str] = Counter()
    for problem in report.problems:
        about = problem.split(": ")[1]
        shown[about] += 1
        if shown[about] <= _SHOWN_OF_ONE and shown.total() <= _SHOWN:
            print(f"  {problem}")
    print(f"Seed {arguments.seed}; once more: {report.command}")
    return 1


if __name__ == "__main__":
    sys.exit(main())
