"""The commands of ``celery dtimer``, with a real server behind them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import click
import pytest
from celery import Celery
from click.testing import CliRunner

from celery_dtimer import DistributedTimer
from celery_dtimer.cli import dtimer
from celery_dtimer.cli.commands import EXIT_STATUS
from celery_dtimer.membership import local_host
from celery_dtimer.runs import FAILED
from celery_dtimer.store import OutRun
from tests.commands import Ran, run_command
from tests.conftest import QUICK, MakeApp
from tests.waiting import wait_until

NOBODY = "redis://localhost:1/0"


Run = Callable[..., Ran]


@pytest.fixture
def app(make_app: MakeApp) -> Celery:
    return make_app()


@pytest.fixture
def timers(app: Celery) -> Iterator[DistributedTimer]:
    """The app's own timers, with a task and a callback."""
    timers = DistributedTimer(app)

    @app.task(name="shop.bill")
    def bill(*_: Any, **__: Any) -> None: ...

    @timers.callback("remind")
    def remind(timer: Any) -> None: ...

    yield timers
    timers.stop()
    timers.store.close()


@pytest.fixture
def run(app: Celery, timers: DistributedTimer) -> Run:
    return lambda *args, **more: run_command(app, *args, **more)


def create(run: Run, name: str = "nightly", *more: str) -> Any:
    schedule = () if any(each in more for each in ("--cron", "--at")) else ("--every", "1h")
    ran = run("create", name, *schedule, "--task", "shop.bill", "--json", *more)
    assert ran.status == 0, ran
    return ran.document


# ------------------------------------------------------------------ what all have in common


def test_every_command_tells_its_exit_status_and_takes_json() -> None:
    def commands(group: Any) -> Iterator[Any]:
        context = click.Context(group)
        for name in group.list_commands(context):
            command = group.get_command(context, name)
            yield from commands(command) if isinstance(command, click.Group) else [command]

    found = list(commands(dtimer))
    assert len(found) > 25
    for command in found:
        text = CliRunner().invoke(command, ["--help"]).stdout
        assert "Exit status:" in text, command.name
        assert "--json" in text, command.name
        assert command.help, command.name
    assert "2  wrong use" in EXIT_STATUS


@pytest.mark.parametrize(
    "args",
    [
        ("list",),
        ("show", "nightly"),
        ("preview", "nightly"),
        ("why", "nightly", "now"),
        ("pause", "nightly"),
        ("resume", "nightly"),
        ("trigger", "nightly"),
        ("stop", "nightly"),
        ("delete", "nightly", "--yes"),
        ("runs",),
        ("dead", "list"),
        ("dead", "purge", "--yes"),
        ("pending",),
        ("audit",),
        ("instances",),
        ("health",),
        ("doctor", "--worker-timeout", "0"),
        ("top", "--interval", "0.1"),
        ("update", "nightly", "--every", "2h"),
        ("reshard", "1"),
        # Wrong ones:
        ("show", "nigthly"),
        ("why", "nigthly", "now"),
        ("why", "nightly", "soon"),
        ("preview", "nigthly"),
        ("pause", "nigthly"),
        ("delete", "nigthly", "--yes"),
        ("delete", "nightly"),
        ("list", "--status", "odd"),
        ("list", "--instance", "nobody"),
        ("list", "--task", "shop.bil"),
        ("pending", "--task", "shop.bil"),
        ("update", "nightly", "--unset", "qeueu"),
        ("create", "x", "--solar", "sunrize", "48", "2", "--task", "shop.bill"),
        ("create", "x", "--solar", "sunrise", "nan", "inf", "--task", "shop.bill"),
        ("top", "--interval", "nan"),
        ("audit", "--until", "0001-01-01"),
        ("audit", "--since", "in 1d"),
        ("list", "--no-such-option"),
        ("create", "x", "--every", "1h"),
        ("create", "x", "--every", "1h", "--task", "shop.bil"),
        ("create", "x", "--cron", "* * * *", "--task", "shop.bill"),
        ("update", "nightly"),
        ("runs", "nigthly"),
        ("dead", "requeue", "nothing"),
        ("cancel", "nothing"),
        ("audit", "nigthly"),
        ("health", "--instance", "nobody"),
        ("reshard", "0"),
        ("lsit",),
    ],
)
def test_json_is_exactly_one_document_whatever_is_found(run: Run, args: tuple[str, ...]) -> None:
    create(run)
    ran = run(*args, "--json")
    document = json.loads(ran.out)  # nothing before it, nothing after it
    assert ran.status in (0, 1, 2)
    assert (ran.status == 2) == (
        isinstance(document, dict)
        and document.get("error", {}).get("type") not in (None, "Aborted")
    )
    assert "Traceback" not in ran.err


