"""`dtimer_max_timers`: refused at the call; a beat with too many static timers goes on."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from celery_dtimer import DistributedTimer, TooManyTimersError
from tests.conftest import MakeApp, ReadQueue
from tests.integration.conftest import StartTimers
from tests.waiting import wait_until

CLEANUP = "celery.backend_cleanup"  # Celery's own entry
ENTRY: dict[str, Any] = {"task": "record", "schedule": 0.3}


def test_a_service_takes_as_many_timers_as_it_is_allowed(make_app: MakeApp) -> None:
    timers = DistributedTimer(make_app(dtimer_max_timers=3))
    timers.create_timers([{"name": f"t{i}", "schedule": 9, "callback": "record"} for i in range(3)])
    with pytest.raises(TooManyTimersError, match=r"'orders'.*dtimer_max_timers=3"):
        timers.create_timer("one more", 9, "record")
    timers.create_timer("t0", 10, "record")  # changing one is no new one
    timers.update_timer("t1", description="changed")
    timers.pause_timer("t2")  # what does not run counts too
    with pytest.raises(TooManyTimersError):
        timers.create_timer("one more", 9, "record")
    timers.delete_timer("t2")
    timers.create_timer("one more", 9, "record")
    assert not timers.check_consistency()


def test_of_a_bulk_that_is_too_large_no_part_is_written_half(make_app: MakeApp) -> None:
    timers = DistributedTimer(make_app(dtimer_max_timers=100))
    bulk = [{"name": f"t{i}", "schedule": 9, "callback": "record"} for i in range(150)]
    with pytest.raises(TooManyTimersError):
        timers.create_timers(bulk)
    assert len(timers.get_timers()) in (64, 64 + 22)  # of three calls one or two, as a whole
    assert not timers.check_consistency()


def test_any_number_is_allowed_if_none_is_set(make_app: MakeApp) -> None:
    timers = DistributedTimer(make_app(dtimer_max_timers=None))
    timers.create_timer("t", 9, "record")
    assert len(timers.get_timers()) == 1


def test_too_many_static_timers_stop_no_beat_and_no_other_timer(
    make_app: MakeApp,
    read_queue: ReadQueue,
    start_timers: StartTimers,
    caplog: pytest.LogCaptureFixture,
) -> None:
    settings = {"dtimer_max_timers": 4, "beat_schedule": {"old": ENTRY}}
    older = DistributedTimer(make_app(**settings))
    older.start()
    older.create_timers([{"name": f"t{i}", "callback": "record", "schedule": 0.3} for i in "ab"])
    wait_until(lambda: len(older.get_timers()) == 4, "the older static schedule")
    older.stop()

    app = make_app(**{**settings, "beat_schedule": {"one": ENTRY, "two": ENTRY}})
    reader = read_queue(app)
    with caplog.at_level(logging.ERROR):
        timers = start_timers(app)
        wait_until(lambda: len(reader.ledger.slots("ta")) >= 3, "the others to run")
        wait_until(lambda: "dtimer_max_timers=4" in caplog.text, "the beat to say so")
    # What is not declared any more has made room, but for one.
    assert {timer.name for timer in timers.get_timers()} == {"ta", "tb", CLEANUP}
    timers.delete_timer("tb")
    wait_until(lambda: reader.ledger.slots("one"), "the static ones, when there is room", 15)
