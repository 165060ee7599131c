"""What predicted cells say of the cards that people own: sentences, tables, pages and a picture."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

from scripts.benchmarks.harness import Table, machine_line
from scripts.benchmarks.study.page import study_page
from train.extras.report.page import facts_html, machine_facts, section_html
from train.figures import count
from train.memory.devices import Device, find_device
from train.memory.question import MARGIN

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SIZES = tuple(4**power for power in range(7))
SHOWN_SIZES = SIZES[:4]
COLOURS = ("#d9f0a3", "#78c679", "#41b6c4", "#2c7fb8", "#253494", "#081d58")
TOO_LARGE = "#eeeeee"
NOTE = (
    "Colour: the smallest card on which a micro-batch fits; figures: GiB that torch has to reserve, with the kernels "
    "of an A100 (for a T4 the step is predicted in fp16 with its own), where a step accumulates several micro-batches: "
    "gradients stay during the next, except with an update in backward. Each technique is added to those before it. "
    "Predicted, not measured. Speeds are roofline estimates with the first technique that fits, at about the largest "
    "micro-batch that does (64 at most)."
)
LARGEST = "Largest micro-batch of {} that fits on {}, by length"


@dataclass(frozen=True)
class Cell:
    """What one micro-batch of a model reserves with the techniques of a rung, on cards with the kernels of one."""

    model: str
    rung: str
    kernels: str
    length: int
    micro_batch_size: int
    reserved_bytes: int | None
    reason: str | None = None  # why nothing was predicted


@dataclass(frozen=True)
class Speed:
    """A roofline estimate at the largest micro-batch that fits, of at most the last of ``SHOWN_SIZES``."""

    model: str
    card: str
    length: int
    rung: str
    micro_batch_size: int
    tokens_per_second: float | None


def kernels_of(card: str) -> str:
    """The card whose kernels stand for those of ``card``."""
    return "a100-80" if (find_device(card).compute_capability or (8, 0)) >= (8, 0) else "t4"


def room_bytes(device: Device) -> int:
    """What torch may reserve on a card: without the margin and what the context takes."""
    return int(device.total_bytes * (1 - MARGIN)) - device.context_bytes


def largest(cells: Sequence[Cell], model: str, rung: str, length: int, device: Device, kernels: str) -> int:
    """The largest micro-batch of those predicted that fits on ``device``; 0: none.

    Not interpolated: what a step reserves grows in leaps, so sizes between two that were predicted may not fit.
    """
    place, room = (model, rung, length, kernels), room_bytes(device)
    row = [(c.micro_batch_size, c.reserved_bytes) for c in cells if (c.model, c.rung, c.length, c.kernels) == place]
    return max((size for size, reserved in row if reserved is not None and reserved <= room), default=0)


def smallest_card(cell: Cell, cards: Mapping[str, Device]) -> str | None:
    """The card with least memory on which a cell fits; None: none of ``cards``, or it was not predicted."""
    fitting = [
        (device.total_bytes, name)
        for name, device in cards.items()
        if kernels_of(name) == cell.kernels
        and cell.reserved_bytes is not None
        and cell.reserved_bytes <= room_bytes(device)
    ]
    return min(fitting)[1] if fitting else None


def findings(found: Mapping[str, Any]) -> list[str]:
    """For each card and model: the longest sequence tried that fits, with nothing and with each technique."""
    cells = [Cell(**cell) for cell in found["cells"]]
    said = []
    for card in found["cards"]:
        for model in dict.fromkeys(cell.model for cell in cells):
            longest: dict[str, int] = {}
            for rung in dict.fromkeys(cell.rung for cell in cells if cell.model == model):
                device, kernels = find_device(card), kernels_of(card)
                sizes = {n: largest(cells, model, rung, n, device, kernels) for n in found["lengths"]}
                if all(c.reason is None for c in cells if (c.model, c.rung, c.kernels) == (model, rung, kernels)):
                    longest[rung] = max((length for length, size in sizes.items() if size), default=0)
            names = {rung: "without techniques" if rung == "nothing" else f"with {rung}" for rung in longest}
            parts = [f"{f'{n:,} tokens' if n else 'nothing'} {names[rung]}" for rung, n in longest.items()]
            said.append(f"{model} on {card.upper()}: {'; '.join(parts) if any(longest.values()) else 'nothing fits'}.")
    return said


def title_of(device: Device) -> str:
    """Name and memory of a card."""
    return f"{device.name.upper()} ({device.total_bytes / 2**30:.0f} GiB)"


class Maps:
    """The cells by model and technique, each with the smallest card that it fits on."""

    def __init__(self, found: Mapping[str, Any]) -> None:
        self.cells = [Cell(**cell) for cell in found["cells"]]
        self.cards: dict[str, Device] = {name: find_device(name) for name in found["cards"]}
        self.lengths: list[int] = found["lengths"]
        self.models = list(dict.fromkeys(cell.model for cell in self.cells))
        self._by_place = {(c.model, c.rung, c.length, c.micro_batch_size, c.kernels): c for c in self.cells}

    def rungs(self, model: str) -> list[str]:
        """The techniques of a model, the least saving first."""
        return list(dict.fromkeys(cell.rung for cell in self.cells if cell.model == model))

    def at(self, model: str, rung: str, length: int, size: int) -> tuple[str | None, str]:
        """The smallest card, None for none; and the GiB to show, – where a smaller micro-batch is too large already."""
        kinds = list(dict.fromkeys(map(kernels_of, self.by_size)))
        found = [self._by_place.get((model, rung, length, size, kind)) for kind in kinds]
        fitting = [card for cell in found if cell and (card := smallest_card(cell, self.cards))]
        sizes = [cell.reserved_bytes for cell in reversed(found) if cell and cell.reserved_bytes]
        gibs = sizes[0] / 2**30 if sizes else None
        return next(iter(fitting), None), "–" if gibs is None else f"{gibs:.{1 if gibs < 100 else 0}f}"

    def most(self, model: str, rung: str, length: int, card: str) -> str:
        """The largest micro-batch on a card: ≥ where no larger one was tried, a word where it cannot be done there."""
        first = self._by_place.get((model, rung, length, SIZES[0], kernels_of(card)))
        if first is not None and first.reason is not None:
            return "refused"
        size = largest(self.cells, model, rung, length, self.cards[card], kernels_of(card))
        return f"{'≥ ' if size == SIZES[-1] else ''}{size:,}" if size else "–"

    @property
    def refusals(self) -> list[str]:
        """Why some cells were not predicted, each reason once."""
        places = {(c.model, c.rung, c.kernels): c.reason for c in reversed(self.cells) if c.reason is not None}
        return [f"{model}, {rung}, kernels of {kernels}: {why}" for (model, rung, kernels), why in places.items()]

    @property
    def by_size(self) -> list[str]:
        """The cards, the one with least memory first."""
        return sorted(self.cards, key=lambda name: self.cards[name].total_bytes)

    def colours(self, card: str | None) -> tuple[str, str]:
        """Of a cell, darker for larger cards, and of the text in it."""
        colour = TOO_LARGE if card is None else COLOURS[self.by_size.index(card) % len(COLOURS)]
        is_dark = sum(int(colour[i : i + 2], 16) for i in (1, 3, 5)) < 380
        return colour, "#ffffff" if is_dark else "#1b1f24"


def write(folder: Path, found: Mapping[str, Any]) -> None:
    """Writes figures, pages and the picture, and says where."""
    maps, said = Maps(found), findings(found)
    (folder / "cards.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    (folder / "cards.md").write_text(markdown(found, maps, said), encoding="utf-8")
    (folder / "index.html").write_text(page(found, maps, said), encoding="utf-8")
    draw(maps, folder / "cards.png")
    print(f"{folder / 'index.html'} shows the result; cards.md, cards.json and cards.png lie next to it")


def draw(maps: Maps, path: Path) -> None:
    """A map of length × micro-batch for each model (down) and technique (across)."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    columns = max(len(maps.rungs(model)) for model in maps.models)
    figure = Figure(figsize=(3.0 * columns + 0.6, 2.3 * len(maps.models) + 1.1), layout="constrained")
    grid = figure.subplots(len(maps.models), columns, squeeze=False)
    for row, model in zip(grid, maps.models, strict=True):
        for number, axes in enumerate(row):
            rungs = maps.rungs(model)
            if number < len(rungs):
                _map(axes, maps, model, rungs[number], is_first=not number)
            else:
                axes.set_axis_off()
        row[0].set_ylabel(f"{model}\ntokens")
    patches = [Patch(color=maps.colours(name)[0], label=title_of(maps.cards[name])) for name in maps.by_size]
    patches.append(Patch(color=TOO_LARGE, label="none of these"))
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), frameon=False, fontsize=9)
    figure.suptitle("Smallest card on which a micro-batch fits, and the GiB it takes (predicted)", fontsize=11)
    figure.savefig(path, dpi=110, metadata={"Software": None})


