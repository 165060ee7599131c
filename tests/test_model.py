"""The model builder, and activation checkpointing that changes memory but no gradient."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from made_tokenizers import tokenizer_of
from support import run_for
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from train.config import Config
from train.extras.activations.recompute import enable_checkpointing
from train.model import ModelWithLoss, build_model
from train.records import IGNORE, UserError
from train.state import TrainingState
from train.tasks import Task, load_task

BYTES = tokenizer_of("bytes")
END, PAD = 0, 1
SHAPE = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
LLAMA = {"model_type": "llama", **SHAPE, "num_key_value_heads": 2}
GPT2 = {"model_type": "gpt2", "n_embd": 16, "n_layer": 2, "n_head": 2}
CAUSAL, MASKED, CLASSES = map(load_task, ("causal_lm", "masked_lm", "sequence_classification"))


def built(
    model_config: dict[str, Any] | None = None,
    task: type[Task] = CAUSAL,
    max_length: int = 32,
    label_names: Sequence[str] = (),
    tokenizer: Any = BYTES,
    **options: Any,
) -> transformers.PreTrainedModel:
    """The network that a run with these options would train."""
    torch.manual_seed(0)
    config = Config().changed(task=task.name, model_config=model_config, max_length=max_length, **options)
    model = build_model(run_for(config), task, tokenizer, label_names).model
    assert isinstance(model, transformers.PreTrainedModel)
    return model


def batch(length: int = 12) -> tuple[dict[str, Tensor], Tensor]:
    ids = torch.arange(3, 3 + 2 * length).view(2, length)
    return {"input_ids": ids}, ids.clone()


def test_a_loss_may_read_the_options() -> None:
    class Weighted(CLASSES):
        def loss_sum(self, logits: Tensor, labels: Tensor) -> Tensor:  # type: ignore
            weights = torch.tensor((self.data.dataset_options or {})["weights"])
            return nn.functional.cross_entropy(logits.float(), labels, weights, reduction="sum")

    config = Config().changed(task=CLASSES.name, model_config=GPT2, dataset_options={"weights": [1.0, 3.0]})
    model, (inputs, _), labels = (
        build_model(run_for(config), Weighted, BYTES, ("a", "b")),
        batch(),
        torch.tensor([0, 1]),
    )
    model.eval()
    each = nn.functional.cross_entropy(model.model(**inputs).logits, labels, reduction="none")
    torch.testing.assert_close(model(inputs, labels), each[0] + 3 * each[1])


# Which models


def test_a_new_bart_ends_a_text_with_the_tokenizers_end_token() -> None:
    """Its own configuration has number 2, which is another token here, and transformers writes it at a limit."""
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
    network = built(
        {"model_type": "bart", **sizes, "encoder_attention_heads": 2, "decoder_attention_heads": 2}, CLASSES
    )
    assert network.config.forced_eos_token_id == END


@pytest.mark.parametrize(
    ("model_config", "task"),
    [
        (LLAMA, CAUSAL),
        (GPT2, CAUSAL),
        ({"model_type": "qwen3", **SHAPE, "num_key_value_heads": 1, "head_dim": 8}, CAUSAL),
        ({"model_type": "modernbert", **SHAPE}, MASKED),
        ({"model_type": "bert", **SHAPE}, MASKED),
        (LLAMA, CLASSES),
        ({"model_type": "bert", **SHAPE}, CLASSES),
        ({"model_type": "modernbert", **SHAPE}, CLASSES),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else value.name,
)
def test_model_from_an_architecture_learns_and_fits_the_tokenizer(model_config: dict, task: type[Task]) -> None:
    network = built(model_config, task, label_names=("no", "yes") if task is CLASSES else ())
    assert network.config.vocab_size == len(BYTES)
    assert network.config.max_position_embeddings == 32
    assert network.config.eos_token_id == END and network.config.pad_token_id == PAD
    if model_config["model_type"] == "modernbert":  # whose own are those of its vocabulary, beyond this one
        assert network.config.cls_token_id == network.config.sep_token_id == END
    inputs, labels = batch()
    labels = torch.tensor([0, 1]) if task is CLASSES else labels
    model, optimizer = ModelWithLoss(network), torch.optim.SGD(network.parameters(), lr=1e-3)
    model.eval()
    before = model(inputs, labels)
    before.backward()
    optimizer.step()
    assert torch.isfinite(before)
    assert model(inputs, labels).item() < before.item()


def test_weights_come_in_the_dtype_and_attention_asked_for() -> None:
    model = built(LLAMA, dtype="bfloat16", attn_implementation="eager")
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model.config._attn_implementation == "eager"
    assert model.config.use_cache is False


def test_no_part_of_a_model_keeps_keys_and_values_for_generation(tmp_path: Path) -> None:
    """An evaluation of 131,072 tokens would hold those of all layers: some 15 GB of a model of 0.6B."""
    source = "from transformers import AutoModelForCausalLM, AutoConfig\ndef build():\n    return "
    (tmp_path / "own.py").write_text(f"{source}AutoModelForCausalLM.from_config(AutoConfig.for_model(**{LLAMA}))\n")
    text = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    text |= {"num_key_value_heads": 1, "head_dim": 16}
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    gemma = {"model_type": "gemma3", "text_config": text, "vision_config": vision}
    for model in (built(gemma), built(model=f"{tmp_path}/own.py:build")):
        output = model.eval()(input_ids=torch.ones(1, 8, dtype=torch.long))
        assert output.past_key_values is None
        TrainingState(model, None, {}).save_pretrained(tmp_path / "final", keep=True)
        saved = json.loads((tmp_path / "final" / "config.json").read_text())
        assert {**saved, **saved.get("text_config", {})}["use_cache"] is True  # for generation


def test_an_assertion_of_a_model_is_told_in_one_line() -> None:
    with pytest.raises(UserError, match=r"model 'flaubert' cannot be built: .*multiple of n_heads"):
        built({"model_type": "flaubert", "emb_dim": 30, "n_heads": 4, "n_layers": 1}, MASKED)


def test_attention_that_does_not_exist_is_refused() -> None:
    with pytest.raises(UserError, match=r"llama.* cannot be built: .*flush_attention"):
        built(LLAMA, attn_implementation="flush_attention")


def test_saved_model_is_loaded_from_its_folder(tmp_path: Path) -> None:
    saved = built(LLAMA)
    saved.save_pretrained(tmp_path)
    loaded = built(model=str(tmp_path))
    ids = batch()[0]["input_ids"]
    assert torch.equal(saved.eval()(ids).logits, loaded.eval()(ids).logits)
    with pytest.raises(UserError, match="max_length: 33"):
        built(model=str(tmp_path), max_length=33)


def test_saved_language_model_becomes_a_classifier(tmp_path: Path) -> None:
    saved = built(LLAMA)
    saved.save_pretrained(tmp_path)
    classifier = built(model=str(tmp_path), task=CLASSES, label_names=("a", "b", "c"))
    assert classifier.config.id2label == {0: "a", 1: "b", 2: "c"}
    assert torch.equal(classifier.get_input_embeddings().weight, saved.get_input_embeddings().weight)  # type: ignore


@pytest.mark.parametrize("stored_pad", [None, 7])
def test_classifier_of_a_causal_model_looks_at_the_last_token_of_each_row(
    tmp_path: Path, stored_pad: int | None
) -> None:
    original = built(LLAMA)
    original.config.pad_token_id = stored_pad
    original.save_pretrained(tmp_path)
    model = built(model=str(tmp_path), task=CLASSES, label_names=("a", "b")).eval()
    short = torch.tensor([[END, 40, 7, END]])
    padded = torch.tensor([[END, 40, 7, END, PAD, PAD], [END, 9, 9, 9, 9, END]])
    mask = torch.tensor([[1, 1, 1, 1, 0, 0], [1] * 6])
    together = model(padded, attention_mask=mask).logits[0]
    torch.testing.assert_close(together, model(short).logits[0])


def test_padding_that_a_models_positions_begin_behind_stays_its_own(tmp_path: Path) -> None:
    """A classifier looks for the tokenizer's; RoBERTa's embeddings count from that with which it was trained."""
    fields: Any = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    transformers.RobertaModel(transformers.RobertaConfig(vocab_size=300, pad_token_id=7, **fields)).save_pretrained(
        tmp_path
    )
    config = Config().changed(task=CLASSES.name, max_length=32, model=str(tmp_path))
    model: Any = build_model(run_for(config), CLASSES, BYTES, ("a", "b")).model
    assert (model.config.pad_token_id, model.roberta.embeddings.padding_idx) == (PAD, 7)


ENDING = {
    "bart": {"model_type": "bart", "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 16}
    | {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "decoder_ffn_dim": 16},
    "t5": {"model_type": "t5", "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2},
}
"""Whose classifiers take the state at the last end of each text; the second's file says nothing of a first token."""


