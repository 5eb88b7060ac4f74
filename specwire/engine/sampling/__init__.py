"""The sampling contract: counter-based noise, processors, filters, acceptance (docs/design.md section 3)."""