def _map(axes: Axes, maps: Maps, model: str, rung: str, is_first: bool) -> None:
    for y, length in enumerate(maps.lengths):
        for x, size in enumerate(SHOWN_SIZES):
            card, text = maps.at(model, rung, length, size)
            colour, ink = maps.colours(card)
            axes.fill([x, x + 1, x + 1, x], [y, y, y + 1, y + 1], color=colour, ec="white", lw=1.5)
            axes.text(x + 0.5, y + 0.5, text, ha="center", va="center", fontsize=8, color=ink)
    axes.set_xticks([x + 0.5 for x in range(len(SHOWN_SIZES))], [str(size) for size in SHOWN_SIZES], fontsize=8)
    names = [f"{length:,}" if is_first else "" for length in maps.lengths]
    axes.set_yticks([y + 0.5 for y in range(len(maps.lengths))], names, fontsize=8)
    axes.set_title(fill(rung if rung == "nothing" else f"+ {rung}", 36), fontsize=9)
    axes.set_xlabel("micro-batch", fontsize=8)
    axes.set_xlim(0, len(SHOWN_SIZES))
    axes.set_ylim(0, len(maps.lengths))
    axes.tick_params(length=0)
    for side in axes.spines.values():
        side.set_visible(False)


def tables(found: Mapping[str, Any], maps: Maps) -> dict[str, list[list[str]]]:
    """By card: the largest micro-batch of each model and technique by length, and an estimate of the speed."""
    speed_of = {(s["card"], s["model"], s["length"]): s for s in found["speeds"]}
    made = {}
    for card, device in maps.cards.items():
        rows = [["model", "technique", *(f"{length:,}" for length in maps.lengths)]]
        for model in maps.models:
            rows += [
                [model, rung, *(maps.most(model, rung, n, card) for n in maps.lengths)] for rung in maps.rungs(model)
            ]
            speeds = [speed_of.get((card, model, n)) for n in maps.lengths]
            texts = [f"{count(s['tokens_per_second'])}" if s and s["tokens_per_second"] else "–" for s in speeds]
            rows.append([model, "tokens/s with the first that fits, estimated", *texts])
        made[LARGEST.format(", ".join(map(str, SIZES)), title_of(device))] = rows
    return made


