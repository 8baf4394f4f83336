from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from raafl.data import FPB, SST2, AGNews, Dirichlet, FederatedData, HuggingFaceText, readers
from raafl.errors import BadInput
from tests.data.modules import set_up

SENTENCES = ["good fun", "bad bad film", "good film", "dull", "fun"]
LABELS = [1, 0, 1, 0, 1]


def write(path, texts, labels, column="sentence"):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({column: texts, "label": labels}), path)


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A small SST-2, and the user's cache out of the way."""
    monkeypatch.setattr(readers, "_USER_CACHE", tmp_path / "user")
    write(tmp_path / "data" / "sst2" / "train.parquet", SENTENCES, LABELS)
    write(tmp_path / "data" / "sst2" / "validation.parquet", ["a good film", "dull dull dull dull"], [1, 0])
    return tmp_path / "data"


def test_sst2_is_tokenised_with_the_words_of_the_training_texts(root):
    module = set_up(SST2("words", root, max_length=3, train_length=2, vocab_size=6, download=False))
    # bad, film, fun and good come twice, dull once: 2, 3, 4 and 5, and there is no room for dull
    assert module.train.tokens.tolist() == [[5, 4], [2, 2], [5, 3], [1, 0], [4, 0]]
    assert module.test.tokens.tolist() == [[1, 5, 3], [1, 1, 1]]
    assert module.train.labels.tolist() == LABELS and module.train.lengths.tolist() == [2, 2, 2, 1, 1]
    x, mask, y = next(iter(module.val_dataloader()))
    assert x.shape == mask.shape == (2, 3) and y.tolist() == [1, 0]


def test_texts_are_shared_out_by_label(root):
    module = SST2("words", root, download=False)
    data = FederatedData(module, Dirichlet(100.0), 2, seed=0)
    assert sum(data.sizes) == 5 and data.batch_size == 32
    x, mask, y = data.example_batch(2)
    assert x.shape == mask.shape == (2, 64) and y.tolist() == [1, 0]
    assert sum(num for _, num in data.test_batches()) == 2


def test_texts_are_tokenised_once_and_anew_when_something_changes(root, monkeypatch):
    from raafl.data.tokens import Tokenizer

    calls = Counter()
    encode = Tokenizer.encode

    def counting(self, texts, max_length, training_texts):
        calls[max_length, self.vocab_size] += 1
        return encode(self, texts, max_length, training_texts)

    monkeypatch.setattr(Tokenizer, "encode", counting)
    for _ in range(2):
        set_up(SST2("words", root, download=False))
    assert calls == {(64, 20000): 2}  # train and test
    set_up(SST2("words", root, max_length=8, download=False))
    set_up(SST2("words", root, vocab_size=9, download=False))
    assert calls == {(64, 20000): 2, (8, 20000): 2, (64, 9): 2}
    write(root / "sst2" / "train.parquet", SENTENCES[:4], LABELS[:4])
    assert len(set_up(SST2("words", root, download=False)).train) == 4
    assert calls[64, 20000] == 4  # the test part too: its vocabulary is that of the training texts


def test_ranks_that_start_together_tokenise_once(root, monkeypatch):
    from raafl.data.tokens import Tokenizer

    encoded = []
    encode = Tokenizer.encode
    monkeypatch.setattr(Tokenizer, "encode", lambda self, *args: encoded.append(args[1]) or encode(self, *args))
    with ThreadPoolExecutor(4) as pool:
        modules = list(pool.map(lambda _: set_up(SST2("words", root, train_length=8, download=False)), range(4)))
    assert sorted(encoded) == [8, 64] and len(list((root / ".raafl").glob("*.npy"))) == 6
    assert all(torch.equal(module.train.tokens, modules[0].train.tokens) for module in modules)
    assert not list(root.rglob("*.tmp"))


def test_fewer_samples_are_spread_over_the_whole_set(root):
    module = set_up(SST2("words", root, download=False, num_train=2, num_test=99))
    assert list(module.train.indices) == [0, 2] and len(module.test) == 2
    assert FederatedData(module, Dirichlet(1.0), 1).sizes == [2]


