"""The scheduler in this process: what Celery's beat calls, and the embedded one."""

from __future__ import annotations

import gc
import logging
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery
from celery.apps.beat import Beat
from celery.beat import Service
from celery.schedules import crontab

from celery_dtimer import DistributedScheduler, DistributedTimer, SettingsError
from celery_dtimer import scheduler as scheduler_module
from celery_dtimer.definitions import Definitions
from celery_dtimer.errors import StoreUnavailableError
from celery_dtimer.scheduler import Loop, Runtimes
from celery_dtimer.store import Store
from tests.conftest import MakeApp, ReadQueue
from tests.servers import RedisServer
from tests.waiting import wait_until

NOWHERE = "redis://127.0.0.1:1/0"

MakeScheduler = Callable[..., DistributedScheduler]


@pytest.fixture
def make_scheduler() -> Iterator[MakeScheduler]:
    """Make schedulers with an id of their own each, unless said; they close with the test."""
    made: list[DistributedScheduler] = []

    def make(app: Celery, *, embedded: bool = True, **options: Any) -> DistributedScheduler:
        app.conf.result_expires = None  # else Celery adds its clean-up of results
        made.append(DistributedScheduler(app, embedded=embedded, **options))
        return made[-1]

    yield make
    for scheduler in made:
        scheduler.close()


def registered(timers: DistributedTimer) -> list[str]:
    return [instance.id for instance in timers.get_service_instances()]


def owners(timers: DistributedTimer) -> dict[str, str | None]:
    return {timer.name: timer.instance for timer in timers.get_timers()}


# ------------------------------------------------------------------ construction


@pytest.mark.parametrize("lazy", [True, False])
def test_neither_the_banner_nor_the_construction_contacts_anything(
    make_app: MakeApp, lazy: bool
) -> None:
    app = make_app(broker_url=NOWHERE, dtimer_redis_url=NOWHERE, beat_schedule={"a": {}})
    threads = threading.active_count()
    scheduler = DistributedScheduler(app, lazy=lazy)
    assert scheduler.info
    scheduler.close()
    assert threading.active_count() == threads


def test_the_banner_shows_service_instance_and_server_without_secrets(make_app: MakeApp) -> None:
    url = "redis://alice:pa55word@example.com:7/1?password=queried"
    info = DistributedScheduler(make_app(dtimer_redis_url=url), lazy=True).info
    lines = dict(line.strip(" .").split(" -> ") for line in info.splitlines())
    assert lines["service"] == "orders"
    assert lines["timers"] == "redis://**@example.com:7/1"
    assert lines["instance"].split(":")[1] == str(os.getpid())
    assert not [secret for secret in ("alice", "pa55word", "queried") if secret in info]


def test_the_banner_shows_the_instance_that_will_run(make_app: MakeApp) -> None:
    app = make_app()
    banner, real = DistributedScheduler(app, lazy=True), DistributedScheduler(app)
    assert banner.instance == real.instance
    embedded = {DistributedScheduler(app, embedded=True).instance for _ in range(2)}
    assert len(embedded | {real.instance}) == 3


BAD_SETTINGS: list[dict[str, Any]] = [
    {"dtimer_instance_timeout": 10, "dtimer_heartbeat_interval": 5},
    {"dtimer_instance_timeout": -1},
    {"dtimer_heartbeat_interval": 0},
    {"dtimer_check_interval": "1"},
    {"dtimer_failure_check_interval": None},
    {"dtimer_batch_size": 0},
    {"dtimer_dispatch": "atomically"},
    {"dtimer_key_prefix": "{x}"},
    {"dtimer_redis_url": "amqp://localhost"},
    {"dtimer_redis_options": "a=b"},
    {"dtimer_keep_finished": -1},
    {"dtimer_service": 5},
]


@pytest.mark.parametrize("lazy", [True, False])
@pytest.mark.parametrize("conf", BAD_SETTINGS, ids=repr)
def test_a_bad_setting_is_refused_at_the_start_by_name(
    make_app: MakeApp, conf: dict[str, Any], lazy: bool
) -> None:
    with pytest.raises(SettingsError, match=next(iter(conf))):
        DistributedScheduler(make_app(**conf), lazy=lazy)


