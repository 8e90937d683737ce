"""Command lines in documents and files are checked against the commands that there are."""

from __future__ import annotations

from collections.abc import Sequence

import click
from celery.bin.celery import celery


def problem(words: Sequence[str]) -> str | None:
    """Return what is wrong with a command line that begins with ``celery``, None for nothing.

    Options and subcommands are looked for; values are not.
    """
    command: click.Command = celery
    left = list(words[1:])
    options = options_of(command)
    while left:
        word = left.pop(0).partition("=")[0]
        if word.startswith("-"):
            if word not in options:
                return f"{command.name} has no option {word}"
            if not options[word] and left and not left[0].startswith("-"):
                left.pop(0)
        elif isinstance(command, click.Group):
            found = command.get_command(click.Context(command), word)
            if found is None:
                return f"{command.name} has no command {word}"
            command = found
            options |= options_of(command)
    return f"{command.name} needs a command" if isinstance(command, click.Group) else None


def options_of(command: click.Command) -> dict[str, bool]:
    """Return the names of a command's options, and whether they are flags."""
    found = [each for each in command.params if isinstance(each, click.Option)]
    return {name: each.is_flag for each in found for name in (*each.opts, *each.secondary_opts)}
