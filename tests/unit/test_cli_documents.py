"""JSON that a user gives."""

import io
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from cli.documents import read_document, read_json, read_value
from cli.errors import UsageError


def test_a_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_bytes(b'\xef\xbb\xbf{"a": "\xc3\xbc"}')
    assert read_document(str(path), "the spec") == {"a": "ü"}


def test_a_dash_reads_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(b"[1]")))
    assert read_document("-", "the spec") == [1]


def test_what_is_no_file_is_read_as_json_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "7").write_text('"from the file"')
    assert read_value('{"id": "m-1"}', "--output") == {"id": "m-1"}
    assert read_value("null", "--output") is None
    assert read_value("7", "--output") == "from the file"
    assert read_value("[" + "1," * 5000 + "1]", "--output") == [1] * 5001
    assert read_value('"\\u0000"', "--output") == "\0"


@pytest.mark.parametrize(
    "text",
    ["", "{", "{'a': 1}", "NaN", '{"a": Infinity}', "[-Infinity]", "[" * 100_000, '{"a": 1} x'],
    ids=["empty", "cut off", "Python", "NaN", "Infinity", "minus Infinity", "bottomless", "more after it"],
)
def test_what_is_not_json_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"^--output: "):
        read_json(text, "--output")


def test_what_cannot_be_read_says_why(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        read_document(str(tmp_path / "nope.json"), "the spec")
    with pytest.raises(UsageError, match="Is a directory"):
        read_document(str(tmp_path), "the spec")
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="not UTF-8"):
        read_document(str(binary), "the spec")
    with pytest.raises(UsageError, match=r"there is no file 'result\.json'"):
        read_value("result.json", "--output")
