"""What a checkpoint holds: weights, optimizer and loss scaler, in the blocks that each rank has; and what it is of.

A rank hands out blocks of tensors and takes them back. However they were cut, a run may resume with another number of
ranks, sharded or not.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import datasets
import numpy as np
import pyarrow as pa
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from train.config import to_values
from train.outputs_log import write_whole
from train.records import Run, UserError

ROWS_AT_ONCE = 64
"""Rows of long sequences are large."""
STREAMED = 64
"""Examples of a stream that are compared: the rest of it is not known before it is trained on."""


@dataclass(frozen=True)
class Part:
    """A block of a larger tensor."""

    tensor: Tensor
    shape: tuple[int, ...]
    """Of the whole."""
    offsets: tuple[int, ...]
    """Where in the whole the block begins; a block of one dimension may also be a stretch of the whole flattened."""


class Blocks(Protocol):
    """Where a state is restored from."""

    def names(self, section: str) -> Iterator[str]:
        """The tensors of ``section``."""
        ...

    def whole_shape(self, section: str, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        ...

    def block(self, section: str, name: str, offsets: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        """A block of it."""
        ...


class RunState(Protocol):
    """What a checkpoint saves and restores, and ``final/`` is written from, however the ranks hold it."""

    @property
    def model(self) -> nn.Module: ...

    @property
    def identity(self) -> Mapping[str, Any]:
        """What must be equal for a run to resume: data, model, batch, seed."""
        ...

    def parts(self, rank: int) -> dict[str, dict[str, Part]]:
        """By section and name, what ``rank`` has to write: over all ranks every element of every tensor once."""
        ...

    def values(self) -> dict[str, Any]:
        """Everything except tensors, as JSON; the same on every rank."""
        ...

    def restore(self, blocks: Blocks, values: Mapping[str, Any]) -> None:
        """Takes everything back in place."""
        ...

    def restore_model(self, blocks: Blocks) -> None:
        """Takes back the weights alone."""
        ...

    def whole_tensors(self, keep: bool) -> dict[str, Tensor]:
        """The model's tensors, each whole and on the CPU, for ranks that ``keep`` them; all ranks take part."""
        ...

    def write_final(self, folder: Path, keep: bool) -> nn.Module:
        """Writes what ``final/`` has in addition to the weights; returns the model that they belong to."""
        ...


