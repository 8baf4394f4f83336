"""Make the folders of four hospitals and of the server from public data: images of CIFAR-100, sentences of SST-2.

All hospitals classify the same things, and see different kinds of them, as hospitals do:

- *images*: five classes (CIFAR-100's superclasses), of each of which there are five kinds. North has the first kind of each,
  east the second, south the third, west the fourth and the fifth; the server tests on all of them.
- *texts*: good or bad (SST-2), by length: north has the shortest quarter of the sentences, west the longest.

    python examples/hospitals/folders.py OUT      # reads RAAFL_DATA/cifar100 and RAAFL_DATA/sst2, as parquet files
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

CLASSES = ("flowers", "large_natural_outdoor_scenes", "people", "trees", "vehicles_1")
NUM_KINDS = 5
SITES = ("north", "east", "south", "west")
FOLDERS = ("north/images", "east/images", "south/images", "west/images-4", "west/images-5")
"""Who has which kind of each class; west has two, for the two clients that it runs as an array of jobs."""


def parquet_rows(file: Path, *columns: str) -> tuple[list[list[Any]], dict[str, list[str]]]:
    """Return the values of some columns of a file, and the names that its classes have.

    Args:
        file: parquet file as `datasets` writes it.
        columns: names of the columns.
    """
    import pyarrow.parquet as pq

    table = pq.read_table(file)
    features = json.loads(table.schema.metadata[b"huggingface"])["info"]["features"]
    return [table[name].to_pylist() for name in columns], {n: f.get("names", []) for n, f in features.items()}


def images_of(file: Path) -> dict[tuple[str, int], list[tuple[str, bytes]]]:
    """Return the images of each class and number of a kind in it, as the kind's name and the bytes of a PNG file."""
    (images, fine, coarse), names = parquet_rows(file, "img", "fine_label", "coarse_label")
    kinds: dict[str, list[int]] = {name: [] for name in CLASSES}
    for a, b in sorted(set(zip(fine, coarse, strict=True))):
        kinds.get(names["coarse_label"][b], []).append(a)
    found: dict[tuple[str, int], list[tuple[str, bytes]]] = {}
    for image, a, b in zip(images, fine, coarse, strict=True):
        if (name := names["coarse_label"][b]) in CLASSES:
            found.setdefault((name, kinds[name].index(a)), []).append((names["fine_label"][a], image["bytes"]))
    return found


def write_images(folder: Path, split: str, kind: int, name: str, images: Iterable[tuple[str, bytes]]) -> None:
    """Write images of one class to ``FOLDER/SPLIT/CLASS/KIND-NUMBER.png``.

    Args:
        folder: folder of a site's images.
        split: train or test.
        kind: number of the kind, so that kinds do not overwrite one another.
        name: name of the class.
        images: names of kinds, and bytes of files.
    """
    place = folder / split / name
    place.mkdir(parents=True, exist_ok=True)
    for number, (label, content) in enumerate(images):
        (place / f"{kind}-{label}-{number:04}.png").write_bytes(content)


def make_images(data: Path, out: Path, num_train: int, num_test: int) -> None:
    """Write each site's images, and the server's: a few of each kind to try the model on, and the test set.

    Args:
        data: folder with cifar100.
        out: folder of the sites' folders.
        num_train: most training images of each class and site.
        num_test: test images of each class and kind at the server; a site has as many of its own kind.
    """
    train, test = (images_of(data / "cifar100" / f"{split}.parquet") for split in ("train", "test"))
    for name in CLASSES:
        for kind, folder in enumerate(FOLDERS):
            own, held_out = train[name, kind], test[name, kind][:num_test]
            write_images(out / folder, "train", kind, name, own[8 : 8 + num_train])
            write_images(out / folder, "test", kind, name, held_out)
            write_images(out / "server/images", "train", kind, name, own[:8])
            write_images(out / "server/images", "test", kind, name, held_out)


def write_rows(file: Path, rows: Iterable[tuple[str, int]]) -> None:
    """Write labelled texts as JSON lines."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w", encoding="utf-8") as lines:
        lines.writelines(json.dumps({"text": text, "label": label}) + "\n" for text, label in rows)


def spread(rows: list[tuple[str, int]], number: int) -> Iterator[tuple[str, int]]:
    """Return at most ``number`` rows, evenly spaced."""
    number = min(number, len(rows))
    return (rows[i * len(rows) // number] for i in range(number))


def make_texts(data: Path, out: Path, num_train: int, num_test: int) -> None:
    """Write each site's texts, and the server's: a few to try the model on, and the test set.

    Args:
        data: folder with sst2.
        out: folder of the sites' folders.
        num_train: most training texts of a site.
        num_test: most test texts of the server.
    """
    (texts, labels), _ = parquet_rows(data / "sst2" / "train.parquet", "sentence", "label")
    rows = sorted(zip(texts, labels, strict=True), key=lambda row: (len(row[0].split()), row))
    quarter = len(rows) // len(SITES)
    for place, site in enumerate(SITES):
        own = sorted(rows[place * quarter : (place + 1) * quarter])  # by text, so that an even choice has both labels
        write_rows(out / site / "texts" / "train.jsonl", spread(own[64:], num_train))
        write_rows(out / site / "texts" / "test.jsonl", own[:16])
    write_rows(out / "server" / "texts" / "train.jsonl", spread(rows, 64))
    (texts, labels), _ = parquet_rows(data / "sst2" / "validation.parquet", "sentence", "label")
    write_rows(out / "server" / "texts" / "test.jsonl", spread(list(zip(texts, labels, strict=True)), num_test))


def make(data: Path, out: Path, *, num_images: int = 250, num_texts: int = 1200, num_test: int = 400) -> None:
    """Write the folders of all sites and of the server.

    Args:
        data: folder with cifar100 and sst2.
        out: folder that gets north, east, south, west and server.
        num_images: most training images of each class and site.
        num_texts: most training texts of a site.
        num_test: about so many test samples of either kind at the server.
    """
    make_images(data, out, num_images, max(num_test // (len(CLASSES) * NUM_KINDS), 1))
    make_texts(data, out, num_texts, num_test)


def main() -> None:
    """Make the folders from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("RAAFL_DATA", "~/.cache/raafl")).expanduser())
    options = parser.parse_args()
    make(options.data, options.out)


if __name__ == "__main__":
    main()
