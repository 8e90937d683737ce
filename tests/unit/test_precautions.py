"""What a server's configuration may cost."""

from __future__ import annotations

import logging

import pytest

from celery_dtimer.precautions import risks

SAFE = {"appendonly": "yes", "appendfsync": "always", "maxmemory-policy": "noeviction"}
EVICTING = {"maxmemory": "1000", "maxmemory-policy": "volatile-ttl"}


@pytest.mark.parametrize(
    ("configuration", "found"),
    [
        ({}, []),
        (SAFE, []),
        ({**SAFE, **EVICTING}, [("eviction", logging.WARNING, "volatile-ttl")]),
        ({**SAFE, **EVICTING, "maxmemory": "0"}, []),
        (
            {"appendonly": "no", "save": ""},
            [("persistence", logging.WARNING, "nothing on disk")],
        ),
        (
            {"appendonly": "no", "save": "60 1"},
            [("persistence", logging.WARNING, "snapshots alone (60 1)")],
        ),
        ({"appendonly": "no"}, []),
        (
            {**SAFE, "appendfsync": "no"},
            [("persistence", logging.WARNING, "about the last 30 s")],
        ),
        (
            {**SAFE, "appendfsync": "everysec"},
            [("persistence", logging.INFO, "up to a second")],
        ),
    ],
)
def test_a_risk_says_what_can_be_lost(
    configuration: dict[str, str], found: list[tuple[str, int, str]]
) -> None:
    told = risks(configuration)
    assert [(risk.check, risk.level) for risk in told] == [each[:2] for each in found]
    for risk, (_, _, text) in zip(told, found, strict=True):
        assert text in str(risk)
        assert str(risk).endswith(risk.advice)


def test_an_embedded_server_is_not_expected_to_keep_anything() -> None:
    assert risks({"appendonly": "no", "save": ""}, is_embedded=True) == []
    assert [risk.check for risk in risks(EVICTING, is_embedded=True)] == ["eviction"]
