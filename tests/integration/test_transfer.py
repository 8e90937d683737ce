"""Timers that are exported with their state and imported elsewhere, or here again."""

from __future__ import annotations

import itertools
import json
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any

import pytest
from celery import Celery, chain, group, signature
from celery.beat import BeatLazyFunc
from celery.schedules import BaseSchedule, crontab, solar
from dateutil.rrule import DAILY, rrule
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from celery_dtimer import (
    ConflictError,
    DistributedTimer,
    ImportResult,
    InvalidTimerError,
    SkippedRow,
    StoreError,
    TooManyTimersError,
)
from celery_dtimer.model import ONCE, Definition, TimerState, timer_id
from celery_dtimer.policy import PLAIN
from celery_dtimer.schedules import Interval
from celery_dtimer.sharding import Shards
from celery_dtimer.store import Settlement, Store, decode_name
from celery_dtimer.transfer import dumps_row, export_timers, import_timers, loads_row
from tests.conftest import MakeApp, ReadQueue
from tests.integration.conftest import (
    START_MS,
    Beat,
    Broker,
    MakeService,
    Service,
    StartTimers,
)
from tests.waiting import wait_until

NAMES = ["", "a\nb", "😀", "\ud800", "a:b", "{x}", "*?[]", "a b", "eta-x", "50%", "\x00", "é" * 300]
LONG_AGO = datetime(2020, 1, 1, tzinfo=timezone.utc)
SOON = datetime(2100, 1, 1, tzinfo=timezone.utc)


class Pair:
    """Two services on one server: what is exported from the one is imported into the other."""

    def __init__(self, one: DistributedTimer, other: DistributedTimer) -> None:
        self.one, self.other = one, other

    def lines(self, **how: Any) -> list[str]:
        return [dumps_row(row) for row in self.one.export_timers(**how)]

    def transfer(self, **how: Any) -> ImportResult:
        return self.other.import_timers(self.lines(), **how)


@pytest.fixture
def pair(make_app: MakeApp) -> Iterator[Pair]:
    """Services without instances."""
    one = DistributedTimer(make_app("one", dtimer_service="one"))
    other = DistributedTimer(make_app("other", dtimer_service="other"))
    yield Pair(one, other)
    for each in (one, other):
        assert each.check_consistency() == []


def states_of(timers: DistributedTimer) -> dict[str, tuple[TimerState | None, str | None]]:
    """Return all that is stored of a service's timers, but for who owns them."""
    store = timers.store
    ids = sorted(store.timer_ids())
    states = [state and replace(state, owner="") for state in store.states(ids)]
    return dict(zip(ids, zip(states, store.definitions(ids), strict=True), strict=True))


SCHEDULES: dict[str, Any] = {
    "interval": 10,
    "short": 0.25,
    "timedelta": timedelta(days=3),
    "crontab": crontab(minute="*/7", hour="1,2"),
    "text": "30 2 * * mon",
    "seconds": "*/5 30 2 L * *",
    "monthly": "@monthly",
    "once": SOON,
    "past": LONG_AGO,
    "rrule": rrule(DAILY, dtstart=LONG_AGO, interval=2),
    "rrule text": "DTSTART:20200101T000000\nRRULE:FREQ=WEEKLY;BYDAY=MO,FR",
    "solar": solar("sunset", 48.8, 2.3),
}

POLICIES: dict[str, dict[str, Any]] = {
    "coalesce": {"coalesce": False, "max_catch_up": 3},
    "grace": {"misfire_grace_time": 5},
    "bounds": {
        "start_at": datetime(2021, 1, 1, tzinfo=timezone.utc),
        "end_at": SOON,
        "max_runs": 9,
    },
    "jitter": {"jitter": 2},
    "shards": {"shards": 3},
    "overlap": {"overlap": "skip", "resend_lost": 2},
    "zone": {"timezone": "Europe/Paris"},
    "relative": {"relative": True},
    "options": {"queue": "q", "priority": 3, "expires": 60, "headers": {"a": 1}},
    "ends": {"expires": SOON},
    "described": {"description": "what\nit is 😀"},
    "retries": {"autoretry_for": "ValueError", "max_retries": 3, "timeout": 4},
}

