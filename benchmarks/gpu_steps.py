"""Define the steps of `benchmarks.gpu`: each is a function whose docstring describes its claim and whose rows are its figures."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.common import Row

ROOT = Path(__file__).resolve().parents[1]
Cases = dict[str, Callable[[], Row]]
QUICK = ("--config", str(ROOT / "configs" / "quickstart.yaml"))


@dataclass(frozen=True)
class Where:
    """Device (cuda:0, or cpu in a dry run) and an empty folder for a step."""

    device: str
    folder: Path

    @property
    def dry(self) -> bool:
        """Whether there is no GPU."""
        return self.device == "cpu"

    @property
    def options(self) -> list[str]:
        """Options of a run whose model and clients are there."""
        return ["--fabric.accelerator", self.device.partition(":")[0], "--server_device", self.device]


# ---- the steps ----


def tests(where: Where) -> list[Row]:
    """The tests marked gpu."""
    files = [str(file) for file in sorted(ROOT.glob("tests/**/test_*.py")) if "mark.gpu" in file.read_text()]
    if where.dry:
        return [{"files": len(files), "value": bool(importlib.util.find_spec("pytest"))}]
    rows: list[Row] = []
    for file in files:  # a process for each file: an error that breaks a GPU's context would fail all that follows
        command = [sys.executable, "-m", "pytest", "-v", "-m", "gpu", "-p", "no:cacheprovider", file]
        try:
            words, met = run(command).strip().splitlines()[-1], True
        except RuntimeError as error:
            words, met = str(error)[-3000:], False
        rows.append({"file": Path(file).name, "value": words, "goal": "no failure", "met": met})
    return rows


def quick_start(where: Where) -> list[Row]:
    """The quick start's accuracy, on the GPU and on the CPU."""
    most = ["--max_updates", "4"] if where.dry else []
    found = _simulated(where, "gpu", *most)["final"]["accuracy"]
    on_cpu = found if where.dry else _simulated(replace(where, device="cpu"), "cpu")["final"]["accuracy"]
    return [{"value": found, "cpu": on_cpu, "goal": "within 0.02", "met": abs(found - on_cpu) <= 0.02}]


def twice(where: Where) -> list[Row]:
    """The same run in two fresh processes: the same bits."""
    options = [*QUICK, "--max_updates", "40", "--progress", "quiet", *where.options]
    digests = [_raafl(where, name, "simulate", *options).get("model_digest") for name in ("one", "two")]
    return [{"value": digests[0], "goal": "equal", "met": digests[0] == digests[1]}]


def resumed(where: Where) -> list[Row]:
    """A run that goes on after a Ctrl-C, whose merge keeps state on the GPU, against one that was never interrupted."""
    from raafl.core.hooks import RunHooks

    class Interrupts(RunHooks):
        """Observer that ends a run at its twelfth task."""

        num_settled = 0

        def on_settled(self, settled: Any, now: float) -> None:
            self.num_settled += 1
            if self.num_settled == 12:
                signal.raise_signal(signal.SIGINT)

    rows = []
    for name in ("fed_buff", "fed_opt"):
        method, half = ["--algorithm", name, "--max_updates", "24"], where.folder / f"{name}-half"
        whole = _simulated(where, f"{name}-whole", *method)
        with contextlib.suppress(KeyboardInterrupt):
            _simulated(where, half.name, *method, observer=Interrupts())
        rest = _simulated(where, None, "--resume", str(half))
        met = rest["model_digest"] == whole["model_digest"]
        rows.append({"merge": name, "value": rest["updates_merged"], "goal": "equal digests", "met": met})
    return rows