@pytest.mark.parametrize(
    ("args", "suggestion"),
    [
        (("show", "nigthly"), "'nightly'"),
        (("lsit",), "'list'"),
        (("dead", "lsit"), "'list'"),
        (("delete", "Nightly2"), "'nightly'"),
        (("create", "x", "--every", "1h", "--task", "shop.bil"), "'shop.bill'"),
        (("create", "x", "--every", "1h", "--task", "remnid"), "'remind'"),
        (("create", "x", "--every", "1h", "--task", "bill"), "'shop.bill'"),
        (("list", "--task", "shop.bil"), "'shop.bill'"),
        (("update", "nightly", "--unset", "description2"), "'description'"),
        (("--service", "order", "list"), "'orders'"),
        (("list", "--statsu", "active"), "--status"),
    ],
)
def test_a_wrong_name_suggests_the_right_one(
    run: Run, args: tuple[str, ...], suggestion: str
) -> None:
    create(run)
    ran = run(*args)
    assert ran.status == 2
    assert ran.out == ""
    assert suggestion in ran.err
    assert "Traceback" not in ran.err


def test_without_redis_a_command_says_so_and_its_status_is_3(make_app: MakeApp) -> None:
    app = make_app(dtimer_redis_url=NOBODY)
    ran = run_command(app, "list", "--json")
    assert ran.status == 3
    assert ran.document["error"]["type"] == "StoreUnavailableError"
    assert "localhost:1" in ran.err


def test_no_password_is_shown(make_app: MakeApp) -> None:
    app = make_app(dtimer_redis_url="redis://user:hush@localhost:1/0")
    for args in (("list",), ("list", "--json"), ("doctor",), ("health", "--json")):
        ran = run_command(app, *args)
        assert "hush" not in ran.out + ran.err


def test_a_setting_that_is_wrong_is_wrong_use(make_app: MakeApp) -> None:
    ran = run_command(make_app(dtimer_batch_size=0), "list")
    assert ran.status == 2
    assert "dtimer_batch_size=0" in ran.err


def test_another_service_can_be_named(run: Run, app: Celery) -> None:
    create(run)
    wrong = run("--service", "billing", "list", "--json")
    assert (wrong.status, wrong.document["error"]["type"]) == (2, "ServiceNotFoundError")
    assert [each["name"] for each in run("services", "--json").document] == ["orders"]
    other = DistributedTimer(app, "billing")
    other.create_timer("theirs", 60, "shop.bill")
    ran = run("--service", "billing", "--json", "list")
    assert [each["name"] for each in ran.document] == ["theirs"]
    assert [each["name"] for each in run("list", "--json").document] == ["nightly"]
    other.store.close()


# ------------------------------------------------------------------ looking


def test_a_list_is_sorted_by_the_next_run_or_otherwise(run: Run) -> None:
    create(run, "b", "--every", "3h")
    create(run, "a", "--every", "2h")
    create(run, "c", "--every", "1h")
    run("pause", "c")

    def names(*args: str) -> list[str]:
        return [each["name"] for each in run("list", "--json", *args).document]

    assert names() == ["a", "b", "c"]
    assert names("--sort", "name") == ["a", "b", "c"]
    assert names("--sort", "name", "--offset", "1", "--limit", "1") == ["b"]
    assert names("--status", "paused") == ["c"]
    assert names("--name", "?") == ["a", "b", "c"]
    assert names("--task", "shop.bill") == ["a", "b", "c"]
    assert names("--task", "celery.backend_cleanup") == []


def test_in_a_pipe_a_timer_is_a_line(run: Run) -> None:
    timer = create(run)
    (row,) = run("list").rows
    assert row[:3] == [timer["id"], "nightly", "active"]
    assert datetime.fromisoformat(row[3].replace("Z", "+00:00")) > datetime.now(timezone.utc)


