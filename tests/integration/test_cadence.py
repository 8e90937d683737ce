"""Cadences that nothing moves: restarts, slow sending, time zones, many beats at once."""

from __future__ import annotations

import itertools
from collections import Counter
from datetime import datetime, timedelta, timezone
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from celery.schedules import crontab

from celery_dtimer import DistributedTimer
from celery_dtimer.declarations import StaticSchedule, declaration_of
from celery_dtimer.model import to_datetime
from celery_dtimer.planning import jitter_of
from celery_dtimer.policy import Policy
from celery_dtimer.schedules import Crontab
from tests.conftest import MakeApp
from tests.integration.conftest import SECOND, START_MS, Beat, Broker, Service

UTC = timezone.utc
HOUR = 3600


def leave(beat: Beat) -> None:
    """Let a beat hand its timers over and go."""
    while beat.store.leave(beat.lease.instance, beat.lease.epoch).more:
        pass
    beat.store.close()


# ------------------------------------------------------------------ restarts


def test_an_interval_goes_on_though_its_beat_restarts_more_often(
    service: Service, broker: Broker
) -> None:
    service.add(every=30)
    for restart in range(6):
        beat = Beat(service, broker, f"beat {restart}")
        while service.store.reap(beat.instance, beat.lease.epoch).more:
            pass
        for _ in range(20):
            service.clock.advance(1)
            beat.step()
        leave(beat)
    assert broker.slots() == [30, 60, 90, 120]


@pytest.mark.parametrize("down", [1, 40, HOUR])
def test_after_a_standstill_the_old_grid_goes_on(
    service: Service, broker: Broker, down: int
) -> None:
    service.add(every=30)
    leave(Beat(service, broker, "first"))
    service.clock.advance(down)
    beat = Beat(service, broker, "second")
    while service.store.reap("second", beat.lease.epoch).more:
        pass
    for _ in range(200):
        service.clock.advance(1)
        beat.step()
    assert all(slot % 30 == 0 for slot in broker.slots())
    assert broker.slots()[-1] == (down + 200) // 30 * 30
    beat.store.close()


# ------------------------------------------------------------------ drift


@pytest.mark.parametrize(
    ("every", "latency_ms", "seconds"), [(60, 300, HOUR), (0.1, 3, 60), (1, 999, 60)]
)
def test_what_sending_takes_moves_no_run(
    beat: Beat, broker: Broker, every: float, latency_ms: int, seconds: int
) -> None:
    clock = beat.service.clock
    late: list[float] = []

    def take_time(run: Any) -> None:
        late.append(clock.now_ms - run.scheduled_ms)
        clock.now_ms += latency_ms

    broker.on_send = take_time
    beat.service.add(every=every)
    while clock.now_ms < START_MS + seconds * SECOND:
        done = beat.step()
        clock.advance(max(done.next_in or 0.0, 0.001))
        beat.service.redis.zadd(beat.service.keys("service_instances"), {"a": clock()})
    count = round(seconds / every)
    assert abs(len(broker.sent) - count) <= 1
    slots = broker.slots()
    assert slots == [pytest.approx((number + 1) * every) for number in range(len(slots))]
    assert max(late) < 1000


def test_a_run_by_hand_moves_no_run(beat: Beat, broker: Broker) -> None:
    timer = beat.service.add(every=10)
    for _ in range(8):
        beat.service.clock.advance(4)
        beat.service.trigger(timer)
        beat.step()
    by_itself = [
        (run.scheduled_ms - START_MS) / SECOND for run in broker.sent if run.identity == timer.id
    ]
    assert by_itself == [10, 20, 30]


# ------------------------------------------------------------------ the app's time zone

ZONES = [
    *(None, "UTC", "Asia/Kolkata", "America/St_Johns", "Pacific/Apia", "Asia/Kathmandu"),
]


