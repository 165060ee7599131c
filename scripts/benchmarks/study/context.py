"""Is the long context worth its memory? What a trained model makes of tokens that lie far back.

    python scripts/study.py context --run runs/default --output_dir runs/context

Takes the validation data and ``final/`` of a finished run. It measures the loss at each position, compares it with the
same weights that see only the last k tokens, and hides a sequence of random tokens ever further back to see from where
it is still recalled. Nothing is trained or downloaded. Other flags are those of ``train/main.py``.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scripts.benchmarks import building, harness
from scripts.benchmarks.study.charts import COLOURS, drawn_svg
from scripts.benchmarks.study.curves import write
from scripts.benchmarks.study.trials import Interval, interval
from train.config import argument
from train.extras.report.charts import Chart
from train.memory.__main__ import Parser, positive
from train.records import UsageError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from torch import Tensor, nn

NEEDLE_TOKENS = 12  # of a random sequence that comes twice
LONG_SHARE, LEAST_ROWS = 0.9, 4  # of the longest row: shorter ones are left out, unless too few would remain
HARM_SHARE = 0.02  # of the loss: what is better by less is not called a problem
RECALLED_SHARE = 0.1  # of the loss on a random sequence that has to be saved before it counts as recalled
ROW_TOKENS = 2**15  # at most, of the rows that go through the model together


def main(arguments: list[str]) -> int:
    """Runs the study of the command line and returns the exit status (see ``train.records``)."""
    parser = Parser(
        prog="scripts/study.py context",
        usage="scripts/study.py context --run RUN --output_dir DIR [flags below] [training flags]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--run", type=Path, required=True, metavar="DIR", help="a finished run's folder")
    parser.add_argument("--output_dir", type=Path, required=True, metavar="DIR", help="of the results")
    parser.add_argument("--windows", nargs="+", type=int, metavar="K", help="last tokens (default: ¼ and ½ of all)")
    parser.add_argument("--rows", type=positive, default=32, metavar="N", help="of validation data (default: 32)")
    parser.add_argument("--positions", type=positive, default=32, metavar="N", help="in each row (default: 32)")

    def study() -> None:
        own, words = parser.parse_known_args(list(map(argument, arguments)))
        model, rows = loaded(own.run, words, own.rows)
        found = measured(model, rows, own.windows, own.positions)
        command = shlex.join(["context", *arguments])
        own.output_dir.mkdir(parents=True, exist_ok=True)
        pages(own.output_dir, {**harness.about(), "title": "Context", "command": command, "outcomes": [], **found})

    return harness.exit_status(study)


def loaded(folder: Path, words: Sequence[str], num_rows: int) -> tuple[nn.Module, Tensor]:
    """The model of a finished run in evaluation mode, and (N, S + 1) tokens of its longest validation examples.

    Raises:
        UsageError: the run is not finished, its task is not causal, or it has too little validation data.
    """
    import torch

    if not (folder / "final").is_dir():
        raise UsageError(f"--run {folder}: there is no final/ in it. Give the output_dir of a finished run.")
    model, examples = building.finished_run(folder, words)
    tokens = [torch.as_tensor(row) for row in examples.with_format("numpy")["tokens"]]
    longest = sorted(tokens, key=len, reverse=True)[:num_rows]
    # The ends of documents are short, and all rows are cut to the shortest.
    long = [row for row in longest if len(row) >= LONG_SHARE * len(longest[0])]
    longest = long if len(long) >= LEAST_ROWS else longest[:LEAST_ROWS]
    least = 4 * NEEDLE_TOKENS
    if len(longest) < 2 or len(longest[-1]) < least:
        enough = sum(len(row) >= least for row in tokens)
        remedy = "Validate on longer documents, or on more of them"
        raise UsageError(f"--run {folder}: {enough} rows of its validation data have {least} tokens or more. {remedy}.")
    rows = torch.stack([row[: len(longest[-1])] for row in longest]).long()
    return model, rows


def measured(model: nn.Module, rows: Tensor, windows: Sequence[int] | None, num_positions: int) -> dict[str, Any]:
    """Losses by position with all tokens and with the last k, and how much of a repeated sequence is recalled.

    Args:
        rows: (N, S + 1) tokens.
        windows: values of k; None: a quarter and a half of S.

    Raises:
        UsageError: a window is not shorter than the rows.
    """
    import torch

    length = rows.shape[1] - 1
    windows = sorted(windows or {length // 4, length // 2})
    if not 0 < windows[0] <= windows[-1] < length:
        raise UsageError(f"--windows {' '.join(map(str, windows))}: give numbers from 1 to {length - 1}.")
    positions = sorted({max(0, round((i + 1) * length / num_positions) - 1) for i in range(num_positions)})
    limited: dict[str, Any] = {}
    with torch.no_grad():
        every = losses_at(model, rows, positions)
        for window in windows:
            own = [p for p in positions if p >= window]
            parts = [losses_at(model, rows[:, p + 1 - window : p + 2], [window - 1]) for p in own]
            limited[str(window)] = {"positions": own, "losses": torch.cat(parts, 1).tolist()}
        needles = [recalled(model, rows, distance) for distance in distances_of(length)]
    return {
        "length": length,
        "positions": positions,
        "losses": every.tolist(),  # (rows, positions)
        "windows": limited,
        "needles": needles,
    }


def losses_at(model: nn.Module, rows: Tensor, positions: Sequence[int]) -> Tensor:
    """(N, P) −log p of the token that follows each of ``positions`` in ``rows`` (N, S + 1), given all up to it."""
    import torch

    device, kept = next(model.parameters()).device, torch.tensor(positions)
    parts = []
    for part in rows.split(max(1, ROW_TOKENS // rows.shape[1])):
        inputs, labels = part[:, :-1].to(device), part[:, 1:][:, kept].to(device)
        try:  # never all logits, where the model can do without
            output = model(input_ids=inputs, logits_to_keep=kept.to(device))
        except TypeError:
            output = model(input_ids=inputs)
        parts.append(building.token_losses(output, labels, kept).cpu().double())
    return torch.cat(parts)


def distances_of(length: int) -> list[int]:
    """Tokens between a sequence and its repetition: powers of two, and as many as there can be."""
    most = length + 1 - 2 * NEEDLE_TOKENS
    return [*(2**i for i in range(3, most.bit_length()) if 2**i < most), most]


def recalled(model: nn.Module, rows: Tensor, distance: int) -> dict[str, Any]:
    """By row, the loss on a random sequence at the end that was there ``distance`` tokens before, and that was not."""
    import torch

    generator = torch.Generator().manual_seed(distance)
    pool = rows.flatten()  # tokens as frequent as in the text

    def sequences() -> Tensor:
        return pool[torch.randint(len(pool), (len(rows), NEEDLE_TOKENS), generator=generator)]

    needle, other, end = sequences(), sequences(), rows.shape[1]
    first = end - 2 * NEEDLE_TOKENS - distance
    targets = range(end - NEEDLE_TOKENS, end - 1)  # the first token of the repetition cannot be foreseen
    losses = []
    for before in (needle, other):
        made = rows.clone()
        made[:, first : first + NEEDLE_TOKENS], made[:, -NEEDLE_TOKENS:] = before, needle
        losses.append(losses_at(model, made, list(targets)).mean(1).tolist())
    return {"distance": distance, "repeated": losses[0], "other": losses[1]}


# ---- what the figures say --------------------------------------------------------------------------------------------


def gain_of(found: dict[str, Any], window: str) -> Interval:
    """What the tokens before the last ``window`` take off the loss, over rows."""
    own, column = found["windows"][window], {p: i for i, p in enumerate(found["positions"])}
    pairs = zip(own["losses"], found["losses"], strict=True)
    return interval(
        [
            statistics.fmean(a - every[column[p]] for a, p in zip(few, own["positions"], strict=True))
            for few, every in pairs
        ]
    )


def reach_of(found: dict[str, Any]) -> int | None:
    """The largest distance up to which, and at every smaller one, a repeated sequence is recalled; None: at none."""
    reach = None
    for needle in found["needles"]:
        saved = interval([a - b for a, b in zip(needle["other"], needle["repeated"], strict=True)])
        if not saved.is_shown or saved.mean < RECALLED_SHARE * statistics.fmean(needle["other"]):
            break
        reach = needle["distance"]
    return reach


def rise_of(found: dict[str, Any]) -> Interval:
    """How much higher the loss is in the last quarter of the positions than in the second, over rows."""
    losses, quarter = found["losses"], len(found["positions"]) // 4
    if not quarter:
        return interval([0.0])
    return interval([statistics.fmean(row[-quarter:]) - statistics.fmean(row[quarter : 2 * quarter]) for row in losses])


def sentences(found: dict[str, Any]) -> list[str]:
    """What the figures say."""
    said, mean = [], statistics.fmean(loss for row in found["losses"] for loss in row)
    for window in found["windows"]:
        gain = gain_of(found, window)
        half = f"{abs(gain.mean):.3g} ± {gain.high - gain.mean:.2g} nats a token ({abs(gain.mean) / mean:.1%})"
        if not gain.is_shown or -HARM_SHARE * mean < gain.mean < 0:
            said.append(f"Beyond the last {int(window):,} tokens: these rows show no use of what lies further back.")
        elif gain.mean > 0:
            said.append(f"Beyond the last {int(window):,} tokens: what lies further back takes {half} off the loss.")
        else:
            said.append(
                f"PROBLEM: seeing only the last {int(window):,} tokens is better by {half}. A longer context that "
                "harms means positions it was not trained for (rope_scaling), or a mask or packing that is wrong."
            )
    if (rise := rise_of(found)).is_shown and rise.mean > HARM_SHARE * mean:
        said.append(
            f"PROBLEM: the loss is {rise.mean:.3g} ± {rise.high - rise.mean:.2g} higher in the last quarter of the "
            "positions than in the second: look at rope_scaling and at what the ends of the documents hold."
        )
    reach, most = reach_of(found), found["needles"][-1]["distance"]
    if reach is None:
        return [
            *said,
            "A repeated random sequence is not recalled from any distance: the model has not learned to copy.",
        ]
    if reach < most:
        return [*said, f"A repeated random sequence is recalled from {reach:,} tokens back, but not from further."]
    return [*said, f"A repeated random sequence is recalled from {reach:,} tokens back, as far as there is room."]


def rows_of(found: dict[str, Any]) -> list[list[str]]:
    """The table: a row a distance of the repeated sequence, and before them the titles."""
    made = [["tokens between", "loss, repeated", "loss, new", ""]]
    for needle in found["needles"]:
        repeated, other = (statistics.fmean(needle[name]) for name in ("repeated", "other"))
        made.append(
            [f"{needle['distance']:,}", f"{repeated:.3f}", f"{other:.3f}", f"{1 - repeated / other:.0%} recalled"]
        )
    return made


def pages(folder: Path, found: dict[str, Any]) -> None:
    """Writes the results."""

    def by_position(axes: Axes) -> None:
        lines = {"all tokens": (found["positions"], found["losses"])}
        lines |= {f"the last {w}": (own["positions"], own["losses"]) for w, own in found["windows"].items()}
        for number, (name, (positions, losses)) in enumerate(lines.items()):
            means = [statistics.fmean(column) for column in zip(*losses, strict=True)]
            axes.plot(positions, means, color=COLOURS[number % len(COLOURS)], label=name, linewidth=1.4)
        axes.set_xlabel("position")

    def by_distance(axes: Axes) -> None:
        for number, (key, name) in enumerate((("repeated", "seen before"), ("other", "new"))):
            means = [statistics.fmean(needle[key]) for needle in found["needles"]]
            distances = [needle["distance"] for needle in found["needles"]]
            axes.plot(distances, means, marker="o", color=COLOURS[number], label=name)
        axes.set_xscale("log")
        axes.set_xlabel("tokens between")

    def chart(title: str, caption: str, draw: Callable[[Axes], None]) -> Chart:
        return Chart(title, caption, drawn_svg(title.lower().replace(" ", "-"), caption, draw))

    charts = [
        chart(
            "Loss by position", "Mean over rows, with all tokens before the position and with the last k.", by_position
        ),
        chart("Recall of a random sequence", "Loss on its second occurrence, and on one that is new.", by_distance),
    ]
    write(folder, found, sentences(found), rows_of(found), charts)
