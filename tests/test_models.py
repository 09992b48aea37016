"""Models that need care: other attention, other parts, checkpoints that older programs read."""

import copy
import json

import pytest
import torch
import transformers
from helpers import SHAPE, TINY, fused_norms

import rollout
import stapo
from support import InputError
from support.models import check_head, fuse_norms
from support.run import add_old_rope


def test_a_checkpoint_has_the_rotary_positions_that_transformers_4_reads(tmp_path):
    """The base at the top level, and a scaling beside it. Version 5 reads the same model."""
    rope = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0}
    rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 512}
    config = transformers.LlamaConfig(**SHAPE, rope_parameters=rope)
    model = transformers.LlamaForCausalLM(config).eval()
    model.save_pretrained(tmp_path)
    add_old_rope(tmp_path / "config.json")
    stored = json.loads((tmp_path / "config.json").read_text())
    assert stored["rope_theta"] == 5e5 and stored["rope_scaling"]["rope_type"] == "llama3"
    assert "rope_theta" not in stored["rope_scaling"]
    again = rollout.load_model(str(tmp_path))
    assert torch.equal(again.model.rotary_emb.inv_freq, model.model.rotary_emb.inv_freq)


def test_a_model_without_a_base_model_is_refused_by_name():
    config = transformers.Llama4TextConfig(**SHAPE, head_dim=8, num_local_experts=2)
    with pytest.raises(InputError, match="Llama4ForCausalLM has no base model"):
        check_head(transformers.Llama4ForCausalLM(config).eval())


def test_other_parts_than_the_language_model_are_mentioned(tmp_path, capsys):
    text = {**SHAPE, "head_dim": 8, "num_hidden_layers": 4}
    config = transformers.Qwen3_5Config(text_config=text)
    transformers.Qwen3_5ForCausalLM(config.get_text_config()).save_pretrained(tmp_path)
    config.save_pretrained(tmp_path)
    rollout.load_tokenizer(str(TINY)).save_pretrained(tmp_path)
    data = str(TINY / "test.jsonl")
    stapo.load_task(stapo.Config(model=str(tmp_path), data=data, max_new_tokens=8))
    assert "only its language model is trained and saved" in capsys.readouterr().err
    stapo.load_task(stapo.Config(model=str(TINY), data=data, max_new_tokens=8))
    assert "only its language model" not in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["Llama", "Qwen2", "Qwen3", "Mistral", "Gemma"])
def test_norms_with_torchs_formula_are_fused_and_no_others(kind):
    """The same logits and gradients to the bit in float32; Gemma's norm scales by 1 + weight."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SHAPE)
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
