"""Models of the transformers library: from a name on the hub, a folder, an installed package, or their shape alone.

transformers is imported when the first such model is made.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch

MADE: Final = "made:llama"

_LLAMA: Final[Mapping[str, Any]] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 261,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
    "initializer_range": 0.2,
}
"""Tokens are bytes and five special ones, of which 0 pads and 1 ends."""


def make(
    task: str,
    name_or_path: str | None,
    pretrained: bool,
    architecture: Mapping[str, Any],
    dtype: torch.dtype = torch.float32,
) -> Any:  # a transformers.PreTrainedModel
    """Load or create a transformers model for a task.

    Args:
        task: ending of transformers' class ``AutoModelFor``: SequenceClassification, ImageClassification, CausalLM,
            Seq2SeqLM, MaskedLM.
        name_or_path: name on the hub, folder, or ``package:NAME/FOLDER`` for a folder of an installed Python package;
            ``made:llama`` = a tiny LLaMA with fixed random weights, for the tokenizer ``bytes``; None = use
            ``architecture`` alone.
        pretrained: whether to load the weights, too; a head of another shape starts at random.
        architecture: fields of the model's config that differ from the stored ones, or the whole config, including
            ``model_type``.
        dtype: dtype of the model's parameters.

    Raises:
        FileNotFoundError: the model does not exist or cannot be downloaded; the message has the remedy.
        ValueError: neither a name nor a ``model_type`` is given, or the architecture is unknown.
    """
    transformers = _transformers()
    maker = getattr(transformers, f"AutoModelFor{task}")
    fields = dict(architecture)
    if "trust_remote_code" in fields:
        raise ValueError("architecture has trust_remote_code: code from the hub is never run; leave it out")
    for name, value in fields.items():
        if name.endswith("_implementation") and "/" in str(value):
            raise ValueError(
                f"architecture has {name}: {value!r}, a kernel of the hub, which is never run: leave it out"
            )
    if name_or_path is None:
        if "model_type" not in fields:
            raise ValueError("name_or_path is null and architecture has no model_type: give one of them")
        config = transformers.AutoConfig.for_model(**fields)
        return maker.from_config(config, dtype=dtype, trust_remote_code=False)
    if name_or_path == MADE:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return make(task, None, False, {**_LLAMA, **fields}, dtype)
    where = located(name_or_path)
    fields.pop("model_type", None)  # the files say it
    if where.startswith((".", "/", "~")) and not Path(where).is_dir():
        raise FileNotFoundError(
            f"name_or_path is '{where}', which is not a folder: name one that save_pretrained wrote"
        )
    with _quiet(transformers), _explained(name_or_path, where):
        config = transformers.AutoConfig.from_pretrained(where, trust_remote_code=False, **fields)
        if not pretrained:
            return maker.from_config(config, dtype=dtype, trust_remote_code=False)
        model = maker.from_pretrained(
            where, config=config, dtype=dtype, ignore_mismatched_sizes=True, trust_remote_code=False
        )
        return model.train()  # transformers leaves it in eval mode, in which dropout does nothing


def save(model: Any, folder: str | Path) -> None:
    """Save a transformers model so that ``from_pretrained(folder)`` loads it; early exits are left out.

    Args:
        model: model of transformers.
        folder: folder to which the model is written.
    """
    own = {name: value for name, value in model.state_dict().items() if not name.startswith("exits.")}
    with _quiet(_transformers()):
        model.save_pretrained(folder, state_dict=own)


def located(name_or_path: str) -> str:
    """Replace ``package:NAME/FOLDER`` by the path of that folder; return any other name unchanged.

    Raises:
        FileNotFoundError: the package is not installed or has no such folder.
    """
    scheme, _, rest = name_or_path.partition(":")
    if scheme != "package" or not rest:
        return name_or_path
    package, _, folder = rest.partition("/")
    # of a dotted name the packages above would be imported
    spec = importlib.util.find_spec(package) if package.isidentifier() and package != "__main__" else None
    spec = spec if spec is not None and spec.origin is not None else None  # any folder on the path is found, too
    for root in (spec.submodule_search_locations or []) if spec else []:
        if (Path(root) / folder).is_dir():
            return str(Path(root) / folder)
    reason = f"it has no folder '{folder}'" if spec else "that package is not installed"
    raise FileNotFoundError(
        f"name_or_path is '{name_or_path}', but {reason}: pip install it, or name a model on the hub or a folder"
    )


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise FileNotFoundError(
            f"this model needs the package transformers ({error}): pip install transformers"
        ) from error
    return transformers


@contextmanager
def _explained(name_or_path: str, where: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        if Path(where).is_dir():
            remedy = "name a folder that save_pretrained wrote"
        elif os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
            remedy = (
                "HF_HUB_OFFLINE is set and the model is not in the cache: unset it once to fetch it, or give a folder"
            )
        else:
            remedy = "give a name on the hub (and a network to fetch it), or a folder that save_pretrained wrote"
        raise FileNotFoundError(f"cannot load the model '{name_or_path}' ({reason}): {remedy}") from error


@contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """Hide transformers' progress bars, and its list of the parameters of a new head, inside this context."""
    logging = transformers.utils.logging
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
