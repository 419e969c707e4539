"""Keep a length predictor in the zoo: a model of kind `lengths` beside its target, and read it for serving.

    lengths.safetensors   what was trained, and the target's embedding, which the store has already
    lengths.json          the target and its content, sampling, edges, scores

Contract: a predictor holds for one content of its target. If the target's name gets other content, it is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from surgery.tensors.pool import stored_tensor
from surgery.tensors.store import keep_tensors
from surrogates.lengths.classifier import LengthClassifier, padded, trained_weights
from surrogates.lengths.training import TrainedLengths
from zoo.catalog.names import check_name
from zoo.errors import InputError, MalformedCheckpoint, NameTaken, NotFound
from zoo.manifest import ModelManifest, SideFile, TensorMeta, WeightFile
from zoo.objects.headers import make_header
from zoo.store import Store

WEIGHTS_FILE, DOCUMENT_FILE = "lengths.safetensors", "lengths.json"
#: Ending of the name of a predictor, behind that of its target.
ENDING = "@lengths"
#: Prompts of a batch, and tokens above which a prompt runs alone (TI-12).
_BATCH, _CUTTING = 16, 512
_EMBEDDING = "embedding"


def embedding_of(manifest: ModelManifest) -> TensorMeta:
    """Return the token embedding of a model. Raises InputError if it has none."""
    metas = {tensor.digest: tensor for tensor in manifest.tensors}
    for placed in manifest.components:
        if placed.component.kind == "embedding":
            found = [metas[digest] for _, digest in placed.component.tensors if len(metas[digest].shape) == 2]
            if found:
                return max(found, key=lambda meta: meta.shape[0])
    raise InputError(f"{manifest.name} has no embedding of tokens")


def put_predictor(
    store: Store,
    name: str,
    target: ModelManifest,
    trained: TrainedLengths,
    document: Mapping[str, Any],
    replace: bool = False,
) -> None:
    """Store a predictor, durably.

    Args:
        replace: Remove an older predictor of that name in the same transaction: a failure leaves the older one.

    Raises NameTaken, NotFound, StoreFull, StoreError, InputError for a name that is none or a target that has changed.
    """
    shared = {_EMBEDDING: embedding_of(target)}
    put_lengths(store, name, target, trained_weights(trained.module), shared, document, replace)


def put_lengths(
    store: Store,
    name: str,
    target: ModelManifest,
    weights: Mapping[str, torch.Tensor],
    shared: Mapping[str, TensorMeta],
    document: Mapping[str, Any],
    replace: bool,
) -> None:
    """Store what predicts lengths; `shared`: tensors of the target. The rest is as in `put_predictor`."""
    check_name(name)
    with store.ingesting():
        kept = {**keep_tensors(store, weights), **shared}
        header = make_header([(key, meta.dtype, meta.shape) for key, meta in kept.items()], {"format": "pt"})
        side = (json.dumps(document, indent=2) + "\n").encode()
        entries = tuple((key, meta.digest) for key, meta in kept.items())
        manifest = ModelManifest(
            name=name,
            kind="lengths",
            base=target.name,
            family="lengths",
            source=f"lengths of {target.name}'s answers",
            components=(),
            weight_files=(WeightFile(WEIGHTS_FILE, store.blobs.put(header), entries),),
            side_files=(SideFile(DOCUMENT_FILE, store.blobs.put(side), len(side)),),
            tensors=tuple({meta.digest: meta for meta in kept.values()}.values()),
        )
        with store.catalog.writing() as writer:
            if writer.model(target.name).fingerprint != target.fingerprint:
                raise InputError(f"{target.name} was replaced meanwhile: run `zoo lengths` again")
            if replace and name in writer.names():
                _require_predictor(writer.model(name))
                writer.remove_model(name)
            writer.put_model(manifest)


@dataclass(frozen=True, slots=True)
class LengthPredictor:
    """A predictor that is ready.

    Fields:
        name, target: Its own name and its target's.
        edges: Least length of each bucket, in tokens; the last one has no end.
    """

    name: str
    target: str
    edges: tuple[int, ...]
    module: LengthClassifier

    @torch.inference_mode()
    def masses(self, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
        """Return the probability of each bucket for each prompt, in order. Batches are padded to their longest."""
        found: dict[int, list[float]] = {}
        for some in batches([len(prompt) for prompt in prompts]):
            logits = self.module(**padded([prompts[at] for at in some]))["logits"]
            found.update(zip(some, torch.softmax(logits.float(), dim=-1).tolist(), strict=True))
        return [found[at] for at in range(len(prompts))]


def batches(lengths: Sequence[int]) -> list[list[int]]:
    """Return the numbers of the prompts of each batch: so many of similar length, long ones alone (TI-12)."""
    order = sorted(range(len(lengths)), key=lambda at: lengths[at])
    short = [at for at in order if lengths[at] <= _CUTTING]
    return [short[at : at + _BATCH] for at in range(0, len(short), _BATCH)] + [
        [at] for at in order if lengths[at] > _CUTTING
    ]


def stored_predictor(store: Store, target: ModelManifest) -> LengthPredictor:
    """Return the predictor of a model.

    Raises:
        NotFound: It has none.
        InputError: The predictor's target had other content.
        MalformedCheckpoint: What is stored is no predictor.
        DamagedObject: A stored tensor does not match its digest.
    """
    name = target.name + ENDING
    with store.catalog.reading() as reader:
        if name not in reader.names():
            raise NotFound(f"{target.name} has no length predictor: `zoo lengths {target.name}` makes one")
        manifest = reader.model(name)
    document = document_of(store, manifest, target)
    entries = dict(manifest.weight_files[0].entries) if manifest.weight_files else {}
    edges = tuple(int(each) for each in document["edges"])
    try:
        module = LengthClassifier(stored_tensor(store, entries.pop(_EMBEDDING)), len(edges), float(document["spread"]))
        module.load_state_dict({key: stored_tensor(store, digest) for key, digest in entries.items()})
    except (KeyError, RuntimeError) as error:
        raise MalformedCheckpoint(f"{name} is no length predictor of this version: {error}") from None
    return LengthPredictor(name, target.name, edges, module.eval())


def document_of(store: Store, manifest: ModelManifest, target: ModelManifest, how: str = "") -> dict[str, Any]:
    """Return what is written of a predictor; `how`: options that make it.

    Raises MalformedCheckpoint, InputError as `stored_predictor`.
    """
    document: dict[str, Any] = json.loads(_blob(store, manifest))
    if document["fingerprint"] != target.fingerprint:
        raise InputError(
            f"{manifest.name} predicts another {target.name}: `zoo lengths {target.name}{how} --replace` makes one for "
            "what is stored now"
        )
    return document


def _require_predictor(manifest: ModelManifest) -> None:
    if manifest.kind != "lengths":
        raise NameTaken(f"{manifest.name} is another model: remove it first")


def _blob(store: Store, manifest: ModelManifest) -> bytes:
    side = next((side for side in manifest.side_files if side.path == DOCUMENT_FILE), None)
    if manifest.kind != "lengths" or side is None:
        raise MalformedCheckpoint(f"{manifest.name} is no length predictor")
    return store.read_blob(side.blob)
