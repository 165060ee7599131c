"""Pages in docs/ name flags and files that there are, and figures that were measured or that another page explains."""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path
from typing import Any

import pytest
from support import ROOT

from scripts.benchmarks import preferences
from train.config import CORE, fields

PAGE = (ROOT / "docs" / "techniques.md").read_text(encoding="utf-8")
OTHERS = {  # of the planner, the studies and the launcher
    "config", "device", "sharding", "world_size", "run", "sizes", "toggle", "num_processes",
}  # fmt: skip


def words_of(page: str) -> str:
    """The page with single spaces, so that a sentence is found however it is broken."""
    return " ".join((ROOT / "docs" / page).read_text(encoding="utf-8").split())


def found_in(name: str) -> dict[str, Any]:
    return json.loads((ROOT / "docs" / "results" / f"{name}.json").read_text(encoding="utf-8"))


def test_flags_on_the_page_exist() -> None:
    named = set(re.findall(r"--(\w+)", PAGE))
    assert len(named) > 25 and named - set(fields()) - OTHERS == set()


def test_files_on_the_page_exist() -> None:
    for path in {*re.findall(r"accelerate_configs/\w+\.yaml|scripts/\w+\.py", PAGE)}:
        assert (ROOT / path).is_file(), path


def anchors_of(page: Path) -> set[str]:
    """What a link to a heading of ``page`` may name: GitHub's words, without punctuation."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    shown = (re.sub(r"\[(.+?)\]\(.+?\)", r"\1", heading) for heading in headings)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in shown}


def test_links_lead_to_files_and_headings_that_there_are() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    links = [(page, to) for page in pages for to in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8"))]
    own = [(page, *to.partition("#")[::2]) for page, to in links if "://" not in to]
    lost = []
    for page, file, heading in own:
        target = (page.parent / file).resolve() if file else page
        if not target.exists() or (heading and heading not in anchors_of(target)):
            lost.append((page.name, f"{file}#{heading}"))
    assert len(own) > 200 and sum(bool(heading) for *_, heading in own) > 20
    assert lost == []


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
    found = found_in("gradient_overhead-cpu")
    ratios = {(row["flag"], row["workload"]["name"]): row["ratio"]["median"] for row in found["results"]}
    short, long = (ratios["gradient_health", name] for name in ("short", "long"))
    page = words_of("extras/gradients.md")
    assert f"{short:.2f} times as long as another with 128 tokens, {long:.2f} times with 2,048" in page
    costs = [f"{max(0.0, 2 * (ratio - 1)):.1f} %" for ratio in (short, long)]  # of one of 50 steps
    assert f"{costs[0]} and {costs[1]} at the default interval" in page
    short, long = (100 * (ratios["gradient_noise_scale", name] - 1) for name in ("short", "long"))
    assert f"{short:.1f} % with 128 tokens each, {long:.1f} % with 2,048" in page and max(short, long) < 2
    halves = (found["results"][i]["ratio"] for i in (2, 3))
    spread = " and ".join(f"{half['quartile_1']:.2f} to {half['quartile_3']:.2f}" for half in halves)
    assert f"the middle half of the ratios is {spread}" in page


def test_costs_of_losses_on_a_cpu_are_those_measured() -> None:
    found = found_in("loss_kernels-cpu")
    page = words_of("extras/losses.md")
    rows = {(row["hidden"], row["loss"]): row for row in found["rows"]}
    full, chunked = (rows[256, name] for name in ("full", "chunked"))
    sizes = [f"{row['extra_bytes'] / 2**20:,.1f}" for row in (full, chunked)]
    assert f"full takes {sizes[0]} MiB, chunked {sizes[1]}" in page
    ratios = {key: f"{row['ratio']:.2f} ×" for key, row in rows.items()}
    saved = f"and {ratios[256, 'chunked']} the time (median of {found['rounds']} paired rounds; "
    assert saved + f"{ratios[512, 'chunked']} with a hidden size of 512)" in page
    again = (ratios[hidden, "chunked, recomputed"] for hidden in (256, 512))
    assert "it takes {} the time of full ({} with 512)".format(*again) in page


@pytest.mark.parametrize(
    ("page", "results", "rows"),
    [
        ("activations", "recompute-cpu", 7),
        ("activations", "recompute-nvidia-h200", 6),
        ("long_sequences", "sequence_length-cpu", 5),
    ],
)
def test_rows_of_a_table_are_those_of_the_page_that_it_cites(page: str, results: str, rows: int) -> None:
    text = (ROOT / "docs" / "extras" / f"{page}.md").read_text(encoding="utf-8")
    after = text.split(f"](../results/{results}.md)")[1].split("| --- ")[1].split("\n\n")[0].splitlines()[1:]
    cited = (ROOT / "docs" / "results" / f"{results}.md").read_text(encoding="utf-8").splitlines()
    assert len(after) == rows and set(after) <= set(cited)


def test_the_comparison_with_trl_is_that_of_its_results() -> None:
    found = found_in("preferences-cpu")
    text = (ROOT / "docs" / "results" / "preferences-cpu.md").read_text(encoding="utf-8")
    assert preferences.is_equal_work(found) and text == preferences.page(found)
    page = (ROOT / "docs" / "long_sequences.md").read_text(encoding="utf-8").split("## Against TRL's DPOTrainer")[1]
    for kind, rows in found["results"].items():
        for who, row in rows.items():
            name = f"TRL's DPOTrainer {found['trl']}" if who == preferences.TRL else "`recipes/dpo.py`"
            share, time = row["peak_bytes"] / rows[preferences.TRL]["peak_bytes"], row["time_ratio"]["median"]
            assert f"| {name} | {kind} | {row['peak_bytes'] / 2**20:,.0f} | {share:.2f} | {time:.2f} |" in page
    load = found["workload"]
    said = f"prompts of {load['length'] - load['answer']:,} tokens and answers of {load['answer']:,}"
    assert said in words_of("long_sequences.md")


def test_seconds_of_a_prediction_are_those_measured() -> None:
    rows = found_in("prediction_seconds")["rows"]
    small, large = ([row["seconds"] for row in rows if row["model"] == f"llama-{size}"] for size in ("125m", "8b"))
    assert len(small) == len(large) == 6
    least, most = ([f"{end(of):.1f}" for of in (small, large)] for end in (min, max))
    spans = [f"{low} to {high} s for" for low, high in zip(least, most, strict=True)]
    assert f"on 2 cores {spans[0]} 125M parameters and {spans[1]} 8B, " in words_of("memory.md")
    assert f"whatever the length: {spans[0]} 125M and {spans[1]} 8B parameters on 2 cores" in words_of(
        "extras/memory.md"
    )


def test_what_a_checkpoint_costs_is_what_was_measured() -> None:
    runs = found_in("saving-cpu")["runs"].values()
    background, waited = ({name: statistics.median(run[name] for run in way) for name in way[0]} for way in runs)
    stalls = [f"{way['longest_stall_seconds']:.2f} s" for way in (background, waited)]
    size = f"{waited['checkpoint_bytes'] / 2**20:,.0f} MiB"
    longer = f"{background['step_after_a_save_seconds'] - background['other_steps_seconds']:.1f} s longer"
    extra, promises = words_of("extras/endurance.md"), words_of("reliability.md")
    assert f"A checkpoint of {size} stalls training for {stalls[0]} instead of {stalls[1]}; " in extra
    assert f"{stalls[0]} instead of {stalls[1]} for {size} (" in promises
    assert f"the next step takes {longer}" in extra and f"the next step takes {longer}" in promises


def test_bytes_and_losses_of_optimizers_are_those_measured() -> None:
    found, page = found_in("optimizers-cpu"), words_of("extras/optimizers.md")
    of = {(row["optimizer"], row["weights"]): row for row in found["kept"]}
    flags = {
        "(adamw)": ("adamw", "float32"),
        "`--optimizer adamw_8bit`": ("adamw_8bit", "float32"),
        "`--optimizer_in_backward --max_grad_norm None`": ("adamw, in backward", "float32"),
        "both": ("adamw_8bit, in backward", "float32"),
        "`--dtype bfloat16 --bf16_update stochastic`": ("adamw, stochastic", "bfloat16"),
        "`--dtype bfloat16 --bf16_update kahan`": ("adamw, kahan", "bfloat16"),
    }
    for flag, key in flags.items():
        state, peak = (of[key][f"{name}_bytes_per_parameter"] for name in ("state", "peak"))
        assert f"| {flag} | {state:.2f} | {peak:.2f} | " in page, flag
    losses = {row["variant"]: row["loss"] for row in found["learnt"]}
    *closest, plain = sorted(value for name, value in losses.items() if name.startswith("bf16"))
    fp32 = losses["fp32 weights"]
    said = f"{fp32:.3f} nats per byte with fp32 weights, {plain:.3f} with bf16 weights and plain rounding, "
    assert said + f"{closest[0]:.3f} to {closest[-1]:.3f} with stochastic rounding" in page
