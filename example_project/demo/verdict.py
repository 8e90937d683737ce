"""What should have run and what did: computed from the rules and the workers' records alone.

A timer's slots are worked out here anew, from its schedule, and compared with the moments that the
workers wrote down. What the beats say of themselves counts in one place only: a slot without a run
is forgiven when the timer counts it as skipped, since one run stands for all slots that were missed
while its owner was dead.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import Any
from zoneinfo import ZoneInfo

from celery.schedules import crontab

from celery_dtimer.schedules import Crontab, Interval, OneShot, Schedule

_EPOCH = datetime.fromtimestamp(0, timezone.utc)


@dataclass(frozen=True, slots=True)
class SeenRun:
    """A run that a worker has ended."""

    timer_id: str
    name: str
    instance: str  #: the beat that sent it
    worker: str
    number: int
    scheduled_at: datetime
    lag: timedelta

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> SeenRun:
        """Return the run of what the recorder wrote."""
        scheduled_at = datetime.fromisoformat(record["scheduled_at"])
        return cls(
            timer_id=record["id"],
            name=record["name"],
            instance=record["instance"],
            worker=str(record["worker"]).partition("@")[0],
            number=record["run"],
            scheduled_at=scheduled_at,
            lag=timedelta(seconds=record["ended_at"] - scheduled_at.timestamp()),
        )


@dataclass(frozen=True, slots=True)
class Account:
    """What is known of a timer when all is over."""

    timer_id: str
    name: str
    schedule: Schedule | None  #: None: deleted before it could run
    created_at: datetime
    until: datetime  #: slots before this moment should have run
    skipped: int = 0


@dataclass(frozen=True, slots=True)
class Tally:
    """The slots of one timer, and what became of them."""

    name: str
    slots: int
    ran: int
    skipped: int
    lost: int
    doubled: int
    stray: int  #: runs at moments that are no slots
    longest_lag: timedelta  #: from scheduled_at to the end of the task

    @property
    def is_clean(self) -> bool:
        """Say whether each slot ran once, or was counted as skipped."""
        return not (self.lost or self.doubled or self.stray)


def tally(accounts: Iterable[Account], runs: Sequence[SeenRun]) -> list[Tally]:
    """Return what became of each timer's slots; runs of unknown timers get a tally of their own."""
    left: dict[str, list[SeenRun]] = {}
    for run in runs:
        left.setdefault(run.timer_id, []).append(run)
    known = [_tally(account, left.pop(account.timer_id, [])) for account in accounts]
    unknown = [_stray_tally(own_runs) for own_runs in left.values()]
    return [*known, *unknown]


def merged(name: str, tallies: Sequence[Tally]) -> Tally:
    """Return several timers' tallies as one."""
    return Tally(
        name=name,
        slots=sum(each.slots for each in tallies),
        ran=sum(each.ran for each in tallies),
        skipped=sum(each.skipped for each in tallies),
        lost=sum(each.lost for each in tallies),
        doubled=sum(each.doubled for each in tallies),
        stray=sum(each.stray for each in tallies),
        longest_lag=max((each.longest_lag for each in tallies), default=timedelta(0)),
    )


def _tally(account: Account, runs: Sequence[SeenRun]) -> Tally:
    seen = Counter(run.scheduled_at for run in runs)
    due = set(slots(account, seen))
    missing = len(due - seen.keys())
    return Tally(
        name=account.name,
        slots=len(due),
        ran=len(due & seen.keys()),
        skipped=account.skipped,
        # A timer that counts more slots as skipped than are missing has miscounted somewhere.
        lost=abs(missing - account.skipped),
        doubled=seen.total() - len(seen),
        stray=len(seen.keys() - due),
        longest_lag=max((run.lag for run in runs), default=timedelta(0)),
    )


def _stray_tally(runs: Sequence[SeenRun]) -> Tally:
    lag = max(run.lag for run in runs)
    return Tally(runs[0].name, 0, 0, 0, 0, 0, stray=len(runs), longest_lag=lag)


def slots(account: Account, seen: Iterable[datetime] = ()) -> Iterator[datetime]:
    """Yield the moments at which a timer should have run, in order.

    Args:
        account: the timer.
        seen: moments at which it ran; the first one tells the phase of an interval.
    """
    schedule = account.schedule
    if isinstance(schedule, Interval):
        return _interval_slots(account, timedelta(milliseconds=schedule.every_ms), seen)
    if isinstance(schedule, Crontab):
        return _crontab_slots(account, schedule)
    if isinstance(schedule, OneShot):
        moment = _EPOCH + timedelta(milliseconds=schedule.at_ms)
        return iter([moment] if moment < account.until else [])
    return iter([])


def _interval_slots(
    account: Account, every: timedelta, seen: Iterable[datetime]
) -> Iterator[datetime]:
    anchor = min(seen, default=account.created_at + every)
    moment = anchor - (anchor - account.created_at) // every * every
    while moment < account.until:
        if moment > account.created_at:
            yield moment
        moment += every


def _crontab_slots(account: Account, schedule: Crontab) -> Iterator[datetime]:
    rule: Any = crontab.from_string(schedule.expression)
    minute = timedelta(minutes=1)
    zone = timezone.utc if schedule.timezone == "UTC" else ZoneInfo(schedule.timezone)
    moment = account.created_at.replace(second=0, microsecond=0) + minute
    while moment < account.until:
        local = moment.astimezone(zone)
        if (
            local.minute in rule.minute
            and local.hour in rule.hour
            and local.day in rule.day_of_month
            and local.month in rule.month_of_year
            and local.isoweekday() % 7 in rule.day_of_week
        ):
            yield moment
        moment += minute
