"""The example's webhooks: a beat and a worker of the shop, and a local server as the partners'."""

from __future__ import annotations

import json
import os
import re
import sys
import threading
from base64 import b64encode
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import redis
from celery import _state

from celery_dtimer import DeadLetter, RunRecord
from tests.conftest import delete_prefix
from tests.processes import Process
from tests.servers import RedisServer
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]
DATABASE = 9  # of Redis: the shop's settings have no prefix for keys
AT_ONCE = {"retry_backoff": 1, "retry_backoff_max": 0}
PASSWORD = "s@fe"
NEVER = None  # an answer that does not come


@dataclass(frozen=True)
class Post:
    """A request that has arrived."""

    key: str | None
    authorization: str | None
    body: Any


class Partners:
    """A server with a path for each partner: it keeps what arrives, and answers as it is told.

    Attributes:
        posts: what has arrived, by path.
        answers: the statuses to answer with, by path; the last one stays.
    """

    def __init__(self) -> None:
        self.posts: dict[str, list[Post]] = defaultdict(list)
        self.answers: dict[str, list[int | None]] = {}
        self._closing = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._thread = threading.Thread(target=self._server.serve_forever, args=[0.02], daemon=True)
        self._thread.start()

    @property
    def host(self) -> str:
        """Host and port."""
        return f"127.0.0.1:{self._server.server_port}"

    def url(self, path: str) -> str:
        """Return the address of a partner, with a password that nobody may log."""
        return f"http://shop:{quote(PASSWORD)}@{self.host}{path}"

    def close(self) -> None:
        """End the server; whoever still waits for an answer is cut off."""
        self._closing.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _answer(self, path: str) -> int | None:
        answers = self.answers.get(path, [200])
        return answers.pop(0) if len(answers) > 1 else answers[0]

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        partners = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                post = Post(self.headers["Idempotency-Key"], self.headers["Authorization"], body)
                partners.posts[self.path].append(post)
                status = partners._answer(self.path)
                if status is NEVER:
                    partners._closing.wait()
                    return
                self.send_response(status)
                self.send_header("Location", "/elsewhere")  # heeded with a 3xx
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        return Handler


@pytest.fixture(scope="module")
def partners() -> Iterator[Partners]:
    server = Partners()
    yield server
    server.close()


@pytest.fixture(scope="module")
def shop_url(redis_server: RedisServer) -> Iterator[str]:
    """A database of the shop's own on the run's server."""
    url = re.sub(r"/\d+$", f"/{DATABASE}", redis_server.url)
    yield url
    with redis.Redis.from_url(url, decode_responses=True) as client:
        delete_prefix(client, "")


@pytest.fixture(scope="module")
def shop(shop_url: str) -> Iterator[Any]:
    """``example_project.shop`` on this database; what is current and shared is so again afterwards.

    Another test may have imported it before, with what its environment says.
    """
    current, shared = _state._tls.current_app, set(_state._on_app_finalizers)
    from example_project import shop

    app = shop.timers.app
    before = app.conf.broker_url
    app.conf.broker_url = shop_url
    yield shop
    shop.timers.store.close()
    app.conf.broker_url = before
    _state._tls.current_app = current
    _state._on_app_finalizers.clear()
    _state._on_app_finalizers.update(shared)


@pytest.fixture(scope="module")
def worker(
    shop: Any, shop_url: str, partners: Partners, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Process]:
    """A worker of the shop with a beat in it.

    A process, because threads have no time limits; with one child, because in another one a retry
    that waits for nothing may end before it is noted that the try before has asked for it.
    """
    argv = [sys.executable, "-m", "celery", "-A", "example_project", "worker", "-B", "-c", "1"]
    folder = tmp_path_factory.mktemp("shop")
    process = Process(
        [*argv, "-l", "INFO", "--without-mingle", "--without-gossip"],
        log=folder / "worker.log",
        env={
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            "SHOP_REDIS_URL": shop_url,
            "SHOP_ALERT_URL": partners.url("/staff"),
            "no_proxy": "127.0.0.1",
        },
        cwd=folder,
    )
    process.start()
    try:
        wait_until(lambda: " ready." in process.log_text(), "the worker to be ready", 30)
        wait_until(shop.timers.get_service_instances, "the beat to be registered", 30)
        yield process
    finally:
        process.kill()


@pytest.fixture(autouse=True)
def log(worker: Process, request: pytest.FixtureRequest) -> Iterator[None]:
    """Show what the worker has said when a test fails; it must not have said the password."""
    yield
    text = worker.log_text()
    request.node.add_report_section("teardown", "the worker", text[-8000:])
    assert PASSWORD not in text
    assert quote(PASSWORD) not in text


def deliver(shop: Any, partner: str, url: str, **options: Any) -> None:
    """Subscribe a partner, and have the first delivery now."""
    shop.subscribe_webhook(partner, url, **options)
    shop.timers.trigger_timer(f"webhook of {partner}")


