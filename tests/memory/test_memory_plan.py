"""The search for the fastest setting that fits and for the longest length, the grid, and what they read."""

from __future__ import annotations

import json
import math
import shlex
import threading
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from support import sampled

from train.config import Config, parse, to_values
from train.memory.__main__ import main
from train.memory.advice import command, launcher_words, plan_text
from train.memory.devices import Device, find_device
from train.memory.grid import Grid, draw, grid_text, make_grid
from train.memory.ladder import LADDER, Recompute, largest_fitting
from train.memory.plan import Predictions, longest_length, make_plan, predicted
from train.memory.predict import Job, Prediction, Predictor, Target
from train.memory.question import (
    MARGIN,
    OFFLOAD,
    Question,
    Setting,
    job_of,
    position_limit,
    replace_length,
    target_of,
    vocabulary_size,
)
from train.records import EXIT_DONE, UsageError, UserError

GIB, MIB = 2**30, 2**20
LLAMA = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 8000}
LOSSES = ("full", "chunked")


class Synthetic(Predictor):
    """Predicts by formulas: memory affine in B·S; time the same with a floor for small micro-batches."""

    def __init__(
        self,
        fixed: float = 2 * GIB,
        logits: tuple[float, float] = (100e3, 1e3),
        launch_seconds: float = 0.05,
        refused: dict[str, Any] | None = None,
        positions: int | None = None,
        offloadable: float = 0.0,
        tileable: float = 0.0,
    ) -> None:
        self.fixed, self.logits = fixed, logits
        self.launch_seconds, self.refused, self.positions = launch_seconds, refused or {}, positions
        self.offloadable, self.tileable = offloadable, tileable
        self.jobs: list[Job] = []
        self._process = None

    def start(self) -> None:
        """Needs no process."""

    def predict(self, job: Job) -> Prediction:
        self.jobs.append(job)
        values = job.values
        for name, value in self.refused.items():
            if values[name] == value:
                raise UserError(f"{name}: {value} does not work with this model.")
        loss = values["loss"] if values["loss"] != "auto" else "chunked"
        way = Recompute(values["gradient_checkpointing"], values["gradient_checkpointing_every_n_layers"])
        column = LOSSES.index(loss)
        share = {"none": 0.0, "selective": 1 / way.gradient_checkpointing_every_n_layers, "full": 1.5}[
            way.gradient_checkpointing
        ]  # of what can be computed again
        tokens = job.micro_batch_size * job.length
        offloaded = values["gradient_checkpointing_offload"] * self.offloadable * tokens
        tiled = values["tiled_mlp"] * self.tileable * tokens
        activations, logits = (200e3 - 120e3 * share) * tokens - offloaded - tiled, self.logits[column] * tokens
        fixed = self.fixed / {"fsdp2": job.world_size, OFFLOAD: 20}.get(job.sharding, 1)
        tokens *= 1 if values["mixed_precision"] in ("fp16", "bf16") else 3  # time alone
        seconds = max(self.launch_seconds, 1e-5 * tokens * (1 + 0.26 * share + 0.1 * column)) + 0.002
        size = int(fixed + activations + logits)
        weights = 4 * 10**8 // job.world_size
        on_host = {"optimizer state": 3 * weights} if values["optimizer_offload"] else {}
        if job.sharding == OFFLOAD:
            on_host = {"parameters": weights, "gradients": weights, "optimizer state": 2 * weights}
        return Prediction(
            peak_bytes=size,
            phase="backward",
            operator="aten.mm",
            bytes_by_kind={
                "optimizer state": int(fixed),
                "activations": int(activations),
                "logits and loss": int(logits),
            },
            peak_bytes_by_phase={"backward": size},
            reserved_bytes=size,
            least_reserved_bytes=size,
            num_parameters=10**8,
            num_trained_parameters=10**8,
            attention_kernels=("flash",),
            flops=1.0,
            seconds=seconds,
            host_bytes_by_kind={**on_host, "activations": int(offloaded)},
        )


def question(total_gib: float = 24.0, *, world_size: int = 1, **changes: Any) -> Question:
    values = {"model_config": LLAMA, "tokenizer": "bytes", "max_length": 8192, "global_batch_size": 32, **changes}
    words = [w for k, v in values.items() for w in (f"--{k}", json.dumps(v) if isinstance(v, dict) else str(v))]
    return Question(
        parse(words), Device("a100-80", int(total_gib * GIB), 0, (8, 0), 2e12), vocab_size=8000, world_size=world_size
    )


def bf16_setting(size: int, checkpointing: str, loss: str, sharding: str = "none", **more: Any) -> Setting:
    return Setting(checkpointing, micro_batch_size=size, mixed_precision="bf16", loss=loss, sharding=sharding, **more)


class Slow(Synthetic):
    """Of several processes: the first job of all is answered once ``count`` have begun."""

    def __init__(self, begun: threading.Semaphore, first: list[Job], count: int = 4) -> None:
        super().__init__(launch_seconds=0)
        self._begun, self._first, self._count = begun, first, count

    def predict(self, job: Job) -> Prediction:
        self._begun.release()
        self._first.append(job)
        if self._first[0] is job:
            assert all(self._begun.acquire(timeout=20) for _ in range(self._count))
        return super().predict(job)


