"""DeepSpeed behind the optimizer step: ZeRO stages 2 and 3 (arXiv 1910.02054) shard weights and optimizer state.

Its backward also sums gradients over the ranks, and one call finds their norm, clips, updates and shares new weights.
Stage and offload come from the launch file, everything else from the training configuration: accumulation, clipping,
batch size, precision, optimizer. A launch file that says otherwise, or names a DeepSpeed JSON, stops the run.

ZeRO lays the parameters of a group end to end, and gives each rank a stretch of that (stage 2) or a stretch of every
parameter (stage 3): an fp32 buffer, for which the optimizer keeps moments of the same length. So a rank's part of a
parameter is a stretch of it, flattened, wherever the stretch lies in the buffer; with another number of ranks the
stretches are others. Names and layout are those of DeepSpeed 0.19.
"""

import importlib.util
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DeepSpeedPlugin
from torch import Tensor, nn

from train.config import Config
from train.extras import refuse
from train.launch import Launch
from train.model import ModelWithLoss
from train.records import Run, UsageError, UserError, arithmetic_of, exchange
from train.state import Block, StoredBlocks, TrainingState
from train.step import Engine

FIELD = "ACCELERATE_DEEPSPEED_"  # how ``accelerate launch`` begins the names of most of its fields
MAX_REDUCE_BUCKET_ELEMENTS = 50_000_000  # summed over the ranks at once: 100 or 200 MB, which keeps a network busy


class DeepSpeed(Engine):
    """Gradients, clipping and update by the DeepSpeed engine that accelerate has prepared."""

    @staticmethod
    def prepare(run: Run, model: ModelWithLoss) -> None:
        """Tells DeepSpeed the batch and bucket sizes, which are known once the model is there; accelerate's agree."""
        plugin, arithmetic = run.accelerator.state.deepspeed_plugin, arithmetic_of(run.config, run.launch.dp_size)
        assert plugin is not None
        settings, steps = plugin.deepspeed_config, arithmetic.accumulation_steps
        settings.update(train_micro_batch_size_per_gpu=arithmetic.micro_batch_size, gradient_accumulation_steps=steps)
        run.accelerator.gradient_accumulation_steps = steps
        # DeepSpeed allocates the whole buffer, and by default for 500 million gradients, however small the model is.
        bucket = min(MAX_REDUCE_BUCKET_ELEMENTS, sum(p.numel() for p in model.parameters()))
        settings["zero_optimization"]["reduce_bucket_size"] = bucket
        if plugin.zero_stage == 3 and not all(p.requires_grad for p in model.parameters()):
            raise UserError("zero_stage: 3 with frozen weights: checkpoints would miss them. Use zero_stage: 2.")

    @property
    def engine(self) -> Any:
        return self.accelerator.deepspeed_engine_wrapped.engine  # type: ignore

    @property
    def loss_factor(self) -> float:
        """DeepSpeed 0.19 divides the sum of gradients by the ranks; by the accumulation only if asked to."""
        return self.accelerator.num_processes

    def backward(self, loss: Tensor, scale: float | Tensor) -> None:
        # Not accelerator.backward, which also updates the weights.
        self.engine.set_gradient_accumulation_boundary(self.accelerator.sync_gradients)
        self.engine.backward(loss * scale, scale_wrt_gas=False)

    def clip(self, model: nn.Module) -> float:
        """Nothing: the norm is found, and clipped, by :meth:`update`."""
        return 0.0

    def update(self, optimizer: AcceleratedOptimizer, norm: float) -> tuple[float, bool]:
        """Clips and steps unless the norm is not finite; raises UserError where fp16 overflows at every loss scale."""
        try:
            self.engine.step()
        except Exception as error:
            if "loss scale already at minimum" not in str(error):
                raise
            raise UserError("the gradients overflow fp16 at every loss scale. Try --mixed_precision bf16.") from None
        return float(self.engine.get_global_grad_norm()), bool(optimizer.step_was_skipped)


def deepspeed_plugin(config: Config, launch: Launch) -> DeepSpeedPlugin:
    """What the Accelerator needs to set up DeepSpeed; raises UserError if it is missing or asked for in two ways."""
    settings = engine_settings(config, launch)
    if importlib.util.find_spec("deepspeed") is None:
        raise UserError("the launch file asks for DeepSpeed, which is not installed: pip install -e '.[deepspeed]'")
    if torch.distributed.is_initialized():  # by torch: DeepSpeed has to be told
        import deepspeed  # type: ignore

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would compile C++ for minutes first
        deepspeed.init_distributed(torch.distributed.get_backend(), auto_mpi_discovery=False, verbose=False)
    # Compared above. With these accelerate would refuse settings and fields together, and read "auto" as a number.
    for name in ("ACCELERATE_CONFIG_DS_FIELDS", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"):
        os.environ.pop(name, None)
    sizes = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1}  # until DeepSpeed.prepare
    return DeepSpeedPlugin(hf_ds_config={**settings, **sizes}, zero3_init_flag=False)


