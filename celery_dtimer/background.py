"""Work for threads that must not wait for it: one thread does it, in its order.

What is still to be done when the process ends is not done.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable
from typing import Any

logger = logging.getLogger(__name__)

_MOST_UNDONE = 10_000


class Background:
    """A thread that is started by the first thing to do; a forked child has one of its own."""

    def __init__(self, name: str, what: str) -> None:
        """Prepare.

        Args:
            name: of the thread.
            what: is lost, as a log line says it, when too much is still to be done.
        """
        self._name, self._what = name, what
        self._renew()

    def _renew(self) -> None:
        self._pid = os.getpid()
        self._undone: queue.Queue[Callable[[], Any]] = queue.Queue(_MOST_UNDONE)
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def do(self, act: Callable[[], Any]) -> None:
        """Have something done soon; what it raises is logged."""
        if self._pid != os.getpid():  # a fork has no threads, and locks that may be held for ever
            self._renew()
        try:
            self._undone.put_nowait(act)
        except queue.Full:
            logger.error("Too much is still to be done: %s", self._what)
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()

    def _run(self) -> None:
        while True:
            act = self._undone.get()
            try:
                act()
            except Exception:
                logger.exception("%s", self._what)
