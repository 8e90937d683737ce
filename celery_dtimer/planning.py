"""Pure decisions about timers: when one is armed, and what is to be done with one that is due.

Nothing here knows Redis or Celery; ``now_ms`` is always the server's time.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from typing import NamedTuple

from celery_dtimer.model import Definition, Status, TimerState, schedule_part, window_part
from celery_dtimer.policy import PLAIN, Defaults
from celery_dtimer.schedules import Crontab, Custom, OneShot

#: Why a run did not happen.
MISFIRE = "misfire"  #: it would have been later than the timer allows
COALESCED = "coalesced"  #: another run stood for it
BACKLOG = "backlog"  #: more runs were missed than are made up
PAUSED = "paused"  #: the timer was paused, stopped or set aside
ENDED = "ended"  #: nothing may be sent any more
SUPERSEDED = "superseded"  #: the timer was given another schedule, or end, before it was sent
OVERLAP = "overlap"  #: an earlier run of the timer had not ended
REFUSED = "refused"  #: the broker refused its message too often
REASONS = (MISFIRE, COALESCED, BACKLOG, PAUSED, ENDED, SUPERSEDED, OVERLAP, REFUSED)

_DEFAULTS = Defaults()

#: Seconds between two tries of a message that the broker refuses: first, at most.
FIRST_RETRY = 0.1
LAST_RETRY = 5.0


class Arming(NamedTuple):
    """The status and the due time that a definition gives to its timer."""

    status: Status
    due_ms: int | None = None
    delay_ms: int | None = None  #: it is due so long after the moment at which it is written
    keeps_due: bool = False  #: the due time that is stored stays, whatever it is by then;
    #: if it still is ``due_ms``, the timer is looked at ``jitter_ms`` later
    reason: str = ""  #: why it does not run
    jitter_ms: int = 0  #: it is looked at so long after it is due
    skip: Skip | None = None  #: runs that are given up
    second_ms: int | None = None  #: the second of them: the first may be out after all


class Skip(NamedTuple):
    """Runs in a row that do not happen."""

    reason: str
    runs: int  #: how many
    first_ms: int  #: they were scheduled from this moment on,
    until_ms: int  #: until this one


class Plan(NamedTuple):
    """What becomes of a due timer."""

    next_due_ms: int | None  #: None: it has no run left
    skip: Skip | None = None
    sends: bool = True  #: the run that is due is sent
    at_ms: int | None = None  #: when it is looked at next; None: when it is due

    @property
    def skipped(self) -> int:
        """How many runs do not happen."""
        return 0 if self.skip is None else self.skip.runs


# ------------------------------------------------------------------ when a timer is armed


def needs_time(definition: Definition) -> bool:
    """Say whether `arm` goes by the server's time to start the timer."""
    schedule = definition.schedule
    if isinstance(schedule, OneShot):
        return False
    shaped = definition.window or definition.policy.jitter_ms
    return schedule.first_delay_ms is None or bool(shaped)


def arm(
    definition: Definition,
    existing: TimerState | None,
    now_ms: int,
    *,
    last_run_ms: int | None = None,
    adopt: bool = False,
    wakes: bool = True,
) -> Arming | None:
    """Return how an upsert leaves the timer, or None when it changes nothing.

    - A new timer, or one with a new schedule, starts anew: a new schedule re-activates what was
      stopped or broken, unless it is not to wake anything.
    - With the schedule unchanged the phase is kept; a timer that has no run left stays as it is,
      unless it now may go further.
    - A paused timer stays paused. A broken one is tried again with any definition, the same too:
      the code that it failed on may be another by now, or what is stored of it is gone.

    Args:
        definition: what is to be stored.
        existing: the timer as it is stored.
        now_ms: the server's time; anything unless `needs_time`.
        last_run_ms: when a timer that is new here ran last.
        adopt: the timer is to be written even when its definition is the same, since its source
            changes.
        wakes: a timer that does not run may do so with another schedule.
    """
    if existing is None:
        if last_run_ms is None:
            return _start(definition, now_ms)
        return _go_on(definition, last_run_ms, now_ms)
    if _is_broken(existing) and wakes:
        return _start(definition, now_ms)
    if existing.revision == definition.revision:
        return _keep(existing, definition) if adopt and not existing.is_finished else None
    if not wakes and existing.status not in ("active", "paused"):
        return _start(definition, now_ms, existing.status)._replace(reason=existing.reason)
    if not is_rescheduled(existing, definition.revision):
        return _rearm(existing, definition, now_ms)
    return _start(definition, now_ms, _woken(existing))


