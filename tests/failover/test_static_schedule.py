"""What the code declares: kept over restarts, changed and removed as deployments roll."""

from __future__ import annotations

import re

from celery_dtimer.model import SCHEMA
from tests.failover.deployment import TAKEOVER, Deploy, Deployment, stop_all
from tests.waiting import wait_until


def entry(seconds: float, *args: object) -> dict[str, object]:
    """Return an entry of ``beat_schedule``."""
    return {"task": "record", "schedule": seconds, "args": list(args)}


def test_an_interval_keeps_its_phase_over_restarts(deploy: Deploy) -> None:
    """An interval that is longer than the beat lives still fires in time."""
    deployment = deploy(beat_schedule={"slow": entry(3.0)})
    begun_ms = deployment.now_ms()
    deployment.read()
    (beat,) = deployment.start_beats(1)
    created_ms = deployment.now_ms()
    for _ in range(4):
        deployment.pass_time(1)
        beat.stop()
        (beat,) = deployment.start_beats(1)
    deployment.wait_sent(["slow"], created_ms + 5000, 10)

    deployment.ledger.assert_on_the_grid(3000)
    deployment.ledger.assert_nothing_doubled()
    deployment.assert_accounted(["slow"], 3000)
    first_ms = deployment.ledger.slots("slow")[0]
    assert begun_ms < first_ms - 3000 < created_ms + 500, "one interval after its creation"


def test_an_entry_that_left_the_code_goes_when_no_beat_declares_it(deploy: Deploy) -> None:
    both = {"kept": entry(1.0), "dropped": entry(1.0)}
    only = {"kept": entry(1.0)}
    deployment = deploy(beat_schedule=both)
    beats = deployment.start_beats(2)
    deployment.timers.create_timer("dynamic", 1, "record")
    names = ["kept", "dropped", "dynamic"]
    deployment.wait_firing(names)

    stop_all([beats.pop(0)])
    beats.append(deployment.start_beat(beat_schedule=only))
    deployment.wait_registered(beats)
    halfway_ms = deployment.pass_time(1)
    assert {"kept", "dynamic"} <= set(deployment.names())
    stop_all([beats.pop(0)])
    beats.append(deployment.start_beat(beat_schedule=only))
    deployment.wait_registered(beats)
    wait_until(
        lambda: deployment.names() == ["dynamic", "kept"], "the entry to be removed", TAKEOVER + 2
    )
    removed_ms = deployment.now_ms()
    end_ms = deployment.pass_time(2)
    deployment.wait_sent(["kept", "dynamic"], end_ms - 999)

    assert not [r for r in deployment.ledger.since(removed_ms + 200) if r.name == "dropped"]
    assert deployment.ledger.latest()["kept"] > halfway_ms
    deployment.ledger.assert_every_run_once(["kept", "dynamic"], 1000, end_ms)


def test_a_rolling_change_of_arguments_keeps_the_phase_and_the_last_one_wins(
    deploy: Deploy,
) -> None:
    old, new = {"job": entry(1.0, "old")}, {"job": entry(1.0, "new")}
    deployment = deploy(beat_schedule=old)
    beats = deployment.start_beats(2)
    deployment.wait_firing(["job"])

    stop_all([beats.pop(0)])
    beats.append(deployment.start_beat(beat_schedule=new))
    deployment.wait_registered(beats)
    wait_until(lambda: deployment.timers.get_timer("job").args == ["new"], "the change", 3)
    # A beat of the old release that restarts does not bring the old arguments back.
    stop_all([beats.pop(0)])
    beats.append(deployment.start_beat(beat_schedule=old))
    deployment.wait_registered(beats)
    end_ms = deployment.pass_time(2)
    deployment.wait_sent(["job"], end_ms - 999)

    assert list(deployment.timers.get_timer("job").args) == ["new"]
    deployment.ledger.assert_every_run_once(["job"], 1000, end_ms)


def _written(deployment: Deployment) -> int:
    """Return how many static timers all beats together say they have created or updated."""
    found = re.compile(r"(\d+) timers created or updated").findall
    return sum(int(count) for beat in deployment.processes for count in found(beat.log_text()))


def _deleted(deployment: Deployment) -> int:
    texts = [beat.log_text() for beat in deployment.processes]
    return sum(text.count("is not declared any more: deleted") for text in texts)


