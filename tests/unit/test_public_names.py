"""What the package exports: all of it documented and typed, and silent on import."""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import pkgutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

import celery_dtimer
from celery_dtimer import DistributedTimerError, errors
from celery_dtimer.errors import EXTRAS

MODULES = [
    importlib.import_module(f"celery_dtimer.{found.name}")
    for found in pkgutil.iter_modules(celery_dtimer.__path__)
    if found.name != "__main__"
]


def imported_names() -> dict[str, str]:
    """Return what type checkers see the package import, and the modules that it comes from."""
    tree = ast.parse(inspect.getsource(celery_dtimer))
    statements = [found for found in ast.walk(tree) if isinstance(found, ast.ImportFrom)]
    ours = [found for found in statements if (found.module or "").startswith("celery_dtimer.")]
    return {name.name: str(found.module) for found in ours for name in found.names}


def test_all_is_sorted_and_complete() -> None:
    assert celery_dtimer.__all__ == sorted(celery_dtimer.__all__)
    assert set(imported_names()) == set(celery_dtimer.__all__)


@pytest.mark.parametrize(("name", "module"), imported_names().items())
def test_each_name_is_what_type_checkers_take_it_for(name: str, module: str) -> None:
    assert getattr(celery_dtimer, name) is getattr(sys.modules[module], name)
    assert name in dir(celery_dtimer)


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'DistributedTimers'"):
        celery_dtimer.DistributedTimers  # noqa: B018


def test_every_error_is_exported() -> None:
    names = {
        name
        for name, value in vars(errors).items()
        if inspect.isclass(value) and issubclass(value, DistributedTimerError)
    }
    assert names <= set(celery_dtimer.__all__)


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


def run(program: str, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a program with this Python, in a process of its own."""
    return subprocess.run(
        [sys.executable, *options, "-c", program],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


EVERY_MODULE = "\n".join(f"import {module.__name__}" for module in MODULES)


@pytest.mark.parametrize("wanted", ["error", "error::DeprecationWarning"])
@pytest.mark.parametrize("how", ["option", "environment"])
def test_the_import_is_silent(wanted: str, how: str) -> None:
    program = f"from celery_dtimer import *\n{EVERY_MODULE}"
    done = run(program, "-W", wanted) if how == "option" else run(program, PYTHONWARNINGS=wanted)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def loaded(program: str, *modules: str) -> list[str]:
    """Return which of some modules, with what is below them, a program loads."""
    telling = f"{program}\nimport sys\nprint(*sys.modules)"
    done = run(telling, "-W", "error")
    assert (done.returncode, done.stderr) == (0, "")
    names = done.stdout.split()
    return [
        each
        for each in names
        if each in modules or each.startswith(tuple(f"{m}." for m in modules))
    ]


def test_the_import_brings_no_extras() -> None:
    program = "from celery_dtimer import *"
    assert not loaded(program, "celery_dtimer.embedded", "rich", *EXTRAS.values())


def test_what_each_celery_command_imports_is_little() -> None:
    here = loaded("import celery_dtimer.cli", "celery_dtimer", "redis", "asyncio", "dateutil")
    assert {name for name in here if not name.startswith("celery_dtimer.cli")} <= {
        "celery_dtimer",
        "celery_dtimer.errors",
        "celery_dtimer.version",
    }


def test_celery_finds_the_scheduler_by_its_short_name() -> None:
    (entry,) = [
        found
        for found in metadata.entry_points(group="celery.beat_schedulers")
        if found.name == "dtimer"
    ]
    assert entry.load() is celery_dtimer.DistributedScheduler


def test_the_package_says_that_it_is_typed() -> None:
    assert (Path(celery_dtimer.__file__).parent / "py.typed").exists()
