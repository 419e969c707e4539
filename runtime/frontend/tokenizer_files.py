"""Build a tokenizer from a model's files with the library `tokenizers` alone; importing transformers takes seconds.

The result gives the ids and the text that `AutoTokenizer` gives. For most models `tokenizer.json` defines them. Some of
transformers' classes build their own tokenizer around its vocabulary instead; those of the plain families are
reproduced here.

Whatever is not certain to give the same result returns None: other families and classes, files without a
`tokenizer.json`, settings that change how text is read.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from runtime.frontend.chat_template import ChatTemplate, chosen_template

_Kind = Literal["file", "LlamaTokenizer", "GPT2Tokenizer", "Qwen2Tokenizer"]
#: Families for which transformers takes the class from the tokenizer's own config, and those with a preferred class.
_OWN_CLASS = frozenset({"llama", "mistral", "blockzoo_chain"})
_PREFERRED = {"qwen2": "Qwen2Tokenizer", "qwen3": "Qwen2Tokenizer"}
#: Classes that use a tokenizer.json as it is.
_GENERIC = frozenset({"TokenizersBackend", "PreTrainedTokenizer", "PythonBackend"})
_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
#: Classes that build their own tokenizer around a file's vocabulary.
_REBUILT: Mapping[str | None, _Kind] = {
    "LlamaTokenizer": "LlamaTokenizer", "GPT2Tokenizer": "GPT2Tokenizer", "Qwen2Tokenizer": "Qwen2Tokenizer",
}  # fmt: skip
#: Special tokens that a class uses where the config has none.
_DEFAULTS: Mapping[_Kind, Mapping[str, str | None]] = {
    "file": {},
    "LlamaTokenizer": {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"},
    "GPT2Tokenizer": {**dict.fromkeys(("unk_token", "bos_token", "eos_token"), "<|endoftext|>"), "pad_token": None},
    "Qwen2Tokenizer": dict.fromkeys(("unk_token", "eos_token", "pad_token"), "<|endoftext|>"),
}
#: Settings that only transformers implements.
_UNUSUAL = (
    "auto_map",
    "fix_mistral_regex",
    "split_special_tokens",
    "fast_tokenizer_files",
    "init_inputs",
    "model_specific_special_tokens",
)
_QWEN_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class TokenizerFiles:
    """A tokenizer read from files.

    Fields:
        core: Converts text into ids and back.
        chat: The chat template, None without one.
    """

    core: Tokenizer
    chat: ChatTemplate | None


class _NotPlain(Exception):
    """Raised if the files may need transformers."""


def read_tokenizer(
    config: Mapping[str, Any], read: Callable[[str], bytes | None], paths: frozenset[str] = frozenset()
) -> TokenizerFiles | None:
    """Return the tokenizer of a model, None if only transformers can read its files.

    Args:
        config: The model's `config.json`.
        read: Returns the content of a file beside the weights, None if there is none.
        paths: The paths of all those files.
    """
    try:
        return _read(config, read, paths)
    except Exception:  # transformers reports what is wrong with the files; `tokenizers` raises bare exceptions
        return None


def _read(
    config: Mapping[str, Any], read: Callable[[str], bytes | None], paths: frozenset[str]
) -> TokenizerFiles | None:
    data, settings = read("tokenizer.json"), _object(read("tokenizer_config.json"))
    if data is None or "tekken.json" in paths or any(settings.get(name) for name in _UNUSUAL):
        return None
    kind = _kind(config, settings)
    core = Tokenizer.from_str(data.decode())
    special = _Special.from_settings(settings, read, core, paths)
    named = {**_DEFAULTS[kind], **special.named}
    if core.padding is not None:
        named.setdefault("pad_token", core.padding["pad_token"])
    if kind != "file":
        _rebuild(core, kind, settings, special.added)
    _add(
        core,
        special,
        {name: token for name, token in named.items() if token is not None},
        again=kind == "Qwen2Tokenizer",
    )
    texts = {name: str(named[name]) for name in _SPECIAL if named.get(name) is not None}
    return TokenizerFiles(core, _chat(settings, read, paths, texts))


def _object(data: bytes | None) -> dict[str, Any]:
    value = {} if data is None else json.loads(data)
    if not isinstance(value, dict):
        raise _NotPlain
    return value


def _kind(config: Mapping[str, Any], settings: Mapping[str, Any]) -> _Kind:
    """Return the class that transformers would use."""
    family, named = config.get("model_type"), settings.get("tokenizer_class") or config.get("tokenizer_class")
    name = None if named is None else str(named).removesuffix("Fast")
    preferred = _PREFERRED.get(str(family))
    if preferred is None and family not in _OWN_CLASS:
        raise _NotPlain
    if family == "mistral" or (name is None and preferred is None):
        return "file"
    # For qwen2 a class named by the config is ignored.
    chosen = preferred if preferred is not None and (name is None or family == "qwen2") else name
    if chosen in _GENERIC:
        return "file"
    if chosen not in _REBUILT:
        raise _NotPlain
    return _REBUILT[chosen]


@dataclass(frozen=True)
class _Special:
    """The special and added tokens of a config.

    Fields:
        named: By name in `_SPECIAL`; None where the config removes one.
        more: Special tokens without a name.
        added: By id, as the config has them.
    """

    named: dict[str, AddedToken | str | None]
    more: list[AddedToken | str]
    added: dict[int, AddedToken]

    @classmethod
    def from_settings(
        cls, settings: Mapping[str, Any], read: Callable[[str], bytes | None], core: Tokenizer, paths: frozenset[str]
    ) -> _Special:
        merged = dict(settings)
        if "additional_special_tokens" in merged:
            merged.setdefault("extra_special_tokens", merged.pop("additional_special_tokens"))
        if "added_tokens_decoder" in merged:
            added = {int(id_): AddedToken(**_plain(token)) for id_, token in merged["added_tokens_decoder"].items()}
        else:
            if "added_tokens.json" in paths:
                raise _NotPlain
            merged.update(_from_map(_object(read("special_tokens_map.json")), merged))
            added = dict(core.get_added_tokens_decoder())
        if any(
            name.endswith("_token") and name not in _SPECIAL and isinstance(value, str | dict)
            for name, value in merged.items()
        ):
            raise _NotPlain  # tokens with names outside `_SPECIAL`
        by_text = {token.content: token for token in added.values()}
        named = {name: _token(merged[name], by_text) for name in _SPECIAL if name in merged}
        more = merged.get("extra_special_tokens") or []
        if not isinstance(more, list):
            raise _NotPlain
        return cls(named, [_extra(each) for each in more], added)


def _plain(token: Any) -> dict[str, Any]:
    if not isinstance(token, dict):
        raise _NotPlain
    return {name: value for name, value in token.items() if name != "__type"}


def _from_map(special: Mapping[str, Any], settings: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the entries of `special_tokens_map.json`, the older file of special tokens."""
    for name, value in special.items():
        if name not in _SPECIAL:
            if (
                name not in ("additional_special_tokens", "extra_special_tokens")
                or settings.get("extra_special_tokens")
                or value
            ):
                raise _NotPlain
            continue
        yield name, AddedToken(**{**_plain(value), "special": True}) if isinstance(value, dict) else value


