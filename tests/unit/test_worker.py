"""The task of a callback: what it receives, and what Celery checks of it."""

from __future__ import annotations

import inspect
import logging
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery, Task

from celery_dtimer import DistributedTimer
from celery_dtimer.errors import InvalidTimerError
from celery_dtimer.worker import CallbackTimer, RunClaims, callback_body, remembered_ms, timer_of
from tests.servers import free_port

HEADER = {
    "id": "x" * 26,
    "name": "nightly",
    "service": "orders",
    "instance": "host:1:a",
    "scheduled_at": "2026-03-01T12:30:00.250+00:00",
    "run": 3,
}
TIMER = CallbackTimer(
    "x" * 26,
    "nightly",
    "orders",
    "host:1:a",
    datetime(2026, 3, 1, 12, 30, 0, 250_000, tzinfo=timezone.utc),
    3,
)


@pytest.fixture
def app() -> Celery:
    return Celery("shop", set_as_current=False)


def task_of(app: Celery, function: Any) -> Task[..., Any]:
    decorator: Any = app.task(bind=True, name=f"shop.{function.__name__}", shared=False)
    task: Task[..., Any] = decorator(callback_body(function))
    return task


def run(task: Any, *args: Any, **options: Any) -> Any:
    """Run a task in this process as a worker would, and return its result."""
    return task.apply(args=args, **options).get()


def test_a_timer_is_read_from_the_header() -> None:
    assert CallbackTimer.from_header(HEADER) == TIMER


def test_a_header_of_a_broadcast_run_tells_the_shard() -> None:
    assert (TIMER.shard_index, TIMER.shard_total) == (0, 1)
    timer = CallbackTimer.from_header({**HEADER, "shard_index": 2, "shard_total": 5})
    assert timer == replace(TIMER, shard_index=2, shard_total=5)


@pytest.mark.parametrize(
    "request_",
    [SimpleNamespace(dtimer=HEADER), SimpleNamespace(dtimer=None, headers={"dtimer": HEADER})],
)
def test_the_header_is_found_where_celery_puts_it(request_: Any) -> None:
    assert timer_of(request_) == TIMER


@pytest.mark.parametrize("headers", [None, {}, {"other": 1}])
def test_another_message_has_no_timer(headers: Any) -> None:
    assert timer_of(SimpleNamespace(headers=headers)) is None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("id", None),
        ("id", "two words"),
        ("id", "a\nb"),
        ("name", 7),
        ("service", ["orders"]),
        ("scheduled_at", "2026-01-01T03:00:00"),
        ("scheduled_at", "1969-12-31T00:00:00+00:00"),
        ("scheduled_at", "soon"),
        ("run", -1),
        ("run", "4"),
        ("run", 2**60),
        ("resent", True),
    ],
)
def test_a_header_that_no_instance_has_written_is_none_of_a_timer(
    field: str, value: Any, caplog: pytest.LogCaptureFixture
) -> None:
    header = {**HEADER, field: value}
    with pytest.raises(InvalidTimerError, match=field):
        CallbackTimer.from_header(header)
    assert timer_of(SimpleNamespace(dtimer=header)) is None
    assert field in caplog.text


def test_a_callback_gets_its_timer_first_and_then_its_own_arguments(app: Celery) -> None:
    def callback(timer: Any, first: int, *, second: int = 0) -> Any:
        return timer, first, second

    task = task_of(app, callback)
    headers = {"dtimer": HEADER}
    assert run(task, 1, kwargs={"second": 2}, headers=headers) == (TIMER, 1, 2)


def test_sent_by_other_means_it_gets_none(app: Celery) -> None:
    def callback(timer: Any, x: int) -> Any:
        return timer, x

    assert run(task_of(app, callback), 5) == (None, 5)


def test_called_as_a_function_it_is_the_function(app: Celery) -> None:
    def callback(timer: Any, x: int = 0) -> Any:
        return timer, x

    task = task_of(app, callback)
    assert task("a timer of the test", x=1) == ("a timer of the test", 1)
    with pytest.raises(TypeError):
        task()


