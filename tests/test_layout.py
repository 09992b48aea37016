"""The house: four files at the top, and support/ that knows none of them."""

import ast
import runpy
import sys

import pytest
from helpers import ROOT

FOUR = {"stapo", "rollout", "reward", "eval"}


def test_the_four_are_all_the_code_at_the_top_and_support_imports_none():
    assert {file.stem for file in ROOT.glob("*.py")} == FOUR
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


@pytest.mark.parametrize("flags", [[], ["--help"]])
def test_a_script_without_its_library_says_what_to_install(monkeypatch, flags):
    monkeypatch.setitem(sys.modules, "trl", None)
    monkeypatch.setattr(sys, "argv", ["trl_stapo.py", *flags])
    with pytest.raises(SystemExit, match=r"^trl_stapo.py: needs TRL: pip install 'trl==1.16.\*'$"):
        runpy.run_path(str(ROOT / "scripts" / "trl_stapo.py"), run_name="__main__")
