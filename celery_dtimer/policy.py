"""The policy of a timer: within what bounds it runs, and what becomes of runs that come late.

What a policy leaves open (``None``) is decided when a run is due, by the `Defaults` of the service.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta, tzinfo
from typing import Any, NamedTuple

from celery_dtimer import schedules
from celery_dtimer.errors import invalid, is_number
from celery_dtimer.zones import EPOCH

_DAY_MS = 86_400_000
_LONGEST_MS = 1000 * 365 * _DAY_MS
_MILLENNIA_MS = 10_000 * 365 * _DAY_MS  # beyond every moment that can be shown

#: What `misfire_grace_time` may be, in ms: a run that is sent in time is some ms late itself.
SHORTEST_GRACE_MS = 1000
LONGEST_GRACE_MS = _LONGEST_MS
#: How many missed runs may be made up.
MOST_CATCH_UP = 10_000


class _Number(NamedTuple):
    """A whole number of a policy: the keyword it comes from, and what is accepted."""

    keyword: str
    first: int
    last: int
    accepted: str


_NUMBERS = {
    "start_ms": _Number("start_at", -_MILLENNIA_MS, _MILLENNIA_MS, "a datetime"),
    "end_ms": _Number("end_at", -_MILLENNIA_MS, _MILLENNIA_MS, "a datetime"),
    "max_runs": _Number("max_runs", 1, 10**12, "a whole number, 1 or more"),
    "jitter_ms": _Number("jitter", 0, _LONGEST_MS, "seconds or a timedelta, 0 or more"),
    "grace_ms": _Number(
        "misfire_grace_time",
        SHORTEST_GRACE_MS,
        LONGEST_GRACE_MS,
        "seconds or a timedelta, from 1 s to 1000 years",
    ),
    "max_catch_up": _Number(
        "max_catch_up", 0, MOST_CATCH_UP, f"a whole number from 0 to {MOST_CATCH_UP}"
    ),
    # One script pushes them all, in a few milliseconds.
    "shards": _Number("shards", 1, 1000, "a whole number from 1 to 1000"),
    "resend_lost": _Number("resend_lost", 0, 100, "True, False or a whole number from 0 to 100"),
}
_COALESCE = "True or False"

#: What becomes of a run that is due while an earlier one of its timer has not ended.
ALLOW = "allow"  #: it is sent all the same
SKIP = "skip"  #: it does not happen
BUFFER_ONE = "buffer_one"  #: it waits for that end, and those that come due meanwhile do not happen
CANCEL_OTHER = "cancel_other"  #: the earlier one is revoked and terminated
OVERLAPS = (ALLOW, SKIP, BUFFER_ONE, CANCEL_OTHER)
_MOMENTS = ("start_ms", "end_ms")
_TIMES = ("jitter_ms", "grace_ms")

_SAMPLED = 60  # gaps between runs that are looked at
_SAMPLED_FROM_MS = 1_767_225_600_000  # from the first of January 2026 on

#: The keywords that `parse_policy` takes.
KEYWORDS = ("coalesce", "overlap", *(number.keyword for number in _NUMBERS.values()))


class Defaults(NamedTuple):
    """What holds for timers that do not say otherwise."""

    coalesce: bool = True
    grace_ms: int | None = None  #: a run may be that late; None: as late as it likes
    cron_grace_ms: int | None = None  #: of crontabs, in place of the one above
    max_catch_up: int = 100


@dataclass(frozen=True, slots=True)
class Policy:
    """The bounds of a timer's runs, and how it makes up for late ones."""

    start_ms: int | None = None  #: no run is scheduled before
    end_ms: int | None = None  #: nor after
    max_runs: int | None = None
    jitter_ms: int = 0  #: a run is sent up to so long after its scheduled moment
    coalesce: bool | None = None  #: one run stands for all that were missed
    grace_ms: int | None = None  #: a run that is later than that is skipped
    max_catch_up: int | None = None  #: so many missed runs are made up, when they do not coalesce
    shards: int = 1  #: the messages of a run
    overlap: str = ALLOW  #: one of `OVERLAPS`
    resend_lost: int = 0  #: how often a run that did not come back is sent again at most

    def __post_init__(self) -> None:
        """Refuse what cannot be, or not together."""
        for name, (keyword, first, last, accepted) in _NUMBERS.items():
            value = getattr(self, name)
            if value != _DEFAULTS[name] and not (_is_int(value) and first <= value <= last):
                raise invalid(keyword, value, accepted)
        if self.coalesce is not None and not isinstance(self.coalesce, bool):
            raise invalid("coalesce", self.coalesce, _COALESCE)
        if not isinstance(self.overlap, str) or self.overlap not in OVERLAPS:
            raise invalid("overlap", self.overlap, "one of " + ", ".join(OVERLAPS))
        if self.start_ms is not None and self.end_ms is not None and self.end_ms < self.start_ms:
            start, end = (_as_given(name, getattr(self, name)) for name in _MOMENTS)
            raise invalid("end_at", end, f"a moment from start_at={start} on")

    @property
    def is_held(self) -> bool:
        """Say whether a run is noted before it is sent, and holds others of its timer up."""
        return self.overlap != ALLOW or self.resend_lost > 0

    @property
    def window(self) -> str:
        """How far the timer goes, as a text; "" when it has no bounds."""
        bounds = (self.start_ms, self.end_ms, self.max_runs)
        return "" if bounds == (None, None, None) else " ".join(map(str, bounds))

    def as_keywords(self) -> dict[str, Any]:
        """Return what differs from the defaults, by the keywords that `parse_policy` takes.

        Moments are in UTC, and times in seconds.
        """
        return {_keyword_of(name): _as_value(name, value) for name, value in self.encode().items()}

    def encode(self) -> dict[str, Any]:
        """Return the policy as JSON data, without what has its default, for `decode_policy`."""
        return {
            name: value
            for name, default in _DEFAULTS.items()
            if (value := getattr(self, name)) != default
        }


