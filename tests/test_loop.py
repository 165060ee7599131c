"""When the loop steps, evaluates, saves and gives up; gradients that are not finite, with and without a loss scale."""

from __future__ import annotations

import gc
import itertools
import math
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock, patch

import pytest
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from support import forget_device, run_for
from test_step import TinyModel, batch, rows

from train import loop
from train.config import Architecture, Config, Optimization, Output
from train.extras import Extra, Extras, join
from train.extras.endurance import DivergenceError
from train.extras.endurance import Extra as Endurance
from train.extras.selection import Extra as Selection
from train.launch import Launch
from train.loop import fit
from train.model import ModelWithLoss
from train.outputs import Outputs
from train.records import (
    Evaluation,
    MicroBatch,
    Parts,
    Progress,
    Run,
    StepOutcome,
    StopAtOnce,
    UserError,
)
from train.step import Engine, optimizer_step


class ThreeSteps:
    """An epoch of three steps of two micro-batches."""

    steps_per_epoch: int | None = 3

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []

    def steps(self, epoch: int, first_step: int) -> Iterator[list[MicroBatch]]:
        self.asked.append((epoch, first_step))
        for step in range(first_step, 3):
            made = [batch(rows([3 + step])), batch(rows([4]))]
            yield [replace(b, example_ids=(10 * step + i,)) for i, b in enumerate(made)]


class OneGiB(Extra):
    """Measures memory, as an extra may."""

    def measured(self, run: Run, values: dict[str, Any]) -> None:
        values["peak_allocated_bytes"] = 2**30


class Listener(Extra):
    """Hears of the steps."""

    def __init__(self) -> None:
        self.heard: list[tuple[int, bool, int]] = []  # number, whether it was skipped, micro-batches

    def stepped(self, run: Run, progress: Progress, outcome: StepOutcome, micro_batches: Sequence[MicroBatch]) -> None:
        self.heard.append((progress.step, outcome.skipped, len(micro_batches)))


