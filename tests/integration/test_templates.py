"""What comes from a template is, byte for byte, what Celery builds, but for the delivery tag."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import celery
import pytest
from celery import Celery, Task, signals
from celery.app.defaults import NAMESPACES as DEFAULTS
from celery.beat import BeatLazyFunc
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from celery_dtimer.model import Run
from celery_dtimer.publisher import Publisher
from celery_dtimer.store import Message
from celery_dtimer.templates import delivery_tag
from tests.conftest import MakeApp
from tests.integration.test_publisher import MakePublisher, a_task, make_publisher, run_of
from tests.naming import named
from tests.servers import RedisServer

__all__ = ["make_publisher"]

PLAIN = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(max_size=40),
    st.sampled_from(["%s", "%", '"delivery_tag": "x"', "\\", "'", '"', "\0\1\2", "x" * 2_000]),
    st.uuids(),
    st.datetimes(),
    st.binary(max_size=20),
)
VALUES = st.recursive(
    PLAIN,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3)
    ),
    max_leaves=6,
)
TIMERS = st.fixed_dictionaries(
    {
        "name": st.text(min_size=1, max_size=60) | st.sampled_from(["%d", "a\nb", "n" * 500]),
        "args": st.lists(VALUES, max_size=4),
        "kwargs": st.dictionaries(st.text(min_size=1, max_size=9), VALUES, max_size=3),
    }
)
OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "queue": st.sampled_from(["other", "a b", "%s"]),
        "priority": st.sampled_from([0, 3, 9]),
        "serializer": st.sampled_from(["json", "pickle"]),
        "compression": st.sampled_from(["zlib", "bzip2"]),
        "headers": st.dictionaries(st.sampled_from(["x", "%s", "é"]), PLAIN, max_size=2),
        "time_limit": st.integers(1, 99),
        "soft_time_limit": st.integers(1, 99),
        "ignore_result": st.booleans(),
        "shadow": st.text(max_size=9),
        "argsrepr": st.sampled_from(["(hidden)", "%s"]),
        "kwargsrepr": st.just("{hidden}"),
        "group_id": st.just("a-group"),
        "delivery_mode": st.sampled_from([1, 2]),
        "reply_to": st.just("somebody"),
        "retry": st.booleans(),
    },
)


@pytest.fixture
def publishers(make_app: MakeApp, make_publisher: MakePublisher) -> Callable[..., Any]:
    """Make a publisher with templates and one that never uses them, on one app."""

    def make(**conf: Any) -> tuple[Celery, Publisher, Publisher]:
        app = make_app(**conf)
        full = make_publisher(app)
        full._uses_templates = lambda: False  # type: ignore[method-assign]
        return app, make_publisher(app), full

    return make


@pytest.fixture
def taught(publishers: Any) -> tuple[Publisher, Publisher]:
    """Return the two publishers of an app with a task."""
    app, publisher, full = publishers()
    a_task(app, "registered")
    return publisher, full


def built(publisher: Publisher, run: Run) -> tuple[Any, str]:
    """Return where a run's message goes, and its text but for the delivery tag."""
    (message,) = publisher.build([run])
    assert isinstance(message, Message), message
    text = message.values[0]
    tag = delivery_tag(text)
    assert tag is not None
    return message.targets, text.replace(tag, "TAG")


def uses_template(publisher: Publisher, run: Run) -> bool:
    """Say whether the messages of a run's timer come from a template."""
    return run.definition in publisher._templates


def teach(publisher: Publisher, **fields: Any) -> None:
    """Let a publisher see two messages of a kind."""
    for number in (1, 2):
        built(publisher, run_of(number, **fields))


