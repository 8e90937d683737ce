"""The schedulers that are measured, by name."""

from __future__ import annotations

from tests.benchmarks.bullmq import BullMQ
from tests.benchmarks.celerypeer import CeleryPeer, due_by_header
from tests.benchmarks.limit import Limit
from tests.benchmarks.peer import Peer

_SUBJECT = CeleryPeer(
    "dtimer", "celery_dtimer:DistributedScheduler", creator="bulk", due_of=due_by_header
)
_REDBEAT = "redbeat.RedBeatScheduler"

SUBJECT = _SUBJECT.name
ALL: tuple[Peer, ...] = (
    _SUBJECT,
    CeleryPeer("celery_beat", "celery.beat:PersistentScheduler"),
    CeleryPeer("redbeat", _REDBEAT, creator="redbeat"),
    CeleryPeer(
        "redbeat_50ms",
        _REDBEAT,
        creator="redbeat",
        # its lock would last five loops, less than one tick may take
        settings={"beat_max_loop_interval": 0.05, "redbeat_lock_timeout": 30},
    ),
    BullMQ("bullmq"),
    Limit("limit", _SUBJECT),
)
PEERS = {peer.name: peer for peer in ALL}
DEFAULT_PEERS = tuple(name for name in PEERS if name != "redbeat_50ms")
