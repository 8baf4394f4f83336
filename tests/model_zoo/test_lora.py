"""LoRA adapters on models of transformers: what trains, what is saved, and what goes wrong."""

from __future__ import annotations

import sys

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("peft")

from model_zoo import HFCausalLM, HFImageClassifier, HFSequenceClassifier
from model_zoo.lora import LoRA
from raafl.submodel import FULL, Submodels
from tests.helpers.lora_models import BERT, LAYERS
from tests.model_zoo.test_huggingface import LLAMA, VIT

CASES = [
    (
        lambda **more: HFSequenceClassifier(num_classes=3, architecture=BERT, **more),
        "SequenceClassification",
        "model.classifier.",
    ),
    (
        lambda **more: HFSequenceClassifier(num_classes=3, architecture=LLAMA, **more),
        "SequenceClassification",
        "model.score.",
    ),
    (
        lambda **more: HFImageClassifier(num_classes=3, architecture=VIT, **more),
        "ImageClassification",
        "model.classifier.",
    ),
    (lambda **more: HFCausalLM(architecture=LLAMA, **more), "CausalLM", "no head"),
]
IDS = ["BERT", "LLaMA classifies", "ViT", "LLaMA writes"]


def example(task):
    generator = torch.Generator().manual_seed(0)
    if task == "ImageClassification":
        return torch.randn(3, 3, 16, 16, generator=generator)
    return torch.randint(4, 30, (3, 6), generator=generator)


def adapted(make, **more):
    """With adapters that do something: peft starts them at zero."""
    torch.manual_seed(0)
    module = make(lora=LoRA(rank=4, dropout=0.1, target_modules="all-linear", **more)).eval()
    for name, parameter in module.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    return module


@pytest.mark.parametrize(("make", "task", "head"), CASES, ids=IDS)
def test_adapters_and_a_new_head_train_and_nothing_else(make, task, head):
    module = adapted(make)
    trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    adapters = {name for name in trained if ".lora_A." in name or ".lora_B." in name}
    assert adapters and all(name.startswith(head) for name in trained - adapters)
    assert (trained > adapters) == (head != "no head")
    updated = {id(p) for group in module.configure_optimizers().param_groups for p in group["params"]}
    assert updated == {id(module.get_parameter(name)) for name in trained}


@pytest.mark.quick_cases("BERT", "LLaMA writes")
@pytest.mark.parametrize(("make", "task", "head"), CASES, ids=IDS)
def test_a_base_in_bf16_takes_half_and_what_trains_is_in_float32(make, task, head, tmp_path):
    from tests.helpers.checkpoints import save_checkpoint

    whole, module, x = adapted(make), adapted(make, base="bf16"), example(task)
    for (name, one), other in zip(module.named_parameters(), whole.parameters(), strict=True):
        assert one.dtype == (torch.float32 if one.requires_grad else torch.bfloat16) and one.shape == other.shape, name
    costs = []
    for made in (whole, module):
        submodels = Submodels(made, (x, torch.zeros(3, dtype=torch.long)) if task != "CausalLM" else (x, x))
        submodels.attach_base(made)
        assert submodels.problem is None and len(submodels.axes) == len(set(submodels.axes))
        costs.append((submodels.cost(FULL, 1), len(submodels.axes)))
    (before, axes), (after, same) = costs
    frozen = sum(one.numel() for one in module.parameters() if not one.requires_grad)
    assert axes == same and after.params == before.params
    assert (after.down_bytes, after.up_bytes) == (before.down_bytes, before.up_bytes)
    assert before.peak_bytes - after.peak_bytes > 0.9 * 2 * frozen

    loss = module.training_step((x, x if task == "CausalLM" else torch.zeros(3, dtype=torch.long)), 0)
    loss.backward()
    assert loss.dtype == torch.float32 and all(p.grad.dtype == p.dtype for p in module.parameters() if p.requires_grad)
    again = type(module).load_from_checkpoint(save_checkpoint(tmp_path, 1, module.state_dict(), module=module)).eval()
    with torch.no_grad():
        assert torch.equal(again(x), module(x))


