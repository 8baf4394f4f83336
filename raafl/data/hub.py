"""Load data sets with the package `datasets`: from the Hugging Face hub, its cache, a local folder or a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from raafl.errors import BadInput, installing

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
    except Exception as error:  # of `datasets`, pyarrow, pandas and the network
        if (fault := _json_fault(Path(path))) is not None:
            raise BadInput(f"cannot load the data set '{path}': {fault}") from error
        reason = (str(error.__cause__ or error).strip().splitlines() or [type(error).__name__])[0]
        raise BadInput(
            f"cannot load the data set '{path}' ({reason}): give a file (JSON lines, parquet), a folder or a name on the hub"
        ) from error


def _check_there(path: str) -> None:
    """Raise `BadInput` for what can only be a file or a folder, and is not there: the hub is not asked."""
    is_file = Path(path).suffix in _KINDS
    if not Path(path).exists() and (is_file or path.startswith(("/", ".", "~"))):
        what = "file" if is_file else "folder"
        where = "" if Path(path).is_absolute() else f" in {Path.cwd()}"
        raise BadInput(f"there is no {what} '{path}'{where}: correct the path of the data set")


def _json_fault(path: Path) -> str | None:
    """Say which line of a file of JSON lines is none; None where all are, or it is no such file."""
    if path.suffix != ".jsonl" or not path.is_file():
        return None
    with path.open(encoding="utf-8-sig", errors="replace") as file:
        number = 0
        for number, line in enumerate(file, start=1):
            if fault := _line_fault(line):
                return f"line {number} {fault}"
    return None if number else "it is empty: give one sample on each line"


def _line_fault(line: str) -> str | None:
    """Explain why a line is no sample, or return None."""
    try:
        if not line.strip() or isinstance(json.loads(line), dict):
            return None
    except (ValueError, RecursionError) as error:
        return f"is not JSON: {error}: correct it, or leave the line out"
    return 'is not a JSON object: give one sample on each line, such as {"text": ..., "label": 0}'


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
