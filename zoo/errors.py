"""The error tree of the whole project. Everything a user can cause is a `ZooError` with one clear line.

ZooError                      exit code 2, one line on standard error
├── InputError                what was given cannot be used
│   ├── UnknownFamily         no row in the table of families
│   ├── UnsafeCheckpoint      pickle, traversal, symlink out of the folder, remote code
│   ├── MalformedCheckpoint   truncated, oversized, inconsistent or missing files
│   ├── WrongBase             an adapter does not fit the base it was given
│   ├── UnsupportedAdapter    an adapter of a kind or variant that cannot be run exactly
│   ├── Incomparable          two models whose blocks can never stand in for each other: tokenizers, widths
│   └── NotServable           stored fine, but no executor can run it exactly
├── NotFound                  no model of that name
├── AmbiguousName             several models end that way; the candidates are listed
├── NameTaken                 the name holds another model already
├── InUse                     other models depend on it
├── TrainingFailed            exit code 1: it ran and went wrong; the last good state was kept
├── Unavailable               the runtime takes no requests: it drains, or its engine has died
└── StoreError                the store itself
    ├── DamagedObject         bytes do not match their digest; names the models it hurts
    │   └── MissingObject     not there at all
    ├── StoreFull             no space left on the device
    └── StoreBusy             a lock could not be had in time

This file knows nothing of any other module.
"""

from __future__ import annotations


class ZooError(Exception):
    """Base of all expected failures. `str(error)` is one line that a user can act on."""


class InputError(ZooError):
    """What was given cannot be used."""


class UnknownFamily(InputError):
    """The architecture has no row in `surgery.families.table`."""


class UnsafeCheckpoint(InputError):
    """The checkpoint would run code or read outside its own folder."""


class MalformedCheckpoint(InputError):
    """The checkpoint's files are truncated, oversized, missing or disagree."""


class WrongBase(InputError):
    """An adapter or a fine-tune does not fit the base model it names."""


class UnsupportedAdapter(InputError):
    """The adapter's kind, or a variant it uses, cannot be run exactly."""


class Incomparable(InputError):
    """No block of one of these models can stand in for one of the other: their tokenizers or widths do not meet."""


class NotServable(InputError):
    """The model is stored and exported, but no executor runs it exactly."""


class NotFound(ZooError):
    """No model has this name or this ending."""


class AmbiguousName(ZooError):
    """More than one model ends this way."""


class NameTaken(ZooError):
    """The name holds another model already."""


class InUse(ZooError):
    """Other models depend on this one."""


class TrainingFailed(ZooError):
    """A training ran into values that are not finite; the last good state was kept."""


class Unavailable(ZooError):
    """The runtime takes no requests now: it drains, or its engine has died."""


class StoreError(ZooError):
    """The store itself is the problem."""


class DamagedObject(StoreError):
    """Stored bytes do not match their digest."""


class MissingObject(DamagedObject):
    """The store does not hold it at all."""


class StoreFull(StoreError):
    """No space left where the store lives."""


class StoreBusy(StoreError):
    """Another process holds the store's lock."""
