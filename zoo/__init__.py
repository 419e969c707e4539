"""The block zoo: a store that keeps every distinct tensor once and every model as a chain of blocks.

Use `from zoo import Zoo`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zoo.api import ModelHandle, Zoo

__all__ = ["ModelHandle", "Zoo"]


def __getattr__(name: str) -> Any:
    """Import the facade on first use, since the store's own modules must import neither it nor `surgery`."""
    if name in __all__:
        import zoo.api

        return getattr(zoo.api, name)
    raise AttributeError(f"module 'zoo' has no attribute {name!r}")
