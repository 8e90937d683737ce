"""Messages with what differs put in, instead of being built anew for every run.

A `Pattern` is cut from a message that Celery has built: what depends on the timer (its body, the
texts of its arguments, its id and name) and on the run (task id, scheduled moment, number, delivery
tag) is taken out. Filled with a timer it is a `Template`, and what that renders for a run is, byte
for byte, what Celery would have built.

Not promised here: that nothing else differs from message to message. The publisher uses patterns
only where nothing is to be evaluated for each message, and compares what each one says with a
second message of Celery's own before it is used.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from operator import itemgetter
from typing import Any, NamedTuple

from celery import Celery
from celery.utils.saferepr import saferepr
from kombu.compression import compress
from kombu.serialization import dumps as serialize

from celery_dtimer.model import Definition, Run, to_datetime, uuid_text

_TAG = re.compile(r'"delivery_tag": "([0-9a-f-]{36})"')
_DIRECT = '"delivery_info": {"exchange": "", '  # any other exchange is asked for its queues
_OF_THE_RUN = 3  # parts: task id, moment, tag; those of the timer follow
_MARKS = "\0\1\2\3\4\5\6"  # stand for the parts meanwhile: JSON has no such characters
_REPEATED = (0, 4, 5)  # the task id; the texts of arguments, which become properties when given
_MARKED = re.compile(f"([{_MARKS}])")


class Content(NamedTuple):
    """How Celery and kombu turn a timer's arguments into the parts of its messages."""

    app: Celery
    encode: Callable[[Any], tuple[Any, str]]  #: of the channel, for the body
    serializer: str
    compression: str | None
    embed: Any  #: the third part of a body: callbacks and the like
    options: Mapping[str, Any]

    def parts(self, timer_id: str, definition: Definition) -> tuple[str, ...]:
        """Return the pieces of a message that depend on the timer, as they stand in it."""
        args, kwargs = tuple(definition.args), dict(definition.kwargs)
        payload: Any = serialize((args, kwargs, self.embed), serializer=self.serializer)[2]
        if self.compression:
            payload = compress(payload, self.compression)[0]
        amqp, given = self.app.amqp, self.options.get
        argsrepr = given("argsrepr") or self._shown(args, args, amqp.argsrepr_maxsize)
        kwargsrepr = given("kwargsrepr") or self._shown(
            kwargs, (*kwargs, *kwargs.values()), amqp.kwargsrepr_maxsize
        )
        return (
            f'"body": {_quoted(self.encode(payload)[0])}',
            f'"argsrepr": {_quoted(argsrepr)}',
            f'"kwargsrepr": {_quoted(kwargsrepr)}',
            f'"dtimer": {{"id": "{timer_id}", "name": {_quoted(definition.name)}, ',
        )

    def _shown(self, arguments: Any, parts: Iterable[Any], limit: int) -> str:
        """Return the text of arguments that Celery puts into the headers.

        That of short plain values is their own; Celery's way takes many times as long.
        """
        if _PLAIN.issuperset(map(type, parts)):
            text = repr(arguments)
            if len(text) < limit // 4 and not _has_special(text):
                return text
        levels = self.app.conf.get("task_repr_maxlevels")
        return str(saferepr(arguments, limit, **({} if levels is None else {"maxlevels": levels})))


_quoted = json.JSONEncoder().encode
_PLAIN = frozenset((int, float, bool, type(None), str))
_has_special = re.compile(r"[^ -~]|[\\\"]").search  # a text with a quote in it shows as "..."


class Template:
    """The text of a timer's messages, with holes for what each run puts in."""

    __slots__ = ("_holes", "_text")

    def __init__(self, text: str, holes: Callable[[tuple[str, ...]], tuple[str, ...]]) -> None:
        """Take a %-format, and what picks its values from task id, moment and tag."""
        self._text = text
        self._holes = holes

    def render(self, run: Run, tag: str) -> str:
        """Return the message of a run."""
        return self._text % self._holes((run.task_id, _moment(run), tag))


class Pattern:
    """What the messages of all timers with the same task and options have in common."""

    def __init__(self, content: Content, pieces: list[str]) -> None:
        """Take the pieces of a message, of which every second one is a mark."""
        self._content = content
        parts = [_MARKS.index(mark) for mark in pieces[1::2]]
        self._holes: Any = itemgetter(*(part for part in parts if part < _OF_THE_RUN))
        self._pieces = [piece.replace("%", "%%") for piece in pieces]
        self._places = [(2 * i + 1, part - _OF_THE_RUN) for i, part in enumerate(parts)]
        for place, part in self._places:
            if part < 0:
                self._pieces[place] = "%s"

    def fill(self, timer_id: str, definition: Definition) -> Template:
        """Return a timer's template.

        Raises:
            Exception: its arguments can not be serialized.
        """
        parts = self._content.parts(timer_id, definition)
        pieces = self._pieces[:]
        for place, part in self._places:
            if part >= 0:
                pieces[place] = parts[part].replace("%", "%%")
        return Template("".join(pieces), self._holes)


def cut(message: str, run: Run, content: Content) -> Pattern | None:
    """Return the pattern of a run's message.

    None when it does not look as expected, or when the queues that it goes to are looked up for
    each message: only the default exchange leads to one queue for good.
    """
    tag = delivery_tag(message)
    if tag is None or message.count(_DIRECT) != 1:
        return None
    of_the_timer = content.parts(run.timer_id, run.definition)
    parts = (run.task_id, _moment(run), tag, *of_the_timer)
    text = message
    for mark, part in zip(_MARKS, parts, strict=True):
        text = text.replace(part, mark)
    pieces = _MARKED.split(text)
    counts = [pieces[1::2].count(mark) for mark in _MARKS]
    once = [counts[part] == 1 for part in range(len(_MARKS)) if part not in _REPEATED]
    return Pattern(content, pieces) if all(once) and all(counts) else None


def delivery_tag(message: str) -> str | None:
    """Return the delivery tag of a message as kombu's virtual transports write it."""
    tags = _TAG.findall(message)
    return str(tags[0]) if len(tags) == 1 else None


def new_tags(count: int) -> Iterator[str]:
    """Yield so many new delivery tags: UUIDv4s, as kombu's own."""
    digits = os.urandom(16 * count).hex()
    return (uuid_text(digits[start : start + 32], 4) for start in range(0, len(digits), 32))


def _moment(run: Run) -> str:
    """Return the end of a message's ``dtimer`` header, which differs from run to run."""
    seconds, ms = divmod(run.scheduled_ms, 1000)
    text = f'{_second(seconds)}.{ms:03d}+00:00", "run": {run.number}'
    if run.shard_total == 1:
        return text + "}"
    return f'{text}, "shard_index": {run.shard_index}, "shard_total": {run.shard_total}}}'


@lru_cache(maxsize=64)
def _second(seconds: int) -> str:
    moment = to_datetime(seconds * 1000).replace(tzinfo=None)
    return f'"scheduled_at": "{moment.isoformat(timespec="seconds")}'
