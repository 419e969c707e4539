"""Plan a low-rank rewriting: which tensors a full fine-tune changed, and which become factors or are carried whole.

A pure function of two manifests: it uses digests and shapes, never bytes. Models that cannot be rewritten are refused
here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from surgery.families.quantized import is_quantized
from surgery.families.table import FAMILIES, Family
from zoo.errors import InputError, WrongBase
from zoo.manifest import Component, ModelManifest, Placed

Carried = Literal["exact", "lowrank"]
Norms = Literal["exact", "fold"]

#: Pre-norm families with a norm that is a plain product (RMSNorm): norm -> the linear layers that read its output.
_READERS: Mapping[str, tuple[str, ...]] = {
    "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.qkv_proj"),
    "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj", "mlp.gate_up_proj"),
    "norm": ("lm_head",),
}
_FOLDING = frozenset({"llama", "mistral", "qwen2", "qwen3", "phi3"})


@dataclass(frozen=True, slots=True)
class DeltaPair:
    """A tensor's digests in the base and in the fine-tune."""

    base: str
    fine: str


@dataclass(frozen=True, slots=True)
class DeltaMatrix:
    """A linear layer or token table that becomes base + B A.

    Fields:
        at: Index of its component.
        path: Its module in the Hugging Face model.
        rows: Outputs, whichever way it is stored.
        columns: Inputs.
        turned: It is stored as [in, out] (Conv1D, tables).
        norm: The norm before it, with a change that is folded into it; None without one.
    """

    at: int
    path: str
    rows: int
    columns: int
    weight: DeltaPair
    turned: bool = False
    table: bool = False
    norm: DeltaPair | None = None

    @property
    def per_rank(self) -> int:
        """Elements of A and B per unit of rank."""
        return self.rows + self.columns

    @property
    def full_rank(self) -> int:
        return min(self.rows, self.columns)


@dataclass(frozen=True, slots=True)
class WholeTensor:
    """A tensor that is carried unchanged.

    Fields:
        saved: Carried with its whole module (peft's `modules_to_save`); else it is a bias.
    """

    at: int
    path: str
    leaf: str
    digest: str
    saved: bool


@dataclass(frozen=True)
class DeltaPlan:
    """How each changed tensor is carried: `matrices` as factors, `wholes` unchanged."""

    matrices: tuple[DeltaMatrix, ...]
    wholes: tuple[WholeTensor, ...]

    @property
    def per_rank(self) -> int:
        """Elements that one more unit of rank on every matrix costs."""
        return sum(matrix.per_rank for matrix in self.matrices)


def plan_deltas(
    exact: ModelManifest, base: ModelManifest | None, embeddings: Carried = "exact", norms: Norms = "exact"
) -> DeltaPlan:
    """Compare a full fine-tune with its base, tensor by tensor.

    Args:
        base: None if unknown, which is refused.
        embeddings: Whether the token table and the head are carried whole or as factors.
        norms: `fold` keeps the base's norms and folds their changes into the linear layers after them, in families with
            norms that are plain products. The components then are the base's own, and their rows run in its batch.

    Raises:
        InputError: The model is not a full fine-tune, changed no matrix, or changed one that cannot have a low-rank
            part.
        WrongBase: Base and fine-tune have different structures.
    """
    if base is None:
        raise InputError(
            f"{exact.name} is a foundation: it has no base that deltas could be taken from; --base names one"
        )
    _check_kind(exact, base)
    _check_alike(exact, base)
    planning = _Planning(exact, base, embeddings, norms)
    for at, placed in enumerate(exact.components):
        planning.look(at, placed, base.components[at].component)
    if not planning.matrices:
        raise InputError(f"{exact.name} has all its matrices from {base.name}: low-rank deltas have nothing to save")
    return DeltaPlan(tuple(planning.matrices), tuple(planning.wholes))


def _check_kind(exact: ModelManifest, base: ModelManifest) -> None:
    if exact.kind == "bitfit":
        raise InputError(f"{exact.name} costs only its biases already: low-rank deltas have nothing to save")
    if exact.kind not in ("full", "foundation"):
        raise InputError(f"{exact.name} is of kind {exact.kind}: low-rank deltas rewrite full fine-tunes only")
    for model in (exact, base):
        if any(is_quantized(placed.component) for placed in model.components):
            raise InputError(f"{model.name} is quantized: take low-rank deltas of exact models")


def _check_alike(exact: ModelManifest, base: ModelManifest) -> None:
    mine = [(p.component.kind, p.layer, p.component.family, p.component.spec) for p in exact.components]
    others = [(p.component.kind, p.layer, p.component.family, p.component.spec) for p in base.components]
    if len(mine) != len(others):
        raise WrongBase(
            f"{exact.name} has {len(mine)} components and {base.name} has {len(others)}: no deltas between them"
        )
    for a, b in zip(mine, others, strict=True):
        if a != b:
            where = a[0] if a[1] is None else f"{a[0]} of layer {a[1]}"
            raise WrongBase(
                f"the {where} of {exact.name} has other settings than that of {base.name}: no deltas between them"
            )


