"""Find the model that serves a request: the one it names, or that model left behind so many of its layers, where the
request asks for that (`zoo serve --early-exit`, BL-30).

What adaptive requests get in place of their model is the scheduler's choice (`scheduler.admission.variant_choice`).
"""

from __future__ import annotations

from dataclasses import replace

from runtime.frontend.errors import unknown_model, unsupported
from runtime.frontend.schemas import ServedBody
from runtime.frontend.served_models import NotServedYet, ServedModel
from runtime.server.context import Service
from zoo.records import ClientKey


def model_for(service: Service, body: ServedBody, begun_on: str = "") -> ServedModel:
    """Return the model that a request gets.

    Args:
        begun_on: The model that a stored request was accepted for: what an alias points to may have changed since.

    Raises RequestError: 404 for a name that is not served, 400 for an exit that is not.
    """
    kept = body.early_exit is None and service.models.knows(begun_on)
    model = service.models.find(begun_on if kept else body.model, body.end_user)
    return model if body.early_exit is None else _exit(service, model, body.early_exit)


def check_model(service: Service, name: str, key: ClientKey) -> None:
    """Check that a client's key may ask for a model, by its name, an ending of it, or an alias.

    Raises RequestError 404, as for a model that is not served.
    """
    if key.models and not _is_allowed(service, name, frozenset(key.models)):
        raise unknown_model(f"The model `{name[:200]}` does not exist or is not served here.")


def _is_allowed(service: Service, name: str, allowed: frozenset[str]) -> bool:
    alias = None if service.models.knows(name) else service.models.alias(name)
    if alias is not None:  # any of its targets may answer
        return alias.name in allowed or allowed.issuperset(alias.models)
    try:
        return service.models.find(name).name in allowed
    except NotServedYet as unserved:
        return unserved.model.name in allowed


def _exit(service: Service, model: ServedModel, layers: int) -> ServedModel:
    if not service.config.early_exit:
        raise unsupported("early_exit", "this server runs without --early-exit")
    found = service.models.exit_of(model, layers)
    if found is None:
        known = ", ".join(map(str, service.models.exits_of(model))) or "none"
        raise unsupported(
            "early_exit", f"{model.name} is not served up to layer {layers} only; its exits here: {known}"
        )
    return replace(found, alias=model.alias)
