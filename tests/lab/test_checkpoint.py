"""The two newest checkpoints are kept; one that is damaged or hostile is passed over, and nothing in it is executed."""

import hashlib
import os
import pickle
import random
import zipfile
from pathlib import Path

import pytest
import torch
from helpers.lab import on_a_small_disk

from memnorm.lab import checkpoint
from memnorm.lab.errors import LabError


def state(number: int) -> dict:
    return {"iteration": number, "weights": torch.full((50,), float(number)), "rest": [None, "x", 1.5, {"y": True}]}


@pytest.fixture
def folder(tmp_path) -> Path:
    """Checkpoints of the iterations 10 and 20."""
    for number in (10, 20):
        checkpoint.save(tmp_path, number, state(number))
    return tmp_path


def path_of(folder: Path, number: int) -> Path:
    (path,) = folder.glob(f"checkpoint-{number:010}-*.pt")
    return path


def read(folder: Path) -> tuple[list[int], list[str]]:
    """Iterations that can be read, in order, and the complaints about the others."""
    complaints: list[str] = []
    found = [one["iteration"] for one in checkpoint.readable(folder, complaints.append)]
    return found, complaints


def under_its_own_hash(path: Path) -> Path:
    """Rename it as if its bytes were those that were written."""
    digest = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    return path.rename(path.with_name(f"{path.name[:21]}-{digest}.pt"))


def test_progress_of_a_run_is_read_from_the_newest(folder, tmp_path):
    (folder / "checkpoint-9999999999-of-something-else.pt").touch()
    assert checkpoint.reached(folder) == 20
    assert checkpoint.reached(tmp_path / "never-begun") == 0


def test_a_checkpoint_is_read_as_it_was_written(folder):
    newest = next(checkpoint.readable(folder, pytest.fail))
    expected = state(20)
    assert newest.keys() == expected.keys()
    torch.testing.assert_close(newest["weights"], expected["weights"], rtol=0, atol=0)
    assert newest["rest"] == expected["rest"]


def test_the_newest_two_are_kept_and_come_newest_first(folder):
    checkpoint.save(folder, 100, state(100))
    assert read(folder) == ([100, 20], [])
    assert len(os.listdir(folder)) == 2


DAMAGE = {
    "first byte": lambda content: bytes([content[0] ^ 1]) + content[1:],
    "byte 500": lambda content: content[:500] + bytes([content[500] ^ 128]) + content[501:],
    "last byte": lambda content: content[:-1] + bytes([content[-1] ^ 1]),
    "truncated": lambda content: content[: len(content) // 2],
    "one byte short": lambda content: content[:-1],
    "longer": lambda content: content + b"\0",
    "empty": lambda content: b"",
    "zeros": lambda content: bytes(len(content)),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_a_damaged_checkpoint_falls_back_to_the_one_before(folder, damage):
    path = path_of(folder, 20)
    path.write_bytes(damage(path.read_bytes()))
    found, complaints = read(folder)
    assert found == [10]
    assert complaints == [
        f"{path.name} cannot be read (its bytes do not match the hash in its name); using the one before"
    ]


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo])
def test_a_checkpoint_that_is_no_file_falls_back_to_the_one_before(folder, make):
    path = path_of(folder, 20)
    path.unlink()
    make(path)
    found, complaints = read(folder)
    assert (found, len(complaints)) == ([10], 1)


@pytest.mark.parametrize("seed", range(3))
def test_no_damage_under_its_own_hash_raises(folder, seed):
    draw = random.Random(seed)
    path = path_of(folder, 20)
    whole = path.read_bytes()
    for _ in range(30):
        content = bytearray(whole)
        for _ in range(draw.randrange(1, 20)):
            content[draw.randrange(len(content))] = draw.randrange(256)
        path.write_bytes(content[: draw.choice([None, draw.randrange(len(content))])])
        path = under_its_own_hash(path)
        found, complaints = read(folder)
        assert found[-1] == 10
        assert len(found) + len(complaints) == 2


