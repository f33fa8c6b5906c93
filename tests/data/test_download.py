"""Downloads: a server of local bytes stands in for the network."""

import email.message
import hashlib
import http.client
import io
import threading
import time
import urllib.error

import pytest

from revit.data import DataError, DataOptions
from revit.data import download as module
from revit.data.download import CIFAR10, MNIST, PCAM, ROTMNIST, Remote, checksum, dataset_folder, download, fetch

URL = "https://example.org/file.bin"
CONTENT = bytes(range(256)) * 5000
MD5 = hashlib.md5(CONTENT).hexdigest()
LIMIT = 10**7


class Response:
    def __init__(self, status, body, headers, url=URL):
        self.status, self.body, self.headers, self.url = status, io.BytesIO(body), headers, url

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None

    def geturl(self):
        return self.url

    def read(self, size):
        return self.body.read(size)


class Server:
    """Gives its content, from the asked byte on. `faults` are what it does instead at the first requests."""

    def __init__(self, content=CONTENT, *faults, resumes=True, length=True):
        self.content, self.faults, self.resumes, self.length = content, list(faults), resumes, length
        self.ranges = []

    def __call__(self, request, timeout):
        assert timeout > 0
        asked = request.get_header("Range")
        self.ranges.append(asked)
        start = int(asked.removeprefix("bytes=").removesuffix("-")) if asked and self.resumes else 0
        fault = self.faults.pop(0) if self.faults else None
        if isinstance(fault, BaseException):
            raise fault
        if start >= len(self.content) and asked:
            raise http_error(416, {"Content-Range": f"bytes */{len(self.content)}"})
        headers = {"Content-Length": str(len(self.content) - start)} if self.length else {}
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(self.content) - 1}/{len(self.content)}"
        response = Response(206 if start else 200, self.content[start:], headers)
        return fault(response) if fault else response


def http_error(code, headers=()):
    message = email.message.Message()
    for key, value in dict(headers).items():
        message[key] = value
    return urllib.error.HTTPError(URL, code, http.client.responses.get(code, ""), message, io.BytesIO())


def breaks_after(count, error=None):
    """The connection ends, or fails, after so many bytes."""

    def fault(response):
        response.body = io.BytesIO(response.body.read(count))
        if error:
            whole = response.body

            def read(size):
                data = whole.read(size)
                if not data:
                    raise error
                return data

            response.read = read
        return response

    return fault


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr(module, "PAUSE", 0)
    monkeypatch.setattr(module, "CHUNK", 100_000)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "file.bin"


def get(path, server, **options):
    download(URL, path, **({"md5": MD5, "max_bytes": LIMIT, "opener": server} | options))


def assert_done(path):
    assert path.read_bytes() == CONTENT
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_plain(path):
    server, seen = Server(), []
    get(path, server, progress=lambda have, total: seen.append((have, total)))
    assert_done(path)
    assert server.ranges == [None]
    assert seen[0] == (100_000, len(CONTENT)) and seen[-1] == (len(CONTENT), len(CONTENT))
    get(path, server)
    assert server.ranges == [None]  # it is there


def test_sha256(path, refused):
    get(path, Server(), md5=None, sha256=hashlib.sha256(CONTENT).hexdigest())
    assert_done(path)
    path.unlink()
    with refused(URL, "sha256"):
        get(path, Server(), md5=None, sha256="0" * 64)
    for sums in ({"md5": None}, {"md5": MD5, "sha256": "0"}):
        with pytest.raises(ValueError, match="give one of them"):
            get(path, Server(), **sums)


def test_server_without_length(path):
    get(path, Server(length=False))
    assert_done(path)


@pytest.mark.parametrize(
    "fault",
    [
        breaks_after(250_000),
        breaks_after(250_000, ConnectionResetError("reset")),
        breaks_after(250_000, TimeoutError("timed out")),
    ],
    ids=["end", "reset", "timeout"],
)
def test_goes_on_where_it_stopped(path, fault):
    server = Server(CONTENT, fault)
    get(path, server)
    assert_done(path)
    assert server.ranges == [None, "bytes=250000-"]


def test_goes_on_in_a_later_run(path, refused):
    with refused(URL, "4 attempts", "reset", "run again"):
        get(path, Server(CONTENT, *[breaks_after(100_000, ConnectionResetError("reset"))] * 4))
    part = path.with_name("file.bin.part")
    assert part.read_bytes() == CONTENT[:400_000] and not path.exists()
    server = Server()
    get(path, server)
    assert_done(path)
    assert server.ranges == ["bytes=400000-"]


def test_server_that_ignores_ranges(path):
    path.with_name("file.bin.part").write_bytes(b"x" * 1000)
    server = Server(resumes=False)
    get(path, server)
    assert_done(path)
    assert server.ranges == ["bytes=1000-"]


def test_server_that_sends_another_range(path):
    def shifted(response):
        response.headers["Content-Range"] = "bytes 5-10/20"
        return response

    path.with_name("file.bin.part").write_bytes(CONTENT[:1000])
    server = Server(CONTENT, shifted)
    get(path, server)
    assert_done(path)
    assert server.ranges == ["bytes=1000-", None]


def test_part_that_is_complete_or_too_long(path):
    part = path.with_name("file.bin.part")
    part.write_bytes(CONTENT)
    server = Server()
    get(path, server)
    assert_done(path)
    path.unlink()
    part.write_bytes(CONTENT + b"more")
    server = Server()
    get(path, server)
    assert_done(path)
    assert server.ranges == [f"bytes={len(CONTENT) + 4}-", None]


