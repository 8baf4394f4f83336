import logging
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raafl.data.partition import ByColumn, ClassesPerClient, Dirichlet, Iid, Partition, QuantitySkew
from raafl.errors import BadInput

LABELS = np.repeat(np.arange(10), 100)


def distances_from_global(parts, labels):
    """Per client: half the L1 distance between its label shares and those of all data, 0 (same) to 1 (disjoint)."""
    values = np.unique(labels)
    overall = np.array([np.mean(labels == v) for v in values])
    return [0.5 * sum(abs(np.mean(labels[p] == v) - o) for v, o in zip(values, overall, strict=True)) for p in parts]


@settings(deadline=None)
@given(
    partition=st.one_of(
        st.just(Iid()),
        st.builds(Dirichlet, st.sampled_from([1e-9, 1e-3, 0.1, 1.0, 1e6]), st.integers(1, 4)),
        st.builds(QuantitySkew, st.sampled_from([1e-9, 0.1, 1.0, 1e6]), st.integers(1, 4)),
    ),
    labels=st.lists(st.integers(-3, 3), min_size=40, max_size=80),
    num_clients=st.integers(1, 10),
    seed=st.integers(0, 2**31),
)
def test_parts_cover_the_data_exactly_once(partition, labels, num_clients, seed):
    parts = partition.split(labels, num_clients, seed)
    assert len(parts) == num_clients
    assert sorted(torch.cat(parts).tolist()) == list(range(len(labels)))
    assert all(part.dtype == torch.int64 and part.tolist() == sorted(part.tolist()) for part in parts)
    assert min(map(len, parts)) >= getattr(partition, "min_samples", 1)
    again = partition.split(torch.tensor(labels), num_clients, seed)
    assert all(torch.equal(a, b) for a, b in zip(parts, again, strict=True))


