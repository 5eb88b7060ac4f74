"""Found before the real service of this name."""
