"""Suggest raafl's fields to users who write arguments of Lightning's Trainer."""

from __future__ import annotations

from collections.abc import Iterable

from raafl.errors import nearest

_GROUPS = ("", "train", "trainer", "fabric")
_END = "a run ends by max_updates (merged updates), max_time (seconds) or target, such as accuracy=0.9"
_TASK = "num_epochs or num_steps of `train` say how long a task is"
_ALL = "the global model is measured on all of the test set: hand over a smaller one"
_TRIAL = "before each run a step and a measurement are tried in any case"
_FOLDER = "output is the run's folder, runs/NAME-TIME unless given"
_SHOWN = "progress is how a run is shown: auto, live, plain, verbose or quiet"
_FRAMES = "each client trains on one device with plain Fabric; fabric.accelerator and fabric.precision say how"

_INSTEAD = {
    "max_epochs": f"{_END}; {_TASK}",
    "min_epochs": f"{_END}; {_TASK}",
    "max_steps": f"{_END}; {_TASK}",
    "min_steps": f"{_END}; {_TASK}",
    "epochs": f"{_END}; {_TASK}",
    "rounds": f"{_END}",
    "num_rounds": f"{_END}",
    "limit_train_batches": f"{_TASK}: num_steps=10 is a task of ten batches",
    "overfit_batches": f"{_TASK}: num_steps=10 is a task of ten batches",
    "limit_val_batches": _ALL,
    "limit_test_batches": _ALL,
    "limit_predict_batches": "nothing is predicted: take the final model from the run",
    "fast_dev_run": f"{_TRIAL}; max_updates=1 is the shortest run",
    "num_sanity_val_steps": _TRIAL,
    "val_check_interval": "eval_every is the distance between evaluations",
    "check_val_every_n_epoch": "eval_every is the distance between evaluations",
    "strategy": _FRAMES,
    "num_nodes": "`raafl serve` and `raafl join` are for several machines, or torchrun (docs/deploy.md)",
    "num_clients": "clients is their number",
    "plugins": _FRAMES,
    "sync_batchnorm": "submodels.batch_norm is merged or static",
    "use_distributed_sampler": "partition says which client has which samples",
    "gradient_clip_algorithm": "fabric.gradient_clip_val clips by norm",
    "enable_checkpointing": "checkpoint_every, checkpoint_s and keep_checkpoints say when there are checkpoints, and how many",
    "ckpt_path": "resume is the folder of a run to go on with",
    "default_root_dir": _FOLDER,
    "enable_progress_bar": _SHOWN,
    "enable_model_summary": "`raafl plan` shows the model and what its submodels cost",
    "log_every_n_steps": "every evaluation and every task is recorded; logger says where else it goes",
    "deterministic": "fabric.deterministic takes deterministic kernels; seed decides all that is drawn",
    "benchmark": "`raafl plan` says what a run takes",
    "inference_mode": "measuring takes no gradients in any case",
    "detect_anomaly": "an update that is not finite is refused in any case",
    "profiler": "times and bytes of every task are in clients.csv; `raafl plan` predicts them",
    "reload_dataloaders_every_n_epochs": "the data set is read once and shared out",
    "barebones": _SHOWN,
    "callbacks": "callbacks are objects of Python: raafl.Federation(..., callbacks=[...]); target ends a run from a config",
    "enable_autolog_hparams": "the whole config goes to every logger",
    "model_registry": "the final model is in the run's folder, and with loggers that take one",
    "batch_size": "train.batch_size is the local batch size, unless the data module's holds",
    "gpus": "fabric.accelerator is cpu, cuda or auto, and fabric.device the index of a GPU",
    "accelerator": "fabric.accelerator is cpu, cuda or auto",
    "optimizer": "the model's configure_optimizers has it; for a plain module give optimizer= to simulate or fit",
    "init_args": "indent it below the part that it is for, beside its class_path: model, data, algorithm or partition",
    "class_path": "indent it below the part that it is for: model, data, algorithm or partition",
    "lr": "the model's configure_optimizers has it; for a plain module give optimizer= to simulate or fit",
    "learning_rate": "the model's configure_optimizers has it; for a plain module give optimizer= to simulate or fit",
}


def unknown(what: str, name: str, known: Iterable[str]) -> str:
    """Return the error message for an unknown name: it suggests raafl's equivalent of a Trainer argument, or the nearest name."""
    group, _, last = name.removeprefix("--").rpartition(".")
    if group in _GROUPS and last in _INSTEAD and name not in known:
        return f"{what}: {_INSTEAD[last]}"
    return f"{what}: {nearest(name, known)}"
