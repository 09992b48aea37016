"""The loss section against the paper: printed values, hand computation, loops in float64."""

import math

import pytest
import torch

from stapo import group_advantages, grpo_loss, quantile, spurious_mask, stapo_loss

NAN, INF = float("nan"), float("inf")


def drawn(seed: int = 0, rows: int = 6, width: int = 9):
    """Random (logp, old_logp, advantages, entropy, mask) with plenty of candidates and clips."""
    g = torch.Generator().manual_seed(seed)
    logp = -8 * torch.rand(rows, width, generator=g)
    old_logp = logp + 0.4 * torch.randn(rows, width, generator=g)
    advantages = torch.tensor([1.6, -0.5, 0.0, 0.9, -1.2, 2.5])[:rows]
    entropy = 2 * torch.rand(rows, width, generator=g)
    lengths = torch.randint(1, width + 1, (rows, 1), generator=g)
    return logp, old_logp, advantages, entropy, torch.arange(width) < lengths


def by_loop(logp, old_logp, advantages, entropy, mask, tau_p, q, eps_low=0.2, eps_high=0.28):
    """STAPO's loss and gradient, token by token in Python floats (float64)."""
    tokens = [(i, t) for i in range(mask.shape[0]) for t in range(mask.shape[1]) if mask[i, t]]
    p = {it: math.exp(float(logp[it])) for it in tokens}
    candidates = [it for it in tokens if float(advantages[it[0]]) > 0 and p[it] < tau_p]
    ordered = sorted(float(entropy[it]) for it in candidates)
    tau_h = -INF
    if ordered:
        place = q * (len(ordered) - 1)
        below, above = ordered[math.floor(place)], ordered[math.ceil(place)]
        tau_h = below + (above - below) * (place - math.floor(place))
    kept = [it for it in tokens if not (it in candidates and float(entropy[it]) < tau_h)]
    total, gradient = 0.0, torch.zeros(mask.shape, dtype=torch.float64)
    for i, t in kept:
        a, rho = float(advantages[i]), math.exp(float(logp[i, t]) - float(old_logp[i, t]))
        clipped = min(max(rho, 1 - eps_low), 1 + eps_high)
        total += min(rho * a, clipped * a)
        flat = (a > 0 and rho > 1 + eps_high) or (a < 0 and rho < 1 - eps_low)
        gradient[i, t] = 0.0 if flat else -rho * a / len(kept)
    return -total / max(1, len(kept)), gradient, len(candidates), len(tokens) - len(kept)


@pytest.mark.parametrize(
    ("right", "printed"),
    list(zip(range(1, 8), (2.47, 1.62, 1.21, 0.94, 0.72, 0.54, 0.35), strict=True)),
)
def test_advantages_printed_in_the_paper(right, printed):
    rewards = torch.tensor([[1.0] * right + [-1.0] * (8 - right)])
    advantages = group_advantages(rewards)
    assert round(float(advantages[0, 0]), 2) == printed
    assert float(advantages.sum()) == pytest.approx(0, abs=1e-5)


def test_equal_rewards_have_no_advantage():
    tenths = torch.tensor([[0.1] * 8])
    assert tenths.std(1) != 0  # the trap: rounding
    assert (group_advantages(tenths) == 0).all()
    advantages = group_advantages(torch.tensor([[-1.0] * 8, [1.0, *[-1.0] * 7]]))
    assert (advantages[0] == 0).all() and (advantages[1] != 0).all()


@pytest.mark.parametrize("q", [0.0, 0.2, 0.75, 1.0])
def test_quantile_is_torchs(q):
    for size in (1, 2, 5, 1000):
        values = torch.randn(size)
        torch.testing.assert_close(quantile(values, q), torch.quantile(values, q))


def test_quantile_of_nothing_and_of_very_much():
    assert quantile(torch.zeros(0), 0.75) == -INF
    size = 17_000_000  # torch.quantile refuses
    values = torch.arange(size, dtype=torch.float32).flip(0)
    assert float(quantile(values, 0.5)) == pytest.approx((size - 1) / 2, rel=1e-6)


@pytest.mark.parametrize(("candidates", "silenced"), [(0, 0), (1, 0), (2, 1), (4, 3), (8, 6)])
def test_counts_at_three_quarters(candidates, silenced):
    logp = torch.full((2, 10), math.log(0.5))
    logp[0, :candidates] = math.log(0.001)
    logp[1] = math.log(0.001)  # a wrong response has no candidates
    entropy = torch.rand(2, 10)
    mask = torch.ones(2, 10, dtype=torch.bool)
    found = spurious_mask(logp, torch.tensor([1.0, -1.0]), entropy, mask)
    assert found.sum() == silenced and found.dtype == torch.bool and not found[1].any()
    if silenced:  # the lowest entropies go
        assert entropy[found].max() < entropy[0, :candidates][~found[0, :candidates]].min()


