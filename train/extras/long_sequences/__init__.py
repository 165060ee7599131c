"""Long sequences: packing, attention within documents, scaled rotary positions, sliding windows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from train import extras
from train.config import Config, option
from train.launch import Launch
from train.records import Parts, Run, UsageError


@dataclass(frozen=True)
class Options:
    """Packing, positions and windows."""

    packing: bool = option(False, "Pack examples into rows: none sees another; a row counts as one.", everyday=True)
    max_tokens_per_micro_batch: int | None = option(
        None,
        "Form micro-batches by tokens, padding included; needs global_batch_size.",
        ge=1,
        replaces=("micro_batch_size", "gradient_accumulation_steps"),
    )
    rope_scaling: Literal["none", "linear", "yarn"] = option("none", "For sequences longer than the model's positions.")
    rope_scaling_factor: float | None = option(None, "Positions ÷ those first trained for.", gt=1, needs="rope_scaling")
    sliding_window: int | None = option(None, "Attention sees this many tokens back (modernbert: to each side).", ge=1)


class Extra(extras.Extra):
    def check(self, config: Config, launch: Launch) -> None:
        own, model, length = config.of(Options), config.architecture, config.data.max_length
        if model.is_function and (own.rope_scaling != "none" or own.sliding_window):
            raise UsageError("rope_scaling and sliding_window change a transformers config; module:function has none.")
        if (tokens := own.max_tokens_per_micro_batch) is not None:
            given, optim = f"max_tokens_per_micro_batch: {tokens}", config.optimization
            is_fixed = optim.micro_batch_size != 1 or optim.gradient_accumulation_steps is not None
            if is_fixed or optim.global_batch_size is None:
                remedy = "give global_batch_size, and neither micro_batch_size nor gradient_accumulation_steps"
                raise UsageError(f"{given} makes as many micro-batches as it takes: {remedy}.")
            if tokens < length:
                why = f"does not hold one example of max_length {length}"
                raise UsageError(f"{given} {why}: give {length} or more, or a smaller max_length.")
        if own.packing:
            from train.tasks import load_task  # which takes seconds

            if load_task(config.data.task).labelled:
                raise UsageError(f"packing: {config.data.task} has one label a row: leave it out, or use another task.")

    def identity(self, run: Run, data: extras.PreparedData) -> dict[str, Any]:
        own = run.config.of(Options)
        rope_scaling = None if own.rope_scaling == "none" else own.rope_scaling
        factor = rope_scaling and (own.rope_scaling_factor or f"for max_length {run.config.data.max_length}")
        scaled = {"rope_scaling": rope_scaling, "rope_scaling_factor": factor}
        return {"packing": own.packing, **scaled, "sliding_window": own.sliding_window}

    def change_data(self, run: Run, data: extras.PreparedData) -> extras.PreparedData:
        own = run.config.of(Options)
        if own.max_tokens_per_micro_batch is not None:
            from train.extras.long_sequences.token_batches import TokenRounds

            data = replace(data, loading=replace(data.loading, rounds=TokenRounds(own.max_tokens_per_micro_batch)))
        if not own.packing:
            return data
        from train.extras.long_sequences.packing import packed

        return packed(run, data)

    def finished(self, run: Run, parts: Parts, summary: dict[str, Any]) -> None:
        if (tokens := run.config.of(Options).max_tokens_per_micro_batch) is not None:
            summary.update(micro_batch_size=None, gradient_accumulation_steps=None, max_tokens_per_micro_batch=tokens)

    def change_model_config(self, run: Run, model_config: Any) -> dict[str, Any]:
        if (text := model_config and model_config.get_text_config()) is not None:
            from train.extras.long_sequences.rope import scale_positions, slide

            own = run.config.of(Options)
            if own.rope_scaling != "none":
                scale_positions(text, own.rope_scaling, own.rope_scaling_factor, run.config.data.max_length)
            if own.sliding_window is not None:
                slide(text, own.sliding_window)
        return {}

    def check_model(self, run: Run, network: extras.Module, task: type[extras.Task], sizes: tuple[int, int]) -> None:
        from train.extras.long_sequences import attention

        is_tried = hasattr(network, "_from_config") or run.config.get("check_model") is not False
        if run.config.of(Options).packing and not run.is_planned and is_tried:
            attention.check_documents(network, sizes[0], run.config.data.max_length)

    def change_model(self, run: Run, network: extras.Module, task: type[extras.Task]) -> None:
        from train.extras.long_sequences import attention, heads

        if run.accelerator.device.type == "cuda" and not run.is_planned:
            heads.divide_attention()
        packing, length = run.config.of(Options).packing, run.config.data.max_length
        slides = not packing and attention.has_short_windows(network, length)
        if packing or (slides and (run.is_planned or not attention.obstacle_to_documents(network, shared=False))):
            attention.set_document_boundaries(network)
        elif slides:
            run.outputs.note(f"WARNING: windows take a mask of {length:,} × {length:,}: a small copy cannot do without")
