"""One self-contained HTML page, built as a tree so that all text is escaped by the serialiser."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

STYLE = Path(__file__).with_name("report.css")
# All but what HTML or UTF-8 cannot hold: control characters, surrogates, non-characters.
_UNFIT = re.compile("[^\t\n\r -~\u00a0-\ud7ff\ue000-\ufdcf\ufdf0-\ufffd\U00010000-\U0010ffff]")


@dataclass(frozen=True)
class Cell:
    """A table's cell: its text (empty: nothing is known), words or numbers, the rows it spans."""

    text: str
    heading: bool = False
    rows: int = 1
    words: bool = False


def node(tag: str, *content: Element | str, **attributes: str) -> Element:
    """An element with text and elements inside; `cls` is class, a_b is the attribute a-b."""
    names = {"cls": "class"}
    made = Element(
        tag, {names.get(k, k.replace("_", "-")): clean(v) for k, v in attributes.items()}
    )
    for part in content:
        if isinstance(part, Element):
            made.append(part)
        elif len(made):
            made[-1].tail = (made[-1].tail or "") + clean(part)
        else:
            made.text = (made.text or "") + clean(part)
    return made


def clean(text: str) -> str:
    """`text` with what no page can hold replaced by U+FFFD."""
    return _UNFIT.sub("\ufffd", text)


def table(
    caption: str, about: str, headings: Sequence[str], rows: Iterable[Sequence[Cell]], name: str
) -> Element:
    """A table that scrolls sideways where the screen is narrow.

    about: what its caption, short for narrow screens, leaves to the heading above it.
    """
    rows = list(rows)
    words = [column for column, cell in enumerate(max(rows, key=len, default=[])) if cell.words]
    head = [
        node("th", text, scope="col", cls="words" if column in words else "number")
        for column, text in enumerate(headings)
    ]
    body = [node("tr", *map(_cell, row), cls=_row_class(row)) for row in rows]
    made = node(
        "table",
        node("caption", caption, id=name),
        node("thead", node("tr", *head)),
        node("tbody", *body),
    )
    label = f"{caption}: {about}"
    return node("div", made, cls="scroll", role="region", aria_label=label, tabindex="0")


def _cell(cell: Cell) -> Element:
    span = {"rowspan": str(cell.rows)} if cell.rows > 1 else {}
    if cell.heading:
        return node("th", cell.text, scope="rowgroup" if cell.rows > 1 else "row", **span)
    kind = "empty" if not cell.text else "words" if cell.words else "number"
    return node("td", cell.text, **span, cls=kind)


def _row_class(row: Sequence[Cell]) -> str:
    """A line is drawn above the first row of each algorithm."""
    return "first" if row and row[0].heading else "next"


def figure(svg: bytes, text: str, name: str) -> Element:
    """An SVG image inside the page, with `text` as its caption and for whoever cannot see it."""
    data = "data:image/svg+xml;base64," + base64.b64encode(svg).decode("ascii")
    return node("figure", node("img", src=data, alt=text), node("figcaption", text), id=name)


def notes(lines: Iterable[str]) -> Element:
    return node("ul", *(node("li", line) for line in lines), cls="notes")


def document(title: str, content: Iterable[Element]) -> str:
    """The whole page as HTML text."""
    root = node(
        "html",
        node(
            "head",
            node("meta", charset="utf-8"),
            node("meta", name="viewport", content="width=device-width, initial-scale=1"),
            node("title", title),
            node("style", STYLE.read_text(encoding="utf-8")),
        ),
        node("body", node("main", *content)),
        lang="en",
    )
    text = ElementTree.tostring(root, encoding="unicode", method="html")
    return f"<!DOCTYPE html>\n{text}\n"
