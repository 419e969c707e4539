"""The catalogue's tables. Content is keyed by digest; models have integer ids, so that a name can change.

    tensors <- component_tensors -> components <- block_components -> blocks
       ^                              ^                                 ^
       |                       model_components                    model_blocks
       +------- model_tensors ------> models <---------------------------+
       +------- weight_entries -> weight_files -> models <- side_files
                          equivalences, documents -> models          aliases -> alias_changes
                          client_keys, model_usage, prices, folded_usage

Changes go through `migrations/`; a test compares the two. This module does not depend on connections or queries.
"""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import BigInteger, Double, ForeignKey, ForeignKeyConstraint, Integer, String, Text
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from zoo.tables import named_constraints

#: Length of a digest in hex.
DIGEST = 64


class Base(DeclarativeBase):
    """Base of all tables."""

    metadata = named_constraints()


class Setting(Base):
    """One setting of the catalogue itself, such as the identity of its store."""

    __tablename__ = "settings"
    key: Mapped[str] = mapped_column(String(64), primary_key=True)
    value: Mapped[str] = mapped_column(Text)


class Tensor(Base):
    __tablename__ = "tensors"
    digest: Mapped[str] = mapped_column(String(DIGEST), primary_key=True)
    dtype: Mapped[str] = mapped_column(String(16))
    shape: Mapped[str] = mapped_column(Text)  # JSON
    elements: Mapped[int] = mapped_column(BigInteger)
    nbytes: Mapped[int] = mapped_column(BigInteger)


class ComponentRow(Base):
    """A component. `base_digest` equals `digest` unless the component carries an adapter."""

    __tablename__ = "components"
    digest: Mapped[str] = mapped_column(String(DIGEST), primary_key=True)
    base_digest: Mapped[str] = mapped_column(String(DIGEST), index=True)
    kind: Mapped[str] = mapped_column(String(16))
    family: Mapped[str] = mapped_column(String(64))
    spec: Mapped[str] = mapped_column(Text)
    adapter_kind: Mapped[str | None] = mapped_column(String(16))
    adapter_config: Mapped[str | None] = mapped_column(Text)


class ComponentTensor(Base):
    """A tensor of a component or of its adapter; `position` numbers each of the two lists."""

    __tablename__ = "component_tensors"
    component: Mapped[str] = mapped_column(ForeignKey("components.digest", ondelete="CASCADE"), primary_key=True)
    adapter: Mapped[bool] = mapped_column(primary_key=True)
    position: Mapped[int] = mapped_column(Integer, primary_key=True)
    name: Mapped[str] = mapped_column(Text)
    tensor: Mapped[str] = mapped_column(ForeignKey("tensors.digest"), index=True)


class Block(Base):
    __tablename__ = "blocks"
    digest: Mapped[str] = mapped_column(String(DIGEST), primary_key=True)


class BlockComponent(Base):
    __tablename__ = "block_components"
    block: Mapped[str] = mapped_column(ForeignKey("blocks.digest", ondelete="CASCADE"), primary_key=True)
    position: Mapped[int] = mapped_column(Integer, primary_key=True)
    component: Mapped[str] = mapped_column(ForeignKey("components.digest"), index=True)


class Model(Base):
    """A model. `created` is UTC."""

    __tablename__ = "models"
    id: Mapped[int] = mapped_column(Integer, primary_key=True)
    name: Mapped[str] = mapped_column(String(255), unique=True)
    kind: Mapped[str] = mapped_column(String(16))
    base: Mapped[int | None] = mapped_column(ForeignKey("models.id"), index=True)
    family: Mapped[str] = mapped_column(String(64))
    source: Mapped[str] = mapped_column(Text)
    fingerprint: Mapped[str] = mapped_column(String(DIGEST))
    created: Mapped[datetime]


class ModelComponent(Base):
    __tablename__ = "model_components"
    model: Mapped[int] = mapped_column(ForeignKey("models.id", ondelete="CASCADE"), primary_key=True)
    position: Mapped[int] = mapped_column(Integer, primary_key=True)
    layer: Mapped[int | None] = mapped_column(Integer)
    component: Mapped[str] = mapped_column(ForeignKey("components.digest"), index=True)


