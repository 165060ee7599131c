"""Nothing is executed that was not asked for, nothing is written outside, and no secret is kept.

A canary is a file that code hidden in data would make; it must never be there.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from faults.injections import without_network
from faults.processes import Ended, run
from support import write_recipe

from train import checkpoint
from train.records import EXIT_DONE, EXIT_ERROR, EXIT_USAGE

SECRETS = {
    "HF_TOKEN": "hf_canaryCanaryCanaryCanaryCanary01",
    "WANDB_API_KEY": "canary02canary02canary02canary02canary02",
    "AWS_SECRET_ACCESS_KEY": "canary03canary03canary03",
    "HTTPS_PROXY": "http://canary04:canary05@127.0.0.1:9",
}


class Bomb:
    """Makes the canary when it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self._canary = canary

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._canary),)


@pytest.fixture
def canary(tmp_path: Path) -> Path:
    return tmp_path / "canary"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with two checkpoints, beside its recipe."""
    folder = tmp_path_factory.mktemp("finished")
    [end] = run(arguments(write_recipe(folder), folder / "run"), folder / "logs", environment=SECRETS)
    assert end.status == EXIT_DONE, end.said
    return folder / "run"


def arguments(recipe: Path, output: Path, *more: Any) -> tuple[Any, ...]:
    return ("--config", recipe, "--output_dir", output, "--save_every_steps", 3, *more)


def refused(end: Ended, status: int, *words: str) -> None:
    assert end.status == status, end.said
    assert "Traceback" not in end.said, end.said
    assert all(word in end.said for word in words), end.said


def test_the_bomb_of_these_tests_works(canary: Path) -> None:
    pickle.loads(pickle.dumps(Bomb(canary)))
    assert canary.exists()


def as_weights(path: Path, bomb: Bomb) -> None:
    path.write_bytes(pickle.dumps(bomb))


def as_torch_file(path: Path, bomb: Bomb) -> None:
    torch.save({"weight": bomb}, path)


def signed(folder: Path, name: str) -> None:
    """Enters a file into the manifest, as someone would who made the checkpoint on purpose."""
    manifest = json.loads((folder / checkpoint.MANIFEST).read_text())
    path = folder / name
    manifest["files"][name] = {"bytes": path.stat().st_size, "digest": checkpoint.digest(path)}
    (folder / checkpoint.MANIFEST).write_text(json.dumps(manifest))


@pytest.mark.parametrize("write", [pytest.param(as_weights, marks=pytest.mark.slow), as_torch_file])
@pytest.mark.parametrize("name", ["model-00000.safetensors", "optimizer-00000.safetensors", "extra.bin", "state.json"])
@pytest.mark.parametrize("with_digest", [pytest.param(False, marks=pytest.mark.slow), True])
def test_pickle_in_a_checkpoint_is_never_opened(
    finished: Path, tmp_path: Path, canary: Path, write: Callable[[Path, Bomb], None], name: str, with_digest: bool
) -> None:
    output = shutil.copytree(finished, tmp_path / "run")
    shutil.rmtree(output / "checkpoints" / "step-00000003")
    newest = output / "checkpoints" / "step-00000006"
    write(newest / name, Bomb(canary))
    if with_digest:
        signed(newest, name)
    more = arguments(finished.parent / "recipe.yaml", output, "--max_steps", 8)
    [end] = run(more, tmp_path / "logs")
    assert not canary.exists()
    if name == "extra.bin":
        assert end.status == EXIT_DONE, end.said  # nobody reads it
    else:
        refused(end, EXIT_ERROR)


def test_links_in_a_checkpoint_are_not_followed(finished: Path, tmp_path: Path) -> None:
    output = shutil.copytree(finished, tmp_path / "run")
    target = shutil.copytree(finished / "checkpoints" / "step-00000006", tmp_path / "elsewhere" / "step-00000009")
    (output / "checkpoints" / "step-00000009").symlink_to(target)
    (output / "checkpoints" / ".partial-step-00000008").symlink_to(target)
    more = arguments(finished.parent / "recipe.yaml", output, "--max_steps", 12)
    [end] = run(more, tmp_path / "logs")
    assert end.status == EXIT_DONE, end.said
    assert "step-00000009: it is a link" in end.said
    assert len(list(target.iterdir())) == 5
    assert checkpoint.verify(output / "checkpoints" / "step-00000009") is None


@pytest.mark.parametrize("tag", ["!!python/object/apply:os.mkdir [{}]", "!!python/name:os.mkdir {}", "!canary {}"])
def test_tag_in_a_recipe_is_refused(tmp_path: Path, canary: Path, tag: str) -> None:
    recipe = write_recipe(tmp_path)
    recipe.write_text(recipe.read_text() + f"run_name: {tag.format(canary)}\n")
    [end] = run(arguments(recipe, tmp_path / "run"), tmp_path / "logs")
    refused(end, EXIT_USAGE, "recipe.yaml")
    assert not canary.exists() and not (tmp_path / "run").exists()


def model_folder(folder: Path, canary: Path) -> Path:
    """A model that brings code of its own, as on the Hub."""
    folder.mkdir()
    auto = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model", "AutoTokenizer": "code.Tokenizer"}
    (folder / "config.json").write_text(json.dumps({"model_type": "canary", "auto_map": auto}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"auto_map": {"AutoTokenizer": ["code.T", None]}}))
    (folder / "code.py").write_text(f"import os\nos.mkdir({str(canary)!r})\n")
    return folder


@pytest.mark.parametrize("what", ["model", "tokenizer"])
def test_code_that_a_model_brings_is_not_run(tmp_path: Path, canary: Path, what: str) -> None:
    folder = model_folder(tmp_path / "model", canary)
    recipe = write_recipe(tmp_path)
    if what == "model":
        values = {**yaml.safe_load(recipe.read_text()), "model": str(folder), "model_config": None}
        recipe.write_text(yaml.safe_dump(values))
    else:
        recipe.write_text(recipe.read_text().replace("tokenizer: bytes", f"tokenizer: {folder}"))
    [end] = run(arguments(recipe, tmp_path / "run"), tmp_path / "logs")
    refused(end, EXIT_ERROR, *(["trust_remote_code"] if what == "model" else []))
    assert not canary.exists()


def test_pickled_weights_of_a_model_are_not_executed(finished: Path, tmp_path: Path, canary: Path) -> None:
    folder = shutil.copytree(finished / "final", tmp_path / "model")
    (folder / "model.safetensors").unlink()
    torch.save({"lm_head.weight": Bomb(canary)}, folder / "pytorch_model.bin")
    recipe = write_recipe(tmp_path)
    recipe.write_text(
        yaml.safe_dump({**yaml.safe_load(recipe.read_text()), "model": str(folder), "model_config": None})
    )
    [end] = run(arguments(recipe, tmp_path / "run"), tmp_path / "logs")
    refused(end, EXIT_ERROR, str(folder))
    assert not canary.exists()


def listing(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if "cache" not in path.parts}


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--run_name", "../../climbs"),
        ("--run_name", "/climbs"),
        ("--run_name", "a\\b"),
        ("--run_name", ".."),
        ("--hub_model_id", "../climbs"),
    ],
)
def test_names_that_climb_out_are_refused(tmp_path: Path, flag: str, value: str) -> None:
    its = arguments(write_recipe(tmp_path), tmp_path / "inner" / "run", flag, value)
    before = listing(tmp_path)
    [end] = run(its, tmp_path / "logs")
    refused(end, EXIT_USAGE, flag.removeprefix("--"))
    assert {name for name in listing(tmp_path) - before if not name.startswith("logs")} == set()


def bomb_of_zeros() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("../../canary.jsonl", b"0" * 2**24)
    return buffer.getvalue()


@pytest.mark.parametrize("name", ["data.zip", "data.jsonl.gz", "data.tar", "data.jsonl", "data.parquet"])
def test_archives_are_not_unpacked(tmp_path: Path, canary: Path, name: str) -> None:
    data = tmp_path / "inner" / name
    data.parent.mkdir()
    data.write_bytes(bomb_of_zeros())
    its = arguments(write_recipe(tmp_path), tmp_path / "run", "--dataset", data)
    [end] = run(its, tmp_path / "logs")
    refused(end, EXIT_ERROR, name)
    assert not list(tmp_path.rglob("canary*"))
    assert sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()) < 2**22


def secrets_in(folder: Path) -> list[tuple[str, str]]:
    found = []
    for path in folder.rglob("*"):
        if path.is_file():
            content = path.read_bytes()
            found += [(path.name, s) for s in (*SECRETS.values(), "canary0") if s.encode() in content]
    return found


def test_secrets_of_the_environment_are_in_no_file(finished: Path, tmp_path: Path) -> None:
    assert (finished / "report.html").exists() and (finished / "summary.json").exists()
    assert secrets_in(finished) == []
    fails = arguments(write_recipe(tmp_path), tmp_path / "run", "--learning_rate", "1e30", "--max_grad_norm", "None")
    run(fails, tmp_path / "logs", environment=SECRETS)
    assert secrets_in(tmp_path / "run") == [] and secrets_in(tmp_path / "logs") == []


@pytest.mark.parametrize(
    "url", ["https://user:canary06@example.org/data.jsonl", "https://example.org/data.jsonl?token=canary07"]
)
@pytest.mark.parametrize("flag", ["--dataset", "--model", "--tokenizer", "--validation_dataset"])
def test_secret_in_a_url_is_in_no_file(tmp_path: Path, flag: str, url: str) -> None:
    recipe = write_recipe(tmp_path)
    [end] = run(arguments(recipe, tmp_path / "run", flag, url), tmp_path / "logs", fault=without_network())
    assert end.status in (EXIT_ERROR, EXIT_USAGE), end.said
    assert "Traceback" not in end.said
    assert secrets_in(tmp_path / "run") == []
    assert "canary0" not in end.said


def test_offline_job_needs_no_socket(tmp_path: Path) -> None:
    """Not even to be told that there is no network: HF_HUB_OFFLINE is not set here."""
    its = arguments(write_recipe(tmp_path), tmp_path / "run")
    [end] = run(its, tmp_path / "logs", fault=without_network(), environment={"HF_HUB_OFFLINE": "0"})
    assert end.status == EXIT_DONE, end.said
    assert "a socket was asked for" not in end.said
