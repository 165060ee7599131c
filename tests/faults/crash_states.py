"""What a crash of the machine can leave of the files that a run wrote, by a recording of its system calls.

Only fsync promises anything: of a file its bytes, of a folder the names in it. Whatever is not promised may be on the
disk or not, in any order; bytes may be there in part, or as NUL bytes where only the size came through.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import random
import re
import shutil
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, TypeAlias

from faults.processes import Fault

CALLS = (
    "open,openat,creat,write,pwrite64,writev,pwritev,pwritev2,ftruncate,truncate,fallocate,copy_file_range,sendfile,"
    "lseek,rename,renameat,renameat2,link,linkat,symlink,symlinkat,unlink,unlinkat,mkdir,mkdirat,rmdir,fsync,fdatasync"
)
STRACE = ("strace", "-f", "-y", "-xx", "-q", "-ttt", "-s", "100000000", "-e", f"trace={CALLS}", "-o")
ACKNOWLEDGED = "acknowledged"
WHOLE, HALF, ZEROS = "whole", "half", "zeros"
"""How much of a write is on the disk; one that is not there at all is left out."""
SMALL = 4096
_LINE = re.compile(r"\d+ +(?P<time>[\d.]+) (?P<call>.*)")
_CALL = re.compile(r"(?P<name>\w+)\((?P<arguments>.*)\) += (?P<result>-?\d+)")
_RESUMED = re.compile(r"<\.\.\. \w+ resumed>(.*)")
_TEXT = re.compile(r'"((?:\\x[0-9a-f]{2})*)"')
_DESCRIPTOR = re.compile(r"(?:(\d+)|AT_FDCWD)<((?:\\x[0-9a-f]{2})*)>(\(deleted\))?")
_PRCTL_SET_PTRACER = 0x59616D61


def can_record() -> bool:
    """Whether strace is here and allowed to look at processes."""
    strace = shutil.which("strace")
    return strace is not None and subprocess.run([strace, "-qq", "-o", os.devnull, "true"]).returncode == 0


def recorded(trace: Path) -> Fault:
    """Records the process's system calls in ``trace.RANK``, and when a checkpoint, or the whole run, is complete."""
    return partial(_recorded, trace)


def _recorded(trace: Path, rank: int) -> None:
    from train import checkpoint
    from train.outputs import Outputs

    own = f"{trace}.{rank}"
    ctypes.CDLL(None).prctl(_PRCTL_SET_PTRACER, ctypes.c_ulong(-1), 0, 0, 0)
    tracer = subprocess.Popen([*STRACE, own, "-p", str(os.getpid())])
    while re.search(r"TracerPid:\s+0\n", Path("/proc/self/status").read_text()):
        assert tracer.poll() is None, "strace could not attach"
        time.sleep(0.01)
    descriptor = os.open(f"{own}.{ACKNOWLEDGED}", os.O_WRONLY | os.O_CREAT)
    complete, finish = checkpoint.complete, Outputs.finish

    def completed(partial_folder: Path, final: Path, *rest: Any) -> None:
        complete(partial_folder, final, *rest)
        os.write(descriptor, str(int(final.name[5:])).encode())

    def finished(self: Outputs, summary: Mapping[str, Any]) -> None:
        finish(self, summary)
        if self.is_main:
            os.write(descriptor, b"done")

    checkpoint.complete, Outputs.finish = completed, finished  # type: ignore


class Node:
    """A file or a folder, whatever its names."""

    def __init__(self, is_folder: bool) -> None:
        self.is_folder = is_folder


@dataclass(frozen=True, eq=False)
class Write:
    """Bytes put into a file at an offset, or, for None, the file cut (or filled up) to that size."""

    node: Node
    offset: int
    data: bytes | None


@dataclass(frozen=True, eq=False)
class Naming:
    """Names given or, for None, taken: (folder, name, node), all at once."""

    places: tuple[tuple[Node, str, Node | None], ...]


Names: TypeAlias = dict[Node, dict[str, Node]]
Tree: TypeAlias = dict[str, bytes | None]
"""Contents by path; None for a folder."""


