"""Steps and measurements of a Trainer's module."""

from __future__ import annotations

import math
import random
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import raafl
from raafl.errors import BadInput
from raafl.local.from_trainer import OLDEST
from tests.habits.source import ROOT
from tests.helpers.small_trainers import arguments, classifier, plain, text, tokenizer

pytest.importorskip("transformers", reason="transformers is not installed: pip install '.[hf]'")
pytest.importorskip("accelerate", reason="accelerate is not installed: pip install '.[hf]'")


def simulate(trainer: Any, folder: Path, clients: int = 1, max_updates: int = 1) -> Any:
    federation = raafl.Federation(
        "fed_avg", clients=clients, max_updates=max_updates, output=folder / "run", progress="quiet"
    )
    return federation, federation.simulate(raafl.from_trainer(trainer))


def gpt2(folder: Path) -> Any:
    from datasets import Dataset
    from transformers import DataCollatorForLanguageModeling, GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    torch.manual_seed(1)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=19, n_embd=16, n_layer=1, n_head=4, n_positions=64, pad_token_id=0))
    draws, words = random.Random(0), tokenizer()
    rows = Dataset.from_list([words(text(draws, draws.randint(3, 9))) for _ in range(8)])
    given = {"train_dataset": rows, "eval_dataset": rows, "processing_class": words}
    collate = DataCollatorForLanguageModeling(words, mlm=False)
    return Trainer(model, TrainingArguments(**arguments(folder)), data_collator=collate, **given)


def test_perplexity_is_that_of_the_tokens_however_the_trainer_counts_them(tmp_path: Path) -> None:
    """A Trainer divides the loss of GPT-2 by the number of labels with the first ones, of which none is predicted."""
    trainer = gpt2(tmp_path)
    model = simulate(trainer, tmp_path)[1]
    nats, tokens = 0.0, 0
    for batch in trainer.get_eval_dataloader():
        labels = batch.pop("labels")[:, 1:]
        with torch.no_grad():
            logits = model.module(**batch).logits[:, :-1]
        nats += float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum"))
        tokens += int((labels != -100).sum())
    assert model.final["perplexity"] == pytest.approx(math.exp(nats / tokens), rel=1e-5)


class OldArguments:
    """Arguments of transformers before 5.23: they have one name for it, `gradient_checkpointing`."""

    def __init__(self, args: Any) -> None:
        self._args = args

    def __getattr__(self, name: str) -> Any:
        if name.startswith("activation_checkpointing"):
            raise AttributeError(name)
        return getattr(self._args, name)


@pytest.mark.parametrize("asked", [False, True])
def test_checkpointing_goes_by_its_older_name_where_transformers_has_no_other(
    tmp_path: Path, asked: bool, monkeypatch: Any
) -> None:
    from transformers import GPT2LMHeadModel

    trainer = gpt2(tmp_path)
    trainer.args.gradient_checkpointing, trainer.args.gradient_checkpointing_kwargs = asked, {"use_reentrant": False}
    module = raafl.from_trainer(trainer).module
    trainer.args = OldArguments(trainer.args)
    given: list[Any] = []
    monkeypatch.setattr(GPT2LMHeadModel, "gradient_checkpointing_enable", lambda self, **more: given.append(more))
    module.fresh()
    assert given == [{"gradient_checkpointing_kwargs": {"use_reentrant": False}}] * asked


def test_a_transformers_that_is_too_old_is_named(tmp_path: Path, monkeypatch: Any) -> None:
    trainer = gpt2(tmp_path)
    monkeypatch.setattr("transformers.__version__", "5.9.1")
    with pytest.raises(
        BadInput, match=r"^transformers is 5.9.1, but from_trainer needs 5.19 or newer: pip install '.\[hf\]'"
    ):
        raafl.from_trainer(trainer)
    monkeypatch.setattr("transformers.__version__", "6.0.0.dev0")
    assert raafl.from_trainer(trainer).data is not None
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert "transformers>={}.{}".format(*OLDEST) in project["optional-dependencies"]["hf"]


def contrasted(folder: Path, **changes: Any) -> Any:
    """A classifier whose loss calls the model twice, and multiplies matrices outside of it."""
    from transformers import Trainer

    class Contrasted(Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **more: Any) -> Any:
            loss, outputs = super().compute_loss(model, dict(inputs), return_outputs=True, **more)
            again = model(**inputs).logits
            loss = loss + (outputs.logits @ again.T).pow(2).mean()
            return (loss, outputs) if return_outputs else loss

    return classifier(folder, base=Contrasted, **changes)


