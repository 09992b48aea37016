"""RMSNorm in one kernel: transformers' own numbers."""

import copy

import pytest
import torch
import transformers
from helpers import FAMILIES, SHAPE, STOPS, fused_norms, random_prompts

import rollout
from support.norms import fuse_norms

TRIED = {  # with the number of norms that are replaced
    "qwen3": (FAMILIES["qwen3"], 9),
    "llama": (FAMILIES["llama"], 5),
    "mistral, windows": (FAMILIES["mistral, windows"], 5),
    "doge": (FAMILIES["doge"], 9),
    "olmo2": (transformers.Olmo2Config(**SHAPE), 9),  # behind attention, over all heads at once
    "gemma 2": (transformers.Gemma2Config(**SHAPE, head_dim=8), 0),  # 1 + weight
    "mamba 2": (  # a second input in two of five
        transformers.Mamba2Config(
            **SHAPE, num_heads=4, head_dim=16, n_groups=1, state_size=8, chunk_size=8
        ),
        3,
    ),
}


def scores_and_gradients(model, checkpointing: bool) -> list[torch.Tensor]:
    """Of rows padded on the right; the gradient of every weight."""
    ids = torch.randint(0, 104, (3, 19), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids).bool()
    mask[0, 12:] = mask[2, 7:] = False
    stats = rollout.Policy(model, checkpointing).train()(ids, mask)
    return [*stats, *torch.autograd.grad(stats.logp.sum(), list(model.parameters()))]


@pytest.mark.parametrize(("config", "count"), TRIED.values(), ids=TRIED)
def test_not_a_bit_changes_in_float32(config, count, tokenizer):
    """Sampled ids, log-probabilities, entropies and gradients, also with checkpointing.

    The weights of the norms are not all 1.
    """
    torch.manual_seed(0)
    plain = transformers.AutoModelForCausalLM.from_config(config).eval()
    plain.generation_config.eos_token_id = STOPS
    for name, parameter in plain.named_parameters():
        if "norm" in name:
            parameter.data += 0.3 * torch.randn_like(parameter)
    fused = fuse_norms(copy.deepcopy(plain))
    assert fused_norms(plain) == 0 and fused_norms(fused) == count
    assert plain.state_dict().keys() == fused.state_dict().keys()
    prompts, settings = random_prompts(9, 12), {"max_new_tokens": 20, "batch_size": 5}
    ours, theirs = (
        rollout.in_order(rollout.sample(model, tokenizer, prompts, **settings))
        for model in (fused, plain)
    )
    assert [r.ids for r in ours] == [r.ids for r in theirs]
    for checkpointing in (False, True):
        pair = (scores_and_gradients(model, checkpointing) for model in (fused, plain))
        assert all(a.equal(b) for a, b in zip(*pair, strict=True))
