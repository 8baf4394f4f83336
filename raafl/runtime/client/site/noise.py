"""Clip an update and add noise to it at the site, before it is sent; compute the privacy budget used by that.

The site trusts no server, so its guarantee is a local one: whoever sees all that leaves cannot tell, up to (epsilon, delta), the
site's data from *any other data* that it might have. Two clipped updates differ by at most 2 C, so that one release is a Gaussian
mechanism of sensitivity 2 C with noise sigma C. (The server's own option, `raafl.parts.protect.privacy`, has another adjacency: a
client's updates replaced by zero, sensitivity C.) Releases compose, without amplification: mu^2 = sum of (2 / sigma)^2, whose
epsilon is exact (Dong et al. 2019, corollary 3.3; Balle and Wang 2018, theorem 8).

The noise is drawn from the operating system anew each time and kept nowhere: nobody can subtract it, and nobody can replay it.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterator

import torch
from torch import Tensor

from raafl.config.site_policy import SitePrivacy
from raafl.local.train import LocalTrainer
from raafl.parts.merge.mean import CHUNK
from raafl.parts.protect.privacy import epsilon, gaussian
from raafl.submodel import FlatTensors, Spec
from raafl.submodel.flat import is_merged, reals

NEIGHBOURS = "this site's data replaced by any other data"
"""Adjacency of the site's epsilon, in words."""


def spent(inverse_squares: float, delta: float) -> float | None:
    """Return the epsilon (privacy budget) that the updates sent by this site have used.

    Returns:
        The epsilon; None = infinite.
    """
    if inverse_squares == 0:
        return 0.0
    return None if math.isinf(inverse_squares) else epsilon(0.5 / math.sqrt(inverse_squares), 1, delta)


def problem(trainer: LocalTrainer) -> str | None:
    """Return the reason why noise cannot make this trainer's updates private, such as activations that it sends.

    None if noise on the update's tensors is enough.
    """
    local, submodels = trainer.local, trainer.submodels
    if local.exchange(submodels) is not None:
        return "its method sends activations during a task"
    if local.traits.up_as is not None:
        return f"its method sends {local.traits.up_as} in the place of values"
    if trainer.payload.is_resident:
        return "its method goes on from what the last task has left on the client, which noise would spoil"
    if local.masked:
        return "its method sends which classes the client has"
    entries = submodels.layout(part="trained").entries
    if statistics := [entry.name for entry in entries if entry.name not in submodels.parameter_names]:
        return f"its model sends running statistics ({statistics[0]}), which noise would spoil"
    if numbers := [entry.name for entry in trainer.payload.layout(way="trained").entries if not is_merged(entry.dtype)]:
        return f"its method sends whole numbers ({numbers[0]})"
    return None


def privatise(
    privacy: SitePrivacy, trainer: LocalTrainer, spec: Spec, trained: FlatTensors, received: FlatTensors
) -> None:
    """Clip a trained update and add Gaussian noise, in place: ``d min(1, C / ||d||) + N(0, (sigma C)^2)``.

    d is the difference of all trained tensors from the received values, with one norm over all of them. If the client
    sends parameter values and not differences, the received values are added to the result.

    Raises:
        ValueError: the update contains NaN or infinity.
    """
    before = trainer.payload.split(received, spec, "sent")[0]
    values, bundles = trainer.payload.split(trained, spec, "trained")
    adds_back = trainer.sends == "values"
    pairs = [(reals(buffer), reals(before.buffers[dtype])[: len(buffer)]) for dtype, buffer in values.buffers.items()]
    changes = [reals(buffer) for bundle in bundles.values() for buffer in bundle.buffers.values()]
    if adds_back:
        for buffer, old in pairs:
            buffer.sub_(old.to(buffer.device))
    changes += [buffer for buffer, _ in pairs]
    norm = math.sqrt(math.fsum(square for buffer in changes for square in _squares(buffer)))
    if not math.isfinite(norm):
        raise ValueError("the update contains NaN or infinity")
    key = secrets.token_bytes(32)
    for number, buffer in enumerate(changes):
        if norm > privacy.clip_norm:
            buffer.mul_(privacy.clip_norm / norm)
        if privacy.noise_multiplier > 0:
            flat = buffer.flatten()  # a view, since the storage is contiguous
            noise = gaussian(key + number.to_bytes(4, "little"), len(flat))
            for piece, drawn in zip(torch.split(flat, CHUNK), noise, strict=True):
                piece.add_((drawn * (privacy.noise_multiplier * privacy.clip_norm)).to(piece))
    if adds_back:
        for buffer, old in pairs:
            buffer.add_(old.to(buffer.device))


def _squares(buffer: Tensor) -> Iterator[float]:
    for piece in torch.split(buffer.flatten(), CHUNK):
        yield piece.double().square().sum().item()
