"""Files of a run that outlive a full disk, damage, and runs that start from scratch in the same folder."""

import errno
import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from train import checkpoint, figures
from train.config import CORE
from train.extras.endurance.checkpoints import Saving
from train.outputs import Outputs
from train.records import Progress, Run, UserError
from train.state import TrainingState

# What a run leaves in its folder, in which a person may keep other things.
MADE = ("checkpoints/step-*", "final", "config.yaml", "metrics.jsonl", "summary.json", "report.html", "wandb")
MADE += ("long-sequence-template", "stopped.json", ".partial-*", "memory_snapshot-*.pickle")


class DurableOutputs(Outputs):
    """Saves in the background, moves aside what others would overwrite, keeps unwritten rows, digests ``final/``."""

    _unwritten: tuple[str, ...] = ()  # rows of metrics.jsonl that the disk did not take yet
    _is_edited = False  # final/ by a person, since a run has written it
    saving: Saving  # writes the checkpoints; the extra sets it

    def save(self, run: Run, state: TrainingState, progress: Progress, wait: bool) -> None:
        self.sync_log()
        self.saving.save(run, state, progress, wait)

    def discard_later(self, progress: Progress) -> None:
        """Moves aside checkpoints from after ``progress``, and what was made of them; or all of an earlier run."""
        steps, every = [row["step"] for row in figures.read_metrics(self.metrics)], self.config.output.save_every_steps
        begins = self.config.output.resume == "auto" and not progress.step and not self.steps()
        config, *made = (self.folder / name for name in ("config.yaml", "final", "report.html", "summary.json"))
        # Files of a person may have these names. A run that is killed early leaves a log and a config.yaml like ours.
        is_recipe = config.exists() and not config.read_bytes().startswith(f"# {next(iter(CORE))}\n".encode())
        is_whole = is_recipe or any(map(Path.exists, made))
        # The log of a killed run may be one save ahead of the checkpoint that was on its way.
        if is_lost := begins and (is_whole or max(steps, default=0) > 2 * (every or math.inf)):
            self.say(f"{self.checkpoints} has no checkpoint: the run starts from scratch")
        is_from_elsewhere = progress.step > 0 and not self.steps()
        is_other = is_from_elsewhere and (is_whole or min(steps, default=math.inf) < progress.step)
        if is_lost or is_other or self.config.output.resume == "never":
            self._move_aside([path for pattern in MADE for path in self.folder.glob(pattern)], "the earlier run's")
        later = [path for at, path in self.steps().items() if at > progress.step]
        if later or self.earlier_summary.get("steps", 0) > progress.step:
            made = [self.folder / name for name in ("final", "summary.json", "report.html")]
            self._move_aside([*later, *filter(Path.exists, made)], "the later steps'")

    def _move_aside(self, paths: Sequence[Path], whose: str) -> None:
        """Moves files of this folder to ``previous-N``, with their places in it, and says so."""
        earlier = [p.name for folder in (self.folder, self.checkpoints) for p in folder.glob("previous-*")]
        number = 1 + max((int(found[1]) for name in earlier if (found := re.match(r"previous-(\d+)", name))), default=0)
        aside, moved = self.folder / f"previous-{number}", list(paths)
        for path in paths:
            to = aside / path.relative_to(self.folder)
            figures.make_folder(to.parent)
            try:
                path.rename(to)
            except OSError as error:
                if error.errno != errno.EXDEV:
                    raise
                path.rename(to := path.with_name(f"{aside.name}-{path.name}"))  # it may not fit into this one
                self.say(f"{path} is on another file system: there it is now {to.name}")
                moved.remove(path)
            figures.sync(to.parent)
        if moved:
            self.say(f"{whose} files were moved to {aside}")

    def write_rows(self, *rows: str) -> None:
        """Appends to the log, in which a gap would be no reason to stop: what fails is tried again with the next."""
        self._unwritten += rows
        size = self.metrics.stat().st_size if self.metrics.exists() else 0
        try:
            super().write_rows(*self._unwritten)
            self._unwritten = ()
        except UserError as error:
            with suppress(OSError), self.metrics.open("r+b") as file:
                file.truncate(size)  # the disk may have taken some of them
            self.note(f"{error} Training continues, and these rows are written later if possible.")

    def sync_log(self) -> None:
        if self.is_main:
            self.write_rows()
        super().sync_log()

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Adds the digests of ``final/`` to the summary; rows of the log that still cannot be written end the run."""
        files = {}
        if self.is_main:
            super().write_rows(*self._unwritten)
            self._unwritten = ()
            files = {name: checkpoint.digest(path) for name, path in self._in_final().items()}
        super().finish({**summary, "final_files": files})

    def _in_final(self) -> dict[str, Path]:
        """The files there by name, without model cards, which each run writes again."""
        paths = (path for path in sorted(self.final.rglob("*")) if path.is_file() and path.name != "README.md")
        return {path.relative_to(self.final).as_posix(): path for path in paths}

    def write_final(self, state: TrainingState, tokenizer: PreTrainedTokenizerBase) -> None:
        """An earlier ``final/`` to which a person has added files, or changed some, moves aside."""
        if self._is_edited and self.final.exists():
            self._move_aside([self.final], "the earlier final/'s")
        if self.is_main:  # or a run that fails before its summary would take its own final/ for one that was edited
            (self.folder / "summary.json").unlink(missing_ok=True)
        super().write_final(state, tokenizer)

    @cached_property
    def earlier_summary(self) -> dict[str, Any]:
        """Empty also where ``final/`` is not as the summary says."""
        summary = super().earlier_summary
        try:
            files, there = summary.get("final_files", {}), self._in_final()
            same = {n for n in files.keys() & there.keys() if checkpoint.digest(there[n], files[n]) == files[n]}
        except checkpoint.UNREADABLE:
            return {}
        self._is_edited = bool(files and there.keys() - same)
        if broken := sorted(files.keys() - same):
            self.note(f"{self.final / broken[0]} is missing or not as it was written: final/ is written again")
            return {}
        return summary
