"""docs/cli.md tells the commands that there are, with options that they have."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from celery_dtimer.cli import dtimer
from celery_dtimer.cli.usage import FOUND, UNREACHABLE, WRONG

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "cli.md").read_text()
README = (ROOT / "README.md").read_text()


def commands(group: click.Group = dtimer, prefix: str = "") -> Iterator[tuple[str, click.Command]]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from commands(command, f"{name} ")
        else:
            yield prefix + name, command


COMMANDS = dict(commands())
ROWS = [row for row in GUIDE.splitlines() if row.startswith("| `")]


def rows_of(name: str) -> list[str]:
    return [row for row in ROWS if re.search(rf"`{name}( [^`]*)?`", row.split(" | ")[0])]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_told(name: str) -> None:
    assert len(rows_of(name)) == 1


@pytest.mark.parametrize("name", COMMANDS)
def test_the_options_that_are_told_are_there(name: str) -> None:
    known = {option for param in COMMANDS[name].params for option in param.opts}
    (row,) = rows_of(name)
    told = set(re.findall(r"`(--?[a-z-]+)", row))
    assert told <= known, told - known


def test_no_command_is_told_that_is_not_there() -> None:
    told = {
        name.strip("`").split(" ")[0]
        for row in ROWS
        for name in re.findall(r"`[a-z]+[^`]*`", row.split(" | ")[0])
    }
    assert told == {name.split(" ")[0] for name in COMMANDS}


def test_the_statuses_are_those_of_the_code() -> None:
    told = re.findall(r"^\| (\d) \|", GUIDE, re.MULTILINE)
    assert told == ["0", *map(str, (FOUND, WRONG, UNREACHABLE))]


def test_the_readme_names_commands_that_are_there() -> None:
    told = re.findall(r"^\$ celery -A proj dtimer ([a-z]+)", README, re.MULTILINE)
    assert told
    assert set(told) <= {name.split(" ")[0] for name in COMMANDS} | {"export"}