@settings(
    max_examples=100,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(options=OPTIONS, first=TIMERS, other=TIMERS, number=st.integers(1, 10**9))
@pytest.mark.parametrize("task", ["registered", "unknown"])
def test_a_template_says_what_celery_says(
    taught: Any, task: str, options: Any, first: Any, other: Any, number: int
) -> None:
    publisher, full = taught
    teach(publisher, task=task, options=options, **first)
    run = run_of(number, task=task, options=options, **other)
    for each in (run, run._replace(number=number + 1, scheduled_ms=run.scheduled_ms + 86_400_001)):
        assert built(publisher, each) == built(full, each)
        assert uses_template(publisher, run)


@pytest.mark.parametrize(
    "conf",
    [
        {"task_routes": {"record": {"queue": "routed", "priority": 6}}},
        {"task_default_priority": 9},
        {"task_compression": "zlib"},
        {"task_serializer": "pickle"},
        {"broker_transport_options": {"global_keyprefix": "the test's"}},
        {"broker_transport_options": {"priority_steps": [0, 5], "sep": ":"}},
        pytest.param(
            {"task_repr_maxlevels": 1},
            marks=pytest.mark.skipif(
                "repr_maxlevels" not in DEFAULTS["task"], reason="Celery does not know it"
            ),
        ),
        {"task_ignore_result": True, "result_backend": "cache+memory://"},
    ],
    ids=lambda conf: next(iter(conf)),
)
def test_a_template_follows_the_apps_settings(
    publishers: Any, prefix: str, conf: dict[str, Any]
) -> None:
    if "global_keyprefix" in conf.get("broker_transport_options", {}):
        conf["broker_transport_options"]["global_keyprefix"] = prefix
    _, publisher, full = publishers(**conf)
    arguments = [[[["deep"]]]]
    teach(publisher, args=arguments)
    run = run_of(3, args=[*arguments, 2], kwargs={"a": {"b": {"c": {"d": 1}}}})
    assert built(publisher, run) == built(full, run)
    assert uses_template(publisher, run)


class Overridden(Task):  # type: ignore[type-arg]
    """A task class that does its own on each sending."""

    abstract = True

    def apply_async(self, *args: Any, **kwargs: Any) -> Any:
        """Send as always."""
        return super().apply_async(*args, **kwargs)


@pytest.mark.parametrize(
    "case",
    [
        {"options": {"expires": 10}},
        {"options": {"countdown": 10}},
        {"options": {"eta": "2099-01-01T00:00:00"}},
        {"options": {"exchange": "somewhere", "routing_key": "x"}},
        {"args": [BeatLazyFunc(lambda: 1)], "stored": False},
        {"task": "overridden"},
        {"task": "expiring"},
        {"conf": {"task_routes": (lambda *_, **__: {"queue": "other"},)}},
        {"conf": {"task_send_sent_event": True}},
        {"conf": {"task_protocol": 1}},
    ],
    ids=named,
)
def test_what_is_evaluated_for_each_message_takes_the_full_path(
    publishers: Any, case: dict[str, Any]
) -> None:
    app, publisher, _ = publishers(**case.pop("conf", {}))
    a_task(app, "overridden", base=Overridden)
    a_task(app, "expiring", expires=10)
    for number in range(4):
        run = run_of(number, **case)
        (message,) = publisher.build([run])
        assert isinstance(message, Message)
        assert not uses_template(publisher, run)


@pytest.mark.skipif(
    celery.VERSION < (5, 6), reason="Celery itself may keep an old list of receivers"
)
@pytest.mark.parametrize("name", ["before_task_publish", "after_task_publish"])
def test_a_receiver_sees_every_message_from_when_it_is_there(publishers: Any, name: str) -> None:
    _, publisher, _ = publishers()
    teach(publisher)
    built(publisher, run_of(3))
    seen: list[str] = []

    def receive(headers: dict[str, Any], **_: Any) -> None:
        seen.append(headers["id"])

    getattr(signals, name).connect(receive)
    try:
        run = run_of(4)
        (message,) = publisher.build([run])
        assert isinstance(message, Message)
        if message.published is not None:
            message.published()
    finally:
        getattr(signals, name).disconnect(receive)
    assert seen == [run.task_id]


def test_a_kind_whose_messages_differ_by_themselves_is_never_sent_from_a_template(
    publishers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody knows what else may change a message: two of them are compared."""
    app, publisher, _ = publishers()
    numbers = iter(range(100))
    create = app.amqp.create_task_message

    def changing(*args: Any, **kwargs: Any) -> Any:
        message = create(*args, **kwargs)
        message.headers["trace"] = next(numbers)
        return message

    app.amqp.create_task_message = changing
    for number in range(4):
        run = run_of(number)
        assert f'"trace": {number}' in built(publisher, run)[1]
        assert not uses_template(publisher, run)


def test_arguments_that_the_task_does_not_take_are_found_with_a_template_too(
    publishers: Any,
) -> None:
    app, publisher, _ = publishers()

    def strict(a: int) -> None: ...

    a_task(app, "strict", strict)
    teach(publisher, task="strict", args=[1])
    (refusal,) = publisher.build([run_of(3, task="strict", args=[1, 2])])
    assert "takes" in str(refusal)


def test_templates_are_ready_for_what_is_expected(
    publishers: Any, redis_server: RedisServer, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    app, publisher, full = publishers()
    a_task(app, "registered")
    runs = [run_of(number, task="registered") for number in (1, 2, 3)]
    assert publisher.connect() is None
    publisher.expect(runs)
    assert all(uses_template(publisher, run) for run in runs[1:])
    assert not redis_server.client.exists(prefix + "queue")
    expected = [built(full, run) for run in runs[1:]]
    monkeypatch.setattr(publisher, "_built", lambda run: pytest.fail("Celery is asked"))
    assert [built(publisher, run) for run in runs[1:]] == expected


def test_nothing_is_got_ready_where_messages_are_built_one_by_one(
    publishers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    _app, publisher, full = publishers()
    runs = [
        run_of(1, stored=False, args=[BeatLazyFunc(lambda: 1)]),
        run_of(2, options={"expires": 10}),
    ]
    for each in (publisher, full):
        monkeypatch.setattr(each, "_built", lambda run: pytest.fail("built"))
        each.expect(runs)  # not connected
        assert each.connect() is None
        each.expect(runs)
    full.expect([run_of(3)])
    assert not publisher._templates
