"""Builds the messages of runs through Celery, and sends them where the commit does not.

The messages are Celery's own, built by ``apply_async`` with the task's options, routes and signals;
where nothing of that can differ from run to run, they come from a template of such a message. The
connection is the publisher's own, with time limits, so that a frozen broker blocks neither for ever
nor anybody else.

A run is one message, or several: one for each shard of a timer that is broadcast, and the first
ones of a canvas. It has been sent when all of them have arrived.

On Redis the commands that put a message into its queues are captured. `Publisher.build` returns
them, for a commit that pushes them itself; a `Publisher` that is called sends those of a batch in
one pipeline, whose replies say for each message whether it arrived. On other brokers it sends each
message by itself. Then a run counts as sent once the broker has it.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from types import FunctionType
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import celery
from celery import Celery, Task, signals
from celery.app.routes import MapRoute
from celery.beat import BeatLazyFunc
from celery.exceptions import QueueNotFound
from kombu.exceptions import OperationalError

from celery_dtimer import canvas, countdowns
from celery_dtimer.capture import (
    CapturingChannel,
    Command,
    Stopped,
    capture,
    has_receivers,
    stopping_producer,
)
from celery_dtimer.confirms import Confirms, Receipt
from celery_dtimer.errors import DistributedTimerError, InvalidTimerError
from celery_dtimer.faults import point
from celery_dtimer.masking import masked, secrets_in
from celery_dtimer.messages import KeptMessage, priority_of
from celery_dtimer.model import Definition, Run
from celery_dtimer.options import RETRIES, RETRY_HEADER, with_time_limits
from celery_dtimer.store import Message, Target, is_passing
from celery_dtimer.templates import Content, Pattern, Template, cut, delivery_tag, new_tags
from celery_dtimer.tracing import UNTRACED, MessageTrace, Untraced

logger = logging.getLogger(__name__)

T = TypeVar("T")

_LONGEST_PUSH = 1024 * 1024  # bytes that one LPUSH of many messages takes
_LONGEST_REASON = 500  # characters of an error that are kept
_LONGEST_BATCH = 0.5  # seconds after which what is confirmed is to be committed
_SEEN = 2  # messages of a kind before it is sent from a template
_MOST_TOGETHER = 2000  # messages that are built before they are sent
_NO_CONFIRM = "the broker did not confirm the message in time"
_REFUSED = "the broker refused the message"
_TIME_LIMITS = {
    "redis": ("socket_timeout", "socket_connect_timeout"),
    "amqp": ("read_timeout", "write_timeout"),
}


class BrokerDownError(DistributedTimerError):
    """The broker could not be reached: this run and the rest of the batch were not sent."""


class RefusedError(DistributedTimerError):
    """The broker refused one message, which is tried again later."""


class UnsendableError(DistributedTimerError):
    """A message can not be built: its timer is set aside as broken."""


#: Why a run was not sent.
Failure = RefusedError | UnsendableError | BrokerDownError

#: What is said of a run: None when the broker has it, else why not.
Outcome = Failure | None


class Publisher:
    """Builds messages, and sends batches of them, on a broker connection of its own."""

    def __init__(
        self, app: Celery, *, timeout: float, on_progress: Callable[[], None] = lambda: None
    ) -> None:
        """Prepare a publisher; nothing is contacted before the first run.

        Args:
            app: whose broker, tasks and routes are used.
            timeout: seconds that one call to the broker may take, unless the app's transport
                options say otherwise.
            on_progress: called after each message or batch that was confirmed or refused.
        """
        self._app = app
        self._timeout = timeout
        self._on_progress = on_progress
        self._connection: Any = None
        self._producer: Any = None
        self._confirms: Confirms | None = None  # of RabbitMQ's channel
        self._opened = 0
        # It would keep what it can not send for as long as it lives.
        self._events = app.events.Dispatcher(enabled=False, buffer_while_offline=False)
        self._kinds: dict[tuple[str, str], _Kind] = {}  # by task and options
        self._kept: tuple[Definition, KeptMessage] | None = None  # what was read last
        self._templates: WeakKeyDictionary[Definition, tuple[Any, Template]] = WeakKeyDictionary()
        self._declared: set[tuple[Any, ...]] = set()  # whose queues this connection has declared
        self._failures: tuple[type[BaseException], ...] = (OperationalError, OSError)

    def __call__(self, runs: Sequence[Run], may_send: Callable[[], bool]) -> list[Outcome]:
        """Send runs in order.

        Args:
            runs: what is to be sent.
            may_send: asked before each send; no more is sent once it says no.

        Returns:
            an outcome for each run that was tried; fewer than runs when sending was not allowed any
            more, took too long, or the broker is down.
        """
        down = self.connect()
        if down is not None:
            return [down]
        if self.is_capturing:
            return self._send_together(runs, may_send)
        self._app.set_current()
        if self._confirms is not None:
            return self._send_in_flight(runs, may_send)
        return self._send_each(runs, may_send)

    def build(self, runs: Sequence[Run]) -> list[Message | Failure]:
        """Return each run's message, or why there is none; nothing is sent.

        The answer is shorter than the runs when the broker is down, which has to be asked for
        queues that are to be declared or looked up.
        """
        self._app.set_current()  # result backends and canvas look for it in this thread
        uses_templates = self._uses_templates()
        built: list[Message | Failure] = []
        for run, tag in zip(runs, new_tags(len(runs)), strict=True):
            point("in_the_batch")
            built.append((uses_templates and self._rendered(run, tag)) or self._built(run))
            if isinstance(built[-1], BrokerDownError):
                break
        return built

    def urgency(self, definition: Definition) -> int:
        """Return where a timer's messages belong in a batch: the smallest number goes first.

        It follows from the message's ``priority`` as Celery finds it (the options, the task with
        the app's default, the routes), none being 0: on RabbitMQ and what orders like it the
        largest comes first, elsewhere the smallest. Nothing is contacted for it.
        """
        if definition.message is not None:
            priority = priority_of(definition.message)
        else:
            kind = self._usable_kind(definition)
            priority = 0 if kind is None else kind.priority
        return -priority if self._prefers_large else priority

    def _kept_message(self, definition: Definition) -> KeptMessage:
        """Return the message of a durable countdown.

        Raises:
            InvalidTimerError: it can not be read.
        """
        if self._kept is None or self._kept[0] is not definition:
            self._kept = definition, KeptMessage(definition)
        return self._kept[1]

    @cached_property
    def _prefers_large(self) -> bool:
        """Say whether the broker takes a larger priority for a higher one."""
        transport = self._app.connection_for_write().get_transport_cls()
        return transport.driver_type in _LARGE_FIRST

    def expect(self, runs: Sequence[Run]) -> None:
        """Make the templates of timers that are to run, as far as they are to have some."""
        if not self.is_capturing or not self._uses_templates():
            return
        self._app.set_current()
        for run in runs:
            if run.definition.message is not None:
                continue
            kind = self._usable_kind(run.definition)
            if kind is None:
                continue
            if not kind.is_known and not _is_lazy(run.definition):
                self._built_part(run.parts[0])  # and not sent: the kind learns from it
            self._template(run)

    def _rendered(self, run: Run, tag: str) -> Message | None:
        """Return a run's message from its timer's template, None when it has none."""
        found = self._template(run)
        if found is None:
            return None
        targets, template = found
        if run.definition.policy.shards == 1:
            return Message(targets, (template.render(run, tag),))
        parts = run.parts
        values = map(template.render, parts, new_tags(len(parts)))
        return Message(targets * len(parts), tuple(values))

    def _template(self, run: Run) -> tuple[Any, Template] | None:
        if run.resent or run.definition.message is not None:  # its header says so, or it is there
            return None
        found = self._templates.get(run.definition)
        if found is None:
            kind = self._usable_kind(run.definition)
            template = None if kind is None else kind.template(run)
            if kind is None or template is None:
                return None
            found = self._templates[run.definition] = (kind.targets, template)
        return found

    def close(self) -> None:
        """End the connection; the next run opens a new one."""
        connection = self._take_connection()
        if connection is not None:
            with contextlib.suppress(Exception):  # whatever state it is in, it is given up
                connection.release()

    def _drop(self) -> None:
        """Give the connection up without a word to a broker that may not answer."""
        connection = self._take_connection()
        if connection is not None:
            with contextlib.suppress(Exception):
                connection.collect()
        self._on_progress()

    def _take_connection(self) -> Any:
        connection, self._connection, self._producer = self._connection, None, None
        self._confirms = None
        self._declared.clear()
        return connection

    # -- connection

    @property
    def is_capturing(self) -> bool:
        """Say whether the broker is a Redis server whose commands are captured."""
        return self._producer is not None and isinstance(self._producer.channel, CapturingChannel)

    @property
    def connects(self) -> tuple[int, int]:
        """What changes whenever a connection to the broker's Redis is a new one."""
        return self._opened, self._producer.channel.connects if self.is_capturing else 0

    def write(self, key: str, value: str, ttl: float) -> tuple[int, str]:
        """Write a key into the broker's Redis for ``ttl`` seconds.

        Returns:
            the broker's database, and the prefix that its clients put before every key.

        Raises:
            BrokerDownError: the broker can not be reached, or can not serve now.
            RefusedError: it does not let this user write the key.
        """
        down = self.connect()
        if down is not None:
            raise down
        channel = self._producer.channel
        try:
            with channel.conn_or_acquire() as client:
                with client.pipeline(transaction=False) as pipe:
                    pipe.set(key, value, px=round(ttl * 1000))
                    (reply,) = pipe.execute(raise_on_error=False)
                database = client.connection_pool.connection_kwargs.get("db")
        except self._failures as exc:
            raise self._down(exc) from exc
        if isinstance(reply, Exception):
            raise self._down(reply) if is_passing(reply) else _refused(reply)
        return int(database or 0), channel.global_keyprefix or ""

    def connect(self) -> BrokerDownError | None:
        """Connect to the broker unless that is done; return why that is not possible."""
        if self._producer is not None:
            return None
        self._opened += 1
        connection = self._connection = self._app.connection_for_write()
        transport = connection.transport
        self._failures = failures_of(transport)
        _limit(connection, self._timeout)
        capture(transport)
        try:
            _open(connection)
            producer = stopping_producer(self._app, connection)
            channel = producer.channel  # opens it now, so that an unreachable broker shows here
            if transport.driver_type == "amqp":
                self._confirms = Confirms(channel)
        except self._failures as exc:
            return self._down(exc)
        self._producer = producer
        self._on_progress()
        return None

    def registered(self, seconds: float) -> dict[str, list[str]] | None:
        """Ask the workers which tasks they know; None when none answers in so many seconds.

        Raises:
            Exception: they can not be asked; whatever the broker's client raises.
        """
        with open_limited(self._app, self._timeout) as connection:
            workers = self._app.control.inspect(timeout=seconds, connection=connection)
            found: dict[str, list[str]] | None = workers.registered()
        return found or None

    def revoke(self, task_ids: Sequence[str]) -> None:
        """Revoke tasks, and terminate those that run, on a connection of its own.

        Raises:
            StoreError: a pending call was to be cancelled, and Redis did not answer, or refused.
            Exception: the workers can not be told; whatever the broker's client raises.
        """
        with open_limited(self._app, self._timeout) as connection:
            countdowns.revoke(self._app, task_ids, connection)
        self._on_progress()

    def _down(self, exc: BaseException) -> BrokerDownError:
        self._drop()
        conf = self._app.conf
        secrets = secrets_in(conf.broker_url, conf.broker_write_url, [conf.broker_password])
        return BrokerDownError(masked(f"{type(exc).__name__}: {exc}", secrets))

    # -- Redis: captured messages

    def _built(self, run: Run) -> Message | Failure:
        """Build a run's messages through Celery; return why not when that fails."""
        built: list[Message] = []
        for part in run.parts:
            message = self._built_part(part)
            if not isinstance(message, Message):
                return message
            built.append(message)
            if len(built) == _SEEN and self._uses_templates():  # by now there may be a template
                rendered = self._rendered(run, "")
                if rendered is not None:
                    return rendered
        return built[0] if len(built) == 1 else _together(built)

    def _built_part(self, run: Run) -> Message | Failure:
        def build() -> tuple[list[Command], list[Announcement]]:
            channel = self._producer.channel
            channel.take()
            sent = _Sent()
            self._apply(run, sent)
            return channel.take(), sent.announcements

        built = self._connected(build)
        if not isinstance(built, tuple):
            return built
        message = _message(*built)
        if run.definition.message is None:
            self._learn(self._kind(run.definition), run, message)
        return message

    def _connected(self, act: Callable[[], T]) -> T | Failure:
        """Return what an act with the broker answers, or why it failed.

        What fails on a fresh connection too (a declaration, a look-up) is the message's own fault.
        """
        failure: BaseException
        for _ in range(2):
            down = self.connect()
            if down is not None:
                return down
            try:
                return act()
            except self._failures as exc:
                failure = exc
                self._drop()
            except Exception as exc:
                return _fault(exc)
        return _refused(failure)

    def _send_together(self, runs: Sequence[Run], may_send: Callable[[], bool]) -> list[Outcome]:
        """Send what could be built in one pipeline, or in several where runs are large."""
        outcomes: list[Outcome] = []
        deadline = time.monotonic() + _LONGEST_BATCH
        for batch in _batches(runs):
            if outcomes and time.monotonic() > deadline:
                break
            answers = self._send_batch(batch, may_send)
            outcomes += answers
            if len(answers) < len(batch) or isinstance(answers[-1], BrokerDownError):
                break
        return outcomes

    def _send_batch(self, runs: Sequence[Run], may_send: Callable[[], bool]) -> list[Outcome]:
        built = self.build(runs)
        batch = _Batch([message for message in built if isinstance(message, Message)])
        if not may_send():
            return []
        down = self.connect()
        if down is not None:
            return [down]
        try:
            with self._producer.channel.conn_or_acquire() as client:
                refusals = batch.send(client)
        except self._failures as exc:
            return [self._down(exc)]
        self._on_progress()
        answers = iter(refusals)
        outcomes = [next(answers) if isinstance(message, Message) else message for message in built]
        for message, outcome in zip(built, outcomes, strict=True):
            if outcome is None and isinstance(message, Message) and message.published:
                message.published()
        if any(refusals):
            self._drop()  # the broker's name may lead to another server by now
        return outcomes

    # -- any broker: each message by itself

    def _send_each(self, runs: Sequence[Run], may_send: Callable[[], bool]) -> list[Outcome]:
        outcomes: list[Outcome] = []
        deadline = time.monotonic() + _LONGEST_BATCH
        for run in runs:
            if time.monotonic() > deadline:
                break
            outcome: Outcome = None
            for part in run.parts:
                if not may_send():
                    return outcomes
                outcome = self._send(part)
                if outcome is not None:
                    break
                self._on_progress()
            outcomes.append(outcome)
            if isinstance(outcome, BrokerDownError):
                break
            self._on_progress()
            point("in_the_batch")
        return outcomes

    def _send(self, run: Run) -> Outcome:
        """Send one run, or one shard of it."""

        def send() -> _Sent:
            sent = _Sent()
            self._apply(run, sent)
            self._wait_for_confirms(sent.receipts)
            return sent

        sent = self._connected(send)
        if not isinstance(sent, _Sent):
            return sent
        sent.announce()
        return None

    def _wait_for_confirms(self, receipts: Sequence[Receipt]) -> None:
        """Wait until the broker has confirmed messages, where it does so.

        Raises:
            RefusedError: it refused one of them.
            OSError: it did not answer in time, or what ended the channel.
        """
        if self._confirms is None:
            return
        self._confirms.wait(self._timeout)
        answers = {receipt.answer for receipt in receipts}
        if "refused" in answers:
            raise RefusedError(_REFUSED)
        if "unknown" in answers:
            raise self._confirms.failure or TimeoutError(_NO_CONFIRM)

    # -- RabbitMQ: many messages in flight

    def _send_in_flight(self, runs: Sequence[Run], may_send: Callable[[], bool]) -> list[Outcome]:
        """Send without waiting for each confirm; answer once all of them are in.

        The first message to a destination goes alone: if its exchange does not exist the broker
        ends the channel, and of those in flight nothing would be known.
        """
        outcomes: list[Outcome] = []
        flying: list[_Flight] = []
        deadline = time.monotonic() + _LONGEST_BATCH
        for run in runs:
            if time.monotonic() > deadline:
                break
            outcomes.append(None)
            if not self._take_off(run, flying, outcomes, may_send):
                self._land(flying, outcomes)
                return outcomes[:-1]
            if isinstance(outcomes[-1], BrokerDownError):
                break
            point("in_the_batch")
        self._land(flying, outcomes)
        return outcomes

    def _take_off(
        self,
        run: Run,
        flying: list[_Flight],
        outcomes: list[Outcome],
        may_send: Callable[[], bool],
    ) -> bool:
        """Publish a run's messages until one fails, which becomes its outcome, the last one.

        Returns:
            whether that was allowed to the end.
        """
        place = len(outcomes) - 1
        destination = self._destination(run.definition)
        for part in run.parts:
            if not may_send():
                return False
            if destination is None or destination not in self._declared:
                self._land(flying, outcomes)
                outcomes[place] = outcomes[place] or self._send(part)
            else:
                flying.append(self._fly(part, place))
                outcomes[place] = flying[-1].outcome
            if outcomes[place] is not None:
                break
        return True

    def _fly(self, run: Run, place: int) -> _Flight:
        """Publish one message; what fails now is told at once."""
        flight = _Flight(run, place)
        confirms = self._confirms
        if confirms is None or confirms.failure is not None:
            return flight  # it takes off once more when it is landed
        try:
            self._apply(run, flight.sent)
            flight.has_left = True
        except self._failures as exc:
            logger.debug("The channel ended while messages were in flight: %s", exc)
        except Exception as exc:
            flight.outcome = _fault(exc)
        return flight

    def _land(self, flying: list[_Flight], outcomes: list[Outcome]) -> None:
        """Wait for the confirms; what the end of the channel left unknown is sent again, alone."""
        confirms = self._confirms
        if confirms is not None and flying:
            confirms.wait(self._timeout)
            self._on_progress()
        failed = confirms is None or confirms.failure is not None
        if flying and failed:
            self._drop()
        for flight in flying:
            if outcomes[flight.place] is None:  # else another shard has failed
                outcomes[flight.place] = self._landed(flight, failed)
        if not failed and any(isinstance(outcome, BrokerDownError) for outcome in outcomes):
            self._drop()
        flying.clear()

    def _landed(self, flight: _Flight, failed: bool) -> Outcome:
        answers = {receipt.answer for receipt in flight.sent.receipts}
        # Without a receipt it has run here, eagerly.
        if answers == {"confirmed"} or (flight.has_left and not answers):
            flight.sent.announce()
            return None
        if "refused" in answers:
            return RefusedError(_REFUSED)
        is_lost = failed or not flight.has_left
        return self._send(flight.run) if is_lost else BrokerDownError(_NO_CONFIRM)

    # -- Celery

    def _kind(self, definition: Definition) -> _Kind:
        name = (definition.task, repr(definition.options) if definition.options else "")
        kind = self._kinds.get(name)
        if kind is None:
            if len(self._kinds) >= _MOST_KINDS:
                self._kinds.clear()
            kind = self._kinds[name] = _Kind(self._app, definition)
        return kind

    def _usable_kind(self, definition: Definition) -> _Kind | None:
        """Return the kind of a definition, None for options that no message can have.

        They were edited by hand. Whoever builds the message meets the failure too, and says so.
        """
        try:
            return self._kind(definition)
        except Exception as exc:
            logger.debug("No message can be built for %s: %s", definition.task, type(exc).__name__)
            return None

    def _learn(self, kind: _Kind, run: Run, message: Message) -> None:
        """Let a kind see how Celery has built a message, until it knows."""
        if kind.is_known or run.resent or not self._uses_templates():
            return
        body, how = self._producer.last
        serializer, compression = how["serializer"], how["compression"]
        channel = self._producer.channel
        encode = partial(channel.encode_body, encoding=channel.body_encoding)
        content = Content(self._app, encode, serializer, compression, body[2], kind.options)
        try:
            kind.learn(run, message, content)
        except Exception as exc:  # the message is built: that it teaches nothing does not matter
            logger.debug("No templates for %s: %r", run.definition.task, exc)

    def _destination(self, definition: Definition) -> tuple[Any, ...] | None:
        """Return what decides to which queue messages go; None when that may change each time."""
        if definition.message is None:
            kind = self._usable_kind(definition)
            return None if kind is None else kind.destination
        try:
            kept = self._kept_message(definition)
        except InvalidTimerError:  # who publishes it says so
            return None
        return "", kept.exchange, kept.routing_key, *kept.queues

    def _apply(self, run: Run, sent: _Sent) -> None:
        """Let Celery publish a run, or one shard of it."""
        if run.definition.message is not None:
            self._apply_kept(run, sent)
            return
        kind = self._kind(run.definition)
        args, kwargs = _arguments(run.definition)
        if kind.is_canvas:
            self._apply_canvas(kind, run, args, kwargs, sent)
            return
        headers = {**kind.headers, "celery_beat_task": True, "dtimer": run.header}
        options = {**kind.options, "headers": headers, "task_id": run.task_id}
        if kind.destination in self._declared:
            options["declare"] = []
        within = _within(run, run.definition.task, run.task_id)
        self._publish(kind, kind.send, args, kwargs, options, sent, within)
        if kind.destination is not None:
            self._declared.add(kind.destination)

    def _apply_kept(self, run: Run, sent: _Sent) -> None:
        """Publish a message that Celery has built before, and that its signals have followed."""
        kept, destination = self._kept_message(run.definition), self._destination(run.definition)
        declares = destination not in self._declared
        try:
            kept.publish(self._app, self._producer, run.scheduled_ms, declares=declares)
        finally:
            self._mark(sent)
        if destination is not None:
            self._declared.add(destination)

    def _apply_canvas(
        self, kind: _Kind, run: Run, args: Any, kwargs: dict[str, Any], sent: _Sent
    ) -> None:
        def publish(task: Any, args: Any, kwargs: Any, options: dict[str, Any]) -> None:
            send, headers, options = _sending(self._app, task, options)
            options = {"retry": False, "router": kind.router, **options, "headers": headers}
            within = _within(run, getattr(task, "name", task), options["task_id"])
            self._publish(kind, send, args, kwargs, options, sent, within)

        with self._eager_failures():
            canvas.send(run, args, kwargs, self._app, publish)

    def _publish(
        self,
        kind: _Kind,
        send: Callable[..., Any],
        args: Any,
        kwargs: Any,
        options: dict[str, Any],
        sent: _Sent,
        within: MessageTrace | Untraced,
    ) -> None:
        """Let Celery publish one message."""
        # The messages of protocol 1 are never pushed by a commit: Celery may go on at once.
        self._producer.stops = has_receivers() and self._app.conf.task_protocol == 2
        try:
            with self._eager_failures():
                within(send, args, kwargs, producer=self._producer, **options)
        except Stopped as stopped:
            sent.announcements.append(partial(within, stopped.published.announce))
            if self._app.conf.task_send_sent_event:
                self._send_event(stopped.published.event(kind.router.queue))
        except BaseException:
            within.abandon()
            raise
        finally:
            self._producer.stops = False
            self._mark(sent)

    def _send_event(self, fields: dict[str, Any]) -> None:
        """Send a ``task-sent`` event, if that can be done: its message is on its way already."""
        try:
            self._events.publish("task-sent", fields, self._producer, retry=False)
        except Exception as exc:
            logger.debug("No event of task %s: %s", fields["uuid"], type(exc).__name__)

    def _mark(self, sent: _Sent) -> None:
        """Note the broker's confirm of what was published last, where there is one."""
        receipt = self._confirms.mark() if self._confirms is not None else None
        if receipt is not None:
            sent.receipts.append(receipt)

    @contextlib.contextmanager
    def _eager_failures(self) -> Iterator[None]:
        """With ``task_always_eager`` the task runs here, and its failure is its own."""
        try:
            yield
        except Exception:
            if not self._app.conf.task_always_eager:
                raise
            logger.exception("A task that ran eagerly has failed")

    def _uses_templates(self) -> bool:
        """Say whether nobody wants to see each message, or is told of it."""
        conf = self._app.conf
        return not (
            signals.before_task_publish.receivers
            or has_receivers()
            or conf.task_send_sent_event
            or conf.task_always_eager
        )


