"""Files are whole or absent, and what the file system refuses is said in words."""

import errno
import os
import stat
from pathlib import Path

import pytest
from helpers.lab import on_a_small_disk, python, said

from memnorm.lab.disk import append_line, replacing, write_text
from memnorm.lab.errors import LabError


@pytest.fixture
def old(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")
    return path


def assert_untouched(path: Path) -> None:
    assert path.read_text() == "old"
    assert os.listdir(path.parent) == [path.name]


def test_a_file_is_replaced_in_one_step(old):
    with replacing(old) as temporary:
        temporary.write_text("new")
        assert temporary.parent == old.parent
        assert temporary.match(".file.*.tmp")  # by which the next start finds what a killed process left
        assert old.read_text() == "old"
    assert old.read_text() == "new"
    assert os.listdir(old.parent) == [old.name]


@pytest.mark.parametrize("error", [ValueError("x"), KeyboardInterrupt(), LabError("x"), SystemExit(3)], ids=repr)
def test_an_exception_passes_through_and_leaves_the_old_file(old, error):
    def write_half():
        with replacing(old) as temporary:
            temporary.write_text("half")
            raise error

    with pytest.raises(type(error)) as caught:
        write_half()
    assert caught.value is error
    assert_untouched(old)


def test_the_bytes_are_on_the_disk_before_the_file_is_in_place(old, monkeypatch):
    calls = []
    fsync, replace = os.fsync, Path.replace
    monkeypatch.setattr(os, "fsync", lambda handle: (calls.append(os.fstat(handle).st_ino), fsync(handle)))
    monkeypatch.setattr(Path, "replace", lambda self, target: (calls.append("replace"), replace(self, target)))
    with replacing(old) as temporary:
        temporary.write_text("new")
    assert calls == [old.stat().st_ino, "replace", old.parent.stat().st_ino]


def test_text_is_utf8_wherever_the_user_lives(tmp_path):
    script = """
        import sys
        from pathlib import Path
        from memnorm.lab.disk import append_line, write_text
        write_text(Path(sys.argv[1]), "λ")
        append_line(Path(sys.argv[1]), "γ")
        """
    elsewhere = {"LC_ALL": "POSIX", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    said(python(script.replace("λ", r"\u03bb").replace("γ", r"\u03b3"), tmp_path / "file", more=elsewhere))
    assert (tmp_path / "file").read_bytes() == "λ\nγ\n".encode()


@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_a_file_has_the_permissions_that_the_user_gives_files(tmp_path, mask):
    before = os.umask(mask)
    try:
        write_text(tmp_path / "file", "x")
        assert os.umask(mask) == mask
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o666 & ~mask


FULL = r"the disk is full: .*file could not be written\. Nothing saved before is lost: free some space"
REFUSED = r"no permission to write .*file; choose another folder"
MESSAGES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), FULL),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), REFUSED),
    errno.EIO: r"file could not be written: .*Input/output error",
}


@pytest.mark.parametrize("code", MESSAGES, ids=errno.errorcode.get)
@pytest.mark.parametrize("place", ["touch", "write_text", "fsync", "replace"])
def test_errors_of_the_file_system_have_readable_messages(old, monkeypatch, place, code):
    def refuse(*_arguments, **_options):
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(f"{'os' if place == 'fsync' else 'pathlib.Path'}.{place}", refuse)
        with pytest.raises(LabError, match=MESSAGES[code]):
            write_text(old, "new")
    assert_untouched(old)


WRITE = """
    import os, sys
    from pathlib import Path
    from memnorm.lab.disk import append_line, write_text
    from memnorm.lab.errors import LabError

    path = Path(sys.argv[1]) / "file"
    {first}
    try:
        {write}
    except LabError as error:
        print(error)
    print(path.read_text()[:3], os.listdir(path.parent))
    """


@pytest.mark.parametrize("function", ["write_text", "append_line"])
def test_a_really_full_disk_leaves_what_was_there(tmp_path, function):
    script = WRITE.format(first=f'{function}(path, "old")', write=f'{function}(path, "new" * 100_000)')
    output = on_a_small_disk(script, tmp_path, "64k")
    assert output.startswith("the disk is full: ")
    assert output.endswith("old ['file']\n")


def test_a_folder_of_someone_else_is_not_written_to(tmp_path):
    """As a user who is not root: root may write anywhere."""
    first = """import tempfile
    if os.getuid() == 0:
        os.setuid(65534)
    path = Path(tempfile.mkdtemp()) / "file"
    write_text(path, "old")
    path.parent.chmod(0o555)"""
    script = (
        WRITE.format(first=first, write='write_text(path, "new")')
        + "path.parent.chmod(0o755); path.unlink(); path.parent.rmdir()"
    )
    output = said(python(script, tmp_path))
    assert output.startswith("no permission to write ")
    assert output.endswith("old ['file']\n")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (None, b"new\n"),
        (b"", b"new\n"),
        (b"old\n", b"old\nnew\n"),
        (b"old", b"old\nnew\n"),
        (b'{"a": \xff', b'{"a": \xff\nnew\n'),
    ],
    ids=repr,
)
def test_a_line_is_added_after_ending_one_that_was_cut_short(tmp_path, before, after):
    path = tmp_path / "lines"
    if before is not None:
        path.write_bytes(before)
    append_line(path, "new")
    assert path.read_bytes() == after
