"""The text of iCalendar (RFC 5545) recurrence rules: how it is read, and its one form."""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

from celery_dtimer import zones
from celery_dtimer.errors import invalid

_MAX_COUNT = 10_000
NAIVE_EPOCH = dt.datetime(1970, 1, 1)  # noqa: DTZ001 - what a clock shows has no zone

_FREQUENCIES = ("YEARLY", "MONTHLY", "WEEKLY", "DAILY", "HOURLY", "MINUTELY", "SECONDLY")
YEARLY, MONTHLY, WEEKLY, DAILY, HOURLY, MINUTELY, SECONDLY = range(7)
WEEKDAYS = ("MO", "TU", "WE", "TH", "FR", "SA", "SU")
# What a list may hold, in the order in which a rule is written: least, most, and negative ones too.
_LISTS = {
    "BYSETPOS": (1, 366, True),
    "BYMONTH": (1, 12, False),
    "BYMONTHDAY": (1, 31, True),
    "BYYEARDAY": (1, 366, True),
    "BYWEEKNO": (1, 53, True),
    "BYDAY": (0, 0, False),
    "BYHOUR": (0, 23, False),
    "BYMINUTE": (0, 59, False),
    "BYSECOND": (0, 59, False),
    "BYEASTER": (0, 366, True),
}
_PARTS = ("FREQ", "INTERVAL", "WKST", "COUNT", "UNTIL", *_LISTS)
_TIME = "a date or a local time such as 20270101T090000, within the years 2 to 9998"
TEXT = (
    "an rrule of dateutil, or iCalendar text: at most one DTSTART, and one RRULE such as "
    "'RRULE:FREQ=WEEKLY;BYDAY=MO,FR'; further rules, RDATE and EXDATE cannot be stored"
)
_START = "DTSTART, from which the rule counts, before it: 'DTSTART:20270101T090000'"


class Parts(NamedTuple):
    """A rule as it is written, in its one form."""

    freq: int
    start: int  # DTSTART, as a clock shows it
    interval: int = 1
    wkst: int = 0
    total: int | None = None  # COUNT
    until: int | None = None  # likewise
    lists: tuple[tuple[str, tuple[Any, ...]], ...] = ()

    def listed(self, name: str) -> tuple[Any, ...]:
        """Return the values of a list, none if the rule does not have it."""
        return dict(self.lists).get(name, ())

    def text(self) -> str:
        """Return the rule as iCalendar writes it, without what is so by default."""
        words = [f"FREQ={_FREQUENCIES[self.freq]}"]
        if self.interval != 1:
            words.append(f"INTERVAL={self.interval}")
        if self.wkst:
            words.append(f"WKST={WEEKDAYS[self.wkst]}")
        if self.total is not None:
            words.append(f"COUNT={self.total}")
        if self.until is not None:
            words.append(f"UNTIL={written(self.until)}")
        for name, values in self.lists:
            shown = map(_weekday_text, values) if name == "BYDAY" else map(str, values)
            words.append(f"{name}={','.join(shown)}")
        return f"DTSTART:{written(self.start)}\nRRULE:{';'.join(words)}"


def _weekday_text(weekday: tuple[int, int]) -> str:
    day, number = weekday
    return f"{number:+d}{WEEKDAYS[day]}" if number else WEEKDAYS[day]


def written(wall: int) -> str:
    """Return what a clock shows as iCalendar writes it."""
    shown = NAIVE_EPOCH + dt.timedelta(seconds=wall)
    return f"{shown.year:04}{shown:%m%dT%H%M%S}"


def wall_of(naive: dt.datetime) -> int:
    """Return what a clock shows in seconds, as `zones` counts them."""
    return (naive - NAIVE_EPOCH) // dt.timedelta(seconds=1)


class Lines(NamedTuple):
    """The parts of a text, as they are written."""

    start: dt.datetime | None
    words: dict[str, str]


def lines_of(text: str) -> Lines:
    """Take a text apart; lines may be folded, as iCalendar does it."""
    start, rules = None, []
    for line in re.sub(r"\r?\n[ \t]", "", text.strip()).split():
        name, colon, value = line.rpartition(":")
        property_name, *parameters = name.upper().split(";")
        if property_name == "DTSTART" and start is None:
            start = _start(name.split(";")[1:], value)
        elif not colon or (property_name == "RRULE" and not parameters):
            rules.append(value)
        else:
            raise invalid("schedule", line, TEXT)
    if len(rules) != 1:
        raise invalid("schedule", text, TEXT)
    return Lines(start, words_of(rules[0]))


def words_of(rule: str) -> dict[str, str]:
    """Take a rule apart into its parts, by name.

    Raises:
        InvalidTimerError: If a part is unknown, or there twice.
    """
    words: dict[str, str] = {}
    for part in filter(None, rule.upper().split(";")):
        name, _, value = part.partition("=")
        name = "BYDAY" if name == "BYWEEKDAY" else name
        if name not in _PARTS or name in words:
            raise invalid("schedule", part, "each of these at most once: " + ", ".join(_PARTS))
        words[name] = value
    return words