def test_wrong_checksum(path, refused):
    wrong = CONTENT[:-1] + b"x"
    with refused(URL, hashlib.md5(wrong).hexdigest(), MD5, "deleted"):
        get(path, Server(wrong))
    assert not path.exists() and not path.with_name("file.bin.part").exists()
    get(path, Server())
    assert_done(path)


@pytest.mark.parametrize("code", [429, 500, 503])
def test_passing_faults_are_tried_again(path, code):
    server = Server(CONTENT, http_error(code), urllib.error.URLError("no route"), TimeoutError("timed out"))
    get(path, server)
    assert_done(path)
    assert len(server.ranges) == 4


@pytest.mark.parametrize("code", [403, 404, 410])
def test_lasting_faults_are_not(path, code, refused):
    server = Server(CONTENT, http_error(code))
    with refused(URL, f"answers {code}", "address"):
        get(path, server)
    assert len(server.ranges) == 1 and not path.exists()


def test_no_network(path, refused):
    with refused(URL, "4 attempts", "Name or service not known", "network"):
        get(path, Server(CONTENT, *[urllib.error.URLError("Name or service not known")] * 4))


def test_size_limit(path, refused):
    for server in (Server(), Server(length=False)):
        with refused(URL, "at most 300,000", "not the official file"):
            get(path, server, max_bytes=300_000)
        assert not path.with_name("file.bin.part").exists()


def test_https_only(path, refused):
    for url in ("http://example.org/file.bin", "file:///etc/passwd", "ftp://example.org/x"):
        with refused(url, "not an https address"):
            download(url, path, md5=MD5, max_bytes=LIMIT, opener=Server())

    def redirected(response):
        response.url = "http://example.org/file.bin"
        return response

    with refused("http://example.org", "not an https address"):
        get(path, Server(CONTENT, redirected))
    handler = module._HttpsOnly()
    request = urllib.request.Request(URL)
    with refused("http://example.org", "not an https address"):
        handler.redirect_request(request, None, 302, "Found", {}, "http://example.org/file.bin")
    assert handler.redirect_request(request, None, 302, "Found", {}, "https://example.org/other").full_url.endswith("/other")


def test_folder_that_cannot_be_written(path, refused):
    path.write_text("")
    with refused(f"{path}: cannot be written to"):
        download(URL, path / "a", md5=MD5, max_bytes=LIMIT, opener=Server())


def test_full_disk_is_not_tried_again(path, refused, monkeypatch):
    class Full(io.BytesIO):
        def write(self, data):
            raise OSError(28, "No space left on device")

    original = module._opened
    monkeypatch.setattr(module, "_opened", lambda file, mode: Full() if file.suffix == ".part" else original(file, mode))
    server = Server()
    with refused("file.bin.part", "No space left on device", "make room"):
        get(path, server)
    assert len(server.ranges) == 1


def test_processes_do_not_fetch_twice(path):
    def slow(response):
        time.sleep(0.2)
        return response

    server = Server(CONTENT, slow, slow)
    threads = [threading.Thread(target=get, args=(path, server)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert_done(path)
    assert len(server.ranges) == 1


def test_fetch(tmp_path, monkeypatch):
    server = Server()
    monkeypatch.setattr(module.download, "__kwdefaults__", module.download.__kwdefaults__ | {"opener": server})
    remote = Remote("file.bin", URL, MD5, LIMIT)
    assert fetch(remote, tmp_path) == tmp_path / "file.bin"
    assert_done(tmp_path / "file.bin")
    with pytest.raises(DataError, match="at most 10"):
        fetch(Remote("other.bin", URL, MD5, 10), tmp_path)


def test_progress_on_a_terminal(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    assert module._terminal_line("file") is None
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    show = module._terminal_line("file")
    show(1_000_000, None)
    show(5_000_000, 10_000_000)
    show(10_000_000, 10_000_000)
    assert terminal.getvalue() == "\rfile: 1 MB\rfile: 5 of 10 MB\rfile: 10 of 10 MB\n"


def test_official_files():
    remotes = (ROTMNIST, CIFAR10, *MNIST, *PCAM)
    assert len(remotes) == 12 and len({remote.md5 for remote in remotes}) == 12
    for remote in remotes:
        assert remote.url.startswith("https://") and remote.name in remote.url
        assert len(remote.md5) == 32 and set(remote.md5) <= set("0123456789abcdef")
    # The README of the authors exchanges these two; the files are as torchvision has them.
    assert {remote.name.split("_")[4]: remote.md5[:4] for remote in PCAM if "_x" in remote.name}["valid"] == "d5b6"


def test_folder_of_a_dataset(tmp_path, cache, refused):
    assert dataset_folder(DataOptions("cifar10", root=str(tmp_path))) == tmp_path
    new = tmp_path / "a" / "b"
    with refused(new, "no such folder"):
        dataset_folder(DataOptions("cifar10", root=str(new)))
    assert dataset_folder(DataOptions("cifar10", root=str(new), download=True)) == new and new.is_dir()
    assert dataset_folder(DataOptions("cifar10", download=True)) == cache / "downloads" / "cifar10"
    assert dataset_folder(DataOptions("cifar10", file=str(tmp_path / "x.npz"))) == tmp_path
    (tmp_path / "file").write_text("")
    with refused(tmp_path / "file", "cannot be made"):
        dataset_folder(DataOptions("cifar10", root=str(tmp_path / "file" / "b"), download=True))


def test_checksum(path):
    path.write_bytes(CONTENT)
    assert checksum(path) == MD5
    assert checksum(path, "sha256") == hashlib.sha256(CONTENT).hexdigest()
