"""Save the final model of a run in the format of its own library.

A module with a method `save_pretrained(folder)` is saved to `RUN/model` by it, with the data module's tokenizer beside it:
`transformers.AutoModel...from_pretrained("RUN/model")` loads both. For any other module the last checkpoint is the final model;
`LightningModule.load_from_checkpoint` loads it, and `RUN/model/model.safetensors` is there, too, where the config asks for it.
A card beside either says how the model was trained.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from raafl.core.state import GlobalState
from raafl.data.federated import FederatedData
from raafl.log import Notices
from raafl.plain_yaml import dump_yaml
from raafl.runfolder import checkpoints as checkpoint_files
from raafl.runtime.lifecycle.checkpointer import Checkpointer, SavedForm, cause
from raafl.sanitize import sanitize_text
from raafl.submodel.saved_tensors import SAFETENSORS, save_tensors
from raafl.units import duration

if TYPE_CHECKING:
    from lightning import LightningModule

    from raafl.runtime.setup import ServerSetup

FOLDER: Final = "model"
CARD: Final = "README.md"

_MAX_METRICS = 20
_WITH_TRANSFORMERS = """\
```python
from transformers import {architecture}

{architecture}.from_pretrained("FOLDER")
```"""
_WITH_SAFETENSORS = """\
```python
from safetensors.torch import load_file

module.load_state_dict(load_file("FOLDER/model.safetensors"))
```"""


def save_final(
    run_folder: Path,
    saver: Checkpointer,
    parts: ServerSetup,
    form: SavedForm,
    progress: Notices,
    summary: Mapping[str, Any],
) -> tuple[str | None, str | None]:
    """Save the final model of a run.

    Returns:
        Path of the model, relative to the run folder, and path of a copy in the system's temporary folder. The copy is
            written only if the model could not be written to the run folder. None stands for a file not written.
    """
    module, state, experiment = parts.module, parts.coordinator.state, parts.experiment
    is_pretrained = callable(getattr(module, "save_pretrained", None))

    def card(folder: Path) -> str:
        is_loaded = is_pretrained and not _is_state_dict(folder)
        return model_card(
            summary, experiment.name, type(module).__name__, _architecture(folder), is_pretrained=is_loaded
        )

    path = _save_model(run_folder, saver.wait(), module, state, parts.data, progress, card)
    if (experiment.safetensors or experiment.push_to_hub is not None) and not is_pretrained:
        path = _save_safetensors(run_folder, form, state, progress, card) or path
    # a run that was stopped may lack a checkpoint of its last version, which is no failure
    failed = saver.num_failed > 0 or is_pretrained
    copy = _save_copy(run_folder, form, state, progress) if path is None and failed else None
    return path, copy


def _save_model(
    run_folder: Path,
    checkpoint: Path | None,
    module: LightningModule,
    state: GlobalState,
    data: FederatedData,
    progress: Notices,
    card: Callable[[Path], str],
) -> str | None:
    """Save the final model in the run folder, and return its path there; after an error warn, and return None."""
    found = None
    if callable(getattr(module, "save_pretrained", None)):
        try:
            state.submodels.load_(module, state.values)
            found = _save_pretrained(module, tokenizer_of(data.datamodule), run_folder / FOLDER, card)
        except Exception as error:  # libraries may wrap disk errors in other exceptions
            progress.warn(
                f"the final model cannot be written to {run_folder / FOLDER}: {cause(error)}; take it from the last "
                f"checkpoint: {type(module).__name__}.load_from_checkpoint(...).save_pretrained(...)"
            )
    if found is None and checkpoint is not None and checkpoint.stem == f"version-{state.version:06d}":
        found = checkpoint
    if found is None:
        return None
    return str(found.relative_to(run_folder))


def _save_copy(run_folder: Path, form: SavedForm, state: GlobalState, progress: Notices) -> str | None:
    """Save the model in the system's temporary folder, as when the disk of the run folder is full; None if that fails, too."""
    folder: Path | None = None
    try:
        folder = Path(tempfile.mkdtemp(prefix=f"{run_folder.name}-"))
        path = checkpoint_files.write(folder, form.contents(state.version, state.values))
    except Exception as error:  # libraries may wrap disk errors in other exceptions
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        progress.warn(
            f"the final model cannot be saved in {run_folder}, nor in {tempfile.gettempdir()} ({cause(error)}): it is lost"
        )
        return None
    progress.warn(
        f"the final model cannot be saved in {run_folder}: a copy is in {path}, move it before it is cleaned up"
    )
    return str(path)


def _save_pretrained(module: Any, tokenizer: Any, target: Path, card: Callable[[Path], str]) -> Path:
    with _whole(target) as folder:
        module.save_pretrained(str(folder))
        if tokenizer is not None:
            tokenizer.save_pretrained(str(folder))
        (folder / CARD).write_text(card(folder), encoding="utf-8")
    return target


def _architecture(folder: Path) -> str | None:
    """Return the class of transformers that a saved model's config names; None if it names none.

    `AutoModel` would load most models without their head.
    """
    try:
        (name,) = json.loads((folder / "config.json").read_text(encoding="utf-8"))["architectures"]
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return name if isinstance(name, str) and name.isidentifier() else None


