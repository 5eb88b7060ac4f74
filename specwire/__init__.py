"""Specwire: speculative decoding split into services; this package is the shared library and the client SDK."""
