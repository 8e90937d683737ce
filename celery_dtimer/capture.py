"""Keeps what would publish a message, instead of sending it.

Everything up to the broker happens as always: routing, signals, serialization, compression,
priorities, declarations. Only the last step waits: on Redis the commands that put a message into
its queues, in `CapturingChannel.take`; on every broker Celery's ``after_task_publish`` and its
``task-sent`` event, which are to follow a message that has arrived.

It rests on this in kombu's Redis transport: ``_put`` and ``_put_fanout`` are the only places that
write a message, and they take their client from ``conn_or_acquire``. Nothing of them is copied:
they run as they are, against a client that records. A command that the recorder does not know
raises AttributeError instead of being lost.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from celery import Celery, signals
from kombu import Producer

from celery_dtimer.timelimits import limited

if TYPE_CHECKING:
    from typing_extensions import Self

#: A command of Redis with its key, as it is without ``global_keyprefix``, and its value.
Command = tuple[str, str, Any]


class _Recorder:
    """Stands in for the Redis client, and its pipeline, inside ``_put``."""

    def __init__(self) -> None:
        self.commands: list[Command] = []

    def lpush(self, key: str, message: Any) -> None:
        self.commands.append(("LPUSH", key, message))

    def pexpire(self, key: str, milliseconds: int) -> None:
        self.commands.append(("PEXPIRE", key, milliseconds))

    def publish(self, topic: str, message: Any) -> None:
        self.commands.append(("PUBLISH", topic, message))

    def pipeline(self, *_: Any, **__: Any) -> _Recorder:
        return self

    def execute(self) -> list[Any]:
        return []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None


class CapturingChannel:
    """Mixed into the transport's own channel class by `capture`."""

    #: Counts the connections that this channel's clients have opened.
    connects = 0
    _recorder: _Recorder | None = None
    _depth = 0

    def take(self) -> list[Command]:
        """Return the commands kept since the last call."""
        recorder, self._recorder = self._recorder, None
        return recorder.commands if recorder else []

    def _put(self, *args: Any, **kwargs: Any) -> None:
        with self._keeping():
            super()._put(*args, **kwargs)  # type: ignore[misc]

    def _put_fanout(self, *args: Any, **kwargs: Any) -> None:
        with self._keeping():
            super()._put_fanout(*args, **kwargs)  # type: ignore[misc]

    @contextlib.contextmanager
    def conn_or_acquire(self, client: Any = None) -> Iterator[Any]:
        """Answer the recorder while a message is put, and the real client otherwise."""
        if self._depth:
            self._recorder = self._recorder or _Recorder()
            yield self._recorder
        else:
            with super().conn_or_acquire(client) as real:  # type: ignore[misc]
                yield real

    @contextlib.contextmanager
    def _keeping(self) -> Iterator[None]:
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    def _connparams(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        params: dict[str, Any] = super()._connparams(*args, **kwargs)  # type: ignore[misc]
        kind = limited(params["connection_class"])
        params["connection_class"] = type("Counted", (_Counted, kind), {"_channel": self})
        return params


class _Counted:
    """Mixed into redis-py's connection class, whose versions call one method or the other."""

    _channel: CapturingChannel

    def on_connect(self, *args: Any, **kwargs: Any) -> None:
        self._channel.connects += 1
        super().on_connect(*args, **kwargs)  # type: ignore[misc]

    def on_connect_check_health(self, *args: Any, **kwargs: Any) -> None:
        self._channel.connects += 1
        super().on_connect_check_health(*args, **kwargs)  # type: ignore[misc]


def capture(transport: Any) -> bool:
    """Make a transport open capturing channels; say whether that is possible with it."""
    try:
        from kombu.transport.redis import Channel
    except ImportError:
        return False
    channel = getattr(transport, "Channel", None)  # amqp's has none
    if not (isinstance(channel, type) and issubclass(channel, Channel)):
        return False
    transport.Channel = type("CapturingChannel", (CapturingChannel, channel), {})
    return True


# ------------------------------------------------------------------ signals


@dataclass(frozen=True, slots=True)
class Published:
    """What Celery's signals say of a message that was published."""

    task: str  #: its name, as it was sent
    body: Any
    headers: Mapping[str, Any]
    exchange: Any
    routing_key: str

    def announce(self) -> None:
        """Send the signals that follow a publish."""
        signals.after_task_publish.send(
            sender=self.task,
            body=self.body,
            headers=self.headers,
            exchange=self.exchange,
            routing_key=self.routing_key,
        )
        args, kwargs, *_ = self.body
        signals.task_sent.send(  # as Celery itself still does
            sender=self.task,
            task_id=self.headers["id"],
            task=self.task,
            args=args,
            kwargs=kwargs,
            eta=self.headers["eta"],
            taskset=self.headers["group"],
        )

    def event(self, queue: str | None) -> dict[str, Any]:
        """Return the fields of its ``task-sent`` event."""
        headers = self.headers
        return {
            "uuid": headers["id"],
            "root_id": headers["root_id"],
            "parent_id": headers["parent_id"],
            "name": headers["task"],
            "args": headers["argsrepr"],
            "kwargs": headers["kwargsrepr"],
            "retries": headers["retries"],
            "eta": headers["eta"],
            "expires": headers["expires"],
            "queue": queue,
            "exchange": getattr(self.exchange, "name", self.exchange),
            "routing_key": self.routing_key,
        }


def has_receivers() -> bool:
    """Say whether anybody listens to the signals that follow a publish."""
    return bool(signals.after_task_publish.receivers or signals.task_sent.receivers)


class Stopped(BaseException):
    """Ends Celery's sender after the message, before the signals that follow it.

    It is no error, and nothing that catches errors may take it.
    """

    def __init__(self, published: Published) -> None:
        super().__init__()
        self.published = published


class _StoppingProducer(Producer):
    """Mixed into the app's producer class by `stopping_producer`."""

    #: It sends what is due: what is sent with it waits for no countdown of its own.
    sends_now = True
    stops = False
    last: tuple[Any, dict[str, Any]] | None = None  #: what was published last, and how

    def publish(self, body: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """Publish; with ``stops`` set, raise `Stopped` afterwards."""
        result = super().publish(body, **kwargs)
        self.last = body, kwargs
        if self.stops:
            self.stops = False
            raise Stopped(
                Published(
                    kwargs["headers"]["task"],
                    *(body, kwargs["headers"], kwargs["exchange"], kwargs["routing_key"]),
                )
            )
        return result


def stopping_producer(app: Celery, connection: Any) -> Any:
    """Return the app's producer on a connection, which stops when its ``stops`` is set."""
    producer: Any = app.amqp.Producer
    kind = type("StoppingProducer", (_StoppingProducer, producer), {})
    return kind(connection, auto_declare=False)
