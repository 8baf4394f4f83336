"""Samples at evaluations: what they hold, that they leave no trace in a run, and what is refused."""

from __future__ import annotations

import csv
import io
import json

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import raafl
from model_zoo import MLP
from raafl.commands.report import build
from raafl.config.options import Samples
from raafl.errors import BadInput
from raafl.loggers import Tables
from raafl.runfolder.reading import read, sample_images
from raafl.runtime.lifecycle.samples import pixels_of, png
from tests.helpers.refusals import refuses
from tests.helpers.small_runs import digits


def run(folder, **samples):
    more = {"samples": samples} if samples else {}
    fed = raafl.Federation(
        "fed_avg", clients=2, max_updates=8, num_steps=1, eval_every=1, progress="quiet", output=folder, **more
    )
    return fed.simulate(lambda: MLP(64, (8,), 10), digits())


def rows_of(folder):
    with (folder / "samples.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_predictions_are_those_of_the_model_and_change_no_bit(tmp_path):
    with_them, without = run(tmp_path / "with", predictions=3, every=2), run(tmp_path / "without")
    assert with_them.summary["model_digest"] == without.summary["model_digest"]
    assert not (tmp_path / "without" / "samples.csv").exists()
    rows = rows_of(tmp_path / "with")
    assert [row["version"] for row in rows] == ["0"] * 3 + ["2"] * 3 + ["4"] * 3  # versions 1 and 3 are not their turn
    data = digits()
    data.setup("fit")
    images, labels = next(iter(data.test_dataloader()))
    likely, classes = torch.softmax(with_them.module(images[:3]), dim=1).max(dim=1)
    assert [int(row["output"]) for row in rows[-3:]] == classes.tolist()
    assert [int(row["expected"]) for row in rows[-3:]] == labels[:3].tolist()
    assert [float(row["probability"]) for row in rows[-3:]] == pytest.approx(likely.tolist(), abs=1e-4)
    columns, table = Tables(tmp_path / "with").all()["samples"]
    assert columns[:2] == ["version", "kind"] and len(table) == 9


class Letters:
    """A tokenizer: a letter is its code."""

    pad_token_id, eos_token_id = 0, 0

    def __call__(self, text, return_tensors):
        return {"input_ids": torch.tensor([[ord(letter) for letter in text]])}

    def decode(self, tokens, skip_special_tokens):
        return "".join(map(chr, tokens.tolist()))

    def save_pretrained(self, folder):
        pass


class Counter(nn.Module):
    """Writes as many x as were asked for, after what it was given; its weight is trained."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 10)

    def forward(self, x):
        return self.linear(x.flatten(1))

    def generate(self, input_ids, max_new_tokens, do_sample, **_):
        assert not do_sample and not self.training
        torch.rand(1)  # a trace, were the random state not restored
        return torch.cat([input_ids, torch.full((1, max_new_tokens), ord("x"))], dim=1)


def test_texts_are_what_the_model_writes_after_the_prompt(tmp_path):
    data = digits()
    data.tokenizer = Letters()
    found = []
    for samples in ({"prompts": ["a,b", "<i>"], "max_new_tokens": 4, "every": 4}, {}):
        torch.manual_seed(0)
        more = {"samples": samples} if samples else {}
        settings = {"clients": 2, "max_updates": 8, "num_steps": 1, "eval_every": 1, "progress": "quiet", **more}
        fed = raafl.Federation("fed_avg", output=tmp_path / str(len(found)), **settings)
        found.append(fed.simulate(Counter(), data, loss=nn.CrossEntropyLoss()).summary["model_digest"])
    assert found[0] == found[1]
    rows = rows_of(tmp_path / "0")
    assert [(row["version"], row["input"], row["output"]) for row in rows] == [
        (version, prompt, "xxxx") for version in ("0", "4") for prompt in ("a,b", "<i>")
    ]
    from raafl.commands.report import report

    page = tmp_path / "page.html"
    report([str(tmp_path / "0"), "--output", str(page)])
    assert "&lt;i&gt;" in page.read_text() and 'id="samples"' in page.read_text()


def test_prompts_need_a_tokenizer(tmp_path):
    with pytest.raises(BadInput, match="has no `tokenizer` of transformers: leave it out"):
        run(tmp_path / "run", prompts=["a"])
    assert json.dumps(Samples().prompts) == "[]"


@pytest.mark.parametrize(("name", "most"), [("images", 64), ("predictions", 1000)])
def test_no_more_samples_are_recorded_than_page_and_memory_bear(tmp_path, name, most):
    run(tmp_path / "most", **{name: most})
    with pytest.raises(BadInput, match=rf"samples\.{name} is {most + 1}: give at most {most}"):
        run(tmp_path / "more", **{name: most + 1})
    assert not (tmp_path / "more" / "metrics.csv").exists()


test_samples_are_checked = refuses(
    Samples,
    ({"every": 2}, "samples.every is 2, but nothing is recorded"),
    ({"max_new_tokens": 5, "predictions": 1}, "samples.max_new_tokens is 5, but there are no prompts"),
    ({"predictions": -1}, "samples.predictions is -1"),
)


def test_images_are_small_pictures_with_what_is_predicted_for_them(tmp_path):
    result = run(tmp_path / "run", images=2, every=2)
    rows = rows_of(tmp_path / "run")
    assert [row["version"] for row in rows] == ["0"] * 2 + ["2"] * 2 + ["4"] * 2
    found = sample_images(result.folder)
    assert [*found] == [0, 1]
    data = digits()
    data.setup("fit")
    images, _ = next(iter(data.test_dataloader()))
    for number, (content, _) in found.items():
        pixels = np.asarray(Image.open(io.BytesIO(content)))
        expected = images[number, 0] / images[number].max()  # the digits begin at 0
        assert pixels.shape == (8, 8) and abs(pixels / 255 - expected.numpy()).max() <= 0.5 / 255 + 1e-6
    page = build([read(result.folder)])
    assert page.count('src="data:image/png;base64,') == 2
    last = rows[-1]
    assert f"{last['output']} ({last['probability']}), is {last['expected']}; version 4" in page


def test_large_pictures_shrink_and_colours_stay():
    images = torch.zeros(1, 3, 96, 128)
    images[:, 2] = 5.0
    pixels = pixels_of(images)
    assert pixels.shape == (1, 48, 64, 3)
    assert pixels[0, 0, 0].tolist() == [0, 0, 255]
    assert Image.open(io.BytesIO(png(pixels[0]))).getpixel((63, 47)) == (0, 0, 255)


def test_what_is_no_image_has_no_picture():
    with pytest.raises(BadInput, match=r"samples\.images is given, but the model's inputs are"):
        pixels_of(torch.zeros(2, 64))
