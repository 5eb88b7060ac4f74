"""Many requests at once on one connection: some in full, one under a deadline, one that is cancelled."""

import argparse
import asyncio

from specwire import AsyncClient, DeadlineExceededError


async def run(address: str) -> None:
    async with AsyncClient(address) as client:
        endless = asyncio.create_task(client.generate("This goes on and on", max_tokens=None, ignore_eos=True))

        results = await asyncio.gather(*(client.generate(f"{i} + {i} =", max_tokens=8) for i in range(20)))
        print(f"{len(results)} answers, {sum(result.usage.num_generated_tokens for result in results)} tokens")

        try:
            await client.generate("A long story:", max_tokens=400, timeout=0.05)
            print("the story was done in time")
        except DeadlineExceededError as error:
            print(f"deadline: {error}")

        endless.cancel()  # ends it at the coordinator too
        (outcome,) = await asyncio.gather(endless, return_exceptions=True)
        print(f"the endless one: {type(outcome).__name__}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--address", default="127.0.0.1:50050", help="the coordinator: host:port or unix:path")
    asyncio.run(run(parser.parse_args().address))


if __name__ == "__main__":
    main()