def _token(value: Any, by_text: Mapping[str, AddedToken]) -> AddedToken | str | None:
    if isinstance(value, dict):
        if value.get("__type") != "AddedToken":
            raise _NotPlain
        value = AddedToken(**_plain(value))
    if value is None or not isinstance(value, str | AddedToken):
        if value is not None:
            raise _NotPlain
        return None
    return by_text.get(str(value) if isinstance(value, str) else value.content, value)


def _extra(value: Any) -> AddedToken | str:
    found = _token(value, {})
    if found is None:
        raise _NotPlain
    return found


def _text(token: AddedToken | str) -> str:
    return token if isinstance(token, str) else str(token.content)


def _add(core: Tokenizer, special: _Special, named: Mapping[str, AddedToken | str], again: bool) -> None:
    """Add the config's tokens that the file lacks, in transformers' order, so that new ones get the same ids.

    With `again`, the named ones are added once more at the end.
    """
    names = {_text(token) for token in named.values()}
    known = {token.content for token in (*core.get_added_tokens_decoder().values(), *special.added.values())}
    wanted: list[AddedToken | str] = [token for _, token in sorted(special.added.items())]
    for token in (*named.values(), *special.more):
        if _text(token) not in known:
            known.add(_text(token))
            wanted.append(token)
    for token in wanted:
        if isinstance(token, AddedToken) and token.content in names:
            token.special = True
    if wanted:
        core.add_tokens([AddedToken(token, special=True) if isinstance(token, str) else token for token in wanted])
    if again:
        everyone = dict.fromkeys((*map(_text, named.values()), *map(_text, special.more)))
        core.add_tokens([AddedToken(token, special=True) for token in everyone])