def test_show_tells_all_of_a_timer_by_name_and_by_id(run: Run) -> None:
    timer = create(
        run,
        "nightly",
        *("--cron", "30 2 * * *", "--timezone", "Europe/Paris", "--args", '[1, "two"]'),
        *("--kwargs", '{"a": null}', "--queue", "slow", "--priority", "3", "--jitter", "5s"),
        *("--misfire-grace-time", "1h", "--max-runs", "5", "--overlap", "skip"),
        *("--description", "what it does", "--option", 'headers={"x": 1}'),
    )
    for name in ("nightly", timer["id"]):
        shown = run("show", name, "--json").document
        assert shown == timer
    assert shown["schedule"] == "30 2 * * * (Europe/Paris)"
    assert (shown["args"], shown["kwargs"]) == ([1, "two"], {"a": None})
    assert shown["options"] == {"queue": "slow", "priority": 3, "headers": {"x": 1}}
    assert shown["policy"] == {
        "jitter": 5.0,
        "misfire_grace_time": 3600.0,
        "max_runs": 5,
        "overlap": "skip",
    }
    fields = dict(run("show", "nightly").rows)
    assert fields["option queue"] == "slow"
    assert fields["description"] == "what it does"


def test_preview_shows_ten_runs_and_marks_where_clocks_change(run: Run) -> None:
    after = ("--after", "2027-03-26T12:00", "--timezone", "Europe/Paris")
    rows = run("preview", "0 2 * * *", *after, "--json").document
    assert len(rows) == 10
    assert [row["run_at"] for row in rows[:3]] == [
        "2027-03-27T02:00:00+01:00",
        "2027-03-28T03:00:00+02:00",
        "2027-03-29T02:00:00+02:00",
    ]
    assert [row["clocks_changed_by"] for row in rows[:3]] == [None, 3600.0, None]
    rows = run("preview", "0 2 * * *", *after).rows
    assert rows[1][:2] == ["2027-03-28T01:00:00.000Z", "2027-03-28T03:00:00+02:00"]
    assert [row[-1] for row in rows if row[-1] != "-"] == ["<- clocks went forward 1 h before it"]
    autumn = ("--after", "2027-10-30T23:00", "--timezone", "Europe/Paris", "-n", "5")
    hours = run("preview", "0 * * * *", *autumn, "--json").document
    marked_hours = [row["run_at"] for row in hours if row["clocks_changed_by"] is not None]
    assert marked_hours == ["2027-10-31T02:00:00+01:00"]


def test_preview_of_a_timer_goes_by_its_policy(run: Run) -> None:
    create(run, "few", "--every", "1h", "--max-runs", "3")
    assert len(run("preview", "few", "--json").document) == 3


def test_why_answers_for_a_moment(run: Run) -> None:
    create(run, "nightly", "--start-at", "2099-01-01T00:00Z")
    ran = run("why", "nightly", "2020-01-01T00:00Z", "--json")
    assert ran.status == 0
    assert ran.document["moment"] == "2020-01-01T00:00:00.000Z"
    assert "created" in ran.document["answer"]
    assert "still to come" in run("why", "nightly", "2099-01-01T01:00Z").out
    assert "no run is scheduled" in run("why", "nightly", "2099-01-01T01:30Z").out


# ------------------------------------------------------------------ changing


def test_create_takes_each_kind_of_schedule(run: Run) -> None:
    for options, rule in (
        (("--every", "90s"), "every 90 s"),
        (("--cron", "*/5 * * * *"), "*/5 * * * * (UTC)"),
        (("--rrule", "FREQ=DAILY;BYHOUR=9", "--start-at", "2026-01-01"), "FREQ=DAILY"),
        (("--at", "2099-01-01T00:00Z"), "once at 2099-01-01T00:00:00+00:00"),
        (("--solar", "sunset", "48.8", "2.3"), "sunset at 48.8, 2.3"),
    ):
        ran = run("create", f"t {options[0]}", *options, "--task", "shop.bill", "--json")
        assert ran.status == 0, ran
        assert rule in ran.document["schedule"]


