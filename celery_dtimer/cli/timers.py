"""The commands about timers: look at them, change them, and ask when and why they run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime, timedelta, timezone
from functools import partial
from typing import Any

import click

from celery_dtimer.cli.commands import Command, Session, confirm, pass_session, reference
from celery_dtimer.cli.definitions import check_task, check_unset, definition_options, keywords_of
from celery_dtimer.cli.documents import (
    policy_document,
    timer_document,
    whole_timer_document,
)
from celery_dtimer.cli.output import Output, from_now, iso, named, span
from celery_dtimer.cli.parameters import (
    MOMENT,
    complete_instances,
    complete_timers,
)
from celery_dtimer.cli.results import attempt, tell_results
from celery_dtimer.errors import TimerNotFoundError, shown
from celery_dtimer.model import Timer
from celery_dtimer.zones import zone_of

_NEVER = datetime.fromtimestamp(0, timezone.utc)
_STATUSES = ("active", "paused", "stopped", "broken")
_SORTS: dict[str, Callable[[Timer], Any]] = {
    "name": lambda timer: timer.name,
    "last-run": lambda timer: -(timer.last_run_at or _NEVER).timestamp(),
    "runs": lambda timer: -timer.total_run_count,
}
_LISTED = 20  # timers that are named before they are deleted

Several = Callable[[Session, Timer], None]

timer_argument = click.argument("timer", metavar="TIMER", shell_complete=complete_timers)


# ------------------------------------------------------------------ looking


@click.command("list", cls=Command)
@click.option("--status", type=click.Choice(_STATUSES), help="Only those with this status.")
@click.option("--name", metavar="PATTERN", help="Only those whose name matches; * and ? as usual.")
@click.option("--task", help="Only those of this task, or callback's short name.")
@click.option(
    "--instance", shell_complete=complete_instances, help="Only those that this instance owns."
)
@click.option(
    "--sort",
    type=click.Choice(["next-run", *_SORTS]),
    default="next-run",
    show_default=True,
    help="What comes first.",
)
@click.option("--offset", type=click.IntRange(0), default=0, help="How many are left out in front.")
@click.option("--limit", type=click.IntRange(0), help="How many are shown at most.")
@pass_session
def list_(
    session: Session,
    sort: str,
    instance: str | None,
    offset: int,
    limit: int | None,
    **filters: Any,
) -> None:
    """List the timers, active ones by their next run."""
    if instance is not None:
        session.instance(instance)
    if sort == "next-run":
        found = session.timers.get_timers(instance=instance, offset=offset, limit=limit, **filters)
    else:
        found = sorted(session.timers.get_timers(instance=instance, **filters), key=_SORTS[sort])
        found = found[offset : None if limit is None else offset + limit]
    if not found and filters["task"]:
        check_task(session, filters["task"])
    if session.output.as_json:
        session.output.document(list(map(timer_document, found)))
    else:
        _list_table(session, found)


def _list_table(session: Session, found: Sequence[Timer]) -> None:
    """Show timers: with ids and whole moments where programs read, by the clock for people."""
    output, now = session.output, datetime.now(timezone.utc)
    if not output.is_terminal:
        output.table([], ((timer.id, *_cells(output, timer), timer.instance) for timer in found))
        return
    output.table(
        ["name", "status", "next run", "in", "runs", "skipped", "schedule", "task", "instance"],
        (
            (*cells[:3], from_now(timer.next_run_at, now), *cells[3:], timer.instance)
            for timer in found
            for cells in [_cells(output, timer)]
        ),
        optional=("instance", "skipped", "runs", "next run", "task"),
        whole=("status", "in"),
    )


def _cells(output: Output, timer: Timer) -> tuple[Any, ...]:
    return (
        *(named(timer.name), timer.status, output.moment(timer.next_run_at)),
        *(timer.total_run_count, timer.skipped, _rule(output, timer), timer.task),
    )


def _rule(output: Output, timer: Timer) -> str:
    if timer.schedule is None:
        return "can not be read"
    return output.sentence(timer.schedule.describe())


@click.command(cls=Command)
@timer_argument
@pass_session
def show(session: Session, timer: str) -> None:
    """Show all of a timer, with its arguments and options."""
    _show(session, session.timer(timer))


def _show(session: Session, timer: Timer) -> None:
    output, now = session.output, datetime.now(timezone.utc)
    if output.as_json:
        output.document(whole_timer_document(timer))
        return

    def moment(value: datetime | None) -> str | None:
        away = f" ({from_now(value, now)})" if output.is_terminal and value else ""
        return None if value is None else f"{output.moment(value)}{away}"

    output.fields(
        [
            ("name", named(timer.name)),
            ("id", timer.id),
            ("status", timer.status),
            ("reason", timer.reason),
            ("description", timer.description),
            ("schedule", _rule(output, timer)),
            ("task", timer.task),
            ("args", timer.args or None),
            ("kwargs", timer.kwargs or None),
            *((f"option {name}", value) for name, value in timer.options.items()),
            *((f"policy {name}", value) for name, value in policy_document(timer).items()),
            ("next run", moment(timer.next_run_at)),
            ("last run", moment(timer.last_run_at)),
            ("runs", timer.total_run_count),
            ("skipped", ", ".join(f"{count} {why}" for why, count in timer.skips.items())),
            ("instance", timer.instance),
            ("declared by", timer.source),
            ("created", moment(timer.created_at)),
            ("revision", timer.revision),
        ]
    )


@click.command(cls=Command)
@click.argument("timer", metavar="TIMER|SCHEDULE", shell_complete=complete_timers)
@click.option("-n", "count", type=int, default=10, show_default=True, help="How many runs.")
@click.option("--after", type=MOMENT, help="Those after this moment; by default after now.")
@click.option("--timezone", metavar="ZONE", help="By whose clocks they are shown.")
@pass_session
def preview(
    session: Session, timer: str, count: int, after: datetime | None, timezone: str | None
) -> None:
    """Show the next runs of a timer, or of a cron or rrule text; where clocks change is marked."""
    try:
        runs = session.timers.preview(timer, count, after=after, timezone=timezone)
    except TimerNotFoundError:
        session.timer(timer)  # tells names that are alike
        raise
    begin = after or datetime.now(session.zone)
    if begin.tzinfo is None:
        begin = begin.replace(tzinfo=zone_of(timezone) if timezone else session.zone)
    rows = list(_marked(runs, begin))
    if session.output.as_json:
        session.output.document([_preview_document(*row) for row in rows])
        return
    if session.output.is_terminal:
        now = datetime.now(session.zone)
        session.output.table(
            ["", "run", "in", "clocks"],
            (
                (place, _clock(run), from_now(run, now), _change(change))
                for place, (run, change) in enumerate(rows, 1)
            ),
            optional=("", "in"),
            whole=("run",),
        )
    else:
        session.output.table(
            [], ((iso(run), run.isoformat(), _change(change) or "-") for run, change in rows)
        )


def _marked(
    runs: Iterable[datetime], after: datetime
) -> Iterator[tuple[datetime, timedelta | None]]:
    """Yield runs, with what the clocks were changed by since the one before."""
    before = None
    for run in runs:
        if before is None:
            before = after.astimezone(run.tzinfo)
        change = _offset(run) - _offset(before)
        yield run, change or None
        before = run


def _offset(moment: datetime) -> timedelta:
    return moment.utcoffset() or timedelta(0)


def _preview_document(run: datetime, change: timedelta | None) -> dict[str, Any]:
    return {
        "run_at": run.isoformat(timespec="milliseconds" if run.microsecond else "seconds"),
        "run_at_utc": iso(run),
        "clocks_changed_by": None if change is None else change.total_seconds(),
    }


def _clock(run: datetime) -> str:
    name = run.tzname() or ""
    precision = "milliseconds" if run.microsecond else "seconds"
    shown_at = run.replace(tzinfo=None).isoformat(" ", precision)
    return f"{run:%a} {shown_at} {name} ({run:%z})"


def _change(change: timedelta | None) -> str:
    if change is None:
        return ""
    forward = change > timedelta(0)
    return f"<- clocks went {'forward' if forward else 'back'} {span(abs(change))} before it"


@click.command(cls=Command)
@timer_argument
@click.argument("moment", metavar="TIME", type=MOMENT)
@pass_session
def why(session: Session, timer: str, moment: datetime) -> None:
    """Say what became of a timer's run at a moment, or why there was none."""
    found = session.timer(timer)
    answer = session.timers.why(reference(found), moment)
    told = {"timer_id": found.id, "name": found.name, "moment": _asked(session, moment)}
    session.output.result({**told, "answer": answer}, session.output.sentence(answer))


