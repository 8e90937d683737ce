"""Environments in which the wheel and the source distribution are installed, and nothing else.

``DTIMER_DIST`` names the folder that holds both; without it nothing here is collected.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

DIST = os.environ.get("DTIMER_DIST")

if not DIST:
    collect_ignore_glob = ["test_*.py"]

#: What is installed into the environments, by the ending of its file, with which Python.
KINDS = {"wheel": (".whl", "3.10"), "sdist": (".tar.gz", "3.13")}


@dataclass(frozen=True)
class Environment:
    """A virtual environment that holds what was built."""

    folder: Path

    @property
    def python(self) -> Path:
        """Its Python."""
        return self.folder / "bin" / "python"

    def run(self, *command: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run one of its programs, outside of the repository."""
        program, *arguments = map(str, command)
        return subprocess.run(
            [str(self.folder / "bin" / program), *arguments],
            cwd=self.folder,
            env={**clean(), **variables},
            capture_output=True,
            text=True,
            check=False,
        )


def clean() -> dict[str, str]:
    """Return this process's environment without what would change a Python."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}


def python_of(version: str) -> str:
    """Return a Python of this version, or the one that runs here when there is none."""
    of_pyenv = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    found = of_pyenv[-1] if of_pyenv else shutil.which(f"python{version}")
    return str(found or sys.executable)


def built(kind: str) -> Path:
    """Return the file of a kind; there is one."""
    (found,) = Path(str(DIST)).resolve().glob(f"*{KINDS[kind][0]}")
    return found


def make(kind: str, folder: Path) -> Environment:
    """Make a virtual environment and install a file into it."""
    subprocess.run([python_of(KINDS[kind][1]), "-m", "venv", folder], env=clean(), check=True)
    environment = Environment(folder)
    done = environment.run("python", "-m", "pip", "install", "--quiet", built(kind))
    assert done.returncode == 0, done.stderr
    return environment


@pytest.fixture(scope="session")
def environments(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Environment]:
    """The environments, by what is installed in them; made at once, for that mostly waits."""
    folders = [tmp_path_factory.mktemp(kind) for kind in KINDS]
    with ThreadPoolExecutor() as threads:
        return dict(zip(KINDS, threads.map(make, KINDS, folders), strict=True))


@pytest.fixture(params=list(KINDS))
def installed(request: pytest.FixtureRequest, environments: dict[str, Environment]) -> Environment:
    """One of the environments after the other."""
    return environments[request.param]
