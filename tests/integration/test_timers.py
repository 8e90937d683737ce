"""The public API against a real server: what each method does, refuses, and leaves alone."""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from typing import Any, NoReturn
from zoneinfo import ZoneInfo

import pytest
from celery import Task
from celery.schedules import crontab, schedule

from celery_dtimer import (
    ConflictError,
    DistributedTimer,
    InvalidTimerError,
    SettingsError,
    StoreUnavailableError,
    Timer,
    TimerNotFoundError,
    planning,
)
from celery_dtimer.declarations import declared
from celery_dtimer.model import decode_definition, timer_id, to_datetime
from celery_dtimer.schedules import Crontab, Interval, OneShot
from celery_dtimer.sharding import Shards
from celery_dtimer.store import DueTimer, Reading, Settlement, Store
from tests.conftest import MakeApp
from tests.integration.conftest import START_MS, Clock
from tests.naming import named
from tests.servers import RedisServer

UTC = timezone.utc
START = to_datetime(START_MS)


class Timers(DistributedTimer):
    """Timers with a clock that the test sets, and a beat that fires when the test says."""

    def __init__(self, app: Any) -> None:
        super().__init__(app)
        self.clock = Clock()
        self._shards = Shards(super().store.settings, clock=self.clock)
        self._epoch = 0
        self._commits = 0

    def fire(self) -> list[str]:
        """Commit a run of everything that is due, as a beat would; return the timers' ids."""
        if not self._epoch:
            self._epoch = self.store.base.register("beat", {}).epoch
            while self.store.base.reap("beat", self._epoch).more:
                pass
        store = self.store.base
        due = store.due("beat", self._epoch, Reading(100)).timers
        settlements = [self._ran(timer) for timer in due]
        self._commits += 1
        assert set(store.commit("beat", self._epoch, self._commits, settlements).codes) <= {1}
        return [timer.parent or timer.id for timer in due]

    def _ran(self, timer: DueTimer) -> Settlement:
        if timer.parent:
            return Settlement(timer, "run")
        definition = decode_definition(self.store.definitions([timer.id])[0] or "")
        plan = planning.plan(definition, timer.due_ms, self.clock())
        return Settlement(
            timer, "run", plan.next_due_ms, skip=plan.skip, summary=definition.summary
        )


def a_task(timers: DistributedTimer, name: str) -> Task[..., Any]:
    """Return a task of the test's own app: a shared one would be in every later app too."""

    def anything(*args: Any, **kwargs: Any) -> None: ...

    task: Task[..., Any] = timers.app.task(name=name, shared=False)(anything)
    return task


@pytest.fixture
def timers(make_app: MakeApp) -> Iterator[Timers]:
    made = Timers(make_app())
    yield made
    assert not made.check_consistency()
    made.store.close()


@pytest.fixture
def stored(redis_server: RedisServer, prefix: str) -> Any:
    """Return the keys of the test's service, but for the one that tells of its shards."""
    return lambda: sorted(
        set(redis_server.client.scan_iter(f"{prefix}*", count=1000)) - {f"{prefix}meta:{{orders}}"}
    )


# ------------------------------------------------------------------ nothing happens too early


def test_nothing_is_contacted_before_a_method_needs_it(make_app: MakeApp) -> None:
    app = make_app(broker_url="redis://127.0.0.1:1/0", dtimer_redis_url="redis://127.0.0.1:1/0")
    timers = DistributedTimer(app)
    timers.callback(lambda_callback)
    assert "orders" in repr(timers)
    with pytest.raises(StoreUnavailableError, match=r"127\.0\.0\.1:1"):
        timers.create_timer("a", 10, "record")


def lambda_callback(timer: Any) -> None: ...


def test_the_service_that_is_given_is_the_beats_too(make_app: MakeApp) -> None:
    app = make_app()
    del app.conf.changes["dtimer_service"]
    timers = DistributedTimer(app, service="billing")
    assert timers.store.settings.service == app.conf.dtimer_service == "billing"


@pytest.mark.parametrize(
    "conf",
    [
        {"dtimer_batch_size": 0},
        {"dtimer_redis_options": {"no_such_option": 1}},
        {"dtimer_redis_url": "redis://127.0.0.1:1/0?no_such_option=1"},
    ],
)
def test_a_bad_setting_is_refused_by_name_at_the_first_use(
    make_app: MakeApp, conf: dict[str, Any]
) -> None:
    with pytest.raises(SettingsError, match=next(iter(conf))):
        DistributedTimer(make_app(**conf)).get_timers()


# ------------------------------------------------------------------ creating


def test_a_timer_is_what_was_given(timers: Timers) -> None:
    id = timers.create_timer(
        "a",
        10,
        "record",
        args=[1, "x"],
        kwargs={"k": None},
        description="every ten",
        queue="q",
        priority=3,
    )
    assert id == timer_id("a")
    assert timers.get_timer("a") == Timer(
        id=id,
        name="a",
        description="every ten",
        schedule=Interval(10_000),
        task="record",
        args=[1, "x"],
        kwargs={"k": None},
        options={"queue": "q", "priority": 3},
        status="active",
        instance=None,
        next_run_at=START + timedelta(seconds=10),
        last_run_at=None,
        total_run_count=0,
        skips={},
        revision=timers.get_timer(id).revision,
        created_at=START,
        source=None,
        reason=None,
    )


