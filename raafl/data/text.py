"""Load text sets: SST-2, AG News, the Financial PhraseBank, Shakespeare, and any from the Hugging Face hub.

They are ordinary LightningDataModules. A classified text is `(tokens, attention mask, label)`, padded or cut to one length so
that shapes never change. Texts are tokenised once per machine; the ranks of a machine share the tokens.
"""

from __future__ import annotations

import shutil
import urllib.request
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt
import torch

from raafl.atomic_file import atomic_file
from raafl.data import readers
from raafl.data.readers import load_splits, rows_of, whole_labels
from raafl.data.sources import DOWNLOAD_TIMEOUT_S, TrainTestData, held_out
from raafl.data.tokens import TensorTokens, Tokenizer, load_tokenizer, package_folder, windows_of
from raafl.errors import BadInput, at_least, installing, one_line

Part = Literal["train", "test"]
Labels = npt.NDArray[np.int64]


@dataclass(frozen=True)
class _Rows:
    """Source of one split of a text set: its files, and a function that reads texts and labels from them."""

    sources: Sequence[Path | str]
    read: Callable[[], tuple[list[str], Labels]]


class _Texts(TrainTestData):
    """Data module of labelled texts, which are tokenised when first used and cached on disk."""

    def __init__(
        self,
        tokenizer: str,
        max_length: int,
        train_length: int | None,
        vocab_size: int,
        batch_size: int,
        num_train: int | None,
        num_test: int | None,
    ) -> None:
        super().__init__(batch_size, num_train, num_test)
        for name, number in (("max_length", max_length), ("train_length", train_length)):
            at_least(f"{type(self).__name__}: {name}", number, 2, optional=True)
        self.tokenizer = Tokenizer(tokenizer, vocab_size)
        self.lengths: dict[Part, int] = {"train": train_length or max_length, "test": max_length}

    @abstractmethod
    def _rows(self, part: Part) -> _Rows: ...

    @abstractmethod
    def _home(self) -> tuple[Path, str]:
        """Return the folder of the token cache, and the name of this data set's files there."""

    def setup(self, stage: str | None = None) -> None:
        """Convert training and test texts to tokens, or memory-map the tokens that an earlier run has stored.

        Raises:
            BadInput: the data, the tokenizer or a column does not exist.
        """
        if not hasattr(self, "train"):
            self._set(self._tokens("train"), self._tokens("test"))

    def _tokens(self, part: Part) -> TensorTokens:
        rows, training = self._rows(part), self._rows("train")
        length, (folder, name) = self.lengths[part], self._home()

        def build() -> readers.Arrays:
            texts, labels = rows.read()
            tokens, lengths = self.tokenizer.encode(texts, length, lambda: training.read()[0])
            return tokens, lengths, labels

        facts = [*rows.sources, *training.sources, *self.tokenizer.cache_inputs(), f"{part} {length}"]
        return TensorTokens(*readers.cached(facts, folder, f"{name}-{part}", build, ("tokens", "lengths", "labels")))


class _FromFolderOrHub(_Texts):
    """Labelled texts from parquet files under the data root or, if these are missing, from the Hugging Face hub."""

    folder: ClassVar[str]
    hub: ClassVar[str]
    text_column: ClassVar[str]
    splits: ClassVar[dict[Part, str]]

    def __init__(
        self,
        tokenizer: str,
        root: str | Path | None = None,
        max_length: int = 64,
        train_length: int | None = None,
        vocab_size: int = 20000,
        batch_size: int = 32,
        download: bool = True,
        num_train: int | None = None,
        num_test: int | None = None,
    ) -> None:
        """Store the arguments; nothing is read yet."""
        super().__init__(tokenizer, max_length, train_length, vocab_size, batch_size, num_train, num_test)
        self.root, self.download = readers.data_root(root), download

    def prepare_data(self) -> None:
        """Download missing files, if downloads are allowed.

        Raises:
            BadInput: the data is missing and cannot be downloaded; the message names the searched folders and the
                remedy.
        """
        if any(not self._files(part) for part in self.splits):
            self._from_hub()

    def _home(self) -> tuple[Path, str]:
        return self.root, self.folder

    def _files(self, part: Part) -> list[Path]:
        return sorted((self.root / self.folder).rglob(f"{self.splits[part]}*.parquet"))

    def _rows(self, part: Part) -> _Rows:
        files = self._files(part)
        if files:
            return _Rows(files, lambda: _read_parquet(files, self.text_column))
        return _split(self._from_hub(), self.hub, self.splits[part], self.text_column, "label")

    def _from_hub(self) -> object:
        if not self.download:
            raise self._missing("download is off")
        try:
            with readers.locked(self.root / f".{self.folder}.lock"):
                return load_splits(self.hub, None)
        except BadInput as error:
            raise self._missing(str(error)) from error

    def _missing(self, reason: str) -> BadInput:
        return BadInput(
            f"{type(self).__name__} is not in {self.root / self.folder} ({reason}): set root or the environment variable "
            "RAAFL_DATA to the folder that has it, or use download=True where there is a network"
        )


