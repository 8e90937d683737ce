"""The options of a timer's messages: what is accepted, what is stored of it, what is refused."""

from __future__ import annotations

import math
import re
from datetime import datetime, timedelta, timezone
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from celery import chain, chord, group
from celery.canvas import Signature

from celery_dtimer.errors import InvalidTimerError
from celery_dtimer.model import Definition, check_storable, decode_definition
from celery_dtimer.options import check_options, plain_signature, with_time_limits
from celery_dtimer.schedules import Interval
from tests.naming import named

UTC = timezone.utc
NOON = datetime(2030, 7, 1, 12, 0)  # noqa: DTZ001 naive on purpose
LINK = {
    "task": "t",
    "args": [],
    "kwargs": {},
    "options": {},
    "subtask_type": None,
    "immutable": False,
}


def stored(options: dict[str, Any]) -> dict[str, Any]:
    """Return options as they are read from the store."""
    check_storable("options", options)
    definition = Definition("n", "t", Interval(1000), options=options)
    return dict(decode_definition(definition.blob).options)


GOOD: list[dict[str, Any]] = [
    {},
    {"queue": "q", "exchange": "e", "routing_key": "r", "priority": 0, "headers": {"a": 1}},
    {"serializer": "json", "compression": "zlib", "countdown": 1.5, "time_limit": 3},
    {"expires": None, "queue": None, "link": None, "link_error": None},
    {"MessageGroupId": "g"},  # of a broker's transport
    {"user_id": "u", "correlation_id": "c"},  # of the message
    {"link": LINK, "link_error": [LINK, LINK]},
]


@pytest.mark.parametrize("options", GOOD, ids=named)
def test_options_of_apply_async_and_the_transport_are_accepted(options: dict[str, Any]) -> None:
    before = repr(options)
    checked = check_options(options)
    assert checked == options == stored(checked)
    assert repr(options) == before


@pytest.mark.parametrize("name", ["countdown", "time_limit", "soft_time_limit", "expires"])
def test_a_timedelta_becomes_seconds(name: str) -> None:
    assert check_options({name: timedelta(minutes=1.5)}) == {name: 90.0}


# ------------------------------------------------------------------ expires


@pytest.mark.parametrize("value", [1, 0.5, 86_400, timedelta(milliseconds=1)])
def test_relative_expiry_is_more_than_nothing(value: Any) -> None:
    seconds = value.total_seconds() if isinstance(value, timedelta) else value
    assert stored(check_options({"expires": value})) == {"expires": seconds}


@pytest.mark.parametrize(
    "value", [0, -1, -0.5, timedelta(0), timedelta(seconds=-1), float("nan"), float("inf")]
)
def test_an_expiry_by_which_no_message_would_run_is_refused(value: Any) -> None:
    with pytest.raises(InvalidTimerError, match=r"more than 0 seconds.*no message is ever run"):
        check_options({"expires": value})


@pytest.mark.parametrize("value", ["60", "2030-07-01T12:00:00", "2030-07-01T12:00:00Z", "", b"60"])
def test_an_expiry_as_a_text_is_refused(value: Any) -> None:
    with pytest.raises(InvalidTimerError, match=r"seconds or a timedelta.*or a datetime"):
        check_options({"expires": value})


@pytest.mark.parametrize("value", [True, [], {}])
def test_an_expiry_of_another_kind_is_refused(value: Any) -> None:
    with pytest.raises(InvalidTimerError, match="expires"):
        check_options({"expires": value})


@pytest.mark.parametrize(
    "moment",
    [
        datetime(2030, 7, 1, 12, tzinfo=UTC),
        datetime(2030, 7, 1, 12, 0, 0, 250_000, tzinfo=timezone(timedelta(hours=5.5))),
        datetime(2030, 7, 1, 12, tzinfo=ZoneInfo("Europe/Paris")),
        datetime(2020, 1, 1, tzinfo=UTC),  # has passed: it is for the timer to say so
    ],
)
def test_an_aware_expiry_is_the_same_moment_when_it_is_read(moment: datetime) -> None:
    assert check_options({"expires": moment}, "Asia/Tokyo") == {"expires": moment}
    found = stored(check_options({"expires": moment}))["expires"]
    assert found == moment
    assert found.utcoffset() is not None


@pytest.mark.parametrize(
    ("zone", "hours"),
    [("UTC", 0), ("Europe/Paris", 2), (ZoneInfo("America/New_York"), -4), (UTC, 0)],
)
def test_a_naive_expiry_is_in_the_zone_that_is_given(zone: Any, hours: int) -> None:
    expected = NOON.replace(tzinfo=timezone(timedelta(hours=hours)))
    found = stored(check_options({"expires": NOON}, zone))["expires"]
    assert found == expected
    assert found.utcoffset() is not None


def test_a_naive_expiry_is_in_utc_by_default() -> None:
    assert check_options({"expires": NOON}) == {"expires": NOON.replace(tzinfo=UTC)}


# ------------------------------------------------------------------ links


@pytest.mark.parametrize("name", ["link", "link_error"])
def test_links_are_stored_as_celerys_own_dicts(name: str) -> None:
    signature = Signature("t", (1,), {"a": 2}, immutable=True, queue="q")
    plain = {**LINK, "args": [1], "kwargs": {"a": 2}, "immutable": True, "options": {"queue": "q"}}
    for given, expected in (
        (signature, plain),
        ([signature, signature], [plain, plain]),
        ((signature,), [plain]),
        ({"task": "t"}, LINK),
    ):
        checked = check_options({name: given})
        assert checked == {name: expected} == stored(checked)
    assert type(check_options({name: signature})[name]) is dict
    assert Signature.from_dict(check_options({name: signature})[name])["kwargs"] == {"a": 2}


