"""Two processes agree on the protocol, config, model and frozen base, in this order, or the first difference is named."""

from __future__ import annotations

from dataclasses import replace

import pytest

from raafl.runtime.identity import Difference, Identity, agree

OURS = Identity("m1", "b1", {"data": "d1", "train": "t1"}, "0.1.0", 1)


def test_equal_identities_agree_also_after_a_message():
    assert agree(OURS, OURS) is None and agree(OURS, Identity.from_meta(OURS.to_meta())) is None


@pytest.mark.parametrize(
    ("theirs", "difference"),
    [
        (replace(OURS, protocol=7, model="m2"), Difference("protocol", "1", "7")),
        (replace(OURS, protocol=None), Difference("protocol", "1", "None")),
        (replace(OURS, config={"data": "d1", "train": "t2"}, model="m2"), Difference("config.train", "t1", "t2")),
        (replace(OURS, config=None), Difference("config", "d1", "None")),
        (replace(OURS, model="m2", base="b2"), Difference("model", "m1", "m2")),
        (replace(OURS, base=None), Difference("base", "b1", "None")),
    ],
)
def test_the_first_difference_is_named(theirs, difference):
    assert agree(OURS, theirs) == difference


def test_another_version_of_the_package_matters_only_between_processes_of_one_run():
    later = replace(OURS, raafl="0.2.0")
    assert agree(OURS, later) is None
    assert agree(OURS, later, same_package=True) == Difference("raafl", "0.1.0", "0.2.0")


def test_a_peer_may_train_on_data_of_its_own():
    assert agree(OURS, replace(OURS, config={"data": "own", "train": "t1"})) is None
    assert agree(OURS, replace(OURS, config={"data": "d1", "train": "own"})) == Difference("config.train", "t1", "own")


def test_a_peer_s_words_are_shortened_and_cleaned():
    different = agree(OURS, replace(OURS, model="x" * 100 + "\x1b[31m"))
    assert different is not None and len(different.theirs) <= 64 and "\x1b" not in different.theirs