def engine_settings(config: Config, launch: Launch) -> dict[str, Any]:
    """The configuration of ``deepspeed.initialize``, except for the batch size, which may not be known yet.

    Raises UsageError where the launch file, which ``accelerate launch`` leaves in the environment, contradicts the
    training configuration, or something was asked for that does not work with DeepSpeed.
    """
    optim, attention = config.optimization, config.architecture.attn_implementation
    half, clipping = optim.mixed_precision or launch.precision, optim.max_grad_norm or 0.0
    stage, parts = int(os.environ.get(f"{FIELD}ZERO_STAGE", "2")), ("offload_optimizer", "offload_param")
    devices = {part: os.environ.get(f"{FIELD}{part.upper()}_DEVICE", "none") for part in parts}
    _refuse(config, stage, devices)
    steps = arithmetic_of(config, launch.dp_size).accumulation_steps
    _compare("ACCELERATE_", "gradient_accumulation_steps", "gradient_accumulation_steps", steps)
    _compare("ACCELERATE_", "gradient_clipping", "max_grad_norm", clipping)
    if launch.sp_size > 1 and attention is not None:
        _compare("", "parallelism_config_sp_attn_implementation", "attn_implementation", attention)
    return {
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,  # torch's fused AdamW runs on CPUs as well, and needs no compiler
        **({} if half == "no" else {"communication_data_type": "fp32", "data_types": {"grad_accum_dtype": "fp32"}}),
        "zero_optimization": {"stage": stage, **{part: {"device": device} for part, device in devices.items()}},
        "gradient_clipping": clipping,
    }


def _compare(prefix: str, name: str, ours: str, value: Any) -> None:
    """Stops where the training configuration says one thing, and the launch file another."""
    given = os.environ.get(f"{prefix}{name.upper()}", "auto")
    try:
        same = float(given) == float(value)
    except ValueError:
        same = given in ("auto", "None", value)
    if not same:
        what = f"{name}: {given} in the launch file, {ours}: {value} in the training configuration"
        raise UsageError(f"{what}. Make them agree, or leave {name} out of the launch file.")


def _refuse(config: Config, stage: int, devices: dict[str, str]) -> None:
    """Stops for what is not done here, or what DeepSpeed would do otherwise than the training configuration says."""
    optim, dtype, path = config.optimization, config.architecture.dtype, os.environ.get(f"{FIELD}CONFIG_FILE")
    norm_type = optim.grad_norm_type if optim.max_grad_norm is not None else "2"
    fields = "leave it out: stage and offload are fields of the launch file, all else is in the training configuration"
    other_weights = "it would draw other initial weights than one process does. Set it to false"
    only_3 = "only stage 3 shards parameters; set zero_stage: 3"
    clipping = "it clips by the 2-norm alone (max_grad_norm)"
    keeps = "it keeps fp32 weights, and computes in half precision if --mixed_precision bf16 says so. Leave dtype out"
    elsewhere = [f"{part}_device: {found}" for part, found in devices.items() if found not in ("none", "cpu")]
    refuse(
        "DeepSpeed in the launch file",
        (f"deepspeed_config_file: {path}", path is not None, fields),
        (f"zero_stage: {stage}", stage not in (2, 3), "use 2 or 3, or ddp.yaml for no sharding"),
        (", ".join(elsewhere), bool(elsewhere), "checkpoints work only with none or cpu"),
        ("offload_param_device: cpu and zero_stage: 2", stage == 2 and devices["offload_param"] == "cpu", only_3),
        ("zero3_init_flag: true", os.environ.get(f"{FIELD}ZERO3_INIT") == "true", other_weights),
        (f"max_grad_value: {optim.max_grad_value}", optim.max_grad_value is not None, clipping),
        (f"grad_norm_type: {norm_type}", norm_type != "2", clipping),
        (f"dtype: {dtype}", dtype != "float32", keeps),
    )


class Stretch(NamedTuple):
    """A part of a parameter in one of this rank's buffers."""

    shape: tuple[int, ...]  # of the whole parameter
    start: int  # in the parameter, flattened
    length: int
    buffer: Tensor
    offset: int  # where in the buffer

    def of(self, flat: Tensor) -> Tensor:
        """This part of ``flat``, the buffer or moments of its length."""
        return flat.narrow(0, self.offset, self.length)


