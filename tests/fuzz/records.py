"""Good records of every kind, as they are stored and sent: what fuzzing spoils."""

from __future__ import annotations

import json
import uuid
from datetime import datetime, timezone
from decimal import Decimal
from typing import Any

from celery import Celery, chord, group

from celery_dtimer.canvas import parts_of
from celery_dtimer.messages import keep
from celery_dtimer.model import Definition
from celery_dtimer.policy import Policy
from celery_dtimer.schedules import Crontab, Custom, Interval, OneShot, Recurrence, Solar

HEADER = {
    "id": "abcdefghijklmnopqrstuvwxyz",
    "name": "nightly",
    "service": "orders",
    "instance": "h:1:abcd",
    "scheduled_at": "2026-01-01T03:00:00.000+00:00",
    "run": 4,
    "shard_index": 1,
    "shard_total": 2,
    "resent": 1,
}

_app = Celery("records", broker="memory://", backend="cache+memory://", set_as_current=False)


@_app.task(name="tasks.record", shared=False)
def record(*args: Any, **kwargs: Any) -> None:
    """Do nothing."""


def _canvases() -> list[Definition]:
    every = Interval(60_000)
    canvases = [
        record.s(1) | record.s(2),
        group(record.s(1), record.s(2)),
        chord([record.s(1), record.s(2)], record.s(3)),
        record.chunks([(1,), (2,)], 1),
        record.map([1, 2]),
    ]
    found = []
    for place, canvas in enumerate(canvases):
        task, args, kwargs, options = parts_of(canvas, _app)
        found.append(Definition(f"canvas{place}", task, every, args, kwargs, options))
    return found


def _countdown(args: tuple[Any, ...] = (1,), **how: Any) -> Definition:
    """Return what is stored of a call that waits."""
    id = str(uuid.UUID(int=7))
    serializer = how.get("serializer", "json")
    message = _app.amqp.as_task_v2(
        id, "tasks.record", args, {"key": "value"}, callbacks=[record.s(5)]
    )
    options = {
        "serializer": serializer,
        "compression": how.get("compression"),
        "headers": message.headers,
        "exchange": "",
        "routing_key": "celery",
        "delivery_mode": None,
        "declare": [],
        **message.properties,
    }
    return keep(id, "tasks.record", message.body, options)


DEFINITIONS = [
    Definition("interval", "tasks.record", Interval(10_000), [1, "a"], {"k": [{}]}),
    Definition("relative", "tasks.record", Interval(86_400_000, True, "Europe/Paris")),
    Definition(
        "cron", "tasks.record", Crontab("0 3 * * mon", "Europe/Paris", "both"), description="d"
    ),
    Definition(
        "rrule", "tasks.record", Recurrence("DTSTART:20260101T000000Z\nRRULE:FREQ=DAILY;COUNT=9")
    ),
    Definition("sun", "tasks.record", Solar("sunset", 48.0, 2.0)),
    Definition(
        "once", "tasks.record", OneShot(1_800_000_000_000), options={"expires": 60, "queue": "q"}
    ),
    Definition("code", "tasks.record", Custom("shop.schedules.Own", "Own()"), code_bound=True),
    Definition(
        "typed",
        "tasks.record",
        Interval(10_000),
        [uuid.UUID(int=1), Decimal(1), b"\x00"],
        {"at": datetime(2026, 1, 1, tzinfo=timezone.utc)},
        {
            "expires": datetime(2030, 1, 1, tzinfo=timezone.utc),
            "headers": {"a": 1},
            "priority": 3,
            "timeout": 5,
            "max_retries": 2,
            "autoretry_for": ["builtins.ValueError"],
            "link": dict(record.s(1)),
        },
        policy=Policy(1, 2**42, 5, 1000, False, 5000, 7, 3, "skip"),
        zone_of="shop",
    ),
    *_canvases(),
    _countdown(),
    _countdown((Decimal(1),)),
    _countdown(serializer="pickle"),
    _countdown(compression="zlib"),
]
BLOBS = [each.blob for each in DEFINITIONS]
SCHEDULES = [json.dumps(each.schedule.encode()) for each in DEFINITIONS]