@pytest.mark.parametrize("zone", ZONES)
@pytest.mark.parametrize("enable_utc", [True, False])
def test_cadences_are_the_same_whatever_the_apps_zone(
    make_app: MakeApp, service: Service, broker: Broker, enable_utc: bool, zone: str | None
) -> None:
    """Also after a restart, which reads back what is stored."""
    app = make_app(enable_utc=enable_utc, timezone=zone)
    timers = DistributedTimer(app)
    timers._shards = service.another_shards()
    start = to_datetime(START_MS)
    entries = {
        "interval": {"task": "t", "schedule": 20.0},
        "minutes": {"task": "t", "schedule": crontab(minute="*/15")},
    }
    beat = Beat(service, broker, "first")
    StaticSchedule(service.store, declaration_of(app, "orders", entries)).reconcile(beat.lease)
    timers.create_timer("once", start + timedelta(seconds=90), "t")
    local = (start + timedelta(seconds=100)).astimezone(app.timezone).replace(tzinfo=None)
    timers.create_timer("once, by the app's clocks", local, "t")
    timers.create_timer("daily", crontab(hour=9, minute=0), "t")
    _go_on(beat, 1000)
    leave(beat)
    beat = Beat(service, broker, "second")
    StaticSchedule(service.store, declaration_of(app, "orders", entries)).reconcile(beat.lease)
    while service.store.reap("second", beat.lease.epoch).more:
        pass
    _go_on(beat, 1000)
    assert broker.slots("interval") == list(range(20, 2001, 20))
    # Every zone here is off UTC by whole quarters of an hour.
    assert broker.slots("minutes") == [500, 1400]
    assert broker.slots("once") == [90]
    assert broker.slots("once, by the app's clocks") == [100]
    daily = timers.get_timer("daily").next_run_at
    assert daily is not None
    assert daily.astimezone(app.timezone).strftime("%H:%M") == "09:00"
    assert start < daily <= start + timedelta(days=1)
    beat.store.close()


def _go_on(beat: Beat, seconds: int) -> None:
    for _ in range(seconds // 10):
        beat.service.clock.advance(10)
        beat.service.redis.zadd(
            beat.service.keys("service_instances"), {beat.instance: beat.service.clock()}
        )
        beat.step()


def test_a_daily_run_is_at_nine_on_every_date_of_a_year_as_stored(
    beat: Beat, broker: Broker
) -> None:
    """What is stored and read back for each run, across both changes of clocks."""
    zone, clock = ZoneInfo("America/New_York"), beat.service.clock
    clock.now_ms = round(datetime(2026, 2, 1, tzinfo=zone).timestamp()) * SECOND
    beat.register()
    timer = beat.service.add(schedule=Crontab("0 9 * * *", "America/New_York"))
    for _ in range(300):
        due_ms = beat.service.state(timer.id).due_ms
        assert due_ms is not None
        clock.now_ms = due_ms
        beat.step()
    sent = [to_datetime(run.scheduled_ms).astimezone(zone) for run in broker.sent]
    assert {moment.strftime("%H:%M:%S") for moment in sent} == {"09:00:00"}
    days = [moment.date() for moment in sent]
    assert days == [datetime(2026, 2, 1).date() + timedelta(days=n) for n in range(300)]  # noqa: DTZ001


# ------------------------------------------------------------------ many at once


def test_of_overdue_timers_each_runs_once_whichever_beats_start(service: Service) -> None:
    definitions = [service.define(f"t{n}", every=HOUR) for n in range(2000)]
    service.store.save(definitions)
    service.clock.advance(3 * HOUR)
    broker = Broker()
    beats = [Beat(service, broker, name) for name in "abc"]
    while any(
        [service.store.reap(beat.instance, beat.lease.epoch).more for beat in beats]  # noqa: C419
    ):
        pass
    for beat in itertools.islice(itertools.cycle(beats), 300):
        service.store.rebalance(beat.instance, beat.lease.epoch)
        beat.step()
    assert Counter(run.definition.name for run in broker.sent) == {
        definition.name: 1 for definition in definitions
    }
    assert {beat.instance for beat in beats} == {run.instance for run in broker.sent}
    for beat in beats:
        beat.store.close()


def test_jitter_spreads_what_would_be_due_at_once(service: Service) -> None:
    policy = Policy(jitter_ms=600_000)
    timers = [
        service.define(f"t{n}", schedule=Crontab("0 * * * *"), policy=policy) for n in range(500)
    ]
    service.store.save(timers)
    due_ms = service.state(timers[0].id).due_ms
    assert due_ms is not None
    minutes = Counter(jitter_of(timer, due_ms) // 60_000 for timer in timers)
    assert len(minutes) == 10
    assert max(minutes.values()) < 100
    assert {service.state(timer.id).at_ms for timer in timers} == {
        due_ms + jitter_of(timer, due_ms) for timer in timers
    }
