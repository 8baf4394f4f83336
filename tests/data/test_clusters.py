"""Points around cluster centres: how many of each, how far from their centre, and the same at each setup."""

from __future__ import annotations

import pytest
import torch

from raafl.data import GaussianClusters
from tests.helpers.refusals import refuses


def drawn(**options):
    data = GaussianClusters(
        num_features=64, num_classes=3, clusters=2, num_train=6000, num_test=600, noise=0.5, **options
    )
    data.setup()
    return data


def test_each_cluster_has_as_many_points_around_a_centre_of_length_one():
    points, labels = drawn().train.tensors
    assert points.shape == (6000, 64) and torch.bincount(labels).tolist() == [2000] * 3
    for first in range(6):  # the clusters in turn, two of each class
        own = points[first::6]
        assert labels[first::6].unique().tolist() == [first // 2]
        # 1,000 points: the mean of a coordinate is off by 0.5 / sqrt(1000) = 0.016, that of 64 by 0.13 in length
        assert own.mean(dim=0).norm().item() == pytest.approx(1.0, abs=0.1)
        assert own.std(dim=0).mean().item() == pytest.approx(0.5, abs=0.01)


def test_test_points_are_others_of_the_same_clusters_and_the_seed_decides_all():
    data, again, other = drawn(), drawn(), drawn(seed=1)
    assert torch.equal(data.test.tensors[0], again.test.tensors[0])
    assert not torch.equal(data.test.tensors[0], other.test.tensors[0])
    centre, of_test = data.train.tensors[0][::6].mean(dim=0), data.test.tensors[0][::6].mean(dim=0)
    assert torch.cosine_similarity(centre, of_test, dim=0) > 0.85


test_what_cannot_be_shared_equally_is_refused = refuses(
    GaussianClusters,
    ({"num_train": 100}, "num_train is 100: give a multiple of 32"),
    ({"clusters": 0}, "clusters is 0"),
)
