"""Timers that name no time zone follow the app's when that changes.

The service remembers by which zone they go. An instance whose app has another one, and whose
declaration counts, goes through all timers, some at a time, and gives those of its app their
schedule anew: the next run is the first one after now by the new zone, so that nothing bursts. A
timer that is changed meanwhile is looked at again. Static timers are written by their declaration.

Not promised: a timer that is created after that by a process whose app still has the old zone keeps
that one until the zone changes again, or the timer is created again.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import replace
from typing import Any

from celery_dtimer.errors import InvalidTimerError
from celery_dtimer.model import Definition, Lease, TimerState, decode_definition
from celery_dtimer.schedules import has_clock
from celery_dtimer.store import BATCH, Store

logger = logging.getLogger(__name__)


class Rezoning:
    """Brings the timers of one source to its time zone; `step` does a part of the work."""

    def __init__(self, store: Store, source: str, timezone: str) -> None:
        """Prepare it.

        Args:
            store: where the timers are.
            source: the app whose timers are looked at.
            timezone: the name of its zone.
        """
        self._store = store
        self._source = source
        self._timezone = timezone
        self._waiting: deque[str] | None = None  # None: there is nothing to do
        self._changed = 0

    def begin(self, lease: Lease) -> None:
        """Start if the service goes by another zone; a new service takes this one."""
        known = self._store.timezone_of(self._source)
        if known is None:
            self._note(lease)
        elif known != self._timezone and self._waiting is None:
            logger.info(
                "The time zone of %s is %s now, not %s", self._source, self._timezone, known
            )
            self._waiting, self._changed = deque(self._store.timer_ids()), 0

    def stop(self) -> None:
        """Leave it to others: the declaration of another zone counts."""
        self._waiting = None

    def step(self, lease: Lease) -> bool:
        """Look at some timers; say whether there are more.

        Raises:
            FencedError: the lease's epoch is over.
            StoreError: Redis did not answer, or refused; the timers are looked at by the next step.
        """
        waiting = self._waiting
        if waiting is None:
            return False
        ids = [waiting[place] for place in range(min(BATCH, len(waiting)))]
        _, states = self._store.states(ids)
        again = [
            id
            for id, state, blob in zip(ids, states, self._store.definitions(ids), strict=True)
            if state is not None and blob is not None and not self._look_at(state, blob)
        ]
        for _ in ids:
            waiting.popleft()
        waiting.extend(again)
        if not waiting:
            self._note(lease)
            logger.info("%s timers go by %s now", self._changed, self._timezone)
            self._waiting = None
        return bool(waiting)

    def _note(self, lease: Lease) -> None:
        self._store.note_timezone(lease.instance, lease.epoch, self._source, self._timezone)

    def _look_at(self, state: TimerState, blob: str) -> bool:
        """Change a timer if it is to be; say whether it is done with."""
        if state.source or state.parent or state.is_finished:
            return True
        try:
            definition = decode_definition(blob)
        except InvalidTimerError:
            return True  # its owner says so
        rezoned = self._rezoned(definition)
        if rezoned is None:
            return True
        is_done = self._store.replace(state, definition, rezoned, wakes=False)
        self._changed += is_done
        return is_done

    def _rezoned(self, definition: Definition) -> Definition | None:
        """Return what a timer becomes, None when it stays."""
        schedule: Any = definition.schedule
        if definition.zone_of != self._source or not has_clock(schedule):
            return None
        if schedule.timezone == self._timezone:
            return None
        return replace(definition, schedule=replace(schedule, timezone=self._timezone))
