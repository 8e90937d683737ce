"""Which tasks timers may send: those that ``dtimer_allowed_tasks`` allows.

Who can write to Redis could else have any task sent. So an instance looks at what is stored before
it sends it, and finds every task that it would have sent: members of a canvas, links, what follows
in a chain or chord, and a ``task`` among the headers, which Celery would take in place of the name.
What is in a body that cannot be read without unpickling or decompressing it is not known, and not
sent.

What an instance's own code declares is code: the names of those tasks are allowed to it besides.
"""

from __future__ import annotations

import fnmatch
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from celery_dtimer.errors import InvalidTimerError, shown
from celery_dtimer.model import Definition
from celery_dtimer.options import CANVAS_KINDS, LINKS

SETTING = "dtimer_allowed_tasks"

# Celery's own tasks that do nothing but send what is in their arguments: that is looked at.
_SENDERS = frozenset((*CANVAS_KINDS, "celery.chord_unlock"))
# Where options, and the body of a message, name what is sent later.
_FOLLOWING = (*LINKS, "chain", "chord", "callbacks", "errbacks")


class AllowedTasks:
    """Says which definitions may be sent."""

    def __init__(self, patterns: Sequence[str] | None, declared: Iterable[Definition] = ()) -> None:
        """Prepare for checking.

        Args:
            patterns: names of tasks, ``*`` and ``?`` standing for any text and any character; None
                allows all.
            declared: the definitions of this process's own code.
        """
        self._pattern = None if patterns is None else _compiled(tuple(patterns))
        self._own: set[str] = set()
        if self._pattern is not None:
            self._own = {name for each in declared for name in tasks_of(each)}

    def allows(self, task: str) -> bool:
        """Say whether a task of this name may be sent."""
        return self._pattern is None or task in self._own or bool(self._pattern.match(task))

    def check(self, definition: Definition) -> None:
        """Refuse a definition by which something else would be sent.

        Raises:
            InvalidTimerError: with the name of the task.
        """
        if self._pattern is None:
            return
        for name in tasks_of(definition):
            if not self.allows(name):
                raise InvalidTimerError(
                    f"the task {shown(name)} is not allowed: {SETTING} does not name it"
                )


@lru_cache(maxsize=64)
def _compiled(patterns: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(fnmatch.translate, patterns)) or r"(?!)")


def tasks_of(definition: Definition) -> Iterator[str]:
    """Yield the name of every task that a definition sends, or has workers send after it.

    Raises:
        InvalidTimerError: they are in a body that is not read here.
    """
    waiting: list[Any] = [
        {
            "task": definition.task,
            "args": definition.args,
            "kwargs": definition.kwargs,
            "options": definition.options,
        }
    ]
    if definition.message is not None:
        waiting = list(_in_message(definition.task, definition.message))
    while waiting:  # no recursion: what is stored may be nested deep
        call = waiting.pop()
        if isinstance(call, str):
            yield call
            continue
        task, options = call.get("task"), call.get("options")
        is_sender = isinstance(task, str) and task in _SENDERS
        if isinstance(task, str) and not is_sender:
            yield task
        if is_sender or call.get("subtask_type"):  # for Celery that counts, whatever the name is
            kwargs = call.get("kwargs")  # no signature itself, whatever keys it has
            inner = kwargs.values() if isinstance(kwargs, Mapping) else [kwargs]
            waiting += _calls_in([call.get("args"), *inner])
        if isinstance(options, Mapping):
            waiting += _following(options)
            waiting += _named_in(options.get("headers"), call)


def _in_message(task: str, message: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the calls that a message which was kept makes, and what follows them.

    Raises:
        InvalidTimerError: its body is not read here.
    """
    if "data" in message:
        kind = shown(message.get("type"))
        raise InvalidTimerError(
            f"its body is {kind}, in which no task can be seen, and {SETTING} does not allow all"
        )
    content: Any = [message.get("args"), message.get("kwargs"), message.get("embed")]
    if "text" in message:
        try:
            content = json.loads(message["text"])
        except (TypeError, ValueError, RecursionError) as exc:
            raise InvalidTimerError(f"its body can not be read: {type(exc).__name__}") from exc
    if isinstance(content, Mapping):  # of task protocol 1
        yield {**content, "options": content}
        args, kwargs, embed = content.get("args"), content.get("kwargs"), None
    elif isinstance(content, list) and len(content) == 3:
        args, kwargs, embed = content
    else:
        raise InvalidTimerError(f"its body is {shown(content)}; expected args, kwargs and embed")
    call = {"task": task, "args": args, "kwargs": kwargs}
    yield call
    yield from _following(embed) if isinstance(embed, Mapping) else _calls_in([embed])
    headers = message.get("h")
    if isinstance(headers, Mapping):
        yield from _following(headers)
        yield from _named_in(headers, call)


def _named_in(headers: Any, call: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the call of the task that headers name: Celery takes it in place of its own."""
    name = headers.get("task") if isinstance(headers, Mapping) else None
    if name is not None:
        yield {"task": str(name), "args": call.get("args"), "kwargs": call.get("kwargs")}


def _following(options: Mapping[str, Any]) -> Iterator[Any]:
    """Yield what is sent later: signatures, or names, alone or in lists."""
    for name in _FOLLOWING:
        links = options.get(name)
        for each in links if isinstance(links, (list, tuple)) else [links]:
            if isinstance(each, str):
                yield each
            else:
                yield from _calls_in([each])


def _calls_in(values: list[Any]) -> Iterator[Any]:
    """Yield the signatures in lists and dicts, however deep; not those inside of signatures."""
    while values:
        value = values.pop()
        if isinstance(value, Mapping):
            if isinstance(value.get("task"), str):
                yield value
            else:
                values += value.values()
        elif isinstance(value, (list, tuple)):
            values += value
