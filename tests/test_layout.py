"""The house: four files at the top, and support/ that knows none of them."""

import ast

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
