"""What runs in the worker: the task of a timer callback, which receives its timer first.

A callback is retried as its decorator says (``autoretry_for``, ``retry_backoff`` and so on), or as
its timer says, of which the message tells. Both are done here, since Celery's wrapper, around the
task, would retry by the decorator what the timer does not want to be retried.

A callback with ``run_once`` drops the second message of a run. There is one when an instance ends
between publishing a run and committing it: the next owner sends the run again, under the same task
id. The first message to start claims the run, in Redis, for a stated time:

- the message that holds the claim runs as often as the broker delivers it (its worker died, say),
  and so do the retries that its task asks for;
- any other message of the run is dropped;
- while Redis can not be reached every message runs: rather twice than never.
"""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cached_property, wraps
from typing import Any

from celery import Celery
from celery.exceptions import Ignore, Reject, Retry
from celery.utils.time import get_exponential_backoff_interval

from celery_dtimer.errors import DistributedTimerError, InvalidTimerError, invalid
from celery_dtimer.model import MAX_NAME_BYTES, to_ms
from celery_dtimer.options import RETRIES, RETRY_HEADER, exception_name
from celery_dtimer.stores import ProcessStores

logger = logging.getLogger(__name__)

_REMEMBERED = timedelta(days=1)  # with run_once=True
_LONGEST_REMEMBERED = timedelta(days=3650)
_LONGEST_BACKOFF = 600  # seconds, as Celery's
LONGEST_WAIT = 2.0  # seconds that one call to Redis may hold a task up

# The brokers, by kombu's driver_type, where a message keeps the tag it was published with.
_TAG_KEEPERS = ("redis", "memory", "filesystem", "sql")


@dataclass(frozen=True, slots=True)
class CallbackTimer:
    """The timer that a callback receives, as the message's ``dtimer`` header describes it."""

    id: str
    name: str
    service: str
    instance: str  #: the instance that sent the run
    scheduled_at: datetime  #: the moment the run was due, aware
    run: int  #: counts the timer's runs from 1
    shard_index: int = 0  #: which of the run's messages this is, from 0
    shard_total: int = 1  #: how many messages the run has
    resent: int = 0  #: how often the run was lost before, and sent again

    @classmethod
    def from_header(cls, header: Mapping[str, Any]) -> CallbackTimer:
        """Return the timer of a message's ``dtimer`` header.

        Raises:
            InvalidTimerError: it is not one that an instance has written.
        """
        return cls(
            id=_text(header, "id", _ID),
            name=_text(header, "name", _ANY),
            service=_text(header, "service", _ANY),
            instance=_text(header, "instance", _ANY),
            scheduled_at=_moment(_text(header, "scheduled_at", _ANY)),
            run=_count(header, "run", 1),
            shard_index=_count(header, "shard_index", 0),
            shard_total=_count(header, "shard_total", 1),
            resent=_count(header, "resent", 0),
        )


# An id becomes part of keys, and of texts with blanks in between.
_ID = re.compile(r"[!-~]{1,100}")
_ANY = re.compile(rf".{{0,{MAX_NAME_BYTES}}}", re.DOTALL)
_MOST = 2**53  # that a script can count


def _text(header: Mapping[str, Any], field: str, form: re.Pattern[str]) -> str:
    value = header.get(field) if isinstance(header, Mapping) else None
    if not isinstance(value, str) or not form.fullmatch(value):
        raise invalid(f"dtimer[{field!r}]", value, "the header of a message that a timer has sent")
    return value


def _count(header: Mapping[str, Any], field: str, default: int) -> int:
    value = header.get(field, default)
    if type(value) is not int or not 0 <= value <= _MOST:
        raise invalid(f"dtimer[{field!r}]", value, f"a whole number from 0 to {_MOST}")
    return value


def _moment(text: str) -> datetime:
    try:
        moment = datetime.fromisoformat(text)
        is_right = moment.utcoffset() is not None and to_ms(moment) >= 0
    except (ValueError, OverflowError):
        is_right = False
    if not is_right:
        raise invalid("dtimer['scheduled_at']", text, "an ISO 8601 text with an offset, from 1970")
    return moment


def timer_of(request: Any) -> CallbackTimer | None:
    """Return the timer of a task request, None when no timer sent it, or its header is forged."""
    header = _header(request, "dtimer")
    return read_header(header) if header else None


