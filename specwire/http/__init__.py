"""The OpenAI-compatible HTTP API: a process of its own that calls a coordinator through the client SDK, and of which there may be many."""
