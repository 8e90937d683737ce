"""Entries of ``beat_schedule`` in every form: what they become, and what a bad one costs."""

from __future__ import annotations

import logging
import sys
from datetime import datetime, timedelta, timezone
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from celery import Celery
from celery.beat import BeatLazyFunc, ScheduleEntry
from celery.schedules import crontab, schedule, solar
from kombu import Queue

from celery_dtimer import DistributedTimer
from celery_dtimer.declarations import (
    Declaration,
    StaticSchedule,
    declaration_of,
    declare,
    declared,
    definition_of,
)
from celery_dtimer.errors import InvalidTimerError
from celery_dtimer.model import Lease, Timer, timer_id, to_datetime, to_ms
from celery_dtimer.schedules import Crontab, Interval, OneShot, Solar
from tests.conftest import MakeApp
from tests.integration.conftest import START_MS, Service
from tests.naming import named

UTC = timezone.utc
GOOD: dict[str, Any] = {"task": "record", "schedule": 10}


@pytest.fixture
def app() -> Celery:
    made = Celery("shop", set_as_current=False)
    made.conf.timezone = "UTC"
    return made


class Beat:
    """An instance whose code declares these entries."""

    def __init__(self, service: Service, app: Celery, entries: dict[str, Any]) -> None:
        self.service = service
        self.declaration: Declaration = declaration_of(app, "shop", entries)
        self.lease = Lease("beat", service.join("beat"), 1e9)
        StaticSchedule(service.store, self.declaration).reconcile(self.lease)

    def timers(self) -> dict[str, Timer]:
        """Return what is stored, by name."""
        store = self.service.store
        return {timer.name: timer for timer in store.timers(store.timer_ids())}


# ------------------------------------------------------------------ good ones


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        ({"schedule": 30}, Interval(30_000)),
        ({"schedule": 0.5}, Interval(500)),
        ({"schedule": timedelta(minutes=1)}, Interval(60_000)),
        ({"schedule": timedelta(hours=1), "relative": True}, Interval(3_600_000, True)),
        ({"schedule": schedule(30, relative=True)}, Interval(30_000, True)),
        ({"schedule": crontab(minute=0, hour="*/2")}, Crontab("0 */2 * * *")),
        ({"schedule": "0 3 * * *", "timezone": "Asia/Tokyo"}, Crontab("0 3 * * *", "Asia/Tokyo")),
        ({"schedule": solar("sunset", 48.8, 2.3)}, Solar("sunset", 48.8, 2.3)),
        ({"schedule": datetime(2030, 1, 1, tzinfo=UTC)}, OneShot(1_893_456_000_000)),
    ],
    ids=named,
)
def test_schedules_mean_what_they_mean_in_celery(app: Celery, fields: Any, rule: Any) -> None:
    assert definition_of(app, "n", {**GOOD, **fields}).schedule == rule


def test_a_crontab_follows_the_apps_zone(app: Celery) -> None:
    app.conf.timezone = "Asia/Tokyo"
    found = definition_of(app, "n", {**GOOD, "schedule": crontab(hour=3, minute=0)})
    assert found.schedule == Crontab("0 3 * * *", "Asia/Tokyo")


@pytest.mark.parametrize("nothing", [None, (), [], {}])
def test_what_is_left_empty_is_empty(app: Celery, nothing: Any) -> None:
    fields = dict.fromkeys(("args", "kwargs", "options", "description"), nothing)
    found = definition_of(app, "n", {**GOOD, **fields})
    assert (found.args, found.kwargs, found.options, found.description) == ((), {}, {}, "")


def test_an_entry_of_celerys_own_class_is_read(app: Celery) -> None:
    entry = ScheduleEntry(
        "n", "record", schedule=schedule(10, app=app), args=(1,), options={"queue": "q"}, app=app
    )
    found = definition_of(app, "n", entry)
    assert (found.task, found.schedule, found.args) == ("record", Interval(10_000), (1,))
    assert found.options == {"queue": "q"}


def test_the_last_run_that_is_stated_counts_for_a_new_timer(service: Service, app: Celery) -> None:
    last_run_at = to_datetime(START_MS - 4_000)
    naive = last_run_at.astimezone(ZoneInfo("UTC")).replace(tzinfo=None)
    entries = {
        "aware": {**GOOD, "last_run_at": last_run_at},
        "naive": {**GOOD, "last_run_at": naive, "total_run_count": 7},
    }
    timers = Beat(service, app, entries).timers()
    for name in entries:
        assert to_ms(timers[name].next_run_at or last_run_at) == START_MS + 6_000


UNSTORABLE: list[dict[str, Any]] = [
    {"kwargs": {"now": BeatLazyFunc(lambda: 5)}},
    {"args": (timedelta(1),)},
    {"kwargs": {"ids": {1, 2}}},
    {"options": {"queue": Queue("q")}},
]


