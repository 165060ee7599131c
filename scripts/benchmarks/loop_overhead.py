"""What the template's loop costs beyond the arithmetic: its step against bare PyTorch's and transformers' Trainer's.

    python scripts/benchmarks/loop_overhead.py            # both workloads, under 6 minutes on two idle cores
    python scripts/benchmarks/loop_overhead.py --workload long --length 4096 --rounds 5

All three start from the same weights, see the same tokens in the same order and take the same steps: accumulation with
the loss divided by the targets of the whole step, clipping, fused AdamW with decay on matrices only, the same
activation checkpointing and precision. That they end at the same loss is checked. Bare PyTorch and Trainer read a
tensor in memory; the template reads an Arrow table through its own batching, and logs, as ``main.py`` wires it.

Each measurement is a process of its own, because Trainer resets the state that all Accelerators of a process share.
A round measures the three one after the other in random order; ratios are taken within a round.
"""

from __future__ import annotations

import contextlib
import io
import json
import multiprocessing
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

ROOT = Path(__file__).resolve().parent.parent.parent
if sys.path[0] != str(ROOT):  # run as a script: the template is the package beside scripts/
    sys.path.insert(0, str(ROOT))

from train.config import Config, from_values  # noqa: E402

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    import torch
    from torch import nn

LOG_EVERY_STEPS = 10
LEARNING_RATE = 1e-3
WEIGHT_DECAY = 0.1
MAX_GRAD_NORM = 1.0
LIBRARIES = ("torch", "transformers", "accelerate", "datasets", "evaluate")
TOLERANCE = {"no": 1e-3, "bf16": 3e-2, "fp16": 3e-2}
"""Largest relative difference of the final losses: sums are taken in another order, and steps amplify it."""


@dataclass(frozen=True)
class Workload:
    """One shape to measure: a byte-level Llama on artificial text."""

    name: str
    hidden_size: int
    layers: int
    length: int
    micro_batch_size: int
    accumulation: int
    gradient_checkpointing: str
    steps: int
    """Measured; a multiple of 10, so that all variants log equally often."""
    warmup_steps: int
    rounds: int
    mixed_precision: str = "no"
    cpu_threads: int | None = None
    seed: int = 42
    vocab_size: int = 259
    """259: bytes and three marks."""
    settings: tuple[tuple[str, Any], ...] = ()
    """Further settings of the template."""
    trainer_checkpoints: bool = False
    """Trainer is given its own gradient_checkpointing=True."""

    @property
    def total_steps(self) -> int:
        return self.warmup_steps + self.steps

    def __str__(self) -> str:
        precision = "fp32" if self.mixed_precision == "no" else self.mixed_precision
        return (
            f"hidden {self.hidden_size}, {self.layers} layers, {self.micro_batch_size} × {self.length} tokens × "
            f"{self.accumulation} accumulated, checkpointing {self.gradient_checkpointing}, {precision}"
        )


CPU_WORKLOADS = (
    Workload("short", 64, 2, 128, 1, 1, "none", steps=200, warmup_steps=20, rounds=9),
    Workload("long", 192, 2, 1024, 1, 2, "full", steps=10, warmup_steps=2, rounds=7),
)
GPU_WORKLOADS = (
    Workload("short", 64, 2, 128, 1, 1, "none", steps=200, warmup_steps=20, rounds=5),
    Workload("long", 1024, 16, 8192, 1, 4, "full", steps=20, warmup_steps=3, rounds=5),
)


@dataclass(frozen=True)
class Options:
    """Compares one training step of the template, bare PyTorch and transformers' Trainer."""

    workload: Literal["short", "long", "both"] = "both"
    """short: steps of a few milliseconds, nearly all of it overhead; long: steps of some hundred milliseconds."""
    hidden_size: int | None = None
    """A multiple of 64. This and the next flags change the shape of the chosen workloads."""
    layers: int | None = None
    length: int | None = None
    micro_batch_size: int | None = None
    accumulation: int | None = None
    gradient_checkpointing: Literal["none", "full", "selective"] | None = None
    steps: int | None = None
    """Measured steps of each variant and round."""
    warmup_steps: int | None = None
    rounds: int | None = None
    mixed_precision: Literal["auto", "no", "fp16", "bf16"] = "auto"
    """auto: bf16 where the accelerator has it, else fp16; fp32 on a CPU."""
    cpu_threads: int | None = None
    """Of every variant, on a CPU; default: one per core. 1 is steadier on a machine with other work."""
    seed: int = 42
    output_dir: Path = Path("docs/results")
    """loop_overhead-DEVICE.json and .md are written here."""