def test_create_takes_the_short_name_of_a_callback_and_an_unknown_task_if_told(run: Run) -> None:
    ran = run("create", "a", "--every", "1h", "--task", "remind", "--json")
    assert ran.document["task"].endswith("remind")
    ran = run("create", "b", "--every", "1h", "--task", "else.where", "--unregistered", "--json")
    assert ran.document["task"] == "else.where"


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--task", "shop.bill"), "--every"),
        (("--every", "1h"), "--task"),
        (("--every", "0", "--task", "shop.bill"), "schedule"),
        (("--every", "1h", "--cron", "* * * * *", "--task", "shop.bill"), "exclude"),
        (("--cron", "61 * * * *", "--task", "shop.bill"), "61"),
        (("--cron", "0 0 31 4 *", "--task", "shop.bill"), "never"),
        (("--every", "1h", "--task", "shop.bill", "--timezone", "Mars/Base"), "Mars/Base"),
        (("--every", "1h", "--task", "shop.bill", "--args", "{}"), "{}"),
        (("--every", "1h", "--task", "shop.bill", "--max-runs", "0"), "max_runs=0"),
        (("--every", "1h", "--task", "shop.bill", "--option", "qeue=a"), "queue"),
        (
            (
                "--every",
                "1h",
                "--task",
                "shop.bill",
                "--end-at",
                "2000-01-01",
                "--start-at",
                "2001-01-01",
            ),
            "end_at",
        ),
    ],
)
def test_what_is_wrong_with_a_timer_is_told_and_nothing_is_stored(
    run: Run, options: tuple[str, ...], told: str
) -> None:
    ran = run("create", "x", *options)
    assert ran.status == 2, ran
    assert told in ran.err
    assert run("list", "--json").document == []


def test_update_changes_what_is_named_and_unsets(run: Run) -> None:
    timer = create(run, "nightly", "--queue", "slow", "--max-runs", "5", "--args", "[1]")
    ran = run(
        "update", "nightly", "--every", "2h", "--unset", "queue", "--unset", "max-runs", "--json"
    )
    assert ran.status == 0, ran
    assert ran.document["schedule"] == "every 2 h"
    assert ran.document["options"] == {}
    assert ran.document["policy"] == {}
    assert ran.document["args"] == [1]
    stale = run("update", "nightly", "--every", "3h", "--if-revision", timer["revision"], "--json")
    assert stale.status == 1
    assert stale.document["error"]["type"] == "ConflictError"
    assert run("update", "nightly", "--unset", "schedule").status == 2


def test_pause_resume_stop_and_trigger_several(run: Run, timers: DistributedTimer) -> None:
    create(run, "a")
    create(run, "b")

    def statuses() -> set[str]:
        return {timer.status for timer in timers.get_timers(name="?")}

    assert run("pause", "a", "b").status == 0
    assert statuses() == {"paused"}
    assert run("resume", "--name", "?", "--yes").status == 0
    assert statuses() == {"active"}
    assert run("stop", "a", "b").status == 0
    assert statuses() == {"stopped"}
    ran = run("pause", "a", "b", "--json")
    assert ran.status == 1
    assert [each["done"] for each in ran.document] == [False, False]
    assert run("trigger", "a").status == 0


def test_one_wrong_name_changes_nothing(run: Run, timers: DistributedTimer) -> None:
    create(run, "a")
    ran = run("delete", "a", "nothing", "--yes")
    assert ran.status == 2
    assert timers.get_timer("a").status == "active"


def test_delete_asks_and_a_pattern_that_matches_nothing_is_wrong(
    run: Run, timers: DistributedTimer
) -> None:
    for name in ("a1", "a2", "b[1]"):
        create(run, name)
    assert run("delete", "--name", "a*", input="n\n").status == 1
    assert len(timers.get_timers()) == 3
    ran = run("delete", "--name", "a*", input="y\n")
    assert (ran.status, ran.out) == (0, "deleted 'a1'\ndeleted 'a2'\n")
    assert "Delete these 2 timers?" in ran.err
    assert run("delete", "--name", "zzz*", "--yes").status == 2
    assert run("delete").status == 2
    assert run("delete", "--name", "b[1]", "--yes").status == 0
    assert timers.get_timers() == []


# ------------------------------------------------------------------ names (case 35)

ODD_NAMES = [
    *("a:b", "a b", "{x}", "*?[]", ":schedule", ":lock", "timer_queue", "meta", "-x", "--json"),
    *("Straße", "STRASSE", "é", "e\u0301", "a\nb", "a\tb", "", "日本", "😀", "'\"\\", "None"),
    "n" * 100_000,
]


