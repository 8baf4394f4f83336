"""Make Trainers of transformers and TRL for models of two layers and invented words."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import torch

WORDS = ("the", "cat", "dog", "sat", "on", "mat", "a", "red", "blue", "one", "two", "three", "ran", "away", "home")


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: i for i, word in enumerate(["<pad>", "<s>", "</s>", "<unk>", *WORDS])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=words, **special)


def text(draws: random.Random, length: int) -> str:
    return " ".join(draws.choice(WORDS) for _ in range(length))


def llama(kind: str = "LlamaForCausalLM", **fields: Any) -> Any:
    import transformers

    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=19, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2, **fields,
    )  # fmt: skip
    return getattr(transformers, kind)(config)


def arguments(folder: Path, **changes: Any) -> dict[str, Any]:
    """Return arguments with everything that changes a step: accumulation, clipping, a warm-up and a schedule."""
    steps = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_grad_norm": 0.5}
    rates = {"learning_rate": 1e-2, "warmup_steps": 1, "lr_scheduler_type": "linear"}
    order = {"train_sampling_strategy": "sequential", "num_train_epochs": 1}
    quiet = {"use_cpu": True, "report_to": "none", "save_strategy": "no", "disable_tqdm": True, "logging_steps": 1}
    return {"output_dir": str(folder), **steps, **rates, **order, **quiet, **changes}


def texts(num: int) -> Any:
    from datasets import Dataset

    draws = random.Random(0)
    return Dataset.from_list([{"text": text(draws, draws.randint(3, 9))} for _ in range(num)])


def preferences(num: int) -> Any:
    from datasets import Dataset

    draws = random.Random(0)
    return Dataset.from_list(
        [
            {"prompt": text(draws, 3) + " ", "chosen": text(draws, 4), "rejected": text(draws, draws.randint(2, 5))}
            for _ in range(num)
        ]
    )


def sft(folder: Path, num: int = 8, peft_config: Any = None, **changes: Any) -> Any:
    from trl import SFTConfig, SFTTrainer

    args = SFTConfig(**arguments(folder, **{"bf16": False, **changes}))
    return SFTTrainer(llama(), args, train_dataset=texts(num), processing_class=tokenizer(), peft_config=peft_config)


def dpo(folder: Path, num: int = 8, peft_config: Any = None, **changes: Any) -> Any:
    from trl import DPOConfig, DPOTrainer

    model, args = llama(), DPOConfig(**arguments(folder, **{"bf16": False, **changes}))
    reference = None if peft_config is not None else copy.deepcopy(model)
    given = {"train_dataset": preferences(num), "processing_class": tokenizer()}
    return DPOTrainer(model, reference, args, **given, peft_config=peft_config)


def reward(folder: Path, num: int = 8, **changes: Any) -> Any:
    from trl import RewardConfig, RewardTrainer

    model = llama("LlamaForSequenceClassification", num_labels=1)
    args = RewardConfig(**arguments(folder, **{"bf16": False, **changes}))
    return RewardTrainer(model, args, train_dataset=preferences(num), processing_class=tokenizer())


def kto(folder: Path, num: int = 8, **changes: Any) -> Any:
    from datasets import Dataset
    from trl import KTOConfig, KTOTrainer

    draws, model = random.Random(0), llama()
    rows = [{"prompt": text(draws, 3) + " ", "completion": text(draws, 4), "label": bool(i % 2)} for i in range(num)]
    args = KTOConfig(**arguments(folder, **{"bf16": False, **changes}))
    given = {"train_dataset": Dataset.from_list(rows), "processing_class": tokenizer()}
    return KTOTrainer(model, copy.deepcopy(model), args, **given)


def classifier(folder: Path, num: int = 8, base: Any = None, **changes: Any) -> Any:
    from datasets import Dataset
    from transformers import BertConfig, BertForSequenceClassification, DataCollatorWithPadding, Trainer
    from transformers import TrainingArguments as Arguments

    torch.manual_seed(1)
    model = BertForSequenceClassification(
        BertConfig(
            vocab_size=19, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
            max_position_embeddings=64, num_labels=2, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )
    )  # fmt: skip
    draws, words = random.Random(0), tokenizer()
    rows = [{**words(text(draws, draws.randint(3, 9))), "labels": draws.randint(0, 1)} for _ in range(num)]

    def accuracy(found: Any) -> dict[str, float]:
        return {"accuracy": float((found.predictions.argmax(-1) == found.label_ids).mean())}

    given = {"train_dataset": Dataset.from_list(rows), "eval_dataset": Dataset.from_list(rows[:5])}
    given |= {"data_collator": DataCollatorWithPadding(words), "processing_class": words, "compute_metrics": accuracy}
    return (base or Trainer)(model, Arguments(**arguments(folder, **changes)), **given)


def seq2seq(folder: Path, num: int = 8, **changes: Any) -> Any:
    from datasets import Dataset
    from transformers import DataCollatorForSeq2Seq, Seq2SeqTrainer, T5Config, T5ForConditionalGeneration
    from transformers import Seq2SeqTrainingArguments as Arguments

    torch.manual_seed(1)
    config = T5Config(vocab_size=19, d_model=16, d_kv=4, d_ff=32, num_layers=2, num_heads=4, dropout_rate=0.0)
    config.decoder_start_token_id, config.pad_token_id, config.eos_token_id = 0, 0, 2
    model, draws, words = T5ForConditionalGeneration(config), random.Random(0), tokenizer()
    rows = [{**words(text(draws, 5)), "labels": words(text(draws, 3))["input_ids"]} for _ in range(num)]

    def written(found: Any) -> dict[str, float]:
        return {"tokens": float((found.predictions != 0).sum()), "sum": float(found.predictions.sum())}

    args = Arguments(**arguments(folder, **{"predict_with_generate": True, "generation_max_length": 6, **changes}))
    given = {"train_dataset": Dataset.from_list(rows), "eval_dataset": Dataset.from_list(rows[:4])}
    given |= {"data_collator": DataCollatorForSeq2Seq(words, model=model), "processing_class": words}
    return Seq2SeqTrainer(model, args, **given, compute_metrics=written)


class Net(torch.nn.Module):
    """A module that is no model of transformers, with the loss in its forward as a Trainer wants it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.hidden, self.out = torch.nn.Linear(4, 16), torch.nn.Linear(16, 2)

    def forward(self, x: torch.Tensor, labels: Any = None) -> dict[str, torch.Tensor]:
        logits = self.out(torch.relu(self.hidden(x)))
        loss = {} if labels is None else {"loss": torch.nn.functional.cross_entropy(logits, labels)}
        return {**loss, "logits": logits}


def plain(folder: Path, num: int = 8, base: Any = None, **changes: Any) -> Any:
    from transformers import Trainer
    from transformers import TrainingArguments as Arguments

    draws = torch.Generator().manual_seed(0)
    rows = [{"x": torch.randn(4, generator=draws), "labels": i % 2} for i in range(num)]
    given = {"train_dataset": rows, "eval_dataset": rows[:4]}
    return (base or Trainer)(Net(), Arguments(**arguments(folder, **changes)), **given)
