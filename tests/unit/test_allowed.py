"""Which tasks a definition would have sent, wherever they are named; and which may be sent."""

from __future__ import annotations

from typing import Any

import pytest
from celery import Celery, chord, group

from celery_dtimer.allowed import AllowedTasks, tasks_of
from celery_dtimer.canvas import parts_of
from celery_dtimer.errors import InvalidTimerError, SettingsError
from celery_dtimer.messages import keep
from celery_dtimer.model import Definition, decode_definition
from celery_dtimer.schedules import Interval
from celery_dtimer.settings import Settings

EVERY = Interval(60_000)

app = Celery("shop", broker="memory://", backend="cache+memory://", set_as_current=False)


def task(name: str) -> Any:
    """Return a task of the app."""

    @app.task(name=name, shared=False)
    def run(*args: Any) -> None:
        """Do nothing."""

    return run


good, evil, other = task("shop.good"), task("shop.evil"), task("shop.other")


def define(canvas: Any = None, **fields: Any) -> Definition:
    """Return a definition of a canvas, or of the good task with these fields."""
    if canvas is None:
        return Definition("t", "shop.good", EVERY, **fields)
    name, args, kwargs, options = parts_of(canvas, app)
    return Definition("t", name, EVERY, args, kwargs, options)


def raw(task: str, subtask_type: str | None = None, **kwargs: Any) -> dict[str, Any]:
    """Return a signature as somebody may write it who wants to hide what it sends."""
    return {"task": task, "args": [], "kwargs": kwargs, "options": {}, "subtask_type": subtask_type}


EVIL = dict(evil.s())

DEFINITIONS = {
    "the task itself": Definition("t", "shop.evil", EVERY),
    "a step of a chain": define(good.s() | evil.s()),
    "a member of a group": define(group(good.s(), evil.s())),
    "a chord's body": define(chord([good.s(), good.s()], evil.s())),
    "a chord's header": define(chord([good.s(), evil.s()], good.s())),
    "a group in a chain": define(good.s() | group(good.s(), evil.s()) | good.s()),
    "what is mapped": define(evil.map([1])),
    "what is mapped in chunks": define(evil.chunks([(1,)], 1)),
    "a link": define(options={"link": EVIL}),
    "a link in a list": define(options={"link": [dict(good.s()), EVIL]}),
    "an error link by name": define(options={"link_error": ["shop.evil"]}),
    "a link of a link": define(options={"link": {**good.s(), "options": {"link": [EVIL]}}}),
    "a link of a step": define(good.s() | good.s().set(link=evil.s())),
    "the option chain": define(options={"chain": [EVIL]}),
    "the option chord": define(options={"chord": EVIL}),
    "a header": define(options={"headers": {"task": "shop.evil"}}),
    "a header of a step": define(good.s().set(headers={"task": "shop.evil"}) | good.s()),
    "a canvas in disguise": define(options={"link": raw("shop.good", "group", tasks=[EVIL])}),
    "a canvas beside a decoy": Definition(
        "t", "celery.chord", EVERY, kwargs={"task": "shop.good", "header": [EVIL], "body": EVIL}
    ),
    "a canvas in the arguments of Celery's group": Definition(
        "t", "celery.group", EVERY, args=[[EVIL], None, "id", []]
    ),
    "a canvas named by a header": define(
        args=[[EVIL]], options={"headers": {"task": "celery.group"}}
    ),
    "what unlocks a chord": Definition("t", "celery.chord_unlock", EVERY, args=["id", EVIL]),
}


@pytest.mark.parametrize("definition", DEFINITIONS.values(), ids=DEFINITIONS.keys())
def test_a_task_is_found_wherever_it_is_named(definition: Definition) -> None:
    assert "shop.evil" in set(tasks_of(definition))
    assert "shop.evil" in set(tasks_of(decode_definition(definition.blob)))
    with pytest.raises(InvalidTimerError, match=r"'shop\.evil'.*dtimer_allowed_tasks"):
        AllowedTasks(["shop.good"]).check(definition)
    AllowedTasks(["shop.*"]).check(definition)
    AllowedTasks(None).check(definition)


