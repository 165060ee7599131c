"""The search for the longest sequence: what it tries, what it keeps, and a real step in a process of its own."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from scripts.benchmarks import ladder_search, rungs
from train.config import Config, from_values, to_values
from train.memory.devices import find_device
from train.memory.predict import Job, Target
from train.memory.question import job_of


def line_of(row: dict[str, Any]) -> str:
    return ladder_search.TABLE.row(ladder_search.cells(row))


def tiny_job(length: int, **settings: Any) -> Job:
    model = {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": 300,
    }
    values = {"model_config": model, "tokenizer": "bytes", "max_length": length, "mixed_precision": "no", **settings}
    return job_of(from_values({**to_values(Config()), **values}), Target("cpu"), 300)


@pytest.mark.parametrize("model", rungs.MODELS)
def test_each_rung_keeps_what_stands_above_it(model: str) -> None:
    ladder = rungs.rungs_of(model, with_qlora=True)
    assert len({rung.key for rung in ladder}) == len(ladder) == 8
    for before, after in pairwise(ladder[:-1]):
        changed = {name for name in before.settings if after.settings[name] != before.settings[name]}
        assert changed <= {"loss", "gradient_checkpointing"}
        assert len(after.settings) + len(changed) > len(before.settings)
    device = find_device("rtx-4090")
    for rung in ladder:  # every setting is a flag
        assert rungs.question_of(rung, device, 4096).config.data.max_length == 4096


@pytest.mark.parametrize("longest", [1024, 3 * 1024, 70 * 1024, 777 * 1024])
@pytest.mark.parametrize("error_of_guess", [0.3, 0.97, 1.0, 1.02, 1.4])
def test_search_ends_close_to_the_longest(longest: int, error_of_guess: float) -> None:
    guess = max(1024, int(longest * error_of_guess) // 1024 * 1024)
    tries: list[dict[str, Any]] = []
    while (length := ladder_search.next_length(tries, guess)) is not None:
        tries.append({"length": length, "outcome": "ok" if length <= longest else "oom"})
        assert len(tries) < 40
    found = max(row["length"] for row in tries if row["outcome"] == "ok")
    assert found <= longest < max(found * ladder_search.CLOSE, found + 2048)


def test_a_later_call_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []

    def tried(job: Job, mode: str, timeout_seconds: float, steps: int = 1) -> dict[str, Any]:
        lengths.append(job.length)
        limit = 12_000 if mode == "trainer" else 40_000
        return {"outcome": "ok", "seconds": 1.0} if job.length <= limit else {"outcome": "oom"}

    prediction = SimpleNamespace(peak_bytes=1, seconds=1.0)
    outcome = SimpleNamespace(prediction=prediction, host_bytes=0, seconds_per_token=1e-6, fits=True)
    monkeypatch.setattr(ladder_search, "tried_apart", tried)
    monkeypatch.setattr(ladder_search, "outcome_at", lambda *_: outcome)
    monkeypatch.setattr(ladder_search, "predicted_longest", lambda *_: 32 * 1024)
    path, device = tmp_path / "ladder.json", find_device("h200")

    class Clock:
        """Time is over after three readings that follow the first."""

        readings = 0

        def perf_counter(self) -> float:
            self.readings += 1
            return 0.0 if self.readings < 6 else 1e9

    monkeypatch.setattr(ladder_search, "time", Clock())
    assert not ladder_search.Search(device, ladder_search.Results(path), {}, speed=False).run(["0.5b"])
    before = len(lengths)
    assert 0 < before < 20
    monkeypatch.setattr(ladder_search, "time", SimpleNamespace(perf_counter=lambda: 0.0))
    results = ladder_search.Results(path)
    assert ladder_search.Search(device, results, {}, speed=False).run(["0.5b"])
    tries = results.of("longest", f"0.5b: {ladder_search.TRAINER}")
    assert len({row["length"] for row in tries}) == len(tries)  # nothing tried twice
    best = {row["rung"]: row["length"] for row in results.tries if row["outcome"] == "ok"}
    assert set(best) == {ladder_search.TRAINER, *(rung.name for rung in rungs.rungs_of("0.5b"))}
    assert best[ladder_search.TRAINER] <= 12_000 < best[ladder_search.TRAINER] * ladder_search.CLOSE + 1024
    assert len(lengths) == len(results.tries)
    assert any("| 40,960 | oom" in line_of(row) or row["outcome"] == "ok" for row in results.tries)
    assert any("Trainer's default" in line for line in ladder_search.tables(results.tries))


def test_slow_steps_are_not_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prediction = SimpleNamespace(peak_bytes=1, seconds=1e4)
    outcome = SimpleNamespace(prediction=prediction, host_bytes=0, seconds_per_token=1.0, fits=True)
    monkeypatch.setattr(ladder_search, "tried_apart", lambda *_: pytest.fail("it was made"))
    monkeypatch.setattr(ladder_search, "outcome_at", lambda *_: outcome)
    monkeypatch.setattr(ladder_search, "predicted_longest", lambda *_: 4096)
    results = ladder_search.Results(tmp_path / "ladder.json")
    assert ladder_search.Search(find_device("h200"), results, {}, speed=False).run(["1b"])
    assert {row["outcome"] for row in results.tries} == {"slow"}
    assert "not run: 4,096 s a step by estimate" in line_of(results.tries[0])


def test_host_memory_bounds_what_is_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def outcome(rung: Any, device: Any, length: int, predictions: Any) -> Any:
        prediction = SimpleNamespace(peak_bytes=1, seconds=1.0)
        return SimpleNamespace(prediction=prediction, host_bytes=length * 2**20, seconds_per_token=1e-6, fits=True)

    monkeypatch.setattr(ladder_search, "tried_apart", lambda *_: {"outcome": "ok", "seconds": 1.0})
    monkeypatch.setattr(ladder_search, "outcome_at", outcome)
    monkeypatch.setattr(ladder_search, "predicted_longest", lambda *_: 64 * 1024)
    monkeypatch.setattr(ladder_search, "free_host_bytes", lambda: 40 * 2**30)
    results = ladder_search.Results(tmp_path / "ladder.json")
    assert ladder_search.Search(find_device("h200"), results, {}, speed=False).run(["1b"])
    best = max(row["length"] for row in results.tries if row["outcome"] == "ok")
    assert 31 * 1024 <= best <= 32 * 1024  # 32 GiB of the 40 may be taken
    assert "not run: 64 GiB of host memory" in line_of(results.tries[0])


@pytest.mark.parametrize(
    "settings", [{}, {"optimizer_in_backward": True, "max_grad_norm": None, "dtype": "bfloat16", "tiled_mlp": True}]
)
def test_real_step_in_a_process_of_its_own(settings: dict[str, Any]) -> None:
    row = ladder_search.tried_apart(tiny_job(128, **settings), "template", 120)
    assert row["outcome"] == "ok", row
    assert row["tokens_per_second"] == pytest.approx(128 / row["seconds"])


def test_a_failing_step_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = replace(tiny_job(128), task="nothing")
    row = ladder_search.tried_apart(broken, "template", 120)
    assert row["outcome"] == "error"
    assert "nothing" in row["message"]
