"""The command line: ``celery -A proj dtimer …``, an entry point of Celery's own command.

The commands are views of the public API. ``commands`` has what they share, ``output`` how they
print, ``parameters`` what is written on a command line; the others hold the commands by subject.
"""

from __future__ import annotations

from typing import Any

import click

from celery_dtimer.cli import runs, services, timers, top
from celery_dtimer.cli.commands import EXIT_STATUS, Group, note_service

__all__ = ["dtimer"]


@click.group(cls=Group, epilog=EXIT_STATUS)
@click.option("--service", metavar="NAME", help="Another service than the app's (dtimer_service).")
@click.pass_context
def dtimer(ctx: click.Context, /, service: str | None, **_preloaded: Any) -> None:
    """Look at and change the timers of a service, and its instances.

    TIMER is a timer's name or its id. Tables are for terminals: in a pipe each row is a line, with
    tabs between its values. --json prints exactly one JSON document on stdout; all else goes to
    stderr.
    """
    note_service(ctx, service)


for _command in (
    *(timers.list_, timers.show, timers.create, timers.update),
    *(timers.pause, timers.resume, timers.stop, timers.trigger, timers.delete),
    *(timers.preview, timers.why),
    *(runs.runs, runs.dead, runs.pending, runs.cancel, runs.audit),
    *(services.instances, services.doctor, services.health, services.reshard),
    top.top,
):
    dtimer.add_command(_command)