#: Sends the signals that follow a message.
Announcement = Callable[[], None]


@dataclass(slots=True)
class _Sent:
    """What was published, in order."""

    announcements: list[Announcement] = field(default_factory=list)
    receipts: list[Receipt] = field(default_factory=list)

    def announce(self) -> None:
        _announce(self.announcements)


@dataclass(slots=True)
class _Flight:
    """A message that was published and not confirmed yet."""

    run: Run
    place: int  # among the outcomes
    sent: _Sent = field(default_factory=_Sent)
    has_left: bool = False
    outcome: Outcome = None


class _Batch:
    """Captured messages for one pipeline.

    What goes to the same list in a row becomes one LPUSH: it takes many values, in the same order.
    """

    def __init__(self, messages: Sequence[Message]) -> None:
        self._commands: list[tuple[str, list[Any]]] = []
        self._room = 0  # bytes that the last command still takes
        self._places = [list(self._add(message)) for message in messages]  # of their commands

    def _add(self, message: Message) -> Iterator[int]:
        for (command, key), value in zip(message.targets, message.values, strict=True):
            if not (command == "LPUSH" and self._joins(key, value)):
                self._commands.append((command, [key, value]))
                self._room = _LONGEST_PUSH
            yield len(self._commands) - 1

    def _joins(self, key: str, message: str) -> bool:
        """Add a message to the last command, if that pushes to the same list and has room."""
        command, arguments = self._commands[-1] if self._commands else ("", [""])
        self._room -= len(message)
        if command != "LPUSH" or arguments[0] != key or self._room < 0:
            return False
        arguments.append(message)
        return True

    def send(self, client: Any) -> list[RefusedError | None]:
        """Send all; return for each message what the server said against it."""
        with client.pipeline(transaction=False) as pipe:
            for command, arguments in self._commands:
                pipe.execute_command(command, *arguments)
            replies = pipe.execute(raise_on_error=False)
        failures = [_refused(reply) if isinstance(reply, Exception) else None for reply in replies]
        return [next(filter(None, (failures[i] for i in places)), None) for places in self._places]


