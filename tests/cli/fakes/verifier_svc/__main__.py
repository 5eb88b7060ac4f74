"""Stands in for the real verifier."""

import asyncio
import sys

from fake_service import serve

asyncio.run(serve("verifier", sys.argv[1:]))
