"""Bad inputs: arbitrary values, and records that were good before they were spoilt."""

from __future__ import annotations

import copy
import json
import math
import sys
import uuid
from collections.abc import Callable
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from typing import Any

from celery import Celery, chord, group
from celery.schedules import crontab, schedule, solar
from hypothesis import strategies as st

_BIG = [
    *(2**31, 2**53, 2**63, 2**64, -(2**63), 10**15, 10**16, 10**30, 10**400, -1, 0),
    *(253_402_300_799_999, 253_402_300_800_000),
]
_ODD_FLOATS = [math.nan, math.inf, -math.inf, 1e308, -0.0, 0.1, 1e-300]
_ODD_TEXTS = [
    *("", " ", "\n", "\x00", "{", "}", "{x}", "a:b", "a b", "a\nb", "%", "%2E", "\ud800", "é", "∞"),
    *(
        "None",
        "nan",
        "inf",
        "-inf",
        "1e999",
        "0x10",
        "-",
        "+5",
        "١٢",
        "12 ",
        "9" * 5000,
        "x" * 5000,
    ),
    *("active", "paused", "broken", "unassigned", "* * * * *", "@daily", "FREQ=DAILY", "os.system"),
    *("celery.chain", "celery.group", "celery.chord", "pickle", "2026-01-01T00:00:00", "UTC"),
]

texts = st.sampled_from(_ODD_TEXTS) | st.text(max_size=20)
numbers = st.sampled_from(_BIG) | st.integers() | st.sampled_from(_ODD_FLOATS) | st.floats()
scalars = st.none() | st.booleans() | numbers | texts


def _nested(depth: int) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = [value]
    return value


#: What JSON can say, and some of what it should not.
json_values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=8,
) | st.integers(min_value=20, max_value=120).map(_nested)


def _is_told_by_hypothesis() -> bool:
    """Say whether a failing example is being shown, and not used."""
    frame = sys._getframe(2)
    while frame is not None and not str(frame.f_globals.get("__name__")).startswith(
        "celery_dtimer"
    ):
        if str(frame.f_globals.get("__name__")).startswith("hypothesis.vendor"):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


class Hostile:
    """An object whose every method fails."""

    def __repr__(self) -> str:
        if _is_told_by_hypothesis():
            return "Hostile()"
        raise RuntimeError("no text")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("not compared")

    __hash__ = None  # type: ignore[assignment]


class Count(int):
    """A subclass of a plain type."""


_app = Celery("fuzz", set_as_current=False)


@_app.task(name="fuzz.add", shared=False)
def _add(*args: Any) -> Any:
    return args


_LOOP: list[Any] = []
_LOOP.append(_LOOP)

# By name, since what shows them may not survive it.
_ODD_VALUES: dict[str, Any] = {
    "a uuid": uuid.UUID(int=1),
    "a signalling nan": Decimal("sNaN"),
    "a decimal": Decimal(1),
    "a date": date(2026, 1, 1),
    "a time": time(1),
    "an object": object(),
    "a hostile one": Hostile(),
    "an int of another kind": Count(5),
    "a set": {1, 2},
    "a function": print,
    "an exception": ValueError,
    "a list in itself": _LOOP,
    "a type": float,
    "the longest time": timedelta.max,
    "a negative time": timedelta(days=-1),
    "a crontab": crontab(),
    "a schedule": schedule(5),
    "a solar event": solar("sunset", 1, 2),
    "a task": _add,
    "a signature": _add.s(1),
    "a chain": _add.s(1) | _add.s(2),
    "a group": group(_add.s(1), _add.s(2)),
    "an empty group": group(),
    "a chord": chord([_add.s(1)], _add.s(2)),
    "a deep list": _nested(5000),
    "the last moment": datetime.max.replace(tzinfo=timezone.utc),
    "the first moment": datetime.min.replace(tzinfo=timezone.utc),
    "a zone": timezone.utc,
}


def _odd_value(name: str) -> Any:
    return _ODD_VALUES[name]


#: What a program may hand to the API.
values: st.SearchStrategy[Any] = st.recursive(
    scalars
    | st.binary(max_size=10)
    | st.datetimes()
    | st.datetimes(timezones=st.just(timezone.utc))
    | st.timedeltas()
    | st.sampled_from(sorted(_ODD_VALUES)).map(_odd_value),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(texts | st.integers() | st.none(), inner, max_size=3)
    ),
    max_leaves=6,
)


# ------------------------------------------------------------------ good records, spoilt


def _paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the places of all that is in a JSON value."""
    found = [path]
    inner = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, each in inner:
        found += _paths(each, (*path, key))
    return found


def _replaced(value: Any, path: tuple[Any, ...], by: Any) -> Any:
    if not path:
        return by
    copied = copy.deepcopy(value)
    place = copied
    for key in path[:-1]:
        place = place[key]
    if by is Ellipsis:
        del place[path[-1]]
    else:
        place[path[-1]] = by
    return copied


@st.composite
def spoilt_json(draw: Callable[..., Any], good: str) -> str:
    """Return a JSON text with some of its values replaced, left out, or joined by others."""
    value = json.loads(good)
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from(_paths(value)))
        by = draw(json_values | st.just(...)) if path else draw(json_values)
        value = _replaced(value, path, by)
        if isinstance(value, dict) and draw(st.booleans()):
            value[draw(texts)] = draw(json_values)
    return json.dumps(value)


@st.composite
def spoilt_text(draw: Callable[..., Any], good: str) -> str:
    """Return a text that was cut, or in which something was changed, put in or doubled."""
    how = draw(st.sampled_from(["cut", "flip", "insert", "double", "nest", "digits", "key"]))
    at = draw(st.integers(0, max(0, len(good) - 1)))
    to = draw(st.integers(at, len(good)))
    if how == "cut":
        return good[:at]
    if how == "flip":
        return good[:at] + draw(st.characters()) + good[at + 1 :]
    if how == "insert":
        return good[:at] + draw(texts) + good[at:]
    if how == "double":
        return good[:to] + good[at:]
    if how == "nest":
        depth = draw(st.sampled_from([100, 500, 900, 990, 5000, 200_000]))
        opening, closing = draw(st.sampled_from([("[", "]"), ('{"a":', "}")]))
        nest = opening * depth + "0" + closing * depth
        return draw(
            st.sampled_from(
                [
                    nest,
                    good.replace("[]", nest),
                    good.replace("{}", nest),
                    good[:-1] + ',"args":' + nest + "}",
                ]
            )
        )
    if how == "digits":
        return good.replace("1", "9" * draw(st.sampled_from([20, 400, 5000])))
    return (
        good[:-1]
        + ","
        + draw(
            st.sampled_from(
                ['"name":1', '"task":null', '"message":{}', '"schedule":{}', '"__type__":"x"']
            )
        )
        + "}"
    )


def spoilt_texts(good: list[str]) -> st.SearchStrategy[str]:
    """Return texts that are nearly one of some, or nothing like them."""
    return st.sampled_from(good).flatmap(spoilt_text) | texts


def spoilt(good: list[str]) -> st.SearchStrategy[str]:
    """Return texts that are nearly one of some JSON records, or nothing like them."""
    chosen = st.sampled_from(good)
    return (
        chosen.flatmap(spoilt_json)
        | chosen.flatmap(spoilt_json)
        | chosen.flatmap(spoilt_text)
        | json_values.map(json.dumps)
        | texts
    )
