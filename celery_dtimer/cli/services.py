"""The commands about services and instances: who is there, what is wrong, and who has what."""

from __future__ import annotations

from typing import Any

import click

from celery_dtimer.cli.commands import Command, Session, pass_session
from celery_dtimer.cli.documents import instance_document, plain
from celery_dtimer.cli.output import named, span
from celery_dtimer.cli.parameters import complete_instances
from celery_dtimer.cli.progress import Progress
from celery_dtimer.cli.usage import FOUND, UNREACHABLE
from celery_dtimer.doctor import Finding
from celery_dtimer.membership import local_host
from celery_dtimer.model import Instance


def instances_with_age(session: Session) -> list[tuple[Instance, float]]:
    """Return the registered instances, with the seconds since each was heard, by Redis' clock."""
    found = session.timers.get_service_instances()
    now_ms = session.timers.store.now_ms()
    return [(each, each.silence_ms(now_ms) / 1000) for each in found]


def state_of(session: Session, instance: Instance, age: float) -> str:
    """Return an instance's status, "silent" when it has not been heard for too long."""
    is_silent = age > session.timers.store.settings.instance_timeout
    return "silent" if is_silent else instance.status


@click.command(cls=Command)
@pass_session
def instances(session: Session) -> None:
    """List the instances of the service: the beats, and what each has and does."""
    found = instances_with_age(session)
    if session.output.as_json:
        session.output.document(
            [
                {**instance_document(each, age), "state": state_of(session, each, age)}
                for each, age in found
            ]
        )
        return
    session.output.table(
        [
            *("instance", "state", "heartbeat", "timers", "sent", "skipped", "refused", "broker"),
            *("dispatch", "clock", "started", "version"),
        ],
        (
            (
                *(each.id, state_of(session, each, age), f"{span(age)} ago", each.timers),
                *(each.sent, each.skipped, each.refused, each.broker or "-", each.dispatch or "-"),
                "-" if each.clock_offset is None else f"{each.clock_offset:+.3f} s",
                *(session.output.moment(each.started_at), each.version),
            )
            for each, age in found
        ),
        optional=("version", "started", "clock", "refused", "dispatch", "skipped", "sent"),
        whole=("instance", "state"),
    )


# ------------------------------------------------------------------ checks


@click.command(cls=Command)
@click.option(
    "--worker-timeout",
    type=float,
    default=1.0,
    show_default=True,
    help="Seconds that workers have to say which tasks they know; 0 to ask none.",
)
@click.option("--strict", is_flag=True, help="Warnings make the exit status 1, too.")
@pass_session
def doctor(session: Session, worker_timeout: float, strict: bool) -> None:
    """Say what is so in the service, what is wrong, and what to do about it."""
    findings = session.timers.doctor(worker_timeout=worker_timeout)
    if session.output.as_json:
        session.output.document([finding.as_dict() for finding in findings])
    else:
        for finding in findings:
            _say_finding(session, finding)
    if any(finding.check == "store" and finding.severity == "error" for finding in findings):
        raise click.exceptions.Exit(UNREACHABLE)
    bad = ("error", "warning") if strict else ("error",)
    if any(finding.severity in bad for finding in findings):
        raise click.exceptions.Exit(FOUND)


def _say_finding(session: Session, finding: Finding) -> None:
    output = session.output
    if not output.is_terminal:
        output.table([], [(finding.severity, finding.check, finding.found, finding.advice or "-")])
        return
    output.line(f"  {finding.check}: {finding.found}", lead=f"{finding.severity:7}")
    if finding.advice:
        output.line(f"         -> {finding.advice}")


@click.command(cls=Command)
@click.option(
    "--instance",
    metavar="ID",
    shell_complete=complete_instances,
    help="That of this instance; by default that of any on this host.",
)
@pass_session
def health(session: Session, instance: str | None) -> None:
    """Say by the exit status whether a beat is alive, for container probes and supervisors.

    It is 0 while an instance of this host, or the one with the id, is registered and heard: its
    last heartbeat, which ends with its loop, is not older than dtimer_instance_timeout. It is 1
    when there is none such, and 3 when Redis can not tell.
    """
    host = local_host()
    chosen = [
        (each, age)
        for each, age in instances_with_age(session)
        if (each.id == instance if instance is not None else each.host == host)
    ]
    states = {each.id: state_of(session, each, age) for each, age in chosen}
    is_alive = any(state not in ("silent", "leaving") for state in states.values())
    what = f"instance {instance}" if instance is not None else f"host {host}"
    documents = [{**instance_document(each, age), "state": states[each.id]} for each, age in chosen]
    told = ", ".join(f"{id} {state}" for id, state in states.items()) or "no instance"
    session.output.result(
        {"healthy": is_alive, "host": host, "instances": documents},
        f"{'ok' if is_alive else 'not alive'}: {what}: {told}",
    )
    if not is_alive:
        raise click.exceptions.Exit(FOUND)


# ------------------------------------------------------------------ who has what


@click.command(cls=Command)
@pass_session
def services(session: Session) -> None:
    """List the services of this Redis, under the app's dtimer_key_prefix."""
    found = session.timers.get_services()
    if session.output.as_json:
        session.output.document(list(map(plain, found)))
        return
    session.output.table(
        ["service", "shards", "instances", "active", "inactive", "sent"],
        (
            (named(each.name), each.shards, each.instances, each.active, each.inactive, each.sent)
            for each in found
        ),
    )


@click.command(cls=Command)
@click.argument("instance", metavar="INSTANCE", shell_complete=complete_instances)
@click.option("--undo", is_flag=True, help="Let it be given timers again.")
@pass_session
def drain(session: Session, instance: str, undo: bool) -> None:
    """Hand an instance's timers over to the others, before maintenance of its host.

    It stays, as draining, and is given no more timers, until it is restarted or --undo is given.
    """
    found = session.instance(instance)
    if undo:
        was_drained = session.timers.undrain_instance(found.id)
        document: dict[str, Any] = {"instance": found.id, "undrained": was_drained}
        text = "is given timers again" if was_drained else "was not draining: nothing has changed"
    else:
        with Progress("moved", found.timers) as on_progress:
            moved = session.timers.drain_instance(found.id, on_progress)
        document = {"instance": found.id, "moved": moved}
        text = f"is draining: {moved} timers handed over"
    session.output.result(document, f"{found.id} {text}")


@click.command(cls=Command)
@pass_session
def rebalance(session: Session) -> None:
    """Give every live instance its share of the timers now."""
    moved = session.timers.rebalance()
    session.output.result({"moved": moved}, f"{moved} timers moved")


@click.command(cls=Command)
@click.argument("shards", type=int)
@pass_session
def reshard(session: Session, shards: int) -> None:
    """Split the service into SHARDS shards, while its instances go on.

    Should it end before its time, call it again: it goes on.
    """
    total = session.timers.pending_count()
    with Progress("moved", total) as on_progress:
        moved = session.timers.reshard(shards, on_progress)
    session.output.result(
        {"shards": shards, "moved": moved},
        f"{moved} timers moved; now set dtimer_shards = {shards}",
    )
