"""Draw labelled points from a mixture of Gaussians for each class: a task of any size without a download."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch.utils.data import TensorDataset

from raafl.data.sources import TrainTestData
from raafl.errors import BadInput, at_least


class GaussianClusters(TrainTestData):
    """Random points `(num_features,)` for classification: several Gaussian clusters for each class, all of equal size.

    By default this is the task of the public toy example of Liu et al. 2024, "Asynchronous Local-SGD Training for
    Language Modeling": 32 centres on the unit sphere in 512 dimensions, 8 for each of 4 classes, with normal noise on
    each coordinate. That example evaluates on some of its training points; here the test points are drawn separately.

    Args:
        batch_size: number of points in a batch.
        num_features: number of dimensions of a point.
        num_classes: number of classes of the points.
        clusters: number of clusters of each class.
        noise: standard deviation of each coordinate around its centre.
        num_train: number of training points; must be a multiple of the number of clusters.
        num_test: number of test points; must be a multiple of the number of clusters.
        seed: seed of the centres and of the points.

    Raises:
        BadInput: a number is below 1, or not a multiple of the number of clusters.
    """

    num_classes: ClassVar[int]

    def __init__(
        self,
        batch_size: int = 32,
        num_features: int = 512,
        num_classes: int = 4,
        clusters: int = 8,
        noise: float = 0.5,
        num_train: int = 128_000,
        num_test: int = 9_600,
        seed: int = 0,
    ) -> None:
        sizes = {"num_features": num_features, "num_classes": num_classes, "clusters": clusters}
        for name, number in sizes.items():
            at_least(f"GaussianClusters: {name}", number, 1)
        at_least("GaussianClusters: noise", noise, 0)
        super().__init__(batch_size, num_train, num_test)
        num = num_classes * clusters
        for name, number in (("num_train", num_train), ("num_test", num_test)):
            if number % num:
                raise BadInput(
                    f"GaussianClusters: {name} is {number}: give a multiple of {num}, so that all clusters have the "
                    "same size"
                )
        self.num_classes, self.num_features, self.clusters = num_classes, num_features, clusters  # type: ignore[misc]
        self.noise, self.seed = noise, seed

    def setup(self, stage: str | None = None) -> None:
        """Draw the points of the training set and of the test set."""
        if hasattr(self, "train"):
            return
        draws = torch.Generator().manual_seed(self.seed)
        centres = torch.randn(self.num_classes * self.clusters, self.num_features, generator=draws)
        centres /= centres.norm(dim=1, keepdim=True)
        labels = torch.arange(self.num_classes).repeat_interleave(self.clusters)
        sets = []
        for number in (self.num_train, self.num_test):
            assert number is not None
            # samples are assigned to the clusters in equal numbers
            of = torch.arange(len(centres)).repeat(number // len(centres))
            points = torch.randn(number, self.num_features, generator=draws).mul_(self.noise).add_(centres[of])
            sets.append(TensorDataset(points, labels[of]))
        self.train, self.test = sets
