"""The measurements by name, in the order in which they run."""

from __future__ import annotations

from tests.benchmarks import rabbitmq
from tests.benchmarks.scenarios import calling, dispatching, failing, lag, storing
from tests.benchmarks.scenarios.scenario import Scenario
from tests.benchmarks.scenarios.scripts import scripts

_OURS = frozenset({"dtimer"})
_STORED = _OURS | {"redbeat", "redbeat_50ms"}
_CELERY = _STORED | {"celery_beat"}
_ALL = _CELERY | {"bullmq"}

SCENARIOS = {
    "dispatch": Scenario(dispatching.dispatch, _ALL | {"limit"}),
    "dispatch_many": Scenario(dispatching.dispatch_many, _OURS),
    "two_beats": Scenario(dispatching.two_beats, _OURS),
    "lag": Scenario(lag.lag, _ALL),
    "lag_busy": Scenario(lag.lag_busy, _OURS),
    "created_now": Scenario(lag.created_now, _OURS),
    "rabbitmq": Scenario(
        dispatching.rabbitmq, _OURS | {"celery_beat"}, unavailable=rabbitmq.unavailable
    ),
    "creation": Scenario(storing.creation, _STORED | {"bullmq"}),
    "memory": Scenario(storing.memory, _STORED | {"bullmq"}),
    "idle": Scenario(storing.idle, _CELERY),
    "startup": Scenario(storing.startup, _CELERY),
    "startup_many": Scenario(storing.startup_many, _OURS),
    "failover": Scenario(failing.failover, _OURS),
    "countdowns": Scenario(calling.countdowns, _OURS),
    "tracking": Scenario(calling.tracking, _OURS),
    "scripts": Scenario(scripts, _OURS),
    "stored_large": Scenario(storing.stored_large, _OURS, is_large=True),
    "all_due_large": Scenario(storing.all_due_large, _OURS, is_large=True),
}
