"""What a run leaves of its final model: a folder for transformers, or a checkpoint; and what a full disk does to it."""

from __future__ import annotations

import errno
import json
import os
import shutil
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from lightning import LightningDataModule
from torch.utils.data import DataLoader, TensorDataset

from model_zoo import MLP
from raafl.algorithms import fed_async
from raafl.commands import cli
from raafl.core.algorithm import Training
from raafl.errors import BadInput
from raafl.runfolder.outcome import summary_lines
from raafl.runtime.lifecycle import checkpointer, export
from raafl.runtime.run import simulate
from tests.helpers.small_runs import experiment, finish

pytest.importorskip("transformers")

import transformers

from model_zoo import HFSequenceClassifier

BERT = {
    "model_type": "bert",
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "vocab_size": 30,
    "max_position_embeddings": 8,
}
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good", "bad"]


QUIET = SimpleNamespace(as_json=True, experiment=SimpleNamespace(progress="quiet"))


def tokens():
    return torch.randint(1, 30, (48, 6), generator=torch.Generator().manual_seed(0))


class Texts(LightningDataModule):
    """Two classes of sentences: whether the first token is in the upper half."""

    def __init__(self, tokenizer=None):
        super().__init__()
        self.tokenizer = tokenizer
        self.set = TensorDataset(tokens(), torch.ones(48, 6, dtype=torch.int64), (tokens()[:, 0] > 15).long())

    def train_dataloader(self):
        return DataLoader(self.set, batch_size=8)

    def test_dataloader(self):
        return DataLoader(self.set, batch_size=16)


def bert(**more):
    return HFSequenceClassifier(num_classes=2, architecture=BERT, lr=1e-2, **more)


def run_of(tmp_path, algorithm="fed_async", **fields):
    fields = {"model": bert, "data": Texts, "max_updates": 4, "train": Training(num_epochs=None, num_steps=1)} | fields
    return experiment(tmp_path / "run", algorithm, **fields)


def digest(model):
    """The digest of a run's summary, of the parameters of what transformers has loaded."""
    from raafl.submodel import Submodels

    module = bert()
    module.model.load_state_dict(model.state_dict())
    return Submodels(module).state(module).model_digest()


def test_plain_transformers_loads_the_final_model_with_equal_outputs(tmp_path):
    run = finish(run_of(tmp_path))
    assert run.summary["model"] == "model"
    plain = transformers.AutoModelForSequenceClassification.from_pretrained(run.folder / "model").eval()
    assert digest(plain) == run.digest  # bit for bit what was merged last
    (last,) = (run.folder / "checkpoints").iterdir()
    module = HFSequenceClassifier.load_from_checkpoint(last, map_location="cpu").eval()
    with torch.no_grad():
        assert torch.equal(plain(tokens()).logits, module(tokens()))
        assert not torch.equal(plain(tokens()).logits, bert().eval()(tokens()))
    assert [path.name for path in run.folder.iterdir() if path.name.startswith(".")] == []
    assert json.loads(run.text("summary.json"))["model"] == "model"
    card = (run.folder / "model" / "README.md").read_text()  # AutoModel would leave the classifier out
    assert 'BertForSequenceClassification.from_pretrained("FOLDER")' in card and "library_name: transformers" in card


@pytest.mark.parametrize("lora", [None, "fedex"])
def test_a_model_with_adapters_is_saved_as_a_plain_one(tmp_path, lora):
    """The adapters alone beside it, unless they belong to a base that the server has changed."""
    pytest.importorskip("peft")
    from model_zoo.lora import LoRA

    algorithm = fed_async(lora=lora)
    run = finish(run_of(tmp_path, algorithm=algorithm, model=lambda: bert(lora=LoRA(rank=2, target_modules=["query"]))))
    assert (run.folder / "model" / "adapter").is_dir() is (lora is None)
    plain = transformers.AutoModelForSequenceClassification.from_pretrained(run.folder / "model").eval()
    (last,) = (run.folder / "checkpoints").iterdir()
    module = HFSequenceClassifier.load_from_checkpoint(last, map_location="cpu").eval()
    with torch.no_grad():
        assert torch.allclose(plain(tokens()).logits, module(tokens()), atol=1e-6)


def test_the_tokenizer_of_the_data_lies_beside_it(tmp_path):
    (tmp_path / "vocab.txt").write_text("\n".join(WORDS))
    tokenizer = transformers.BertTokenizer(str(tmp_path / "vocab.txt"))
    run = finish(run_of(tmp_path, data=lambda: Texts(tokenizer)))
    again = transformers.AutoTokenizer.from_pretrained(run.folder / "model")
    assert again("good bad")["input_ids"] == tokenizer("good bad")["input_ids"]


