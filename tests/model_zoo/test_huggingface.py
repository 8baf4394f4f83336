"""Models of transformers as LightningModules: loading, saving, what goes wrong, and the optimiser."""

from __future__ import annotations

import pytest
import torch

from model_zoo.adamw import adamw

pytest.importorskip("transformers")

from model_zoo import HFCausalLM, HFImageClassifier, HFSeq2SeqLM, HFSequenceClassifier
from raafl.submodel import Spec, Submodels
from tests.local.bench import filled

BERT = {
    "model_type": "bert",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 50,
}
LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 50,
    "eos_token_id": 3,
}
VIT = {
    "model_type": "vit",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "image_size": 16,
    "patch_size": 8,
}

T5 = {
    "model_type": "t5",
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 64,
    "num_layers": 2,
    "num_heads": 4,
    "vocab_size": 50,
    "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
    "eos_token_id": 1,
}

CASES = [
    (lambda **more: HFSequenceClassifier(num_classes=3, **more), BERT, "SequenceClassification"),
    (lambda **more: HFSequenceClassifier(num_classes=3, **more), LLAMA, "SequenceClassification"),
    (lambda **more: HFImageClassifier(num_classes=3, **more), VIT, "ImageClassification"),
    (lambda **more: HFCausalLM(**more), LLAMA, "CausalLM"),
]
IDS = ["BERT", "LLaMA classifies", "ViT", "LLaMA writes"]


def example(architecture):
    if architecture is VIT:
        return torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    return torch.randint(4, 50, (3, 7), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("make", "architecture", "task"), CASES, ids=IDS)
def test_plain_transformers_loads_what_was_saved(make, architecture, task, tmp_path):
    import transformers

    module, x = make(architecture=architecture).eval(), example(architecture)
    module.save_pretrained(tmp_path)
    plain = getattr(transformers, f"AutoModelFor{task}").from_pretrained(tmp_path).eval()
    again = make(name_or_path=str(tmp_path))
    assert all(part.training for part in again.modules())  # transformers loads it in eval mode
    again.eval()
    with torch.no_grad():
        assert torch.equal(plain(x).logits, module(x)) and torch.equal(again(x), module(x))
    fresh = make(name_or_path=str(tmp_path), pretrained=False).eval()
    assert {n: p.shape for n, p in fresh.named_parameters()} == {n: p.shape for n, p in module.named_parameters()}
    with torch.no_grad():
        assert not torch.equal(fresh(x), module(x))


@pytest.mark.parametrize(("make", "architecture", "task"), CASES, ids=IDS)
def test_a_checkpoint_needs_no_file_of_the_original(make, architecture, task, tmp_path):
    from tests.helpers.checkpoints import save_checkpoint

    make(architecture=architecture).save_pretrained(tmp_path / "model")
    module, x = make(name_or_path=str(tmp_path / "model")).eval(), example(architecture)
    path = save_checkpoint(tmp_path, 1, module.state_dict(), module=module)
    (tmp_path / "model").rename(tmp_path / "gone")
    again = type(module).load_from_checkpoint(path).eval()
    with torch.no_grad():
        assert torch.equal(again(x), module(x))


def test_a_new_head_has_the_classes_asked_for_and_the_body_is_the_old_one(tmp_path):
    old = HFSequenceClassifier(num_classes=3, architecture=BERT)
    old.save_pretrained(tmp_path)
    new = HFSequenceClassifier(str(tmp_path), num_classes=5, architecture={"hidden_dropout_prob": 0.0})
    assert new(example(BERT)).shape == (3, 5) and new.model.config.hidden_dropout_prob == 0
    name = "model.bert.encoder.layer.1.output.dense.weight"
    assert torch.equal(new.get_parameter(name), old.get_parameter(name))


def test_a_model_stored_in_half_precision_trains_in_float32(tmp_path):
    HFSequenceClassifier(architecture=BERT).model.half().save_pretrained(tmp_path)
    assert {p.dtype for p in HFSequenceClassifier(str(tmp_path)).parameters()} == {torch.float32}


def test_loading_and_saving_say_nothing_and_leave_the_settings_of_transformers(tmp_path, capfd):
    import transformers

    logging = transformers.utils.logging
    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    module = HFSequenceClassifier(num_classes=3, architecture=BERT)
    capfd.readouterr()
    module.save_pretrained(tmp_path)
    HFSequenceClassifier(str(tmp_path), num_classes=2)
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before
    assert capfd.readouterr() == ("", "")


def test_a_decoder_classifies_by_the_last_token_that_is_not_padding():
    module = HFSequenceClassifier(num_classes=2, architecture=LLAMA).eval()
    assert module.model.config.pad_token_id == 3  # its config has none: the end of a text is taken
    tokens = example(LLAMA)
    padded = torch.nn.functional.pad(tokens, (0, 4), value=3)
    mask = (padded != 3).long()
    with torch.no_grad():
        assert torch.allclose(module(padded, mask), module(tokens), atol=1e-5)


def test_offline_a_name_that_is_not_there_is_one_clear_error(monkeypatch):
    import huggingface_hub

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)  # the library reads the variable once
    with pytest.raises(FileNotFoundError, match=r"'nobody/has-this' .*unset it once to fetch it, or give a folder$"):
        HFSequenceClassifier("nobody/has-this")


