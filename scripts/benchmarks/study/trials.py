"""Real runs as the cells of a study: ``train/main.py``, a process and a folder each, one seed after the other.

A trial that has ended is kept in ``outcome.json`` of its folder, and the same command takes it from there; one that was
cut off resumes from its checkpoint, as any run.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from scripts.benchmarks import building, harness
from train.config import argument, fields
from train.figures import duration, gib, read_metrics, several, writable
from train.memory.__main__ import Parser
from train.memory.predict import Predictor, Target
from train.records import EXIT_DONE, EXIT_STOPPED, UserError

DONE, REFUSED, OUT_OF_MEMORY, DIVERGED, FAILED = "done", "refused", "out of memory", "diverged", "failed"
EVALUATIONS = 10  # of a run, where it matters when a loss is reached
START_SECONDS = 12  # of a run, until its first step
# Two-sided 95 % quantiles of Student's t for 1, 2, ... degrees of freedom, and that of the normal distribution.
T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
Z95 = 1.95996


@dataclass(frozen=True)
class Trial:
    """One run: the recipe's flags with those of its variant, and a seed."""

    variant: str
    seed: int
    flags: tuple[str, ...]


@dataclass(frozen=True)
class Outcome:
    """What came of a trial."""

    variant: str
    seed: int
    status: str
    """done, refused (the flags exclude each other), out of memory, diverged, failed."""
    reason: str | None = None
    key: str = ""
    """Names the flags and versions that the figures depend on."""
    metric_name: str = ""
    greater_is_better: bool | None = None
    """Of that metric; None: its name tells."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Of the last evaluation of the validation split."""
    peak_bytes: int | None = None
    tokens_per_second: float | None = None
    seconds: float | None = None
    """Of training alone."""
    losses: list[list[float]] = field(default_factory=list)
    """[step, training loss] of each line of the log."""
    evaluations: list[list[float]] = field(default_factory=list)
    """[step, tokens, seconds of training, loss] of each evaluation."""
    noise_scales: list[list[float]] = field(default_factory=list)
    """[step, gradient noise scale in examples] of each line of the log that has one."""

    @property
    def loss(self) -> float | None:
        """Of the validation split at the end."""
        return self.metrics.get("loss")


@dataclass(frozen=True)
class Interval:
    """A mean and the ends of its 95 % interval, which one value alone does not have."""

    mean: float
    low: float
    high: float
    count: int

    @property
    def is_shown(self) -> bool:
        """Whether the interval leaves zero out: what it is of is then more than the seeds' own spread."""
        return self.count > 1 and (self.low > 0 or self.high < 0)


def interval(values: Sequence[float]) -> Interval:
    """Student's interval of the mean of ``values``: they are taken to be normal and independent."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return Interval(mean, -math.inf, math.inf, len(values))
    half = t95(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return Interval(mean, mean - half, mean + half, len(values))


def t95(freedom: int) -> float:
    """Student's two-sided 95 % quantile; beyond the table by an expansion (Abramowitz and Stegun, 26.7.5)."""
    if freedom <= len(T95):
        return T95[freedom - 1]
    return Z95 + (Z95**3 + Z95) / (4 * freedom) + (5 * Z95**5 + 16 * Z95**3 + 3 * Z95) / (96 * freedom**2)


def paired(outcomes: Iterable[Outcome], variant: str, reference: str, name: str) -> list[float]:
    """Differences of a metric between two variants, seed by seed; of the seeds that both have done."""
    values = {(o.variant, o.seed): o.metrics[name] for o in outcomes if o.status == DONE and name in o.metrics}
    seeds = sorted({seed for of, seed in values if of == variant} & {seed for of, seed in values if of == reference})
    return [values[variant, seed] - values[reference, seed] for seed in seeds]


