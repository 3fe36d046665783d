"""Downloads that break, archives and checksums."""

from __future__ import annotations

import errno
import gzip
import os
import socket
import subprocess
import sys
import tarfile
import threading
import time
import tracemalloc

import pytest
from helpers.data import PAGE, impatient, md5, noise, registered, serving, small_cifar10, tar, write

from memnorm.lab import data
from memnorm.lab.data import files, registry
from memnorm.lab.data.files import Download, File
from memnorm.lab.errors import DataCorrupt, DataMissing, LabError


@pytest.fixture(autouse=True)
def _impatient(monkeypatch):
    impatient(monkeypatch)


@pytest.fixture
def site():
    with serving() as running:
        yield running


def test_a_full_disk_is_no_reason_to_try_again(site, tmp_path, monkeypatch):
    def full(_descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    item = Download(f"{site.url}/file.bin", "file.bin", len(PAGE), md5(PAGE), (File("file.bin", 5000, md5(PAGE)),))
    with pytest.raises(LabError, match=r"cannot write to .*No space left.*--data-root"):
        files.get((item,), tmp_path, lock="x")
    assert len(site.asked) == 1


def test_get_downloads_unpacks_and_removes_the_archive(site, tmp_path, monkeypatch):
    content = small_cifar10()
    site.pages["/cifar10.tar.gz"] = registered(monkeypatch, "cifar10", content, site.url)
    data.get("cifar10", tmp_path)
    for path, one in content.items():
        assert (tmp_path / path).read_bytes() == one
    visible = [one.name for one in tmp_path.iterdir() if not one.name.startswith(".")]
    assert visible == ["cifar-10-batches-py"]
    assert data.verify("cifar10", tmp_path) == []
    assert data.DATA_SETS["cifar10"].present(tmp_path)


def test_get_asks_for_nothing_where_all_is_there(site, tmp_path, monkeypatch):
    content = small_cifar10()
    registered(monkeypatch, "cifar10", content, site.url)
    write(tmp_path, content)
    data.get("cifar10", tmp_path)
    assert site.asked == []


def test_get_replaces_a_damaged_file(site, tmp_path, monkeypatch):
    content = small_cifar10()
    site.pages["/cifar10.tar.gz"] = registered(monkeypatch, "cifar10", content, site.url)
    write(tmp_path, content | {"cifar-10-batches-py/test_batch": b"rubbish"})
    data.get("cifar10", tmp_path)
    assert data.verify("cifar10", tmp_path) == []


def test_an_archive_put_there_by_hand_needs_no_network_and_stays(tmp_path, monkeypatch):
    archive = registered(monkeypatch, "cifar10", small_cifar10())
    (tmp_path / "cifar10.tar.gz").write_bytes(archive)
    data.get("cifar10", tmp_path)
    assert data.verify("cifar10", tmp_path) == []
    assert (tmp_path / "cifar10.tar.gz").read_bytes() == archive


def test_a_wrong_archive_put_there_by_hand_is_mentioned(tmp_path, monkeypatch, site):
    registered(monkeypatch, "cifar10", small_cifar10(), site.url)
    (tmp_path / "cifar10.tar.gz").write_bytes(b"wrong")
    with pytest.raises(LabError, match=f"The file there now has the MD5 {md5(b'wrong')}"):
        data.get("cifar10", tmp_path)


def test_the_lock_lets_one_process_in_at_a_time(tmp_path, monkeypatch, site):
    archive = registered(monkeypatch, "cifar10", small_cifar10(), site.url)
    site.pages["/cifar10.tar.gz"] = archive
    script = (
        "import filelock, sys, time\n"
        f"with filelock.FileLock({str(tmp_path / '.cifar10.lock')!r}):\n"
        "    print('held', flush=True); sys.stdin.read()\n"
    )
    said = []
    with subprocess.Popen([sys.executable, "-c", script], stdin=-1, stdout=-1, text=True) as holder:
        assert holder.stdout.readline() == "held\n"
        getting = threading.Thread(target=data.get, args=("cifar10", tmp_path, lambda *what: said.append(what)))
        getting.start()
        deadline = time.monotonic() + 10
        while not said and time.monotonic() < deadline:
            time.sleep(0.01)
        assert said == [("waiting for another process that gets the same data", 0, None)]
        assert site.asked == []
        holder.stdin.close()
        getting.join(10)
    assert data.verify("cifar10", tmp_path) == []


def unpack(tmp_path, archive, **wanted):
    (tmp_path / "x.tar.gz").write_bytes(archive)
    chosen = tuple(File(path.replace("__", "/"), len(one), md5(one)) for path, one in wanted.items())
    files.unpack(tmp_path / "x.tar.gz", chosen, tmp_path / "out")


def test_only_the_expected_members_are_unpacked(tmp_path):
    archive = tar({"a/good": b"yes", "../evil": b"no", "/abs": b"no", "a/extra": b"no"})
    unpack(tmp_path, archive, a__good=b"yes")
    assert sorted(one.name for one in tmp_path.rglob("*") if one.is_file()) == ["good", "x.tar.gz"]


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.DIRTYPE])
def test_a_member_that_is_no_plain_file_is_refused(tmp_path, kind):
    info = tarfile.TarInfo("a/good")
    info.type, info.linkname = kind, "/etc/passwd"
    with pytest.raises(DataCorrupt, match="a/good is not a plain file"):
        unpack(tmp_path, tar({"a/good": info}), a__good=b"")