class SST2(_FromFolderOrHub):
    """Data module of SST-2 (Socher et al. 2013, GLUE): 67,349 phrases of film reviews, 872 test sentences, 2 classes."""

    num_classes: ClassVar[int] = 2
    folder, hub, text_column = "sst2", "stanfordnlp/sst2", "sentence"
    splits: ClassVar[dict[Part, str]] = {"train": "train", "test": "validation"}


class AGNews(_FromFolderOrHub):
    """Data module of AG News (Zhang et al. 2015): news articles, of which 7,600 are for tests, 4 classes."""

    num_classes: ClassVar[int] = 4
    folder, hub, text_column = "ag_news", "fancyzhang/ag_news", "text"
    splits: ClassVar[dict[Part, str]] = {"train": "train", "test": "test"}


class FPB(_FromFolderOrHub):
    """Data module of the Financial PhraseBank (Malo et al. 2014, 50 % agreement): 4,846 sentences, 3 classes.

    A fifth of each class is held out for tests.
    """

    num_classes: ClassVar[int] = 3
    folder, hub, text_column = "fpb", "takala/financial_phrasebank", "sentence"
    splits: ClassVar[dict[Part, str]] = {"train": "train", "test": "train"}

    def _rows(self, part: Part) -> _Rows:
        whole = super()._rows(part)

        def read() -> tuple[list[str], Labels]:
            texts, labels = whole.read()
            chosen = np.flatnonzero(held_out(labels, 0.2, seed=0) == (part == "test"))
            return [texts[i] for i in chosen], labels[chosen]

        return _Rows(whole.sources, read)


class HuggingFaceText(_Texts):
    """Data module of labelled texts from the Hugging Face hub or a local folder, loaded by `datasets`.

    Args:
        path: name on the hub, or a folder that `datasets.load_dataset` or `load_from_disk` reads.
        tokenizer: `words`, or a tokenizer of transformers: name on the hub, folder, or `package:NAME/FOLDER`.
        name: configuration of the data set, if it has several.
        text_column: name of the column with the texts.
        label_column: name of the column with the labels, whole numbers.
        train_split: name of the split for training.
        test_split: name of the split for evaluation.
        max_length: largest number of tokens in a text; shorter texts are padded.
        train_length: largest number of tokens in a training text; null = max_length.
        vocab_size: number of tokens in the vocabulary of `words`.
        batch_size: number of samples in a batch.
        num_train: number of training texts, evenly spaced over all; null = all.
        num_test: number of test texts, evenly spaced over all; null = all.
    """

    def __init__(
        self,
        path: str,
        tokenizer: str,
        name: str | None = None,
        text_column: str = "text",
        label_column: str = "label",
        train_split: str = "train",
        test_split: str = "test",
        max_length: int = 64,
        train_length: int | None = None,
        vocab_size: int = 20000,
        batch_size: int = 32,
        num_train: int | None = None,
        num_test: int | None = None,
    ) -> None:
        super().__init__(tokenizer, max_length, train_length, vocab_size, batch_size, num_train, num_test)
        self.path, self.name = path, name
        self.text_column, self.label_column = text_column, label_column
        self.splits: dict[Part, str] = {"train": train_split, "test": test_split}
        self._loaded: Any = None

    def prepare_data(self) -> None:
        """Download the data if it is not in the cache of `datasets`.

        Raises:
            BadInput: `datasets` is not installed, or there is no such data set.
        """
        load_splits(self.path, self.name)

    def _home(self) -> tuple[Path, str]:
        return readers.data_root(None), "hf-text"

    def _rows(self, part: Part) -> _Rows:
        if self._loaded is None:
            self._loaded = load_splits(self.path, self.name)
        return _split(self._loaded, self.path, self.splits[part], self.text_column, self.label_column)


def _read_parquet(files: Sequence[Path], text_column: str) -> tuple[list[str], Labels]:
    try:
        import pyarrow.parquet as pq  # type: ignore[import-untyped]
    except ImportError as error:
        raise BadInput(f"reading {files[0]} needs pyarrow ({error}): {installing('hf')}") from error
    texts: list[str] = []
    labels = []
    for file in files:
        table = pq.read_table(file)
        for column in (text_column, "label"):
            if column not in table.column_names:
                raise BadInput(f"{file} has columns {', '.join(table.column_names)}: expected {text_column} and label")
        texts += table[text_column].to_pylist()
        labels.append(table["label"].to_numpy().astype(np.int64))
    return texts, np.concatenate(labels)


