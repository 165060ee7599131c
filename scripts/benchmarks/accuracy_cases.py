"""Models and training steps whose memory is predicted and measured by ``memory_accuracy.py``."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from typing import Any

from scripts.benchmarks.building import config_of
from train.config import to_values
from train.memory.devices import Device
from train.memory.predict import Job, Target
from train.memory.question import target_of

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
    "opt": {"hidden_size": 256, "ffn_dim": 1024, "num_hidden_layers": 4, "num_attention_heads": 4,
            "word_embed_proj_dim": 256, "attention_dropout": 0.0},
    "gpt_neox": {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 3, "num_attention_heads": 4},
    "mixtral": {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3, "num_attention_heads": 4,
                "num_key_value_heads": 2, "num_local_experts": 4},
    "qwen3_moe": {"hidden_size": 256, "moe_intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4,
                  "num_key_value_heads": 2, "num_experts": 8, "num_experts_per_tok": 2},
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


VOCABULARY, VOCABULARY_OF_SMALL = 50304, 8000
LOSS_PACKAGES = {"liger": "liger_kernel", "cce": "cut_cross_entropy"}
LARGE_VOCABULARIES = {"llama-1b": 128256, "llama-3b": 128256, "qwen2-0.5b": 151936}


def small_cases() -> list[Job]:
    """Real steps that take seconds on a CPU: every family, with and without each technique."""
    every = [
        small(family, task, length, size, mixed_precision=precision)
        for family, task, length, size in (
            ("llama", "causal_lm", 512, 2),
            ("gpt2", "causal_lm", 384, 2),
            ("qwen2", "causal_lm", 512, 1),
            ("qwen3", "causal_lm", 320, 3),
            ("opt", "causal_lm", 256, 2),
            ("gpt_neox", "causal_lm", 256, 2),
            ("mixtral", "causal_lm", 384, 2),
            ("qwen3_moe", "causal_lm", 384, 2),
            ("bert", "masked_lm", 512, 2),
            ("modernbert", "masked_lm", 384, 2),
            ("bert", "sequence_classification", 384, 4),
            ("modernbert", "sequence_classification", 512, 2),
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
    with_each = [small("llama", "causal_lm", 512, 2, **settings) for settings in techniques]
    full = {"gradient_checkpointing": "full"}
    others = [
        small("gpt2", "causal_lm", 384, 2, **full),
        small("gpt2", "causal_lm", 384, 2, **full, loss="chunked", gradient_accumulation_steps=2),
        small("qwen2", "causal_lm", 512, 1, loss="chunked", gradient_accumulation_steps=2),
        small("bert", "masked_lm", 512, 2, padded=True),
        small("bert", "masked_lm", 512, 2, **full, loss="chunked"),
        small("modernbert", "masked_lm", 384, 2, padded=True),
        small("modernbert", "sequence_classification", 512, 2, padded=True, **full),
        small("bert", "sequence_classification", 384, 4, padded=True, mixed_precision="bf16"),
        small("llama", "causal_lm", 1536, 1, **full, loss="chunked"),
        small("llama", "sequence_classification", 512, 4, padded=True),
        small("llama", "sequence_classification", 512, 4, padded=True, **full),
        small("mixtral", "causal_lm", 384, 2, **full, loss="chunked"),
        small("llama", "causal_lm", 512, 2, eval_batch_size=64),
        small("gpt2", "causal_lm", 384, 2, eval_batch_size=64, loss="chunked"),
        small("bert", "sequence_classification", 384, 4, padded=True, **full, eval_batch_size=32),
        small("mixtral", "causal_lm", 384, 2, **full, eval_batch_size=16),
    ]
    return [*every, *with_each, *others]


SCALES = ((20, 1), (40, 2), (100, 4), (float("inf"), 8))
"""Below so many GiB, lengths are so many times those of a card of 16 GiB."""


def scale_of(device: Device) -> int:
    """How many times the lengths for 16 GiB a card takes."""
    return next(scale for gib, scale in SCALES if device.total_bytes < gib * 2**30)


def large_cases(device: Device) -> list[Job]:
    """Steps for one card, sized to its memory, those with padding and grouped queries in fp32 first.

    Where a card has no bf16 it takes fp16, and no bf16 weights. What is predicted not to fit is for the caller to
    leave out.
    """
    x = scale_of(device)
    has_bf16 = (device.compute_capability or (8, 0)) >= (8, 0)
    half, fp32 = {"mixed_precision": "bf16" if has_bf16 else "fp16"}, {"mixed_precision": "no"}
    fp16, padded, twice = {"mixed_precision": "fp16"}, {"padded": True}, {"gradient_accumulation_steps": 2}
    full, selective = {"gradient_checkpointing": "full"}, {"gradient_checkpointing": "selective"}
    chunked = {"loss": "chunked"}
    both = half | full | chunked
    cases: list[tuple[str, str, int, int, dict[str, Any]]] = [
        ("modernbert-base", "masked_lm", 1024, 2 * x, half | padded),
        ("bert-base", "masked_lm", 512, 8 * x, half | padded),
        ("modernbert-base", "sequence_classification", 4096, x, half | padded | full),
        ("qwen2-0.5b", "causal_lm", 2048 * x, 1, fp32 | full | chunked),
        ("qwen2-0.5b", "causal_lm", 8192 * x, 1, both),
        ("qwen2-0.5b", "causal_lm", 2048 * x, 1, fp16 | selective | chunked),
        ("llama-125m", "causal_lm", 1024, 2 * x, fp32),
        ("llama-125m", "causal_lm", 8192, x, half | chunked | {"packing": True}),
        ("qwen2-0.5b", "causal_lm", 8192 * x, 1, both | {"gradient_checkpointing_offload": True}),
        ("qwen2-0.5b", "causal_lm", 8192 * x, 1, both | {"tiled_mlp": True}),
        ("qwen2-0.5b", "causal_lm", 1024 * x, 1, half),
        ("llama-125m", "causal_lm", 2048, x, fp16),
        ("gpt2-125m", "causal_lm", 1024, 2 * x, half),
        ("gpt2-125m", "causal_lm", 2048, x, fp16 | twice),
        ("bert-base", "sequence_classification", 512, 8 * x, fp16),
        ("llama-1b", "causal_lm", 1024 * x, 1, both),
        ("llama-1b", "causal_lm", 4096 * x, 1, both | twice),
        ("llama-1b", "causal_lm", 2048 * x, 1, half | chunked | {"optimizer": "sgd", "max_grad_norm": None}),
        ("llama-3b", "causal_lm", 2048 * x, 1, both),
        ("llama-1b", "causal_lm", 2048 * x, 1, both | {"optimizer": "adafactor"}),
    ]
    if has_bf16:
        weights, in_backward = {"dtype": "bfloat16"}, {"optimizer_in_backward": True, "max_grad_norm": None}
        cases += [
            ("qwen2-0.5b", "causal_lm", 8192 * x, 1, both | in_backward),
            ("llama-1b", "causal_lm", 1024 * x, 1, weights | full),
            ("qwen2-0.5b", "causal_lm", 8192 * x, 1, both | weights | {"optimizer_offload": True}),
            ("llama-3b", "causal_lm", 4096 * x, 1, weights | full | chunked),
        ]
    losses = [name for name, package in LOSS_PACKAGES.items() if importlib.util.find_spec(package) and has_bf16]
    cases += [("qwen2-0.5b", "causal_lm", 8192 * x, 1, half | full | {"loss": name}) for name in losses]
    if importlib.util.find_spec("bitsandbytes"):
        weights = {"dtype": "bfloat16"} if has_bf16 else {}
        cases += [
            ("llama-1b", "causal_lm", 4096 * x, 1, both | weights | {"adapter": "qlora"}),
            ("llama-1b", "causal_lm", 2048 * x, 1, both | {"optimizer": "adamw_8bit"}),
        ]
    made = [large(model, task, length, size, **settings) for model, task, length, size, settings in cases]
    return [replace(case, target=target_of(device)) for case in made]


def small(family: str, task: str, length: int, size: int, **settings: Any) -> Job:
    """A step of SMALL[family] on a CPU."""
    return job({"model_type": family, **SMALL[family]}, task, length, size, **settings)


def large(model: str, task: str, length: int, size: int, **settings: Any) -> Job:
    """A step of LARGE[model] on a card."""
    case = job(dict(LARGE[model]), task, length, size, **settings)
    return replace(case, target=Target("cuda"), vocab_size=LARGE_VOCABULARIES.get(model, VOCABULARY))


def job(architecture: dict[str, Any], task: str, length: int, size: int, **settings: Any) -> Job:
    """A training step of a model with random weights.

    Args:
        architecture: fields of the model's config.
        settings: flags; and ``padded``: the batch has an attention mask. ``eval_batch_size``: evaluates, too.
    """
    padded, accumulation = settings.pop("padded", False), settings.pop("gradient_accumulation_steps", 1)
    kind = architecture["model_type"]
    if kind == "gpt2":
        architecture = {**architecture, "n_positions": length}
    values = {
        "task": task,
        "model_config": architecture,
        "tokenizer": "bytes",
        "max_length": length,
        "micro_batch_size": size,
        "gradient_accumulation_steps": accumulation,
        **settings,
    }
    return Job(
        values=to_values(config_of(values)),
        target=Target("cpu"),
        vocab_size=VOCABULARY_OF_SMALL,
        micro_batch_size=size,
        length=length,
        accumulates=accumulation > 1,
        num_labels=8 if task == "sequence_classification" else 0,
        padded=padded,
        eval_padded=padded,
        eval_batch_size=settings.get("eval_batch_size"),
    )


def title(job: Job) -> str:
    """A case in a few words."""
    defaults = to_values(config_of({}))
    changed = {k: v for k, v in job.values.items() if v != defaults[k]}
    for name in ("task", "model_config", "tokenizer", "max_length", "micro_batch_size"):
        changed.pop(name, None)
    if not job.accumulates:
        changed.pop("gradient_accumulation_steps", None)
    settings = ", ".join(f"{k} {v}" for k, v in changed.items())
    return f"{model_name(job)} {job.values['task']} {job.micro_batch_size}×{job.length}" + (
        f" {'padded ' if job.padded else ''}{settings}".rstrip()
    )


def model_name(job: Job) -> str:
    """Of a model in ``LARGE`` its name there, else its type."""
    own = job.values["model_config"]
    known = (name for name, fields in LARGE.items() if fields.items() <= own.items() and len(fields) > 2)
    return next(known, own["model_type"])
