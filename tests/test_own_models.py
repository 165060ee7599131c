"""Models of one's own (``--model file.py:build``): what they may return, and what is noticed before training."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support import run_for
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from train.config import Config
from train.extras.activations.recompute import Recomputed, enable_checkpointing
from train.extras.losses import Extra as Losses
from train.extras.losses.fused import Place
from train.extras.losses.in_head import choose_loss
from train.extras.readers.own_tokenizers import build_tokenizer
from train.model import ModelWithLoss, build_model
from train.records import IGNORE, UserError
from train.state import TrainingState
from train.tasks import cross_entropy_sum, load_task

SIZES = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
MODELS = f"""
import torch
import transformers
from torch import nn

SIZES = {SIZES}


def small_vocabulary():
    return transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=20, **SIZES))


def few_positions():
    return transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=300, max_position_embeddings=4, **SIZES))


def nothing():
    pass


def five_classes():
    config = transformers.BartConfig(
        vocab_size=300, d_model=8, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, num_labels=5,
        decoder_attention_heads=2, encoder_ffn_dim=8, decoder_ffn_dim=8, max_position_embeddings=16
    )
    return transformers.BartForSequenceClassification(config)


def two_classes():
    config = transformers.LlamaConfig(vocab_size=300, num_labels=2, **SIZES)
    return transformers.LlamaForSequenceClassification(config)


class NextByte(nn.Sequential):
    def forward(self, input_ids):
        return super().forward(input_ids)


def by_configuration(config):
    width = config.data.max_length
    return NextByte(nn.Embedding(300, width), nn.Linear(width, 300))


def of_a_width(width=16):
    return NextByte(nn.Embedding(300, width), nn.Linear(width, 300))


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(300, 16)
        self.layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True), 2)
        self.head = nn.Linear(16, 300)

    def forward(self, input_ids, attention_mask=None):
        return self.head(self.layers(self.embed(input_ids)))


class Tied(transformers.PreTrainedModel):
    config_class = transformers.BertConfig

    def __init__(self, config):
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.head.weight = self.embed.weight  # by hand: transformers does not hear of it
        self.post_init()

    def _init_weights(self, module):
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight)

    def forward(self, input_ids, attention_mask=None):
        return self.head(self.embed(input_ids))


def tied():
    return Tied(transformers.BertConfig(vocab_size=300, **SIZES))
"""
BYTES = build_tokenizer("bytes", ())


@pytest.fixture(autouse=True)
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models_for_test.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)


def built(function: str, task: str = "masked_lm", labels: tuple[str, ...] = (), **options: Any) -> ModelWithLoss:
    config = Config().changed(task=task, model=f"models_for_test.py:{function}", **{"max_length": 8, **options})
    return build_model(run_for(config), load_task(task), BYTES, labels)


def test_a_vocabulary_that_is_too_small_is_told() -> None:
    with pytest.raises(UserError, match=r"the model has 20 embeddings, the tokenizer \d+ tokens"):
        built("small_vocabulary")


def test_too_few_positions_are_told() -> None:
    with pytest.raises(UserError, match="max_length: 8 is more than the model's 4 positions"):
        built("few_positions")


@pytest.mark.parametrize(("function", "classes"), [("two_classes", 2), ("five_classes", 5)])
def test_a_classifier_with_another_number_of_outputs_is_told(function: str, classes: int) -> None:
    with pytest.raises(UserError, match=rf"returned a model of {classes} classes; the data has 3"):
        built(function, "sequence_classification", ("a", "b", "c"))


def test_a_function_without_a_model_is_told() -> None:
    with pytest.raises(UserError, match=r"returned a NoneType; it must return an nn\.Module"):
        built("nothing")


def test_a_classifier_of_a_causal_model_finds_the_last_token_of_each_row() -> None:
    """Without a padding token transformers refuses a batch of more than one row."""
    model = built("two_classes", "sequence_classification", ("a", "b"))
    pad: Any = BYTES.pad_token_id
    ids = torch.tensor([[5, 6, 7, 8], [5, 6, pad, pad]])
    inputs = {"input_ids": ids, "attention_mask": torch.ne(ids, pad).long()}
    scores = model(inputs, torch.tensor([0, 1]), scored=True)
    alone = model({"input_ids": ids[1:, :2]}, torch.tensor([1]), scored=True)
    torch.testing.assert_close(scores.loss_sums[1:], alone.loss_sums)


def test_a_function_may_take_the_configuration() -> None:
    model: Any = built("by_configuration", "causal_lm", max_length=24).model
    assert model[0].embedding_dim == 24
    model = built(
        "of_a_width", "causal_lm", max_length=24
    ).model  # with a default, an argument is not the configuration
    assert model[0].embedding_dim == 16  # type: ignore


class Balanced(nn.Module):
    """A mixture of experts of one's own: it weights its balancing loss itself."""

    def __init__(self, as_dict: bool) -> None:
        super().__init__()
        self.as_dict = as_dict

    def forward(self, input_ids: Tensor) -> Any:
        found = {"logits": torch.zeros(*input_ids.shape, 4), "aux_loss": torch.tensor(0.5)}
        return found if self.as_dict else transformers.utils.ModelOutput(**found)