def _message(commands: Sequence[Command], announcements: Sequence[Announcement]) -> Message:
    targets = tuple((command, key) for command, key, _ in commands)
    values = tuple(value for _, _, value in commands)
    return Message(targets, values, partial(_announce, announcements) if announcements else None)


def _announce(announcements: Sequence[Announcement]) -> None:
    for announce in announcements:
        announce()


def _together(messages: Sequence[Message]) -> Message:
    """Return one message with all the pushes of several."""
    targets, values, published = zip(*messages, strict=True)
    announcements = [announce for announce in published if announce is not None]
    return Message(
        tuple(chain.from_iterable(targets)),
        tuple(chain.from_iterable(values)),
        partial(_announce, announcements) if announcements else None,
    )


def _batches(runs: Sequence[Run]) -> Iterator[Sequence[Run]]:
    """Cut runs so that not too many messages are built at a time."""
    start = count = 0
    for place, run in enumerate(runs):
        shards = run.definition.policy.shards
        if count and count + shards > _MOST_TOGETHER:
            yield runs[start:place]
            start, count = place, 0
        count += shards
    if count:
        yield runs[start:]


# ------------------------------------------------------------------ what is sent for a definition

_MOST_KINDS = 10_000  # that are kept; what comes with the next one is made anew
_REPLACED = frozenset(("id", "root_id", "argsrepr", "kwargsrepr", "dtimer"))  # in a template
_MOMENTARY = ("countdown", "eta", "expires")  # options that Celery turns into the time of sending


