"""A progress bar for what takes longer than a second."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

import click

_SHOWN_AFTER = 1.0  # seconds


class Progress:
    """Shows on stderr how far something is, once it has taken a second; nothing in a pipe."""

    def __init__(self, label: str, total: int | None = None) -> None:
        """Prepare for so many steps; None: it is not known how many."""
        self._label, self._total = label, total
        self._began = time.monotonic()
        self._bar: Any = None
        self._done = 0

    def __enter__(self) -> Callable[[int], None]:
        """Return the function that is told how much has been done in all."""
        return self._update

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End the bar's line."""
        if self._bar is not None:
            self._bar.__exit__(kind, error, traceback)

    def _update(self, done: int) -> None:
        step, self._done = done - self._done, done
        if self._bar is None:
            if time.monotonic() - self._began < _SHOWN_AFTER or not sys.stderr.isatty():
                return
            step = done
            self._bar = click.progressbar(
                length=max(self._total or 0, done, 1),
                label=self._label,
                show_pos=True,
                file=sys.stderr,
            ).__enter__()
        self._bar.length = max(self._bar.length, done)
        self._bar.update(step)
