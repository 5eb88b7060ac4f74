"""Draft heads: small models that read the target's hidden states."""
