"""Changing timers: what is not named stays, None is the default, nothing is woken by chance."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from celery.schedules import crontab, solar

from celery_dtimer import InvalidTimerError
from celery_dtimer.declarations import definition_of
from celery_dtimer.model import decode_definition, to_datetime
from celery_dtimer.schedules import Crontab, Interval
from tests.conftest import MakeApp
from tests.integration.conftest import START_MS
from tests.integration.test_timers import Timers, a_task

UTC = timezone.utc
START = to_datetime(START_MS)
NEW_YEAR = datetime(2030, 1, 1)  # noqa: DTZ001 - by the clocks of the timer's zone
NEW_YEAR_IN_TOKYO = datetime(2029, 12, 31, 15, tzinfo=UTC)


@pytest.fixture
def timers(make_app: MakeApp) -> Iterator[Timers]:
    """The timers of an app in Tokyo."""
    made = Timers(make_app(timezone="Asia/Tokyo"))
    yield made
    assert not made.check_consistency()
    made.store.close()


def stored(timers: Timers, name: str = "a") -> dict[str, Any]:
    """Return the definition of a timer as it is stored."""
    (blob,) = timers.store.definitions([timers.get_timer(name).id])
    assert blob is not None
    return dict(json.loads(blob))


# ------------------------------------------------------------------ time zones


@pytest.mark.parametrize("schedule", [60, "0 9 * * *", 7200])
@pytest.mark.parametrize("keyword", ["end_at", "start_at"])
def test_a_datetime_that_names_no_zone_is_by_the_apps_clocks(
    timers: Timers, schedule: Any, keyword: str
) -> None:
    timers.create_timer("a", schedule, "record", **{keyword: NEW_YEAR})
    before = timers.get_timer("a")
    timers.update_timer("a", **{keyword: NEW_YEAR})
    assert timers.get_timer("a").policy == before.policy
    moment_ms = getattr(before.policy, f"{keyword.removesuffix('_at')}_ms")
    assert to_datetime(moment_ms) == NEW_YEAR_IN_TOKYO
    timers.update_timer("a", expires=NEW_YEAR)
    assert timers.get_timer("a").options["expires"] == NEW_YEAR_IN_TOKYO


@pytest.mark.parametrize("first", [60, "0 8 * * *", solar("sunset", 48, 2)])
def test_a_schedule_that_names_no_zone_goes_by_the_apps_clocks(timers: Timers, first: Any) -> None:
    timers.create_timer("a", first, "record")
    timers.update_timer("a", schedule="0 9 * * *")
    assert timers.get_timer("a").schedule == Crontab("0 9 * * *", "Asia/Tokyo")
    assert stored(timers)["zone_of"] == "orders"


def test_a_timer_that_has_named_its_zone_keeps_it(timers: Timers) -> None:
    timers.create_timer("a", "0 12 * * *", "record", timezone="Europe/Paris")
    timers.update_timer("a", schedule="0 13 * * *")
    assert timers.get_timer("a").schedule == Crontab("0 13 * * *", "Europe/Paris")
    assert "zone_of" not in stored(timers)
    timers.update_timer("a", args=[1])
    assert "zone_of" not in stored(timers)
    timers.update_timer("a", timezone=None)
    assert timers.get_timer("a").schedule == Crontab("0 13 * * *", "Asia/Tokyo")
    assert stored(timers)["zone_of"] == "orders"
    timers.update_timer("a", timezone="Asia/Tokyo")
    assert "zone_of" not in stored(timers)


def test_only_what_a_zone_matters_to_remembers_whose_it_goes_by(timers: Timers) -> None:
    timers.create_timer("a", 60, "record")
    assert "zone_of" not in stored(timers)
    timers.create_timer("a", 7200, "record", relative=True)
    assert stored(timers)["zone_of"] == "orders"


# ------------------------------------------------------------------ what is not named


def test_another_schedule_keeps_what_was_said_beside_the_old_one(timers: Timers) -> None:
    timers.create_timer("a", "30 2 * * *", "record", dst="skip")
    timers.update_timer("a", schedule="30 3 * * *")
    assert timers.get_timer("a").schedule == Crontab("30 3 * * *", "Asia/Tokyo", "skip")
    timers.update_timer("a", schedule="30 4 * * *", dst="both")
    assert timers.get_timer("a").schedule == Crontab("30 4 * * *", "Asia/Tokyo", "both")
    timers.create_timer("b", 7200, "record", relative=True)
    timers.update_timer("b", schedule=3600)
    assert timers.get_timer("b").schedule == Interval(3_600_000, True, "Asia/Tokyo")


@pytest.mark.parametrize(
    ("schedule", "keywords", "plain"),
    [
        ("30 2 * * *", {"dst": "skip"}, Crontab("30 2 * * *", "Asia/Tokyo")),
        ("30 2 * * *", {"timezone": "UTC"}, Crontab("30 2 * * *", "Asia/Tokyo")),
        (7200, {"relative": True}, Interval(7_200_000)),
    ],
)
def test_none_stands_for_the_default_of_a_schedule(
    timers: Timers, schedule: Any, keywords: dict[str, Any], plain: Any
) -> None:
    timers.create_timer("a", schedule, "record", **keywords)
    assert timers.get_timer("a").schedule != plain
    timers.update_timer("a", **dict.fromkeys(keywords))
    assert timers.get_timer("a").schedule == plain


def test_none_stands_for_the_default_of_everything(timers: Timers) -> None:
    policies: dict[str, Any] = {
        "start_at": START + timedelta(days=1),
        "end_at": START + timedelta(days=9),
        "max_runs": 5,
        "jitter": 9,
        "coalesce": False,
        "misfire_grace_time": 60,
        "max_catch_up": 3,
        "shards": 2,
    }
    timers.create_timer("a", 10, "record")
    plain = timers.get_timer("a")
    timers.update_timer("a", description="d", queue="q", priority=3, **policies)
    assert timers.get_timer("a").policy != plain.policy
    timers.update_timer("a", description=None, queue=None, priority=None, **dict.fromkeys(policies))
    assert timers.get_timer("a") == plain


def test_a_time_zone_beside_what_needs_none_is_that_of_datetimes(timers: Timers) -> None:
    for name, schedule in (("a", 60), ("b", solar("sunset", 48, 2)), ("c", NEW_YEAR)):
        timers.create_timer(name, schedule, "record", timezone="UTC")
        timers.update_timer(name, timezone="UTC", end_at=NEW_YEAR + timedelta(days=1))
        end_ms = timers.get_timer(name).policy.end_ms
        assert end_ms is not None
        assert to_datetime(end_ms) == datetime(2030, 1, 2, tzinfo=UTC)


def test_a_timer_that_is_stopped_starts_with_another_schedule_alone(timers: Timers) -> None:
    timers.create_timer("a", "0 9 * * *", "record")
    timers.stop_timer("a")
    for changes in ({"args": [1]}, {"jitter": 5}, {"end_at": NEW_YEAR}, {"max_runs": 5}):
        assert timers.update_timer("a", **changes).status == "stopped"
    assert timers.update_timer("a", schedule="0 10 * * *").status == "active"


def test_what_has_come_before_a_change_is_counted(timers: Timers) -> None:
    timers.create_timer("a", 60, "record")
    timers.fire()
    timers.clock.advance(600)
    timers.update_timer("a", schedule=30)
    assert timers.get_timer("a").skips == {"superseded": 10}
    timers.pause_timer("a")
    timers.clock.advance(300)
    timers.create_timer("a", 120, "record")
    assert timers.get_timer("a").skips == {"superseded": 10, "paused": 10}
    timers.resume_timer("a")
    assert timers.get_timer("a").next_run_at == START + timedelta(seconds=1020)


# ------------------------------------------------------------------ names that are nearly right


@pytest.mark.parametrize("name", ["max_run", "misfire_grace", "coalesced", "start_att", "jiter"])
def test_a_policy_that_is_misspelt_is_refused(timers: Timers, name: str) -> None:
    with pytest.raises(InvalidTimerError, match="has nearly this name"):
        timers.create_timer("a", 60, "record", **{name: 3})
    with pytest.raises(InvalidTimerError, match="has nearly this name"):
        timers.callback(schedule=60, **{name: 3})(lambda timer: None)


def test_a_policy_among_the_options_of_a_signature_is_refused(timers: Timers) -> None:
    task = a_task(timers, "record")
    with pytest.raises(InvalidTimerError, match=r"options\['max_runs'\]=3"):
        timers.create_timer("a", 60, task.s().set(max_runs=3))


def test_policies_beside_a_periodic_task_are_the_timers(timers: Timers) -> None:
    task = a_task(timers, "record")
    timers.app.add_periodic_task(10, task.s(), name="a", max_runs=3, coalesce=False, queue="q")
    definition = definition_of(timers.app, "a", timers.app.conf.beat_schedule["a"])
    assert (definition.policy.max_runs, definition.policy.coalesce) == (3, False)
    assert definition.options == {"queue": "q"}
    assert decode_definition(definition.blob).policy == definition.policy


def test_a_policy_without_a_schedule_is_refused_by_its_name(timers: Timers) -> None:
    with pytest.raises(InvalidTimerError, match=r"^max_runs=3 is not accepted"):
        timers.callback(max_runs=3)(lambda timer: None)


@pytest.mark.parametrize(
    ("schedule", "jitter"),
    [(crontab(minute="*"), 60), ("0 9 * * 1-5", 86_400), ("FREQ=HOURLY", 3600), (60, 60)],
)
def test_jitter_is_shorter_than_the_time_between_two_runs(
    timers: Timers, schedule: Any, jitter: int
) -> None:
    with pytest.raises(InvalidTimerError, match=rf"^jitter={jitter}"):
        timers.create_timer("a", schedule, "record", jitter=jitter, start_at=START)
    timers.create_timer("a", schedule, "record", jitter=jitter - 1, start_at=START)


def test_errors_show_moments_as_they_are_written(timers: Timers) -> None:
    with pytest.raises(InvalidTimerError, match=r"^end_at='2029-12-31T15:00:00\+00:00'"):
        timers.create_timer(
            "a", 60, "record", end_at=NEW_YEAR, start_at=NEW_YEAR + timedelta(days=1)
        )
    with pytest.raises(InvalidTimerError, match=r"^start_at='2029-12-31T15:00:00\+00:00'"):
        timers.create_timer("a", NEW_YEAR, "record", start_at=NEW_YEAR)
    with pytest.raises(InvalidTimerError, match="1970"):
        timers.create_timer("a", datetime(1960, 1, 1, tzinfo=UTC), "record")
