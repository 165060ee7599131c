"""The state of a DeepSpeed engine between two steps, in the parts that :mod:`train.state` describes.

ZeRO lays the parameters of a group end to end, and gives each rank a stretch of that (stage 2) or a stretch of every
parameter (stage 3): an fp32 buffer, for which the optimizer keeps moments of the same length. So a rank's part of a
parameter is a stretch of it, flattened, wherever the stretch lies in the buffer; with another number of ranks the
stretches are others. Names and layout are those of DeepSpeed 0.19.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from train.records import exchange
from train.state import Block, StoredBlocks, TrainingState


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
        from deepspeed.utils import safe_get_full_fp32_param  # pyright: ignore[reportMissingImports]

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