def test_odd_names_make_the_round_trip(run: Run, timers: DistributedTimer) -> None:
    """Created, listed, shown, edited, triggered and deleted by name; no other is touched."""
    for name in ODD_NAMES:
        ran = run("create", "--every", "1h", "--task", "shop.bill", "--json", "--", name)
        assert ran.status == 0, (name[:50], ran)
    listed = run("list", "--json").document
    assert sorted(each["name"] for each in listed) == sorted(ODD_NAMES)
    assert len(run("list").rows) == len(ODD_NAMES)  # a line each, whatever is in the name
    for name in ODD_NAMES:
        assert run("show", "--json", "--", name).document["name"] == name
        changed = run("update", "--every", "2h", "--json", "--", name).document
        assert (changed["name"], changed["schedule"]) == (name, "every 2 h")
        for command in ("pause", "resume", "trigger", "stop"):
            assert run(command, "--", name).status == 0, (command, name[:50])
    for left, name in zip(range(len(ODD_NAMES) - 1, -1, -1), ODD_NAMES, strict=True):
        assert run("delete", "--yes", "--", name).status == 0
        assert len(timers.get_timers()) == left


def test_a_pattern_takes_only_stars_and_question_marks(run: Run) -> None:
    for name in ("*?[]", "ab[]", "{x}"):
        create(run, name)
    found = run("list", "--name", "*[]", "--json").document
    assert sorted(each["name"] for each in found) == ["*?[]", "ab[]"]


def test_a_name_that_is_the_id_of_another_timer_misleads_nobody(run: Run) -> None:
    first = create(run, "first")
    second = create(run, first["id"], "--every", "2h")
    changed = run("update", "first", "--description", "the first", "--json").document
    assert changed["id"] == first["id"]
    changed = run("update", first["id"], "--description", "the other", "--json").document
    assert changed["id"] == second["id"]
    assert run("show", "first", "--json").document["description"] == "the first"
    assert run("why", "first", "now", "--json").document["timer_id"] == first["id"]
    assert run("audit", "first", "--json").document[0]["timer_id"] == first["id"]
    assert run("delete", "first", "--yes").status == 0
    assert [each["id"] for each in run("list", "--json").document] == [second["id"]]


def test_nothing_that_is_stored_is_obeyed_by_a_terminal(run: Run, timers: DistributedTimer) -> None:
    evil = "\x1b[31mevil\x07\nline"
    timers.create_timer(evil, 3600, evil, kwargs={evil: evil}, description=evil, queue=evil)
    id = timers.get_timer(evil).id
    run_of_it = OutRun("4b3c", id, 1_750_000_000_000, 1, message="m", worker="celery@here")
    assert timers.store.run_ended(run_of_it, FAILED, error=evil, letter={"reason": FAILED})
    for args in (
        *(("list",), ("show", evil), ("runs",), ("dead", "list", "--arguments")),
        *(("why", evil, "2025-06-15T15:06:40Z"), ("delete", evil), ("audit",)),
        *(("doctor", "--worker-timeout", "0"), ("pause", evil), ("update", evil, "--every", "2h")),
        *(("show", evil + "x"), ("update", evil, "--if-revision", evil, "--every", "3h")),
        *(("health", "--instance", evil), ("top", "--interval", "100ms"), ("cancel", evil)),
    ):
        ran = run(*args)
        assert not {"\x1b", "\x07"} & set(ran.out + ran.err), args


# ------------------------------------------------------------------ pending calls (case 44)


