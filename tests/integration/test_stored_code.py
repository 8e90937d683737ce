"""What is stored is data: nothing of it is unpickled, evaluated or imported, by anybody here."""

from __future__ import annotations

import ast
import base64
import json
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kombu.serialization import registry  # type: ignore[attr-defined]

import celery_dtimer
from celery_dtimer import DistributedTimer
from celery_dtimer.model import Definition, countdown_id
from celery_dtimer.schedules import Interval
from celery_dtimer.worker import _is_retried
from tests.conftest import MakeApp, ReadQueue
from tests.integration.conftest import StartTimers
from tests.servers import RedisServer
from tests.waiting import wait_until

SOURCES = sorted(Path(celery_dtimer.__file__).parent.rglob("*.py"))
LOADERS = {"pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "yaml", "runpy", "code"}
EVALUATES = {"eval", "exec", "compile", "__import__", "import_module", "symbol_by_name"}
EXPECTED = {
    ("countdowns.py", "symbol_by_name"),  # of what the app's own configuration names
    ("connections.py", "eval"),  # Redis' EVAL, of a script of this package
    ("__init__.py", "import_module"),  # of the package's own, by a table in it,
    ("usage.py", "import_module"),  # as are its commands
}


# ------------------------------------------------------------------ in the source


def called(node: ast.Call) -> str:
    """Return the name of what is called."""
    return getattr(node.func, "id", getattr(node.func, "attr", ""))


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_no_module_loads_code_from_data(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            assert not LOADERS & {each.name.partition(".")[0] for each in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert (node.module or "").partition(".")[0] not in LOADERS
        elif isinstance(node, ast.Call) and called(node) in EVALUATES - {"compile"}:
            assert (path.name, called(node)) in EXPECTED


def test_what_decodes_a_body_is_json_alone() -> None:
    """Kombu's `loads`, which takes any content type, is called nowhere."""
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module == "kombu.serialization":
                assert {each.name for each in node.names} <= {"dumps", "registry"}
            if isinstance(node, ast.ImportFrom) and node.module == "kombu.compression":
                assert "decompress" not in {each.name for each in node.names}


# ------------------------------------------------------------------ in a beat


class Bomb:
    """Leaves a mark when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self._mark,)


@pytest.fixture
def poisoned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A module that must not be imported: its import leaves a mark."""
    mark = tmp_path / "imported"
    (tmp_path / "poisoned.py").write_text(
        f"from pathlib import Path\nPath({str(mark)!r}).touch()\n"
        "class Schedule: pass\nclass Error(Exception): pass\ndef task(): pass\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "poisoned"
    assert "poisoned" not in sys.modules
    assert not mark.exists()


def test_the_bomb_works(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(Bomb(tmp_path / "mark")))  # noqa: S301 - to see that it would
    assert (tmp_path / "mark").exists()


def test_a_stored_pickle_is_sent_or_set_aside_and_never_loaded(
    make_app: MakeApp,
    redis_server: RedisServer,
    start_timers: StartTimers,
    tmp_path: Path,
    poisoned: str,
) -> None:
    app, client = make_app(dtimer_eta_threshold=1), redis_server.client
    mark, keys = tmp_path / "mark", DistributedTimer(app).store.base.keys
    bomb = pickle.dumps(Bomb(mark))
    data = base64.b64encode(bomb).decode()
    timers = start_timers(app)
    # As it is sent by a call, as JSON's typed values, and instead of everything.
    messages: list[dict[str, Any]] = [
        {"data": data, "type": "application/x-python-serialize", "encoding": "binary"},
        {"data": data, "type": "application/data", "encoding": "binary", "chord": data},
        {"text": json.dumps([{"__type__": "bytes", "__value__": data}])},
    ]
    for place, message in enumerate(messages):
        message["q"] = [app.conf.task_default_queue]
        definition = Definition(f"id{place}", "tasks.record", Interval(1000), message=message)
        timers.store.hold(definition, delay_ms=0 if place < 2 else 10**7)
    victim = timers.create_timer("victim", 0.3, "tasks.record")
    client.set(keys("timer_definition", victim), bomb)
    client.hset(keys("timer", victim), "reason", bomb)
    client.zadd(keys("dead_timers"), {"letter": 1})
    client.hset(
        keys("dead_timer", "letter"), mapping={"call": bomb, "options": bomb, "error": bomb}
    )

    wait_until(lambda: timers.get_timer(victim).status == "broken", "the victim to be set aside")
    queue = app.conf.task_default_queue
    wait_until(lambda: client.llen(queue) >= 2, "the pickled calls to be sent as they are")
    timers.get_pending()
    timers.get_dead_letters()
    timers.get_runs()
    timers.cancel("id2")
    assert not mark.exists()
    sent = [json.loads(text) for text in client.lrange(queue, 0, -1)]
    assert all(base64.b64decode(message["body"]) == bomb for message in sent)
    assert countdown_id("id2") not in timers.store.timer_ids()


def test_names_of_code_are_not_imported(
    make_app: MakeApp,
    redis_server: RedisServer,
    read_queue: ReadQueue,
    start_timers: StartTimers,
    poisoned: str,
) -> None:
    app, client = make_app(), redis_server.client
    timers = DistributedTimer(app)
    keys, reader = timers.store.base.keys, read_queue(app)
    changes: dict[str, dict[str, Any]] = {
        "schedule": {
            "schedule": {"custom": f"{poisoned}.Schedule", "repr": f"{poisoned}.Schedule()"}
        },
        "exception": {"options": {"autoretry_for": [f"{poisoned}.Error"]}},
        "task": {"task": f"{poisoned}.task"},
        "typed": {"args": [{"__type__": f"{poisoned}.Error", "__value__": "x"}]},
        "serializer": {"options": {"serializer": poisoned, "compression": poisoned}},
        "router": {"options": {"router": f"{poisoned}.task", "producer": poisoned}},
        "code bound": {"code_bound": True, "schedule": {"custom": f"{poisoned}.Schedule"}},
    }
    for name, change in changes.items():
        id = timers.create_timer(name, 0.3, "tasks.record")
        blob = json.loads(client.get(keys("timer_definition", id)) or "")
        client.set(keys("timer_definition", id), json.dumps({**blob, **change}))
    timers.create_timer("good", 0.3, "tasks.record")
    start_timers(app)
    wait_until(lambda: len(reader.ledger.slots("good")) >= 4, "the good one to run on")
    assert {"exception", "task"} <= reader.ledger.names()  # as names, for workers to know or not
    assert timers.get_timer("schedule").status == "broken"  # no code is there to ask
    assert "schedule" not in reader.ledger.names()
    assert not _is_retried(ValueError(), {"autoretry_for": [f"{poisoned}.Error"]})


def test_kombu_itself_would_not_unpickle_here() -> None:
    assert "application/x-python-serialize" in registry._disabled_content_types
