"""Policies: what keywords are accepted, and that they come back from storage as they went in."""

from __future__ import annotations

import json
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_dtimer.errors import InvalidTimerError
from celery_dtimer.model import Definition, decode_definition, schedule_part, window_part
from celery_dtimer.policy import (
    KEYWORDS,
    PLAIN,
    Policy,
    check_policy,
    decode_policy,
    parse_policy,
)
from celery_dtimer.schedules import Custom, Interval, OneShot

UTC = timezone.utc
START = datetime(2026, 5, 1, 9, 0, tzinfo=UTC)
START_MS = 1_777_626_000_000


def test_each_keyword_says_a_part_of_the_policy() -> None:
    keywords: dict[str, Any] = {
        "start_at": START,
        "end_at": START + timedelta(days=1),
        "max_runs": 5,
        "jitter": 1.5,
        "coalesce": False,
        "misfire_grace_time": timedelta(minutes=1),
        "max_catch_up": 7,
        "shards": 3,
        "overlap": "skip",
        "resend_lost": 2,
    }
    assert keywords.keys() == set(KEYWORDS)
    policy = parse_policy({**keywords, "name": "n", "queue": "q"}, "UTC")
    assert policy == Policy(
        START_MS, START_MS + 86_400_000, 5, 1500, False, 60_000, 7, 3, "skip", 2
    )


@pytest.mark.parametrize("keywords", [{}, dict.fromkeys(KEYWORDS), {"jitter": 0, "shards": 1}])
def test_what_is_left_out_has_its_default(keywords: dict[str, Any]) -> None:
    assert parse_policy(keywords, "UTC") == PLAIN == Policy()


def test_a_datetime_without_a_zone_is_the_timers() -> None:
    policy = parse_policy({"start_at": datetime(2026, 5, 1, 11, 0)}, "Europe/Paris")  # noqa: DTZ001
    assert policy.start_ms == START_MS


def test_what_is_not_named_stays_and_none_stands_for_the_default() -> None:
    current = Policy(start_ms=START_MS, max_runs=5, coalesce=True, jitter_ms=9)
    assert parse_policy({}, "UTC", current) == current
    changed = parse_policy({"max_runs": None, "coalesce": None, "jitter": None}, "UTC", current)
    assert changed == Policy(start_ms=START_MS)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("start_at", value) for value in (5, "2026-01-01", True)),
        *(("end_at", value) for value in (5, "2026-01-01")),
        *(("max_runs", value) for value in (0, -1, 1.5, True, "3", 10**13)),
        *(("jitter", value) for value in (-1, "3", True, float("nan"), float("inf"), 1e12)),
        *(("coalesce", value) for value in (0, 1, "yes")),
        *(("misfire_grace_time", value) for value in (0, 0.9, -1, "60", True, timedelta.max)),
        *(("max_catch_up", value) for value in (-1, 1.5, True, "3", 10_001)),
        *(("shards", value) for value in (0, -1, 1.5, True, "3", 1001)),
    ],
)
def test_what_cannot_be_is_refused_by_its_name_and_value(field: str, value: Any) -> None:
    with pytest.raises(InvalidTimerError, match=rf"^{field}=.* is not accepted; expected ") as exc:
        parse_policy({field: value}, "UTC")
    assert repr(value)[:40] in str(exc.value)


def test_an_end_before_the_start_is_refused() -> None:
    with pytest.raises(InvalidTimerError, match=r"^end_at="):
        parse_policy({"start_at": START, "end_at": START - timedelta(seconds=1)}, "UTC")
    parse_policy({"start_at": START, "end_at": START}, "UTC")


@pytest.mark.parametrize("policy", [Policy(start_ms=1), Policy(max_runs=1)])
def test_a_single_run_has_neither_a_start_nor_a_number(policy: Policy) -> None:
    with pytest.raises(InvalidTimerError, match="runs once"):
        check_policy(policy, OneShot(START_MS))
    check_policy(Policy(end_ms=START_MS, jitter_ms=5), OneShot(START_MS))


def test_jitter_is_shorter_than_the_interval() -> None:
    with pytest.raises(InvalidTimerError, match=r"^jitter=10\.0"):
        check_policy(Policy(jitter_ms=10_000), Interval(10_000))
    check_policy(Policy(jitter_ms=9_999), Interval(10_000))


@pytest.mark.parametrize(
    "policy",
    [Policy(jitter_ms=5), Policy(grace_ms=5000), Policy(coalesce=True), Policy(max_catch_up=3)],
)
def test_a_schedule_that_is_code_decides_itself(policy: Policy) -> None:
    with pytest.raises(InvalidTimerError, match="own code"):
        check_policy(policy, Custom("a.Rule"))
    check_policy(Policy(max_runs=3, end_ms=START_MS, shards=2), Custom("a.Rule"))


policies = st.builds(
    Policy,
    start_ms=st.none() | st.integers(0, START_MS),
    end_ms=st.none() | st.integers(START_MS, 2 * START_MS),
    max_runs=st.none() | st.integers(1, 10**12),
    jitter_ms=st.integers(0, 10**9),
    coalesce=st.none() | st.booleans(),
    grace_ms=st.none() | st.integers(1000, 10**9),
    max_catch_up=st.none() | st.integers(0, 10_000),
    shards=st.integers(1, 1000),
)


@given(policies)
def test_a_policy_comes_back_from_storage(policy: Policy) -> None:
    assert decode_policy(json.loads(json.dumps(policy.encode()))) == policy
    definition = Definition("n", "t", Interval(10_000), policy=policy)
    assert decode_definition(definition.blob).policy == policy


def test_a_plain_policy_takes_no_room() -> None:
    assert PLAIN.encode() == {}
    assert decode_policy({"name": "n"}) is PLAIN


@pytest.mark.parametrize(
    "stored",
    [{"max_runs": "3"}, {"jitter_ms": None}, {"coalesce": 1}, {"shards": 0}, {"start_ms": 1.5}],
)
def test_a_policy_edited_by_hand_is_refused(stored: dict[str, Any]) -> None:
    with pytest.raises(InvalidTimerError, match="is not accepted"):
        decode_policy(stored)


# ------------------------------------------------------------------ revisions


def define(**fields: Any) -> Definition:
    return Definition("n", "t", Interval(10_000), **fields)


@given(policies, policies)
def test_equal_definitions_have_equal_revisions_and_others_others(one: Policy, two: Policy) -> None:
    revisions = {define(policy=policy).revision for policy in (one, two)}
    assert len(revisions) == (1 if one == two else 2)


def test_only_bounds_are_in_the_last_part_of_a_revision() -> None:
    plain = define().revision
    assert window_part(plain) == ""
    for policy in (Policy(jitter_ms=5), Policy(coalesce=False), Policy(shards=2)):
        revision = define(policy=policy).revision
        assert revision != plain
        assert (schedule_part(revision), window_part(revision)) == (schedule_part(plain), "")
    bounds = [
        define(policy=Policy(start_ms=5)),
        define(policy=Policy(end_ms=5)),
        define(policy=Policy(max_runs=5)),
        define(options={"expires": START}),
    ]
    assert len({window_part(each.revision) for each in bounds} - {""}) == 4
    assert {schedule_part(each.revision) for each in bounds} == {schedule_part(plain)}
