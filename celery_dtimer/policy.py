"""Pure decisions about timers: when one is armed, and what is to be done with one that is due.

Nothing here knows Redis or Celery; ``now_ms`` is always the server's time.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import NamedTuple

from celery_dtimer.model import Definition, Status, TimerState, schedule_part
from celery_dtimer.schedules import OneShot

#: Seconds between two tries of a message that the broker refuses: first, at most.
FIRST_RETRY = 0.1
LAST_RETRY = 5.0


class Arming(NamedTuple):
    """The status and the due time that a definition gives to its timer."""

    status: Status
    due_ms: int | None = None
    delay_ms: int | None = None  #: it is due so long after the moment at which it is written
    keeps_due: bool = False  #: the due time that is stored stays, whatever it is by then
    reason: str = ""  #: why it is broken


@dataclass(frozen=True, slots=True)
class Plan:
    """What becomes of a due timer once its run has been sent."""

    next_due_ms: int | None  #: None: it has run for the last time
    skipped: int  #: slots between the run and the next one, for which the run stands


def needs_time(definition: Definition) -> bool:
    """Say whether `arm` goes by the server's time to start the timer."""
    schedule = definition.schedule
    return schedule.first_delay_ms is None and not isinstance(schedule, OneShot)


def arm(
    definition: Definition,
    existing: TimerState | None,
    now_ms: int,
    *,
    last_run_ms: int | None = None,
    adopt: bool = False,
    revive: bool = False,
) -> Arming | None:
    """Return how an upsert leaves the timer, or None when it changes nothing.

    - A new timer, or one with a new schedule, starts anew: a new schedule re-activates what was
      stopped or broken.
    - With the schedule unchanged the phase is kept; a one-shot that has run stays as it is.
    - A paused timer stays paused; a broken one becomes active with any new definition.

    Args:
        definition: what is to be stored.
        existing: the timer as it is stored.
        now_ms: the server's time; anything unless `needs_time`.
        last_run_ms: when a timer that is new here ran last.
        adopt: the timer is to be written even when its definition is the same, since its source
            changes.
        revive: a broken timer is to be tried again even when its definition is the same, since
            the code that it failed on may be another by now.
    """
    if existing is None:
        return (
            _start(definition, now_ms) if last_run_ms is None else _go_on(definition, last_run_ms)
        )
    if _is_broken(existing) and revive:
        return _start(definition, now_ms)
    if existing.revision == definition.revision:
        return (
            Arming(existing.status, keeps_due=True) if adopt and not existing.is_finished else None
        )
    if schedule_part(existing.revision) == schedule_part(definition.revision):
        return _rearm(existing, definition, now_ms)
    return _start(definition, now_ms, "paused" if existing.status == "paused" else "active")


def _rearm(existing: TimerState, definition: Definition, now_ms: int) -> Arming | None:
    if existing.is_finished:
        return None
    if _is_broken(existing) or existing.due_ms is None:
        return _start(definition, now_ms)
    return Arming(existing.status, keeps_due=True)


def _is_broken(existing: TimerState) -> bool:
    """Say whether a timer is broken; one whose status was edited into another word is too."""
    return existing.status not in ("active", "paused", "stopped")


def _start(definition: Definition, now_ms: int, status: Status = "active") -> Arming:
    delay_ms = definition.schedule.first_delay_ms
    if delay_ms is not None:
        return Arming(status, delay_ms=delay_ms)
    due_ms = definition.schedule.first_run(now_ms)
    return Arming("stopped" if due_ms is None and status == "active" else status, due_ms)


def _go_on(definition: Definition, last_run_ms: int) -> Arming:
    due_ms = definition.schedule.next_run_after(last_run_ms, last_run_ms)
    return Arming("stopped" if due_ms is None else "active", due_ms)


def plan(definition: Definition, due_ms: int, now_ms: int) -> Plan:
    """Return what follows the run of ``due_ms``: one run stands for all that were missed."""
    schedule = definition.schedule
    moment_ms = max(now_ms, due_ms)
    following_ms = schedule.next_run_after(due_ms, due_ms)
    if following_ms is None or following_ms > moment_ms:
        return Plan(following_ms, 0)
    next_due_ms = schedule.next_run_after(moment_ms, due_ms)
    return Plan(next_due_ms, schedule.count_between(due_ms, moment_ms, due_ms))


def resume(definition: Definition, state: TimerState, now_ms: int) -> Plan:
    """Return the next run of a timer that is resumed now, and the slots that passed meanwhile.

    A one-shot whose moment passed while it was paused runs at once: it has no next run to go on
    with. A run that is out already, its commit refused, stays the next one: its owner only counts
    it.
    """
    if state.due_ms is not None and state.due_ms == state.last_sent_ms:
        return Plan(state.due_ms, 0)
    anchor_ms = state.due_ms if state.due_ms is not None else now_ms
    next_due_ms = definition.schedule.next_run_after(now_ms, anchor_ms)
    if next_due_ms is None:
        return Plan(definition.schedule.first_run(now_ms), 0)
    if state.due_ms is None or state.due_ms > now_ms:
        return Plan(next_due_ms if state.due_ms is None else state.due_ms, 0)
    return Plan(next_due_ms, 1 + definition.schedule.count_between(anchor_ms, now_ms, anchor_ms))


def retry_delay(attempts: int) -> float:
    """Return the seconds until the next try after so many refusals: exponential, with jitter."""
    longest: float = min(LAST_RETRY, FIRST_RETRY * 2 ** min(attempts, 16))
    return longest * random.uniform(0.5, 1.0)  # noqa: S311 - spreads load, keeps no secret
