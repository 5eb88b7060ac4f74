"""`specwire advise`: measures acceptance and cost, and finds how many drafts pay."""
