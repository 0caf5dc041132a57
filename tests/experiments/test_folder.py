"""A folder holds one run and one process; what it holds is never half-written."""

import json

import pytest

from experiments import folder
from experiments.folder import FolderError, claimed

RUN = {"seed": 1, "steps": 9, "keep": 3, "data_sha256": "ab", "fits": {"vocab_size": 256}}


def claim(path, run=RUN, free=("keep",), tokenizer=None):
    with claimed(path, run, free, tokenizer):
        pass


def test_a_run_is_noted_and_found_again(tmp_path):
    claim(tmp_path / "new" / "one")
    assert folder.read(tmp_path / "new" / "one") == RUN
    claim(tmp_path / "new" / "one", RUN | {"keep": 7})
    assert folder.read(tmp_path / "new" / "one") == RUN


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"seed": 2}, "holds another run: seed 1, not 2; choose another --out"),
        ({"seed": 2, "steps": 8}, "holds another run: seed 1, not 2, steps 9, not 8; choose"),
        ({"new": True}, "holds another run: new None, not True; choose"),
        ({"data_sha256": "cd", "fits": {"vocab_size": 9}}, "holds another run: other data; choose"),
    ],
)
def test_another_run_is_refused_by_what_differs(tmp_path, changes, says):
    claim(tmp_path)
    with pytest.raises(FolderError, match=says):
        claim(tmp_path, RUN | changes)


def test_a_second_process_is_refused(tmp_path):
    """The lock is the operating system's, to which two openings are as two processes."""
    with (
        claimed(tmp_path, RUN, (), None),
        pytest.raises(FolderError, match="another process is at work in"),
    ):
        claim(tmp_path)
    claim(tmp_path)


def test_what_went_wrong_inside_frees_the_folder(tmp_path):
    with pytest.raises(ZeroDivisionError), claimed(tmp_path, RUN, (), None):
        raise ZeroDivisionError
    claim(tmp_path)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b"12"])
def test_a_damaged_note_is_said(tmp_path, content):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(FolderError, match=r"config\.json"):
        claim(tmp_path)


def test_a_full_disk_leaves_no_half_note(tmp_path, monkeypatch):
    write_text = type(tmp_path).write_text

    def fail(path, text, **how):
        write_text(path, text[: len(text) // 2], **how)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(type(tmp_path), "write_text", fail)
    with pytest.raises(OSError, match="No space left"):
        claim(tmp_path)
    monkeypatch.undo()
    claim(tmp_path)
    assert folder.read(tmp_path) == RUN


def test_checkpoints_of_an_unknown_run_are_refused(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(FolderError, match=r"has checkpoints, but no config\.json"):
        claim(tmp_path)


def test_a_folder_below_a_file_cannot_be_written_to(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(FolderError, match="cannot be written to"):
        claim(tmp_path / "file" / "run")


def test_a_tokenizer_is_kept_with_the_run(tmp_path):
    path = tmp_path / "made.json"
    path.write_text(json.dumps({"text": "é"}), encoding="utf-8")
    claim(tmp_path / "run", tokenizer=path)
    path.write_text("something else")
    kept = (tmp_path / "run" / "tokenizer.json").read_text(encoding="utf-8")
    assert json.loads(kept) == {"text": "é"}
