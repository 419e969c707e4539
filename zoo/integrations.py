"""`ZooCallback` for `transformers.Trainer`: each checkpoint is an ingest and costs only what changed; resume works from
the zoo.

    callback = ZooCallback("zoo_store", name="my-tune", base="7b", keep_last=3, delete_local=True)
    trainer = Trainer(..., callbacks=[callback])
    trainer.train(resume_from_checkpoint=callback.resume_folder())

What goes into the store is what a model is: weights, configs, tokenizer. The Trainer's own files (`optimizer.pt`,
`scheduler.pt`, `rng_state.pth`, `training_args.bin`) stay in its local folder: they are pickles, which the store
neither takes nor hands out, they fit no other run, and nobody shares them. So resuming needs the local folder, less its
weights.

Importing this file also makes chains that fit no architecture of transformers (`surgery.chains.hf_model`) known to its
automatic classes, so that their exports load with `AutoModelForCausalLM.from_pretrained`.

Like `zoo/api.py` this file stands above the package. It is the one here that imports transformers.
"""

from __future__ import annotations

import logging
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from surgery.chains.hf_model import register
from zoo.api import Zoo
from zoo.catalog.names import check_name
from zoo.errors import InputError, InUse, StoreBusy, ZooError

log = logging.getLogger(__name__)
register()

_STATE = "trainer_state.json"