@pytest.mark.parametrize("world_size", [1, 4])
def test_while_the_first_prediction_lasts_others_begin_that_the_search_needs(
    world_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan, and what is predicted for it, are those of a search that asks for one after the other."""
    asked = question(12, world_size=world_size, micro_batch_size=2, max_length=65536)
    expected = make_plan(asked, Predictions(alone := Synthetic(launch_seconds=0)))
    monkeypatch.setattr("train.memory.plan.START_SECONDS", 0.01)
    begun, first = threading.Semaphore(0), list[Job]()
    processes = [Slow(begun, first) for _ in range(4)]
    assert make_plan(asked, Predictions(*processes)) == expected
    predicted_here = [str(job) for process in processes for job in process.jobs]
    assert sorted(predicted_here) == sorted(map(str, alone.jobs))


class Brief(Synthetic):
    """Takes a moment for each answer."""

    def predict(self, job: Job) -> Prediction:
        time.sleep(0.1)
        return super().predict(job)


def test_a_first_prediction_that_is_soon_there_has_no_others_begin() -> None:
    """Every way fits: some recomputation need not be predicted."""
    lines, asked = list[str](), question(24, micro_batch_size=1)
    make_plan(asked, Predictions(alone := Synthetic()))
    make_plan(asked, Predictions(*(Brief() for _ in range(4)), say=lines.append))
    assert len(lines) == len(alone.jobs)


@pytest.mark.parametrize(
    ("dtype", "precision", "shown"),
    [("bfloat16", None, "bf16"), ("bfloat16", "no", "bf16"), ("float32", "no", "fp32"), ("float32", "fp16", "fp16")],
)
def test_a_plan_names_the_type_that_weights_compute_in(dtype: str, precision: str | None, shown: str) -> None:
    values: dict[str, Any] = {"mixed_precision": precision} if precision else {}
    asked = question(dtype=dtype, **values)
    plan = make_plan(asked, Predictions(Synthetic()))
    for outcome in (plan.asked, plan.best, plan.smallest):
        assert outcome is not None and f", precision {shown}, " in str(outcome.setting)


def configured(asked: Question, setting: Setting) -> Config:
    return asked.config.changed(**asked.changes(setting))


def lengths_of(grid: Grid) -> list[int]:
    return [row[0].job.length for row in grid]


def brute_force(asked: Question, predictor: Synthetic, sharding: str = "none") -> tuple[float, int]:
    """(least seconds per token among what fits, how many settings there are)."""
    per_rank = asked.global_batch_size // asked.world_size
    found, tried = [], 0
    for size in (n for n in range(1, per_rank + 1) if per_rank % n == 0):
        for way in LADDER[:-2]:
            for loss in LOSSES:
                tried += 1
                job = asked.job(bf16_setting(size, "none", loss, sharding).recomputing(way))
                prediction = predictor.predict(job)
                if prediction.least_reserved_bytes + asked.nccl_bytes <= asked.room_bytes:
                    found.append(prediction.seconds / (size * job.length))
    return min(found), tried


def test_a_budget_of_tokens_is_planned_as_the_longest_examples_that_it_holds() -> None:
    asked = question(80, max_length=1024, max_tokens_per_micro_batch=5000)
    assert asked.asked.micro_batch_size == 4
    job = asked.job(asked.asked)
    assert (job.micro_batch_size, job.length, job.accumulates) == (4, 1024, True)
    assert asked.changes(asked.asked).keys() <= {"mixed_precision"}
    changes = asked.changes(replace(asked.asked, micro_batch_size=8))
    assert changes["max_tokens_per_micro_batch"] == 8192 and "micro_batch_size" not in changes
    assert asked.job(replace(asked.asked, micro_batch_size=8)).micro_batch_size == 8


def test_packed_rows_need_no_padding_and_scaled_positions_are_more() -> None:
    rows = question(80, packing=True, task="masked_lm", micro_batch_size=4)
    assert not rows.job(rows.asked).padded
    fields = {**LLAMA, "max_position_embeddings": 4096}
    assert position_limit(question(model_config=fields).config) == 4096
    doubled = question(model_config=fields, rope_scaling="yarn", rope_scaling_factor=2.5)
    assert position_limit(doubled.config) == 10240
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 1024}
    again = question(model_config={**fields, "rope_parameters": rope}, rope_scaling="yarn", rope_scaling_factor=8)
    assert position_limit(again.config) == 8192
    free = question(model_config=fields, rope_scaling="yarn")
    assert position_limit(free.config) is None
    assert longest_length(free, Predictions(Synthetic()))[0] > 10240


@pytest.mark.parametrize(
    "total_gib", [*(pytest.param(gib, marks=pytest.mark.slow) for gib in sampled((4, 5, 8, 12, 80, 200), 6)), 24]
)
@pytest.mark.parametrize("length", [512, pytest.param(8192, marks=pytest.mark.slow), 65536])
@pytest.mark.parametrize("launch_seconds", [0.05, *(pytest.param(s, marks=pytest.mark.slow) for s in (0.0, 0.5))])
def test_the_fastest_that_fits_is_found_with_few_predictions(
    total_gib: float, length: int, launch_seconds: float
) -> None:
    asked = question(total_gib, max_length=length, global_batch_size=96)
    predictor = Synthetic(launch_seconds=launch_seconds)
    plan = make_plan(asked, Predictions(predictor))
    made = len(predictor.jobs)
    assert plan.best is not None and plan.best.fits
    least, possible = brute_force(asked, predictor)
    assert plan.best.seconds_per_token <= least * 1.04
    assert plan.best.needed_bytes <= total_gib * GIB * (1 - MARGIN)
    assert made <= 30 < possible
    assert plan.best.setting.mixed_precision == "bf16"


@pytest.mark.parametrize(
    "total_gib", [4, 12.3, 14, *(pytest.param(gib, marks=pytest.mark.slow) for gib in (8, 11, 13))]
)
def test_of_the_ways_to_recompute_few_are_predicted_where_the_cheap_ones_do_not_fit(total_gib: float) -> None:
    asked = question(total_gib, max_length=65536)
    plan = make_plan(asked, Predictions(predictor := Synthetic(launch_seconds=0)))
    assert plan.best is not None and plan.best.setting.gradient_checkpointing != "none"
    assert plan.best.seconds_per_token == pytest.approx(brute_force(asked, Synthetic(launch_seconds=0))[0])
    at_least = [job for job in predictor.jobs if job.micro_batch_size == 1 and job.values["loss"] != "full"]
    assert len({str(job.values) for job in at_least}) < len(LADDER) - 2
    # Of a way that this model cannot take it is not known whether it would fit: those before it are tried.
    every = plan.best.setting.gradient_checkpointing_every_n_layers
    for refused in {8, 4, 3, 2} - {every}:
        again = Synthetic(launch_seconds=0, refused={"gradient_checkpointing_every_n_layers": refused})
        assert make_plan(asked, Predictions(again)).best == plan.best


def test_the_global_batch_is_kept() -> None:
    asked = question(24, global_batch_size=24)
    predictor = Synthetic()
    plan = make_plan(asked, Predictions(predictor))
    assert plan.best is not None
    assert {24 % job.micro_batch_size for job in predictor.jobs} == {0}
    for outcome in (plan.best, plan.smallest):
        optim = configured(asked, outcome.setting).optimization
        assert optim.global_batch_size == 24
        assert 24 % outcome.setting.micro_batch_size == 0
    by_accumulation = question(24, micro_batch_size=2, global_batch_size=None, gradient_accumulation_steps=6)
    optim = configured(by_accumulation, bf16_setting(4, "none", "full")).optimization
    assert (optim.global_batch_size, optim.gradient_accumulation_steps, optim.micro_batch_size) == (12, None, 4)


def test_a_configuration_that_is_as_fast_as_any_stays_as_it_is() -> None:
    asked = question(200, micro_batch_size=8, mixed_precision="bf16", loss="full")
    plan = make_plan(asked, Predictions(Synthetic(launch_seconds=0)))
    assert plan.best == plan.asked
    assert asked.changes(plan.best.setting) == {} if plan.best else False


def test_nothing_fits() -> None:
    predictor = Synthetic(fixed=2 * GIB)
    asked = question(3, max_length=262144)  # 21 kB a token: 5.1 GiB more than the fixed part
    plan = make_plan(asked, Predictions(predictor))
    assert plan.best is None
    assert plan.smallest.setting == bf16_setting(1, "full", "chunked", OFFLOAD)
    assert len(predictor.jobs) <= 12


def test_what_the_model_refuses_is_left_out() -> None:
    plan = make_plan(question(24), Predictions(Synthetic(refused={"loss": "chunked"})))
    assert plan.best is not None and plan.best.setting.loss == "full"
    plan = make_plan(question(24), Predictions(Synthetic(refused={"gradient_checkpointing": "full"})))
    assert plan.smallest.setting.gradient_checkpointing == "selective"
    with pytest.raises(UserError, match="bf16 does not work"):
        make_plan(question(24), Predictions(Synthetic(refused={"mixed_precision": "bf16"})))
    plan = make_plan(
        question(24, gradient_checkpointing="full"),
        Predictions(Synthetic(refused={"gradient_checkpointing": "full"})),
    )
    assert plan.asked is None and plan.problem is not None and "does not work" in plan.problem
    assert plan.best is not None


def test_ranks_are_sharded_only_where_it_is_worth_it() -> None:
    roomy = make_plan(question(80, world_size=4), Predictions(Synthetic(launch_seconds=0)))
    assert roomy.best is not None and roomy.best.setting.sharding == "ddp"
    predictor = Synthetic(fixed=40 * GIB, launch_seconds=0)
    tight = make_plan(question(24, world_size=4), Predictions(predictor))
    assert tight.best is not None and tight.best.setting.sharding == "fsdp2"
    assert len(predictor.jobs) <= 20
    only = replace(question(24, world_size=4), sharding="ddp")
    assert make_plan(only, Predictions(Synthetic(fixed=40 * GIB))).best is None


def test_offloads_only_where_nothing_else_fits() -> None:
    assert make_plan(question(24), Predictions(Synthetic())).best.setting.sharding == "none"  # type: ignore
    plan = make_plan(question(24), Predictions(Synthetic(fixed=40 * GIB)))
    best = plan.best
    assert best is not None and best.setting.sharding == OFFLOAD
    assert best.host_bytes == 16 * 10**8  # 4 weights, 4 gradients, 8 moments
    assert best.link_seconds == pytest.approx(12 * 10**8 / 20e9)
    tokens = best.setting.micro_batch_size * 8192
    assert best.seconds_per_token == pytest.approx((best.prediction.seconds + best.link_seconds) / tokens)
    typed = command(question(24), best.setting, [], question(24).config)
    assert "/fsdp2_offload.yaml --num_processes 1 --mixed_precision bf16 train/main.py" in typed
    asked = replace(question(24, world_size=2), sharding=OFFLOAD)
    both = make_plan(asked, Predictions(Synthetic(fixed=40 * GIB))).best
    assert both is not None and both.host_bytes == 8 * 10**8


def test_inputs_of_layers_go_to_the_host_only_where_nothing_else_fits() -> None:
    roomy = make_plan(question(24), Predictions(Synthetic(offloadable=15e3)))
    assert roomy.best is not None and not roomy.best.setting.gradient_checkpointing_offload
    predictor = Synthetic(offloadable=15e3, tileable=3e3)
    asked = question(6, max_length=262144)  # 21 kB a token: 5.5 GB beside the fixed part; 6 kB: 1.6
    plan = make_plan(asked, Predictions(predictor))
    best = plan.best
    assert best is not None and best.setting == bf16_setting(
        1, "full", "chunked", gradient_checkpointing_every_n_layers=1, gradient_checkpointing_offload=True
    )
    assert plan.smallest.setting == replace(best.setting, tiled_mlp=True)
    assert best.host_bytes == 15_000 * 262144
    copying, seconds = best.host_bytes / 20e9, best.prediction.seconds
    assert seconds / 4 > copying and best.link_seconds == 0.0  # the computation hides it
    assert len(predictor.jobs) <= 10
    typed = command(asked, best.setting, [], asked.config)
    assert "--gradient_checkpointing full --gradient_checkpointing_offload True" in typed
    assert "tiled" not in typed and "single_gpu.yaml" in typed
    on_cpu = replace(asked, device=Device("cpu", 6 * GIB))
    smallest = make_plan(on_cpu, Predictions(Synthetic(offloadable=15e3, tileable=3e3))).smallest.setting
    assert smallest.tiled_mlp and not smallest.gradient_checkpointing_offload
    only_then = make_plan(question(6, max_length=262144), Predictions(Synthetic(offloadable=15e3, fixed=9 * GIB)))
    assert only_then.best is not None and only_then.best.setting.sharding == OFFLOAD
    assert only_then.best.setting.gradient_checkpointing_offload is False


def test_copies_that_outlast_the_computation_are_waited_for() -> None:
    asked = question(24, gradient_checkpointing="full", gradient_checkpointing_offload=True, micro_batch_size=1)

    class Copying(Synthetic):
        def predict(self, job: Job) -> Prediction:
            assert job.values["gradient_checkpointing_offload"] is True
            return replace(super().predict(job), host_bytes_by_kind={"activations": 10**9}, seconds=0.04)

    outcome = predicted(asked, Predictions(Copying(offloadable=19e3, launch_seconds=0)))
    assert outcome.link_seconds == pytest.approx((0.05 - 0.01) + (0.05 - 0.03))
    assert outcome.host_bytes == 10**9


@pytest.mark.parametrize(("total_gib", "every"), [(6, 8), (5.6, 3), (5.3, 2)])
def test_only_as_many_layers_recompute_as_a_device_asks_for(total_gib: float, every: int) -> None:
    """None: 3.3 GB in addition to the fixed part; every eighth 3.0, third 2.6, second 2.3."""
    asked = question(total_gib, max_length=16384, global_batch_size=1)
    predictor = Synthetic(fixed=3 * GIB, launch_seconds=0)
    plan = make_plan(asked, Predictions(predictor))
    assert plan.best is not None and plan.best.setting == bf16_setting(
        1, "selective", "chunked", gradient_checkpointing_every_n_layers=every
    )
    typed = command(asked, plan.best.setting, [], asked.config)
    assert f"--gradient_checkpointing selective --gradient_checkpointing_every_n_layers {every}" in typed


def test_a_budget_is_room(total_gib: float = 24) -> None:
    assert question(total_gib, memory_budget_gib=10.0).room_bytes == int(10 * GIB * (1 - MARGIN))
    assert question(total_gib, memory_budget_gib=100.0).room_bytes == int(total_gib * GIB * (1 - MARGIN))


def test_optimizers_that_need_whole_weights_are_never_sharded() -> None:
    tight = Predictions(Synthetic(fixed=40 * GIB, launch_seconds=0))
    for flags in ({"optimizer": "adamw_8bit"}, {"optimizer": "adafactor"}, {"optimizer_offload": True}):
        assert make_plan(question(24, world_size=4, **flags), tight).best is None
        roomy = make_plan(question(80, world_size=4, **flags), tight).best
        assert roomy is not None and roomy.setting.sharding == "ddp"
        asked = replace(question(24, world_size=4, **flags), sharding="fsdp2")
        with pytest.raises(UserError, match=r"engine fsdp2 .*needs whole weights|needs whole weights, and fsdp2"):
            make_plan(asked, tight)


def test_offloaded_optimizer_state_is_in_host_memory() -> None:
    best = make_plan(question(24, optimizer_offload=True), Predictions(Synthetic())).best
    assert best is not None and best.host_bytes == 12 * 10**8  # fp32 weights and moments
    beside = make_plan(question(24), Predictions(Synthetic())).best
    assert beside is not None and beside.host_bytes == 0


def test_updates_in_backward_leave_nothing_to_accumulate() -> None:
    flags = {"optimizer_in_backward": True, "max_grad_norm": None, "global_batch_size": 4, "micro_batch_size": 4}
    predictor = Synthetic()
    plan = make_plan(question(5, **flags), Predictions(predictor))
    assert plan.best is not None and plan.best.setting.micro_batch_size == 4
    assert {job.micro_batch_size for job in predictor.jobs} == {4}
    assert plan.best.setting.gradient_checkpointing != "none"


@pytest.mark.parametrize("total_gib", [3, 8, 24, 80])
def test_longest_length(total_gib: float) -> None:
    predictor = Synthetic()
    predictions = Predictions(predictor)
    length, setting = longest_length(question(total_gib), predictions)
    assert setting == bf16_setting(1, "full", "chunked")
    expected = int((total_gib * GIB * (1 - MARGIN) - 2 * GIB) / 21e3) // 1024 * 1024
    assert length == expected
    assert len(predictions.known) <= 9


@pytest.mark.parametrize(
    ("changes", "may_grow"),
    [
        ({}, True),
        ({"max_position_embeddings": 4096}, False),  # as many as the model takes
        ({"sharding": "ddp", "world_size": 2}, False),  # asked for
    ],
)
def test_a_longest_length_that_weights_on_the_host_might_exceed_says_so(
    changes: dict[str, Any], may_grow: bool
) -> None:
    positions, predictions = changes.pop("max_position_embeddings", 10**6), Predictions(Synthetic())
    asked = replace(question(8, model_config={**LLAMA, "max_position_embeddings": positions}), **changes)
    found = replace_length(asked, longest_length(asked, predictions)[0])
    text = plan_text(found, make_plan(found, predictions, is_open=True), None, longest=True)
    assert text.splitlines()[0].startswith("Longest that fits on ")
    assert ("--sharding fsdp2_offload may fit more" in text.splitlines()[0]) == may_grow
    assert ("The model takes no more." in text.splitlines()[0]) == (positions == 4096)


def test_longest_length_may_be_on_the_host_where_nothing_can_be_recomputed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the extra activations."""
    kept = {name: value for name, value in to_values(question().config).items() if "checkpointing" not in name}
    asked, predictions = question(), Predictions(Synthetic())
    monkeypatch.setattr("train.memory.question.to_values", lambda config: kept)
    stages = asked.stages
    monkeypatch.undo()
    monkeypatch.setattr(Question, "stages", stages)
    for total_gib, sharding in ((80, "none"), (1, OFFLOAD)):
        length, setting = longest_length(question(total_gib), predictions)
        assert length > 0 and setting.sharding == sharding


def test_longest_length_ends_at_the_tokens_of_a_micro_batch() -> None:
    asked = question(80, max_length=1024, max_tokens_per_micro_batch=4096)
    assert longest_length(asked, Predictions(Synthetic()))[0] == 4096


def test_longest_length_ends_at_the_models_positions() -> None:
    asked = question(80, model_config={**LLAMA, "max_position_embeddings": 5000}, max_length=2048)
    assert longest_length(asked, Predictions(Synthetic()))[0] == 4096
    assert longest_length(question(0.1), Predictions(Synthetic()))[0] == 0
    short = {**LLAMA, "max_position_embeddings": 512}
    for total_gib, longest in ((80, 512), (0.1, 0)):
        asked = question(total_gib, model_config=short, max_length=256)
        assert longest_length(asked, Predictions(Synthetic()))[0] == longest


@pytest.mark.parametrize(("model_type", "usable"), [("roberta", 512), ("mpnet", 512), ("bert", 514)])
@pytest.mark.parametrize("is_stored", [False, True])
def test_positions_that_a_model_never_uses_are_not_planned(
    model_type: str, usable: int, is_stored: bool, tmp_path: Path
) -> None:
    """RoBERTa's family counts from the padding token on, so the first rows of its table are never used."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 514}
    asked = question(model_config={"model_type": model_type, **sizes}, task="masked_lm", max_length=256)
    if is_stored:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, **sizes}))
        asked = replace(asked, config=asked.config.changed(model=str(tmp_path), model_config=None))
    assert longest_length(asked, Predictions(Synthetic()))[0] == usable
    assert lengths_of(make_grid(asked, Predictions(Synthetic()), None, [1])) == [usable]


def test_a_model_without_a_limit_on_positions_is_planned_as_long_as_fits(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "xlnet"}')  # of whose limit transformers says −1
    asked = question()
    asked = replace(asked, config=asked.config.changed(model=str(tmp_path), model_config=None))
    assert position_limit(asked.config) is None
    assert longest_length(asked, Predictions(Synthetic()))[0] > 8192


def test_where_nothing_else_fits_the_longest_is_that_with_offloaded_weights() -> None:
    asked = question(24)
    length, setting = longest_length(asked, Predictions(Synthetic(fixed=100 * GIB)))  # of these 5 on the card
    assert setting.sharding == OFFLOAD
    assert length == int((24 * GIB * (1 - MARGIN) - 5 * GIB) / 21e3) // 1024 * 1024
    plan = make_plan(replace_length(asked, length), Predictions(Synthetic(fixed=100 * GIB)), is_open=True)
    assert plan.best is not None and plan.best.setting.sharding == OFFLOAD
    sharded = replace(asked, sharding="ddp", world_size=2)
    assert longest_length(sharded, Predictions(Synthetic(fixed=100 * GIB)))[0] == 0


@pytest.mark.parametrize("power", [1.0, 2.0, 0.5])
@pytest.mark.parametrize("room", [0, 10, 1000, 5000, 10**9])
def test_largest_fitting_is_exact_whatever_the_curve(power: float, room: int) -> None:
    candidates = range(1, 2000)
    tried = []

    def needs(size: int) -> int:
        tried.append(size)
        return int(3 * size**power) + 7

    expected = max((size for size in candidates if int(3 * size**power) + 7 <= room), default=None)
    assert largest_fitting(candidates, needs, room, 1) == expected
    assert len(tried) == len(set(tried)) <= 22


def test_each_job_is_predicted_once() -> None:
    predictor, said = Synthetic(), list[str]()
    predictions = Predictions(predictor, say=said.append)
    asked = question()
    jobs = [asked.job(bf16_setting(size, "none", "full")) for size in (1, 2, 4, 8)]
    found = [predictions.ask(job, "loss full").result().peak_bytes for job in [*jobs, jobs[0]]]
    assert found == [Synthetic().predict(job).peak_bytes for job in [*jobs, jobs[0]]]
    assert len(predictor.jobs) == len(predictions.known) == 4
    assert said == [f"predicting ({n}): {2 ** (n - 1)} × 8,192 tokens, loss full" for n in (1, 2, 3, 4)]


def test_each_line_of_progress_says_what_is_tried() -> None:
    said = list[str]()
    make_plan(question(24, world_size=2), Predictions(Synthetic(), say=said.append))
    assert said[0] == "predicting (1): 1 × 8,192 tokens, checkpointing none, precision bf16, loss chunked, ddp"
    assert len(set(said)) == len(said) >= 5


# ---- from configuration and device to job ----------------------------------------------------------------------------


OF_TOKENS = ((-1,), "int64")
TASKS = """
import torch

from train import tasks
from train.tasks import causal_lm


class Shares(tasks.Task):
    example_columns = ("tokens", "share", "length")

    def cut(self, text, ids, label, tokenizer):
        yield {"tokens": self.framed(ids[: self.room(tokenizer)], tokenizer), "share": 0.5}

    def inputs_and_labels(self, example, seed):
        return torch.tensor(example["tokens"]), torch.tensor([example["share"]] * 3)


class Pairs(causal_lm.Task):
    def longest_example(self):
        return {"tokens": [1] * (self.data.max_length // 2 + 1)}

    def collate(self, examples, seed, pad_id):
        batch = super().collate([*examples, *examples], seed, pad_id)
        batch.inputs["is_chosen"] = torch.arange(len(batch.labels)) < len(examples)
        return batch


class OfTexts(causal_lm.Task):
    def cut(self, text, ids, label, tokenizer):
        raise LookupError("a document without words")
"""


@pytest.mark.parametrize(
    ("task", "shape", "tensors"),
    [
        ("causal_lm", (4, 8192), {"input_ids": OF_TOKENS, "labels": OF_TOKENS}),
        ("masked_lm", (4, 8192), {"input_ids": OF_TOKENS, "labels": OF_TOKENS}),
        ("sequence_classification", (4, 8192), {"input_ids": OF_TOKENS, "labels": ((), "int64")}),
        ("Shares", (4, 8192), {"input_ids": OF_TOKENS, "labels": ((3,), "float32")}),
        ("Pairs", (8, 4096), {"input_ids": OF_TOKENS, "labels": OF_TOKENS, "is_chosen": ((), "bool")}),
        ("OfTexts", (4, 8192), {"input_ids": OF_TOKENS, "labels": OF_TOKENS}),
    ],
)
def test_a_plan_knows_the_batch_that_a_task_makes(
    task: str, shape: tuple[int, int], tensors: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "my_tasks.py").write_text(TASKS)
    spec = task if task.islower() else f"{tmp_path / 'my_tasks.py'}:{task}"
    job = job_of(question(task=spec, micro_batch_size=4).config, Target("cpu"), 8000, num_labels=2)
    assert ((job.micro_batch_size, job.length), job.tensors) == (shape, tensors)
    assert job.eval_batch_size == shape[0]


def test_job_of_a_configuration() -> None:
    config = question(micro_batch_size=4).config
    job = job_of(config, Target("cpu"), 8000)
    assert (job.micro_batch_size, job.length, job.accumulates, job.padded) == (4, 8192, True, False)
    assert (job.values["task"], job.eval_batch_size, job.num_labels) == ("causal_lm", 4, 0)
    masked = question(task="masked_lm", micro_batch_size=32, eval_batch_size=2).config
    job = job_of(masked, Target("cpu"), 8000)
    assert (job.padded, job.accumulates, job.eval_batch_size) == (True, False, 2)
    assert job.num_targets == math.ceil(0.15 * job.micro_batch_size * job.length)
    assert not job_of(question(task="masked_lm").config, Target("cpu"), 8000).padded
    job = job_of(question(micro_batch_size=8).config, Target("cpu"), 8000, 0, 4)
    assert (job.accumulates, job.world_size) == (False, 4)
    sharded = replace(question(micro_batch_size=8, world_size=4), sharding="fsdp2")
    assert sharded.job(sharded.asked).sharding == "fsdp2"
    with pytest.raises(UsageError, match="multiple"):
        job_of(question(micro_batch_size=5).config, Target("cpu"), 8000)
    with pytest.raises(UsageError, match="task"):
        job_of(question(task="poetry").config, Target("cpu"), 8000)


def test_target_of_a_device() -> None:
    hopper = target_of(Device("h100", 80 * GIB, 0, (9, 0), 3e12))
    assert hopper.prefers_cudnn and hopper.flops_per_second["bf16"] == pytest.approx(989.4e12)
    assert not target_of(Device("a100-80", 80 * GIB, 0, (8, 0), 2e12)).prefers_cudnn
    assert "bf16" not in target_of(Device("t4", 14 * GIB, 0, (7, 5), 3e11)).flops_per_second
    unknown = target_of(Device("24GiB", 24 * GIB))
    assert unknown == target_of(find_device("a100-80"))  # whose rates rank settings
    assert target_of(Device("cpu", 8 * GIB)) == Target("cpu")


@pytest.mark.parametrize(
    ("device", "capability", "changes", "precision"),
    [
        ("a100-80", (8, 0), {}, "bf16"),
        ("t4", (7, 5), {}, "fp16"),
        ("t4", (7, 5), {"mixed_precision": "bf16"}, "fp16"),
        ("a100-80", (8, 0), {"mixed_precision": "fp16"}, "fp16"),
        ("a100-80", (8, 0), {"mixed_precision": "no"}, "no"),
        ("a100-80", (8, 0), {"dtype": "bfloat16"}, None),
        ("cpu", None, {}, None),
        (
            "t4",
            (7, 5),
            {"optimizer_in_backward": True, "max_grad_norm": None, "global_batch_size": 1, "micro_batch_size": 1},
            "no",
        ),
    ],
)
def test_precision(device: str, capability: Any, changes: dict[str, Any], precision: str | None) -> None:
    asked = replace(question(24, **changes), device=Device(device, 8 * GIB, 0, capability, 1e12))
    assert asked.precision(asked.shardings[0]) == precision
    # the configuration as it stands is predicted as a run of it would compute
    assert asked.asked.mixed_precision == (changes.get("mixed_precision") or precision)


@pytest.mark.parametrize("precision", [None, "no", "fp16", "bf16"])
def test_weights_in_bf16_are_not_planned_on_a_card_without_it(precision: str | None) -> None:
    """A run there refuses them."""
    asked = replace(
        question(2, dtype="bfloat16", mixed_precision=precision), device=Device("t4", 2 * GIB, 0, (7, 5), 3e11)
    )
    with pytest.raises(UsageError, match=r"^dtype: t4 has no bf16. Use float32 with mixed_precision: fp16"):
        make_plan(asked, Predictions(Synthetic()))
    with pytest.raises(UsageError, match=r"^dtype: t4 has no bf16"):
        predicted(asked, Predictions(Synthetic()))


def test_a_card_without_bf16_computes_in_fp32_where_weights_are_on_the_host() -> None:
    """Because fp16's loss scaler cannot be used there; a run would say the same."""
    asked = replace(question(2), device=Device("t4", 2 * GIB, 0, (7, 5), 3e11))
    assert asked.precision("fsdp2") == "fp16" and asked.precision(OFFLOAD) == "no"
    best = make_plan(asked, Predictions(Synthetic(fixed=10 * GIB))).best
    assert best is not None and (best.setting.sharding, best.setting.mixed_precision) == (OFFLOAD, "no")
    given = replace(asked, config=asked.config.changed(mixed_precision="fp16"))
    with pytest.raises(UsageError, match="fsdp_offload_params"):
        given.job(replace(given.asked, sharding=OFFLOAD))


def test_vocabulary_without_data(tmp_path: Path) -> None:
    small = {k: v for k, v in LLAMA.items() if k != "vocab_size"}
    assert vocabulary_size(question().config) == 8000
    assert vocabulary_size(question(model_config=small).config) == 259
    assert vocabulary_size(question(model_config=small, tokenizer="train:5000").config) == 5000
    with pytest.raises(UsageError, match="--vocab_size"):
        vocabulary_size(question(model_config=small, tokenizer="words").config)
    with pytest.raises(UserError, match="--vocab_size"):
        vocabulary_size(question(model_config=small, tokenizer=str(tmp_path)).config)
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "vocab_size": 1234, "max_position_embeddings": 777}))
    stored = replace(question().config.architecture, model=str(tmp_path), model_config=None)
    config = replace(question().config, architecture=stored)
    assert vocabulary_size(config) == 1234 and position_limit(config) == 777
    missing = replace(config, architecture=replace(stored, model=str(tmp_path / "nothing")))
    with pytest.raises(UserError, match="no such folder"):
        vocabulary_size(missing)


