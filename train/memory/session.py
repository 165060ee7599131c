"""What a run does about its memory: predict, choose, rehearse, explain."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from train.config import Config, to_values
from train.extras.host_memory import free_host_bytes
from train.figures import gib
from train.memory import Options
from train.memory.devices import this_device
from train.memory.explain import Change, Situation, post_mortem
from train.memory.ladder import cheaper, choose, largest_fitting
from train.memory.predict import Job, Prediction, Predictor
from train.memory.question import target_of
from train.memory.rehearsal import rehearse
from train.records import Batches, Run, UserError

if TYPE_CHECKING:
    from accelerate import Accelerator

    from train.data import PreparedData
    from train.loop import Parts

MARGIN = 0.03
"""Share of the free memory that a chosen micro-batch leaves alone."""
SIZES = [2**power for power in range(11)]
"""Micro-batch sizes to choose from where no global batch restricts them."""


class MemorySession:
    """Memory of one run on one rank; starts the process that predicts, because its imports take seconds."""

    def __init__(self, run: Run, data: PreparedData) -> None:
        self._run, self._predictor = run, None
        self._asked: Job | None = None
        self._prediction: Prediction | None = None
        special = (data.tokenizer.bos_token_id, data.tokenizer.eos_token_id, data.tokenizer.pad_token_id)
        start, end, padding = (i if isinstance(i, int) else None for i in special)
        self._base = Job(
            values=self._values(run.config),
            target=target_of(this_device()),
            task=data.task.name,
            vocab_size=len(data.tokenizer),
            micro_batch_size=1,
            length=run.config.data.max_length,
            num_labels=len(data.examples.label_names),
            special_tokens=(start, end, padding),
            world_size=run.launch.world_size,
            sharding=sharding_of(run.accelerator),
        )
        self._data = data
        wanted = run.config.of(Options).predict_memory or is_left_open(run.config)
        # A rank's share of a layer or a sequence is not predicted.
        self._is_predictable = run.launch.copies == 1 and run.accelerator.device.type in ("cpu", "cuda")
        if run.accelerator.is_main_process and wanted and self._is_predictable:
            self._predictor = Predictor()
            self._predictor.start()

    def close(self) -> None:
        """Ends the process that predicts."""
        if self._predictor is not None:
            self._predictor.close()
            self._predictor = None

    def _values(self, config: Config) -> dict[str, Any]:
        """``config`` with the precision that the launcher chose where it leaves that open."""
        values = to_values(config)
        return {**values, "mixed_precision": values["mixed_precision"] or self._run.launch.precision}

    def settle(self) -> Config:
        """The configuration with what it leaves to ``auto`` chosen, the same on every rank.

        First the least recomputation with which a step fits, where micro_batch_size is auto too of single examples;
        then the largest micro-batch that fits with it.

        Raises:
            UserError: nothing fits, or this model cannot be predicted.
        """
        from train.batching import arithmetic_of

        run = self._run
        pair = self._data.training_batches(run, arithmetic_of(run.config, 1, size_for_auto=2)).longest()
        self._has_padding = "attention_mask" in pair.inputs
        config = run.config
        if config.get("gradient_checkpointing") == "auto":
            chosen = run.outputs.from_main(lambda: self._least_recomputation(config))
            config = config.changed(**chosen)
        if config.optimization.micro_batch_size == "auto":
            size = run.outputs.from_main(lambda: self._largest_fitting(config))
            config = config.changed(micro_batch_size=size)
        return config

    def _least_recomputation(self, config: Config) -> dict[str, Any]:
        needs = self._needs("gradient_checkpointing")
        size = config.optimization.micro_batch_size
        one = config.changed(micro_batch_size=1 if size == "auto" else size)
        offload, device = config.get("gradient_checkpointing_offload"), self._run.accelerator.device
        room = self._room_bytes()
        chosen, line = choose(lambda changes: needs(one.changed(**changes)), room, device.type, offload)
        self._run.outputs.say(line)
        return chosen

    def _room_bytes(self) -> int:
        """What may be taken of the device."""
        free, budget = free_bytes(self._run.accelerator.device), self._run.config.of(Options).memory_budget_gib
        return int((free if budget is None else min(free, budget * 2**30)) * (1 - MARGIN))

    def _needs(self, name: str) -> Callable[[Config], int]:
        """Predicts the bytes that a step of a configuration needs; ``name`` is what is left to auto."""
        predictor, dp_size = self._predictor, self._run.launch.dp_size
        if predictor is None:
            kind = self._run.accelerator.device.type
            raise UserError(f"{name}: auto is not known for {kind}: choose it yourself.")

        def needs(config: Config) -> int:
            optim, size = config.optimization, config.optimization.micro_batch_size
            assert size != "auto"
            share = (optim.global_batch_size or 0) // dp_size // size
            job = replace(
                self._base,
                values=self._values(config),
                micro_batch_size=size,
                accumulates=(optim.gradient_accumulation_steps or share) > 1,
                padded=self._has_padding and size > 1,
                eval_batch_size=config.output.eval_batch_size or size,
            )
            return predictor.predict(job).reserved_bytes

        return needs

    def _largest_fitting(self, config: Config) -> int:
        optim, needs_of, sizes = config.optimization, self._needs("micro_batch_size"), SIZES
        if optim.global_batch_size is not None:
            share = optim.global_batch_size // self._run.launch.dp_size
            sizes = [size for size in range(1, share + 1) if share % size == 0] or [1]
        room = self._room_bytes()
        needed: dict[int, int] = {}

        def needs(size: int) -> int:
            needed[size] = needs_of(config.changed(micro_batch_size=size))
            return needed[size]

        best = largest_fitting(sizes, needs, room, first=sizes[0])
        if best is None:
            raise UserError(
                f"micro_batch_size: auto: one example of {config.data.max_length:,} tokens is predicted to need "
                f"{gib(needed[sizes[0]])}, and {gib(room)} may be taken. python -m train.memory plan finds settings "
                "that fit."
            )
        self._run.outputs.say(
            f"micro_batch_size: {best}, predicted to take {gib(needed[best])} of {gib(room)} that may be taken"
        )
        return best

    def ask(self, batches: Batches, accumulates: bool) -> None:
        """Has the step with the longest micro-batch predicted while the model is built."""
        longest = self._longest = batches.longest()
        if not self._is_predictable:
            return
        size, length = longest.shape
        documents = longest.inputs.get("documents")
        not_shaped = ("attention_mask", "position_ids", "documents")
        self._asked = replace(
            self._base,
            values=self._values(self._run.config),
            micro_batch_size=size,
            length=length,
            accumulates=accumulates,
            padded="attention_mask" in longest.inputs,
            num_targets=longest.num_targets or None,
            input_names=tuple(name for name in longest.inputs if name not in not_shaped),
            documents=documents.lengths if documents is not None else (),
            eval_batch_size=self._run.config.output.eval_batch_size or size,
        )
        if self._predictor is not None and self._run.config.of(Options).predict_memory:
            self._predictor.ask(self._asked)

    def rehearse(self, parts: Parts) -> None:
        """Makes the most expensive step once, without a trace, and shows measured next to predicted."""
        run, own = self._run, self._run.config.of(Options)
        said = "memory: not rehearsed"
        if own.rehearse and run.launch.engine != "deepspeed":
            meter, accumulates = run.extras.by_name["meter"], parts.arithmetic.accumulation_steps > 1
            rehearse(run, parts, [self._longest] * (2 if accumulates else 1))
            size, length = self._longest.shape
            figures: dict[str, Any] = {"tokens_per_second": 0.0, "peak_allocated_bytes": 0}
            meter.measured(run, figures)
            said = f"memory: the longest step ({size} × {length:,} tokens) peaks at "
            said += gib(figures["peak_allocated_bytes"])
            if figures.get("peak_reserved_bytes"):
                said += f" allocated, {gib(figures['peak_reserved_bytes'])} reserved"
        if self._predictor is not None and self._asked is not None and own.predict_memory:
            try:
                self._prediction = self._predictor.answer()
                said += f", predicted {gib(self._prediction.peak_bytes)}"
                if run.accelerator.device.type == "cuda":
                    said += f" allocated, {gib(self._prediction.reserved_bytes)} reserved"
            except UserError as error:
                said += f", not predicted: {error}"
        self.close()
        run.outputs.say(said)

    def summary(self) -> dict[str, Any]:
        """Figures for ``summary.json``."""
        if self._prediction is None:
            return {}
        reserved = self._prediction.reserved_bytes
        return {"predicted_peak_bytes": self._prediction.peak_bytes, "predicted_reserved_bytes": reserved}

    def explain(self, error: Any) -> str:
        """The post-mortem of a run that ended with ``error``, of memory that ran out.

        Args:
            error: with ``fault`` (phase, shape, error), where a step knew where it was.
        """
        meter = getattr(self._run.extras.by_name["meter"], "meter", None)
        fault = getattr(error, "fault", None)
        shape = fault.shape if fault else getattr(meter, "last_shape", None)
        predicted, changes = self._cheaper_settings(shape)
        kinds = predicted.bytes_by_kind if predicted else getattr(meter, "bytes_by_kind", {})
        situation = Situation(
            phase=fault.phase if fault else getattr(meter, "phase", "") or "outside a step",
            micro_batch_shape=shape,
            bytes_by_kind=kinds,
            predicted_peak_bytes=predicted.peak_bytes if predicted else None,
            vocab_size=self._base.vocab_size,
        )
        text = post_mortem(fault.error if fault else str(error), situation, changes)
        if self._run.config.get("memory_snapshot") and torch.cuda.is_available():
            path = self._run.outputs.folder / f"memory_snapshot-{os.environ.get('RANK', '0')}.pickle"
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


def is_left_open(config: Config) -> bool:
    """Whether something is to be chosen by what is predicted."""
    return "auto" in (config.optimization.micro_batch_size, config.get("gradient_checkpointing"))


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