def _asked(session: Session, moment: datetime) -> str | None:
    return iso(moment if moment.tzinfo else moment.replace(tzinfo=session.zone))


# ------------------------------------------------------------------ changing


@click.command(cls=Command)
@click.argument("name")
@definition_options
@pass_session
def create(session: Session, name: str, **given: Any) -> None:
    """Create the timer NAME, or update the one of that name.

    It needs a task and one of --every, --cron, --rrule, --at and --solar.
    """
    keywords = keywords_of(session, given)
    for missing, wanted in (
        ("schedule", "one of --every, --cron, --rrule, --at, --solar"),
        ("callback", "--task"),
    ):
        if missing not in keywords:
            raise click.UsageError(f"a timer needs {wanted}")
    timers = session.new_timers
    timers.create_timer(name, **keywords)
    _changed(session, timers.get_timer(name), "stored")


@click.command(cls=Command)
@timer_argument
@definition_options
@click.option(
    "--unset", multiple=True, metavar="NAME", help="Give it its default, or remove it. Repeatable."
)
@click.option("--if-revision", metavar="REVISION", help="Only if it has this revision.")
@pass_session
def update(
    session: Session, timer: str, unset: Sequence[str], if_revision: str | None, **given: Any
) -> None:
    """Change a timer; what is not named stays."""
    changes = keywords_of(session, given)
    unset = [name.replace("-", "_") for name in unset]
    if not (changes or unset):
        raise click.UsageError("nothing was named that is to be changed")
    found = session.timer(timer)
    check_unset(found, unset)
    changes |= dict.fromkeys(unset)
    changed = session.timers.update_timer(
        reference(found), expected_revision=if_revision, **changes
    )
    _changed(session, changed, "updated")


