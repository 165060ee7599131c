"""Does a configuration fit on a device, and which settings are the fastest that fit.

A prediction takes seconds, so the search skips settings that others already decide: memory grows with the micro-batch
and shrinks with recomputation, and recomputation costs time.
"""

import json
import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from train.memory.ladder import Recompute, divisors, largest_fitting
from train.memory.predict import Job, Prediction, Predictor
from train.memory.question import Question, Setting, position_limit, replace_length
from train.records import UserError

EQUALLY_FAST = 0.02  # estimates that differ by less are equally fast: what needs less is kept
SHARDING_GAIN = 0.1  # by which fsdp2 has to be faster than ddp: it communicates more, which is not estimated
HOST_LINK_BYTES_PER_SECOND = 20e9  # what PCIe 4.0 × 16 carries in one direction in practice; an estimate
START_SECONDS = 5.0  # without an answer, after which a plan has another process begin: about what one takes to start
LONGEST = 4 * 2**20  # tokens; the longest sequence that is tried


class Predictions:
    """Predictions by job, each made once, as many at a time as there are ``predictors``."""

    def __init__(self, *predictors: Predictor, say: Callable[[str], object] = lambda line: None) -> None:
        self._say, self._idle, self.pool = say, deque(predictors), ThreadPoolExecutor(len(predictors))
        self.patience_seconds = START_SECONDS if len(predictors) > 1 else None
        self.known: dict[str, Future[Prediction]] = {}

    def ask(self, job: Job, how: str) -> Future[Prediction]:
        """Has ``job`` predicted, and says so when that begins; ``how`` names its techniques."""
        key = json.dumps(asdict(job), sort_keys=True)
        if key not in self.known:
            line = f"predicting ({len(self.known) + 1}): {job.micro_batch_size} × {job.length:,} tokens, {how}"
            self.known[key] = self.pool.submit(self._predict, job, line)
        return self.known[key]

    def _predict(self, job: Job, line: str) -> Prediction:
        predictor = self._idle.pop()  # there is one for each thread of the pool
        try:
            self._say(line)
            return predictor.predict(job)
        finally:
            self._idle.append(predictor)


@dataclass(frozen=True)
class Outcome:
    """A setting and what is predicted of it."""

    setting: Setting
    job: Job
    prediction: Prediction
    needed_bytes: int  # of the device: what the allocator has to reserve, the CUDA context and NCCL's buffers
    fits: bool
    host_bytes: int  # for what is offloaded, by a process
    link_seconds: float  # of a micro-batch, estimated: copies between host and device that no computation hides

    @property
    def seconds_per_token(self) -> float:
        """Of forward and backward on one rank, estimated. The update takes every setting as long, and is left out."""
        return (self.prediction.seconds + self.link_seconds) / (self.job.micro_batch_size * self.job.length)


def predicted(question: Question, predictions: Predictions, setting: Setting | None = None) -> Outcome:
    """What is predicted of ``setting``, None: of the configuration as it stands; raises UserError if it cannot run."""
    setting = setting or question.asked
    prediction = predictions.ask(job := question.job(setting), setting.techniques).result()
    needed = prediction.least_reserved_bytes + question.device.context_bytes + question.nccl_bytes
    # Inputs of layers go out in forward and come back in backward, which recomputes: three quarters of the time.
    on_host, seconds = prediction.host_bytes_by_kind, prediction.seconds
    copying = on_host.get("activations", 0) / HOST_LINK_BYTES_PER_SECOND
    link = max(0.0, copying - seconds / 4) + max(0.0, copying - seconds * 3 / 4)
    # Weights come in for forward and for backward, gradients go out.
    link += (2 * on_host.get("parameters", 0) + on_host.get("gradients", 0)) / HOST_LINK_BYTES_PER_SECOND
    return Outcome(setting, job, prediction, needed, needed <= question.room_bytes, sum(on_host.values()), link)