def test_position_limit_of_an_architecture() -> None:
    assert position_limit(question().config) is None
    gpt2 = {"model_type": "gpt2", "n_positions": 512}
    assert position_limit(question(model_config=gpt2, max_length=64).config) == 512


# ---- what to type ----------------------------------------------------------------------------------------------------


def test_the_command_parses_to_the_setting_it_is_for() -> None:
    words = [
        "--model_config",
        json.dumps(LLAMA),
        "--tokenizer=bytes",
        "--micro_batch_size",
        "2",
        "--max_length",
        "4096",
    ]
    words += ["--gradient_accumulation_steps", "4", "--gradient_checkpointing=full", "--metrics", "a", "b"]
    words += ["--gradient_checkpointing_every_n_layers", "2"]
    asked = replace(question(), config=parse(words))
    setting = bf16_setting(8, "none", "full")
    typed = shlex.split(command(replace_length(asked, 2048), setting, words, asked.config))
    launcher = ["--config_file", "accelerate_configs/single_gpu.yaml", "--mixed_precision", "bf16"]
    assert typed[:7] == ["accelerate", "launch", *launcher, "train/main.py"]
    config = parse(typed[7:])
    wanted = configured(asked, setting)
    by_launcher = replace(wanted.optimization, mixed_precision=None)
    assert config == replace(wanted, data=replace(asked.config.data, max_length=2048), optimization=by_launcher)
    assert config.optimization.global_batch_size == 8 and config.get("metrics") == ("a", "b")
    assert command(asked, asked.asked, words, asked.config).endswith(shlex.join(words))


