"""The search for the longest sequence: what it tries, what it keeps, and a real step in a process of its own."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from accelerate import Accelerator

from scripts.benchmarks import building, ladder, ladder_search, rungs
from train.config import Config, from_values, to_values
from train.memory.devices import find_device
from train.memory.predict import Job, Target
from train.memory.question import Question, job_of
from train.records import UsageError, UserError


@pytest.fixture(autouse=True)
def _nothing_is_committed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ladder_search, "committed_lengths", lambda device: {})


def planned(seconds_per_token: float = 1e-6, host_bytes: int = 0, fits: bool = True) -> Any:
    """What the planner says of a step."""
    prediction = SimpleNamespace(peak_bytes=1, seconds=1.0)
    return SimpleNamespace(
        prediction=prediction, needed_bytes=1, host_bytes=host_bytes, seconds_per_token=seconds_per_token, fits=fits
    )


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
    assert found <= longest < max(found * ladder_search.STEP**1.2, found + 128)


def test_a_rung_takes_two_tries_where_the_plan_is_right() -> None:
    tries: list[dict[str, Any]] = []
    while (length := ladder_search.next_length(tries, 100 * 1024)) is not None:
        tries.append({"length": length, "outcome": "ok" if length <= 102 * 1024 else "oom"})
    assert [row["length"] // 1024 for row in tries] == [100, 105]


def test_it_is_counted_how_often_the_prediction_held() -> None:
    def tries(rung: str, **outcomes: str) -> list[dict[str, Any]]:
        lengths = {int(name[1:]): outcome for name, outcome in outcomes.items()}
        rows = ({"length": length, "outcome": outcome} for length, outcome in lengths.items())
        return [{"key": rung, "predicted_longest": 10240, **row} for row in rows]

    right = tries("right", _10240="ok", _10752="oom")
    too_long = tries("too long", _10240="oom", _9728="ok")
    too_short = tries("too short", _10240="ok", _10752="ok", _11264="oom")
    begun = tries("begun", _10240="ok")
    assert ladder_search.longer(10240) == 10752
    assert ladder_search.held_line([*right, *too_long, *too_short, *begun]) == (
        "In 1 of 3 cases the predicted length trained, and one up to 5% longer did not."
    )


def test_a_later_call_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []

    def tried(job: Job, mode: str, timeout_seconds: float, steps: int = 1) -> dict[str, Any]:
        lengths.append(job.length)
        limit = 12_000 if mode == "trainer" else 40_000
        return {"outcome": "ok", "seconds": 1.0} if job.length <= limit else {"outcome": "oom"}

    monkeypatch.setattr(ladder_search, "tried_apart", tried)
    monkeypatch.setattr(ladder_search, "outcome_at", lambda *_: planned())
    monkeypatch.setattr(ladder_search, "predicted_longest", lambda *_, **__: 32 * 1024)
    path, device = tmp_path / "ladder.json", find_device("h200")

    class Clock:
        """Time is over after some readings."""

        readings = 0

        def perf_counter(self) -> float:
            self.readings += 1
            return 0.0 if self.readings < 12 else 1e9

    monkeypatch.setattr(ladder_search, "time", Clock())
    assert not ladder_search.Search(device, ladder_search.Results(path), {}).longest(["0.5b"])
    before = len(lengths)
    assert 0 < before < 20
    monkeypatch.setattr(ladder_search, "time", SimpleNamespace(perf_counter=lambda: 0.0))
    results = ladder_search.Results(path)
    assert ladder_search.Search(device, results, {}).longest(["0.5b"])
    tries = results.of("longest", f"0.5b: {ladder_search.TRAINER}")
    assert len({row["length"] for row in tries}) == len(tries)  # nothing tried twice
    best = {row["rung"]: row["length"] for row in results.tries if row["outcome"] == "ok"}
    assert set(best) == {ladder_search.TRAINER, *(rung.name for rung in rungs.rungs_of("0.5b"))}
    assert best[ladder_search.TRAINER] <= 12_000 < best[ladder_search.TRAINER] * ladder_search.STEP**1.2
    assert len(lengths) == len(results.tries)
    assert any("| 41,664 | oom" in line_of(row) for row in results.tries)
    assert any("Trainer's default" in line for line in ladder_search.tables(results.tries))


def test_slow_steps_are_not_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ladder_search, "tried_apart", lambda *_: pytest.fail("it was made"))
    monkeypatch.setattr(ladder_search, "outcome_at", lambda *_: planned(seconds_per_token=1.0))
    monkeypatch.setattr(ladder_search, "predicted_longest", lambda *_, **__: 4096)
    results = ladder_search.Results(tmp_path / "ladder.json")
    assert ladder_search.Search(find_device("h200"), results, {}).longest(["1b"])
    assert {row["outcome"] for row in results.tries} == {"slow"}
    assert "not run: 4,096 s a step by estimate" in line_of(results.tries[0])


def test_host_memory_bounds_what_is_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def outcome(rung: Any, device: Any, length: int, predictions: Any) -> Any:
        return planned(host_bytes=length * 2**20)

    monkeypatch.setattr(ladder_search, "tried_apart", lambda *_: {"outcome": "ok", "seconds": 1.0})
    monkeypatch.setattr(ladder_search, "outcome_at", outcome)
    monkeypatch.setattr(ladder_search, "predicted_longest", lambda *_, **__: 64 * 1024)
    monkeypatch.setattr(ladder_search, "free_host_bytes", lambda: 40 * 2**30)
    results = ladder_search.Results(tmp_path / "ladder.json")
    assert ladder_search.Search(find_device("h200"), results, {}).longest(["1b"])
    best = max(row["length"] for row in results.tries if row["outcome"] == "ok")
    assert 32 * 1024 / ladder_search.STEP**1.2 < best <= 32 * 1024  # 32 GiB of the 40 may be taken
    assert "not run: 64 GiB of host memory" in line_of(results.tries[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"optimizer_in_backward": True, "max_grad_norm": None, "dtype": "bfloat16", "tiled_mlp": True},
    ],
)
def test_real_step_in_a_process_of_its_own(settings: dict[str, Any]) -> None:
    row = ladder_search.tried_apart(tiny_job(128, **settings), "template", 300)
    assert row["outcome"] == "ok", row
    assert row["tokens_per_second"] == pytest.approx(128 / row["seconds"])


@pytest.mark.slow
def test_a_failing_step_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = replace(job := tiny_job(128), values={**job.values, "task": "nothing"})
    row = ladder_search.tried_apart(broken, "template", 300)
    assert row["outcome"] == "error"
    assert "nothing" in row["message"]


# ---- cards and calls -------------------------------------------------------------------------------------------------


def test_the_search_starts_from_the_committed_prediction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"model": "1b", "rung": "nothing", "length": 2048}, {"model": "1b", "rung": "tiled MLP", "error": "no"}]
    for name, more in (("rtx-4090", {}), ("h100", {}), ("h100-24", {"total_bytes": 24 * 2**30})):
        found = {"device": name.removesuffix("-24"), "rows": [{**rows[0], "rung": name}, *rows], **more}
        (tmp_path / f"ladder-predicted-{name}.json").write_text(json.dumps(found))
    h100 = find_device("h100")
    assert rungs.committed_lengths(h100, tmp_path) == {("1b", "h100"): 2048, ("1b", "nothing"): 2048}
    held = building.held_to(h100, 24)
    assert ("1b", "h100-24") in rungs.committed_lengths(held, tmp_path)
    assert ("1b", "rtx-4090") in rungs.committed_lengths(find_device("rtx-3090"), tmp_path)
    assert rungs.committed_lengths(find_device("t4"), tmp_path) == {}

    monkeypatch.setattr(ladder_search, "committed_lengths", lambda device: {("1b", "nothing"): 7 * 1024})
    monkeypatch.setattr(ladder_search, "predicted_longest", lambda *_, **__: 3 * 1024)
    monkeypatch.setattr(ladder_search, "outcome_at", lambda *_: planned())
    monkeypatch.setattr(ladder_search, "tried_apart", lambda *_: {"outcome": "oom"})
    results = ladder_search.Results(None)
    ladder_search.Search(h100, results, {}).longest(["1b"])
    first = {row["rung"]: row["length"] for row in reversed(results.tries)}
    assert first["nothing"] == first[ladder_search.TRAINER] == 7 * 1024 and first["tiled MLP"] == 3 * 1024


def test_the_committed_ladders_are_found_for_their_cards() -> None:
    assert rungs.committed_lengths(find_device("h200"))["8b", "checkpoints on the host"] > 1_000_000
    assert rungs.committed_lengths(find_device("rtx-4090"))["8b", "QLoRA instead"] > 100_000


def test_a_measurement_that_would_not_end_in_time_waits_for_a_later_call(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, made = SimpleNamespace(now=0.0), []

    def tried(job: Job, *_: Any) -> dict[str, Any]:
        made.append(job.length)
        clock.now += 150.0
        return {"outcome": "oom"}

    monkeypatch.setattr(ladder_search, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    monkeypatch.setattr(ladder_search, "predicted_longest", lambda *_, **__: 100 * 1024)
    monkeypatch.setattr(ladder_search, "outcome_at", lambda *_: planned(seconds_per_token=50 / (100 * 1024)))
    monkeypatch.setattr(ladder_search, "tried_apart", tried)
    limits: dict[str, Any] = {"budget_seconds": 420}
    results = ladder_search.Results(None)
    assert not ladder_search.Search(find_device("h200"), results, {}, **limits).longest(["1b"])
    assert len(made) == 2 and clock.now == 300.0  # 120 s are left, and the next would take 145
    monkeypatch.setattr(ladder_search, "outcome_at", lambda *_: planned(seconds_per_token=150 / (100 * 1024)))
    clock.now = 0.0
    limits["budget_seconds"] = 100
    assert not ladder_search.Search(find_device("h200"), results, {}, **limits).longest(["1b"])
    assert len(made) == 3  # the first of a call is made in any case


def test_speed_is_measured_with_as_many_examples_as_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    def fitting(question: Question, _: Any) -> Any:
        return planned(fits=question.config.optimization.micro_batch_size in (1, 2))

    made: list[tuple[int, int, bool]] = []

    def tried(job: Job, *_: Any) -> dict[str, Any]:
        made.append((job.micro_batch_size, job.length, job.values["compile"]))
        return {"outcome": "ok", "seconds": 1.5}

    monkeypatch.setattr(ladder_search, "predicted", fitting)
    monkeypatch.setattr(ladder_search, "tried_apart", tried)
    results = ladder_search.Results(None)
    assert ladder_search.Search(find_device("h200"), results, {}).speeds(["1b"])
    assert made == [(size, length, way == 1) for size, length in ((1, 32768), (2, 4096)) for way in range(4)]
    assert "| 2 × 4,096 | ok | 1.50 |" in "\n".join(ladder_search.tables(results.tries))


def test_one_length_with_each_rung(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(ladder_search, "outcome_at", lambda *_: planned())
    monkeypatch.setattr(ladder_search, "tried_apart", lambda *_, **__: {"outcome": "ok", "seconds": 2.0})
    path = tmp_path / "ladder.json"
    assert ladder_search.Search(find_device("h200"), ladder_search.Results(path), {}).at(["0.5b"], 131072)
    results = ladder_search.Results(path)
    names = [rung.name for rung in rungs.rungs_of("0.5b")]
    assert [row["rung"] for row in results.tries] == names[::-1]  # the first need the most memory, and may not fit
    page = ladder_search.tables(results.tries)
    shown = [line.split(" | ")[1] for line in page[page.index("## Each rung at one length") :] if line.count(" | ") > 5]
    assert shown[2:] == names
    assert {(row["kind"], row["length"]) for row in results.tries} == {("at", 131072)}
    monkeypatch.setattr(ladder_search, "tried_apart", lambda *_: pytest.fail("it is known"))
    assert ladder_search.Search(find_device("h200"), results, {}).at(["0.5b"], 131072)


def test_a_card_is_held_to_a_smaller_one_in_the_process_that_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    fractions: list[float] = []
    h100 = find_device("h100")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.set_per_process_memory_fraction", fractions.append)
    monkeypatch.setattr("train.memory.devices.this_device", lambda: h100)
    building.hold_card()
    assert fractions == []  # nobody asked
    monkeypatch.setenv(building.CAP, "24")
    building.hold_card()
    held = building.held_to(h100, 24)
    assert fractions == [pytest.approx((24 * 2**30 - h100.context_bytes) / h100.total_bytes)]
    assert held.name == "h100, held to 24 GiB" and held.total_bytes == 24 * 2**30
    question = rungs.question_of(rungs.rungs_of("0.5b")[0], held, 4096)
    assert question.device.memory_bytes_per_second and question.room_bytes == int(24 * 2**30 * 0.98)
    for wrong in (0.1, 80):
        with pytest.raises(UsageError, match=f"--cap_gib {wrong:g}: give GiB"):
            building.held_to(h100, wrong)


def test_a_capped_ladder_is_predicted_and_its_page_made_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {"model": "0.5b", "rung": "nothing", "settings": {}, "length": 4096, "needed_bytes": 1, "peak_bytes": 1,
           "host_bytes": 0, "bytes_by_kind": {}}  # fmt: skip
    monkeypatch.setattr(ladder, "predicted_ladder", lambda options, device: [row])
    monkeypatch.setenv(building.CAP, "1")  # so that it is gone again after the test
    words = ["--device", "h100", "--cap_gib", "24", "--write", "--output_dir", str(tmp_path)]
    monkeypatch.setattr("sys.argv", ["ladder.py", *words])
    assert ladder.main() == 0
    path = tmp_path / "ladder-predicted-h100-held-to-24-gib.json"
    text = path.with_suffix(".md").read_text()
    assert "# The ladder, predicted for h100, held to 24 GiB" in text and "24.0 GiB of which 23.5 may be taken" in text
    assert ladder.page(json.loads(path.read_text())) == text
    monkeypatch.delenv(building.CAP)
    monkeypatch.setattr("sys.argv", ["ladder.py", "--device", "t4", "--cap_gib", "24"])
    assert ladder.main() == 2 and "--cap_gib 24" in capsys.readouterr().err


def test_only_the_rungs_that_are_named_are_tried_and_shown_with_what_ran_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ladder_search, "predicted_longest", lambda *_, **__: 100 * 1024)
    monkeypatch.setattr(ladder_search, "outcome_at", lambda *_: planned())
    monkeypatch.setattr(
        ladder_search, "tried_apart", lambda job, *_: {"outcome": "ok" if job.length <= 100 * 1024 else "oom"}
    )
    results, wanted = ladder_search.Results(None), ladder.Options(rungs=("tiled MLP",))
    search = ladder_search.Search(find_device("h200"), results, {}, takes=wanted.takes)
    monkeypatch.setattr(search, "_committed", {})
    assert search.longest(["0.5b", "1b"])
    assert {(row["model"], row["rung"]) for row in results.tries} == {("0.5b", "tiled MLP"), ("1b", "tiled MLP")}
    ran_out = min(row["length"] for row in results.tries if row["outcome"] == "oom")
    shown = "\n".join(ladder_search.tables(results.tries))
    assert shown.count(f"| tiled MLP | 102,400 | 102,400 | {ran_out:,} |") == 2
    assert "In 2 of 2 cases the predicted length trained, and one up to 5% longer did not." in shown
    monkeypatch.setattr("sys.argv", ["ladder.py", "--device", "h100", "--rungs", "tiled", "fast"])
    assert ladder.main() == 2
    assert "error: --rungs: there is no tiled. There are Trainer's default, nothing, " in capsys.readouterr().err


def test_what_a_full_card_trains_leaves_nothing_free_and_starts_the_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = building.held_to(find_device("h100"), 24)

    def outcome(rung: rungs.Rung, device: Any, length: int, predictions: Any) -> Any:
        return SimpleNamespace(needed_bytes=length * 2**20)

    monkeypatch.setattr(rungs, "outcome_at", outcome)
    rung: Any = rungs.rungs_of("0.5b")[0]
    gib_lengths = [rungs.predicted_longest(rung, held, None, on_full_card=full) for full in (False, True)]  # type: ignore
    assert gib_lengths == [24_000, 24_576]  # of 23.5 GiB, and of 24
    row = {"model": "0.5b", "rung": "nothing", "length": 4096, "full_length": 5120}
    (tmp_path / "ladder-predicted-x.json").write_text(
        json.dumps({"device": "h100", "total_bytes": 24 * 2**30, "rows": [row]})
    )
    assert rungs.committed_lengths(held, tmp_path) == {("0.5b", "nothing"): 5120}


def test_a_card_without_bf16_takes_fp16() -> None:
    bf16 = rungs.Rung("0.5b", "all", {**rungs.NOTHING, "dtype": "bfloat16"})
    config = rungs.question_of(bf16, find_device("t4"), 4096).config
    assert (config.optimization.mixed_precision, config.architecture.dtype) == ("fp16", "float32")
    config = rungs.question_of(bf16, find_device("l4"), 4096).config
    assert (config.optimization.mixed_precision, config.architecture.dtype) == ("bf16", "bfloat16")


@pytest.mark.parametrize("steps", [1, 2])
def test_a_single_step_finds_the_state_that_a_plan_assumes(steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Made in empty memory, as in the rehearsal of a run: a short step before it would leave holes."""
    lengths, states = list[int](), list[int]()
    step = building.Training.step

    def seen(training: building.Training, micro_batches: Any = None, **options: Any) -> Any:
        window = training.micro_batches if micro_batches is None else micro_batches
        lengths.append(window[0].shape[1])
        states.append(len(training.optimizer.optimizer.state))
        return step(training, micro_batches, **options)

    monkeypatch.setattr(building.Training, "step", seen)
    building.reset_accelerate()
    Accelerator(cpu=True, mixed_precision="bf16")  # as something before may have left it
    row = ladder_search.measure(tiny_job(2048), steps)
    assert row["seconds"] > 0
    assert lengths == ([2048] if steps == 1 else [1024, 2048, 2048])
    assert bool(states[0]) == (steps == 1)


def test_tries_with_other_versions_are_not_continued(tmp_path: Path) -> None:
    path = tmp_path / "ladder.json"
    path.write_text(json.dumps({"versions": {"torch": "2.11.0", "python": "3.12"}, "tries": [{"length": 1024}]}))
    assert ladder_search.Results(path, {"torch": "2.11.0", "python": "3.12"}).tries == [{"length": 1024}]
    with pytest.raises(UserError, match=r"ladder.json has tries with another version of torch: give another --output"):
        ladder_search.Results(path, {"torch": "2.13.0", "python": "3.12"})
