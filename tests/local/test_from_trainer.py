"""A Trainer's model and data in a federation: the same steps to the bit, as submodels, from a config, and what is refused."""

from __future__ import annotations

import functools
import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import raafl
from raafl.config.argv import shipped
from raafl.config.parse import load_experiment
from raafl.config.trust import from_server
from raafl.errors import BadInput, RunFailed
from raafl.log import warn_once
from raafl.submodel import FULL, Submodels
from raafl.submodel.isolated_run import loss_of, settle
from tests.helpers import small_trainers
from tests.helpers.counted_task import flop_counter
from tests.helpers.small_trainers import classifier, dpo, kto, plain, reward, seq2seq, sft

pytest.importorskip("transformers", reason="transformers is not installed: pip install '.[hf]'")
pytest.importorskip("accelerate", reason="accelerate is not installed: pip install '.[hf]'")
needs_trl = functools.partial(pytest.importorskip, "trl", reason="trl is not installed: pip install '.[dev]'")


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")


def simulate(trainer: Any, folder: Path, algorithm: Any = "fed_avg", clients: int = 1, **settings: Any) -> Any:
    federation = raafl.Federation(
        algorithm, clients=clients, output=folder / "run", progress="quiet", **{"max_updates": 1, **settings}
    )
    return federation, federation.simulate(raafl.from_trainer(trainer))


def lora() -> Any:
    from peft import LoraConfig

    return LoraConfig(r=2, target_modules=["q_proj", "v_proj"])


MADE = {
    "classifier": classifier,
    "sft": sft,
    "dpo": dpo,
    "reward": reward,
    "kto": kto,
    "sft with an adapter": lambda folder, **more: sft(folder, peft_config=lora(), **more),
    "dpo with an adapter": lambda folder, **more: dpo(folder, peft_config=lora(), **more),
    "dpo with reference log-probabilities": lambda folder, **more: dpo(folder, precompute_ref_log_probs=True, **more),
    "sft in bf16": lambda folder, **more: sft(folder, bf16=True, **more),
    "sft with label smoothing": lambda folder, **more: sft(folder, label_smoothing_factor=0.1, **more),
    "sft with a short last step": lambda folder, **more: sft(folder, 10, **more),
}


@pytest.mark.slow("trains twice, with transformers and TRL imported")
@pytest.mark.quick_cases("classifier", "sft", "dpo")
@pytest.mark.parametrize("name", MADE)
def test_a_task_is_the_trainers_own_training_to_the_bit(name: str, tmp_path: Path) -> None:
    if name != "classifier":
        needs_trl()
    make, alone = MADE[name], MADE[name](tmp_path / "alone")
    _, result = simulate(make(tmp_path / "given"), tmp_path)
    alone.train()
    steps = [row["loss"] for row in alone.state.log_history if "loss" in row]
    expected, found = dict(alone.model.named_parameters()), dict(result.module.named_parameters())
    assert expected.keys() == found.keys()
    assert all(torch.equal(value, found[key]) for key, value in expected.items())
    before = dict(make(tmp_path / "before").model.named_parameters())
    assert any(not torch.equal(value, before[key]) for key, value in found.items())
    if "short" in name:  # its loss counts once, those of two batches twice: 4, 4 and 2 rows
        assert float(result.clients[0]["loss"]) == pytest.approx((2 * steps[0] + 2 * steps[1] + steps[2]) / 5, abs=1e-6)
    else:
        assert float(result.clients[0]["loss"]) == pytest.approx(sum(steps) / len(steps), abs=1e-6)


@pytest.mark.slow("imports TRL")
def test_the_result_is_the_librarys_own_model_with_the_trained_weights(tmp_path: Path) -> None:
    """TRL's fused head encloses the forward of the model that it was set on: a copy would generate with that one's weights."""
    needs_trl()
    from transformers import AutoModelForCausalLM, LlamaForCausalLM

    trainer = sft(tmp_path, learning_rate=0.1)
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    federation, result = simulate(trainer, tmp_path)
    assert type(result.module) is LlamaForCausalLM
    plain = LlamaForCausalLM(result.module.config).eval()
    plain.load_state_dict(result.module.state_dict())
    tokens = torch.tensor([[1, 5, 6]])
    assert torch.equal(result.module(tokens).logits, plain(tokens).logits)
    assert not torch.equal(trainer.model(tokens).logits, plain(tokens).logits)
    assert all(torch.equal(value, before[name]) for name, value in trainer.model.state_dict().items())
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    assert torch.equal(saved.eval()(tokens).logits, plain(tokens).logits)
    assert (tmp_path / "run" / "model" / "tokenizer.json").exists()
    assert federation.replay(tmp_path / "run", raafl.from_trainer(sft(tmp_path, learning_rate=0.1)))["equal"]


