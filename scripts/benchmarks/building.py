"""Models, optimizers, micro-batches and steps for benchmarks: the one place where they call the template's core.

Only ``looping.py``, which runs the whole loop, calls it, too. Imports stand in the functions, because benchmarks read
their flags before torch is loaded.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import torch
    from accelerate import Accelerator
    from torch import Tensor, nn

    from train.config import Config
    from train.launch import Launch
    from train.memory.devices import Device
    from train.memory.predict import Job, Target
    from train.records import MicroBatch, Run, StepOutcome
    from train.step import Engine

    Loss = Callable[[Tensor, Tensor, None, Tensor], Tensor]
    """(hidden, weight, bias, labels) -> sum of the token losses."""

RECOMPUTED = "chunked, recomputed"
CAP = "BENCHMARK_CAP_GIB"
"""Environment variable: the memory in GiB of the smaller card that this one stands for."""


def config_of(values: Mapping[str, Any]) -> Config:
    """The template's defaults with ``values`` (flags) over them."""
    from train.config import from_values

    return from_values(dict(values))


def parsed_config(words: Sequence[str]) -> Config:
    """The configuration of a training command line, without its outputs, which have no effect on a step.

    Raises:
        UsageError: a flag is unknown or has a value that cannot work.
    """
    from train.config import Output, parse

    return replace(parse(list(words)), output=Output())


def texts_of_functions(*texts: str) -> list[str]:
    """The sources of the functions that ``texts`` name as module:function or file.py:function, from this folder."""
    names = re.findall(r"([^\s=:'\"]+):[^\W\d]\w*", "\n".join(texts))
    files = [Path(name if name.endswith(".py") else name.replace(".", "/") + ".py") for name in names]
    return [file.read_text(encoding="utf-8") for file in files if file.is_file()]


def changed_config(config: Config, changes: Mapping[str, Any]) -> Config:
    """``config`` with other values for some flags.

    Raises:
        UsageError: they cannot work together.
    """
    from train.config import check

    changed = config.changed(**changes)
    check(changed)
    return changed


def global_batch_of(config: Config) -> int:
    """Examples of an optimizer step of one process."""
    from train.records import arithmetic_of

    return arithmetic_of(config, 1).global_batch_size


def accumulation_of(config: Config) -> int:
    """Micro-batches of an optimizer step of one process."""
    from train.records import arithmetic_of

    return arithmetic_of(config, 1).accumulation_steps


def is_classifier(config: Config) -> bool:
    """Whether the task of ``config`` has classes of its own, not those of a vocabulary.

    Raises:
        UsageError: there is no such task.
    """
    from train.tasks import load_task

    return load_task(config.data.task).labelled


def greater_is_better(config: Config, metric: str) -> bool | None:
    """Whether a greater value of ``metric`` is better, as far as the flags or the task of ``config`` say it."""
    from train.tasks import load_task

    asked, task = config.get("greater_is_better"), load_task(config.data.task)
    return task.greater_is_better if asked is None and metric == task.default_metric else asked


def use_expandable_segments() -> None:
    """Sets torch's CUDA allocator as a run does; call it before torch is imported."""
    from train import memory

    memory.use_expandable_segments()


# ---- devices ---------------------------------------------------------------------------------------------------------


def training_device() -> torch.device:
    """The device that a run would take here."""
    from train.launch import target_device

    return target_device()


def held_to(device: Device, cap_gib: float) -> Device:
    """``device`` with the memory of a smaller card.

    Raises:
        UsageError: it has less, or that is too little for the driver alone.
    """
    from train.records import UsageError

    cap_bytes = int(cap_gib * 2**30)
    if not device.context_bytes < cap_bytes < device.total_bytes:
        most = device.total_bytes / 2**30
        raise UsageError(f"--cap_gib {cap_gib:g}: give GiB above one and below the {most:.1f} GiB of {device.name}.")
    return replace(device, name=f"{device.name}, held to {cap_gib:g} GiB", total_bytes=cap_bytes)


def hold_card() -> None:
    """Holds this process to the card that ``CAP`` in the environment says: with its context it fills no more.

    To be called in each process that measures, before it fills the card.
    """
    import torch

    from train.memory.devices import this_device

    if CAP in os.environ and torch.cuda.is_available():
        device = this_device()
        held = held_to(device, float(os.environ[CAP]))
        fraction = (held.total_bytes - held.context_bytes) / device.total_bytes
        torch.cuda.set_per_process_memory_fraction(fraction)


