"""Record what a module logs while tasks of several clients are trained as one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from raafl.local.evaluation.record import Recorder, attach_log, widened
from raafl.local.stacked.stacks import Unstackable

_START = {"mean": -0.0, "sum": -0.0, "min": float("inf"), "max": float("-inf")}  # -0.0 + x is x, also of a zero


class Logged:
    """Replacement for `Recorder` that adds up logged values for each client separately.

    Attributes:
        weight: weight of values that are logged without a ``batch_size``: number of samples in each client's current
            batch.
    """

    def __init__(self, num: int) -> None:
        """Start empty, for ``num`` clients."""
        self._num, self.weight = num, 1.0
        self._sums: dict[str, Tensor] = {}
        self._counts: dict[str, list[float]] = {}
        self._step: list[tuple[str, Any, float, str]] = []
        self._said: list[tuple[str, Any, float, str]] = []

    def attach(self, module: nn.Module) -> None:
        """Redirect ``log`` and ``log_dict`` of the module, and of LightningModules inside it, to this object."""
        attach_log(module, self.log, self.log_dict)

    def log(
        self,
        name: str,
        value: Any,
        *args: object,
        reduce_fx: str | Callable[..., Any] = "mean",
        batch_size: int | None = None,
        **kwargs: object,
    ) -> None:
        """Record a value that the clients' common step logs, called inside vmap; see `Recorder.log`."""
        how = getattr(reduce_fx, "__name__", str(reduce_fx))
        if callable(getattr(value, "compute", None)):
            raise Unstackable(
                f"the training step logs '{name}', an object of {type(value).__name__}: log a number to train clients as one batch"
            )
        if how not in _START:
            raise Unstackable(
                f"the training step logs '{name}' with reduce_fx '{how}': give {', '.join(_START)} to train clients as one batch"
            )
        value = widened(value) if isinstance(value, Tensor) else torch.tensor(float(value), dtype=torch.float64)
        self._step.append((name, value, self.weight if batch_size is None else float(batch_size), how))

    def log_dict(self, values: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
        """Record values that the clients' common step logs, called inside vmap; see `Recorder.log_dict`."""
        for name, value in values.items():
            self.log(name, value, **kwargs)

    def take(self) -> list[Tensor]:
        """Return the values that this step has logged; pass them to `add` outside vmap."""
        self._said, self._step = self._step, []
        return [value for _, value, _, _ in self._said]

    def add(self, clients: Sequence[int], values: Sequence[Tensor]) -> None:
        """Add the values that clients have logged in a step.

        Args:
            clients: positions of the clients.
            values: logged values, each with one number per client.
        """
        where = torch.tensor(clients)
        for (name, _, weight, how), value in zip(self._said, values, strict=True):
            value = value.reshape(len(clients))
            value = value * weight if how == "mean" else value
            if name not in self._sums:
                start = torch.full((self._num,), _START[how], dtype=torch.float64)
                self._sums[name], self._counts[name] = start, [0.0] * self._num
            sums, counts = self._sums[name], self._counts[name]
            if how in ("mean", "sum"):
                sums[where] += value
            else:
                sums[where] = (torch.minimum if how == "min" else torch.maximum)(sums[where], value)
            for client in clients:
                counts[client] = counts[client] + weight if how == "mean" else 1.0

    def hand(self, client: int, recorder: Recorder) -> None:
        """Copy the values that one client has logged into a recorder.

        Args:
            client: position of the client.
            recorder: recorder that receives the values.
        """
        recorder.take_over(
            {
                name: (float(sums[client]), self._counts[name][client])
                for name, sums in self._sums.items()
                if self._counts[name][client]
            }
        )
