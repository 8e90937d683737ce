"""The app's time zone changes: what is stored goes by the new one, without a burst."""

from __future__ import annotations

import json
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from celery.schedules import crontab

from celery_dtimer import DistributedTimer
from celery_dtimer.declarations import StaticSchedule, declaration_of
from celery_dtimer.errors import FencedError
from celery_dtimer.model import Lease, to_datetime
from celery_dtimer.rezoning import Rezoning
from celery_dtimer.store import Store
from tests.conftest import MakeApp
from tests.integration.conftest import START_MS, MakeService, Service

UTC = timezone.utc


class Deployment:
    """A service whose timers are created, and whose beats start, with an app of some time zone."""

    def __init__(self, make_app: MakeApp, service: Service) -> None:
        self.make_app, self.service = make_app, service

    def timers(self, zone: str) -> DistributedTimer:
        """Return the API of an app in a time zone."""
        timers = DistributedTimer(self.make_app(timezone=zone))
        timers._shards = self.service.another_shards()
        return timers

    def start(self, zone: str, instance: str, **entries: Any) -> tuple[StaticSchedule, Lease]:
        """Start a beat of an app in a time zone, without its loop."""
        declaration = declaration_of(self.make_app(timezone=zone), "orders", entries)
        static = StaticSchedule(self.service.store, declaration)
        return static, Lease(instance, self.service.join(instance), 1e9)

    def deploy(self, zone: str, instance: str = "a", **entries: Any) -> int:
        """Let a beat do all that a new time zone asks for; return in how many steps."""
        static, lease = self.start(zone, instance, **entries)
        static.reconcile(lease)
        steps = 1
        while static.step(lease):
            steps += 1
        return steps


@pytest.fixture
def deployment(make_app: MakeApp, make_service: MakeService) -> Deployment:
    return Deployment(make_app, make_service())


def test_timers_that_name_no_zone_follow_the_apps(deployment: Deployment) -> None:
    timers = deployment.timers("UTC")
    deployment.deploy("UTC")
    timers.create_timer("default", "0 9 * * *", "record")
    timers.create_timer("own", "0 9 * * *", "record", timezone="UTC")
    timers.create_timer("paris", crontab(hour=9, minute=0), "record", timezone="Europe/Paris")
    timers.create_timer("interval", 10, "record")
    timers.create_timer("rounded", 7200, "record", relative=True)
    timers.create_timer("paused", "0 9 * * *", "record", args=[1])
    timers.pause_timer("paused")
    before = {timer.name: timer for timer in timers.get_timers()}
    deployment.deploy("Asia/Tokyo", "b")
    after = {timer.name: timer for timer in timers.get_timers()}
    for name in ("own", "paris", "interval"):
        assert after[name] == before[name]
    day = datetime(2025, 6, 16, tzinfo=UTC)
    assert before["default"].next_run_at == day + timedelta(hours=9)
    assert after["default"].next_run_at == day
    assert after["default"].schedule.timezone == "Asia/Tokyo"  # type: ignore[union-attr]
    assert after["rounded"].schedule.timezone == "Asia/Tokyo"  # type: ignore[union-attr]
    assert (after["paused"].status, after["paused"].args) == ("paused", [1])
    timers.resume_timer("paused")
    assert timers.get_timer("paused").next_run_at == day


def test_nothing_bursts_when_the_zone_changes(deployment: Deployment) -> None:
    """Each change of zone lets a daily run come at most once in a day, and never for the past."""
    timers = deployment.timers("UTC")
    deployment.deploy("UTC", "a")
    timers.create_timer("default", "0 * * * *", "record")
    for number, zone in enumerate(["Asia/Tokyo", "America/New_York", "Asia/Kathmandu", "UTC"]):
        deployment.deploy(zone, f"beat {number}")
        next_run_at = timers.get_timer("default").next_run_at
        assert next_run_at is not None
        assert next_run_at > to_datetime(deployment.service.clock())
    assert timers.get_timer("default").skips == {}


def test_a_run_that_is_due_when_the_zone_changes_is_counted(deployment: Deployment) -> None:
    timers = deployment.timers("UTC")
    deployment.deploy("UTC", "a")
    timers.create_timer("default", "0 16 * * *", "record")
    deployment.service.clock.advance(3600)
    deployment.deploy("Asia/Tokyo", "b")
    timer = timers.get_timer("default")
    assert timer.skips == {"superseded": 1}
    assert timer.next_run_at == datetime(2025, 6, 16, 7, tzinfo=UTC)


def test_what_does_not_run_gets_the_zone_and_is_not_woken(deployment: Deployment) -> None:
    timers = deployment.timers("UTC")
    deployment.deploy("UTC", "a")
    timers.create_timer("stopped", "0 9 * * *", "record")
    timers.stop_timer("stopped")
    deployment.deploy("Asia/Tokyo", "b")
    timer = timers.get_timer("stopped")
    assert timer.status == "stopped"
    timers.resume_timer("stopped")
    assert timers.get_timer("stopped").next_run_at == datetime(2025, 6, 16, tzinfo=UTC)


