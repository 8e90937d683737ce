"""What every schedule answers, whatever kind of rule it is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from celery_dtimer import zones

_MAX_COUNT = 100_000  # slots that are counted one by one: half a second's work, 69 days of minutes


class Schedule(ABC):
    """When a timer runs."""

    __slots__ = ()

    def first_run(self, now_ms: int) -> int | None:
        """Return when a timer that is created now is first due."""
        return self.next_run_after(now_ms, now_ms)

    @property
    def first_delay_ms(self) -> int | None:
        """How long after its creation a timer is first due, ``None`` unless that is always so."""
        return None

    @abstractmethod
    def next_run_after(self, moment_ms: int, anchor_ms: int) -> int | None:
        """Return the first slot after a moment, ``None`` if there is none.

        Args:
            moment_ms: The answer is later than this.
            anchor_ms: A slot of the timer, from which intervals count.
        """

    def count_between(self, after_ms: int, until_ms: int, anchor_ms: int) -> int:
        """Return how many slots lie in ``(after_ms, until_ms]``, 100,000 if there are more."""
        count = 0
        slot = self.next_run_after(after_ms, anchor_ms)
        while slot is not None and slot <= until_ms and count < _MAX_COUNT:
            count += 1
            slot = self.next_run_after(slot, anchor_ms)
        return count

    @abstractmethod
    def describe(self) -> str:
        """Return the rule in a few words."""

    @abstractmethod
    def encode(self) -> dict[str, Any]:
        """Return the rule as JSON data, without default values, for `decode`."""


class ClockRule(Schedule):
    """A rule about what the clocks of a time zone show; a subclass finds the matching times."""

    __slots__ = ()

    timezone: str
    dst: str

    @property
    @abstractmethod
    def follows_elapsed_time(self) -> bool:
        """Whether it runs whenever clocks show a matching time, whatever ``dst`` says."""

    @abstractmethod
    def next_wall(self, wall: int) -> int | None:
        """Return the first matching time that is not before one, in seconds as a clock shows it."""

    def next_run_after(self, moment_ms: int, anchor_ms: int) -> int | None:
        """Return the first slot after a moment."""
        dst = None if self.follows_elapsed_time else self.dst
        after = moment_ms // 1000 + 1
        found = zones.next_moment(self.timezone, after, self.next_wall, dst)
        return None if found is None else found * 1000

    def _where(self) -> str:
        """Return the zone and the policy in words."""
        policy = "" if self.dst == zones.DEFAULT_POLICY else f", dst {self.dst}"
        return f"{self.timezone}{policy}"

    def _encode_clock(self) -> dict[str, Any]:
        zone = {} if self.timezone == "UTC" else {"tz": self.timezone}
        return zone if self.dst == zones.DEFAULT_POLICY else zone | {"dst": self.dst}