class ModelTensor(Base):
    """A tensor that a model references, in the manifest's order."""

    __tablename__ = "model_tensors"
    model: Mapped[int] = mapped_column(ForeignKey("models.id", ondelete="CASCADE"), primary_key=True)
    position: Mapped[int] = mapped_column(Integer, primary_key=True)
    tensor: Mapped[str] = mapped_column(ForeignKey("tensors.digest"), index=True)


class ModelBlock(Base):
    """A block of a model's chain: components [lo, hi) of the model."""

    __tablename__ = "model_blocks"
    model: Mapped[int] = mapped_column(ForeignKey("models.id", ondelete="CASCADE"), primary_key=True)
    position: Mapped[int] = mapped_column(Integer, primary_key=True)
    block: Mapped[str] = mapped_column(ForeignKey("blocks.digest"), index=True)
    lo: Mapped[int] = mapped_column(Integer)
    hi: Mapped[int] = mapped_column(Integer)


class WeightFileRow(Base):
    """A weight file of a model. `header` is the digest of the blob with the file's header."""

    __tablename__ = "weight_files"
    model: Mapped[int] = mapped_column(ForeignKey("models.id", ondelete="CASCADE"), primary_key=True)
    position: Mapped[int] = mapped_column(Integer, primary_key=True)
    path: Mapped[str] = mapped_column(Text)
    header: Mapped[str] = mapped_column(String(DIGEST), index=True)


class WeightEntry(Base):
    """Tensor number `position` of a model's weight file number `file`."""

    __tablename__ = "weight_entries"
    __table_args__ = (
        ForeignKeyConstraint(["model", "file"], ["weight_files.model", "weight_files.position"], ondelete="CASCADE"),
    )
    model: Mapped[int] = mapped_column(Integer, primary_key=True)
    file: Mapped[int] = mapped_column(Integer, primary_key=True)
    position: Mapped[int] = mapped_column(Integer, primary_key=True)
    key: Mapped[str] = mapped_column(Text)
    tensor: Mapped[str] = mapped_column(ForeignKey("tensors.digest"), index=True)


class SideFileRow(Base):
    __tablename__ = "side_files"
    model: Mapped[int] = mapped_column(ForeignKey("models.id", ondelete="CASCADE"), primary_key=True)
    position: Mapped[int] = mapped_column(Integer, primary_key=True)
    path: Mapped[str] = mapped_column(Text)
    blob: Mapped[str] = mapped_column(String(DIGEST), index=True)
    nbytes: Mapped[int] = mapped_column(BigInteger)
    inherited: Mapped[bool]


class EquivalenceRow(Base):
    """Components [a_lo, a_hi) of one model against [b_lo, b_hi) of another. `metrics` is JSON; `created` is UTC."""

    __tablename__ = "equivalences"
    id: Mapped[int] = mapped_column(Integer, primary_key=True)
    relation: Mapped[str] = mapped_column(String(16))
    a_model: Mapped[int] = mapped_column(ForeignKey("models.id", ondelete="CASCADE"), index=True)
    a_lo: Mapped[int] = mapped_column(Integer)
    a_hi: Mapped[int] = mapped_column(Integer)
    b_model: Mapped[int] = mapped_column(ForeignKey("models.id", ondelete="CASCADE"), index=True)
    b_lo: Mapped[int] = mapped_column(Integer)
    b_hi: Mapped[int] = mapped_column(Integer)
    probe: Mapped[str] = mapped_column(String(DIGEST))
    similarity: Mapped[float] = mapped_column(Double)
    control: Mapped[float | None] = mapped_column(Double)
    metrics: Mapped[str] = mapped_column(Text)
    created: Mapped[datetime]