def is_rescheduled(existing: TimerState, revision: str) -> bool:
    """Say whether a revision has another schedule than the timer that is stored."""
    return schedule_part(existing.revision) != schedule_part(revision)


def given_up(
    definition: Definition, existing: TimerState, now_ms: int, kept: Definition | None = None
) -> Skip | None:
    """Return the runs that have come, and do not happen once a timer has another schedule.

    Those of a timer that did not run anyway count as of the time when it was paused.

    Args:
        definition: the timer's, as it has been.
        existing: the timer as it is stored.
        now_ms: the server's time.
        kept: what it is to be, if the run that is due stays: then only those after its end count.
    """
    reason = SUPERSEDED if existing.status == "active" else PAUSED
    due_ms = existing.due_ms
    if due_ms is not None and kept is not None:
        first_ms = _first_cut_off(definition, kept, existing, due_ms)
        if first_ms is None or first_ms > now_ms:
            return None
        return _skip(reason, definition, first_ms, now_ms)
    if due_ms is not None and due_ms == existing.last_sent_ms:  # it is out; those behind it are not
        due_ms = run_after(definition, due_ms, due_ms)
    if due_ms is None or due_ms > now_ms:
        return None
    return _skip(reason, definition, due_ms, now_ms)


def giving_up(arming: Arming, skip: Skip | None, definition: Definition) -> Arming:
    """Return an arming with the runs that are given up for it, by the definition that was."""
    if skip is None or skip.runs == 1:
        return arming._replace(skip=skip)
    second_ms = run_after(definition, skip.first_ms, skip.first_ms)
    return arming._replace(skip=skip, second_ms=second_ms)


def _first_cut_off(
    old: Definition, new: Definition, existing: TimerState, due_ms: int
) -> int | None:
    """Return the first run after the due one that a timer does not have with an earlier end."""
    max_runs, after_ms = new.policy.max_runs, new.last_ms
    if max_runs is not None and existing.runs + 1 >= max_runs:
        after_ms = due_ms
    return None if after_ms is None else run_after(old, max(after_ms, due_ms), due_ms)


def _woken(existing: TimerState) -> Status:
    return "paused" if existing.status == "paused" else "active"


def _keep(existing: TimerState, definition: Definition) -> Arming:
    """Leave a timer as it is, but for a jitter that is another now."""
    due_ms, kept = existing.due_ms, Arming(existing.status, keeps_due=True, reason=existing.reason)
    if due_ms is None or existing.attempts:
        return kept
    jitter_ms = jitter_of(definition, due_ms)
    if existing.at_ms in (None, due_ms + jitter_ms):
        return kept
    return kept._replace(due_ms=due_ms, jitter_ms=jitter_ms)


def _rearm(existing: TimerState, definition: Definition, now_ms: int) -> Arming | None:
    if window_part(existing.revision) != window_part(definition.revision):
        return _rebound(existing, definition, now_ms)
    if existing.is_finished:
        return None
    if existing.due_ms is None:
        return _start(definition, now_ms, _woken(existing))
    return _keep(existing, definition)


def _rebound(existing: TimerState, definition: Definition, now_ms: int) -> Arming | None:
    """Give a timer other bounds: it keeps its phase where that lies within them."""
    max_runs = definition.policy.max_runs
    has_run = existing.is_finished and existing.last_run_ms is not None
    is_spent = max_runs is not None and existing.runs >= max_runs
    if existing.is_finished and (is_spent or (has_run and _is_single(definition))):
        return None
    is_over = existing.is_finished or existing.reason == ENDED
    status = _woken(existing) if is_over else existing.status
    start = _armed(definition, None, status) if is_spent else _start(definition, now_ms, status)
    if is_over or is_spent or existing.due_ms is None:
        return start
    return _keep(existing, definition) if _fits(definition, existing.due_ms, now_ms) else start


