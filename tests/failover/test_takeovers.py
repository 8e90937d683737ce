"""Takeovers are as quick as the README says; `tests.failover.takeovers` measures many of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.failover import takeovers
from tests.failover.deployment import IS_LONG, Deploy

TRIES = 5 if IS_LONG else 1


@pytest.mark.parametrize("kind", takeovers.KINDS)
def test_a_takeover(
    deploy: Deploy, kind: str, record_property: Callable[[str, object], None]
) -> None:
    conf = takeovers.conf_of(as_shipped=False)
    deployment = deploy(**conf)
    deployment.create(takeovers.TIMERS, takeovers.INTERVAL)
    deployment.start_beats(1)
    deployment.read()
    found = [takeovers.measure(deployment, kind, conf) for _ in range(TRIES)]
    record_property("takeover_seconds", found)
    assert max(found) <= takeovers.bound(kind, conf) + takeovers.INTERVAL
    deployment.ledger.assert_nothing_doubled()
