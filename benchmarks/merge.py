"""Measure how fast merges consume updates: bytes of updates merged per second over bytes per second of a plain copy.

Ten updates of a model with ViT-Base's shapes (86.6 million parameters) go through the merge as the coordinator would
call it: `receive` for each, then `apply` after the tenth, or after each one where that is how the algorithm works. The
copy is `Tensor.copy_` of one such update, in the same run, on the same thread, in turn with each merge; a row holds the
medians. A copy reads what it copies and writes it; a merge must also read what it changes, which a copy on a machine
with a write-allocating cache does too, so a ratio of 1 is about what one pass over memory can reach. What comes before
a merge (checksum, check for NaN) happens in the receiving threads and is part of `benchmarks.wire`.

    python -m benchmarks.merge [--json] [--out FILE]
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from benchmarks.common import Row, main
from raafl.core.algorithm import Merge
from raafl.core.state import GlobalState
from raafl.core.types import Update
from raafl.parts.merge.deltas import Deltas
from raafl.parts.merge.mean import Mean
from raafl.parts.merge.server_optimizer import ServerOptimizer
from raafl.parts.select.submodels import fragment_specs
from raafl.submodel import FULL, FlatTensors, Spec, Submodels, skeleton

NUM_UPDATES = 10
FRAGMENTS = (0.2, 0.3, 0.5)
NUM_BUFFERS = 3  # distinct updates of each spec, together far larger than any cache


@dataclass(frozen=True)
class Shape:
    """Sizes of a vision transformer, by default ViT-Base's."""

    depth: int = 12
    width: int = 768
    hidden: int = 3072
    tokens: int = 197
    patch: int = 16
    classes: int = 1000


class Block(nn.Module):
    """The parameters of one transformer block."""

    def __init__(self, shape: Shape) -> None:
        """Make attention, MLP and norms."""
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(shape.width), nn.LayerNorm(shape.width)
        self.qkv, self.out = nn.Linear(shape.width, 3 * shape.width), nn.Linear(shape.width, shape.width)
        self.fc1, self.fc2 = nn.Linear(shape.width, shape.hidden), nn.Linear(shape.hidden, shape.width)


class Shapes(nn.Module):
    """Parameters of a vision transformer without a forward pass, since a merge needs only shapes and values."""

    def __init__(self, shape: Shape) -> None:
        """Make all parameters."""
        super().__init__()
        self.cls = nn.Parameter(torch.zeros(1, 1, shape.width))
        self.positions = nn.Parameter(torch.zeros(1, shape.tokens, shape.width))
        self.embed = nn.Conv2d(3, shape.width, shape.patch, shape.patch)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.depth))
        self.norm, self.head = nn.LayerNorm(shape.width), nn.Linear(shape.width, shape.classes)

    def submodel_axes(self) -> dict[str, list[tuple[str, int]]]:
        """Return one axis for each MLP: its hidden units."""
        return {
            f"blocks.{i}": [(f"blocks.{i}.{name}", dim) for name, dim in _MLP_MEMBERS] for i in range(len(self.blocks))
        }


_MLP_MEMBERS = (("fc1.weight", 0), ("fc1.bias", 0), ("fc2.weight", 1))


@dataclass(frozen=True)
class Case:
    """A merge to measure: the specs that its updates take in turn, and whether each update is applied as it arrives."""

    name: str
    merge: Merge
    fragments: bool = False
    at_once: bool = False
    staleness: int = 0


def cases() -> list[Case]:
    """Return the cases to measure."""
    return [
        Case("fed_avg: mean of 10", Mean()),
        Case("fed_async: mix each, alpha 0.6", Mean(alpha=0.6), at_once=True),
        Case("fed_buff: K 10, fresh", Deltas()),
        Case("fed_buff: K 10, staleness 3", Deltas(), staleness=3),
        Case("fed_opt: adam, round of 10", ServerOptimizer()),
        Case("fed_raa: mix each fragment, alpha 0.6", Mean(alpha=0.6), fragments=True, at_once=True),
        Case("sync fed_raa: coverage mean of 10 fragments", Mean(by_samples=False), fragments=True),
        Case("fed_buff: K 10, fragments", Deltas(), fragments=True),
    ]


def make_state(shape: Shape, device: str = "cpu") -> GlobalState:
    """Make the state of a run, with a random model of ``shape``."""
    with skeleton():
        submodels = Submodels(Shapes(shape))
    values = FlatTensors.empty(submodels.layout(), device)
    for buffer in values.buffers.values():
        buffer.normal_(std=0.02)
    return GlobalState(submodels, values)


class Updates:
    """Random updates of each spec, drawn when they are first needed."""

    def __init__(self, state: GlobalState) -> None:
        """Start without updates."""
        self._state = state
        self._made: dict[tuple[Spec, int], FlatTensors] = {}

    def get(self, spec: Spec, number: int) -> FlatTensors:
        """Return update ``number`` of a spec; a few different ones are used in turn."""
        key = (spec, number % NUM_BUFFERS)
        if key not in self._made:
            tensors = self._made[key] = FlatTensors.empty(
                self._state.submodels.layout(spec, "trained"), self._state.values.device
            )
            for buffer in tensors.buffers.values():
                buffer.normal_(std=0.02)
        return self._made[key]


def prepare(case: Case, state: GlobalState, updates: Updates) -> list[tuple[Update, Spec]]:
    """Return the ten updates of a case, with their submodels."""
    specs = fragment_specs(state.submodels, FRAGMENTS) if case.fragments else (FULL,)
    chosen = [specs[i % len(specs)] for i in range(NUM_UPDATES)]
    return [(Update(i, i, 0, updates.get(spec, i), 100 + i), spec) for i, spec in enumerate(chosen)]


def fold(case: Case, state: GlobalState, given: list[tuple[Update, Spec]]) -> None:
    """Merge all updates into the state, in the way that the coordinator calls the merge."""
    for place, (update, spec) in enumerate(given, start=1):
        case.merge.receive(state, update, spec, case.staleness)
        if case.at_once or place == len(given):
            case.merge.apply(state)
        else:
            case.merge.detach(state)


def seconds(work: Callable[[], object]) -> float:
    """Time ``work``, including what it leaves for a GPU to finish."""
    begin = time.perf_counter()
    work()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def rows(shape: Shape | None = None, repeats: int = 7, threads: int = 1, device: str = "cpu") -> list[Row]:
    """Measure every case, each merge in turn with a copy; ``threads``: threads of torch."""
    torch.set_num_threads(threads)
    state = make_state(shape or Shape(), device)
    source, target = state.values.clone(), state.values.clone()
    found = []
    for case in cases():
        state.memory.load({})
        gc.collect()
        given = prepare(case, state, Updates(state))
        num_bytes = sum(update.tensors.num_bytes for update, _ in given)
        merge_s: list[float] = []
        copy_s: list[float] = []
        for repeat in range(repeats + 1):
            copied = seconds(lambda: target.copy_(source))
            folded = seconds(lambda case=case, given=given: fold(case, state, given))  # type: ignore[misc]
            if repeat:  # the first repeat is the warm-up
                copy_s.append(copied)
                merge_s.append(folded)
        copy_rate, taken = source.num_bytes / statistics.median(copy_s), statistics.median(merge_s)
        found.append(
            {
                "merge": case.name,
                "bytes": num_bytes,
                "seconds": taken,
                "gb_per_s": num_bytes / taken / 1e9,
                "copy_gb_per_s": copy_rate / 1e9,
                "ratio": num_bytes / taken / copy_rate,
            }
        )
    return found


if __name__ == "__main__":
    main("merge", rows)
