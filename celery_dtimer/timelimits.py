"""A time limit for a whole call to Redis.

redis-py's ``socket_timeout`` counts anew with everything that arrives: a server, or a network, that
delivers an answer a few bytes at a time makes a call last as long as it likes. Here it counts from
the moment at which the answer is waited for, once for all of it; several commands that are sent
together are one call. A new connection costs a few calls: to connect, and to greet the server.

What it does not bound: the look-up of a host's name, which is the system's.
"""

from __future__ import annotations

import time
from typing import Any

_LAST_LOOK = 0.001  # seconds in which what has arrived already is read, when the time is over


class LimitedSocket:
    """A connected socket whose own timeout bounds the whole answer to what was sent."""

    def __init__(self, connected: Any) -> None:
        """Take a socket over, with the timeout that it has now."""
        self._socket = connected
        self._limit: float | None = connected.gettimeout()
        self._is_own = self._limit is not None  # False while redis-py waits in its own way
        self._until: float | None = None

    def __getattr__(self, name: str) -> Any:
        """Return what the socket itself has."""
        return getattr(self._socket, name)

    def settimeout(self, seconds: float | None) -> None:
        """Wait otherwise, until the socket's own timeout is set again."""
        self._is_own = seconds is not None and seconds == self._limit
        self._socket.settimeout(seconds)

    def sendall(self, content: Any) -> None:
        """Send; what is received next is the answer."""
        self._until = None
        self._socket.sendall(content)

    def recv(self, *arguments: Any) -> Any:
        """Receive a part of an answer."""
        return self._received(self._socket.recv, arguments)

    def recv_into(self, *arguments: Any) -> Any:
        """Receive a part of an answer into a buffer."""
        return self._received(self._socket.recv_into, arguments)

    def _received(self, receive: Any, arguments: Any) -> Any:
        if not self._is_own or self._limit is None:
            return receive(*arguments)
        if self._until is None:  # as for most answers, which come in one piece
            self._until = time.monotonic() + self._limit
            return receive(*arguments)
        self._socket.settimeout(max(self._until - time.monotonic(), _LAST_LOOK))
        try:
            return receive(*arguments)
        finally:
            self._socket.settimeout(self._limit)


class _LimitedConnection:
    """Mixed into redis-py's connection classes."""

    def _connect(self) -> LimitedSocket:
        return LimitedSocket(super()._connect())  # type: ignore[misc]


def limited(connection_class: type) -> type:
    """Return a connection class of redis-py whose ``socket_timeout`` bounds whole calls."""
    if issubclass(connection_class, _LimitedConnection):
        return connection_class
    return type(connection_class.__name__, (_LimitedConnection, connection_class), {})
