"""Load examples for fine-tuning a transformers language model: chats, prompts with completions, plain and classified texts.

An ordinary LightningDataModule. A batch is a mapping as transformers' models take it: ``input_ids`` and ``labels``, and where
needed ``attention_mask`` and ``position_ids``. Texts are tokenised once per machine; its ranks share the tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

from raafl.data import readers
from raafl.data.readers import load_splits, rows_of
from raafl.data.sources import TrainTestData
from raafl.data.tokens import Tokenizer, load_tokenizer, made_examples
from raafl.errors import BadInput, at_least, installing, one_of

_log = logging.getLogger(__name__)
_PARTS = ("ids", "starts", "labels", "label_starts", "group")


@dataclass(frozen=True)
class _Encoded:
    """Tokens and labels of all examples, each concatenated in one array, which may be memory-mapped."""

    ids: Tensor  # tokens of all examples, concatenated
    starts: Tensor  # `(n + 1,)`, index in ``ids`` at which each example begins, and the length of ``ids``
    labels: Tensor  # labels of all examples; see `raafl.data.fine_tuning.Tokens`
    label_starts: Tensor  # `(n + 1,)`, index in ``labels`` at which each example begins, and the length of ``labels``
    # `(n,)`, number of the person or group that each example belongs to; all 0 without such a column
    group: Tensor

    def __len__(self) -> int:
        return len(self.group)

    def of(self, example: int) -> tuple[Tensor, Tensor]:
        """Return the tokens and labels of one example as new int64 tensors."""
        (a, b), (c, d) = self.starts[example : example + 2].tolist(), self.label_starts[example : example + 2].tolist()
        return self.ids[a:b].to(torch.int64), self.labels[c:d].to(torch.int64)


class _TokenRows(Dataset[dict[str, Tensor]]):
    """Data set of token rows with labels; a row is one example, or several packed ones.

    `group`: `(n,)`, number of the person or group that each row belongs to, for partitions by group. `labels`: `(n,)`,
    class of each row; only for classification.
    """

    def __init__(self, encoded: _Encoded, rows: Sequence[Ints], *, packed: bool, classified: bool) -> None:
        """Store which examples make up each row; their tokens are copied only when the row is read."""
        self._encoded, self._rows, self._packed, self._classified = encoded, rows, packed, classified
        firsts = torch.tensor([int(row[0]) for row in rows])
        self.group = encoded.group[firsts]
        if classified:
            self.labels = encoded.labels[firsts].to(torch.int64)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return one unpadded row: int64 ``input_ids``, ``labels`` (a scalar if classified), and ``position_ids`` if packed."""
        ids, labels = zip(*(self._encoded.of(int(example)) for example in self._rows[index]), strict=True)
        if self._classified:
            return {"input_ids": ids[0], "labels": labels[0][0]}
        row = {"input_ids": torch.cat(ids), "labels": torch.cat(labels)}
        return {**row, "position_ids": torch.cat([torch.arange(len(one)) for one in ids])} if self._packed else row


