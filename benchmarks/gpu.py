"""The acceptance on a GPU, `make gpu`: what nobody can show without one, in the order of value, in at most ten minutes.

Each step runs in a process of its own, with a limit; what one does ends no other. The report, build/gpu/report.json, is written
after each. Nothing is fetched. Where there is no GPU, each step is begun on the CPU in a size that shows only that it can.

    python -m benchmarks.gpu [--out FOLDER] [--only STEP ...]
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.common import Row, gpu_busy, report, table

ROOT = Path(__file__).resolve().parents[1]
TOTAL_S = 600.0
WHEELS = "torch lightning transformers jsonargparse xxhash sklearn rich shtab cryptography pytest"
TWO_NODES = "HEAD=ADDRESS NODES=2 RANKS_PER_NODE=9 launch/multi-node.sh CONFIG --clients 17 --fabric.accelerator cuda"
QUICK = ("--config", str(ROOT / "configs" / "quickstart.yaml"))


@dataclass(frozen=True)
class Where:
    """Where a step runs.

    Attributes:
        device: cuda:0, or cpu in a dry run.
        folder: of its own, empty.
    """

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
    words = _run([sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", *files])
    return [{"value": words.strip().splitlines()[-1]}]


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
    from raafl.core.hooks import Watcher

    class Interrupts(Watcher):
        """Ends a run at its twelfth task."""

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
            _simulated(where, half.name, *method, watcher=Interrupts())
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
        """Asks for an exabyte where half of its units or more are there."""

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            real = type(batch[0]) is torch.Tensor and not batch[0].is_meta and len(batch[1]) > 2
            if real and self.layers[1].out_features >= 100:
                torch.empty(1 << 58, dtype=torch.float32, device=batch[0].device)
            return super().training_step(batch, batch_idx)

    data = RandomData(replace(MLP_MNIST, clients=4, samples=256))
    summary, _ = simulate(
        Experiment(
            model=lambda: Greedy(784, (200,), 10), data=lambda: data, algorithm=fed_raa(fragments=3), clients=4,
            train=Training(num_epochs=None, num_steps=2), max_updates=12, output=str(where.folder / "run"), progress="quiet",
            server_device=where.device, fabric=FabricOptions(accelerator=where.device.partition(":")[0]),
        )
    )  # fmt: skip
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
        *QUICK, "--local", "3", "--max_updates", "200", "--waits.task_s", "10", "--progress", "quiet",
        "--output", str(where.folder / "run"), *where.options,
    ]  # fmt: skip
    _parsed("fit", *read(options).options)
    if where.dry:
        return []
    process = subprocess.Popen([sys.executable, "-m", "raafl", "fit", *options], cwd=ROOT)
    journal = where.folder / "run" / "clients.csv"
    while process.poll() is None and (not journal.is_file() or journal.read_text().count("merged") < 20):
        time.sleep(0.2)
    for client, number in ((1, signal.SIGKILL), (2, signal.SIGSTOP)):
        found = _run(["pgrep", "-P", str(process.pid), "-f", f"client {client}$"])
        os.kill(int(found), number)
    code = process.wait()
    merged = json.loads((where.folder / "run" / "summary.json").read_text())["updates_merged"]
    lost = journal.read_text().count("lost:")
    return [{"value": merged, "lost": lost, "goal": "200, exit code 0", "met": not code and merged >= 200 and lost > 0}]


def staging(where: Where) -> list[Row]:
    """Bytes per second of a task's payload, GPU to GPU through the host, over the pinned copies that it needs."""
    from benchmarks.wire import pinned_s, trips

    num_bytes = (4 << 10) if where.dry else 1_400_000_000
    (row,) = [row for row in trips(where.device, {num_bytes: 1 if where.dry else 3}) if row["transport"] == "gloo"]
    if where.dry:
        return [row]
    share = 2 * pinned_s(num_bytes, where.device) / row["seconds"]  # down and up, each there and back
    row |= {"value": share, "goal": "0.7 of the pinned copies", "met": share >= 0.7}
    return [row, {"transport": "CUDA IPC", "value": "not built: see docs/gpu-transport.md"}]


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
    return on_device(("vit-tiny", "bert-small"), (1.0, 0.25, 0.0625), where.device, 30)


