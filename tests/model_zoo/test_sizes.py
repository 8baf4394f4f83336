"""Numbers of parameters: by formulas derived by hand from the layers, and as the papers state them."""

from __future__ import annotations

import pytest
import torch

from model_zoo import VGG, VGG11, CharLM, FastText, KeywordSpotter, ResNet


def num_parameters(make):
    """Count without allocating anything."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in make().parameters())


def linear(before, after):
    return before * after + after


def transformer(make):
    pytest.importorskip("transformers")
    return num_parameters(make)


@pytest.mark.parametrize(("depth", "millions"), [(20, 0.27), (32, 0.46), (44, 0.66), (56, 0.85), (110, 1.7)])
def test_resnets_are_those_of_the_paper(depth, millions):
    """He et al. 2016, table 6, states the sizes to two digits."""
    n = (depth - 2) // 6

    def block(before, after):
        return 9 * before * after + 2 * after + 9 * after * after + 2 * after

    stages = [(16, 16), (16, 32), (32, 64)]
    expected = 27 * 16 + 2 * 16 + linear(64, 10)
    expected += sum(block(before, after) + (n - 1) * block(after, after) for before, after in stages)
    found = num_parameters(lambda: ResNet(depth))
    assert found == expected and round(found / 1e6, 2 if millions < 1 else 1) == millions
    # a projection adds a 1x1 convolution and a norm where the shape changes
    with_projection = num_parameters(lambda: ResNet(depth, projection=True))
    assert with_projection == expected + (16 * 32 + 64) + (32 * 64 + 128)


def test_resnet_depth_is_checked():
    with pytest.raises(ValueError, match="depth is 18: give 6n \\+ 2"):
        ResNet(18)


def test_vgg11():
    pairs = [(3, 64), (64, 128), (128, 256), (256, 256), (256, 512), (512, 512), (512, 512), (512, 512)]
    convolutions = sum(9 * before * after + after + 2 * after for before, after in pairs)
    assert num_parameters(VGG11) == convolutions + linear(512, 10) == 9_231_114


@pytest.mark.parametrize("layers", [["pool"], [4, "max"], [0], []])
def test_layers_of_a_vgg_that_are_none_are_named(layers):
    with pytest.raises(ValueError, match=r"VGG: layers is .*give numbers of channels above 0, and pool between them"):
        VGG(layers)


def test_a_vgg11_is_loaded_from_its_checkpoint(tmp_path):
    import lightning

    made = VGG11(1, width=0.1)
    checkpoint = {
        "state_dict": made.state_dict(),
        "hyper_parameters": dict(made.hparams),
        "epoch": 0,
        "global_step": 0,
        "pytorch-lightning_version": lightning.__version__,
    }
    torch.save(checkpoint, tmp_path / "one.ckpt")
    again = VGG11.load_from_checkpoint(tmp_path / "one.ckpt")
    assert num_parameters(lambda: again) == num_parameters(lambda: made)


def test_vgg11_has_the_convolutions_of_torchvision():
    torchvision = pytest.importorskip("torchvision")
    torch.manual_seed(0)
    layers = torchvision.models.vgg.make_layers(torchvision.models.vgg.cfgs["A"], batch_norm=True).eval()
    ours = VGG11().eval()
    ours.features.load_state_dict(layers.state_dict())
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(ours.features(x), layers(x))


def test_the_keyword_spotter_has_the_papers_79044():
    gru = 2 * 3 * (64 * 64 + 64 * 64 + 64 + 64)
    convolutions = (128 * 3 * 32 + 32) + (32 * 3 * 64 + 64)
    assert num_parameters(KeywordSpotter) == convolutions + gru + linear(128, 64) + linear(64, 36) == 79_044


def test_fasttext_and_the_character_models():
    assert num_parameters(lambda: FastText(500, 16, (12, 8), 4)) == 500 * 16 + linear(16, 12) + linear(12, 8) + linear(
        8, 4
    )
    for cell, gates in (("gru", 3), ("lstm", 4)):
        layers = gates * (8 * 256 + 256 * 256 + 2 * 256) + gates * (256 * 256 + 256 * 256 + 2 * 256)
        assert num_parameters(lambda cell=cell: CharLM(cell=cell)) == 65 * 8 + layers + linear(256, 65)
    with pytest.raises(ValueError, match="cell is 'rnn': give gru or lstm"):
        CharLM(cell="rnn")


@pytest.mark.parametrize(
    ("size", "classes", "shape", "stated"),
    [
        ("tiny", 200, (8, 512, 2048), "26M"),
        ("base", 300, (12, 768, 3072), "86M"),
        ("base-ext", 300, (16, 768, 3072), "0.11B"),
    ],
)
def test_vits_are_those_of_co_s2p(size, classes, shape, stated):
    """Table II of the paper: 26 M, 86 M and 0.11 B, for 224 x 224 images in patches of 16."""
    from model_zoo import ViT

    depth, d, mlp = shape
    block = 4 * linear(d, d) + linear(d, mlp) + linear(mlp, d) + 4 * d
    expected = linear(3 * 16 * 16, d) + d + (14 * 14 + 1) * d + depth * block + 2 * d + linear(d, classes)
    found = transformer(lambda: ViT(size, 224, 16, num_classes=classes))
    assert found == expected
    assert f"{found / 1e9:.2f}B" == stated or f"{found / 1e6:.0f}M" == stated


def test_bert_small():
    """Turc et al. 2019, table 1: 28.8 M with 30,522 word pieces."""
    from model_zoo import BERT

    d = 512
    block = 4 * linear(d, d) + linear(d, 4 * d) + linear(4 * d, d) + 4 * d
    expected = (30522 + 512 + 2) * d + 2 * d + 4 * block + linear(d, d) + linear(d, 2)
    found = transformer(BERT)
    assert found == expected and round(found / 1e6, 1) == 28.8


def test_albert_shares_one_block_and_its_word_vectors():
    from model_zoo import ALBERT

    e, d = 128, 768
    block = 4 * linear(d, d) + linear(d, 4 * d) + linear(4 * d, d) + 4 * d
    embeddings = (30000 + 512 + 2) * e + 2 * e + linear(e, d)
    head = linear(d, e) + 2 * e + 30000  # its matrix is the word vectors
    assert transformer(ALBERT) == embeddings + block + head


def test_llama_reaches_tinyllama():
    """Zhang et al. 2024: 1.1 B; 22 blocks of 2,048, 32 heads in 4 groups, MLPs of 5,632, 32,000 tokens."""
    from model_zoo import LLaMA

    d, kv = 2048, 4 * 64
    block = 2 * d * d + 2 * d * kv + 3 * d * 5632 + 2 * d
    expected = 2 * 32000 * d + 22 * block + d
    assert transformer(LLaMA) == expected == 1_100_048_384
    assert transformer(lambda: LLaMA(tied=True)) == expected - 32000 * d


@pytest.mark.parametrize("name", ["ViT", "BERT", "ALBERT", "LLaMA"])
def test_an_unknown_size_is_refused_with_those_there_are(name):
    import model_zoo

    with pytest.raises(ValueError, match=f"{name}: size is 'huge': give one of micro"):
        getattr(model_zoo, name)("huge")
