"""Files that users name: bounded reads of regular files, and atomic writes, also to devices and pipes."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import sys
import tempfile
from pathlib import Path
from typing import Any

from ..errors import AutotpError, shown

__all__ = [
    "check_writable",
    "move_atomically",
    "read_text",
    "regular_target",
    "require_path",
    "spelled",
    "write_atomically",
]


def read_text(path: str | os.PathLike[str], most: int) -> str:
    """Reads a regular file of UTF-8 text; never waits for other files, such as a pipe or a terminal.

    Args:
        path: the file; links are followed.
        most: the largest size, bytes.

    Raises:
        OSError: the path cannot be opened or is not a regular file, or the file is too large or not text.
    """
    name = _name(path)
    descriptor = os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
    with os.fdopen(descriptor, "rb") as file:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, "it is a directory", name)
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, f"it is {_kind(mode)}; save its content to a file first", name)
        data = file.read(most + 1)
    if len(data) > most:
        raise OSError(errno.EFBIG, f"the file is larger than {most // 2**20} MiB", name)
    try:
        return data.decode("utf-8-sig")  # some editors begin a file with a byte order mark
    except UnicodeDecodeError as error:
        raise OSError(errno.EILSEQ, f"the file is not UTF-8 text ({error.reason} at byte {error.start:,})", name) from None


def _name(path: str | os.PathLike[str]) -> str:
    """A path as text that the operating system accepts."""
    name = os.fspath(path)
    if not name:
        raise OSError(errno.EINVAL, "the name is empty")
    if "\0" in name:
        raise OSError(errno.EINVAL, "the name contains a NUL character", name)
    try:
        os.fsencode(name)
    except UnicodeEncodeError:
        raise OSError(errno.EILSEQ, "the name has characters that no file's name can have", ascii(name)) from None
    return name


def _kind(mode: int) -> str:
    kinds = {
        stat.S_IFBLK: "a block device",
        stat.S_IFCHR: "a device",
        stat.S_IFDIR: "a directory",
        stat.S_IFIFO: "a pipe",
        stat.S_IFSOCK: "a socket",
    }
    return kinds.get(stat.S_IFMT(mode), "no file")


def spelled(path: Any) -> str:
    """A path for a message; other values as by `shown`."""
    return str(path) if isinstance(path, (str, os.PathLike)) else shown(path)


def require_path(path: Any, what: str) -> None:
    """Checks that a value is a path; ``what`` describes the file, for the message.

    Raises:
        AutotpError: the value is neither text nor a path, or is empty.
    """
    try:
        named = isinstance(path, (str, os.PathLike)) and isinstance(os.fspath(path), str)
    except TypeError:  # ``__fspath__`` of a user's class returns no path
        named = False
    if not named or not os.fspath(path):
        raise AutotpError(f"{shown(path)} is no path: give the name of {what}")


def write_atomically(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Writes a file completely or not at all.

    Links are followed; the target of a dangling link is created. An existing file keeps its permissions, and its owner if
    the process may set it; a new file has the default permissions. Only regular files are replaced: a character device, a
    pipe with a reader, and this process's own output are written to.

    Args:
        path: the file.
        content: text is written as UTF-8, with ``?`` for characters that it lacks, such as undecodable bytes of file names.

    Raises:
        OSError: the path cannot be written, or is a directory, a block device, a socket, or a pipe without a reader.
    """
    data = content.encode(errors="replace") if isinstance(content, str) else content
    before = _status(path)
    own = None if before is None else _own_output(before)
    if own is not None:
        # The path may be /dev/stdout: replacing the file would lose what is printed before and after.
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        _write_to(os.dup(own), data)
    elif before is None or stat.S_ISREG(before.st_mode):
        target = Path(os.path.realpath(path))
        _require_folder(target, path)
        _replace(target, data, before)
    else:
        _write_to(_opened(path, before), data)


def regular_target(path: str | os.PathLike[str]) -> Path:
    """The target of a path: a regular file, or one that does not exist yet, in an existing directory.

    Raises:
        OSError: the target is not a regular file, or its directory does not exist or cannot be written to.
    """
    before, target = _status(path), Path(os.path.realpath(path))
    if before is not None and not stat.S_ISREG(before.st_mode):
        raise OSError(errno.EINVAL, f"it is {_kind(before.st_mode)}", os.fspath(path))
    _require_folder(target, path)
    return target


def move_atomically(file: Path, target: Path) -> None:
    """Moves a complete file, with its permissions, to a `regular_target`, which may be on another file system.

    Raises:
        OSError: the target cannot be written.
    """
    try:
        os.replace(file, target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=".autotp-", suffix=".tmp")
        os.close(handle)
        try:
            shutil.copyfile(file, temporary)
            shutil.copymode(file, temporary)
            os.replace(temporary, target)
        except BaseException:
            os.unlink(temporary)
            raise
        os.unlink(file)


def check_writable(path: str | os.PathLike[str]) -> None:
    """Checks, before the work and without writing, that ``write_atomically`` could write to a path.

    Raises:
        OSError: under the same conditions as ``write_atomically``.
    """
    before = _status(path)
    if before is None or stat.S_ISREG(before.st_mode):
        _require_folder(Path(os.path.realpath(path)), path)
    elif _own_output(before) is None:
        os.close(_opened(path, before))


def _status(path: str | os.PathLike[str]) -> os.stat_result | None:
    """The status of the path's target; None if it does not exist."""
    try:
        return os.stat(_name(path))
    except FileNotFoundError:
        return None


def _require_folder(target: Path, path: str | os.PathLike[str]) -> None:
    if not target.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, f"there is no directory {target.parent}", os.fspath(path))
    if not os.access(target.parent, os.W_OK):
        raise PermissionError(errno.EACCES, f"the directory {target.parent} cannot be written to", os.fspath(path))


def _own_output(status: os.stat_result) -> int | None:
    """The descriptor of stdout or stderr if the status is that of one of them."""
    for descriptor in (1, 2):
        with contextlib.suppress(OSError):
            if os.path.samestat(status, os.fstat(descriptor)):
                return descriptor
    return None


def _replace(target: Path, data: bytes, before: os.stat_result | None) -> None:
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=".autotp-", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        if before is None:
            mask = os.umask(0)
            os.umask(mask)
            os.chmod(temporary, 0o666 & ~mask)
        else:
            # The owner comes first, because changing the owner removes permissions.
            with contextlib.suppress(PermissionError):
                os.chown(temporary, before.st_uid, before.st_gid)
            os.chmod(temporary, stat.S_IMODE(before.st_mode))
        os.replace(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise


def _opened(path: str | os.PathLike[str], status: os.stat_result) -> int:
    """Opens a character device or a pipe for writing, without waiting for a reader."""
    mode, name = status.st_mode, os.fspath(path)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, "it is a directory", name)
    if not stat.S_ISCHR(mode) and not stat.S_ISFIFO(mode):
        raise OSError(errno.EINVAL, f"it is {_kind(mode)}", name)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError as error:
        if error.errno == errno.ENXIO and stat.S_ISFIFO(mode):
            raise OSError(errno.ENXIO, "it is a pipe without a reader", name) from error
        raise
    os.set_blocking(descriptor, True)
    return descriptor


def _write_to(descriptor: int, data: bytes) -> None:
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
