"""Forms parsed in pieces cut anywhere: what other encoders write comes back byte for byte."""

from __future__ import annotations

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.frontend.errors import RequestError
from runtime.server.batches.multipart import MOST_HEAD, MOST_PARTS, FormPart, MultipartParser, boundary_of


def parsed(body: bytes, boundary: str, cuts: list[int]) -> list[tuple[FormPart, bytes]]:
    parser, parts, at = MultipartParser(boundary), list[tuple[FormPart, bytes]](), 0
    for end in [*sorted(cut % (len(body) + 1) for cut in cuts), len(body)]:
        for found in parser.feed(body[at:end]):
            if isinstance(found, FormPart):
                parts.append((found, b""))
            else:
                parts[-1] = parts[-1][0], parts[-1][1] + found
        at = end
    assert parser.ended
    return parts


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.one_of(st.sampled_from([b"\r\n", b"--", b"b", b"\r", b"-"]), st.binary(max_size=9)), max_size=12),
    st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]), max_size=12),
    st.lists(st.integers(0, 5000), max_size=12),
)
def test_what_httpx_writes_comes_back(pieces: list[bytes], field: str, cuts: list[int]) -> None:
    content = b"".join(pieces)
    request = httpx.Request(
        "POST",
        "http://a/",
        files={"file": ("lines.jsonl", content)},
        data={"purpose": field},
        headers={"content-type": "multipart/form-data; boundary=b"},
    )
    body = request.read()
    if b"\r\n--b" in content:  # not a form with this boundary
        return
    parts = parsed(body, boundary_of(request.headers["content-type"]), cuts)
    assert parts == [(FormPart("purpose", None), field.encode()), (FormPart("file", "lines.jsonl"), content)]


def test_no_more_than_a_boundary_is_held_back() -> None:
    parser = MultipartParser("xyz")
    list(parser.feed(b'--xyz\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'))
    passed = b"".join(found for _ in range(50) for found in parser.feed(b"\r\n--xy" * 1000) if isinstance(found, bytes))
    assert len(passed) > 50 * 6000 - 20 and len(parser._held) < 20


@pytest.mark.parametrize(
    "body",
    [
        b"--b\r\nno colon\r\n\r\nx\r\n--b--",
        b"--b\r\n\r\nx\r\n--b--",
        b"--b\r\nContent-Disposition: form-data\r\n\r\nx\r\n--b--",
        b'--b\r\nContent-Disposition: attachment; name="a"\r\n\r\nx\r\n--b--',
        b"--b" + b"x" * (MOST_HEAD + 9),
        b"--bxx\r\nContent-Disposition: form-data; name=a\r\n\r\nx\r\n--b--",
        b"--b\r\nContent-Disposition: form-data; name=a\r\n\r\nx\r\n" * (MOST_PARTS + 1),
    ],
)
def test_malformed_forms_are_refused(body: bytes) -> None:
    with pytest.raises(RequestError, match="cannot be read"):
        list(MultipartParser("b").feed(body))


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        ("application/json", 415),
        ("", 415),
        ("multipart/form-data", 400),
        ("multipart/form-data; boundary=" + "b" * 71, 400),
        ('multipart/form-data; boundary="a\x00b"', 400),
    ],
)
def test_bodies_that_are_no_forms(kind: str, status: int) -> None:
    with pytest.raises(RequestError) as refused:
        boundary_of(kind)
    assert refused.value.status == status
