"""Decide for each field of `transformers.TrainingArguments` whether a federated task takes it, and what stands for it if not."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, Literal, NamedTuple

from raafl.errors import BadInput, briefly

_log = logging.getLogger(__name__)

ACCUMULATED: Final = "num_tokens"
"""Metric of TRL that counts over the whole life of a Trainer, and so over tasks of all clients."""


class Field(NamedTuple):
    """Treatment of a field of the Trainer's arguments in a federated task."""

    use: Literal["taken", "instead", "refused"]  # "taken" by a task, or raafl has a setting "instead", or "refused"
    text: str  # effect of the argument, name of raafl's setting, or remedy if it is refused


def _all(use: Literal["taken", "instead", "refused"], text: str, *names: str) -> dict[str, Field]:
    return dict.fromkeys(names, Field(use, text))


FIELDS: Final[Mapping[str, Field]] = {
    **_all("taken", "the optimizer of each task", "learning_rate", "optim", "optim_args", "optim_target_modules"),
    **_all("taken", "the optimizer of each task", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon"),
    **_all(
        "taken",
        "the learning rate within a task, from its first step to its last",
        *("lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps"),
    ),
    **_all("taken", "the batch size of a task, unless `train.batch_size` is set", "per_device_train_batch_size"),
    **_all("taken", "the batch size of an evaluation", "per_device_eval_batch_size"),
    **_all("taken", "`fabric.accumulate_grad_batches`", "gradient_accumulation_steps"),
    **_all("taken", "`fabric.gradient_clip_val`; 0 = no clipping", "max_grad_norm"),
    **_all("taken", "`fabric.precision`: bf16-mixed or 16-mixed", "bf16", "fp16"),
    **_all("taken", "`fabric.tf32`", "tf32"),
    **_all("taken", "`fabric.deterministic`", "full_determinism"),
    **_all("taken", "`fabric.accelerator`: cpu, or the Trainer's own device", "use_cpu"),
    **_all("taken", "`seed`, unless the federation has one", "seed"),
    **_all("taken", "the loss", "label_smoothing_factor", "average_tokens_across_devices", "label_names"),
    **_all(
        "taken",
        "layers are computed again in the backward pass",
        *("activation_checkpointing", "activation_checkpointing_kwargs"),
        *("gradient_checkpointing", "gradient_checkpointing_kwargs"),
    ),
    **_all("taken", "the last batch of a client's epoch", "dataloader_drop_last"),
    **_all("taken", "columns of the data sets", "remove_unused_columns"),
    **_all("taken", "random or sequential; other orders are refused", "train_sampling_strategy"),
    **_all("taken", "what is computed at an evaluation", "prediction_loss_only", "use_cache"),
    **_all("instead", "`train.num_epochs` for a task, `max_updates` for the run", "num_train_epochs"),
    **_all("instead", "`train.num_steps` for a task, `max_updates` for the run", "max_steps"),
    **_all("instead", "`output`", "output_dir"),
    **_all("instead", "`name`", "run_name", "project"),
    **_all("instead", "`seed`", "data_seed"),
    **_all("instead", "`logger`", "report_to", "trackio_space_id", "trackio_bucket_id", "trackio_static_space_id"),
    **_all(
        "instead",
        "`eval_every`",
        *("logging_strategy", "logging_steps", "logging_first_step", "eval_strategy", "eval_steps", "eval_delay"),
        *("eval_on_start", "do_train", "do_eval", "do_predict"),
    ),
    **_all("instead", "`progress`", "log_level", "log_level_replica", "log_on_each_node", "disable_tqdm"),
    **_all("instead", "`checkpoint_every`, `checkpoint_s`", "save_strategy", "save_steps", "enable_jit_checkpoint"),
    **_all("instead", "`keep_checkpoints`", "save_total_limit", "save_only_model", "save_on_each_node"),
    **_all("instead", "`keep_best`", "load_best_model_at_end", "metric_for_best_model", "greater_is_better"),
    **_all(
        "instead",
        "`push_to_hub`",
        *("push_to_hub", "hub_model_id", "hub_strategy", "hub_token", "hub_private_repo", "hub_always_push"),
        "hub_revision",
    ),
    **_all(
        "instead",
        "`resume`",
        *("resume_from_checkpoint", "ignore_data_skip", "restore_callback_states_from_checkpoint"),
    ),
    **_all(
        "instead",
        "a client's own process reads its batches",
        *("dataloader_num_workers", "dataloader_pin_memory", "dataloader_persistent_workers"),
        *("dataloader_prefetch_factor", "dataloader_multiprocessing_context", "dataloader_in_order"),
    ),
    **_all("instead", "`guard`: updates that are not finite are refused", "logging_nan_inf_filter", "debug"),
    **_all("instead", "the run's own figures of memory", "skip_memory_metrics"),
    **_all("instead", "torchrun and `raafl fit`", "local_rank", "ddp_timeout", "ddp_backend"),
    **_all("refused", "leave it out: submodels have other shapes", "torch_compile"),
    **_all("refused", "leave it out: submodels have other shapes", "torch_compile_backend", "torch_compile_mode"),
    **_all("refused", "leave it out", "use_liger_kernel", "liger_kernel_config", "torch_empty_cache_steps"),
    **_all("refused", "leave it out", "neftune_noise_alpha", "include_num_input_tokens_seen"),
    **_all("refused", "set per_device_train_batch_size", "auto_find_batch_size"),
    **_all(
        "refused",
        "evaluations compute in the precision of the tasks: leave it out",
        *("bf16_full_eval", "fp16_full_eval"),
    ),
    **_all(
        "refused",
        "compute_metrics gets all predictions and labels at once: leave it out",
        *("eval_do_concat_batches", "eval_use_gather_object", "eval_accumulation_steps", "batch_eval_metrics"),
        "include_for_metrics",
    ),
    **_all("refused", "use train_sampling_strategy 'random' or 'sequential'", "length_column_name"),
    **_all(
        "refused",
        "a client of several processes sets `fabric.shard`: leave it out",
        *("fsdp", "fsdp_config", "deepspeed", "parallelism_config", "accelerator_config"),
        *("ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers", "ddp_static_graph"),
    ),
    # TRL accepts these arguments, but neither its constructors nor its losses implement them
    **_all("refused", "leave it out; gradient_checkpointing saves memory, too", "activation_offloading"),
    **_all("refused", "the reference model of a run stays as it is: leave it out", "sync_ref_model"),
}
"""Every field of `TrainingArguments`, and fields of TRL's that a task cannot honour; TRL's others its trainers read themselves."""

_REFUSED_VALUES: Final[Mapping[str, tuple[tuple[str, ...], str]]] = {
    "train_sampling_strategy": (("group_by_length", "batch_rebalance"), "give 'random' or 'sequential'"),
    "lr_scheduler_type": (
        ("reduce_lr_on_plateau", "greedy"),
        "it goes by evaluations, which a task has none of: give another",
    ),
    "optim": (
        ("lomo", "adalomo", "schedule_free_adamw", "schedule_free_sgd", "schedule_free_radam"),
        "a task calls nothing of an optimizer but its step, and this one needs more: give another",
    ),
}

_SHOWING: Final = frozenset(
    (
        ("transformers", "DefaultFlowCallback"),
        ("transformers", "ProgressCallback"),
        ("transformers", "PrinterCallback"),
        ("trl", "RichProgressCallback"),
    )
)
"""Callbacks, by package and class, that steer a Trainer's own loop or show its progress."""

_USUAL: Final = ("output_dir", "disable_tqdm", "dataloader_pin_memory")
"""Fields that are not logged, since every Trainer has them set: they are required, or follow from the machine."""


def settings_of(args: Any) -> dict[str, Any]:
    """Return the fields of a Trainer's arguments that are set, by name: those with another value than by default."""
    found = {}
    for field in dataclasses.fields(args):
        value = getattr(args, field.name, None)
        usual = field.default_factory() if callable(field.default_factory) else field.default
        if value != usual and not _is_filled_in(value, usual):
            found[field.name] = value
    return found


def _is_filled_in(value: Any, usual: object) -> bool:
    """Check whether ``value`` is a default that the arguments' class filled in: empty, or a record of defaults."""
    if not value:
        return usual in (None, "", "none")
    make: Callable[[], Any] = type(value)
    return usual is None and dataclasses.is_dataclass(value) and value == make()


def check_arguments(trainer: Any) -> None:
    """Refuse arguments and callbacks that would have no effect; log which settings of raafl stand for others.

    Raises:
        BadInput: something is set that has no effect in a federated task.
    """
    args, kind = trainer.args, type(trainer.args).__name__
    given = settings_of(args)
    problems = [*_refused(kind, given), *_callbacks(trainer)]
    if problems:
        raise BadInput("\n".join(problems))
    instead: dict[str, list[str]] = {}
    for name in given:
        if name in FIELDS and FIELDS[name].use == "instead" and name not in _USUAL:
            instead.setdefault(FIELDS[name].text, []).append(name)
    added = {type(one).__name__ for one in trainer.callback_handler.callbacks if _reports(one)}
    if added and "report_to" not in given:
        instead.setdefault(FIELDS["report_to"].text, []).extend(sorted(added))
    if instead:
        shown = "; ".join(f"{', '.join(names)}: {text.replace('`', '')}" for text, names in instead.items())
        _log.warning("%s has fields or callbacks for which a run has settings of its own: %s", kind, shown)


def _refused(kind: str, given: Mapping[str, Any]) -> Iterator[str]:
    for name, value in given.items():
        field = FIELDS.get(name)
        if field is not None and field.use == "refused":
            yield f"{kind}.{name} is {briefly(value)}, but has no effect in a federated task: {field.text}"
        text = str(getattr(value, "value", value))
        values, remedy = _REFUSED_VALUES.get(name, ((), ""))
        if text in values:
            yield f"{kind}.{name} is {text}: {remedy}"


def _callbacks(trainer: Any) -> Iterator[str]:
    """Yield an error message for each callback on the Trainer for which nothing in a run stands."""
    for callback in trainer.callback_handler.callbacks:
        if not _reports(callback) and not _shows(callback) and not _stops(callback):
            kind = type(callback).__name__
            yield (
                f"the Trainer has the callback {kind}, which a federated task does not call: take it off by "
                f"trainer.remove_callback({kind}), and give callbacks=[raafl.Callback] to the federation"
            )


def _shows(callback: Any) -> bool:
    """Check whether a callback only steers a Trainer's own loop, or shows its progress, as a run's `progress` does."""
    named = (type(callback).__module__.partition(".")[0], type(callback).__name__)
    return named in _SHOWING or type(callback).__module__.startswith("transformers.utils.notebook")


def _reports(callback: Any) -> bool:
    """Check whether a callback only writes to a tracker such as W&B or TensorBoard, as a run's `logger` does."""
    from transformers import integrations

    known: Any = integrations
    return any(type(callback) is one for one in known.get_reporting_integration_callbacks("all")) or (
        type(callback) in getattr(known.integration_utils, "INTEGRATION_TO_CALLBACK", {}).values()
    )


def _stops(callback: Any) -> bool:
    from transformers import EarlyStoppingCallback

    return type(callback) is EarlyStoppingCallback


def stopping_of(trainer: Any) -> list[dict[str, Any]]:
    """Return the arguments of `raafl.EarlyStopping` that stands for each EarlyStoppingCallback of a Trainer."""
    metric = str(trainer.args.metric_for_best_model or "loss").removeprefix("eval_")
    greater = trainer.args.greater_is_better
    mode = None if greater is None else "max" if greater else "min"
    return [
        {
            "metric": metric,
            "patience": callback.early_stopping_patience,
            "mode": mode,
            "min_delta": callback.early_stopping_threshold or 0.0,
        }
        for callback in trainer.callback_handler.callbacks
        if _stops(callback)
    ]


def fabric_of(args: Any) -> dict[str, Any]:
    """Return the options of local steps (`FabricOptions`) that a Trainer's arguments set."""
    return {
        "accelerator": "cpu" if args.device.type == "cpu" else args.device.type,
        "precision": "bf16-mixed" if args.bf16 else "16-mixed" if args.fp16 else "32-true",
        "gradient_clip_val": float(args.max_grad_norm) if args.max_grad_norm else None,
        "accumulate_grad_batches": int(args.gradient_accumulation_steps),
        "deterministic": bool(args.full_determinism),
        "tf32": args.tf32,
    }


def argument_of(option: str) -> str:
    """Return the names of the Trainer's arguments that set an option of `FabricOptions`, such as max_grad_norm."""
    return ", ".join(name for name, field in FIELDS.items() if field.text.startswith(f"`fabric.{option}`"))


def table() -> str:
    """Return the table of all fields for the docs, in Markdown."""
    words = {"taken": "taken", "instead": "set it in raafl", "refused": "refused"}
    rows: dict[tuple[str, str], list[str]] = {}
    for name, field in FIELDS.items():
        rows.setdefault((field.use, field.text), []).append(f"`{name}`")
    lines = ["| fields of `TrainingArguments` | in a run | how |", "| --- | --- | --- |"]
    return "\n".join(lines + [f"| {', '.join(names)} | {words[use]} | {text} |" for (use, text), names in rows.items()])
