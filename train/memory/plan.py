"""Does a configuration fit on a device, and which settings are the fastest that fit.

Every figure comes from :mod:`train.memory.predict`. A prediction takes seconds, so the search leaves out what others
already tell: memory grows with the micro-batch and shrinks with recomputation, and recomputation costs time.
"""

from __future__ import annotations

import json
import math
import shlex
from bisect import bisect_right
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from queue import SimpleQueue
from typing import Any, Protocol

import yaml

from train.config import Config, check_optimizer, from_values, to_values
from train.launch import Launch
from train.launch import check_optimizer as check_optimizer_launch
from train.memory.devices import Device, find_device, nccl_buffer_bytes
from train.memory.predict import ROOT, Job, Prediction, Target
from train.memory.zero import MOMENTS, STAGE
from train.records import UsageError, UserError

MARGIN = 0.02
"""Share of the device left free: the display, other processes, what kernels load on the way."""
EQUALLY_FAST = 0.02
"""Settings whose estimates differ by less are taken as equally fast: the one that needs less is kept."""
SHARDING_GAIN = 0.1
"""fsdp2 is chosen over ddp only if it is faster by more: it communicates more, and the estimate leaves that out."""
OFFLOAD = "fsdp2_offload"
"""Tried only where nothing else fits: its copies between host and device are nearly always the slower part."""
HOST_LINK_BYTES_PER_SECOND = 20e9
"""What PCIe 4.0 × 16 carries in one direction in practice; an estimate."""
STAND_IN = "a100-80"
"""Its rates and kernels rank settings for a card of which only the memory is known."""
LONGEST = 4 * 2**20
"""Tokens beyond which nobody is asked whether they fit."""


@dataclass(frozen=True)
class Recompute:
    """How layers keep or recompute their activations."""

    gradient_checkpointing: str
    every_n_layers: int = 1
    offload: bool = False
    """Inputs of checkpointed layers rest in host memory."""
    tiled_mlp: bool = False


CHECKPOINTING = (Recompute("none"), Recompute("selective", 2), Recompute("selective"), Recompute("full"))
"""From fast and large to slow and small."""
OFFLOADED_INPUTS = (Recompute("full", offload=True), Recompute("full", offload=True, tiled_mlp=True))
"""The same further on: tried only where nothing of :data:`CHECKPOINTING` fits. A CPU has no other memory."""
TILED = (Recompute("full", tiled_mlp=True),)
"""The same for a CPU."""


class Predicts(Protocol):
    """What the search needs of a :class:`train.memory.predict.Predictor`."""

    def predict(self, job: Job) -> Prediction: ...


class Predictions:
    """Predictions by job, each made once, side by side where there are several predictors."""

    def __init__(self, predictors: Sequence[Predicts], announce: Callable[[int, Job], None] | None = None) -> None:
        self._predictors = predictors
        self._announce = announce
        self._known: dict[str, Prediction | UserError] = {}

    @property
    def count(self) -> int:
        """How many were made."""
        return len(self._known)

    def of(self, job: Job) -> Prediction:
        """The prediction of ``job``.

        Raises:
            UserError: what the predictor says of a job that cannot work.
        """
        found = self.of_all([job])[0]
        if isinstance(found, UserError):
            raise found
        return found

    def of_all(self, jobs: Sequence[Job]) -> list[Prediction | UserError]:
        """The prediction of each of ``jobs``, or why there is none."""
        keys = [json.dumps(asdict(job), sort_keys=True) for job in jobs]
        new = {key: job for key, job in zip(keys, jobs, strict=True) if key not in self._known}
        free: SimpleQueue[Predicts] = SimpleQueue()
        for predictor in self._predictors:
            free.put(predictor)

        def predicted(numbered: tuple[int, Job]) -> Prediction | UserError:
            predictor = free.get()
            try:
                if self._announce is not None:
                    self._announce(*numbered)
                return predictor.predict(numbered[1])
            except UserError as error:
                return error
            finally:
                free.put(predictor)

        with ThreadPoolExecutor(len(self._predictors)) as pool:
            results = list(pool.map(predicted, enumerate(new.values(), self.count + 1)))
        self._known.update(zip(new, results, strict=True))
        return [self._known[key] for key in keys]


# ---- from a configuration and a device to a job ----------------------------------------------------------------------


