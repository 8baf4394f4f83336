"""Reading data sets from the files that other tools leave: idx, parquet and CSV, as tensors that ranks can share."""

from __future__ import annotations

import contextlib
import fcntl
import gzip
import hashlib
import importlib.util
import io
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from raafl.atomic_file import atomic_file
from raafl.errors import BadInput, installing

Bytes = npt.NDArray[np.uint8]
Arrays = tuple[npt.NDArray[Any], ...]
Tensors = tuple[torch.Tensor, ...]

_USER_CACHE = Path("~/.cache/raafl")
_MNIST_STEMS = {"train": "train", "test": "t10k"}


def data_root(root: str | Path | None) -> Path:
    """Return the folder of all data sets: `root`, or else the environment variable RAAFL_DATA, or else ~/.cache/raafl."""
    return Path(root or os.environ.get("RAAFL_DATA") or _USER_CACHE).expanduser()


def read_digits() -> Tensors:
    """Read the digits that scikit-learn contains: images `(1797, 1, 8, 8)` float32 in [0, 1], labels `(1797,)` int64.

    scikit-learn itself is not imported, since that would take a second in each process.
    """
    spec: Any = importlib.util.find_spec("sklearn")
    content = Path(spec.origin).with_name("datasets").joinpath("data", "digits.csv.gz").read_bytes()
    # all fields are integers below 256, and splitting bytes is faster than parsing floats
    text = gzip.decompress(content).replace(b"\n", b",").strip(b",")
    table = np.array([int(field) for field in text.split(b",")], dtype=np.uint8).reshape(-1, 65)
    pixels = torch.from_numpy(table[:, :64].copy()).to(torch.float32).div_(16)
    return pixels.reshape(-1, 1, 8, 8), torch.from_numpy(table[:, 64].astype(np.int64))


def read_idx(path: Path) -> torch.Tensor:
    """Read an idx file of unsigned bytes; without gzip it is memory-mapped, so that processes share its memory.

    Raises:
        BadInput: the file is damaged, or is no idx file of unsigned bytes.
    """
    content: Any = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else np.memmap(path, np.uint8, "c")
    header = bytes(content[:4])
    shape = [
        int.from_bytes(bytes(content[4 + 4 * d : 8 + 4 * d]), "big") for d in range(header[3] if header[3:] else 0)
    ]
    start = 4 + 4 * len(shape)
    if header[:3] != b"\0\0\x08" or len(content) != start + math.prod(shape):
        raise BadInput(f"{path} is not a complete idx file: delete it and download it again")
    if isinstance(content, bytes):
        content = np.frombuffer(bytearray(content), np.uint8)
    return torch.from_numpy(content[start:].reshape(shape))


class Mnist:
    """Reader of the MNIST data set from its four idx files, plain or gzipped."""

    def places(self, root: Path) -> list[Path]:
        """Return the folders below ``root`` in which `find` looks for the data set."""
        return [root / "torchvision" / "MNIST" / "raw", root / "MNIST" / "raw"]

    def find(self, root: Path) -> Path | None:
        """Return the folder below ``root`` in which the data set is; None if it is missing."""
        return next((folder for folder in self.places(root) if _has_mnist(folder)), None)

    def read(self, folder: Path, split: str) -> Tensors:
        """Read the train or test split: images `(n, 1, 28, 28)` uint8, memory-mapped if possible, and labels `(n,)` int64."""
        stem = _MNIST_STEMS[split]
        images = read_idx(_idx_file(folder, f"{stem}-images-idx3-ubyte"))
        labels = read_idx(_idx_file(folder, f"{stem}-labels-idx1-ubyte"))
        return images.unsqueeze(1), labels.to(torch.int64)


@dataclass(frozen=True, slots=True)
class Cifar:
    """Reader of the CIFAR-10 or CIFAR-100 data set, from the files of the Hugging Face hub or those of torchvision."""

    folder: str  # folder with the hub's parquet files
    batches: str  # folder with torchvision's files
    torchvision: str  # class of torchvision that reads these files
    label: str  # column of the parquet files with the labels
    files: Mapping[str, str]  # pattern of torchvision's files, by split

    def places(self, root: Path) -> list[Path]:
        """Return the folders below ``root`` in which `find` looks for the data set.

        The first is for files from the Hugging Face hub, the others are those of torchvision.
        """
        return [root / self.folder, root / "torchvision" / self.batches, root / self.batches]

    def find(self, root: Path) -> Path | None:
        """Return the folder below ``root`` in which the data set is; None if it is missing."""
        return next((folder for folder in self.places(root) if self._is_in(folder)), None)

    def read(self, folder: Path, split: str) -> Tensors:
        """Read the train or test split: images `(n, 3, 32, 32)` uint8 and labels `(n,)` int64, decoded once per machine."""
        name = f"{self.folder}-{split}"
        if folder.name == self.folder:
            sources = sorted(folder.rglob(f"{split}*.parquet"))
            return cached(sources, folder.parent, name, lambda: _read_image_parquet(sources, self.label))
        sources = sorted(folder.glob(self.files[split]))
        return cached(sources, folder.parent, name, lambda: _read_cifar_batches(folder.parent, split, self.torchvision))

    def _is_in(self, folder: Path) -> bool:
        if folder.name == self.folder:
            return all(next(folder.rglob(f"{split}*.parquet"), None) for split in ("train", "test"))
        return any(folder.glob(self.files["test"]))


