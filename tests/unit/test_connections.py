"""What is made of a URL and of redis-py's options, before anything is contacted."""

from __future__ import annotations

import ssl
from typing import Any

import pytest
import redis
from redis.exceptions import AskError, MovedError, ResponseError, TryAgainError
from redis.sentinel import SentinelConnectionPool

from celery_dtimer.connections import Client, Refusal, SlotClient, connect, refusal_in
from celery_dtimer.errors import SettingsError
from celery_dtimer.settings import Settings
from tests.naming import named


def client_of(url: str, **options: Any) -> Client:
    return connect(Settings("orders", url, options), 10, "meta:{orders}")


def made_of(client: Client) -> Any:
    """Return a connection as the client would open it."""
    pool = client.connection_pool
    return pool.connection_class(**pool.connection_kwargs)


def test_every_call_has_a_time_limit_and_no_retries_of_redis_py() -> None:
    connection = made_of(client_of("redis://host"))
    assert (connection.socket_timeout, connection.socket_connect_timeout) == (10, 10)
    assert connection.health_check_interval == 30
    assert connection.retry._retries == 0


@pytest.mark.parametrize("option", ["socket_timeout=2.5", "timeout=2.5"])
def test_a_time_limit_in_the_url_counts(option: str) -> None:
    assert made_of(client_of(f"redis://host/0?{option}")).socket_timeout == 2.5


def test_an_option_in_the_url_comes_before_the_setting() -> None:
    url = "redis://host/0?health_check_interval=7"
    assert made_of(client_of(url, health_check_interval=5)).health_check_interval == 7


PASSWORD, ENCODED = "p#%@:/[]?+ &é", "p%23%25%40%3A%2F%5B%5D%3F%2B%20%26%C3%A9"


@pytest.mark.parametrize(
    "url",
    [
        f"redis://us%40er:{ENCODED}@host:7/15",
        f"rediss://us%40er:{ENCODED}@host:7/15",
        f"unix://us%40er:{ENCODED}@/run/redis.sock?db=15",
        f"redis+socket://us%40er:{ENCODED}@/run/redis.sock?virtual_host=15",
    ],
)
def test_user_password_and_database_are_those_of_the_url(url: str) -> None:
    client = client_of(url)
    connection = made_of(client)
    assert (connection.username, connection.password) == ("us@er", PASSWORD)
    assert (connection.db, client.database) == (15, 15)
    assert PASSWORD not in repr(client)


@pytest.mark.parametrize(
    ("written", "level"),
    [
        ("CERT_NONE", ssl.CERT_NONE),
        ("none", ssl.CERT_NONE),
        ("CERT_OPTIONAL", ssl.CERT_OPTIONAL),
        ("optional", ssl.CERT_OPTIONAL),
        ("CERT_REQUIRED", ssl.CERT_REQUIRED),
        ("required", ssl.CERT_REQUIRED),
    ],
)
def test_how_certificates_are_checked_is_spelt_as_celery_does(
    written: str, level: ssl.VerifyMode
) -> None:
    in_url = made_of(client_of(f"rediss://host?ssl_cert_reqs={written}&ssl_ca_certs=ca"))
    as_option = made_of(client_of("redis://host", ssl=True, ssl_cert_reqs=written))
    as_constant = made_of(client_of("redis://host", ssl=True, ssl_cert_reqs=level))
    assert in_url.cert_reqs == as_option.cert_reqs == as_constant.cert_reqs == level
    assert in_url.ca_certs == "ca"


@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("rediss://host?ssl_cert_reqs=sometimes", {}),
        ("redis://host", {"no_such_option": 1}),
        ("redis://host", {"max_connections": 1}),
        ("redis+cluster://a:1,b:2", {"no_such_option": 1}),
        ("redis+cluster://a:1,b:2", {"max_connections": 1}),
        ("sentinel://a:1", {"master_name": "timers", "no_such_option": 1}),
        ("sentinel://a:1", {"master_name": "timers", "max_connections": 1}),
        ("sentinel://a:1", {"master_name": "timers", "sentinel_kwargs": {"no_such_option": 1}}),
        ("redis://host?socket_timeout=soon", {}),
        ("redis://host", {"socket_timeout": "soon"}),
        ("redis://host", {"socket_timeout": 0}),
        ("redis://host", {"socket_connect_timeout": True}),
        ("redis+cluster://a:1,b:2", {"socket_timeout": float("nan")}),
        ("sentinel://a:1", {"master_name": "t", "sentinel_kwargs": {"socket_timeout": -1}}),
    ],
)
def test_an_option_that_redis_py_does_not_take_is_refused_at_once(
    url: str, options: dict[str, Any]
) -> None:
    with pytest.raises(
        SettingsError, match=r"no_such_option|Certificate|max_conn|socket_\w*timeout"
    ):
        client_of(url, **options)


def test_sentinels_and_their_master_have_passwords_of_their_own() -> None:
    client = client_of(
        "sentinel://:data@a:1/3;b;sentinel://c:3",
        master_name="timers",
        sentinel_kwargs={"password": "watch"},
    )
    pool: Any = client.connection_pool
    assert isinstance(pool, SentinelConnectionPool)
    assert pool.service_name == "timers"
    assert (pool.connection_kwargs["password"], client.database) == ("data", 3)
    asked = [each.connection_pool.connection_kwargs for each in pool.sentinel_manager.sentinels]
    assert [(each["host"], each["port"]) for each in asked] == [("a", 1), ("b", 26379), ("c", 3)]
    assert {each["password"] for each in asked} == {"watch"}
    assert sum(each["socket_timeout"] for each in asked) < 10
    assert "watch" not in repr(client)


def test_a_cluster_is_not_contacted_before_it_is_used() -> None:
    client = client_of("rediss+cluster://u:p@a:1,b:2?ssl_cert_reqs=CERT_NONE")
    assert isinstance(client, SlotClient)
    options = client._options
    assert (options["username"], options["password"]) == ("u", "p")
    assert issubclass(options["connection_class"], redis.SSLConnection)
    assert client._nodes == [("a", 1), ("b", 2)]
    assert (client.database, client.most_connections > 1) == (0, True)


@pytest.mark.parametrize(
    ("answer", "refusal"),
    [
        (MovedError("105 10.0.0.1:7000"), Refusal("MOVED", ("10.0.0.1", 7000))),
        (AskError("105 10.0.0.1:7000"), Refusal("ASK", ("10.0.0.1", 7000))),
        (TryAgainError("Multiple keys"), Refusal("TRYAGAIN")),
        (ResponseError("MOVED 105 10.0.0.1:7000"), Refusal("MOVED", ("10.0.0.1", 7000))),
        (ResponseError("ASK 105 ::1:7000"), Refusal("ASK", ("::1", 7000))),
        (ResponseError("MOVED 105 :7000"), Refusal("MOVED", ("", 7000))),
        (ResponseError("TRYAGAIN Multiple keys"), Refusal("TRYAGAIN")),
        (ResponseError("ERR MOVED 105 a:1"), None),
        ("MOVED 105 a:1", None),
        (None, None),
    ],
    ids=named,
)
def test_what_a_node_says_of_others_is_read_from_errors_of_any_redis_py(
    answer: object, refusal: Refusal | None
) -> None:
    assert refusal_in(answer) == refusal
