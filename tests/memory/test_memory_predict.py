"""Predicted memory against the tracked memory of the same step made for real, and predictions for cards not here."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers
from faults.processes import script
from support import needs_transformers_5_23
from torch import Tensor

from train.config import Config, from_values, to_values
from train.extras.activations.recompute import MIN_OFFLOADED_BYTES, PIECE_BYTES, OffloadedInputs, enable_checkpointing
from train.extras.meter.flops import count_flops
from train.extras.meter.tracker import (
    ACTIVATIONS,
    GRADIENTS,
    KINDS,
    LOGITS,
    OPTIMIZER_STATE,
    PARAMETERS,
    StorageTracker,
    tag_gradients,
    tag_held,
)
from train.memory.devices import find_device
from train.memory.predict import Job, Prediction, Predictor, Target, random_batch
from train.memory.question import target_of
from train.memory.trial import build, run_of
from train.records import UserError
from train.step import Engine, Mark

LLAMA = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip
BERT = {"model_type": "bert", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
        "intermediate_size": 128, "attention_probs_dropout_prob": 0.0}  # fmt: skip
OWN_KEYS = {"num_key_value_heads": 4}
LONGFORMER = {**BERT, "model_type": "longformer", "attention_window": 32, "max_position_embeddings": 520}
T5 = {"model_type": "t5", "d_model": 64, "num_layers": 2, "num_heads": 2, "d_ff": 128, "d_kv": 32}
MIXTRAL = {**LLAMA, "model_type": "mixtral", "num_local_experts": 4}
QWEN_MOE = {**LLAMA, "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 36}
CPU = Target("cpu")
H100 = Target("cuda", (9, 0), False, {"bf16": 9.9e14, "fp16": 9.9e14}, 3.35e12)


def job(model: dict[str, Any] = LLAMA, target: Target = CPU, **settings: Any) -> Job:
    fields = {f: settings.pop(f) for f in ("padded", "num_labels", "length", "documents") if f in settings}
    own = {"model_config": model, "tokenizer": "bytes", "micro_batch_size": 2, "max_length": fields.get("length", 128)}
    values = {**to_values(Config()), **own, **settings}
    return Job(
        values=values,
        target=target,
        vocab_size=model.get("vocab_size", 600),
        micro_batch_size=2,
        accumulates=(values["gradient_accumulation_steps"] or 1) > 1,  # type: ignore
        **{"length": 128, **fields},  # type: ignore
    )


def on_host(prediction: Prediction) -> dict[str, int]:
    """What a step keeps in host memory."""
    return {kind: size for kind, size in prediction.host_bytes_by_kind.items() if size}


class Predictors:
    """A process for each kind of device: one alone would be started again whenever that changes."""

    def __init__(self, cpu: Predictor, cuda: Predictor) -> None:
        self._by_kind, self._asked = {"cpu": cpu, "cuda": cuda}, cpu

    def ask(self, case: Job) -> None:
        self._asked = self._by_kind[case.target.device_type]
        self._asked.ask(case)

    def answer(self) -> Prediction:
        return self._asked.answer()

    def predict(self, case: Job) -> Prediction:
        self.ask(case)
        return self.answer()


@pytest.fixture(scope="module")
def predictor() -> Iterator[Predictors]:
    with Predictor() as cpu, Predictor() as cuda:
        yield Predictors(cpu, cuda)


class Elsewhere:
    """Host memory of a card, for a step on a CPU: real copies into memory that is not counted."""

    def __init__(self) -> None:
        self.buffers: list[Tensor] = []

    def host_buffer(self, num_bytes: int) -> Tensor:
        self.buffers.append(torch.empty(num_bytes, dtype=torch.uint8))
        return self.buffers[-1]

    def copy(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        for target, source in pairs:
            target.copy_(source)

    def wait(self, event: None) -> None: ...


def tracked_peak(case: Job, rest_on_host: bool = False) -> int:
    """Of the step made for real, its storages counted; the second one, when the optimizer has its state."""
    run = run_of(case, from_values(case.values))
    window = [random_batch(case, case.micro_batch_size) for _ in range(1 + case.accumulates)]
    model, optimizer, network = build(case, run, initialised=True)
    elsewhere = Elsewhere()
    if rest_on_host:
        mode, every = case.values["gradient_checkpointing"], case.values["gradient_checkpointing_every_n_layers"]
        enable_checkpointing(network, mode, every, offload=True)
        found = [getattr(module, "_gradient_checkpointing_func", None) for module in network.modules()]
        offloaded = next(function for function in found if isinstance(function, OffloadedInputs))
        offloaded.transfers = {torch.device("cpu"): elsewhere}  # type: ignore
    marks: list[Mark] = [lambda phase: None]
    engine = run.extras.pipe("wrap_step", run, Engine(run.accelerator, run.config, lambda phase: marks[-1](phase)))
    engine.step(model, optimizer, window)
    with StorageTracker("cpu") as tracker:
        tracker.ignore([t for b in window for t in (*b.inputs.values(), b.labels)])
        tracker.ignore(elsewhere.buffers)
        tag_held(tracker, network, optimizer.optimizer)
        tag_gradients(tracker, network.parameters())
        tracker.reset_peak()
        marks.append(tracker.mark)
        engine.step(model, optimizer, window)
    return tracker.peak.num_bytes


TWO_ALIKE = ((28, 100),) * 2
CASES: dict[str, Job] = {
    "plain": job(),
    "checkpointed, accumulated": job(gradient_checkpointing="full", gradient_accumulation_steps=2),
    "selective": job(gradient_checkpointing="selective"),
    "every second": job(gradient_checkpointing="selective", gradient_checkpointing_every_n_layers=2),
    "tiled": job(tiled_mlp=True, length=512, gradient_accumulation_steps=2),
    "tiled, checkpointed": job(tiled_mlp=True, gradient_checkpointing="full", length=2048),
    "tiled, bf16": job(tiled_mlp=True, mixed_precision="bf16", length=512),
    "bf16 autocast, tied": job({**LLAMA, "tie_word_embeddings": True}, mixed_precision="bf16"),
    "chunked, five chunks": job({**LLAMA, "vocab_size": 9000}, loss="chunked", length=4096),
    "chunked, fp16 weights: recomputed": job(
        {**LLAMA, "vocab_size": 9000}, loss="chunked", length=960, dtype="float16"
    ),
    "chunked, smoothed, z-loss": job({**LLAMA, "vocab_size": 9000}, label_smoothing=0.1, z_loss=1e-4, length=2048),
    "sgd, clipped by value": job(optimizer="sgd", max_grad_norm=None, max_grad_value=1.0),
    "in backward": job({**LLAMA, "vocab_size": 9000}, optimizer_in_backward=True, max_grad_norm=None),
    "in backward, tied, checkpointed": job(
        {**LLAMA, "tie_word_embeddings": True},
        optimizer_in_backward=True,
        max_grad_norm=None,
        gradient_checkpointing="full",
    ),
    "in backward, kahan": job(
        optimizer_in_backward=True, max_grad_norm=None, max_grad_value=1.0, dtype="bfloat16", bf16_update="kahan"
    ),
    "stochastic": job(dtype="bfloat16", bf16_update="stochastic", length=16),
    "kahan": job({**LLAMA, "vocab_size": 9000}, dtype="bfloat16", bf16_update="kahan", length=16),
    "masked and padded": job(BERT, task="masked_lm", padded=True),
    "packed, cut in their own ways": job(packing=True, documents=((40, 60, 28), (128,))),
    "packed, checkpointed, cut alike": job(
        packing=True, documents=((28, 100),) * 2, gradient_checkpointing="selective"
    ),
    "packed, from both sides": job(BERT, task="masked_lm", packing=True, documents=TWO_ALIKE),
    "a sliding window": job({**LLAMA, "model_type": "mistral"}, sliding_window=32, length=1024),
    "positions scaled": job({**LLAMA, "max_position_embeddings": 32}, rope_scaling="yarn"),
    "classified": job(BERT, task="sequence_classification", num_labels=3),
    # These read numbers out of their batch: whether anything is padding, where, and where each text ends.
    "classified by a decoder, padded": job(
        LLAMA, task="sequence_classification", num_labels=3, padded=True, length=512
    ),
    "classified by parts, padded": job(
        LONGFORMER, task="sequence_classification", num_labels=3, padded=True, length=512
    ),
    "experts": job(MIXTRAL),
    "experts, bf16 autocast": job(MIXTRAL, mixed_precision="bf16"),
    "experts, fp16 weights": job(MIXTRAL, dtype="float16"),
    "experts, their router's loss": job({**QWEN_MOE, "output_router_logits": True}, gradient_checkpointing="full"),
    "classified at the end of the text": job(T5, task="sequence_classification", num_labels=3, padded=True),
}


SLOW = (
    "tiled",
    "experts",
    "selective",
    "every second",
    "classified",
    "packed, from both sides",
    "chunked, five chunks",
    "chunked, fp16 weights: recomputed",
    "chunked, smoothed, z-loss",
    "tiled, bf16",
    "kahan",
    "stochastic",
    "in backward, kahan",
    "in backward, tied, checkpointed",
    "sgd, clipped by value",
    "positions scaled",
    "classified by parts, padded",
    "packed, cut in their own ways",
    "experts, bf16 autocast",
    "experts, fp16 weights",
)
MARKS = dict.fromkeys(SLOW, pytest.mark.slow) | {"experts, their router's loss": needs_transformers_5_23}


@pytest.mark.parametrize("name", [pytest.param(name, marks=MARKS.get(name, ())) for name in CASES])
def test_prediction_equals_the_real_step(name: str, predictor: Predictors) -> None:
    case = CASES[name]
    predictor.ask(case)
    measured = tracked_peak(case)
    assert predictor.answer().peak_bytes == pytest.approx(measured, rel=5e-4)


@pytest.mark.parametrize(
    "more",
    [{}, {"tiled_mlp": True, "gradient_checkpointing_every_n_layers": 2}],
    ids=str,
)
@pytest.mark.slow
def test_inputs_that_rest_on_the_host_are_gone_from_the_device(more: dict[str, Any], predictor: Predictors) -> None:
    """By as much as from a real step, whose inputs rest in memory that is not counted."""
    shape = {**LLAMA, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 4, "vocab_size": 64}
    settings: dict[str, Any] = {"length": 512, "gradient_checkpointing": "full", "gradient_accumulation_steps": 2}
    settings |= {"optimizer": "sgd", **more}
    assert MIN_OFFLOADED_BYTES <= 2 * 512 * 256 * 4  # of one input
    full = predictor.predict(job(shape, H100, **settings))
    rested = predictor.predict(job(shape, H100, gradient_checkpointing_offload=True, **settings))
    assert on_host(rested) == {"activations": (2 if more else 4) * PIECE_BYTES}
    assert rested.bytes_by_kind[ACTIVATIONS] < full.bytes_by_kind[ACTIVATIONS]
    real = tracked_peak(job(shape, **settings)) - tracked_peak(job(shape, **settings), rest_on_host=True)
    assert full.peak_bytes - rested.peak_bytes == real > 0


@pytest.mark.slow
def test_inputs_too_small_to_move_stay_and_on_a_cpu_all_do(predictor: Predictors) -> None:
    for target, length in ((H100, 128), (CPU, 4096)):
        full, rested = (
            predictor.predict(
                job(target=target, length=length, gradient_checkpointing="full", gradient_checkpointing_offload=offload)
            )
            for offload in (False, True)
        )
        assert (rested.peak_bytes, on_host(rested)) == (full.peak_bytes, {})


@pytest.mark.skipif(sys.platform == "win32", reason="needs sleep(1)")
def test_a_process_can_be_ended_while_another_thread_waits_for_its_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when a plan is interrupted, or has what it needs: neither thread fails otherwise than by a message."""
    monkeypatch.setattr("train.memory.predict.Popen", lambda _, **how: subprocess.Popen(["sleep", "60"], **how))
    for number in range(60):
        predictor = Predictor()
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(predictor.predict, job())
            while predictor._process is None:
                time.sleep(1e-4)
            time.sleep(number * 5e-5)
            predictor.close()
            with pytest.raises(UserError, match="the prediction ended with status"):
                answer.result(timeout=20)