@pytest.mark.parametrize("as_dict", [True, False])
def test_a_balancing_loss_of_a_model_without_a_configuration_counts(as_dict: bool) -> None:
    ids = torch.zeros(1, 3, dtype=torch.long)
    loss = ModelWithLoss(Balanced(as_dict))({"input_ids": ids}, ids)
    assert loss.item() == pytest.approx(3 * (torch.log(torch.tensor(4.0)).item() + 0.5))


class Llama(transformers.LlamaForCausalLM):
    """A transformers model with a loss of its own, which its configuration knows nothing of."""

    def forward(self, input_ids: Tensor, **more: Any) -> Any:  # type: ignore
        found = super().forward(input_ids=input_ids, **more)  # type: ignore
        return {"logits": found.logits, "aux_loss": 0.5 * self.lm_head.weight.new_ones(())}


def test_an_auxiliary_loss_of_a_changed_transformers_model_counts() -> None:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 300, "num_key_value_heads": 1, **SIZES}
    model = Llama(transformers.LlamaConfig(**sizes))
    ids = torch.arange(3, 9).unsqueeze(0)
    with torch.no_grad():
        found, logits = ModelWithLoss(model)({"input_ids": ids}, ids), model(ids)["logits"]
    assert found.item() == pytest.approx(cross_entropy_sum(logits, ids).item() + 6 * 0.5, rel=1e-6)


class Regularised(Llama):
    """Makes a loss of its own of its logits, in training alone."""

    def forward(self, input_ids: Tensor, **more: Any) -> Any:  # type: ignore
        found = super().forward(input_ids, **more)
        if self.training:
            found["aux_loss"] = found["logits"].logsumexp(-1).square().mean()
        return found


@pytest.mark.parametrize("is_hooked", [False, True])
def test_a_model_that_computes_with_its_logits_gets_all_of_them(is_hooked: bool) -> None:
    sizes: dict[str, Any] = {"vocab_size": 4608, "num_key_value_heads": 1, **SIZES}
    model, seen = (Llama if is_hooked else Regularised)(transformers.LlamaConfig(**sizes)).train(), list[Any]()
    place = Place("cpu", torch.float32)
    assert choose_loss("auto", ModelWithLoss(Llama(model.config)), place)[0] == "chunked"
    if is_hooked:
        model.lm_head.register_forward_hook(lambda head, inputs, logits: seen.append(logits.mT.max()))  # by a view
    assert choose_loss("auto", ModelWithLoss(model), place)[0] == "full"
    obstacle = "returns no plain nn.Linear without hooks" if is_hooked else "does more with its logits than to scale"
    with pytest.raises(UserError, match=f"loss: chunked does not work with this model: .*{obstacle}"):
        choose_loss("chunked", ModelWithLoss(model), place)


def test_a_loss_that_another_extra_has_set_stays_and_is_told() -> None:
    sizes: dict[str, Any] = {"vocab_size": 4608, "num_key_value_heads": 1, **SIZES}
    run, model = run_for(Config().changed(tokenizer="bytes")), ModelWithLoss(Llama(transformers.LlamaConfig(**sizes)))
    own = model.loss_in_head = lambda *arguments: torch.zeros(())
    Losses().change_loss(run, model)
    assert model.loss_in_head is own and run.outputs.notes == ["loss: the task's or an extra's"]
    assert Losses().memory_measure(run, model) is None


def test_padding_counts_in_the_balancing_loss_of_a_causal_mixture() -> None:
    """As docs/loop.md says: a causal batch has no mask by which transformers would leave it out."""
    torch.manual_seed(0)
    balance: Any = load_balancing_loss_func
    own: dict[str, Any] = {"num_local_experts": 4, "router_aux_loss_coef": 0.5, "output_router_logits": True}
    model = transformers.MixtralForCausalLM(
        transformers.MixtralConfig(vocab_size=300, num_key_value_heads=1, **SIZES, **own)
    )
    examples = [{"id": number, "tokens": torch.arange(3, 4 + n).numpy()} for number, n in enumerate((12, 2))]
    batch = load_task("causal_lm")(Config()).collate(examples, (0, 0), pad_id=1)
    found = ModelWithLoss(model)(batch.inputs, batch.labels).item()
    mask = (batch.labels != IGNORE).long()
    with torch.no_grad():
        outputs = model(batch.inputs["input_ids"])
        terms = cross_entropy_sum(outputs.logits, batch.labels).item()
        with_padding, without = (balance(outputs.router_logits, 4, 2, given).item() for given in (None, mask))
    assert batch.num_targets == 14 and abs(with_padding - without) > 1e-3
    assert found == pytest.approx(terms + 14 * 0.5 * with_padding, rel=1e-6)


