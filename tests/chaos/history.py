"""What the product itself says it did not send: the history of its commits, read as it grows.

Only the reasons of skipped runs are taken from here, and every one is compared with the schedule:
each run that was not sent must be skipped with a reason that fits, and what is skipped must be runs
that there are.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

import redis

_LOOK_EVERY = 0.1  # seconds
_AT_ONCE = 5000  # entries


class SkipNote(NamedTuple):
    """Runs in a row that the product says it has skipped."""

    at_ms: int
    reason: str
    runs: int
    first_ms: int
    until_ms: int


class HistoryReader:
    """A thread that keeps what the stream says, since the stream may be lost with all else."""

    def __init__(self, connect: Callable[[], redis.Redis], key: str) -> None:
        self.skips: dict[str, list[SkipNote]] = defaultdict(list)  #: by the timer's id
        self._connect, self._key = connect, key
        self._client: redis.Redis | None = None
        self._last = "0-0"
        self._reading = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="history", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(_LOOK_EVERY):
            with suppress(redis.RedisError, OSError):  # it is read again when Redis answers
                self.read()

    def read(self) -> None:
        """Read what has come since the last time."""
        with self._reading:
            try:
                self._client = self._client or self._connect()
                while entries := self._client.xrange(self._key, f"({self._last}", count=_AT_ONCE):
                    self.enter(entries)
            except (redis.RedisError, OSError):
                self._client = None
                raise

    def enter(self, entries: list[tuple[str, dict[str, str]]]) -> None:
        """Enter entries of the stream."""
        for id, entry in entries:
            self._last = id
            for line in filter(None, entry.get("skipped", "").split("\n")):
                timer, reason, *numbers = line.split(" ")
                self.skips[timer].append(
                    SkipNote(int(id.split("-")[0]), reason, *map(int, numbers))
                )

    @property
    def unread(self) -> str:
        """Where the next reading begins, as XRANGE takes it."""
        return f"({self._last}"

    def close(self) -> None:
        """Read the rest and stop."""
        self._stop.set()
        self._thread.join(10)
        self.read()
