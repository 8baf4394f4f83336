"""Let client and server exchange messages in the middle of a task, for methods that split the model between the two.

A task is one request and one answer: a submodel goes down, an update comes up. A method whose clients need the server in
between returns an `Exchange` from `Local.exchange`; its tasks have two sides that train at the same time, each its own part
of the model, both by the hooks of the method's `Local`. A task of several batches::

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
    """Connection of a client to the server during one task; the client asks questions over it."""

    def ask(self, meta: dict[str, Any], tensors: Mapping[str, Tensor], answer: Layout) -> FlatTensors:
        """Send a question of plain data and tensors to the server, and wait for the reply."""
        ...


class ServerLink(Protocol):
    """Connection of the server to one client during one task; the server answers the client's questions over it."""

    def hear(self, expect: Callable[[Mapping[str, Any]], Layout]) -> FlatTensors:
        """Wait for the client's next question and return its tensors."""
        ...

    def reply(self, tensors: Mapping[str, Tensor]) -> None:
        """Send ``tensors`` to the client as the answer to its last question."""
        ...

    def draws(self, seed: int) -> AbstractContextManager[Any]:
        """Return a context with a private random stream that starts from ``seed``; the global generators stay unchanged."""
        ...


@dataclass(frozen=True, eq=False)
class Exchange(ABC):
    """Protocol by which client and server train one task together, each with a part of the model. One object serves many tasks.

    Attributes:
        client: tensors that the client receives, trains and sends back.
        server: all other tensors, of which the server trains a copy for each client.
    """

    client: Submodels
    server: Submodels

    @abstractmethod
    def questions(self, assignment: Assignment, link: ServerLink) -> Any:
        """Return a data set for the server's training, whose batches are the questions that the client sends.

        A question holds, for example, the activations that the client's part of the model computes. The call waits for
        the first question. When training asks for the next batch, the reply to the last question is sent.

        Returns:
            Object with the attributes of `raafl.data.federated.ClientData` that training needs: ``num_samples``,
            ``test`` (None), ``num_batches()`` of an epoch, and ``batches()``, which yields the input of `Hook.loss`.
        """


def server_seed(seed: int) -> int:
    """Return the seed of the server's side of a task, derived from the task's seed."""
    return derive_seed(seed, "upper")
