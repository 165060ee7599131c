"""Memory of a training run: predicted before it, explained after it. No GPU is needed.

  plan      does a configuration fit on a device, and what is the fastest that does? (plan --help: its flags)
  predict   only the first part: memory of a configuration as it stands
  explain   what an out-of-memory message, or a log with one, says and what to do about it

examples
  python -m train.memory plan --config recipes/quickstart.yaml --device l4
  python -m train.memory plan --model Qwen/Qwen2.5-0.5B --device 24GiB --max_length auto
  python -m train.memory plan --config recipe.yaml --device h200 --grid --picture grid.png
  python -m train.memory explain 'CUDA out of memory. Tried to allocate 2.00 GiB ...'
  command 2>&1 | python -m train.memory explain
"""

import argparse
import itertools
import json
import sys
from argparse import Namespace
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from train import extras

if "memory" in extras.missing():
    print("error: train/memory/ needs train/extras/hardware/ and train/extras/meter/.", file=sys.stderr)
    sys.exit(2)  # EXIT_USAGE

from train.config import argument, parse
from train.launch import exit_with
from train.memory import advice, use_expandable_segments
from train.memory.devices import find_device, this_device
from train.memory.explain import explain
from train.memory.plan import Predictions, longest_length, make_plan, predicted
from train.memory.predict import OFFLOAD, Predictor
from train.memory.question import Question, replace_length, vocabulary_size
from train.records import EXIT_DONE, EXIT_INTERRUPTED, UsageError, UserError, num_cores

PROGRAM = "python -m train.memory"
FLAGS = """\
Every flag of the training command line may be given too: --config, --model, --model_config, --max_length,
--micro_batch_size, --global_batch_size ... (train/main.py --help lists them). The data is not read.
'plan' also takes:
  --max_length auto        plan for the longest sequences that fit, in multiples of 1,024
  --micro_batch_size auto  choose the micro-batch size; needs --global_batch_size
  --gradient_checkpointing auto  choose what to recompute
"""
AUTO = ("max_length", "micro_batch_size", "gradient_checkpointing")  # what may be left open


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}. {self.prog} --help lists the flags.")


def positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above zero")
    return int(text)


def numbers(text: str) -> tuple[int, ...]:
    """Whole numbers above zero, separated by commas: each once, ascending."""
    return tuple(sorted({positive(part.strip()) for part in text.split(",")}))


def main(arguments: list[str] | None = None) -> int:
    """Answers the command line and returns the exit status (see ``train.records``)."""
    words = sys.argv[1:] if arguments is None else arguments
    use_expandable_segments(is_here=not any(word.startswith("--device") for word in words))  # as a run does on Linux
    commands = {"plan": run_plan, "predict": run_predict, "explain": run_explain}
    try:
        if not words or (words[-1] in ("-h", "--help") and words[0] not in ("plan", "predict")):
            print(__doc__, end="")
            return EXIT_DONE if words else UsageError.exit_status
        if words[0] not in commands:
            raise UsageError(f"{words[0]!r} is not one of plan, predict, explain. {PROGRAM} --help shows examples.")
        with ExitStack() as stack:
            predictors = [stack.enter_context(Predictor()) for _ in range(min(num_cores(), 4))]  # some 350 MB each
            if words[0] != "explain":
                predictors[-1].start()  # loads its libraries while this process loads its own
            predictions = Predictions(*predictors, say=partial(print, file=sys.stderr))
            stack.callback(predictions.pool.shutdown, wait=False, cancel_futures=True)
            commands[words[0]](words[1:], predictions)
        return EXIT_DONE
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_status
    except BrokenPipeError:  # such as of head, which has read enough
        sys.stdout = None
        return EXIT_DONE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def run_plan(arguments: list[str], predictions: Predictions) -> None:
    if (request := read_request("plan", arguments)).grid:
        show_grid(request, predictions)
        return
    question = request.question
    if "max_length" in request.open:
        length, setting = longest_length(question, predictions)
        if not length:
            what = f"max_length: 1,024 tokens do not fit on {question.device.name} with {setting}"
            raise UserError(f"{what}. Take a larger device, a smaller model, or another optimizer.")
        question = replace_length(question, length)
    plan = make_plan(question, predictions, bool(request.open))
    command = advice.command(question, plan.best.setting, request.words, request.config) if plan.best else None
    text = advice.plan_text(question, plan, command, longest="max_length" in request.open)
    show(request, text, advice.plan_values(question, plan, command))


def show_grid(request: Namespace, predictions: Predictions) -> None:
    from train.memory.grid import draw, grid_text, make_grid

    question = request.question
    grid = make_grid(question, predictions, request.lengths, request.micro_batch_sizes)
    cells = [advice.outcome_values(question, cell) for row in grid for cell in row]
    show(request, grid_text(question, grid), {"device": asdict(question.device), "cells": cells})
    if request.picture is not None:
        draw(question, grid, request.picture)