TYPED = {
    "uuid": uuid.UUID(int=5),
    "decimal": Decimal("1.50"),
    "moment": datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=timezone.utc),
    "date": date(2026, 1, 2),
    "bytes": b"\x00\xff",
    "text": "\ud800😀\n",
    "nested": {"a": [1, None, 1e300, {"b": [True]}]},
    "large": 10**300,
}


def create_everything(timers: DistributedTimer) -> None:
    """Create timers of every kind, and with every status."""
    for name, schedule in SCHEDULES.items():
        timers.create_timer(f"schedule {name}", schedule, "task")
    for name, policy in POLICIES.items():
        timers.create_timer(f"policy {name}", 100, "task", **policy)
    for name in NAMES:
        timers.create_timer(name, 60, "task", args=[name], kwargs={"typed": TYPED})
    task = signature("task", args=(1,))
    for name, canvas in (
        ("chain", chain(task, task)),
        ("group", group(task, task)),
    ):
        timers.create_timer(name, 60, canvas)
    timers.create_timer("paused", 60, "task")
    timers.pause_timer("paused")
    timers.create_timer("stopped", "@daily", "task")
    timers.stop_timer("stopped")
    timers.create_timer("ended", 60, "task", end_at=LONG_AGO)


# ------------------------------------------------------------------ round trips


def test_timers_of_every_kind_arrive_as_they_were(pair: Pair) -> None:
    create_everything(pair.one)
    before = states_of(pair.one)
    result = pair.transfer()
    assert result == ImportResult(len(before), 0, 0, ())
    assert states_of(pair.other) == before
    for name in NAMES:
        timer = pair.other.get_timer(name)
        assert timer.args == [name]
        assert timer.kwargs == {"typed": TYPED}
    assert states_of(pair.one) == before


def test_importing_again_changes_nothing(pair: Pair) -> None:
    create_everything(pair.one)
    lines = pair.lines()
    pair.other.import_timers(lines)
    before = states_of(pair.other)
    assert pair.other.import_timers(lines) == ImportResult(0, 0, len(before), ())
    assert states_of(pair.other) == before


def test_importing_into_the_service_itself_changes_nothing(pair: Pair) -> None:
    create_everything(pair.one)
    before = states_of(pair.one)
    assert pair.one.import_timers(pair.lines()).unchanged == len(before)
    assert states_of(pair.one) == before


def test_rows_need_no_text(pair: Pair) -> None:
    pair.one.create_timer("a", 10, "task", kwargs={"typed": TYPED})
    assert pair.other.import_timers(pair.one.export_timers()).created == 1
    assert pair.other.get_timer("a").kwargs == {"typed": TYPED}


def test_a_row_is_one_line_of_ascii(pair: Pair) -> None:
    create_everything(pair.one)
    for line in pair.lines():
        assert line.isascii()
        assert line.isprintable()
        assert dumps_row(loads_row(line)) == line


def test_the_header_tells_format_service_and_moment(pair: Pair) -> None:
    header, *rows = pair.one.export_timers()
    assert rows == []
    assert header["format"] == "celery-dtimer timers"
    assert (header["version"], header["service"]) == (1, "one")
    exported_at = datetime.fromisoformat(header["exported_at"])
    assert abs(exported_at - datetime.now(timezone.utc)) < timedelta(minutes=1)
    again, *_ = pair.one.export_timers()
    assert again["origin"] == header["origin"]


def test_names_choose_timers_and_leave_calls_out(pair: Pair) -> None:
    for name in ("a1", "a2", "b1", "[a]"):
        pair.one.create_timer(name, 10, "task")
    pair.one.store.hold(a_call("call"), delay_ms=60_000)

    def found(name: str | None) -> list[str]:
        return sorted(row["timer"]["name"] for row in list(pair.one.export_timers(name))[1:])

    assert found("a?") == ["a1", "a2"]
    assert found("[a]") == ["[a]"]
    assert found("nobody") == []
    with pytest.raises(InvalidTimerError, match="name=3"):
        pair.one.export_timers(3)  # type: ignore[arg-type]


