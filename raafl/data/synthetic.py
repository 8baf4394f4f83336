"""Generate data for demonstrations without a download: a byte tokenizer, and examples of a simple task."""

from __future__ import annotations

from typing import Any, Final

from raafl.errors import BadInput

BYTES: Final = "bytes"
"""The tokenizer that is made here; its tokens are the same everywhere."""

SUMS: Final = "made:sums"
"""The examples that are made here."""

SPECIAL: Final = ("<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
"""Its tokens 0 to 4; the 256 bytes follow."""

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


def examples(name: str) -> list[dict[str, Any]]:
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
