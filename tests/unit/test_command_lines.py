"""The check of command lines sees what is wrong with one."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.command_lines import problem

ROOT = Path(__file__).parents[2]
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "example_project" / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
]


def lines_of(document: Path) -> list[str]:
    """Return the commands that a document names, wherever they stand."""
    found = re.findall(r"\bcelery -A \w+(?: +[\w@%$-][\w@%$./:=-]*)+", document.read_text())
    return sorted({line.rstrip(".:") for line in found})


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("celery -A shop beat -S dtimer", None),
        ("celery -A shop worker --concurrency=2 -l INFO", None),
        ("celery --app shop inspect ping -d celery@host", None),
        ("celery -A shop dtimer", "dtimer needs a command"),
        ("celery -A shop dtimers", "celery has no command dtimers"),
        ("celery -A shop beat --schedulr x", "beat has no option --schedulr"),
    ],
)
def test_what_is_wrong_with_a_command_line(line: str, expected: str | None) -> None:
    assert problem(shlex.split(line)) == expected


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_the_commands_in_documents_exist(document: Path) -> None:
    problems = {line: problem(shlex.split(line)) for line in lines_of(document)}
    assert {line: each for line, each in problems.items() if each} == {}