@pytest.mark.parametrize(("before", "after"), [(3, 1), (1, 4), (2, 3)])
def test_services_with_other_shards_have_the_same_timers(
    make_app: MakeApp, before: int, after: int
) -> None:
    one = DistributedTimer(make_app("one", dtimer_service="one", dtimer_shards=before))
    other = DistributedTimer(make_app("other", dtimer_service="other", dtimer_shards=after))
    create_everything(one)
    result = Pair(one, other).transfer()
    assert result.created == len(states_of(one))
    assert states_of(other) == states_of(one)
    assert other.check_consistency() == []
    assert Pair(one, other).transfer().unchanged == result.created


def test_timers_are_exported_and_imported_while_shards_change(service: Service) -> None:
    definitions = [service.define(f"t{n}") for n in range(40)]
    service.shards.save(definitions)
    service.shards.take(service.shards.base.begin_resharding(3))
    for store in service.shards.stores:
        store.mark_layout(service.shards.layout)
    service.store.depart([definitions[0].id])
    rows = list(export_timers(service.shards))
    assert len(rows) == 41
    for definition in definitions[:20]:
        service.shards.delete(definition.id)
    result = import_timers(Celery(set_as_current=False), service.shards, rows)
    assert (result.created, result.unchanged) == (20, 20)


NUMBERS = itertools.count()
names = st.text(max_size=20)
plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False) | names
    | st.uuids() | st.binary(max_size=10) | st.datetimes(timezones=st.just(timezone.utc)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abc", max_size=5), inner),
    max_leaves=8,
)  # fmt: skip
schedules_ = st.one_of(
    st.integers(100, 10**10).map(lambda ms: timedelta(milliseconds=ms)),
    st.sampled_from(["@hourly", "*/3 2 * * fri", "0 0 L * *", "1 2 3 4 5"]),
    st.integers(1, 10**8).map(lambda s: SOON + timedelta(seconds=s)),
)


@settings(
    max_examples=60,
    phases=[Phase.explicit, Phase.generate],
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    name=st.text(st.characters(), max_size=30),
    schedule=schedules_,
    args=st.lists(plain, max_size=3),
    kwargs=st.dictionaries(st.text("kwargs", min_size=1), plain, max_size=3),
    change=st.sampled_from(["", "pause_timer", "stop_timer"]),
    description=names,
)
def test_any_timer_makes_the_round_trip(
    pair: Pair,
    name: str,
    schedule: Any,
    args: list[Any],
    kwargs: dict[str, Any],
    change: str,
    description: str,
) -> None:
    for each in (pair.one, pair.other):
        each.store.base.delete(each.store.timer_ids())
    name = f"{next(NUMBERS)} {name}"  # a single run that was imported does not come again
    pair.one.create_timer(name, schedule, "task", args=args, kwargs=kwargs, description=description)
    if change:
        getattr(pair.one, change)(name)
    pair.transfer()
    assert states_of(pair.other) == states_of(pair.one)
    assert pair.transfer().unchanged == 1


# ------------------------------------------------------------------ states


@pytest.fixture
def other(make_service: MakeService, service: Service) -> Service:
    """A second service by the same clock."""
    made = make_service()
    made.settings = replace(made.settings, service="other")
    made.store = Store(made.settings, clock=service.clock)
    made.keys, made.clock = made.store.keys, service.clock
    made.__dict__["shards"] = Shards(made.settings, clock=service.clock)
    return made


def carry(service: Service, other: Service, **how: Any) -> ImportResult:
    """Export from one service and import into another, as a file would."""
    lines = [dumps_row(row) for row in export_timers(service.shards)]
    return import_timers(Celery(set_as_current=False), other.shards, lines, **how)


def alive(service: Service) -> int:
    """Register an instance that owns all timers; return its epoch."""
    epoch = service.join()
    service.store.reap("a", epoch)
    return epoch


def run(service: Service, timer: Definition, times: int = 1, every: float = 10) -> None:
    """Let a timer run so many times, by an instance that goes."""
    epoch = alive(service)
    for _ in range(times):
        service.let_pass(every, a=epoch)
        due = service.due("a", epoch)
        assert timer.id in [each.id for each in due]
        service.commit("a", epoch, *(service.ran(each, every) for each in due))
    service.store.leave("a", epoch)