class RecordingOutputs(Outputs):
    """Keeps what the loop saves and logs, and writes no file."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__(recorder.config, recorder.accelerator, is_silent=True)
        self.recorder = recorder

    def save(self, run: Run, state: Any, progress: Progress, wait: bool) -> None:
        self.recorder.saved.append(progress)
        self.recorder.waited.append(wait)

    def record(self, run: Run, kind: str, step: int, values: dict[str, Any]) -> None:
        if kind != "evaluation":
            self.recorder.lines.append((kind, step, values))


def enduring() -> Endurance:
    """The extra as open() leaves it, but for what writes checkpoints."""
    extra = Endurance()
    extra._saving = Mock()
    return extra


@dataclass
class Recorder:
    """The parts of a run, and what the loop did with them."""

    config: Config
    accuracies: list[float] = field(default_factory=list)
    saved: list[Progress] = field(default_factory=list)
    waited: list[bool] = field(default_factory=list)  # for each of them
    lines: list[tuple[str, int, dict[str, Any]]] = field(default_factory=list)
    evaluated: list[int] = field(default_factory=list)
    may_stop: list[bool] = field(default_factory=list)
    batches: ThreeSteps = field(default_factory=ThreeSteps)
    launch: Launch = field(default_factory=Launch)
    listener: Listener = field(default_factory=Listener)

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        self.accelerator = Accelerator(cpu=True)
        self.network = TinyModel()
        self.model, self.optimizer = self.accelerator.prepare(
            ModelWithLoss(self.network), torch.optim.AdamW(self.network.parameters(), lr=0.1)
        )
        self.stop = run_for(self.config, self.accelerator).stop

    @property
    def engine(self) -> Engine:
        return Engine(self.accelerator, self.config)

    def evaluate(self, run: Run, parts: Parts, split: str, step: int, may_stop: bool = False) -> Evaluation:
        """In place of a pass over the data."""
        self.evaluated.append(step)
        self.may_stop.append(may_stop)
        value = self.accuracies.pop(0) if self.accuracies else 0.0
        return Evaluation(split, step, {"accuracy": value, "examples": 1})

    def fit(self, total_steps: int, progress: Progress | None = None) -> Progress:
        run, selection = run_for(self.config, self.accelerator, self.launch), Selection()
        task = SimpleNamespace(default_metric="accuracy", greater_is_better=None)
        data: Any = SimpleNamespace(task=task, examples={"validation": None})
        with patch("train.extras.cache.examples_digest", return_value="abc"):
            selection.prepared(run, data, cast("Any", self.batches))
        run.extras, run.outputs, run.stop = (
            Extras({"memory": OneGiB(), "endurance": enduring(), "selection": selection, "mine": self.listener}),
            RecordingOutputs(self),
            self.stop,
        )
        unused: Any = None
        parts = Parts(
            data=unused,
            batches=cast("Any", self.batches),
            model=self.model,
            sizes=(0, 0),
            optimizer=self.optimizer,
            engine=self.engine,
            state=unused,
            total_steps=total_steps,
        )
        with patch("train.loop.evaluate", self.evaluate):
            return fit(run, parts, progress or Progress())

    def steps_of(self, kind: str) -> list[int]:
        return [step for line_kind, step, _ in self.lines if line_kind == kind]


def config(optimization: dict[str, Any] | None = None, **output: Any) -> Config:
    return Config(
        architecture=Architecture(model="x"),
        optimization=Optimization(**{"learning_rate": 0.1, **(optimization or {})}),  # type: ignore
        output=Output(**{"log_every_steps": 1, **output}),  # type: ignore
    )


def test_evaluates_saves_and_logs_when_it_is_time() -> None:
    run = Recorder(config(eval_every_steps=2, save_every_steps=3, log_every_steps=4), accuracies=[0.5, 0.4, 0.3, 0.2])
    progress = run.fit(7)
    assert run.evaluated == [2, 4, 6, 7]
    assert run.may_stop == [True, True, True, False]  # the run ends with the last one, whatever it is asked
    assert [p.step for p in run.saved] == [2, 3, 6, 7]  # the best, every third, the last
    assert run.steps_of("train") == [2, 3, 4, 6, 7]  # every fourth, and what is saved
    assert (progress.step, progress.epoch, progress.step_in_epoch) == (7, 2, 1)
    assert (progress.best_step, progress.best_metric) == (2, 0.5)
    assert run.batches.asked == [(0, 0), (1, 0), (2, 0)]


def test_resumes_inside_an_epoch_and_evaluates_what_was_due() -> None:
    run = Recorder(config(eval_every_steps=2))
    run.fit(5, Progress(step=4, epoch=1, step_in_epoch=1))
    assert run.batches.asked == [(1, 1)]
    assert run.evaluated == [4, 5]


def test_training_line_has_the_figures_of_its_steps() -> None:
    run = Recorder(config(log_every_steps=3))
    run.fit(3)
    [(_, _, values)] = run.lines
    assert values["tokens_seen"] == (3 + 4) + (4 + 4) + (5 + 4)
    assert values["padding_share"] == 0
    assert values["peak_allocated_bytes"] == 2**30
    assert 0 < values["loss"] < 10
    assert values["tokens_per_second"] > 0


def test_learning_rate_of_a_step_reaches_all_groups_in_the_ratio_of_their_own() -> None:
    run = Recorder(config({"lr_scheduler": "linear"}))
    run.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(2))], "lr": 0.5})
    run.fit(total_steps=4)
    assert [group["lr"] for group in run.optimizer.param_groups] == pytest.approx([0.025, 0.125])
    run.fit(total_steps=5, progress=Progress(step=4, step_in_epoch=4))  # as after a rollback
    assert [group["lr"] for group in run.optimizer.param_groups] == pytest.approx([0.02, 0.1])


def test_the_seed_is_that_of_the_step_and_of_the_ranks_that_share_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[tuple[int, ...]] = []
    monkeypatch.setattr(loop, "seed_step", lambda *key: seeds.append(key))
    run = Recorder(config({"seed": 9}), launch=Launch(world_size=6, rank=5, tp_size=2))
    run.fit(4, Progress(step=1, step_in_epoch=1))
    assert seeds == [(9, 1, 2), (9, 2, 2), (9, 3, 2)]


@dataclass
class Clock:
    """In place of the module ``time``."""

    now: float = 50.0

    def perf_counter(self) -> float:
        return self.now


class Given(Engine):
    """Makes the outcomes that it is given, each in two seconds of a clock of the test's own."""

    def __init__(self, accelerator: Accelerator, outcomes: list[StepOutcome], clock: Clock) -> None:
        super().__init__(accelerator, config())
        self.outcomes, self.clock = outcomes, clock

    def step(self, model: Any, optimizer: Any, micro_batches: Sequence[MicroBatch], stop: bool = False) -> StepOutcome:
        self.clock.now += 2
        return self.outcomes.pop(0)


