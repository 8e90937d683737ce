"""Keeps the Redis commands that would publish a message, instead of sending them.

Everything up to the broker happens as always: routing, signals, serialization, compression,
priorities, declarations. Only the last step, the commands that put a message into its queues, waits
in `CapturingChannel.take`.

It rests on this in kombu's Redis transport: ``_put`` and ``_put_fanout`` are the only places that
write a message, and they take their client from ``conn_or_acquire``. Nothing of them is copied:
they run as they are, against a client that records. A command that the recorder does not know
raises AttributeError instead of being lost.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing_extensions import Self

#: A method of a Redis client and its arguments.
Command = tuple[str, tuple[Any, ...]]


class _Recorder:
    """Stands in for the Redis client, and its pipeline, inside ``_put``."""

    def __init__(self) -> None:
        self.commands: list[Command] = []

    def lpush(self, *args: Any) -> None:
        self.commands.append(("lpush", args))

    def pexpire(self, *args: Any) -> None:
        self.commands.append(("pexpire", args))

    def publish(self, *args: Any) -> None:
        self.commands.append(("publish", args))

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
