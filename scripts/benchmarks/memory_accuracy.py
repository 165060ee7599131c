"""Predicted against measured memory of the same training step, case by case, each measured in its own process.

    python scripts/benchmarks/memory_accuracy.py --device cpu --output docs/results/memory_accuracy-cpu

On a CPU the truth is torch's own allocator events (``torch.profiler``), on a card ``torch.cuda.max_memory_allocated``
and ``max_memory_reserved``. The prediction is made from the same :class:`train.memory.predict.Job`, by a process that
never sees a real tensor.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))

from train.config import Config, from_values, to_values  # noqa: E402
from train.records import UserError  # noqa: E402
from train.launch import let_segments_grow  # noqa: E402
from train.memory.predict import Job, Prediction, Predictor, Target  # noqa: E402

AUTO_CLASS = {
    "causal_lm": "AutoModelForCausalLM",
    "masked_lm": "AutoModelForMaskedLM",
    "sequence_classification": "AutoModelForSequenceClassification",
}
SMALL = {
    "llama": {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4, "num_attention_heads": 8,
              "num_key_value_heads": 4},
    "gpt2": {"n_embd": 256, "n_layer": 4, "n_head": 4, "attn_pdrop": 0.0},
    "qwen2": {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4, "num_attention_heads": 4,
              "num_key_value_heads": 2, "tie_word_embeddings": True},
    "qwen3": {"hidden_size": 320, "intermediate_size": 700, "num_hidden_layers": 3, "num_attention_heads": 5,
              "num_key_value_heads": 1, "head_dim": 64, "tie_word_embeddings": True},
    "bert": {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 1024,
             "attention_probs_dropout_prob": 0.0},
    "modernbert": {"hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4},
    "t5": {"d_model": 192, "d_kv": 48, "d_ff": 384, "num_layers": 3, "num_heads": 4, "feed_forward_proj": "gated-gelu"},
    "opt": {"hidden_size": 256, "ffn_dim": 1024, "num_hidden_layers": 4, "num_attention_heads": 4,
            "word_embed_proj_dim": 256, "attention_dropout": 0.0},
    "gpt_neox": {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 3, "num_attention_heads": 4},
}  # fmt: skip
LARGE = {
    "llama-125m": {"model_type": "llama", "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12,
                   "num_attention_heads": 12, "num_key_value_heads": 12},
    "gpt2-125m": {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "attn_pdrop": 0.0},
    "qwen2-0.5b": {"model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
                   "num_attention_heads": 14, "num_key_value_heads": 2, "tie_word_embeddings": True},
    "llama-1b": {"model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
                 "num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": True},
    "llama-3b": {"model_type": "llama", "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28,
                 "num_attention_heads": 24, "num_key_value_heads": 8, "tie_word_embeddings": True},
    "modernbert-base": {"model_type": "modernbert"},
    "bert-base": {"model_type": "bert", "attention_probs_dropout_prob": 0.0},
}  # fmt: skip


def small_cases() -> list[Job]:
    """Real steps that take seconds on a CPU: every family, with and without each technique."""
    every = [
        job(family, task, length, size, mixed_precision=precision)
        for family, task, length, size in (
            ("llama", "causal_lm", 512, 2),
            ("gpt2", "causal_lm", 384, 2),
            ("qwen2", "causal_lm", 512, 1),
            ("qwen3", "causal_lm", 320, 3),
            ("opt", "causal_lm", 256, 2),
            ("gpt_neox", "causal_lm", 256, 2),
            ("bert", "masked_lm", 512, 2),
            ("modernbert", "masked_lm", 384, 2),
            ("bert", "sequence_classification", 384, 4),
            ("modernbert", "sequence_classification", 512, 2),
            ("t5", "seq2seq", 256, 2),
        )
        for precision in ("no", "bf16")
    ]
    techniques = [
        {"gradient_checkpointing": "full"},
        {"gradient_checkpointing": "selective"},
        {"gradient_checkpointing": "full", "gradient_checkpointing_every_n_layers": 2},
        {"gradient_accumulation_steps": 3},
        {"gradient_accumulation_steps": 2, "gradient_checkpointing": "full", "mixed_precision": "bf16"},
        {"max_grad_norm": None},
        {"max_grad_norm": None, "max_grad_value": 0.5},
        {"grad_norm_type": "inf"},
        {"optimizer": "adafactor"},
        {"optimizer": "sgd"},
        {"dtype": "bfloat16"},
        {"loss": "chunked"},
        {"loss": "chunked", "mixed_precision": "bf16", "gradient_checkpointing": "full"},
        {"attn_implementation": "eager"},
    ]
    with_each = [job("llama", "causal_lm", 512, 2, **settings) for settings in techniques]
    others = [
        job("gpt2", "causal_lm", 384, 2, gradient_checkpointing="full"),
        job("gpt2", "causal_lm", 384, 2, gradient_checkpointing="full", loss="chunked", gradient_accumulation_steps=2),
        job("qwen2", "causal_lm", 512, 1, loss="chunked", gradient_accumulation_steps=2),
        job("bert", "masked_lm", 512, 2, padded=True),
        job("bert", "masked_lm", 512, 2, gradient_checkpointing="full", loss="chunked"),
        job("modernbert", "masked_lm", 384, 2, padded=True),
        job("modernbert", "sequence_classification", 512, 2, padded=True, gradient_checkpointing="full"),
        job("bert", "sequence_classification", 384, 4, padded=True, mixed_precision="bf16"),
        job("t5", "seq2seq", 256, 2, gradient_checkpointing="full"),
        job("llama", "causal_lm", 1536, 1, gradient_checkpointing="full", loss="chunked"),
    ]
    return [*every, *with_each, *others]


def large_cases() -> list[Job]:
    """Steps of 2 GiB and more for one card, most of them within 80 GiB."""
    full, chunked = {"gradient_checkpointing": "full"}, {"loss": "chunked"}
    fp16, bf16, twice = {"mixed_precision": "fp16"}, {"mixed_precision": "bf16"}, {"gradient_accumulation_steps": 2}
    cases: list[tuple[str, str, int, int, dict[str, Any]]] = [
        ("llama-125m", "causal_lm", 1024, 8, bf16),
        ("llama-125m", "causal_lm", 2048, 8, fp16),
        ("llama-125m", "causal_lm", 8192, 2, bf16 | chunked),
        ("llama-125m", "causal_lm", 1024, 8, {}),
        ("gpt2-125m", "causal_lm", 1024, 8, bf16),
        ("gpt2-125m", "causal_lm", 4096, 2, fp16 | twice),
        ("qwen2-0.5b", "causal_lm", 4096, 1, bf16),
        ("qwen2-0.5b", "causal_lm", 16384, 1, bf16 | full),
        ("qwen2-0.5b", "causal_lm", 32768, 1, bf16 | full | chunked),
        ("qwen2-0.5b", "causal_lm", 8192, 1, fp16 | chunked | {"gradient_checkpointing": "selective"}),
        ("llama-1b", "causal_lm", 2048, 1, bf16),
        ("llama-1b", "causal_lm", 8192, 1, bf16 | full),
        ("llama-1b", "causal_lm", 8192, 2, fp16 | full | chunked | twice),
        ("llama-1b", "causal_lm", 65536, 1, bf16 | full | chunked),
        ("llama-1b", "causal_lm", 4096, 1, {"dtype": "bfloat16"} | full),
        ("llama-1b", "causal_lm", 4096, 2, bf16 | {"optimizer": "sgd", "max_grad_norm": None}),
        ("llama-3b", "causal_lm", 8192, 1, bf16 | full | chunked),
        ("modernbert-base", "masked_lm", 4096, 4, bf16),
        ("modernbert-base", "masked_lm", 2048, 4, bf16 | {"padded": True}),
        ("bert-base", "sequence_classification", 512, 32, fp16),
        ("bert-base", "masked_lm", 512, 32, bf16 | {"padded": True}),
    ]
    return [job(model, task, length, size, "cuda", **settings) for model, task, length, size, settings in cases]


def job(
    model: str, task: str, length: int, size: int, device: str = "cpu", padded: bool = False, **settings: Any
) -> Job:
    """A step of ``model``, a key of SMALL or LARGE."""
    architecture = dict(LARGE[model]) if model in LARGE else {"model_type": model, **SMALL[model]}
    vocab_sizes = dict.fromkeys(SMALL, 8000) | {"llama-1b": 128256, "llama-3b": 128256, "qwen2-0.5b": 151936}
    if model.startswith("gpt2"):
        architecture["n_positions"] = length
    accumulation = settings.pop("gradient_accumulation_steps", 1)
    classifies = task == "sequence_classification"
    values = {
        **to_values(Config()),
        "model_config": architecture,
        "tokenizer": "bytes",
        "max_length": length,
        "micro_batch_size": size,
        "gradient_accumulation_steps": accumulation,
        **settings,
    }
    return Job(
        values=values,
        target=Target(device),
        auto_class=AUTO_CLASS.get(task, "AutoModelForSeq2SeqLM"),
        vocab_size=vocab_sizes.get(model, 50304),
        micro_batch_size=size,
        length=length,
        accumulates=accumulation > 1,
        num_labels=8 if classifies else 0,
        padded=padded,
        input_names=("input_ids", "decoder_input_ids") if task == "seq2seq" else ("input_ids",),
    )


def title(job: Job) -> str:
    """A case in a few words."""
    changed = {k: v for k, v in job.values.items() if v != to_values(Config())[k]}
    for name in ("model_config", "tokenizer", "max_length", "micro_batch_size"):
        changed.pop(name, None)
    if not job.accumulates:
        changed.pop("gradient_accumulation_steps", None)
    kind = job.auto_class.removeprefix("AutoModelFor")
    settings = ", ".join(f"{k} {v}" for k, v in changed.items())
    return f"{job.values['model_config']['model_type']} {kind} {job.micro_batch_size}×{job.length}" + (
        f" {'padded ' if job.padded else ''}{settings}".rstrip()
    )


def measure(job: Job) -> dict[str, Any]:
    """The step of ``job`` for real, in this process; peak bytes of the last of three steps."""
    import torch
    from accelerate import Accelerator

    from train.memory.building import build
    from train.memory.predict import random_batch
    from train.runtime import resolve_precision
    from train.step import optimizer_step

    config, device = from_values(job.values), job.target.device_type
    torch.manual_seed(0)
    precision, _ = resolve_precision(config.optimization.mixed_precision or "no", torch.device(device))
    accelerator = Accelerator(cpu=device == "cpu", mixed_precision=precision)
    window = [random_batch(job, job.micro_batch_size) for _ in range(2 if job.accumulates else 1)]
    began = 0.0
    if device == "cuda":
        model, optimizer, _ = build(job, config.architecture, config, accelerator, initialised=True)
        for _ in range(3):
            torch.cuda.reset_peak_memory_stats()
            began = time.perf_counter()
            optimizer_step(accelerator, model, optimizer, window, config.optimization)
            torch.cuda.synchronize()
        return {
            "measured_bytes": torch.cuda.max_memory_allocated(),
            "reserved_bytes": torch.cuda.max_memory_reserved(),
            "seconds": (time.perf_counter() - began) / len(window),
            "skipped": bool(optimizer.step_was_skipped),
        }
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        model, optimizer, _ = build(job, config.architecture, config, accelerator, initialised=True)
        for _ in range(3):
            began = time.perf_counter()
            optimizer_step(accelerator, model, optimizer, window, config.optimization)
    assert profiler.profiler is not None and profiler.profiler.kineto_results is not None
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()  # pyright: ignore[reportAttributeAccessIssue]
        peak = max(peak, live)
    return {"measured_bytes": peak, "seconds": time.perf_counter() - began}


def measured_apart(job: Job, timeout_seconds: float) -> dict[str, Any]:
    """:func:`measure` in a process of its own; ``error`` where it failed."""
    command = [sys.executable, __file__, "--measure"]
    try:
        done = subprocess.run(
            command, input=json.dumps(asdict(job)), capture_output=True, text=True, timeout=timeout_seconds
        )
    except subprocess.TimeoutExpired:
        return {"error": f"took longer than {timeout_seconds:.0f} s"}
    if done.returncode:
        return {"error": (done.stderr.strip().splitlines() or ["no message"])[-1][:300]}
    return json.loads(done.stdout.splitlines()[-1])


def compare(jobs: list[Job], budget_seconds: float) -> list[dict[str, Any]]:
    """Rows of predicted and measured figures, the signed error in percent: above zero is predicted too much."""
    rows: list[dict[str, Any]] = []
    started = time.perf_counter()
    with Predictor() as predictor:
        for case in jobs:
            if time.perf_counter() - started > budget_seconds:
                rows.append({"case": title(case), "error": "left out: no time"})
                continue
            row: dict[str, Any] = {"case": title(case)}
            try:
                predictor.ask(case)
                row |= measured_apart(case, 240)
                predicted: Prediction = predictor.answer()
                row |= {
                    "predicted_bytes": predicted.peak_bytes,
                    "predicted_reserved_bytes": predicted.reserved_bytes,
                    "phase": predicted.phase,
                    "attention": list(predicted.attention_kernels),
                    "prediction_seconds": predicted.prediction_seconds,
                    "predicted_seconds": predicted.seconds,
                }
            except UserError as error:
                row["error"] = str(error)
            for found, foretold, name in (
                ("measured_bytes", "predicted_bytes", "error_percent"),
                ("reserved_bytes", "predicted_reserved_bytes", "reserved_error_percent"),
            ):
                if found in row and foretold in row:
                    row[name] = 100 * (row[foretold] / row[found] - 1)
            rows.append(row)
            print(line(row), flush=True)
    return rows


def line(row: dict[str, Any]) -> str:
    """A row for the terminal and for the table."""
    if "error_percent" not in row:
        return f"| {row['case']} | | | {row.get('error', '')} | | |"
    reserved = f"{row['reserved_error_percent']:+.2f} %" if "reserved_error_percent" in row else ""
    return (
        f"| {row['case']} | {row['measured_bytes'] / 2**20:,.1f} | {row['predicted_bytes'] / 2**20:,.1f} | "
        f"{row['error_percent']:+.4f} % | {reserved} | {row['prediction_seconds']:.1f} |"
    )


def write(path: Path, rows: list[dict[str, Any]], device: str) -> None:
    """JSON and a table."""
    from train.outputs_log import hardware, versions

    errors = [abs(row["error_percent"]) for row in rows if "error_percent" in row]
    reserved = [abs(row["reserved_error_percent"]) for row in rows if "reserved_error_percent" in row]
    summary = {
        "cases": len(rows),
        "compared": len(errors),
        "median_error_percent": statistics.median(errors) if errors else None,
        "worst_error_percent": max(errors, default=None),
        "worst_underestimate_percent": -min((r["error_percent"] for r in rows if "error_percent" in r), default=0.0),
        "worst_reserved_error_percent": max(reserved, default=None),
    }
    machine = {"hardware": hardware(), "versions": versions()}
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"device": device, **summary, **machine, "rows": rows}, indent=1)
    path.with_suffix(".json").write_text(text + "\n", encoding="utf-8")
    gpus = ", ".join(gpu["name"] for gpu in machine["hardware"]["gpus"])
    name = gpus if device == "cuda" else f"{machine['hardware']['cpu']}, {machine['hardware']['cpu_cores']} cores"
    used = ", ".join(f"{k} {v}" for k, v in machine["versions"].items())
    head = [
        f"# Predicted against measured memory: {device}",
        "",
        f"{name}; {used}. Written by `scripts/benchmarks/memory_accuracy.py`.",
        "",
        f"{summary['compared']} of {summary['cases']} cases compared. Error of the peak: median "
        f"{summary['median_error_percent']:.4f} %, worst {summary['worst_error_percent']:.4f} %."
        if errors
        else "No case could be compared.",
        "",
        "| case | measured MiB | predicted MiB | error | error of reserved | seconds to predict |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    path.with_suffix(".md").write_text("\n".join([*head, *map(line, rows)]) + "\n", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--output", type=Path, help="write OUTPUT.json and OUTPUT.md")
    parser.add_argument("--only", default="", help="only cases whose title contains this")
    parser.add_argument("--budget_seconds", type=float, default=3600, help="begin no case after this time")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    let_segments_grow()  # as a run does
    if options.measure:
        from train.memory.predict import job_from

        print(json.dumps(measure(job_from(json.load(sys.stdin)))))
        return 0
    jobs = small_cases() if options.device == "cpu" else large_cases()
    if options.device == "cuda":
        from train.memory.predict import this_target

        jobs = [replace(case, target=this_target()) for case in jobs]
    rows = compare([case for case in jobs if options.only in title(case)], options.budget_seconds)
    if options.output:
        write(options.output, rows, options.device)
    return 0 if all("error_percent" in row for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
