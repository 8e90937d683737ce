"""The options of a timer's messages: what ``apply_async`` takes, checked before it is stored."""

from __future__ import annotations

import builtins
import difflib
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime, timedelta, timezone, tzinfo
from functools import lru_cache, partial
from typing import Any

from celery.utils.time import maybe_iso8601
from kombu import Exchange, Queue
from kombu.compression import encoders, get_encoder
from kombu.serialization import registry  # type: ignore[attr-defined]

from celery_dtimer import policy, schedules
from celery_dtimer.errors import invalid

_LONGEST = 1000 * 365 * 86_400  # seconds
_MOST_EXCEPTIONS = 100
_LONGEST_NAME = 255  # characters
_HIGHEST_PRIORITY = 255  # RabbitMQ's; kombu makes the ten of Redis of them
_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)


def check_options(options: Mapping[str, Any], zone: tzinfo | str = "UTC") -> dict[str, Any]:
    """Return a message's options as they can be stored.

    They are what ``apply_async`` takes. Times may be timedeltas, which become seconds. An
    ``expires`` in seconds counts from the moment of each sending; one that is a datetime is the
    same moment for all runs, and is returned aware. ``link`` and ``link_error`` are signatures, or
    lists of them, and are returned as Celery's own dicts.

    Args:
        options: by name; None stands for the default.
        zone: of datetimes that name none.

    Raises:
        InvalidTimerError: an option cannot work; the message names it, its value and what is
            accepted.
    """
    checked = dict(options)
    for name, value in options.items():
        _check_option_name(name, value)
        if value is None:
            continue
        kinds, accepted = _OPTION_TYPES.get(name, ((object,), ""))
        field = f"options[{name!r}]"
        if not isinstance(value, kinds) or (isinstance(value, bool) and not _takes_bool(kinds)):
            raise invalid(field, value, accepted)
        if kinds is _SECONDS[0] and not _is_short(value):
            raise invalid(field, value, f"{accepted}, within 1000 years")
        if name == "expires":
            checked[name] = _expires(field, value, zone)
        elif name == "timeout":
            checked[name] = _timeout(field, value)
        elif isinstance(value, timedelta):
            checked[name] = value.total_seconds()
        elif name in LINKS:
            checked[name] = each_link(value, partial(plain_signature, field))
        elif name == "serializer" and value not in registry.name_to_type:
            known = ", ".join(sorted(map(str, registry.name_to_type)))
            raise invalid(field, value, f"one of {known}")
        elif name == "eta":
            _check_eta(field, value, accepted)
        elif name == "compression":
            _check_compression(field, value)
        elif name in _EXCEPTIONS:
            checked[name] = _exception_names(field, value)
        elif name in _HIGHEST and not _is_count(value, _HIGHEST[name]):
            raise invalid(field, value, accepted)
        elif name == "delivery_mode" and value not in _DELIVERY_MODES:
            raise invalid(field, value, f"one of {', '.join(map(str, _DELIVERY_MODES))}")
    return checked


def _is_count(value: Any, highest: int) -> bool:
    return bool(0 <= value <= highest)


def _takes_bool(kinds: tuple[type, ...]) -> bool:
    return bool in kinds or object in kinds


def _timeout(field: str, value: Any) -> float:
    seconds: float = value.total_seconds() if isinstance(value, timedelta) else value
    if seconds <= 0:
        raise invalid(field, value, "more than 0 seconds")
    return seconds


def _exception_names(field: str, value: Any) -> list[str]:
    """Return exceptions by their full names: what is stored is compared, and never imported."""
    accepted = (
        "an exception class, its full name (of a built-in one also its short one), or a list of "
        f"at most {_MOST_EXCEPTIONS} of them"
    )
    names = []
    for each in value if isinstance(value, (list, tuple)) else [value]:
        kind = getattr(builtins, each, None) if isinstance(each, str) else each
        if isinstance(kind, type) and issubclass(kind, Exception):
            names.append(exception_name(kind))
        elif isinstance(each, str) and "." in each and _is_dotted_name(each):
            names.append(each)
        else:
            raise invalid(field, value, accepted)
    if not 0 < len(names) <= _MOST_EXCEPTIONS:
        raise invalid(field, value, accepted)
    return names


def _is_dotted_name(text: str) -> bool:
    return len(text) <= _LONGEST_NAME and all(part.isidentifier() for part in text.split("."))


def exception_name(kind: type) -> str:
    """Return the full name of an exception class."""
    return f"{kind.__module__}.{kind.__qualname__}"


