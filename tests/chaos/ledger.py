"""What reached the broker: every message is taken from its queue here, before a worker sees it.

The beats publish to one queue, ``INBOX``; a taker enters each message in the book, and hands it on
to ``WORK``, from which the workers consume. So nothing that a worker, or its death, does to a
message can hide it.

**On Redis** the messages are read, entered, and then removed and handed on in one transaction. That
also counts up a key, the *mark*: how many messages have ever been removed. A server that was
restarted with its data, or a replica that was promoted without the last writes, has a mark and a
list that belong together, so the taker knows which messages of the list it has entered before. A
server without the mark has lost its data. What was pushed after the last look and before such a
loss is unknown; the book says between which moments that was.

**On RabbitMQ** a message is entered, acknowledged, and handed on. One that is delivered again
because its acknowledgement got lost says so itself.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any, Protocol

import amqp
import redis
from kombu import Connection, Queue

from tests.ledger import SentRun, read_run

INBOX, WORK, MARK = "chaos.inbox", "chaos.work", "chaos.mark"

_AT_ONCE = 500  # messages
_REMEMBERED = 20_000  # messages that a promoted replica may show once more
_LOOK_EVERY = 0.004  # seconds
_HANDED_ON = 20  # messages between two looks at how many wait
_MOST_WORK = 400  # messages that wait for workers; beyond that they are entered and dropped
# Where kombu puts a message back that a worker has had and not done.
_TO_INBOX, _TO_WORK = (f'"routing_key": "{name}"'.encode() for name in (INBOX, WORK))
_UNREACHABLE = (redis.RedisError, OSError, amqp.AMQPError)


def now_ms() -> int:
    """Return the time; suite and servers are on one machine and have one clock."""
    return time.time_ns() // 1_000_000


@dataclass(frozen=True, slots=True)
class Call:
    """One message that no timer has sent: a durable countdown."""

    task_id: str
    seen_ms: int


@dataclass(frozen=True, slots=True)
class Gap:
    """Two moments between which messages may have come that nobody has seen."""

    from_ms: int
    until_ms: int
    why: str


@dataclass
class Book:
    """Everything that was seen, in the order in which it was."""

    runs: list[SentRun] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    gaps: list[Gap] = field(default_factory=list)
    handed_on: set[str] = field(default_factory=set)  #: task ids
    seen_again: int = 0  #: messages that a restored or promoted server showed once more
    strange: list[str] = field(default_factory=list)  #: messages that could not be read
    latest: dict[str, SentRun] = field(default_factory=dict)  #: the last run of each timer

    def enter(self, message: Mapping[str, Any], seen_ms: int) -> None:
        """Enter one message."""
        headers = message["headers"]
        if "dtimer" in headers:
            run = read_run(headers["dtimer"], headers["id"], seen_ms)
            self.runs.append(run)
            self.latest[run.name] = run
        else:
            self.calls.append(Call(headers["id"], seen_ms))

    def enter_texts(self, texts: Iterable[bytes | str], seen_ms: int) -> None:
        """Enter messages as Redis keeps them."""
        for text in texts:
            try:
                self.enter(json.loads(text), seen_ms)
            except (ValueError, LookupError, TypeError) as exc:
                self.strange.append(f"{exc!r}: {text[:200]!r}")


class Taker(Protocol):
    """Takes the messages of one broker into a book, from a thread of its own."""

    book: Book

    def waiting(self) -> int:
        """Return how many messages wait for workers, -1 when that can not be said."""

    def close(self) -> None:
        """Stop taking."""


class RedisTaker:
    """Takes from a list of Redis."""

    def __init__(self, connect: Callable[[], redis.Redis]) -> None:
        """Begin to take.

        Args:
            connect: returns a client of the server that is the broker now.
        """
        self.book = Book()
        self._connect = connect
        self._client: redis.Redis | None = None
        self._taken = 0  # messages that were removed, as the mark has it
        self._recent: deque[bytes] = deque(maxlen=_REMEMBERED)  # the last ones that were entered
        self._entered = 0
        self._last_look_ms = now_ms()
        self._looking = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="taker", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                with self._looking:
                    has_taken = self._look()
            except _UNREACHABLE:  # what the faults are about; the mark says what was done
                self._client, has_taken = None, False
            self._stop.wait(0.0 if has_taken else _LOOK_EVERY)

    def _look(self) -> bool:
        client = self._client = self._client or self._connect()
        with client.pipeline(transaction=True) as pipe:
            # A transaction whose answer was lost may still be on its way to a frozen server.
            pipe.watch(MARK)
            mark, texts = pipe.get(MARK), pipe.lrange(INBOX, -_AT_ONCE, -1)
            self._take(pipe, mark, texts[::-1], is_busy=pipe.llen(WORK) >= _MOST_WORK)
        self._last_look_ms = now_ms()
        return bool(texts)

    def _take(self, pipe: Any, mark: bytes | None, texts: list[bytes], *, is_busy: bool) -> None:
        """Enter what is new of the oldest messages, and hand them on."""
        self._compare(mark)
        known = self._known(texts)
        self.book.seen_again += known
        new = texts[known:]
        self.book.enter_texts(new, now_ms())
        self._recent.extend(new)
        self._entered += len(new)
        if not texts and mark is not None:
            return
        pipe.multi()
        if texts:
            pipe.ltrim(INBOX, 0, -len(texts) - 1)
        pipe.set(MARK, self._taken + len(texts))
        if texts and not is_busy:
            self.book.handed_on.update(json.loads(text)["headers"]["id"] for text in texts)
            pipe.lpush(WORK, *[text.replace(_TO_INBOX, _TO_WORK) for text in texts])
        pipe.execute()
        self._taken += len(texts)

    def _compare(self, mark: bytes | None) -> None:
        """Find out from the mark what the server remembers of what was removed."""
        if mark is None and self._taken:
            self.note_loss("the broker's Redis has lost its data")
        elif mark is not None:
            self._taken = int(mark)

    def note_loss(self, why: str) -> None:
        """Note that the server has begun anew: what it had since the last look is unknown."""
        self.book.gaps.append(Gap(self._last_look_ms, now_ms(), why))
        self._taken = self._entered = 0
        self._recent.clear()

    def _known(self, texts: list[bytes]) -> int:
        """Return how many of the oldest messages were entered before: the mark lags behind."""
        behind = self._entered - self._taken
        if behind <= 0:
            self._entered = self._taken
            return 0
        entered_before = list(self._recent)[-behind:]
        known = 0
        for text, before in zip(texts, entered_before, strict=False):
            if text != before:
                break
            known += 1
        if known < min(len(texts), behind):  # history went another way from here on
            self._entered = self._taken + known
            self._recent.clear()
            self._recent.extend(entered_before[:known])
        return known

    def empty(self, flush: Callable[[Any], Any]) -> list[Any]:
        """Take all that waits and empty the server in one transaction, so that nothing is unknown.

        Args:
            flush: adds the commands that follow the reading to a pipeline.

        Returns:
            The answers to those commands.
        """
        with self._looking:
            client = self._connect()
            with client.pipeline(transaction=True) as pipe:
                pipe.get(MARK).lrange(INBOX, 0, -1)
                flush(pipe)
                mark, texts, *answers = pipe.execute()
            texts.reverse()
            self._compare(mark)
            self.book.enter_texts(texts[self._known(texts) :], now_ms())
            self._taken = self._entered = 0
            self._recent.clear()
            self._last_look_ms = now_ms()
            client.close()
            return answers

    def waiting(self) -> int:
        """Return how many messages wait for workers, -1 when that can not be said."""
        try:
            with self._connect() as client:
                return int(client.llen(WORK))
        except _UNREACHABLE:
            return -1

    def close(self) -> None:
        """Stop taking."""
        self._stop.set()
        self._thread.join(10)


class RabbitTaker:
    """Takes from a queue of RabbitMQ, and hands on over a connection of its own.

    A node that is full stops reading from whoever publishes, acknowledgements too.
    """

    def __init__(self, url: str) -> None:
        """Begin to take from the queue on a node."""
        self.book = Book()
        self._url = url
        self._stop = threading.Event()
        self._entered: set[str] = set()  # task ids, of which some may be delivered once more
        self._came: deque[Any] = deque()
        self._to_hand_on: SimpleQueue[Any] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._repeat, args=(work,), name=work.__name__, daemon=True)
            for work in (self._consume, self._hand_on)
        ]
        for thread in self._threads:
            thread.start()

    def _repeat(self, work: Callable[[], None]) -> None:
        while not self._stop.is_set():
            with suppress(*_UNREACHABLE):
                work()
            self._stop.wait(0.1)

    def _consume(self) -> None:
        self._came.clear()
        with self._connection() as connection:
            channel = connection.default_channel
            for name in (INBOX, WORK):
                Queue(name, routing_key=name, channel=channel).declare()
            channel.basic_qos(0, _AT_ONCE, False)
            channel.basic_consume(INBOX, callback=self._came.append)
            while not self._stop.is_set():
                with suppress(TimeoutError):
                    connection.drain_events(timeout=0.2)
                while self._came:
                    self._take(channel, self._came.popleft())
                connection.heartbeat_check()

    def _connection(self) -> Connection:
        connection = Connection(self._url, connect_timeout=1, heartbeat=4)
        connection.connect()
        return connection

    def _take(self, channel: Any, message: Any) -> None:
        headers = message.properties["application_headers"]
        task_id = headers["id"]
        if message.delivery_info["redelivered"] and task_id in self._entered:
            self.book.seen_again += 1
        else:
            self.book.enter({"headers": headers}, now_ms())
            self._entered.add(task_id)
        channel.basic_ack(message.delivery_tag)
        if self._to_hand_on.qsize() < _MOST_WORK:
            self._to_hand_on.put(message)

    def _hand_on(self) -> None:
        with self._connection() as connection:
            while not self._stop.is_set():
                is_busy = self._count(connection) > _MOST_WORK
                for _ in range(_HANDED_ON):
                    with suppress(Empty):
                        message = self._to_hand_on.get(timeout=0.02)
                        if not is_busy:
                            headers = message.properties["application_headers"]
                            self.book.handed_on.add(headers["id"])
                            connection.default_channel.basic_publish(message, "", WORK)
                with suppress(TimeoutError):
                    connection.drain_events(timeout=0)

    @staticmethod
    def _count(connection: Connection) -> int:
        return int(connection.default_channel.queue_declare(WORK, passive=True).message_count)

    def waiting(self) -> int:
        """Return how many messages wait for workers, -1 when that can not be said."""
        try:
            with self._connection() as connection:
                return self._count(connection) + self._to_hand_on.qsize()
        except _UNREACHABLE:
            return -1

    def close(self) -> None:
        """Stop taking."""
        self._stop.set()
        for thread in self._threads:
            thread.join(10)
