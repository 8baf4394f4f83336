"""Reading data sets from the files that other tools leave: idx, parquet and CSV, as tensors that ranks can share."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import importlib.util
import io
import math
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from raafl.errors import BadInput

Bytes = npt.NDArray[np.uint8]
Arrays = tuple[Bytes, npt.NDArray[np.int64]]
Tensors = tuple[torch.Tensor, torch.Tensor]

_USER_CACHE = Path("~/.cache/raafl")
_MNIST_STEMS = {"train": "train", "test": "t10k"}


def data_root(root: str | Path | None) -> Path:
    """The folder that holds data sets: `root`, else the environment variable RAAFL_DATA, else ~/.cache/raafl."""
    return Path(root or os.environ.get("RAAFL_DATA") or _USER_CACHE).expanduser()


def read_digits() -> Tensors:
    """scikit-learn's bundled digits: `(1797, 1, 8, 8)` float32 in [0, 1] and `(1797,)` int64.

    The file is read where scikit-learn keeps it, without importing scikit-learn (which takes a second in each rank).

    Raises:
        BadInput: scikit-learn is not installed.
    """
    spec = importlib.util.find_spec("sklearn")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder) / "datasets" / "data" / "digits.csv.gz"
        if path.is_file():
            # Every field is a whole number below 256, so splitting the bytes beats parsing floats.
            text = gzip.decompress(path.read_bytes()).replace(b"\n", b",").strip(b",")
            table = np.array([int(field) for field in text.split(b",")], dtype=np.uint8).reshape(-1, 65)
            pixels = torch.from_numpy(table[:, :64].copy()).to(torch.float32).div_(16)
            return pixels.reshape(-1, 1, 8, 8), torch.from_numpy(table[:, 64].astype(np.int64))
    raise BadInput("the digits come with scikit-learn, which is not installed: pip install scikit-learn")


def find_mnist(root: Path) -> Path | None:
    """The folder of MNIST's four idx files, plain or gzipped, or None."""
    return next((folder for folder in mnist_places(root) if _has_mnist(folder)), None)


def mnist_places(root: Path) -> list[Path]:
    """Where MNIST may lie."""
    return [root / "torchvision" / "MNIST" / "raw", root / "MNIST" / "raw"]


def read_mnist(folder: Path, split: str) -> Tensors:
    """MNIST's train or test split: `(n, 1, 28, 28)` uint8 (mapped from an unpacked file) and `(n,)` int64."""
    stem = _MNIST_STEMS[split]
    images = read_idx(_idx_file(folder, f"{stem}-images-idx3-ubyte"))
    labels = read_idx(_idx_file(folder, f"{stem}-labels-idx1-ubyte"))
    return images.unsqueeze(1), labels.to(torch.int64)


def read_idx(path: Path) -> torch.Tensor:
    """A file of unsigned bytes in the idx format; a plain file is mapped, so that ranks share its pages.

    Raises:
        BadInput: the file is damaged or holds something else.
    """
    content: Any = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else np.memmap(path, np.uint8, "c")
    header = bytes(content[:4])
    shape = [
        int.from_bytes(bytes(content[4 + 4 * d : 8 + 4 * d]), "big") for d in range(header[3] if header[3:] else 0)
    ]
    start = 4 + 4 * len(shape)
    if header[:3] != b"\0\0\x08" or len(content) != start + math.prod(shape):
        raise BadInput(f"{path} is not a whole idx file of bytes: delete it and fetch it again")
    if isinstance(content, bytes):
        content = np.frombuffer(bytearray(content), np.uint8)
    return torch.from_numpy(content[start:].reshape(shape))


def find_cifar10(root: Path) -> Path | None:
    """The folder of CIFAR-10 as parquet files or as torchvision's batches, or None."""
    return next((folder for folder in cifar10_places(root) if _has_cifar10(folder)), None)


def cifar10_places(root: Path) -> list[Path]:
    """Where CIFAR-10 may lie: first parquet as on the hub, then torchvision's layout."""
    batches = "cifar-10-batches-py"
    return [root / "cifar10", root / "torchvision" / batches, root / batches]


def read_cifar10(folder: Path, split: str) -> Tensors:
    """CIFAR-10's train or test split: `(n, 3, 32, 32)` uint8 and `(n,)` int64, decoded once per machine."""
    if folder.name == "cifar10":
        sources = sorted(folder.rglob(f"{split}*.parquet"))
        return cached(sources, folder.parent, f"cifar10-{split}", lambda: _read_image_parquet(sources))
    sources = sorted(folder.glob("data_batch_*" if split == "train" else "test_batch"))
    return cached(sources, folder.parent, f"cifar10-{split}", lambda: _read_cifar_batches(folder.parent, split))


