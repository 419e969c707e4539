"""Agents on threads read their engines' settings one after the other."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest

from cli.serving import agent_engines


def test_settings_are_converted_by_one_thread_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """msgspec crashes where two threads look into the same dataclass for the first time."""
    inside, most, guard = 0, 0, threading.Lock()

    def convert(*given: Any) -> Any:
        nonlocal inside, most
        with guard:
            inside += 1
            most = max(most, inside)
        time.sleep(0.02)
        with guard:
            inside -= 1
        raise msgspec.ValidationError("enough seen")

    monkeypatch.setattr(agent_engines.msgspec, "convert", convert)
    with ThreadPoolExecutor(4) as pool:
        for each in [pool.submit(agent_engines.ENGINES[name], {}) for name in ("staged", "counting") * 4]:
            with pytest.raises(msgspec.ValidationError):
                each.result()
    assert most == 1