@dataclass(frozen=True)
class TrainingState:
    """The live objects of a run on one device, replicated or sharded as DTensors."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    identity: Mapping[str, Any]
    scaler: torch.amp.GradScaler | None = None

    def parts(self, rank: int) -> dict[str, dict[str, Part]]:
        """By section and name, what ``rank`` has to write."""
        optimizer = {
            f"{name}.{key}": value
            for name, parameter in self._parameters().items()
            for key, value in self.optimizer.state.get(parameter, {}).items()
            if isinstance(value, Tensor)
        }
        return {"model": _parts(self.model_tensors(), rank), "optimizer": _parts(optimizer, rank)}

    def values(self) -> dict[str, Any]:
        """Parameter groups, numbers of the optimizer's state, and the loss scaler."""
        parameters = self._parameters()
        names = {id(p): name for name, p in parameters.items()}
        groups = [
            {k: [names[id(p)] for p in v] if k == "params" else v for k, v in group.items()}
            for group in self.optimizer.param_groups
        ]
        plain = {
            name: {k: v for k, v in self.optimizer.state.get(p, {}).items() if not isinstance(v, Tensor)}
            for name, p in parameters.items()
        }
        scaler = self.scaler.state_dict() if self.scaler is not None else None
        return {"param_groups": groups, "optimizer": {k: v for k, v in plain.items() if v}, "scaler": scaler}

    def restore(self, blocks: Blocks, values: Mapping[str, Any]) -> None:
        """Takes everything back in place."""
        self.restore_model(blocks)
        parameters = self._parameters()
        state: dict[str, dict[str, Any]] = {name: dict(plain) for name, plain in values["optimizer"].items()}
        for full_name in blocks.names("optimizer"):
            name, _, key = full_name.rpartition(".")
            shape = blocks.whole_shape("optimizer", full_name)
            like = parameters[name]
            if isinstance(like, DTensor) and shape == tuple(like.shape):
                value = _filled(torch.empty_like(like), blocks, "optimizer", full_name)
            else:  # in the type it was written in, which need not be the parameter's
                value = blocks.block("optimizer", full_name, (0,) * len(shape), shape)
            state.setdefault(name, {})[key] = value
        numbers = {id(p): i for i, p in enumerate(p for g in self.optimizer.param_groups for p in g["params"])}
        names = {id(p): name for name, p in parameters.items()}
        settings = {name: group for group in values["param_groups"] for name in group["params"]}
        groups = [  # this run's own, for divided weights are grouped apart; JSON knows no tuples, such as betas
            {
                **{k: tuple(v) if isinstance(v, list) else v for k, v in settings[names[id(params[0])]].items()},
                "params": [numbers[id(p)] for p in params],
            }
            for params in (group["params"] for group in self.optimizer.param_groups)
        ]
        by_number = {numbers[id(parameters[name])]: entries for name, entries in state.items()}
        self.optimizer.load_state_dict({"state": by_number, "param_groups": groups})
        if self.scaler is not None and values["scaler"]:
            self.scaler.load_state_dict(values["scaler"])

    def restore_model(self, blocks: Blocks) -> None:
        """Takes back the weights alone."""
        for name, tensor in self.model_tensors().items():
            _filled(tensor, blocks, "model", name)

    def model_tensors(self) -> dict[str, Tensor]:
        """What of the model a checkpoint holds, by name."""
        return model_tensors(self.model)

    def whole_tensors(self, keep: bool) -> dict[str, Tensor]:
        """The model's tensors, each whole and on the CPU, for ranks that ``keep`` them; all ranks take part."""
        return whole_tensors(self.model, keep)

    def write_final(self, folder: Path, keep: bool) -> nn.Module:
        """Nothing more than the weights."""
        return self.model

    def _parameters(self) -> dict[str, nn.Parameter]:
        trained = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        return {name: p for name, p in self.model.named_parameters() if id(p) in trained}


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Weights and persistent buffers by name, those that share a tensor once."""
    seen: set[int] = set()
    found = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            found[name] = tensor
    return found


def whole_tensors(model: nn.Module, keep: bool) -> dict[str, Tensor]:
    """Weights and persistent buffers on the CPU, each whole, for ranks that ``keep`` them; all ranks take part.

    One tensor at a time is whole on every rank: no more memory is needed than for the largest.
    """
    whole = {}
    for name, tensor in model_tensors(model).items():
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if keep:
            whole[name] = full.detach().cpu()
    return whole


def _parts(tensors: Mapping[str, Tensor], rank: int) -> dict[str, Part]:
    found = {}
    for name, tensor in tensors.items():
        whole, local = tuple(tensor.shape), _local(tensor)
        if not isinstance(tensor, DTensor):
            if rank == 0:
                found[name] = Part(local.contiguous(), whole, (0,) * len(whole))
            continue
        offsets = _offsets(tensor)
        if offsets is not None and _is_first_copy(tensor):
            found[name] = Part(local.contiguous(), whole, offsets)
    return found


@torch.no_grad()
def _filled(tensor: Tensor, blocks: Blocks, section: str, name: str) -> Tensor:
    """``tensor`` with its part of the stored one.

    Raises:
        UserError: that is of another shape.
    """
    whole = blocks.whole_shape(section, name)
    if whole != tuple(tensor.shape):
        raise UserError(
            f"{name} has the shape {whole} in the checkpoint and {tuple(tensor.shape)} in this model: give the old "
            "settings, or start from scratch with --resume never."
        )
    local = _local(tensor)
    offsets = _offsets(tensor) if isinstance(tensor, DTensor) else (0,) * local.ndim
    if offsets is not None:
        local.copy_(blocks.block(section, name, offsets, tuple(local.shape)))
    return tensor


def _local(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _offsets(tensor: DTensor) -> tuple[int, ...] | None:
    """Where this rank's block begins; None where it holds none, because there are more ranks than rows."""
    if not tensor.to_local().numel() and tensor.numel():
        return None
    (chunk,) = tensor.__create_chunk_list__()  # what torch's own distributed checkpoints go by
    return tuple(chunk.offsets)


