"""Run three beats and two workers on the shop's timers, kill a beat, and count every run.

The exit status is 0 only if no run was lost or doubled.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from celery_dtimer.errors import DistributedTimerError, missing_extra
from example_project.demo.processes import Children, DemoError, raise_on_signals

_ROOT = Path(__file__).parents[2]
_SHORTEST = 20.0


def _seconds(text: str) -> float:
    seconds = float(text)
    if not _SHORTEST <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f"{text} is not from {_SHORTEST:g} to 3600")
    return seconds


def main() -> int:
    """Run the demo, and return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m example_project.demo", description=__doc__)
    parser.add_argument(
        "--seconds", type=_seconds, default=40.0, help="how long the beats run (default: 40)"
    )
    options = parser.parse_args()
    raise_on_signals()
    for name in [name for name in os.environ if name.startswith("CELERY_")]:
        del os.environ[name]  # they would override the demo's own settings
    return _run(options.seconds)


def _run(seconds: float) -> int:
    try:
        import rich  # noqa: F401 - what is imported below needs it
    except ImportError:
        sys.stderr.write(f"{missing_extra('The demo', 'demo')}\n")
        return 1
    from example_project.demo.screen import open_screen
    from example_project.demo.story import Story

    children = Children(_ROOT)
    try:
        with open_screen() as screen:
            return 0 if Story(children, screen, seconds).run() else 1
    except (DemoError, DistributedTimerError) as error:
        sys.stderr.write(f"The demo cannot go on: {error}\n")
        return 1
    finally:
        children.stop_all()


if __name__ == "__main__":
    sys.exit(main())
