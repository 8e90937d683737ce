"""What is said to be needed is what is tried."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from celery_dtimer.errors import EXTRAS

ROOT = Path(__file__).parents[2]
MAKEFILE = (ROOT / "Makefile").read_text()
PROJECT = (ROOT / "pyproject.toml").read_text()


def needed() -> list[str]:
    """Return what the package needs wherever it runs."""
    (found,) = re.findall(r"^dependencies = \[$(.*?)^\]$", PROJECT, re.MULTILINE | re.DOTALL)
    return [each for each in re.findall(r'"(.*)"', found) if ";" not in each]


def floors() -> dict[str, str]:
    """Return the oldest version of each package that is needed."""
    found = [re.fullmatch(r"([\w-]+)(?:\[\w+\])?>=([\d.]+)", each) for each in needed()]
    return {match[1]: match[2] for match in found if match}


def tried(variable: str) -> list[str]:
    """Return the words of a variable of the Makefile."""
    (found,) = re.findall(rf"^{variable} \S?= (.*)$", MAKEFILE, re.MULTILINE)
    return str(found).split()


def test_the_oldest_versions_that_are_tried_are_the_oldest_that_are_accepted() -> None:
    oldest = dict(pin.split("==") for pin in tried("OLDEST"))
    assert oldest.keys() == floors().keys()
    for package, floor in floors().items():
        assert oldest[package].startswith(f"{floor}."), package


def test_no_requirement_has_another_form() -> None:
    assert len(needed()) == len(floors())


def test_the_pythons_that_are_tried_are_those_that_are_named() -> None:
    named = re.findall(
        r'^    "Programming Language :: Python :: (3\.\d+)",$', PROJECT, re.MULTILINE
    )
    assert tried("MATRIX") == named
    assert f'requires-python = ">={named[0]}"' in PROJECT


@pytest.mark.parametrize(("extra", "package"), EXTRAS.items())
def test_each_extra_that_errors_name_brings_its_package(extra: str, package: str) -> None:
    assert re.search(rf'^{extra} = \[.*"{package}>=', PROJECT, re.MULTILINE)
