"""A profile as text."""

from tests.profiler.test_profile import layer, model
from twobw.profiler.profile import LinkProfile, OverheadProfile
from twobw.profiler.table import profile_text


def test_all_there_is_to_read():
    profile = model(
        entries=(
            layer("Embedding"),
            layer("Block", forward_ns=1_500_000, backward_ns=3_000_000, stash_bytes=2_500_000),
        ),
        slowdown=1.25,
        overhead=OverheadProfile(op_ns=50_000, message_ns=20_000, batch_ns=300_000),
        link=LinkProfile(latency_ns=100_000, bytes_per_second=2 * 10**9),
    )
    lines = [" ".join(line.split()) for line in profile_text(profile).splitlines()]
    assert lines[0] == (
        "gpt-tiny, measured on a CPU: 1 rank of 1 thread, fp32, adamw; in ms and MB"
    )
    assert "Block 2 1 1.500 0.000 3.000 0.000 0.000 0.000 2.500 0.000 0.000" in lines
    assert "executor: 50 us a forward or backward, 20 us a message, 300 us a batch" in lines
    assert any(line.startswith("clock: 1.25 times the processor time") for line in lines)
    assert "link: 100 us, 2.00 GB/s" in lines
    assert "model: 3 layers, 6 parameters" in lines  # the tied ones once
