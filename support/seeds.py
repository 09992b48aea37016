"""Random numbers as functions of a seed and a position, the same on any rank and in any order."""

import hashlib

import torch


def mix_seed(*parts: object) -> int:
    """One 63-bit seed from several numbers and names, as good as random in all of them."""
    digest = hashlib.sha256(repr(parts).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def generator(*parts: object) -> torch.Generator:
    """torch's generator on the CPU, which uses 32 bits of the mixed seed."""
    return torch.Generator().manual_seed(mix_seed(*parts))


def signed(constant: int) -> int:
    """An unsigned 64-bit constant as the signed number with the same bits, which torch.long has."""
    return constant - 2**64 if constant >= 2**63 else constant


def shifted_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """x >> bits of an unsigned number: torch's shift copies the sign into the upper bits."""
    return (x >> bits) & (2 ** (64 - bits) - 1)


def uniform(seed: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """A random number in [0, 1), float64, for each seed and position (long, any shapes that match).

    SplitMix64: number `position` of the sequence that `seed` starts, with the constants of its
    authors. torch's 64-bit integers wrap around, as the algorithm wants. Each response therefore
    has its own numbers, whatever batch, slot or rank it is decoded in.
    """
    x = seed + position * signed(0x9E3779B97F4A7C15)
    x = (x ^ shifted_right(x, 30)) * signed(0xBF58476D1CE4E5B9)
    x = (x ^ shifted_right(x, 27)) * signed(0x94D049BB133111EB)
    x = x ^ shifted_right(x, 31)
    return shifted_right(x, 11).double() / 2**53  # 53 bits: what a float64 holds exactly
