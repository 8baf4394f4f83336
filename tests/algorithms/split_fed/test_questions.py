"""A client's batches as the server takes them in: nothing but what is due, of shapes that the model can take."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from raafl.algorithms.split_fed.exchange import halves
from raafl.core.types import Assignment
from raafl.errors import InvalidPayload
from raafl.submodel import FULL, FlatTensors, Submodels
from tests.helpers.coordinators import EXAMPLE, Line

TERMS = {"cut": "fc1", "batch_size": 2, "num_samples": 3, "per_epoch": 2, "batches": 2, "samples": 3}
META = {"precision": "32-true", "sends": "values", "dtype": "float32"}


class Wire:
    """The server's end: what the client asks is known beforehand."""

    def __init__(self, *questions):
        self.questions, self.replies = list(questions), []

    def hear(self, expect):
        changes, named = self.questions.pop(0)
        index, (activation, labels) = len(self.replies), named
        shapes = [[len(labels), 2], [len(labels)]]
        layout = expect({**META, "batch": index, "shapes": shapes, **changes})
        dtype = layout.by_name["activation"].dtype
        return FlatTensors.from_named(
            {"activation": torch.tensor(activation, dtype=dtype), "batch.1": torch.tensor(labels)}, layout
        )

    def reply(self, tensors):
        self.replies.append(tensors["gradient"].tolist())

    def draws(self, seed):
        return nullcontext()


FIRST, LAST = ([[3.0, 3.0], [1.0, -1.0]], [5.0, 2.0]), ([[5.0, -5.0]], [2.0])


def asked(wire, **terms):
    task = Assignment(1, 4, 0, 0, 0, FULL, 0, 1, None, 5, 0.0, extra={"split": {**TERMS, **terms}})
    return halves(Submodels(Line(2), EXAMPLE), "fc1").questions(task, wire)


def test_each_batch_is_answered_by_its_gradient_when_the_next_is_asked_for():
    wire = Wire(({}, FIRST), ({}, LAST))
    questions = asked(wire)
    assert (questions.num_samples, questions.num_batches(), questions.test) == (3, 2, None)
    seen = []
    for received, _ in questions.batches():
        seen.append((received.activation.tolist(), received.batch[1].tolist()))
        assert len(wire.replies) == len(seen) - 1
        inputs = received.batch[0]
        assert (inputs.shape[1], inputs.untyped_storage().nbytes()) == (2, 4)  # a blank: inputs stay at the client
        if len(seen) == 1:
            (2 * received.activation).sum().backward()
    assert seen == [FIRST, LAST]
    assert wire.replies == [[[2.0, 2.0], [2.0, 2.0]], [[0.0, 0.0]]]  # 0 where the loss does not depend on it


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"shapes": [[1, 2], [1]]}, "wrong-shape"),  # two samples are due
        ({"shapes": [[2, 3], [2]]}, "wrong-shape"),  # no such inputs fit into the model
        ({"shapes": [[2, 2]]}, "wrong-shape"),
        ({"shapes": [[2, 2], [2, 1]]}, "wrong-shape"),
        ({"shapes": [[2, -2], [2]]}, "wrong-shape"),
        ({"shapes": "many"}, "wrong-shape"),
        ({"shapes": [[2, 2**30], [2]]}, "too-large"),  # before it is tried what a step of it looks like
        ({"dtype": "float64"}, "wrong-shape"),
        ({"dtype": "bfloat16"}, "wrong-shape"),
        ({"batch": 1}, "bad-json"),
        ({"sends": "delta"}, "bad-json"),  # not what the merge takes
    ],
)
def test_a_batch_that_is_not_the_one_due_is_refused(changes, reason):
    with pytest.raises(InvalidPayload) as caught:
        asked(Wire((changes, FIRST)))
    assert caught.value.reason == reason


def test_mixed_precision_may_send_either_dtype():
    for precision, dtype in (("bf16-mixed", "bfloat16"), ("bf16-mixed", "float32"), ("32-true", "float32")):
        questions = asked(Wire(({"precision": precision, "dtype": dtype}, FIRST)))
        assert next(iter(questions.batches()))[0].activation.dtype == getattr(torch, dtype)