def test_pending_calls_are_listed_searched_and_cancelled(make_app: MakeApp) -> None:
    app = make_app(dtimer_eta_threshold=1)
    timers = DistributedTimer(app)

    @app.task(name="shop.bill")
    def bill(*_: Any, **__: Any) -> None: ...

    @app.task(name="shop.other")
    def other() -> None: ...

    first = bill.apply_async((1,), {"who": "ann"}, countdown=3600)
    second = bill.apply_async((2,), {"who": "bob"}, countdown=7200, queue="slow")
    third = other.apply_async(eta=datetime.now(timezone.utc) + timedelta(days=30))

    def ids(*args: str) -> list[str]:
        return [each["task_id"] for each in run_command(app, "pending", "--json", *args).document]

    assert ids() == [first.id, second.id, third.id]
    assert ids("--task", "shop.bill") == [first.id, second.id]
    assert ids("--queue", "slow") == [second.id]
    assert ids("--args", "[1]") == [first.id]
    assert ids("--kwargs", '{"who": "bob"}') == [second.id]
    assert ids("--after", "in 90m") == [second.id, third.id]
    assert ids("--before", "in 90m") == [first.id]
    assert ids("--limit", "1", "--offset", "1") == [second.id]
    (row, *_) = run_command(app, "pending").rows
    assert row[:2] == [first.id, "shop.bill"]
    assert row[3] == f"{app.conf.task_default_queue}"
    assert "ann" not in run_command(app, "pending", "--json").out
    assert "ann" in run_command(app, "pending", "--json", "--arguments").out
    assert run_command(app, "cancel", second.id).status == 0
    again = run_command(app, "cancel", second.id, "--json")
    assert (again.status, again.document) == (1, [{"task_id": second.id, "done": False}])
    assert ids() == [first.id, third.id]
    for id in (first.id, third.id):
        assert timers.cancel(id)
    timers.store.close()


# ------------------------------------------------------------------ runs and instances


def test_what_a_running_instance_does_is_seen(run: Run, timers: DistributedTimer) -> None:
    id = timers.start()
    wait_until(lambda: timers.get_service_instances(), "the instance has registered")
    create(run)
    run("trigger", "nightly")
    wait_until(lambda: timers.get_runs(), "the trigger was sent")
    (instance,) = run("instances", "--json").document
    assert (instance["id"], instance["state"]) == (id, "active")
    assert instance["heartbeat_age"] < 60
    assert run("health").status == 0
    assert run("health", "--instance", id, "--json").document["healthy"] is True
    assert run("list", "--instance", id, "--json").document[0]["name"] == "nightly"
    (record,) = run("runs", "--json").document
    assert (record["state"], record["name"]) == ("queued", "nightly")  # no worker has recorded it
    assert run("runs", "nightly", "--state", "failed", "--json").document == []
    assert run("audit", "--json").document[0]["ok"] is True
    top = run("top", "--json", "--interval", "0.1").document
    assert top["sent"] == 1
    assert top["coming"][0]["name"] == "nightly"
    assert "service orders" in run("top", "--interval", "0.1").out
    (close, *_) = run("list", "--instance", id[:-1] + "x").err.splitlines()[1:]
    assert id in close


def test_health_is_1_without_an_instance_on_this_host(run: Run, timers: DistributedTimer) -> None:
    ran = run("health", "--json")
    assert (ran.status, ran.document["healthy"]) == (1, False)
    assert ran.document["host"] == local_host()
    timers.start()
    wait_until(lambda: timers.get_service_instances(), "the instance has registered")
    assert run("health", "--instance", "another:1:00000000").status == 1
    timers.stop()
    assert run("health").status == 1


def test_doctor_finds_that_nobody_runs(run: Run) -> None:
    create(run)
    ran = run("doctor", "--worker-timeout", "0", "--json")
    assert ran.status == 1
    found = {each["check"]: each for each in ran.document}
    assert found["instances"]["severity"] == "error"
    assert found["instances"]["advice"]
    rows = run("doctor", "--worker-timeout", "0").rows
    assert ["error", "instances"] in [row[:2] for row in rows]


def test_dead_letters_are_listed_requeued_and_purged(
    run: Run, timers: DistributedTimer, app: Celery
) -> None:
    create(run, "doomed")
    id = timers.get_timer("doomed").id
    _bury(timers, id)
    (letter,) = run("dead", "list", "--json").document
    assert letter["name"] == "doomed"
    assert "args" not in letter
    wrong = run("dead", "requeue", letter["id"][:-1])
    assert wrong.status == 2
    assert letter["id"] in wrong.err
    assert run("dead", "requeue").status == 2
    assert run("dead", "requeue", letter["id"]).status == 0
    assert run("dead", "list", "--json").document == []
    _bury(timers, id)
    assert run("dead", "purge", "--json").status == 1
    assert run("dead", "purge", "--before", "2020-01-01", "--yes", "--json").document == {
        "removed": 0
    }
    assert run("dead", "purge", "--yes", "--json").document == {"removed": 1}


