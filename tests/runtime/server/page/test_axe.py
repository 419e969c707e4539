"""axe finds no fault in any view of the page, light and dark, wide and narrow.

axe-core is a package of npm: `BLOCKZOO_AXE` names its file `axe.min.js`. It runs in the browser, nothing is loaded.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chromium import Browser, browsing
from tests.runtime.server.harness import Running
from tests.runtime.server.page.test_browser import VIEWS

AXE = os.environ.get("BLOCKZOO_AXE", "")
pytestmark = [
    pytest.mark.chromium,
    pytest.mark.skipif(not AXE, reason="THE PAGE IS NOT TESTED WITH AXE: BLOCKZOO_AXE names no axe.min.js"),
]
_BEGIN = "window.found = null; axe.run(document).then((each) => { window.found = each; });"
_FAULTS = """
return window.found.violations.filter((one) => ["serious", "critical", "moderate"].includes(one.impact))
  .map((one) => `${one.impact} ${one.id}: ${one.nodes.length} x ${one.nodes[0].html.slice(0, 120)}`);
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with browsing() as started:
        yield started


@pytest.mark.parametrize(("width", "dark"), [(1200, False), (400, True)])
@pytest.mark.parametrize("view", VIEWS)
def test_a_view_has_no_fault(browser: Browser, server: Running, view: str, width: int, dark: bool) -> None:
    browser.look(width, 900, dark)
    browser.open(server.address + view)
    browser.run("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    browser.run(Path(AXE).read_text(encoding="utf-8"))
    browser.run(_BEGIN)
    assert browser.eventually(lambda: browser.run("return window.found !== null"))
    assert browser.run("return window.found.passes.length") > 10
    assert browser.run(_FAULTS) == []
