"""Batches of CIFAR-10: genuine pickles give their arrays, hostile ones run nothing."""

import os
import pickle
import struct

import numpy as np
import pytest

from revit.data.cifar_batches import read_binary, read_pickled

RNG = np.random.default_rng(0)
PIXELS = RNG.integers(0, 256, (4, 3072), dtype=np.uint8)
LABELS = [6, 9, 0, 1]


def python2_pickle(pixels=PIXELS, labels=LABELS, kind=b"u1", raw=None):
    """A batch with the opcodes that Python 2's cPickle wrote: protocol 2, names and pixels as 8-bit strings."""
    raw = pixels.tobytes() if raw is None else raw
    number = lambda value: b"M" + struct.pack("<H", value)  # noqa: E731
    text = lambda value: b"U" + bytes([len(value)]) + value  # noqa: E731
    names = b"".join(text(b"leptodactylus_pentadactylus_s_%06d.png" % i) for i in range(len(labels)))
    return (
        b"\x80\x02}q\x01(" + text(b"batch_label") + b"q\x02" + text(b"training batch 1 of 5") + b"q\x03"
        + text(b"labels") + b"q\x04]q\x05(" + b"".join(b"K" + bytes([label]) for label in labels) + b"e"
        + text(b"data") + b"q\x06cnumpy.core.multiarray\n_reconstruct\nq\x07cnumpy\nndarray\nq\x08K\x00\x85q\x09" + text(b"b")
        + b"q\x0a\x87q\x0bRq\x0c(K\x01" + number(len(pixels)) + number(3072) + b"\x86q\x0d"
        + b"cnumpy\ndtype\nq\x0e" + text(kind) + b"q\x0fK\x00K\x01\x87q\x10Rq\x11(K\x03" + text(b"|")
        + b"q\x12NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tq\x13b\x89T" + struct.pack("<I", len(raw)) + raw + b"q\x14tq\x15b"
        + text(b"filenames") + b"q\x16]q\x17(" + names + b"eu."
    )  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*numpy.core.*:DeprecationWarning")
def test_the_handmade_pickle_is_genuine():
    content = pickle.loads(python2_pickle(), encoding="latin1")
    np.testing.assert_array_equal(content["data"], PIXELS)
    assert content["labels"] == LABELS and content["filenames"][3] == "leptodactylus_pentadactylus_s_000003.png"


def pickled(content=None, protocol=2):
    return pickle.dumps({"data": PIXELS, "labels": LABELS} if content is None else content, protocol)


@pytest.mark.parametrize(
    "data",
    [python2_pickle(), pickled(protocol=2), pickled(protocol=4), pickled({b"data": PIXELS, b"labels": LABELS}, 3)],
    ids=["Python 2", "protocol 2", "protocol 4", "bytes keys"],
)
def test_python_batches(data):
    images, labels = read_pickled(data, "batch", 4)
    assert images.shape == (4, 3, 32, 32) and images.dtype == np.uint8 and labels.tolist() == LABELS
    for channel in range(3):  # 1,024 red values row after row, then green, then blue
        np.testing.assert_array_equal(images[:, channel].reshape(4, 1024), PIXELS[:, 1024 * channel : 1024 * (channel + 1)])


