"""From what users say of a timer, in code or in the static schedule, to a checked definition."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from celery import Celery

from celery_dtimer import policy, schedules
from celery_dtimer.errors import invalid
from celery_dtimer.model import Definition
from celery_dtimer.options import check_options

#: What is said of when a timer runs, beside its schedule.
TIMING = frozenset({"timezone", "dst", "relative", *policy.KEYWORDS})
#: All that is said of a timer but for what it sends.
KEYWORDS = TIMING | {"description"}


def define(
    app: Celery,
    name: object,
    *,
    schedule: Any,
    task: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    options: Mapping[str, Any],
    keywords: Mapping[str, Any],
    current: Definition | None = None,
    is_code: bool = False,
) -> Definition:
    """Return the definition of a timer; whether it can be stored is for the caller to check.

    Args:
        app: whose time zone holds where none is named.
        name: of the timer.
        schedule: as users write it, or that of ``current``.
        task: the name of the task that is sent.
        args: of the task.
        kwargs: of the task.
        options: of the message.
        keywords: further `KEYWORDS`; others are left alone.
        current: the timer's definition, of which stays what is not named.
        is_code: the definition comes from the code that fires it, so that the schedule may be code.

    Raises:
        InvalidTimerError: something cannot be used; the message names it, its value and what is
            accepted.
    """
    if not isinstance(name, str):
        raise invalid("name", name, "a str")
    description = keywords.get("description", current.description if current else "")
    if not isinstance(description, str):
        raise invalid("description", description, "a str")
    timezone = keywords.get("timezone")
    default_zone = getattr(current.schedule, "timezone", None) if current else None
    default_zone = default_zone or app.timezone
    zone = timezone or default_zone
    rules = policy.parse_policy(keywords, zone, current.policy if current else policy.PLAIN)
    if current is not None and schedule is current.schedule:
        is_named = timezone is not None or not current.zone_of
    else:
        is_named = timezone is not None or schedules.names_zone(schedule)
    rule = schedules.parse(
        schedule,
        timezone=timezone,
        default_timezone=default_zone,
        relative=bool(keywords.get("relative")),
        dst=keywords.get("dst"),
        start_ms=rules.start_ms,
        bound=is_code,
    )
    policy.check_policy(rules, rule)
    return Definition(
        name=name,
        task=task,
        schedule=rule,
        args=args,
        kwargs=kwargs,
        options=check_options(options, zone),
        description=description,
        policy=rules,
        zone_of="" if is_named or not hasattr(rule, "timezone") else source_of(app),
    )


def source_of(app: Celery) -> str:
    """Return the name under which an app's code is known to its service."""
    return app.main or "__main__"
