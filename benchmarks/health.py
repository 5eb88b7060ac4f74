"""How soon a verifier's health service answers while the model prefills a long prompt.

python -m benchmarks.health [--prompt-tokens 2100] [--dtypes bfloat16 float32]
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.report import RESULTS, Bystanders, print_table, write_report
from specwire.config import VerifierConfig
from specwire.rpc import is_serving, open_channel
from tests.integration.stack import Service, coordinate

_PAUSE_S = 0.005


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt-tokens", type=int, default=2100)
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder for health.json")
    args = parser.parse_args()
    bystanders = Bystanders()
    results = [measure(args.prompt_tokens, dtype) for dtype in args.dtypes]
    print_table([*results[0]], [[str(value) for value in result.values()] for result in results])
    print(f"\nwritten to {write_report('health', {'results': results}, args.output, bystanders)}")


def measure(num_prompt_tokens: int, dtype: str) -> dict[str, Any]:
    """Latencies of health checks during the prefill, in ms, of a verifier process with the default model on all cores."""
    with tempfile.TemporaryDirectory(prefix="sw-") as folder:
        config = VerifierConfig(listen=(f"unix:{folder}/verifier",), dtype=dtype, max_model_len=num_prompt_tokens + 64)
        verifier = Service(config)
        verifier.start()
        try:
            verifier.wait_ready()
            return asyncio.run(_measure(Path(folder), verifier.address, num_prompt_tokens, dtype))
        finally:
            verifier.kill()


async def _measure(folder: Path, address: str, num_prompt_tokens: int, dtype: str) -> dict[str, Any]:
    latencies: list[float] = []
    async with coordinate(folder, [address]) as stack, open_channel(address) as channel:
        await is_serving(channel)
        # The ids matter little: no two blocks are equal, so that nothing is cached.
        prompt = [(7919 * index) % 40_000 + 100 for index in range(num_prompt_tokens)]
        started = time.perf_counter()
        prefill = asyncio.create_task(stack.client.generate(prompt, max_tokens=1))
        while not prefill.done():
            asked = time.perf_counter()
            assert await is_serving(channel, timeout_s=10.0), "the verifier is not serving any more"
            latencies.append(1e3 * (time.perf_counter() - asked))
            await asyncio.wait([prefill], timeout=_PAUSE_S)
        prefill_s = time.perf_counter() - started
        result = prefill.result()
    assert result.usage.num_cached_tokens == 0, f"{result.usage} has cached tokens"
    cuts = statistics.quantiles(latencies, n=100)
    return {
        "dtype": dtype,
        "prompt_tokens": num_prompt_tokens,
        "prefill_s": round(prefill_s, 2),
        "checks": len(latencies),
        "p50_ms": round(cuts[49], 2),
        "p99_ms": round(cuts[98], 2),
        "max_ms": round(max(latencies), 2),
    }


if __name__ == "__main__":
    main()
