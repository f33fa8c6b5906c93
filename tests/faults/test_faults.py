"""The fault-injection suite with small counts; `make faults` has the full ones."""

import pytest
from accelerate.state import AcceleratorState

from tests.faults.machine import impatient
from tests.faults.run import ITEMS
from tests.faults.tally import Tally, refused


@pytest.fixture(autouse=True)
def surroundings(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("REVIT_CACHE", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.delenv("REVIT_DATA", raising=False)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize("item", [item for item in ITEMS if item.quick], ids=lambda item: item.name)
def test_nothing_is_lost(item, tmp_path):
    with impatient():
        tally = item.scenario(tmp_path, item.quick, 0)
    assert tally.tried >= 1 and tally.lost == []  # fewer than asked for where no disk can be mounted


def test_the_tally_counts():
    tally = Tally()
    for error in (None, ValueError("two\nlines")):
        with tally.trial("this"):
            if error:
                raise error
    assert (tally.tried, tally.lost) == (2, ["this: ValueError: two lines"])
    with tally.trial("silence"), refused(ValueError):
        pass
    with tally.trial("other words"), refused(ValueError, "name"):
        raise ValueError("something")
    with tally.trial("as it should be"), refused(ValueError, "name"):
        raise ValueError("name: fix")
    assert tally.tried == 5 and [text.split(":")[0] for text in tally.lost] == ["this", "silence", "other words"]
