"""Models and training steps whose memory is predicted and measured by ``memory_accuracy.py``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from scripts.benchmarks.building import config_of
from train.config import to_values
from train.memory.predict import Job, Target

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
    return [large(model, task, length, size, **settings) for model, task, length, size, settings in cases]


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
        settings: flags; and ``padded``: the batch has an attention mask.
    """
    padded, accumulation = settings.pop("padded", False), settings.pop("gradient_accumulation_steps", 1)
    kind = architecture["model_type"]
    if kind == "gpt2":
        architecture = {**architecture, "n_positions": length}
    values = {
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
        task=task,
        vocab_size=VOCABULARY_OF_SMALL,
        micro_batch_size=size,
        length=length,
        accumulates=accumulation > 1,
        num_labels=8 if task == "sequence_classification" else 0,
        padded=padded,
    )


def title(job: Job) -> str:
    """A case in a few words."""
    defaults = to_values(config_of({}))
    changed = {k: v for k, v in job.values.items() if v != defaults[k]}
    for name in ("model_config", "tokenizer", "max_length", "micro_batch_size"):
        changed.pop(name, None)
    if not job.accumulates:
        changed.pop("gradient_accumulation_steps", None)
    settings = ", ".join(f"{k} {v}" for k, v in changed.items())
    return f"{job.values['model_config']['model_type']} {job.task} {job.micro_batch_size}×{job.length}" + (
        f" {'padded ' if job.padded else ''}{settings}".rstrip()
    )
