"""What an instance counts of its own work."""

from __future__ import annotations

import threading

from celery_dtimer.metering import CONFLICTS
from celery_dtimer.meters import CALL_BOUNDS, FAILOVER_BOUNDS, LAG_BOUNDS, Meters
from celery_dtimer.store import COMMIT_REFUSALS


def test_nothing_is_counted_at_first() -> None:
    reading = Meters().reading()
    assert reading.count("sent") == reading.count("skipped", "misfire") == 0
    assert (reading.lag.counts[-1], reading.lag.total) == (0, 0)
    assert reading.calls == {}


def test_labels_are_counted_apart() -> None:
    meters = Meters()
    meters.count("skipped", 3, "misfire")
    meters.count("skipped", label="paused")
    meters.count("skipped", label="paused")
    reading = meters.reading()
    assert (reading.count("skipped", "misfire"), reading.count("skipped", "paused")) == (3, 2)


def test_each_lag_is_in_every_bucket_that_is_wide_enough() -> None:
    meters = Meters()
    meters.observe_sent(4, [0.005, 0.0051, 2.0, 1000.0])
    reading = meters.reading()
    assert reading.count("sent") == 4
    at_most = dict(zip((*LAG_BOUNDS, float("inf")), reading.lag.counts, strict=True))
    assert (at_most[0.005], at_most[0.01], at_most[1.0], at_most[2.5]) == (1, 2, 2, 3)
    assert (at_most[300.0], at_most[float("inf")]) == (3, 4)
    assert round(reading.lag.total, 4) == 1002.0101


def test_the_calls_of_each_script_are_apart() -> None:
    meters = Meters()
    meters.observe_call("due", 0.004)
    meters.observe_call("commit", 0.5)
    meters.observe_call("commit", 0.7)
    calls = meters.reading().calls
    assert {name: spread.counts[-1] for name, spread in calls.items()} == {"due": 1, "commit": 2}
    assert calls["commit"].total == 1.2


def test_a_reading_does_not_change() -> None:
    meters = Meters()
    before = meters.reading()
    meters.count("fenced")
    meters.observe_failover(31)
    assert (before.count("fenced"), before.failover.counts[-1]) == (0, 0)
    assert meters.reading().failover.counts[-1] == 1


def test_bounds_grow() -> None:
    for bounds in (LAG_BOUNDS, FAILOVER_BOUNDS, CALL_BOUNDS):
        assert list(bounds) == sorted(set(bounds))


def test_every_refused_commit_has_a_label() -> None:
    assert CONFLICTS.keys() == COMMIT_REFUSALS.keys()
    assert len(set(CONFLICTS.values())) == len(CONFLICTS)


def test_threads_lose_no_count() -> None:
    meters = Meters()

    def work() -> None:
        for _ in range(2000):
            meters.count("sent")
            meters.observe_call("due", 0.001)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    reading = meters.reading()
    assert (reading.count("sent"), reading.calls["due"].counts[-1]) == (8000, 8000)
