"""The upload of final/, against a stand-in: the machines of the tests cannot reach the Hub."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import RepoUrl
from huggingface_hub.utils import HFValidationError, validate_repo_id
from support import write_recipe

from train.config import parse
from train.main import main
from train.records import UsageError


class Hub:
    """In place of ``huggingface_hub.HfApi``."""

    is_reachable, is_private, may_write, status = False, True, True, 200
    asked: list[tuple[Any, ...]]

    def create_repo(self, name: str, private: bool | None, exist_ok: bool) -> Any:
        if not self.is_reachable:
            raise ConnectionError("no route to the Hub")
        if self.status != 200:
            raise RefusalError(self.status)
        self.asked.append((name, private, exist_ok))
        return RepoUrl(f"https://huggingface.co/{name if '/' in name else f'me/{name}'}")

    def repo_info(self, repo_id: str) -> Any:
        return SimpleNamespace(private=self.is_private)

    def auth_check(self, repo_id: str, *, write: bool = False) -> None:
        if write and not self.may_write:
            raise RefusalError(403)

    def upload_folder(self, repo_id: str, folder_path: Path) -> None:
        self.asked.append((repo_id, sorted(path.name for path in Path(folder_path).iterdir())))


class RefusalError(Exception):
    """As ``huggingface_hub.errors.HfHubHTTPError``, whose bases differ between versions."""

    def __init__(self, status: int) -> None:
        super().__init__(f"{status} Client Error:\nInvalid username or password.")
        self.response = SimpleNamespace(status_code=status)


@pytest.fixture(autouse=True)
def _logged_in_to_the_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_of_the_tests")
    monkeypatch.setattr("huggingface_hub.HfApi", Hub)
    monkeypatch.setattr(Hub, "asked", [], raising=False)


def test_an_upload_that_failed_is_made_up_by_the_same_command_and_not_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--config", str(write_recipe(tmp_path)), "--output_dir", str(tmp_path / "run"), "--num_epochs", "1"]
    words += ["--push_to_hub", "--hub_model_id", "someone/small", "--hub_private_repo"]
    assert main(words) == 1
    said = capsys.readouterr()
    why = "push_to_hub: someone/small: ConnectionError: no route to the Hub. "
    why += "Check the name, the token ('hf auth login', HF_TOKEN) and the connection. "
    assert f"{why}The run tries again when it is done." in said.out  # said before training, which may take days
    assert f"{why}The model is in" in said.err
    assert (tmp_path / "run" / "final" / "README.md").is_file()

    monkeypatch.setattr(Hub, "is_reachable", True)
    assert main(words) == 0
    *created, (name, files) = Hub.asked
    assert created == [("someone/small", True, True)] * 2  # before training, and to upload
    assert name == "someone/small"
    assert {"README.md", "config.json", "model.safetensors", "tokenizer.json"} <= set(files)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["pushed_to"] == "someone/small"

    assert main(words) == 0
    assert "nothing to do" in capsys.readouterr().out
    assert len(Hub.asked) == 3  # the Hub is not asked again


def test_a_name_without_a_user_is_uploaded_where_the_hub_has_made_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Hub, "is_reachable", True)
    words = ["--config", str(write_recipe(tmp_path)), "--output_dir", str(tmp_path / "run"), "--num_epochs", "1"]
    assert main([*words, "--push_to_hub", "--hub_model_id", "small"]) == 0
    assert "uploaded: https://huggingface.co/me/small\n" in capsys.readouterr().out
    *created, (name, _) = Hub.asked
    assert created == [("small", None, True)] * 2 and name == "me/small"  # private or not: as the organisation has it


def test_nothing_is_uploaded_to_a_public_repository_that_was_to_be_private(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The Hub ignores ``private`` for a repository that exists."""
    monkeypatch.setattr(Hub, "is_reachable", True)
    monkeypatch.setattr(Hub, "is_private", False)
    words = ["--config", str(write_recipe(tmp_path)), "--output_dir", str(tmp_path / "run"), "--num_epochs", "1"]
    words += ["--push_to_hub", "--hub_model_id", "me/small"]
    assert main([*words, "--hub_private_repo"]) == 2
    assert "it is public, in spite of hub_private_repo: make it private, or name another" in capsys.readouterr().err
    assert len(Hub.asked) == 1 and not any((tmp_path / "run" / "checkpoints").iterdir())  # nothing was trained or sent
    assert main(words) == 0
    assert len(Hub.asked) == 4


