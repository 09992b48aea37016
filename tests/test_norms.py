"""RMSNorm in one kernel: transformers' own numbers, and no worse in bfloat16."""

import copy

import pytest
import torch
import transformers
from test_rollout import FAMILIES, NEEDS_CUDA, SHAPE, STOPS, random_prompts

import rollout
from support.norms import fuse_norms, is_rms_norm

TRIED = {name: FAMILIES[name] for name in ("qwen3", "llama", "mistral, windows", "doge")}
TRIED |= {
    "olmo2": transformers.Olmo2Config(**SHAPE),  # norms behind attention, over all heads at once
    "gemma 2": transformers.Gemma2Config(**SHAPE, head_dim=8),  # 1 + weight
    "mamba 2": transformers.Mamba2Config(  # a second input in two of five
        **SHAPE, num_heads=4, head_dim=16, n_groups=1, state_size=8, chunk_size=8
    ),
}
FUSED = {"qwen3": 9, "doge": 9, "olmo2": 9, "gemma 2": 0, "mamba 2": 3}  # others: 2 a layer and 1


def fused_norms(model) -> int:
    return sum(type(module) is torch.nn.RMSNorm for module in model.modules())


def both(family: str):
    """A model as transformers makes it, with norms' weights that are not all 1, and ours."""
    torch.manual_seed(0)
    plain = transformers.AutoModelForCausalLM.from_config(TRIED[family]).eval()
    for name, parameter in plain.named_parameters():
        if "norm" in name:
            parameter.data += 0.3 * torch.randn_like(parameter)
    return plain, fuse_norms(copy.deepcopy(plain))


def scores_and_gradients(model, checkpointing: bool) -> list[torch.Tensor]:
    """Of rows padded on the right; the gradient of every weight."""
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    ids = torch.randint(0, 104, (3, 19), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids).bool()
    mask[0, 12:] = mask[2, 7:] = False
    stats = rollout.token_stats(model.train(), ids, mask, mask)
    stats.logp.sum().backward()
    return [*(s.detach() for s in stats), *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("family", TRIED)
def test_not_a_bit_changes_in_float32(family, tokenizer, monkeypatch):
    """Sampled ids, log-probabilities, entropies and gradients, also with checkpointing."""
    monkeypatch.setattr(rollout, "stop_ids", lambda *_: STOPS)
    plain, fused = both(family)
    assert fused_norms(plain) == 0 and fused_norms(fused) == FUSED.get(family, 5)
    assert plain.state_dict().keys() == fused.state_dict().keys()
    prompts, settings = random_prompts(9, 12), {"max_new_tokens": 20, "batch_size": 5}
    sampled = [rollout.sample(model, tokenizer, prompts, **settings) for model in (fused, plain)]
    assert [r.ids for r in sampled[0]] == [r.ids for r in sampled[1]]
    for checkpointing in (False, True):
        pair = (scores_and_gradients(model, checkpointing) for model in (fused, plain))
        assert all(a.equal(b) for a, b in zip(*pair, strict=True))
        fused.zero_grad(), plain.zero_grad()


def norm_named(name: str, forward, **parameters) -> torch.nn.Module:
    norm = type(name, (torch.nn.Module,), {"forward": forward})()
    for key, value in ({"weight": torch.ones(64)} | parameters).items():
        setattr(norm, key, torch.nn.Parameter(value))
    return norm


def test_another_formula_under_the_same_name_stays():
    def right(self, x):
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 0.1)

    def scaled(self, x):
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon)
        return (1 + self.weight) * x * scale

    def outside(self, x):
        return self.weight * x / (x.square().mean(-1, keepdim=True).sqrt() + self.variance_epsilon)

    def centred(self, x):
        x = x - x.mean(-1, keepdim=True)
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 0.1)

    def gated(self, x, gate=None):
        return right(self, x)

    assert is_rms_norm(norm_named("NewRMSNorm", right))
    assert not is_rms_norm(norm_named("Norm", right))
    for forward in (scaled, outside, centred, gated):
        assert not is_rms_norm(norm_named("NewRMSNorm", forward)), forward.__name__
    assert not is_rms_norm(norm_named("NewRMSNorm", right, bias=torch.zeros(64)))
    assert not is_rms_norm(norm_named("NewRMSNorm", right, weight=torch.ones(1, 64)))
    with torch.device("meta"):  # where the shell of a sharded model is built
        assert is_rms_norm(transformers.models.qwen3.modeling_qwen3.Qwen3RMSNorm(64))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NEEDS_CUDA)])
def test_bfloat16_is_as_near_to_float64(device):
    """Values and gradients of 40 norms; the fused one rounds once, transformers' own twice."""
    errors = {"fused": [], "plain": []}
    kind = transformers.models.qwen3.modeling_qwen3.Qwen3RMSNorm
    for seed in range(40):
        g = torch.Generator().manual_seed(seed)
        x, weight, out = (torch.randn(n, 128, generator=g).bfloat16() for n in (24, 1, 24))
        plain = kind(128)
        plain.weight.data = weight[0]
        fused = fuse_norms(torch.nn.Sequential(copy.deepcopy(plain)))
        exact = torch.nn.RMSNorm(128, 1e-6).double()
        exact.weight.data = weight[0].double()
        found = {}
        for name, norm in (("fused", fused), ("plain", plain), ("exact", exact)):
            dtype = norm.state_dict().popitem()[1].dtype
            inputs = x.to(device, dtype).detach().requires_grad_()
            result = norm.to(device)(inputs)
            result.backward(out.to(device, dtype))
            found[name] = [result.detach(), inputs.grad, next(norm.parameters()).grad]
        for name, rows in errors.items():
            pairs = zip(found[name], found["exact"], strict=True)
            rows.append([float((a.double() - b).abs().mean()) for a, b in pairs])
    fused, plain = (torch.tensor(rows).mean(0) for rows in errors.values())
    print(f"\nbfloat16's error, fused / plain: {(fused / plain).tolist()}")
    assert (fused <= plain).all() and (plain > 0).all()