def test_all_of_a_state_is_carried(service: Service, other: Service) -> None:
    timer = service.add(source="my.app:1")
    run(service, timer, 3)
    state = service.state(timer.id)
    service.store.replace(state, timer, replace(timer, description="new"))
    service.redis.hset(
        service.keys("timer", timer.id),
        mapping={"skipped_misfire": 4, "last_sent": START_MS + 40_000, "armed": START_MS},
    )
    assert carry(service, other).created == 1
    before = service.state(timer.id)
    assert before.runs == 3
    assert before.changed_ms
    assert before.skips == {"misfire": 4}
    assert other.state(timer.id) == before
    assert decode_name(before.source) == "my.app:1"
    assert other.store.static_timers("my.app:1") == {timer.id}


def test_a_finished_timer_stays_finished_and_is_purged(service: Service, other: Service) -> None:
    timer = service.add(at_ms=START_MS + 1000, kwargs={"a": "b" * 100})
    epoch = alive(service)
    service.clock.advance(1)
    due = service.due_one("a", epoch)
    assert service.commit("a", epoch, Settlement(due, "run", summary=timer.summary)) == [1]
    service.store.leave("a", epoch)
    assert service.state(timer.id).is_finished
    assert carry(service, other).created == 1
    assert other.state(timer.id) == service.state(timer.id)
    assert other.store.definitions([timer.id]) == service.store.definitions([timer.id])
    other.store.save([timer])
    assert other.state(timer.id).is_finished, "it has run"
    other.clock.advance(7 * 86400 + 1)
    assert other.store.purge() == 1


def test_a_timer_that_is_further_on_here_keeps_its_state(service: Service, other: Service) -> None:
    timer = service.add()
    run(service, timer)
    carry(service, other)
    run(other, timer, 2)
    before = other.state(timer.id)
    assert carry(service, other) == ImportResult(0, 0, 1, ())
    assert other.state(timer.id) == before


def test_a_timer_that_is_further_on_there_takes_that_state(
    service: Service, other: Service
) -> None:
    timer = service.add()
    carry(service, other)
    run(service, timer, 2)
    assert carry(service, other) == ImportResult(0, 1, 0, ())
    assert other.state(timer.id) == service.state(timer.id)


def test_a_timer_that_has_begun_here_by_itself_goes_on_in_the_old_phase(
    service: Service, other: Service
) -> None:
    timer = service.add(source="app")
    run(service, timer)
    service.clock.advance(3)
    other.add(source="app")
    assert carry(service, other).updated == 1
    assert other.state(timer.id) == service.state(timer.id)


def test_what_was_paused_here_since_stays_so(service: Service, other: Service) -> None:
    timer = service.add()
    carry(service, other)
    other.store.pause(timer.id)
    assert carry(service, other).unchanged == 1
    assert other.state(timer.id).status == "paused"


def test_a_broken_timer_here_is_mended_by_the_import(service: Service, other: Service) -> None:
    timer = service.add()
    carry(service, other)
    epoch = alive(other)
    other.clock.advance(10)
    other.commit("a", epoch, Settlement(other.due_one("a", epoch), "broken", reason="x"))
    other.store.leave("a", epoch)
    assert other.state(timer.id).status == "broken"
    assert carry(service, other).updated == 1
    assert other.state(timer.id) == service.state(timer.id)


# ------------------------------------------------------------------ other definitions


def test_another_definition_is_replaced_kept_or_refused(service: Service, other: Service) -> None:
    timer = service.add(args=["new"])
    fine = service.add("another")
    other.add(args=["old"])
    with pytest.raises(ConflictError, match=r"line \d: timer 'timer' has another definition"):
        carry(service, other, on_conflict="fail")
    assert not other.exists(fine.id), "nothing was stored"
    assert carry(service, other, on_conflict="keep") == ImportResult(1, 0, 1, ())
    assert '"old"' in str(other.store.definitions([timer.id])[0])
    assert carry(service, other) == ImportResult(0, 1, 1, ())
    assert other.store.definitions([timer.id]) == [timer.blob]
    assert carry(service, other, on_conflict="fail").unchanged == 2