class _Kind:
    """How the runs of all timers with the same task and options are sent."""

    def __init__(self, app: Celery, definition: Definition) -> None:
        task: Any = app.tasks.get(definition.task)
        self._task = task
        self.is_canvas = canvas.is_canvas(definition.task)
        self.router = _Router(app)
        self.send, self.headers, options = _sending(
            app, definition.task if task is None else task, definition.options
        )
        # The timer tries again, not the call.
        self.options = {"retry": False, "router": self.router, **options}
        self.destination = (
            None if self.is_canvas else _destination(app, definition.task, definition.options)
        )
        self.priority = _priority(app, definition.task, task, definition.options)
        self.targets: tuple[Target, ...] = ()
        self._pattern: Pattern | None = None
        self._is_right: bool | None = None  # None: there is nothing yet to compare it with
        if (
            self.destination is None
            or any(options.get(name) for name in _MOMENTARY)
            or not _REPLACED.isdisjoint(self.headers)
            or not _is_celerys(app, task)
        ):
            self._is_right = False

    def template(self, run: Run) -> Template | None:
        """Return the template of a run's timer, None when Celery is to build its messages."""
        if not self._is_right or self._pattern is None or _is_lazy(run.definition):
            return None
        try:
            if getattr(self._task, "typing", False):
                self._task.__header__(*run.definition.args, **run.definition.kwargs)
            return self._pattern.fill(run.timer_id, run.definition)
        except Exception as exc:
            # Whatever it is, Celery's own path meets it too, and says whose fault it is.
            logger.debug("No template for %s: %r", run.definition.name, exc)
            return None

    @property
    def is_known(self) -> bool:
        """Say whether its pattern has been found to be right or wrong."""
        return self._is_right is not None

    def learn(self, run: Run, message: Message, content: Content) -> None:
        """Take the pattern from a message that Celery has built, or compare the one that there is.

        A kind whose second message is not what its pattern says is never sent from it.
        """
        if _is_lazy(run.definition):
            return
        text = message.values[0] if [name for name, _ in message.targets] == ["LPUSH"] else ""
        if self._pattern is None:
            self.targets, self._pattern = message.targets, cut(text, run, content)
            if self._pattern is None:
                self._is_right = False
        else:
            template, tag = self._pattern.fill(run.timer_id, run.definition), delivery_tag(text)
            self._is_right = (
                tag is not None
                and message.targets == self.targets
                and template.render(run, tag) == text
            )


