"""What costs.py estimates, and what the pages say of it."""

import re
import subprocess
import sys

import costs
import pytest
import torch
from helpers import ROOT
from transformers import Qwen3Config, Qwen3ForCausalLM


@pytest.mark.parametrize("name", costs.QWEN3)
def test_parameters_are_those_of_the_published_shape(name):
    shape = costs.QWEN3[name]
    with torch.device("meta"):
        config = Qwen3Config(
            hidden_size=shape.hidden,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            intermediate_size=shape.mlp,
            tie_word_embeddings=shape.tied,
            num_key_value_heads=8,
            head_dim=128,
            vocab_size=151936,
        )
        model = Qwen3ForCausalLM(config)
    count = sum(p.numel() for p in model.parameters())
    layer = sum(p.numel() for p in model.model.layers[0].parameters())
    assert costs.parameters(shape) == (count, layer)


def page(name: str) -> str:
    return (ROOT / name).read_text()


def test_pages_and_recipes_have_what_the_program_estimates():
    program = [sys.executable, "experiments/costs.py"]
    table = subprocess.check_output(program, cwd=ROOT, text=True)
    assert table.strip() in page("docs/training.md")
    for run, places in costs.RUNS.items():
        rows = [costs.cost(run, *place) for place in places]
        if run.startswith("@"):
            text = page(run[1:])
            lines = [
                f"{row['GPUs']}: {row['GB of a GPU']} GB; {row['hours']} hours" for row in rows
            ]
            found = re.findall(r"^#   (\d+ x \w.*hours)$", text, re.MULTILINE)
            assert found == lines and f"disk: {rows[0]['GB of disk']} GB" in text
