"""How sequence length and micro-batch size trade against memory and speed, with and without each technique.

    python scripts/sweep.py --config recipes/quickstart.yaml --lengths 512,1024,2048,4096 --micro_batch_sizes 1,2,4
    python scripts/sweep.py --config recipe.yaml --techniques baseline,checkpointing+chunked_loss --budget_gib 24

Every optimizer step of a sweep has the same number of tokens: the accumulation makes up for smaller micro-batches, so
that all cells do the same work. A cell is the real step of the real model on random tokens, in a process of its own:
running out of memory costs one cell. Its memory is predicted first; on a CPU a cell that would need more than
--limit_gib is not run. Results are kept as they come, and a second call goes on where the first one stopped.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import math
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:  # run as a script: the template is the package beside scripts/
    sys.path.insert(0, str(ROOT))

from train.config import Config, Output, check, from_values, parse, to_values  # noqa: E402
from train.records import EXIT_DONE, UsageError, UserError  # noqa: E402
from train.memory.flags import numbers, positive, with_underscores  # noqa: E402
from train.memory.predict import Job, Prediction, Predictor, Target  # noqa: E402
from train.memory.sweep_page import (  # noqa: E402
    DOES_NOT_FIT,
    FAILED,
    LEFT_OUT,
    MEASURED,
    NOT_REACHED,
    OUT_OF_MEMORY,
    PREDICTED,
    Cell,
    Sweep,
    markdown,
    page,
)
from train.outputs_log import count, gib  # noqa: E402

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from accelerate.optimizer import AcceleratedOptimizer
    from torch import nn

PARTS: dict[str, dict[str, Any]] = {
    "baseline": {},
    "checkpointing": {"gradient_checkpointing": "full"},
    "selective": {"gradient_checkpointing": "selective"},
    "chunked_loss": {"loss": "chunked"},
    "bf16": {"mixed_precision": "bf16"},
}
"""What a technique changes; several are joined by +. Without one: no checkpointing, all logits at once, the recipe's
precision."""
DEFAULT_TECHNIQUES = "baseline,checkpointing,chunked_loss,checkpointing+chunked_loss"
LIMIT_SHARE = 0.6
"""Of the available memory: what a cell may take on a CPU by default. The rest is for Python, its libraries, and
others."""
FENCE = 1.25
"""Times the limit: where a CPU cell that needs more than was predicted is stopped by its own allocator."""
FRONTIER_SIZES = (*range(1, 9), *(quarters * 2**power for power in range(1, 8) for quarters in (5, 6, 7, 8)))
"""Micro-batch sizes that are asked whether they fit the budget: up to 1,024, four to each doubling."""
CELL_TIMEOUT = 10
"""Times --seconds_per_cell, and a minute: then a cell that does not end is ended."""


@dataclass(frozen=True)
class Request:
    """A command line, understood."""

    config: Config
    vocab_size: int
    num_labels: int
    lengths: tuple[int, ...]
    micro_batch_sizes: tuple[int, ...]
    techniques: dict[str, dict[str, Any]]
    """Changed settings by name."""
    tokens_per_update: int
    budget_bytes: int
    limit_bytes: int | None
    """None: a card, whose own limit is met without harm."""
    steps: int
    seconds_per_cell: float
    stop_after_seconds: float
    output: Path
    again: bool
    target: Target


@dataclass(frozen=True)
class Task:
    """One cell to measure."""

    technique: str
    job: Job
    accumulation_steps: int
    steps: int
    seconds: float
    fence_bytes: int | None
    """Beyond what the process holds before the model is built; on a CPU."""


def main(arguments: list[str] | None = None) -> int:
    """Runs the sweep of the command line and returns the exit status (see ``train.errors``)."""
    try:
        request = read_request(sys.argv[1:] if arguments is None else arguments)
        sweep = run(request)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_status
    except KeyboardInterrupt:
        print("stopped; the same command goes on from here", file=sys.stderr)
        return 130
    write(request.output, sweep)
    print(f"{request.output / 'index.html'} shows the result, sweep.md and sweep.json beside it hold the figures")
    return EXIT_DONE


# ---- the command line ------------------------------------------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}. {self.prog} --help lists the flags.")


def read_request(arguments: Sequence[str]) -> Request:
    """Splits the sweep's flags from those of the training command line and checks both.

    Raises:
        UsageError: what does not work, and what would.
        UserError: the vocabulary cannot be told.
    """
    own, words = _own_flags().parse_known_args(with_underscores(list(arguments)))
    techniques = {name: changes_of(name) for name in own.techniques}
    lengths, sizes = own.lengths, own.micro_batch_sizes
    if min(lengths) < 2:
        raise UsageError("--lengths: a sequence has at least 2 tokens.")
    config = replace(parse(words), output=Output())  # where and how often to write has no bearing on a step
    tokens = own.tokens_per_update or max(lengths) * max(sizes)
    if tokens < min(lengths) * min(sizes):
        raise UsageError(
            f"--tokens_per_update {tokens}: the smallest micro-batch has {min(lengths) * min(sizes):,} tokens already."
        )

    from train.memory.question import position_limit, vocabulary_size
    from train.tasks import TASKS, check_task

    check_task(config.data.task)
    limit = position_limit(config)
    if limit is not None and max(lengths) > limit:
        raise UsageError(
            f"--lengths: {max(lengths):,} is more than the model's {limit:,} positions: leave it out, or give a "
            "model_config with more max_position_embeddings."
        )
    classifies = TASKS[config.data.task] == TASKS["sequence_classification"]
    vocab_size = own.vocab_size or vocabulary_size(config)
    target = _target()
    limit_bytes = own.limit_gib and int(own.limit_gib * 2**30)
    if limit_bytes is None and target.device_type == "cpu":
        limit_bytes = int(LIMIT_SHARE * available_bytes())
    return Request(
        config=config,
        vocab_size=vocab_size,
        num_labels=own.num_labels if classifies else 0,
        lengths=lengths,
        micro_batch_sizes=sizes,
        techniques=techniques,
        tokens_per_update=tokens,
        budget_bytes=int(own.budget_gib * 2**30),
        limit_bytes=limit_bytes,
        steps=own.steps,
        seconds_per_cell=own.seconds_per_cell,
        stop_after_seconds=60 * own.stop_after_minutes,
        output=own.output,
        again=own.again,
        target=target,
    )


def _own_flags() -> _Parser:
    parser = _Parser(
        prog="scripts/sweep.py",
        usage="scripts/sweep.py --config RECIPE [flags below] [training flags]",
        description=__doc__,
        epilog="Every flag of the training command line may be given too (train/main.py --help). The data is not read.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )

    def add(name: str, **options: Any) -> None:
        parser.add_argument(f"--{name}", **options)

    add("lengths", metavar="N,N...", type=numbers, default="512,1024,2048,4096", help="tokens (default: %(default)s)")
    add("micro_batch_sizes", metavar="N,N...", type=numbers, default="1,2,4,8", help="(default: %(default)s)")
    add(
        "techniques",
        metavar="NAME,NAME...",
        type=_names,
        default=DEFAULT_TECHNIQUES,
        help=f"of {', '.join(PARTS)}, and several joined by + (default: %(default)s)",
    )
    add(
        "tokens_per_update",
        metavar="N",
        type=positive,
        help="tokens of one optimizer step; a micro-batch that does not divide them is left out (default: those of "
        "the largest micro-batch)",
    )
    add("budget_gib", metavar="GIB", type=_amount, default=8.0, help="memory to show what fits in (default: 8)")
    add(
        "limit_gib",
        metavar="GIB",
        type=_amount,
        help=f"run no cell that is predicted to need more (default: {100 * LIMIT_SHARE:.0f} %% of the available "
        "memory on a CPU, none on a GPU)",
    )
    add("steps", metavar="N", type=positive, default=3, help="timed steps of a cell (default: 3)")
    add("seconds_per_cell", metavar="S", type=_amount, default=30.0, help="take fewer steps beyond it (default: 30)")
    add("stop_after_minutes", metavar="M", type=_amount, default=math.inf, help="begin no further cell after it")
    add("vocab_size", metavar="N", type=positive, help="tokens of the vocabulary, where only the data tells")
    add("num_labels", metavar="N", type=positive, default=2, help="classes of a classifier (default: 2)")
    add("output", metavar="DIR", type=Path, default=Path("runs/sweep"), help="(default: %(default)s)")
    add("again", action="store_true", help="measure also what DIR holds already")
    return parser


def _names(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(part.strip() for part in text.split(",")))


def _amount(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < (value := float(text)) < math.inf:
            return value
    raise argparse.ArgumentTypeError(f"{text!r} is not a number above zero")


def changes_of(technique: str) -> dict[str, Any]:
    """The settings that a technique changes, by flag.

    Raises:
        UsageError: there is no such technique, or its parts exclude each other.
    """
    parts = technique.split("+")
    for part in parts:
        if part not in PARTS:
            raise UsageError(f"--techniques: {part!r} is none of {', '.join(PARTS)}; several are joined by +.")
    flags = [flag for part in parts for flag in PARTS[part]]
    if len(flags) != len(set(flags)):
        raise UsageError(f"--techniques: {technique}: its parts exclude each other.")
    changes: dict[str, Any] = {"gradient_checkpointing": "none", "loss": "full"}
    for part in parts:
        changes |= PARTS[part]
    if changes["gradient_checkpointing"] == "none":
        changes["gradient_checkpointing_every_n_layers"] = 1
    return changes


def _target() -> Target:
    """The device that a run would take here.

    Raises:
        UserError: its memory cannot be measured.
    """
    from train.memory.predict import this_target
    from train.runtime import target_device

    device = target_device()
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"memory on {device.type} cannot be measured here: set ACCELERATE_USE_CPU=true for the CPU.")
    return this_target() if device.type == "cuda" else Target("cpu")


def available_bytes() -> int:
    """Main memory that can be had without swapping, within the control group where that is smaller."""
    import psutil

    available = psutil.virtual_memory().available
    group = Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError, ValueError):  # another system, or no limit ("max")
        used = int((group / "memory.current").read_text())
        available = min(available, int((group / "memory.max").read_text()) - used)
    return available


# ---- cells -----------------------------------------------------------------------------------------------------------


def shapes(
    lengths: Sequence[int], micro_batch_sizes: Sequence[int], tokens_per_update: int
) -> Iterator[tuple[int, int, int, str | None]]:
    """(length, micro-batch size, accumulation, why it is left out or None) of the whole grid."""
    for length in lengths:
        for size in micro_batch_sizes:
            accumulation, rest = divmod(tokens_per_update, size * length)
            problem = None
            if not accumulation:
                problem = f"more than the {tokens_per_update:,} tokens of an update"
            elif rest:
                problem = f"{tokens_per_update:,} tokens of an update are no multiple of it"
            yield length, size, accumulation, problem


def job_for(request: Request, technique: str, length: int, size: int, accumulation: int) -> Job:
    """The step of one cell.

    Raises:
        UsageError: the technique does not go with the recipe.
    """
    from train.memory.question import job_of

    changes = {
        "max_length": length,
        "micro_batch_size": size,
        "gradient_accumulation_steps": accumulation,
        "global_batch_size": None,
    }
    config = from_values({**to_values(request.config), **request.techniques[technique], **changes})
    check(config)
    job = job_of(config, request.target, request.vocab_size, request.num_labels)
    return replace(job, eval_batch_size=None)


def key_of(job: Job, accumulation: int, steps: int, machine: dict[str, Any]) -> str:
    """Names what a result depends on: settings, versions and hardware."""
    text = json.dumps([asdict(job), accumulation, steps, machine], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:20]


class Results:
    """The cells known so far: a line of JSON each in ``cells.jsonl``, written as they come."""

    def __init__(self, folder: Path, again: bool = False) -> None:
        self._path = folder / "cells.jsonl"
        self._known: dict[str, Cell] = {}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if again:
                self._path.unlink(missing_ok=True)
            lines = self._path.read_text(encoding="utf-8").splitlines() if self._path.exists() else []
            self._file = self._path.open("a", encoding="utf-8")
        except OSError as error:
            raise UserError(f"{self._path}: {error.strerror or error}. Give another --output.") from None
        names = {field.name for field in fields(Cell)}
        for line in lines:
            with contextlib.suppress(ValueError, TypeError):  # cut off when an earlier run was killed
                values = json.loads(line)
                cell = Cell(**{name: value for name, value in values.items() if name in names})
                self._known[cell.key] = cell

    def of(self, key: str) -> Cell | None:
        """What is known under ``key``; failures are not, so that they are tried again."""
        cell = self._known.get(key)
        return None if cell is None or cell.status == FAILED else cell

    def add(self, cell: Cell) -> None:
        self._known[cell.key] = cell
        self._file.write(json.dumps(asdict(cell)) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def run(request: Request) -> Sweep:
    """Measures all cells that are not known yet, and predicts where memory ends.

    Raises:
        UserError: no cell at all could be measured or predicted.
    """
    from train.outputs_log import hardware, versions

    machine = {"hardware": hardware(), "versions": versions()}
    deadline = time.perf_counter() + request.stop_after_seconds
    results = Results(request.output, request.again)
    try:
        with Predictor() as predictor:
            cells = _grid(request, predictor, results, machine, deadline)
            if not any(cell.peak_bytes or cell.predicted_bytes for cell in cells):
                reasons = dict.fromkeys(cell.reason for cell in cells if cell.status == FAILED)
                raise UserError(f"no cell could be measured: {next(iter(reasons), None) or 'all were left out'}")
            cells += _beyond(request, predictor, results, machine, cells, deadline)
    finally:
        results.close()
    name = request.config.architecture.model or (request.config.architecture.model_config or {}).get("model_type")
    return Sweep(
        model=str(name),
        vocab_size=request.vocab_size,
        device_type=request.target.device_type,
        tokens_per_update=request.tokens_per_update,
        budget_bytes=request.budget_bytes,
        limit_bytes=request.limit_bytes,
        cells=tuple(cells),
        **machine,
    )


def _grid(
    request: Request, predictor: Predictor, results: Results, machine: dict[str, Any], deadline: float
) -> list[Cell]:
    """The cells of the grid. The next one is predicted while one is measured."""
    cells: list[Cell] = []
    open_cells: list[tuple[Cell, Job]] = []
    for length, size, accumulation, problem in shapes(
        request.lengths, request.micro_batch_sizes, request.tokens_per_update
    ):
        for technique in request.techniques:
            cell = Cell(technique, length, size, accumulation, LEFT_OUT, problem)
            if problem is None:
                job = job_for(request, technique, length, size, accumulation)
                cell = replace(cell, key=key_of(job, accumulation, request.steps, machine))
                known = results.of(cell.key)
                if known is None or _may_fit_now(known, request.limit_bytes):
                    open_cells.append((cell, job))
                    continue
                cell = known
            cells.append(cell)
    print(
        f"{len(open_cells)} cells to measure, {sum(c.status != LEFT_OUT for c in cells)} known, "
        f"{sum(c.status == LEFT_OUT for c in cells)} left out; {request.tokens_per_update:,} tokens per update",
        flush=True,
    )
    processes = Processes(on_cpu=request.target.device_type == "cpu")
    upcoming = iter(open_cells)
    asked = next(upcoming, None)
    if asked:
        predictor.ask(asked[1])
    number = 0
    while asked:
        cell, job = asked
        prediction = _answer_of(predictor)
        if time.perf_counter() > deadline:
            cells += [replace(c, status=NOT_REACHED, reason="no time") for c, _ in open_cells[number:]]
            break
        asked = next(upcoming, None)
        if asked:
            predictor.ask(asked[1])
        number += 1
        cell = _measured(request, cell, job, prediction, processes)
        results.add(cell)
        cells.append(cell)
        print(f"[{number}/{len(open_cells)}] {line(cell)}", flush=True)
    order = {technique: place for place, technique in enumerate(request.techniques)}
    return sorted(cells, key=lambda c: (order[c.technique], c.length, c.micro_batch_size))


def _may_fit_now(cell: Cell, limit_bytes: int | None) -> bool:
    """Whether a cell that was not run because of a limit would be run with this one."""
    if cell.status != DOES_NOT_FIT:
        return False
    return limit_bytes is None or (cell.predicted_bytes or 0) <= limit_bytes


def _answer_of(predictor: Predictor) -> Prediction | UserError:
    try:
        return predictor.answer()
    except UserError as error:
        return error


def _measured(request: Request, cell: Cell, job: Job, prediction: Prediction | UserError, processes: Processes) -> Cell:
    """``cell`` with what came of it."""
    predicted = None if isinstance(prediction, UserError) else prediction
    if predicted is not None:
        cell = replace(cell, predicted_bytes=predicted.peak_bytes, num_parameters=predicted.num_parameters)
        if request.limit_bytes is not None and predicted.peak_bytes > request.limit_bytes:
            reason = f"predicted to need more than the limit of {gib(request.limit_bytes)}: not run"
            return replace(cell, status=DOES_NOT_FIT, reason=reason)
    fence = None
    if request.target.device_type == "cpu" and request.limit_bytes is not None:
        fence = int(FENCE * request.limit_bytes)
    task = Task(cell.technique, job, cell.accumulation_steps, request.steps, request.seconds_per_cell, fence)
    values = processes.measure(task, 60 + CELL_TIMEOUT * request.seconds_per_cell)
    return replace(cell, **values)


def _beyond(
    request: Request,
    predictor: Predictor,
    results: Results,
    machine: dict[str, Any],
    cells: Sequence[Cell],
    deadline: float,
) -> list[Cell]:
    """Predictions for the largest micro-batch within the budget, of each technique and length, where accumulated."""
    from train.memory.ladder import largest_fitting

    found: list[Cell] = []

    def predicted(technique: str, length: int, size: int) -> Cell:
        job = job_for(request, technique, length, size, accumulation=2)
        key = key_of(job, 2, 0, machine)
        cell = results.of(key)
        if cell is None:
            cell = Cell(technique, length, size, 0, FAILED, key=key)
            try:
                prediction = predictor.predict(job)
                cell = replace(
                    cell,
                    status=PREDICTED,
                    predicted_bytes=prediction.peak_bytes,
                    num_parameters=prediction.num_parameters,
                )
            except UserError as error:
                cell = replace(cell, reason=str(error))
            results.add(cell)
        return cell

    for technique in request.techniques:
        for length in request.lengths:
            inside = {c.micro_batch_size: c for c in cells if (c.technique, c.length) == (technique, length)}
            if not any(c.needed_bytes for c in inside.values()) or time.perf_counter() > deadline:
                continue
            print(
                f"predicting what fits within {gib(request.budget_bytes)}: {technique}, {length:,} tokens", flush=True
            )

            def needs(
                size: int, technique: str = technique, length: int = length, inside: dict[int, Cell] = inside
            ) -> int | None:
                own = inside.get(size)
                if own is not None and own.needed_bytes is not None:
                    return None if own.status == OUT_OF_MEMORY else own.needed_bytes
                cell = predicted(technique, length, size)
                found.append(cell)
                return cell.predicted_bytes

            first = max(size for size, c in inside.items() if c.needed_bytes)
            largest_fitting(sorted({*FRONTIER_SIZES, *inside}), needs, request.budget_bytes, first)
    return [cell for cell in found if cell.status == PREDICTED]


def line(cell: Cell) -> str:
    """A cell for the terminal."""
    text = f"{cell.technique}: {cell.micro_batch_size} × {cell.length:,}"
    if cell.status != MEASURED or cell.peak_bytes is None:
        return f"{text}: {cell.status.replace('_', ' ')}: {cell.reason}"
    predicted = f", predicted {gib(cell.predicted_bytes)}" if cell.predicted_bytes else ""
    return f"{text}: {gib(cell.peak_bytes)}{predicted}, {count(cell.tokens_per_second or 0)} tokens/s"


# ---- one cell, in a process of its own -------------------------------------------------------------------------------


class Processes:
    """Starts each measurement in a fresh process."""

    def __init__(self, on_cpu: bool) -> None:
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler tells the terminal that it starts and stops
        # A server that has imported the libraries forks quickly; a CUDA context must not be forked.
        forking, fresh = multiprocessing.get_context("forkserver"), multiprocessing.get_context("spawn")
        self._context = forking if on_cpu else fresh
        if on_cpu:
            forking.set_forkserver_preload(
                ["torch.profiler", "accelerate", "transformers.modeling_utils", "train.step", "train.model"]
            )

    def measure(self, task: Task, timeout_seconds: float) -> dict[str, Any]:
        """Fields of the task's :class:`Cell`, whatever happens to the process."""
        receiver, sender = self._context.Pipe(duplex=False)
        process = self._context.Process(target=_answer, args=(sender, task), daemon=True)
        process.start()
        sender.close()
        try:
            if not receiver.poll(timeout_seconds):
                return {"status": FAILED, "reason": f"took longer than {timeout_seconds:.0f} s"}
            return receiver.recv()
        except EOFError:
            process.join()
            # behind a fence some libraries cannot even start a thread, and end the process without an exception
            status = OUT_OF_MEMORY if task.fence_bytes is not None else FAILED
            return {"status": status, "reason": f"its process ended with status {process.exitcode}"}
        finally:
            process.kill()
            process.join()
            receiver.close()


