"""Compare training clients as one batch with client by client: trainings per second of the same simulated runs.

Two kinds of rows. `task`: cohorts of a size, trained together and asked for one by one, over the loop's `LocalTrainer.run`
of the same tasks, without a run around them. Whole runs: each algorithm with `batch_clients` 1 and `auto`, and the bare
PyTorch loop of `benchmarks.overhead`, alternately. All in CPU seconds of the one thread that trains (so that other programs
disturb less), the least of several repeats.

    python -m benchmarks.cohorts [--json] [--out FILE]

`per_s` is client trainings per second, `bare_per_s` the loop's (of a task) or the bare loop's (of a run), `ratio` the one over
the other, `over_loop` that over the same run with batch_clients 1, `in_vain` the share of trainings that nobody asked for,
`peak_bytes` the growth of the process's memory over what it held before, `equal` whether the digest is the loop's.
"""

from __future__ import annotations

import gc
import itertools
import multiprocessing as mp
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from lightning import LightningModule
from torch import Tensor, nn

from benchmarks.common import Row, forget_peak, main, status_bytes
from benchmarks.overhead import Bare, RandomData, Workload
from model_zoo import CNN, MLP, CharLM, HFSequenceClassifier, ResNet, ViT
from model_zoo.lora import LoRA
from raafl import Experiment, fed_async, fed_avg, fed_buff, fed_raa, hetero_fl
from raafl.core.algorithm import Algorithm, Local, Training
from raafl.core.coordinator import Coordinator
from raafl.core.hooks import RunHooks
from raafl.core.types import Assignment, Event
from raafl.data import Iid
from raafl.data.federated import ClientData
from raafl.local.malloc import keep_freed
from raafl.local.stacked import CohortTrainer, Member
from raafl.local.train import FabricOptions, LocalTrainer
from raafl.runtime.run import simulate
from raafl.submodel import FULL, Submodels

REPEATS, RUN_REPEATS = 3, 2
SIZES = (4, 16, 32, 64)
MOST_BYTES = 1 << 30
"""Values, gradients and optimiser state of the cohorts that are measured at most."""
VOCABULARY, TEXT, CHARACTERS = 1000, 16, 20


def mlp(*widths: int) -> Callable[[], LightningModule]:
    """Return a function that makes an MLP of these widths."""
    return lambda: MLP(widths[0], widths[1:-1], widths[-1], lr=0.005, momentum=0.5)


def resnet_8() -> LightningModule:
    """Make ResNet-8 with group norms."""
    module = ResNet(8)
    for part in list(module.modules()):
        for name, child in part.named_children():
            if isinstance(child, nn.BatchNorm2d):
                setattr(part, name, nn.GroupNorm(4, child.num_features))
    return module


def bert(lora: LoRA | None = None) -> LightningModule:
    """Make a BERT of two blocks of width 32, or one whose adapters and head train alone."""
    architecture = {
        "model_type": "bert",
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "intermediate_size": 128,
        "num_attention_heads": 2,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": TEXT,
    }
    return HFSequenceClassifier(num_classes=10, pretrained=False, architecture=architecture, lr=1e-3, lora=lora)


def texts(num: int) -> tuple[Tensor, ...]:
    """Draw tokens without padding, and classes."""
    tokens = torch.randint(1, VOCABULARY, (num, TEXT))
    return tokens, torch.ones_like(tokens), torch.randint(0, 10, (num,))


def characters(num: int) -> tuple[Tensor, ...]:
    """Draw characters, with the next character of each as its label."""
    drawn = torch.randint(0, 65, (num, CHARACTERS + 1))
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Make the optimiser of the zoo's transformers."""
    return torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.01)


def workload(name: str, make: Callable[[], LightningModule], *shape: int, **more: Any) -> Workload:
    """Return a workload of 200 clients, 100 of them at work, with tasks of five steps on batches of ten.

    `shape`: shape of a sample. `more`: fields of `Workload` that differ.
    """
    plain: dict[str, Any] = {
        "clients": 200,
        "cohort": 100,
        "samples": 50,
        "batch_size": 10,
        "num_steps": 5,
        "rounds": 20,
    }
    return Workload(name, make, shape, **(plain | more))