def test_old_and_new_schedules_side_by_side_do_not_flap(deploy: Deploy) -> None:
    """Each timer is written once by each release, whoever restarts, dies, or joins."""
    old = {"kept": entry(1.0), "changed": entry(1.0, "old"), "dropped": entry(1.0)}
    new = {"kept": entry(1.0), "changed": entry(1.0, "new"), "added": entry(1.0)}
    deployment = deploy(beat_schedule=old)
    beats = deployment.start_beats(2)
    deployment.wait_firing(list(old))
    first = len(old) + 1  # Celery's own too
    assert _written(deployment) == first

    beats.append(deployment.start_beat(beat_schedule=new))
    deployment.wait_registered(beats)
    wait_until(lambda: _written(deployment) == first + 2, "what is new to be written", 5)
    # Old ones restart, join and die beside the new one, for as long as several checks take.
    stop_all([beats.pop(0)])
    beats.append(deployment.start_beat(beat_schedule=old))
    deployment.wait_registered(beats)
    beats.pop(0).kill()
    deployment.wait_registered(beats)
    deployment.pass_time(2)
    assert deployment.names() == ["added", "changed", "dropped", "kept"]
    assert list(deployment.timers.get_timer("changed").args) == ["new"]
    assert (_written(deployment), _deleted(deployment)) == (first + 2, 0)

    stop_all([beats.pop(1)])  # the last one of the old release
    beats.append(deployment.start_beat(beat_schedule=new))
    deployment.wait_registered(beats)
    wait_until(lambda: _deleted(deployment) == 1, "what was dropped to go", TAKEOVER + 2)
    end_ms = deployment.pass_time(2)
    deployment.wait_sent(list(new), end_ms - 999)

    assert deployment.names() == ["added", "changed", "kept"]
    assert (_written(deployment), _deleted(deployment)) == (first + 2, 1)
    deployment.ledger.assert_nothing_doubled()
    deployment.ledger.assert_on_the_grid(1000)


def test_a_beat_that_is_too_old_waits_and_leaves_everything_alone(deploy: Deploy) -> None:
    deployment = deploy(beat_schedule={"job": entry(1.0)})
    meta = deployment.key("meta")
    deployment.store.client.hset(meta, "schema", SCHEMA + 1)
    beat = deployment.start_beat()
    wait_until(lambda: "knows schemas up to" in beat.log_text(), "the refusal", 10)
    deployment.pass_time(2)
    assert deployment.store.client.keys(f"{deployment.prefix}*:{{orders}}*") == [meta]
    assert deployment.store.client.hgetall(meta) == {"schema": str(SCHEMA + 1)}
    assert beat.log_text().count("knows schemas up to") == 1
    deployment.store.client.hset(meta, "schema", SCHEMA)
    deployment.wait_firing(["job"])
    deployment.store.client.hset(meta, "schema", SCHEMA + 1)
    assert stop_all([beat])[0] < 3
    deployment.store.client.hset(meta, "schema", SCHEMA)


def test_a_change_of_the_schedule_computes_the_next_run_anew(deploy: Deploy) -> None:
    deployment = deploy(beat_schedule={"job": entry(3600.0)})
    (beat,) = deployment.start_beats(1)
    beat.stop()
    deployment.read()
    changed_ms = deployment.now_ms()
    deployment.start_beats(1, beat_schedule={"job": entry(1.0)})
    deployment.wait_firing(["job"])
    assert deployment.ledger.slots("job")[0] >= changed_ms + 1000


def test_celerys_own_clean_up_is_there_when_its_results_do_not_expire_by_themselves(
    deploy: Deploy,
) -> None:
    deployment = deploy()
    beats = deployment.start_beats(1, result_backend=deployment.store.url)
    assert [timer.name for timer in deployment.timers.get_timers()] == []
    stop_all(beats)
    deployment.start_beats(2, result_backend=f"file://{deployment.folder}")
    wait_until(
        lambda: (
            [timer.task for timer in deployment.timers.get_timers()] == ["celery.backend_cleanup"]
        ),
        "celery.backend_cleanup to be the only timer",
    )


def test_the_banner_shows_service_instance_and_server_without_secrets(deploy: Deploy) -> None:
    deployment = deploy()
    url = deployment.store.url.replace("redis://", "redis://:@") + "?client_name=secret"
    beat = deployment.start_beat(dtimer_redis_url=url)
    deployment.wait_registered([beat])
    banner = beat.log_text()
    assert "orders" in banner
    assert deployment.registered()[beat.pid] in banner
    assert f"127.0.0.1:{deployment.store.port}" in banner
    assert "secret" not in banner