def outcome(
    loss: float, targets: int, tokens: int, positions: int, clipped: bool, skipped: bool = False
) -> StepOutcome:
    norm = math.nan if skipped else 1.5
    return StepOutcome(torch.tensor(loss), targets, tokens, positions, norm, clipped, skipped, stop_requested=False)


def test_figures_of_a_line_are_those_of_given_losses_and_a_given_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loss per target of steps that were made, clipped per step, tokens per second of training: not of evaluating."""
    clock, settings = Clock(), config(eval_every_steps=2, save_every_steps=2, log_every_steps=2)
    run = Recorder(settings, accuracies=[0.5, 0.4, 0.3])
    outcomes = [
        outcome(6.0, 3, 5, 8, clipped=True),
        outcome(math.nan, 7, 4, 4, clipped=False, skipped=True),
        outcome(4.0, 2, 3, 4, clipped=False),
        outcome(9.0, 4, 6, 8, clipped=True),
        outcome(5.0, 2, 10, 16, clipped=True),
    ]
    given, evaluate, save = Given(run.accelerator, outcomes, clock), Recorder.evaluate, RecordingOutputs.save

    def slow_evaluation(*arguments: Any, **options: Any) -> Evaluation:
        clock.now += 100
        return evaluate(*arguments, **options)

    def slow_save(*arguments: Any, **options: Any) -> None:
        clock.now += 1000
        save(*arguments, **options)

    monkeypatch.setattr(Recorder, "engine", given)
    monkeypatch.setattr(Recorder, "evaluate", slow_evaluation)
    monkeypatch.setattr(RecordingOutputs, "save", slow_save)
    monkeypatch.setattr(loop, "time", clock)
    heard, logged = [], Endurance.logged
    monkeypatch.setattr(Endurance, "logged", lambda *args: (heard.append((args[2].step, *args[3:])), logged(*args))[1])
    progress = run.fit(5)
    assert heard == [(2, 2.0, 0), (4, 13 / 6, 2), (5, 2.5, 4)]  # the loss of the steps since
    lines = {step: values for kind, step, values in run.lines if kind == "train"}
    names = ("loss", "clipped_share", "tokens_per_second", "seconds_per_step", "padding_share", "tokens_seen")
    assert {step: [values[name] for name in names] for step, values in lines.items()} == {
        2: [6 / 3, 1 / 2, 9 / 4, 2, 1 - 9 / 12, 9],
        4: [13 / 6, 1 / 2, 9 / 4, 2, 1 - 9 / 12, 18],
        5: [5 / 2, 1, 10 / 2, 2, 1 - 10 / 16, 28],
    }
    of_last = ("epoch", "learning_rate", "sequence_length", "nonfinite_steps")
    assert {step: [values[name] for name in of_last] for step, values in lines.items()} == {
        2: [0, pytest.approx(0.08), 4, 1],
        4: [1, pytest.approx(0.04), 4, 1],  # its micro-batches are of 3 and 4 tokens
        5: [1, pytest.approx(0.02), 4, 1],
    }
    assert math.isnan(lines[2]["grad_norm"]) and (lines[4]["grad_norm"], lines[5]["grad_norm"]) == (1.5, 1.5)
    counts = (progress.tokens_seen, progress.positions_seen, progress.nonfinite_steps)
    assert (*counts, progress.consecutive_nonfinite_steps) == (28, 8 + 4 + 4 + 8 + 16, 1, 0)
    assert (progress.training_seconds, clock.now) == (10, 50 + 10 + 300 + 3000)
    first, second, third = 2.0, 13 / 6, 2.5
    assert progress.usual_loss == pytest.approx(0.9 * (0.9 * first + 0.1 * second) + 0.1 * third, rel=1e-12)


def test_stop_request_saves_once_and_leaves_without_evaluating() -> None:
    run = Recorder(config(eval_every_steps=1))
    run.stop.append("SIGTERM")
    assert run.fit(7).step == 1
    assert [p.step for p in run.saved] == [1]
    assert run.evaluated == []


def test_patience_counts_evaluations_without_a_better_one() -> None:
    settings = config(eval_every_steps=1).changed(early_stopping_patience=2)
    run = Recorder(settings, accuracies=[0.1, 0.3, 0.2, 0.3, 0.9])
    assert run.fit(7).step == 4
    assert run.fit(7, run.saved[-1]).step == 4  # and stays stopped


def test_a_metric_that_is_not_a_number_is_never_the_best() -> None:
    run = Recorder(config(eval_every_steps=1), accuracies=[math.nan, 0.5, math.nan, 0.4])
    progress = run.fit(1)
    assert (progress.best_metric, progress.best_step) == (None, None)
    progress = run.fit(4, progress)
    assert (progress.best_metric, progress.best_step, progress.evaluations_without_improvement) == (0.5, 2, 2)


def test_an_end_that_nobody_expected_is_saved_with_its_evaluation() -> None:
    settings = config(eval_every_steps=1, save_every_steps=2).changed(early_stopping_patience=1)
    run = Recorder(settings, accuracies=[0.3, 0.2])
    assert run.fit(7).step == 2
    found = [(p.step, p.evaluated_step, p.evaluations_without_improvement) for p in run.saved]
    assert found == [(1, 1, 0), (2, 1, 0), (2, 2, 1)]


class Failing(Engine):
    """Fails at the third step."""

    weights_intact = True

    def step(self, model: Any, optimizer: Any, micro_batches: Sequence[MicroBatch], stop: bool = False) -> StepOutcome:
        if micro_batches[0].example_ids == (20,):
            error = UserError("it does not fit")
            error.weights_intact = self.weights_intact
            raise error
        return super().step(model, optimizer, micro_batches, stop)


@pytest.mark.parametrize(
    ("weights_intact", "save_every", "saved"), [(True, None, [2]), (False, None, []), (True, 2, [2]), (True, 1, [1, 2])]
)
def test_a_step_that_fails_loses_none_of_those_before_it(
    weights_intact: bool, save_every: int | None, saved: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are saved if the weights still are those after them, and not a second time."""
    run = Recorder(config(save_every_steps=save_every))
    engine = Failing(run.accelerator, run.config)
    engine.weights_intact = weights_intact
    monkeypatch.setattr(Recorder, "engine", engine)
    with pytest.raises(UserError, match="does not fit"):
        run.fit(5)
    assert [p.step for p in run.saved] == saved


