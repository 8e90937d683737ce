"""Moving timers from one shard to another, while the service runs.

A timer *departs*: it is taken out of its shard's queue, and kept there as "moving"; it *arrives*
in the other one, with its state, its definition and its runs that are out; then it is forgotten
where it was. Each step may be repeated, by whoever: a process that ends in between leaves a timer
that is moved on by the next one that needs it, or that goes on with the resharding.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from celery_dtimer.errors import StoreUnavailableError, shown
from celery_dtimer.store import Store

_AGAIN_AFTER = 0.02  # seconds until a timer that is being published is asked for again
_ARRIVES, _IN_FLIGHT, _HAS_TRIGGERS = 1, 2, 3


def move(source: Store, target: Store, ids: Sequence[str]) -> list[str]:
    """Move timers; return those that can not be moved now, because their runs are being published.

    Args:
        source: the shard where they are, or were.
        target: the shard where they belong.
        ids: of the timers.

    Raises:
        StoreError: a shard did not answer, or refused; calling again completes the work.
    """
    waiting, busy = list(ids), []
    while waiting:
        answers = dict(zip(waiting, source.depart(waiting), strict=True))
        leaving = {id: answer for id, answer in answers.items() if answer[0] == _ARRIVES}
        if leaving:
            target.arrive(leaving)
            source.moved(list(leaving))
            target.moved(list(leaving))
        busy += [id for id, answer in answers.items() if answer[0] == _IN_FLIGHT]
        waiting = []
        for id, answer in answers.items():
            if answer[0] == _HAS_TRIGGERS:  # its triggers first, then itself
                kept = move(source, target, answer[1:])
                (busy if kept else waiting).append(id)
    return busy


def move_all(source: Store, target: Store, ids: Sequence[str], timeout: float) -> None:
    """Move timers, and wait for those whose runs are being published.

    Raises:
        StoreUnavailableError: one could not be moved within ``timeout`` seconds.
    """
    until = time.monotonic() + timeout
    waiting = list(ids)
    while waiting := move(source, target, waiting):
        if time.monotonic() > until:
            raise StoreUnavailableError(
                f"the service is being given other shards, and timer {shown(waiting[0])} could not "
                f"be moved within {timeout:g} s: its run is being published; try again"
            )
        time.sleep(_AGAIN_AFTER)


def belonging(
    source: Store, ids: Sequence[str], home_of: Callable[[str], Store]
) -> Mapping[Store, list[str]]:
    """Return which of a shard's timers belong to others; triggers go with their timers."""
    found: dict[Store, list[str]] = {}
    for id, state in zip(ids, source.states(ids)[1], strict=True):
        home = home_of(state.parent if state is not None and state.parent else id)
        if home is not source:
            found.setdefault(home, []).append(id)
    return found