@dataclass(frozen=True)
class Measurement:
    """One variant, measured once."""

    seconds_per_step: float
    loss_before: float
    loss_after: float
    peak_bytes: int | None = None
    """CUDA: most bytes allocated by tensors; CPU: the same, only where the allocator was traced."""


class Clock:
    """The time from the end of the last warm-up step to the end of the last step, device included."""

    def __init__(self, load: Workload) -> None:
        self._load = load
        self._marks: dict[int, float] = {}

    def tick(self, step: int) -> None:
        """Called at the end of every step; waits for the device only where the measured part begins and ends."""
        if step in (self._load.warmup_steps, self._load.total_steps):
            synchronize()
            self._marks[step] = time.perf_counter()

    def seconds_per_step(self) -> float:
        """Mean of the measured steps."""
        return (self._marks[self._load.total_steps] - self._marks[self._load.warmup_steps]) / self._load.steps


@dataclass(frozen=True)
class Job:
    """What all variants are given."""

    load: Workload
    config: Config
    device: torch.device
    network: nn.Module
    tokens: torch.Tensor
    """(examples, length + 1), each example used once."""
    clock: Clock

    def ordered_tokens(self) -> torch.Tensor:
        """The examples in the order in which the template takes them."""
        import torch

        from train.batching import epoch_order

        return self.tokens[torch.from_numpy(epoch_order(len(self.tokens), self.load.seed, 0))]


def run_template(job: Job) -> None:
    """``fit`` with the parts that ``main.py`` gives it; evaluation and saving do nothing."""
    import datasets

    from train.batching import MapBatches, batch_arithmetic
    from train.extras.meter.throughput import model_flops_per_token
    from train.launch import Launch
    from train.loop import Goal, Parts, fit
    from train.loss import ModelWithLoss, choose_loss, place_of
    from train.optim import build_optimizer, peak_learning_rate
    from train.outputs import Outputs
    from train.records import Evaluation, Progress
    from train.runtime import DeviceMeter, StopRequest, start_runtime
    from train.step import optimizer_step
    from train.tasks import build_task

    load, config, clock = job.load, job.config, job.clock
    arithmetic = batch_arithmetic(load.micro_batch_size, load.accumulation, None, 1)
    runtime = start_runtime(config, Launch(), arithmetic.accumulation_steps)
    accelerator = runtime.accelerator
    outputs = Outputs(config, accelerator)
    columns = {"tokens": job.tokens.int().numpy(), "length": [load.length] * len(job.tokens)}
    batches = MapBatches(
        datasets.Dataset.from_dict(columns),
        partial(build_task(config.data).collate, pad_id=0),
        arithmetic,
        accelerator.process_index,
        load.seed,
        pin_memory=accelerator.device.type == "cuda",
    )
    place = place_of(job.network, accelerator.device, accelerator.mixed_precision)
    with_loss = ModelWithLoss(job.network, choose_loss(config.optimization.loss, job.network, place))
    model, optimizer = accelerator.prepare(with_loss, build_optimizer(job.network, config.optimization))

    def tick(step: int) -> None:
        clock.tick(step)
        outputs.tick(step)

    with StopRequest().listening() as stop:
        parts = Parts(
            launch=Launch(),
            accelerator=accelerator,
            model=model,
            optimizer=optimizer,
            batches=batches,
            meter=DeviceMeter(accelerator.device),
            stop=stop,
            step=optimizer_step,
            evaluate=lambda step: Evaluation("validation", step, {"loss": 0.0}),
            save=lambda progress, wait: None,
            restore=lambda step: None,
            report=outputs.record,
            tick=tick,
        )
        goal = Goal(
            total_steps=load.total_steps,
            peak_learning_rate=peak_learning_rate(config.optimization, arithmetic.global_batch_size),
            metric="loss",
            greater_is_better=False,
            flops_per_token=model_flops_per_token(job.network, load.length),
            peak_flops_per_second=runtime.peak_flops_per_second,
        )
        fit(parts, config, goal, Progress())
    outputs.close()