def test_a_member_with_another_checksum_leaves_nothing(tmp_path):
    with pytest.raises(DataCorrupt, match="MD5"):
        unpack(tmp_path, tar({"a/good": b"not"}), a__good=b"yes")
    assert list((tmp_path / "out" / "a").iterdir()) == []


@pytest.mark.parametrize("damage", [lambda one: one[:60], lambda one: b"no archive", lambda one: one[:40] + one[50:]])
def test_a_damaged_archive_is_reported(tmp_path, damage):
    archive = tar({"a/good": noise(2000)})
    with pytest.raises(DataCorrupt, match=r"is damaged|lacks"):
        unpack(tmp_path, damage(archive), a__good=noise(2000))


def test_a_file_compressed_anew_is_still_the_official_one(tmp_path):
    inside = noise(300)
    file = File("x.gz", len(inside), md5(inside))
    (tmp_path / "x.gz").write_bytes(gzip.compress(inside, compresslevel=1, mtime=7))
    assert file.read(tmp_path) == inside


def test_a_gzip_bomb_is_not_inflated(tmp_path):
    (tmp_path / "x.gz").write_bytes(gzip.compress(bytes(5_000_000)))
    tracemalloc.start()
    try:
        with pytest.raises(DataCorrupt, match="should hold 10 bytes and holds more"):
            File("x.gz", 10, "0").read(tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda path: path.write_bytes(b"1234"), "should hold 5 bytes and holds 4"),
        (lambda path: path.write_bytes(b"12346"), "not the official file: its MD5 is"),
        (lambda path: path.unlink(), "is missing"),
    ],
)
def test_verify_says_what_is_wrong_with_a_file(tmp_path, monkeypatch, change, words):
    registered(monkeypatch, "cifar10", {"a/b": b"12345", "a/c": b"fine"})
    write(tmp_path, {"a/b": b"12345", "a/c": b"fine"})
    assert data.verify("cifar10", tmp_path) == []
    change(tmp_path / "a" / "b")
    (problem,) = data.verify("cifar10", tmp_path)
    assert words in problem
    assert str(tmp_path / "a" / "b") in problem


def test_missing_data_come_with_the_exact_command(tmp_path):
    root = tmp_path / "my data"
    with pytest.raises(DataMissing) as caught:
        data.load("cifar10", root)
    assert f"memnorm data get cifar10 --data-root '{root}'" in str(caught.value)


