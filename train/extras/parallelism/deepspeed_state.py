"""The state of a DeepSpeed engine between two steps, in the parts that :mod:`train.state` describes.

ZeRO lays the parameters of a group end to end, and gives each rank a stretch of that (stage 2) or a stretch of every
parameter (stage 3): an fp32 buffer, for which the optimizer keeps moments of the same length. So a rank's part of a
parameter is a stretch of it, flattened, wherever the stretch lies in the buffer; with another number of ranks the
stretches are others. Names and layout are those of DeepSpeed 0.19.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from train.checkpoint import StoredBlocks
from train.state import Block, TrainingState


@dataclass(frozen=True)
class Stretch:
    """A part of a parameter in one of this rank's buffers."""

    name: str
    shape: tuple[int, ...]  # of the whole parameter
    start: int  # in the parameter, flattened
    length: int
    offset: int  # where in the buffer

    def block_of(self, flat: Tensor) -> Block:
        """This part of ``flat``, a buffer or moments of its length, to be written."""
        return Block(_copied(flat.narrow(0, self.offset, self.length)), self.shape, (self.start,))

    @torch.no_grad()
    def fill(self, flat: Tensor, blocks: StoredBlocks, section: str, name: str) -> None:
        """Puts the stored part into ``flat``."""
        found = blocks.block(section, name, (self.start,), (self.length,))
        flat.narrow(0, self.offset, self.length).copy_(found)


@dataclass(frozen=True)
class DeepSpeedState(TrainingState):
    """The live objects of a run on one rank: the network inside the engine, and the engine's own optimizer."""

    def blocks(self, rank: int) -> dict[str, dict[str, Block]]:
        found = super().blocks(rank)  # what is not trained
        for buffer, stretches in self._buffers():
            moments = {k: v for k, v in self.optimizer.state.get(buffer, {}).items() if isinstance(v, Tensor)}
            for stretch in stretches:
                found["model"][stretch.name] = stretch.block_of(buffer)
                for key, value in moments.items():
                    name = f"{stretch.name}.{key}"
                    if value.shape == buffer.shape:
                        found["optimizer"][name] = stretch.block_of(value)
                    elif stretch.start == 0:  # a number, such as how many steps were made
                        found["optimizer"][name] = Block(_copied(value), tuple(value.shape), (0,) * value.ndim)
        return found

    def values(self) -> dict[str, Any]:
        scaler = {k: v for k, v in vars(self.optimizer.loss_scaler).items() if isinstance(v, int | float)}
        return {**super().values(), "loss_scaler": scaler}

    def restore(self, blocks: StoredBlocks, values: Mapping[str, Any]) -> None:
        """Takes everything back in place, also from a run without DeepSpeed."""
        self.restore_model(blocks)
        keys: dict[str, list[str]] = defaultdict(list)
        for full_name in blocks.index["optimizer"]:
            name, _, key = full_name.rpartition(".")
            keys[name].append(key)
        for buffer, stretches in self._buffers():
            state: dict[str, Tensor] = {}
            for stretch in stretches:
                for key in keys[stretch.name]:
                    name = f"{stretch.name}.{key}"
                    if blocks.index["optimizer"][name]["shape"]:
                        stretch.fill(state.setdefault(key, torch.zeros_like(buffer)), blocks, "optimizer", name)
                    else:
                        state[key] = blocks.block("optimizer", name, (), ())
            self.optimizer.state[buffer] = state
        for name, value in values.get("loss_scaler", {}).items():
            setattr(self.optimizer.loss_scaler, name, value)

    @torch.no_grad()
    def restore_model(self, blocks: StoredBlocks) -> None:
        super().restore_model(blocks)
        buffers = list(self._buffers())
        for buffer, stretches in buffers:
            for stretch in stretches:
                stretch.fill(buffer, blocks, "model", stretch.name)
        zero = self.optimizer  # its buffers hold the weights now; the copies that the model computes with follow
        if not self._is_stage_3():
            zero.update_lp_params()
            return
        zero.checkpoint_event_prologue()
        for number, (buffer, _) in enumerate(buffers):
            zero.fp16_partitioned_groups_flat[number].copy_(buffer)
            zero._unflatten_partitioned_parameters(number)
        zero.checkpoint_event_epilogue()

    def whole_tensors(self, keep: bool) -> dict[str, Tensor]:
        """In fp32; one tensor at a time is whole on every rank."""
        from deepspeed.utils import safe_get_full_fp32_param  # pyright: ignore[reportMissingImports]

        whole = {name: tensor.detach().cpu().contiguous() for name, tensor in self.model_tensors().items() if keep}
        for name, parameter in self.model.named_parameters():
            tensor: Any = safe_get_full_fp32_param(parameter) if parameter.requires_grad else None
            if keep and tensor is not None:
                whole[name] = tensor.detach().cpu()
        return whole

    def model_tensors(self) -> dict[str, Tensor]:
        """What of the model is in none of the buffers."""
        return {name: tensor for name, tensor in super().model_tensors().items() if not tensor.requires_grad}

    def _is_stage_3(self) -> bool:
        return hasattr(self.optimizer, "fp32_partitioned_groups_flat")

    def _buffers(self) -> Iterator[tuple[Tensor, list[Stretch]]]:
        """This rank's buffers, each with what it holds of the trained parameters."""
        zero, names = self.optimizer, {id(parameter): name for name, parameter in self.model.named_parameters()}
        if self._is_stage_3():
            for buffer, group in zip(zero.fp32_partitioned_groups_flat, zero.fp16_groups, strict=True):
                found, offset = [], 0
                for parameter in group:
                    share = parameter.partition_numel()
                    start = zero._get_param_partition_rank(parameter) * share
                    length = min(share, parameter.ds_numel - start)  # the last ranks' shares end in padding
                    if length > 0:
                        found.append(Stretch(names[id(parameter)], tuple(parameter.ds_shape), start, length, offset))
                    offset += share
                yield buffer, found
            return
        for buffer, group in zip(zero.single_partition_of_fp32_groups, zero.bit16_groups, strict=True):
            found = []
            for parameter in group:
                if (mapping := parameter._hp_mapping) is not None:  # else other ranks have all of it
                    here, there = mapping.hp_fragment_address, mapping.lp_fragment_address
                    shape = tuple(parameter.shape)
                    found.append(Stretch(names[id(parameter)], shape, there.start, there.numel, here.start))
            yield buffer, found


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)  # a copy: neighbours in a buffer cannot be written one by one