def _is_single(definition: Definition) -> bool:
    return isinstance(definition.schedule, OneShot)


def _fits(definition: Definition, due_ms: int, now_ms: int) -> bool:
    """Say whether a due time lies within a timer's bounds, and in the cadence that they give."""
    start_ms = definition.policy.start_ms
    if _within(definition, due_ms) is None or (start_ms is not None and due_ms < start_ms):
        return False
    if start_ms is not None:
        return definition.schedule.next_run_after(due_ms - 1, start_ms) == due_ms
    first_ms = first_run(definition, now_ms)  # later, and it comes from a start that is gone
    return first_ms is None or due_ms <= first_ms


def _is_broken(existing: TimerState) -> bool:
    """Say whether a timer is broken; one whose status was edited into another word is too."""
    return existing.status not in ("active", "paused", "stopped")


def _start(definition: Definition, now_ms: int, status: Status = "active") -> Arming:
    delay_ms = definition.schedule.first_delay_ms
    if delay_ms is not None and not needs_time(definition):
        return Arming(status, delay_ms=delay_ms)
    return _armed(definition, first_run(definition, now_ms), status)


def _go_on(definition: Definition, last_run_ms: int, now_ms: int) -> Arming:
    """Start a timer that ran elsewhere before: in its cadence, and not for what is past."""
    if _is_single(definition):
        return _armed(definition, run_after(definition, last_run_ms, last_run_ms), "active")
    due_ms = run_after(definition, max(now_ms, last_run_ms), last_run_ms)
    return _armed(definition, due_ms, "active")


def _armed(definition: Definition, due_ms: int | None, status: Status) -> Arming:
    if due_ms is None:
        return Arming("stopped" if status == "active" else status, None, reason=ENDED)
    return Arming(status, due_ms, jitter_ms=jitter_of(definition, due_ms))


# ------------------------------------------------------------------ the runs of a timer


def first_run(definition: Definition, now_ms: int) -> int | None:
    """Return when a timer that is created now is first due, None if it never is."""
    schedule, start_ms = definition.schedule, definition.policy.start_ms
    if start_ms is None:
        return _within(definition, schedule.first_run(now_ms))
    # The start is a slot of an interval.
    return _within(definition, schedule.next_run_after(max(now_ms, start_ms - 1), start_ms))


def run_after(definition: Definition, moment_ms: int, anchor_ms: int) -> int | None:
    """Return the first run of a timer after a moment, None when it ends before.

    Args:
        definition: the timer's.
        moment_ms: the run comes after it.
        anchor_ms: the scheduled moment of any of its runs.
    """
    start_ms = definition.policy.start_ms
    if start_ms is not None and moment_ms < start_ms - 1:
        moment_ms = start_ms - 1
    return _within(definition, definition.schedule.next_run_after(moment_ms, anchor_ms))


def _within(definition: Definition, due_ms: int | None) -> int | None:
    last_ms = definition.last_ms
    return due_ms if last_ms is None or due_ms is None or due_ms <= last_ms else None


def _count(definition: Definition, after_ms: int, until_ms: int, anchor_ms: int) -> int:
    """Return how many runs are scheduled in ``(after_ms, until_ms]``."""
    last_ms = definition.last_ms
    if last_ms is not None:
        until_ms = min(until_ms, last_ms)
    return definition.schedule.count_between(after_ms, until_ms, anchor_ms)


def count(definition: Definition, after_ms: int, until_ms: int, anchor_ms: int) -> int:
    """Return how many runs a timer has in ``(after_ms, until_ms]``, as far as it goes.

    Args:
        definition: the timer's; it may have started before.
        after_ms: the runs come after this moment,
        until_ms: until this one.
        anchor_ms: the scheduled moment of any of its runs.
    """
    return _count(definition, after_ms, until_ms, anchor_ms)