def test_arguments_of_ordinary_tasks_are_their_own_business() -> None:
    definition = define(args=[EVIL], kwargs={"note": {"task": "water the plants"}})
    assert set(tasks_of(definition)) == {"shop.good"}


@pytest.mark.parametrize(
    ("patterns", "task", "is_allowed"),
    [
        ([], "a", False),
        (["a"], "a", True),
        (["a"], "A", False),
        (["a"], "ab", False),
        (["a*"], "ab", True),
        (["a?c", "x"], "abc", True),
        (["a*"], "a\nb", True),
        (["a"], "a\n", False),
        (["shop.*"], "shopxgood", False),
        (["[ab]"], "a", True),
    ],
)
def test_names_are_matched_as_a_whole(patterns: list[str], task: str, is_allowed: bool) -> None:
    assert AllowedTasks(patterns).allows(task) is is_allowed


def test_what_the_code_declares_is_allowed_besides() -> None:
    declared = define(good.s() | other.s())
    allowed = AllowedTasks(["x"], [declared])
    allowed.check(declared)
    allowed.check(Definition("of one's own", "shop.other", EVERY))
    with pytest.raises(InvalidTimerError):
        allowed.check(Definition("t", "shop.evil", EVERY))


# ------------------------------------------------------------------ calls that wait


def kept(name: str = "shop.good", args: Any = (), protocol: int = 2, **options: Any) -> Definition:
    """Return what is stored of a call."""
    serializer, compression = options.pop("serializer", "json"), options.pop("compression", None)
    build = app.amqp.as_task_v2 if protocol == 2 else app.amqp.as_task_v1
    extra = options.pop("headers", {})
    message = build("id", name, args, {}, **options)
    how = {
        "serializer": serializer,
        "compression": compression,
        "headers": {**message.headers, **extra},
        "exchange": "",
        "routing_key": "celery",
        "delivery_mode": None,
        "declare": [],
        **message.properties,
    }
    return keep("id", name, message.body, how)


CALLS = {
    "the task itself": kept("shop.evil"),
    "a callback": kept(callbacks=[EVIL]),
    "an errback": kept(errbacks=[EVIL]),
    "an errback by name": kept(errbacks=["shop.evil"]),
    "a chain": kept(chain=[EVIL]),
    "a chord": kept(chord=EVIL),
    "a header": kept(headers={"task": "shop.evil"}),
    "a chain among the headers": kept(headers={"chain": [EVIL]}),
    "a typed body": kept(args=[b"\x00"], callbacks=[EVIL]),
    "protocol 1": kept(protocol=1, callbacks=[EVIL]),
    "a group": kept("celery.group", args=[[EVIL], None, "id", []]),
    "a group by a header": kept(args=[[EVIL]], headers={"task": "celery.group"}),
}


@pytest.mark.parametrize("definition", CALLS.values(), ids=CALLS.keys())
def test_a_task_is_found_wherever_a_kept_message_names_it(definition: Definition) -> None:
    assert "shop.evil" in set(tasks_of(decode_definition(definition.blob)))
    with pytest.raises(InvalidTimerError, match=r"'shop\.evil'"):
        AllowedTasks(["shop.good"]).check(definition)


@pytest.mark.parametrize("how", [{"serializer": "pickle"}, {"compression": "zlib"}])
def test_of_a_body_that_is_not_read_nothing_is_allowed_but_by_all(how: dict[str, str]) -> None:
    definition = kept(**how)
    with pytest.raises(InvalidTimerError, match="no task can be seen"):
        AllowedTasks(["*"]).check(definition)
    AllowedTasks(None).check(definition)


def test_an_ordinary_call_is_allowed_by_its_name() -> None:
    assert set(tasks_of(kept(args=[1, {"task": "x"}]))) == {"shop.good"}
    assert set(tasks_of(kept(protocol=1))) == {"shop.good"}


# ------------------------------------------------------------------ the setting


@pytest.mark.parametrize("value", ["shop.good", [""], [1], {"shop": 1}, 7])
def test_a_setting_that_is_no_list_of_names_is_refused(value: Any) -> None:
    made = Celery("shop", broker="redis://localhost", set_as_current=False)
    made.conf.dtimer_allowed_tasks = value
    with pytest.raises(SettingsError, match="dtimer_allowed_tasks"):
        Settings.from_app(made)