def run_bare(job: Job) -> None:
    """The same steps in plain PyTorch: nothing is logged, and nothing looks whether a gradient is finite."""
    import torch
    import torch.nn.functional as F
    from torch.utils.data import DataLoader, TensorDataset

    load, model = job.load, job.network.to(job.device).train()
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, fused=True)
    scaler = torch.amp.GradScaler(job.device.type, enabled=load.mixed_precision == "fp16")
    dtype = torch.float16 if load.mixed_precision == "fp16" else torch.bfloat16
    autocast = partial(torch.autocast, job.device.type, dtype=dtype, enabled=load.mixed_precision != "no")
    on_cuda = job.device.type == "cuda"
    loader = iter(DataLoader(TensorDataset(job.ordered_tokens()), batch_size=load.micro_batch_size, pin_memory=on_cuda))
    for step in range(1, load.total_steps + 1):
        window = [next(loader)[0] for _ in range(load.accumulation)]
        num_targets = sum(batch[:, 1:].numel() for batch in window)
        for batch in window:
            batch = batch.to(job.device, non_blocking=True)
            with autocast():
                logits = model(input_ids=batch[:, :-1]).logits
                loss = F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten(), reduction="sum")
            scaler.scale(loss / num_targets).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        job.clock.tick(step)


class InputsAndTargets:
    """Rows of (length + 1) tokens as Trainer wants them; ``shift_labels`` are the targets of each position."""

    def __init__(self, tokens: torch.Tensor) -> None:
        self._tokens = tokens

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = self._tokens[index]
        return {"input_ids": row[:-1], "labels": row[1:], "shift_labels": row[1:]}


