"""Losses over a large vocabulary that never hold all logits."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from train import extras
from train.config import Config, option
from train.launch import Launch
from train.records import Run, UsageError, UserError


@dataclass(frozen=True)
class Options:
    """The loss over a large vocabulary."""

    loss: Literal["auto", "full", "chunked", "cce", "liger"] = option(
        "auto", "full holds all logits; chunked, cce and liger never do; auto: the best of them from 4,096 classes on."
    )
    label_smoothing: float = option(0.0, "Share of each target spread over all classes (arXiv 1512.00567).", ge=0, lt=1)
    z_loss: float = option(0.0, "Coefficient of log² Z, which keeps logits from drifting (PaLM: 1e-4).", ge=0)


class Extra(extras.Extra):
    def check(self, config: Config, launch: Launch) -> None:
        own = config.of(Options)
        if own.loss == "cce" and (own.label_smoothing or own.z_loss):
            raise UsageError("loss: cce does not support label_smoothing and z_loss: give --loss auto or chunked.")
        if own.loss == "liger" and (config.optimization.mixed_precision or launch.precision) == "fp16":
            raise UsageError("loss: liger gives wrong gradients with mixed_precision: fp16: give chunked, or use bf16.")

    def change_loss(self, run: Run, model: Any) -> None:
        from train.extras.losses import chunked, in_head
        from train.tasks import cross_entropy_sum

        asked, terms, accelerator = run.config.of(Options).loss, chunked.objective_of(run.config), run.accelerator
        place = in_head.place_of(model.model, accelerator.device, accelerator.mixed_precision, run.launch.tp_size > 1)
        kind, objective, obstacle = in_head.choose_loss(asked, model, place, terms, True if run.is_planned else None)
        own = model.loss_in_head is not None  # which the task or another extra has set
        if terms != chunked.PLAIN:
            if own or model.loss_sum is not cross_entropy_sum:
                raise UserError("label_smoothing and z_loss are for cross-entropy; this run has another loss. Use 0.")
            model.loss_sum = terms.loss_sum
        if kind != "full" and not own:
            in_head.use_loss_in_head(model, kind, objective)
        how = in_head.describe_loss(kind, objective, asked, place, obstacle)
        run.outputs.note("loss: the task's or an extra's" if own else how)

    def memory_measure(self, run: Run, model: Any) -> tuple[str, Callable[[], bool]] | None:
        from train.extras.losses import chunked, in_head

        def chunk() -> bool:
            place = in_head.place_of(model.model, run.accelerator.device, run.accelerator.mixed_precision)
            with suppress(UserError):  # it does not work with this model
                terms = in_head.choose_loss("chunked", model, place, chunked.objective_of(run.config))[1]
                in_head.use_loss_in_head(model, "chunked", terms)
            return model.loss_in_head is not None

        return None if model.loss_in_head else ("the loss never holds all logits from now on", chunk)
