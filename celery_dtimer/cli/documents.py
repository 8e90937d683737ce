"""What commands print of the values of the API, as JSON data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from datetime import datetime
from typing import Any

from celery_dtimer.cli.output import iso
from celery_dtimer.countdowns import PendingTask
from celery_dtimer.model import Instance, Timer
from celery_dtimer.runs import DeadLetter


def plain(value: Any) -> dict[str, Any]:
    """Return the fields of a value by name, moments as ISO 8601 in UTC."""
    assert is_dataclass(value)  # noqa: S101 - all that the API returns are
    return _written({field.name: getattr(value, field.name) for field in fields(value)})


def _written(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: iso(each) if isinstance(each, datetime) else each for name, each in values.items()
    }


def timer_document(timer: Timer) -> dict[str, Any]:
    """Return a timer, but for what it gives to its task."""
    return {
        "id": timer.id,
        "name": timer.name,
        "description": timer.description,
        "status": timer.status,
        "reason": timer.reason,
        "task": timer.task,
        "schedule": None if timer.schedule is None else timer.schedule.describe(),
        "timezone": getattr(timer.schedule, "timezone", None),
        "next_run_at": iso(timer.next_run_at),
        "last_run_at": iso(timer.last_run_at),
        "total_run_count": timer.total_run_count,
        "skips": timer.skips,
        "instance": timer.instance,
        "source": timer.source,
        "created_at": iso(timer.created_at),
        "revision": timer.revision,
    }


def whole_timer_document(timer: Timer) -> dict[str, Any]:
    """Return a timer with its arguments, options and policy."""
    return {
        **timer_document(timer),
        "args": timer.args,
        "kwargs": timer.kwargs,
        "options": timer.options,
        "policy": policy_document(timer),
    }


def policy_document(timer: Timer) -> dict[str, Any]:
    """Return what a timer's policy says beside the defaults, by the keywords of `create_timer`."""
    return _written(timer.policy.as_keywords())


def instance_document(instance: Instance, age: float) -> dict[str, Any]:
    """Return an instance, with the seconds since its last heartbeat."""
    document = plain(instance)
    del document["settings"]
    document["pid"] = document.pop("port")
    return {**document, "heartbeat_age": round(age, 3)}


def call_document(call: PendingTask | DeadLetter, *, arguments: bool) -> dict[str, Any]:
    """Return a pending call or a dead letter, its arguments only if they are asked for."""
    document = plain(call)
    document.pop("headers", None)
    if not arguments:
        for name in ("args", "kwargs", "argsrepr", "kwargsrepr"):
            document.pop(name, None)
    return document
