"""``python -m train.memory``: plan a run before there is one, and explain why one ran out of memory."""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NoReturn

from train.config import Config, parse
from train.launch import use_expandable_segments
from train.memory import advice
from train.memory.devices import find_device, this_device
from train.memory.explain import explain
from train.memory.flags import numbers, positive, with_underscores
from train.memory.plan import Predictions, longest_length, make_plan, predicted
from train.memory.predict import Job, Predictor
from train.memory.question import OFFLOAD, Question, replace_length, vocabulary_size
from train.records import EXIT_DONE, UsageError, UserError

PROGRAM = "python -m train.memory"
ABOUT = """\
Memory of a training run: predicted before it, explained after it. No GPU is needed.

  plan      does a configuration fit on a device, and what is the fastest that does?
  predict   only the first part: memory of a configuration as it stands
  explain   what an out-of-memory message says, and what to do about it

examples
  python -m train.memory plan --config recipes/quickstart.yaml --device l4
  python -m train.memory plan --model Qwen/Qwen2.5-0.5B --device 24GiB --max_length auto
  python -m train.memory plan --config recipe.yaml --device h200 --grid --picture grid.png
  python -m train.memory explain 'CUDA out of memory. Tried to allocate 2.00 GiB ...'

python -m train.memory plan --help lists the flags.
"""
TRAINING_FLAGS = """\
Every flag of the training command line may be given too: --config, --model, --model_config, --max_length,
--micro_batch_size, --global_batch_size ... (train/main.py --help lists them). The data is not read.
"""
AUTO_FLAGS = """\
  --max_length auto        plan for the longest sequences that fit, in multiples of 1,024
  --micro_batch_size auto  choose it, with --global_batch_size given
  --gradient_checkpointing auto  choose it
"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}. {self.prog} --help lists the flags.")


class Request(argparse.Namespace):
    """A command line of ``plan`` or ``predict``, understood."""

    question: Question
    words: tuple[str, ...]
    """The training flags among it."""
    open_length: bool
    open_micro_batch: bool
    open_checkpointing: bool
    device: str | None
    world_size: int
    sharding: str | None
    vocab_size: int | None
    num_labels: int | None
    padded: Literal["yes", "no"] | None
    json_path: str | None
    """``-``: standard output."""
    grid: bool
    lengths: tuple[int, ...] | None
    micro_batch_sizes: tuple[int, ...] | None
    picture: Path | None


def main(arguments: list[str] | None = None) -> int:
    """Answers the command line and returns the exit status (see ``train.records``)."""
    use_expandable_segments()  # as a run does
    words = sys.argv[1:] if arguments is None else arguments
    commands = {"plan": run_plan, "predict": run_predict, "explain": run_explain}
    try:
        if not words or words[0] in ("-h", "--help"):
            print(ABOUT, end="")
            return EXIT_DONE if words else UsageError.exit_status
        if words[0] not in commands:
            raise UsageError(f"{words[0]!r} is not one of plan, predict, explain. {PROGRAM} --help shows examples.")
        return commands[words[0]](words[1:])
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_status
    except KeyboardInterrupt:
        return 130


# ---- commands --------------------------------------------------------------------------------------------------------


def run_plan(arguments: list[str]) -> int:
    """``plan``: the configuration as it stands, and the fastest setting that fits."""
    request = read_request("plan", arguments)
    question = request.question
    with ExitStack() as stack:
        # The search needs each answer before its next question; only cells of a table can be predicted in parallel.
        predictions = _predictions(stack, question, processes=2 if request.grid else 1)
        if request.grid:
            from train.memory.grid import draw, grid_text, grid_values, make_grid

            grid = make_grid(question, predictions, request.lengths, request.micro_batch_sizes)
            _clear_progress()
            if request.picture is not None:
                draw(grid, request.picture)
            _emit(request, grid_text(grid), grid_values(grid))
            return EXIT_DONE
        said: dict[str, Any] = {}
        if request.open_length:
            length, setting = longest_length(question, predictions)
            if not length:
                _clear_progress()
                raise UserError(
                    f"max_length: not even 1,024 tokens fit on {question.device.name} with {setting}. "
                    "Take a larger device, a smaller model, or another optimizer."
                )
            question = replace_length(question, length)
            said["max_length"] = length
        is_open = request.open_length or request.open_micro_batch or request.open_checkpointing
        plan = make_plan(question, predictions, is_open)
        _clear_progress()
    if request.open_micro_batch and plan.best is not None:
        said |= {
            "micro_batch_size": plan.best.setting.micro_batch_size,
            "global_batch_size": question.global_batch_size,
        }
    if request.open_checkpointing and plan.best is not None:
        said["gradient_checkpointing"] = plan.best.setting.gradient_checkpointing
        said["gradient_checkpointing_offload"] = plan.best.setting.offloads_inputs
    typed = None
    if plan.best is not None:
        typed = advice.command(question, plan.best.setting, request.words, said)
    text = advice.plan_text(question, plan, typed, longest=request.open_length)
    _emit(request, text, advice.plan_values(question, plan, typed))
    return EXIT_DONE


def run_predict(arguments: list[str]) -> int:
    """``predict``: the configuration as it stands."""
    request = read_request("predict", arguments)
    with ExitStack() as stack:
        outcome = predicted(request.question, _predictions(stack, request.question, processes=1))
        _clear_progress()
    text, values = advice.outcome_text(request.question, outcome), advice.outcome_values(request.question, outcome)
    _emit(request, text, values)
    return EXIT_DONE


def run_explain(arguments: list[str]) -> int:
    """``explain``: a message, from the command line or from standard input."""
    if arguments and arguments[0] in ("-h", "--help"):
        print(
            f"usage: {PROGRAM} explain 'message'\n       command 2>&1 | {PROGRAM} explain\n\n"
            "Says what each figure of an out-of-memory message means, why memory was full and what to do.\n"
            "The message may stand within a traceback or a log; '-' reads it from standard input."
        )
        return EXIT_DONE
    if arguments in ([], ["-"]):
        if not arguments and sys.stdin.isatty():
            raise UsageError("explain: give the message in quotes, or pipe the log into it.")
        message = sys.stdin.read()
    else:
        message = " ".join(arguments)
    print(explain(message))
    return EXIT_DONE


# ---- reading the command line ----------------------------------------------------------------------------------------


def read_request(command: str, arguments: list[str]) -> Request:
    """Splits the flags of this command from those of the training command line and checks both.

    Raises:
        UsageError: flags that do not work; the message says what would.
        UserError: the size of the vocabulary is unknown.
    """
    request = Request()
    _, words = _own_flags(command).parse_known_args(with_underscores(arguments), request)
    words, request.open_length = _without_auto(words, "max_length")
    if request.open_length and request.grid:
        raise UsageError("--grid shows many lengths: give --lengths instead of --max_length auto.")
    if (request.lengths or request.micro_batch_sizes or request.picture) and not request.grid:
        raise UsageError("--lengths, --micro_batch_sizes and --picture belong to --grid: give it too.")
    if request.picture is not None and request.picture.suffix.lower() not in (".png", ".pdf", ".svg"):
        raise UsageError(f"--picture {request.picture}: give a name that ends in .png, .pdf or .svg.")
    config = parse(words)
    request.words = tuple(words)
    request.open_micro_batch = config.optimization.micro_batch_size == "auto"
    request.open_checkpointing = config.get("gradient_checkpointing") == "auto"
    if command == "predict" and (request.open_length or request.open_micro_batch or request.open_checkpointing):
        raise UsageError("auto is a question for 'plan'; 'predict' needs a number.")
    if request.open_micro_batch and config.optimization.global_batch_size is None and not request.grid:
        raise UsageError("micro_batch_size: auto keeps the global batch: give it with --global_batch_size.")
    if request.open_micro_batch:  # the search begins with the smallest
        config = replace(config, optimization=replace(config.optimization, micro_batch_size=1))
    if request.open_checkpointing:  # the search tries every way
        config = config.changed(gradient_checkpointing="none", gradient_checkpointing_offload=False)
    request.question = _question(config, request)
    return request


def _own_flags(command: str) -> _Parser:
    about = {
        "plan": "Does the configuration fit on the device, and which setting is the fastest that does?",
        "predict": "The memory of one training step of the configuration, part by part.",
    }[command]
    parser = _Parser(
        prog=f"{PROGRAM} {command}",
        usage=f"{PROGRAM} {command} [--device NAME] [flags below] [training flags]",
        description=f"{about}\n\n{TRAINING_FLAGS}{AUTO_FLAGS if command == 'plan' else ''}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )

    def add(name: str, **options: Any) -> None:
        parser.add_argument(f"--{name}", **options)

    add(
        "device",
        metavar="NAME",
        help="h200, a100-80, l4, rtx-4090 ..., a size such as 24GiB, or cpu; default: this one",
    )
    add("world_size", metavar="N", type=positive, default=1, help="devices that train together")
    add("sharding", choices=("ddp", "fsdp2", OFFLOAD, "zero2", "zero3"), help="how they divide the work")
    add("vocab_size", metavar="N", type=positive, help="tokens of the vocabulary, where it depends on the data")
    add("num_labels", metavar="N", type=positive, help="classes of a classifier; default: 2")
    add(
        "padded",
        choices=("yes", "no"),
        help="whether examples of one micro-batch differ in length; default: yes, where the "
        "task needs a mask and a micro-batch has 2 or more",
    )
    add(
        "json",
        dest="json_path",
        metavar="PATH",
        nargs="?",
        const="-",
        help="write the answer as JSON, without PATH instead of the text",
    )
    if command == "plan":
        add("grid", action="store_true", help="a table of memory over sequence length and micro-batch size instead")
        add("lengths", metavar="N,N...", type=numbers, help="its lengths; default: 1,024 to 262,144")
        add("micro_batch_sizes", metavar="N,N...", type=numbers, help="its sizes; default: 1,2,4,8,16")
        add("picture", metavar="PATH", type=Path, help="draw it into a .png file")
    else:
        parser.set_defaults(grid=False, lengths=None, micro_batch_sizes=None, picture=None)
    return parser


def _without_auto(words: list[str], name: str) -> tuple[list[str], bool]:
    """``words`` without ``--name auto``, and whether it was the last word on that flag."""
    values = [word.partition("=")[2] for word in words if word.startswith(f"--{name}=")]
    values += [value for word, value in itertools.pairwise(words) if word == f"--{name}"]
    if "auto" not in values:
        return words, False
    return advice.without_flags(words, {name}), True


def _question(config: Config, request: Request) -> Question:
    from train.tasks import load_task

    device = find_device(request.device) if request.device else this_device()
    classifies = load_task(config.data.task).labelled
    if request.num_labels is not None and not classifies:
        raise UsageError(f"--num_labels is for tasks with labels, and {config.data.task} has none.")
    if request.sharding not in (None, OFFLOAD) and request.world_size == 1:
        raise UsageError(f"--sharding {request.sharding} needs several devices: give --world_size too.")
    return Question(
        config=config,
        device=device,
        vocab_size=request.vocab_size or vocabulary_size(config),
        num_labels=(request.num_labels or 2) if classifies else 0,
        padded=None if request.padded is None else request.padded == "yes",
        world_size=request.world_size,
        sharding=request.sharding,
    )


# ---- predicting and showing ------------------------------------------------------------------------------------------


def _predictions(stack: ExitStack, question: Question, processes: int) -> Predictions:
    predictors = [stack.enter_context(Predictor()) for _ in range(processes)]
    if not sys.stderr.isatty():
        print(f"predicting for {question.device.name}; each prediction takes some seconds", file=sys.stderr)

    def announce(number: int, job: Job) -> None:
        if sys.stderr.isatty():
            values = job.values
            line = f"predicting ({number}): {job.micro_batch_size} × {job.length:,} tokens, "
            line += f"checkpointing {values['gradient_checkpointing']}, loss {values['loss']}"
            print(f"\r\033[K{line[:99]}", end="", file=sys.stderr, flush=True)

    return Predictions(predictors, announce)


def _clear_progress() -> None:
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr, flush=True)


def _emit(request: Request, text: str, values: dict[str, Any]) -> None:
    if request.json_path == "-":
        print(json.dumps(values, indent=2))
        return
    if request.json_path is not None:
        try:
            Path(request.json_path).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise UserError(f"--json {request.json_path}: {error.strerror}. Give a file that can be written.") from None
    print(text)


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.exit(status)
