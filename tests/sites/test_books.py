"""What a site has used survives its processes, is shared by them, and is never taken for less than it is."""

from __future__ import annotations

import json
import math
import multiprocessing as mp
from datetime import date

import pytest

from raafl.errors import BadInput
from raafl.sites.policy import BudgetSpent, SiteBooks, SitePrivacy, spent

DAY, NEXT = date(2026, 11, 26), date(2026, 11, 27)


def test_a_days_bytes_add_up_over_restarts_and_the_next_day_begins_at_zero(tmp_path):
    SiteBooks(str(tmp_path / "new" / "site")).add_bytes(1000, DAY)
    books = SiteBooks(str(tmp_path / "new" / "site"))
    books.add_bytes(234, DAY)
    assert (books.used().bytes_on(DAY), books.used().bytes_on(NEXT)) == (1234, 0)
    books.add_bytes(5, NEXT)
    assert (books.used().bytes_on(DAY), books.used().bytes_on(NEXT)) == (0, 5)


def _add(folder):
    for _ in range(50):
        SiteBooks(folder).add_bytes(1, DAY)


def test_two_clients_of_a_site_share_its_books(tmp_path):
    writers = [mp.get_context("fork").Process(target=_add, args=(str(tmp_path),)) for _ in range(2)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(30)
    assert SiteBooks(str(tmp_path)).used().bytes_on(DAY) == 100


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"bytes": "0"}', '{"other": 1}', '{"day": "2026-11-26", "bytes": null}']
)
def test_books_that_cannot_be_read_are_no_empty_books(tmp_path, text):
    (tmp_path / "books.json").write_text(text)
    with pytest.raises(BadInput, match=r"whose books.json cannot be read .*: restore it from a copy"):
        SiteBooks(str(tmp_path))


def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match=r"policy.state is '.*', in which no file can be written"):
        SiteBooks(str(tmp_path / "file" / "site"))


def test_releases_are_accounted_over_restarts_until_the_budget_is_spent(tmp_path):
    """Each costs 1 / sigma^2; the first two are within the budget of two and a half."""
    pytest.importorskip("dp_accounting", reason="needs the extra privacy")
    privacy = SitePrivacy(1.0, 4.0, 1e-5, max_epsilon=(spent(2 / 16, 1e-5) + spent(3 / 16, 1e-5)) / 2)
    for number in (1, 2):
        books = SiteBooks(str(tmp_path))
        books.check_budget(privacy)
        assert books.release(privacy, {"assignment": number}) == spent(number / 16, 1e-5)
    books = SiteBooks(str(tmp_path))
    with pytest.raises(BudgetSpent, match="another update would raise epsilon to"):
        books.release(privacy, {"assignment": 3})
    with pytest.raises(BudgetSpent, match="the privacy budget is used up"):
        books.check_budget(privacy)
    books.check_budget(SitePrivacy(1.0, 4.0))  # without a limit it goes on
    ledger = [json.loads(line) for line in (tmp_path / "ledger.jsonl").read_text().splitlines()]
    assert [(row["assignment"], row["epsilon"], row["noise_multiplier"]) for row in ledger] == [
        (1, spent(1 / 16, 1e-5), 4.0),
        (2, spent(2 / 16, 1e-5), 4.0),
    ]
    assert books.used().releases == 2


def test_a_release_without_noise_leaves_no_finite_epsilon(tmp_path):
    books = SiteBooks(str(tmp_path))
    assert books.release(SitePrivacy(1.0, 0.0), {}) is None
    assert math.isinf(SiteBooks(str(tmp_path)).used().inverse_squares)
    with pytest.raises(BudgetSpent, match="raise epsilon to inf"):
        books.release(SitePrivacy(1.0, 4.0, max_epsilon=100.0), {})