def test_a_definition_that_is_replaced_does_not_run_again_what_has_run(
    service: Service, other: Service
) -> None:
    timer = service.add(args=["new"])
    old = other.add(args=["old"])
    run(other, old, 3)
    assert carry(service, other).updated == 1
    state = other.state(timer.id)
    assert state.last_run_ms == START_MS + 30_000
    assert state.due_ms == START_MS + 40_000
    once = service.add("once", at_ms=START_MS + 31_000, args=["new"])
    other.add("once", at_ms=START_MS + 32_000)
    epoch = alive(other)
    other.clock.advance(3)
    other.commit("a", epoch, Settlement(other.due_one("a", epoch), "run"))
    other.store.leave("a", epoch)
    carry(service, other)
    assert other.state(once.id).status == "stopped"


def test_a_static_timer_keeps_what_its_code_declares(service: Service, other: Service) -> None:
    timer = service.add(args=["exported"], source="app")
    run(service, timer)
    declared = other.add(args=["declared"], source="app")
    assert carry(service, other).updated == 1
    state = other.state(timer.id)
    assert (state.revision, state.source) == (declared.revision, "app")
    assert state.due_ms == service.state(timer.id).due_ms
    assert other.store.definitions([timer.id]) == [declared.blob]
    assert carry(service, other).unchanged == 1
    other.store.delete([timer.id])
    other.add(every=77, source="app")
    assert carry(service, other, on_conflict="fail").unchanged == 1


def test_on_conflict_is_one_of_three(pair: Pair) -> None:
    with pytest.raises(InvalidTimerError, match="on_conflict='merge'"):
        pair.transfer(on_conflict="merge")


# ------------------------------------------------------------------ what runs once


def a_call(task_id: str = "c1", **kwargs: Any) -> Definition:
    """Return a call that waits for its time."""
    message = {"args": ["x"], "kwargs": kwargs, "q": ["celery"]}
    return Definition(task_id, "task", ONCE, message=message)


def test_calls_that_wait_are_carried_unless_they_are_not_wanted(pair: Pair) -> None:
    pair.one.store.hold(a_call(secret="s3cret"), delay_ms=60_000)
    assert len(pair.lines(include_pending=False)) == 1
    assert pair.transfer().created == 1
    (call,) = pair.other.get_pending()
    assert (call.task_id, call.kwargs) == ("c1", {"secret": "s3cret"})
    assert states_of(pair.other) == states_of(pair.one)
    assert pair.transfer() == ImportResult(0, 0, 1, ())
    assert len(pair.other.get_pending()) == 1


def keep_once(service: Service, kind: str) -> Definition:
    """Store what runs once, in a second: a call, or a timer."""
    if kind == "timer":
        once = service.define("once", at_ms=START_MS + 1000)
        service.store.save([once])
    else:
        once = a_call()
        service.store.hold(once, delay_ms=1000)
    return once


@pytest.mark.parametrize("kind", ["call", "timer"])
def test_what_runs_once_does_not_come_a_second_time(
    service: Service, other: Service, kind: str
) -> None:
    once = keep_once(service, kind)
    assert carry(service, other).created == 1
    other.store.delete([once.id])
    result = carry(service, other)
    assert (result.created, len(result.skipped)) == (0, 1)
    assert result.skipped[0].line == 2
    assert "has been sent or removed since" in result.skipped[0].reason
    assert not other.exists(once.id)


@pytest.mark.parametrize("kind", ["call", "timer"])
def test_what_runs_once_does_not_come_back_where_it_was_exported(
    service: Service, kind: str
) -> None:
    once = keep_once(service, kind)
    plain = service.add("plain")
    rows = list(export_timers(service.shards))
    service.store.delete([once.id, plain.id])
    service.clock.advance(2)
    result = import_timers(Celery(set_as_current=False), service.shards, rows)
    assert (result.created, len(result.skipped)) == (1, 1)
    assert service.exists(plain.id)
    assert not service.exists(once.id)


def test_a_service_that_has_lost_its_data_gets_everything_back(service: Service) -> None:
    service.store.hold(a_call(), delay_ms=1000)
    rows = list(export_timers(service.shards))
    service.redis.delete(*service.redis.keys(f"{service.settings.key_prefix}*"))
    service.clock.advance(2)
    assert import_timers(Celery(set_as_current=False), service.shards, rows).created == 1


