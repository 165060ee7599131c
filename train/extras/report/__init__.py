"""What a run shows afterwards: report.html, the model card, a sample, trackers, and final/ on the Hub."""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from train import extras
from train.config import Config, option, to_values
from train.extras.device import SHORT
from train.figures import read_metrics, without_secrets, write_whole
from train.launch import Launch
from train.records import Parts, Run, UsageError, UserError, one_line

PROJECT = "long-sequence-template"  # under which trackers group runs


@dataclass(frozen=True)
class Options:
    """Report page, model card, trackers, the Hub."""

    report_to: tuple[Literal["tensorboard", "trackio", "wandb"], ...] = option((), "Trackers to log to.")
    run_name: str | None = option(None, "Name in wandb, trackio, report, card; default: the folder (card: the task).")
    push_to_hub: bool = option(False, "Upload final/ to the Hub.", needs="hub_model_id")
    hub_model_id: str | None = option(None, "user/name to upload to.")
    hub_private_repo: bool = option(False, "Create the repository as a private one.", needs="push_to_hub")


class Extra(extras.Extra):
    _trackers: Sequence[Any] = ()

    def check(self, config: Config, launch: Launch) -> None:
        own = config.of(Options)
        name, hub = own.run_name, own.hub_model_id
        if name is not None and (name.strip(". ") == "" or any(c in name for c in "/\\\0")):
            raise UsageError(f"run_name: {name!r} is a name, not a path: use letters, without slashes.")
        if hub is not None and not re.fullmatch(r"(?!.*(--|\.\.|\.git$))(\b[\w.-]+\b/)?\b[\w.-]{1,96}\b", hub, re.A):
            raise UsageError(f"hub_model_id: {hub!r}: write user/name, as the Hub names repositories.")
        for tracker in own.report_to:
            if find_spec(tracker) is None and (tracker != "tensorboard" or find_spec("tensorboardX") is None):
                raise UsageError(f"report_to: {tracker} is not installed. pip install '.[{tracker}]' adds it.")

    @contextmanager
    def open(self, config: Config, launch: Launch, stop: list[str]) -> Iterator[None]:
        try:
            yield
        finally:  # however the run ends: a tracker may still have lines to write
            for tracker in self._trackers:
                tracker.finish()

    def accelerator_options(self, config: Config, launch: Launch) -> dict[str, Any]:
        return {"log_with": list(config.of(Options).report_to) or None, "project_dir": config.output.output_dir}

    def before_training(self, run: Run, parts: Parts) -> None:
        if (own := run.config.of(Options)).push_to_hub:
            run.outputs.note(run.outputs.from_main(partial(_on_hub, own, has_begun=bool(run.outputs.steps()))))
        bar: Any = run.outputs.bar
        if (getattr(bar, "ncols", None) or 1) < 1:  # a terminal without columns, as a notebook's may be
            bar.dynamic_ncols, bar.ncols, bar.nrows = None, 120, 24
        if own.report_to:
            start_trackers(run.accelerator, run.config)
            self._trackers = run.accelerator.trackers

    def recorded(self, run: Run, kind: str, step: int, values: Mapping[str, Any]) -> None:
        if kind == "train":
            from train.extras.report.machine import progress_text

            run.outputs.bar.set_postfix_str(progress_text(values), refresh=False)
        if run.accelerator.trackers:
            prefix = values.get("split", kind)
            line = {f"{prefix}/{k}": v for k, v in values.items() if isinstance(v, int | float)}
            for tracker in run.accelerator.trackers:
                is_wandb = tracker.name == "wandb"  # it drops steps before its last: the best one's, those made again
                tracker.log(line | {"step": step} if is_wandb else line, None if is_wandb else step)

    def finished(self, run: Run, parts: Parts, summary: dict[str, Any]) -> None:
        outputs, own = run.outputs, run.config.of(Options)
        if not outputs.is_main:
            return
        from train.extras.report.machine import hardware, versions
        from train.extras.report.model_card import model_card
        from train.extras.report.page import page
        from train.extras.report.sample import sample_of

        # What others have said of it, such as micro-batches that are formed by tokens, stays.
        machine = {"hardware": hardware(run.accelerator.device.type), "versions": versions()}
        summary |= {**what_was_run(run, parts), **summary, **machine}
        sample = sample_of(run, parts) if (run.launch.engine, run.launch.tp_size) == ("ddp", 1) else None
        summary["pushed_to"] = own.hub_model_id if own.push_to_hub else None
        task, report = type(parts.data.task), outputs.folder / "report.html"
        write_whole(outputs.final / "README.md", model_card(run.config, task, summary))
        kind, rows = task.title or task.name.replace("_", " "), read_metrics(outputs.metrics)
        write_whole(report, page(run.config, kind, summary, rows, sample))
        outputs.say(f"report: {report}")
        if sample:
            outputs.say(f"\nsample: the model continues the text before ⟪:\n{sample}\n")
        if own.push_to_hub:  # last, because what is here already needs no network
            outputs.say(f"uploaded: {_on_hub(own, outputs.final)}")


