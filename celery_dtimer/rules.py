"""What every schedule answers, whatever kind of rule it is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Any

from celery_dtimer import zones

_MAX_COUNT = 100_000  # slots that are counted one by one: half a second's work
_MINUTE = 60_000


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
        """Return how many slots lie in ``(after_ms, until_ms]``.

        Where they can only be counted one by one, it is 100,000 if there are more.
        """
        return sum(1 for _ in islice(self._slots(after_ms, until_ms, anchor_ms), _MAX_COUNT))

    def last_runs_begin(
        self, after_ms: int, until_ms: int, anchor_ms: int, count: int
    ) -> int | None:
        """Return the slot with which the last ones begin in ``(after_ms, until_ms]``.

        Args:
            after_ms: All slots are later than this.
            until_ms: None is later than this.
            anchor_ms: As for `next_run_after`.
            count: How many the last ones are. With less than one, or more than there are slots,
                the answer is ``None``.
        """
        last = deque(self._slots(after_ms, until_ms, anchor_ms), maxlen=max(0, count))
        return last[0] if last and len(last) == count else None

    def _slots(self, after_ms: int, until_ms: int, anchor_ms: int) -> Iterator[int]:
        slot = self.next_run_after(after_ms, anchor_ms)
        while slot is not None and slot <= until_ms:
            yield slot
            slot = self.next_run_after(slot, anchor_ms)

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

    @property
    @abstractmethod
    def is_countable(self) -> bool:
        """Whether `count_walls` can tell how many times match; else they are gone through."""

    @abstractmethod
    def count_walls(self, low: int, high: int) -> int:
        """Return how many times match in ``[low, high)``, in seconds as a clock shows them."""

    @property
    def _policy(self) -> str | None:
        return None if self.follows_elapsed_time else self.dst

    def next_run_after(self, moment_ms: int, anchor_ms: int) -> int | None:
        """Return the first slot after a moment."""
        after = moment_ms // 1000 + 1
        found = zones.next_moment(self.timezone, after, self.next_wall, self._policy)
        return None if found is None else found * 1000

    def count_between(self, after_ms: int, until_ms: int, anchor_ms: int) -> int:
        """Return how many slots lie in ``(after_ms, until_ms]``; arithmetic if countable."""
        if not self.is_countable:
            return super().count_between(after_ms, until_ms, anchor_ms)
        low, high = after_ms // 1000 + 1, until_ms // 1000 + 1
        return zones.count_moments(self.timezone, low, high, self, self._policy)

    def last_runs_begin(
        self, after_ms: int, until_ms: int, anchor_ms: int, count: int
    ) -> int | None:
        """Return the slot with which the last ones begin, looked for from their end."""
        reach = _MINUTE
        while reach < until_ms - after_ms:
            near_ms = until_ms - reach
            if self.count_between(near_ms, until_ms, anchor_ms) >= count:
                return self._last_begin(near_ms, until_ms, anchor_ms, count)
            reach *= 4
        return self._last_begin(after_ms, until_ms, anchor_ms, count)

    def _last_begin(self, after_ms: int, until_ms: int, anchor_ms: int, count: int) -> int | None:
        if not self.is_countable:
            return super().last_runs_begin(after_ms, until_ms, anchor_ms, count)

        def are_fewer(second: int) -> bool:
            return self.count_between(second * 1000 - 1, until_ms, anchor_ms) < count

        seconds = range(after_ms // 1000 + 1, until_ms // 1000 + 1)
        index = bisect_left(seconds, True, key=are_fewer)
        return seconds[index - 1] * 1000 if index and count > 0 else None

    def _where(self) -> str:
        """Return the zone and the policy in words."""
        policy = "" if self.dst == zones.DEFAULT_POLICY else f", dst {self.dst}"
        return f"{self.timezone}{policy}"

    def _encode_clock(self) -> dict[str, Any]:
        zone = {} if self.timezone == "UTC" else {"tz": self.timezone}
        return zone if self.dst == zones.DEFAULT_POLICY else zone | {"dst": self.dst}
