"""Train RA-Fed with S-Arb step by step as its authors' code does, and with single settings as raafl has them.

The authors' code (github.com/wyy-123-xyy/RA-Fed, commit 1876d2a) differs from the paper's text in what a client trains. Regions
are quarters of the first layer's weights, in no order of position, and not of the neurons; a client's zeroed weights are
trained, too, and zeroed again afterwards; it trains five epochs at the rate 0.1, not five iterations at 0.01. Pixels of the
clients' images are scaled to [-1, 1], those of the test images are normalised by 0.1307 and 0.3081. One layer of 200 neurons
has dropout of a half. A row is one way: accuracy on the test images as the authors', and on test images like the training
images, each after the last round (mean of five evaluations), and the best of all rounds, which the authors print; means over
seeds, and each seed's.

    python -m benchmarks.ra_fed_authors [--json] [--out FILE]
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import product
from multiprocessing import get_context
from statistics import fmean

import numpy as np
import torch
from torch.nn import functional

from benchmarks.common import Row, main
from raafl.data import MNIST, Dirichlet
from raafl.data.sources import TensorImages

CLIENTS, REGIONS, HIDDEN, CLASSES = 10, 4, 200, 10
ROUNDS, EPOCHS, BATCH, LR, MOMENTUM, ALPHA = 30, 5, 128, 0.1, 0.5, 0.1
SEEDS = 0, 1, 2
SCALES = {"[-1, 1]": (0.5, 0.5), "as in tests": (0.1307, 0.3081)}
"""Mean and deviation by which pixels are normalised."""

Tensors = list[torch.Tensor]
"""Weights and biases of the two layers, or values for each of them."""


@dataclass(frozen=True)
class Way:
    """A way to train; that of the authors by default.

    `regions`: what is divided into regions, weights of the first layer, or neurons, of which a client then trains nothing
    but its own. `pixels`: how training images are normalised.
    """

    regions: str = "weights"
    pixels: str = "[-1, 1]"


WAYS = [Way(regions, pixels) for regions in ("weights", "neurons") for pixels in SCALES]


def train(
    start: Tensors, trained: Tensors, data: tuple[torch.Tensor, torch.Tensor], rng: np.random.Generator
) -> Tensors:
    """Train a client's model for five epochs by SGD with momentum; gradients are multiplied by ``trained``, 1 or 0."""
    model = [value.clone().requires_grad_() for value in start]
    optimizer, (images, labels) = torch.optim.SGD(model, LR, MOMENTUM), data
    for _ in range(EPOCHS):
        for batch in torch.split(torch.from_numpy(rng.permutation(len(labels))), BATCH):
            bits = np.unpackbits(np.frombuffer(rng.bytes(len(batch) * HIDDEN // 8), np.uint8))
            kept = torch.from_numpy(bits).view(-1, HIDDEN) * 2.0
            hidden = (torch.addmm(model[1], images[batch], model[0].T) * kept).relu()
            loss = functional.cross_entropy(torch.addmm(model[3], hidden, model[2].T), labels[batch])
            for value, gradient, mask in zip(model, torch.autograd.grad(loss, model), trained, strict=True):
                value.grad = gradient * mask
            optimizer.step()
    return [value.detach() for value in model]


def scaled(images: torch.Tensor, pixels: str) -> torch.Tensor:
    """Return images as rows of pixels, normalised as one of `SCALES`."""
    mean, std = SCALES[pixels]
    return (images.flatten(1) - mean) / std


def parts_of(way: Way, region: torch.Tensor, taken: Sequence[int]) -> Tensors:
    """Return what a client has of each tensor, 1 or 0; ``region``: number of the region of each weight, or of each neuron."""
    has = torch.isin(region, torch.tensor(taken)).float()
    if way.regions == "weights":
        return [has, torch.ones(HIDDEN), torch.ones(CLASSES, HIDDEN), torch.ones(CLASSES)]
    return [has[:, None], has, has.expand(CLASSES, HIDDEN), torch.ones(CLASSES)]


def merged(model: Tensors, clients: Sequence[tuple[Tensors, Tensors]]) -> Tensors:
    """Return the mean of each element over the clients that have it; ``clients``: trained values, and what each has."""
    result = []
    for place, value in enumerate(model):
        total = sum(trained[place] * has[place] for trained, has in clients)
        count = torch.as_tensor(sum(has[place] for _, has in clients)).expand_as(value)
        result.append(torch.where(count > 0, total / count, value))
    return result


def run(way: Way, seed: int) -> dict[str, float]:
    """Train one way on one seed; return accuracies."""
    torch.set_num_threads(1)
    rng, source = np.random.default_rng(seed), MNIST(normalize=False)
    source.prepare_data()
    source.setup()
    assert isinstance(source.train, TensorImages) and isinstance(source.test, TensorImages)
    images, labels = source.train.gather(torch.arange(len(source.train)))
    tests, truth = source.test.gather(torch.arange(len(source.test)))
    seen = {"authors": scaled(tests, "as in tests"), "alike": scaled(tests, way.pixels)}
    images = scaled(images, way.pixels)
    shares = Dirichlet(ALPHA).assign(labels.numpy(), CLIENTS, np.random.default_rng(seed), {})
    data = [(images[share], labels[share]) for share in map(torch.from_numpy, shares)]

    torch.manual_seed(seed)
    layers = torch.nn.Linear(images.shape[1], HIDDEN), torch.nn.Linear(HIDDEN, CLASSES)
    model = [value.detach() for layer in layers for value in (layer.weight, layer.bias)]
    scores: dict[str, list[float]] = {name: [] for name in seen}
    for number in range(ROUNDS):
        region = torch.arange(HIDDEN) // (HIDDEN // REGIONS)
        if way.regions == "weights":  # the authors' masks: argsort of the weights, taken as if it were their ranks
            region = (model[0].flatten().argsort() // (model[0].numel() // REGIONS)).view_as(model[0])
        clients = []
        for own in data:
            common = range(REGIONS) if number == 0 else [REGIONS - 1]
            has = parts_of(way, region, common if number % 10 == 0 else [int(rng.integers(REGIONS))])
            trained = [torch.ones_like(one) for one in has] if way.regions == "weights" else has
            start = [value * one for value, one in zip(model, has, strict=True)]
            clients.append((train(start, trained, own, rng), has))
        model = merged(model, clients)
        for name, values in seen.items():
            hidden = torch.addmm(model[1], values, model[0].T).relu()
            found = torch.addmm(model[3], hidden, model[2].T).argmax(1)
            scores[name].append(float((found == truth).float().mean()))
    return {
        **{f"{name}_last": fmean(values[-5:]) for name, values in scores.items()},
        **{f"{name}_best": max(values) for name, values in scores.items()},
    }


def measure() -> list[Row]:
    """Return a row for each way: accuracies as means over seeds, and those of each seed."""
    cases = list(product(WAYS, SEEDS))
    with ProcessPoolExecutor(2, get_context("spawn")) as pool:
        found = dict(zip(cases, pool.map(run, *zip(*cases, strict=True)), strict=True))
    rows = []
    for way in WAYS:
        own = [found[way, seed] for seed in SEEDS]
        means = {key: round(fmean(one[key] for one in own), 4) for key in own[0]}
        seeds = {f"{key}_seeds": [round(one[key], 4) for one in own] for key in own[0]}
        rows.append({"regions": way.regions, "pixels": way.pixels, "seeds": len(SEEDS), **means, **seeds})
    return rows


if __name__ == "__main__":
    main("ra_fed_authors", measure)
