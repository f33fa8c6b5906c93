"""A mutation engine: samples of a format in, damaged ones out, each a function of the seed.

It has the moves of coverage-guided fuzzers (bits, bytes, blocks, splices, words of the format, extreme numbers) and their
feedback in a cheap form: a mutant that ends at a place in the code where none ended before becomes a sample itself, unless it
has grown: long mutants are parsed as well, but their offspring would be longer still, and a thousand times as slow.
"""

from __future__ import annotations

import random
import re
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tests.faults.tally import Tally

MAX_SAMPLES, MAX_BYTES, MAX_SECONDS = 200, 20_000, 2.0
NUMBERS = (b"0", b"-1", b"1", b"255", b"65536", b"2147483648", b"4294967295", b"9223372036854775808", b"1e999", b"9" * 5000)
BYTES = b"\x00\x01\x09\x0a\x0d\x20\x22\x27\x2c\x3a\x5b\x7b\x7f\x80\xc3\xff"


@dataclass(frozen=True)
class Target:
    """A parser, and whatever checks of its answers make sense; its named errors; samples and words of its format."""

    parse: Callable[[bytes], object]
    errors: type[Exception] | tuple[type[Exception], ...]
    samples: Sequence[bytes]
    words: Sequence[bytes]
    says: str = ""  # what an error has in it: the name of the file


def mutated(data: bytes, generator: random.Random, target: Target, samples: Sequence[bytes]) -> bytes:
    """The bytes after one to four random changes."""
    for _ in range(generator.choice((1, 1, 2, 3, 4))):
        data = _changed(data, generator, target.words, samples)[:MAX_BYTES]
    return data


def _changed(data: bytes, generator: random.Random, words: Sequence[bytes], samples: Sequence[bytes]) -> bytes:
    kind, at = generator.randrange(9), generator.randrange(len(data) + 1)
    end = min(len(data), at + generator.choice((1, 1, 2, 4, 8, 64)))
    if kind == 0 and at < len(data):
        return data[:at] + bytes((data[at] ^ 1 << generator.randrange(8),)) + data[at + 1 :]
    if kind == 1:
        return data[:at] + bytes((generator.choice(BYTES),)) + data[end:]
    if kind == 2:
        return data[:at] + data[end:]
    if kind == 3:
        return data[:at] + data[at:end] * generator.choice((2, 3, 50)) + data[end:]
    if kind == 4:
        return data[:at] + generator.choice(words) + data[generator.choice((at, end)) :]
    if kind == 5:
        other = generator.choice(samples)
        return data[:at] + other[generator.randrange(len(other) + 1) :]
    if kind == 6:
        return data[:at]
    if kind == 7:
        found = [match.span() for match in re.finditer(rb"\d+", data[:2000])]
        if found:
            begin, end = generator.choice(found)
            return data[:begin] + generator.choice(NUMBERS) + data[end:]
    size = generator.choice((1, 2, 4, 8))
    value = generator.choice((0, 1, 2**15, 2**31 - 1, 2**31, 2**63, 2**64 - 1)) % 256**size
    return data[:at] + value.to_bytes(size, generator.choice(("little", "big"))) + data[at + size :]  # type: ignore[arg-type]


def fuzz(target: Target, count: int, seed: int) -> Tally:
    """So many mutants of the samples: each is parsed, or refused by a named error of one line, in less than two seconds."""
    tally, generator, samples, seen = Tally(), random.Random(seed), list(target.samples), set[tuple[object, ...]]()
    longest = 2 * max(map(len, target.samples)) + 100
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for sample in target.samples:
            target.parse(sample)  # the samples are good: what is counted are mutations
        for number in range(count):
            mutant = mutated(generator.choice(samples), generator, target, samples)
            with tally.trial(f"mutation {number}, {mutant[:80]!r}"):
                begin, place = time.process_time(), ()
                try:
                    target.parse(mutant)
                except target.errors as error:
                    place, text = _place(error), str(error)
                    assert "\n" not in text and target.says in text and text, f"says {text[:200]!r}"
                assert time.process_time() - begin < MAX_SECONDS, f"{time.process_time() - begin:.1f} seconds"
                if place not in seen and len(mutant) <= longest:
                    seen.add(place)
                    samples = [*target.samples, *[*samples[len(target.samples) :], mutant][-MAX_SAMPLES:]]
    return tally


def _place(error: BaseException) -> tuple[object, ...]:
    """The lines where an error and its causes were raised."""
    places: list[object] = []
    cause: BaseException | None = error
    while cause is not None and len(places) < 4:
        trace = cause.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        places += [type(cause), trace and trace.tb_lineno]
        cause = cause.__cause__ or cause.__context__
    return tuple(places)
