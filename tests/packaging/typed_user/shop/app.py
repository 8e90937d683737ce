"""The app, its settings and its callbacks."""

from __future__ import annotations

from datetime import datetime, timedelta

from celery import Celery
from celery.schedules import crontab

from celery_dtimer import CallbackTimer, DeadLetter, DistributedScheduler, DistributedTimer

app = Celery("shop", broker="redis://localhost")
app.conf.update(
    beat_scheduler=DistributedScheduler,
    dtimer_service="shop",
    dtimer_instance_timeout=timedelta(seconds=30),
    dtimer_allowed_tasks=["shop.*"],
)
timers = DistributedTimer(app, service="shop")


@app.task
def plain(text: str) -> int:
    return len(text)


@timers.callback
def bare(timer: CallbackTimer) -> tuple[datetime, int]:
    return timer.scheduled_at, timer.run


@timers.callback(run_once=timedelta(hours=1))
def at_most_once(timer: CallbackTimer) -> str:
    return f"{timer.name} of {timer.service}, {timer.shard_index} of {timer.shard_total}"


@timers.callback("named", autoretry_for=(OSError,), retry_backoff=True)
def with_a_name(timer: CallbackTimer, kind: str = "daily") -> None: ...


@timers.callback(schedule=timedelta(minutes=1), kwargs={"kind": "x"}, queue="reports")
def static(timer: CallbackTimer, kind: str) -> None: ...


@timers.callback(schedule=crontab(hour=3, minute=0), timezone="Europe/Paris", dst="skip")
def nightly(timer: CallbackTimer) -> None: ...


@timers.on_failure
def alert(letter: DeadLetter) -> None:
    print(letter.name, letter.reason, letter.error, letter.scheduled_at)
