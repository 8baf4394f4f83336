"""A task in two halves on real ranks: activations go up in the middle of it, gradients come down, batch by batch.

The server's half runs in the thread of the client's session, on a copy of the upper part of its own. The client waits for
each gradient; the server knows beforehand which batches must come, of how many samples, and waits for no longer than for the
answer to a whole task. What is not as it must be is refused, and the client told so, before it gets to a layer.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal, cast

import torch
from torch import Tensor

from raafl.compression.compressors import Compressor
from raafl.core.algorithm import Training
from raafl.core.types import Assignment, Update
from raafl.data.federated import ClientData
from raafl.errors import BadInput
from raafl.local.split import Draws, Received, UpperLocal, frame_for, receive, upper_seed
from raafl.local.train import FabricOptions, LocalTrainer, Stopped
from raafl.parts.split import KEY
from raafl.parts.split_cut import Shapes
from raafl.parts.split_half import Half, halves
from raafl.runtime.transport import GIVEN_UP, Kind, Message, Pair, PeerLost, PeerTimeout, Refused
from raafl.runtime.transport.codec import Expect
from raafl.submodel import FULL, FlatTensors, Layout, Submodels
from raafl.submodel.flat import DTYPES

MAX_BYTES = 1 << 31
"""Longest message of activations; samples are counted, but what else a batch's shapes say is the client's word."""

MAX_SIZE, MAX_TIMES = 4096, 16
"""Largest such size, or times the example batch's where that is more: a step may loop over it, which is followed."""

PRECISIONS = {"32-true": (), "32": (), "bf16-mixed": (torch.bfloat16,)}
"""Precisions that both halves know -> dtypes that an activation may have beside the model's own."""

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


# ---- the client's side ----


class ClientHalf:
    """The client's half of its tasks, and what it hears from the server in the middle of them."""

    crew = None  # halves are trained by one process each

    def __init__(self, pair: Pair, whole: LocalTrainer, wait_s: float) -> None:
        """Prepare; ``whole`` says how tasks are trained, ``wait_s`` is how long a gradient may take."""
        self._pair, self._whole, self._wait_s = pair, whole, wait_s
        self._built: tuple[str, LocalTrainer, Half] | None = None
        self._assignment: Assignment | None = None
        self._expected: Layout | None = None
        self._answers: queue.SimpleQueue[FlatTensors | None] = queue.SimpleQueue()

    def layout(self, assignment: Assignment) -> Layout:
        """Return the layout of what the client is sent; raises `SpecError` where the model cannot be cut so."""
        return self._half(assignment)[1].layout(FULL, "sent")

    def _half(self, assignment: Assignment) -> tuple[LocalTrainer, Half]:
        path = assignment.extra[KEY]["cut"]
        if self._built is None or self._built[0] != path:
            whole, half = self._whole, halves(self._whole.submodels, path)["lower"]
            half.exchange = self._exchange
            pools = whole._pooling is not None
            trainer = LocalTrainer(half, whole.local, whole.sends, whole.training, whole.options, pools=pools)
            self._built = path, trainer, half
        return self._built[1], self._built[2]

    @property
    def place(self) -> str:
        """Where in its task it is, in words."""
        return "" if self._built is None else self._built[1].place

    def release(self) -> None:
        """Let go of all memory that is not needed between two tasks."""
        if self._built is not None:
            self._built[1].release()

    def run(self, assignment: Assignment, received: FlatTensors, data: ClientData) -> Update:
        """Train this half; raises `Stopped` when the server has had enough, or is gone."""
        if self._whole.options.gradient_clip_val is not None:
            raise BadInput(
                f"fabric.gradient_clip_val is {self._whole.options.gradient_clip_val}: neither half of a model in two knows "
                "the norm of all gradients: leave it out, or clip in the model's own optimizer"
            )
        trainer, _ = self._half(assignment)
        trainer.stop, self._assignment = self._whole.stop, assignment
        return trainer.run(assignment, received, _Untested(data))  # type: ignore[arg-type]

    def _exchange(self, index: int, activation: Tensor, shapes: Shapes, leaves: list[Tensor]) -> Tensor:
        """Send a batch and wait for its gradient."""
        assert self._assignment is not None and self._built is not None
        named = {"activation": activation.contiguous()}
        named |= {f"batch.{place}": leaf for place, leaf in zip(self._built[2].cut.leaves, leaves, strict=True)}
        self._expected = Layout.pack([("gradient", activation.shape, activation.dtype)])
        options = self._whole.options
        meta = {
            "batch": index,
            "shapes": [list(shape) for shape in shapes],
            "dtype": _NAMES.get(activation.dtype, str(activation.dtype)),
            "precision": options.precision,
            "accumulate": options.accumulate_grad_batches,
            "sends": self._whole.sends,
        }
        number, incarnation = self._assignment.id, self._assignment.incarnation
        try:
            self._pair.send(Message(Kind.ACTIVATIONS, number, incarnation, meta, FlatTensors.from_named(named)))
            answer = self._answers.get(timeout=self._wait_s)
        except (PeerLost, PeerTimeout):  # the reader will say so
            raise Stopped from None
        except queue.Empty:
            self._pair.close()
            raise Stopped from None
        if answer is None:
            raise Stopped
        return answer["gradient"]

    def expect(self, assignment: int, meta: Mapping[str, Any]) -> FlatTensors:
        """Return where a gradient goes; for the thread that receives."""
        if self._expected is None or self._assignment is None or assignment != self._assignment.id:
            raise Refused("bad-kind", f"a gradient for assignment {assignment}, which waits for none")
        layout, self._expected = self._expected, None
        return FlatTensors.empty(layout, self._whole.fabric.device)

    def hear(self, gradient: FlatTensors | None) -> None:
        """Give the task that waits its gradient, or None: there will be none."""
        self._answers.put(gradient)


