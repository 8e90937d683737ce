"""What is measured all the while: memory of the beats, and how much the machine itself stalls."""

from __future__ import annotations

import resource
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

_EVERY = 0.25  # seconds
_WARM = 10.0  # seconds until a process has loaded what it needs
_LEAST = 60.0  # seconds after that which tell something


class Sample(NamedTuple):
    """The memory of a process at a moment (monotonic seconds)."""

    at: float
    bytes: int


class Monitor:
    """A thread that samples the memory of processes, and notes how late it is woken itself.

    The latter is how long the machine held everything up: bounds on times allow for it.
    """

    def __init__(self, pids: Callable[[], Iterable[int]]) -> None:
        self.memory: dict[int, list[Sample]] = {}
        self._pids = pids
        self._stalls: list[tuple[float, float]] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="monitor", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            asked = time.monotonic()
            self._stop.wait(_EVERY)
            now = time.monotonic()
            self._stalls.append((now, now - asked - _EVERY))
            for pid in self._pids():
                if (size := resident(pid)) is not None:
                    self.memory.setdefault(pid, []).append(Sample(now, size))

    def stall_since(self, moment: float) -> float:
        """Return the longest time, in seconds, for which the machine held things up since then."""
        return max((stall for at, stall in self._stalls if at >= moment), default=0.0)

    def close(self) -> None:
        """Stop measuring."""
        self._stop.set()
        self._thread.join(5)


def resident(pid: int) -> int | None:
    """Return the resident memory of a process in bytes, None when it is gone."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return None
    return pages * resource.getpagesize()


def slope(samples: Sequence[Sample]) -> float | None:
    """Return the growth in bytes an hour by least squares, once the process is warm."""
    warm = [sample for sample in samples if sample.at >= samples[0].at + _WARM]
    if not warm or warm[-1].at - warm[0].at < _LEAST:
        return None
    mean_at = sum(sample.at for sample in warm) / len(warm)
    mean = sum(sample.bytes for sample in warm) / len(warm)
    spread = sum((sample.at - mean_at) ** 2 for sample in warm)
    return 3600 * sum((s.at - mean_at) * (s.bytes - mean) for s in warm) / spread
