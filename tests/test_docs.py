"""README and docs: code blocks run, quoted lines and links exist, numbers are those of the records."""

import re
from pathlib import Path

import pytest
import torch
from helpers.common import images, labels, small_net
from torch import nn

import memnorm

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "examples/README.md")]
PAGES += sorted((ROOT / "docs").rglob("*.md"))


def code_blocks():
    for page in PAGES:
        for number, block in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)):
            yield pytest.param(block, id=f"{page.relative_to(ROOT)}-{number}")


@pytest.mark.parametrize("block", list(code_blocks()))
def test_a_code_block_shows_double_forward_with_the_schedule(block):
    papers = ("double_forward(" in block or "rerecord(" in block) and '"bn"' not in block
    assert "StrengthSchedule(" in block or not papers


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")  # in torch 2.8's distributed checkpoints
@pytest.mark.filterwarnings("error::memnorm.MemnormWarning")
@pytest.mark.parametrize("block", list(code_blocks()))
def test_code_block_runs(block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = small_net()
    if "memnorm.convert" not in block:
        memnorm.convert(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = [(images(4, seed=seed), labels(4, seed=seed)) for seed in range(3)]
    namespace = {"torch": torch, "memnorm": memnorm, "model": model, "optimizer": optimizer, "loader": loader}
    namespace |= {
        "total_steps": 3,
        "criterion": nn.functional.cross_entropy,
        "images": loader[0][0],
        "labels": loader[0][1],
    }
    exec(compile(block, "block", "exec"), namespace)
    if "deploy" in namespace:
        assert {type(module).__module__.split(".")[0] for module in namespace["deploy"].modules()} == {"torch"}
    if "rerecord" in block:
        norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
        assert [int(layer.num_batches_tracked) for layer in norms] == [1, 1]


def test_every_quoted_code_line_of_the_equations_stands_in_its_file():
    rows = re.findall(r"\| `(memnorm/\S+\.py)` \| `(.+?)` \|", (ROOT / "docs/equations.md").read_text())
    assert len(rows) >= 10
    for file, line in rows:
        assert line in [source.strip() for source in (ROOT / file).read_text().splitlines()], f"{file}: {line}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
        assert target.startswith("http") or (page.parent / target).exists(), target


def test_every_cited_test_exists():
    cited = [cite for page in PAGES for cite in re.findall(r"(tests/[\w/]+\.py)::(\w+)", page.read_text())]
    assert cited
    for file, name in cited:
        assert f"def {name}(" in (ROOT / file).read_text(), f"{file}::{name}"


def test_the_version_is_the_same_everywhere():
    assert f"version: {memnorm.__version__}" in (ROOT / "CITATION.cff").read_text()
    assert f"## {memnorm.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_every_public_name_has_a_docstring_and_there_are_few():
    assert len(memnorm.__all__) < 24
    for name in memnorm.__all__:
        assert getattr(memnorm, name).__doc__, name
