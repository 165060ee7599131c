"""Copies the template into a new folder, with the extras that your project needs and without the others.

    python scripts/fork.py ../my_project                                # everything
    python scripts/fork.py ../my_project --without parallelism report   # all extras but these
    python scripts/fork.py ../my_project --only adapters losses         # these alone; --only by itself: the core

Docs, recipes and tests of what is kept come along. Recipes lose the keys of extras that are gone; recipes and tests
that need such an extra, or show another sign of it (fork.yaml), stay behind.
"""

import argparse
import ast
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path

import yaml  # comes with accelerate

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from train import extras

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = re.compile(r'\s*"(tests/[^"*]+)",?')  # of tests, in pyproject.toml
LINK = re.compile(r"!?\[([^\]]+)\]\((?!\w+:|#)([^)#\s]+)[^)]*\)")
TABLES = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
SHARED = ("conftest.py", "support.py", "faults/preload.py")  # which do without
MENTIONED = re.compile(r"(?:from|import) (?:[\w.]+\.)?(\w+)|(\w+)\.py\b")  # modules that a file imports or starts


def asked_for(words: Sequence[str] | None) -> tuple[Path, list[str], list[str]]:
    """The target, the extras to keep, and lines about extras that need another; a wrong flag exits with status 2."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path, help="a folder that does not exist yet or is empty")
    here, choice = extras.classes(), parser.add_mutually_exclusive_group()
    choice.add_argument("--without", nargs="+", default=[], metavar="EXTRA", choices=list(here))
    choice.add_argument("--only", nargs="*", metavar="EXTRA", choices=list(here))
    asked = parser.parse_args(words)
    target = asked.target.expanduser().resolve()
    if (target.exists() and (not target.is_dir() or any(target.iterdir()))) or target.is_relative_to(ROOT):
        parser.error(f"{target} is not empty, or inside the template. Give a new folder, such as ../my_project.")
    keep = {name for name in here if (name not in asked.without if asked.only is None else name in asked.only)}
    lines = []
    for name in [name for name in here if name in keep]:
        if needed := set(here[name].needs) - keep:
            keep, fate = (keep - {name}, "left out") if asked.only is None else (keep | needed, "kept")
            lines.append(f"{name} needs {', '.join(sorted(needed))}: {fate}, too")
    return target, [name for name in here if name in keep], lines


class Fork:
    """A copy of the template in ``target`` with the extras ``keep``."""

    def __init__(self, target: Path, keep: Sequence[str]) -> None:
        self.target, self.keep = target, keep
        gone = [name for name in extras.ORDER if name not in keep]
        # and their folders within train/ and tests/
        self.gone = {name: extras.ORDER[name].removeprefix("train.").replace(".", "/") for name in gone}
        self.gone |= {name: f"{name}.yaml" for name in TABLES["launch_files"] if "parallelism" in gone}
        helpers = {path.stem: path.name for path in (ROOT / "train" / "extras").glob("[a-z]*.py")}
        while dead := {n: f"extras/{name}" for n, name in helpers.items() if n not in self.gone and not self._uses(n)}:
            self.gone |= dead
        known = extras.options()
        self.options = [field.name for name in gone if name in known for field in fields(known[name])]

    def make(self) -> list[str]:
        """Copies all; returns lines about recipes that stay behind."""
        about, files = TABLES["pages"], map(ROOT.joinpath, TABLES["files"])
        pages = [page for page in (ROOT / "docs").glob("*.md") if about.get(page.stem, "") not in (*self.gone, None)]
        pages += [page for page in (ROOT / "docs" / "extras").glob("*.md") if page.stem in self.keep]
        for path in (*files, *pages, *self._files("train"), *self._files("accelerate_configs")):
            self._copy(path)
        left_out = []
        for path in self._files("recipes"):
            text, is_recipe = path.read_text(encoding="utf-8"), path.suffix == ".yaml"
            needed = [name for name in self.gone if re.search(TABLES["recipes"].get(name, "(?!)"), text, re.MULTILINE)]
            if needed:
                left_out.append(f"{path.relative_to(ROOT)} needs {', '.join(sorted(needed))}: left out")
            else:
                self._copy(path, text if is_recipe else None)
        starts = (self.target / "recipes" / "quickstart.yaml").exists()
        for name in TABLES["scripts"] if starts else TABLES["scripts"][:-1]:
            self._copy(ROOT / "scripts" / name)
        for path, text in self._tests().items():
            self._copy(path, text)
        if find_spec("ruff"):  # where single tests are gone, lines are not as it would have them
            for words in (["check", "-q", "--fix", "--select", "I,F401,F811"], ["format", "-q"]):
                subprocess.run([sys.executable, "-m", "ruff", *words, "--no-cache", self.target / "tests"], check=False)
        if self.gone:  # what is left imports extras that are gone in functions, if they are there
            setting, project = "[tool.pyrefly.errors]\n", self.target / "pyproject.toml"
            text = project.read_text(encoding="utf-8").replace(setting, f'{setting}missing-import = "ignore"\n')
            text = FOLDERS.sub(lambda found: found[0] if (self.target / found[1]).exists() else "", text)
            project.write_text(text, encoding="utf-8")
        kept = [f"[{page.stem}](docs/{page.name})" for page in sorted((self.target / "docs").glob("*.md"))]
        first = "bash scripts/quickstart.sh      # trains a small model on text that is there already\n" * starts
        words = {"name": self.target.name, "extras": ", ".join(self.keep) or "none", "docs": ", ".join(kept)}
        (self.target / "README.md").write_text(TABLES["readme"].format(**words, quickstart=first), encoding="utf-8")
        for page in (self.target / "docs").rglob("*.md"):  # of a link to what is not copied its words stay
            text, here = page.read_text(encoding="utf-8"), page.parent
            text = LINK.sub(lambda link, here=here: link[0] if (here / link[2]).exists() else link[1], text)
            page.write_text(text, encoding="utf-8")
        return left_out

    def _uses(self, helper: str) -> bool:
        """Whether anything that is kept imports ``train.extras.<helper>``."""
        paths = [path for path in (*self._files("train"), *self._files("recipes")) if path.suffix == ".py"]
        return any(f"train.extras.{helper} import" in path.read_text(encoding="utf-8") for path in paths)

    def _files(self, folder: str) -> list[Path]:
        """Files of a folder of the template that belong to what is kept."""
        found = [p for p in sorted((ROOT / folder).rglob("*")) if p.is_file() and "__pycache__" not in p.parts]
        return [p for p in found if not any(p.is_relative_to(ROOT / folder / part) for part in self.gone.values())]

    def _copy(self, path: Path, text: str | None = None) -> None:
        """Copies a file to where it is in the template, or ``text`` for it, less keys of options that are gone."""
        to = self.target / path.relative_to(ROOT)
        to.parent.mkdir(parents=True, exist_ok=True)
        Path(shutil.copy2(path, to)).chmod(path.stat().st_mode | 0o200)  # the template may only be readable
        if text is not None:
            keys = "|".join(self.options) or "(?!)"
            to.write_text(re.sub(rf"^({keys}):.*\n([ \t]+.*\n)*", "", text, flags=re.MULTILINE), encoding="utf-8")

    def _tests(self) -> dict[Path, str]:
        """The files of tests that need nothing that is gone, with their text: some lose single tests."""
        signs = [TABLES["template"], *(TABLES["tests"][name] for name in self.gone if name in TABLES["tests"])]
        signs += [f"train[./]{part.removesuffix('.py').replace('/', '[./]')}\\b" for part in self.gone.values()]
        signs += [rf"--{name}\b|^{name}: |\b{name}=" for name in self.options]
        signs += [f"['\"]{name}['\"]" for name in self.options if name != "loss"]  # which is a metric, too
        sign, shared = re.compile("|".join(signs), re.M), {ROOT / "tests" / name for name in SHARED}
        whole = {path: path.read_text(encoding="utf-8") for path in self._files("tests") if path.suffix == ".py"}
        texts = {path: text if path in shared else without_tests(text, sign) for path, text in whole.items()}
        named = {path: {name for names in MENTIONED.findall(text) for name in names} for path, text in texts.items()}
        gone = {path for path in (ROOT / "tests").rglob("*.py") if path not in texts}
        more = {path for path, text in texts.items() if sign.search(text)}
        more |= {path for path, text in texts.items() if path.match("test_*.py") and "\ndef test_" not in text}
        while more := more - shared - gone:
            gone |= more
            names, folders = {p.stem for p in gone} - {"conftest"}, {p.parent for p in more if p.name == "conftest.py"}
            more = {path for path in texts if named[path] & names or path.parent in folders}
        return {path: text for path, text in texts.items() if path not in gone}


def without_tests(text: str, sign: re.Pattern[str]) -> str:
    """A file of tests without those in which ``sign`` is found, and without functions and imports for these alone."""
    lines, body = text.splitlines(keepends=True), ast.parse(text).body if sign.search(text) else []
    for node in reversed(body):
        if isinstance(node, ast.FunctionDef):
            begin = min(line.lineno for line in (node, *node.decorator_list)) - 1
            if sign.search("".join(lines[begin : node.end_lineno])):
                rest = lines[:begin] + lines[node.end_lineno :]
                if node.name.startswith("test_") or not re.search(rf"\b{node.name}\b", "".join(rest)):
                    lines = rest
    for node in reversed(body if len(lines) < len(text.splitlines()) else []):  # imports stand above all tests
        if isinstance(node, ast.Import | ast.ImportFrom) and getattr(node, "module", "") != "__future__":
            rest = "".join(lines[: node.lineno - 1] + lines[node.end_lineno :])
            node.names = [n for n in node.names if re.search(rf"\b{(n.asname or n.name).split('.')[0]}\b", rest)]
            lines[node.lineno - 1 : node.end_lineno] = [f"{ast.unparse(node)}\n"] if node.names else []
    return "".join(lines)


def main(words: Sequence[str] | None = None) -> int:
    """Forks as the command line says; returns the exit status."""
    target, keep, lines = asked_for(words)
    lines += Fork(target, keep).make()
    print("\n".join([*lines, f"{target}: the core and {', '.join(keep) or 'no extra'}; README.md says how to begin"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