def test_a_damaged_file_is_not_loaded_and_the_command_that_replaces_it_is_given(tmp_path, monkeypatch):
    content = small_cifar10()
    registered(monkeypatch, "cifar10", content)
    write(tmp_path, content | {"cifar-10-batches-py/test_batch": content["cifar-10-batches-py/data_batch_1"]})
    with pytest.raises(DataCorrupt, match=r"test_batch(.|\n)*memnorm data get cifar10 --data-root"):
        data.load("cifar10", tmp_path)


def test_imagenet_is_not_downloaded_and_the_message_says_where_it_comes_from(tmp_path):
    for act in (data.get, data.load):
        with pytest.raises(DataMissing, match=r"https://image-net\.org(.|\n)*imagenet/val"):
            act("imagenet", tmp_path)


def test_a_root_that_cannot_be_written_is_reported(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(LabError, match="cannot write to"):
        data.get("cifar10", tmp_path / "file" / "below")


def test_loading_and_verifying_open_no_connection(tmp_path, monkeypatch):
    def refuse(*_):
        raise AssertionError("a connection")

    content = small_cifar10()
    registered(monkeypatch, "cifar10", content)
    write(tmp_path, content)
    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(files, "_opener", refuse)
    assert len(data.load("cifar10", tmp_path).train) == 20
    assert data.verify("cifar10", tmp_path) == []
    with pytest.raises(DataMissing):
        data.load("cifar100", tmp_path)


def test_the_root_is_the_environments_then_the_caches(monkeypatch, tmp_path):
    monkeypatch.setenv("MEMNORM_DATA", str(tmp_path))
    assert data.default_root() == tmp_path
    monkeypatch.setenv("MEMNORM_DATA", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert data.default_root() == tmp_path / "cache" / "memnorm" / "data"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert data.default_root() == tmp_path / ".cache" / "memnorm" / "data"


def test_the_official_checksums_and_sizes_are_complete():
    for entry in registry.DATA_SETS.values():
        for item in entry.downloads:
            for one in (item, *item.files):
                assert len(one.md5) == 32
                assert one.size > 0
            assert item.url.startswith(("https://www.cs.toronto.edu/", "http://fashion-mnist.s3-website"))
    total = {name: sum(item.size for item in entry.downloads) for name, entry in registry.DATA_SETS.items()}
    assert total["cifar10"] == 170_498_071


def bring(site, target, **changes):
    settings = {"size": len(PAGE), "md5": md5(PAGE)} | changes
    files.download(f"{site.url}/file.bin", target, **settings)


def test_a_truncated_transfer_resumes(site, tmp_path):
    site.moods = ["cut", "cut"]
    bring(site, tmp_path / "file.bin")
    assert (tmp_path / "file.bin").read_bytes() == PAGE
    assert [wanted for _, wanted in site.asked] == [None, "bytes=1000-", "bytes=2000-"]
    assert [one.name for one in tmp_path.iterdir()] == ["file.bin"]


def test_a_transfer_that_keeps_breaking_is_given_up_and_the_next_call_resumes(site, tmp_path):
    site.moods = ["cut", *["hang up"] * files.ATTEMPTS]
    with pytest.raises(LabError, match=r"1,000 bytes that arrived are kept"):
        bring(site, tmp_path / "file.bin")
    assert (tmp_path / "file.bin.part").read_bytes() == PAGE[:1000]
    site.asked.clear()
    bring(site, tmp_path / "file.bin")
    assert site.asked == [("/file.bin", "bytes=1000-")]
    assert (tmp_path / "file.bin").read_bytes() == PAGE


def test_a_server_that_always_cuts_at_the_same_place_and_knows_no_range_ends_the_trying(site, tmp_path):
    site.always = "stuck"
    with pytest.raises(LabError, match="the connection ended after 1,000 of 5,000 bytes"):
        bring(site, tmp_path / "file.bin")
    assert len(site.asked) == 1 + files.ATTEMPTS


@pytest.mark.parametrize("mood", ["whole", "shifted", "silent"])
def test_whatever_the_server_makes_of_a_range_the_file_is_right(site, tmp_path, mood):
    (tmp_path / "file.bin.part").write_bytes(PAGE[:1234])
    site.moods = [mood]
    bring(site, tmp_path / "file.bin")
    assert (tmp_path / "file.bin").read_bytes() == PAGE
    assert site.asked[0] == ("/file.bin", "bytes=1234-")


@pytest.mark.parametrize(
    ("part", "moods", "asked"),
    [(noise(6000, seed=1), [], [None]), (PAGE[:100], [416], ["bytes=100-", None])],
    ids=["longer than the file", "refused by the server"],
)
def test_a_part_of_another_file_is_thrown_away(site, tmp_path, part, moods, asked):
    (tmp_path / "file.bin.part").write_bytes(part)
    site.moods = moods
    bring(site, tmp_path / "file.bin")
    assert [wanted for _, wanted in site.asked] == asked
    assert (tmp_path / "file.bin").read_bytes() == PAGE


@pytest.mark.parametrize("mood", [500, 503, 429, "hang up", "babble"])
def test_a_passing_failure_is_tried_again(site, tmp_path, mood):
    site.moods = [mood]
    bring(site, tmp_path / "file.bin")
    assert len(site.asked) == 2


def test_a_corrupted_transfer_is_deleted_and_named(site, tmp_path):
    site.moods = ["spoil"]
    with pytest.raises(DataCorrupt, match=f"arrived damaged: its MD5 is .* the official one {md5(PAGE)}.*deleted"):
        bring(site, tmp_path / "file.bin")
    assert list(tmp_path.iterdir()) == []


def test_a_missing_page_is_refused_at_once(site, tmp_path):
    del site.pages["/file.bin"]
    with pytest.raises(LabError, match=r"could not get http.*file\.bin: the server says 404"):
        bring(site, tmp_path / "file.bin")
    assert len(site.asked) == 1


def test_a_login_page_does_not_replace_what_has_arrived(site, tmp_path):
    (tmp_path / "file.bin.part").write_bytes(PAGE[:100])
    site.pages["/file.bin"] = b"<html>log in"
    site.moods = ["whole"]
    with pytest.raises(DataCorrupt, match="offers 12 bytes, the file has 5,000"):
        bring(site, tmp_path / "file.bin")
    assert (tmp_path / "file.bin.part").read_bytes() == PAGE[:100]


def test_without_a_network_the_error_says_which_url_and_where_to_put_the_file(tmp_path):
    with socket.socket() as taken:  # a port that nobody listens on
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/x.bin"
        with pytest.raises(LabError) as caught:
            files.download(url, tmp_path / "x.bin", size=3, md5="abc")
    assert url in str(caught.value)
    assert f"put the file at {tmp_path / 'x.bin'} by hand (MD5 abc)" in str(caught.value)


def test_a_server_that_goes_silent_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "TIMEOUT", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/x.bin"
        with pytest.raises(LabError, match="timed out"):
            files.download(url, tmp_path / "x.bin", size=3, md5="abc")


@pytest.mark.parametrize("url", ["file:///etc/hostname", "ftp://127.0.0.1/x", "data:,abc"])
def test_only_http_and_https_are_spoken(tmp_path, url):
    with pytest.raises(LabError, match="http or https"):
        files.download(url, tmp_path / "x", size=3, md5="abc")


def test_a_redirect_cannot_lead_to_another_protocol(site, tmp_path):
    site.always = "astray"
    with pytest.raises(LabError, match="unknown url type: ftp"):
        bring(site, tmp_path / "file.bin")


def test_a_proxy_of_the_environment_is_used(site, tmp_path, monkeypatch):
    monkeypatch.setenv("http_proxy", site.url)
    monkeypatch.delenv("no_proxy", raising=False)
    site.pages["http://data.invalid/file.bin"] = PAGE
    files.download("http://data.invalid/file.bin", tmp_path / "file.bin", size=len(PAGE), md5=md5(PAGE))
    assert (tmp_path / "file.bin").read_bytes() == PAGE
