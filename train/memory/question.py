"""A configuration on a device, the settings that may be chosen for it, and the step to predict for each."""

import math
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from typing import Any

from train import extras
from train.config import Config, to_values
from train.extras.device import SHORT
from train.extras.hardware import NO_BF16_WEIGHTS, automatic_precision
from train.extras.meter.cards import peak_flops_per_second
from train.launch import Launch
from train.memory.devices import Device, find_device, nccl_buffer_bytes
from train.memory.ladder import Recompute, ladder_on
from train.memory.predict import HALF, OFFLOAD, PRECISIONS, SHARDED_WEIGHTS, Job, Target
from train.records import MicroBatch, UsageError, UserError, arithmetic_of

BYTE_VOCABULARY = 259  # entries of the tokenizer ``bytes``
MARGIN = 0.02  # share of the device left free: for the display, other processes, and kernels that are loaded later
STAND_IN = "a100-80"  # its rates and kernels rank settings for a card of which only the memory is known
UNPADDED = "padding changes this model's results, so each micro-batch is one example"  # where not Question.pads


def target_of(device: Device) -> Target:
    """``device`` as a prediction needs it; a card of unknown speed has the rates of the stand-in."""
    if device.kind != "cuda":
        return Target(device.kind)
    rated = device if device.memory_bytes_per_second else find_device(STAND_IN)
    capability = device.compute_capability or (8, 0)  # AMD's, and cards of unknown speed, have the kernels of an A100
    return Target(
        device_type="cuda",
        capability=capability,
        prefers_cudnn=capability in ((9, 0), (10, 0), (10, 3)),  # wheels for them bring a cuDNN newer than 9.15
        flops_per_second={p: rate for p in PRECISIONS if (rate := peak_flops_per_second(rated.name, p))},
        bytes_per_second=rated.memory_bytes_per_second or 0.0,
    )


def job_of(config: Config, target: Target, vocab_size: int, num_labels: int = 0, world_size: int = 1) -> Job:
    """The step of ``config`` with its longest examples; raises UsageError if its sizes contradict each other.

    Examples are taken to differ in length, so micro-batches are padded where the task then needs an attention mask.
    """
    from train.tasks import load_task

    task, size = load_task(config.data.task)(config), _micro_batch_size(config, world_size)
    eval_size, may_pad = config.output.eval_batch_size or size, not config.get("packing")
    job = Job(to_values(config), target, vocab_size, size, length=config.data.max_length, num_labels=num_labels)
    (rows, length), tensors = _longest_batch(task, job)
    plain = {**job.tensors, "labels": (() if task.labelled else (-1,), "int64")}
    share = config.get(task.target_share or "", 1.0)
    return replace(
        job,
        micro_batch_size=size * rows,
        length=length,
        accumulates=arithmetic_of(config, world_size).global_batch_size > size * world_size,
        padded=not task.is_causal and size > 1 and may_pad,
        eval_padded=not task.is_causal and eval_size > 1 and may_pad,
        tensors=tensors or plain,
        is_guess=not tensors,
        num_targets=None if share == 1 else math.ceil(share * size * length),
        eval_batch_size=eval_size * rows,
        world_size=world_size,
    )


def _longest_batch(task: Any, job: Job) -> tuple[tuple[int, int], dict[str, Any]]:
    """(rows, S) and :func:`tensors_of` one example's batch (``longest_example()``, or by ``cut``); {} if unknown."""
    tokenizer, _ = job.tokenizer_and_labels
    example = task.longest_example() if hasattr(task, "longest_example") else None
    try:
        example = example or next(task.cut("", [3] * (job.length + 1), 0, tokenizer))
        batch = task.collate([{**example, "id": 0}], (0, 0), tokenizer.pad_token_id)
        return batch.shape, tensors_of(batch)
    except Exception:  # a task of your own may want a text
        return (1, job.length), {}


