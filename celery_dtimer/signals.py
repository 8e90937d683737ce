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

from functools import partial
from typing import Any

from celery.utils.dispatch import Signal

from celery_dtimer.background import Background

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


# Tells for threads that a slow receiver must not hold up.
_background = Background("dtimer-teller", "a receiver of a signal is not told")


def tell(signal: Signal, sender: str, **arguments: Any) -> None:
    """Send a signal soon, from another thread; in their order, and only if somebody listens."""
    if signal.receivers:
        _background.do(partial(signal.send, sender=sender, **arguments))
