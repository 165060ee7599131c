"""Adapters: LoRA (arXiv 2106.09685) trains small ones next to frozen weights; QLoRA (2305.14314) has those in 4 bits.

peft puts its layers inside the network, so head, generation and names stay where they are. Gradients and optimizer
state exist for the adapters alone. A checkpoint holds the adapters and a digest of the frozen weights: a run that
resumes builds these again, and stops if they came out different.
"""

import copy
import hashlib
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import transformers
import xxhash
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from transformers.pytorch_utils import Conv1D

from train.extras.adapters import Options
from train.model import set_use_cache
from train.optim import parameter_counts
from train.records import Run, UserError, one_line
from train.state import StoredBlocks, TrainingState
from train.tasks import load_task

ADAPTER = "default"  # peft's name for an adapter that has none
NEW_HEADS = {"SequenceClassification": "SEQ_CLS", "TokenClassification": "TOKEN_CLS"}
TASK_TYPES = {"CausalLM": "CAUSAL_LM", "Seq2SeqLM": "SEQ_2_SEQ_LM", **NEW_HEADS}  # peft's words


def compute_dtype(run: Run) -> torch.dtype:
    """In which type layers in 4 bits multiply: that of autocast, else of the weights."""
    names = {"bf16": "bfloat16", "fp16": "float16"}
    return getattr(torch, names.get(run.accelerator.mixed_precision, run.config.architecture.dtype))


def quantization(run: Run, model_config: Any) -> transformers.BitsAndBytesConfig:
    """How ``from_pretrained`` is to load the weights: 4 bits, NF4, and the scales quantised again; heads stay whole."""
    auto_class = load_task(run.config.data.task).auto_class
    with torch.device("meta"):
        trust = run.config.architecture.trust_remote_code
        model = getattr(transformers, auto_class).from_config(model_config, trust_remote_code=trust)
    return transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=compute_dtype(run),
        llm_int8_skip_modules=_heads(model, auto_class),
    )


def add_adapter(model: nn.Module, run: Run, auto_class: str) -> None:
    """Freezes ``model`` and puts fp32 adapters next to its layers, in place; a classifier's new head is trained whole.

    Says so where weights are left out, such as fused experts; raises UserError where no layer has one of the names, or
    what adapters of the layers learn could not be added to their weights.
    """
    from peft import LoraConfig, inject_adapter_in_model
    from peft.utils import transformers_weight_conversion as conversion

    own = run.config.of(Options)
    outside = tuple(f"{name}." for name in _heads(model, auto_class))  # of the linear layers that all-linear means
    linear = [n for n, module in model.named_modules() if _is_linear(module) and not f"{n}.".startswith(outside)]
    if own.adapter == "qlora":
        _quantize(model, linear, compute_dtype(run))
    heads, all_linear = _trained_heads(model, auto_class), own.lora_target_modules == ("all-linear",)
    settings = LoraConfig(
        r=own.lora_rank,
        lora_alpha=own.lora_alpha,  # type: ignore - a fraction is as good
        lora_dropout=own.lora_dropout,
        target_modules=linear if all_linear else list(own.lora_target_modules),
        task_type=TASK_TYPES.get(auto_class.removeprefix("AutoModelFor")),
        base_model_name_or_path=run.config.architecture.model,
    )
    try:  # peft would take names of dense MLPs for those of fused experts
        with patch.object(conversion, "convert_peft_config_for_transformers", lambda *_, **__: None):
            inject_adapter_in_model(settings, model, ADAPTER)
    except (ValueError, TypeError) as error:
        raise UserError(f"adapter: {own.adapter} does not work with this model: {one_line(error, 300)}") from None
    found = [f".{name}" for name in _adapted(model)]
    if unknown := [n for n in own.lora_target_modules if not (all_linear or any(f.endswith(f".{n}") for f in found))]:
        raise UserError(f"lora_target_modules: no layer that takes adapters is called {', '.join(unknown)}.")
    _check_layers(model)
    settings.modules_to_save = heads or None  # after peft has looked: they are trained in place, without copies
    for head in map(model.get_submodule, heads):
        head.requires_grad_(True)
        head.register_forward_pre_hook(_as_its_weights)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    left = {name: parameter.numel() for name, parameter in model.named_parameters() if parameter.ndim > 2}
    share, four_bits = sum(left.values()) / parameter_counts(model)[1], own.adapter == "qlora"
    if share >= 0.01 and (four_bits or all_linear):
        what = f"adapter: {share:.0%} of the parameters are not those of linear layers ({next(iter(left))} ...)"
        run.outputs.note(f"{what}: they {'stay in full precision and ' if four_bits else ''}get no adapters")


