"""The benchmark of training steps runs, on a tiny case."""

import pytest

pytest.importorskip("transformers")

import huggingface as benchmark


@pytest.mark.thorough
def test_the_benchmark_measures_every_implementation():
    case = benchmark.step_case(2, 8, 16, 96)
    results = benchmark.measured(case, rounds=2)
    assert [result.implementation for result in results] == [*case.implementations]
    assert all(result.ratio > 0 for result in results)
    assert results[0].baseline == results[0].implementation
