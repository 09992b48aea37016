"""What several test files share: runs of stapo.py, their records, mini-batches, models."""

import csv
import json
import os
import re
from pathlib import Path

import pytest
import torch
import transformers
from transformers import Qwen3Config, Qwen3ForCausalLM

import stapo
from rollout import Response, TokenStats
from support.batch import pad_batch
from support.checkpoints import checkpoints

ROOT = Path(__file__).parent.parent
TINY = ROOT / "tests" / "tiny"
# A run of two steps on the tiny model, saved at its end.
FLAGS = """@tests/tiny/args --data tests/tiny/test.jsonl --steps 2 --batch_size 4
    --mini_batch_size 2 --group_size 4 --max_new_tokens 40 --save_every 0"""
# The six benchmarks are no part of the repository: the tests that read them skip without this.
BENCHMARKS = Path(os.environ.get("STAPO_BENCHMARKS") or "no benchmarks")
TIMINGS = ("rollout_seconds", "update_seconds", "tokens_per_second", "peak_memory_gb")

STOPS = [0, *range(5, 15)]  # many, so that random models end their responses at many lengths
SHAPE = {
    "vocab_size": 104,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
    "eos_token_id": 0,
    "pad_token_id": 1,
    "bos_token_id": None,
}
WINDOW = {"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 1}
FAMILIES = {
    "qwen3": transformers.Qwen3Config(**SHAPE, head_dim=16),
    "mistral, windows": transformers.MistralConfig(**SHAPE, sliding_window=12),
    "qwen2, a window": transformers.Qwen2Config(**SHAPE, **WINDOW),
    # positions that are counted from the attention mask
    "opt": transformers.OPTConfig(**SHAPE, ffn_dim=48, word_embed_proj_dim=32, init_std=0.3),
    # a mask of its own; an attention of its own
    "doge": transformers.DogeConfig(**SHAPE),
    "falcon": transformers.FalconConfig(**SHAPE, new_decoder_architecture=True),
    "falcon, alibi": transformers.FalconConfig(**SHAPE, alibi=True),
    # a recurrent state, with keys and values beside it or without
    "lfm2": transformers.Lfm2Config(**SHAPE, layer_types=["conv", "full_attention"]),
    "mamba": transformers.MambaConfig(**{**SHAPE, "intermediate_size": 64}, state_size=8),
    # logits with a bias
    "phi": transformers.PhiConfig(**SHAPE),
}


def make_family(name: str) -> transformers.PreTrainedModel:
    """A random model of FAMILIES with many stop ids."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(FAMILIES[name]).eval()
    model.generation_config.eos_token_id = STOPS
    return model


def read_rows(file: Path) -> list[dict]:
    """The lines of a .jsonl file."""
    return [json.loads(line) for line in file.read_text().splitlines()]


def write_rows(file: Path, *rows: dict) -> str:
    """A .jsonl file of these rows: its name."""
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def lines(output: Path) -> list[dict]:
    """The metrics of a run without what no two runs share: times and memory."""
    rows = read_rows(output / "metrics.jsonl")
    return [{k: v for k, v in row.items() if k not in TIMINGS} for row in rows]


def weights(output: Path) -> bytes:
    """Those of a run's last checkpoint: AdamW's moments decide them, and hardly the metrics."""
    return (checkpoints(output)[-1] / "model.safetensors").read_bytes()


def run(output: Path, extra: str = "") -> list[dict]:
    """stapo.py with FLAGS and more: the lines of its metrics."""
    os.chdir(ROOT)
    stapo.main(f"{FLAGS} --output {output} {extra}".split())
    return read_rows(output / "metrics.jsonl")


def refused(capsys, argv: str, main=stapo.main) -> str:
    """What a program says where it ends with an exit status that is not 0."""
    os.chdir(ROOT)
    with pytest.raises(SystemExit) as stop:
        main(argv.split())
    assert stop.value.code not in (0, None)
    return stop.value.code if isinstance(stop.value.code, str) else capsys.readouterr().err


def padded(rows, mask):
    """Ragged (T_i,) rows -> (B, L): the rows where mask is True, 0 elsewhere."""
    flat = torch.cat(list(rows))
    return torch.zeros(mask.shape, dtype=flat.dtype).masked_scatter(mask, flat)


def pad(responses: list[Response]):
    """ids (B, L), mask (B, L) and lengths (B,) of responses."""
    return pad_batch([r.prompt_ids for r in responses], [r.ids for r in responses])


def to_batch(responses, advantages, old, seeds=None) -> stapo.Batch:
    """A mini-batch of responses: A_i and TokenStats of (T_i,) tensors under pi_old for each."""
    ids, mask, lengths = pad(responses)
    return stapo.Batch(
        ids=ids,
        mask=mask,
        lengths=lengths,
        old=TokenStats(*(padded(rows, mask) for rows in zip(*old))),
        ref_logp=None,
        problem_index=torch.arange(len(responses)),
        rewards=torch.tensor(advantages).sign().double(),
        advantages=torch.tensor(advantages),
        truncated=torch.zeros(len(responses), dtype=torch.bool),
        seeds=torch.tensor(seeds or [0] * len(responses)),
    )


def responses_of(batch: stapo.Batch) -> list[Response]:
    """The rows of a batch without their padding; the texts are not known."""
    responses = []
    for ids, mask, length in zip(batch.ids, batch.mask, batch.lengths):
        prompt, row = int(mask.nonzero()[0]), ids[:length].tolist()
        responses.append(Response(row[:prompt], row[prompt:], False, ""))
    return responses


def example(name: str) -> str:
    """The code block behind the comment <!-- example: name --> on a page."""
    pages = "".join(page.read_text() for page in ROOT.glob("[de]*/*.md"))  # docs/, experiments/
    return re.search(rf"<!-- example: {name} -->\n```\w+\n(.*?)```", pages, re.DOTALL)[1]


def make_random_model(vocab_size: int = 104, tied: bool = True, spread: float = 0.02):
    torch.manual_seed(0)
    own = {"vocab_size": vocab_size, "tie_word_embeddings": tied, "initializer_range": spread}
    return Qwen3ForCausalLM(Qwen3Config(**SHAPE | own, head_dim=16)).eval()


def read_csv(path: Path) -> list[dict]:
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def check_png(path: Path, colour: str) -> None:
    """Wide enough, and the colour that a drawn line or bar must have is in it."""
    plt = pytest.importorskip("matplotlib.pyplot")
    image = (plt.imread(path)[..., :3] * 255).round().astype(int)
    assert image.shape[0] > 300 and image.shape[1] > 600
    wanted = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
    assert (abs(image - wanted).max(axis=-1) <= 2).sum() > 100, f"{path.name}: no {colour}"


def fused_norms(model) -> int:
    return sum(type(module) is torch.nn.RMSNorm for module in model.modules())


def in_order(sampled) -> list[Response]:
    """The responses that `sample` yields, in the order of their prompts."""
    return [response for _, response in sorted(sampled)]


def random_prompts(count: int, longest: int) -> list[list[int]]:
    g = torch.Generator().manual_seed(3)
    lengths = torch.randint(1, longest, (count,), generator=g).tolist()
    return [torch.randint(15, 100, (length,), generator=g).tolist() for length in lengths]