def test_launchers() -> None:
    assert launcher_words(True, 1, "none", "fp16") == ["--config_file", "accelerate_configs/cpu.yaml"]
    for sharding in ("ddp", "fsdp2"):
        file = ["--config_file", f"accelerate_configs/{sharding}.yaml"]
        assert launcher_words(False, 8, sharding, "bf16") == [*file, "--mixed_precision", "bf16"]
        assert launcher_words(True, 2, sharding, "no") == [*file, "--num_processes", "2"]


def test_a_recipe_that_chooses_the_precision_goes_on_doing_so() -> None:
    asked = question(200, mixed_precision="fp16")
    typed = shlex.split(command(asked, bf16_setting(1, "none", "full"), [], asked.config))
    assert typed.count("--mixed_precision") == 2  # launcher and training configuration have to agree
    assert [typed[i + 1] for i, word in enumerate(typed) if word == "--mixed_precision"] == ["bf16", "bf16"]


# ---- grid ------------------------------------------------------------------------------------------------------------


def test_grid_has_the_memory_of_each_cell() -> None:
    predictor = Synthetic()
    asked = question(16)
    grid = make_grid(asked, Predictions(predictor), [1024, 4096, 16384, 65536], [1, 2, 4, 8, 16])
    assert lengths_of(grid) == [1024, 4096, 16384, 65536]
    for row in grid:
        assert [cell.job.micro_batch_size for cell in row] == [1, 2, 4, 8, 16]
        for cell in row:
            true = int(2 * GIB + 201e3 * cell.job.length * cell.job.micro_batch_size)
            assert cell.needed_bytes == true and cell.fits == (true <= asked.room_bytes)
    assert {job.accumulates for job in predictor.jobs} == {True}


