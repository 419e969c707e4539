"""Write docs/cli.md and docs/http.md: `python -m cli.docs [FOLDER]`."""

from __future__ import annotations

import sys
from pathlib import Path

from cli.docs.cli_page import cli_page
from cli.docs.http_page import http_page

PAGES = {"cli.md": cli_page, "http.md": http_page}


def main(folder: Path) -> None:
    """Write every page into a folder."""
    for name, page in PAGES.items():
        (folder / name).write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path("docs"))
