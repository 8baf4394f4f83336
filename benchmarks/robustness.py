"""Measure which attacks guards withstand: accuracy on digits with hostile clients, by guard, attack and partition.

Eight clients train an MLP in synchronous rounds of FedAvg. The last clients are hostile and answer last, so that they know what the
others have sent. `opposite`: three send -1 times the mean of the honest updates of the round. `large`: one sends a hundred
times what it has trained. A row holds the mean, the least and the largest final accuracy over the seeds.

    python -m benchmarks.robustness [--json] [--out FILE]
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.common import Row, main
from raafl.algorithms import fed_avg
from raafl.config.experiment import Experiment
from raafl.core.algorithm import Algorithm
from raafl.core.options import Guard
from raafl.core.state import GlobalState
from raafl.core.types import Update
from raafl.data import Digits, Dirichlet, Iid
from raafl.devices import Device
from raafl.parts.merge.wrapped import Wrapped
from raafl.parts.protect.assembly import with_options
from raafl.parts.protect.robust import difference
from raafl.runtime import setup
from raafl.runtime.run import simulate
from raafl.submodel import FlatTensors, Spec

CLIENTS, ROUNDS, SEEDS = 8, 15, 3

GUARDS = {
    "none": Guard(),
    "clip_norm 1": Guard(clip_norm=1.0),
    "outlier 3": Guard(outlier=3.0),
    "trimmed_mean 0.4": Guard(combine="trimmed_mean", trim=0.4),
    "median": Guard(combine="median"),
    "centred_clip": Guard(combine="centred_clip"),
}
PARTITIONS = {"iid": Iid(), "dirichlet 1": Dirichlet(1.0)}

Differences = list[FlatTensors]
Attack = Callable[[FlatTensors, Differences], None]
"""Changes the difference that a hostile client has trained, in place; it knows those of the round's honest clients."""


def opposite(own: FlatTensors, honest: Differences) -> None:
    """Send the mean of the round's honest updates, times -1."""
    for dtype, buffer in own.buffers.items():
        buffer.zero_()
        for one in honest:
            buffer.sub_(one.buffers[dtype], alpha=1.0 / len(honest))


def large(own: FlatTensors, honest: Differences) -> None:
    """Send the own change times a hundred."""
    for buffer in own.buffers.values():
        buffer.mul_(100.0)


ATTACKS: dict[str, tuple[int, Attack]] = {
    "honest": (0, large),
    "opposite, 3 of 8": (3, opposite),
    "large, 1 of 8": (1, large),
}
"""How many clients are hostile, and what they do."""


@dataclass(frozen=True)
class Hostile(Wrapped):
    """Merge, with all its guards, that gets altered updates: those of the last ``num`` clients are replaced by ``attack``."""

    num: int
    attack: Attack
    honest: Differences = field(default_factory=list)

    def reject_reason(self, state: GlobalState, update: Update, spec: Spec, staleness: int) -> str | None:
        """Alter the update in place, then check it as the wrapped merge does."""
        own = difference(state, update, spec, self.sends)
        if update.client <= CLIENTS - self.num:
            self.honest.append(own)
        else:
            self.attack(own, self.honest)
            for dtype, buffer in state.submodels.plan(spec).gather(state.values).buffers.items():
                update.tensors.buffers[dtype].copy_(buffer.add_(own.buffers[dtype]))
        return super().reject_reason(state, update, spec, staleness)

    def apply(self, state: GlobalState) -> None:
        """Merge, and delete the round's honest updates."""
        super().apply(state)
        self.honest.clear()


def attacked(num: int, attack: Attack) -> Callable[..., Algorithm]:
    """Make a function that assembles an algorithm with its guards, and puts the attackers before them."""

    def assembled(*args: Any) -> Algorithm:
        algorithm = with_options(*args)
        return replace(algorithm, merge=Hostile(algorithm.merge, num, attack))

    return assembled


def experiment(output: Path, guard: str, partition: str, seed: int, rounds: int) -> Experiment:
    """Describe one run, in which later clients are slower; ``guard``, ``partition``: keys of `GUARDS` and `PARTITIONS`."""
    from model_zoo import MLP

    devices = [Device(name=f"device-{i}", flops_per_s=1e8 / (1 + 0.1 * i)) for i in range(CLIENTS)]
    return Experiment(
        model=lambda: MLP(64, (24,), 10, lr=0.1, momentum=0.5),
        data=lambda: Digits(batch_size=16),
        algorithm=fed_avg(),
        partition=PARTITIONS[partition],
        clients=CLIENTS,
        seed=seed,
        devices=devices,
        guard=GUARDS[guard],
        max_updates=CLIENTS * rounds,
        eval_every=rounds,
        progress="quiet",
        output=str(output),
        batch_clients=CLIENTS,
    )


def accuracy(guard: str, attack: str, partition: str, seed: int, rounds: int) -> float:
    """Return the final accuracy of one run; ``guard``, ``partition``: keys of `GUARDS` and `PARTITIONS`, ``rounds``: merges."""
    assembled = attacked(*ATTACKS[attack])
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(setup, "with_options", assembled):
        summary, _ = simulate(experiment(Path(folder) / "run", guard, partition, seed, rounds))
    return float(summary["final"]["accuracy"])


CASES = (("iid", "honest"), ("iid", "opposite, 3 of 8"), ("iid", "large, 1 of 8"), ("dirichlet 1", "opposite, 3 of 8"))
"""Partitions, and attacks on them."""


def row(partition: str, attack: str, guard: str, seeds: int = SEEDS, rounds: int = ROUNDS) -> Row:
    """Run a guard against an attack with ``seeds`` seeds; return the row."""
    values = [accuracy(guard, attack, partition, seed, rounds) for seed in range(seeds)]
    return {
        "partition": partition,
        "attack": attack,
        "guard": guard,
        "accuracy": sum(values) / len(values),
        "least": min(values),
        "most": max(values),
        "seeds": seeds,
    }


def rows() -> list[Row]:
    """Run every guard in every case."""
    return [row(*case, guard) for case, guard in itertools.product(CASES, GUARDS)]


if __name__ == "__main__":
    main("robustness", rows)
