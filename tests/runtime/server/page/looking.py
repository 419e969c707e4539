"""Read the page as a browser does, without one: elements with their attributes and text, from the HTML."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path

import httpx

from tests.zoo.factory import ingest, manifest_of, some_bytes, with_adapter
from zoo.manifest import ModelKind
from zoo.store import Store

#: Elements without an end.
_EMPTY = {"meta", "link", "input", "br", "img", "hr"}
#: A name that would be markup, an attribute's end and a script if it were not escaped.
HOSTILE = "x\"><script>alert(1)</script><b onload='a'>&amp;{{ 7*7 }}"


@dataclass
class Element:
    """An element with what is inside."""

    tag: str
    attributes: dict[str, str]
    inside: list[Element | str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """Everything that is written inside, with single spaces."""
        return " ".join(self.raw.split())

    @property
    def raw(self) -> str:
        return "".join(each if isinstance(each, str) else each.raw for each in self.inside)

    def all(self, tag: str, **attributes: str) -> list[Element]:
        """Return the elements inside with a tag, a class (`class_`) and other attributes."""
        return [each for each in self if each.tag == tag and _fits(each, attributes)]

    def one(self, tag: str, **attributes: str) -> Element:
        (found,) = self.all(tag, **attributes)
        return found

    def __iter__(self) -> Iterator[Element]:
        for child in self.inside:
            if isinstance(child, Element):
                yield child
                yield from child


def _fits(element: Element, wanted: dict[str, str]) -> bool:
    classes = element.attributes.get("class", "").split()
    return all(
        value in classes if name == "class_" else element.attributes.get(name) == value
        for name, value in wanted.items()
    )


class _Reading(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.root = Element("", {})
        self._open = [self.root]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        element = Element(tag, {name: value or "" for name, value in attrs})
        self._open[-1].inside.append(element)
        if tag not in _EMPTY:
            self._open.append(element)

    def handle_endtag(self, tag: str) -> None:
        assert self._open[-1].tag == tag, f"</{tag}> ends <{self._open[-1].tag}>"
        self._open.pop()

    def handle_data(self, data: str) -> None:
        self._open[-1].inside.append(data)

    def finished(self) -> Element:
        self.close()
        assert len(self._open) == 1, f"<{self._open[-1].tag}> is never closed"
        return self.root


def parsed(text: str) -> Element:
    """Return a document. Fails if an element is closed that is not open, or the other way round."""
    reading = _Reading()
    reading.feed(text)
    return reading.finished()


def seen(http: httpx.Client, path: str, status: int = 200) -> Element:
    """Return a view, after checking what holds for each: nothing inline, nothing from another host."""
    response = http.get(path)
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    policy = response.headers["content-security-policy"]
    assert policy.startswith("default-src 'self';") and "unsafe" not in policy and "http" not in policy
    assert response.headers["x-content-type-options"] == "nosniff"
    found = parsed(response.text)
    for element in found:
        assert "style" not in element.attributes and not any(name.startswith("on") for name in element.attributes)
        for name in ("href", "src", "action"):
            assert element.attributes.get(name, "/").startswith(("/", "#")), element.attributes
            assert not element.attributes.get(name, "").startswith("//")
        if element.tag == "script":
            assert element.attributes.get("src") and not element.text
    return found


@contextmanager
def family(root: Path) -> Iterator[Store]:
    """A store of a base of three components, two fine-tunes, an adapter of one, and a model with a hostile name."""
    with Store.open(root) as store:
        ingest(store, "org/base", [1, 2, 3])
        made(store, "org/fine", [1, 2, 4], "full", "org/base")
        made(store, "org/twin", [1, 2, 5], "full", "org/base")
        adapted(store, "org/lora", "org/fine", [1, 2, 4])
        made(store, HOSTILE, [9], "foundation", None)
        yield store


def made(store: Store, name: str, seeds: Sequence[int], kind: ModelKind, base: str | None) -> None:
    """Put a model of tensors of 100 bytes, one per seed."""
    with store.ingesting():
        tensors = [put.tensor for put in store.objects.put_many(some_bytes(seed) for seed in seeds)]
        header, side = store.blobs.put(f"header of {name}".encode()), store.blobs.put(b"{}")
        with store.catalog.writing() as writer:
            writer.put_model(manifest_of(name, tensors, kind, base, header, side))


def adapted(store: Store, name: str, base: str, seeds: Sequence[int]) -> None:
    """Put a LoRA on the first component of a model."""
    with store.ingesting():
        tensors = [put.tensor for put in store.objects.put_many(some_bytes(seed) for seed in seeds)]
        (low,) = [put.tensor for put in store.objects.put_many([some_bytes(77, 10)])]
        header, side = store.blobs.put(f"header of {name}".encode()), store.blobs.put(b"{}")
        whole = manifest_of(name, tensors, "lora", base, header, side)
        parts = (with_adapter(whole.components[0], [("a", low.digest)]), *whole.components[1:])
        changed = {**vars(whole), "components": parts, "tensors": (*whole.tensors, low)}
        with store.catalog.writing() as writer:
            writer.put_model(type(whole)(**changed))