EIGHT_BIT = {
    "8 bits": job({**LLAMA, "vocab_size": 2000}, optimizer="adamw_8bit"),
    "8 bits in backward, bf16": job(
        optimizer="adamw_8bit", dtype="bfloat16", optimizer_in_backward=True, max_grad_norm=None
    ),
}


@pytest.mark.parametrize("name", EIGHT_BIT)
def test_moments_of_8_bits_take_what_bitsandbytes_takes(name: str, predictor: Predictors) -> None:
    """Also its two tables of 256 numbers, which the measurement misses: they are older than what it watches."""
    pytest.importorskip("bitsandbytes")
    case = EIGHT_BIT[name]
    predictor.ask(case)
    measured = tracked_peak(case)
    assert predictor.answer().peak_bytes == pytest.approx(measured + 2 * 256 * 4, rel=5e-4)


def test_offload_leaves_weights_and_gradients_on_the_card(predictor: Predictors) -> None:
    settings: dict[str, Any] = {"target": H100, "dtype": "bfloat16", "gradient_accumulation_steps": 2}
    beside, offloaded = (predictor.predict(job(**settings, optimizer_offload=o)) for o in (False, True))
    assert beside.bytes_by_kind[OPTIMIZER_STATE] >= 4 * beside.num_parameters
    assert offloaded.bytes_by_kind[OPTIMIZER_STATE] == 0
    for kind in (PARAMETERS, GRADIENTS):
        assert offloaded.bytes_by_kind[kind] == beside.bytes_by_kind[kind]
    saved = beside.peak_bytes - offloaded.peak_bytes
    assert saved >= 4 * beside.num_parameters
    assert on_host(offloaded) == {OPTIMIZER_STATE: 12 * beside.num_parameters}  # fp32 weights and moments
    fp32 = predictor.predict(job(target=H100, optimizer_offload=True))
    assert on_host(fp32) == on_host(offloaded) and on_host(beside) == {}


