"""A proxy between a client and a server that does to the connection what networks do."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from collections.abc import Iterator


class TcpProxy:
    """Forwards a local port to another; its attributes say what goes wrong on the way.

    Attributes:
        latency: seconds by which each chunk is late, in both directions.
        jitter: seconds of random delay on top.
        black_hole: while true, connections stay open and nothing arrives.
        refuse: while true, new connections are reset at once.
        forgotten: connections on which nothing arrives any more; others go on.
        deaf: while it is "requests" or "replies", what goes that way is held back.
        drop_replies: so many answers are not delivered: the request arrives, and the connection is
            reset in place of its answer.
        rate: bytes per second and direction, or None for no limit.
        trickle: seconds between two bytes of an answer, or None for no such pause.
        accepted: how many connections came.
    """

    def __init__(self, port: int, host: str = "127.0.0.1") -> None:
        self.upstream = (host, port)
        self.latency = self.jitter = 0.0
        self.black_hole = self.refuse = False
        self.deaf = ""
        self.drop_replies = 0
        self.rate: float | None = None
        self.trickle: float | None = None
        self.accepted = 0
        self._open: set[asyncio.StreamWriter] = set()
        self.forgotten: frozenset[asyncio.StreamWriter] = frozenset()
        self._severed: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._server = self._loop.run_until_complete(
            asyncio.start_server(self._serve, "127.0.0.1", 0)
        )
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """The local port to connect to."""
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    @property
    def url(self) -> str:
        """The address of a Redis server behind the proxy."""
        return f"redis://127.0.0.1:{self.port}/0"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        with contextlib.suppress(asyncio.CancelledError), _resetting(writer):  # by `close`
            if self.refuse:
                return
            with contextlib.suppress(OSError):
                far_reader, far_writer = await asyncio.open_connection(*self.upstream)
                with _resetting(far_writer):
                    await self._connect(reader, far_writer, far_reader, writer)

    async def _connect(
        self,
        reader: asyncio.StreamReader,
        far_writer: asyncio.StreamWriter,
        far_reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        pair = {writer, far_writer}
        self._open |= pair
        requests = asyncio.ensure_future(self._pump(reader, far_writer, replies=False))
        replies = asyncio.ensure_future(self._pump(far_reader, writer, replies=True))
        try:
            await asyncio.wait({requests, replies}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._open -= pair
            self._severed -= pair
            requests.cancel()
            replies.cancel()
            await asyncio.gather(requests, replies, return_exceptions=True)

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, replies: bool
    ) -> None:
        while chunk := await reader.read(65536):
            await self._hold(len(chunk), writer, "replies" if replies else "requests")
            if writer in self._severed:
                continue
            if replies and self.drop_replies > 0:
                self.drop_replies -= 1
                return
            for piece in self._pieces(chunk) if replies else [chunk]:
                writer.write(piece)
                await writer.drain()
                if replies and self.trickle is not None:
                    await asyncio.sleep(self.trickle)

    def _pieces(self, chunk: bytes) -> Iterator[bytes]:
        """Yield a chunk in one piece, or byte by byte from the moment at which it trickles."""
        for place in range(len(chunk)):
            if self.trickle is None:
                yield chunk[place:]
                return
            yield chunk[place : place + 1]

    async def _hold(self, size: int, writer: asyncio.StreamWriter, way: str) -> None:
        while self.black_hole or self.deaf == way or writer in self.forgotten:
            await asyncio.sleep(0.01)
        delay = self.latency + random.uniform(0, self.jitter)
        delay += size / self.rate if self.rate else 0.0
        if delay:
            await asyncio.sleep(delay)

    def forget(self) -> None:
        """Let nothing arrive on what is open now, as a firewall that has forgotten it."""
        self.forgotten = frozenset(self._open)

    def heal(self) -> None:
        """Let everything through again, but for what was forgotten."""
        self.latency = self.jitter = 0.0
        self.black_hole = self.refuse = False
        self.rate = self.trickle = None

    def cut(self) -> None:
        """Reset every open connection."""
        self._loop.call_soon_threadsafe(self._abort_all)

    def sever(self) -> None:
        """Let every open connection stay open, and nothing arrive on it any more; new ones work."""
        self._loop.call_soon_threadsafe(lambda: self._severed.update(self._open))

    def _abort_all(self) -> None:
        for writer in list(self._open):
            writer.transport.abort()

    def close(self) -> None:
        """Reset what is open, stop listening and end the thread."""
        asyncio.run_coroutine_threadsafe(self._shut_down(), self._loop).result(5)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)
        self._loop.close()

    async def _shut_down(self) -> None:
        self._server.close()
        self._abort_all()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)


@contextlib.contextmanager
def _resetting(writer: asyncio.StreamWriter) -> Iterator[None]:
    try:
        yield
    finally:
        writer.transport.abort()
