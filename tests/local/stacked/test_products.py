"""Products of stacks: the bits of each client's own, whatever the shapes and places."""

from __future__ import annotations

import pytest
import torch
from torch.func import vmap
from torch.nn import functional as F

from raafl.local.stacked import mode
from raafl.local.stacked import stacks as stacks_module
from raafl.local.stacked.mode import Stacked
from raafl.local.stacked.stacks import apart, joined


def stacks(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(*shape, generator=generator, requires_grad=True) for shape in shapes]


def compared(function, operands, num):
    """Values and gradients on stacks, and of each client alone, whose tensors are its own."""
    together = vmap(lambda *own: _in_mode(function, own, num))(*operands)
    weights = torch.randn(together.shape[1:], generator=torch.Generator().manual_seed(1))
    gradients = torch.autograd.grad((together * weights).sum(), operands)
    for client in range(num):
        own = [one.detach()[client].clone().requires_grad_() for one in operands]
        alone = function(*own)
        assert torch.equal(alone, together[client])
        for mine, theirs in zip(torch.autograd.grad((alone * weights).sum(), own), gradients, strict=True):
            assert torch.equal(mine, theirs[client])


def _in_mode(function, own, num, known=None):
    with Stacked(num, [torch.Generator().get_state()] * num, {} if known is None else known):
        return function(*own)


@pytest.mark.parametrize("num", [1, 2, 5, 16])
@pytest.mark.parametrize(
    ("n", "i", "o"), [(10, 64, 32), (3, 8, 3), (1, 7, 5), (5, 1, 4), (4, 6, 1), (32, 31, 62), (2, 33, 17)]
)
def test_linear_layers_with_and_without_bias(num, n, i, o):
    x, weight, bias = stacks((num, n, i), (num, o, i), (num, o))
    compared(F.linear, [x, weight, bias], num)
    compared(F.linear, [x, weight], num)


def test_linear_of_sequences_transposed_inputs_and_vectors():
    x, weight, bias = stacks((3, 4, 5, 8), (3, 6, 8), (3, 6))
    compared(F.linear, [x, weight, bias], 3)
    compared(lambda x, w, b: F.linear(x.transpose(0, 1), w, b), [x, weight, bias], 3)
    compared(lambda x, w, b: F.linear(x[0, 0], w, b), [x, weight, bias], 3)
    compared(lambda x, w: F.linear(x, w) @ w, [x, weight], 3)


def test_a_layer_that_all_clients_share_is_computed_for_each():
    (x,), shared = stacks((3, 4, 8)), torch.randn(6, 8)
    compared(lambda x: F.linear(x, shared), [x], 3)


@pytest.mark.parametrize("padding", [None, 0, -1])
def test_tables_of_embeddings(padding):
    (tables,) = stacks((4, 9, 5))
    ids = torch.randint(0, 9, (4, 3, 7), generator=torch.Generator().manual_seed(2))
    together = vmap(lambda w, i: _in_mode(lambda w, i: F.embedding(i, w, padding), (w, i), 4))(tables, ids)
    (gradient,) = torch.autograd.grad(together.square().sum(), [tables])
    for client in range(4):
        own = tables.detach()[client].clone().requires_grad_()
        alone = F.embedding(ids[client], own, padding)
        assert torch.equal(alone, together[client])
        assert torch.equal(torch.autograd.grad(alone.square().sum(), [own])[0], gradient[client])


def test_a_kind_of_product_is_tried_once_and_never_trusted_on_a_few_results(monkeypatch):
    tried = []
    real = stacks_module._is_equal
    monkeypatch.setattr(stacks_module, "_is_equal", lambda *args: tried.append(args) or real(*args))
    known = {}
    a, b = torch.randn(4, 5, 8), torch.randn(4, 8, 3)
    for _ in range(3):
        stacks_module.product(known, "a b", torch.bmm, torch.mm, a, b)
    assert len(tried) == len(known) == 1
    almost = lambda a, b: torch.bmm(a, b) * torch.where(a.sum() > 2.0, 1.0001, 1.0)  # noqa: E731
    assert not stacks_module._is_equal(almost, torch.mm, [a[:1], b[:1]])