@pytest.mark.parametrize("name", ENDING)
@pytest.mark.parametrize("is_stored", [True, False])
def test_classifier_of_an_encoder_and_decoder_looks_at_the_end_mark_of_the_tokenizer(
    tmp_path: Path, name: str, is_stored: bool
) -> None:
    """Which is another one than that of the model's own tokenizer, or none by that name."""
    (tmp_path / "config.json").write_text(json.dumps({**ENDING[name], "vocab_size": 300}))
    source = {"model": str(tmp_path)} if is_stored else {"model_config": ENDING[name]}
    marked: Any = {
        "bos_token_id": None,
        "eos_token_id": None,
        "cls_token_id": 2,
        "sep_token_id": 9,
        "pad_token_id": PAD,
    }
    framed: Any = {"__len__": lambda _: 259, "__call__": lambda _, text: {"input_ids": [2, 40, 9]}}
    like_bert = type("Tokenizer", (), marked | framed)()
    tokenizers: Any = (BYTES, END, END), (like_bert, 2, 9)
    for tokenizer, start, end in tokenizers:
        torch.manual_seed(0)
        config = Config().changed(task=CLASSES.name, max_length=32, **source)
        model: Any = build_model(run_for(config), CLASSES, tokenizer, ("a", "b"), has_weights=False).model.eval()
        assert model.config.eos_token_id == end
        padded = torch.tensor([[start, 40, 7, end, PAD, PAD], [start, 50, 50, 50, 50, end]])
        mask = torch.tensor([[1, 1, 1, 1, 0, 0], [1] * 6])
        together = model(padded, attention_mask=mask).logits
        torch.testing.assert_close(together[0], model(padded[:1, :4]).logits[0])
        if name == "bart":
            states = model.model(padded, attention_mask=mask)
        else:
            states = model.transformer(padded, attention_mask=mask, decoder_input_ids=model._shift_right(padded))
        at_ends = states.last_hidden_state[[0, 1], [3, 5]]
        torch.testing.assert_close(together, model.classification_head(at_ends))


