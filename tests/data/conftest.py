"""Shared by the tests of data: a cache folder of their own, and the check of a refusal."""

from contextlib import contextmanager

import pytest

from revit.data.spec import DataError


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    """No test reads or leaves anything in the user's cache or data."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("REVIT_CACHE", str(folder))
    monkeypatch.delenv("REVIT_DATA", raising=False)
    return folder


@pytest.fixture
def refused():
    """`with refused("file.npz", "labels"):` expects a DataError of one line that has these words."""

    @contextmanager
    def check(*words):
        with pytest.raises(DataError) as caught:
            yield
        message = str(caught.value)
        assert "\n" not in message
        for word in words:
            assert str(word) in message, f"{word!r} is not in {message!r}"

    return check