@pytest.mark.slow
def test_in_backward_gradients_are_never_all_there(predictor: Predictors) -> None:
    sized, settings = {**LLAMA, "num_hidden_layers": 8}, {"target": H100, "max_grad_norm": None, "length": 2}
    plain, found = (predictor.predict(job(sized, optimizer_in_backward=b, **settings)) for b in (False, True))
    gradients, largest = 4 * plain.num_parameters, 4 * 600 * 64
    assert plain.peak_bytes - found.peak_bytes > gradients - 3 * largest


def test_parts_add_up_and_weights_cost_sixteen_bytes_each(predictor: Predictors) -> None:
    found = predictor.predict(job(target=H100, mixed_precision="bf16"))
    assert set(found.bytes_by_kind) == set(KINDS)
    assert sum(found.bytes_by_kind.values()) == found.peak_bytes
    weights = 4 * found.num_parameters
    assert weights <= found.bytes_by_kind[PARAMETERS] < 1.05 * weights + 2**17  # buffers; sizes round up to 512
    assert 2 * weights <= found.bytes_by_kind[OPTIMIZER_STATE] < 2.1 * weights + 2**17
    assert found.reserved_bytes >= found.peak_bytes == max(found.peak_bytes_by_phase.values())
    assert found.attention_kernels == ("flash",)
    assert found.flops and found.seconds and found.seconds > found.flops / 9.9e14