# ------------------------------------------------------------------ rows that can not be


def bad(row: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {name: value for name, value in {**row, **changes}.items() if value != "drop"}


def in_timer(**changes: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda row: {**row, "timer": bad(row["timer"], **changes)}


def on_row(**changes: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda row: bad(row, **changes)


DEEP = json.loads("[" * 300 + "]" * 300)

BAD: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "no object": (lambda row: "[1]", r"the row=\[1\]"),
    "no JSON": (lambda row: "{", "it is not JSON"),
    "deep": (lambda row: "[" * 100_000, "it is not JSON"),
    "no row": (lambda row: 5, "=5 is not accepted"),
    "unknown field": (on_row(colour=1), "field='colour'"),
    "no timer": (on_row(timer="drop"), "timer is missing"),
    "a timer that is none": (on_row(timer=[1]), r"timer=\[1\]"),
    "no status": (on_row(status="drop"), "status=None"),
    "status": (on_row(status="moving"), "status='moving'"),
    "status of another kind": (on_row(status=[1]), r"status=\[1\]"),
    "no creation": (on_row(created_at="drop"), "created_at is missing"),
    "no moment": (on_row(due_at="drop"), "due_at is missing"),
    "moment": (on_row(due_at="soon"), "due_at='soon'"),
    "naive": (on_row(due_at="2026-01-01T00:00:00"), "due_at='2026-01-01T00:00:00'"),
    "early": (on_row(due_at="1969-01-01T00:00:00+00:00"), "due_at="),
    "moment of another kind": (on_row(created_at=5), "created_at=5"),
    "order": (on_row(last_run_at="2999-01-01T00:00:00+00:00"), "after last_run_at"),
    "runs": (on_row(runs=-1), "runs=-1"),
    "runs of another kind": (on_row(runs=True), "runs=True"),
    "skips": (on_row(skips={"boredom": 1}), "skips="),
    "count of skips": (on_row(skips={"misfire": "1"}), r"skips\['misfire'\]='1'"),
    "reason": (on_row(reason=5), "reason=5"),
    "source": (on_row(source=[]), r"source=\[\]"),
    "no name": (in_timer(name="drop"), "lacks 'name'"),
    "name": (in_timer(name=5), "name is 5"),
    "task": (in_timer(task=""), "task=''"),
    "schedule": (in_timer(schedule={"type": "never"}), "schedule"),
    "options": (in_timer(options={"queue": 5}), r"options\['queue'\]=5"),
    "a task id": (in_timer(options={"task_id": "x"}), "task_id"),
    "policy": (in_timer(shards=0), "shards"),
    "newer": (in_timer(colour="red"), "newer version"),
    "schema": (in_timer(schema=99), "newer version"),
    "large": (in_timer(args=["x" * 2_000_000]), "takes .* bytes"),
    "nested": (in_timer(kwargs={"a": DEEP}), "nested"),
    "cut": (in_timer(cut=True), "cut"),
    "message": (in_timer(message={}), "the definition of one"),
    "typed": (in_timer(args=[{"__type__": "uuid", "__value__": 5}]), "not JSON"),
    "twice": (on_row(timer={"name": "first", "task": "t", "schedule": {}}), "schedule"),
}


@pytest.mark.parametrize("what", BAD)
@pytest.mark.parametrize("as_text", [True, False])
def test_a_bad_row_is_named_and_nothing_is_stored(pair: Pair, what: str, as_text: bool) -> None:
    change, message = BAD[what]
    for name in ("first", "second", "third"):
        pair.one.create_timer(name, 3600, "task")
    header, *rows = pair.one.export_timers()
    spoiled = change(rows[2])
    lines = [header, rows[0], rows[1], spoiled]
    if as_text:
        lines = [
            line if isinstance(line, str) else dumps_row(line) if isinstance(line, dict) else line
            for line in lines
        ]
    with pytest.raises(InvalidTimerError, match=rf"line 4.*{message}"):
        pair.other.import_timers(lines)
    assert pair.other.get_timers() == []


def test_a_name_that_comes_twice_is_named_with_both_lines(pair: Pair) -> None:
    pair.one.create_timer("a", 10, "task")
    header, row = pair.lines()
    with pytest.raises(InvalidTimerError, match="line 4: the name 'a' is in line 2 already"):
        pair.other.import_timers([header, row, "", row])


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({}, "format=None"),
        ({"format": "other"}, "format='other'"),
        ({"format": "celery-dtimer timers"}, "version=None"),
        ({"format": "celery-dtimer timers", "version": True}, "version=True"),
        ({"format": "celery-dtimer timers", "version": 2}, "newer format"),
        ({"format": "celery-dtimer timers", "version": 1, "origin": 5}, "origin=5"),
    ],
)
def test_a_header_that_is_not_read_here_is_refused(
    pair: Pair, header: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidTimerError, match=f"line 1: .*{message}"):
        pair.other.import_timers([header])


