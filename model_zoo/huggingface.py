"""Any model of the transformers library as a LightningModule: sentence and image classifiers, language models."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from model_zoo import hub
from model_zoo.adamw import Optimizer, adamw
from model_zoo.classifier import Classifier
from model_zoo.language import Batch, LanguageModel
from model_zoo.lora import LoRA, adapt, base_of, hold, merged, save_adapter
from model_zoo.metrics import IGNORED


class _Wrapped:
    """Holds a transformers model in ``self.model``; goes before a LightningModule among the bases."""

    model: Any
    hparams: Any
    lora: LoRA | None = None
    submodel_bases: tuple[str, ...] = ()

    def _wrap(self, model: Any, lr: float, weight_decay: float, warmup_steps: int, optimizer: Optimizer) -> None:
        self.model, self.optimizer = model, optimizer
        self.lr, self.weight_decay, self.warmup_steps = lr, weight_decay, warmup_steps

    def _adapt(self, lora: LoRA | None, *, trains_head: bool) -> None:
        """Freeze the model and add adapters, if `lora` is set."""
        self.lora = LoRA.of(lora)
        if self.lora is not None:
            adapt(self.model, self.lora, trains_head=trains_head)
            self.submodel_bases = self.lora.bases if len(self.lora.bases) > 1 else ()

    def submodel_hold(self, base: str) -> None:
        """Convert the frozen parameters, in place, to the precision ``base``, one of those in ``submodel_bases``."""
        hold(self.model, base)

    def _checkpoint(self, wanted: bool) -> None:
        """Turn on gradient checkpointing if it is set: the backward pass runs blocks again from their stored inputs.

        Raises:
            ValueError: this architecture cannot.
        """
        if not wanted:
            return
        if not self.model.supports_gradient_checkpointing:
            raise ValueError(
                f"gradient_checkpointing is true, which this {self.model.config.model_type} cannot: leave it out"
            )
        enable = (
            getattr(self.model, "activation_checkpointing_enable", None) or self.model.gradient_checkpointing_enable
        )
        enable({"use_reentrant": False})  # the first argument under the new name and the old
        if hasattr(self.model.config, "use_cache"):
            self.model.config.use_cache = False  # else it says that it does without

    def _stand_alone(self) -> None:
        """Store the model's shape in place of its name, so that a checkpoint loads without the files that the model came from."""
        shape = {"model_type": self.model.config.model_type, **self.model.config.to_diff_dict()}
        for name in ("transformers_version", "dtype", "architectures", "_name_or_path"):
            shape.pop(name, None)
        lora = None if self.lora is None else self.lora.to_plain()
        self.hparams.update(name_or_path=None, pretrained=False, architecture=shape, lora=lora)

    def configure_optimizers(self) -> Any:
        """Return AdamW or Adan for the trained parameters, with a warm-up."""
        return adamw(self, self.lr, self.weight_decay, self.warmup_steps, self.optimizer)  # type: ignore[arg-type]

    def save_pretrained(self, folder: str | Path) -> None:
        """Save the model and its generation config so that transformers' ``from_pretrained(folder)`` loads it.

        LoRA adapters are added to the weights. They are also saved alone in ``folder/adapter``, for peft, unless the
        base weights have changed, too.
        """
        hub.save(self.model if self.lora is None else merged(self.model), folder)
        # else they belong to a base that nobody has
        if self.lora is not None and not getattr(self, "submodel_sent", ()):
            save_adapter(self.model, Path(folder) / "adapter")


class HFClassifier(_Wrapped, Classifier):
    """Base class of transformers models with a classification head, trained with AdamW on the cross-entropy."""

    def __init__(
        self, model: Any, lr: float, weight_decay: float, warmup_steps: int, optimizer: Optimizer = "adamw"
    ) -> None:
        """Hold the model."""
        Classifier.__init__(self, lr)
        self._wrap(model, lr, weight_decay, warmup_steps, optimizer)


