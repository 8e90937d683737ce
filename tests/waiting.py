"""The one way in which tests wait: for a condition, with a description and a limit."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

POLL = 0.015


def wait_until(condition: Callable[[], T], description: str, timeout: float = 5.0) -> T:
    """Return what ``condition`` answers, as soon as that is true.

    Raises:
        AssertionError: it stayed false for ``timeout`` seconds.
    """
    deadline = time.monotonic() + timeout
    while not (answer := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(
                f"waited {timeout:g} s for {description}; the last answer: {answer!r}"
            )
        time.sleep(POLL)
    return answer


def wait_for(seconds: float) -> None:
    """Let a stated time go by, where time itself is what the test is about."""
    time.sleep(seconds)
