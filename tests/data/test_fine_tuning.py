"""Examples for language models: which tokens count, padding, packing, and what goes wrong."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("datasets")

from raafl.data import FederatedData, FineTuning, Iid
from raafl.data.fine_tuning import IGNORED, chat, encoder, pack
from raafl.data.tokens import SPECIAL, byte_tokenizer
from raafl.errors import BadInput

PAD, END, _, USER, ASSISTANT = range(len(SPECIAL))
CHAT = [
    {"role": "user", "content": "ab"},
    {"role": "assistant", "content": "c"},
    {"role": "user", "content": "d"},
    {"role": "assistant", "content": "ef"},
]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("RAAFL_DATA", str(tmp_path / "data"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def code(text):
    return byte_tokenizer()(text)["input_ids"]


def lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def read(path, **more):
    data = FineTuning(path, "bytes", **{"max_length": 16, "batch_size": 4, **more})
    data.setup()
    return data


def test_built_in_examples_name_the_extra_that_they_need(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(BadInput, match=r"path is 'made:sums', which needs the package datasets: pip install '.\[hf\]'"):
        read("made:sums")


def test_of_a_chat_only_what_the_assistant_says_counts_with_and_without_the_mark():
    tokenizer = byte_tokenizer()
    (a, b, c, d, e, f) = code("abcdef")
    ids = [USER, a, b, END, ASSISTANT, c, END, USER, d, END, ASSISTANT, e, f, END]
    counted = [5, 6, 11, 12, 13]
    labels = [token if i in counted else IGNORED for i, token in enumerate(ids)]
    assert chat(tokenizer, CHAT) == (ids, labels)
    for mark in ("generation", "endgeneration"):
        tokenizer.chat_template = tokenizer.chat_template.replace("{% " + mark + " %}", "")
    assert chat(tokenizer, CHAT) == (ids, labels)


def test_a_template_that_does_not_tell_what_the_assistant_says_is_refused():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{{ messages | length }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    with pytest.raises(BadInput, match=r"changes earlier messages.* mark them with {% generation %}"):
        chat(tokenizer, CHAT)
    tokenizer.chat_template = None
    with pytest.raises(
        BadInput, match=r"the tokenizer has no chat template, .*: name a file with one as chat_template"
    ):
        chat(tokenizer, CHAT)


def test_of_a_prompt_with_its_completion_the_completion_counts_and_of_a_text_all_but_the_first():
    tokenizer, (a, b, c) = byte_tokenizer(), code("abc")
    completed = encoder(tokenizer, "causal", ("prompt", "completion"), 8)
    assert completed("ab", "c") == ([a, b, c, END], [IGNORED, IGNORED, c, END])
    assert completed("", "c") == ([c, END], [IGNORED, END])  # nothing is there to predict the first from
    assert encoder(tokenizer, "causal", ("text",), 3)("abc") == ([a, b, c], [IGNORED, b, c])  # cut at the end
    assert encoder(tokenizer, "classification", ("text", "label"), 2)("abc", 1) == ([a, b], [1])
    with pytest.raises(BadInput, match="label is 'good': give classes as whole numbers from 0"):
        encoder(tokenizer, "classification", ("text", "label"), 2)("abc", "good")


def test_for_seq2seq_the_encoder_reads_the_prompt_and_answers_are_as_long_as_the_longest(tmp_path):
    (a, b, c) = code("abc")
    translated = encoder(byte_tokenizer(), "seq2seq", ("prompt", "completion"), 3)
    assert translated("ab", "c") == ([a, b], [c, END]) and translated("aaaa", "bbb") == ([a, a, a], [b, b, b])
    path = lines(tmp_path / "a.jsonl", [{"prompt": "a" * n, "completion": "b" * n} for n in (1, 3)])
    data = read(path, test_path=path, task="seq2seq", max_length=5)
    (batch,) = data.test_dataloader()
    assert batch["input_ids"].tolist() == [[a, PAD, PAD, PAD, PAD], [a, a, a, PAD, PAD]]
    assert batch["attention_mask"].sum(1).tolist() == [1, 3]
    assert batch["labels"].tolist() == [[b, END, IGNORED, IGNORED], [b, b, b, END]]


def test_packing_keeps_groups_apart_and_order():
    rows = pack(np.array([3, 4, 2, 5, 1]), np.array([0, 1, 0, 0, 1]), 6)
    assert [row.tolist() for row in rows] == [[0, 2], [3], [1, 4]]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_files_are_read_split_and_padded(kind, tmp_path):
    rows = [{"prompt": "ab", "answer": str(i), "author": "xy"[i % 2]} for i in range(10)]
    path = lines(tmp_path / "a.jsonl", rows)
    if kind == "parquet":
        import datasets

        path = str(tmp_path / "a.parquet")
        datasets.Dataset.from_list(rows).to_parquet(path)
    data = read(path, columns={"completion": "answer", "group": "author"}, test_share=0.2, max_length=6)
    assert (len(data.train), len(data.test)) == (8, 2)
    batch = next(iter(data.test_dataloader()))
    assert batch.keys() == {"input_ids", "labels"}
    a, b = code("ab")
    for ids, labels in zip(batch["input_ids"].tolist(), batch["labels"].tolist(), strict=True):
        digit = ids[2]
        assert ids == [a, b, digit, END, PAD, PAD] and digit in code("0123456789")
        assert labels == [IGNORED, IGNORED, digit, END, IGNORED, IGNORED]
    for i, row in enumerate(data.train):  # the author of an even number is x, group 0
        assert int(data.train.group[i]) == code("0123456789").index(int(row["input_ids"][2])) % 2
    assert data.tokenizer.chat_template


def test_batches_are_padded_to_their_longest_row_and_the_longest_come_first(tmp_path):
    path = lines(tmp_path / "a.jsonl", [{"text": "a" * n} for n in (2, 7, 4, 3, 5)])
    test = lines(tmp_path / "b.jsonl", [{"text": "a" * n} for n in (1, 2)])
    data = read(path, test_path=test, padding="longest")
    assert [len(row["input_ids"]) for row in data.train] == [8, 6, 5, 4, 3]  # and the end of each
    assert next(iter(data.test_dataloader()))["input_ids"].shape == (2, 3)


def test_classified_texts_have_masks_and_labels_for_partitions(tmp_path):
    path = lines(tmp_path / "a.jsonl", [{"text": "a" * (i + 1), "label": i % 3} for i in range(6)])
    data = read(path, test_path=path, task="classification")
    batch = next(iter(data.test_dataloader()))
    assert batch["labels"].tolist() == [0, 1, 2, 0] and data.train.labels.tolist() == [0, 1, 2, 0, 1, 2]
    assert batch["attention_mask"].sum(1).tolist() == [1, 2, 3, 4]


def test_what_has_nothing_to_learn_is_left_out_with_a_warning(tmp_path, caplog):
    path = lines(tmp_path / "a.jsonl", [{"prompt": "a" * n, "completion": "b"} for n in (1, 2, 30)])
    data = read(path, test_path=path)
    assert len(data.train) == 2
    assert "1 of 3 examples are left out: none of their tokens within max_length 16 counts" in caplog.text
    with pytest.raises(
        BadInput, match=r"no example of .* has a token that counts in the loss within max_length 2: raise max_length"
    ):
        read(lines(tmp_path / "b.jsonl", [{"prompt": "aaa", "completion": "b"}]), max_length=2)


def test_mistakes_name_the_remedy(tmp_path):
    path = lines(tmp_path / "a.jsonl", [{"question": "a"}])
    with pytest.raises(
        BadInput, match=r"has columns question: for task causal it needs messages, or prompt and completion, or text"
    ):
        read(path)
    with pytest.raises(BadInput, match=r"path is 'made:times': give made:sums, the only"):
        read("made:times")
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(BadInput, match=r"give a file that ends in \.jsonl"):
        read(str(tmp_path / "a.txt"))
    for fields, message in (
        ({"task": "classification", "packing": True}, "packing is on, but task is classification"),
        ({"task": "translation"}, "task is 'translation': .*causal, classification, seq2seq"),
        ({"max_length": 1}, "max_length is 1: give 2 or more"),
        ({"test_share": 1.0}, "test_share is 1.0: give a share"),
        ({"padding": "left"}, "padding is 'left': known: longest, max_length"),
    ):
        with pytest.raises(BadInput, match=message):
            FineTuning("a", "bytes", **fields)


def test_packed_rows_have_the_loss_of_their_examples_apart(tmp_path):
    """Attention stays within an example: positions that begin anew tell transformers where one ends."""
    from model_zoo import HFCausalLM

    path = lines(tmp_path / "a.jsonl", [{"prompt": "q" * n, "completion": "abc"[: n + 1]} for n in (1, 2, 1)])
    module = HFCausalLM("made:llama").eval()
    apart, packed = (read(path, test_path=path, packing=packing, max_length=32) for packing in (False, True))
    assert (len(apart.train), len(packed.train)) == (3, 1)
    with torch.no_grad():
        (one,), (three,) = (
            [module.training_step(batch, 0) for batch in data.train_dataloader()] for data in (packed, apart)
        )
    torch.testing.assert_close(one, three)  # both are means over the same tokens
    spoilt = next(iter(packed.train_dataloader())) | {"position_ids": torch.arange(32)[None]}
    assert not torch.allclose(module.training_step(spoilt, 0), three, atol=1e-3)


@pytest.mark.parametrize("padding", ["max_length", "longest"])
def test_tokens_of_a_sample_are_without_padding_and_not_those_of_the_longest(tmp_path, padding):
    path = lines(tmp_path / "texts.jsonl", [{"text": "a" * (1 + number % 10)} for number in range(640)])
    data = FederatedData(FineTuning(path, "bytes", max_length=32, padding=padding), Iid(), 2)
    own = [len(data.datamodule.train[row]["input_ids"]) for row in range(len(data.datamodule.train))]
    assert data.tokens_per_sample() == pytest.approx(sum(own) / len(own), rel=0.15)