def test_cells_are_predicted_by_several_predictors_at_a_time() -> None:
    both_at_work = threading.Barrier(2, timeout=60)

    class Meeting(Synthetic):
        def predict(self, job: Job) -> Prediction:
            both_at_work.wait()  # for ever, if one waited for the other to end
            return super().predict(job)

    one, other = Meeting(), Meeting()
    grid = make_grid(question(16), Predictions(one, other), None, [1, 2, 4, 8])
    assert grid == make_grid(question(16), Predictions(Synthetic()), None, [1, 2, 4, 8])
    assert len(one.jobs) + len(other.jobs) == len({str(job) for job in one.jobs + other.jobs}) == 4 * len(grid) > 20


def test_after_an_error_the_cells_that_are_not_begun_are_dropped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made, begun, may_end = list[Synthetic](), list[threading.Thread](), threading.Event()

    class Waiting(Synthetic):
        def __init__(self) -> None:
            super().__init__(refused={"micro_batch_size": 2})
            made.append(self)

        def predict(self, job: Job) -> Prediction:
            begun.append(threading.current_thread())
            if job.micro_batch_size > 2:
                may_end.wait(60)
            return super().predict(job)

    monkeypatch.setattr("train.memory.__main__.Predictor", Waiting)
    monkeypatch.setattr("train.memory.__main__.num_cores", lambda: 3)
    words = ["plan", "--device", "l4", "--grid", "--model_config", json.dumps(LLAMA), "--tokenizer", "bytes"]
    assert main([*words, "--lengths", "1,1024,2048", "--micro_batch_sizes", "1,2,4,8,16,32"]) == 1
    may_end.set()
    for thread in set(begun):
        thread.join(60)
    assert "error: 2 × 1 tokens: micro_batch_size: 2 does not work" in capsys.readouterr().err
    assert len(made) == 3 and 2 <= len(begun) <= 5  # of 18
    monkeypatch.setattr("train.memory.__main__.num_cores", lambda: 64)
    assert main([*words, "--lengths", "1024", "--micro_batch_sizes", "1"]) == 0
    assert len(made) == 3 + 4


