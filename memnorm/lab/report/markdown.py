"""The report as Markdown, with the figures in files. Texts from runs are escaped."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from memnorm.lab.comparison import Comparison
from memnorm.lab.report import present
from memnorm.lab.report.collect import Chapter, Page
from memnorm.lab.report.figures import Picture


def render(page: Page, pictures: Mapping[str, Picture]) -> str:
    return "\n".join(_lines(page, pictures)) + "\n"


def figure_file(name: str, index: int) -> str:
    return f"figures/{name}-{index}.svg"


def plain(text: object) -> str:
    """Escape text for Markdown and HTML."""
    text = " ".join(str(text).split())
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    text = re.sub(r"([\\`*_{}\[\]|~$])", r"\\\1", text)
    text = re.sub(r"^(?=(?:[#+=-]+)(?: |$))", r"\\", text)  # a heading, a list, a rule
    return re.sub(r"^(\d+)(?=[.)](?: |$))", r"\1\\", text)  # a numbered list


def _lines(page: Page, pictures: Mapping[str, Picture]) -> Iterator[str]:
    yield f"# {plain(page.title)}\n"
    yield from (f"- Not read: {plain(problem)}" for problem in page.problems)
    for section in page.sections:
        yield f"\n## {plain(section.title)}\n"
        yield from _figure(section.figure, pictures)
        yield from (f"{plain(paragraph)}\n" for paragraph in section.paragraphs)
        yield from _grid(present.section_grid(section)) if section.rows else ()
    for chapter in page.chapters:
        yield f"\n## {plain(chapter.title)}\n"
        yield from _chapter(chapter, pictures, page.shown_above)
    yield "\n## How each number was obtained\n"
    yield from (f"- {plain(name)}: {plain(value)}" for name, value in page.facts)
    yield f"\n{plain(present.ACCOUNT)}\n"
    for group in page.groups:
        yield f"### {plain(group.title)}\n"
        yield f"{plain(present.group_number(group))}. {plain(present.settings(group))}.\n"
        yield from _grid(present.runs_grid(group))
        yield from (f"{plain(place)}\n" for place in group.places)


def _chapter(chapter: Chapter, pictures: Mapping[str, Picture], shown_above: set[str]) -> Iterator[str]:
    if chapter.empty:
        yield f"{plain(present.NOTHING_AT_PAPER_SCALE)}\n"
    if chapter.rules:
        yield f"> {plain(chapter.rules)}\n"
    for view in chapter.tables:
        shown = present.paper_grid(view)
        yield f"### {plain(shown.title)}\n"
        yield from _grid(shown)
    for figure in chapter.figures:
        yield from _figure(figure.name, pictures, figure.absent)
    for comparison in chapter.comparisons:
        yield from _comparison(comparison)
        if comparison.name not in shown_above:
            yield from _figure(comparison.name, pictures, level="####")


def _comparison(comparison: Comparison) -> Iterator[str]:
    yield f"### {plain(comparison.title)}\n"
    yield f"{plain(comparison.about)}\n"
    if comparison.verdict:
        yield f"**{plain(comparison.verdict.headline)}**\n"
        yield from (f"- {plain(line)}" for line in comparison.verdict.details)
        yield ""
    yield from (f"- {plain(f'{run} failed: {message}')}" for run, message in comparison.failures)
    yield from _grid(present.comparison_grid(comparison))
    if comparison.verdict and comparison.verdict.shown:
        yield from _grid(present.tests_grid(comparison))


def _figure(name: str, pictures: Mapping[str, Picture], more: str = "", level: str = "###") -> Iterator[str]:
    if name in pictures:
        picture = pictures[name]
        yield f"{level} {plain(picture.title)}\n"
        for index, panel in enumerate(picture.panels, 1):
            title = f"{plain(panel.title)}\n\n" if panel.title else ""
            yield f"{title}![{plain(panel.description)}]({figure_file(name, index)})\n"
        yield f"{plain(' '.join([picture.caption, more]))}\n"


def _grid(shown: present.Grid) -> Iterator[str]:
    def line(cells: Sequence[str | present.Shown]) -> str:
        return f"| {' | '.join(plain(one if isinstance(one, str) else one.plain) for one in cells)} |"

    yield from [f"{plain(shown.caption)}\n"] if shown.caption else []
    yield line(shown.header)
    yield f"|{'|'.join([' --- ', *[' ---: '] * (len(shown.header) - 1)])}|"
    yield from map(line, shown.rows)
    yield ""
    yield from (f"{plain(f'[{letter}] {note}')}.\n" for letter, note in shown.notes)
    yield from (f"{plain(remark)}\n" for remark in shown.remarks)