@pytest.mark.parametrize("name", ["dtimer", "celery_dtimer:DistributedScheduler"])
def test_celery_finds_it_by_its_names_and_may_give_it_a_file(
    make_app: MakeApp, tmp_path: Path, name: str
) -> None:
    file = tmp_path / "celerybeat-schedule"
    service = Service(make_app(), scheduler_cls=name, schedule_filename=str(file))
    scheduler = service.get_scheduler(lazy=False)
    assert type(scheduler) is DistributedScheduler
    scheduler.close()
    assert not list(tmp_path.iterdir())


def test_the_beat_command_shows_its_banner(make_app: MakeApp) -> None:
    app = make_app(dtimer_redis_url=NOWHERE)
    beat = Beat(app=app, scheduler_cls="dtimer", quiet=True, redirect_stdouts=False)
    banner = beat.startup_info(Service(app, scheduler_cls="dtimer"))
    assert "service -> orders" in banner


@pytest.mark.parametrize(
    ("given", "setting", "expected"), [(0.3, 7, 0.3), (None, 7, 7), (None, 0, 300)]
)
def test_the_longest_wait_is_celerys_setting(
    make_app: MakeApp, given: float | None, setting: float, expected: float
) -> None:
    app = make_app(beat_max_loop_interval=setting)
    assert DistributedScheduler(app, lazy=True, max_interval=given).max_interval == expected


# ------------------------------------------------------------------ the static schedule


def names_of(app: Celery) -> set[str]:
    scheduler = DistributedScheduler(app)
    return {*scheduler._declaration.definitions, *scheduler._declaration.broken}


def test_the_cleanup_of_results_is_scheduled_as_in_celery(
    make_app: MakeApp, tmp_path: Path
) -> None:
    app = make_app(result_backend=f"file://{tmp_path}")
    definition = DistributedScheduler(app)._declaration.definitions["celery.backend_cleanup"]
    assert definition.task == "celery.backend_cleanup"
    assert definition.schedule.describe() == "0 4 * * * (UTC)"
    assert definition.options == {"expires": 12 * 3600}


def test_no_cleanup_where_results_expire_by_themselves_or_never(
    make_app: MakeApp, redis_server: RedisServer, tmp_path: Path
) -> None:
    assert names_of(make_app(result_backend=redis_server.url)) == set()
    assert names_of(make_app(result_backend=f"file://{tmp_path}", result_expires=None)) == set()


def test_the_users_own_cleanup_stays(make_app: MakeApp, tmp_path: Path) -> None:
    entry = {"task": "celery.backend_cleanup", "schedule": crontab(hour="5", minute="0")}
    app = make_app(
        result_backend=f"file://{tmp_path}", beat_schedule={"celery.backend_cleanup": entry}
    )
    definition = DistributedScheduler(app)._declaration.definitions["celery.backend_cleanup"]
    assert definition.schedule.describe() == "0 5 * * * (UTC)"
    assert app.conf.beat_schedule == {"celery.backend_cleanup": entry}


def test_periodic_tasks_are_added_as_in_celery(
    make_app: MakeApp, make_scheduler: MakeScheduler
) -> None:
    app = make_app()

    def work(*args: Any, **kwargs: Any) -> None: ...

    task = app.task(name="work", shared=False)(work)

    @app.on_after_finalize.connect
    def set_up(sender: Celery, **_: Any) -> None:
        sender.add_periodic_task(30, task.s("a"), name="named", expires=10)
        sender.add_periodic_task(crontab(minute=0), task.s(k=1))

    app.finalize()
    make_scheduler(app).tick()
    timers = DistributedTimer(app)
    wait_until(lambda: len(timers.get_timers()) == 2, "the static timers")
    named = timers.get_timer("named")
    assert (named.task, named.args, named.options) == ("work", ["a"], {"expires": 10})
    assert named.source == "orders"
    (other,) = [timer for timer in timers.get_timers() if timer.name != "named"]
    assert (other.kwargs, other.name) == ({"k": 1}, "work(k=1)")


