"""Correct each tensor's mean delta by its angle to the outer momentum, before the outer step: HeLoCo. Experimental.

Al Asif et al., "HeLoCo: Efficient asynchronous low-communication training under data and device heterogeneity", 2026. The formulas
are taken from a second source, and the constants c_ok, k_s, beta_max, k_d and kappa are raafl's: the paper's are not known here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from raafl.core.state import GlobalState
from raafl.errors import BadInput, at_least
from raafl.parts.merge.mean import Accumulator, trained_values
from raafl.parts.merge.nesterov import Nesterov, NesterovMemory

_TINY = 1e-12


@dataclass(frozen=True)
class HeLoCo(Nesterov):
    """Outer step of the server along the clients' mean change, which is first turned towards the momentum if the two disagree.

    For each parameter tensor theta, Delta is the clients' mean change and m the momentum. c is the cosine of the angle
    between the two, and ``conf = |Delta| / (|Delta| + kappa |m|)``. Three cases:

    - ``c >= c_ok``, about the same direction: Delta stays as it is;
    - ``c < 0``, opposed directions: the share ``min(k_s (-c) conf, beta_max)`` of Delta's component against m is removed;
    - otherwise Delta keeps its length and takes the direction of ``(1 - l) Delta / |Delta| + l m / |m|``, with
      ``l = min(k_d (1 - c) conf, 1)``.

    Then ``m <- mu m + (1 - mu) Delta`` and ``theta <- theta + eta (Delta + mu m)``, with the momentum's decay mu and
    the outer learning rate eta. Elements that no update trains stay unchanged.

    Attributes:
        aligned: cosine from which on a change stays as it is (c_ok).
        shrink: strength with which the component against the momentum is removed (k_s).
        most_shrunk: largest share of that component that is removed (beta_max), 0 to 1.
        turn: strength with which a change is turned towards the momentum (k_d).
        trust: weight of the momentum's length relative to the change's (kappa).
    """

    aligned: float = 0.5
    shrink: float = 1.0
    most_shrunk: float = 1.0
    turn: float = 0.5
    trust: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.beta == 0:
            raise BadInput(
                "outer_momentum is 0, but outer 'heloco' corrects updates by the momentum: give a number above 0 and below 1"
            )
        for name, value in (("shrink", self.shrink), ("turn", self.turn), ("trust", self.trust)):
            at_least(name, value, 0)
        if not 0 <= self.most_shrunk <= 1:
            raise BadInput(f"most_shrunk is {self.most_shrunk}: give a number from 0 to 1")

    def apply(self, state: GlobalState) -> None:
        """Move the global model along the clients' mean change, corrected by its angle to the momentum."""
        memory = state.memory.of(NesterovMemory)
        sums = Accumulator(state, memory)
        is_whole = sums.common is not None and sums.common.is_full
        count = None if is_whole else sums.cover()
        for name, theta in trained_values(state).items():
            weight = sums.weight if count is None else count[name]
            where = weight > 0 if isinstance(weight, Tensor) else None
            delta = sums.total[name] / (weight.clamp_min(_TINY) if isinstance(weight, Tensor) else weight)
            if name not in state.submodels.parameter_names:  # running statistics
                theta.add_(delta)
                continue
            m = memory.momentum(state)[name]
            seen = m if where is None else torch.where(where, m, 0.0)
            delta = self.corrected(delta, seen)
            seen = self.beta * seen + (1 - self.beta) * delta
            m.copy_(seen if where is None else torch.where(where, seen, m))
            theta.add_(delta + self.beta * seen, alpha=self.lr)
        sums.clear()

    def corrected(self, delta: Tensor, m: Tensor) -> Tensor:
        """Return the mean change ``delta`` of a tensor, corrected by its angle to the momentum ``m``.

        Args:
            delta: mean change of the tensor over the clients; 0 where no client has trained.
            m: momentum of the same shape; 0 at the same elements.
        """
        length, own = _length(delta), _length(m)
        if length < _TINY or own < _TINY:
            return delta
        cosine = float((delta * m).sum()) / (length * own)
        if cosine >= self.aligned:
            return delta
        confidence = length / (length + self.trust * own)
        direction = m / own
        if cosine < 0:
            share = min(self.shrink * -cosine * confidence, self.most_shrunk)
            return delta - share * cosine * length * direction
        share = min(self.turn * (1 - cosine) * confidence, 1.0)
        turned = (1 - share) / length * delta + share * direction
        return turned * (length / _length(turned))

    def __str__(self) -> str:
        return f"{super().__str__()} as an average, deltas corrected towards it (HeLoCo, experimental)"


def _length(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor))
