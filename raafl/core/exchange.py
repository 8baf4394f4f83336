"""Let client and server exchange messages in the middle of a task, for methods that split the model between the two.

A task is one request and one answer: a submodel goes down, an update comes up. A method whose clients need the server in
between returns an `Exchange` from `Local.exchange`; its tasks have two sides that train at the same time, each its own part of
the model, both by the hooks of the method's `Local`. A task of several batches::

    client                                             server
    Hook.loss, on its own data                         Exchange.questions, in the place of data
        link.ask(meta, tensors, answer)   --------->       link.hear(expect)
                                          <---------       link.reply(tensors)
    Hook.finish, and its part goes up     --------->   both parts are joined to one update

A simulation, a replay and a dry plan have no link (`Task.link` is None): the hook computes both sides, to the same bit.
`Local.cost` predicts what an exchange costs: bytes each way, and round trips (`Cost.num_exchanges`), each of which takes the
link's latency twice. The server's computation takes no virtual time.
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
    """Connection of a client to the server during one task, over which it asks questions."""

    def ask(self, meta: dict[str, Any], tensors: Mapping[str, Tensor], answer: Layout) -> FlatTensors:
        """Send a question of plain data and tensors to the server, and wait for the reply.

        Args:
            meta: small plain data that JSON can hold; the keys "precision", "accumulate" and "sends" are added to it.
            tensors: the question's tensors, by name.
            answer: layout that the reply must have; any other is refused.
        """
        ...


class ServerLink(Protocol):
    """Connection of the server to one client during one task, over which it answers questions."""

    def hear(self, expect: Callable[[Mapping[str, Any]], Layout]) -> FlatTensors:
        """Wait for the client's next question and return its tensors.

        Args:
            expect: returns the layout that the tensors must have, given the question's plain data, which the client
                chose. It raises `raafl.errors.InvalidPayload` to refuse the question, which ends the task. Memory is
                allocated afterwards.
        """
        ...

    def reply(self, tensors: Mapping[str, Tensor]) -> None:
        """Send ``tensors`` to the client as the answer to its last question."""
        ...

    def draws(self, seed: int) -> AbstractContextManager[Any]:
        """Return a context with a private random stream that starts from ``seed``; global generators are unchanged outside."""
        ...


@dataclass(frozen=True, eq=False)
class Exchange(ABC):
    """Training of one task by client and server together; one object serves all tasks with the same division.

    Attributes:
        client: tensors that the client receives, trains and sends back.
        server: all other tensors, which the server trains beside each client on a copy.
    """

    client: Submodels
    server: Submodels

    @abstractmethod
    def questions(self, assignment: Assignment, link: ServerLink) -> Any:
        """Wait for a task's first question; return an iterable over all its questions, used in place of a client's data.

        The returned object has the attributes of `raafl.data.federated.ClientData` that a task uses: ``num_samples``, ``test``
        (None), ``num_batches()`` of an epoch, and ``batches()``, which yields for each question what `Hook.loss` receives and sends
        the reply when the next item is requested.
        """


def server_seed(seed: int) -> int:
    """Return the seed of the server's side of a task, derived from the task's seed."""
    return derive_seed(seed, "upper")
