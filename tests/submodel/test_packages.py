"""Types of other packages are known by their names, without the packages."""

from __future__ import annotations

from torch import nn

from raafl.submodel.cut.sizes import TORCHVISION, hugging_face, is_packaged, type_names


def test_names_of_types_of_transformers():
    assert hugging_face("bert.BertPooler vit.ViTPooler") == [
        "transformers.models.bert.modeling_bert.BertPooler",
        "transformers.models.vit.modeling_vit.ViTPooler",
    ]


def test_a_module_has_the_names_of_its_type_and_its_bases_nearest_first():
    names = type_names(nn.Linear(1, 1))
    assert names[:2] == ["torch.nn.modules.linear.Linear", "torch.nn.modules.module.Module"]


def test_a_type_of_a_package_s_name_is_packaged_and_its_parts_are_not():
    module, _, name = TORCHVISION.rpartition(".")
    stand_in = type(name, (nn.Module,), {"__module__": module, "__qualname__": name})
    assert is_packaged(stand_in()) and is_packaged(type("Mine", (stand_in,), {})())
    assert not is_packaged(nn.Linear(1, 1))
