"""Serve a model of the store that is not served yet: by order of an operator, or when a request first names it."""

from __future__ import annotations

from starlette.concurrency import run_in_threadpool

from runtime.frontend.served_models import ServedModel
from runtime.server.context import Service


def load_model(service: Service, name: str) -> ServedModel:
    """Load a model, and return it with its tokenizer. Waits; raises as the driver's `load`."""
    driver = service.driver
    loaded = driver.load(name)
    try:
        # Use the driver's own spec: its context length is limited to what the device can hold.
        spec = next((spec for spec in driver.models() if spec.name == loaded.name), loaded)
        return service.source.served(spec)
    except Exception:
        driver.unload(loaded.name)
        raise


async def ensure_served(service: Service, name: str) -> None:
    """Serve a model, by its full name, unless that was done meanwhile. Raises as the driver's `load`."""
    async with service.changing:
        if not service.models.has(name):
            service.models.add(await run_in_threadpool(load_model, service, name))
