"""Preferences (DPO): ``recipes/dpo.py`` against TRL's DPOTrainer, of the whole model and of adapters, in peak memory
and time.

    pip install trl==1.16.0
    python scripts/benchmarks/preferences.py --write     # two answers of 4,096 tokens; 15 minutes on two cores

Weights, pairs, steps, optimizer and precision are the same; each runs in a process of its own, in random order within a
round. Ratios are taken within a round. Both begin at a loss of log 2, and all later losses have to agree; those of
adapters, which begin at random, roughly. On a CPU, peak memory is traced from the allocator in separate runs.
"""

from __future__ import annotations

import contextlib
import gc
import io
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.benchmarks import building, harness, looping
from scripts.benchmarks.harness import spread
from train.figures import several

TEMPLATE, TRL = "template", "DPOTrainer"
KINDS = {"whole model": "none", "LoRA": "lora"}
TOLERANCE = {"none": 1e-3, "lora": 3e-2}
"""Largest difference of the losses in fp32, relative to them or to 0.1: sums are taken in another order, and steps
amplify it."""
LEARNING_RATES = {"none": 1e-6, "lora": 1e-4}
"""With which the losses fall, but not to zero."""
WEIGHT_DECAY, MAX_GRAD_NORM, BETA = 0.1, 1.0, 0.1
LORA_RANK, LORA_ALPHA = 16, 32
WARMUP_STEPS = 2
CHAT = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
LIBRARIES = ["torch", "datasets", "accelerate", "peft", "transformers.models.llama.modeling_llama"]


@dataclass(frozen=True)
class Options(harness.Options):
    """Compares the template with DPOTrainer on long pairs."""

    length: int = 4096
    """Tokens of a prompt with an answer."""
    answer: int = 2048
    """Tokens of the answer."""
    vocab_size: int = 32768
    hidden_size: int = 256
    """A multiple of 64."""
    layers: int = 4
    steps: int = 2
    """Measured steps of each run, of one pair each, after two to warm up."""
    rounds: int = 3


@dataclass(frozen=True)
class Workload:
    """The shapes of one measurement."""

    length: int
    answer: int
    vocab_size: int
    hidden_size: int
    layers: int
    steps: int

    @property
    def total_steps(self) -> int:
        return WARMUP_STEPS + self.steps

    def rows(self) -> list[dict[str, Any]]:
        """As many pairs as steps, and one to evaluate; all are equal, so the order in which they come is."""
        text, others = (Random(seed).choices("abcdefghijklmnop ", k=self.length) for seed in (1, 2))
        start, marks = self.length - self.answer, 3  # of the question, before the answer
        ask = {"role": "user", "content": "".join(text[: start - marks])}
        said = ({"role": "assistant", "content": "".join(own[start:-1])} for own in (text, others))
        chosen, rejected = ([one] for one in said)
        return [{"prompt": [ask], "chosen": chosen, "rejected": rejected}] * (self.total_steps + 1)

    def model_config(self) -> dict[str, Any]:
        heads = self.hidden_size // 64
        return {
            "model_type": "llama",
            "hidden_size": self.hidden_size,
            "intermediate_size": 11 * self.hidden_size // 4,
            "num_hidden_layers": self.layers,
            "num_attention_heads": heads,
            "num_key_value_heads": heads,
            "max_position_embeddings": self.length,
            "tie_word_embeddings": True,
            "vocab_size": self.vocab_size,
        }


@dataclass(frozen=True)
class Measurement:
    """One run."""

    seconds: list[float]
    """Of each measured step."""
    losses: list[float]
    """Of all steps, each before its update."""
    peak_bytes: int


def write_tokenizer(folder: Path) -> None:
    """One token for each byte, and marks for who speaks."""
    from tokenizers import Tokenizer, decoders, models
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import PreTrainedTokenizerFast

    letters: Any = Tokenizer(models.BPE({letter: n for n, letter in enumerate(sorted(ByteLevel.alphabet()))}, []))
    letters.pre_tokenizer, letters.decoder = ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    marks: Any = ["<|user|>", "<|assistant|>"]
    made = PreTrainedTokenizerFast(tokenizer_object=letters, eos_token="<|end|>", additional_special_tokens=marks)
    made.chat_template = CHAT
    made.save_pretrained(folder)