def with_time_limits(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options with Celery's time limits in place of ``timeout``.

    The soft limit is the timeout, and the hard one comes a little later, so that the task can tidy
    up; limits that are given themselves stay.
    """
    found = dict(options)
    timeout = found.pop("timeout", None)
    if timeout is not None:
        found.setdefault("soft_time_limit", timeout)
        found.setdefault("time_limit", timeout + _TIDY_UP)
    return found


def _check_compression(field: str, value: Any) -> None:
    try:
        get_encoder(value)
    except KeyError:
        accepted = f"one that kombu knows: {', '.join(sorted(encoders()))}, or a short name of one"
        raise invalid(field, value, accepted) from None


def _check_eta(field: str, value: Any, accepted: str) -> None:
    try:
        maybe_iso8601(value)
    except ValueError:
        raise invalid(field, value, accepted) from None


def _is_short(value: Any) -> bool:
    seconds = value.total_seconds() if isinstance(value, timedelta) else value
    return bool(abs(seconds) < _LONGEST)


def _expires(field: str, value: Any, zone: tzinfo | str) -> Any:
    if isinstance(value, datetime):
        moment_ms = schedules.moment_ms(field, value, zone)
        if value.utcoffset() is not None:
            return value
        return _EPOCH + timedelta(milliseconds=moment_ms)
    seconds = value.total_seconds() if isinstance(value, timedelta) else value
    if not 0 < seconds < _LONGEST:
        accepted = "more than 0 seconds, counted from each sending: else no message is ever run"
        raise invalid(field, value, accepted)
    return seconds


# What apply_async and kombu's publish take, and what a timer is described by: a name close to one
# of these, and not among them, is a slip of the pen. Others are left to the broker's transport.
_OPTION_NAMES = frozenset(
    "add_to_parent argsrepr autoretry_for chain chord compression confirm_timeout countdown "
    "declare delivery_mode dont_autoretry_for eta exchange exchange_type expires group_id "
    "group_index headers ignore_result immediate kwargsrepr link link_error mandatory max_retries "
    "parent_id priority queue reply_to retries retry retry_backoff retry_backoff_max retry_jitter "
    "retry_policy root_id router routing_key serializer shadow soft_time_limit stamped_headers "
    "time_limit timeout".split()
)
#: The options that name what is sent after a task, in the worker.
LINKS = ("link", "link_error")
_SECONDS: tuple[tuple[type, ...], str] = (
    (int, float, timedelta),
    "seconds as a number, or a timedelta",
)
_SIGNATURES: tuple[tuple[type, ...], str] = (
    (Mapping, list, tuple),
    "a signature (task.s(...)) or a list of signatures",
)
_KINDS_OF_EXCEPTIONS: tuple[tuple[type, ...], str] = (
    (type, str, list, tuple),
    "an exception class, its full name, or a list of them",
)
_HIGHEST = {
    "priority": _HIGHEST_PRIORITY,
    **dict.fromkeys(("max_retries", "retry_backoff", "retry_backoff_max"), _LONGEST),
}
_EXCEPTIONS = ("autoretry_for", "dont_autoretry_for")
#: The options that say how a callback is retried, as Celery's tasks have them; they travel in
RETRIES = (*_EXCEPTIONS, "max_retries", "retry_backoff", "retry_backoff_max", "retry_jitter")
RETRY_HEADER = "dtimer_retry"  #: this header of the message.
CALLBACK_MARK = "dtimer_callback"  #: the attribute of the tasks that look at it
_TIDY_UP = 5.0  # seconds that a task has after its timeout
_OPTION_TYPES: dict[str, tuple[tuple[type, ...], str]] = {
    "queue": ((str, Queue), "the name of a queue"),
    "exchange": ((str, Exchange), "the name of an exchange"),
    "routing_key": ((str,), "a str"),
    "serializer": ((str,), "the name of a serializer"),
    "priority": ((int,), f"a whole number from 0 to {_HIGHEST_PRIORITY}"),
    "headers": ((Mapping,), "a dict"),
    "stamped_headers": ((list, tuple), "a list of the names of headers"),
    "retry_policy": ((Mapping,), "a dict"),
    "eta": ((datetime, str), "a datetime, or its ISO 8601 text"),
    "compression": ((str,), "the name of a compression"),
    "delivery_mode": ((int, str), "a mode of delivery"),
    "expires": (
        (int, float, timedelta, datetime),
        "seconds or a timedelta, counted from each sending, or a datetime (a text is neither)",
    ),
    "countdown": _SECONDS,
    "time_limit": _SECONDS,
    "soft_time_limit": _SECONDS,
    "timeout": _SECONDS,
    "autoretry_for": _KINDS_OF_EXCEPTIONS,
    "dont_autoretry_for": _KINDS_OF_EXCEPTIONS,
    "max_retries": ((int,), "a whole number, 0 or more"),
    "retry_backoff": ((bool, int, float), "True, False or seconds"),
    "retry_backoff_max": ((int, float), "seconds, 0 or more"),
    "retry_jitter": ((bool,), "True or False"),
    **dict.fromkeys(LINKS, _SIGNATURES),
}
_DELIVERY_MODES = (1, 2, "transient", "persistent")
_FIELD_NAMES = (
    *("name", "schedule", "callback", "args", "kwargs", "timezone", "dst", "relative"),
    *("description", *policy.KEYWORDS),
)


def _check_option_name(name: object, value: object) -> None:
    if name in ("task_id", "producer", "connection"):
        raise invalid(f"options[{name!r}]", value, "nothing: the timer sets it for each run")
    if not isinstance(name, str):
        raise invalid("option", name, "a str as the name of an option")
    if name == "options":
        raise invalid(name, value, "each option as a keyword of its own")
    if name in _FIELD_NAMES:
        accepted = "nothing: it belongs to the timer, beside its options"
        raise invalid(f"options[{name!r}]", value, accepted)
    if name not in _OPTION_NAMES:
        for close in _close_names(name):
            raise invalid("option", name, f"{close!r}, which has nearly this name")


@lru_cache(maxsize=256)
def _close_names(name: str) -> list[str]:
    return difflib.get_close_matches(name, [*_FIELD_NAMES, *_OPTION_NAMES], 1, 0.7)


# ------------------------------------------------------------------ signatures

#: The canvas tasks by their names, and their kind of signature.
CANVAS_KINDS = {
    "celery.chain": "chain",
    "celery.group": "group",
    "celery.chord": "chord",
    "celery.chunks": "chunks",
    "celery.map": "xmap",
    "celery.starmap": "xstarmap",
}
# What Celery writes into the options of a signature that it sends: it belongs to that sending.
_OF_A_SENDING = frozenset(
    "task_id group_id group_index root_id parent_id reply_to chord chain".split()
)


def plain_signature(field: str, value: Any) -> dict[str, Any]:
    """Return a signature as JSON data: Celery's own dict, and so are all the tasks in it.

    Ids that it had are left out. It shares arguments with the signature, and nothing else.

    Args:
        field: the keyword that it was given as.
        value: a signature, or its dict.

    Raises:
        InvalidTimerError: it is no signature, or one in it is none, or has nothing to run.
    """
    task = value.get("task") if isinstance(value, Mapping) else None
    if not isinstance(task, str) or not task:
        raise invalid(field, value, "a signature, made by task.s(...)")
    args, kwargs = value.get("args") or (), value.get("kwargs") or {}
    options = value.get("options") or {}
    if not (
        isinstance(args, (list, tuple))
        and isinstance(kwargs, Mapping)
        and isinstance(options, Mapping)
    ):
        raise invalid(field, value, "a signature whose args, kwargs and options are list and dicts")
    options = {key: each for key, each in options.items() if key not in _OF_A_SENDING}
    for name in LINKS:
        if options.get(name) is not None:
            options[name] = each_link(options[name], partial(plain_signature, field))
    kind = CANVAS_KINDS.get(task)
    if kind is not None:
        kwargs = {**kwargs, **_PLAIN_PARTS[kind](field, value, kwargs)}
    return {
        "task": task,
        "args": list(args),
        "kwargs": dict(kwargs),
        "options": options,
        "subtask_type": kind or value.get("subtask_type"),
        "immutable": bool(value.get("immutable", False)),
    }


def each_link(links: Any, change: Callable[[Any], Any]) -> Any:
    """Return a link or a list of them with each one changed."""
    return list(map(change, links)) if isinstance(links, (list, tuple)) else change(links)


def _plain_tasks(field: str, whole: Any, tasks: Any) -> list[dict[str, Any]]:
    if isinstance(tasks, Mapping) or not isinstance(tasks, Iterable) or isinstance(tasks, str):
        tasks = [tasks]
    plain = [plain_signature(field, task) for task in tasks]
    if not plain:
        raise invalid(field, whole, "a canvas in which no part is empty")
    return plain


def _plain_sequence(field: str, whole: Any, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return {"tasks": _plain_tasks(field, whole, kwargs.get("tasks"))}


def _plain_chord(field: str, whole: Any, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    header, body = kwargs.get("header"), kwargs.get("body")
    if isinstance(header, Mapping) and header.get("task") == "celery.group":
        header = (header.get("kwargs") or {}).get("tasks")  # as it is once it was sent
    if body is None:
        raise invalid(field, whole, "a chord with a body")
    return {
        "kwargs": dict(kwargs.get("kwargs") or {}),
        "header": _plain_tasks(field, whole, header),
        "body": plain_signature(field, body),
    }


def _plain_map(field: str, whole: Any, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    items = kwargs.get("it")
    if not isinstance(items, Iterable) or isinstance(items, (str, bytes, Mapping)):
        raise invalid(field, whole, "a list of the items that its task is mapped over")
    return {"task": plain_signature(field, kwargs.get("task")), "it": list(items)}


def _plain_chunks(field: str, whole: Any, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    plain, size = _plain_map(field, whole, kwargs), kwargs.get("n")
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise invalid(field, whole, "chunks of a whole number of items, 1 or more")
    if not plain["it"]:
        raise invalid(field, whole, "a canvas in which no part is empty")
    return {**plain, "n": size}


_PLAIN_PARTS: dict[str, Callable[[str, Any, Mapping[str, Any]], dict[str, Any]]] = {
    "chain": _plain_sequence,
    "group": _plain_sequence,
    "chord": _plain_chord,
    "chunks": _plain_chunks,
    "xmap": _plain_map,
    "xstarmap": _plain_map,
}
