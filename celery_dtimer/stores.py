"""Stores that belong to a process: the children of a worker that forks have their own.

They are made on first use, and closed as a worker, or one of its processes, ends, and when nobody
has the app any more.
"""

from __future__ import annotations

import os
import weakref
from typing import Any

from celery import Celery, signals

from celery_dtimer.settings import Settings
from celery_dtimer.sharding import Shards


class ProcessStores:
    """The stores of an app's services, for whatever process asks."""

    def __init__(self, app: Celery, *, longest_wait: float = float("inf")) -> None:
        """Prepare; nothing is read or contacted before the first use.

        Args:
            app: whose settings are used.
            longest_wait: seconds that a call to Redis may take at most.
        """
        self._app = weakref.ref(app)
        weakref.finalize(app, self.close).atexit = False
        self._longest_wait = longest_wait
        self._stores: dict[tuple[int, str | None], Shards] = {}  # by process and service

    def of(self, service: str | None = None) -> Shards:
        """Return this process's store of a service, by default the app's own.

        Raises:
            SettingsError: a setting cannot be used.
        """
        key = os.getpid(), service
        store = self._stores.get(key)
        if store is None:
            app = self._app()
            assert app is not None  # noqa: S101 - whoever asks has it
            settings = Settings.from_app(app, service)
            timeout = min(settings.call_timeout, self._longest_wait)
            store = self._stores.setdefault(key, Shards(settings, timeout=timeout))
            # Held weakly; without an id Celery 5.5 takes the methods of all objects for one.
            signal_id = f"{__name__}.{id(self)}"
            signals.worker_process_shutdown.connect(self.close, dispatch_uid=signal_id)
            signals.worker_shutdown.connect(self.close, dispatch_uid=signal_id)
        return store

    def services(self) -> set[str]:
        """Return the services that this process, or the one that it is a fork of, has used."""
        return {service for _, service in list(self._stores) if service is not None}

    def close(self, **_: Any) -> None:
        """Drop the connections of this process; the next use opens new ones."""
        for key in list(self._stores):
            if key[0] == os.getpid():
                self._stores.pop(key).close()
