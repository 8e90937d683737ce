"""The options of a timer's messages: what ``apply_async`` takes, checked before it is stored."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from datetime import datetime, timedelta
from functools import lru_cache
from typing import Any

from kombu import Exchange, Queue
from kombu.serialization import registry  # type: ignore[attr-defined]

from celery_dtimer.errors import invalid


def check_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message's options as they can be stored.

    They are what ``apply_async`` takes. Relative ``expires`` count from the moment of sending.

    Raises:
        InvalidTimerError: an option cannot work; the message names it, its value and what is
            accepted.
    """
    if not options:
        return {}
    for name, value in options.items():
        _check_option_name(name, value)
        kinds, accepted = _OPTION_TYPES.get(name, ((object,), ""))
        if value is not None and (
            not isinstance(value, kinds) or (isinstance(value, bool) and object not in kinds)
        ):
            raise invalid(f"options[{name!r}]", value, accepted)
    checked = dict(options)
    expires = options.get("expires")
    if isinstance(expires, timedelta):
        checked["expires"] = expires.total_seconds()
    serializer = options.get("serializer")
    if serializer is not None and serializer not in registry.name_to_type:
        known = ", ".join(sorted(map(str, registry.name_to_type)))
        raise invalid("options['serializer']", serializer, f"one of {known}")
    return checked


# What apply_async and kombu's publish take, and what a timer is described by: a name close to one
# of these, and not among them, is a slip of the pen. Others are left to the broker's transport.
_OPTION_NAMES = frozenset(
    "add_to_parent argsrepr chain chord compression confirm_timeout countdown declare "
    "delivery_mode eta exchange exchange_type expires group_id group_index headers ignore_result "
    "immediate kwargsrepr link link_error mandatory parent_id priority queue reply_to retries "
    "retry retry_policy root_id router routing_key serializer shadow soft_time_limit "
    "stamped_headers time_limit timeout".split()
)
_SECONDS: tuple[tuple[type, ...], str] = ((int, float), "seconds as a number")
_OPTION_TYPES: dict[str, tuple[tuple[type, ...], str]] = {
    "queue": ((str, Queue), "the name of a queue"),
    "exchange": ((str, Exchange), "the name of an exchange"),
    "routing_key": ((str,), "a str"),
    "serializer": ((str,), "the name of a serializer"),
    "priority": ((int,), "a whole number"),
    "headers": ((Mapping,), "a dict"),
    "expires": ((int, float, timedelta, datetime), "seconds, a timedelta or a datetime"),
    "countdown": _SECONDS,
    "time_limit": _SECONDS,
    "soft_time_limit": _SECONDS,
}
_FIELD_NAMES = ("name", "schedule", "callback", "args", "kwargs", "timezone", "description")


def _check_option_name(name: object, value: object) -> None:
    if name in ("task_id", "producer", "connection"):
        raise invalid(f"options[{name!r}]", value, "nothing: the timer sets it for each run")
    if not isinstance(name, str):
        raise invalid("option", name, "a str as the name of an option")
    if name == "options":
        raise invalid(name, value, "each option as a keyword of its own")
    if name not in _OPTION_NAMES:
        for close in _close_names(name):
            raise invalid("option", name, f"{close!r}, which has nearly this name")


@lru_cache(maxsize=256)
def _close_names(name: str) -> list[str]:
    return difflib.get_close_matches(name, [*_FIELD_NAMES, *_OPTION_NAMES], 1, 0.7)