def throughput(where: Where) -> list[Row]:
    """Tasks per second of simulate, against the CPU's, and how much of the time the GPU is busy."""
    from benchmarks.overhead import CNN_CIFAR, MLP_MNIST, RandomData, raafl_seconds
    from raafl import fed_avg

    rows: list[Row] = []
    for work in (MLP_MNIST, CNN_CIFAR):
        work = replace(work, clients=4, cohort=4, rounds=1, samples=32) if where.dry else work
        data, method = RandomData(work), fed_avg(cohort=None if work.cohort == work.clients else work.cohort)

        def per_s(device: str, name: str, work: Any = work, data: Any = data, method: Any = method) -> float:
            return work.trainings / raafl_seconds(work, data, method, 1, where.folder / f"{work.name}-{name}", device)

        found = on_cpu = per_s(where.device, "warm")
        with gpu_busy() as seen:
            found = found if where.dry else per_s(where.device, "gpu")
        on_cpu = on_cpu if where.dry else per_s("cpu", "cpu")
        rows.append({"workload": work.name, "value": found, "cpu": on_cpu, "busy %": sum(seen) / max(len(seen), 1)})
    return rows


def sharing(where: Where) -> list[Row]:
    """Several clients on one GPU: seconds of the same run without and with MPS."""
    script = ROOT / "launch" / "gpu-sharing.sh"
    _run(["bash", "-n", str(script)])
    rows = []
    for mps in () if where.dry else ("0", "1"):
        folder, path = where.folder / f"mps-{mps}", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        _run([str(script), QUICK[1], "--output", str(folder), "--emulate", "false", "--max_updates", "200"],
             RANKS_PER_GPU="4", CUDA_VISIBLE_DEVICES="0", MPS=mps, PATH=path)  # fmt: skip
        summary = json.loads((folder / "summary.json").read_text())
        rows.append({"MPS": mps == "1", "updates_per_s": summary["updates_merged"] / summary["wall_s"]})
    return rows


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
    """One thing to be shown, by a function whose docstring says what, within so many seconds, on so many GPUs."""

    run: Callable[[Where], list[Row]]
    limit_s: float
    num_gpus: int = 1


STEPS = {
    step.run.__name__: step
    for step in (
        Step(tests, 150), Step(quick_start, 60), Step(twice, 60), Step(resumed, 60), Step(out_of_memory, 40),
        Step(precisions, 90), Step(faults, 90), Step(staging, 60), Step(merges, 60), Step(submodels, 90),
        Step(throughput, 90), Step(sharing, 90), Step(two_gpus, 90, num_gpus=2),
    )
}  # fmt: skip


# ---- what they use ----


def _parsed(command: str, *options: str) -> Any:
    from raafl.config.parse import parse

    return parse(command, list(options))


def _simulated(where: Where, name: str | None, *options: str, watcher: Any = None) -> dict[str, Any]:
    """Simulate the quick start with more options, in a folder of that name, or what is resumed; return its summary."""
    from raafl.commands.run import simulate

    new = [] if name is None else [*QUICK, "--output", str(where.folder / name), *where.options]
    parsed = _parsed("simulate", *new, "--progress", "quiet", *options)
    return dict(simulate(parsed.experiment, parsed.config_yaml, watcher=watcher)[0])


def _raafl(where: Where, name: str, command: str, *options: str, ranks: int = 0) -> dict[str, Any]:
    """Run raafl in a fresh process, or in ranks; return its summary and what it printed. A dry run parses the options."""
    if where.dry:
        _parsed(command, *options)
        return {}
    torchrun = ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m"] if ranks else []
    folder = where.folder / name
    words = _run([sys.executable, "-m", *torchrun, "raafl", command, *options, "--output", str(folder)])
    return {**json.loads((folder / "summary.json").read_text()), "printed": words}


