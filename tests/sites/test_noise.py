"""Noise that a site adds: what is clipped, what is added, what it spends, and what cannot be made private."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from raafl.algorithms import ALGORITHMS, co_s2p, fed_avg, fed_buff
from raafl.core.algorithm import Training
from raafl.local.train import LocalTrainer
from raafl.sites.policy import SitePrivacy, privatise, problem, spent
from raafl.submodel import FULL, FlatTensors, Submodels
from tests.helpers.single_task import Slope


class Wide(Slope):
    """Slopes with so many weights that the noise's size can be seen."""

    def __init__(self, num=20_000):
        super().__init__()
        self.line = nn.Linear(1, num, bias=False)


class Normed(Slope):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(1)

    def training_step(self, batch, index):
        return super().training_step((self.norm(batch[0]), batch[1]), index)


def trainer_of(algorithm, module):
    submodels = Submodels(module, (torch.ones(2, 1), torch.zeros(2, 1)))
    return LocalTrainer(submodels, algorithm.local, algorithm.merge.sends, Training())


def weights(value, num=4):
    return FlatTensors.from_named({"line.weight": torch.full((num, 1), value)})


@pytest.mark.parametrize(("algorithm", "sent"), [(fed_avg(), 5.0), (fed_buff(), 2.0)], ids=["values", "delta"])
def test_the_change_is_clipped_whether_values_or_differences_leave(algorithm, sent):
    """From 3 to 5 in four weights: a change of norm 4, clipped to 1, a half in each."""
    trainer, trained = trainer_of(algorithm, Wide(4)), weights(sent)
    privatise(SitePrivacy(1.0, 0.0), trainer, FULL, trained, weights(3.0))
    assert trained["line.weight"].flatten().tolist() == pytest.approx([sent - 2 + 0.5] * 4, rel=1e-6)
    small = weights(sent)
    privatise(SitePrivacy(4.0, 0.0), trainer, FULL, small, weights(3.0))
    assert small["line.weight"].eq(sent).all()


def test_bundles_are_clipped_together_with_the_values_and_get_noise_of_their_own():
    trainer = trainer_of(ALGORITHMS["scaffold"](), Wide(20_000))
    layout, received = trainer.payload.layout(FULL, "trained"), FlatTensors.zeros(trainer.payload.layout(FULL, "sent"))
    trained = FlatTensors.zeros(layout)
    for buffer in trained.buffers.values():
        buffer.fill_(1.0)
    total = sum(map(len, trained.buffers.values()))
    assert total == 40_000
    privatise(SitePrivacy(10.0, 0.0), trainer, FULL, trained, received)
    assert math.sqrt(sum(buffer.square().sum().item() for buffer in trained.buffers.values())) == pytest.approx(
        10.0, rel=1e-4
    )
    privatise(SitePrivacy(10.0, 0.5), trainer, FULL, trained, received)
    values, bundles = trainer.payload.split(trained, FULL, "trained")
    parts = [next(iter(flat.buffers.values())).flatten() for flat in (values, *bundles.values())]
    for part in parts:
        assert part.std().item() == pytest.approx(5.0, rel=0.05)  # sigma C
    assert torch.corrcoef(torch.stack(parts))[0, 1].abs() < 0.05


def test_noise_has_the_stated_size_and_is_never_the_same():
    trainer = trainer_of(fed_avg(), Wide())
    first, second = weights(3.0, 20_000), weights(3.0, 20_000)
    for one in (first, second):
        privatise(SitePrivacy(2.0, 1.5), trainer, FULL, one, weights(3.0, 20_000))
    noise = first["line.weight"].flatten() - 3.0
    # five standard errors: the draw is another one each time
    assert abs(noise.mean().item()) < 5 * 3.0 / math.sqrt(len(noise))
    assert abs(noise.std().item() - 3.0) < 5 * 3.0 / math.sqrt(2 * len(noise))
    assert torch.corrcoef(torch.stack([noise, second["line.weight"].flatten() - 3.0]))[0, 1].abs() < 0.05


def test_a_number_that_is_not_finite_is_not_sent():
    with pytest.raises(ValueError, match="NaN or infinity"):
        privatise(SitePrivacy(1.0, 1.0), trainer_of(fed_avg(), Wide(4)), FULL, weights(math.nan), weights(0.0))


def test_what_releases_spend_is_what_an_accountant_says_of_twice_the_sensitivity():
    """Two releases with sigma 4 and one with sigma 8, each of sensitivity 2 C: Gaussians of multiplier 2, 2 and 4."""
    dp = pytest.importorskip("dp_accounting", reason="needs the extra privacy")
    events = [dp.GaussianDpEvent(2.0), dp.GaussianDpEvent(2.0), dp.GaussianDpEvent(4.0)]
    accountant = dp.pld.PLDAccountant(dp.NeighboringRelation.REPLACE_SPECIAL)
    for event in events:
        accountant.compose(event)
    assert spent(1 / 16 + 1 / 16 + 1 / 64, 1e-6) == pytest.approx(accountant.get_epsilon(1e-6), rel=1e-3)
    assert spent(0.0, 1e-6) == 0.0 and spent(math.inf, 1e-6) is None


@pytest.mark.parametrize(
    ("algorithm", "module", "said"),
    [
        (ALGORITHMS["fed_pm"](), Slope(), "sends bits"),
        (ALGORITHMS["fed_mezo"](), Slope(), "sends scalars"),
        (fed_avg(), Normed(), "sends running statistics (norm.running_mean)"),
        (ALGORITHMS["streaming_diloco"](), Slope(), "what the last task has left on the client"),
    ],
    ids=["bits", "scalars", "statistics", "resident"],
)
def test_what_noise_on_tensors_does_not_cover_is_refused(algorithm, module, said):
    assert said in problem(trainer_of(algorithm, module))


def test_other_methods_go_with_it():
    assert problem(trainer_of(fed_avg(), Slope())) is None and problem(trainer_of(co_s2p(), Slope())) is None