SCHEDULES: list[tuple[Any, Any]] = [
    (10, Interval(10_000)),
    (0.1, Interval(100)),
    (timedelta(minutes=5), Interval(300_000)),
    (schedule(30), Interval(30_000)),
    (crontab(hour=3, minute=0), Crontab("0 3 * * *")),
    ("0 0 * * mon-fri", Crontab("0 0 * * mon-fri")),
    (datetime(2030, 1, 1, tzinfo=UTC), OneShot(1_893_456_000_000)),
    (datetime(2030, 1, 1), OneShot(1_893_456_000_000)),  # noqa: DTZ001 naive: the app's zone
    (Interval(1234), Interval(1234)),
]


@pytest.mark.parametrize(("given", "rule"), SCHEDULES, ids=named)
def test_schedules_in_every_form(timers: Timers, given: Any, rule: Any) -> None:
    timers.create_timer("a", given, "record")
    assert timers.get_timer("a").schedule == rule


@pytest.mark.parametrize("timezone", ["Europe/Paris", ZoneInfo("Europe/Paris")])
def test_a_crontab_has_its_own_zone_or_the_apps(make_app: MakeApp, timezone: Any) -> None:
    timers = DistributedTimer(make_app(timezone="Asia/Tokyo"))
    timers.create_timer("own", "0 3 * * *", "record", timezone=timezone)
    timers.create_timer("app's", crontab(hour=3, minute=0), "record")
    assert timers.get_timer("own").schedule == Crontab("0 3 * * *", "Europe/Paris")
    assert timers.get_timer("app's").schedule == Crontab("0 3 * * *", "Asia/Tokyo")


def test_a_callback_is_a_task_its_name_a_short_name_or_a_signature(timers: Timers) -> None:
    task = a_task(timers, "tasks.report")
    timers.register_callback("report", task)
    timers.register_callback("elsewhere", "other.app.task")
    signature = task.s("pdf", pages=2).set(queue="q", task_id="one-only")
    given = {
        "task": task,
        "its name": "tasks.report",
        "short name": "report",
        "signature": signature,
        "any name": "no.such.task",
        "short name of another app's": "elsewhere",
    }
    timers.create_timers(
        [{"name": name, "schedule": 60, "callback": value} for name, value in given.items()]
    )
    tasks = {timer.name: timer.task for timer in timers.get_timers()}
    assert tasks == {
        **dict.fromkeys(given, "tasks.report"),
        "any name": "no.such.task",
        "short name of another app's": "other.app.task",
    }
    signed = timers.get_timer("signature")
    assert (signed.args, signed.kwargs, signed.options) == (["pdf"], {"pages": 2}, {"queue": "q"})


def test_what_is_given_beside_a_signature_comes_first(timers: Timers) -> None:
    signature = a_task(timers, "t").s("pdf", a=1, b=1).set(queue="q", priority=1)
    timers.create_timer("a", 60, signature, args=["html"], kwargs={"b": 2}, priority=2)
    timer = timers.get_timer("a")
    assert (timer.args, timer.kwargs) == (["html"], {"a": 1, "b": 2})
    assert timer.options == {"queue": "q", "priority": 2}


def test_a_keyword_called_tasks_makes_no_canvas(timers: Timers) -> None:
    timers.create_timer("a", 60, a_task(timers, "t").s(tasks=[1]))
    assert timers.get_timer("a").kwargs == {"tasks": [1]}


# ------------------------------------------------------------------ refusing

GOOD: dict[str, Any] = {"name": "good", "schedule": 10, "callback": "record"}

WRONG: list[tuple[str, Any]] = [
    *(("name", value) for value in (None, 5, b"n", ["n"], {"n": 1})),
    *(("schedule", value) for value in (None, 0, -1, True, math.nan, math.inf, 0.09, [], {}, b"1")),
    *(("schedule", value) for value in ("", "* * * *", "* * * * * * *", "@sometimes", "L")),
    *(("schedule", value) for value in (timedelta(0), timedelta(days=400_000), lambda: 1)),
    *(("minute", ("schedule", value)) for value in ("60 * * * *", "1/5 * * * *", "*/0 * * * *")),
    *(("minute", ("schedule", value)) for value in ("a * * * *", crontab(minute=[]))),
    ("hour", ("schedule", "* 24 * * *")),
    ("day_of_month", ("schedule", "* * 0 * *")),
    ("day_of_month '31' never occurs", ("schedule", "0 0 31 4 *")),
    ("month_of_year", ("schedule", "* * * 13 *")),
    ("day_of_week", ("schedule", "* * * * 8")),
    *(("callback", value) for value in (None, "", 5, b"t", [], object(), print)),
    *(("args", value) for value in ("ab", b"ab", 5, 0, False, {"a": 1}, {1}, iter([1]))),
    *(("args", [value]) for value in ({1}, object(), timedelta(1), {1: 1}, 1j, range)),
    *(("kwargs", value) for value in ("ab", 5, 0, False, [], [("a", 1)], {1: 2}, {None: 1})),
    ("kwargs", {"a": {1}}),
    *(("timezone", value) for value in ("Nowhere/City", "", 5, b"UTC", "+25:00", object())),
    *(("description", value) for value in (5, b"d", ["d"])),
    *(("expires", value) for value in ("60", True, [])),
    *(("priority", value) for value in ("1", 1.5, True)),
    *(("queue", value) for value in (5, ["q"])),
    *(("headers", value) for value in ("h", [1])),
    ("options", ("headers", {"a": {1}})),
    ("options", ("link", object())),
    *(("serializer", value) for value in ("jsn", 5, [])),
    *((name, "x") for name in ("task_id", "producer", "connection", "quue", "options")),
    *((name, "5") for name in ("countdown", "time_limit", "soft_time_limit")),
    *(("relative", value) for value in ("no", 1, 0)),
    *((name, "x") for name in ("eta", "compression", "delivery_mode", "retry_policy")),
    *((name, value) for name in ("countdown", "expires") for value in (-math.inf, 1e300)),
]


