"""Record what the global model writes for fixed prompts, and predicts for fixed samples, at evaluations (samples.csv).

Texts are written greedily by a copy of the model in eval mode, and random states are restored: a run with samples has the
digest of one without, and a repeated run has the same samples.
"""

from __future__ import annotations

import csv
import struct
import zlib
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from raafl.core.hooks import RunHooks
from raafl.errors import USER_ERRORS, BadInput, briefly
from raafl.rng import undisturbed
from raafl.runfolder.append_file import read_table, write_table
from raafl.runfolder.reading import MOST_IMAGES, sample_rows
from raafl.runfolder.schema import METRICS, SAMPLE_COLUMNS, SAMPLE_IMAGES, SAMPLES
from raafl.runtime.lifecycle.checkpointer import cause
from raafl.runtime.lifecycle.export import tokenizer_of
from raafl.submodel import FlatTensors
from raafl.submodel.cut.layers import copy_structure

MOST_PREDICTIONS = 1000
"""Largest number of test samples of an evaluation: they are one batch, and a row of about 40 bytes each.

A report reads five evaluations of so many whole at either end of a run, and shows the first 100 of the first and last.
"""
_MAX_SIDE = 64
"""Largest height and width of a recorded picture, in pixels."""


class SampleRecorder(RunHooks):
    """Observer that adds rows to samples.csv: at the first model of a run, and at each ``every``-th evaluation after it."""

    def __init__(self, run: Any) -> None:
        """Create the observer that records what the setting ``samples`` of ``run`` names."""
        self._run, self._options = run, run.parts.experiment.samples
        self._tokenizer: Any = None
        self._num_evaluations, self._warned = 0, False

    def begin(self, run: Any, saved: object = None) -> None:
        """Find the tokenizer and the model's method to write; raise `BadInput` where there is none."""
        data = run.parts.data.datamodule
        if self._options.prompts:
            self._tokenizer = tokenizer_of(data)
            if self._tokenizer is None:
                raise BadInput(
                    f"samples.prompts is given, but {type(data).__name__} has no `tokenizer` of transformers: leave it out"
                )
            writer_of(run.parts.module)
        for name, most in (("predictions", MOST_PREDICTIONS), ("images", MOST_IMAGES)):
            if (num := getattr(self._options, name)) > most:
                raise BadInput(f"samples.{name} is {num}: give at most {most}")
        if self._options.num_predictions:
            inputs, _ = pair_of(run.parts.data, self._options.num_predictions)
            if self._options.images:
                pixels_of(inputs)

    def opened(self) -> None:
        """Continue from the checkpoint from which a run is resumed: remove later rows, and count the evaluations before it."""
        version = self._run.record.evaluated_version
        if (rows := sample_rows(self._run.folder, most=None)) is not None:
            write_table(self._path, [SAMPLE_COLUMNS, *(row for row in rows if int(row[0]) <= version)])
            # of each second evaluation the rows here do not tell whether one has passed since
            measured = islice(read_table(self._run.folder / METRICS), 1, None)
            self._num_evaluations = sum(row[0] != "0" for row in measured)

    def start(self) -> None:
        """Record the samples of a new run's first model."""
        if not self._run.resumed:
            if self._options.images:
                self._write_images()
            self._record(0, self._run.parts.coordinator.state.values)

    def on_values(self, version: int, metrics: Mapping[str, float], values: FlatTensors) -> None:
        """Record the samples of an evaluated model where it is its turn; see `RunHooks.on_values`."""
        self._num_evaluations += 1
        if self._num_evaluations % self._options.every == 0:
            self._record(version, values)

    @property
    def _path(self) -> Path:
        folder: Path = self._run.folder
        return folder / SAMPLES

    def _record(self, version: int, values: FlatTensors) -> None:
        try:
            with undisturbed(), torch.no_grad():
                module = copy_structure(self._run.parts.module, {})
                self._run.parts.submodels.load_(module, values.to("cpu"))
                module.eval()
                self._write([{"version": version, **row} for row in self._rows(module)])
        except USER_ERRORS as error:
            if not self._warned:
                self._warned = True
                self._run.progress.warn(f"samples of version {version} cannot be recorded: {cause(error)}")

    def _rows(self, module: nn.Module) -> Iterator[dict[str, Any]]:
        for prompt in self._options.prompts:
            yield {"kind": "text", "input": prompt, "output": self._written(module, prompt)}
        if not self._options.num_predictions:
            return
        inputs, labels = pair_of(self._run.parts.data, self._options.num_predictions)
        found = module(inputs)
        likely, classes = torch.softmax(getattr(found, "logits", found).float(), dim=-1).max(dim=-1)
        for i, (label, guess, share) in enumerate(zip(labels.tolist(), classes.tolist(), likely.tolist(), strict=True)):
            row = {"kind": "class", "input": f"test sample {i}", "output": guess}
            yield row | {"expected": label, "probability": f"{share:.4f}"}

    def _write_images(self) -> None:
        inputs, _ = pair_of(self._run.parts.data, self._options.images)
        folder = self._run.folder / SAMPLE_IMAGES
        try:
            folder.mkdir(exist_ok=True)
            for number, pixels in enumerate(pixels_of(inputs)):
                (folder / f"{number}.png").write_bytes(png(pixels))
        except OSError as error:
            self._run.progress.warn(f"pictures of samples cannot be written: {cause(error)}")

    def _written(self, module: nn.Module, prompt: str) -> str:
        """Continue a prompt by greedy decoding, and return the text that the model wrote."""
        given = self._tokenizer(prompt, return_tensors="pt")["input_ids"]
        writer = writer_of(module)
        pad = self._tokenizer.pad_token_id if self._tokenizer.pad_token_id is not None else self._tokenizer.eos_token_id
        written = writer.generate(
            input_ids=given,
            attention_mask=torch.ones_like(given),
            max_new_tokens=self._options.max_new_tokens,
            do_sample=False,
            num_beams=1,
            pad_token_id=pad,
        )[0]
        encoder_decoder = getattr(getattr(writer, "config", None), "is_encoder_decoder", False)
        answer = written if encoder_decoder else written[given.shape[1] :]
        return str(self._tokenizer.decode(answer, skip_special_tokens=True))

    def _write(self, rows: list[dict[str, Any]]) -> None:
        is_new = not self._path.is_file()
        with self._path.open("a", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, SAMPLE_COLUMNS, lineterminator="\n")
            if is_new:
                writer.writeheader()
            writer.writerows(rows)