def everything(timer: Any, /, a: int, b: int = 2, *rest: int, c: int = 3, **more: int) -> Any:
    return timer, a, b, rest, c, more


def any_number(*timer_and_more: Any) -> Any:
    return timer_and_more


def named_self(timer: Any, self: int) -> Any:
    return self


@pytest.mark.parametrize(
    ("function", "args", "kwargs", "result"),
    [
        (everything, (1,), {}, (None, 1, 2, (), 3, {})),
        (everything, (1, 9, 8), {"c": 7, "d": 6}, (None, 1, 9, (8,), 7, {"d": 6})),
        (any_number, (1, 2), {}, (None, 1, 2)),
        (named_self, (4,), {}, 4),
        (named_self, (), {"self": 4}, 4),
    ],
)
def test_any_signature_works(
    app: Celery, function: Any, args: Any, kwargs: Any, result: Any
) -> None:
    task = task_of(app, function)
    assert run(task, *args, kwargs=kwargs) == result


@pytest.mark.parametrize(("args", "kwargs"), [((), {}), ((1, 2), {}), ((1,), {"b": 2})])
def test_celery_checks_the_arguments_without_the_timer(app: Celery, args: Any, kwargs: Any) -> None:
    def callback(timer: Any, a: int) -> None: ...

    with pytest.raises(TypeError, match="callback"):
        task_of(app, callback).apply_async(args, kwargs)


def test_the_task_keeps_the_functions_name_and_text() -> None:
    body = callback_body(everything)
    assert (body.__name__, body.__wrapped__) == ("everything", everything)  # type: ignore[attr-defined]
    assert list(inspect.signature(body).parameters)[1:] == ["a", "b", "rest", "c", "more"]


def no_arguments() -> None: ...


def keywords_only(*, timer: Any) -> None: ...


def only_more(**more: Any) -> None: ...


@pytest.mark.parametrize("function", [no_arguments, keywords_only, only_more])
def test_a_function_without_room_for_its_timer_is_refused(function: Any) -> None:
    with pytest.raises(InvalidTimerError, match="first argument is its timer"):
        callback_body(function)


def test_an_error_in_the_callback_is_the_tasks(app: Celery) -> None:
    def callback(timer: Any) -> None:
        raise LookupError("the callback's own")

    result = task_of(app, callback).apply()
    assert result.state == "FAILURE"
    assert isinstance(result.result, LookupError)


# ------------------------------------------------------------------ run once


@pytest.mark.parametrize(
    ("run_once", "ms"),
    [
        (False, None),
        (None, None),
        (True, 86_400_000),
        (60, 60_000),
        (0.001, 1),
        (timedelta(hours=1), 3_600_000),
        (timedelta(days=3650), 315_360_000_000),
    ],
)
def test_how_long_a_run_is_remembered(run_once: Any, ms: int | None) -> None:
    assert remembered_ms(run_once) == ms


@pytest.mark.parametrize(
    "run_once", [0, -1, 0.0001, "1", [], float("nan"), float("inf"), timedelta(0), 1e12]
)
def test_what_is_no_time_is_refused(app: Celery, run_once: Any) -> None:
    with pytest.raises(InvalidTimerError, match=r"run_once=.*1 ms to 3650 days"):
        DistributedTimer(app).callback(run_once=run_once)


def test_only_what_a_timer_sent_is_to_be_admitted(app: Celery) -> None:
    admitted: list[CallbackTimer] = []

    def callback(timer: Any) -> Any:
        return timer

    decorator: Any = app.task(bind=True, name="shop.callback", shared=False)
    task = decorator(callback_body(callback, lambda request, timer: admitted.append(timer)))
    assert task("called directly") == "called directly"
    assert run(task) is None
    assert admitted == []
    assert run(task, headers={"dtimer": HEADER}) == TIMER
    assert admitted == [TIMER]