def _start(parameters: Iterable[str], value: str) -> dt.datetime:
    start = _time("DTSTART", value)
    for parameter in parameters:
        name, _, setting = parameter.partition("=")
        if name.upper() == "TZID" and start.tzinfo is None:
            start = start.replace(tzinfo=zones.zone_of(zones.zone_name(setting)))
        elif parameter.upper() not in ("VALUE=DATE", "VALUE=DATE-TIME"):
            raise invalid(
                "DTSTART", f"{parameter}:{value}", "TZID=... or VALUE=... before the time"
            )
    return start


def _time(name: str, text: str) -> dt.datetime:
    """Return a time as iCalendar writes it; one of UTC is aware."""
    form = re.fullmatch(r"(\d{8})(?:T(\d{6})(Z?))?", text, re.ASCII | re.IGNORECASE)
    if form is None:
        raise invalid(name, text, _TIME)
    try:
        time = dt.datetime.strptime(form[1] + (form[2] or "000000"), "%Y%m%d%H%M%S")  # noqa: DTZ007
    except ValueError:
        raise invalid(name, text, _TIME) from None
    return time.replace(tzinfo=zones.UTC) if form[3] else time


def _local(name: str, time: dt.datetime, timezone: str) -> int:
    """Return what the clocks of a zone show at a time, which is one of theirs unless aware."""
    if time.utcoffset() is not None:
        try:
            time = time.astimezone(zones.zone_of(timezone))
        except OverflowError:
            raise invalid(name, time, _TIME) from None
    if not 2 <= time.year <= 9998:
        raise invalid(name, time, _TIME)
    return wall_of(time.replace(tzinfo=None, fold=0))


def parts_of(lines: Lines, timezone: str) -> Parts:
    """Return the one form of a rule.

    Raises:
        InvalidTimerError: It names the part that is wrong, with its value and what is accepted.
    """
    words = lines.words
    if lines.start is None:
        raise invalid("schedule", ";".join(map("=".join, words.items())), _START)
    if words.get("FREQ") not in _FREQUENCIES:
        raise invalid("FREQ", words.get("FREQ"), "one of " + ", ".join(_FREQUENCIES))
    if "COUNT" in words and "UNTIL" in words:
        raise invalid("COUNT", words["COUNT"], "COUNT or UNTIL, but not both")
    until = _time("UNTIL", words["UNTIL"]) if "UNTIL" in words else None
    return Parts(
        freq=_FREQUENCIES.index(words["FREQ"]),
        start=_local("DTSTART", lines.start, timezone),
        interval=_number(words, "INTERVAL", 1, 1_000_000) if "INTERVAL" in words else 1,
        wkst=_weekday("WKST", words["WKST"])[0] if "WKST" in words else 0,
        total=_number(words, "COUNT", 1, _MAX_COUNT) if "COUNT" in words else None,
        until=None if until is None else _local("UNTIL", until, timezone),
        lists=tuple((name, _list(words, name)) for name in _LISTS if name in words),
    )


def _number(words: dict[str, str], name: str, least: int, most: int) -> int:
    number = int(words[name]) if re.fullmatch(r"[0-9]{1,9}", words[name]) else -1
    if not least <= number <= most:
        hint = "; to stop a timer after more runs use max_runs" if name == "COUNT" else ""
        raise invalid(name, words[name], f"a number from {least} to {most}{hint}")
    return number


def _list(words: dict[str, str], name: str) -> tuple[Any, ...]:
    """Return the sorted values of a list; those of BYDAY are (weekday, number) pairs."""
    if name == "BYDAY":
        return _weekdays(words)
    least, most, negative = _LISTS[name]
    values = set()
    for text in words[name].split(","):
        number = int(text) if re.fullmatch(r"[+-]?[0-9]{1,3}", text) else most + 1
        if not least <= (abs(number) if negative else number) <= most:
            sign = f" or {-most} to {-max(least, 1)}" if negative else ""
            raise invalid(name, words[name], f"numbers from {least} to {most}{sign}, as in 'a,b'")
        values.add(number)
    return tuple(sorted(values))


def _weekdays(words: dict[str, str]) -> tuple[tuple[int, int], ...]:
    weekdays = {_weekday("BYDAY", text) for text in words["BYDAY"].split(",")}
    if words["FREQ"] not in ("YEARLY", "MONTHLY"):
        weekdays = {(day, 0) for day, _ in weekdays}  # a number counts in a month or a year
    if len({number == 0 for _, number in weekdays}) > 1:
        raise invalid("BYDAY", words["BYDAY"], "a number before every weekday or before none")
    return tuple(sorted(weekdays))


def _weekday(name: str, text: str) -> tuple[int, int]:
    form = re.fullmatch(r"([+-]?[0-9]{1,2})?(MO|TU|WE|TH|FR|SA|SU)", text)
    form = form or re.fullmatch(r"(?P<day>MO|TU|WE|TH|FR|SA|SU)\((?P<n>[+-]?[0-9]{1,2})\)", text)
    if form is None:
        raise invalid(name, text, "MO, TU, WE, TH, FR, SA or SU")
    day, number = (form["day"], form["n"]) if "day" in form.groupdict() else (form[2], form[1])
    if number is not None and (name != "BYDAY" or not 1 <= abs(int(number)) <= 53):
        raise invalid(name, text, "a weekday, with 1 to 53 or -53 to -1 before it")
    return WEEKDAYS.index(day), int(number or 0)
