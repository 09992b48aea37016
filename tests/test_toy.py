"""The demonstrations of scripts/toy.py and scripts/causal.py, against loops and plain autograd."""

import copy
import math

import causal
import pytest
import torch
from conftest import TINY

from rollout import load_problems

pytest.importorskip("matplotlib", reason="toy.py draws")
import toy  # noqa: E402


def test_the_fillers_entropy_at_the_start_is_the_one_of_the_prior(monkeypatch):
    monkeypatch.setattr(toy, "STEPS", 1)
    rare = 0.02 / 64
    usual = 0.98 + rare
    by_hand = -usual * math.log(usual) - 63 * rare * math.log(rare)  # decisions are left out
    curve, right, _ = toy.train("STAPO", 0, words=64)
    assert curve[0] == pytest.approx(by_hand, abs=1e-5)
    assert right == pytest.approx(100 * (0.98 / 8 + rare), abs=2)  # one step from the start


def test_entropies_of_both_demonstrations_against_loops():
    log_pi = torch.randn(3, 5, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    by_hand = [-sum(p * math.log(p) for p in row) for row in log_pi.exp().tolist()]
    for entropies in (toy.entropies, causal.entropies):
        assert entropies(log_pi).tolist() == pytest.approx(by_hand, abs=1e-5)


def test_justrl_and_stapo_part_and_where_rare_fillers_spoil_they_do_not(monkeypatch):
    monkeypatch.setattr(toy, "STEPS", 60)
    (justrl, right, none), (stapo, same, some) = (toy.train(m, 7) for m in ("JustRL", "STAPO"))
    assert justrl[-1] > 0.95 * justrl[0] > 1.2 * stapo[-1]
    assert none == 0 < some < 1 and abs(right - same) < 2 and right > 20  # from 12.5
    assert toy.train("JustRL", 7, reward="spoiled")[0][-1] < 0.6 * justrl[0]


@pytest.mark.parametrize("method", toy.METHODS)
def test_what_each_method_silences(method):
    """Four rare tokens (p = 0.001) in a right and in a wrong answer, entropies 0.1 to 0.4."""
    logp = torch.full((2, 5), 0.001).log()
    logp[:, 4] = math.log(0.9)
    logp.requires_grad_()
    entropy = torch.tensor([0.1, 0.2, 0.3, 0.4, 0.1]).expand(2, 5)
    old_logp = logp.detach().clone()
    loss, count = toy.loss_of(method, logp, old_logp, torch.tensor([1.0, -1.0]), entropy)
    loss.backward()
    off = (logp.grad == 0).sum(1).tolist()  # silenced tokens of the right and the wrong answer
    right, wrong = {"JustRL": (0, 0), "FullMask": (4, 0), toy.WRONG: (0, 3)}.get(method, (3, 0))
    assert off == [right, wrong] and int(count) == right + wrong


def test_random_candidates_are_not_those_of_lowest_entropy():
    logp = torch.tensor([[0.001] * 8]).log().requires_grad_()
    entropy, kept = torch.arange(8.0)[None], set()
    for _ in range(20):
        loss, count = toy.loss_of(toy.RANDOM, logp, logp.detach(), torch.ones(1), entropy)
        (grad,) = torch.autograd.grad(loss, logp)
        kept.add(tuple(grad[0].nonzero().flatten().tolist()))
        assert int(count) == 6
    assert len(kept) > 5


def test_grades_by_hand():
    answer, usual = torch.tensor([3]), torch.tensor([[0, 5, 6]])
    response = torch.tensor([[[3, 5, 6], [3, 5, 1], [2, 5, 6]]])
    assert toy.grade(response, answer, usual, "decision").tolist() == [[1, 1, -1]]
    assert toy.grade(response, answer, usual, "spoiled").tolist() == [[1, -1, -1]]
    torch.manual_seed(0)
    many = response.repeat(2000, 1, 1)
    means = [
        toy.grade(many, answer.repeat(2000), usual.repeat(2000, 1), kind).mean(0).tolist()
        for kind in ("flipped", 0.9)
    ]
    assert means[0] == pytest.approx([0.4, 0.4, -0.4], abs=0.08)
    assert means[1] == pytest.approx([0.8, 0.8, 0.8], abs=0.08)


@pytest.fixture(scope="module")
def batch(tiny_model, tokenizer):
    """Sampled answers in which two words are replaced by random ones, every other answer right."""
    problems = load_problems(str(TINY / "train.jsonl"))[:6]
    sampled = causal.collect(tiny_model, tokenizer, problems, seed=0)
    ids, place = sampled.ids.clone(), sampled.mask.cumsum(1)
    planted = sampled.mask & ((place == 3) | (place == 6))
    ids[planted] = torch.randint(3, 300, ids.shape)[planted]
    advantages = torch.tensor([1.5, -0.5]).repeat(len(ids) // 2)
    log_pi = causal.log_policy(tiny_model, ids, sampled.mask)
    return sampled._replace(ids=ids, advantages=advantages, log_pi=log_pi)


@pytest.fixture(scope="module")
def chosen(batch):
    """Three tokens of each of the first ten answers."""
    chosen = batch.mask & (batch.mask.cumsum(1) <= 3)
    chosen[10:] = False
    return chosen


def test_gradient_of_a_set_is_the_mean_of_its_tokens_own(tiny, batch, chosen):
    """dJ / d theta at rho = 1 is the mean of A d ln pi(y) over the set, row by row unpadded."""
    where = chosen.nonzero().tolist()
    total = 0.0
    for row, column in where:
        logits = tiny(batch.ids[row : row + 1, :column]).logits[0, -1]
        total = total + batch.advantages[row] * logits.log_softmax(-1)[batch.ids[row, column]]
    by_hand = torch.autograd.grad(total / len(where), list(tiny.parameters()))
    found = causal.gradient(tiny, batch, chosen)
    for a, b in zip(found, by_hand):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)
    assert len(where) > 10 and max(b.abs().max() for b in by_hand) > 0.01


def test_one_step_measures_a_plain_sgd_step_and_takes_it_back(tiny, batch, chosen):
    untouched = copy.deepcopy(tiny.state_dict())
    stats = causal.one_step(tiny, batch, chosen, lr=1e-3)
    assert all(torch.equal(value, untouched[key]) for key, value in tiny.state_dict().items())
    tiny.zero_grad()
    for parameter, grad in zip(tiny.parameters(), causal.gradient(tiny, batch, chosen)):
        parameter.grad = -grad
    torch.optim.SGD(tiny.parameters(), lr=1e-3).step()
    change, kl, own = [], [], []
    at = 0
    for ids, mask, inside in zip(batch.ids, batch.mask, chosen):
        with torch.no_grad():
            new = tiny(ids[None]).logits[0].double().log_softmax(-1)
        for column in mask.nonzero().flatten().tolist():
            p, q = batch.log_pi[at].exp(), new[column - 1].exp()
            change.append(float((p * p.log()).sum() - (q * q.log()).sum()))
            kl.append(float((p * (p / q).log()).sum()))
            own += [change[-1]] if inside[column] else []
            at += 1
    assert stats["tokens"] == len(own)
    for key, values in {"change": change, "kl": kl, "own": own}.items():
        assert float(stats[key]) == pytest.approx(sum(values) / len(values), rel=1e-3, abs=1e-10)


def test_entropy_lemma_against_a_natural_step_on_the_logits():
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(6, 9, generator=generator).double()
    words, advantages = torch.arange(6), torch.tensor([1.6, -0.5, 0.3, -2.5, 1.0, 0.7]).double()
    rate = 1e-6
    moved = logits.clone()
    for row, (word, advantage) in enumerate(zip(words.tolist(), advantages.tolist())):
        moved[row, word] += rate * advantage
    change = causal.entropies(moved.log_softmax(-1)) - causal.entropies(logits.log_softmax(-1))
    predicted = causal.entropy_lemma(logits.log_softmax(-1), words, advantages)
    torch.testing.assert_close(change / rate, predicted, rtol=1e-4, atol=1e-5)


def test_token_sets_against_the_policy_itself(tiny, batch):
    torch.manual_seed(0)
    silenced, kept, others, of_wrong = causal.token_sets(tiny, batch).values()
    words = batch.ids[batch.mask][:, None]
    p = torch.zeros(batch.mask.shape).double()
    p[batch.mask] = batch.log_pi.exp().gather(1, words).squeeze(1)
    entropy = torch.zeros(batch.mask.shape).double()
    entropy[batch.mask] = torch.distributions.Categorical(logits=batch.log_pi).entropy()
    rare = batch.mask & (p < 0.002)
    right, wrong = (batch.advantages > 0)[:, None], (batch.advantages < 0)[:, None]
    assert torch.equal(silenced | kept, rare & right)
    assert kept.any() and entropy[silenced].max() < entropy[kept].min()
    assert others.sum() == silenced.sum() > 0 and not (others & ~(batch.mask & right & ~rare)).any()
    assert of_wrong.any() and not (of_wrong & ~(rare & wrong)).any()
