"""Memory of a training step before there is one: the real builder and the real step, run on fake tensors.

:mod:`train.memory.trial` builds the model and makes the step as a run does, and counts every allocation. So a
prediction works for any model and recipe, and takes the same few seconds for any sequence length.
"""

import os
import pickle
import sys
import tempfile
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any

from train.records import IGNORE, MicroBatch, UserError

ROOT = Path(__file__).resolve().parent.parent.parent
HALF = {"fp16": "float16", "bf16": "bfloat16"}
PRECISIONS = ("no", "tf32", "fp16", "bf16")
GUESS = "plain tokens and labels are assumed: a task with others needs a longest_example()"
OFFLOAD = "fsdp2_offload"
SHARDED_WEIGHTS = ("fsdp2", OFFLOAD)  # where a rank keeps only its part of the weights


@dataclass(frozen=True)
class Target:
    """The device that a prediction is for, as far as memory and time depend on it.

    Its rates are those of a common processor where no others are known: they rank settings.
    """

    device_type: str  # cpu, cuda or mps
    capability: tuple[int, int] = (9, 0)
    prefers_cudnn: bool = False  # whether torch tries cuDNN's attention before flash
    flops_per_second: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PRECISIONS, 1e12))
    bytes_per_second: float = 1e11


@dataclass(frozen=True)
class Job:
    """One step to predict: a configuration, the shapes that the data gives it, and the device."""

    values: dict[str, Any]  # the configuration as flat values, see :func:`train.config.to_values`
    target: Target
    vocab_size: int
    micro_batch_size: int
    length: int  # S of the longest micro-batch; a table of positions is as long as max_length, if that is more
    accumulates: bool = True  # whether an optimizer step has several micro-batches
    num_labels: int = 0  # classes of a classifier; 0: the vocabulary is the classes
    padded: bool = False  # whether the micro-batch has an attention mask that hides something
    eval_padded: bool = False  # and that of an evaluation
    # The shape, -1 for S, and type of an example's inputs and ``labels`` (without these a class, or one a position);
    # the type of a mask is followed by how many ones it has.
    tensors: dict[str, tuple[tuple[int, ...], str]] = field(default_factory=lambda: {"input_ids": ((-1,), "int64")})
    is_guess: bool = False  # whether these are one
    num_targets: int | None = None  # labels that are targets; None: all
    documents: tuple[tuple[int, ...], ...] = ()  # with packing, their lengths by row; empty: one a row, the longest
    eval_batch_size: int | None = None
    eval_length: int | None = None  # S of the longest batch that is evaluated; None: ``length``
    special_tokens: tuple[int | None, ...] = (0, 2, 1)  # start, end and padding: RoBERTa's
    world_size: int = 1
    sharding: str = "none"  # none, ddp, fsdp2 or fsdp2_offload

    @property
    def tokenizer_and_labels(self) -> tuple[Any, list[str]]:
        """Stand-ins for the tokenizer, of which a model is told length and marks, and for the names of the classes."""
        ids = dict(zip(("bos_token_id", "eos_token_id", "pad_token_id"), self.special_tokens, strict=True))
        tokenizer = type("Tokenizer", (), {**ids, "__len__": lambda _: self.vocab_size})()
        return tokenizer, [str(number) for number in range(self.num_labels)]


@dataclass(frozen=True)
class Prediction:
    """What a step allocates on one rank."""

    peak_bytes: int  # largest number of bytes that tensors hold, as ``torch.cuda.max_memory_allocated`` counts
    phase: str
    operator: str
    bytes_by_kind: dict[str, int]  # at the peak
    peak_bytes_by_phase: dict[str, int]
    reserved_bytes: int  # what the caching allocator holds for that if it may; on a CPU, the peak itself
    least_reserved_bytes: int  # what it has to hold: with expandable segments a full device gets back what lies unused
    num_parameters: int
    num_trained_parameters: int
    attention_kernels: tuple[str, ...]
    flops: float  # of one forward and backward
    seconds: float  # estimated, of one forward and backward
    notes: tuple[str, ...] = ()
    host_bytes_by_kind: dict[str, int] = field(default_factory=dict)  # what a step on a card keeps in host memory


class CannotStandInError(UserError):
    """This build of torch cannot be made to believe in a card."""


