"""The ladder: the longest sequence that trains on one card, rung by rung.

    python scripts/benchmarks/ladder.py --device rtx-4090      # predicted, on any machine
    python scripts/benchmarks/ladder.py                        # measured, on the card of this machine, then resumed
                                                               # by the same command until nothing is left

Each rung adds one technique to those before it. The planner predicts the longest sequence that fits; on a card real
steps (forward, backward, update), each in a process of its own, then find the true one between what trained and what
ran out of memory. What was tried is kept in the results file, so a later call goes on. Without a card the predicted
ladder is printed, and labelled so.
"""

from __future__ import annotations

import json
import math
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).resolve().parent.parent.parent
if sys.path[0] != str(ROOT):  # run as a script: the template is the package beside scripts/
    sys.path.insert(0, str(ROOT))

from train.config import Config, from_values, to_values  # noqa: E402
from train.records import UserError  # noqa: E402
from train.extras.meter.throughput import mfu, model_flops_per_token, peak_flops_per_second  # noqa: E402
from train.launch import let_segments_grow  # noqa: E402
from train.memory.devices import Device, find_device, this_device  # noqa: E402
from train.memory.ladder import largest_fitting  # noqa: E402
from train.memory.plan import Outcome, Predictions, predicted  # noqa: E402
from train.memory.predict import Job, Predictor, job_from  # noqa: E402
from train.memory.question import Question, replace_length, target_of  # noqa: E402