SMALL = workload("mlp 64-32-10", mlp(64, 32, 10), 64)
LOGISTIC = workload("logistic regression 784", mlp(784, 10), 784)
BERT = workload("bert 2 x 32", bert, draw=texts, optimizer=adamw, rounds=4)
LORA = workload("bert 2 x 32, LoRA", lambda: bert(LoRA(4)), draw=texts, optimizer=adamw, rounds=4)
LSTM = workload("char-lstm", lambda: CharLM(hidden=128, cell="lstm"), draw=characters, optimizer=adamw, rounds=1)
RESNET = workload("resnet-8, group norm", resnet_8, 3, 32, 32, clients=100, cohort=50, num_steps=2, rounds=3)
CONVOLUTIONS = workload("cnn", lambda: CNN(3, 32), 3, 32, 32, clients=100, cohort=50, num_steps=2, rounds=4)
VIT = workload(
    "vit micro",
    lambda: ViT("micro"),
    3,
    32,
    32,
    clients=100,
    cohort=50,
    num_steps=1,
    optimizer=adamw,
    rounds=12,
)
LEAF = workload("cnn of LEAF's size", lambda: CNN(1, 28, hidden=(2048, 84), num_classes=62), 1, 28, 28)
WIDE = workload("mlp 784-200-200-10", mlp(784, 200, 200, 10), 784, rounds=12)
TASKS = (
    LOGISTIC,
    SMALL,
    workload("mlp 64-128-10", mlp(64, 128, 10), 64),
    workload("mlp 784-48-10", mlp(784, 48, 10), 784),
    WIDE,
    BERT,
    LORA,
    LSTM,
    LEAF,
    RESNET,
    CONVOLUTIONS,
    VIT,
)
SLOW = (LSTM, LEAF, RESNET, CONVOLUTIONS, VIT)
"""Of which the cohorts of 32 and 64 take minutes, and show what 16 do."""
FEW = replace(SMALL, name="mlp 64-32-10, 20 at work", clients=40, cohort=20, rounds=40)
MANY = replace(SMALL, name="mlp 64-32-10, 1,000 at work", clients=2000, cohort=1000, rounds=3)
RUNS = {
    SMALL: ("fed_avg", "fed_async", "fed_buff", "fed_raa", "hetero_fl"),
    FEW: ("fed_avg", "fed_async"),
    MANY: ("fed_avg", "fed_async", "fed_buff"),
    LOGISTIC: ("fed_avg", "fed_async"),
    WIDE: ("fed_async",),
    BERT: ("fed_avg", "fed_async"),
    LORA: ("fed_async",),
    LSTM: ("fed_async",),
    RESNET: ("fed_async",),
    CONVOLUTIONS: ("fed_async",),
    VIT: ("fed_async",),
}
WHERE: Row = {"device": "cpu", "processes": 1}


