"""``top``: a live view of a service in the terminal."""

from __future__ import annotations

import contextlib
import select
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from types import FrameType
from typing import Any, NamedTuple

import click

from celery_dtimer.cli.commands import Command, Session, pass_session
from celery_dtimer.cli.documents import instance_document, timer_document
from celery_dtimer.cli.output import from_now, named, span, visible
from celery_dtimer.cli.parameters import DURATION
from celery_dtimer.cli.services import instances_with_age, state_of
from celery_dtimer.errors import StoreUnavailableError
from celery_dtimer.model import Instance, Timer
from celery_dtimer.timers import Counts

_SHORTEST, _LONGEST = 0.1, 3600  # seconds between two looks
_NEXT = 10  # timers that come next
_ENTER, _LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"  # another screen, and back
_HOME, _REST, _LINE = "\x1b[H", "\x1b[J", "\x1b[K\n"  # go there; clear what follows


class Look(NamedTuple):
    """What a service is like at a moment."""

    at: float  #: monotonic
    instances: list[tuple[Instance, float]]
    counts: Counts
    waiting: int
    dead: int
    coming: list[Timer]


def look_at(session: Session) -> Look:
    """Return what the service is like now."""
    timers = session.timers
    return Look(
        time.monotonic(),
        instances_with_age(session),
        timers.get_counts(),
        timers.pending_count(),
        timers.dead_letter_count(),
        timers.get_timers(status="active", limit=_NEXT),
    )


def rates(before: Look | None, now: Look) -> dict[str, float]:
    """Return the runs that each instance has sent a second, "" for all, since a look before."""
    if before is None or now.at <= before.at:
        return {}
    seconds = now.at - before.at
    known = {each.id: each.sent for each, _ in before.instances}
    found = {
        each.id: max(0, each.sent - known[each.id]) / seconds
        for each, _ in now.instances
        if each.id in known
    }
    return {**found, "": max(0, now.counts.sent - before.counts.sent) / seconds}


@click.command(cls=Command)
@click.option(
    "--interval", type=DURATION, default="1s", show_default=True, help="Between two looks."
)
@click.option("--once", is_flag=True, help="Look once, and end; so it is in a pipe.")
@pass_session
def top(session: Session, interval: timedelta, once: bool) -> None:
    """Watch the service live: instances, rates, and what comes next. End it with q."""
    seconds = interval.total_seconds()
    if not _SHORTEST <= seconds <= _LONGEST:
        accepted = f"expected from {_SHORTEST:g} to {_LONGEST} s"
        raise click.BadParameter(accepted, param_hint="--interval")
    if once or session.output.as_json or not session.output.is_terminal:
        _look_once(session, seconds)
        return
    before: Look | None = None
    with contextlib.suppress(KeyboardInterrupt), _interrupts() as interrupted, _screen():
        while not interrupted.is_set():
            before = _draw(session, before)
            if _is_ended(seconds):
                return


def _look_once(session: Session, interval: float) -> None:
    first = look_at(session)
    time.sleep(min(interval, 1.0))  # rates are the difference of two looks
    now = look_at(session)
    if session.output.as_json:
        session.output.document(_document(session, first, now))
        return
    for line in frame(session, first, now):
        session.output.row(line)


def _document(session: Session, before: Look, now: Look) -> dict[str, Any]:
    found = rates(before, now)
    return {
        "service": session.timers.service,
        "waiting": now.waiting,
        "sent": now.counts.sent,
        "sent_per_second": found.get("", 0.0),
        "skips": now.counts.skips,
        "dead_letters": now.dead,
        "instances": [
            {
                **instance_document(each, age),
                "state": state_of(session, each, age),
                "sent_per_second": found.get(each.id),
            }
            for each, age in now.instances
        ],
        "coming": list(map(timer_document, now.coming)),
    }


@contextlib.contextmanager
def _interrupts() -> Iterator[threading.Event]:
    """Note Ctrl-C as well: Python drops its exception where it comes while an object is deleted."""
    interrupted = threading.Event()

    def note(number: int, frame: FrameType | None) -> None:
        interrupted.set()
        signal.default_int_handler(number, frame)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def _screen() -> Iterator[None]:
    """Show another screen meanwhile, and have keys arrive at once where that can be done."""
    restore = _unbuffered()
    click.echo(_ENTER, nl=False)
    try:
        yield
    finally:
        click.echo(_LEAVE, nl=False)
        restore()


def _unbuffered() -> Any:
    """Have keys arrive without Return; return what undoes that."""
    if not sys.stdin.isatty():
        return lambda: None
    import termios
    import tty

    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    return lambda: termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _is_ended(seconds: float) -> bool:
    """Wait; say whether a key was pressed that ends the view."""
    if not sys.stdin.isatty():
        time.sleep(seconds)
        return False
    ready, _, _ = select.select([sys.stdin], [], [], seconds)
    return bool(ready) and sys.stdin.read(1) in "qQ\x1b\x03"


def _draw(session: Session, before: Look | None) -> Look | None:
    """Show the service as it is now; return what it is like, for the next time."""
    now = before
    try:
        now = look_at(session)
        lines = frame(session, before, now)
    except StoreUnavailableError as exc:
        lines = [session.output.colored(visible(exc), "error")]
    height = shutil.get_terminal_size().lines
    click.echo(_HOME + "".join(line + _LINE for line in lines[: height - 1]) + _REST, nl=False)
    return now


def frame(session: Session, before: Look | None, now: Look) -> list[str]:
    """Return the lines of one view."""
    output = session.output
    wall, found = datetime.now(timezone.utc), rates(before, now)
    rate = f"{found['']:.1f}/s" if "" in found else "-"
    skips = ", ".join(f"{count} {why}" for why, count in now.counts.skips.items()) or "0"
    return [
        f"service {visible(session.timers.service)}   {output.moment(wall.replace(microsecond=0))}",
        f"waiting {now.waiting}   sent {now.counts.sent} ({rate})   skipped {skips}   "
        f"dead letters {now.dead}",
        "",
        *output.aligned(
            ["instance", "state", "heartbeat", "timers", "sent", "sent/s", "broker"],
            (
                (
                    *(each.id, state_of(session, each, age), f"{span(age)} ago", each.timers),
                    *(each.sent, f"{found[each.id]:.1f}" if each.id in found else "-"),
                    each.broker or "-",
                )
                for each, age in now.instances
            ),
            whole=("instance", "state"),
        ),
        "",
        *output.aligned(
            ["next", "in", "timer", "schedule", "task"],
            (
                (
                    *(output.moment(timer.next_run_at), from_now(timer.next_run_at, wall)),
                    *(named(timer.name), timer.schedule and timer.schedule.describe(), timer.task),
                )
                for timer in now.coming
            ),
            optional=("next", "task"),
            whole=("in",),
        ),
    ]
