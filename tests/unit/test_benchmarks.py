"""The pure parts of the benchmark: what is counted as what, and how it is summed up."""

from __future__ import annotations

import base64
import json
import math

import pytest

pytest.importorskip("psutil")

from tests.benchmarks import limit, measure, report
from tests.benchmarks.celerypeer import due_by_order
from tests.benchmarks.intervals import starting_at
from tests.benchmarks.measures import MEASURES
from tests.benchmarks.scenarios import SCENARIOS, failing
from tests.benchmarks.workload import Workload


def _message(index: int) -> bytes:
    body = base64.b64encode(json.dumps([[index, "x"], {}, {}]).encode()).decode()
    return json.dumps({"body": body}).encode()


def _run(name: str, pid: int) -> bytes:
    return json.dumps({"headers": {"dtimer": {"name": name, "instance": f"h:{pid}:aa"}}}).encode()


def test_a_workload_survives_the_environment() -> None:
    workload = Workload(3, every=0.1, start=100.0, far=2)
    assert Workload.from_environment(workload.environment()) == workload
    assert [entry.every for entry in workload.entries()] == [0.1, 0.1, 0.1, 0, 0]


def test_due_times_are_spread_over_one_interval() -> None:
    workload = Workload(4, every=2, start=100.0)
    assert [entry.first_due for entry in workload.entries()] == [100.0, 100.5, 101.0, 101.5]


def test_an_interval_with_a_start_is_stored_as_any_other() -> None:
    rule = starting_at(10, 123.4567)
    assert rule.first_run(999) == 123457
    assert rule.encode() == {"every": 10_000}


def test_the_kth_message_stands_for_the_kth_due_time() -> None:
    workload = Workload(2, every=10, start=100.0)
    arrivals = [(100.1, _message(0)), (105.1, _message(1)), (110.3, _message(0))]
    assert list(due_by_order(arrivals, workload)) == [(100.1, 100), (105.1, 105), (110.3, 110)]


def test_gaps_are_those_of_timers_that_changed_hands_after_the_moment() -> None:
    arrivals = [
        (1.0, _run("moved before", 1)),
        (1.0, _run("killed", 1)),
        (1.0, _run("other", 2)),
        (1.1, _run("moved before", 2)),
        (6.0, _run("killed", 2)),
        (6.0, _run("moved before", 2)),
        (6.1, _run("killed", 2)),
    ]
    assert failing.gaps(arrivals, 1, moment=2.0) == {"killed": 5.0}


def test_the_limit_puts_new_ids_into_the_same_text() -> None:
    text = json.dumps(
        {"headers": {"id": "i-1", "root_id": "i-1"}, "properties": {"delivery_tag": "t-1"}}
    )
    build = limit.builder(text)
    first, second = json.loads(build()), json.loads(build())
    assert first["headers"]["id"] == first["headers"]["root_id"] != second["headers"]["id"]
    assert first["properties"]["delivery_tag"] not in {"t-1", first["headers"]["id"]}


def test_commands_of_scripts_are_no_requests() -> None:
    monitored = b'+1.0 [0 127.0.0.1:5] "EVALSHA" "x"\r\n+1.0 [0 lua] "GET" "y"\r\n'
    assert measure.count_requests(monitored) == {"evalsha": 1}


def test_a_percentile_of_nothing_is_not_a_number() -> None:
    assert math.isnan(measure.percentile([], 0.5))
    assert measure.percentile([3, 1, 2], 0.5) == 2


def test_rows_hold_medians_ratios_and_goals() -> None:
    results = [
        report.Result("dispatch", peer, number, 0.0, {"runs_per_s": rate})
        for peer, rates in {"dtimer": [10, 30, 20], "redbeat": [1, 1, 2]}.items()
        for number, rate in enumerate(rates)
    ]
    (row,) = report.rows(results)
    assert row.medians == {"dtimer": 20, "redbeat": 1}
    assert row.ratios == {"redbeat": 20}
    assert row.goals["≥ 15 × redbeat"] is True
    assert row.goals["≥ 2 × bullmq"] is None
    assert "20 ×" in report.table([row], ["dtimer", "redbeat"], 10_000)


def test_every_measure_belongs_to_a_scenario_and_has_a_title() -> None:
    assert {scenario for scenario, _ in MEASURES} <= SCENARIOS.keys()
    assert all(each.title_for(10_000) for each in MEASURES.values())
