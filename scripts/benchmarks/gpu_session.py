"""Half an hour on a card, spent in order of value: what only a card can show, in pieces that end within 8 minutes.

    bash scripts/gpu_session.sh                  # the pieces that fit into 8 minutes; run it again until it says done
    bash scripts/gpu_session.sh --dry_run        # the pieces, their limits, and what each needs
    bash scripts/gpu_session.sh wheels DIR       # downloads packages for a machine without a network, whose Python is
                                                 # TARGET_PYTHON (3.12); there --wheels DIR installs them

Each call starts where the last one stopped: figures, logs and what is done are kept in --folder, and copied after each
piece to the folder that the variable OUT names, as one archive, or else to docs/results/. Status 0: nothing is left;
85: something is; 1: a piece failed, which its log explains. --again PIECE repeats one.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.benchmarks import building, command_line, harness, rungs
from train.records import EXIT_DONE, EXIT_ERROR, EXIT_STOPPED

CAP_GIB = 24
"""The small card that a large one is held to."""
CLOSING_SECONDS = 50
"""What a piece that watches its time itself needs to end."""
BETWEEN_SECONDS = 5
RUNS = ("datasets", "evaluate", "dill", "multiprocess", "pandas", "pyarrow", "requests", "xxhash")
"""What whole runs need besides torch, transformers, accelerate and numpy."""
WHEELS = (
    *RUNS, "python-dateutil", "urllib3", "certifi", "charset-normalizer",
    "pytest", "iniconfig", "pluggy", "liger-kernel>=0.8,<0.9",
)  # fmt: skip
"""These, what they need, what the tests need, and a library of losses: 70 MB, of which pyarrow and pandas are 67.
Charts are left out."""
PLATFORMS = ("manylinux1", "manylinux2014", *(f"manylinux_2_{minor}" for minor in (17, 24, 27, 28, 34)))
LARGEST_BYTES = 8 * 2**20
"""A larger file of the folder is not copied."""
RESULTS = ("*.json", "*.jsonl", "*.md", "*.html", "*.log")
SWEEP = (
    "scripts/study.py", "sweep", "--lengths", "2048,8192,32768", "--micro_batch_sizes", "1,4", "--steps", "2",
    "--tokens_per_update", "32768",
    "--techniques", "chunked_loss,checkpointing+chunked_loss", "--seconds_per_cell", "20", "--tokenizer", "bytes",
    "--task", "causal_lm", "--mixed_precision", "{half}", "--stop_after_minutes", "{minutes}",
)  # fmt: skip


@dataclass(frozen=True)
class Options:
    """Runs the pieces that are not done yet."""

    minutes: float = 8
    """Of this call."""
    folder: Path = harness.ROOT / "runs" / "gpu_session"
    """Keeps figures, logs and what is done."""
    only: tuple[str, ...] = ()
    """Only these pieces."""
    again: tuple[str, ...] = ()
    """Forget that these pieces are done."""
    more: bool = False
    """Also what is left of pieces whose share of the half hour is spent."""
    wheels: Path | None = None
    """Install the wheels of this folder next to the figures first, for this program alone."""
    small: bool = False
    """The small equivalents that a CPU can run."""
    dry_run: bool = False
    """Only show the pieces."""


@dataclass(frozen=True)
class Download:
    """Downloads what the tests and whole runs need, for a machine without a network."""

    folder: Path
    """Of the wheels."""
    packages: tuple[str, ...] = ()
    """Further ones: bitsandbytes (43 MB) adds QLoRA and 8-bit optimizers."""

    def command(self) -> list[str]:
        """pip's, for x86-64 Linux; versions are those of constraints.txt."""
        return [
            *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"),
            *("--implementation", "cp", "--python-version", os.environ.get("TARGET_PYTHON", "3.12")),
            *(f"--platform={platform}_x86_64" for platform in PLATFORMS),
            *("--constraint", str(harness.ROOT / "constraints.txt"), "--dest", str(self.folder)),
            *(*WHEELS, *self.packages),
        ]