@pytest.mark.parametrize("partition", [Iid(), Dirichlet(0.5), QuantitySkew(1.0), ClassesPerClient(3)])
def test_another_seed_gives_other_parts(partition):
    first, second = (partition.split(LABELS, 5, seed) for seed in (0, 1))
    assert not all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_another_process_gives_the_same_parts():
    partitions = [Iid(), Dirichlet(0.5), QuantitySkew(1.0), ClassesPerClient(3)]
    code = (
        "import numpy as np; from raafl.data.partition import *\n"
        f"for partition in {partitions!r}:\n"
        "    for part in partition.split(np.repeat(np.arange(10), 100), 5, 11): print(*part.tolist())"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout
    theirs = [[int(i) for i in line.split()] for line in out.splitlines()]
    assert theirs == [part.tolist() for one in partitions for part in one.split(LABELS, 5, 11)]


def test_iid_sizes_differ_by_one():
    assert sorted(map(len, Iid().split(np.zeros(103, int), 10, 0))) == [10] * 7 + [11] * 3


@pytest.mark.parametrize("alpha", [1e6, 1e308])
def test_large_alpha_approaches_iid(alpha):
    assert [len(part) for part in QuantitySkew(alpha).split(LABELS, 10, 0)] == [pytest.approx(100, abs=2)] * 10
    parts = Dirichlet(alpha).split(LABELS, 10, 0)
    # 100 samples of each class cut in 10: a cut lies at most one sample away from even
    counts = np.array([np.bincount(LABELS[p], minlength=10) for p in parts])
    assert np.abs(counts - 10).max() <= 2
    assert max(distances_from_global(parts, LABELS)) < 0.05


def test_small_alpha_concentrates():
    labels = np.repeat(np.arange(10), 1000)
    means = [np.mean(distances_from_global(Dirichlet(a).split(labels, 10, 0), labels)) for a in (100.0, 1.0, 0.1, 0.01)]
    assert means == sorted(means)
    assert means[0] < 0.1 and means[-1] > 0.7


def test_dirichlet_shares_have_the_moments_of_the_dirichlet():
    """A class's share at a client has mean 1/N and variance (N-1) / (N^2 (N alpha + 1))."""
    num_clients, alpha, num_values = 4, 0.8, 400
    labels = np.repeat(np.arange(num_values), 200)
    parts = Dirichlet(alpha).split(labels, num_clients, 0)
    shares = np.array([np.bincount(labels[p], minlength=num_values) for p in parts]) / 200
    variance = (num_clients - 1) / (num_clients**2 * (num_clients * alpha + 1))
    assert np.allclose(shares.mean(axis=1), 1 / num_clients, atol=4 * np.sqrt(variance / num_values) + 1 / 200)
    assert np.allclose(shares.var(axis=1), variance, rtol=0.25)


def test_capped_dirichlet_gives_no_further_class_to_a_client_with_its_equal_share():
    """Classes come in ascending order: without the last class that a client got, it was below the equal share."""
    parts = Dirichlet(0.3, capped=True).split(LABELS, 5, 0)
    assert sum(map(len, parts)) == 1000
    for part in parts:
        labels = LABELS[part]
        assert np.sum(labels < labels.max()) < 1000 / 5
    uncapped = Dirichlet(0.3).split(LABELS, 5, 0)
    assert max(map(len, parts)) < max(map(len, uncapped))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("alpha", [1e-3, 1e-9])
def test_capped_dirichlet_of_a_tiny_alpha_goes_on_among_those_with_room(alpha):
    """Where all of a class goes to a client without room, those with room get equal shares of it."""
    for seed in range(10):
        sizes = [len(part) for part in Dirichlet(alpha, capped=True).split(LABELS, 5, seed)]
        # a class goes to clients below 200 samples, so that nobody has more than 199 + 100
        assert sum(sizes) == 1000 and max(sizes) < 300


def test_dirichlet_is_repaired_and_says_so_when_no_draw_will_do(caplog):
    with caplog.at_level(logging.WARNING):
        parts = Dirichlet(1e-4, min_samples=7).split(LABELS, 50, 0)
    assert min(map(len, parts)) == 7 and sum(map(len, parts)) == 1000
    assert "alpha=0.0001" in caplog.text and "50 clients" in caplog.text


def test_dirichlet_is_not_repaired_when_a_draw_will_do(caplog):
    Dirichlet(10.0).split(LABELS, 5, 0)
    assert caplog.text == ""


@settings(deadline=None)
@given(num_classes=st.integers(1, 10), num_clients=st.integers(1, 30), seed=st.integers(0, 1000))
def test_classes_per_client_are_exact_and_balanced(num_classes, num_clients, seed):
    partition = ClassesPerClient(num_classes)
    if num_classes * num_clients < 10:
        with pytest.raises(BadInput, match="without a client"):
            partition.split(LABELS, num_clients, seed)
        return
    parts = partition.split(LABELS, num_clients, seed)
    assert sorted(torch.cat(parts).tolist()) == list(range(1000))
    held = [set(LABELS[p].tolist()) for p in parts]
    assert all(len(classes) == num_classes for classes in held)
    owners = [sum(value in classes for classes in held) for value in range(10)]
    assert max(owners) - min(owners) <= 1
    for value in range(10):
        shares = [int((LABELS[p] == value).sum()) for p, classes in zip(parts, held, strict=True) if value in classes]
        assert max(shares) - min(shares) <= 1


def test_classes_drawn_as_in_the_published_code():
    """By a slow loop with the same generator: client n has class n, then one that it draws; a class is cut by its clients."""
    parts = ClassesPerClient(2, even=False).split(LABELS, 10, 42)
    rng = np.random.default_rng(42)
    owners = {value: [] for value in range(10)}
    for client in range(10):
        other = client
        while other == client:
            other = int(rng.choice(10, 1)[0])
        owners[client].append(client)
        owners[other].append(client)
    for value, clients in owners.items():
        clients = sorted(clients)
        rows = rng.permutation(np.flatnonzero(value == LABELS))
        for client, mine in zip(clients, np.array_split(rows, len(clients)), strict=True):
            assert set(parts[client].tolist()) & set(rows.tolist()) == set(mine.tolist())
    assert max(map(len, owners.values())) > min(map(len, owners.values()))


def test_classes_per_client_errors_name_the_numbers():
    with pytest.raises(
        BadInput, match="leave some of the 10 classes without a client: set even to true, or use more clients"
    ):
        ClassesPerClient(3, even=False).split(LABELS, 9, 0)
    with pytest.raises(BadInput, match="num_classes is 11: give 10 or fewer"):
        ClassesPerClient(11).split(LABELS, 5, 0)
    with pytest.raises(BadInput, match=r"class 0 has 2 samples for its 4 clients"):
        ClassesPerClient(2).split([0, 0, 1, 1, 1, 1, 1], 4, 0)


def test_quantity_skew_keeps_labels_even_and_sizes_uneven():
    labels = np.tile(np.arange(2), 5000)
    parts = QuantitySkew(0.5).split(labels, 5, 1)
    sizes = sorted(map(len, parts))
    assert sizes[-1] > 2 * sizes[0]
    for part in parts:
        assert abs(labels[part].mean() - 0.5) < 4 * 0.5 / np.sqrt(len(part))
    even = QuantitySkew(1e9).split(labels, 5, 1)
    assert all(abs(len(part) - 2000) <= 1 for part in even)


def test_by_column_gives_each_value_its_client_in_sorted_order():
    column = ["bob", "amy", "bob", "cat", "amy", "amy"]
    parts = ByColumn("who").split(np.zeros(6, int), 3, 0, {"who": column})
    assert [p.tolist() for p in parts] == [[1, 4, 5], [0, 2], [3]]


@given(
    values=st.lists(st.integers(0, 12), min_size=30, max_size=60),
    num_clients=st.integers(1, 5),
    seed=st.integers(0, 99),
)
def test_by_column_never_parts_a_value(values, num_clients, seed):
    if len(set(values)) < num_clients:
        return
    parts = ByColumn("who").split(np.zeros(len(values), int), num_clients, seed, {"who": values})
    assert sorted(torch.cat(parts).tolist()) == list(range(len(values)))
    held = [{values[i] for i in part.tolist()} for part in parts]
    assert sum(map(len, held)) == len(set(values))
    assert max(map(len, held)) - min(map(len, held)) <= 1


def test_by_column_errors():
    with pytest.raises(BadInput, match="column is 'who', but the training data has columns x, y: name one"):
        ByColumn("who").split([0, 0], 1, 0, {"x": [1, 2], "y": [1, 2]})
    with pytest.raises(BadInput, match="2 different values for 3 clients"):
        ByColumn("who").split([0, 0, 0], 3, 0, {"who": [1, 2, 2]})
    with pytest.raises(BadInput, match="2 entries for 3 samples"):
        ByColumn("who").split([0, 0, 0], 1, 0, {"who": [1, 2]})
    with pytest.raises(
        BadInput, match="has no columns: give it an attribute 'who' with a value for each sample, or use Iid"
    ):
        ByColumn("who").split([0, 0], 1, 0)


NAN = float("nan")


@pytest.mark.parametrize(
    ("column", "named"),
    [
        (["a", None, "b"], "the NoneType of sample 1"),
        ([[1], [2], [1]], "the list of sample 0"),
        ([[1], [1, 2], [1]], "the list of sample 0"),
        ([{"a": 1}, {"a": 2}, {"a": 1}], "the dict of sample 0"),
        (["3", 3, "4"], "texts among numbers"),
        (["a", 1.5, NAN], "texts among numbers"),
    ],
)
def test_a_column_whose_entries_cannot_be_sorted_is_refused(column, named):
    with pytest.raises(
        BadInput, match=f"'who' has entries that cannot be sorted, such as {named}: give each sample a text"
    ):
        ByColumn("who").split([0, 0, 0], 1, 0, {"who": column})


@pytest.mark.parametrize(
    "column",
    [
        [0.0, NAN, NAN, 1.0],
        ["a", NAN, NAN, "b"],
        np.array([0.0, NAN, NAN, 1.0], np.float32),
        np.array([0.0, NAN, NAN, 1.0], object),
        np.array([0j, complex(0, NAN), complex(NAN, 0), 1j]),
        np.array(["2020-01-01", "NaT", "NaT", "2021-01-01"], "M8[D]"),
        torch.tensor([0.0, NAN, NAN, 1.0]),
    ],
    ids=["floats", "texts", "float32", "objects", "complex", "dates", "tensor"],
)
@pytest.mark.parametrize("num_clients", [1, 3, 4])
def test_a_column_with_nan_is_refused(column, num_clients):
    """NaN was one owner in an array of numbers, the text nan in a list of texts, and several owners in an array of objects."""
    said = r"'who' has no value for 2 samples, such as sample 1 \(NaN\): give each sample"
    with pytest.raises(BadInput, match=said):
        ByColumn("who").split([0] * 4, num_clients, 0, {"who": column})


def test_nan_as_a_text_is_an_owner_as_any_other():
    for column in (["a", "nan", "nan", "b"], np.array(["a", "nan", "nan", "b"])):
        parts = ByColumn("who").split([0] * 4, 3, 0, {"who": column})
        assert [part.tolist() for part in parts] == [[0], [3], [1, 2]]


def test_more_clients_than_data_names_both():
    with pytest.raises(BadInput, match=r"11 clients need 1 sample.s. each, and there are 10"):
        Iid().split(np.zeros(10, int), 11, 0)
    with pytest.raises(BadInput, match=r"4 clients need 3 sample.s. each, and there are 10: use at most 3 clients"):
        Dirichlet(1.0, min_samples=3).split(np.zeros(10, int), 4, 0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Dirichlet(0.0), "Dirichlet: alpha is 0.0"),
        (lambda: Dirichlet(float("nan")), "alpha is nan"),
        (lambda: Dirichlet(1.0, min_samples=0), "min_samples is 0"),
        (lambda: QuantitySkew(-1.0), "QuantitySkew: alpha is -1.0"),
        (lambda: ClassesPerClient(0), "num_classes is 0"),
        (lambda: Iid().split([0, 1], 0, 0), "num_clients is 0"),
        (lambda: Iid().split([0, 1], 1, -1), "seed is -1"),
        (lambda: Iid().split([[0, 1]], 1, 0), r"shape \(1, 2\)"),
        (lambda: Dirichlet(1.0).split([0.5, 1.5], 1, 0), "float64"),
    ],
)
def test_bad_input_names_field_and_value(make, message):
    with pytest.raises(BadInput, match=message):
        make()


