"""The messages of durable countdowns: kept as Celery has built them, and published when due.

What is kept is small: of headers and properties what differs from Celery's usual ones, and of the
body what the call gave. A body in plain JSON is kept as its arguments, which can be read and
searched; any other is kept as it is, and nothing here ever decodes it. Names that nearly every
message has are a letter: ``h`` for headers, ``p`` for properties, ``q`` for the queues to declare,
``no_h`` and ``no_p`` for usual ones that it lacks.

Nothing is promised to be added, dropped or changed: a message that was kept and published is the
one that Celery would have sent by the same call without ``eta`` and ``countdown``, its headers in
another order perhaps. Only the time to live of a message that expires is counted anew.
"""

from __future__ import annotations

import base64
import contextlib
import json
import logging
from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta
from functools import cached_property
from typing import Any

from celery import Celery
from celery.app.task import Context
from celery.utils.time import maybe_iso8601, maybe_make_aware
from kombu import Queue
from kombu.compression import compress
from kombu.serialization import dumps as serialize
from kombu.utils import json as kombu_json

from celery_dtimer.errors import InvalidTimerError, shown
from celery_dtimer.model import ONCE, Definition, check_size, to_datetime, to_ms

logger = logging.getLogger(__name__)

_JSON = ("application/json", "utf-8")
_EMBED = {"callbacks": None, "errbacks": None, "chain": None, "chord": None}
_TYPED = '"__type__"'  # marks a value that kombu's JSON turns into an object
_PERSISTENT = 2
_NOT_KEPT = frozenset(  # of what Celery gives to `publish`: it is about the call, or kept elsewhere
    "exchange routing_key serializer compression retry retry_policy delivery_mode declare headers "
    "timeout confirm_timeout".split()
)


def moment_of(app: Celery, eta: Any) -> datetime:
    """Return the moment that a worker takes an ``eta`` or ``expires`` for.

    As in a message, the text of a naive datetime goes by the app's time zone, UTC without one.

    Raises:
        ValueError, TypeError, AttributeError: it is neither a datetime nor the text of one.
    """
    text = eta if isinstance(eta, str) else eta.isoformat()
    moment = maybe_iso8601(text)
    if moment is None:
        raise ValueError("an empty text is no moment")
    aware: datetime = maybe_make_aware(moment, app.conf.timezone)
    return aware


def to_ms_up(moment: datetime) -> int:
    """Return an aware datetime in ms, rounded up: nothing is early."""
    return to_ms(moment + timedelta(microseconds=999))


# ------------------------------------------------------------------ keeping


def keep(task_id: str, task: str, body: Any, how: Mapping[str, Any]) -> Definition:
    """Return what is stored of a message that Celery is about to publish.

    Args:
        task_id: of the message.
        task: the name of its task.
        body: as Celery's sender gives it to ``Producer.publish``.
        how: the keywords that it gives with it.

    Raises:
        kombu.exceptions.EncodeError: the body can not be serialized.
        LookupError: the serializer or the compression is not known.
        InvalidTimerError: its headers or properties can not be stored.
    """
    payload: str | bytes
    content_type, encoding, payload = serialize(body, serializer=how["serializer"])
    headers = {**how["headers"]}
    if how["compression"]:
        payload, headers["compression"] = compress(payload, how["compression"])
    if (content_type, encoding) == _JSON and isinstance(payload, str):
        kept = _readable(payload)
    else:
        kept = _opaque(payload, content_type, encoding, body)
    usual: dict[str, Any] = {}
    if "id" in headers:
        headers["eta"] = None
        usual = _usual_headers(task_id, task, kept)
    else:
        kept["protocol"] = 1
    kept |= _differences("h", headers, usual)
    properties = {name: value for name, value in how.items() if name not in _NOT_KEPT}
    kept |= _differences("p", properties, {"correlation_id": task_id})
    kept |= _destination(how)
    definition = Definition(task_id, task, ONCE, message=kept)
    try:
        definition.blob  # noqa: B018 - what can not be stored shows here
    except Exception as exc:  # kombu's JSON raises whatever an object in it does
        raise InvalidTimerError(
            f"the headers {shown(headers)} or properties {shown(properties)} of task {task} can "
            f"not be stored ({exc}); expected what Celery's JSON carries"
        ) from exc
    return check_size(definition)


def _readable(text: str) -> dict[str, Any]:
    """Return what is kept of a body in JSON."""
    if _TYPED in text:  # what it stands for is known where the task is
        return {"text": text}
    content = json.loads(text)
    if not isinstance(content, list):  # of task protocol 1
        return {"text": text}
    args, kwargs, embed = content
    kept: dict[str, Any] = {}
    if args:
        kept["args"] = args
    if kwargs:
        kept["kwargs"] = kwargs
    if embed != _EMBED:
        kept["embed"] = embed
    return kept