CIFAR10 = Cifar("cifar10", "cifar-10-batches-py", "CIFAR10", "label", {"train": "data_batch_*", "test": "test_batch"})
CIFAR100 = Cifar("cifar100", "cifar-100-python", "CIFAR100", "fine_label", {"train": "train", "test": "test"})


def stack_images(images: Sequence[Any]) -> Bytes:
    """Stack PIL images to bytes `(n, channels, height, width)`: 1 channel if all are grey, otherwise RGB.

    Raises:
        BadInput: there are no images, or their sizes differ.
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


def cached(
    sources: Sequence[Path | str],
    folder: Path,
    name: str,
    build: Callable[[], Arrays],
    parts: Sequence[str] = ("images", "labels"),
) -> Tensors:
    """Return arrays that are computed from source files once per machine, stored, and later memory-mapped.

    They are stored in `folder/.raafl`, or in the user's cache if that folder is read-only, under a name that changes
    when the sources change (paths, sizes, times). Processes that start together wait for the first one. If nothing can
    be stored, the arrays stay in this process's memory.
    """
    digest = hashlib.sha256()
    for source in sources:
        facts = source.stat() if isinstance(source, Path) else None
        where = source.resolve() if isinstance(source, Path) else source
        digest.update(f"{where}|{facts.st_size if facts else ''}|{facts.st_mtime_ns if facts else ''}\n".encode())
    stem = f"{name}-{digest.hexdigest()[:12]}"
    homes = [folder / ".raafl", _USER_CACHE.expanduser() / ".raafl"]
    for place in homes:
        if all(path.is_file() for path in _cache_files(place, stem, parts)):
            return _mapped(_cache_files(place, stem, parts))
    home = next((place for place in homes if _is_writable(place)), None)
    if home is None:
        return _as_tensors(build())
    files = _cache_files(home, stem, parts)
    with locked(home / f"{name}.lock"):
        arrays = None if all(path.is_file() for path in files) else build()
        # no error if the disk is full: this process has the arrays in memory
        if arrays is not None and not _are_saved(arrays, files):
            return _as_tensors(arrays)
    return _mapped(files)


def _are_saved(arrays: Arrays, files: Sequence[Path]) -> bool:
    """Write each array to its file; return False if that fails, for example because the disk is full."""
    try:
        for path, array in zip(files, arrays, strict=True):
            with atomic_file(path, is_synced=False) as file:
                np.save(file, array)
    except OSError:
        return False
    return True


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Return a context that only one process of this machine can enter at a time, by a lock file at ``path``."""
    try:
        file = path.open("a")
    except OSError:  # another user's lock file: without the lock, at worst two processes do the same work
        yield
        return
    with file:
        with contextlib.suppress(OSError):  # the file system cannot lock
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _has_mnist(folder: Path) -> bool:
    names = [f"{stem}-{kind}-ubyte" for stem in _MNIST_STEMS.values() for kind in ("images-idx3", "labels-idx1")]
    return all((folder / name).is_file() or (folder / f"{name}.gz").is_file() for name in names)


def _idx_file(folder: Path, name: str) -> Path:
    return folder / name if (folder / name).is_file() else folder / f"{name}.gz"


def _read_image_parquet(sources: Sequence[Path], label: str = "label") -> Arrays:
    """Read parquet files whose column img or image has encoded images; return decoded images and labels."""
    try:
        import pyarrow.parquet as pq  # type: ignore[import-untyped]
        from PIL import Image
    except ImportError as error:
        raise BadInput(f"reading {sources[0]} needs pyarrow and pillow ({error}): {installing('hf')}") from error
    images, labels = [], []
    for source in sources:
        table = pq.read_table(source)
        column = next((name for name in ("img", "image") if name in table.column_names), None)
        if column is None or label not in table.column_names:
            raise BadInput(f"{source} has columns {', '.join(table.column_names)}: expected img or image, and {label}")
        images += [Image.open(io.BytesIO(cell["bytes"])) for cell in table[column].to_pylist()]
        labels.append(table[label].to_numpy().astype(np.int64))
    return stack_images(images), np.concatenate(labels)


