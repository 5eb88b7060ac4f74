"""Stands in for the real coordinator."""

import asyncio
import sys

from fake_service import serve

asyncio.run(serve("coordinator", sys.argv[1:]))
