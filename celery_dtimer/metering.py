"""Feeds the meters of an instance with what its dispatcher commits: a batch at a time."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence

from celery_dtimer.meters import Counted, Meters
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

    def refused(self) -> None:
        """Count a message that the broker has refused."""
        self._meters.count("refused_messages")

    def forget(self) -> None:
        """Forget what was prepared: it was not committed."""
        self._jitter_ms.clear()

    def committed(self, batch: Sequence[Settlement], committed: Committed) -> None:
        """Count what was committed, and what was not."""
        if committed.turn is not None:
            self.hear(committed.turn)
        others: Counter[tuple[Counted, str]] = Counter()
        skipped: dict[str, int] = {}  # as many as runs where more is due than can be sent
        moments_ms, jitter_ms, resent = [], self._jitter_ms, 0
        for settlement, code in zip(batch, committed.codes, strict=True):
            timer, done, skip = settlement.timer, settlement.done, settlement.skip
            if code != COMMITTED:
                others["commit_conflicts", CONFLICTS[code]] += 1
                continue
            if done == "run":
                if timer.parent and resent_of(timer.id)[0]:
                    resent += 1  # it was sent before: that it is late says nothing
                else:
                    later_ms = jitter_ms.pop(timer.id, 0) if jitter_ms else 0
                    moments_ms.append(int(timer.due) + later_ms)
            elif done in FAILED:
                others["failed", FAILED[done]] += 1
            if skip is not None:
                reason, runs, _, _ = skip
                skipped[reason] = skipped.get(reason, 0) + runs
        self._meters.observe_sent(len(moments_ms) + resent, self._lags(moments_ms))
        for reason, runs in skipped.items():
            self._meters.count("skipped", runs, reason)
        for (what, label), count in others.items():
            self._meters.count(what, count, label)

    def _lags(self, moments_ms: Sequence[int]) -> list[float]:
        """Return the seconds since some moments; none is below 0, should the clock go back."""
        now_ms = self._server_ms + (self._clock() - self._heard) * 1000
        lags = [(now_ms - moment_ms) / 1000 for moment_ms in moments_ms]
        return lags if min(lags, default=0.0) >= 0 else [max(0.0, lag) for lag in lags]


class Unmetered:
    """What stands for a `CommitMeter` where nobody reads the meters: it costs no time."""

    def hear(self, turn: Turn) -> None:
        """Do nothing."""

    def prepared(self, runs: Sequence[Run]) -> None:
        """Do nothing."""

    def refused(self) -> None:
        """Do nothing."""

    def forget(self) -> None:
        """Do nothing."""

    def committed(self, batch: Sequence[Settlement], committed: Committed) -> None:
        """Do nothing."""


UNMETERED = Unmetered()
