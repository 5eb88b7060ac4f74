"""`specwire sweep`: the same load at several concurrencies, under several ways to choose K."""
