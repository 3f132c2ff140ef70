"""Counter-based random numbers: a pure function of keys. The same keys give the same number on any device, in any
batch, in any order.

    keys (seed, "sample", stage, group, sample, position)  ──▶  64 mixed bits  ──▶  a number in [0, 1)

The arithmetic is wrapping int64 and exact conversions only, so that CPU and CUDA agree to the bit.
"""

import hashlib
from functools import cache

from braidrl.deferred import Tensor, torch

Key = int | str | Tensor

# The increment and the multipliers of splitmix64 (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number
# generators").
INCREMENT = 0x9E3779B97F4A7C15
MULTIPLIER_1 = 0xBF58476D1CE4E5B9
MULTIPLIER_2 = 0x94D049BB133111EB
MASK = (1 << 64) - 1


def hashed(*keys: Key) -> Tensor:
    """Return 64 well-mixed bits (int64) for each combination of the broadcast keys.

    A key is an int (modulo 2^64), a text (a purpose, a stage) or an integer tensor; tensors broadcast and must share a
    device. Put the widest tensor last: earlier keys are then mixed at their own smaller shape.
    """
    state: int | Tensor = 0
    for key in keys:
        if isinstance(key, Tensor):
            if key.is_floating_point() or key.is_complex():
                raise TypeError(f"a key holds integers, not {key.dtype}")
            key = key.to(torch.int64)
            # A state that is still a Python number needs no device.
            state = _mix_tensor((key ^ (_signed(state) if isinstance(state, int) else state)).add_(_signed(INCREMENT)))
            continue
        number = key_of(key) if isinstance(key, str) else key & MASK
        if isinstance(state, int):
            x = (state ^ number) + INCREMENT & MASK
            x = (x ^ (x >> 30)) * MULTIPLIER_1 & MASK
            x = (x ^ (x >> 27)) * MULTIPLIER_2 & MASK
            state = x ^ (x >> 31)
        else:
            state = _mix_tensor((state ^ _signed(number)).add_(_signed(INCREMENT)))
    return torch.tensor(_signed(state)) if isinstance(state, int) else state


def uniform(*keys: Key) -> Tensor:
    """Return numbers in [0, 1), multiples of 2^-53 in float64, for each combination of the broadcast keys."""
    return _shifted(hashed(*keys), 11).to(torch.float64) * 2.0**-53


def permutation(keys: tuple[Key, ...], n: int) -> Tensor:
    """Return a seeded permutation of 0 to n − 1, (n,) int64 on the CPU."""
    return torch.argsort(hashed(*keys, torch.arange(n)), stable=True)


@cache
def key_of(text: str) -> int:
    """Hash a text to a 64-bit key, the same in every process and release."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


def _signed(bits: int) -> int:
    return bits - (1 << 64) if bits >> 63 else bits


def _shifted(x: Tensor, by: int) -> Tensor:
    """Shift right logically: torch's shift copies the sign bit, which is masked away."""
    return (x >> by) & ((1 << (64 - by)) - 1)


def _mix_tensor(x: Tensor) -> Tensor:
    """Apply splitmix64's finaliser in place."""
    x = x.bitwise_xor_(_shifted(x, 30)).mul_(_signed(MULTIPLIER_1))
    x = x.bitwise_xor_(_shifted(x, 27)).mul_(_signed(MULTIPLIER_2))
    return x.bitwise_xor_(_shifted(x, 31))