def test_what_the_loss_makes_of_the_head_is_no_activation(predictor: Predictors) -> None:
    """The gradient of its weight, which a loss in chunks makes in forward, and the weight in autocast's type."""
    shape = {**LLAMA, "hidden_size": 256, "vocab_size": 64_000}
    plain, cast = (
        predictor.predict(job(shape, H100, loss="chunked", length=1024, mixed_precision=precision)).bytes_by_kind
        for precision in ("no", "bf16")
    )
    gradient = 4 * 256 * 64_000
    assert plain[GRADIENTS] == 0 and plain[LOGITS] > 2 * gradient  # at the peak, in forward: it, and a chunk's logits
    assert cast[ACTIVATIONS] < plain[ACTIVATIONS] < gradient


def test_time_and_operations_are_those_of_a_step_without_the_evaluation(predictor: Predictors) -> None:
    plain = job(target=H100, mixed_precision="bf16")
    alone, evaluating = (predictor.predict(replace(plain, eval_batch_size=size)) for size in (None, 8))
    assert "evaluation" in evaluating.peak_bytes_by_phase and "evaluation" not in alone.peak_bytes_by_phase
    assert alone.flops and alone.seconds
    assert (evaluating.flops, evaluating.seconds) == (alone.flops, pytest.approx(alone.seconds, rel=1e-9))


@pytest.mark.slow
def test_time_is_that_of_forward_and_backward_whatever_makes_the_update(predictor: Predictors) -> None:
    """Neither what builds the model and the optimizer's state nor the update counts: a step may accumulate."""
    kinds = [{"optimizer": "adamw"}, {"optimizer": "sgd"}, {"optimizer": "adafactor"}, {"max_grad_norm": None}]
    shape = {**LLAMA, "hidden_size": 256, "vocab_size": 64_000}  # an update takes longer than so few tokens
    found = [predictor.predict(job(shape, H100, length=16, mixed_precision="bf16", **kind)) for kind in kinds]
    assert len({(one.flops, one.seconds) for one in found}) == 1
    once, twice = (predictor.predict(job(shape, H100, length=n, mixed_precision="bf16")) for n in (1024, 2048))
    assert 1.5 * once.seconds < twice.seconds < 2.1 * once.seconds


def test_fp32_products_are_timed_in_tf32_where_that_is_on(predictor: Predictors) -> None:
    a100 = target_of(find_device("a100-80"))
    assert a100.flops_per_second["tf32"] == 8 * a100.flops_per_second["no"]
    shape = {**LLAMA, "hidden_size": 2048, "intermediate_size": 8192}
    fast, slow = (predictor.predict(job(shape, a100, length=1024, tf32=on)).seconds for on in (True, False))
    assert fast and slow and 4 * fast < slow


def test_what_a_card_would_do_depends_on_the_card(predictor: Predictors) -> None:
    def kernels(target: Target, **settings: Any) -> tuple[str, ...]:
        return predictor.predict(job(target=target, **settings)).attention_kernels

    ampere, turing = Target("cuda", (8, 0)), Target("cuda", (7, 5))
    assert kernels(ampere, mixed_precision="bf16") == ("flash",)
    assert kernels(ampere, mixed_precision="no") == ("efficient",)
    assert kernels(turing, mixed_precision="fp16") == ("efficient",)
    assert kernels(replace(H100, prefers_cudnn=True), mixed_precision="fp16") == ("cudnn",)
    with pytest.raises(UserError, match="bf16"):
        kernels(turing, mixed_precision="bf16")
    classifier: dict[str, Any] = {"task": "sequence_classification", "num_labels": 3, "mixed_precision": "bf16"}
    assert kernels(H100, **classifier) == ("flash",)
    assert kernels(H100, **classifier, padded=True) == ("efficient",)  # flash takes no mask


@pytest.mark.parametrize(("capability", "precision"), [((7, 5), "fp16"), ((8, 0), "no")])
def test_no_card_holds_all_scores_of_heads_that_share_keys(
    capability: tuple[int, int], precision: str, predictor: Predictors
) -> None:
    target, settings = Target("cuda", capability), {"length": 8192, "mixed_precision": precision}
    shared, own = (predictor.predict(job(shape, target, **settings)) for shape in (LLAMA, {**LLAMA, **OWN_KEYS}))
    assert shared.attention_kernels == own.attention_kernels == ("efficient",)
    scores = 4 * 4 * 8192 * 8192  # bytes of all four heads in fp32
    assert shared.peak_bytes < scores / 2 and own.peak_bytes < scores / 2


@pytest.mark.slow
def test_packed_rows_on_a_card_take_flash_attention_over_lengths_or_document_by_document(predictor: Predictors) -> None:
    packed = job(target=H100, mixed_precision="bf16", packing=True, length=2048)
    found, plain = (predictor.predict(case) for case in (packed, job(target=H100, mixed_precision="bf16", length=2048)))
    assert found.attention_kernels == ("flash over lengths",)
    assert found.flops == pytest.approx(plain.flops, rel=1e-3)  # one document a row is taken: the longest there can be
    assert found.peak_bytes == pytest.approx(plain.peak_bytes, rel=0.01)  # positions and boundaries are small
    exact = predictor.predict(replace(packed, values={**packed.values, "mixed_precision": "no"}))
    assert exact.attention_kernels == ("efficient",)
    turing = Target("cuda", (7, 5))
    values = {**packed.values, "mixed_precision": "fp16"}
    assert predictor.predict(replace(packed, target=turing, values=values)).attention_kernels == ("efficient",)


