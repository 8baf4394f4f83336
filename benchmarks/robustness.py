"""What guards withstand: accuracy on digits with hostile clients, by guard, attack and partition, over several seeds.

Eight clients train an MLP in synchronous rounds of FedAvg. The last clients are hostile and answer last, so that they know what the
others have sent. `opposite`: three send -1 times the mean of the honest updates of the round. `large`: one sends a hundred
times what it has trained. A row holds the mean, the least and the largest final accuracy over the seeds.

    python -m benchmarks.robustness [--json] [--out FILE]
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.common import Row, main
from raafl.algorithms import fed_avg
from raafl.commands.run import simulate
from raafl.config.experiment import Experiment
from raafl.core.types import Assignment, Update
from raafl.data import Digits, Dirichlet, Iid
from raafl.devices import Device
from raafl.local.train import LocalTrainer
from raafl.parts.protect.options import Guard
from raafl.submodel import FlatTensors

CLIENTS, ROUNDS, SEEDS = 8, 15, 3

GUARDS = {
    "none": Guard(),
    "clip_norm 1": Guard(clip_norm=1.0),
    "outlier 3": Guard(outlier=3.0),
    "trimmed_mean 0.4": Guard(combine="trimmed_mean", trim=0.4),
    "median": Guard(combine="median"),
    "centred_clip": Guard(combine="centred_clip"),
}
PARTITIONS = {"iid": Iid(), "dirichlet 1": Dirichlet(1.0), "dirichlet 0.3": Dirichlet(0.3)}

Differences = list[FlatTensors]
Attack = Callable[[FlatTensors, Differences], None]
"""Changes the difference that a hostile client has trained, in place; it knows those of the round's honest clients."""


def opposite(own: FlatTensors, honest: Differences) -> None:
    """Send -1 times the mean of the honest updates."""
    for dtype, buffer in own.buffers.items():
        buffer.zero_()
        for one in honest:
            buffer.sub_(one.buffers[dtype], alpha=1.0 / len(honest))


def large(own: FlatTensors, honest: Differences) -> None:
    """Send a hundred times what was trained."""
    for buffer in own.buffers.values():
        buffer.mul_(100.0)


ATTACKS: dict[str, tuple[int, Attack]] = {
    "honest": (0, large),
    "opposite, 3 of 8": (3, opposite),
    "large, 1 of 8": (1, large),
}
"""How many clients are hostile, and what they do."""


@contextmanager
def hostile(num: int, attack: Attack) -> Iterator[None]:
    """Let the last ``num`` clients attack, within this context and process."""
    train, rounds = LocalTrainer.run, dict[int, Differences]()

    def run(self: LocalTrainer, assignment: Assignment, received: FlatTensors, data: Any) -> Update:
        update = train(self, assignment, received, data)
        start = {dtype: received.buffers[dtype][: len(buffer)] for dtype, buffer in update.tensors.buffers.items()}
        own = update.tensors.clone()
        for dtype, buffer in own.buffers.items():
            buffer.sub_(start[dtype])
        honest = rounds.setdefault(assignment.version, [])
        if assignment.client <= CLIENTS - num:
            honest.append(own)
            return update
        attack(own, honest)
        for dtype, buffer in update.tensors.buffers.items():
            buffer.copy_(start[dtype]).add_(own.buffers[dtype])
        return update

    LocalTrainer.run = run  # type: ignore[method-assign]
    try:
        yield
    finally:
        LocalTrainer.run = train  # type: ignore[method-assign]


def experiment(output: Path, guard: str, partition: str, seed: int, rounds: int) -> Experiment:
    """Describe one run; later clients are slower."""
    from model_zoo import MLP

    devices = [Device(name=f"device-{i}", flops_per_s=1e8 / (1 + 0.1 * i)) for i in range(CLIENTS)]
    return Experiment(
        model=lambda: MLP(64, (24,), 10, lr=0.1, momentum=0.5), data=lambda: Digits(batch_size=16), algorithm=fed_avg(),
        partition=PARTITIONS[partition], clients=CLIENTS, seed=seed, devices=devices, guard=GUARDS[guard],
        max_updates=CLIENTS * rounds, eval_every=rounds, progress="quiet", output=str(output),
    )  # fmt: skip


def accuracy(guard: str, attack: str, partition: str, seed: int, rounds: int) -> float:
    """Return the final accuracy of one run."""
    with tempfile.TemporaryDirectory() as folder, hostile(*ATTACKS[attack]):
        summary, _ = simulate(experiment(Path(folder) / "run", guard, partition, seed, rounds))
    return float(summary["final"]["accuracy"])


def rows(seeds: int = SEEDS, rounds: int = ROUNDS, guards: tuple[str, ...] = tuple(GUARDS)) -> list[Row]:
    """Run every guard against every attack on every partition."""
    found = []
    for partition, attack, guard in itertools.product(PARTITIONS, ATTACKS, guards):
        values = [accuracy(guard, attack, partition, seed, rounds) for seed in range(seeds)]
        found.append(
            {
                "partition": partition, "attack": attack, "guard": guard, "accuracy": sum(values) / len(values),
                "least": min(values), "most": max(values), "seeds": seeds,
            }
        )  # fmt: skip
    return found


if __name__ == "__main__":
    main("robustness", rows)