def _sending(
    app: Celery, task: Any, options: Mapping[str, Any]
) -> tuple[Callable[..., Any], dict[str, Any], dict[str, Any]]:
    """Return what sends a task, given by its name if the app has none; its headers and options.

    Nobody waits for the result here: with ignore_result Celery does not subscribe to it, which
    would last as long as the process; the header tells the worker what the task says.
    """
    is_unknown = isinstance(task, str)
    send = partial(app.send_task, task) if is_unknown else task.apply_async
    options = with_time_limits(options)
    ignore_result = options.pop("ignore_result", None if is_unknown else task.ignore_result)
    retries = {name: options.pop(name) for name in RETRIES if name in options}
    headers = {"ignore_result": ignore_result, **(options.pop("headers", None) or {})}
    if retries:
        headers[RETRY_HEADER] = retries
    return send, headers, {**options, "ignore_result": True}


# The transports that deliver larger priorities first; others do it the other way or not at all.
_LARGE_FIRST = frozenset(("amqp", "qpid", "mongodb", "zookeeper"))


def _priority(app: Celery, name: str, task: Any, options: Mapping[str, Any]) -> int:
    """Return the priority of a task's messages; routers that are functions are not asked."""
    routes = (route(name) for route in app.amqp.routes if isinstance(route, MapRoute))
    try:
        route = next(filter(None, routes), {})
    except Exception as exc:  # whatever it is, the router meets it too when a message is built
        logger.debug("No route for %s: %r", name, exc)
        route = {}
    # A task that the app knows has the app's default for its own.
    found = [options.get("priority"), getattr(task, "priority", None), route.get("priority")]
    return next((int(text) for text in map(str, found) if text.lstrip("-").isdecimal()), 0)


