"""An actor on a node, as it is called: by the methods of its class, so that a type checker sees each call."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from types import ModuleType
from typing import Any, Concatenate, ParamSpec, Protocol

from batchopt.backends.ray.actor import NodeActor
from batchopt.backends.ray.cluster import Needs

# The thread of the actor that answers while the other one works.
ASIDE = "aside"

P = ParamSpec("P")


class Link(Protocol):
    """Carries calls to an actor; each is answered at the reference that is returned."""

    def call(self, method: Callable[Concatenate[NodeActor, P], Any], *arguments: P.args, **keywords: P.kwargs) -> Any:
        """Call a method after those that were called before."""

    def call_aside(
        self, method: Callable[Concatenate[NodeActor, P], Any], *arguments: P.args, **keywords: P.kwargs
    ) -> Any:
        """Call a method while another one runs."""

    def end(self) -> None:
        """End the actor, and the workers that it has started."""


class RayLink:
    """A new actor with so many workers, placed on a node of a Ray cluster."""

    def __init__(self, ray: ModuleType, node: str, workers: int, needs: Needs) -> None:
        self._ray = ray
        affinity = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node, soft=False)
        remote = ray.remote(concurrency_groups={ASIDE: 1}, max_restarts=0, max_task_retries=0)(NodeActor)
        self._actor = remote.options(scheduling_strategy=affinity, **needs.options(workers)).remote()

    def call(self, method: Callable[Concatenate[NodeActor, P], Any], *arguments: P.args, **keywords: P.kwargs) -> Any:
        """See `Link`."""
        return getattr(self._actor, method.__name__).remote(*arguments, **keywords)

    def call_aside(
        self, method: Callable[Concatenate[NodeActor, P], Any], *arguments: P.args, **keywords: P.kwargs
    ) -> Any:
        """See `Link`."""
        called = getattr(self._actor, method.__name__).options(concurrency_group=ASIDE)
        return called.remote(*arguments, **keywords)

    def end(self) -> None:
        """See `Link`."""
        with suppress(Exception):
            self._ray.kill(self._actor, no_restart=True)