@pytest.mark.slow
@pytest.mark.parametrize("packing", [False, True])
def test_long_sequences_take_buffers_of_some_heads_at_a_time(packing: bool, predictor: Predictors) -> None:
    """With one head of keys, which cannot be divided, attention's backward pass holds the buffers of all."""
    shape = {**LLAMA, "hidden_size": 1024, "num_attention_heads": 16, "num_hidden_layers": 1, "vocab_size": 300}
    settings: dict[str, Any] = {"length": 2**18, "loss": "chunked", "dtype": "bfloat16", "packing": packing}
    settings |= {"gradient_checkpointing": "full", "tiled_mlp": True}
    whole, divided = (
        predictor.predict(job({**shape, "num_key_value_heads": heads}, H100, **settings)) for heads in (1, 4)
    )
    buffers = 2 * 2**18 * 1024 * (4 + 2 + 2)  # dq in fp32, dk and dv of each of the 16 heads
    assert whole.operator.split(".")[1].endswith("_backward")
    assert whole.peak_bytes - divided.peak_bytes > buffers / 4  # though its keys and values take more
    own = job({**shape, "num_key_value_heads": 4}, H100, **settings, attn_implementation="flash_attention_2")
    assert packing or predictor.predict(own).peak_bytes - divided.peak_bytes > buffers / 2  # its package takes all


def test_techniques_save_what_they_should(predictor: Predictors) -> None:
    def peak(**settings: Any) -> int:
        sized = {**LLAMA, "num_hidden_layers": 4, "vocab_size": 9000}
        return predictor.predict(job(sized, H100, length=4096, mixed_precision="bf16", **settings)).peak_bytes

    plain, checkpointed, chunked = (
        peak(loss="full"),
        peak(gradient_checkpointing="full", loss="full"),
        peak(loss="chunked"),
    )
    assert checkpointed < plain and chunked < plain
    assert peak(gradient_checkpointing="full", loss="chunked") < min(checkpointed, chunked)
    assert plain - chunked > 2 * 4096 * 9000 * 4  # fp32 logits of two examples are never there


def test_attention_without_a_flash_kernel_costs_a_square(predictor: Predictors) -> None:
    def peak(length: int, **settings: Any) -> int:
        return predictor.predict(job(target=H100, length=length, mixed_precision="bf16", **settings)).peak_bytes

    squares = 2 * 4 * 2 * 2048**2  # one bf16 score of two examples and four heads
    assert peak(2048, attn_implementation="eager") - peak(2048) > 2 * squares


@pytest.mark.slow
def test_a_sliding_window_costs_no_square(predictor: Predictors) -> None:
    def peak(length: int, **settings: Any) -> int:
        mistral = {**LLAMA, "model_type": "mistral"}
        return predictor.predict(job(mistral, H100, length=length, sliding_window=64, **settings)).peak_bytes

    for precision in ("bf16", "no"):
        one, two, four = (peak(n, mixed_precision=precision) for n in (1024, 2048, 4096))
        assert four - two == pytest.approx(2 * (two - one), rel=0.02)


def test_sharding_divides_what_is_kept_and_ddp_adds_buckets(predictor: Predictors) -> None:
    one = job(target=H100, mixed_precision="bf16")
    alone = predictor.predict(one)
    ddp = predictor.predict(replace(one, world_size=8, sharding="ddp"))
    fsdp = predictor.predict(replace(one, world_size=8, sharding="fsdp2"))
    again = predictor.predict(one)
    assert again.peak_bytes == alone.peak_bytes
    assert ddp.peak_bytes - alone.peak_bytes == 4 * alone.num_parameters
    assert fsdp.num_parameters == alone.num_parameters
    for kind in (PARAMETERS, OPTIMIZER_STATE):
        assert alone.bytes_by_kind[kind] / 9 < fsdp.bytes_by_kind[kind] < alone.bytes_by_kind[kind] / 5


@pytest.mark.slow
def test_weights_that_stay_gathered_between_forward_and_backward_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """``fsdp_reshard_after_forward: false`` in the launch file reaches the planner's process as this variable."""
    peaks = []
    for reshards in ("true", "false"):
        monkeypatch.setenv("FSDP_RESHARD_AFTER_FORWARD", reshards)
        with Predictor() as own:
            peaks.append(own.predict(replace(job(target=H100), world_size=8, sharding="fsdp2")).peak_bytes)
    assert peaks[1] > peaks[0]


