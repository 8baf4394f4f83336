"""Weights in four bits: the nearest of sixteen levels, products and gradients of these, and adapters beside them."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

pytest.importorskip("transformers")
pytest.importorskip("peft")

from model_zoo import HFCausalLM, HFSeq2SeqLM, HFSequenceClassifier
from model_zoo.lora import LoRA
from model_zoo.nf4 import BLOCK, LEVELS, NF4Linear, dequantised, quantised
from raafl.algorithms.fed_buff import fed_buff
from raafl.submodel import FULL, Submodels
from tests.helpers.lora_models import BERT, RANK, RANKS, lora_bert, lora_run, rated, trained_bytes
from tests.helpers.small_runs import finish
from tests.model_zoo.test_huggingface import LLAMA
from tests.model_zoo.test_language_recipe import T5


def slowly(weight):
    """Each weight as the nearest level times the largest magnitude of its 64, one after the other."""
    flat, found = weight.flatten().tolist(), []
    for start in range(0, len(flat), BLOCK):
        block = flat[start : start + BLOCK]
        scale = max(map(abs, block))
        found += [scale * min(LEVELS, key=lambda level: abs(level * scale - value)) for value in block]
    return torch.tensor(found).view(weight.shape)


@pytest.mark.parametrize("shape", [(8, 16), (5, 13), (1, 2)])
def test_weights_are_the_nearest_levels_of_their_block(shape):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    codes, scales = quantised(weight)
    assert codes.nbytes == 32 * -(-weight.numel() // BLOCK) and len(scales) == -(-weight.numel() // BLOCK)
    torch.testing.assert_close(dequantised(codes, scales, shape, torch.float32), slowly(weight))
    assert not dequantised(*quantised(torch.zeros(shape)), shape, torch.float32).any()


def test_codes_and_scales_are_those_of_bitsandbytes():
    functional = pytest.importorskip("bitsandbytes", reason="pip install bitsandbytes").functional
    weight = torch.randn(96, 64, generator=torch.Generator().manual_seed(0))
    theirs, state = functional.quantize_4bit(weight, blocksize=BLOCK, quant_type="nf4")
    codes, scales = quantised(weight)
    assert torch.equal(codes.view(torch.uint8), theirs.flatten()) and torch.equal(scales, state.absmax)
    torch.testing.assert_close(
        dequantised(codes, scales, (96, 64), torch.float32), functional.dequantize_4bit(theirs, state)
    )


def test_a_layer_multiplies_by_them_and_keeps_none_for_the_backward_pass():
    torch.manual_seed(0)
    layer = nn.Linear(64, 32)
    ours, x = NF4Linear(layer), torch.randn(3, 5, 64, requires_grad=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor.nbytes) or tensor, lambda t: t):
        y = ours(x)
    assert sum(kept) == 32 * 64 // 2 + 4 * 32
    plain = ours.plain(torch.float32)
    torch.testing.assert_close(y, plain(x))
    torch.testing.assert_close(plain.weight, slowly(layer.weight))
    (found,) = torch.autograd.grad(y.square().sum(), x)
    (expected,) = torch.autograd.grad(F.linear(x, plain.weight, layer.bias).square().sum(), x)
    torch.testing.assert_close(found, expected)


@pytest.mark.quick_cases("LLaMA writes")
@pytest.mark.parametrize(
    ("make", "shape"), [(HFCausalLM, LLAMA), (HFSequenceClassifier, BERT)], ids=["LLaMA writes", "BERT classifies"]
)
def test_adapters_train_beside_four_bits_which_never_travel(make, shape, tmp_path):
    """A weight takes half a byte and its share of a scale instead of two; predictions follow, the wire has the same bytes."""
    import transformers

    from tests.helpers.checkpoints import save_checkpoint

    torch.manual_seed(0)
    half, module = (
        make(architecture=shape, lora=LoRA(rank=4, target_modules="all-linear", base=one)) for one in ("bf16", "nf4")
    )
    layers = [layer for layer in module.modules() if isinstance(layer, NF4Linear)]
    num = sum(layer.in_features * layer.out_features for layer in layers)
    x, labels = torch.randint(4, 30, (3, 6)), torch.zeros(3, dtype=torch.long)
    batch = (x, x if make is HFCausalLM else labels)
    costs = []
    for made in (half, module):
        submodels = Submodels(made, batch)
        submodels.attach_base(made)
        assert submodels.problem is None
        costs.append((submodels.cost(FULL, 1), sorted(submodels.axes)))
    (before, axes), (after, same) = costs
    assert axes == same and axes
    assert (after.down_bytes, after.up_bytes) == (before.down_bytes, before.up_bytes)
    held = [sum(p.nbytes for p in one.parameters() if not p.requires_grad) for one in (half, module)]
    assert num > 0 and held[0] - held[1] == num * (2 - 1 / 2 - 4 / 64) and after.peak_bytes < before.peak_bytes

    loss = module.training_step(batch, 0)
    loss.backward()
    assert all(p.grad is not None for p in module.parameters() if p.requires_grad)
    again = make.load_from_checkpoint(save_checkpoint(tmp_path, 1, module.state_dict(), module=module)).eval()
    module.eval()
    with torch.no_grad():
        assert torch.equal(again(x), module(x))
    module.save_pretrained(tmp_path / "model")
    auto = transformers.AutoModelForCausalLM if make is HFCausalLM else transformers.AutoModelForSequenceClassification
    plain, report = auto.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not any(report[part] for part in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        torch.testing.assert_close(plain.float().eval()(x).logits.float(), module(x).float(), rtol=0.05, atol=0.05)


def test_an_encoder_and_its_decoder_train_too():
    """T5 asks for the dtype of the next layer's weight, and casts to it."""
    torch.manual_seed(0)
    module = HFSeq2SeqLM(architecture=T5, lora=LoRA(rank=2, target_modules="all-linear", base="nf4"))
    batch = {"input_ids": torch.randint(5, 261, (2, 6)), "labels": torch.randint(5, 261, (2, 4))}
    module.training_step(batch, 0).backward()
    grads = [p.grad for name, p in module.named_parameters() if "lora_B" in name]
    assert grads and all(grad is not None and grad.any() for grad in grads)


