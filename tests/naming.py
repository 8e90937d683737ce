"""Names of test cases."""

from __future__ import annotations

import re

from celery_dtimer.errors import shown


def named(value: object) -> str:
    """Return a value as a test's id: the same in every process, so without addresses."""
    return re.sub(r" at 0x[0-9a-f]+", "", shown(value))
