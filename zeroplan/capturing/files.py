"""Writes of a script, anywhere, land in a temporary folder and are read back from there; nothing else of the disk changes.

Note [Redirected writes]
    Python's functions that open, make, rename and remove files are replaced. A path that was written, or made, is a file of
    the same path below the temporary folder; reads look there first. As a second guard an audit hook refuses, with an error,
    every write outside the folder that Python announces, and Linux those of libraries' own code, too
    (:mod:`zeroplan.capturing.landlock`). Of such libraries (safetensors, Arrow, torch's archives) the entry points are
    replaced in the hook of that library.
"""

from __future__ import annotations

import builtins
import bz2
import io
import os
import shutil
import stat
import sys
import tarfile
from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path
from typing import Any

from zeroplan.capturing.hooks.imports import changes

#: Places of the system whose files are no files.
_SYSTEM = ("/dev/", "/proc/", "/sys/")
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

#: Functions of the system that change a file, or make one that is no plain one.
_CHANGES = ("chmod", "utime", "truncate", "chown", "lchown", "mkfifo", "mknod")

_open, _stat, _lstat = builtins.open, os.stat, os.lstat
_listdir, _scandir, _mkdir, _getcwd = os.listdir, os.scandir, os.mkdir, os.getcwd
_remove, _rmdir, _rename, _replace = os.remove, os.rmdir, os.rename, os.replace


#: Given a module and a name, a decorator that puts a function there.
_Replaced = Callable[[Any, str], Callable[[Callable[..., Any]], None]]


class Overlay:
    """The temporary folder and what was written to it.

    Args:
        folder: for everything that is written.
    """

    def __init__(self, folder: str) -> None:
        self.folder = os.path.realpath(folder)
        self.root = os.path.join(self.folder, "files")
        self.gone: set[str] = set()
        self.busy = False
        self.clearing = False  # a folder of ours is removed, by names within it
        self.missing: Callable[[str], bool] = lambda _: False  # makes a file that is opened and not there, or does not

    def own(self, path: Any) -> bool:
        """Return whether a path needs no redirection: an open file's number, the system's, or one in the folder."""
        if isinstance(path, int):
            return True
        real = self._absolute(path)
        return real.startswith(_SYSTEM) or real == self.folder or real.startswith(self.folder + os.sep)

    def cwd(self) -> str:
        """The script's folder, as it names it: one that it has made lies in the temporary folder."""
        now = _getcwd()
        return now[len(self.root) :] if now.startswith(self.root + os.sep) else now

    def _absolute(self, path: Any) -> str:
        return os.path.normpath(os.path.join(self.cwd(), os.fsdecode(path)))

    def of(self, path: Any) -> str:
        """Return the place below the folder that stands for a path."""
        return self.root + self._absolute(path)

    def reading(self, path: Any) -> Any:
        """Return where a path is read from.

        Raises:
            FileNotFoundError: the script has removed it.
        """
        if self.own(path):
            return path
        real = self._absolute(path)
        if os.path.lexists(self.root + real):
            return self.root + real
        if real in self.gone or any(real.startswith(one + os.sep) for one in self.gone):
            raise FileNotFoundError(2, "No such file or directory", os.fsdecode(path))
        return path if self.cwd() == _getcwd() else real

    def writing(self, path: Any, *, fresh: bool = True) -> Any:
        """Return where a path is written; what it holds is copied there before unless it is made afresh."""
        if self.own(path):
            return path
        real, place = self._absolute(path), self.of(path)
        parent = os.path.dirname(real)
        if not self._is_folder(parent):
            raise FileNotFoundError(2, "No such file or directory", os.fsdecode(path))
        self._make(os.path.dirname(place))
        if not fresh and not os.path.lexists(place) and real not in self.gone and os.path.exists(real):
            shutil.copyfile(real, place)
        self.gone.discard(real)
        return place

    def _is_folder(self, real: str) -> bool:
        if os.path.isdir(self.root + real):
            return True
        return real not in self.gone and os.path.isdir(real)

    @staticmethod
    def _make(folder: str) -> None:
        missing = []
        while not os.path.isdir(folder):
            missing.append(folder)
            folder = os.path.dirname(folder)
        for one in reversed(missing):
            _mkdir(one)

    def names(self, path: Any) -> list[str]:
        """The names within a folder."""
        found: list[str] = []
        real = self._absolute(path)
        if real not in self.gone and os.path.isdir(real):
            found = [name for name in _listdir(real) if os.path.join(real, name) not in self.gone]
        if os.path.isdir(self.root + real):
            found += [name for name in _listdir(self.root + real) if name not in found]
        elif not os.path.isdir(real):
            return _listdir(real)
        return found


def _writes(mode: str) -> bool:
    return any(letter in mode for letter in "wax+")