def test_instances_with_one_schedule_create_each_timer_once(
    make_app: MakeApp, make_scheduler: MakeScheduler
) -> None:
    entries = {f"t{number}": {"task": "record", "schedule": 3600} for number in range(20)}
    app = make_app(beat_schedule=entries)
    schedulers = [make_scheduler(app) for _ in range(3)]
    for scheduler in schedulers:
        scheduler.start()
    timers = DistributedTimer(app)
    wait_until(lambda: len(timers.get_service_instances()) == 3, "the instances")
    wait_until(lambda: None not in owners(timers).values() and owners(timers), "owners")
    assert sorted(owners(timers)) == sorted(entries)
    wait_until(
        lambda: max(instance.timers for instance in timers.get_service_instances()) <= 7,
        "an even share",
    )
    assert not timers.check_consistency()


# ------------------------------------------------------------------ ticking and closing


def test_a_tick_sends_what_is_due_and_returns_zero(
    make_app: MakeApp, make_scheduler: MakeScheduler, read_queue: ReadQueue
) -> None:
    app = make_app(beat_schedule={"often": {"task": "record", "schedule": 0.2}})
    reader, scheduler = read_queue(app), make_scheduler(app)
    started = time.monotonic()
    assert scheduler.tick() == 0
    assert time.monotonic() - started < 1.5
    while not reader.ledger.names():
        assert scheduler.tick() == 0
        assert time.monotonic() - started < 10
    assert reader.ledger.names() == {"often"}


def test_a_tick_is_bounded_by_the_longest_wait(
    make_app: MakeApp, make_scheduler: MakeScheduler
) -> None:
    scheduler = make_scheduler(make_app(), max_interval=0.05)
    scheduler.tick()
    started = time.monotonic()
    for _ in range(5):
        scheduler.tick()
    assert time.monotonic() - started < 1


@pytest.mark.parametrize(
    ("check_interval", "max_interval", "expected"), [(0.2, 5, 0.2), (5, 0.3, 0.3), (5, 5, 1)]
)
def test_the_loop_waits_no_longer_than_any_of_its_limits(
    make_app: MakeApp,
    make_scheduler: MakeScheduler,
    monkeypatch: pytest.MonkeyPatch,
    check_interval: float,
    max_interval: float,
    expected: float,
) -> None:
    monkeypatch.setattr(Runtimes, "start", lambda _: None)
    app = make_app(dtimer_check_interval=check_interval, dtimer_instance_timeout=10)
    scheduler = make_scheduler(app, max_interval=max_interval)
    scheduler.start()
    assert scheduler._runtime is not None
    assert scheduler._runtime._new_runtime()._loop.step() == expected


def test_a_turn_that_sends_says_so_in_one_line(
    make_app: MakeApp,
    make_scheduler: MakeScheduler,
    read_queue: ReadQueue,
    caplog: pytest.LogCaptureFixture,
) -> None:
    app = make_app()
    reader, scheduler, moment = read_queue(app), make_scheduler(app), datetime.now(timezone.utc)
    DistributedTimer(app).create_timers(
        {"name": f"t{n}", "schedule": moment, "callback": "record"} for n in range(3)
    )
    with caplog.at_level(logging.INFO, "celery_dtimer"):
        scheduler.start()
        wait_until(lambda: len(reader.ledger) == 3, "the runs")
        scheduler.close()
    (line,) = [line for line in caplog.messages if "dispatched" in line.lower()]
    assert re.search(r"\bdispatched 3 runs", line, re.IGNORECASE)
    assert scheduler.instance in line