def usable_precision(asked: str, device: torch.device) -> str:
    """no, bf16 or fp16: what a run makes of ``asked``; auto is bf16 or fp16 on a card, fp32 elsewhere."""
    import torch

    from train.extras.hardware import resolve_precision

    if asked == "auto" and device.type == "cuda":
        asked = "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"
    return resolve_precision("no" if asked == "auto" else asked, device)[0]


def fast_precisions(device: torch.device) -> list[str]:
    """fp32, and bf16 where the hardware is fast at it."""
    from train.extras.hardware import cpu_has_fast_bf16

    return ["no", *(["bf16"] if device.type == "cuda" or cpu_has_fast_bf16() else [])]


def use_cpu_threads(asked: int | None) -> int:
    """Sets torch's CPU threads, by default one per core as in a run; returns how many."""
    import torch

    from train.records import num_cores

    # Only the threads: what else a run sets up on a CPU would make the variants faster that it is compared with.
    torch.set_num_threads(asked or num_cores())
    return torch.get_num_threads()


# ---- a run -----------------------------------------------------------------------------------------------------------


def silent_run(
    config: Config, accelerator: Accelerator, launch: Launch | None = None, without: Sequence[str] = ()
) -> Run:
    """What the stages of a run are handed; writes and prints nothing.

    Args:
        without: extras that are left out.
    """
    from train import extras
    from train.launch import Launch
    from train.outputs import Outputs
    from train.records import Run

    joined = extras.Extras({name: extra for name, extra in extras.join().by_name.items() if name not in without})
    outputs = Outputs(config, accelerator, is_silent=True)
    return Run(config, launch or Launch(), accelerator, joined, outputs, [])


def start_accelerator(config: Config, launch: Launch, accumulation_steps: int) -> Accelerator:
    """Device and Accelerator as ``main.py`` sets them up."""
    from accelerate import Accelerator

    from train import extras
    from train.extras.hardware import resolve_precision, set_up_device
    from train.launch import accelerator_options

    reset_accelerate()  # an earlier Accelerator may have had another precision
    device = training_device()
    precision, _ = resolve_precision(config.optimization.mixed_precision or launch.precision, device)
    set_up_device(device, launch, config)
    options = accelerator_options(replace(launch, precision=precision), device)
    options |= extras.join().merged("accelerator_options", config, launch)
    return Accelerator(gradient_accumulation_steps=accumulation_steps, mixed_precision=precision, **options)


def finished_run(folder: Path, words: Sequence[str]) -> tuple[nn.Module, Any]:
    """The model in ``final/`` of a finished run, in evaluation mode, and its validation examples, of a causal task.

    Args:
        words: flags that override those of the run; the weights are always those of ``final/``.

    Raises:
        UsageError: the task is not causal.
    """
    from safetensors.torch import load_file, load_model

    from train.config import call_function
    from train.data import corpus_of
    from train.launch import Launch
    from train.model import build_model
    from train.records import UsageError
    from train.tasks import load_task, load_tokenizer, tokenize

    final = folder / "final"
    own = ["--config", str(folder / "config.yaml"), *words]
    is_pretrained = (final / "config.json").exists()  # else a function's module: weights or adapters alone
    config = parsed_config([*own, "--model", str(final)] if is_pretrained else own)
    run = silent_run(config, start_accelerator(config, Launch(), 1), without=["long_sequences"])
    task = load_task(config.data.task)(config)
    if not task.is_causal:
        raise UsageError(f"task: {task.name} predicts no next token, so it has no loss by position.")
    corpus, tokenizer = run.extras.first("documents", config, task.labelled), load_tokenizer(str(final))
    corpus = corpus or corpus_of(call_function(config.data.dataset, "dataset", config), config)
    validation = corpus.splits["validation"]
    # Only held-out text is tokenised: of the rest one document stands for all.
    held_out = replace(corpus, splits={"train": validation.select(range(1)), "validation": validation})
    model = build_model(run, type(task), tokenizer).model
    if (adapters := final / "adapter_model.safetensors").exists():
        from peft import set_peft_model_state_dict

        set_peft_model_state_dict(model, load_file(adapters))
    elif not is_pretrained:
        load_model(model, final / "model.safetensors")
    return model.to(run.accelerator.device).eval(), tokenize(held_out, task, tokenizer)["validation"]


