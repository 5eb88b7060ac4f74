"""The drafter service: guesses the next tokens of every sequence."""
