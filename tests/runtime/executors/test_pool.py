"""Worker processes, which are forked."""

from __future__ import annotations

import gc
import os

from model_zoo import MLP
from tests.helpers.small_runs import experiment, finish

HERE = os.getpid()


class Inherited:
    """Garbage that may not end in another process, as a connection may not whose threads were not forked with it."""

    def __init__(self, note):
        self.note, self.me = note, self  # a cycle, which only the collector ends

    def __del__(self):
        if os.getpid() != HERE:
            self.note.touch()


class Collecting(MLP):
    def __init__(self):
        super().__init__(64, (24,), 10)

    def training_step(self, batch, batch_idx):
        if os.getpid() != HERE:
            gc.collect()
        return super().training_step(batch, batch_idx)


def test_a_worker_leaves_its_parents_garbage_alone(tmp_path):
    note = tmp_path / "ended in a worker"
    gc.disable()
    try:
        Inherited(note)
        run = finish(experiment(tmp_path / "run", "fed_avg", model=Collecting, workers=2, max_updates=4))
    finally:
        gc.enable()
    assert run.summary["finished"] == "max_updates" and not note.exists()
