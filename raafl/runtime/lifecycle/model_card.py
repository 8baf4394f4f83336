"""Write a model card (README.md) for the final model of a run, from the run's summary; the Hugging Face Hub displays it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from raafl.sanitize import sanitize_text
from raafl.units import duration

_MAX_METRICS = 20
_WITH_TRANSFORMERS = """\
```python
from transformers import AutoModel, AutoTokenizer

AutoModel.from_pretrained("FOLDER")
```"""
_WITH_SAFETENSORS = """\
```python
from safetensors.torch import load_file

module.load_state_dict(load_file("FOLDER/model.safetensors"))
```"""


def model_card(summary: Mapping[str, Any], name: str, kind: str, *, is_pretrained: bool) -> str:
    """Return the text of a model card: method, clients, updates, final metrics, privacy and digest."""
    library = "transformers" if is_pretrained else "pytorch"
    head = {"library_name": library, "tags": ["raafl", "federated-learning", str(summary["algorithm"])]}
    lines = [
        "---",
        yaml.safe_dump(head, sort_keys=False).rstrip(),
        "---",
        "",
        f"# {_cell(name)}",
        "",
        f"A {_cell(kind)}, trained by federated learning with raafl.",
        "This card is made from the run's summary; what data the clients had, and what the model is for, is for you to add.",
        "",
        "## Training",
        "",
        "| | |",
        "| --- | --- |",
        *_rows(_training(summary)),
        "",
        "## Evaluation",
        "",
        "On the server's held-out data, of the final model:",
        "",
        "| metric | value |",
        "| --- | --- |",
        *_rows((metric, f"{value:.6g}") for metric, value in list(summary["final"].items())[:_MAX_METRICS]),
        "",
        "## Privacy",
        "",
        *_privacy(summary.get("privacy")),
        "",
        "## Use",
        "",
        _WITH_TRANSFORMERS if is_pretrained else _WITH_SAFETENSORS,
        "",
        "The digest is of the values as raafl merged them; `raafl audit RUN` finds whether they are those of the journal.",
    ]
    return "\n".join(lines) + "\n"


def _training(summary: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
    clock = "virtual" if summary["runtime"] == "simulated" else "wall-clock"
    yield "method", summary["algorithm"]
    yield "clients whose updates were merged", sum(num > 0 for num in summary["participation"].values())
    yield "updates merged", summary["updates_merged"]
    yield "updates refused, lost", f"{sum(summary['updates_refused'].values())}, {summary['updates_lost']}"
    yield "versions of the model", summary["versions"]
    yield "time", f"{duration(summary['time_s'])} of {clock} time"
    yield "ended by", summary["finished"]
    yield "seed", summary["seed"]
    yield "model digest", summary["model_digest"]


def _privacy(privacy: Mapping[str, Any] | None) -> list[str]:
    if privacy is None:
        return ["None is promised: no differential privacy was applied by the server."]
    return [
        "Client-level differential privacy, by the server's accountant:",
        "",
        "| | |",
        "| --- | --- |",
        *_rows((name, privacy[name]) for name in ("epsilon", "delta", "mechanism", "neighbours", "noise_multiplier")),
    ]


def _rows(entries: Any) -> list[str]:
    return [f"| {_cell(name)} | {_cell(value)} |" for name, value in entries]


def _cell(value: object) -> str:
    """Escape a value for a Markdown table, since names and reasons may come from untrusted code."""
    text = sanitize_text(value, 300)
    return "".join(f"\\{letter}" if letter in "\\|<>[]`*_#" else letter for letter in text)
