"""How many drafts a step verifies: schedule, budget, costs and calibration, in numpy."""
