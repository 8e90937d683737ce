"""What a server's configuration may cost: said at registration, and by the doctor.

Where the server does not tell its configuration (``CONFIG`` is forbidden, or renamed), nothing is
said. Of a server that is embedded in its only user nobody expects that it keeps anything.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import NamedTuple

#: The parameters that are asked for.
PARAMETERS = ("maxmemory", "maxmemory-policy", "appendonly", "save", "appendfsync")


class Risk(NamedTuple):
    """Something that a server's configuration may cost."""

    check: str  #: eviction or persistence
    level: int  #: of `logging`
    problem: str
    advice: str

    def __str__(self) -> str:
        """Return it as a line."""
        return f"{self.problem}: {self.advice}"


def risks(configuration: Mapping[str, str], *, is_embedded: bool = False) -> list[Risk]:
    """Return what a server's configuration may cost.

    Args:
        configuration: those of the `PARAMETERS` that are known.
        is_embedded: the server belongs to its users, and goes with them.
    """
    found = [_eviction(configuration)]
    if not is_embedded:
        found.append(_persistence(configuration))
    return [risk for risk in found if risk is not None]


def _eviction(configuration: Mapping[str, str]) -> Risk | None:
    policy = configuration.get("maxmemory-policy", "noeviction")
    if policy == "noeviction" or configuration.get("maxmemory", "0") == "0":
        return None
    return Risk(
        "eviction",
        logging.WARNING,
        f"Redis evicts keys when its memory is full ({policy}), and an evicted timer is lost",
        "set maxmemory-policy to noeviction",
    )


def _persistence(configuration: Mapping[str, str]) -> Risk | None:
    appendonly, save = configuration.get("appendonly"), configuration.get("save")
    if appendonly == "no" and save == "":
        return _risk(
            logging.WARNING,
            "Redis keeps nothing on disk: when it restarts, timers that were created at run time "
            "are lost, and calls that wait",
            "set appendonly to yes",
        )
    if appendonly == "no" and save is not None:
        return _risk(
            logging.WARNING,
            f"Redis keeps snapshots alone ({save}): when it fails, timers that were created since "
            "the last one are lost, and runs since then may be sent again",
            "set appendonly to yes",
        )
    fsync = configuration.get("appendfsync") if appendonly == "yes" else None
    if fsync == "no":
        return _risk(
            logging.WARNING,
            "Redis leaves it to the system when its log reaches the disk (appendfsync no): when "
            "the machine fails, timers of about the last 30 s are lost, and runs may be sent again",
            "set appendfsync to everysec or always",
        )
    if fsync == "everysec":
        return _risk(
            logging.INFO,
            "Redis writes its log to the disk every second (appendfsync everysec): when the "
            "machine fails, timers of up to a second are lost, and runs may be sent again",
            "set appendfsync to always if that is too much",
        )
    return None


def _risk(level: int, problem: str, advice: str) -> Risk:
    return Risk("persistence", level, problem, advice)