def test_what_was_sent_and_not_committed_is_committed_before_it_leaves(
    make_app: MakeApp,
    make_scheduler: MakeScheduler,
    read_queue: ReadQueue,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    app = make_app()
    timers, reader, scheduler = DistributedTimer(app), read_queue(app), make_scheduler(app)
    commit, tries = Store.begin_commit, []

    def commit_at_the_end(store: Store, *args: Any, **kwargs: Any) -> Any:
        tries.append(args)
        assert scheduler._runtime is not None
        if not scheduler._runtime._stopped.is_set():
            raise StoreUnavailableError("no answer")
        return commit(store, *args, **kwargs)

    monkeypatch.setattr(Store, "begin_commit", commit_at_the_end)
    timers.create_timer("a", datetime.now(timezone.utc), "record")
    scheduler.start()
    wait_until(lambda: len(tries) >= 2, "a commit to fail")
    assert timers.get_timer("a").total_run_count == 0
    scheduler.close()
    assert timers.get_timer("a").total_run_count == 1
    wait_until(lambda: len(reader.ledger) == 1, "the run")


def test_closing_hands_over_and_ends_all_threads(
    make_app: MakeApp, make_scheduler: MakeScheduler
) -> None:
    app = make_app()
    timers = DistributedTimer(app)
    timers.create_timer("a", 3600, "record")
    before = set(threading.enumerate())
    scheduler = make_scheduler(app, embedded=False)
    scheduler.tick()
    wait_until(lambda: owners(timers) == {"a": scheduler.instance}, "an owner")
    scheduler.close()
    assert owners(timers) == {"a": None}
    assert registered(timers) == []
    scheduler.close()
    assert scheduler.tick() == 0
    assert registered(timers) == []
    wait_until(lambda: set(threading.enumerate()) <= before, "the threads to end")
    assert not timers.check_consistency()


def test_closing_what_never_ran_is_harmless(make_app: MakeApp) -> None:
    scheduler = DistributedScheduler(make_app(dtimer_redis_url=NOWHERE))
    scheduler.close()
    scheduler.close()


def start_ticking(
    make_app: MakeApp, make_scheduler: MakeScheduler
) -> tuple[DistributedScheduler, DistributedTimer]:
    """Return the scheduler of a process, which has registered, and an API beside it."""
    app = make_app()
    timers, scheduler = DistributedTimer(app), make_scheduler(app, embedded=False)
    scheduler.tick()
    wait_until(lambda: registered(timers) == [scheduler.instance], "the registration")
    return scheduler, timers


@contextmanager
def on_signal(handler: Callable[..., object]) -> Iterator[None]:
    """Handle SIGUSR1 meanwhile."""
    previous = signal.signal(signal.SIGUSR1, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, previous)


def tick_for_ever(scheduler: DistributedScheduler) -> None:
    while True:
        scheduler.tick()


def test_closing_inside_a_tick_waits_for_nothing_and_the_next_call_does_it(
    make_app: MakeApp, make_scheduler: MakeScheduler
) -> None:
    """Celery's signal handler closes in the middle of a tick, and its ``finally`` once more."""
    scheduler, timers = start_ticking(make_app, make_scheduler)
    spent: list[float] = []

    def handler(*_: Any) -> None:
        started = time.monotonic()
        scheduler.close()
        spent.append(time.monotonic() - started)
        raise SystemExit

    timer = threading.Timer(0.1, os.kill, [os.getpid(), signal.SIGUSR1])
    with on_signal(handler):
        timer.start()
        try:
            with pytest.raises(SystemExit):
                tick_for_ever(scheduler)
        finally:
            timer.join()
    assert registered(timers) == [scheduler.instance]
    assert spent[0] < 0.1
    scheduler.close()
    assert registered(timers) == []


def test_a_second_signal_while_it_leaves_does_not_cut_that_short(
    make_app: MakeApp, make_scheduler: MakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Celery's handler closes once more, and what it raises ends the first call of `close`."""
    scheduler, timers = start_ticking(make_app, make_scheduler)
    again, ended = threading.Event(), threading.Event()

    def leave(*args: Any, **options: Any) -> int:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert again.wait(1)
        ended.wait(0.3)  # it never is, before this has returned
        return real(*args, **options)

    def handler(*_: Any) -> None:
        again.set()
        scheduler.close()
        raise SystemExit

    real = scheduler_module.leave
    monkeypatch.setattr(scheduler_module, "leave", leave)
    with on_signal(handler), pytest.raises(SystemExit):
        scheduler.close()
    ended.set()
    assert registered(timers) == []


def test_a_loop_that_fails_ends_the_beat_with_its_error(
    make_app: MakeApp,
    make_scheduler: MakeScheduler,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def step(self: Loop) -> float:
        raise RuntimeError("a fault of the program")

    monkeypatch.setattr(Loop, "step", step)
    scheduler = make_scheduler(make_app())
    with caplog.at_level(logging.ERROR), pytest.raises(RuntimeError, match="a fault"):
        tick_for_ever(scheduler)
    assert "The dispatch loop has failed" in caplog.text


def test_a_running_beat_looks_at_what_comes_due_soon(
    make_app: MakeApp, make_scheduler: MakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = make_app()
    DistributedTimer(app).create_timer("a", 20, "record")
    seen: list[str] = []
    look_ahead = Definitions.look_ahead

    def noting(definitions: Definitions, *args: Any) -> Any:
        found = look_ahead(definitions, *args)
        seen.extend(each.name for each in found or ())
        return found

    monkeypatch.setattr(Definitions, "look_ahead", noting)
    make_scheduler(app).start()
    wait_until(lambda: seen == ["a"], "a look")


def test_a_look_ahead_that_fails_stops_nothing(
    make_app: MakeApp,
    make_scheduler: MakeScheduler,
    read_queue: ReadQueue,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    app, failures = make_app(), []

    def fails(*args: Any) -> Any:
        failures.append(args)
        raise StoreUnavailableError("no answer")

    monkeypatch.setattr(Store, "coming", fails)
    timers, reader = DistributedTimer(app), read_queue(app)
    timers.create_timer("a", 20, "record")
    make_scheduler(app).start()
    wait_until(lambda: len(failures) >= 2, "looks")
    timers.create_timer("b", datetime.now(timezone.utc), "record")
    wait_until(lambda: len(reader.ledger) == 1, "the run")


def test_a_look_ahead_that_takes_its_time_leaves_all_of_its_own_to_the_next_call() -> None:
    """Two calls to a frozen Redis, one after the other, are no loop that hangs."""
    now, waits = [100.0], []

    def look_ahead(*_: Any) -> bool:
        now[0] += 0.5
        raise StoreUnavailableError("no answer in time")

    loop = Loop(
        SimpleNamespace(look_ahead=look_ahead),
        SimpleNamespace(lease=object(), report_progress=waits.append),
        SimpleNamespace(),
        longest_wait=1.0,
        clock=lambda: now[0],
    )
    assert not loop.look_ahead(0.75)
    assert not loop.look_ahead(0.25)
    assert waits == [0.25, 0.0]


def test_without_redis_it_waits_and_closes_in_time(
    make_app: MakeApp, caplog: pytest.LogCaptureFixture
) -> None:
    scheduler = DistributedScheduler(make_app(dtimer_redis_url=NOWHERE), max_interval=0.1)
    waits: list[float] = []
    # Not the main thread, which does not come back while nothing may be dispatched.
    ticking = threading.Thread(target=lambda: waits.extend(scheduler.tick() for _ in range(5)))
    with caplog.at_level(logging.ERROR):
        ticking.start()
        ticking.join()
        assert waits == [0] * 5
        started = time.monotonic()
        scheduler.close()
    assert time.monotonic() - started < 3
    assert len([line for line in caplog.records if "does not answer" in line.getMessage()]) <= 2


# ------------------------------------------------------------------ embedded


@pytest.mark.parametrize("embedded", [True, False])
def test_only_in_a_process_of_its_own_it_calms_the_garbage_collector(
    make_app: MakeApp,
    make_scheduler: MakeScheduler,
    monkeypatch: pytest.MonkeyPatch,
    embedded: bool,
) -> None:
    done: list[str] = []
    for name in ("collect", "freeze", "set_threshold"):
        monkeypatch.setattr(gc, name, lambda *_, name=name: done.append(name))
    make_scheduler(make_app(), embedded=embedded).start()
    assert done == ([] if embedded else ["collect", "freeze", "set_threshold"])


@pytest.fixture(autouse=True)
def leave_the_garbage_collector_alone(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """These schedulers run in the tests' process, which is not theirs."""
    if "calms_the_garbage_collector" not in request.node.name:
        monkeypatch.setattr(scheduler_module, "_calm_garbage_collector", lambda: None)


def test_an_embedded_scheduler_starts_and_stops_with_its_owner(make_app: MakeApp) -> None:
    timers = DistributedTimer(make_app(result_expires=None))
    timers.stop()
    timers.create_timer("a", 3600, "record")
    instance = timers.start()
    assert timers.start() == instance
    wait_until(lambda: registered(timers) == [instance], "the registration")
    wait_until(lambda: owners(timers) == {"a": instance}, "the owner")
    assert [timer.name for timer in timers.get_instance_timers()] == ["a"]
    timers.stop()
    timers.stop()
    assert registered(timers) == []
    again = timers.start()
    assert again != instance
    wait_until(lambda: owners(timers) == {"a": again}, "the new owner")
    timers.stop()


def test_several_embedded_schedulers_share_one_process(make_app: MakeApp) -> None:
    app = make_app(result_expires=None)
    first, second = DistributedTimer(app), DistributedTimer(app)
    first.create_timers(
        {"name": f"t{n}", "schedule": 3600, "callback": "record"} for n in range(10)
    )
    ids = {first.start(), second.start()}
    try:
        wait_until(
            lambda: (
                {each.id: each.timers for each in first.get_service_instances()}
                == dict.fromkeys(ids, 5)
            ),
            "an even share",
        )
        assert len(first.get_instance_timers()) == 5
        second.stop()
        wait_until(lambda: len(first.get_instance_timers()) == 10, "the hand-over")
    finally:
        first.stop()
        second.stop()
    assert not first.check_consistency()


def test_the_embedded_scheduler_has_the_service_that_was_given(make_app: MakeApp) -> None:
    app = make_app(dtimer_service="another")
    timers = DistributedTimer(app, service="billing")
    timers.start()
    wait_until(lambda: registered(timers), "the registration")
    assert {each.service for each in timers.get_service_instances()} == {"billing"}
    assert registered(DistributedTimer(app)) == []
    timers.stop()


# ------------------------------------------------------------------ what is refused at start


def test_a_broker_that_celery_does_not_know_is_refused_at_start(
    make_app: MakeApp, redis_server: RedisServer
) -> None:
    app = make_app(broker_url="foo://x", dtimer_redis_url=redis_server.url)
    with pytest.raises(SettingsError, match=r"broker_url.*foo"):
        DistributedScheduler(app)


def test_options_that_redis_does_not_take_are_refused_at_start(make_app: MakeApp) -> None:
    with pytest.raises(SettingsError, match="dtimer_redis_options"):
        DistributedScheduler(make_app(dtimer_redis_options={"no_such_option": 1}))


def test_two_connections_are_enough_and_one_is_refused_at_start(
    make_app: MakeApp, redis_server: RedisServer
) -> None:
    with pytest.raises(SettingsError, match=r"max_connections=1 .*at least 2"):
        DistributedScheduler(make_app(dtimer_redis_options={"max_connections": 1}))
    timers = DistributedTimer(make_app(dtimer_redis_options={"max_connections": 2}))
    moments = ["0 3 * * *", 60]
    timers.create_timers(
        {"name": f"t{i}", "schedule": moments[i % 2], "callback": "record"} for i in range(300)
    )
    assert len(timers.get_timers()) == 300


# ------------------------------------------------------------------ embedded


def test_a_forked_child_does_not_take_its_parents_scheduler_for_its_own(make_app: MakeApp) -> None:
    timers = DistributedTimer(make_app())
    timers.start()
    try:
        wait_until(lambda: registered(timers), "the instance to register")
        before = [(each.id, each.epoch) for each in timers.get_service_instances()]
        pid = os.fork()
        if pid == 0:
            timers.stop()
            os._exit(0)
        os.waitpid(pid, 0)
        assert [(each.id, each.epoch) for each in timers.get_service_instances()] == before
    finally:
        timers.stop()


def test_a_scheduler_that_has_failed_is_started_anew(make_app: MakeApp) -> None:
    timers = DistributedTimer(make_app())
    first = timers.start()
    try:
        assert timers.start() == first
        timers._scheduler._runtime._failure = RuntimeError("made up")  # type: ignore[union-attr]
        second = timers.start()
        assert second != first
        wait_until(lambda: registered(timers) == [second], "the second alone to be registered")
    finally:
        timers.stop()


def test_the_first_service_named_for_an_app_is_that_of_its_beats(make_app: MakeApp) -> None:
    app = make_app(dtimer_service=None)
    DistributedTimer(app, service="orders")
    DistributedTimer(app, service="another view")
    assert DistributedScheduler(app).settings.service == "orders"


def test_interrupting_a_hand_over_again_and_again_does_not_cut_it_short(
    make_app: MakeApp, make_scheduler: MakeScheduler
) -> None:
    app = make_app()
    timers = DistributedTimer(app)
    timers.create_timer("a", 100, "record")
    scheduler = make_scheduler(app)
    scheduler.start()
    wait_until(lambda: owners(timers) == {"a": scheduler.instance}, "the timer to be owned")
    main = threading.get_ident()

    def interrupt(*_: object) -> None:
        scheduler.close()  # as Celery's handler does
        raise SystemExit

    closing, all_sent = threading.Event(), threading.Event()

    def send() -> None:
        closing.wait()
        for pause in (0.0, 0.001, 0.001, 0.001):
            time.sleep(pause)
            signal.pthread_kill(main, signal.SIGUSR1)
        all_sent.set()

    sender = threading.Thread(target=send)
    sender.start()  # and only then are there signals, which would upset the start of a thread
    is_closed = False
    with on_signal(interrupt):
        while not is_closed:
            try:
                closing.set()
                scheduler.close()
                all_sent.wait()  # interrupted, a join takes its thread for ended, before 3.13
                is_closed = True
            except SystemExit:
                continue
    # In a thread that the process would wait for.
    wait_until(lambda: registered(timers) == [], "the hand-over")
    assert owners(timers) == {"a": None}


# ------------------------------------------------------------------ what the server may lose


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--maxmemory", "100mb", "--maxmemory-policy", "allkeys-lru"], "evicts keys"),
        (["--save", ""], "keeps nothing on disk"),
        (["--save", "900 1"], "keeps snapshots alone (900 1)"),
        (["--appendonly", "yes", "--appendfsync", "no"], "leaves it to the system"),
        (["--appendonly", "yes", "--appendfsync", "everysec"], ""),
        (["--appendonly", "yes", "--maxmemory", "100mb"], ""),
    ],
)
def test_what_the_servers_configuration_may_cost_is_said_once(
    fresh_redis: Any,
    caplog: pytest.LogCaptureFixture,
    make_scheduler: MakeScheduler,
    make_app: MakeApp,
    options: list[str],
    said: str,
) -> None:
    server = fresh_redis(*options)
    app = make_app(broker_url=server.url)
    timers = DistributedTimer(app)
    scheduler = make_scheduler(app)
    with caplog.at_level(logging.WARNING, "celery_dtimer"):
        scheduler.start()
        wait_until(lambda: registered(timers), "the instance to register")
        epoch = timers.get_service_instances()[0].epoch
        for _ in range(2):  # what is fenced registers anew
            server.client.hset(f"{instance_key(app, timers)}", "epoch", 1)
            wait_until(lambda: is_newer(timers, epoch), "another registration")
        scheduler.close()
    warnings = [text for text in caplog.messages if text.startswith("Redis ")]
    if said:
        assert len([text for text in warnings if said in text]) == 1
    else:
        assert warnings == []


def instance_key(app: Celery, timers: DistributedTimer) -> str:
    (instance,) = timers.get_service_instances()
    return f"{app.conf.dtimer_key_prefix}instance:{{orders}}:{instance.id}"


def is_newer(timers: DistributedTimer, epoch: int) -> bool:
    return [instance.epoch > epoch for instance in timers.get_service_instances()] == [True]


def test_a_server_that_does_not_tell_its_configuration_is_not_judged(
    redis_server: RedisServer,
    prefix: str,
    caplog: pytest.LogCaptureFixture,
    make_scheduler: MakeScheduler,
    make_app: MakeApp,
) -> None:
    client, user = redis_server.client, prefix.strip(":")
    client.acl_setuser(
        user,
        enabled=True,
        passwords=["+secret"],
        keys=["*"],
        channels=["*"],
        commands=["+@all", "-config"],
    )
    try:
        app = make_app(broker_url=f"redis://{user}:secret@127.0.0.1:{redis_server.port}")
        scheduler = make_scheduler(app)
        with caplog.at_level(logging.WARNING, "celery_dtimer"):
            scheduler.start()
            wait_until(lambda: registered(DistributedTimer(app)), "the instance to register")
            scheduler.close()
        assert caplog.messages == []
    finally:
        client.acl_deluser(user)


def test_of_an_embedded_server_nobody_expects_that_it_keeps_anything(
    caplog: pytest.LogCaptureFixture, make_scheduler: MakeScheduler, make_app: MakeApp
) -> None:
    app = make_app(broker_url="memory://", dtimer_redis_url="embedded://")
    scheduler = make_scheduler(app)
    with caplog.at_level(logging.WARNING, "celery_dtimer"):
        scheduler.start()
        wait_until(lambda: registered(DistributedTimer(app)), "the instance to register", 10)
        scheduler.close()
    assert "on disk" not in caplog.text
