"""How many drafts: policies that the coordinator and the command line share. No torch here."""