def test_a_tokenizer_of_raafls_is_saved_as_the_one_that_it_stands_for(tmp_path):
    from raafl.data.tokens import Tokenizer

    (tmp_path / "vocab.txt").write_text("\n".join(WORDS))
    transformers.BertTokenizer(str(tmp_path / "vocab.txt")).save_pretrained(tmp_path / "tokens")
    found = export.tokenizer_of(Texts(Tokenizer(str(tmp_path / "tokens"))))
    assert found("bad")["input_ids"] == [2, 6, 3]
    assert export.tokenizer_of(Texts(Tokenizer("words"))) is None
    assert export.tokenizer_of(Texts("my own")) is None
    assert export.tokenizer_of(object()) is None


def test_of_any_other_module_the_last_checkpoint_is_the_model(tmp_path):
    run = finish(experiment(tmp_path / "run", "fed_async", max_updates=5))
    assert run.summary["model"] == "checkpoints/version-000005.ckpt"
    module = MLP.load_from_checkpoint(run.folder / run.summary["model"], map_location="cpu")
    from raafl.submodel import Submodels

    assert Submodels(module).state(module).model_digest() == run.digest
    assert not (run.folder / "model").exists()


def test_the_last_lines_say_where_it_is(tmp_path):
    summary, folder = simulate(run_of(tmp_path))
    assert f"final model: {tmp_path / 'run' / 'model'}" in summary_lines(summary, folder)


def full_disk(monkeypatch, where):
    sync = os.fsync

    def fsync(descriptor):
        if where in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(descriptor)

    monkeypatch.setattr(export.os, "fsync", fsync)


def test_a_full_disk_at_the_end_loses_no_run(tmp_path, monkeypatch, capsys):
    full_disk(monkeypatch, "model.safetensors")
    run = finish(run_of(tmp_path))
    assert run.summary["finished"] == "max_updates"
    assert run.summary["model"] == "checkpoints/version-000004.ckpt"  # that could be written
    (warning,) = run.summary["warnings"]
    assert f"cannot be written to {run.folder / 'model'}: No space left on device; take it from the last" in warning
    assert warning in capsys.readouterr().err
    assert {path.name for path in run.folder.iterdir()} == {
        "config.yaml",
        "events.jsonl",
        "metrics.csv",
        "clients.csv",
        "seals.jsonl",
        "summary.json",
        "checkpoints",
    }


def test_where_nothing_could_be_written_the_summary_says_so_and_the_run_has_failed(tmp_path, monkeypatch, capsys):
    full_disk(monkeypatch, "")
    run = finish(run_of(tmp_path), lambda settings: simulate(settings))
    assert run.summary["model"] is None and run.summary["unwritten"]["checkpoints"] == 1
    assert run.summary["model_copy"] is None and any("): it is lost" in line for line in run.summary["warnings"])
    capsys.readouterr()
    assert cli._report(run.summary, run.folder, QUIET) == 1
    assert capsys.readouterr().err == f"raafl: the final model could not be saved in {run.folder}: it is lost\n"


def test_a_model_that_its_folder_has_no_room_for_is_saved_elsewhere(tmp_path, monkeypatch, capsys):
    (tmp_path / "system").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "system"))
    full_disk(monkeypatch, f"{tmp_path}/run/")
    run = finish(experiment(tmp_path / "run", "fed_async", max_updates=4))
    copy = Path(run.summary["model_copy"])
    assert copy.is_relative_to(tmp_path / "system") and copy.parents[1].name.startswith("run-")
    from raafl.submodel import Submodels

    module = MLP.load_from_checkpoint(copy, map_location="cpu")
    assert Submodels(module).state(module).model_digest() == run.digest
    assert any(f"a copy is in {copy}, move it before it is cleaned up" in line for line in run.summary["warnings"])
    assert cli._report(run.summary, run.folder, QUIET) == 1
    assert capsys.readouterr().err.endswith(
        f"raafl: the final model could not be saved in {run.folder}: a copy is in {copy}\n"
    )


def test_a_run_that_the_disk_has_no_room_for_does_not_start(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(checkpointer.shutil, "disk_usage", lambda place: usage._replace(free=1_000))
    with pytest.raises(
        BadInput, match=r"^output is '.*/run', which has [\d.]+ k?B free, but the run will write [\d.]+ kB or more"
    ):
        simulate(run_of(tmp_path))
    assert not (tmp_path / "run").exists()


def test_a_folder_of_an_earlier_attempt_is_replaced_whole_or_not_at_all(tmp_path):
    target = tmp_path / "model"
    (tmp_path / ".model.new-1.tmp").mkdir()  # by a process that was killed

    def write(text, fails=False):
        with export._whole(target) as folder:
            (Path(folder) / text).write_text(text)
            if fails:
                raise OSError(errno.ENOSPC, "full")

    write("first")
    with pytest.raises(OSError, match="full"):
        write("second", fails=True)
    assert [path.name for path in target.iterdir()] == ["first"]
    write("third")
    assert [path.name for path in target.iterdir()] == ["third"]
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
