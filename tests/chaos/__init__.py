"""The fault suite: real servers, beats and workers, faults at random, and an account of every run.

``python -m tests.chaos --seconds 60 --seed 7`` runs it, ``make chaos`` installs what it needs.
It asks the product nothing that it could work out itself:

- `plan` chooses episodes and faults by a seed; `deployment` starts servers and beats.
- `workload` creates, changes and deletes timers of all kinds, and writes down what it asked for.
- `faults` breaks things and mends them; `edits` are the keys that it edits by hand.
- `ledger` takes every message from the broker's queue before a worker sees it.
- `oracle` says from schedules alone which runs there ought to be.
- `verdict` compares, `report` shows.
"""