@pytest.mark.slow
def test_a_model_whose_upload_failed_is_not_taken_for_an_edited_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--config", str(write_recipe(tmp_path)), "--output_dir", str(tmp_path / "run")]
    push = ["--num_epochs", "2", "--push_to_hub", "--hub_model_id", "me/small"]
    assert main([*words, "--num_epochs", "1"]) == 0
    assert [main([*words, *push]), main([*words, *push])] == [1, 1]
    monkeypatch.setattr(Hub, "is_reachable", True)
    assert main([*words, *push]) == 0
    assert not (tmp_path / "run" / "previous-1").exists() and len(Hub.asked) == 3


@pytest.mark.parametrize(("status", "code"), [(401, 2), (403, 2), (404, 2), (429, 1), (503, 1)])
def test_what_the_hub_refuses_is_told_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], status: int, code: int
) -> None:
    """A wrong token or name; a Hub that is busy or down may be back when the run is done."""
    monkeypatch.setattr(Hub, "is_reachable", True)
    monkeypatch.setattr(Hub, "status", status)
    words = ["--config", str(write_recipe(tmp_path)), "--output_dir", str(tmp_path / "run"), "--num_epochs", "1"]
    assert main([*words, "--push_to_hub", "--hub_model_id", "me/small"]) == code
    said = f"error: push_to_hub: me/small: RefusalError: {status} Client Error: Invalid username or password. "
    assert f"{said}Check the name, the token ('hf auth login', HF_TOKEN)" in capsys.readouterr().err
    assert (tmp_path / "run" / "final").exists() == (code == 1)


def test_a_token_that_may_only_read_is_told_before_training_but_ends_no_run_that_has_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """``create_repo`` finds a repository of somebody else, and says nothing."""
    monkeypatch.setattr(Hub, "is_reachable", True)
    monkeypatch.setattr(Hub, "may_write", False)
    words = ["--config", str(write_recipe(tmp_path)), "--output_dir", str(tmp_path / "run"), "--num_epochs", "1"]
    words += ["--push_to_hub", "--hub_model_id", "me/small"]
    assert main(words) == 2
    assert "error: push_to_hub: me/small: RefusalError: 403 Client Error" in capsys.readouterr().err
    monkeypatch.setattr(Hub, "may_write", True)
    assert main(words) == 0
    monkeypatch.setattr(Hub, "may_write", False)
    assert main(words) == 0 and "nothing to do" in capsys.readouterr().out
    assert main([*words, "--num_epochs", "2"]) == 0  # resumed; the stand-in takes the upload
    assert "403 Client Error: Invalid username or password. Check the name" in capsys.readouterr().out


def test_without_a_token_nothing_is_trained_that_could_not_be_uploaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "token"))
    words = ["--config", str(write_recipe(tmp_path)), "--output_dir", str(tmp_path / "run"), "--num_epochs", "1"]
    assert main([*words, "--push_to_hub", "--hub_model_id", "me/small"]) == 2
    said = (
        "error: push_to_hub: me/small: PermissionError: a token for the Hub is missing. Check the name, the token ('hf "
    )
    assert said in capsys.readouterr().err
    assert not any((tmp_path / "run" / "checkpoints").iterdir())
    parse([*words, "--push_to_hub", "--hub_model_id", "me/small"])  # which a plan does, too: it uploads nothing
    (tmp_path / "token").write_text("hf_kept_by_login")
    monkeypatch.setattr(Hub, "is_reachable", True)
    assert main([*words, "--push_to_hub", "--hub_model_id", "me/small"]) == 0
    assert Hub.asked


@pytest.mark.parametrize(
    "name",
    [
        *("me/x", "x", "me/x.y-1_z", "a" * 96),
        *("me/x..y", "me/x--y", "me/x.git", "me/x-", "me/x.", "me/.x", "-me/x", "mé/x", "a/b/c"),
        *("a" * 97, "me/", "/x", "../x", "me/x y"),
    ],
)
def test_a_name_that_the_hub_would_refuse_is_refused_before_training(name: str) -> None:
    words = ["--config", "recipes/quickstart.yaml", "--push_to_hub", f"--hub_model_id={name}"]
    try:
        validate_repo_id(name)
    except HFValidationError:
        with pytest.raises(UsageError, match=r"hub_model_id: .*: write user/name, as the Hub names repositories"):
            parse(words)
    else:
        assert parse(words).get("hub_model_id") == name
