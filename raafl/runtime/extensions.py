"""List the extensions of a task: what an optional feature adds before, around and after each task, at each end.

| end | base class, with its hooks | who calls them |
| --- | --- | --- |
| session | `raafl.runtime.server.session_protocol.SessionExtension` | the server's session with one client |
| loop | `raafl.runtime.server.wall_clock.LoopExtension` | the server's main loop |
| client | `raafl.runtime.client.worker.ClientExtension` | a client on one connection |
| clock | `raafl.runtime.simulation.ClockExtension` | a simulation, in the place of all three |
| replay | `ReplayExtension`, here, since no other run loads the replay | a replay, which reads what was sent in the journal |

An extension is named by the run's algorithm, by its options, or by a task; its module is imported then, and not before.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

from raafl.core.local import Local

if TYPE_CHECKING:
    from raafl.config.experiment import Experiment
    from raafl.core.algorithm import Algorithm
    from raafl.core.coordinator import Coordinator
    from raafl.core.types import Assignment, Update
    from raafl.runfolder.schema import JournalRow

End = Literal["session", "loop", "client", "clock", "replay"]

EXTENSIONS: dict[str, dict[End, str]] = {
    "split": {
        "session": "raafl.runtime.exchange.SplitSession",
        "client": "raafl.runtime.exchange.SplitClient",
    },
    "secure": {
        "session": "raafl.sites.secure_server.MaskedSession",
        "loop": "raafl.sites.secure_server.SecureLoop",
        "client": "raafl.sites.secure_client.MaskedClient",
        "clock": "raafl.sites.secure_messages.SimulatedSums",
        "replay": "raafl.sites.secure_messages.ReplayedSums",
    },
    "overlap": {
        "session": "raafl.runtime.overlap.OverlappedSession",
        "client": "raafl.runtime.overlap.OverlappedClient",
        "clock": "raafl.runtime.overlap.OverlappedClock",
    },
}
"""By name, the classes at each end. An extension of a site has no entry: who serves or joins with certificates brings it."""


class ReplayExtension:
    """Extension of replayed tasks by an optional feature; this base adds nothing. See `raafl.runtime.extensions`."""

    def __init__(self, coordinator: Coordinator) -> None:
        self.coordinator = coordinator

    def trained(self, assignment: Assignment, update: Update, row: JournalRow) -> None:
        """Change an update, trained again, to what the server was sent; ``row`` is the journal's about it."""


def extension(name: str, end: End) -> Any:
    """Import the class of an extension at one end; None = it has nothing to do there."""
    path = EXTENSIONS[name].get(end)
    if path is None:
        return None
    module, _, attribute = path.rpartition(".")
    return getattr(import_module(module), attribute)


def extensions_of(coordinator: Coordinator, end: End) -> list[Any]:
    """Import the classes of the extensions of a run at one end."""
    names = named_by(coordinator.algorithm)
    # who begins a task before it is assigned has one task at a time: a session sends the next one after the merge, as ever
    if coordinator.overlap or (coordinator.works_ahead and end == "clock"):
        names.append("overlap")
    return [made for name in names if (made := extension(name, end)) is not None]


def named_by_config(experiment: Experiment) -> list[str]:
    """Return the names of the extensions that a client's config names; that it may train while it sends, its tasks say."""
    names = named_by(experiment.algorithm)
    return [*names, "secure"] if experiment.secure_aggregation.is_on else names


def named_by(algorithm: Algorithm) -> list[str]:
    """Return the names of the extensions that an algorithm needs."""
    names = ["split"] if type(algorithm.local).exchange is not Local.exchange else []
    return names if algorithm.merge.extension is None else [*names, algorithm.merge.extension]