def out_of_memory(where: Where) -> list[Row]:
    """A task that is too large for the GPU is refused, and the run goes on."""
    import torch

    from benchmarks.overhead import MLP_MNIST, RandomData
    from model_zoo import MLP
    from raafl import Experiment, fed_raa, simulate
    from raafl.core.algorithm import Training
    from raafl.local.train import FabricOptions

    class Greedy(MLP):
        """Hook that asks for an exabyte of memory if half of its units or more are present."""

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            real = type(batch[0]) is torch.Tensor and not batch[0].is_meta and len(batch[1]) > 2
            if real and self.layers[1].out_features >= 100:
                torch.empty(1 << 58, dtype=torch.float32, device=batch[0].device)
            return super().training_step(batch, batch_idx)

    data = RandomData(replace(MLP_MNIST, clients=4, samples=256))
    summary, _ = simulate(
        Experiment(
            model=lambda: Greedy(784, (200,), 10),
            data=lambda: data,
            algorithm=fed_raa(fragments=3),
            clients=4,
            train=Training(num_epochs=None, num_steps=2),
            max_updates=12,
            output=str(where.folder / "run"),
            progress="quiet",
            server_device=where.device,
            fabric=FabricOptions(accelerator=where.device.partition(":")[0]),
        )
    )
    refused = summary["updates_refused"].get("out-of-memory", 0)
    return [{"value": refused, "goal": "above 0, run ends", "met": refused > 0 and summary["updates_merged"] >= 12}]


def precisions(where: Where) -> list[Row]:
    """Each precision trains, or is refused by name before the run."""
    from raafl.errors import BadInput

    rows: list[Row] = []
    for precision in ("bf16-mixed",) if where.dry else ("32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true"):
        options = ["--fabric.precision", precision, "--max_updates", "4" if where.dry else "120"]
        try:
            accuracy = _simulated(where, precision, *options)["final"]["accuracy"]
            met = where.dry or accuracy > 0.5
            rows.append({"precision": precision, "value": accuracy, "goal": "above 0.5", "met": met})
        except BadInput as refused:
            rows.append({"precision": precision, "value": f"refused: {refused}"})
    return rows


def faults(where: Where) -> list[Row]:
    """Of three clients one is killed, one stopped; the others' updates are merged to the end."""
    from raafl.commands.fit_local import read

    options = [
        *QUICK,
        "--local",
        "3",
        "--max_updates",
        "200",
        "--waits.task_s",
        "10",
        "--progress",
        "quiet",
        "--output",
        str(where.folder / "run"),
        *where.options,
    ]
    _parsed("fit", *read(options).options)
    if where.dry:
        return []
    process = subprocess.Popen([sys.executable, "-m", "raafl", "fit", *options], cwd=ROOT)
    journal = where.folder / "run" / "clients.csv"
    while process.poll() is None and (not journal.is_file() or journal.read_text().count("merged") < 20):
        time.sleep(0.2)
    for client, number in ((1, signal.SIGKILL), (2, signal.SIGSTOP)):
        os.kill(child(process.pid, b"\0--client\0%d\0" % client), number)
    code = process.wait()
    merged = json.loads((where.folder / "run" / "summary.json").read_text())["updates_merged"]
    lost = journal.read_text().count("lost:")
    return [{"value": merged, "lost": lost, "goal": "200, exit code 0", "met": not code and merged >= 200 and lost > 0}]


def replayed(where: Where) -> list[Row]:
    """Asynchronous runs of three real clients, and their replay: the same bits."""
    rows: list[Row] = []
    options = [*QUICK, "--algorithm", "fed_buff", "--compress.up", "int8", "--emulate", "false", "--max_updates", "60"]
    for name, ranks, clients in (("torchrun", 4, ["--clients", "3"]), ("join", 0, ["--local", "3"]))[
        : 1 if where.dry else 2
    ]:
        summary = _raafl(where, name, "fit", *options, *clients, *where.options, "--progress", "quiet", ranks=ranks)
        words = "" if where.dry else run([sys.executable, "-m", "raafl", "replay", str(where.folder / name), "--json"])
        equal = where.dry or bool(json.loads(words[words.index("{") :])["equal"])
        rows.append({"clients by": name, "value": summary.get("updates_merged"), "goal": "equal bits", "met": equal})
    return rows


def staging(where: Where) -> list[Row]:
    """A task's payload from GPU to GPU through the host: its share of the raw transfer, and what the pinned copies take of it."""
    from benchmarks.wire import pinned_s, trips

    num_bytes = (4 << 10) if where.dry else 1_400_000_000
    measured = trips(where.device, {num_bytes: 1 if where.dry else 3}, only="gloo")
    (row,) = (row for row in measured if row["transport"] == "gloo")
    if where.dry:
        return [row]
    row["copies_s"] = 2 * pinned_s(num_bytes, where.device)  # down and up, each copied to the host and back
    row |= {"value": 1 / row["ratio"], "goal": "0.7 of the link", "met": row["ratio"] <= 1 / 0.7}
    return [row, {"transport": "CUDA IPC", "value": "not built: see docs/gpu.md"}]


