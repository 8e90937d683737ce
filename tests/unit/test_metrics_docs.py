"""The page on metrics, the dashboard and the alert rules speak of metrics that there are."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from celery_dtimer.metrics import FAMILIES, Collector

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "metrics.md").read_text()
ALERTS = (DOCS / "prometheus-alerts.yml").read_text()
DASHBOARD: dict[str, Any] = json.loads((DOCS / "grafana-dashboard.json").read_text())
PANELS: list[dict[str, Any]] = DASHBOARD["panels"]

IN_ALERTS = re.findall(r"^ +expr: (.+)$", ALERTS, re.MULTILINE)
IN_DASHBOARD = [target["expr"] for panel in PANELS for target in panel.get("targets", [])]
LABELS = {family.name: set(family.labels) for family in FAMILIES}


def rows() -> list[list[str]]:
    """Return the cells of the page's table."""
    lines = [line for line in PAGE.splitlines() if line.startswith("| `dtimer_")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def samples() -> dict[str, set[str]]:
    """Return the labels of all that may be asked for, by name."""
    found: dict[str, set[str]] = {}
    for family in FAMILIES:
        names = [family.name]
        if family.kind == "histogram":
            names = [f"{family.name}_{part}" for part in ("bucket", "sum", "count")]
        for name in names:
            found[name] = set(family.labels) | ({"le"} if name.endswith("_bucket") else set())
    return found


def test_the_page_lists_every_family_as_it_is() -> None:
    listed = [
        (name.strip("`"), kind, tuple(label.strip("`") for label in labels.split(", ")))
        for name, kind, labels, *_ in rows()
    ]
    assert listed == [(family.name, family.kind, family.labels) for family in FAMILIES]


def test_the_page_says_of_each_what_to_do_with_several_beats() -> None:
    over_beats = {name.strip("`"): over for name, _, _, over, _ in rows()}
    for family in FAMILIES:
        if family.name.startswith("dtimer_service_"):
            assert over_beats[family.name] == "max"
        elif family.kind in ("counter", "histogram"):
            assert over_beats[family.name] == "sum"
        else:
            assert over_beats[family.name] in ("each", "sum")


def test_the_collector_describes_the_families() -> None:
    described = list(Collector().describe())
    assert [(each.name, each.type) for each in described] == [
        (family.name.removesuffix("_total"), family.kind) for family in FAMILIES
    ]
    assert all(each.documentation for each in described)


def test_a_collector_without_instances_tells_nothing() -> None:
    assert not [sample for family in Collector().collect() for sample in family.samples]


@pytest.mark.parametrize("expression", [*IN_ALERTS, *IN_DASHBOARD])
def test_what_is_asked_for_exists(expression: str) -> None:
    known = samples()
    asked = re.findall(r"\bdtimer_\w+", expression)
    assert asked
    assert set(asked) <= known.keys()
    labels = set(re.findall(r"[{,] *(\w+)=", expression))
    grouped = re.findall(r"\bby \(([^)]*)\)", expression)
    labels |= {label.strip() for group in grouped for label in group.split(",")}
    has = set().union(*(known[name] for name in asked))
    assert labels <= has, f"no label {labels - has}"


@pytest.mark.parametrize("expression", [*IN_ALERTS, *IN_DASHBOARD])
def test_what_every_beat_tells_the_same_is_not_added_up(expression: str) -> None:
    assert not re.search(r"\bsum\b[^(]*(\([^()]*\) *)?\((\w+\()*dtimer_service_", expression)


def test_every_kind_of_trouble_has_an_alert() -> None:
    names = re.findall(r"- alert: (\w+)", ALERTS)
    assert len(names) == len(set(names)) == len(IN_ALERTS)
    told = {
        *("DtimerNoLiveInstance", "DtimerTimersOverdue", "DtimerBrokerUnreachable"),
        *("DtimerRedisDown", "DtimerDeadLetters", "DtimerFailover", "DtimerFenced"),
        *("DtimerTimersBroken", "DtimerClockOff", "DtimerLag"),
    }
    assert told <= set(names)
    labels = re.findall(r"\{\{ \$labels\.(\w+) \}\}", ALERTS)
    assert set(labels) <= set().union(*LABELS.values())


def test_the_dashboard_can_be_imported() -> None:
    variables = {each["name"]: each for each in DASHBOARD["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    assert variables["datasource"]["query"] == "prometheus"
    assert variables["service"]["query"]["query"] == "label_values(dtimer_instance_info, service)"
    ids = [panel["id"] for panel in PANELS]
    assert len(ids) == len(set(ids))
    for panel in PANELS:
        if panel["type"] == "row":
            continue
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert all('service=~"$service"' in target["expr"] for target in panel["targets"])


def test_no_panel_lies_on_another() -> None:
    places: set[tuple[int, int]] = set()
    for panel in PANELS:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        own = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not own & places, panel["title"]
        places |= own
