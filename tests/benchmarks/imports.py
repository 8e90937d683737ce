"""How long the imports take: the package's beside those of what it needs, in turns.

Each import is timed in a Python of its own, from its start to its end, with compiled modules at
hand; the medians are printed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from statistics import median

from celery_dtimer.errors import shown

_COMMANDS = "import celery.bin.worker, celery.bin.beat, celery.bin.events"
_CELERY = "from celery import Celery; import kombu, redis, celery.beat; Celery().Task"

#: What is timed, by its description: what is imported before, and what is measured.
IMPORTS = {
    "Celery, kombu, redis-py": ("", _CELERY),
    "all of celery_dtimer, with these": ("", f"{_CELERY}; from celery_dtimer import *"),
    "all of celery_dtimer, after these": (_CELERY, "from celery_dtimer import *"),
    "what each celery command imports of it": (_COMMANDS, "import celery_dtimer.cli"),
}


def seconds(before: str, measured: str, cache: str) -> float:
    """Return the seconds that a new Python takes for some imports, others done before."""
    timed = f"start = perf_counter()\n{measured}\nprint(perf_counter() - start)"
    program = f"from time import perf_counter\n{before}\n{timed}"
    environment = {**os.environ, "PYTHONPYCACHEPREFIX": cache}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    return float(done.stdout)


def measure(rounds: int) -> dict[str, float]:
    """Return the median seconds of each import; a round before the first compiles the modules."""
    with tempfile.TemporaryDirectory() as cache:
        taken: dict[str, list[float]] = {name: [] for name in IMPORTS}
        for number in range(rounds + 1):
            for name, (before, measured) in IMPORTS.items():
                took = seconds(before, measured, cache)
                taken[name] += [took] if number else []
    return {name: median(values) for name, values in taken.items()}


def _rounds(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{shown(text)} is no number of rounds, 1 or more")
    return int(text)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.imports", description=__doc__)
    parser.add_argument("--rounds", type=_rounds, default=21, help="default: 21")
    taken = measure(parser.parse_args().rounds)
    first = next(iter(taken.values()))
    for name, took in taken.items():
        print(f"{name:<40}{took * 1000:>7.1f} ms{took / first:>8.3f} x")


if __name__ == "__main__":
    main()
