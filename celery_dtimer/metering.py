"""Feeds the meters of an instance with what its dispatcher commits: a batch at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from celery_dtimer.meters import Meters
from celery_dtimer.model import Run, resent_of
from celery_dtimer.planning import jitter_of
from celery_dtimer.store import COMMITTED, Committed, Settlement, Turn

#: Labels of commits that were refused, by the code of ``commit.lua``.
CONFLICTS = {
    0: "other_owner",
    -2: "changed",
    -3: "deleted",
    -4: "inactive",
    -5: "push_refused",
    -6: "not_due",
}
#: Labels of what has failed for good, by what was done with its timer.
FAILED = {"dead": "refused", "broken": "broken", "unreadable": "broken"}


class CommitMeter:
    """Counts what becomes of due timers, and measures by how much their runs are late.

    A run counts as sent once its commit is confirmed, as in the service's own counters, and its lag
    ends there: by the server's clock, which its scheduled moment goes by too.
    """

    def __init__(self, meters: Meters, clock: Callable[[], float] = time.monotonic) -> None:
        """Prepare to add to meters."""
        self._meters = meters
        self._clock = clock
        self._server_ms, self._heard = 0.0, 0.0  # the server's time, and when that was
        self._jitter_ms: dict[str, int] = {}  # of what is to be committed, where there is some

    def hear(self, turn: Turn) -> None:
        """Note the server's time."""
        self._server_ms, self._heard = turn.now_ms + turn.micros / 1000, self._clock()

    def prepared(self, runs: Sequence[Run]) -> None:
        """Note runs that are about to be sent."""
        for run in runs:
            if run.definition.policy.jitter_ms:
                self._jitter_ms[run.identity] = jitter_of(run.definition, run.scheduled_ms)

    def forget(self) -> None:
        """Forget what was prepared: it was not committed."""
        self._jitter_ms.clear()

    def committed(self, batch: Sequence[Settlement], committed: Committed) -> None:
        """Count what was committed, and what was not."""
        if committed.turn is not None:
            self.hear(committed.turn)
        now_ms = self._server_ms + (self._clock() - self._heard) * 1000
        sent, lags = 0, []
        for settlement, code in zip(batch, committed.codes, strict=True):
            if code != COMMITTED:
                self._meters.count("commit_conflicts", label=CONFLICTS[code])
                continue
            timer = settlement.timer
            if settlement.done == "run":
                sent += 1
                if not (timer.parent and resent_of(timer.id)[0]):  # else it was sent before
                    at_ms = int(timer.due) + self._jitter_ms.pop(timer.id, 0)
                    lags.append(max(0.0, now_ms - at_ms) / 1000)
            elif settlement.done in FAILED:
                self._meters.count("failed", label=FAILED[settlement.done])
            if settlement.skip is not None:
                self._meters.count("skipped", settlement.skip.runs, settlement.skip.reason)
        if sent:
            self._meters.observe_sent(sent, lags)