def test_slices_lie_at_multiples_of_16_bytes_and_gradients_come_back():
    (stack,) = stacks((5, 3, 3))
    parts = apart(stack)
    assert all(part.data_ptr() % 16 == 0 for part in parts)
    back = joined([part * 2 for part in parts])
    (gradient,) = torch.autograd.grad((back * stack.detach()).sum(), [stack])
    assert torch.equal(back, 2 * stack) and torch.equal(gradient, 2 * stack)
    aligned = stacks((5, 4, 4))[0].detach()
    assert apart(aligned)[1].data_ptr() == aligned[1].data_ptr()


def test_a_function_is_tried_once_for_each_form_with_its_gradients():
    known, tried = {}, []
    a, b = stacks((4, 6, 8), (4, 8, 3))

    def doubled(x):
        """Gives each client's values, and within vmap other gradients."""
        return x * 2 if stacks_module.stack_of(x) is None else x.detach() * 2 + 0 * x

    def run(function, *operands, num=4):
        return vmap(
            lambda *own: tried.append(stacks_module.together_is_equal(known, function, own, {}, num)) or own[0]
        )(*operands)

    def odd(x):
        return None

    for _ in range(2):
        run(torch.matmul, a, b)
        run(torch.sum, a)
        run(doubled, a)
        run(odd, a)
    # what a library gives for the first two is its own affair
    assert tried[:4] == tried[4:] and tried[2:4] == [False, False] and len(known) == 4
    run(torch.sum, a.detach())
    assert len(known) == 5  # without a gradient it is another form
    shared = torch.ones(8, requires_grad=True)
    vmap(lambda own: tried.append(stacks_module.together_is_equal(known, torch.matmul, (own, shared), {}, 4)) or own)(a)
    assert tried[-1] is False and shared.grad is None


def test_sums_losses_and_products_are_those_of_each_client():
    x, y = stacks((5, 6, 8), (5, 6, 8))
    for function in (
        lambda x, y: (x @ y.mT).mean(1),
        lambda x, y: (x - y).square().sum() / y.std(),
        F.mse_loss,
        lambda x, y: F.layer_norm(x, (8,)) * y.norm(dim=-1, keepdim=True),
        lambda x, y: torch.einsum("ij,ij->i", x, y).logsumexp(0),
    ):
        compared(function, [x, y], 5)


@pytest.mark.parametrize("num", [1, 3, 50, 64])
@pytest.mark.parametrize("n", [1, 2, 10, 16, 17, 33, 100, 257, 300])
def test_cross_entropies_of_all_clients_are_added_as_each_ones_alone(num, n):
    logits = torch.randn(num, n, 7, generator=torch.Generator().manual_seed(n)) * 3
    labels = torch.randint(0, 7, (num, n), generator=torch.Generator().manual_seed(num))
    known = {}
    run = lambda x, y: _in_mode(F.cross_entropy, (x, y), num, known)  # noqa: E731
    together = vmap(run)(logits, labels)
    alone = [F.cross_entropy(*own) for own in zip(logits, labels, strict=True)]
    assert torch.equal(together, torch.stack(alone))
    # 2 to 257 samples of several clients are added at once: another order of `nll_loss` in a new torch would show here
    assert list(known.values()) == [n <= 257] or num == 1


def test_a_loss_of_nothing_has_no_sign():
    """`F.nll_loss` subtracts from 0, so that certain predictions have the loss 0.0, whatever their sign."""
    for logs in (torch.zeros(3, 5), -torch.zeros(3, 5), torch.zeros(3, 1), -torch.zeros(3, 1)):
        assert not mode._losses_together(logs).signbit().any()


@pytest.mark.parametrize("width", [4, 5], ids=["aligned", "copied to be aligned"])
@pytest.mark.parametrize("norm", [F.batch_norm, F.instance_norm])
def test_running_statistics_are_kept_wherever_they_lie(norm, width):
    """Five values are 20 bytes: on a GPU, where tensors lie without gaps, every second client begins off a multiple of 16."""
    (x,), (mean, variance) = stacks((3, 8, width, 2)), (torch.zeros(3, width), torch.ones(3, width))
    alone = [(mean[0].clone(), variance[0].clone()) for _ in range(3)]
    train = {"training" if norm is F.batch_norm else "use_input_stats": True}
    vmap(lambda *own: _in_mode(lambda *given: norm(*given, **train), own, 3))(x, mean, variance)
    for client, (own_mean, own_variance) in enumerate(alone):
        norm(x[client], own_mean, own_variance, **train)
        assert torch.equal(own_mean, mean[client]) and torch.equal(own_variance, variance[client])
        assert not torch.equal(own_mean, torch.zeros(width))
