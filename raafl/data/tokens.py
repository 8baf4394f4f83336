"""Tokenise texts once per machine, pad them to one length, and gather many at a time."""

from __future__ import annotations

import importlib.util
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from raafl.data.loaders import GatherDataset
from raafl.errors import BadInput, installing

Ints = npt.NDArray[np.int32]
WORDS = "words"
"""Name of the tokenizer whose vocabulary is the most frequent words of the training texts."""

_UNKNOWN = 1  # token id of unknown words; 0 is padding
_WORD = re.compile(r"[a-z0-9]+(?:'[a-z]+)?")
_FILES = (
    *("*token*.json", "vocab.*", "merges.txt", "*.model", "*.spm", "*.bpe", "*.codes", "*.tiktoken", "tekken.json"),
    *("chat_template.jinja", "chat_templates/*.jinja"),
)
"""Patterns of the files in which tokenizers of transformers have their vocabulary, rules, added tokens and templates."""


class TensorTokens(GatherDataset):
    """Labelled texts as tokens, padded to one length; attention masks are computed when samples are gathered.

    `tokens`: tokens of the texts, `(n, length)` whole numbers, padded at the end; may be a memory-mapped file.

    Raises:
        BadInput: the shapes do not match.
    """

    on_any_device = True

    def __init__(self, tokens: torch.Tensor, lengths: torch.Tensor, labels: torch.Tensor) -> None:
        if tokens.ndim != 2 or not len(tokens) == len(lengths) == len(labels):
            raise BadInput(
                f"tokens are {tuple(tokens.shape)} with {len(lengths)} lengths and {len(labels)} labels: "
                "give tokens (n, length), one length and one label each"
            )
        self.tokens, self.lengths, self.labels = tokens, lengths, labels.to(torch.int64)
        self._positions = torch.arange(tokens.shape[1])

    def __len__(self) -> int:
        return len(self.labels)

    def gather(self, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return int64 tokens `(n, length)`, attention masks of the same shape (1 at tokens), and labels `(n,)`."""
        lengths = self.lengths.index_select(0, indices)
        mask = (self._positions < lengths.unsqueeze(1)).to(torch.int64)
        return self.tokens.index_select(0, indices).to(torch.int64), mask, self.labels.index_select(0, indices)


class TensorWindows(GatherDataset):
    """Windows of text for predicting each next token, every window from one speaker or file.

    Raises:
        BadInput: the shapes do not match.
    """

    on_any_device = True

    def __init__(self, windows: torch.Tensor, speaker: Sequence[str]) -> None:
        if windows.ndim != 2 or windows.shape[1] < 2 or len(windows) != len(speaker):
            raise BadInput(
                f"windows are {tuple(windows.shape)} with {len(speaker)} speakers: "
                "give windows (n, length + 1) and one speaker each"
            )
        self.windows, self.speaker = windows, list(speaker)
        numbers = {name: number for number, name in enumerate(sorted(set(speaker)))}
        self.labels = torch.tensor([numbers[name] for name in speaker], dtype=torch.int64)

    def __len__(self) -> int:
        return len(self.speaker)

    def gather(self, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return int64 tokens and targets, both `(n, length)`; the targets are the tokens shifted by one."""
        windows = self.windows.index_select(0, indices).to(torch.int64)
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def windows_of(
    texts: Iterable[tuple[str, torch.Tensor]], length: int, test_share: float
) -> tuple[TensorWindows, TensorWindows] | None:
    """Cut texts into windows, of which the last ones of each text are the test set; None if no text is long enough.

    A window has ``length + 1`` tokens and shares one with the next window; tokens that fill no window are left out.

    Returns:
        The training set and the test set.
    """
    train: list[tuple[str, torch.Tensor]] = []
    test: list[tuple[str, torch.Tensor]] = []
    for name, tokens in texts:
        num_windows = max(0, (len(tokens) - 1) // length)
        num_test = max(1, round(test_share * num_windows))
        if num_windows > num_test:
            windows = tokens.unfold(0, length + 1, length)
            train.append((name, windows[:-num_test]))
            test.append((name, windows[-num_test:]))
    return (_joined(train), _joined(test)) if train else None


def _joined(parts: Sequence[tuple[str, torch.Tensor]]) -> TensorWindows:
    names = [name for name, windows in parts for _ in range(len(windows))]
    return TensorWindows(torch.cat([windows for _, windows in parts]), names)


@dataclass(frozen=True)
class Tokenizer:
    """Description of a tokenizer by its name; it is loaded when it is needed."""

    # `words`, or a transformers tokenizer: its name on the hub, a folder, or `package:NAME/FOLDER` in a Python package
    name: str
    vocab_size: int = 20000  # size of the vocabulary of `words`, with padding (0) and unknown words (1)

    def __post_init__(self) -> None:
        if self.vocab_size < 3:
            raise BadInput(f"vocab_size is {self.vocab_size}: give 3 or more (0 is padding, 1 an unknown word)")

    def cache_inputs(self) -> list[Path | str]:
        """List the tokenizer's files, or its name if it has none; cached tokens are valid as long as these are unchanged."""
        if self.name == WORDS:
            return [f"{WORDS} {self.vocab_size}"]
        where = Path(package_folder(self.name))
        found = {path for pattern in _FILES for path in where.glob(pattern) if path.is_file()} if where.is_dir() else ()
        files: list[Path | str] = [*sorted(found)]
        return files or [self.name]

    def encode(
        self, texts: Sequence[str], max_length: int, training_texts: Callable[[], Sequence[str]]
    ) -> tuple[Ints, Ints]:
        """Convert texts to tokens of one length, cut or padded at the end; return them and each text's own length.

        Raises:
            BadInput: the tokenizer does not exist.
        """
        if self.name == WORDS:
            numbers = vocabulary(training_texts(), self.vocab_size)
            encoded = [[numbers.get(word, _UNKNOWN) for word in _words(text)] for text in texts]
            return _padded(encoded, max_length, 0)
        tokenizer = load_tokenizer(self.name)
        found = tokenizer(list(texts), truncation=True, max_length=max_length, return_attention_mask=False)
        ids = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
        return _padded(found["input_ids"], max_length, next(token for token in ids if token is not None))


def vocabulary(texts: Sequence[str], vocab_size: int) -> dict[str, int]:
    """Assign the ids 2 to vocab_size - 1 to the most frequent words of some texts, in lower case.

    Words of equal frequency are ordered alphabetically.
    """
    counts = Counter(word for text in texts for word in _words(text))
    ranked = sorted(counts, key=lambda word: (-counts[word], word))[: vocab_size - 2]
    return {word: number for number, word in enumerate(ranked, start=_UNKNOWN + 1)}


def package_folder(name: str, field: str = "tokenizer") -> str:
    """Return the path of the folder that `package:NAME/FOLDER` names in a Python package; return any other name unchanged.

    Raises:
        BadInput: the package is not installed or has no such folder.
    """
    scheme, _, rest = name.partition(":")
    if scheme != "package" or not rest:
        return name
    package, _, folder = rest.partition("/")
    # top-level names only: for a dotted name `find_spec` would import the parent package
    spec = importlib.util.find_spec(package) if package.isidentifier() and package != "__main__" else None
    # without an origin it is no package, but a folder on `sys.path`
    spec = spec if spec is not None and spec.origin is not None else None
    for root in (spec.submodule_search_locations or []) if spec else []:
        if (Path(root) / folder).is_dir():
            return str(Path(root) / folder)
    reason = (
        f"package {package} has no folder '{folder}': correct the folder's name"
        if spec
        else f"package {package} is not installed: install it with pip"
    )
    raise BadInput(f"{field} is '{name}', but {reason}, or give the path of another folder")


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


def _padded(encoded: Sequence[Sequence[int]], max_length: int, padding: int) -> tuple[Ints, Ints]:
    tokens = np.full((len(encoded), max_length), padding, np.int32)
    lengths = np.array([min(len(row), max_length) for row in encoded], np.int32)
    for out, row, length in zip(tokens, encoded, lengths, strict=True):
        out[:length] = row[:length]
    return tokens, lengths


def load_tokenizer(name: str) -> Any:  # a transformers.PreTrainedTokenizerBase
    """Load a tokenizer of transformers.

    Raises:
        BadInput: the tokenizer does not exist, or transformers is not installed.
    """
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise BadInput(f"tokenizer is '{name}', which needs the package transformers: {installing('hf')}") from error
    if name == BYTES:
        return byte_tokenizer()
    try:
        return AutoTokenizer.from_pretrained(package_folder(name), trust_remote_code=False)
    except BadInput:
        raise
    except (OSError, ValueError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise BadInput(
            f"tokenizer is '{name}', which cannot be loaded ({reason}): give a folder with a tokenizer, a name on the hub "
            f"(and a network to fetch it; HF_HUB_OFFLINE unset), '{BYTES}' or '{WORDS}'"
        ) from error


BYTES: Final = "bytes"
"""Name of the built-in tokenizer of bytes."""

SUMS: Final = "made:sums"
"""Name of the built-in examples (sums to answer)."""

SPECIAL: Final = ("<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
"""Tokens 0 to 4 of the tokenizer of bytes; the 256 bytes follow."""

_CHAT = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' }}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def byte_tokenizer() -> object:  # a transformers.PreTrainedTokenizerFast
    """Build a tokenizer with one token for each byte of UTF-8, five special tokens, and a template for chats."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    signs = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate((*SPECIAL, *signs))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        pad_token=SPECIAL[0],
        eos_token=SPECIAL[1],
        chat_template=_CHAT,
        additional_special_tokens=list(SPECIAL[2:]),
    )


def made_examples(name: str) -> list[dict[str, Any]]:
    """Generate the examples of the data set ``made:NAME``. Only ``made:sums`` exists: chats and prompts that ask for a sum.

    The two numbers to add are below 32.

    Raises:
        BadInput: there is no data set of that name.
    """
    if name != SUMS:
        raise BadInput(
            f"data: path is '{name}': give {SUMS}, the only generated data set, or a file, a folder or a name on the hub"
        )
    return [
        {
            "messages": [{"role": "user", "content": f"{a}+{b}"}, {"role": "assistant", "content": str(a + b)}],
            "prompt": f"{a}+{b}",
            "completion": str(a + b),
        }
        for a in range(32)
        for b in range(32)
    ]
