"""Bring clients' batches to a GPU without waiting: rows of a data set that lies there, else copies from pinned memory.

A data set lies on the GPU once for all clients of the process; a task sends the order of each epoch, and rows are gathered
there. Only what reads samples by plain indexing may lie there, so that the batches have the same bits: a `TensorDataset`, or a
`GatherDataset` whose `gather` says that it works on any device, with the default collate function.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from raafl.data.federated import ClientData, Sized
from raafl.data.loaders import Fetch, GatherDataset, is_tensors, select_from, unwrap
from raafl.local.train import PreparedTask
from raafl.submodel.nested_batch import batch_tensors, mapped, pinned


class Feed:
    """The way of batches to a GPU, for all tasks of a process.

    Attributes:
        num_resident: tasks whose data lay on the GPU.
        num_sent: tasks whose batches were copied there.
    """

    def __init__(self, device: torch.device, share: float) -> None:
        """Create a feed that copies data sets to the GPU up to ``share`` of its free memory; 0 = it copies none."""
        self.device, self._share = device, share
        self._left: float | None = None
        self._stream: Any = None
        # by id of a data set; the data set is stored, too, so that no other object gets its id
        self._resident: dict[int, tuple[object, Fetch | str]] = {}
        self._reasons: dict[str, None] = {}
        self.num_resident = self.num_sent = self.num_bytes = 0

    def of(self, task: PreparedTask) -> Callable[..., Iterator[Sized]]:
        """Return a function that yields a task's batches on the GPU, with the arguments of `ClientData.batches`.

        They stay on the CPU where somebody sees them before they are moved: a client of several processes, or hooks of the
        module's own.
        """
        module = task.built.module
        if task.context.process_group is not None or task.built.transfer.is_own or hasattr(module, "on_step_batches"):
            return task.data.batches
        return partial(self._batches, task.data)

    def _batches(
        self,
        data: ClientData,
        generator: torch.Generator,
        batch_size: int | None,
        num_epochs: int | None,
        num_steps: int | None,
    ) -> Iterator[Sized]:
        gather = self._gather_of(data)
        if gather is None:
            for batch, num_samples in data.batches(generator, batch_size, num_epochs, num_steps):
                yield self.sent(batch), num_samples
            return
        for rows in data.rows(generator, batch_size, num_epochs, num_steps, self._sent):
            yield gather(rows), len(rows)

    def fetch_of(self, data: ClientData) -> Fetch:
        """Return a function that makes a batch on the GPU from the numbers of its samples, which lie on the CPU."""
        gather = self._gather_of(data)
        if gather is None:
            return lambda rows: self.sent(data.fetch(rows))
        return lambda rows: gather(self._sent(rows))

    def sent(self, batch: object) -> object:
        """Copy a batch to the GPU on a stream of its own, beside the steps; later work on the current stream waits for it."""
        if all(x.device == self.device for x in batch_tensors(batch)):
            return batch
        current = torch.cuda.current_stream(self.device)
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            moved = mapped(batch, lambda x: x if x.is_meta else self._sent(x), movable=lambda item: item)
        current.wait_stream(self._stream)
        for tensor in batch_tensors(moved):
            if tensor.is_cuda:
                tensor.record_stream(current)  # its memory is reused only after the steps that read it
        return moved

    def _sent(self, tensor: Tensor) -> Tensor:
        return pinned(tensor, self.device).to(self.device, non_blocking=True)

    # ---- data that lie on the GPU ----

    def _gather_of(self, data: ClientData) -> Fetch | None:
        """Return a function that maps row numbers to a batch on the GPU; None if the data stay on the CPU."""
        found: Fetch | str = "samples are read one by one, or collated by a function of the loader's own"
        if self._share <= 0:
            found = "fabric.data_on_device is 0"
        elif data.owned:
            found = "the data set has random generators of its own"
        elif data.source is not None:
            if id(data.source) not in self._resident:
                self._resident[id(data.source)] = data.source, self._placed(data.source)
            found = self._resident[id(data.source)][1]
        if isinstance(found, str):
            self.num_sent += 1
            self._reasons.setdefault(found)
            return None
        self.num_resident += 1
        return found

    def _placed(self, source: object) -> Fetch | str:
        """Copy a data set to the GPU, and return a function that gathers its rows there; else the reason why it stays."""
        base, rows, tensors = plain_parts(source)
        if base is None:
            return f"{type(source).__name__} gathers samples in a way of its own"
        num_bytes = sum(x.nbytes for x in (*tensors.values(), *(() if rows is None else (rows,))))
        if self._left is None:
            self._left = self._share * torch.cuda.mem_get_info(self.device)[0]
        if num_bytes > self._left:
            return f"the data set takes {num_bytes:,} bytes, more than the {self._left:,.0f} that fabric.data_on_device leaves"
        self._left -= num_bytes
        self.num_bytes += num_bytes
        there = {name: x.to(self.device) for name, x in tensors.items()}
        gather: Callable[[Tensor], Any]
        if isinstance(base, torch.utils.data.TensorDataset):
            gather = select_from(list(there.values()))
        else:
            moved = copy.copy(base)
            vars(moved).update(there)
            gather = lambda rows: list(moved.gather(rows))  # noqa: E731
        if rows is None:
            return gather
        chosen = rows.to(self.device)
        return lambda wanted: gather(chosen.index_select(0, wanted))

    def release(self) -> None:
        """Give the memory of data sets back, and copy batches from now on: memory has run out."""
        for key, (source, found) in self._resident.items():
            if not isinstance(found, str):
                self._resident[key] = source, "memory ran out in a task"
        self.num_bytes = 0

    def counted(self) -> dict[str, Any]:
        """Return the number of tasks whose data lay on the GPU, of the others, the bytes there, and why others were sent."""
        return {
            "resident": self.num_resident,
            "sent": self.num_sent,
            "bytes": self.num_bytes,
            "why_sent": list(self._reasons),
        }


def plain_parts(dataset: object) -> tuple[Any, torch.Tensor | None, dict[str, torch.Tensor]]:
    """Return the data set under `Subset`s, the rows they select (None = all), and its tensors by name.

    The data set is None if its samples are not known to be plain rows of tensors.
    """
    base, rows = unwrap(dataset)
    if is_tensors(base):
        return base, rows, {str(number): tensor for number, tensor in enumerate(base.tensors)}
    owner = next((kind for kind in type(base).__mro__ if "gather" in vars(kind)), object)
    if not isinstance(base, GatherDataset) or not vars(owner).get("on_any_device"):
        return None, None, {}
    return base, rows, {name: value for name, value in vars(base).items() if isinstance(value, torch.Tensor)}
