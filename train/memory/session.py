"""What a run does about its memory: predict, choose, rehearse, explain."""

import math
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import cached_property, partial
from typing import Any
from unittest.mock import patch

import psutil  # comes with accelerate
import torch
from accelerate import init_empty_weights
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn

from train import checkpoint
from train.batching import load
from train.config import Config
from train.data import PreparedData
from train.evaluation import reshard, score
from train.extras.host_memory import free_host_bytes
from train.extras.longest import longest_of, with_padding
from train.extras.oom import parse_oom
from train.figures import gib
from train.memory import Options, is_known
from train.memory.devices import find_device, this_device
from train.memory.explain import Situation, explain, post_mortem
from train.memory.ladder import cheaper, choose, divisors, recomputations
from train.memory.predict import OFFLOAD, Job, Prediction, Predictor
from train.memory.question import job_of, target_of, tensors_of
from train.model import build_network
from train.records import IGNORE, MicroBatch, Parts, Run, UserError, column
from train.tasks import Task, stored_config

MARGIN_OF_FREE = 0.03  # share of the free memory that a chosen micro-batch leaves alone


class MemorySession:
    def __init__(self, run: Run, data: PreparedData, predictor: Predictor) -> None:
        self._run, self._data, self._predictor = run, data, predictor
        self._own, self._device = run.config.of(Options), run.accelerator.device
        self._asked = list[Job]()
        self.figures: dict[str, int] = {}  # for ``summary.json``
        self._is_predictable = is_known(run.launch) and self._device.type in ("cpu", "cuda", "mps")
        self._predicts = self._is_predictable and run.accelerator.is_main_process and self._own.predict_memory

    def _jobs(self, config: Config) -> list[Job]:
        """Steps of ``config`` with the longest examples of this run's data, and the evaluation of the longest."""
        run, data, tokenizer = replace(self._run, config=config), self._data, self._data.tokenizer
        evaluated, sharding = _evaluated(run, data), "ddp" if run.launch.world_size > 1 else "none"
        if run.accelerator.is_fsdp2:  # on a CPU there is nowhere to offload to
            sharding = OFFLOAD if run.launch.offloads and self._device.type != "cpu" else "fsdp2"
        device = find_device("cpu") if self._device.type == "cpu" else this_device()  # a CPU run may have a card unused
        job = job_of(config, target_of(device), len(tokenizer), len(data.label_names), run.launch.world_size)
        ids = (tokenizer.bos_token_id, *(data.task.special_tokens(tokenizer)[1] or [None]), tokenizer.pad_token_id)
        job = replace(
            job,
            values={**job.values, "mixed_precision": job.values["mixed_precision"] or run.launch.precision},
            special_tokens=tuple(i if isinstance(i, int) else None for i in ids),
            sharding=sharding,
            eval_batch_size=evaluated.shape[0],
            eval_length=evaluated.shape[1],
            eval_padded="attention_mask" in evaluated.inputs,
        )
        found = []
        for batch in map(partial(most_work, task=data.task), longest_of(data.training_batches(run))):
            (size, length), documents = batch.shape, getattr(batch.inputs.get("documents"), "lengths", ())
            shown: dict[str, Any] = {"micro_batch_size": size, "length": length, "documents": documents}
            shown |= {"padded": "attention_mask" in batch.inputs, "num_targets": batch.num_targets}
            found.append(replace(job, **shown, tensors=tensors_of(batch), is_guess=False))
        return found

    def settle(self, config: Config) -> Config:
        """``config`` with a value chosen for every ``auto``, the same on every rank.

        First the least recomputation with which a step fits (a step of single examples, if micro_batch_size is auto,
        too); then the largest micro-batch that fits with it. Raises UserError if nothing fits or cannot be predicted.
        """
        is_open, recomputes = (config.get(name) == "auto" for name in ("micro_batch_size", "gradient_checkpointing"))
        if not is_open and not recomputes:
            return config
        if not self._is_predictable:
            raise UserError(f"auto is not known for {self._device}: give micro_batch_size and gradient_checkpointing.")
        if recomputes:
            ways = recomputations(self._device.type, config.get("gradient_checkpointing_offload"))
            tried = config.changed(micro_batch_size=1) if is_open else config
            config = config.changed(**self._chosen("gradient_checkpointing", ways, tried))
        if is_open:
            sizes = divisors((config.optimization.global_batch_size or 1) // self._run.launch.dp_size) or [1]
            length = column(self._data.examples["train"], "length").max()
            named = [(f"{n} × {length:,} tokens", {"micro_batch_size": n}) for n in sizes]
            config = config.changed(**self._chosen("micro_batch_size", named, config))
        return config

    def _chosen(self, name: str, ways: list[Any], config: Config) -> dict[str, Any]:
        """The flags for what is left to auto under ``name``, the same on every rank."""

        def needs(changes: dict[str, Any]) -> int:
            found = [self._predictor.predict(job) for job in self._jobs(config.changed(**changes))]
            on_host = max(sum(prediction.host_bytes_by_kind.values()) for prediction in found)
            if self._device.type != "cpu" and on_host > (free := free_host_bytes()):
                where = f"{gib(on_host)} of host memory, but only {gib(free)} is free"
                raise UserError(f"{name}: auto: offloading would take {where}.")
            return max(prediction.least_reserved_bytes for prediction in found)

        def choose_here() -> dict[str, Any]:
            # What is free of the device; of a CPU, this process's share of what is available. MPS shares with the host.
            free = torch.cuda.mem_get_info(self._device)[0] if self._device.type == "cuda" else free_host_bytes()
            if self._device.type == "mps":
                free = min(free, torch.mps.recommended_max_memory() - torch.mps.current_allocated_memory())
            room = int(min(free, (self._own.memory_budget_gib or math.inf) * 2**30) * (1 - MARGIN_OF_FREE))
            chosen, line = choose(name, ways, needs, room)
            self._run.outputs.say(line)
            return chosen

        return self._run.outputs.from_main(choose_here)

    def ask(self) -> None:
        """Has the step with the longest micro-batch predicted while the model is built, if there is room for that."""
        if self._is_predictable:
            self._asked = self._jobs(self._run.config)
            if self._predicts:
                self._predictor.ask(self._asked[0])
        if self._own.rehearse and sys.platform == "linux":  # elsewhere swap grows as it is needed
            checkpoint.together(self._refuse_weights)

    def _refuse_weights(self) -> None:
        """Raises UserError if host memory has no room for the weights: the system would kill the run, and say nothing.

        Each rank loads or makes them there first, but not what is quantized, or has the type already in its file.
        """
        run, data, own, needed = self._run, self._data, self._run.config.architecture, 0
        if not own.is_function and run.config.get("adapter") != "qlora":
            with suppress(Exception), init_empty_weights():  # if this fails, the real build reports why
                network: Any = build_network(run, type(data.task), data.tokenizer, data.label_names, has_weights=False)
                stored: Any = stored_config(own) if own.model else None
                is_mapped = stored is not None and stored.dtype == getattr(torch, own.dtype)
                if not is_mapped and getattr(stored, "quantization_config", None) is None:
                    needed = sum(parameter.nbytes for parameter in network.parameters())
        if needed > (free := _room_bytes()):
            remedy = "Give a smaller model, --dtype bfloat16, or --rehearse False to try it"
            raise UserError(f"host memory: the weights need {gib(needed)}, but {gib(free)} is free. {remedy}.")

    def _refuse_step(self, weights_bytes: int) -> None:
        """Raises UserError if host memory has no room for a step on a CPU, next to the weights that are there."""
        peak = self._predicted[0] if self._predicts else 0
        self._predictor.close()  # which takes memory, too
        if peak > (room := _room_bytes() + weights_bytes):
            told = f"host memory: the longest step needs {gib(peak)} by prediction, but {gib(room)} is free for it"
            what_to_do = self.explain(MemoryError()).partition("\n")[2]  # after: Out of memory.
            raise UserError(f"{told}. To try it: --rehearse False.\n{what_to_do}")

    @cached_property
    def _predicted(self) -> tuple[int, int, str]:
        """Peak and reserved bytes of the most expensive step; 0 and why where it is not predicted."""
        try:
            found = [self._predictor.answer(), *map(self._predictor.predict, self._asked[1:])]
        except UserError as error:
            return 0, 0, str(error)
        return max(each.peak_bytes for each in found), max(each.reserved_bytes for each in found), ""

    def rehearse(self, parts: Parts) -> None:
        """Makes the most expensive step once, without a trace, and shows measured next to predicted."""
        run, said = self._run, "memory: not rehearsed"
        if self._own.rehearse and run.launch.engine != "deepspeed":
            if self._is_predictable and self._device.type == "cpu" and sys.platform == "linux":  # a card says so itself
                weights_bytes = sum(parameter.nbytes for parameter in parts.model.parameters())
                run.outputs.from_main(lambda: self._refuse_step(weights_bytes))
            longest = [most_work(batch, parts.data.task) for batch in longest_of(parts.batches)]
            several = self._asked[0].accumulates if self._asked else parts.batches.arithmetic.accumulation_steps > 1
            rehearse(run, parts, longest * (2 if several and len(longest) == 1 else 1))
            shapes = " and ".join("{} × {:,}".format(*batch.shape) for batch in longest)
            meter: Any = run.extras.by_name["meter"]
            meter.measured(run, measured := {"tokens_per_second": 0.0})  # and so forgotten before the first step
            peak = f"peaks at {gib(measured['peak_allocated_bytes'])}" if meter.meter is not None else "is not measured"
            said = f"memory: the longest step ({shapes} tokens) {peak}"
            if measured.get("peak_reserved_bytes"):
                said += f" allocated, {gib(measured['peak_reserved_bytes'])} reserved"
        if self._predicts:
            peak, reserved, problem = self._predicted
            if not problem:
                self.figures = {"predicted_peak_bytes": peak, "predicted_reserved_bytes": reserved}
            on_card = f" allocated, {gib(reserved)} reserved" if self._device.type == "cuda" else ""
            said += f", not predicted: {problem}" if problem else f", predicted {gib(peak)}{on_card}"
        self._predictor.close()
        run.outputs.say(said)

    def explain(self, error: Any) -> str:
        """The post-mortem of a run that ended with ``error``: its ``fault``, if any, says phase, shape and message."""
        metering: Any = self._run.extras.by_name["meter"]
        meter, fault = metering.meter, getattr(error, "fault", None)
        words = fault.error if fault else str(error)
        if self._device.type != "cpu" and (oom := parse_oom(words)) and oom.on_host:  # not a matter of the card
            return explain(words)
        shape = fault.shape if fault else getattr(meter, "last_shape", None)
        phase = fault.phase if fault else getattr(meter, "phase", None)
        job = self._asked[0] if self._asked else None
        if job is not None and shape is not None:
            sizes: dict[str, Any] = {"micro_batch_size": shape[0]}
            if phase == "evaluation":  # next to which a step of single examples is small
                sizes = {"micro_batch_size": 1, "eval_batch_size": shape[0]}
                sizes["values"] = {**job.values, "eval_batch_size": shape[0]}
            job = replace(job, length=shape[1], eval_length=None, num_targets=None, **sizes)
        predicted, changes = self._cheaper_settings(job) if job is not None else (None, [])
        kinds = predicted.bytes_by_kind if predicted else getattr(meter, "bytes_by_kind", {})
        text = post_mortem(words, Situation(phase, shape, kinds, predicted.peak_bytes if predicted else None, changes))
        if (path := metering.snapshot) is not None and path.exists():
            text += f"\nmemory snapshot: {path} (open it at https://pytorch.org/memory_viz)"
        return text

    def _cheaper_settings(self, job: Job) -> tuple[Prediction | None, list[tuple[str, int, str]]]:
        """The prediction for ``job``, and the changes that would save some of it."""
        now, changes = None, []
        with suppress(UserError, OSError), Predictor() as predictor:
            now = predictor.predict(job)
            for flags, note, changed in cheaper(job):
                with suppress(UserError):  # not every model can be changed in every way
                    if (saved := now.peak_bytes - predictor.predict(changed).peak_bytes) > 0:
                        changes.append((flags, saved, note))
        return now, changes


def _room_bytes() -> int:
    """Host memory that this process may fill before the system kills one."""
    return free_host_bytes() + psutil.swap_memory().free // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _evaluated(run: Run, data: PreparedData) -> MicroBatch:
    """This rank's batch of the longest examples of validation or test; this process loads it."""
    data = replace(data, loading=replace(data.loading, num_workers=0, deliver=None))
    splits = [examples for split, examples in data.examples.items() if split != "train"]
    longest = max(splits, key=lambda split: column(split, "length").max())
    found, lengths = next(data.evaluation_batches(run, longest)), column(longest, "length")
    if not found.example_ids:  # another rank's, where there are more ranks than examples
        return found
    return next(load(longest, data.loading, [with_padding(list(found.example_ids), lengths)], (0, 0)))


def most_work(batch: MicroBatch, task: Task) -> MicroBatch:
    """``batch`` with a target at every position, unless ``task`` says a share: others of its length may have more."""
    if task.target_share and batch.num_targets:
        return batch
    labels = batch.labels.masked_fill(batch.labels == IGNORE, 0)
    inputs = {name: value for name, value in batch.inputs.items() if not isinstance(value, int)}  # these only save work
    return replace(batch, inputs=inputs, labels=labels, num_targets=labels.numel())


def rehearse(run: Run, parts: Parts, micro_batches: list[MicroBatch]) -> None:
    """Makes a whole step of ``micro_batches`` at a learning rate of zero, and evaluates a batch, without a trace.

    To be called on every rank before the first step, when the optimizer has no state yet.
    """
    with _leaving_no_trace(run, parts.model, parts.optimizer):
        # First its state, which all later steps have: a step whose gradients overflow, as in fp16, would not make it.
        make_optimizer_state(run, parts.model, parts.optimizer)
        with run.extras.inside("computing", "forward", micro_batches):
            parts.engine.step(parts.model, parts.optimizer, micro_batches)
        parts.model.eval()
        score(run, parts, most_work(_evaluated(run, parts.data), parts.data.task))
        reshard(parts.model)
        parts.model.train()


def make_optimizer_state(run: Run, model: nn.Module, optimizer: AcceleratedOptimizer) -> None:
    """Makes the optimizer's state by gradients of zeros: all together, or one parameter at a time, as a run will."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for some in [[parameter] for parameter in trained] if run.config.get("optimizer_in_backward") else [trained]:
        for parameter in some:
            parameter.grad = torch.zeros_like(parameter)
        optimizer.optimizer.step()
        optimizer.optimizer.zero_grad(set_to_none=True)


@contextmanager
def _leaving_no_trace(run: Run, model: nn.Module, optimizer: AcceleratedOptimizer) -> Iterator[None]:
    state = optimizer.optimizer.state  # mostly empty, but some optimizers make theirs at once
    kept = {p: {k: v.clone() if torch.is_tensor(v) else v for k, v in own.items()} for p, own in state.items()}
    with ExitStack() as afterwards:
        for buffer in model.buffers():
            afterwards.callback(buffer.detach().copy_, buffer.clone())
        for module in model.modules():  # which may put another tensor in a buffer's place, and count batches
            afterwards.callback(module._buffers.update, dict(module._buffers))
            counted = {name: value for name, value in vars(module).items() if type(value) in (int, float, torch.Tensor)}
            afterwards.callback(vars(module).update, counted)
        for group in optimizer.param_groups:
            afterwards.enter_context(patch.dict(group, lr=0.0))
        if (scaler := run.accelerator.scaler) is not None:
            afterwards.callback(scaler.load_state_dict, scaler.state_dict())
        afterwards.callback(optimizer.optimizer.zero_grad, set_to_none=True)
        afterwards.callback(lambda: (state.clear(), state.update(kept)))
        yield