def _as_its_weights(head: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """``inputs`` in the type of a head in fp32 after layers in 16 bits; where there is autocast, it sees to that."""
    is_cast = not inputs or torch.is_autocast_enabled(inputs[0].device.type)
    return inputs if is_cast else tuple(x.to(next(head.parameters()).dtype) for x in inputs)


def _check_layers(model: nn.Module) -> None:
    """Raises UserError where an adapter cannot be added to a weight that is its layer's alone, as ``final/`` needs."""
    named = reversed(list(model.named_parameters(remove_duplicate=False)))  # of several names the first is told
    others = {id(parameter): name for name, parameter in named if ".base_layer." not in name}
    for layer in _adapted(model).values():
        base: Any = layer.get_base_layer()
        other = others.get(id(base.weight))
        if other or not (isinstance(base, nn.Embedding) or _is_linear(base)):
            reason = f"one of them shares {other}" if other else f"one of them is a {type(base).__name__}"
            why = f"what adapters of these layers learn cannot be added to weights ({reason})"
            remedy = "name linear layers and embeddings that share no weight with others, or give all-linear"
            raise UserError(f"lora_target_modules: {why}: {remedy}. get_output_embeddings() tells which is the head.")


def _adapted(model: nn.Module) -> dict[str, Any]:
    """The layers of peft that have an adapter, by name."""
    from peft.tuners.lora import LoraLayer

    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}


def _is_linear(module: nn.Module) -> bool:
    """Whether an adapter next to it takes part; some layers' weights are used elsewhere, some routers give more."""
    if not isinstance(module, nn.Linear | Conv1D) or isinstance(module, NonDynamicallyQuantizableLinear):
        return False
    if type(module).forward in (nn.Linear.forward, Conv1D.forward) or hasattr(module, "quant_state"):
        return True
    layer: Any = module  # a forward of its own is tried
    with suppress(Exception), torch.no_grad():
        return isinstance(layer(layer.weight.new_zeros(1, layer.in_features)), Tensor)
    return False


def _heads(model: nn.Module, auto_class: str) -> list[str]:
    """Names of modules that are neither quantised nor get adapters by ``all-linear``."""
    output = getattr(model, "get_output_embeddings", lambda: None)()  # type: ignore
    return [n for n, module in model.named_modules() if module is output] + _trained_heads(model, auto_class)


def _trained_heads(model: nn.Module, auto_class: str) -> list[str]:
    """Names of the modules of a transformers model that no pretrained model brings: classifiers' heads and the like."""
    base = getattr(model, getattr(model, "base_model_prefix", ""), None)  # type: ignore
    if auto_class.removeprefix("AutoModelFor") not in (*NEW_HEADS, "QuestionAnswering") or base is None:
        return []
    return [name for name, child in model.named_children() if child is not base and list(child.parameters())]


def _quantize(model: nn.Module, linear: list[str], compute_dtype: torch.dtype) -> None:
    """Turns the ``linear`` layers of ``model`` into 4-bit ones, those that are not yet."""
    from bitsandbytes.functional import quantize_4bit
    from bitsandbytes.nn import Linear4bit, Params4bit

    how = {"blocksize": 64, "compress_statistics": True, "quant_type": "nf4"}
    whole = set(getattr(model, "_keep_in_fp32_modules", None) or ())  # type: ignore - T5 casts to the type of such a weight
    every = [id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False)]
    for name in linear:
        is_alone = every.count(id((layer := model.get_submodule(name)).weight)) == 1  # else it stays whole
        if type(layer) is nn.Linear and is_alone and whole.isdisjoint(name.split(".")):
            has_bias, (data, scales) = layer.bias is not None, quantize_4bit(layer.weight.data, **how)
            new: Any = Linear4bit(layer.in_features, layer.out_features, has_bias, device="meta", quant_type="nf4")
            new.weight = Params4bit(data, quant_state=scales, bnb_quantized=True, module=new, **how)  # type: ignore
            new.quant_state = scales
            new.bias = nn.Parameter(layer.bias.data, requires_grad=False) if has_bias else None
            model.set_submodule(name, new)
    if not (quantized := [module for module in model.modules() if isinstance(module, Linear4bit)]):
        raise UserError("adapter: qlora finds no nn.Linear to keep in 4 bits in this model. Use lora.")
    for layer in quantized:
        layer.compute_dtype, layer.compute_type_is_set = compute_dtype, True
        layer.register_forward_pre_hook(_refuse_bytes)
        if layer.bias is not None:  # the layer would do that in its first forward, after it was digested
            layer.bias.data = layer.bias.data.to(compute_dtype)
        # On some processors the layer repacks its weights in evaluation, and has no gradient from then on.
        layer.support_avx512bf16_for_cpu = False
    model.is_loaded_in_4bit = True  # type: ignore - by which peft knows


def _refuse_bytes(layer: nn.Module, inputs: tuple[Any, ...]) -> None:
    if inputs and not inputs[0].is_floating_point():  # nothing would be learned through it
        why = "this model casts to the type of a weight, which in 4 bits is that of bytes"
        raise UserError(f"adapter: qlora does not work here: {why}. Use --adapter lora.")