@pytest.mark.parametrize("fields", UNSTORABLE, ids=named)
def test_what_only_the_code_has_stays_there(service: Service, app: Celery, fields: Any) -> None:
    beat = Beat(service, app, {"bound": {**GOOD, **fields}, "plain": GOOD})
    assert beat.declaration.bound.keys() == {"bound"}
    timer = beat.timers()["bound"]
    assert (timer.status, timer.args, timer.kwargs, timer.options) == ("active", [], {}, {})


def test_what_only_the_code_has_is_changed_there(
    service: Service, app: Celery, make_app: MakeApp
) -> None:
    Beat(service, app, {"bound": {**GOOD, "kwargs": {"now": BeatLazyFunc(lambda: 5)}}})
    timers = DistributedTimer(make_app())
    with pytest.raises(InvalidTimerError, match="change it there"):
        timers.update_timer("bound", schedule=20)
    timers.pause_timer("bound")
    assert timers.get_timer("bound").status == "paused"


def test_a_static_timer_that_is_changed_or_deleted_by_hand(
    service: Service, app: Celery, make_app: MakeApp
) -> None:
    Beat(service, app, {"a": GOOD, "b": GOOD})
    timers = DistributedTimer(make_app())
    assert timers.update_timer("a", args=[1]).source == "shop"
    timers.pause_timer("a")
    timers.delete_timer("b")
    beat = Beat(service, app, {"a": GOOD, "b": GOOD})
    assert (beat.timers()["a"].args, beat.timers()["a"].status) == ([], "paused")
    assert beat.timers()["b"].status == "active"


# ------------------------------------------------------------------ bad ones

