"""The whole program on a CUDA card that is not there (``tests/emulated``): numbers, waits, and what may run out."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from emulated.card import RaceError, Refusal, Settings
from emulated.device import install, run_main
from faults import processes
from safetensors.torch import load_file
from support import checkpoint_digests, final_files, sampled, write_recipe
from torch import Tensor

from train.figures import read_metrics
from train.records import EXIT_DONE, EXIT_ERROR

T4 = Settings(capability=(7, 5))
OFFLOAD = ("--gradient_checkpointing", "full", "--gradient_checkpointing_offload", "true")
HOST_UPDATES = ("--optimizer_offload", "true")
KINDS: dict[str, tuple[Any, ...]] = {
    "full": ("--gradient_checkpointing", "full"),
    "every second": ("--gradient_checkpointing", "full", "--gradient_checkpointing_every_n_layers", 2),
    "selective": ("--gradient_checkpointing", "selective"),
    "offload": OFFLOAD,
    "host updates": HOST_UPDATES,
    "all": (*OFFLOAD, *HOST_UPDATES),
}
ONE_PASS = ("--global_batch_size", 2, "--max_grad_norm", "None", "--max_steps", 4, "--num_epochs", "None")
NO_DROPOUT = {"model_type": "gpt2", "n_embd": 16, "n_layer": 2, "n_head": 2, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
PIECES_REPEAT = ("--model_config", json.dumps({**NO_DROPOUT, "attn_pdrop": 0.0}))
"""A step that is made again in pieces draws other dropout."""
ON_CARD = {"ACCELERATE_USE_CPU": "false"}


@dataclass(frozen=True)
class Ran:
    """A run that has ended."""

    status: int | None
    said: str
    output: Path
    seen: dict[str, Any]  # by the card

    @property
    def log(self) -> dict[int, dict[str, Any]]:
        return {row["step"]: row for row in read_metrics(self.output / "metrics.jsonl") if row["kind"] == "train"}

    @property
    def summary(self) -> dict[str, Any]:
        return json.loads((self.output / "summary.json").read_text())

    @property
    def weights(self) -> dict[str, Tensor]:
        return load_file(self.output / "final" / "model.safetensors")


Train = Callable[..., Ran]


def offload_small_tensors() -> None:
    from train.extras.activations import recompute

    recompute.MIN_OFFLOADED_BYTES, recompute.PIECE_BYTES = 0, 1024


@pytest.fixture
def train(tmp_path: Path) -> Train:
    """Trains for one epoch, of 3 steps, on the card or on the plain CPU."""
    recipe, common = write_recipe(tmp_path), {"HF_HUB_OFFLINE": "1"}

    def run(
        name: str,
        *flags: Any,
        settings: Settings | None = Settings(),  # noqa: B008
        before: Callable[[], None] | None = offload_small_tensors,
        ends: int | None = EXIT_DONE,
    ) -> Ran:
        own = ("--num_epochs", 1, "--rehearse", "false", *flags)
        arguments = ["--config", str(recipe), "--output_dir", str(tmp_path / name), *map(str, own)]
        report = tmp_path / f"{name}.json"
        if settings is None:
            [ended] = processes.run(arguments, tmp_path / "logs", environment=common)
        else:
            work = partial(run_main, arguments, settings, report, before)
            environment = {**common, **ON_CARD}
            [ended] = processes.start_work(work, tmp_path / "logs", 1, environment).end()
        seen = json.loads(report.read_text()) if report.exists() else {}
        assert ends in (ended.status, None), ended.said
        return Ran(ended.status, ended.said, tmp_path / name, seen)

    return run


def assert_equal(one: Ran, other: Ran, tolerance: float = 0.0) -> None:
    """The same losses and weights; norms of gradients are sums whose order is open."""
    assert one.log.keys() == other.log.keys()
    for step, row in one.log.items():
        assert row["loss"] == pytest.approx(other.log[step]["loss"], rel=tolerance, abs=0)
        assert row["grad_norm"] == pytest.approx(other.log[step]["grad_norm"], rel=max(tolerance, 1e-6))
    for name, weight in one.weights.items():
        torch.testing.assert_close(weight, other.weights[name], rtol=tolerance, atol=10 * tolerance)


# The card itself


def _probe(rank: int) -> int:
    """What would be wrong on a card is wrong on this one."""
    install(Settings(memory_bytes=2**20, pinned_bytes=2**16))
    there, here = torch.ones(8, device="cuda"), torch.ones(8)
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        there + here
    assert (there + torch.tensor(1.0)).tolist() == [2.0] * 8
    with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 1\.00 MiB"):
        torch.empty(2**20, dtype=torch.uint8, device="cuda")
    assert torch.cuda.memory_allocated() == 512
    with pytest.raises(RuntimeError, match="out of memory"):
        torch.empty(2**17, dtype=torch.uint8).pin_memory()

    landing = torch.zeros(8).pin_memory()
    landing.copy_(there, non_blocking=True)
    there.zero_()  # later than the copy
    assert landing.tolist() == [0.0] * 8  # nobody has waited
    torch.cuda.synchronize()
    assert landing.tolist() == [1.0] * 8
    there.copy_(landing, non_blocking=True)
    assert there.sum().item() == 8.0  # in order

    stream, there = torch.cuda.Stream(), there + 1
    with torch.cuda.stream(stream), pytest.raises(RaceError, match="reads memory before it has waited"):
        landing.copy_(there, non_blocking=True)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        there.copy_(landing, non_blocking=True)
    with pytest.raises(RaceError, match="has not been waited for"):
        there.sum()
    torch.cuda.current_stream().wait_stream(stream)
    assert there.sum().item() == 8.0
    with torch.cuda.stream(stream):
        stream.wait_stream(torch.cuda.default_stream())
        landing.copy_(there, non_blocking=True)
    del there
    with pytest.raises(RaceError, match="freed before it was waited for"):
        stream.synchronize()
    return 0


def test_the_card_is_as_strict_as_one(tmp_path: Path) -> None:
    processes.in_ranks(_probe, tmp_path, {}, ranks=1)


def _no_wait_for_computing() -> None:
    offload_small_tensors()
    from emulated.streams import Stream

    Stream.wait_stream = lambda self, other: None


def _no_wait_for_gradients() -> None:
    from train.extras.optimizers.offload import Link

    Link.arrived = lambda self, slot: self._slots[slot][0]


def _no_wait_for_weights() -> None:
    from train.extras.optimizers.offload import Link

    Link.finish = lambda self: None


def _no_wait_for_inputs() -> None:
    offload_small_tensors()
    from train.extras.host_memory import StreamTransfers

    StreamTransfers.wait = lambda self, event: None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "flags"),
    [
        (_no_wait_for_computing, HOST_UPDATES),
        (_no_wait_for_computing, OFFLOAD),
        (_no_wait_for_weights, HOST_UPDATES),
        (_no_wait_for_inputs, OFFLOAD),
    ],
)
def test_a_missing_wait_ends_the_run(train: Train, before: Callable[[], None], flags: tuple[str, ...]) -> None:
    ran = train("run", *flags, before=before, ends=70)
    assert len(ran.seen["races"]) == 1 and "RaceError" in ran.said


@pytest.mark.slow
def test_a_gradient_that_nobody_waits_for_is_seen_in_the_weights(train: Train) -> None:
    right = train("right", *HOST_UPDATES)
    wrong = train("wrong", *HOST_UPDATES, before=_no_wait_for_gradients, ends=None)
    assert wrong.status != EXIT_DONE or not all(
        torch.equal(weight, wrong.weights[name]) for name, weight in right.weights.items()
    )


# Numbers


def test_card_computes_what_the_cpu_does_with_everything_kept_on_the_host(train: Train) -> None:
    on_cpu = train("cpu", "--mixed_precision", "no", settings=None)
    ran = train("card", "--mixed_precision", "no", *KINDS["all"], "--rehearse", "true")
    assert_equal(ran, on_cpu, 1e-6)
    assert ran.seen["on_other_streams"] > 300 and ran.seen["attention"] == ["efficient"]
    assert {"float32"} == ran.seen["dtypes"].keys()


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
def test_nothing_that_saves_memory_changes_a_number(train: Train, precision: str) -> None:
    on_cpu = train("cpu", "--mixed_precision", "no", settings=None)
    plain = train("plain", "--mixed_precision", precision)
    assert_equal(plain, on_cpu, {"no": 1e-6, "bf16": 0.01, "fp16": 0.01}[precision])
    assert (plain.log[1]["loss_scale"] is not None) == (precision == "fp16")
    assert {"no": "float32", "bf16": "bfloat16", "fp16": "float16"}[precision] in plain.seen["dtypes"]
    for name, flags in sampled(KINDS.items(), 2 if precision == "no" else 5):
        ran = train(name, "--mixed_precision", precision, *flags)
        assert_equal(ran, plain)
        if name != "every second":
            assert ran.seen["peak_bytes"] < 0.95 * plain.seen["peak_bytes"], name


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_updates_in_backward_are_those_after_it(train: Train, precision: str) -> None:
    common = ("--mixed_precision", precision, *ONE_PASS)
    after = train("after", *common)
    for name, flags in {"alone": (), **KINDS}.items():
        if name in ("alone", "host updates", "all"):
            assert_equal(train(name, *common, "--optimizer_in_backward", "true", *flags), after)


@pytest.mark.slow
def test_a_bare_launch_takes_bf16_and_on_a_card_without_it_fp16(train: Train) -> None:
    bare, old = train("bare"), train("old", settings=T4)
    assert "precision: bf16, because none was asked for" in bare.said and bare.seen["attention"] == ["flash"]
    assert "precision: fp16, because none was asked for" in old.said and old.seen["attention"] == ["efficient"]
    assert (bare.log[1]["loss_scale"], old.log[1]["loss_scale"]) == (None, 65536.0)


@pytest.mark.slow
def test_heads_that_are_shared_never_need_all_scores(train: Train) -> None:
    llama = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    flags = ("--model_config", json.dumps({**llama, "num_attention_heads": 4, "num_key_value_heads": 2}))
    on_cpu = train("cpu", *flags, "--mixed_precision", "no", settings=None)
    ran = train("card", *flags, "--mixed_precision", "no")
    assert ran.seen["attention"] == ["efficient"]
    assert_equal(ran, on_cpu, 1e-6)
    assert train("bf16", *flags).seen["attention"] == ["flash"]
    assert train("old", *flags, settings=T4).seen["attention"] == ["efficient"]


@pytest.mark.slow
@pytest.mark.parametrize("window", sampled([16, None], 2))
def test_documents_that_share_a_row_are_attended_to_at_once(train: Train, window: int | None) -> None:
    mistral = {"model_type": "mistral", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    mistral |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": window}
    flags = ("--model_config", json.dumps(mistral), "--packing", "true", "--learning_rate", 1e-3)
    on_cpu = train("cpu", *flags, "--mixed_precision", "no", settings=None)
    plain = train("plain", *flags, "--mixed_precision", "bf16")
    assert_equal(plain, on_cpu, 0.02)
    assert plain.seen["attention"] == ["flash over lengths"]
    for name in ("full", "selective", "all"):
        assert_equal(train(name, *flags, "--mixed_precision", "bf16", *KINDS[name]), plain)


# Stopped and resumed


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_resume_is_exact(train: Train, precision: str) -> None:
    flags = ("--mixed_precision", precision, *KINDS["all"], "--lr_scheduler", "constant", "--num_epochs", "None")
    whole = train("whole", *flags, "--max_steps", 4)
    train("pieces", *flags, "--max_steps", 1)
    pieces = train("pieces", *flags, "--max_steps", 4)
    assert checkpoint_digests(pieces.output, 4) == checkpoint_digests(whole.output, 4)
    assert final_files(pieces.output) == final_files(whole.output)


@pytest.mark.slow
def test_checkpoints_written_in_the_background_hold_the_step_that_they_are_of(train: Train) -> None:
    saving = ("--save_every_steps", 1, "--save_total_limit", 9)
    waited = train("waited", *saving, "--save_in_background", "false")
    ran = train("behind", *saving)
    assert ran.summary["checkpoints_in_background"] == 2
    for step in (1, 2, 3):
        assert checkpoint_digests(ran.output, step) == checkpoint_digests(waited.output, step)
    files = (ran.output / "checkpoints" / "step-00000001").glob("*.safetensors")
    size = sum(tensor.nbytes for path in files for tensor in load_file(path).values())
    buffer = ran.seen["peak_pinned_bytes"] - waited.seen["peak_pinned_bytes"]
    assert size <= buffer < 1.05 * size  # one, used again


# Memory that is full


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["no", "fp16"])
def test_a_step_that_ran_out_of_memory_is_made_again(train: Train, precision: str) -> None:
    flags = ("--mixed_precision", precision, *PIECES_REPEAT)
    plain = train("plain", *flags)
    pieces = {"no": 1e-5, "fp16": 0.01}[precision]
    for phase in ("forward", "backward"):
        ran = train(phase, *flags, settings=Settings(refusals=(Refusal(phase, 2, 5),)))
        assert ran.seen["out_of_memory"] == {phase: 1} and ran.summary["oom_recoveries"] == 1
        assert f"out of memory in {phase}" in ran.said
        assert_equal(ran, plain, pieces)


@pytest.mark.slow
def test_nothing_is_allocated_after_the_update(train: Train) -> None:
    """Else memory could run out where a step can neither be repeated nor be taken back."""
    settings = Settings(refusals=(Refusal("optimizer", 2, 1, 1000),))
    ran = train("run", "--mixed_precision", "bf16", settings=settings)
    assert ran.seen["out_of_memory"] == {}


@pytest.mark.slow
def test_a_card_too_small_for_the_micro_batch_trains_in_halves(train: Train) -> None:
    flags = ("--mixed_precision", "no", *PIECES_REPEAT)
    plain = train("plain", *flags)
    limit = plain.seen["peak_bytes"] - 2**14
    ran = train("small", *flags, settings=Settings(memory_bytes=limit))
    assert ran.summary["oom_recoveries"] == 1 and ran.seen["peak_bytes"] <= limit
    assert_equal(ran, plain, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["clip", "optimizer"])
def test_what_does_not_fit_at_all_is_explained_and_resumes(train: Train, phase: str) -> None:
    flags = ("--mixed_precision", "no", "--save_every_steps", 1)
    time, steps = {"clip": (2, 1), "optimizer": (1, 0)}[phase]
    failed = train("run", *flags, settings=Settings(refusals=(Refusal(phase, time, 1, 1000),)), ends=EXIT_ERROR)
    assert f"Out of memory in {phase}" in failed.said and "--optimizer_offload True" in failed.said
    assert len(failed.log if steps else {}) == steps
    resumed, whole = train("run", *flags), train("whole", *flags)
    assert final_files(resumed.output) == final_files(whole.output)


@pytest.mark.slow
def test_out_of_memory_between_steps_is_not_blamed_on_the_last_one(train: Train) -> None:
    settings = Settings(refusals=(Refusal("between steps", 2, 1, 1000),))
    assert "Out of memory outside a step." in train("run", settings=settings, ends=EXIT_ERROR).said


@pytest.mark.slow
def test_out_of_memory_amid_updates_ends_the_run_and_its_checkpoint_resumes(train: Train) -> None:
    flags = (*ONE_PASS, "--optimizer_in_backward", "true", "--save_every_steps", 1, "--lr_scheduler", "constant")
    settings = Settings(refusals=(Refusal("backward", 3, 40),))
    failed = train("run", *flags, settings=settings, ends=EXIT_ERROR)
    assert "Out of memory in backward" in failed.said
    resumed, whole = train("run", *flags), train("whole", *flags)
    assert final_files(resumed.output) == final_files(whole.output)


@pytest.mark.slow
def test_host_memory_that_cannot_be_page_locked_is_used_as_it_is(train: Train) -> None:
    """For a batch, inputs of layers, gradients, and the copy of a checkpoint: slower, and otherwise the same."""
    plain = train("plain", "--mixed_precision", "no")
    flags = ("--mixed_precision", "no", *KINDS["all"], "--save_every_steps", 1)
    for pinned_bytes in (0, 10_000, 40_000):
        ran = train(f"run-{pinned_bytes}", *flags, settings=Settings(pinned_bytes=pinned_bytes))
        assert ran.seen["peak_pinned_bytes"] <= pinned_bytes
        assert_equal(ran, plain)


def _little_host_memory() -> None:
    offload_small_tensors()
    from train.extras import host_memory

    host_memory.free_host_bytes = lambda *args: 500  # type: ignore


@pytest.mark.slow
@pytest.mark.parametrize("flags", [OFFLOAD, HOST_UPDATES])
def test_too_little_host_memory_is_not_taken_for_a_full_card(train: Train, flags: tuple[str, ...]) -> None:
    ran = train("run", "--rehearse", "False", *flags, before=_little_host_memory, ends=EXIT_ERROR)
    assert "Main memory (RAM) was full" in ran.said and "of GPU" not in ran.said
    assert f"{flags[-2]} False" in ran.said


@pytest.mark.slow
def test_snapshot_is_written_when_memory_runs_out_also_where_the_step_recovers(train: Train) -> None:
    flags = ("--memory_snapshot", "true")
    settings = Settings(refusals=(Refusal("backward", 2, 5),))
    ran = train("run", *flags, settings=settings)
    assert ran.summary["oom_recoveries"] == 1
    assert (ran.output / "memory_snapshot-0.pickle").stat().st_size > 0
    assert not list(train("other", *flags).output.glob("memory_snapshot*"))


# Loss scaling


def _scale_too_high() -> None:
    init: Any = torch.amp.GradScaler.__init__

    def from_higher(self: Any, *args: Any, **options: Any) -> None:
        init(self, *args, **options)
        self._init_scale = 2.0**20

    torch.amp.GradScaler.__init__ = from_higher


@pytest.mark.slow
@pytest.mark.parametrize("flags", [(), HOST_UPDATES, ("--max_grad_norm", "None")])
def test_a_step_that_overflows_is_skipped_and_said_so(train: Train, flags: tuple[str, ...]) -> None:
    ran = train("run", "--mixed_precision", "fp16", "--save_every_steps", 1, *flags, before=_scale_too_high)
    skipped = [row["step"] for row in read_metrics(ran.output / "metrics.jsonl") if row["kind"] == "skipped"]
    assert skipped == [1, 2] and ran.log[3]["nonfinite_steps"] == 2
    assert [ran.log[step]["loss_scale"] for step in (1, 2, 3)] == [2.0**19, 2.0**18, 2.0**18]
    weights = [load_file(next((ran.output / "checkpoints").glob(f"*{step}/model*.safetensors"))) for step in (2, 3)]
    assert any(not torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