class FailingInTheSecondEpoch(Engine):
    """Fails at the fourth step, the first of its epoch."""

    calls = 0

    def step(self, model: Any, optimizer: Any, micro_batches: Sequence[MicroBatch], stop: bool = False) -> StepOutcome:
        self.calls += 1
        if self.calls == 4:
            error = UserError("it does not fit")
            error.weights_intact = True
            raise error
        return super().step(model, optimizer, micro_batches, stop)


def test_the_last_step_of_an_epoch_is_not_saved_twice_where_the_next_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is it logged as one of the next epoch."""
    for every, saved in ((3, [3]), (None, [3])):
        run = Recorder(config(save_every_steps=every))
        monkeypatch.setattr(Recorder, "engine", FailingInTheSecondEpoch(run.accelerator, run.config))
        with pytest.raises(UserError, match="does not fit"):
            run.fit(5)
        assert [p.step for p in run.saved] == saved
        assert [(step, values["epoch"]) for kind, step, values in run.lines if kind == "train"][-1] == (3, 0)


def test_steps_before_one_that_fails_are_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where their checkpoint is written already: a run that resumes from it does not make them again."""
    run = Recorder(config(log_every_steps=10, save_every_steps=2))
    monkeypatch.setattr(Recorder, "engine", Failing(run.accelerator, run.config))
    with pytest.raises(UserError, match="does not fit"):
        run.fit(5)
    assert run.steps_of("train") == [2]


