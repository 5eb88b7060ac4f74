"""The coordinator service: admits requests, chooses how many drafts to verify, commits and streams tokens."""