def test_what_has_no_header_is_refused(pair: Pair) -> None:
    for rows in ([], [""]):
        with pytest.raises(InvalidTimerError, match="line 1: format=None"):
            pair.other.import_timers(rows)
    for wrong in (None, 5, "text", {"a": 1}):
        with pytest.raises(InvalidTimerError, match="rows="):
            pair.other.import_timers(wrong)  # type: ignore[arg-type]


def test_only_allowed_tasks_are_imported(make_app: MakeApp) -> None:
    one = DistributedTimer(make_app("one", dtimer_service="one"))
    schedule = {"static": {"task": "code.task", "schedule": 10}}
    app = make_app(
        "o", dtimer_service="other", dtimer_allowed_tasks=["good"], beat_schedule=schedule
    )
    other = DistributedTimer(app)
    one.create_timer("a", 10, "good")
    assert Pair(one, other).transfer().created == 1
    one.create_timer("b", 10, "bad")
    with pytest.raises(InvalidTimerError, match="line 3: the task 'bad' is not allowed"):
        Pair(one, other).transfer()
    one.delete_timer("b")
    one.store.save([Definition("static", "code.task", Interval(10_000))])
    with pytest.raises(InvalidTimerError, match=r"code\.task"):
        Pair(one, other).transfer()
    one.delete_timer("static")
    one.store.base.save([Definition("static", "code.task", Interval(10_000))], source="o")
    assert Pair(one, other).transfer().created == 1
    one.store.hold(replace(a_call(), task="bad"), delay_ms=5000)
    with pytest.raises(InvalidTimerError, match="'bad' is not allowed"):
        Pair(one, other).transfer()


def test_no_more_timers_are_imported_than_there_may_be(make_app: MakeApp) -> None:
    one = DistributedTimer(make_app("one", dtimer_service="one"))
    other = DistributedTimer(make_app("other", dtimer_service="other", dtimer_max_timers=4))
    one.create_timers([{"name": f"{n}", "schedule": 10, "callback": "t"} for n in range(5)])
    with pytest.raises(TooManyTimersError):
        Pair(one, other).transfer()
    assert other.get_timers() == []
    one.delete_timer("4")
    assert Pair(one, other).transfer().created == 4
    assert Pair(one, other).transfer().unchanged == 4


def test_broken_timers_that_can_not_be_read_are_told(service: Service, other: Service) -> None:
    broken = {"b1": ('{"name":"b1","task":"t"}', "no schedule"), "b2": ("[]", "nothing")}
    service.store.save_broken(broken, source="app")
    fine, gone = service.add("fine"), service.add("gone")
    service.redis.delete(service.keys("timer_definition", gone.id))
    service.is_damaged = True
    result = carry(service, other)
    assert result.created == 1
    assert sorted(each.name for each in result.skipped) == sorted(["b1", timer_id("b2"), gone.id])
    assert all(isinstance(each, SkippedRow) and each.reason for each in result.skipped)
    assert other.exists(fine.id)


class Odd(BaseSchedule):
    """A schedule that is code."""

    def is_due(self, last_run_at: datetime) -> Any:
        return False, 10.0


