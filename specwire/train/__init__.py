"""Trains draft heads (EAGLE-3, DSpark) for a target model on the target's own answers; needs torch, and a GPU for more than a try."""