def wait_ended(shop: Any, partner: str, *states: str) -> RunRecord:
    """Return a partner's last run, once its runs, the last one first, are in these states."""

    def runs() -> list[RunRecord]:
        found: list[RunRecord] = shop.timers.get_runs(f"webhook of {partner}")
        return found if tuple(run.state for run in found) == states else []

    return wait_until(runs, f"the runs for {partner} to have {states}", 20)[0]


def wait_dead(shop: Any, partner: str) -> DeadLetter:
    """Return a partner's dead letter, once there is one."""

    def letters() -> list[DeadLetter]:
        found = shop.timers.get_dead_letters()
        return [letter for letter in found if letter.name == f"webhook of {partner}"]

    (letter,) = wait_until(letters, f"a dead letter of {partner}", 20)
    return letter


def alerts(partners: Partners, partner: str) -> list[Any]:
    bodies = [post.body for post in partners.posts["/staff"]]
    return [body for body in bodies if body["timer"] == f"webhook of {partner}"]


def test_a_delivery_says_what_happened_and_carries_its_key(shop: Any, partners: Partners) -> None:
    deliver(shop, "Acme", partners.url("/acme"))
    run = wait_ended(shop, "Acme", "succeeded")

    (post,) = partners.posts["/acme"]
    assert post.key == run.task_id
    assert post.body == {
        "event": "prices",
        "scheduled_at": run.scheduled_at.isoformat(),
        "payload": {"partner": "Acme"},
    }
    assert post.authorization == "Basic " + b64encode(f"shop:{PASSWORD}".encode()).decode()


def test_a_server_that_fails_twice_is_asked_three_times_with_the_same_key(
    shop: Any, partners: Partners
) -> None:
    partners.answers["/flaky"] = [503, 503, 200]

    deliver(shop, "Flaky", partners.url("/flaky"), **AT_ONCE)
    run = wait_ended(shop, "Flaky", "succeeded")

    assert [post.key for post in partners.posts["/flaky"]] == [run.task_id] * 3
    assert run.retries == 2
    assert not alerts(partners, "Flaky")


@pytest.mark.parametrize(("status", "reason"), [(400, "Bad Request"), (302, "Found")])
def test_a_refusal_is_final_and_the_staff_is_told(
    shop: Any, partners: Partners, status: int, reason: str
) -> None:
    partner = f"No {status}"
    partners.answers[f"/{status}"] = [status]

    deliver(shop, partner, partners.url(f"/{status}"), **AT_ONCE)
    letter = wait_dead(shop, partner)
    wait_until(lambda: alerts(partners, partner), "the staff to be told")

    assert len(partners.posts[f"/{status}"]) == 1
    assert (letter.reason, letter.retries) == ("failed", 0)
    assert letter.error == f"WebhookRefusedError: {partners.host} answered {status} {reason}"
    assert letter.scheduled_at is not None
    assert alerts(partners, partner) == [
        {
            "timer": f"webhook of {partner}",
            "scheduled_at": letter.scheduled_at.isoformat(),
            "error": letter.error,
        }
    ]


def test_a_server_that_never_answers_is_left_at_the_time_limit(
    shop: Any, partners: Partners
) -> None:
    partners.answers["/silent"] = [NEVER]

    deliver(shop, "Silent", partners.url("/silent"), timeout=0.3, max_retries=1, **AT_ONCE)
    run = wait_ended(shop, "Silent", "failed")
    wait_until(lambda: alerts(partners, "Silent"), "the staff to be told")

    assert [post.key for post in partners.posts["/silent"]] == [run.task_id] * 2
    assert run.error == "SoftTimeLimitExceeded: SoftTimeLimitExceeded()"
    assert run.retries == 1


def test_a_dead_letter_is_delivered_once_the_server_is_mended(
    shop: Any, partners: Partners
) -> None:
    partners.answers["/down"] = [503]
    deliver(shop, "Down", partners.url("/down"), max_retries=1, **AT_ONCE)
    letter = wait_dead(shop, "Down")
    assert (
        letter.error
        == f"URLError: <urlopen error {partners.host} answered 503 Service Unavailable>"
    )

    partners.answers["/down"] = [200]
    shop.timers.requeue_dead_letter(letter)
    run = wait_ended(shop, "Down", "succeeded", "failed")

    *tries, last = partners.posts["/down"]
    assert [post.key for post in tries] == [letter.task_id] * 2
    assert last.key == run.task_id != letter.task_id
    assert last.body["payload"] == {"partner": "Down"}
    assert letter.id not in [each.id for each in shop.timers.get_dead_letters()]


def test_only_addresses_of_the_web_are_taken(shop: Any) -> None:
    with pytest.raises(ValueError, match="http"):
        shop.subscribe_webhook("Local", "file:///etc/passwd")
