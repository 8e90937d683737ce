"""Subclasses of Celery's schedules: they live in code, and are asked as Celery's beat asks them."""

from __future__ import annotations

import copy
import json
import math
import pickle
from datetime import datetime, timedelta, timezone
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from celery import Celery
from celery.schedules import BaseSchedule, crontab, schedstate, schedule, solar

from celery_dtimer.errors import InvalidTimerError
from celery_dtimer.schedules import Custom, Schedule, decode, parse

UTC = timezone.utc
TOKYO = ZoneInfo("Asia/Tokyo")
SECOND, HOUR, DAY = 1000, 3_600_000, 86_400_000
NOW = 1_790_000_000_000


@pytest.fixture
def app() -> Celery:
    return Celery("customs", set_as_current=False, config_source={"timezone": "Asia/Tokyo"})


class Answers(BaseSchedule):
    """Gives one answer, and remembers what it was asked."""

    def __init__(self, answer: Any, app: Celery, nowfun: Any = None) -> None:
        super().__init__(nowfun=nowfun, app=app)
        self.answer = answer
        self.asked: list[tuple[datetime, datetime]] = []

    def is_due(self, last_run_at: datetime) -> Any:
        self.asked.append((self.now(), last_run_at))
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


class Weekend(crontab):
    """A crontab with an argument that Celery's own copies of it would lose."""

    def __init__(self, hours: list[int], **options: Any) -> None:
        super().__init__(minute=0, hour=hours, day_of_week="sat,sun", **options)
        self.hours = hours

    def is_due(self, last_run_at: datetime) -> Any:
        assert self.hours
        return super().is_due(last_run_at)


class Often(schedule):
    """A plain interval by another name."""


class Calm(BaseSchedule):
    """Says something of itself."""

    def __repr__(self) -> str:
        return "<calm>"


class Failing(BaseSchedule):
    """Cannot even be shown."""

    def __repr__(self) -> str:
        raise RuntimeError("not now")


def parsed(value: Any, **options: Any) -> Schedule:
    return parse(value, timezone=None, default_timezone=UTC, **{"bound": True, **options})


def custom(value: Any) -> Custom:
    rule = parsed(value)
    assert isinstance(rule, Custom)
    return rule


def at(text: str) -> int:
    return round(datetime.fromisoformat(text).timestamp() * 1000)


# --- what is one --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "name", "text"),
    [
        (Calm(), "Calm", "<calm>"),
        (Failing(), "Failing", ""),
        (Often(30), "Often", "<freq: 30.00 seconds>"),
        (Weekend([9]), "Weekend", repr(Weekend([9]))),
        (
            type("Sun", (solar,), {})("sunset", 48.8, 2.3),
            "Sun",
            "<solar: sunset at latitude 48.8, longitude: 2.3>",
        ),
    ],
)
def test_a_subclass_is_stored_by_its_name_and_what_it_says(
    value: BaseSchedule, name: str, text: str
) -> None:
    rule = custom(value)
    assert (rule.name, rule.text) == (f"{__name__}.{name}", text)
    assert rule.live is value
    assert rule.describe() == (text or rule.name)
    with pytest.raises(InvalidTimerError, match=r"lives in code.*only the static schedule"):
        parsed(value, bound=False)


def test_an_address_says_nothing(app: Celery) -> None:
    rule = custom(Answers((True, 1), app))
    assert rule.text == ""
    assert rule.encode() == {"custom": f"{__name__}.Answers"}


@pytest.mark.parametrize("value", [schedule(30), crontab(0, 9), solar("sunset", 48.8, 2.3)])
def test_celerys_own_schedules_are_none(value: BaseSchedule) -> None:
    assert not isinstance(parsed(value), Custom)


@pytest.mark.parametrize("options", [{"dst": "skip"}, {"relative": True}])
def test_what_is_for_other_rules_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidTimerError, match=f"{next(iter(options))}=.* only with"):
        parsed(Calm(), **options)


def test_a_zone_beside_its_own_is_refused() -> None:
    with pytest.raises(InvalidTimerError, match=r"timezone='Asia/Tokyo' .*own code"):
        parse(Weekend([9]), timezone=TOKYO, default_timezone=UTC, bound=True)


def test_it_survives_storage_without_the_object() -> None:
    rule = custom(Calm())
    restored = decode(json.loads(json.dumps(rule.encode())))
    assert restored == rule
    assert hash(restored) == hash(rule)
    assert isinstance(restored, Custom)
    assert restored.live is None
    assert rule != Custom(rule.name, "<another>")
    assert pickle.loads(pickle.dumps(restored)) == rule  # noqa: S301
    assert copy.copy(rule).live is rule.live
    assert "live" not in repr(rule)


@pytest.mark.parametrize(
    "data",
    [{"custom": 5}, {"custom": ""}, {"custom": "a.B", "repr": 5}, {"custom": "a.B", "tz": "UTC"}],
)
def test_stored_data_that_means_nothing_is_refused(data: object) -> None:
    with pytest.raises(InvalidTimerError):
        decode(data)


# --- what it answers ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "due", "wait"),
    [
        ((True, 20), True, 20 * SECOND),
        ((False, 12.3456), False, 12_346),
        (schedstate(is_due=False, next=0.25), False, 250),
        (schedstate(is_due=True, next=0), True, 100),
        ((False, -5), False, 100),
        ((False, -math.inf), False, 100),
        ((False, 10 * DAY), False, 300 * SECOND),
        ((False, math.inf), False, 300 * SECOND),
        ((False, 10**400), False, 300 * SECOND),
        ((1, 1), True, SECOND),
    ],
)
def test_answers(app: Celery, answer: Any, due: bool, wait: int) -> None:
    assert custom(Answers(answer, app)).ask(NOW, NOW - HOUR) == (due, wait)


