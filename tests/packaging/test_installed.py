"""What is installed works where nothing else is."""

from __future__ import annotations

import pytest

from celery_dtimer import __version__
from celery_dtimer.store import scripts
from tests.packaging.conftest import Environment

IMPORTS = """
import pkgutil
from importlib import import_module
import celery_dtimer
from celery_dtimer import *
for found in pkgutil.walk_packages(celery_dtimer.__path__, "celery_dtimer."):
    if not found.name.endswith("__main__"):
        import_module(found.name)
"""


@pytest.mark.parametrize("wanted", ["error", "error::DeprecationWarning"])
def test_every_module_is_imported_without_a_warning(installed: Environment, wanted: str) -> None:
    done = installed.run("python", "-c", IMPORTS, PYTHONWARNINGS=wanted)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_it_is_the_version_that_was_built(installed: Environment) -> None:
    program = (
        "import celery_dtimer; from importlib.metadata import version;"
        "print(celery_dtimer.__version__, version('celery-dtimer'), celery_dtimer.__file__)"
    )
    of_the_code, of_the_package, file = installed.run("python", "-c", program).stdout.split()
    assert of_the_code == of_the_package == __version__
    assert file.startswith(str(installed.folder))


def test_the_scripts_came_along(installed: Environment) -> None:
    program = "from celery_dtimer.store import scripts; print(*scripts().values())"
    assert installed.run("python", "-c", program).stdout.split() == list(scripts().values())


def test_celery_has_the_command(installed: Environment) -> None:
    done = installed.run("celery", "dtimer", "--help", PYTHONWARNINGS="error")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("Usage: celery dtimer ")


def test_celery_beat_finds_the_scheduler(installed: Environment) -> None:
    program = (
        "from celery.apps.beat import Beat; from celery.utils.imports import symbol_by_name\n"
        "from celery.utils.imports import load_extension_class_names as named\n"
        "aliases = dict(named('celery.beat_schedulers'))\n"
        "print(symbol_by_name('dtimer', aliases=aliases).__name__)"
    )
    done = installed.run("python", "-c", program)
    assert (done.stdout, done.stderr) == ("DistributedScheduler\n", "")


def test_what_it_needs_is_there(installed: Environment) -> None:
    done = installed.run("python", "-m", "pip", "check")
    assert done.returncode == 0, done.stdout
