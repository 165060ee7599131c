"""Documents that share a row: loss and gradients of each as if it were alone, and no tensor of S × S."""

from __future__ import annotations

import copy
import inspect
import itertools
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
)

from train.extras.activations.recompute import enable_checkpointing
from train.extras.long_sequences import attention
from train.extras.long_sequences.attention import Documents
from train.extras.long_sequences.packing import collate_packed, joined
from train.model import ModelWithLoss
from train.records import MicroBatch, UserError
from train.tasks import pad

PAGE = Path(__file__).parents[3] / "docs" / "extras" / "long_sequences.md"
SIZES = {"num_hidden_layers": 2, "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48}
GQA = {"num_attention_heads": 4, "num_key_value_heads": 2}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
MARKS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
CAUSAL: dict[str, dict[str, Any]] = {
    "llama": {**SIZES, **GQA},
    "mistral": {**SIZES, **GQA, "sliding_window": 4},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 97, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
             "attn_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 2},
}  # fmt: skip
MASKED: dict[str, dict[str, Any]] = {
    "bert": {**SIZES, **NO_DROPOUT, "num_attention_heads": 2},
    "modernbert": {**SIZES, **MARKS, "num_attention_heads": 2, "num_hidden_layers": 3, "local_attention": 6,
                   "global_attn_every_n_layers": 3},
}  # fmt: skip
ROWS = {
    "cut alike": [[9, 7], [9, 7]],
    "cut in their own ways": [[3, 9, 4], [16], [10, 5]],
    "one query left for the last window": [[257, 3]],
}


def built(model_type: str, fields: dict[str, Any], dtype: torch.dtype = torch.float64, told: bool = False) -> Any:
    """A small model, perhaps told where documents end."""
    torch.manual_seed(0)
    factory = AutoModelForMaskedLM if model_type in MASKED else AutoModelForCausalLM
    model = factory.from_config(AutoConfig.for_model(model_type, **fields), attn_implementation="sdpa", dtype=dtype)
    model.config.use_cache = False
    if told:
        attention.set_document_boundaries(model)
    return model


def collate(members: Any, seed: Any, pad_id: int) -> MicroBatch:
    """Labels (B, S) for each token, whatever the model."""
    tokens = [torch.as_tensor(member["tokens"]) for member in members]
    labels = [row.roll(-1) for row in tokens]
    count = sum(map(len, tokens))
    inputs = {"input_ids": pad(tokens, pad_id)}
    if len(set(map(len, tokens))) > 1:
        inputs["attention_mask"] = pad([torch.ones_like(row) for row in tokens], 0)
    return MicroBatch(inputs, pad(labels, -100), count, tuple(range(len(tokens))), count)


def batches(rows: list[list[int]]) -> tuple[MicroBatch, MicroBatch]:
    """The same documents packed and padded."""
    generator = torch.Generator().manual_seed(1)
    count = itertools.count()
    numbers = [[next(count) for _ in row] for row in rows]
    members = [
        {"tokens": torch.randint(3, 97, (n,), generator=generator).tolist(), "length": n} for row in rows for n in row
    ]
    table = joined(Dataset.from_list(members), numbers).to_pylist()
    packed = collate_packed([{**row, "id": i} for i, row in enumerate(table)], (0,), 0, collate)
    return packed, collate(members, (0,), 0)


def loss_and_gradients(model: Any, batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    batch = batch.to(torch.device("cpu"))
    loss = ModelWithLoss(model)(batch.inputs, batch.labels, num_targets=batch.num_targets)
    loss.backward()
    return loss.detach(), {k: p.grad.clone() for k, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("model_type", [*CAUSAL, *MASKED])
def test_loss_and_gradients_are_those_of_the_padded_batch(model_type: str, rows: list[list[int]]) -> None:
    fields = {**CAUSAL, **MASKED}[model_type]
    packed, padded = batches(rows)
    loss, gradients = loss_and_gradients(built(model_type, fields), padded)
    model = built(model_type, fields, told=True)
    for checkpointing in ("none", "full", "selective"):
        enable_checkpointing(model, checkpointing)
        model.train()
        found, others = loss_and_gradients(model, packed)
        assert found.item() == pytest.approx(loss.item(), rel=1e-12)
        assert gradients.keys() == others.keys()
        for name, gradient in gradients.items():
            assert torch.allclose(gradient, others[name], rtol=0, atol=1e-10), name


def test_eager_attention_keeps_documents_apart_by_a_mask_of_its_own() -> None:
    packed, padded = batches(ROWS["cut in their own ways"])
    loss, _ = loss_and_gradients(built("llama", CAUSAL["llama"]), padded)
    model = built("llama", CAUSAL["llama"], told=True)
    model.set_attn_implementation("eager")
    attention.check_documents(model)
    assert loss_and_gradients(model, packed)[0].item() == pytest.approx(loss.item(), rel=1e-6)
    both_ways = built("modernbert", MASKED["modernbert"])  # its own mask covers the row, unlike that of sdpa
    attention.check_documents(both_ways)
    both_ways.set_attn_implementation("eager")
    with pytest.raises(UserError, match=r"other results for them than alone by eager attention\. Leave packing out"):
        attention.check_documents(both_ways)


@pytest.mark.parametrize(("width", "rotates"), [(64, 1.0), (3072, 1.0), (3072, 0.75)])
def test_a_model_whose_rotary_factors_change_with_the_longest_document_is_packed_below_that(
    width: int, rotates: float
) -> None:
    """Phi-3 and Phi-4-mini by their sizes; their small copies have as many factors as pairs of dimensions."""
    heads, short = width // 128 or 4, 128
    pairs = int(width // heads * rotates) // 2
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": rotates}
    rope |= {"short_factor": [1.0] * pairs, "long_factor": [1.0 + pair for pair in range(pairs)]}
    trained = {"original_max_position_embeddings": short}
    sizes = {**SIZES, **MARKS, "hidden_size": width, "num_attention_heads": heads, "max_position_embeddings": 4096}
    config = AutoConfig.for_model("phi3", **sizes, **trained, rope_parameters={**rope, **trained})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    attention.check_documents(model, 97, max_length=short)
    with pytest.raises(UserError, match=r"packing: phi3 cannot keep documents apart .* than alone"):
        attention.check_documents(model, 97, max_length=short + 1)


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that any operator gives."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self.elements = max(self.elements, *sizes, 0)
        return result


def largest(model: Any, batch: MicroBatch) -> int:
    with Largest() as seen:
        loss_and_gradients(model, batch)
    return seen.elements


@pytest.mark.parametrize(
    ("model_type", "row"),
    [("llama", [100, 300, 112]), ("mistral", [100, 300, 112]), ("mistral", [512]), ("modernbert", [100, 300, 112])],
)
def test_no_tensor_has_as_many_elements_as_a_mask(model_type: str, row: list[int]) -> None:
    fields = {**CAUSAL, **MASKED}[model_type]
    packed, _ = batches([row])
    told = built(model_type, fields, torch.float32, told=True)
    assert largest(told, packed) < 512 * 512 / 3
    packed.inputs["attention_mask"] = torch.ones_like(packed.labels)
    packed.inputs["attention_mask"][:, -1] = 0
    plain = built(model_type, fields, torch.float32)
    without = MicroBatch(packed.inputs, packed.labels, packed.num_targets, (0,), packed.num_tokens)
    assert largest(plain, without) >= 512 * 512  # what transformers makes for a mask


def test_sliding_window_of_whole_rows_needs_no_mask() -> None:
    fields = {**CAUSAL["mistral"], "sliding_window": 16}
    ids = torch.randint(3, 97, (2, 512), generator=torch.Generator().manual_seed(2))
    batch = MicroBatch({"input_ids": ids}, ids.roll(-1, 1), ids.numel(), (0, 1), ids.numel())
    model, told = built("mistral", fields), built("mistral", fields, told=True)
    loss, gradients = loss_and_gradients(model, batch)
    found, others = loss_and_gradients(told, batch)
    assert found.item() == pytest.approx(loss.item(), rel=1e-12)
    assert all(torch.allclose(gradient, others[name], rtol=0, atol=1e-10) for name, gradient in gradients.items())
    assert largest(told, batch) < 2 * 512 * 128
    assert largest(model, batch) >= 512 * 512


def test_a_mask_or_a_cache_is_left_to_sdpa() -> None:
    model, told = built("llama", CAUSAL["llama"]).eval(), built("llama", CAUSAL["llama"], told=True).eval()
    ids = torch.randint(3, 97, (2, 12), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    with torch.no_grad():
        assert torch.equal(model(ids, attention_mask=mask).logits, told(input_ids=ids, attention_mask=mask).logits)
    options = {"max_new_tokens": 5, "do_sample": False, "attention_mask": mask, "pad_token_id": 0, "use_cache": True}
    assert torch.equal(model.generate(ids, **options), told.generate(ids, **options))
    options["attention_mask"] = torch.ones_like(ids)  # as a run's sample does, which generate() leaves out
    assert torch.equal(model.generate(ids, **options), told.generate(ids, **options))


# What a card would be asked


def visible(documents: Documents, window: tuple[int, int]) -> Tensor:
    """(T, T) what torch documents of flash attention over lengths: which of all rows' tokens sees which."""
    number = torch.cat([torch.full((n,), i) for i, n in enumerate(n for row in documents.lengths for n in row)])
    place = torch.arange(len(number))
    left, right = (len(place) if reach < 0 else reach for reach in window)
    ahead = place - place.unsqueeze(1)
    return (number == number.unsqueeze(1)) & (ahead >= -left) & (ahead <= right)


@contextmanager
def as_on_a_card(patch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Has attention believe that the CPU has flash attention over lengths; what it was called with."""
    calls: list[Any] = []

    def flash(
        q: Tensor, k: Tensor, v: Tensor, cuts: Tensor, *rest: Any, scale: float, window_size: Any, **_: Any
    ) -> Tensor:
        cuts_again, longest, longest_again = rest
        assert cuts.dtype == torch.int32 and cuts is cuts_again
        assert longest == longest_again == max(cuts.diff())
        calls.append((q.dtype, window_size))
        lengths = tuple(cuts.diff().tolist())
        k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * scale
        seen = visible(Documents((lengths,), cuts), window_size)
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)

    with patch.context() as patched:
        patched.setattr(attention, "flash_over_lengths", lambda: flash)
        patched.setattr(attention, "_suits_flash", lambda query, value: query.shape[-1] == value.shape[-1])
        yield calls


@pytest.mark.parametrize("model_type", [*CAUSAL, *MASKED])
def test_one_call_for_all_documents_says_the_same(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fields = {**CAUSAL, **MASKED}[model_type]
    packed, padded = batches(ROWS["cut in their own ways"])
    loss, gradients = loss_and_gradients(built(model_type, fields), padded)
    with as_on_a_card(monkeypatch) as calls:
        found, others = loss_and_gradients(built(model_type, fields, told=True), packed)
    assert found.item() == pytest.approx(loss.item(), rel=1e-12)
    assert all(torch.allclose(gradient, others[name], rtol=0, atol=1e-10) for name, gradient in gradients.items())
    windows = {
        "llama": {(-1, 0)}, "gpt2": {(-1, 0)}, "mistral": {(3, 0)}, "bert": {(-1, -1)}, "modernbert": {(-1, -1), (3, 3)}
    }  # fmt: skip
    assert {window for _, window in calls} == windows[model_type]


def test_the_kernel_gets_what_autocast_would_multiply(monkeypatch: pytest.MonkeyPatch) -> None:
    packed, _ = batches([[9, 7]])
    with as_on_a_card(monkeypatch) as calls, torch.autocast("cpu", torch.bfloat16):
        loss_and_gradients(built("llama", CAUSAL["llama"], torch.float32, told=True), packed)
    assert {dtype for dtype, _ in calls} == {torch.bfloat16}


def test_the_kernel_gets_no_values_of_another_width_than_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    query, key, value = torch.randn(1, 4, 12, 8), torch.randn(1, 2, 12, 8), torch.randn(1, 2, 12, 6)
    with as_on_a_card(monkeypatch) as calls:
        found = attention.attend_within_documents(query, key, value, Documents.of([[5, 7]]))
    assert (found.shape, calls) == ((1, 4, 12, 6), [])


def test_this_torch_has_flash_attention_over_lengths_with_windows() -> None:
    assert {"window_size", "scale"} <= set(inspect.signature(attention.flash_over_lengths()).parameters)


@pytest.mark.gpu
@pytest.mark.parametrize("model_type", [*CAUSAL, *MASKED])
def test_flash_attention_over_lengths_on_a_card(model_type: str) -> None:
    fields = {**CAUSAL, **MASKED}[model_type]
    packed, padded = (batch.to(torch.device("cuda")) for batch in batches(ROWS["cut in their own ways"]))
    found = {}
    for told, batch in ((True, packed), (False, padded)):
        model = ModelWithLoss(built(model_type, fields, torch.float32, told).cuda())
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(batch.inputs, batch.labels)
        loss.backward()
        found[told] = loss.item(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    (loss, gradient), (other_loss, other_gradient) = found.values()
    assert loss == pytest.approx(other_loss, rel=5e-3)
    assert (gradient - other_gradient).norm() < 0.02 * other_gradient.norm()  # bf16 has 8 bits


def test_flash_attention_of_its_own_package_is_told_lengths_in_its_words() -> None:
    model = built("llama", CAUSAL["llama"])
    model.config._attn_implementation_internal = "flash_attention_2"
    documents = Documents.of([[3, 9, 4], [16]])
    _, given = attention._with_documents(model, (), {"input_ids": 1, "documents": documents})
    assert torch.equal(given.pop("cu_seq_lens_q"), torch.tensor([0, 3, 12, 16, 32], dtype=torch.int32))
    assert torch.equal(given.pop("cu_seq_lens_k"), documents.boundaries)
    assert given == {"input_ids": 1, "max_length_q": 16, "max_length_k": 16}


# Heads that share keys


@pytest.mark.parametrize("told", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_repeated_heads_give_the_same(told: bool, padded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = {"input_ids": torch.arange(3, 35).view(2, 16)}
    if padded:
        inputs["attention_mask"] = torch.ones(2, 16, dtype=torch.long).tril(10)
    found = []
    for shares in (True, False):
        monkeypatch.setattr(attention, "_kernels_share_heads", lambda query, shares=shares: shares)
        found.append(loss_and_gradients(built("llama", CAUSAL["llama"], told=told), batch_of(inputs)))
    (loss, gradients), (other, other_gradients) = found
    assert loss.item() == pytest.approx(other.item(), rel=1e-12)
    torch.testing.assert_close(gradients, other_gradients, rtol=1e-9, atol=1e-12)


def batch_of(inputs: dict[str, Tensor]) -> MicroBatch:
    return MicroBatch(inputs, inputs["input_ids"], inputs["input_ids"].numel(), (0, 1), inputs["input_ids"].numel())


@pytest.mark.parametrize(
    ("dtype", "capability", "head_size", "dropout", "shares"),
    [
        (torch.float16, (8, 0), 256, 0.1, True),
        (torch.float16, (7, 5), 64, 0.0, False),
        (torch.float32, (9, 0), 64, 0.0, False),
        (torch.bfloat16, (8, 9), 192, 0.1, True),
        (torch.bfloat16, (8, 9), 224, 0.0, False),
        (torch.bfloat16, (8, 9), 256, 0.0, True),
        (torch.bfloat16, (8, 9), 256, 0.1, False),
        (torch.bfloat16, (12, 0), 200, 0.0, False),
        (torch.bfloat16, (10, 3), 256, 0.1, True),
        (torch.bfloat16, (9, 0), 288, 0.0, False),
    ],
)
def test_heads_are_shared_only_where_a_kernel_does(
    dtype: torch.dtype,
    capability: tuple[int, int],
    head_size: int,
    dropout: float,
    shares: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    query = SimpleNamespace(device=torch.device("cuda"), dtype=dtype, shape=(1, 8, 128, head_size))
    assert attention._kernels_share_heads(query, dropout) is shares  # type: ignore


# Which models can be told


@pytest.mark.parametrize(
    ("model_type", "fields", "reason"),
    [
        ("bloom", {"hidden_size": 32, "n_layer": 2, "n_head": 2, "vocab_size": 97}, "gives other results"),
        ("roberta", {**SIZES, "num_attention_heads": 2}, "gives other results"),
        ("mamba", {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 97}, "gives other results"),
    ],
)
def test_models_that_cannot_keep_documents_apart_are_refused(
    model_type: str, fields: dict[str, Any], reason: str
) -> None:
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **fields))
    with pytest.raises(UserError, match=f"packing: {model_type} .*{reason}"):
        attention.check_documents(model)


def test_a_model_is_tried_with_the_attention_that_it_trains_with(monkeypatch: pytest.MonkeyPatch) -> None:
    def over_the_row(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **_: Any) -> tuple[Tensor, None]:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2), None

    monkeypatch.setattr("transformers.models.bert.modeling_bert.eager_attention_forward", over_the_row)
    for kind, is_apart in (("sdpa", True), ("eager", False)):
        config = AutoConfig.for_model("bert", **MASKED["bert"])
        model = AutoModelForMaskedLM.from_config(config, attn_implementation=kind)
        assert (attention.obstacle_to_documents(model) is None) is is_apart


@pytest.mark.parametrize("name", ["softcap", "s_aux", "position_bias"])
def test_attention_refuses_what_a_trial_might_take_for_rounding(name: str) -> None:
    tensors = [torch.randn(1, 2, 12, 8) for _ in range(3)]
    with pytest.raises(ValueError, match=f"its attention uses {name}"):
        attention.attend(torch.nn.Module(), *tensors, None, documents=Documents.of([[5, 7]]), **{name: 1.0})


@pytest.mark.parametrize("kind", ["eager", "sdpa"])
def test_a_model_that_would_keep_a_cache_is_tried_without_it_as_it_is_trained(kind: str) -> None:
    """With one, transformers does not look for documents that share a row."""
    config = AutoConfig.for_model("llama", **SIZES, num_attention_heads=2, use_cache=True)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=kind)
    attention.check_documents(model)
    assert model.config.use_cache


def test_the_trial_leaves_the_model_alone() -> None:
    model = built("llama", CAUSAL["llama"], told=True)
    before = copy.deepcopy(model.state_dict())
    attention.check_documents(model)
    packed, padded = batches(ROWS["cut alike"])
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert model.training
    loss, _ = loss_and_gradients(model, packed)
    other, _ = loss_and_gradients(built("llama", CAUSAL["llama"]), padded)
    assert loss.item() == pytest.approx(other.item(), rel=1e-12)


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_a_classifier_whose_windows_slide_pools_what_it_pooled(pooling: str) -> None:
    torch.manual_seed(0)
    config = AutoConfig.for_model("modernbert", **MASKED["modernbert"], classifier_pooling=pooling, num_labels=3)
    model = AutoModelForSequenceClassification.from_config(config, attn_implementation="sdpa", dtype=torch.float64)
    ids = torch.randint(3, 97, (2, 16), generator=torch.Generator().manual_seed(1))
    expected = model.eval()(input_ids=ids).logits
    assert attention.has_short_windows(model, 16) and attention.obstacle_to_documents(model, shared=False) is None
    attention.set_document_boundaries(model)
    torch.testing.assert_close(model(input_ids=ids).logits, expected, rtol=1e-12, atol=1e-14)


def test_a_model_with_few_tokens_is_tried_with_its_own() -> None:
    """A trial with tokens that it lacks would fail, and the run would make a mask of length × length."""
    config = AutoConfig.for_model("modernbert", **{**MASKED["modernbert"], "vocab_size": 9, "pad_token_id": 0})
    model = AutoModelForMaskedLM.from_config(config, attn_implementation="sdpa")
    assert attention.obstacle_to_documents(model, shared=False) is None


# Modules of one's own


def own_model() -> Any:
    [shown] = re.findall(r"```python\n(# my_blocks\.py.*?)```", PAGE.read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(shown, names)
    torch.manual_seed(0)
    return names["build"]()


class Wrapped(torch.nn.Module):
    """A backbone of transformers under a head of one's own."""

    def __init__(self, hands_on: bool = True) -> None:
        super().__init__()
        self.body: Any = AutoModel.from_config(AutoConfig.for_model("llama", **SIZES, num_attention_heads=2))
        self.head, self.hands_on = torch.nn.Linear(32, 97), hands_on

    def forward(self, input_ids: Tensor, **inputs: Any) -> Tensor:
        return self.head(self.body(input_ids, **inputs if self.hands_on else {}).last_hidden_state)


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("build", [own_model, Wrapped])
def test_a_module_of_ones_own_that_takes_documents_is_packed(build: Any, rows: list[list[int]]) -> None:
    packed, padded = batches(rows)
    torch.manual_seed(0)
    model = build()
    attention.check_documents(model)
    alone = copy.deepcopy(model)
    padded.inputs.pop("attention_mask", None)  # causal: no token sees the padding, which follows
    loss, gradients = loss_and_gradients(alone, padded)
    attention.set_document_boundaries(model)
    for checkpointing in ("none", "full", "selective"):
        enable_checkpointing(model, checkpointing)
        found_loss, found = loss_and_gradients(model.train(), packed)
        torch.testing.assert_close(found_loss, loss)
        assert found.keys() == gradients.keys()
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, gradients[name], rtol=1e-4, atol=1e-6, msg=name)


def test_a_module_of_ones_own_that_lets_documents_see_each_other_is_refused() -> None:
    remedy = r"Leave packing out, .* your own: docs/extras/long_sequences\.md"
    with pytest.raises(UserError, match=f"packing: Wrapped .*gives other results for them than alone. {remedy}"):
        attention.check_documents(Wrapped(hands_on=False))
    plain = torch.nn.Sequential(torch.nn.Embedding(97, 8), torch.nn.Linear(8, 97))
    with pytest.raises(UserError, match=f"packing: Sequential .*TypeError.*input_ids.*{remedy}"):
        attention.check_documents(plain)


def test_grouped_heads_of_a_module_of_ones_own_attend_as_torch_does() -> None:
    query, key, value = torch.randn(2, 4, 12, 8), torch.randn(2, 2, 12, 8), torch.randn(2, 2, 12, 8)
    whole = torch.nn.functional.scaled_dot_product_attention
    expected = whole(query, key, value, is_causal=True, enable_gqa=True)
    found = attention.attend_within_documents(query, key, value, None, is_causal=True)
    torch.testing.assert_close(found, expected)
    documents = Documents.of([[5, 7], [12]])
    parts = [whole(query[:1, :, p], key[:1, :, p], value[:1, :, p], enable_gqa=True) for p in (slice(5), slice(5, 12))]
    alone = torch.cat([torch.cat(parts, 2), whole(query[1:], key[1:], value[1:], enable_gqa=True)])
    torch.testing.assert_close(attention.attend_within_documents(query, key, value, documents), alone)


def test_a_module_of_ones_own_with_few_tokens_is_tried_with_these() -> None:
    wrapped = Wrapped()
    wrapped.body.set_input_embeddings(torch.nn.Embedding(8, 32))
    attention.check_documents(wrapped, 8)
    with pytest.raises(UserError, match=r"trying it failed \(IndexError"):
        attention.check_documents(wrapped)