def target_of(device: Device) -> Target:
    """``device`` as a prediction needs it, with no rates where its speed is unknown."""
    if device.name == "cpu":
        return Target("cpu")
    capability = device.compute_capability or find_device(STAND_IN).compute_capability or (8, 0)
    rates = {precision: device.peak_flops_per_second(precision) for precision in ("no", "fp16", "bf16")}
    return Target(
        device_type="cuda",
        capability=capability,
        prefers_cudnn=capability in ((9, 0), (10, 0), (10, 3)),  # wheels for them bring a cuDNN newer than 9.15
        flops_per_second={precision: rate for precision, rate in rates.items() if rate},
        bytes_per_second=device.memory_bytes_per_second,
    )


def job_of(
    config: Config,
    target: Target,
    vocab_size: int,
    num_labels: int = 0,
    padded: bool | None = None,
    world_size: int = 1,
    sharding: str = "none",
) -> Job:
    """The step of ``config`` with its longest examples.

    Args:
        vocab_size: tokens that the tokenizer knows, see :func:`vocabulary_size`.
        num_labels: classes of a classifier.
        padded: whether micro-batches come with an attention mask; None: if the task makes one for examples of
            different lengths, and there can be any.
        world_size: ranks, with ``sharding`` ddp or fsdp2 where there are several.

    Raises:
        UsageError: the sizes of the batch contradict each other, or there is no such task.
    """
    from train.batching import batch_arithmetic
    from train.tasks import build_task, check_task

    data, optim = config.data, config.optimization
    check_task(data.task)
    size = _micro_batch_size(config, world_size)
    given = optim.micro_batch_size if optim.max_tokens_per_micro_batch else size
    assert given != "auto"
    arithmetic = batch_arithmetic(given, optim.gradient_accumulation_steps, optim.global_batch_size, world_size)
    if padded is None:
        padded = data.task != "causal_lm" and size > 1 and not data.packing
    return Job(
        values=to_values(config),
        target=target,
        auto_class=build_task(data).auto_class,
        vocab_size=vocab_size,
        micro_batch_size=size,
        length=data.max_length,
        accumulates=arithmetic.global_batch_size > size * world_size,
        num_labels=num_labels,
        padded=padded,
        eval_batch_size=config.output.eval_batch_size or size,
        world_size=world_size,
        sharding=sharding,
    )