def _is_state_dict(folder: Path) -> bool:
    """Check whether a saved model is only a file of tensors, which no library's config says how to load."""
    configs = ("config.json", "adapter_config.json")
    return (folder / SAFETENSORS).exists() and not any((folder / name).exists() for name in configs)


def _save_safetensors(
    run_folder: Path, form: SavedForm, state: GlobalState, progress: Notices, card: Callable[[Path], str]
) -> str | None:
    """Save a plain module's state dict and model card in `RUN/model`, and return the path; None if that fails."""
    try:
        saved = form.contents(state.version, state.values)["state_dict"]
        with _whole(run_folder / FOLDER) as folder:
            save_tensors(saved, folder, progress.warn)
            (folder / CARD).write_text(card(folder), encoding="utf-8")
    except Exception as error:  # libraries may wrap disk errors in other exceptions
        progress.warn(f"the final model cannot be written to {run_folder / FOLDER}: {cause(error)}")
        return None
    return FOLDER


def tokenizer_of(datamodule: object) -> object:
    """Return the ``tokenizer`` of a data module if it can be saved for transformers, else None."""
    tokenizer = getattr(datamodule, "tokenizer", None)
    if tokenizer is None or hasattr(tokenizer, "save_pretrained"):
        return tokenizer
    from raafl.data.tokens import WORDS, Tokenizer, load_tokenizer

    if not isinstance(tokenizer, Tokenizer) or tokenizer.name == WORDS:
        return None
    return load_tokenizer(tokenizer.name)


@contextmanager
def _whole(target: Path) -> Iterator[Path]:
    """Yield a temporary folder, which replaces ``target`` if the ``with`` block succeeds."""
    for left in target.parent.glob(f".{target.name}.*.tmp"):  # remains of a process that was killed
        shutil.rmtree(left, ignore_errors=True)
    new, old = (target.with_name(f".{target.name}.{word}-{os.getpid()}.tmp") for word in ("new", "old"))
    try:
        new.mkdir(parents=True)
        yield new
        for file in filter(Path.is_file, new.rglob("*")):
            with file.open("rb+") as written:
                os.fsync(written.fileno())  # some file systems report a failed write only here
        with suppress(FileNotFoundError):
            target.rename(old)
        try:
            new.rename(target)
        except OSError:
            with suppress(OSError):
                old.rename(target)
            raise
    finally:
        shutil.rmtree(new, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def model_card(
    summary: Mapping[str, Any], name: str, kind: str, architecture: str | None = None, *, is_pretrained: bool
) -> str:
    """Return the text of a model card: method, clients, updates, final metrics, privacy and digest.

    `architecture`: class of transformers that loads the model; None = that is not known.
    """
    use = _WITH_SAFETENSORS
    if is_pretrained:
        use = f"Load it with what belongs to the `save_pretrained` of {_card_cell(kind)}."
    if architecture is not None:
        use = _WITH_TRANSFORMERS.format(architecture=architecture)
    library = "pytorch" if architecture is None else "transformers"
    head = {"library_name": library, "tags": ["raafl", "federated-learning", str(summary["algorithm"])]}
    lines = [
        "---",
        dump_yaml(head).rstrip(),
        "---",
        "",
        f"# {_card_cell(name)}",
        "",
        f"A {_card_cell(kind)}, trained by federated learning with raafl.",
        "This card is made from the run's summary; what data the clients had, and what the model is for, is for you to add.",
        "",
        "## Training",
        "",
        "| | |",
        "| --- | --- |",
        *_card_rows(_card_training(summary)),
        "",
        "## Evaluation",
        "",
        "On the server's held-out data, of the final model:",
        "",
        "| metric | value |",
        "| --- | --- |",
        *_card_rows((metric, f"{value:.6g}") for metric, value in list(summary["final"].items())[:_MAX_METRICS]),
        "",
        "## Privacy",
        "",
        *_card_privacy(summary.get("privacy")),
        "",
        "## Use",
        "",
        use,
        "",
        "The digest is of the values as raafl merged them; `raafl audit RUN` finds whether they are those of the journal.",
    ]
    return "\n".join(lines) + "\n"


def _card_training(summary: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
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


def _card_privacy(privacy: Mapping[str, Any] | None) -> list[str]:
    if privacy is None:
        return ["None is promised: no differential privacy was applied by the server."]
    return [
        "Client-level differential privacy, by the server's accountant:",
        "",
        "| | |",
        "| --- | --- |",
        *_card_rows(
            (name, privacy[name]) for name in ("epsilon", "delta", "mechanism", "neighbours", "noise_multiplier")
        ),
    ]


def _card_rows(entries: Any) -> list[str]:
    return [f"| {_card_cell(name)} | {_card_cell(value)} |" for name, value in entries]


def _card_cell(value: object) -> str:
    """Escape a value for a Markdown table, since names and reasons may come from untrusted code."""
    text = sanitize_text(value, 300)
    return "".join(f"\\{letter}" if letter in "\\|<>[]`*_#" else letter for letter in text)