def markdown(found: Mapping[str, Any], maps: Maps, said: Sequence[str]) -> str:
    """The sentences and the tables."""
    lines = ["# What fits on which card", "", f"`python scripts/study.py {found['command']}`: {machine_line(found)}."]
    lines += ["", NOTE, "", *(f"- {sentence}" for sentence in said), "", "![The cards](cards.png)", ""]
    for name, rows in tables(found, maps).items():
        align = "ll" + "r" * len(maps.lengths)
        lines += [f"## {name}", "", *Table(rows[0], align).lines(rows[1:]), ""]
    lines += ["## Techniques", ""]
    lines += [f"- {name}: {_flags(changes)}" for name, changes in found["techniques"].items()]
    if maps.refusals:
        lines += ["", "## Refused", "", *(f"- {refusal}" for refusal in maps.refusals)]
    return "\n".join([*lines, ""])


def page(found: Mapping[str, Any], maps: Maps, said: Sequence[str]) -> str:
    """One HTML file that needs nothing else."""
    keys = "".join(_box(maps.colours(name)[0], title_of(maps.cards[name])) for name in maps.by_size)
    key = f'<p class="key">{keys}{_box(TOO_LARGE, "none of these")}</p>'
    items = "".join(f"<li>{escape(sentence)}</li>" for sentence in said)
    sections = [f"<p>{escape(NOTE)}</p>{key}"]
    sections += [section_html(escape(model), _model_html(maps, model)) for model in maps.models]
    sections.append(section_html("Longest sequence tried that fits", f'<ul class="findings">{items}</ul>'))
    for name, rows in tables(found, maps).items():
        head = "".join(f'<th scope="col">{escape(text)}</th>' for text in rows[0])
        body = "".join("<tr>" + "".join(f"<td>{escape(text)}</td>" for text in row) + "</tr>" for row in rows[1:])
        box = f'<div class="box"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
        sections.append(section_html(escape(name), box))
    flags = {name: _flags(changes) for name, changes in found["techniques"].items()}
    sections += [section_html("Techniques", facts_html(flags))]
    refusals = "".join(f"<li>{escape(refusal)}</li>" for refusal in maps.refusals)
    sections += [section_html("Refused", refusals and f"<ul>{refusals}</ul>")]
    sections += [section_html("Machine and versions", facts_html(machine_facts(found)))]
    return study_page("What fits on which card", f"scripts/study.py {found['command']}", "".join(sections))


def _model_html(maps: Maps, model: str) -> str:
    figures = ""
    for rung in maps.rungs(model):
        head = "".join(f'<th scope="col">{size}</th>' for size in SHOWN_SIZES)
        rows = ""
        for length in reversed(maps.lengths):
            cells = ""
            for size in SHOWN_SIZES:
                card, text = maps.at(model, rung, length, size)
                style = "background: {}; color: {}".format(*maps.colours(card))
                known = escape(card or "none of these")
                cells += f'<td style="{style}" title="{known}" aria-label="{text} GiB, {known}">{text}</td>'
            rows += f'<tr><th scope="row">{length:,}</th>{cells}</tr>'
        name = rung if rung == "nothing" else f"+ {rung}"
        caption = f"<figcaption><strong>{escape(name)}</strong>Rows: tokens; columns: micro-batch.</figcaption>"
        table = f'<table class="matrix"><thead><tr><td></td>{head}</tr></thead><tbody>{rows}</tbody></table>'
        figures += f"<figure>{caption}{table}</figure>"
    return f'<div class="maps">{figures}</div>'


def _box(colour: str, name: str) -> str:
    style = f"background: {colour}; display: inline-block; width: 1.2em; height: 1em; margin: 0 .4em 0 1em"
    return f'<span><span style="{style}"></span>{escape(name)}</span>'


def _flags(changes: Mapping[str, Any]) -> str:
    return " ".join(f"--{name} {value}" for name, value in changes.items())
