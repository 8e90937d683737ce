"""Wrong use, and the group of commands: errors in words and as JSON, and what may have been meant.

Celery imports this before each of its commands, of any app: it imports little itself.
"""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from typing import Any

import click

from celery_dtimer.cli.output import Output, UnwritableError, visible
from celery_dtimer.errors import shown

#: The exit status of a command that has found something, was used wrongly, or met no server.
FOUND, WRONG, UNREACHABLE = 1, 2, 3

SERVICE = "celery_dtimer.service"  #: where the group leaves what --service says,
AS_JSON = "celery_dtimer.as_json"  #: and --json

MOST_SUGGESTED = 3  #: names that a message about a wrong one tells
_LONGEST = 2000  # characters of a message

EXIT_STATUS = """\b
Exit status:
  0  done, or all is well
  1  a check has found something, or something could not be done
  2  wrong use: an unknown command, option, timer or instance, or a value
     that is not accepted
  3  Redis, or the broker, could not be reached, or has refused"""


class Failure(click.ClickException):
    """A command that has failed, with its exit status."""

    def __init__(
        self, message: str, status: int, *, kind: str, suggestions: Sequence[str] = ()
    ) -> None:
        """Take what is shown, the status, the kind of error, and what may have been meant."""
        super().__init__(message + did_you_mean(suggestions))
        self.exit_code: int = status  # type: ignore[misc]
        self._told: dict[str, Any] = {"type": kind, "message": message}
        if suggestions:
            self._told["suggestions"] = list(suggestions)

    @property
    def document(self) -> dict[str, Any]:
        """It as JSON data."""
        return {"error": self._told}


def told(exc: click.ClickException, *, as_json: bool) -> click.ClickException:
    """Return an error, told in JSON if that is asked; what is shown to people goes to stderr."""
    message = exc.message if len(exc.message) <= _LONGEST else exc.message[:_LONGEST] + "…"
    vars(exc)["message"] = "\n".join(map(visible, message.split("\n")))
    if as_json:
        kind = "UsageError" if isinstance(exc, click.UsageError) else type(exc).__name__
        told = {"type": kind, "message": exc.format_message()}
        document = exc.document if isinstance(exc, Failure) else {"error": told}
        with contextlib.suppress(UnwritableError):  # that may be what is told
            Output(as_json=True).document(document)
    return exc


def close_to(wrong: str, known: Iterable[str]) -> list[str]:
    """Return the names that are most like a wrong one, the best first."""
    names = {name.casefold(): name for name in known}
    found = difflib.get_close_matches(wrong.casefold(), names, MOST_SUGGESTED, 0.6)
    return [names[name] for name in found]


def did_you_mean(suggestions: Sequence[str]) -> str:
    """Return the end of a message about a wrong name."""
    return f"\nDid you mean {' or '.join(map(shown, suggestions))}?" if suggestions else ""


class Group(click.Group):
    """A group of commands that are imported when they are needed; a wrong name suggests others."""

    def __init__(self, *args: Any, commands: Mapping[str, str], **kwargs: Any) -> None:
        """Take where each command is, by its name: ``module:attribute`` in this package."""
        super().__init__(*args, **kwargs)
        self._places = dict(commands)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the commands, in the order they were given in."""
        return list(self._places)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a command by its name."""
        if cmd_name not in self._places:
            return None
        module, _, attribute = self._places[cmd_name].partition(":")
        command: click.Command = getattr(import_module(f"celery_dtimer.cli.{module}"), attribute)
        return command

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read what stands before the command's name."""
        wants_json = "--json" in args
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as exc:
            raise told(exc, as_json=wants_json) from None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that the arguments name."""
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as exc:
            close = close_to(args[0], self.list_commands(ctx))
            message = exc.message.partition(". Did you mean")[0].rstrip(".") + "."
            failure = click.UsageError(message + did_you_mean(close), exc.ctx)
            raise told(failure, as_json="--json" in args) from None
