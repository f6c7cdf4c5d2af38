"""Streams of blocks: the same bits however they are cut, interrupted or resumed; and what goes wrong on the way."""

import itertools
import math
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import torch
from tests.allocations import allocations_of

from sigsoftmax.analysis.spectrum import accumulator as spectrum_stream
from sigsoftmax.analysis.spectrum import streaming
from sigsoftmax.analysis.spectrum.matrix_readers import from_array, from_blocks, from_function
from sigsoftmax.analysis.spectrum.saved_state import deferred_interrupt, load_state
from sigsoftmax.analysis.spectrum.singular_values import spectrum
from sigsoftmax.analysis.spectrum.streaming import (
    IncompleteMatrix,
    SpectrumOptions,
    SpectrumStream,
    memory_needed,
    streamed_spectrum,
)

CONTEXTS, WORDS, WIDTH = 300, 40, 6


def log_probs(contexts=CONTEXTS, dtype=torch.float64):
    generator = torch.Generator().manual_seed(3)
    h, w = (torch.randn(n, WIDTH, dtype=torch.float64, generator=generator) for n in (contexts, WORDS))
    bias = torch.randn(WORDS, dtype=torch.float64, generator=generator)
    return torch.log_softmax(h @ w.T + bias, -1).to(dtype)


@pytest.fixture(params=["held", "summed"])
def small(request, monkeypatch):
    """Both ways: the matrix counts as small and is held, or it is summed up block by block."""
    monkeypatch.setattr(spectrum_stream, "SMALL", 2**26 if request.param == "held" else 0)
    return request.param


def same(left, right):
    """But for the time it took."""
    return left.singular_values == right.singular_values and left.value_error == right.value_error


@pytest.mark.parametrize("method", ["gram", "exact"])
def test_the_spectrum_is_that_of_the_whole(method, small):
    matrix = log_probs()
    found = streamed_spectrum(matrix, SpectrumOptions(method=method, block_contexts=32))
    direct = spectrum(matrix)
    assert (found.words, found.contexts) == (WORDS, CONTEXTS)
    assert found.method == {"gram": "gram", "exact": "svd" if small == "held" else "qr"}[method]
    assert found.press32_rank == direct.press32_rank == WIDTH + 2
    np.testing.assert_allclose(found.singular_values, direct.singular_values, rtol=1e-12, atol=found.noise_floor)
    assert found.row_sum_error < 1e-14


@pytest.mark.parametrize("method", ["gram", "exact"])
@pytest.mark.parametrize("contexts", [CONTEXTS, 25])
def test_bits_do_not_depend_on_how_the_source_cuts(method, contexts, small):
    matrix = log_probs(contexts)
    options = SpectrumOptions(method=method, block_contexts=16)
    whole = streamed_spectrum(matrix, options)
    for size in (1, 7, 16, 100):
        assert same(streamed_spectrum(from_blocks(matrix.split(size), contexts=contexts), options), whole)
        arrays = (matrix.numpy()[first : first + size] for first in range(0, contexts, size))
        assert same(streamed_spectrum(from_blocks(arrays, contexts=contexts), options), whole)
    assert same(streamed_spectrum(from_array(matrix.T.contiguous(), contexts_axis=1), options), whole)
    assert same(streamed_spectrum(from_function(lambda a, b: matrix[a:b], contexts, block_contexts=9), options), whole)


def test_a_source_may_fill_the_same_memory_again(small):
    matrix = log_probs()

    def blocks():
        memory = torch.empty(10, WORDS, dtype=torch.float64)
        for block in matrix.split(10):
            memory.copy_(block)
            yield memory
            memory.fill_(math.nan)

    options = SpectrumOptions(method="gram", block_contexts=24)
    assert same(
        streamed_spectrum(from_blocks(blocks(), contexts=CONTEXTS), options), streamed_spectrum(matrix, options)
    )


