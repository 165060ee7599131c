"""Mixes of what saves memory, on a CUDA card that is not there and runs out of memory in each phase of the step."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from emulated.card import Refusal, Settings
from emulated.device import run_several
from faults import processes
from support import EVERY_CASE, write_recipe
from test_emulated_card import (
    HOST_UPDATES,
    KINDS,
    ON_CARD,
    ONE_PASS,
    PIECES_REPEAT,
    Ran,
    assert_equal,
    offload_small_tensors,
)

from train.records import EXIT_DONE, EXIT_ERROR

CHECKPOINTING = {"none": (), **{name: KINDS[name] for name in ("full", "selective", "offload")}}
REFUSALS: dict[str, tuple[Refusal, ...]] = {
    "enough memory": (),
    "forward": (Refusal("forward", 2, 5),),
    "backward": (Refusal("backward", 2, 20),),
    "optimizer": (Refusal("optimizer", 1, 1, 1000),),  # where the moments are allocated
}
"""By the phase of the step that memory runs out in."""


def quick() -> None:
    """Neither charts nor counts of operations, which take most of such a run's time."""
    offload_small_tensors()
    from train.extras.report import charts

    charts.svg = lambda *arguments, **options: "<svg></svg>"
    torch.cuda.get_device_name = lambda device=None: "a card of unknown speed"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("on_host", "in_backward"),
    [(True, False), *([(False, True), (False, False), (True, True)] * EVERY_CASE)],
)
def test_whatever_saves_memory_and_wherever_it_runs_out_the_weights_are_those_of_a_cpu(
    tmp_path: Path, on_host: bool, in_backward: bool
) -> None:
    """Kinds of checkpointing × optimizer on the host × updates in backward × the phase that finds no memory.

    A step recovers where its gradients are still to be had; else the run ends and resumes from its checkpoint.
    """
    common = ["--config", write_recipe(tmp_path), "--mixed_precision", "no", *PIECES_REPEAT, *ONE_PASS]
    common += ["--lr_scheduler", "constant", "--rehearse", "false"]
    [ended] = processes.run([*map(str, common), "--output_dir", str(tmp_path / "cpu")], tmp_path / "logs")
    on_cpu = Ran(ended.status, ended.said, tmp_path / "cpu", {})
    common += ["--save_every_steps", 1, *(HOST_UPDATES if on_host else ())]
    common += ["--optimizer_in_backward", "true"] if in_backward else []
    # Updates in backward leave nothing to do after it.
    phases = [phase for phase in REFUSALS if phase != "optimizer" or not in_backward]
    runs = {}
    kinds = CHECKPOINTING if EVERY_CASE else dict([*CHECKPOINTING.items()][in_backward::2])
    for kind, flags in kinds.items():
        for phase in phases:
            arguments = [*map(str, (*common, *flags)), "--output_dir", str(tmp_path / f"{kind}, {phase}")]
            runs[f"{kind}, {phase}"] = (arguments, Settings(refusals=REFUSALS[phase]))
            if phase == "optimizer" or (in_backward and phase != "enough memory"):
                runs[f"{kind}, {phase}, resumed"] = (arguments, Settings())
    report = tmp_path / "several.json"
    work = partial(run_several, runs, report, quick)
    [ended] = processes.start_work(work, tmp_path / "logs", 1, {"HF_HUB_OFFLINE": "1", **ON_CARD}).end(500)
    assert ended.status == EXIT_DONE, ended.said
    said = dict(part.split("\n", 1) for part in ended.said.split("== ")[1:])
    for name, row in json.loads(report.read_text()).items():
        phase = name.split(", ")[1]
        assert row["races"] == [], name
        # On the host the moments take nothing of the card.
        has_enough = phase == "enough memory" or (phase == "optimizer" and on_host) or "resumed" in name
        if has_enough:
            assert (row["status"], row["out_of_memory"]) == (EXIT_DONE, {}), said[name]
        elif in_backward or phase == "optimizer":
            assert row["status"] == EXIT_ERROR and f"Out of memory in {phase}" in said[name], said[name]
            assert row["out_of_memory"].keys() == {phase}
        else:
            assert row["status"] == EXIT_DONE and f"out of memory in {phase}" in said[name], said[name]
            assert row["out_of_memory"] == {phase: 1}
    for kind in kinds:
        for phase in phases:
            ran = Ran(EXIT_DONE, "", tmp_path / f"{kind}, {phase}", {})
            recovers = phase in ("forward", "backward") and not in_backward
            assert ran.summary.get("oom_recoveries", 0) == recovers
            assert_equal(ran, on_cpu, 1e-5 if recovers else 1e-6)
