"""The users of ``docs/redis.md`` and their rights, as the page says them."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "redis.md"
#: What beats and redis-py try, and do without.
OPTIONAL = {
    "scan",
    "info",
    "xinfo|stream",
    "config|get",
    "client|setinfo",
    "client|maint_notifications",
    "config",
    "client",
}


def documented() -> dict[str, list[str]]:
    """Return the users of the page with their rules."""
    lines = re.findall(r"^ACL SETUSER (\S+) (.+)$", PAGE.read_text(), re.MULTILINE)
    return {name: rules.split() for name, rules in lines}


def commands_of(rules: list[str]) -> set[str]:
    """Return the commands that rules allow."""
    return {rule[1:] for rule in rules if rule.startswith("+")}
