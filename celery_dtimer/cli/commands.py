"""What every command has in common: its service, its output, its errors and its exit status."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import click
from celery.bin.base import CeleryCommand
from kombu.exceptions import OperationalError

from celery_dtimer.cli.output import Output, UnwritableError
from celery_dtimer.cli.parameters import zone_of_app
from celery_dtimer.cli.usage import (
    AS_JSON,
    EXIT_STATUS,
    FOUND,
    MOST_SUGGESTED,
    SERVICE,
    UNREACHABLE,
    WRONG,
    Failure,
    close_to,
    told,
)
from celery_dtimer.errors import (
    DistributedTimerError,
    EmbeddedServerError,
    InstanceNotFoundError,
    InvalidTimerError,
    SettingsError,
    StoreError,
    TimerNotFoundError,
    shown,
)
from celery_dtimer.masking import masked
from celery_dtimer.model import Instance, Timer, timer_id
from celery_dtimer.timers import DistributedTimer, timers_of

_SAMPLED = 50_000  # timers whose names are compared with a wrong one

Function = TypeVar("Function", bound=Callable[..., Any])


class Session:
    """The service that a command is about, and where its output goes."""

    def __init__(self, ctx: click.Context, *, as_json: bool) -> None:
        """Take both from the context that Celery's command has made."""
        self.app: Any = ctx.obj.app
        self.zone = zone_of_app(self.app)
        self.output = Output(as_json=as_json, has_color=not ctx.obj.no_color, zone=self.zone)
        self._service: str | None = ctx.meta.get(SERVICE)

    @functools.cached_property
    def timers(self) -> DistributedTimer:
        """The timers of the service.

        Raises:
            Failure: it was named, and is none that is there; it tells those that are alike.
        """
        timers = self.new_timers
        if self._service is not None and timers.store.base.stored_layout() is None:
            message = f"no service has the name {shown(self._service)}"
            names = [each.name for each in timers.get_services()]
            close = close_to(self._service, names)
            raise Failure(message, WRONG, kind="ServiceNotFoundError", suggestions=close)
        return timers

    @functools.cached_property
    def new_timers(self) -> DistributedTimer:
        """The timers of the service, which may be a new one."""
        return timers_of(self.app, self._service)

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
            missing = InstanceNotFoundError(f"no instance has the id {shown(id)}")
            raise unknown(missing, id, found)
        return found[id]


def reference(timer: Timer) -> str:
    """Return by what the API finds a timer, and no other whose name is this one's id."""
    return timer.name if timer_id(timer.name) == timer.id else timer.id


def confirm(question: str) -> None:
    """Ask people whether to go on.

    Raises:
        click.Abort: no, or nobody answers.
    """
    try:
        click.confirm(question, abort=True, err=True)
    except RuntimeError:  # there is no stdin at all
        raise click.Abort from None


def unknown(
    exc: Exception, name: str, known: Iterable[str], *, otherwise: Sequence[str] = ()
) -> Failure:
    """Return the failure for a name that nothing has, with the known ones that are alike.

    Args:
        exc: says so.
        name: the wrong one.
        known: the right ones.
        otherwise: suggested where none is alike.
    """
    close = close_to(name, known) or otherwise[:MOST_SUGGESTED]
    return Failure(str(exc), WRONG, kind=type(exc).__name__, suggestions=close)


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
        as_json = "--json" in args or bool(ctx.meta.get(AS_JSON))
        try:
            left = super().parse_args(ctx, args)
        except click.UsageError as exc:
            raise told(exc, as_json=as_json) from None
        except SettingsError as exc:
            raise told(_failure(exc), as_json=as_json) from exc
        ctx.params["as_json"] = ctx.params["as_json"] or bool(ctx.meta.get(AS_JSON))
        return left

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; an error is a line, and a status."""
        as_json = bool(ctx.params.get("as_json"))
        try:
            return super().invoke(ctx)
        except click.ClickException as exc:
            raise told(exc, as_json=as_json) from exc
        except click.Abort:
            failure = Failure("aborted: nothing was done", FOUND, kind="Aborted")
            raise told(failure, as_json=as_json) from None
        except BrokenPipeError:
            raise
        except (DistributedTimerError, OperationalError, OSError, UnwritableError) as exc:
            raise told(_failure(exc), as_json=as_json) from exc


def _failure(exc: Exception) -> Failure:
    return Failure(masked(exc), status_of(exc), kind=type(exc).__name__)


def status_of(exc: Exception) -> int:
    """Return the exit status of an error."""
    if isinstance(
        exc, (TimerNotFoundError, InstanceNotFoundError, InvalidTimerError, SettingsError)
    ):
        return WRONG
    if isinstance(exc, (StoreError, EmbeddedServerError, OperationalError, OSError)):
        return UNREACHABLE
    return FOUND
