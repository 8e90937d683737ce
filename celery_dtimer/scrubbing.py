"""The scrubber: finds and puts right what the invariants forbid, at a low rate.

What is stored can be edited, evicted, or lost in part: lists name timers that are gone, timers are
in no list, owners do not exist, scores differ, keys are of another type. An instance looks for that
with each failure check, beside what its work runs into:

- keys of the service that are of another type are removed (``mend.lua``);
- the timers of the queue, of the inactive ones, and of every owner are compared with each other and
  with their states, so many at a time, round after round (``scrub.lua``);
- runs that are out have a lease (``scrub_runs.lua``);
- keys that no list knows are found by SCAN, at a very low rate, where the server allows that.

Where something was wrong the rest is looked at at once, since damage seldom comes alone. Each
repair is logged once, as an error, and counted in the service (``repaired``).

Not promised: that what nothing else tells comes back. The paused and stopped timers of a list that
was lost are found by SCAN alone; runs that only a history knew are not. Timers that were created at
run time and whose state is gone are gone.
"""

from __future__ import annotations

import logging

from celery_dtimer.errors import StoreError, StoreUnavailableError
from celery_dtimer.model import Lease
from celery_dtimer.store import Repair, Store

logger = logging.getLogger(__name__)

#: Parts that are looked at one after the other when something was wrong: 20,000 timers.
PARTS = 200

_LOST_WITH = {
    "inactive_timers": "paused and stopped timers are listed again once SCAN has come upon them",
    "counters": "counting begins anew",
    "history": "it begins anew",
    "runs": "it begins anew",
    "running": "runs that are out count as ended",
    "dead_timers": "the dead letters are lost",
    "declarations": "the declaration that is seen next counts",
}


class Scrubber:
    """Looks at a part of what is stored; `step` is one look."""

    def __init__(self, store: Store) -> None:
        """Prepare to look at a service."""
        self._store = store
        self._position = ""
        self._runs_position = "0"
        self._cursor = 0
        self._may_scan = True

    def mend(self) -> bool:
        """Remove keys of another type; say whether there were any.

        Raises:
            StoreError: Redis did not answer, or refused.
        """
        removed = self._store.mend()
        for what, id, kind in removed:
            name = self._store.keys(what, id or None)
            then = _LOST_WITH.get(what, "what was in it is put together from the other keys")
            logger.error("Key %s was a %s: removed; %s", name, kind, then)
        if removed:
            self._position, self._runs_position, self._cursor = "", "0", 0
        return bool(removed)

    def step(self, lease: Lease) -> bool:
        """Look at a part; say whether something was wrong, so that the others are to follow.

        Raises:
            FencedError: the lease's epoch is over.
            StoreError: Redis did not answer, or refused.
        """
        was_damaged = self.mend()
        self._cursor, keys = self._scan()
        self._position, repairs = self._store.scrub(
            lease.instance, lease.epoch, self._position, keys=keys
        )
        if not self._position:
            self._runs_position, others = self._store.scrub_runs(
                lease.instance, lease.epoch, self._runs_position
            )
            repairs += others
        _log(repairs)
        return was_damaged or bool(repairs)

    @property
    def is_through(self) -> bool:
        """Say whether the last look was the end of a round."""
        return not self._position and not self._cursor

    def _scan(self) -> tuple[int, list[tuple[str, str]]]:
        if not self._may_scan:
            return 0, []
        try:
            cursor, keys = self._store.keys_from(self._cursor)
        except StoreUnavailableError:
            raise
        except StoreError as exc:
            self._may_scan = False
            logger.debug("No look at keys that no list knows: %s", exc)
            return 0, []
        timers = (("timer", id) if what == "timer_definition" else (what, id) for what, id in keys)
        return cursor, list(dict.fromkeys(timers))


def _log(repairs: list[Repair]) -> None:
    """Log what was repaired: in one line what had the same wrong with it."""
    alike: dict[tuple[str, str], list[str]] = {}
    for what, id, wrong in repairs:
        alike.setdefault((what, wrong), []).append(id)
    for (what, wrong), ids in alike.items():
        logger.error("Stored inconsistently (%s %s): %s", what, ", ".join(ids), wrong)