class _Untested:
    """A client's data without its own test part, on which half a model cannot be measured."""

    test = None

    def __init__(self, data: ClientData) -> None:
        self._data = data

    def __getattr__(self, name: str) -> Any:
        return getattr(self._data, name)


# ---- the server's side ----


class Link:
    """A session's pair for the time of one task; counts bytes each way, and the seconds that the client takes.

    Attributes:
        down_bytes: sent.
        up_bytes: received.
        stopping: asked whether the run has no more use for the task.
    """

    def __init__(
        self, pair: Pair, assignment: Assignment, task_s: float, send: Callable[[Message], int],
        stopping: Callable[[], bool],
    ) -> None:  # fmt: skip
        """Prepare; ``send`` sends a message, the client may take ``task_s`` in all."""
        self._pair, self._assignment, self._left_s, self._send = pair, assignment, task_s, send
        self.stopping = stopping
        self.down_bytes = self.up_bytes = 0

    def send(self, kind: Kind, meta: dict[str, Any], tensors: FlatTensors | None = None) -> None:
        """Send a message of this task."""
        number, incarnation = self._assignment.id, self._assignment.incarnation
        self.down_bytes += self._send(Message(kind, number, incarnation, meta, tensors))

    def recv(self, expect: Expect) -> Message:
        """Receive a message of this task; raises as `Pair.recv`."""
        since = time.monotonic()
        try:
            message = self._pair.recv(expect, max(self._left_s, 1e-3), finite=True)
        except Refused:
            self.up_bytes += self._pair.received_bytes
            raise
        self._left_s -= time.monotonic() - since
        self.up_bytes += self._pair.received_bytes
        return message