def test_default_lengths_end_where_nothing_fits_or_at_the_models_positions() -> None:
    grid = make_grid(question(16), Predictions(Synthetic()), None, None)
    assert lengths_of(grid)[0] == 1024 and not grid[-1][0].fits and grid[-2][0].fits
    short = question(16, model_config={**LLAMA, "max_position_embeddings": 3000}, max_length=1024)
    assert lengths_of(make_grid(short, Predictions(Synthetic()), None, [1])) == [1024, 2048]
    with pytest.raises(UserError, match="1 × 4,096 tokens: loss: full"):
        make_grid(question(loss="full"), Predictions(Synthetic(refused={"loss": "full"})), [4096], [1])


def test_grid_text() -> None:
    grid = make_grid(question(16), Predictions(Synthetic()), [1024, 16384, 131072], [1, 2, 3, 4, 5, 6, 8, 16])
    lines = grid_text(question(16), grid).splitlines()
    assert lines[0] == "llama, 100M parameters, on a100-80 (16.00 GiB)"
    assert "checkpointing none" in lines[1] and "global" not in lines[1]
    rows = [line for line in lines if line.strip().startswith("16,384")]
    assert rows[0].split()[:5] == ["16,384", "5.07", "8.13", "11.20", "14.27"]
    assert rows[0].split()[5:] == ["17.34", "no", "20.40", "no", "26.54", "no", "51.07", "no"]