def run_predict(arguments: list[str], predictions: Predictions) -> None:
    request = read_request("predict", arguments)
    outcome = predicted(request.question, predictions)
    show(request, advice.outcome_text(request.question, outcome), advice.outcome_values(request.question, outcome))


def run_explain(arguments: list[str], _: Predictions) -> None:
    if not arguments and (sys.stdin is None or sys.stdin.isatty()):
        raise UsageError("explain: give the message in quotes, or pipe the log into it.")
    piped = arguments in ([], ["-"])  # a log may hold bytes of any kind
    print(explain(sys.stdin.buffer.read().decode(errors="replace") if piped else " ".join(arguments)))


def read_request(command: str, arguments: list[str]) -> Namespace:
    """Splits the flags of this command from those of the training command line; raises UserError where they fail."""
    left_open = set[str]()
    request, words = _own_flags(command).parse_known_args([argument(word) for word in arguments])
    if "--max_length=auto" in words or ("--max_length", "auto") in itertools.pairwise(words):
        left_open, words = {"max_length"}, advice.without_flags(words, {"max_length"})
    if (request.lengths or request.micro_batch_sizes or request.picture) and not request.grid:
        raise UsageError("--lengths, --micro_batch_sizes and --picture need --grid: give it, too.")
    if request.picture and (request.picture.suffix.lower() != ".png" or not request.picture.parent.is_dir()):
        raise UsageError(f"--picture {request.picture}: give a file that ends in .png, in a folder that is there.")
    request.config = config = parse(words)
    left_open |= {name for name in AUTO if config.get(name) == "auto"}
    if request.grid and left_open - {"micro_batch_size"}:
        raise UsageError("--grid shows one setting: replace --max_length auto by --lengths, other autos by values.")
    if command == "predict" and left_open:
        raise UsageError("auto works only with 'plan'; 'predict' needs a value.")
    if "micro_batch_size" in left_open:
        config = config.changed(micro_batch_size=1)  # the search begins with the smallest
    if "gradient_checkpointing" in left_open:  # the search tries every way
        config = config.changed(gradient_checkpointing="none", gradient_checkpointing_offload=False)
    if request.sharding not in (None, OFFLOAD) and request.world_size == 1:
        raise UsageError(f"--sharding {request.sharding} needs several devices: give --world_size too.")
    from train.memory.trial import try_model  # here: --help does not wait for torch
    from train.tasks import Task, load_task

    device = this_device() if request.device is None else find_device(request.device)
    task = load_task(config.data.task)
    if request.num_labels and task.label_names is Task.label_names:
        raise UsageError(f"num_labels: {task.name} has no classes of its own: leave it out.")
    sizes = request.vocab_size or vocabulary_size(config), request.num_labels or 2 * task.labelled, request.world_size
    question = Question(config, device, *sizes, request.sharding)
    request.question, request.words, request.open = try_model(question), tuple(words), frozenset(left_open)
    return request


def _own_flags(command: str) -> Parser:
    parser = Parser(
        prog=f"{PROGRAM} {command}",
        usage=f"{PROGRAM} {command} [--device NAME] [flags below] [training flags]",
        description=FLAGS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    cards = "h200, a100-80, l4, rtx-4090 ..., a size such as 24GiB, or cpu; default: this one"
    add("--device", metavar="NAME", help=cards)
    add("--world_size", metavar="N", type=positive, default=1, help="devices that train together")
    add("--sharding", choices=("ddp", "fsdp2", OFFLOAD), help="how these devices divide the work")
    add("--vocab_size", metavar="N", type=positive, help="tokens of the vocabulary, where it depends on the data")
    add("--num_labels", metavar="N", type=positive, help="classes of a classifier or tagger; classifiers: default 2")
    add("--json", action="store_true", help="write the answer as JSON")
    parser.set_defaults(grid=False, lengths=None, micro_batch_sizes=None, picture=None)
    if command == "plan":
        add("--grid", action="store_true", help="a table of memory over sequence length and micro-batch size instead")
        add("--lengths", metavar="N,N...", type=numbers, help="lengths of the grid; default: 1,024 to 262,144")
        add("--micro_batch_sizes", metavar="N,N...", type=numbers, help="sizes of the grid; default: 1,2,4,8,16")
        add("--picture", metavar="PATH", type=Path, help="draw the grid into a .png file")
    return parser


def show(request: Namespace, text: str, values: dict[str, Any]) -> None:
    print(json.dumps(values, indent=2) if request.json else text)


if __name__ == "__main__":
    exit_with(main)
