"""Read a folder of plain texts as windows of tokens, to train a language model from random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from raafl.data import readers
from raafl.data.sources import TrainTestData
from raafl.data.tokens import Tokenizer, load_tokenizer, package_folder, windows_of
from raafl.errors import BadInput, at_least

_PARTS = ("tokens", "starts")


class TextFolder(TrainTestData):
    """Data module of the text files in a folder, cut into windows of tokens, for training a language model.

    A sample is `(tokens, targets)`, both int64 of shape `(length,)`; the loss counts every token. The last windows of
    each file are held out for tests. `raafl.data.ByColumn("speaker")` makes each file a client. Tokens are computed
    once per machine and shared by its processes.

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
        # the tokens are cached apart from the texts, whose folder may be a package's
        facts = [*files, *Tokenizer(self._tokenizer).cache_inputs()]
        tokens, starts = readers.cached(
            facts, readers.data_root(None), "text-folder", lambda: self._read(files), _PARTS
        )
        bounds = starts.tolist()
        texts = ((file.name, tokens[start:end]) for file, start, end in zip(files, bounds, bounds[1:], strict=False))
        sets = windows_of(texts, self.length, self.test_share)
        if sets is None:
            raise BadInput(
                f"TextFolder: none of the {len(files)} files of {self.path} has 2 windows of {self.length} tokens: lower length"
            )
        self._set(*sets)

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
        """Return the tokens of all files, one after the other, and where each starts, with the end of the last."""
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