BAD: dict[str, tuple[Any, str]] = {
    "not a dict": ("record", "entry='record'"),
    "nothing": (None, "entry=None"),
    "no task": ({"schedule": 10}, "task=None"),
    "empty task": ({**GOOD, "task": ""}, "task=''"),
    "task of a wrong type": ({**GOOD, "task": print}, "task="),
    "no schedule": ({"task": "record"}, "schedule=None"),
    "schedule None": ({**GOOD, "schedule": None}, "schedule=None"),
    "negative": ({**GOOD, "schedule": -1}, "schedule=-1"),
    "schedule of a wrong type": ({**GOOD, "schedule": object()}, "schedule="),
    "impossible date": ({**GOOD, "schedule": "0 0 31 4 *"}, "never occurs"),
    "empty minute": ({**GOOD, "schedule": crontab(minute=[])}, "minute=[]"),
    "unknown key": ({**GOOD, "colour": "red"}, "field='colour'"),
    "key that is no str": ({**GOOD, 5: "red", "colour": "red"}, "field=5"),
    "args as text": ({**GOOD, "args": "ab"}, "args='ab'"),
    "kwargs as list": ({**GOOD, "kwargs": [1]}, "kwargs=[1]"),
    "options as list": ({**GOOD, "options": [1]}, "options=[1]"),
    "wrong option": ({**GOOD, "options": {"expires": "60"}}, "options['expires']='60'"),
    "misspelt option": ({**GOOD, "options": {"quue": "a"}}, "option='quue'"),
    "description of a wrong type": ({**GOOD, "description": 5}, "description=5"),
    "unknown zone": ({**GOOD, "schedule": "0 3 * * *", "timezone": "No"}, "timezone='No'"),
    "last run of a wrong type": ({**GOOD, "last_run_at": "today"}, "last_run_at='today'"),
    "too large": ({**GOOD, "args": ["x" * 2**20]}, "at most 1048576"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_entry_is_logged_listed_as_broken_and_stops_no_other(
    service: Service, app: Celery, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    entry, said = BAD[name]
    with caplog.at_level(logging.ERROR):
        timers = Beat(service, app, {"first": GOOD, name: entry, "last": GOOD}).timers()
    assert (timers["first"].status, timers["last"].status) == ("active", "active")
    assert timers[name].status == "broken"
    assert said in (timers[name].reason or "")
    (line,) = [record.getMessage() for record in caplog.records]
    assert repr(name) in line
    assert said in line


def test_all_bad_entries_at_once_leave_the_good_ones_alone(service: Service, app: Celery) -> None:
    entries = {name: entry for name, (entry, _) in BAD.items()}
    timers = Beat(service, app, {**entries, **{f"good {n}": GOOD for n in range(5)}}).timers()
    assert {timer.name for timer in timers.values() if timer.status == "broken"} == BAD.keys()


def test_entries_that_are_spoilt_at_a_restart_and_mended_at_the_next(
    service: Service, app: Celery
) -> None:
    """Their names exist by then, as timers that run; and as broken ones."""
    good = dict.fromkeys([*BAD, "good"], GOOD)
    Beat(service, app, good)
    assert service.store.pending_count() == len(good)
    due = service.state(timer_id("good")).due_ms
    service.clock.advance(3)
    bad = {name: entry for name, (entry, _) in BAD.items()}
    for _ in range(2):  # broken again, too
        timers = Beat(service, app, {**bad, "good": GOOD}).timers()
        assert {name for name, timer in timers.items() if timer.status == "broken"} == BAD.keys()
        for name, (_, said) in BAD.items():
            assert said in (timers[name].reason or "")
        assert service.state(timer_id("good")).due_ms == due
    timers = Beat(service, app, good).timers()
    assert {timer.status for timer in timers.values()} == {"active"}
    assert service.store.pending_count() == len(good)


@pytest.mark.parametrize("name", [5, None, b"bytes", ("a",)])
def test_a_name_that_is_no_str_is_broken_under_what_it_looks_like(
    service: Service, app: Celery, name: Any
) -> None:
    timers = Beat(service, app, {name: GOOD, "good": GOOD}).timers()
    assert timers[str(name)].status == "broken"
    assert timers["good"].status == "active"


@pytest.mark.parametrize("name", ["", "a:b", "{x}", "*?[]", "new\nline", "\x00", "\ud800", "🎉"])
def test_any_name_will_do_also_for_a_broken_one(service: Service, app: Celery, name: str) -> None:
    assert Beat(service, app, {name: GOOD}).timers()[name].status == "active"
    assert Beat(service, app, {name: None}).timers()[name].status == "broken"


def test_a_sun_that_cannot_be_computed_here_breaks_its_entry_alone(
    service: Service, app: Celery, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ephem", None)
    entries = {"sun": {**GOOD, "schedule": Solar("sunset", 48.8, 2.3)}, "good": GOOD}
    timers = Beat(service, app, entries).timers()
    assert timers["sun"].status == "broken"
    assert "celery-dtimer[solar]" in (timers["sun"].reason or "")
    assert timers["good"].status == "active"


def test_a_task_that_nobody_knows_is_just_a_name(app: Celery) -> None:
    assert definition_of(app, "n", {**GOOD, "task": "no.such.task"}).task == "no.such.task"


def test_a_broken_entry_that_is_mended_runs(service: Service, app: Celery) -> None:
    Beat(service, app, {"n": {**GOOD, "schedule": -1}})
    timer = Beat(service, app, {"n": GOOD}).timers()["n"]
    assert (timer.status, timer.reason) == ("active", None)


def test_a_good_entry_that_is_spoilt_is_set_aside(service: Service, app: Celery) -> None:
    Beat(service, app, {"n": GOOD})
    assert Beat(service, app, {"n": {**GOOD, "schedule": -1}}).timers()["n"].status == "broken"
    assert service.store.pending_count() == 0


def test_a_broken_entry_that_is_removed_is_gone(service: Service, app: Celery) -> None:
    Beat(service, app, {"n": None})
    assert Beat(service, app, {}).timers() == {}


def test_an_entry_that_stays_broken_is_not_written_again(service: Service, app: Celery) -> None:
    Beat(service, app, {"n": None})
    before = service.state(timer_id("n"))
    service.clock.advance(5)
    Beat(service, app, {"n": None})
    assert service.state(timer_id("n")) == before


# ------------------------------------------------------------------ the whole schedule


def test_the_schedule_is_the_settings_and_what_was_declared_beside_them(app: Celery) -> None:
    app.conf.beat_schedule = {"a": GOOD, "b": GOOD}
    declare(app, "b", {**GOOD, "schedule": 20})
    declare(app, "c", GOOD)
    assert declared(app) == {"a": GOOD, "b": {**GOOD, "schedule": 20}, "c": GOOD}
    assert app.conf.beat_schedule == {"a": GOOD, "b": GOOD}
    assert declared(Celery("other", set_as_current=False)) == {}


def test_a_digest_tells_one_declaration_from_another(app: Celery) -> None:
    def digest(**entries: Any) -> str:
        return declaration_of(app, "shop", entries).digest

    assert digest(a=GOOD, b=GOOD) == digest(b=GOOD, a=GOOD)
    others = [
        digest(),
        digest(a=GOOD),
        digest(b=GOOD),
        digest(a={**GOOD, "args": [1]}),
        digest(a={**GOOD, "schedule": 20}),
        digest(a=None),
        digest(a={**GOOD, "schedule": -1}),
    ]
    assert len(set(others)) == len(others)


@pytest.mark.parametrize("name", [None, 5])
def test_a_definition_needs_a_name(app: Celery, name: Any) -> None:
    with pytest.raises(InvalidTimerError, match="name"):
        definition_of(app, name, GOOD)
