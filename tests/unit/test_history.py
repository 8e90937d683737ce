"""What is said of a moment, from records and from a timer's state."""

from __future__ import annotations

from typing import Any

import pytest

from celery_dtimer.history import Sent, Skipped, explain, records
from celery_dtimer.model import Definition, Status, TimerState
from celery_dtimer.policy import Policy
from celery_dtimer.schedules import Crontab, Custom, Interval, OneShot, Schedule

NOW = 1_777_626_000_000  # 2026-05-01 09:00 UTC
MINUTE = 60_000
EVERY_5 = Crontab("*/5 * * * *")


def ask(
    moment_ms: int,
    *found: Sent | Skipped,
    schedule: Schedule = EVERY_5,
    status: Status = "active",
    due_ms: int | None = NOW + 5 * MINUTE,
    policy: Policy | None = None,
    readable: bool = True,
    **state: Any,
) -> str:
    definition = Definition("n", "t", schedule, policy=policy or Policy())
    stored = TimerState(
        definition.id, status, definition.revision, NOW - 10**8, due_ms=due_ms, **state
    )
    return explain(definition if readable else None, stored, moment_ms, NOW, found)


def test_lines_of_the_timer_become_records_and_others_do_not() -> None:
    entries = [
        {"at": "7", "instance": "a", "sent": "t 5 1\nother 6 1\nt 6 trigger", "skipped": ""},
        {"at": "9", "instance": "", "skipped": "t paused 2 7 8\nother paused 1 1 1"},
        {"at": "9", "instance": "a", "sent": "t x 1\nt\nt 1 2 3", "skipped": "t paused 1 x 2"},
        {"at": "9", "instance": "a", "skipped": "t misfire 1 2\nt\nt misfire 1 2 3 4"},
        {"at": "9", "unknown": "t 5 1"},
    ]
    assert list(records(entries, "t")) == [
        Sent(7, "a", 5, "1"),
        Sent(7, "a", 6, "trigger"),
        Skipped(9, "paused", 2, 7, 8),
    ]


@pytest.mark.parametrize("number", ["9" * 5000, "253402300800000", "\u00b2", "-1", ""])
def test_a_line_with_a_moment_that_nothing_has_is_left_out(number: str) -> None:
    lines = {"sent": f"t {number} 1", "skipped": f"t paused 1 {number} {number}"}
    assert list(records([{"at": "7", **lines}], "t")) == []


def test_a_run_that_was_sent_is_told_with_its_instance_and_lag() -> None:
    said = ask(NOW, Sent(NOW + 1500, "h:1:x", NOW, "7"))
    assert said == (
        "run 7, scheduled at 2026-05-01T09:00:00.000+00:00, was sent at "
        "2026-05-01T09:00:01.500+00:00 (1.5 s later) by h:1:x"
    )


def test_the_nearest_run_within_a_second_is_meant() -> None:
    near, nearer = Sent(NOW, "near", NOW - 700, "1"), Sent(NOW, "nearer", NOW + 300, "2")
    assert "nearer" in ask(NOW, near, nearer)
    assert "nearer" in ask(NOW, nearer, near)
    assert "by far" not in ask(NOW, Sent(NOW, "far", NOW - 1000, "1"))


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("misfire", "misfire_grace_time"),
        ("coalesced", "another run stood for it"),
        ("backlog", "max_catch_up"),
        ("paused", "was paused"),
        ("ended", "come to its end"),
        ("superseded", "another schedule"),
    ],
)
def test_each_reason_is_told_in_words(reason: str, words: str) -> None:
    said = ask(NOW, Skipped(NOW + 9, reason, 3, NOW - 5 * MINUTE, NOW + 5 * MINUTE))
    assert words in said
    assert f"as 2 others were ({reason})" in said


@pytest.mark.parametrize(("minute", "is_meant"), [(-5, True), (0, True), (-3, False), (10, False)])
def test_only_the_moments_of_runs_are_among_those_that_were_skipped(
    minute: int, is_meant: bool
) -> None:
    skipped = Skipped(NOW + 9, "paused", 3, NOW - 5 * MINUTE, NOW + 5 * MINUTE)
    assert ("paused" in ask(NOW + minute * MINUTE, skipped)) is is_meant


def test_the_runs_of_an_interval_are_counted_from_the_first_that_was_skipped() -> None:
    skipped = Skipped(NOW, "paused", 3, NOW - 19_997, NOW)
    rule = Interval(7_000)
    assert "paused" in ask(NOW - 12_997, skipped, schedule=rule)
    assert "paused" not in ask(NOW - 9_997, skipped, schedule=rule)


def test_a_run_within_a_second_of_those_that_were_skipped_is_none_of_them() -> None:
    skipped = Skipped(NOW + 9, "backlog", 3, NOW - 15 * MINUTE, NOW - 1)
    sent = Sent(NOW + 9, "a", NOW, "4")
    assert "run 4" in ask(NOW, skipped, sent)


@pytest.mark.parametrize(
    ("moment_ms", "state", "words"),
    [
        (NOW - 10**8 - MINUTE, {}, "was created at"),
        (NOW - 10 * MINUTE, {}, "history does not reach back"),
        (NOW - 11 * MINUTE, {}, "no run was scheduled for that moment: */5 * * * * (UTC)"),
        (NOW + 5 * MINUTE, {}, "still to come"),
        (NOW + 6 * MINUTE, {}, "no run is scheduled for that moment"),
        (NOW, {"due_ms": NOW, "attempts": 3, "owner": "i"}, "not be sent 3 times"),
        (NOW, {"due_ms": NOW, "last_sent_ms": NOW, "owner": "i"}, "still to count it"),
        (NOW, {"due_ms": NOW, "at_ms": NOW + 500, "owner": "i"}, "(jitter)"),
        (NOW, {"due_ms": NOW}, "no instance of the service is alive"),
        (NOW, {"due_ms": NOW, "owner": "h:1:x"}, "instance h:1:x has not sent it yet"),
        (NOW, {"due_ms": NOW, "status": "paused"}, "is paused"),
        (NOW, {"due_ms": NOW, "status": "stopped"}, "is stopped: it does not run"),
        (NOW, {"due_ms": None, "status": "stopped"}, "somebody has stopped it"),
        (NOW, {"due_ms": None, "status": "stopped", "reason": "finished"}, "is stopped: finished"),
        (NOW, {"status": "broken", "reason": "no such task"}, "broken and does not run: no such"),
        (NOW + 10 * MINUTE, {"policy": Policy(end_ms=NOW + 6 * MINUTE)}, "ends at"),
        (NOW + 20 * MINUTE, {"policy": Policy(max_runs=3), "runs": 1}, "ends with its run 3"),
        (NOW + 10 * MINUTE, {"policy": Policy(max_runs=3), "runs": 1}, "still to come"),
        (
            NOW + 10 * MINUTE,
            {"status": "paused", "policy": Policy(end_ms=NOW + 6 * MINUTE)},
            "ends at",
        ),
        (NOW - MINUTE, {"policy": Policy(start_ms=NOW)}, "starts at"),
        (NOW + 7, {"schedule": Custom("a.Rule", "<rule>")}, "code of its beats says so: <rule>"),
        (NOW, {"readable": False, "reason": "nonsense"}, "can not be read: nonsense"),
        (NOW, {"readable": False}, "can not be read: it is gone"),
        (NOW + 9, {"schedule": OneShot(NOW + 9), "due_ms": NOW + 9}, "still to come"),
    ],
)
def test_without_a_record_the_timers_state_tells(
    moment_ms: int, state: dict[str, Any], words: str
) -> None:
    assert words in ask(moment_ms, **state)
