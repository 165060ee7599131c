"""A training step four ways: the template's, bare PyTorch's, transformers' Trainer's, TRL's; each in its own process.

All start from the same weights, take the same tokens in the same order and make the same number of steps: accumulation
with the loss divided by the targets of the whole step, clipping, fused AdamW with decay on matrices only, and the same
precision. Bare PyTorch and Trainer read a tensor in memory; the template reads an Arrow table through its own batching,
and logs, as ``main.py`` wires it.

Each measurement is a process of its own, because Trainer resets the state that all Accelerators of a process share.
Processes may take turns of a few steps, so that whatever else the machine does falls on all alike.
"""

from __future__ import annotations

import contextlib
import io
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any

from scripts.benchmarks import building, harness, looping

if TYPE_CHECKING:
    import torch
    from torch import nn

    from train.config import Config

LEARNING_RATE = 1e-3
WEIGHT_DECAY = 0.1
MAX_GRAD_NORM = 1.0
TOLERANCE = {"no": 1e-3, "bf16": 3e-2, "fp16": 3e-2}
"""Largest relative difference of the final losses: sums are taken in another order, and steps amplify it."""
LIBRARIES = ["torch", "datasets", "accelerate", "transformers.trainer", "transformers.models.llama.modeling_llama"]


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
    """Measured; a multiple of ``turn_steps``."""
    warmup_steps: int
    rounds: int
    mixed_precision: str = "no"
    cpu_threads: int | None = None
    seed: int = 42
    vocab_size: int = 259
    """259: bytes and three marks."""
    settings: tuple[tuple[str, Any], ...] = ()
    """Further flags of the template."""
    trainer_checkpoints: bool = False
    """Trainer runs with gradient_checkpointing=True."""
    trainer_liger: bool = False
    """Trainer and TRL's run with use_liger_kernel=True, which fuses the loss with the head."""
    turn_steps: int = 10
    """Timed together, with one line of the log in each turn."""

    @property
    def total_steps(self) -> int:
        return self.warmup_steps + self.steps

    def __str__(self) -> str:
        precision = "fp32" if self.mixed_precision == "no" else self.mixed_precision
        return (
            f"hidden {self.hidden_size}, {self.layers} layers, {self.micro_batch_size} × {self.length} tokens × "
            f"{self.accumulation} accumulated, checkpointing {self.gradient_checkpointing}, {precision}"
        )


@dataclass(frozen=True)
class Measurement:
    """One variant, measured once."""

    turns: list[float]
    """Seconds per step of each turn."""
    loss_before: float
    loss_after: float
    peak_bytes: int | None = None
    """Most bytes that tensors held; on a CPU only if the allocator was traced, which takes time."""

    @property
    def seconds_per_step(self) -> float:
        """Mean of the measured steps."""
        return statistics.mean(self.turns)


class Clock:
    """The time of each turn of some steps after the warm-up, device included; between turns others may have theirs."""

    def __init__(self, load: Workload, take_turn: Callable[[], None]) -> None:
        self._load, self._take_turn, self._started = load, take_turn, 0.0
        self.turns: list[float] = []

    def tick(self, step: int) -> None:
        """Called at the end of every step; waits for the device only where a turn ends."""
        done = step - self._load.warmup_steps
        if done >= 0 and done % self._load.turn_steps == 0:
            harness.synchronize()
            if done:
                self.turns.append((time.perf_counter() - self._started) / self._load.turn_steps)
            self._take_turn()
            self._started = time.perf_counter()


@dataclass(frozen=True)
class Job:
    """The input of each variant."""

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

        return self.tokens[torch.from_numpy(building.example_order(len(self.tokens), self.load.seed))]


def run_template(job: Job) -> None:
    """The template's own loop."""
    looping.fit_network(job.network, job.config, job.tokens, job.clock.tick)


def run_bare(job: Job) -> None:
    """The steps in plain PyTorch, which logs nothing and does not check whether gradients are finite."""
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
    from transformers import Trainer, TrainingArguments

    rows = InputsAndTargets(job.ordered_tokens())

    class InOrder(Trainer):
        def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
            return SequentialSampler(rows)

    arguments = TrainingArguments(**trainer_settings(job), remove_unused_columns=False)
    InOrder(job.network, arguments, train_dataset=rows, callbacks=[ticks(job.clock)]).train()  # type: ignore