def read_header(header: Any) -> CallbackTimer | None:
    """Return the timer of a message's ``dtimer`` header, None when that can not be read."""
    try:
        return CallbackTimer.from_header(header)
    except InvalidTimerError as exc:
        logger.warning("A message is taken for one that no timer has sent: %s", exc)
        return None


def _header(request: Any, name: str) -> Any:
    """Return a header of a message of ours: where a task runs eagerly, it is among the others."""
    others = getattr(request, "headers", None) or {}
    return getattr(request, name, None) or others.get(name)


def remembered_ms(run_once: object) -> int | None:
    """Return for how many ms ``run_once`` has a run remembered, None when it is off.

    Raises:
        InvalidTimerError: it is neither a bool nor a usable time.
    """
    if run_once is None or run_once is False:
        return None
    time = _REMEMBERED if run_once is True else run_once
    seconds = time.total_seconds() if isinstance(time, timedelta) else time
    longest = _LONGEST_REMEMBERED.total_seconds()
    if not isinstance(seconds, (int, float)) or not 0.001 <= seconds <= longest:
        accepted = "True, or seconds or a timedelta from 1 ms to 3650 days"
        raise invalid("run_once", run_once, accepted)
    return round(seconds * 1000)


class RunClaims:
    """Lets one message of each run through: the first that starts."""

    def __init__(self, app: Celery) -> None:
        """Prepare for an app's workers; nothing is contacted before a run is claimed."""
        self._app = app
        self._stores = ProcessStores(app, longest_wait=LONGEST_WAIT)
        self._is_down = False

    def claim(self, request: Any, timer: CallbackTimer, keep_ms: int) -> None:
        """Claim a run for the message that is about to run, unless it is the task's own retry.

        Raises:
            Ignore: another message of the run has started before. Celery then acknowledges this
                one and stores nothing: what is stored under the task id is the first one's.
        """
        if request.is_eager or request.retries:
            return
        token = self._token(request, timer)
        try:
            shards = self._stores.of(timer.service)
            holder = shards.claim_run(request.id, token, keep_ms, timer.id)
        except DistributedTimerError as exc:
            self._warn(exc)
            return
        self._is_down = False
        if holder is not None and not self._is_same(holder, token, request):
            logger.info(
                "Run %s of timer %s (%s) was started from another message; this one is dropped",
                *(request.id, timer.id, timer.name),
            )
            raise Ignore(f"run {request.id} was started from another message")

    def _token(self, request: Any, timer: CallbackTimer) -> str:
        """Return what tells the message from another of its run: its tag, else who sent it.

        Where a tag is new with each delivery, a message that is delivered again because its worker
        died would be taken for a duplicate of itself.
        """
        tag = (request.properties or {}).get("delivery_tag")
        return str(tag) if tag and self._driver in _TAG_KEEPERS else timer.instance

    def _is_same(self, holder: str, token: str, request: Any) -> bool:
        """Say whether the message that holds the claim is, or may be, this one."""
        if holder != token:
            return False
        # RabbitMQ tells whether it may have delivered a message before.
        return self._driver != "amqp" or bool((request.delivery_info or {}).get("redelivered"))

    @cached_property
    def _driver(self) -> str:
        with self._app.connection_for_read() as connection:  # contacts nobody
            return str(connection.transport.driver_type)

    def _warn(self, exc: Exception) -> None:
        """Log the first failure of an outage."""
        if not self._is_down:
            logger.warning(
                "Runs can not be claimed; until they can, duplicates run too, run_once or not: %s",
                exc,
            )
        self._is_down = True


_POSITIONAL = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
    inspect.Parameter.VAR_POSITIONAL,
)


_ADMITTED = "dtimer_admitted"
REVOKED_MARK = "dtimer_revoked"  #: the attribute of requests whose runs were revoked for later ones


def _map_of(task: Any) -> Any:
    """Return the request of the map in a worker that is calling a task, None when none is."""
    outer = task.app.current_worker_task
    if outer is None or outer.name not in ("celery.map", "celery.starmap"):
        return None
    mapped = (outer.request.kwargs or {}).get("task") or {}
    return outer.request if mapped.get("task") == task.name else None