def _answer(connection: Connection, task: Task) -> None:
    from train.memory.oom import is_out_of_memory, parse_oom

    try:
        values = measure(task)
    except Exception as error:  # of any library: it costs this cell alone
        text = " ".join(str(error).split())[:300]
        if is_out_of_memory(error) or parse_oom(text) is not None:  # the builder has its own words around it
            values = {"status": OUT_OF_MEMORY, "reason": text}
        else:
            said = text if isinstance(error, UserError) else f"{type(error).__name__}: {text}"
            values = {"status": FAILED, "reason": said}
    connection.send(values)
    connection.close()


def measure(task: Task) -> dict[str, Any]:
    """The step of ``task`` for real, in this process: fields of a :class:`Cell`."""
    import torch

    from train.extras.meter.throughput import mfu, model_flops_per_token
    from train.launch import Launch
    from train.memory.building import build
    from train.memory.predict import random_batch
    from train.runtime import DeviceMeter, start_runtime
    from train.step import optimizer_step

    job, config = task.job, from_values(task.job.values)
    on_cuda = job.target.device_type == "cuda"
    if task.fence_bytes is not None:
        _fence(task.fence_bytes)
    runtime = start_runtime(config, Launch(), task.accumulation_steps)
    accelerator = runtime.accelerator
    torch.manual_seed(config.optimization.seed)
    model, optimizer, network = build(job, config.architecture, config, accelerator, initialised=True)
    window = [random_batch(job, job.micro_batch_size) for _ in range(task.accumulation_steps)]
    few = window[:2]  # with the second one gradients are there from its start: as much memory as with more

    def step(batches: Sequence[Any]) -> float:
        began = time.perf_counter()
        optimizer_step(accelerator, model, optimizer, batches, config.optimization)
        if on_cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - began

    began = time.perf_counter()
    step(few[:1])
    for _ in range(20):  # fp16 finds its scale first; without an update the optimizer has no state
        if not optimizer.step_was_skipped:
            break
        step(few[:1])
    if on_cuda:
        torch.cuda.reset_peak_memory_stats()
    seconds = [step(window)]
    while len(seconds) < task.steps and time.perf_counter() - began + seconds[-1] < task.seconds:
        seconds.append(step(window))
    held = DeviceMeter(accelerator.device).summary()["peak_allocated_bytes"]
    if on_cuda:
        peak, held = held, torch.cuda.max_memory_reserved()
    else:
        peak = _traced_peak_bytes(network, optimizer, lambda: step(few))
    tokens = job.micro_batch_size * job.length * task.accumulation_steps
    tokens_per_second = tokens / statistics.median(seconds)
    flops = model_flops_per_token(network, job.length)
    return {
        "status": MEASURED,
        "peak_bytes": peak,
        "held_bytes": held,
        "seconds_per_step": statistics.median(seconds),
        "steps": len(seconds),
        "tokens_per_second": tokens_per_second,
        "flops_per_second": flops and flops * tokens_per_second,
        "mfu": mfu(tokens_per_second, flops, runtime.peak_flops_per_second),
        "num_parameters": sum(parameter.numel() for parameter in network.parameters()),
        "precision": runtime.precision,
    }


