"""Load image sets: scikit-learn's digits, MNIST, CIFAR-10, CIFAR-100, and any from the Hugging Face hub.

They are ordinary LightningDataModules. Images stay bytes, memory-mapped where possible, and become normalised float32 when a
batch (or a client's whole part) is gathered: the ranks of one machine share the bytes, and each holds as floats only its own.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from raafl.data import readers
from raafl.data.loaders import GatherDataset
from raafl.data.readers import load_splits, rows_of, whole_labels
from raafl.errors import BadInput, at_least, installing, one_line
from raafl.lean_import import import_lightning

import_lightning()
from lightning import LightningDataModule  # noqa: E402

DOWNLOAD_TIMEOUT_S = 20.0


class TensorImages(GatherDataset):
    """Labelled images that are stored as bytes and normalised when they are gathered.

    The bytes may be a memory-mapped file that all processes of a machine share; as float32, each process would need
    four times as much memory of its own.

    `images`: stored images, `(n, channels, height, width)` uint8.

    Raises:
        BadInput: shapes or types do not fit each other.
    """

    on_any_device = True

    def __init__(self, images: torch.Tensor, labels: torch.Tensor, mean: Sequence[float], std: Sequence[float]) -> None:
        if images.dtype != torch.uint8 or images.ndim != 4 or len(images) != len(labels):
            raise BadInput(
                f"images are {tuple(images.shape)} {images.dtype} with {len(labels)} labels: "
                "give uint8 images (n, channels, height, width) and one label each"
            )
        if not len(mean) == len(std) == images.shape[1]:
            raise BadInput(f"mean is {mean} and std {std}: give one number for each of the {images.shape[1]} channels")
        self.images = images
        self.labels = labels.to(torch.int64)
        self._mean_c11 = (torch.tensor(mean, dtype=torch.float64) * 255).to(torch.float32).reshape(-1, 1, 1)
        self._std_c11 = (torch.tensor(std, dtype=torch.float64) * 255).to(torch.float32).reshape(-1, 1, 1)

    def __len__(self) -> int:
        return len(self.labels)

    def gather(self, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the images at the given indices, normalised, `(n, channels, height, width)` float32, and labels `(n,)` int64."""
        pixels = self.images.index_select(0, indices).to(torch.float32)
        # subtract, then divide: both are rounded exactly, so one image alone gets the same bits as in a batch
        return pixels.sub_(self._mean_c11).div_(self._std_c11), self.labels.index_select(0, indices)