@pytest.mark.parametrize(
    "schedule", [{"at": START_MS}, {"solar": ["sunset", 48, 2]}, {"custom": "a.B"}, {"every": 100}]
)
def test_a_schedule_edited_by_hand_stops_nobody(
    deployment: Deployment, schedule: dict[str, Any]
) -> None:
    timers = deployment.timers("UTC")
    deployment.deploy("UTC", "a")
    id = timers.create_timer("edited", "0 9 * * *", "record")
    timers.create_timer("other", "0 9 * * *", "record")
    blob = {"name": "edited", "task": "record", "schedule": schedule, "zone_of": "orders"}
    definitions = deployment.service.keys("timer_definition", id)
    deployment.service.redis.set(definitions, json.dumps(blob))
    deployment.deploy("Asia/Tokyo", "b")
    assert timers.get_timer("other").next_run_at == datetime(2025, 6, 16, tzinfo=UTC)
    assert deployment.service.store.timezone_of("orders") == "Asia/Tokyo"


def test_static_timers_are_written_by_their_declaration(deployment: Deployment) -> None:
    entry = {"task": "t", "schedule": crontab(hour=9, minute=0)}
    deployment.deploy("UTC", "a", daily=entry)
    deployment.deploy("Asia/Tokyo", "b", daily=entry)
    timer = deployment.timers("UTC").get_timer("daily")
    assert timer.next_run_at == datetime(2025, 6, 16, tzinfo=UTC)


def test_many_timers_are_looked_at_in_steps(deployment: Deployment) -> None:
    timers = deployment.timers("UTC")
    deployment.deploy("UTC", "a")
    timers.create_timers(
        [{"name": f"{n}", "schedule": "0 9 * * *", "callback": "record"} for n in range(120)]
    )
    assert deployment.deploy("Asia/Tokyo", "b") == 3
    assert {timer.next_run_at for timer in timers.get_timers()} == {
        datetime(2025, 6, 16, tzinfo=UTC)
    }
    assert deployment.deploy("Asia/Tokyo", "c") == 1


def test_a_beat_of_another_app_changes_nothing(deployment: Deployment) -> None:
    timers = deployment.timers("UTC")
    deployment.deploy("UTC", "a")
    timers.create_timer("default", "0 9 * * *", "record")
    before = timers.get_timer("default")
    lease = Lease("b", deployment.service.join("b"), 1e9)
    for zone in ("Asia/Tokyo", "Europe/Paris"):
        rezoning = Rezoning(deployment.service.store, "billing", zone)
        rezoning.begin(lease)
        while rezoning.step(lease):
            pass
    assert timers.get_timer("default") == before


def test_an_old_beat_that_restarts_does_not_bring_its_zone_back(deployment: Deployment) -> None:
    timers = deployment.timers("UTC")
    deployment.deploy("UTC", "a")
    deployment.deploy("Asia/Tokyo", "b")
    timers.create_timer("default", "0 9 * * *", "record", timezone="Asia/Tokyo")
    deployment.deploy("UTC", "a")
    assert deployment.service.store.timezone_of("orders") == "Asia/Tokyo"


def test_a_timer_that_changes_meanwhile_is_looked_at_again(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    timers = deployment.timers("UTC")
    deployment.deploy("UTC", "a")
    timers.create_timer("default", "0 9 * * *", "record")
    static, lease = deployment.start("Asia/Tokyo", "b")
    static.reconcile(lease)
    replace = Store.replace

    def overtaken(store: Store, *args: Any, **options: Any) -> bool:
        monkeypatch.setattr(Store, "replace", replace)
        timers.update_timer("default", args=["meanwhile"])
        return replace(store, *args, **options)

    monkeypatch.setattr(Store, "replace", overtaken)
    assert static.step(lease)
    assert not static.step(lease)
    timer = timers.get_timer("default")
    assert (timer.args, timer.next_run_at) == (["meanwhile"], datetime(2025, 6, 16, tzinfo=UTC))


def test_what_cannot_be_read_is_left_alone(deployment: Deployment) -> None:
    timers = deployment.timers("UTC")
    deployment.deploy("UTC", "a")
    id = timers.create_timer("default", "0 9 * * *", "record")
    deployment.service.redis.set(deployment.service.keys("timer_definition", id), "nonsense")
    gone = timers.create_timer("gone", "0 9 * * *", "record")
    deployment.service.redis.delete(deployment.service.keys("timer_definition", gone))
    deployment.deploy("Asia/Tokyo", "b")
    assert deployment.service.store.timezone_of("orders") == "Asia/Tokyo"


def test_a_fenced_instance_notes_no_zone(deployment: Deployment) -> None:
    deployment.deploy("UTC", "a")
    store = deployment.service.store
    with pytest.raises(FencedError):
        store.note_timezone("a", 1, "orders", "Asia/Tokyo")
    assert store.timezone_of("orders") == "UTC"
