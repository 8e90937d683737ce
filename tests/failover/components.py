"""pytest-celery's missing component: beats, beside its brokers and workers."""

from __future__ import annotations

from typing import Any

from pytest_celery import CeleryTestCluster, CeleryTestNode, CeleryWorkerContainer
from pytest_celery.defaults import DEFAULT_WORKER_VOLUME
from pytest_docker_tools import container, fxtr


class CeleryBeatContainer(CeleryWorkerContainer):
    """A container that runs ``celery beat`` with this package's scheduler."""

    @classmethod
    def command(cls, *args: str, **_: Any) -> list[str]:
        """Return the command line."""
        level = f"--loglevel={cls.log_level()}"
        return ["celery", "-A", "app", "beat", "-S", "dtimer", level, *args]

    @property
    def ready_prompt(self) -> None:
        """Nothing to wait for: beats start side by side, and the cluster waits for all of them."""


class CeleryTestBeat(CeleryTestNode):
    """One beat of a cluster."""


class CeleryBeatCluster(CeleryTestCluster):
    """All beats of one service."""

    def __init__(self, *nodes: CeleryTestBeat | CeleryBeatContainer) -> None:
        super().__init__(*nodes)

    def ready(self) -> bool:
        """Wait until every beat has begun."""
        for beat in self:
            beat.wait_for_log("beat: Starting...")
        return super().ready()

    def _set_nodes(
        self,
        *nodes: CeleryTestNode | CeleryBeatContainer,
        node_cls: type[CeleryTestNode] = CeleryTestBeat,
    ) -> tuple[CeleryTestNode, ...]:
        return super()._set_nodes(*nodes, node_cls=node_cls)


def beat_container() -> Any:
    """Return the fixture of one beat, which shares the worker's image, app and settings."""
    return container(
        image="{celery_base_worker_image.id}",
        environment=fxtr("default_worker_env"),
        network="{default_pytest_celery_network.name}",
        volumes={"{default_worker_volume.name}": DEFAULT_WORKER_VOLUME},
        wrapper_class=CeleryBeatContainer,
        command=CeleryBeatContainer.command(),
        timeout=30,
    )
