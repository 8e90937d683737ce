"""What every command has in common: its service, its output, its errors and its exit status."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import click
from celery.bin.base import CeleryCommand
from kombu.exceptions import OperationalError

from celery_dtimer.cli.output import Output
from celery_dtimer.errors import (
    DistributedTimerError,
    EmbeddedServerError,
    InvalidTimerError,
    SettingsError,
    StoreError,
    TimerNotFoundError,
    shown,
)
from celery_dtimer.masking import masked
from celery_dtimer.model import Instance, Timer
from celery_dtimer.timers import DistributedTimer, timers_of

#: The exit status of a command that has found something, was used wrongly, or met no server.
FOUND, WRONG, UNREACHABLE = 1, 2, 3

EXIT_STATUS = """\b
Exit status:
  0  done, or all is well
  1  a check has found something, or something could not be done
  2  wrong use: an unknown command, option, timer or instance, or a value
     that is not accepted
  3  Redis, or the broker, could not be reached, or has refused"""

_SERVICE = "celery_dtimer.service"  # where the group leaves what --service says
_SAMPLED = 5000  # timers whose names are compared with a wrong one

Function = TypeVar("Function", bound=Callable[..., Any])


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


class Session:
    """The service that a command is about, and where its output goes."""

    def __init__(self, ctx: click.Context, *, as_json: bool) -> None:
        """Take both from the context that Celery's command has made."""
        self.app: Any = ctx.obj.app
        self.output = Output(as_json=as_json, has_color=not ctx.obj.no_color)
        self.service: str | None = ctx.meta.get(_SERVICE)

    @functools.cached_property
    def timers(self) -> DistributedTimer:
        """The timers of the service."""
        return timers_of(self.app, self.service)

    def timer(self, name: str) -> Timer:
        """Return a timer by its id or name.

        Raises:
            Failure: there is none; it tells the names that are alike.
        """
        try:
            return self.timers.get_timer(name)
        except TimerNotFoundError as exc:
            sampled = self.timers.get_timers(limit=_SAMPLED)
            raise unknown(exc, name, (timer.name for timer in sampled)) from exc

    def instance(self, id: str) -> Instance:
        """Return a registered instance by its id.

        Raises:
            Failure: there is none; it tells the ids that are alike.
        """
        found = {instance.id: instance for instance in self.timers.get_service_instances()}
        if id not in found:
            missing = TimerNotFoundError(f"no instance has the id {shown(id)}")
            raise unknown(missing, id, found, kind="InstanceNotFoundError")
        return found[id]


def unknown(exc: Exception, name: str, known: Iterable[str], *, kind: str = "") -> Failure:
    """Return the failure for a name that nothing has, with the known ones that are alike."""
    return Failure(
        str(exc), WRONG, kind=kind or type(exc).__name__, suggestions=close_to(name, known)
    )


def note_service(ctx: click.Context, service: str | None) -> None:
    """Remember which service the commands are about; None for the app's own."""
    ctx.meta[_SERVICE] = service


def pass_session(function: Function) -> Callable[..., Any]:
    """Give a command its `Session` first, in place of its ``--json``."""

    @functools.wraps(function)
    def call(*args: Any, as_json: bool, **kwargs: Any) -> Any:
        ctx = click.get_current_context()
        return function(Session(ctx, as_json=as_json), *args, **kwargs)

    return call


class Command(CeleryCommand):
    """A command whose errors have an exit status, and whose output can be JSON."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Add ``--json``, and the exit status to the help."""
        kwargs.setdefault("epilog", EXIT_STATUS)
        super().__init__(*args, **kwargs)
        about = "Print exactly one JSON document, for programs."
        self.params.append(click.Option(["as_json", "--json"], is_flag=True, help=about))

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the arguments; what is wrong with them is told in JSON too, if that is asked."""
        wants_json = "--json" in args
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as exc:
            raise _told(exc, as_json=wants_json) from None

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; an error is a line, and a status."""
        as_json = bool(ctx.params.get("as_json"))
        try:
            return super().invoke(ctx)
        except click.ClickException as exc:
            raise _told(exc, as_json=as_json) from exc
        except click.Abort:
            failure = Failure("aborted: nothing was done", FOUND, kind="Aborted")
            raise _told(failure, as_json=as_json) from None
        except BrokenPipeError:
            raise
        except (DistributedTimerError, OperationalError, OSError) as exc:
            failure = Failure(masked(exc), status_of(exc), kind=type(exc).__name__)
            raise _told(failure, as_json=as_json) from exc


def _told(exc: click.ClickException, *, as_json: bool) -> click.ClickException:
    """Return an error, told in JSON if that is asked; what is shown to people goes to stderr."""
    if as_json:
        told = {"type": "UsageError", "message": exc.format_message()}
        document = exc.document if isinstance(exc, Failure) else {"error": told}
        Output(as_json=True).document(document)
    return exc


def status_of(exc: Exception) -> int:
    """Return the exit status of an error."""
    if isinstance(exc, (TimerNotFoundError, InvalidTimerError, SettingsError)):
        return WRONG
    if isinstance(exc, (StoreError, EmbeddedServerError, OperationalError, OSError)):
        return UNREACHABLE
    return FOUND


def did_you_mean(suggestions: Sequence[str]) -> str:
    """Return the end of a message about a wrong name."""
    return f"\nDid you mean {' or '.join(map(shown, suggestions))}?" if suggestions else ""


def close_to(wrong: str, known: Iterable[str]) -> list[str]:
    """Return the names that are most like a wrong one, the best first."""
    names = {name.casefold(): name for name in known}
    found = difflib.get_close_matches(wrong.casefold(), names, 3, 0.6)
    return [names[name] for name in found]


class Group(click.Group):
    """A group of commands; for a wrong name it suggests a right one."""

    command_class = Command
    group_class = type

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that the arguments name."""
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as exc:
            close = close_to(args[0], self.list_commands(ctx))
            message = exc.message.partition(". Did you mean")[0].rstrip(".") + "."
            told = click.UsageError(message + did_you_mean(close), exc.ctx)
            raise _told(told, as_json="--json" in args) from None