def test_the_phrasebank_holds_out_a_fifth_of_each_class(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "_USER_CACHE", tmp_path / "user")
    labels = [0] * 10 + [1] * 20 + [2] * 30
    write(tmp_path / "fpb" / "train.parquet", [f"w{i}" for i in range(60)], labels)
    module = set_up(FPB("words", tmp_path, vocab_size=99, download=False))
    assert torch.bincount(module.train.labels).tolist() == [8, 16, 24]
    assert torch.bincount(module.test.labels).tolist() == [2, 4, 6]
    known = module.train.tokens[:, 0]
    assert len(set(known.tolist())) == 48 and (known > 1).all()
    assert (module.test.tokens[:, 0] == 1).all()  # each word is its own sentence: none of those held out is known


def test_missing_data_names_the_place_and_the_remedy(tmp_path):
    with pytest.raises(BadInput, match=r"SST2 is not in .*sst2 \(download is off\): set root .*RAAFL_DATA"):
        SST2("words", tmp_path, download=False).prepare_data()
    write(tmp_path / "ag_news" / "train.parquet", ["x"], [0], column="body")
    write(tmp_path / "ag_news" / "test.parquet", ["x"], [0], column="body")
    with pytest.raises(BadInput, match="has columns body, label: expected text and label"):
        set_up(AGNews("words", tmp_path, download=False))


def test_a_failed_download_is_told_as_missing_data(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")

    def offline(path, name):
        raise ConnectionError("no route to host")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    with pytest.raises(BadInput, match=r"AGNews is not in .*no route to host"):
        AGNews("words", tmp_path / "new").prepare_data()


def test_what_is_not_in_the_folder_comes_from_the_hub(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(readers, "_USER_CACHE", tmp_path / "user")
    splits = datasets.DatasetDict(
        train=datasets.Dataset.from_dict({"sentence": SENTENCES, "label": LABELS}),
        validation=datasets.Dataset.from_dict({"sentence": ["good"], "label": [1]}),
    )
    asked = []
    monkeypatch.setattr(datasets, "load_dataset", lambda path, name: asked.append(path) or splits)
    module = set_up(SST2("words", tmp_path / "new", max_length=4))
    assert set(asked) == {"stanfordnlp/sst2"} and module.train.labels.tolist() == LABELS and len(module.test) == 1


def test_any_text_set_on_the_hub_or_in_a_folder(tmp_path, monkeypatch):
    pytest.importorskip("datasets")
    monkeypatch.setenv("RAAFL_DATA", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(readers, "_USER_CACHE", tmp_path / "user")
    for split, rows in (("train", slice(0, 3)), ("test", slice(3, 5))):
        write(tmp_path / "set" / f"{split}.parquet", SENTENCES[rows], LABELS[rows], "text")
    module = set_up(HuggingFaceText(str(tmp_path / "set"), "words", max_length=3))
    assert module.train.labels.tolist() == LABELS[:3] and module.test.labels.tolist() == LABELS[3:]
    assert module.train.tokens.shape == (3, 3)
    for wrong, message in (
        ({"text_column": "body"}, "no column 'body': give one of text, label"),
        ({"test_split": "dev"}, "no split 'dev': give one of"),
    ):
        with pytest.raises(BadInput, match=message):
            set_up(HuggingFaceText(str(tmp_path / "set"), "words", **wrong))
    with pytest.raises(BadInput, match=r"there is no folder '.*nowhere': correct the path"):
        set_up(HuggingFaceText(str(tmp_path / "nowhere"), "words"))
    with pytest.raises(BadInput, match="cannot load the data set 'nobody/nothing'"):
        set_up(HuggingFaceText("nobody/nothing", "words"))


def test_bad_arguments():
    for wrong, message in (
        ({"max_length": 1}, "max_length is 1"),
        ({"num_train": 0}, "num_train is 0"),
        ({"batch_size": 0}, "batch_size is 0"),
    ):
        with pytest.raises(BadInput, match=f"SST2: {message}"):
            SST2("words", **wrong)


def test_real_sst2_and_ag_news(raafl_data):
    module = set_up(SST2("words", raafl_data, download=False))
    assert torch.bincount(module.train.labels).tolist() == [29780, 37569]
    assert torch.bincount(module.test.labels).tolist() == [428, 444]
    module = set_up(AGNews("words", raafl_data, download=False))
    assert torch.bincount(module.test.labels).tolist() == [1900] * 4 and module.train.labels.unique().tolist() == [
        0,
        1,
        2,
        3,
    ]
