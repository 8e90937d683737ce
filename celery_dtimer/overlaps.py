"""Runs of timers that hold their runs: whether one may be sent while another is out.

Before such a run is sent it is noted, with a lease (see `celery_dtimer.runs`); so it holds up the
next one from then on until a worker has reported its end, or its lease has ended. What was noted
and is not sent after all is forgotten. What is to end for a newer run is revoked when that is out:
a newer run that is not sent, because its timer was paused just then say, ends nothing.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from celery_dtimer import planning
from celery_dtimer.model import Lease, Run, is_requeued
from celery_dtimer.policy import BUFFER_ONE, CANCEL_OTHER, PLAIN
from celery_dtimer.store import COMMITTED, HeldRun, Settlement, Store

logger = logging.getLogger(__name__)


class Overlaps:
    """Holds up the runs of one instance that must not overlap with others."""

    def __init__(
        self,
        store: Store,
        revoke: Callable[[Sequence[str]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare.

        Args:
            store: of the dispatcher.
            revoke: revokes and terminates tasks, and raises when it can not.
            clock: monotonic seconds.
        """
        self._clock = clock
        self._store = store
        self._revoke = revoke
        self._noted: dict[str, HeldRun] = {}  # by the id of the timer that is to be settled
        self._others: dict[str, list[str]] = {}  # what is to be revoked then, likewise
        self._revoking: dict[str, None] = {}  # task ids, in their order
        self._failures = 0
        self._not_before = 0.0

    def admit(
        self, lease: Lease, planned: list[Settlement], runs: list[Run]
    ) -> tuple[list[Settlement], list[Run], list[Settlement]]:
        """Return what may be sent of planned runs, and how the others are settled.

        Raises:
            FencedError: the lease's epoch is over.
        """
        held = [(place, _held(run)) for place, run in enumerate(runs) if _is_held(run)]
        if not held:
            return planned, runs, []
        answers = self._store.open_runs(lease.instance, lease.epoch, [run for _, run in held])
        settled: dict[int, Settlement] = {}
        for (place, run), answer in zip(held, answers, strict=True):
            if answer == "busy":
                settled[place] = _put_off(planned[place], runs[place], run)
                continue
            id = planned[place].timer.id
            self._noted[id] = run
            self._others[id] = answer.split(" ")[1:]
        places = [place for place in range(len(runs)) if place not in settled]
        return (
            [planned[place] for place in places],
            [runs[place] for place in places],
            list(settled.values()),
        )

    def settled(self, settlement: Settlement, code: int, instance: str) -> None:
        """Hear how a commit has answered: what was not sent is forgotten."""
        id = settlement.timer.id
        run = self._noted.get(id)
        if run is None:
            return
        if code == COMMITTED:
            is_over = settlement.done not in ("run", "refused", "waits", "lacking")
        else:  # without a message it is out already
            is_over = settlement.done != "run" or settlement.message is not None
        if settlement.done != "refused" or code != COMMITTED:
            del self._noted[id]
        if is_over:
            self._store.close_runs(instance, [run])
        others = self._others.pop(id, [])
        if settlement.done == "run" and not is_over:
            self._revoking |= dict.fromkeys(others)

    def revoke_others(self) -> None:
        """Revoke the runs for which newer ones were sent; what fails is tried again the next time.

        They are no longer out then: else one whose worker is dead would be lost, and sent again.

        Raises:
            StoreError: Redis did not answer, or refused.
        """
        if not self._revoking or self._clock() < self._not_before:
            return
        task_ids = list(self._revoking)
        try:
            self._revoke(task_ids)
        except Exception as exc:  # the broker's, of whatever kind
            if not self._failures:
                logger.warning("Runs can not be revoked for newer ones, trying again: %s", exc)
            self._failures += 1
            self._not_before = self._clock() + planning.retry_delay(self._failures)
            return
        self._failures = 0
        self._store.revoke_runs(task_ids, "revoked for the next run of its timer")
        logger.info("Revoked for the next runs of their timers: %s", ", ".join(task_ids))
        self._revoking = {}


def _is_held(run: Run) -> bool:
    policy = run.definition.policy
    return policy is not PLAIN and policy.is_held  # most are plain: they are not to be asked


def _is_late(run: Run) -> bool:
    """Say whether a run is sent once more, when newer ones may be out: it waits for their end."""
    return bool(run.resent) or is_requeued(run.identity)


def _held(run: Run) -> HeldRun:
    overlap = run.definition.policy.overlap
    return HeldRun(
        run.timer_id,
        run.scheduled_ms,
        run.number,
        BUFFER_ONE if overlap == CANCEL_OTHER and _is_late(run) else overlap,
        run.resent,
        tuple(part.task_id for part in run.parts),
    )


def _put_off(planned: Settlement, run: Run, held: HeldRun) -> Settlement:
    """Return what becomes of a run while another of its timer is out."""
    if held.overlap == BUFFER_ONE or _is_late(run):
        return Settlement(planned.timer, "waits", reason=" ".join(held.task_ids))
    skip = planning.refuse(planned.skip, run.scheduled_ms, planning.OVERLAP)
    return planned._replace(done="skip", skip=skip)
