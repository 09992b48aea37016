"""What the loss promises whoever calls it: padding, denominators, gradients.

That it is the paper's loss is shown in test_paper.py.
"""

import math

import pytest
import torch
from reference import drawn

from stapo import clipped_loss, kl_term, quantile, stapo_loss

INF = float("inf")


def grpo(logp, old_logp, advantages, mask, ref_logp):
    """GRPO's loss of one response: a mean over its tokens, with the KL term."""
    keep = mask / mask.sum(1, keepdim=True).clamp(min=1)
    loss = clipped_loss(logp, old_logp, advantages, keep, denominator=1)
    return loss + 0.1 * kl_term(logp, ref_logp, keep, 1)


def test_quantile_of_very_much():
    size = 17_000_000  # torch.quantile refuses
    values = torch.arange(size, dtype=torch.float32).flip(0)
    assert float(quantile(values, 0.5)) == pytest.approx((size - 1) / 2, rel=1e-6)


def test_a_ratio_that_overflows():
    """For A > 0 the clip is active: gradient 0, and not NaN. With A = 0 there is none at all.

    For A < 0 the loss is not finite, so that the update is skipped. NaN is never hidden.
    """

    def gradient(A, log_rho):
        logp = torch.tensor([[log_rho, 0.1]], requires_grad=True)
        mask = torch.ones(1, 2, dtype=torch.bool)
        loss = clipped_loss(logp, torch.zeros(1, 2), torch.tensor([A]), mask)
        return loss.detach(), torch.autograd.grad(loss, logp)[0][0]

    for log_rho in (50.0, 89.0, 99.5, INF):
        loss, grad = gradient(2.0, log_rho)
        assert float(loss) == pytest.approx(-(1.28 + math.exp(0.1)))
        assert grad.tolist() == [0, pytest.approx(-math.exp(0.1))]
        loss, grad = gradient(0.0, log_rho)
        assert loss == 0 and not grad.any()
    assert not gradient(-2.0, 89.0)[0].isfinite()
    assert all(gradient(A, float("nan"))[0].isnan() for A in (2.0, 0.0, -2.0))


@pytest.mark.parametrize("method", ["stapo", "grpo"])
@pytest.mark.parametrize("garbage", [float("nan"), INF, -INF, 1e30])
def test_padding_is_never_seen(garbage, method):
    logp, old_logp, advantages, entropy, mask = drawn()
    found = []
    for fill in (0.0, garbage):
        x, h = (y.masked_fill(~mask, fill).requires_grad_() for y in (logp, entropy))
        old, ref = (y.masked_fill(~mask, -fill) for y in (old_logp, logp - 0.3))
        if method == "stapo":
            loss, sums = stapo_loss(x, old, advantages, h, mask, tau_p=0.1)
        else:
            loss, sums = grpo(x, old, advantages, mask, ref), {}
        loss.backward()
        assert h.grad is None and not any(s.requires_grad or s.dim() for s in sums.values())
        found.append((loss.detach(), x.grad, *sums.values()))
    assert all(map(torch.equal, *found))


def test_weights_are_divided_by_their_sum():
    logp, old_logp, advantages, entropy, mask = drawn()
    loss = clipped_loss(logp, old_logp, advantages, 1e-4 * entropy * mask)  # a sum below 1
    rows = (x[mask][:, None] for x in (logp, old_logp, advantages[:, None].expand_as(mask)))
    one = torch.ones(1, 1, dtype=torch.bool)
    each = [clipped_loss(x[None], y[None], a, one) for x, y, a in zip(*rows)]
    expected = (torch.stack(each) * entropy[mask]).sum() / entropy[mask].sum()
    torch.testing.assert_close(loss, expected)


def test_nothing_kept_is_a_connected_zero():
    logp, old_logp, advantages, entropy, mask = drawn()
    logp.requires_grad_()
    loss, _ = stapo_loss(logp, old_logp, advantages, entropy, torch.zeros_like(mask))
    loss.backward()
    assert float(loss.detach()) == 0 and float(logp.grad.abs().sum()) == 0


def test_old_logp_gets_no_gradient():
    """Before the first update logp is ln pi_old: given twice, it still has its gradient."""
    logp, _, advantages, entropy, mask = drawn()
    logp.requires_grad_()
    losses = (stapo_loss(logp, x, advantages, entropy, mask)[0] for x in (logp.detach(), logp))
    once, twice = (torch.autograd.grad(loss, logp)[0] for loss in losses)
    assert torch.equal(once, twice) and once.abs().sum() > 0


def test_shapes_that_would_broadcast_are_refused():
    """One advantage for all, a column, a mask of 0 and 1, a tensor of another shape."""
    logp, old_logp, advantages, entropy, mask = drawn()
    wrong = [(A, mask) for A in (advantages[:, None], advantages[:1])]
    for A, I in (*wrong, (advantages, mask[0]), (advantages, mask.long())):  # noqa: E741
        with pytest.raises(ValueError, match="mask"):
            stapo_loss(logp, old_logp, A, entropy, I, tau_h=0.5)
    # Packed tokens are rows of one token. Otherwise logp - old_logp would be (N, N).
    *rows, keep = (x[mask][:, None] for x in (logp, old_logp, entropy, mask))
    A = advantages[:, None].expand_as(mask)[mask]
    for i in range(3):
        x, y, z = (row.flatten() if i == j else row for j, row in enumerate(rows))
        with pytest.raises(ValueError, match="like mask"):
            stapo_loss(x, y, A, z, keep, tau_h=0.5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("which", [0, 1, 3])
def test_rounded_log_probabilities_are_refused(which, dtype):
    tensors = list(drawn())
    tensors[which] = tensors[which].to(dtype)
    with pytest.raises(ValueError, match=f"float32 or float64: .* {dtype}"):
        stapo_loss(*tensors)


@pytest.mark.parametrize("packed", [False, True])
def test_advantages_may_be_those_of_tokens(packed):
    """(B, T) advantages, as other frameworks have them, padded or one token a row."""
    logp, old_logp, advantages, entropy, mask = drawn()
    each = advantages[:, None].expand_as(mask)
    x = logp.clone().requires_grad_()
    tensors = [x, old_logp, each.masked_fill(~mask, float("nan")), entropy, mask]
    if packed:
        tensors = [tensor[mask][:, None] for tensor in tensors]
    loss, counts = stapo_loss(*tensors, tau_p=0.1)
    expected, of_rows = stapo_loss(logp.requires_grad_(), *drawn()[1:], tau_p=0.1)
    torch.testing.assert_close(loss, expected)
    assert counts == of_rows and counts["silenced"] > 0
    gradients = torch.autograd.grad(loss, x) + torch.autograd.grad(expected, logp)
    torch.testing.assert_close(*gradients)
