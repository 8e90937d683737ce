"""What happens in a run, chosen by its seed: the episodes, and the order of the faults.

Choices of one kind come from a generator of their own, so that how long one thing takes changes
nothing of what the others do.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass

_SHORT, _LONG, _LONGEST = 30.0, 90.0, 300.0  # seconds of an episode: memory wants long ones


@dataclass(frozen=True, slots=True)
class Episode:
    """A deployment that lives for some seconds."""

    number: int
    deployment: str
    seconds: float
    seed: str

    def random(self, what: str) -> random.Random:
        """Return the generator of one kind of choices."""
        return random.Random(f"{self.seed}/{what}")


def episodes(seed: int, seconds: float, deployments: Collection[str]) -> list[Episode]:
    """Return the episodes of a run: the first deployment is every other one, all come in turn."""
    longest = _LONGEST if seconds >= 6 * _LONGEST else _LONG if seconds >= 4 * _LONG else _SHORT
    count = max(1, int(seconds // longest))
    first, *others = deployments
    random.Random(f"{seed}/deployments").shuffle(others)
    turn = [
        first if number % 2 == 0 or not others else others[number // 2 % len(others)]
        for number in range(count)
    ]
    return [
        Episode(number, name, seconds / count, f"{seed}/{number}")
        for number, name in enumerate(turn)
    ]


class Deck:
    """Draws at random what was drawn least: in a long run everything comes equally often."""

    def __init__(self, seed: int, names: Iterable[str]) -> None:
        self._random = random.Random(f"{seed}/faults")
        self.drawn = Counter(dict.fromkeys(names, 0))

    def draw(self, allowed: Collection[str]) -> str:
        """Return one of those that are allowed now."""
        least = min(self.drawn[name] for name in allowed)
        name = self._random.choice([name for name in sorted(allowed) if self.drawn[name] == least])
        self.drawn[name] += 1
        return name
