"""Publisher confirms of a real RabbitMQ, with many messages in flight."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from amqp.exceptions import ChannelError, NotFound, PreconditionFailed
from kombu import Connection, Exchange, Producer, Queue

from celery_dtimer.confirms import Confirms, Receipt
from tests.servers import RabbitMQ
from tests.waiting import wait_until

SECONDS = 10.0  # within which a busy broker answers


@pytest.fixture(scope="module")
def node(shared_rabbitmq: RabbitMQ) -> RabbitMQ:
    """The run's node."""
    return shared_rabbitmq


class Sender:
    """A channel with confirms, a queue and kombu's producer."""

    def __init__(self, url: str, **queue: Any) -> None:
        self.connection = Connection(url, connect_timeout=5, transport_options={"read_timeout": 5})
        self.producer = Producer(self.connection)
        self.channel: Any = self.producer.channel
        self.queue = self.declare(**queue)
        self.confirms = Confirms(self.channel)

    def declare(self, name: str = "", **options: Any) -> str:
        """Declare a queue of the test's own that ends with the connection; return its name."""
        name = name or f"confirms-{uuid.uuid4().hex[:8]}"
        Queue(name, **{"exclusive": True, **options}).bind(self.channel).declare()
        return name

    def send(self, queue: str | None = None, **options: Any) -> Receipt:
        """Publish a message, as one run; return its receipt."""
        self.producer.publish({}, routing_key=queue or self.queue, retry=False, **options)
        receipt = self.confirms.mark()
        assert receipt is not None
        return receipt

    def send_many(self, count: int, queue: str | None = None) -> list[Receipt]:
        """Publish so many runs without waiting for an answer."""
        return [self.send(queue) for _ in range(count)]

    def count(self, queue: str | None = None) -> int:
        """Return how many messages a queue holds."""
        channel = self.connection.channel()
        return int(channel.queue_declare(queue or self.queue, passive=True).message_count)

    def hold_answers(self) -> Callable[[str, int, bool], None]:
        """Keep the broker's answers from being heard; return a way to answer in its place."""
        heard = {kind: self.channel.events.pop(kind) for kind in ("basic_ack", "basic_nack")}

        def answer(kind: str, number: int, multiple: bool) -> None:
            for callback in heard[kind]:
                callback(number, multiple)

        return answer


MakeSender = Callable[..., Sender]


@pytest.fixture
def make_sender() -> Iterator[MakeSender]:
    """Open senders to a node; their connections end with the test."""
    senders: list[Sender] = []

    def make(node: RabbitMQ, **queue: Any) -> Sender:
        senders.append(Sender(node.url, **queue))
        return senders[-1]

    yield make
    for sender in senders:
        sender.connection.collect()


@pytest.fixture
def sender(node: RabbitMQ, make_sender: MakeSender) -> Sender:
    return make_sender(node)


def answers(receipts: list[Receipt]) -> list[str]:
    return [receipt.answer for receipt in receipts]


# ------------------------------------------------------------------ answers


def test_many_in_flight_are_all_confirmed(sender: Sender) -> None:
    receipts = sender.send_many(500)
    assert sender.confirms.wait(SECONDS)
    assert answers(receipts) == ["confirmed"] * 500
    assert (sender.confirms.in_flight, sender.count()) == (0, 500)


def test_the_broker_answers_several_at_once(sender: Sender) -> None:
    frames: list[tuple[int, bool]] = []
    sender.channel.events["basic_ack"].add(lambda *answer: frames.append(answer))
    receipts: list[Receipt] = []

    def some_at_once() -> bool:
        receipts.extend(sender.send_many(100))
        sender.confirms.wait(SECONDS)
        return any(multiple for _, multiple in frames)

    wait_until(some_at_once, "an answer to several messages", 20)
    assert set(answers(receipts)) == {"confirmed"}


def test_a_message_is_unknown_until_it_is_answered(sender: Sender) -> None:
    receipt = sender.send()
    assert (receipt.answer, sender.confirms.in_flight) == ("unknown", 1)
    assert sender.confirms.wait(SECONDS)
    assert receipt.answer == "confirmed"


def test_waiting_for_nothing_takes_no_time(sender: Sender) -> None:
    assert sender.confirms.wait(0)
    sender.send()
    sender.confirms.wait(SECONDS)
    assert sender.confirms.wait(0)


@pytest.mark.parametrize(
    ("frames", "expected"),
    [
        ([("ack", 2, False)], "? + ? ?"),
        ([("ack", 3, True)], "+ + + ?"),
        ([("nack", 3, True)], "- - - ?"),
        ([("nack", 2, False), ("ack", 3, True)], "+ - + ?"),
        ([("ack", 4, False), ("nack", 4, True)], "- - - +"),
        ([("ack", 0, True)], "+ + + +"),
        ([("ack", 1, False), ("nack", 1, False)], "+ ? ? ?"),
        ([("ack", 9, False)], "? ? ? ?"),
    ],
)
def test_answers_in_any_order_and_form(
    sender: Sender, frames: list[tuple[str, int, bool]], expected: str
) -> None:
    answer = sender.hold_answers()
    receipts = sender.send_many(4)
    for kind, number, multiple in frames:
        answer(f"basic_{kind}", number, multiple)
    signs = {"unknown": "?", "confirmed": "+", "refused": "-"}
    assert " ".join(signs[said] for said in answers(receipts)) == expected


# ------------------------------------------------------------------ runs