def run_template(load: Workload, adapter: str, folder: Path) -> tuple[list[float], list[float]]:
    """Seconds and losses of the steps of a run of ``main.py``."""
    from train.figures import read_metrics

    ends: list[float] = []
    flags: dict[str, Any] = {
        "task": "recipes/dpo.py:Task",
        "dataset": "recipes/dpo.py:documents",
        "dataset_options": json.dumps({"path": str(folder / "pairs.jsonl"), "beta": BETA}),
        "validation_fraction": 1 / (load.total_steps + 1),
        "model": folder / "model",
        "tokenizer": folder / "model",
        "max_length": load.length,
        "attn_implementation": "sdpa",
        "gradient_checkpointing": "full",
        "micro_batch_size": 1,
        "gradient_accumulation_steps": 1,
        "max_steps": load.total_steps,
        "learning_rate": LEARNING_RATES[adapter],
        "lr_scheduler": "constant",
        "weight_decay": WEIGHT_DECAY,
        "max_grad_norm": MAX_GRAD_NORM,
        "mixed_precision": "no",
        "tf32": False,
        "measure_memory": building.training_device().type == "cpu",  # on a card it resets the peaks that are read here
        "merge_adapter": False,
        "log_every_steps": 1,
        "output_dir": folder / "template",
    }
    if adapter == "none":
        del flags["merge_adapter"]
    else:
        flags |= {"adapter": adapter, "lora_rank": LORA_RANK, "lora_alpha": LORA_ALPHA}
    words = [str(word) for name, value in flags.items() for word in (f"--{name}", value)]
    if status := looping.run_main(words, lambda: ends.append(now())):
        raise SystemExit(f"the template's run ended with status {status}")
    rows = read_metrics(folder / "template" / "metrics.jsonl")
    return seconds_between(ends), [row["loss"] for row in rows if row["kind"] == "train"]


def run_trl(load: Workload, adapter: str, folder: Path) -> tuple[list[float], list[float]]:
    """The same of a run of DPOTrainer, whose head also computes accuracy, entropy and mean logits of the answers.

    It leaves the prompt out, which it otherwise does on cards alone.
    """
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import TrainerCallback
    from trl import DPOConfig, DPOTrainer  # type: ignore

    ends: list[float] = []

    class Clock(TrainerCallback):
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            ends.append(now())

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            ends.append(now())

    on_cpu = building.training_device().type == "cpu"
    arguments = DPOConfig(
        output_dir=str(folder / "trl"),
        beta=BETA,
        max_length=None,
        gradient_checkpointing=True,
        model_init_kwargs={"dtype": "float32", "attn_implementation": "sdpa"},
        per_device_train_batch_size=1,
        gradient_accumulation_steps=1,
        max_steps=load.total_steps,
        learning_rate=LEARNING_RATES[adapter],
        lr_scheduler_type="constant",
        weight_decay=WEIGHT_DECAY,
        max_grad_norm=MAX_GRAD_NORM,
        optim="adamw_torch_fused",
        bf16=False,
        use_cpu=on_cpu,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=not on_cpu,
    )
    lora = LoraConfig(r=LORA_RANK, lora_alpha=LORA_ALPHA, target_modules="all-linear", task_type="CAUSAL_LM")
    rows = Dataset.from_list(load.rows()[: load.total_steps])
    given = {"args": arguments, "train_dataset": rows, "callbacks": [Clock()]}
    trainer = DPOTrainer(str(folder / "model"), **given, peft_config=None if adapter == "none" else lora)
    with patch("trl.trainer.utils._use_triton", lambda device: True):
        trainer.train()
    return seconds_between(ends), [row["loss"] for row in trainer.state.log_history if "loss" in row]


def now() -> float:
    harness.synchronize()
    return time.perf_counter()


def seconds_between(ends: list[float]) -> list[float]:
    return [after - before for before, after in pairwise(ends)]


RUNS = {TEMPLATE: run_template, TRL: run_trl}


def measure(
    take_turn: Callable[[], None], who: str, adapter: str, load: Workload, trace_memory: bool = False
) -> Measurement:
    """One run in this process; with ``trace_memory`` its times mean nothing."""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    on_cuda = building.training_device().type == "cuda"
    if not on_cuda:
        building.use_cpu_threads(None)
    take_turn()
    with tempfile.TemporaryDirectory() as name, contextlib.redirect_stdout(io.StringIO()):
        folder = Path(name)
        write_tokenizer(folder / "model")
        (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in load.rows()), encoding="utf-8")
        torch.manual_seed(0)
        config = transformers.AutoConfig.for_model(**load.model_config())
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder / "model")
        traces = trace_memory and not on_cuda
        gc.collect()
        with harness.traced_allocations() if traces else contextlib.nullcontext() as traced:
            seconds, losses = RUNS[who](load, adapter, folder)
    peak = torch.cuda.max_memory_allocated() if on_cuda else traced.peak_bytes if traced else 0
    return Measurement(seconds[WARMUP_STEPS:], losses, peak)


class Processes(harness.Processes):
    """Each run in a new process."""

    def measure(self, who: str, adapter: str, load: Workload, trace_memory: bool = False) -> Measurement:
        """:func:`measure` there; raises SystemExit if it ends without a result."""
        try:
            return self.in_turns(measure, {who: (who, adapter, load, trace_memory)}, Random(0))[who]
        except harness.EndedError:
            raise SystemExit(f"{who} failed; its error is printed above.") from None


