"""What a run does about its memory, put together for ``train.main``: predict, choose, measure, rehearse, explain."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from train.config import Config, Optimization, to_values
from train.errors import UserError
from train.extras.activations.recompute import enable_checkpointing
from train.extras.endurance.host_memory import free_host_bytes
from train.extras.endurance.recovery import Measure, OutOfMemoryError, RecoveringStep, can_recover, shape_of
from train.extras.losses.answering_head import obstacle_to_chunks
from train.extras.meter.memory import MemoryMeter
from train.loss import ModelWithLoss
from train.memory.devices import this_device
from train.memory.explain import Change, Situation, post_mortem
from train.memory.ladder import cheaper, choose, largest_fitting
from train.memory.oom import is_out_of_memory
from train.memory.predict import Job, Prediction, Predictor
from train.memory.question import target_of
from train.memory.rehearsal import rehearse
from train.optim import step_function
from train.records import Meter, MicroBatch, StepOutcome
from train.runtime import DeviceMeter
from train.wording import gib

if TYPE_CHECKING:
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer
    from transformers import PreTrainedTokenizerBase

    from train.launch import Launch

MARGIN = 0.03
"""Share of the free memory that a chosen micro-batch leaves alone."""
SIZES = [2**power for power in range(11)]
"""Micro-batch sizes to choose from where no global batch restricts them."""


class MemorySession:
    """Memory of one run on one rank; the methods are called in the order in which they stand here.

    Args:
        say: a line for the person who watches.
    """

    def __init__(self, config: Config, say: Callable[[str], None]) -> None:
        self._config, self._say = config, say
        self._predictor: Predictor | None = None
        self._base: Job | None = None
        self._data_size, self._launched_precision = 1, "no"
        self._predictable = True
        self._asked: Job | None = None
        self._prediction: Prediction | None = None
        self._recovering: RecoveringStep | None = None
        self.meter: Meter = DeviceMeter(torch.device("cpu"))
        self.step: Callable[..., StepOutcome] = step_function(config.optimization)

    def close(self) -> None:
        """Ends the process that predicts."""
        if self._predictor is not None:
            self._predictor.close()
            self._predictor = None

    def describe(
        self,
        accelerator: Accelerator,
        launch: Launch,
        auto_class: str,
        tokenizer: PreTrainedTokenizerBase,
        num_labels: int,
    ) -> None:
        """Says what is to be trained, and starts the process that predicts: its imports take seconds."""
        self._data_size, self._launched_precision = launch.data_size, launch.precision
        special = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id)
        start, end, padding = (i if isinstance(i, int) else None for i in special)
        self._base = Job(
            values=self._values(self._config),
            target=target_of(this_device()),
            auto_class=auto_class,
            vocab_size=len(tokenizer),
            micro_batch_size=1,
            length=self._config.data.max_length,
            num_labels=num_labels,
            special_tokens=(start, end, padding),
            world_size=launch.world_size,
            sharding=sharding_of(accelerator),
        )
        wanted = self._config.memory.predict_memory or is_left_open(self._config)
        self._predictable = launch.copies == 1  # a rank's share of a layer or a sequence is not predicted
        if accelerator.is_main_process and wanted and self._predictable and accelerator.device.type in ("cpu", "cuda"):
            self._predictor = Predictor()
            self._predictor.start()

    def _values(self, config: Config) -> dict[str, Any]:
        """``config`` with the precision that the launcher chose where it leaves that open."""
        values = to_values(config)
        return {**values, "mixed_precision": values["mixed_precision"] or self._launched_precision}

    def settle(self, accelerator: Accelerator, has_padding: bool) -> Config:
        """The configuration with what it leaves to ``auto`` chosen, the same on every rank.

        First the least recomputation with which a step fits, where micro_batch_size is auto too of single examples;
        then the largest micro-batch that fits with it.

        Args:
            has_padding: whether examples of different lengths come with an attention mask.

        Raises:
            UserError: nothing fits, or this model cannot be predicted.
        """
        if self._config.architecture.gradient_checkpointing == "auto":
            chosen = self._on_main_process(accelerator, lambda: self._least_recomputation(accelerator, has_padding))
            self._config = replace(self._config, architecture=replace(self._config.architecture, **chosen))
        if self._config.optimization.micro_batch_size == "auto":
            self.micro_batch_size(accelerator, has_padding)
        return self._config

    def _least_recomputation(self, accelerator: Accelerator, has_padding: bool) -> dict[str, Any]:
        needs = self._needs("gradient_checkpointing", accelerator, has_padding)
        size = self._config.optimization.micro_batch_size
        config = with_micro_batch_size(self._config, 1 if size == "auto" else size)

        def needs_of(changes: dict[str, Any]) -> int:
            return needs(replace(config, architecture=replace(config.architecture, **changes)))

        offload = self._config.architecture.gradient_checkpointing_offload
        chosen, line = choose(needs_of, self._room_bytes(accelerator.device), accelerator.device.type, offload)
        self._say(line)
        return chosen

    def micro_batch_size(self, accelerator: Accelerator, has_padding: bool) -> int:
        """The largest micro-batch that is predicted to fit, for ``micro_batch_size: auto``; the same on every rank.

        It divides this process's share of the global batch, where that is given.

        Args:
            has_padding: whether examples of different lengths come with an attention mask.

        Raises:
            UserError: not even one example fits, or this model cannot be predicted.
        """
        found = self._on_main_process(accelerator, lambda: self._largest_fitting(accelerator, has_padding))
        self._config = with_micro_batch_size(self._config, found)
        return found

    def _on_main_process(self, accelerator: Accelerator, work: Callable[[], Any]) -> Any:
        """What ``work`` gives on the main process, or its UserError, on every rank."""
        from accelerate.utils import broadcast_object_list

        choice: list[Any] = [None]
        if accelerator.is_main_process:
            try:
                choice[0] = work()
            except UserError as error:
                choice[0] = error
        found = broadcast_object_list(choice)[0]
        if isinstance(found, UserError):
            raise found
        return found

    def _room_bytes(self, device: torch.device) -> int:
        """What may be taken of ``device``."""
        free, budget = free_bytes(device), self._config.memory.memory_budget_gib
        return int((free if budget is None else min(free, budget * 2**30)) * (1 - MARGIN))

    def _needs(self, name: str, accelerator: Accelerator, has_padding: bool) -> Callable[[Config], int]:
        """Tells the bytes that a step of a configuration is predicted to need; ``name`` is what is left to auto."""
        base, predictor = self._base, self._predictor
        if base is None or predictor is None:
            raise UserError(f"{name}: auto is not known for {accelerator.device.type}: choose it yourself.")

        def needs(config: Config) -> int:
            optim, size = config.optimization, config.optimization.micro_batch_size
            assert size != "auto"
            share = (optim.global_batch_size or 0) // self._data_size // size
            job = replace(
                base,
                values=self._values(config),
                micro_batch_size=size,
                accumulates=(optim.gradient_accumulation_steps or share) > 1,
                padded=has_padding and size > 1,
                eval_batch_size=config.output.eval_batch_size or size,
            )
            return predictor.predict(job).reserved_bytes

        return needs

    def _largest_fitting(self, accelerator: Accelerator, has_padding: bool) -> int:
        optim = self._config.optimization
        needs_of = self._needs("micro_batch_size", accelerator, has_padding)
        sizes = SIZES
        if optim.global_batch_size is not None:
            share = optim.global_batch_size // self._data_size
            sizes = [size for size in range(1, share + 1) if share % size == 0] or [1]
        room = self._room_bytes(accelerator.device)
        needed: dict[int, int] = {}

        def needs(size: int) -> int:
            needed[size] = needs_of(with_micro_batch_size(self._config, size))
            return needed[size]

        best = largest_fitting(sizes, needs, room, first=sizes[0])
        if best is None:
            raise UserError(
                f"micro_batch_size: auto: one example of {self._config.data.max_length:,} tokens is predicted to need "
                f"{gib(needed[sizes[0]])}, and {gib(room)} may be taken. python -m train.memory plan finds settings "
                "that fit."
            )
        self._say(f"micro_batch_size: {best}, predicted to take {gib(needed[best])} of {gib(room)} that may be taken")
        return best

    def ask(self, longest: MicroBatch, accumulates: bool) -> None:
        """Has the step with the longest micro-batch predicted, beside whatever comes next."""
        if self._base is None or not self._predictable:
            return
        size, length = shape_of(longest)
        self._asked = replace(
            self._base,
            values=self._values(self._config),
            micro_batch_size=size,
            length=length,
            accumulates=accumulates,
            padded="attention_mask" in longest.inputs,
            num_targets=longest.num_targets or None,
            input_names=tuple(name for name in longest.inputs if name not in ("attention_mask", "position_ids")),
            documents=longest.documents.lengths if longest.documents is not None else (),
            eval_batch_size=self._config.output.eval_batch_size or size,
        )
        if self._predictor is not None and self._config.memory.predict_memory:
            self._predictor.ask(self._asked)

    def equip(self, accelerator: Accelerator, model: Any, optimizer: AcceleratedOptimizer) -> None:
        """Makes the meter and the step that the loop will be handed."""
        inner = cast("ModelWithLoss", accelerator.unwrap_model(model))
        settings = self._config.memory
        if settings.measure_memory and accelerator.device.type in ("cpu", "cuda"):
            classes = (self._base.num_labels or self._base.vocab_size) if self._base else None
            self.meter = MemoryMeter(accelerator.device, inner.model, optimizer.optimizer, classes, self._say)
        else:
            self.meter = DeviceMeter(accelerator.device)
        on_oom = settings.on_oom
        if on_oom == "auto":
            may_repeat = accelerator.num_processes == 1 and not self._config.optimization.optimizer_in_backward
            on_oom = "split" if may_repeat else "stop"
        if on_oom != "stop" and can_recover(accelerator):
            measures = further_measures(inner, self._config) if on_oom == "adapt" else ()
            self.step = self._recovering = RecoveringStep(self._say, measures)
        if settings.memory_snapshot and accelerator.device.type == "cuda":
            torch.cuda.memory._record_memory_history()

    def rehearse(
        self,
        accelerator: Accelerator,
        model: Any,
        optimizer: AcceleratedOptimizer,
        longest: MicroBatch,
        accumulates: bool,
        evaluated: MicroBatch | None,
        config: Optimization,
    ) -> None:
        """Makes the most expensive step once, without a trace, and shows measured beside predicted."""
        from accelerate.utils import DistributedType

        if self._config.memory.rehearse and accelerator.distributed_type != DistributedType.DEEPSPEED:
            window = [longest] * (2 if accumulates else 1)
            rehearse(accelerator, model, optimizer, self.step, window, evaluated, config, self.meter)
            size, length = shape_of(longest)
            figures = self.meter.interval()
            peak = gib(figures["peak_allocated_bytes"])
            said = f"memory: the longest step ({size} × {length:,} tokens) peaks at {peak}"
            if figures.get("peak_reserved_bytes"):
                said += f" allocated, {gib(figures['peak_reserved_bytes'])} reserved"
        else:
            said = "memory: not rehearsed"
        if self._predictor is not None and self._asked is not None and self._config.memory.predict_memory:
            try:
                self._prediction = self._predictor.answer()
                said += f", predicted {gib(self._prediction.peak_bytes)}"
                if accelerator.device.type == "cuda":
                    said += f" allocated, {gib(self._prediction.reserved_bytes)} reserved"
            except UserError as error:
                said += f", not predicted: {error}"
        self.close()
        self._say(said)

    def summary(self) -> dict[str, Any]:
        """Figures for ``summary.json``."""
        figures = self.meter.summary()
        if self._prediction is not None:
            figures["predicted_peak_bytes"] = self._prediction.peak_bytes
            figures["predicted_reserved_bytes"] = self._prediction.reserved_bytes
        if self._recovering is not None:
            figures["oom_recoveries"] = self._recovering.recoveries
        return figures

    def explain(self, error: Exception, folder: Path) -> str | None:
        """The post-mortem of a run that ended with ``error``; None where that was not for want of memory."""
        if not isinstance(error, OutOfMemoryError) and not is_out_of_memory(error):
            return None
        fault = error.fault if isinstance(error, OutOfMemoryError) else None
        shape = fault.shape if fault else getattr(self.meter, "last_shape", None)
        predicted, changes = self._cheaper_settings(shape)
        kinds = predicted.bytes_by_kind if predicted else getattr(self.meter, "bytes_by_kind", {})
        situation = Situation(
            phase=fault.phase if fault else getattr(self.meter, "phase", "") or "outside a step",
            micro_batch_shape=shape,
            bytes_by_kind=kinds,
            predicted_peak_bytes=predicted.peak_bytes if predicted else None,
            vocab_size=self._base.vocab_size if self._base else None,
        )
        text = post_mortem(fault.error if fault else str(error), situation, changes)
        if self._config.memory.memory_snapshot and torch.cuda.is_available():
            path = folder / f"memory_snapshot-{os.environ.get('RANK', '0')}.pickle"
            torch.cuda.memory._dump_snapshot(str(path))
            text += f"\nmemory snapshot: {path} (open it at https://pytorch.org/memory_viz)"
        return text

    def _cheaper_settings(self, shape: tuple[int, int] | None) -> tuple[Prediction | None, list[Change]]:
        """The prediction for a micro-batch of ``shape``, and what the cheapest changes would save of it."""
        job, now, changes = self._asked, None, []
        if job is None:
            return None, []
        if shape is not None:
            job = replace(job, micro_batch_size=shape[0], length=shape[1], num_targets=None)
        try:
            with Predictor() as predictor:
                now = predictor.predict(job)
                for flags, note, changed in cheaper(job):
                    saved = now.peak_bytes - predictor.predict(changed).peak_bytes
                    if saved > 0:
                        changes.append(Change(flags, saved, note))
        except UserError:
            pass
        return now, changes


def further_measures(model: ModelWithLoss, config: Config) -> Sequence[Measure]:
    """For a step that does not fit with single examples: what can be switched on in the middle of a run."""

    now = config.architecture

    def checkpoint() -> bool:
        try:
            enable_checkpointing(model.model, "full", offload=now.gradient_checkpointing_offload)
        except UserError:
            return False
        return True

    def chunk() -> bool:
        if model.chunked or obstacle_to_chunks(model.model) is not None:
            return False
        model.work_in_chunks()
        return True

    measures: list[Measure] = [("the loss never holds all logits from now on", chunk)]
    if now.gradient_checkpointing != "full" or now.gradient_checkpointing_every_n_layers > 1:
        measures.append(("activation checkpointing is switched on", checkpoint))
    return measures


def is_left_open(config: Config) -> bool:
    """Whether something is to be chosen by what is predicted."""
    return "auto" in (config.optimization.micro_batch_size, config.architecture.gradient_checkpointing)


def with_micro_batch_size(config: Config, size: int) -> Config:
    """``config`` with the number of examples that ``auto`` came to."""
    return replace(config, optimization=replace(config.optimization, micro_batch_size=size))


def sharding_of(accelerator: Accelerator) -> str:
    """How this run is spread over processes, in the words of :class:`train.memory.predict.Job`."""
    from accelerate.utils import DistributedType

    if accelerator.num_processes == 1:
        return "none"
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        plugin = accelerator.state.deepspeed_plugin
        return {2: "zero2", 3: "zero3"}.get(plugin.zero_stage if plugin else 0, "ddp")
    return "fsdp2" if accelerator.is_fsdp2 else "ddp"


def free_bytes(device: torch.device) -> int:
    """Bytes that this process may still take on ``device``; on a CPU, its share of what is available."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return free_host_bytes()
