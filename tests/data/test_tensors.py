import pytest
import torch
from torch.utils.data import DataLoader, Subset, TensorDataset, default_collate

from raafl.data.loaders import fetcher, unwrap
from raafl.data.sources import TensorImages
from raafl.errors import BadInput


def images(n=9, channels=3):
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (n, channels, 4, 5), dtype=torch.uint8, generator=generator)
    return TensorImages(pixels, torch.arange(n) % 3, [0.2, 0.5, 0.7][:channels], [0.1, 0.2, 0.3][:channels])


def test_images_are_normalised_per_channel():
    pixels = torch.tensor([[[[255]], [[51]]]], dtype=torch.uint8)
    x, y = TensorImages(pixels, torch.tensor([4]), mean=[0.5, 0.2], std=[0.25, 0.1]).gather(torch.tensor([0]))
    assert torch.allclose(x.flatten(), torch.tensor([2.0, 0.0]), atol=1e-6)
    assert x.shape == (1, 2, 1, 1) and y.tolist() == [4] and y.dtype == torch.int64


def test_gathering_equals_collating_single_samples_bit_for_bit():
    data = images()
    rows = [3, 0, 8, 3]
    expected = default_collate([data[i] for i in rows])
    assert all(torch.equal(a, b) for a, b in zip(data.gather(torch.tensor(rows)), expected, strict=True))


def test_a_loader_reads_images_like_any_data_set():
    data = images(n=5)
    batches = list(DataLoader(data, batch_size=2))
    assert [len(y) for _, y in batches] == [2, 2, 1]
    assert torch.equal(torch.cat([x for x, _ in batches]), data.gather(torch.arange(5))[0])
    assert torch.equal(data[-1][0], data[4][0])
    with pytest.raises(IndexError):
        data[5]


@pytest.mark.parametrize(
    ("pixels", "labels", "mean", "message"),
    [
        (torch.zeros(2, 1, 4, 4), torch.zeros(2), [0.5], "float32"),
        (torch.zeros(2, 4, 4, dtype=torch.uint8), torch.zeros(2), [0.5], r"\(2, 4, 4\)"),
        (torch.zeros(2, 1, 4, 4, dtype=torch.uint8), torch.zeros(3), [0.5], "3 labels"),
        (torch.zeros(2, 3, 4, 4, dtype=torch.uint8), torch.zeros(2), [0.5], "3 channels"),
    ],
)
def test_ill_fitting_images_are_refused(pixels, labels, mean, message):
    with pytest.raises(BadInput, match=message):
        TensorImages(pixels, labels, mean, mean)


def test_nested_subsets_unwrap_to_rows_of_the_base():
    base = TensorDataset(torch.arange(10))
    inner = Subset(base, [9, 7, 5, 3, 1])
    found, rows = unwrap(Subset(inner, [0, 2, 4]))
    assert found is base and rows.tolist() == [9, 5, 1]
    assert unwrap(base) == (base, None)


class Doubled(TensorDataset):
    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return 2 * x, y


class Shifted(Subset):
    def __getitem__(self, index):
        x, y = self.dataset[self.indices[index]]
        return x + 1, y

    def __getitems__(self, indices):
        return [self[i] for i in indices]


BASE = TensorDataset(torch.arange(12.0).reshape(6, 2), torch.arange(6))


@pytest.mark.parametrize(
    ("dataset", "fast"),
    [
        (BASE, True),
        (Subset(BASE, [5, 3, 1, 0]), True),
        (Subset(Subset(BASE, [5, 3, 1, 0, 2]), [4, 0, 2, 3]), True),
        (images(), True),
        (Subset(images(), [8, 1, 2, 3]), True),
        (Doubled(*BASE.tensors), False),
        (Shifted(BASE, range(6)), False),
        ([(torch.tensor([i, 2.0]), i) for i in range(5)], False),
    ],
)
def test_fetching_rows_equals_a_data_loader(dataset, fast):
    """The reference is torch's own loader with the same rows, in the same order."""
    fetch, is_fast = fetcher(dataset, default_collate)
    assert is_fast is fast
    rows = [2, 0, 3]
    (expected,) = DataLoader(dataset, batch_sampler=[rows])
    found = fetch(torch.tensor(rows))
    assert type(found) is type(expected)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_a_collate_function_of_ones_own_is_used():
    fetch, is_fast = fetcher(BASE, lambda samples: sum(int(y) for _, y in samples))
    assert not is_fast and fetch(torch.tensor([1, 2, 5])) == 8
