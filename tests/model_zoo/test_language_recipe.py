"""The recipes of docs/fine-tuning.md: what travels, what peft and transformers load of it, and what counts as exact match."""

from __future__ import annotations

import json

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("peft")
pytest.importorskip("datasets")

from model_zoo import HFCausalLM, HFSeq2SeqLM, HFSequenceClassifier
from model_zoo.hub import make
from model_zoo.lora import LoRA
from model_zoo.metrics import IGNORED, ExactMatch
from raafl.algorithms.fed_avg import fed_avg
from raafl.config.parse import load_experiment
from raafl.data import FineTuning
from raafl.data.tokens import SPECIAL, byte_tokenizer
from raafl.parts import RateSelect
from tests.habits.source import ROOT
from tests.helpers.small_runs import experiment, finish

T5 = {
    "model_type": "t5",
    "vocab_size": 261,
    "d_model": 16,
    "d_kv": 4,
    "d_ff": 32,
    "num_layers": 1,
    "num_heads": 4,
    "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
    "eos_token_id": 1,
}
BART = {
    "model_type": "bart",
    "vocab_size": 261,
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "max_position_embeddings": 32,
    "dropout": 0.0,
    "init_std": 0.5,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
    "decoder_start_token_id": 1,
    "forced_eos_token_id": None,
}
BERT = {
    "model_type": "bert",
    "vocab_size": 261,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "intermediate_size": 32,
    "max_position_embeddings": 32,
}


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setenv("RAAFL_DATA", str(tmp_path / "data"))
    options = ["--max_updates", "4", "--train.num_steps", "1", "--data.num_test", "8", "--progress", "quiet"]
    return finish(
        load_experiment(
            ROOT / "configs" / "llm-lora.yaml", *options, "--output", str(tmp_path / "run"), "--strict", "true"
        )
    )


def test_adapters_alone_travel_and_both_libraries_load_what_is_saved(run):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # two layers; inputs and outputs of q, k, v, o, gate, up, down; float32, rows of A and columns of B for each rank
    a_rank = 4 * 2 * sum((64 + 64, 64 + 32, 64 + 32, 64 + 64, 64 + 128, 64 + 128, 128 + 64))
    merged_rows = [row for row in run.rows() if row["outcome"] == "merged"]
    assert len(merged_rows) == 4
    for row in merged_rows:  # clients 1 to 4 have ranks 8, 4, 2 and 1
        rank = 8 >> (int(row["client"]) - 1)
        assert (int(row["bytes_down"]), int(row["bytes_up"])) == (a_rank * rank, a_rank * rank)

    folder = run.folder / "model"
    merged = AutoModelForCausalLM.from_pretrained(folder).eval()
    base = make("CausalLM", "made:llama", True, {})
    adapted = PeftModel.from_pretrained(base, str(folder / "adapter")).eval()
    tokens = torch.arange(5, 25).reshape(2, 10)
    with torch.no_grad():
        torch.testing.assert_close(adapted(tokens).logits, merged(tokens).logits, rtol=1e-4, atol=1e-5)
        assert not torch.allclose(
            make("CausalLM", "made:llama", True, {}).eval()(tokens).logits, merged(tokens).logits, atol=1e-3
        )
    assert merged.generation_config.eos_token_id == SPECIAL.index("<|end|>")
    assert AutoTokenizer.from_pretrained(folder)("ab")["input_ids"] == byte_tokenizer()("ab")["input_ids"]


def test_the_model_made_on_the_spot_is_the_same_whatever_was_drawn_before():
    torch.manual_seed(1)
    first, after = make("CausalLM", "made:llama", True, {}), torch.rand(1)
    torch.manual_seed(1)
    assert torch.equal(after, torch.rand(1))  # and takes nothing from the generator
    second = make("CausalLM", "made:llama", True, {})
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert first.config.vocab_size == len(byte_tokenizer())


def test_exact_match_is_that_of_greedy_generation(tmp_path, monkeypatch):
    """Half of the answers are what the model writes by itself, the others are spoilt in their last token."""
    monkeypatch.setenv("RAAFL_DATA", str(tmp_path / "data"))
    data = FineTuning("made:sums", "bytes", max_length=24, num_test=6)
    data.setup()
    module, score = HFCausalLM("made:llama").eval(), ExactMatch()
    for i, row in enumerate(data.test):
        prompt = row["input_ids"][row["labels"] == IGNORED][None]
        written = module.model.generate(prompt, max_new_tokens=4, do_sample=False, eos_token_id=None, pad_token_id=0)
        written[0, -1] = written[0, -1] if i % 2 else (written[0, -1] + 1) % 261
        labels = written.clone()
        labels[:, : prompt.shape[1]] = IGNORED
        with torch.no_grad():
            logits, targets = module._logits_and_targets({"input_ids": written, "labels": labels})
            score.update(logits.argmax(dim=-1), targets)
    assert score.compute().item() == pytest.approx(3 / 6)