class TrainTestData(LightningDataModule):
    """Base class of data modules with a training set and a test set; the test set also serves for validation."""

    train: Dataset[Any]
    test: Dataset[Any]

    def __init__(self, batch_size: int, num_train: int | None = None, num_test: int | None = None) -> None:
        super().__init__()
        for name, number in (("batch_size", batch_size), ("num_train", num_train), ("num_test", num_test)):
            at_least(f"{type(self).__name__}: {name}", number, 1, optional=True)
        self.batch_size, self.num_train, self.num_test = batch_size, num_train, num_test

    def train_dataloader(self) -> DataLoader[Any]:
        """Return shuffled batches of the training set."""
        return DataLoader(self.train, self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        """Return batches of the test set, since there is no separate validation set."""
        return self.test_dataloader()

    def test_dataloader(self) -> DataLoader[Any]:
        """Return batches of the test set, in order."""
        return DataLoader(self.test, self.batch_size)

    def _set(self, train: Dataset[Any], test: Dataset[Any]) -> None:
        self.train, self.test = spread(train, self.num_train), spread(test, self.num_test)


def spread(dataset: Dataset[Any], number: int | None) -> Dataset[Any]:
    """Return at most ``number`` samples, evenly spaced, so that a set sorted by class keeps all classes.

    `number`: largest number of samples; None = all.
    """
    length = len(dataset)  # type: ignore[arg-type]
    if number is None or number >= length:
        return dataset
    return Subset(dataset, [i * length // number for i in range(number)])


def held_out(labels: npt.NDArray[np.int64], share: float, seed: int) -> npt.NDArray[np.bool_]:
    """Return a mask of the samples to hold out for tests: the share ``share`` of each class, at random."""
    rng = np.random.Generator(np.random.PCG64(seed))
    is_test = np.zeros(len(labels), np.bool_)
    for value in range(int(labels.max()) + 1):
        members = rng.permutation(np.flatnonzero(labels == value))
        is_test[members[: round(share * len(members))]] = True
    return is_test


class Digits(TrainTestData):
    """Data module of the digits in scikit-learn: 1,797 images `(1, 8, 8)` in [0, 1], 10 classes; nothing is downloaded.

    Args:
        batch_size: number of samples in a batch.
        test_share: share of each class that is held out for tests, between 0 and 1.
        seed: seed of the random split.
    """

    num_classes: ClassVar[int] = 10

    def __init__(self, batch_size: int = 32, test_share: float = 0.2, seed: int = 0) -> None:
        super().__init__(batch_size)
        if not 0 < test_share < 1:
            raise BadInput(f"Digits: test_share is {test_share}: give a share between 0 and 1, such as 0.2")
        self.test_share, self.seed = test_share, seed

    def setup(self, stage: str | None = None) -> None:
        """Read the digits and split them into a training set and a test set."""
        if hasattr(self, "train"):
            return
        images, labels = readers.read_digits()
        is_test = torch.from_numpy(held_out(labels.numpy(), self.test_share, self.seed))
        self.train = TensorDataset(images[~is_test], labels[~is_test])
        self.test = TensorDataset(images[is_test], labels[is_test])


class _FromFolder(TrainTestData):
    """Image set read from byte files in a folder; torchvision downloads missing files."""

    files: ClassVar[readers.Mnist | readers.Cifar]
    mean: ClassVar[tuple[float, ...]]
    std: ClassVar[tuple[float, ...]]

    def __init__(
        self,
        root: str | Path | None = None,
        batch_size: int = 64,
        download: bool = True,
        num_train: int | None = None,
        num_test: int | None = None,
        normalize: bool = True,
    ) -> None:
        """Store the arguments; nothing is read yet."""
        super().__init__(batch_size, num_train, num_test)
        self.root, self.download, self.normalize = readers.data_root(root), download, normalize

    def prepare_data(self) -> None:
        """Download missing files, if downloads are allowed.

        Raises:
            BadInput: the data is missing and cannot be downloaded; the message names the searched folders and the
                remedy.
        """
        if self.files.find(self.root) is None:
            self._fetch()

    def setup(self, stage: str | None = None) -> None:
        """Memory-map the files of the data set.

        Raises:
            BadInput: the data is missing.
        """
        if hasattr(self, "train"):
            return
        folder = self.files.find(self.root)
        if folder is None:
            raise self._missing()
        train, test = (self.files.read(folder, split) for split in ("train", "test"))
        scale = (self.mean, self.std) if self.normalize else ((0.0,) * len(self.mean), (1.0,) * len(self.std))
        self._set(TensorImages(train[0], train[1], *scale), TensorImages(test[0], test[1], *scale))

    def _fetch(self) -> None:
        if not self.download:
            raise self._missing("download is off")
        try:
            import torchvision.datasets

            self.root.mkdir(parents=True, exist_ok=True)
            with readers.locked(self.root / f".{type(self).__name__}.lock"):
                if self.files.find(self.root) is None:
                    _download(getattr(torchvision.datasets, type(self).__name__), self.root)
        except ImportError as error:
            raise self._missing(f"a download needs torchvision: {installing('vision')}") from error
        except (OSError, RuntimeError) as error:
            raise self._missing(f"the download failed: {one_line(str(error))}") from error

    def _missing(self, reason: str = "") -> BadInput:
        places = " or ".join(str(place) for place in self.files.places(self.root))
        why = f" ({reason})" if reason else ""
        return BadInput(
            f"{type(self).__name__} is not in {places}{why}: set root or the environment variable RAAFL_DATA to the "
            "folder that has it, or use download=True where there is a network"
        )


class MNIST(_FromFolder):
    """Data module of MNIST: 60,000 training and 10,000 test images, normalised, `(1, 28, 28)`, 10 classes.

    The files are in `torchvision/MNIST/raw` or `MNIST/raw` below `root`.
    """

    num_classes: ClassVar[int] = 10
    files = readers.Mnist()
    mean, std = (0.1307,), (0.3081,)


class CIFAR10(_FromFolder):
    """Data module of CIFAR-10: 50,000 training and 10,000 test images, normalised, `(3, 32, 32)`, 10 classes.

    Images take 184 MB and are decoded once per machine.
    """

    num_classes: ClassVar[int] = 10
    files = readers.CIFAR10
    mean, std = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


class CIFAR100(_FromFolder):
    """Data module of CIFAR-100: 50,000 training and 10,000 test images, normalised, `(3, 32, 32)`, 100 classes.

    Images take 184 MB and are decoded once per machine.
    """

    num_classes: ClassVar[int] = 100
    files = readers.CIFAR100
    mean, std = (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)


class HuggingFace(TrainTestData):
    """Data module of labelled images from the Hugging Face hub or a local folder, loaded by `datasets`.

    All images must have the same size. Grey images get 1 channel, others 3. Images are decoded once per machine.

    Args:
        path: name on the hub, or a folder that `datasets.load_dataset` or `load_from_disk` reads.
        name: configuration of the data set, if it has several.
        image_column: name of the column with the images.
        label_column: name of the column with the labels, whole numbers.
        train_split: name of the split for training.
        test_split: name of the split for evaluation.
        batch_size: number of samples in a batch.
        mean: mean that is subtracted from every channel, on the scale from 0 to 1.
        std: standard deviation by which every channel is divided, on the scale from 0 to 1.
    """

    def __init__(
        self,
        path: str,
        name: str | None = None,
        image_column: str = "image",
        label_column: str = "label",
        train_split: str = "train",
        test_split: str = "test",
        batch_size: int = 64,
        mean: float = 0.5,
        std: float = 0.5,
    ) -> None:
        super().__init__(batch_size)
        self.path, self.name = path, name
        self.image_column, self.label_column = image_column, label_column
        self.train_split, self.test_split = train_split, test_split
        self.mean, self.std = mean, std

    def setup(self, stage: str | None = None) -> None:
        """Load both splits and decode their images.

        Raises:
            BadInput: `datasets` is not installed, or the data set, a split or a column does not exist.
        """
        if hasattr(self, "train"):
            return
        splits = load_splits(self.path, self.name)
        self.train, self.test = self._images(splits, self.train_split), self._images(splits, self.test_split)

    def _images(self, splits: object, split: str) -> TensorImages:
        rows = rows_of(splits, self.path, split, self.image_column, self.label_column)

        def build() -> readers.Arrays:
            labels = whole_labels(rows.with_format("numpy")[self.label_column][:], self.path, self.label_column)
            return readers.stack_images(rows[self.image_column][:]), labels

        facts = [self.path, rows._fingerprint, self.image_column, self.label_column]
        images, labels = readers.cached(facts, readers.data_root(None), f"hf-{split}", build)
        num_channels = images.shape[1]
        return TensorImages(images, labels, [self.mean] * num_channels, [self.std] * num_channels)


def _download(dataset: Callable[..., object], root: Path) -> None:
    before_s = socket.getdefaulttimeout()
    # without a timeout, a network that drops packets would block the run forever
    socket.setdefaulttimeout(DOWNLOAD_TIMEOUT_S)
    try:
        for train in (True, False):
            dataset(str(root), train=train, download=True)
    finally:
        socket.setdefaulttimeout(before_s)


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
            # each cluster gets the same number of samples
            of = torch.arange(len(centres)).repeat(number // len(centres))
            points = torch.randn(number, self.num_features, generator=draws).mul_(self.noise).add_(centres[of])
            sets.append(TensorDataset(points, labels[of]))
        self.train, self.test = sets