def _within(run: Run, task: str, task_id: str) -> MessageTrace | Untraced:
    return UNTRACED if run.journey is None else run.journey.message(task, task_id)


def _is_lazy(definition: Definition) -> bool:
    """Say whether arguments are evaluated at each sending."""
    return any(
        isinstance(value, BeatLazyFunc) for value in (*definition.args, *definition.kwargs.values())
    )


def _arguments(definition: Definition) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of one run.

    Raises:
        _UserCodeError: a lazy argument failed.
    """
    try:
        args = tuple(_evaluated(value) for value in definition.args)
        return args, {key: _evaluated(value) for key, value in definition.kwargs.items()}
    except Exception as exc:
        raise _UserCodeError(f"{type(exc).__name__}: {exc}") from exc


class _UserCodeError(Exception):
    """A router or a lazy argument failed: neither the broker nor the message is to blame."""


class _Router:
    """Celery's router, whose failures are told from the broker's."""

    def __init__(self, app: Celery) -> None:
        self._amqp = app.amqp
        self._router = app.amqp.router
        self.queue: str | None = None  #: the name of the queue that the last message went to

    def route(self, *args: Any, **kwargs: Any) -> Any:
        try:
            options = self._router.route(*args, **kwargs)
        except QueueNotFound:
            raise
        except Exception as exc:
            raise _UserCodeError(f"{type(exc).__name__}: {exc}") from exc
        queue = options.get("queue")
        if queue is None and options.get("exchange") is None:
            queue = self._amqp.default_queue
        self.queue = getattr(queue, "name", queue)
        return options


def _is_celerys(app: Celery, task: Any) -> bool:
    """Say whether Celery's own code sends the task's messages: neither overridden nor patched."""
    senders: list[Any] = [(type(app).send_task, Celery.send_task)]
    if task is not None:
        kind = type(task)
        senders += [(kind.apply_async, Task.apply_async), (kind.shadow_name, Task.shadow_name)]
    return (
        app.conf.task_protocol == 2
        and all(
            used is own
            and type(own) is FunctionType
            and own.__code__.co_filename.startswith(_CELERY)
            for used, own in senders
        )
        and not getattr(task, "expires", None)
    )


_CELERY = str(Path(celery.__file__).parent)


def _destination(app: Celery, task: str, options: Mapping[str, Any]) -> tuple[Any, ...] | None:
    """Return what decides to which queue a message goes, None when that may change each time."""
    if "declare" in options or not all(isinstance(route, MapRoute) for route in app.amqp.routes):
        return None
    destination = (task, *(options.get(name) for name in ("queue", "exchange", "routing_key")))
    return destination if all(isinstance(part, str | None) for part in destination) else None


def open_limited(app: Celery, timeout: float) -> Any:
    """Return a new connection to an app's broker, each of whose calls has a time limit.

    Raises:
        Exception: the broker can not be reached; whatever its client raises.
    """
    connection = app.connection_for_write()
    _limit(connection, timeout)
    try:
        _open(connection)
    except BaseException:
        connection.collect()
        raise
    return connection


def _limit(connection: Any, timeout: float) -> None:
    """Give every call on a connection its time limit, unless the app has set one."""
    names = _TIME_LIMITS.get(connection.transport.driver_type, ())
    limits = dict.fromkeys(names, timeout)
    connection.transport_options = {**limits, **(connection.transport_options or {})}
    connection.connect_timeout = min(connection.connect_timeout or timeout, timeout)


def _open(connection: Any) -> None:
    """Connect, trying each host once: connect() itself would try again two seconds later."""
    hosts = len(connection.alt or ()) or 1
    connection.ensure_connection(max_retries=hosts - 1, interval_start=0)


def failures_of(transport: Any) -> tuple[type[BaseException], ...]:
    """Return what a transport raises for a broker's fault.

    Some list KeyError among their connection errors; here that is an unknown queue or serializer.
    """
    listed = (*transport.connection_errors, *transport.channel_errors)
    return (
        OperationalError,
        OSError,
        *(kind for kind in listed if not issubclass(kind, LookupError)),
    )


def _fault(exc: Exception) -> RefusedError | UnsendableError:
    """Return what a failure that is not the broker's makes of its message."""
    if isinstance(exc, RefusedError):
        return exc
    if isinstance(exc, (_UserCodeError, canvas.ResultBackendError)):
        return RefusedError(masked(exc)[:_LONGEST_REASON])
    text = masked(f"its message can not be built: {type(exc).__name__}: {exc}")
    return UnsendableError(text[:_LONGEST_REASON])


def _refused(exc: BaseException) -> RefusedError:
    return RefusedError(masked(f"{type(exc).__name__}: {exc}")[:_LONGEST_REASON])


def _evaluated(value: Any) -> Any:
    return value() if isinstance(value, BeatLazyFunc) else value
