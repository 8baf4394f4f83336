"""A folder of texts: its windows by hand; and a config's run from it to a model that transformers loads."""

from __future__ import annotations

import pytest
import torch

from raafl.commands.cli import main
from raafl.data import ByColumn, FederatedData, TextFolder
from raafl.errors import BadInput
from tests.habits.source import ROOT


def write(folder, **texts):
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (folder / f"{name}.txt").write_text(text, encoding="utf-8")
    return str(folder)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("RAAFL_DATA", str(tmp_path / "cache"))


def spelled(module, rows):
    return [module.tokenizer.decode(row) for row in rows.tolist()]


def test_windows_lie_within_a_file_and_the_last_of_each_are_held_out(tmp_path):
    path = write(tmp_path / "texts", amy="abcdefghi", bob="xy", cat="klmnopq")
    module = TextFolder(path, length=3, test_share=0.4)
    module.setup()
    # amy has 9 bytes and an end, 3 windows of 3 + 1, one held out; bob has none; cat has 8 tokens, 2 windows
    x, y = module.train.gather(torch.arange(3))
    assert spelled(module, x) == ["abc", "def", "klm"] and spelled(module, y) == ["bcd", "efg", "lmn"]
    assert module.train.speaker == ["amy.txt"] * 2 + ["cat.txt"]
    x, y = module.test.gather(torch.arange(2))
    assert spelled(module, x) == ["ghi", "nop"] and spelled(module, y) == ["hi<|end|>", "opq"]
    assert module.test.speaker == ["amy.txt", "cat.txt"]


def test_files_of_one_name_in_several_folders_are_several_clients(tmp_path):
    for folder in ("amy", "bob", "cat"):
        write(tmp_path / "texts" / folder, notes="abcdefghi")
    data = FederatedData(TextFolder(str(tmp_path / "texts"), length=3), ByColumn("speaker"), 3)
    assert data.datamodule.train.speaker[::2] == ["amy/notes.txt", "bob/notes.txt", "cat/notes.txt"]
    assert data.sizes == [2, 2, 2]
    write(tmp_path / "texts" / "amy" / "more", text="abcdefghi")  # in one folder alone, a name is enough
    module = TextFolder(str(tmp_path / "texts" / "amy"), length=3)
    module.setup()
    assert module.test.speaker == ["text.txt", "notes.txt"]


def test_a_changed_file_is_read_again(tmp_path):
    path = write(tmp_path / "texts", amy="abcdefghi")
    for text in ("abcdefghi", "ABCDEFGHIJ"):
        write(tmp_path / "texts", amy=text)
        module = TextFolder(path, length=3)
        module.setup()
        assert spelled(module, module.train.gather(torch.arange(1))[0]) == [text[:3]]


def test_bad_folders_are_named(tmp_path):
    path = write(tmp_path / "texts", amy="abc")
    for module, reason in (
        (TextFolder(str(tmp_path / "none")), "which is no folder"),
        (TextFolder(path, glob="*.md"), r"which has no file \*.md"),
        (TextFolder(path, length=9), "none of the 1 files .* lower length"),
    ):
        with pytest.raises(BadInput, match=reason):
            module.setup()
    (tmp_path / "texts" / "bad.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(BadInput, match=r"bad\.txt is not UTF-8"):
        TextFolder(path, length=1).setup()
    with pytest.raises(BadInput, match="test_share is 1"):
        TextFolder(path, test_share=1)


def test_from_a_folder_of_texts_to_a_model_that_transformers_loads(tmp_path):
    """The shipped config with a tiny model and few steps."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = write(tmp_path / "texts", one="the quick brown fox jumps over the lazy dog. " * 40)
    small = (
        "--model.size micro --train.num_steps 6 --data.length 16 --data.num_test 4 --data.glob *.txt --max_updates 6"
    )
    run = ["--data.path", path, *small.split(), "--progress", "quiet", "--output", str(tmp_path / "run")]
    assert main(["simulate", "--config", str(ROOT / "configs" / "diloco-llama.yaml"), *run]) == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run" / "model")
    asked = tokenizer("the quick", return_tensors="pt")
    written = model.generate(**asked, max_new_tokens=5, do_sample=False, pad_token_id=0)
    assert tokenizer.decode(written[0]).startswith("the quick") and written.shape[1] > asked["input_ids"].shape[1]