@pytest.mark.parametrize("make", (classifier, contrasted))
def test_a_bf16_trainer_trains_and_evaluates_in_its_own_precision(make: Any, tmp_path: Path) -> None:
    """accelerate autocasts the model's forward alone, whose outputs are float32, also at evaluations."""
    changes = {"bf16": True, "label_smoothing_factor": 0.1}
    alone, (_, result) = make(tmp_path / "alone", **changes), simulate(make(tmp_path, **changes), tmp_path)
    alone.train()
    found = dict(result.module.named_parameters())
    assert all(torch.equal(value, found[name]) for name, value in alone.model.named_parameters())
    assert result.final["loss"] == alone.evaluate()["eval_loss"]


def test_parameters_beside_the_model_are_refused(tmp_path: Path) -> None:
    from transformers import Trainer

    class Weighted(Trainer):
        def __init__(self, *args: Any, **more: Any) -> None:
            super().__init__(*args, **more)
            self.weight = torch.nn.Parameter(torch.ones(()))

        def create_optimizer(self, model: Any = None) -> Any:
            self.optimizer = torch.optim.SGD([*self.model.parameters(), self.weight], lr=0.1)
            return self.optimizer

    with pytest.raises(BadInput, match=r"^Weighted\.create_optimizer gives an optimizer with 1 parameters that"):
        simulate(plain(tmp_path, base=Weighted), tmp_path)


def counting(folder: Path) -> Any:
    from transformers import Trainer

    class Counting(Trainer):
        num_losses = 0

        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **more: Any) -> Any:
            loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **more)
            if model.training:
                self.num_losses += 1
                loss = loss * self.num_losses
            return (loss, outputs) if return_outputs else loss

    return plain(folder, base=Counting, warmup_steps=0)


def test_what_a_loss_keeps_in_the_trainer_starts_again_in_each_task(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    alone = counting(tmp_path)
    alone.train()
    given = counting(tmp_path)
    found = dict(simulate(given, tmp_path)[1].module.named_parameters())
    assert all(torch.equal(value, found[name]) for name, value in alone.model.named_parameters())
    assert "attributes that start again in each task: trainer_attributes.num_losses" in caplog.text
    assert "num_losses" not in vars(given)
    federation, _ = simulate(given, tmp_path / "two", clients=2, max_updates=4)
    assert federation.replay(tmp_path / "two" / "run", raafl.from_trainer(counting(tmp_path)))["equal"]


def masked(folder: Path) -> Any:
    from datasets import Dataset
    from transformers import BertConfig, BertForMaskedLM, DataCollatorForLanguageModeling, Trainer, TrainingArguments

    torch.manual_seed(1)
    draws, words = random.Random(0), tokenizer()
    words.add_special_tokens({"mask_token": "<mask>"})
    model = BertForMaskedLM(
        BertConfig(vocab_size=20, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4)
    )
    rows = Dataset.from_list([words(text(draws, 8)) for _ in range(16)])
    given = {"train_dataset": rows, "eval_dataset": rows, "processing_class": words}
    collate = DataCollatorForLanguageModeling(words, seed=3)
    return Trainer(model, TrainingArguments(**arguments(folder)), data_collator=collate, **given)


def test_the_seed_of_a_collator_gives_way_to_the_runs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its generator would go on from client to client, so that a replay drew other masks."""
    trainer = masked(tmp_path)
    federation, _ = simulate(trainer, tmp_path, clients=2, max_updates=4)
    assert federation.replay(tmp_path / "run", raafl.from_trainer(masked(tmp_path)))["equal"]
    assert "DataCollatorForLanguageModeling.seed is 3: its masks are drawn by the seed of the run" in caplog.text
    assert (trainer.data_collator.seed, trainer.data_collator.generator) == (3, None)


def test_a_function_that_splits_its_rows_without_a_seed_makes_one_split_in_each_process(tmp_path: Path) -> None:
    """`train_test_split` draws from NumPy's global generator, which other processes have in another state."""
    from datasets import Dataset

    def make() -> Any:
        rows = Dataset.from_list([{"x": [float(i)] * 4, "labels": i % 2} for i in range(20)]).train_test_split(0.25)
        trainer = plain(tmp_path)
        trainer.train_dataset, trainer.eval_dataset = rows["train"], rows["test"]
        return trainer

    found = []
    for seed in (1, 2):
        np.random.seed(seed)
        before = np.random.get_state()[1].tolist()
        trainer = raafl.from_trainer(make).data.trainer_of()
        assert np.random.get_state()[1].tolist() == before
        found.append([row["x"][0] for row in trainer.eval_dataset])
    assert found[0] == found[1]
