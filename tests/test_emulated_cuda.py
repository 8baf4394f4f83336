"""The emulated GPU refuses what a real one refuses; each case is checked on a real one where there is one."""

from __future__ import annotations

import copy

import numpy
import pytest
import torch
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence as pack

from tests.helpers.emulated_cuda import Emulated

INT, BOOL = torch.int64, torch.bool


def t(device, *shape, dtype=torch.float32):
    return torch.ones(shape, device=device, dtype=dtype)


def with_gradient(device):
    weight = torch.nn.Parameter(t(device, 2, 3))
    weight.grad = t(device, 2, 3)
    return [weight]


def through_a_cast(device):
    weight = torch.nn.Parameter(t(device, 3))
    weight.double().square().sum().backward()
    return weight.grad


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
    "foreach with scalars of the CPU": lambda c, g: torch._foreach_add_([t(g, 3)], [t(c)]),
    "where, by a scalar": lambda c, g: torch.where(t(c, dtype=BOOL), t(g, 3), t(g, 3)),
    "lerp by a scalar": lambda c, g: t(g, 3).lerp_(t(g, 3), t(c)),
    "compare with a scalar": lambda c, g: t(g, 3) > t(c),
    "power": lambda c, g: t(g, 3) ** t(c),
    "out": lambda c, g: torch.add(t(g, 3), t(c), out=t(g, 3)),
    "put a scalar by a mask of the CPU": lambda c, g: t(g, 3).index_put_((t(c, 3, dtype=BOOL),), t(c)),
    "set rows to a number": lambda c, g: t(g, 3).__setitem__(t(c, 2, dtype=INT), 1.0),
    "set rows to a scalar": lambda c, g: t(g, 3).__setitem__(slice(2), t(c)),
    "set rows to the CPU's": lambda c, g: t(g, 3).__setitem__(slice(2), t(c, 2)),  # a copy
    "a copy of another kind": lambda c, g: t(g, 3).copy_(t(c, 3, dtype=INT)),
    "deepcopy": lambda c, g: copy.deepcopy(torch.nn.Linear(3, 3).to(g))(t(g, 3)),
    "a module that is moved": lambda c, g: torch.nn.Linear(3, 3).cuda()(t(g, 3)),
    "pinned memory": lambda c, g: t(c, 3).pin_memory().to(g, non_blocking=True),
    "lengths of the CPU": lambda c, g: torch.nn.GRU(1, 2).to(g)(pack(t(g, 3, 2, 1), t(c, 2, dtype=INT))),
    "a norm, and clipping": lambda c, g: torch.nn.utils.clip_grad_norm_(with_gradient(g), 1.0),
    "the gradient of a cast": lambda c, g: through_a_cast(g) + t(g, 3),
    "a generator of the GPU": lambda c, g: torch.rand(3, device=g, generator=torch.Generator(g)) + t(g, 3),
    "noise by a generator of the GPU": lambda c, g: t(g, 3).normal_(generator=torch.Generator(g).manual_seed(1)),
    "like, on the other": lambda c, g: torch.zeros_like(t(g, 3), device=c) + t(c, 3),
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
    "out on the CPU": lambda c, g: torch.add(t(g, 3), t(g, 3), out=t(c, 3)),
    "out on the GPU": lambda c, g: torch.add(t(c, 3), t(c, 3), out=t(g, 3)),
    "out of a product": lambda c, g: torch.mm(t(g, 3, 3), t(g, 3, 3), out=t(c, 3, 3)),
    "where, by a mask": lambda c, g: torch.where(t(c, 3, dtype=BOOL), t(g, 3), t(g, 3)),
    "stack": lambda c, g: torch.stack([t(g), t(c)]),
    "nothing in cat": lambda c, g: torch.cat([t(g, 3), t(c, 0)]),
    "a mask of the GPU": lambda c, g: t(c, 3)[t(g, 3, dtype=BOOL)],
    "index_fill": lambda c, g: t(g, 3).index_fill_(0, t(c, 2, dtype=INT), 1.0),
    "index_add": lambda c, g: t(g, 3).index_add_(0, t(c, 2, dtype=INT), t(g, 2)),
    "index_copy": lambda c, g: t(g, 3).index_copy_(0, t(g, 2, dtype=INT), t(c, 2)),
    "scatter": lambda c, g: t(g, 3).scatter_(0, t(c, 2, dtype=INT), t(g, 2)),
    "take": lambda c, g: t(g, 3).take(t(c, 2, dtype=INT)),
    "weights of classes": lambda c, g: F.cross_entropy(t(g, 3, 4), t(g, 3, dtype=INT) * 0, weight=t(c, 4)),
    "weights of a positive": lambda c, g: F.binary_cross_entropy_with_logits(t(g, 3), t(g, 3), pos_weight=t(c, 3)),
    "convolution": lambda c, g: F.conv1d(t(g, 1, 1, 3), t(c, 1, 1, 2)),
    "a bias": lambda c, g: F.linear(t(g, 2, 3), t(g, 3, 3), t(c, 3)),
    "dot": lambda c, g: torch.dot(t(g, 1), t(c, 1)),
    "layer norm": lambda c, g: F.layer_norm(t(g, 2, 3), (3,), t(c, 3)),
    "mean squared error": lambda c, g: F.mse_loss(t(g, 3), t(c, 3)),
    "clamp by a scalar": lambda c, g: t(g, 3).clamp(min=t(c)),
    "nextafter": lambda c, g: torch.nextafter(t(g, 3), t(c)),
    "foreach of three": lambda c, g: torch._foreach_addcdiv_([t(g, 3)], [t(g, 3)], [t(c, 3)]),
    "a generator of the CPU": lambda c, g: torch.rand(3, device=g, generator=torch.Generator()),
    "noise by a generator of the CPU": lambda c, g: t(g, 3).normal_(generator=torch.Generator()),
    "rows drawn by a generator of the CPU": lambda c, g: torch.multinomial(t(g, 3), 1, generator=torch.Generator()),
    "a generator of the GPU, on the CPU": lambda c, g: torch.rand(3, generator=torch.Generator(g)),
    "the gradient of a cast, on the CPU": lambda c, g: through_a_cast(g) + t(c, 3),
    "pinned": lambda c, g: t(g, 3).pin_memory(),
    "as an array": lambda c, g: numpy.asarray(t(g, 3)),
    "from the other GPU": lambda c, g: t(g, 3) + t("cuda:1", 3),
    "a GPU that is not there": lambda c, g: t("cuda:99", 3),
    "a module that stayed": lambda c, g: torch.nn.Linear(3, 3)(t(g, 3)),
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


