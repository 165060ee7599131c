"""Memory of a training step before there is one: the real builder and the real step, run on fake tensors.

Nothing here knows what a layer needs: the model comes from :mod:`train.model`, the step from :mod:`train.step`,
and what they allocate is counted. So it holds for any model and any recipe, and takes the same few seconds whatever
the sequence length. A prediction runs in a process of its own, see :class:`Predictor`.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from train.config import Architecture, Config, from_values
from train.errors import UserError

if TYPE_CHECKING:
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer
    from torch import Tensor, nn

    from train.loss import ModelWithLoss
    from train.records import MicroBatch

ROOT = Path(__file__).resolve().parent.parent.parent
CUDA_GRANULE_BYTES = 512


@dataclass(frozen=True)
class Target:
    """The device that a prediction is for, as far as memory and time depend on it."""

    device_type: str
    """cpu or cuda."""
    capability: tuple[int, int] = (9, 0)
    prefers_cudnn: bool = False
    """Whether torch tries cuDNN's attention before flash."""
    flops_per_second: dict[str, float] = field(default_factory=dict)
    """By precision: no, fp16, bf16."""
    bytes_per_second: float | None = None


@dataclass(frozen=True)
class Job:
    """One step to predict: a configuration, what the data makes of it, and the device."""

    values: dict[str, Any]
    """The configuration as flat values, see :func:`train.config.to_values`."""
    target: Target
    auto_class: str
    vocab_size: int
    micro_batch_size: int
    length: int
    """S of the longest micro-batch."""
    accumulates: bool = True
    """Whether an optimizer step has several micro-batches."""
    num_labels: int = 0
    """Classes of a classifier; 0: the vocabulary is the classes."""
    padded: bool = False
    """Whether the micro-batch comes with an attention mask that hides something."""
    input_names: tuple[str, ...] = ("input_ids",)
    """Inputs of the model, each (B, S)."""
    num_targets: int | None = None
    """Labels that are targets; None: all."""
    documents: tuple[tuple[int, ...], ...] = ()
    """With packing, the lengths of the documents in each row; empty: one document a row, which takes longest."""
    eval_batch_size: int | None = None
    special_tokens: tuple[int | None, int | None, int | None] = (0, 1, 2)
    """Start, end and padding."""
    world_size: int = 1
    sharding: str = "none"
    """none, ddp, fsdp2, zero2 or zero3."""


@dataclass(frozen=True)
class Prediction:
    """What a step allocates on one rank."""

    peak_bytes: int
    """Largest number of bytes that tensors hold, as ``torch.cuda.max_memory_allocated`` counts."""
    phase: str
    operator: str
    bytes_by_kind: dict[str, int]
    """At the peak."""
    peak_bytes_by_phase: dict[str, int]
    reserved_bytes: int
    """What the caching allocator holds for that; on a CPU, the peak itself."""
    num_parameters: int
    num_trained_parameters: int
    attention_kernels: tuple[str, ...]
    flops: float | None
    """Of one forward and backward."""
    seconds: float | None
    """Estimated, of one forward and backward."""
    prediction_seconds: float
    notes: tuple[str, ...] = ()
    offloaded_bytes: int = 0
    """Pinned host memory for the inputs of checkpointed layers."""


