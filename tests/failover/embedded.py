"""A plain Python process that fires timers from a thread, until it is told to stop."""

from __future__ import annotations

import signal
import threading

from tests.failover.app import timers


def main() -> None:
    """Run the embedded scheduler between the start and the first SIGTERM."""
    stopping = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    timers.start()
    stopping.wait()
    timers.stop()


if __name__ == "__main__":
    main()
