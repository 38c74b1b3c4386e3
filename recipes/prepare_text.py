#!/usr/bin/env python3
"""Turn a folder of text into a Megatron indexed dataset with byte-level tokens.

    python recipes/prepare_text.py --output data/stdlib            # the source of Python's own standard library
    python recipes/prepare_text.py --output data/mine --text DIR   # every UTF-8 text file below DIR, .gz ones unpacked
    python recipes/prepare_text.py --output data/headers --text /usr/include --suffix .h   # those that end so

Writes PREFIX.bin and PREFIX.idx, which Megatron's `--data-path PREFIX` takes (its `--split` makes train, validation
and test out of the one dataset), and PREFIX.json, which says what they were made from. A token is a byte of the file
(0 to 255); END_OF_DOCUMENT (256) closes each file. A dataset whose source has not changed is kept as it is. All three
files appear under their names only when complete, the .json last.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import os
import sys
import sysconfig
import warnings
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from rich.progress import track

from megatron_moe_opt import use_host_backend
from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.output_file import check_output_folder, written_whole

END_OF_DOCUMENT = 256

FORMAT = 2  # counted up when the same text would give other tokens
DTYPE = np.uint16  # the least of Megatron's dataset types that holds 256
# Not the standard library, or its test data: folders named so are skipped in the default text.
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


class TextError(Exception):
    """One sentence for the user; the program ends with exit code 2."""


@dataclass(frozen=True)
class Source:
    """What a dataset is made from; `digest` covers names, sizes and times of change of all files."""

    folder: str
    files: int
    digest: str
    format: int = FORMAT


@dataclass(frozen=True)
class Summary:
    """What a dataset holds: `tokens` are `bytes` and one end-of-document a document; `skipped` files were no text."""

    documents: int
    bytes: int
    tokens: int
    skipped: int


def standard_library() -> tuple[Path, list[Path]]:
    """Folder and source files of the running interpreter's standard library, without tests, in a fixed order."""
    folder = Path(sysconfig.get_path("stdlib"))
    return folder, [path for path in _walk(folder, SKIPPED_FOLDERS) if path.suffix == ".py"]


def text_folder(folder: Path, suffix: str = "") -> list[Path]:
    """All files below a folder whose names end in a suffix, in a fixed order.

    Raises TextError for a folder that is missing or unreadable.
    """
    if not folder.is_dir():
        raise TextError(f"--text {folder} is not a folder; name a folder with text files")
    return [path for path in _walk(folder, set()) if path.name.endswith(suffix)]


def _walk(folder: Path, skipped: set[str]) -> Iterator[Path]:
    def refuse(error: OSError) -> None:
        raise TextError(f"cannot read the folder {error.filename}: {error.strerror}; make it readable or move it away")

    for base, folders, files in os.walk(folder, onerror=refuse):
        folders[:] = sorted(name for name in folders if name not in skipped)
        yield from (path for name in sorted(files) if (path := Path(base, name)).is_file())


