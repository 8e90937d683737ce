"""What becomes of several things that a command does one after the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import click

from celery_dtimer.cli.output import Output
from celery_dtimer.cli.usage import FOUND
from celery_dtimer.errors import InvalidTimerError, TimerNotFoundError

#: One of them as JSON data: what it is about, whether it is done, and why it is not.
Result = Mapping[str, Any]


def attempt(about: Mapping[str, Any], act: Callable[[], object]) -> Result:
    """Return the result of doing something; what is refused stops nothing else."""
    try:
        act()
    except (InvalidTimerError, TimerNotFoundError) as exc:
        error = {"type": type(exc).__name__, "message": str(exc)}
        return {**about, "done": False, "error": error}
    return {**about, "done": True}


def _refusal(result: Result) -> str:
    message: str = result["error"]["message"]
    return message


def tell_results(
    output: Output,
    results: Sequence[Result],
    done: Callable[[Result], str],
    refusal: Callable[[Result], str] = _refusal,
) -> None:
    """Print results: what is done to stdout, and what is not to stderr.

    Args:
        output: where it goes.
        results: in their order.
        done: returns the line of what is done.
        refusal: returns why something is not.

    Raises:
        click.exceptions.Exit: not all is done.
    """
    if output.as_json:
        output.document(results)
    for result in results:
        if not result["done"]:
            output.note(f"Error: {refusal(result)}")
        elif not output.as_json:
            output.line(done(result))
    if not all(result["done"] for result in results):
        raise click.exceptions.Exit(FOUND)