@pytest.mark.parametrize(
    "answer",
    [
        None,
        True,
        5,
        (True,),
        (True, 1, 2),
        [True, 1],
        (True, None),
        (True, "1"),
        (None, 1),
        (True, timedelta(seconds=1)),
        (True, math.nan),
        (False, True),
    ],
)
def test_any_other_answer_says_what_is_due_must_return(app: Celery, answer: Any) -> None:
    rule = custom(Answers(answer, app))
    with pytest.raises(InvalidTimerError, match=r"Answers.is_due\(\)=.*seconds until"):
        rule.ask(NOW, NOW)


def test_what_it_raises_passes_through(app: Celery) -> None:
    rule = custom(Answers(LookupError("no table"), app))
    for ask in (rule.ask, rule.next_run_after):
        with pytest.raises(LookupError, match="no table"):
            ask(NOW, NOW)


def test_it_is_asked_about_the_given_moment_in_the_apps_zone(app: Celery) -> None:
    live = Answers((False, 1), app)
    custom(live).ask(NOW, NOW - 1500)
    now, last_run_at = live.asked[0]
    assert now == datetime.fromtimestamp(NOW / 1000, UTC)
    assert now - last_run_at == timedelta(seconds=1.5)
    assert now.tzinfo == last_run_at.tzinfo == TOKYO
    assert live.nowfun is None, "the object itself stays as it was"


def test_a_clock_of_its_own_is_left_to_it(app: Celery) -> None:
    own = datetime(2001, 1, 1, tzinfo=UTC)
    live = Answers((False, 1), app, nowfun=lambda: own)
    custom(live).ask(NOW, NOW - 1500)
    now, last_run_at = live.asked[0]
    assert now == own
    assert last_run_at == datetime.fromtimestamp((NOW - 1500) / 1000, UTC)


def test_a_naive_clock_gets_a_naive_last_run(app: Celery) -> None:
    """So that the rule can take one from the other, as in Celery."""
    own = datetime(2001, 1, 1)  # noqa: DTZ001
    live = Answers((False, 1), app, nowfun=lambda: own)
    custom(live).ask(NOW, NOW - 1500)
    assert live.asked == [(own, own - timedelta(seconds=1.5))]


def test_an_object_keeps_what_celerys_copies_would_lose(app: Celery) -> None:
    rule = custom(Weekend([9], app=app))
    saturday = at("2026-05-16T09:00:00+09:00")
    assert rule.ask(saturday, saturday - DAY)[0]
    assert not rule.ask(saturday - 1, saturday - DAY)[0]


# --- as a schedule ------------------------------------------------------------------------------


def test_it_is_first_asked_when_it_says(app: Celery) -> None:
    assert custom(Answers((True, 20), app)).first_run(NOW) == NOW + 20 * SECOND
    assert custom(Often(30, app=app)).first_run(NOW) == NOW + 30 * SECOND
    assert custom(Often(30, app=app)).first_delay_ms is None


def test_the_next_run_is_found_by_asking_about_moments_to_come(app: Celery) -> None:
    weekend = custom(Weekend([9, 12], app=app))
    monday = at("2026-05-18T00:00:00+09:00")
    assert weekend.next_run_after(monday, monday) == at("2026-05-23T09:00:00+09:00")
    sunday = at("2026-05-24T09:00:00+09:00")
    assert weekend.next_run_after(sunday, sunday) == at("2026-05-24T12:00:00+09:00")
    often = custom(Often(30, app=app))
    assert often.next_run_after(NOW, NOW) == NOW + 30 * SECOND
    assert often.next_run_after(NOW + 90 * SECOND, NOW) == NOW + 90 * SECOND + 1
    assert often.count_between(NOW, NOW + DAY, NOW) == 0
    assert often.last_runs_begin(NOW, NOW + DAY, NOW, 1) is None


@pytest.mark.parametrize("wait", [0, 3600, math.inf])
def test_a_rule_that_is_never_due_is_not_asked_for_ever(app: Celery, wait: float) -> None:
    live = Answers((False, wait), app)
    assert custom(live).next_run_after(NOW, NOW) is None
    assert len(live.asked) == 400


@pytest.mark.parametrize(("answer", "wait"), [((True, 60), 1), ((False, 60), 1 + 60 * SECOND)])
def test_one_with_a_clock_of_its_own_is_asked_once(app: Celery, answer: Any, wait: int) -> None:
    """Its answer does not depend on the moment that it is asked about."""
    live = Answers(answer, app, nowfun=lambda: datetime(2001, 1, 1, tzinfo=UTC))
    assert custom(live).next_run_after(NOW, NOW) == NOW + wait
    assert len(live.asked) == 1


def test_without_the_object_its_owner_is_to_be_asked_now() -> None:
    rule = Custom("jobs.Weekend")
    assert rule.next_run_after(NOW, 0) == NOW + 1
    assert rule.first_run(NOW) == NOW + 1
    assert rule.count_between(0, NOW, 0) == 0
    assert rule.last_runs_begin(0, NOW, 0, 1) is None
    with pytest.raises(InvalidTimerError, match=r"'jobs.Weekend' lives in code"):
        rule.ask(NOW, NOW)


@pytest.mark.parametrize("moment", [-(10**20), 10**20])
def test_moments_that_no_calendar_shows_are_no_error(app: Celery, moment: int) -> None:
    assert custom(Often(30, app=app)).next_run_after(moment, moment) is None