@dataclass(frozen=True)
class _Padding:
    """Collate function that pads token rows at their ends to one length."""

    token: int  # token that pads ``input_ids``
    length: int | None  # length of all batches; None = that of the longest row in the batch
    num_labels: int | None  # number of labels in each row, for seq2seq; None = as many as tokens
    # whether to add ``attention_mask``, 1 at tokens, 0 at padding; a causal model needs none, since padding comes last
    masked: bool

    def __call__(self, rows: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Collate rows into one batch."""
        batch = {name: self._padded([row[name] for row in rows], name) for name in rows[0]}
        if self.masked:
            ones = [torch.ones_like(row["input_ids"]) for row in rows]
            batch["attention_mask"] = self._padded(ones, "attention_mask")
        return batch

    def _padded(self, values: list[Tensor], name: str) -> Tensor:
        if values[0].dim() == 0:
            return torch.stack(values)
        value = {"input_ids": self.token, "labels": IGNORED}.get(name, 0)
        length = self.length if name != "labels" or self.num_labels is None else self.num_labels
        padded = pad_sequence(values, batch_first=True, padding_value=value)
        return padded if length is None else F.pad(padded, (0, length - padded.shape[1]), value=value)


class FineTuning(TrainTestData):
    """Data module with examples for fine-tuning a transformers model: causal, encoder-decoder or classifier.

    The data's columns determine the form of the examples: ``messages`` (a chat: mappings with role and content),
    ``prompt`` and ``completion``, or ``text``; for seq2seq ``prompt`` (read by the encoder) and ``completion``; for
    classification ``text`` and ``label``. The loss counts the assistant's messages of a chat, the completion of a
    prompt, or the whole text.

    Args:
        path: file (JSONL, parquet, CSV), folder, or name on the hub that `datasets` loads; `made:sums` = generated
            sums.
        tokenizer: tokenizer of transformers: name on the hub, folder, `package:NAME/FOLDER`, or `bytes`, which needs no
            files.
        task: kind of task: causal, seq2seq or classification.
        test_path: path of the test examples, as for ``path``; null = the split `test` of ``path``, or a share of its
            examples.
        test_share: share of the examples that is held out for tests if there is no test set.
        name: configuration of the data set, if it has several.
        columns: names of the data's columns if they differ, as in `{prompt: question, completion: answer}`. `{group:
            author}` names the column with an example's author, for `ByColumn("group")`.
        chat_template: file with a Jinja template for chats; null = the template of the tokenizer.
        max_length: largest number of tokens in an example; for seq2seq, in its prompt and in its completion each.
        packing: whether to fill training rows of max_length tokens with several examples of one group, each of which
            sees only its own tokens. A module of your own must call its model with use_cache=False, since transformers
            ignores the restarting ``position_ids`` of a row with a cache.
        padding: length to which rows are padded: max_length, or longest (that of the longest row in a batch; costs are
            then predicted from the longest rows of all). Completions for seq2seq are always padded to the longest of
            all.
        batch_size: number of rows in a batch.
        num_train: number of training rows, evenly spaced over all; null = all.
        num_test: number of test examples, evenly spaced over all; null = all.
    """

    def __init__(
        self,
        path: str,
        tokenizer: str,
        task: Task = "causal",
        test_path: str | None = None,
        test_share: float = 0.1,
        name: str | None = None,
        columns: dict[str, str] | None = None,
        chat_template: str | None = None,
        max_length: int = 512,
        packing: bool = False,
        padding: Literal["max_length", "longest"] = "max_length",
        batch_size: int = 8,
        num_train: int | None = None,
        num_test: int | None = None,
    ) -> None:
        """Check the arguments; nothing is read yet."""
        super().__init__(batch_size, num_train, num_test)
        one_of("FineTuning: task", task, FORMS)
        one_of("FineTuning: padding", padding, ("max_length", "longest"))
        at_least("FineTuning: max_length", max_length, 2)
        if not 0 < test_share < 1:
            raise BadInput(f"FineTuning: test_share is {test_share}: give a share between 0 and 1, such as 0.1")
        if packing and task != "causal":
            raise BadInput(
                f"FineTuning: packing is on, but task is {task}: only causal models can have several examples in a "
                "row; turn packing off"
            )
        self.path, self.test_path, self.test_share, self.name = path, test_path, test_share, name
        self.task, self.columns, self.max_length = task, dict(columns or {}), max_length
        self.packing, self.padding = packing, padding
        self._tokenizer, self._chat_template = tokenizer, chat_template

    @property
    def tokenizer(self) -> Any:  # a transformers.PreTrainedTokenizerBase
        """Tokenizer, with ``chat_template`` in place of its own template if one was given; it is saved with the model."""
        tokenizer = load_tokenizer(self._tokenizer)
        if self._chat_template is not None:
            tokenizer.chat_template = Path(self._chat_template).read_text(encoding="utf-8-sig")
        return tokenizer

    def setup(self, stage: str | None = None) -> None:
        """Convert the examples to tokens, or memory-map the tokens that an earlier run has stored.

        Raises:
            BadInput: the data, the tokenizer or a column does not exist.
        """
        if hasattr(self, "train"):
            return
        splits = self._splits(self.path)
        whole = self._encoded(splits, self.path, "train")
        tests = splits if self.test_path is None else self._splits(self.test_path)
        split = next((one for one in ("test", "validation") if one in tests), None if tests is splits else "train")
        if split is not None:
            test, train_rows = self._encoded(tests, self.test_path or self.path, split), np.arange(len(whole))
            test_rows = np.arange(len(test))
        else:
            order = np.random.Generator(np.random.PCG64(0)).permutation(len(whole))
            num_test = max(1, round(self.test_share * len(order)))
            test, test_rows, train_rows = whole, np.sort(order[:num_test]), np.sort(order[num_test:])
        classified = self.task == "classification"
        self._num_labels = int(max(one.label_starts.diff().max() for one in (whole, test)))
        self._set(
            _TokenRows(whole, self._rows(whole, train_rows), packed=self.packing, classified=classified),
            _TokenRows(test, list(test_rows[:, None]), packed=False, classified=classified),
        )

    def train_dataloader(self) -> DataLoader[Any]:
        """Return shuffled batches of the training set."""
        return DataLoader(self.train, self.batch_size, shuffle=True, collate_fn=self._collate())

    def test_dataloader(self) -> DataLoader[Any]:
        """Return batches of the test set, in order."""
        return DataLoader(self.test, self.batch_size, collate_fn=self._collate())

    def _collate(self) -> _Padding:
        tokenizer = self.tokenizer
        token = next((one for one in (tokenizer.pad_token_id, tokenizer.eos_token_id) if one is not None), 0)
        length = self.max_length if self.padding == "max_length" else None
        return _Padding(token, length, self._num_labels if self.task == "seq2seq" else None, self.task != "causal")

    def _rows(self, encoded: _Encoded, examples: Ints) -> list[Ints]:
        """Assign examples to rows: with packing as many to a row as fit, else one."""
        lengths = np.diff(encoded.starts.numpy())[examples].astype(np.int64)
        if self.packing:
            return [examples[row] for row in pack(lengths, encoded.group.numpy()[examples], self.max_length)]
        if self.padding == "longest":
            # longest first: costs are predicted from the first rows, and must not be underestimated
            examples = examples[np.argsort(-lengths, kind="stable")]
        return list(examples[:, None])

    def _splits(self, path: str) -> Any:
        if not path.startswith("made:"):
            return load_splits(path, self.name)
        try:
            from datasets import Dataset as Rows
        except ImportError as error:
            raise BadInput(f"path is '{path}', which needs the package datasets: {installing('hf')}") from error
        return {"train": Rows.from_list(made_examples(path))}

    def _encoded(self, splits: object, path: str, split: str) -> _Encoded:
        rows = rows_of(splits, path, split)
        form = self._form(path, rows.column_names)
        cells = [self.columns.get(name, name) for name in form]
        group = self.columns.get("group")
        if group is not None:
            rows_of(splits, path, split, group)
        version = "made" if path.startswith("made:") else rows._fingerprint
        facts = [
            path,
            version,
            split,
            self.task,
            repr(form),
            repr(cells),
            repr(group),
            f"max_length {self.max_length}",
            *Tokenizer(self._tokenizer).cache_inputs(),
            *([] if self._chat_template is None else [Path(self._chat_template)]),
        ]
        found = readers.cached(
            facts, readers.data_root(None), f"fine-tuning-{split}", lambda: self._read(rows, form, cells, group), _PARTS
        )
        return _Encoded(*found)

    def _form(self, path: str, names: Sequence[str]) -> tuple[str, ...]:
        """Find which of the accepted column sets in `FORMS` the columns ``names`` contain; raise `BadInput` if none."""
        forms = FORMS[self.task]
        found = next((form for form in forms if all(self.columns.get(one, one) in names for one in form)), None)
        if found is None:
            wanted = ", or ".join(" and ".join(form) for form in forms)
            raise BadInput(
                f"data: '{path}' has columns {', '.join(names)}: for task {self.task} it needs {wanted}: rename "
                "the columns, or set columns to a mapping from the names that it needs to yours"
            )
        return found

    def _read(self, rows: Any, form: Sequence[str], cells: Sequence[str], group: str | None) -> readers.Arrays:
        """Tokenise all rows, leaving out those in which no token has a label, and return them as arrays."""
        encode = encoder(self.tokenizer, self.task, form, self.max_length)
        encoded = [encode(*values) for values in zip(*(rows[cell] for cell in cells), strict=True)]
        kept = [i for i, (ids, labels) in enumerate(encoded) if ids and any(label != IGNORED for label in labels)]
        if len(kept) < len(encoded):
            _log.warning(
                "FineTuning: %d of %d examples are left out: none of their tokens within max_length %d counts in "
                "the loss",
                len(encoded) - len(kept),
                len(encoded),
                self.max_length,
            )
        if not kept:
            raise BadInput(
                f"data: no example of '{self.path}' has a token that counts in the loss within max_length "
                f"{self.max_length}: raise max_length"
            )
        whose = (
            np.zeros(len(encoded), np.int64) if group is None else np.unique(list(rows[group]), return_inverse=True)[1]
        )
        return *_flat([encoded[i][0] for i in kept]), *_flat([encoded[i][1] for i in kept]), whose[kept]


def _flat(lists: Sequence[Sequence[int]]) -> tuple[npt.NDArray[np.int32], Ints]:
    """Concatenate lists; return the values, and the index at which each list begins plus the total length, `(n + 1,)`."""
    starts = np.cumsum([0, *map(len, lists)], dtype=np.int64)
    return np.fromiter(chain.from_iterable(lists), np.int32, count=int(starts[-1])), starts


Task = Literal["causal", "seq2seq", "classification"]
Tokens = tuple[list[int], list[int]]
"""Tokens of an example, and its labels: each token itself or -100, the tokens of an answer, or one class."""
Ints = npt.NDArray[np.int64]

IGNORED: Final = -100
"""Label of a token that the loss leaves out."""

FORMS: Final[Mapping[Task, tuple[tuple[str, ...], ...]]] = {
    "causal": (("messages",), ("prompt", "completion"), ("text",)),
    "seq2seq": (("prompt", "completion"),),
    "classification": (("text", "label"),),
}
"""Columns in which the examples of a task may come; the first that are there are taken."""


def encoder(tokenizer: Any, task: Task, form: Sequence[str], max_length: int) -> Callable[..., Tokens]:
    """Return a function that converts one row of the data to tokens and labels."""

    def tokens(text: str, **more: Any) -> list[int]:
        return list(tokenizer(text, truncation=True, max_length=max_length, **more)["input_ids"])

    def ended(ids: list[int]) -> list[int]:
        return ids + (end if ids[-1:] != end else [])

    def plain(text: str) -> Tokens:
        return _counted(ended(tokens(text)), 1, max_length)

    def translated(prompt: str, completion: str) -> Tokens:
        # some tokenizers, such as Marian's, encode targets differently from inputs
        written = tokenizer(text_target=completion, truncation=True, max_length=max_length)["input_ids"]
        return tokens(prompt), ended(list(written))[:max_length]

    def completed(prompt: str, completion: str) -> Tokens:
        before = tokens(prompt)
        return _counted(before + tokens(completion, add_special_tokens=False) + end, len(before), max_length)

    def classified(text: str, label: int) -> Tokens:
        if type(label) is not int:
            raise BadInput(f"data: label is {label!r}: give classes as whole numbers from 0")
        return tokens(text), [label]

    def chatted(messages: Sequence[Mapping[str, Any]]) -> Tokens:
        ids, labels = chat(tokenizer, messages)
        return ids[:max_length], labels[:max_length]

    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    if task == "classification":
        return classified
    if task == "seq2seq":
        return translated
    if form[0] == "messages":
        return chatted
    return completed if form[0] == "prompt" else plain


def chat(tokenizer: Any, messages: Sequence[Mapping[str, Any]]) -> Tokens:
    """Convert a chat to tokens by the tokenizer's template; only the assistant's messages have labels.

    The assistant's messages are those that the template marks with ``{% generation %}``. If it has no such marks, each
    of these messages is found by formatting the chat twice, without and with the message; the additional tokens are the
    message.

    Raises:
        BadInput: the tokenizer has no template, or the template changes the text of earlier messages.
    """
    template = str(tokenizer.chat_template or "")
    if not template:
        raise BadInput(
            "data: the tokenizer has no chat template, and samples with a column 'messages' need one: name a file with one "
            "as chat_template, or give columns 'prompt' and 'completion'"
        )
    if "endgeneration" in template:
        found = tokenizer.apply_chat_template(list(messages), return_dict=True, return_assistant_tokens_mask=True)
        pairs = zip(found["input_ids"], found["assistant_masks"], strict=True)
        return list(found["input_ids"]), [token if said else IGNORED for token, said in pairs]
    ids: list[int] = []
    labels: list[int] = []
    for end in (i for i, message in enumerate(messages) if message["role"] == "assistant"):
        for upto, counts in ((messages[:end], False), (messages[: end + 1], True)):
            written = tokenizer.apply_chat_template(list(upto), add_generation_prompt=not counts, return_dict=False)
            if written[: len(ids)] != ids:
                raise BadInput(
                    "data: the chat template changes earlier messages, so the assistant's words cannot be found: "
                    "mark them with {% generation %} and {% endgeneration %} in a template file, and name it "
                    "as chat_template"
                )
            labels += written[len(ids) :] if counts else [IGNORED] * (len(written) - len(ids))
            ids = list(written)
    return ids, labels


def pack(lengths: Ints, groups: Ints, max_length: int) -> list[Ints]:
    """Put several examples into one row, as long as they belong to the same group and ``max_length`` tokens are not exceeded.

    Returns:
        Indices of the examples in each row, in order.
    """
    rows: list[list[int]] = []
    for group in np.unique(groups):
        left = 0
        for example in np.flatnonzero(groups == group):
            if lengths[example] > left:
                rows.append([])
                left = max_length
            rows[-1].append(int(example))
            left -= int(lengths[example])
    return [np.array(row, np.int64) for row in rows]


def _counted(ids: list[int], first: int, max_length: int) -> Tokens:
    """Label each token from index ``first`` on with itself; the very first token gets no label, as no token predicts it."""
    first = max(first, 1)
    return ids[:max_length], ([IGNORED] * first + ids[first:])[:max_length]