def token_losses(output: Any, labels: Tensor, positions: Tensor) -> Tensor:
    """(B, P) −log p of ``labels`` (B, P) by a model's ``output`` of all positions, or of those P alone."""
    from train.model import logits_of
    from train.tasks import cross_entropy

    logits = logits_of(output)
    logits = logits if logits.shape[1] == len(positions) else logits[:, positions]
    return cross_entropy(logits, labels).view(labels.shape)


# ---- a step ----------------------------------------------------------------------------------------------------------


@dataclass
class Training:
    """A prepared model and optimizer with their step."""

    run: Run
    model: nn.Module
    optimizer: Any
    network: nn.Module
    """The model inside ``model``."""
    micro_batches: Sequence[MicroBatch] = ()
    """Of one optimizer step."""
    plain: Engine = field(init=False)
    """Without recovery from running out of memory."""
    engine: Engine = field(init=False)
    was_skipped: bool = False
    """Whether the last step left the weights as they were, because a gradient was not finite."""

    def __post_init__(self) -> None:
        from train.extras import Extras
        from train.step import Engine

        self.mark: Callable[[str], None] = lambda phase: None
        extras = dict(self.run.extras.by_name)
        guard = Extras({name: extras.pop(name) for name in ("endurance",) if name in extras})
        engine = Engine(self.run.accelerator, self.run.config, lambda phase: self.mark(phase))
        self.plain = Extras(extras).pipe("wrap_step", self.run, engine)
        self.engine = guard.pipe("wrap_step", self.run, self.plain)

    def step(
        self, micro_batches: Sequence[MicroBatch] | None = None, mark: Callable[[str], None] | None = None
    ) -> StepOutcome:
        """One optimizer step.

        Args:
            micro_batches: default: all of ``self.micro_batches``.
            mark: told which phase begins (forward, backward, clip, optimizer); the plain step is made then.
        """
        window = self.micro_batches if micro_batches is None else micro_batches
        before, engine = self.mark, self.engine if mark is None else self.plain
        self.mark = mark or before
        try:
            outcome = engine.step(self.model, self.optimizer, window)
        finally:
            self.mark = before
        self.was_skipped = outcome.skipped  # accelerate's own flag is never set where fused AdamW skips by itself
        return outcome

    def make_optimizer_state(self) -> None:
        """Makes the optimizer's state by gradients of zeros, as the rehearsal of a run does before its longest step."""
        from train.memory.session import make_optimizer_state

        make_optimizer_state(self.run, self.network, self.optimizer)

    def evaluate(self, batch: MicroBatch) -> None:
        """Scores ``batch`` as an evaluation does."""
        import torch

        self.model.eval()
        with torch.no_grad():
            self.model(batch.inputs, batch.labels, scored=True)
        self.model.train()

    @property
    def precision(self) -> str:
        """no, fp16 or bf16."""
        return self.run.accelerator.mixed_precision

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.network.parameters())

    def peak_bytes(self) -> int:
        """On CUDA the peak of allocated memory, on a CPU the largest resident set of the process."""
        from train.extras.meter.memory import peak_bytes

        return peak_bytes(self.run.accelerator.device)

    def speed(self, seconds_per_step: float, tokens: int, length: int) -> dict[str, float | None]:
        """tokens_per_second, flops_per_second (of the model, recomputation not counted) and mfu of a step.

        Args:
            tokens: of one step.
            length: of a sequence.
        """
        from train.extras.device import device_name, precision_in_use
        from train.extras.meter.cards import peak_flops_per_second
        from train.extras.meter.flops import count_flops

        accelerator = self.run.accelerator
        precision = precision_in_use(accelerator, self.run.config.architecture.dtype)
        peak = peak_flops_per_second(device_name(accelerator.device), precision)
        per_second, counted = tokens / seconds_per_step, count_flops(self.network, length)
        flops = counted.of(length) / length if counted else None
        return {
            "tokens_per_second": per_second,
            "flops_per_second": flops * per_second if flops else None,
            "mfu": flops * per_second / peak if flops and peak else None,
        }


def job_from(values: Mapping[str, Any]) -> Job:
    """The job that was written as JSON."""
    from train.memory.predict import Job, Target

    target = Target(**values["target"] | {"capability": tuple(values["target"]["capability"])})
    lists: dict[str, Any] = {k: tuple(v) for k, v in values.items() if isinstance(v, list)}
    documents = tuple(map(tuple, values["documents"]))
    return Job(**dict(values) | lists | {"target": target, "documents": documents})


