"""The proxy does to connections what the tests of networks rely on."""

from __future__ import annotations

import socket
import socketserver
import threading
from collections.abc import Iterator

import pytest

from tests.tcp_proxy import TcpProxy
from tests.waiting import wait_until

_PROMPT = 0.2  # seconds in which an answer comes that comes


class _Echo(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        while data := self.request.recv(100):
            self.server.heard.append(data)  # type: ignore[attr-defined]
            self.request.sendall(data)


class Echo(socketserver.ThreadingTCPServer):
    """A server that answers what it is told."""

    daemon_threads = True
    heard: list[bytes]


@pytest.fixture
def echo() -> Iterator[Echo]:
    with Echo(("127.0.0.1", 0), _Echo) as server:
        server.heard = []
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def proxy(echo: Echo) -> Iterator[TcpProxy]:
    proxy = TcpProxy(echo.server_address[1])
    yield proxy
    proxy.close()


@pytest.fixture
def client(proxy: TcpProxy) -> Iterator[socket.socket]:
    with _connect(proxy) as client:
        assert _ask(client) == b"x", "it is connected to the server"
        yield client


def _connect(proxy: TcpProxy) -> socket.socket:
    return socket.create_connection(("127.0.0.1", proxy.port), timeout=5)


def _ask(client: socket.socket, text: bytes = b"x", timeout: float = 5) -> bytes | None:
    """Return the answer, None when there is none."""
    client.settimeout(timeout)
    client.sendall(text)
    try:
        return client.recv(100)
    except TimeoutError:
        return None


@pytest.mark.parametrize("way", ["requests", "replies"])
def test_deaf_in_one_way_holds_back_what_goes_that_way(
    proxy: TcpProxy, client: socket.socket, echo: Echo, way: str
) -> None:
    proxy.deaf = way
    assert _ask(client, b"y", _PROMPT) is None
    assert (b"y" in echo.heard) == (way == "replies")
    proxy.deaf = ""
    client.settimeout(5)
    assert client.recv(100) == b"y"


def test_a_severed_connection_stays_open_and_dead_and_a_new_one_works(
    proxy: TcpProxy, client: socket.socket, echo: Echo
) -> None:
    proxy.sever()
    wait_until(lambda: _ask(client, b"y", _PROMPT) is None, "it to be severed")
    heard = len(echo.heard)
    assert _ask(client, b"z", _PROMPT) is None
    assert len(echo.heard) == heard
    with _connect(proxy) as other:
        assert _ask(other) == b"x"