def install(folder: str) -> Overlay:
    """Redirect from here on; returns what tells where things were written."""
    overlay = Overlay(folder)
    os.makedirs(overlay.root, exist_ok=True)

    def alone(function: Callable[..., Any]) -> Callable[..., Any]:
        """Let a replaced function's own work be done by Python's own."""

        @wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            if overlay.busy:
                return originals[function.__name__](*args, **kwargs)
            overlay.busy = True
            try:
                return function(*args, **kwargs)
            finally:
                overlay.busy = False

        return run

    originals: dict[str, Callable[..., Any]] = {}

    def replaced(home: Any, name: str) -> Callable[[Callable[..., Any]], None]:
        def put(function: Callable[..., Any]) -> None:
            function.__name__ = f"{home.__name__}.{name}"
            originals[function.__name__] = getattr(home, name)
            setattr(home, name, alone(function))

        return put

    def opened(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        writes = _writes(mode)
        opener = kwargs.pop("opener", None)
        if opener is not None:  # it opens by os.open, which is redirected
            overlay.busy = False
            flags = os.O_RDONLY if not writes else os.O_RDWR | os.O_CREAT if "+" in mode else os.O_WRONLY | os.O_CREAT
            return _open(opener(file, flags), mode, *args, **kwargs)
        place = overlay.writing(file, fresh="w" in mode or "x" in mode) if writes else overlay.reading(file)
        if place is file and not writes and not overlay.own(file) and not os.path.lexists(file):
            place = overlay.reading(file) if overlay.missing(os.fsdecode(file)) else file
        return _open(place, mode, *args, **kwargs)

    replaced(builtins, "open")(opened)
    io.open = builtins.open
    for home, name in ((tarfile, "bltn_open"), (bz2, "_builtin_open")):  # which keep Python's own by another name
        changes(home)
        setattr(home, name, builtins.open)

    own_open = os.open

    @replaced(os, "open")
    def _os_open(path: Any, flags: int, mode: int = 0o777, *, dir_fd: Any = None) -> int:
        if dir_fd is not None:
            return own_open(path, flags, mode, dir_fd=dir_fd)
        if flags & _WRITING:
            return own_open(overlay.writing(path, fresh=bool(flags & os.O_TRUNC)), flags, mode)
        return own_open(overlay.reading(path), flags, mode)

    @replaced(os, "mkdir")
    def _os_mkdir(path: Any, mode: int = 0o777, **kwargs: Any) -> None:
        if overlay.own(path):
            return _mkdir(path, mode, **kwargs)
        real = overlay._absolute(path)
        if overlay._is_folder(real) or (real not in overlay.gone and os.path.lexists(real)):
            raise FileExistsError(17, "File exists", os.fsdecode(path))
        if not overlay._is_folder(os.path.dirname(real)):
            raise FileNotFoundError(2, "No such file or directory", os.fsdecode(path))
        overlay._make(overlay.of(path))
        if real in overlay.gone:  # a folder that the script has removed is made anew, and empty
            overlay.gone.discard(real)
            overlay.gone.update(os.path.join(real, name) for name in (_listdir(real) if os.path.isdir(real) else ()))
        return None

    _moves(overlay, replaced)
    for name in ("stat", "lstat", "access", "readlink", "statvfs", *_CHANGES):
        _reader(os, name, overlay, replaced)

    @replaced(os, "listdir")
    def _os_listdir(path: Any = ".") -> list[str]:
        return _listdir(path) if overlay.own(path) else overlay.names(path)

    @replaced(os, "scandir")
    def _os_scandir(path: Any = ".") -> Any:
        if overlay.own(path) or (not os.path.isdir(overlay.of(path)) and not overlay.gone):
            return _scandir(path)
        return _Entries(overlay, path)

    for name, own in (("remove", _remove), ("unlink", _remove), ("rmdir", _rmdir)):
        _remover(name, own, overlay, replaced)
    for name in ("rename", "replace", "link", "symlink"):
        _mover(name, overlay, replaced)
    shutil.rmtree = _without_tree(overlay)  # type: ignore[assignment]
    sys.addaudithook(_guard(overlay))
    return overlay


def _moves(overlay: Overlay, replaced: _Replaced) -> None:
    """Let the script go to folders that it has made, and know them by their names."""
    chdir = os.chdir

    @replaced(os, "chdir")
    def _os_chdir(path: Any) -> None:
        real = overlay._absolute(path)
        chdir(real if os.path.isdir(real) and real not in overlay.gone else overlay.reading(path))

    @replaced(os, "getcwd")
    def _os_getcwd() -> str:
        return overlay.cwd()


def _reader(home: Any, name: str, overlay: Overlay, replaced: _Replaced) -> None:
    own = getattr(home, name)

    @replaced(home, name)
    def read(path: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("dir_fd") is not None:
            return own(path, *args, **kwargs)
        if name in _CHANGES:
            return own(overlay.writing(path, fresh=False), *args, **kwargs)
        return own(overlay.reading(path), *args, **kwargs)


def _remover(name: str, own: Callable[..., Any], overlay: Overlay, replaced: _Replaced) -> None:
    @replaced(os, name)
    def remove(path: Any, *args: Any, **kwargs: Any) -> Any:
        if overlay.own(path) or kwargs.get("dir_fd") is not None:
            return own(path, *args, **kwargs)
        place, real = overlay.of(path), overlay._absolute(path)
        if os.path.lexists(place):
            own(place)
        elif not os.path.lexists(real) or real in overlay.gone:
            raise FileNotFoundError(2, "No such file or directory", os.fsdecode(path))
        overlay.gone.add(real)
        return None


def _mover(name: str, overlay: Overlay, replaced: _Replaced) -> None:
    own = getattr(os, name)

    @replaced(os, name)
    def move(src: Any, dst: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("src_dir_fd") is not None or kwargs.get("dir_fd") is not None:
            return own(src, dst, *args, **kwargs)
        if overlay.own(src) and overlay.own(dst):
            return own(src, dst)
        target = overlay.writing(dst)
        if name == "symlink":
            return own(src, target)
        source, real = overlay.reading(src), overlay._absolute(src)
        if os.path.isdir(source) and not overlay.own(source):
            shutil.copytree(source, target)
        elif str(source) == str(src) and not overlay.own(src):
            shutil.copyfile(source, target)
        else:
            own(source, target)
        if name != "link":
            overlay.gone.add(real)
        return None


def _without_tree(overlay: Overlay) -> Callable[..., None]:
    own = shutil.rmtree

    def rmtree(path: Any, *args: Any, **kwargs: Any) -> None:
        if overlay.own(path):
            overlay.clearing = True
            try:
                return own(path, *args, **kwargs)
            finally:
                overlay.clearing = False
        overlay.busy = overlay.clearing = True
        try:
            if os.path.isdir(overlay.of(path)):
                own(overlay.of(path))
            overlay.gone.add(overlay._absolute(path))
        finally:
            overlay.busy = overlay.clearing = False
        return None

    return rmtree


class _Entries:
    """``os.scandir`` of a folder that is partly in the temporary folder."""

    def __init__(self, overlay: Overlay, path: Any) -> None:
        self._found = iter([_Entry(overlay, path, name) for name in overlay.names(path)])

    def __iter__(self) -> Iterator[Any]:
        return self._found

    def __next__(self) -> Any:
        return next(self._found)

    def __enter__(self) -> _Entries:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def close(self) -> None:
        """Nothing is open."""


class _Entry:
    """An ``os.DirEntry`` of such a folder."""

    def __init__(self, overlay: Overlay, folder: Any, name: str) -> None:
        self.name, self.path = name, os.path.join(os.fsdecode(folder), name)
        self._place = overlay.reading(self.path)

    def __fspath__(self) -> str:
        return self.path

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        """As of ``os.DirEntry``."""
        return _stat(self._place, follow_symlinks=follow_symlinks)

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        """As of ``os.DirEntry``."""
        return stat.S_ISDIR(self.stat(follow_symlinks=follow_symlinks).st_mode)

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        """As of ``os.DirEntry``."""
        return stat.S_ISREG(self.stat(follow_symlinks=follow_symlinks).st_mode)

    def is_symlink(self) -> bool:
        """As of ``os.DirEntry``."""
        return stat.S_ISLNK(_lstat(self._place).st_mode)

    def inode(self) -> int:
        """As of ``os.DirEntry``."""
        return self.stat().st_ino


def _guard(overlay: Overlay) -> Callable[[str, tuple[Any, ...]], None]:
    """Refuse every write outside the folder that Python announces."""
    paths = {"os.mkdir": (0,), "os.remove": (0,), "os.rmdir": (0,), "os.rename": (0, 1), "os.link": (1,), "os.symlink": (1,),
             "os.truncate": (0,), "os.chmod": (0,), "os.chown": (0,), "shutil.rmtree": ()}  # fmt: skip

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if overlay.clearing:
            return
        if event == "open":
            path, mode, flags = args
            writes = _writes(mode) if isinstance(mode, str) else bool(flags & _WRITING)
            if writes and path is not None and not isinstance(path, int) and not _within(overlay, path):
                raise PermissionError(1, "capture writes nothing outside its folder", os.fsdecode(path))
        elif event in paths:
            for at in paths[event]:
                if at < len(args) and not isinstance(args[at], int) and not _within(overlay, args[at]):
                    raise PermissionError(1, "capture writes nothing outside its folder", os.fsdecode(args[at]))

    return hook


def _within(overlay: Overlay, path: Any) -> bool:
    return overlay.own(path)


def source_of(overlay: Overlay, path: str | Path) -> str:
    """Where a path is read from."""
    return str(overlay.reading(os.fspath(path)))
