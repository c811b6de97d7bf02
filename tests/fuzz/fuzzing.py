"""Bytes of peers, mutated at random, into the functions that read them.

    python tests/fuzz/fuzzing.py [--target NAME]... [--seconds N] [--seed N] [--keep]

A *target* reads bytes. It returns, or raises an error of kvplug's; anything else is a fault, and so is a call
that takes longer than a second. Inputs that do something new (another result, another error) are mutated
further. ``--keep`` adds them to the corpus, from which later runs begin. The input of a fault is written to
``found``, where it is a test case from then on.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from kvplug import KvplugError

HERE: Final = Path(__file__).parent
CORPUS, FOUND = HERE / "corpus", HERE / "found"
LIMIT_S: Final = 1.0
_ODD: Final = (0, 1, 2, 0x7F, 0x80, 0xC1, 0xD4, 0xDC, 0xDD, 0xDF, 0xFE, 0xFF)
_WIDTHS: Final = (1, 2, 4, 8)
_LONGEST: Final = 1 << 16

Target = Callable[[bytes], object]


class FaultError(AssertionError):
    """A target did with an input what it must not do."""


def call(name: str, target: Target, data: bytes) -> str:
    """What the target did: what it returned, or where it raised an error.

    Raises:
        FaultError: it raised something foreign, or took too long.
    """
    begun = time.monotonic()
    try:
        result = f"returned {type(target(data)).__name__}"
    except KvplugError as e:
        frames = traceback.extract_tb(e.__traceback__)
        result = f"{type(e).__name__} at " + " ".join(f"{each.name}:{each.lineno}" for each in frames[1:])
    except Exception as e:
        raise FaultError(f"{name} raised {type(e).__name__}: {e}") from e
    if (seconds := time.monotonic() - begun) > LIMIT_S:
        raise FaultError(f"{name} took {seconds:.1f} s")
    return result


def mutated(data: bytes, others: Sequence[bytes], rng: random.Random) -> bytes:
    """A copy with a few changes."""
    made = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 6))):
        at = rng.randrange(len(made) + 1)
        length = min(len(made) - at, rng.choice((1, 1, 2, 4, 8, 32)))
        match rng.randrange(8):
            case 0 if at < len(made):
                made[at] ^= 1 << rng.randrange(8)
            case 1 if at < len(made):
                made[at] = rng.choice(_ODD)
            case 2:
                del made[at : at + length]
            case 3:
                made[at:at] = made[at : at + length] * rng.choice((1, 2, 50))
            case 4:
                made[at:at] = rng.randbytes(rng.choice((1, 2, 4, 16)))
            case 5:
                width = rng.choice(_WIDTHS)
                number = rng.choice((0, 1, 2**31 - 1, 2**31, 2**63 - 1, 2**64 - 1, len(made)))
                order = rng.choice(("little", "big"))
                made[at : at + width] = (number % 2 ** (8 * width)).to_bytes(width, order)
            case 6:
                other = rng.choice(others)
                begin = rng.randrange(len(other) + 1)
                made[at : at + length] = other[begin : begin + rng.choice((1, 4, 16, 64))]
            case _:
                del made[at:]
    return bytes(made[:_LONGEST])


def kept(folder: Path, name: str) -> list[bytes]:
    """The inputs of a target that a folder holds, one in hexadecimal on each line."""
    file = folder / f"{name}.hex"
    return [bytes.fromhex(line) for line in file.read_text().split()] if file.exists() else []


def keep(folder: Path, name: str, inputs: Sequence[bytes]) -> None:
    """Add inputs to those that a folder holds."""
    folder.mkdir(exist_ok=True)
    lines = dict.fromkeys(data.hex() for data in (*kept(folder, name), *inputs) if data)
    (folder / f"{name}.hex").write_text("".join(f"{line}\n" for line in sorted(lines, key=len)))


def fuzz(
    name: str, target: Target, seeds: Sequence[bytes], *, seconds: float, seed: int
) -> Iterator[tuple[int, bytes]]:
    """Yields inputs that did something new, each with the number of calls so far; the seeds first.

    Raises:
        FaultError: at the first fault, whose input was written to ``found``.
    """
    rng, seen, pool = random.Random(seed), set[str](), list[bytes]()
    until, count = time.monotonic() + seconds, 0
    begins = [*seeds, *kept(CORPUS, name)]
    while count < len(begins) or time.monotonic() < until:
        data = (
            begins[count] if count < len(begins) else mutated(rng.choice(pool or [b""]), pool or [b""], rng)
        )
        count += 1
        try:
            what = call(name, target, data)
        except FaultError:
            keep(FOUND, name, [data])
            raise
        if what not in seen:
            seen.add(what)
            pool.append(data)
            yield count, data


def main(targets: Mapping[str, tuple[Target, Sequence[bytes]]]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", action="append", choices=sorted(targets), help="by default all, in turn")
    parser.add_argument("--seconds", type=float, default=60.0, help="for each target (default 60)")
    parser.add_argument("--seed", type=int, default=0, help="of the random changes (default 0: new ones)")
    parser.add_argument("--keep", action="store_true", help="add what is new to the corpus")
    given = parser.parse_args()
    seed, faults = given.seed or random.SystemRandom().randrange(1, 2**32), 0
    for name in given.target or sorted(targets):
        target, seeds = targets[name]
        last, new = 0, list[bytes]()
        try:
            for count, data in fuzz(name, target, seeds, seconds=given.seconds, seed=seed):
                last = count
                new.append(data)
                if sys.stderr.isatty():
                    print(f"\r{name}: {len(new)} different inputs", end="", file=sys.stderr)
            print(f"{name}: {len(new)} different inputs, the last after {last} calls; seed {seed}")
        except FaultError as e:
            faults += 1
            digest = hashlib.sha256(str(e).encode()).hexdigest()[:8]
            print(f"{name}: FAULT {digest}: {e}; its input is in {FOUND / name}.hex; seed {seed}")
        if given.keep:
            keep(CORPUS, name, new)
    return 1 if faults else 0


if __name__ == "__main__":
    import fuzz_targets

    sys.exit(main(fuzz_targets.ALL))
