"""Load Shakespeare's plays by character, with the speakers as natural clients."""

from __future__ import annotations

import shutil
import urllib.request
from pathlib import Path
from typing import ClassVar

import torch

from raafl.atomic_file import atomic_file
from raafl.data import readers
from raafl.data.sources import DOWNLOAD_TIMEOUT_S, TrainTestData
from raafl.data.tokens import windows_of
from raafl.errors import BadInput

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
            raise self._missing(f"the download failed: {error}") from error

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
