"""Define the rows of `make gpu` that measure training: whole runs, and bare loops of PyTorch beside them in the same process.

Each function returns a row by its name; a row is measured on its own, so that one that fails costs no other. What is measured is
the training alone: the clock runs from the first task after a few that warm up, for ten seconds. `nvml %` is how busy NVML saw the
GPU in that time. `kernels %` is the sum of its kernels' seconds over the clock's: their seconds for a task come from
`torch.profiler` over some tasks afterwards, which it slows down, and the tasks of a second from before.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from benchmarks.common import Row, gpu_busy
from benchmarks.gpu_steps import Cases
from benchmarks.overhead import CNN_CIFAR, MLP_MNIST, RandomData, Workload
from raafl import Experiment, fed_async, simulate
from raafl.core.algorithm import Algorithm, Training
from raafl.core.hooks import RunHooks
from raafl.core.types import Settled
from raafl.data import Iid
from raafl.devices import Device
from raafl.local.train import FabricOptions

LEAST_S, BARE_S, PROFILED_S = 10.0, 2.0, 2.0
"""Seconds of a measured run, of a bare loop, and of what is profiled after a run."""
WAYS: dict[str, tuple[str, Any]] = {
    "eager": ("off", 1),
    "captured": ("auto", 1),
    "batched": ("auto", "auto"),
    "fast": ("auto", "fast"),
    "batched, steps eager": ("off", "auto"),
    "fast, steps eager": ("off", "fast"),
}
"""What `fabric.capture` and `batch_clients` are in each way of training."""


class Window(RunHooks):
    """Observer that counts tasks in a time window after a warm-up, then profiles some, then stops the run.

    `num_tasks`, `num_steps`: tasks in the window, and their steps. `begun_s`, `ended_s`: start of the window and end of
    its last task, by `time.monotonic`; 0 = not yet. `kernels_s`: seconds of kernels for a task; None = not profiled,
    because of `problem`.
    """

    def __init__(self, skip: int, least_s: float, profiled_s: float) -> None:
        self._skip, self._least_s, self._profiled_s, self._profiled = skip, least_s, profiled_s, 0
        self._profile: Any = None
        self._stop: str | None = None
        self.num_tasks = self.num_steps = 0
        self.begun_s = self.ended_s = 0.0
        self.kernels_s: float | None = None
        self.problem = ""

    def on_settled(self, settled: Settled, now: float) -> None:
        """Count a task, or move on to the next phase."""
        at = time.monotonic()
        if self._skip:
            self._skip -= 1
            self.begun_s = self.ended_s = at
        elif self._profile is not None:
            self._profiled += 1
            if at - self.ended_s >= self._profiled_s:
                self._end_profile()
        elif self._stop is None:
            self.num_tasks += 1
            self.num_steps += 0 if settled.update is None else settled.update.num_steps
            self.ended_s = at
            if at - self.begun_s >= self._least_s:
                self._begin_profile()

    def stop_asked(self) -> str | None:
        """Return a reason to stop once everything is measured."""
        return self._stop

    @property
    def tasks_per_s(self) -> float:
        """Tasks per second."""
        return self.num_tasks / max(self.ended_s - self.begun_s, 1e-9)

    @property
    def steps_per_s(self) -> float:
        """Steps per second."""
        return self.num_steps / max(self.ended_s - self.begun_s, 1e-9)

    def _begin_profile(self) -> None:
        kind = torch.profiler.ProfilerActivity
        self._profile = torch.profiler.profile(activities=[kind.CUDA if torch.cuda.is_available() else kind.CPU])
        try:
            self._profile.start()
        except Exception as error:  # without a profiler the other figures still count
            self._stop, self._profile, self.problem = "measured", None, f"no kernels' seconds: {error}"

    def _end_profile(self) -> None:
        try:
            self._profile.stop()
            found = sum(event.self_device_time_total for event in self._profile.key_averages())
            self.kernels_s = found * 1e-6 / self._profiled
        except Exception as error:
            self.problem = f"no kernels' seconds: {error}"
        self._stop, self._profile = "measured", None


def measured(
    work: Workload,
    way: str,
    device: str,
    folder: Path,
    *,
    dry: bool,
    precision: Any = "32-true",
    algorithm: Algorithm | None = None,
    devices: Sequence[Device] = (),
    skip: int | None = None,
) -> Row:
    """Run a simulation until its window is measured, and return the row.

    `way`: a key of `WAYS`. `dry`: train only a few tasks, to show that they work. `algorithm`: None = `fed_async` with
    all clients at work. `devices`: None = all alike. `skip`: tasks of the warm-up; None = one for each of up to 200
    clients, and ten.
    """
    capture, batch_clients = WAYS[way]
    skip = min(work.clients, 200) + 10 if skip is None else skip
    watch = Window(1 if dry else skip, 0.0 if dry else LEAST_S, 0.01 if dry else PROFILED_S)
    data = _data(work)
    experiment = Experiment(
        model=work.model,
        data=lambda: data,
        algorithm=algorithm or fed_async(cohort=work.cohort),
        partition=Iid(),
        clients=work.clients,
        devices=list(devices) or None,
        train=Training(num_epochs=None, num_steps=work.num_steps, batch_size=work.batch_size),
        max_updates=8 if dry else 10**7,
        eval_every=10**9,
        batch_clients=batch_clients,
        output=str(folder / "run"),
        progress="quiet",
        server_device=device,
        fabric=FabricOptions(accelerator=torch.device(device).type, precision=precision, capture=capture),
    )
    with gpu_busy() as seen:
        summary, _ = simulate(experiment, observer=watch)
    busy = [percent for at, percent in seen if watch.begun_s <= at <= watch.ended_s]
    return {
        "tasks_per_s": watch.tasks_per_s,
        "steps_per_s": watch.steps_per_s,
        "seconds": watch.ended_s - watch.begun_s,
        "nvml %": sum(busy) / len(busy) if busy else None,
        "kernels %": None if watch.kernels_s is None else 100 * watch.kernels_s * watch.tasks_per_s,
        "captured": summary.get("captured", {}).get("captured"),
        "batches_captured": summary.get("captured", {}).get("batches_captured"),
        "eager because": "; ".join(summary.get("captured", {}).get("eager", [])),
        "problem": watch.problem,
        "mean_cohort": summary.get("batched", {}).get("mean_cohort"),
    }


@lru_cache(maxsize=1)
def _data(work: Workload) -> RandomData:
    """Draw the data of a workload once, for all ways."""
    return RandomData(work)


# ---- bare loops ----


class Loss(nn.Module):
    """Module whose forward pass is a training step, as `torch.cuda.make_graphed_callables` needs it."""

    def __init__(self, module: LightningModule) -> None:
        super().__init__()
        self.module: Any = module
        self.module.log = self.module.log_dict = lambda *args, **kwargs: None

    def forward(self, *batch: Tensor) -> Tensor:
        """Return the loss of a batch."""
        answer: Any = self.module.training_step(list(batch), 0)
        return answer["loss"] if isinstance(answer, dict) else answer  # type: ignore[no-any-return]


def bare(work: Workload, device: str, *, dry: bool, precision: str = "32-true", graphed: bool = False) -> Row:
    """Train tasks of a workload in a loop of PyTorch alone, with the data on the device.

    A task takes a model's values, makes the module's optimizer and trains; results stay in place. `dry`: train only one
    task. `graphed`: run forward and backward pass as CUDA graphs, by `torch.cuda.make_graphed_callables`.
    """
    on_gpu, num = torch.device(device).type == "cuda", max(work.batch_size, work.samples)
    data = RandomData(replace(work, clients=1, samples=num)).samples.tensors
    tensors = [tensor.to(device) for tensor in data]
    loss_of: Any = Loss(work.model()).to(device)
    module = loss_of.module
    mixed = partial(torch.autocast, torch.device(device).type, torch.bfloat16, enabled=precision == "bf16-mixed")
    values = [parameter.detach().clone() for parameter in module.parameters()]
    if graphed and on_gpu:
        with mixed(cache_enabled=False):
            loss_of = torch.cuda.make_graphed_callables(loss_of, tuple(x[: work.batch_size] for x in tensors))

    def task() -> None:
        with torch.no_grad():
            torch._foreach_copy_(list(module.parameters()), values)
        optimizer = module.configure_optimizers()
        optimizer = optimizer["optimizer"] if isinstance(optimizer, dict) else optimizer
        order = torch.randperm(num, device=device)
        for index in range(work.num_steps):
            rows = order.roll(-index * work.batch_size)[: work.batch_size]
            with mixed(cache_enabled=not graphed):
                loss = loss_of(*(tensor[rows] for tensor in tensors))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if on_gpu:
            torch.cuda.synchronize(device)

    for _ in range(1 if dry else 5):
        task()
    num_tasks, begun_s = 0, time.perf_counter()
    while not num_tasks or (not dry and time.perf_counter() - begun_s < BARE_S):
        task()
        num_tasks += 1
    per_s = num_tasks / (time.perf_counter() - begun_s)
    return {"tasks_per_s": per_s, "steps_per_s": per_s * work.num_steps, "seconds": num_tasks / per_s}


def bare_cases(name: str, work: Workload, device: str, dry: bool, precisions: Sequence[str] = ("32-true",)) -> Cases:
    """Return the rows of a workload's bare loops, eager and with graphed passes, in each precision."""
    return {
        f"{name}, bare {kind}, {precision}": partial(
            bare, work, device, dry=dry, precision=precision, graphed=kind == "graphed"
        )
        for precision in precisions
        for kind in ("eager", "graphed")
    }


