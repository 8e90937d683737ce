"""The options of ``create`` and ``update``: the keywords of `DistributedTimer.create_timer`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import click

from celery_dtimer.cli.commands import Session, unknown
from celery_dtimer.cli.parameters import (
    ASSIGNMENT,
    DURATION,
    JSON_LIST,
    JSON_OBJECT,
    MOMENT,
)
from celery_dtimer.errors import InvalidTimerError, shown
from celery_dtimer.keywords import KEYWORDS
from celery_dtimer.model import Timer
from celery_dtimer.options import CANVAS_KINDS
from celery_dtimer.policy import OVERLAPS
from celery_dtimer.schedules import Solar
from celery_dtimer.zones import POLICIES

#: What ``--unset`` takes beside the options that a timer has.
UNSET = KEYWORDS | {"args", "kwargs"}

_SCHEDULES = ("every", "cron", "rrule", "at", "solar")

_OPTIONS = (
    click.option("--every", type=DURATION, help="Run every so often: 30, 30s, 5m, 1h30m, 2d."),
    click.option("--cron", metavar="TEXT", help='Run by a cron text: "0 9 * * mon-fri".'),
    click.option(
        "--rrule", metavar="TEXT", help="By an iCalendar rule, FREQ=…, with DTSTART or --start-at."
    ),
    click.option("--at", type=MOMENT, help="Run once, at this moment."),
    click.option(
        "--solar",
        type=(str, float, float),
        metavar="EVENT LAT LON",
        help="Run by the sun: sunrise 48.85 2.35.",
    ),
    click.option(
        "--task", "callback", metavar="NAME", help="The task, or a callback's short name."
    ),
    click.option("--args", type=JSON_LIST, help="Positional arguments: '[1, \"two\"]'."),
    click.option("--kwargs", type=JSON_OBJECT, help="Keyword arguments: '{\"name\": 1}'."),
    click.option("--timezone", metavar="ZONE", help="By whose clocks the schedule goes."),
    click.option("--dst", type=click.Choice(POLICIES), help="What clocks that change do to it."),
    click.option("--relative/--no-relative", default=None, help="Round an interval to its unit."),
    click.option("--start-at", type=MOMENT, help="No run is scheduled before."),
    click.option("--end-at", type=MOMENT, help="No run is scheduled after."),
    click.option("--max-runs", type=int, help="Finish after so many runs."),
    click.option("--jitter", type=DURATION, help="Delay each run by up to so long, by chance."),
    click.option(
        "--coalesce/--no-coalesce", default=None, help="One run stands for all that were missed."
    ),
    click.option("--misfire-grace-time", type=DURATION, help="Skip runs that are later."),
    click.option("--max-catch-up", type=int, help="How many missed runs are made up at most."),
    click.option("--shards", type=int, help="Messages that each run is sent as."),
    click.option("--overlap", type=click.Choice(OVERLAPS), help="While an earlier run goes on."),
    click.option("--resend-lost", type=int, help="How often a lost run is sent again."),
    click.option("--description", help="Shown to people."),
    click.option("--queue", help="Where its messages go."),
    click.option("--priority", type=int, help="Of its messages."),
    click.option("--expires", type=DURATION, help="Of each message, from its sending on."),
    click.option(
        "--option",
        "options",
        type=ASSIGNMENT,
        multiple=True,
        help="Any other option of apply_async; the value is JSON, or a text. Repeatable.",
    ),
    click.option("--unregistered", is_flag=True, help="Accept a task that this app does not know."),
)


def definition_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the options that describe a timer."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


def keywords_of(session: Session, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keywords of the API for the options that were given.

    Raises:
        click.UsageError: two schedules were given.
        Failure: the app does not know the task.
    """
    keywords = {name: value for name, value in given.items() if value is not None}
    keywords |= dict(keywords.pop("options"))
    if keywords.pop("unregistered", False) is False and "callback" in keywords:
        more = "; with --unregistered it is taken all the same"
        check_task(session, keywords["callback"], more)
    schedules = {name: keywords.pop(name) for name in _SCHEDULES if name in keywords}
    if len(schedules) > 1:
        given_names = " and ".join(f"--{name}" for name in schedules)
        raise click.UsageError(f"{given_names} exclude each other: a timer has one schedule")
    for name, value in schedules.items():
        keywords["schedule"] = Solar(*value) if name == "solar" else value
    return keywords


def check_task(session: Session, task: str, more: str = "") -> None:
    """Refuse a task, or the short name of a callback, that the app does not know.

    Raises:
        Failure: with those that are alike, and what more is to be said.
    """
    known = _tasks(session)
    if task in CANVAS_KINDS or task in known:
        return
    names = [name for name in known if not name.startswith("celery.")]
    # It may be the last part of one that is meant.
    parts = [name for name in names if name.rpartition(".")[2] == task.rpartition(".")[2]]
    message = f"this app knows no task {shown(task)}{more}"
    raise unknown(InvalidTimerError(message), task, names, otherwise=parts)


def _tasks(session: Session) -> set[str]:
    session.app.loader.import_default_modules()
    return {*session.new_timers.callbacks, *session.app.tasks}


def check_unset(timer: Timer, names: Iterable[str]) -> None:
    """Refuse to give a default to what a timer does not have.

    Raises:
        Failure: with the names that are alike.
    """
    known = {*UNSET, *timer.options}
    for name in names:
        if name not in known:
            message = f"--unset {shown(name)}: the timer has no such thing"
            raise unknown(InvalidTimerError(message), name, known)
