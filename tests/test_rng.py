from __future__ import annotations

import random
import threading
from functools import partial

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, Subset

from raafl.rng import RngStream, owned_generators, reseed, seed_everything
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


class Turned:
    def __init__(self, generator):
        self.generator = generator

    def __call__(self, x):
        return x


class Wrapped(Dataset):
    """A data set with generators in itself, in a list of transforms, in a closure and in a method's owner."""

    def __init__(self):
        hidden = random.Random(1)
        self.generator, self.samples = torch.Generator().manual_seed(3), [np.random.default_rng(9)] * 100
        self.transforms = [Turned(np.random.default_rng(1)), partial(Turned, np.random.RandomState(2))]
        self.target, self.crop = lambda y: y + hidden.random(), Turned(torch.Generator()).__call__
        self.shared = [random, np.random, torch.default_generator, np.random.mtrand._rand, random._inst]

    def __len__(self):
        return 4


def test_generators_that_a_data_set_owns_are_found_and_seeded_anew_by_the_process_s():
    found = owned_generators(Subset(Wrapped(), [0, 2]))
    kinds = [torch.Generator, np.random.Generator, np.random.RandomState, random.Random, torch.Generator]
    assert sorted(map(str, map(type, found))) == sorted(map(str, kinds))
    draws = []
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        reseed(found)
        draws.append([torch.rand(1, generator=g).item() if type(g) is torch.Generator else g.random() for g in found])
        assert len(set(draws[-1])) == 5
    assert draws[0] == draws[1] and not set(draws[0]) & set(draws[2])
    before = torch.default_generator.get_state()
    reseed([])
    assert torch.equal(before, torch.default_generator.get_state())  # a set without any costs no number


def test_a_stream_that_an_interrupt_left_in_use_blocks_no_other():
    """A signal's handler may raise before `__exit__` has begun, so that nothing gives the stream back."""
    cpu = torch.device("cpu")
    draws, another = RngStream(cpu, 1), RngStream(cpu, 2)
    draws.__enter__()  # and no exit
    found: list[list[float]] = []

    def draw() -> None:
        with another:
            found.append([torch.rand(1).item()])

    other = threading.Thread(target=draw, daemon=True)
    other.start()
    draw()
    other.join(timeout=30)
    torch.manual_seed(2)
    assert found == [[torch.rand(1).item()], [torch.rand(1).item()]]


def test_an_interrupt_while_a_stream_is_left_still_restores_the_global_state(monkeypatch):
    draws, other = RngStream(torch.device("cpu"), 1), RngStream(torch.device("cpu"), 2)
    torch.manual_seed(5)
    wanted = torch.rand(1).item()
    torch.manual_seed(5)

    def interrupted():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), draws:
        monkeypatch.setattr(draws, "_states", interrupted)
    assert torch.rand(1).item() == wanted
    thread = threading.Thread(target=other.__enter__, daemon=True)
    thread.start()
    thread.join(timeout=30)
    assert not thread.is_alive()
    RngStream._in_use = threading.RLock()  # the thread has ended within its stream