OPTIMIZERS = (
    "SGD",
    "Adam",
    "AdamW",
    "NAdam",
    "RAdam",
    "Adamax",
    "RMSprop",
    "Adagrad",
    "Adadelta",
    "Rprop",
    "Adafactor",
)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimisers_step_on_a_gpu_and_count_on_the_cpu(gpu, name):
    """They take all parameters at once there, and keep a tensor of the CPU for each in their state."""
    found = {}
    for device in ("cpu", gpu):
        weights = [*with_gradient(device), *with_gradient(device)]
        optimizer = getattr(torch.optim, name)(weights, lr=0.5)
        optimizer.step()
        optimizer.step()
        assert all(state["step"].device.type == "cpu" for state in optimizer.state.values() if "step" in state)
        found[device] = torch.stack([weight.detach().cpu() for weight in weights])
    torch.testing.assert_close(found["cpu"], found[gpu], rtol=1e-4, atol=1e-5)


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
    assert emulated_cuda.counts == {"to device": 2, "to host": 2, "waits": 5, "between": 1}
    assert emulated_cuda.num_bytes == {"to device": 24, "to host": 24, "between": 12}
    there.copy_(here, non_blocking=True)
    there.to("cpu", non_blocking=True)
    assert emulated_cuda.counts == {"to device": 3, "to host": 3, "waits": 5, "between": 1, "late": 1}
    there[there > 0.5]
    assert emulated_cuda.counts["waits"] == 6


class OnStreams:
    """A GPU's tensor and memory of the host, and a stream beside the GPU's first."""

    def __init__(self):
        self.there, self.here = torch.ones(4, device="cuda:0"), torch.zeros(4)
        self.stream, self.copied = torch.cuda.Stream("cuda:0"), torch.cuda.Event()

    def copy(self, to, source):
        with torch.cuda.stream(self.stream):
            to.copy_(source, non_blocking=True)
        self.copied.record(self.stream)

    def copy_here(self):
        self.stream.wait_stream(torch.cuda.current_stream("cuda:0"))
        self.copy(self.here, self.there)

    def copy_there(self):
        self.stream.wait_stream(torch.cuda.current_stream("cuda:0"))
        self.copy(self.there, self.here)


def test_a_copy_on_an_emulated_stream_is_late_until_its_event_is_waited_for(emulated_cuda: Emulated):
    one = OnStreams()
    one.copy_here()
    assert one.here.numpy().tolist() == [0.0] * 4  # through the memory itself, past what is checked
    with pytest.raises(RuntimeError, match="the CPU touches what a copy on another stream is at work on"):
        one.here.sum()
    one.copied.synchronize()
    assert one.here.tolist() == [1.0] * 4 and emulated_cuda.counts["events"] == 1


def test_emulated_work_that_does_not_wait_for_a_copy_on_another_stream_is_refused(emulated_cuda: Emulated):
    one = OnStreams()
    one.copy_there()
    with pytest.raises(RuntimeError, match="a stream of cuda:0 touches what a copy on another stream is at work on"):
        one.there.sum()
    with pytest.raises(RuntimeError, match="the CPU touches"):
        one.here.fill_(2.0)
    assert one.here.sum() == 0.0  # which a copy reads as well
    torch.cuda.current_stream("cuda:0").wait_event(one.copied)
    assert one.there.tolist() == [0.0] * 4


def test_an_emulated_copy_that_does_not_wait_for_what_makes_its_values_is_refused(emulated_cuda: Emulated):
    one = OnStreams()
    with pytest.raises(RuntimeError, match="touches what another is at work on"):
        one.copy(one.here, one.there)
    one = OnStreams()
    one.copy_here()
    one.copied.synchronize()
    one.there.sum()  # is read: that may go on beside another copy from it, not beside one to it
    one.copy(one.here, one.there)
    one.copied.synchronize()
    with pytest.raises(RuntimeError, match="touches what another is at work on"):
        one.copy(one.there, one.here)
    torch.cuda.synchronize()
    one.copy(one.there, one.here)


def test_emulated_work_on_a_stream_of_its_own_is_waited_for_as_well(emulated_cuda: Emulated):
    one = OnStreams()
    one.stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(one.stream):
        doubled = one.there * 2
    with pytest.raises(RuntimeError, match="touches what another is at work on"):
        doubled + 1
    torch.cuda.current_stream().wait_stream(one.stream)
    assert (doubled + 1).tolist() == [3.0] * 4