class ServerHalf:
    """The server's half of one client's tasks; keeps the module it has built."""

    def __init__(self, submodels: Submodels, device: torch.device | str, num_threads: int) -> None:
        """Prepare to compute on ``device``, with so many threads."""
        self._submodels, self._device, self._num_threads = submodels, torch.device(device), num_threads
        self._halves: tuple[str, dict[Any, Half]] | None = None
        self._trainer: tuple[Any, LocalTrainer] | None = None
        self._joined: FlatTensors | None = None

    def _of(self, assignment: Assignment) -> dict[Any, Half]:
        path = assignment.extra[KEY]["cut"]
        if self._halves is None or self._halves[0] != path:
            self._halves, self._trainer = (path, dict(halves(self._submodels, path))), None
        return self._halves[1]

    def lower(self, assignment: Assignment, snapshot: FlatTensors) -> FlatTensors:
        """Cut the values of the client's half, to be sent."""
        half = self._of(assignment)["lower"]
        return half.take_(FlatTensors.empty(half.layout(FULL, "sent"), snapshot.device), snapshot)

    def run(
        self, assignment: Assignment, snapshot: FlatTensors, link: Link, up: Compressor | None = None
    ) -> tuple[Message, Update]:
        """Train with the client at the other end of ``link``, whose values ``up`` compresses.

        Returns:
            The client's answer as it came, and the update of the server's half, whose tensors are good until the next task.

        Raises:
            Refused: the client has sent what it may not, or what a step cannot be made with.
            Stopped: the run has ended.
        """
        torch.set_num_threads(self._num_threads)  # of this thread
        both = self._of(assignment)
        upper: Half = both["upper"]
        plain = both["lower"].layout(FULL, "trained")
        stream = _Stream(upper, plain if up is None else up.layout(plain), assignment, link, self._device)
        trainer = self._make(upper, stream.begin())
        received = upper.take_(FlatTensors.empty(upper.layout(FULL, "sent"), self._device), snapshot)
        task = replace(assignment, seed=upper_seed(assignment.seed))
        try:
            with stream.draws:
                own = trainer.run(task, received, cast(Any, stream))
        except (Refused, Stopped, OSError, BadInput):
            raise
        except Exception as error:  # the step works on the server's own example: this batch of the client's is wrong
            raise Refused("failed-step", f"{type(error).__name__}: {' '.join(str(error).split())}") from error
        assert stream.answer is not None
        return stream.answer, own

    def joined(self, lower: FlatTensors, upper: FlatTensors) -> FlatTensors:
        """Return the whole model's trained values from those of both halves, in storage that is good until the next call."""
        if self._joined is None:
            self._joined = FlatTensors.empty(self._submodels.layout(FULL, "trained"), self._device)
        for name, tensor in self._joined.items():
            tensor.copy_(upper[name] if name in upper else lower[name])
        return self._joined

    def _make(self, upper: Half, terms: tuple[str, int, str]) -> LocalTrainer:
        if self._trainer is None or self._trainer[0] != terms:
            precision, accumulate, sends = terms
            kind, index = self._device.type, self._device.index
            options = FabricOptions(kind, index, precision, None, accumulate)
            how = cast(Literal["values", "delta"], sends)
            self._trainer = terms, LocalTrainer(upper, UpperLocal(), how, Training(), options, pools=True)
        return self._trainer[1]


