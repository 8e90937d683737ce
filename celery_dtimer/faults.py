"""Labelled points of a dispatch at which a test can kill the process, as ``kill -9`` would.

``DTIMER_CRASH_AT=between_publish_and_commit:3`` kills a process that passes that point for the
third time. Where it is not set, a point costs one comparison for each batch.
"""

from __future__ import annotations

import os
import signal

#: Every point, in the order in which a dispatch passes them.
POINTS = (
    "before_due",
    "between_due_and_publish",
    "in_the_batch",
    "between_publish_and_commit",
    "after_commit",
    "in_the_heartbeat",
)

_armed: tuple[str, int] | None = None


def arm(label: str, passes: int = 1) -> None:
    """Kill this process when it passes a point for the ``passes``-th time from now.

    Raises:
        ValueError: there is no such point.
    """
    global _armed
    if label not in POINTS:
        raise ValueError(f"DTIMER_CRASH_AT={label!r} is no point; expected one of {POINTS}")
    _armed = (label, passes)


def point(label: str) -> None:
    """Pass a point."""
    if _armed is not None:
        _pass(label, *_armed)


def _pass(label: str, armed: str, passes: int) -> None:
    if label == armed:
        if passes <= 1:
            os.kill(os.getpid(), signal.SIGKILL)
        arm(label, passes - 1)


def arm_from_environment(text: str) -> None:
    """Arm what ``DTIMER_CRASH_AT`` says: a point, and after a colon the number of passes."""
    label, _, passes = text.partition(":")
    arm(label, int(passes or 1))


if os.environ.get("DTIMER_CRASH_AT"):
    arm_from_environment(os.environ["DTIMER_CRASH_AT"])
