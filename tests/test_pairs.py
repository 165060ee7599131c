"""Every pair of settings that save memory or time, and change no number: one run for several pairs, all compared."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from faults import processes
from support import sampled

from train.figures import read_metrics
from train.records import EXIT_DONE

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA = {"--model_config": json.dumps({"model_type": "llama", "num_key_value_heads": 2, **SIZES})}
MODERNBERT = {"--model_config": json.dumps({"model_type": "modernbert", "local_attention": 16, **SIZES})}
BASES: dict[str, dict[str, Any]] = {
    "causal_lm": LLAMA,
    "packed": {**LLAMA, "--packing": True},
    "masked_lm": {**MODERNBERT, "--task": "masked_lm"},
    "classification": {**MODERNBERT, "--task": "sequence_classification", "--z_loss": 0},
    "lora": {**LLAMA, "--adapter": "lora"},
}
LINE = "alpha beta gamma delta epsilon zeta eta theta "
COMMON = {
    "--tokenizer": "bytes",
    "--max_length": 48,
    "--global_batch_size": 8,
    "--max_steps": 4,
    "--learning_rate": 0.01,
    "--weight_decay": 0.1,
    "--validation_fraction": 0.2,
    "--label_smoothing": 0.1,
    "--z_loss": 0.001,
    "--eval_every_steps": 2,
    "--save_every_steps": 2,
    "--log_every_steps": 1,
    "--cpu_threads": 1,
    "--predict_memory": False,
}
FULL = {"--gradient_checkpointing": "full"}
FACTORS: dict[str, dict[str, dict[str, Any]]] = {
    "micro-batches": {
        "of 1": {"--micro_batch_size": 1},
        "of 4": {"--micro_batch_size": 4},
        "of 100 tokens": {"--max_tokens_per_micro_batch": 100},
    },
    "processes": {"one": {}, "ddp": {"processes": 2}, "fsdp2": {"processes": 2, "environment": processes.FSDP2}},
    "checkpointing": {
        "none": {},
        "full": FULL,
        "every second": {**FULL, "--gradient_checkpointing_every_n_layers": 2},
        "offloaded": {**FULL, "--gradient_checkpointing_offload": True},
        "selective": {"--gradient_checkpointing": "selective"},
    },
    "MLPs": {"whole": {}, "tiled": {"--tiled_mlp": True}},
    "loss": {"full": {"--loss": "full"}, "chunked": {"--loss": "chunked"}},
    "attention": {"sdpa": {}, "eager": {"--attn_implementation": "eager"}},
    "optimizer": {"on the device": {}, "on the host": {"--optimizer_offload": True}},
    "batches": {"made here": {}, "made by a worker": {"--dataloader_num_workers": 1}},
    "gradients": {"as they are": {}, "looked at": {"--gradient_health": True}},
    "memory": {"measured": {}, "not measured": {"--measure_memory": False, "--rehearse": False}},
    "evaluation": {"in batches of 1": {"--eval_batch_size": 1}, "in batches of 3": {"--eval_batch_size": 3}},
    "checkpoints": {"in the background": {}, "waited for": {"--save_in_background": False}},
    "run": {"in one go": {}, "resumed": {"resumed": True}},
}
REFUSED = {("processes", "fsdp2"), ("optimizer", "on the host")}
"""A pair that does not work together, and says so."""
Pair = frozenset[tuple[str, str]]


def rows(seed: int = 0) -> Iterator[dict[str, str]]:
    """A value of each factor, in rows that together have every pair of values; greedily, so few of them."""
    draw = random.Random(seed)
    values = [(factor, value) for factor, of_factor in FACTORS.items() for value in of_factor]
    missing = {frozenset(p) for p in combinations(values, 2) if p[0][0] != p[1][0]} - {frozenset(REFUSED)}
    while missing:
        row = set(draw.choice(sorted(map(sorted, missing))))
        for factor in draw.sample([*FACTORS], len(FACTORS)):
            if factor not in dict(row):
                allowed = [(factor, value) for value in FACTORS[factor] if not {*row, (factor, value)} >= REFUSED]
                row.add(max(allowed, key=lambda new: sum(frozenset({new, old}) in missing for old in row)))
        missing -= {frozenset(pair) for pair in combinations(row, 2)}
        yield dict(sorted(row))


def run(folder: Path, settings: dict[str, Any]) -> dict[tuple[Any, ...], float]:
    """Every figure of the log that depends on the numbers computed."""
    settings = dict(settings)
    ranks, environment = settings.pop("processes", 1), settings.pop("environment", None)
    is_resumed, words = settings.pop("resumed", False), ["--dataset", folder / "documents.jsonl"]
    output = folder / "run"
    for name, value in {**COMMON, **settings, "--output_dir": output}.items():
        words += [name, value]
    for _ in range(1 + is_resumed):
        for ended in processes.run(words, folder / "logs", ranks, _without_charts, environment):
            assert ended.status == EXIT_DONE, ended.said
        if is_resumed:  # from step 2
            shutil.rmtree(output / "checkpoints" / "step-00000004", ignore_errors=True)
            (output / "summary.json").unlink()
    measured = ("loss", "grad_norm", "learning_rate", "tokens_seen")
    kinds = [row for row in read_metrics(output / "metrics.jsonl") if row["kind"] in ("train", "evaluation")]
    return {(r["kind"], r["step"], r.get("split"), name): r[name] for r in kinds for name in measured if name in r}


def _without_charts(rank: int) -> None:
    from train.extras.report import charts

    charts.svg = lambda *arguments, **options: "<svg></svg>"  # which take longer than the run


@pytest.mark.slow
@pytest.mark.parametrize("name", sampled(BASES, len(BASES)))
def test_every_pair_of_settings_that_change_no_number_gives_those_of_the_plain_run(tmp_path: Path, name: str) -> None:
    draw, base = random.Random(0), BASES[name]
    texts = [LINE[: draw.randint(2, 44)] * draw.choice([1, 1, 3]) for _ in range(60)]
    documents = [{"text": text, "label": draw.choice("abc")} for text in texts]
    plain = run(_folder(tmp_path, "plain", documents), {**base, "--micro_batch_size": 2})
    assert {step for _, step, _, _ in plain} == {1, 2, 3, 4}
    for number, row in enumerate(rows()):
        settings = dict(base)
        for factor, value in row.items():
            settings |= FACTORS[factor][value]
        if name == "packed" and row["micro-batches"] == "of 100 tokens":  # whose rows are all of one length
            settings |= {"--max_tokens_per_micro_batch": None, "--micro_batch_size": 2}
        if name == "classification":  # its loss has no choice
            settings.pop("--loss", None)
        assert run(_folder(tmp_path, str(number), documents), settings) == pytest.approx(plain, rel=1e-4), row


def _folder(parent: Path, name: str, documents: Sequence[Mapping[str, str]]) -> Path:
    folder = parent / name
    folder.mkdir()
    (folder / "documents.jsonl").write_text("".join(json.dumps(document) + "\n" for document in documents))
    return folder