def _fence(more_bytes: int) -> None:
    """Lets this process take ``more_bytes`` and no more: its allocator then fails, and no other process is killed."""
    with contextlib.suppress(ImportError, OSError, ValueError):  # elsewhere than on Linux the prediction has to do
        import resource

        status = Path("/proc/self/status").read_text(encoding="utf-8")
        now = next(int(row.split()[1]) * 1024 for row in status.splitlines() if row.startswith("VmData"))
        resource.setrlimit(resource.RLIMIT_DATA, (now + more_bytes, now + more_bytes))


def _traced_peak_bytes(network: nn.Module, optimizer: AcceleratedOptimizer, step: Any) -> int:
    """Most bytes that tensors hold during ``step`` on the CPU, from the events of torch's own allocator."""
    from torch.profiler import ProfilerActivity, profile

    state = [value for values in optimizer.optimizer.state.values() for value in values.values()]
    before = _storage_bytes([*network.parameters(), *network.buffers(), *state])
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        step()
    assert trace.profiler is not None
    results: Any = trace.profiler.kineto_results
    changes = [(event.start_ns(), event.nbytes()) for event in results.events() if event.name() == "[memory]"]
    live = peak = before
    for _, change in sorted(changes, key=lambda pair: pair[0]):
        live += change
        peak = max(peak, live)
    return peak


def _storage_bytes(values: Iterable[Any]) -> int:
    storages = {value.untyped_storage().data_ptr(): value for value in values if hasattr(value, "untyped_storage")}
    return sum(value.untyped_storage().nbytes() for value in storages.values())


# ---- the result ------------------------------------------------------------------------------------------------------


def write(folder: Path, sweep: Sweep) -> None:
    """``sweep.json``, ``sweep.md`` and ``index.html`` in ``folder``.

    Raises:
        UserError: the folder cannot be written.
    """
    texts = {
        "sweep.json": json.dumps(asdict(sweep), indent=1) + "\n",
        "sweep.md": markdown(sweep),
        "index.html": page(sweep),
    }
    for name, text in texts.items():
        try:
            (folder / name).write_text(text, encoding="utf-8")
        except OSError as error:
            raise UserError(f"{folder / name}: {error.strerror or error}. Give another --output.") from None


if __name__ == "__main__":
    raise SystemExit(main())