def test_the_mask_is_strict_and_takes_its_thresholds():
    logp = torch.tensor([[0.001, 0.0015, 0.01]]).log()
    entropy, mask = torch.tensor([[0.2, 0.3, 0.1]]), torch.ones(1, 3, dtype=torch.bool)
    a = torch.ones(1)
    assert spurious_mask(logp, a, entropy, mask, tau_h=0.3).tolist() == [[True, False, False]]
    assert spurious_mask(logp, a, entropy, mask, tau_h=INF).tolist() == [[True, True, False]]
    assert not spurious_mask(logp, a, entropy, mask, tau_p=0.0).any()
    assert not spurious_mask(logp, 0 * a, entropy, mask, tau_h=INF).any()
    assert not spurious_mask(logp, a, entropy, mask, tau_p=0.001, tau_h=INF)[0, 1:].any()
    assert spurious_mask(logp, a, entropy, mask, q=1.0).sum() == 1  # the highest is kept
    assert not spurious_mask(0 * logp, a, entropy, mask, tau_p=1.0, tau_h=INF).any()


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("tau_p", "q"), [(0.002, 0.75), (0.1, 0.5), (0.0, 0.75)])
def test_loss_and_gradient_equal_a_loop(seed, tau_p, q):
    logp, *rest = drawn(seed)
    logp.requires_grad_()
    loss, metrics = stapo_loss(logp, *rest, tau_p=tau_p, q=q)
    loss.backward()
    value, gradient, candidates, silenced = by_loop(logp.detach(), *rest, tau_p, q)
    assert float(loss.detach()) == pytest.approx(value, abs=1e-5)
    torch.testing.assert_close(logp.grad.double(), gradient, atol=1e-6, rtol=1e-4)
    assert (int(metrics["candidates"]), int(metrics["silenced"])) == (candidates, silenced)
    assert int(metrics["tokens"]) == int(rest[-1].sum())
    entropies = rest[2][rest[3]].double()
    assert float(metrics["entropy_sum"]) == pytest.approx(float(entropies.sum()), rel=1e-5)


@pytest.mark.parametrize(
    ("advantage", "rho", "objective", "slope"),
    [
        (2.0, 1.5, 2.56, 0.0),  # right and already likelier: clipped at 1.28
        (2.0, 0.5, 1.0, 1.0),  # right and less likely: pushed up, never clipped
        (-2.0, 1.5, -3.0, -3.0),  # wrong and likelier: pushed down, never clipped
        (-2.0, 0.5, -1.6, 0.0),  # wrong and already less likely: clipped at 0.8
        (2.0, 1.1, 2.2, 2.2),
        (-2.0, 0.9, -1.8, -1.8),
    ],
)
def test_four_quadrants_of_the_clip(advantage, rho, objective, slope):
    """By hand: the objective is min(rho A, clip(rho) A), its slope in ln pi is rho A or 0."""
    logp = torch.tensor([[math.log(0.4)]], requires_grad=True)
    args = logp.detach() - math.log(rho), torch.tensor([advantage]), torch.ones(1, 1)
    loss, metrics = stapo_loss(logp, *args, torch.ones(1, 1, dtype=torch.bool))
    loss.backward()
    assert float(loss.detach()) == pytest.approx(-objective, rel=1e-5)
    assert float(logp.grad) == pytest.approx(-slope, rel=1e-5)
    assert bool(metrics["clip_high"]) == (advantage > 0 and rho > 1.28)
    assert bool(metrics["clip_low"]) == (advantage < 0 and rho < 0.8)
    assert float(metrics["ratio_sum"]) == pytest.approx(rho, rel=1e-5)


@pytest.mark.parametrize("garbage", [NAN, INF, -INF, 1e30])
def test_padding_is_never_seen(garbage):
    logp, old_logp, advantages, entropy, mask = drawn()
    grads = []
    for fill in (0.0, garbage):
        x = logp.masked_fill(~mask, fill).requires_grad_()
        rest = old_logp.masked_fill(~mask, -fill), advantages, entropy.masked_fill(~mask, fill)
        loss, metrics = stapo_loss(x, *rest, mask, tau_p=0.1)
        loss.backward()
        grads.append((loss.detach(), x.grad, metrics))
    assert torch.equal(grads[0][0], grads[1][0]) and torch.equal(grads[0][1], grads[1][1])
    assert all(torch.equal(grads[0][2][k], grads[1][2][k]) for k in grads[0][2])


