"""Counting what was tried and what was lost."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class Tally:
    """Trials of one scenario. A trial whose block raises is lost; the others survived."""

    tried: int = 0
    lost: list[str] = field(default_factory=list)

    @contextmanager
    def trial(self, what: str) -> Iterator[None]:
        self.tried += 1
        try:
            yield
        except Exception as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            self.lost.append(f"{what}: {reason[:600]}")


@contextmanager
def refused(kinds: type[Exception] | tuple[type[Exception], ...], *words: object) -> Iterator[None]:
    """The block must raise one of these errors, in one line that has these words. Anything else is a silent acceptance."""
    try:
        yield
    except kinds as error:
        text = str(error)
        assert "\n" not in text, f"several lines: {text!r}"
        missing = [str(word) for word in words if str(word) not in text]
        assert not missing, f"{missing} not in {text!r}"
    else:
        raise AssertionError("accepted in silence")