def this_target() -> Target:
    """The device of this machine."""
    import torch

    from train.memory.predict import Target

    if not torch.cuda.is_available():
        return Target("cpu")
    major, minor = torch.cuda.get_device_capability()
    cudnn = torch.backends.cudnn.version() or 0
    return Target("cuda", (major, minor), cudnn > 91500 and (major, minor) in ((9, 0), (10, 0), (10, 3)))


def rated_target() -> Target:
    """:func:`this_target` with its speed, measured in a moment, so that times can be estimated."""
    import torch

    from scripts.benchmarks.harness import timed

    device = training_device()
    numbers, rates = torch.zeros(2**24, device=device), {}
    for precision in fast_precisions(device):
        matrix = torch.ones(1024, 1024, dtype=torch.float32 if precision == "no" else torch.bfloat16, device=device)
        rates[precision] = 2 * 1024**3 / min(timed(lambda m=matrix: m @ m) for _ in range(5))
    moved = 2 * numbers.nbytes / min(timed(lambda: numbers.clone()) for _ in range(3))
    return replace(this_target(), flops_per_second=rates, bytes_per_second=moved)


def random_micro_batches(job: Job, number: int) -> list[MicroBatch]:
    """Random tokens in the shape of ``job``."""
    from train.memory.predict import random_batch

    return [random_batch(job, job.micro_batch_size) for _ in range(number)]


def build_training(
    job: Job, micro_batches: Sequence[MicroBatch], launched: bool = False, recovers: bool = False
) -> Training:
    """The training of ``job`` with random weights, as a run builds it.

    Args:
        micro_batches: of one optimizer step.
        launched: in a process that a launcher started with others.
        recovers: with the step that survives running out of memory.
    """
    import torch

    from train.config import from_values
    from train.launch import Launch, read_launch
    from train.memory.trial import build

    hold_card()
    config = from_values(job.values).changed(max_length=job.length)
    config = config.changed(on_oom="split") if recovers else config
    if job.target.device_type == "cpu" and torch.cuda.is_available():
        os.environ["ACCELERATE_USE_CPU"] = "true"
    launch = read_launch() if launched else Launch()
    accelerator = start_accelerator(config, launch, len(micro_batches))
    run = silent_run(config, accelerator, launch, without=() if recovers else ("endurance",))
    torch.manual_seed(config.optimization.seed)
    # On a CPU the random weights of billions of parameters would take minutes.
    with accelerator.device if accelerator.device.type == "cuda" else nullcontext():
        model, optimizer, network = build(job, run, initialised=True)
    return Training(run, model, optimizer, network, micro_batches)


def train_network(
    network: nn.Module, settings: Mapping[str, Any], accelerator: Accelerator, offloads: bool
) -> Training:
    """Trains a causal language model that is there already.

    Args:
        settings: flags of the optimizer.
        offloads: build an offloading optimizer also on a CPU, where host and device are one.
    """
    import torch

    from train.model import ModelWithLoss
    from train.optim import build_optimizer, parameter_groups

    run = silent_run(config_of(settings), accelerator, without=("endurance",))
    made: Any = None
    if offloads:
        groups = parameter_groups(network, run.config.optimization)
        made = run.extras.first("build_optimizer", run.config, groups, torch.device("cuda"))
    model, optimizer = accelerator.prepare(ModelWithLoss(network), made or build_optimizer(run, network))
    return Training(run, model, optimizer, network)


def set_scheduled_rate(training: Training, step: int, total_steps: int) -> None:
    """Sets the learning rate of ``step`` by the schedule of the configuration."""
    from train.optim import learning_rate_at

    optimization = training.run.config.optimization
    rate = learning_rate_at(step, total_steps, optimization)
    for group in training.optimizer.param_groups:
        group["lr"] = rate


def next_token_batch(tokens: Tensor) -> MicroBatch:
    """The micro-batch that predicts each next one of ``tokens``: (B, S + 1) integers."""
    from train.records import MicroBatch

    inputs, targets = tokens[:, :-1], tokens[:, 1:].contiguous()
    return MicroBatch({"input_ids": inputs}, targets, targets.numel(), (), targets.numel())


