"""The errors: one family, drawn in the module's docstring, each a sentence fit to be shown."""

from __future__ import annotations

import inspect

import pytest
from celery.exceptions import ImproperlyConfigured

from celery_dtimer import errors
from celery_dtimer.errors import DistributedTimerError, invalid, shown

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
