"""Metrics of real beats: what Prometheus sees when one of them is killed."""

from __future__ import annotations

from tests.failover.deployment import TAKEOVER, Deployment
from tests.processes import Process
from tests.scraping import scrape, total
from tests.servers import free_port
from tests.waiting import wait_until


def beats_with_metrics(deployment: Deployment, count: int) -> list[tuple[Process, int]]:
    """Start beats that serve metrics; return them with their ports."""
    ports = [free_port() for _ in range(count)]
    beats = [deployment.start_beat(dtimer_metrics_port=port) for port in ports]
    deployment.wait_registered(beats)
    return list(zip(beats, ports, strict=True))


def test_the_survivor_tells_of_the_failover_and_what_both_have_sent(
    deployment: Deployment,
) -> None:
    (killed, killed_port), (survivor, port) = beats_with_metrics(deployment, 2)
    names = deployment.create(20, 0.5)
    deployment.wait_firing(names)
    deployment.wait_balanced()
    timers = len(deployment.timers.get_timers())
    scrapes = [scrape(killed_port), scrape(port)]
    assert all(each.sum("dtimer_instance_sent_total") > 0 for each in scrapes)
    assert total(scrapes, "dtimer_instance_timers") == timers
    assert {each.sum("dtimer_service_timers", status="active") for each in scrapes} == {timers}
    assert all(each.sum("dtimer_instance_failover_seconds_count") == 0 for each in scrapes)

    killed.kill()
    found = wait_until(
        lambda: (it := scrape(port)).sum("dtimer_instance_failover_seconds_count") and it,
        "the failover",
        TAKEOVER + 5,
    )
    assert found.sum("dtimer_instance_failover_seconds_sum") < TAKEOVER + 2
    assert found.sum("dtimer_instance_failover_timers_total") >= 10
    wait_until(lambda: scrape(port).sum("dtimer_instance_timers") == timers, "all to be its own")
    assert scrape(port).sum("dtimer_service_instances", state="live") == 1
    wait_until(lambda: scrape(port).sum("dtimer_service_timers_overdue") == 0, "all to be on time")
    survivor.stop()


def test_a_beat_without_its_port_works_and_gets_it_when_the_other_goes(
    deployment: Deployment,
) -> None:
    """Two beats of one host that name the same port."""
    port = free_port()
    first = deployment.start_beat(dtimer_metrics_port=port)
    deployment.wait_registered([first])
    wait_until(lambda: "Metrics are served" in first.log_text(), "metrics to be served", 10)
    second = deployment.start_beat(dtimer_metrics_port=port)
    deployment.wait_registered([first, second])
    wait_until(lambda: "can not be served" in second.log_text(), "the line", 10)
    names = deployment.create(9, 0.5)  # and Celery's own: half of them each
    deployment.wait_firing(names)
    assert deployment.owned_by(second) == 5
    first.stop()
    wait_until(lambda: "Metrics are served" in second.log_text(), "metrics to be served", 10)
    assert scrape(port).sum("dtimer_instance_sent_total") > 0
    assert second.log_text().count("can not be served") == 1