@pytest.mark.parametrize("world_size", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_shards_on_the_host_are_not_on_the_card(world_size: int, predictor: Predictors) -> None:
    one = replace(job(target=H100, mixed_precision="bf16"), world_size=world_size)
    there, here = (predictor.predict(replace(one, sharding=s)) for s in ("fsdp2", "fsdp2_offload"))
    shard = 4 * there.num_parameters / world_size
    on_card = [found.bytes_by_kind[PARAMETERS] + found.bytes_by_kind[OPTIMIZER_STATE] for found in (there, here)]
    assert on_card[0] >= 3 * shard  # weights and two moments
    assert on_card[1] < 0.35 * on_card[0]  # buffers, and what one layer gathers
    assert here.peak_bytes < there.peak_bytes - 2 * shard
    kinds = {PARAMETERS: shard, GRADIENTS: shard, OPTIMIZER_STATE: 2 * shard}
    assert on_host(here) == pytest.approx(kinds, rel=0.001) and on_host(there) == {}


@pytest.mark.parametrize(("dtype", "precision", "size"), [("bfloat16", "no", 2), ("bfloat16", "bf16", 4)])
def test_shards_on_the_host_are_of_the_type_that_they_have_on_a_card(
    dtype: str, precision: str, size: int, predictor: Predictors
) -> None:
    one = job(target=H100, dtype=dtype, mixed_precision=precision)
    there, here = (predictor.predict(replace(one, sharding=s)) for s in ("fsdp2", "fsdp2_offload"))
    assert there.bytes_by_kind[OPTIMIZER_STATE] == pytest.approx(2 * size * there.num_parameters, rel=0.05)
    weights = size * here.num_parameters
    kinds = {PARAMETERS: weights, GRADIENTS: weights, OPTIMIZER_STATE: 2 * weights}
    assert on_host(here) == pytest.approx(kinds, rel=0.001)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_a_plan_and_a_run_count_the_same_operations(dtype: str, predictor: Predictors) -> None:
    """Half of the square of causal attention, in both."""
    length = 4096
    settings: dict[str, Any] = {"length": length, "loss": "full", "target": H100, "mixed_precision": dtype}
    planned = predictor.predict(job(LLAMA, **settings)).flops
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(**LLAMA, vocab_size=600), attn_implementation="sdpa"
    )
    counted = count_flops(model, length, is_causal=True)
    assert counted is not None
    attention = 3 * 4 * 2 * length * length / 2 * 64  # forward and twice as much, two layers, half of the square
    assert counted.of(length) > attention > 0.5 * counted.of(length)
    # A flash kernel computes the scores once more in backward: five products instead of four.
    assert planned == pytest.approx(2 * (counted.of(length) + attention / 6), rel=0.01)


def test_a_model_that_cannot_be_built_is_said_and_the_next_is_predicted(predictor: Predictors) -> None:
    with pytest.raises(UserError, match="heads"):
        predictor.predict(job({**LLAMA, "num_attention_heads": 5}))
    assert predictor.predict(job()).peak_bytes > 0


def test_a_process_that_dies_is_reported_and_replaced() -> None:
    with Predictor() as predictor:
        predictor.start().kill()
        with pytest.raises(UserError, match="status -9"):
            predictor.predict(job())
        assert predictor.predict(job()).peak_bytes > 0


def test_a_process_that_has_died_is_reported_where_its_answer_is_wanted(
    planner_from_scratch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Predictor, "start", planner_from_scratch)
    with Predictor() as predictor:
        process = predictor.start()
        process.kill()
        process.wait()
        predictor.ask(job())  # by a run that trains either way
        with pytest.raises(UserError, match="status -9"):
            predictor.answer()


def test_a_torch_of_another_layout_is_said_plainly(tmp_path: Path) -> None:
    (tmp_path / "missing.py").write_text(
        "from train.memory import make_believe\n"
        "def missing(name): raise AttributeError('undefined symbol')\n"
        "make_believe._library = missing\n"
        'try: make_believe.install("cuda", (9, 0))\n'
        "except make_believe.CannotStandInError as error: print(error)\n"
    )
    done = script([tmp_path / "missing.py"], 1, {**os.environ})
    assert "cannot be made to plan for a device of type cuda" in done.stdout, done.stderr
    assert "--device cpu" in done.stdout


@pytest.mark.skipif(sys.platform != "linux", reason="a Mac has the other kind of device")
@pytest.mark.parametrize("kind", ["cuda", "mps"])
def test_what_is_one_kernel_on_a_card_is_one_operator_without_it(kind: str, tmp_path: Path) -> None:
    (tmp_path / "operators.py").write_text(
        "import torch, torch.nn.functional as F\n"
        "from torch._subclasses.fake_tensor import FakeTensorMode\n"
        "from torch.utils._python_dispatch import TorchDispatchMode\n"
        "from train.memory import make_believe\n"
        "class Names(TorchDispatchMode):\n"
        "    def __torch_dispatch__(self, func, types, args=(), kwargs=None):\n"
        "        print(func.overloadpacket.__name__)\n"
        "        return func(*args, **(kwargs or {}))\n"
        f"make_believe.install({kind!r}, (9, 0))\n"
        "with FakeTensorMode(), Names():\n"
        f"    hidden = torch.empty(4, 8, device={kind!r}, requires_grad=True)\n"
        "    F.rms_norm(F.mish(F.silu(hidden)), (8,)).backward(torch.empty_like(hidden))\n"
    )
    done = script([tmp_path / "operators.py"], 1, {**os.environ})
    names = done.stdout.split()
    for name in ("silu", "silu_backward", "mish", "mish_backward", "_fused_rms_norm", "_fused_rms_norm_backward"):
        assert names.count(name) == 1, (name, done.stdout + done.stderr)
    assert not {"sigmoid", "pow", "tanh"} & set(names)


