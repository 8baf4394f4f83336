import numpy as np
import pytest
import torch

from raafl.data import ClientData, TensorTokens, TensorWindows
from raafl.data.labels import Columns, labels_of
from raafl.data.tokens import Tokenizer, vocabulary, windows_of
from raafl.errors import BadInput

TEXTS = ["The cat sat, the CAT ran", "a dog sat"]


def never():
    raise AssertionError("the training texts are not needed")


def test_a_vocabulary_has_the_most_frequent_words_and_ties_in_order():
    # the: 2, cat: 2, sat: 2, then a, dog, ran once each
    assert vocabulary(TEXTS, 7) == {"cat": 2, "sat": 3, "the": 4, "a": 5, "dog": 6}
    assert vocabulary(["it's 9 o'clock"], 99) == {"9": 2, "it's": 3, "o'clock": 4}


def test_words_are_cut_and_padded_and_unknown_ones_are_1():
    tokens, lengths = Tokenizer("words", 5).encode(["The cat ran", "Sat the cat the cat the", ""], 4, lambda: TEXTS)
    assert tokens.tolist() == [[4, 2, 1, 0], [3, 4, 2, 4], [0, 0, 0, 0]] and lengths.tolist() == [3, 4, 0]


@pytest.fixture
def tokenizer_folder(tmp_path):
    """A tokenizer of transformers whose padding is token 3."""
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    vocab = {"[UNK]": 0, "cat": 1, "sat": 2, "[PAD]": 3, "[CLS]": 4}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="[UNK]"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    inner.post_processor = tokenizers.processors.TemplateProcessing("[CLS] $A", special_tokens=[("[CLS]", 4)])
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="[PAD]", unk_token="[UNK]")
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    return tmp_path / "tokenizer"


def test_a_tokenizer_of_transformers(tokenizer_folder):
    tokenizer = Tokenizer(str(tokenizer_folder))
    tokens, lengths = tokenizer.encode(["cat sat", "cat cat cat cat", "dog"], 4, never)
    assert tokens.tolist() == [[4, 1, 2, 3], [4, 1, 1, 1], [4, 0, 3, 3]] and lengths.tolist() == [3, 4, 2]
    assert tokenizer_folder / "tokenizer.json" in tokenizer.cache_inputs()  # another file, another cache


def test_cached_tokens_depend_on_each_file_that_a_tokenizer_reads_and_on_no_weights(tokenizer_folder):
    before = Tokenizer(str(tokenizer_folder)).cache_inputs()
    own = ["added_tokens.json", "sentencepiece.bpe.model", "source.spm", "bpe.codes", "vocab.bpe", "tekken.json"]
    for name in [*own, "model.safetensors", "config.json", "pytorch_model.bin"]:
        (tokenizer_folder / name).touch()
    more = set(Tokenizer(str(tokenizer_folder)).cache_inputs()) - set(before)
    assert more == {tokenizer_folder / name for name in own}


def test_a_tokenizer_may_come_in_a_package(tokenizer_folder, tmp_path, monkeypatch):
    (tmp_path / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path.parent))
    tokens, _ = Tokenizer(f"package:{tmp_path.name}/tokenizer").encode(["sat"], 3, never)
    assert tokens.tolist() == [[4, 2, 3]]


def test_a_tokenizer_that_is_not_there_is_named(tmp_path):
    for name, message in (
        ("package:no_such_package/model", "package no_such_package is not installed: install it with pip"),
        ("package:raafl/nowhere", "package raafl has no folder 'nowhere'"),
    ):
        with pytest.raises(BadInput, match=message):
            Tokenizer(name).cache_inputs()
    pytest.importorskip("transformers")
    with pytest.raises(BadInput, match=r"cannot be loaded .*give a folder with a tokenizer"):
        Tokenizer(str(tmp_path)).encode(["x"], 4, never)
    with pytest.raises(BadInput, match="vocab_size is 2"):
        Tokenizer("words", 2)


def tokens():
    return TensorTokens(
        torch.tensor([[5, 6, 7], [8, 0, 0], [9, 9, 0]], dtype=torch.int32),
        torch.tensor([3, 1, 2]),
        torch.tensor([1, 0, 1]),
    )


def test_tokens_masks_and_labels():
    x, mask, y = tokens().gather(torch.tensor([2, 0]))
    assert x.tolist() == [[9, 9, 0], [5, 6, 7]] and mask.tolist() == [[1, 1, 0], [1, 1, 1]] and y.tolist() == [1, 1]
    assert {tensor.dtype for tensor in (x, mask, y)} == {torch.int64}
    assert [tensor.tolist() for tensor in tokens()[1]] == [[8, 0, 0], [1, 0, 0], 0]
    assert labels_of(tokens()).tolist() == [1, 0, 1]


def test_windows_and_their_targets():
    windows = TensorWindows(torch.tensor([[1, 2, 3], [4, 5, 6]], dtype=torch.uint8), ["Bob", "Amy"])
    x, y = windows.gather(torch.tensor([1, 0]))
    assert x.tolist() == [[4, 5], [1, 2]] and y.tolist() == [[5, 6], [2, 3]] and x.dtype == y.dtype == torch.int64
    assert Columns(windows)["speaker"] == ["Bob", "Amy"] and windows.labels.tolist() == [1, 0]


def test_windows_of_a_text_share_a_token_and_leave_out_the_rest():
    train, test = windows_of(
        [("Amy", torch.arange(8)), ("Bob", torch.arange(3)), ("Cat", torch.arange(10, 14))], 3, 0.5
    )
    assert train.windows.tolist() == [[0, 1, 2, 3]] and test.windows.tolist() == [[3, 4, 5, 6]]
    assert train.speaker == test.speaker == ["Amy"]  # Bob's text has no window, Cat's the one that would be held out
    assert windows_of([("Bob", torch.arange(3))], 3, 0.5) is None


@pytest.mark.parametrize("copied", [True, False])
def test_both_take_the_fast_path_of_a_client(copied):
    for dataset in (tokens(), TensorWindows(torch.arange(9).reshape(3, 3), ["a", "b", "c"])):
        client = ClientData(dataset, torch.tensor([0, 2]), 2, copied=copied)
        ((batch, _),) = client.batches(torch.Generator().manual_seed(0), num_epochs=1)
        rows = torch.tensor([0, 2])[torch.randperm(2, generator=torch.Generator().manual_seed(0))]
        assert all(torch.equal(a, b) for a, b in zip(batch, dataset.gather(rows), strict=True))
        assert isinstance(batch, list) and (client._indices is None) == copied


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(BadInput, match=r"tokens are \(2, 3\) with 1 lengths and 2 labels"):
        TensorTokens(torch.zeros(2, 3), torch.zeros(1), torch.zeros(2))
    with pytest.raises(BadInput, match=r"windows are \(2, 1\) with 2 speakers"):
        TensorWindows(torch.zeros(2, 1), ["a", "b"])
    assert np.int32 == Tokenizer("words").encode([], 4, lambda: TEXTS)[0].dtype