def _micro_batch_size(config: Config, world_size: int) -> int:
    """Examples of a micro-batch; where tokens form it, as many of the longest as it may hold."""
    optim = config.optimization
    if optim.max_tokens_per_micro_batch is not None:
        most = (optim.global_batch_size or world_size) - world_size + 1
        return max(1, min(optim.max_tokens_per_micro_batch // config.data.max_length, most))
    if optim.micro_batch_size == "auto":
        raise UsageError("micro_batch_size: auto stands for no size yet: give one here.")
    return optim.micro_batch_size


def vocabulary_size(config: Config) -> int:
    """Tokens of the model's vocabulary, known without any data.

    Raises:
        UserError: only the data tells, or the model or tokenizer cannot be loaded.
    """
    architecture, spec = config.architecture, config.data.tokenizer
    given = (architecture.model_config or {}).get("vocab_size")
    if given is not None:
        return int(given)
    if (stored := _stored_config(config)) is not None:
        size = getattr(stored.get_text_config(), "vocab_size", None)
        if size is not None:
            return int(size)
    spec = spec or architecture.model or ""
    if spec == "words":
        raise UsageError(
            "tokenizer: words: its size depends on the training text. Give it, such as --vocab_size 20000."
        )
    if spec.startswith("train:"):
        return int(spec.removeprefix("train:"))
    from train.tokenization import load_tokenizer

    try:
        return len(load_tokenizer(spec, (), trust_remote_code=architecture.trust_remote_code))
    except UserError as error:
        raise UserError(f"{error} Or give the size of its vocabulary: --vocab_size 32000.") from None


def position_limit(config: Config) -> int | None:
    """Tokens that the model takes at most; None: as many as ``max_length`` says."""
    architecture, limit = config.architecture, _own_positions(config)
    if limit is None or architecture.rope_scaling == "none":
        return limit
    return None if architecture.rope_scaling_factor is None else math.ceil(limit * architecture.rope_scaling_factor)


def _own_positions(config: Config) -> int | None:
    """Positions of the model before ``rope_scaling``."""
    name = "max_position_embeddings"
    if (stored := _stored_config(config)) is not None:
        return getattr(stored, name, None)
    fields = config.architecture.model_config
    if fields is None:
        return None
    from transformers import AutoConfig

    try:
        other_name = AutoConfig.for_model(fields["model_type"]).attribute_map.get(name, name)
    except (KeyError, ValueError):  # the builder has the words for it
        return None
    return fields.get(name, fields.get(other_name))


def _stored_config(config: Config) -> Any:
    """transformers' configuration of a model by name, None for others."""
    name = config.architecture.model
    if name is None or ":" in name:
        return None
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(name, trust_remote_code=config.architecture.trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(
            f"model {name!r}: its configuration cannot be loaded: {' '.join(str(error).split())[:300]} Give a folder "
            "with a model, a Hub name (and a connection; weights are not needed), or a model_config."
        ) from None


# ---- settings and what they need -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """What the search may choose."""

    micro_batch_size: int
    gradient_checkpointing: str
    mixed_precision: str | None
    loss: str
    sharding: str = "none"
    every_n_layers: int = 1
    offloads_inputs: bool = False
    """Those of checkpointed layers."""
    tiled_mlp: bool = False

    def recomputing(self, way: Recompute) -> Setting:
        """This setting with another way to recompute; tiles that were asked for stay."""
        return replace(
            self,
            gradient_checkpointing=way.gradient_checkpointing,
            every_n_layers=way.every_n_layers,
            offloads_inputs=way.offload,
            tiled_mlp=self.tiled_mlp or way.tiled_mlp,
        )


@dataclass(frozen=True)
class Question:
    """A configuration on a device."""

    config: Config
    device: Device
    vocab_size: int
    num_labels: int = 0
    padded: bool | None = None
    """See :func:`job_of`."""
    world_size: int = 1
    sharding: str | None = None
    """ddp, fsdp2, fsdp2_offload, zero2 or zero3; None: ddp or fsdp2, whichever does better, else fsdp2_offload."""

    @property
    def room_bytes(self) -> int:
        """What a rank may take of its device, the margin left free; no more than the configuration's own budget."""
        budget = self.config.memory.memory_budget_gib
        total = self.device.total_bytes if budget is None else min(self.device.total_bytes, budget * 2**30)
        return int(total * (1 - MARGIN))

    @property
    def nccl_bytes(self) -> int:
        return 0 if self.device.name == "cpu" else nccl_buffer_bytes(self.world_size)

    @property
    def global_batch_size(self) -> int:
        """Examples of an optimizer step, over all ranks.

        Raises:
            UsageError: the sizes of the batch contradict each other.
        """
        from train.batching import batch_arithmetic

        optim = self.config.optimization
        size = 1 if optim.max_tokens_per_micro_batch else _micro_batch_size(self.config, self.world_size)
        return batch_arithmetic(
            size, optim.gradient_accumulation_steps, optim.global_batch_size, self.world_size
        ).global_batch_size

    @property
    def asked(self) -> Setting:
        """The configuration as it stands."""
        optim, architecture = self.config.optimization, self.config.architecture
        loss = optim.loss
        if loss == "auto":
            loss = self.automatic_loss
        return Setting(
            _micro_batch_size(self.config, self.world_size),
            architecture.gradient_checkpointing,
            optim.mixed_precision,
            loss,
            self.shardings[0],
            architecture.gradient_checkpointing_every_n_layers,
            architecture.gradient_checkpointing_offload,
            architecture.tiled_mlp,
        )

    @property
    def last_resort(self) -> tuple[Recompute, ...]:
        """Ways to recompute that are tried where nothing else fits."""
        return TILED if self.device.name == "cpu" else OFFLOADED_INPUTS

    @property
    def automatic_loss(self) -> str:
        """What ``auto`` stands for with most models; :func:`train.loss.choose_loss` has the last word."""
        from train.loss import MIN_CHUNKED_CLASSES

        return "full" if self.num_labels or self.vocab_size < MIN_CHUNKED_CLASSES else self._best_loss

    @property
    def losses(self) -> tuple[str, ...]:
        """From fast and large to slow and small."""
        if self.num_labels:
            return ("full",)
        asked = self.config.optimization.loss
        return "full", self._best_loss if asked in ("auto", "full") else asked

    @property
    def _best_loss(self) -> str:
        """The loss without all logits that a run would choose, with the packages that are installed here."""
        import torch

        from train.extras.losses.fused import Place, best_kernel
        from train.loss import Objective

        target, optim = target_of(self.device), self.config.optimization
        names = {"fp16": "float16", "bf16": "bfloat16"}
        dtype = getattr(torch, names.get(self.precision or "no", self.config.architecture.dtype))
        objective = Objective(optim.label_smoothing, optim.z_loss)
        return best_kernel(Place(target.device_type, dtype, target.capability), has_bias=False, objective=objective)

    @property
    def shardings(self) -> tuple[str, ...]:
        """Ways to divide the work that may be chosen, the one that communicates least first."""
        if self.sharding is not None:
            return (self.sharding,)
        several = ("ddp",) if self.needs_whole_weights else ("ddp", "fsdp2")
        return ("none",) if self.world_size == 1 else several

    @property
    def needs_whole_weights(self) -> bool:
        """Whether the optimizer works on whole weights alone; :func:`train.launch.check_optimizer` says the same."""
        optim = self.config.optimization
        unusual = optim.optimizer in ("adamw_8bit", "adafactor") or optim.bf16_update != "nearest"
        return unusual or optim.optimizer_offload or optim.optimizer_in_backward

    @property
    def may_offload(self) -> bool:
        """Whether weights, gradients and optimizer state may go to host memory if nothing else helps."""
        return self.sharding is None and self.device.name != "cpu" and not self.needs_whole_weights

    @property
    def precision(self) -> str | None:
        """The precision asked for; where none is, or the device lacks it, the best that the device has."""
        asked = self.config.optimization.mixed_precision
        if self.device.name == "cpu":
            return asked
        half = "bf16" if target_of(self.device).capability >= (8, 0) else "fp16"
        if asked == "bf16":
            return half
        own_type = self.config.architecture.dtype != "float32"
        return asked if asked is not None or own_type else half

    def job(self, setting: Setting) -> Job:
        """The step with ``setting``; on a device of unknown speed with rates that rank.

        Raises:
            UsageError: the optimizer asked for does not go with it.
        """
        config = self.configured(setting)
        engines = {"fsdp2": "fsdp2", OFFLOAD: "fsdp2", **dict.fromkeys(STAGE, "deepspeed")}
        check_optimizer(config)
        check_optimizer_launch(Launch(self.world_size, engine=engines.get(setting.sharding, "ddp")), config)
        sizes = (self.num_labels, self.padded, self.world_size, setting.sharding)
        return job_of(config, _ranking_target(self.device), self.vocab_size, *sizes)

    def configured(self, setting: Setting) -> Config:
        """The configuration with ``setting`` and the same global batch."""
        return from_values({**to_values(self.config), **self.changes(setting)})

    def changes(self, setting: Setting) -> dict[str, Any]:
        """What has to change in the configuration for ``setting``, by flag."""
        values = to_values(self.config)
        loss = values["loss"] if values["loss"] == "auto" and setting.loss == self.automatic_loss else setting.loss
        wanted: dict[str, Any] = {
            "micro_batch_size": setting.micro_batch_size,
            "gradient_checkpointing": setting.gradient_checkpointing,
            "gradient_checkpointing_every_n_layers": setting.every_n_layers,
            "gradient_checkpointing_offload": setting.offloads_inputs,
            "tiled_mlp": setting.tiled_mlp,
            "mixed_precision": setting.mixed_precision,
            "loss": loss,
        }
        if values["max_tokens_per_micro_batch"] is not None:
            del wanted["micro_batch_size"]
            if setting.micro_batch_size != self.asked.micro_batch_size:
                wanted["max_tokens_per_micro_batch"] = setting.micro_batch_size * values["max_length"]
        elif setting.micro_batch_size != values["micro_batch_size"]:
            wanted |= {"global_batch_size": self.global_batch_size, "gradient_accumulation_steps": None}
        return {name: value for name, value in wanted.items() if value != values[name]}


def _ranking_target(device: Device) -> Target:
    target = target_of(device)
    if target.device_type == "cpu":  # any rates with the ratio of a common processor
        return replace(target, flops_per_second=dict.fromkeys(("no", "fp16", "bf16"), 1e12), bytes_per_second=1e11)
    if target.bytes_per_second and target.flops_per_second:
        return target
    known = target_of(find_device(STAND_IN))
    return replace(target, flops_per_second=known.flops_per_second, bytes_per_second=known.bytes_per_second)


def has_known_speed(device: Device) -> bool:
    """Whether times can be estimated for ``device``."""
    target = target_of(device)
    return bool(target.bytes_per_second and target.flops_per_second)


@dataclass(frozen=True)
class Outcome:
    """A setting and what is predicted of it."""

    setting: Setting
    length: int
    padded: bool
    prediction: Prediction
    needed_bytes: int
    """Of the device: reserved by the allocator, CUDA context, NCCL."""
    fits: bool
    host_bytes: int = 0
    """Of host memory: weights, gradients, optimizer state and inputs of layers that are offloaded."""
    link_seconds: float = 0.0
    """Of a micro-batch, estimated: copies between host and device that no computation hides."""

    @property
    def seconds_per_token(self) -> float:
        """Of forward and backward on one rank, estimated; what an optimizer step does once is the same for all."""
        if self.prediction.seconds is None:
            return 0.0
        return (self.prediction.seconds + self.link_seconds) / (self.setting.micro_batch_size * self.length)


def outcome_of(question: Question, setting: Setting, job: Job, prediction: Prediction) -> Outcome:
    """``prediction`` held against the device."""
    needed = prediction.reserved_bytes + question.device.context_bytes + question.nccl_bytes
    host, link = 0, 0.0
    if setting.sharding == OFFLOAD:
        sizes = prediction.num_parameters, prediction.num_trained_parameters
        weights, trained = (4 * -(-size // question.world_size) for size in sizes)  # bytes of a shard, kept in fp32
        host = weights + (1 + MOMENTS[question.config.optimization.optimizer]) * trained
        # in for forward, in for backward, gradients out
        link = (2 * weights + trained) / HOST_LINK_BYTES_PER_SECOND
    elif question.config.optimization.optimizer_offload and question.device.name != "cpu":
        host = 4 * (1 + MOMENTS["adamw"]) * prediction.num_trained_parameters  # fp32 weights and moments
    host += prediction.offloaded_bytes
    link += _waiting_for_inputs(prediction)
    return Outcome(setting, job.length, job.padded, prediction, needed, needed <= question.room_bytes, host, link)


def _waiting_for_inputs(prediction: Prediction) -> float:
    """Seconds in which the computation of a micro-batch is done and the copies of layers' inputs are not.

    They go out in forward and come back in backward, which recomputes and so takes three quarters of the time.
    """
    copying, seconds = prediction.offloaded_bytes / HOST_LINK_BYTES_PER_SECOND, prediction.seconds or 0.0
    return max(0.0, copying - seconds / 4) + max(0.0, copying - seconds * 3 / 4)


@dataclass(frozen=True)
class Plan:
    """The answer to a question."""

    asked: Outcome | None
    """The configuration as it stands; None where it leaves the micro-batch open or cannot run."""
    problem: str | None
    """Why the configuration as it stands cannot run."""
    best: Outcome | None
    """The fastest setting that fits."""
    smallest: Outcome
    """The setting that needs least."""
    longest: int | None
    """Tokens up to which the smallest setting fits (multiples of 1,024; 0: not even those), where nothing fits."""
    num_predictions: int


# ---- searching -------------------------------------------------------------------------------------------------------


def largest_fitting(
    candidates: Sequence[int],
    needs: Callable[[int], int | None],
    room_bytes: int,
    first: int,
    enough: Callable[[], bool] = lambda: False,
) -> int | None:
    """The largest of ``candidates`` (ascending) that needs at most ``room_bytes``; None: not even the smallest does.

    Guesses along the line through the two last points, for memory is nearly affine, and halves where that does not
    help. Never tries more than eight times what is known to fit, for large steps take long to predict.

    Args:
        needs: bytes, growing; None: cannot be told, taken as too many.
        first: where to begin, one of ``candidates``.
        enough: asked after each try: whether what fits now will do.
    """
    low, high = -1, len(candidates)
    points: list[tuple[int, int]] = []
    index = candidates.index(first)
    tries = 0
    while high - low > 1:
        size = candidates[index]
        needed = needs(size)
        if needed is not None:
            points.append((size, needed))
        if needed is not None and needed <= room_bytes:
            low = index
            if enough():
                break
        else:
            high = index
        tries += 1
        index = _next_guess(candidates, low, high, points[-2:], room_bytes, halve=tries % 3 == 0)
    return candidates[low] if low >= 0 else None


def _next_guess(
    candidates: Sequence[int], low: int, high: int, points: Sequence[tuple[int, int]], room_bytes: int, halve: bool
) -> int:
    guess = (low + high) // 2
    if len(points) == 2 and points[0][0] != points[1][0] and not halve:
        (x0, y0), (x1, y1) = sorted(points)
        if y1 > y0:
            guess = bisect_right(candidates, x0 + (room_bytes - y0) * (x1 - x0) / (y1 - y0)) - 1
            guess += guess == low  # it fits already: is it the last?
    if low >= 0:
        guess = min(guess, bisect_right(candidates, 8 * candidates[low]) - 1)
    return max(low + 1, min(guess, high - 1))


class Search:
    """The settings of a question, tried as far as needed."""

    def __init__(self, question: Question, predictions: Predictions) -> None:
        self.question, self._predictions = question, predictions
        per_rank = question.global_batch_size // question.world_size
        accumulates = not question.config.optimization.optimizer_in_backward
        self._sizes = [size for size in range(1, per_rank + 1) if per_rank % size == 0] if accumulates else [per_rank]
        self._base = Setting(
            self._sizes[0], "none", question.precision, "full", tiled_mlp=question.config.architecture.tiled_mlp
        )
        self.ways: tuple[Recompute, ...] = CHECKPOINTING
        """How layers may recompute, each after those that are faster."""
        self._losses = question.losses
        self.problems: dict[Setting, str] = {}
        """Settings that the model or device does not allow."""

    def try_(self, setting: Setting) -> Outcome | None:
        """What is predicted of ``setting``; None where it cannot run, then ``problems`` says why."""
        try:
            job = self.question.job(setting)
            return outcome_of(self.question, setting, job, self._predictions.of(job))
        except UserError as error:
            self.problems[setting] = str(error)
            return None

    def techniques(self, sharding: str) -> list[Setting]:
        """All ways to compute as few examples at a time as may be, each after those that are faster."""
        return [self._technique(way, loss, sharding) for way in self.ways for loss in self._losses]

    def _technique(self, way: Recompute, loss: str, sharding: str) -> Setting:
        return replace(self._base, loss=loss, sharding=sharding).recomputing(way)

    def smallest(self, sharding: str) -> Outcome:
        """The setting that needs least with ``sharding``.

        Raises:
            UserError: none can run.
        """
        possible = self.techniques(sharding)
        for setting in reversed(possible):
            outcome = self.try_(setting)
            if outcome is not None:
                return outcome
        raise UserError(self.problems[possible[0]])

    def fastest(self, shardings: Sequence[str], best: Outcome | None) -> Outcome | None:
        """The fastest setting with one of ``shardings`` that fits, ``best`` where none is clearly faster."""
        for sharding in shardings:
            gain = SHARDING_GAIN if best is not None and sharding != best.setting.sharding else EQUALLY_FAST
            found, at_floor = self._fastest_with(sharding, best, gain)
            best = found or best
            if at_floor:
                break
        return best

    def _fastest_with(self, sharding: str, best: Outcome | None, gain: float) -> tuple[Outcome | None, bool]:
        """The fastest setting with ``sharding``, and whether no other can be faster, whatever memory there is."""
        floors: dict[tuple[int, int], float] = {}
        fitting: dict[tuple[int, int], int] = {}
        unfitting: dict[tuple[int, int], int] = {}
        found: Outcome | None = None
        for row, way in enumerate(self.ways):
            # The smaller loss first: the larger one cannot take more than that does.
            for column, loss in reversed(list(enumerate(self._losses))):
                reference = found or best
                faster = [place for place in floors if place[0] <= row and place[1] <= column]
                if reference is not None and any(
                    reference.seconds_per_token <= floors[place] * (1 + EQUALLY_FAST) for place in faster
                ):
                    continue
                # What a faster technique can take is of no use here, and what a smaller one cannot is too much.
                low = max((fitting.get(place, 0) for place in faster), default=0)
                smaller = [size for (r, c), size in unfitting.items() if r >= row and c >= column]
                sizes = [size for size in self._sizes if low < size < min(smaller, default=math.inf)]
                tried = self._grown(self._technique(way, loss, sharding), sizes)
                if not tried:
                    continue
                floors[row, column] = self._floor(tried)
                fitting[row, column] = max((o.setting.micro_batch_size for o in tried if o.fits), default=low)
                if not tried[-1].fits:
                    unfitting[row, column] = min(o.setting.micro_batch_size for o in tried if not o.fits)
                for outcome in tried:
                    bar = found or best
                    least = EQUALLY_FAST if found is not None else gain
                    if outcome.fits and (
                        bar is None or outcome.seconds_per_token < bar.seconds_per_token * (1 - least)
                    ):
                        found = outcome
        bar, floor = found or best, floors.get((0, 0))
        return found, bar is not None and floor is not None and bar.seconds_per_token <= floor * (1 + EQUALLY_FAST)

    def _grown(self, technique: Setting, sizes: Sequence[int]) -> list[Outcome]:
        """``technique`` with larger and larger micro-batches, until one does not fit or larger ones gain nothing."""
        tried: dict[int, Outcome] = {}

        def needs(size: int) -> int | None:
            outcome = self.try_(replace(technique, micro_batch_size=size))
            if outcome is None:
                return None
            tried[size] = outcome
            return outcome.needed_bytes

        def in_order() -> list[Outcome]:
            return [tried[size] for size in sorted(tried)]

        def saturated() -> bool:
            fastest = min(outcome.seconds_per_token for outcome in tried.values() if outcome.fits)
            return fastest <= self._floor(in_order()) * (1 + EQUALLY_FAST)

        if sizes:
            largest_fitting(sizes, needs, self.question.room_bytes, sizes[0], saturated)
        return in_order()

    def _floor(self, tried: Sequence[Outcome]) -> float:
        """Seconds per token that no micro-batch beats.

        An operator takes the longest of several times that are affine in the micro-batch. So the time of a step is
        convex in it, and each example beyond two sizes costs at least what it cost between them.
        """
        last = tried[-1]
        if last.setting.micro_batch_size == self._sizes[-1]:
            return min(outcome.seconds_per_token for outcome in tried)
        if len(tried) < 2 or tried[-2].padded != last.padded:  # with a mask, other kernels run
            return 0.0
        before = tried[-2]
        examples = last.setting.micro_batch_size - before.setting.micro_batch_size
        seconds = (last.prediction.seconds or 0.0) - (before.prediction.seconds or 0.0)
        return max(0.0, min(seconds / (examples * last.length), *(outcome.seconds_per_token for outcome in tried)))


def predicted(question: Question, predictions: Predictions) -> Outcome:
    """The configuration as it stands.

    Raises:
        UserError: it cannot run.
    """
    setting = question.asked
    job = question.job(setting)
    return outcome_of(question, setting, job, predictions.of(job))


def make_plan(question: Question, predictions: Predictions, open_micro_batch: bool = False) -> Plan:
    """Whether the configuration fits, and the fastest setting that does, with the same global batch.

    Args:
        open_micro_batch: the configuration's micro-batch is only a place holder.

    Raises:
        UserError: no setting can run.
    """
    search = Search(question, predictions)
    asked, problem = None, None
    if not open_micro_batch:
        asked = search.try_(question.asked)
        problem = search.problems.get(question.asked)
    shardings = question.shardings
    smallest = search.smallest(shardings[-1])
    best, longest = asked if asked is not None and asked.fits else None, None
    for ways, offloads in ((question.last_resort, False), (CHECKPOINTING, True), (question.last_resort, True)):
        if best is not None or smallest.fits or (offloads and not question.may_offload):
            break
        search.ways, shardings = ways, (OFFLOAD,) if offloads else question.shardings[-1:]
        smallest = _smaller(search, shardings[0], smallest)
    if smallest.fits or best is not None:
        best = search.fastest(shardings, best)
    else:
        longest = _longest_of(question, smallest.setting, predictions, question.config.data.max_length)
    return Plan(asked, problem, best, smallest, longest, predictions.count)


def _smaller(search: Search, sharding: str, known: Outcome) -> Outcome:
    """The setting that needs least with ``sharding``, or ``known`` where none can run or none needs less."""
    try:
        found = search.smallest(sharding)
    except UserError:
        return known
    return found if found.needed_bytes < known.needed_bytes else known


def longest_length(question: Question, predictions: Predictions) -> tuple[int, Setting]:
    """The longest ``max_length`` that fits, in multiples of 1,024 (0: none), and the setting for it: the smallest.

    Raises:
        UserError: no setting can run.
    """
    limit = min(position_limit(question.config) or LONGEST, LONGEST)
    start = replace_length(question, min(8192, limit))
    search = Search(start, predictions)
    smallest = search.smallest(start.shardings[-1])
    search.ways = question.last_resort
    setting = _smaller(search, start.shardings[-1], smallest).setting
    return _longest_of(question, setting, predictions, limit + 1), setting


def _longest_of(question: Question, setting: Setting, predictions: Predictions, end: int) -> int:
    candidates = range(1024, end, 1024)
    if not candidates:
        return 0

    def needs(length: int) -> int:
        job = replace_length(question, length).job(setting)
        return outcome_of(question, setting, job, predictions.of(job)).needed_bytes

    first = min(8192, candidates[-1])
    return largest_fitting(candidates, needs, question.room_bytes, first) or 0


def replace_length(question: Question, length: int) -> Question:
    """``question`` with another ``max_length``."""
    config = replace(question.config, data=replace(question.config.data, max_length=length))
    architecture = config.architecture
    if architecture.rope_scaling != "none" and architecture.rope_scaling_factor is None:
        # The factor follows the length, and takes no memory; but none is below one.
        factor = max(2.0, length / (_own_positions(config) or length))
        config = replace(config, architecture=replace(architecture, rope_scaling_factor=factor))
    return replace(question, config=config)


# ---- what to type ----------------------------------------------------------------------------------------------------


def command(question: Question, setting: Setting, words: Sequence[str], said: dict[str, Any] | None = None) -> str:
    """The command that trains with ``setting``.

    Args:
        words: the training flags of the person, which stay as far as ``setting`` does not replace them.
        said: flags to give whether the configuration has the same values or not.
    """
    changes = {**question.changes(setting), **(said or {})}
    if question.config.optimization.mixed_precision is None:
        changes.pop("mixed_precision", None)  # then the launcher alone chooses it
    dropped = {name for name, value in changes.items() if value is None}
    kept = without_flags(words, set(changes))
    flags = [word for name, value in changes.items() if name not in dropped for word in (f"--{name}", str(value))]
    on_cpu = question.device.name == "cpu"
    launch = launcher_words(on_cpu, question.world_size, setting.sharding, setting.mixed_precision or "no")
    return shlex.join(["accelerate", "launch", *launch, "train/main.py", *kept, *flags])


def without_flags(words: Sequence[str], names: set[str]) -> list[str]:
    """``words`` without the flags called ``names`` and their values."""
    kept: list[str] = []
    drops = False
    for word in words:
        if word.startswith("--"):
            name, equals, _ = word[2:].partition("=")
            drops = name.replace("-", "_") in names
            if not drops:
                kept.append(word)
            drops = drops and not equals
        elif not drops:
            kept.append(word)
    return kept


def launcher_words(on_cpu: bool, world_size: int, sharding: str, precision: str) -> list[str]:
    """Arguments of ``accelerate launch``: a file of ``accelerate_configs/``, and flags for what it says otherwise."""
    if sharding in STAGE:
        stage = ["--use_deepspeed", "--zero_stage", str(STAGE[sharding])]
        return [*stage, "--num_processes", str(world_size), "--mixed_precision", precision]
    alone = world_size == 1 and sharding != OFFLOAD
    name = ("cpu" if on_cpu else "single_gpu") if alone else sharding
    values = yaml.safe_load((ROOT / "accelerate_configs" / f"{name}.yaml").read_text(encoding="utf-8"))
    words = ["--config_file", f"accelerate_configs/{name}.yaml"]
    if values["num_processes"] != world_size:
        words += ["--num_processes", str(world_size)]
    if values["mixed_precision"] != precision:
        words += ["--mixed_precision", precision]
    return words


def device_gib_for(outcome: Outcome) -> int:
    """The smallest device, in whole GiB, that ``outcome`` fits on."""
    return math.ceil(outcome.needed_bytes / (1 - MARGIN) / 2**30)
