"""What becomes of runs, and how the service is."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from typing import Any

from celery_dtimer import (
    DeadLetter,
    Finding,
    Instance,
    PendingTask,
    RunRecord,
    TimerAudit,
    __version__,
)
from celery_dtimer.signals import failover, instance_left, timer_failed, timer_sent
from shop.app import bare, timers

NOW = datetime.now(timezone.utc)


def heard(sender: str, **arguments: Any) -> None:
    print(sender, arguments["timer_id"])


def failed(sender: str, letter: DeadLetter, **_: Any) -> None:
    print(sender, letter.id)


timer_sent.connect(heard, sender="shop")
instance_left.connect(heard)
failover.connect(heard)
timer_failed.connect(failed)


def runs() -> list[tuple[str, datetime, str, float | None, str | None]]:
    found: list[RunRecord] = timers.get_runs("a", state="failed", offset=1, limit=2)
    return [(run.name, run.scheduled_at, run.state, run.took, run.error) for run in found]


def letters() -> int:
    found: list[DeadLetter] = timers.get_dead_letters(offset=0, limit=10)
    for letter in found:
        timers.requeue_dead_letter(letter)
    return timers.purge_dead_letters(before=NOW)


def wrong() -> list[str]:
    findings: list[Finding] = timers.doctor(worker_timeout=2)
    audits: list[TimerAudit] = timers.audit(NOW - timedelta(days=1), until=NOW, timer="a")
    lines = [f"{found.check}: {found.found} {found.advice}" for found in findings]
    lost: list[int | None] = [found.lost for found in audits if not found.ok]
    return [*lines, *map(str, lost), *map(str, timers.check_consistency()), __version__]


def instances() -> list[Instance]:
    timers.register_callback("short", bare)
    mine: str = timers.start()
    waiting: int = timers.pending_count(mine)
    timers.stop()
    return timers.get_service_instances() if waiting else []


def told() -> str:
    moments: list[datetime] = timers.preview("a", 3)
    moments += timers.preview("30 2 * * *", 3, timezone="Europe/Paris", dst="skip")
    skips: dict[str, int] = timers.get_counts().skips
    return timers.why("a", moments[0]) + str(skips)


def calls() -> bool:
    found: list[PendingTask] = timers.get_pending(task="shop.*", after=NOW, limit=5)
    return any(timers.cancel(call.task_id) for call in found)
