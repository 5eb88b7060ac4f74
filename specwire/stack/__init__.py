"""A stack: the services that `specwire up`, a sweep or an offline LLM starts on one machine."""
