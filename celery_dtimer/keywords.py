"""From what users say of a timer, in code or in the static schedule, to a checked definition."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import tzinfo
from types import NoneType
from typing import Any

from celery import Celery

from celery_dtimer import policy, schedules
from celery_dtimer.errors import invalid
from celery_dtimer.model import Definition
from celery_dtimer.options import CALLBACK_MARK, CANVAS_KINDS, RETRIES, check_options
from celery_dtimer.rules import ClockRule
from celery_dtimer.zones import DEFAULT_POLICY

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
    if not isinstance(description or "", str):
        raise invalid("description", description, "a str")
    if not isinstance(keywords.get("relative"), (bool, NoneType)):
        raise invalid("relative", keywords["relative"], "True or False")
    if keywords.get("timezone") is not None:
        schedules.zone_name(keywords["timezone"])  # a wrong one shows, also where none matters
    own_zone = _own_zone(current, keywords)
    default_zone = own_zone or app.timezone
    zone = keywords.get("timezone") or default_zone
    rules = policy.parse_policy(keywords, zone, current.policy if current else policy.PLAIN)
    rule = _rule(schedule, keywords, current, default_zone, rules.start_ms, is_code=is_code)
    policy.check_policy(rules, rule)
    _check_sending(app, task, rules, options)
    is_named = (
        keywords.get("timezone") is not None
        or own_zone is not None
        or (not _is_kept(schedule, current) and schedules.names_zone(schedule))
    )
    return Definition(
        name=name,
        task=task,
        schedule=rule,
        args=args,
        kwargs=kwargs,
        options=check_options(options, zone),
        description=description or "",
        policy=rules,
        zone_of="" if is_named or not schedules.has_clock(rule) else source_of(app),
    )


def check(app: Celery, definition: Definition) -> None:
    """Refuse a definition that comes from elsewhere, if `define` would not have made it.

    Args:
        app: that is to send it.
        definition: as it was told.

    Raises:
        InvalidTimerError: something cannot be used; the message names it, its value and what is
            accepted.
    """
    rules, task, options = definition.policy, definition.task, definition.options
    policy.check_policy(rules, definition.schedule)
    if not task:
        raise invalid("task", task, "the name of a Celery task")
    _check_sending(app, task, rules, options)
    check_options(options, "UTC")


def _check_sending(
    app: Celery, task: str, rules: policy.Policy, options: Mapping[str, Any]
) -> None:
    """Refuse what a task and its options can not have together with a policy."""
    if task in CANVAS_KINDS:
        _check_canvas(rules)
    _check_retries(app, task, options)
    if rules.is_held:
        _check_held(app, rules, options)


def _check_canvas(rules: policy.Policy) -> None:
    """Refuse what needs to know when a run has ended: a canvas may go on after any of its tasks."""
    if rules.overlap != policy.ALLOW:
        raise invalid("overlap", rules.overlap, "nothing: the callback is a canvas")
    if rules.resend_lost:
        raise invalid("resend_lost", rules.resend_lost, "nothing: the callback is a canvas")


def _check_held(app: Celery, rules: policy.Policy, options: Mapping[str, Any]) -> None:
    """Refuse what a timer that holds its runs can not have: they would count as lost."""
    for name in ("countdown", "eta"):
        if options.get(name) is not None:
            accepted = "nothing beside overlap or resend_lost: a run is to start when it is sent"
            raise invalid(f"options[{name!r}]", options[name], accepted)
    if rules.resend_lost and app.conf.get("dtimer_track_runs", True) is False:
        accepted = "nothing while dtimer_track_runs is off: no run would be known to have ended"
        raise invalid("resend_lost", rules.resend_lost, accepted)


def _check_retries(app: Celery, task: str, options: Mapping[str, Any]) -> None:
    """Refuse retries of a timer whose task would not see them: only a callback does."""
    for name in RETRIES:
        if options.get(name) is not None:
            known = app.tasks.get(task)
            if task in CANVAS_KINDS or (known is not None and not hasattr(known, CALLBACK_MARK)):
                accepted = "a callback as the timer's task: others have their own in @app.task"
                raise invalid(f"options[{name!r}]", options[name], accepted)


def _own_zone(current: Definition | None, keywords: Mapping[str, Any]) -> str | None:
    """Return the zone that a timer has named before, and that is not taken from it."""
    if current is None or current.zone_of or "timezone" in keywords:
        return None
    schedule: Any = current.schedule
    return str(schedule.timezone) if schedules.has_clock(schedule) else None


def _is_kept(schedule: Any, current: Definition | None) -> bool:
    return current is not None and schedule is current.schedule


def _rule(
    schedule: Any,
    keywords: Mapping[str, Any],
    current: Definition | None,
    default_zone: tzinfo | str,
    start_ms: int | None,
    *,
    is_code: bool,
) -> schedules.Schedule:
    """Return the rule of a timer; of the current one's stays what is not named."""
    if _is_kept(schedule, current):
        return _changed_rule(schedule, keywords, default_zone)
    rule = schedules.parse(
        schedule,
        timezone=keywords.get("timezone"),
        default_timezone=default_zone,
        relative=bool(keywords.get("relative")),
        dst=keywords.get("dst"),
        start_ms=start_ms,
        bound=is_code,
    )
    before = (
        None if current is None or isinstance(schedule, schedules.Schedule) else current.schedule
    )
    if isinstance(before, ClockRule) and isinstance(rule, ClockRule) and "dst" not in keywords:
        return replace(rule, dst=before.dst)  # type: ignore[type-var]
    if (
        isinstance(before, schedules.Interval)
        and isinstance(rule, schedules.Interval)
        and "relative" not in keywords
        and before.relative
    ):
        return replace(rule, relative=True, timezone=schedules.zone_name(default_zone))
    return rule


def _changed_rule(
    rule: schedules.Schedule, keywords: Mapping[str, Any], default_zone: tzinfo | str
) -> schedules.Schedule:
    """Return a timer's rule with what is said of it beside; None stands for the default."""
    if isinstance(rule, schedules.Interval) and keywords.get("relative", True) in (None, False):
        rule = schedules.Interval(rule.every_ms)
    zone, dst = keywords.get("timezone") or default_zone, keywords.get("dst")
    if "dst" in keywords and isinstance(rule, ClockRule):
        dst = dst or DEFAULT_POLICY
    is_moved = "timezone" in keywords and schedules.has_clock(rule)
    return schedules.parse(
        rule,
        timezone=schedules.zone_name(zone) if is_moved else None,
        default_timezone=zone,
        relative=bool(keywords.get("relative")),
        dst=dst,
    )


def source_of(app: Celery) -> str:
    """Return the name under which an app's code is known to its service."""
    return app.main or "__main__"