class _Planning:
    """State of one comparison."""

    def __init__(self, exact: ModelManifest, base: ModelManifest, embeddings: Carried, norms: Norms) -> None:
        self.matrices: list[DeltaMatrix] = []
        self.wholes: list[WholeTensor] = []
        self._exact = exact
        self._base = base
        self._family: Family = FAMILIES[exact.family]
        self._embeddings = embeddings
        self._folds = norms == "fold" and exact.family in _FOLDING
        self._shapes = {tensor.digest: tensor.shape for tensor in (*base.tensors, *exact.tensors)}

    def look(self, at: int, placed: Placed, base: Component) -> None:
        """Plan one component's tensors."""
        mine, theirs = dict(placed.component.tensors), dict(base.tensors)
        self._check_tensors(placed, mine, theirs)
        moved = {name for name in mine if mine[name] != theirs[name]}
        folded = self._folded(placed, mine, theirs, moved)
        for norm, readers in folded.items():
            moved |= set(readers)
            moved.discard(norm)
        modules = dict.fromkeys(name.rpartition(".")[0] for name in mine if name in moved)
        for module in modules:
            self._add(at, placed, module, mine, theirs, {r: n for n, readers in folded.items() for r in readers})

    def _folded(
        self, placed: Placed, mine: Mapping[str, str], theirs: Mapping[str, str], moved: set[str]
    ) -> dict[str, list[str]]:
        """Return norms to fold into the linear layers after them -> those layers' weights."""
        found: dict[str, list[str]] = {}
        for norm, readers in _READERS.items() if self._folds else ():
            weights = [f"{reader}.weight" for reader in readers if f"{reader}.weight" in mine]
            low_rank = all(self._carried_low_rank(placed, weight) for weight in weights)
            if f"{norm}.weight" in moved and weights and low_rank:
                found[f"{norm}.weight"] = weights
        return found

    def _add(
        self,
        at: int,
        placed: Placed,
        module: str,
        mine: Mapping[str, str],
        theirs: Mapping[str, str],
        norm_of: Mapping[str, str],
    ) -> None:
        name, path = f"{module}.weight", self._path(placed, module)
        low_rank = name in mine and self._carried_low_rank(placed, name)
        if low_rank and (mine[name] != theirs[name] or name in norm_of):
            norm = norm_of.get(name)
            self.matrices.append(
                self._matrix(
                    at,
                    placed,
                    name,
                    DeltaPair(theirs[name], mine[name]),
                    None if norm is None else DeltaPair(theirs[norm], mine[norm]),
                )
            )
        for key, digest in mine.items():
            leaf = key.rpartition(".")[2]
            if key.rpartition(".")[0] == module and not (low_rank and (leaf != "bias" or digest == theirs[key])):
                self.wholes.append(WholeTensor(at, path, leaf, digest, saved=not low_rank))

    def _matrix(self, at: int, placed: Placed, name: str, weight: DeltaPair, norm: DeltaPair | None) -> DeltaMatrix:
        shape = self._shapes[weight.fine]
        table = placed.component.kind == "embedding"
        turned = table or (self._family.name == "gpt2" and placed.layer is not None)
        rows, columns = (shape[1], shape[0]) if turned else shape
        return DeltaMatrix(
            at, self._path(placed, name.removesuffix(".weight")), rows, columns, weight, turned, table, norm
        )

    def _carried_low_rank(self, placed: Placed, name: str) -> bool:
        """Return whether a weight becomes factors if it changed: matrices of linear layers, and tables on request."""
        if placed.component.kind == "embedding":
            return self._embeddings == "lowrank" and name == f"{self._family.embedding[0]}.weight"
        if placed.component.kind == "lm_head":
            return self._embeddings == "lowrank" and name == "lm_head.weight"
        return name.endswith(".weight") and len(self._shapes[dict(placed.component.tensors)[name]]) == 2

    def _path(self, placed: Placed, module: str) -> str:
        """Return the module's path in the Hugging Face model."""
        if module == "lm_head":
            return module
        return (
            f"{self._family.prefix}{module}"
            if placed.layer is None
            else f"{self._family.prefix}{self._family.stack}.{placed.layer}.{module}"
        )

    def _check_tensors(self, placed: Placed, mine: Mapping[str, str], theirs: Mapping[str, str]) -> None:
        for name in sorted({*mine, *theirs}):
            where = name if placed.layer is None else f"{name} of layer {placed.layer}"
            if name not in mine or name not in theirs:
                raise WrongBase(
                    f"{where} is in one of {self._exact.name} and {self._base.name} only: no deltas between them"
                )
            if self._shapes[mine[name]] != self._shapes[theirs[name]]:
                shapes = f"{list(self._shapes[mine[name]])} and {list(self._shapes[theirs[name]])}"
                raise WrongBase(
                    f"{where} has shapes {shapes} in {self._exact.name} and {self._base.name}: no deltas between them"
                )
            if (
                self._family.name == "mixtral"
                and placed.component.kind == "ffn"
                and "norm" not in name
                and mine[name] != theirs[name]
            ):
                raise InputError(
                    f"{self._exact.name} moved its experts ({where}): deltas on experts and routers are not supported"
                )


def cheaper_rank(matrix: DeltaMatrix) -> int:
    """Return the largest rank at which the factors hold no more elements than the matrix itself."""
    return min(matrix.full_rank, max(1, matrix.rows * matrix.columns // matrix.per_rank))