def install(wheels: Path, site: Path) -> None:
    """Installs ``wheels`` to ``site``, for this process and those that it starts."""
    found = [str(path) for path in sorted(wheels.glob("*.whl"))]
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--upgrade"]
    subprocess.run([*pip, "--target", str(site), *found], check=True)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])])
    sys.path[:] = [str(site), *(path for path in sys.path if not path.startswith(str(harness.STAND_INS)))]
    importlib.invalidate_caches()
    harness.stand_in_for_missing()


@dataclass(frozen=True)
class Piece:
    """One part of the half hour."""

    name: str
    what: str
    seconds: int
    """Its share of the half hour, over all calls."""
    words: tuple[str, ...]
    """What Python runs. {seconds}, {minutes}: what is left of the share; {folder}: where figures go; {card}: the
    card's name; {half}: bf16, or fp16 where it has none."""
    small: tuple[str, ...] | None = None
    """The same question asked of a CPU, in seconds; None: there is no such thing."""
    resumes: bool = False
    """Whether it watches its time and continues later, with status 85 where something is left."""
    least: int = 100
    """Seconds with which it gets somewhere, if it continues later."""
    packages: tuple[str, ...] = ()
    """What it needs besides torch, transformers, accelerate and numpy."""
    cap_gib: int | None = None
    """The memory that a larger card is held to."""
    if_held: tuple[str, ...] = ()
    """Further words where it is."""


def gpu_tests() -> tuple[str, ...]:
    """The test files that have tests for a card."""
    files = sorted((harness.ROOT / "tests").rglob("test_*.py"))
    marked = (path for path in files if "pytest.mark.gpu\n" in path.read_text(encoding="utf-8"))
    return tuple(str(path.relative_to(harness.ROOT)) for path in marked)


def script(name: str, *flags: str) -> tuple[str, ...]:
    """A benchmark that writes its figures to the session's folder."""
    return (f"scripts/benchmarks/{name}.py", "--write", "--output_dir", "{folder}", *flags)


