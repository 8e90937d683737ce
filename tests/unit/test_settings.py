"""Settings: where each value comes from, and which are refused by name."""

from __future__ import annotations

import math
from datetime import timedelta
from typing import Any

import pytest
from celery import Celery
from celery.exceptions import ImproperlyConfigured

from celery_dtimer.errors import DistributedTimerError, SettingsError
from celery_dtimer.policy import Defaults
from celery_dtimer.settings import Settings, defaults, eta_threshold
from tests.naming import named

URL = "redis://127.0.0.1:6379/0"


def an_app(name: str | None = "orders", broker: Any = URL, **conf: Any) -> Celery:
    app = Celery(name, set_as_current=False)
    app.conf.update(broker_url=broker, **conf)
    return app


def settings_of(**conf: Any) -> Settings:
    return Settings.from_app(an_app(**conf))


def test_an_app_without_settings_gets_the_defaults() -> None:
    settings = settings_of()
    assert settings.service == "orders"
    assert settings.redis_url == URL
    assert settings.redis_options == {}
    assert settings.key_prefix == ""
    assert settings.heartbeat_interval == 5
    assert settings.check_interval == 1
    assert settings.failure_check_interval == 10
    assert settings.instance_timeout == 30
    assert settings.batch_size == 100
    assert (settings.resolution, settings.lag_limit) == (0.005, 2)
    assert settings.dispatch == "auto"
    assert settings.keep_finished == timedelta(days=7).total_seconds()
    assert settings.call_timeout == 10


def test_every_setting_is_read_from_the_app() -> None:
    values: dict[str, Any] = {
        "dtimer_redis_url": "rediss://example.com/1",
        "dtimer_redis_options": {"client_name": "beat"},
        "dtimer_service": "billing",
        "dtimer_key_prefix": "p:",
        "dtimer_heartbeat_interval": 2,
        "dtimer_check_interval": 0.5,
        "dtimer_failure_check_interval": 3,
        "dtimer_instance_timeout": 9.5,
        "dtimer_batch_size": 7,
        "dtimer_resolution": 0,
        "dtimer_lag_limit": 3,
        "dtimer_dispatch": "atomic",
        "dtimer_shards": 4,
        "dtimer_keep_finished": 0,
        "dtimer_history": 5,
        "dtimer_track_runs": False,
        "dtimer_run_lease": 7,
        "dtimer_queued_lease": 70,
        "dtimer_max_refusals": 3,
        "dtimer_eta_threshold": 60,
        "dtimer_wait_replicas": 2,
        "dtimer_allowed_tasks": ("shop.*",),
        "dtimer_max_timers": 1000,
        "dtimer_metrics_port": 9810,
        "dtimer_metrics_host": "10.0.0.1",
        "dtimer_send_events": True,
    }
    policies = {"dtimer_coalesce", "dtimer_misfire_grace_time", "dtimer_max_catch_up"}
    assert values.keys() == defaults().keys() - policies
    settings = settings_of(**values)
    for name, value in values.items():
        assert getattr(settings, name.removeprefix("dtimer_")) == value


def test_what_timers_leave_open_is_read_from_the_app() -> None:
    assert settings_of().defaults == Defaults(True, None, None, 100)
    settings = settings_of(
        dtimer_coalesce=False,
        dtimer_misfire_grace_time=timedelta(minutes=1),
        dtimer_max_catch_up=7,
        beat_cron_starting_deadline=3600,
    )
    assert settings.defaults == Defaults(False, 60_000, 3_600_000, 7)


@pytest.mark.parametrize(("deadline", "grace_ms"), [(0, 1000), (1, 1000), (300, 300_000)])
def test_celerys_deadline_leaves_a_second_to_what_is_sent_in_time(
    deadline: int, grace_ms: int
) -> None:
    settings = settings_of(beat_cron_starting_deadline=deadline)
    assert settings.defaults.cron_grace_ms == grace_ms


def test_durations_may_be_timedeltas() -> None:
    settings = settings_of(
        dtimer_heartbeat_interval=timedelta(seconds=2),
        dtimer_instance_timeout=timedelta(minutes=1),
        dtimer_keep_finished=timedelta(hours=1),
    )
    assert (settings.heartbeat_interval, settings.instance_timeout) == (2.0, 60.0)
    assert settings.keep_finished == 3600