def writer_of(module: nn.Module) -> Any:
    """Return the part of a module that has transformers' ``generate``; raise `BadInput` where none has."""
    for part in module.modules():
        if callable(getattr(type(part), "generate", None)):
            return part
    raise BadInput(f"samples.prompts is given, but no part of {type(module).__name__} has `generate`: leave it out")


def pair_of(data: Any, num: int) -> tuple[Any, Tensor]:
    """Return inputs and labels of the first ``num`` samples that are measured.

    Raises:
        BadInput: batches are no pairs, or labels are not whole numbers.
    """
    batch, _ = next(iter(data.test_batches(num)))
    pair = isinstance(batch, list | tuple) and len(batch) == 2 and isinstance(batch[1], Tensor)
    if not pair or batch[1].dim() != 1 or batch[1].is_floating_point():
        raise BadInput(
            f"samples.predictions is {num}, but a batch of the data is {briefly(batch)}, no pair of inputs and classes: "
            "leave it out"
        )
    return batch[0], batch[1]


def pixels_of(inputs: Any) -> Tensor:
    """Return images as bytes (batch, height, width, 1 or 3), at most 64 pixels on a side, each from its least to its largest value.

    Raises:
        BadInput: the inputs are no images (batch, 1 or 3 channels, height, width).
    """
    if not isinstance(inputs, Tensor) or inputs.dim() != 4 or inputs.shape[1] not in (1, 3):
        raise BadInput(
            f"samples.images is given, but the model's inputs are {briefly(inputs)}, no images with 1 or 3 channels: "
            "give samples.predictions"
        )
    images = inputs.detach().float()
    scale = _MAX_SIDE / max(images.shape[2:])
    if scale < 1:
        size = [max(round(side * scale), 1) for side in images.shape[2:]]
        images = nn.functional.interpolate(images, size, mode="area")
    least, most = images.amin((1, 2, 3), keepdim=True), images.amax((1, 2, 3), keepdim=True)
    scaled = (images - least) / (most - least).clamp(min=1e-12)
    return (scaled * 255).round().to(torch.uint8).permute(0, 2, 3, 1)


def png(pixels: Tensor) -> bytes:
    """Return an image (height, width, 1 or 3) of bytes as a PNG file."""
    height, width, channels = pixels.shape

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    rows = b"".join(
        b"\0" + row.numpy().tobytes() for row in pixels.contiguous()
    )  # the filter byte of each row, 0 = none
    head = struct.pack(">IIBBBBB", width, height, 8, 0 if channels == 1 else 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows, 9)) + chunk(b"IEND", b"")
