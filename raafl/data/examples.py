"""Turn language-model examples (chats, prompts with completions, plain and classified texts) into tokens and labels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from raafl.errors import BadInput

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
        # a tokenizer may write what a decoder says in another way, as Marian's does
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
    """Label the tokens from ``first`` on with themselves; the very first token has no label, since nothing predicts it."""
    first = max(first, 1)
    return ids[:max_length], ([IGNORED] * first + ids[first:])[:max_length]