MODELS: dict[str, dict[str, Any]] = {
    # The published shapes; nothing is downloaded.
    "0.5b": {"model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
             "num_attention_heads": 14, "num_key_value_heads": 2, "tie_word_embeddings": True, "vocab_size": 151936},
    "1b": {"model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
           "num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": True, "vocab_size": 128256},
    "8b": {"model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
           "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256},
}  # fmt: skip
NAMES = {"0.5b": "Qwen2.5-0.5B", "1b": "Llama-3.2-1B", "8b": "Llama-3.1-8B"}

OPTIMIZER = ("optimizer on the host", {"dtype": "bfloat16", "optimizer_offload": True})
TECHNIQUES: list[tuple[str, dict[str, Any]]] = [
    ("chunked loss", {"loss": "chunked"}),
    ("activation checkpointing", {"gradient_checkpointing": "full"}),
    ("checkpoints on the host", {"gradient_checkpointing_offload": True}),
    ("tiled MLP", {"tiled_mlp": True}),
]
NOTHING = {"loss": "full", "gradient_checkpointing": "none", "mixed_precision": "bf16"}
IN_BACKWARD = ("update in backward", {"optimizer_in_backward": True, "max_grad_norm": None})
QLORA = (
    "QLoRA instead",
    {
        "dtype": "bfloat16",
        "optimizer_offload": False,
        "optimizer_in_backward": False,
        "max_grad_norm": 1.0,
        "adapter": "qlora",
    },
)
LONGEST = 16 * 2**20
"""Tokens beyond which nobody is asked."""
HOST_MARGIN_BYTES = 8 * 2**30
"""Of host memory, for the process itself."""
CLOSE = 1.03
"""What trained and what did not may differ by this factor in the end."""
SPEED_LENGTHS = {"0.5b": (4096, 32768), "1b": (4096, 32768), "8b": (4096, 32768)}
TRAINER = "Trainer's default"


@dataclass(frozen=True)
class Options:
    """Finds the longest sequence that trains, rung by rung."""

    model: Literal["0.5b", "1b", "8b", "all"] = "all"
    device: str | None = None
    """A card to predict for, by name or size, such as rtx-4090 or 24GiB; default: measure on this machine's card."""
    budget_seconds: int = 420
    """No new measurement begins after this; the same command later goes on."""
    step_seconds: int = 200
    """A step that is predicted to take longer is not measured."""
    speed: bool = True
    """Also tokens per second and MFU at 4K and 32K tokens."""
    output_dir: Path = Path("docs/results")
    """ladder-DEVICE.json and .md, or ladder-predicted-DEVICE, are written here."""


@dataclass(frozen=True)
class Rung:
    """A model with all techniques up to one."""

    model: str
    name: str
    settings: dict[str, Any]

    @property
    def key(self) -> str:
        return f"{self.model}: {self.name}"


def rungs_of(model: str, with_qlora: bool = False) -> list[Rung]:
    """The ladder of ``model``; for 8B the optimizer leaves the card first, since nothing else makes it fit."""
    steps = [OPTIMIZER, *TECHNIQUES] if model == "8b" else [*TECHNIQUES, OPTIMIZER]
    steps += [IN_BACKWARD, QLORA] if with_qlora else [IN_BACKWARD]
    settings, rungs = dict(NOTHING), [Rung(model, "nothing", dict(NOTHING))]
    for name, added in steps:
        settings = {**settings, **added}
        rungs.append(Rung(model, name, settings))
    return rungs


def question_of(rung: Rung, device: Device, length: int) -> Question:
    """One sequence of ``length`` tokens with the settings of ``rung``."""
    values = {
        "model_config": dict(MODELS[rung.model]),
        "tokenizer": "bytes",
        "max_length": length,
        "micro_batch_size": 1,
        **rung.settings,
    }
    config = from_values({**to_values(Config()), **values})
    return Question(config, device, MODELS[rung.model]["vocab_size"])


def outcome_at(rung: Rung, device: Device, length: int, predictions: Predictions) -> Outcome:
    """What is predicted of a step with ``length`` tokens."""
    return predicted(question_of(rung, device, length), predictions)


def lengths_to_try() -> list[int]:
    """Multiples of 1,024, each about 1 % more than the one before it."""
    lengths = [1024]
    while lengths[-1] < LONGEST:
        lengths.append(max(lengths[-1] + 1024, int(lengths[-1] * 1.01) // 1024 * 1024))
    return lengths


def predicted_longest(rung: Rung, device: Device, predictions: Predictions, near: int = 8192) -> int:
    """The longest of :func:`lengths_to_try` that is predicted to fit; 0: not even the shortest.

    Args:
        near: where to begin.
    """

    def needs(length: int) -> int:
        return outcome_at(rung, device, length, predictions).needed_bytes

    room = question_of(rung, device, 1024).room_bytes
    lengths = lengths_to_try()
    return largest_fitting(lengths, needs, room, min(lengths, key=lambda length: abs(length - near))) or 0


# ---- predicted -------------------------------------------------------------------------------------------------------


def predicted_row(rung: Rung, device: Device, predictions: Predictions, near: int) -> dict[str, Any]:
    """The predicted figures of one rung."""
    longest = predicted_longest(rung, device, predictions, near)
    row: dict[str, Any] = {"model": rung.model, "rung": rung.name, "settings": rung.settings, "length": longest}
    outcome = outcome_at(rung, device, longest or 1024, predictions)
    row |= {
        "needed_bytes": outcome.needed_bytes,
        "peak_bytes": outcome.prediction.peak_bytes,
        "host_bytes": outcome.host_bytes,
        "bytes_by_kind": outcome.prediction.bytes_by_kind,
    }
    if longest and outcome.prediction.seconds:
        row["tokens_per_second"] = 1 / outcome.seconds_per_token
    return row


def predicted_ladder(options: Options, device: Device) -> list[dict[str, Any]]:
    """A row a rung, printed as it comes."""
    rows = []
    for model in chosen_models(options):
        with Predictor() as predictor:
            predictions = Predictions([predictor])
            near = 8192
            for rung in rungs_of(model, with_qlora=device.total_bytes < 48 * 2**30):
                try:
                    rows.append(predicted_row(rung, device, predictions, near))
                    near = rows[-1]["length"] or near
                except UserError as error:
                    rows.append({"model": model, "rung": rung.name, "settings": rung.settings, "error": str(error)})
                print(predicted_line(rows[-1]), flush=True)
    return rows


PREDICTED_HEAD = (
    "| model | rung, with those above it | longest, tokens | host memory, GiB | tokens/s, estimated |",
    "| --- | --- | ---: | ---: | ---: |",
)


def predicted_line(row: dict[str, Any]) -> str:
    """A row of the predicted ladder."""
    if "error" in row:
        return f"| {NAMES[row['model']]} | {row['rung']} | {row['error']} | | |"
    longest = f"{row['length']:,}" if row["length"] else f"none: {row['needed_bytes'] / 2**30:,.1f} GiB at 1,024"
    host = f"{row['host_bytes'] / 2**30:,.0f}" if row["host_bytes"] else ""
    speed = f"{row['tokens_per_second']:,.0f}" if "tokens_per_second" in row else ""
    return f"| {NAMES[row['model']]} | {row['rung']} | {longest} | {host} | {speed} |"


# ---- measured --------------------------------------------------------------------------------------------------------


class Results:
    """What was tried, kept in a file from call to call."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tries: list[dict[str, Any]] = []
        if path.exists():
            self.tries = json.loads(path.read_text(encoding="utf-8"))["tries"]

    def of(self, kind: str, key: str) -> list[dict[str, Any]]:
        """Tries of one rung."""
        return [row for row in self.tries if row["kind"] == kind and row["key"] == key]

    def add(self, row: dict[str, Any], about: dict[str, Any]) -> None:
        """Keeps ``row`` at once."""
        self.tries.append(row)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps({**about, "tries": self.tries}, indent=1) + "\n", encoding="utf-8")


def measure(job: Job, steps: int) -> dict[str, Any]:
    """Real steps of ``job`` in this process, after a short one: median seconds and, on a card, peak bytes."""
    import torch
    from accelerate import Accelerator

    from train.extras.activations.compilation import compile_layers
    from train.memory.building import build
    from train.memory.predict import random_batch
    from train.optim import step_function
    from train.runtime import resolve_precision

    config = from_values(job.values)
    torch.manual_seed(0)
    on_card = job.target.device_type == "cuda"
    device = torch.device(job.target.device_type)
    precision, _ = resolve_precision(config.optimization.mixed_precision or "no", device)
    accelerator = Accelerator(mixed_precision=precision, cpu=not on_card)
    with device:  # random weights of 8B would take minutes on a CPU
        model, optimizer, network = build(job, config.architecture, config, accelerator, initialised=True)
    if config.architecture.compile:
        compile_layers(network)
    make_step = step_function(config.optimization)
    flops = model_flops_per_token(network, job.length)
    short = random_batch(replace(job, length=min(job.length, 1024)), 1)
    make_step(accelerator, model, optimizer, [short], config.optimization)  # makes state, loads kernels
    batch = random_batch(job, job.micro_batch_size)
    if on_card:
        torch.cuda.reset_peak_memory_stats()
    seconds, norms = [], []
    for _ in range(steps):
        synchronize()
        began = time.perf_counter()
        norms.append(make_step(accelerator, model, optimizer, [batch], config.optimization).grad_norm)
        synchronize()
        seconds.append(time.perf_counter() - began)
    if not all(map(math.isfinite, norms)):
        raise SystemExit("a gradient was not finite: such a step is no measurement")
    per_second = job.micro_batch_size * job.length / statistics.median(seconds)
    row: dict[str, Any] = {"seconds": statistics.median(seconds), "tokens_per_second": per_second}
    if on_card:
        peak_rate = peak_flops_per_second(torch.cuda.get_device_name(), "bf16")
        row["mfu"] = mfu(per_second, flops, peak_rate)
        row["peak_bytes"] = torch.cuda.max_memory_allocated()
        row["reserved_bytes"] = torch.cuda.max_memory_reserved()
    return row


def free_host_bytes() -> int:
    """Host memory that a new process may take."""
    import psutil  # comes with accelerate

    return psutil.virtual_memory().available


def synchronize() -> None:
    """Waits for the accelerator, where there is one."""
    import torch

    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def measure_trainer(job: Job) -> dict[str, Any]:
    """Two steps of transformers' Trainer with its defaults and bf16, on the same model and length."""
    import tempfile

    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments

    fields = dict(job.values["model_config"])
    config = AutoConfig.for_model(fields.pop("model_type"), **{**fields, "max_position_embeddings": job.length})
    with torch.device("cuda"):
        network = AutoModelForCausalLM.from_config(config)
    rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(3, job.vocab_size, (2, job.length))]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder, per_device_train_batch_size=1, max_steps=2, bf16=True, report_to="none",
            save_strategy="no", disable_tqdm=True,
        )  # fmt: skip
        Trainer(network, arguments, train_dataset=rows).train()  # pyright: ignore[reportArgumentType]
    return {"peak_bytes": torch.cuda.max_memory_allocated(), "reserved_bytes": torch.cuda.max_memory_reserved()}


def tried_apart(job: Job, mode: str, timeout_seconds: float, steps: int = 1) -> dict[str, Any]:
    """:func:`measure` or :func:`measure_trainer` in a process of its own; ``outcome``: ok, oom, timeout or error."""
    words = [sys.executable, __file__, "--worker", mode, str(steps)]
    try:
        done = subprocess.run(
            words, input=json.dumps(asdict(job)), capture_output=True, text=True, timeout=timeout_seconds
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return {"outcome": "timeout"}
    if done.returncode == 0:
        return {"outcome": "ok", **json.loads(done.stdout.splitlines()[-1])}
    said = (done.stderr.strip().splitlines() or ["no message"])[-1][:300]
    ran_out = "OutOfMemoryError" in done.stderr or "out of memory" in done.stderr
    return {"outcome": "oom" if ran_out else "error", "message": said}


def work(mode: str, steps: int) -> None:
    """What the process of :func:`tried_apart` does."""
    job = job_from(json.loads(sys.stdin.read()))
    print(json.dumps(measure_trainer(job) if mode == "trainer" else measure(job, steps)))


def next_length(tries: Sequence[dict[str, Any]], guess: int) -> int | None:
    """What to try after ``tries``, beginning with ``guess``; None: the bracket is close enough, or there is nothing."""
    low = max((row["length"] for row in tries if row["outcome"] == "ok"), default=0)
    high = min((row["length"] for row in tries if row["outcome"] in ("oom", "host")), default=None)
    if high is None:
        length = guess if not low else math.ceil(low * 1.05 / 1024) * 1024
    elif not low:
        length = high * (97 if len(tries) < 2 else 80 if len(tries) < 4 else 50) // 100 // 1024 * 1024
    elif high <= low * CLOSE or high - low <= 1024:
        return None
    else:
        length = (low + high) // 2 // 1024 * 1024
    known = {row["length"] for row in tries}
    return length if length >= 1024 and length not in known else None


def measured_ladder(options: Options, device: Device, results: Results, about: dict[str, Any]) -> bool:
    """Tries until nothing is left or the time is over; whether nothing is left."""
    started = time.perf_counter()

    def is_late() -> bool:
        return time.perf_counter() - started > options.budget_seconds

    def give_up_seconds() -> float:
        return max(60.0, options.budget_seconds + 50 - (time.perf_counter() - started))

    for model in chosen_models(options):
        with Predictor() as predictor:
            predictions = Predictions([predictor])
            for rung in [Rung(model, TRAINER, dict(NOTHING)), *rungs_of(model)]:
                tries = results.of("longest", rung.key)
                if any(row["outcome"] in ("error", "slow", "does not fit") for row in tries):
                    continue
                if is_late():
                    return False
                guess = tries[0]["predicted_longest"] if tries else predicted_longest(rung, device, predictions)
                if guess == 0:
                    row = {"kind": "longest", "key": rung.key, "model": model, "rung": rung.name, "length": 1024}
                    results.add({**row, "outcome": "does not fit", "predicted_longest": 0}, about)
                    continue
                while (length := next_length(tries, guess)) is not None:
                    if is_late():
                        return False
                    outcome = outcome_at(rung, device, length, predictions)
                    row: dict[str, Any] = {"kind": "longest", "key": rung.key, "model": model, "rung": rung.name}
                    row |= {"length": length, "predicted_peak_bytes": outcome.prediction.peak_bytes}
                    row |= {"predicted_longest": guess, "predicted_host_bytes": outcome.host_bytes}
                    seconds = outcome.seconds_per_token * length
                    if outcome.host_bytes > free_host_bytes() - HOST_MARGIN_BYTES:
                        row |= {"outcome": "host", "free_host_bytes": free_host_bytes()}
                    elif seconds > options.step_seconds:
                        row |= {"outcome": "slow", "predicted_seconds": seconds}
                    else:
                        question = question_of(rung, device, length)
                        job = question.job(question.asked)
                        job = replace(job, target=target_of(device))
                        mode = "trainer" if rung.name == TRAINER else "template"
                        row |= tried_apart(job, mode, give_up_seconds())
                    results.add(row, about)
                    print(measured_line(row), flush=True)
                    tries = results.of("longest", rung.key)
                    if row["outcome"] in ("error", "slow", "timeout"):
                        break
            for length in SPEED_LENGTHS[model] if options.speed else ():
                for name, settings in speed_settings(model):
                    rung = Rung(model, name, settings)
                    if any(row["length"] == length for row in results.of("speed", rung.key)):
                        continue
                    if is_late():
                        return False
                    question = replace_length(question_of(rung, device, length), length)
                    outcome = predicted(question, predictions)
                    row = {"kind": "speed", "key": rung.key, "model": model, "rung": name, "length": length}
                    row |= {"predicted_peak_bytes": outcome.prediction.peak_bytes}
                    if not outcome.fits:
                        row["outcome"] = "does not fit"
                    else:
                        job = replace(question.job(question.asked), target=target_of(device))
                        row |= tried_apart(job, "template", give_up_seconds(), steps=7)
                    results.add(row, about)
                    print(measured_line(row), flush=True)
    return True


def speed_settings(model: str) -> list[tuple[str, dict[str, Any]]]:
    """What tokens per second are measured with."""
    first = OPTIMIZER[1] if model == "8b" else {}
    base = {**NOTHING, "loss": "auto", **first}
    return [
        ("fast", base),
        ("fast, compiled", {**base, "compile": True}),
        ("selective checkpointing", {**base, "gradient_checkpointing": "selective"}),
        ("full checkpointing", {**base, "gradient_checkpointing": "full"}),
    ]


MEASURED_HEAD = (
    "| model | rung, with those above it | tokens | outcome | step, s | tokens/s | MFU | peak, GiB | predicted |",
    "| --- | --- | ---: | --- | ---: | ---: | ---: | ---: | ---: |",
)


def measured_line(row: dict[str, Any]) -> str:
    """A row of what was tried."""

    def shown(name: str, form: str, scale: float = 1.0) -> str:
        return format(row[name] / scale, form) if row.get(name) is not None else ""

    outcome = row["outcome"]
    if outcome == "slow":
        outcome = f"not run: {row['predicted_seconds']:,.0f} s a step by estimate"
    elif outcome == "host":
        outcome = f"not run: {row['predicted_host_bytes'] / 2**30:,.0f} GiB of host memory"
    elif outcome == "error":
        outcome = f"error: {row['message']}"
    cells = [
        NAMES[row["model"]],
        row["rung"],
        f"{row['length']:,}",
        outcome,
        shown("seconds", ".2f"),
        shown("tokens_per_second", ",.0f"),
        shown("mfu", ".1%"),
        shown("peak_bytes", ".2f", 2**30),
        shown("predicted_peak_bytes", ".2f", 2**30),
    ]
    return "| " + " | ".join(cells) + " |"


def measured_table(results: Results) -> list[str]:
    """The longest that trained of each rung, and the speeds."""
    keys = list(dict.fromkeys(row["key"] for row in results.tries if row["kind"] == "longest"))
    best = []
    for key in keys:
        tries = results.of("longest", key)
        trained = [row for row in tries if row["outcome"] == "ok"]
        best.append(max(trained, key=lambda row: row["length"]) if trained else tries[-1])
    speeds = [row for row in results.tries if row["kind"] == "speed"]
    lines = ["## The longest sequence", "", *MEASURED_HEAD, *map(measured_line, best)]
    return [*lines, "", "## Speed", "", *MEASURED_HEAD, *map(measured_line, speeds)]


# ---- both ------------------------------------------------------------------------------------------------------------


def chosen_models(options: Options) -> list[str]:
    """The models asked for."""
    return list(MODELS) if options.model == "all" else [options.model]


def main() -> int:
    """Predicts or measures, prints and writes the results."""
    if sys.argv[1:2] == ["--worker"]:
        work(sys.argv[2], int(sys.argv[3]))
        return 0
    let_segments_grow()  # as a run does
    import tyro

    options = tyro.cli(Options, prog="ladder.py", description=__doc__)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch

    from train.outputs_log import hardware, versions

    about = {"date": datetime.now(timezone.utc).date().isoformat(), "hardware": hardware(), "versions": versions()}
    on_card = options.device is None and torch.cuda.is_available()
    if options.device is None and not on_card:
        print("No CUDA device here: the ladder is predicted, for an H200. --device names another card.", flush=True)
    try:
        device = this_device() if on_card else find_device(options.device or "h200")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_status
    name = re.sub(r"[^a-z0-9]+", "-", device.name.lower()).strip("-")
    options.output_dir.mkdir(parents=True, exist_ok=True)
    installed = ", ".join(f"{library} {version}" for library, version in about["versions"].items())
    if on_card:
        results = Results(options.output_dir / f"ladder-{name}.json")
        finished = measured_ladder(options, device, results, about)
        lines = [f"# The ladder, measured on {device.name}", "", *measured_table(results), ""]
        lines += [f"{about['hardware']['cpu']}, {about['hardware']['cpu_cores']} cores; {installed}; {about['date']}."]
        print("done" if finished else "time is over: the same command goes on from here", flush=True)
        path = options.output_dir / f"ladder-{name}.md"
    else:
        print("\n".join(PREDICTED_HEAD), flush=True)
        rows = predicted_ladder(options, device)
        path = options.output_dir / f"ladder-predicted-{name}.md"
        path.with_suffix(".json").write_text(json.dumps({**about, "device": name, "rows": rows}, indent=1) + "\n")
        lines = [
            f"# The ladder, predicted for {device.name}",
            "",
            f"Predicted, not measured: {device.total_bytes / 2**30:.1f} GiB of which "
            f"{question_of(rungs_of('1b')[0], device, 1024).room_bytes / 2**30:.1f} may be taken; one sequence, bf16 "
            "arithmetic. The longest is found to 1 %. Speeds are a roofline's estimate of forward and backward.",
            "",
            *PREDICTED_HEAD,
            *map(predicted_line, rows),
            "",
            f"{installed}; {about['date']}.",
        ]
    path.write_text("\n".join([*lines, ""]), encoding="utf-8")
    print(f"written to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