def pieces() -> list[Piece]:
    """All of them, the most valuable first; those that end the list have no share of the half hour."""
    shape = json.dumps({**rungs.MODELS["0.5b"], "max_position_embeddings": 131072})
    pytest = ("-m", "pytest", "-p", "no:cacheprovider", "-m", "gpu")
    small_shape = json.dumps({"model_type": "llama", "hidden_size": 64, "intermediate_size": 96,
                              "num_hidden_layers": 2, "num_attention_heads": 2})  # fmt: skip
    sweep = (*SWEEP, "--budget_gib", str(CAP_GIB), "--limit_gib", str(CAP_GIB + 2), "--model_config", shape,
             "--output", f"{{folder}}/sweep-{{card}}-{CAP_GIB}gib")  # fmt: skip
    return [
        Piece("tests", "the tests that need a card", 80, (*pytest, *gpu_tests()),
              (*pytest, "--collect-only", "tests/memory/test_memory_kernels.py"), packages=("pytest", *RUNS)),
        Piece("attention", "which attention kernel torch takes, against the planner's", 30,
              script("attention_kernels"), script("attention_kernels", "--device", "t4")),
        Piece("check", "predicted against measured memory (scripts/gpu_check.sh)", 260,
              script("memory_accuracy", "--device", "cuda", "--budget_seconds", "{seconds}"),
              script("memory_accuracy", "--only", "opt causal_lm"), resumes=True),
        Piece("rungs", "0.5B at 131,072 tokens with each rung", 200,
              script("ladder", "--model", "0.5b", "--length", "131072", "--budget_seconds", "{seconds}"), resumes=True),
        Piece("runs", "killed and resumed, out of memory and split, snapshot", 300,
              script("real_runs", "--seconds", "150"), script("real_runs", "--model", "tiny"), resumes=True, least=250,
              packages=RUNS),
        Piece("trainer", "one sequence of 32,768 tokens, against transformers' Trainer", 185,
              script("long_sequence", "--length", "32768", "--vocab_size", "128256", "--hidden_size", "1024",
                     "--layers", "16", "--steps", "6", "--rounds", "1"),
              script("long_sequence", "--length", "256", "--vocab_size", "300", "--hidden_size", "64", "--layers", "2",
                     "--rounds", "1"), packages=RUNS),
        Piece("speed", "tokens per second and MFU of a 1B model", 200,
              script("ladder", "--model", "1b", "--no_search", "--budget_seconds", "{seconds}"), resumes=True),
        Piece("loss_kernels", "losses over a large vocabulary", 60, script("loss_kernels"),
              script("loss_kernels", "--tokens", "64", "--vocabulary", "300", "--hidden", "32", "--rounds", "1")),
        Piece("recompute", "recomputation, offload, tiles", 80, script("recompute"),
              script("recompute", "--length", "128", "--mlp_tokens", "256", "--rounds", "1")),
        Piece("optimizers", "optimizers: what they keep, how long they take", 80, script("optimizers"),
              script("optimizers", "--steps", "2")),
        Piece("ladder_24", f"the longest sequences on {CAP_GIB} GiB", 115,
              script("ladder", "--no_speed", "--budget_seconds", "{seconds}"), resumes=True, cap_gib=CAP_GIB,
              if_held=("--cap_gib", str(CAP_GIB))),
        Piece("sweep", f"length × micro-batch on {CAP_GIB} GiB, with its page", 210, sweep,
              ("scripts/study.py", "sweep", "--lengths", "32", "--micro_batch_sizes", "1", "--techniques", "baseline",
               "--model_config", small_shape, "--tokenizer", "bytes", "--output", "{folder}/sweep",
               "--budget_gib", "1", "--steps", "1"), resumes=True, cap_gib=CAP_GIB),
        Piece("qlora_24", f"the longest sequence of 8B by QLoRA on {CAP_GIB} GiB", 0,
              script("ladder", "--no_speed", "--model", "8b", "--rungs", "QLoRA instead",
                     "--budget_seconds", "{seconds}"),
              resumes=True, packages=("bitsandbytes",), cap_gib=CAP_GIB, if_held=("--cap_gib", str(CAP_GIB))),
        Piece("rungs_8b", "8B at 65,536 tokens with each rung", 0,
              script("ladder", "--model", "8b", "--length", "65536", "--budget_seconds", "{seconds}"), resumes=True),
        Piece("short", "sequences of 2,048 tokens, against transformers' Trainer: what launching kernels costs", 0,
              ("scripts/benchmarks/long_sequence.py", "--write", "--output_dir", "{folder}/short", "--length", "2048",
               "--vocab_size", "151936", "--hidden_size", "896", "--layers", "24", "--steps", "30", "--rounds", "1"),
              resumes=True, least=200, packages=RUNS),
        Piece("listops", "Long Range Arena's ListOps, 5,000 steps: its accuracy", 0,
              ("-m", "accelerate.commands.accelerate_cli", "launch", "train/main.py", "--config",
               "recipes/listops_lra.yaml", "--micro_batch_size", "32", "--gradient_checkpointing", "none",
               "--output_dir", "{folder}/listops-{card}"), resumes=True, least=300, packages=RUNS),
        Piece("ladder", "the longest sequences on the whole card, and speeds", 0,
              script("ladder", "--budget_seconds", "{seconds}"), resumes=True),
    ]  # fmt: skip


