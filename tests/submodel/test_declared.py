"""Stacks are found among what a model's lists hold, of which some places may be empty."""

from __future__ import annotations

import pytest
from torch import nn

from raafl.submodel.declared import Stack, find_stacks


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(3, 3)


@pytest.mark.parametrize("places", [[None, None], [None, None, None], [Block(), None], [None, Block(), Block()]])
def test_a_list_with_empty_places_is_no_stack(places):
    model = nn.ModuleDict({"blocks": nn.ModuleList([Block(), Block()]), "beside": nn.ModuleList(places)})
    assert find_stacks(model) == {"blocks": Stack("blocks", ("0", "1"))}
