"""Which beats own how many timers."""

from __future__ import annotations

import redis

from tests.benchmarks.measure import wait_until

OWNERSHIP_SECONDS = 60.0
#: A dead beat is noticed after four seconds.
QUICK_FAILOVER = {
    "dtimer_heartbeat_interval": 1,
    "dtimer_failure_check_interval": 1,
    "dtimer_instance_timeout": 4,
}
TIMEOUT = QUICK_FAILOVER["dtimer_instance_timeout"]


def owned_timers(client: redis.Redis) -> list[int]:
    """Return how many timers each instance owns."""
    instances = client.scan_iter("instance:*", count=1000)
    keys = [b"instance_timers:" + key.partition(b":")[2] for key in instances]
    return [int(client.zcard(key)) for key in keys]


def wait_until_owned(client: redis.Redis, largest: int) -> None:
    """Wait until the beats own timers and the one with the most has ``largest``."""
    wait_until(
        lambda: max(owned_timers(client), default=0) == largest,
        f"a beat to own {largest} timers",
        OWNERSHIP_SECONDS,
    )