def run_trainer(job: Job) -> None:
    """transformers' Trainer."""
    from torch.utils.data import SequentialSampler
    from transformers import Trainer, TrainerCallback, TrainingArguments

    load, clock = job.load, job.clock
    rows = InputsAndTargets(job.ordered_tokens())

    class InOrder(Trainer):
        def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
            return SequentialSampler(rows)

    class Ticks(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            clock.tick(state.global_step)

    arguments = TrainingArguments(
        output_dir=job.config.output.output_dir,
        gradient_checkpointing=load.trainer_checkpoints,
        per_device_train_batch_size=load.micro_batch_size,
        gradient_accumulation_steps=load.accumulation,
        max_steps=load.total_steps,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        weight_decay=WEIGHT_DECAY,
        max_grad_norm=MAX_GRAD_NORM,
        optim="adamw_torch_fused",
        bf16=load.mixed_precision == "bf16",
        fp16=load.mixed_precision == "fp16",
        use_cpu=job.device.type == "cpu",
        logging_steps=LOG_EVERY_STEPS,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        remove_unused_columns=False,
        dataloader_pin_memory=job.device.type == "cuda",
        seed=load.seed,
    )
    InOrder(job.network, arguments, train_dataset=rows, callbacks=[Ticks()]).train()  # pyright: ignore[reportArgumentType]


VARIANTS: dict[str, Callable[[Job], None]] = {"bare": run_bare, "template": run_template, "trainer": run_trainer}


def synchronize() -> None:
    """Waits for the accelerator, where there is one."""
    import torch

    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def configuration(load: Workload, output_dir: str) -> Config:
    """The template's own configuration of ``load``; model and optimizer settings hold for all variants."""
    return from_values(
        {
            "tokenizer": "bytes",
            "max_length": load.length,
            "model_config": {
                "model_type": "llama",
                "hidden_size": load.hidden_size,
                "intermediate_size": 11 * load.hidden_size // 4,
                "num_hidden_layers": load.layers,
                "num_attention_heads": load.hidden_size // 64,
                "num_key_value_heads": load.hidden_size // 64,
                "tie_word_embeddings": True,
                "vocab_size": load.vocab_size,
            },
            "attn_implementation": "sdpa",
            "gradient_checkpointing": load.gradient_checkpointing,
            "micro_batch_size": load.micro_batch_size,
            "gradient_accumulation_steps": load.accumulation,
            "max_steps": load.total_steps,
            "learning_rate": LEARNING_RATE,
            "lr_scheduler": "constant",
            "weight_decay": WEIGHT_DECAY,
            "max_grad_norm": MAX_GRAD_NORM,
            "mixed_precision": load.mixed_precision,
            "cpu_threads": load.cpu_threads,
            "seed": load.seed,
            "output_dir": output_dir,
            "log_every_steps": LOG_EVERY_STEPS,
            **dict(load.settings),
        }
    )


def artificial_tokens(load: Workload) -> torch.Tensor:
    """(examples, length + 1) sums of small random steps: text that is neither constant nor noise."""
    import torch

    generator = torch.Generator().manual_seed(load.seed)
    count = load.total_steps * load.accumulation * load.micro_batch_size
    return torch.randint(0, 8, (count, load.length + 1), generator=generator).cumsum(1) % (load.vocab_size - 3) + 3


def loss_of(network: nn.Module, tokens: torch.Tensor) -> float:
    """Loss per token on the beginning of an example."""
    import torch
    import torch.nn.functional as F

    some = tokens[:1, :257].to(next(network.parameters()).device)
    was_training = network.training
    with torch.no_grad():
        logits = network.eval()(input_ids=some[:, :-1]).logits
    network.train(was_training)
    return F.cross_entropy(logits.float().flatten(0, 1), some[:, 1:].flatten()).item()


def measure(variant: str, load: Workload, trace_memory: bool) -> Measurement:
    """Runs ``variant`` once, in this process; with ``trace_memory`` its times mean nothing."""
    import torch
    import transformers

    from train.model import build_model
    from train.runtime import set_cpu_threads, target_device
    from train.tokenization import load_tokenizer

    transformers.logging.set_verbosity_error()
    device = target_device()
    if device.type == "cpu":
        set_cpu_threads(load.cpu_threads)
    peaks: list[int] = []
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        config = configuration(load, folder)
        with traced_peak(peaks) if trace_memory and device.type == "cpu" else contextlib.nullcontext():
            torch.manual_seed(load.seed)
            network = build_model(config.architecture, "AutoModelForCausalLM", load_tokenizer("bytes", ()), load.length)
            job = Job(load, config, device, network, artificial_tokens(load), Clock(load))
            before = loss_of(network, job.tokens)
            VARIANTS[variant](job)
        after = loss_of(network, job.tokens)
    if device.type == "cuda":
        peaks.append(torch.cuda.max_memory_allocated())
    return Measurement(job.clock.seconds_per_step(), before, after, peaks[0] if peaks else None)


@contextlib.contextmanager
def traced_peak(peaks: list[int]) -> Iterator[None]:
    """Appends the most bytes that tensors held at once on the CPU, from the profiler's trace of its allocator."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        yield
    assert trace.profiler is not None
    results: Any = trace.profiler.kineto_results
    changes = [(event.start_ns(), event.nbytes()) for event in results.events() if event.name() == "[memory]"]
    held = peak = 0
    for _, change in sorted(changes, key=lambda pair: pair[0]):
        held += change
        peak = max(peak, held)
    peaks.append(peak)


def _answer(connection: Connection, variant: str, load: Workload, trace_memory: bool) -> None:
    connection.send(measure(variant, load, trace_memory))
    connection.close()


class Processes:
    """Starts each measurement in a fresh process."""

    def __init__(self, on_cpu: bool) -> None:
        # A server that has imported the libraries forks quickly; a CUDA context must not be forked.
        forking, fresh = multiprocessing.get_context("forkserver"), multiprocessing.get_context("spawn")
        self._context = forking if on_cpu else fresh
        if on_cpu:
            forking.set_forkserver_preload(
                ["torch", "datasets", "accelerate", "transformers.trainer", "transformers.models.llama.modeling_llama"]
            )

    def measure(self, variant: str, load: Workload, trace_memory: bool = False) -> Measurement:
        """The same as the function of that name.

        Raises:
            SystemExit: the process ended without a result; it has printed why.
        """
        receiver, sender = self._context.Pipe(duplex=False)
        process = self._context.Process(target=_answer, args=(sender, variant, load, trace_memory))
        process.start()
        sender.close()
        try:
            result = receiver.recv()
        except EOFError:
            raise SystemExit(f"{variant} ({load.name}) failed: its error stands above.") from None
        finally:
            process.join()
            receiver.close()
        return result


def chosen_workloads(options: Options, device_type: str, precision: str) -> list[Workload]:
    """The workloads of this device with the flags over them.

    Raises:
        SystemExit: a flag's value cannot work.
    """
    given = {name: value for name, value in asdict(options).items() if value is not None}
    fields = set(Options.__dataclass_fields__) & set(Workload.__dataclass_fields__) - {"mixed_precision"}
    changes = {name: value for name, value in given.items() if name in fields}
    too_small = [name for name, value in changes.items() if isinstance(value, int) and value < 1 and name != "seed"]
    if too_small or (options.hidden_size or 64) % 64:
        raise SystemExit("All numbers must be positive, and hidden_size a multiple of 64.")
    loads = GPU_WORKLOADS if device_type == "cuda" else CPU_WORKLOADS
    return [
        replace(load, mixed_precision=precision, **changes) for load in loads if options.workload in ("both", load.name)
    ]


def chosen_precision(asked: str, device: torch.device) -> str:
    """What the template would make of ``asked``."""
    import torch

    from train.runtime import resolve_precision

    if asked == "auto" and device.type == "cuda":
        asked = "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"
    return resolve_precision("no" if asked == "auto" else asked, device)[0]


def compare(load: Workload, processes: Processes) -> dict[str, Any]:
    """All rounds of ``load`` and what follows from them."""
    print(f"\n{load.name}: {load}", flush=True)
    order = random.Random(load.seed)
    rounds: list[dict[str, Measurement]] = []
    for number in range(load.rounds):
        names = order.sample(list(VARIANTS), len(VARIANTS))
        rounds.append({name: processes.measure(name, load) for name in names})
        times = ", ".join(f"{name} {rounds[-1][name].seconds_per_step * 1e3:.2f} ms" for name in VARIANTS)
        print(f"  round {number + 1} of {load.rounds}: {times}", flush=True)
    two_steps = replace(load, warmup_steps=1, steps=1)
    peaks = {name: rounds[0][name].peak_bytes for name in VARIANTS}
    for name in VARIANTS:
        peaks[name] = peaks[name] or processes.measure(name, two_steps, trace_memory=True).peak_bytes

    step_ms = {name: [r[name].seconds_per_step * 1e3 for r in rounds] for name in VARIANTS}
    losses = {name: [r[name].loss_after for r in rounds] for name in VARIANTS}
    references = losses["bare"]
    differences = [abs(a / b - 1) for own in losses.values() for a, b in zip(own, references, strict=True)]
    return {
        "workload": asdict(load),
        "step_ms": {name: spread(values) for name, values in step_ms.items()},
        "ratios": {
            f"{a}/{b}": spread([x / y for x, y in zip(step_ms[a], step_ms[b], strict=True)])
            for a, b in (("template", "bare"), ("trainer", "bare"), ("template", "trainer"))
        },
        "peak_bytes": peaks,
        "loss_before": rounds[0]["bare"].loss_before,
        "loss_after": {name: statistics.median(values) for name, values in losses.items()},
        "largest_loss_difference": max(differences),
        "equal_work": max(differences) <= TOLERANCE[load.mixed_precision],
        "rounds": [{name: r[name].seconds_per_step * 1e3 for name in r} for r in rounds],
    }


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median and quartiles."""
    low, _, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
    return {"median": statistics.median(values), "quartile_1": low, "quartile_3": high}


def seconds_of_help(times: int = 5) -> float:
    """Median wall time of ``train/main.py --help``."""
    seconds = []
    for _ in range(times):
        started = time.perf_counter()
        subprocess.run(
            [sys.executable, str(ROOT / "train" / "main.py"), "--help"], check=True, stdout=subprocess.DEVNULL
        )
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def seconds_of_imports(times: int = 3) -> dict[str, float]:
    """Median seconds that each library takes to import after the ones before it; those installed only."""
    code = (
        "import importlib, json, sys, time\n"
        "seconds = {}\n"
        f"for name in {LIBRARIES!r}:\n"
        "    started = time.perf_counter()\n"
        "    try:\n"
        "        importlib.import_module(name)\n"
        "    except ImportError:\n"
        "        continue\n"
        "    seconds[name] = time.perf_counter() - started\n"
        "print(json.dumps(seconds))\n"
    )
    runs = []
    for _ in range(times):
        done = subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.PIPE, text=True)
        runs.append(json.loads(done.stdout.splitlines()[-1]))
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]}


