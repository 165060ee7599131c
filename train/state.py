"""What a checkpoint holds: weights, optimizer and loss scaler, as blocks that each rank has, and the run's identity.

Ranks hand out blocks of tensors and take them back; a run may resume with another number of ranks, sharded or not.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from train.model import set_use_cache
from train.records import UserError, exchange

INDEX = "index.json"  # of a checkpoint: which block is where


@dataclass(frozen=True)
class Block:
    """A block of a larger tensor."""

    tensor: Tensor
    shape: tuple[int, ...]  # of the whole
    offsets: tuple[int, ...]  # where in it the block begins; a 1-D block may be a slice of the flattened tensor


class StoredBlocks:
    """The tensors in a checkpoint's files, by section and name."""

    def __init__(self, checkpoint: Path) -> None:
        self._folder, self._files = checkpoint, {}
        # By section and name: the ``shape`` of the whole tensor, and its ``blocks``.
        self.index = json.loads((checkpoint / INDEX).read_text(encoding="utf-8"))

    def block(self, section: str, name: str, offsets: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        """A block of ``name``, put together from stored ones (DeepSpeed: or a stretch of the flattened tensor)."""
        entry = self.index[section].get(name)
        if entry is None or len(shape) not in (1, len(entry["shape"])):
            raise UserError(f"{self._folder} has no {name} of {len(shape)} dimensions: it belongs to another model.")
        whole, stored = tuple(entry["shape"]), entry["blocks"]
        if len(shape) != len(stored[0][1]):  # stored flat but wanted in shape, or the reverse
            every, view = ((math.prod(whole),), whole) if len(shape) > 1 else (whole, (-1,))
            tensor = self.block(section, name, (0,) * len(every), every).view(view)
            return tensor[tuple(map(slice, offsets, np.add(offsets, shape)))]
        result: Tensor | None = None
        for file, begins, sizes in stored:
            if file not in self._files:
                self._files[file] = safe_open(str(self._folder / file), framework="pt")
            if list(offsets) == begins and list(shape) == sizes:
                return self._files[file].get_tensor(name).clone()  # as a view it would keep the file in use
            first, last = np.maximum(offsets, begins), np.minimum(np.add(offsets, shape), np.add(begins, sizes))
            if (first < last).all():
                there = tuple(map(slice, (first - begins).tolist(), (last - begins).tolist()))
                found = self._files[file].get_slice(name)[there]
                result = torch.empty(shape, dtype=found.dtype) if result is None else result
                result[tuple(map(slice, first - offsets, last - offsets))] = found
        assert result is not None
        return result


@dataclass(frozen=True)
class TrainingState:
    """What checkpoints and ``final/`` are made of: live objects, replicated or DTensors; extras may derive from it."""

    model: nn.Module
    optimizer: Any  # a torch.optim.Optimizer
    identity: Mapping[str, Any]  # what must be equal for a run to resume, if an extra says so: data, model, batch, seed
    scaler: torch.amp.GradScaler | None = None

    def blocks(self, rank: int) -> dict[str, dict[str, Block]]:
        """By section and name, what ``rank`` has to write: over all ranks every element of every tensor once."""
        optimizer = {f"{n}.{k}": v for n, s in self._states().items() for k, v in s.items() if isinstance(v, Tensor)}
        return {"model": _blocks(self.checkpointed_tensors(), rank), "optimizer": _blocks(optimizer, rank)}

    def values(self) -> dict[str, Any]:
        """Everything except tensors, as JSON, the same on every rank: identity, numbers of the state, loss scaler."""
        plain = {n: {k: v for k, v in s.items() if not isinstance(v, Tensor)} for n, s in self._states().items()}
        # What an optimizer counts in its parameter groups is state, unlike these two, which a run sets by group.
        own = {k: v for k, v in getattr(self.optimizer, "defaults", {}).items() if k not in ("lr", "weight_decay")}
        return {
            "identity": dict(self.identity),
            "optimizer": {name: entries for name, entries in plain.items() if entries},
            "groups": [{k: g[k] for k in own if k in g and g[k] != own[k]} for g in self.optimizer.param_groups],
            "scaler": self.scaler.state_dict() if self.scaler is not None else None,
        }

    def restore(self, blocks: StoredBlocks, values: Mapping[str, Any]) -> None:
        """Takes everything back in place; the optimizer keeps the settings of this run."""
        self.restore_model(blocks)
        parameters = dict(self.model.named_parameters())
        state: dict[str, dict[str, Any]] = {name: dict(plain) for name, plain in values["optimizer"].items()}
        for full_name, stored in blocks.index["optimizer"].items():
            name, _, key = full_name.rpartition(".")
            shape, like = tuple(stored["shape"]), parameters[name]
            if isinstance(like, DTensor) and shape == tuple(like.shape):
                value = _filled(torch.empty_like(like), blocks, "optimizer", full_name)
            else:  # in the type it was written in, which need not be the parameter's
                value = blocks.block("optimizer", full_name, (0,) * len(shape), shape)
                if shape == like.shape:  # laid out as the parameter: fused kernels go through the memory of both
                    value = torch.empty_like(like, dtype=value.dtype, device="cpu").copy_(value)
            state.setdefault(name, {})[key] = value
        numbers = {p: n for n, p in enumerate(p for group in self.optimizer.param_groups for p in group["params"])}
        by_number = {numbers[parameters[name]]: entries for name, entries in state.items()}
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": by_number})
        for group, counted in zip(self.optimizer.param_groups, values.get("groups", ()), strict=False):
            group.update(counted)
        if self.scaler is not None and values["scaler"]:
            self.scaler.load_state_dict(values["scaler"])

    def restore_model(self, blocks: StoredBlocks) -> None:
        """Takes back the weights alone."""
        for name, tensor in self.checkpointed_tensors().items():
            _filled(tensor, blocks, "model", name)

    def model_tensors(self) -> dict[str, Tensor]:
        """Weights and persistent buffers by name, each tensor once."""
        found: dict[int, tuple[str, Tensor]] = {}
        for name, tensor in self.model.state_dict(keep_vars=True).items():
            found.setdefault(id(tensor), (name, tensor))
        return dict(found.values())

    def checkpointed_tensors(self) -> dict[str, Tensor]:
        """Those of them that a checkpoint holds."""
        return self.model_tensors()

    def whole_tensors(self, keep: bool) -> dict[str, Tensor]:
        """Weights and saved buffers on the CPU, made whole one by one, for ranks that ``keep`` them; by all ranks."""
        whole = {}
        for name, tensor in self.model_tensors().items():
            full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            if keep:
                whole[name] = full.detach().cpu().contiguous()
        exchange(None)  # on a card other ranks have only queued their part, and must not end before it has run
        return whole

    def plain_model(self, folder: Path, keep: bool) -> nn.Module:
        """The model that the whole tensors belong to; one with adapters first writes these to ``folder``."""
        return self.model

    def save_pretrained(self, folder: Path, keep: bool) -> None:
        """Writes weights and configuration as ``from_pretrained`` wants them, on the rank that ``keep``s them."""
        weights = self.whole_tensors(keep)
        model: Any = self.plain_model(folder, keep)
        if keep and hasattr(model, "_from_config"):  # of transformers
            from transformers.utils import logging

            logging.disable_progress_bar()
            set_use_cache(model, True)  # off in training only
            dtype = next(t.dtype for t in weights.values() if t.is_floating_point())
            first = {id(tensor): name for name, tensor in self.model_tensors().items()}
            for name, tensor in model.state_dict(keep_vars=True).items():  # a name that the class ties by hand
                is_declared = name in (getattr(model, "all_tied_weights_keys", None) or {})
                if name not in weights and id(tensor) in first and not is_declared:
                    weights[name] = weights[first[id(tensor)]].clone()
            model.save_pretrained(folder, state_dict=weights)
            model.config.dtype = dtype  # an engine may compute with halves; whoever loads them should not halve again
            if (folder / "config.json").exists():  # next to adapters alone it would pass for that of a whole model
                model.config.save_pretrained(folder)
        elif keep:
            whole = {n: t if t.untyped_storage().nbytes() == t.nbytes else t.clone() for n, t in weights.items()}
            save_file(whole, folder / "model.safetensors")  # which refuses tensors that share memory

    def _states(self) -> dict[str, dict[str, Any]]:
        """The optimizer's state of each parameter that it has, in the order of the model."""
        state = self.optimizer.state
        return {name: state[p] for name, p in self.model.named_parameters() if p in state}


def _blocks(tensors: Mapping[str, Tensor], rank: int) -> dict[str, Block]:
    """The blocks of ``tensors`` that this rank holds and no earlier one."""
    found = {}
    for name, tensor in tensors.items():
        is_first = rank == 0
        if isinstance(tensor, DTensor):
            places = zip(tensor.device_mesh.get_coordinate() or (), tensor.placements, strict=True)
            is_first = all(index == 0 for index, placement in places if placement.is_replicate())
        if is_first and (held := _held(tensor)) is not None:
            found[name] = Block(held[0].contiguous(), tuple(tensor.shape), held[1])
    return found


@torch.no_grad()
def _filled(tensor: Tensor, blocks: StoredBlocks, section: str, name: str) -> Tensor:
    """``tensor`` with its part of the stored one; raises UserError if that is of another shape."""
    whole = tuple(blocks.index[section].get(name, {"shape": tensor.shape})["shape"])
    if whole != tuple(tensor.shape):
        what = f"{name} has the shape {whole} in the checkpoint and {tuple(tensor.shape)} in this model"
        raise UserError(f"{what}: give the old settings, or start from scratch with --resume never.")
    if (held := _held(tensor)) is not None:
        held[0].copy_(blocks.block(section, name, held[1], tuple(held[0].shape)))
    return tensor


def _held(tensor: Tensor) -> tuple[Tensor, tuple[int, ...]] | None:
    """This rank's block and where it begins; None where it holds none, because there are more ranks than rows."""
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return tensor, (0,) * tensor.ndim
    local = tensor.to_local()
    if not local.numel() and tensor.numel():
        return None
    (chunk,) = tensor.__create_chunk_list__()  # what torch's own distributed checkpoints go by
    return local, tuple(chunk.offsets)
