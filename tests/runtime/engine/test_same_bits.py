"""A row has the same bits in any company: beside other models and adapters, in any chunks, after preemption.

Every log-probability of a sequence is compared with that of an engine that runs the sequence alone. `company.py` has
the random companies, and a command for long runs.
"""

from __future__ import annotations

import pytest

from tests.runtime.engine.company import DTYPES, MODELS, Engines, add_models, company_of
from tests.runtime.engine.compiled import needs_kernels
from tests.runtime.engine.conftest import Bench

pytestmark = needs_kernels
#: Companies in each dtype; every model is in one of them.
SEEDS = range(len(MODELS))


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_log_probability_of_a_sequence_is_as_alone(tmp_path, dtype: str) -> None:
    bench = Bench(tmp_path)
    add_models(bench, dtype)
    side = Engines(bench, dtype)
    companies = [company_of(seed) for seed in SEEDS]
    assert {one.model for each in companies for asked in each.arrivals.values() for one in asked} == set(MODELS)
    assert [seq for company in companies for seq in side.differing(company)] == []
    assert side.preemptions and side.shared, "nothing was preempted, or no prefix was hit"
    bench.store.close()
