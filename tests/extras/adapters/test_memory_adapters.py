"""Memory of LoRA and QLoRA steps: predicted against the tracked memory of the same steps made for real."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import pytest
from accelerate.state import AcceleratorState, GradientState
from test_memory_predict import H100, LLAMA, job, tracked_peak

from train.extras.meter.tracker import GRADIENTS, OPTIMIZER_STATE, PARAMETERS
from train.memory.predict import Predictor

pytest.importorskip("peft")
needs_bitsandbytes = pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")


@pytest.fixture(scope="module")
def predictor() -> Iterator[Predictor]:
    with Predictor() as found:
        yield found


@pytest.fixture(autouse=True, scope="module")
def _leaves_no_precision() -> Iterator[None]:
    """The precision of a case is not that of another file's tests."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


CASES = {
    "lora": job(adapter="lora"),
    "lora beside bf16 weights, accumulated": job(adapter="lora", dtype="bfloat16", gradient_accumulation_steps=2),
    "qlora": job(adapter="qlora"),
    "qlora, bf16, checkpointed, accumulated": job(
        adapter="qlora", mixed_precision="bf16", gradient_checkpointing="full", gradient_accumulation_steps=2
    ),
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=needs_bitsandbytes if "qlora" in n else ()) for n in CASES])
def test_prediction_equals_the_real_step(name: str, predictor: Predictor) -> None:
    case = CASES[name]
    predictor.ask(case)
    measured = tracked_peak(case)
    assert predictor.answer().peak_bytes == pytest.approx(measured, rel=5e-4)


@needs_bitsandbytes
@pytest.mark.slow
def test_frozen_weights_cost_four_bytes_or_half_a_byte_and_adapters_sixteen(predictor: Predictor) -> None:
    wide = {**LLAMA, "hidden_size": 256, "intermediate_size": 512, "vocab_size": 260}
    lora, qlora = (
        predictor.predict(job(wide, H100, adapter=kind, mixed_precision="bf16")) for kind in ("lora", "qlora")
    )
    trained = lora.num_trained_parameters
    assert (trained, lora.num_parameters) == (qlora.num_trained_parameters, qlora.num_parameters)
    for found in (lora, qlora):
        assert found.bytes_by_kind[OPTIMIZER_STATE] == pytest.approx(8 * trained, rel=0.05)
        assert found.bytes_by_kind[GRADIENTS] <= 4 * trained
    linear = 2 * (2 * 256 * 256 + 2 * 256 * 128 + 3 * 256 * 512)
    saved = lora.bytes_by_kind[PARAMETERS] - qlora.bytes_by_kind[PARAMETERS]
    assert saved == pytest.approx(linear * (4 - 0.5 - 1 / 64), rel=0.02)  # a scale of 8 bits for 64 weights
