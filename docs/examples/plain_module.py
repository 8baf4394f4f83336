"""A plain nn.Module with a loss and two data sets; a callback of one's own, and one that ends the run early."""

# ruff: noqa: D102
import os

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset, random_split

import raafl


class WorstClass(raafl.Callback):
    """Adds the accuracy on the class that is recognised worst."""

    def on_evaluate(self, run, metrics):
        found = run.module()(x_test).argmax(dim=1)
        metrics["worst"] = min((found[y_test == c] == c).float().mean().item() for c in range(10))

    def on_client_lost(self, run, client, reason):
        run.note(f"client {client} has gone: {reason}")


torch.manual_seed(0)
digits = load_digits()
everything = TensorDataset(torch.tensor(digits.data / 16).float(), torch.tensor(digits.target))
train, test = random_split(everything, [1400, 397])
x_test, y_test = test[list(range(397))]

fed = raafl.Federation(
    "fed_avg",
    clients=4,
    num_epochs=2,
    max_updates=200,
    progress="quiet",
    output=os.environ.get("OUTPUT"),
    callbacks=[WorstClass(), raafl.EarlyStopping("worst", patience=4, mode="max"), raafl.Printing()],
)
net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
result = fed.simulate(net, (train, test), loss=nn.CrossEntropyLoss(), optimizer=lambda p: torch.optim.Adam(p, lr=3e-3))
print(f"{result.summary['finished']}: worst class {result.final['worst']:.2f}, in {result.folder}")
