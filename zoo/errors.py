"""The error tree of the whole project. Every error that a user can cause is a `ZooError` with a one-line message.

ZooError                      exit code 2, one line on standard error
├── InputError                the input cannot be used
│   ├── UnknownFamily         no row in the table of families
│   ├── UnsafeCheckpoint      pickle, traversal, symlink out of the folder, remote code
│   ├── MalformedCheckpoint   truncated, oversized, inconsistent or missing files
│   ├── WrongBase             an adapter does not fit the base it was given
│   ├── UnsupportedAdapter    an adapter of a kind or variant that cannot be run exactly
│   ├── Incomparable          no block of one model can replace a block of the other: tokenizers, widths
│   └── NotServable           stored, but no executor can run it exactly
├── NotFound                  no model of that name
├── AmbiguousName             several models have that ending; the candidates are listed
├── NameTaken                 another model has the name already
├── InUse                     other models depend on it, or an alias points to it
├── TrainingFailed            exit code 1: a training diverged; the last good state was kept
├── Unavailable               the runtime takes no requests: it drains, or its engine has died
└── StoreError                the store itself
    ├── DamagedObject         bytes do not match their digest; names the affected models
    │   └── MissingObject     the object is absent
    ├── StoreFull             no space left on the device
    └── StoreBusy             a lock was not acquired in time

This module imports no other module of the project.
"""

from __future__ import annotations


class ZooError(Exception):
    """Base of all expected failures. `str(error)` is one line that a user can act on."""


class InputError(ZooError):
    """The input cannot be used."""


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
    """No block of one model can replace a block of the other: their tokenizers or widths differ."""


class NotServable(InputError):
    """The model is stored and can be exported, but no executor runs it exactly."""


class NotFound(ZooError):
    """No model has this name or this ending."""


class AmbiguousName(ZooError):
    """More than one model has this ending."""


class NameTaken(ZooError):
    """Another model has this name already."""


class InUse(ZooError):
    """Other models depend on this one, or an alias points to it."""


class TrainingFailed(ZooError):
    """A training reached values that are not finite; the last good state was kept."""


class Unavailable(ZooError):
    """The runtime takes no requests now: it drains, or its engine has died."""


class StoreError(ZooError):
    """The store itself failed."""


class DamagedObject(StoreError):
    """Stored bytes do not match their digest."""


class MissingObject(DamagedObject):
    """The store does not have the object."""


class StoreFull(StoreError):
    """No space is left on the store's device."""


class StoreBusy(StoreError):
    """Another process holds the store's lock."""