def test_a_settings_namespace_works_as_in_django() -> None:
    class DjangoSettings:
        CELERY_BROKER_URL = URL
        CELERY_DTIMER_SERVICE = "shop"
        CELERY_DTIMER_INSTANCE_TIMEOUT = 60
        CELERY_DTIMER_ETA_THRESHOLD = timedelta(minutes=2)

    app = Celery("orders", set_as_current=False)
    app.config_from_object(DjangoSettings, namespace="CELERY")
    settings = Settings.from_app(app)
    assert (settings.service, settings.instance_timeout) == ("shop", 60)
    assert settings.eta_threshold == eta_threshold(app) == 120


@pytest.mark.parametrize(
    ("broker", "expected"),
    [
        (["redis://a/1", "redis://b/1"], "redis://a/1"),
        ("redis://a/1;redis://b/1", "redis://a/1"),
        ("rediss://a/1", "rediss://a/1"),
        ("redis+socket:///tmp/redis.sock", "redis+socket:///tmp/redis.sock"),
    ],
)
def test_a_redis_broker_keeps_the_timers_too(broker: Any, expected: str) -> None:
    assert settings_of(broker=broker).redis_url == expected


@pytest.mark.parametrize("url", [["redis://a", 5], [object()], {"redis://a"}])
def test_a_list_of_what_is_no_text_is_no_url(url: Any) -> None:
    with pytest.raises(SettingsError, match="dtimer_redis_url has no scheme"):
        settings_of(dtimer_redis_url=url)


def test_the_write_url_of_a_broker_comes_first() -> None:
    assert settings_of(broker_write_url="redis://writer/0").redis_url == "redis://writer/0"


def test_a_service_that_is_given_is_used_in_place_of_the_apps() -> None:
    assert Settings.from_app(an_app(dtimer_service="a"), "b").service == "b"


@pytest.mark.parametrize("name", [None, "__main__"])
def test_an_app_without_a_main_name_must_name_its_service(name: str | None) -> None:
    with pytest.raises(SettingsError, match="dtimer_service"):
        Settings.from_app(an_app(name))
    assert Settings.from_app(an_app(name, dtimer_service="named")).service == "named"


NOT_SECONDS: list[Any] = [0, -1, "5", None, True, math.nan, math.inf, timedelta(0), timedelta(-1)]
BAD: list[tuple[str, Any]] = [
    *(("dtimer_coalesce", value) for value in (None, 1, "yes")),
    *(("dtimer_misfire_grace_time", value) for value in (0, 0.5, -1, "60", True, 1e12)),
    *(("dtimer_max_catch_up", value) for value in (-1, 1.5, True, None, 10_001)),
    *(("beat_cron_starting_deadline", value) for value in ("60", float("inf"), -5, True)),
    *(("dtimer_wait_replicas", value) for value in (-1, 1.5, True, None, 101)),
    *(("dtimer_metrics_port", value) for value in (-1, 65536, "9810", 1.5, True)),
    *(("dtimer_metrics_host", value) for value in ("", None, 7)),
    *(("dtimer_history", value) for value in (-1, 1.5, True, None)),
    *(("dtimer_eta_threshold", value) for value in (-1, "60", True, math.nan, math.inf)),
    *(("dtimer_heartbeat_interval", value) for value in NOT_SECONDS),
    *(("dtimer_check_interval", value) for value in NOT_SECONDS),
    *(("dtimer_failure_check_interval", value) for value in NOT_SECONDS),
    *(("dtimer_instance_timeout", value) for value in NOT_SECONDS),
    *(("dtimer_keep_finished", value) for value in [-1, "7", True, math.nan, math.inf]),
    *(("dtimer_batch_size", value) for value in [0, -1, 201, 1.5, "500", True, None]),
    *(("dtimer_dispatch", value) for value in ["fast", "", None, 1, []]),
    *(("dtimer_key_prefix", value) for value in ["{a}", "}", None, 1, b"p"]),
    *(("dtimer_redis_options", value) for value in [None, "a=1", [1]]),
    *(("dtimer_service", value) for value in [7, b"orders", ["a"]]),
    ("dtimer_redis_url", "amqp://localhost//"),
    ("dtimer_redis_url", "localhost:6379"),
    ("dtimer_redis_url", 6379),
    ("dtimer_redis_url", "redis://host:port/0"),
    ("dtimer_redis_url", "redis://[bad/0"),
    ("dtimer_redis_url", "redis+cluster://a:1,b:port"),
    ("dtimer_redis_url", "redis+cluster://a:1,b:2/1"),
    ("dtimer_redis_url", "redis+cluster://"),
    ("dtimer_redis_url", "sentinel://a:1;sentinel://b:port"),
    ("dtimer_redis_url", "sentinel://a:1;redis://b:2"),
    ("dtimer_redis_url", "sentinel://"),
]