class DeepSpeedState(TrainingState):
    """The live objects of a run on one rank: the network inside the engine, and the engine's own optimizer."""

    def blocks(self, rank: int) -> dict[str, dict[str, Block]]:
        found = super().blocks(rank)  # what is not trained
        for name, part in self._stretches().items():
            found["model"][name] = Block(_copied(part.of(part.buffer)), part.shape, (part.start,))
            for key, value in self.optimizer.state.get(part.buffer, {}).items():
                if isinstance(value, Tensor) and value.shape == part.buffer.shape:
                    found["optimizer"][f"{name}.{key}"] = Block(_copied(part.of(value)), part.shape, (part.start,))
                elif isinstance(value, Tensor) and part.start == 0:  # a number, such as how many steps were made
                    found["optimizer"][f"{name}.{key}"] = Block(_copied(value), tuple(value.shape), (0,) * value.ndim)
        return found

    def values(self) -> dict[str, Any]:
        scaler = {k: v for k, v in vars(self.optimizer.loss_scaler).items() if isinstance(v, int | float)}
        return {**super().values(), "loss_scaler": scaler}

    def restore(self, blocks: StoredBlocks, values: Mapping[str, Any]) -> None:
        """Takes everything back in place, also from a run without DeepSpeed."""
        self.restore_model(blocks)
        stretches, states = self._stretches(), self.optimizer.state
        states.update({buffer: {} for buffer in self._buffers()})
        for full_name, stored in blocks.index["optimizer"].items():
            name, _, key = full_name.rpartition(".")
            if (part := stretches.get(name)) is None:
                continue  # other ranks have all of it
            state = states[part.buffer]
            if stored["shape"]:
                moments = state.setdefault(key, torch.zeros_like(part.buffer, requires_grad=False))
                part.of(moments).copy_(blocks.block("optimizer", full_name, (part.start,), (part.length,)))
            else:
                state[key] = blocks.block("optimizer", full_name, (), ())
        for name, value in values.get("loss_scaler", {}).items():
            setattr(self.optimizer.loss_scaler, name, value)

    @torch.no_grad()
    def restore_model(self, blocks: StoredBlocks) -> None:
        super().restore_model(blocks)
        for name, part in self._stretches().items():
            part.of(part.buffer).copy_(blocks.block("model", name, (part.start,), (part.length,)))
        zero = self.optimizer  # its buffers hold the weights now; the copies that the model computes with follow
        if not self._is_stage_3():
            zero.update_lp_params()
            return
        zero.checkpoint_event_prologue()
        for number, buffer in enumerate(self._buffers()):
            zero.fp16_partitioned_groups_flat[number].copy_(buffer)
            zero._unflatten_partitioned_parameters(number)
        zero.checkpoint_event_epilogue()

    def whole_tensors(self, keep: bool) -> dict[str, Tensor]:
        """In fp32; one tensor at a time is whole on every rank."""
        from deepspeed.utils import safe_get_full_fp32_param  # type: ignore

        untrained = self.checkpointed_tensors() if keep else {}
        whole = {name: tensor.detach().cpu().contiguous() for name, tensor in untrained.items()}
        for name, parameter in self.model.named_parameters():
            tensor: Any = safe_get_full_fp32_param(parameter) if parameter.requires_grad else None
            if keep and tensor is not None:
                whole[name] = tensor.detach().cpu()
        exchange(None)  # as in the core
        return whole

    def checkpointed_tensors(self) -> dict[str, Tensor]:
        """What of the model is in none of the buffers."""
        return {name: tensor for name, tensor in self.model_tensors().items() if not tensor.requires_grad}

    def _is_stage_3(self) -> bool:
        return hasattr(self.optimizer, "fp32_partitioned_groups_flat")

    def _buffers(self) -> list[Tensor]:
        zero = self.optimizer
        return zero.fp32_partitioned_groups_flat if self._is_stage_3() else zero.single_partition_of_fp32_groups

    def _stretches(self) -> dict[str, Stretch]:
        """What this rank holds of the trained parameters, by name."""
        names, zero, found = {id(p): name for name, p in self.model.named_parameters()}, self.optimizer, {}
        groups = zero.fp16_groups if self._is_stage_3() else zero.bit16_groups
        for buffer, group in zip(self._buffers(), groups, strict=True):
            offset = 0
            for parameter in group:
                name = names[id(parameter)]
                if self._is_stage_3():
                    share = parameter.partition_numel()
                    start = zero._get_param_partition_rank(parameter) * share
                    if (length := min(share, parameter.ds_numel - start)) > 0:  # the last ranks' shares end in padding
                        found[name] = Stretch(tuple(parameter.ds_shape), start, length, buffer, offset)
                    offset += share
                elif (mapping := parameter._hp_mapping) is not None:  # else other ranks have all of it
                    here, there = mapping.hp_fragment_address, mapping.lp_fragment_address
                    found[name] = Stretch(tuple(parameter.shape), there.start, there.numel, buffer, here.start)
        return found


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)  # a copy: neighbours in a buffer cannot be written one by one
