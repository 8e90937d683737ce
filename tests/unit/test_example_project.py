"""The example project: its schedule can be used, and the demo's verdict sees what goes wrong."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timedelta, timezone

import pytest
from celery import Celery, _state

from celery_dtimer.declarations import declaration_of, declared
from celery_dtimer.schedules import Crontab, Interval, OneShot, Schedule
from example_project.demo.verdict import Account, SeenRun, Tally, merged, slots, tally

START = datetime(2026, 3, 2, 6, 59, 30, tzinfo=timezone.utc)


@pytest.fixture(scope="module")
def shop() -> Iterator[Celery]:
    """The example's app; the app that was current before is so again afterwards."""
    before = _state._tls.current_app
    from example_project.celery import app

    app.loader.import_default_modules()
    app.finalize()
    yield app
    _state._tls.current_app = before


def test_each_entry_of_the_schedule_can_be_used(shop: Celery) -> None:
    declaration = declaration_of(shop, "shop", declared(shop))

    assert not declaration.broken
    assert set(declaration.definitions) == {
        "daily sales report",
        "remove old carts",
        "visitors of the last minute",
    }


def test_each_entry_names_a_task_of_the_app(shop: Celery) -> None:
    declaration = declaration_of(shop, "shop", declared(shop))

    assert {definition.task for definition in declaration.definitions.values()} <= set(shop.tasks)


def at(seconds: float) -> datetime:
    return START + timedelta(seconds=seconds)


def account(schedule: Schedule | None, *, until: float, skipped: int = 0) -> Account:
    return Account("id", "a timer", schedule, START, at(until), skipped)


def seen(*seconds: float, timer_id: str = "id") -> list[SeenRun]:
    return [
        SeenRun(timer_id, "a timer", "host:1:x", "worker 1", 1, at(each), timedelta(seconds=0.01))
        for each in seconds
    ]


def judged(schedule: Schedule | None, runs: list[SeenRun], **facts: float) -> Tally:
    (found,) = tally([account(schedule, **facts)], runs)
    return found


EVERY_2 = Interval(2000)


def test_runs_at_every_slot_are_clean() -> None:
    found = judged(EVERY_2, seen(2, 4, 6), until=8)

    assert found.is_clean
    assert (found.slots, found.ran) == (3, 3)


def test_a_phase_that_lies_a_little_before_the_creation_is_no_fault() -> None:
    assert judged(EVERY_2, seen(1.99, 3.99, 5.99), until=7.99).is_clean


@pytest.mark.parametrize("runs", [(4, 6), (2, 6), (2, 4), ()], ids=str)
def test_a_slot_without_a_run_is_lost(runs: tuple[float, ...]) -> None:
    found = judged(EVERY_2, seen(*runs), until=8)

    assert found.lost == 3 - len(runs)
    assert not found.is_clean


def test_a_slot_that_the_timer_counts_as_skipped_is_not_lost() -> None:
    found = judged(EVERY_2, seen(2, 6), until=8, skipped=1)

    assert found.is_clean
    assert (found.slots, found.ran, found.skipped) == (3, 2, 1)


def test_a_timer_that_counts_too_many_as_skipped_is_wrong() -> None:
    assert not judged(EVERY_2, seen(2, 4, 6), until=8, skipped=1).is_clean


def test_a_slot_that_ran_twice_is_doubled() -> None:
    found = judged(EVERY_2, seen(2, 4, 4, 6), until=8)

    assert found.doubled == 1
    assert not found.is_clean


def test_a_run_beside_the_slots_is_stray() -> None:
    assert judged(EVERY_2, seen(2, 4, 5, 6), until=8).stray == 1


def test_a_run_after_the_end_is_stray() -> None:
    assert judged(EVERY_2, seen(2, 4, 6, 8), until=8).stray == 1


def test_a_deleted_timer_must_not_run() -> None:
    assert judged(None, [], until=8).is_clean
    assert judged(None, seen(2), until=8).stray == 1


def test_runs_of_an_unknown_timer_are_stray() -> None:
    known, unknown = tally([account(EVERY_2, until=1)], seen(2, 4, timer_id="other"))

    assert known.is_clean
    assert unknown.stray == 2


def test_a_one_shot_runs_at_its_moment() -> None:
    once = OneShot(round(at(5).timestamp() * 1000))

    assert judged(once, seen(5), until=8).is_clean
    assert judged(once, [], until=5).is_clean
    assert judged(once, [], until=8).lost == 1


@pytest.mark.parametrize(
    ("expression", "zone", "expected"),
    [
        ("* * * * *", "UTC", [30, 90]),
        ("0 7 * * *", "UTC", [30]),
        ("1 8 * * mon", "Europe/Paris", [90]),
        ("0 7 * * sun", "UTC", []),
    ],
)
def test_crontab_slots(expression: str, zone: str, expected: list[int]) -> None:
    facts = account(Crontab(expression, zone), until=120)

    assert list(slots(facts)) == [at(seconds) for seconds in expected]


def test_several_tallies_as_one() -> None:
    one = judged(EVERY_2, seen(2, 4, 4), until=8)

    both = merged("both", [one, replace(one, longest_lag=timedelta(seconds=3))])

    assert (both.slots, both.ran, both.lost, both.doubled) == (6, 4, 2, 2)
    assert both.longest_lag == timedelta(seconds=3)