_DEFAULTS: dict[str, Any] = dict.fromkeys(Policy.__slots__) | {
    "jitter_ms": 0,
    "shards": 1,
    "overlap": ALLOW,
    "resend_lost": 0,
}

#: The policy of a timer that asks for nothing.
PLAIN = Policy()


def decode_policy(stored: Mapping[str, Any]) -> Policy:
    """Return the policy that `Policy.encode` has put into an object, among other things.

    Raises:
        InvalidTimerError: a value cannot be.
    """
    found = {name: stored[name] for name in _DEFAULTS if name in stored}
    return Policy(**found) if found else PLAIN


def parse_policy(
    keywords: Mapping[str, Any], zone: tzinfo | str, current: Policy = PLAIN
) -> Policy:
    """Return what the keywords of a timer say of its policy; None stands for the default.

    Args:
        keywords: of `create_timer`; others than `KEYWORDS` are left alone.
        zone: of datetimes that name none.
        current: what holds for keywords that are not there.

    Raises:
        InvalidTimerError: a value cannot be used.
    """
    changes: dict[str, Any] = {}
    for name, number in _NUMBERS.items():
        if number.keyword in keywords:
            value = keywords[number.keyword]
            default = _DEFAULTS[name]
            changes[name] = default if value is None else _parsed(name, number, value, zone)
    if "coalesce" in keywords:
        changes["coalesce"] = keywords["coalesce"]
    if "overlap" in keywords:
        changes["overlap"] = ALLOW if keywords["overlap"] is None else keywords["overlap"]
    return replace(current, **changes) if changes else current


def _parsed(name: str, number: _Number, value: Any, zone: tzinfo | str) -> Any:
    if name in _MOMENTS:
        return schedules.moment_ms(number.keyword, value, zone)
    found = _ms_of(value) if name in _TIMES else value
    if name == "resend_lost" and isinstance(value, bool):
        found = int(value)
    if not isinstance(found, int) or isinstance(found, bool):
        raise invalid(number.keyword, value, number.accepted)
    if not number.first <= found <= number.last:
        raise invalid(number.keyword, value, number.accepted)
    return found


def _ms_of(value: Any) -> int | None:
    """Return seconds or a timedelta in ms, None when it is neither."""
    seconds = value.total_seconds() if isinstance(value, timedelta) else value
    is_usable = is_number(seconds) and abs(seconds) < _MILLENNIA_MS
    return round(seconds * 1000) if is_usable else None


def check_policy(policy: Policy, schedule: schedules.Schedule) -> None:
    """Refuse a policy that makes no sense with its schedule.

    Raises:
        InvalidTimerError: with the field and what is accepted.
    """
    if isinstance(schedule, schedules.OneShot):
        _refuse(policy, ("start_ms", "max_runs"), "nothing: the timer runs once, at its moment")
    if isinstance(schedule, schedules.Custom):
        fields = ("jitter_ms", "grace_ms", "coalesce", "max_catch_up")
        _refuse(policy, fields, "nothing: the schedule's own code says when it runs")
        if policy.overlap == BUFFER_ONE:
            accepted = "another: the schedule's own code is asked anew each time"
            raise invalid("overlap", policy.overlap, accepted)
    if policy.resend_lost and policy.shards > 1:
        raise invalid("resend_lost", policy.resend_lost, "nothing beside shards")
    if policy.jitter_ms:
        shortest_ms = _shortest_gap(schedule)
        if shortest_ms is not None and policy.jitter_ms >= shortest_ms:
            accepted = (
                f"less than the time between two runs, which is {shortest_ms / 1000:g} s here"
            )
            raise invalid("jitter", policy.jitter_ms / 1000, accepted)


def _refuse(policy: Policy, names: Iterable[str], accepted: str) -> None:
    for name in names:
        value = getattr(policy, name)
        if value != _DEFAULTS[name]:
            raise invalid(_keyword_of(name), _as_given(name, value), accepted)


def _keyword_of(name: str) -> str:
    return _NUMBERS[name].keyword if name in _NUMBERS else name


def _as_value(name: str, value: Any) -> Any:
    if name in _MOMENTS:
        return EPOCH + timedelta(milliseconds=value)
    return value / 1000 if name in _TIMES else value


def _as_given(name: str, value: Any) -> Any:
    """Return a value as a user would write it."""
    given = _as_value(name, value)
    return given.isoformat() if name in _MOMENTS else given


def _shortest_gap(schedule: schedules.Schedule) -> int | None:
    """Return the shortest time between some runs in a row, None when there is but one."""
    if isinstance(schedule, schedules.Interval):
        return schedule.every_ms
    first_ms = schedule.next_run_after(_SAMPLED_FROM_MS, _SAMPLED_FROM_MS)
    gaps: list[int] = []
    while first_ms is not None and len(gaps) < _SAMPLED:
        next_ms = schedule.next_run_after(first_ms, first_ms)
        if next_ms is None:
            break
        gaps.append(next_ms - first_ms)
        first_ms = next_ms
    return min(gaps, default=None)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
