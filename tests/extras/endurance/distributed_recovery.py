"""Run by ``test_memory_recovery.py`` under torchrun: steps with faults on some ranks; rank 0 writes what came out."""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedDataParallelKwargs
from safetensors.torch import save_file
from test_memory_recovery import LENGTHS, WINDOWS, LimitedModel, batches_of
from test_step import batch, rows
from torch import Tensor, nn

from train.batching import without_targets
from train.config import Config, Optimization
from train.extras.endurance.recovery import OutOfMemoryError, Recovering
from train.model import ModelWithLoss
from train.records import MicroBatch
from train.step import Engine, seed_step

Case = tuple[str, dict[int, int], dict[str, Any]]
CASES: list[Case] = [
    # name, positions that fit on a rank, where a rank runs out of memory
    ("no fault", {}, {}),
    ("forward on rank 1", {1: 10}, {"where": "forward"}),
    ("backward on rank 1", {1: 10}, {"where": "backward"}),
    ("backward on both", {0: 12, 1: 10}, {"where": "backward"}),
    ("second micro-batch on rank 1", {1: 10}, {"where": "backward", "call": 2}),
    ("bucket views", {0: 10}, {"where": "backward", "bucket_view": True}),
]


class PartlyUsed(nn.Module):
    """Its second layer sees only rows that begin with token 1, its third none."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.heads = nn.ModuleList([nn.Linear(6, 11) for _ in range(3)])

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.embedding(input_ids)
        logits = self.heads[0](hidden)
        return logits + self.heads[1](hidden) if bool((input_ids[:, 0] == 1).any()) else logits


def window_of(ids: list[int], rank: int, size: int, world_size: int) -> list[MicroBatch]:
    """This rank's micro-batches: every second round of ``size`` examples."""
    mine = batches_of(ids, size)[rank::world_size]
    rounds = -(-len(ids) // (size * world_size))
    return [*mine, *[without_targets(batch([rows(LENGTHS)[0]]))] * (rounds - len(mine))]


def plain_engine(accelerator: Accelerator, max_grad_norm: float | None = 1.0) -> Engine:
    """What recovery takes the place of."""
    return Engine(accelerator, Config(optimization=Optimization(max_grad_norm=max_grad_norm)))


def gathered(mine: Any) -> list[Any]:
    """What every rank has, by rank."""
    everyone: list[Any] = [None for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, mine)
    return everyone


def run_case(name: str, bounds: dict[int, int], options: dict[str, Any], output: Path) -> dict[str, Any]:
    torch.manual_seed(0)
    handler = DistributedDataParallelKwargs(gradient_as_bucket_view=options.pop("bucket_view", False))
    accelerator = Accelerator(cpu=True, kwargs_handlers=[handler])
    rank = accelerator.process_index
    network = LimitedModel(bounds.get(rank, 10**6), **options).double()
    optimizer = torch.optim.AdamW(network.parameters(), lr=0.1, weight_decay=0.1)
    model, optimizer = accelerator.prepare(ModelWithLoss(network), optimizer)
    said: list[str] = []
    engine = Recovering(plain_engine(accelerator, 0.5), said.append)
    norms = []
    for ids in WINDOWS:
        window = window_of(ids, rank, 2, accelerator.num_processes)
        outcome = engine.step(model, optimizer, window)
        norms.append(outcome.grad_norm)
        assert outcome.num_targets == sum(LENGTHS[i] for i in ids)
    weights = torch.cat([p.detach().flatten() for p in network.parameters()])
    everyone = gathered((engine.recoveries, said, weights))
    assert all(torch.equal(weights, other) for _, _, other in everyone)
    if rank == 0:
        values = {k: v.contiguous() for k, v in network.state_dict().items()}
        save_file({**values, "norms": torch.tensor(norms, dtype=torch.float64)}, output / f"{name}.safetensors")
    return {"recoveries": [r for r, _, _ in everyone], "said": [s for _, s, _ in everyone]}


def run_measures(helps: bool) -> dict[str, Any]:
    """No single example fits on rank 1 until a measure is taken."""
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)
    rank = accelerator.process_index
    network = LimitedModel(2 if rank == 1 else 10**6, where="backward").double()
    before = {k: v.clone() for k, v in network.state_dict().items()}
    model, optimizer = accelerator.prepare(ModelWithLoss(network), torch.optim.SGD(network.parameters(), lr=1.0))
    taken: list[str] = []

    def take(name: str, bound: int | None) -> bool:
        taken.append(name)
        network.bound = bound or network.bound
        return bound is not None

    measures = [("cannot", lambda: take("cannot", None)), ("checkpoint", lambda: take("checkpoint", 30))]
    found_measures = measures if helps else measures[:1]
    engine = Recovering(plain_engine(accelerator), lambda line: None, lambda model: found_measures)
    error = None
    seed_step(0, 1, 0)
    state = torch.get_rng_state()
    try:
        engine.step(model, optimizer, window_of(WINDOWS[0], rank, 2, 2))
    except OutOfMemoryError as caught:
        error = {"text": str(caught), "intact": caught.weights_intact, "shape": caught.fault.shape}
    unchanged = all(torch.equal(before[k], v) for k, v in network.state_dict().items())
    found = {
        "taken": taken,
        "error": error,
        "unchanged": unchanged and torch.equal(torch.get_rng_state(), state),
        "gradients": any(p.grad is not None for p in network.parameters()),
    }
    return {"ranks": gathered(found)}


