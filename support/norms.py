"""RMSNorm as one kernel on a GPU, torch's own; the RMSNorm of transformers is eight kernels.

The time of a decoding step is the time to launch its kernels, and half of them would be norms.
Training, token statistics and sampling all use the same kernel. Otherwise the policy that samples
and the policy that is trained would differ by rounding.
"""

import copy
import inspect

import torch
from torch.nn import functional
from transformers import PreTrainedModel as Model


def fuse_norms(model: Model) -> Model:
    """Replace each norm of a model that has the formula of torch's RMSNorm; returns the model.

    In float32 the numbers are the same. In bfloat16 they may round differently. Weights and their
    names stay. Norms with another formula stay, too (Gemma's norm scales by 1 + weight).
    """
    for parent in list(model.modules()):
        for name, norm in parent.named_children():
            if is_rms_norm(norm):
                fused = torch.nn.RMSNorm(norm.weight.shape, norm.variance_epsilon, device="meta")
                fused.weight = norm.weight
                setattr(parent, name, fused)
    return model


def is_rms_norm(norm: torch.nn.Module) -> bool:
    """Whether a module of transformers computes x / sqrt(mean(x^2) + epsilon) * weight.

    Many classes share only the name. So a copy of the module is tried on the CPU, with a random
    weight and an epsilon of 0.1. The module itself may be on "meta".
    """
    if "RMSNorm" not in type(norm).__name__ or [*norm.state_dict()] != ["weight"]:
        return False
    if norm.weight.dim() != 1 or len(inspect.signature(norm.forward).parameters) != 1:
        return False  # a second input would be a gate
    seeded = {"generator": torch.Generator().manual_seed(0), "device": "cpu"}  # not on "meta"
    size = len(norm.weight)
    x, weight = torch.randn(3, size, **seeded), torch.randn(size, **seeded)
    trial = copy.deepcopy(norm).to_empty(device="cpu")
    trial.weight, trial.variance_epsilon = torch.nn.Parameter(weight), 0.1
    expected = functional.rms_norm(x, (size,), weight, 0.1)
    return torch.allclose(trial(x), expected, rtol=1e-6, atol=0)
