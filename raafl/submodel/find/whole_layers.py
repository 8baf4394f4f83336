"""Name layers of known model families that stay whole although a trace finds their axes, so that runs of 0.1.0 replay."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from raafl.submodel.packages import TORCHVISION, hugging_face, type_names

WHOLE_LAYERS: dict[str, tuple[str, bool]] = {
    **dict.fromkeys(
        hugging_face("bert.BertPooler roberta.RobertaPooler vit.ViTPooler deit.DeiTPooler"), ("dense", True)
    ),
    **dict.fromkeys(hugging_face("roberta.RobertaClassificationHead"), ("dense", True)),
    **dict.fromkeys(hugging_face("distilbert.DistilBertForSequenceClassification"), ("pre_classifier", True)),
    **dict.fromkeys(hugging_face("distilbert.DistilBertForMultipleChoice"), ("pre_classifier", True)),
    **dict.fromkeys(hugging_face("albert.AlbertModel"), ("pooler", True)),
    **dict.fromkeys(hugging_face("albert.AlbertEmbeddings"), ("word_embeddings", False)),
    TORCHVISION: ("heads.pre_logits", False),
}
"""Types, and a layer in each that stays whole.

Whether the features that it makes are hidden states as those that it reads are, and go with the residual width; else they
stay whole.
"""


def whole_layers(module: nn.Module) -> Iterator[tuple[str, bool]]:
    """Yield the path of each layer that is never narrowed, and whether its width is that of the residual stream."""
    for path, part in module.named_modules():
        for base in type_names(part):
            if base in WHOLE_LAYERS:
                layer, is_wide = WHOLE_LAYERS[base]
                yield f"{path}.{layer}".removeprefix("."), is_wide