def test_the_layers_of_bert_that_peft_adapts_by_itself():
    module = HFSequenceClassifier(architecture=BERT, lora=LoRA())
    found = [name.removesuffix(".lora_A.default.weight") for name, _ in module.named_parameters() if "lora_A" in name]
    assert found == LAYERS


@pytest.mark.parametrize(("make", "task", "head"), CASES, ids=IDS)
def test_plain_transformers_loads_a_saved_model_with_its_adapters_merged(make, task, head, tmp_path):
    import transformers

    module, x = adapted(make), example(task)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    module.save_pretrained(tmp_path)
    plain, report = getattr(transformers, f"AutoModelFor{task}").from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report[part] for part in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert not any("lora" in name for name in plain.state_dict()) and not list(tmp_path.glob("adapter_*"))
    with torch.no_grad():
        torch.testing.assert_close(plain.eval()(x).logits, module(x), rtol=1e-4, atol=1e-5)
        assert not torch.allclose(make().eval()(x), module(x), atol=1e-2)
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())


@pytest.mark.parametrize(("make", "task", "head"), CASES, ids=IDS)
def test_a_checkpoint_is_loaded_with_its_adapters(make, task, head, tmp_path):
    from tests.helpers.checkpoints import save_checkpoint

    module, x = adapted(make), example(task)
    path = save_checkpoint(tmp_path, 1, module.state_dict(), module=module)
    again = type(module).load_from_checkpoint(path).eval()
    assert again.lora == module.lora
    with torch.no_grad():
        assert torch.equal(again(x), module(x))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rank": 0}, r"lora.rank is 0: give 1 or more"),
        ({"alpha": 0.0}, r"lora.alpha is 0.0: give more than 0"),
        ({"dropout": 1.0}, r"lora.dropout is 1.0: give 0 or more, and less than 1"),
        ({"base": "int4"}, r"lora.base is 'int4': give one of fp32, bf16, nf4"),
        (
            {"base": ["fp32", "int4"]},
            r"lora.base is \['fp32', 'int4'\]: give one of fp32, bf16, nf4, or a list of them",
        ),
        ({"base": []}, r"lora.base is \[\]: give one of fp32, bf16, nf4, or a list of them"),
        ({"base": ["nf4", "fp32"]}, r"lora.base is \['nf4', 'fp32'\]: give each once, the most precise first"),
        ({"base": ["bf16", "bf16"]}, r"give each once, the most precise first: fp32, bf16, nf4"),
        ({"target_modules": []}, r"lora.target_modules is empty: name layers"),
    ],
)
def test_what_cannot_be_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        HFSequenceClassifier(architecture=BERT, lora=LoRA(**fields))


def test_layers_that_are_not_there_are_named():
    message = r"lora.target_modules is \['q_proj'\]: Target modules .* not found .*such as classifier, dense, key, query, value, or"
    with pytest.raises(ValueError, match=message):
        HFSequenceClassifier(architecture=BERT, lora=LoRA(target_modules=["q_proj"]))


def test_without_peft_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    assert HFSequenceClassifier(architecture=BERT).lora is None
    with pytest.raises(ValueError, match=r"lora needs the package peft .*: pip install peft"):
        HFSequenceClassifier(architecture=BERT, lora=LoRA())


@pytest.mark.parametrize("layer", ["lm_head", "embed_tokens"])
def test_a_layer_whose_weight_is_anothers_too_is_refused(layer):
    """Merging its adapter would change the other layer, and the saved model would not be the one that was trained."""
    qwen = {
        "model_type": "qwen2",
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 16,
        "vocab_size": 30,
        "tie_word_embeddings": True,
    }
    with pytest.raises(
        ValueError, match=rf"lora.target_modules names '.*{layer}', whose weight is also another layer's"
    ):
        HFCausalLM(architecture=qwen, lora=LoRA(target_modules=[layer]))
    HFCausalLM(architecture={**qwen, "tie_word_embeddings": False}, lora=LoRA(target_modules=[layer]))
