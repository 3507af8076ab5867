"""Collectives: bytes, seconds and bandwidths over ranks and lines, by hand."""

import math

from support.run_files import write_lines

from trainer.tools.report.comm import read_comm


def call(step: int, rank: int, seconds: float, bucket: int | None = 0, collective: str = "all_reduce", count: int = 10):
    size = 4_000_000
    return {
        "step": step, "rank": rank, "collective": collective, "bucket": bucket, "bytes": size, "count": count,
        "seconds": seconds, "algbw": size / seconds if seconds else 0, "busbw": 1.5 * size / seconds if seconds else 0,
    }  # fmt: skip


def test_sums_over_lines_and_ranks(tmp_path):
    """20 calls of 1 ms and 10 of 4 ms move 120 MB in 60 ms: 2 GB/s."""
    file = tmp_path / "comm.jsonl"
    write_lines(
        file, [call(10, 0, 0.001), call(20, 0, 0.001), call(10, 1, 0.004), call(10, 0, 0.5, None, "barrier", 1)]
    )
    (barrier, reduce), note = read_comm(file)
    assert note == ""
    assert (barrier.collective, barrier.bucket, barrier.calls) == ("barrier", None, 1)
    assert (reduce.calls, reduce.bytes, reduce.slowest) == (30, 120e6, 1)
    assert math.isclose(reduce.seconds, 0.06)
    assert math.isclose(reduce.algbw, 2e9) and math.isclose(reduce.busbw, 3e9)


def test_calls_that_nobody_timed(tmp_path):
    """Their bytes count, and their time does not."""
    file = tmp_path / "comm.jsonl"
    unknown = {"seconds": None, "algbw": None, "busbw": None}
    write_lines(file, [{**call(10, 0, 0.1), **unknown}, {**call(10, 0, 0.1, 1), "level": "across"}, call(20, 0, 0.004)])
    (across, inside), note = read_comm(file)
    assert note == "" and (across.level, across.bucket, inside.level, inside.bucket) == ("across", 1, "", 0)
    assert (inside.calls, inside.timed, inside.bytes) == (20, 10, 80e6)
    assert math.isclose(inside.seconds, 0.04) and math.isclose(inside.algbw, 1e9)
    write_lines(file, [{**call(10, 0, 0.1), **unknown}])
    assert read_comm(file)[0][0].slowest is None


def test_odd_lines(tmp_path):
    file = tmp_path / "comm.jsonl"
    odd = [{"step": 1}, call(1, 0, 0.1, count=0), {**call(1, 0, 0.1), "bytes": "<b>"}]
    write_lines(file, [*odd, {**call(1, 0, 0.0), "algbw": None, "rank": "x", "bucket": "y"}])
    (one,), note = read_comm(file)
    assert note == "comm.jsonl: 3 line(s) are odd, and left out"
    assert one.bucket is None and one.slowest == 0 and math.isnan(one.algbw)
