"""LoRA and QLoRA: small trained matrices next to frozen layers, by peft."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from train import extras
from train.config import Config, option
from train.figures import gib
from train.launch import Launch
from train.records import Progress, Run, UsageError, exchange

NEEDS = {"lora": (("peft",), ("ddp", "fsdp2")), "qlora": (("peft", "bitsandbytes"), ("ddp",))}  # packages, engines
of_lora = functools.partial(option, needs="adapter")


@dataclass(frozen=True)
class Options:
    """Small trained matrices next to frozen layers."""

    adapter: Literal["none", "lora", "qlora"] = option("none", "qlora: with the frozen layers in 4 bits.")
    lora_rank: int = of_lora(16, "Rank of the trained matrices.", ge=1)
    lora_alpha: float = of_lora(32.0, "Output of the matrices is scaled by lora_alpha / lora_rank.", gt=0)
    lora_dropout: float = of_lora(0.0, "Dropout of their inputs.", ge=0, lt=1)
    lora_target_modules: tuple[str, ...] = of_lora(
        ("all-linear",), "Layers that get them, by the ends of their names; all-linear: all except the output head."
    )
    merge_adapter: bool = of_lora(True, "final/ also gets the whole model, merged, if host memory has room for it.")


class Extra(extras.Extra):
    def check(self, config: Config, launch: Launch) -> None:
        own = config.of(Options)
        if own.adapter == "none":
            return
        names = own.lora_target_modules
        if not names or (len(names) > 1 and "all-linear" in names):
            said = " ".join(names) or "no layer"
            raise UsageError(f"lora_target_modules: {said}: give all-linear alone, or names such as q_proj v_proj.")
        packages, engines = NEEDS[own.adapter]
        if missing := [name for name in packages if importlib.util.find_spec(name) is None]:
            install = f"pip install -e '.[{own.adapter}]' (or pip install {' '.join(missing)})"
            raise UsageError(f"adapter: {own.adapter} needs {' and '.join(missing)}, not installed: {install}.")
        if launch.engine not in engines or launch.mp_size > 1:
            files = " or ".join(f"accelerate_configs/{engine}.yaml" for engine in engines)
            raise UsageError(f"adapter: {own.adapter} does not work with {launch}: use {files}, or adapter: none.")

    def identity(self, run: Run, data: extras.PreparedData) -> dict[str, Any]:
        own = vars(run.config.of(Options))
        return {n: own[n] for n in own if n != "merge_adapter"} if own["adapter"] != "none" else {}

    def change_model_config(self, run: Run, model_config: Any) -> dict[str, Any]:
        own = run.config.of(Options)
        if own.adapter != "qlora" or model_config is None or hasattr(model_config, "quantization_config"):
            return {}
        from train.extras.adapters.lora import quantization

        return {"quantization_config": quantization(run, model_config)}

    def change_model(self, run: Run, network: extras.Module, task: type[extras.Task]) -> None:
        if run.config.of(Options).adapter != "none":
            from train.extras.adapters.lora import add_adapter

            add_adapter(network, run, task.auto_class)

    def state(
        self, model: extras.Module, optimizer: Any, identity: Mapping[str, Any], scaler: Any
    ) -> extras.TrainingState | None:
        if "adapter" not in identity:  # a function's model that has adapters of its own is saved as peft does
            return None
        from train.extras.adapters.lora import AdapterState

        return AdapterState(model, optimizer, identity, scaler)

    def finishing(self, run: Run, state: Any, progress: Progress) -> None:
        """Settles whether ``final/`` gets the whole model: without room for it, the process would be killed there."""
        if (own := run.config.of(Options)).adapter == "none":
            return
        from train.extras.host_memory import free_host_bytes

        outputs, needed, free = run.outputs, state.merged_bytes, exchange(free_host_bytes(environment={}))[0]
        was_merged = outputs.from_main(lambda: any(outputs.final.glob("model*.safetensors")))
        is_again = outputs.seconds_to_first_step is None  # a finished run is evaluated, and keeps its model
        state.merges = (own.merge_adapter and needed < free) or (is_again and was_merged)
        if own.merge_adapter and not state.merges:
            room = f"the merged model needs {gib(needed)} of host memory, of which {gib(free)} is free"
            outputs.note(f"final/ holds the adapter alone: {room}. peft's merge_and_unload merges it elsewhere.")