class _Stream:
    """A client's batches as they come in, in the place of its data.

    Attributes:
        num_samples: of the client.
        answer: the client's, once all batches have been trained on.
        draws: what the server's half draws from; while it waits for the client, others draw.
    """

    test = None

    def __init__(self, upper: Half, answer: Layout, assignment: Assignment, link: Link, device: torch.device) -> None:
        """Expect what the assignment says; ``answer`` is the layout of the client's."""
        terms = assignment.extra[KEY]
        self.num_samples: int = terms["num_samples"]
        self._batch_size: int = terms["batch_size"]
        self._sends: str = terms.get("sends", "values")
        self._upper, self._layout, self._assignment, self._link, self._device = upper, answer, assignment, link, device
        self._per_epoch: int = terms["per_epoch"]
        self._total: int = terms["batches"]
        self._index = 0
        self._terms = ("", 0, "")
        self._shapes: Shapes = ()
        self._first: Received | None = None
        self.answer: Message | None = None
        self.draws = Draws(device)

    def num_batches(self, batch_size: int | None = None) -> int:
        """Return the number of batches in one epoch."""
        return self._per_epoch

    def begin(self) -> tuple[str, int, str]:
        """Wait for the first batch; return precision, batches to a step, and what the client sends."""
        self._first = self._receive()
        return self._terms

    def batches(self, *_: Any, **__: Any) -> Iterator[Received]:
        """Yield each batch as it comes; when the next is asked for, send the gradient of the last."""
        received = self._first
        assert received is not None
        self._first = None
        while True:
            yield received
            with self._aside():
                gradient = received.gradient
                assert gradient is not None
                if self._link.stopping():
                    raise Stopped
                values = FlatTensors.from_named({"gradient": gradient.contiguous()})
                self._link.send(Kind.GRADIENTS, {"batch": self._index}, values)
                del received, gradient, values
                self._index += 1
                if self._index == self._total:
                    self.answer = self._link.recv(self._expect)
                    return
                received = self._receive()

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """Let others draw within this context."""
        self.draws.__exit__()
        try:
            yield
        finally:
            self.draws.__enter__()

    def _receive(self) -> Received:
        tensors = self._link.recv(self._expect).tensors
        assert tensors is not None
        leaves = [tensors[f"batch.{place}"] for place in self._upper.cut.leaves]
        activation = tensors["activation"].detach().requires_grad_()
        return receive(self._upper.frames, self._shapes, activation, leaves)

    def _expect(self, kind: Kind, assignment: int, meta: dict[str, Any]) -> FlatTensors:
        if assignment != self._assignment.id:
            raise Refused("unknown-assignment", f"expected {self._assignment.id}, got {assignment}")
        if kind is Kind.FAILED:
            raise Refused(GIVEN_UP, "", Message(kind, assignment, meta=meta))
        wanted = Kind.ACTIVATIONS if self._index < self._total else Kind.UPDATE
        if kind is not wanted:
            raise Refused("bad-kind", f"expected {wanted.name} after {self._index} batches, got {kind.name}")
        layout = self._layout if kind is Kind.UPDATE else self._batch_layout(meta)
        return FlatTensors.empty(layout, self._device)

    def _batch_layout(self, meta: dict[str, Any]) -> Layout:
        """Return the layout of a batch as it must be, or refuse it."""
        if meta.get("batch") != self._index:
            raise Refused("bad-json", f"expected batch {self._index}, got {str(meta.get('batch'))[:40]}")
        terms = (meta.get("precision"), meta.get("accumulate"), meta.get("sends"))
        if self._index == 0:
            self._terms = _checked_terms(*terms, self._sends)
        elif terms != self._terms:
            raise Refused("bad-json", "precision, accumulate or sends have changed within a task")
        frames, shapes = self._upper.frames, self._checked_shapes(meta.get("shapes"))
        dtypes = [frames.dtypes[place] for place in self._upper.cut.leaves]
        sent = [
            (f"batch.{place}", shapes[place], dtype)
            for place, dtype in zip(self._upper.cut.leaves, dtypes, strict=True)
        ]
        try:
            outline = frame_for(frames, shapes, self._device).activation
        except ValueError as error:
            raise Refused("wrong-shape", str(error)) from None
        allowed = {_NAMES[dtype]: dtype for dtype in (outline.dtype, *PRECISIONS[self._terms[0]])}
        dtype = allowed.get(str(meta.get("dtype")))
        if dtype is None:
            raise Refused(
                "wrong-shape", f"the activation has dtype {str(meta.get('dtype'))[:40]}: expected {', '.join(allowed)}"
            )
        layout = Layout.pack([("activation", outline.shape, dtype), *sent])
        if layout.num_bytes > MAX_BYTES:
            raise Refused("too-large", f"a batch of {layout.num_bytes} bytes, at most {MAX_BYTES}")
        self._shapes = shapes
        return layout

    def _checked_shapes(self, given: Any) -> Shapes:
        """Return the shapes of the batch's tensors, if they may be those of the batch that is due."""
        examples = self._upper.frames.shapes
        place, samples = self._index % self._per_epoch, examples[0][0] if examples[0] else 1
        due = min(self._batch_size, self.num_samples - place * self._batch_size)
        if not isinstance(given, list) or len(given) != len(examples):
            raise Refused("wrong-shape", f"shapes of {len(examples)} tensors expected, got {str(given)[:80]}")
        for shape, example in zip(given, examples, strict=True):
            good = isinstance(shape, list) and len(shape) == len(example)
            good = good and all(type(size) is int and 0 < size < 2**31 for size in shape)
            if not good or (example and example[0] == samples and shape[0] != due):
                raise Refused("wrong-shape", f"{str(shape)[:80]} in the place of {[due, *example[1:]]}")
            if any(n > max(MAX_SIZE, MAX_TIMES * size) for n, size in zip(shape[1:], example[1:], strict=True)):
                raise Refused("too-large", f"{str(shape)[:80]} in the place of {[due, *example[1:]]}")
        return tuple(tuple(shape) for shape in given)


def _checked_terms(precision: Any, accumulate: Any, sends: Any, wanted: str) -> tuple[str, int, str]:
    if precision not in PRECISIONS if isinstance(precision, str) else True:
        raise Refused("bad-json", f"precision {str(precision)[:40]}: two halves know {', '.join(PRECISIONS)}")
    if type(accumulate) is not int or not 0 < accumulate < 2**31:
        raise Refused("bad-json", f"accumulate {str(accumulate)[:40]}: a number of batches is expected")
    if sends != wanted:
        raise Refused("bad-json", f"sends {str(sends)[:40]}: the merge takes {wanted}")
    return precision, accumulate, wanted
