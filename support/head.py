"""The output head, a float32 product: HeadStats for training, Float32Head for sampling."""

from typing import NamedTuple

import torch
from transformers import PreTrainedModel as Model


class TokenStats(NamedTuple):
    """ln p and H of tokens: two float32 tensors of one shape, over the full vocabulary."""

    logp: torch.Tensor  # ln pi(y) of the sampled token y
    entropy: torch.Tensor | None  # H in nats, of the distribution that y was drawn from


# The number of tokens whose logits exist at once. Large chunks launch fewer kernels, which matters
# on a GPU. There each chunk of the backward reads and writes the whole gradient of the weight.
HEAD_CHUNK = {"cpu": 256, "cuda": 1024}


class HeadStats(torch.autograd.Function):
    """ln p and entropy of N tokens, chunk by chunk: all logits never exist at once, because the
    backward computes each chunk again. In one piece the forward is:

        logits = hidden.float() @ weight.T.float()      # (N, V): float32_logits
        ln_pi = logits.log_softmax(-1)                  # (N, V)
        logp = ln_pi.gather(1, targets[:, None])[:, 0]  # (N,)  ln pi(y)
        entropy = -(ln_pi.exp() * ln_pi).sum(-1)        # (N,)  H = -sum_v pi(v) ln pi(v)

    HeadStats.apply(hidden, weight, targets, logp_only) takes hidden (N, D), weight (V, D) and
    targets (N,) long. It returns ln p and entropy (nats), (N,) float32 each, with gradients to
    hidden and weight, unless one of them needs none: a frozen head. With `logp_only` the entropy is
    None and takes no time. The gradient of the entropy needs a second tensor of a chunk's size
    (C, V). Temperature 1, full vocabulary.
    """

    @staticmethod
    def forward(ctx, hidden, weight, targets, logp_only):
        ctx.chunk = HEAD_CHUNK[hidden.device.type]
        logp, entropy, lse = (torch.empty_like(targets, dtype=torch.float32) for _ in range(3))
        for i in range(0, len(targets), ctx.chunk):
            rows = slice(i, i + ctx.chunk)
            logits = float32_logits(hidden[rows], weight)  # (C, V) float32
            lse[rows] = logits.logsumexp(-1)
            logp[rows] = logits.gather(1, targets[rows, None]).squeeze(1) - lse[rows]
            if not logp_only:
                logits -= lse[rows, None]  # ln pi
                entropy[rows] = -torch.linalg.vecdot(logits.exp(), logits)  # H = -sum_v pi ln pi
            del logits  # before the next chunk's exist
        entropy = None if logp_only else entropy
        ctx.save_for_backward(hidden, weight, targets, lse, entropy)
        ctx.set_materialize_grads(False)  # the gradient of an output that is not used is None
        return logp, entropy

    @staticmethod
    def backward(ctx, grad_logp, grad_entropy):
        hidden, weight, targets, lse, entropy = ctx.saved_tensors
        if grad_logp is None:
            grad_logp = torch.zeros_like(lse)
        of_hidden, of_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.zeros_like(hidden) if of_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if of_weight else None
        for i in range(0, len(targets), ctx.chunk):
            rows = slice(i, i + ctx.chunk)
            grad = float32_logits(hidden[rows], weight)  # (C, V) float32: the logits
            grad.sub_(lse[rows, None])  # ln pi
            if grad_entropy is None:
                grad.exp_().neg_()  # -pi, in the same memory
            else:
                of_entropy, grad = grad, grad.exp().neg_()
                # d H / d logits = -pi (ln pi + H)
                of_entropy.add_(entropy[rows, None]).mul_(grad).mul_(grad_entropy[rows, None])
            # d logp / d logits = onehot - pi
            grad.scatter_add_(1, targets[rows, None], torch.ones_like(grad[:, :1]))
            grad *= grad_logp[rows, None]
            if grad_entropy is not None:
                grad += of_entropy
                del of_entropy
            grad = grad.to(hidden.dtype)  # in bfloat16 a copy: the float32 one is freed here
            if of_hidden:
                grad_hidden[rows] = grad @ weight
            if of_weight:
                add_product(grad_weight, grad.T, hidden[rows])
            del grad  # before the next chunk's exists
        return grad_hidden, grad_weight.to(weight.dtype) if of_weight else None, None, None


def float32_logits(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """hidden (N, D) @ weight.T (D, V), accumulated and returned in float32.

    Rounded to bfloat16, p would be on the wrong side of tau_p = 0.002 for some tokens.
    """
    if hidden.is_cuda and hidden.dtype != torch.float32:
        return torch.mm(hidden, weight.T, out_dtype=torch.float32)
    return hidden.float() @ weight.T.float()


def add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """total += left @ right in float32. On CUDA the tensor cores take bfloat16 operands as is."""
    if left.is_cuda and left.dtype != torch.float32:
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    else:
        total.addmm_(left.float(), right.float())


class Float32Head(torch.nn.Linear):
    """A model's output layer with float32 logits, the same as in HeadStats."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = float32_logits(hidden.flatten(0, -2), self.weight).unflatten(0, hidden.shape[:-1])
        return logits if self.bias is None else logits + self.bias


def use_float32_head(model: Model) -> Model:
    """Make a model's output layer a Float32Head; weights and their names stay.

    A scale or a soft cap of the model is applied to the float32 logits. Returns the model.
    """
    head = model.get_output_embeddings()
    if type(head) is torch.nn.Linear:
        head.__class__ = Float32Head
    return model
