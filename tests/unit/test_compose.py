"""The example's containers: what their files name is there, and fits together."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from configparser import ConfigParser
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.command_lines import problem

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "example_project"
COMPOSE = yaml.safe_load((FOLDER / "docker-compose.yml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
SHOP = [name for name, service in SERVICES.items() if "build" in service]
BEATS = [name for name in SHOP if name.startswith("beat-")]
PROMETHEUS = yaml.safe_load((FOLDER / "docker" / "prometheus.yml").read_text())

each_service = pytest.mark.parametrize("name", SERVICES)


def mounts(name: str) -> dict[str, str]:
    """Return the files that a service mounts, by where it finds them."""
    volumes = [volume.split(":") for volume in SERVICES[name].get("volumes", [])]
    return {parts[1]: parts[0] for parts in volumes if parts[0].startswith(".")}


def test_there_are_three_beats_and_two_workers() -> None:
    assert len(BEATS) == 3
    assert len([name for name in SHOP if name.startswith("worker-")]) == 2


@each_service
def test_each_service_is_watched_restarted_and_given_time_to_stop(name: str) -> None:
    service = SERVICES[name]
    assert service["healthcheck"]["test"][0] in ("CMD", "CMD-SHELL")
    assert service["restart"] == "unless-stopped"
    assert re.fullmatch(r"\d+[sm]", service["stop_grace_period"])


@each_service
def test_each_image_is_built_here_or_of_one_version(name: str) -> None:
    service = SERVICES[name]
    assert "build" in service or re.fullmatch(r"[a-z/]+:v?\d+\.\d+\.\d+", service["image"])


@each_service
def test_what_is_mounted_is_there(name: str) -> None:
    assert [file for file in mounts(name).values() if not (FOLDER / file).is_file()] == []


@each_service
def test_what_a_service_waits_for_says_when_it_is_ready(name: str) -> None:
    assert all("healthcheck" in SERVICES[other] for other in SERVICES[name].get("depends_on", {}))


@pytest.mark.parametrize("name", SHOP)
def test_the_commands_are_celerys(name: str) -> None:
    service = SERVICES[name]
    kind, *check = service["healthcheck"]["test"]
    words = shlex.split(check[0]) if kind == "CMD-SHELL" else check
    assert problem(service["command"]) is None
    assert problem(words) is None
    assert words[:3] == service["command"][:3] == ["celery", "-A", "example_project"]


@pytest.mark.parametrize("name", SHOP)
def test_the_app_reads_what_it_is_given(name: str) -> None:
    environment = {
        key: re.sub(r"\$\{\w+:-(.*)\}", r"\1", value)
        for key, value in SERVICES[name]["environment"].items()
    }
    program = (
        "from celery_dtimer.settings import Settings; from example_project.celery import app\n"
        "settings = Settings.from_app(app)\n"
        "print(app.conf.broker_url, settings.redis_url, settings.instance_timeout)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.split() == ["redis://redis:6379/0", "redis://redis:6379/0", "30.0"], done
    source = (FOLDER / "celery.py").read_text()
    assert all(f'"{key}"' in source for key in environment)


def test_redis_keeps_all_timers() -> None:
    command = " ".join(SERVICES["redis"]["command"])
    assert "--appendonly yes" in command
    assert "--maxmemory-policy noeviction" in command
    assert "redis:/data" in SERVICES["redis"]["volumes"]


def test_prometheus_asks_each_beat() -> None:
    (job,) = PROMETHEUS["scrape_configs"]
    (targets,) = job["static_configs"]
    asked = dict(target.split(":") for target in targets["targets"])
    assert asked == {name: SERVICES[name]["environment"]["SHOP_METRICS_PORT"] for name in BEATS}


def test_prometheus_finds_the_alerts() -> None:
    assert set(PROMETHEUS["rule_files"]) <= mounts("prometheus").keys()


def test_grafana_finds_prometheus_and_the_dashboard() -> None:
    provisioning = FOLDER / "docker" / "grafana"
    (source,) = yaml.safe_load((provisioning / "datasources.yml").read_text())["datasources"]
    (provider,) = yaml.safe_load((provisioning / "dashboards.yml").read_text())["providers"]
    places = mounts("grafana")
    assert source["url"] == "http://prometheus:9090"
    assert f"{provider['options']['path']}/dtimer.json" in places
    home = SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home in places


def test_the_image_is_built_of_what_is_there() -> None:
    text = (FOLDER / "Dockerfile").read_text()
    assert SERVICES[BEATS[0]]["build"] == {
        "context": "..",
        "dockerfile": "example_project/Dockerfile",
    }
    copied = [
        word for line in re.findall(r"^COPY (.*) \S+$", text, re.MULTILINE) for word in line.split()
    ]
    allowed = (FOLDER / "Dockerfile.dockerignore").read_text().splitlines()
    assert copied
    assert all((ROOT / file).exists() and f"!{file}" in allowed for file in copied)
    project = (ROOT / "pyproject.toml").read_text()
    (extras,) = re.findall(r'pip install .*"\.\[([\w,]+)\]"', text)
    for extra in extras.split(","):
        assert re.search(rf"^{extra} = \[", project, re.MULTILINE), extra


# ------------------------------------------------------------------ the page on deployment

PAGE = (ROOT / "docs" / "deployment.md").read_text()


def blocks(language: str) -> list[str]:
    """Return the page's blocks in a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def test_the_probes_start_celery() -> None:
    deployment, budget = yaml.safe_load_all(blocks("yaml")[0])
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert problem(container["command"]) is None
    for name in ("startupProbe", "livenessProbe", "readinessProbe"):
        *shell, line = container[name]["exec"]["command"]
        words = shlex.split(line.partition("||")[0]) if "sh" in shell else [*shell, line]
        assert problem(words) is None, name
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert budget["spec"]["selector"]["matchLabels"] == labels


@pytest.mark.parametrize(("answer", "lives"), [(0, True), (1, False), (2, False), (3, True)])
def test_what_restarts_leaves_beats_alone_while_redis_is_away(
    answer: int, lives: bool, tmp_path: Path
) -> None:
    deployment, _ = yaml.safe_load_all(blocks("yaml")[0])
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    (tmp_path / "celery").write_text(f"#!/bin/sh\nexit {answer}\n")
    (tmp_path / "celery").chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    command = container["livenessProbe"]["exec"]["command"]
    assert (subprocess.run(command, env=environment, check=False).returncode == 0) == lives


def units() -> dict[str, ConfigParser]:
    """Return the page's systemd units, by their names."""
    names = re.findall(r"^`/etc/systemd/system/(.*)`:$", PAGE, re.MULTILINE)
    found = {name: ConfigParser(interpolation=None) for name in names}
    for unit, text in zip(found.values(), blocks("ini"), strict=True):
        unit.read_string(text)
    return found


def test_systemd_restarts_a_beat_that_hangs_and_no_other() -> None:
    found = units()
    check = found["proj-beat-health.service"]
    assert check["Service"]["SuccessExitStatus"] == "3"
    restart = found[check["Unit"]["OnFailure"]]["Service"]["ExecStart"].split()[-1]
    assert restart in found
    assert "proj-beat-health.timer" in found


def test_systemd_starts_celery() -> None:
    for name in ("proj-beat.service", "proj-beat-health.service"):
        path, *rest = units()[name]["Service"]["ExecStart"].split()
        assert problem([Path(path).name, *rest]) is None, name
