"""RMSNorm in one kernel: transformers' own numbers."""

import copy

import pytest
import torch
import transformers
from helpers import FAMILIES, SHAPE, fused_norms

import rollout
from support.norms import fuse_norms

TRIED = {  # with the number of norms that are replaced
    "qwen3": (FAMILIES["qwen3"], 9),
    "gemma 2": (transformers.Gemma2Config(**SHAPE, head_dim=8), 0),  # 1 + weight
    "mamba 2": (  # a second input in two of five
        transformers.Mamba2Config(
            **SHAPE, num_heads=4, head_dim=16, n_groups=1, state_size=8, chunk_size=8
        ),
        3,
    ),
}


def scores_and_gradients(model) -> list[torch.Tensor]:
    """Of rows padded on the right; the gradient of every weight."""
    ids = torch.randint(0, 104, (3, 19), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids).bool()
    mask[0, 12:] = mask[2, 7:] = False
    stats = rollout.Policy(model)(ids, mask)
    return [*stats, *torch.autograd.grad(stats.logp.sum(), list(model.parameters()))]


@pytest.mark.parametrize(("config", "count"), TRIED.values(), ids=TRIED)
def test_not_a_bit_changes_in_float32(config, count):
    """Log-probabilities, entropies and gradients. The weights of the norms are not all 1."""
    torch.manual_seed(0)
    plain = transformers.AutoModelForCausalLM.from_config(config).eval()
    for name, parameter in plain.named_parameters():
        if "norm" in name:
            parameter.data += 0.3 * torch.randn_like(parameter)
    fused = fuse_norms(copy.deepcopy(plain))
    assert fused_norms(plain) == 0 and fused_norms(fused) == count
    assert plain.state_dict().keys() == fused.state_dict().keys()
    pair = map(scores_and_gradients, (fused, plain))
    assert all(a.equal(b) for a, b in zip(*pair, strict=True))
