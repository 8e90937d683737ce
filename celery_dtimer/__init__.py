"""The distributed timer for Celery.

from celery_dtimer import DistributedTimer

app.conf.beat_scheduler = "celery_dtimer:DistributedScheduler"
timers = DistributedTimer(app)

Most names are imported when they are first asked for: every ``celery`` command, of any app, imports
this package, since ``celery dtimer`` is one of them.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

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
from celery_dtimer.version import __version__

if TYPE_CHECKING:
    from celery_dtimer.auditing import TimerAudit
    from celery_dtimer.countdowns import PendingTask
    from celery_dtimer.doctor import Finding
    from celery_dtimer.model import Instance, Timer
    from celery_dtimer.runs import DeadLetter, RunRecord
    from celery_dtimer.scheduler import DistributedScheduler
    from celery_dtimer.services import ServiceSummary
    from celery_dtimer.timers import DistributedTimer
    from celery_dtimer.transfer import ImportResult, SkippedRow
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

#: Where the names are that are imported when they are first asked for.
_HOMES = {
    "TimerAudit": "auditing",
    "PendingTask": "countdowns",
    "Finding": "doctor",
    "Instance": "model",
    "Timer": "model",
    "DeadLetter": "runs",
    "RunRecord": "runs",
    "DistributedScheduler": "scheduler",
    "ServiceSummary": "services",
    "DistributedTimer": "timers",
    "ImportResult": "transfer",
    "SkippedRow": "transfer",
    "CallbackTimer": "worker",
}

if not TYPE_CHECKING:  # for a type checker, a module that has this function has every name

    def __getattr__(name: str) -> Any:
        """Return one of the public names, and keep it."""
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    """Return the public names, also those that nobody has asked for yet."""
    return sorted({*globals(), *__all__})
