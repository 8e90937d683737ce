"""Timers that are created, looked at and changed."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

from celery.schedules import crontab, solar

from celery_dtimer import (
    ConflictError,
    DistributedTimerError,
    InvalidTimerError,
    SettingsError,
    StoreUnavailableError,
    Timer,
    TimerNotFoundError,
    TooManyTimersError,
)
from shop.app import bare, plain, static, timers, with_a_name

NOW = datetime.now(timezone.utc)


def create() -> list[str]:
    first: str = timers.create_timer("a", 10, bare)
    timers.create_timer("b", crontab(hour=3), with_a_name.s("pdf"), timezone="Europe/Paris")
    timers.create_timer("c", "0 3 * * *", "named", args=[1], kwargs={"a": 1}, queue="q", priority=3)
    timers.create_timer("d", NOW, static, description="once")
    timers.create_timer("e", 0.5, plain, args=("x",), expires=timedelta(minutes=1))
    timers.create_timer("f", solar("sunset", 48.8, 2.3), bare, end_at=NOW + timedelta(days=9))
    timers.create_timer("g", timedelta(hours=1), bare, start_at=NOW, max_runs=3, jitter=5)
    timers.create_timer("h", "@daily", bare, dst="both", coalesce=False, max_catch_up=10)
    timers.create_timer("i", 60, bare, misfire_grace_time=timedelta(minutes=5), overlap="skip")
    timers.create_timer("j", 60, bare, shards=4, resend_lost=True, relative=True)
    return [first, *timers.create_timers([{"name": "k", "schedule": 1, "callback": bare}])]


def look() -> list[Timer]:
    one: Timer = timers.get_timer("a")
    found = timers.get_timers(status="active", name="a*", task="shop.*", offset=1, limit=2)
    return [one, *found, *timers.get_timers(), *timers.get_instance_timers()]


def facts(timer: Timer) -> tuple[datetime | None, str | None, int, str]:
    return timer.next_run_at, timer.instance, timer.total_run_count, timer.revision


def change(first: str) -> DistributedTimerError | None:
    try:
        changed: Timer = timers.update_timer(first, schedule=20, expected_revision="x")
        timers.pause_timer(changed.id)
        timers.resume_timer(first)
        timers.trigger_timer(first)
        timers.stop_timer(first)
        timers.delete_timer(first)
    except ConflictError as exc:
        revision: str | None = exc.revision
        print(revision)
    except (InvalidTimerError, TooManyTimersError, StoreUnavailableError, SettingsError) as exc:
        return exc
    except TimerNotFoundError as exc:
        return exc
    return None
