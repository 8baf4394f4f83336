"""What the two sides of a task say to each other in its middle.

A task is one request and one answer: a submodel goes down, an update comes up. A method whose clients need the server in
between gives an `Exchange` (`Local.exchange`), and its tasks have two sides that train at the same time, each its own part of
the model, both by the hooks of the method's `Local`. Of a task of some batches::

    client                                             server
    Hook.loss, on its own data                         Exchange.questions, in the place of data
        link.ask(meta, tensors, answer)   --------->       link.hear(expect)
                                          <---------       link.reply(tensors)
    Hook.finish, and its part goes up     --------->   both parts are joined to one update

In a simulation, a replay or a dry plan there is no link (`Task.link` is None): the hook does what both sides would, to the
same bit. What an exchange costs is `Local.cost`'s to say: bytes each way, and round trips (`Cost.num_exchanges`), each of which
takes the link's latency twice. What the server computes takes no virtual time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from raafl.core.types import Assignment, derive_seed
from raafl.submodel.flat import FlatTensors, Layout
from raafl.submodel.submodels import Submodels


class ClientLink(Protocol):
    """The client's end of the wire, for one task."""

    def ask(self, meta: dict[str, Any], tensors: Mapping[str, Tensor], answer: Layout) -> FlatTensors:
        """Send plain data and tensors, and wait for what the server replies.

        ``meta`` is small, as JSON can say it; "precision", "accumulate" and "sends" are added. ``answer`` is the layout
        of the reply; any other is refused.
        """
        ...


class ServerLink(Protocol):
    """The server's end."""

    def hear(self, expect: Callable[[Mapping[str, Any]], Layout]) -> FlatTensors:
        """Wait for the next question and return its tensors.

        Args:
            expect: returns the layout that the tensors must have, from the question's plain data, which is the client's word;
                raises `raafl.errors.InvalidPayload` to refuse it, which ends the task. Nothing is allocated before.
        """
        ...

    def reply(self, tensors: Mapping[str, Tensor]) -> None:
        """Answer the last question."""
        ...

    def draws(self, seed: int) -> AbstractContextManager[Any]:
        """Begin a stream of random numbers: what draws within it draws from there, and nobody else notices."""
        ...


@dataclass(frozen=True, eq=False)
class Exchange(ABC):
    """How the sides of a task talk; the same for all tasks that share its parts.

    Attributes:
        client: what the client is sent, trains and sends back: tensors of the model, by their names there.
        server: what the server trains beside it, a copy for each client at work: all others.
    """

    client: Submodels
    server: Submodels

    @abstractmethod
    def questions(self, assignment: Assignment, link: ServerLink) -> Any:
        """Wait for the first question of a task, and return it and all to come in the place of a client's data.

        That is an object with what is asked of `raafl.data.federated.ClientData` in a task: ``num_samples``, ``test`` (None),
        ``num_batches()`` in an epoch, and ``batches()``, which yields what `Hook.loss` is given for each question, and replies
        when asked for the next.
        """


def server_seed(seed: int) -> int:
    """Return the seed of the server's side of a task, from the task's."""
    return derive_seed(seed, "upper")
