"""Keep the modes (train or eval) in which a model's author left its parts.

Each part trains in the mode that it has once the model is built, as with Lightning's Trainer. Copies of the model have these
modes, and `raafl.submodel.module_state.ModuleState` restores them before each task, evaluation and trial.
"""

from __future__ import annotations

from typing import TypeVar

from torch import nn

from raafl.core.types import Warn

_TRAINING = "_raafl_modes"
_SHOWN = 3
T = TypeVar("T", bound=nn.Module)


def call_own_train(module: nn.Module) -> None:
    """Let parts with a method `train` of their own set their modes, as one that keeps a frozen backbone in eval mode.

    What is in eval mode stays so.
    """
    for part in module.modules():
        if type(part).train is not nn.Module.train:
            in_eval = [inner for inner in part.modules() if not inner.training]
            part.train(part.training)
            for inner in in_eval:
                inner.training = False


def eval_mode_note(module: nn.Module) -> list[str]:
    """Return a line for the start of a run on the parts of its model that are in eval mode; none if there are none.

    A model that is in eval mode as a whole is a warning.
    """
    parts = list(module.named_modules())
    in_eval = [path for path, part in parts if not part.training]
    kind = type(module).__name__
    if not in_eval:
        return []
    if not module.training:
        return [
            Warn(
                f"{kind} is in eval mode, with {len(in_eval)} of its {len(parts)} layers, and trains so (no dropout, no batch "
                "statistics): call .train() on it before the run"
            )
        ]
    tops = [path for path in in_eval if path.rpartition(".")[0] not in in_eval]
    named = ", ".join(tops[:_SHOWN]) + (", ..." if len(tops) > _SHOWN else "")
    return [
        f"{len(in_eval)} of {len(parts)} layers of {kind} are in eval mode, as it was built, and train so ({named}): call .train() "
        "on them for train mode"
    ]


def in_eval_mode(module: T) -> T:
    """Put a trained module into eval mode for its user, and remember the modes in which it was trained.

    `with_modes_of_training` restores these if the user trains it again.
    """
    module.__dict__[_TRAINING] = [part.training for part in module.modules()]
    return module.eval()


def with_modes_of_training(module: T) -> T:
    """Undo `in_eval_mode` in a module that is still in eval mode as a whole; leave any other as its user left it."""
    before, parts = module.__dict__.pop(_TRAINING, []), list(module.modules())
    if len(before) == len(parts) and not any(part.training for part in parts):
        for part, training in zip(parts, before, strict=True):
            part.training = training
    return module
