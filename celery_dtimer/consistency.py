"""The consistency check: what must hold in a service after every script and every fault.

1. An active timer is in ``timer_queue`` with the score that its hash says; a paused, stopped or
   broken one is not.
2. An active timer is in exactly one ``instance_timers``, its owner's, with the same score.
3. Every ``instance_timers`` belongs to a registered instance or to ``unassigned``.

It reads without stopping the world: what looks wrong is read again, and only what stays wrong
counts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from celery_dtimer.model import UNASSIGNED, TimerState
from celery_dtimer.store import Store

_READS = 3


@dataclass(frozen=True, slots=True, order=True)
class Violation:
    """One thing that does not hold."""

    id: str  #: of a timer or an instance
    problem: str

    def __str__(self) -> str:
        """Return the violation as a line."""
        return f"{self.id}: {self.problem}"


def check(store: Store) -> list[Violation]:
    """Return what does not hold in the store's service; an empty list when all is well."""
    found = set(_read(store))
    for _ in range(_READS - 1):
        if not found:
            break
        found &= set(_read(store))
    return sorted(found)


def _read(store: Store) -> Iterable[Violation]:
    queue = store.scores("timer_queue")
    instances = list(store.scores("service_instances"))
    owned = {owner: store.scores("instance_timers", owner) for owner in [*instances, UNASSIGNED]}
    inactive = store.scores("inactive_timers")
    ids = sorted({*queue, *inactive, *(id for timers in owned.values() for id in timers)})
    for id, state in zip(ids, store.states(ids)[1], strict=True):
        owners = [owner for owner, timers in owned.items() if id in timers]
        for problem in _problems(state, queue.get(id), owners, owned, id in inactive):
            yield Violation(id, problem)
    yield from _hidden_owners(store, {*instances, UNASSIGNED}, queue)


def _problems(
    state: TimerState | None,
    queued: float | None,
    owners: list[str],
    owned: dict[str, dict[str, float]],
    inactive: bool,
) -> Iterable[str]:
    if state is None:
        yield "is listed, but there is no such timer"
    elif state.status != "active":
        if queued is not None or owners:
            yield f"is {state.status}, but still in the queue or owned"
        if not inactive:
            yield f"is {state.status}, but not listed as inactive"
    else:
        if queued != state.at_ms:
            yield f"is in the queue at {queued}, its hash says {state.at_ms}"
        if owners != [state.owner]:
            yield f"is owned by {owners}, its hash says {state.owner}"
        if any(owned[owner][state.id] != state.at_ms for owner in owners):
            yield "has another time at its owner than in its hash"
        if inactive:
            yield "is active, but listed as inactive"


def _hidden_owners(store: Store, known: set[str], queue: dict[str, float]) -> Iterable[Violation]:
    """Yield the owners that timers name and that are not registered, though they hold timers."""
    ids = list(queue)
    owners = {state.owner for state in store.states(ids)[1] if state is not None} - known
    for owner in sorted(owners):
        if store.scores("instance_timers", owner):
            yield Violation(owner, "owns timers, but is not registered")
