"""Data sets in files: what is missing or damaged is said with the file and the line, and the hub is not asked."""

import json

import pytest

from raafl.data import HuggingFaceText
from raafl.data.readers import load_splits
from raafl.errors import BadInput

GOOD = '{"text": "a", "label": 0}\n'


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.mark.parametrize(
    ("path", "what"),
    [
        ("texts.jsonl", "file 'texts.jsonl' in /"),
        ("sub/texts.csv", "file 'sub/texts.csv' in /"),
        ("/nowhere/texts.parquet", "file '/nowhere/texts.parquet': correct"),
        ("./texts", "folder './texts' in /"),
    ],
)
def test_a_path_that_is_missing_is_no_name_on_the_hub(monkeypatch, path, what):
    import datasets

    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: pytest.fail("the hub was asked"))
    with pytest.raises(BadInput) as missing:
        load_splits(path, None)
    assert str(missing.value).startswith(f"there is no {what}") and "correct the path of the data set" in str(
        missing.value
    )


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (2 * GOOD + '{"text": "b", \n' + GOOD, "line 3 is not JSON: Expecting property name"),
        (GOOD + "not json\n", "line 2 is not JSON: Expecting value"),
        (GOOD + "[1, 2]\n", "line 2 is not a JSON object: give one sample on each line"),
        ("", "it is empty: give one sample on each line"),
    ],
)
def test_a_damaged_file_of_json_lines_is_said_with_its_line(tmp_path, text, fault):
    path = tmp_path / "texts.jsonl"
    path.write_text(text)
    with pytest.raises(BadInput) as damaged:
        load_splits(str(path), None)
    assert str(damaged.value).startswith(f"cannot load the data set '{path}': {fault}")


@pytest.mark.parametrize("ending", ["jsonl", "csv"])
def test_a_byte_order_mark_is_no_part_of_a_name(tmp_path, ending):
    path = tmp_path / f"texts.{ending}"
    text = GOOD if ending == "jsonl" else "text,label\na,0\n"
    path.write_text(text, encoding="utf-8-sig")
    rows = load_splits(str(path), None)["train"]
    assert rows.column_names == ["text", "label"] and rows[0] == json.loads(GOOD)


def with_labels(tmp_path, labels):
    path = tmp_path / "labels.jsonl"
    path.write_text("".join(json.dumps({"text": "a", "label": label}) + "\n" for label in labels))
    return HuggingFaceText(str(path), "words", test_split="train", max_length=2)


@pytest.mark.parametrize(
    ("labels", "what"),
    [([0, 2.7], "row 1 of column 'label' \\(float\\)"), ([0, None], "row 1"), (["bad", "good"], "row 0 .* \\(str\\)")],
)
def test_labels_are_not_rounded_to_classes(tmp_path, monkeypatch, labels, what):
    monkeypatch.setenv("RAAFL_DATA", str(tmp_path / "data"))
    with pytest.raises(BadInput, match=f"has no whole number in {what}.*give each sample a class from 0"):
        with_labels(tmp_path, labels).setup()


@pytest.mark.parametrize("labels", [[1.0, 0.0, 1.0], ["1", "0", "1"], [True, False, True], [1, 0, 1]])
def test_whole_numbers_of_any_type_are_classes(tmp_path, monkeypatch, labels):
    monkeypatch.setenv("RAAFL_DATA", str(tmp_path / "data"))
    data = with_labels(tmp_path, labels)
    data.setup()
    assert data.train.labels.tolist() == [1, 0, 1]
