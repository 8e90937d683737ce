"""How much is tried, and the count of what was.

`make test` tries a little, always the same; `make fuzz` tries ``DTIMER_FUZZ_INPUTS`` inputs, others
each time.
"""

from __future__ import annotations

import os
from collections import Counter

from hypothesis import HealthCheck, settings

_ASKED = os.environ.get("DTIMER_FUZZ_INPUTS")
INPUTS = int(_ASKED or 3000)

#: How many bad inputs were tried in this process, by what they were given to.
TRIED: Counter[str] = Counter()


def share(of_all: float) -> settings:
    """Return the settings of a test that tries this share of all inputs."""
    return settings(
        max_examples=max(10, round(INPUTS * of_all)),
        deadline=None,
        database=None,
        derandomize=_ASKED is None,
        print_blob=True,
        suppress_health_check=list(HealthCheck),
    )
