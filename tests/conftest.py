"""What all tests share: one real server a run, a fresh key prefix a test, and never a flush."""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from celery import Celery, _state
from kombu import pools

from tests.ledger import QueueReader
from tests.servers import RABBITMQ, RabbitMQ, RedisServer, find_server
from tests.tcp_proxy import TcpProxy

# Short enough that a failover takes two seconds, long enough for a busy machine.
QUICK = {
    "dtimer_heartbeat_interval": 0.3,
    "dtimer_check_interval": 0.2,
    "dtimer_failure_check_interval": 0.5,
    "dtimer_instance_timeout": 1.5,
}

MakeApp = Callable[..., Celery]
FreshRedis = Callable[..., RedisServer]
ReadQueue = Callable[[Celery], QueueReader]


@pytest.fixture(autouse=True)
def shared_tasks() -> Iterator[None]:
    """Forget the shared tasks that a test makes: else every later app would have them too."""
    before = set(_state._on_app_finalizers)
    yield
    _state._on_app_finalizers.clear()
    _state._on_app_finalizers.update(before)


@pytest.fixture(autouse=True)
def root_logger() -> Iterator[None]:
    """Leave the root logger as it was: a worker sets its level and its handlers."""
    root = logging.getLogger()
    level, handlers = root.level, root.handlers[:]
    yield
    root.setLevel(level)
    root.handlers[:] = handlers


@pytest.fixture(scope="session")
def server_program() -> str:
    """The server to test with; without one, tests are skipped here and fail in CI."""
    program = find_server()
    if program is None:
        reason = "no redis-server, no valkey-server and no embedded extra"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    return program


@pytest.fixture(scope="session")
def redis_server(
    server_program: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RedisServer]:
    """The run's one server: no test stops it or empties it."""
    server = RedisServer(server_program, tmp_path_factory.mktemp("redis")).start()
    yield server
    server.close()


@pytest.fixture
def fresh_redis(server_program: str, tmp_path: Path) -> Iterator[FreshRedis]:
    """Start servers that the test may kill, freeze and empty as it likes."""
    servers: list[RedisServer] = []

    def start(*options: str, appendonly: bool = False, running: bool = True) -> RedisServer:
        folder = tmp_path / f"redis-{len(servers)}"
        folder.mkdir()
        servers.append(RedisServer(server_program, folder, *options, appendonly=appendonly))
        return servers[-1].start() if running else servers[-1]

    yield start
    for server in servers:
        server.close()


@pytest.fixture(scope="session")
def rabbitmq_program() -> Path:
    """The node to test with; without one, tests are skipped here and fail in CI."""
    if not RABBITMQ.exists():
        if os.environ.get("CI"):
            pytest.fail("RabbitMQ is missing: the tests need Debian's rabbitmq-server")
        pytest.skip("RabbitMQ is not installed")
    return RABBITMQ


@pytest.fixture(scope="session")
def shared_rabbitmq(
    rabbitmq_program: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RabbitMQ]:
    """The run's node, which tests leave as it was: one takes long to start."""
    node = RabbitMQ(tmp_path_factory.mktemp("rabbitmq"))
    try:
        yield node.start()
    finally:
        node.close()


@pytest.fixture
def rabbitmq(rabbitmq_program: Path, tmp_path: Path) -> Iterator[RabbitMQ]:
    """A node of the test's own, that it may kill and freeze."""
    folder = tmp_path / "rabbitmq"
    folder.mkdir()
    node = RabbitMQ(folder)
    try:
        yield node.start()
    finally:
        node.close()


class KeyLeaks:
    """Finds the keys that a test leaves behind: those that neither expire nor were there before."""

    def __init__(self, client: redis.Redis) -> None:
        self._client = client
        self._before = set(client.scan_iter(count=1000))

    def found(self) -> list[str]:
        """Return the names of the leaked keys; kombu's own belong to no test."""
        new = set(self._client.scan_iter(count=1000)) - self._before
        ours = [
            key for key in new if not key.startswith(("_kombu.", "unacked", "celery-task-meta"))
        ]
        return sorted(key for key in ours if self._client.ttl(key) == -1)


@pytest.fixture
def key_leaks(redis_server: RedisServer) -> Iterator[KeyLeaks]:
    """Fail the test that leaves keys outside its prefix, or ask what is left so far."""
    leaks = KeyLeaks(redis_server.client)
    yield leaks
    left = leaks.found()
    assert not left, f"keys were left behind: {left}"


@pytest.fixture
def prefix(redis_server: RedisServer, key_leaks: KeyLeaks) -> Iterator[str]:
    """A key prefix of the test's own; what it holds is deleted afterwards."""
    name = f"t{uuid.uuid4().hex[:10]}:"
    yield name
    delete_prefix(redis_server.client, name)


def delete_prefix(client: redis.Redis, prefix: str) -> None:
    """Delete every key that starts with ``prefix``."""
    keys = list(client.scan_iter(f"{prefix}*", count=1000))
    if keys:
        client.delete(*keys)


@pytest.fixture
def make_app(redis_server: RedisServer, prefix: str) -> Iterator[MakeApp]:
    """Build Celery apps on the run's server, with keys and queues of the test's own."""
    pools.reset()  # a test before this one may have cut what kombu keeps for the whole process
    apps: list[Celery] = []

    def make(name: str = "orders", **conf: Any) -> Celery:
        app = Celery(name, set_as_current=False)
        app.conf.update(app_settings(redis_server.url, prefix, **conf))
        apps.append(app)
        return app

    yield make
    for app in apps:
        app.close()


def app_settings(url: str, prefix: str, **conf: Any) -> dict[str, Any]:
    """Return the settings of an app under test; ``conf`` has the last word."""
    settings = {
        "broker_url": url,
        "task_default_queue": f"{prefix}queue",
        "dtimer_service": "orders",
        "dtimer_key_prefix": prefix,
        "broker_connection_retry_on_startup": True,
        "timezone": "UTC",
        **QUICK,
    }
    return {**settings, **conf}


@pytest.fixture
def read_queue() -> Iterator[ReadQueue]:
    """Take what reaches an app's default queue into a ledger, as a worker would."""
    readers: list[QueueReader] = []

    def read(app: Celery) -> QueueReader:
        readers.append(QueueReader(app.conf.broker_url, app.conf.task_default_queue))
        return readers[-1]

    yield read
    for reader in readers:
        reader.close()


@pytest.fixture
def tcp_proxy() -> Iterator[Callable[[RedisServer], TcpProxy]]:
    """Put proxies in front of servers, to spoil their connections."""
    proxies: list[TcpProxy] = []

    def start(server: RedisServer) -> TcpProxy:
        proxies.append(TcpProxy(server.port))
        return proxies[-1]

    yield start
    for proxy in proxies:
        proxy.close()