def run_trl(job: Job) -> None:
    """TRL's SFTTrainer (``pip install trl``), whose head takes 4,096 positions at a time and also gives accuracy and
    entropy. It shifts the labels itself, so it computes one position more."""
    from datasets import Dataset
    from torch.utils.data import SequentialSampler
    from trl import SFTConfig, SFTTrainer  # type: ignore

    from train.extras.readers.own_tokenizers import build_tokenizer

    rows = Dataset.from_dict({"input_ids": job.ordered_tokens().tolist()})

    class InOrder(SFTTrainer):
        def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
            return SequentialSampler(rows)

    arguments = SFTConfig(**trainer_settings(job), max_length=None)
    tokenizer = build_tokenizer("bytes", ())  # only pads here
    kwargs = {"args": arguments, "train_dataset": rows, "processing_class": tokenizer, "callbacks": [ticks(job.clock)]}
    InOrder(job.network, **kwargs).train()


def ticks(clock: Clock) -> Any:
    """A callback that tells ``clock`` of each step."""
    from transformers import TrainerCallback

    class Ticks(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            clock.tick(state.global_step)

    return Ticks()


def trainer_settings(job: Job) -> dict[str, Any]:
    """The arguments of Trainer, and of the trainers that derive from it."""
    load = job.load
    return {
        "output_dir": job.config.output.output_dir,
        "gradient_checkpointing": load.trainer_checkpoints,
        "use_liger_kernel": load.trainer_liger,
        "per_device_train_batch_size": load.micro_batch_size,
        "gradient_accumulation_steps": load.accumulation,
        "max_steps": load.total_steps,
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "weight_decay": WEIGHT_DECAY,
        "max_grad_norm": MAX_GRAD_NORM,
        "optim": "adamw_torch_fused",
        "bf16": load.mixed_precision == "bf16",
        "fp16": load.mixed_precision == "fp16",
        "use_cpu": job.device.type == "cpu",
        "logging_steps": load.turn_steps,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "dataloader_pin_memory": job.device.type == "cuda",
        "seed": load.seed,
    }


VARIANTS: dict[str, Callable[[Job], None]] = {"bare": run_bare, "template": run_template, "trainer": run_trainer}
"""Those of :meth:`Processes.measure_in_turns`."""
RUNS = VARIANTS | {"trl": run_trl}


def configuration(load: Workload, output_dir: str) -> Config:
    """The template's configuration of ``load``; model and optimizer are those of all variants."""
    return building.config_of(
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
            "log_every_steps": load.turn_steps,
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


def measure(take_turn: Callable[[], None], variant: str, load: Workload, trace_memory: bool = False) -> Measurement:
    """Runs ``variant`` once, in this process; with ``trace_memory`` its times mean nothing."""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    device = building.training_device()
    if device.type == "cpu":
        building.use_cpu_threads(load.cpu_threads)
    on_cuda = device.type == "cuda"
    traces = trace_memory and not on_cuda
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        # A run that measures its memory resets CUDA's peaks, which are read here, and follows operators on a CPU.
        config = configuration(load, folder).changed(measure_memory=not (trace_memory or on_cuda))
        with harness.traced_allocations() if traces else contextlib.nullcontext() as traced:
            torch.manual_seed(load.seed)
            network = building.causal_lm(config, load.length)
            job = Job(load, config, device, network, artificial_tokens(load), Clock(load, take_turn))
            before = loss_of(network, job.tokens)
            RUNS[variant](job)
        after = loss_of(network, job.tokens)
    peak = torch.cuda.max_memory_allocated() if on_cuda else traced.peak_bytes if traced else None
    return Measurement(job.clock.turns, before, after, peak)


class Processes(harness.Processes):
    """Measures each variant in a new process."""

    def __init__(self, on_cpu: bool) -> None:
        super().__init__(on_cpu, LIBRARIES)

    def measure(self, variant: str, load: Workload, trace_memory: bool = False) -> Measurement:
        """:func:`measure` in a process of its own.

        Raises:
            SystemExit: the process ended without a result; it has printed why.
        """
        try:
            return self.in_turns(measure, {variant: (variant, load, trace_memory)}, Random(load.seed))[variant]
        except harness.EndedError:
            raise SystemExit(f"{variant} ({load.name}) failed; its error is printed above.") from None

    def measure_in_turns(self, load: Workload, order: Random) -> dict[str, Measurement]:
        """All variants at once, each in a process of its own that computes while the others wait.

        Raises:
            SystemExit: as above.
        """
        try:
            return self.in_turns(measure, {variant: (variant, load) for variant in VARIANTS}, order)
        except harness.EndedError:
            raise SystemExit(f"A variant of {load.name} failed; its error is printed above.") from None

    def peak_bytes(self, variant: str, load: Workload, measurement: Measurement) -> int | None:
        """Of a measurement on a card, or else from a run of two steps with a traced allocator."""
        two_steps = replace(load, warmup_steps=1, steps=1, turn_steps=1)
        return measurement.peak_bytes or self.measure(variant, two_steps, trace_memory=True).peak_bytes