@pytest.mark.parametrize(("field", "value"), WRONG, ids=named)
def test_wrong_input_is_refused_by_its_fields_name_and_stores_nothing(
    timers: Timers, stored: Any, field: str, value: Any
) -> None:
    key, value = value if isinstance(value, tuple) else (field, value)
    before = stored()
    with pytest.raises(InvalidTimerError) as single:
        timers.create_timer(**{**GOOD, key: value})
    with pytest.raises(InvalidTimerError) as bulk:
        timers.create_timers([GOOD, {**GOOD, "name": "other", key: value}])
    assert stored() == before
    assert field in str(single.value)
    assert field in str(bulk.value)
    assert "timers[1]" in str(bulk.value)


@pytest.mark.parametrize(("field", "value"), WRONG, ids=named)
def test_a_wrong_change_leaves_the_timer_as_it_is(timers: Timers, field: str, value: Any) -> None:
    key, value = value if isinstance(value, tuple) else (field, value)
    if value is None and key not in ("name", "schedule", "callback"):
        pytest.skip("None removes an option")
    timers.create_timer(**GOOD, args=[1])
    before = timers.get_timer("good")
    with pytest.raises(InvalidTimerError, match=field):
        timers.update_timer("good", **{key: value})
    assert timers.get_timer("good") == before


@pytest.mark.parametrize("value", [5, None, "text", [5], [None], [[GOOD]], [{**GOOD, 5: 1}], GOOD])
def test_bulk_takes_dicts_of_keywords(timers: Timers, stored: Any, value: Any) -> None:
    before = stored()
    with pytest.raises(InvalidTimerError, match="timers"):
        timers.create_timers(value)
    assert stored() == before


@pytest.mark.parametrize("missing", ["name", "schedule", "callback"])
def test_bulk_says_what_is_missing_and_where(timers: Timers, missing: str) -> None:
    lacking = {key: value for key, value in GOOD.items() if key != missing}
    with pytest.raises(InvalidTimerError, match=rf"timers\[1\]: {missing} is missing"):
        timers.create_timers([{**GOOD, "name": "a"}, lacking])
    assert timers.get_timers() == []


def test_bulk_refuses_a_name_that_occurs_twice(timers: Timers) -> None:
    with pytest.raises(InvalidTimerError, match=r"timers\[2\]: the name 'good' occurs twice"):
        timers.create_timers([GOOD, {**GOOD, "name": "b"}, {**GOOD, "schedule": 20}])
    assert timers.get_timers() == []


def test_bulk_answers_ids_in_order_also_of_those_that_were_there(timers: Timers) -> None:
    names = [f"timer {number}" for number in range(450)]
    timers.create_timer("timer 7", 60, "record")
    ids = timers.create_timers({**GOOD, "name": name} for name in names)
    assert ids == [timer_id(name) for name in names]
    assert len(timers.get_timers()) == 450
    assert timers.create_timers([]) == []


def test_ten_thousand_timers_are_created_and_listed(timers: Timers) -> None:
    timers.create_timers({**GOOD, "name": f"t{number}"} for number in range(10_000))
    assert timers.pending_count() == 10_000
    assert len(timers.get_timers()) == 10_000
    assert timers.get_timer("t9999").status == "active"


@pytest.mark.parametrize("broken", [2, 3])
@pytest.mark.parametrize("when", ["sent", "answered"])
def test_a_batch_that_fails_lets_those_on_their_way_arrive(
    timers: Timers, monkeypatch: pytest.MonkeyPatch, broken: int, when: str
) -> None:
    wanted = [{**GOOD, "name": f"t{number}"} for number in range(300)]
    begin, calls = Store._begin, []

    def lose(store: Store, name: str, *arguments: Any) -> Any:
        calls.append(name)
        if len(calls) != broken:
            return begin(store, name, *arguments)
        if when == "sent":
            raise StoreUnavailableError("gone")
        answer = begin(store, name, *arguments)

        def lost() -> NoReturn:
            answer()
            raise StoreUnavailableError("gone")

        return lost

    with monkeypatch.context() as patch:
        patch.setattr(Store, "_begin", lose)
        with pytest.raises(StoreUnavailableError):
            timers.create_timers(wanted)
    assert not timers.store.base.client.connection_pool._in_use_connections
    assert len(timers.create_timers(wanted)) == 300
    assert len(timers.get_timers()) == 300


