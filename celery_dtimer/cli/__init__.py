"""The command line: ``celery -A proj dtimer …``, an entry point of Celery's own command.

The commands are views of the public API. ``usage`` has what is wrong use, ``commands`` what they
share, ``output`` how they print, ``parameters`` what is written on a command line; the others hold
the commands by subject.
"""

from __future__ import annotations

import io
import sys
from typing import Any

import click

from celery_dtimer.cli.usage import AS_JSON, EXIT_STATUS, SERVICE, Group

__all__ = ["dtimer"]

_COMMANDS = {
    "list": "timers:list_",
    "show": "timers:show",
    "create": "timers:create",
    "update": "timers:update",
    "pause": "timers:pause",
    "resume": "timers:resume",
    "stop": "timers:stop",
    "trigger": "timers:trigger",
    "delete": "timers:delete",
    "preview": "timers:preview",
    "why": "timers:why",
    "runs": "runs:runs",
    "dead": "runs:dead",
    "pending": "runs:pending",
    "cancel": "runs:cancel",
    "audit": "runs:audit",
    "instances": "services:instances",
    "services": "services:services",
    "health": "services:health",
    "doctor": "services:doctor",
    "top": "top:top",
    "drain": "services:drain",
    "rebalance": "services:rebalance",
    "reshard": "services:reshard",
    "export": "transfer:export",
    "import": "transfer:import_",
}


@click.group(cls=Group, commands=_COMMANDS, epilog=EXIT_STATUS)
@click.option("--service", metavar="NAME", help="Another service than the app's (dtimer_service).")
@click.option("as_json", "--json", is_flag=True, help="The same as --json behind the command.")
@click.pass_context
def dtimer(ctx: click.Context, /, service: str | None, as_json: bool, **_preloaded: Any) -> None:
    """Look at and change the timers of a service, and its instances.

    TIMER is a timer's name or its id. Tables are for terminals: in a pipe each row is a line, with
    tabs between its values. --json prints exactly one JSON document on stdout; all else goes to
    stderr.
    """
    ctx.meta[SERVICE], ctx.meta[AS_JSON] = service, as_json
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # whatever a name is written in
