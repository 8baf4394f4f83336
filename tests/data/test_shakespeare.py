import pytest
import torch

from raafl.data import ByColumn, FederatedData, Shakespeare
from raafl.data.text import speeches_of
from raafl.errors import BadInput
from tests.data.modules import set_up

TEXT = "Amy:\nabcdef\n\nBob:\nab\n\nAmy:\nghi\nAll: jk\n\nBob:\ncd\n\nCat:\nx\n"


def write(tmp_path, text=TEXT):
    (tmp_path / "shakespeare").mkdir()
    (tmp_path / "shakespeare" / "input.txt").write_text(text)
    return tmp_path


def test_speeches_are_parted_by_blank_lines():
    assert speeches_of(TEXT) == {"Amy": ["abcdef", "ghi\nAll: jk"], "Bob": ["ab", "cd"], "Cat": ["x"]}


def test_each_speaker_keeps_the_last_windows_for_the_test(tmp_path):
    module = set_up(Shakespeare(write(tmp_path), length=3, min_speeches=2, test_share=0.4, download=False))
    # Amy says "abcdef\nghi\nAll: jk", 18 characters: 5 windows of 3 + 1, two held out. Bob's "ab\ncd" has 1 only. Cat: one speech.
    assert module.train.speaker == ["Amy"] * 3 and module.test.speaker == ["Amy"] * 2
    x, y = module.train.gather(torch.arange(3))
    spell = lambda rows: ["".join(module.characters[code] for code in row) for row in rows.tolist()]  # noqa: E731
    assert spell(x) == ["abc", "def", "\ngh"] and spell(y) == ["bcd", "ef\n", "ghi"]
    assert spell(module.test.gather(torch.arange(2))[1]) == ["\nAl", "l: "]


def test_missing_and_bad_input(tmp_path):
    with pytest.raises(BadInput, match=r"Shakespeare is not in .*input.txt \(download is off\): set root"):
        Shakespeare(tmp_path, download=False).prepare_data()
    with pytest.raises(BadInput, match="test_share is 1"):
        Shakespeare(test_share=1)
    with pytest.raises(BadInput, match="length is 0"):
        Shakespeare(length=0)
    with pytest.raises(BadInput, match="no speaker has 20 speeches and 2 windows of 80"):
        set_up(Shakespeare(write(tmp_path), download=False))


def test_a_download_is_whole_or_not_at_all(tmp_path, monkeypatch):
    import io
    import urllib.request

    def offline(address, timeout):
        raise OSError("no route to host")

    monkeypatch.setattr(urllib.request, "urlopen", offline)
    with pytest.raises(BadInput, match="the download failed: no route to host"):
        Shakespeare(tmp_path).prepare_data()
    assert not list(tmp_path.rglob("input*"))
    monkeypatch.setattr(urllib.request, "urlopen", lambda address, timeout: io.BytesIO(TEXT.encode()))
    assert len(set_up(Shakespeare(tmp_path, length=3, min_speeches=2)).train) == 4


def test_the_real_speakers_are_natural_clients(raafl_data):
    module = Shakespeare(raafl_data, download=False)
    data = FederatedData(module, ByColumn("speaker"), 98)
    assert len(module.characters) == module.vocab_size and len(set(module.test.speaker)) == 98
    for client in (1, 50, 98):
        assert len({module.train.speaker[row] for row in data.indices(client).tolist()}) == 1
    x, y = data.example_batch(2)
    assert x.shape == y.shape == (2, 80) and torch.equal(x[:, 1:], y[:, :-1])
