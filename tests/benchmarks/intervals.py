"""Intervals whose phase is chosen, so that many timers are created at once and come due apart."""

from __future__ import annotations

from dataclasses import dataclass

from celery_dtimer.schedules import Interval


@dataclass(frozen=True)
class StartingAt(Interval):
    """An interval whose first run is at a moment; as stored it is like any other."""

    first_ms: int = 0

    @property
    def first_delay_ms(self) -> int | None:
        """Return None: the first run does not follow from the moment of creation alone."""
        return None

    def first_run(self, now_ms: int) -> int:
        """Return the moment chosen."""
        return self.first_ms


def starting_at(every: float, first_due: float) -> StartingAt:
    """Return an interval of so many seconds, first due at a moment."""
    return StartingAt(round(1000 * every), first_ms=round(1000 * first_due))
