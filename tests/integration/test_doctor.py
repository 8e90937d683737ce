"""The doctor: each check when all is well, and when it is not."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from celery.canvas import Signature
from celery.contrib.testing.worker import start_worker

from celery_dtimer import DistributedTimer, Finding, InvalidTimerError
from celery_dtimer.doctor import examine_store
from celery_dtimer.errors import StoreError
from celery_dtimer.model import SCHEMA, Definition
from celery_dtimer.store import HeldRun, Settlement, Store
from tests.conftest import FreshRedis, MakeApp
from tests.integration.conftest import START_MS, Service
from tests.servers import RedisServer

SECRET = "p-a-s-s-w-o-r-d"


def look(service: Service) -> dict[str, Finding]:
    """Return what is found in a service, by check; of several findings of one the worst."""
    findings, _ = examine_store(service.store)
    order = ["ok", "warning", "error"]
    return {each.check: each for each in sorted(findings, key=lambda f: order.index(f.severity))}


def register(service: Service, instance: str, **fields: Any) -> int:
    """Register an instance that says so of itself; return its epoch."""
    said = {"version": "1.0", "dispatch": "atomic", "broker": "up", "clock_offset_ms": "0"}
    said["settings"] = json.dumps(service.settings.shared)
    return service.store.register(instance, {**said, **fields}).epoch


def test_where_all_is_well_every_check_says_so(service: Service) -> None:
    register(service, "a")
    service.add()
    service.store.pause(service.add("paused").id)
    found = look(service)
    assert {check for check, each in found.items() if each.severity != "ok"} == {"persistence"}
    assert {check: each.found for check, each in found.items()} == {
        "store": f"Redis at {service.settings.masked_url} answers",
        "server": found["server"].found,
        "replicas": "0 replicas",
        "persistence": found["persistence"].found,
        "eviction": "no timer is evicted",
        "schema": f"schema {SCHEMA}, of up to {SCHEMA} that are known here",
        "instances": "1 live (dispatch: 1 atomic)",
        "clocks": "1 of 1 compared, none off by more than 1 s",
        "versions": "1 x 1.0",
        "settings": "all beats have the same",
        "invariants": "all hold",
        "timers": "2 in all",
        "overdue": "none by more than 2 s",
        "broken": "none",
        "dead letters": "none",
    }


def test_a_finding_is_a_line_and_json(service: Service) -> None:
    finding = Finding("broken", "error", "one is", "mend it")
    assert str(finding) == "error   broken: one is -> mend it"
    assert str(Finding("x", "ok", "y")) == "ok      x: y"
    assert json.loads(json.dumps(finding.as_dict())) == {
        "check": "broken",
        "severity": "error",
        "found": "one is",
        "advice": "mend it",
    }


def test_an_empty_service_without_a_beat_is_no_fault(service: Service) -> None:
    assert look(service)["instances"] == Finding(
        "instances", "ok", "no beat runs, and no timer waits"
    )


def test_timers_without_a_beat_are_a_fault(service: Service) -> None:
    service.add()
    service.clock.advance(60)
    found = look(service)
    assert found["instances"].severity == "error"
    assert found["instances"].found == "1 timers wait, and no beat runs"
    assert found["overdue"].severity == "error"
    assert found["overdue"].found == "1 are overdue since no beat has them: timer"
    assert "celery beat" in found["overdue"].advice


# ------------------------------------------------------------------ the server


def test_a_server_that_does_not_answer_is_the_only_finding(make_app: MakeApp) -> None:
    app = make_app(dtimer_redis_url=f"redis://:{SECRET}@127.0.0.1:1/0", broker_url="memory://")
    first, *others = DistributedTimer(app).doctor(worker_timeout=0)
    assert (first.check, first.severity) == ("store", "error")
    assert SECRET not in str(first)
    assert {each.check for each in others} == {"broker", "tasks"}


@pytest.mark.parametrize(
    ("options", "check", "severity", "text"),
    [
        ([], "persistence", "warning", "nothing on disk"),
        (["--appendonly", "yes", "--appendfsync", "everysec"], "persistence", "ok", "every second"),
        (["--appendonly", "yes"], "persistence", "ok", "what is written is kept"),
        (
            ["--maxmemory", "100mb", "--maxmemory-policy", "allkeys-lru"],
            "eviction",
            "warning",
            "evicts keys",
        ),
    ],
)
def test_the_servers_configuration_is_judged(
    make_app: MakeApp,
    fresh_redis: FreshRedis,
    options: list[str],
    check: str,
    severity: str,
    text: str,
) -> None:
    timers = DistributedTimer(make_app(broker_url=fresh_redis(*options).url))
    (found,) = [each for each in timers.doctor(worker_timeout=0) if each.check == check]
    assert found.severity == severity
    assert text in found.found


def test_a_replica_is_told(make_app: MakeApp, fresh_redis: FreshRedis) -> None:
    master, replica = fresh_redis(), fresh_redis()
    replica.client.replicaof("127.0.0.1", master.port)  # type: ignore[no-untyped-call]
    found = DistributedTimer(make_app(broker_url=replica.url)).doctor(worker_timeout=0)
    assert ("replicas", "error") in {(each.check, each.severity) for each in found}


def test_what_is_forbidden_is_no_fault(
    make_app: MakeApp, redis_server: RedisServer, prefix: str
) -> None:
    client, user = redis_server.client, prefix.strip(":")
    client.acl_setuser(
        user,
        enabled=True,
        passwords=[f"+{SECRET}"],
        keys=["*"],
        channels=["*"],
        commands=["+@all", "-config", "-info", "-scan", "-keys"],
    )
    try:
        url = f"redis://{user}:{SECRET}@127.0.0.1:{redis_server.port}"
        timers = DistributedTimer(make_app(broker_url=url))
        timers.create_timer("a", 3600, "record")
        found = {each.check: each for each in timers.doctor(worker_timeout=0)}
        for check, command in (
            ("server", "INFO"),
            ("persistence", "CONFIG"),
            ("eviction", "CONFIG"),
        ):
            assert found[check] == Finding(check, "ok", f"not allowed to look ({command})")
        assert found["invariants"].severity == "ok"
        assert SECRET not in " ".join(map(str, found.values()))
    finally:
        client.acl_deluser(user)


def test_an_error_of_the_store_is_a_finding(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any) -> Any:
        raise StoreError("refused: NOPERM")

    monkeypatch.setattr(Store, "instances", refuse)
    assert [(each.check, each.severity) for each in examine_store(service.store)[0]] == [
        ("store", "error")
    ]


def test_a_schema_that_is_too_new_is_told(service: Service) -> None:
    service.redis.hset(service.keys("meta"), "schema", SCHEMA + 1)
    assert look(service)["schema"].severity == "error"


# ------------------------------------------------------------------ the instances


def test_instances_are_judged(service: Service) -> None:
    a = register(service, "a")
    register(service, "b", version="2.0", broker="down", clock_offset_ms="-3600250")
    register(
        service,
        "c",
        settings=json.dumps({**service.settings.shared, "dtimer_run_lease": 5}),
    )
    register(service, "d", settings="nonsense", clock_offset_ms="soon")
    service.let_pass(31, a=a)
    found = look(service)
    assert "silent: b for 31 s, c for 31 s, d for 31 s" in {
        each.found for each in examine_store(service.store)[0]
    }
    assert found["instances"] == Finding(
        "instances",
        "error",
        "without a broker: b",
        "see that they reach the broker; meanwhile others have their timers",
    )
    assert found["clocks"].found == "off from the server's: b by -3600.2 s"
    assert found["versions"].found == "mixed: 3 x 1.0, 1 x 2.0"
    assert found["settings"].found == "they differ: dtimer_run_lease (5, 60.0)"
    kinds = {found[check].severity for check in ("clocks", "versions", "settings")}
    assert kinds == {"warning"}


def test_timers_that_wait_for_a_beat_are_told(service: Service) -> None:
    service.add()
    register(service, "a")
    found = look(service)
    assert found["unassigned"].found == "1 timers have no beat"


# ------------------------------------------------------------------ the timers

Trouble = Callable[[Service, Definition, int], Any]

OVERDUE: dict[str, Trouble] = {
    "their beat lags behind": lambda service, timer, a: None,
    "no beat has them": lambda service, timer, a: (
        service.store.leave("a", a),
        register(service, "a"),
    ),
    "their beat is silent, and others take them over": lambda service, timer, a: (
        service.clock.advance(60),
    ),
    "their beat does not reach the broker": lambda service, timer, a: service.store.report(
        "a", a, {"broker": "down"}
    ),
    "they are of a newer version, which no beat can read": lambda service, timer, a: (
        service.redis.set(
            service.keys("timer_definition", timer.id),
            json.dumps({**json.loads(timer.blob), "schema": SCHEMA + 1}),
        )
    ),
    "the broker has refused them, or no beat has their code; they are tried again": (
        lambda service, timer, a: service.commit(
            "a", a, Settlement(service.due_one("a", a), "refused", delay_ms=60_000)
        )
    ),
    "they wait for the end of an earlier run (overlap)": lambda service, timer, a: (
        service.store.open_runs("a", a, [HeldRun(timer.id, START_MS, 1, "skip", 0, ("x",))]),
        service.commit("a", a, Settlement(service.due_one("a", a), "waits", reason="y")),
    ),
}


@pytest.mark.parametrize(("why", "trouble"), OVERDUE.items(), ids=OVERDUE.keys())
def test_overdue_timers_are_told_and_why(service: Service, why: str, trouble: Trouble) -> None:
    a = register(service, "a")
    timer = service.add()
    service.let_pass(13, a=a)
    trouble(service, timer, a)
    found = look(service)["overdue"]
    assert (found.severity, found.found) == ("warning", f"1 are overdue since {why}: timer")
    assert found.advice


def test_a_timer_in_its_jitter_is_not_overdue(service: Service) -> None:
    a = register(service, "a")
    timer = service.add()
    service.let_pass(13, a=a)
    for list_ in ("timer_queue", "instance_timers"):
        id = "a" if list_ == "instance_timers" else None
        service.redis.zadd(service.keys(list_, id), {timer.id: START_MS + 20_000})
    service.set_field(timer.id, "at", str(START_MS + 20_000))
    assert look(service)["overdue"].severity == "ok"


def test_many_are_counted_and_a_few_named(service: Service) -> None:
    a = register(service, "a")
    service.add_many(9)
    service.let_pass(15, a=a)
    assert look(service)["overdue"].found.endswith("lags behind: t0, t1, t2, t3, t4 and 4 more")


def test_broken_timers_and_dead_letters_are_told(service: Service) -> None:
    a = register(service, "a")
    service.add("odd", at_ms=START_MS)
    due = service.due_one("a", a)
    service.commit("a", a, Settlement(due, "broken", reason="unknown serializer"))
    found = look(service)
    assert found["broken"].found == "1 timers do not run: odd (unknown serializer)"
    assert found["dead letters"].found == "1; of the newest: 1 broken"
    assert "dead list" in found["dead letters"].advice


def test_a_definition_that_can_not_be_read_is_told_before_it_is_due(service: Service) -> None:
    register(service, "a")
    timer = service.add()
    service.redis.set(service.keys("timer_definition", timer.id), '{"name": "timer"}')
    assert look(service)["definitions"].found == "1 can not be read: timer"


def test_violated_invariants_are_told(service: Service) -> None:
    service.is_damaged = True
    register(service, "a")
    timer = service.add()
    service.redis.zrem(service.keys("timer_queue"), timer.id)
    found = look(service)["invariants"]
    assert found.severity == "error"
    assert timer.id in found.found


# ------------------------------------------------------------------ broker and workers


def checks(timers: DistributedTimer, **options: Any) -> dict[str, Finding]:
    """Return what is found by check."""
    return {each.check: each for each in timers.doctor(**options)}


def test_a_broker_that_does_not_answer_is_told(
    make_app: MakeApp, redis_server: RedisServer
) -> None:
    app = make_app(broker_url=f"redis://:{SECRET}@127.0.0.1:1/0", dtimer_redis_url=redis_server.url)
    found = checks(DistributedTimer(app))
    assert found["broker"].severity == "error"
    assert found["store"].severity == "ok"
    assert "tasks" not in found
    assert SECRET not in " ".join(map(str, found.values()))


def test_when_no_worker_answers_that_is_no_fault(make_app: MakeApp) -> None:
    timers = DistributedTimer(make_app())
    timers.create_timer("a", 3600, "record")
    assert checks(timers, worker_timeout=0.1)["tasks"] == Finding(
        "tasks", "ok", "no worker has answered within 0.1 s"
    )
    assert checks(timers, worker_timeout=0)["tasks"].found == "the workers were not asked"


@pytest.fixture
def worker_app(make_app: MakeApp, tmp_path: Path) -> Iterator[Any]:
    """An app with a task, and a worker that knows it."""
    app = make_app(worker_hijack_root_logger=False, result_backend="cache+memory://")

    @app.task(name="known", rate_limit="10/m")
    def known() -> None: ...

    with start_worker(app, perform_ping_check=False, pool="solo"):
        yield app


def test_tasks_that_no_worker_knows_are_told(worker_app: Any) -> None:
    timers = DistributedTimer(worker_app)
    timers.create_timer("good", 3600, "known")
    timers.create_timer(
        "canvas", 3600, worker_app.tasks["known"].si() | worker_app.tasks["known"].si()
    )
    assert checks(timers)["tasks"] == Finding("tasks", "ok", "1 workers know what the timers send")
    timers.create_timer("bad", 3600, "no.such.task")
    found = checks(timers)["tasks"]
    assert found.severity == "warning"
    assert found.found == "none of the 1 workers knows 'no.such.task' (bad)"
    timers.delete_timer("bad")
    timers.create_timer("bad canvas", 3600, worker_app.tasks["known"].si() | Signature("gone"))
    assert checks(timers)["tasks"].found == "none of the 1 workers knows 'gone' (bad canvas)"


@pytest.mark.parametrize("seconds", [-1, 61, True, "1", float("nan")])
def test_the_time_of_the_workers_is_checked(make_app: MakeApp, seconds: Any) -> None:
    with pytest.raises(InvalidTimerError, match="worker_timeout"):
        DistributedTimer(make_app()).doctor(worker_timeout=seconds)