class Session:
    """What is done, kept from call to call.

    Args:
        run: as :func:`ended`.
        clock: seconds.
    """

    def __init__(self, options: Options, run: Any = None, clock: Any = time.perf_counter) -> None:
        self._options, self._run, self._clock, self._started = options, run or ended, clock, clock()
        self._path = options.folder / "session.json"
        self.done: dict[str, dict[str, Any]] = {}
        if self._path.exists():
            kept = json.loads(self._path.read_text(encoding="utf-8"))
            self.done = {name: row for name, row in kept.items() if name not in options.again}

    def left_seconds(self) -> float:
        """Of this call."""
        return 60 * self._options.minutes - (self._clock() - self._started) - BETWEEN_SECONDS

    def share_of(self, piece: Piece) -> float:
        """Seconds that ``piece`` may still take."""
        if self._options.more and piece.resumes:
            return float("inf")
        seconds = piece.seconds * (10 if self._options.small else 1)  # what takes seconds may take long on a busy CPU
        return seconds - self.done.get(piece.name, {}).get("seconds", 0.0)

    def obstacle(self, piece: Piece) -> str | None:
        """Why a piece is not run here; None: it is."""
        if self._options.small:
            return None if piece.small else "nothing like it on a CPU"
        missing = [name for name in piece.packages if importlib.util.find_spec(name) is None]
        missing += [name for name in piece.packages if is_stand_in(name)]
        if missing:
            return f"needs {', '.join(dict.fromkeys(missing))}, not installed"
        return None

    def is_finished(self, piece: Piece) -> bool:
        """Whether nothing of ``piece`` is left for a later call."""
        status = self.done.get(piece.name, {}).get("status")
        if "left_out" in self.done.get(piece.name, {}):  # what it lacked may be here now
            return False
        return status is not None and not (status == EXIT_STOPPED and self.share_of(piece) > CLOSING_SECONDS)

    def go(self, chosen: Sequence[Piece]) -> int:
        """Runs what fits into this call, in order; returns the exit status."""
        waiting = False
        for piece in chosen:
            if self.is_finished(piece) or (not piece.seconds and not self._options.more):
                continue
            if (why := self.obstacle(piece)) is not None:
                self._keep(piece, {"status": EXIT_DONE, "seconds": 0.0, "left_out": why})
                print(f"{piece.name}: left out, {why}", flush=True)
                continue
            seconds = min(self.share_of(piece), self.left_seconds())
            whole = min(self.share_of(piece), 60 * self._options.minutes - 30)
            if seconds < (min(piece.least, whole) if piece.resumes else whole):
                waiting = True
                continue
            self._piece(piece, seconds)
            waiting = waiting or not self.is_finished(piece)
        failed = [name for name, row in self.done.items() if row["status"] not in (EXIT_DONE, EXIT_STOPPED)]
        if failed:
            print(f"failed: {', '.join(failed)} (see their logs in {self._options.folder})", flush=True)
        status = harness.told(not waiting)
        return status if waiting or not failed else EXIT_ERROR

    def _piece(self, piece: Piece, seconds: float) -> None:
        """Runs one piece within ``seconds`` and keeps what came of it."""
        words = piece.small if self._options.small else piece.words
        inside = max(1, int(seconds) - CLOSING_SECONDS)
        given = {"seconds": str(inside), "minutes": f"{inside / 60:.2f}", "folder": str(self._options.folder)}
        harness.lead_processes_here()
        environment, held = dict(os.environ), ()
        if not self._options.small:
            given |= card()
            if piece.cap_gib is not None and float(given["gib"]) > piece.cap_gib + 1:
                environment[building.CAP], held = str(piece.cap_gib), piece.if_held
        command = [sys.executable, *(filled(word, given) for word in (*(words or ()), *held))]
        print(f"{piece.name}: {piece.what}, at most {seconds:.0f} s", flush=True)
        self._options.folder.mkdir(parents=True, exist_ok=True)
        started, log = self._clock(), self._options.folder / f"{piece.name}.log"
        with log.open("ab") as file:
            status = self._run(command, file, environment, seconds)
        if status is None:
            status = EXIT_STOPPED if piece.resumes else EXIT_ERROR
        spent = self._clock() - started
        before = self.done.get(piece.name, {}).get("seconds", 0.0)
        self._keep(piece, {"status": status, "seconds": round(before + spent, 1), "what": piece.what})
        words_of = {EXIT_DONE: "done", EXIT_STOPPED: "not finished"}
        print(f"{piece.name}: {words_of.get(status, f'FAILED with status {status}')} after {spent:.0f} s", flush=True)
        for line in log.read_text(encoding="utf-8", errors="replace").splitlines()[-12:] if status else ():
            print(f"    {line[:160]}", flush=True)

    def _keep(self, piece: Piece, row: dict[str, Any]) -> None:
        self.done[piece.name] = row
        harness.write_figures(self._path, self.done)
        publish(self._options.folder, is_result=not self._options.small)


def filled(word: str, given: dict[str, str]) -> str:
    """``word`` with the values of the names that stand in braces; other braces are JSON's."""
    for name, value in given.items():
        word = word.replace(f"{{{name}}}", value)
    return word


