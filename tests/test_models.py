"""Models that need care: other attention, other parts, checkpoints that older programs read."""

import copy
import json

import pytest
import torch
import transformers
from helpers import SHAPE, fused_norms

import rollout
from support import InputError, models
from support.checkpoints import save_checkpoint
from support.models import fuse_norms


def test_a_checkpoint_has_the_rotary_positions_that_transformers_4_reads(tmp_path, tokenizer):
    """The base at the top level, and a scaling beside it. Version 5 reads the same model."""
    rope = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0}
    rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 512}
    config = transformers.LlamaConfig(**SHAPE, rope_parameters=rope)
    model = transformers.LlamaForCausalLM(config).eval()
    folder = tmp_path / "step_000001"
    save_checkpoint(folder, model, torch.optim.AdamW(model.parameters()), tokenizer)
    stored = json.loads((folder / "config.json").read_text())
    assert stored["rope_theta"] == 5e5 and stored["rope_scaling"]["rope_type"] == "llama3"
    assert "rope_theta" not in stored["rope_scaling"]
    again = rollout.load_model(str(folder))
    assert torch.equal(again.model.rotary_emb.inv_freq, model.model.rotary_emb.inv_freq)
    assert fused_norms(again) == 2 * 2 + 1 and fused_norms(model) == 0


def test_dropout_and_router_noise_are_off(tmp_path):
    """Also of the language model within another model."""
    transformers.MixtralConfig(**SHAPE, router_jitter_noise=0.1).save_pretrained(tmp_path)
    assert models.load_config(str(tmp_path)).router_jitter_noise == 0
    text = {"attention_dropout": 0.1, "max_position_embeddings": 64}
    transformers.Gemma3Config(text_config=text).save_pretrained(tmp_path)
    config = models.load_config(str(tmp_path))
    assert config.text_config.attention_dropout == 0
    with pytest.raises(InputError, match="at most 40 fit"):
        models.check_length(config, 24, 41)


def test_a_model_of_the_hub_is_known_by_its_commit(monkeypatch):
    monkeypatch.setattr(models, "try_to_load_from_cache", lambda *_: "snapshots/0a1b/config.json")
    assert models.weights_of("a/b") == "a/b, commit 0a1b"


@pytest.mark.parametrize("kind", ["Llama", "Qwen2", "Qwen3", "Mistral", "Gemma"])
def test_norms_with_torchs_formula_are_fused_and_no_others(kind):
    """The same logits and gradients to the bit in float32; Gemma's norm scales by 1 + weight."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SHAPE, rms_norm_eps=0.1)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for name, weight in model.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(weight)
    ids = torch.arange(20, 40)[None]
    found = []
    for each in (model, fuse_norms(copy.deepcopy(model))):
        logits = each(ids).logits
        logits.logsumexp(-1).sum().backward()
        found.append([logits, *(parameter.grad for parameter in each.parameters())])
    assert all(map(torch.equal, *found))
    assert fused_norms(model) == 0
    assert (fused_norms(each) == 2 * 2 + 1 + 2 * 2 * (kind == "Qwen3")) == (kind != "Gemma")
    assert each.state_dict().keys() == model.state_dict().keys()