@pytest.mark.skipif(sys.platform != "linux", reason="a Mac has the other kind of device")
@pytest.mark.slow
def test_mps_is_planned_for_also_by_a_torch_that_is_built_for_cuda_and_has_a_card(tmp_path: Path) -> None:
    """Torch's core stops where it sees both kinds of device."""
    with_a_card = (
        "from torch._subclasses import fake_tensor\n"
        "own = fake_tensor.init_gpu_context, fake_tensor.FakeTensorMode.avoid_device_init\n"
        "make_believe.install('cuda', (9, 0))\n"
        "assert torch.cuda.is_available() and torch.accelerator.current_accelerator().type == 'cuda'\n"
        "fake_tensor.init_gpu_context, fake_tensor.FakeTensorMode.avoid_device_init = own\n"
        "held, make_believe._kept = make_believe._kept, []\n"
    )
    found = []
    for before in ("", with_a_card):
        (tmp_path / "mps.py").write_text(
            "import torch\n"
            "from test_memory_predict import Target, job\n"
            "from train.memory import make_believe, trial\n"
            f"{before}print('peak', trial.predict(job(target=Target('mps'))).peak_bytes)\n"
        )
        done = script([tmp_path / "mps.py"], 1, {**os.environ})
        assert "peak " in done.stdout, done.stderr
        found.append(done.stdout.split("peak ")[1])
    assert found[0] == found[1]


@pytest.mark.slow
def test_tiles_are_predicted_for_metal() -> None:
    """Of whose random numbers torch has no state by device."""
    with Predictor() as predictor:
        whole, tiled = (
            predictor.predict(job(target=Target("mps"), gradient_checkpointing="full", length=2048, tiled_mlp=is_tiled))
            for is_tiled in (False, True)
        )
    assert tiled.peak_bytes < whole.peak_bytes


@pytest.mark.slow
def test_losses_of_libraries_are_predicted_for_cards(predictor: Predictors) -> None:
    vocabulary, length = 32_000, 8192
    sized = {**LLAMA, "vocab_size": vocabulary}

    def predicted(loss: str, target: Target = H100, precision: str = "bf16") -> Prediction:
        asked = job(sized, target, length=length, mixed_precision=precision, loss=loss, gradient_checkpointing="full")
        return predictor.predict(asked)

    found = {loss: predicted(loss) for loss in ("full", "chunked", "liger", "cce")}
    peaks = {loss: each.peak_bytes for loss, each in found.items()}
    # Liger holds some of the logits in bf16, of as many tokens as make them about as large as the hidden states
    assert peaks["chunked"] - peaks["liger"] > 64 * 2**20
    assert peaks["cce"] < peaks["liger"] + 2 * 2**20
    assert peaks["full"] - peaks["chunked"] > 2 * length * vocabulary * 4
    product = 2 * 2 * length * vocabulary * 64
    flops = {loss: each.flops or 0 for loss, each in found.items()}
    assert flops["chunked"] == pytest.approx(flops["full"], rel=0.01)
    assert flops["liger"] == pytest.approx(flops["full"], rel=0.01)
    assert flops["cce"] - flops["liger"] == pytest.approx(product, rel=0.01)
    with pytest.raises(UserError, match=r"loss: liger .*loss scaling"):
        predicted("liger", Target("cuda", (7, 5)), "fp16")
    with pytest.raises(UserError, match=r"loss: cce .*only on CUDA devices"):
        predictor.predict(job(loss="cce"))


@pytest.mark.parametrize(
    ("num_labels", "label_shape", "expected"),
    [
        (0, None, (2, 16)),
        (4, None, (2,)),
        (4, (-1,), (2, 16)),  # a tag for each token
        (4, (4,), (2, 4)),  # several classes at once
    ],
)
def test_a_batch_has_labels_of_the_shape_that_the_data_has(
    num_labels: int, label_shape: tuple[int, ...] | None, expected: tuple[int, ...]
) -> None:
    job = Job({}, Target("cpu"), 300, 2, 16, num_labels=num_labels)
    if label_shape is not None:
        job = replace(job, tensors={**job.tensors, "labels": (label_shape, "int64")})
    batch = random_batch(job, 2)
    assert tuple(batch.labels.shape) == expected and batch.num_targets == batch.labels.numel()
    assert batch.labels.ge(0).all() and batch.labels.lt(num_labels or 300).all()
    assert batch.labels.dtype == torch.int64
    assert list(batch.inputs) == ["input_ids"] and batch.shape == (2, 16)


def test_a_batch_has_the_inputs_that_the_data_has() -> None:
    """Such as those of a decoder, which has a length of its own, and labels that are numbers."""
    tensors = {"input_ids": ((-1,), "int64"), "decoder_input_ids": ((5,), "int32"), "labels": ((5,), "float32")}
    tensors["is_quoted"] = ((-1,), "bool")
    batch = random_batch(Job({}, Target("cpu"), 300, 2, 16, tensors=tensors), 3)  # type: ignore
    assert {name: (tuple(t.shape), t.dtype) for name, t in batch.inputs.items()} == {
        "input_ids": ((3, 16), torch.int64),
        "decoder_input_ids": ((3, 5), torch.int32),
        "is_quoted": ((3, 16), torch.bool),
    }
    assert (tuple(batch.labels.shape), batch.labels.dtype, batch.num_targets) == ((3, 5), torch.float32, 15)