class HFSequenceClassifier(HFClassifier):
    """Any transformers model that classifies texts (BERT, RoBERTa, DistilBERT, LLaMA, ...).

    Input: tokens and attention mask, both (batch, length) int64. Output: logits (batch, num_classes). All parameters
    train, unless their ``requires_grad`` is False; with ``lora``, only the adapters and the head train.
    """

    def __init__(
        self,
        name_or_path: str | None = None,
        num_classes: int = 2,
        pretrained: bool = True,
        architecture: dict[str, Any] | None = None,
        lr: float = 5e-5,
        weight_decay: float = 0.01,
        warmup_steps: int = 0,
        lora: LoRA | None = None,
        optimizer: Optimizer = "adamw",
        gradient_checkpointing: bool = False,
    ) -> None:
        """Load or build the model.

        Args:
            name_or_path: name on the hub, folder, or ``package:NAME/FOLDER`` for a folder of an installed Python
                package, or ``made:llama`` for a tiny LLaMA made on the spot; null = ``architecture`` says all, and weights are
                random.
            num_classes: number of logits.
            pretrained: start from the weights found there, with a new head; false = random weights of that shape.
            architecture: fields of the model's config to set, such as ``{hidden_dropout_prob: 0.0}``.
            lr: learning rate of AdamW.
            weight_decay: of matrices.
            warmup_steps: steps of each task over which the learning rate rises.
            lora: train adapters beside the frozen model, and the head; null = train the model itself.
            optimizer: adamw, or adan (Xie et al. 2022).
            gradient_checkpointing: compute blocks again in the backward pass instead of keeping what is in them: less memory,
                a third more time.

        Raises:
            FileNotFoundError: there is no such model, it cannot be fetched, or it has no layers that ``lora`` names.
        """
        fields = {**(architecture or {}), "num_labels": num_classes}
        model = hub.make("SequenceClassification", name_or_path, pretrained, fields, base_of(lora))
        if model.config.pad_token_id is None:  # decoders look for the last token that is not padding
            model.config.pad_token_id = _first(model.config.eos_token_id)
        super().__init__(model, lr, weight_decay, warmup_steps, optimizer)
        self._adapt(lora, trains_head=True)
        self._checkpoint(gradient_checkpointing)
        self.save_hyperparameters()
        self._stand_alone()

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Return the logits of a batch."""
        logits: Tensor = self.model(input_ids=input_ids, attention_mask=attention_mask).logits
        return logits


class HFImageClassifier(HFClassifier):
    """Any transformers model that classifies images (ViT, DeiT, ResNet, ConvNeXt, ...).

    Input: images (batch, channels, height, width). Output: logits (batch, num_classes).
    """

    def __init__(
        self,
        name_or_path: str | None = None,
        num_classes: int = 10,
        pretrained: bool = True,
        architecture: dict[str, Any] | None = None,
        lr: float = 1e-4,
        weight_decay: float = 0.05,
        warmup_steps: int = 0,
        lora: LoRA | None = None,
        optimizer: Optimizer = "adamw",
        gradient_checkpointing: bool = False,
    ) -> None:
        """Load or build the model; arguments and errors as for `HFSequenceClassifier`."""
        fields = {**(architecture or {}), "num_labels": num_classes}
        model = hub.make("ImageClassification", name_or_path, pretrained, fields, base_of(lora))
        super().__init__(model, lr, weight_decay, warmup_steps, optimizer)
        self._adapt(lora, trains_head=True)
        self._checkpoint(gradient_checkpointing)
        self.save_hyperparameters()
        self._stand_alone()

    def forward(self, pixel_values: Tensor) -> Tensor:
        """Return the logits of a batch."""
        logits: Tensor = self.model(pixel_values=pixel_values).logits
        return logits


class HFLanguageModel(_Wrapped, LanguageModel):
    """Base class of transformers models with a language head, trained with AdamW on the next-token loss."""

    def __init__(
        self, model: Any, lr: float, weight_decay: float, warmup_steps: int, optimizer: Optimizer = "adamw"
    ) -> None:
        """Hold the model."""
        LanguageModel.__init__(self, lr)
        self._wrap(model, lr, weight_decay, warmup_steps, optimizer)

    def _logits_and_targets(self, batch: Batch) -> tuple[Tensor, Tensor]:
        if not isinstance(batch, Mapping):
            return super()._logits_and_targets(batch)
        inputs = dict(batch)
        # what each position predicts is the label after it
        targets = F.pad(inputs.pop("labels"), (-1, 1), value=IGNORED)
        return self(**inputs), targets


class _PretrainedLM(HFLanguageModel):
    """A language model of transformers from its name or shape.

    Attributes:
        task: what follows ``AutoModelFor``.
        writes: whether evaluation lets the model write its answers.
    """

    task: ClassVar[str]

    def __init__(
        self,
        name_or_path: str | None = None,
        pretrained: bool = True,
        architecture: dict[str, Any] | None = None,
        lr: float = 5e-5,
        weight_decay: float = 0.01,
        warmup_steps: int = 0,
        lora: LoRA | None = None,
        optimizer: Optimizer = "adamw",
        gradient_checkpointing: bool = False,
        generate: bool = False,
        generation: dict[str, Any] | None = None,
    ) -> None:
        """Load or build the model; arguments and errors as for `HFSequenceClassifier`; with ``lora``, the head is frozen, too.

        With ``generate`` what counts as ``exact_match`` is what the model writes with its own generation settings (beams, sampling,
        penalties), at most as long as the longest answer of a batch; else what greedy decoding would write, which the pass for
        the loss tells. ``generation`` sets some of them, such as ``{num_beams: 4}``; they are saved with the model.
        """
        model = hub.make(self.task, name_or_path, pretrained, architecture or {}, base_of(lora))
        super().__init__(model, lr, weight_decay, warmup_steps, optimizer)
        self._adapt(lora, trains_head=False)
        self._checkpoint(gradient_checkpointing)
        self.writes = generate
        settings = self.model.generation_config
        known = type(settings)().to_dict()
        if generation:
            if unknown := settings.update(**generation):
                raise ValueError(f"generation has {', '.join(unknown)}, which no generation config has: leave it out")
            settings.validate(strict=True)  # now, and not when the trained model is to be saved
        self.save_hyperparameters()
        self._stand_alone()
        own = {name for name in known if name[0] != "_" and name != "transformers_version"}
        self.hparams["generation"] = {name: value for name, value in settings.to_diff_dict().items() if name in own}

    def _predicted(self, batch: Mapping[str, Tensor], logits: Tensor, targets: Tensor) -> Tensor:
        counted = targets != IGNORED
        if not self.writes or not counted.any():
            return super()._predicted(batch, logits, targets)
        begins = (counted & ~F.pad(counted, (1, -1))).nonzero().tolist()
        predicted = torch.full_like(targets, IGNORED)
        for (row, start), answer in zip(begins, self._written(batch, begins, int(counted.sum(1).max())), strict=True):
            predicted[row, start : start + len(answer)] = answer[: targets.shape[1] - start]
        return predicted

    def _written(self, batch: Mapping[str, Tensor], begins: list[list[int]], num_tokens: int) -> Tensor:
        """Write answers with the model's own settings, drawing the same each time.

        Args:
            batch: with what is asked.
            begins: row and position at which each answer begins.
            num_tokens: the longest that one may be.

        Returns:
            (number of answers, at most num_tokens) tokens.
        """
        raise NotImplementedError

    def _generate(self, num_tokens: int, **inputs: Tensor) -> Tensor:
        settings = copy.deepcopy(self.model.generation_config)
        settings.max_length, settings.max_new_tokens, settings.use_cache = None, num_tokens, True
        if settings.pad_token_id is None:
            settings.pad_token_id = _first(settings.eos_token_id)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            written: Tensor = self.model.generate(**inputs, generation_config=settings)
        return written


class HFCausalLM(_PretrainedLM):
    """Any causal language model of transformers (LLaMA, Mistral, Qwen2, GPT-2, ...), trained with AdamW.

    Input: tokens (batch, length) int64, padded at the end; no mask is needed, since no position sees later ones.
    Output: logits (batch, length, vocab_size). Batches are ``(tokens, targets)``, or mappings as
    `raafl.data.FineTuning` and the collators of transformers make them: ``input_ids``, ``labels`` (the tokens
    themselves; -100 = does not count), and, if a row has several texts, ``position_ids`` that restart at each text.
    """

    task = "CausalLM"

    def forward(self, input_ids: Tensor, **more: Tensor) -> Tensor:
        """Return the logits of the next token at each position.

        Args:
            input_ids: tokens, (batch, length).
            more: further inputs of the transformers model.
        """
        logits: Tensor = self.model(input_ids=input_ids, use_cache=False, **more).logits
        return logits

    def _written(self, batch: Mapping[str, Tensor], begins: list[list[int]], num_tokens: int) -> Tensor:
        # what comes before an answer, padded in front, where generation wants it
        asked = [batch["input_ids"][row, : start + 1] for row, start in begins]
        length = max(map(len, asked))
        tokens = torch.stack([F.pad(one, (length - len(one), 0)) for one in asked])
        mask = torch.stack([F.pad(torch.ones_like(one), (length - len(one), 0)) for one in asked])
        return self._generate(num_tokens, input_ids=tokens, attention_mask=mask)[:, length:]


class HFSeq2SeqLM(_PretrainedLM):
    """Any encoder-decoder of transformers (T5, BART, Marian, Pegasus, ...), trained with AdamW.

    Batches are mappings as `raafl.data.FineTuning` with ``task: seq2seq`` and the collators of transformers make them:
    ``input_ids`` and ``attention_mask`` (batch, length) for the encoder, and ``labels`` (batch, length of answers; -100
    = does not count). Output: logits (batch, length of answers, vocab_size).
    """

    task = "Seq2SeqLM"

    def forward(self, input_ids: Tensor, labels: Tensor, **more: Tensor) -> Tensor:
        """Return the logits of each token in ``labels``, given the tokens before it.

        Args:
            input_ids: tokens of the source text, (batch, source length).
            labels: tokens of the target text, (batch, target length).
            more: further inputs of the model, such as ``attention_mask``.
        """
        shift = getattr(self.model, "prepare_decoder_input_ids_from_labels", None)
        # a model without it shifts labels itself, and makes a loss of them that nobody asks for
        given = {"labels": labels} if shift is None else {"decoder_input_ids": shift(labels=labels)}
        logits: Tensor = self.model(input_ids=input_ids, use_cache=False, **given, **more).logits
        return logits

    def _logits_and_targets(self, batch: Batch) -> tuple[Tensor, Tensor]:
        table = cast("Mapping[str, Tensor]", batch)
        return self(**table), table["labels"]

    def _written(self, batch: Mapping[str, Tensor], begins: list[list[int]], num_tokens: int) -> Tensor:
        rows = [row for row, _ in begins]
        inputs = {name: value[rows] for name, value in batch.items() if name != "labels"}
        return self._generate(num_tokens, **inputs)[:, 1:]  # without the token that decoding starts from


def _first(token: Any) -> int:
    """Return the first token id in a config's value: a number, a list of numbers, or None."""
    found = token[0] if isinstance(token, list) else token
    return 0 if found is None else int(found)