class Forgets(Extra):
    def evaluated(self, run: Run, progress: Progress, evaluation: Evaluation) -> Progress:  # type: ignore
        pass


def test_an_extra_that_does_not_return_the_progress_is_named() -> None:
    with pytest.raises(AssertionError, match=r"evaluated of .*test_loop returned None"):
        Extras({"own": Forgets()}).pipe("evaluated", None, Progress(), None)


class Unreadable(ThreeSteps):
    """The third step's batches cannot be read."""

    def steps(self, epoch: int, first_step: int) -> Iterator[list[MicroBatch]]:
        yield from itertools.islice(super().steps(epoch, first_step), 2)
        raise OSError("stale file handle")


@pytest.mark.parametrize(("save_every", "saved"), [(None, [2]), (2, [2]), (1, [1, 2])])
def test_a_batch_that_cannot_be_read_loses_no_step_before_it(save_every: int | None, saved: list[int]) -> None:
    run = Recorder(config(save_every_steps=save_every, log_every_steps=10), batches=Unreadable())
    with pytest.raises(OSError, match="stale file handle"):
        run.fit(5)
    assert [p.step for p in run.saved] == run.steps_of("train") == saved


def test_of_several_ranks_one_alone_does_not_save() -> None:
    run = Recorder(config(save_every_steps=None), batches=Unreadable(), launch=Launch(world_size=2))
    with pytest.raises(OSError, match="stale file handle"):
        run.fit(5)
    assert run.saved == []


def cut_short(*arguments: Any, **options: Any) -> Evaluation:
    """An evaluation during which the run is asked to stop."""
    raise StopAtOnce


def test_steps_before_an_evaluation_that_a_stop_cuts_short_are_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Recorder(config(log_every_steps=10, eval_every_steps=3))
    monkeypatch.setattr(Recorder, "evaluate", cut_short)
    assert run.fit(7).step == 3
    assert run.steps_of("train") == [3]
    assert [p.step for p in run.saved] == [3]


