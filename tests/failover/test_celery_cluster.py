"""Beats, a broker and a worker as pytest-celery describes them, on containers or processes."""

from __future__ import annotations

import pytest
from celery import Celery
from pytest_celery import CeleryTestSetup, CeleryWorkerContainer
from pytest_celery.api.broker import CeleryTestBroker

from celery_dtimer import DistributedTimer
from tests.conftest import QUICK
from tests.failover.components import CeleryBeatCluster, CeleryBeatContainer, beat_container
from tests.waiting import wait_until

TASK = "pytest_celery.vendors.worker.tasks.identity"

beat_1, beat_2, beat_3 = beat_container(), beat_container(), beat_container()


@pytest.fixture
def celery_broker(celery_redis_broker: CeleryTestBroker) -> CeleryTestBroker:
    """Redis alone: the stock matrix has RabbitMQ, and an order that changes from run to run."""
    return celery_redis_broker


@pytest.fixture
def celery_backend_cluster() -> None:
    """No results are asked for."""


@pytest.fixture
def default_worker_app(celery_setup_app: Celery) -> Celery:
    celery_setup_app.conf.update(QUICK)
    celery_setup_app.conf.dtimer_service = "orders"
    celery_setup_app.conf.beat_schedule = {
        f"tick-{n}": {"task": TASK, "schedule": 1.0, "args": [f"tick-{n}"]} for n in range(6)
    }
    return celery_setup_app


@pytest.fixture
def default_worker_command(
    default_worker_container_cls: type[CeleryWorkerContainer],
) -> list[str]:
    return default_worker_container_cls.command("--without-mingle", "--without-gossip", "-c1")


@pytest.fixture
def celery_beats(
    celery_setup: CeleryTestSetup,
    beat_1: CeleryBeatContainer,
    beat_2: CeleryBeatContainer,
    beat_3: CeleryBeatContainer,
) -> CeleryBeatCluster:
    """Three beats beside the setup's worker."""
    beats = CeleryBeatCluster(beat_1, beat_2, beat_3)
    assert beats.ready()
    return beats


def test_beats_take_over_from_a_killed_one_and_give_it_back_its_share(
    celery_setup: CeleryTestSetup, celery_beats: CeleryBeatCluster
) -> None:
    timers = DistributedTimer(celery_setup.app)

    def owners() -> set[str | None]:
        return {timer.instance for timer in timers.get_timers(task=TASK)}

    def runs() -> dict[str, int]:
        return {timer.name: timer.total_run_count for timer in timers.get_timers(task=TASK)}

    wait_until(lambda: len(owners()) == 3, "three owners", 10)
    celery_setup.worker.assert_log_exists("succeeded in")
    victim, *others = celery_beats

    victim.kill()
    assert victim.container.status == "exited"
    wait_until(lambda: len(owners()) == 2, "the others to take over", 5)
    survivors, before = owners(), runs()
    wait_until(
        lambda: all(count > before[name] for name, count in runs().items()),
        "all timers to run again",
    )
    victim.restart()
    wait_until(lambda: len(owners()) == 3, "three owners again", 10)

    assert survivors < owners()
    for beat in others:
        assert beat.container.status == "running"
        beat.assert_log_does_not_exist("Traceback")
    assert not timers.check_consistency()