def test_a_model_that_is_nowhere_is_refused_in_one_line() -> None:
    for name in ("no/such-model-anywhere", "no-such-folder/model"):
        with pytest.raises(UserError, match=f"model '{name}' cannot be loaded") as caught:
            built(model=name)
        assert "\n" not in str(caught.value)


FUNCTIONS = """
from torch import nn
def tiny():
    return nn.Linear(2, 3)
def words():
    return "a model"

class Stateful(nn.Linear):
    def get_extra_state(self):
        return {"calls": 3}

def stateful():
    return Stateful(2, 3)

def classifier():
    import transformers

    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    config = transformers.BertConfig(**sizes, id2label={0: "odd", 1: "even"}, label2id={"odd": 0, "even": 1})
    return transformers.BertForSequenceClassification(config)
"""


def test_model_from_a_function_of_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_models_for_test.py").write_text(FUNCTIONS)
    monkeypatch.chdir(tmp_path)

    def build(spec: str, **options: Any) -> nn.Module:
        config = Config().changed(model=spec, max_length=8, check_model=False, **options)
        return build_model(run_for(config), CAUSAL, BYTES).model

    model = build("own_models_for_test:tiny")
    assert isinstance(model, nn.Linear) and model.out_features == 3
    labelled = Config().changed(model="own_models_for_test:classifier", max_length=8, check_model=False)
    task = load_task("sequence_classification")
    config: Any = build_model(run_for(labelled), task, BYTES, ("even", "odd")).model.config
    assert (config.id2label, config.label2id) == ({0: "even", 1: "odd"}, {"even": 0, "odd": 1})
    with pytest.raises(UserError, match=r"returned a str; it must return an nn.Module"):
        build("own_models_for_test:words")
    with pytest.raises(UserError, match=r"stateful': no checkpoint can hold its _extra_state: make it a tensor"):
        build("own_models_for_test:stateful")
    with pytest.raises(UserError, match=r"own_models_for_test:missing.*module:function"):
        build("own_models_for_test:missing")
    with pytest.raises(UserError, match="no_such_module_here"):
        build("no_such_module_here:tiny")
    with pytest.raises(UserError, match=r"gradient_checkpointing: full does not work with this model.*Use none"):
        build("own_models_for_test:tiny", gradient_checkpointing="full")


# Activation checkpointing


