"""The command line as people use it: real commands beside real beats and workers."""

from __future__ import annotations

import base64
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from tests.conftest import FreshRedis
from tests.failover.deployment import Deploy, Deployment
from tests.waiting import wait_until

COMPLETING = "import sys; from celery.bin.celery import main; sys.argv = ['celery']; main()"
RECORD = ("--task", "record", "--unregistered")  # a task of the beats' app


def test_beats_end_within_two_seconds_and_commands_see_who_has_their_timers(
    deployment: Deployment,
) -> None:
    """Case 29: SIGTERM, twice; SIGINT; SIGHUP."""
    names = deployment.create(30, interval=0.5)
    beats = deployment.start_beats(4)
    wait_until(lambda: deployment.spread() <= 1, "the timers to be shared evenly", 8)
    signals = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP]
    for beat, signum in zip(beats, signals, strict=False):
        instance = deployment.registered()[beat.pid]
        beat.send(signum)
        if signum == signal.SIGTERM:
            beat.send(signum)
        assert beat.stop(0) < 2
        assert beat.exit_code == 0
        listed = {each["id"] for each in deployment.told("instances")}
        assert instance not in listed
        assert {each["instance"] for each in deployment.told("list", "--name", "timer-*")} <= listed
        assert deployment.command("health", "--instance", instance).returncode == 1
    assert deployment.command("health").returncode == 0
    since_ms = deployment.now_ms()
    deployment.wait_sent(names, since_ms)
    assert beats[3].stop() < 2
    assert deployment.told("instances") == []
    assert deployment.command("health").returncode == 1
    deployment.ledger.assert_nothing_doubled()


@pytest.mark.parametrize("fault", ["dead", "frozen"])
def test_a_command_whose_redis_is_gone_ends_soon(
    deploy: Deploy, fresh_redis: FreshRedis, fault: str
) -> None:
    store = fresh_redis(appendonly=True)
    deployment = deploy(store=store)
    store.kill() if fault == "dead" else store.freeze()
    try:
        ran = deployment.command("list", "--json", timeout=15)
    finally:
        store.start() if fault == "dead" else store.thaw()
    assert ran.returncode == 3, ran
    assert json.loads(ran.stdout)["error"]["type"] == "StoreUnavailableError"
    assert "Traceback" not in ran.stderr


def test_changes_from_the_command_line_take_effect_within_a_second(deployment: Deployment) -> None:
    """Case 31: each change is on beats that run, from another process."""
    deployment.start_beats(2)
    ledger = deployment.ledger

    def seconds_until_sent(name: str, since_ms: int) -> float:
        deployment.wait_sent([name], since_ms, 5)
        return (ledger.runs[-1].seen_ms - since_ms) / 1000

    moment = datetime.now(timezone.utc) + timedelta(seconds=2)
    deployment.told("create", "once", "--at", moment.isoformat(), *RECORD)
    deployment.wait_firing(["once"])
    assert ledger.runs[-1].lag_ms < 1000

    deployment.told("create", "timer", "--every", "1h", *RECORD)
    deployment.told("update", "timer", "--every", "500ms")
    assert seconds_until_sent("timer", deployment.now_ms()) < 1

    deployment.told("pause", "timer")
    paused_ms = deployment.now_ms()
    deployment.pass_time(1.2)
    assert not [run for run in ledger.since(paused_ms + 100) if run.name == "timer"]
    deployment.told("resume", "timer")
    assert seconds_until_sent("timer", deployment.now_ms()) < 1

    deployment.told("update", "timer", "--args", '["new"]')
    changed_ms = deployment.now_ms()
    deployment.wait_sent(["timer"], changed_ms + 500, 5)
    assert base64.b64decode(deployment.messages[-1]["body"]).startswith(b'[["new"], ')

    deployment.told("update", "timer", "--every", "1h")
    deployment.told("trigger", "timer")
    triggered_ms = deployment.now_ms()
    wait_until(lambda: ledger.since(triggered_ms - 1000), "the trigger to be sent", 1)

    deployment.told("update", "timer", "--every", "500ms")
    deployment.wait_sent(["timer"], deployment.now_ms(), 2)
    deployment.told("delete", "timer", "--yes")
    deleted_ms = deployment.now_ms()
    deployment.pass_time(1.2)
    assert not ledger.since(deleted_ms + 100)
    ledger.assert_nothing_doubled()


def test_odd_names_go_through_a_real_command_line(deployment: Deployment) -> None:
    """Case 35, with what a shell and a beat make of them."""
    names = ["a:b *?[] {x}", "a\nb", "-日本 😀", ""]
    for name in names:
        ran = deployment.command("create", "--every", "1h", "--task", "record", "--", name)
        assert ran.returncode == 0, ran
    ran = deployment.command("list")
    assert len(ran.stdout.splitlines()) == len(names)
    deployment.start_beats(1)
    assert deployment.command("trigger", "--", *names).returncode == 0
    wait_until(lambda: deployment.ledger.names() == set(names), "the triggers to be sent", 5)
    assert deployment.command("delete", "--yes", "--", *names).returncode == 0
    assert deployment.names() == []