def test_partitions_parse_by_class_name():
    from jsonargparse import ArgumentParser

    from raafl.data.partition import Partition

    parser = ArgumentParser()
    parser.add_argument("--partition", type=Partition)
    parsed = parser.parse_args(["--partition", "Dirichlet", "--partition.alpha", "0.3"])
    init = getattr(parser, "instantiate", None) or parser.instantiate_classes
    assert init(parsed).partition == Dirichlet(0.3)


class Own(Partition):
    """A partition of a user's own: gives what it is told to."""

    def __init__(self, parts):
        super().__init__()
        object.__setattr__(self, "parts", parts)

    def assign(self, labels, num_clients, rng, columns):
        return self.parts


def test_a_partition_of_ones_own_gives_numbers_of_samples_of_any_kind():
    parts = Own([[5, 2], torch.tensor([1]), np.array([9, 0, 3], np.int32)]).split(LABELS, 3, 0)
    assert [part.tolist() for part in parts] == [[2, 5], [1], [0, 3, 9]]
    assert all(part.dtype == torch.int64 for part in parts)


def test_a_partition_of_ones_own_that_fails_is_named():
    class Fails(Own):
        def assign(self, labels, num_clients, rng, columns):
            raise RuntimeError("no file of owners")

    with pytest.raises(BadInput, match=r"^Fails.assign fails: RuntimeError: no file of owners"):
        Fails(None).split(LABELS, 3, 0)