def _is_first_copy(tensor: DTensor) -> bool:
    """Whether no earlier rank holds the same block."""
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    return all(index == 0 for index, p in zip(coordinate, tensor.placements, strict=True) if p.is_replicate())


def run_identity(run: Run, tokenizer: Any, training_digest: str, global_batch_size: int) -> dict[str, Any]:
    """The settings that a run may not change on the way, by the names that a person knows them by.

    Args:
        training_digest: see :func:`examples_digest`.
    """
    values = to_values(run.config)
    same = ("task", "mlm_probability", "model", "model_config", "dtype", "optimizer", "seed")
    return {
        **{name: values[name] for name in same},
        **run.extras.merged("identity", run.config),
        "tokenizer": tokenizer_digest(tokenizer),
        "training data": training_digest,
        "global_batch_size": global_batch_size,
        "mixed_precision": run.accelerator.mixed_precision,
    }


def examples_digest(examples: datasets.Dataset | datasets.IterableDataset) -> str:
    """Equal for equal examples in equal order, wherever the files lie that they were made from.

    Of a stream it is the digest of the first ``STREAMED`` examples. Of a dataset on disk it is kept next to its cache,
    whose fingerprint it shares, so that further ranks and runs need not read all examples.
    """
    if isinstance(examples, datasets.IterableDataset):
        return "stream " + _digest(pa.Table.from_pylist([row]) for row in itertools.islice(examples, STREAMED))
    files = examples.cache_files
    kept = Path(files[0]["filename"]).parent / f"examples-{examples._fingerprint}.sha256" if files else None
    if kept is not None and kept.is_file() and re.fullmatch("[0-9a-f]{16}", found := kept.read_text(encoding="utf-8")):
        return found
    tables: Any = examples.with_format("arrow").iter(ROWS_AT_ONCE)
    digest = _digest(tables)
    if kept is not None:
        with contextlib.suppress(UserError):  # a cache that cannot be written must not prevent training
            write_whole(kept, digest)
    return digest


def _digest(tables: Iterable[pa.Table]) -> str:
    digest = hashlib.sha256()
    for table in tables:
        for name in table.column_names:
            digest.update(name.encode())
            _add(digest, pa.concat_arrays(table.column(name).chunks))
    return digest.hexdigest()[:16]


def _add(digest: hashlib._Hash, array: pa.Array) -> None:
    """The values of ``array``, and of lists where each ends: [[1], [2, 3]] is not [[1, 2], [3]]."""
    while isinstance(array, pa.ListArray):
        digest.update(array.value_lengths().to_numpy().tobytes())
        array = array.flatten()
    values = array.to_numpy(zero_copy_only=False)
    digest.update(repr(values.tolist()).encode() if values.dtype == np.object_ else values.tobytes())


def tokenizer_digest(tokenizer: Any) -> str:
    """Equal for tokenizers that give equal ids: fast ones by their JSON, others by class and vocabulary."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        # Truncation and padding are those of its last call.
        text = json.dumps({**json.loads(backend.to_str()), "truncation": None, "padding": None})
    else:
        text = f"{type(tokenizer)}{sorted(tokenizer.get_vocab().items())}"
    return hashlib.sha256(f"{text}{sorted(tokenizer.special_tokens_map.items())}".encode()).hexdigest()[:16]
