"""The report as Markdown, with the figures in files. Texts from runs are escaped."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from memnorm.lab.comparison import Comparison
from memnorm.lab.report import present
from memnorm.lab.report.collect import Page
from memnorm.lab.report.figures import Picture
from memnorm.lab.verdict import TEST_HEADER

FIGURES = "figures"


def render(page: Page, pictures: Mapping[str, Picture]) -> str:
    return "\n".join(_lines(page, pictures)) + "\n"


def figure_file(name: str, index: int) -> str:
    return f"{FIGURES}/{name}-{index}.svg"


def plain(text: object) -> str:
    """Escape text for Markdown and HTML."""
    text = " ".join(str(text).split())
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    text = re.sub(r"([\\`*_{}\[\]|~$])", r"\\\1", text)
    text = re.sub(r"^(?=(?:[#+=-]+)(?: |$))", r"\\", text)  # a heading, a list, a rule
    return re.sub(r"^(\d+)(?=[.)](?: |$))", r"\1\\", text)  # a numbered list


def _lines(page: Page, pictures: Mapping[str, Picture]) -> Iterator[str]:
    yield f"# {plain(page.title)}"
    yield ""
    for problem in page.problems:
        yield f"- Not read: {plain(problem)}"
    for section in page.sections:
        yield f"\n## {plain(section.title)}\n"
        yield from _figure(section.figure, pictures, "")
        for paragraph in section.paragraphs:
            yield f"{plain(paragraph)}\n"
        if section.rows:
            yield from table(section.header, section.rows)
            yield ""
    for chapter in present.chapters(page):
        yield f"\n## {plain(chapter.title)}\n"
        yield from _chapter(chapter, pictures, page.shown_above)
    yield "\n## How each number was obtained\n"
    yield from (f"- {plain(name)}: {plain(value)}" for name, value in page.facts)
    yield ""
    yield f"{plain(present.ACCOUNT)}\n"
    yield from _account(page)


def _chapter(chapter: present.Chapter, pictures: Mapping[str, Picture], shown_above: set[str]) -> Iterator[str]:
    if chapter.scale is not None:
        if chapter.empty and chapter.scale.scale == "paper":
            yield f"{plain(present.NOTHING_AT_PAPER_SCALE)}\n"
        yield f"> {plain(chapter.scale.rules)}\n"
        for view in chapter.scale.tables:
            yield from _paper_table(present.show_table(view))
        for figure in chapter.scale.figures:
            yield from _figure(figure.name, pictures, present.absent(figure))
    for comparison in chapter.comparisons:
        yield from _comparison(comparison)
        if comparison.name not in shown_above:
            yield from _figure(comparison.name, pictures, "", "####")


def _comparison(comparison: Comparison) -> Iterator[str]:
    yield f"### {plain(comparison.title)}\n"
    yield f"{plain(comparison.about)}\n"
    if comparison.verdict:
        yield f"**{plain(comparison.verdict.headline)}**\n"
        yield from (f"- {plain(line)}" for line in comparison.verdict.details)
        yield ""
    for run, message in comparison.failures:
        yield f"- {plain(f'{run} failed: {message}')}"
    rows = [
        [one.plain if isinstance(one, present.Shown) else one for one in row]
        for row in present.comparison_rows(comparison)
    ]
    yield from table(present.comparison_header(comparison), rows)
    yield ""
    if comparison.verdict and comparison.verdict.shown:
        yield f"{plain(present.TESTS_CAPTION)}\n"
        yield from table(TEST_HEADER, [one.cells for one in comparison.verdict.shown])
        yield ""


def _paper_table(shown: present.ShownTable) -> Iterator[str]:
    yield f"### {plain(shown.title)}\n"
    yield f"{plain(shown.caption)}\n"
    pairs = [[f"{column}: paper", f"{column}: ours"] if shown.beside_print else [column] for column in shown.columns]
    rows = [
        [row, *(f"{one.plain}{f' [{one.mark}]' if one.mark else ''}" for one in cells)] for row, cells in shown.rows
    ]
    yield from table(["", *(name for pair in pairs for name in pair)], rows)
    yield ""
    for letter, note in shown.notes:
        yield f"{plain(f'[{letter}] {note}')}.\n"
    for line in shown.apart:
        yield f"{plain(line)}\n"


def _figure(name: str, pictures: Mapping[str, Picture], more: str, level: str = "###") -> Iterator[str]:
    if name in pictures:
        picture = pictures[name]
        yield f"{level} {plain(picture.title)}\n"
        for index, panel in enumerate(picture.panels, 1):
            title = f"{plain(panel.title)}\n\n" if panel.title else ""
            yield f"{title}![{plain(panel.description)}]({figure_file(name, index)})\n"
        yield f"{plain(' '.join([picture.caption, more]))}\n"


def _account(page: Page) -> Iterator[str]:
    for group in page.groups:
        yield f"### {plain(group.title)}\n"
        yield f"{plain(present.group_number(group))}. {plain(present.settings(group))}.\n"
        yield from table(present.RUN_HEADER, present.run_rows(group))
        yield ""
        for place in group.places:
            yield f"{plain(place)}\n"


def table(header: Sequence[object], rows: Sequence[Sequence[object]]) -> Iterator[str]:
    def line(cells: Sequence[object]) -> str:
        return f"| {' | '.join(plain(cell) for cell in cells)} |"

    yield line(header)
    yield f"|{'|'.join(' --- ' if index == 0 else ' ---: ' for index in range(len(header)))}|"
    yield from map(line, rows)
