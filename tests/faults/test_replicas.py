"""Ranks of one run whose weights are no longer equal: the run says which, stops, and saves nothing of it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from faults.injections import on_rank, several
from faults.processes import Fault, run
from support import write_recipe
from torch import nn

from train.checkpoint import verify
from train.extras.endurance import checkpoints
from train.extras.endurance.checkpoints import digest
from train.records import EXIT_DONE, EXIT_ERROR


def arguments(folder: Path, *more: Any) -> tuple[Any, ...]:
    return ("--config", write_recipe(folder), "--output_dir", folder / "run", "--num_epochs", 4, *more)


def flipped_bit(step: int) -> Fault:
    """A bit of one weight is another after the step, from 1 on; not the last one, which updates may round away."""
    return partial(_flipped_bit, step)


def _flipped_bit(step: int, rank: int) -> None:
    from train import step as module

    plain, calls = module.optimizer_step, [-1]  # the rehearsal is a step, too

    def then_flipped(engine: Any, model: nn.Module, *rest: Any, **options: Any) -> Any:
        outcome = plain(engine, model, *rest, **options)
        calls[0] += 1
        if calls[0] == step:
            with torch.no_grad():
                next(model.parameters()).view(-1)[:1].view(torch.int32).bitwise_xor_(2**12)
        return outcome

    module.optimizer_step = then_flipped


def compared_every(steps: int) -> Fault:
    return partial(_compared_every, steps)


def _compared_every(steps: int, rank: int) -> None:
    checkpoints.COMPARED_EVERY_STEPS = steps  # type: ignore


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_rank_that_differs_is_named_and_nothing_of_it_is_saved(tmp_path: Path, ranks: int) -> None:
    """Of two ranks nobody can tell which is wrong."""
    its = arguments(tmp_path, "--save_every_steps", 2, "--global_batch_size", 12, "--save_total_limit", 9)
    ended = run(its, tmp_path / "logs", ranks, on_rank(1, flipped_bit(5)))
    assert {end.status for end in ended} == {EXIT_ERROR}, ended[0].said
    who = "0, 1" if ranks == 2 else "1"
    than = "each other" if ranks == 2 else "those of other ranks"
    assert f"step 6: the weights of rank {who} differ from {than}, and must not" in ended[0].said
    assert "Traceback" not in "".join(end.said for end in ended)
    kept = sorted((tmp_path / "run" / "checkpoints").glob("step-*"))
    assert [path.name for path in kept] == ["step-00000002", "step-00000004"]
    assert not any(map(verify, kept))
    ended = run(its, tmp_path / "logs", ranks)
    assert {end.status for end in ended} == {EXIT_DONE}, ended[0].said


@pytest.mark.slow
def test_weights_are_compared_between_saves(tmp_path: Path) -> None:
    fault = several(compared_every(3), on_rank(1, flipped_bit(4)))
    ended = run(arguments(tmp_path), tmp_path / "logs", 2, fault)
    assert {end.status for end in ended} == {EXIT_ERROR}, ended[0].said
    assert "step 6: the weights of rank 0, 1 differ" in ended[0].said


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3,), (8, 5), ()])
def test_digest_tells_every_bit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.randn(shape).to(dtype)
    before = digest([tensor, torch.ones(2)])
    assert digest([tensor.clone(), torch.ones(2)]) == before
    for bit in range(8 * tensor.nbytes):
        flat = tensor.clone().view(-1).view(torch.uint8)
        flat[bit // 8] ^= 1 << (bit % 8)
        assert digest([flat.view(dtype), torch.ones(2)]) != before


def test_digest_of_tensors_that_begin_anywhere() -> None:
    whole = torch.randn(33)
    assert digest([whole[1:]]) == digest([whole.clone()[1:]]) != digest([whole[:-1]])
    assert digest([whole[:32].view(4, 8).T]) == digest([whole[:32].view(4, 8).T.contiguous()])
