import json

import pytest

from rlhf_stages.files import write_json, write_text


def test_text_files_are_written_in_one_piece(tmp_path, monkeypatch):
    write_text(tmp_path / "latest", ["old"])
    monkeypatch.setattr("os.fsync", lambda descriptor: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        write_text(tmp_path / "latest", ["new"])
    assert (tmp_path / "latest").read_text() == "old"


def test_json_keeps_paths_and_letters(tmp_path):
    write_json(tmp_path / "a.json", {"path": tmp_path, "text": "naïve 答案"})
    assert json.loads((tmp_path / "a.json").read_text(encoding="utf-8")) == {
        "path": str(tmp_path),
        "text": "naïve 答案",
    }
    assert "答案" in (tmp_path / "a.json").read_text(encoding="utf-8")
