"""The shop's Celery app, its timers, and the part of the schedule that stands in the settings."""

from __future__ import annotations

import os

from celery import Celery
from celery.schedules import crontab

from celery_dtimer import DistributedTimer

#: Of the timers; and of the messages, unless those are elsewhere.
REDIS_URL = os.environ.get("SHOP_REDIS_URL", "redis://127.0.0.1:6379/0")
BROKER_URL = os.environ.get("SHOP_BROKER_URL")
METRICS_PORT = os.environ.get("SHOP_METRICS_PORT")
INSTANCE_TIMEOUT = float(os.environ.get("SHOP_INSTANCE_TIMEOUT", "30"))

app = Celery(
    "shop",
    broker=BROKER_URL or REDIS_URL,
    include=["example_project.tasks", "example_project.webhooks"],
)
app.conf.update(
    broker_connection_retry_on_startup=True,
    task_ignore_result=True,
    beat_scheduler="celery_dtimer:DistributedScheduler",
    dtimer_redis_url=REDIS_URL if BROKER_URL else None,  # None: the broker's
    dtimer_instance_timeout=INSTANCE_TIMEOUT,
    dtimer_heartbeat_interval=INSTANCE_TIMEOUT / 6,
    dtimer_failure_check_interval=INSTANCE_TIMEOUT / 3,
    beat_schedule={
        "visitors of the last minute": {
            "task": "example_project.tasks.count_visitors",
            "schedule": crontab(),
        },
    },
)
if METRICS_PORT:
    app.conf.dtimer_metrics_port = int(METRICS_PORT)
    app.conf.dtimer_metrics_host = os.environ.get("SHOP_METRICS_HOST", "127.0.0.1")

timers = DistributedTimer(app)
