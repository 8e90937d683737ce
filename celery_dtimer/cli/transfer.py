"""``export`` and ``import``: timers as JSON lines, from one service or Redis to another."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

import click

from celery_dtimer.cli.commands import Command, Session, pass_session
from celery_dtimer.cli.documents import plain
from celery_dtimer.cli.progress import Progress
from celery_dtimer.errors import InvalidTimerError, shown
from celery_dtimer.transfer import ImportResult, OnConflict, dumps_row

_STDIO = "-"


@click.command("export", cls=Command)
@click.argument("file", default=_STDIO, type=click.Path(dir_okay=False, allow_dash=True))
@click.option("--name", metavar="PATTERN", help="Only timers whose name matches; then no calls.")
@click.option("--no-pending", is_flag=True, help="Without the calls that wait in Redis.")
@pass_session
def export(session: Session, file: str, name: str | None, no_pending: bool) -> None:
    """Write timers with their last-run state as JSON lines, to FILE or to stdout.

    They hold arguments, and whatever secrets are in these: a new FILE is readable for its owner
    alone. With --json stdout gets one JSON array in place of the lines.
    """
    rows = session.timers.export_timers(name, include_pending=not no_pending)
    with Progress("exported", session.timers.pending_count()) as on_progress:
        told = _counted(rows, on_progress)
        if file != _STDIO:
            count = _write_file(Path(file), told)
        elif session.output.as_json:
            session.output.document(list(told))
            return
        else:
            for row in told:
                session.output.row(dumps_row(row))
            return
    exported = count - 1  # the first row is the header
    session.output.result(
        {"file": file, "exported": exported}, f"{exported} timers and calls written to {file}"
    )


def _counted(rows: Iterable[Any], on_progress: Any) -> Iterator[Any]:
    for count, row in enumerate(rows):
        yield row
        on_progress(count)


def _write_file(path: Path, rows: Iterable[Any]) -> int:
    """Write rows to a file, which is there as a whole or not at all; return how many."""
    written = 0
    try:
        with _replacing(path) as file:
            for row in rows:
                file.write(dumps_row(row) + "\n")
                written += 1
    except OSError as exc:
        raise click.FileError(str(path), exc.strerror) from exc
    return written


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[IO[str]]:
    """Open a file that takes the place of another one once it is whole."""
    if path.exists() and not path.is_file():  # a pipe, say
        with path.open("w", encoding="utf-8") as file:
            yield file
        return
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", text=True)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            yield file
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


@click.command("import", cls=Command)
@click.argument(
    "file", default=_STDIO, type=click.Path(exists=True, dir_okay=False, allow_dash=True)
)
@click.option(
    "--on-conflict",
    type=click.Choice(["replace", "keep", "fail"]),
    default="replace",
    show_default=True,
    help="When a timer of the name is here that is another one.",
)
@pass_session
def import_(session: Session, file: str, on_conflict: OnConflict) -> None:
    """Store exported timers, from FILE or from stdin; they go on where they were.

    Importing the same again changes nothing. All of it is checked before the first is stored.
    """
    try:
        lines = _lines(file)
        with Progress("imported", len(lines) - 1) as on_progress:
            result = session.new_timers.import_timers(
                lines, on_conflict=on_conflict, on_progress=on_progress
            )
    except UnicodeDecodeError as exc:
        raise InvalidTimerError(f"{shown(file)} is no export: {exc}") from exc
    _say_result(session, result)


def _lines(file: str) -> list[str]:
    if file == _STDIO:
        return sys.stdin.read().split("\n")
    return Path(file).read_text(encoding="utf-8").split("\n")


def _say_result(session: Session, result: ImportResult) -> None:
    skipped = [plain(each) for each in result.skipped]
    if not session.output.as_json:
        for each in result.skipped:
            session.output.note(f"line {each.line}: {shown(each.name)} is left out: {each.reason}")
    session.output.result(
        {**plain(result), "skipped": skipped},
        f"{result.created} created, {result.updated} updated, {result.unchanged} unchanged, "
        f"{len(skipped)} left out",
    )
