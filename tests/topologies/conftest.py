"""Sentinels, clusters and TLS for the tests, with services on them."""

from __future__ import annotations

import os
import shutil
import subprocess
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
from celery import Celery

from celery_dtimer.settings import Settings
from celery_dtimer.store import Store
from tests.conftest import QUICK
from tests.failover.deployment import Deployment
from tests.servers import free_port
from tests.topologies.servers import Certificates, Cluster, Sentinels

MakeSentinels = Callable[..., Sentinels]
MakeCluster = Callable[..., Cluster]
MakeStore = Callable[..., Store]
DeployOn = Callable[..., Deployment]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what lies in this folder; of several processes one runs all of a file."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker("failover")
            item.add_marker(pytest.mark.xdist_group(f"topologies {item.path.stem}"))


def _lacking(what: str) -> NoReturn:
    """Skip here, and fail in CI."""
    if os.environ.get("CI"):
        pytest.fail(what)
    pytest.skip(what)


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """An authority, a server's certificate and a client's."""
    if shutil.which("openssl") is None:
        _lacking("openssl is missing, which makes the certificates")
    return Certificates(tmp_path_factory.mktemp("tls") / "certificates")


@pytest.fixture(scope="session")
def tls_program(server_program: str) -> str:
    """A server program that was built with TLS: the tests' own, or the one on the PATH."""
    for program in (server_program, shutil.which("redis-server")):
        if program is not None and _knows_tls(program):
            return program
    _lacking("no server was built with TLS")


def _knows_tls(program: str) -> bool:
    """Say whether a program misses a certificate: whichever does not know TLS misses that."""
    argv = [program, "--port", "0", "--tls-port", str(free_port())]
    told = subprocess.run(argv, capture_output=True, text=True, timeout=10)
    return "No tls-cert-file configured" in told.stdout


@pytest.fixture
def make_sentinels(server_program: str, tmp_path: Path) -> Iterator[MakeSentinels]:
    """Start sets of sentinels that the test may fail over as it likes."""
    made: list[Sentinels] = []

    def make(*, program: str = server_program, **options: Any) -> Sentinels:
        made.append(Sentinels(program, tmp_path / f"set-{len(made)}", **options))
        return made[-1].start()

    yield make
    for each in made:
        each.close()


@pytest.fixture
def make_cluster(server_program: str, tmp_path: Path) -> Iterator[MakeCluster]:
    """Start clusters that the test may move slots of, and kill nodes of."""
    made: list[Cluster] = []

    def make(*options: str, program: str = server_program, **counts: Any) -> Cluster:
        made.append(Cluster(program, tmp_path / f"cluster-{len(made)}", *options, **counts))
        return made[-1].start()

    yield make
    for each in made:
        each.close()


@pytest.fixture
def deploy_on(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[DeployOn]:
    """Set up services on servers of the test's own, whose stored state must be consistent."""
    deployments: list[Deployment] = []

    def set_up(store: Any, *, broker: Any = None, prefix: str = "", **conf: Any) -> Deployment:
        folder = tmp_path / f"service-{len(deployments)}"
        folder.mkdir()
        prefix = prefix or f"t{uuid.uuid4().hex[:10]}:"
        deployments.append(Deployment(folder, prefix, broker=broker or store, store=store, **conf))
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
def make_store() -> Iterator[MakeStore]:
    """Make stores as an app with some settings has them."""
    made: list[Store] = []

    def make(url: str, **conf: Any) -> Store:
        app = Celery("orders", set_as_current=False)
        prefix = f"t{uuid.uuid4().hex[:10]}:"
        app.conf.update({"broker_url": url, "dtimer_key_prefix": prefix, **QUICK, **conf})
        made.append(Store(Settings.from_app(app)))
        return made[-1]

    yield make
    for store in made:
        store.close()
