"""The files that we write: each appears complete, or the old one stays.

Every file that a reader could find half written is written through `written_whole`; files that grow line by line (logs)
are not. The checks refuse, before hours of work, what could not be written after them.
"""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile

from megatron_moe_opt.errors import ConfigurationError

Named = tuple[str, str | Path | None]
"""A flag, and the file that it names; None: it was not given."""


@contextmanager
def written_whole(file: str | Path) -> Iterator[Path]:
    """Yields the path to write the content of `file` to, which takes its place when the block ends without an error.

    Links are followed, so that the file they lead to is written, and it keeps its permissions. A device or a pipe has
    no place to take: it is written to directly. An error in the block leaves what was there, and nothing else.

    Raises:
        ConfigurationError: the file cannot be written; names it and the reason.
    """
    try:
        target = Path(os.path.realpath(file))
        old = _status(file)
        if old is not None and not stat.S_ISREG(old.st_mode):
            yield Path(file)
            return
        # Beside the target, since renaming works within one file system only; what writes looks at the suffix.
        partial = target.with_name(f".{secrets.token_hex(8)}.partial{Path(file).suffix}")
        try:
            partial.touch(exist_ok=False)
            yield partial
            if old is not None:
                partial.chmod(stat.S_IMODE(old.st_mode))
            flush(partial)
            partial.replace(target)
        finally:
            with suppress(OSError):  # it has its name, or was never made
                partial.unlink()
        flush(target.parent)
    except OSError as error:
        raise ConfigurationError(f"{file} cannot be written ({error.strerror}): choose another file") from error


def write_text_whole(file: str | Path, text: str) -> None:
    """Writes a text file in one piece, in UTF-8. Raises ConfigurationError where it cannot be written."""
    with written_whole(file) as path:
        path.write_text(text, encoding="utf-8")


def format_of(file: str | Path) -> str:
    """Returns the end of a file's name that says what format it has, in small letters: `.png` of `X.PNG`."""
    return Path(file).suffix.lower()


def flush(path: Path) -> None:
    """Returns when a file's content, or a folder's names, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_output_file(
    flag: str, file: str | Path | None, make_folder: bool = False, others: Iterable[Named] = ()
) -> None:
    """Refuses a file that could not be written, without making or changing it. None, no file, passes.

    Args:
        others: what else is read or written, none of which the file may be: it would take its place.
        make_folder: make the folder of the file where it is not there.

    Raises:
        ConfigurationError: the flag, its value, the reason and the way out.
    """
    if file is None:
        return
    try:
        folder = Path(file).absolute().parent
        if make_folder:
            folder.mkdir(parents=True, exist_ok=True)
        if Path(file).is_dir():
            raise ConfigurationError(f"{flag} {file} is a folder: name a file in it")
        if not folder.is_dir():
            raise ConfigurationError(f"{flag} {file}: its folder does not exist; create it or choose another")
        for name, other in others:
            if other is not None and os.path.realpath(other) == os.path.realpath(file):
                raise ConfigurationError(f"{flag} {file} is the file of {name}, which it would replace: name another")
        old = _status(file)
        if old is not None:
            _check_may_write(file, old)
        if old is None or stat.S_ISREG(old.st_mode):
            _check_takes_files(Path(os.path.realpath(file)).parent)
    except OSError as error:
        raise ConfigurationError(f"{flag} {file} cannot be written ({_reason(error)}): choose another file") from error


def check_output_folder(flag: str, folder: str | Path | None) -> None:
    """Makes a folder where it is not there, and refuses one that files could not be written to. None passes.

    Raises:
        ConfigurationError: the flag, its value, the reason and the way out.
    """
    if folder is None:
        return
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        _check_takes_files(Path(folder))
    except OSError as error:
        reason = _reason(error)
        raise ConfigurationError(f"{flag} {folder} cannot be written ({reason}): choose another folder") from error


def _status(file: str | Path) -> os.stat_result | None:
    """Returns the status of what the file is or leads to; None where there is nothing yet."""
    try:
        return os.stat(file)
    except FileNotFoundError:
        return None


def _check_may_write(file: str | Path, status: os.stat_result) -> None:
    # Trying is the only test that knows read-only file systems too, but a pipe would wait for its reader.
    if stat.S_ISREG(status.st_mode):
        os.close(os.open(file, os.O_WRONLY))
    elif not os.access(file, os.W_OK):
        raise PermissionError(None, "Permission denied")


def _check_takes_files(folder: Path) -> None:
    # Without a name of its own: all ranks try at once.
    with TemporaryFile(dir=folder):
        pass


def _reason(error: OSError) -> str | None:
    return "Not a directory" if isinstance(error, FileExistsError) else error.strerror