def test_a_definition_that_is_too_large_is_refused(timers: Timers, stored: Any) -> None:
    with pytest.raises(InvalidTimerError, match="at most 1048576"):
        timers.create_timer("large", 10, "record", args=["x" * 2**20])
    assert stored() == []
    timers.create_timer("nearly", 10, "record", args=["x" * 1_000_000])
    assert len(timers.get_timer("nearly").args[0]) == 1_000_000


# ------------------------------------------------------------------ creating again


def test_creating_the_same_again_changes_nothing(timers: Timers) -> None:
    timers.create_timer("a", 10, "record", args=[1])
    before = timers.get_timer("a")
    timers.clock.advance(4)
    timers.create_timer("a", 10, "record", args=[1])
    assert timers.get_timer("a") == before


def test_new_arguments_keep_the_phase_and_a_new_schedule_starts_anew(timers: Timers) -> None:
    timers.create_timer("a", 10, "record")
    timers.clock.advance(4)
    timers.create_timer("a", 10, "record", args=[1])
    assert timers.get_timer("a").next_run_at == START + timedelta(seconds=10)
    timers.create_timer("a", 20, "record", args=[1])
    assert timers.get_timer("a").next_run_at == START + timedelta(seconds=24)


def test_a_one_shot_whose_moment_has_come_fires_once(timers: Timers) -> None:
    moment = START - timedelta(hours=1)
    id = timers.create_timer("once", moment, "record")
    assert timers.get_timer("once").next_run_at == moment
    assert timers.fire() == [id]
    assert timers.fire() == []
    timer = timers.get_timer("once")
    assert (timer.status, timer.reason, timer.total_run_count) == ("stopped", "finished", 1)
    assert (timer.last_run_at, timer.next_run_at) == (moment, None)


def test_a_one_shot_that_has_run_is_not_armed_again_by_the_same_moment(timers: Timers) -> None:
    moment = START + timedelta(seconds=5)
    id = timers.create_timer("once", moment, "record")
    timers.clock.advance(6)
    assert timers.fire() == [id]
    timers.create_timer("once", moment, "record")
    timers.create_timer("once", moment, "record", args=["other"])
    assert timers.fire() == []
    assert timers.get_timer("once").status == "stopped"

    timers.create_timer("once", moment + timedelta(seconds=5), "record")
    assert timers.get_timer("once").status == "active"
    timers.clock.advance(6)
    assert timers.fire() == [id]


def test_a_deleted_name_is_free_and_its_past_is_gone(timers: Timers) -> None:
    timers.create_timer("a", 10, "record")
    timers.clock.advance(10)
    timers.fire()
    timers.delete_timer("a")
    with pytest.raises(TimerNotFoundError):
        timers.get_timer("a")
    timers.create_timer("a", 10, "record")
    timer = timers.get_timer("a")
    assert (timer.total_run_count, timer.last_run_at) == (0, None)
    assert timer.created_at == START + timedelta(seconds=10)
    assert timer.next_run_at == START + timedelta(seconds=20)


