"""A user's program, as mypy reads it: it is checked, never run."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

from celery import Celery
from celery.schedules import crontab

from celery_dtimer import (
    CallbackTimer,
    DistributedTimer,
    DistributedTimerError,
    Instance,
    Timer,
    TimerNotFoundError,
)

app = Celery("shop", broker="redis://localhost")
timers = DistributedTimer(app, service="shop")


@timers.callback
def plain(timer: CallbackTimer) -> tuple[datetime, int]:
    return timer.scheduled_at, timer.run


@timers.callback(run_once=timedelta(hours=1))
def at_most_once(timer: CallbackTimer) -> None: ...


@timers.callback("named")
def with_a_name(timer: CallbackTimer, kind: str = "daily") -> None: ...


@timers.callback(schedule=timedelta(minutes=1), kwargs={"kind": "x"}, queue="reports")
def static(timer: CallbackTimer, kind: str) -> None: ...


def create() -> list[str]:
    first: str = timers.create_timer("a", 10, plain)
    timers.create_timer("b", crontab(hour=3), with_a_name.s("pdf"), timezone="Europe/Paris")
    timers.create_timer("c", "0 3 * * *", "named", args=[1], kwargs={"a": 1}, queue="q", priority=3)
    timers.create_timer("d", datetime.now(timezone.utc), static, description="once")
    return [first, *timers.create_timers([{"name": "e", "schedule": 1, "callback": plain}])]


def look(first: str) -> list[Timer]:
    timer: Timer = timers.update_timer(first, schedule=20)
    found = timers.get_timers(status="active", name="a*", offset=1, limit=2)
    return [timer, *found, *timers.get_instance_timers()]


def next_run_of(timer: Timer) -> tuple[datetime | None, str | None, int]:
    return timer.next_run_at, timer.instance, timer.total_run_count


def instances() -> list[Instance]:
    timers.register_callback("short", plain)
    timers.start()
    assert timers.pending_count(timers.start()) >= 0
    assert not timers.check_consistency()
    timers.stop()
    return timers.get_service_instances()


def change(first: str) -> DistributedTimerError | None:
    try:
        timers.pause_timer(first)
        timers.resume_timer(first)
        timers.trigger_timer(first)
        timers.stop_timer(first)
        timers.delete_timer(first)
    except TimerNotFoundError as exc:
        return exc
    return None
