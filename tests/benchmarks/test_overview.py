"""The tables of the front page: fair baselines, verdicts both ways, prices beside our own softmax."""

from dataclasses import replace
from pathlib import Path

import overview
import pytest
import time_memory
import write_overview
from overview import LINEAR, LOGITS, PEAKED, Suites
from tests.records import samples
from write_docs import CaseResult

from sigsoftmax.records.schemas.speed import Measurement

PLACE = replace(
    samples.environment("python benchmarks/gpu.py", device="a GPU"),
    commit="0123456789",
    clean=True,
    libraries=("triton 3.6.0", "liger-kernel 0.8.5"),
)


def measurement(case: str, implementation: str, milliseconds: float, mib: float | None = 1.0, **more) -> Measurement:
    return samples.measurement(
        suite="gpu",
        case=case,
        implementation=implementation,
        milliseconds=milliseconds,
        milliseconds_quartiles=(milliseconds, milliseconds),
        peak_mib=mib,
        **more,
    )


def case(name: str, **times: tuple[float, float | None]) -> CaseResult:
    rows = tuple(measurement(name, implementation, *costs) for implementation, costs in times.items())
    return CaseResult(name, rows, PLACE)


def suites(*cases: CaseResult) -> Suites:
    return Suites({found.name: found for found in cases}, {})


def row_of(text: str, beginning: str) -> list[str]:
    line = next(line for line in text.splitlines() if line.startswith(f"| {beginning}"))
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_verdicts_name_the_fastest_of_the_others_and_say_slower_where_ours_is() -> None:
    text = overview.verdicts(
        suites(
            case(
                LOGITS,
                **{"torch softmax": (4.0, 100.0), "Liger softmax, in place": (2.0, None), "ours softmax": (1.0, 1.0)},
            ),
            case(
                "a classifier's bf16 logits, N=1024 V=1000",
                **{
                    "torch softmax": (0.159, 3.9),
                    "torch softmax with label smoothing": (0.599, 3.9),
                    "ours softmax": (0.229, 0.0),
                },
            ),
        )
    )
    logits, classifier = row_of(text, "given logits, 8,192"), row_of(text, "given logits, 1,024")
    assert logits[-1] == "faster: 0.50x of Liger"
    # Equal options: not the torch loss with label smoothing, which takes longer.
    assert classifier[-1] == "**slower**: 1.44x of torch"
    assert "commit 0123456" in text
    assert "liger-kernel 0.8.5" in text


@pytest.mark.parametrize(("ours", "words"), [(0.96, "faster"), (0.98, "level"), (1.02, "level"), (1.04, "**slower**")])
def test_times_within_three_percent_are_level(ours: float, words: str) -> None:
    base = measurement("x", "torch softmax", 1.0)
    assert overview.verdict(replace(base, milliseconds=ours), {"torch": base}).startswith(f"{words}: ")


def test_the_table_beside_peers_has_errors_on_random_and_on_peaked_logits() -> None:
    def rows(name: str, ours: float, cut: float) -> CaseResult:
        return CaseResult(
            name,
            (
                measurement(name, "torch softmax", 49.0, 10_958.0),
                measurement(name, "cut-cross-entropy softmax", 97.0, 1.5, gradient_error=cut),
                measurement(name, "ours sigsoftmax, default", 43.7, 629.0, gradient_error=ours),
                measurement(name, "ours softmax, fast", 39.6, 501.0, gradient_error=1.31),
            ),
            PLACE,
        )

    text = overview.peers(suites(rows(LINEAR, 1.0, 7.43), rows(PEAKED[LINEAR], 1.0, 0.34)))
    assert row_of(text, "gradient error at d = 4,096, random")[1:] == ["1", "–", "–", "7.43", "1.00", "1.31"]
    assert row_of(text, "gradient error at d = 4,096, peaked")[1:] == ["1", "–", "–", "0.34", "1.00", "1.31"]
    assert "| mixtures of them |" in text
    costs = row_of(text, "linear layer and loss, 8,192 x 4,096")[1:]
    # What was measured is another member than the others compute, which the cell says. The least time is bold.
    assert costs == [
        "49.0 ms, 10,958 MiB",
        "–",
        "–",
        "97.0 ms, 1.5 MiB",
        "43.7 ms, 629 MiB (sigsoftmax)",
        "**39.6 ms, 501 MiB**",
    ]


def test_the_least_time_beside_peers_is_bold_whosever_it_is() -> None:
    times = {
        "torch.compile softmax": (39.5, 2_004.0),
        "ours softmax, default": (43.7, 629.0),
        "ours softmax, fast": (39.6, 501.0),
    }
    costs = row_of(overview.peers(suites(case(LINEAR, **times))), "linear layer and loss, 8,192 x 4,096")[1:]
    assert costs == ["–", "**39.5 ms, 2,004 MiB**", "–", "–", "43.7 ms, 629 MiB", "39.6 ms, 501 MiB"]