def _split(splits: object, path: str, split: str, text_column: str, label_column: str) -> _Rows:
    rows = rows_of(splits, path, split, text_column, label_column)

    def read() -> tuple[list[str], Labels]:
        labels = whole_labels(rows.with_format("numpy")[label_column][:], path, label_column)
        return list(rows[text_column][:]), labels

    return _Rows([path, rows._fingerprint, text_column, label_column], read)


_PARTS = ("tokens", "starts")


class TextFolder(TrainTestData):
    """Data module of the text files in a folder, cut into windows of tokens, for training a language model.

    A sample is `(tokens, targets)`, both int64 of shape `(length,)`; the loss counts every token. The last windows of
    each file are held out for tests. `raafl.data.ByColumn("speaker")` makes each file a client; its value is the file's
    name, or where two files have the same name, the path of each below the folder. Tokens are computed once per machine
    and shared by its processes.

    Args:
        path: folder with the texts in UTF-8; `package:NAME/FOLDER` = a folder of an installed Python package.
        glob: pattern of the files in the folder; `**` stands for any depth.
        tokenizer: tokenizer of transformers: name on the hub, folder, `package:NAME/FOLDER`, or `bytes`, which needs no
            files and has 261 tokens. The model's `vocab_size` must be at least as large.
        length: number of tokens in a window.
        batch_size: number of windows in a batch.
        test_share: share of each file's windows that is held out for tests, between 0 and 1.
        num_train: number of training windows, evenly spaced over all; null = all.
        num_test: number of test windows, evenly spaced over all; null = all.
    """

    def __init__(
        self,
        path: str,
        glob: str = "**/*.txt",
        tokenizer: str = "bytes",
        length: int = 64,
        batch_size: int = 8,
        test_share: float = 0.1,
        num_train: int | None = None,
        num_test: int | None = None,
    ) -> None:
        """Check the arguments; nothing is read yet."""
        super().__init__(batch_size, num_train, num_test)
        at_least("TextFolder: length", length, 1)
        if not 0 < test_share < 1:
            raise BadInput(f"TextFolder: test_share is {test_share}: give a share between 0 and 1, such as 0.1")
        self.path, self.glob, self.length, self.test_share = path, glob, length, test_share
        self._tokenizer = tokenizer

    @property
    def tokenizer(self) -> Any:  # a transformers.PreTrainedTokenizerBase
        """Tokenizer of the texts; it is saved with the model."""
        return load_tokenizer(self._tokenizer)

    def setup(self, stage: str | None = None) -> None:
        """Convert the files to tokens, or memory-map the tokens of an earlier run, and cut them into windows.

        Raises:
            BadInput: the folder, a file or the tokenizer does not exist, a file is not UTF-8, or all files are too
                short.
        """
        if hasattr(self, "train"):
            return
        files = self._files()
        # in the data root: the folder of the texts may be read-only, such as part of an installed package
        facts = [*files, *Tokenizer(self._tokenizer).cache_inputs()]
        tokens, starts = readers.cached(
            facts, readers.data_root(None), "text-folder", lambda: self._read(files), _PARTS
        )
        bounds = starts.tolist()
        pieces = (tokens[start:end] for start, end in pairwise(bounds))
        texts = zip(self._names(files), pieces, strict=True)
        sets = windows_of(texts, self.length, self.test_share)
        if sets is None:
            raise BadInput(
                f"TextFolder: none of the {len(files)} files of {self.path} has 2 windows of {self.length} tokens: lower length"
            )
        self._set(*sets)

    def _names(self, files: list[Path]) -> list[str]:
        """Return a unique name for each file: paths, where names repeat, since files of one name would be one client."""
        names = [file.name for file in files]
        if len(set(names)) == len(names):
            return names
        folder = Path(package_folder(self.path, "path"))
        return [file.relative_to(folder).as_posix() for file in files]

    def _files(self) -> list[Path]:
        folder = Path(package_folder(self.path, "path"))
        files = sorted(path for path in folder.glob(self.glob) if path.is_file()) if folder.is_dir() else []
        if not files:
            reason = f"has no file {self.glob}" if folder.is_dir() else "is no folder"
            raise BadInput(
                f"TextFolder: path is '{self.path}', which {reason}: name a folder of texts, and a glob pattern for "
                "its files"
            )
        return files

    def _read(self, files: list[Path]) -> readers.Arrays:
        """Tokenise all files; return their tokens in one array, and the index at which each begins plus the end, `(files + 1,)`."""
        tokenizer, found, starts = self.tokenizer, [], [0]
        end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        for file in files:
            try:
                text = file.read_text(encoding="utf-8")
            except UnicodeDecodeError as error:
                raise BadInput(
                    f"TextFolder: {file} is not UTF-8 ({error.reason}): convert it, or leave it out"
                ) from None
            ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
            found.append(np.array([*ids, *end], np.int32))
            starts.append(starts[-1] + len(found[-1]))
        return np.concatenate(found), np.array(starts, np.int64)


