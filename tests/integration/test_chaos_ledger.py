"""The ledger of the fault suite sees every message once, whatever becomes of the broker's Redis."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import pytest
import redis
from kombu import Queue

from tests.chaos.ledger import INBOX, MARK, WORK, RedisTaker
from tests.conftest import FreshRedis, MakeApp
from tests.servers import RedisServer
from tests.waiting import wait_until


class Side:
    """A server, a taker on it, and what was pushed."""

    def __init__(self, server: RedisServer) -> None:
        self.server, self.client = server, server.client
        self.taker = RedisTaker(lambda: redis.Redis(port=server.port, socket_timeout=0.5))

    @property
    def seen(self) -> list[str]:
        return [call.task_id for call in self.taker.book.calls]

    def push(self, *names: str) -> None:
        self.client.lpush(INBOX, *[_message(name) for name in names])

    def wait_seen(self, *names: str) -> None:
        wait_until(lambda: self.seen == list(names), f"{names} to be seen, not {self.seen}")
        wait_until(lambda: not self.client.exists(INBOX), "the queue to be empty")


def _message(name: str) -> str:
    return json.dumps({"headers": {"id": name}})


@pytest.fixture
def side(fresh_redis: FreshRedis) -> Iterator[Side]:
    side = Side(fresh_redis(appendonly=True))
    yield side
    side.taker.close()


def test_messages_are_entered_in_order_and_handed_on(side: Side) -> None:
    side.push("a", "b")
    side.push("c")
    side.wait_seen("a", "b", "c")
    work = [json.loads(text)["headers"]["id"] for text in side.client.lrange(WORK, 0, -1)]
    assert work[::-1] == ["a", "b", "c"]
    assert side.taker.book.handed_on == {"a", "b", "c"}
    assert side.client.get(MARK) == "3"


def test_a_message_that_a_worker_gives_back_comes_not_to_the_ledger(
    side: Side, make_app: MakeApp
) -> None:
    app = make_app()
    with app.connection_for_write(side.server.url) as connection:
        connection.Producer().publish({}, routing_key=INBOX, headers={"id": "a"})
        side.wait_seen("a")
        message = connection.SimpleQueue(Queue(WORK, routing_key=WORK)).get(timeout=5)
        message.requeue()
    wait_until(lambda: side.client.llen(WORK) == 1, "it to be given back")
    assert side.seen == ["a"]


def test_a_message_that_comes_twice_is_entered_twice(side: Side) -> None:
    side.push("a", "b", "a")
    side.wait_seen("a", "b", "a")


def test_a_restart_with_its_data_shows_nothing_twice(side: Side) -> None:
    side.push("a", "b")
    side.wait_seen("a", "b")
    side.server.restart()
    side.push("c")
    side.wait_seen("a", "b", "c")
    assert not side.taker.book.gaps


def test_what_was_entered_and_not_removed_is_entered_once(side: Side) -> None:
    """The transaction failed, or its answer was lost."""
    wait_until(lambda: side.client.get(MARK) == "0", "the first look")
    with side.taker._looking:
        side.push("a", "b")
        with pytest.raises(redis.ConnectionError):
            side.taker._take(_Failing(), b"0", [_message("a").encode()], is_busy=False)
        side.push("c")
    side.wait_seen("a", "b", "c")
    assert side.taker.book.seen_again == 1


class _Failing:
    """A pipeline whose transaction is not carried out."""

    def __getattr__(self, name: str) -> Callable[..., object]:
        return lambda *_: self

    def execute(self) -> None:
        raise redis.ConnectionError


def test_a_transaction_that_comes_late_removes_nothing_unseen(side: Side) -> None:
    """Its connection is given up while the server is frozen; then the server carries it out."""
    side.push("a")
    side.wait_seen("a")
    late = redis.Redis(port=side.server.port, socket_timeout=5)
    with late.pipeline(transaction=True) as pipe:
        pipe.watch(MARK)
        pipe.multi()
        pipe.ltrim(INBOX, 0, -2)
        pipe.set(MARK, 2)
        side.push("b")
        side.wait_seen("a", "b")
        side.push("c")
        with pytest.raises(redis.WatchError):
            pipe.execute()
    side.wait_seen("a", "b", "c")
    late.close()


def test_a_promoted_replica_shows_again_what_was_seen_and_other_history_is_new(
    side: Side,
) -> None:
    side.push("a", "b", "c", "d")
    side.wait_seen("a", "b", "c", "d")
    with side.taker._looking:  # it has followed until after "c", of which only "a" was removed
        side.client.set(MARK, 1)
        side.push("b", "c", "e")
    side.wait_seen("a", "b", "c", "d", "e")
    assert side.taker.book.seen_again == 2
    assert side.client.get(MARK) == "4"
    side.push("d")
    side.wait_seen("a", "b", "c", "d", "e", "d")


def test_lost_data_leave_a_gap_and_a_new_beginning(side: Side) -> None:
    side.push("a")
    side.wait_seen("a")
    side.server.restart(keep_data=False)
    side.push("b")
    side.wait_seen("a", "b")
    (gap,) = side.taker.book.gaps
    assert gap.from_ms < gap.until_ms
    assert side.client.get(MARK) == "1"


def test_emptying_takes_what_waits_so_that_there_is_no_gap(side: Side) -> None:
    side.push("a")
    side.wait_seen("a")
    side.taker.close()
    side.push("b", "c")
    size, is_empty = side.taker.empty(lambda pipe: pipe.dbsize().flushall())
    assert (size, is_empty) == (3, True), "the queue, the work and the mark"
    assert side.seen == ["a", "b", "c"]
    side.taker._look()
    side.push("d")
    side.taker._look()
    assert side.seen == ["a", "b", "c", "d"]
    assert not side.taker.book.gaps
