"""A user's project is checked against what is installed: ``py.typed`` is what makes that work."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.packaging.conftest import Environment, clean

PROJECT = Path(__file__).parent / "typed_user"
MISTAKES = [
    number
    for number, line in enumerate((PROJECT / "wrong.py").read_text().splitlines(), 1)
    if line.endswith("# mistake")
]


@pytest.fixture(scope="module")
def user(environments: dict[str, Environment]) -> Environment:
    """An environment in which the wheel is installed, and Celery's types."""
    environment = environments["wheel"]
    done = environment.run("python", "-m", "pip", "install", "--quiet", "celery-types")
    assert done.returncode == 0, done.stderr
    return environment


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """The user's project, far from the repository."""
    return Path(shutil.copytree(PROJECT, tmp_path / "project"))


OPTIONS = {
    "mypy": ["--strict", f"--cache-dir={os.devnull}", "--python-executable"],
    "pyright": ["--pythonpath"],  # that it is to be strict stands in the project's file
}


def checked(checker: str, user: Environment, project: Path, path: str) -> tuple[int, str]:
    """Return a type checker's exit status and what it has to say."""
    done = subprocess.run(
        [sys.executable, "-m", checker, *OPTIONS[checker], str(user.python), path],
        cwd=project,
        env=clean(),
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("checker", OPTIONS)
def test_a_program_that_uses_all_of_it_is_accepted(
    checker: str, user: Environment, project: Path
) -> None:
    status, said = checked(checker, user, project, "shop")
    assert status == 0, said
    assert "error:" not in said


@pytest.mark.parametrize("checker", OPTIONS)
def test_mistakes_are_found(checker: str, user: Environment, project: Path) -> None:
    status, said = checked(checker, user, project, "wrong.py")
    assert status == 1, said
    found = re.findall(r"wrong\.py:(\d+)(?::\d+)?(?: -|:) error", said)
    assert sorted(set(map(int, found))) == MISTAKES, said
