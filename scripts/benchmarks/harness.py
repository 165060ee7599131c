"""What benchmarks share: the command line, paired rounds, processes of their own, memory peaks, results and pages.

A benchmark has a frozen subclass of :class:`Options`, a function that measures and returns figures in JSON's types, and
a ``page`` that makes Markdown from these figures alone, so that a page can be made again from a committed JSON file::

    def main() -> int:
        report(Options, __doc__, measured, page, name="saving")
        return 0

Nothing heavy is imported before the flags are read: ``--help`` answers at once.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import json
import multiprocessing
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from scripts.benchmarks import command_line

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    import torch
    from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "results"
STAND_INS = Path(__file__).parent / "stand_ins"
MIB, GIB = 2**20, 2**30
T = TypeVar("T")


# ---- command line, results, pages ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Options:
    """The flags of every benchmark."""

    write: bool = False
    """Write the figures (NAME-DEVICE.json) and their page (.md) to output_dir; without it they are only printed."""
    output_dir: Path = RESULTS
    page_of: Path | None = None
    """Measure nothing: write the page of this results file again, next to it."""


OptionsT = TypeVar("OptionsT", bound=Options)


def read_options(kind: type[OptionsT], description: str | None, arguments: Sequence[str] | None = None) -> OptionsT:
    """The flags of the command line, by the fields of the dataclass ``kind``; its docstrings are the help."""
    prepare_environment()
    lead_processes_here()
    return command_line.read(
        kind, Path(sys.argv[0]).name, description, sys.argv[1:] if arguments is None else arguments
    )


def report(
    kind: type[OptionsT],
    description: str | None,
    measure: Callable[[OptionsT], dict[str, Any]],
    page: Callable[[dict[str, Any]], str],
    name: str,
    by_device: bool = True,
) -> dict[str, Any]:
    """Reads the flags, measures, prints the page, writes it if asked to, and returns the figures.

    Args:
        measure: the figures; date, machine and versions are added to them.
        page: the Markdown page of such figures.
        name: of the files.
        by_device: the files' name ends with the device: ``name-cpu.json``.
    """
    options = read_options(kind, description)
    found = page_again(options, page)
    if found is None:
        found = {**about(), **measure(options)}
        finish(options, found, page, f"{name}-{device_slug(found)}" if by_device else name)
    return found


def page_again(options: Options, page: Callable[[dict[str, Any]], str]) -> dict[str, Any] | None:
    """The figures of ``--page_of``, whose page is written again; None without this flag."""
    if options.page_of is None:
        return None
    found = json.loads(options.page_of.read_text(encoding="utf-8"))
    write_page(options.page_of, page(found))
    return found


def finish(options: Options, found: dict[str, Any], page: Callable[[dict[str, Any]], str], name: str) -> None:
    """Prints the page of ``found``; with ``--write`` also writes figures and page under ``name``."""
    print("\n" + page(found))
    if options.write:
        path = options.output_dir / f"{name}.json"
        write_figures(path, found)
        write_page(path, page(found))


def exit_status(action: Callable[[], None]) -> int:
    """Does something that can be continued, and says what stops it; the status (see ``train.records``)."""
    from train.records import EXIT_DONE, EXIT_INTERRUPTED, UserError

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # else processes at work would outlive this one
    try:
        action()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_status
    except KeyboardInterrupt:
        print("stopped: run the same command again to continue", file=sys.stderr)
        return EXIT_INTERRUPTED
    return EXIT_DONE


def told(finished: bool) -> int:
    """The exit status of something that was ``finished``, or stopped because its time was up; prints which."""
    from train.records import EXIT_DONE, EXIT_STOPPED

    print("done" if finished else "time is up: run the same command again to continue", flush=True)
    return EXIT_DONE if finished else EXIT_STOPPED


def prepare_environment() -> None:
    """Sets what libraries read when they are imported: no network, quiet logs, one card."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the lines of torch's profiler
    # One card: transformers' Trainer would spread each batch over all that it sees.
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]


def lead_processes_here() -> None:
    """Has processes that this one starts import this checkout, whatever is installed."""
    first = [str(ROOT), *(path for path in sys.path if path.startswith(str(STAND_INS)))]
    known = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ["PYTHONPATH"] = os.pathsep.join([*first, *(path for path in known if path and path not in first)])


def stand_in_for_missing() -> None:
    """Lets names of packages be imported that no benchmark calls, where these are not installed."""
    for folder in sorted(STAND_INS.iterdir()):
        if importlib.util.find_spec(folder.name) is None:
            sys.path.append(str(folder))


stand_in_for_missing()  # before the modules that name them are imported