def test_a_run_is_its_first_message_and_events_only_count(node: RabbitMQ, sender: Sender) -> None:
    full = sender.declare(queue_arguments={"x-max-length": 1, "x-overflow": "reject-publish"})
    sender.send(full)
    sender.confirms.wait(SECONDS)
    sender.producer.publish({}, routing_key=sender.queue)
    sender.producer.publish({}, routing_key=full)  # its event, which is refused
    receipt = sender.confirms.mark()
    following = sender.send()
    assert sender.confirms.in_flight >= 1
    assert sender.confirms.wait(SECONDS)
    assert receipt is not None
    assert (receipt.answer, following.answer) == ("confirmed", "confirmed")


def test_a_run_that_publishes_nothing_has_no_receipt(sender: Sender) -> None:
    assert sender.confirms.mark() is None
    sender.send()
    assert sender.confirms.mark() is None


def test_a_message_that_has_no_encoding_is_not_sent_and_disturbs_nobody(sender: Sender) -> None:
    before = sender.send_many(3)
    with pytest.raises(ValueError, match="AMQP can not carry"):
        sender.producer.publish({}, routing_key=sender.queue, headers={"x": uuid.uuid4()})
    assert sender.confirms.mark() is None
    after = sender.send_many(3)
    assert sender.confirms.wait(SECONDS)
    assert answers([*before, *after]) == ["confirmed"] * 6
    assert sender.count() == 6


# ------------------------------------------------------------------ refusals


def test_a_refused_message_delays_only_itself(sender: Sender) -> None:
    full = sender.declare(queue_arguments={"x-max-length": 2, "x-overflow": "reject-publish"})
    receipts = []
    for _ in range(5):
        receipts += [sender.send(), sender.send(full)]
    assert sender.confirms.wait(SECONDS)
    assert answers(receipts[::2]) == ["confirmed"] * 5
    assert answers(receipts[1::2]) == ["confirmed"] * 2 + ["refused"] * 3
    assert sender.confirms.failure is None
    assert (sender.count(), sender.count(full)) == (5, 2)


# ------------------------------------------------------------------ failures


def send_into_the_void(sender: Sender) -> Receipt:
    """Publish to an exchange that does not exist, for which the broker closes the channel."""
    return sender.send(exchange=Exchange("no-such-exchange"), declare=[])


def test_a_missing_exchange_leaves_what_was_not_answered_unknown(sender: Sender) -> None:
    earlier = sender.send_many(20)
    culprit = send_into_the_void(sender)
    later: list[Receipt] = []
    try:
        later += sender.send_many(20)
    except NotFound:  # it was heard of before the last was sent
        sender.confirms.mark()
    assert not sender.confirms.wait(SECONDS)
    assert isinstance(sender.confirms.failure, NotFound)
    assert culprit.answer == "unknown"
    assert set(answers(earlier)) <= {"confirmed", "unknown"}
    assert set(answers(later)) <= {"unknown"}
    assert answers(earlier).count("confirmed") <= sender.count()


def test_what_was_answered_before_the_failure_stays_confirmed(sender: Sender) -> None:
    earlier = sender.send_many(20)
    assert sender.confirms.wait(SECONDS)
    send_into_the_void(sender)
    assert not sender.confirms.wait(SECONDS)
    assert answers(earlier) == ["confirmed"] * 20


def test_a_failed_channel_publishes_nothing_more_until_confirms_are_made_anew(
    sender: Sender,
) -> None:
    send_into_the_void(sender)
    sender.confirms.wait(SECONDS)
    for _ in range(2):
        with pytest.raises(NotFound):
            sender.send()
    assert not sender.confirms.wait(SECONDS)
    assert sender.count() == 0
    sender.confirms = Confirms(sender.channel)
    receipts = sender.send_many(10)
    assert sender.confirms.wait(SECONDS)
    assert answers(receipts) == ["confirmed"] * 10
    assert sender.count() == 10


def test_a_declaration_that_is_refused_ends_the_channel_too(sender: Sender) -> None:
    earlier = sender.send_many(10)
    with pytest.raises(PreconditionFailed):
        sender.declare(name=sender.queue, queue_arguments={"x-max-length": 9})
    assert sender.confirms.failure is not None
    with pytest.raises(ChannelError):
        sender.send()
    assert set(answers(earlier)) <= {"confirmed", "unknown"}
    sender.confirms = Confirms(sender.channel)
    receipt = sender.send()
    assert sender.confirms.wait(SECONDS)
    assert receipt.answer == "confirmed"


def test_a_frozen_broker_takes_no_longer_than_the_timeout_and_may_answer_later(
    node: RabbitMQ, make_sender: MakeSender, request: pytest.FixtureRequest
) -> None:
    sender = make_sender(node)
    node.freeze()
    request.addfinalizer(node.thaw)
    receipts = sender.send_many(10)
    started = time.monotonic()
    assert not sender.confirms.wait(0.5)
    assert 0.4 < time.monotonic() - started < 2
    assert set(answers(receipts)) == {"unknown"}
    assert sender.confirms.failure is None
    node.thaw()
    assert sender.confirms.wait(SECONDS)
    assert set(answers(receipts)) == {"confirmed"}


def test_a_killed_broker_leaves_what_is_in_flight_unknown(
    rabbitmq: RabbitMQ, make_sender: MakeSender
) -> None:
    sender = make_sender(rabbitmq)
    confirmed = sender.send_many(10)
    assert sender.confirms.wait(SECONDS)
    rabbitmq.freeze()
    lost = sender.send_many(10)
    rabbitmq.kill()
    started = time.monotonic()
    assert not sender.confirms.wait(SECONDS)
    assert time.monotonic() - started < SECONDS
    assert sender.confirms.failure is not None
    assert set(answers(confirmed)) == {"confirmed"}
    assert set(answers(lost)) == {"unknown"}
    with pytest.raises(type(sender.confirms.failure)):
        sender.send()
