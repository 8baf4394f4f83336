"""Stand in for Ray: a cluster within this process, whose tasks end when a test or a wait says so."""

from __future__ import annotations

import copy
import importlib
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

ENGINE = "raafl.runtime.executors.ray_engine"


class Reference:
    """Reference to a stored value, or to the result of a task, which has ended when ``call`` is None."""

    def __init__(self, value: Any = None, call: Callable[[], Any] | None = None) -> None:
        self.value, self.call = value, call

    def end(self) -> None:
        """Run the task."""
        assert self.call is not None, "the task has ended, or was cancelled"
        call, self.call = self.call, None
        try:
            self.value = copy.deepcopy(call())  # a worker's buffers go on to its next task
        except Exception as error:
            self.value = Cluster.TaskError(error)


class Cluster:
    """Cluster of some CPUs and GPUs; `module` stands for the module `ray`.

    `tasks`: references to the results of all tasks, in the order in which they were given.
    `stored`: references to values in the object store that somebody still uses.
    """

    class Error(Exception):
        """Stands for `ray.exceptions.RayError`."""

    class TaskError(Error):
        """Stands for `ray.exceptions.RayTaskError`."""

        def __init__(self, cause: Exception) -> None:
            super().__init__(str(cause))
            self.cause = cause

    def __init__(self, num_cpus: float, num_gpus: float, *, started: bool) -> None:
        """`started`: whether somebody else has started it, so that it goes on after the run."""
        self.resources = {"CPU": num_cpus, "GPU": num_gpus} if num_gpus else {"CPU": num_cpus}
        self.started = started
        self.begun: dict[str, Any] = {}  # arguments of `init`
        self.options: dict[str, Any] = {}  # of the function that trains a task
        self.tasks: list[Reference] = []
        self.cancelled: list[Reference] = []
        self.num_running: list[int] = []  # number of tasks among which a wait has waited for one
        self.stored: weakref.WeakSet[Reference] = weakref.WeakSet()
        self.num_stored = 0
        names = ("put", "get", "wait", "remote", "cancel", "init", "shutdown", "is_initialized", "cluster_resources")
        self.module: Any = ModuleType("ray")
        vars(self.module).update({name: getattr(self, name) for name in names})
        self.module.exceptions = SimpleNamespace(RayError=self.Error, RayTaskError=self.TaskError)

    def put(self, value: Any) -> Reference:
        """Store a copy of a value; that of arrays can only be read."""
        if isinstance(value, list):
            value = [array.copy() for array in value]
            for array in value:
                array.flags.writeable = False
        reference = Reference(value)
        self.stored.add(reference)
        self.num_stored += 1
        return reference

    def get(self, reference: Reference) -> Any:
        assert reference.call is None, "a test would wait here for ever"
        if isinstance(reference.value, Exception):
            raise reference.value
        return reference.value

    def wait(
        self, references: Sequence[Reference], *, num_returns: int, timeout: float | None, fetch_local: bool
    ) -> tuple[list[Reference], list[Reference]]:
        """Without a timeout, end tasks in their order until so many have ended; with one, none ends meanwhile."""
        assert not fetch_local, "the results would all be copied here"
        assert timeout in (None, 0.0), "the run would wait though it has other things to do"
        assert 1 <= num_returns <= len(references) == len(set(references))
        for running in [one for one in references if one.call is not None]:
            if timeout is None and sum(one.call is None for one in references) < num_returns:
                running.end()
        if timeout is None:
            self.num_running.append(len(references))
        ended = [one for one in references if one.call is None][:num_returns]
        return ended, [one for one in references if one not in ended]

    def remote(self, function: Callable[..., Any]) -> Any:
        def give(*args: Any) -> Reference:
            values = [one.value if isinstance(one, Reference) else one for one in args]
            self.tasks.append(Reference(call=lambda: function(*values)))
            return self.tasks[-1]

        def with_options(**options: Any) -> Any:
            self.options = options
            return SimpleNamespace(remote=give)

        return SimpleNamespace(options=with_options)

    def cancel(self, reference: Reference) -> None:
        assert self.started, "this would start a cluster"
        if reference.call is not None:
            reference.call = None
            self.cancelled.append(reference)

    def init(self, **options: Any) -> None:
        self.started, self.begun = True, options

    def shutdown(self) -> None:
        self.started = False

    def is_initialized(self) -> bool:
        return self.started

    def cluster_resources(self) -> dict[str, float]:
        return dict(self.resources)


@contextmanager
def emulated_ray(num_cpus: float, num_gpus: float = 0.0, *, started: bool = True) -> Iterator[tuple[Any, Cluster]]:
    """Return a context with raafl's engine over a new cluster, whether or not Ray is installed: the module, and the cluster."""
    cluster = Cluster(num_cpus, num_gpus, started=started)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "ray", cluster.module)
        patch.setitem(sys.modules, ENGINE, cluster.module)  # so that it is as before at the end
        del sys.modules[ENGINE]
        yield importlib.import_module(ENGINE), cluster
