"""The README names every verb, and every command it names exists."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import cli.app

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_every_verb_is_in_the_readme_and_every_command_there_is_a_verb() -> None:
    named = set(re.findall(r"(?:^|`|\$ )zoo ([a-z]+)", README, re.MULTILINE))
    assert named == set(cli.app.VERBS)


def test_the_first_screen_has_the_two_commands_and_the_script_knows_them() -> None:
    first = README.split("```")[1]
    commands = re.findall(r"^\./run (\w+)", first, re.MULTILINE)
    assert commands == ["demo", "test"]
    script = (ROOT / "run").read_text()
    assert all(f"    {command})" in script for command in commands)
    usage = subprocess.run(["sh", str(ROOT / "run")], capture_output=True, text=True, check=False)
    assert usage.returncode == 2 and "./run test" in usage.stdout


def test_links_of_the_documentation_lead_somewhere() -> None:
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
