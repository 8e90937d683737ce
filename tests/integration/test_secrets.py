"""No password reaches a log, a banner, an error, a key or a value, whatever fails."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from celery import Celery

from celery_dtimer import DistributedTimer, StoreError
from celery_dtimer.publisher import BrokerDownError, Publisher
from tests.conftest import QUICK, FreshRedis
from tests.processes import Process
from tests.servers import RedisServer, free_port
from tests.waiting import wait_until

SECRET = "hunter2-geheim"
ENCODED = "hunter2%2Dgeheim"  # the same, as somebody may write it in a URL

APP = """
from celery import Celery
from celery_dtimer import DistributedTimer
app = Celery("orders")
app.conf.update({conf!r})
app.conf.beat_scheduler = "celery_dtimer:DistributedScheduler"
app.conf.beat_schedule = {{"static": {{"task": "secretapp.record", "schedule": 0.3}}}}
timers = DistributedTimer(app)

@app.task
def record():
    "Do nothing."
"""


def assert_hidden(text: str) -> None:
    """Fail when a text holds the secret; what it says is shown up to there alone."""
    for form in (SECRET, ENCODED):
        place = text.find(form)
        assert place < 0, f"the secret follows: {text[max(0, place - 300) : place]}"


@pytest.fixture
def server(fresh_redis: FreshRedis) -> RedisServer:
    """A server with a user that needs a password; the test itself is let in without."""
    started = fresh_redis()
    started.client.execute_command("ACL", "SETUSER", "app", "on", f">{SECRET}", "~*", "&*", "+@all")
    return started


def conf_of(server: RedisServer, case: str) -> dict[str, Any]:
    """Return the settings of an app for a case."""
    password, place = ENCODED, f"127.0.0.1:{server.port}/0"
    if case == "wrong password":
        password += ENCODED
    if case == "refused":
        place = f"127.0.0.1:{free_port()}/0"
    url = f"redis://app:{password}@{place}"
    conf: dict[str, Any] = {
        "broker_url": url,
        "dtimer_redis_url": url,
        "broker_connection_retry_on_startup": True,
        **QUICK,
    }
    if case == "in the query":
        conf["dtimer_redis_url"] = f"redis://{place}?username=app&password={SECRET}"
    if case == "in the options":
        conf["dtimer_redis_url"] = f"redis://{place}"
        conf["dtimer_redis_options"] = {"username": "app", "password": SECRET}
    return conf


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Any]:
    """Start Celery's programs for an app with some settings, at DEBUG."""
    started: list[Process] = []

    def start(conf: dict[str, Any], *arguments: str) -> Process:
        (tmp_path / "secretapp.py").write_text(APP.format(conf=conf))
        argv = [sys.executable, "-m", "celery", "-A", "secretapp", *arguments]
        log = tmp_path / f"{arguments[0]}-{len(started)}.log"
        root = str(Path(__file__).parents[2])
        env = {"PYTHONPATH": f"{tmp_path}:{root}"}
        started.append(Process(argv, log=log, env=env, cwd=tmp_path).start())
        return started[-1]

    yield start
    for process in started:
        process.kill()


# What a beat says in each case, once it has come as far as it can.
CASES = {
    "all well": "dispatched",
    "in the query": "dispatched",
    "in the options": "dispatched",
    "wrong password": "trying again",
    "refused": "trying again",
    "frozen": "trying again",
}


@pytest.mark.parametrize("case", CASES)
def test_a_beat_and_a_worker_at_debug_show_no_password(
    server: RedisServer, run: Any, case: str
) -> None:
    conf = conf_of(server, case)
    if case == "frozen":
        server.freeze()
    beat = run(conf, "beat", "-l", "DEBUG", "--pidfile=")
    worker = run(conf, "worker", "-l", "DEBUG", "-P", "solo", "--without-mingle", "-B", "-s", "x")
    said = CASES[case]  # of the one timer, by one of the two beats

    def is_said() -> bool:
        return said in beat.log_text() + worker.log_text()

    wait_until(is_said, f"a beat to say {said!r}", 25)
    answers = ("succeeded",) if said == "dispatched" else ("connect", said)
    wait_until(lambda: any(map(worker.log_text().__contains__, answers)), "the worker too", 25)
    server.thaw()
    for process in (beat, worker):
        assert_hidden(process.log_text())
    assert_hidden(everything_in(server.client))


def everything_in(client: redis.Redis) -> str:
    """Return all keys and values of a server as one text."""
    readers: dict[str, Any] = {
        "string": client.get,
        "hash": client.hgetall,
        "zset": lambda key: client.zrange(key, 0, -1, withscores=True),
        "set": client.smembers,
        "list": lambda key: client.lrange(key, 0, -1),
        "stream": client.xrange,
        "none": str,  # it has gone meanwhile
    }
    found = [(key, readers[client.type(key)](key)) for key in client.scan_iter(count=1000)]
    return repr(found)


@pytest.mark.parametrize("case", ["wrong password", "refused", "frozen"])
def test_the_api_and_a_publisher_raise_no_password(
    server: RedisServer, case: str, caplog: pytest.LogCaptureFixture
) -> None:
    app = Celery("orders", set_as_current=False)
    app.conf.update(conf_of(server, case))
    if case == "frozen":
        server.freeze()
    timers, publisher = DistributedTimer(app), Publisher(app, timeout=0.3)
    with caplog.at_level(logging.DEBUG):
        with pytest.raises(StoreError) as caught:
            timers.create_timer("t", 10, "secretapp.record")
        outcome = publisher.connect()
    server.thaw()
    assert isinstance(outcome, BrokerDownError)
    texts = [str(caught.value), repr(caught.value.__cause__), str(outcome), caplog.text]
    texts += [repr(timers), repr(timers.store), repr(timers.store.settings), repr(publisher)]
    for text in texts:
        assert_hidden(text)
    assert "127.0.0.1" in str(caught.value)


def test_celerys_report_on_the_command_line_shows_no_password(
    server: RedisServer, run: Any
) -> None:
    for case in ("all well", "in the query", "in the options"):
        report = run(conf_of(server, case), "report")
        report.wait(30)
        assert "dtimer_redis_url" in report.log_text()
        assert_hidden(report.log_text())