def write_figures(path: Path, found: Mapping[str, Any]) -> None:
    """Writes ``found`` as JSON to ``path``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def write_page(path: Path, text: str) -> None:
    """Writes the page of the results file ``path`` next to it."""
    path.with_suffix(".md").write_text(text, encoding="utf-8")
    print(f"written to {path.with_suffix('.md')}")


def about() -> dict[str, Any]:
    """Date, machine and versions of a measurement, as they are kept with its figures."""
    from train.extras.report.machine import hardware, versions

    return {"date": datetime.now(timezone.utc).date().isoformat(), "hardware": hardware(), "versions": versions()}


def cpu_of(found: Mapping[str, Any]) -> str:
    """The processor of a results file."""
    return f"{found['hardware']['cpu']}, {found['hardware']['cpu_cores']} cores"


def device_of(found: Mapping[str, Any]) -> str:
    """The first card of a results file, or its processor."""
    gpus = found["hardware"]["gpus"]
    return gpus[0]["name"] if gpus else cpu_of(found)


def device_slug(found: Mapping[str, Any]) -> str:
    """The device as part of a file's name: ``cpu`` or the card."""
    return slug(found["hardware"]["gpus"][0]["name"]) if found["hardware"]["gpus"] else "cpu"


def slug(name: str) -> str:
    """``name`` in lower case, with hyphens for everything but letters and digits."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def machine_line(found: Mapping[str, Any], place: str | None = None, names: Iterable[str] | None = None) -> str:
    """Hardware, versions and date of a results file in one line.

    Args:
        place: the hardware in words; default: :func:`device_of`.
        names: libraries to name; default: all.
    """
    used = ", ".join(f"{name} {found['versions'][name]}" for name in names or found["versions"])
    parts = [device_of(found) if place is None else place, used, found.get("date", "")]
    return "; ".join(part for part in parts if part)


@dataclass(frozen=True)
class Table:
    """A Markdown table: ``align`` has one letter for each title, l or r."""

    titles: Sequence[str]
    align: str

    def head(self) -> list[str]:
        """Titles and ruler."""
        if len(self.titles) != len(self.align):
            raise ValueError(f"{len(self.titles)} titles, {len(self.align)} alignments")
        titles = self.row(self.titles).replace("|  |", "| |")
        return [titles, self.row(["---:" if side == "r" else "---" for side in self.align])]

    def row(self, cells: Iterable[Any]) -> str:
        """One line."""
        return f"| {' | '.join(map(str, cells))} |"

    def lines(self, rows: Iterable[Iterable[Any]]) -> list[str]:
        """The whole table."""
        return [*self.head(), *map(self.row, rows)]


# ---- paired rounds ---------------------------------------------------------------------------------------------------


def paired_rounds(
    measures: Mapping[str, Callable[[], T]],
    rounds: int,
    announce: Callable[[int, dict[str, T]], None] | None = None,
    seed: int = 0,
) -> list[dict[str, T]]:
    """Measures everything once in each round, in random order, so that other load on the machine falls on all alike.

    Args:
        announce: called after each round with its number, from 1, and its results.
    """
    order = random.Random(seed)
    found: list[dict[str, T]] = []
    for number in range(1, rounds + 1):
        results = {name: measures[name]() for name in order.sample(list(measures), len(measures))}
        found.append({name: results[name] for name in measures})
        if announce is not None:
            announce(number, found[-1])
    return found


def ratios(rounds: Sequence[Mapping[str, float]], name: str, reference: str) -> list[float]:
    """``name`` over ``reference``, within each round."""
    return [results[name] / results[reference] for results in rounds]


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median and quartiles."""
    low, _, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
    return {"median": statistics.median(values), "quartile_1": low, "quartile_3": high}


def timed(step: Callable[[], Any]) -> float:
    """Seconds of ``step``, the accelerator's work included."""
    synchronize()
    started = time.perf_counter()
    step()
    synchronize()
    return time.perf_counter() - started


def synchronize() -> None:
    """Waits for the accelerator, if there is one."""
    import torch

    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


# ---- memory ----------------------------------------------------------------------------------------------------------


def peak_bytes(step: Callable[[], Any], held: Mapping[str, Iterable[Tensor]], device: torch.device) -> tuple[int, int]:
    """Bytes of tensors (before, at most during) ``step``.

    On CUDA the allocator counts all tensors; on a CPU the storage tracker counts ``held``, by kind, and what the step
    makes.
    """
    gc.collect()
    if device.type == "cuda":
        import torch

        synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        synchronize()
        return before, torch.cuda.max_memory_allocated()
    from train.extras.meter.tracker import StorageTracker

    with StorageTracker("cpu") as tracker:
        for kind, tensors in held.items():
            tracker.tag(kind, tensors)
        before = tracker.live_bytes
        tracker.reset_peak()
        step()
        return before, tracker.peak.num_bytes