# ---- the steps ----


def small_clients(device: str, folder: Path, dry: bool) -> Cases:
    """Return rows of small clients, in each way: an MLP and a CNN; one, a hundred and a thousand clients at work."""
    cases: Cases = {}
    for work, counts in ((replace(MLP_MNIST, samples=640), (1000, 100, 1)), (CNN_CIFAR, (1000,))):
        if dry:
            work = replace(work, samples=20, batch_size=10, num_steps=2)
        cases |= bare_cases(work.name, work, device, dry)
        for num in counts:
            num = min(num, 3) if dry else num
            clients = replace(work, clients=num, cohort=num)
            for way in WAYS:
                name = f"{work.name}, {num} clients, {way}"
                at = folder / name.replace(", ", "-").replace(" ", "-")
                cases[name] = partial(measured, clients, way, device, at, dry=dry)
    return cases


def language(device: str, folder: Path, dry: bool) -> Cases:
    """Return rows of DiLoCo with a LLaMA of 10.7 million parameters on four unequal clients: tokens per second in each way."""
    from model_zoo import LLaMA
    from raafl import diloco
    from raafl.parts import RateSelect

    length, batch_size = (32, 2) if dry else (256, 16)
    rates = {"fast": 1.0, "half": 1.0, "quarter": 1.0, "eighth": 0.5}
    work = Workload(
        "llama",
        lambda: LLaMA("nano" if dry else "char", vocab_size=261, max_length=length),
        (length,),
        4,
        4,
        16 * batch_size,
        batch_size,
        2 if dry else 50,
        1,
        draw=lambda num: tuple(torch.randint(0, 261, (num, length)) for _ in range(2)),
    )
    method = diloco(
        outer_lr=0.7,
        outer_momentum=0.9,
        trigger="each",
        steps="speed",
        submodel=RateSelect(rates=rates, rate_of="width"),
    )
    devices = [Device(name, flops_per_s=1e9 * 2**place) for place, name in enumerate(reversed(rates))]
    return _in_tokens("llama", work, method, devices, length * batch_size, device, folder, dry)