def test_what_is_code_is_carried_for_the_code_that_declares_it(
    make_app: MakeApp, start_timers: StartTimers
) -> None:
    schedule = {
        "lazy": {"task": "t", "schedule": 3600, "args": [BeatLazyFunc(lambda: 1)]},
        "odd": {"task": "t", "schedule": Odd()},
    }
    app = make_app("shop", dtimer_service="one", beat_schedule=schedule)
    one = start_timers(app)
    wait_until(lambda: len(one.get_timers()) >= 2, "the static timers")
    other = DistributedTimer(make_app("shop", dtimer_service="other", beat_schedule=schedule))
    lines = [dumps_row(row) for row in one.export_timers()]
    assert other.import_timers(lines).skipped == ()
    before = {timer.name: timer.next_run_at for timer in one.get_timers(name="lazy")}
    assert {timer.name: timer.next_run_at for timer in other.get_timers(name="lazy")} == before
    rows = [loads_row(line) for line in lines]
    orphans = [{k: v for k, v in row.items() if k != "source"} for row in rows]
    third = DistributedTimer(make_app("shop", dtimer_service="third"))
    skipped = third.import_timers(orphans).skipped
    assert {each.name for each in skipped} == {"lazy", "odd"}
    assert all("are code" in each.reason for each in skipped)


def test_progress_is_told_in_rows(pair: Pair) -> None:
    pair.one.create_timers([{"name": f"{n}", "schedule": 10, "callback": "t"} for n in range(150)])
    told: list[int] = []
    pair.transfer(on_progress=told.append)
    assert told == [64, 128, 150]


# ------------------------------------------------------------------ a switch


def test_nothing_runs_twice_or_not_at_all_at_a_switch(
    service: Service, other: Service, broker: Broker
) -> None:
    """The oracle: multiples of each interval, with one that stands for what was missed."""
    everys = (1, 3, 7)
    for every in everys:
        service.add(f"each-{every}", every=every)
        service.add(f"all-{every}", every=every, policy=replace(PLAIN, coalesce=False))
    beat = Beat(service, broker, "a")

    def live(beat: Beat, seconds: int) -> None:
        for _ in range(seconds):
            service.clock.advance(1)
            beat.service.store.heartbeat(beat.instance, beat.lease.epoch)
            beat.step()

    beat.service.store.reap("a", beat.lease.epoch)
    live(beat, 20)
    beat.service.store.leave("a", beat.lease.epoch)
    beat.store.close()
    lines = [dumps_row(row) for row in export_timers(service.shards)]
    service.clock.advance(10)
    import_timers(Celery(set_as_current=False), other.shards, lines)
    second = Beat(other, broker, "b")
    second.service.store.reap("b", second.lease.epoch)
    live(second, 20)
    import_timers(Celery(set_as_current=False), other.shards, lines)
    live(second, 10)
    second.service.store.leave("b", second.lease.epoch)
    second.store.close()
    for every in everys:
        slots = broker.slots(f"all-{every}")
        assert slots == list(range(every, 61, every))
        expected = set(range(every, 61, every))
        missed = sorted(slot for slot in expected if 20 < slot <= 31)
        assert set(broker.slots(f"each-{every}")) == expected - set(missed[1:])
        assert len(broker.slots(f"each-{every}")) == len(set(broker.slots(f"each-{every}")))
    assert other.state(timer_id("each-1")).skips["coalesced"] >= 9
    ids = [run.task_id for run in broker.sent]
    assert len(ids) == len(set(ids))


def test_live_beats_fire_what_is_imported_at_once(
    make_app: MakeApp, start_timers: StartTimers, read_queue: ReadQueue
) -> None:
    one = DistributedTimer(make_app("one", dtimer_service="one"))
    app = make_app(
        "other", dtimer_service="other", dtimer_check_interval=30, dtimer_instance_timeout=60
    )
    other = start_timers(app)
    wait_until(other.get_service_instances, "the instance to be registered")
    reader = read_queue(app)
    one.create_timer("each", 0.3, "task")
    Pair(one, other).transfer()
    wait_until(lambda: "each" in reader.ledger.names(), "it to be sent")
    reader.ledger.assert_nothing_doubled()


def test_an_export_is_refused_where_the_store_refuses(pair: Pair) -> None:
    broken = pair.one.store.base
    broken.client.set(broken.keys("timer_queue"), "text")
    with pytest.raises(StoreError):
        list(pair.one.export_timers())
    broken.client.delete(broken.keys("timer_queue"))
