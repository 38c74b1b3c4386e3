from __future__ import annotations

import gzip
import os
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "recipes"))

import prepare_text  # noqa: E402
from prepare_text import END_OF_DOCUMENT, main, prepare  # noqa: E402


@pytest.fixture
def texts(tmp_path) -> Path:
    folder = tmp_path / "texts"
    (folder / "b").mkdir(parents=True)
    (folder / "b" / "two.txt").write_bytes("zwölf".encode())
    (folder / "a.py").write_bytes(b"one\n")
    (folder / "c.bin").write_bytes(b"\xff\xfe\x00")
    (folder / "zero").write_bytes(b"a\0b")
    (folder / "empty.txt").write_bytes(b"")
    return folder


def dataset(prefix: Path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core.datasets.indexed_dataset import IndexedDataset
    return IndexedDataset(str(prefix))


def test_megatron_reads_back_every_byte(texts, tmp_path):
    prefix = tmp_path / "out" / "data.v1"  # the folder is made; a dot in the name is kept
    summary, was_there = prepare(prefix, texts)
    assert not was_there
    assert summary == prepare_text.Summary(documents=2, bytes=4 + 6, tokens=4 + 6 + 2, skipped=3)
    read = dataset(prefix)
    assert read.document_indices.tolist() == [0, 1, 2]
    assert read[0].tolist() == [*b"one\n", END_OF_DOCUMENT]
    assert read[1].tolist() == [*"zwölf".encode(), END_OF_DOCUMENT]
    assert {path.name for path in prefix.parent.iterdir()} == {"data.v1.bin", "data.v1.idx", "data.v1.json"}


def test_files_with_a_suffix_and_packed_files(texts, tmp_path):
    (texts / "page.1.gz").write_bytes(gzip.compress(b"packed"))
    (texts / "broken.1.gz").write_bytes(gzip.compress(b"packed")[:-4])
    summary, _ = prepare(tmp_path / "pages", texts, ".1.gz")
    assert (summary.documents, summary.bytes, summary.skipped) == (1, 6, 1)
    read = dataset(tmp_path / "pages")
    assert read[0].tolist() == [*b"packed", END_OF_DOCUMENT]
    summary, was_there = prepare(tmp_path / "pages", texts, ".py")  # other files of the same folder
    assert (summary.documents, summary.bytes, was_there) == (1, 4, False)
    with pytest.raises(SystemExit):
        main(["--output", str(tmp_path / "x"), "--suffix", ".py"])


def test_a_name_that_is_not_utf_8(texts, tmp_path):
    (texts / os.fsdecode(b"caf\xe9.txt")).write_bytes(b"caf")
    assert prepare(tmp_path / "data", texts)[0].documents == 3


def test_documents_come_in_one_order_whatever_the_file_system_says(texts, monkeypatch):
    expected = ["a.py", "c.bin", "empty.txt", "zero", "two.txt"]
    assert [path.name for path in prepare_text.text_folder(texts)] == expected
    walk = os.walk

    def reversed_walk(folder, onerror):
        for base, folders, files in walk(folder, onerror=onerror):
            files.reverse()
            yield base, folders, files

    monkeypatch.setattr(os, "walk", reversed_walk)
    assert [path.name for path in prepare_text.text_folder(texts)] == expected


def test_every_byte_is_its_own_token():
    tokens = prepare_text.tokenize(bytes(range(256)))
    assert tokens.dtype == np.uint16
    assert tokens.tolist() == list(range(257))


def test_an_unchanged_source_keeps_the_dataset(texts, tmp_path, capsys):
    prefix = tmp_path / "data"
    assert main(["--text", str(texts), "--output", str(prefix)]) == 0
    assert capsys.readouterr().out.endswith(
        "data: 2 documents, 10 bytes, 12 tokens, 3 files skipped (binary or empty)\n"
    )
    before = prefix.with_suffix(".bin").stat().st_mtime_ns
    assert main(["--text", str(texts), "--output", str(prefix)]) == 0
    assert capsys.readouterr().out.endswith("(unchanged, kept)\n")
    assert prefix.with_suffix(".bin").stat().st_mtime_ns == before


def change_text(texts: Path, prefix: Path) -> None:
    (texts / "a.py").write_bytes(b"three\n")


def add_text(texts: Path, prefix: Path) -> None:
    (texts / "new.txt").write_bytes(b"new")


def cut_data(texts: Path, prefix: Path) -> None:
    os.truncate(f"{prefix}.bin", 4)


def lose_index(texts: Path, prefix: Path) -> None:
    os.unlink(f"{prefix}.idx")


def spoil_record(texts: Path, prefix: Path) -> None:
    Path(f"{prefix}.json").write_text("{")


@pytest.mark.parametrize("harm", [change_text, add_text, cut_data, lose_index, spoil_record])
def test_a_changed_source_or_damaged_dataset_is_made_again(texts, tmp_path, harm):
    prefix = tmp_path / "data"
    prepare(prefix, texts)
    harm(texts, prefix)
    summary, was_there = prepare(prefix, texts)
    assert not was_there
    assert sum(len(tokens) for tokens in dataset(prefix)[0 : summary.documents]) == summary.tokens
    assert prepare(prefix, texts) == (summary, True)


def test_an_interrupted_run_leaves_no_dataset(texts, tmp_path, monkeypatch):
    prefix = tmp_path / "out" / "data"

    def interrupted(path: Path) -> bytes:
        if path.name == "two.txt":  # the last file: all others are written by now
            raise KeyboardInterrupt
        return path.read_bytes()

    monkeypatch.setattr(prepare_text, "read_text", interrupted)
    with pytest.raises(KeyboardInterrupt):
        prepare(prefix, texts)
    assert list(prefix.parent.iterdir()) == []


@pytest.mark.parametrize("renamed", [0, 1, 2])
def test_a_run_killed_between_renames_is_not_taken_for_complete(texts, tmp_path, monkeypatch, renamed):
    prefix = tmp_path / "data"
    prepare(prefix, texts)
    change_text(texts, prefix)
    replace, count = Path.replace, 0

    def killed(self, target):
        nonlocal count
        if count == renamed:
            raise KeyboardInterrupt
        count += 1
        return replace(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            prepare(prefix, texts)
    folder, paths = texts, prepare_text.text_folder(texts)
    assert prepare_text.complete_dataset(prefix, prepare_text.describe_source(folder, paths)) is None
    assert prepare(prefix, texts)[1] is False


def test_default_text_is_the_standard_library_without_its_tests():
    folder, paths = prepare_text.standard_library()
    names = {str(path.relative_to(folder)) for path in paths}
    assert {"argparse.py", os.path.join("json", "decoder.py")} <= names
    assert len(paths) > 300
    assert not any("site-packages" in name or "test" in Path(name).parts for name in names)
    assert paths == prepare_text.standard_library()[1]


def refusal(capsys, *argv: str | Path) -> str:
    assert main([str(word) for word in argv]) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    return message


def test_a_missing_folder_is_refused(tmp_path, capsys):
    message = refusal(capsys, "--output", tmp_path / "data", "--text", tmp_path / "absent")
    assert message == f"prepare_text: --text {tmp_path}/absent is not a folder; name a folder with text files\n"


def test_an_unreadable_folder_is_refused(texts, tmp_path, capsys, monkeypatch):
    def denied(folder, onerror):
        onerror(PermissionError(13, "Permission denied", str(folder)))
        return iter(())

    monkeypatch.setattr(os, "walk", denied)  # root may read everything, so the refusal is made here
    message = refusal(capsys, "--output", tmp_path / "data", "--text", texts)
    assert (
        message
        == f"prepare_text: cannot read the folder {texts}: Permission denied; make it readable or move it away\n"
    )


def test_an_unreadable_file_is_refused(texts, tmp_path, capsys, monkeypatch):
    def denied(self):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "read_bytes", denied)
    message = refusal(capsys, "--output", tmp_path / "data", "--text", texts)
    assert f"cannot read {texts / 'a.py'}: Permission denied; make it readable or move it away" in message
    assert list(tmp_path.glob("data*")) == []


@pytest.mark.parametrize("content", [None, b"", b"\x00\x01"])
def test_a_folder_without_text_is_refused(tmp_path, capsys, content):
    folder = tmp_path / "folder"
    folder.mkdir()
    if content is not None:
        (folder / "file").write_bytes(content)
    message = refusal(capsys, "--output", tmp_path / "data", "--text", folder)
    looked_at = 0 if content is None else 1
    assert f"no UTF-8 text file in {folder} ({looked_at} files looked at); name another --text" in message
    assert list(tmp_path.glob("data*")) == []


def test_an_output_that_cannot_be_written_is_refused(texts, tmp_path, capsys):
    (tmp_path / "file").write_text("in the way")
    message = refusal(capsys, "--output", tmp_path / "file" / "data", "--text", texts)
    assert message.endswith(
        f"--output {tmp_path / 'file'} cannot be written (Not a directory): choose another folder\n"
    )