def _run(command: list[str], **environment: str) -> str:
    """Run a command; return all that it printed, or raise with the end of it."""
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **environment}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        check=False,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[:6])} ... ended with {done.returncode}: {done.stdout[-3000:]}")
    return done.stdout


# ---- running them ----


def begin(name: str, device: str, limit_s: float) -> Row:
    """Run a step in a process of its own and return its record."""
    began = time.monotonic()
    command = [sys.executable, "-m", "benchmarks.gpu", "--step", name, "--device", device]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        words, _ = process.communicate(timeout=limit_s)
        record = json.loads(words or f'{{"outcome": "died with {process.returncode}", "rows": []}}')
    except subprocess.TimeoutExpired:
        record = {"outcome": f"not done within {limit_s:.0f} s", "rows": []}
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # and all that it has started
        process.wait()
    return {**record, "took_s": time.monotonic() - began}


def within(name: str, device: str) -> Row:
    """Run a step in this process and return its record; nothing that goes wrong in it leaves it."""
    with tempfile.TemporaryDirectory(prefix="raafl-gpu-") as folder:
        try:
            rows = STEPS[name].run(Where(device, Path(folder)))
        except BaseException as error:
            outcome = f"failed: {type(error).__name__}: {error}"[:3000]
            return {"outcome": outcome, "rows": [], "traceback": traceback.format_exc()}
    failed = device != "cpu" and any(row.get("met") is False for row in rows)
    return {"outcome": "missed" if failed else "ok", "rows": rows}


def accept(out: Path, names: Sequence[str], num_gpus: int) -> int:
    """Run steps, on the first GPU or in a dry run, write the report after each, and return the exit code."""
    out.mkdir(parents=True, exist_ok=True)
    stop_s, records = time.monotonic() + TOTAL_S, []
    for name in names:
        step, what = STEPS[name], (STEPS[name].run.__doc__ or "").strip()
        left_s = stop_s - time.monotonic()
        if not num_gpus:
            record = within(name, "cpu")
        elif num_gpus < step.num_gpus:
            record = {"outcome": f"needs {step.num_gpus} GPUs", "rows": []}
        elif left_s < 5:
            record = {"outcome": "no time was left", "rows": []}
        else:
            record = begin(name, "cuda:0", min(step.limit_s, left_s))
        records.append({"step": name, "what": what, **record})
        print(f"[raafl] {name}: {record['outcome']}\n        {what}", flush=True)
        if num_gpus and record["rows"]:
            print(table(record["rows"]), flush=True)
        found = report(records, dry=not num_gpus)
        (out / "report.json").write_text(json.dumps(found, indent=2, default=str) + "\n")
    print(f"[raafl] {out / 'report.json'}")
    print(f"[raafl] with two nodes, on each of them: {TWO_NODES}")
    return int(any(record["outcome"].startswith(("failed", "missed", "died", "not done")) for record in records))


def main(argv: Sequence[str] | None = None) -> int:
    """Read the options, say what is missing, and run."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu")
    parser.add_argument("--only", nargs="+", choices=STEPS, default=list(STEPS))
    parser.add_argument("--step", choices=STEPS, help=argparse.SUPPRESS)
    parser.add_argument("--device", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.step:
        out, sys.stdout = sys.stdout, sys.stderr
        print(json.dumps(within(options.step, options.device), default=str), file=out)
        return 0
    missing = ", ".join(name for name in WHEELS.split() if importlib.util.find_spec(name) is None)
    print(f"[raafl] wheels that are missing: {missing or 'none'}", flush=True)
    import torch

    num_gpus = torch.cuda.device_count()
    if not num_gpus:
        print("[raafl] no GPU here: each step is only begun, on the CPU", flush=True)
    return accept(options.out, options.only, num_gpus)


if __name__ == "__main__":
    sys.exit(main())
