"""The distributed timer for Celery.

from celery_dtimer import DistributedTimer

app.conf.beat_scheduler = "celery_dtimer:DistributedScheduler"
timers = DistributedTimer(app)
"""

from celery_dtimer.auditing import TimerAudit
from celery_dtimer.countdowns import PendingTask
from celery_dtimer.doctor import Finding
from celery_dtimer.errors import (
    ConflictError,
    DamagedError,
    DistributedTimerError,
    EmbeddedServerError,
    FencedError,
    InstanceNotFoundError,
    InvalidTimerError,
    NewerError,
    SchemaError,
    SettingsError,
    StoreError,
    StoreUnavailableError,
    TimerNotFoundError,
    TooManyTimersError,
)
from celery_dtimer.model import Instance, Timer
from celery_dtimer.runs import DeadLetter, RunRecord
from celery_dtimer.scheduler import DistributedScheduler
from celery_dtimer.services import ServiceSummary
from celery_dtimer.timers import DistributedTimer
from celery_dtimer.transfer import ImportResult, SkippedRow
from celery_dtimer.version import __version__
from celery_dtimer.worker import CallbackTimer

__all__ = [
    "CallbackTimer",
    "ConflictError",
    "DamagedError",
    "DeadLetter",
    "DistributedScheduler",
    "DistributedTimer",
    "DistributedTimerError",
    "EmbeddedServerError",
    "FencedError",
    "Finding",
    "ImportResult",
    "Instance",
    "InstanceNotFoundError",
    "InvalidTimerError",
    "NewerError",
    "PendingTask",
    "RunRecord",
    "SchemaError",
    "ServiceSummary",
    "SettingsError",
    "SkippedRow",
    "StoreError",
    "StoreUnavailableError",
    "Timer",
    "TimerAudit",
    "TimerNotFoundError",
    "TooManyTimersError",
    "__version__",
]