def what_was_run(run: Run, parts: Parts) -> dict[str, Any]:
    config, arithmetic, precision = run.config, parts.batches.arithmetic, run.accelerator.mixed_precision
    return {
        "task": parts.data.task.name,
        "dataset": parts.data.corpus.name,
        "label_names": list(parts.data.label_names),
        "model": config.architecture.name,
        "num_parameters": parts.sizes[1],
        "num_trained_parameters": parts.sizes[0],
        "max_length": config.data.max_length,
        "global_batch_size": arithmetic.global_batch_size,
        "micro_batch_size": arithmetic.micro_batch_size,
        "gradient_accumulation_steps": arithmetic.accumulation_steps,
        "world_size": run.launch.world_size,
        "launch": str(run.launch),
        "mixed_precision": precision if precision != "no" else SHORT[config.architecture.dtype],  # of the weights
        "max_grad_norm": config.optimization.max_grad_norm,
    }


def start_trackers(accelerator: Any, config: Config) -> None:
    """Opens a run with each tool of ``report_to`` and hands it the configuration, without what may be a secret.

    Raises UserError for a tool that cannot start (wandb without a login, for example).
    """
    wanted = config.of(Options).report_to
    run_name = config.of(Options).run_name or Path(config.output.output_dir).resolve().name
    options = {"trackio": {"name": run_name}, "wandb": {"name": run_name, "dir": config.output.output_dir}}
    try:
        project = os.environ.get("WANDB_PROJECT") if "wandb" in wanted else None  # an argument overrides it
        accelerator.init_trackers(project or PROJECT, config=tracked(config), init_kwargs=options)
        for tracker in (t for t in accelerator.trackers if t.name == "wandb" and accelerator.is_main_process):
            tracker.tracker.define_metric("*", step_metric="step")
    except Exception as error:  # each tool raises its own kinds of error
        hint = " WANDB_MODE=offline keeps the run on this machine." if "wandb" in wanted else ""
        raise UserError(f"report_to: {', '.join(wanted)} did not start: {error}.{hint}") from error


def tracked(config: Config) -> dict[str, int | float | str]:
    """The configuration as numbers and texts, without ``dataset_options``: a tracker may be public."""
    values = to_values(config)
    of_model = {f"model_config.{name}": value for name, value in (values.pop("model_config") or {}).items()}
    shown = {name: value for name, value in (values | of_model).items() if name != "dataset_options"}
    return {k: v if isinstance(v, int | float) else without_secrets(str(v)) for k, v in shown.items() if v is not None}


def _on_hub(own: Options, upload: Path | None = None, has_begun: bool = False) -> str | None:
    """Makes the repository, uploads to it, returns its address; without ``upload``, before training, what to note."""
    from huggingface_hub import HfApi, get_token

    api, name, is_private = HfApi(), str(own.hub_model_id), own.hub_private_repo
    try:
        if get_token() is None:
            raise PermissionError("a token for the Hub is missing")
        made = api.create_repo(name, private=is_private or None, exist_ok=True)  # None: as the organisation has it
        if is_private and not api.repo_info(made.repo_id).private:
            raise PermissionError("it is public, in spite of hub_private_repo: make it private, or name another")
        if upload is None:
            with suppress(TypeError):  # of versions that check reading alone
                api.auth_check(made.repo_id, write=True)  # one that exists is found without the right to write, too
            return None
        api.upload_folder(repo_id=made.repo_id, folder_path=upload)
        return str(made)
    except Exception as error:  # the library raises errors of several HTTP clients
        why = f"push_to_hub: {name}: {type(error).__name__}: {one_line(error, 200).rstrip('.')}. "
        why += "Check the name, the token ('hf auth login', HF_TOKEN) and the connection."
        if upload is not None:
            raise UserError(f"{why} The model is in {upload}; the same command uploads it.") from None
        status = getattr(getattr(error, "response", None), "status_code", 0)
        if not has_begun and (isinstance(error, PermissionError) or status in (400, 401, 403, 404)):
            raise UsageError(why) from None  # no run that has begun: it is worth more than its upload
        return f"{why} The run tries again when it is done."
