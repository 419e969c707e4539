"""Pydantic models of tools in chat bodies, in OpenAI's shapes."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

MAX_TOOLS = 128
FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


class _ToolBody(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, frozen=True, protected_namespaces=())


class ToolFunction(_ToolBody):
    """A function that an answer may call. `parameters`: JSON schema of its arguments."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(_ToolBody):
    """A tool; only functions are served."""

    type: Literal["function"]
    function: ToolFunction


class NamedFunction(_ToolBody):
    """The name of a function to call."""

    name: FunctionName


class NamedTool(_ToolBody):
    """The choice of one function."""

    type: Literal["function"]
    function: NamedFunction


class CalledFunction(_ToolBody):
    """A call that the assistant has made. `arguments`: JSON, as it was answered."""

    name: FunctionName
    arguments: str = "{}"


class CalledTool(_ToolBody):
    """A call of a message."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction
