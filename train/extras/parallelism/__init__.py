"""Beyond data parallelism: DeepSpeed ZeRO, Ulysses, context and tensor parallelism, as the launch file asks for them.

DeepSpeed shards weights and optimizer state; Ulysses and context parallelism divide each sequence among ranks; tensor
parallelism divides each layer. Each is a small engine behind the one optimizer step.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any

from train import extras
from train.config import Config, option
from train.launch import Launch
from train.records import MicroBatch, Parts, Progress, Run, UserError, exchange


@dataclass(frozen=True)
class Options:
    """How ranks share the work; the launch file says the rest."""

    find_unused_parameters: bool = option(False, "Let DDP expect parameters that have no gradient in some steps.")


class Extra(extras.Extra):
    _batches: extras.Batches | None = None

    def __init__(self) -> None:
        self._order, self._used = 0, dict[int, None]()  # of all micro-batches, and of this one

    def check(self, config: Config, launch: Launch) -> None:
        if launch.mp_size > 1:
            without = "leave packing out, or use ddp.yaml or fsdp2.yaml"
            extras.refuse(f"{launch} in the launch file", ("packing", bool(config.get("packing")), without))
            (_check_tensors if launch.tp_size > 1 else _check_sequences)(config, launch)

    def accelerator_options(self, config: Config, launch: Launch) -> dict[str, Any]:
        """The plugin of DeepSpeed, and Ulysses' sizes; accelerate reads the other sizes from the environment."""
        if launch.engine != "deepspeed":
            return {}
        from accelerate.utils import ParallelismConfig

        from train.extras.parallelism.deepspeed_engine import deepspeed_plugin

        options: dict[str, Any] = {"deepspeed_plugin": deepspeed_plugin(config, launch)}
        if launch.sp_size > 1:
            options["parallelism_config"] = ParallelismConfig(dp_replicate_size=launch.dp_size)
        return options

    def change_model_config(self, run: Run, model_config: Any) -> dict[str, Any]:
        """Has transformers build the whole model with a single process's weights: for DeepSpeed it would shard it."""
        if run.launch.engine == "deepspeed" and (plugin := run.accelerator.state.deepspeed_plugin) is not None:
            plugin.dschf = None
        return {}

    def prepared(self, run: Run, data: extras.PreparedData, batches: extras.Batches) -> None:
        self._batches = batches

    def change_loss(self, run: Run, model: extras.ModelWithLoss) -> None:
        """Divides the weights of tensor parallelism; checks or completes what the other kinds need."""
        scalar = next((name for name, p in model.model.named_parameters() if not p.ndim), None)
        if run.launch.engine == "fsdp2" and scalar is not None:
            raise UserError(f"FSDP2 cannot divide {scalar}, a single number: make its shape (1,).")
        if (kind := _kind(run.launch)) is not None:
            kind.prepare(run, model)
        elif self._batches is not None and run.launch.engine == "ddp" and run.accelerator.num_processes > 1:
            from train.extras.longest import longest_of

            _expect_unused(run, model, longest_of(self._batches)[0])

    def state(
        self, model: extras.Module, optimizer: Any, identity: Mapping[str, Any], scaler: Any
    ) -> extras.TrainingState | None:
        if not type(optimizer).__module__.startswith("deepspeed."):
            return None
        from train.extras.parallelism.deepspeed_engine import DeepSpeedState

        return DeepSpeedState(model, optimizer, identity)

    def wrap_step(self, run: Run, engine: extras.Engine) -> extras.Engine:
        if (kind := _kind(run.launch)) is None:
            return engine
        divided = kind(engine.accelerator, engine.config, engine.mark)
        divided.mp_size, divided.loss_share = run.launch.mp_size, 1 / run.launch.tp_size
        return divided

    def before_training(self, run: Run, parts: Parts) -> None:
        """What DDP does by itself: ranks share saved buffers (of batch norm), and have to use the same modules."""
        if run.launch.engine == "ddp" or run.accelerator.num_processes == 1:
            return
        from accelerate.utils import broadcast

        modules = list(parts.model.modules())
        kept = [b for m in modules for n, b in m.named_buffers(recurse=False) if n not in m._non_persistent_buffers_set]
        if kept:
            parts.model.register_forward_pre_hook(lambda *_: broadcast(kept) and None)  # None: inputs stay
        if not run.config.get("compile"):  # a hook would divide a compiled layer
            for number, module in enumerate(modules, start=1):
                if any(p.requires_grad for p in module.parameters(recurse=False)):
                    module.register_forward_pre_hook(functools.partial(self._use, number))

    def _use(self, number: int, module: extras.Module, inputs: object) -> None:
        if module.training:
            self._used[number] = None  # once: chunks of a sequence may use one as often as they like

    def mark(self, phase: str) -> None:
        # Of forward alone: what backward computes again depends on how long a rank's sequences are.
        self._order, self._used = hash((self._order, *(self._used if phase == "backward" else ()))), {}

    def logged(self, run: Run, progress: Progress, loss: float, since_step: int) -> Progress:
        """Raises UserError if ranks have used different modules in a step since the last line: it is not saved."""
        if run.launch.engine != "ddp" and len(set(exchange(self._order))) > 1:
            why = "ranks used different modules in a micro-batch (layers depend on the batch, or on chance): FSDP2 and "
            why += "DeepSpeed mix up their parts. Steps since the last line of the log are wrong, and not saved."
            raise UserError(f"{why} Use accelerate_configs/ddp.yaml.")
        return progress

    def failed(self, run: Run | None, error: Exception) -> str | None:
        if isinstance(error, RuntimeError) and "find_unused_parameters" in str(error):
            why = "a step left parameters without a gradient, which DDP waits for: other steps use them"
            return f"{why}. --find_unused_parameters has it look for them in each step."
        return None


