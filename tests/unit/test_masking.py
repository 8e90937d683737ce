"""Passwords are not shown, wherever in a URL or a text they stand."""

from __future__ import annotations

from typing import Any

import pytest
from celery import Celery
from hypothesis import given
from hypothesis import strategies as st

from celery_dtimer import DistributedTimer
from celery_dtimer.errors import SettingsError
from celery_dtimer.masking import masked, masked_url, secrets_in
from celery_dtimer.model import Definition, Timer, TimerState
from celery_dtimer.schedules import Interval
from celery_dtimer.settings import Settings

SECRET = "hunter2-geheim"

URLS = {
    f"redis://:{SECRET}@host:6379/0": "redis://**@host:6379/0",
    f"redis://user:{SECRET}@host": "redis://**@host",
    f"rediss://{SECRET}@[::1]:6380/1?ssl_cert_reqs=none": "rediss://**@[::1]:6380/1",
    f"redis://host:6379/0?password={SECRET}": "redis://host:6379/0",
    f"redis://host:6379/0?password=a@{SECRET}": "redis://**",
    f"redis://:a/{SECRET}@host/0": "redis://**@host/0",
    f"redis://:a?{SECRET}@host/0": "redis://**",
    f"redis://:a#{SECRET}@host/0": "redis://**@host/0",
    f"redis://:a@{SECRET}@host/0": "redis://**@host/0",
    f"redis://:a;{SECRET}@host/0": "redis://**;**@host/0",
    f"redis://:{SECRET};a@host/0": "redis://**;**@host/0",
    f"redis://user:{SECRET};a@host/0": "redis://**;**@host/0",
    f"redis://:{SECRET}": "redis://**",
    f"unix://:{SECRET}@/run/redis.sock?db=1": "unix://**@/run/redis.sock",
    f"redis+socket:///run/redis.sock?password={SECRET}": "redis+socket:///run/redis.sock",
    f"sentinel://:{SECRET}@h1:26379;sentinel://:{SECRET}@h2": "sentinel://**@h1:26379;sentinel://**@h2",
    f"sentinel://:{SECRET}@h1;h2:1;h3": "sentinel://**@h1;h2:1;h3",
    f"redis+cluster://u:{SECRET}@h1:7000,h2:7001": "redis+cluster://**@h1:7000,h2:7001",
    f"amqp://guest:{SECRET}@host:5672//": "amqp://**@host:5672//",
    f"user:{SECRET}@host": "**@host",
    f"user:{SECRET}": "**",
    "embedded:///srv/dtimer": "embedded:///srv/dtimer",
    "redis://a:6379,b:6379/0": "redis://a:6379,b:6379/0",
    "": "",
}


@pytest.mark.parametrize(("url", "shown"), URLS.items(), ids=map(str, range(len(URLS))))
def test_a_url_is_shown_without_its_secrets(url: str, shown: str) -> None:
    assert masked_url(url) == shown
    assert SECRET not in shown
    if "://" in url:
        assert SECRET not in masked(f"Error 111 connecting to {url}, tried again")


@given(
    secret=st.text("abcXYZ019%@:/?#[];,&=+ !~é", min_size=4, max_size=12).map("Sec{}ret".format),
    form=st.sampled_from(["redis://:{}@host:6379/0", "redis://u:{}@h/1?a=b", "sentinel://:{}@a;b"]),
)
def test_no_password_is_shown_even_if_it_is_not_encoded(secret: str, form: str) -> None:
    shown = masked_url(form.format(secret))
    for part in ("Sec", "ret"):
        assert part not in shown


@pytest.mark.parametrize(
    "text",
    [
        f"invalid password={SECRET}&db=1",
        f"{{'password': '{SECRET}', 'db': 1}}",
        f"Connection(host='h', password='{SECRET}')",
        f"sentinel_password: {SECRET}",
        f"AUTH user {SECRET}",
        f"invalid literal for int() with base 10: '{SECRET}@host'",
    ],
)
def test_a_text_is_shown_without_what_is_known_or_named(text: str) -> None:
    assert SECRET not in masked(text, secrets_in(f"redis://:{SECRET}@host"))


def test_other_text_is_shown_as_it_is() -> None:
    text = "Error 111 connecting to localhost:6379. Connection refused; see token ring, 12:30."
    assert masked(text) == text


def test_secrets_are_found_in_urls_lists_and_options() -> None:
    found = secrets_in(
        "redis://u:p%40ss@host",
        ["sentinel://:one-secret@a;sentinel://:two-secret@b"],
        {"password": "three-secret", "sentinel_kwargs": 1, "db": "host"},
        "redis://h?password=four-secret",
        None,
        "redis://:abc@too-short",
    )
    assert found == {*("p%40ss", "p@ss", "one-secret", "two-secret", "three-secret", "four-secret")}


# ------------------------------------------------------------------ what shows them


def app_of(**conf: Any) -> Celery:
    app = Celery("orders", set_as_current=False)
    app.conf.update(conf)
    return app


@pytest.mark.parametrize(
    "url",
    [
        f"user:{SECRET}@host:6379",
        f"redis//:{SECRET}@host:6379",
        f"redis://:{SECRET}#x@host:6379/0",
        f"redis://:{SECRET}/x@host:6379/0",
        f"amqp://:{SECRET}@host",
    ],
)
def test_a_url_that_cannot_be_used_is_refused_without_being_shown(url: str) -> None:
    for name in ("dtimer_redis_url", "broker_url"):
        with pytest.raises(SettingsError) as caught:
            Settings.from_app(app_of(**{name: url}))
        assert SECRET not in str(caught.value)


def test_celerys_report_shows_no_password() -> None:
    app = app_of(
        broker_url=f"sentinel://:{SECRET}@h1;sentinel://:{SECRET}@h2",
        dtimer_redis_url=f"redis://:{SECRET}@host/0?password={SECRET}",
        dtimer_redis_options={"password": SECRET, "username": "beat"},
    )
    assert SECRET in app.bugreport()  # Celery alone does not know what this setting is
    DistributedTimer(app)
    DistributedTimer(app)
    report = app.bugreport()
    assert SECRET not in report
    assert "dtimer_redis_url" in report


def test_what_may_hold_secrets_is_not_in_the_repr_of_values() -> None:
    settings = Settings("orders", f"redis://:{SECRET}@h", {"password": SECRET})
    definition = Definition(
        "t", "task", Interval(1000), [SECRET], {"key": SECRET}, {"headers": {"auth": SECRET}}
    )
    timer = Timer.from_stored(TimerState("id", "active", "r", 0), definition.blob)
    for value in (settings, definition, timer):
        assert SECRET not in repr(value)