@pytest.mark.slow
def test_the_picture_is_drawn(tmp_path: Path) -> None:
    from matplotlib.image import imread

    grid = make_grid(question(16), Predictions(Synthetic()), None, None)
    path = tmp_path / "grid.png"
    draw(question(16), grid, path)
    pixels = np.asarray(imread(path))[..., :3]
    assert pixels.shape[0] > 300 and pixels.shape[1] > 600
    assert pixels.std() > 0.1
    red = (pixels[..., 0] > 0.6) & (pixels[..., 1] < 0.15) & (pixels[..., 2] < 0.15)
    assert red.sum() > 200  # of what does not fit
    with pytest.raises(UserError, match="--picture"):
        draw(question(16), grid, tmp_path / "nowhere" / "grid.png")


def test_the_loss_without_all_logits_is_the_one_asked_for_or_the_best_that_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from train.extras.losses import fused

    monkeypatch.setattr(fused, "find_spec", lambda name: None)
    assert question().losses == ("full", "chunked") and question().automatic_loss == "chunked"
    assert question(loss="liger").losses == ("full", "liger") and question(loss="liger").asked.loss == "liger"
    assert replace(question(), num_labels=3).losses == ("full",)
    monkeypatch.setattr(fused, "_is_installed", lambda kernel: True)
    assert question().losses == ("full", "cce") and question().asked.loss == "cce"
    assert "loss" not in question().changes(bf16_setting(1, "none", "cce"))
    assert question(z_loss=1e-4).losses == ("full", "liger")
    assert replace(question(), device=Device("cpu", GIB, 0)).losses == ("full", "chunked")


