"""The block zoo: every distinct weight stored once, every model a chain of blocks. `from zoo import Zoo` is all you
need.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zoo.api import ModelHandle, Zoo

__all__ = ["ModelHandle", "Zoo"]


def __getattr__(name: str) -> Any:
    """The facade is loaded on first use: the store's own modules import neither it nor surgery."""
    if name in __all__:
        import zoo.api

        return getattr(zoo.api, name)
    raise AttributeError(f"module 'zoo' has no attribute {name!r}")
