"""The Celery app that the failover tests run, in beats, in workers and embedded.

``DTIMER_TEST_CONFIG`` holds its settings as JSON, ``DTIMER_TEST_LEDGER`` the URL of the server to
whose list ``<queue>.ran`` each run of a task is written. ``DTIMER_TEST_HOSTS`` may name a file:
hosts that end in ``.test`` have an address as long as it names them. ``DTIMER_TEST_HANG`` may name
another: while it is there, whoever is about to publish a message hangs.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

import redis
from celery import Celery, Task, signals
from celery.schedules import crontab

from celery_dtimer import CallbackTimer, DistributedTimer

SETTINGS = json.loads(os.environ["DTIMER_TEST_CONFIG"])
PERIODIC = SETTINGS.pop("periodic_tasks", {})

if os.environ.get("DTIMER_TEST_HOSTS"):
    look_up = socket.getaddrinfo

    def look_up_in_file(host: Any, *args: Any, **kwargs: Any) -> Any:
        """Look a host up as the system does, and those of the test in its file."""
        if isinstance(host, str) and host.endswith(".test"):
            if host not in Path(os.environ["DTIMER_TEST_HOSTS"]).read_text().split():
                raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
            host = "127.0.0.1"
        return look_up(host, *args, **kwargs)

    socket.getaddrinfo = look_up_in_file

if os.environ.get("DTIMER_TEST_HANG"):

    @signals.before_task_publish.connect(weak=False)
    def hang(**_: Any) -> None:
        """Hang while the file is there, as a program with a fault does."""
        while Path(os.environ["DTIMER_TEST_HANG"]).exists():
            time.sleep(0.02)


app = Celery("orders")
app.conf.update(SETTINGS)
timers = DistributedTimer(app)


def write_down(**run: Any) -> None:
    """Append one run to the list that the test reads."""
    with redis.Redis.from_url(os.environ["DTIMER_TEST_LEDGER"]) as ledger:
        ran_at_ms = time.time_ns() // 1_000_000
        entry = json.dumps({**run, "ran_at_ms": ran_at_ms, "worker": os.getpid()})
        ledger.rpush(f"{app.conf.task_default_queue}.ran", entry)


@app.task(name="record", bind=True)
def record(self: Task, *args: Any, **kwargs: Any) -> None:
    """Write down the run as the message's header describes it."""
    header = self.request.get("dtimer")
    write_down(dtimer=header, task_id=self.request.id, args=args, kwargs=kwargs)


@timers.callback
def record_timer(timer: CallbackTimer, *args: Any) -> None:
    """Write down the run as the callback's timer describes it."""
    header = {
        "id": timer.id,
        "name": timer.name,
        "service": timer.service,
        "instance": timer.instance,
        "scheduled_at": timer.scheduled_at.isoformat(timespec="milliseconds"),
        "run": timer.run,
    }
    write_down(dtimer=header, task_id=record_timer.request.id, args=args, kwargs={})


@timers.callback(run_once=True, acks_late=True)
def record_once(timer: CallbackTimer, message: str, seconds: float) -> None:
    """Write down which message ran, and take so long the first time that it is delivered."""
    request = record_once.request
    write_down(message=message, task_id=request.id)
    if not request.delivery_info["redelivered"]:
        time.sleep(seconds)


@timers.callback
def fail(timer: CallbackTimer) -> None:
    """Raise, as callbacks sometimes do."""
    raise RuntimeError(f"{timer.name} fails on purpose")


@timers.callback
def work(timer: CallbackTimer, **_: Any) -> str:
    """Write down that the run has begun, wait to be let go, and write down that it has ended."""
    what = {"name": timer.name, "run": timer.run, "task_id": work.request.id}
    write_down(**what, did="began")
    with redis.Redis.from_url(os.environ["DTIMER_TEST_LEDGER"]) as ledger:
        ledger.blpop(f"{app.conf.task_default_queue}.go.{timer.name}", timeout=60)
    write_down(**what, did="ended")
    return "done"


@timers.callback
def die(timer: CallbackTimer) -> None:
    """End the process that runs it, as a lack of memory would."""
    os.kill(os.getpid(), signal.SIGKILL)


@timers.callback
def fail_twice(timer: CallbackTimer) -> int:
    """Raise unless it is the third try."""
    retries = int(fail_twice.request.retries)
    if retries < 2:
        raise LookupError(f"try {retries}")
    return retries


@app.on_after_finalize.connect
def add_periodic_tasks(sender: Celery, **_: Any) -> None:
    """Add what the test wants added in code: name to seconds, or to a minute field."""
    for name, schedule in PERIODIC.items():
        rule = crontab(minute=schedule) if isinstance(schedule, str) else schedule
        sender.add_periodic_task(rule, record.s(name), name=name)


@app.task(name="note", bind=True)
def note(self: Task, *args: Any) -> Any:
    """Write down that this call was run."""
    write_down(task_id=self.request.id, args=args, retries=self.request.retries)
    return args


@app.task(name="retry_later", bind=True)
def retry_later(self: Task, name: str, seconds: float) -> None:
    """Write down the run, and ask for another one the first time."""
    write_down(task_id=self.request.id, args=[name], retries=self.request.retries)
    if not self.request.retries:
        raise self.retry(countdown=seconds)


@app.task(name="call_later")
def call_later(name: str, seconds: float) -> None:
    """Call a task from inside a worker."""
    note.apply_async((name,), countdown=seconds)
