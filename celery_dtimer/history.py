"""Why a run happened, or did not: what the service's history and the timer's state say of a moment.

The history is a stream of what commits and other transitions have noted; it is capped, so that what
is long past can be found no more. An entry has lines, each with blanks in between:

- ``sent``: id of the timer, scheduled moment, number of the run, "trigger" or "resent";
- ``skipped``: id of the timer, reason, how many runs in a row, the moment of the first of them, and
  one before which, or at which, the last of them was;
- ``replayed``: the moments from which until which Redis has lost what an instance had sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from datetime import timedelta
from typing import NamedTuple

from celery_dtimer import planning
from celery_dtimer.model import UNASSIGNED, Definition, TimerState, to_datetime
from celery_dtimer.schedules import Custom
from celery_dtimer.store import maybe_whole

#: A moment means the run that is nearest to it, within so many ms: people give no fractions.
NEAR_MS = 999

_HIDDEN = {"trigger": "a trigger", "resent": "a run that was lost"}
_REASONS = {
    planning.MISFIRE: "it would have been later than its misfire_grace_time allows",
    planning.COALESCED: "it was missed, and another run stood for it",
    planning.BACKLOG: "more runs were missed than max_catch_up makes up",
    planning.PAUSED: "the timer was paused, stopped or broken",
    planning.ENDED: "the timer had come to its end",
    planning.SUPERSEDED: "the timer was given another schedule, or end, before it was sent",
    planning.OVERLAP: "an earlier run of the timer had not ended",
    planning.REFUSED: "the broker refused its message too often; see the dead letters",
}


class Sent(NamedTuple):
    """A run that was sent."""

    at_ms: int
    instance: str
    scheduled_ms: int
    number: str  #: "trigger" when somebody asked for it, "resent" when it was lost before


class Skipped(NamedTuple):
    """Runs in a row that did not happen."""

    at_ms: int
    reason: str
    runs: int  #: how many
    first_ms: int
    until_ms: int


def records(entries: Iterable[Mapping[str, str]], id: str) -> Iterator[Sent | Skipped]:
    """Yield what entries of the history say of a timer, but for lines that were edited by hand."""
    yield from (record for _, record in all_records(entries, id))


def all_records(
    entries: Iterable[Mapping[str, str]], id: str | None = None
) -> Iterator[tuple[str, Sent | Skipped]]:
    """Yield what entries say of one timer, or of all, with the timers' ids."""
    for entry in entries:
        at_ms = int(entry["at"])
        yield from sent_in(entry, id)
        for line in entry.get("skipped", "").split("\n"):
            match line.split(" "):
                case [timer, reason, *numbers] if id in (None, timer) and _are_whole(numbers, 3):
                    yield timer, Skipped(at_ms, reason, *map(int, numbers))


def sent_in(entry: Mapping[str, str], id: str | None = None) -> Iterator[tuple[str, Sent]]:
    """Yield what an entry says was sent, of one timer or of all, with the timers' ids."""
    at_ms, instance = int(entry["at"]), entry.get("instance", "")
    for line in entry.get("sent", "").split("\n"):
        match line.split(" "):
            case [timer, scheduled, number] if id in (None, timer) and _are_whole([scheduled], 1):
                yield timer, Sent(at_ms, instance, int(scheduled), number)


def _are_whole(texts: list[str], count: int) -> bool:
    return len(texts) == count and all(maybe_whole(text) is not None for text in texts)


def explain(
    definition: Definition | None,
    state: TimerState,
    moment_ms: int,
    now_ms: int,
    found: Iterable[Sent | Skipped],
) -> str:
    """Return in a sentence what became of the run of a moment, or why there was none.

    Args:
        definition: the timer's, None when it cannot be read.
        state: the timer's.
        moment_ms: when the run was scheduled, about.
        now_ms: the server's time.
        found: what the history says of the timer since that moment.
    """
    record = _nearest(definition, moment_ms, found)
    if isinstance(record, Sent):
        what = _HIDDEN.get(record.number) or f"run {record.number}"
        late = timedelta(milliseconds=max(0, record.at_ms - record.scheduled_ms))
        return (
            f"{what}, scheduled at {_shown(record.scheduled_ms)}, was sent at "
            f"{_shown(record.at_ms)} ({late.total_seconds():g} s later) by {record.instance}"
        )
    if isinstance(record, Skipped):
        why = _REASONS.get(record.reason, record.reason)
        others = f", as {record.runs - 1} others were" if record.runs > 1 else ""
        return f"it was skipped at {_shown(record.at_ms)}{others} ({record.reason}): {why}"
    return _without_record(definition, state, moment_ms, now_ms)