def test_silenced_token_with_an_exploded_ratio_leaves_no_trace():
    """exp(200) is infinite; were it masked after exp, inf * 0 would make the gradient NaN."""
    logp = torch.tensor([[-200.0, -1.0, -1.0]], requires_grad=True)
    old_logp = torch.tensor([[-400.0, -1.0, -1.0]])
    mask = torch.ones(1, 3, dtype=torch.bool)
    loss, _ = stapo_loss(logp, old_logp, torch.ones(1), torch.ones(1, 3), mask, tau_h=INF)
    loss.backward()
    assert float(loss.detach()) == -1.0 and logp.grad.tolist() == [[0.0, -0.5, -0.5]]


def test_nothing_kept_is_a_connected_zero():
    logp, old_logp, advantages, entropy, mask = drawn()
    logp.requires_grad_()
    loss, _ = stapo_loss(logp, old_logp, advantages, entropy, torch.zeros_like(mask))
    loss.backward()
    assert float(loss.detach()) == 0 and float(logp.grad.abs().sum()) == 0


@pytest.mark.parametrize("num_kept", [0.25, 7.0, torch.tensor(0.5), torch.tensor(40)])
def test_the_denominator_is_taken_as_given(num_kept):
    tensors = drawn()
    own, metrics = stapo_loss(*tensors)
    given, _ = stapo_loss(*tensors, num_kept=num_kept)
    kept = int(metrics["tokens"] - metrics["silenced"])
    assert float(given) == pytest.approx(float(own) * kept / float(num_kept), rel=1e-5)


def test_micro_batches_add_up_and_order_does_not_matter():
    tensors = drawn(3)
    logp, old_logp, advantages, entropy, mask = tensors
    candidates = mask & (advantages[:, None] > 0) & (logp.exp() < 0.1)
    tau_h = torch.quantile(entropy[candidates], 0.75)
    whole, whole_metrics = stapo_loss(*tensors, tau_p=0.1)
    kept = whole_metrics["tokens"] - whole_metrics["silenced"]
    for order in (torch.arange(6), torch.tensor([4, 0, 5, 2, 1, 3])):
        parts = [
            stapo_loss(*(t[rows] for t in tensors), tau_p=0.1, tau_h=tau_h, num_kept=kept)
            for rows in order.split(2)
        ]
        assert float(sum(loss for loss, _ in parts)) == pytest.approx(float(whole), rel=1e-5)
        for key, value in whole_metrics.items():
            summed = float(sum(metrics[key] for _, metrics in parts))
            assert summed == pytest.approx(float(value), rel=1e-5), key
    # a quantile and a mean of each micro-batch's own are another objective
    alone = sum(float(stapo_loss(*(t[i : i + 1] for t in tensors), tau_p=0.1)[0]) for i in range(6))
    assert abs(alone / 6 - float(whole)) > 0.01


def test_only_logp_has_a_gradient():
    tensors = [t.requires_grad_() if t.is_floating_point() else t for t in drawn()]
    loss, metrics = stapo_loss(*tensors)
    assert not any(m.requires_grad or m.dim() for m in metrics.values())
    loss.backward()
    assert tensors[0].grad is not None and tensors[3].grad is None


@pytest.mark.parametrize("seed", range(3))
def test_grpo_equals_a_loop(seed):
    logp, old_logp, advantages, _, mask = drawn(seed)
    ref_logp = logp + 0.3 * torch.randn(logp.shape, generator=torch.Generator().manual_seed(9))
    loss = grpo_loss(logp, old_logp, ref_logp, advantages, mask, eps=0.2, beta=0.1, num_responses=6)
    expected = 0.0
    for i in range(6):
        tokens, total = [t for t in range(mask.shape[1]) if mask[i, t]], 0.0
        for t in tokens:
            a, rho = float(advantages[i]), math.exp(float(logp[i, t] - old_logp[i, t]))
            r = math.exp(float(ref_logp[i, t] - logp[i, t]))
            total += min(rho * a, min(max(rho, 0.8), 1.2) * a) - 0.1 * (r - math.log(r) - 1)
        expected -= total / len(tokens) / 6
    assert float(loss) == pytest.approx(expected, rel=1e-4)
