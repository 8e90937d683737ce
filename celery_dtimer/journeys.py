"""The trace of each run that an instance sends; see `celery_dtimer.tracing`."""

from __future__ import annotations

from collections.abc import Sequence

from celery_dtimer import tracing
from celery_dtimer.model import Run, is_one_message
from celery_dtimer.publisher import Outcome
from celery_dtimer.store import COMMIT_REFUSALS, COMMITTED, Message, Settlement, Store

_NOT_SENT = "it was not sent, and is tried again"


class Journeys:
    """Begins a span for each run before its messages are built, and ends it with the commit."""

    def __init__(self, store: Store) -> None:
        """Prepare.

        Args:
            store: knows in which spans timers were created.
        """
        self._store = store
        self._begun: dict[str, tracing.Journey] = {}

    @property
    def are_open(self) -> bool:
        """Say whether a run is on its way."""
        return bool(self._begun)

    def begin(
        self, planned: Sequence[Settlement], runs: list[Run], now_ms: int, dispatch: str
    ) -> list[Run]:
        """Return runs with the contexts in which their messages are to be built.

        Nothing is done, and none is given, where there is nobody to trace them.

        Raises:
            StoreError: Redis did not answer, or refused.
        """
        if not runs or not tracing.is_on():
            return runs
        ids = {id: None for run in runs for id in (run.identity, run.timer_id)}
        creators = dict(zip(ids, self._store.traceparents(list(ids)), strict=True))
        return [
            self._traced(each.timer.id, run, creators, now_ms, dispatch)
            for each, run in zip(planned, runs, strict=True)
        ]

    def _traced(
        self, key: str, run: Run, creators: dict[str, str], now_ms: int, dispatch: str
    ) -> Run:
        kept = run.definition.message
        caller = "" if kept is None else tracing.traceparent_of(kept.get("h"))
        links = dict.fromkeys([caller, creators[run.identity], creators[run.timer_id]])
        attributes = {
            "dtimer.service": run.service,
            "dtimer.instance": run.instance,
            "dtimer.timer.id": run.timer_id,
            "dtimer.timer.name": run.definition.name,
            "dtimer.scheduled_at": run.header["scheduled_at"],
            "dtimer.run": run.number,
            "dtimer.lag": (now_ms - run.scheduled_ms) / 1000,
            "dtimer.dispatch": dispatch,
            "celery.task_name": run.definition.task,
        }
        if kept is not None or is_one_message(run.identity, run.definition):
            attributes["messaging.message.id"] = run.task_id
        name = f"dtimer.dispatch/{run.definition.task}"
        journey = self._begun[key] = tracing.Journey(name, attributes, links=links, parent=caller)
        return run._replace(journey=journey)

    def published(
        self, planned: Sequence[Settlement], outcomes: Sequence[Outcome | Message]
    ) -> None:
        """End the spans of what the broker has not taken, and of what was not tried."""
        for each, outcome in zip(planned, outcomes, strict=False):
            if isinstance(outcome, Exception):
                self._end(each.timer.id, str(outcome))
        for each in planned[len(outcomes) :]:
            self._end(each.timer.id, _NOT_SENT)

    def settled(self, settlement: Settlement, code: int) -> None:
        """End the span of a run that was, or was not, committed."""
        refusal = "" if code == COMMITTED else COMMIT_REFUSALS[code]
        self._end(settlement.timer.id, refusal)

    def forget(self) -> None:
        """End the spans of what was not settled."""
        for key in list(self._begun):
            self._end(key, _NOT_SENT)

    def _end(self, key: str, failure: str) -> None:
        journey = self._begun.pop(key, None)
        if journey is not None:
            journey.end(failure)