def table(results: Sequence[dict[str, Any]], memory_source: str) -> list[str]:
    """The figures as a markdown table."""
    lines = [
        f"| workload | variant | step, ms | against bare | template against it | peak memory, MiB ({memory_source}) |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
    ]
    for result in results:
        for name in VARIANTS:
            peak = result["peak_bytes"][name]
            cells = [
                result["workload"]["name"],
                name,
                f"{result['step_ms'][name]['median']:.2f}",
                shown_ratio(result["ratios"].get(f"{name}/bare")),
                shown_ratio(result["ratios"].get(f"template/{name}")),
                f"{peak / 2**20:.1f}" if peak else "",
            ]
            lines.append("| " + " | ".join(cells) + " |")
    return lines


def shown_ratio(ratio: dict[str, float] | None) -> str:
    """Median and quartiles of a ratio in a table's cell."""
    return "" if ratio is None else f"{ratio['median']:.3f} ({ratio['quartile_1']:.3f} to {ratio['quartile_3']:.3f})"


def notes(report: dict[str, Any]) -> list[str]:
    """What stands below the table: the checks, the workloads, start-up, machine and versions."""
    lines = []
    for result in report["results"]:
        load = Workload(**result["workload"])
        verdict = "equal work" if result["equal_work"] else "NOT EQUAL WORK, the times cannot be compared"
        ends = ", ".join(f"{name} {loss:.5f}" for name, loss in result["loss_after"].items())
        lines += [
            f"- {load.name}: {load}; {load.rounds} rounds of {load.steps} steps after {load.warmup_steps} to warm up.",
            f"- {load.name}: loss {result['loss_before']:.5f} before, after: {ends}; largest relative difference in a "
            f"round {result['largest_loss_difference']:.1e}: {verdict}.",
        ]
    imports = ", ".join(f"{name} {seconds:.2f}" for name, seconds in report["import_seconds"].items())
    machine, found = report["hardware"], report["versions"]
    gpus = f"{machine['gpu_count']} × {machine['gpus'][0]['name']}, " if machine["gpus"] else ""
    memory = f"{machine['memory_bytes'] / 2**30:.0f} GiB" if machine["memory_bytes"] else "unknown memory"
    return [
        *lines,
        f"- `train/main.py --help`: {report['help_seconds']:.2f} s. Imports, one after the other, s: {imports}.",
        f"- {gpus}{machine['cpu']}, {machine['cpu_cores']} cores, {memory}, {machine['platform']}; "
        + ", ".join(f"{name} {version}" for name, version in found.items())
        + f"; {report['date']}.",
    ]


