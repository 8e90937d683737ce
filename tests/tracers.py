"""A tracer provider of the whole test process, and spans that tests look at."""

from __future__ import annotations

from functools import cache

from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter


@cache
def exporter() -> InMemorySpanExporter:
    """Return what gets all spans of this process: a provider can be set but once."""
    kept = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(kept))
    trace.set_tracer_provider(provider)
    return kept


def finished(name: str) -> list[ReadableSpan]:
    """Return the spans of a name that have ended, oldest first."""
    return [span for span in exporter().get_finished_spans() if span.name == name]


def identity(span: ReadableSpan) -> tuple[int, int]:
    """Return the ids of a span's trace and of itself."""
    assert span.context is not None
    return span.context.trace_id, span.context.span_id


def parent_of(span: ReadableSpan) -> tuple[int, int] | None:
    """Return the ids of a span's parent."""
    return None if span.parent is None else (span.parent.trace_id, span.parent.span_id)


def links_of(span: ReadableSpan) -> list[tuple[int, int]]:
    """Return the ids of what a span is linked to."""
    return [(link.context.trace_id, link.context.span_id) for link in span.links]
