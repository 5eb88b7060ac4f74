"""The benchmark of the services' own work runs, and its device takes the time that it is given."""

from benchmarks.host_path import measure


async def test_a_step_takes_no_less_than_the_device() -> None:
    result = await measure(num_seqs=3, num_rounds=2, device_ms=4.0, num_steps=10)
    assert result["batch a step"] >= 4.0
    assert (result["sequences"], result["W"]) == (3, 2)