@dataclass
class Traced:
    """Filled when the block of :func:`traced_allocations` ends."""

    peak_bytes: int = 0


@contextlib.contextmanager
def traced_allocations(held_bytes: int = 0) -> Iterator[Traced]:
    """Most bytes that tensors hold on the CPU during the block, from the events of torch's own allocator.

    Args:
        held_bytes: what is held when the block begins.
    """
    from torch.profiler import ProfilerActivity, profile

    traced = Traced()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        yield traced
    assert trace.profiler is not None
    results: Any = trace.profiler.kineto_results
    changes = [(event.start_ns(), event.nbytes()) for event in results.events() if event.name() == "[memory]"]
    live = traced.peak_bytes = held_bytes
    for _, change in sorted(changes, key=lambda pair: pair[0]):
        live += change
        traced.peak_bytes = max(traced.peak_bytes, live)


# ---- processes -------------------------------------------------------------------------------------------------------


def apart(arguments: Sequence[str], question: Any, timeout_seconds: float) -> dict[str, Any]:
    """Runs Python with ``arguments``, a script that reads ``question`` as JSON and prints its answer last.

    Returns:
        ``outcome`` ok with the fields of the answer; or oom, error (with ``message``) or timeout.
    """
    lead_processes_here()
    try:
        done = subprocess.run(
            [sys.executable, *arguments],
            input=json.dumps(question),
            capture_output=True,
            text=True,
            timeout=timeout_seconds,
        )
    except subprocess.TimeoutExpired:
        return {"outcome": "timeout"}
    if done.returncode == 0:
        return {"outcome": "ok", **json.loads(done.stdout.splitlines()[-1])}
    said = (done.stderr.strip().splitlines() or ["no message"])[-1][:300]
    ran_out = "OutOfMemoryError" in done.stderr or "out of memory" in done.stderr
    return {"outcome": "oom" if ran_out else "error", "message": said}


class EndedError(Exception):
    """A process ended without an answer; the argument is its exit status."""


@dataclass
class Processes:
    """Calls functions in processes of their own, each in a new one.

    Args:
        on_cpu: fork them from a server that has imported the libraries; a CUDA context must not be forked.
        libraries: what the server imports.
    """

    on_cpu: bool
    libraries: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        lead_processes_here()
        forking, fresh = multiprocessing.get_context("forkserver"), multiprocessing.get_context("spawn")
        self._context = forking if self.on_cpu else fresh
        if self.on_cpu:
            forking.set_forkserver_preload(self.libraries)

    def call(self, function: Callable[..., T], *arguments: Any, timeout_seconds: float | None = None) -> T:
        """``function(*arguments)``; both must pickle.

        Raises:
            TimeoutError: no answer within ``timeout_seconds``; the process is ended.
            EndedError: the process ended without an answer; it has printed why.
        """
        receiver, sender = self._context.Pipe(duplex=False)
        process = self._context.Process(target=_answer, args=(sender, function, arguments), daemon=True)
        process.start()
        sender.close()
        try:
            if not receiver.poll(timeout_seconds):
                raise TimeoutError(f"took longer than {timeout_seconds:.0f} s")
            return receiver.recv()
        except EOFError:
            process.join()
            raise EndedError(process.exitcode) from None
        finally:
            process.kill()
            process.join()
            receiver.close()

    def in_turns(
        self, function: Callable[..., T], arguments: Mapping[str, tuple[Any, ...]], order: random.Random
    ) -> dict[str, T]:
        """``function(take_turn, *arguments)`` of each name in a process of its own, of which only one ever works.

        It waits for its turn where it calls ``take_turn()``, and before it begins; all have one in each round, in
        random ``order``.

        Raises:
            EndedError: as above.
        """
        processes, found = dict[str, tuple[Any, Any]](), dict[str, T]()
        process: Any = None
        try:
            for name, own in arguments.items():
                connection, other = self._context.Pipe()
                process = self._context.Process(target=_answer_in_turns, args=(other, function, own), daemon=True)
                process.start()
                other.close()
                processes[name] = process, connection
            while waiting := [name for name in arguments if name not in found]:
                for name in order.sample(waiting, len(waiting)):
                    process, connection = processes[name]
                    connection.send(None)
                    if (answer := connection.recv()) is not None:
                        found[name] = answer
            return {name: found[name] for name in arguments}
        except (EOFError, BrokenPipeError):
            process.join()
            raise EndedError(process.exitcode) from None
        finally:
            for process, connection in processes.values():
                process.kill()
                process.join()
                connection.close()


def _answer_in_turns(connection: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    def take_turn() -> None:
        connection.send(None)
        connection.recv()

    connection.recv()
    connection.send(function(take_turn, *arguments))
    connection.close()


def _answer(connection: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    connection.send(function(*arguments))
    connection.close()
