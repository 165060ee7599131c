"""Makes this Python like one on Windows, as far as Linux can: put beside it as ``sitecustomize.py``.

The template finds no POSIX-only modules and names. Folders cannot be opened, files open for reading cannot be synced,
and open or mapped ones cannot be renamed, replaced or removed. Processes are spawned. ``os.name`` and ``sys.platform``
stay: by these the libraries choose what they use.
"""

import builtins
import multiprocessing
import os
import shutil
import signal
import sys
from contextlib import suppress
from pathlib import Path

import multiprocess  # what 🤗 datasets starts processes with

MODULES = {"fcntl", "grp", "pty", "pwd", "resource", "termios", "tty"}
OF_OS = """
    chown fchmod fchown fork forkpty getegid geteuid getgid getgroups getloadavg getpgid getpgrp getresuid getsid getuid
    killpg lchown mkfifo nice openpty posix_fadvise posix_fallocate pread pwrite register_at_fork sched_getaffinity
    sched_setaffinity sendfile setpgid setsid setuid statvfs sysconf wait O_DIRECTORY O_NOFOLLOW
"""
OF_SIGNAL = """
    SIGALRM SIGCHLD SIGCONT SIGHUP SIGKILL SIGPIPE SIGQUIT SIGSTOP SIGTSTP SIGUSR1 SIGUSR2 alarm pause pthread_kill
    pthread_sigmask setitimer sigpending sigwait sigwaitinfo sigtimedwait
"""


def is_ours(name) -> bool:
    """Whether a module is the template's: the libraries choose by ``sys.platform`` what they use."""
    return name == "__main__" or name.split(".")[0] == "train"


def hide(module, names) -> None:
    """Takes ``names`` away from ``module``, as far as the template's own code can see."""
    kept = {name: vars(module).pop(name) for name in names.split() if name in vars(module)}

    def lookup(name):
        if name not in kept or is_ours(sys._getframe(1).f_globals["__name__"]):
            raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")
        return kept[name]

    module.__getattr__ = lookup


def is_in_use(path) -> bool:
    """Whether this process has opened or mapped a file at or below ``path``."""
    whole, held = str(Path(os.fsdecode(path)).absolute()), []
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # the one by which they are listed
            held.append(str(descriptor.readlink()))
    mapped = [line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()]
    held += [line[5] for line in mapped if len(line) == 6]
    return any(name == whole or name.startswith(f"{whole}/") for name in held)


def refusing(change):
    def changed(*paths, **options):
        for path in paths if sys._getframe(1).f_globals["__name__"] != "tempfile" else ():
            if isinstance(path, str | bytes | os.PathLike) and is_in_use(path):
                raise PermissionError(13, "The process cannot access the file because it is being used", str(path))
        if change.__name__ == "rename" and os.path.lexists(paths[1]):
            raise FileExistsError(17, "Cannot create a file when that file already exists", str(paths[1]))
        return change(*paths, **options)

    return changed


def install():
    import fcntl

    find, flags, to_disk, begin = builtins.__import__, fcntl.fcntl, os.fsync, os.open

    def find_module(name, space=None, *args, **options):
        if name in MODULES and is_ours((space or {}).get("__name__", "")):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return find(name, space, *args, **options)

    def fsync(descriptor):
        if flags(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(9, "Bad file descriptor")
        to_disk(descriptor)

    def open_file(path, *args, **options):
        if Path(path).is_dir():
            raise PermissionError(13, "Permission denied", str(path))
        return begin(path, *args, **options)

    builtins.__import__, os.fsync, os.open = find_module, fsync, open_file  # type: ignore
    for name in ("rename", "replace", "remove", "unlink", "rmdir"):
        setattr(os, name, refusing(getattr(os, name)))
    for module in (multiprocessing, multiprocess):
        module.set_start_method("spawn")  # type: ignore
    shutil._use_fd_functions = False  # type: ignore
    hide(os, OF_OS)
    hide(signal, OF_SIGNAL)


install()