@pytest.mark.parametrize(("name", "value"), BAD, ids=named)
def test_a_bad_value_is_refused_by_the_settings_name(name: str, value: Any) -> None:
    with pytest.raises(SettingsError, match=name) as caught:
        settings_of(**{name: value})
    assert isinstance(caught.value, (DistributedTimerError, ImproperlyConfigured))


@pytest.mark.parametrize(
    ("conf", "names"),
    [
        (
            {"dtimer_instance_timeout": 10, "dtimer_heartbeat_interval": 5},
            ("dtimer_instance_timeout=10", "dtimer_heartbeat_interval=5"),
        ),
        (
            {"dtimer_instance_timeout": 11, "dtimer_check_interval": 6},
            ("dtimer_check_interval=6", "dtimer_instance_timeout=11"),
        ),
    ],
)
def test_values_that_cannot_work_together_are_refused_by_both_names(
    conf: dict[str, Any], names: tuple[str, str]
) -> None:
    with pytest.raises(SettingsError) as caught:
        settings_of(**conf)
    assert all(name in str(caught.value) for name in names)


def test_a_broker_that_is_not_redis_needs_a_redis_url() -> None:
    with pytest.raises(SettingsError, match=r"dtimer_redis_url is not set.*broker_url.*'amqp'"):
        settings_of(broker="amqp://guest:guest@localhost//")
    assert settings_of(broker="amqp://localhost//", dtimer_redis_url=URL).redis_url == URL


SECRETS = ["alice", "pa55word", "queried"]


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://alice:pa55word@host:7/2?password=queried", "redis://**@host:7/2"),
        ("rediss://:pa55word@host", "rediss://**@host"),
        ("redis://:pa55word%40%2F%23@host/0", "redis://**@host/0"),
        ("redis://[::1]:6379/0?client_name=queried", "redis://[::1]:6379/0"),
        ("redis+socket:///run/redis.sock?password=queried", "redis+socket:///run/redis.sock"),
        ("unix://alice:pa55word@/run/redis.sock", "unix://**@/run/redis.sock"),
        (
            "sentinel://:pa55word@a;sentinel://:pa55word@b:2/3",
            "sentinel://**@a;sentinel://**@b:2/3",
        ),
        ("sentinel://a:1;alice:pa55word@b:2", "sentinel://a:1;**@b:2"),
        ("redis+cluster://alice:pa55word@a:1,b:2/0", "redis+cluster://**@a:1,b:2/0"),
        ("rediss+cluster://a:1,b:2?password=queried", "rediss+cluster://a:1,b:2"),
        ("embedded:///data", "embedded:///data"),
        ("embedded://", "embedded://"),
    ],
)
def test_the_url_that_is_shown_has_no_secrets(url: str, shown: str) -> None:
    settings = settings_of(dtimer_redis_url=url, dtimer_redis_options={"master_name": "queried"})
    assert settings.masked_url == shown
    assert not [secret for secret in SECRETS if secret in repr(settings)]


@pytest.mark.parametrize("url", ["redis://:12#pa55word@host/0", "redis://:pa55word?x@host/0"])
def test_a_password_that_is_not_encoded_is_refused_without_being_shown(url: str) -> None:
    with pytest.raises(SettingsError, match="percent-encoded") as caught:
        settings_of(dtimer_redis_url=url)
    assert "pa55word" not in str(caught.value)


