"""Reads a report's page back: its elements as a tree, for tests that compare what it shows with the records."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser

_VOID = {"meta", "br", "link", "img", "input", "hr"}


@dataclass
class Element:
    tag: str
    attributes: dict[str, str] = field(default_factory=dict)
    children: list[Element | str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """All of it, whitespace as a browser shows it."""
        return " ".join(
            "".join(child if isinstance(child, str) else f" {child.text} " for child in self.children).split()
        )

    @property
    def raw(self) -> str:
        return "".join(child if isinstance(child, str) else child.raw for child in self.children)

    def walk(self) -> Iterator[Element]:
        yield self
        for child in self.children:
            if isinstance(child, Element):
                yield from child.walk()

    def all(self, tag: str, **attributes: str) -> list[Element]:
        wanted = {name.rstrip("_").replace("_", "-"): value for name, value in attributes.items()}
        return [
            element
            for element in self.walk()
            if element.tag == tag
            and all(value in element.attributes.get(name, "").split(" ") for name, value in wanted.items())
        ]

    def by_id(self, name: str) -> Element:
        return next(element for element in self.walk() if element.attributes.get("id") == name)

    def rows(self) -> list[list[str]]:
        """Of a table's body."""
        body = self.all("tbody")[0]
        return [[cell.text for cell in row.all("td")] for row in body.all("tr")]


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.root = Element("document")
        self._open = [self.root]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        element = Element(tag, {name: value or "" for name, value in attrs})
        self._open[-1].children.append(element)
        if tag not in _VOID:
            self._open.append(element)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._open[-1].children.append(Element(tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self._open[-1].tag == tag, f"</{tag}> closes <{self._open[-1].tag}>"
        self._open.pop()

    def handle_data(self, data: str) -> None:
        self._open[-1].children.append(data)


def read_page(text: str) -> Element:
    """Fails where an element is closed by another's end."""
    reader = _Reader()
    reader.feed(text)
    reader.close()
    assert [element.tag for element in reader._open] == ["document"], "an element is not closed"
    return reader.root