def is_stand_in(name: str) -> bool:
    """Whether the package is only one of ours that has its name."""
    spec = importlib.util.find_spec(name)
    return spec is not None and str(spec.origin).startswith(str(harness.STAND_INS))


@functools.cache
def card() -> dict[str, str]:
    """Name, memory (gib) and half-precision type of this machine's card; empty without one.

    Asked in a process of its own, so that this one takes nothing of the card.
    """
    asking = "import torch; p = torch.cuda.get_device_properties(0); print(p.name, p.total_memory, p.major, sep='|')"
    done = subprocess.run([sys.executable, "-c", asking], capture_output=True, text=True)
    if done.returncode:
        return {}
    name, total_bytes, major = done.stdout.strip().splitlines()[-1].split("|")
    half = "bf16" if int(major) >= 8 else "fp16"
    return {"card": harness.slug(name), "gib": str(int(total_bytes) / harness.GIB), "half": half}


def ended(command: Sequence[str], log: Any, environment: dict[str, str], seconds: float) -> int | None:
    """The exit status of ``command``; None: it took longer. Nothing of it is left on the card, whatever ends it."""
    process = subprocess.Popen(
        command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, cwd=harness.ROOT, env=environment,
        preexec_fn=os.setpgrp,  # a group, which ends together
    )  # fmt: skip
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def publish(folder: Path, is_result: bool = True) -> None:
    """Copies figures, pages and logs to OUT, as one archive, or without it figures and pages to docs/results/.

    Args:
        is_result: whether the figures belong among the results.
    """
    found = [path for pattern in RESULTS for path in folder.rglob(pattern) if path.stat().st_size <= LARGEST_BYTES]
    found = [path for path in found if "site" not in path.relative_to(folder).parts]
    if out := os.environ.get("OUT"):
        with tarfile.open(Path(out) / "gpu_session.tar.gz", "w:gz") as archive:
            for path in found:
                archive.add(path, Path("gpu_session") / path.relative_to(folder))
        return
    if is_result and folder.is_relative_to(harness.ROOT):
        for path in (path for path in found if path.suffix != ".log" and path.name != "session.json"):
            target = harness.RESULTS / path.relative_to(folder)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)


TABLE = harness.Table(("piece", "what it shows", "at most, s", "continues", "needs"), "llrll")


def shown(chosen: Sequence[Piece], options: Options) -> str:
    """The pieces and their limits."""
    rows = []
    for piece in chosen:
        needs = ", ".join(piece.packages) or "torch, transformers, accelerate"
        limit = str(piece.seconds) if piece.seconds else "with --more"
        rows.append((piece.name, piece.what, limit, "yes" if piece.resumes else "no", needs))
    total = sum(piece.seconds for piece in chosen)
    calls = -(-total // (60 * options.minutes))
    about = f"{total / 60:.0f} minutes in all, {options.minutes:g} a call: {calls:.0f} calls or more."
    return "\n".join([*TABLE.lines(rows), "", about])


def main() -> int:
    """Runs, or shows, the pieces."""
    building.use_expandable_segments()
    harness.prepare_environment()
    if sys.argv[1:2] == ["wheels"]:
        folder, *packages = sys.argv[2:] or ["wheels"]
        return subprocess.run(Download(Path(folder), tuple(packages)).command()).returncode
    options = command_line.read(Options, "gpu_session.sh", __doc__, sys.argv[1:])
    known = pieces()
    if unknown := {*options.only, *options.again} - {piece.name for piece in known}:
        print(f"error: no piece {', '.join(sorted(unknown))}. There are {', '.join(p.name for p in known)}.")
        return 2
    chosen = [piece for piece in known if not options.only or piece.name in options.only]
    if options.dry_run:
        print(shown(chosen, options))
        return EXIT_DONE
    if not options.small and not card():
        print("error: no CUDA device here. --small runs what a CPU can, --dry_run shows the pieces.", file=sys.stderr)
        return EXIT_ERROR
    if options.wheels is not None:
        install(options.wheels, options.folder / "site")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(EXIT_STOPPED))  # so that what runs on the card is ended, too
    return Session(options).go(chosen)


if __name__ == "__main__":
    raise SystemExit(main())