def task_rows(work: Workload) -> list[Row]:
    """Measure batches of clients of several sizes on one model, beside training one by one."""
    torch.manual_seed(0)
    sizes = SIZES[:2] if work in SLOW else SIZES
    most = max(sizes)
    work = replace(work, clients=most)
    data, module = RandomData(work), work.model()
    submodels = Submodels(module, [tensor[:2] for tensor in data.samples.tensors])
    values = submodels.state(module)
    training = Training(num_epochs=None, num_steps=work.num_steps, batch_size=work.batch_size)
    trainer = LocalTrainer(submodels, Local(), "values", training)
    together = CohortTrainer(trainer)
    tasks = []
    for client in range(most):
        rows = torch.arange(client * work.samples, (client + 1) * work.samples)
        task = Assignment(client + 1, client + 1, 0, 0, 0, FULL, 0, None, None, 1000 + client, 0.0)
        tasks.append(Member(task, values, ClientData(data.samples, rows, work.batch_size)))
    sizes = [size for size in sizes if size == sizes[0] or size * together.num_bytes(FULL) <= MOST_BYTES]

    def cohort_s(size: int) -> float:
        begin = time.thread_time()
        trained = together.train(tasks[:size])
        for task in tasks[:size]:
            trained.update(task.assignment.id)
        return (time.thread_time() - begin) / size

    def loop_s() -> float:
        begin = time.thread_time()
        for task in tasks[:8]:
            trainer.run(*task)
        return (time.thread_time() - begin) / 8

    least: dict[int, float] = {}
    grown: dict[int, int] = {}
    for repeat in range(REPEATS + 1):
        found = {0: loop_s()}
        for size in sizes:
            before = forget_peak()
            found[size] = cohort_s(size)
            grown[size] = max(status_bytes("VmHWM") - before, 0)  # the kernel updates its count of pages in batches
        if repeat:  # the first repeat is the warm-up
            least = {size: min(seconds, least.get(size, seconds)) for size, seconds in found.items()}
    return [
        {
            "workload": work.name,
            "algorithm": "task",
            "batch_clients": size,
            **WHERE,
            "at_work": size,
            "per_s": 1 / least[size],
            "bare_per_s": 1 / least[0],
            "ratio": least[0] / least[size],
            "mean_cohort": size,
            "in_vain": 0.0,
            "peak_bytes": grown[size],
            "equal": _equal(trainer, together, tasks[:size]),
        }
        for size in sizes
    ]


def _equal(trainer: LocalTrainer, together: CohortTrainer, tasks: list[Member]) -> bool:
    trained = together.train(tasks)
    alone = [trainer.run(*task).tensors.fingerprint() for task in tasks]
    return alone == [trained.update(task.assignment.id).tensors.fingerprint() for task in tasks]


def run(
    work: Workload, data: RandomData, algorithm: Algorithm, batch_clients: Any, folder: Path, device: str = "cpu"
) -> tuple[float, Any]:
    """Run a whole simulation; return its seconds, and its summary with ``peak_bytes`` beyond the memory before.

    Seconds are CPU seconds of the training thread or, with a GPU, of the wall clock. `batch_clients`: as in the config.
    """
    experiment = Experiment(
        model=work.model,
        data=lambda: data,
        algorithm=algorithm,
        partition=Iid(),
        clients=work.clients,
        train=Training(num_epochs=None, num_steps=work.num_steps, batch_size=work.batch_size),
        max_updates=work.trainings,
        eval_every=10**9,
        batch_clients=batch_clients,
        output=str(folder),
        progress="quiet",
        server_device=device,
        fabric=FabricOptions(accelerator=device.partition(":")[0]),
    )
    watch, before = _Stopwatch(time.thread_time if device == "cpu" else time.perf_counter), forget_peak()
    summary, _ = simulate(experiment, observer=watch)
    return watch.seconds, summary | {"peak_bytes": status_bytes("VmHWM") - before}


