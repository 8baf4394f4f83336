"""Any LightningModule, on unequal clients: python FILE, or torchrun --standalone --nproc-per-node 4 FILE on real ranks."""

# ruff: noqa: D101, D102
import os

import torch
from lightning import LightningModule
from torch import nn

import raafl
from raafl.data import Digits, Dirichlet


class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 10))

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("accuracy", (self(batch[0]).argmax(dim=1) == batch[1]).float().mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


fed = raafl.Federation(
    raafl.fed_raa(fragments=3, alpha=0.6),
    devices=[{"name": "laptop", "flops_per_s": 2e8}, {"name": "phone", "flops_per_s": 5e7, "count": 2}],
    partition=Dirichlet(alpha=1.0),
    max_updates=60,
    progress="plain",
    output=os.environ.get("OUTPUT"),
)
run = fed.fit if "RANK" in os.environ else fed.simulate
if result := run(Net, Digits()):  # on rank 0
    print(f"accuracy {result.final['accuracy']:.3f} after {result.summary['time_s']:.2f} s, in {result.folder}")