def test_adapters_count_in_evaluation_where_torch_has_a_fast_path() -> None:
    """In evaluation nn.TransformerEncoderLayer reads the weights of its linear layers, past what surrounds them."""
    model = built("Encoder", adapter="lora", lora_target_modules=("linear1", "linear2"))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    ids = torch.arange(8)[None]
    model.eval()
    with torch.no_grad():
        evaluated = model({"input_ids": ids}, ids, scored=True)
        model.train()  # in which the fast path is not taken
        expected = model({"input_ids": ids}, ids, scored=True)
    torch.testing.assert_close(evaluated.loss_sums, expected.loss_sums)


def test_adapters_are_only_next_to_layers_that_ask_them() -> None:
    """nn.MultiheadAttention uses the weight of its output layer, not the layer."""
    model, ids = built("Encoder", adapter="lora"), torch.arange(8)[None]
    model({"input_ids": ids}, ids).backward()
    adapters = {name: p.grad for name, p in model.named_parameters() if "lora_B" in name}
    assert len(adapters) == 5 and all(gradient is not None for gradient in adapters.values())
    with pytest.raises(UserError, match="one of them is a NonDynamicallyQuantizableLinear"):
        built("Encoder", adapter="lora", lora_target_modules=("out_proj",))


def test_weights_that_a_model_ties_by_hand_are_in_final(tmp_path: Path) -> None:
    model: Any = built("tied").model
    state = TrainingState(model, torch.optim.SGD(model.parameters()), {})
    state.save_pretrained(tmp_path / "final", keep=True)
    loaded = type(model).from_pretrained(tmp_path / "final")
    for name, tensor in copy.deepcopy(model).state_dict().items():
        torch.testing.assert_close(loaded.state_dict()[name], tensor)


class Layer(nn.Module):
    """Attention over earlier tokens, dropout, and two experts in a list of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.drop = nn.Linear(16, 48), nn.Dropout(0.2)
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))

    def forward(self, hidden: Tensor, *, cache: Tensor) -> Tensor:  # under a name that transformers has use for
        heads = (part.unsqueeze(1) for part in self.project(hidden).chunk(3, -1))
        hidden = hidden + self.drop(nn.functional.scaled_dot_product_attention(*heads, is_causal=True).squeeze(1))
        return hidden + cache * sum(expert(hidden).relu() for expert in self.experts)


class OfLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.scale = nn.Embedding(20, 16), nn.Parameter(torch.ones(()))
        self.stages, self.head = nn.ModuleList(nn.ModuleList([Layer(), Layer()]) for _ in range(2)), nn.Linear(16, 20)

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.embed(input_ids)
        for stage in self.stages:
            for layer in stage:  # type: ignore
                hidden = layer(hidden, cache=self.scale)
        return self.head(hidden)


class AroundTransformers(nn.Module):
    """A backbone of transformers under a head of one's own."""

    def __init__(self) -> None:
        super().__init__()
        sizes: dict[str, Any] = {"vocab_size": 20, **SIZES}
        self.body: Any = transformers.LlamaModel(transformers.LlamaConfig(**sizes))
        self.head = nn.Linear(8, 20)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.body(input_ids).last_hidden_state)


def _step_of(model: nn.Module) -> tuple[list[str], list[Tensor], int]:
    """Names and gradients, and how many bytes autograd keeps for backward."""
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    torch.manual_seed(1)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = ModelWithLoss(model)({"input_ids": torch.arange(400).view(4, 100) % 20}, torch.ones(4, 100).long())
    loss.backward()
    return list(model.state_dict()), [p.grad for p in model.parameters() if p.grad is not None], sum(kept.values())


