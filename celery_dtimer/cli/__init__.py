"""The ``celery dtimer`` commands."""

from __future__ import annotations

import click

__all__ = ["dtimer"]


@click.group()
def dtimer() -> None:
    """Look at and change the timers of a service."""
