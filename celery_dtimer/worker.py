"""What runs in the worker: the task of a timer callback, which receives its timer first."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import wraps
from typing import Any

from celery_dtimer.errors import invalid


@dataclass(frozen=True, slots=True)
class CallbackTimer:
    """The timer that a callback receives, as the message's ``dtimer`` header describes it."""

    id: str
    name: str
    service: str
    instance: str  #: the instance that sent the run
    scheduled_at: datetime  #: the moment the run was due, aware
    run: int  #: counts the timer's runs from 1

    @classmethod
    def from_header(cls, header: Mapping[str, Any]) -> CallbackTimer:
        """Return the timer of a message's ``dtimer`` header."""
        return cls(
            id=header["id"],
            name=header["name"],
            service=header["service"],
            instance=header["instance"],
            scheduled_at=datetime.fromisoformat(header["scheduled_at"]),
            run=header["run"],
        )


def timer_of(request: Any) -> CallbackTimer | None:
    """Return the timer of a task request, or None when no timer sent it."""
    headers = getattr(request, "headers", None) or {}  # where a task that runs eagerly has it
    header = getattr(request, "dtimer", None) or headers.get("dtimer")
    return CallbackTimer.from_header(header) if header else None


_POSITIONAL = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
    inspect.Parameter.VAR_POSITIONAL,
)


def callback_body(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the body of a bound Celery task that calls the function with its timer first.

    Called as a plain function (in a test, say) the task passes its arguments on unchanged; sent by
    other means than a timer, it passes None for the timer.

    Raises:
        InvalidTimerError: the function takes no positional argument for its timer.
    """
    signature = inspect.signature(function)
    parameters = list(signature.parameters.values())
    if not parameters or parameters[0].kind not in _POSITIONAL:
        raise invalid("callback", function, "a function whose first argument is its timer")

    first, *others = parameters

    @wraps(function)
    def run(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        if self.request.called_directly:
            return function(*args, **kwargs)
        return function(timer_of(self.request), *args, **kwargs)

    task = inspect.Parameter("_celery_task", inspect.Parameter.POSITIONAL_ONLY)
    if first.kind is inspect.Parameter.VAR_POSITIONAL:
        others = [first, *others]
    # Celery checks the arguments of apply_async against this: everything but the timer.
    run.__signature__ = signature.replace(parameters=[task, *others])  # type: ignore[attr-defined]
    return run
