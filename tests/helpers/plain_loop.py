"""Repeat a small run in the simplest way: in the journal's order, with whole models in dictionaries and SGD written out."""

from __future__ import annotations

import hashlib

import torch
from torch.nn import functional as F

from raafl.data import Dirichlet, FederatedData
from raafl.runfolder import checkpoint_reader
from tests.helpers.small_runs import digits, experiment, finish, small_mlp

UNEVEN = Dirichlet(alpha=1.0)


def run(tmp_path, name, algorithm, **fields):
    """Run ``algorithm`` on digits, unevenly shared by four clients, and return the finished run; ``fields``: of the experiment."""
    return finish(experiment(tmp_path / name, algorithm, **{"partition": UNEVEN, "max_updates": 24, **fields}))


def values(finished):
    """The final global model's parameters."""
    return checkpoint_reader.load(finished.folder).state_dict


def close(one, other, **tolerance):
    """Check that two models, mappings from names to tensors, are equal except for rounding; ``tolerance``: rtol and atol."""
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, other[name], **{"rtol": 1e-4, "atol": 1e-5, **tolerance})


def seed_of(*parts):
    text = "/".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def train(theta, x, y, seed, steps, prox=0.0):
    """Train a two-layer network by SGD (lr 0.05, momentum 0.5, batches of 64) from ``theta``; ``prox``: pull to the start."""
    start = {name: tensor.clone() for name, tensor in theta.items()}
    weights = {name: tensor.clone().requires_grad_() for name, tensor in theta.items()}
    velocity = {name: torch.zeros_like(tensor) for name, tensor in theta.items()}
    generator, done = torch.Generator().manual_seed(seed), 0
    while done < steps:
        order = torch.randperm(len(x), generator=generator)
        for rows in order.split(64):
            if done == steps:
                break
            hidden = torch.relu(x[rows].flatten(1) @ weights["layers.1.weight"].T + weights["layers.1.bias"])
            logits = hidden @ weights["layers.3.weight"].T + weights["layers.3.bias"]
            loss = F.cross_entropy(logits, y[rows])
            for name, tensor in weights.items():
                loss = loss + prox / 2 * ((tensor - start[name]) ** 2).sum()
            grads = torch.autograd.grad(loss, list(weights.values()))
            with torch.no_grad():
                for (name, tensor), grad in zip(weights.items(), grads, strict=True):
                    velocity[name] = 0.5 * velocity[name] + grad
                    tensor -= 0.05 * velocity[name]
            done += 1
    return {name: tensor.detach() for name, tensor in weights.items()}


class Plain:
    """A federated run computed in the simplest way, in the order of a journal, to compare with raafl's."""

    def __init__(self, finished, seed=0, prox=0.0):
        data = FederatedData(digits(), UNEVEN, 4, seed)
        self.samples = {i: data._dataset[data.indices(i)] for i in range(1, 5)}
        torch.manual_seed(seed_of(seed, "model"))
        self.theta = {n: p.detach().clone() for n, p in small_mlp().named_parameters()}
        self.rows, self.seed, self.prox = finished.journal(), seed, prox
        self.version = 0

    def arrivals(self):
        """Yield (trained, received, |D_n|, version received) in the order of the journal."""
        out = {}
        for row in self.rows:
            if row["event"] == "assigned":
                assert row["seed"] == seed_of(self.seed, row["client"], row["task"])
                assert row["version"] == self.version
                out[row["id"]] = (row, {name: tensor.clone() for name, tensor in self.theta.items()})
            elif row["event"] == "arrived":
                task, received = out.pop(row["assignment"])
                x, y = self.samples[task["client"]]
                assert row["num_samples"] == len(x)
                yield train(received, x, y, task["seed"], 3, self.prox), received, len(x), task["version"]