def tensors_of(batch: MicroBatch) -> dict[str, tuple[tuple[int, ...], str]]:
    """The shape for one example, with -1 for S, and the type of the tensors of ``batch``, as in ``Job.tensors``."""
    found = {}
    for name, tensor in {**batch.inputs, "labels": batch.labels}.items():
        if hasattr(tensor, "dtype") and name not in ("attention_mask", "position_ids"):
            kind = str(tensor.dtype).removeprefix("torch.")
            if name not in ("input_ids", "labels") and tensor.ndim == 2 and bool(((tensor == 0) | (tensor == 1)).all()):
                most = int(tensor.sum(1).max())  # a mask: by how many a row chooses, memory may go
                kind += f" {-1 if most == batch.shape[1] else most}"
            found[name] = tuple(-1 if n == batch.shape[1] else n for n in tensor.shape[1:]), kind
    return found


def _micro_batch_size(config: Config, world_size: int) -> int:
    """Examples of a micro-batch; with a budget of tokens, as many of the longest as fit into it."""
    optim, max_tokens = config.optimization, config.get("max_tokens_per_micro_batch")
    if max_tokens is None:
        return int(optim.micro_batch_size)
    return max(1, min(max_tokens // config.data.max_length, (optim.global_batch_size or world_size) - world_size + 1))


def vocabulary_size(config: Config) -> int:
    """Tokens of the model's vocabulary; raises UserError if only data tells, or model or tokenizer cannot be loaded."""
    spec = config.data.tokenizer or config.architecture.model or ""
    if (size := _model_says(config, "vocab_size")) is not None:
        return size
    if spec == "bytes":
        return BYTE_VOCABULARY
    if spec.startswith("train:"):
        return int(spec.removeprefix("train:"))
    if spec == "words":
        raise UsageError("tokenizer: words: its size depends on the training text. Give it: --vocab_size 20000.")
    from train.tasks import load_tokenizer

    try:
        return len(load_tokenizer(spec, config.architecture.trust_remote_code))
    except UserError as error:
        raise UserError(f"{error} Or give the size of its vocabulary: --vocab_size 32000.") from None


def position_limit(config: Config) -> int | None:
    """Tokens that the model takes at most; None: as many as ``max_length`` says."""
    limit, factor = _model_says(config, "max_position_embeddings") or -1, config.get("rope_scaling_factor")
    if limit < 0 or config.get("rope_scaling", "none") != "none":  # -1: transformers' word for none
        rope = _model_says(config, "rope_parameters") or {}  # by it, where YaRN has made them more
        trained = rope.get("full_attention", rope).get("original_max_position_embeddings", limit)
        return math.ceil(trained * factor) if limit > 0 and factor else None
    import torch
    from transformers import AutoConfig, AutoModel

    from train.extras.weightless import skipped_positions
    from train.tasks import stored_config

    own = config.architecture
    with suppress(Exception), torch.device("meta"):  # a run reports what cannot be built
        known = AutoConfig.for_model(**own.model_config) if own.model_config else stored_config(own)
        limit -= skipped_positions(AutoModel.from_config(known))
    return limit


def _model_says(config: Config, name: str) -> Any:
    """A number or mapping in the configuration of the model, before ``rope_scaling``; None where nothing says it."""
    architecture, given = config.architecture, config.architecture.model_config
    if given is None:
        from train.tasks import stored_config

        is_stored = architecture.model is not None and not architecture.is_function
        return getattr(stored_config(architecture).get_text_config(), name, None) if is_stored else None
    from transformers import AutoConfig

    size = given.get(name)
    with suppress(KeyError, ValueError):  # the builder reports it, and what is not a number
        size = size or given.get(AutoConfig.for_model(given["model_type"]).attribute_map.get(name, name))
    return size if isinstance(size, int | dict) else None


@dataclass(frozen=True, kw_only=True)
class Setting(Recompute):
    """What the search may choose."""

    micro_batch_size: int
    mixed_precision: str | None
    dtype: str = "float32"  # of the weights, which the search leaves as it is
    loss: str = "full"
    sharding: str = "none"

    def __str__(self) -> str:
        return f"micro-batch {self.micro_batch_size}, {self.techniques}"

    @property
    def techniques(self) -> str:
        """All but the micro-batch."""
        precision = SHORT[self.dtype] if self.mixed_precision in (None, "no") else self.mixed_precision
        tiled = ", tiled MLP" if self.tiled_mlp else ""
        sharding = "" if self.sharding == "none" else f", {self.sharding}"
        return f"checkpointing {super().__str__()}{tiled}, precision {precision}, loss {self.loss}{sharding}"

    def recomputing(self, way: Recompute) -> "Setting":
        """This setting with another way to recompute; tiles that were asked for stay."""
        return replace(self, **{**vars(way), "tiled_mlp": self.tiled_mlp or way.tiled_mlp})


@dataclass(frozen=True)
class Question:
    config: Config
    device: Device
    vocab_size: int
    num_labels: int = 0
    world_size: int = 1
    sharding: str | None = None  # None: the better of ddp and fsdp2, or fsdp2_offload if none fits
    pads: bool = True  # False: padding would change the model's results

    @property
    def on_cpu(self) -> bool:
        """Whether the device, a CPU or Apple's GPU, has no memory of its own."""
        return self.device.kind != "cuda"

    @property
    def total_bytes(self) -> float:
        """Of the device, or the configuration's own budget."""
        own = self.device.total_bytes // (self.world_size if self.device.kind == "cpu" else 1)  # which ranks share
        return min(own, (self.config.get("memory_budget_gib") or math.inf) * 2**30)

    @property
    def room_bytes(self) -> int:
        """Memory that a rank may use: the total without the margin."""
        return int(self.total_bytes * (1 - MARGIN))

    @property
    def nccl_bytes(self) -> int:
        return 0 if self.on_cpu else nccl_buffer_bytes(self.world_size)

    @property
    def global_batch_size(self) -> int:
        """Examples of an optimizer step, over all ranks; raises UsageError if the sizes contradict each other."""
        return arithmetic_of(self.config, self.world_size).global_batch_size

    @property
    def asked(self) -> Setting:
        values, sharding = to_values(self.config), self.shardings[0]
        values["micro_batch_size"] = _micro_batch_size(self.config, self.world_size)
        if values.get("loss") == "auto":
            values["loss"] = self.automatic_loss
        values["sharding"], values["mixed_precision"] = sharding, values["mixed_precision"] or self.precision(sharding)
        return Setting(**{field.name: values[field.name] for field in fields(Setting) if field.name in values})

    @property
    def stages(self) -> list[tuple[tuple[Recompute, ...], tuple[str, ...]]]:
        """(ways to recompute, shardings) by stage, least saving first: a stage is tried if nothing fits before it."""
        # Without the extra activations there is but one way.
        ladder = ladder_on(self.device.kind) if "gradient_checkpointing" in to_values(self.config) else (Recompute(),)
        ways = tuple(way for way in ladder if not (way.gradient_checkpointing_offload or way.tiled_mlp))
        resorts = ladder[len(ways) :] or ways
        found = [(ways, self.shardings), (resorts, self.shardings[-1:])]
        if self.sharding is None and not self.on_cpu and not self.needs_whole_weights:  # its copies take longest
            found += [(ways, (OFFLOAD,)), (resorts, (OFFLOAD,))]
        return found

    @property
    def automatic_loss(self) -> str:
        """The loss that ``auto`` means for most models; the extra losses makes the final choice."""
        from train.extras.losses.in_head import MIN_CHUNKED_CLASSES

        return "full" if self.num_labels or self.vocab_size < MIN_CHUNKED_CLASSES else self._best_loss

    @property
    def losses(self) -> tuple[str, ...]:
        """Losses to try, from fast with much memory to slow with little."""
        asked = self.config.get("loss")
        if self.num_labels or asked is None:  # None without the extra losses
            return ("full",)
        return "full", self._best_loss if asked in ("auto", "full") else asked

    @property
    def _best_loss(self) -> str:
        """The loss without all logits that a run would choose, with the packages that are installed here."""
        import torch

        from train.extras.losses.chunked import objective_of
        from train.extras.losses.fused import Place, best_kernel

        dtype = getattr(torch, HALF.get(self.precision(self.shardings[0]) or "no", self.config.architecture.dtype))
        target, objective = target_of(self.device), objective_of(self.config)
        return best_kernel(Place(target.device_type, dtype, target.capability), objective=objective)

    @property
    def shardings(self) -> tuple[str, ...]:
        """Ways to divide the work that may be chosen, the one that communicates least first."""
        if self.sharding is not None:
            return (self.sharding,)
        return ("none",) if self.world_size == 1 else ("ddp",) if self.needs_whole_weights else ("ddp", "fsdp2")

    @property
    def needs_whole_weights(self) -> bool:
        """Whether the optimizer does not work with sharded weights."""
        with suppress(UsageError):
            extras.check(self.config, Launch(2, engine="fsdp2"))
            return False
        return True

    def precision(self, sharding: str) -> str | None:
        """The precision asked for; where none is, or the device lacks it, what a run takes on such a card."""
        asked, has_bf16 = self.config.optimization.mixed_precision, target_of(self.device).capability >= (8, 0)
        if self.on_cpu or asked not in ("bf16", None):
            return asked
        if asked is None:
            own_type = self.config.architecture.dtype != "float32"
            return None if own_type else automatic_precision(self._launch(sharding), self.config, has_bf16)[0]
        return "bf16" if has_bf16 else "fp16"

    def job(self, setting: Setting) -> Job:
        """The step with ``setting``; raises UsageError if the optimizer or dtype asked for does not work with it."""
        config, target = self.config.changed(**self.changes(setting)), target_of(self.device)
        if config.architecture.dtype == "bfloat16" and not self.on_cpu and target.capability < (8, 0):
            raise UsageError(f"dtype: {self.device.name} {NO_BF16_WEIGHTS}.")
        extras.check(config, self._launch(setting.sharding))
        job = job_of(config, target, self.vocab_size, self.num_labels, self.world_size)
        return replace(job, sharding=setting.sharding)

    def _launch(self, sharding: str) -> Launch:
        engine = "fsdp2" if sharding in SHARDED_WEIGHTS else "ddp"
        return Launch(self.world_size, engine=engine, offloads=sharding == OFFLOAD)

    def changes(self, setting: Setting) -> dict[str, Any]:
        """What has to change in the configuration for ``setting`` and the same global batch, by flag."""
        values, wanted = to_values(self.config), {**vars(setting)}  # the sharding is the launcher's, and no flag
        if values.get("loss") == "auto" and setting.loss == self.automatic_loss:
            wanted["loss"] = "auto"
        if values.get("max_tokens_per_micro_batch") is not None:
            del wanted["micro_batch_size"]
            if setting.micro_batch_size != self.asked.micro_batch_size:
                wanted["max_tokens_per_micro_batch"] = setting.micro_batch_size * values["max_length"]
        elif setting.micro_batch_size != values["micro_batch_size"]:
            wanted |= {"global_batch_size": self.global_batch_size, "gradient_accumulation_steps": None}
        return {name: value for name, value in wanted.items() if name in values and value != values[name]}


def replace_length(question: Question, length: int) -> Question:
    config = question.config.changed(max_length=length)
    # The factor follows the length, if none is given; a run refuses one where the model has positions enough.
    follows = config.get("rope_scaling", "none") != "none" and config.get("rope_scaling_factor") is None
    if follows and length <= (_model_says(config, "max_position_embeddings") or 0):
        config = config.changed(rope_scaling="none")
    return replace(question, config=config)