def test_binary_batches(refused):
    data = np.column_stack((np.array(LABELS, np.uint8), PIXELS)).tobytes()
    for mine, theirs in zip(read_binary(data, "batch", 4), read_pickled(python2_pickle(), "batch", 4), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    for wrong in (data[:-1], data + b"0", b""):
        with refused("batch.bin", f"{len(wrong):,} bytes instead of 12,292"):
            read_binary(wrong, "batch.bin", 4)
    with refused("batch.bin", "label 10 is not one of the classes"):
        read_binary(b"\x0a" + data[1:], "batch.bin", 4)


class Runs:
    """An object whose pickle calls a function."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def hostile(canary):
    """Payloads that make a file when a plain pickle loader reads them."""
    command, code = f"touch {canary}", f"open({str(canary)!r}, 'w').close()"
    by_name = b"cos\nsystem\n(S" + repr(command).encode() + b"\ntR."
    return {
        "os.system": pickled(Runs(os.system, command)),
        "eval": pickled(Runs(eval, code)),
        "exec, protocol 4": pickled(Runs(exec, code), 4),
        "in labels": pickled({"data": PIXELS, "labels": [Runs(os.system, command)]}),
        "in data": pickled({"data": Runs(os.system, command), "labels": LABELS}),
        "in a key": pickled({Runs(eval, f"{code} or 1"): PIXELS}),
        "after a genuine batch": python2_pickle()[:-1] + by_name,
        "behind numpy's name": pickled([PIXELS, Runs(eval, code)]),
        "protocol 0": by_name,
        "INST": b"(S" + repr(command).encode() + b"\nios\nsystem\n.",
        "OBJ": b"(cos\nsystem\nS" + repr(command).encode() + b"\no.",
        "getattr": b"cbuiltins\ngetattr\n(cos\nsystem\nS'__call__'\ntR(S"
        + repr(command).encode() + b"\ntR.",
    }  # fmt: skip


@pytest.mark.parametrize("name", list(hostile("x")))
def test_nothing_runs(tmp_path, refused, name):
    canary = tmp_path / "canary"
    payload = hostile(canary)[name]
    if name != "after a genuine batch":  # whose numpy names warn in a plain loader
        pickle.loads(payload)
        assert canary.exists()  # so the payload works where it is let in
        canary.unlink()
    with refused("data_batch_1", "asks for", "do not use this file"):
        read_pickled(payload, "data_batch_1", 4)
    assert not canary.exists()


@pytest.mark.parametrize(
    "payload",
    [
        b"c_codecs\nencode\n(S'x'\nS'rot13'\ntR.",
        b"c_codecs\nencode\n(K\x01S'latin1'\ntR.",
        b"cnumpy\nndarray\n}S'name'\nS'other'\nsb.",  # BUILD on a name
        b"cnumpy\nndarray\n(N}S'name'\nS'other'\nstb.",
        b"\x80\x02cnumpy\nndarray\n)\x81.",  # NEWOBJ
        b"S'x'\nP1\n.",
        b"\x80\x05\x97.",
        b"",
        b"garbage",
        python2_pickle()[:-1],
        python2_pickle()[:5000],
        b"K\x01r\xff\xff\xff\xff.",  # a memo of 4 billion entries
        b"K\x01p99999999999\n.",
        b"(lp0\n.",
        b"K\x01.",
        b"}.",
        pickled({"labels": LABELS}),
        pickled({"data": PIXELS}),
        pickled({"data": PIXELS.astype(np.int16), "labels": LABELS}),
        pickled({"data": np.asfortranarray(PIXELS), "labels": LABELS}),
        pickled({"data": PIXELS.reshape(4, 3, 32, 32), "labels": LABELS}),
        pickled({"data": PIXELS[:3], "labels": LABELS}),
        pickled({"data": PIXELS, "labels": LABELS[:3]}),
        pickled({"data": PIXELS, "labels": [6, 9, 0, 10]}),
        pickled({"data": PIXELS, "labels": [6, 9, 0, -1]}),
        pickled({"data": PIXELS, "labels": [6, 9, 0, True]}),
        pickled({"data": PIXELS, "labels": [6, 9, 0, "1"]}),
        pickled({"data": PIXELS, "labels": tuple(LABELS)}),
        pickled({"data": b"bytes", "labels": LABELS}),
        python2_pickle(kind=b"O8"),
        python2_pickle(raw=PIXELS.tobytes()[:-1]),
        python2_pickle(raw=b""),
    ],
)
def test_broken_batches(refused, payload):
    with refused("data_batch_1", "download it again"):
        read_pickled(payload, "data_batch_1", 4)