def test_threads_that_create_the_same_timer_make_one(make_app: MakeApp) -> None:
    timers = DistributedTimer(make_app())
    failures: list[BaseException] = []

    def upsert(number: int) -> None:
        try:
            for turn in range(200):
                timers.create_timer("shared", 10 + turn % 3, "record", args=[number, turn])
        except BaseException as exc:
            failures.append(exc)

    threads = [threading.Thread(target=upsert, args=[number]) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not [exc for exc in failures if not isinstance(exc, ConflictError)]
    assert not failures
    (timer,) = timers.get_timers()
    assert timer.args[1] == 199
    assert timers.pending_count() == 1
    assert not timers.check_consistency()


def test_a_timer_that_others_change_in_each_pause_is_written_all_the_same(
    make_app: MakeApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a refused try was told before a pause is out of date after it."""
    others, timers = DistributedTimer(make_app()), DistributedTimer(make_app())
    begin = timers.store.base._begin_upsert
    tries, changes = itertools.count(), itertools.count()

    def change(_: float = 0) -> None:
        others.create_timer("shared", 10, "record", args=[next(changes)])

    def begin_late(*arguments: Any) -> Any:
        if next(tries) < 3:
            change()
        return begin(*arguments)

    monkeypatch.setattr(timers.store.base, "_begin_upsert", begin_late)
    monkeypatch.setattr("celery_dtimer.store.time.sleep", change)
    timers.create_timer("shared", 10, "record", args=["mine"])
    assert next(changes) == 4, "three tries were too late, and there was one pause"
    assert timers.get_timer("shared").args == ["mine"]


# ------------------------------------------------------------------ looking


def test_a_timer_is_found_by_id_and_by_name(timers: Timers) -> None:
    id = timers.create_timer("a", 10, "record")
    assert timers.get_timer(id) == timers.get_timer("a")


METHODS_OF_A_TIMER = [
    "get_timer",
    "update_timer",
    "pause_timer",
    "stop_timer",
    "resume_timer",
    "trigger_timer",
    "delete_timer",
]


@pytest.mark.parametrize("method", METHODS_OF_A_TIMER)
@pytest.mark.parametrize("timer", ["no such name", "a" * 26, "", "*"])
def test_what_is_not_there_is_not_found(timers: Timers, method: str, timer: str) -> None:
    timers.create_timer("another", 10, "record")
    with pytest.raises(TimerNotFoundError) as caught:
        getattr(timers, method)(timer)
    assert repr(timer) in str(caught.value)


@pytest.mark.parametrize("method", METHODS_OF_A_TIMER)
@pytest.mark.parametrize("timer", [None, 5, b"a", ["a"]])
def test_a_timer_is_named_by_a_str(timers: Timers, method: str, timer: Any) -> None:
    with pytest.raises(InvalidTimerError, match=r"^timer="):
        getattr(timers, method)(timer)


def test_a_name_that_is_another_timers_id_is_not_mixed_up_with_it(timers: Timers) -> None:
    id = timers.create_timer("a", 10, "record")
    double = timers.create_timer(id, 20, "record")
    assert timers.get_timer("a").id == id
    assert timers.get_timer(double).name == id
    timers.pause_timer("a")
    timers.pause_timer(double)
    timers.resume_timer("a")
    assert (timers.get_timer("a").status, timers.get_timer(double).status) == ("active", "paused")
    assert timers.update_timer("a", args=[1]).name == "a"
    timers.delete_timer("a")
    assert [timer.id for timer in timers.get_timers()] == [double]


def names(found: list[Timer]) -> list[str]:
    return [timer.name for timer in found]


def test_active_timers_come_by_their_next_run_and_then_the_others(timers: Timers) -> None:
    for number in (3, 1, 2):
        timers.create_timer(f"t{number}", number, "record")
    timers.create_timer("paused", 0.5, "record")
    timers.pause_timer("paused")
    assert names(timers.get_timers()) == ["t1", "t2", "t3", "paused"]


def test_filters_and_pages(timers: Timers) -> None:
    timers.register_callback("short", "tasks.long_name")
    timers.create_timers(
        [
            {"name": f"{letter}{number}", "schedule": 10 + number, "callback": callback}
            for letter, callback in (("a", "record"), ("b", "short"))
            for number in range(3)
        ]
    )
    timers.pause_timer("a2")
    timers.trigger_timer("a0")  # its hidden one-shot is never listed
    assert names(timers.get_timers(status="active", name="a*")) == ["a0", "a1"]
    assert names(timers.get_timers(status="paused")) == ["a2"]
    assert timers.get_timers(status="broken") == []
    assert names(timers.get_timers(name="?1")) == ["a1", "b1"]
    assert names(timers.get_timers(task="short")) == ["b0", "b1", "b2"]
    assert names(timers.get_timers(task="tasks.long_name")) == ["b0", "b1", "b2"]
    assert timers.get_timers(task="no such") == []
    everything = names(timers.get_timers())
    assert sorted(everything) == ["a0", "a1", "a2", "b0", "b1", "b2"]
    pages = [timers.get_timers(offset=offset, limit=2) for offset in (0, 2, 4, 6)]
    assert [name for page in pages for name in names(page)] == everything
    assert timers.get_timers(limit=0) == []
    assert names(timers.get_timers(name="b*", offset=1, limit=1)) == ["b1"]


def test_a_page_is_read_without_all_that_is_behind_it(
    timers: Timers, monkeypatch: pytest.MonkeyPatch
) -> None:
    timers.create_timers({**GOOD, "name": f"t{number}"} for number in range(20))
    expected = names(timers.get_timers())[3:7]
    monkeypatch.setattr(timers.store.base, "scores", None)
    assert names(timers.get_timers(offset=3, limit=4)) == expected


def test_only_star_and_question_mark_are_special_in_a_filter(timers: Timers) -> None:
    for name in ("a[1]", "a1", "A[1]", "a[!b]"):
        timers.create_timer(name, 10, "record")
    assert names(timers.get_timers(name="a[1]")) == ["a[1]"]
    assert names(timers.get_timers(name="a[!*]")) == ["a[!b]"]
    assert sorted(names(timers.get_timers(name="a*"))) == ["a1", "a[!b]", "a[1]"]


@pytest.mark.parametrize(
    ("filter_", "value"),
    [
        ("status", "running"),
        ("status", 5),
        ("name", 5),
        ("task", 5),
        ("task", ""),
        ("instance", 5),
        ("offset", -1),
        ("offset", "1"),
        ("offset", None),
        ("limit", -1),
        ("limit", 1.5),
        ("limit", True),
    ],
)
def test_a_wrong_filter_is_refused_by_name(timers: Timers, filter_: str, value: Any) -> None:
    expected = "callback" if filter_ == "task" else filter_
    with pytest.raises(InvalidTimerError, match=f"^{expected}="):
        timers.get_timers(**{filter_: value})


def test_what_an_instance_owns(timers: Timers) -> None:
    timers.create_timer("before", 20, "record")
    assert timers.get_instance_timers() == []
    assert names(timers.get_instance_timers("unassigned")) == ["before"]
    timers.fire()
    timers.create_timer("after", 10, "record")
    assert names(timers.get_instance_timers("beat")) == ["after", "before"]
    assert names(timers.get_instance_timers()) == ["after", "before"]
    assert timers.get_instance_timers("nobody") == []
    assert names(timers.get_timers(instance="beat", name="b*")) == ["before"]
    assert {timer.instance for timer in timers.get_timers()} == {"beat"}
    assert (timers.pending_count(), timers.pending_count("beat")) == (2, 2)
    assert timers.pending_count("nobody") == 0
    (instance,) = timers.get_service_instances()
    assert (instance.id, instance.status, instance.timers) == ("beat", "active", 2)


# ------------------------------------------------------------------ changing


def test_what_is_not_named_stays(timers: Timers) -> None:
    timers.create_timer(
        "a", 10, "record", args=[1], kwargs={"k": 1}, description="d", queue="q", priority=1
    )
    timer = timers.update_timer("a", args=[2])
    assert (timer.args, timer.kwargs, timer.description) == ([2], {"k": 1}, "d")
    assert timer.options == {"queue": "q", "priority": 1}
    timer = timers.update_timer("a", priority=2, time_limit=5, queue=None)
    assert timer.options == {"priority": 2, "time_limit": 5}
    timer = timers.update_timer("a", args=None, kwargs=None, description="")
    assert (timer.args, timer.kwargs, timer.description) == ([], {}, "")
    timer = timers.update_timer("a", callback="other")
    assert (timer.task, timer.options) == ("other", {"priority": 2, "time_limit": 5})
    assert timer == timers.get_timer("a")
    assert timer.next_run_at == START + timedelta(seconds=10)


def test_a_new_schedule_is_counted_from_now(timers: Timers) -> None:
    timers.create_timer("a", 10, "record")
    timers.clock.advance(3)
    timer = timers.update_timer("a", schedule=10)
    assert timer.next_run_at == START + timedelta(seconds=10)
    assert timers.update_timer("a", schedule=20).next_run_at == START + timedelta(seconds=23)


def test_a_new_schedule_keeps_the_timers_zone_and_a_new_zone_the_schedule(timers: Timers) -> None:
    timers.create_timer("a", "0 3 * * *", "record", timezone="Europe/Paris")
    timer = timers.update_timer("a", schedule="0 4 * * *")
    assert timer.schedule == Crontab("0 4 * * *", "Europe/Paris")
    timer = timers.update_timer("a", timezone="Asia/Tokyo")
    assert timer.schedule == Crontab("0 4 * * *", "Asia/Tokyo")
    assert timer.next_run_at == datetime(2025, 6, 15, 19, 0, tzinfo=UTC)
    timer = timers.update_timer("a", schedule=crontab(hour=5, minute=0), timezone="+05:30")
    assert timer.schedule == Crontab("0 5 * * *", "+05:30")
    assert timers.update_timer("a", schedule=60).schedule == Interval(60_000)
    assert timers.update_timer("a", timezone="Asia/Tokyo").schedule == Interval(60_000)


def test_a_signature_brings_its_arguments_when_it_replaces_a_callback(timers: Timers) -> None:
    signature = a_task(timers, "t").s("pdf", pages=2)
    signature.set(queue="its own", task_id="one")
    timers.create_timer("a", 10, "record", args=["html"], kwargs={"k": 1}, queue="q", priority=1)
    timer = timers.update_timer("a", callback=signature)
    assert (timer.task, timer.args, timer.kwargs) == ("t", ["pdf"], {"pages": 2})
    assert timer.options == {"queue": "its own", "priority": 1}
    timer = timers.update_timer("a", callback=signature, args=["txt"], queue="named")
    assert (timer.args, timer.options["queue"]) == (["txt"], "named")


def test_a_name_stays(timers: Timers) -> None:
    timers.create_timer("a", 10, "record")
    with pytest.raises(InvalidTimerError, match="name"):
        timers.update_timer("a", name="b")


def test_an_update_without_changes_changes_nothing(timers: Timers) -> None:
    timers.create_timer("a", 10, "record", queue="q")
    before = timers.get_timer("a")
    assert timers.update_timer("a") == before


def test_a_paused_timer_stays_paused_whatever_changes(timers: Timers) -> None:
    timers.create_timer("a", 10, "record")
    timers.pause_timer("a")
    assert timers.update_timer("a", args=[1]).status == "paused"
    assert timers.update_timer("a", schedule=20).status == "paused"
    timers.create_timer("a", 30, "record")
    assert timers.get_timer("a").status == "paused"
    timers.resume_timer("a")
    assert timers.get_timer("a").next_run_at == START + timedelta(seconds=30)


def test_a_one_shot_that_has_run_is_created_again_and_not_updated(timers: Timers) -> None:
    timers.create_timer("once", START, "record")
    timers.fire()
    for change in (timers.update_timer, timers.resume_timer, timers.trigger_timer):
        with pytest.raises(InvalidTimerError, match="over"):
            change("once")
    with pytest.raises(InvalidTimerError, match="stopped or broken"):
        timers.pause_timer("once")
    timers.delete_timer("once")
    assert timers.get_timers() == []


def test_others_that_keep_changing_a_timer_are_a_conflict(
    timers: Timers, monkeypatch: pytest.MonkeyPatch
) -> None:
    timers.create_timer("a", 10, "record")
    monkeypatch.setattr(timers.store, "replace", lambda *_: False)
    with pytest.raises(ConflictError, match="'a'"):
        timers.update_timer("a", args=[1])


# ------------------------------------------------------------------ pausing and resuming


def test_a_resumed_timer_goes_on_in_its_rhythm_and_counts_what_was_skipped(timers: Timers) -> None:
    timers.create_timer("a", 10, "record")
    timers.pause_timer("a")
    timers.pause_timer("a")
    assert (timers.get_timer("a").status, timers.get_timer("a").next_run_at) == ("paused", None)
    assert timers.pending_count() == 0
    timers.clock.advance(35)
    assert timers.fire() == []
    timers.resume_timer("a")
    timers.resume_timer("a")
    timer = timers.get_timer("a")
    assert (timer.status, timer.skipped) == ("active", 3)
    assert timer.next_run_at == START + timedelta(seconds=40)


def test_a_short_pause_skips_nothing(timers: Timers) -> None:
    timers.create_timer("a", 10, "record")
    timers.pause_timer("a")
    timers.clock.advance(5)
    timers.resume_timer("a")
    timer = timers.get_timer("a")
    assert (timer.next_run_at, timer.skipped) == (START + timedelta(seconds=10), 0)


def test_a_stopped_timer_stays_until_it_is_resumed_or_rescheduled(timers: Timers) -> None:
    id = timers.create_timer("a", 10, "record", args=[1])
    timers.stop_timer("a")
    timers.stop_timer("a")
    assert timers.get_timer("a").status == "stopped"
    with pytest.raises(InvalidTimerError, match="stopped"):
        timers.pause_timer("a")
    timers.create_timer("a", 10, "record", args=[1])
    assert timers.update_timer("a", args=[2]).status == "stopped"
    timers.resume_timer("a")
    assert timers.get_timer("a").status == "active"
    timers.stop_timer("a")
    assert timers.update_timer("a", schedule=20).status == "active"
    timers.clock.advance(20)
    assert timers.fire() == [id]


def test_a_one_shot_whose_moment_passed_in_a_pause_runs_when_resumed(timers: Timers) -> None:
    id = timers.create_timer("once", START + timedelta(seconds=5), "record")
    timers.pause_timer("once")
    timers.clock.advance(60)
    timers.resume_timer("once")
    assert timers.fire() == [id]


# ------------------------------------------------------------------ running now


def test_a_trigger_moves_neither_schedule_nor_count(timers: Timers) -> None:
    id = timers.create_timer("a", 10, "record")
    before = timers.get_timer("a")
    timers.trigger_timer("a")
    timers.trigger_timer("a")
    assert timers.pending_count() == 3
    assert timers.fire() == [id, id]
    assert timers.fire() == []
    assert timers.get_timer("a").next_run_at == before.next_run_at
    assert timers.get_timer("a").total_run_count == 0


@pytest.mark.parametrize("method", ["pause_timer", "stop_timer"])
def test_what_is_set_aside_can_be_triggered(timers: Timers, method: str) -> None:
    id = timers.create_timer("a", 10, "record")
    getattr(timers, method)("a")
    timers.trigger_timer("a")
    assert timers.fire() == [id]
    assert timers.get_timer("a").status in ("paused", "stopped")


def test_pending_triggers_go_with_their_timer(timers: Timers, stored: Any) -> None:
    timers.create_timer("a", 10, "record")
    timers.trigger_timer("a")
    timers.delete_timer("a")
    assert stored() == []


def test_a_broken_timer_is_listed_and_mended_by_a_new_definition(
    timers: Timers, redis_server: RedisServer
) -> None:
    id = timers.create_timer("a", 10, "record")
    key = timers.store.base.keys("timer_definition", id)
    redis_server.client.set(key, '{"name":"a"}')
    timer = timers.get_timer(id)
    assert (timer.status, timer.name, timer.schedule) == ("broken", "a", None)
    assert "schedule" in (timer.reason or "")
    for change in (timers.update_timer, timers.stop_timer):
        if change is timers.update_timer:
            with pytest.raises(InvalidTimerError):
                change(id)
    timers.create_timer("a", 20, "record")
    assert timers.get_timer("a").status == "active"


# ------------------------------------------------------------------ callbacks


def test_a_decorator_in_every_form(timers: Timers) -> None:
    @timers.callback
    def plain(timer: Any) -> None: ...

    @timers.callback()
    def called(timer: Any) -> None: ...

    @timers.callback("short")
    def named(timer: Any) -> None: ...

    @timers.callback(name="keyword", rate_limit="1/m", max_retries=7)
    def with_options(timer: Any) -> None: ...

    tasks = {"plain": plain, "called": called, "short": named, "keyword": with_options}
    for name, task in tasks.items():
        assert task.name.startswith(__name__)
        assert task.name in timers.app.tasks
        timers.create_timer(name, 60, name)
        assert timers.get_timer(name).task == task.name
    assert (with_options.rate_limit, with_options.max_retries) == ("1/m", 7)
    assert declared(timers.app) == {}


def test_a_callback_with_a_schedule_declares_a_static_timer(timers: Timers) -> None:
    @timers.callback(schedule=60, args=[1], kwargs={"k": 2}, description="d", timezone="UTC")
    def every_minute(timer: Any, first: int, k: int) -> None: ...

    @timers.callback("other name", schedule=crontab())
    def another(timer: Any) -> None: ...

    entries = declared(timers.app)
    assert entries["every_minute"] == {
        "task": every_minute.name,
        "schedule": 60,
        "args": [1],
        "kwargs": {"k": 2},
        "description": "d",
        "timezone": "UTC",
    }
    assert entries["other name"] == {"task": another.name, "schedule": crontab()}
    assert timers.app.conf.beat_schedule == {}


@pytest.mark.parametrize("field", ["args", "kwargs", "timezone", "description"])
def test_a_callback_without_a_schedule_has_no_timer_to_describe(timers: Timers, field: str) -> None:
    with pytest.raises(InvalidTimerError, match=f"^{field}=.*a schedule beside it"):
        timers.callback(**{field: "x"})(lambda_callback)


def test_two_callbacks_of_one_short_name_are_refused(timers: Timers) -> None:
    timers.register_callback("report", "tasks.report")
    timers.register_callback("report", "tasks.report")
    with pytest.raises(InvalidTimerError, match=r"'report' is taken by tasks\.report"):
        timers.register_callback("report", "tasks.other")
    with pytest.raises(InvalidTimerError, match="taken"):
        timers.callback("report")(lambda_callback)


@pytest.mark.parametrize(
    ("name", "task"), [("", "t"), (None, "t"), (5, "t"), ("n", ""), ("n", None), ("n", 5)]
)
def test_a_callback_is_registered_with_a_name_and_a_task(
    timers: Timers, name: Any, task: Any
) -> None:
    with pytest.raises(InvalidTimerError, match="name" if name != "n" else "task"):
        timers.register_callback(name, task)


def test_celery_checks_a_callbacks_arguments_without_its_timer(timers: Timers) -> None:
    @timers.callback
    def report(timer: Any, kind: str) -> Any:
        return timer, kind

    with pytest.raises(TypeError, match="kind"):
        report.apply_async()
    assert report.apply(args=["pdf"]).get() == (None, "pdf")
    assert report("a timer", "pdf") == ("a timer", "pdf")


# ------------------------------------------------------------------ any name

NAMES = [
    "",
    " ",
    "a:b",
    "{x}",
    "}{",
    "*?[]",
    "[!a]",
    "new\nline\r",
    "\x00",
    "caf\u00e9",
    "cafe\u0301",
    "Case",
    "case",
    "\ud800",
    "\ud801",
    "日本語 🎉",
    "-",
    "- - -",
    "0",
    "None",
    "unassigned",
    ":schedule",
    ":lock",
    "timer_queue:{orders}",
    "meta",
    timer_id("case"),
    timer_id("no such timer"),
    timer_id(timer_id("case")),
    "n" * 5000,
    "m" * 1_000_000,
]


def test_timers_of_any_names_live_side_by_side(timers: Timers) -> None:
    ids = timers.create_timers(
        {"name": name, "schedule": 10, "callback": "record", "args": [number]}
        for number, name in enumerate(NAMES)
    )
    assert len(set(ids)) == len(NAMES)
    assert sorted(names(timers.get_timers())) == sorted(NAMES)
    for number, (name, id) in enumerate(zip(NAMES, ids, strict=True)):
        assert timers.get_timer(name).id == id
        assert timers.update_timer(name, kwargs={"n": number}).args == [number]
        timers.pause_timer(name)
        assert timers.get_timer(name).status == "paused"
        timers.resume_timer(name)
        timers.trigger_timer(name)
    timers.clock.advance(10)
    assert sorted(timers.fire()) == sorted(ids * 2)
    for number, name in enumerate(NAMES):
        timer = timers.get_timer(name)
        assert (timer.name, timer.kwargs, timer.total_run_count) == (name, {"n": number}, 1)
        timers.delete_timer(name)
        assert len(timers.get_timers()) == len(NAMES) - number - 1
    assert timers.pending_count() == 0


# ------------------------------------------------------------------ services beside each other


def test_services_and_prefixes_do_not_bleed(make_app: MakeApp, prefix: str) -> None:
    places = [
        ("orders", ""),
        ("orders.1", ""),
        ("{orders}", ""),
        ("or:ders", ""),
        ("*", ""),
        ("orders", "x:"),
        ("orders", "xx:"),
    ]
    services = []
    for service, more in places:
        app = make_app(dtimer_service=service, dtimer_key_prefix=prefix + more)
        services.append(DistributedTimer(app))
    for number, timers in enumerate(services):
        timers.create_timer("shared name", 10 + number, "record")
        timers.create_timer(f"own {number}", 10, "record")
    for number, timers in enumerate(services):
        assert sorted(names(timers.get_timers())) == [f"own {number}", "shared name"]
        assert timers.get_timer("shared name").schedule == Interval(10_000 + 1000 * number)
        with pytest.raises(TimerNotFoundError):
            timers.get_timer(f"own {number + 1}")
    services[0].delete_timer("shared name")
    services[0].delete_timer("own 0")
    assert [timers.pending_count() for timers in services] == [0] + [2] * (len(places) - 1)
    assert not [problem for timers in services for problem in timers.check_consistency()]