@pytest.mark.slow
def test_a_functions_pretrained_model_is_planned_as_one_from_a_folder(tmp_path: Path) -> None:
    """from_pretrained reads real weights, in threads of its own; ties and the device stay."""
    own: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(vocab_size=300, tie_word_embeddings=True, **own)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    call = f"transformers.LlamaForCausalLM.from_pretrained({str(tmp_path / 'model')!r})"
    (tmp_path / "own.py").write_text(f"import transformers\n\n\ndef build():\n    return {call}\n")
    models = (str(tmp_path / "model"), f"{tmp_path / 'own.py'}:build")
    values = {**to_values(Config()), "tokenizer": "bytes", "max_length": 64}
    for target in (Target("cpu"), Target("cuda", (8, 9))):
        with Predictor() as predictor:
            jobs = [Job({**values, "model": model}, target, 300, 2, 64, eval_batch_size=2) for model in models]
            by_folder, by_function = map(predictor.predict, jobs)
        assert by_function.peak_bytes == by_folder.peak_bytes
        assert by_function.bytes_by_kind == by_folder.bytes_by_kind
        assert by_function.num_parameters == by_folder.num_parameters


def test_a_module_of_ones_own_is_tiled_in_a_prediction_too(tmp_path: Path) -> None:
    """The one that docs/extras/long_sequences.md shows: whole, its MLPs keep 4 + 4 widths of 64 for each token."""
    page = Path(__file__).parents[2] / "docs" / "extras" / "long_sequences.md"
    [shown] = re.findall(r"```python\n(# my_blocks\.py.*?)```", page.read_text(), re.DOTALL)
    (tmp_path / "my_blocks.py").write_text(shown)
    values = {**to_values(Config()), "tokenizer": "bytes", "max_length": 4096, "packing": True, "loss": "chunked"}
    values |= {"model": f"{tmp_path / 'my_blocks.py'}:build"}
    with Predictor() as predictor:
        whole, tiled = (
            predictor.predict(Job({**values, "tiled_mlp": is_tiled}, Target("cuda", (8, 9)), 300, 2, 4096))
            for is_tiled in (False, True)
        )
    assert tiled.num_parameters == whole.num_parameters
    layers, rows = 2, 2
    kept = layers * rows * 4096 * 8 * 64 * 4
    assert kept <= whole.peak_bytes - tiled.peak_bytes < 1.05 * kept


OWN = """
import torch
from torch import nn


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(300, 16), nn.Linear(16, 300, bias=False)
        self.register_buffer("factor", torch.tensor([0.5]))
        self.register_buffer("asked", torch.tensor([4.0]))
        self.register_buffer("positions", torch.arange(64), persistent=False)
        self.shared = [self.embed.weight]

    def forward(self, input_ids):
        hidden = nn.functional.embedding(input_ids, self.shared[0]) * self.factor
        places = self.positions[: input_ids.shape[1]] < self.asked.item()
        return self.head(hidden * places[:, None])
"""


def test_buffers_and_second_references_of_a_functions_model_are_planned_for_a_card(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    values = {**to_values(Config()), "tokenizer": "bytes", "max_length": 64, "model": f"{tmp_path / 'own.py'}:Own"}
    with Predictor() as predictor:
        found = predictor.predict(Job(values, Target("cuda", (8, 9)), 300, 2, 64))
    weight = -(-300 * 16 * 4 // 512) * 512  # as the allocator rounds
    assert found.bytes_by_kind[PARAMETERS] == 2 * weight + 3 * 512


MOVED = '.to("cuda" if torch.cuda.is_available() else "cpu")'  # the stand-in says that there is a card


@pytest.mark.parametrize("change", ['.to("cpu")', MOVED, ".bfloat16()", ".tried()", ".read()"])
def test_builders_that_need_real_weights_are_planned(change: str, tmp_path: Path) -> None:
    """They move what they made, look at values, or load a file."""
    methods = """
    def tried(self):
        float(self.head.weight.detach().numpy().std())  # of weights that nobody has drawn
        return self

    def read(self):
        safetensors.torch.load_model(self, FILE)
        return self


def build():
    return Own()"""
    file = tmp_path / "model.safetensors"
    own = OWN.replace("self.shared[0]", "self.embed.weight").replace("self.shared = [self.embed.weight]", "pass")
    (tmp_path / "own.py").write_text(f"import safetensors.torch\nFILE = {str(file)!r}\n{own}{methods}{change}\n")
    names: dict[str, Any] = {}
    exec(own, names)
    safetensors.torch.save_model(names["Own"](), str(file))
    values = {**to_values(Config()), "tokenizer": "bytes", "max_length": 64, "model": f"{tmp_path / 'own.py'}:build"}
    with Predictor() as predictor:
        found = predictor.predict(Job(values, Target("cuda", (8, 9)), 300, 2, 64))
    size = 2 if change == ".bfloat16()" else 4
    assert found.bytes_by_kind[PARAMETERS] == pytest.approx(2 * 300 * 16 * size, rel=0.1)