def _opaque(payload: Any, content_type: str, encoding: str, body: Any) -> dict[str, Any]:
    """Return what is kept of a body of which nothing else is known here, but for its chord."""
    data = payload.encode(encoding) if isinstance(payload, str) else payload
    kept = {"data": base64.b64encode(data).decode(), "type": content_type, "encoding": encoding}
    chord = body[2]["chord"] if isinstance(body, tuple) else body.get("chord")
    if chord:
        with contextlib.suppress(Exception):  # then only a worker tells the chord of a revoked part
            kept["chord"] = kombu_json.dumps(chord)
    return kept


def _usual_headers(task_id: str, task: str, kept: Mapping[str, Any]) -> dict[str, Any]:
    """Return the headers that most messages have: they are not stored.

    What is stored is read by beats with another Celery too, so they must never change.
    """
    return {
        "lang": "py",
        "task": task,
        "id": task_id,
        "shadow": None,
        "eta": None,
        "expires": None,
        "group": None,
        "group_index": None,
        "retries": 0,
        "timelimit": [None, None],
        "root_id": task_id,
        "parent_id": None,
        "argsrepr": repr(tuple(kept.get("args", ()))),
        "kwargsrepr": repr(kept.get("kwargs", {})),
        "ignore_result": False,
        "replaced_task_nesting": 0,
        "stamped_headers": None,
        "stamps": {},
    }


def _differences(
    what: str, values: Mapping[str, Any], usual: Mapping[str, Any]
) -> dict[str, dict[str, Any] | list[str]]:
    """Return which values differ from the usual ones, and which of those are not there."""
    missing = object()
    other = {
        name: value
        for name, value in values.items()
        if (known := usual.get(name, missing)) != value or type(known) is not type(value)
    }
    found: dict[str, dict[str, Any] | list[str]] = {what: other} if other else {}
    absent = [name for name in usual if name not in values]
    if absent:
        found[f"no_{what}"] = absent
    return found