class AdapterState(TrainingState):
    """A run whose checkpoints hold what is trained, and a digest of what is not."""

    merges = True  # the whole model for ``final/``, or only the adapter

    def checkpointed_tensors(self) -> dict[str, Tensor]:
        """Adapters, trained heads and persistent buffers, by name."""
        kept = {id(p) for p in self.model.parameters() if p.requires_grad} | {id(b) for b in self.model.buffers()}
        return {name: tensor for name, tensor in self.model_tensors().items() if id(tensor) in kept}

    def values(self) -> dict[str, Any]:
        return {**super().values(), "frozen": self.frozen_digest}

    def restore(self, blocks: StoredBlocks, values: Mapping[str, Any]) -> None:
        """Takes everything back in place; raises UserError for other frozen weights than those of the adapters."""
        stored = str(values.get("frozen"))
        own = self.digest_frozen(hashlib.sha256) if len(stored) == 64 else self.frozen_digest  # 64: earlier versions
        if stored != own:
            digests = f"{own[:16]}, those of the checkpoint {stored[:16]}"
            remedy = "Give the same ones, or --resume never to start from scratch"
            why = "the model's files, type or quantisation have changed"
            raise UserError(f"the frozen weights have the digest {digests}: {why}. {remedy}.")
        super().restore(blocks, values)

    frozen_digest = cached_property(lambda self: self.digest_frozen(xxhash.xxh3_128))

    def digest_frozen(self, kind: Callable[[], Any]) -> str:
        """A digest of the weights that are not trained and the scales of those in 4 bits; all ranks take part."""
        digest = kind()
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                continue
            state = getattr(parameter, "quant_state", None)
            scales = state.as_dict(packed=True) if state is not None else {}
            for own, tensor in ((name, parameter), *((f"{name}.{key}", scale) for key, scale in scales.items())):
                full = _full(tensor)
                digest.update(f"{own} {full.dtype} {tuple(full.shape)}".encode())
                digest.update(full.view(-1).view(torch.uint8).numpy().data)
        return digest.hexdigest()

    @property
    def merged_bytes(self) -> int:
        """What the merged model takes, and merging its largest weight in fp32."""
        weights: Any = [getattr(p, "quant_state", None) or p for p in self.model.parameters()]
        return sum(w.shape.numel() * w.dtype.itemsize for w in weights) + 12 * max(w.shape.numel() for w in weights)

    def save_pretrained(self, folder: Path, keep: bool) -> None:
        if self.merges:
            return super().save_pretrained(folder, keep)
        model: Any = self.plain_model(folder, keep)
        if keep and hasattr(model, "_from_config"):
            set_use_cache(model, True)
            for part in filter(None, (model.config, model.generation_config)):  # the run's window, classes, end
                part.save_pretrained(folder)
        return None

    def whole_tensors(self, keep: bool) -> dict[str, Tensor]:
        """As in the core, with adapters merged into weights, which have a plain model's names and types."""
        whole = super().whole_tensors(keep)
        if not keep:
            return {}
        packed: dict[str, Any] = {n: p for n, p in self.model.named_parameters() if getattr(p, "quant_state", None)}
        for name, parameter in packed.items():
            from bitsandbytes.functional import dequantize_4bit

            whole[name] = dequantize_4bit(parameter.detach(), parameter.quant_state).cpu()
        for name, layer in _adapted(self.model).items():
            # Linear layers have lora_A and lora_B, embeddings lora_embedding_A and lora_embedding_B.
            down, up = (whole.pop(key) for key in [key for key in whole if key.startswith(f"{name}.lora_")])
            delta, weight = layer.scaling[ADAPTER] * (up @ down), whole.pop(f"{name}.base_layer.weight")
            transposed = getattr(layer, "fan_in_fan_out", False) or isinstance(layer.get_base_layer(), nn.Embedding)
            merged = weight.float() + (delta.T if transposed else delta)  # rounded once, below
            whole[f"{name}.weight"] = merged.to(weight.dtype)
            if f"{name}.base_layer.bias" in whole:
                whole[f"{name}.bias"] = whole.pop(f"{name}.base_layer.bias").to(weight.dtype)
        added = tuple(f"{name}." for name in packed)  # what a layer in 4 bits adds to the names of a model
        return {name: tensor for name, tensor in whole.items() if not name.startswith(added)}

    def plain_model(self, folder: Path, keep: bool) -> nn.Module:
        """Writes adapters and heads as ``PeftModel.from_pretrained`` reads them; returns a model without adapters."""
        # Without what peft adds to the name of a weight, and to that of an adapter inside the model
        added = re.compile(rf"\.(base_layer|{ADAPTER})(?=\.|$)")
        named = {added.sub("", name): p for name, p in self.model.named_parameters() if p.requires_grad}
        trained = {f"base_model.model.{name}": _full(parameter) for name, parameter in named.items()}
        model: Any = self.model
        if not keep:
            return model
        folder = folder / "adapter"
        folder.mkdir(exist_ok=True)
        model.peft_config[ADAPTER].save_pretrained(str(folder))
        save_file(trained, folder / "adapter_model.safetensors")
        if not hasattr(model, "_from_config"):  # not of transformers
            return model
        config = copy.deepcopy(model.config)
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        with torch.device("meta"):
            plain = type(model)(config)
        plain.generation_config = getattr(model, "generation_config", None)
        return plain


def _full(tensor: Tensor) -> Tensor:
    """``tensor`` whole and on the CPU; all ranks take part."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().cpu().contiguous()