class Once(argparse.Action):
    """Keeps each of the values once: the same run made twice would look like agreement."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        setattr(namespace, self.dest, list(dict.fromkeys(values)))


def parser_of(name: str, description: str | None, flags: str = "", seeds: Sequence[int] = (1, 2, 3)) -> Parser:
    """A parser with the flags that all studies of real runs have."""
    parser = Parser(
        prog=f"scripts/study.py {name}",
        usage=f"scripts/study.py {name} --config RECIPE --output_dir DIR {flags}[flags below] [training flags]",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    shown = f"(default: {' '.join(map(str, seeds))})"
    parser.add_argument("--seeds", nargs="+", action=Once, type=int, default=list(seeds), metavar="N", help=shown)
    parser.add_argument("--output_dir", type=Path, required=True, metavar="DIR", help="of results and runs")
    parser.add_argument(
        "--plan", action="store_true", help="show what would run, in how much memory and time; run nothing"
    )
    return parser


def conducted(
    title: str,
    parser: Parser,
    arguments: Sequence[str],
    trials_of: Callable[[argparse.Namespace, Sequence[str]], list[Trial]],
    write: Callable[[Path, dict[str, Any]], None],
) -> int:
    """Runs a study from its command line to its pages; the exit status (see ``train.records``).

    Args:
        trials_of: the trials that the study's own flags and those of training ask for; may raise UsageError.
        write: makes the pages in a folder of the figures.
    """

    def study() -> None:
        own, words = parser.parse_known_args(list(map(argument, arguments)))
        trials, runs = trials_of(own, words), Trials(own.output_dir, words)
        print("\n".join(runs.plan(trials)), flush=True)
        if own.plan:
            return
        with writable(own.output_dir / "runs"):  # a folder that cannot be made is noticed before the runs
            pass
        outcomes = [asdict(outcome) for outcome in runs.run(trials)]
        flags = {k: v for k, v in vars(own).items() if k not in ("output_dir", "plan")}
        command = shlex.join([parser.prog.split()[-1], *arguments])
        found = {"title": title, "command": command, "flags": flags, "outcomes": outcomes}
        write(own.output_dir, {**harness.about(), **found})

    return harness.exit_status(study)


class Trials:
    """Runs trials one by one.

    Args:
        folder: of all of them.
        words: the flags of training that all have in common.
    """

    def __init__(self, folder: Path, words: Sequence[str]) -> None:
        self._folder, self._words = folder, tuple(words)
        self._versions = harness.about()["versions"]

    def refusal(self, trial: Trial) -> str | None:
        """Why the flags of ``trial`` cannot work together, or None."""
        try:
            building.parsed_config([*self._words, *trial.flags])
        except UserError as error:
            return str(error)
        return None

    def plan(self, trials: Sequence[Trial]) -> list[str]:
        """A line for each variant: how often it runs, the memory and time that it is predicted to take; and for all."""
        # In a process of its own: it would keep memory of a card that the runs need.
        lines, total, target = [], 0.0, harness.Processes(on_cpu=False).call(building.rated_target)
        with Predictor() as predictor:
            for variant in dict.fromkeys(trial.variant for trial in trials):
                own = [trial for trial in trials if trial.variant == variant]
                waiting = sum(self.known(trial) is None for trial in own)
                text = self.refusal(own[0])
                if text is None:
                    text, seconds = self._predicted(predictor, own[0], target)
                    total += waiting * seconds
                lines.append(f"{variant}: {several(len(own), 'run')}, {waiting} to make; {text}")
        return [*lines, f"about {duration(total)} in all (estimated)"] if total else lines

    def _predicted(self, predictor: Predictor, trial: Trial, target: Target) -> tuple[str, float]:
        """What a run takes, in words, and its seconds; 0 where they cannot be told."""
        from train.memory.question import job_of, vocabulary_size

        config = building.parsed_config([*self._words, *trial.flags])
        try:
            labels = 2 if building.is_classifier(config) else 0
            found = predictor.predict(job_of(config, target, vocabulary_size(config), labels))
        except UserError as error:
            why = re.sub(r" (Give it|Or give)[^.]*: --vocab_size \d+\.", "", str(error))  # a flag of the planner alone
            return f"memory not predicted ({why})", 0.0
        memory, steps = f"predicted peak {gib(found.peak_bytes)}", config.optimization.max_steps
        if not steps or not found.seconds:
            return memory, 0.0
        seconds = START_SECONDS + steps * building.accumulation_of(config) * found.seconds
        return f"{memory}, {duration(seconds)} a run", seconds

    def run(self, trials: Sequence[Trial]) -> list[Outcome]:
        """The outcome of each, measured now or earlier."""
        found, bar = [], tqdm(total=len(trials), unit="run")
        for trial in trials:
            outcome = self.known(trial)
            if outcome is None:
                outcome = self._made(trial)
                kept = self.folder_of(trial) / "outcome.json"
                kept.parent.mkdir(parents=True, exist_ok=True)
                kept.write_text(json.dumps(asdict(outcome)), encoding="utf-8")
                tqdm.write(f"{trial.variant}, seed {trial.seed}: {described(outcome)}")
            found.append(outcome)
            bar.update()
        bar.close()
        return found

    def folder_of(self, trial: Trial) -> Path:
        """Where its run and its outcome are."""
        name = harness.slug(trial.variant) + "-" + hashlib.sha256(trial.variant.encode()).hexdigest()[:6]
        return self._folder / name / f"seed-{trial.seed}"

    def known(self, trial: Trial) -> Outcome | None:
        """What an earlier command found; None where it failed, so that it is tried again."""
        try:
            outcome = Outcome(**json.loads((self.folder_of(trial) / "outcome.json").read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return None
        return outcome if outcome.key == self._key(trial) and outcome.status != FAILED else None

    def _key(self, trial: Trial) -> str:
        """A digest of all that the figures depend on: the text of recipes, of the task, of the step and of functions.

        What those files import, and documents, are not.
        """
        recipes = [Path(word.rpartition("=")[2]) for word in self._words if word.endswith((".yaml", ".yml"))]
        text = [recipe.read_text(encoding="utf-8") for recipe in recipes if recipe.is_file()]
        text += building.texts_of_functions(*self._words, *trial.flags, *text)
        text += [file.read_text(encoding="utf-8") for file in self._own_files(trial) if file.is_file()]
        return hashlib.sha256(repr((self._words, trial, text, self._versions)).encode()).hexdigest()[:20]

    def _own_files(self, trial: Trial) -> list[Path]:
        """Where a fork changes the task and the step."""
        try:
            task = building.parsed_config([*self._words, *trial.flags]).data.task
        except UserError:  # flags that do not go together
            return []
        return [harness.ROOT / "train" / "tasks" / f"{task}.py", harness.ROOT / "train" / "step.py"]

    def _made(self, trial: Trial) -> Outcome:
        key, output = self._key(trial), self.folder_of(trial) / "run"
        if reason := self.refusal(trial):
            return Outcome(trial.variant, trial.seed, REFUSED, reason, key)
        config = building.parsed_config([*self._words, *trial.flags])
        status, errors = self._trained(trial, output)
        if status == EXIT_STOPPED:  # by a signal that this process did not get, or ignores
            raise KeyboardInterrupt
        summary_path = output / "summary.json"
        if status != EXIT_DONE or not summary_path.exists():
            return Outcome(trial.variant, trial.seed, kind_of(errors), reason_of(errors, status), key)
        summary = json.loads(summary_path.read_text(encoding="utf-8"))
        metrics = {k: float(v) for k, v in summary["result"]["validation"].items() if isinstance(v, int | float)}
        is_finite, name = math.isfinite(metrics.get("loss", math.nan)), summary["metric_name"]
        log = read_metrics(output / "metrics.jsonl")
        losses, evaluations = curves(log)
        return Outcome(
            variant=trial.variant,
            seed=trial.seed,
            status=DONE if is_finite else DIVERGED,
            reason=None if is_finite else "the loss at the end is not a number",
            key=key,
            metric_name=name if name in metrics else "loss",  # a metric that is not a number is left out
            greater_is_better=building.greater_is_better(config, name) if name in metrics else False,
            metrics=metrics,
            peak_bytes=summary["peak_allocated_bytes"],
            tokens_per_second=summary["tokens_per_second"],
            seconds=summary["training_seconds"],
            losses=losses,
            evaluations=evaluations,
            noise_scales=noise_scales(log),
        )

    def _trained(self, trial: Trial, output: Path) -> tuple[int, str]:
        """Exit status and error output of the run."""
        own = ["--seed", str(trial.seed), "--output_dir", str(output), "--predict_memory", "False"]
        for name in ("push_to_hub", "hub_private_repo"):  # a trial is not for others
            own += [f"--{name}", "False"] if name in fields() else []
        words = [sys.executable, str(harness.ROOT / "train" / "main.py"), *self._words, *trial.flags, *own]
        self.folder_of(trial).mkdir(parents=True, exist_ok=True)
        begun, key = self.folder_of(trial) / "key", self._key(trial)
        if not begun.exists() or begun.read_text(encoding="utf-8") != key:  # what lies there is of other flags
            shutil.rmtree(output, ignore_errors=True)
            begun.write_text(key, encoding="utf-8")
        with (self.folder_of(trial) / "errors.txt").open("w+", encoding="utf-8") as file:
            process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=file)
            try:
                status = process.wait()
            except BaseException:
                process.send_signal(signal.SIGTERM)  # it writes a checkpoint
                process.wait()
                raise
            file.seek(0)
            errors = file.read()
        return status, errors


def curves(rows: Iterable[Mapping[str, Any]]) -> tuple[list[list[float]], list[list[float]]]:
    """Training losses and evaluations of a log: see :class:`Outcome`."""
    rows = list(rows)
    trained = [row for row in rows if row["kind"] == "train"]
    steps, tokens, seconds = [0], [0], [0.0]
    for row in trained:
        seconds.append(seconds[-1] + (row["seconds_per_step"] or 0.0) * (row["step"] - steps[-1]))
        steps.append(row["step"])
        tokens.append(row["tokens_seen"])
    evaluations = [
        # A line of the log may come after the evaluation of its step, and evaluations lie between lines.
        [row["step"], *(float(np.interp(row["step"], steps, of)) for of in (tokens, seconds)), row["loss"]]
        for row in rows
        if row["kind"] == "evaluation" and row.get("split") == "validation" and row.get("loss") is not None
    ]
    return [[row["step"], row["loss"]] for row in trained if row["loss"] is not None], evaluations


def noise_scales(rows: Iterable[Mapping[str, Any]]) -> list[list[float]]:
    """Gradient noise scales of a log: see :class:`Outcome`."""
    known = [(row["step"], row.get("gradient_noise_scale_examples")) for row in rows if row["kind"] == "train"]
    return [[step, scale] for step, scale in known if scale is not None]


def reached(outcome: Outcome, target_loss: float) -> tuple[float, float] | None:
    """Tokens and seconds of training until an evaluation was at ``target_loss`` or below; None: never."""
    return next(((tokens, seconds) for _, tokens, seconds, loss in outcome.evaluations if loss <= target_loss), None)


def kind_of(errors: str) -> str:
    """What ended a run, by the last thing it said: before, it may have recovered from something else."""
    from train.extras.oom import parse_oom

    said = reason_of(errors, 0)
    if "out of memory" in said.lower() or parse_oom(said) is not None:
        return OUT_OF_MEMORY
    return DIVERGED if re.search(r"\b(not finite|no finite|the loss since step)\b", said) else FAILED


def reason_of(errors: str, status: int) -> str:
    """The last line that says what happened."""
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    said = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")] or lines
    return " ".join((said[-1] if said else f"exit status {status}").split())[:300]


def described(outcome: Outcome) -> str:
    """An outcome in a line."""
    if outcome.status != DONE:
        return f"{outcome.status}: {outcome.reason}"
    value = outcome.metrics[outcome.metric_name]
    name = outcome.metric_name.replace("_", " ")
    return f"{name} {value:.4g}, peak {gib(outcome.peak_bytes or 0)}, {duration(outcome.seconds or 0)} of training"


def outcomes_of(found: Mapping[str, Any]) -> list[Outcome]:
    """Those of a results file."""
    return [Outcome(**values) for values in found["outcomes"]]
