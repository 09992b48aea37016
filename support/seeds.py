"""Seeds and random numbers: functions of a seed and a position, on any rank and in any order."""

import hashlib

import torch

# The constants of SplitMix64's authors. Minus 2^64: torch.long is signed, and has the same bits.
STEP = 0x9E3779B97F4A7C15 - 2**64
MIX_1, MIX_2 = 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64


def mix_seed(*parts: object) -> int:
    """One 63-bit seed from several numbers and names; another part gives an unrelated seed."""
    digest = hashlib.sha256(repr(parts).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def generator(*parts: object) -> torch.Generator:
    """A torch.Generator on the CPU, with mix_seed(*parts) as its seed."""
    return torch.Generator().manual_seed(mix_seed(*parts))


def shifted_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """x >> bits as for unsigned numbers. torch's own shift copies the sign into the upper bits."""
    return (x >> bits) & (2 ** (64 - bits) - 1)


def uniform(seed: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """A random number in [0, 1), float64, for each seed and position (long, shapes that broadcast).

    SplitMix64: number `position` of the sequence that `seed` starts. torch's 64-bit integers wrap
    around, which the algorithm needs.
    """
    x = seed + position * STEP
    x = (x ^ shifted_right(x, 30)) * MIX_1
    x = (x ^ shifted_right(x, 27)) * MIX_2
    x = x ^ shifted_right(x, 31)
    return shifted_right(x, 11).double() / 2**53  # 53 bits: what a float64 holds exactly
