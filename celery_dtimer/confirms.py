"""Publisher confirms with many messages in flight, on one channel of RabbitMQ.

The broker numbers what is published on a channel from 1 and answers each number with an ack (it has
the message) or a nack (it refuses it), late and several at once. `Confirms` counts along and keeps
for each message of a run a `Receipt`, which says what the broker has answered so far.

What it does not promise: when the channel or the connection ends, the messages without an answer
may have arrived or not; their receipts stay ``unknown``. A message to an exchange that does not
exist ends the channel, and so takes those in flight with it.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from typing import Any, Literal

from amqp.exceptions import ChannelError, FrameSyntaxError


@dataclass(slots=True, eq=False)
class Receipt:
    """What the broker has said of a message; ``unknown`` until it answers."""

    answer: Literal["unknown", "confirmed", "refused"] = "unknown"


class Confirms:
    """The receipts of what is published on a channel; used by one thread.

    It takes the place of the channel's ``basic_publish`` and ``open``. Once the channel has failed
    it publishes nothing more and raises the failure again instead: py-amqp opens a closed channel
    anew by itself, without confirms and with numbers that start over. On such a channel, make
    another.

    Attributes:
        failure: what ended the channel, None while it works.
    """

    def __init__(self, channel: Any) -> None:
        """Switch confirms on, for a channel on which nothing was published before.

        Args:
            channel: an open channel of py-amqp; whether its connection was opened with
                ``confirm_publish`` does not matter.
        """
        self.failure: BaseException | None = None
        self._channel = channel
        self._connection = channel.connection
        self._basic_publish = type(channel).basic_publish  # an instance may have a waiting one
        self._errors = (*self._connection.connection_errors, *self._connection.channel_errors)
        self._count = 0
        self._current: Receipt | None = None
        # The unanswered, lowest number first. What follows a run's message has no receipt.
        self._waiting: dict[int, Receipt | None] = {}
        channel.confirm_select()
        channel.events["basic_ack"] = {self._on_ack}
        channel.events["basic_nack"] = {self._on_nack}
        channel.basic_publish = self._publish
        channel.open = self._reopen

    @property
    def in_flight(self) -> int:
        """How many messages have no answer yet; they get none after a failure."""
        return len(self._waiting)

    def mark(self) -> Receipt | None:
        """Return the receipt of what was published since the last mark, None for nothing.

        It is that of the first message, which is the run's own. What Celery sends after it are
        events: one that is refused must not send the run again.
        """
        receipt, self._current = self._current, None
        return receipt

    def wait(self, timeout: float) -> bool:
        """Read answers until there is one to everything, the time is over or the channel fails.

        Returns:
            whether everything is answered. It raises nothing: see ``failure``.
        """
        deadline = time.monotonic() + timeout
        while self._waiting and self.failure is None:
            left = deadline - time.monotonic()
            if left <= 0:
                break
            try:
                # Its timeout counts from each event, so the deadline is looked at in between.
                with contextlib.suppress(TimeoutError):
                    self._connection.drain_events(timeout=left)
            except Exception as exc:  # whatever it is, the next answer can not be trusted
                self.failure = exc
        return not self._waiting

    def _publish(self, *args: Any, **kwargs: Any) -> Any:
        if self.failure is not None:
            raise self.failure
        try:
            result = self._basic_publish(self._channel, *args, **kwargs)
        except FrameSyntaxError as exc:
            if not self._connection.connected:
                self.failure = exc
                raise
            # py-amqp's word for a header that has no encoding: nothing was sent.
            raise ValueError(f"AMQP can not carry this message: {exc}") from exc
        except Exception as exc:
            if isinstance(exc, self._errors) or not self._connection.connected:
                self.failure = exc
            raise
        self._count += 1
        receipt = None
        if self._current is None:
            receipt = self._current = Receipt()
        self._waiting[self._count] = receipt
        return result

    def _reopen(self) -> Any:
        """Note that the channel was closed: a declaration may have been to blame."""
        self.failure = ChannelError("the broker has closed the channel")
        return type(self._channel).open(self._channel)

    def _on_ack(self, number: int, multiple: bool) -> None:
        self._answer("confirmed", number, multiple)

    def _on_nack(self, number: int, multiple: bool) -> None:
        self._answer("refused", number, multiple)

    def _answer(self, answer: Literal["confirmed", "refused"], number: int, multiple: bool) -> None:
        for each in self._up_to(number) if multiple else [number]:
            receipt = self._waiting.pop(each, None)
            if receipt is not None:
                receipt.answer = answer

    def _up_to(self, number: int) -> list[int]:
        """Return the unanswered up to a number; 0 stands for all."""
        numbers = []
        for each in self._waiting:
            if number and each > number:
                break
            numbers.append(each)
        return numbers
