"""Features: the target's hidden states that draft heads read, kept by block like keys and values, and shared with drafters of the same host."""
