"""Services of real beats and workers, and pytest-celery's vocabulary on local processes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import docker
import pytest
import pytest_docker_tools.wrappers.container

from tests.conftest import FreshRedis
from tests.failover.deployment import Deploy, Deployment
from tests.failover.process_engine import ProcessEngine
from tests.servers import RedisServer


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what lies in this folder; of several processes one runs all of a file."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker("failover")
            item.add_marker(pytest.mark.xdist_group(f"failover {item.path.stem}"))


@pytest.fixture
def deploy(
    request: pytest.FixtureRequest,
    redis_server: RedisServer,
    fresh_redis: FreshRedis,
    prefix: str,
    tmp_path: Path,
) -> Iterator[Deploy]:
    """Set up a service; afterwards its stored state must be consistent, and all of it ends.

    It comes after ``fresh_redis``, so that servers of the test's own outlive the last check.
    """
    deployments: list[Deployment] = []

    def set_up(
        *, broker: RedisServer = redis_server, store: RedisServer = redis_server, **conf: Any
    ) -> Deployment:
        deployments.append(Deployment(tmp_path, prefix, broker=broker, store=store, **conf))
        return deployments[-1]

    yield set_up
    try:
        for deployment in deployments:
            deployment.attach_logs(request.node)
            deployment.assert_consistent()
    finally:
        for deployment in deployments:
            deployment.close()


@pytest.fixture
def deployment(deploy: Deploy) -> Deployment:
    """A service whose timers and messages share the run's server."""
    return deploy()


@pytest.fixture(scope="session")
def docker_client(server_program: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Local processes, or with ``DTIMER_TEST_ENGINE=docker`` the engine that answers."""
    # Published ports are on the loopback, also where the tests themselves run in a container.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pytest_docker_tools.wrappers.container, "tests_inside_container", bool)
        if os.environ.get("DTIMER_TEST_ENGINE") == "docker":
            yield docker.from_env()
            return
        engine = ProcessEngine(server_program, tmp_path_factory.mktemp("containers"))
        yield engine
        engine.close()