def jitter_of(definition: Definition, due_ms: int) -> int:
    """Return how long after its scheduled moment a run is sent on purpose, in ms.

    It looks random from run to run and from timer to timer, and is the same whoever works it out.
    """
    longest = definition.policy.jitter_ms
    if not longest:
        return 0
    digest = hashlib.blake2b(f"{definition.id} {due_ms}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % (longest + 1)


# ------------------------------------------------------------------ when a run is due


def plan(
    definition: Definition,
    due_ms: int,
    now_ms: int,
    number: int = 1,
    is_sent: bool = False,
    defaults: Defaults = _DEFAULTS,
    has_waited: bool = False,
) -> Plan:
    """Return what becomes of a timer that is due.

    Args:
        definition: the timer's.
        due_ms: the scheduled moment of its run.
        now_ms: the server's time.
        number: of the run, from 1.
        is_sent: the run is out already, only its commit was refused.
        defaults: for what the timer's policy leaves open.
        has_waited: the run is late because it had to wait for the end of another: it has no grace
            time, and those that came due meanwhile do not happen.
    """
    policy, moment_ms = definition.policy, max(due_ms, now_ms)
    is_plain = policy is PLAIN and not definition.options  # as most are: it is not to be asked
    if not is_sent and not (is_plain and defaults.grace_ms is defaults.cron_grace_ms is None):
        if _is_over(definition, moment_ms, number):
            return Plan(None, _skip(ENDED, definition, due_ms, moment_ms), sends=False)
        grace_ms = None if has_waited else _grace_ms(definition, defaults)
        if grace_ms is not None and moment_ms - due_ms - jitter_of(definition, due_ms) > grace_ms:
            return _misfire(definition, due_ms, moment_ms - grace_ms, moment_ms)
    if is_plain:
        following_ms = definition.schedule.next_run_after(due_ms, due_ms)
    elif policy.max_runs is not None and number >= policy.max_runs:
        following_ms = None
    else:
        following_ms = run_after(definition, due_ms, due_ms)
    if following_ms is None or following_ms > moment_ms:
        return Plan(following_ms) if is_plain else _planned(definition, following_ms)
    if has_waited or (defaults.coalesce if policy.coalesce is None else policy.coalesce):
        next_ms = _first_to_send(definition, due_ms, moment_ms + 1)
        until_ms = _before(next_ms, moment_ms)
        missed = _count(definition, due_ms, until_ms, due_ms)
        reason = OVERLAP if has_waited else COALESCED
        skip = Skip(reason, missed, following_ms, until_ms) if missed else None
        return _planned(definition, next_ms, skip)
    most = defaults.max_catch_up if policy.max_catch_up is None else policy.max_catch_up
    return _catch_up(definition, due_ms, following_ms, moment_ms, most, is_sent)


def refuse(settled: Skip | None, due_ms: int, reason: str) -> Skip:
    """Return the skip of a run that is not sent after all, with those that it stood for."""
    if settled is None:
        return Skip(reason, 1, due_ms, due_ms)
    return Skip(reason, 1 + settled.runs, min(due_ms, settled.first_ms), settled.until_ms)


def _first_to_send(definition: Definition, due_ms: int, limit_ms: int) -> int | None:
    """Return the first run after a due one that is to be sent at a moment or later."""
    after_ms = max(due_ms, limit_ms - 1 - definition.policy.jitter_ms)
    found_ms = run_after(definition, after_ms, due_ms)
    while found_ms is not None and found_ms + jitter_of(definition, found_ms) < limit_ms:
        found_ms = run_after(definition, found_ms, due_ms)
    return found_ms


def _before(next_ms: int | None, now_ms: int) -> int:
    """Return until when runs are skipped: now, or just before the next one."""
    return now_ms if next_ms is None else min(next_ms - 1, now_ms)


def _is_over(definition: Definition, moment_ms: int, number: int) -> bool:
    """Say whether nothing may be sent any more."""
    max_runs, expires_ms = definition.policy.max_runs, definition.expires_ms
    return (max_runs is not None and number > max_runs) or (
        expires_ms is not None and moment_ms > expires_ms
    )


def _grace_ms(definition: Definition, defaults: Defaults) -> int | None:
    own = definition.policy.grace_ms
    if own is not None:
        return own
    if defaults.cron_grace_ms is not None and isinstance(definition.schedule, Crontab):
        return defaults.cron_grace_ms
    return defaults.grace_ms


def _misfire(definition: Definition, due_ms: int, oldest_ms: int, now_ms: int) -> Plan:
    """Skip the runs that were to be sent before a moment; the next one may be due already."""
    next_ms = _first_to_send(definition, due_ms, oldest_ms)
    skip = _skip(MISFIRE, definition, due_ms, _before(next_ms, now_ms))
    return _planned(definition, next_ms, skip, sends=False)


def _catch_up(
    definition: Definition,
    due_ms: int,
    following_ms: int,
    now_ms: int,
    most: int,
    is_sent: bool,
) -> Plan:
    """Send each run that was missed, but for those of more than so many: the oldest are skipped."""
    after = _count(definition, due_ms, now_ms, due_ms)
    first_ms, missed = (following_ms, after) if is_sent else (due_ms, after + 1)
    dropped = missed - most
    if dropped <= 0:
        return _planned(definition, following_ms, at_ms=now_ms)
    next_ms = _last_begin(definition, due_ms, now_ms, most)
    skip = Skip(BACKLOG, dropped, first_ms, _before(next_ms, now_ms))
    return _planned(definition, next_ms, skip, sends=is_sent, at_ms=now_ms)


def _last_begin(definition: Definition, due_ms: int, now_ms: int, count: int) -> int | None:
    """Return the first of so many runs that are the last until now, else the next one."""
    if count == 0:
        return run_after(definition, now_ms, due_ms)
    until_ms = now_ms if definition.last_ms is None else min(now_ms, definition.last_ms)
    return definition.schedule.last_runs_begin(due_ms, until_ms, due_ms, count)


def _skip(reason: str, definition: Definition, due_ms: int, until_ms: int) -> Skip:
    """Return a run that is due, and those after it up to a moment, as skipped."""
    return Skip(reason, 1 + _count(definition, due_ms, until_ms, due_ms), due_ms, until_ms)


def _planned(
    definition: Definition,
    due_ms: int | None,
    skip: Skip | None = None,
    *,
    sends: bool = True,
    at_ms: int = 0,
) -> Plan:
    """Return a plan whose next run is looked at no earlier than it may be sent."""
    if due_ms is None:
        return Plan(None, skip, sends)
    look_ms = max(at_ms, due_ms + jitter_of(definition, due_ms))
    return Plan(due_ms, skip, sends, None if look_ms == due_ms else look_ms)


def ask(
    definition: Definition, due_ms: int, now_ms: int, last_run_ms: int, *, number: int = 1
) -> Plan:
    """Return what becomes of a timer whose schedule is code: only that says whether it runs now.

    Args:
        definition: the timer's; its schedule is a `Custom` one.
        due_ms: when it was to be asked.
        now_ms: the server's time.
        last_run_ms: when it ran last, or was created.
        number: of the run, from 1.
    """
    schedule, max_runs = definition.schedule, definition.policy.max_runs
    assert isinstance(schedule, Custom)  # noqa: S101 - the others need not be asked
    if _is_over(definition, now_ms, number):
        return Plan(None, sends=False)
    runs, wait_ms = schedule.ask(now_ms, last_run_ms)
    if runs and max_runs is not None and number >= max_runs:
        return Plan(None)
    return _planned(definition, _within(definition, max(now_ms, due_ms) + wait_ms), sends=runs)


def upcoming(
    definition: Definition,
    state: TimerState | None,
    after_ms: int,
    now_ms: int,
    defaults: Defaults = _DEFAULTS,
) -> Iterator[int]:
    """Yield the scheduled moments of the runs that come, as far as the timer goes.

    Args:
        definition: the timer's.
        state: the timer as it is stored; a paused one is taken as if it were resumed. None stands
            for a timer that is created at ``after_ms``.
        after_ms: the runs come after this moment.
        now_ms: the server's time: what is owed by then comes as `plan` has it.
        defaults: for what the timer's policy leaves open.
    """
    runs = 0 if state is None else state.runs
    if state is None:
        due_ms = first_run(definition, after_ms)
    else:
        due_ms = _next_due(definition, state, now_ms)
        while due_ms is not None and due_ms <= now_ms:
            is_sent = due_ms == state.last_sent_ms
            owed = plan(definition, due_ms, now_ms, runs + 1, is_sent, defaults)
            if owed.sends and due_ms > after_ms and not is_sent:
                yield due_ms
            runs += owed.sends
            due_ms = owed.next_due_ms
    if due_ms is None:
        return
    anchor_ms, next_ms = due_ms, due_ms if due_ms > after_ms else None
    if next_ms is None:
        runs += 1 + _count(definition, due_ms, after_ms, due_ms)
        next_ms = run_after(definition, after_ms, due_ms)
    max_runs = definition.policy.max_runs
    while next_ms is not None and (max_runs is None or runs < max_runs):
        yield next_ms
        runs += 1
        next_ms = run_after(definition, next_ms, anchor_ms)


def number_of(definition: Definition, state: TimerState, run_ms: int) -> int:
    """Return the number that a run would have that is still to come, if none is missed."""
    due_ms = run_ms if state.due_ms is None else state.due_ms
    return state.runs + 1 + _count(definition, due_ms, run_ms, due_ms)


def _next_due(definition: Definition, state: TimerState, now_ms: int) -> int | None:
    if state.status == "active":
        return state.due_ms
    return resume(definition, state, now_ms).next_due_ms if state.status == "paused" else None


def run_near(definition: Definition, moment_ms: int, anchor_ms: int, near_ms: int) -> int | None:
    """Return the scheduled moment of the run that is nearest to a moment, None if none is near.

    Args:
        definition: the timer's.
        moment_ms: the moment.
        anchor_ms: the scheduled moment of any run of the timer.
        near_ms: so far it may be away.
    """
    schedule = definition.schedule
    if isinstance(schedule, OneShot):
        found_ms: int | None = schedule.at_ms
    else:
        found_ms = schedule.next_run_after(moment_ms - near_ms - 1, anchor_ms)
        while found_ms is not None and found_ms < moment_ms:
            next_ms = schedule.next_run_after(found_ms, anchor_ms)
            if next_ms is None or abs(next_ms - moment_ms) > moment_ms - found_ms:
                break
            found_ms = next_ms
    return found_ms if found_ms is not None and abs(found_ms - moment_ms) <= near_ms else None


def resume(definition: Definition, state: TimerState, now_ms: int) -> Plan:
    """Return the next run of a timer that is resumed now, and those that passed meanwhile.

    A one-shot whose moment passed while it was paused runs at once: it has no next run to go on
    with. A run that is out already, its commit refused, stays the next one, which its owner only
    counts, unless others have passed since: else those would be made up for.
    """
    due_ms, max_runs = state.due_ms, definition.policy.max_runs
    if max_runs is not None and state.runs >= max_runs:
        return Plan(None)
    if due_ms is not None and due_ms == state.last_sent_ms:
        return _resume_behind(definition, state, due_ms, now_ms)
    if due_ms is not None and due_ms > now_ms:
        return _planned(definition, due_ms)
    if due_ms is None:
        return _planned(definition, first_run(definition, now_ms))
    next_ms = run_after(definition, now_ms, due_ms)
    if next_ms is None and _is_single(definition):
        return _planned(definition, first_run(definition, now_ms))
    return _planned(definition, next_ms, _skip(PAUSED, definition, due_ms, now_ms))


def _resume_behind(definition: Definition, state: TimerState, sent_ms: int, now_ms: int) -> Plan:
    """Return how a timer goes on whose due run is out."""
    max_runs = definition.policy.max_runs
    passed_ms = run_after(definition, sent_ms, sent_ms)
    next_ms = run_after(definition, max(now_ms, sent_ms), sent_ms)
    is_last = max_runs is not None and state.runs + 1 >= max_runs
    if passed_ms is None or passed_ms > now_ms or next_ms is None or is_last:
        return Plan(sent_ms)
    return _planned(definition, next_ms, _skip(PAUSED, definition, passed_ms, now_ms))


def retry_delay(attempts: int) -> float:
    """Return the seconds until the next try after so many refusals: exponential, with jitter."""
    longest: float = min(LAST_RETRY, FIRST_RETRY * 2 ** min(attempts, 16))
    return longest * random.uniform(0.5, 1.0)  # noqa: S311 - spreads load, keeps no secret
