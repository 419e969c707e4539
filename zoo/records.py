"""Facts about models as frozen data: scored pairs of runs, documents, aliases. No torch, no tables.

A *run* is components [lo, hi) of a model's chain. A scored pair records what it was scored on, so that a score is never
used without its probe (BL-06).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, Literal, NamedTuple

#: `equivalent`: symmetric, not transitive. `surrogate`: b is a cheaper stand-in for a. `delta`: b is a low-rank
#: rewriting of a.
Relation = Literal["equivalent", "surrogate", "delta"]


@dataclass(frozen=True, slots=True)
class ScoredRun:
    """Components [lo, hi) of a model's chain."""

    model: str
    lo: int
    hi: int


@dataclass(frozen=True)
class Equivalence:
    """Two runs and how similar their outputs are.

    Fields:
        probe: Digest of the probe set (its text and tokens) that they were scored on.
        similarity: Mean over tokens of the cosine of the vocabulary distributions (BL-05), in [0, 1].
        control: The same score against a randomly initialised twin of b; None if not measured.
        metrics: Further scores by name.
    """

    relation: Relation
    a: ScoredRun
    b: ScoredRun
    probe: str
    similarity: float
    control: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Document:
    """A result stored whole as JSON: an evaluation, a profile, a curve. There is one per (kind, model, key)."""

    kind: str
    model: str
    key: str
    value: Any


#: What happened to an alias.
AliasAct = Literal["set", "promote", "rollback", "delete"]


@dataclass(frozen=True, slots=True)
class AliasTarget:
    """A model that an alias stands for. `share`: percent of the requests for the alias that it answers."""

    model: str
    share: int = 100


@dataclass(frozen=True, slots=True)
class AliasChange:
    """One change of an alias.

    Fields:
        id: Grows with every change of any alias.
        targets: What the alias has pointed to from then on; none once it is deleted.
        previous: The change that a rollback goes back to.
        figures: What the change was decided by, as JSON.
        created: UTC.
    """

    id: int
    alias: str
    act: AliasAct
    targets: tuple[AliasTarget, ...]
    previous: int | None
    figures: Any
    created: datetime

    def document(self) -> dict[str, Any]:
        """Return it as JSON."""
        return {
            "change": self.id,
            "act": self.act,
            "targets": [{"model": target.model, "share": target.share} for target in self.targets],
            "figures": self.figures,
            "created": self.created.isoformat(),
        }


@dataclass(frozen=True, slots=True)
class Alias:
    """A name that stands for one model, or for several with their shares.

    Fields:
        now: Its latest change.
        before: The change that a rollback goes back to; None if there is none.
    """

    now: AliasChange
    before: AliasChange | None

    @property
    def name(self) -> str:
        return self.now.alias

    @property
    def targets(self) -> tuple[AliasTarget, ...]:
        return self.now.targets

    def document(self) -> dict[str, Any]:
        """Return it as JSON, as `zoo alias --json` prints it."""
        before = None if self.before is None else self.before.document()["targets"]
        return {"alias": self.name, **self.now.document(), "before": before}


#: Periods of budgets, in UTC.
Period = Literal["day", "month"]


class Budget(NamedTuple):
    """Bounds on the tokens of a period and on what they cost (`zoo.money`); None: none."""

    period: Period
    tokens: int | None
    money: int | None


@dataclass(frozen=True, slots=True)
class ClientKey:
    """A key of a server's client.

    Fields:
        name: What it is called; no secret.
        principal: Digest of the secret: the owner of what is kept for the client.
        models: Models and aliases that it may name, in full; none: all.
        requests_per_minute: Bound on generating requests; None: none.
        tokens_per_day: Bound on prompt and generated tokens of a day (UTC); None: none.
        priority: The most urgent priority of its requests, and that of those without one.
        revoked: When it ended (UTC); None: it is valid.
        money_per_day: Bound on what a day (UTC) costs (`zoo.money`); None: none.
        tokens_per_month, money_per_month: The same of a calendar month (UTC).
    """

    name: str
    principal: str
    models: tuple[str, ...]
    requests_per_minute: int | None
    tokens_per_day: int | None
    priority: int
    created: datetime
    revoked: datetime | None = None
    money_per_day: int | None = None
    tokens_per_month: int | None = None
    money_per_month: int | None = None

    @property
    def budgets(self) -> tuple[Budget, ...]:
        """What it may use in each period."""
        day = Budget("day", self.tokens_per_day, self.money_per_day)
        return day, Budget("month", self.tokens_per_month, self.money_per_month)


@dataclass(frozen=True, slots=True)
class KeyUsage:
    """What a key has used on one day (UTC, as 2026-01-31) or in a month (2026-01), of one model or of all together.

    Fields:
        requests: Requests that came with the key. They are counted without a model, before one is known.
        model: The model that was asked for; "": none yet, or all.
        answers: Answers that the tokens are of, a batch's one by one.
        cost: What the tokens cost when they were counted (`zoo.money`).
        cached_tokens: Those of the prompt tokens that were not computed, since a cache had them.
    """

    name: str
    day: str
    requests: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    model: str = ""
    answers: int = 0
    cost: int = 0
    cached_tokens: int = 0

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.generated_tokens

    def plus(self, more: KeyUsage) -> KeyUsage:
        """Return the sum with what else was used; name, day and model are this one's."""
        return replace(
            self,
            requests=self.requests + more.requests,
            prompt_tokens=self.prompt_tokens + more.prompt_tokens,
            generated_tokens=self.generated_tokens + more.generated_tokens,
            answers=self.answers + more.answers,
            cost=self.cost + more.cost,
            cached_tokens=self.cached_tokens + more.cached_tokens,
        )


def usage_by_key(usage: Iterable[KeyUsage]) -> dict[str, KeyUsage]:
    """Return name -> what the key has used of all models together; usage of one day or month is meant."""
    found: dict[str, KeyUsage] = {}
    for each in usage:
        found[each.name] = found.get(each.name, KeyUsage(each.name, each.day)).plus(each)
    return found
