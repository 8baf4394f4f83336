"""Replay a recorded run, and check that the result is equal bit for bit."""

from __future__ import annotations

import contextlib
from argparse import ArgumentParser
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from raafl.config.argv import add_replay_options
from raafl.config.parse import load_run
from raafl.data.federated import ClientData
from raafl.errors import BadInput
from raafl.runfolder import checkpoints as checkpoint
from raafl.runfolder.events import read_run
from raafl.runfolder.schema import JournalRow
from raafl.runtime.lifecycle.environment import conditions, differences
from raafl.runtime.lifecycle.saved_form import SavedForm
from raafl.runtime.replay import Replay
from raafl.runtime.setup import ServerSetup, build, make_executor
from raafl.submodel import FlatTensors


def parser() -> ArgumentParser:
    """Return a parser for the options of `raafl replay`."""
    found = ArgumentParser(prog="raafl replay", exit_on_error=False, description="Re-execute a recorded run.")
    found.add_argument("run", metavar="RUN", help="the run's folder, or its URL in an object store")
    found.add_argument("--until", type=int, metavar="EVENT", help="stop after so many events and write a checkpoint")
    add_replay_options(found)
    found.add_argument(
        "--json", action="store_true", help="print the result as JSON, and nothing else, on standard output"
    )
    return found


def replay(
    folder: Path,
    *,
    until: int | None = None,
    workers: int = 1,
    client_data: Mapping[int, Path] | None = None,
    trust_config: bool = False,
) -> dict[str, Any]:
    """Repeat a recorded run from its journal, and compare the resulting model with the recorded one.

    Args:
        folder: folder of the run.
        until: number of the event after which to stop and write a checkpoint to ``folder/replay``; None = replay all.
        workers: number of processes that train.
        client_data: YAML file with the ``data`` section of each client that trained on its own data, by client.
        trust_config: whether to import any class that the run's config names; else only classes of raafl.

    Returns:
        ``equal``: whether the models are equal (None = no digest was recorded); ``model_digest`` and
            ``recorded_digest``; ``parted_at``: first event that differs, or None; ``distance``: distance of the models,
            if they differ; ``events``: number of events; ``differences``: versions, hardware and settings that differ.

    Raises:
        BadInput: the folder does not contain a run, its config names classes of others, or data are missing.
    """
    if until is not None and until < 1:
        raise BadInput(f"until is {until}: give the number of an event, from 1")
    rows, summary = read_run(folder, until)
    experiment = load_run(folder, trusted=trust_config, for_replay=True)
    own = _own_data(folder, rows, client_data or {}, trust_config)
    begun = next((row for row in rows if row.get("event") == "run"), JournalRow())
    parts = build(experiment, pace=False, **_start(folder, begun))
    found = conditions(experiment)
    executor = make_executor(parts, workers, own)
    try:
        played = Replay(parts.coordinator, executor)
        played.run(rows, until)
    finally:
        executor.close()
    digest = parts.coordinator.state.values.model_digest()
    wanted = summary["model_digest"] if summary is not None and until is None else None
    result: dict[str, Any] = {
        "equal": None if wanted is None else digest == wanted,
        "model_digest": digest,
        "recorded_digest": wanted,
        "parted_at": None if played.first_difference is None else played.first_difference.to_json(),
        "events": played.num_events,
        "versions": parts.coordinator.state.version,
        "differences": differences(begun.get("conditions", {}), found),
    }
    if result["equal"] is False:
        result["distance"] = _distance(folder, parts)
    if until is not None:
        result["checkpoint"] = str(_save(folder / "replay", parts))
    return result


def _start(folder: Path, begun: JournalRow) -> dict[str, Any]:
    """Read from the journal the number of clients that the run waited for, and whether lost clients counted."""
    start = begun.get("start")
    least, counts = (start.get("min_clients"), start.get("count_lost")) if isinstance(start, dict) else (None, None)
    if not isinstance(least, int) or not isinstance(counts, bool):
        raise BadInput(
            f"events.jsonl in '{folder}': start is {start!r:.80} in the first row: the file was changed, so the run cannot be "
            "replayed; give an unchanged copy of the run's folder"
        )
    return {"min_clients": least, "count_lost": counts}


def _own_data(
    folder: Path, rows: Iterable[JournalRow], files: Mapping[int, Path], trusted: bool
) -> dict[int, ClientData]:
    """Return the data of the clients that did not train on their share of the run's data."""
    from raafl.runtime.client.setup import whole

    wanted = {row["client"] for row in rows if row.get("event") == "joined" and row.get("own_data")}
    for client in sorted(wanted - set(files)):
        raise BadInput(
            f"client {client} trained on its own data: give --client_data {client}=FILE, a YAML file with the data "
            "section that it had"
        )
    loaded = {
        client: load_run(folder, f"--config={files[client]}", trusted=trusted, for_replay=True) for client in wanted
    }
    return {client: whole(experiment).client(1) for client, experiment in loaded.items()}


def _save(folder: Path, parts: ServerSetup) -> Path:
    state = parts.coordinator.state
    return checkpoint.write(folder, SavedForm(parts.module).contents(state.version, state.values))


def _distance(folder: Path, parts: ServerSetup) -> dict[str, Any] | None:
    """Return the largest and the root mean square difference between the replayed values and the run's last checkpoint."""
    with contextlib.suppress(BadInput):
        saved = checkpoint.load(folder)
        values = parts.coordinator.state.values
        theirs = FlatTensors.from_named({name: saved.values[name] for name, _ in values.items()}, values.layout)
        gaps = torch.cat(
            [
                (a.double() - b.double()).flatten()
                for a, b in zip(values.buffers.values(), theirs.buffers.values(), strict=True)
            ]
        )
        return {"version": saved.version, "max": gaps.abs().max().item(), "rms": gaps.square().mean().sqrt().item()}
    return None


def client_file(text: str) -> tuple[int, str]:
    """Split `ID=FILE` into the id of a client and the path of a YAML file with its ``data`` section.

    Raises:
        BadInput: the text has another form.
    """
    number, sign, file = text.partition("=")
    if not sign or not number.isdecimal() or not Path(file).is_file():
        raise BadInput(
            f"client_data is '{text}': give ID=FILE, with a client's number and a YAML file that has its data section"
        )
    return int(number), file


def lines_of(result: Mapping[str, Any]) -> list[str]:
    """Format the result of `replay` as lines of text."""
    lines = [
        f"replayed {result['events']} events to version {result['versions']}, model digest {result['model_digest']}"
    ]
    lines += [f"warning: {line}; the replay may give other bits" for line in result["differences"]]
    if result["equal"]:
        lines.append("equal to the recorded run, to the last bit")
    elif result["equal"] is False:
        lines.append(f"NOT equal: the run recorded {result['recorded_digest']}")
    if parted := result["parted_at"]:
        lines.append(
            f"run and replay differ from event {parted['event']} on, {parted['what']}: recorded "
            f"{parted['recorded']}, now {parted['replayed']}"
        )
    if distance := result.get("distance"):
        lines.append(
            f"from the checkpoint of version {distance['version']}: largest difference {distance['max']:.3g}, "
            f"root mean square {distance['rms']:.3g}"
        )
    if "checkpoint" in result:
        lines.append(f"state after event {result['events']} written to {result['checkpoint']}")
    return lines