def _bury(timers: DistributedTimer, id: str) -> None:
    """Leave the dead letter of a run, as a worker does in which it has failed."""
    run = OutRun("4b3c", id, 1_750_000_000_000, 1, message="m", worker="celery@here")
    assert timers.store.run_ended(run, FAILED, error="ValueError: no", letter={"reason": FAILED})


def test_reshard_says_what_to_set(run: Run, timers: DistributedTimer) -> None:
    create(run)
    ran = run("reshard", "2")
    assert ran.status == 0, ran
    assert "dtimer_shards = 2" in ran.out
    assert len(timers.store.stores) == 2
    assert run("reshard", "65").status == 2


# ------------------------------------------------------------------ who has what


def test_an_instance_is_drained_and_given_timers_again(
    run: Run, timers: DistributedTimer, make_app: MakeApp
) -> None:
    id = timers.start()
    wait_until(lambda: timers.get_service_instances(), "the instance has registered")
    for name in "abcd":
        create(run, name)
    alone = run("drain", id, "--json")
    assert (alone.status, alone.document["error"]["type"]) == (1, "ConflictError")
    other = DistributedTimer(make_app())
    other_id = other.start()
    wait_until(lambda: len(timers.get_service_instances()) == 2, "the other has registered")
    try:
        drained = run("drain", id, "--json")
        assert drained.status == 0, drained
        assert timers.get_instance_timers(id) == []
        states = {each["id"]: each["state"] for each in run("instances", "--json").document}
        assert states == {id: "draining", other_id: "active"}
        assert run("health", "--instance", id).status == 0
        assert run("drain", id, "--undo", "--json").document == {"instance": id, "undrained": True}
        assert run("drain", id, "--undo").status == 0
        assert run("rebalance").status == 0
        wait_until(lambda: timers.get_instance_timers(id), "it has its share again")
        wrong = run("drain", id[:-1] + "x")
        assert (wrong.status, id in wrong.err) == (2, True)
    finally:
        other.stop()
        other.store.close()


def test_the_services_of_a_redis_are_listed(run: Run, app: Celery) -> None:
    create(run)
    other = DistributedTimer(app, "bill ing")
    other.create_timers([{"name": name, "schedule": 60, "callback": "t"} for name in "ab"])
    other.pause_timer("a")
    found = {each["name"]: each for each in run("services", "--json").document}
    assert set(found) == {"orders", "bill ing"}
    assert (found["bill ing"]["active"], found["bill ing"]["inactive"]) == (1, 1)
    assert ["bill ing", "1", "0", "1", "1", "0"] in run("services").rows
    other.store.close()


def test_a_celery_command_does_not_import_all_commands() -> None:
    """Celery loads the group before each command of any app: that is to take no time."""
    code = "import sys, celery_dtimer.cli; print('celery_dtimer.timers' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "False\n"


# ------------------------------------------------------------------ export and import


def test_timers_go_to_another_service_and_importing_again_changes_nothing(
    run: Run, timers: DistributedTimer, app: Celery, tmp_path: Path
) -> None:
    for name in ("a\nb", "日本", "", "plain"):
        create(run, name, "--args", '["hush"]', "--max-runs", "5")
    run("pause", "plain")
    file = tmp_path / "timers.jsonl"
    ran = run("export", str(file), "--json")
    assert ran.document == {"file": str(file), "exported": 4}
    assert file.stat().st_mode & 0o077 == 0
    lines = file.read_text().splitlines()
    assert len([json.loads(line) for line in lines]) == 5  # the header too
    again = ("--service", "billing", "import", str(file), "--json")
    other = DistributedTimer(app, "billing")
    counts = {"updated": 0, "skipped": []}
    assert run(*again).document == {"created": 4, "unchanged": 0, **counts}
    assert run(*again).document == {"created": 0, "unchanged": 4, **counts}
    for timer in timers.get_timers():
        assert (there := other.get_timer(timer.name)) == timer, there
    other.store.close()