def _changed(session: Session, timer: Timer, what: str) -> None:
    at = session.output.moment(timer.next_run_at)
    following = f"next run {at}" if at else timer.status
    text = f"{shown(timer.name)} {what} ({timer.id}); {following}"
    session.output.result(whole_timer_document(timer), text)


def _several(function: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command its timers: by id or name, and by pattern."""
    for decorate in (
        click.option("--yes", is_flag=True, help="Do not ask."),
        click.option("--name", "pattern", metavar="PATTERN", help="All whose name matches."),
        click.argument("timers", metavar="[TIMER]...", nargs=-1, shell_complete=complete_timers),
    ):
        function = decorate(function)
    return function


def _chosen(session: Session, names: Sequence[str], pattern: str | None) -> list[Timer]:
    """Return the timers that are meant, each once: all are looked up before any is changed."""
    if not names and pattern is None:
        raise click.UsageError("name a timer, or a pattern with --name")
    found = [session.timer(name) for name in names]
    if pattern is not None:
        matching = session.timers.get_timers(name=pattern)
        if not matching:
            raise TimerNotFoundError(f"no timer's name matches {shown(pattern)}")
        found += matching
    return list({timer.id: timer for timer in found}.values())


def _confirm(output: Output, timers: Sequence[Timer], verb: str) -> None:
    """Ask whether to go on.

    Raises:
        click.Abort: no.
    """
    for timer in timers[:_LISTED]:
        output.note(f"  {shown(timer.name)}  {_rule(output, timer)}  {timer.task}")
    if len(timers) > _LISTED:
        output.note(f"  ... and {len(timers) - _LISTED} others")
    what = "this timer" if len(timers) == 1 else f"these {len(timers)} timers"
    confirm(f"{verb.capitalize()} {what}?")


def _apply(
    session: Session, timers: Sequence[Timer], verb: str, action: Callable[[str], None]
) -> None:
    """Do something to each timer; one that refuses stops no other."""
    results = [
        attempt({"id": timer.id, "name": timer.name}, partial(action, reference(timer)))
        for timer in timers
    ]
    tell_results(session.output, results, lambda result: f"{verb} {shown(result['name'])}")


def _command(name: str, past: str, about: str, *, asks: bool = False) -> click.Command:
    """Return a command that does one thing to several timers."""

    @click.command(name, cls=Command, help=about)
    @_several
    @pass_session
    def command(session: Session, timers: Sequence[str], pattern: str | None, yes: bool) -> None:
        chosen = _chosen(session, timers, pattern)
        if not yes and (asks or (pattern is not None and len(chosen) > 1)):
            _confirm(session.output, chosen, name)
        _apply(session, chosen, past, getattr(session.timers, f"{name}_timer"))

    return command


pause = _command(
    "pause", "paused", "Pause timers: they keep their phase, and skip what falls due meanwhile."
)
resume = _command("resume", "resumed", "Go on with paused, stopped or broken timers.")
stop = _command("stop", "stopped", "Stop timers; they stay until they are resumed or deleted.")
trigger = _command("trigger", "triggered", "Run timers now, without moving their schedules.")
delete = _command(
    "delete",
    "deleted",
    "Delete timers. A static one is written again by its beats: stop that instead.",
    asks=True,
)
