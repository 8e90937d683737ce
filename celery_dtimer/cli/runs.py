"""The commands about runs: what became of them, what has failed, and what is pending."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from functools import partial
from typing import Any

import click

from celery_dtimer.auditing import TimerAudit
from celery_dtimer.cli.commands import Command, Session, confirm, pass_session, reference, unknown
from celery_dtimer.cli.definitions import check_task
from celery_dtimer.cli.documents import call_document, plain
from celery_dtimer.cli.output import span
from celery_dtimer.cli.parameters import (
    JSON_LIST,
    JSON_OBJECT,
    MOMENT,
    complete_letters,
    complete_timers,
)
from celery_dtimer.cli.results import attempt, tell_results
from celery_dtimer.cli.usage import FOUND, Group
from celery_dtimer.errors import TimerNotFoundError, shown
from celery_dtimer.runs import STATES, RunRecord

_AUDITED = timedelta(hours=24)
_ALL = 10_000  # dead letters that are kept

limit_option = click.option(
    "--limit", type=click.IntRange(0), default=100, show_default=True, help="How many at most."
)
offset_option = click.option(
    "--offset", type=click.IntRange(0), default=0, help="How many are left out in front."
)
arguments_option = click.option(
    "--arguments", is_flag=True, help="With their arguments, which may hold secrets."
)


@click.command(cls=Command)
@click.argument("timer", required=False, metavar="[TIMER]", shell_complete=complete_timers)
@click.option("--state", type=click.Choice(STATES), help="Only those in this state.")
@offset_option
@limit_option
@pass_session
def runs(session: Session, timer: str | None, state: str | None, offset: int, limit: int) -> None:
    """Show what became of runs, the newest first, also of those that no worker has recorded."""
    wanted = None if timer is None else reference(session.timer(timer))
    found = session.timers.get_runs(wanted, state=state, offset=offset, limit=limit)
    if session.output.as_json:
        session.output.document(list(map(plain, found)))
        return
    session.output.table(
        ["scheduled", "timer", "run", "state", "sent", "took", "worker", "task id", "error"],
        (_run_row(session, record) for record in found),
        optional=("task id", "worker", "sent", "took", "run"),
        whole=("scheduled", "state"),
    )


def _run_row(session: Session, record: RunRecord) -> tuple[Any, ...]:
    late = None if record.sent_at is None else record.sent_at - record.scheduled_at
    return (
        session.output.moment(record.scheduled_at),
        record.name or record.timer_id,
        record.number,
        record.state,
        None if late is None else f"+{span(late)}",
        None if record.took is None else span(record.took),
        record.worker,
        record.task_id,
        record.error,
    )


# ------------------------------------------------------------------ dead letters


@click.group(
    cls=Group,
    commands={"list": "runs:dead_list", "requeue": "runs:dead_requeue", "purge": "runs:dead_purge"},
)
def dead() -> None:
    """Look at the runs that have failed for good, and send them again."""


@click.command("list", cls=Command)
@offset_option
@limit_option
@arguments_option
@pass_session
def dead_list(session: Session, offset: int, limit: int, arguments: bool) -> None:
    """List dead letters, the newest first."""
    found = session.timers.get_dead_letters(offset=offset, limit=limit)
    if session.output.as_json:
        session.output.document([call_document(letter, arguments=arguments) for letter in found])
        return
    session.output.table(
        ["letter", "at", "timer", "run", "task", "reason", "where", "error", *_titles(arguments)],
        (
            (
                *(letter.id, session.output.moment(letter.at), letter.name or letter.timer_id),
                *(letter.number, letter.task, letter.reason, letter.where, letter.error),
                *((letter.args, letter.kwargs) if arguments else ()),
            )
            for letter in found
        ),
        optional=("where", "run", "at", "task"),
        whole=("letter",),
    )


def _titles(arguments: bool) -> list[str]:
    return ["args", "kwargs"] if arguments else []


@click.command("requeue", cls=Command)
@click.argument("letters", metavar="[LETTER]...", nargs=-1, shell_complete=complete_letters)
@click.option("--all", "takes_all", is_flag=True, help="All of them.")
@pass_session
def dead_requeue(session: Session, letters: Sequence[str], takes_all: bool) -> None:
    """Send what dead letters hold once more, at once, as new runs."""
    if bool(letters) == takes_all:
        raise click.UsageError("name the ids of letters, or give --all")
    known = [letter.id for letter in session.timers.get_dead_letters(limit=_ALL)]
    for letter in letters:
        if letter not in known:
            missing = TimerNotFoundError(f"no dead letter has the id {shown(letter)}")
            raise unknown(missing, letter, known)
    results = [
        attempt({"id": letter}, partial(session.timers.requeue_dead_letter, letter))
        for letter in letters or known
    ]
    tell_results(session.output, results, lambda result: f"requeued {result['id']}")


@click.command("purge", cls=Command)
@click.option("--before", type=MOMENT, help="Only those written until this moment.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@pass_session
def dead_purge(session: Session, before: datetime | None, yes: bool) -> None:
    """Remove dead letters."""
    if not yes:
        which = "all dead letters" if before is None else f"dead letters written until {before}"
        confirm(f"Remove {which}?")
    removed = session.timers.purge_dead_letters(before)
    session.output.result({"removed": removed}, f"{removed} removed")


# ------------------------------------------------------------------ durable countdowns


@click.command(cls=Command)
@click.option("--task", help="Only calls of this task, or callback's short name.")
@click.option("--queue", help="Only those that go to this queue.")
@click.option("--args", type=JSON_LIST, help="Only those with these positional arguments.")
@click.option("--kwargs", type=JSON_OBJECT, help="Only those with these among their keyword ones.")
@click.option("--after", type=MOMENT, help="Only those that are due then or later.")
@click.option("--before", type=MOMENT, help="Only those that are due before.")
@offset_option
@limit_option
@arguments_option
@pass_session
def pending(session: Session, arguments: bool, **filters: Any) -> None:
    """List the calls with countdown or eta that wait in Redis, by their time."""
    found = session.timers.get_pending(**filters)
    if not found and filters["task"]:
        check_task(session, filters["task"])
    if session.output.as_json:
        session.output.document([call_document(call, arguments=arguments) for call in found])
        return
    session.output.table(
        ["task id", "task", "eta", "queue", "retries", *_titles(arguments)],
        (
            (
                *(call.task_id, call.task, session.output.moment(call.eta), call.queue),
                call.retries,
                *((call.argsrepr, call.kwargsrepr) if arguments else ()),
            )
            for call in found
        ),
        optional=("retries", "queue"),
        whole=("task id",),
    )


@click.command(cls=Command)
@click.argument("task_ids", metavar="TASK_ID...", nargs=-1, required=True)
@pass_session
def cancel(session: Session, task_ids: Sequence[str]) -> None:
    """Cancel calls with countdown or eta that wait in Redis."""
    results = [{"task_id": id, "done": session.timers.cancel(id)} for id in task_ids]
    tell_results(
        session.output,
        results,
        lambda result: f"cancelled {result['task_id']}",
        lambda result: f"no pending call has the task id {result['task_id']!r}",
    )


# ------------------------------------------------------------------ the audit


@click.command(cls=Command)
@click.argument("timer", required=False, metavar="[TIMER]", shell_complete=complete_timers)
@click.option("--since", type=MOMENT, help="Of runs scheduled from then on; by default 24 h ago.")
@click.option("--until", type=MOMENT, help="Until then; by default until now.")
@pass_session
def audit(
    session: Session, timer: str | None, since: datetime | None, until: datetime | None
) -> None:
    """Check that the runs of timers were sent, or that it is known why not.

    The exit status is 1 if a run is lost.
    """
    wanted = None if timer is None else reference(session.timer(timer))
    now = datetime.now(session.zone)
    if since is not None and since.replace(tzinfo=since.tzinfo or session.zone) > now:
        raise click.BadParameter("expected a moment that has passed", param_hint="--since")
    found = session.timers.audit(since or (until or now) - _AUDITED, until, wanted)
    if session.output.as_json:
        session.output.document([{**plain(each), "ok": each.ok} for each in found])
    else:
        _audit_table(session, found)
    if not all(each.ok for each in found):
        raise click.exceptions.Exit(FOUND)


def _audit_table(session: Session, found: Sequence[TimerAudit]) -> None:
    session.output.table(
        ["timer", "verdict", "expected", "sent", "skipped", "pending", "lost", "since", "note"],
        (
            (
                *(each.name or each.timer_id, _verdict(each), each.expected, each.sent),
                ", ".join(f"{count} {why}" for why, count in each.skipped.items()) or "0",
                *(each.pending, each.lost, session.output.moment(each.since), each.note or "-"),
            )
            for each in found
        ),
        optional=("since", "pending", "note"),
        whole=("verdict", "lost"),
    )
    lost = sum(each.lost or 0 for each in found)
    session.output.note(f"{len(found)} timers: {lost} runs lost")


def _verdict(audit: TimerAudit) -> str:
    return "not checked" if audit.lost is None else "ok" if audit.ok else "lost"
