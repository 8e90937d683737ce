"""What a measurement is: a function of a peer, a server of its own and a size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests.benchmarks.measure import Figures
from tests.benchmarks.peer import Peer
from tests.benchmarks.processes import Server

CYCLES_PER_SECOND = 1_500  # as slowly a first cycle through all timers may go


@dataclass(frozen=True, slots=True)
class Size:
    """How much is measured.

    Attributes:
        timers: The number of timers, of which other numbers are multiples.
        seconds: Of one measurement.
        lag_interval: The interval of the timers whose lag is measured, in seconds.
        tries: Of what is measured one by one.
        reader: How the messages are taken off the broker where they are only counted.
    """

    timers: int = 10_000
    seconds: float = 10.0
    lag_interval: int = 10
    tries: int = 100
    reader: str = "drop"

    def warm_up_limit(self, timers: int) -> float:
        """Return the seconds after which a beat with so many timers is measured in any case."""
        return 2 * self.seconds + timers / CYCLES_PER_SECOND


@dataclass(frozen=True, slots=True)
class Scenario:
    """A measurement.

    Attributes:
        run: Takes a peer, a server and a size, and returns figures by name.
        peers: The peers for which it makes sense.
        is_large: Whether it takes so long that it is run only when asked for.
        unavailable: Returns why it cannot run here; None when it can.
    """

    run: Callable[[Peer, Server, Size], Figures]
    peers: frozenset[str]
    is_large: bool = False
    unavailable: Callable[[], str | None] = lambda: None
