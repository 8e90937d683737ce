"""Loaded by the demo's workers: writes down each timer's run that has ended well."""

from __future__ import annotations

import functools
import json
import time
from typing import Any

import redis
from celery import Task
from celery.signals import task_success

from example_project.celery import app

RUNS = "demo:runs"


@functools.cache
def _server() -> redis.Redis:
    return redis.Redis.from_url(app.conf.broker_url)


@task_success.connect
def record(sender: Task[Any, Any], **_: Any) -> None:
    """Append the run, as the message's ``dtimer`` header describes it, to a list in Redis."""
    header = sender.request.get("dtimer")
    if header:
        run = {**header, "worker": sender.request.hostname, "ended_at": time.time()}
        _server().rpush(RUNS, json.dumps(run))