MODES = [
    {"gradient_checkpointing": "full"},
    {"gradient_checkpointing": "full", "gradient_checkpointing_every_n_layers": 2},
    {"gradient_checkpointing": "selective"},
    {"gradient_checkpointing": "selective", "gradient_checkpointing_every_n_layers": 2},
]
CHECKPOINTED = [
    (LLAMA, CAUSAL),
    ({**LLAMA, "attention_dropout": 0.2}, CAUSAL),
    ({**GPT2, "resid_pdrop": 0.2, "embd_pdrop": 0.2, "attn_pdrop": 0.0}, CAUSAL),
    ({"model_type": "bert", **SHAPE, "hidden_dropout_prob": 0.2, "attention_probs_dropout_prob": 0.0}, MASKED),
    ({"model_type": "modernbert", **SHAPE, "embedding_dropout": 0.2, "mlp_dropout": 0.2}, MASKED),
    ({"model_type": "qwen3", **SHAPE, "num_key_value_heads": 1, "head_dim": 8}, CAUSAL),
]


def gradients(model: nn.Module) -> tuple[float, dict[str, Tensor]]:
    model.train()
    inputs, labels = batch()
    labels[0, 5:] = IGNORE
    torch.manual_seed(1)
    loss = ModelWithLoss(model)(inputs, labels)
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    ("model_config", "task"), CHECKPOINTED, ids=["llama", "llama-dropout", "gpt2", "bert", "modernbert", "qwen3"]
)
def test_checkpointing_changes_neither_loss_nor_gradients(model_config: dict, task: type[Task]) -> None:
    loss, expected = gradients(built(model_config, task).double())
    assert len(expected) > 10
    for mode in MODES:
        again, found = gradients(built(model_config, task, **mode).double())  # type: ignore
        assert again == loss
        assert found.keys() == expected.keys()
        for name, gradient in found.items():  # the same operations in the same order: fp64's last bits at most
            torch.testing.assert_close(gradient, expected[name], rtol=1e-12, atol=1e-14, msg=f"{mode} {name}")


def test_dropout_of_these_tests_is_on() -> None:
    for model_config, task in CHECKPOINTED[1:5]:
        model = built(model_config, task).train()
        inputs, labels = batch()
        assert ModelWithLoss(model)(inputs, labels).item() != ModelWithLoss(model)(inputs, labels).item()


class Watch(TorchDispatchMode):
    """Bytes still held of all tensors made inside, and how often attention was computed."""

    def __init__(self) -> None:
        super().__init__()
        self.attentions = 0
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.attentions += "scaled_dot_product" in func.name() and "backward" not in func.name()
        output = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self._storages[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return output

    def held_bytes(self) -> int:
        return sum(size for storage, size in self._storages.values() if not storage.expired())


def watched(**mode: Any) -> tuple[int, int]:
    """Bytes held between forward and backward, and attentions computed in both, of a model of four layers."""
    model = built({**LLAMA, "num_hidden_layers": 4}, **mode).train()
    inputs, _ = batch(32)
    with Watch() as watch:
        hidden = model.base_model(**inputs).last_hidden_state
        held = watch.held_bytes()
        hidden.sum().backward()
    return held, watch.attentions


def test_checkpointing_holds_less_and_computes_again() -> None:
    none, full, every_second, selective = (watched(**mode) for mode in ({}, MODES[0], MODES[1], MODES[2]))
    assert full[0] < selective[0] < none[0]
    assert full[0] < every_second[0] < none[0]
    assert full[0] < none[0] / 4
    assert (none[1], full[1], every_second[1], selective[1]) == (4, 8, 6, 4)


@pytest.mark.parametrize("mode", MODES[:3])
def test_checkpointing_works_with_the_older_name_of_the_switch(
    mode: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not hasattr(transformers.PreTrainedModel, "activation_checkpointing_enable"):
        pytest.skip("this transformers has only the older name")

    def older(self: Any, gradient_checkpointing_kwargs: Any = None) -> None:
        self._activation_checkpointing_enable(gradient_checkpointing_kwargs)

    expected = watched(**mode)
    monkeypatch.setattr(transformers.PreTrainedModel, "gradient_checkpointing_enable", older)
    monkeypatch.delattr(transformers.PreTrainedModel, "activation_checkpointing_enable")
    assert watched(**mode) == expected


def test_every_n_layers_counts_subclasses_of_layers() -> None:
    class OwnLayer(LlamaDecoderLayer):
        pass

    model = built({**LLAMA, "num_hidden_layers": 4})
    layers = model.base_model.layers
    assert isinstance(layers, nn.ModuleList)
    for index in range(4):
        layers[index] = OwnLayer(model.config, index)  # type: ignore
    enable_checkpointing(model, "full", every_n_layers=3)
    assert [layer.gradient_checkpointing for layer in layers] == [True, False, False, True]


def test_model_without_support_for_checkpointing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers.LlamaPreTrainedModel, "supports_gradient_checkpointing", False)
    with pytest.raises(UserError, match="gradient_checkpointing: selective does not work with this model"):
        built(LLAMA, gradient_checkpointing="selective")