def merges(where: Where) -> list[Row]:
    """Ten updates of 86.6 million parameters folded in, over the GPU's copy bandwidth."""
    from benchmarks import merge

    tiny = merge.Shape(depth=2, width=8, hidden=20, tokens=5, patch=2, classes=3)
    found = merge.rows(tiny if where.dry else None, 1 if where.dry else 7, device=where.device)
    return [{**row, "goal": "ratio 0.7", "met": row["ratio"] >= 0.7} for row in found]


def submodels(where: Where) -> list[Row]:
    """Seconds and memory of a step of each submodel over the whole model's, predicted beside measured."""
    from benchmarks.submodels import on_device

    if where.dry:
        return on_device(("cnn",), (1.0, 0.25), where.device, 2)
    return on_device(("vit-tiny", "bert-small"), (1.0, 0.25, 0.0625), where.device, 100)


def captured(where: Where) -> Cases:
    """Seconds of a step, eager and captured as a CUDA graph, of six models whole and cut, beside bare loops of PyTorch."""
    from benchmarks.captured import on_device
    from benchmarks.workloads import WORKLOADS

    if where.dry:
        return on_device(("cnn",), (1.0, 0.25), ("32-true", "bf16-mixed"), where.device, 1, 0.0)
    return on_device(list(WORKLOADS), (1.0, 0.25, 0.0625), ("32-true", "bf16-mixed"), where.device, 20, 1.0)


def small_clients(where: Where) -> Cases:
    """Tasks per second and how busy the GPU is: an MLP and a CNN, 1, 100 and 1,000 clients, in each way."""
    from benchmarks import gpu_rows

    return gpu_rows.small_clients(where.device, where.folder, where.dry)


def language(where: Where) -> Cases:
    """Tokens per second of DiLoCo with a LLaMA of 10.7 million parameters on four unequal clients, eager and captured."""
    from benchmarks import gpu_rows

    return gpu_rows.language(where.device, where.folder, where.dry)


def fine_tuning(where: Where) -> Cases:
    """Tokens per second of fine-tuning a BERT and a decoder by LoRA adapters of four ranks on four unequal clients."""
    from benchmarks import gpu_rows

    return gpu_rows.fine_tuning(where.device, where.folder, where.dry)


def together(where: Where) -> list[Row]:
    """Small clients trained as one batch, over client by client."""
    from benchmarks.cohorts import on_device

    return on_device(where.device, where.folder, where.dry)


def sharing(where: Where) -> list[Row]:
    """Several clients on one GPU: seconds of the same run without and with MPS."""
    script = ROOT / "launch" / "gpu-sharing.sh"
    run(["bash", "-n", str(script)])
    rows: list[Row] = []
    for mps in () if where.dry else ("0", "1"):
        if mps == "1" and shutil.which("nvidia-cuda-mps-control") is None:
            rows.append({"MPS": True, "value": "no nvidia-cuda-mps-control here"})
            continue
        folder, path = where.folder / f"mps-{mps}", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        run(
            [str(script), QUICK[1], "--output", str(folder), "--emulate", "false", "--max_updates", "200"],
            RANKS_PER_GPU="4",
            CUDA_VISIBLE_DEVICES="0",
            MPS=mps,
            PATH=path,
        )
        summary = json.loads((folder / "summary.json").read_text())
        rows.append({"MPS": mps == "1", "updates_per_s": summary["updates_merged"] / summary["wall_s"]})
    return rows


