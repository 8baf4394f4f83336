"""Compare the memory of a client rank that trains a fragment with that of one that trains the whole model.

Real ranks under `torchrun`: one aggregator and two clients train a wide MLP (3072 - hidden - 10) for a few updates. The
clients' memory budgets allow one fragment only, or a fragment and the next larger one; in a second run every client
trains the whole model. Each client notes its resident memory when everything is imported, the data are there and a tiny
model has been trained (so that the libraries' own buffers are there too), and its peak at the end; a row holds the
difference. `expected_bytes` is what raafl's cost model says of the largest submodel that the budget allows, which is what
selectors go by: weights, gradients, momentum and activations (`predicted_bytes`), and the values as received.

    python -m benchmarks.memory [--json] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import Row, main

FEATURES, CLASSES, BATCH = 3072, 10, 32


@dataclass(frozen=True)
class Setting:
    """A run: shares of the fragments, and the largest share that each client may train."""

    shares: tuple[float, ...]
    clients: tuple[float, ...]
    hidden: int = 16384
    updates: int = 8


FRAGMENTS = Setting((0.05, 0.20, 0.75), (0.05, 0.20))
WHOLE = Setting((1.0,), (1.0, 1.0))


def rows(settings: Sequence[Setting] = (FRAGMENTS, WHOLE), timeout_s: float = 300.0) -> list[Row]:
    """Run every setting and return a row for each client; ``ratio`` is to the mean of the last setting's clients."""
    found: list[Row] = []
    for setting in settings:
        found += measure(setting, timeout_s)
    whole = [row["peak_bytes"] for row in found[-len(settings[-1].clients) :]]
    return [{**row, "ratio": row["peak_bytes"] * len(whole) / sum(whole)} for row in found]


def measure(setting: Setting, timeout_s: float) -> list[Row]:
    """Run a setting under torchrun, and return its rows."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={len(setting.clients) + 1}",
            "-m",
            "benchmarks.memory",
            "--rank",
            json.dumps(asdict(setting)),
            "--folder",
            folder,
        ]
        process = subprocess.Popen(
            command,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        try:
            output, _ = process.communicate(timeout=timeout_s)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
        if process.returncode:
            raise RuntimeError(f"the ranks failed:\n{output.decode()[-3000:]}")
        noted = [json.loads(Path(folder, f"client-{i}.json").read_text()) for i in range(1, len(setting.clients) + 1)]
    return [
        {"client": i, "share": share, **note}
        for i, (share, note) in enumerate(zip(setting.clients, noted, strict=True), 1)
    ]


# ---- what a rank does ----


def take_part(setting: Setting, folder: Path) -> None:
    """Act as one rank of a run; a client writes its memory to ``folder``."""
    import torch

    from raafl.runtime.over_ranks import fit

    torch.set_num_threads(1)
    rank, budgets = int(os.environ["RANK"]), _budgets(setting)
    experiment = _experiment(setting, budgets, folder)
    experiment.data().train_dataloader()
    _warm_up()
    before_bytes = _resident_bytes()
    fit(experiment)
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if rank:
        cost = _costs(setting)[setting.shares.index(setting.clients[rank - 1])]
        note = {
            "peak_bytes": peak_bytes - before_bytes,
            "predicted_bytes": cost.peak_bytes - cost.down_bytes,
            "expected_bytes": cost.peak_bytes,
            "before_bytes": before_bytes,
        }
        (folder / f"client-{rank}.json").write_text(json.dumps(note))


def _experiment(setting: Setting, budgets: Sequence[float], folder: Path) -> Any:
    from model_zoo import MLP
    from raafl import Experiment, fed_raa
    from raafl.core.algorithm import Training
    from raafl.data import Iid
    from raafl.devices import Device

    data = _Data(BATCH * len(setting.clients))
    return Experiment(
        model=lambda: MLP(FEATURES, (setting.hidden,), CLASSES, lr=0.01, momentum=0.5),
        data=lambda: data,
        algorithm=fed_raa(fragments=list(setting.shares), select="fewest_updates"),
        partition=Iid(),
        clients=len(setting.clients),
        devices=[Device(memory_bytes=budget) for budget in budgets],
        emulate=False,
        train=Training(num_epochs=None, num_steps=2, batch_size=BATCH),
        max_updates=setting.updates,
        eval_every=10**9,
        output=str(folder / "run"),
        progress="quiet",
    )


def _costs(setting: Setting) -> list[Any]:
    """Predict the cost of each fragment."""
    import torch

    from model_zoo import MLP
    from raafl.parts.select.submodels import fragment_ratios, fragment_specs
    from raafl.submodel import Submodels, skeleton

    with skeleton():
        module = MLP(FEATURES, (setting.hidden,), CLASSES)
    submodels = Submodels(module, [torch.zeros(2, FEATURES), torch.zeros(2, dtype=torch.int64)])
    specs = fragment_specs(submodels, fragment_ratios(list(setting.shares)))
    return [submodels.cost(spec, BATCH) for spec in specs]


def _budgets(setting: Setting) -> list[float]:
    """Compute a memory budget for each client that suffices for its share and nothing larger."""
    costs = _costs(setting)
    return [float(costs[setting.shares.index(share)].peak_bytes) for share in setting.clients]


class _Data:
    """Data module of random samples, without the base class, whose import takes memory."""

    def __init__(self, num: int) -> None:
        import torch
        from torch.utils.data import TensorDataset

        torch.manual_seed(0)
        self.samples = TensorDataset(torch.randn(num, FEATURES), torch.randint(0, CLASSES, (num,)))

    def prepare_data(self) -> None:
        """Do nothing: all is there."""

    def setup(self, stage: str) -> None:
        """Do nothing: all is there."""

    def train_dataloader(self) -> Any:
        """Return all samples."""
        from torch.utils.data import DataLoader

        return DataLoader(self.samples, batch_size=BATCH, shuffle=True)

    def test_dataloader(self) -> Any:
        """Return all samples."""
        return self.train_dataloader()


def _warm_up() -> None:
    """Import and use everything that a client uses, with a tiny model."""
    import torch

    from model_zoo import MLP
    from raafl.lean_import import import_lightning

    import_lightning()
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1)
    module = MLP(64, (64,), CLASSES)
    optimizer = module.configure_optimizers()
    for _ in range(3):
        loss = module.training_step((torch.randn(BATCH, 64), torch.zeros(BATCH, dtype=torch.int64)), 0)
        fabric.strategy.backward(loss, None)
        optimizer.step()
        optimizer.zero_grad()


def _resident_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("no VmRSS in /proc/self/status")


if __name__ == "__main__":
    if "--rank" in sys.argv:
        parser = argparse.ArgumentParser()
        parser.add_argument("--rank", type=json.loads)
        parser.add_argument("--folder", type=Path)
        options = parser.parse_args()
        given = {name: tuple(value) if isinstance(value, list) else value for name, value in options.rank.items()}
        take_part(Setting(**given), options.folder)
    else:
        main("memory", rows)