class Hostile:
    def __init__(self, sentinel: Path) -> None:
        self.sentinel = sentinel

    def __reduce__(self):
        return os.system, (f"touch {self.sentinel}",)


def as_plain_pickle(path: Path, hostile: Hostile) -> None:
    path.write_bytes(pickle.dumps(hostile))


def as_torch_file(path: Path, hostile: Hostile) -> None:
    torch.save({"iteration": 20, "x": hostile}, path)


def as_old_torch_file(path: Path, hostile: Hostile) -> None:
    torch.save({"iteration": 20, "x": hostile}, path, _use_new_zipfile_serialization=False)


def as_zip(path: Path, hostile: Hostile) -> None:
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("archive/data.pkl", pickle.dumps(hostile))
        file.writestr("archive/version", "3\n")
        file.writestr("archive/byteorder", "little")


@pytest.mark.parametrize("named", ["by its own hash", "by another"])
@pytest.mark.parametrize("write", [as_plain_pickle, as_torch_file, as_old_torch_file, as_zip])
def test_a_hostile_checkpoint_executes_nothing(folder, tmp_path_factory, write, named):
    sentinel = tmp_path_factory.mktemp("sentinel") / "executed"
    path = path_of(folder, 20)
    write(path, Hostile(sentinel))
    if named == "by its own hash":
        under_its_own_hash(path)
    found, complaints = read(folder)
    assert not sentinel.exists()
    assert (found, len(complaints)) == ([10], 1)
    assert len(complaints[0]) < 400


def test_the_hostile_file_of_these_tests_is_hostile(tmp_path):
    as_torch_file(tmp_path / "file", Hostile(tmp_path / "executed"))
    torch.load(tmp_path / "file", weights_only=False)
    assert (tmp_path / "executed").exists()


def test_going_back_does_not_cost_the_checkpoints_that_follow(folder):
    """Damaged files of later iterations must not crowd out what is saved on the way there."""
    for number in (10, 20):
        path_of(folder, number).write_bytes(b"damaged")
    checkpoint.save(folder, 3, state(3))
    assert read(folder)[0] == [3]
    checkpoint.save(folder, 6, state(6))
    assert read(folder)[0] == [6, 3]
    checkpoint.save(folder, 30, state(30))
    assert read(folder) == ([30, 6], [])


def test_saving_that_fails_leaves_the_checkpoints_before(folder, monkeypatch):
    def refuse(*_arguments, **_options):
        raise OSError(28, "No space left on device")

    for name in ("torch.save", "os.fsync", "pathlib.Path.replace"):
        with monkeypatch.context() as patch:
            patch.setattr(name, refuse)
            with pytest.raises(LabError, match="the disk is full"):
                checkpoint.save(folder, 30, state(30))
        assert read(folder) == ([20, 10], [])
        assert len(os.listdir(folder)) == 2


def test_a_really_full_disk_leaves_the_checkpoints_before(tmp_path):
    """Wherever it runs out: in the middle of a tensor, at the end, in what is flushed last."""
    script = """
        import os, sys, torch
        from pathlib import Path
        from memnorm.lab import checkpoint
        from memnorm.lab.errors import LabError

        folder = Path(sys.argv[1])
        checkpoint.save(folder, 1, {"iteration": 1})
        for length in (*range(10_000, 16_000, 100), 1_000_000):
            try:
                checkpoint.save(folder, 2, {"iteration": 2, "x": torch.zeros(length)})
            except LabError as error:
                print(str(error).split(":")[0])
            else:
                print("saved")
                max(folder.iterdir()).unlink()
        print([one["iteration"] for one in checkpoint.readable(folder, print)], len(os.listdir(folder)))
        """
    *words, last = on_a_small_disk(script, tmp_path / "disk", "64k").splitlines()
    saved = words.count("saved")
    assert 0 < saved < len(words) - 1
    assert words == ["saved"] * saved + ["the disk is full"] * (len(words) - saved)
    assert last == "[1] 1"
