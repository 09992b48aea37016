"""experiments/causal.py against loops over tokens and plain autograd."""

import copy

import causal
import pytest
import torch
from helpers import TINY, read_rows

from rollout import Policy


@pytest.fixture
def policy(tiny):
    return Policy(tiny)


@pytest.fixture
def batch(policy, tokenizer):
    """Sampled answers in which two words are replaced by random ones, every other answer right."""
    problems = read_rows(TINY / "train.jsonl")[:6]
    sampled = causal.collect(policy, tokenizer, problems, seed=0)
    ids, place = sampled.ids.clone(), sampled.mask.cumsum(1)
    planted = sampled.mask & ((place == 3) | (place == 6))
    generator = torch.Generator().manual_seed(0)
    ids[planted] = torch.randint(3, 300, ids.shape, generator=generator)[planted]
    advantages = torch.tensor([1.5, -0.5]).repeat(len(ids) // 2)
    with torch.no_grad():
        logp, entropy = policy(ids, sampled.mask)
    return causal.Batch(ids, sampled.mask, advantages, logp, entropy)


def distributions(model, batch) -> list[tuple[int, int, torch.Tensor]]:
    """Row, column and pi (V,) float64 of each response token, row by row unpadded."""
    found = []
    for row, columns in enumerate(batch.mask):
        places = columns.nonzero().flatten().tolist()
        logits = model(batch.ids[row : row + 1, : places[-1] + 1]).logits[0].double()
        found += [(row, column, logits[column - 1].softmax(-1)) for column in places]
    return found


def test_one_step_is_a_plain_gradient_step_and_is_taken_back(policy, batch):
    """Of J over the first ten answers, by autograd on the logits."""
    model, chosen = policy.model, batch.mask.clone()
    chosen[10:] = False
    stepped, untouched = copy.deepcopy(model), copy.deepcopy(model.state_dict())
    tokens, change, times, same_sign = causal.one_step(policy, batch, chosen, lr=1e-3)
    assert all(torch.equal(value, untouched[key]) for key, value in model.state_dict().items())
    before = distributions(stepped, batch)
    inside = [
        (row, pi[batch.ids[row, column]]) for row, column, pi in before if chosen[row, column]
    ]
    J = sum(batch.advantages[row] * p.log() for row, p in inside) / len(inside)
    (-J).backward()
    torch.optim.SGD(stepped.parameters(), lr=1e-3).step()
    changes, signs = [], []
    with torch.no_grad():
        for (row, column, old), (_, _, new) in zip(before, distributions(stepped, batch)):
            changes.append(float((old * old.log()).sum() - (new * new.log()).sum()))
            if chosen[row, column]:
                p, H = old[batch.ids[row, column]], -(old * old.log()).sum()
                lemma = -p * (p.log() + H) * batch.advantages[row]
                signs.append(float(lemma) * changes[-1] > 0)
    assert tokens == len(inside) > 100
    assert change == pytest.approx(1e3 * sum(changes) / len(changes), rel=1e-3)
    assert times == pytest.approx(tokens * change)
    assert same_sign == pytest.approx(100 * sum(signs) / tokens, abs=0.1)


@torch.no_grad()
def test_token_sets_against_the_distributions_themselves(policy, batch):
    silenced, kept, others, of_wrong = causal.token_sets(batch, 0).values()
    p, entropy = torch.zeros(batch.mask.shape), torch.zeros(batch.mask.shape)
    for row, column, pi in distributions(policy.model, batch):
        p[row, column], entropy[row, column] = pi[batch.ids[row, column]], -(pi * pi.log()).sum()
    rare = batch.mask & (p < 0.002)
    right, wrong = (batch.advantages > 0)[:, None], (batch.advantages < 0)[:, None]
    assert torch.equal(silenced | kept, rare & right)
    assert kept.any() and entropy[silenced].max() < entropy[kept].min()
    assert others.sum() == silenced.sum() > 0 and not (others & ~(batch.mask & right & ~rare)).any()
    assert of_wrong.any() and not (of_wrong & ~(rare & wrong)).any()
