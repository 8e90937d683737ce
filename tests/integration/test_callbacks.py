"""Callbacks in a real worker, sent by a real scheduler."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import pytest
from celery.contrib.testing.worker import start_worker

from celery_dtimer import CallbackTimer, DistributedTimer
from tests.conftest import MakeApp
from tests.servers import RedisServer
from tests.waiting import wait_until


@pytest.fixture(autouse=True)
def root_logger() -> Iterator[None]:
    """Leave the root logger as it was: a worker sets its level and its handlers."""
    root = logging.getLogger()
    level, handlers = root.level, root.handlers[:]
    yield
    root.setLevel(level)
    root.handlers[:] = handlers


@pytest.fixture
def timers(make_app: MakeApp) -> Iterator[DistributedTimer]:
    made = DistributedTimer(make_app(worker_hijack_root_logger=False))
    yield made
    made.stop()


def test_a_callback_runs_with_its_timer_again_when_it_is_retried_and_after_it_failed(
    timers: DistributedTimer, redis_server: RedisServer
) -> None:
    seen: list[tuple[str, Any, int]] = []
    failed: list[int] = []

    @timers.callback(shared=False)
    def steady(timer: CallbackTimer, kind: str) -> None:
        seen.append((kind, timer, 0))

    @timers.callback("retried", shared=False, autoretry_for=(KeyError,), default_retry_delay=0)
    def once_more(timer: CallbackTimer) -> None:
        seen.append(("retried", timer, len(seen)))
        if [kind for kind, *_ in seen].count("retried") == 1:
            raise KeyError("the first time")

    @timers.callback(shared=False)
    def failing(timer: CallbackTimer) -> None:
        failed.append(timer.run)
        raise ValueError("every time")

    def kinds() -> set[str]:
        return {kind for kind, *_ in seen}

    with start_worker(timers.app, perform_ping_check=False, loglevel="CRITICAL"):
        instance = timers.start()
        id = timers.create_timer("steady", 0.2, steady.s("own argument"))
        timers.create_timer("retried", 3600, "retried")
        timers.create_timer("failing", 0.2, "failing")
        timers.trigger_timer("retried")
        steady.apply_async(["by hand"])
        wait_until(lambda: len(failed) >= 3, "runs after a failure", 15)
        wait_until(lambda: kinds() == {"own argument", "retried", "by hand"}, "all kinds", 15)
        wait_until(lambda: [kind for kind, *_ in seen].count("retried") == 2, "the retry", 15)
        timers.stop()

    assert failed[:3] == [1, 2, 3]
    (by_hand,) = [timer for kind, timer, _ in seen if kind == "by hand"]
    assert by_hand is None
    first, second = [timer for kind, timer, _ in seen if kind == "retried"]
    assert first == second
    assert first.name == "retried"
    timer = next(timer for kind, timer, _ in seen if kind == "own argument")
    assert (timer.id, timer.name, timer.service) == (id, "steady", "orders")
    assert (timer.instance, timer.run) == (instance, 1)
    assert isinstance(timer.scheduled_at, datetime)
    assert timer.scheduled_at.utcoffset() is not None
