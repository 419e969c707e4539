"""Two processes ingest models that share tensors while a third collects garbage: nothing is lost or altered."""

from __future__ import annotations

from pathlib import Path

from tests.checkpoints import make
from tests.faults.helpers import exported, fine_tune, missing, nursery, same_folders, torn_chains, unowned
from zoo import Zoo

ROUNDS = 3


def test_two_ingests_and_a_collector(tmp_path: Path) -> None:
    base = make("llama", tmp_path / "base")
    one = {f"one-{n}": fine_tune(base, tmp_path / f"one-{n}", layers=[n], shift=1) for n in range(3)}
    # The second writer's models share whole layers with the first's; two are the same checkpoint under another name.
    two = {f"two-{n}": fine_tune(base, tmp_path / f"two-{n}", layers=[n], shift=1 + n % 2) for n in range(3)}
    # A model that shares nothing: removing it always makes garbage.
    one["one-alone"] = make("gpt2", tmp_path / "one-alone", seed=3)
    store, done, counts = tmp_path / "store", tmp_path / "done", tmp_path / "counts"
    Zoo(store).close()
    counts.touch()
    with nursery() as first, nursery() as second, nursery() as third:
        third.start("collect", store, done, counts)
        for writer, models in ((first, one), (second, two)):
            writer.start(
                "churn", store, counts, ROUNDS, *(text for name, folder in models.items() for text in (folder, name))
            )
        codes = [first.wait(), second.wait()]
        done.touch()
        codes.append(third.wait())
    assert codes == [0, 0, 0]
    removed = [int(line) for line in counts.read_text().split() if line != "busy"]
    assert sum(removed) > 0, f"{len(removed)} collections never met garbage"
    with Zoo(store) as zoo:
        assert {model.name for model in zoo.models()} == {*one, *two}
        assert not missing(zoo)
        assert not torn_chains(zoo)
        assert not zoo.verify().damaged
        for name, folder in {**one, **two}.items():
            assert same_folders(exported(zoo, name, tmp_path / f"export-{name}"), folder)
        zoo.gc()
        assert not unowned(zoo)
