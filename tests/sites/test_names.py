"""Names of holders in certificates."""

from __future__ import annotations

import pytest

from raafl.errors import BadInput
from raafl.sites.certificates import Holder, check_name, holder_of


@pytest.mark.parametrize(
    ("uris", "holder"),
    [
        (["raafl://fed/site/north"], Holder("fed", "north")),
        (["https://x.example/", "raafl://fed/server"], Holder("fed")),
        ([], None),
        (["raafl://fed/site/"], None),
        (["raafl://fed/site/a/b"], None),
        (["raafl://fed/site/a\n"], None),
        (["RAAFL://fed/site/a"], None),
        (["raafl://fed/site/a", "raafl://fed/site/b"], None),  # which of the two?
    ],
)
def test_the_holder_is_in_the_uri(uris, holder):
    assert holder_of(uris) == holder
    if holder is not None:
        assert holder.uri in uris


@pytest.mark.parametrize("name", ["", "a b", "../x", "-a", "a" * 64, "server", "ca", "a\n", "ä"])
def test_names_that_a_certificate_or_a_file_cannot_carry(name):
    with pytest.raises(BadInput, match="site is "):
        check_name("site", name)
