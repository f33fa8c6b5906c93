"""Ctrl-C and SIGTERM as a question that the loop answers between two steps, so that nothing is lost."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class Interrupted(Exception):
    """A run that stopped because it was asked to. `code` is the exit code that shells expect."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.code = 128 + number


class StopRequest:
    """The signal that arrived, if any. A second one ends the process at once, as without us."""

    def __init__(self) -> None:
        self.number = 0

    def __bool__(self) -> bool:
        return self.number != 0

    def check(self) -> None:
        if self.number:
            raise Interrupted(self.number)


@contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Catches SIGINT and SIGTERM inside the block."""
    request = StopRequest()
    before: dict[int, Any] = {}

    def note(number: int, frame: FrameType | None) -> None:
        request.number = number
        signal.signal(number, before[number])

    for number in (signal.SIGINT, signal.SIGTERM):
        before[number] = signal.signal(number, note)
    try:
        yield request
    finally:
        for caught, handler in before.items():
            signal.signal(caught, handler)