def test_a_run_that_is_stopped_waits_for_what_is_being_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where nothing has changed since: an extra may still be writing it in the background."""

    run = Recorder(config(save_every_steps=2, eval_every_steps=2))
    monkeypatch.setattr(Recorder, "evaluate", cut_short)
    assert run.fit(7).step == 2
    assert [(p.step, wait) for p, wait in zip(run.saved, run.waited, strict=True)] == [(2, False), (2, True)]


def test_the_last_steps_of_a_run_that_ends_early_are_logged() -> None:
    settings = config(eval_every_steps=2, log_every_steps=4).changed(early_stopping_patience=1)
    run = Recorder(settings, accuracies=[0.5, 0.6, 0.5])
    assert run.fit(9).step == 6
    assert run.steps_of("train") == [2, 4, 6]


def break_gradients(run: Recorder, steps: set[int]) -> None:
    """Makes the gradient nan in the given optimizer steps (two backward passes each)."""
    calls = iter(range(10_000))
    run.network.head.weight.register_hook(lambda grad: grad * math.nan if next(calls) // 2 in steps else grad)


def test_skipped_step_is_logged_with_its_examples_and_counted() -> None:
    run = Recorder(config())
    break_gradients(run, {1})
    progress = run.fit(4)
    [(_, step, values)] = [line for line in run.lines if line[0] == "skipped"]
    assert run.listener.heard == [(1, False, 2), (2, True, 2), (3, False, 2), (4, False, 2)]
    assert step == 2
    assert values["examples"] == [10, 11]
    assert math.isnan(values["grad_norm"])
    assert (progress.nonfinite_steps, progress.consecutive_nonfinite_steps) == (1, 0)
    assert all(math.isfinite(p.sum().item()) for p in run.network.parameters())
    assert all(math.isfinite(values["loss"]) for kind, step, values in run.lines if kind == "train" and step != 2)


def test_too_many_skipped_steps_in_a_row_end_the_run() -> None:
    run = Recorder(config().changed(max_consecutive_nonfinite_steps=3))
    break_gradients(run, {0, 2, 3, 4})
    with pytest.raises(DivergenceError, match="step 5: no finite gradient in 3 steps in a row") as caught:
        run.fit(7)
    assert caught.value.sound_step == 2


@pytest.mark.parametrize(("loss", "usual"), [(4.0, 0.9 * 2 + 0.1 * 4), (math.inf, 2.0), (math.nan, 2.0)])
def test_a_loss_at_the_bound_is_no_spike_and_one_that_is_not_finite_is_never_usual(loss: float, usual: float) -> None:
    progress, factor = Progress(step=9, usual_loss=2.0), 2.0 if math.isfinite(loss) else None
    run = run_for(config().changed(loss_spike_factor=factor))
    assert enduring().logged(run, progress, loss, 6).usual_loss == pytest.approx(usual, rel=1e-12)
    run = run_for(config().changed(loss_spike_factor=1.99))
    with pytest.raises(DivergenceError, match="step 9: the loss since step 6 is") as caught:
        enduring().logged(run, progress, loss, 6)
    assert caught.value.sound_step == 6


def scaled(run: Recorder, scale: float, monkeypatch: pytest.MonkeyPatch) -> torch.amp.GradScaler:
    """Gives the run the loss scaler that fp16 has on a GPU; the arithmetic stays fp32."""
    monkeypatch.setitem(run.accelerator.state.__dict__, "_mixed_precision", "fp16")
    run.accelerator.native_amp = True
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=10_000)
    run.accelerator.scaler = scaler
    run.optimizer = AcceleratedOptimizer(run.optimizer.optimizer, scaler=scaler)
    run.accelerator._optimizers = [run.optimizer]
    return scaler


def test_loss_scale_changes_nothing_but_falls_on_overflow(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, with_scale = Recorder(config()), Recorder(config())
    plain.fit(2)
    scaler = scaled(with_scale, 1024.0, monkeypatch)
    with_scale.fit(2)
    for one, other in zip(plain.network.parameters(), with_scale.network.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    assert [values["loss_scale"] for _, _, values in with_scale.lines] == [1024.0, 1024.0]
    weights = with_scale.network.head.weight.detach().clone()
    hook = with_scale.network.head.weight.register_hook(lambda grad: grad * math.inf)
    window = next(ThreeSteps().steps(0, 0))
    outcome = optimizer_step(with_scale.engine, with_scale.model, with_scale.optimizer, window)
    hook.remove()
    assert outcome.skipped
    assert torch.equal(weights, with_scale.network.head.weight)
    assert scaler.get_scale() == 512.0


def test_a_scaled_gradient_whose_norm_overflows_makes_no_weight_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scaler looks at each number, and these are finite."""
    run = Recorder(config({"max_grad_norm": None}))
    scaled(run, 1.0, monkeypatch)
    run.network.head.weight.register_hook(lambda grad: torch.full_like(grad, 1e30))
    outcome = optimizer_step(run.engine, run.model, run.optimizer, next(ThreeSteps().steps(0, 0)))
    assert outcome.skipped and outcome.grad_norm == math.inf
    assert all(p.isfinite().all() for p in run.network.parameters())


def test_a_scaled_gradient_is_clipped_by_value_as_a_plain_one(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = config({"max_grad_norm": None, "max_grad_value": 1e-3})
    plain, with_scale = Recorder(settings), Recorder(settings)
    scaled(with_scale, 1024.0, monkeypatch)
    for run in (plain, with_scale):
        run.fit(2)
    for one, other in zip(plain.network.parameters(), with_scale.network.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
def test_fp16_on_a_gpu_learns_and_scales() -> None:
    run = Recorder(config())
    forget_device()
    run.accelerator = Accelerator(mixed_precision="fp16")
    run.network = TinyModel()
    run.model, run.optimizer = run.accelerator.prepare(
        ModelWithLoss(run.network), torch.optim.AdamW(run.network.parameters(), lr=0.05, fused=True)
    )
    run.fit(30)
    losses = [values["loss"] for kind, _, values in run.lines if kind == "train"]
    assert losses[-1] < losses[0]
    assert run.lines[-1][2]["loss_scale"] > 1


def test_the_extras_of_a_run_do_not_outlive_it() -> None:
    """They hold its model: a second run in one process, as in a notebook, needs the memory."""
    joined = join()
    joined.each("mark", "forward")
    gone = weakref.ref(joined)
    del joined
    gc.collect()
    assert gone() is None