def take_retries(options: dict[str, Any]) -> dict[str, Any]:
    """Take from the options of a Celery task how it is retried by itself, and return that."""
    base = options.get("base")
    found: dict[str, Any] = {}
    for name in (*RETRIES, "retry_kwargs"):
        if name != "max_retries" and (name in options or hasattr(base, name)):
            found[name] = options.get(name, getattr(base, name, None))
    if not found.get("autoretry_for"):
        return {}
    options["autoretry_for"] = ()  # Celery leaves it to the callback
    for name in ("autoretry_for", "dont_autoretry_for"):
        found[name] = [exception_name(kind) for kind in found.get(name) or ()]
    return found


def _retries_of(request: Any, own: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return how a run is retried: as its timer says, and for the rest as its callback does."""
    policy = _header(request, RETRY_HEADER)
    return {**own, **policy} if isinstance(policy, Mapping) else own


def _is_retried(exc: Exception, policy: Mapping[str, Any]) -> bool:
    names = {exception_name(kind) for kind in type(exc).__mro__}
    wanted = policy.get("autoretry_for") or ["builtins.Exception"]
    return names.isdisjoint(policy.get("dont_autoretry_for") or ()) and not names.isdisjoint(wanted)


def _retry_arguments(policy: Mapping[str, Any], retries: int) -> dict[str, Any]:
    """Return what ``Task.retry`` takes, as Celery's ``autoretry_for`` works it out."""
    arguments: dict[str, Any] = {**(policy.get("retry_kwargs") or {})}
    if policy.get("retry_backoff"):
        arguments["countdown"] = get_exponential_backoff_interval(
            factor=int(max(1.0, float(policy["retry_backoff"]))),
            retries=retries,
            maximum=int(policy.get("retry_backoff_max", _LONGEST_BACKOFF)),
            full_jitter=policy.get("retry_jitter", True),
        )
    if policy.get("max_retries") is not None:
        arguments["max_retries"] = policy["max_retries"]
    return arguments


def callback_body(
    function: Callable[..., Any],
    admit: Callable[[Any, CallbackTimer], None] | None = None,
    retries: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Return the body of a bound Celery task that calls the function with its timer first.

    Called as a plain function (in a test, say) the task passes its arguments on unchanged; sent by
    other means than a timer, it passes None for the timer. Mapped over items, it has the timer of
    the map for each of them, and a run is claimed once for all.

    Args:
        function: the user's.
        admit: called with the task's request and its timer before each run that a timer sent; the
            function is not called if it raises.
        retries: how the callback is retried by itself, from `take_retries`.

    Raises:
        InvalidTimerError: the function takes no positional argument for its timer.
    """
    signature = inspect.signature(function)
    parameters = list(signature.parameters.values())
    if not parameters or parameters[0].kind not in _POSITIONAL:
        raise invalid("callback", function, "a function whose first argument is its timer")

    first, *others = parameters
    own = retries or {}

    @wraps(function)
    def run(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        request = _map_of(self) if self.request.called_directly else self.request
        if request is None:
            return function(*args, **kwargs)
        timer = timer_of(request)
        if getattr(request, REVOKED_MARK, None) is True:
            raise Ignore("it was revoked for a later run of its timer")
        is_new = getattr(request, _ADMITTED, None) is not True
        if admit is not None and timer is not None and is_new:
            admit(request, timer)
            setattr(request, _ADMITTED, True)
        policy = _retries_of(request, own)
        if not policy or self.request.called_directly:  # by a map: that is no callback
            return function(timer, *args, **kwargs)
        try:
            return function(timer, *args, **kwargs)
        except (Ignore, Reject, Retry):
            raise
        except Exception as exc:
            if not _is_retried(exc, policy):
                raise
            raise self.retry(exc=exc, **_retry_arguments(policy, self.request.retries)) from exc

    task = inspect.Parameter("_celery_task", inspect.Parameter.POSITIONAL_ONLY)
    if first.kind is inspect.Parameter.VAR_POSITIONAL:
        others = [first, *others]
    # Celery checks the arguments of apply_async against this: everything but the timer.
    run.__signature__ = signature.replace(parameters=[task, *others])  # type: ignore[attr-defined]
    return run
