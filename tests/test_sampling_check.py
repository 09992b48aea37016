"""The sampling check: silent for the right sampler, loud for those that only look right."""

import pytest
import torch
from helpers import TINY, in_order

import stapo
from rollout import Policy, pad_batch, sample, sampling_gap
from support.data import load_problems


def scored(model, tokenizer, responses: int, **options):
    """logp, entropy and mask (B, L) of responses that `model` samples and scores.

    They begin after the word with which the tiny model works step by step: long ones.
    """
    problems = load_problems(str(TINY / "train.jsonl"))[:responses]
    prompts = [tokenizer(f"{row['problem']}\nFirst ").input_ids for row in problems]
    drawn = sample(model, tokenizer, prompts, max_new_tokens=60, **options)
    ids, mask, _ = pad_batch(in_order(drawn))
    with torch.no_grad():
        logp, entropy = Policy(model)(ids, mask)
    return logp, entropy, mask


def test_the_number_by_hand():
    """Two tokens of p = 1/4 with H = 1, padding left out: d = ln 4 - 1 twice."""
    logp, entropy = torch.tensor([[0.25, 0.25, 0.5]]).log(), torch.ones(1, 3)
    mask = torch.tensor([[True, True, False]])
    for either in (mask, mask.long()):  # other frameworks have masks of 0 and 1
        gap, z = sampling_gap(logp, entropy, either)
        assert float(gap) == pytest.approx(0.386294, abs=1e-6)
        assert float(z) == pytest.approx(2**0.5, abs=1e-6)


def test_twelve_samples_of_the_right_sampler_are_silent(tiny_model, tokenizer):
    """Of 48 responses each; five of six wait for a slot, and take one that another has left."""
    tensors = scored(tiny_model, tokenizer, 12 * 48, batch_size=96)
    parts = zip(*(tensor.split(48) for tensor in tensors))
    zs = torch.stack([sampling_gap(*part)[1] for part in parts])
    assert zs.abs().max() < 4 and 0.5 < zs.std() < 1.6 and abs(zs.mean()) < 0.8


def test_a_wrong_sampler_is_loud(tiny_model, tokenizer):
    """On about 9,000 tokens; the warning's bounds are |z| > 6 and |gap| > 0.005."""
    gap, z = sampling_gap(*scored(tiny_model, tokenizer, 300, top_p=0.95))
    assert abs(z) > 6 and abs(gap) > 0.005


def test_a_run_warns(tmp_path, monkeypatch, capsys):
    real = stapo.sample
    monkeypatch.setattr(stapo, "sample", lambda *a, **k: real(*a, **k | {"temperature": 0.5}))
    flags = f"""--model {TINY} --data {TINY}/train.jsonl --instruction= --steps 1 --batch_size 16
        --mini_batch_size 16 --max_new_tokens 60 --rollout_batch_size 128 --output {tmp_path}/run"""
    stapo.main(flags.split())
    assert "the sampler does not draw from the policy" in capsys.readouterr().err