def test_the_options_are_a_copy() -> None:
    options = {"client_name": "a"}
    settings = settings_of(dtimer_redis_options=options)
    options["client_name"] = "b"
    assert settings.redis_options == {"client_name": "a"}


@pytest.mark.parametrize("name", ["dtimer_hartbeat_interval", "dtimer_", "DTIMER_URL"])
def test_a_misspelt_setting_is_refused(name: str) -> None:
    with pytest.raises(SettingsError, match=f"{name} is not a setting.*dtimer_heartbeat_interval"):
        settings_of(**{name: 1})


def test_a_misspelt_setting_is_refused_in_a_namespace() -> None:
    app = an_app()
    app.config_from_object(
        {"CELERY_BROKER_URL": URL, "CELERY_DTIMER_SERVISE": 1}, namespace="CELERY"
    )
    with pytest.raises(SettingsError, match="CELERY_DTIMER_SERVISE"):
        Settings.from_app(app)


def test_a_database_is_a_number() -> None:
    with pytest.raises(SettingsError, match="numbers as port and database"):
        settings_of(dtimer_redis_url="redis://localhost/abc")
    assert settings_of(dtimer_redis_url="redis://localhost/15").redis_url.endswith("/15")


SENTINELS = "sentinel://:secret@a:1/2;sentinel://b:2"
MASTER = {"master_name": "timers"}


def test_the_sentinels_of_the_broker_keep_the_timers_too() -> None:
    options = {**MASTER, "sentinel_kwargs": {"password": "x"}, "visibility_timeout": 7}
    settings = settings_of(broker=SENTINELS, broker_transport_options=options)
    assert settings.redis_url == SENTINELS
    assert settings.redis_options == {**MASTER, "sentinel_kwargs": {"password": "x"}}
    assert settings_of(broker=SENTINELS.split(";"), broker_transport_options=MASTER) == settings_of(
        broker=SENTINELS, broker_transport_options=MASTER
    )


def test_the_brokers_options_are_not_those_of_another_server() -> None:
    conf = {"broker_transport_options": MASTER, "broker_use_ssl": {"ssl_ca_certs": "ca"}}
    own = {"dtimer_redis_options": {"master_name": "own"}}
    settings = settings_of(broker=SENTINELS, dtimer_redis_url="sentinel://c", **conf, **own)
    assert settings.redis_options == {"master_name": "own"}
    with pytest.raises(SettingsError, match="master_name=None"):
        settings_of(broker=SENTINELS, dtimer_redis_url="sentinel://c", **conf)


def test_the_brokers_tls_holds_where_its_url_does() -> None:
    conf = {"broker_use_ssl": {"ssl_ca_certs": "ca", "ssl_cert_reqs": "required"}}
    expected = {"ssl": True, **conf["broker_use_ssl"]}
    assert settings_of(**conf).redis_options == expected
    assert settings_of(dtimer_redis_url=URL, **conf).redis_options == expected
    assert settings_of(dtimer_redis_url="rediss://other", **conf).redis_options == {}
    own = settings_of(dtimer_redis_options={"ssl_ca_certs": "own"}, **conf)
    assert own.redis_options == {**expected, "ssl_ca_certs": "own"}
    assert settings_of(broker_use_ssl=True).redis_options == {}


@pytest.mark.parametrize("name", [None, "", 7])
def test_a_master_of_sentinels_has_a_name(name: Any) -> None:
    with pytest.raises(SettingsError, match=f"master_name={name!r} is not accepted") as caught:
        settings_of(broker=SENTINELS, broker_transport_options={"master_name": name})
    assert "secret" not in str(caught.value)


def test_a_cluster_is_no_broker() -> None:
    with pytest.raises(SettingsError, match=r"broker_url .*'redis\+cluster'.* as a broker"):
        settings_of(broker="redis+cluster://a:1,b:2")
    assert settings_of(dtimer_redis_url="redis+cluster://a:1,b:2").is_cluster
