"""The Celery app of the fault suite's beats and workers.

``DTIMER_CHAOS_CONFIG`` holds its settings as JSON, ``DTIMER_CHAOS_RAN`` the file to which workers
append a line for each task that runs.
"""

from __future__ import annotations

import json
import os
import time
from typing import Any

from celery import Celery, Task
from celery.schedules import crontab

from celery_dtimer import CallbackTimer, DistributedTimer

SETTINGS: dict[str, Any] = json.loads(os.environ["DTIMER_CHAOS_CONFIG"])
STATIC: dict[str, float] = SETTINGS.pop("static")
RAN = os.environ["DTIMER_CHAOS_RAN"]

app = Celery("chaos")
app.conf.update(SETTINGS)
app.conf.beat_schedule = {
    **{name: {"task": "record", "schedule": seconds} for name, seconds in STATIC.items()},
    "static-cron": {"task": "record", "schedule": crontab()},
}
timers = DistributedTimer(app)


def write_down(task_id: str, name: str, scheduled_ms: int) -> None:
    """Append one line to the file of what ran; a single write is whole or not there."""
    line = json.dumps([task_id, name, scheduled_ms, time.time_ns() // 1_000_000, os.getpid()])
    descriptor = os.open(RAN, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(descriptor, line.encode() + b"\n")
    finally:
        os.close(descriptor)


@app.task(name="record", bind=True)
def record(self: Task, *_: Any, **__: Any) -> None:
    """Write down a run, as a plain task does that a timer sends."""
    header = self.request.get("dtimer")
    write_down(self.request.id, header["name"], 0)


@timers.callback
def record_timer(timer: CallbackTimer, *_: Any) -> None:
    """Write down a run, as a callback does."""
    scheduled_ms = round(timer.scheduled_at.timestamp() * 1000)
    write_down(record_timer.request.id, timer.name, scheduled_ms)


@app.task(name="note", bind=True)
def note(self: Task) -> None:
    """Write down a call that had waited in Redis."""
    write_down(self.request.id, "", 0)
