"""Runs the commands of ``celery dtimer`` in the test's process."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from celery import Celery
from celery.bin.base import CLIContext
from click.testing import CliRunner

from celery_dtimer.cli import dtimer


class Ran(NamedTuple):
    """What a command has printed, and its exit status."""

    status: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        """The one JSON document on stdout."""
        return json.loads(self.out)

    @property
    def rows(self) -> list[list[str]]:
        """The values in the lines of a pipe."""
        return [line.split("\t") for line in self.out.splitlines()]


def run_command(app: Celery, *args: str, **more: Any) -> Ran:
    """Run a command as ``celery -A proj dtimer`` does."""
    context = CLIContext(app=app, no_color=False, workdir=None)
    result = CliRunner().invoke(dtimer, args, obj=context, prog_name="celery dtimer", **more)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Ran(result.exit_code, result.stdout, result.stderr)
