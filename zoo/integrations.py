"""`ZooCallback` for `transformers.Trainer`: ingest every checkpoint into a zoo and resume training from it.

    callback = ZooCallback("zoo_store", name="my-tune", base="7b", keep_last=3, delete_local=True)
    trainer = Trainer(..., callbacks=[callback])
    trainer.train(resume_from_checkpoint=callback.resume_folder())

Each checkpoint costs only the bytes that changed. The store receives the model: weights, configs, tokenizer. The
Trainer's own files (`optimizer.pt`, `scheduler.pt`, `rng_state.pth`, `training_args.bin`) stay in its local folder:
they are pickles, which the store does not accept, and useful to this run only. Resuming therefore needs the local
folder, without its weights.

Importing this module also registers chains that fit no architecture of transformers (`surgery.chains.hf_model`) with
its automatic classes, so that their exports load with `AutoModelForCausalLM.from_pretrained`.

Like `zoo/api.py` this module sits above the package. It is the only one in the package that imports transformers at
import time.
"""

from __future__ import annotations

import logging
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from surgery.chains.hf_model import register
from zoo.api import Zoo
from zoo.catalog.names import check_name
from zoo.errors import InputError, InUse, StoreBusy, ZooError
from zoo.randomness import kept_randomness

log = logging.getLogger(__name__)
register()

_STATE = "trainer_state.json"


class ZooCallback(TrainerCallback):  # type: ignore[misc]
    """Ingests every checkpoint of a Trainer into a zoo, as the model `<name>@step-<n>`."""

    def __init__(
        self,
        store: str | os.PathLike[str] = "zoo_store",
        name: str | None = None,
        base: str | None = None,
        keep_last: int | None = None,
        delete_local: bool = False,
        strict: bool = False,
        database: str | None = None,
        promote_to: str | None = None,
        promote_if: Sequence[str] = (),
        promote_limit: float | None = None,
    ) -> None:
        """Record the settings; the store is not opened yet.

        Args:
            store: The store's folder, created if absent; `database` as for `Zoo`.
            name: Name of the checkpoints; None for the name of the Trainer's output folder.
            base: The model that training started from. None to look for a model in the zoo with the name that the
                Trainer's model was loaded under. Set it if that lookup fails, so that checkpoints are stored against it
                and not against each other.
            keep_last: Number of checkpoints of this name to keep in the zoo. Older ones are removed, and their bytes
                freed when training ends.
            delete_local: Delete a local checkpoint's weights once they are in the zoo. The Trainer's other files stay,
                and so do the weights of the best checkpoint if the Trainer is to load it at the end.
            strict: Let an error of the zoo end the training. Otherwise it is logged and the local checkpoint stays
                whole.
            promote_to: An alias: each checkpoint that passes `promote_if` becomes what it points to (`zoo promote`).
            promote_if: The conditions, such as `library_ppl<=live`. Checkpoints are measured between two steps of the
                training, on its device.
            promote_limit: Questions per task; below 1, their share.

        Raises:
            InputError: `promote_to` comes without a condition, or one of the two is wrong. `keep_last` is less
                than 1, or `name` is not a valid model name.
        """
        if name is not None:
            check_name(name)
        if keep_last is not None and keep_last < 1:
            raise InputError("keep_last must be at least 1: the newest checkpoint is needed to resume")
        self.store, self.database = Path(store), database
        self.name, self.base = name, base
        self.keep_last, self.delete_local, self.strict = keep_last, delete_local, strict
        self.promote_to, self.promote_if, self.promote_limit = promote_to, tuple(promote_if), promote_limit
        if promote_to is not None:
            _check_promotion(promote_to, promote_if)
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
            self._promote(zoo, name, args)
            self._remove_older(zoo, args.output_dir)
            if self.delete_local and not _is_needed(folder, args, state):
                for file in zoo.model(name).manifest.weight_files:
                    (folder / file.path).unlink(missing_ok=True)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Collect the bytes of removed checkpoints; if the store is in use, leave that to the next `zoo gc`."""
        if not state.is_world_process_zero or self.keep_last is None:
            return
        with self._guarded("removed checkpoints were not freed"), Zoo(self.store, self.database) as zoo:
            try:
                zoo.gc()
            except StoreBusy:
                log.info("the store is in use: `zoo gc` will free what removed checkpoints left")

    def resume_folder(self, output_dir: str | os.PathLike[str] | None = None) -> str | None:
        """Return the newest stored checkpoint as a folder for `trainer.train(resume_from_checkpoint=...)`, or None.

        It is the Trainer's own folder of that step, with its weights rewritten from the store. Every process may call
        it; the first one does the work.

        Args:
            output_dir: The Trainer's output folder; not needed once the callback was given to a Trainer.

        Raises:
            InputError: No output folder is known, or the Trainer's own files of that step are gone.
                (`zoo.model(name).load()` still returns the weights; training from them starts a new schedule.)
            DamagedObject: Stored bytes do not match their digest.
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

    def _promote(self, zoo: Zoo, name: str, args: Any) -> None:
        """Measure a stored checkpoint, and promote it if it passes. The training's draws stay as they were."""
        if self.promote_to is None:
            return
        from surgery.evaluation.harness import EvalOptions

        device = str(getattr(args, "device", "cpu"))
        with self._guarded(f"{name} was not promoted to {self.promote_to}"), kept_randomness():
            done = zoo.promote(name, self.promote_to, self.promote_if, EvalOptions(self.promote_limit), device)
            for figure in done.figures:
                log.info("%s: %g, live %s", figure.condition, figure.candidate, figure.live)
            said = "%s -> %s" if done.promoted else "%s stays: %s does not pass"
            log.info(said, self.promote_to, name)

    def _called(self, output_dir: str | os.PathLike[str]) -> str:
        return self.name or Path(output_dir).absolute().name

    def _steps(self, zoo: Zoo, output_dir: str | os.PathLike[str]) -> dict[int, str]:
        """Return step -> name of each checkpoint of this run in the zoo."""
        pattern = re.compile(re.escape(self._called(output_dir)) + r"@step-(\d+)")
        found = (pattern.fullmatch(model.name) for model in zoo.entries())
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
        """Log any error of the body instead of raising it, unless `strict` is set.

        A failed ingest must not end a training by default.
        """
        try:
            yield
        except Exception as error:
            if self.strict:
                raise
            log.error("%s: %s", what, error, exc_info=not isinstance(error, ZooError | OSError))


def _check_promotion(alias: str, conditions: Sequence[str]) -> None:
    from surgery.evaluation.gate import parse_conditions

    check_name(alias)
    parse_conditions(conditions)


def _known_base(zoo: Zoo, model: Any) -> str | None:
    """Return the zoo's model that the Trainer's model was loaded from, matched by its name or its folder's name."""
    told = getattr(getattr(model, "config", None), "_name_or_path", "") or ""
    names = {each.name for each in zoo.entries()}
    return next((name for name in (told, Path(told).name) if name in names), None)


def _is_needed(folder: Path, args: Any, state: Any) -> bool:
    """Return whether the Trainer will read this folder's weights again by itself."""
    best = state.best_model_checkpoint
    return bool(args.load_best_model_at_end and best and Path(best).absolute() == folder.absolute())


def _restore_weights(zoo: Zoo, name: str, folder: Path) -> None:
    """Write a model's weight files into a folder, each file atomically."""
    model = zoo.model(name)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".zoo-") as scratch:
        exported = Path(scratch) / "model"
        model.export(exported)
        for file in model.manifest.weight_files:
            (exported / file.path).replace(folder / file.path)
