"""Redis behind TLS: an authority of one's own, certificates of clients, Celery's spelling."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery

from celery_dtimer import DistributedTimer
from celery_dtimer.errors import StoreUnavailableError
from tests.conftest import QUICK
from tests.servers import RedisServer
from tests.topologies.conftest import MakeCluster, MakeSentinels, MakeStore
from tests.topologies.servers import Certificates, new_server
from tests.waiting import wait_until


@pytest.fixture(scope="module")
def server(
    tls_program: str, certificates: Certificates, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RedisServer]:
    """A server that takes TLS alone, from clients with a certificate."""
    folder = tmp_path_factory.mktemp("tls-server") / "server"
    server = certificates.secured(new_server(tls_program, folder))
    try:
        yield server.start()
    finally:
        server.close()


def url_of(server: RedisServer, **query: Any) -> str:
    """Return the URL of a server that takes TLS."""
    told = "&".join(f"{name}={value}" for name, value in query.items())
    return f"rediss://localhost:{server.port}/0?{told}"


@pytest.mark.parametrize("level", ["required", "CERT_REQUIRED", "none", "CERT_NONE"])
def test_the_url_says_what_is_checked(
    server: RedisServer, certificates: Certificates, make_store: MakeStore, level: str
) -> None:
    store = make_store(url_of(server, ssl_cert_reqs=level, **certificates.of_client))
    assert store.now_ms() > 0


@pytest.mark.parametrize("level", ["required", ssl.CERT_REQUIRED])
def test_options_and_the_brokers_own_say_it_too(
    server: RedisServer, certificates: Certificates, make_store: MakeStore, level: Any
) -> None:
    own = {"ssl_cert_reqs": level, **certificates.of_client}
    assert make_store(url_of(server), dtimer_redis_options=own).now_ms() > 0
    assert make_store(url_of(server), broker_use_ssl=own).now_ms() > 0
    plain = f"redis://localhost:{server.port}/0"
    assert make_store(plain, broker_use_ssl=own).now_ms() > 0


@pytest.mark.parametrize("what", ["another authority", "no certificate to show", "no such file"])
def test_what_can_not_be_trusted_is_one_line(
    server: RedisServer, certificates: Certificates, make_store: MakeStore, what: str
) -> None:
    own = certificates.of_client
    query = {
        "another authority": {**own, "ssl_ca_certs": certificates["other/ca.crt"]},
        "no certificate to show": {"ssl_ca_certs": certificates["ca.crt"]},
        "no such file": {**own, "ssl_ca_certs": "/does/not/exist"},
    }[what]
    store = make_store(url_of(server, password="secret", **query))
    with pytest.raises(StoreUnavailableError, match="does not answer") as caught:
        store.now_ms()
    assert "\n" not in str(caught.value)
    assert "secret" not in str(caught.value)


def test_a_broker_behind_tls_keeps_the_timers_too_and_dispatch_is_atomic(
    server: RedisServer, certificates: Certificates
) -> None:
    app = Celery("orders", set_as_current=False)
    app.conf.update(
        broker_url=f"redis://localhost:{server.port}/3",
        broker_use_ssl={"ssl_cert_reqs": ssl.CERT_REQUIRED, **certificates.of_client},
        **QUICK,
    )
    timers = DistributedTimer(app)

    @app.task(name="task")
    def task() -> None:
        """Do nothing."""

    timers.create_timer("soon", 0.1, "task")
    timers.start()
    try:
        wait_until(lambda: timers.get_timer("soon").total_run_count, "a run")
        assert {each.dispatch for each in timers.get_service_instances()} == {"atomic"}
    finally:
        timers.stop()
        app.close()


def test_sentinels_and_their_master_behind_tls(
    make_sentinels: MakeSentinels,
    make_store: MakeStore,
    tls_program: str,
    certificates: Certificates,
) -> None:
    sentinels = make_sentinels(
        program=tls_program, replicas=0, sentinels=1, certificates=certificates
    )
    own = {"ssl": True, **certificates.of_client}
    asked = {**own, "ssl_cert_reqs": "CERT_REQUIRED"}
    options = {**sentinels.options, **own, "sentinel_kwargs": asked}
    store = make_store("memory://", dtimer_redis_url=sentinels.url, dtimer_redis_options=options)
    assert store.register("a", {}).epoch


def test_a_cluster_behind_tls(
    make_cluster: MakeCluster,
    make_store: MakeStore,
    tls_program: str,
    certificates: Certificates,
) -> None:
    cluster = make_cluster(program=tls_program, certificates=certificates)
    url = cluster.url.replace("redis+cluster", "rediss+cluster")
    store = make_store(
        "memory://", dtimer_redis_url=url, dtimer_redis_options=certificates.of_client
    )
    epoch = store.register("a", {}).epoch
    cluster.move().end()
    assert store.heartbeat("a", epoch).members == 1