def test_a_plain_module_is_saved_as_its_trainer_saves_it(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    alone, (_, result) = plain(tmp_path / "alone"), simulate(plain(tmp_path), tmp_path)
    alone.train()
    alone.save_model()
    expected, found = (load_file(tmp_path / name / "model.safetensors") for name in ("alone", "run/model"))
    assert expected.keys() == found.keys() and all(torch.equal(expected[name], found[name]) for name in expected)
    assert (result.summary["model"], result.summary["warnings"]) == ("model", [])
    assert 'load_file("FOLDER/model.safetensors")' in (tmp_path / "run" / "model" / "README.md").read_text()


@pytest.mark.slow("imports TRL, proves the axes of two models")
@pytest.mark.parametrize("make", (sft, dpo))
def test_clients_train_smaller_models(make: Any, tmp_path: Path) -> None:
    needs_trl()
    trainer = make(tmp_path, 12, gradient_accumulation_steps=1)
    _, result = simulate(trainer, tmp_path, raafl.fed_raa(fragments=3), clients=3, max_updates=3)
    specs = {row["spec"] for row in result.clients}
    assert all("ffn" in spec and "heads" in spec for spec in specs), specs
    assert "loss" in result.final and all(row["outcome"] == "merged" for row in result.clients[:3])


def test_the_cost_of_a_large_bert_is_that_of_a_measured_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Trainer reads the number of labels, and has a fused AdamW; a model above `LARGE` is followed without values."""
    monkeypatch.setattr("raafl.submodel.cost.ledger.LARGE", 0)
    monkeypatch.setattr("raafl.submodel.find.trace.LARGE", 0)
    found = raafl.from_trainer(classifier(tmp_path, gradient_accumulation_steps=1))
    module, batch = found.module, next(iter(found.data.train_dataloader()))
    submodels = Submodels(module, batch)
    cost, real = submodels.cost(FULL, 2), submodels.shrink(FULL, device="cpu").module.train()
    settle(real)
    with flop_counter() as counter:
        loss_of(real, batch).backward()
    assert cost.guessed == ""
    assert 2 * cost.flops_per_sample == pytest.approx(counter.get_total_flops(), rel=1e-6)


def test_compute_metrics_sees_the_whole_evaluation(tmp_path: Path) -> None:
    trainer, alone = classifier(tmp_path), classifier(tmp_path)
    _, result = simulate(trainer, tmp_path)
    alone.train()
    expected = alone.evaluate()
    assert result.final["accuracy"] == expected["eval_accuracy"]  # of 5 rows in 1 batch of 8
    assert result.final["loss"] == pytest.approx(expected["eval_loss"], abs=1e-6)


def test_prediction_loss_only_leaves_compute_metrics_out(tmp_path: Path) -> None:
    assert simulate(classifier(tmp_path, prediction_loss_only=True), tmp_path)[1].final.keys() == {"loss"}


@pytest.mark.parametrize("changes", ({}, {"generation_max_length": 3, "generation_num_beams": 2}))
def test_a_seq2seq_trainer_generates_at_evaluations(changes: dict[str, Any], tmp_path: Path) -> None:
    alone, given = seq2seq(tmp_path, **changes), seq2seq(tmp_path, **changes)
    _, result = simulate(given, tmp_path)
    alone.train()
    expected, found = alone.evaluate(), dict(result.module.named_parameters())
    assert all(torch.equal(value, found[name]) for name, value in alone.model.named_parameters())
    assert [result.final[name] for name in ("tokens", "sum")] == [expected["eval_tokens"], expected["eval_sum"]]
    assert 0 < result.final["tokens"] <= 4 * (given.args.generation_max_length - 1)
    assert result.final["loss"] == pytest.approx(expected["eval_loss"], abs=1e-6)
    assert not hasattr(given, "_gen_kwargs")


def test_a_collators_tokenizer_is_saved_where_the_trainer_has_none(tmp_path: Path) -> None:
    trainer = classifier(tmp_path)
    trainer.processing_class = None
    simulate(trainer, tmp_path)
    assert (tmp_path / "run" / "model" / "tokenizer.json").exists()


@pytest.mark.slow("imports TRL")
@pytest.mark.parametrize("changes", ({}, {"label_smoothing_factor": 0.1}, {"loss_type": "dft"}))
def test_perplexity_is_that_of_a_plain_cross_entropy_alone(changes: dict[str, Any], tmp_path: Path) -> None:
    final = simulate(sft(tmp_path, **changes), tmp_path)[1].final
    assert ("perplexity" in final) is (not changes)
    assert changes or final["perplexity"] == pytest.approx(math.exp(final["loss"]), rel=0.01)


def ramped(folder: Path, num: int = 8, **changes: Any) -> Any:
    """A classifier whose loss, logs and metrics use what a Trainer offers beside the batch."""
    from transformers import Trainer

    class Ramped(Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **more: Any) -> Any:
            loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **more)
            state = self.state
            if model.training:
                loss = loss * (1 + state.epoch + state.global_step / state.max_steps + state.num_train_epochs)
                self.log({"ramp": state.epoch})
            return (loss, outputs) if return_outputs else loss

    trainer = classifier(folder, num, base=Ramped, **changes)
    trainer.compute_metrics = lambda seen: {"half": 0.5, "confusion": [[1, 2], [3, 4]]}
    return trainer


def test_a_loss_sees_the_trainers_state_and_logs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    # 10 rows in batches of 2, two a step: steps of 4, 4 and 2 rows in each of two epochs
    alone, given = ramped(tmp_path, 10, num_train_epochs=2), ramped(tmp_path, 10)
    alone.train()
    given.log = given.accelerator.prepare = functools.partial(pytest.fail, "what the user has set is not called")
    before = dict(vars(given))
    _, result = simulate(given, tmp_path, num_epochs=2)
    found = dict(result.module.named_parameters())
    assert all(torch.equal(value, found[name]) for name, value in alone.model.named_parameters())
    # the epoch as at the beginning of each step, once for each of its batches
    epochs = [0, 0, 0.4, 0.4, 0.8, 1, 1, 1.4, 1.4, 1.8]
    assert json.loads(result.clients[0]["logged"])["ramp"] == pytest.approx(sum(epochs) / 10, abs=1e-6)
    assert result.final["half"] == 0.5 and "confusion" not in result.final
    assert "metric confusion of the Trainer is [[1, 2], [3, 4]], not a number" in caplog.text
    assert (given.state.global_step, given.state.max_steps) == (0, 0)
    # what the Trainer's own methods set anew at each call
    caches = {"_signature_columns", "_created_lr_scheduler", "current_gradient_accumulation_steps"}
    assert {name for name, value in vars(given).items() if before.get(name, given) is not value} <= caches
    assert before.keys() <= vars(given).keys() and given.accelerator.prepare is before["log"]


def test_arguments_of_the_trainer_are_those_of_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        simulate(classifier(tmp_path, seed=7, max_grad_norm=0.0), tmp_path)
    config = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert (config["seed"], config["fabric"]["accumulate_grad_batches"]) == (7, 2)
    assert config["fabric"]["gradient_clip_val"] is None
    assert "save_strategy: checkpoint_every, checkpoint_s" in caplog.text
    trainer = classifier(tmp_path)
    with pytest.raises(BadInput, match=r"fabric.gradient_clip_val is 1.0, but the Trainer's arguments say 0.5"):
        raafl.Federation(max_updates=1, gradient_clip_val=1.0).simulate(raafl.from_trainer(trainer))
    with pytest.raises(BadInput, match="data is given"):
        raafl.Federation(max_updates=1).simulate(raafl.from_trainer(trainer), (1, 2))
    with pytest.raises(BadInput, match="data is missing"):
        raafl.Federation(max_updates=1).simulate(torch.nn.Linear(2, 2))
    with pytest.raises(BadInput, match="give from_trainer the function that makes it"):
        raafl.Federation(max_updates=1).fit(raafl.from_trainer(trainer), local=2)
    with pytest.raises(BadInput, match=r"module is a Trainer: give raafl.from_trainer\(trainer\) in place"):
        raafl.Federation(max_updates=1).simulate(trainer)
    with pytest.raises(BadInput, match=r"of a function that makes a Trainer, give raafl.from_trainer\(function\)"):
        raafl.Federation(max_updates=1).simulate(lambda: trainer)


def test_a_column_that_the_trainer_removes_still_says_whose_a_row_is(tmp_path: Path) -> None:
    trainer = classifier(tmp_path)
    trainer.train_dataset = trainer.train_dataset.add_column("author", list("bbbbaaac"))
    data = raafl.from_trainer(trainer).data
    assert "author" not in next(iter(data.train_dataloader()))
    _, result = simulate(trainer, tmp_path, clients=3, max_updates=3, partition=raafl.data.ByColumn("author"))
    assert {int(row["client"]): int(row["num_samples"]) for row in result.clients} == {1: 3, 2: 4, 3: 1}
    message = "column is 'writer', but the training data has columns attention_mask, author, input_ids, labels"
    with pytest.raises(BadInput, match=message):
        raafl.Federation(clients=2, partition=raafl.data.ByColumn("writer"), max_updates=1).simulate(
            raafl.from_trainer(trainer)
        )


@pytest.mark.parametrize("warmup_steps", (0, 1))
def test_a_step_that_trains_nothing_is_said(
    warmup_steps: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    warn_once.cache_clear()
    trainer = classifier(tmp_path, warmup_steps=warmup_steps, gradient_accumulation_steps=1)
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    _, result = simulate(trainer, tmp_path, num_steps=1)
    same = all(torch.equal(value, before[name]) for name, value in result.module.state_dict().items())
    said = "TrainingArguments.warmup_steps is 1: a task of one step has the learning rate 0"
    assert (same, said in caplog.text) == (bool(warmup_steps), bool(warmup_steps))


def test_a_federation_keeps_its_own_seed(tmp_path: Path) -> None:
    simulate(classifier(tmp_path), tmp_path, seed=0)
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["seed"] == 0


def with_own(name: str) -> Any:
    from transformers import Trainer

    return type("Own", (Trainer,), {name: lambda self, *args, **kwargs: None})


def callback() -> Any:
    from transformers import TrainerCallback

    return type("Own", (TrainerCallback,), {})()


def with_callback(folder: Path) -> Any:
    trainer = classifier(folder)
    trainer.add_callback(callback())
    return trainer


def with_optimizer(folder: Path) -> Any:
    trainer = classifier(folder)
    trainer.create_optimizer()
    return trainer


def without_data(folder: Path) -> Any:
    trainer = classifier(folder)
    trainer.train_dataset = None
    return trainer


class Stream(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(())

    def __len__(self) -> int:
        return 8


def with_data(name: str, rows: Any) -> Any:
    def make(folder: Path) -> Any:
        trainer = classifier(folder)
        setattr(trainer, name, rows)
        return trainer

    return make


def early_stopping(folder: Path) -> Any:
    from transformers import EarlyStoppingCallback

    trainer = classifier(folder, metric_for_best_model="eval_accuracy")
    trainer.add_callback(EarlyStoppingCallback(3))
    return trainer


REFUSED = {
    "take it off by trainer.remove_callback(Own), and give callbacks=[raafl.Callback]": with_callback,
    "TrainingArguments.neftune_noise_alpha is 5.0": lambda folder: classifier(folder, neftune_noise_alpha=5.0),
    "train_sampling_strategy is group_by_length: give 'random'": lambda folder: classifier(
        folder, train_sampling_strategy="group_by_length"
    ),
    "has no effect in a federated task: evaluations compute in the precision of the tasks": lambda folder: classifier(
        folder, bf16_full_eval=True
    ),
    "optim is schedule_free_adamw: a task calls nothing of an optimizer but its step": lambda folder: classifier(
        folder, optim="schedule_free_adamw"
    ),
    "lr_scheduler_type is greedy": lambda folder: classifier(folder, lr_scheduler_type="greedy", eval_strategy="epoch"),
    "callback Own, which a federated task does not call": with_callback,
    "Own.log is not called in a federated task: put what it does into compute_loss": lambda folder: classifier(
        folder, base=with_own("log")
    ),
    "Own.training_step is not called": lambda folder: classifier(folder, base=with_own("training_step")),
    "Own._maybe_log_save_evaluate is not called": lambda folder: classifier(
        folder, base=with_own("_maybe_log_save_evaluate")
    ),
    "Own._prepare_input is not called": lambda folder: classifier(folder, base=with_own("_prepare_input")),
    "makes its batches from the model": lambda folder: classifier(folder, base=with_own("_prepare_inputs")),
    "was given optimizers=, or was trained before": with_optimizer,
    "has no train_dataset": without_data,
    "train_dataset of the Trainer is a stream (Stream) without": with_data("train_dataset", Stream()),
    "eval_dataset of the Trainer is a stream (list_iterator) without": with_data("eval_dataset", iter([])),
    "train_dataset of the Trainer is a dict of 1: give one data set": with_data("train_dataset", {"train": [1]}),
    "trainer is 5: give a transformers.Trainer": lambda folder: 5,
    "makes list: let it return": lambda folder: list,
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_would_have_no_effect_is_refused(message: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput) as refused:
        raafl.from_trainer(REFUSED[message](tmp_path))
    assert message in str(refused.value)


def test_a_way_of_saving_that_is_not_called_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    raafl.from_trainer(classifier(tmp_path, base=with_own("_save")))
    assert "Own._save is not called: the run's folder gets what save_pretrained of the model writes" in caplog.text


def test_an_evaluation_loader_of_ones_own_needs_no_data_set(tmp_path: Path) -> None:
    trainer = classifier(tmp_path, base=with_own("get_eval_dataloader"))
    trainer.eval_dataset = None
    assert raafl.from_trainer(trainer).data.test_dataloader() is None


def test_early_stopping_is_the_runs_and_trackers_are_its_loggers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from transformers import EarlyStoppingCallback, PrinterCallback
    from transformers.integrations import TensorBoardCallback

    # no rate, so that no evaluation is better than the first
    trainer = classifier(tmp_path, learning_rate=0.0, metric_for_best_model="eval_loss", report_to="none")
    trainer.add_callback(EarlyStoppingCallback(2, early_stopping_threshold=0.25))
    trainer.add_callback(PrinterCallback)
    trainer.add_callback(TensorBoardCallback)
    given = raafl.from_trainer(trainer)
    assert "metric_for_best_model: keep_best; TensorBoardCallback: logger\n" in caplog.text
    assert given.module.early_stopping() == [{"metric": "loss", "patience": 2, "mode": "min", "min_delta": 0.25}]
    federation = raafl.Federation("fed_avg", clients=1, max_updates=9, progress="quiet", output=tmp_path / "run")
    result = federation.simulate(given)
    assert result.summary["versions"] == 2 and result.summary["finished"].endswith("in 2 evaluations")
    assert not list(tmp_path.rglob("*tfevents*"))


def test_what_a_trainer_decides_is_not_given_again(tmp_path: Path) -> None:
    given = raafl.from_trainer(classifier(tmp_path, gradient_accumulation_steps=2, max_grad_norm=0.5))
    for name, value in {
        "data": ([1], [2]),
        "optimizer": torch.optim.SGD,
        "loss": torch.nn.functional.cross_entropy,
        "metrics": {"own": torch.nn.functional.cross_entropy},
        "batch_size": 3,
        "collate_fn": list,
    }.items():
        with pytest.raises(
            BadInput, match=f"{name} is given, but the Trainer in from_trainer has its own: leave it out"
        ):
            raafl.Federation("fed_avg", max_updates=1).simulate(given, **{name: value})


@pytest.mark.parametrize(
    ("settings", "message"),
    (
        (
            {"accumulate_grad_batches": 1},
            r"is 1, but the Trainer's arguments say 2: set gradient_accumulation_steps of ",
        ),
        (
            {"fabric": {"gradient_clip_val": None}},
            "is None, but the Trainer's arguments say 0.5: set max_grad_norm of ",
        ),
    ),
)
def test_a_setting_that_both_have_must_be_the_same(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    federation = raafl.Federation("fed_avg", clients=2, max_updates=1, **settings)
    with pytest.raises(BadInput, match=message):
        federation.plan(raafl.from_trainer(classifier(tmp_path)))


def test_settings_that_both_have_alike_are_taken(tmp_path: Path) -> None:
    alike = {"fabric": {"gradient_clip_val": 0.5, "accumulate_grad_batches": 2}, "precision": "32-true"}
    federation = raafl.Federation("fed_avg", clients=2, max_updates=1, output=tmp_path / "run", **alike)
    result = federation.simulate(raafl.from_trainer(classifier(tmp_path)))
    assert result is not None and result.summary["finished"] == "max_updates"


NO_LOGITS = (
    "algorithm distils between the model's exits and needs their logits, but the model's forward computes the loss"
)
DISTILLING = {
    "depth_fl": NO_LOGITS,
    "scale_fl": NO_LOGITS,
    "co_s2p": NO_LOGITS,
    "fjord": "algorithm.distil is true, but a Trainer's steps do not show the logits",
}


@pytest.mark.parametrize(("name", "message"), DISTILLING.items())
def test_methods_that_distil_refuse_a_trainer_before_the_first_task(name: str, message: str, tmp_path: Path) -> None:
    found = raafl.from_trainer(classifier(tmp_path))
    federation = raafl.Federation(name, clients=2, output=tmp_path / "run", progress="quiet", max_updates=2)
    for asked in (federation.plan, federation.simulate):
        with pytest.raises(BadInput, match=message):
            asked(found)
    assert not (tmp_path / "run").exists()


def test_methods_that_distil_take_trainers_whose_loss_is_not_in_the_forward(tmp_path: Path) -> None:
    smoothed = raafl.from_trainer(classifier(tmp_path, label_smoothing_factor=0.1)).module.fresh()
    assert not smoothed.loss_in_forward
    raafl.depth_fl().local.prepare(smoothed)
    plain = raafl.from_trainer(classifier(tmp_path)).module.fresh()
    assert plain.loss_in_forward
    raafl.co_s2p(distil=False).local.prepare(plain)
    raafl.fjord(distil=False).local.prepare(plain)


def test_a_seed_of_0_that_a_run_is_given_is_its_seed(tmp_path: Path) -> None:
    path = config(tmp_path)
    assert load_experiment(path).seed == 42
    assert load_experiment(path, "--seed", "0").seed == 0
    assert load_experiment(config(tmp_path, seed=0)).seed == 0


def test_an_argument_of_a_trainer_needs_a_trainer(tmp_path: Path) -> None:
    (tmp_path / "bare.yaml").write_text("{algorithm: fed_avg, clients: 2, max_updates: 1}", encoding="utf-8")
    for name in (tmp_path / "bare.yaml", shipped()["quickstart"]):
        with pytest.raises(BadInput, match=r"^trainer\.num is given, but no trainer: add --trainer MODULE.FUNCTION"):
            load_experiment(name, "--trainer.num", "6")


@pytest.mark.slow("imports TRL")
def test_grpo_is_refused_by_name(tmp_path: Path) -> None:
    needs_trl()
    from trl import GRPOConfig, GRPOTrainer

    args = GRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to="none")
    rows, words = small_trainers.preferences(8), small_trainers.tokenizer()
    trainer = GRPOTrainer(small_trainers.llama(), len, args, train_dataset=rows, processing_class=words)
    with pytest.raises(BadInput, match="trainer is a GRPOTrainer, which makes its batches from the model"):
        raafl.from_trainer(trainer)


def make_trainer(folder: str, num: int = 8) -> Any:
    """Named by the configs below."""
    return classifier(Path(folder), num)


GIVEN: list[Any] = []


def make_trainer_of_names(folder: str, names: Any) -> Any:
    """Named by a config; its argument is kept as it came."""
    GIVEN.append(names)
    return classifier(Path(folder), 8)


def config(folder: Path, **changes: Any) -> Path:
    spec = {"class_path": f"{__name__}.make_trainer", "init_args": {"folder": str(folder)}}
    run = {"algorithm": "fed_avg", "clients": 2, "max_updates": 2, "progress": "quiet", "output": str(folder / "run")}
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump({"trainer": spec, **run, **changes}), encoding="utf-8")
    return path


def test_a_config_names_the_function_that_makes_it(tmp_path: Path) -> None:
    from raafl.commands.cli import main

    assert main(["simulate", "--config", str(config(tmp_path))]) == 0
    written = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert written["model"]["class_path"] == "raafl.local.from_trainer.Model" and written["seed"] == 42
    assert written["fabric"]["gradient_clip_val"] == 0.5
    assert main(["replay", str(tmp_path / "run"), "--trust_config"]) == 0
    experiment = load_experiment(config(tmp_path, seed=3, output=None))
    assert experiment.seed == 3 and experiment.fabric.accumulate_grad_batches == 2
    assert load_experiment(config(tmp_path, seed=0, output=None)).seed == 0
    (tmp_path / "fabric.yaml").write_text("gradient_clip_val: null", encoding="utf-8")
    for option in (".gradient_clip_val=null", "={gradient_clip_val: null}", f"={tmp_path / 'fabric.yaml'}"):
        with pytest.raises(BadInput, match=r"fabric\.gradient_clip_val is None"):
            load_experiment(config(tmp_path, output=None), f"--fabric{option}")
    experiment = load_experiment(config(tmp_path, output=None), "--trainer.num", "6")
    assert len(experiment.data().trainer_of().train_dataset) == 6
    (tmp_path / "bare.yaml").write_text("{algorithm: fed_avg, clients: 2, max_updates: 1}", encoding="utf-8")
    named = ("--trainer", f"{__name__}.make_trainer", "--trainer.folder", str(tmp_path))
    experiment = load_experiment(tmp_path / "bare.yaml", *named)
    assert len(experiment.data().trainer_of().train_dataset) == 8


def test_the_users_function_is_called_once_with_arguments_as_the_config_has_them(tmp_path: Path) -> None:
    names = {0: "no", 1: "yes", "other": [{2: 0.5}, "2026-11-29", None]}
    made = {"class_path": f"{__name__}.make_trainer_of_names", "init_args": {"folder": str(tmp_path), "names": names}}
    experiment = load_experiment(config(tmp_path, trainer=made, output=None))
    experiment.model(), experiment.data()
    assert [names] == GIVEN


def test_a_config_says_once_where_the_users_function_fails(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"which fails: TypeError: [^()]+ \([^()]+:[0-9]+\)$"):
        load_experiment(config(tmp_path), "--trainer.num", "six")


@pytest.mark.parametrize(
    ("changes", "message"),
    (
        ({"trainer": "nothing.make"}, "trainer is nothing.make, which cannot be imported"),
        ({"trainer": 5}, "trainer is 5: give the path of a function"),
        ({"trainer": "math.pi"}, "trainer is math.pi, 3.14"),
        ({"model": {"class_path": "model_zoo.MLP"}}, "trainer and model are both given"),
        ({"fabric": {"precision": "bf16-mixed"}}, "fabric.precision is bf16-mixed, but the Trainer's arguments say"),
        (
            {"fabric": {"accumulate_grad_batches": 1}},
            "fabric.accumulate_grad_batches is 1, but the Trainer's arguments",
        ),
    ),
)
def test_a_wrong_config_has_one_clear_line(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=message):
        load_experiment(config(tmp_path, **changes))


def test_only_a_config_of_ones_own_may_name_a_trainer(tmp_path: Path) -> None:
    named = {"class_path": "raafl.local.from_trainer.Model", "init_args": {"trainer": "os.system"}}
    for tree in ({"trainer": "os.system"}, {"model": named}):
        text = yaml.safe_dump({**tree, "algorithm": {"class_path": "raafl.fed_avg"}})
        if "model" in tree:
            with pytest.raises(RunFailed, match="which is not raafl's own"):
                from_server(text)
        else:
            assert "trainer" not in from_server(text)
        (tmp_path / "config.yaml").write_text(text, encoding="utf-8")
        with pytest.raises(BadInput, match="its author could choose which code runs here"):
            from raafl.config.parse import load_run

            load_run(tmp_path, trusted=False)