def test_other_mistakes_name_the_remedy(tmp_path):
    with pytest.raises(FileNotFoundError, match="is not a folder: name one that save_pretrained wrote"):
        HFSequenceClassifier(str(tmp_path / "nowhere"))
    with pytest.raises(FileNotFoundError, match=r"cannot load the model .*name a folder that save_pretrained wrote"):
        HFSequenceClassifier(str(tmp_path))
    with pytest.raises(FileNotFoundError, match="that package is not installed: pip install it"):
        HFSequenceClassifier("package:no_such_package/model")
    with pytest.raises(FileNotFoundError, match="it has no folder 'nowhere'"):
        HFSequenceClassifier("package:model_zoo/nowhere")
    with pytest.raises(ValueError, match="no model_type: give one of them"):
        HFSequenceClassifier(architecture={"hidden_size": 32})


def test_a_model_may_come_in_a_package(tmp_path, monkeypatch):
    (tmp_path / "some_weights").mkdir()
    (tmp_path / "some_weights" / "__init__.py").write_text("")
    module = HFSequenceClassifier(num_classes=2, architecture=BERT).eval()
    module.save_pretrained(tmp_path / "some_weights" / "model")
    monkeypatch.syspath_prepend(str(tmp_path))
    again = HFSequenceClassifier("package:some_weights/model").eval()
    with torch.no_grad():
        assert torch.equal(again(example(BERT)), module(example(BERT)))


def trained(module, batch):
    """Half of a module after one backward pass, and what it is predicted to cost."""
    submodels = Submodels(module, batch)
    spec = halved(submodels)
    small = filled(submodels, spec, submodels.state(module))
    small.module.train().training_step(batch, 0).backward()
    return small.module, submodels.cost(spec, 8)


def halved(submodels):
    return Spec.select({axis.name: range(axis.size // 2) for axis in submodels.axes.values()})


def translated(num=8):
    tokens = torch.randint(4, 50, (num, 24), generator=torch.Generator().manual_seed(0))
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens[:, :20].contiguous()}


@pytest.mark.quick_cases("BERT")
@pytest.mark.parametrize(
    ("make", "architecture", "batch"),
    [
        (HFSeq2SeqLM, T5, translated()),
        (HFCausalLM, LLAMA, {name: translated()["input_ids"] for name in ("input_ids", "labels")}),
        (
            HFSequenceClassifier,
            {**BERT, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
            translated() | {"labels": torch.arange(8) % 2},
        ),
    ],
    ids=["T5", "LLaMA", "BERT"],
)
def test_checkpointed_blocks_have_the_same_gradients_and_are_predicted_to_need_less(make, architecture, batch):
    found = []
    for checkpointed in (False, True):
        torch.manual_seed(0)
        found.append(trained(make(architecture=architecture, gradient_checkpointing=checkpointed), batch))
    (plain, before), (small, after) = found
    assert any(getattr(layer, "gradient_checkpointing", False) for layer in small.modules())
    for (name, one), (_, other) in zip(plain.named_parameters(), small.named_parameters(), strict=True):
        assert one.grad is not None  # what is used in several places adds its gradients up in another order
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-6, msg=name)
    assert after.params == before.params and after.down_bytes == before.down_bytes
    assert after.peak_bytes < 0.9 * before.peak_bytes
    assert 1.1 < after.flops_per_sample / before.flops_per_sample < 4 / 3  # a forward pass more, but not of the head


def test_a_model_that_cannot_be_checkpointed_says_so(monkeypatch):
    import transformers

    monkeypatch.setattr(transformers.BertPreTrainedModel, "supports_gradient_checkpointing", False)
    with pytest.raises(ValueError, match="gradient_checkpointing is true, which this bert cannot: leave it out"):
        HFSequenceClassifier(architecture=BERT, gradient_checkpointing=True)


@pytest.mark.parametrize(
    ("make", "architecture", "names"),
    [
        (HFSeq2SeqLM, T5, ["shared", "encoder.embed_tokens", "decoder.embed_tokens", "lm_head"]),
        (HFCausalLM, {**LLAMA, "tie_word_embeddings": True}, ["model.embed_tokens", "lm_head"]),
    ],
    ids=["T5", "LLaMA"],
)
def test_tied_weights_stay_one_in_submodels(make, architecture, names):
    module, batch = make(architecture=architecture), translated(2)
    submodels = Submodels(module, batch if make is HFSeq2SeqLM else {**batch, "labels": batch["input_ids"]})
    spec = halved(submodels)
    small = submodels.shrink(spec)
    tied = [small.module.get_parameter(f"model.{name}.weight") for name in names]
    assert all(one is tied[0] for one in tied)
    entries = [entry.name for entry in submodels.layout(spec).entries]
    assert sum(f"model.{name}.weight" in entries for name in names) == 1  # sent once


def test_adamw_decays_matrices_alone_and_warms_up():
    layer = torch.nn.Linear(2, 3)
    layer.frozen = torch.nn.Parameter(torch.ones(2, 2), requires_grad=False)
    plain = adamw(layer, 0.1, 0.5, 0)
    groups = {tuple(map(tuple, (p.shape for p in g["params"]))): g["weight_decay"] for g in plain.param_groups}
    assert groups == {((3, 2),): 0.5, ((3,),): 0.0}

    warm = adamw(layer, 0.1, 0.5, 4)
    scheduler = warm["lr_scheduler"]["scheduler"]
    rates = []
    for _ in range(6):
        rates.append(warm["optimizer"].param_groups[0]["lr"])
        warm["optimizer"].step()
        scheduler.step()
    assert rates == pytest.approx([0.025, 0.05, 0.075, 0.1, 0.1, 0.1]) and warm["lr_scheduler"]["interval"] == "step"