def test_few_contexts_are_worked_on_from_their_side():
    matrix = log_probs(9)
    for contexts in (9, None):
        found = streamed_spectrum(from_blocks(matrix.split(2), contexts=contexts), SpectrumOptions(method="gram"))
        assert len(found.singular_values) == 9
        np.testing.assert_allclose(found.singular_values, spectrum(matrix).singular_values, atol=found.noise_floor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.filterwarnings("ignore:the entries have the precision")
def test_narrow_dtypes_are_summed_exactly(dtype, small):
    matrix = log_probs(dtype=dtype)
    found = streamed_spectrum(matrix, SpectrumOptions(method="exact", block_contexts=50))
    np.testing.assert_allclose(found.singular_values, spectrum(matrix).singular_values, rtol=1e-12, atol=1e-11)
    assert found.dtype == str(dtype).removeprefix("torch.")


def test_auto_is_exact_where_that_is_cheap(monkeypatch):
    matrix = log_probs()
    assert streamed_spectrum(matrix).method == "svd"
    assert streamed_spectrum(matrix.split(50)).method == "svd"
    monkeypatch.setattr(spectrum_stream, "EXACT_WORK", 1)
    assert streamed_spectrum(matrix).method == "gram"


def test_progress_tells_contexts_and_time():
    seen = []
    streamed_spectrum(log_probs(), SpectrumOptions(block_contexts=64), progress=seen.append)
    assert [(p.contexts, p.total_contexts) for p in seen[:-1]] == [(done, 300) for done in (64, 128, 192, 256, 300)]
    assert seen[1].seconds_left > 0.0
    assert seen[4].seconds_left == 0.0
    assert seen[-1].phase == "singular values"
    assert str(seen[-1]).startswith("singular values: 300 of 300 contexts after")
    assert "[####" in str(seen[1])
    assert "128 of 300 contexts" in str(seen[1])
    unknown = []
    streamed_spectrum(log_probs().split(100), progress=unknown.append)
    assert unknown[0].total_contexts is unknown[0].seconds_left is None
    assert str(unknown[0]).startswith("reading: 300 contexts in")


# --- interruption ---------------------------------------------------------------------------------------------------


class Stopped(BaseException):
    pass


def stopping_after(matrix, contexts, error=Stopped):
    """A seekable source that breaks off after so many contexts were asked for in this run."""
    delivered = itertools.count()

    def block(first, last):
        if next(delivered) >= contexts // 10:
            raise error("stop")
        return matrix[first:last]

    return from_function(block, len(matrix), block_contexts=10)


@pytest.mark.parametrize("method", ["gram", "exact"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.filterwarnings("ignore:the entries have the precision")
def test_a_resumed_run_gives_the_same_bits(method, dtype, small, tmp_path):
    matrix, state = log_probs(dtype=dtype), tmp_path / "folder" / "state.npz"
    options = SpectrumOptions(method=method, block_contexts=32)
    whole = streamed_spectrum(matrix, options)
    for expected in (96, 160, 224):
        with pytest.raises(Stopped) as caught:
            streamed_spectrum(stopping_after(matrix, 110), options, state=state)
        assert load_state(state).about["contexts_done"] == expected
        assert f"{expected} contexts are kept in {state}" in caught.value.__notes__[0]
    seen = []
    assert same(streamed_spectrum(from_array(matrix), options, state=state, progress=seen.append), whole)
    assert seen[0].contexts == 256
    assert list(state.parent.iterdir()) == []


def test_an_iterable_is_read_again_and_skipped(tmp_path):
    matrix, state = log_probs(), tmp_path / "state.npz"
    options = SpectrumOptions(method="gram")

    def broken():
        yield from matrix.split(30)[:5]
        raise Stopped

    with pytest.raises(Stopped):
        streamed_spectrum(broken(), SpectrumOptions(method="gram", block_contexts=40), state=state)
    assert load_state(state).about["contexts_done"] == 120
    # How many contexts make a block is taken from the state.
    resumed = streamed_spectrum(matrix.split(7), options, state=state)
    assert same(resumed, streamed_spectrum(matrix.split(7), SpectrumOptions(method="gram", block_contexts=40)))


def test_an_iterable_that_is_shorter_than_its_state_is_refused(tmp_path):
    matrix, state = log_probs(), tmp_path / "state.npz"
    options = SpectrumOptions(block_contexts=40)

    def broken():
        yield from matrix.split(30)[:5]
        raise Stopped

    with pytest.raises(Stopped):
        streamed_spectrum(broken(), options, state=state)
    with pytest.raises(ValueError, match="has 120 contexts, but log-probabilities ended after 60"):
        streamed_spectrum(matrix[:60].split(30), options, state=state)


def test_states_are_saved_on_the_way(tmp_path, monkeypatch):
    saved = []
    monkeypatch.setattr(streaming, "save_state", lambda path, state: saved.append(state.about["contexts_done"]))
    streamed_spectrum(log_probs(), SpectrumOptions(block_contexts=100), state=tmp_path / "s.npz", save_every=0.0)
    assert saved == [100, 200, 300]


@pytest.mark.parametrize(
    ("other", "options", "message"),
    [
        (
            log_probs() - 0.0,
            SpectrumOptions(block_contexts=32, method="exact"),
            "its method is 'gram', here it is 'exact'",
        ),
        (
            log_probs() - 0.0,
            SpectrumOptions(block_contexts=16, method="gram"),
            "its block_contexts is 32, here it is 16",
        ),
        (log_probs().float(), SpectrumOptions(block_contexts=32, method="gram"), "its dtype is 'float64'"),
        (log_probs(200), SpectrumOptions(block_contexts=32, method="gram"), "its contexts is 300, here it is 200"),
        (log_probs().flip(1), SpectrumOptions(block_contexts=32, method="gram"), "its sha256 of the first block is"),
    ],
)
def test_the_state_of_another_matrix_is_refused(other, options, message, tmp_path):
    state = tmp_path / "state.npz"
    with pytest.raises(Stopped):
        streamed_spectrum(
            stopping_after(log_probs(), 100), SpectrumOptions(block_contexts=32, method="gram"), state=state
        )
    before = state.read_bytes()
    with pytest.raises(ValueError, match=f"belongs to another run: {message}.*Delete it to begin anew"):
        streamed_spectrum(other, options, state=state)
    assert state.read_bytes() == before


@pytest.mark.parametrize("damage", [lambda b: b[: len(b) // 2], lambda b: b"no archive", lambda b: b""])
def test_a_damaged_state_is_refused(damage, tmp_path):
    state = tmp_path / "state.npz"
    with pytest.raises(Stopped):
        streamed_spectrum(stopping_after(log_probs(), 100), SpectrumOptions(block_contexts=32), state=state)
    state.write_bytes(damage(state.read_bytes()))
    with pytest.raises(ValueError, match="is not a saved state, or is damaged"):
        streamed_spectrum(log_probs(), SpectrumOptions(block_contexts=32), state=state)


def test_a_full_disk_does_not_end_the_run(tmp_path, monkeypatch):
    def full(path, state):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(streaming, "save_state", full)
    options = SpectrumOptions(block_contexts=150)
    with pytest.warns(UserWarning, match=r"state was not saved to .*: .*No space left.*; the run goes on"):
        found = streamed_spectrum(log_probs(), options, state=tmp_path / "s.npz", save_every=0.0)
    assert same(found, streamed_spectrum(log_probs(), options))


def test_where_a_state_cannot_be_written_is_said_at_once(tmp_path):
    (tmp_path / "file").touch()
    for path in (tmp_path, tmp_path / "file" / "state.npz"):
        with pytest.raises(ValueError, match="the state cannot be written to"):
            streamed_spectrum(log_probs(), state=path)


def test_an_interrupt_waits_for_the_end_of_an_update():
    done = []
    with pytest.raises(KeyboardInterrupt), deferred_interrupt():  # noqa: PT012
        signal.raise_signal(signal.SIGINT)
        done.append("update")
    assert done == ["update"]
    with pytest.raises(KeyboardInterrupt), deferred_interrupt():  # noqa: PT012
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        done.append("never")
    assert done == ["update"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_other_threads_run_as_well():
    found = []
    thread = threading.Thread(target=lambda: found.append(streamed_spectrum(log_probs()).press32_rank))
    thread.start()
    thread.join()
    assert found == [WIDTH + 2]


def test_an_interrupted_process_leaves_a_state_that_resumes(tmp_path):
    matrix, state, path = log_probs(), tmp_path / "state.npz", tmp_path / "matrix.npy"
    np.save(path, matrix.numpy())
    program = f"""
import time, numpy, torch
from sigsoftmax.analysis.spectrum.matrix_readers import from_function
from sigsoftmax.analysis.spectrum.streaming import SpectrumOptions, streamed_spectrum
torch.set_num_threads(1)
matrix = numpy.load({str(path)!r})
def slow(first, last):
    if first >= 160:
        print("reached", flush=True)
        time.sleep(60)
    return matrix[first:last]
streamed_spectrum(from_function(slow, 300, block_contexts=20), SpectrumOptions(block_contexts=32), state={str(state)!r})
"""
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "reached\n"
    # Python reports the line before it sleeps.
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode != 0
    assert "KeyboardInterrupt" in errors
    assert "160 contexts are kept in" in errors
    assert {entry.name for entry in tmp_path.iterdir()} == {"matrix.npy", "state.npz"}
    options = SpectrumOptions(block_contexts=32)
    assert same(streamed_spectrum(from_array(matrix), options, state=state), streamed_spectrum(matrix, options))


# --- bad input ------------------------------------------------------------------------------------------------------


def test_what_came_before_a_wrong_row_is_kept(small):
    matrix = log_probs()
    matrix[210, 4] = math.nan
    with pytest.raises(
        IncompleteMatrix, match=r"nan at row 210, column 4.*The 210 contexts before are valid"
    ) as caught:
        streamed_spectrum(matrix, SpectrumOptions(method="exact", block_contexts=50))
    assert caught.value.contexts == 210
    partial = caught.value.partial()
    assert (partial.contexts, partial.contexts_expected) == (210, 300)
    assert partial.source == "the first 210 contexts of log-probabilities"
    np.testing.assert_allclose(partial.singular_values, spectrum(matrix[:210]).singular_values, atol=1e-12)


def test_a_wrong_first_row_leaves_nothing():
    matrix = log_probs()
    matrix[0, 0] = 3.0
    with pytest.raises(ValueError, match="a log-probability cannot be positive, got 3 at row 0") as caught:
        streamed_spectrum(matrix)
    assert not isinstance(caught.value, IncompleteMatrix)


def test_a_state_outlives_bad_input(tmp_path):
    matrix, state = log_probs(), tmp_path / "state.npz"
    good = matrix.clone()
    matrix[210, 4] = math.nan
    options = SpectrumOptions(method="gram", block_contexts=50)
    with pytest.raises(IncompleteMatrix):
        streamed_spectrum(matrix, options, state=state)
    assert load_state(state).about["contexts_done"] == 200
    assert same(streamed_spectrum(good, options, state=state), streamed_spectrum(good, options))


def test_a_source_that_fails_keeps_what_came_before():
    with pytest.raises(IncompleteMatrix, match=r"stop\. The 96 contexts before") as caught:
        streamed_spectrum(stopping_after(log_probs(), 100, ValueError), SpectrumOptions(block_contexts=32))
    assert caught.value.partial().contexts == 96


@pytest.mark.parametrize(
    ("blocks", "contexts", "message"),
    [
        ([], None, "expected at least one context, got none; log-probabilities is empty"),
        ([log_probs()[:0]], None, "expected at least one context, got none"),
        (
            [log_probs()[0]],
            None,
            r"block 0 of log-probabilities has the shape \(40,\); expected \(contexts, vocabulary\)",
        ),
        ([log_probs(), log_probs()[:, 1:]], None, "block 1 of log-probabilities has 39 columns, expected 40"),
        ([log_probs(), log_probs().float()], None, "block 1 .* dtype torch.float32, those before have torch.float64"),
        ([log_probs().long()], None, "block 0 .* dtype torch.int64; expected float64, float32"),
        (["text"], None, "block 0 of log-probabilities is a str; expected a tensor or a numpy array"),
        ([log_probs()], 310, "ended after 300 contexts, expected 310"),
        ([log_probs()], 290, "expected 290 contexts, got at least 300"),
        ([log_probs().exp()], None, "These are probabilities: pass their logarithm"),
        ([log_probs() - 0.5], None, "in row 0 the log of the sum is off by 0.5"),
    ],
)
def test_bad_blocks(blocks, contexts, message):
    with pytest.raises(ValueError, match=message):
        streamed_spectrum(from_blocks(blocks, contexts=contexts))


def test_partial_results_of_a_matrix_that_ends_early_or_changes():
    for blocks in ([log_probs()], [log_probs(), log_probs().float()]):
        with pytest.raises(IncompleteMatrix) as caught:
            streamed_spectrum(from_blocks(blocks, contexts=400), SpectrumOptions(block_contexts=100))
        assert caught.value.partial().press32_rank == WIDTH + 2


def test_any_finite_matrix_is_taken_on_request():
    matrix = torch.randn(50, 8)
    found = streamed_spectrum(matrix, SpectrumOptions(log_probs=False))
    np.testing.assert_allclose(found.singular_values, np.linalg.svd(matrix.numpy(), compute_uv=False), rtol=1e-5)
    with pytest.raises(ValueError, match="log_probs=False"):
        streamed_spectrum(matrix)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "svd"}, "method must be one of 'auto', 'gram', 'exact', got 'svd'"),
        ({"block_contexts": 0}, "block_contexts must be a positive integer, got 0"),
        ({"sum_tolerance": 0.0}, "sum_tolerance must be positive"),
        ({"precision": torch.int8}, "precision must be a floating-point dtype"),
        ({"device": "meta"}, "device must be a CPU or a CUDA device"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        SpectrumOptions(**options)


def test_a_source_of_another_kind_is_refused():
    with pytest.raises(ValueError, match=r"expected a matrix, the path of a file, an iterable .* got int"):
        streamed_spectrum(3)
    with pytest.raises(ValueError, match=r"no file at nowhere\.npy"):
        streamed_spectrum("nowhere.npy")


def test_memory_is_predicted_and_limited():
    options = SpectrumOptions(method="gram")
    ptb = memory_needed(10_000, 82_430, 4, options)
    assert 2 * 8e8 < ptb < 6 * 2**30
    # Few contexts of many words need no M x M matrix.
    assert memory_needed(128_000, 4096, 4, options) < 4 * 2**30 < 8 * 128_000**2
    with pytest.raises(ValueError, match=r"needs about .* GiB, more than memory_limit = 1.0 GiB.*rank_bounds"):
        SpectrumStream(
            vocabulary=10_000, dtype=torch.float32, contexts=82_430, options=SpectrumOptions(memory_limit=2**30)
        )


def test_peak_memory_stays_within_the_prediction():
    blocks = [torch.log_softmax(torch.randn(64, 500), -1) for _ in range(40)]
    for method in ("gram", "exact"):
        options = SpectrumOptions(method=method, block_contexts=64)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(spectrum_stream, "SMALL", 0)
            peak = allocations_of(lambda o=options: streamed_spectrum(from_blocks(blocks, contexts=2560), o)).peak
        assert peak <= 1.1 * memory_needed(500, 2560, 4, options)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("method", ["gram", "exact"])
def test_a_gpu_gives_the_same_spectrum(method, small):
    matrix = log_probs(dtype=torch.float32)
    on_cpu, on_gpu = (
        streamed_spectrum(matrix, SpectrumOptions(method=method, block_contexts=64, device=device))
        for device in ("cpu", "cuda")
    )
    np.testing.assert_allclose(on_gpu.singular_values, on_cpu.singular_values, atol=on_cpu.noise_floor)
    assert on_gpu.press32_rank == WIDTH + 2