def _restored(what: str, kept: Mapping[str, Any], usual: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `_differences` was made of."""
    absent = kept.get(f"no_{what}", ())
    return {
        **{name: value for name, value in usual.items() if name not in absent},
        **kept.get(what, {}),
    }


def _destination(how: Mapping[str, Any]) -> dict[str, Any]:
    """Return where a message goes, without what follows from its queue."""
    exchange, routing_key = how["exchange"], how["routing_key"]
    mode = how["delivery_mode"] or getattr(exchange, "delivery_mode", None)
    exchange = getattr(exchange, "name", exchange) or ""
    queues = [queue.name for queue in how["declare"] or () if isinstance(queue, Queue)]
    kept: dict[str, Any] = {}
    if queues:
        kept["q"] = queues
    if exchange:
        kept["exchange"] = exchange
    if exchange or queues != [routing_key]:
        kept["routing_key"] = routing_key
    if mode != _PERSISTENT:
        kept["delivery_mode"] = mode
    return kept


# ------------------------------------------------------------------ publishing


def priority_of(message: Mapping[str, Any]) -> int:
    """Return the priority of a message that was kept, 0 when it has none."""
    properties = message.get("p")
    priority = properties.get("priority") if isinstance(properties, Mapping) else None
    return priority if isinstance(priority, int) else 0


# What is stored of a message, and how.
_PARTS: dict[str, type] = {
    **dict.fromkeys(("args", "q", "no_h", "no_p"), list),
    **dict.fromkeys(("kwargs", "embed", "h", "p"), dict),
    **dict.fromkeys(("data", "text", "type", "encoding", "chord", "exchange"), str),
}


class KeptMessage:
    """A message that was kept."""

    def __init__(self, definition: Definition) -> None:
        """Read the message of a durable countdown.

        Raises:
            InvalidTimerError: what is stored is not what `keep` makes.
        """
        kept = self._kept = definition.message or {}
        self.task_id, self.task = definition.name, definition.task
        for name, kind in _PARTS.items():
            if name in kept and not isinstance(kept[name], kind):
                raise InvalidTimerError(
                    f"the stored message can not be read: its {name} is {shown(kept[name])}, "
                    f"not a {kind.__name__}"
                )
        try:
            usual = {} if "protocol" in kept else _usual_headers(self.task_id, self.task, kept)
            self.headers: dict[str, Any] = _restored("h", kept, usual)
            self.properties: dict[str, Any] = _restored("p", kept, {"correlation_id": self.task_id})
            self.queues: list[str] = [str(name) for name in kept.get("q", ())]
            self.exchange = str(kept.get("exchange", ""))
            self.routing_key: Any = kept.get("routing_key", self.queues[0] if self.queues else "")
            self._body = self._read_body()
        except (TypeError, ValueError, AttributeError, KeyError) as exc:
            raise InvalidTimerError(f"the stored message can not be read: {exc!r}") from exc

    def _read_body(self) -> tuple[str | bytes, str, str]:
        """Return the payload, its content type and its encoding."""
        kept = self._kept
        if "data" in kept:
            data = base64.b64decode(kept["data"], validate=True)
            return data, str(kept["type"]), str(kept["encoding"])
        if "text" in kept:
            return str(kept["text"]), *_JSON
        args, kwargs, embed = (
            kept.get("args", []),
            kept.get("kwargs", {}),
            kept.get("embed", _EMBED),
        )
        return json.dumps([args, kwargs, embed]), *_JSON

    @property
    def queue(self) -> str:
        """The name of the queue that it goes to; its routing key where none was named."""
        return self.queues[0] if self.queues else str(self.routing_key or "")

    @cached_property
    def content(self) -> dict[str, Any] | None:
        """Its ``args`` and ``kwargs``, and what a request has beside them; None when it is opaque.

        Only JSON is ever decoded here.
        """
        kept = self._kept
        if "data" in kept:
            return None
        if "text" not in kept:
            args, kwargs = kept.get("args", []), kept.get("kwargs", {})
            return {"args": args, "kwargs": kwargs, **kept.get("embed", {})}
        try:
            content = kombu_json.loads(kept["text"])
            args, kwargs, embed = (
                content
                if isinstance(content, list)
                else (content["args"], content["kwargs"], content)
            )
            return {**embed, "args": list(args), "kwargs": dict(kwargs)}
        except Exception as exc:  # a typed value raises whatever its constructor does
            kind = type(exc).__name__  # the text may repeat the arguments
            logger.debug("The arguments of task %s can not be read: %s", self.task_id, kind)
            return None

    @property
    def request(self) -> Context:
        """The request that a worker would have of it, as far as result backends look at it."""
        content = self.content
        if content is None:
            content = {"chord": self._chord}
        found: Context = Context(
            {
                "id": self.task_id,
                **self.headers,
                **content,
                "reply_to": self.properties.get("reply_to"),
                "correlation_id": self.properties.get("correlation_id"),
                "delivery_info": {"exchange": self.exchange, "routing_key": self.routing_key},
            }
        )
        return found

    @property
    def _chord(self) -> Any:
        """The chord that it is part of, if its body can not tell; None when it is part of none."""
        try:
            return kombu_json.loads(self._kept.get("chord") or "null")
        except Exception as exc:  # a typed value raises whatever its constructor does
            kind = type(exc).__name__
            logger.debug("The chord of task %s can not be read: %s", self.task_id, kind)
            return None

    def publish(self, app: Celery, producer: Any, moment_ms: int, *, declares: bool = True) -> None:
        """Publish it, as it was kept.

        Args:
            app: whose queues are declared.
            producer: publishes it.
            moment_ms: when it is due: from then on its time to live counts. It may live too long
                for that if it is late, never too short; its worker looks at ``expires`` itself.
            declares: whether its queues are declared before.
        """
        payload, content_type, encoding = self._body
        properties = {**self.properties}
        if "expiration" in properties and self.headers.get("expires"):
            left = self._seconds_left(app, moment_ms)
            if left > 0:
                properties["expiration"] = left
            else:
                del properties["expiration"]  # its worker says that it has expired
        producer.publish(
            payload,
            content_type=content_type,
            content_encoding=encoding,
            headers={**self.headers},
            exchange=self.exchange,
            routing_key=self.routing_key,
            delivery_mode=self._kept.get("delivery_mode", _PERSISTENT),
            declare=list(self._known_queues(app)) if declares else [],
            retry=False,
            **properties,
        )

    def _seconds_left(self, app: Celery, moment_ms: int) -> float:
        try:
            expires = moment_of(app, self.headers["expires"])
        except (ValueError, TypeError, AttributeError):  # its worker says so
            return 0.0
        return (expires - to_datetime(moment_ms)).total_seconds()

    def _known_queues(self, app: Celery) -> Iterator[Queue]:
        """Yield the queues to declare: how another process has described its own is not known."""
        queues: Any = app.amqp.queues
        for name in self.queues:
            if name in queues or (queues.create_missing and not self.exchange):
                yield queues[name]
