"""Corpora are fetched whole and right, through bad servers, networks and disks; nothing half-written is left."""

import contextlib
import errno
import gzip
import hashlib
import io
import os
import random
import resource
import signal
import subprocess
import sys
import textwrap
import threading
import time
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

pytest.importorskip("pooch")

from sigsoftmax import cli
from sigsoftmax.lm.data import download_files
from sigsoftmax.lm.data import fetch as fetching
from sigsoftmax.lm.data.corpus_files import cache_folder, find
from sigsoftmax.lm.data.download_files import open_again, open_new
from sigsoftmax.lm.data.fetch import BLOCK, fetch, terminal_progress
from sigsoftmax.lm.data.published_corpora import PUBLISHED, PublishedCorpus, PublishedFile
from sigsoftmax.terminal import ACTIVE

TEXTS = {
    "train": b"".join(b"sentence %d of the training text\n" % i for i in range(20_000)),
    "valid": b"a few words\n",
    "test": b"a few others\n",
}


class Endless:
    """Is sent for as long as someone takes it."""

    def __len__(self):
        return 1 << 40


class Server(ThreadingHTTPServer):
    """Serves ``files`` by path; ``faults`` are taken one a request, and ``requests`` remembers what was asked."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.files, self.faults, self.requests = {}, [], []
        self.ranges = self.says_length = True
        self.headers, self.reason, self.sent = {}, None, 0

    @property
    def address(self):
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request, client_address):
        pass


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def do_GET(self):
        server = self.server
        asked = self.headers.get("Range")
        server.requests.append((self.path, asked))
        fault = server.faults.pop(0) if server.faults else None
        content = server.files.get(self.path)
        if content is None or fault == "gone":
            return self.send_error(404, server.reason)
        start = int(asked.removeprefix("bytes=").removesuffix("-")) if asked and server.ranges else 0
        if start >= len(content):
            return self.send_error(416)
        self.send_response(206 if start else 200)
        if server.says_length:
            self.send_header("Content-Length", str(len(content) - start))
        for name, value in server.headers.items():
            self.send_header(name, value)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.end_headers()
        if isinstance(content, Endless):
            with contextlib.suppress(OSError):
                while server.sent < 1 << 28:
                    server.sent += self.wfile.write(bytes(1 << 16))
            return None
        body = content[start:]
        if isinstance(fault, int):
            self.wfile.write(body[:fault])
            self.close_connection = True
            return None
        if fault == "slow":
            for at in range(0, len(body), 20_000):
                self.wfile.write(body[at : at + 20_000])
                time.sleep(0.05)
            return None
        return self.wfile.write(body)


def published_at(*addresses, files):
    return PublishedCorpus(files=files, addresses=addresses, upstream_name="small.{split}.txt", checksum="")


@pytest.fixture
def server(monkeypatch):
    for variable in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(variable, raising=False)
    server = Server()
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    server.files = {f"/good/{split}.txt": text for split, text in TEXTS.items()}
    monkeypatch.setattr(fetching, "PAUSE", 0.0)
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def corpus(server, monkeypatch):
    """Makes the named mirrors of the local server the addresses of a corpus ``small``."""

    def publish(*mirrors):
        files = {split: PublishedFile(len(text), hashlib.sha256(text).hexdigest()) for split, text in TEXTS.items()}
        addresses = [f"{server.address}/{mirror}" for mirror in mirrors]
        monkeypatch.setitem(PUBLISHED, "small", published_at(*addresses, files=files))

    publish("good/{split}.txt")
    return publish


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


COMPLETE = {f"{split}.txt": text for split, text in TEXTS.items()}


@pytest.mark.usefixtures("corpus")
def test_a_corpus_is_put_into_a_folder_of_its_name_and_kept_there(server, tmp_path):
    seen = []
    folder = fetch("small", tmp_path, watch=lambda *progress: seen.append(progress))
    assert folder == tmp_path / "small"
    assert contents(folder) == COMPLETE
    assert ("train.txt", len(TEXTS["train"]), len(TEXTS["train"])) in seen
    assert [arrived for name, arrived, _ in seen if name == "train.txt"] == sorted(
        arrived for name, arrived, _ in seen if name == "train.txt"
    )
    asked = len(server.requests)
    assert fetch("small", tmp_path) == folder
    assert len(server.requests) == asked


@pytest.mark.usefixtures("corpus", "server")
def test_without_a_folder_it_goes_where_it_is_looked_for(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("SIGSOFTMAX_DATA", raising=False)
    monkeypatch.setitem(PUBLISHED, "ptb", PUBLISHED["small"])
    assert fetch("ptb") == cache_folder() / "ptb"
    assert find("ptb") == (cache_folder() / "ptb", "ptb")


def test_addresses_are_tried_in_turn(server, corpus, tmp_path):
    corpus("gone/{split}.txt", "bad/{split}.txt", "good/{split}.txt")
    server.files |= {f"/bad/{split}.txt": text.swapcase() for split, text in TEXTS.items()}
    assert contents(fetch("small", tmp_path)) == COMPLETE
    assert [path for path, _ in server.requests[:3]] == ["/gone/train.txt", "/bad/train.txt", "/good/train.txt"]


@pytest.mark.parametrize("wrong", [b"<html>log in first</html>", TEXTS["train"] + b"more", TEXTS["train"].swapcase()])
def test_a_wrong_file_is_refused_and_nothing_is_left_under_its_name(server, corpus, tmp_path, wrong):
    corpus("bad/{split}.txt", "gone/{split}.txt")
    server.files["/bad/train.txt"] = wrong
    with pytest.raises(OSError, match=r"could not fetch train\.txt of small; tried") as error:
        fetch("small", tmp_path)
    assert "/bad/train.txt: " in str(error.value)
    assert "/gone/train.txt: the server answered 404 Not Found" in str(error.value)
    assert "--data FOLDER" in str(error.value)
    assert not list((tmp_path / "small").glob("*.txt"))


@pytest.mark.usefixtures("corpus")
def test_a_cut_connection_is_taken_up_where_it_broke(server, tmp_path):
    server.faults = [12 * BLOCK + 100, 3 * BLOCK]
    assert contents(fetch("small", tmp_path)) == COMPLETE
    assert [asked for path, asked in server.requests if path == "/good/train.txt"] == [
        None,
        f"bytes={12 * BLOCK}-",
        f"bytes={15 * BLOCK}-",
    ]


@pytest.mark.usefixtures("corpus")
def test_a_fetch_that_failed_goes_on_when_called_again(server, tmp_path):
    server.faults = [12 * BLOCK, 0, 0]
    with pytest.raises(OSError, match=r"/good/train\.txt: .*\n.*what has arrived is kept"):
        fetch("small", tmp_path)
    assert not list((tmp_path / "small").glob("*.txt"))
    server.requests.clear()
    assert contents(fetch("small", tmp_path)) == COMPLETE
    assert server.requests[0] == ("/good/train.txt", f"bytes={12 * BLOCK}-")


@pytest.mark.usefixtures("corpus")
def test_a_server_without_ranges_sends_it_all_again(server, tmp_path):
    server.ranges = False
    server.faults = [100_000]
    assert contents(fetch("small", tmp_path)) == COMPLETE


@pytest.mark.usefixtures("corpus")
@pytest.mark.parametrize("size", [1000, len(TEXTS["train"]), len(TEXTS["train"]) + 9])
def test_a_part_of_something_else_is_thrown_away(tmp_path, size, server):
    waiting = tmp_path / "small" / ".download"
    waiting.mkdir(parents=True)
    (waiting / "train.txt.part").write_bytes(b"?" * size)
    assert contents(fetch("small", tmp_path)) == COMPLETE
    assert server.requests[-3 if size != 1000 else -4][0] == "/good/train.txt"


@pytest.mark.usefixtures("corpus")
def test_a_part_that_is_complete_is_not_fetched_again(tmp_path, server):
    waiting = tmp_path / "small" / ".download"
    waiting.mkdir(parents=True)
    (waiting / "train.txt.part").write_bytes(TEXTS["train"])
    assert contents(fetch("small", tmp_path)) == COMPLETE
    assert {path for path, _ in server.requests} == {"/good/valid.txt", "/good/test.txt"}


def test_files_can_come_out_of_an_archive(server, corpus, tmp_path):
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for split, text in TEXTS.items():
            archive.writestr(f"inner/wiki.{split}.tokens", text)
    server.files["/all.zip"] = packed.getvalue()
    corpus("gone/{split}.txt", "all.zip#inner/wiki.{split}.tokens")
    assert contents(fetch("small", tmp_path)) == COMPLETE
    assert [path for path, _ in server.requests].count("/all.zip") == 1


@pytest.mark.parametrize("wrong", ["no archive", "no member", "another text"])
def test_archives_that_are_no_good_are_refused(server, corpus, tmp_path, wrong):
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("inner/train.txt" if wrong == "another text" else "other", b"?")
    server.files["/all.zip"] = b"nothing" if wrong == "no archive" else packed.getvalue()
    corpus("all.zip#inner/{split}.txt")
    with pytest.raises(OSError, match=r"all\.zip#inner/train\.txt: (no archive with|.*is not the published file)"):
        fetch("small", tmp_path)
    assert not (tmp_path / "small").exists()


def zipped(**members):
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return packed.getvalue()


@contextlib.contextmanager
def most_bytes_in(folder):
    """The most that all files of a folder held together while this was open, looked at every few milliseconds."""
    found, ended = [0], threading.Event()

    def look():
        while not ended.wait(0.002):
            with contextlib.suppress(OSError):
                found[0] = max(found[0], sum(p.lstat().st_size for p in folder.rglob("*") if p.is_file()))

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        yield found
    finally:
        ended.set()
        watcher.join()


def test_an_archive_is_not_unpacked_beyond_the_published_size(server, corpus, tmp_path):
    server.files["/all.zip"] = zipped(train=bytes(200 << 20))
    assert len(server.files["/all.zip"]) < 1 << 18
    corpus("all.zip#{split}")
    with most_bytes_in(tmp_path) as most, pytest.raises(OSError, match=r"it is longer than [\d,]+ bytes"):
        fetch("small", tmp_path)
    assert most[0] <= len(TEXTS["train"]) + len(server.files["/all.zip"])
    assert not (tmp_path / "small").exists()


@pytest.mark.parametrize("says_its_length", [True, False])
@pytest.mark.parametrize("address", ["long/{split}.txt", "long.zip#{split}"])
def test_a_server_that_sends_too_much_is_cut_off(server, corpus, tmp_path, address, says_its_length):
    server.says_length = says_its_length
    server.files |= {"/long/train.txt": Endless(), "/long.zip": Endless()}
    corpus(address)
    with most_bytes_in(tmp_path) as most, pytest.raises(OSError, match=r"more than the [\d,]+ bytes that were"):
        fetch("small", tmp_path)
    assert most[0] <= 2 * sum(map(len, TEXTS.values()))
    assert server.sent < 1 << 26, "the connection was closed"


def test_a_server_that_compresses_is_refused(server, corpus, tmp_path):
    server.files["/good/train.txt"] = gzip.compress(bytes(1 << 24))
    server.headers = {"Content-Encoding": "gzip"}
    with pytest.raises(OSError, match=r"the encoding 'gzip', which was not asked for"):
        fetch("small", tmp_path)


def test_what_has_arrived_outlives_a_server_that_offers_too_much(server, corpus, tmp_path):
    corpus("good/{split}.txt", "long/{split}.txt")
    server.files["/long/train.txt"] = Endless()
    server.faults = [12 * BLOCK, 0, 0]
    with pytest.raises(OSError, match="more than the"):
        fetch("small", tmp_path)
    assert (tmp_path / "small" / ".download" / "train.txt.part").stat().st_size == 12 * BLOCK
    assert contents(fetch("small", tmp_path)) == COMPLETE


NAMES = ("train.txt.part", "train.txt", "all.zip.part", "all.zip")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["symlink", "dangling symlink", "hard link", "folder", "fifo"])
def test_what_is_no_file_of_ours_is_not_written_to(server, corpus, tmp_path, name, kind):
    server.files["/all.zip"] = zipped(**TEXTS)
    corpus("all.zip#{split}" if name.startswith("all") else "good/{split}.txt")
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious\n")
    waiting = tmp_path / "small" / ".download"
    waiting.mkdir(parents=True)
    obstacle = waiting / name
    if kind == "symlink":
        obstacle.symlink_to(victim)
    elif kind == "dangling symlink":
        obstacle.symlink_to(tmp_path / "nothing yet")
    elif kind == "hard link":
        obstacle.hardlink_to(victim)
    elif kind == "folder":
        (obstacle / "inside").mkdir(parents=True)
    else:
        os.mkfifo(obstacle)
    words = {"hard link": r"a file with several names \(hard links\)", "folder": "a folder", "fifo": "no file"}
    with pytest.raises(ValueError, match=rf"{name} is {words.get(kind, 'a symbolic link')}.*Nothing was written"):
        fetch("small", tmp_path)
    assert victim.read_bytes() == b"precious\n"
    assert {path.name for path in tmp_path.iterdir()} == {"small", "victim"}
    assert os.path.lexists(obstacle)


@pytest.mark.usefixtures("corpus", "server")
@pytest.mark.parametrize("kind", ["symlink", "file"])
def test_the_folder_of_a_download_is_a_folder(tmp_path, kind):
    (tmp_path / "small").mkdir()
    (tmp_path / "elsewhere").mkdir()
    if kind == "symlink":
        (tmp_path / "small" / ".download").symlink_to(tmp_path / "elsewhere")
    else:
        (tmp_path / "small" / ".download").touch()
    with pytest.raises(ValueError, match="where a folder for the download was expected; remove it"):
        fetch("small", tmp_path)
    assert not list((tmp_path / "elsewhere").iterdir())


@pytest.mark.usefixtures("corpus", "server")
def test_a_link_put_there_at_the_last_moment_is_not_followed(tmp_path):
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious\n")
    part = tmp_path / "part"
    part.symlink_to(victim)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(download_files, "check_plain", lambda path: None)
        with pytest.raises(OSError, match="symbolic link"):
            open_again(part)
        patch.setattr(Path, "unlink", lambda path, **_: None)
        with pytest.raises(FileExistsError):
            open_new(part)
    assert victim.read_bytes() == b"precious\n"


@pytest.mark.parametrize("damage", range(40))
def test_nothing_comes_of_a_damaged_archive_but_right_files_or_words(server, corpus, tmp_path, damage):
    draw = random.Random(damage)
    content = bytearray(zipped(**TEXTS))
    # The directory at the end of an archive is where damage does most.
    for place in (draw.randrange(len(content)), *(-draw.randrange(1, 200) for _ in range(4))):
        content[place] = draw.choice((0, 255, draw.randrange(256)))
    server.files["/all.zip"] = bytes(content)
    corpus("all.zip#{split}")
    with contextlib.suppress(OSError):
        assert contents(fetch("small", tmp_path)) == COMPLETE
    assert all(path.read_bytes() == COMPLETE[path.name] for path in tmp_path.glob("small/*.txt"))


def test_words_of_a_server_do_not_act_on_a_terminal(server, corpus, tmp_path, capsys):
    server.reason = "\x1b]0;title\x07 Gone \x9b2K"
    server.files.clear()
    assert cli.main(["data", "fetch", "small", "--data", str(tmp_path)]) == 1
    printed = capsys.readouterr().err
    assert r"the server answered 404 \x1b]0;title\x07 Gone" in printed
    assert ACTIVE.search(printed) is None


@pytest.mark.usefixtures("corpus", "server")
def test_a_file_of_the_users_is_not_overwritten_and_a_damaged_one_of_ours_is(tmp_path, monkeypatch):
    folder = tmp_path / "small"
    folder.mkdir()
    (folder / "train.txt").write_bytes(b"my own text\n")
    with pytest.raises(ValueError, match=r"train\.txt is there already and is not that of 'small'; remove it"):
        fetch("small", tmp_path)
    assert (folder / "train.txt").read_bytes() == b"my own text\n"
    monkeypatch.setattr(fetching, "cache_folder", lambda: tmp_path)
    assert contents(fetch("small")) == COMPLETE


@pytest.mark.usefixtures("corpus", "server")
def test_a_full_disk_is_explained_and_overcome_later(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 18, limits[1]))
    try:
        with pytest.raises(OSError, match=r"could not write to .*small: .*; small needs 1 MiB there") as error:
            fetch("small", tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert error.value.errno == errno.EFBIG
    assert not list((tmp_path / "small").glob("*.txt"))
    assert contents(fetch("small", tmp_path)) == COMPLETE


@pytest.mark.usefixtures("corpus")
def test_a_folder_that_cannot_be_is_explained(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=r"could not write to .*: Not a directory"):
        fetch("small", tmp_path / "file")


USER = textwrap.dedent("""
    import sys
    from sigsoftmax.lm.data.fetch import fetch
    from sigsoftmax.lm.data.published_corpora import PUBLISHED, PublishedCorpus, PublishedFile
    address, folder, size, sha256 = sys.argv[1:]
    files, addresses = {"train": PublishedFile(int(size), sha256)}, (address + "/good/{split}.txt",)
    PUBLISHED["small"] = PublishedCorpus(files=files, addresses=addresses, upstream_name="{split}", checksum="")
    fetch("small", folder, watch=lambda *p: (sys.stderr.write("."), sys.stderr.flush()))