class ZooCallback(TrainerCallback):  # type: ignore[misc]
    """Puts every checkpoint of a Trainer into a zoo, as the model `<name>@step-<n>`."""

    def __init__(
        self,
        store: str | os.PathLike[str] = "zoo_store",
        name: str | None = None,
        base: str | None = None,
        keep_last: int | None = None,
        delete_local: bool = False,
        strict: bool = False,
        database: str | None = None,
    ) -> None:
        """Nothing is opened yet.

        Args:
            store: the store's folder, made where there is none; `database` as for `Zoo`.
            name: what the checkpoints are called; the name of the Trainer's output folder when None.
            base: the model that training began from. When None, the zoo's model of the name under which the Trainer's
                model was loaded.
                Give it where that is not known: checkpoints are then stored against it, and not against each other.
            keep_last: how many of this name to keep in the zoo; older ones are removed, and their bytes freed when
                training ends.
            delete_local: delete a local checkpoint's weights once they are in the zoo. The Trainer's other files stay,
                and so do the weights of the best checkpoint where the Trainer is to load that in the end.
            strict: let an error of the zoo end the training. Otherwise it is logged, and the local checkpoint is left
                whole.

        Raises:
            InputError: `keep_last` is less than 1, or no model may be called `name`.
        """
        if name is not None:
            check_name(name)
        if keep_last is not None and keep_last < 1:
            raise InputError("keep_last must be at least 1: the newest checkpoint is needed to resume")
        self.store, self.database = Path(store), database
        self.name, self.base = name, base
        self.keep_last, self.delete_local, self.strict = keep_last, delete_local, strict
        self._args: Any = None

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._args = args

    def on_save(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Ingest the checkpoint that was just written."""
        if not state.is_world_process_zero:
            return
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        with self._guarded(f"checkpoint {folder} was not put into the zoo"), Zoo(self.store, self.database) as zoo:
            name = f"{self._called(args.output_dir)}@step-{state.global_step}"
            report = zoo.ingest(folder, name, base=self.base or _known_base(zoo, model))
            log.info("%s: %d of %d bytes new", name, report.bytes.new, report.bytes.total)
            self._remove_older(zoo, args.output_dir)
            if self.delete_local and not _is_needed(folder, args, state):
                for file in zoo.model(name).manifest.weight_files:
                    (folder / file.path).unlink(missing_ok=True)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Free what removed checkpoints leave; when others use the store, that waits for the next `zoo gc`."""
        if not state.is_world_process_zero or self.keep_last is None:
            return
        with self._guarded("removed checkpoints were not freed"), Zoo(self.store, self.database) as zoo:
            try:
                zoo.gc()
            except StoreBusy:
                log.info("the store is in use: `zoo gc` will free what removed checkpoints left")

    def resume_folder(self, output_dir: str | os.PathLike[str] | None = None) -> str | None:
        """The newest stored checkpoint as a folder for `trainer.train(resume_from_checkpoint=...)`; None when there is
        none.

        It is the Trainer's own folder of that step, its weights written anew from the store, whatever lay there. Every
        process may call it; the first does the work.

        Args:
            output_dir: the Trainer's; known already when the callback was given to one.

        Raises:
            InputError: no output folder is known, or the Trainer's own files of that step are gone. (The weights alone
                are `zoo.model(name).load()`; training from them starts a new schedule.)
            DamagedObject: stored bytes do not match their digest.
        """
        place = output_dir if output_dir is not None else getattr(self._args, "output_dir", None)
        if place is None:
            raise InputError("give output_dir, or give the callback to a Trainer first")
        if self._args is None:
            return self._restored(place, writes=True)
        with self._args.main_process_first(desc="checkpoint from the zoo"):
            return self._restored(place, writes=self._args.process_index == 0)

    def _restored(self, output_dir: str | os.PathLike[str], writes: bool) -> str | None:
        with Zoo(self.store, self.database) as zoo:
            steps = self._steps(zoo, output_dir)
            if not steps:
                return None
            name, folder = steps[max(steps)], Path(output_dir) / f"checkpoint-{max(steps)}"
            if not (folder / _STATE).is_file():
                raise InputError(
                    f"{folder} has no {_STATE}: the weights are {name!r} in the zoo, but the run's own state is gone"
                )
            if writes:
                _restore_weights(zoo, name, folder)
        return str(folder)

    def _called(self, output_dir: str | os.PathLike[str]) -> str:
        return self.name or Path(output_dir).absolute().name

    def _steps(self, zoo: Zoo, output_dir: str | os.PathLike[str]) -> dict[int, str]:
        """Step -> name of each checkpoint that the zoo has of this run."""
        pattern = re.compile(re.escape(self._called(output_dir)) + r"@step-(\d+)")
        found = (pattern.fullmatch(model.name) for model in zoo.models())
        return {int(match[1]): match[0] for match in found if match}

    def _remove_older(self, zoo: Zoo, output_dir: str) -> None:
        if self.keep_last is None:
            return
        steps = self._steps(zoo, output_dir)
        for step in sorted(steps)[: -self.keep_last]:
            try:
                zoo.remove(steps[step])
            except InUse as error:
                log.warning("%s stays: %s", steps[step], error)

    @contextmanager
    def _guarded(self, what: str) -> Iterator[None]:
        """Training is worth more than a copy of its checkpoint: whatever goes wrong is told, and ends it only when that
        is asked for.
        """
        try:
            yield
        except Exception as error:
            if self.strict:
                raise
            log.error("%s: %s", what, error, exc_info=not isinstance(error, ZooError | OSError))


def _known_base(zoo: Zoo, model: Any) -> str | None:
    """The zoo's model that the Trainer's was loaded as, by its name or its folder's."""
    told = getattr(getattr(model, "config", None), "_name_or_path", "") or ""
    names = {each.name for each in zoo.models()}
    return next((name for name in (told, Path(told).name) if name in names), None)


def _is_needed(folder: Path, args: Any, state: Any) -> bool:
    """Whether the Trainer will read the weights of this folder once more by itself."""
    best = state.best_model_checkpoint
    return bool(args.load_best_model_at_end and best and Path(best).absolute() == folder.absolute())


def _restore_weights(zoo: Zoo, name: str, folder: Path) -> None:
    """Put a model's weight files into a folder, each whole or not at all."""
    model = zoo.model(name)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".zoo-") as scratch:
        exported = Path(scratch) / "model"
        model.export(exported)
        for file in model.manifest.weight_files:
            (exported / file.path).replace(folder / file.path)