@dataclass(frozen=True)
class State:
    """What a crash left."""

    position: int  # in the recording
    acknowledged: int  # the newest checkpoint that the run has been told is written
    is_done: bool  # the run has been told that everything is written
    tree: Tree = field(repr=False)
    key: str  # equal for equal trees


class Recording:
    """The changes, syncs and acknowledgements of one run under ``root``, in their order; ``root`` itself stays.

    Args:
        before: what was there, safely on the disk, when the run began.
    """

    def __init__(self, traces: Iterable[Path], root: Path, before: Mapping[str, bytes | None] | None = None) -> None:
        self._top = Node(True)
        self._live: Names = {self._top: {}}
        self._root, self._offsets = str(root), {}
        self.changes: list[Write | Naming] = []
        self.events: list[tuple[str, Any, int]] = []  # kind, what of, number of changes before it began
        self._contents: dict[tuple[Node, tuple[Any, ...]], bytes] = {}
        for path, content in sorted((before or {}).items()):
            node = self._new(path, content is None)
            if content:
                self._change(Write(node, 0, content))
        self._given = len(self.changes)
        calls = (call for number, trace in enumerate(traces) for call in _calls(trace, number))
        started: dict[tuple[int, str], int] = {}
        for _, is_start, thread, name, arguments, result in sorted(calls, key=lambda call: call[0]):
            if is_start:
                started[thread] = len(self.changes)
            else:
                begun = started.pop(thread, len(self.changes))
                if result >= 0:
                    self._take(thread[0], name, arguments, result, begun)

    def _take(self, owner: int, name: str, arguments: str, result: int, begun: int) -> None:
        """One call that succeeded."""
        texts = [bytes.fromhex(text.replace("\\x", "")) for text in _TEXT.findall(arguments)]
        files = [(n, os.fsdecode(bytes.fromhex(p.replace("\\x", ""))), d) for n, p, d in _DESCRIPTOR.findall(arguments)]
        if name in ("open", "openat", "creat"):
            path = _joined(files, texts[0])
            self._offsets[owner, result] = None if "O_APPEND" in arguments else 0
            if "O_CREAT" in arguments or "O_TRUNC" in arguments or name == "creat":
                self._open(path, arguments)
        elif name in ("write", "writev", "pwrite64", "lseek", "ftruncate", "fsync", "fdatasync", "fallocate"):
            descriptor, path, is_deleted = files[0]
            if name == "write" and path.endswith(ACKNOWLEDGED):
                self.events.append(("acknowledged", texts[0].decode(), len(self.changes)))
            elif (node := self._node(path)) is not None and not is_deleted:
                self._handle(node, (owner, int(descriptor)), name, arguments, (b"".join(texts), result, begun))
        else:
            self._name(name, files, texts, arguments)

    def _open(self, path: str, arguments: str) -> None:
        node = self._node(path)
        if node is None and self._is_inside(path):
            self._new(path[len(self._root) + 1 :], False)
        elif node is not None and "O_TRUNC" in arguments and self._content_of_live(node):
            self._change(Write(node, 0, None))

    def _handle(
        self, node: Node, owner: tuple[int, int], name: str, arguments: str, rest: tuple[bytes, int, int]
    ) -> None:
        data, result, begun = rest
        if name in ("fsync", "fdatasync"):
            self.events.append(("sync", node, begun))
        elif name == "lseek":
            if self._offsets.get(owner) is not None:  # else it appends wherever it stands
                self._offsets[owner] = result
        elif name == "ftruncate":
            self._change(Write(node, int(arguments.rpartition(", ")[2]), None))
        elif name in ("write", "writev"):
            offset = self._offsets.get(owner)
            at = len(self._content_of_live(node)) if offset is None else offset
            self._change(Write(node, at, data[:result]))
            if offset is not None:
                self._offsets[owner] = offset + result
        elif name == "pwrite64":
            self._change(Write(node, int(arguments.rpartition(", ")[2]), data[:result]))
        else:
            raise NotImplementedError(name)

    def _name(self, name: str, files: Sequence[tuple[str, str, str]], texts: Sequence[bytes], arguments: str) -> None:
        path = _joined(files[:1], texts[0]) if texts else files[0][1]
        if name.startswith("rename"):
            to = _joined(files[-1:], texts[1])
            if self._is_inside(path) or self._is_inside(to):
                (folder, old), (into, new) = self._place(path), self._place(to)
                self._change(Naming(((folder, old, None), (into, new, self._live[folder][old]))))
        elif self._is_inside(path):
            if name.startswith("mkdir"):
                self._new(path[len(self._root) + 1 :], True)
            elif name.startswith(("unlink", "rmdir")):
                self._change(Naming(((*self._place(path), None),)))
            else:
                raise NotImplementedError(f"{name}({arguments[:200]})")

    def _is_inside(self, path: str) -> bool:
        return path.startswith(self._root + "/")

    def _node(self, path: str) -> Node | None:
        if path != self._root and not self._is_inside(path):
            return None
        node: Node | None = self._top
        for name in path[len(self._root) + 1 :].split("/") if path != self._root else ():
            node = self._live.get(node, {}).get(name) if node is not None else None
        return node

    def _place(self, path: str) -> tuple[Node, str]:
        folder = self._node(str(Path(path).parent))
        assert folder is not None, path
        return folder, Path(path).name

    def _new(self, path: str, is_folder: bool) -> Node:
        node = Node(is_folder)
        self._change(Naming(((*self._place(f"{self._root}/{path}"), node),)))
        return node

    def _change(self, change: Write | Naming) -> None:
        self.events.append(("change", len(self.changes), len(self.changes)))
        self.changes.append(change)
        if isinstance(change, Naming):
            _rename(self._live, change)

    def _content_of_live(self, node: Node) -> bytes:
        of_it = [n for n, change in enumerate(self.changes) if isinstance(change, Write) and change.node is node]
        return self._content(node, tuple((n, WHOLE) for n in of_it))

    def _content(self, node: Node, parts: tuple[tuple[int, str], ...]) -> bytes:
        """A file of which these writes are on the disk."""
        key = (node, parts)
        if key not in self._contents:
            content = bytearray()
            for number, part in parts:
                change = self.changes[number]
                assert isinstance(change, Write)
                if change.data is None:
                    del content[change.offset :]
                data = (change.data or b"")[: len(change.data or b"") // 2 if part == HALF else None]
                content.extend(bytes(max(0, change.offset + len(data) - len(content))))
                if part != ZEROS:
                    content[change.offset : change.offset + len(data)] = data
            self._contents[key] = bytes(content)
        return self._contents[key]

    def tree(self, there: Mapping[int, str]) -> Tree:
        """The files and folders, if just these changes are on the disk."""
        names: Names = {self._top: {}}
        parts: dict[Node, list[tuple[int, str]]] = {}
        for number in sorted(there):
            change = self.changes[number]
            if isinstance(change, Naming):
                _rename(names, change)
            else:
                parts.setdefault(change.node, []).append((number, there[number]))
        found: Tree = {}

        def look(folder: Node, above: str) -> None:
            for name, node in names.get(folder, {}).items():
                found[above + name] = None if node.is_folder else self._content(node, tuple(parts.get(node, ())))
                look(node, f"{above}{name}/")

        look(self._top, "")
        return found

    def whole(self) -> Tree:
        """What is there if the machine does not crash."""
        return self.tree(dict.fromkeys(range(len(self.changes)), WHOLE))

    def states(self, randomly: int, every: int = 1, seed: int = 0) -> Iterator[State]:
        """Distinct states of a crash after each call (or every so many), ``randomly`` of them drawn at each.

        Of the changes that no sync has put on the disk: all, none, each alone, each missing or in part, random ones.
        """
        choose, seen = random.Random(seed), set()
        missing: dict[int, set[Node]] = {}  # of each change the nodes that have to be synced
        acknowledged, is_done = 0, False
        for position, (kind, what, begun) in enumerate(self.events):
            if kind == "change":
                missing[what] = set() if what < self._given else _needs(self.changes[what])
            elif kind == "sync":
                for number in range(begun):
                    missing[number].discard(what)
            elif what == "done":
                is_done = True
            else:
                acknowledged = int(what)
            if (kind == "change" and int(what) < self._given) or (position % every and kind != "acknowledged"):
                continue
            durable = {number: WHOLE for number, nodes in missing.items() if not nodes}
            pending = [number for number, nodes in missing.items() if nodes]
            for choice in self._choices(pending, choose, randomly):
                tree = self.tree({**durable, **choice})
                key = _key(tree)
                if (key, acknowledged, is_done) not in seen:
                    seen.add((key, acknowledged, is_done))
                    yield State(position, acknowledged, is_done, tree, key)

    def _choices(self, pending: Sequence[int], choose: random.Random, randomly: int) -> Iterator[dict[int, str]]:
        every = dict.fromkeys(pending, WHOLE)
        yield every
        if not pending:
            return
        yield {}
        for number in pending:
            yield {number: WHOLE}
            yield {n: WHOLE for n in pending if n != number}
            change = self.changes[number]
            if isinstance(change, Write) and change.data:
                yield {**every, number: HALF}
                yield {**every, number: ZEROS}
        for _ in range(randomly if len(pending) > 1 else 0):
            share = choose.choice((0.2, 0.5, 0.8))
            some = [n for n in pending if choose.random() < share]
            yield {n: choose.choice((WHOLE, WHOLE, HALF, ZEROS)) for n in some}


def _needs(change: Write | Naming) -> set[Node]:
    return {change.node} if isinstance(change, Write) else {folder for folder, _, _ in change.places}


def _rename(names: Names, change: Naming) -> None:
    for folder, name, node in change.places:
        if node is None:
            names.setdefault(folder, {}).pop(name, None)
        else:
            names.setdefault(folder, {})[name] = node


def _joined(files: Sequence[tuple[str, str, str]], path: bytes) -> str:
    return str(Path(files[0][1] if files else "/") / os.fsdecode(path))


def _key(tree: Tree) -> str:
    found = hashlib.sha256()
    for path, content in sorted(tree.items()):
        found.update(f"{path}/{'' if content is None else digest_of(content)}".encode())
    return found.hexdigest()


@lru_cache(None)
def digest_of(content: bytes) -> str:
    """SHA-256."""
    return hashlib.sha256(content).hexdigest()


def put(tree: Tree, folder: Path, pool: Path | None = None) -> None:
    """Makes ``tree`` in ``folder``; large files as links to those in ``pool``, which has to be next to it."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for path, content in sorted(tree.items()):
        if content is None:
            (folder / path).mkdir()
        elif pool is None or len(content) < SMALL or path.endswith(".jsonl"):
            (folder / path).write_bytes(content)
        else:
            if not (kept := pool / digest_of(content)).exists():
                kept.write_bytes(content)
            (folder / path).hardlink_to(kept)


def contents(folder: Path) -> Tree:
    """The tree that a folder holds."""
    return {str(p.relative_to(folder)): None if p.is_dir() else p.read_bytes() for p in folder.rglob("*")}


def _calls(trace: Path, owner: int) -> Iterator[tuple[float, bool, tuple[int, str], str, str, int]]:
    """Moment, whether it only begins, process and thread, name, arguments and result of each call."""
    deadline = time.monotonic() + 30
    while b"+++ exited" not in trace.read_bytes()[-200:]:  # strace writes to the end when the process has ended
        assert time.monotonic() < deadline, f"{trace} has no end"
        time.sleep(0.05)
    begun: dict[str, str] = {}
    for line in trace.read_text().splitlines():
        if (matched := _LINE.fullmatch(line)) is None:
            continue
        thread, moment, call = line.split(" ", 1)[0], float(matched["time"]), matched["call"]
        if call.endswith(" <unfinished ...>"):
            begun[thread] = call.removesuffix(" <unfinished ...>")
            name, _, arguments = begun[thread].partition("(")
            yield moment, True, (owner, thread), name, arguments, 0
        else:
            was_begun = (rest := _RESUMED.fullmatch(call)) is not None
            if was_begun:
                call = begun.pop(thread) + rest[1]
            if (matched := _CALL.match(call)) is not None:
                result = int(matched["result"])
                yield moment, False, (owner, thread), matched["name"], matched["arguments"], result