def test_a_link_may_be_a_canvas_with_links_and_loses_its_ids() -> None:
    inner = Signature("b", link=Signature("c", task_id="mine"), task_id="mine")
    canvas = chain(Signature("a"), group(inner, Signature("d")))
    (checked,) = check_options({"link": [canvas]})["link"]
    assert checked["subtask_type"] == "chain"
    assert "mine" not in repr(checked)
    assert stored({"link": [checked]}) == {"link": [checked]}
    tasks = checked["kwargs"]["tasks"][1]["kwargs"]["tasks"]
    assert [task["task"] for task in tasks] == ["b", "d"]
    assert tasks[0]["options"]["link"]["task"] == "c"


@pytest.mark.parametrize("name", ["link", "link_error"])
@pytest.mark.parametrize(
    "value",
    ["task", ["task"], 5, True, [None], [[Signature("t")]], {}, {"task": 5}, group([]), object()],
    ids=named,
)
def test_a_link_that_is_no_signature_is_refused(name: str, value: Any) -> None:
    with pytest.raises(
        InvalidTimerError, match=rf"options\['{name}'\]=.*expected.*signature|canvas"
    ):
        check_options({name: value})


def test_a_signature_is_copied_and_shares_nothing_that_is_written_to() -> None:
    signature = chord([Signature("a"), Signature("b")], Signature("c"))
    plain = plain_signature("callback", signature)
    plain["kwargs"]["header"][0]["options"]["queue"] = "q"
    plain["kwargs"]["body"]["kwargs"]["x"] = 1
    assert plain_signature("callback", signature) != plain
    assert "queue" not in repr(signature["kwargs"]["header"][0].options)


# ------------------------------------------------------------------ what is refused

BAD: list[tuple[str, Any]] = [
    *(("serializer", value) for value in ("jsn", 1, [])),
    *(("priority", value) for value in ("3", 1.5, True, -1, 256, 10**400)),
    *(("headers", value) for value in ("a", [1])),
    *(("queue", value) for value in (5, ["q"], True)),
    *(("exchange", value) for value in (5, b"e")),
    *(("routing_key", value) for value in (5, b"e")),
    *(("time_limit", value) for value in ("5", True)),
    *(("soft_time_limit", value) for value in ("5", True)),
    *(("countdown", value) for value in ("5", True, math.nan, 1e300, timedelta.max)),
    *(("expires", value) for value in (1e300, timedelta.max)),
    *(("compression", value) for value in ("foo", 5)),
    *(("delivery_mode", value) for value in ("x", 3, True)),
    *(("retry_policy", value) for value in (5, [])),
    *(("stamped_headers", value) for value in (5, "a")),
    *(("eta", value) for value in (5, "x")),
    *((name, "x") for name in ("task_id", "producer", "connection", "options")),
    *((name, 1) for name in ("quue", "prioritiy", "expire", "timezon", "arg", "kwarg")),
]


@pytest.mark.parametrize(("name", "value"), BAD, ids=named)
def test_an_option_that_cannot_work_is_refused_by_name_and_value(name: str, value: Any) -> None:
    with pytest.raises(InvalidTimerError) as caught:
        check_options({name: value})
    assert name in str(caught.value)
    assert "expected" in str(caught.value)


# ------------------------------------------------------------------ time limits and retries


class Busy(Exception):  # noqa: N818 - an app's
    pass


def test_a_timeout_stands_for_both_time_limits() -> None:
    options = check_options({"timeout": timedelta(minutes=1)})
    assert options == {"timeout": 60.0}
    assert with_time_limits(options) == {"soft_time_limit": 60.0, "time_limit": 65.0}
    own = {"timeout": 60, "soft_time_limit": 5, "time_limit": 9}
    assert with_time_limits(own) == {"soft_time_limit": 5, "time_limit": 9}
    assert with_time_limits({"queue": "q"}) == {"queue": "q"}


@pytest.mark.parametrize(
    ("value", "names"),
    [
        (KeyError, ["builtins.KeyError"]),
        ((KeyError, Busy), ["builtins.KeyError", f"{__name__}.Busy"]),
        (
            ["KeyError", "requests.exceptions.Timeout"],
            ["builtins.KeyError", "requests.exceptions.Timeout"],
        ),
    ],
)
def test_exceptions_are_stored_by_their_full_names(value: Any, names: list[str]) -> None:
    assert check_options({"autoretry_for": value}) == {"autoretry_for": names}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("timeout", value) for value in (0, -1, "5", True)],
        *[("autoretry_for", value) for value in ((), [5], int, "a b", BaseException)],
        *[("autoretry_for", value) for value in ("ValueErorr", "SystemExit", "a.b c", "a..b", "")],
        *[("autoretry_for", value) for value in ("a." + "b" * 254, ["a.b"] * 101)],
        *[("max_retries", value) for value in (-1, 1.5, True, "3")],
        *[("retry_backoff", value) for value in (-1, "2")],
        *[("retry_backoff_max", value) for value in (-1, True)],
        *[("retry_jitter", value) for value in (1, "yes")],
    ],
)
def test_retries_that_cannot_be_are_refused(name: str, value: Any) -> None:
    with pytest.raises(InvalidTimerError, match=re.escape(f"options[{name!r}]=")):
        check_options({name: value})
