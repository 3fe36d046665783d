"""Runs that start from pretrained weights: what is loaded, what is refused, and what names the run."""

import os
import pickle
import re
import shutil
from pathlib import Path

import pytest
import torch
from helpers.lab import PLAIN, Ear, assert_ends_as_undisturbed, crash, net, result_of, tiny

from memnorm.lab import pretrained
from memnorm.lab.errors import UsageError
from memnorm.lab.runner import run
from memnorm.lab.spec import RunSpec
from memnorm.lab.training import Training, network

pytestmark = pytest.mark.usefixtures("no_git")


def weights(path: Path, classes: int = 4, **changes) -> Path:
    """A file with the state dict of `helpers.lab.net`, trained for a moment."""
    generator = torch.Generator().manual_seed(5)
    state = net(classes, 1).state_dict()
    state = {
        name: torch.rand(value.shape, generator=generator) if value.is_floating_point() else value + 3
        for name, value in state.items()
    }
    torch.save({**state, **changes}, path)
    return path


def from_file(path: Path, **changes) -> RunSpec:
    return tiny(pretrained=str(path), pretrained_sha256=pretrained.sha256(str(path)), **changes)


@pytest.mark.parametrize("norm", ["bn", "group"])
def test_a_run_starts_from_the_weights_of_the_file(tmp_path, norm):
    path = weights(tmp_path / "weights.pt")
    training = Training(from_file(path, norm=norm), 4, (1, 8, 8), "cpu")
    given = torch.load(path, weights_only=True)
    assert torch.equal(training.model[1].weight, given["1.weight"])
    assert torch.equal(training.model[9].weight, given["9.weight"])


def test_the_statistics_of_the_file_are_those_of_the_converted_network(tmp_path):
    path = weights(tmp_path / "weights.pt")
    training = Training(from_file(path, norm="two_way"), 4, (1, 8, 8), "cpu")
    plain = net(4, 1)
    plain.load_state_dict(torch.load(path, weights_only=True))
    images = torch.rand(5, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(training.model.eval()(images), plain.eval()(images), rtol=0, atol=1e-5)


def test_a_head_for_other_classes_stays_fresh_and_the_run_says_so(tmp_path, store):
    path = weights(tmp_path / "weights.pt", classes=7)
    fresh, _ = network(tiny(), 4, (1, 8, 8))
    model, note = network(from_file(path), 4, (1, 8, 8))
    assert torch.equal(model[9].weight, fresh[9].weight)
    assert not torch.equal(model[4].weight, fresh[4].weight)
    ear = Ear()
    run(from_file(path), store, execution=PLAIN, listener=ear)
    assert ear.all("message") == [note]
    assert note == ("the pretrained head is for 7 classes and the data have 4: 9.weight and 9.bias start fresh")


def test_the_name_of_a_run_depends_on_the_content_of_the_file_and_not_on_its_path(tmp_path):
    path = weights(tmp_path / "weights.pt")
    shutil.copy(path, tmp_path / "copy.pt")
    other = weights(tmp_path / "other.pt", classes=7)
    names = [from_file(one).name for one in (path, tmp_path / "copy.pt", other)]
    assert names[0] == names[1]
    assert len({*names, tiny().name}) == 3


def test_a_crashed_run_from_pretrained_weights_resumes_bit_identically(tmp_path, store):
    spec = from_file(
        weights(tmp_path / "weights.pt", classes=7), norm="two_way", optimizer="adamw", learning_rate=0.003
    )
    crash(spec, store, at=5)
    ear = assert_ends_as_undisturbed(spec, store, began=4)
    assert ear.all("message") == []


def test_a_file_that_has_changed_is_refused(tmp_path):
    spec = from_file(weights(tmp_path / "weights.pt"))
    weights(tmp_path / "weights.pt", classes=7)
    with pytest.raises(UsageError, match="have changed since the run was specified"):
        network(spec, 4, (1, 8, 8))


def test_a_path_without_its_hash_is_refused():
    with pytest.raises(UsageError, match="pretrained and pretrained_sha256 belong together"):
        tiny(pretrained="weights.pt")


class Evil:
    """Creates a folder when unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


HOSTILE = {
    "code": (
        lambda path: torch.save({"1.weight": Evil(path.with_name("ran"))}, path),
        "holds more than tensors and was",
    ),
    "pickle": (
        lambda path: path.write_bytes(pickle.dumps(Evil(path.with_name("ran")))),
        "holds more than tensors and was",
    ),
    "noise": (lambda path: path.write_bytes(bytes(range(256)) * 9), "weights.pt"),
    "truncated": (
        lambda path: path.write_bytes(weights(path).read_bytes()[:900]),
        "cannot be read as pretrained weights",
    ),
    "empty": (lambda path: path.touch(), "cannot be read as pretrained weights"),
    "a list": (lambda path: torch.save([torch.ones(1)], path), "must hold a state dict, tensors by name; got list"),
    "a checkpoint": (lambda path: torch.save({"model": net(4, 1).state_dict()}, path), "tensors by name; got dict"),
    "folder": (lambda path: path.mkdir(), "there is no file of pretrained weights"),
    "pipe": (os.mkfifo, "there is no file of pretrained weights"),
    "missing": (lambda path: None, "there is no file of pretrained weights"),
    "sparse": (lambda path: weights(path, **{"9.weight": torch.eye(4, 6).to_sparse()}), "cannot be copied"),
    "other network": (lambda path: torch.save({"0.weight": torch.ones(3)}, path), "lab:net: 1.weight is missing"),
    "other shape": (
        lambda path: weights(path, **{"4.weight": torch.ones(6, 5, 3, 3)}),
        "4.weight has the shape (6, 5, 3, 3), the network needs (6, 4, 3, 3)",
    ),
}


@pytest.mark.parametrize("kind", HOSTILE)
@pytest.mark.parametrize("command", ["train", "compare"])
def test_a_hostile_file_answers_with_a_sentence(call, tmp_path, command, kind):
    (write, words), path = HOSTILE[kind], tmp_path / "weights.pt"
    write(path)
    data = ["--data", "synthetic", "--data-options", "{classes: 4, channels: 1, image_size: 8, train: 44, test: 20}"]
    code, out, err = call(command, *data, "--model", "helpers.lab:net", "--pretrained", str(path))
    assert (code, out) == (2, "")
    assert words in err
    assert "Traceback" not in err
    assert not (tmp_path / "ran").exists()


def test_compare_starts_every_norm_from_the_weights(call, tmp_path):
    path = weights(tmp_path / "weights.pt", classes=7)
    data = ["--data", "synthetic", "--data-options", "{classes: 4, channels: 1, image_size: 8, train: 44, test: 20}"]
    words = ["compare", *data, "--model", "helpers.lab:net", "--pretrained", str(path), "--optimizer", "adamw"]
    words += ["--learning-rate", "0.001", "--norms", "bn,two_way", "--batch-sizes", "2", "--accumulate", "2"]
    words += ["--recalibrate", "20", "--seeds", "1", "--epochs", "1", "--threads", "1"]
    code, _, err = call(*words)
    assert code == 0, err
    assert err.count("start fresh") == 2
    names = {
        spec.read_text().partition("pretrained_sha256: ")[2].split()[0] for spec in tmp_path.glob("runs/*/spec.yaml")
    }
    assert names == {pretrained.sha256(str(path))}
    assert re.search(
        "optimizer adamw; .*pretrained sha256", (tmp_path / "compare/report.md").read_text().replace("\\", "")
    )
    assert {row["n"] for row in result_of(call(*words, "--json"))["rows"]} == {1}
