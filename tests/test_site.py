"""The documentation site builds without a warning, and every broken part fails the build."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.optional import library

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.slow


def build(docs: Path, site: Path) -> subprocess.CompletedProcess:
    """As `make docs` does."""
    library("sphinx")
    flags = ["--fail-on-warning", "--keep-going", "--nitpicky", "--quiet"]
    command = [sys.executable, "-m", "sphinx", *flags, str(docs), str(site)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture
def docs(tmp_path):
    """A copy of the sources of the site."""
    for name in ("docs", "examples"):
        shutil.copytree(ROOT / name, tmp_path / name)
    shutil.copy(ROOT / "CHANGELOG.md", tmp_path)
    return tmp_path / "docs"


def test_the_site_builds_and_has_every_page(docs, tmp_path):
    result = build(docs, tmp_path / "site")
    assert result.returncode == 0, result.stderr
    for page in docs.rglob("*.md"):
        assert (tmp_path / "site" / page.relative_to(docs)).with_suffix(".html").exists()
    for example in (docs.parent / "examples").glob("*.py"):
        assert f"../examples/{example.name}" in (docs / "examples.md").read_text()
    assert "nibabel" in (tmp_path / "site/examples.html").read_text()
    reference = (tmp_path / "site/api.html").read_text()
    assert "memnorm.double_forward" in reference
    assert "The training loop does not change." in reference


BROKEN = {
    "[gone](gone.md)": "gone.md",
    "[no such part](recipes.md#no-such-part)": "no-such-part",
    "![gone](figures/gone.svg)": "gone.svg",
    "```{literalinclude} ../examples/gone.py\n```": "gone.py",
    "```{eval-rst}\n.. autofunction:: memnorm.norms.gone\n```": "failed to import 'gone' from module 'memnorm.norms'",
    "```{eval-rst}\n.. automethod:: memnorm.layers.MemorizedBatchNorm.extra_repr\n```": "extra_repr has no docstring",
}


def test_what_is_broken_breaks_the_build_and_is_named(docs, tmp_path):
    """Links to pages, headings and figures, a missing example, name or docstring, a page that no one can reach."""
    page = docs / "which-norm.md"
    page.write_text("\n\n".join([page.read_text(), *BROKEN, ""]))
    (docs / "lost.md").write_text("# Lost\n")
    result = build(docs, tmp_path / "site")
    assert result.returncode != 0
    for complaint in (*BROKEN.values(), "lost.md"):
        assert complaint in result.stderr, complaint
