"""Rounds on a device: slot state that stays there, one upload, one captured graph and one small download a round."""