def fine_tuning(device: str, folder: Path, dry: bool) -> Cases:
    """Return rows of fine-tuning a BERT and a decoder with LoRA adapters of four ranks on four unequal clients."""
    from raafl import fed_raa
    from raafl.parts import RateSelect

    cases: Cases = {}
    length, batch_size = (8, 2) if dry else (128, 16)
    names = ("workstation", "desktop", "laptop", "tablet")
    devices = [Device(name, flops_per_s=8e9 / 2**place) for place, name in enumerate(names)]
    select = RateSelect(rates=[1.0, 0.5, 0.25, 0.125], rate_of="width")
    for name, make, draw in (("bert", _bert, _texts), ("decoder", _decoder, _tokens)):
        work = Workload(
            name,
            partial(_adapted, partial(make, dry)),
            (length,),
            4,
            4,
            20 * batch_size,
            batch_size,
            2 if dry else 10,
            1,
            draw=partial(draw, length=length),
        )
        method = fed_raa(submodel=select)
        cases |= _in_tokens(f"{name} with LoRA", work, method, devices, length * batch_size, device, folder, dry)
    return cases


def _in_tokens(
    name: str,
    work: Workload,
    algorithm: Algorithm,
    devices: Sequence[Device],
    step_tokens: int,
    device: str,
    folder: Path,
    dry: bool,
) -> Cases:
    """Return rows in tokens per second of a workload's bare loops, and of runs with eager and with captured steps."""

    def with_tokens(case: Callable[[], Row]) -> Row:
        row = case()
        return {**row, "tokens_per_s": row["steps_per_s"] * step_tokens}

    precisions = ("32-true", "bf16-mixed")
    cases = bare_cases(name, work, device, dry, precisions)
    for precision in precisions:
        for way in ("eager", "captured"):
            at = folder / f"{name}-{precision}-{way}".replace(" ", "-")
            options: dict[str, Any] = {"algorithm": algorithm, "devices": devices, "precision": precision, "skip": 12}
            cases[f"{name}, {way}, {precision}"] = partial(measured, work, way, device, at, dry=dry, **options)
    return {key: partial(with_tokens, case) for key, case in cases.items()}