class AliasChangeRow(Base):
    """What an alias was made to point to. Rows are never changed or deleted.

    `targets` and `figures` are JSON; the models are named, since they may be removed later. `previous`: the change that
    a rollback goes back to. `created` is UTC.
    """

    __tablename__ = "alias_changes"
    id: Mapped[int] = mapped_column(Integer, primary_key=True)
    alias: Mapped[str] = mapped_column(String(255), index=True)
    kind: Mapped[str] = mapped_column(String(16))
    targets: Mapped[str] = mapped_column(Text)
    previous: Mapped[int | None] = mapped_column(ForeignKey("alias_changes.id"), index=True)
    figures: Mapped[str] = mapped_column(Text)
    created: Mapped[datetime]


class AliasRow(Base):
    """A name that stands for models: those of its latest change."""

    __tablename__ = "aliases"
    name: Mapped[str] = mapped_column(String(255), primary_key=True)
    change: Mapped[int] = mapped_column(ForeignKey("alias_changes.id"), index=True)


class ClientKeyRow(Base):
    """A key of a server's client. `principal`: digest of its secret; `models` is JSON; times are UTC."""

    __tablename__ = "client_keys"
    id: Mapped[int] = mapped_column(Integer, primary_key=True)
    name: Mapped[str] = mapped_column(String(255))
    principal: Mapped[str] = mapped_column(String(DIGEST), index=True, unique=True)
    models: Mapped[str] = mapped_column(Text)
    requests_per_minute: Mapped[int | None] = mapped_column(BigInteger)
    tokens_per_day: Mapped[int | None] = mapped_column(BigInteger)
    priority: Mapped[int] = mapped_column(Integer)
    created: Mapped[datetime]
    revoked: Mapped[datetime | None]
    money_per_day: Mapped[int | None] = mapped_column(BigInteger)
    tokens_per_month: Mapped[int | None] = mapped_column(BigInteger)
    money_per_month: Mapped[int | None] = mapped_column(BigInteger)


class ModelUsageRow(Base):
    """What keys of a name have used on one day (UTC, as 2026-01-31) of one model; "": none is known.

    `cached_tokens` are those of the prompt tokens that were not computed. `cost` is what it cost when it was counted
    (`zoo.money`).
    """

    __tablename__ = "model_usage"
    name: Mapped[str] = mapped_column(String(255), primary_key=True)
    day: Mapped[str] = mapped_column(String(10), primary_key=True)
    model: Mapped[str] = mapped_column(String(255), primary_key=True)
    requests: Mapped[int] = mapped_column(BigInteger)
    prompt_tokens: Mapped[int] = mapped_column(BigInteger)
    generated_tokens: Mapped[int] = mapped_column(BigInteger)
    answers: Mapped[int] = mapped_column(BigInteger)
    cost: Mapped[int] = mapped_column(BigInteger)
    cached_tokens: Mapped[int] = mapped_column(BigInteger, server_default="0")


class FoldedUsageRow(Base):
    """Usage that a queue has kept for the catalogue and that `model_usage` contains (`folding`), until the queue has
    dropped it. `queue`, `id`: random names of the queue and of the usage in it.
    """

    __tablename__ = "folded_usage"
    queue: Mapped[str] = mapped_column(String(32), primary_key=True)
    id: Mapped[str] = mapped_column(String(32), primary_key=True)


class PriceRow(Base):
    """What a million tokens of a model cost (`zoo.money`); "": of all models without a price of their own.

    `cached`: prompt tokens that were not computed; None: as the rest of the prompt.
    """

    __tablename__ = "prices"
    model: Mapped[str] = mapped_column(String(255), primary_key=True)
    prompt: Mapped[int] = mapped_column(BigInteger)
    generated: Mapped[int] = mapped_column(BigInteger)
    cached: Mapped[int | None] = mapped_column(BigInteger)


class DocumentRow(Base):
    """A result stored whole. `value` is JSON; `created` is UTC."""

    __tablename__ = "documents"
    id: Mapped[int] = mapped_column(Integer, primary_key=True)
    kind: Mapped[str] = mapped_column(String(32))
    model: Mapped[int] = mapped_column(ForeignKey("models.id", ondelete="CASCADE"), index=True)
    key: Mapped[str] = mapped_column(String(255))
    value: Mapped[str] = mapped_column(Text)
    created: Mapped[datetime]
