"""The emulated GPU refuses what a real one refuses; each case is checked on a real one where there is one."""

from __future__ import annotations

import pytest
import torch

from tests.emulated_cuda import Emulated

INT, BOOL = torch.int64, torch.bool


def t(device, *shape, dtype=torch.float32):
    return torch.ones(shape, device=device, dtype=dtype)


ALLOWED = {
    "a scalar of the CPU": lambda c, g: t(g, 3) + t(c),
    "a scalar of the CPU first": lambda c, g: t(c) * t(g, 3),
    "two scalars": lambda c, g: t(g) + t(c),
    "a scalar added in place": lambda c, g: t(g, 3).add_(t(c)),
    "fill": lambda c, g: t(g, 3).fill_(t(c)),
    "copy to host": lambda c, g: t(c, 3).copy_(t(g, 3)),
    "copy to device": lambda c, g: t(g, 3).copy_(t(c, 3)),
    "to": lambda c, g: t(c, 3).to(g) + t(g, 3),
    "back": lambda c, g: t(g, 3).cpu() + t(c, 3),
    "indices of the CPU": lambda c, g: t(g, 3)[t(c, 2, dtype=INT)],
    "a mask of the CPU": lambda c, g: t(g, 3)[t(c, 3, dtype=BOOL)],
    "put by indices of the CPU": lambda c, g: t(g, 3).index_put_((t(c, 2, dtype=INT),), t(g, 2)),
    "where, of two scalars": lambda c, g: torch.where(t(g, 3, dtype=BOOL), t(c), t(c)),
    "masked_fill": lambda c, g: t(g, 3).masked_fill_(t(g, 3, dtype=BOOL), t(c)),
    "foreach copy": lambda c, g: torch._foreach_copy_([t(g, 3)], [t(c, 3)]),
    "foreach by a scalar": lambda c, g: torch._foreach_mul_([t(g, 3)], t(c)),
}
REFUSED = {
    "a vector": lambda c, g: t(g, 3) + t(c, 3),
    "a vector of one": lambda c, g: t(g, 3) + t(c, 1),
    "a scalar of the GPU": lambda c, g: t(c, 3) + t(g),
    "into a scalar of the CPU": lambda c, g: t(c).add_(t(g)),
    "two scalars of the CPU": lambda c, g: torch.addcmul(t(g, 3), t(c), t(c)),
    "product": lambda c, g: t(g, 3, 3) @ t(c, 3, 3),
    "cat": lambda c, g: torch.cat([t(g, 3), t(c, 3)]),
    "indices of the GPU": lambda c, g: t(c, 3)[t(g, 2, dtype=INT)],
    "put a vector": lambda c, g: t(g, 3).index_put_((t(g, 2, dtype=INT),), t(c, 2)),
    "index_select": lambda c, g: t(g, 3).index_select(0, t(c, 2, dtype=INT)),
    "gather": lambda c, g: t(g, 3).gather(0, t(c, 2, dtype=INT)),
    "labels": lambda c, g: torch.nn.functional.cross_entropy(t(g, 3, 4), t(c, 3, dtype=INT)),
    "embedding": lambda c, g: torch.nn.functional.embedding(t(c, 3, dtype=INT), t(g, 3, 3)),
    "a mask": lambda c, g: t(g, 3).masked_fill_(t(c, 3, dtype=BOOL), 0.0),
    "masked_select": lambda c, g: t(g, 3).masked_select(t(c, 3, dtype=BOOL)),
    "where": lambda c, g: torch.where(t(g, 3, dtype=BOOL), t(c, 3), t(g, 3)),
    "foreach": lambda c, g: torch._foreach_add_([t(g, 3)], [t(c, 3)]),
    "equal": lambda c, g: torch.equal(t(g, 3), t(c, 3)),
    "numpy": lambda c, g: t(g, 3).numpy(),
    "batch norm": lambda c, g: torch.nn.functional.batch_norm(t(g, 3, 3), t(c, 3), t(c, 3), training=True),
}


@pytest.fixture(params=["emulated", pytest.param("real", marks=pytest.mark.gpu)])
def gpu(request):
    if request.param == "emulated":
        request.getfixturevalue("emulated_cuda")
    return "cuda:0"


@pytest.mark.parametrize("case", ALLOWED)
def test_what_may_be_mixed(gpu, case):
    ALLOWED[case]("cpu", gpu)


@pytest.mark.parametrize("case", REFUSED)
def test_what_may_not_be_mixed(gpu, case):
    with pytest.raises((RuntimeError, TypeError, IndexError)):
        REFUSED[case]("cpu", gpu)


def test_the_emulated_gpu_has_views_gradients_and_generators_of_its_own(emulated_cuda: Emulated):
    flat = torch.zeros(6, device="cuda:1")
    weight = torch.nn.Parameter(flat[:3])
    (weight * torch.arange(3.0, device="cuda:1")).sum().backward()
    with torch.no_grad():
        weight.add_(weight.grad)
    assert weight.grad.device == weight.device == torch.device("cuda:1")
    assert flat.tolist() == [0.0, 1.0, 2.0, 0.0, 0.0, 0.0]
    with pytest.raises(RuntimeError, match="two devices, cuda:0 and cuda:1"):
        torch.zeros(6, device="cuda:0") + flat
    before = torch.default_generator.get_state()
    torch.cuda.set_device(1)
    torch.cuda.manual_seed(5)
    drawn = torch.rand(3, device="cuda")
    assert drawn.device == torch.device("cuda:1") and torch.equal(before, torch.default_generator.get_state())
    assert drawn.tolist() == torch.rand(3, generator=torch.Generator().manual_seed(5)).tolist()


def test_the_emulated_gpu_counts_copies_and_waits(emulated_cuda: Emulated):
    here, there = torch.ones(3), torch.ones(3, device="cuda:0")
    there.copy_(here)
    here.copy_(there)
    here.to("cuda:0").cpu()
    assert there.sum().item() == 3.0
    there.to("cuda:1")
    assert emulated_cuda.counts == {"to device": 2, "to host": 2, "waits": 3, "between": 1}
