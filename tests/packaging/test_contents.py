"""The files hold what they should, and say of themselves what is so."""

from __future__ import annotations

import re
import subprocess
import tarfile
import zipfile
from email import message_from_string
from email.message import Message
from pathlib import Path

import pytest

from celery_dtimer import __version__
from celery_dtimer.errors import EXTRAS
from tests.packaging.conftest import built

ROOT = Path(__file__).parents[2]
#: Folders and files of the repository that the source distribution leaves out.
LEFT_OUT = (".ci/", ".github/workflows/")


def tracked(*places: str) -> set[str]:
    """Return the files that are part of the project, in these places."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *places]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip("this is no clone of the repository")
    return {name for name in done.stdout.split("\n") if name and (ROOT / name).exists()}


def in_wheel() -> set[str]:
    with zipfile.ZipFile(built("wheel")) as file:
        return set(file.namelist())


def in_sdist() -> set[str]:
    with tarfile.open(built("sdist")) as file:
        names = [member.name for member in file.getmembers() if member.isfile()]
    return {name.partition("/")[2] for name in names}


def test_the_wheel_holds_the_package_and_nothing_else() -> None:
    about = f"celery_dtimer-{__version__}.dist-info/"
    package = {name for name in in_wheel() if not name.startswith(about)}
    assert package == tracked("celery_dtimer")
    assert {"celery_dtimer/py.typed", "celery_dtimer/lua/prelude.lua"} <= package
    assert f"{about}licenses/LICENSE" in in_wheel()


def test_the_source_distribution_holds_the_project() -> None:
    project = {name for name in tracked() if not name.startswith(LEFT_OUT)}
    assert in_sdist() == {*project, "PKG-INFO"}
    for place in ("tests/", "docs/", "example_project/", "celery_dtimer/lua/"):
        assert any(name.startswith(place) for name in project)


# ------------------------------------------------------------------ what they say


def metadata() -> Message:
    with zipfile.ZipFile(built("wheel")) as file:
        (name,) = [name for name in file.namelist() if name.endswith("/METADATA")]
        return message_from_string(file.read(name).decode())


def test_both_say_the_same() -> None:
    with tarfile.open(built("sdist")) as file:
        said = file.extractfile(f"celery_dtimer-{__version__}/PKG-INFO")
        assert said is not None
        assert message_from_string(said.read().decode()).items() == metadata().items()


def test_the_extras_are_those_that_errors_name() -> None:
    assert set(metadata().get_all("Provides-Extra", [])) >= set(EXTRAS)


def test_the_description_leads_nowhere_that_is_not_there() -> None:
    text = metadata().get_payload()
    assert isinstance(text, str)
    outside_of_code = re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)
    links = re.findall(r"\]\(([^)]*)\)", outside_of_code)
    assert [link for link in links if not link.startswith("https://")] == []
    assert "docs/redis.md" in text
