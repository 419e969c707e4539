"""Download a checkpoint from the Hugging Face hub into the hub's own cache: select files, translate errors.

The download is huggingface_hub's (resumed, verified, shared with transformers). A token comes from the environment or
huggingface_hub's login; it is never read or shown here.
"""

from __future__ import annotations

import errno
import glob
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from zoo.errors import InputError, StoreFull, UnsafeCheckpoint

#: Files beside the weights: configs, indices, tokenizers, templates, texts.
_SIDE = re.compile(
    r".*\.(json|model|jinja|txt|md|tiktoken)|(LICENSE|LICENCE|NOTICE|README|USE_POLICY)[^/]*", re.IGNORECASE
)
_TEMPLATES = "additional_chat_templates/"
#: `consolidated*.safetensors` has another vendor's layout; transformers does not read it either.
_SAFETENSORS = re.compile(r"(?!consolidated)[^/]*\.safetensors")
_META = re.compile(r"consolidated\.\d{2}\.pth")
_PICKLES = re.compile(r"(pytorch_model[^/]*|adapter_model|pytorch_adapter)\.bin")


def fetch(repo: str, revision: str | None = None, allow_pickle: bool = False, gguf: str | None = None) -> Path:
    """Download the files of a repository that an ingest needs.

    Args:
        repo: The hub's id, `owner/name` or `name`.
        revision: Branch, tag or commit; the default branch when None.
        allow_pickle: Use `*.bin` weights if there is no other format.
        gguf: The GGUF file to use; None for other formats, or the only GGUF file if there are none.

    Returns:
        The folder in the hub's cache. Without a network, the result of an earlier download.

    Raises:
        InputError: No such repository or revision, no permission, a bad id, or the hub cannot be reached.
        UnsafeCheckpoint: It has pickled weights only, and they are not allowed.
        StoreFull: No space is left for the cache.
    """
    from huggingface_hub import HfApi, snapshot_download

    with _clear_errors(repo, revision):
        try:
            info = HfApi().model_info(repo, revision=revision)
        except _unreachable():
            return Path(
                snapshot_download(repo, revision=revision, local_files_only=True, allow_patterns=["config.json"])
            )
    files = wanted([sibling.rfilename for sibling in info.siblings or []], repo, allow_pickle, gguf)
    with _clear_errors(repo, revision):
        # Escaped, since the patterns are shell patterns.
        return Path(snapshot_download(repo, revision=revision, allow_patterns=[glob.escape(path) for path in files]))


def wanted(files: Iterable[str], repo: str, allow_pickle: bool = False, gguf: str | None = None) -> tuple[str, ...]:
    """Return the files of a repository that make up its checkpoint: a pure function of their names.

    Weights are the GGUF file that was asked for; else safetensors if there are any; else Meta's shards; else pickles if
    allowed; else the only GGUF file. Only the top folder counts, so `original/`, `onnx/` and training checkpoints are
    not downloaded.

    Raises:
        InputError: The repository holds no weights that can be read, or several GGUF files and nothing else.
        UnsafeCheckpoint: It has pickled weights only.
    """
    names = sorted(set(files))
    ggufs = [name for name in names if "/" not in name and name.lower().endswith(".gguf")]
    if gguf is not None and gguf not in ggufs:
        raise InputError(f"{repo} holds no GGUF file {gguf[:100]!r} at its top{_listed(ggufs)}")
    weights = [gguf] if gguf is not None else [name for name in names if _SAFETENSORS.fullmatch(name)]
    if not weights and "params.json" in names:
        weights = [name for name in names if _META.fullmatch(name)]
    pickles = [name for name in names if _PICKLES.fullmatch(name)]
    if not weights and ggufs and not (pickles and allow_pickle):
        if len(ggufs) > 1:
            raise InputError(f"{repo} holds several GGUF files: say which with --file{_listed(ggufs)}")
        weights = ggufs
    if not weights and pickles:
        if not allow_pickle:
            raise UnsafeCheckpoint(
                f"{repo} has pickled weights only ({pickles[0]}), which can run code; --allow-pickle reads tensors only"
            )
        weights = pickles
    if not weights:
        raise InputError(
            f"{repo} holds no weights at its top: no *.safetensors, *.gguf or consolidated.*.pth with params.json"
        )
    sides = [name for name in names if _SIDE.fullmatch(name) and ("/" not in name or name.startswith(_TEMPLATES))]
    return (*weights, *sides)


def _listed(names: list[str]) -> str:
    return f" ({', '.join(names[:5])}{', ...' if len(names) > 5 else ''})" if names else ""


def _unreachable() -> tuple[type[Exception], ...]:
    """Return huggingface_hub's exceptions for an unreachable hub; its cache may still have the files."""
    import httpx
    from huggingface_hub.errors import OfflineModeIsEnabled

    return (OfflineModeIsEnabled, httpx.ConnectError, httpx.TimeoutException)


@contextmanager
def _clear_errors(repo: str, revision: str | None) -> Iterator[None]:
    """Translate each failure into one line.

    The library's own messages span lines and contain addresses and request ids.
    """
    from huggingface_hub import errors

    try:
        yield
    except errors.HFValidationError:
        raise InputError(f"{repo!r} is neither a folder here nor a possible hub id (owner/name)") from None
    except errors.GatedRepoError:
        raise InputError(
            f"{repo} is gated: accept its terms on its hub page, then log in with 'hf auth login' or set HF_TOKEN"
        ) from None
    except errors.RepositoryNotFoundError:
        reason = (
            "no folder here and no repository on the hub has this name; if it is private, log in with 'hf auth "
            "login' or set HF_TOKEN"
        )
        raise InputError(f"{repo}: {reason}") from None
    except errors.RevisionNotFoundError:
        raise InputError(f"{repo} has no revision {revision!r}") from None
    except (errors.LocalEntryNotFoundError, *_unreachable()):
        raise InputError(
            f"{repo} is not a folder here, the hub cannot be reached, and its cache does not hold it"
        ) from None
    except errors.HfHubHTTPError as error:
        raise InputError(f"{repo}: the hub answered with an error ({error.response.status_code})") from None
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise StoreFull("no space left on the disk of the hub's cache") from None
        raise InputError(
            f"{repo}: the download failed ({type(error).__name__}); try again, it continues where it stopped"
        ) from None