def test_samples_that_are_given_out_twice_are_warned_of(caplog):
    """Shared rows, and draws with replacement, may be meant."""
    parts = Own([[0, 1, 1], [2, 0], [3]]).split(LABELS, 3, 0)
    assert [part.tolist() for part in parts] == [[0, 1, 1], [0, 2], [3]]
    assert [record.getMessage() for record in caplog.records] == [
        "Own.assign gave out 2 samples more than once: each counts as often"
    ]


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([[0], [1]], "Own.assign returned 2 parts for 3 clients: return one for each"),
        (None, "Own.assign returned None for 3 clients: return one for each"),
        (3, "Own.assign returned 3 for 3 clients: return one for each"),
        (iter([[0], [1], [2]]), "Own.assign returned an object of list_iterator for 3 clients: return one for each"),
        ([[0], [], [1]], "Own.assign returned 0 samples of type float64 for client 2: return the indices of one or"),
        ([[0], [0.5], [1]], "returned 1 samples of type float64 for client 2"),
        ([[0], [-1, 3], [1]], "Own.assign returned samples -1 to 3 for client 2: return indices from 0 to 999"),
        ([[0], [1], [1000]], "returned samples 1000 to 1000 for client 3"),
    ],
)
def test_what_a_partition_of_ones_own_returns_is_checked(parts, message):
    with pytest.raises(BadInput) as refused:
        Own(parts).split(LABELS, 3, 0)
    assert message in str(refused.value)