@pytest.mark.parametrize("kind", [OfLayers, AroundTransformers])
@pytest.mark.parametrize(("mode", "every"), [("full", 1), ("full", 2), ("selective", 1)])
def test_layers_in_lists_are_recomputed_to_the_same_gradients(kind: type[nn.Module], mode: str, every: int) -> None:
    torch.manual_seed(0)
    model = kind().train()
    names, gradients, plain = _step_of(copy.deepcopy(model))
    enable_checkpointing(model, mode, every)
    found_names, found, kept = _step_of(copy.deepcopy(model))
    assert found_names == names and len(found) == len(gradients) > 4
    for ours, theirs in zip(found, gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    layers = sum(isinstance(module, GradientCheckpointingLayer | Recomputed) for module in model.modules())
    assert layers == (4 if kind is OfLayers else 1)  # not the experts
    assert kept < (0.6 if every == 1 else 0.9) * plain, (kept, plain)


def test_layers_called_by_keyword_hand_their_inputs_on_as_torch_and_offload_look_for_them() -> None:
    """torch restores the random numbers of the cards that it finds among positional arguments, and only of these."""
    model, seen = OfLayers().train(), list[Any]()
    enable_checkpointing(model, "full")
    layer: Any = model.stages[0][0]  # type: ignore
    layer._gradient_checkpointing_func = lambda function, *inputs: [seen.append(inputs), function(*inputs)][1]
    hidden, cache = torch.randn(1, 3, 16), torch.ones(())
    layer.drop.p = 0.0
    torch.testing.assert_close(layer(cache=cache, hidden=hidden), layer(hidden, cache=cache), rtol=0, atol=0)
    assert [list(map(id, inputs)) for inputs in seen] == [[id(hidden)]] * 2


def test_a_module_without_lists_of_layers_says_what_checkpointing_and_compilation_need() -> None:
    with pytest.raises(UserError, match=r"gradient_checkpointing: full .* no nn.ModuleList of layers. Use none."):
        enable_checkpointing(nn.Sequential(nn.Embedding(4, 4), nn.Linear(4, 4)), "full")


class Unlike(nn.Module):
    """Lists of what is no layer, and layers in a dict in a list, of a class that others cannot derive from."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.tables, self.heads = nn.ModuleList([nn.Embedding(20, 16)]), nn.ModuleList([nn.Linear(16, 20)])
        self.layers = nn.ModuleList([nn.ModuleDict({"one": layer})])


class Final(Layer):
    def __init_subclass__(cls, name: str) -> None:  # type: ignore
        raise TypeError("final")


def test_what_is_marked_as_a_layer() -> None:
    model = Unlike(Layer())
    enable_checkpointing(model, "full")
    assert [name for name, module in model.named_modules() if isinstance(module, Recomputed)] == ["layers.0.one"]
    assert type(model.heads[0]) is nn.Linear  # as a loss in chunks wants it
    with pytest.raises(UserError, match=r"gradient_checkpointing: full .* no nn.ModuleList of layers"):
        enable_checkpointing(Unlike(torch.jit.script(nn.Sequential(nn.Linear(16, 16)))), "full")
    with pytest.raises(UserError, match=r"Final cannot be recomputed or compiled: .*name"):
        enable_checkpointing(Unlike(Final()), "full")


def test_a_module_that_switches_its_checkpoints_itself_is_left_to_it() -> None:
    class Switched(OfLayers):
        def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: dict[str, Any]) -> None:
            self.asked = gradient_checkpointing_kwargs

    model = Switched().train()
    enable_checkpointing(model, "full")
    assert model.asked == {"use_reentrant": False}
    assert model(torch.arange(8)[None]).shape == (1, 8, 20)
    assert not any(isinstance(module, Recomputed) for module in model.modules())


class OfParts(OfLayers):
    """Calls the parts of its layers, as some write it."""

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.embed(input_ids)
        for stage in self.stages:
            for layer in stage:  # type: ignore
                hidden = hidden + layer.project(hidden)[..., :16]
        return self.head(hidden)


def test_layers_that_are_never_called_would_recompute_nothing_which_is_refused() -> None:
    for mode in ("full", "selective"):
        with pytest.raises(UserError, match=f"gradient_checkpointing: {mode} would do nothing .* calls parts of the"):
            enable_checkpointing(OfParts(), mode)
    enable_checkpointing(OfParts(), "none")


class Unusual(OfLayers):
    """Calls its layers by their forward, in training alone, and only where texts are long."""

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.embed(input_ids)
        for stage in self.stages if self.training and input_ids.shape[1] > 64 else ():
            for layer in stage:  # type: ignore
                hidden = layer.forward(hidden, cache=self.scale)
        return self.head(hidden)


def test_layers_that_are_called_in_unusual_ways_are_recomputed() -> None:
    torch.manual_seed(0)
    model = Unusual().train()
    _, gradients, plain = _step_of(copy.deepcopy(model))
    enable_checkpointing(model, "full")
    _, found, kept = _step_of(copy.deepcopy(model))
    assert kept < 0.6 * plain
    for ours, theirs in zip(found, gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
