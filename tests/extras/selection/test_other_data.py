"""A run that has ended, evaluated on other data: its model stays, and the figures are of that model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from train.main import main
from train.records import EXIT_DONE

DATA = """
from datasets import load_dataset
def documents():
    train = load_dataset("json", data_files="{train}", split="train")
    return {{"train": train, "validation": train, "test": load_dataset("json", data_files="{test}", split="train")}}
"""


def held_out(folder: Path, name: str, words: str) -> list[str]:
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps({"text": f"{name} {number} {words}"}) + "\n" for number in range(4)))
    return ["--validation_dataset", str(path)]


@pytest.mark.parametrize(
    "how", [("--early_stopping_patience", "2"), pytest.param(("--load_best_model_at_end",), marks=pytest.mark.slow)]
)
def test_a_run_that_has_ended_is_evaluated_on_other_data_and_stays_as_it_is(
    how: tuple[str, ...], recipe: Path, tmp_path: Path
) -> None:
    """With a rate at which the loss only grows: the best step is the first, and an early end comes soon after it."""
    run = tmp_path / "run"
    flags = ["--config", str(recipe), "--output_dir", str(run), "--max_steps", "5", "--eval_every_steps", "1"]
    flags += ["--learning_rate", "3", "--lr_scheduler", "constant", *how]

    def trained(*more: str) -> tuple[dict[str, Any], bytes]:
        assert main([*flags, *more]) == EXIT_DONE
        return json.loads((run / "summary.json").read_text()), (run / "final/model.safetensors").read_bytes()

    first, weights = trained(*held_out(tmp_path, "one", "abc def"))
    assert (first["steps"] < 5) is (len(how) == 2) and first["best_step"] < first["steps"]
    before = (run / "metrics.jsonl").read_text()
    other = held_out(tmp_path, "two", "something else altogether")
    second, kept = trained(*other)
    row, data = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1]), second["result"]["validation"]["data"]
    assert (row["step"], row["split"], row["data"]) == (first["final_step"], "validation", data)
    after = (run / "metrics.jsonl").read_text()
    assert after.startswith(before)  # what was found on the first data stays
    # The page is of these alone, on which only the last step and that of final/ were evaluated.
    assert ("Validation loss went from" in (run / "report.html").read_text()) is (len(how) == 1)
    assert kept == weights and not list(run.glob("previous-*"))
    peaks = [name for name in first if name.startswith("peak_")]
    assert "peak_allocated_bytes" in peaks  # of training, as the steps are
    for name in "steps", "final_step", "best_step", *peaks:
        assert second[name] == first[name], name
    loss = second["result"]["validation"]["loss"]
    assert loss != pytest.approx(first["result"]["validation"]["loss"], abs=1e-3)
    again, _ = trained("--metric_for_best", "accuracy", *other)  # nothing to do
    assert again == second
    assert trained(*held_out(tmp_path, "one", "abc def"))[0]["result"] == first["result"]
    assert (run / "metrics.jsonl").read_text() == after  # it has these rows
    assert "Validation loss went from" in (run / "report.html").read_text()
    trained(*other)

    # The figures are of final/, as a run that does nothing but evaluate it has them.
    plain = ["--model", str(run / "final"), "--learning_rate", "1e-20", "--max_steps", "1", "--resume", "never"]
    assert main(["--config", str(recipe), *plain, "--output_dir", str(tmp_path / "plain"), *other]) == EXIT_DONE
    found = json.loads((tmp_path / "plain/summary.json").read_text())["result"]["validation"]
    assert found["loss"] == pytest.approx(loss, rel=1e-5)

    # Further steps choose their best by the other data.
    longer, _ = trained("--max_steps", str(first["steps"] + 2), "--early_stopping_patience", "9", *other)
    assert longer["steps"] == first["steps"] + 2 and longer["best_step"] >= first["steps"]
    assert longer["best_metric"] >= longer["result"]["validation"]["loss"] or how[0] == "--early_stopping_patience"


def test_a_run_that_has_ended_is_evaluated_on_another_test_split(recipe: Path, tmp_path: Path) -> None:
    flags = ["--config", str(recipe), "--output_dir", str(tmp_path / "run"), "--max_steps", "2"]
    found = []
    for words in "abc def", "abc def", "something else":
        test = held_out(tmp_path, "test", words)[1]
        (tmp_path / "data.py").write_text(DATA.format(train=tmp_path / "documents.jsonl", test=test))
        assert main([*flags, "--dataset", f"{tmp_path}/data.py:documents"]) == EXIT_DONE
        found.append(json.loads((tmp_path / "run/summary.json").read_text())["result"]["test"]["loss"])
    assert found[0] == found[1] != found[2]
