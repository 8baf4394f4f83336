from __future__ import annotations

import threading

import torch

from raafl.rng import RngStream, seed_everything
from tests.helpers.emulated_cuda import Emulated


def test_streams_of_draws_do_not_disturb_each_other():
    draws = [RngStream(torch.device("cpu"), seed) for seed in range(4)]
    found: list[list[float]] = [[] for _ in draws]

    def draw(place: int) -> None:
        for _ in range(200):
            with draws[place]:
                found[place].append(torch.rand(1).item())

    torch.manual_seed(77)
    threads = [threading.Thread(target=draw, args=(place,)) for place in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    for place in range(4):
        torch.manual_seed(place)
        assert found[place] == [torch.rand(1).item() for _ in range(200)]


def test_a_stream_steps_aside_and_goes_on_where_it_was():
    torch.manual_seed(3)
    wanted = torch.rand(2).tolist()
    draws = RngStream(torch.device("cpu"), 3)
    torch.manual_seed(8)
    other = torch.rand(2).tolist()
    torch.manual_seed(8)
    with draws.suspended():  # it is not in use
        found = [torch.rand(1).item()]
    with draws:
        own = [torch.rand(1).item()]
        with draws.suspended():
            found.append(torch.rand(1).item())
        own.append(torch.rand(1).item())
    assert (own, found) == (wanted, other)


def test_on_an_emulated_gpu_the_tasks_own_is_seeded_and_no_other(emulated_cuda: Emulated):
    gpu, other = torch.device("cuda:1"), torch.cuda.get_rng_state(0).tolist()
    seed_everything(5, gpu)
    wanted = torch.rand(3, generator=torch.Generator().manual_seed(5)).tolist()
    assert torch.rand(3, device=gpu).tolist() == wanted == torch.rand(3).tolist()
    assert torch.cuda.get_rng_state(0).tolist() == other and torch.cuda.current_device() == 0
    before = torch.cuda.get_rng_state(1).tolist()
    with RngStream(gpu, 5):
        assert torch.rand(3, device=gpu).tolist() == wanted
    assert torch.cuda.get_rng_state(1).tolist() == before
