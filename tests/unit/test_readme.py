"""The README is true: its programs run, and its tables say what the code says."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from celery import current_app
from celery._state import _set_current_app

from celery_dtimer import DistributedScheduler, DistributedTimer
from celery_dtimer.declarations import declared
from celery_dtimer.settings import defaults
from celery_dtimer.store import Keys
from tests.conftest import app_settings
from tests.servers import RedisServer

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()

BLOCK = re.compile(
    r"(?:<!-- continues (?P<continues>\S+) -->\n)?```python\n(?P<code>.*?)```", re.DOTALL
)
BLOCKS = [(match["continues"], match["code"]) for match in BLOCK.finditer(README)]


def file_of(code: str) -> str:
    """Return the name of the file that a block is, from its first line."""
    return code.partition("\n")[0].removeprefix("# ")


PROGRAMS = {file_of(code): code for continues, code in BLOCKS if continues is None}
CONTINUATIONS = [(continues, code) for continues, code in BLOCKS if continues]


def table(header: str) -> list[list[str]]:
    """Return the cells of the rows under a table's header line."""
    rows = README.partition(header + "\n")[2].splitlines()[1:]
    end = next(i for i, row in enumerate(rows) if not row.startswith("|"))
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows[:end]]


# ------------------------------------------------------------------ programs


@pytest.fixture
def shop(redis_server: RedisServer, prefix: str) -> Iterator[ModuleType]:
    """The README's first program as a module, with the test's own server and keys."""
    before = current_app._get_current_object()
    module = ModuleType("shop")
    sys.modules["shop"] = module
    code = PROGRAMS["shop.py"].replace("redis://localhost:6379/0", redis_server.url)
    exec(compile(code, "README.md", "exec"), vars(module))  # noqa: S102 - the README's own text
    settings = app_settings(redis_server.url, prefix)
    settings.pop("dtimer_service")
    module.app.conf.update(settings)
    yield module
    module.app.close()
    del sys.modules["shop"]
    _set_current_app(before)


def test_every_block_is_a_program_or_continues_one() -> None:
    assert PROGRAMS
    assert all(name.endswith(".py") for name in PROGRAMS)
    assert {continues for continues, _ in CONTINUATIONS} <= PROGRAMS.keys()


def test_the_first_program_declares_what_it_says(shop: Any) -> None:
    assert shop.app.tasks.keys() >= {"shop.send_report", "shop.clean_up"}
    assert declared(shop.app) == {"clean_up": {"task": "shop.clean_up", "schedule": 60}}
    assert shop.app.conf.beat_scheduler == "celery_dtimer:DistributedScheduler"
    assert DistributedScheduler(shop.app, lazy=True).settings.service == "shop"


def test_what_continues_a_program_runs_too(shop: Any) -> None:
    for name, code in CONTINUATIONS:
        assert name == "shop.py"
        exec(compile(code, "README.md", "exec"), vars(shop))  # noqa: S102 - the README's own text
    timers: DistributedTimer = shop.timers
    assert {timer.name for timer in timers.get_timers()} >= {"every-10-s", "nightly", "weekly"}
    assert timers.get_timer("nightly").args == ["nightly"]
    assert timers.get_timer("nightly").next_run_at is not None
    assert timers.get_timer("weekly").options == {"queue": "reports"}
    assert len(timers.get_timers(name="customer-*")) == 1000
    assert not timers.check_consistency()


def test_the_callbacks_run_as_the_program_says(
    shop: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    header = {
        "id": "x",
        "name": "nightly",
        "service": "shop",
        "instance": "i",
        "scheduled_at": "2026-01-01T03:00:00.000+00:00",
        "run": 4,
    }
    shop.send_report.apply(kwargs={"kind": "weekly"}, headers={"dtimer": header}).get()
    assert capsys.readouterr().out.startswith("weekly report, run 4 of nightly, due at 2026-01-01")


# ------------------------------------------------------------------ commands

CONSOLE = "\n".join(re.findall(r"```console\n(.*?)```", README, re.DOTALL))


def test_the_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    used = set(re.findall(r"`make ([a-z]+)`|\$ make ([a-z]+)", README))
    assert used
    assert {name for pair in used for name in pair if name} <= targets


def test_the_console_blocks_start_the_program() -> None:
    apps = re.findall(r"celery -A (\w+) (?:worker|beat)", CONSOLE)
    assert {f"{name}.py" for name in apps} <= PROGRAMS.keys()
    assert len(apps) == 2


def test_the_files_that_are_linked_exist() -> None:
    links = re.findall(r"\]\((?!http)([^)#]+)\)", README)
    assert links
    missing = [link for link in links if not (ROOT / link).exists()]
    assert not missing


def test_the_extras_exist() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    for extra in re.findall(r"celery-dtimer\[(\w+)\]", README):
        assert re.search(rf"^{extra} = \[", project, re.MULTILINE)


# ------------------------------------------------------------------ tables

_IN_WORDS = {
    "dtimer_redis_url": "the broker's, if it is Redis",
    "dtimer_service": "the app's main name",
    "dtimer_keep_finished": "7 days",
}


def test_the_settings_table_is_what_the_code_reads() -> None:
    rows = table("| setting | default | |")
    assert [name.strip("`") for name, *_ in rows] == list(defaults())
    for name, default, _ in rows:
        key = name.strip("`")
        in_code = repr(defaults()[key]).replace("'", '"')
        assert default == _IN_WORDS.get(key, f"`{in_code}`"), key
    assert defaults()["dtimer_keep_finished"] == timedelta(days=7)
    assert defaults()["dtimer_redis_url"] is defaults()["dtimer_service"] is None


METHODS = dict(
    inspect.getmembers(
        DistributedTimer, lambda member: inspect.isfunction(member) and member.__name__[0] != "_"
    )
)


def test_the_methods_table_lists_every_public_method() -> None:
    cells = [cell for cell, *_ in table("| method | |")]
    listed = [name for cell in cells for name in re.findall(r"`(\w+)", cell)]
    assert sorted(listed) == sorted(METHODS)


def test_the_methods_table_names_real_parameters() -> None:
    for cell, *_ in table("| method | |"):
        for name, arguments in re.findall(r"`(\w+)\(([^`]*)\)`", cell):
            parameters = inspect.signature(METHODS[name]).parameters
            has_more = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
            for argument in re.findall(r"\**(\w+)(?:=[^,]*)?", re.sub(r"=[^,]*", "", arguments)):
                known = argument in parameters or argument in ("list", "of", "dicts")
                assert known or (has_more and argument == "changes"), (name, argument)


def test_the_structures_table_is_what_keys_makes() -> None:
    keys = Keys("<service>")
    rows = {name.strip("`"): kind for name, kind, _ in table("| key | type | holds |")}
    documented = {
        line.split()[0].strip("`"): line.split()[1]
        for line in (Keys.__doc__ or "").splitlines()
        if line.strip().startswith("``")
    }
    assert len(rows) == 5
    tag = keys("x").removeprefix("x:")
    for key, kind in rows.items():
        what, _, rest = key.partition(":")
        assert rest.startswith("{<service>}"), key
        has_id = rest.removeprefix("{<service>}")
        pattern = f"{what}:{{s}}"
        (found,) = [name for name in documented if name.startswith(pattern)]
        assert documented[found] == kind
        assert bool(has_id) == (found != pattern)
    assert tag == "{%3Cservice%3E}"
