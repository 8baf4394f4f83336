"""Batches on an emulated GPU: which data lie there, what each task sends, and that nothing but the way has changed."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import Subset, default_collate

from raafl.data.federated import ClientData
from raafl.data.loaders import GatherDataset
from raafl.data.sources import TensorImages
from raafl.data.tokens import TensorTokens, TensorWindows
from raafl.local.device_data import Feed
from tests.helpers.emulated_cuda import Emulated
from tests.local.bench import Bench, Net, assignment, samples

ROWS = torch.tensor([3, 1, 8, 2, 21, 5, 13])


class Jittered(TensorImages):
    """Draws at each access."""

    def gather(self, indices):
        images, labels = super().gather(indices)
        return images + torch.rand(()), labels


class Own(GatherDataset):
    def __init__(self):
        self.labels = torch.arange(22)

    def __len__(self):
        return 22

    def gather(self, indices):
        return (self.labels.index_select(0, indices),)


def images(kind=TensorImages):
    generator = torch.Generator().manual_seed(1)
    pixels = torch.randint(0, 256, (22, 3, 4, 4), dtype=torch.uint8, generator=generator)
    return kind(pixels, torch.arange(22), (0.3, 0.4, 0.5), (0.2, 0.3, 0.4))


def tokens():
    return TensorTokens(torch.arange(22 * 6).view(22, 6), torch.arange(22) % 6 + 1, torch.arange(22))


def windows():
    return TensorWindows(torch.arange(22 * 6).view(22, 6), ["a", "b"] * 11)


def batches(data, feed=None, steps=4):
    """Draw a task's batches, on the CPU or as a feed brings them."""
    generator = torch.Generator().manual_seed(5)
    given = data.batches if feed is None else (lambda *draws: feed._batches(data, *draws))
    return [([x.cpu() for x in batch], num) for batch, num in given(generator, 3, None, steps)]


def same(one, other):
    return [num for _, num in one] == [num for _, num in other] and all(
        torch.equal(a, b) for (x, _), (y, _) in zip(one, other, strict=True) for a, b in zip(x, y, strict=True)
    )


@pytest.mark.parametrize("make", [samples, images, tokens, windows, lambda: Subset(samples(), list(range(21, -1, -1)))])
@pytest.mark.parametrize("more", [{}, {"shuffles": False}, {"weights": torch.rand(7)}, {"copied": True}])
def test_rows_that_lie_on_the_gpu_are_those_of_the_cpu_in_the_same_order(emulated_cuda: Emulated, make, more):
    data, feed = ClientData(make(), ROWS, **more), Feed(torch.device("cuda", 0), 0.25)
    assert same(batches(data, feed), batches(data))
    assert (feed.num_resident, feed.num_sent) == (1, 0) and feed.num_bytes > 0


REASONS = {
    "Jittered gathers samples in a way of its own": lambda: ClientData(images(Jittered), ROWS),
    "Own gathers samples in a way of its own": lambda: ClientData(Own(), ROWS),
    "samples are read one by one": lambda: ClientData(samples(), ROWS, collate=lambda given: default_collate(given)),
    "the data set has random generators": lambda: ClientData(samples(), ROWS, owned=(torch.Generator(),)),
    "takes 704 bytes, more than the 600 that": lambda: ClientData(samples(), ROWS),
}


@pytest.mark.parametrize("reason", REASONS)
def test_what_does_not_lie_there_is_sent_without_a_wait(emulated_cuda: Emulated, monkeypatch, reason):
    if "bytes" in reason:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (2400, 2400))
    data, feed = REASONS[reason](), Feed(torch.device("cuda", 0), 0.25)
    torch.manual_seed(7)
    expected = batches(data)
    torch.manual_seed(7)
    assert same(batches(data, feed), expected)
    told = feed.counted()
    assert (told["resident"], told["sent"], told["bytes"]) == (0, 1, 0) and reason in told["why_sent"][0]
    before = emulated_cuda.counts["waits"]
    for _ in feed._batches(data, torch.Generator().manual_seed(5), 3, None, 9):
        pass
    assert emulated_cuda.counts["waits"] == before


def test_a_task_sends_its_order_once_an_epoch_and_its_steps_nothing(emulated_cuda: Emulated):
    """Of 22 samples in batches of five: beside the received values, one copy of 22 numbers an epoch."""
    feed = Feed(torch.device("cuda", 0), 0.25)
    found = []
    for share in (0.25, 0.0):
        bench = Bench.of(Net, accelerator="cuda")
        bench.trainer.feed = feed if share else Feed(feed.device, share)
        for seed in (1, 2):
            before, num_bytes = emulated_cuda.counts["to device"], emulated_cuda.num_bytes["to device"]
            _, tensors = bench.run(assignment(seed=seed, epochs=2))
            copies = emulated_cuda.counts["to device"] - before
            sent = emulated_cuda.num_bytes["to device"] - num_bytes
            found.append((copies, sent, tensors.fingerprint()))
    values = 4 * (6 * 8 + 8 + 8 * 3 + 3)
    here, sent = found[1], found[3]
    assert here == (1 + 2, values + 2 * 22 * 8, sent[2])
    assert sent[:2] == (1 + 2 * 5 * 2, values + 2 * 22 * (6 * 4 + 8))
    assert found[0][:2] == (3 + 2, here[1] + 22 * (6 * 4 + 8))  # the first task brings the data set
    assert feed.counted() == {"resident": 2, "sent": 0, "bytes": 22 * (6 * 4 + 8), "why_sent": []}


def test_one_copy_serves_all_clients_and_goes_when_memory_runs_out(emulated_cuda: Emulated):
    dataset, feed = samples(), Feed(torch.device("cuda", 0), 0.25)
    clients = [ClientData(dataset, torch.arange(start, start + 5)) for start in (0, 5, 10)]
    for client in clients:
        batches(client, feed)
    assert feed.num_bytes == sum(x.nbytes for x in dataset.tensors)
    feed.release()
    assert same(batches(clients[0], feed), batches(clients[0])) and feed.num_bytes == 0
    assert feed.counted()["why_sent"] == ["memory ran out in a task"]


class Transferring(Net):
    def on_before_batch_transfer(self, batch, dataloader_idx):
        assert batch[0].device.type == "cpu"
        return batch


def test_hooks_of_the_module_see_batches_before_they_are_moved(emulated_cuda: Emulated):
    bench = Bench.of(Transferring, accelerator="cuda")
    bench.trainer.feed = feed = Feed(torch.device("cuda", 0), 0.25)
    bench.run(assignment(epochs=1))
    assert feed.counted()["resident"] == 0