def stack_images(images: Sequence[Any]) -> Bytes:
    """PIL images as `(n, channels, height, width)` bytes: 1 channel where all are grey, else RGB.

    Raises:
        BadInput: there are none, or they differ in size.
    """
    sizes = {image.size for image in images}
    if len(sizes) != 1:
        raise BadInput(f"the images have sizes {sorted(sizes)[:5]}: resize them to one size first")
    mode = "L" if all(image.mode in ("1", "L") for image in images) else "RGB"
    width, height = sizes.pop()
    out = np.empty((len(images), height, width, 1 if mode == "L" else 3), np.uint8)
    for row, image in zip(out, images, strict=True):
        row[:] = np.asarray(image if image.mode == mode else image.convert(mode)).reshape(row.shape)
    return np.ascontiguousarray(out.transpose(0, 3, 1, 2))


def cached(sources: Sequence[Path | str], folder: Path, name: str, build: Callable[[], Arrays]) -> Tensors:
    """What `build` makes of the sources, made once per machine and then mapped from .npy files.

    The files lie in `folder/.raafl`, or in the user's cache where that cannot be written, under a name that changes
    with the sources (paths, sizes, times of change). Ranks that start together wait for the first one. Where nothing
    can be written the arrays stay in this process.
    """
    digest = hashlib.sha256()
    for source in sources:
        facts = source.stat() if isinstance(source, Path) else None
        where = source.resolve() if isinstance(source, Path) else source
        digest.update(f"{where}|{facts.st_size if facts else ''}|{facts.st_mtime_ns if facts else ''}\n".encode())
    stem = f"{name}-{digest.hexdigest()[:12]}"
    homes = [folder / ".raafl", _USER_CACHE.expanduser() / ".raafl"]
    for place in homes:
        if all(path.is_file() for path in _cache_files(place, stem)):
            return _mapped(place, stem)
    home = next((place for place in homes if _is_writable(place)), None)
    if home is None:
        return _as_tensors(build())
    with locked(home / f"{name}.lock"):
        if not all(path.is_file() for path in _cache_files(home, stem)):
            arrays = build()
            try:
                _save(_cache_files(home, stem)[0], arrays[0])
                _save(_cache_files(home, stem)[1], arrays[1])
            except OSError:  # the disk is full: this process has the arrays all the same
                return _as_tensors(arrays)
    return _mapped(home, stem)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Let one process of this machine through at a time (anyone, where the system has no flock)."""
    try:
        import fcntl

        file = path.open("a")
    except (ImportError, OSError):  # another system, or another user's lock: the worst is work done twice
        yield
        return
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _has_mnist(folder: Path) -> bool:
    names = [f"{stem}-{kind}-ubyte" for stem in _MNIST_STEMS.values() for kind in ("images-idx3", "labels-idx1")]
    return all((folder / name).is_file() or (folder / f"{name}.gz").is_file() for name in names)


def _idx_file(folder: Path, name: str) -> Path:
    return folder / name if (folder / name).is_file() else folder / f"{name}.gz"


def _has_cifar10(folder: Path) -> bool:
    if folder.name == "cifar10":
        return all(next(folder.rglob(f"{split}*.parquet"), None) for split in ("train", "test"))
    return (folder / "test_batch").is_file()


def _read_image_parquet(sources: Sequence[Path]) -> Arrays:
    """Decode the encoded images of parquet files with columns img or image, and label."""
    try:
        import pyarrow.parquet as pq  # type: ignore[import-untyped]
        from PIL import Image
    except ImportError as error:
        raise BadInput(f"reading {sources[0]} needs pyarrow and pillow ({error}): pip install 'raafl[hf]'") from error
    images, labels = [], []
    for source in sources:
        table = pq.read_table(source)
        column = next((name for name in ("img", "image") if name in table.column_names), None)
        if column is None or "label" not in table.column_names:
            raise BadInput(f"{source} has columns {', '.join(table.column_names)}: expected img or image, and label")
        images += [Image.open(io.BytesIO(cell["bytes"])) for cell in table[column].to_pylist()]
        labels.append(table["label"].to_numpy().astype(np.int64))
    return stack_images(images), np.concatenate(labels)


def _read_cifar_batches(root: Path, split: str) -> Arrays:
    try:
        from torchvision.datasets import CIFAR10
    except ImportError as error:
        raise BadInput(f"reading {root} needs torchvision ({error}): pip install 'raafl[vision]'") from error
    data = CIFAR10(str(root), train=split == "train")
    return np.ascontiguousarray(data.data.transpose(0, 3, 1, 2)), np.asarray(data.targets, np.int64)


def _cache_files(home: Path, stem: str) -> tuple[Path, Path]:
    return home / f"{stem}-images.npy", home / f"{stem}-labels.npy"


def _mapped(home: Path, stem: str) -> Tensors:
    images, labels = _cache_files(home, stem)
    return _as_tensors((np.load(images, mmap_mode="c"), np.load(labels, mmap_mode="c")))


def _as_tensors(arrays: Arrays) -> Tensors:
    return torch.from_numpy(arrays[0]), torch.from_numpy(arrays[1])


def _is_writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK)


def _save(path: Path, array: npt.NDArray[Any]) -> None:
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            np.save(file, array)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
