"""Celery signals that tell what happens to timers and instances.

They are sent in the process where it happens, and their sender is the name of the service: connect
with ``sender="orders"`` to hear of one service only. What a receiver raises is logged by Celery and
stops nothing; a slow receiver holds up what it is told of.

==================== ================ ==============================================================
signal               in the           arguments
==================== ================ ==============================================================
``timer_due``        beat             ``timer_id``, ``name``, ``scheduled_at``, ``number``,
                                      ``task_id``, ``instance``: a run is about to be sent
``timer_sent``       beat             the same: the broker has the run, and it is counted
``timer_skipped``    beat             ``timer_id``, ``name``, ``reason``, ``runs``, ``first_at``,
                                      ``until_at``, ``instance``: that many runs do not happen
``timer_failed``     worker or beat   ``letter``: a `DeadLetter`, of a run that has failed for good
``instance_joined``  beat             ``instance``, ``epoch``: this one has registered
``instance_left``    beat             ``instance``, ``is_dead``: it has left, or was found dead
``failover``         beat             ``instance``, ``dead``, ``timers``: this one has moved so many
                                      timers of dead instances, whose ids are ``dead``
==================== ================ ==============================================================
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from typing import Any

from celery.utils.dispatch import Signal

logger = logging.getLogger(__name__)

_OF_A_RUN = ["timer_id", "name", "scheduled_at", "number", "task_id", "instance"]

timer_due = Signal(name="timer_due", providing_args=_OF_A_RUN)
timer_sent = Signal(name="timer_sent", providing_args=_OF_A_RUN)
timer_skipped = Signal(
    name="timer_skipped",
    providing_args=["timer_id", "name", "reason", "runs", "first_at", "until_at", "instance"],
)
timer_failed = Signal(name="timer_failed", providing_args=["letter"])
instance_joined = Signal(name="instance_joined", providing_args=["instance", "epoch"])
instance_left = Signal(name="instance_left", providing_args=["instance", "is_dead"])
failover = Signal(name="failover", providing_args=["instance", "dead", "timers"])


# ------------------------------------------------------------------ told by a thread of its own

_MOST_UNTOLD = 10_000


class _Teller:
    """Sends signals from a thread, for threads that a slow receiver must not hold up."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._untold: queue.Queue[tuple[Signal, str, dict[str, Any]]] = queue.Queue(_MOST_UNTOLD)
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def tell(self, signal: Signal, sender: str, arguments: dict[str, Any]) -> None:
        if self._pid != os.getpid():  # a fork has no threads, and locks that may be held for ever
            self.__init__()  # type: ignore[misc]
        try:
            self._untold.put_nowait((signal, sender, arguments))
        except queue.Full:
            logger.error("A receiver of %s is too slow: it is not told of all", signal)
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="dtimer-teller", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        while True:
            signal, sender, arguments = self._untold.get()
            signal.send(sender=sender, **arguments)


_teller = _Teller()


def tell(signal: Signal, sender: str, **arguments: Any) -> None:
    """Send a signal soon, from another thread; in their order, and only if somebody listens."""
    if signal.receivers:
        _teller.tell(signal, sender, arguments)
