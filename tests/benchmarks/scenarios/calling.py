"""What callers and workers pay: for calls that wait in Redis, and for runs that are tracked.

Both are measured inside this process, in turns with what they are compared with.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Callable
from statistics import median
from typing import Any

from celery import Celery
from celery.app.trace import build_tracer

from celery_dtimer import DistributedTimer
from tests.benchmarks.measure import Figures, used_memory
from tests.benchmarks.peer import Peer
from tests.benchmarks.processes import Server
from tests.benchmarks.scenarios.scenario import Size

TURNS = 7
COUNTDOWN = 3600
CALLS_SHARE = 0.05  # of the timers: the calls, and the tasks, of one turn
PENDING = 10  # times the timers, whose memory is measured


def countdowns(peer: Peer, server: Server, size: Size) -> Figures:
    """Return how many calls with a countdown a second are made, durable and Celery's own.

    And what one takes in Redis, with two small arguments.
    """
    del peer  # the others have none
    count = round(size.timers * CALLS_SHARE)
    with contextlib.ExitStack() as stack:
        calls: dict[str, Any] = {}
        for name, conf in (("stock", {}), ("durable", {"dtimer_eta_threshold": 1})):
            app = _app(server, name, **conf)
            stack.callback(app.close)
            calls[name] = app.task(name="bench.remind", shared=False)(_remind)
            _call(calls[name], 10)
        rates: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(TURNS):
            for name, task in calls.items():
                rates[name].append(count / _seconds(lambda task=task: _call(task, count)))
        server.client().flushdb()
        before = used_memory(server)
        _call(calls["durable"], PENDING * size.timers)
        pending = used_memory(server) - before
    return {
        "durable_per_s": median(rates["durable"]),
        "stock_per_s": median(rates["stock"]),
        "share_of_stock": median(
            durable / stock for durable, stock in zip(rates["durable"], rates["stock"], strict=True)
        ),
        "bytes_per_pending": pending / (PENDING * size.timers),
    }


def tracking(peer: Peer, server: Server, size: Size) -> Figures:
    """Return what a task costs a worker: one of a timer, tracked or not, and any other."""
    del peer
    count = round(size.timers * CALLS_SHARE)
    with contextlib.ExitStack() as stack:
        runs: dict[str, Callable[[], None]] = {}
        for name, conf, is_timers in (
            ("tracked", {}, True),
            ("untracked", {"dtimer_track_runs": False}, True),
            ("other", {}, False),
        ):
            app = _app(server, name, **conf)
            stack.callback(app.close)
            runs[name] = _runner(app, count, is_timers=is_timers)
            runs[name]()
        costs: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(TURNS):
            for name, run in runs.items():
                costs[name].append(1e6 * _seconds(run) / count)
    medians = {name: median(found) for name, found in costs.items()}
    return {
        "more_us": medians["tracked"] - medians["untracked"],
        **{f"{name}_us": value for name, value in medians.items()},
    }


def _app(server: Server, name: str, **conf: Any) -> Celery:
    app = Celery("bench", set_as_current=False)
    app.conf.update(
        broker_url=server.url,
        task_ignore_result=True,
        task_default_queue=f"bench-{name}",
        **conf,
    )
    app.timers = DistributedTimer(app)  # type: ignore[attr-defined]
    return app


def _remind(user: str, number: int) -> None:
    """Do nothing; no worker runs."""


def _call(task: Any, count: int) -> None:
    for number in range(count):
        task.apply_async(("someone", number), countdown=COUNTDOWN)


def _runner(app: Celery, count: int, *, is_timers: bool) -> Callable[[], None]:
    """Return what runs a task so often, as the process of a worker does."""
    task = app.task(name="bench.remind", shared=False)(_remind)
    tracer = build_tracer(task.name, task, app=app)
    header = {
        "id": "a" * 26,
        "name": "bench",
        "service": "bench",
        "instance": "host:1:a",
        "scheduled_at": "2026-01-01T03:00:00.000+00:00",
        "run": 1,
    }

    def run() -> None:
        for number in range(count):
            id = str(uuid.uuid4())
            request = {
                "id": id,
                "hostname": "worker@host",
                "properties": {"delivery_tag": id},
                "delivery_info": {},
                "is_eager": False,
                "retries": 0,
                **({"dtimer": header} if is_timers else {}),
            }
            tracer(id, ("someone", number), {}, request)

    return run


def _seconds(act: Callable[[], None]) -> float:
    start = time.perf_counter()
    act()
    return time.perf_counter() - start