@pytest.mark.quick_cases("T5-adapters", "BERT-submodels")
@pytest.mark.parametrize("lora", [None, LoRA(rank=4, target_modules="all-linear")], ids=["submodels", "adapters"])
@pytest.mark.parametrize(
    ("task", "make", "shape"),
    [("seq2seq", HFSeq2SeqLM, T5), ("classification", HFSequenceClassifier, BERT)],
    ids=["T5", "BERT"],
)
def test_encoders_and_their_decoders_train_too(task, make, shape, lora, tmp_path, monkeypatch):
    import transformers

    monkeypatch.setenv("RAAFL_DATA", str(tmp_path / "data"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    rows = [{"text": "ab"[i % 2] * (i + 1), "label": i % 2} for i in range(16)]
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = str(path) if task == "classification" else "made:sums"
    federated = experiment(
        tmp_path / "run",
        fed_avg(submodel=RateSelect(rates=[1.0, 0.5], rate_of="width")),
        model=lambda: make(architecture=shape, lora=lora),
        data=lambda: FineTuning(source, "bytes", task=task, max_length=16, num_train=16, num_test=4),
        clients=2,
        max_updates=2,
    )
    run = finish(federated)
    whole, half = (next(int(row["bytes_up"]) for row in run.rows() if row["client"] == one) for one in "12")
    assert half < 0.9 * whole  # half of the heads and units, or of the ranks
    assert ("exact_match" in run.summary["final"]) == (task == "seq2seq")
    kind = "Seq2SeqLM" if task == "seq2seq" else "SequenceClassification"
    _, report = getattr(transformers, f"AutoModelFor{kind}").from_pretrained(
        run.folder / "model", output_loading_info=True
    )
    assert not any(report[part] for part in ("missing_keys", "unexpected_keys", "mismatched_keys"))


@pytest.mark.parametrize("shape", [T5, BART], ids=["T5", "BART"])
def test_the_loss_of_an_encoder_decoder_is_transformers_own(shape):
    torch.manual_seed(0)
    module = HFSeq2SeqLM(architecture=shape).eval()
    batch = {"input_ids": torch.randint(5, 261, (3, 6)), "labels": torch.randint(5, 261, (3, 4))}
    batch["attention_mask"] = (torch.arange(6) < torch.tensor([[6], [2], [4]])).long()
    batch["labels"][1, 2:] = IGNORED
    with torch.no_grad():
        torch.testing.assert_close(module.training_step(batch, 0), module.model(**batch).loss)


SETTINGS = {
    "greedy": {},
    "beams": {"num_beams": 3, "length_penalty": 2.0},
    "a penalty": {"repetition_penalty": 3.0},
    "drawn": {"do_sample": True, "temperature": 1.5},
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("kind", ["causal", "seq2seq"])
def test_what_is_written_with_a_models_own_settings_counts(kind, settings):
    """Answers of unequal length after prompts of unequal length, two in a row: as `generate` writes them one by one."""
    torch.manual_seed(0)
    if kind == "causal":
        module = HFCausalLM("made:llama", generate=True).eval()
        labels = torch.full((3, 9), IGNORED)
        for row, positions in enumerate([(3, 4, 7), (5, 6, 7, 8), (1, 2)]):
            labels[row, list(positions)] = 0
        batch = {"input_ids": torch.randint(5, 261, (3, 9)), "labels": labels}
        answers = [(0, 3, 5), (0, 7, 8), (1, 5, 9), (2, 1, 3)]  # row, and where it begins and ends
    else:
        module = HFSeq2SeqLM(architecture={**BART, "decoder_layers": 2}, generate=True).eval()
        batch = {"input_ids": torch.randint(5, 261, (3, 6)), "labels": torch.zeros(3, 4, dtype=torch.long)}
        batch["attention_mask"] = (torch.arange(6) < torch.tensor([[6], [2], [4]])).long()
        batch["labels"][1, 2:] = IGNORED
        answers = [(0, 0, 4), (1, 0, 2), (2, 0, 4)]
    for name, value in settings.items():
        setattr(module.model.generation_config, name, value)
    with torch.no_grad():
        logits, targets = module._logits_and_targets(batch)
        before = torch.get_rng_state()
        found = module._predicted(batch, logits, targets)
        assert torch.equal(found, module._predicted(batch, logits, targets))  # drawn anew from the same seed
        assert torch.equal(torch.get_rng_state(), before)
    if "do_sample" in settings:
        return
    for row, start, stop in answers:
        if kind == "causal":
            asked = {"input_ids": batch["input_ids"][row : row + 1, :start]}
            begins, shift = start, 1  # targets are one further on
        else:
            length = int(batch["attention_mask"][row].sum())
            asked = {"input_ids": batch["input_ids"][row : row + 1, :length]}
            begins, shift = 1, 0
        most = 4 if kind == "seq2seq" or settings else stop - start
        written = module.model.generate(**asked, max_new_tokens=most, max_length=None, pad_token_id=0)[0, begins:]
        written = torch.nn.functional.pad(written, (0, 4))[: stop - start]
        assert torch.equal(found[row, start - shift : stop - shift], written)


def test_settings_for_writing_are_in_checkpoints_and_in_the_saved_model(tmp_path):
    """The folder's own, and those that are given; without the folder, too."""
    from transformers import GenerationConfig

    from tests.helpers.checkpoints import save_checkpoint

    model = HFCausalLM("made:llama", generation={"repetition_penalty": 1.5, "eos_token_id": [1, 2]})
    model.save_pretrained(tmp_path / "base")
    module = HFCausalLM(str(tmp_path / "base"), generate=True, generation={"num_beams": 3})
    path = save_checkpoint(tmp_path, 1, module.state_dict(), module=module)
    again = HFCausalLM.load_from_checkpoint(path)
    again.save_pretrained(tmp_path / "saved")
    for found in (again.model.generation_config, GenerationConfig.from_pretrained(tmp_path / "saved")):
        assert (found.num_beams, found.repetition_penalty, found.eos_token_id) == (3, 1.5, [1, 2])
    assert again.writes


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"beams": 3}, "generation has beams, which"), ({"num_beams": 1, "early_stopping": True}, "early_stopping")],
)
def test_settings_for_writing_that_cannot_be_are_refused_before_training(settings, message):
    with pytest.raises(ValueError, match=message):
        HFCausalLM("made:llama", generation=settings)