def _nearest(
    definition: Definition | None, moment_ms: int, found: Iterable[Sent | Skipped]
) -> Sent | Skipped | None:
    best: Sent | Skipped | None = None
    nearest_ms = NEAR_MS + 1
    for record in found:
        if isinstance(record, Sent):
            away_ms = abs(record.scheduled_ms - moment_ms)
        else:
            away_ms = _distance(definition, record, moment_ms)
        if away_ms < nearest_ms:
            best, nearest_ms = record, away_ms
            if away_ms == 0:
                break
    return best


def _distance(definition: Definition | None, record: Skipped, moment_ms: int) -> int:
    """Return how far a moment is from the nearest of the runs that were skipped."""
    if not record.first_ms - NEAR_MS <= moment_ms <= record.until_ms + NEAR_MS:
        return NEAR_MS + 1
    if definition is None or record.first_ms == record.until_ms:
        return abs(moment_ms - record.first_ms) if record.runs == 1 else 0
    run_ms = planning.run_near(definition, moment_ms, record.first_ms, NEAR_MS)
    is_one_of_them = run_ms is not None and record.first_ms <= run_ms <= record.until_ms
    return abs(run_ms - moment_ms) if run_ms is not None and is_one_of_them else NEAR_MS + 1


def _without_record(
    definition: Definition | None, state: TimerState, moment_ms: int, now_ms: int
) -> str:
    """Explain a moment of which the history says nothing by what the timer is now."""
    if moment_ms + NEAR_MS < state.created_ms:
        return f"the timer was created at {_shown(state.created_ms)}, after that moment"
    if definition is None:
        return f"the definition of the timer can not be read: {state.reason or 'it is gone'}"
    if state.status == "broken":
        return f"the timer is broken and does not run: {state.reason}"
    if isinstance(definition.schedule, Custom):
        return f"the timer runs when code of its beats says so: {definition.schedule.describe()}"
    start_ms = definition.policy.start_ms
    if start_ms is not None and moment_ms + NEAR_MS < start_ms:
        return f"the timer starts at {_shown(start_ms)}, after that moment"
    anchor_ms = state.due_ms or state.last_run_ms or state.created_ms
    run_ms = planning.run_near(definition, moment_ms, anchor_ms, NEAR_MS)
    if state.due_ms is not None and moment_ms >= state.due_ms - NEAR_MS:
        if run_ms is None:
            return f"no run is scheduled for that moment: {definition.schedule.describe()}"
        return _pending(definition, state, run_ms, now_ms)
    if state.status == "stopped":
        return f"the timer is stopped: {state.reason or 'somebody has stopped it'}"
    if run_ms is None:
        return f"no run was scheduled for that moment: {definition.schedule.describe()}"
    if run_ms <= state.created_ms:
        return f"the timer was created at {_shown(state.created_ms)}, and runs later"
    return "the history does not reach back so far, or the timer was changed after that moment"


def _pending(definition: Definition, state: TimerState, run_ms: int, now_ms: int) -> str:
    """Explain a run that is still to come, or should have come."""
    last_ms, max_runs = definition.last_ms, definition.policy.max_runs
    if last_ms is not None and run_ms > last_ms:
        return f"the timer ends at {_shown(last_ms)}, before that moment"
    if max_runs is not None and planning.number_of(definition, state, run_ms) > max_runs:
        return f"the timer ends with its run {max_runs}, before that moment"
    if state.status == "paused":
        return "the timer is paused: its runs are skipped until it is resumed"
    if state.status == "stopped":
        return "the timer is stopped: it does not run until it is resumed"
    if run_ms > now_ms:
        return f"the run is scheduled for {_shown(run_ms)}, which is still to come"
    if run_ms == state.last_sent_ms:
        return "the run was sent; its owner is still to count it"
    if state.waits:
        return "the run is due, and waits for the end of an earlier one (overlap)"
    if state.attempts:
        return f"the run is due: it could not be sent {state.attempts} times, and is tried again"
    if state.at_ms is not None and state.at_ms > now_ms:
        return f"the run is due, and is sent at {_shown(state.at_ms)} (jitter)"
    if state.owner == UNASSIGNED:
        return "the run is due: no instance of the service is alive to send it"
    return f"the run is due: its instance {state.owner} has not sent it yet"


def _shown(moment_ms: int) -> str:
    return to_datetime(moment_ms).isoformat(timespec="milliseconds")