class Predictor:
    """A process that predicts. It starts with the first job, in a few seconds, and takes one job after the other."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._hides_cards = True  # no memory of a card is to be taken by a process that only plans
        self._asked: list[Job] = []
        self._device_type: str | None = None

    def __enter__(self) -> Predictor:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.close()

    def close(self) -> None:
        """Ends the process."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._errors.close()
            self._process = None
        self._asked = []

    def start(self) -> None:
        """Begins to load the libraries, if that has not happened."""
        if self._process is None:
            self._process = self._started()

    def _started(self) -> subprocess.Popen[str]:
        paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
        foreign = ("ACCELERATE_", "FSDP_", "RANK", "LOCAL_", "WORLD_SIZE", "MASTER_")  # of the run that asks
        environment = {k: v for k, v in os.environ.items() if not k.startswith(foreign)}
        if self._hides_cards:
            environment["CUDA_VISIBLE_DEVICES"] = ""
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the process
        return subprocess.Popen(
            [sys.executable, "-c", "from train.memory.predict import main; main()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env={**environment, "PYTHONPATH": os.pathsep.join(p for p in paths if p), "OMP_NUM_THREADS": "1"},
        )

    def ask(self, job: Job) -> None:
        """Hands over a job without waiting for the answer."""
        if not self._asked and self._device_type not in (None, job.target.device_type):
            self.close()  # a process whose autograd has begun on a CPU alone takes no card afterwards
        self._device_type = job.target.device_type
        self.start()
        assert self._process is not None and self._process.stdin is not None
        self._asked.append(job)
        try:
            self._process.stdin.write(json.dumps(asdict(job)) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._died() from None

    def answer(self) -> Prediction:
        """The answer to the oldest job without one.

        Raises:
            UserError: the job cannot work, or the process died of it; the next job starts another.
        """
        assert self._process is not None and self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise self._died()
        values = json.loads(line)
        if values.get("needs_card") and self._hides_cards:
            waiting = list(self._asked)
            self.close()
            self._hides_cards = False
            for job in waiting:
                self.ask(job)
            return self.answer()
        self._asked.pop(0)
        if "error" in values:
            raise UserError(values["error"])
        lists = {k: tuple(v) for k, v in values.items() if isinstance(v, list)}
        return Prediction(**(values | lists))

    def predict(self, job: Job) -> Prediction:
        """:meth:`ask` and :meth:`answer`."""
        self.ask(job)
        return self.answer()

    def _died(self) -> UserError:
        assert self._process is not None
        status = self._process.wait()
        self._errors.seek(0)
        said = self._errors.read().strip().splitlines()[-1:]
        self.close()
        return UserError(
            f"the prediction ended with status {status}: {' '.join(said) or 'no message'}. The memory of this model or "
            "setting cannot be predicted here; a run still measures it."
        )


def predict(job: Job) -> Prediction:
    """The memory of ``job``'s step. For a CUDA device that is not there, call it in a process of its own.

    Raises:
        UserError: the model cannot be built, or this torch cannot be made to plan for CUDA.
    """
    import torch

    from train.extras.adapters.lora import parameter_counts
    from train.extras.meter.tracker import GRADIENTS, OPTIMIZER_STATE, PARAMETERS, WORKSPACE, held_by, tag_gradients
    from train.launch import segments_grow
    from train.memory import fake_cuda, ranks, zero
    from train.memory.allocator import replay
    from train.memory.costs import Costs
    from train.memory.fakes import FakeTracker, fake_tensors, few_chunks, few_tiles, one_piece
    from train.memory.kernels import Attention, library_workspace_bytes
    from train.memory.loss_kernels import library_losses
    from train.optim import step_function

    started = time.perf_counter()
    asked, target = job.values, job.target
    if job.sharding in zero.STAGE:
        job = replace(job, values=zero.engine_values(asked))
    config = from_values(job.values)
    on_cuda = target.device_type == "cuda"
    if on_cuda:
        fake_cuda.install(target.capability)
    architecture, notes = _with_known_attention(config.architecture)
    if config.data.packing and not job.documents:
        notes.append("packing: one document a row is assumed, which takes longest")
    if on_cuda and architecture.gradient_checkpointing_offload and not torch.cuda.is_initialized():
        ranks.still_streams()
    if architecture.compile:
        notes.append("compile: the step is predicted as it runs uncompiled; compiled layers may keep other tensors")
    accelerator = _accelerator(job, config)
    rates = {torch.float32: "no", torch.float16: "fp16", torch.bfloat16: "bf16"}
    rates = {t: target.flops_per_second[p] for t, p in rates.items() if target.flops_per_second.get(p)}
    costs = Costs(rates, target.bytes_per_second) if rates and target.bytes_per_second else None
    num_classes = job.num_labels or job.vocab_size
    with ExitStack() as stack:
        stack.enter_context(fake_tensors())
        # Made before anything is counted: on the device only what the step itself copies there counts.
        window = [random_batch(job, job.micro_batch_size)]
        evaluated = random_batch(job, job.eval_batch_size) if job.eval_batch_size else None
        tracker = stack.enter_context(
            FakeTracker(
                target.device_type,
                granule_bytes=CUDA_GRANULE_BYTES if on_cuda else 1,
                num_classes=num_classes,
                keep_trace=on_cuda,
                padded=job.padded,
                costs=costs,
            )
        )
        for batch in (*window, *([evaluated] if evaluated is not None else [])):
            tracker.ignore([*batch.inputs.values(), batch.labels])
        if shards_weights(job.sharding):
            stack.enter_context(ranks.shapes_uncounted(tracker))
        stack.enter_context(few_chunks(tracker))
        stack.enter_context(few_tiles(tracker))
        stack.enter_context(one_piece())
        stack.enter_context(library_losses(target.capability, costs))
        attention = stack.enter_context(Attention(target.capability, target.prefers_cudnn))
        model, optimizer, network = build(job, architecture, config, accelerator)
        parameters = list(network.parameters())
        tracker.tag(PARAMETERS, held_by(network))
        for handle in tag_gradients(tracker, parameters):
            stack.callback(handle.remove)
        num_trained, num_parameters = parameter_counts(network)
        if job.sharding in zero.STAGE:
            tracker.hold(zero.state_bytes(asked, num_parameters, job.world_size), OPTIMIZER_STATE)
            tracker.hold(zero.bucket_bytes(num_parameters), WORKSPACE)
            kept = 0
            if job.sharding == "zero3" and job.accumulates:  # what shards here keeps them in the weights' type
                kept = -(-num_parameters // job.world_size) * parameters[0].element_size()
            tracker.hold(zero.gradient_bytes(num_parameters, job.world_size) - kept, GRADIENTS)
            if job.sharding == "zero2":  # a gradient goes into its bucket as soon as it is there
                for parameter in parameters:
                    if parameter.requires_grad:
                        parameter.register_post_accumulate_grad_hook(_drop_gradient)
        if job.sharding == "ddp":  # the reducer's buckets, which the fake gradients do not go through
            tracker.hold(sum(p.numel() * p.element_size() for p in parameters if p.requires_grad), GRADIENTS)
        if on_cuda:
            tracker.hold(library_workspace_bytes(target.capability), WORKSPACE)

        tracker.restart_trace()  # a run builds on the CPU and moves what is left of each tensor to the device
        # The first update makes the optimizer's state, so only from the second step on the peak is what it stays.
        tracker.mark("optimizer")
        _zero_step(optimizer, parameters, one_by_one=config.optimization.optimizer_in_backward)
        tracker.tag(OPTIMIZER_STATE, [v for state in optimizer.optimizer.state.values() for v in state.values()])
        if job.accumulates and job.sharding != "zero2":
            for parameter in parameters:
                parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
            tracker.tag(GRADIENTS, [p.grad for p in parameters])
        tracker.mark("idle")
        tracker.reset_peak()
        step_function(config.optimization)(
            accelerator, model, optimizer, window, config.optimization, mark=tracker.mark
        )
        flops, seconds = (costs.flops, costs.seconds) if costs is not None else (None, None)
        tracker.mark("idle")
        if evaluated is not None:
            model.eval()
            with torch.no_grad():
                tracker.mark("evaluation")
                evaluated = evaluated.to(accelerator.device)
                model(evaluated.inputs, evaluated.labels, scored=True)
        peak = tracker.peak
        reserved = peak.num_bytes
        if tracker.trace is not None:
            reserved = replay(tracker.trace, expandable_segments=segments_grow()).reserved_bytes
    return Prediction(
        peak_bytes=peak.num_bytes,
        phase=peak.phase,
        operator=peak.operator,
        bytes_by_kind=peak.bytes_by_kind,
        peak_bytes_by_phase={k: v for k, v in tracker.peak_bytes_by_phase.items() if k != "idle"},
        reserved_bytes=reserved,
        num_parameters=num_parameters,
        num_trained_parameters=num_trained,
        attention_kernels=tuple(sorted(attention.kernels_used)),
        flops=flops,
        seconds=seconds,
        prediction_seconds=time.perf_counter() - started,
        notes=tuple(notes),
        offloaded_bytes=tracker.pinned_bytes,
    )


def shards_weights(sharding: str) -> bool:
    """Whether a rank keeps only its part of the weights."""
    return sharding in ("fsdp2", "fsdp2_offload", "zero3")


def _drop_gradient(parameter: Tensor) -> None:
    parameter.grad = None


class _Tokenizer:
    """What the builder asks of a tokenizer."""

    def __init__(self, job: Job) -> None:
        self._size = job.vocab_size
        self.bos_token_id, self.eos_token_id, self.pad_token_id = job.special_tokens

    def __len__(self) -> int:
        return self._size


def _accelerator(job: Job, config: Config) -> Accelerator:
    import torch
    from accelerate.state import AcceleratorState, GradientState

    from train.launch import Launch
    from train.memory import ranks
    from train.runtime import make_accelerator, meet_over_gloo, resolve_precision

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    device_type = job.target.device_type
    ranks.leave()  # of the prediction before
    precision, _ = resolve_precision(config.optimization.mixed_precision or "no", torch.device(device_type))
    shards = shards_weights(job.sharding)
    ranks.join(job.world_size, shards, device_type, precision, offloads=job.sharding == "fsdp2_offload")
    launch = Launch(world_size=job.world_size if shards else 1, engine="fsdp2" if shards else "ddp")
    if device_type == "cpu":
        meet_over_gloo(launch)
    return make_accelerator(launch, precision, accumulation_steps=1, on_cpu=device_type == "cpu")


def _with_known_attention(architecture: Architecture) -> tuple[Architecture, list[str]]:
    """Attention of separate packages is predicted as SDPA's flash kernel, which keeps the same tensors."""
    asked = architecture.attn_implementation
    if asked in (None, "sdpa", "eager"):
        return architecture, []
    note = f"attention {asked} is predicted as sdpa, whose flash kernel keeps the same tensors"
    return replace(architecture, attn_implementation="sdpa"), [note]


def build(
    job: Job,
    architecture: Architecture,
    config: Config,
    accelerator: Accelerator,
    initialised: bool = False,
    divide: Callable[[ModelWithLoss], None] | None = None,
) -> tuple[nn.Module, AcceleratedOptimizer, nn.Module]:
    """Prepared model, prepared optimizer, and the network inside the model.

    Args:
        initialised: with real weights; fake ones must do without, since some initialisations repeat until the data
            pleases them.
        divide: called before the optimizer is built, such as to leave a rank its part of the weights.
    """
    from torch.utils._python_dispatch import _disable_current_modes
    from transformers.initialization import no_init_weights

    from train.cross_entropy import Objective
    from train.loss import ModelWithLoss, choose_loss, place_of
    from train.memory.eight_bit import EightBitState
    from train.memory.fakes import fake_adapters
    from train.model import build_model
    from train.optim import build_optimizer, parameter_groups
    from train.runtime import shard_by_layer

    labels = [str(number) for number in range(job.num_labels)]
    tokenizer: Any = _Tokenizer(job)
    with ExitStack() as stack:
        if not initialised:
            stack.enter_context(accelerator.device)
            stack.enter_context(no_init_weights())
            stack.enter_context(fake_adapters(architecture.adapter))
        options: dict[str, Any] = {"packing": config.data.packing, "precision": accelerator.mixed_precision}
        network = build_model(architecture, job.auto_class, tokenizer, job.length, labels, weights=False, **options)
        if hasattr(network, "tie_weights"):
            network.tie_weights()  # pyright: ignore - left out with the initialisation
    with _disable_current_modes():  # what it tries is no part of a step
        optim = config.optimization
        objective = Objective(optim.label_smoothing, optim.z_loss)
        place = place_of(network, accelerator.device, accelerator.mixed_precision)
        # a package that is asked for by name need not be here, where only is planned
        loss = choose_loss(optim.loss, network, place, objective, installed=None if initialised else True)
    with_loss = ModelWithLoss(network, loss, objective)
    if divide is not None:
        divide(with_loss)
    shard_by_layer(accelerator, network)
    if config.optimization.optimizer == "adamw_8bit" and not initialised:
        optimizer = EightBitState(parameter_groups(network, config.optimization), {})
    else:
        optimizer = build_optimizer(network, config.optimization, accelerator.device)
    model, optimizer = accelerator.prepare(
        with_loss,
        optimizer,
        device_placement=[initialised, initialised],
    )
    return model, optimizer, network


def _zero_step(optimizer: AcceleratedOptimizer, parameters: list[nn.Parameter], one_by_one: bool) -> None:
    """Makes the optimizer's state, by gradients of zeros: all together, or each for itself, as a run will."""
    import torch

    trained = [parameter for parameter in parameters if parameter.requires_grad]
    for some in [[parameter] for parameter in trained] if one_by_one else [trained]:
        for parameter in some:
            parameter.grad = torch.zeros_like(parameter)
        optimizer.optimizer.step()
        optimizer.optimizer.zero_grad()


def random_batch(job: Job, size: int) -> MicroBatch:
    """A micro-batch of the job's shape on the CPU; of zeros where tensors are fake."""
    import torch

    from train.records import Documents, MicroBatch

    shape, high = (size, job.length), job.vocab_size
    inputs = {name: torch.randint(3, high, shape) for name in job.input_names}
    if job.padded:
        inputs["attention_mask"] = torch.ones(shape, dtype=torch.long)
        inputs["attention_mask"][:, -1] = 0
    documents = None
    if job.values["packing"]:
        fit = [sum(row) for row in job.documents] == [job.length] * size  # not where another shape is asked for
        lengths = job.documents if fit else ((job.length,),) * size
        documents = Documents.of(lengths)
        inputs["position_ids"] = documents.position_ids()
    labels = torch.randint(job.num_labels, (size,)) if job.num_labels else torch.randint(3, high, shape)
    num_targets = job.num_targets or labels.numel()
    return MicroBatch(inputs, labels, num_targets, tuple(range(size)), size * job.length, documents)


def job_from(values: dict[str, Any]) -> Job:
    """A job from what JSON made of it."""
    target = Target(**{**values["target"], "capability": tuple(values["target"]["capability"])})
    lists = {k: tuple(v) for k, v in values.items() if isinstance(v, list)}
    documents = tuple(map(tuple, values["documents"]))
    return Job(**{**values, **lists, "target": target, "documents": documents})


def this_target() -> Target:
    """The device of this machine."""
    import torch

    if not torch.cuda.is_available():
        return Target("cpu")
    major, minor = torch.cuda.get_device_capability()
    cudnn = torch.backends.cudnn.version() or 0
    return Target("cuda", (major, minor), cudnn > 91500 and (major, minor) in ((9, 0), (10, 0), (10, 3)))


def main() -> None:
    """Reads jobs and writes predictions, a line of JSON each, until there are no more."""
    answers = sys.stdout
    sys.stdout = sys.stderr  # what libraries print is no answer
    from train.memory.fake_cuda import CannotStandInError
    from train.memory.fakes import fake_tensors

    with fake_tensors():  # loads the libraries while there is no job yet
        pass
    gc.freeze()  # they have a million objects that no collection needs to look at again
    for line in sys.stdin:
        try:
            answer = asdict(predict(job_from(json.loads(line))))
        except CannotStandInError as error:
            answer = {"error": str(error), "needs_card": True}
        except UserError as error:
            answer = {"error": str(error)}
        except Exception as error:  # whatever a model may do with tensors that have no data
            traceback.print_exc()
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            answer = {"error": f"this model or setting cannot be predicted: {reason}. A run still measures it."}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
        gc.collect()
        gc.freeze()
    answers.flush()
    os._exit(0)  # what was put into C++ tables must not be asked again while the interpreter winds down
