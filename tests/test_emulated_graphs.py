"""The emulated graphs do what CUDA's do: a capture leaves no trace, a replay repeats it, and what CUDA refuses is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.helpers.emulated_cuda import Emulated

GPU = torch.device("cuda", 0)


def captured(function, **more):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local", **more):
        answer = function()
    return graph, answer


def test_a_capture_leaves_no_trace_and_a_replay_computes_from_what_lies_there(emulated_cuda: Emulated):
    x, total = torch.ones(3, device=GPU), torch.zeros(3, device=GPU)

    def add():
        doubled = x * 2
        total.add_(doubled)
        return doubled

    graph, doubled = captured(add)
    assert total.tolist() == [0, 0, 0] and doubled.isnan().all()
    graph.replay()
    assert doubled.tolist() == [2, 2, 2]
    x.fill_(5.0)
    graph.replay()
    assert total.tolist() == [12, 12, 12]
    total = torch.zeros(3, device=GPU)  # bound anew: the graph goes on with the memory it knows, which is nobody's now
    with pytest.raises(RuntimeError, match="freed"):
        graph.replay()


def test_a_python_number_is_frozen_and_a_tensor_is_not(emulated_cuda: Emulated):
    rate, tensor, x = 0.5, torch.full((), 0.5, device=GPU), torch.ones(1, device=GPU)
    graph, (of_number, of_tensor) = captured(lambda: (x * rate, x * tensor))
    rate = 0.25
    tensor.fill_(0.25)
    graph.replay()
    assert (of_number.item(), of_tensor.item()) == (0.5, 0.25)


def test_random_numbers_are_those_of_the_seed_before_a_replay(emulated_cuda: Emulated):
    torch.cuda.manual_seed(4)
    graph, drawn = captured(lambda: torch.rand(4, device=GPU))
    expected = torch.rand(4, device=GPU).tolist()  # a capture draws none
    torch.cuda.manual_seed(4)
    graph.replay()
    assert drawn.tolist() == expected
    graph.replay()
    assert drawn.tolist() != expected


def test_a_replay_of_another_graph_of_the_pool_spoils_what_lies_there(emulated_cuda: Emulated):
    pool, x = torch.cuda.graph_pool_handle(), torch.ones(2, device=GPU)
    (one, of_one), (other, _) = (captured(lambda: x + 1, pool=pool) for _ in range(2))
    one.replay()
    assert of_one.tolist() == [2, 2]
    other.replay()
    assert of_one.isnan().all()


REFUSED = {
    "a number read": lambda x: x.sum().item(),
    "a branch": lambda x: 1 if (x > 0).all() else 2,
    "a size": lambda x: x.nonzero(),
    "a mask": lambda x: x[x > 0],
    "a copy to the host": lambda x: x.cpu(),
    "a copy from the host": lambda x: torch.ones(2).to(GPU),
    "a copy from the host that blocks nobody": lambda x: x.copy_(torch.ones(2), non_blocking=True),
    "a wait": lambda x: torch.cuda.synchronize(),
    "a seed": lambda x: torch.cuda.manual_seed(3),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cuda_refuses_in_a_capture_is_refused(emulated_cuda: Emulated, name):
    x = torch.ones(2, device=GPU)
    with pytest.raises(RuntimeError, match=r"not permitted|capturing"):
        captured(lambda: REFUSED[name](x))
    assert (x + 1).tolist() == [2, 2]  # nothing is captured any more


def test_waits_are_errors_in_that_mode(emulated_cuda: Emulated):
    x = torch.ones(2, device=GPU)
    torch.cuda.set_sync_debug_mode("error")
    with pytest.raises(RuntimeError, match="synchronizing"):
        x.sum().item()
    torch.cuda.set_sync_debug_mode("default")
    assert x.sum().item() == 2


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.1, fused=True),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1, fused=True),
        lambda p: torch.optim.AdamW(p, lr=0.1, fused=True, capturable=True),
        lambda p: torch.optim.RMSprop(p, lr=0.1, capturable=True),
    ],
)
def test_a_whole_step_repeats_an_eager_one_to_the_bit(emulated_cuda: Emulated, make):
    def losses(replays: bool) -> list[float]:
        torch.manual_seed(1)
        torch.cuda.manual_seed(1)
        model = nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.5), nn.ReLU(), nn.Linear(5, 2)).to(GPU)
        x, found = torch.zeros(3, 4, device=GPU), []
        optimizer = make(model.parameters())

        def step():
            loss = model(x).square().sum()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        graph = None
        for number in range(6):
            x.copy_(torch.full((3, 4), float(number)))
            if not replays or number < 2:
                found.append(step().item())
                continue
            if graph is None:
                graph, loss = captured(step)
            graph.replay()
            found.append(loss.item())
        return found

    assert losses(True) == losses(False)