def test_prices_are_ratios_to_our_own_softmax() -> None:
    name = "cross-entropy of bf16 logits without the host (CUDA graphs), N=8192 V=128256"
    times = {"softmax": 1.0, "sigsoftmax": 1.08, "gss(k=0.2)": 2.2, "sigmoid": 2.2, "relu": 1.5, "softcap": 2.0}
    members = {f"ours {member}": (2.0 * ratio, None) for member, ratio in times.items()}
    options = {"ours sigsoftmax with label smoothing": (9.0, None), "ours gss with learned k and c": (5.0, None)}
    found = suites(
        case(name, **members, **options),
        # Two members are no list of prices, and must not take its place.
        case(LOGITS, **{"ours softmax": (1.0, 1.0), "ours sigsoftmax": (7.0, 1.0)}),
    )
    text = overview.prices(found)
    assert row_of(text, "`sigsoftmax`") == ["`sigsoftmax`", "1.08x"]
    assert row_of(text, "gss with learned k and c") == ["gss with learned k and c", "2.50x"]
    assert "smoothing" not in text
    front = write_overview.members(found)
    assert row_of(front, "`gss`")[-2:] == ["2.20x (k=0.2)", "–"]
    assert row_of(front, "`shifted_sigsoftmax`")[-2:] == ["–", "–"]


def test_members_on_a_cpu_are_told_from_torch_and_its_compiler() -> None:
    times = {"softmax": 1.0, "sigsoftmax": 1.3, "gss(k=0.2)": 2.4, "sigmoid": 3.1, "relu": 6.6, "softcap": 8.8}
    rows = {f"ours {member}": (ratio * 80.0, 2.0) for member, ratio in times.items()}
    baselines = {"torch softmax": (250.0, 500.0), "torch.compile softmax": (130.0, 0.0)}
    found = case("cross-entropy of logits, N=2048 V=32000", **baselines, **rows)
    text = overview.cpu_members(Suites({}, {found.name: found}))
    assert "Of ours `softmax`, `sigsoftmax` take less time than torch.compile's softmax;" in text
    assert "`gss(k=0.2)`, `sigmoid` take more time than that, but less than plain torch's softmax;" in text
    assert "`relu`, `softcap` take more time than either." in text
    # Records that name no commit are of an older version, and the page says so.
    assert overview.OLDER_CPU not in text
    fast = case(found.name, **baselines, **{name: (ratio / 10.0, 2.0) for name, (ratio, _) in rows.items()})
    text = overview.cpu_members(Suites({}, {fast.name: fast}))
    assert "V=32,000. Every member with fixed parameters takes less time than torch.compile's softmax." in text
    older = replace(found, environment=replace(PLACE, commit="", clean=None))
    assert overview.OLDER_CPU in overview.cpu_members(Suites({}, {older.name: older}))
    assert overview.OLDER_CPU in overview.prices(Suites({}, {older.name: older}))
    assert "CPU, older version" in write_overview.members(Suites({}, {older.name: older}))
    assert "GPU, older version" in write_overview.members(Suites({older.name: older}, {}))


def test_without_records_the_tables_say_so() -> None:
    empty = Suites({}, {})
    for part in (overview.peers, overview.verdicts, overview.prices, overview.cpu_members, overview.targets_met):
        assert "No records" in part(empty)
    assert time_memory.panels(empty) == []


def test_time_against_memory_prefers_the_case_with_several_chunks(tmp_path: Path) -> None:
    plain = case(
        LINEAR,
        **{
            "torch.compile softmax": (40.0, 2004.0),
            "Liger softmax": (55.0, 63.0),
            "ours sigsoftmax, fast": (39.0, 501.0),
            "ours sigsoftmax, float32 buffer": (42.0, 2505.0),
            "ours sigsoftmax, default": (44.0, 629.0),
            "three matrix products alone": (37.0, 0.0),
        },
    )
    (panel,) = time_memory.panels(suites(plain))
    points = {found.name: found.places for found in panel.points}
    assert panel.member == "sigsoftmax"
    assert panel.floor == 37.0
    assert points["buffered"] == ((2505.0, 42.0),)
    assert points["Liger"] == ((63.0, 55.0),)
    sweep = case(
        f"{time_memory.SWEEP}{LINEAR}",
        **{
            "torch.compile softmax": (40.0, 2004.0),
            "ours softmax, fast, chunks of 64 MiB": (52.0, 63.0),
            "ours softmax, fast, chunks of 512 MiB": (39.0, 501.0),
        },
    )
    (panel,) = time_memory.panels(suites(plain, sweep))
    points = {found.name: found.places for found in panel.points}
    assert panel.member == "softmax"
    assert points["fast"] == ((63.0, 52.0), (501.0, 39.0))
    pytest.importorskip("matplotlib", reason="pictures need matplotlib")
    time_memory.draw([panel], tmp_path / "picture.png", "digest")
    assert write_overview.drawn_from(tmp_path / "picture.png") == "digest"