class Adapter(nn.Module):
    """Frozen linear layer with a LoRA adapter, in plain PyTorch, so that no further package is needed."""

    def __init__(self, layer: nn.Linear, rank: int) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Linear(layer.in_features, rank, bias=False)
        self.up = nn.Linear(rank, layer.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of the layer's and the adapter's output."""
        y: Tensor = self.layer(x) + self.up(self.down(x))
        return y


_ADAPTED, _RANK = ("query", "value", "q_proj", "v_proj"), 16


def _adapted(make: Callable[[], LightningModule]) -> LightningModule:
    """Make a model, freeze all but its head, and add adapters to its queries and values."""
    module = make()
    for name, parameter in module.named_parameters():
        parameter.requires_grad_("classifier" in name)
    for part in list(module.modules()):
        for name, child in list(part.named_children()):
            if name in _ADAPTED and isinstance(child, nn.Linear):
                setattr(part, name, Adapter(child, _RANK))
    return module


def _bert(dry: bool) -> LightningModule:
    from model_zoo import BERT

    return BERT("micro" if dry else "base")


def _decoder(dry: bool) -> LightningModule:
    from model_zoo import LLaMA

    return LLaMA("micro" if dry else "small", vocab_size=1000)


def _texts(num: int, length: int) -> tuple[Tensor, ...]:
    tokens = torch.randint(1, 1000, (num, length))
    return tokens, torch.ones_like(tokens), torch.randint(0, 2, (num,))


def _tokens(num: int, length: int) -> tuple[Tensor, ...]:
    drawn = torch.randint(0, 1000, (num, length + 1))
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()