""")


@pytest.mark.usefixtures("corpus")
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGKILL])
def test_stopped_by_its_user_it_goes_on_next_time(server, tmp_path, sent):
    server.faults = ["slow"]
    text = TEXTS["train"]
    arguments = [server.address, str(tmp_path), str(len(text)), hashlib.sha256(text).hexdigest()]
    user = subprocess.Popen([sys.executable, "-c", USER, *arguments], stderr=subprocess.PIPE)
    user.stderr.read(3)
    user.send_signal(sent)
    user.communicate()
    assert user.returncode != 0
    assert not list((tmp_path / "small").glob("*.txt"))
    assert (tmp_path / "small" / ".download" / "train.txt.part").stat().st_size > 0
    server.requests.clear()
    assert contents(fetch("small", tmp_path)) == COMPLETE
    assert server.requests[0][1] is not None, "it asked for the rest alone"


def test_what_cannot_be_fetched_is_refused(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"no published corpus 'wikitxt-2' \(did you mean 'wikitext-2'\?\); there are"):
        fetch("wikitxt-2", tmp_path)
    monkeypatch.setitem(sys.modules, "pooch", None)
    with pytest.raises(ValueError, match=r"fetched with pooch; pip install '\.\[lm\]' .* brings it"):
        fetch("ptb", tmp_path)


def test_no_server_at_all_is_said_in_few_words(monkeypatch, tmp_path):
    monkeypatch.setattr(fetching, "PAUSE", 0.0)
    nowhere = published_at("http://127.0.0.1:1/{split}.txt", files=PUBLISHED["ptb"].files)
    monkeypatch.setitem(PUBLISHED, "small", nowhere)
    with pytest.raises(OSError, match=r"http://127\.0\.0\.1:1/train\.txt: .*[Cc]onnection refused"):
        fetch("small", tmp_path)


def test_without_a_terminal_progress_is_a_line_a_file(capsys):
    with terminal_progress() as watch:
        for arrived in (10, 20, 20):
            watch("train.txt", arrived, 20)
        watch("unknown.zip", 5, 0)
    assert capsys.readouterr().err == "train.txt: 20 bytes\n"


def test_on_a_terminal_progress_is_a_bar(monkeypatch, capsys):
    pytest.importorskip("rich")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    with terminal_progress() as watch:
        watch("train.txt", 10, 20)
        watch("train.txt", 20, 20)
        watch("unknown.zip", 5, 0)
    assert "train.txt" in capsys.readouterr().err
