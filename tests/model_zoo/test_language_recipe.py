"""The recipe of configs/llm-lora.yaml: what travels, what peft and transformers load of it, and exact match."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("peft")
pytest.importorskip("datasets")

from model_zoo import HFCausalLM
from model_zoo.hub import make
from model_zoo.metrics import IGNORED, ExactMatch
from raafl.config.parse import load_experiment
from raafl.data import FineTuning
from raafl.data.made import SPECIAL, byte_tokenizer
from tests.federation import finish
from tests.habits.source import ROOT


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
            score.update(*module._logits_and_targets({"input_ids": written, "labels": labels}))
    assert score.compute().item() == pytest.approx(3 / 6)