class Predictor(AbstractContextManager["Predictor"]):
    """A process that predicts. It starts with the first job, in a few seconds, and takes the jobs one by one."""

    def __init__(self) -> None:
        self._process: Any = None
        self._hides_cards = True  # a process that only plans should not take a card's memory
        self._asked: Any = None

    def close(self, *exception: Any) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._process = None  # its pipes close with it: another thread may still be reading

    __exit__ = close

    def start(self) -> Any:
        """The process; unless it runs already, it is started and loads the libraries."""
        if self._process is None:
            foreign = ("ACCELERATE_", "RANK", "LOCAL_", "WORLD_SIZE", "MASTER_")  # of the run that asks
            environment = {k: v for k, v in os.environ.items() if not k.startswith(foreign)}
            paths = [str(ROOT), *filter(None, [environment.get("PYTHONPATH")])]
            environment |= {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
            if self._hides_cards:
                environment["CUDA_VISIBLE_DEVICES"] = ""
            self._errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 - closed with the process
            code = "import sys; sys.path[:] = filter(None, sys.path); from train.memory.server import main; main()"
            command = [sys.executable, "-c", code]  # without this folder, where files may be called like libraries
            self._process = Popen(command, stdin=PIPE, stdout=PIPE, stderr=self._errors, env=environment)
        return self._process

    def ask(self, job: Job) -> None:
        """Submits a job without waiting for the answer."""
        process, self._asked = self.start(), job
        with suppress(BrokenPipeError):  # it has died: the answer will say why
            pickle.dump(job, process.stdin)
            process.stdin.flush()

    def answer(self) -> Prediction:
        """The answer to the job that was asked last; raises UserError if it cannot work, or its process died."""
        process = self.start()
        try:
            answer = pickle.load(process.stdout)
        except (EOFError, pickle.UnpicklingError):
            status = process.wait()
            self._errors.seek(0)
            said = self._errors.read().strip().splitlines()[-1:]
            self.close()
            what = f"the prediction ended with status {status}: {' '.join(said) or 'no message'}"
            raise UserError(f"{what}. The memory of this cannot be predicted here; a run measures it.") from None
        if isinstance(answer, CannotStandInError) and self._hides_cards:
            self.close()
            self._hides_cards = False
            return self.predict(self._asked)
        if isinstance(answer, UserError):
            raise answer
        return answer

    def predict(self, job: Job) -> Prediction:
        self.ask(job)
        return self.answer()


def random_batch(job: Job, size: int) -> MicroBatch:
    """A micro-batch of the job's shape on the CPU."""
    import torch

    def made(name: str, low: int, high: int) -> torch.Tensor:
        of_each, kind = job.tensors.get(name, (() if job.num_labels else (-1,), "int64"))
        shape, (dtype, *chosen) = (size, *(job.length if dim == -1 else dim for dim in of_each)), kind.split()
        numbers = torch.randint(low, high, shape)
        if chosen:
            most = int(chosen[0]) % 2**62  # -1: all
            numbers = (torch.arange(shape[-1]) < most).expand(shape).clone()
        return numbers.to(getattr(torch, dtype))  # which may be one of few numbers

    inputs: dict[str, Any] = {name: made(name, 3, job.vocab_size) for name in job.tensors if name != "labels"}
    if (end := job.special_tokens[1]) is not None:  # of every text one, as some classifiers want
        inputs["input_ids"].masked_fill_(inputs["input_ids"] == end, 3 + (end == 3))[:, -1] = end
    if job.padded:
        inputs["attention_mask"] = torch.ones(inputs["input_ids"].shape[:2], dtype=torch.long)
        inputs["attention_mask"][:, -1] = 0
    if job.values.get("packing"):
        from train.extras.long_sequences.attention import Documents

        fit = [sum(row) for row in job.documents] == [job.length] * size  # not where another shape is asked for
        documents = Documents.of(job.documents if fit else ((job.length,),) * size)
        inputs |= {"position_ids": documents.position_ids(), "documents": documents}
    labels = made("labels", *((0, job.num_labels) if job.num_labels else (3, job.vocab_size)))
    num_targets = -(-job.num_targets * size // job.micro_batch_size) if job.num_targets else labels.numel()
    labels.view(-1)[num_targets:] = IGNORE
    return MicroBatch(inputs, labels, num_targets, tuple(range(size)), size * job.length)