def ranks(where: Where) -> Cases:
    """Tasks per second of simulate with 1, 2, 4, 8 and 16 ranks on one GPU, which all give one model."""
    options = ["--clients", "64", "--algorithm", "fed_async", "--max_updates", "1000", "--eval_every", "100000"]
    first: Row = {}

    def case(num: int) -> Row:
        if num > max(os.cpu_count() or 1, 2) and not where.dry:
            return {"ranks": num, "value": f"only {os.cpu_count()} cores here"}
        summary = _raafl(
            where, f"ranks-{num}", "simulate", *QUICK, *options, *where.options, ranks=num if num > 1 else 0
        )
        if where.dry:
            summary = {"updates_merged": 0, "wall_s": 1.0, "model_digest": ""}
        row = {"ranks": num, "value": summary["updates_merged"] / summary["wall_s"], "digest": summary["model_digest"]}
        if not first:
            first.update(row)
        over = row["value"] / first["value"] if first["value"] else 0.0
        return {**row, "over one": over, "goal": "one digest", "met": row["digest"] == first["digest"]}

    return {f"{num} ranks": partial(case, num) for num in (1, 2, 4, 8, 16)}


def two_gpus(where: Where) -> list[Row]:
    """A server and a client on a GPU each: staged, and over NCCL."""
    rows, options = [], [*QUICK, "--clients", "1", "--max_updates", "40", "--emulate", "false", *where.options]
    for transport in ("staged", "nccl"):
        summary = _raafl(where, transport, "fit", *options, "--transport", transport, ranks=2)
        met = "NCCL is not used" not in summary.get("printed", "")
        rows.append({"transport": transport, "value": summary.get("wall_s"), "goal": "no fallback", "met": met})
    return rows


@dataclass(frozen=True)
class Step:
    """A step of `make gpu`: one claim, shown by a function whose docstring states it.

    `run`: returns the figures, or functions by name that return a row each. `limit_s`: seconds after which it is ended.
    `timed`: whether it measures time, so that nothing may run beside it. `num_gpus`: GPUs that it needs.
    """

    run: Callable[[Where], list[Row] | Cases]
    limit_s: float
    timed: bool = False
    num_gpus: int = 1


STEPS = {
    step.run.__name__: step
    for step in (
        Step(tests, 200),
        Step(replayed, 150),
        Step(precisions, 120),
        Step(quick_start, 90),
        Step(twice, 90),
        Step(resumed, 90),
        Step(out_of_memory, 60),
        Step(faults, 90),
        Step(staging, 60, timed=True),
        Step(merges, 60, timed=True),
        Step(submodels, 90, timed=True),
        Step(small_clients, 750, timed=True),
        Step(captured, 450, timed=True),
        Step(language, 200, timed=True),
        Step(fine_tuning, 400, timed=True),
        Step(together, 90, timed=True),
        Step(sharing, 90, timed=True),
        Step(ranks, 180, timed=True),
        Step(two_gpus, 90, timed=True, num_gpus=2),
    )
}


# ---- what they use ----


def _parsed(command: str, *options: str) -> Any:
    from raafl.config.parse import parse

    return parse(command, list(options))


def _simulated(where: Where, name: str | None, *options: str, observer: Any = None) -> dict[str, Any]:
    """Simulate the quick start with more options in a folder of that name, or resume it; return its summary."""
    from raafl.runtime.run import simulate

    new = [] if name is None else [*QUICK, "--output", str(where.folder / name), *where.options]
    parsed = _parsed("simulate", *new, "--progress", "quiet", *options)
    return dict(simulate(parsed.experiment, parsed.config_yaml, observer=observer)[0])


def _raafl(where: Where, name: str, command: str, *options: str, ranks: int = 0) -> dict[str, Any]:
    """Run raafl in a fresh process, or in ranks; return its summary and its output. A dry run only parses the options."""
    if where.dry:
        _parsed(command, *options)
        return {}
    torchrun = ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m"] if ranks else []
    folder = where.folder / name
    words = run([sys.executable, "-m", *torchrun, "raafl", command, *options, "--output", str(folder)])
    return {**json.loads((folder / "summary.json").read_text()), "printed": words}


def child(parent: int, options: bytes) -> int:
    """Find the child process whose command line has these options."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # the process may end meanwhile
            of = (folder / "stat").read_text().rpartition(")")[2].split()[1]
            found += [int(folder.name)] if of == str(parent) and options in (folder / "cmdline").read_bytes() else []
    (pid,) = found
    return pid


def run(command: list[str], **environment: str) -> str:
    """Run a command; return its output, or raise an error with the end of it."""
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[:6])} ... ended with {done.returncode}: {done.stdout[-3000:]}")
    return done.stdout
