"""An outage of thousands of tries takes no memory, and one line in the log."""

from __future__ import annotations

import gc
import itertools
import logging
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest

from celery_dtimer.declarations import Declaration
from celery_dtimer.membership import Membership
from celery_dtimer.model import Lease
from celery_dtimer.scheduler import Runtime
from celery_dtimer.settings import Settings
from tests.conftest import MakeApp
from tests.servers import free_port

TRIES = 1500
GROWTH = 40_000  # bytes after thousands of tries: a dozen for each would be more than that


def grows_by(act: Callable[[], Any]) -> int:
    """Return by how many bytes memory grows while an act is repeated, once it is warm."""
    for _ in range(200):
        act()
    gc.collect()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for _ in range(TRIES):
            act()
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return after - before


@pytest.fixture
def cut_off(make_app: MakeApp, monkeypatch: pytest.MonkeyPatch) -> Runtime:
    """An instance that counts on its lease, and whose Redis and broker refuse connections."""
    url = f"redis://127.0.0.1:{free_port()}/0"
    app = make_app(broker_url=url, dtimer_redis_url=url)
    runtime = Runtime(app, Settings.from_app(app), Declaration("orders"), "a", max_interval=1)
    lease = Lease("a", 1, float("inf"))
    monkeypatch.setattr(Membership, "lease", property(lambda _: lease))
    seconds = itertools.count(step=100)
    monkeypatch.setattr(runtime._loop, "_clock", lambda: float(next(seconds)))
    return runtime


def test_the_loop(cut_off: Runtime, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="celery_dtimer"):
        assert grows_by(cut_off._loop.step) < GROWTH
    assert len(caplog.records) <= 2, caplog.text  # its Redis, and its broker
    assert cut_off._loop._store_failures > TRIES, "each was a try"


def test_the_membership(cut_off: Runtime, caplog: pytest.LogCaptureFixture) -> None:
    membership, failures = cut_off.membership, itertools.count()

    def step() -> None:
        membership.report_progress()
        try:
            membership.step()
        except Exception:
            next(failures)

    assert grows_by(step) < GROWTH
    assert next(failures) == TRIES + 200


def test_the_listener(cut_off: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    store, failures = cut_off._listening_store, itertools.count()

    def listen() -> None:
        try:
            store.listen("a", lambda: None, cut_off._stopped)
        except Exception:
            next(failures)

    assert grows_by(listen) < GROWTH
    assert next(failures) == TRIES + 200