def _read_cifar_batches(root: Path, split: str, kind: str) -> Arrays:
    try:
        import torchvision.datasets
    except ImportError as error:
        raise BadInput(f"reading {root} needs torchvision ({error}): {installing('vision')}") from error
    data = getattr(torchvision.datasets, kind)(str(root), train=split == "train")
    return np.ascontiguousarray(data.data.transpose(0, 3, 1, 2)), np.asarray(data.targets, np.int64)


def _cache_files(home: Path, stem: str, parts: Sequence[str]) -> list[Path]:
    return [home / f"{stem}-{part}.npy" for part in parts]


def _mapped(files: Sequence[Path]) -> Tensors:
    return _as_tensors(tuple(np.load(path, mmap_mode="c") for path in files))


def _as_tensors(arrays: Arrays) -> Tensors:
    return tuple(map(torch.from_numpy, arrays))


def _is_writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK)


_KINDS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}


def load_splits(path: str, name: str | None) -> Any:
    """Return the splits of a data set, such as ``train`` and ``test``, by name.

    Raises:
        BadInput: `datasets` is not installed, there is no such data set, or a file is damaged; the message then names
            the line.
    """
    _check_there(path)
    try:
        import datasets
    except ImportError as error:
        raise BadInput(f"loading '{path}' needs the package datasets: {installing('hf')}") from error
    try:
        if Path(path, "dataset_dict.json").is_file():
            return datasets.load_from_disk(path)
        if Path(path).is_file():
            kind = _KINDS.get(Path(path).suffix)
            if kind is None:
                raise BadInput(f"cannot load the data set '{path}': give a file that ends in {', '.join(_KINDS)}")
            return datasets.load_dataset(kind, data_files=path)
        return datasets.load_dataset(path, name)
    except BadInput:
        raise
    except Exception as error:  # `datasets`, pyarrow, pandas and network libraries raise many types of error
        if (fault := _json_fault(Path(path))) is not None:
            raise BadInput(f"cannot load the data set '{path}': {fault}") from error
        reason = (str(error.__cause__ or error).strip().splitlines() or [type(error).__name__])[0]
        raise BadInput(
            f"cannot load the data set '{path}' ({reason}): give a file (JSON lines, parquet), a folder or a name on the hub"
        ) from error


def _check_there(path: str) -> None:
    """Raise `BadInput` if ``path`` can only mean a local file or folder and does not exist; the hub is not asked."""
    is_file = Path(path).suffix in _KINDS
    if not Path(path).exists() and (is_file or path.startswith(("/", ".", "~"))):
        what = "file" if is_file else "folder"
        where = "" if Path(path).is_absolute() else f" in {Path.cwd()}"
        raise BadInput(f"there is no {what} '{path}'{where}: correct the path of the data set")


def _json_fault(path: Path) -> str | None:
    """Find the first invalid line of a JSON-lines file; return a message, or None if all are valid or it is another file."""
    if path.suffix != ".jsonl" or not path.is_file():
        return None
    with path.open(encoding="utf-8-sig", errors="replace") as file:
        number = 0
        for number, line in enumerate(file, start=1):
            if fault := _line_fault(line):
                return f"line {number} {fault}"
    return None if number else "it is empty: give one sample on each line"


def _line_fault(line: str) -> str | None:
    """Describe why a line is not a valid sample; None if it is one."""
    try:
        if not line.strip() or isinstance(json.loads(line), dict):
            return None
    except (ValueError, RecursionError) as error:
        return f"is not JSON: {error}: correct it, or leave the line out"
    return 'is not a JSON object: give one sample on each line, such as {"text": ..., "label": 0}'


def whole_labels(values: Any, path: str, column: str) -> npt.NDArray[np.int64]:
    """Return the labels of a data set as int64, shape `(samples,)`.

    Raises:
        BadInput: one is no whole number; rounding would make another class of it.
    """
    found = np.asarray(values)
    for row, value in enumerate([] if found.dtype.kind in "iu" else found.tolist()):
        try:
            is_whole = int(value) == float(value)
        except (TypeError, ValueError, OverflowError):
            is_whole = False
        if not is_whole:
            raise BadInput(
                f"the data set '{path}' has no whole number in row {row} of column '{column}' ({type(value).__name__}): give "
                "each sample a class from 0, by class_encode_column of `datasets`, for instance, or name another label_column"
            )
    return found.astype(np.int64)


def rows_of(splits: Any, path: str, split: str, *columns: str) -> Any:
    """Return the rows of one split, after a check that it has the required columns.

    Raises:
        BadInput: the split does not exist or lacks one of the columns.
    """
    if split not in splits:
        raise BadInput(f"the data set '{path}' has no split '{split}': give one of {', '.join(splits)}")
    rows = splits[split]
    for column in columns:
        if column not in rows.column_names:
            raise BadInput(
                f"the data set '{path}' has no column '{column}': give one of {', '.join(rows.column_names)}"
            )
    return rows
