"""Rules that live in code: subclasses of Celery's schedules, which only their owner can ask."""

from __future__ import annotations

import datetime as dt
import math
import re
import threading
from dataclasses import dataclass, field
from typing import Any

from celery_dtimer import zones
from celery_dtimer.errors import InvalidTimerError, invalid
from celery_dtimer.rules import Schedule

_MIN_WAIT = 100  # a beat keeps no shorter rhythm than 0.1 s
_MAX_WAIT = 300_000  # Celery's beat asks at least this often, so a rule may change its mind
_DAY = 86_400_000
_LONGEST = 1000 * 366 * _DAY  # so that a moment stays one that can be shown, or nearly
_MAX_QUESTIONS = 400  # a year of days, and some
_MILLISECOND = dt.timedelta(milliseconds=1)
_ASKING = threading.Lock()  # for a moment a rule has another clock
_ANSWER = "(is it due now, seconds until it is to be asked again), as Celery's schedules return it"


@dataclass(frozen=True, slots=True)
class Custom(Schedule):
    """Whenever a subclass of one of Celery's schedules says so.

    Only its name, and its ``repr`` if that says something, are stored; so the rule can be asked
    only where ``live`` is set, which is in a process whose static schedule has it.
    """

    name: str
    text: str = ""
    live: Any = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise invalid("custom", self.name, "the name of a class")
        if not isinstance(self.text, str):
            raise invalid("repr", self.text, "a str")

    def ask(self, now_ms: int, last_run_ms: int) -> tuple[bool, int]:
        """Return whether a run is due now, and in how many ms to ask again.

        What the rule raises itself passes through.

        Raises:
            InvalidTimerError: If its ``is_due`` returns something else, or it is not in this
                process.
        """
        if self.live is None:
            raise InvalidTimerError(
                f"The schedule {self.describe()!r} lives in code that is not in this process"
            )
        due, wait = self._answer(self.live, now_ms, last_run_ms)
        return due, min(wait, _MAX_WAIT)

    def first_run(self, now_ms: int) -> int | None:
        """Return when to ask first, as if the rule had run just now."""
        if self.live is None:
            return now_ms + 1
        try:
            return now_ms + self.ask(now_ms, now_ms)[1]
        except Exception:  # its owner asks at once, and sets the timer aside with what is wrong
            return now_ms + 1

    def next_run_after(self, moment_ms: int, anchor_ms: int) -> int | None:
        """Return the first later moment at which a run is due if the anchor was the last.

        It is found by asking about moments to come; ``None`` if none is found within a year.
        Where the rule is not in this process, it is the next millisecond: its owner shall ask.
        """
        if self.live is None:
            return moment_ms + 1
        at, asked = moment_ms + 1, self._copy()
        for _ in range(_MAX_QUESTIONS):
            if not zones.FIRST <= at // 1000 < zones.LAST:
                return None
            due, wait = self._answer(asked, at, anchor_ms)
            if due:
                return at
            at += min(wait, _DAY)
            if self.live.nowfun is not None:  # it has a clock of its own: no use to ask again
                return at
        return None

    def count_between(self, after_ms: int, until_ms: int, anchor_ms: int) -> int:
        """Return 0: only the rule's owner can tell."""
        return 0

    def last_runs_begin(
        self, after_ms: int, until_ms: int, anchor_ms: int, count: int
    ) -> int | None:
        """Return ``None``: only the rule's owner can tell."""
        return None

    def _answer(self, asked: Any, now_ms: int, last_run_ms: int) -> tuple[bool, int]:
        """Return what a rule answers that takes a given moment for now.

        As Celery's beat does it, the last run is in the words of the rule's own clock: aware, in
        the zone of the app, unless its ``nowfun`` tells naive times.
        """
        zone = asked.app.timezone
        last_run_at = (zones.EPOCH + last_run_ms * _MILLISECOND).astimezone(zone)
        with _ASKING:
            if asked.nowfun is None:
                now = (zones.EPOCH + now_ms * _MILLISECOND).astimezone(zone)
                asked.nowfun = lambda: now
                try:
                    return self._read(asked.is_due(last_run_at))
                finally:
                    asked.nowfun = None
            if (own_now := asked.nowfun()).tzinfo is None:
                last_run_at = own_now - (now_ms - last_run_ms) * _MILLISECOND
            return self._read(asked.is_due(last_run_at))

    def _copy(self) -> Any:
        """Return a copy that can be asked about moments to come."""
        # Celery's own copies are made from the arguments that its classes know, no others.
        copied = object.__new__(type(self.live))
        vars(copied).update(vars(self.live))
        return copied

    def _read(self, answer: Any) -> tuple[bool, int]:
        """Return an answer of ``is_due`` as a bool and whole milliseconds, rounded up."""
        if not isinstance(answer, tuple) or len(answer) != 2:
            raise invalid(f"{self.name}.is_due()", answer, _ANSWER)
        due, wait = answer
        is_number = isinstance(wait, int | float) and not isinstance(wait, bool)
        if not isinstance(due, int) or not is_number or wait != wait:  # not a number
            raise invalid(f"{self.name}.is_due()", answer, _ANSWER)
        return bool(due), math.ceil(min(max(wait * 1000, _MIN_WAIT), _LONGEST))

    def describe(self) -> str:
        """Return the rule's ``repr``, or the name of its class."""
        return self.text or self.name

    def encode(self) -> dict[str, Any]:
        """Return ``{"custom": name}``, with "repr" if there is one."""
        return {"custom": self.name} | ({"repr": self.text} if self.text else {})


def custom_of(rule: Any) -> Custom:
    """Return the rule for an object of a subclass of Celery's schedules."""
    kind = type(rule)
    return Custom(f"{kind.__module__}.{kind.__qualname__}", _text_of(rule), rule)


def _text_of(rule: Any) -> str:
    """Return what an object says of itself, nothing if it names an address or fails."""
    try:
        text = repr(rule)
    except Exception:  # it may be incomplete; what counts is how it answers
        return ""
    return "" if re.search(r"0x[0-9a-fA-F]+", text) else text
