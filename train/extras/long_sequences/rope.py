"""Models on sequences longer than they were trained for: scaled rotary positions, attention with a window."""

import math
from typing import Any

from transformers import PretrainedConfig

from train.records import UserError, one_line


def scale_positions(config: PretrainedConfig, kind: str, factor: float | None, max_length: int) -> None:
    """Linear position interpolation (arXiv 2306.15595) or YaRN (arXiv 2309.00071), and more positions by the factor.

    Raises UserError if the model has no such positions.
    """
    rope: dict[str, Any] | None = getattr(config, "rope_parameters", None)
    positions: int | None = getattr(config, "max_position_embeddings", None)
    if not rope or not positions:
        raise UserError(f"rope_scaling: {kind} scales rotary positions; {config.model_type} has none: leave it out.")
    # By kind of layer, where these differ: those that see a window never see a distance that they do not know.
    nested = {name: part for name, part in rope.items() if isinstance(part, dict)}
    scaled = nested.get("full_attention", rope if not nested else None)
    problem, was = None, (scaled or {}).get("rope_type", "default")
    trained = (scaled or {}).get("original_max_position_embeddings", positions)  # fewer where YaRN made them more
    if scaled is None:
        problem = f"{config.model_type} does not have a layer with full attention"
    elif was == "linear" or was not in ("default", kind):
        problem = f"{config.model_type} already scales its own ({was})"
    elif factor is None and max_length <= positions:
        problem = f"max_length {max_length} is within the model's {positions} positions"
    if scaled is None or problem:
        raise UserError(f"rope_scaling: {kind}: {problem}: leave it out.")
    factor = factor or max_length / trained
    changed = {**scaled, "rope_type": kind, "factor": float(factor)}
    changed |= {"original_max_position_embeddings": trained} if kind == "yarn" else {}
    changed.pop("attention_factor", None)  # that of another factor; by default it follows from this one
    if getattr(config, "head_dim", 0) is None:  # as Mixtral's, by which transformers 5.23 would multiply for YaRN
        config.head_dim = config.hidden_size // config.num_attention_heads
    config.max_position_embeddings = math.ceil(trained * factor)
    config.rope_parameters = {**rope, "full_attention": changed} if nested else changed
    try:
        getattr(config, "validate", lambda: None)()  # or it would be refused when final/ is written
    except Exception as error:
        raise UserError(f"rope_scaling: {kind} is not for {config.model_type}: {one_line(error, 200)}") from None


def slide(config: PretrainedConfig, window: int) -> None:
    """Gives the layers that slide a window of so many tokens; where none does, all of them; else UserError."""
    layers = getattr(config, "layer_types", None) or ["full_attention"]
    slides = any("sliding" in kind for kind in layers)
    if not hasattr(config, "sliding_window") or not (slides or set(layers) == {"full_attention"}):
        remedy = "leave it out, or take a model that knows one (mistral, qwen3, gemma3, modernbert ...)"
        raise UserError(f"sliding_window: {window}: {config.model_type} sees all positions: {remedy}.")
    if hasattr(config, "use_sliding_window"):
        config.use_sliding_window = True
    config.sliding_window = window
    if getattr(config, "layer_types", None) and not slides:
        config.layer_types = ["sliding_attention"] * len(layers)
