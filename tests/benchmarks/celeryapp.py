"""The Celery app of every Celery peer, set up by the environment of the process.

Run as a program it creates entries through the peer's public API, in the way that its argument
names, and prints the seconds that this took.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from functools import cache
from typing import Any

from celery import Celery
from celery.schedules import crontab, schedule

from tests.benchmarks.workload import TASK, Entry, Workload

URL = os.environ.get("BENCH_REDIS_URL", "redis://127.0.0.1:6379/0")
AT_A_TIME = 10_000  # timers of one call of create_timers
PAUSE_SECONDS = 0.05

app = Celery("bench")
app.conf.update(
    {
        "broker_url": URL,
        "enable_utc": True,
        "timezone": "UTC",
        "task_ignore_result": True,
        "result_expires": None,  # or beat would add its own clean-up task
        "broker_connection_retry_on_startup": True,
        "redbeat_redis_url": URL,
        **json.loads(os.environ.get("BENCH_SETTINGS", "{}")),
    }
)


@app.task(name=TASK)
def noop(*args: Any, **kwargs: Any) -> None:
    """Do nothing; no worker runs in a measurement."""


def celery_schedule(entry: Entry) -> schedule | crontab:
    """Return an entry's schedule as Celery writes it."""
    if entry.every:
        return schedule(timedelta(seconds=entry.every), app=app)
    return once_a_year()


@cache
def once_a_year() -> crontab:
    """Return the rule of all entries that are not due: Celery takes long to make one."""
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


def create_redbeat(workload: Workload) -> float:
    """Save the entries as redbeat's."""
    from redbeat import RedBeatSchedulerEntry  # type: ignore[import-untyped]

    started = time.perf_counter()
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
    return time.perf_counter() - started


def _wait_one_interval_ahead(entry: Entry) -> None:
    """Wait until a new entry's first run, an interval from now, is when it shall be due."""
    if entry.first_due is not None:
        time.sleep(max(0.0, entry.first_due - entry.every - time.time()))


def create_in_bulk(workload: Workload) -> float:
    """Create the entries as timers, many with one call."""
    from celery_dtimer import DistributedTimer

    timers, seconds = DistributedTimer(app), 0.0
    _ = timers.store  # connects to nothing yet
    for keywords in _chunks(_timer(entry) for entry in workload.entries()):
        started = time.perf_counter()
        timers.create_timers(keywords)
        seconds += time.perf_counter() - started
    for entry in itertools.islice(workload.entries(), 1):
        _check_first_run(timers.get_timer(entry.name), entry)
    return seconds


def _check_first_run(timer: Any, entry: Entry) -> None:
    """Refuse to measure timers that do not come due as the workload says."""
    if entry.first_due is not None and timer.next_run_at.timestamp() != entry.first_due:
        raise RuntimeError(f"{entry.name} is due at {timer.next_run_at}")


def create_one_by_one(workload: Workload) -> float:
    """Create the entries as timers, each with a call of its own."""
    from celery_dtimer import DistributedTimer

    timers = DistributedTimer(app)
    keywords = [_timer(entry) for entry in workload.entries()]
    started = time.perf_counter()
    for each in keywords:
        timers.create_timer(**each)
    return time.perf_counter() - started


def create_now(workload: Workload) -> float:
    """Create timers that are due at once, each with the moment before its creation as argument."""
    from celery_dtimer import DistributedTimer

    timers = DistributedTimer(app)
    timers.create_timer("first", datetime.now(timezone.utc) + timedelta(days=1), TASK)
    for entry in workload.entries():
        # at no moment of the beat's rhythm in particular
        time.sleep(PAUSE_SECONDS * (1 + entry.index % 7 / 7))
        moment = time.time()
        due = datetime.fromtimestamp(moment, timezone.utc)
        timers.create_timer(entry.name, due, TASK, args=[entry.index, moment])
    return 0.0


def _timer(entry: Entry) -> dict[str, Any]:
    return {
        "name": entry.name,
        "schedule": _rule(entry),
        "callback": TASK,
        "args": entry.args,
        "kwargs": entry.kwargs,
    }


def _rule(entry: Entry) -> Any:
    if entry.first_due is not None:
        from tests.benchmarks.intervals import starting_at

        return starting_at(entry.every, entry.first_due)
    return entry.every or celery_schedule(entry)


def _chunks(items: Iterator[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    while chunk := list(itertools.islice(items, AT_A_TIME)):
        yield chunk


CREATORS = {
    "redbeat": create_redbeat,
    "bulk": create_in_bulk,
    "one_by_one": create_one_by_one,
    "now": create_now,
}

if os.environ.get("BENCH_IN_CODE"):
    app.conf.beat_schedule = {e.name: beat_entry(e) for e in Workload.from_environment().entries()}
if __name__ == "__main__":
    print(CREATORS[sys.argv[1]](Workload.from_environment()))