@pytest.fixture
def unreachable(app: Celery) -> Celery:
    """An app whose Redis does not answer."""
    app.conf.update(dtimer_redis_url=f"redis://127.0.0.1:{free_port()}/0", broker_url="memory://")
    return app


def request_of(**fields: Any) -> Any:
    return SimpleNamespace(
        **{"id": "an id", "is_eager": False, "retries": 0, "properties": {}, **fields}
    )


def test_a_run_that_can_not_be_claimed_runs_with_one_warning(
    unreachable: Celery, caplog: pytest.LogCaptureFixture
) -> None:
    claims = RunClaims(unreachable)
    for _ in range(2):
        claims.claim(request_of(), TIMER, 1000)
    claims._stores.close()
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "Runs can not be claimed" in record.message


@pytest.mark.parametrize("fields", [{"is_eager": True}, {"retries": 1}])
def test_an_eager_run_and_a_retry_are_not_claimed(
    unreachable: Celery, caplog: pytest.LogCaptureFixture, fields: Any
) -> None:
    RunClaims(unreachable).claim(request_of(**fields), TIMER, 1000)
    assert caplog.records == []


def test_a_callback_that_runs_eagerly_needs_no_redis(unreachable: Celery) -> None:
    @DistributedTimer(unreachable).callback(run_once=True, shared=False)
    def callback(timer: CallbackTimer) -> int:
        return timer.run

    assert run(callback, headers={"dtimer": HEADER}) == HEADER["run"]


# ------------------------------------------------------------------ retries of a timer


class RefusedError(LookupError):
    """An exception of an app."""


def retried(app: Celery, exc: Exception, **policy: Any) -> tuple[int, list[Any]]:
    """Run a callback that always fails, with a timer's retries; return how often, and the waits."""
    tries: list[int] = []
    waits: list[Any] = []

    def callback(timer: Any) -> None:
        tries.append(task.request.retries)
        raise exc

    task = task_of(app, callback)
    before = task.retry

    def retry(**options: Any) -> Any:
        waits.append(options.get("countdown"))
        return before(**options)

    task.retry = retry  # type: ignore[method-assign]
    with pytest.raises(type(exc)):
        run(task, headers={"dtimer": HEADER, "dtimer_retry": policy})
    return len(tries), waits


@pytest.mark.parametrize(
    ("policy", "tries"),
    [
        ({"max_retries": 2}, 3),
        ({"max_retries": 0}, 1),
        ({"max_retries": 2, "autoretry_for": ["builtins.LookupError"]}, 3),
        ({"max_retries": 2, "autoretry_for": [f"{__name__}.RefusedError"]}, 3),
        ({"max_retries": 2, "autoretry_for": ["builtins.KeyError"]}, 1),
        ({"max_retries": 2, "dont_autoretry_for": ["builtins.LookupError"]}, 1),
    ],
)
def test_a_timer_says_after_what_and_how_often_its_callback_is_retried(
    app: Celery, policy: dict[str, Any], tries: int
) -> None:
    assert retried(app, RefusedError("no"), **policy)[0] == tries


def test_the_waits_between_retries_grow_as_celerys(app: Celery) -> None:
    policy = {"retry_backoff": 2, "retry_backoff_max": 5, "retry_jitter": False}
    assert retried(app, RefusedError("no"), max_retries=3, **policy)[1] == [2, 4, 5, 5]


def test_waits_are_jittered_unless_the_timer_says_otherwise(app: Celery) -> None:
    _, waits = retried(app, RefusedError("no"), max_retries=3, retry_backoff=True)
    assert all(0 <= wait <= 2**tries for tries, wait in enumerate(waits))


@pytest.mark.parametrize("policy", [None, "x", 5])
def test_a_header_that_was_tampered_with_is_no_policy(app: Celery, policy: Any) -> None:
    def callback(timer: Any) -> None:
        raise RefusedError("no")

    with pytest.raises(RefusedError):
        run(task_of(app, callback), headers={"dtimer": HEADER, "dtimer_retry": policy})