def test_an_export_goes_through_a_pipe(run: Run) -> None:
    create(run, "a")
    create(run, "b")
    lines = run("export").out
    assert len(lines.splitlines()) == 3
    assert len(run("export", "--name", "a").out.splitlines()) == 2
    assert len(run("export", "--json").document) == 3
    ran = run("--service", "billing", "import", input=lines)
    assert (ran.status, ran.out) == (0, "2 created, 0 updated, 0 unchanged, 0 left out\n")


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda lines: [], "line 1"),
        (lambda lines: lines[1:], "line 1"),
        (lambda lines: [*lines, "{"], "line 4"),
        (lambda lines: [*lines, lines[1]], "line 4"),
        (lambda lines: [lines[0].replace('"version":1', '"version":99'), *lines[1:]], "99"),
    ],
)
def test_of_a_bad_file_nothing_is_stored(
    run: Run, tmp_path: Path, spoil: Callable[[list[str]], list[str]], told: str
) -> None:
    create(run, "a")
    create(run, "b")
    lines = run("export").out.splitlines()
    file = tmp_path / "timers.jsonl"
    file.write_text("\n".join(spoil(lines)))
    ran = run("--service", "billing", "import", str(file), "--json")
    assert (ran.status, ran.document["error"]["type"]) == (2, "InvalidTimerError"), ran
    assert told in ran.document["error"]["message"]
    assert run("--service", "billing", "list").status == 2  # there is no such service
    file.write_bytes(b"\xff\xfe")
    assert run("import", str(file)).status == 2
    assert run("import", str(tmp_path / "none")).status == 2


def test_an_export_that_fails_leaves_the_file_as_it_was(make_app: MakeApp, tmp_path: Path) -> None:
    file = tmp_path / "timers.jsonl"
    file.write_text("before")
    ran = run_command(make_app(dtimer_redis_url=NOBODY), "export", str(file))
    assert ran.status == 3
    assert file.read_text() == "before"
    assert list(tmp_path.iterdir()) == [file]
    ran = run_command(make_app(), "export", str(tmp_path / "no" / "folder"))
    assert (ran.status, "Traceback" in ran.err) == (1, False)


# ------------------------------------------------------------------ streams and locales


@pytest.mark.parametrize(
    ("redirected", "status", "told"),
    [
        ("list >&-", 0, ""),
        ("list --json >&-", 0, ""),
        ("list --json > /dev/full", 1, "No space left"),
        ("list > /dev/full", 1, "No space left"),
        ("delete 'n日' <&-", 1, "aborted"),
        ("list | head -n 1", 0, ""),
    ],
)
def test_odd_streams_make_no_traceback(
    run: Run, shell: Callable[..., Ran], redirected: str, status: int, told: str
) -> None:
    create(run, "n日")
    ran = shell(redirected)
    assert (ran.status, told in ran.err, "Traceback" in ran.err) == (status, True, False), ran


@pytest.mark.parametrize(
    "locale",
    [
        {"LC_ALL": "C", "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"},
        {"PYTHONIOENCODING": "latin-1"},
        {"LC_ALL": "C"},
    ],
)
def test_any_locale_will_do(run: Run, shell: Callable[..., Ran], locale: dict[str, str]) -> None:
    create(run, "n日")
    ran = shell("list", **locale)
    assert (ran.status, ran.err) == (0, "")
    assert "n日" in ran.out or r"n\u65e5" in ran.out


@pytest.fixture
def shell(app: Celery, tmp_path: Path) -> Callable[..., Ran]:
    """Run the end of a command line in a shell."""
    conf = {name: app.conf[name] for name in (*QUICK, *_NAMED)}
    (tmp_path / "proj.py").write_text(
        f"from celery import Celery\napp = Celery('orders')\napp.conf.update({conf!r})\n"
    )

    def run_in_shell(end: str, **environment: str) -> Ran:
        line = f"set -o pipefail; {sys.executable} -m celery -A proj dtimer {end}"
        ran = subprocess.run(
            ["bash", "-c", line],
            cwd=tmp_path,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(map(str, (tmp_path, ROOT))),
                **environment,
            },
            capture_output=True,
            timeout=60,
            check=False,
        )
        texts = (text.decode("utf-8", "replace") for text in (ran.stdout, ran.stderr))
        return Ran(ran.returncode, *texts)

    return run_in_shell


ROOT = Path(__file__).parents[2]
_NAMED = ("broker_url", "dtimer_service", "dtimer_key_prefix")