def _rebuild(core: Tokenizer, kind: _Kind, settings: Mapping[str, Any], added: Mapping[int, AddedToken]) -> None:
    """Replace the file's normalizer, pre-tokenizer and decoder with those that the class puts around the vocabulary."""
    model = core.model
    if not isinstance(model, models.BPE) or model.continuing_subword_prefix or model.end_of_word_suffix:
        raise _NotPlain
    _check_added(core, added)
    model.dropout, model.unk_token, model.ignore_merges = None, None, False
    model.fuse_unk = model.byte_fallback = kind == "LlamaTokenizer"
    prefix = settings.get("add_prefix_space")
    if kind == "LlamaTokenizer":
        prefix = prefix is None or bool(prefix)
        where = "never" if not prefix else "always" if settings.get("legacy") else "first"
        core.normalizer = None
        core.pre_tokenizer = pre_tokenizers.Metaspace(replacement="\u2581", prepend_scheme=where, split=False)
        steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
        core.decoder = decoders.Sequence([*steps, decoders.Strip(content=" ", left=1)] if prefix else steps)
        return
    core.decoder = decoders.ByteLevel()
    if kind == "GPT2Tokenizer":
        core.normalizer = None
        core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=bool(prefix))
        return
    core.normalizer = normalizers.NFC()
    words = pre_tokenizers.Split(Regex(_QWEN_WORDS), behavior="isolated", invert=False)
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [words, pre_tokenizers.ByteLevel(add_prefix_space=bool(prefix), use_regex=False)]
    )


def _check_added(core: Tokenizer, added: Mapping[int, AddedToken]) -> None:
    """Raise `_NotPlain` unless the config and the file have the same added tokens, with consecutive new ids.

    A class takes added tokens from the config alone and numbers those outside the vocabulary anew.
    """
    held = core.get_added_tokens_decoder()
    if {id_: token.__getstate__() for id_, token in held.items()} != {
        id_: token.__getstate__() for id_, token in added.items()
    }:
        raise _NotPlain
    first = core.get_vocab_size(with_added_tokens=False)
    own = core.get_vocab(with_added_tokens=False)
    outside = [id_ for id_, token in sorted(held.items()) if token.content not in own]
    if outside != list(range(first, first + len(outside))) or any(
        own.get(token.content, id_) != id_ for id_, token in held.items()
    ):
        raise _NotPlain


def _chat(
    settings: Mapping[str, Any], read: Callable[[str], bytes | None], paths: frozenset[str], special: Mapping[str, str]
) -> ChatTemplate | None:
    own = read("chat_template.jinja")
    if own is None and any(path.startswith("additional_chat_templates/") for path in paths):
        raise _NotPlain
    source = own.decode() if own is not None else chosen_template(settings.get("chat_template"))
    return ChatTemplate(source, special) if source else None
