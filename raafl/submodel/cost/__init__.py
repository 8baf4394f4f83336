"""State what a submodel costs the client that trains it: operations, bytes moved, memory, bytes on the wire.

`raafl.submodel.cost.predicted` predicts it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from raafl.submodel.cost.ledger import Launches


@dataclass(frozen=True, slots=True)
class Cost:
    """Predicted cost of training one submodel with one batch size.

    Attributes:
        params: number of parameters in the submodel.
        flops_per_sample: FLOPs of matrix products, convolutions and the like in the forward and backward pass of one
            sample; in a step without any, as in matrix factorisation, FLOPs of elementwise operations.
        peak_bytes: largest memory of a client's tensors during a task: received values, frozen parameters that the
            client has, the module, the batch, activations, gradients, temporaries and the optimiser's state. The
            libraries' own memory is not included.
        down_bytes: number of bytes that a client receives.
        up_bytes: number of bytes that a client sends.
        moved_bytes_per_sample: bytes that all operations of a step read and write, per sample, including the
            optimiser's; each operation's bytes are scaled to its time.
        padding_flops_per_sample: additional FLOPs of convolutions on padded channels, per sample.
        num_exchanges: number of round trips to the server during a task, such as one per batch in split learning.
        kernels_per_sample: number of operations of a step, without views, per sample. The optimiser counts one
            operation of each kind, since on a GPU it updates all parameters at once; an operation within torch's own
            loop over positions counts as a part of one.
        guessed: description of what is only estimated, and why the step could not be traced; "" = nothing.
        launches: launches of a step on a GPU, per sample; None = the step could not be traced.
        pool_bytes: largest memory of what a step allocates and frees again: activations, gradients and temporaries.
    """

    params: int
    flops_per_sample: float
    peak_bytes: int
    down_bytes: int
    up_bytes: int
    moved_bytes_per_sample: float = 0.0
    padding_flops_per_sample: float = 0.0
    num_exchanges: int = 0
    kernels_per_sample: float = 0.0
    guessed: str = ""
    launches: Launches | None = None
    pool_bytes: int = 0