def measured(options: Options) -> dict[str, Any]:
    """Time and memory of each row."""
    given: dict[str, Any] = {
        name: value for name, value in asdict(options).items() if name in Workload.__dataclass_fields__
    }
    load, processes = Workload(**given), Processes(building.training_device().type == "cpu", LIBRARIES)
    found: dict[str, dict[str, Any]] = {}
    for kind, adapter in KINDS.items():
        print(f"{kind}:", flush=True)
        found[kind] = compare({who: partial(processes.measure, who, adapter) for who in (TRL, TEMPLATE)}, load, options)
    return {"workload": asdict(load), "rounds": options.rounds, "trl": version("trl"), "results": found}


def compare(runs: dict[str, Callable[..., Measurement]], load: Workload, options: Options) -> dict[str, dict[str, Any]]:
    """Time and memory of each of ``runs``; ratios are to DPOTrainer's in the same round."""

    def announce(number: int, results: dict[str, Measurement]) -> None:
        times = ", ".join(f"{who} {statistics.mean(run.seconds):.2f} s" for who, run in results.items())
        print(f"  round {number} of {options.rounds}: {times}", flush=True)

    rounds = harness.paired_rounds({who: partial(run, load) for who, run in runs.items()}, options.rounds, announce)
    seconds = [{who: statistics.mean(one[who].seconds) for who in runs} for one in rounds]
    found: dict[str, dict[str, Any]] = {}
    for who, run in runs.items():
        first = rounds[0][who]
        peak = first.peak_bytes or run(replace(load, steps=1), trace_memory=True).peak_bytes
        print(f"  {who}: peak {peak / harness.MIB:.0f} MiB", flush=True)
        found[who] = {
            "seconds_per_step": spread([one[who] for one in seconds]),
            "time_ratio": spread(harness.ratios(seconds, who, TRL)),
            "peak_bytes": peak,
            "losses": first.losses,
        }
    return found


def is_equal_work(found: dict[str, Any]) -> bool:
    """Whether all losses are those of DPOTrainer."""
    return all(
        abs(ours - theirs) <= TOLERANCE[KINDS[kind]] * max(ours, theirs, 0.1)
        for kind, rows in found["results"].items()
        for ours, theirs in zip(rows[TEMPLATE]["losses"], rows[TRL]["losses"], strict=True)
    )


TABLE = harness.Table(
    ("what", "trains", "peak memory, MiB", "÷ TRL", "step, s", "÷ TRL (middle half of the rounds)", "losses"), "llrrrrl"
)


def cells(who: str, kind: str, found: dict[str, Any]) -> list[str]:
    """A row of the table; few rounds have no quartiles."""
    row, reference = found["results"][kind][who], found["results"][kind][TRL]
    time = row["time_ratio"]
    spans = f" ({time['quartile_1']:.2f} to {time['quartile_3']:.2f})" if found["rounds"] > 2 else ""
    return [
        f"TRL's {TRL} {found['trl']}" if who == TRL else "`recipes/dpo.py`",
        kind,
        f"{row['peak_bytes'] / harness.MIB:,.0f}",
        f"{row['peak_bytes'] / reference['peak_bytes']:.2f}",
        f"{row['seconds_per_step']['median']:.2f}",
        f"{time['median']:.2f}{spans}",
        ", ".join(f"{loss:.4f}" for loss in row["losses"]),
    ]


def page(found: dict[str, Any]) -> str:
    """The table in Markdown, with the workload and the check of the losses."""
    load = Workload(**found["workload"])
    agreement = "agree" if is_equal_work(found) else "DO NOT AGREE: the times cannot be compared"
    lines = [
        "# Preferences: DPO with two long answers",
        "",
        *TABLE.lines(cells(who, kind, found) for kind, rows in found["results"].items() for who in rows),
        "",
        f"- A Llama of hidden {load.hidden_size}, {load.layers} layers, vocabulary {load.vocab_size:,}; a pair of "
        f"2 × {load.length:,} tokens per step, of which {load.answer:,} are the answer's; fp32, full checkpointing; "
        f"{several(found['rounds'], 'round')} of {load.steps} steps after {WARMUP_STEPS}. LoRA: rank {LORA_RANK}, all "
        "linear layers.",
        f"- The losses of the steps {agreement}, those of adapters, which begin at random, within "
        f"{100 * TOLERANCE['lora']:.0f} %.",
        "- On a CPU, DPOTrainer's head takes tiles of 4,096 positions and 32,768 entries, in several tensors; on a "
        "card a Triton kernel takes one. It is made to leave the prompt out here as it does there.",
        f"- {harness.machine_line(found)}.",
        "",
    ]
    return "\n".join(lines)


def main() -> int:
    """Status 1 if the two did not do equal work."""
    return 0 if is_equal_work(harness.report(Options, __doc__, measured, page, name="preferences")) else 1


if __name__ == "__main__":
    raise SystemExit(main())
