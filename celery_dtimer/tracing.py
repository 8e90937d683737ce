"""Traces of OpenTelemetry: from who creates a timer, over the beat that sends a run, to its task.

Who creates or triggers a timer inside a span leaves the W3C ``traceparent`` of that span with it.
A beat makes a span for each run, with links to those spans, and has the run's messages built inside
it. There Celery's own instrumentation takes over: its producer span is a child of the beat's, and
the task's span in the worker one of that.

So a beat traces where Celery is instrumented (``opentelemetry-instrumentation-celery``) and a
tracer provider is set. Nothing of OpenTelemetry is imported here before the process has done so.
"""

from __future__ import annotations

import contextlib
import contextvars
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any, TypeVar

from celery import current_app

T = TypeVar("T")

_API = "opentelemetry.trace"
_INSTRUMENTATION = "opentelemetry.instrumentation.celery"
_HEADER = "traceparent"


def current() -> str:
    """Return the ``traceparent`` of the span that is current here, "" without one."""
    if _API not in sys.modules:
        return ""
    from opentelemetry import trace

    if not trace.get_current_span().get_span_context().is_valid:
        return ""
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier)
    return carrier.get(_HEADER, "")


def is_on() -> bool:
    """Say whether runs are traced here: Celery is instrumented, and there is a provider."""
    if _INSTRUMENTATION not in sys.modules:
        return False
    from opentelemetry import trace
    from opentelemetry.instrumentation.celery import CeleryInstrumentor

    instrumentor: Any = CeleryInstrumentor  # it has no types
    none = (trace.ProxyTracerProvider, trace.NoOpTracerProvider)
    return instrumentor().is_instrumented_by_opentelemetry and not isinstance(
        trace.get_tracer_provider(), none
    )


def traceparent_of(headers: object) -> str:
    """Return the ``traceparent`` among a message's headers, "" without one."""
    found = headers.get(_HEADER) if isinstance(headers, Mapping) else None
    return found if isinstance(found, str) else ""


class Journey:
    """The span of a run that is dispatched, which is the current one while messages are built."""

    def __init__(
        self,
        name: str,
        attributes: Mapping[str, str | int | float],
        *,
        links: Iterable[str] = (),
        parent: str = "",
    ) -> None:
        """Begin the span; only where `is_on` says so.

        Args:
            name: of the span.
            attributes: of the span.
            links: the ``traceparent`` of what has led to it.
            parent: that of the span whose child it is, "" for a trace of its own.
        """
        from opentelemetry import context, trace

        self._span = _tracer_of(trace.get_tracer_provider()).start_span(
            name,
            context=_read(parent),
            attributes=dict(attributes),
            links=[
                trace.Link(found)
                for link in filter(None, links)
                if (found := trace.get_current_span(_read(link)).get_span_context()).is_valid
            ],
        )
        self._inside = contextvars.copy_context()
        self._inside.run(context.attach, trace.set_span_in_context(self._span))
        self._messages: list[MessageTrace] = []

    def message(self, task: str, task_id: str) -> MessageTrace:
        """Return what a message of this task is to be built within."""
        self._messages.append(MessageTrace(self._inside.copy(), task, task_id))
        return self._messages[-1]

    def end(self, failure: str = "") -> None:
        """End the span; ``failure`` says what went wrong."""
        if failure:
            from opentelemetry.trace import Status, StatusCode

            self._span.set_status(Status(StatusCode.ERROR, failure))
            for message in self._messages:
                message.abandon()
        self._span.end()


class MessageTrace:
    """A context for one message: Celery's instrumentation keeps things there until it is sent.

    It makes a span current before a message is published, and ends it afterwards. Here others are
    built in between.
    """

    def __init__(self, context: contextvars.Context, task: str, task_id: str) -> None:
        """Take a context of its own."""
        self._context, self._task, self._task_id = context, task, task_id

    def __call__(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Return what a function returns, called in this context."""
        return self._context.run(function, *args, **kwargs)

    def abandon(self) -> None:
        """Have the instrumentation end the span of a message that is not sent."""
        self._context.run(self._abandon)

    def _abandon(self) -> None:
        # It has no word for this; what is left there would be ended in another context.
        with contextlib.suppress(ImportError, AttributeError):
            from opentelemetry.instrumentation.celery import utils

            task = current_app.tasks.get(self._task)
            utils.detach_context(task, self._task_id, is_publish=True)


class Untraced:
    """Takes the place of a `MessageTrace` where nobody traces."""

    def __call__(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Return what a function returns."""
        return function(*args, **kwargs)

    def abandon(self) -> None:
        """Nothing has begun."""


UNTRACED = Untraced()


@lru_cache(maxsize=1)
def _tracer_of(provider: Any) -> Any:
    return provider.get_tracer("celery_dtimer")


def _read(traceparent: str) -> Any:
    """Return OpenTelemetry's context of a ``traceparent``, an empty one where that is none."""
    from opentelemetry.context import Context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    if not traceparent:
        return Context()
    return TraceContextTextMapPropagator().extract({_HEADER: traceparent}, Context())
