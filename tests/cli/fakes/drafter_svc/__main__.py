"""Stands in for the real drafter."""

import asyncio
import sys

from fake_service import serve

asyncio.run(serve("drafter", sys.argv[1:]))