def main() -> int:
    """Measures, prints and writes the results; status 1 where the variants did not do equal work."""
    import tyro

    options = tyro.cli(Options, prog="loop_overhead.py", description=__doc__)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's own lines
    # One device: Trainer would spread each batch over all that it sees.
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    # Imported only now: torch reads the environment, and --help should not wait for it.
    import torch

    from train.outputs_log import hardware, versions
    from train.runtime import target_device

    device = target_device()
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    name = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    processes = Processes(on_cpu=device.type == "cpu")
    loads = chosen_workloads(options, device.type, chosen_precision(options.mixed_precision, device))
    report: dict[str, Any] = {
        "date": datetime.now(timezone.utc).date().isoformat(),
        "device": name,
        "hardware": hardware(),
        "versions": versions(),
        "help_seconds": seconds_of_help(),
        "import_seconds": seconds_of_imports(),
        "memory_source": "CUDA allocator" if device.type == "cuda" else "CPU allocator, traced over 2 steps",
        "results": [compare(load, processes) for load in loads],
    }
    lines = table(report["results"], report["memory_source"])
    text = "\n".join(["# What the loop costs", "", *lines, "", *notes(report), ""])
    print("\n" + text)
    options.output_dir.mkdir(parents=True, exist_ok=True)
    as_json = json.dumps(report, indent=2) + "\n"
    (options.output_dir / f"loop_overhead-{name}.json").write_text(as_json, encoding="utf-8")
    (options.output_dir / f"loop_overhead-{name}.md").write_text(text, encoding="utf-8")
    return 0 if all(result["equal_work"] for result in report["results"]) else 1


if __name__ == "__main__":
    sys.exit(main())
