"""draw: random numbers as pure functions of a seed, as torch operators.

`jointtrace.seeds(count, device)` draws seeds from torch's global generator. A draw is a pure function of one seed, in
one of two forms that give different numbers:

- `jointtrace.counter_draw` hashes the seed with each element's position, in plain integer operators: any compiler fuses
  them, and eager runs them too. Equal arguments give equal bits wherever and however often it runs, because nothing
  in it rounds differently anywhere: no integer overflows, floating-point steps are exact, and the one function that is
  not (the inverse error function, in float64) is never within 2**-48 of its value of where rounding to float32 flips.
- `jointtrace.generator_draw` asks a generator of its own, started with the seed: fast where nothing fuses.

The hash is three rounds of a published 32-bit integer hash (16, 0x21f0aaad, 15, 0x735a2d97, 15: C. Wellons, hash
prospector), keyed with 32 bits of the seed before the first round and with 31 before the second.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

MASK = 0xFFFFFFFF
SECOND_WORD = 0x9E3779B9  # 2**32 divided by the golden ratio: told apart from the first word's key in every byte
DIGITS = {torch.float16: 11, torch.bfloat16: 8, torch.float32: 24, torch.float64: 53}  # random bits of a uniform number
HASH_OPERATIONS, NORMAL_OPERATIONS = 6, 900
LARGEST_NORMAL = 6.0  # more than a normal number made of 24 bits can be

SIGNATURE = (
    "(Tensor seed, SymInt[] shape, str kind, *, float p=1., ScalarType dtype, Device device, int[] order=[]) -> Tensor"
)
_library = torch.library.Library("jointtrace", "DEF")
_library.define("seeds(int count, Device device) -> Tensor[]", tags=(torch.Tag.nondeterministic_seeded,))
_library.define("counter_draw" + SIGNATURE)
_library.define("generator_draw" + SIGNATURE)


@torch.library.impl(_library, "seeds", "CompositeExplicitAutograd")
def _seeds(count: int, device: torch.device) -> list[torch.Tensor]:
    # one by one: results that shared memory would be an error in a torch operator
    return [torch.randint(2**63 - 1, (), device=device) for _ in range(count)]


@torch.library.register_fake("jointtrace::seeds", lib=_library)
def _fake_seeds(count: int, device: torch.device) -> list[torch.Tensor]:
    return [torch.empty((), dtype=torch.int64, device=device) for _ in range(count)]


@torch.library.impl(_library, "counter_draw", "CompositeImplicitAutograd")
def _counter_draw(
    seed: torch.Tensor, shape: Sequence[int], kind: str, *, p: float = 1.0, dtype: torch.dtype, device: torch.device,
    order: Sequence[int] = (),
) -> torch.Tensor:
    """Draw numbers of a kind: "uniform" in [0, 1), "normal", "bernoulli" (true with probability `p`), "bits" (62).

    Args:
        seed: int64, without dimensions, at least 0; on `device`.
        shape: sizes of the result.
        kind: what to draw; the numbers depend on it.
        p: of "bernoulli" only.
        dtype: of the result; of "uniform" and "normal" as `counter_draws` accepts.
        device: of the result.
        order: dimensions from the one with the largest stride to the one with the smallest; row-major where empty.
    """

    def make(sizes: Sequence[int]) -> torch.Tensor:
        positions = torch.arange(math.prod(sizes), dtype=torch.int64, device=device).view(sizes)
        return KINDS[kind](positions.bitwise_xor(seed), p, dtype)

    return _in_order(make, shape, order)


@torch.library.impl(_library, "generator_draw", "CompositeExplicitAutograd")
def _generator_draw(
    seed: torch.Tensor, shape: Sequence[int], kind: str, *, p: float = 1.0, dtype: torch.dtype, device: torch.device,
    order: Sequence[int] = (),
) -> torch.Tensor:
    """Draw the same kinds of numbers as `counter_draw`; `seed` is on the CPU, so that no device is waited for."""
    generator = torch.Generator(device).manual_seed(int(seed))

    def make(sizes: Sequence[int]) -> torch.Tensor:
        empty = torch.empty(sizes, dtype=dtype, device=device)
        if kind == "uniform":
            return empty.uniform_(generator=generator)
        if kind == "normal":
            return empty.normal_(generator=generator)
        if kind == "bernoulli":
            return empty.bernoulli_(p, generator=generator)
        return empty.random_(2**62, generator=generator)

    return _in_order(make, shape, order)


@torch.library.register_fake("jointtrace::generator_draw", lib=_library)
def _fake_generator_draw(
    seed: torch.Tensor, shape: Sequence[int], kind: str, *, p: float = 1.0, dtype: torch.dtype, device: torch.device,
    order: Sequence[int] = (),
) -> torch.Tensor:
    return _in_order(lambda sizes: torch.empty(sizes, dtype=dtype, device=device), shape, order)


RUN_AS_THEY_STAND = (torch.ops.jointtrace.seeds.default, torch.ops.jointtrace.generator_draw.default)
"""What a compiler could only call, so that a region gains nothing by it."""


def counter_draws(kind: str, dtype: torch.dtype) -> bool:
    """Whether `counter_draw` makes numbers of this kind and dtype as finely grained as torch does."""
    return kind in ("bernoulli", "bits") or (dtype in DIGITS and (kind, dtype) != ("normal", torch.float64))


def operations(target: Any, args: tuple[Any, ...]) -> float:
    """Return how many elementwise ops a draw is worth for each element; 1 where `target` is no draw.

    Measured in a compiled loop beside `exp` (0.13 ns): 0.7 ns for a hash, 114 ns for a normal number.
    """
    if target not in (torch.ops.jointtrace.counter_draw.default, torch.ops.jointtrace.generator_draw.default):
        return 1
    return NORMAL_OPERATIONS if "normal" in args else HASH_OPERATIONS


def _in_order(
    make: Callable[[Sequence[int]], torch.Tensor], shape: Sequence[int], order: Sequence[int]
) -> torch.Tensor:
    if not order:
        return make(shape)
    back = [order.index(dim) for dim in range(len(order))]
    return make([shape[dim] for dim in order]).permute(back)


def _uniform(keyed: torch.Tensor, p: float, dtype: torch.dtype) -> torch.Tensor:
    digits = DIGITS[dtype]
    number = _word(keyed) >> max(0, 32 - digits)
    if digits > 32:
        number = (number << (digits - 32)) + (_word(keyed, SECOND_WORD) >> (64 - digits))
    return (number.to(torch.float64 if digits > 32 else torch.float32) * 2.0**-digits).to(dtype)


def _normal(keyed: torch.Tensor, p: float, dtype: torch.dtype) -> torch.Tensor:
    between = ((_word(keyed) >> 8).to(torch.float64) + (0.5 - 2**23)) * 2.0**-23  # -1 and 1, without either
    number = (torch.erfinv(between) * math.sqrt(2)).to(torch.float32)
    # no number is that large: this keeps compilers from leaving out the rounding to float32 before the next step
    return number.clamp(-LARGEST_NORMAL, LARGEST_NORMAL).to(dtype)


def _bernoulli(keyed: torch.Tensor, p: float, dtype: torch.dtype) -> torch.Tensor:
    return (_word(keyed) < round(p * 2**32)).to(dtype)


def _bits(keyed: torch.Tensor, p: float, dtype: torch.dtype) -> torch.Tensor:
    return (((_word(keyed) >> 1) << 31) + (_word(keyed, SECOND_WORD) >> 1)).to(dtype)


KINDS = {"uniform": _uniform, "normal": _normal, "bernoulli": _bernoulli, "bits": _bits}


def _word(keyed: torch.Tensor, which: int = 0) -> torch.Tensor:
    """Return 32 random bits for each element of seed xor position."""
    return _mix(_mix((_mix(keyed & MASK) + (keyed >> 32) + which) & MASK))


def _mix(word: torch.Tensor) -> torch.Tensor:
    """Hash 32 bits; the factors have 31, so that no product overflows int64."""
    word = word ^ (word >> 16)
    word = (word * 0x21F0AAAD) & MASK
    word = word ^ (word >> 15)
    word = (word * 0x735A2D97) & MASK
    return word ^ (word >> 15)
