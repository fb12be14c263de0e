"""The documentation says what is there: links, commands, flags and folders are looked up."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from shark_llm.server.app import ENDPOINTS
from shark_llm.server.protocol import GenerationRequest

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
COMMANDS = ("shark-compile", "shark-serve")


def page_id(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as Markdown renderers make them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def console_commands(page: Path) -> list[str]:
    """The commands of a page's console blocks: after `$`, continued lines joined, no comments."""
    blocks = re.findall(r"```console\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [line[2:].split(" # ")[0].strip() for line in lines if line.startswith("$ ")]


def test_generated_pages_are_fresh() -> None:
    result = subprocess.run(
        [sys.executable, ROOT / "scripts" / "docs.py", "--check"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"https?://", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert not broken


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_scripts_named_are_there(page: Path) -> None:
    named = set(re.findall(r"\bscripts/[\w.]+\b", page.read_text(encoding="utf-8")))
    missing = [name for name in sorted(named) if not (ROOT / name).is_file()]
    assert not missing


def test_readme_names_the_two_commands() -> None:
    commands = console_commands(ROOT / "README.md")
    for script in ("scripts/demo", "scripts/test"):
        assert script in commands
        assert os.access(ROOT / script, os.X_OK)


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_flags_named_exist(page: Path) -> None:
    """Every flag of our two commands in a console block is one that the commands take."""
    reference = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    known = set(re.findall(r"`(--[\w-]+)`", reference)) | {"--help"}
    unknown = [
        f"{command}: {flag}"
        for command in console_commands(page)
        if command.split()[0] in COMMANDS
        for flag in re.findall(r"(?<=\s)--[\w-]+", command)
        if flag not in known
    ]
    assert not unknown


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_subcommands_named_exist(page: Path) -> None:
    sections = anchors(ROOT / "docs" / "cli.md")
    named = {
        f"shark-compile-{words[1]}"
        for words in (command.split() for command in console_commands(page))
        if words[0] == "shark-compile" and len(words) > 1 and re.fullmatch(r"[a-z]+", words[1])
    }
    assert named <= sections


def test_architecture_lists_the_folders() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    listing = page.split("src/shark_llm/\n", 1)[1].split("```", 1)[0]
    listed = set(re.findall(r"^  ([\w.]+/?)", listing, re.MULTILINE))
    package = ROOT / "src" / "shark_llm"
    there = {path.name for path in package.glob("*.py")} - {"__init__.py"}
    there |= {f"{path.parent.name}/" for path in package.glob("*/__init__.py")}
    assert listed == there


def test_serving_page_names_every_endpoint() -> None:
    page = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
    missing = [e.path for e in ENDPOINTS if f"`{e.method} {e.path}`" not in page]
    assert not missing


def test_serving_page_names_every_parameter() -> None:
    page = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
    missing = [name for name in GenerationRequest.model_fields if f"`{name}`" not in page]
    assert not missing