def test_pending_calls_are_seen_while_no_worker_is_up(deploy: Deploy) -> None:
    """Case 44: id, task, eta and queue of calls that another process has made."""
    deployment = deploy(dtimer_eta_threshold=1)
    caller = deployment.start_script(
        "from tests.failover.app import record\n"
        "for number in range(3):\n"
        "    call = record.apply_async((number,), countdown=3600 + number, queue='slow')\n"
        "    print(call.id, flush=True)\n"
    )
    caller.wait(20)
    ids = caller.log_text().split()
    listed = deployment.told("pending", "--task", "record", "--queue", "slow")
    assert [each["task_id"] for each in listed] == ids
    assert [each["queue"] for each in listed] == ["slow"] * 3
    etas = [datetime.fromisoformat(each["eta"].replace("Z", "+00:00")) for each in listed]
    assert timedelta(minutes=59) < etas[0] - datetime.now(timezone.utc) < timedelta(minutes=61)
    assert [each["task_id"] for each in deployment.told("pending", "--args", "[1]")] == [ids[1]]
    deployment.told("cancel", *ids)
    assert deployment.told("pending") == []


def test_top_is_a_live_view_that_ends_with_a_key(deployment: Deployment, tmp_path: Path) -> None:
    """On a real terminal: it redraws, shows an instance come, and leaves the terminal as it was."""
    leader, follower = pty.openpty()
    environment = {**os.environ, **deployment.environment}
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "celery",
            "-A",
            "tests.failover.app",
            "dtimer",
            "top",
            "--interval=0.2",
        ],
        stdin=follower,
        stdout=follower,
        stderr=subprocess.PIPE,
        cwd=tmp_path,
        env={**environment, "TERM": "xterm", "COLUMNS": "150", "LINES": "40"},
    )
    os.close(follower)
    seen = b""

    def shows(text: str) -> bool:
        nonlocal seen
        while select.select([leader], [], [], 0.05)[0]:
            try:
                seen += os.read(leader, 65_536)
            except OSError:  # the other side is gone
                break
        return text.encode() in seen

    try:
        wait_until(lambda: shows("service orders"), "the first view", 15)
        (beat,) = deployment.start_beats(1)
        instance = deployment.registered()[beat.pid]
        wait_until(lambda: shows(instance), "the view to show the instance", 15)
        os.write(leader, b"q")
        wait_until(lambda: shows("\x1b[?1049l"), "the view to end", 5)
        assert process.wait(5) == 0
        assert b"Traceback" not in seen
    finally:
        process.kill()
        process.communicate()
        os.close(leader)


def test_an_interrupted_top_leaves_the_terminal_as_it_was(deployment: Deployment) -> None:
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "celery", "-A", "tests.failover.app", "dtimer", "top"],
        stdin=follower,
        stdout=follower,
        stderr=subprocess.DEVNULL,
        cwd=deployment.folder,
        env={**os.environ, **deployment.environment, "TERM": "xterm"},
    )
    os.close(follower)
    try:
        assert select.select([leader], [], [], 15)[0]
        wait_until(lambda: b"service orders" in os.read(leader, 65_536), "the first view", 15)
        asked = time.monotonic()
        process.send_signal(signal.SIGINT)
        process.wait(5)
        assert time.monotonic() - asked < 2
        rest = b""
        while select.select([leader], [], [], 0.1)[0]:
            try:
                rest += os.read(leader, 65_536)
            except OSError:
                break
        assert b"\x1b[?1049l" in rest
        assert b"\x1b[?25h" in rest
    finally:
        process.kill()
        process.wait()
        os.close(leader)


def test_a_shell_completes_commands_and_timers(deployment: Deployment) -> None:
    deployment.create(3)
    words = "celery -A tests.failover.app dtimer"

    def completed(line: str) -> list[str]:
        ran = subprocess.run(
            [sys.executable, "-c", COMPLETING],
            cwd=deployment.folder,
            env={
                **os.environ,
                **deployment.environment,
                "_CELERY_COMPLETE": "bash_complete",
                "COMP_WORDS": line,
                "COMP_CWORD": str(len(line.split()) - 1),
            },
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        return [text.partition(",")[2] for text in ran.stdout.splitlines()]

    assert completed(f"{words} pre") == ["preview"]
    assert sorted(completed(f"{words} show timer-00")) == ["timer-000", "timer-001", "timer-002"]