_ADDRESS = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"


class Shakespeare(TrainTestData):
    """Shakespeare's plays (1.1 MB, 65 different characters) as windows of text, for predicting each next character.

    A sample is `(tokens, targets)`, both of shape `(length,)`; the loss counts every character. A window has text of
    one speaker only. `raafl.data.ByColumn("speaker")` makes each speaker a client, as in McMahan et al. 2017
    (arXiv:1602.05629). The last windows of each speaker are held out for tests.

    Args:
        root: folder that contains `shakespeare/input.txt`; null = the environment variable RAAFL_DATA, or else
            ~/.cache/raafl.
        length: number of characters in a window.
        batch_size: number of windows in a batch.
        min_speeches: smallest number of speeches; speakers with fewer are left out. 20 leaves 98 speakers.
        test_share: share of each speaker's windows that is held out for tests, between 0 and 1.
        download: whether to download the file into `root` if it is missing.
        num_train: number of training windows, evenly spaced over all; null = all.
        num_test: number of test windows, evenly spaced over all; null = all.
    """

    vocab_size: ClassVar[int] = 65

    def __init__(
        self,
        root: str | Path | None = None,
        length: int = 80,
        batch_size: int = 32,
        min_speeches: int = 20,
        test_share: float = 0.1,
        download: bool = True,
        num_train: int | None = None,
        num_test: int | None = None,
    ) -> None:
        super().__init__(batch_size, num_train, num_test)
        if length < 1 or min_speeches < 1:
            raise BadInput(f"Shakespeare: length is {length}, min_speeches {min_speeches}: give at least 1 of each")
        if not 0 < test_share < 1:
            raise BadInput(f"Shakespeare: test_share is {test_share}: give a share between 0 and 1, such as 0.1")
        self.file = readers.data_root(root) / "shakespeare" / "input.txt"
        self.length, self.min_speeches, self.test_share, self.download = length, min_speeches, test_share, download

    def prepare_data(self) -> None:
        """Download the file if it is missing.

        Raises:
            BadInput: the file is missing and cannot be downloaded.
        """
        if self.file.is_file():
            return
        if not self.download:
            raise self._missing("download is off")
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with readers.locked(self.file.parent / ".lock"):
                if not self.file.is_file():
                    self._fetch()
        except OSError as error:
            raise self._missing(f"the download failed: {one_line(str(error))}") from error

    def _fetch(self) -> None:
        with (
            urllib.request.urlopen(_ADDRESS, timeout=DOWNLOAD_TIMEOUT_S) as answer,
            atomic_file(self.file, is_synced=False) as file,
        ):
            shutil.copyfileobj(answer, file)

    def setup(self, stage: str | None = None) -> None:
        """Read the text and cut it into windows of equal length.

        Raises:
            BadInput: the file is missing, or no speaker has enough text.
        """
        if hasattr(self, "train"):
            return
        if not self.file.is_file():
            raise self._missing("call prepare_data first")
        text = self.file.read_text(encoding="utf-8")
        self.characters = "".join(sorted(set(text)))
        codes = {character: code for code, character in enumerate(self.characters)}
        texts = (
            (speaker, torch.tensor([codes[character] for character in "\n".join(speeches)], dtype=torch.uint8))
            for speaker, speeches in sorted(speeches_of(text).items())
            if len(speeches) >= self.min_speeches
        )
        sets = windows_of(texts, self.length, self.test_share)
        if sets is None:
            raise BadInput(
                f"Shakespeare: no speaker has {self.min_speeches} speeches and 2 windows of {self.length} characters: "
                "lower min_speeches or length"
            )
        self._set(*sets)

    def _missing(self, reason: str) -> BadInput:
        return BadInput(
            f"Shakespeare is not in {self.file} ({reason}): set root or the environment variable RAAFL_DATA to the folder "
            "that has shakespeare/input.txt, or use download=True where there is a network"
        )


def speeches_of(text: str) -> dict[str, list[str]]:
    """Split the text into speeches, by speaker. Speeches are separated by blank lines; the first line names the speaker."""
    found: dict[str, list[str]] = {}
    for block in text.split("\n\n"):
        head, _, speech = block.strip("\n").partition("\n")
        if head.endswith(":") and speech:
            found.setdefault(head[:-1], []).append(speech)
    return found