def _expect_unused(run: Run, model: extras.ModelWithLoss, batch: MicroBatch) -> None:
    """Where a step on ``batch`` leaves parameters without a gradient, tells DDP, which would wait for them."""
    from accelerate import DistributedDataParallelKwargs

    from train.extras.weightless import obstacle_on_trial

    def unused(twin: extras.ModelWithLoss) -> str | None:
        given = batch.to(next(twin.parameters()).device)
        fake = given.inputs["input_ids"].clone()  # without values, for which some models ask only a real one
        twin({**given.inputs, "input_ids": fake}, given.labels).backward()
        missing = [name for name, p in twin.model.named_parameters() if p.requires_grad and p.grad is None]
        return f"{len(missing)} tensors get no gradient ({missing[0]} ...)" if missing else None

    is_asked = run.config.of(Options).find_unused_parameters
    found = ["as asked for"] if is_asked else [*filter(None, exchange(obstacle_on_trial(model, unused)))]
    if found:  # on any rank; only then: DDP's search for them takes up to a tenth of a short step
        run.accelerator.ddp_handler = DistributedDataParallelKwargs(find_unused_parameters=True)
        run.outputs.note(f"DDP looks for parameters without a gradient in each step: {found[0]}")


def _kind(launch: Launch) -> Any:
    """The class of the engine that ``launch`` asks for, or None; its ``prepare`` makes a model ready for it."""
    kinds = (
        (launch.sp_size > 1, "sequences:Ulysses"),  # includes DeepSpeed
        (launch.cp_size > 1, "sequences:ContextParallel"),
        (launch.engine == "deepspeed", "deepspeed_engine:DeepSpeed"),
        (launch.tp_size > 1, "tensor:TensorParallel"),
    )
    asked = [name for is_asked, name in kinds if is_asked]
    return resolve_name(f"train.extras.parallelism.{asked[0]}") if asked else None


def _check_tensors(config: Config, launch: Launch) -> None:
    optim, loss, size = config.optimization, config.get("loss"), launch.tp_size
    is_alone = launch.engine == "ddp" and launch.world_size == size
    is_fp16 = (optim.mixed_precision or launch.precision) == "fp16"
    alone = f"set num_processes: {size} without fsdp_config or other sizes, as accelerate_configs/tensor_parallel.yaml"
    extras.refuse(
        f"parallelism_config_tp_size: {size} in the launch file",
        ("sharding or data parallelism", not is_alone, alone),
        ("mixed_precision: fp16", is_fp16, "use bf16: each rank would scale its loss by itself"),
        ("max_grad_value", optim.max_grad_value is not None, "use max_grad_norm"),
        (f"loss: {loss}", loss in ("cce", "liger"), "use auto or chunked: its sums may differ between ranks"),
    )


def _check_sequences(config: Config, launch: Launch) -> None:
    from train.tasks import load_task

    is_ulysses = launch.sp_size > 1
    name, engine, other = ("sp", "deepspeed", "deepspeed_zero2.yaml") if is_ulysses else ("cp", "fsdp2", "fsdp2.yaml")
    example = "ulysses_sequence_parallel.yaml" if is_ulysses else "fsdp2_context_parallel.yaml"
    attention, tokens = config.architecture.attn_implementation, config.get("max_tokens_per_micro_batch")
    task, a_causal_task = config.data.task, f"use a causal task such as causal_lm, or accelerate_configs/{other}"
    is_other = attention == "eager" if is_ulysses else attention not in (None, "sdpa")
    fixed_rows = "give micro_batch_size instead: exchanges need a fixed number of rows"
    extras.refuse(
        f"parallelism_config_{name}_size: {launch.mp_size} in the launch file",
        (f"the engine {launch.engine}", launch.engine != engine, f"use {engine}, as accelerate_configs/{example} does"),
        (f"task: {task}", not load_task(task).is_causal, a_causal_task),
        (f"attn_implementation: {attention}", is_other, "use sdpa"),
        (f"max_tokens_per_micro_batch: {tokens}", is_ulysses and tokens is not None, fixed_rows),
    )
