"""Predicted peaks of memory against what real steps allocate."""

from __future__ import annotations

import gc
from itertools import accumulate, pairwise

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from model_zoo import CNN, MLP, ResNet, ViT
from raafl.rules import Rules
from raafl.submodel import FULL, Spec, Submodels
from raafl.submodel.nested_batch import tensors_in
from tests.local.bench import filled
from tests.submodel import networks

LABELS = torch.zeros(2, dtype=torch.long)


def allocated_bytes(module, batch):
    """The most that two real steps have allocated at once, as torch's CPU allocator itself notes it."""
    optimizer = module.train().configure_optimizers()
    gc.collect()  # or what earlier tests have left would go in the middle, and be taken off
    gc.disable()
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            for _ in range(2):
                module.training_step(batch, 0).backward()
                optimizer.step()
                optimizer.zero_grad()
    finally:
        gc.enable()
    notes = [event.nbytes() for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    assert notes
    return max(accumulate(notes))


def check_peak(module, batch, half):
    """Compare the predicted peak with an actual one; both far more than the values alone."""
    for part in module.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    submodels = Submodels(module, batch)
    spec = Spec.select({n: range(axis.size // 2 + 1) for n, axis in submodels.axes.items()}) if half else FULL
    shrunk = filled(submodels, spec, submodels.state(module))
    for name in ("log", "log_dict"):
        setattr(shrunk.module, name, lambda *args, **kwargs: None)
    held = 2 * shrunk.present.num_bytes + sum(x.numel() * x.itemsize for x in tensors_in(batch))
    real = held + allocated_bytes(shrunk.module, batch)
    assert submodels.cost(spec, len(tensors_in(batch)[0])).peak_bytes == pytest.approx(real, rel=0.02)


@pytest.mark.quick_cases("vit-True", "llama-True", "albert-True", "encoder-False", "both_ways-True")
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize(
    "name", ["vit", "vit_eager", "distilbert", "llama", "mistral", "albert", "encoder", "both_ways"]
)
def test_the_predicted_peak_is_what_a_real_step_allocates(name, half):
    torch.manual_seed(0)
    batch = {key: torch.cat([value] * 8) for key, value in networks.CASES[name].inputs().items()}
    check_peak(networks.Task(name), batch, half)


class PlainConvs(nn.Module):
    """Convolutions and little else, as small clients train: their copies are most of what a step takes."""

    def __init__(self, channels=(3, 10, 24, 20), kernel=3, dims=2, groups=1):
        super().__init__()
        kind = {1: nn.Conv1d, 2: nn.Conv2d}[dims]
        pairs = pairwise(channels)
        layers = [(kind(i, o, kernel, padding=1, groups=groups if i % groups == 0 else 1), nn.ReLU()) for i, o in pairs]
        self.layers = nn.Sequential(*(layer for pair in layers for layer in pair))

    def training_step(self, batch, batch_idx):
        return self.layers(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"),
    reason="blocks of channels are as with AVX2 or AVX-512",
)
@pytest.mark.parametrize(
    ("net", "shape"),
    [
        (lambda: PlainConvs(), (16, 3, 20, 20)),
        (lambda: PlainConvs((1, 6, 7), 5), (16, 1, 20, 20)),
        (lambda: PlainConvs((3, 8, 8), groups=8), (4, 3, 20, 20)),
        (lambda: PlainConvs((12, 9, 6), dims=1), (16, 12, 200)),
        (lambda: PlainConvs((4, 4, 4)), (1, 4, 20, 20)),
        (lambda: PlainConvs((4, 6)).double(), (16, 4, 20, 20)),
    ],
    ids=["colours", "one channel", "grouped", "one dimension", "one sample", "double"],
)
def test_the_predicted_peak_of_convolutions_is_what_a_real_step_allocates(net, shape):
    torch.manual_seed(0)
    module = net()
    check_peak(module, [torch.randn(shape, dtype=next(module.parameters()).dtype)], half=False)


class Encoder(nn.Module):
    """torch's own transformer, whose attention is called by a function of torch that is written in Python."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.net = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def training_step(self, batch, batch_idx):
        return self.net(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


@pytest.mark.parametrize("half", [False, True])
def test_the_predicted_peak_of_torch_s_transformer_is_what_a_real_step_allocates(half):
    torch.manual_seed(0)
    check_peak(Encoder(), torch.randn(4, 60, 32), half)


def test_older_runs_count_each_operation_of_torch_s_attention():
    module, batch = Encoder(), torch.randn(4, 60, 32)
    older, newer = (Submodels(module, batch, rules=Rules(number)).cost(FULL, 4).peak_bytes for number in (1, 2))
    weights = 4 * 4 * 4 * 60 * 60  # of one layer: samples, heads, bytes, pairs of positions
    assert older - newer > 2 * weights


class Recurrent(nn.Module):
    """A recurrent net over sequences, batch first, and a head on all its outputs."""

    def __init__(self, kind, num_layers, bidirectional):
        super().__init__()
        self.net = kind(24, 32, num_layers, bidirectional=bidirectional, batch_first=True)
        self.head = nn.Linear(64 if bidirectional else 32, 4)

    def training_step(self, batch, batch_idx):
        return self.head(self.net(batch)[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_the_predicted_peak_of_a_recurrent_net_is_what_a_real_step_allocates(kind, bidirectional):
    torch.manual_seed(0)
    check_peak(Recurrent(kind, 1, bidirectional), torch.randn(16, 30, 24), half=False)


ZOO = {
    "mlp": lambda: MLP(48, (40, 30), 10),
    "cnn": lambda: CNN(3, 16, (16, 32), (48, 32), 10),
    "vit": lambda: ViT("micro"),
    "resnet": lambda: ResNet(),
}


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("name", ZOO)
def test_the_predicted_peak_of_a_zoo_model_is_what_a_real_step_allocates(name, half):
    torch.manual_seed(0)
    shape = {"mlp": (48,), "cnn": (3, 16, 16)}.get(name, (3, 32, 32))
    check_peak(ZOO[name](), [torch.randn(8, *shape), torch.zeros(8, dtype=torch.long)], half)
