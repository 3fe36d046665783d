"""One file over HTTP: resumed, checked, and honest about what went wrong."""

from __future__ import annotations

import socket

import pytest
from helpers.data import PAGE, impatient, md5, noise, serving

from memnorm.lab.data import transfer
from memnorm.lab.errors import DataCorrupt, LabError


@pytest.fixture(autouse=True)
def _impatient(monkeypatch):
    impatient(monkeypatch)


@pytest.fixture
def site():
    with serving() as running:
        yield running


def bring(site, target, **changes):
    settings = {"size": len(PAGE), "md5": md5(PAGE)} | changes
    transfer.download(f"{site.url}/file.bin", target, **settings)


def test_a_file_arrives_whole_and_without_leftovers(site, tmp_path):
    bring(site, tmp_path / "file.bin")
    assert (tmp_path / "file.bin").read_bytes() == PAGE
    assert [one.name for one in tmp_path.iterdir()] == ["file.bin"]


def test_progress_tells_name_bytes_so_far_and_total(site, tmp_path):
    seen = []
    bring(site, tmp_path / "file.bin", progress=lambda *what: seen.append(what))
    assert seen[0] == ("file.bin", 512, 5000)
    assert seen[-1] == ("file.bin", 5000, 5000)


def test_a_truncated_transfer_resumes(site, tmp_path):
    site.moods = ["cut", "cut"]
    bring(site, tmp_path / "file.bin")
    assert (tmp_path / "file.bin").read_bytes() == PAGE
    assert [wanted for _, wanted in site.asked] == [None, "bytes=1000-", "bytes=2000-"]


def test_a_transfer_that_keeps_breaking_is_given_up_and_the_next_call_resumes(site, tmp_path):
    site.moods = ["cut", *["hang up"] * transfer.ATTEMPTS]
    with pytest.raises(LabError, match=r"1,000 bytes that arrived are kept"):
        bring(site, tmp_path / "file.bin")
    assert (tmp_path / "file.bin.part").read_bytes() == PAGE[:1000]
    site.asked.clear()
    bring(site, tmp_path / "file.bin")
    assert site.asked == [("/file.bin", "bytes=1000-")]
    assert (tmp_path / "file.bin").read_bytes() == PAGE


def test_attempts_that_bring_something_do_not_count_against_the_limit(site, tmp_path):
    site.cut = 100
    site.always = "cut"
    bring(site, tmp_path / "file.bin")
    assert len(site.asked) == 50


def test_a_server_that_always_cuts_at_the_same_place_and_knows_no_range_ends_the_trying(site, tmp_path):
    site.always = "stuck"
    with pytest.raises(LabError, match="the connection ended after 1,000 of 5,000 bytes"):
        bring(site, tmp_path / "file.bin")
    assert len(site.asked) == 1 + transfer.ATTEMPTS


@pytest.mark.parametrize("mood", ["whole", "shifted", "silent"])
def test_whatever_the_server_makes_of_a_range_the_file_is_right(site, tmp_path, mood):
    (tmp_path / "file.bin.part").write_bytes(PAGE[:1234])
    site.moods = [mood]
    bring(site, tmp_path / "file.bin")
    assert (tmp_path / "file.bin").read_bytes() == PAGE
    assert site.asked[0] == ("/file.bin", "bytes=1234-")


def test_a_part_that_is_already_complete_needs_no_connection(site, tmp_path):
    (tmp_path / "file.bin.part").write_bytes(PAGE)
    bring(site, tmp_path / "file.bin")
    assert site.asked == []
    assert (tmp_path / "file.bin").read_bytes() == PAGE


def test_a_part_longer_than_the_file_is_thrown_away(site, tmp_path):
    (tmp_path / "file.bin.part").write_bytes(noise(6000, seed=1))
    bring(site, tmp_path / "file.bin")
    assert site.asked == [("/file.bin", None)]
    assert (tmp_path / "file.bin").read_bytes() == PAGE


def test_a_range_the_server_cannot_satisfy_restarts_the_file(site, tmp_path):
    (tmp_path / "file.bin.part").write_bytes(PAGE[:100])
    site.moods = [416]
    bring(site, tmp_path / "file.bin")
    assert [wanted for _, wanted in site.asked] == ["bytes=100-", None]


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


def test_a_redirect_keeps_the_range(site, tmp_path):
    (tmp_path / "file.bin.part").write_bytes(PAGE[:100])
    site.moods = ["elsewhere"]
    bring(site, tmp_path / "file.bin")
    assert site.asked == [("/file.bin", "bytes=100-"), ("/moved/file.bin", "bytes=100-")]


def test_without_a_network_the_error_says_which_url_and_where_to_put_the_file(tmp_path):
    with socket.socket() as taken:  # a port that nobody listens on
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/x.bin"
        with pytest.raises(LabError) as caught:
            transfer.download(url, tmp_path / "x.bin", size=3, md5="abc")
    assert url in str(caught.value)
    assert f"put the file at {tmp_path / 'x.bin'} by hand (MD5 abc)" in str(caught.value)


def test_a_server_that_goes_silent_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr(transfer, "TIMEOUT", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/x.bin"
        with pytest.raises(LabError, match="timed out"):
            transfer.download(url, tmp_path / "x.bin", size=3, md5="abc")


@pytest.mark.parametrize("url", ["file:///etc/hostname", "ftp://127.0.0.1/x", "data:,abc"])
def test_only_http_and_https_are_spoken(tmp_path, url):
    with pytest.raises(LabError, match="http or https"):
        transfer.download(url, tmp_path / "x", size=3, md5="abc")


def test_a_redirect_cannot_lead_to_another_protocol(site, tmp_path):
    site.always = "astray"
    with pytest.raises(LabError, match="unknown url type: ftp"):
        bring(site, tmp_path / "file.bin")


def test_a_proxy_of_the_environment_is_used(site, tmp_path, monkeypatch):
    monkeypatch.setenv("http_proxy", site.url)
    monkeypatch.delenv("no_proxy", raising=False)
    site.pages["http://data.invalid/file.bin"] = PAGE
    transfer.download("http://data.invalid/file.bin", tmp_path / "file.bin", size=len(PAGE), md5=md5(PAGE))
    assert (tmp_path / "file.bin").read_bytes() == PAGE
