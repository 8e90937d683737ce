"""The Celery app of every peer, set up by the environment of the process.

Run as a program it creates the workload's entries through the peer's public API and prints the
seconds that this took.
"""

from __future__ import annotations

import json
import os
import time
from datetime import datetime, timedelta, timezone
from typing import Any

from celery import Celery
from celery.schedules import crontab, schedule

from tests.benchmarks.workload import TASK, Entry, Workload

URL = os.environ.get("BENCH_REDIS_URL", "redis://127.0.0.1:6379/0")

app = Celery("bench", broker=URL)
app.conf.update(
    enable_utc=True,
    timezone="UTC",
    task_ignore_result=True,
    result_expires=None,  # or beat would add its own clean-up task
    broker_connection_retry_on_startup=True,
    redbeat_redis_url=URL,
    **json.loads(os.environ.get("BENCH_SETTINGS", "{}")),
)


@app.task(name=TASK)
def noop(*args: Any, **kwargs: Any) -> None:
    """Do nothing; no worker runs in a measurement."""


def celery_schedule(entry: Entry) -> schedule | crontab:
    """Return an entry's schedule as Celery writes it."""
    if entry.every:
        return schedule(timedelta(seconds=entry.every), app=app)
    return crontab(minute="0", hour="0", day_of_month="1", month_of_year="1", app=app)


def beat_entry(entry: Entry) -> dict[str, Any]:
    """Return an entry as a value of ``beat_schedule``."""
    described: dict[str, Any] = {
        "task": TASK,
        "schedule": celery_schedule(entry),
        "args": entry.args,
        "kwargs": entry.kwargs,
    }
    if entry.first_due is not None:
        last_run = entry.first_due - entry.every
        described["last_run_at"] = datetime.fromtimestamp(last_run, timezone.utc)
    return described


def create_redbeat(workload: Workload) -> None:
    """Save the entries as redbeat's."""
    from redbeat import RedBeatSchedulerEntry  # type: ignore[import-untyped]

    for entry in workload.entries():
        _wait_one_interval_ahead(entry)
        RedBeatSchedulerEntry(
            entry.name,
            TASK,
            celery_schedule(entry),
            args=entry.args,
            kwargs=entry.kwargs,
            app=app,
        ).save()


def create_dtimer(workload: Workload) -> None:
    """Create the entries as timers: in bulk, or one by one when their due times are spread."""
    from celery_dtimer import DistributedTimer

    timers = DistributedTimer(app)
    if workload.start is None:
        timers.create_timers([_timer(entry) for entry in workload.entries()])
        return
    for entry in workload.entries():
        _wait_one_interval_ahead(entry)
        timers.create_timer(**_timer(entry))


def _timer(entry: Entry) -> dict[str, Any]:
    return {
        "name": entry.name,
        "schedule": entry.every or celery_schedule(entry),
        "callback": TASK,
        "args": entry.args,
        "kwargs": entry.kwargs,
    }


def _wait_one_interval_ahead(entry: Entry) -> None:
    """Wait until a new entry's first run, an interval from now, is when it shall be due."""
    if entry.first_due is not None:
        time.sleep(max(0.0, entry.first_due - entry.every - time.time()))


CREATORS = {"redbeat": create_redbeat, "dtimer": create_dtimer}


def _create(creator: str) -> None:
    started = time.perf_counter()
    CREATORS[creator](Workload.from_environment())
    print(time.perf_counter() - started)


if os.environ.get("BENCH_CREATOR") == "conf":
    app.conf.beat_schedule = {e.name: beat_entry(e) for e in Workload.from_environment().entries()}
if __name__ == "__main__":
    _create(os.environ["BENCH_CREATOR"])
