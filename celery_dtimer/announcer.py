"""Tells receivers of signals what a dispatcher does with timers; nothing while nobody listens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime, timezone
from typing import Any

from celery_dtimer.model import Definition, Run, is_countdown_id, to_datetime
from celery_dtimer.runs import DeadLetter
from celery_dtimer.signals import tell, timer_due, timer_failed, timer_sent, timer_skipped
from celery_dtimer.store import Settlement

_SIGNALS = (timer_due, timer_sent, timer_skipped, timer_failed)
_DEAD = {"dead": "refused", "broken": "broken", "unreadable": "broken"}


class Announcer:
    """Sends the signals of one instance."""

    def __init__(self, service: str) -> None:
        """Prepare to send in the name of a service."""
        self._service = service
        self._names: dict[str, str] = {}  # of what is to be settled, by id
        self._runs: dict[str, Run] = {}

    @property
    def is_heard(self) -> bool:
        """Say whether anybody listens."""
        return any(signal.receivers for signal in _SIGNALS)

    def prepared(
        self,
        definitions: Mapping[str, object],
        planned: Iterable[Settlement],
        runs: Iterable[Run],
    ) -> None:
        """Tell of runs that are about to be sent, and remember what is to be settled."""
        for id, definition in definitions.items():
            self._names[id] = definition.name if isinstance(definition, Definition) else ""
        for settlement, run in zip(planned, runs, strict=True):
            self._runs[settlement.timer.id] = run
            timer_due.send(sender=self._service, **_fields(run))

    def settled(self, settlement: Settlement, instance: str) -> None:
        """Tell of what was committed."""
        timer = settlement.timer
        run, name = self._runs.pop(timer.id, None), self._names.pop(timer.id, "")
        shown_id = timer.parent or timer.id
        if settlement.done == "run" and run is not None:
            timer_sent.send(sender=self._service, **_fields(run))
        if settlement.skip is not None and timer_skipped.receivers:
            reason, count, first_ms, until_ms = settlement.skip
            timer_skipped.send(
                sender=self._service,
                timer_id=shown_id,
                name=name,
                reason=reason,
                runs=count,
                first_at=to_datetime(first_ms),
                until_at=to_datetime(until_ms),
                instance=instance,
            )
        if settlement.done in _DEAD:
            letter = DeadLetter(
                id=f"{timer.id}:{timer.created}:{timer.due}",
                timer_id=shown_id,
                reason=_DEAD[settlement.done],
                error=settlement.reason,
                at=datetime.now(timezone.utc),
                name=name,
                scheduled_at=to_datetime(timer.due_ms) if timer.is_readable else None,
                number=timer.run_number,
                task_id=run.task_id if run is not None and is_countdown_id(timer.id) else None,
                task=run.definition.task if run is not None else "",
                where=instance,
            )
            tell(timer_failed, self._service, letter=letter)

    def forget(self) -> None:
        """Forget what was prepared: it was not settled."""
        self._names.clear()
        self._runs.clear()


def _fields(run: Run) -> dict[str, Any]:
    return {
        "timer_id": run.timer_id,
        "name": run.definition.name,
        "scheduled_at": to_datetime(run.scheduled_ms),
        "number": run.number,
        "task_id": run.task_id,
        "instance": run.instance,
    }
