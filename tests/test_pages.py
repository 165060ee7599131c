"""Pages in docs/ name flags and files that there are, and figures that were measured or that another page explains."""

from __future__ import annotations

import json
import re

from support import ROOT

from train.config import CORE, fields

PAGE = (ROOT / "docs" / "techniques.md").read_text(encoding="utf-8")
OTHERS = {  # of the planner, the studies and the launcher
    "config", "device", "sharding", "world_size", "run", "sizes", "toggle", "num_processes",
}  # fmt: skip


def test_flags_on_the_page_exist() -> None:
    named = set(re.findall(r"--(\w+)", PAGE))
    assert len(named) > 25 and named - set(fields()) - OTHERS == set()


def test_files_on_the_page_exist() -> None:
    for path in {*re.findall(r"accelerate_configs/\w+\.yaml|scripts/\w+\.py", PAGE)}:
        assert (ROOT / path).is_file(), path


def test_defaults_of_the_core_on_the_page_of_the_loop_are_those_of_the_code() -> None:
    page = (ROOT / "docs" / "loop.md").read_text(encoding="utf-8").split("## Flags of the core")[1].split("## ")[0]
    rows = re.findall(r"^\| (`--.+?) \| (.*?) ?\| ", page, re.MULTILINE)
    of_core = {name for section in ("architecture", "optimization", "output") for name in vars(CORE[section]())}
    named = {name for names, _ in rows for name in re.findall(r"--(\w+)", names)}
    assert of_core - named == {"model", "model_config", "optimizer"}  # which other pages explain
    for names, default in rows:
        for name in re.findall(r"--(\w+)", names):
            expected = fields()[name][1].default
            assert default.strip("`") == ("" if expected is None else str(expected)), name


def test_flags_for_people_who_come_from_trainer_are_ours_and_theirs_are_not() -> None:
    after = (ROOT / "docs" / "forking.md").read_text(encoding="utf-8").split("## Coming from Trainer")[1]
    shared, table = after.split("\n## ")[0].split("| --- | --- |")
    left, right = zip(*(row.strip("| ").split(" | ") for row in table.strip().splitlines()), strict=True)
    theirs, ours = ({*re.findall(r"--(\w+)", " ".join(cells))} for cells in (left, [shared, *right]))
    without = {"eval_strategy", "save_strategy"}  # named as what there is not
    assert len(theirs) > 20 and (theirs | without) & set(fields()) == set()
    assert ours - without - set(fields()) == set()


def test_figures_on_the_page_are_those_of_the_memory_page() -> None:
    """Which a test compares with what the planner says, or with the results they are taken from."""
    explained = (ROOT / "docs" / "memory.md").read_text(encoding="utf-8")
    rows = [line for line in PAGE.splitlines() if re.search(r"\[[SP]\] \|$", line)]
    assert len(rows) == 3
    for row in rows:
        for figure in re.findall(r"\d+\.\d\d", row.rsplit("|", 2)[1]):
            assert figure in explained, figure


def test_costs_of_looking_at_gradients_are_those_measured() -> None:
    found = json.loads((ROOT / "docs" / "results" / "gradient_overhead-cpu.json").read_text(encoding="utf-8"))
    ratios = {(row["flag"], row["workload"]["name"]): row["ratio"]["median"] for row in found["results"]}
    short, long = (ratios["gradient_health", name] for name in ("short", "long"))
    page = " ".join((ROOT / "docs" / "extras" / "gradients.md").read_text(encoding="utf-8").split())
    assert f"{short:.2f} times as long as another with 128 tokens, {long:.2f} times with 2,048" in page
    costs = [f"{max(0.0, 2 * (ratio - 1)):.1f} %" for ratio in (short, long)]  # of one of 50 steps
    assert f"{costs[0]} and {costs[1]} at the default interval" in page
    short, long = (100 * (ratios["gradient_noise_scale", name] - 1) for name in ("short", "long"))
    assert f"{short:.1f} % with 128 tokens each, {long:.1f} % with 2,048" in page and max(short, long) < 2
    halves = (found["results"][i]["ratio"] for i in (2, 3))
    spread = " and ".join(f"{half['quartile_1']:.2f} to {half['quartile_3']:.2f}" for half in halves)
    assert f"the middle half of the ratios is {spread}" in page


def test_costs_of_losses_on_a_cpu_are_those_measured() -> None:
    found = json.loads((ROOT / "docs" / "results" / "loss_kernels-cpu.json").read_text(encoding="utf-8"))
    page = " ".join((ROOT / "docs" / "extras" / "losses.md").read_text(encoding="utf-8").split())
    rows = {(row["hidden"], row["loss"]): row for row in found["rows"]}
    full, chunked = (rows[256, name] for name in ("full", "chunked"))
    sizes = [f"{row['extra_bytes'] / 2**20:,.1f}" for row in (full, chunked)]
    assert f"full takes {sizes[0]} MiB, chunked {sizes[1]}" in page
    ratios = {key: f"{row['ratio']:.2f} ×" for key, row in rows.items()}
    saved = f"and {ratios[256, 'chunked']} the time (median of {found['rounds']} paired rounds; "
    assert saved + f"{ratios[512, 'chunked']} with a hidden size of 512)" in page
    again = (ratios[hidden, "chunked, recomputed"] for hidden in (256, 512))
    assert "it takes {} the time of full ({} with 512)".format(*again) in page
