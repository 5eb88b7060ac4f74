"""The load generator: workloads, arrivals, what each request measured, and what follows from it. Knows no model and no torch."""