def read_text(path: Path) -> bytes | None:
    """The bytes of a UTF-8 text file, unpacked where its name ends in .gz; None for anything else (bytes that are not
    UTF-8 or cannot be unpacked, a zero byte, no bytes).

    Raises TextError for a file that cannot be read.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise TextError(f"cannot read {path}: {error.strerror}; make it readable or move it away") from error
    try:
        if path.suffix == ".gz":
            data = gzip.decompress(data)
        data.decode("utf-8")
    except (UnicodeDecodeError, gzip.BadGzipFile, EOFError, zlib.error):
        return None
    return data if data and b"\0" not in data else None


def tokenize(text: bytes) -> np.ndarray:
    """Tokens of one document: uint16 [len(text) + 1], the bytes and END_OF_DOCUMENT."""
    tokens = np.empty(len(text) + 1, dtype=DTYPE)
    tokens[:-1] = np.frombuffer(text, dtype=np.uint8)
    tokens[-1] = END_OF_DOCUMENT
    return tokens


def describe_source(folder: Path, paths: list[Path]) -> Source:
    """Identity of a text without reading it: names, sizes and times of change of its files."""
    digest = hashlib.sha256()
    for path in paths:
        status = path.stat()
        digest.update(
            f"{path.relative_to(folder)}\0{status.st_size}\0{status.st_mtime_ns}\n".encode(errors="surrogateescape")
        )
    return Source(str(folder.resolve()), len(paths), digest.hexdigest())


def _dataset_files(prefix: Path) -> tuple[Path, Path, Path]:
    # Not with_suffix: a prefix may have a dot in its name.
    return Path(f"{prefix}.bin"), Path(f"{prefix}.idx"), Path(f"{prefix}.json")


def complete_dataset(prefix: Path, source: Source) -> Summary | None:
    """The summary of the dataset at a prefix if it is complete and made from this source, else None."""
    data, index, record_file = _dataset_files(prefix)
    try:
        record = json.loads(record_file.read_text())
        summary = Summary(**record["summary"])
        sizes = {"bin": data.stat().st_size, "idx": index.stat().st_size}
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return summary if record.get("source") == asdict(source) and record.get("sizes") == sizes else None


def write_dataset(prefix: Path, source: Source, paths: list[Path]) -> Summary:
    """Write the dataset and its record.

    Raises TextError if no file holds text, ConfigurationError if the output cannot be written.
    """
    # Imported late: bad input is then refused at once, not after seconds of importing torch.
    warnings.filterwarnings("ignore", message="Transformer Engine and Apex are not installed")
    with suppress(ConfigurationError):  # Megatron without PyTorch's compiler, whose import takes longer than its own
        use_host_backend()
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    data, index, record_file = _dataset_files(prefix)
    check_output_folder("--output", prefix.parent)
    documents = size = 0
    with ExitStack() as stack:  # ends with the record, which was entered first
        new_record, new_index, new_data = (
            stack.enter_context(written_whole(path)) for path in (record_file, index, data)
        )
        builder = IndexedDatasetBuilder(str(new_data), dtype=DTYPE)
        for path in track(paths, description="Tokenizing", transient=True):
            text = read_text(path)
            if text is None:
                continue
            tokens = tokenize(text)
            builder.add_document(tokens, [len(tokens)])
            documents += 1
            size += len(text)
        builder.finalize(str(new_index))
        if not documents:
            raise TextError(
                f"no UTF-8 text file in {source.folder} ({len(paths)} files looked at); name another --text"
            )
        summary = Summary(documents, size, size + documents, len(paths) - documents)
        sizes = {"bin": new_data.stat().st_size, "idx": new_index.stat().st_size}
        record = {"source": asdict(source), "summary": asdict(summary), "sizes": sizes}
        new_record.write_text(json.dumps(record, indent=2) + "\n")
        if record_file.is_file():
            record_file.write_text("")  # until the new one is there, what is at the prefix is not complete
    return summary


def prepare(prefix: Path, folder: Path | None = None, suffix: str = "") -> tuple[Summary, bool]:
    """Make the dataset at a prefix, from a folder (or its files with a suffix) or the standard library, unless it is
    there already.

    Returns its summary and whether it was there. Raises TextError or ConfigurationError with one sentence where it
    cannot.
    """
    if folder is None:
        folder, paths = standard_library()
    else:
        paths = text_folder(folder, suffix)
    source = describe_source(folder, paths)
    present = complete_dataset(prefix, source)
    return (present, True) if present else (write_dataset(prefix, source, paths), False)


def main(argv: list[str] | None = None) -> int:
    """Entry of the command line; returns the exit code."""
    parser = argparse.ArgumentParser(description="Turn a folder of text into a Megatron indexed dataset (bytes).")
    parser.add_argument("--output", type=Path, required=True, metavar="PREFIX", help="writes PREFIX.bin, .idx, .json")
    parser.add_argument("--text", type=Path, metavar="DIR", help="folder of text (default: Python's standard library)")
    parser.add_argument("--suffix", default="", help="only files whose names end so (with --text; default: all)")
    arguments = parser.parse_args(argv)
    if arguments.suffix and arguments.text is None:
        parser.error("--suffix chooses among the files of a folder: add --text DIR")
    try:
        summary, was_there = prepare(arguments.output, arguments.text, arguments.suffix)
    except (TextError, ConfigurationError) as error:
        print(f"prepare_text: {error}", file=sys.stderr)
        return 2
    print(
        f"{arguments.output}: {summary.documents:,} documents, {summary.bytes:,} bytes, {summary.tokens:,} tokens"
        f"{f', {summary.skipped:,} files skipped (binary or empty)' if summary.skipped else ''}"
        f"{' (unchanged, kept)' if was_there else ''}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
