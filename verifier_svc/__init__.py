"""The verifier service: runs the target model over all drafts of a step in one ragged batch."""
