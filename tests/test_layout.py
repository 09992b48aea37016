"""The house: four files at the top, and support/ that knows none of them."""

import ast
import os
import runpy
import subprocess
import sys

import pytest
from helpers import ROOT

FOUR = {"stapo", "rollout", "reward", "eval"}


def test_support_imports_none_of_the_four():
    modules = list((ROOT / "support").glob("*.py"))
    for file in modules:
        imported = set()
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.Import):
                imported |= {name.name.split(".")[0] for name in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported.add(node.module.split(".")[0])
        assert not imported & FOUR, file
    assert len(modules) > 5


def test_another_support_on_the_path_does_not_replace_ours(tmp_path):
    (tmp_path / "support.py").write_text("raise ValueError('the wrong one')")
    command = [sys.executable, "-c", "import support.errors"]
    # -c puts the working directory first, as a script its own folder.
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    subprocess.run(command, cwd=ROOT, env=environment, check=True)


def test_the_four_are_all_the_code_at_the_top():
    assert {file.stem for file in ROOT.glob("*.py")} == FOUR


@pytest.mark.parametrize("flags", [[], ["--help"]])
def test_a_script_without_its_library_says_what_to_install(monkeypatch, flags):
    monkeypatch.setitem(sys.modules, "trl", None)
    monkeypatch.setattr(sys, "argv", ["trl_stapo.py", *flags])
    with pytest.raises(SystemExit, match=r"^trl_stapo.py: needs TRL: pip install 'trl==1.16.\*'$"):
        runpy.run_path(str(ROOT / "scripts" / "trl_stapo.py"), run_name="__main__")
