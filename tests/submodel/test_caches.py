"""Results are computed once for each kind and key, and the oldest of a kind goes first."""

from __future__ import annotations

from raafl.submodel.submodels import MAX_CACHED, Caches


def test_a_result_is_computed_once_for_its_kind_and_key():
    caches, made = Caches(), []

    def make(value):
        made.append(value)
        return value

    assert caches.get("a", 1, lambda: make("x")) == "x" and caches.get("a", 1, lambda: make("y")) == "x"
    assert caches.get("b", 1, lambda: make(None)) is None and caches.get("b", 1, lambda: make("z")) is None
    assert made == ["x", None], "None is a result, too"
    caches.clear()
    assert caches.get("a", 1, lambda: make("w")) == "w"


def test_the_oldest_of_a_kind_is_forgotten_beyond_the_limit():
    caches = Caches()
    for key in range(MAX_CACHED + 1):
        caches.get("a", key, lambda key=key: key)
    assert caches.get("a", 1, lambda: "new") == 1 and caches.get("a", 0, lambda: "new") == "new"