def test_a_length_within_the_models_positions_is_run_without_scaling_them(capsys: pytest.CaptureFixture[str]) -> None:
    """A run would refuse to scale them; the command that the plan prints has to be one that runs."""
    from train.memory import __main__ as program

    model = json.dumps({**LLAMA, "max_position_embeddings": 4096})
    words = ["--model_config", model, "--tokenizer", "bytes", "--rope_scaling", "yarn", "--max_length", "auto"]
    with patch.object(program, "Predictor", lambda: nullcontext(Synthetic(fixed=0.22 * GIB))):
        for gib, scaling in ((0.9, "none"), (2, "yarn")):
            assert program.main(["plan", *words, "--device", f"{gib}GiB", "--json"]) == EXIT_DONE
            found = json.loads(capsys.readouterr().out)
            assert (found["max_length"] <= 4096) is (scaling == "none"), found["max_length"]
            typed = shlex.split(found["command"])
            config = parse(typed[typed.index("train/main.py") + 1 :])
            assert (config.get("rope_scaling"), config.data.max_length) == (scaling, found["max_length"])


def test_no_ratio_of_speeds_is_told_of_a_cpu() -> None:
    """Whose rates only rank; that of a card is estimated."""
    card = question(80, gradient_checkpointing="full")
    for device, is_told in ((card.device, True), (Device("cpu", 80 * GIB), False)):
        asked = replace(card, device=device)
        text = plan_text(asked, make_plan(asked, Predictions(Synthetic())), "the command")
        assert "Fastest that fits" in text and ("× the speed of the above" in text) is is_told
