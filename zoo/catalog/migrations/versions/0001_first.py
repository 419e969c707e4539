"""The first tables: tensors, components, blocks, models, chains and files."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    _content()
    _models()
    _files()


def _content() -> None:
    op.create_table(
        "tensors",
        sa.Column("digest", sa.String(length=64), nullable=False),
        sa.Column("dtype", sa.String(length=16), nullable=False),
        sa.Column("shape", sa.Text(), nullable=False),
        sa.Column("elements", sa.BigInteger(), nullable=False),
        sa.Column("nbytes", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("digest", name=op.f("pk_tensors")),
    )
    op.create_table(
        "components",
        sa.Column("digest", sa.String(length=64), nullable=False),
        sa.Column("base_digest", sa.String(length=64), nullable=False),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("family", sa.String(length=64), nullable=False),
        sa.Column("spec", sa.Text(), nullable=False),
        sa.Column("adapter_kind", sa.String(length=16), nullable=True),
        sa.Column("adapter_config", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("digest", name=op.f("pk_components")),
    )
    op.create_index(op.f("ix_components_base_digest"), "components", ["base_digest"], unique=False)
    op.create_table(
        "component_tensors",
        sa.Column("component", sa.String(length=64), nullable=False),
        sa.Column("adapter", sa.Boolean(), nullable=False),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("tensor", sa.String(length=64), nullable=False),
        sa.ForeignKeyConstraint(
            ["component"], ["components.digest"], name=op.f("fk_component_tensors_component"), ondelete="CASCADE"
        ),
        sa.ForeignKeyConstraint(["tensor"], ["tensors.digest"], name=op.f("fk_component_tensors_tensor")),
        sa.PrimaryKeyConstraint("component", "adapter", "position", name=op.f("pk_component_tensors")),
    )
    op.create_index(op.f("ix_component_tensors_tensor"), "component_tensors", ["tensor"], unique=False)
    op.create_table(
        "blocks",
        sa.Column("digest", sa.String(length=64), nullable=False),
        sa.PrimaryKeyConstraint("digest", name=op.f("pk_blocks")),
    )
    op.create_table(
        "block_components",
        sa.Column("block", sa.String(length=64), nullable=False),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("component", sa.String(length=64), nullable=False),
        sa.ForeignKeyConstraint(
            ["block"], ["blocks.digest"], name=op.f("fk_block_components_block"), ondelete="CASCADE"
        ),
        sa.ForeignKeyConstraint(["component"], ["components.digest"], name=op.f("fk_block_components_component")),
        sa.PrimaryKeyConstraint("block", "position", name=op.f("pk_block_components")),
    )
    op.create_index(op.f("ix_block_components_component"), "block_components", ["component"], unique=False)


def _models() -> None:
    op.create_table(
        "models",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("name", sa.String(length=255), nullable=False),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("base", sa.Integer(), nullable=True),
        sa.Column("family", sa.String(length=64), nullable=False),
        sa.Column("source", sa.Text(), nullable=False),
        sa.Column("fingerprint", sa.String(length=64), nullable=False),
        sa.Column("created", sa.DateTime(), nullable=False),
        sa.ForeignKeyConstraint(["base"], ["models.id"], name=op.f("fk_models_base")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_models")),
        sa.UniqueConstraint("name", name=op.f("uq_models_name")),
    )
    op.create_index(op.f("ix_models_base"), "models", ["base"], unique=False)
    op.create_table(
        "model_components",
        sa.Column("model", sa.Integer(), nullable=False),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("layer", sa.Integer(), nullable=True),
        sa.Column("component", sa.String(length=64), nullable=False),
        sa.ForeignKeyConstraint(["component"], ["components.digest"], name=op.f("fk_model_components_component")),
        sa.ForeignKeyConstraint(["model"], ["models.id"], name=op.f("fk_model_components_model"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("model", "position", name=op.f("pk_model_components")),
    )
    op.create_index(op.f("ix_model_components_component"), "model_components", ["component"], unique=False)
    op.create_table(
        "model_tensors",
        sa.Column("model", sa.Integer(), nullable=False),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("tensor", sa.String(length=64), nullable=False),
        sa.ForeignKeyConstraint(["model"], ["models.id"], name=op.f("fk_model_tensors_model"), ondelete="CASCADE"),
        sa.ForeignKeyConstraint(["tensor"], ["tensors.digest"], name=op.f("fk_model_tensors_tensor")),
        sa.PrimaryKeyConstraint("model", "position", name=op.f("pk_model_tensors")),
    )
    op.create_index(op.f("ix_model_tensors_tensor"), "model_tensors", ["tensor"], unique=False)
    op.create_table(
        "model_blocks",
        sa.Column("model", sa.Integer(), nullable=False),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("block", sa.String(length=64), nullable=False),
        sa.Column("lo", sa.Integer(), nullable=False),
        sa.Column("hi", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(["block"], ["blocks.digest"], name=op.f("fk_model_blocks_block")),
        sa.ForeignKeyConstraint(["model"], ["models.id"], name=op.f("fk_model_blocks_model"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("model", "position", name=op.f("pk_model_blocks")),
    )
    op.create_index(op.f("ix_model_blocks_block"), "model_blocks", ["block"], unique=False)


def _files() -> None:
    op.create_table(
        "weight_files",
        sa.Column("model", sa.Integer(), nullable=False),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("path", sa.Text(), nullable=False),
        sa.Column("header", sa.String(length=64), nullable=False),
        sa.ForeignKeyConstraint(["model"], ["models.id"], name=op.f("fk_weight_files_model"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("model", "position", name=op.f("pk_weight_files")),
    )
    op.create_index(op.f("ix_weight_files_header"), "weight_files", ["header"], unique=False)
    op.create_table(
        "weight_entries",
        sa.Column("model", sa.Integer(), nullable=False),
        sa.Column("file", sa.Integer(), nullable=False),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("tensor", sa.String(length=64), nullable=False),
        sa.ForeignKeyConstraint(
            ["model", "file"],
            ["weight_files.model", "weight_files.position"],
            name=op.f("fk_weight_entries_model_file"),
            ondelete="CASCADE",
        ),
        sa.ForeignKeyConstraint(["tensor"], ["tensors.digest"], name=op.f("fk_weight_entries_tensor")),
        sa.PrimaryKeyConstraint("model", "file", "position", name=op.f("pk_weight_entries")),
    )
    op.create_index(op.f("ix_weight_entries_tensor"), "weight_entries", ["tensor"], unique=False)
    op.create_table(
        "side_files",
        sa.Column("model", sa.Integer(), nullable=False),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("path", sa.Text(), nullable=False),
        sa.Column("blob", sa.String(length=64), nullable=False),
        sa.Column("nbytes", sa.BigInteger(), nullable=False),
        sa.Column("inherited", sa.Boolean(), nullable=False),
        sa.ForeignKeyConstraint(["model"], ["models.id"], name=op.f("fk_side_files_model"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("model", "position", name=op.f("pk_side_files")),
    )
    op.create_index(op.f("ix_side_files_blob"), "side_files", ["blob"], unique=False)
    op.create_table(
        "settings",
        sa.Column("key", sa.String(length=64), nullable=False),
        sa.Column("value", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("key", name=op.f("pk_settings")),
    )