class Plan(NamedTuple):
    asked: Outcome | None  # the configuration as it stands; None where it leaves the micro-batch open or cannot run
    problem: str | None  # why the configuration as it stands cannot run
    best: Outcome | None  # the fastest setting that fits
    smallest: Outcome  # the setting that needs least


class Search:
    """The settings of a question, tried as far as needed."""

    def __init__(self, question: Question, predictions: Predictions) -> None:
        self.question, self._predictions, self._losses = question, predictions, question.losses
        per_rank = question.global_batch_size // question.world_size
        sizes = [per_rank] if question.config.get("optimizer_in_backward") else divisors(per_rank)
        self._sizes = sizes if question.pads else [1]

    def try_(self, setting: Setting) -> Outcome | None:
        """What is predicted of ``setting``; None where it cannot run."""
        with suppress(UserError):
            return predicted(self.question, self._predictions, setting)
        return None

    def _base(self, sharding: str) -> Setting:
        asked, precision = self.question.asked, self.question.precision(sharding)
        return replace(asked, micro_batch_size=self._sizes[0], mixed_precision=precision, sharding=sharding)

    def begin(self) -> None:
        """Has the configuration predicted and, while that lasts, in other processes what is probably asked next."""
        (ways, shardings), loss, first = self.question.stages[0], self._losses[-1], None
        likely = [(-1, shardings[-1]), (0, shardings[0]), (-(len(ways) // 2), shardings[0])]
        settings = [replace(self._base(sharding), loss=loss).recomputing(ways[n]) for n, sharding in likely]
        for setting in (self.question.asked, *settings):
            with suppress(UserError):
                asked = self._predictions.ask(self.question.job(setting), setting.techniques)
                first = first or asked
                if wait([first], self._predictions.patience_seconds).done:
                    return

    def smallest(self, ways: Sequence[Recompute], shardings: Sequence[str], known: Outcome | None = None) -> Outcome:
        """The setting that needs least, or ``known`` where none needs less; raises UserError if none can run."""
        base = self._base(shardings[-1])
        possible = [replace(base, loss=loss).recomputing(way) for way in ways for loss in self._losses]
        found = next(filter(None, map(self.try_, reversed(possible))), None)
        if found is None and known is None:
            return predicted(self.question, self._predictions, possible[0])  # which says why it cannot run
        return min(filter(None, (known, found)), key=lambda outcome: outcome.needed_bytes)

    def fastest(self, ways: Sequence[Recompute], shardings: Sequence[str], best: Outcome | None) -> Outcome | None:
        """The fastest setting with one of ``shardings`` that fits, ``best`` where none is clearly faster."""
        for sharding in shardings:
            gain = SHARDING_GAIN if best is not None and sharding != best.setting.sharding else EQUALLY_FAST
            base, left = self._base(sharding), dict.fromkeys(self._losses, self._sizes)
            may_fit = partial(self._may_fit, replace(base, loss=self._losses[-1]))
            first = 0 if may_fit(ways[0]) else bisect_left(ways, True, 1, key=may_fit)  # each way needs less
            for way in ways[first:]:
                too_large = math.inf
                for loss in reversed(self._losses):  # the one that needs less first: the other fits no larger size
                    sizes = [size for size in left[loss] if size < too_large]
                    tried = self._grown(replace(base, loss=loss).recomputing(way), sizes)
                    fits = [outcome for outcome in tried if outcome.fits]
                    for outcome in fits:
                        if best is None or outcome.seconds_per_token < best.seconds_per_token * (1 - gain):
                            best, gain = outcome, EQUALLY_FAST
                    # A slower way gains only by micro-batches that this one does not fit, if they gain anything.
                    largest = max((outcome.setting.micro_batch_size for outcome in fits), default=0)
                    gains_nothing = largest == self._sizes[-1] or _larger_gain_nothing(tried)
                    left[loss] = [] if gains_nothing else [size for size in left[loss] if size > largest]
                    if len(fits) < len(tried):
                        too_large = tried[len(fits)].setting.micro_batch_size
                if way == ways[0] and not left[self._losses[0]]:
                    return best  # nothing is faster than this way and loss, whatever memory there is
        return best

    def _may_fit(self, least: Setting, way: Recompute) -> bool:
        """Whether ``least`` fits with ``way``; also true where that cannot run, which says nothing of other ways."""
        outcome = self.try_(least.recomputing(way))
        return outcome is None or outcome.fits

    def _grown(self, technique: Setting, sizes: Sequence[int]) -> list[Outcome]:
        """``technique`` with growing micro-batches, until one does not fit or larger ones gain nothing."""
        tried: list[Outcome] = []

        def needs(size: int) -> int | None:
            if _larger_gain_nothing(tried) or not (outcome := self.try_(replace(technique, micro_batch_size=size))):
                return None
            insort(tried, outcome, key=lambda outcome: outcome.setting.micro_batch_size)
            return outcome.needed_bytes

        if sizes:
            largest_fitting(sizes, needs, self.question.room_bytes, sizes[0])
        return tried


def _larger_gain_nothing(tried: Sequence[Outcome]) -> bool:
    """Whether no micro-batch beats the fastest that fits of those that were ``tried`` of a technique, smallest first.

    An operator takes the longest of several times that are affine in the micro-batch. So the time of a step is convex
    in it, and each example beyond two sizes costs at least as much as it did between them.
    """
    if len(tried) < 2 or tried[-2].job.padded != tried[-1].job.padded:  # with a mask, other kernels run
        return False
    before, last = tried[-2:]
    tokens = (last.job.micro_batch_size - before.job.micro_batch_size) * last.job.length
    least = (last.prediction.seconds - before.prediction.seconds) / tokens
    fitting = (outcome.seconds_per_token for outcome in tried if outcome.fits)
    return min(fitting, default=math.inf) <= least * (1 + EQUALLY_FAST)


def make_plan(question: Question, predictions: Predictions, is_open: bool = False) -> Plan:
    """Whether the configuration fits, and the fastest setting that does; raises UserError if no setting can run.

    If it ``is_open``, something was left to auto, and the configuration as it stands is only a placeholder.
    """
    search, asked, problem = Search(question, predictions), None, None
    if not is_open:
        try:
            search.begin()
            asked = predicted(question, predictions)
        except UserError as error:
            problem = str(error)
    best = asked if asked is not None and asked.fits else None
    smallest: Any = asked
    for ways, shardings in question.stages:
        smallest = search.smallest(ways, shardings, smallest)  # some models cannot take a single example: BatchNorm
        if best is not None or smallest.fits:
            best = search.fastest(ways, shardings, best)
            break
    return Plan(asked, problem, best, smallest)


def longest_length(question: Question, predictions: Predictions) -> tuple[int, Setting]:
    """The longest ``max_length`` that fits, and the setting for it: the one that needs least.

    A multiple of 1,024, or the limit of a model that takes fewer tokens; 0: none fits.
    """
    tokens = question.config.get("max_tokens_per_micro_batch")  # of which one example is not to take more
    limit = min(position_limit(question.config) or LONGEST, tokens or LONGEST, LONGEST)
    candidates, start = range(1024, limit + 1, 1024) or [limit], replace_length(question, min(8192, limit))
    search, length, (first, *later) = Search(start, predictions), None, start.stages
    smallest = search.smallest(*first)

    def needs(length: int) -> int:
        return predicted(replace_length(question, length), predictions, smallest.setting).needed_bytes

    for stage in later[::2]:  # the ways that need least, and if none fits, with weights offloaded
        if length is None:
            smallest = search.smallest(*stage, smallest)
            length = largest_fitting(candidates, needs, question.room_bytes, first=min(8192, candidates[-1]))
    return length or 0, smallest.setting