def run_optimizer_fault() -> dict[str, Any]:
    """Rank 1 has no memory for the optimizer's state; rank 0 has."""
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)
    network = LimitedModel(10**6).double()
    model, optimizer = accelerator.prepare(ModelWithLoss(network), torch.optim.AdamW(network.parameters(), lr=0.1))
    if accelerator.process_index == 1:

        def no_memory(*args: Any, **kwargs: Any) -> None:
            raise torch.OutOfMemoryError("no memory for the optimizer")

        optimizer.optimizer.register_step_pre_hook(no_memory)
    try:
        window = window_of(WINDOWS[0], accelerator.process_index, 2, 2)
        Recovering(plain_engine(accelerator), lambda line: None).step(model, optimizer, window)
    except OutOfMemoryError as error:
        return {"ranks": gathered((str(error), error.weights_intact))}
    return {"ranks": gathered(None)}


def run_partly_used() -> dict[str, Any]:
    """Which parameters keep a gradient where only rank 0 has examples for one of them."""
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)
    network = PartlyUsed().double()
    optimizer = torch.optim.SGD(network.parameters(), lr=1.0)
    before = {k: v.clone() for k, v in network.state_dict().items()}
    model, optimizer = accelerator.prepare(ModelWithLoss(network), optimizer)
    seen: list[bool] = []
    optimizer.optimizer.register_step_pre_hook(
        lambda *args: seen.extend(p.grad is not None for p in network.heads.parameters())
    )
    ids = torch.tensor([[1, 2, 3]]) if accelerator.process_index == 0 else torch.tensor([[4, 5, 6]])
    window = [MicroBatch({"input_ids": ids}, ids, 3, (0,), 3)]
    Recovering(plain_engine(accelerator, None), lambda line: None).step(model, optimizer, window)
    moved = (network.heads[1].weight - before["heads.1.weight"]).detach()  # type: ignore
    everyone = gathered((seen, moved.tolist()))
    hidden = before["embedding.weight"][torch.tensor([1, 2, 3])]
    logits = hidden @ before["heads.0.weight"].T + before["heads.0.bias"]
    logits = (logits + before["heads.1.bias"] + hidden @ before["heads.1.weight"].T).requires_grad_()
    nn.functional.cross_entropy(logits, torch.tensor([1, 2, 3]), reduction="sum").backward()
    assert logits.grad is not None
    return {"ranks": everyone, "expected": (-logits.grad.T @ hidden / 6).tolist()}


def run_precision() -> dict[str, Any]:
    """The type that the model computes in under accelerate's autocast."""
    AcceleratorState._reset_state(reset_partial_state=False)
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    network = LimitedModel(10**6)
    dtypes: list[str] = []
    network.head.register_forward_hook(lambda module, args, output: dtypes.append(str(output.dtype)))
    model, optimizer = accelerator.prepare(ModelWithLoss(network), torch.optim.SGD(network.parameters(), lr=1.0))
    window = window_of(WINDOWS[0], accelerator.process_index, 2, 2)
    Recovering(plain_engine(accelerator), lambda line: None).step(model, optimizer, window)
    return {"dtypes": sorted(set(dtypes))}


def main(output: Path) -> None:
    gc.freeze()  # every recovery collects garbage: what the imports left need not be looked through each time
    found: dict[str, Any] = {name: run_case(name, bounds, options, output) for name, bounds, options in CASES}
    found["measure"], found["no measure"] = run_measures(True), run_measures(False)
    found["optimizer"], found["partly used"] = run_optimizer_fault(), run_partly_used()
    found["precision"] = run_precision()
    if dist.get_rank() == 0:
        (output / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    sys.stdout.flush()
    os._exit(0)