def reset_accelerate() -> None:
    """Forgets the state that all Accelerators of a process share, so that the next one reads the environment again."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


# ---- models and losses alone -----------------------------------------------------------------------------------------


def causal_lm(config: Config, length: int) -> nn.Module:
    """A causal language model over bytes with random weights, with the techniques of ``config``."""
    from accelerate import Accelerator

    from train.extras.readers.own_tokenizers import build_tokenizer
    from train.model import build_model
    from train.tasks import load_task

    accelerator = Accelerator(cpu=training_device().type == "cpu")
    run = silent_run(config.changed(max_length=length), accelerator, without=("losses", "meter"))
    with training_device():  # making weights on the host takes seconds
        network = build_model(run, load_task("causal_lm"), build_tokenizer("bytes", ())).model
    reset_accelerate()  # whoever trains the model makes an Accelerator of its own
    return network


def with_loss(network: nn.Module, loss: str) -> nn.Module:
    """``network`` with the loss named: called with (inputs, labels), it returns the sum of the token losses."""
    from train.extras.losses.in_head import use_loss_in_head
    from train.model import ModelWithLoss

    model = ModelWithLoss(network)
    if loss != "full":
        use_loss_in_head(model, loss)
    return model


def losses() -> dict[str, Loss]:
    """Sums of cross-entropy over a vocabulary, by name; some need a package or a card, see :func:`obstacle`."""
    import torch.nn.functional as F

    from train.extras.losses.chunked import PLAIN, _ChunkedCrossEntropy, chunked_sum, product_dtype
    from train.extras.losses.fused import cce_sum, liger_sum
    from train.tasks import cross_entropy_sum

    def full(hidden: Tensor, weight: Tensor, bias: None, labels: Tensor) -> Tensor:
        return cross_entropy_sum(F.linear(hidden, weight, bias), labels)

    def recomputed(hidden: Tensor, weight: Tensor, bias: None, labels: Tensor) -> Tensor:
        """``chunked`` as it is under fp16, which cannot prepare gradients in forward."""
        how = product_dtype(hidden), PLAIN
        return _ChunkedCrossEntropy.apply(hidden, weight, bias, labels, how, False)  # type: ignore

    chunks: dict[str, Any] = {"chunked": chunked_sum, RECOMPUTED: recomputed}
    return {"full": full, **chunks, "cce": cce_sum, "liger": liger_sum}


def obstacle(name: str, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why the loss ``name`` cannot run on this machine; None: it can."""
    import torch

    from train.extras.losses.fused import Place, obstacle_to

    if name in ("full", RECOMPUTED):
        return None
    capability = torch.cuda.get_device_capability() if device.type == "cuda" else (0, 0)
    return obstacle_to(name, Place(device.type, dtype, capability))


# ---- data ------------------------------------------------------------------------------------------------------------


def example_lengths(config: Config, folder: Path) -> np.ndarray:
    """Tokens of each training example of ``config``, prepared in ``folder``."""
    from accelerate import Accelerator

    from train.data import prepare_data
    from train.records import column

    prepared = prepare_data(silent_run(config.changed(output_dir=str(folder)), Accelerator()))
    return column(prepared.examples["train"], "length")


def example_order(num_examples: int, seed: int) -> np.ndarray:
    """The order in which the first epoch takes the examples."""
    import numpy as np

    from train.batching import Rounds

    return Rounds().order(np.ones(num_examples), seed, 0)


def by_count(ids: list[int], lengths: np.ndarray, size: int) -> Iterator[list[int]]:
    """Micro-batches of ``size`` examples that the template forms of one step's ``ids``."""
    from train.batching import Rounds
    from train.records import BatchArithmetic

    return (part for (part,) in Rounds().form(ids, lengths[ids].tolist(), BatchArithmetic(size, 1, 1)))


def by_tokens(ids: list[int], lengths: np.ndarray, most_tokens: int) -> Iterator[list[int]]:
    """Micro-batches of at most ``most_tokens``, padding included, that the template forms of one step's ``ids``."""
    from train.extras.long_sequences.token_batches import TokenRounds
    from train.records import BatchArithmetic

    rounds = TokenRounds(most_tokens).form(ids, lengths[ids].tolist(), BatchArithmetic(1, 1, 1))
    return (part for (part,) in rounds)


def packed_rows(lengths: np.ndarray, length: int) -> int:
    """Rows of ``length`` tokens that packing needs."""
    from train.extras.long_sequences.packing import best_fit

    return len(best_fit(lengths, length))
