"""Sizes of models: tensors that a model has in its files only count too."""

from __future__ import annotations

from dataclasses import replace

from tests.zoo.factory import manifest_of
from zoo.catalog import Catalog
from zoo.manifest import TensorMeta, WeightFile


def test_tensors_of_files_alone_are_counted_and_shared(catalog: Catalog) -> None:
    """A GGUF file's own form of a tensor is in no component."""
    placed, encoded = TensorMeta("a" * 64, "U8", (100,)), TensorMeta("b" * 64, "U8", (30,))
    files = (WeightFile("model.gguf", "0" * 64, (("w", encoded.digest),)),)
    with catalog.writing() as writer:
        for name in ("one", "two"):
            writer.put_model(replace(manifest_of(name, [placed]), weight_files=files, tensors=(placed, encoded)))
        writer.put_model(manifest_of("three", [placed]))
    with catalog.reading() as reader:
        sizes = {model.name: (model.params, model.bytes, model.bytes_own) for model in reader.models()}
        assert sizes == {"one": (100, 130, 0), "two": (100, 130, 0), "three": (100, 100, 0)}
        assert reader.tensor_bytes() == 130
    with catalog.writing() as writer:
        writer.remove_model("two")
    with catalog.reading() as reader:
        assert {model.name: model.bytes_own for model in reader.models()} == {"one": 30, "three": 0}