class _Stopwatch(RunHooks):
    """Observer that measures from a run's first event to its last, without the set-up that all runs share."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._begun: float | None = None
        self.seconds = 0.0

    def on_event(self, event: Event, coordinator: Coordinator, now: float) -> None:
        """Read the clock at this event."""
        at = self._clock()
        self._begun = at if self._begun is None else self._begun
        self.seconds = at - self._begun


def run_rows(work: Workload, methods: dict[str, Algorithm]) -> list[Row]:
    """Measure whole runs of each algorithm, one client at a time and with ``batch_clients: auto``."""
    data = RandomData(work)
    bare, ways = Bare(work, data), (1, "auto")
    least: dict[Any, float] = {}
    summaries: dict[Any, dict[str, Any]] = {}

    def take(key: Any, seconds: float) -> None:
        least[key] = min(seconds, least.get(key, seconds))

    with tempfile.TemporaryDirectory() as folder:
        bare.train(0)
        for repeat in range(RUN_REPEATS):
            gc.collect()
            begin = time.thread_time()
            bare.run()
            take("bare", time.thread_time() - begin)
            for (name, algorithm), way in itertools.product(methods.items(), ways):
                seconds, summaries[name, way] = run(work, data, algorithm, way, Path(folder) / f"{name}{way}{repeat}")
                take((name, way), seconds)
    found = []
    for name in methods:
        for way in ways:
            summary = summaries[name, way]
            batched = summary.get("batched", {"mean_cohort": 1.0, "share": 0.0, "in_vain": 0})
            per_s, bare_per_s = work.trainings / least[name, way], work.trainings / least["bare"]
            found.append(
                {
                    "workload": work.name,
                    "algorithm": name,
                    "batch_clients": way,
                    **WHERE,
                    "at_work": work.cohort,
                    "per_s": per_s,
                    "bare_per_s": bare_per_s,
                    "ratio": per_s / bare_per_s,
                    "over_loop": least[name, 1] / least[name, way],
                    "mean_cohort": batched["mean_cohort"],
                    "share": batched["share"],
                    "in_vain": batched["in_vain"] / work.trainings,
                    "peak_bytes": summary["peak_bytes"],
                    "equal": summary["model_digest"] == summaries[name, 1]["model_digest"],
                }
            )
    return found


def on_device(device: str, folder: Path, short: bool = False) -> list[Row]:
    """Measure whole runs of three models on a device: one by one, as batches, and as fast batches, each after a warm-up.

    `short`: only a few tasks of one model, to show that they work.
    """
    rows = []
    for work in (replace(SMALL, clients=8, cohort=4, rounds=1),) if short else (WIDE, CONVOLUTIONS, VIT):
        data, seconds = RandomData(work), dict[Any, float]()
        summaries: dict[Any, dict[str, Any]] = {}
        for way, name in itertools.product((1, "auto", "fast"), ("warm", "measured")):
            few = work if name == "measured" else replace(work, rounds=1)
            at = folder / f"{work.name}-{way}-{name}"
            seconds[way], summaries[way] = run(few, data, fed_async(cohort=work.cohort), way, at, device)
        rows.append(
            {
                "workload": work.name,
                "loop_per_s": work.trainings / seconds[1],
                "per_s": work.trainings / seconds["auto"],
                "over_loop": seconds[1] / seconds["auto"],
                "mean_cohort": summaries["auto"].get("batched", {}).get("mean_cohort", 1),
                "fast_over_loop": seconds[1] / seconds["fast"],
                "fast_cohort": summaries["fast"].get("batched", {}).get("mean_cohort", 1),
            }
        )
    return rows


def algorithms(cohort: int) -> dict[str, Algorithm]:
    """Return the algorithms to measure, with ``cohort`` clients at work."""
    return {
        "fed_avg": fed_avg(cohort=cohort),
        "fed_async": fed_async(cohort=cohort),
        "fed_buff": fed_buff(buffer_size=10, cohort=cohort),
        "fed_raa": fed_raa(fragments=3, cohort=cohort),
        "hetero_fl": hetero_fl(rates=[1.0, 0.75, 0.5, 0.25], cohort=cohort),
    }


def small() -> list[Row]:
    """Measure whole runs of the smallest model only, for `benchmarks.against`."""
    torch.set_num_threads(1)
    keep_freed()
    return run_rows(SMALL, algorithms(SMALL.cohort))


def measured(place: int) -> list[Row]:
    """Measure batches of model number ``place`` or, for numbers beyond the models, whole runs of one workload."""
    if place < len(TASKS):
        return task_rows(TASKS[place])
    work, names = list(RUNS.items())[place - len(TASKS)]
    methods = algorithms(work.cohort)
    return run_rows(work, {name: methods[name] for name in names})


def rows() -> list[Row]:
    """Measure batches of every model, then whole runs, each in a fresh process with its own memory."""
    torch.set_num_threads(1)
    keep_freed()
    with mp.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        return [row for found in pool.imap(measured, range(len(TASKS) + len(RUNS))) for row in found]


if __name__ == "__main__":
    main("cohorts", rows)
