"""What is written on a command line: moments, lengths of time, JSON, and names that complete."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import datetime, time, timedelta, timezone, tzinfo
from typing import TYPE_CHECKING, Any, TypeAlias

import click
from celery.app.utils import find_app
from celery.exceptions import ImproperlyConfigured
from click.shell_completion import CompletionItem
from dateutil.parser import isoparse
from kombu.utils import json

from celery_dtimer.errors import SettingsError, shown
from celery_dtimer.timers import DistributedTimer, timers_of

if TYPE_CHECKING:
    ParamType: TypeAlias = click.ParamType[Any]
else:
    ParamType = click.ParamType  # not generic before click 8.4

_UNITS = {"ms": 0.001, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86_400, "w": 604_800}
_PART = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)", re.IGNORECASE)
_DATE = re.compile(r"\d{4}-\d{2}-\d{2}")
_CLOCK = re.compile(r"\d{1,2}:\d{2}(:\d{2})?")
_LONGEST = 1000 * 366 * 86_400  # seconds
_FIRST, _LAST = 1971, 9998  # years
_COMPLETED = 50  # names that are offered
_READ = 10_000  # dead letters that are looked through for them


class Duration(ParamType):
    """A length of time, which becomes a timedelta: ``90``, ``90s``, ``1h30m``, ``2d``."""

    name = "duration"

    def convert(self, value: Any, param: Any, ctx: Any) -> timedelta:
        """Return what the text says; seconds when it names no unit."""
        if isinstance(value, timedelta):
            return value
        seconds = seconds_in(value)
        if seconds is None or seconds > _LONGEST:
            self.fail(
                f"{shown(value)} is no length of time: expected 90, 90s, 15m, 1h30m or 2d",
                param,
                ctx,
            )
        return timedelta(seconds=seconds)


def seconds_in(text: str) -> float | None:
    """Return the seconds in a length of time, None when the text is none."""
    total, place = 0.0, 0
    text = text.strip()
    while place < len(text):
        part = _PART.match(text, place)
        unit = part[2].lower() if part else ""
        if part is None or not (unit in _UNITS or (unit == "" and part.span() == (0, len(text)))):
            return None
        total += float(part[1]) * _UNITS.get(unit, 1)
        place = part.end()
    return total if text else None


def zone_of_app(app: Any) -> tzinfo:
    """Return the time zone of a Celery app.

    Raises:
        SettingsError: there is none of the name that it is given.
    """
    try:
        zone: tzinfo = app.timezone
    except (KeyError, ValueError, ImproperlyConfigured) as exc:
        accepted = "expected the name of a time zone"
        named = shown(app.conf.timezone)
        raise SettingsError(f"timezone={named} is not accepted; {accepted}") from exc
    return zone


class Moment(ParamType):
    """A moment: ISO 8601, a time of today, ``now``, ``2h ago`` or ``in 30m``.

    What names no zone is by the clocks of the app's.
    """

    name = "moment"

    def convert(self, value: Any, param: Any, ctx: click.Context | None) -> datetime:
        """Return the moment; an aware one, or one without a zone, which is the app's."""
        if isinstance(value, datetime):
            return value
        zone = zone_of_app(ctx.obj.app) if ctx is not None else timezone.utc
        moment = moment_in(value, datetime.now(zone))
        if moment is None:
            self.fail(
                f"{shown(value)} is no moment: expected 2026-12-31, 2026-12-31T23:59, "
                "2026-12-31T23:59Z, 23:59, now, 2h ago or in 30m",
                param,
                ctx,
            )
        return moment


def moment_in(text: str, now: datetime) -> datetime | None:
    """Return the moment that a text says, seen from now; None when it says none."""
    text = text.strip()
    if text == "now":
        return now
    for pattern, sign in ((r"in (.+)", 1), (r"(.+) ago", -1)):
        if relative := re.fullmatch(pattern, text):
            seconds = seconds_in(relative[1])
            if seconds is not None and seconds < _LONGEST / 1000:
                return now + sign * timedelta(seconds=seconds)
    try:
        if _CLOCK.fullmatch(text):
            hour, minute, second = [*map(int, text.split(":")), 0][:3]
            return datetime.combine(now, time(hour, minute, second), now.tzinfo)
        moment = isoparse(text.replace(" ", "T", 1)) if _DATE.match(text) else None
    except ValueError:
        return None
    return moment if moment is not None and _FIRST <= moment.year <= _LAST else None


class Json(ParamType):
    """A value as JSON, of one type."""

    def __init__(self, kind: type, name: str) -> None:
        """Accept only what is of this type, called so in messages."""
        self._kind = kind
        self.name = name

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        """Return the value."""
        if isinstance(value, self._kind):
            return value
        try:
            found = json.loads(value)
        except Exception as exc:  # the constructors of Celery's typed values raise what they like
            self.fail(f"{shown(value)} is no JSON: {exc}", param, ctx)
        if not isinstance(found, self._kind):
            self.fail(f"{shown(value)} is no {self.name}", param, ctx)
        return found


class Assignment(ParamType):
    """A name and a value, ``NAME=VALUE``; the value is JSON if it can be, else the text itself."""

    name = "name=value"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[str, Any]:
        """Return name and value."""
        if isinstance(value, tuple):
            return value
        name, sign, text = value.partition("=")
        if not (name and sign):
            self.fail(f"{shown(value)} is no NAME=VALUE", param, ctx)
        try:
            return name, json.loads(text)
        except Exception:  # likewise
            return name, text


DURATION = Duration()
MOMENT = Moment()
JSON_LIST = Json(list, "JSON array")
JSON_OBJECT = Json(dict, "JSON object")
ASSIGNMENT = Assignment()


# ------------------------------------------------------------------ completion

Complete = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]


def _completion(names: Callable[[DistributedTimer, str], list[tuple[str, str]]]) -> Complete:
    """Return a completion that looks names up; without Redis there are none."""

    def complete(ctx: click.Context, param: click.Parameter, begun: str) -> list[CompletionItem]:
        try:
            found = names(_timers(ctx), begun)
        except Exception:  # a shell that completes has no place to show an error
            return []
        return [CompletionItem(name, help=about) for name, about in found[:_COMPLETED]]

    return complete


def _timers(ctx: click.Context) -> DistributedTimer:
    app: Any = ctx.find_root().params.get("app")
    services = (each.params.get("service") for each in (ctx, ctx.parent) if each is not None)
    return timers_of(
        find_app(app) if isinstance(app, str) else app, next(filter(None, services), None)
    )


def _timer_names(timers: DistributedTimer, begun: str) -> list[tuple[str, str]]:
    return [
        (timer.name, timer.status)
        for timer in timers.get_timers(name=f"{begun}*", limit=_COMPLETED)
        if timer.name.startswith(begun) and timer.name.isprintable() and timer.name
    ]


def _instance_ids(timers: DistributedTimer, begun: str) -> list[tuple[str, str]]:
    found = timers.get_service_instances()
    return [(each.id, each.status) for each in found if each.id.startswith(begun)]


def _letter_ids(timers: DistributedTimer, begun: str) -> list[tuple[str, str]]:
    found = timers.get_dead_letters(limit=_READ)
    return [(each.id, each.name) for each in found if each.id.startswith(begun)]


complete_timers = _completion(_timer_names)
complete_instances = _completion(_instance_ids)
complete_letters = _completion(_letter_ids)
