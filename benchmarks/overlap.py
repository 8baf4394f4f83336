"""Compare runs with and without `overlap`: `python -m benchmarks.overlap`. Loopback only; ten minutes.

Two questions, each with and without overlap in the same run:

- updates per second of one real client behind a relay (`benchmarks.cut_link`) whose upload takes as long as its training:
  `raafl serve` and `raafl join` over mutual TLS, three times in turn. Before it trains the client waits, as for a device that
  computes by itself, so that the figure does not depend on the cores of this machine;
- virtual seconds until a target is met by ten simulated clients whose links are as slow as their devices, over three seeds.
"""

from __future__ import annotations

import contextlib
import json
import socket
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.common import Row, main
from benchmarks.cut_link import CONFIG, Relay
from benchmarks.wire import certify

_HOST, _TIMEOUT_S = "127.0.0.1", 300.0
_UNITS, _RATE, _WAIT_S, _UPDATES = 3000, 6e5, 1.5, 8
_REPEATS, _SEEDS = 3, 3
_SLOW = f"""
import sys, time
from raafl.local.train import LocalTrainer
run = LocalTrainer.run
LocalTrainer.run = lambda *args, **more: (time.sleep({_WAIT_S}), run(*args, **more))[1]
from raafl.commands.cli import main
sys.exit(main(sys.argv[1:]))
"""
_TARGET = "accuracy=0.9"
_METHODS = {
    "fed_async": ["--algorithm=fed_async", "--algorithm.staleness=polynomial", "--algorithm.alpha=0.4"],
    "fed_buff": ["--algorithm=fed_buff", "--algorithm.buffer_size=3", "--algorithm.staleness=polynomial"],
}


def _client(overlap: bool) -> Row:
    """Let one client do a few tasks behind a slow uplink; return its updates per second, and the seconds of its phases."""
    model = [
        "--config",
        CONFIG,
        "--clients=1",
        "--devices=null",
        "--algorithm=fed_async",
        f"--max_updates={_UPDATES}",
        f"--model.hidden=[{_UNITS}]",
        "--train.num_epochs=null",
        "--train.num_steps=1",
        "--progress=quiet",
        "--eval_every=1000",
        "--checkpoint_s=null",
        f"--overlap={str(overlap).lower()}",
    ]
    with tempfile.TemporaryDirectory() as place, contextlib.ExitStack() as stack:
        folder = Path(place)
        certify(folder / "certs")
        (folder / "certs" / "sites.yaml").write_text("site: {clients: [1]}\n")
        with socket.create_server((_HOST, 0)) as listener:
            port = int(listener.getsockname()[1])
        relay = stack.enter_context(Relay(port, _RATE, None))
        certs = ["--certs", str(folder / "certs")]
        serve = ["serve", *model, "--output", str(folder / "run"), "--address", f"{_HOST}:{port}", *certs]
        join = ["join", "--address", f"{_HOST}:{relay.port}", "--client=1", *certs]
        server, client = (
            stack.enter_context(subprocess.Popen([sys.executable, *words], stdout=subprocess.DEVNULL))
            for words in (["-m", "raafl", *serve], ["-c", _SLOW, *join])
        )
        stack.callback(server.kill)
        stack.callback(client.kill)
        if server.wait(_TIMEOUT_S):
            raise RuntimeError(f"the server ended with {server.returncode}")
        rows = [json.loads(line) for line in (folder / "run" / "events.jsonl").read_text().splitlines()]
        summary = json.loads((folder / "run" / "summary.json").read_text())
    at_s = [row["time_s"] for row in rows if row["event"] == "arrived"]
    return {
        "updates_per_s": (len(at_s) - 1) / (at_s[-1] - at_s[0]),
        "sending": sum(row["event"] == "sending" for row in rows),
        "staleness": summary["staleness"]["mean"],
        "upload_s": summary["bytes_up"] / len(at_s) / _RATE,
    }


def throughput() -> Row:
    """Measure the updates per second of a real client with and without overlap, in turn; return a row with the medians."""
    found: dict[bool, list[Row]] = {False: [], True: []}
    for _ in range(_REPEATS):
        for overlap in found:
            found[overlap].append(_client(overlap))
    off, on = (statistics.median(row["updates_per_s"] for row in found[overlap]) for overlap in (False, True))
    ratios = [b["updates_per_s"] / a["updates_per_s"] for a, b in zip(found[False], found[True], strict=True)]
    return {
        "what": "updates/s, one real client",
        "off": off,
        "on": on,
        "ratio": on / off,
        "least_ratio": min(ratios),
        "staleness_off": found[False][0]["staleness"],
        "staleness_on": found[True][0]["staleness"],
        "seeds": _REPEATS,
        "upload_s": found[True][0]["upload_s"],
    }


def _simulated(method: str, overlap: bool, seed: int) -> dict[str, Any]:
    from raafl.config.parse import parse
    from raafl.runtime.run import simulate

    # An epoch of a tenth of the data is 5 steps of 32 samples: 3 * 15,010 weights * 2 FLOPs a sample, 60 kB each way.
    speeds = [5e7 / (1 + 0.4 * number) for number in range(10)]
    devices = [
        {"name": f"d{speed:.0f}", "flops_per_s": speed, "down_bytes_per_s": 4e5, "up_bytes_per_s": 1.6e5}
        for speed in speeds
    ]
    with tempfile.TemporaryDirectory() as place:
        options = [
            "--config",
            CONFIG,
            "--clients=10",
            f"--devices={json.dumps(devices)}",
            "--partition.alpha=0.5",
            "--train.num_epochs=1",
            *_METHODS[method],
            f"--target={_TARGET}",
            "--max_updates=1500",
            "--eval_every=2",
            f"--overlap={str(overlap).lower()}",
            f"--seed={seed}",
            "--progress=quiet",
            f"--output={place}/run",
        ]
        parsed = parse("simulate", options)
        return simulate(parsed.experiment, parsed.config_yaml)[0]


def time_to_target(method: str) -> Row:
    """Measure the virtual seconds to the target of a method, medians over seeds; infinite for a run that misses it."""
    found = {overlap: [_simulated(method, overlap, seed) for seed in range(_SEEDS)] for overlap in (False, True)}

    def seconds(overlap: bool) -> list[float]:
        return [run["time_to"][_TARGET] or float("inf") for run in found[overlap]]

    off, on = (statistics.median(seconds(overlap)) for overlap in (False, True))
    paired = [b / a for a, b in zip(seconds(False), seconds(True), strict=True)]
    return {
        "what": f"virtual s to {_TARGET}, {method}",
        "off": off,
        "on": on,
        "ratio": on / off,
        "least_ratio": min(paired),
        "most_ratio": max(paired),
        "seeds": _SEEDS,
        "staleness_off": statistics.mean(run["staleness"]["mean"] for run in found[False]),
        "staleness_on": statistics.mean(run["staleness"]["mean"] for run in found[True]),
        "updates_per_s_ratio": statistics.median(
            (b["updates_merged"] / b["time_s"]) / (a["updates_merged"] / a["time_s"])
            for a, b in zip(found[False], found[True], strict=True)
        ),
    }


if __name__ == "__main__":
    main("overlap", lambda: [throughput(), *map(time_to_target, _METHODS)])
