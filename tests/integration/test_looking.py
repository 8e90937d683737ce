"""Looking back and ahead: why, preview, counts and revisions, as a user asks for them."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from celery import Celery
from celery.schedules import crontab
from dateutil.rrule import DAILY, rrule

from celery_dtimer import ConflictError, DistributedTimer, InvalidTimerError, TimerNotFoundError
from celery_dtimer.model import to_datetime
from tests.conftest import MakeApp
from tests.integration.conftest import START_MS
from tests.integration.test_timers import Timers

UTC = timezone.utc
START = to_datetime(START_MS)
NEW_YORK = ZoneInfo("America/New_York")


@pytest.fixture
def timers(make_app: MakeApp) -> Iterator[Timers]:
    made = Timers(make_app())
    yield made
    assert not made.check_consistency()
    made.store.close()


def seconds(moments: list[datetime]) -> list[float]:
    return [(moment - START).total_seconds() for moment in moments]


# ------------------------------------------------------------------ why


def test_why_tells_what_was_sent_and_what_was_not(timers: Timers) -> None:
    id = timers.create_timer("a", 10, "record")
    timers.fire()
    timers.clock.advance(35)
    timers.fire()
    assert "run 1, " in timers.why("a", START + timedelta(seconds=10))
    assert "another run stood for it" in timers.why(id, START + timedelta(seconds=20))
    assert "still to come" in timers.why("a", START + timedelta(seconds=40))
    assert "no run was scheduled" in timers.why("a", START + timedelta(seconds=15))
    assert "created" in timers.why("a", START - timedelta(seconds=15))
    timers.pause_timer("a")
    assert "is paused" in timers.why("a", START + timedelta(seconds=40))
    timers.clock.advance(20)
    timers.resume_timer("a")
    assert "was paused" in timers.why("a", START + timedelta(seconds=50))


@pytest.mark.parametrize(("every", "late"), [(0.5, 5), (0.1, 3)])
def test_why_finds_the_run_itself_among_close_ones(
    timers: Timers, every: float, late: float
) -> None:
    timers.create_timer("a", every, "record")
    timers.fire()
    timers.clock.advance(late)
    timers.pause_timer("a")
    timers.resume_timer("a")
    for run in range(1, round(late / every)):
        moment = START + timedelta(seconds=every * run)
        assert "was paused" in timers.why("a", moment), run


def test_what_has_expired_is_not_triggered(timers: Timers) -> None:
    timers.create_timer("a", 10, "record", expires=START + timedelta(seconds=25))
    timers.clock.advance(24)
    timers.trigger_timer("a")
    timers.clock.advance(1)
    with pytest.raises(InvalidTimerError, match="'a' has nothing to send: it has expired"):
        timers.trigger_timer("a")


def test_why_takes_a_datetime_and_the_apps_zone(make_app: MakeApp) -> None:
    timers = Timers(make_app(timezone="Asia/Tokyo"))
    timers.create_timer("a", 10, "record")
    local = (START + timedelta(seconds=10)).astimezone(ZoneInfo("Asia/Tokyo"))
    assert "still to come" in timers.why("a", local.replace(tzinfo=None))
    with pytest.raises(InvalidTimerError, match=r"^moment="):
        timers.why("a", "yesterday")  # type: ignore[arg-type]
    with pytest.raises(TimerNotFoundError):
        timers.why("nobody", local)
    timers.store.close()


def test_why_explains_a_timer_that_cannot_be_read(timers: Timers) -> None:
    id = timers.create_timer("a", 10, "record")
    timers.store.base.client.set(timers.store.base.keys("timer_definition", id), "nonsense")
    assert "can not be read" in timers.why(id, START + timedelta(seconds=10))
    timers.store.base.client.delete(timers.store.base.keys("timer_definition", id))
    assert "can not be read" in timers.why(id, START + timedelta(seconds=10))
    timers.delete_timer(id)


def test_counts_are_those_of_the_service(timers: Timers) -> None:
    assert timers.get_counts() == (0, {}, 0)
    timers.create_timers([{"name": n, "schedule": 10, "callback": "record"} for n in "abc"])
    timers.clock.advance(30)
    timers.fire()
    timers.trigger_timer("a")
    timers.fire()
    counts = timers.get_counts()
    assert (counts.sent, counts.skips) == (4, {"coalesced": 6})
    assert timers.get_timer("a").skips == {"coalesced": 2}
    assert timers.get_timer("a").skipped == 2


# ------------------------------------------------------------------ preview


@pytest.mark.parametrize(
    ("schedule", "keywords", "expected"),
    [
        (10, {}, [10, 20, 30]),
        (timedelta(minutes=1), {"start_at": START + timedelta(seconds=5)}, [5, 65, 125]),
        (10, {"end_at": START + timedelta(seconds=20)}, [10, 20]),
        (10, {"max_runs": 1}, [10]),
        (START + timedelta(seconds=7), {}, [7]),
        ("* * * * *", {}, [20, 80, 140]),
        ("*/30 * * * * *", {}, [20, 50, 80]),
        ("@hourly", {}, [3200, 6800, 10400]),
        (crontab(minute="*"), {}, [20, 80, 140]),
        (crontab(minute="*"), {"jitter": 30}, [20, 80, 140]),
    ],
    ids=repr,
)
def test_a_schedule_is_previewed_without_redis(
    make_app: MakeApp, schedule: Any, keywords: dict[str, Any], expected: list[float]
) -> None:
    timers = Timers(make_app(dtimer_redis_url="redis://127.0.0.1:1/0"))
    assert seconds(timers.preview(schedule, 3, after=START, **keywords)) == expected


def test_a_schedule_is_previewed_where_no_redis_is_named() -> None:
    timers = DistributedTimer(Celery("orders", broker="amqp://guest@localhost//"))
    assert seconds(timers.preview(20, 2, after=START, start_at=START)) == [20, 40]


def test_a_preview_without_a_moment_begins_now(make_app: MakeApp) -> None:
    timers = Timers(make_app(dtimer_redis_url="redis://127.0.0.1:1/0"))
    before = datetime.now(UTC)
    first, *others = timers.preview(60)
    assert before + timedelta(seconds=59) <= first <= datetime.now(UTC) + timedelta(seconds=61)
    assert len(others) == 9


def test_moments_are_shown_in_the_zone_that_counts(make_app: MakeApp) -> None:
    timers = Timers(make_app(timezone="Asia/Tokyo"))
    after = datetime(2026, 3, 8, 0, 0, tzinfo=NEW_YORK)
    for keywords in ({}, {"dst": "cron"}, {"dst": "shift"}, {"dst": "skip"}):
        shown = [
            moment.isoformat()
            for moment in timers.preview(
                "30 2 * * *", 2, after=after, timezone="America/New_York", **keywords
            )
        ]
        expected = {
            "skip": ["2026-03-09T02:30:00-04:00", "2026-03-10T02:30:00-04:00"],
            "shift": ["2026-03-08T03:30:00-04:00", "2026-03-09T02:30:00-04:00"],
        }
        at_the_gaps_end = ["2026-03-08T03:00:00-04:00", "2026-03-09T02:30:00-04:00"]
        assert shown == expected.get(keywords.get("dst", ""), at_the_gaps_end)
    (moment,) = timers.preview("0 9 * * *", 1, after=after)
    assert (moment.hour, moment.utcoffset()) == (9, timedelta(hours=9))


def test_a_timer_is_previewed_from_its_next_run(timers: Timers) -> None:
    id = timers.create_timer("a", 10, "record", max_runs=4)
    assert seconds(timers.preview("a")) == [10, 20, 30, 40]
    assert seconds(timers.preview(id, 2)) == [10, 20]
    assert seconds(timers.preview(timers.get_timer("a"), 2)) == [10, 20]
    timers.clock.advance(10)
    timers.fire()
    timers.clock.advance(3)
    assert seconds(timers.preview("a")) == [20, 30, 40]
    assert seconds(timers.preview("a", after=START + timedelta(seconds=20))) == [30, 40]


def test_a_run_that_is_owed_comes_first(timers: Timers) -> None:
    timers.create_timer("a", 10, "record")
    timers.clock.advance(25)
    assert seconds(timers.preview("a", 3)) == [10, 30, 40]
    timers.update_timer("a", coalesce=False)
    assert seconds(timers.preview("a", 3)) == [10, 20, 30]


def test_a_far_moment_is_previewed_at_once(timers: Timers) -> None:
    timers.create_timer("a", 1, "record")
    after = START + timedelta(days=3650)
    assert seconds(timers.preview("a", 1, after=after)) == [3650 * 86400 + 1]


def test_what_does_not_run_has_no_moments(timers: Timers) -> None:
    timers.create_timer("a", 10, "record")
    timers.stop_timer("a")
    assert timers.preview("a") == []
    timers.resume_timer("a")
    timers.pause_timer("a")
    timers.clock.advance(25)
    assert seconds(timers.preview("a", 2)) == [30, 40]
    timers.create_timer("once", START, "record")
    timers.fire()
    assert timers.preview("once") == []


def test_a_timer_may_be_named_like_a_schedule_only_by_its_id(timers: Timers) -> None:
    id = timers.create_timer("0 0 1 1 *", 10, "record")
    assert timers.preview("0 0 1 1 *", 1, after=START)[0].day == 1
    assert seconds(timers.preview(id, 1)) == [10]


@pytest.mark.parametrize(
    ("schedule", "keywords", "field"),
    [
        ("61 * * * *", {}, "minute"),
        (10, {"n": 0}, "n"),
        (10, {"n": True}, "n"),
        (10, {"after": "now"}, "after"),
        (10, {"timezone": "Mars/Olympus"}, "timezone"),
        (10, {"dst": "skip"}, "dst"),
        (10, {"queue": "q"}, "queue"),
        (10, {"max_runs": 0}, "max_runs"),
        ("0 25 1 1 1", {}, "hour"),
        (object(), {}, "schedule"),
    ],
)
def test_what_cannot_be_previewed_is_refused_by_name(
    timers: Timers, schedule: Any, keywords: dict[str, Any], field: str
) -> None:
    with pytest.raises(InvalidTimerError, match=f"^{field}="):
        timers.preview(schedule, **keywords)


def test_a_timer_has_its_own_bounds(timers: Timers) -> None:
    timers.create_timer("a", 10, "record")
    with pytest.raises(InvalidTimerError, match=r"^max_runs=3"):
        timers.preview("a", max_runs=3)


def test_a_timer_that_is_not_there_is_not_found(timers: Timers) -> None:
    with pytest.raises(TimerNotFoundError, match="nobody"):
        timers.preview("nobody")


# ------------------------------------------------------------------ policies, as users give them


def test_what_a_timer_is_given_is_what_it_shows(timers: Timers) -> None:
    timers.create_timer(
        "a",
        rrule(DAILY, dtstart=START.replace(tzinfo=None), byhour=9, byminute=0, bysecond=0),
        "record",
        timezone="Europe/Paris",
        start_at=START + timedelta(days=1),
        end_at=START + timedelta(days=10),
        max_runs=5,
        jitter=timedelta(seconds=30),
        coalesce=False,
        misfire_grace_time=3600,
        max_catch_up=7,
        shards=2,
    )
    policy = timers.get_timer("a").policy
    day = 86_400_000
    assert (policy.start_ms, policy.end_ms) == (START_MS + day, START_MS + 10 * day)
    assert (policy.max_runs, policy.jitter_ms, policy.coalesce) == (5, 30_000, False)
    assert (policy.grace_ms, policy.max_catch_up, policy.shards) == (3_600_000, 7, 2)
    timers.update_timer("a", max_runs=None, jitter=5, args=[1])
    policy = timers.get_timer("a").policy
    assert (policy.max_runs, policy.jitter_ms, policy.shards) == (None, 5_000, 2)


def test_other_bounds_keep_the_phase_of_an_interval(timers: Timers) -> None:
    timers.create_timer("a", 10, "record")
    timers.clock.advance(3)
    timer = timers.update_timer("a", end_at=START + timedelta(seconds=35))
    assert timer.next_run_at == START + timedelta(seconds=10)
    assert seconds(timers.preview("a")) == [10, 20, 30]
    timer = timers.update_timer("a", start_at=START + timedelta(seconds=15))
    assert timer.next_run_at == START + timedelta(seconds=15)


def test_a_timer_that_has_finished_goes_on_with_a_later_end(timers: Timers) -> None:
    timers.create_timer("a", 10, "record", max_runs=1)
    timers.clock.advance(10)
    timers.fire()
    timer = timers.get_timer("a")
    assert (timer.status, timer.reason, timer.total_run_count) == ("stopped", "finished", 1)
    timers.create_timer("a", 10, "record", max_runs=1)
    assert timers.get_timer("a").status == "stopped"
    timers.create_timer("a", 10, "record", max_runs=2)
    timer = timers.get_timer("a")
    assert (timer.status, timer.total_run_count) == ("active", 1)
    assert timer.created_at == START


def test_a_timer_whose_end_has_passed_is_stored_and_stopped(timers: Timers) -> None:
    timers.create_timer("a", 10, "record", end_at=START - timedelta(days=1))
    timer = timers.get_timer("a")
    assert (timer.status, timer.reason, timer.next_run_at) == ("stopped", "ended", None)


@pytest.mark.parametrize(
    ("schedule", "keywords", "field"),
    [
        (START, {"max_runs": 2}, "max_runs"),
        (START, {"start_at": START}, "start_at"),
        (10, {"jitter": 10}, "jitter"),
        (10, {"shards": 0}, "shards"),
        (10, {"end_at": START, "start_at": START + timedelta(1)}, "end_at"),
        (10, {"misfire_grace_time": 0.1}, "misfire_grace_time"),
        (10, {"dst": "both"}, "dst"),
        ("0 0 * * *", {"dst": "sometimes"}, "dst"),
        ("0 0 * * *", {"relative": True}, "relative"),
    ],
)
def test_a_policy_that_cannot_be_is_refused_and_nothing_is_stored(
    timers: Timers, schedule: Any, keywords: dict[str, Any], field: str
) -> None:
    with pytest.raises(InvalidTimerError, match=f"^{field}="):
        timers.create_timer("a", schedule, "record", **keywords)
    with pytest.raises(InvalidTimerError, match=rf"timers\[0\].*{field}="):
        timers.create_timers(
            [{"name": "a", "schedule": schedule, "callback": "record", **keywords}]
        )
    assert timers.get_timers() == []


# ------------------------------------------------------------------ revisions


def test_a_change_based_on_the_stored_revision_is_made(timers: Timers) -> None:
    timers.create_timer("a", 10, "record")
    before = timers.get_timer("a").revision
    after = timers.update_timer("a", expected_revision=before, args=[1]).revision
    assert after != before
    assert timers.update_timer("a", expected_revision=after, args=[1]).revision == after


def test_a_change_based_on_another_revision_is_a_conflict_that_tells_the_current_one(
    timers: Timers,
) -> None:
    timers.create_timer("a", 10, "record")
    before = timers.get_timer("a").revision
    current = timers.update_timer("a", args=[1])
    with pytest.raises(ConflictError, match="somebody has changed it") as exc:
        timers.update_timer("a", expected_revision=before, args=[2])
    assert exc.value.revision == current.revision
    assert timers.get_timer("a") == current


def test_of_two_changes_based_on_one_revision_one_is_made(timers: Timers) -> None:
    timers.create_timer("a", 10, "record")
    revision = timers.get_timer("a").revision
    other = Timers(timers.app)
    replace = timers.store.replace

    def overtaken(*args: Any) -> bool:
        other.update_timer("a", args=["other"])
        return replace(*args)

    timers.store.replace = overtaken  # type: ignore[method-assign]
    with pytest.raises(ConflictError) as exc:
        timers.update_timer("a", expected_revision=revision, args=["own"])
    assert exc.value.revision == other.get_timer("a").revision
    assert other.get_timer("a").args == ["other"]
    other.store.close()


def test_a_revision_is_a_text(timers: Timers) -> None:
    timers.create_timer("a", 10, "record")
    with pytest.raises(InvalidTimerError, match=r"^expected_revision="):
        timers.update_timer("a", expected_revision=3, args=[1])  # type: ignore[arg-type]
