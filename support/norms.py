"""RMSNorm as torch's own, which is one kernel on a GPU: transformers writes it as eight.

A decoding step costs what the host launches, and half of its launches were norms. Training,
token statistics and sampling all take the same kernel. Otherwise the policy that samples and the
policy that is trained would differ by a rounding.
"""

import functools
import inspect
import types

import torch
from torch.nn import functional
from transformers import PreTrainedModel as Model


def fuse_norms(model: Model) -> Model:
    """The model with torch's RMSNorm in the place of each of its own that gives the same numbers.

    Weights and their names stay, and so do norms of another formula (Gemma's scales by 1 + weight).
    """
    for parent in list(model.modules()):
        for name, norm in parent.named_children():
            if is_rms_norm(type(norm)) and norm.weight.dim() == 1:
                fused = torch.nn.RMSNorm(norm.weight.shape, norm.variance_epsilon, device="meta")
                fused.weight = norm.weight
                setattr(parent, name, fused.train(norm.training))
    return model


@functools.cache
def is_rms_norm(kind: type) -> bool:
    """Whether a class of transformers computes x / sqrt(mean(x^2) + epsilon) * weight.

    Tried, with a weight and an epsilon that are not trivial: many classes share the name alone. A
    bare namespace holds the two, so that a forward that needs more fails.
    """
    forward = kind.forward
    if "RMSNorm" not in kind.__name__ or len(inspect.signature(forward).parameters) != 2:
        return False  # a second input would be a gate
    seeded = {"generator": torch.Generator().manual_seed(0), "device": "cpu"}  # not on "meta"
    x, weight = torch.randn(3, 64, **seeded), torch.randn(64, **seeded)
    try:
        found = forward(types.SimpleNamespace(weight=weight, variance_epsilon=0.1), x)
    except AttributeError:
        return False
    return torch.allclose(found, functional.rms_norm(x, (64,), weight, 0.1), rtol=1e-6, atol=0)