@pytest.mark.parametrize(
    ("make", "shape"),
    [(HFCausalLM, LLAMA), (HFSequenceClassifier, BERT), (HFSeq2SeqLM, T5)],
    ids=["LLaMA", "BERT", "T5"],
)
@pytest.mark.parametrize("base", ["bf16", "nf4"])
def test_a_base_that_is_held_as_another_is_the_one_made_so_of_the_same_weights(make, shape, base, tmp_path):
    make(architecture=shape).save_pretrained(tmp_path)

    def made(base):
        torch.manual_seed(0)
        return make(name_or_path=str(tmp_path), lora=LoRA(rank=2, target_modules="all-linear", base=base))

    alone, several = made(base), made(["fp32", "bf16", "nf4"])
    assert several.submodel_bases == ("fp32", "bf16", "nf4") and alone.submodel_bases == ()
    several.submodel_hold(base)
    others = dict(several.named_parameters())
    assert list(others) == [name for name, _ in alone.named_parameters()]
    for name, parameter in alone.named_parameters():
        other = others[name]
        assert (parameter.requires_grad, parameter.dtype) == (other.requires_grad, other.dtype), name
        assert parameter.requires_grad or torch.equal(parameter, other), name
    alone.load_state_dict(several.state_dict())  # where adapters and heads begin may differ by a rounding
    x = torch.randint(4, 30, (3, 6), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": x, "labels": x} if make is HFSeq2SeqLM else (x, x if make is HFCausalLM else x[:, 0] % 2)
    losses = [one.eval().training_step(batch, 0) for one in (alone, several)]
    assert torch.equal(*losses)
    losses[1].backward()


def test_adapters_that_a_method_freezes_are_not_the_base():
    module = HFCausalLM(architecture=LLAMA, lora=LoRA(rank=2, target_modules="all-linear", base=["bf16", "nf4"]))
    frozen = [parameter for name, parameter in module.named_parameters() if ".lora_A." in name]
    for parameter in frozen:
        parameter.requires_grad_(False)
    before = [parameter.clone() for parameter in frozen]
    module.submodel_hold("nf4")
    after = [parameter for name, parameter in module.named_parameters() if ".lora_A." in name]
    assert all(one.dtype == other.dtype and torch.equal(one, other) for one, other in zip(before, after, strict=True))


@pytest.mark.long("tests/conformance/test_bases.py::test_each_client_has_what_its_memory_allows_and_the_plan_says_so")
def test_a_run_with_ranks_of_its_own_for_each_client(tmp_path):
    lora = LoRA(rank=RANK, target_modules=["query", "value"], base="nf4")
    algorithm = fed_buff(buffer_size=2, lora="raflora", submodel=rated())
    run = finish(lora_run(tmp_path / "run", algorithm, model=lambda: lora_bert(lora=lora), max_updates=8))
    assert run.summary["updates_merged"] == 8 and not run.summary["updates_refused"]
    sent = {int(row["client"]): int(row["bytes_up"]) for row in run.rows() if row["outcome"] == "merged"}
    assert len(sent) > 1 and sent == {client: trained_bytes(RANKS[client - 1]) for client in sent}


def test_what_has_no_linear_layers_is_refused():
    gpt2 = {"model_type": "gpt2", "n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 30, "n_positions": 8}
    with pytest.raises(ValueError, match=r"lora.base is 'nf4', but this gpt2 has no torch.nn.Linear .*: give bf16"):
        HFCausalLM(architecture=gpt2, lora=LoRA(base="nf4"))
    with pytest.raises(ValueError, match=r"lora.base is \['bf16', 'nf4'\], but this gpt2 has no .*: leave nf4 out"):
        HFCausalLM(architecture=gpt2, lora=LoRA(base=["bf16", "nf4"]))
